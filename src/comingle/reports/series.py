"""Numbers for figures and tables: means and deviations over seeds, gains over baselines, the ledger."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from comingle.reports.against import BASELINE, Against, baseline_of, hold, members
from comingle.reports.runs import Entry, Evaluation
from comingle.reports.significance import interval
from comingle.tables.measures import change, change_text, is_worse, level
from comingle.utils.records import MEASURES

BASELINES = ("local", "fedavg")
"""What each user's result is held against: alone, and with everything averaged."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation over seeds; ``std`` is None for a single seed."""

    mean: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A quantity at each evaluation, against local iterations."""

    iterations: tuple[int, ...]
    values: tuple[Spread, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertCurves:
    """One expert's score in each layer, first layer first."""

    name: str
    layers: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How far a user's last test result under one entry is from that under a baseline.

    ``change`` is in the unit of :func:`comingle.tables.measures.change`: percentage points of accuracies, per cent of
    perplexities, powers of ten of losses. ``interval`` is the 95% confidence interval of its mean over seeds
    (Student's t), None for a single seed.
    """

    user: str
    measure: str
    change: Spread
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """One of :func:`verdicts`: "gained" and "harmed" need several seeds, and an interval without 0.

        A single seed is "lower (one seed)" or "higher (one seed)", or "level" below :func:`measures.level`.
        """
        if self.interval is None:
            side = "lower" if self.change.mean < 0 else "higher"
            return "level" if abs(self.change.mean) < level(self.measure) else f"{side} (one seed)"
        if self.interval[0] <= 0 <= self.interval[1]:
            return "level"
        return "harmed" if is_worse(self.change.mean, self.measure) else "gained"

    @property
    def text(self) -> str:
        """The change in words."""
        return change_text(self.change.mean, self.measure)


def verdicts(measure: str) -> tuple[str, ...]:
    """All verdicts, from the best to the worst."""
    one = ("lower (one seed)", "higher (one seed)")
    good, bad = one if MEASURES[measure] == "lower" else one[::-1]
    return ("gained", good, "level", bad, "harmed")


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of at least one value."""
    return Spread(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)


# -------------------------------------------------------------------- over training


def learning_curve(entry: Entry, user: str | None = None, measure: str = "", *, geometric: bool = False) -> Curve:
    """What was measured of a user, or the mean over users, by default what models are compared by.

    Evaluations without a finite value are left out.
    """
    return _curve(entry, lambda evaluation: evaluation.value(user, measure, geometric=geometric))


def expert_curves(entry: Entry, user: str) -> list[ExpertCurves]:
    """How much each of a user's experts says in each layer (CoMiGS, Figures 4 and 10); empty without routers."""
    last = entry.first.evaluations[-1]
    names, layers = last.experts.get(user, []), len(last.scores.get(user, []))

    def one(layer: int, expert: int) -> Curve:
        return _curve(entry, lambda evaluation: _score(evaluation, user, layer, expert))

    return [
        ExpertCurves(name=name, layers=tuple(one(layer, expert) for layer in range(layers)))
        for expert, name in enumerate(names)
    ]


def _score(evaluation: Evaluation, user: str, layer: int, expert: int) -> float | None:
    layers = evaluation.scores.get(user)
    return layers[layer][expert] if layers else None


def _curve(entry: Entry, value: Any) -> Curve:
    by_round: dict[int, list[float]] = {}
    for run in entry.runs:
        for evaluation in run.evaluations:
            if (got := value(evaluation)) is not None:
                by_round.setdefault(evaluation.iterations, []).append(got)
    return Curve(iterations=tuple(sorted(by_round)), values=tuple(spread(by_round[x]) for x in sorted(by_round)))


def measured(entries: Sequence[Entry]) -> list[str]:
    """What was measured of every user at the end: what models are compared by, then what else all runs have."""
    ends = [run.chosen for entry in entries for run in entry.runs]
    others = [name for name in MEASURES if all(name in user for end in ends for user in end.users.values())]
    return list(dict.fromkeys([ends[0].measure, *others]))


# -------------------------------------------------------------------- at the end


def final(entry: Entry, user: str | None = None, *, geometric: bool = False) -> Spread | None:
    """The test result of a user, or the mean over users, at the end; None where a seed's is not finite."""
    values = [run.chosen.value(user, geometric=geometric) for run in entry.runs]
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None


def gains(entry: Entry, baseline: Entry) -> list[Gain]:
    """Each user's difference from a baseline, paired by seed, best first; users without finite numbers are left out."""
    pairs = [(run, other) for run in entry.runs for other in baseline.runs if run.seed == other.seed]
    measure = entry.first.measure
    by_user = []
    for user in entry.first.users:
        both = [(run.chosen.value(user), other.chosen.value(user)) for run, other in pairs]
        changes = [change(one, other, measure) for one, other in both if one is not None and other is not None]
        known = [value for value in changes if value is not None]
        if known and len(known) == len(pairs):
            by_user.append(Gain(user=user, measure=measure, change=spread(known), interval=interval(known)))
    return sorted(by_user, key=lambda gain: gain.change.mean, reverse=MEASURES[measure] == "higher")


def baselines(entries: Iterable[Entry]) -> list[Entry]:
    """The entries of ``local`` and ``fedavg``, as far as there are any."""
    by_method = [[entry for entry in entries if entry.method == name] for name in BASELINES]
    return [entry for of_method in by_method for entry in of_method]


def compared(entries: Sequence[Entry], baseline: Entry) -> list[tuple[Entry, list[Gain]]]:
    """What each other trained entry does to each user, against ``baseline``."""
    others = [entry for entry in entries if entry is not baseline and entry.trained]
    return [(entry, gains_of_entry) for entry in others if (gains_of_entry := gains(entry, baseline))]


def held(entries: Sequence[Entry], wanted: str | None = None) -> Against | None:
    """Every other entry against a baseline: the entry with the ``wanted`` label or method, else ``local``, else the
    first; None with one entry or one seed.

    Raises:
        RecipeError: none of the entries is ``wanted``.
    """
    labels = [entry.label for entry in entries]
    by_method = {entry.method: entry.label for entry in reversed(entries)}
    named = [one if one in labels else by_method.get(one, one) for one in members(wanted or BASELINE)]
    name = ",".join(named) if wanted or named[0] in labels else None
    results = {
        entry.label: {run.seed: {user: run.chosen.value(user) for user in run.users} for run in entry.runs}
        for entry in entries
    }
    return hold(results, entries[0].first.measure, baseline_of(labels, name))


# -------------------------------------------------------------------- what it cost


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an entry sent, held and took. Totals are over all users and rounds, means over seeds.

    Bytes per user and round, and everything measured, are None where no run has finished.
    """

    label: str
    rounds: int
    upload_bytes: float
    download_bytes: float
    upload_bytes_per_user_round: float | None
    download_bytes_per_user_round: float | None
    trainable_parameters: int | None
    per_second: Spread | None
    """Tokens or samples of local work."""
    wall_seconds: Spread | None
    peak_memory_bytes: float | None
    place: str


def cost(entry: Entry) -> Cost:
    """The ledger's line of an entry."""
    finished = [run.metrics for run in entry.runs if run.metrics is not None]

    def mean(key: str) -> Spread | None:
        return spread([metrics[key] for metrics in finished]) if finished else None

    def sent(key: str) -> float:
        return statistics.fmean(sum(event.get(key, 0) for event in run.rounds) for run in entry.runs)

    one = finished[0] if finished else None
    return Cost(
        label=entry.label,
        rounds=max(run.evaluations[-1].round for run in entry.runs),
        upload_bytes=sent("upload_bytes"),
        download_bytes=sent("download_bytes"),
        upload_bytes_per_user_round=one["upload_bytes_per_user_round"] if one else None,
        download_bytes_per_user_round=one["download_bytes_per_user_round"] if one else None,
        trainable_parameters=one["trainable_parameters"] if one else None,
        per_second=mean(f"{entry.first.unit}_per_second") if one and entry.trained else None,
        wall_seconds=mean("wall_seconds"),
        peak_memory_bytes=max(metrics["peak_memory_bytes"] for metrics in finished) if finished else None,
        place=f"{one['dtype']} on {one['device']}" if one else "",
    )


def bound(entry: Entry) -> str:
    """What an entry's exchanges have revealed of the user of whom most, in the run in which it was most."""
    if all(run.spent for run in entry.runs):
        return f"{max(run.spent['epsilon'] for run in entry.runs):.3g}"
    sent = any(event["upload_bytes"] for run in entry.runs for event in run.rounds)
    return "no bound" if sent else "nothing is sent"
