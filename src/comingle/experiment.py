"""From a recipe to a run: wiring only, each step in the room that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from comingle.adapters.inject import AdapterSettings, ExpertCounts
from comingle.adapters.layouts import Targets
from comingle.data.answers import UserAnswers
from comingle.data.batches import PAD
from comingle.data.pack import UserData
from comingle.engines.checkpoints import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    personal_tensors,
    prune_checkpoints,
    read_progress,
    save_checkpoint,
)
from comingle.engines.checksums import resume_command
from comingle.engines.client import Clients
from comingle.engines.clock import Clock
from comingle.engines.evaluations import start_event, summarise
from comingle.engines.events import EventLog, Observer, tensorboard
from comingle.engines.local import finetuned
from comingle.engines.naming import check_names, reorder, reorder_kept
from comingle.engines.optimizers import OptimizerSettings
from comingle.engines.rounds import run_rounds
from comingle.engines.training import Training
from comingle.errors import DataError, DivergenceError, RecipeError, RunError
from comingle.folders import check_folder, open_folder
from comingle.materials import Materials, describe, gather, prepare
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.language import Base
from comingle.models.mixed import MixedLanguageModel
from comingle.models.personal import PersonalModel
from comingle.models.personal_net import PersonalNet, personal_net
from comingle.nets import build_nets, mix_base, warn_unread
from comingle.opening import reopen
from comingle.progress import LOADING, reporting
from comingle.recipes import Recipe, load_recipe
from comingle.records import GEOMETRIC, describe_metrics, read_metrics, write_json
from comingle.terminal import printable
from comingle.transports.inprocess import InProcess, federate

COMPILE_FROM = 5e12
"""``compile: auto`` compiles from this many training tokens times base parameters on: below, it takes longer than it
saves. Compiling takes some tens of seconds whatever the model; SmolLM2-135M gets there with 37,000 tokens."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its folder, its metrics, and everybody's model."""

    folder: Path | None
    recipe: Recipe
    metrics: dict[str, Any]
    federation: InProcess

    def __repr__(self) -> str:
        place = "" if self.folder is None else f", in {self.folder}"
        return printable(f"Run({describe_metrics(self.metrics)}{place})")

    @property
    def users(self) -> list[str]:
        """Names of the users."""
        return [user.name for user in self.federation.clients.users]

    def user(self, name: str) -> PersonalModel | PersonalNet:
        """The personal model of a user: one that generates text, or for a task's nets one that predicts.

        Raises:
            DataError: no such user.
        """
        if name not in self.users:
            raise DataError(f"no user {name!r}; there are: {', '.join(self.users)}")
        clients = self.federation.clients
        row, model = clients.row_of[self.users.index(name)], clients.model
        with finetuned(clients, members=clients.owners([row])):
            tensors = {k: t.to(model.dtype) for k, t in personal_tensors(model.layout, clients.state, row).items()}
        if isinstance(model, (AdaptedModel, MixedLanguageModel)):
            return PersonalModel(name=name, model=model, tensors=tensors, row=clients.owners([row])[0])
        return personal_net(name, model, tensors)


# -------------------------------------------------------------------- public verbs


def run(
    recipe: Recipe | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    materials: Materials | None = None,
    progress: bool = False,
    **changes: Any,
) -> Run:
    """Run a recipe: an object, or the path of a file; ``changes`` replace keys, as ``seed=1`` or ``method="local"``.

    With ``out`` everything is written to that folder, from which ``resume=True`` goes on after an interruption;
    without it nothing is written. ``progress`` tells on stderr how far it is, in a notebook below the cell.

    Raises:
        ComingleError: whatever the user can correct, in one line.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    recipe = recipe.with_changes(changes) if changes else recipe
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_folder(folder, recipe, resume=resume, force=force)
    elif resume:
        raise RunError("resume: no run folder; give out=FOLDER of the run to go on with")
    with reporting(quiet=not progress) as reporter:
        with reporter.waiting(LOADING):
            materials = materials or prepare(recipe)
            federation = build(recipe, materials)
        warn_unread(recipe)
        watching = [*observers, reporter.watch(federation.clients)]
        if folder is None:
            return execute(federation, recipe, None, observers=watching)
        with open_folder(folder, recipe, describe(materials, recipe), resume=resume, force=force):
            return execute(federation, recipe, folder, resume=resume, observers=watching)


def load(folder: str | Path) -> Run:
    """Open a finished run, to talk to its users' models or predict with them, out of its folder and its base alone.

    The users' data is read when something asks for it: to score models on it, or for methods that tune on it.

    Raises:
        RunError: not a finished run of comingle, or the base changed.
    """
    folder = Path(folder)
    metrics = read_metrics(folder)
    recipe = load_recipe(folder)
    federation = build(recipe, reopen(folder, recipe))
    if federation.clients.method.trains:
        _check_round(folder, metrics, _restore(federation, folder, recipe))
        federation.clients.choose()
    return Run(folder=folder, recipe=recipe, metrics=metrics, federation=federation)


# -------------------------------------------------------------------- recipe -> objects


def build(recipe: Recipe, materials: Materials) -> InProcess:
    """The users, the adapted model and the settings of a recipe.

    Raises:
        ComingleError: settings, text and base do not fit each other.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    if materials.task is not None:
        names = [user.name for user in materials.task.users]
        training = training_settings(recipe, names)
        return build_nets(recipe, materials.task, method, training, unread=materials.unread)
    training = training_settings(recipe, [user.name for user in materials.users or materials.answers])
    if method.placement.pooled:  # the one trainer is always there
        training = replace(training, participation=1.0)
    users, trainers, feed = gather(materials, method, training)
    assert materials.base is not None
    if method.placement.mixture is not None:
        model = mix_base(recipe, materials.base, method, len(trainers))
    else:
        asked_later = materials.unread and materials.answers  # only they could say how many tokens they have
        tokens = 0 if asked_later else training_tokens(trainers, training)
        model = adapt_base(recipe, materials.base, method, len(trainers), tokens)
    return federate(
        Clients(
            model,
            method,
            training,
            trainers=trainers,
            users=users,
            feed=feed,
            reads=not materials.unread,
            skipped=materials.skipped,
        )
    )


def training_tokens(trainers: Sequence[UserData | UserAnswers], training: Training) -> int:
    """How many tokens trainers who are there in every round train on."""
    asked = [trainer.train.windows for trainer in trainers if isinstance(trainer, UserAnswers)]
    if asked:
        return training.rounds * training.local_epochs * sum(int((windows != PAD).sum()) for windows in asked)
    return len(trainers) * training.iterations * training.batch_size * training.context


def adapt_base(recipe: Recipe, base: Base, method: Method, trainers: int, tokens: int) -> AdaptedModel:
    """The base with the adapters that the recipe and the method ask for, for so many trainers and training tokens."""
    section = recipe.adapters
    targets = Targets(**_as_settings(section.targets, Targets)) if section.targets else None
    settings = AdapterSettings(**{**_as_settings(section, AdapterSettings), "targets": targets})
    if method.placement.pooled and not isinstance(settings.rank, int):  # the one trainer can afford what anybody can
        settings = replace(settings, rank=max(settings.rank))
    specialists = method.placement.specialists_of(trainers)
    counts = ExpertCounts(generalists=method.placement.generalists, specialists=specialists)
    compiled = recipe.runtime.compile
    if compiled == "auto":
        compiled = method.trains and tokens * base.model.num_parameters() >= COMPILE_FROM
    return adapt(base, settings, counts, routed=method.placement.routed, compiled=bool(compiled))


def training_settings(recipe: Recipe, names: Sequence[str]) -> Training:
    """The engine's settings, with users named in ``participation`` turned into numbers.

    Raises:
        RecipeError: ``participation`` names somebody who is not a user.
    """
    section = recipe.training
    participation: Any = section.participation
    if isinstance(participation, list):
        for name in (n for members in participation for n in members):
            if name not in names:
                raise RecipeError(f"training.participation: no user {name!r}; there are: {', '.join(names)}")
        participation = tuple(tuple(names.index(n) for n in members) for members in participation)
    plain = {f.name: getattr(section, f.name) for f in fields(Training) if hasattr(section, f.name)}
    return Training(
        **{
            **plain,
            "experts": OptimizerSettings(**_as_settings(section.experts, OptimizerSettings)),
            "router": OptimizerSettings(**_as_settings(section.router, OptimizerSettings)),
            "participation": participation,
        },
        seed=recipe.seed,
        users_per_step=recipe.runtime.users_per_step,
        micro_batch=recipe.runtime.micro_batch,
        evaluate=recipe.evaluation.model,
        evaluate_every=recipe.evaluation.every,
        evaluate_first=recipe.evaluation.first,
        select=recipe.evaluation.select,
        checkpoint_every=recipe.checkpoints.every,
    )


def _as_settings(section: Any, kind: type) -> dict[str, Any]:
    """The fields of a pydantic section that a frozen dataclass of the inside has too, lists as tuples."""
    values = {f.name: getattr(section, f.name) for f in fields(kind)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def execute(
    federation: InProcess,
    recipe: Recipe,
    folder: Path | None,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
) -> Run:
    """The rounds of a run, with everything that is written on the way; ``folder`` has been opened before.

    Raises:
        RunError: the checkpoint to resume from is damaged or belongs to another recipe.
        DivergenceError: a user's loss is not finite.
    """
    clock, start, kept, clients = Clock(), 0, 0, federation.clients
    if folder is not None and resume and list_checkpoints(folder):
        progress = _restore(federation, folder, recipe)
        start, kept = progress.round, progress.events_bytes
        counted = {key: getattr(progress, key) for key in Clock.COUNTS}
        clock = Clock(earlier_seconds=progress.wall_seconds, **counted)
    log = EventLog(folder / "events.jsonl", keep_bytes=kept) if folder else None
    board = tensorboard(folder / "tensorboard") if folder else None
    sinks = [sink for sink in (log, board, *observers) if sink is not None]

    def observe(event: dict[str, Any]) -> None:
        for sink in sinks:
            sink(event)

    def checkpoint(done: int, clock: Clock) -> None:
        if folder is None or log is None:
            return
        log.to_disk()
        progress = Progress(
            round=done,
            fingerprint=recipe.fingerprint,
            trainers=[trainer.name for trainer in clients.trainers],
            events_bytes=log.size_bytes,
            wall_seconds=clock.wall_seconds,
            **{key: getattr(clock, key) for key in Clock.COUNTS},
        )
        save_checkpoint(folder, clients.model.layout, clients.state, federation.server.state, progress)
        prune_checkpoints(folder, recipe.checkpoints.keep)

    if (log is not None and log.size_bytes == 0) or start == 0:  # a log that was lost begins anew
        observe(start_event(clients))
    try:
        scores = run_rounds(federation, observe=observe, checkpoint=checkpoint, first_round=start, clock=clock)
        metrics = summarise(clients, scores, clock, base=clients.model.name).as_dict() | clients.left_out
        measure = f"mean_test_{metrics['measure']}"
        observe({"event": "end"} | {key: metrics[key] for key in (measure, GEOMETRIC) if key in metrics})
    except DivergenceError as error:
        if folder is None or not (checkpoints := list_checkpoints(folder)):
            raise
        raise DivergenceError(f"{error}; the last checkpoint is kept, {checkpoints[-1].name}") from error
    finally:
        for sink in (log, board):
            if sink is not None:
                sink.close()
    if folder is not None:
        write_json(folder / "metrics.json", metrics)
    return Run(folder=folder, recipe=recipe, metrics=metrics, federation=federation)


def _check_round(folder: Path, metrics: dict[str, Any], progress: Progress) -> None:
    newest = list_checkpoints(folder)[-1]
    if progress.round != metrics["rounds"]:
        raise RunError(
            f"{newest}: the run has {metrics['rounds']} rounds, its last checkpoint {progress.round}; "
            f"{resume_command(newest)} goes on from there"
        )


def _restore(federation: InProcess, folder: Path, recipe: Recipe) -> Progress:
    """Both halves as they were at the newest checkpoint of a run.

    Raises:
        RunError: there is none, or it is damaged or belongs to another recipe.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise RunError(f"{folder}: no checkpoint in it")
    progress = read_progress(checkpoints[-1])
    if progress.fingerprint != recipe.fingerprint:
        raise RunError(
            f"{checkpoints[-1]}: belongs to another recipe ({progress.fingerprint}, not {recipe.fingerprint})"
        )
    clients, server = federation.clients, federation.server
    was, names = progress.trainers, [trainer.name for trainer in clients.trainers]
    check_names(checkpoints[-1], was, names)
    state, kept = load_checkpoint(checkpoints[-1], clients.model.layout, clients.state, server.state)
    clients.state = reorder(state, was, names)
    clients.resized()
    server.restore(reorder_kept(kept, was, names, clients.method.server.by_user))
    return progress
