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
from comingle.utils.terminal import errors
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


def write_measured(folder: Path, cell: Cell) -> None:
    """Mark a run as finished by ``measured.json``: the settings that determine its result, and how it was made."""
    write_json(folder / MEASURED, {"computed": cell.computed, "made": _provenance()})


def is_measured(folder: Path) -> bool:
    """Return whether a folder holds a finished run, which is marked by the file ``measured.json``.

    Raises:
        RunError: The file belongs to another run, or is damaged.
    """
    if not (folder / MEASURED).exists():
        return False
    read_measured(folder)  # raises
    return True


def read_diverged(folder: Path) -> str:
    """Return why a run diverged; empty where it did not."""
    path = folder / DIVERGED
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def read_measured(folder: Path) -> dict[str, Any]:
    """Return the record of a finished run: the settings that determine its result, and how it was made.

    Raises:
        RunError: The folder has the record of another run, or a damaged one.
    """
    path = folder / MEASURED
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if name_of(content["computed"]) != folder.name:
            raise RunError(f"{path}: belongs to another run, {name_of(content['computed'])}; use another --out")
        return {key: content[key] for key in ("computed", "made")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: damaged ({error!r}); delete it to repeat the run") from None


def _provenance() -> dict[str, str]:
    """Return version and commit of comingle, today's date and the kind of machine, for ``measured.json``."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    # The first of equal lines, one for each core.
    processor = [line.partition(": ")[2] for line in lines if line.startswith("model name")][:1]
    cards = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    machine = [platform.machine(), *processor, *cards, f"torch {torch.__version__}"]
    today = date.today().isoformat()
    return {"version": comingle.__version__, "commit": _commit(), "date": today, "machine": ", ".join(machine)}


def _commit() -> str:
    """Return the commit of a checkout, with "-dirty" if files are changed; empty for an installed package."""
    root = Path(comingle.__file__).parents[2]  # of src/comingle/__init__.py in a checkout
    if not (root / ".git").exists():
        return ""
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def digest_inputs(inputs: Inputs) -> dict[str, str]:
    """Return digests of a run's base model and of every user's data, by description, such as "the data of 'ann'".

    A run that stores its users on disk has one digest for all users, "the users". The tokenizer's digest is left out,
    since it changes with the version of its library. The tokenizer's effect on the text is part of the
    data's digests.
    """
    digests = {"the base": inputs.base} if inputs.base else {}
    digests |= {f"the data of {name!r}": digest_all(user.digests) for name, user in inputs.users.items()}
    digests |= {"the users": digest_all(inputs.settings[POPULATION])} if POPULATION in inputs.settings else {}
    return {what: digest[:_DIGEST_LENGTH] for what, digest in digests.items()}


def check_same_inputs(where: object, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that a run read the inputs that would be read now, by the digests of :func:`digest_inputs`.

    Args:
        where: The run, for error messages.
        then: Digests of the inputs that the run read, by what they digest, such as "the base".
        now: Digests of the inputs on this machine, with the same keys.

    Raises:
        RunError: A digest differs, or is lacking on one side; the message names the first.
    """
    for name in [*then, *now]:
        if then.get(name) != now.get(name):
            raise RunError(
                f"{where}: {name} was {then.get(name, 'not there')} when it was measured, and is "
                f"{now.get(name, 'not there')}; use the same version, or another --out"
            )


RUNS = "runs"

Waiting = Callable[[str], AbstractContextManager[Any]]
"""Context manager that shows what is being waited for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a cell: its run folder, and whether it ran now, existed before, or diverged.

    ``published`` are the metrics of an archived run, which has no folder.
    """

    cell: Cell
    folder: Path
    seconds: float
    ran: bool
    diverged: str = ""
    published: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The result of a run that did not diverge."""
        return read_metrics(self.folder) if self.published is None else self.published


@dataclass(kw_only=True)
class Estimate:
    """Estimate of the remaining time of a table, from the seconds per unit of work of finished runs, by base model."""

    seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)

    def learn(self, outcome: Outcome) -> None:
        """Add time and work of a run to the sums of its base model; ignore runs that existed before."""
        if outcome.ran:
            base = outcome.cell.recipe.base
            self.seconds[base] = self.seconds.get(base, 0.0) + outcome.seconds
            self.work[base] = self.work.get(base, 0.0) + outcome.cell.work

    def seconds_left(self, cells: Sequence[Cell]) -> float | None:
        """Estimate the remaining seconds; return None before any run is finished.

        A base model without a finished run is assumed to need the mean time per unit of work.
        """
        if not self.work:
            return None
        mean_pace = sum(self.seconds.values()) / sum(self.work.values())
        pace_by_base = {base: self.seconds[base] / work for base, work in self.work.items()}
        return sum(cell.work * pace_by_base.get(cell.recipe.base, mean_pace) for cell in cells)


def unique_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Drop duplicates from a table's cells: of runs with equal results, keep the first."""
    cell_by_folder: dict[str, Cell] = {}
    for cell in cells:
        # The folder's name has a digest of all settings that determine the result.
        cell_by_folder.setdefault(cell.folder, cell)
    return list(cell_by_folder.values())


def title_of(cell: Cell) -> str:
    """Return the display name of a table's run."""
    return f"{cell.column} · {cell.row}, seed {cell.seed}"


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    force: bool = False,
    observers: Callable[[Cell, Clients], Sequence[Observer]] = lambda cell, clients: (),
    waiting: Waiting = nullcontext,
) -> Iterator[Outcome]:
    """Run the cells of a table in order, each in a folder below ``out/runs``; yield the outcome of each cell.

    A finished run is not repeated without ``force``, and an interrupted run is resumed. A run whose training diverges
    is recorded as diverged and does not stop the others. Checkpoints of nets are deleted at the end of a run: a copy of
    every user's net would fill the disk, and no report reads them.

    Args:
        cells: The runs of the table, one for each row, column and seed. Consecutive cells with the same inputs load
            their data and base model once.
        out: The folder that contains ``runs``.
        force: Repeat finished runs.
        observers: Returns the observers of a cell's run.
        waiting: Shows what is being waited for.

    Raises:
        RunError: A run folder holds another run, or was made with other text or another base model.
    """
    cache = InputCache(waiting)
    for cell in unique_cells(cells):
        folder = out / RUNS / cell.folder
        if not force and is_measured(folder):
            check_same_inputs(folder, digest_inputs(read_inputs(folder)), cache.input_digests(cell))
            yield Outcome(cell=cell, folder=folder, seconds=0.0, ran=False, diverged=read_diverged(folder))
            continue
        begun = (folder / "recipe.yaml").exists()
        # Restart if text or base model now have other paths: a checkpoint can only be resumed with the same paths,
        # which are part of the recipe's fingerprint.
        resume = begun and not force and load_recipe(folder).fingerprint == cell.recipe.fingerprint
        run_data = cache.run_data(cell)
        started = time.perf_counter()
        for name in (DIVERGED, MEASURED):
            (folder / name).unlink(missing_ok=True)
        restart = force or (begun and not resume)
        try:
            run_in(folder, cell.recipe, run_data, resume=resume, force=restart, observers=partial(observers, cell))
        except DivergenceError as error:
            reason = error.__cause__ or error  # the cause, as its text has no checkpoint path
            write_text(folder / DIVERGED, f"{reason}\n")
        if not run_data.kind.needs_base:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_measured(folder, cell)
        yield Outcome(
            cell=cell, folder=folder, seconds=time.perf_counter() - started, ran=True, diverged=read_diverged(folder)
        )


def experiment_folder(out: Path, name: str, *, resume: bool, force: bool) -> Path:
    """Return the folder of one table below ``out``; raise an error if it exists without ``resume`` or ``force``.

    Args:
        out: The folder that contains the tables.
        name: The experiment, as ``comigs/table1``.
        resume: Continue an existing table.
        force: Replace an existing table.

    Raises:
        RunError: The folder exists and neither ``resume`` nor ``force`` is given.
    """
    folder = out / name.partition("/")[2]
    if folder.exists() and not (resume or force):
        raise RunError(f"{folder}: exists; --resume continues it, --force replaces it, --out names another")
    return folder


def scores(outcomes: Mapping[str, Outcome], cells: Sequence[Cell], metric: str) -> dict[tuple[str, str], list[float]]:
    """Return the values of a metric over all seeds, by (row, column); missing and diverged runs are left out.

    Each value is a run's mean over users. Accuracies are in per cent, as papers print them.

    Args:
        outcomes: The outcomes by run name.
        cells: The runs of the table, one for each row, column and seed.
        metric: The metric's key, as ``mean_test_accuracy``.
    """
    factor = 100 if metric.endswith("_accuracy") else 1
    by_cell: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        outcome = outcomes.get(cell.folder)
        if outcome is None or outcome.diverged:
            continue
        by_cell.setdefault((cell.row, cell.column), []).append(factor * _metric_value(outcome.metrics, metric))
    return by_cell


def results(outcomes: Mapping[str, Outcome], cells: Sequence[Cell], metric: str) -> dict[str, dict[str, Any]]:
    """Return each user's value of a metric in nested mappings by column, row, seed and user.

    Runs that are missing or diverged are left out.

    Args:
        outcomes: The outcomes by run name.
        cells: The runs of the table, one for each row, column and seed.
        metric: The metric's key.
    """
    by_column: dict[str, dict[str, Any]] = {}
    for cell in cells:
        outcome = outcomes.get(cell.folder)
        if outcome is None or outcome.diverged:
            continue
        key = metric.removeprefix("mean_")  # a user's key for what the metric averages over users
        users = {name: user.get(key) for name, user in outcome.metrics["users"].items()}
        by_column.setdefault(cell.column, {}).setdefault(cell.row, {})[cell.seed] = users
    return by_column


def _metric_value(metrics: Mapping[str, Any], metric: str) -> float:
    """Return a metric of a run, averaged over users.

    ``metrics.json`` has the mean of the metric that compares models, such as accuracy. For other metrics, such as
    ROUGE-1, it has only the users' values, and the mean is computed here.

    Args:
        metrics: The run's ``metrics.json``.
        metric: Key of the metric, as ``mean_test_rouge1``.
    """
    key = metric.removeprefix("mean_")
    return metrics[metric] if metric in metrics else statistics.fmean(user[key] for user in metrics["users"].values())


class InputCache:
    """Cache of the base model and the data loaded last, so that consecutive runs with the same inputs share them.

    Args:
        waiting: Shows that a base model is being loaded.
    """

    def __init__(self, waiting: Waiting = nullcontext) -> None:
        self._waiting = waiting
        self._base: tuple[str, Base] | None = None
        self._run_data: tuple[str, RunData] | None = None
        self._digests: tuple[RunData, dict[str, str]] | None = None

    def input_digests(self, cell: Cell) -> dict[str, str]:
        """Return the digests of a run's base model and data, as :func:`digest_inputs` makes them."""
        run_data = self.run_data(cell)
        digested_data, digests = self._digests or (None, {})
        if digested_data is not run_data:  # the cell has other inputs than the cell before
            digests = digest_inputs(describe(run_data, cell.recipe))
            self._digests = run_data, digests
        return digests

    def run_data(self, cell: Cell) -> RunData:
        """Return the base model and the data of a run (a cell of a table).

        Data is loaded anew if base, runtime, seed or section ``data`` differ from those of the run before. The base
        model is loaded anew if base or runtime differ.
        """
        recipe = cell.recipe
        base_key = f"{recipe.base} {recipe.runtime.model_dump_json()}"
        data_key = f"{base_key} {recipe.seed} {recipe.data.model_dump_json()}"
        # The cache has pairs: the key of what was loaded last, and what was loaded.
        cached_data_key, cached_data = self._run_data or (None, None)
        if cached_data is not None and cached_data_key == data_key:
            return cached_data
        cached_base_key, cached_base = self._base or (None, None)
        base = cached_base if cached_base_key == base_key else None
        # Free the old data and base model before loading the next.
        del cached_data, cached_base
        self._run_data = self._base = self._digests = None
        with self._waiting(LOADING):
            loaded = prepare(recipe, base=base)
        self._run_data = (data_key, loaded)
        self._base = None if loaded.base is None else (base_key, loaded.base)
        return loaded


def run_parallel(
    cells: Sequence[Cell], out: Path, *, jobs: int, force: bool = False, quiet: bool = True
) -> Iterator[Outcome]:
    """Run the cells of a table like :func:`run_cells`, ``jobs`` at a time; yield outcomes in order of completion.

    Runs of one column and seed share a process, since they share their text. Unless ``quiet``, and where stderr is
    no terminal, each run logs its rounds. Each process gets a GPU of its own as long as there are enough.

    Args:
        cells: The runs of a table, one for each row, column and seed.
        out: As in :func:`run_cells`.
        jobs: The number of processes.
        force: Repeat finished runs.
        quiet: Log no rounds.

    Raises:
        ComingleError: A process failed; raised when the others are done.
    """
    groups = [list(group) for _, group in groupby(unique_cells(cells), key=lambda cell: (cell.column, cell.seed))]
    quiet_workers = quiet or errors.is_terminal  # several progress bars would overwrite each other
    yield from in_processes(
        groups, partial(_run_group, out=out, force=force, quiet=quiet_workers), jobs=jobs, label=_group_label
    )


def _group_label(group: Sequence[Cell]) -> str:
    """Return the label of cells that run in one process: their column and seed."""
    return f"{group[0].column}, seed {group[0].seed}"


def _run_group(cells: Sequence[Cell], out: Path, force: bool, quiet: bool) -> Iterator[Outcome]:
    """Run cells with :func:`run_cells` and show their progress; the work of one process of :func:`run_parallel`.

    Args:
        cells: The runs of one column and seed of a table.
        out: The folder that contains ``runs``.
        force: Repeat finished runs.
        quiet: Log no rounds.
    """
    with reporting(quiet=quiet) as reporter:

        def observers(cell: Cell, clients: Clients) -> list[Observer]:
            return [reporter.watch(clients, title_of(cell))]

        yield from run_cells(cells, out, force=force, observers=observers, waiting=reporter.waiting)


_LISTED = 3
"""Largest number of missing inputs that an error message names."""


def check_hub(plan: Plan) -> None:
    """Check that the hub is reachable if a plan needs base models or data from it that are not cached.

    Without this check the hub's client would retry for half a minute, and its error would name a single file.

    Raises:
        RunError: Something is neither cached nor reachable; the message says what can be run instead.
    """
    missing = _uncached(plan)
    if not missing:
        return
    from huggingface_hub import constants

    if not is_offline() and is_hub_reachable(constants.ENDPOINT):
        return
    why = "HF_HUB_OFFLINE is set" if is_offline() else f"the hub ({constants.ENDPOINT}) cannot be reached"
    listed = ", ".join(missing[:_LISTED]) + (f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else "")
    raise RunError(f"reproduce {plan.name}: needs {listed} from the hub, and {why}; {_offline_commands(plan)}")


def _offline_commands(plan: Plan) -> str:
    """Return the part of an error message that names commands which run the plan, or a similar one, without the hub."""
    ways = []
    if "cpu" in plan.study.scales:
        ways.append("--scale cpu --data FOLDER runs it on local files (layout: papers/docs/results.md)")
    prefix = plan.name.partition("/")[0] + "-"  # an archive of published runs is named after paper and scale
    ways += [
        f"--scale {archive.removeprefix(prefix)} --measured {archive} prints published runs"
        for archive in published_runs()
        if archive.startswith(prefix)
    ]
    return "; ".join(ways) or "--scale smoke runs it on text that comes with comingle"


def _uncached(plan: Plan) -> list[str]:
    """Return the names of base models and data sets that a plan has to download from the hub, without duplicates."""
    names: dict[str, None] = {}  # an ordered set
    for cell in plan.cells:
        base = cell.recipe.base
        # A name OWNER/MODEL on the hub: not a path, and not a name of a model with random weights.
        if "/" in base and is_public(base) and not expand_home(base).exists() and cached_folder(base) is None:
            names[base] = None
        for name in _uncached_data_sets(plan, cell):
            names[name] = None
    return list(names)


def _uncached_data_sets(plan: Plan, cell: Cell) -> Iterator[str]:
    """Yield the names of data sets that a run has to download from the hub, since they are not in the cache.

    Images and questions without a ``path`` are always yielded, since it is not checked whether they are in the cache.
    Images have their name, questions the label of their data set.

    Args:
        plan: The plan of the cell.
        cell: The run of one row, column and seed.
    """
    data_section = cell.recipe.data.model_dump()
    for source in _all_strings(data_section):
        if source.startswith(HUB_PREFIX) and not _is_cached(name := parse_hub_name(source).name):
            yield name
    data_set = plan.study.data[plan.column_of(cell.column).data]
    task_or_questions = data_section.get("task") or data_section.get("questions") or {}
    if (data_set.images or data_set.questions) and task_or_questions.get("path") is None:
        yield data_set.images or data_set.label


def _all_strings(content: object) -> Iterator[str]:
    """Yield every string in nested mappings and lists; keys of mappings are not included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from (text for part in content.values() for text in _all_strings(part))
    elif isinstance(content, list | tuple):
        yield from (text for part in content for text in _all_strings(part))


def _is_cached(name: str) -> bool:
    """Return whether ``datasets`` has cached a data set; avoid importing ``datasets``, which takes seconds."""
    from huggingface_hub import constants

    folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    return (Path(folder) / name.replace("/", "___")).is_dir()  # as ``datasets`` names the folder of OWNER/NAME


MAX_PROMPT_TOKENS = 160
"""Largest number of tokens of a prompt."""


def draw_routes(plan: Plan, entries: Mapping[tuple[str, str], Entry]) -> Iterator[tuple[str, Figure]]:
    """Yield figures of the study's prompts, with each token coloured by the expert to which it is routed.

    The figures show the models of the first seed of each row and column.

    Args:
        plan: The figure's plan. With ``plot.own`` there is one figure with each prompt in one user's model, otherwise
            one figure per layer with each prompt in every user's model.
        entries: The runs of all seeds, by (row, column).

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
        # Without duplicates: in a small model the first, middle and last layer may be the same.
        layers = list(dict.fromkeys(layer_of(name, view.layers) for name in plot.tokens))
        if plot.own:
            yield f"{column}-{row}", own_texts_figure(view, layers)
        else:
            for layer in layers:
                yield f"{column}-{row}-layer{layer}", tokens_figure(view, layer)


def layer_of(name: str, layers: int) -> int:
    """Return the index of the first, middle or last of ``layers`` layers; for twelve the paper shows 0, 5 and 11."""
    return {"first": 0, "middle": (layers - 1) // 2, "last": layers - 1}[name]


def prompts_view(plan: Plan, column: str, entry: Entry) -> TokenView:
    """Return the routing of the study's prompts in each user's model, to be drawn as coloured tokens.

    Prompt i belongs to user i: it is a text of the kind (a language or a subject) that this user trains on.

    Args:
        plan: The figure's plan.
        column: The column, which determines the data set and so the prompts.
        entry: The runs of a row and column, one per seed; only the first is shown.

    Raises:
        RunError: There are not as many prompts as users.
    """
    import comingle
    from comingle.runs.views import view_of

    run = comingle.load(entry.first.folder)
    prompts = plan.study.prompts[plan.column_of(column).data]
    users = [user.name for user in run.federation.clients.users]
    if len(prompts) != len(users):
        raise RunError(f"{plan.name}: prompts for {', '.join(prompts)}, and users {', '.join(users)}")
    view = view_of(run, entry.label, list(prompts.items()), users, MAX_PROMPT_TOKENS)
    # By order, not by name: users of the hub's text have other names than the study's prompts.
    texts = tuple(replace(text, owner=user) for text, user in zip(view.texts, users, strict=True))
    # The recipe may test users on another distribution than their training text, but the prompts resemble that text.
    return replace(view, texts=texts, in_distribution=True)


Entries = Mapping[tuple[str, str], Any]
"""The runs of all seeds as an ``Entry`` of the reports, by (row, column)."""
Figures = Iterator[tuple[str, Any]]
"""Figures, each with the suffix of its file name."""


def draw(plan: Plan, outcomes: Mapping[str, Outcome], folder: Path) -> list[Path]:
    """Draw a published figure from finished runs, and save it as PNG and SVG.

    Args:
        plan: The figure's plan.
        outcomes: The outcomes by run name.
        folder: The folder to write to.

    Returns:
        The files written.

    Raises:
        RunError: matplotlib is not installed, or no run has what the figure shows.
    """
    try:
        from comingle.reports.canvas import save
    except ImportError:
        raise RunError("figures need the package matplotlib: pip install 'comingle[reports]'") from None
    from comingle_papers.reproduce.counted import draw_usage

    assert plan.experiment.plot is not None
    figures_by_kind: dict[str, Callable[[Plan, Entries], Figures]] = {
        "curves": _curve_figures,
        "scores": _score_figures,
        "sweep": _sweep_figures,
        "usage": lambda plan, entries: draw_usage(plan, entries, folder),
        "tokens": draw_routes,
    }
    stem = plan.name.partition("/")[2]
    figures = list(figures_by_kind[plan.experiment.plot.kind](plan, read_entries(plan, outcomes)))
    if not figures:
        raise RunError(f"{plan.name}: no finished run has the data of this figure")
    return [path for suffix, figure in figures for path in save(figure, folder, f"{stem}-{suffix}")]


def read_entries(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[tuple[str, str], Entry]:
    """Return the finished runs of each (row, column), labelled with the row's label; diverged runs are left out.

    Args:
        plan: The plan of the runs.
        outcomes: The outcomes by run name.
    """
    from comingle.reports.runs import Entry, read_run

    runs: dict[tuple[str, str], list[Any]] = {}
    for cell in plan.cells:
        outcome = outcomes.get(cell.folder)
        if outcome is not None and not outcome.diverged:
            runs.setdefault((cell.row, cell.column), []).append(read_run(outcome.folder))
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
        plan: The figure's plan.
        entries: The runs of all seeds, by (row, column).
    """
    from comingle.reports.figures import curves_figure

    plot = plan.experiment.plot
    assert plot is not None
    for column in plan.columns:
        drawn_rows = [entries[row, column] for row in plan.rows if (row, column) in entries]
        if drawn_rows:
            # Leave out the evaluation before training: the base model's perplexity would set the scale.
            yield column, curves_figure(drawn_rows, start=False, measure=plot.measure)
        if plot.mixtures:
            named_entries = [(row, entries[row, column]) for row in plan.rows if (row, column) in entries]
            yield from _mixture_figures(named_entries, column)


def _mixture_figures(entries: Sequence[tuple[str, Entry]], column: str) -> Figures:
    """Yield a figure of mixture weights, users x adapters over rounds, for each row whose users learn to mix adapters.

    Args:
        entries: Names of rows with their runs; the first seed is drawn.
        column: The column of all these runs, for the names of the figures.
    """
    from comingle.reports.figures import mixtures_figure, read_mixtures

    for row, entry in entries:
        mixtures = read_mixtures(entry.first.folder)
        if mixtures is not None and mixtures.learned:
            yield f"{column}-{row}-mixtures", mixtures_figure(mixtures)


def _score_figures(plan: Plan, entries: Entries) -> Figures:
    """Yield for each column and row a figure of every layer's expert scores (CoMiGS: Figures 4 and 10).

    Rows without a router have no figure.

    Args:
        plan: The figure's plan.
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
    from comingle.reports.runs import Spread, final

    plot = plan.experiment.plot
    assert plot is not None
    for column in plan.columns:
        lines: dict[Any, dict[Any, Spread]] = {}
        for cell in plan.cells:
            entry = entries.get((cell.row, column))
            settings = cell.recipe.method.settings
            if cell.column == column and entry is not None and (last := final(entry)) is not None:
                lines.setdefault(settings[plot.series], {})[settings[plot.x]] = last
        if lines:
            yield column, _draw_sweep(lines, x=plot.x, series=plot.series)


def _draw_sweep(lines: Mapping[Any, Mapping[Any, Any]], *, x: str, series: str) -> Figure:
    """Draw the mean test perplexity of each value of ``x``, with deviations and one line per value of ``series``.

    Args:
        lines: Results by value of ``series``, then by value of ``x``; each a ``Spread`` over seeds.
        x: Name of the setting on the x axis.
        series: Name of the setting that has one line per value.
    """
    from comingle.reports.canvas import draw as draw_axes
    from comingle.reports.canvas import styles

    def paint(figure: Any, axes: list[Any]) -> None:
        styles_of_lines = styles([str(value) for value in sorted(lines)])
        for value, style in zip(sorted(lines), styles_of_lines, strict=True):
            points = sorted(lines[value].items())
            axes[0].errorbar(
                [x_value for x_value, _ in points],
                [point.mean for _, point in points],
                yerr=[point.std or 0.0 for _, point in points],
                color=style.colour.light,
                linestyle=style.line,
                marker=style.marker,
                label=f"{series} {value}",
            )
        values_of_x = [x_value for points in lines.values() for x_value in points]
        # Values that span more than a decade are usually chosen geometrically, as 1, 2, 4 ... 64.
        if min(values_of_x) > 0 and max(values_of_x) > 20 * min(values_of_x):
            axes[0].set_xscale("log")
        axes[0].set_xlabel(x)
        axes[0].set_ylabel("test perplexity")
        axes[0].legend()

    rows, columns, panel_inches = 1, 1, (4.6, 3.2)
    return draw_axes(rows, columns, panel_inches, paint)
