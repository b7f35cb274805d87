"""From a published experiment to the runs that it needs: one recipe for each row, column and seed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comingle.errors import RecipeError, did_you_mean
from comingle.methods import REGISTRY, make, settings_of
from comingle.recipes import Recipe, parse_recipe
from comingle.reproduce.published import Column, DataSet, Experiment, Overlay, Row, Scale, Study, load_experiment, merge

FOLDER_VARIABLE = "COMINGLE_DATA"
SPLITS = ("train", "valid", "test")


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

    @property
    def folder(self) -> str:
        """Its run folder's name. Cells that compute the same have the same, whatever table they are in."""
        return f"{self.recipe.method.name}-seed{self.seed}-{self.recipe.fingerprint}"

    @property
    def weight(self) -> float:
        """Tokens that go through the base, times three for training: for estimates of time."""
        training, method = self.recipe.training, make(self.recipe.method.name, **self.recipe.method.settings)
        users, limit = 4, self.recipe.data.max_test_tokens
        scored = (sum(limit.values()) if isinstance(limit, dict) else (limit or 50_000) * users) / 3
        batch = training.batch_size * training.context * users
        steps = training.rounds * training.local_steps * sum(phase.steps / phase.every for phase in method.phases)
        return steps * batch + scored * (1 + training.rounds // self.recipe.evaluation.every * bool(method.phases))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of an experiment at a scale, seed by seed, and what cannot be run."""

    name: str
    study: Study
    experiment: Experiment
    scale: str
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
        own, of = _columns_of(self.study, self.experiment, column)
        return own.label or of.label


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
    seeds = tuple(wanted.seeds if wanted.seeds is not None else scale.seeds)
    cells = tuple(
        Cell(row=row, column=column, seed=seed, recipe=recipe)
        for seed in seeds
        for column in columns
        for row in rows
        for recipe in [_recipe(study, experiment, scale, column, experiment.rows[row], seed, folder, wanted)]
    )
    if not cells:
        reasons = [f"{c}: {why}" for c, why in left_out.items()] + [f"{m}: no such method yet" for m in missing]
        raise RecipeError(f"reproduce {name}: nothing to run; {'; '.join(reasons)}")
    return Plan(
        name=name,
        study=study,
        experiment=experiment,
        scale=wanted.scale,
        jobs=(os.cpu_count() or 1) if scale.jobs == "cores" else 1,
        seeds=seeds,
        rows=tuple(rows),
        columns=tuple(columns),
        cells=cells,
        missing=missing,
        left_out=left_out,
    )


def data_folder(given: Path | None) -> Path | None:
    """The folder with local text: the one given, or what ``$COMINGLE_DATA`` names, or none.

    Raises:
        RecipeError: it does not exist.
    """
    named = str(given) if given is not None else os.environ.get(FOLDER_VARIABLE, "")
    if not named:
        return None
    folder = Path(named).expanduser().resolve()
    if not folder.is_dir():
        where = "--data" if given is not None else FOLDER_VARIABLE
        raise RecipeError(f"{where} {named}: no such folder; it should hold the text, laid out as docs/results.md says")
    return folder


def _scale(study: Study, experiment: Experiment, name: str) -> Scale:
    """The study's scale with the experiment's changes; the latter need not repeat anything."""
    if name not in study.scales:
        known = list(study.scales)
        raise RecipeError(f"--scale {name!r}: unknown.{did_you_mean(name, known)} Allowed: {', '.join(known)}")
    own = experiment.scales.get(name, Scale())
    parts = [scale.model_dump(exclude_unset=True) for scale in (study.scales[name], own)]
    return Scale.model_validate(merge(*parts))


def _choose(
    option: str, wanted: Sequence[str] | None, known: Mapping[str, Any] | Sequence[str], also: Mapping[str, str] = {}
) -> list[str]:
    """Those of the known names that are wanted, in the paper's order; ``also`` are other names for them."""
    for name in wanted or ():
        if name not in known and name not in also.values():
            raise RecipeError(f"{option}: no {name!r} in it.{did_you_mean(name, known)} There are: {', '.join(known)}")
    return [name for name in known if wanted is None or name in wanted or also.get(name) in wanted]


def _columns_of(study: Study, experiment: Experiment, name: str) -> tuple[Column, Column]:
    """A column as the experiment has it, and the study's column that it is of."""
    own = experiment.columns[name] if isinstance(experiment.columns, dict) else Column()
    return own, study.columns[own.of or name]


def _obstacle(
    study: Study, experiment: Experiment, scale: Scale, column: str, folder: Path | None, wanted: Wanted
) -> str:
    """Why a column cannot be run; empty where it can."""
    own, of = _columns_of(study, experiment, column)
    name = own.of or column
    if scale.only is not None and name not in scale.only:
        return f"not at scale {wanted.scale}, which has {', '.join(scale.only)}"
    if folder is None and "{data}" in (scale.base or "") and wanted.base is None:
        return f"scale {wanted.scale} takes its base from a folder; give --data FOLDER or --base MODEL"
    if scale.text == "demo" or folder is None:
        return ""
    absent = [path for path in _local_paths(study.data[of.data]) if not (folder / path).exists()]
    return f"{folder / absent[0]} does not exist" if absent else ""


def _local_paths(data: DataSet) -> list[str]:
    if "users" in data.local:
        return [source if isinstance(source, str) else source["path"] for source in data.local["users"].values()]
    path = data.local["dataset"]["path"]
    return [path] if isinstance(path, str) else list(path)


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
    own, of = _columns_of(study, experiment, column)
    shrunk = scale.columns.get(own.of or column, Overlay())
    overlays = [study, of, own, scale, shrunk, row]
    data, names = _data(study, study.data[of.data], folder, demo=scale.text == "demo")
    known = settings_of(row.method)
    settings = {k: v for part in overlays for k, v in part.settings.items() if k in known}
    if unknown := sorted(set(row.settings) - set(known)):
        raise RecipeError(f"reproduce: method {row.method} has no setting {unknown[0]!r}; it has: {', '.join(known)}")
    base = wanted.base or scale.base or of.base
    content = merge({"data": data}, *(part.recipe for part in overlays))
    content = {
        **content,
        "base": base.replace("{data}", str(folder)),
        "seed": seed,
        "method": {"name": row.method, **settings},
        "data": _limits_by_name(content["data"], names),
    }
    where = f"{experiment.source}, column {column}, row {row.label or row.method}"
    recipe = parse_recipe(_filled(content, own.values), where=where)
    recipe = recipe.with_changes(wanted.changes) if wanted.changes else recipe
    make(recipe.method.name, **recipe.method.settings)  # every mistake is found before the first run
    return recipe


def _data(study: Study, data: DataSet, folder: Path | None, *, demo: bool) -> tuple[dict[str, Any], list[str]]:
    """The section ``data`` and the users' names in the paper's order."""
    if demo:
        texts = dict(zip(data.users, study.demo, strict=True))
        held_out = {key: data.local[key] for key in ("held_out",) if key in data.local}
        return {"users": texts, **held_out}, data.users
    section = data.hub if folder is None else _anchored(data.local, folder)
    names = list(section["users"]) if "users" in section else list(section["dataset"]["users"])
    limits = {f"max_{split}_tokens": data.tokens[split] for split in SPLITS}
    return {**section, **limits}, names


def _anchored(local: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Paths below the folder; of the sections that have some, these are copies."""
    if "users" in local:
        users = {n: {"path": s} if isinstance(s, str) else dict(s) for n, s in local["users"].items()}
        return {**local, "users": {n: {**s, "path": str(folder / s["path"])} for n, s in users.items()}}
    path = local["dataset"]["path"]
    paths = str(folder / path) if isinstance(path, str) else [str(folder / one) for one in path]
    return {**local, "dataset": {**local["dataset"], "path": paths}}


def _limits_by_name(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A limit given as a list is one number for each user, in the paper's order."""
    lists = {key: value for key, value in data.items() if key.endswith("_tokens") and isinstance(value, list)}
    return {**data, **{key: dict(zip(names, value, strict=True)) for key, value in lists.items()}}


def _filled(content: Any, values: Mapping[str, Any]) -> Any:
    """``$NAME`` replaced by the column's value."""
    if isinstance(content, Mapping):
        return {key: _filled(value, values) for key, value in content.items()}
    if isinstance(content, str) and content.startswith("$"):
        if content[1:] not in values:
            raise RecipeError(f"reproduce: a row asks for {content!r}, which its column does not have")
        return values[content[1:]]
    return content
