"""From a published experiment to the runs that it needs."""

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
"""Train and test images of the data sets, as on the hub."""
_STEP, _PARAMETER = 2e7, 20
"""What a step costs beside its samples, in multiply-adds: by itself, and for each parameter of each user that takes it
(copies, gradients, means)."""


def weigh(recipe: Recipe) -> float:
    """Tokens through a language model, or multiply-adds of a net; a trained one counts three times."""
    method = make(recipe.method.name, **recipe.method.settings)
    weighed = {"task": _weigh_task, "questions": _weigh_questions, "text": _weigh_text, "conversations": _weigh_chats}
    return weighed[recipe.data.kind](recipe, method)


def _period(recipe: Recipe) -> int:
    """Rounds from one evaluation to the next, at least."""
    return SHORTEST if recipe.evaluation.every == AUTO else recipe.evaluation.every


def _weigh_text(recipe: Recipe, method: Method) -> float:
    training = recipe.training
    users, limit = 4, cast(TextSection, recipe.data).max_test_tokens
    scored = (sum(limit.values()) if isinstance(limit, dict) else (limit or 50_000) * users) / 3
    batch = training.batch_size * training.context * users
    steps = training.rounds * training.local_steps * sum(p.steps / p.every / p.turns for p in method.client.phases)
    return steps * batch + scored * (1 + training.rounds // _period(recipe) * method.trains)


def _weigh_chats(recipe: Recipe, method: Method) -> float:
    """As if every conversation filled the context, and all were training data."""
    rows = cast(ConversationsSection, recipe.data).dataset
    training, users = recipe.training, len(rows.users) if rows is not None and isinstance(rows.users, list) else 4
    most = (rows.max_conversations if rows is not None else None) or 1_000
    rounds = training.rounds if method.trains else 0
    return users * most * training.context * (rounds * training.local_epochs + rounds // _period(recipe) + 1)


def _weigh_questions(recipe: Recipe, method: Method) -> float:
    """As if every question filled the context.

    To score one takes about as long as to train on it: it is read twice and answered token by token.
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
    """Users, and the train and test samples of each, as near as can be told without reading any image."""
    setting = TASKS[task.name]
    users = task.users or setting.users
    images = _IMAGES.get(task.name)
    train, test = (setting.train, setting.test) if images is None else (ceil(n / users) for n in images)
    return users, min(train, max(REDUCED_MINIMUM, round(task.fraction * train))), task.test_samples or test


@cache
@torch.no_grad()
def net_size(task: str, net: str = "") -> tuple[int, int]:
    """Multiply-adds of one sample, and parameters, of a net on a task, by default of the task's own."""
    setting = TASKS[task]
    shape = (DIMENSION,) if not setting.hub else (3, 32, 32) if setting.coloured else (1, 28, 28)
    outputs = setting.classes if setting.hub else {str(kind): size for kind, size in OUTPUTS.items()}[task]
    sizes: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):  # every output channel is used once at each place
            sizes.append(module.weight.numel() * output.numel() // len(module.weight))

    built = make_net(net or setting.net, shape, outputs, seed=0).eval()
    for module in built.modules():
        module.register_forward_hook(count)
    built(torch.zeros(1, *shape))
    return sum(sizes), sum(parameter.numel() for parameter in built.parameters())


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line asks for; None leaves it to the scale."""

    scale: str = "paper"
    methods: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    base: str | None = None
    data: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a row and a column of the experiment with a seed."""

    row: str
    column: str
    seed: int
    recipe: Recipe
    data: Path | None = None
    """The folder with local text."""

    @cached_property
    def computed(self) -> dict[str, Any]:
        """What decides on the result, without where on this machine text and base lie."""
        return placed(self.recipe.computed, self.data)

    @cached_property
    def folder(self) -> str:
        """Its run folder's name. Cells that compute the same have the same, whatever table and machine they are on."""
        return name_of(self.computed)

    @property
    def weight(self) -> float:
        """How much work it is, for estimates of time; comparable among cells of one base."""
        return weigh(self.recipe)


def name_of(computed: Mapping[str, Any]) -> str:
    """What a run is called that computes this, as :attr:`Cell.computed`."""
    digest = hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:16]
    return f"{computed['method']['name']}-seed{computed['seed']}-{digest}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of an experiment at a scale, seed by seed, and what cannot be run."""

    name: str
    study: Study
    experiment: Experiment
    scale: str
    scaled: Scale
    """The study's scale of that name with the experiment's changes."""
    jobs: int
    """Runs at a time, unless something else is asked for."""
    seeds: tuple[int, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    missing: tuple[str, ...]
    """Rows whose method does not exist yet."""
    left_out: dict[str, str]
    """Columns that are not run, and why."""

    def label(self, column: str) -> str:
        """A column's heading."""
        column_setting, of = _columns_of(self.study, self.experiment, column)
        return column_setting.label or of.label

    def column_of(self, column: str) -> Column:
        """The study's column that a column is of."""
        return _columns_of(self.study, self.experiment, column)[1]


def plan(name: str, wanted: Wanted) -> Plan:
    """The runs of a published table or figure.

    Raises:
        RecipeError: no such experiment, scale, row or column, or nothing is left to run.
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
    """The study's scale with the experiment's changes; the latter need not repeat anything."""
    if name not in study.scales:
        known = list(study.scales)
        raise RecipeError(f"--scale {name!r}: unknown.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    of_experiment = experiment.scales.get(name, Scale())
    parts = [scale.model_dump(exclude_unset=True) for scale in (study.scales[name], of_experiment)]
    return Scale.model_validate(merge(*parts))


def _scaled(study: Study, experiment: Experiment, scale: Scale, column: str) -> ScaledColumn:
    """What the scale changes of a column."""
    column_setting, _ = _columns_of(study, experiment, column)
    return scale.columns.get(column_setting.of or column, ScaledColumn())


def _is_run(study: Study, experiment: Experiment, scale: Scale, column: str, row: str) -> bool:
    """Whether a column has a row, and has it at this scale too."""
    return column not in experiment.rows[row].without and row not in _scaled(study, experiment, scale, column).without


def _seeds(study: Study, experiment: Experiment, scale: Scale, column: str, wanted: Wanted) -> Sequence[int]:
    """A column's seeds: those asked for, else the scale's for this column, else the scale's."""
    fewer = _scaled(study, experiment, scale, column).seeds
    return next(seeds for seeds in (wanted.seeds, fewer, scale.seeds) if seeds is not None)


def _choose(
    option: str, wanted: Sequence[str] | None, known: Mapping[str, object] | Sequence[str], also: Mapping[str, str] = {}
) -> list[str]:
    """Those of the known names that are wanted, in the paper's order; ``also`` are other names for them."""
    for name in wanted or ():
        if name not in known and name not in also.values():
            raise RecipeError(f"{option}: no {name!r} in it.{did_you_mean(name, known)} There are: {', '.join(known)}")
    return [name for name in known if wanted is None or name in wanted or also.get(name) in wanted]


def _columns_of(study: Study, experiment: Experiment, name: str) -> tuple[Column, Column]:
    """A column as the experiment has it, and the study's column that it is of."""
    column_setting = experiment.columns[name] if isinstance(experiment.columns, dict) else Column()
    return column_setting, study.columns[column_setting.of or name]


def _obstacle(
    study: Study, experiment: Experiment, scale: Scale, column: str, folder: Path | None, wanted: Wanted
) -> str:
    """Why a column cannot be run; empty where it can."""
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
    wanted: Wanted,
) -> Recipe:
    """All overlays in their order, as a checked recipe."""
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
    # Published runs are of before `data.add_bos_token`; completed as such, they keep their names.
    recipe = parse_recipe(complete_older(_filled(content, column_setting.values)), where=where)
    recipe = recipe.with_changes(wanted.changes, where="--set") if wanted.changes else recipe
    make(recipe.method.name, **recipe.method.settings)  # every mistake is found before the first run
    return recipe


def _base(row: Row, wanted: Wanted, scale: Scale, column: Column) -> str:
    """What a run trains: a row's own base, else the one asked for, else the scale's, else the column's."""
    if wanted.base and not row.base:
        return wanted.base
    return scale.stand_in(row.base or scale.base or column.base)


def _filled(content: object, values: Mapping[str, object]) -> Any:
    """``$NAME`` replaced by the column's value."""
    if isinstance(content, Mapping):
        return {key: _filled(value, values) for key, value in content.items()}
    if isinstance(content, str) and content.startswith("$"):
        if content[1:] not in values:
            raise RecipeError(f"reproduce: a row asks for {content!r}, which its column does not have")
        return values[content[1:]]
    return content
