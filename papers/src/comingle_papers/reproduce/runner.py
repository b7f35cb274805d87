"""Execution of a plan's cells, each once, and the published figures drawn from the results.

A run's name is a digest of what it computes (:func:`comingle_papers.reproduce.plan.name_of`), the same on every
machine. It does not cover what text and base hold: a run stands for what is here only if it has read the same.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import comingle
from comingle.config import load_recipe
from comingle.models.base import Base
from comingle.models.loading import cached_folder, is_hub_reachable, is_offline, is_public
from comingle.runs.compare import in_processes
from comingle.runs.progress import LOADING, reporting
from comingle.runs.session import describe, prepare, run_in
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData
from comingle.utils.errors import DivergenceError, RunError
from comingle.utils.inputs import POPULATION, Inputs, read_inputs
from comingle.utils.names import HUB_PREFIX, parse_hub_name
from comingle.utils.records import expand_home, read_metrics, write_json, write_text
from comingle.utils.terminal import errors as error_console
from comingle.utils.trees import digest_all
from comingle_papers.recipes import published_runs
from comingle_papers.reproduce.plan import Cell, Plan, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from comingle.reports.page import TokenView
    from comingle.reports.runs import Entry


MEASURED = "measured.json"
"""File in a finished run's folder: what the run computes, and how it was made."""
DIVERGED = "diverged.txt"
"""File in the folder of a run whose training diverged: the reason."""
_DIGEST_LENGTH = 16
"""Hexadecimal digits kept of each input's digest."""


def mark_as_finished(folder: Path, cell: Cell) -> None:
    """Write ``measured.json`` to the folder of a run that has ended, so that it is not run again.

    The file has the settings that determine the run's result, and its origin: version, commit, date and machine.

    Args:
        folder: The run folder.
        cell: The cell of a published table or figure that the run belongs to, with these settings.
    """
    write_json(folder / MEASURED, {"computed": cell.computed, "made": _provenance()})


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished run, which is marked by the file ``measured.json``.

    Raises:
        RunError: The file belongs to another run, or is damaged.
    """
    if not (folder / MEASURED).exists():
        return False
    read_measured(folder)  # raises the errors above
    return True


def read_diverged(folder: Path) -> str:
    """Return why a run diverged, from ``diverged.txt``; empty if it did not."""
    path = folder / DIVERGED
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8").strip()


def read_measured(folder: Path) -> dict[str, Any]:
    """Return the content of ``measured.json``: the settings that determine the result, and how the run was made.

    Raises:
        RunError: The file belongs to another run, or is damaged.
    """
    path = folder / MEASURED
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = {"computed": content["computed"], "made": content["made"]}
        run_name = name_of(measured["computed"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: damaged ({error!r}); delete it to repeat the run") from None
    if run_name != folder.name:
        raise RunError(f"{path}: belongs to another run, {run_name}; use another --out")
    return measured


def _provenance() -> dict[str, str]:
    """Return version and commit of comingle, today's date and the kind of machine, for ``measured.json``."""
    machine_parts = [platform.machine()]  # such as "x86_64"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        model_lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if model_lines:  # one for each core
            machine_parts.append(model_lines[0].partition(": ")[2])
    if torch.cuda.is_available():
        machine_parts.append(torch.cuda.get_device_name())
    machine_parts.append(f"torch {torch.__version__}")
    return {
        "version": comingle.__version__,
        "commit": _commit(),
        "date": date.today().isoformat(),
        "machine": ", ".join(machine_parts),
    }


def _commit() -> str:
    """Return comingle's git commit, with "-dirty" if files are changed; empty if comingle is an installed package."""
    repository = Path(comingle.__file__).parents[2]  # the file is src/comingle/__init__.py
    if not (repository / ".git").exists():
        return ""
    command = ("git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def digest_inputs(inputs: Inputs) -> dict[str, str]:
    """Return digests of a run's base model and of its data, such as ``{"the base": ..., "the data of 'ann'": ...}``.

    A run that stores its users on disk has one digest of the data, "the users". The tokenizer has none, since its
    effect on the text is part of the data's digests.
    """
    digests = {}
    if inputs.base:
        digests["the base"] = inputs.base
    for name, user in inputs.users.items():
        digests[f"the data of {name!r}"] = digest_all(user.digests)
    if POPULATION in inputs.settings:  # users are stored on disk
        digests["the users"] = digest_all(inputs.settings[POPULATION])
    return {description: digest[:_DIGEST_LENGTH] for description, digest in digests.items()}


def check_same_inputs(run: object, digests_of_run: Mapping[str, str], digests_here: Mapping[str, str]) -> None:
    """Check that a finished run read the same base model and data that are on this machine now.

    Args:
        run: Name of the run, for error messages.
        digests_of_run: Digests of the inputs that the run read (:func:`digest_inputs`).
        digests_here: Digests of the inputs on this machine.

    Raises:
        RunError: A digest differs, or is lacking on one side; the message names the first.
    """
    for description in [*digests_of_run, *digests_here]:
        of_run = digests_of_run.get(description, "not there")
        here = digests_here.get(description, "not there")
        if of_run != here:
            raise RunError(
                f"{run}: {description} was {of_run} when it was measured, and is {here}; "
                "use the same version, or another --out"
            )


RUNS = "runs"
"""Folder with the run folders of an experiment."""

Waiting = Callable[[str], AbstractContextManager[Any]]
"""Context manager that shows what is being waited for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a cell: its run folder, whether it ``ran`` now or was finished before, and why it diverged, if it did.

    ``archived_metrics`` are the metrics of a run in an archive, which has no folder.
    """

    cell: Cell
    folder: Path
    seconds: float
    ran: bool
    diverged: str = ""
    archived_metrics: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of a run that did not diverge: those of the archive, else ``metrics.json`` of the run folder."""
        if self.archived_metrics is not None:
            return self.archived_metrics
        return read_metrics(self.folder)


@dataclass(kw_only=True)
class Estimate:
    """Estimate of the remaining time of a table, from the total seconds and total work of finished runs.

    Both are by base model; ``work`` is :attr:`Cell.work`.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)

    def learn(self, outcome: Outcome) -> None:
        """Add seconds and work of a run to the totals of its base model, unless it was finished before."""
        if not outcome.ran:
            return
        base = outcome.cell.recipe.base
        self.seconds[base] = self.seconds.get(base, 0.0) + outcome.seconds
        self.work[base] = self.work.get(base, 0.0) + outcome.cell.work

    def seconds_left(self, cells: Sequence[Cell]) -> float | None:
        """Estimate the seconds that the remaining cells need; return None before any run is finished.

        A base model without a finished run is assumed to need the mean time per unit of work.
        """
        if not self.work:
            return None
        mean_seconds_per_work = sum(self.seconds.values()) / sum(self.work.values())
        seconds_per_work = {base: self.seconds[base] / work for base, work in self.work.items()}
        return sum(cell.work * seconds_per_work.get(cell.recipe.base, mean_seconds_per_work) for cell in cells)


def unique_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells without duplicates: of cells with the same settings, and so the same result, the first."""
    cell_by_folder: dict[str, Cell] = {}
    for cell in cells:
        # The folder's name has a digest of all settings that determine the result.
        cell_by_folder.setdefault(cell.folder, cell)
    return list(cell_by_folder.values())


def title_of(cell: Cell) -> str:
    """Return the display name of a table's run, such as "AG News · CoMiGS, seed 0"."""
    return f"{cell.column} · {cell.row}, seed {cell.seed}"


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    force: bool = False,
    observers: Callable[[Cell, Clients], Sequence[Observer]] = lambda cell, clients: (),
    waiting: Waiting = nullcontext,
) -> Iterator[Outcome]:
    """Run the cells of a table in order, each in a folder below ``out/runs``, and yield each outcome.

    Of cells with the same settings only the first is run. A finished run is not repeated without ``force``, and an
    interrupted run is resumed. A run whose training diverges does not stop the others.

    Args:
        cells: The runs of the table, one for each row, column and seed. Consecutive cells with the same inputs load
            their data and base model once.
        out: The folder that contains ``runs``.
        force: Repeat finished runs.
        observers: Given a cell and the clients of its run, returns the observers of the run, such as a progress bar.
        waiting: Shows that a base model is being loaded.

    Raises:
        RunError: A run folder holds another run, or was made with other data or another base model.
    """
    cache = InputCache(waiting)
    for cell in unique_cells(cells):
        folder = out / RUNS / cell.folder
        if not force and is_finished(folder):
            check_same_inputs(folder, digest_inputs(read_inputs(folder)), cache.input_digests(cell))
            yield Outcome(cell=cell, folder=folder, seconds=0.0, ran=False, diverged=read_diverged(folder))
        else:
            seconds = _run_cell(cell, folder, cache, force=force, observers=partial(observers, cell))
            yield Outcome(cell=cell, folder=folder, seconds=seconds, ran=True, diverged=read_diverged(folder))


def _run_cell(
    cell: Cell, folder: Path, cache: InputCache, *, force: bool, observers: Callable[[Clients], Sequence[Observer]]
) -> float:
    """Run a cell in its folder, resume it if it was interrupted, and return the seconds that this took.

    Args:
        cell: The run of one row, column and seed.
        folder: The run folder.
        cache: Loads the data and the base model.
        force: Start anew instead of resuming.
        observers: Returns the observers of the run.

    Raises:
        RunError: The run folder holds another run.
    """
    is_begun = (folder / "recipe.yaml").exists()
    # The fingerprint contains the paths of data and base model; with other paths no checkpoint can be resumed.
    resume = is_begun and not force and load_recipe(folder).fingerprint == cell.recipe.fingerprint
    restart = force or (is_begun and not resume)
    run_data = cache.run_data(cell)
    started = time.perf_counter()
    for name in (DIVERGED, MEASURED):  # results of an earlier run
        (folder / name).unlink(missing_ok=True)
    try:
        run_in(folder, cell.recipe, run_data, resume=resume, force=restart, observers=observers)
    except DivergenceError as error:
        reason = error.__cause__ or error  # the cause, as its text has no checkpoint path
        write_text(folder / DIVERGED, f"{reason}\n")
    if not run_data.kind.needs_base:  # checkpoints of nets, a copy for every user, would fill the disk
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    mark_as_finished(folder, cell)
    return time.perf_counter() - started


def experiment_folder(out: Path, name: str, *, resume: bool, force: bool) -> Path:
    """Return the folder for the results of an experiment (a table or figure); refuse to overwrite one unasked.

    The experiment ``comigs/table1`` has the folder ``out/table1``.

    Args:
        out: The folder below which each experiment has its folder.
        name: The experiment's name, ``PAPER/TABLE``.
        resume: Accept an existing folder, to continue the experiment.
        force: Accept an existing folder, whose files the caller replaces.

    Raises:
        RunError: The folder exists and neither ``resume`` nor ``force`` is given.
    """
    _, _, name_in_paper = name.partition("/")
    folder = out / name_in_paper
    if folder.exists() and not (resume or force):
        raise RunError(f"{folder}: exists; --resume continues it, --force replaces it, --out names another")
    return folder


def scores(outcomes: Mapping[str, Outcome], cells: Sequence[Cell], metric: str) -> dict[tuple[str, str], list[float]]:
    """Return a metric's mean over users for each seed, by (row, column); accuracies are in per cent.

    Missing and diverged runs are left out.

    Args:
        outcomes: The runs that have ended, by run name, with their metrics or the reason why they diverged.
        cells: The runs of the table, one for each row, column and seed.
        metric: The metric's key, as ``mean_test_accuracy``.
    """
    factor = 100 if metric.endswith("_accuracy") else 1
    scores_by_cell: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        outcome = outcomes.get(cell.folder)
        if outcome is None or outcome.diverged:
            continue
        scores_of_seeds = scores_by_cell.setdefault((cell.row, cell.column), [])
        scores_of_seeds.append(factor * _metric_value(outcome.metrics, metric))
    return scores_by_cell


def results(outcomes: Mapping[str, Outcome], cells: Sequence[Cell], metric: str) -> dict[str, dict[str, Any]]:
    """Return each user's value of a metric in nested mappings by column, row, seed and user.

    Missing and diverged runs are left out.

    Args:
        outcomes: The runs that have ended, by run name, with their metrics or the reason why they diverged.
        cells: The runs of the table, one for each row, column and seed.
        metric: The key of the mean over users, as ``mean_test_accuracy``.
    """
    user_key = metric.removeprefix("mean_")
    by_column: dict[str, dict[str, Any]] = {}
    for cell in cells:
        outcome = outcomes.get(cell.folder)
        if outcome is None or outcome.diverged:
            continue
        value_by_user = {name: user.get(user_key) for name, user in outcome.metrics["users"].items()}
        by_row = by_column.setdefault(cell.column, {})
        by_seed = by_row.setdefault(cell.row, {})
        by_seed[cell.seed] = value_by_user
    return by_column


def _metric_value(metrics: Mapping[str, Any], metric: str) -> float:
    """Return a metric's mean over users: that of ``metrics.json``, or else computed from the users' values.

    Args:
        metrics: The run's ``metrics.json``.
        metric: Key of the metric, as ``mean_test_rouge1``.
    """
    if metric in metrics:
        return metrics[metric]
    user_key = metric.removeprefix("mean_")
    return statistics.fmean(user[user_key] for user in metrics["users"].values())


class InputCache:
    """Cache of the base model and the data loaded last, so that consecutive runs with the same inputs share them.

    Args:
        waiting: Shows that a base model is being loaded.
    """

    def __init__(self, waiting: Waiting = nullcontext) -> None:
        """Start with nothing loaded; ``waiting`` shows that a base model is being loaded."""
        self._waiting = waiting
        self._base_key = ""  # settings of the cached base model; a run with others loads another
        self._base: Base | None = None
        self._run_data_key = ""  # settings of the cached base model and data
        self._run_data: RunData | None = None
        self._digests: dict[str, str] | None = None  # of the cached data

    def input_digests(self, cell: Cell) -> dict[str, str]:
        """Return the digests of a run's base model and data (:func:`digest_inputs`)."""
        run_data = self.run_data(cell)
        if self._digests is None:
            self._digests = digest_inputs(describe(run_data, cell.recipe))
        return self._digests

    def run_data(self, cell: Cell) -> RunData:
        """Return the base model and the data of a run (a cell of a table).

        Data is loaded anew if base, runtime, seed or section ``data`` differ from those of the run before. The base
        model is loaded anew if base or runtime differ.
        """
        recipe = cell.recipe
        base_key = f"{recipe.base} {recipe.runtime.model_dump_json()}"
        run_data_key = f"{base_key} {recipe.seed} {recipe.data.model_dump_json()}"
        if self._run_data is not None and self._run_data_key == run_data_key:
            return self._run_data

        # Free the old data and base model before loading the next.
        base = self._base if self._base_key == base_key else None
        self._run_data = self._base = self._digests = None
        with self._waiting(LOADING):
            loaded = prepare(recipe, base=base)
        self._run_data_key, self._run_data = run_data_key, loaded
        self._base_key, self._base = base_key, loaded.base
        return loaded


def run_parallel(
    cells: Sequence[Cell], out: Path, *, jobs: int, force: bool = False, quiet: bool = True
) -> Iterator[Outcome]:
    """Run the cells of a table like :func:`run_cells`, ``jobs`` at a time; yield outcomes in order of completion.

    Consecutive runs of one column and seed share a process, since they share their data. Each process gets a GPU of its
    own as long as there are enough.

    Args:
        cells: The runs of a table, one for each row, column and seed.
        out: The folder that contains ``runs``.
        jobs: The number of processes.
        force: Repeat finished runs.
        quiet: Show no progress.

    Raises:
        ComingleError: A process failed; raised when the others are done.
    """
    groups = [list(group) for _, group in groupby(unique_cells(cells), key=lambda cell: (cell.column, cell.seed))]
    quiet_workers = quiet or error_console.is_terminal  # several progress bars would overwrite each other
    run_group = partial(_run_group, out=out, force=force, quiet=quiet_workers)
    yield from in_processes(groups, run_group, jobs=jobs, label=_group_label)


def _group_label(group: Sequence[Cell]) -> str:
    """Return the label, for messages, of the runs that share a process: their column and seed, which are equal."""
    any_cell = group[0]
    return f"{any_cell.column}, seed {any_cell.seed}"


def _run_group(cells: Sequence[Cell], out: Path, force: bool, quiet: bool) -> Iterator[Outcome]:
    """Run cells in one process of :func:`run_parallel`, and show their progress.

    Args:
        cells: The runs of one column and seed of a table.
        out: The folder that contains ``runs``.
        force: Repeat finished runs.
        quiet: Show no progress.
    """
    with reporting(quiet=quiet) as reporter:

        def observers(cell: Cell, clients: Clients) -> list[Observer]:
            return [reporter.watch(clients, title_of(cell))]

        yield from run_cells(cells, out, force=force, observers=observers, waiting=reporter.waiting)


_LISTED = 3
"""Largest number of missing inputs that an error message names."""


def check_hub(plan: Plan) -> None:
    """Check that the Hugging Face hub is reachable if a plan needs base models or data that are not cached.

    Raises:
        RunError: Something is neither cached nor reachable; the message says what can be run instead.
    """
    missing = _uncached(plan)
    if not missing:
        return
    from huggingface_hub import constants

    if is_offline():
        reason = "HF_HUB_OFFLINE is set"
    elif not is_hub_reachable(constants.ENDPOINT):
        reason = f"the hub ({constants.ENDPOINT}) cannot be reached"
    else:
        return
    listed = ", ".join(missing[:_LISTED])
    if len(missing) > _LISTED:
        listed += f" and {len(missing) - _LISTED} more"
    raise RunError(f"reproduce {plan.name}: needs {listed} from the hub, and {reason}; {_offline_commands(plan)}")


def _offline_commands(plan: Plan) -> str:
    """Return the part of an error message that names commands which run the plan, or a similar one, without the hub."""
    commands = []
    if "cpu" in plan.study.scales:
        commands.append("--scale cpu --data FOLDER runs it on local files (layout: papers/docs/results.md)")
    paper = plan.name.partition("/")[0]  # "comigs" of "comigs/table1"
    for archive in published_runs():  # such as "comigs-cpu"
        if archive.startswith(f"{paper}-"):
            scale = archive.removeprefix(f"{paper}-")
            commands.append(f"--scale {scale} --measured {archive} prints published runs")
    if not commands:
        commands.append("--scale smoke runs it on text that comes with comingle")
    return "; ".join(commands)


def _uncached(plan: Plan) -> list[str]:
    """Return the names of base models and data sets that a plan has to download from the hub, without duplicates."""
    names: dict[str, None] = {}  # an ordered set
    for cell in plan.cells:
        base = cell.recipe.base
        is_hub_name = "/" in base and is_public(base) and not expand_home(base).exists()  # "owner/model", not a path
        if is_hub_name and cached_folder(base) is None:
            names[base] = None
        for name in _uncached_data_sets(plan, cell):
            names[name] = None
    return list(names)


def _uncached_data_sets(plan: Plan, cell: Cell) -> Iterator[str]:
    """Yield the names of data sets that a run has to download from the hub.

    Images and questions without a local path are always yielded, since it is not known whether they are cached.

    Args:
        plan: The plan of the cell.
        cell: The run of one row, column and seed.
    """
    data_section = cell.recipe.data.model_dump()
    for source in _all_strings(data_section):
        if source.startswith(HUB_PREFIX):
            name = parse_hub_name(source).name
            if not _is_cached(name):
                yield name
    data_set = plan.study.data[plan.column_of(cell.column).data]
    has_images_or_questions = data_set.images or data_set.questions
    task_or_questions = data_section.get("task") or data_section.get("questions") or {}
    if has_images_or_questions and task_or_questions.get("path") is None:
        yield data_set.images or data_set.label


def _all_strings(content: object) -> Iterator[str]:
    """Yield every string in nested mappings and lists, such as a recipe; keys of mappings are not included."""
    if isinstance(content, str):
        yield content
        return
    if isinstance(content, dict):
        parts = list(content.values())
    elif isinstance(content, list | tuple):
        parts = list(content)
    else:
        parts = []
    for part in parts:
        yield from _all_strings(part)


def _is_cached(name: str) -> bool:
    """Return whether the package ``datasets`` has cached a data set; do not import it, which takes seconds."""
    from huggingface_hub import constants

    cache_folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    folder_name = name.replace("/", "___")  # as ``datasets`` names the folder of OWNER/NAME
    return (Path(cache_folder) / folder_name).is_dir()


MAX_PROMPT_TOKENS = 160
"""Largest number of tokens of a prompt."""


def draw_routes(plan: Plan, entries: Mapping[tuple[str, str], Entry]) -> Iterator[tuple[str, Figure]]:
    """Yield figures of the study's prompts, with each token coloured by the expert to which it is routed.

    Args:
        plan: The figure's plan. With ``plot.own`` there is one figure of a run, in which each prompt is routed by the
            model of its own user; otherwise one per layer, in which each prompt is routed by every user's model.
        entries: The runs of all seeds by (row, column). Of each entry only the run of the first seed is drawn.

    Yields:
        The suffix of the figure's file name, and the figure.

    Raises:
        RunError: There are not as many prompts as users.
    """
    from comingle.reports.page import own_texts_figure, tokens_figure

    plot = plan.experiment.plot
    assert plot is not None
    for (row, column), entry in entries.items():
        view = prompts_view(plan, column, entry)
        layers = [layer_of(name, view.layers) for name in plot.tokens]
        layers = list(dict.fromkeys(layers))  # in a small model the first, middle and last layer may be the same
        if plot.own:
            yield f"{column}-{row}", own_texts_figure(view, layers)
        else:
            for layer in layers:
                yield f"{column}-{row}-layer{layer}", tokens_figure(view, layer)


def layer_of(name: str, layers: int) -> int:
    """Return the index of the "first", "middle" or "last" of ``layers`` layers; of twelve these are 0, 5 and 11."""
    return {"first": 0, "middle": (layers - 1) // 2, "last": layers - 1}[name]


def prompts_view(plan: Plan, column: str, entry: Entry) -> TokenView:
    """Route a paper's example prompts through every user's model, and return the gates, to be drawn as coloured tokens.

    The prompts and their users have the same order: prompt i is in the language or on the subject of user i's training
    data. Every user's model routes all prompts.

    Args:
        plan: The plan of the figure: its rows, columns and runs.
        column: The column, which determines the data set and so the prompts.
        entry: The runs of a row and column, one per seed; only the first is shown.

    Raises:
        RunError: There are not as many prompts as users.
    """
    import comingle
    from comingle.runs.views import view_of

    run = comingle.load(entry.first.folder)
    prompts = plan.study.prompts[plan.column_of(column).data]  # text by language or subject
    users = [user.name for user in run.federation.clients.users]
    if len(prompts) != len(users):
        raise RunError(f"{plan.name}: prompts for {', '.join(prompts)}, and users {', '.join(users)}")
    view = view_of(run, entry.label, list(prompts.items()), users, MAX_PROMPT_TOKENS)
    # Mark prompt i as a text of user i (`owner`) that resembles its training text (`in_distribution`), which need not
    # hold for the texts on which the recipe tests users.
    texts = tuple(replace(text, owner=user) for text, user in zip(view.texts, users, strict=True))
    return replace(view, texts=texts, in_distribution=True)


Entries = Mapping[tuple[str, str], Any]
"""The runs of all seeds as an ``Entry`` of the reports, by (row, column)."""
Figures = Iterator[tuple[str, Any]]
"""Figures, each with the suffix of its file name."""


def draw(plan: Plan, outcomes: Mapping[str, Outcome], folder: Path) -> list[Path]:
    """Draw a published figure from finished runs, save it as PNG and SVG, and return the paths of the files.

    Args:
        plan: The plan of the figure: its rows, columns and runs.
        outcomes: The runs that have ended, by run name, with their metrics or the reason why they diverged.
        folder: The folder to write to.

    Raises:
        RunError: matplotlib is not installed, or no run has what the figure shows.
    """
    try:
        from comingle.reports.canvas import save
    except ImportError:
        raise RunError("figures need the package matplotlib: pip install 'comingle[reports]'") from None
    from comingle_papers.reproduce.counted import draw_usage

    assert plan.experiment.plot is not None
    draw_by_kind: dict[str, Callable[[Plan, Entries], Figures]] = {
        "curves": _curve_figures,
        "scores": _score_figures,
        "sweep": _sweep_figures,
        "usage": partial(draw_usage, folder=folder),
        "tokens": draw_routes,
    }
    draw_figures = draw_by_kind[plan.experiment.plot.kind]
    figures = list(draw_figures(plan, read_entries(plan, outcomes)))
    if not figures:
        raise RunError(f"{plan.name}: no finished run has the data of this figure")
    figure_name = plan.name.partition("/")[2]  # "figure5" of "comigs/figure5"
    paths: list[Path] = []
    for suffix, figure in figures:
        paths += save(figure, folder, f"{figure_name}-{suffix}")
    return paths


def read_entries(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[tuple[str, str], Entry]:
    """Return the finished runs of each (row, column), labelled with the row's label; diverged runs are left out.

    Args:
        plan: The plan of the runs.
        outcomes: The runs that have ended, by run name, with their metrics or the reason why they diverged.
    """
    from comingle.reports.runs import Entry, read_run

    runs: dict[tuple[str, str], list[Any]] = {}
    for cell in plan.cells:
        outcome = outcomes.get(cell.folder)
        if outcome is not None and not outcome.diverged:
            runs_of_seeds = runs.setdefault((cell.row, cell.column), [])
            runs_of_seeds.append(read_run(outcome.folder))
    rows = plan.experiment.rows
    return {
        (row, column): Entry(label=rows[row].label or row, runs=tuple(runs_of_seeds))
        for (row, column), runs_of_seeds in runs.items()
    }


def _curve_figures(plan: Plan, entries: Entries) -> Figures:
    """Yield for each column a figure of test results against local iterations, one curve per row.

    Each figure has the mean over users, then each user (CoMiGS: Figures 5 to 7, 9, 11 to 13). With ``plot.mixtures``
    figures of the mixture weights follow, for rows whose users learn to mix adapters.

    Args:
        plan: The plan of the figure: its rows, columns and runs.
        entries: The runs of all seeds, by (row, column).
    """
    from comingle.reports.figures import curves_figure

    plot = plan.experiment.plot
    assert plot is not None
    for column in plan.columns:
        entry_by_row = {row: entries[row, column] for row in plan.rows if (row, column) in entries}
        if entry_by_row:
            # start=False: the evaluation before training would set the scale of the y axis.
            yield column, curves_figure(list(entry_by_row.values()), start=False, measure=plot.measure)
        if plot.mixtures:
            yield from _mixture_figures(entry_by_row, column)


def _mixture_figures(entry_by_row: Mapping[str, Entry], column: str) -> Figures:
    """Yield a figure of mixture weights, users x adapters over rounds, for each row whose users learn to mix adapters.

    Args:
        entry_by_row: The runs of each row; the first seed is drawn.
        column: The column of all these runs, for the names of the figures.
    """
    from comingle.reports.figures import mixtures_figure, read_mixtures

    for row, entry in entry_by_row.items():
        mixtures = read_mixtures(entry.first.folder)
        if mixtures is not None and mixtures.learned:
            yield f"{column}-{row}-mixtures", mixtures_figure(mixtures)


def _score_figures(plan: Plan, entries: Entries) -> Figures:
    """Yield for each column and row a figure of each expert's mean gate, by layer and round (CoMiGS: Figures 4 and 10).

    Rows without a router have no figure.

    Args:
        plan: The plan of the figure: its rows, columns and runs.
        entries: The runs of all seeds, by (row, column).
    """
    from comingle.reports.figures import scores_figure

    for (row, column), entry in entries.items():
        if entry.first.has_routers:
            yield f"{column}-{row}", scores_figure(entry)


def _sweep_figures(plan: Plan, entries: Entries) -> Figures:
    """Yield for each column a figure of a sweep over two settings of the method (CoMiGS: Figure 8).

    A figure shows the last test perplexity over one setting, with one line for each value of the other.

    Args:
        plan: The figure's plan; its ``plot`` names the settings on the x axis (``x``) and of the lines (``series``).
        entries: The runs of all seeds, by (row, column).
    """
    from comingle.reports.runs import Spread, final_result

    plot = plan.experiment.plot
    assert plot is not None
    for column in plan.columns:
        lines: dict[Any, dict[Any, Spread]] = {}  # by value of ``series``, then by value of ``x``
        for cell in plan.cells:
            entry = entries.get((cell.row, column))
            if cell.column != column or entry is None:
                continue
            perplexity = final_result(entry)
            if perplexity is not None:
                settings = cell.recipe.method.settings
                line = lines.setdefault(settings[plot.series], {})
                line[settings[plot.x]] = perplexity
        if lines:
            yield column, _draw_sweep(lines, x=plot.x, series=plot.series)


def _draw_sweep(lines: Mapping[Any, Mapping[Any, Any]], *, x: str, series: str) -> Figure:
    """Draw the mean test perplexity against a setting ``x``, with deviations and one line per value of ``series``.

    Args:
        lines: Perplexities by value of ``series``, then by value of ``x``; each a ``Spread`` over seeds.
        x: Name of the setting on the x axis.
        series: Name of the setting that has one line per value.
    """
    from comingle.reports.canvas import draw as draw_axes
    from comingle.reports.canvas import styles

    def paint(figure: Any, axes: list[Any]) -> None:
        (panel,) = axes
        series_values = sorted(lines)
        styles_of_lines = styles([str(value) for value in series_values])
        for series_value, style in zip(series_values, styles_of_lines, strict=True):
            line = lines[series_value]
            x_values = sorted(line)
            spreads = [line[x_value] for x_value in x_values]
            panel.errorbar(
                x_values,
                [spread.mean for spread in spreads],
                yerr=[spread.std or 0.0 for spread in spreads],
                color=style.colour.light,
                linestyle=style.line,
                marker=style.marker,
                label=f"{series} {series_value}",
            )
        all_x_values = [x_value for line in lines.values() for x_value in line]
        # Values such as 1, 2, 4 ... 64 are spaced evenly on a logarithmic axis.
        if min(all_x_values) > 0 and max(all_x_values) > 20 * min(all_x_values):
            panel.set_xscale("log")
        panel.set_xlabel(x)
        panel.set_ylabel("test perplexity")
        panel.legend()

    rows, columns, panel_inches = 1, 1, (4.6, 3.2)
    return draw_axes(rows, columns, panel_inches, paint)
