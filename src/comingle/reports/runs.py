"""Run folders as plain records, and series for figures and tables."""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from comingle.reports.comparisons import (
    BASELINE,
    Against,
    baseline_of,
    folder_name,
    hold,
    interval,
    members,
    require_same_users,
)
from comingle.reports.formatting import change, change_text, is_worse, negligible_change
from comingle.utils.errors import RunError
from comingle.utils.records import MEASURES, geometric_mean, measure_of, read_events, read_metrics

logger = logging.getLogger(__name__)

# What decides neither on the result nor on its name.
_ASIDE = ("seed", "runtime", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation: what was measured of each user (None if not finite), and what its routers said.

    ``valid_loss`` is the validation loss, where the run selects its best round by it.
    ``measure`` is what models are compared by, ``users[user][measure]`` each user's; some have others too, as accuracy
    and loss. ``scores[user][layer][expert]`` is a mean gate, ``experts[user]`` names the experts; both empty without
    routers.
    """

    round: int
    iterations: int
    measure: str
    users: dict[str, dict[str, float | None]]
    experts: dict[str, list[str]]
    scores: dict[str, list[list[float]]]
    valid_loss: float | None = None

    def value(self, user: str | None = None, measure: str = "", *, geometric: bool = False) -> float | None:
        """What was measured of a user, or the mean over users; None where it is not known or not finite."""
        names = self.users if user is None else [user]
        values = [self.users.get(name, {}).get(measure or self.measure) for name in names]
        if geometric:
            return geometric_mean(values)
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run folder tells. ``metrics`` is None for a run that has not finished."""

    folder: Path
    method: str
    seed: int
    base: str
    planned_rounds: int
    users: tuple[str, ...]
    recipe: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[dict[str, Any], ...]
    metrics: dict[str, Any] | None
    unit: str = "tokens"
    """What the users' data is counted in: tokens or samples."""
    amounts: dict[str, int] = field(default_factory=dict)
    """How much each user trains on, in that unit; empty where the run does not tell."""
    spent: dict[str, Any] = field(default_factory=dict)
    """What its exchanges have revealed so far: ``epsilon`` of the user of whom most, and ``delta``; else empty."""
    judged: tuple[dict[str, Any], ...] = ()
    """Of each round with a rule of ``aggregation``, whose uploads counted."""

    @property
    def task(self) -> str:
        """What the users do, in words, where that is not language."""
        task_setting: dict[str, Any] | None = (self.recipe.get("data") or {}).get("task")
        if not task_setting:
            return ""
        told = [
            f"{key} {task_setting[key]}" for key in ("shift", "fraction") if task_setting.get(key) not in (None, 1.0)
        ]
        return f"{task_setting['name']} ({', '.join(told)})" if told else task_setting["name"]

    @property
    def subject(self) -> str:
        """The task, or the kind of data with the names of the data set's files."""
        if self.task:
            return self.task
        data = self.recipe.get("data") or {}
        kind = data.get("kind") or ("samples" if self.unit == "samples" else "text")
        source = data.get("questions") or data.get("dataset") or {}
        paths = source.get("name") or source.get("path") or []
        names = [re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in ([paths] if isinstance(paths, str) else paths)]
        return f"{kind} ({brief_list(names, ', ')})" if names else kind

    @property
    def chosen(self) -> Evaluation:
        """The evaluation of the models with which it ended: the last, or that with the lowest validation loss."""
        known = [evaluation for evaluation in self.evaluations if evaluation.valid_loss is not None]
        return min(known, key=lambda evaluation: evaluation.valid_loss or 0.0, default=self.evaluations[-1])

    @property
    def measure(self) -> str:
        """What its models are compared by."""
        return self.evaluations[-1].measure

    @property
    def routed(self) -> bool:
        """Whether its last evaluation tells what routers said, of somebody."""
        return bool(self.evaluations[-1].scores)

    @cached_property
    def key(self) -> tuple[tuple[str, object], ...]:
        """Everything that tells it from another run, but for the seed."""
        kept = {key: value for key, value in self.recipe.items() if key not in _ASIDE}
        asked = kept.pop("evaluation", None) or {}
        evaluation = {"model": asked.get("model"), "select": asked.get("select", "last")}
        return tuple(sorted(_flat({**kept, "evaluation": evaluation}).items()))


def brief_list(names: Sequence[str], last: str) -> str:
    """Join names with commas, and the last two with ``last``; of more than 4 names give 3 and a count."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return last.join(filter(None, [", ".join(names[:-1]), names[-1]]))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Runs that differ only in their seed, under a name of their own."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        """The run with the lowest seed."""
        return self.runs[0]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.first.method

    @property
    def trained(self) -> bool:
        """Whether there was anything to train."""
        return self.first.planned_rounds > 0


# -------------------------------------------------------------------- reading


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders: those given, and those inside folders of comparisons, each once.

    Raises:
        RunError: a path is neither.
    """
    by_path: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path}: no such run folder")
        inside = [path] if (path / "events.jsonl").is_file() else _inside(path)
        if not inside:
            raise RunError(f"{path}: neither a run folder (no events.jsonl in it) nor a folder of run folders")
        for folder in inside:
            by_path.setdefault(folder.resolve(), folder)
    return list(by_path.values())


def _inside(path: Path) -> list[Path]:
    """The runs of a comparison, in the order of its table where there is one."""
    folders = sorted(file.parent for file in path.glob("*/events.jsonl"))
    try:
        order = [row["method"] for row in yaml.safe_load((path / "table.json").read_text(encoding="utf-8"))["methods"]]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return folders
    place = {folder_name(method): number for number, method in enumerate(order)}
    return sorted(folders, key=lambda folder: place.get(folder.name.rpartition("-seed")[0], len(place)))


def read_run(folder: Path) -> RunRecord:
    """A run, finished or not.

    Raises:
        RunError: it has not got as far as an evaluation, or its recipe cannot be read.
    """
    events = list(read_events(folder))
    start = next((event for event in events if event["event"] == "start"), None)
    evaluations = [event for event in events if event["event"] == "evaluation"]
    if start is None or not evaluations:
        raise RunError(f"{folder}: no evaluation in its events.jsonl yet; come back when the run has made one")
    recipe = _read_recipe(folder)
    local_steps = recipe.get("training", {}).get("local_steps", 1)
    return RunRecord(
        folder=folder,
        method=start["method"],
        seed=start["seed"],
        base=start["base"],
        planned_rounds=start["rounds"],
        users=tuple(start["users"]),
        recipe=recipe,
        evaluations=tuple(_evaluation(event, local_steps) for event in evaluations),
        rounds=tuple(event for event in events if event["event"] == "round"),
        metrics=read_metrics(folder) if (folder / "metrics.json").exists() else None,
        unit=_unit(start["users"]),
        amounts=_amounts(start["users"], f"train_{_unit(start['users'])}"),
        spent=next((event for event in reversed(events) if event["event"] == "privacy"), {}),
        judged=tuple(event for event in events if event["event"] == "aggregation"),
    )


def _unit(users: Mapping[str, Mapping[str, object]]) -> str:
    """What the start of a run counts its users' data in."""
    counted = next(iter(users.values()), {})
    return "samples" if "train_samples" in counted else "tokens"


def _amounts(users: dict[str, dict[str, Any]], key: str) -> dict[str, int]:
    return {name: user[key] for name, user in users.items()} if all(key in u for u in users.values()) else {}


def _read_recipe(folder: Path) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{folder}: its recipe.yaml cannot be read ({type(error).__name__})") from None
    if not isinstance(recipe, dict):
        raise RunError(f"{folder}: its recipe.yaml is not a recipe")
    return recipe


def _evaluation(event: dict[str, Any], local_steps: int) -> Evaluation:
    return Evaluation(
        round=event["round"],
        iterations=event.get("iterations", event["round"] * local_steps),  # older runs do not tell
        measure=measure_of(event),
        users={name: _measures(user) for name, user in event["users"].items()},
        experts=event.get("experts", {}),
        scores=event.get("expert_scores", {}),
        valid_loss=event.get("mean_valid_loss"),
    )


def _measures(user: dict[str, float | None]) -> dict[str, float | None]:
    return {key.removeprefix("test_"): value for key, value in user.items()}


# -------------------------------------------------------------------- grouping


def read_entries(paths: Sequence[Path]) -> list[Entry]:
    """All runs in and below ``paths``, seeds of the same recipe together.

    Raises:
        RunError: nothing to read, or the runs are not of the same users or not measured alike.
    """
    runs = [read_run(folder) for folder in find_runs(paths)]
    for run in runs[1:]:
        if run.measure != runs[0].measure:
            raise RunError(
                f"{run.folder}: its models are compared by {run.measure}, those of {runs[0].folder} by "
                f"{runs[0].measure}; give runs that are measured alike"
            )
    require_same_users([(str(run.folder), run.users) for run in runs])
    groups: dict[Any, dict[int, RunRecord]] = {}
    for run in runs:
        if (counted := groups.setdefault(repr(run.key), {}).setdefault(run.seed, run)) is not run:
            logger.warning("%s: left out, as it has the recipe and the seed of %s", run.folder, counted.folder)
    several = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in groups.values()]
    labels = _labels([group[0] for group in several])
    return [Entry(label=label, runs=group) for label, group in zip(labels, several, strict=True)]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """The method's name; where several entries share it, with the settings in which they differ."""
    labels = []
    for run in runs:
        among = [other for other in runs if other.method == run.method]
        whole = all(other.recipe.get("privacy") for other in among)
        alike = [_told(other, whole=whole) for other in among]
        of_run = _told(run, whole=whole)
        keys = sorted(
            {key for other in alike for key in of_run.keys() | other.keys() if of_run.get(key) != other.get(key)}
        )
        told = [f"{key.rpartition('.')[2]} {_short(of_run.get(key))}" for key in keys]
        labels.append(f"{run.method} ({', '.join(told)})" if told else run.method)
    return labels


def _told(run: RunRecord, *, whole: bool) -> dict[str, object]:
    """Everything that tells a run from others; not the ``whole`` of its privacy where others have none."""
    if whole:
        return dict(run.key)
    kept = {key: value for key, value in run.key if not key.startswith("privacy")}
    return kept | {"privacy": (run.recipe.get("privacy") or {}).get("mechanism", "none")}


def _flat(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _short(value: object) -> str:
    text = "default" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 24 else f"{text[:10]}…{text[-10:]}"


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

    ``change`` is in the unit of :func:`comingle.reports.formatting.change`: percentage points of accuracies, per cent
    of perplexities, powers of ten of losses. ``interval`` is the 95% confidence interval of its mean over seeds
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
            return "level" if abs(self.change.mean) < negligible_change(self.measure) else f"{side} (one seed)"
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
