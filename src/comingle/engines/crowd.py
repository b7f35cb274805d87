"""What those who draw curves are told of many users: how their numbers are spread, not each one's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from comingle.engines.trackers import Tracker
from comingle.utils.records import measure_of

MOST_SERIES = 100
"""Users of a run up to whom each has numbers of their own in TensorBoard, Weights & Biases and MLflow."""

_SPREAD = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "largest": 1.0}


class Summarised:
    """A tracker of a run of more users than can be looked at one by one."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self.close = tracker.close

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        self._tracker(spread(event))


def spread(event: dict[str, Any]) -> dict[str, Any]:
    """The event with least, 10%, 50%, 90% and largest in the place of users' names, and the mean where that is missing.

    >>> spread({"event": "round", "train_loss_nats": {"ann": 1.0, "bob": 3.0}})["train_loss_nats"]["mean"]
    2.0
    """
    if event["event"] == "round" and event["train_loss_nats"]:
        losses = event["train_loss_nats"].values()
        return event | {"train_loss_nats": {"mean": fmean(losses)} | _quantiles(losses)}
    if event["event"] != "evaluation" or not event["users"]:
        return event
    name = f"test_{measure_of(event)}"
    scores = _quantiles([score[name] for score in event["users"].values()])
    return event | {"users": {part: {name: value} for part, value in scores.items()}} | _experts(event)


def _quantiles(values: Collection[float]) -> dict[str, float]:
    # As numbers that there are: what diverged is infinite, and nothing lies between that and another.
    found = np.quantile(np.fromiter(values, float), list(_SPREAD.values()), method="nearest")
    return dict(zip(_SPREAD, found.tolist(), strict=True))


def _experts(event: Mapping[str, Any]) -> dict[str, Any]:
    """Experts' scores as a mean over users, where all have experts of the same names; else nothing of them."""
    scores = event.get("expert_scores")
    if not scores:
        return {}
    names = [event["experts"][user] for user in scores]
    if any(other != names[0] for other in names):
        return {"expert_scores": {}}
    layers = zip(*scores.values(), strict=True)
    means = [[fmean(of_expert) for of_expert in zip(*layer, strict=True)] for layer in layers]
    return {"expert_scores": {"mean": means}, "experts": {"mean": names[0]}}
