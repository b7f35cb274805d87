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
from comingle.config.sections import with_older_defaults
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
_STEP_COST = 2e7
"""Fixed cost of an optimiser step, in multiply-adds."""
_PARAMETER_COST = 20
"""Cost of an optimiser step per parameter of each participant (copies, gradients, means), in multiply-adds."""


def estimate_work(recipe: Recipe) -> float:
    """Estimate the computation of a run, to predict how long it takes compared with others of the same base model.

    The unit is a trained token of a language model, or a multiply-add of a net.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    estimate_by_kind = {
        "task": _task_work,
        "questions": _questions_work,
        "text": _text_work,
        "conversations": _conversations_work,
    }
    estimate = estimate_by_kind[recipe.data.kind]
    return estimate(recipe, method)


def _evaluation_interval(recipe: Recipe) -> int:
    """Return the number of rounds between two evaluations; with ``every: auto`` the smallest that a run may choose."""
    every = recipe.evaluation.every
    return SHORTEST if every == AUTO else every


def _text_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on text, in trained tokens; an evaluated token counts as a third of a trained one.

    The data is not read: four users are assumed, as in CoMiGS, and 50,000 test tokens of each if the recipe sets no
    limit.
    """
    training = recipe.training
    num_users = 4
    max_test_tokens = cast(TextSection, recipe.data).max_test_tokens
    if isinstance(max_test_tokens, dict):  # a limit for each user
        test_tokens = sum(max_test_tokens.values())
    else:
        test_tokens = (max_test_tokens or 50_000) * num_users

    # A phase takes ``steps`` after every ``every``-th local step, in one round of each group of ``turns`` rounds.
    steps_per_local_step = sum(phase.steps / phase.every / phase.turns for phase in method.client.phases)
    steps = training.rounds * training.most_local_steps * steps_per_local_step
    tokens_per_step = training.largest_batch_size * training.context * num_users

    num_evaluations = 1  # before training
    if method.trains:
        num_evaluations += training.rounds // _evaluation_interval(recipe)
    evaluation_work = test_tokens / 3
    return steps * tokens_per_step + evaluation_work * num_evaluations


def _conversations_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on conversations, in tokens: passes over all data times the data's tokens.

    A local epoch and an evaluation are one pass each. All conversations are assumed to fill the context. If the recipe
    does not give their number, four users (as in CoMiGS) and 1,000 conversations of each are assumed.
    """
    training = recipe.training
    dataset = cast(ConversationsSection, recipe.data).dataset
    num_users, conversations_per_user = 4, 1_000
    if dataset is not None and isinstance(dataset.users, list):
        num_users = len(dataset.users)
    if dataset is not None and dataset.max_conversations:
        conversations_per_user = dataset.max_conversations

    rounds = training.rounds if method.trains else 0
    num_evaluations = 1 + rounds // _evaluation_interval(recipe)  # 1: before training
    passes = rounds * training.local_epochs + num_evaluations
    return num_users * conversations_per_user * training.context * passes


def _questions_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on questions, in tokens, as if every question filled the context.

    Trained and scored questions count alike: to score a question, an evaluation reads it twice and generates an answer,
    which takes about as long as training on it.
    """
    section = cast(QuestionsDataSection, recipe.data).questions
    question_set = QUESTIONS[section.name]
    training = recipe.training
    num_users = len(section.languages or question_set.languages)
    num_train = section.train or question_set.train  # questions of each user
    num_test = section.test or question_set.test or num_train

    rounds = training.rounds if method.trains else 0
    num_evaluations = ceil(rounds / _evaluation_interval(recipe))
    if rounds > 0 and recipe.evaluation.first:  # before training
        num_evaluations += 1
    num_evaluations = max(1, num_evaluations)  # a method that trains nothing is evaluated once
    num_trained = rounds * training.local_epochs * num_train
    num_scored = num_evaluations * num_test
    return num_users * training.context * (num_trained + num_scored)


def _task_work(recipe: Recipe, method: Method) -> float:
    """Estimate the work of a run on a net, in multiply-adds.

    A forward and a backward pass together cost three forward passes. An optimiser step has a cost per participant, and
    a fixed cost, since all participants of a round are trained in one batch.
    """
    task = cast(TaskDataSection, recipe.data).task
    training = recipe.training
    num_users, num_train, num_test = count_samples(task)
    participation = training.participation
    if isinstance(participation, list):  # the participants of each round
        num_participants = sum(map(len, participation)) / len(participation)
    else:
        num_participants = num_users * participation
    net = recipe.base.removeprefix(NETS) if recipe.base.startswith(NETS) else ""
    multiply_adds_per_sample, num_parameters = net_size(task.name, net)

    steps = training.local_epochs * ceil(num_train / training.largest_batch_size)
    passes_of_user = 3 * training.local_epochs * num_train * multiply_adds_per_sample
    user_work = passes_of_user + steps * _PARAMETER_COST * num_parameters
    rounds = training.rounds if method.trains else 0
    training_work = rounds * (steps * _STEP_COST + num_participants * user_work)
    num_evaluations = 1 + rounds // _evaluation_interval(recipe)  # 1: before training
    evaluation_work = num_evaluations * num_users * num_test * multiply_adds_per_sample
    return _num_passes(method) * (training_work + evaluation_work)


def _num_passes(method: Method) -> int:
    """Return how many passes through the net a batch needs, given how a method mixes models or adapters.

    If adapters are mixed in their weights or outputs, one pass through the mixed net is enough. If whole models are
    mixed, or if the losses of the adapters are, each needs a pass of its own.
    """
    mixture = method.placement.mixture
    if mixture is None:
        return 1
    # "losses": the adapters' losses on a batch are mixed; "samples": those on each sample.
    is_mixed_after_passes = mixture.of == "models" or mixture.at in ("losses", "samples")
    return mixture.clusters if is_mixed_after_passes else 1


def count_samples(task: TaskSection) -> tuple[int, int, int]:
    """Return the number of a task's users, and estimate each user's train and test samples without reading images.

    The estimate is for :func:`estimate_work`.

    Args:
        task: The recipe's section ``data.task``.

    Returns:
        The number of users, and the numbers of train and of test samples of each user.
    """
    setting = TASKS[task.name]
    num_users = task.users or setting.users
    if task.name in _NUM_IMAGES:  # all images of the data set are divided evenly among users
        num_train_images, num_test_images = _NUM_IMAGES[task.name]
        train, test = ceil(num_train_images / num_users), ceil(num_test_images / num_users)
    else:
        train, test = setting.train, setting.test
    # ``fraction`` of the train samples, but at least REDUCED_MINIMUM if there are as many.
    kept_train = min(train, max(REDUCED_MINIMUM, round(task.fraction * train)))
    return num_users, kept_train, task.test_samples or test


@cache
@torch.no_grad()
def net_size(task: str, net: str = "") -> tuple[int, int]:
    """Return the multiply-adds of one sample and the number of parameters of a net, counted on a blank sample.

    Args:
        task: Name of the task, which determines the shapes of inputs and outputs.
        net: Name of the net; empty for the task's own.
    """
    setting = TASKS[task]
    input_shape: tuple[int, ...]
    has_images = bool(setting.hub)  # the other tasks are synthetic regressions
    if has_images:
        input_shape = (3, 32, 32) if setting.coloured else (1, 28, 28)
        num_outputs = setting.classes
    else:
        input_shape = (DIMENSION,)
        num_outputs = {str(kind): size for kind, size in OUTPUTS.items()}[task]
    model = make_net(net or setting.net, input_shape, num_outputs, seed=0).eval()

    multiply_adds: list[int] = []  # of each layer

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):  # each output position uses every weight once
            num_positions = output.numel() // len(module.weight)
            multiply_adds.append(module.weight.numel() * num_positions)

    for module in model.modules():
        module.register_forward_hook(count)
    blank_sample = torch.zeros(1, *input_shape)
    model(blank_sample)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return sum(multiply_adds), num_parameters


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


_OLDER_SETTINGS = {"weight_step": 0.01}
"""Settings of methods that older versions had by default and that studies now set; published runs are named without."""


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
        """Settings that determine the result, with ``{data}`` in place of the folder of text and base model.

        :data:`_OLDER_SETTINGS` are left out.
        """
        computed = with_placeholder(self.recipe.result_content, self.data)
        method = computed["method"]
        settings = {key: value for key, value in method["settings"].items() if _OLDER_SETTINGS.get(key) != value}
        return {**computed, "method": {**method, "settings": settings}}

    @cached_property
    def folder(self) -> str:
        """Name of the run folder; equal for cells with equal :attr:`computed`, in any table and on any machine."""
        return name_of(self.computed)

    @property
    def work(self) -> float:
        """Estimate of the run's computation, from which the remaining time of an experiment is predicted.

        The unit is a trained token, or a multiply-add of a small net. So only runs of one base model can be compared.
        """
        return estimate_work(self.recipe)


def name_of(computed: Mapping[str, Any]) -> str:
    """Return the name of a run's folder, such as ``comigs-seed0-1f5a0c8e2b7d9a34``, which ends in a digest.

    Args:
        computed: The settings that determine the result (:attr:`Cell.computed`).
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
        """Return a column's heading: the label that the table or figure gives it, else that of the paper's study."""
        column_setting, study_column = _column_settings(self.study, self.experiment, column)
        return column_setting.label or study_column.label

    def column_of(self, column: str) -> Column:
        """Return the settings that a paper's tables share for a column, such as its data set and base model.

        Args:
            column: A column of this table or figure, which refers to a column of the paper's study.
        """
        _, study_column = _column_settings(self.study, self.experiment, column)
        return study_column


def plan(name: str, selection: RunSelection) -> Plan:
    """Return the runs of a published table or figure, ordered by seed, then column, then row.

    Rows of methods that comingle lacks and columns that cannot be run are left out, and listed in the plan.

    Args:
        name: The table or figure, such as ``comigs/table1``.
        selection: The rows, columns, seeds and scale that were given on the command line.

    Raises:
        RecipeError: There is no such experiment, scale, row or column, or no run is left.
    """
    study, experiment = load_experiment(name)
    scale = _merge_scale(study, experiment, selection.scale)

    method_by_row = {row: settings.method for row, settings in experiment.rows.items()}
    selected_rows = _select_names("--methods", selection.methods, experiment.rows, method_by_row)
    rows = [row for row in selected_rows if method_by_row[row] in REGISTRY]
    missing = [row for row in selected_rows if method_by_row[row] not in REGISTRY]

    selected_columns = _select_names("--columns", selection.columns, experiment.column_names)
    folder = data_folder(selection.data)
    columns: list[str] = []
    left_out: dict[str, str] = {}
    for column in selected_columns:
        reason = _reason_not_run(study, experiment, scale, column, folder, selection)
        if reason:
            left_out[column] = reason
        else:
            columns.append(column)
            _warn_if_folder_lacks_data(study, experiment, column, folder)

    seeds_by_column = {column: _choose_seeds(study, experiment, scale, column, selection) for column in columns}
    all_seeds = dict.fromkeys(seed for seeds in seeds_by_column.values() for seed in seeds)  # ordered set
    cells: list[Cell] = []
    for seed in all_seeds:
        for column in columns:
            for row in rows:
                if seed in seeds_by_column[column] and _has_row(study, experiment, scale, column, row):
                    settings = experiment.rows[row]
                    recipe = _build_recipe(study, experiment, scale, column, settings, seed, folder, selection)
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
        missing=tuple(missing),
        left_out=left_out,
    )


def _warn_if_folder_lacks_data(study: Study, experiment: Experiment, column: str, folder: Path | None) -> None:
    """Log a warning if there is a folder without the images or questions of a column, so that the hub's are read.

    Args:
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        column: Name of a column of the table or figure.
        folder: The folder of local text and images, if there is one.
    """
    if folder is None:
        return
    _, study_column = _column_settings(study, experiment, column)
    lacking = describe_lacking(study.data[study_column.data], folder)
    if lacking:
        logger.warning("%s: %s, so the hub's are read", column, lacking)


def _merge_scale(study: Study, experiment: Experiment, name: str) -> Scale:
    """Return the study's scale (the size of its runs) with the experiment's changes to it.

    Args:
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        name: The scale's name, the value of ``--scale``.

    Raises:
        RecipeError: The study has no such scale.
    """
    if name not in study.scales:
        known = list(study.scales)
        raise RecipeError(f"--scale {name!r}: unknown.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    scale = study.scales[name].model_dump(exclude_unset=True)
    changes = experiment.scales[name].model_dump(exclude_unset=True) if name in experiment.scales else {}
    return Scale.model_validate(merge(scale, changes))


def _scaled_column(study: Study, experiment: Experiment, scale: Scale, column: str) -> ScaledColumn:
    """Return what a scale (the size of the runs) changes in one column, such as fewer seeds; it may change nothing.

    Args:
        study: The paper's study, whose columns the scale refers to.
        experiment: The table or figure.
        scale: The study's scale, with the experiment's changes.
        column: Name of a column of the experiment.
    """
    column_setting, _ = _column_settings(study, experiment, column)
    name_in_study = column_setting.of or column  # without the key ``of`` both have the same name
    no_changes = ScaledColumn()
    return scale.columns.get(name_in_study, no_changes)


def _has_row(study: Study, experiment: Experiment, scale: Scale, column: str, row: str) -> bool:
    """Return whether the row is run in the column: neither the experiment nor the scale leaves it out.

    Args:
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        scale: The size of the runs (``--scale``), with the changes that this table or figure makes to it.
        column: Name of a column of the table or figure.
        row: Name of a row of the table or figure.
    """
    if column in experiment.rows[row].without:
        return False
    return row not in _scaled_column(study, experiment, scale, column).without


def _choose_seeds(
    study: Study, experiment: Experiment, scale: Scale, column: str, selection: RunSelection
) -> Sequence[int]:
    """Return a column's seeds: those of the command line, else the scale's for this column, else the scale's for all.

    Args:
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        scale: The size of the runs (``--scale``), with the changes that this table or figure makes to it.
        column: Name of a column of the table or figure.
        selection: The rows, columns, seeds and scale that were given on the command line.
    """
    if selection.seeds is not None:
        return selection.seeds
    seeds_of_column = _scaled_column(study, experiment, scale, column).seeds
    if seeds_of_column is not None:
        return seeds_of_column
    return scale.seeds


def _select_names(
    option: str,
    wanted: Sequence[str] | None,
    known: Mapping[str, object] | Sequence[str],
    method_by_row: Mapping[str, str] = {},
) -> list[str]:
    """Return the wanted rows or columns, in the paper's order; all of them if ``wanted`` is None.

    Args:
        option: The option's name, for error messages.
        wanted: Names of rows or columns given by the user; the name of a method stands for all its rows.
        known: All names of rows or columns.
        method_by_row: The method of each row; empty for columns.

    Raises:
        RecipeError: A wanted name is neither a known name nor a method.
    """
    if wanted is None:
        return list(known)
    for name in wanted:
        if name not in known and name not in method_by_row.values():
            raise RecipeError(f"{option}: no {name!r} in it.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    return [name for name in known if name in wanted or method_by_row.get(name) in wanted]


def _column_settings(study: Study, experiment: Experiment, name: str) -> tuple[Column, Column]:
    """Return the settings of a column of a published table, and the settings that the paper's tables share for it.

    A study describes columns (data sets, mostly) that several tables and figures of a paper have. A table may change
    such a column, and names it by the key ``of`` if its own column has another name. If the table only lists the names
    of its columns, its settings are empty.

    Args:
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        name: The experiment's column.
    """
    column_setting = experiment.columns[name] if isinstance(experiment.columns, dict) else Column()
    name_in_study = column_setting.of or name
    return column_setting, study.columns[name_in_study]


def _reason_not_run(
    study: Study, experiment: Experiment, scale: Scale, column: str, folder: Path | None, selection: RunSelection
) -> str:
    """Return the reason why a column cannot be run, for a message; empty if it can.

    Args:
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        scale: The size of the runs (``--scale``), with the changes that this table or figure makes to it.
        column: Name of a column of the table or figure.
        folder: The folder of local text and images, if there is one.
        selection: The rows, columns, seeds and scale that were given on the command line.
    """
    column_setting, study_column = _column_settings(study, experiment, column)
    name_in_study = column_setting.of or column
    if scale.only is not None and name_in_study not in scale.only:
        return f"not at scale {selection.scale}, which has {', '.join(scale.only)}"
    base_is_in_folder = selection.base is None and "{data}" in (scale.base or "")
    if base_is_in_folder and folder is None:
        return f"scale {selection.scale} takes its base from a folder; give --data FOLDER or --base MODEL"
    is_never_from_hub = _scaled_column(study, experiment, scale, column).local
    if is_never_from_hub:
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
        study: The settings that all tables and figures of the paper share.
        experiment: The table or figure.
        scale: The size of the runs (``--scale``), with the changes that this table or figure makes to it.
        column: Name of a column of the table or figure.
        row: Name of a row of the table or figure.
        seed: The run's seed.
        folder: The folder of local text and images, if there is one.
        selection: The rows, columns, seeds and scale that were given on the command line.

    Raises:
        RecipeError: The row sets an unknown setting, or the merged recipe is invalid.
    """
    experiment_column, study_column = _column_settings(study, experiment, column)
    scale_column = _scaled_column(study, experiment, scale, column)
    overlays = [study, study_column, experiment_column, scale, scale_column, row]

    known_settings = settings_of(row.method)
    unknown_settings = sorted(set(row.settings) - set(known_settings))
    if unknown_settings:
        raise RecipeError(
            f"reproduce: method {row.method} has no setting {unknown_settings[0]!r}; it has: "
            f"{', '.join(known_settings)}"
        )
    settings: dict[str, Any] = {}
    for overlay in overlays:  # overlays other than the row may have settings of other methods
        settings.update({key: value for key, value in overlay.settings.items() if key in known_settings})

    base = _choose_base(row, selection, scale, study_column).replace("{data}", str(folder))
    base = resolve_inside(base, folder)  # one path for each model, since the path is part of the run's name
    data, user_names = data_section(study, study.data[study_column.data], folder, demo=scale.text == "demo")
    content = merge({"data": data}, *(overlay.recipe for overlay in overlays))
    content["base"] = base
    content["seed"] = seed
    content["method"] = {"name": row.method, **settings}
    content["data"] = limits_by_name(content["data"], user_names)
    content = _fill_placeholders(content, experiment_column.values)
    # Recipes older than the key ``data.add_bos_token`` do not have it. It is set to false here as in those recipes, so
    # that published runs keep their names, which are digests of the recipes.
    content = with_older_defaults(content)
    where = f"{experiment.source}, column {column}, row {row.label or row.method}"
    recipe = parse_recipe(content, where=where)
    if selection.changes:
        recipe = recipe.with_changes(selection.changes, where="--set")
    make(recipe.method.name, **recipe.method.settings)  # raises before the first run if a setting is wrong
    return recipe


def _choose_base(row: Row, selection: RunSelection, scale: Scale, column: Column) -> str:
    """Return the base model to train: the row's own, else the command line's, else the scale's, else the column's.

    Args:
        row: Name of a row of the table or figure.
        selection: The rows, columns, seeds and scale that were given on the command line.
        scale: The scale, which may name a base model, and smaller models to train in place of published ones.
        column: The study's column.
    """
    if selection.base and not row.base:
        return selection.base
    published_base = row.base or scale.base or column.base
    return scale.stand_in(published_base)


def _fill_placeholders(content: object, values: Mapping[str, object]) -> Any:
    """Return a recipe in which each string such as ``"$rank"`` is replaced by the column's value ``rank``.

    Args:
        content: Part of a recipe: a mapping, a string or another value.
        values: The column's values.

    Raises:
        RecipeError: The column has no such value.
    """
    if isinstance(content, Mapping):
        return {key: _fill_placeholders(value, values) for key, value in content.items()}
    if not isinstance(content, str) or not content.startswith("$"):
        return content
    name = content[1:]
    if name not in values:
        raise RecipeError(f"reproduce: a row asks for {content!r}, which its column does not have")
    return values[name]
