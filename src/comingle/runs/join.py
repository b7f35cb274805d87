"""A user joins a finished federation.

What a newcomer gets follows from the method's placement, client and server. What is shared is downloaded. Where a user
has something of its own (specialists, a router, a mixture vector), that is trained and what was taken stands still;
where the server keeps something of each user (merging weights), that moves and the rest of what it keeps stands still;
where all of a model is shared, the newcomer fine-tunes what it took.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comingle.config import Recipe
from comingle.methods.base import Method
from comingle.models.hardware import torch_defaults
from comingle.models.routers import ZERO_SHARE_LOGIT
from comingle.reports.formatting import html_of
from comingle.reports.tables import render_joined
from comingle.runs.api import load, of_one_user
from comingle.runs.folders import check_folder, open_folder
from comingle.runs.given import AnyBase, Given, Loss, given_of
from comingle.runs.progress import LOADING, Reporter, reporting
from comingle.runs.results import Run
from comingle.runs.session import build, describe, execute, prepare
from comingle.training.backends.launched import require_alone
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.cohort import Models
from comingle.training.cohort_state import FrozenColumns
from comingle.training.evaluation import measure_of, measured
from comingle.training.events import JsonObject
from comingle.training.kinds.base import RunData, section_for
from comingle.utils.errors import DataError, RecipeError, RunError
from comingle.utils.files import locked
from comingle.utils.records import PUBLIC, told_in_one_line, write_json
from comingle.utils.trees import CLIENT_ROUTER


@contextmanager
def drafted(folder: Path | None, recipe: Recipe, joined: Path | None, *, force: bool) -> Iterator[Path | None]:
    """Where a newcomer's run is written until it is whole: what stopped before cannot be gone on with.

    ``joined`` is the folder of the run that is joined.

    Raises:
        RunError: the folder cannot be used, is that of the run that is joined, or somebody else is about to fill it.
    """
    if folder is None:
        yield None
        return
    check_folder(folder, recipe, resume=None, force=force)
    there, to = None if joined is None else joined.resolve(), folder.resolve()
    if there is not None and (there.is_relative_to(to) or to.is_relative_to(there)):
        raise RunError(f"{folder}: in the place of the run that is joined, which is only read; use another --out")
    outer = folder.with_name(f".{folder.name}.joining")
    with told_in_one_line(outer):
        outer.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with locked(outer):
                shutil.rmtree(outer / folder.name, ignore_errors=True)
                try:
                    yield outer / folder.name
                finally:
                    shutil.rmtree(outer, ignore_errors=True)
        except OSError:  # a disk that is too full to say who writes
            shutil.rmtree(outer, ignore_errors=True)
            raise


JOINED = "joined.json"
_HANDED = ("net", "loss")
"""What a program may have handed over."""
_PER_NAME = ("max_train_tokens", "max_valid_tokens", "max_test_tokens")


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A newcomer's run, and what it is to be held against: by row (``pretrained``, ``local``, ``shared``, ``joined``)
    the test result, the ``train_tokens`` (or samples) of the newcomer's own that it took, and what the row is."""

    run: Run
    name: str
    measure: str
    rows: Mapping[str, Mapping[str, Any]]

    def _repr_html_(self) -> str:
        """Return the comparison table and the newcomer's run, for a notebook."""
        return html_of([render_joined(self.name, self.measure, self.rows)]) + self.run._repr_html_()


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """Who joins, with what; ``handed`` is data that a program hands over, None where the recipe says where it is."""

    name: str
    recipe: Recipe
    handed: Mapping[str, Any] | None
    tuned: int
    """Rounds in which the newcomer fine-tunes what it has taken, after all others."""


def newcomer(run: Run, name: str, data: object, *, rounds: int | None, local_step: bool) -> Newcomer:
    """Who joins a run, after everything that can be wrong without reading the data has been looked at.

    Raises:
        DataError: the name is taken, or the run's kind of data is nobody's to bring.
        RunError: the run has nothing that could be taken.
        RecipeError: ``local_step`` where everything is trained anyway.
    """
    method = run.federation.clients.method
    if name in run.users:
        raise DataError(f"--name: {name!r} is a user of the run already; there are: {', '.join(run.users)}")
    check_takes(run, method)
    if local_step and not holds(run.federation.clients):
        raise RecipeError(
            f"--local-step: {method.name} has no part of a user's own to train first; leave --local-step out"
        )
    handed = None if isinstance(data, str | os.PathLike) else {name: data}
    if handed is not None:
        section_for(handed, run.recipe.data.model_dump())
    recipe = of_one_user(run.recipe, max)
    total = (rounds or recipe.training.rounds) + local_step
    changes = {"training.rounds": total, "data": _data(run, name, data)}
    return Newcomer(
        name=name, recipe=recipe.with_changes(changes, where="--data"), handed=handed, tuned=int(local_step)
    )


def check_takes(run: Run, method: Method) -> None:
    """Whether there is something to take.

    Raises:
        RunError: the method shares nothing, keeps nothing between rounds, or has not exchanged anything.
    """
    where = run.folder or "the run"
    if method.placement.pooled:
        raise RunError(f"{where}: {method.name} is one model on everybody's text; a newcomer's would have to be in it")
    if not method.shared:
        raise RunError(f"{where}: {method.name} shares nothing, so there is nothing to join; train alone: method local")
    if method.server.peer_to_peer:
        raise RunError(
            f"{where}: users of {method.name} hear each other while they train, and its server keeps nothing to take"
        )
    if run.folder is not None and _is_ones_own(run.folder):
        raise RunError(f"{where}: one user's own, without a server to take from; a run of `comingle run` has one")
    if run.federation.server.version == 0:
        raise RunError(
            f"{where}: its server has not aggregated anything (rounds: {run.recipe.training.rounds}, evaluated before "
            "the exchange); allowed: a run of more rounds, or with evaluation.model: exchanged"
        )


def _is_ones_own(folder: Path) -> bool:
    """Whether it is a newcomer's run, or what a participant of a federation keeps."""
    home = folder.parent
    return (folder / JOINED).exists() or ((home / PUBLIC).exists() and (home / "answers").is_dir())


def _data(run: Run, name: str, data: object) -> dict[str, Any]:
    """The section ``data`` of a newcomer: read as the others' is, but for who they are."""
    section = run.recipe.data
    if "users" not in type(section).model_fields:
        raise DataError(f"the run's users have {section.label}, which the recipe makes; nobody can bring their own")
    content = section.model_dump(mode="json", exclude_unset=True)
    rows = content.pop("dataset", None) or {}
    content = {key: value for key, value in content.items() if key not in ("users", "given", "held_out")}
    content = {key: value for key, value in content.items() if key not in _PER_NAME or not isinstance(value, dict)}
    content |= {"kind": section.kind}
    if run.settings.get("whole"):  # those of all users together, of whom this one may lack some
        content["classes"] = list(run.settings["labels"]) or run.settings["classes"]
    if "on_small_user" in content:  # there is nobody else
        content["on_small_user"] = "refuse"
    if rows and "split" in content:  # names of a data set's splits
        content["split"] = {key: value for key, value in content["split"].items() if key in ("valid", "test")}
    if not isinstance(data, str | os.PathLike):
        return content | {"given": True}
    path = os.fspath(data)
    path = os.path.abspath(os.path.expanduser(path)) if os.path.exists(os.path.expanduser(path)) else path
    source: dict[str, Any] = {"path": path}
    if "text" in rows:
        source["column"] = rows["text"]
    return content | {"users": {name: source}}


def holds(clients: Clients) -> bool:
    """Whether what a user takes stands still while a newcomer trains what is its own: where there is something."""
    method, layout = clients.method, clients.model.layout
    if method.placement.mixture is not None or method.placement.copies > 1:
        return True
    return bool((layout.mask(method.client.trained) & ~layout.mask(method.received)).any())


def join_run(
    run: Run,
    who: Newcomer,
    folder: Path | None,
    reporter: Reporter,
    *,
    given: Given,
    force: bool = False,
) -> Joined:
    """Train the newcomer, and what it is held against, on its data; write an ordinary run folder of this one user.

    Raises:
        ComingleError: the data is of another kind or too little, or the folder exists.
    """
    with drafted(folder, who.recipe, run.folder, force=force) as draft:
        joined = _join(run, who, draft, reporter, given=given)
        if folder is None or draft is None:
            return joined
        check_folder(folder, who.recipe, resume=None, force=force)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    return replace(joined, run=replace(joined.run, folder=folder))


def _join(run: Run, who: Newcomer, folder: Path | None, reporter: Reporter, *, given: Given) -> Joined:
    base = getattr(run.federation.clients.model, "base", None)
    with reporter.waiting(LOADING):
        materials = prepare(who.recipe, base=base, given=replace(given, users=who.handed))
    _check_alike(run, who, materials)
    federation = build(who.recipe, materials, store="memory")
    take(federation, run, rounds=who.recipe.training.rounds - who.tuned)
    clients = federation.clients
    told = clients.scorer.score(_sent_alone(clients), [clients.users[0].test], [0])
    measure = measure_of(told)
    rows = {"shared": measured(told[0]) | {"train": 0}}
    tunes = federation.clients.method.client.finetunes
    rounds = who.recipe.training.rounds + tunes
    for method in ("pretrained", "local"):
        rows[method] = _alone(who, materials, method, rounds, reporter)
    done = _trained(federation, who, materials, folder, reporter)
    seen = _seen(done, federation.clients) + tunes * federation.clients.batch_source.seen(0)
    rows["joined"] = {key: value for key, value in done.metrics["users"][who.name].items() if key in rows["shared"]}
    rows["joined"] |= {"train": seen}
    unit = federation.clients.batch_source.unit
    ordered = {
        row: {key if key != "train" else f"train_{unit}": value for key, value in rows[row].items()}
        for row in ("pretrained", "local", "shared", "joined")
    }
    joined = Joined(run=done, name=who.name, measure=measure, rows=ordered)
    if folder is not None:
        write_json(folder / JOINED, {"user": who.name, "measure": measure, "rows": ordered})
    return joined


def _sent_alone(clients: Clients) -> Models:
    """What was taken, without what is the newcomer's own: of several copies the first, of models trained apart those
    that are shared."""
    mixture, models = clients.method.placement.mixture, clients.models
    if mixture is None or not mixture.trains_independently:
        return models
    rows = clients.state.rows.clone()
    clients.model.layout.views(rows)[CLIENT_ROUTER][:, clients.method.placement.generalists : mixture.clusters] = (
        ZERO_SHARE_LOGIT
    )
    return replace(models, rows=lambda numbers: rows[list(numbers)])


def _check_alike(run: Run, who: Newcomer, materials: RunData) -> None:
    """Whether samples fit the run's: one shape, the same classes, the same loss.

    Raises:
        DataError: they do not.
    """
    now = materials.kind.settings(materials)
    for key, was in run.settings.items():
        if now[key] != was:
            told = f"{key.replace('_', ' ')} {now[key]!r}; allowed: the run's, {was!r}"
            raise DataError(f"user {who.name!r}: {told}{', handed over again' if key in _HANDED else ''}")


def take(federation: InProcess, run: Run, *, rounds: int) -> None:
    """Have a newcomer receive what a run's server has; what it takes stands still for so many rounds, if it ever does.

    The server goes on as it was left, for this one user: what it keeps for all does not move any more.
    """
    clients, server, method = federation.clients, federation.server, federation.clients.method
    kept = run.federation.server.kept
    by_user = method.server.by_user
    server.kept = {name: own if name in by_user else kept[name].clone() for name, own in server.kept.items()}
    server.method = replace(method, server=method.server.settled())
    clients.plan = replace(clients.plan, method=server.method)
    clients.state.versions[:1] = -1  # has received nothing, not even what everybody starts with
    if holds(clients):
        clients.steps.frozen_columns = FrozenColumns(columns=clients.model.layout.mask(method.received), rounds=rounds)
    federation.download([0])


def _alone(who: Newcomer, materials: RunData, method: str, rounds: int, reporter: Reporter) -> JsonObject:
    """What somebody gets without the federation, in as many rounds."""
    recipe = who.recipe.with_changes({"method": method, "training.rounds": rounds, "evaluation.first": False})
    federation = build(recipe, materials, store="memory")
    watching = [reporter.watch(federation.clients, f"{who.name} · {method}")]
    done = execute(federation, recipe, None, observers=watching)
    of_user = done.metrics["users"][who.name]
    scores = {key: of_user[key] for key in of_user if key.startswith("test_") and isinstance(of_user[key], float)}
    return scores | {"train": _seen(done, federation.clients)}


def _seen(run: Run, clients: Clients) -> int:
    """Tokens or samples of training data that steps have been taken on, each copy's once."""
    steps = sum(event["tokens"] for event in run.events if event["event"] == "round")
    return steps // clients.method.placement.copies


def _trained(federation: InProcess, who: Newcomer, materials: RunData, folder: Path | None, reporter: Reporter) -> Run:
    """The newcomer's rounds."""
    observers = [reporter.watch(federation.clients, f"{who.name} joins")]
    if folder is None:
        return execute(federation, who.recipe, None, observers=observers)
    with open_folder(folder, who.recipe, describe(materials, who.recipe), resume=False, force=True):
        return execute(federation, who.recipe, folder, observers=observers)


@torch_defaults()
def join(
    run: Run | str | Path,
    *,
    name: str,
    data: object,
    out: str | Path | None = None,
    rounds: int | None = None,
    local_step: bool = False,
    force: bool = False,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    progress: bool = False,
) -> Joined:
    """Let somebody join a federation that is over, while nobody else trains; as ``comingle join``.

    Args:
        run: a finished run, or its folder, which is only read.
        name: the newcomer's.
        data: a path, or what :func:`run` takes of one user.
        out: the run folder of this one user, as :func:`load` opens it; None writes nothing.
        rounds: of the newcomer's own training, by default as many as the run had.
        local_step: one round more, in which what was taken is trained too.
        force: replace that folder.
        base, loss: what a program handed over to :func:`run`, again.
        progress: tell on stderr how far it is.

    Raises:
        ComingleError: a name of the run, data of another kind or too little, or a run from which nothing can be taken.
    """
    require_alone("join")
    opened = run if isinstance(run, Run) else load(run, base=base, loss=loss)
    with reporting(quiet=not progress) as reporter:
        who = newcomer(opened, name, data, rounds=rounds, local_step=local_step)
        given = given_of(None, base, None, loss)
        return join_run(opened, who, Path(out) if out is not None else None, reporter, given=given, force=force)
