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
    DEFAULT_BASELINE,
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
    MOST_ROWS,
    additive_difference,
    as_change,
    change_text,
    epsilon_of,
    interval_text,
    is_worse,
    negligible_change,
)
from comingle.utils.errors import RunError, list_names
from comingle.utils.records import (
    MEASURES,
    JsonMapping,
    JsonObject,
    client_models,
    geometric_mean,
    measure_of,
    number,
    read_events,
    read_metrics,
)

logger = logging.getLogger(__name__)

# Sections of a recipe that do not affect the result, and the seed.
_KEYS_WITHOUT_EFFECT = ("seed", "runtime", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of one evaluation.

    Args:
        round: The round.
        iterations: Local steps of each user so far.
        measure: The measure that models are compared by.
        results: ``results[user][measure]``, None if not finite; users can have several measures, as accuracy and loss.
        experts: Names of each user's experts; empty without routers.
        scores: Mean gates ``scores[user][layer][expert]``; empty without routers.
        valid_loss: Validation loss, if the run selects its best round by it.
    """

    round: int
    iterations: int
    measure: str
    results: dict[str, dict[str, float | None]]
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
        measure = measure or self.measure
        names = list(self.results) if user is None else [user]
        values = [self.results.get(name, {}).get(measure) for name in names]
        if geometric:
            return geometric_mean(values)
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return sum(known) / len(known)


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
    start: JsonObject = field(default_factory=dict)
    """The first event, with ``specialists`` if users have different numbers, and ``continues`` if it continues a run.
    """
    spent: JsonObject = field(default_factory=dict)
    """Privacy budget spent so far: largest ``epsilon`` of all users, and ``delta``; empty without privacy."""
    aggregations: tuple[JsonObject, ...] = ()
    """One event per round with an aggregation rule, with the weight of each upload."""

    @property
    def task(self) -> str:
        """Name and settings of the task (``data.task``), such as "digits (shift 0.5)"; empty for other data."""
        section: JsonObject | None = (self.recipe.get("data") or {}).get("task")
        if not section:
            return ""
        settings = []
        for key in ("shift", "fraction"):
            value = section.get(key)
            is_default = value is None or value == 1.0  # the task's own shift; a fraction of 1.0 keeps all data
            if not is_default:
                settings.append(f"{key} {value}")
        if not settings:
            return section["name"]
        return f"{section['name']} ({', '.join(settings)})"

    @property
    def subject(self) -> str:
        """The task, or the kind of data with the names of its files, such as "text (a.txt, b.txt)"."""
        if self.task:
            return self.task
        data = self.recipe.get("data") or {}
        kind = data.get("kind") or ("samples" if self.unit == "samples" else "text")
        source = data.get("questions") or data.get("dataset") or {}
        name_or_paths = source.get("name") or source.get("path") or []
        if not name_or_paths:
            return kind
        paths = [name_or_paths] if isinstance(name_or_paths, str) else name_or_paths
        # A run may have been made on another system, so both separators are possible.
        names = [re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in paths]
        return f"{kind} ({brief_list(names, ', ')})"

    @property
    def final_evaluation(self) -> Evaluation:
        """The evaluation of the run's final models: the one with the lowest validation loss, else the last."""
        validated = [evaluation for evaluation in self.evaluations if evaluation.valid_loss is not None]
        if not validated:
            return self.evaluations[-1]
        return min(validated, key=lambda evaluation: evaluation.valid_loss or 0.0)  # "or": for type checkers

    @property
    def measure(self) -> str:
        """The measure that models are compared by."""
        return self.evaluations[-1].measure

    @property
    def has_routers(self) -> bool:
        """True if the last evaluation has scores of routers."""
        return bool(self.evaluations[-1].scores)

    @cached_property
    def settings(self) -> tuple[tuple[str, object], ...]:
        """Recipe settings that affect the result, without the seed: ``(("training.rounds", 10), ...)``, sorted.

        Runs with equal settings differ only in their seeds.
        """
        sections = {key: value for key, value in self.recipe.items() if key not in _KEYS_WITHOUT_EFFECT}
        evaluation = sections.get("evaluation") or {}
        # Of this section only two settings affect the result; how often a run is evaluated does not.
        sections["evaluation"] = {"model": evaluation.get("model"), "select": evaluation.get("select", "last")}
        return tuple(sorted(_flattened(sections).items()))


def brief_list(names: Sequence[str], last_separator: str) -> str:
    """Join names: "a, b and c" with the separator " and ", and of more than 4 names "a, b, c and 7 more"."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])}{last_separator}{names[-1]}"


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
        """True if the method trains; False for ``pretrained``, the untrained base, whose runs have no rounds."""
        return self.first.planned_rounds > 0


# -------------------------------------------------------------------- reading


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the given run folders, those inside folders of comparisons, and a client's newest model, each once.

    Raises:
        RunError: A path is neither.
    """
    folder_by_resolved_path: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path}: no such run folder")
        is_run = (path / "events.jsonl").is_file()
        folders = [path] if is_run else client_models(path)[-1:] or _runs_of_comparison(path)
        if not folders:
            raise RunError(_no_runs_message(path))
        for folder in folders:
            folder_by_resolved_path.setdefault(folder.resolve(), folder)
    return list(folder_by_resolved_path.values())


def _no_runs_message(path: Path) -> str:
    """Return the message about a folder without runs; it names the runs in a folder ``runs`` inside or beside it."""
    message = f"{path}: neither a run folder (no events.jsonl in it) nor a folder of run folders"
    runs = path / "runs"
    if not runs.is_dir():
        runs = path.parent / "runs"
    names = sorted(file.parent.name for file in runs.glob("*/events.jsonl"))
    if not names:
        return message
    return f"{message}; give folders of {runs}: {brief_list(names, ' and ')}"


def _runs_of_comparison(path: Path) -> list[Path]:
    """Return the run folders in a comparison's folder, in the order of the methods in its ``table.json``.

    Runs that are missing in the table are left out with a warning. Without a readable table all runs are returned.
    """
    folders = sorted(file.parent for file in path.glob("*/events.jsonl"))
    methods = [folder_name(method) for method in methods_in_table(path)]

    def index_of_method(folder: Path) -> int:
        """Return the position of a run's method in the table; methods that are missing in it come last."""
        method = folder.name.rpartition("-seed")[0]  # folders are named METHOD-seedN
        return methods.index(method) if method in methods else len(methods)

    folders.sort(key=index_of_method)
    names_in_table = {f"{folder_name(method)}-seed{seed}" for method, seed in runs_in_table(path)}
    in_table = [folder for folder in folders if folder.name in names_in_table]
    if not in_table:  # no table, or one of an older version, without seeds
        return folders
    left_out = [folder.name for folder in folders if folder.name not in names_in_table]
    if left_out:
        logger.warning(
            "%s: left out, since they are not in its table.json: %s; `comingle compare --resume` adds finished runs "
            "that can be compared",
            path,
            brief_list(left_out, " and "),
        )
    return in_table


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
    local_steps = recipe.get("training", {}).get("local_steps", 1)
    unit = _unit(start["users"])
    privacy_events = [event for event in events if event["event"] == "privacy"]
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
        unit=unit,
        amounts=_amounts(start["users"], f"train_{unit}"),
        start=start,
        spent=privacy_events[-1] if privacy_events else {},
        aggregations=tuple(event for event in events if event["event"] == "aggregation"),
    )


def _unit(users: Mapping[str, Mapping[str, object]]) -> str:
    """Return the unit of the users' data in a start event: "tokens" or "samples"."""
    numbers_of_first_user = next(iter(users.values()), {})
    return "samples" if "train_samples" in numbers_of_first_user else "tokens"


def _amounts(users: dict[str, JsonObject], key: str) -> dict[str, int]:
    """Return each user's amount of training data; empty if it is not recorded for all users.

    Args:
        users: Each user's numbers in a start event, such as ``{"ann": {"train_tokens": 900}}``.
        key: The key, such as "train_tokens".
    """
    if not all(key in numbers for numbers in users.values()):
        return {}
    return {name: numbers[key] for name, numbers in users.items()}


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
        event: An event "evaluation" of ``events.jsonl``.
        local_steps: Local steps in a round, for events of older runs, which lack "iterations".
    """
    return Evaluation(
        round=event["round"],
        iterations=event.get("iterations", event["round"] * local_steps),
        measure=measure_of(event),
        results={name: _without_prefix(results) for name, results in event["users"].items()},
        experts=event.get("experts", {}),
        scores=event.get("expert_scores", {}),
        valid_loss=event.get("mean_valid_loss"),
    )


def _without_prefix(results: dict[str, float | None]) -> dict[str, float | None]:
    """Return a user's results by measure: ``{"test_loss": 0.3}`` becomes ``{"loss": 0.3}``."""
    return {key.removeprefix("test_"): value for key, value in results.items()}


def continuation_line(continues: JsonMapping) -> str:
    """Return which run a run continues, and what has changed, in one line.

    For example ``"continues runs/may after 20 rounds: 2 users go on (new data: ada), 1 new (cem), 1 dropped (ben)"``.

    Args:
        continues: The entry ``continues`` of a start event (:func:`comingle.runs.continuation.start_from_run`).
    """
    num_kept = len(continues["kept"])
    kept = "1 user goes on" if num_kept == 1 else f"{num_kept} users go on"
    line = f"continues {continues['run']} after {continues['rounds']} rounds: {kept}"
    if continues["changed"]:
        line += f" (new data: {list_names(continues['changed'])})"
    for key in ("new", "dropped"):
        if continues[key]:
            line += f", {len(continues[key])} {key} ({list_names(continues[key])})"
    if continues.get("replayed"):  # older runs have no such entry
        line += f"; earlier data of {list_names(continues['replayed'])} is trained on again"
    if continues["ancestors"]:
        earlier_runs = ", ".join(f"{one['run']} ({one['rounds']} rounds)" for one in continues["ancestors"])
        line += f"; before it {earlier_runs}"
    return line


def forgetting_lines(metrics: JsonMapping) -> list[str]:
    """Return a line for each earlier run whose test data was scored again: the mean over users then and now.

    For example ``"test data of runs/may: mean perplexity of 3 users 12.10 then, 12.60 now; most changed: ada, 9.2 to
    10.4"``. The list is empty for runs that continue no other.

    Args:
        metrics: Metrics of a run, whose entry ``earlier`` is from :func:`comingle.runs.continuation.forgetting`.
    """
    lines: list[str] = []
    for entry in metrics.get("earlier", []):
        key = next(iter(next(iter(entry["users"].values()))["after"]))  # the measure that models are compared by
        changes = {name: (scores["before"][key], scores["after"][key]) for name, scores in entry["users"].items()}
        before, after = (statistics.fmean(pair[index] for pair in changes.values()) for index in (0, 1))
        most_changed = max(changes, key=lambda name: abs(changes[name][1] - changes[name][0]))
        then, now = changes[most_changed]
        users = "1 user" if len(changes) == 1 else f"{len(changes)} users"
        lines.append(
            f"test data of {entry['run']}: mean {key.removeprefix('test_')} of {users} {before:.4g} then, {after:.4g} "
            f"now; most changed: {most_changed}, {then:.4g} to {now:.4g}"
        )
    return lines


def served_lines(metrics: JsonMapping) -> list[str]:
    """Return lines that say which of its models each user is served, for runs with ``evaluation.guard``; else none.

    Such a run serves a user the best of several models by validation loss: "personal" is that of the run's method,
    "local" was trained by the user alone. For example ``["served personal since may: ada, ben", "served local since
    june: cem; validation loss 5.283 (personal 5.331, difference -0.048, 95% interval -0.060 to -0.036), test perplexity
    190 (personal 197)"]``, where "may" is the earlier run since which the user is served this model. Up to
    :data:`MOST_ROWS` users with other models than the personal one have lines of their own.

    Args:
        metrics: Metrics of a run, whose entry ``served`` is from :func:`comingle.runs.guard.choose_served`.
    """
    users_by_model: dict[str, list[str]] = {}
    lines: list[str] = []
    for name, entry in metrics.get("served", {}).items():
        heading = f"served {entry['model']}" + (f" since {entry['since']}" if entry["since"] else "")
        if "since_round" in entry:  # of a client
            heading += f", round {entry['since_round']}"
        if entry["model"] == "personal" or len(lines) == MOST_ROWS:
            users_by_model.setdefault(heading, []).append(name)
        else:
            lines.append(f"{heading}: {name}; {_gain_of_served(entry, metrics['users'].get(name, {}))}")
    return [f"{heading}: {list_names(names)}" for heading, names in users_by_model.items()] + lines


def _gain_of_served(entry: JsonMapping, personal: JsonMapping) -> str:
    """Return validation loss and test result of a served model beside those of the personal one.

    Args:
        entry: Entry of a user who is not served its personal model.
        personal: Metrics of the user; empty if it is not evaluated on test data.
    """
    candidates = entry["candidates"]
    candidate = candidates[entry["model"]]
    text = f"validation loss {_loss_text(candidate['valid_loss'])} (personal "
    text += _loss_text(candidates["personal"]["valid_loss"])
    if candidate["interval"] is not None:
        low, high = candidate["interval"]
        text += f", difference {candidate['difference']:+.3f}, 95% interval {low:+.3f} to {high:+.3f}"
    text += ")"
    for key, result in entry.items():
        if key.startswith("test_"):  # the first one is the measure that models are compared by
            measure = key.removeprefix("test_")
            return f"{text}, test {measure} {number(result, measure)} (personal {number(personal[key], measure)})"
    return text


def _loss_text(loss: float | None) -> str:
    """Return a loss as text; a loss that is not finite is None in a file."""
    return "infinite" if loss is None else f"{loss:.3f}"


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

    groups: dict[str, dict[int, RunRecord]] = {}  # groups[settings][seed]
    for run in runs:
        run_by_seed = groups.setdefault(repr(run.settings), {})
        if run.seed in run_by_seed:
            first = run_by_seed[run.seed]
            logger.warning("%s: left out, since its recipe and seed are those of %s", run.folder, first.folder)
        else:
            run_by_seed[run.seed] = run
    runs_of_entries = []
    for run_by_seed in groups.values():
        runs_of_entries.append(tuple(run_by_seed[seed] for seed in sorted(run_by_seed)))
    labels = _labels([runs_of_entry[0] for runs_of_entry in runs_of_entries])
    return [Entry(label=label, runs=runs) for label, runs in zip(labels, runs_of_entries, strict=True)]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return a different label for each run.

    A run's label is the name of its method in its comparison, or without a comparison its method. If two runs have the
    same, all labels are ``METHOD (KEY VALUE, ...)`` instead, such as "fedprox (mu 0.1, rank 8)".
    """
    folders = {run.folder.parent for run in runs}
    methods_of_comparison = {folder: methods_in_table(folder) for folder in folders}
    labels = [_label_in_comparison(run, methods_of_comparison[run.folder.parent]) for run in runs]
    if len(set(labels)) == len(labels):
        return labels

    differing_keys = _differing_keys([_settings_of(run, full_privacy=False) for run in runs])
    keys_in_all_labels = {key for key in differing_keys if not key.startswith("method.")}
    return [_distinguishing_label(run, runs, keys_in_all_labels) for run in runs]


def _distinguishing_label(run: RunRecord, runs: Sequence[RunRecord], keys_in_all_labels: set[str]) -> str:
    """Return a run's method and the settings that distinguish the run, such as "fedprox (mu 0.1, rank 8)".

    Args:
        run: The run that gets the label.
        runs: All runs that get a label. The label has each setting in which runs of the same method differ.
        keys_in_all_labels: Recipe keys of further settings in the label, such as ``{"training.rounds"}``.
    """
    runs_of_method = [other for other in runs if other.method == run.method]
    all_are_private = all(other.recipe.get("privacy") for other in runs_of_method)
    # If only some are private, every privacy setting differs between them, so compare the mechanisms only.
    settings_of_runs = [_settings_of(other, full_privacy=all_are_private) for other in runs_of_method]
    keys = keys_in_all_labels | _differing_keys(settings_of_runs)
    if "privacy.mechanism" in keys:
        keys.discard("privacy")  # which is the mechanism, too
    # Values of all possible keys: "privacy" (the mechanism) from the first call; if all runs are private, the second
    # adds "privacy.mechanism" and the other settings of privacy.
    settings = _settings_of(run, full_privacy=False)
    settings.update(_settings_of(run, full_privacy=all_are_private))
    texts = []
    for key in sorted(keys):
        short_key = key.rpartition(".")[2]
        texts.append(f"{short_key} {_setting_text(settings.get(key))}")
    return f"{run.method} ({', '.join(texts)})" if texts else run.method


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Return the recipe keys in which runs differ, such as ``["training.rounds"]``, except base, method and data.

    The page of a comparison warns of them, as they may explain different results as well as the methods do. Keys that a
    run lacks, such as settings newer than the run, are left out. Of privacy only the mechanism is compared.
    """
    settings_of_runs = [_settings_of(run, full_privacy=False) for run in runs]
    keys_of_runs = []
    for settings in settings_of_runs:
        keys_of_run = set(settings)
        # RunRecord.settings adds this key, with None, to recipes that lack it; they are not to count as different.
        if settings.get("evaluation.model") is None:
            keys_of_run.discard("evaluation.model")
        keys_of_runs.append(keys_of_run)
    common_keys = set.intersection(*keys_of_runs)
    differing_keys = _differing_keys(settings_of_runs) & common_keys
    return sorted(key for key in differing_keys if not key.startswith(("base", "method.", "data.")))


def _differing_keys(settings_of_runs: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the keys that do not have the same value in all settings."""
    first, *others = settings_of_runs
    differing_keys = set()
    for settings in others:
        for key in {**first, **settings}:
            if settings.get(key) != first.get(key):
                differing_keys.add(key)
    return differing_keys


def _label_in_comparison(run: RunRecord, names: Sequence[str]) -> str:
    """Return the name that a run's method has in the run's comparison, such as "fedprox:mu=0.1".

    Args:
        run: The run, whose folder is named after its label.
        names: Names of the methods in the comparison; empty if there is none.

    Returns:
        The name; the method's name if the comparison does not have the run.
    """
    name_in_folder = run.folder.name.rpartition("-seed")[0]  # the folder is named NAME-seedN
    for name in names:
        method = name.partition(":")[0]
        if folder_name(name) == name_in_folder and method == run.method:
            return name
    return run.method


def _settings_of(run: RunRecord, *, full_privacy: bool) -> dict[str, object]:
    """Return the settings that may distinguish a run from others: ``{"training.rounds": 10, "privacy": "none"}``.

    Args:
        run: The run, whose recipe has the settings.
        full_privacy: Keep all settings of privacy, such as "privacy.noise", in place of the mechanism as "privacy".
    """
    all_settings = {key: value for key, value in run.settings if value != {}}  # without empty sections
    if full_privacy:
        return all_settings
    settings = {key: value for key, value in all_settings.items() if not key.startswith("privacy")}
    privacy = run.recipe.get("privacy") or {}
    settings["privacy"] = privacy.get("mechanism", "none")
    return settings


def _flattened(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``.

    Args:
        content: The mappings; an empty one stays as a value.
        prefix: Beginning of all keys, such as "a.".
    """
    flat: JsonObject = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(_flattened(value, prefix=f"{path}."))
        else:
            flat[path] = value
    return flat


def _setting_text(value: object) -> str:
    """Return a setting's value as text: "8", "q,v" for a list, "default" for None; long ones lose their middle."""
    if value is None:
        return "default"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
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
        """One of :func:`verdicts`: "gained" or "harmed" if the interval excludes 0, "level" if it does not.

        With a single seed there is no interval: the verdict is "lower (one seed)" or "higher (one seed)", and "level"
        for changes below :func:`negligible_change`.
        """
        if self.interval is not None:
            low, high = self.interval
            if low <= 0 <= high:
                return "level"
            return "harmed" if is_worse(self.change.mean, self.measure) else "gained"
        has_one_seed = self.change.std is None
        if not has_one_seed:  # a share that changes equally with all seeds, which has no interval
            return "level"
        if abs(self.change.mean) < negligible_change(self.measure):
            return "level"
        return "lower (one seed)" if self.change.mean < 0 else "higher (one seed)"

    @property
    def text(self) -> str:
        """The change against the baseline as text, such as "-9.7%" for perplexities or "+1.2 points"."""
        return change_text(self.change.mean, self.measure)

    @property
    def named_text(self) -> str:
        """User, change and interval as text: "ann -9.7% (-12.0 to -7.4)", or "ann (-9.7%)" without an interval."""
        if self.interval is None:
            return f"{self.user} ({self.text})"
        return f"{self.user} {self.text} ({interval_text(self.interval, self.measure)})"


def gain_over_seeds(name: str, measure: str, differences: Sequence[float], *, num_intervals: int = 1) -> Gain:
    """Return how much better a method is than the baseline for a user, or in the mean over users, with an interval.

    Args:
        name: Name of the user, or of the method whose users the mean is over.
        measure: Name of the measure of the results, such as "perplexity".
        differences: Difference between the method's and the baseline's result for each seed, at least one; of
            perplexities the logarithm of their ratio (:func:`additive_difference`).
        num_intervals: Number of intervals that hold simultaneously with 95%, as in :func:`interval_of_change`.
    """
    mean = as_change(statistics.fmean(differences), measure)  # for perplexities the ratio of geometric means
    std = spread([as_change(difference, measure) for difference in differences]).std
    return Gain(
        user=name,
        measure=measure,
        change=Spread(mean=mean, std=std),
        interval=interval_of_change(differences, measure, num_intervals=num_intervals),
    )


def verdicts(measure: str) -> tuple[str, ...]:
    """Return all words that say how a method's result compares with the baseline's, from the best to the worst.

    "gained" and "harmed" need several seeds: the confidence interval of the change excludes 0. "level" means that it
    does not. With one seed there is no interval, so the direction is given without a judgement.

    Args:
        measure: Name of the measure of the results, such as "perplexity".
    """
    lower, higher = "lower (one seed)", "higher (one seed)"
    if MEASURES[measure] == "lower":  # lower is better
        return ("gained", lower, "level", higher, "harmed")
    return ("gained", higher, "level", lower, "harmed")


def spread(values: Sequence[float]) -> Spread:
    """Return the mean and the sample standard deviation of at least one value."""
    return Spread(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)


# -------------------------------------------------------------------- over training


def learning_curve(entry: Entry, user: str | None = None, measure: str = "", *, geometric: bool = False) -> Curve:
    """Return the results of a user, or the mean over users, at each evaluation, as mean and deviation over seeds.

    Results that are not finite are left out.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        user: The user; None for the mean over all.
        measure: Name of a measure, such as "accuracy"; empty for the measure by which models are compared.
        geometric: Take the geometric mean over users instead of the arithmetic one.
    """

    def result(evaluation: Evaluation) -> float | None:
        return evaluation.value(user, measure, geometric=geometric)

    return _curve_of(entry, result)


def expert_curves(entry: Entry, user: str) -> list[ExpertCurves]:
    """Return the mean gate of each of a user's experts in each layer over training (CoMiGS, Figures 4 and 10).

    Empty if the user's model has no routers.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        user: Name of the user.
    """
    last = entry.first.evaluations[-1]  # all evaluations have the same experts and layers
    names = last.experts.get(user, [])
    num_layers = len(last.scores.get(user, []))

    def gate_curve(layer: int, expert: int) -> Curve:
        """Return the curve of an expert's mean gate in a layer."""

        def mean_gate(evaluation: Evaluation) -> float | None:
            gates = evaluation.scores.get(user)  # None if the user kept them private in this round
            return gates[layer][expert] if gates else None

        return _curve_of(entry, mean_gate)

    experts = []
    for expert, name in enumerate(names):
        curves = tuple(gate_curve(layer, expert) for layer in range(num_layers))
        experts.append(ExpertCurves(name=name, layers=curves))
    return experts


def _curve_of(entry: Entry, quantity: Callable[[Evaluation], float | None]) -> Curve:
    """Return a curve over training: a quantity at each evaluation, with mean and deviation over seeds.

    Its x-axis are iterations, which are the local steps of one user since the start.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        quantity: Returns the quantity of an evaluation; None where it is unknown, which is left out.
    """
    values_by_iterations: dict[int, list[float]] = {}  # one value per seed
    for run in entry.runs:
        for evaluation in run.evaluations:
            value = quantity(evaluation)
            if value is not None:
                values_by_iterations.setdefault(evaluation.iterations, []).append(value)
    iterations = tuple(sorted(values_by_iterations))
    return Curve(iterations=iterations, values=tuple(spread(values_by_iterations[steps]) for steps in iterations))


def common_measures(entries: Sequence[Entry]) -> list[str]:
    """Return the measures that can be shown for all runs, such as ``["accuracy", "loss"]``.

    The first is the one that models are compared by. Others are measures of every user in all final evaluations.
    """
    evaluations = [run.final_evaluation for entry in entries for run in entry.runs]
    results_of_users = [results for evaluation in evaluations for results in evaluation.results.values()]
    common = [measure for measure in MEASURES if all(measure in results for results in results_of_users)]
    return list(dict.fromkeys([evaluations[0].measure, *common]))


# -------------------------------------------------------------------- at the end


def final_result(entry: Entry, user: str | None = None, *, geometric: bool = False) -> Spread | None:
    """Return the final test result of a user, or the mean over users; None if a seed's result is not finite.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        user: The user; None for the mean over all.
        geometric: Return the geometric mean.
    """
    values = [run.final_evaluation.value(user, geometric=geometric) for run in entry.runs]
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return None
    return spread(finite)


def gains(entry: Entry, baseline: Entry) -> list[Gain]:
    """Return how much better or worse each user's test result is than with a baseline, paired by seed, best first.

    The unit is that of the measure: per cent of perplexities, percentage points of accuracies. Users without a
    finite result for some seed are left out.

    Args:
        entry: Runs of one method with the same recipe and different seeds.
        baseline: Runs of the baseline. Each run of ``entry`` is compared with the run that has the same seed.
    """
    measure = entry.first.measure
    gains_of_users = []
    for user in entry.first.users:
        differences = []  # one per seed that both have
        for run in entry.runs:
            for baseline_run in baseline.runs:
                if run.seed == baseline_run.seed:
                    result = run.final_evaluation.value(user)
                    baseline_result = baseline_run.final_evaluation.value(user)
                    differences.append(additive_difference(result, baseline_result, measure))
        finite = [value for value in differences if value is not None]
        if finite and len(finite) == len(differences):
            gains_of_users.append(gain_over_seeds(user, measure, finite))
    higher_is_better = MEASURES[measure] == "higher"
    return sorted(gains_of_users, key=lambda gain: gain.change.mean, reverse=higher_is_better)


def baselines(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that others are compared with: those of ``local``, then those of ``fedavg``."""
    return [entry for method in BASELINES for entry in entries if entry.method == method]


def gains_of_entries(entries: Sequence[Entry], baseline: Entry) -> list[tuple[Entry, list[Gain]]]:
    """Return each trained entry other than the baseline with its users' gains over it, largest gain first.

    Entries without a seed at which both have finite results are left out.

    Args:
        entries: Runs of each method, which may include the baseline.
        baseline: Runs of the baseline.
    """
    pairs = []
    for entry in entries:
        if entry is baseline or not entry.trained:
            continue
        gains_of_users = gains(entry, baseline)
        if gains_of_users:
            pairs.append((entry, gains_of_users))
    return pairs


def baseline_comparison(entries: Sequence[Entry], wanted: str | None = None) -> BaselineComparison | None:
    """Compare every other entry with a baseline.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        wanted: Label or method of the baseline. Of several, such as "local,fedavg", each user's best result counts.
            None for ``local``, or else the first entry.

    Returns:
        The comparison; None with one entry or one seed.

    Raises:
        RecipeError: No entry has this label or method.
    """
    results_by_label: dict[str, dict[int, dict[str, float | None]]] = {}
    for entry in entries:
        results_by_seed: dict[int, dict[str, float | None]] = {}
        for run in entry.runs:
            results_by_seed[run.seed] = {user: run.final_evaluation.value(user) for user in run.users}
        results_by_label[entry.label] = results_by_seed
    labels = [entry.label for entry in entries]
    baseline = baseline_of(labels, _labels_of_baseline(entries, wanted))
    return compare_with_baseline(results_by_label, entries[0].first.measure, baseline)


def _labels_of_baseline(entries: Sequence[Entry], wanted: str | None) -> str | None:
    """Return the labels of the runs that are the baseline of a comparison, such as "local,fedavg (rank 8)".

    Runs that differ only in their seeds are an entry with one label. Several entries of a method have different labels,
    such as "fedavg (rank 4)" and "fedavg (rank 8)"; the method's name then stands for the first of them. A name that is
    neither a label nor a method stays as it is.

    Args:
        entries: All entries.
        wanted: Labels or names of methods, separated by commas; None for ``local``.

    Returns:
        The labels, separated by commas; None if ``wanted`` is None and no entry is of ``local``.
    """
    labels = [entry.label for entry in entries]
    label_by_method: dict[str, str] = {}
    for entry in entries:
        label_by_method.setdefault(entry.method, entry.label)
    baseline_labels = []
    for name in baseline_methods(wanted or DEFAULT_BASELINE):
        baseline_labels.append(name if name in labels else label_by_method.get(name, name))
    lacks_default = not wanted and baseline_labels[0] not in labels  # there is no entry of ``local``
    return None if lacks_default else ",".join(baseline_labels)


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
    upload_bytes_per_user_round: float | None = None
    download_bytes_per_user_round: float | None = None
    trainable_parameters: int | None = None
    per_second: Spread | None = None
    """Tokens or samples per second of local work."""
    wall_seconds: Spread | None = None
    peak_memory_bytes: float | None = None
    dtype_and_device: str = ""
    """Such as "float32 on cpu"."""


def cost(entry: Entry) -> Cost:
    """Return the measured costs of an entry: bytes from its events, the rest from the metrics of finished runs."""
    metrics_of_finished = [run.metrics for run in entry.runs if run.metrics is not None]

    def total(key: str) -> float:
        """Return the sum over the rounds of a key, such as "upload_bytes", as a mean over seeds."""
        return statistics.fmean(sum(event.get(key, 0) for event in run.rounds) for run in entry.runs)

    cost_from_events = Cost(
        label=entry.label,
        rounds=max(run.evaluations[-1].round for run in entry.runs),
        upload_bytes=total("upload_bytes"),
        download_bytes=total("download_bytes"),
    )
    if not metrics_of_finished:
        return cost_from_events
    first = metrics_of_finished[0]  # seeds have equal sizes of uploads and models
    rates = [metrics[f"{entry.first.unit}_per_second"] for metrics in metrics_of_finished] if entry.trained else []
    return replace(
        cost_from_events,
        upload_bytes_per_user_round=first["upload_bytes_per_user_round"],
        download_bytes_per_user_round=first["download_bytes_per_user_round"],
        trainable_parameters=first["trainable_parameters"],
        per_second=spread(rates) if rates else None,
        wall_seconds=spread([metrics["wall_seconds"] for metrics in metrics_of_finished]),
        peak_memory_bytes=max(metrics["peak_memory_bytes"] for metrics in metrics_of_finished),
        dtype_and_device=f"{first['dtype']} on {first['device']}",
    )


def epsilon_text(entry: Entry) -> str:
    """Return the largest epsilon of all users and runs as text; "no bound" or "nothing is sent" without privacy."""
    all_are_private = all(run.spent for run in entry.runs)
    if all_are_private:
        return f"{max(epsilon_of(run.spent) for run in entry.runs):.3g}"
    has_uploads = any(event["upload_bytes"] for run in entry.runs for event in run.rounds)
    return "no bound" if has_uploads else "nothing is sent"
