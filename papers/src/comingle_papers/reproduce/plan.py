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
    find_absent,
    find_hubs,
    inside,
    limits_by_name,
    load_experiment,
    merge,
    placed,
)
from comingle_papers.tasks.image_tasks import REDUCED_MINIMUM, TASKS
from comingle_papers.tasks.kind import TaskDataSection, TaskSection
from comingle_papers.tasks.synthetic import DIMENSION, OUTPUTS

_IMAGES = {"mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
"""Numbers of train and test images of the data sets on the hub."""
_STEP, _PARAMETER = 2e7, 20
"""Cost of an optimiser step besides its samples, in multiply-adds: per step, and per parameter of each user in it
(copies, gradients, means)."""


def weigh(recipe: Recipe) -> float:
    """Estimate the work of a run: tokens through a language model, or multiply-adds of a net.

    A token or sample that is trained on counts three times.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    weighed = {"task": _weigh_task, "questions": _weigh_questions, "text": _weigh_text, "conversations": _weigh_chats}
    return weighed[recipe.data.kind](recipe, method)


def _period(recipe: Recipe) -> int:
    """Return the smallest number of rounds between two evaluations."""
    return SHORTEST if recipe.evaluation.every == AUTO else recipe.evaluation.every


def _weigh_text(recipe: Recipe, method: Method) -> float:
    training = recipe.training
    users, limit = 4, cast(TextSection, recipe.data).max_test_tokens
    scored = (sum(limit.values()) if isinstance(limit, dict) else (limit or 50_000) * users) / 3
    batch = training.batch_size * training.context * users
    steps = training.rounds * training.local_steps * sum(p.steps / p.every / p.turns for p in method.client.phases)
    return steps * batch + scored * (1 + training.rounds // _period(recipe) * method.trains)


def _weigh_chats(recipe: Recipe, method: Method) -> float:
    """Estimate the work as if every conversation filled the context and all of them were training data."""
    rows = cast(ConversationsSection, recipe.data).dataset
    training, users = recipe.training, len(rows.users) if rows is not None and isinstance(rows.users, list) else 4
    most = (rows.max_conversations if rows is not None else None) or 1_000
    rounds = training.rounds if method.trains else 0
    return users * most * training.context * (rounds * training.local_epochs + rounds // _period(recipe) + 1)


def _weigh_questions(recipe: Recipe, method: Method) -> float:
    """Estimate the work as if every question filled the context.

    Scoring a question takes about as long as training on it: it is read twice and answered token by token.
    """
    asked = cast(QuestionsDataSection, recipe.data).questions
    setting, training = QUESTIONS[asked.name], recipe.training
    users, train = len(asked.languages or setting.languages), asked.train or setting.train
    rounds = training.rounds if method.trains else 0
    evaluations = max(1, ceil(rounds / _period(recipe)) + (rounds > 0 and recipe.evaluation.first))
    passed = rounds * training.local_epochs * train + evaluations * (asked.test or setting.test or train)
    return users * training.context * passed


def _weigh_task(recipe: Recipe, method: Method) -> float:
    task = cast(TaskDataSection, recipe.data).task
    training, (users, train, test) = recipe.training, count_samples(task)
    part = training.participation
    members = sum(map(len, part)) / len(part) if isinstance(part, list) else users * part
    net = recipe.base.removeprefix(NETS) if recipe.base.startswith(NETS) else ""
    per_sample, parameters = net_size(task.name, net)
    mixture = method.placement.mixture
    passes = (
        mixture.clusters
        if mixture is not None and (mixture.of == "models" or mixture.at in ("losses", "samples"))
        else 1
    )
    steps = training.local_epochs * ceil(train / training.batch_size)
    operations = 3 * training.local_epochs * train * per_sample + steps * _PARAMETER * parameters
    scored = users * test * per_sample
    rounds = training.rounds if method.trains else 0
    return passes * (rounds * (steps * _STEP + members * operations) + scored * (1 + rounds // _period(recipe)))


def count_samples(task: TaskSection) -> tuple[int, int, int]:
    """Estimate the number of users and the train and test samples of each, without reading an image."""
    setting = TASKS[task.name]
    users = task.users or setting.users
    images = _IMAGES.get(task.name)
    train, test = (setting.train, setting.test) if images is None else (ceil(n / users) for n in images)
    return users, min(train, max(REDUCED_MINIMUM, round(task.fraction * train))), task.test_samples or test


@cache
@torch.no_grad()
def net_size(task: str, net: str = "") -> tuple[int, int]:
    """Return the multiply-adds of one sample and the number of parameters of a net, by default the task's own net."""
    setting = TASKS[task]
    shape = (DIMENSION,) if not setting.hub else (3, 32, 32) if setting.coloured else (1, 28, 28)
    outputs = setting.classes if setting.hub else {str(kind): size for kind, size in OUTPUTS.items()}[task]
    sizes: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):  # each output position uses every weight once
            sizes.append(module.weight.numel() * output.numel() // len(module.weight))

    built = make_net(net or setting.net, shape, outputs, seed=0).eval()
    for module in built.modules():
        module.register_forward_hook(count)
    built(torch.zeros(1, *shape))
    return sum(sizes), sum(parameter.numel() for parameter in built.parameters())


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSelection:
    """Options of the command line; None leaves a value to the scale."""

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
        return placed(self.recipe.computed, self.data)

    @cached_property
    def folder(self) -> str:
        """The name of the run folder; equal for cells that compute the same, in any table and on any machine."""
        return name_of(self.computed)

    @property
    def weight(self) -> float:
        """The work of the run, for estimates of time; comparable among cells of one base model."""
        return weigh(self.recipe)


def name_of(computed: Mapping[str, Any]) -> str:
    """Return the name of the run that computes this, given :attr:`Cell.computed`."""
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
        """Return a column's heading."""
        column_setting, of = _columns_of(self.study, self.experiment, column)
        return column_setting.label or of.label

    def column_of(self, column: str) -> Column:
        """Return the study's column that a column of the experiment refers to."""
        return _columns_of(self.study, self.experiment, column)[1]


def plan(name: str, wanted: RunSelection) -> Plan:
    """Return the runs of a published table or figure.

    Raises:
        RecipeError: There is no such experiment, scale, row or column, or no run is left.
    """
    study, experiment = load_experiment(name)
    scale = _scale(study, experiment, wanted.scale)
    rows = _choose("--methods", wanted.methods, experiment.rows, {k: r.method for k, r in experiment.rows.items()})
    columns = _choose("--columns", wanted.columns, experiment.column_names)
    missing = tuple(row for row in rows if experiment.rows[row].method not in REGISTRY)
    rows = [row for row in rows if row not in missing]
    folder = data_folder(wanted.data)
    left_out = {c: why for c in columns if (why := _obstacle(study, experiment, scale, c, folder, wanted))}
    columns = [column for column in columns if column not in left_out]
    for column in columns:
        data = study.data[_columns_of(study, experiment, column)[1].data]
        if folder is not None and (lacks := find_hubs(data, folder)):
            logger.warning("%s: %s, so the hub's are read", column, lacks)
    seeds = {column: _seeds(study, experiment, scale, column, wanted) for column in columns}
    cells = tuple(
        Cell(row=row, column=column, seed=seed, recipe=recipe, data=folder)
        for seed in dict.fromkeys(seed for of_row in seeds.values() for seed in of_row)
        for column in columns
        if seed in seeds[column]
        for row in rows
        if _is_run(study, experiment, scale, column, row)
        for recipe in [_recipe(study, experiment, scale, column, experiment.rows[row], seed, folder, wanted)]
    )
    if not cells:
        reasons = [f"{c}: {why}" for c, why in left_out.items()] + [f"{m}: no such method yet" for m in missing]
        reasons += [f"{c}: no such row at scale {wanted.scale}" for c in columns]
        raise RecipeError(f"reproduce {name}: nothing to run; {'; '.join(reasons)}")
    return Plan(
        name=name,
        study=study,
        experiment=experiment,
        scale=wanted.scale,
        scaled=scale,
        jobs=(os.cpu_count() or 1) if scale.jobs == "cores" else 1,
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
        rows=tuple(rows),
        columns=tuple(columns),
        cells=cells,
        missing=missing,
        left_out=left_out,
    )


def _scale(study: Study, experiment: Experiment, name: str) -> Scale:
    """Return the study's scale with the experiment's changes, which state only what differs."""
    if name not in study.scales:
        known = list(study.scales)
        raise RecipeError(f"--scale {name!r}: unknown.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    of_experiment = experiment.scales.get(name, Scale())
    parts = [scale.model_dump(exclude_unset=True) for scale in (study.scales[name], of_experiment)]
    return Scale.model_validate(merge(*parts))


def _scaled(study: Study, experiment: Experiment, scale: Scale, column: str) -> ScaledColumn:
    """Return the scale's changes to a column."""
    column_setting, _ = _columns_of(study, experiment, column)
    return scale.columns.get(column_setting.of or column, ScaledColumn())


def _is_run(study: Study, experiment: Experiment, scale: Scale, column: str, row: str) -> bool:
    """Return whether a column has a row, at this scale too."""
    return column not in experiment.rows[row].without and row not in _scaled(study, experiment, scale, column).without


def _seeds(study: Study, experiment: Experiment, scale: Scale, column: str, wanted: RunSelection) -> Sequence[int]:
    """Return a column's seeds: those of the command line, else the scale's for this column, else the scale's."""
    fewer = _scaled(study, experiment, scale, column).seeds
    return next(seeds for seeds in (wanted.seeds, fewer, scale.seeds) if seeds is not None)


def _choose(
    option: str, wanted: Sequence[str] | None, known: Mapping[str, object] | Sequence[str], also: Mapping[str, str] = {}
) -> list[str]:
    """Return the known names that are wanted, in the paper's order; ``also`` maps alternative names to known ones."""
    for name in wanted or ():
        if name not in known and name not in also.values():
            raise RecipeError(f"{option}: no {name!r} in it.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    return [name for name in known if wanted is None or name in wanted or also.get(name) in wanted]


def _columns_of(study: Study, experiment: Experiment, name: str) -> tuple[Column, Column]:
    """Return the experiment's column and the study's column that it refers to."""
    column_setting = experiment.columns[name] if isinstance(experiment.columns, dict) else Column()
    return column_setting, study.columns[column_setting.of or name]


def _obstacle(
    study: Study, experiment: Experiment, scale: Scale, column: str, folder: Path | None, wanted: RunSelection
) -> str:
    """Return the reason why a column cannot be run; empty where it can."""
    column_setting, of = _columns_of(study, experiment, column)
    name = column_setting.of or column
    if scale.only is not None and name not in scale.only:
        return f"not at scale {wanted.scale}, which has {', '.join(scale.only)}"
    if folder is None and "{data}" in (scale.base or "") and wanted.base is None:
        return f"scale {wanted.scale} takes its base from a folder; give --data FOLDER or --base MODEL"
    if _scaled(study, experiment, scale, column).local:
        scale = scale.model_copy(update={"text": "local"})
    return find_absent(study.data[of.data], scale, folder)


# -------------------------------------------------------------------- one recipe


def _recipe(
    study: Study,
    experiment: Experiment,
    scale: Scale,
    column: str,
    row: Row,
    seed: int,
    folder: Path | None,
    wanted: RunSelection,
) -> Recipe:
    """Merge all overlays in order and return the validated recipe."""
    column_setting, of = _columns_of(study, experiment, column)
    shrunk = _scaled(study, experiment, scale, column)
    overlays = [study, of, column_setting, scale, shrunk, row]
    data, names = data_section(study, study.data[of.data], folder, demo=scale.text == "demo")
    known = settings_of(row.method)
    settings = {k: v for part in overlays for k, v in part.settings.items() if k in known}
    if unknown := sorted(set(row.settings) - set(known)):
        raise RecipeError(f"reproduce: method {row.method} has no setting {unknown[0]!r}; it has: {', '.join(known)}")
    base = inside(_base(row, wanted, scale, of).replace("{data}", str(folder)), folder)
    content = merge({"data": data}, *(part.recipe for part in overlays))
    content = {
        **content,
        "base": base,
        "seed": seed,
        "method": {"name": row.method, **settings},
        "data": limits_by_name(content["data"], names),
    }
    where = f"{experiment.source}, column {column}, row {row.label or row.method}"
    # Published runs precede `data.add_bos_token`; completing them as older recipes keeps their names.
    recipe = parse_recipe(complete_older(_filled(content, column_setting.values)), where=where)
    recipe = recipe.with_changes(wanted.changes, where="--set") if wanted.changes else recipe
    make(recipe.method.name, **recipe.method.settings)  # raises before the first run if a setting is wrong
    return recipe


def _base(row: Row, wanted: RunSelection, scale: Scale, column: Column) -> str:
    """Return the base model to train: the row's own, else the command line's, else the scale's, else the column's."""
    if wanted.base and not row.base:
        return wanted.base
    return scale.stand_in(row.base or scale.base or column.base)


def _filled(content: object, values: Mapping[str, object]) -> Any:
    """Replace ``$NAME`` by the column's value."""
    if isinstance(content, Mapping):
        return {key: _filled(value, values) for key, value in content.items()}
    if isinstance(content, str) and content.startswith("$"):
        if content[1:] not in values:
            raise RecipeError(f"reproduce: a row asks for {content!r}, which its column does not have")
        return values[content[1:]]
    return content
