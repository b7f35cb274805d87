"""Plans: the runs that a published experiment needs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from comingle.config import Recipe, parse_recipe
from comingle.config.sections import complete_older
from comingle.config.settings import AUTO, SHORTEST
from comingle.data.conversations.section import ConversationsSection
from comingle.data.text.section import TextSection
from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.base import Method
from comingle.models.nets import make_net
from comingle.training.kinds.base import NETS
from comingle.utils.errors import RecipeError, did_you_mean
from comingle_papers.questions import QUESTIONS, QuestionsDataSection
from comingle_papers.reproduce.published import (
    Column,
    Experiment,
    Row,
    Scale,
    ScaledColumn,
    Study,
    data_folder,
    data_section,
    describe_lacking,
    find_absent,
    limits_by_name,
    load_experiment,
    merge,
    resolve_inside,
    with_placeholder,
)
from comingle_papers.tasks.image_tasks import REDUCED_MINIMUM, TASKS
from comingle_papers.tasks.kind import TaskDataSection, TaskSection
from comingle_papers.tasks.synthetic import DIMENSION, OUTPUTS

_NUM_IMAGES = {"mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
"""Numbers of train and test images of the data sets on the hub."""
_STEP_COST, _PARAMETER_COST = 2e7, 20
"""Cost of an optimiser step besides its samples, in multiply-adds: per step, and per parameter of each user in it
(copies, gradients, means)."""


def estimate_work(recipe: Recipe) -> float:
    """Estimate the computation of a run, to predict how long it takes compared with others of the same base model.

    A token or sample that is trained on counts three times as much as one that is evaluated.

    Returns:
        Tokens through a language model, or multiply-adds of a net.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    work_by_kind = {
        "task": _task_work,
        "questions": _questions_work,
        "text": _text_work,
        "conversations": _conversations_work,
    }
    return work_by_kind[recipe.data.kind](recipe, method)


def _evaluation_interval(recipe: Recipe) -> int:
    """Return the number of rounds between two evaluations; with ``every: auto``, set in the run, the smallest one."""
    return SHORTEST if recipe.evaluation.every == AUTO else recipe.evaluation.every


def _text_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on text, in trained tokens; an evaluated token counts as a third of a trained one.

    Four users are assumed, as in CoMiGS, since the data is not read, and 50,000 test tokens of each if the recipe sets
    no limit.
    """
    training = recipe.training
    users, limit = 4, cast(TextSection, recipe.data).max_test_tokens
    test_tokens = sum(limit.values()) if isinstance(limit, dict) else (limit or 50_000) * users
    evaluation_work = test_tokens / 3  # without backward pass
    batch_tokens = training.largest_batch_size * training.context * users
    # A phase takes ``steps`` after every ``every``-th local step, in one round of each group of ``turns`` rounds.
    steps_per_local_step = sum(phase.steps / phase.every / phase.turns for phase in method.client.phases)
    steps = training.rounds * training.most_local_steps * steps_per_local_step
    evaluations_of_training = training.rounds // _evaluation_interval(recipe) if method.trains else 0
    evaluations = 1 + evaluations_of_training  # 1: before training
    return steps * batch_tokens + evaluation_work * evaluations


def _conversations_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on conversations, in tokens.

    The work is the number of passes over all data times the data's tokens. A local epoch and an evaluation are one pass
    each. All conversations are assumed to fill the context and to be training data. If the recipe does not give their
    number, four users (as in CoMiGS) and 1,000 conversations of each are assumed.
    """
    training, dataset = recipe.training, cast(ConversationsSection, recipe.data).dataset
    users = len(dataset.users) if dataset is not None and isinstance(dataset.users, list) else 4
    conversations = (dataset.max_conversations if dataset is not None else None) or 1_000
    rounds = training.rounds if method.trains else 0
    evaluations = 1 + rounds // _evaluation_interval(recipe)  # 1: before training
    passes = rounds * training.local_epochs + evaluations
    return users * conversations * training.context * passes


def _questions_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on questions, in tokens, as if every question filled the context.

    To score a question, an evaluation reads the question twice and generates an answer, token by token. This takes
    about as long as training on the question. So trained and scored questions count alike. If neither the recipe nor
    the paper gives the number of test questions, it is assumed to be the number of train questions.
    """
    section = cast(QuestionsDataSection, recipe.data).questions
    setting, training = QUESTIONS[section.name], recipe.training
    users = len(section.languages or setting.languages)
    train = section.train or setting.train
    test = section.test or setting.test or train
    rounds = training.rounds if method.trains else 0
    evaluates_start = rounds > 0 and recipe.evaluation.first
    # At least one: a method that trains nothing is evaluated once.
    evaluations = max(1, ceil(rounds / _evaluation_interval(recipe)) + evaluates_start)
    num_trained, num_scored = rounds * training.local_epochs * train, evaluations * test  # of each user
    return users * training.context * (num_trained + num_scored)


def _task_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on a net, in multiply-adds.

    A forward and a backward pass together cost three forward passes. An optimiser step has a cost per user and a fixed
    cost. The fixed cost counts once for all participants of a round, since they are trained in one batch. An evaluation
    is a forward pass over the test samples of all users. If a method mixes several models or adapters and needs a pass
    through each, the work is multiplied by their number.
    """
    task = cast(TaskDataSection, recipe.data).task
    training, (users, train, test) = recipe.training, count_samples(task)
    participation = training.participation
    if isinstance(participation, list):  # the participants of each round
        participants = sum(map(len, participation)) / len(participation)
    else:
        participants = users * participation
    net = recipe.base.removeprefix(NETS) if recipe.base.startswith(NETS) else ""
    per_sample, parameters = net_size(task.name, net)
    mixture = method.placement.mixture
    # Adapters that are mixed by the losses of a batch or of each sample need one pass per adapter.
    has_pass_per_component = mixture is not None and (mixture.of == "models" or mixture.at in ("losses", "samples"))
    components = mixture.clusters if mixture is not None and has_pass_per_component else 1
    steps = training.local_epochs * ceil(train / training.largest_batch_size)
    passes_of_user = 3 * training.local_epochs * train * per_sample  # 3: forward and backward
    user_work = passes_of_user + steps * _PARAMETER_COST * parameters
    rounds = training.rounds if method.trains else 0
    training_work = rounds * (steps * _STEP_COST + participants * user_work)
    evaluations = 1 + rounds // _evaluation_interval(recipe)  # 1: before training
    evaluation_work = evaluations * users * test * per_sample
    return components * (training_work + evaluation_work)


def count_samples(task: TaskSection) -> tuple[int, int, int]:
    """Estimate how many samples each user of a task has, without reading the task's images.

    Returns:
        The number of users, which is exact, and the estimated numbers of train and test samples of each user.
    """
    setting = TASKS[task.name]
    users = task.users or setting.users
    num_images = _NUM_IMAGES.get(task.name)  # only of tasks that divide all images evenly among users
    if num_images is None:
        train, test = setting.train, setting.test
    else:
        train, test = (ceil(n / users) for n in num_images)
    # ``fraction`` of the train samples, but at least REDUCED_MINIMUM if there are as many.
    kept_train = min(train, max(REDUCED_MINIMUM, round(task.fraction * train)))
    return users, kept_train, task.test_samples or test


@cache
@torch.no_grad()
def net_size(task: str, net: str = "") -> tuple[int, int]:
    """Return the multiply-adds of one sample and the number of parameters of a net.

    The net is run once on a blank sample. Colour images are taken to be 32 x 32, grey images 28 x 28.

    Args:
        task: Name of the task, which determines the shapes of inputs and outputs.
        net: Name of the net; empty for the task's own.
    """
    setting = TASKS[task]
    is_on_images = bool(setting.hub)  # synthetic regressions are not on the hub
    shape: tuple[int, ...]
    if is_on_images:
        shape = (3, 32, 32) if setting.coloured else (1, 28, 28)
        outputs = setting.classes
    else:
        shape = (DIMENSION,)
        outputs = {str(kind): size for kind, size in OUTPUTS.items()}[task]
    multiply_adds: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):  # each output position uses every weight once
            multiply_adds.append(module.weight.numel() * output.numel() // len(module.weight))

    model = make_net(net or setting.net, shape, outputs, seed=0).eval()
    for module in model.modules():
        module.register_forward_hook(count)
    model(torch.zeros(1, *shape))
    return sum(multiply_adds), sum(parameter.numel() for parameter in model.parameters())


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSelection:
    """Options of the command line; None leaves a value to the scale.

    ``methods`` are names of rows or methods, ``base`` a base model, ``data`` the folder of local text and images, and
    ``changes`` the recipe keys of ``--set``.
    """

    scale: str = "paper"
    methods: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    base: str | None = None
    data: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run: a row and a column of the experiment with one seed."""

    row: str
    column: str
    seed: int
    recipe: Recipe
    data: Path | None = None
    """The folder with local text."""

    @cached_property
    def computed(self) -> dict[str, Any]:
        """Settings that determine the result, without the local paths of text and base model."""
        return with_placeholder(self.recipe.result_content, self.data)

    @cached_property
    def folder(self) -> str:
        """The name of the run folder; equal for cells that compute the same, in any table and on any machine."""
        return name_of(self.computed)

    @property
    def work(self) -> float:
        """Estimate of the run's computation, in a unit that is comparable among cells of one base model."""
        return estimate_work(self.recipe)


def name_of(computed: Mapping[str, Any]) -> str:
    """Return the name of a run's folder: method, seed and a digest of the settings that determine the result.

    Args:
        computed: The settings, as :attr:`Cell.computed`.
    """
    digest = hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:16]
    return f"{computed['method']['name']}-seed{computed['seed']}-{digest}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of an experiment at a scale, ordered by seed, and what cannot be run."""

    name: str
    study: Study
    experiment: Experiment
    scale: str
    scaled: Scale
    """The study's scale of that name with the experiment's changes."""
    jobs: int
    """Default number of parallel runs."""
    seeds: tuple[int, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]
    """Rows whose method does not exist."""
    left_out: dict[str, str]
    """Columns that are not run, with the reason."""

    def label(self, column: str) -> str:
        """Return a column's heading: the experiment's label, else the study's."""
        column_setting, study_column = _column_settings(self.study, self.experiment, column)
        return column_setting.label or study_column.label

    def column_of(self, column: str) -> Column:
        """Return the study's column that a column of the experiment refers to."""
        return _column_settings(self.study, self.experiment, column)[1]


def plan(name: str, selection: RunSelection) -> Plan:
    """Return the runs of a published table or figure, ordered by seed, then column, then row.

    Rows of methods that comingle lacks and columns that cannot be run are left out, and listed in the plan.

    Args:
        name: The experiment, as ``comigs/table1``.
        selection: The options of the command line.

    Raises:
        RecipeError: There is no such experiment, scale, row or column, or no run is left.
    """
    study, experiment = load_experiment(name)
    scale = _merge_scale(study, experiment, selection.scale)
    methods = {name: row.method for name, row in experiment.rows.items()}
    rows = _select_names("--methods", selection.methods, experiment.rows, methods)
    columns = _select_names("--columns", selection.columns, experiment.column_names)
    missing = tuple(row for row in rows if experiment.rows[row].method not in REGISTRY)
    rows = [row for row in rows if row not in missing]
    folder = data_folder(selection.data)
    reasons_not_run = {
        column: _reason_not_run(study, experiment, scale, column, folder, selection) for column in columns
    }
    left_out = {column: reason for column, reason in reasons_not_run.items() if reason}
    columns = [column for column in columns if column not in left_out]
    for column in columns:
        _, study_column = _column_settings(study, experiment, column)
        data = study.data[study_column.data]
        if folder is not None and (lacking := describe_lacking(data, folder)):
            logger.warning("%s: %s, so the hub's are read", column, lacking)
    seeds = {column: _choose_seeds(study, experiment, scale, column, selection) for column in columns}
    all_seeds = dict.fromkeys(seed for seeds_of_column in seeds.values() for seed in seeds_of_column)  # ordered set
    cells: list[Cell] = []
    for seed in all_seeds:
        for column in columns:
            for row in rows:
                if seed not in seeds[column] or not _has_row(study, experiment, scale, column, row):
                    continue
                recipe = _build_recipe(study, experiment, scale, column, experiment.rows[row], seed, folder, selection)
                cells.append(Cell(row=row, column=column, seed=seed, recipe=recipe, data=folder))
    if not cells:
        reasons = [f"{column}: {reason}" for column, reason in left_out.items()]
        reasons += [f"{row}: no such method yet" for row in missing]
        reasons += [f"{column}: no such row at scale {selection.scale}" for column in columns]
        raise RecipeError(f"reproduce {name}: nothing to run; {'; '.join(reasons)}")
    return Plan(
        name=name,
        study=study,
        experiment=experiment,
        scale=selection.scale,
        scaled=scale,
        jobs=(os.cpu_count() or 1) if scale.jobs == "cores" else 1,
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
        rows=tuple(rows),
        columns=tuple(columns),
        cells=tuple(cells),
        missing=missing,
        left_out=left_out,
    )


def _merge_scale(study: Study, experiment: Experiment, name: str) -> Scale:
    """Return a scale, the size of an experiment's runs: that of the paper's study with the experiment's changes to it.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        name: The scale's name, the value of ``--scale``.

    Raises:
        RecipeError: The study has no such scale.
    """
    if name not in study.scales:
        known = list(study.scales)
        raise RecipeError(f"--scale {name!r}: unknown.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    changes = experiment.scales.get(name, Scale())
    parts = [scale.model_dump(exclude_unset=True) for scale in (study.scales[name], changes)]
    return Scale.model_validate(merge(*parts))


def _scaled_column(study: Study, experiment: Experiment, scale: Scale, column: str) -> ScaledColumn:
    """Return the scale's changes to a column; empty changes if it has none.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        scale: The scale with the experiment's changes.
        column: The experiment's column.
    """
    column_setting, _ = _column_settings(study, experiment, column)
    return scale.columns.get(column_setting.of or column, ScaledColumn())


def _has_row(study: Study, experiment: Experiment, scale: Scale, column: str, row: str) -> bool:
    """Return whether the row is run in the column: neither the experiment nor the scale leaves it out.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        scale: The scale with the experiment's changes.
        column: The experiment's column.
        row: The experiment's row.
    """
    is_left_out = column in experiment.rows[row].without
    is_left_out_at_scale = row in _scaled_column(study, experiment, scale, column).without
    return not is_left_out and not is_left_out_at_scale


def _choose_seeds(
    study: Study, experiment: Experiment, scale: Scale, column: str, selection: RunSelection
) -> Sequence[int]:
    """Return a column's seeds: those of the command line, else the scale's for this column, else the scale's for all.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        scale: The scale with the experiment's changes.
        column: The experiment's column.
        selection: The options of the command line.
    """
    seeds_of_column = _scaled_column(study, experiment, scale, column).seeds
    return next(seeds for seeds in (selection.seeds, seeds_of_column, scale.seeds) if seeds is not None)


def _select_names(
    option: str,
    wanted: Sequence[str] | None,
    known: Mapping[str, object] | Sequence[str],
    methods: Mapping[str, str] = {},
) -> list[str]:
    """Return the known names that are wanted, in the paper's order; all of them if ``wanted`` is None.

    Args:
        option: The option's name, for error messages.
        wanted: Names given by the user, either known names or methods.
        known: All names of rows or columns.
        methods: The method of each row, by row; a wanted method selects all its rows.

    Raises:
        RecipeError: A wanted name is neither a known name nor a method.
    """
    for name in wanted or ():
        if name not in known and name not in methods.values():
            raise RecipeError(f"{option}: no {name!r} in it.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    return [name for name in known if wanted is None or name in wanted or methods.get(name) in wanted]


def _column_settings(study: Study, experiment: Experiment, name: str) -> tuple[Column, Column]:
    """Return a column's settings in the experiment, and the column of the study on which these settings build.

    The key ``of`` names the study's column; without this key both columns have the same name. If the experiment only
    lists the names of its columns, the settings are empty.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        name: The experiment's column.
    """
    column_setting = experiment.columns[name] if isinstance(experiment.columns, dict) else Column()
    return column_setting, study.columns[column_setting.of or name]


def _reason_not_run(
    study: Study, experiment: Experiment, scale: Scale, column: str, folder: Path | None, selection: RunSelection
) -> str:
    """Return the reason why a column cannot be run; empty if it can.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        scale: The scale with the experiment's changes.
        column: The experiment's column.
        folder: The folder of local text and images, if there is one.
        selection: The options of the command line.
    """
    column_setting, study_column = _column_settings(study, experiment, column)
    name_in_study = column_setting.of or column
    if scale.only is not None and name_in_study not in scale.only:
        return f"not at scale {selection.scale}, which has {', '.join(scale.only)}"
    # "{data}" in the path of a base model stands for the folder.
    if folder is None and "{data}" in (scale.base or "") and selection.base is None:
        return f"scale {selection.scale} takes its base from a folder; give --data FOLDER or --base MODEL"
    if _scaled_column(study, experiment, scale, column).local:  # never read from the hub
        scale = scale.model_copy(update={"text": "local"})
    return find_absent(study.data[study_column.data], scale, folder)


# -------------------------------------------------------------------- one recipe


def _build_recipe(
    study: Study,
    experiment: Experiment,
    scale: Scale,
    column: str,
    row: Row,
    seed: int,
    folder: Path | None,
    selection: RunSelection,
) -> Recipe:
    """Return the validated recipe of one run.

    The recipe is merged from partial recipes ("overlays"). Later ones override earlier ones, in this order: study, the
    study's column, the experiment's column, the scale, the scale's column, the row, and the command line.

    Args:
        study: The paper's study.
        experiment: The table or figure.
        scale: The scale with the experiment's changes.
        column: The experiment's column.
        row: The experiment's row.
        seed: The run's seed.
        folder: The folder of local text and images, if there is one.
        selection: The options of the command line.

    Raises:
        RecipeError: The row sets an unknown setting, or the merged recipe is invalid.
    """
    column_setting, study_column = _column_settings(study, experiment, column)
    scaled_column = _scaled_column(study, experiment, scale, column)
    overlays = [study, study_column, column_setting, scale, scaled_column, row]
    data, user_names = data_section(study, study.data[study_column.data], folder, demo=scale.text == "demo")
    known_settings = settings_of(row.method)
    # An overlay may have settings for several methods, of which only this method's are used.
    settings = {key: value for overlay in overlays for key, value in overlay.settings.items() if key in known_settings}
    if unknown := sorted(set(row.settings) - set(known_settings)):  # a row has one method
        raise RecipeError(
            f"reproduce: method {row.method} has no setting {unknown[0]!r}; it has: {', '.join(known_settings)}"
        )
    base = _choose_base(row, selection, scale, study_column).replace("{data}", str(folder))
    base = resolve_inside(base, folder)  # equal models should have equal paths, and runs equal names
    content = merge({"data": data}, *(overlay.recipe for overlay in overlays))
    content = {
        **content,
        "base": base,
        "seed": seed,
        "method": {"name": row.method, **settings},
        "data": limits_by_name(content["data"], user_names),  # limits were lists in the order of the users
    }
    where = f"{experiment.source}, column {column}, row {row.label or row.method}"
    # The published runs are older than the key ``data.add_bos_token``. As in their recipes, the key is set to false
    # here, so that the runs keep their names, which are digests of the recipes.
    recipe = parse_recipe(complete_older(_fill_values(content, column_setting.values)), where=where)
    recipe = recipe.with_changes(selection.changes, where="--set") if selection.changes else recipe
    make(recipe.method.name, **recipe.method.settings)  # raises before the first run if a setting is wrong
    return recipe


def _choose_base(row: Row, selection: RunSelection, scale: Scale, column: Column) -> str:
    """Return the base model to train: the row's own, else the command line's, else the scale's, else the column's.

    Args:
        row: The experiment's row.
        selection: The options of the command line.
        scale: The scale, which may name a base model or stand-ins for published ones.
        column: The study's column.
    """
    if selection.base and not row.base:
        return selection.base
    return scale.stand_in(row.base or scale.base or column.base)


def _fill_values(content: object, values: Mapping[str, object]) -> Any:
    """Replace each string ``$NAME`` in nested mappings by the column's value of that name.

    Args:
        content: Part of a recipe.
        values: The column's values.

    Raises:
        RecipeError: The column has no such value.
    """
    if isinstance(content, Mapping):
        return {key: _fill_values(value, values) for key, value in content.items()}
    if isinstance(content, str) and content.startswith("$"):
        if content[1:] not in values:
            raise RecipeError(f"reproduce: a row asks for {content!r}, which its column does not have")
        return values[content[1:]]
    return content
