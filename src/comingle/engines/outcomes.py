"""Warnings about a finished run: it ends worse than it began, or its mixtures have not left their start."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comingle.methods.base import ROUTERS, Method
from comingle.utils.records import MEASURES, number

Event = Mapping[str, Any]

_UNIFORM = 0.02
"""Largest distance of a share from 1/C, relative to it, at which a mixture counts as uniform."""


class Evaluations:
    """An observer that keeps the first evaluation of a run and the last; the others are forgotten."""

    def __init__(self, earlier: Iterable[Event] = ()) -> None:
        self.first: Event | None = None
        self.last: Event | None = None
        for event in earlier:
            self(event)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event["event"] == "evaluation":
            self.first, self.last = self.first or event, event


def outcome_warnings(method: Method, evaluations: Evaluations, metrics: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return ``{"warnings": [...]}`` to merge into a finished run's metrics, or an empty dict.

    Warns if the test results got worse, or if learned mixtures stayed uniform.

    Args:
        method: the method of the run.
        evaluations: the first and last evaluation events of the run.
        metrics: the metrics of the finished run.
    """
    found = [*_worse(evaluations.first, metrics), *_uniform(method, evaluations)]
    return {"warnings": found} if found else {}


def _worse(first: Event | None, metrics: Mapping[str, Any]) -> Sequence[str]:
    """Compare the mean over users with that of the first evaluation."""
    measure = metrics["measure"]
    key, ended = f"mean_test_{measure}", metrics["rounds"]
    if first is None or not ended or first["round"] >= ended or not metrics["users"]:
        return ()
    before, after = first[key], metrics[key]
    began = "before training" if first["round"] == 0 else f"after round {first['round']}"
    if before is None or not math.isfinite(before):
        return ()
    if first["round"] == metrics["selected_round"] == 0:
        return (f"no round is better than the start, so the run ends with the models {began}. {_remedy(metrics)}",)
    if not _is_worse(before, after, measure):
        return ()
    users = [name for name in metrics["users"] if name in first["users"]]
    worse = [name for name in users if _is_worse(_of(first, name, measure), _of(metrics, name, measure), measure)]
    return (
        f"the run ends worse than it began: mean test {measure} {number(_finite(after), measure)} after round {ended}, "
        f"{number(before, measure)} {began}; worse for {len(worse)} of {len(users)} users. {_remedy(metrics)}",
    )


def _remedy(metrics: Mapping[str, Any]) -> str:
    rate = "a lower training.experts.learning_rate, fewer rounds or more data may help"
    if (privacy := metrics.get("privacy")) is None:
        return rate[0].upper() + rate[1:]
    told = f"epsilon {privacy['epsilon']:.3g}, noise multiplier {privacy['noise_multiplier']:.3g}"
    example = "" if privacy["mechanism"] == "example" else ", or privacy.mechanism: example"
    fewer = "fewer trained parameters (adapters.rank), a larger privacy.epsilon, more users"
    return f"The noise of privacy ({told}) may be the cause: {fewer}{example}; or {rate}"


def _of(record: Mapping[str, Any], name: str, measure: str) -> float | None:
    return record["users"][name][f"test_{measure}"]


def _is_worse(before: float | None, after: float | None, measure: str) -> bool:
    if before is None or after is None or not math.isfinite(after):
        return before is not None
    return after > before if MEASURES[measure] == "lower" else after < before


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _uniform(method: Method, evaluations: Evaluations) -> Sequence[str]:
    """Look for mixtures that clients learn and that are uniform at the end."""
    learned = bool(ROUTERS & method.client.trained) or method.client.sweeps
    mixtures = (evaluations.last or {}).get("mixtures", {})
    if not learned or not mixtures or evaluations.last is evaluations.first:
        return ()
    if any(abs(share * len(row) - 1) > _UNIFORM for row in mixtures.values() for share in row):
        return ()
    count = len(next(iter(mixtures.values())))
    return (
        f"mixtures have stayed uniform: every user gives each of the {count} components about {1 / count:.3g}, as at "
        "the start, so that all users have the same model. A higher training.router.learning_rate or more rounds may "
        "help",
    )
