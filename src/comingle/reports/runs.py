"""Run folders as plain records, and series for figures and tables."""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import yaml

from comingle.reports.comparisons import (
    BASELINE,
    BaselineComparison,
    baseline_methods,
    baseline_of,
    compare_with_baseline,
    folder_name,
    interval_of_change,
    methods_in_table,
    require_same_users,
    runs_in_table,
)
from comingle.reports.formatting import (
    additive_difference,
    as_change,
    change_text,
    interval_text,
    is_worse,
    negligible_change,
)
from comingle.utils.errors import RunError
from comingle.utils.records import MEASURES, JsonObject, geometric_mean, measure_of, read_events, read_metrics

logger = logging.getLogger(__name__)

# Recipe keys that affect neither the result nor the label of an entry.
_KEYS_WITHOUT_EFFECT = ("seed", "runtime", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of one evaluation.

    Args:
        round: The round.
        iterations: Local steps of each user so far.
        measure: The measure that models are compared by.
        users: ``users[user][measure]``, None if not finite. Users can have other measures too, as accuracy and loss.
        experts: Names of each user's experts; empty without routers.
        scores: Mean gates ``scores[user][layer][expert]``; empty without routers.
        valid_loss: Validation loss, if the run selects its best round by it.
    """

    round: int
    iterations: int
    measure: str
    users: dict[str, dict[str, float | None]]
    experts: dict[str, list[str]]
    scores: dict[str, list[list[float]]]
    valid_loss: float | None = None

    def value(self, user: str | None = None, measure: str = "", *, geometric: bool = False) -> float | None:
        """Return a user's result, or the mean over users; None if it is unknown or not finite.

        Args:
            user: The user; None for the mean over all.
            measure: Name of a measure, such as "accuracy"; empty for the measure by which models are compared.
            geometric: Return the geometric mean.
        """
        names = self.users if user is None else [user]
        values = [self.users.get(name, {}).get(measure or self.measure) for name in names]
        if geometric:
            return geometric_mean(values)
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of a run folder; ``metrics`` is None for a run that has not finished."""

    folder: Path
    method: str
    seed: int
    base: str
    planned_rounds: int
    users: tuple[str, ...]
    recipe: JsonObject
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[JsonObject, ...]
    metrics: JsonObject | None
    unit: str = "tokens"
    """Unit of the users' data: "tokens" or "samples"."""
    amounts: dict[str, int] = field(default_factory=dict)
    """Each user's amount of training data in that unit; empty if the run does not record it."""
    spent: JsonObject = field(default_factory=dict)
    """Privacy budget spent so far: largest ``epsilon`` of all users, and ``delta``; empty without privacy."""
    aggregations: tuple[JsonObject, ...] = ()
    """One event per round with an aggregation rule, with the weight of each upload."""

    @property
    def task(self) -> str:
        """Name and settings of the task in the recipe (``data.task``), as text; empty for other data."""
        task_setting: JsonObject | None = (self.recipe.get("data") or {}).get("task")
        if not task_setting:
            return ""
        # A shift of None is the task's own one, and a fraction of 1.0 keeps all data: both go without saying.
        settings = [
            f"{key} {task_setting[key]}" for key in ("shift", "fraction") if task_setting.get(key) not in (None, 1.0)
        ]
        return f"{task_setting['name']} ({', '.join(settings)})" if settings else task_setting["name"]

    @property
    def subject(self) -> str:
        """The task, or the kind of data with the names of the data set's files."""
        if self.task:
            return self.task
        data = self.recipe.get("data") or {}
        kind = data.get("kind") or ("samples" if self.unit == "samples" else "text")
        source = data.get("questions") or data.get("dataset") or {}  # sections that name files in "name" or "path"
        given = source.get("name") or source.get("path") or []
        paths = [given] if isinstance(given, str) else given
        # The last part of each path; a run may have been made on another system, with other separators.
        names = [re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in paths]
        return f"{kind} ({brief_list(names, ', ')})" if names else kind

    @property
    def chosen(self) -> Evaluation:
        """The evaluation of the run's final models: the last, or the one with the lowest validation loss."""
        known = [evaluation for evaluation in self.evaluations if evaluation.valid_loss is not None]
        return min(known, key=lambda evaluation: evaluation.valid_loss or 0.0, default=self.evaluations[-1])

    @property
    def measure(self) -> str:
        """The measure that models are compared by."""
        return self.evaluations[-1].measure

    @property
    def routed(self) -> bool:
        """Whether the last evaluation has scores of routers."""
        return bool(self.evaluations[-1].scores)

    @cached_property
    def key(self) -> tuple[tuple[str, object], ...]:
        """Recipe settings that affect the result, except for the seed: sorted pairs of dotted recipe key and value.

        Runs with equal keys differ only in their seeds.
        """
        settings = {key: value for key, value in self.recipe.items() if key not in _KEYS_WITHOUT_EFFECT}
        section = settings.pop("evaluation", None) or {}
        # Of the evaluation, only these two affect the result; how often a run is evaluated does not.
        evaluation = {"model": section.get("model"), "select": section.get("select", "last")}
        return tuple(sorted(_flattened({**settings, "evaluation": evaluation}).items()))


def brief_list(names: Sequence[str], last: str) -> str:
    """Join names with commas, and the last two with ``last``; of more than 4 names give 3 and a count."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return last.join(filter(None, [", ".join(names[:-1]), names[-1]]))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Runs that differ only in their seeds, with a common label."""

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
        """Whether the method trains."""
        return self.first.planned_rounds > 0


# -------------------------------------------------------------------- reading


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the given run folders and those inside folders of comparisons, each once.

    Raises:
        RunError: A path is neither.
    """
    by_path: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path}: no such run folder")
        inside = [path] if (path / "events.jsonl").is_file() else _runs_of_comparison(path)
        if not inside:
            raise RunError(_no_runs_message(path))
        for folder in inside:
            by_path.setdefault(folder.resolve(), folder)
    return list(by_path.values())


def _no_runs_message(path: Path) -> str:
    """Return the message about a folder without runs; it names runs in a folder ``runs`` inside or beside it."""
    runs = path / "runs" if (path / "runs").is_dir() else path.parent / "runs"
    message = f"{path}: neither a run folder (no events.jsonl in it) nor a folder of run folders"
    names = sorted(file.parent.name for file in runs.glob("*/events.jsonl"))
    return f"{message}; give folders of {runs}: {brief_list(names, ' and ')}" if names else message


def _runs_of_comparison(path: Path) -> list[Path]:
    """Return the run folders in a comparison's folder, in the order of the methods in its ``table.json``.

    The runs that the table does not have are left out with a warning, so that all views of a comparison have the same
    runs. Without a readable table, and for tables without seeds, all runs are returned. Methods that the table lacks
    are then last, in alphabetical order.
    """
    folders = sorted(file.parent for file in path.glob("*/events.jsonl"))
    rank = {folder_name(method): number for number, method in enumerate(methods_in_table(path))}
    # Run folders are named METHOD-seedN.
    folders.sort(key=lambda folder: rank.get(folder.name.rpartition("-seed")[0], len(rank)))
    names = {f"{folder_name(method)}-seed{seed}" for method, seed in runs_in_table(path)}
    if not names.intersection(folder.name for folder in folders):
        return folders
    if left_out := [folder.name for folder in folders if folder.name not in names]:
        logger.warning(
            "%s: left out, since they are not in its table.json: %s; `comingle compare --resume` adds finished runs "
            "that can be compared",
            path,
            brief_list(left_out, " and "),
        )
    return [folder for folder in folders if folder.name in names]


def read_run(folder: Path) -> RunRecord:
    """Read a run, finished or not.

    Raises:
        RunError: It has no evaluation yet, or its recipe cannot be read.
    """
    events = list(read_events(folder))
    start = next((event for event in events if event["event"] == "start"), None)
    evaluations = [event for event in events if event["event"] == "evaluation"]
    if start is None or not evaluations:
        raise RunError(f"{folder}: no evaluation in its events.jsonl yet; try again after the first evaluation")
    recipe = _read_recipe(folder)
    local_steps = recipe.get("training", {}).get("local_steps", 1)  # for events of older runs, which lack iterations
    return RunRecord(
        folder=folder,
        method=start["method"],
        seed=start["seed"],
        base=start["base"],
        planned_rounds=start["rounds"],
        users=tuple(start["users"]),
        recipe=recipe,
        evaluations=tuple(_evaluation_of(event, local_steps) for event in evaluations),
        rounds=tuple(event for event in events if event["event"] == "round"),
        metrics=read_metrics(folder) if (folder / "metrics.json").exists() else None,
        unit=_unit(start["users"]),
        amounts=_amounts(start["users"], f"train_{_unit(start['users'])}"),
        spent=next((event for event in reversed(events) if event["event"] == "privacy"), {}),
        aggregations=tuple(event for event in events if event["event"] == "aggregation"),
    )


def _unit(users: Mapping[str, Mapping[str, object]]) -> str:
    """Return the unit of the users' data in a start event."""
    counted = next(iter(users.values()), {})
    return "samples" if "train_samples" in counted else "tokens"


def _amounts(users: dict[str, JsonObject], key: str) -> dict[str, int]:
    """Return each user's value of a key in a start event; empty if a user does not have it."""
    return {name: user[key] for name, user in users.items()} if all(key in u for u in users.values()) else {}


def _read_recipe(folder: Path) -> JsonObject:
    """Return the content of a run's recipe file, which is not checked: it may be of an older version.

    Raises:
        RunError: It is missing, not YAML, or not a mapping.
    """
    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{folder}: its recipe.yaml cannot be read ({type(error).__name__})") from None
    if not isinstance(recipe, dict):
        raise RunError(f"{folder}: its recipe.yaml is not a recipe")
    return recipe


def _evaluation_of(event: JsonObject, local_steps: int) -> Evaluation:
    """Return the record of an evaluation event.

    Args:
        event: The event.
        local_steps: Local steps in a round, for events of older runs.
    """
    return Evaluation(
        round=event["round"],
        iterations=event.get("iterations", event["round"] * local_steps),  # missing in older runs
        measure=measure_of(event),
        users={name: _without_prefix(user) for name, user in event["users"].items()},
        experts=event.get("experts", {}),
        scores=event.get("expert_scores", {}),
        valid_loss=event.get("mean_valid_loss"),
    )


def _without_prefix(user: dict[str, float | None]) -> dict[str, float | None]:
    """Return a user's test results by measure, whose keys in events begin with ``test_``."""
    return {key.removeprefix("test_"): value for key, value in user.items()}


# -------------------------------------------------------------------- grouping


def read_entries(paths: Sequence[Path]) -> list[Entry]:
    """Read all runs in and below ``paths`` and group those that differ only in their seeds.

    Of runs with the same recipe and seed the first counts; the others are left out with a warning.

    Raises:
        RunError: There are no runs, or they have different users or measures.
    """
    runs = [read_run(folder) for folder in find_runs(paths)]
    for run in runs[1:]:
        if run.measure != runs[0].measure:
            raise RunError(
                f"{run.folder}: its models are compared by {run.measure}, those of {runs[0].folder} by "
                f"{runs[0].measure}; give runs with one measure"
            )
    require_same_users([(str(run.folder), run.users) for run in runs])
    groups: dict[str, dict[int, RunRecord]] = {}  # runs by recipe and seed
    for run in runs:
        first = groups.setdefault(repr(run.key), {}).setdefault(run.seed, run)
        if first is not run:
            logger.warning("%s: left out, since its recipe and seed are those of %s", run.folder, first.folder)
    runs_of_entries = [tuple(by_seed[seed] for seed in sorted(by_seed)) for by_seed in groups.values()]
    labels = _labels([group[0] for group in runs_of_entries])
    return [Entry(label=label, runs=group) for label, group in zip(labels, runs_of_entries, strict=True)]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return a label for each run: its name in a comparison or its method's name, if these names are unique.

    Otherwise the label is ``METHOD (KEY VALUE, ...)``, with the settings of the method in which its runs differ, and
    all other keys in which any two runs differ.
    """
    names = {folder: methods_in_table(folder) for folder in {run.folder.parent for run in runs}}
    labels = [_label_in_comparison(run, names[run.folder.parent]) for run in runs]
    if len(set(labels)) == len(labels):
        return labels
    common_keys = {
        key
        for key in _differing_keys([_settings_of(run, full_privacy=False) for run in runs])
        if not key.startswith("method.")
    }
    labels = []
    for run in runs:
        same_method = [other for other in runs if other.method == run.method]
        # Without privacy there is no setting of it, so that all settings of a private run would differ. Then only the
        # mechanism is listed, under the key "privacy".
        all_private = all(other.recipe.get("privacy") for other in same_method)
        settings_of_method = [_settings_of(other, full_privacy=all_private) for other in same_method]
        keys = common_keys | _differing_keys(settings_of_method)
        if "privacy.mechanism" in keys:  # the same as "privacy"
            keys -= {"privacy"}
        # The first has the key "privacy", the second the single settings if all runs are private.
        settings = _settings_of(run, full_privacy=False) | _settings_of(run, full_privacy=all_private)
        differing = [f"{key.rpartition('.')[2]} {_shortened(settings.get(key))}" for key in sorted(keys)]
        labels.append(f"{run.method} ({', '.join(differing)})" if differing else run.method)
    return labels


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Return the recipe keys in which runs differ, apart from the base, the method and the data, in order.

    Of privacy only the mechanism counts. A key that a run lacks, as runs of older versions may, does not count.
    """
    settings = [_settings_of(run, full_privacy=False) for run in runs]
    # RunRecord.key has this key in any case, with the value None for a recipe without it.
    lacking = ("evaluation.model", None)
    in_all = set.intersection(
        *({key for key, value in of_run.items() if (key, value) != lacking} for of_run in settings)
    )
    ignored = ("base", "method.", "data.")
    return sorted(key for key in _differing_keys(settings) & in_all if not key.startswith(ignored))


def _differing_keys(settings: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the keys that do not have the same value in all settings."""
    keys = {key for of_run in settings for key in of_run}
    return {key for key in keys if any(of_run.get(key) != settings[0].get(key) for of_run in settings)}


def _label_in_comparison(run: RunRecord, names: Sequence[str]) -> str:
    """Return the name of a run's method in the comparison that has the run, or else the method's name.

    Args:
        run: The run.
        names: Names of the methods in the comparison, as ``NAME:KEY=VALUE``; empty if there is none.
    """
    in_folder = run.folder.name.rpartition("-seed")[0]
    named = [name for name in names if folder_name(name) == in_folder and name.partition(":")[0] == run.method]
    return named[0] if named else run.method  # methods in a comparison have different folder names


def _settings_of(run: RunRecord, *, full_privacy: bool) -> dict[str, object]:
    """Return the settings that may distinguish a run from others, by dotted recipe key, for its label.

    Args:
        run: The run.
        full_privacy: Whether to keep all settings of privacy. Otherwise only the mechanism is kept: against a run
            without privacy, every setting of privacy differs, which would make the label long.
    """
    settings = {key: value for key, value in run.key if value != {}}  # an empty section is the same as none
    if full_privacy:
        return settings
    others = {key: value for key, value in settings.items() if not key.startswith("privacy")}
    return others | {"privacy": (run.recipe.get("privacy") or {}).get("mechanism", "none")}


def _flattened(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one, whose keys are dotted paths that begin with ``prefix``.

    An empty mapping stays as a value.
    """
    flat: JsonObject = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= _flattened(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def _shortened(value: object) -> str:
    """Return a setting's value as text of at most 24 characters, by cutting its middle; None is "default"."""
    text = "default" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 24 else f"{text[:10]}…{text[-10:]}"


BASELINES = ("local", "fedavg")
"""Methods that each user's results are compared with: training alone, and averaging everything."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation over seeds; ``std`` is None for a single seed."""

    mean: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A quantity at each evaluation, against local steps."""

    iterations: tuple[int, ...]
    values: tuple[Spread, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertCurves:
    """One expert's score in each layer, first layer first."""

    name: str
    layers: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Change of a user's final test result against a baseline.

    ``change`` is in the unit of :func:`comingle.reports.formatting.change`: percentage points of accuracies, per cent
    of perplexities, powers of ten of losses. Its mean over seeds is that of :func:`additive_difference`, so for
    perplexities and losses the ratio of geometric means, as in :mod:`comingle.reports.comparisons`. ``interval`` is the
    95% confidence interval of this mean (Student's t), None for a single seed, and for shares that change equally with
    all seeds.
    """

    user: str
    measure: str
    change: Spread
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """One of :func:`verdicts`.

        "gained" and "harmed" need several seeds and an interval without 0. A single seed is "lower (one seed)" or
        "higher (one seed)", or "level" below :func:`comingle.reports.formatting.negligible_change`. Several seeds
        without an interval are "level".
        """
        if self.interval is None and self.change.std is not None:  # several seeds with equal results
            return "level"
        if self.interval is None:
            side = "lower" if self.change.mean < 0 else "higher"
            return "level" if abs(self.change.mean) < negligible_change(self.measure) else f"{side} (one seed)"
        if self.interval[0] <= 0 <= self.interval[1]:
            return "level"
        return "harmed" if is_worse(self.change.mean, self.measure) else "gained"

    @property
    def text(self) -> str:
        """The change as text."""
        return change_text(self.change.mean, self.measure)

    @property
    def named_text(self) -> str:
        """User, change and interval as text: "ann -9.7% (-12.0 to -7.4)", or "ann (-9.7%)" without an interval."""
        if self.interval is None:
            return f"{self.user} ({self.text})"
        return f"{self.user} {self.text} ({interval_text(self.interval, self.measure)})"


def gain_over_seeds(name: str, measure: str, differences: Sequence[float], *, num_intervals: int = 1) -> Gain:
    """Return the gain of a user, or of a mean over users, from one :func:`additive_difference` per seed.

    Mean and interval are computed of the differences and then converted to changes.

    Args:
        name: Name of the user.
        measure: Name of the measure of the results, such as "perplexity".
        differences: The differences, at least one.
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    changes = [as_change(difference, measure) for difference in differences]
    return Gain(
        user=name,
        measure=measure,
        change=replace(spread(changes), mean=as_change(statistics.fmean(differences), measure)),
        interval=interval_of_change(differences, measure, num_intervals=num_intervals),
    )


def verdicts(measure: str) -> tuple[str, ...]:
    """Return all verdicts from the best to the worst."""
    single_seed = ("lower (one seed)", "higher (one seed)")
    good, bad = single_seed if MEASURES[measure] == "lower" else single_seed[::-1]
    return ("gained", good, "level", bad, "harmed")


def spread(values: Sequence[float]) -> Spread:
    """Return the mean and the sample standard deviation of at least one value."""
    return Spread(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)


# -------------------------------------------------------------------- over training


def learning_curve(entry: Entry, user: str | None = None, measure: str = "", *, geometric: bool = False) -> Curve:
    """Return the results of a user, or the mean over users, at each evaluation.

    The curve has the arithmetic mean and the standard deviation of these results over seeds, for each number of local
    steps. An evaluation of a seed is left out if the result of the user, or of any user for a mean, is not finite.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        user: The user; None for the mean over all.
        measure: Name of a measure, such as "accuracy"; empty for the measure by which models are compared.
        geometric: Take the geometric mean over users instead of the arithmetic one.
    """
    return _curve_of(entry, lambda evaluation: evaluation.value(user, measure, geometric=geometric))


def expert_curves(entry: Entry, user: str) -> list[ExpertCurves]:
    """Return the mean gate of each of a user's experts in each layer over training (CoMiGS, Figures 4 and 10).

    Empty if the user's model has no routers.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        user: The user's name.
    """
    last = entry.first.evaluations[-1]  # names of experts and the number of layers are equal in all evaluations
    names, num_layers = last.experts.get(user, []), len(last.scores.get(user, []))

    def score_curve(layer: int, expert: int) -> Curve:
        return _curve_of(entry, lambda evaluation: _score_of(evaluation, user, layer, expert))

    return [
        ExpertCurves(name=name, layers=tuple(score_curve(layer, expert) for layer in range(num_layers)))
        for expert, name in enumerate(names)
    ]


def _score_of(evaluation: Evaluation, user: str, layer: int, expert: int) -> float | None:
    """Return an expert's score in a layer for a user; None if the user has none in this evaluation."""
    layers = evaluation.scores.get(user)
    return layers[layer][expert] if layers else None


def _curve_of(entry: Entry, value: Callable[[Evaluation], float | None]) -> Curve:
    """Return a quantity at each evaluation, with mean and deviation over seeds.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        value: Returns the quantity of an evaluation; None where it is unknown, which is left out.
    """
    results: dict[int, list[float]] = {}  # for each number of local steps, one value per seed
    for run in entry.runs:
        for evaluation in run.evaluations:
            if (result := value(evaluation)) is not None:
                results.setdefault(evaluation.iterations, []).append(result)
    iterations = tuple(sorted(results))
    return Curve(iterations=iterations, values=tuple(spread(results[steps]) for steps in iterations))


def common_measures(entries: Sequence[Entry]) -> list[str]:
    """Return the measures that can be shown for all runs.

    The first is the one that models are compared by; others are those that each user of each run has in its final
    evaluation.
    """
    evaluations = [run.chosen for entry in entries for run in entry.runs]  # those of the runs' final models
    users = [user for evaluation in evaluations for user in evaluation.users.values()]
    others = [measure for measure in MEASURES if all(measure in user for user in users)]
    return list(dict.fromkeys([evaluations[0].measure, *others]))


# -------------------------------------------------------------------- at the end


def final(entry: Entry, user: str | None = None, *, geometric: bool = False) -> Spread | None:
    """Return the final test result of a user, or the mean over users; None if a seed's result is not finite.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        user: The user; None for the mean over all.
        geometric: Return the geometric mean.
    """
    values = [run.chosen.value(user, geometric=geometric) for run in entry.runs]
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None


def gains(entry: Entry, baseline: Entry) -> list[Gain]:
    """Return each user's change against a baseline, paired by seed, best first.

    Users without a finite result for some seed are left out.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        baseline: Runs that they are compared with, each with the run of its seed.
    """
    pairs = [(run, reference) for run in entry.runs for reference in baseline.runs if run.seed == reference.seed]
    measure = entry.first.measure
    gains_of_users = []
    for user in entry.first.users:
        differences = [
            additive_difference(run.chosen.value(user), reference.chosen.value(user), measure)
            for run, reference in pairs
        ]
        finite = [value for value in differences if value is not None]
        if finite and len(finite) == len(pairs):
            gains_of_users.append(gain_over_seeds(user, measure, finite))
    return sorted(gains_of_users, key=lambda gain: gain.change.mean, reverse=MEASURES[measure] == "higher")


def baselines(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of ``local`` and ``fedavg``, if there are any."""
    by_method = [[entry for entry in entries if entry.method == name] for name in BASELINES]
    return [entry for of_method in by_method for entry in of_method]


def compared(entries: Sequence[Entry], baseline: Entry) -> list[tuple[Entry, list[Gain]]]:
    """Return the gains of each other trained entry's users against ``baseline``."""
    others = [entry for entry in entries if entry is not baseline and entry.trained]
    return [(entry, gains_of_entry) for entry in others if (gains_of_entry := gains(entry, baseline))]


def baseline_comparison(entries: Sequence[Entry], wanted: str | None = None) -> BaselineComparison | None:
    """Compare every other entry with a baseline.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        wanted: The label or method of the baseline, or several with commas between, of which the best counts; None for
            ``local``, or else the first entry.

    Returns:
        The comparison; None with one entry or one seed.

    Raises:
        RecipeError: No entry has this label or method.
    """
    labels = [entry.label for entry in entries]
    label_of_method = {entry.method: entry.label for entry in reversed(entries)}  # of the first entry of a method
    names = baseline_methods(wanted or BASELINE)
    chosen = [name if name in labels else label_of_method.get(name, name) for name in names]
    # Without ``wanted`` and without an entry of the default baseline, None makes baseline_of take the first entry.
    baseline = ",".join(chosen) if wanted or chosen[0] in labels else None
    results = {
        entry.label: {run.seed: {user: run.chosen.value(user) for user in run.users} for run in entry.runs}
        for entry in entries
    }
    return compare_with_baseline(results, entries[0].first.measure, baseline_of(labels, baseline))


# -------------------------------------------------------------------- costs


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Measured costs of an entry: totals over all users and rounds, means over seeds.

    Bytes per user and round, and measured values, are None if no run has finished.
    """

    label: str
    rounds: int
    upload_bytes: float
    download_bytes: float
    upload_bytes_per_user_round: float | None
    download_bytes_per_user_round: float | None
    trainable_parameters: int | None
    per_second: Spread | None
    """Tokens or samples per second of local work."""
    wall_seconds: Spread | None
    peak_memory_bytes: float | None
    place: str


def cost(entry: Entry) -> Cost:
    """Return the measured costs of an entry, from its events and from the metrics of finished runs."""
    finished = [run.metrics for run in entry.runs if run.metrics is not None]

    def mean(key: str) -> Spread | None:
        """Return a metric over seeds; None if no run has finished."""
        return spread([metrics[key] for metrics in finished]) if finished else None

    def total(key: str) -> float:
        """Return the sum of a key of round events over the rounds, as a mean over seeds."""
        return statistics.fmean(sum(event.get(key, 0) for event in run.rounds) for run in entry.runs)

    metrics = finished[0] if finished else None  # seeds have equal sizes of uploads and models
    return Cost(
        label=entry.label,
        rounds=max(run.evaluations[-1].round for run in entry.runs),
        upload_bytes=total("upload_bytes"),
        download_bytes=total("download_bytes"),
        upload_bytes_per_user_round=metrics["upload_bytes_per_user_round"] if metrics else None,
        download_bytes_per_user_round=metrics["download_bytes_per_user_round"] if metrics else None,
        trainable_parameters=metrics["trainable_parameters"] if metrics else None,
        per_second=mean(f"{entry.first.unit}_per_second") if metrics and entry.trained else None,
        wall_seconds=mean("wall_seconds"),
        peak_memory_bytes=max(metrics["peak_memory_bytes"] for metrics in finished) if finished else None,
        place=f"{metrics['dtype']} on {metrics['device']}" if metrics else "",
    )


def epsilon_text(entry: Entry) -> str:
    """Return the epsilon of an entry as text: the largest of all users and runs, or why there is none."""
    # ``spent`` is the last privacy event of a run; empty without privacy.
    if all(run.spent for run in entry.runs):
        return f"{max(run.spent['epsilon'] for run in entry.runs):.3g}"
    has_uploads = any(event["upload_bytes"] for run in entry.runs for event in run.rounds)
    return "no bound" if has_uploads else "nothing is sent"
