"""The run folder of a federation's server, and its status file."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from comingle.config import Recipe
from comingle.config.settings import AUTO
from comingle.federation.backend import NetworkBackend
from comingle.federation.coordinator import Coordinator, Patience, new_coordinator
from comingle.federation.flower.channel import Channel
from comingle.federation.public import House, Public, build_house, check_possible, public_part, read_public
from comingle.methods import own_errors
from comingle.protocol.messages import LOWEST, verdict
from comingle.runs.folders import as_begun, open_folder
from comingle.runs.given import Given
from comingle.training.checkpoints import (
    Progress,
    load_checkpoint,
    progress_of,
    prune_checkpoints,
    read_progress,
    save_checkpoint,
)
from comingle.training.evaluation import Clock, end_event, period, start_event
from comingle.training.events import EventLog, Observer
from comingle.training.kinds.base import kind_of
from comingle.training.plan import keep_key
from comingle.training.rounds import Evaluations, outcome_warnings, run_rounds
from comingle.training.state import State, initial_state
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import SPLITS, Inputs, UserInputs, recorded_date
from comingle.utils.records import FEDERATION, PARTICIPANTS, read_evaluations, read_metrics, write_json
from comingle.utils.trees import Tree

WRITE_SECONDS = 0.5
"""The file is written no more often than that while a round lasts."""


@dataclass(kw_only=True)
class Seat:
    """What is known of one user.

    ``state`` is "expected", "here" or "away"; ``seen`` the time of its last answer (seconds since 1970); bytes are
    those of its messages in this run. Losses and scores are there if the user tells them, ``epsilon`` where the recipe
    has ``privacy``, and ``counted``, how much of its last upload did, where it has a rule of ``aggregation``.
    """

    state: str = "expected"
    round: int = 0
    seen: float | None = None
    upload_bytes: int = 0
    download_bytes: int = 0
    train_loss_nats: float | None = None
    test: float | None = None
    epsilon: float | None = None
    counted: float | None = None
    why: str = ""


class Board:
    """An observer of a coordinator's events, which keeps ``participants.json``; a run that goes on goes on counting."""

    def __init__(self, folder: Path, users: Sequence[str], rounds: int):
        self._path, self._rounds, self._round, self._measure = folder / PARTICIPANTS, rounds, 0, ""
        self._privacy: dict[str, float] = {}
        known = self._known()
        self._seats = {name: Seat(**known.get(name, {})) for name in users}
        for seat in self._seats.values():
            seat.state, seat.why = "expected", ""
        self._written = 0.0
        self._write()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        if (seat := self._seats.get(event.get("user", ""))) is not None:
            self._take(seat, event)
        if event["event"] == "round":
            self._round = event["round"]
            for name, loss in event["train_loss_nats"].items():
                self._seats[name].train_loss_nats = loss
        elif event["event"] == "privacy":
            self._privacy = {key: event[key] for key in ("epsilon", "delta")}
            for name, seat in self._seats.items():
                seat.epsilon = event.get("users", {}).get(name, event["epsilon"])
        elif event["event"] == "aggregation":
            for name, share in event.get("counted", {}).items():
                self._seats[name].counted = share
        elif event["event"] == "evaluation":
            for name, scores in event["users"].items():
                key, self._seats[name].test = next(iter(scores.items()))
                self._measure = key.removeprefix("test_")
        if event["event"] != "step" or time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _take(self, seat: Seat, event: Mapping[str, Any]) -> None:
        seat.state, seat.why = "away" if event["event"] == "failed" else "here", event.get("reason", "")
        if seat.state == "here":
            seat.seen = time.time()
        if event["event"] == "step":
            seat.round = min(event["round"], self._rounds)  # what ends a run comes after its last round
            seat.upload_bytes += event["upload_bytes"]
            seat.download_bytes += event["download_bytes"]

    def _known(self) -> dict[str, Any]:
        try:
            users = json.loads(self._path.read_text(encoding="utf-8"))["users"]
            return {name: asdict(Seat(**one)) for name, one in users.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # it only tells people; nothing is computed from it

    def _write(self) -> None:
        seats = {name: asdict(seat) for name, seat in self._seats.items()}
        content = {"round": self._round, "rounds": self._rounds, "measure": self._measure, "users": seats}
        content |= {"privacy": self._privacy} if self._privacy else {}
        write_json(self._path, content)
        self._written = time.monotonic()


_OWN, _ENDING = "federation/", "ending"
KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A federation that a server is to run: ``recipe`` has no data, only options; ``settings`` are of nets."""

    recipe: Recipe
    users: tuple[str, ...]
    settings: dict[str, Any]
    patience: Patience = field(default_factory=Patience)


def coordinate(
    plan: Plan,
    channel: Channel,
    folder: Path,
    *,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
) -> dict[str, Any]:
    """Run a federation from its run folder; its metrics. A run that was stopped goes on with ``resume``.

    Raises:
        ComingleError: the plan cannot be carried out with users elsewhere, the folder cannot be used, or too few users
            answered.
    """
    check_possible(plan.recipe)
    plan = replace(plan, recipe=as_begun(folder, plan.recipe, resume=resume))
    kind = kind_of(plan.recipe)
    base = Given(date=recorded_date(folder) if resume else "").load_base(plan.recipe) if kind.needs_base else None
    settings = plan.settings | ({} if base is None else kind.settings(kind.reopened(base, (), plan.settings)))
    public = public_part(plan.recipe, plan.users, settings, base)
    house = build_house(public, public.whole_recipe(), base)
    inputs = Inputs(
        kind=house.materials.kind.name,
        base=public.base,
        tokenizer=public.tokenizer,
        users={name: UserInputs(counts={}, digests=dict.fromkeys(SPLITS, "")) for name in plan.users},
        settings=settings,
    )
    pooled = house.method.placement.pooled
    opening = open_folder(folder, house.recipe, inputs, resume=resume, force=force, pooled=pooled)
    with opening, own_errors(house.method):
        return _run(public, house, plan, channel, folder, observers)


def _run(
    public: Public, house: House, plan: Plan, channel: Channel, folder: Path, observers: Sequence[Observer]
) -> dict[str, Any]:
    run, known = _named(folder, public)
    newest = list_checkpoints(folder)[-1:] if known else []
    progress = read_progress(newest[0]) if newest else None
    path, ending = folder / "events.jsonl", _is_ending(folder)
    log = EventLog(path, keep_bytes=path.stat().st_size if ending else progress.events_bytes if progress else 0)
    rounds = house.plan.training.rounds if house.method.trains else 0
    evaluations = Evaluations(read_evaluations(folder) if log.size_bytes else ())
    sinks = [log, Board(folder, plan.users, rounds), evaluations, *observers]

    def observe(event: dict[str, Any]) -> None:
        for sink in sinks:
            sink(event)

    try:
        coordinator = new_coordinator(run, public, house, channel, observe, plan.patience)
        keep_key(folder, *coordinator.server.mechanisms, anew=not known, begun=progress is not None)
        if progress is not None:
            _restore(coordinator, newest[0], progress)
        coordinator.join()
        if progress is None:
            _settle(coordinator)
        if log.size_bytes == 0 or progress is None:
            started = start_event(house.plan, coordinator.model.name, _amounts(coordinator))
            observe(started | _skipped_rows(coordinator))

        start = progress.round if progress else 0
        backend = NetworkBackend(coordinator, stopped_after=start if progress and progress.stopped else None)

        def save(done: int, clock: Clock) -> None:
            log.to_disk()
            _save(coordinator, folder, done, log.size_bytes, stopped=backend.stopped_after is not None)

        if not ending:
            clock = coordinator.clock
            told = run_rounds(backend, observe=observe, checkpoint=save, first_round=start, clock=clock)
            metrics = backend.summarise(told).as_dict()
            metrics |= _skipped_rows(coordinator) | coordinator.server.metrics
            metrics |= outcome_warnings(house.method, evaluations, metrics)
            if untold := [name for name in plan.users if name not in metrics["users"]]:
                metrics["untold"] = untold
            observe(end_event(metrics))
            log.to_disk()
            _write_down(folder, run, public, ending=True)
            write_json(folder / "metrics.json", metrics)
        metrics = read_metrics(folder)
        coordinator.end(metrics["rounds"])
        _write_down(folder, run, public)
    finally:
        log.close()
    return metrics


def has_ended(folder: Path) -> bool:
    """Whether a federation is over, and all who were there have been told so."""
    return (folder / "metrics.json").exists() and not _is_ending(folder)


def _is_ending(folder: Path) -> bool:
    """Whether there are metrics, and users are to hear that all is over; then each writes down its model."""
    path = folder / FEDERATION
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return bool(told.get(_ENDING)) and (folder / "metrics.json").exists()


def _named(folder: Path, public: Public) -> tuple[str, bool]:
    """By which name users know this run, and whether it was there before."""
    path = folder / FEDERATION
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if (was := read_public(content["public"])).digest != public.digest:
            raise RunError(f"{folder}: belongs to another federation ({was.digest}, not {public.digest})")
        return str(content["run"]), True
    run = secrets.token_hex(8)
    _write_down(folder, run, public)
    return run, False


def _write_down(folder: Path, run: str, public: Public, *, ending: bool = False) -> None:
    """Keep what users know this run by and, while it is so, that they are about to hear of its end."""
    write_json(folder / FEDERATION, {"run": run, "public": public.as_dict(), **({_ENDING: True} if ending else {})})


def _settle(coordinator: Coordinator) -> None:
    """Find out how often users evaluate, as :mod:`comingle.training.rounds` does; those who tell stand for all."""
    plan, users = coordinator.house.plan, len(coordinator.public.users)
    told = [one["works"] for one in coordinator.joined.values() if one.get("works", (0, 0))[0]]
    if plan.evaluation.every == AUTO and coordinator.house.method.trains and told:
        trained, scored = map(sum, zip(*told, strict=True))
        evaluated = min(plan.evaluation.users or users, users)
        amounts = [len(told), trained, scored * evaluated // len(told)]
        _evaluate_every(coordinator, period(plan, amounts, users))


def _evaluate_every(coordinator: Coordinator, rounds: int) -> None:
    plan = coordinator.house.plan.updated("evaluation", every=rounds)
    coordinator.house = replace(coordinator.house, plan=plan)


def _amounts(coordinator: Coordinator) -> dict[str, dict[str, Any]]:
    """How much everybody has, of those who tell."""
    joined = coordinator.joined
    return {name: dict(joined.get(name, {}).get("amounts", {})) for name in coordinator.public.users}


def _skipped_rows(coordinator: Coordinator) -> dict[str, int]:
    """Return the number of rows that clients left out, of those that tell it; empty where there are none."""
    rows = sum(one.get("skipped_rows", 0) for one in coordinator.joined.values())
    return {"skipped_rows": rows} if rows else {}


# ---------------------------------------------------------------- the server's own state


def _save(coordinator: Coordinator, folder: Path, done: int, events_bytes: int, *, stopped: bool) -> None:
    public, counted = coordinator.public, {"clock": coordinator.clock, "events_bytes": events_bytes}
    progress = progress_of(done, public.digest, public.users, stopped=stopped, **counted)
    kept = coordinator.server.state | _own_tensors(coordinator)
    save_checkpoint(folder, coordinator.model.layout, _no_rows(coordinator), kept, progress)
    prune_checkpoints(folder, KEPT)


def _own_tensors(coordinator: Coordinator) -> Tree:
    names, said = coordinator.public.users, coordinator.verdicts
    numbers = {
        "serials": [coordinator.serials[name] for name in names],
        "versions": [coordinator.versions[name] + 1 for name in names],  # counts, which are never negative
        "verdicts": [1 + int(said[name].tensors[LOWEST]) if name in said else 0 for name in names],
        "verdict_rounds": [said[name].version if name in said else 0 for name in names],
        "local_steps": coordinator.local_steps,
        "best_round": coordinator.best_round,
        "evaluate_every": coordinator.house.plan.period,
    }
    return {_OWN + name: torch.tensor(value) for name, value in numbers.items()}


def _restore(coordinator: Coordinator, checkpoint: Path, progress: Progress) -> None:
    server, names = coordinator.server, coordinator.public.users
    like = server.state | _own_tensors(coordinator)
    _, kept = load_checkpoint(checkpoint, coordinator.model.layout, _no_rows(coordinator), like)
    own = {name.removeprefix(_OWN): kept.pop(name) for name in list(kept) if name.startswith(_OWN)}
    server.restore(kept)
    if progress.round < coordinator.house.plan.training.rounds and not progress.stopped:
        # The round after it may have been published, and will be again, perhaps with other participants.
        server.charge(range(len(names)))
    coordinator.serials = dict(zip(names, own["serials"].tolist(), strict=True))
    coordinator.versions = dict(zip(names, (own["versions"] - 1).tolist(), strict=True))
    coordinator.local_steps, coordinator.best_round = int(own["local_steps"]), int(own["best_round"])
    _evaluate_every(coordinator, int(own["evaluate_every"]))
    said = zip(names, own["verdicts"].tolist(), own["verdict_rounds"].tolist(), strict=True)
    coordinator.verdicts = {name: verdict([name], done, lowest=flag > 1) for name, flag, done in said if flag}
    coordinator.clock = progress.clock


def _no_rows(coordinator: Coordinator) -> State:
    """The server has no user's row."""
    layout = coordinator.model.layout
    nothing = torch.zeros(0, layout.columns, dtype=torch.bool)
    return initial_state(
        layout,
        nothing,
        names=[],
        local=nothing.new_zeros(layout.columns),
        ranks=torch.zeros(0, dtype=torch.int64),
        seed=0,
    )
