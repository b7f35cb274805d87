"""The parts of a round's time, measured here: a few rounds of some of the recipe's users, in one process or in several.

    python -m comingle.costing.timed ORDER.json

is one of those processes. What takes part are copies of the recipe's users, under other names, so that there are as
many as a process would have; its rounds are those of a run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from comingle.config import Recipe, load_recipe
from comingle.config.settings import MEMORY
from comingle.costing.stored import user_bytes
from comingle.protocol.messages import LOSS
from comingle.runs.distributed import build_sharded, check_device, share_out, spans
from comingle.runs.session import build, prepare
from comingle.training import rounds
from comingle.training.backends.distributed import largest_terms, shifts_of, whole_sums
from comingle.training.backends.launched import find_place
from comingle.training.backends.ranks import Ranks, joined
from comingle.training.checkpoints import write_tensors
from comingle.training.client import Clients, LocalRound
from comingle.training.evaluation import Clock, Federation
from comingle.training.kinds.base import Materials
from comingle.training.rounds import amounts_of, run_rounds
from comingle.utils.errors import ComingleError

ROUNDS = 5
"""The first of them warms up."""

FEW = 4
"""A quarter of the users send in some rounds, all in the others: what differs is due to users."""

MOST_TRAINED, MOST_SENDING, ROOM_BYTES = 128, 1024, 2**28
"""Users of a process who take steps together, who send without, and bytes that their tensors may take."""

_HOPS, _DISK_BYTES, _BUS_NUMBERS = 50, 2**25, 2**20
_COUNTED = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")


def main() -> None:
    """Measure as one of several processes, or alone; the first writes what was found."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    place = find_place()
    torch.set_num_threads(order["threads"])
    with nullcontext() if place is None else joined(place) as ranks:
        try:
            found = measured(load_recipe(order["recipe"]), order["users"], ranks)
        except ComingleError as error:
            found = {"error": str(error)}
    if place is None or place.leads:
        Path(order["out"]).write_text(json.dumps(found), encoding="utf-8")


def measured(recipe: Recipe, own: int, ranks: Ranks | None) -> dict[str, Any]:
    """Seconds of everything; ``own`` users in every process, and as many as go through the model at once."""
    size = 1 if ranks is None else ranks.size
    read = prepare(recipe)
    least = build(recipe, several(read, 1)).clients
    cohort, state = min(MOST_TRAINED, least.portions.users), user_bytes(least.state, MEMORY)
    each = max(own, cohort, min(MOST_SENDING, ROOM_BYTES // max(1, state.params + state.moments)))
    federation = _federation(recipe, several(read, each * size), ranks)
    clients, meet = federation.clients, _alone if ranks is None else ranks.meet
    with counting() as counts:
        own_s, _ = rounds_of(federation, min(own, cohort), size)
    user_s = own_s if own >= cohort else rounds_of(federation, cohort, size)[0]
    few = max(1, each // FEW)
    with untrained():
        others = [rounds_of(federation, count, size)[1] for count in (few, each)]
    clients.scored = range(cohort)
    meet()
    found = about(federation) | {
        "amounts": amounts_of(clients),
        "cohort": cohort,
        "own_user_s": own_s / min(own, cohort),
        "user_s": user_s / cohort if own < cohort else own_s / min(own, cohort),
        "evaluation_s": timed(clients.evaluate, 1) / cohort,
        "others_s": others,
        "counts_of_users": [few, each],
        "counts": {name: count / ROUNDS for name, count in counts.items()},
    }
    meet()
    if federation.leads:
        found |= exchange_of(federation) | {"disk": disk_rate()}
    meet()
    return found | (wires(ranks) if ranks is not None else {})


def _federation(recipe: Recipe, materials: Materials, ranks: Ranks | None) -> Federation:
    if ranks is None:
        return build(recipe, materials)
    check_device(recipe, ranks.place)
    here = spans(len(materials.users), ranks.size, 1)[ranks.rank]
    return build_sharded(recipe, share_out(materials, here), ranks)


def _alone() -> None:
    """Nobody else is waited for."""


def several(materials: Materials, count: int) -> Materials:
    """So many users, each a copy of one of those that there are, by other names."""
    users = tuple(replace(materials.users[i % len(materials.users)], name=f"user {i}") for i in range(count))
    return materials.with_users(users)


def rounds_of(federation: Federation, each: int, size: int) -> tuple[float, float]:
    """Seconds of local steps, and of all else, of a round in which ``each`` users of every process take part."""
    clients = federation.clients
    here, first = len(clients.trainers), federation.server.version
    members = tuple(rank * here + i for rank in range(size) for i in range(each))
    endless = {"rounds": 10**6, "evaluate_every": 10**6, "evaluate_first": False, "checkpoint_every": 1}
    clients.training = replace(clients.training, participation=(members,), **endless)
    steps: list[float] = []
    marks: list[float] = []

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            steps.append(event["seconds"])

    def mark(done: int, clock: Clock) -> None:
        marks.append(time.perf_counter())
        if len(marks) == ROUNDS:
            raise _EnoughError

    with suppress(_EnoughError):
        run_rounds(federation, observe=observe, checkpoint=mark, first_round=first)
    spent = [after - before - own for (before, after), own in zip(pairwise(marks), steps[1:], strict=True)]
    return median(steps[1:]), max(0.0, median(spent))


class _EnoughError(Exception):
    """So many rounds will do."""


@contextmanager
def untrained() -> Iterator[None]:
    """Rounds without local steps meanwhile: messages, the server, and what processes tell each other."""

    def idle(clients: Clients, members: Sequence[int], *_: Any) -> LocalRound:
        return LocalRound(losses=dict.fromkeys(members, 1.0), rejected={}, tokens=0, seconds=0.0)

    trains, rounds.train = rounds.train, idle
    try:
        yield
    finally:
        rounds.train = trains


def about(federation: Federation) -> dict[str, Any]:
    """What messages and users are as large as, and whether the server needs sums alone."""
    clients, server = federation.clients, federation.server
    found: dict[str, Any] = {"adds": bool(server.adds and not getattr(federation, "ordered", False))}
    user = user_bytes(clients.state, clients.training.store)
    return found | {"shared": server.size, "state_bytes": user.record, "columns": clients.model.layout.columns}


def exchange_of(federation: Federation) -> dict[str, Any]:
    """Seconds that a user's messages take where it is, and its upload at a server that looks at it."""
    clients, server = federation.clients, federation.server
    if not clients.shares:
        return {"receive_s": 0.0, "send_s": 0.0, "sum_s": 0.0, "aggregate_s": 0.0, "common": True}
    members = list(range(len(clients.trainers)))
    names = [clients.names[member] for member in members]
    message = server.download(names) if not clients.method.server.peer_to_peer else None
    receive_s = 0.0 if message is None else timed(lambda: clients.receive(message), 3)
    said = {LOSS: torch.zeros(len(members))}
    send_s = timed(lambda: clients.upload(members, 1, said, counts=True), 3)
    upload = clients.upload(members, 1, said, counts=True)
    found = {"receive_s": receive_s, "send_s": send_s, "sum_s": 0.0, "aggregate_s": 0.0}
    if server.sums is None:
        found["aggregate_s"] = timed(lambda: server.aggregate(replace(upload, round=server.version)), 3)
    if server.adds:
        weights = dict.fromkeys(upload.tensors, torch.full((len(members),), 1 / len(members), dtype=torch.float64))

        def summed() -> None:
            largest = largest_terms(upload.tensors, weights)
            whole_sums(upload.tensors, weights, shifts_of(largest, len(members)))

        found["sum_s"] = timed(summed, 3) if clients.training.uploads == "float32" else send_s
    common = message is None or all(t.stride(0) == 0 or len(names) == 1 for t in message.tensors.values())
    return {key: value / len(members) for key, value in found.items()} | {"common": common}


def wires(ranks: Ranks) -> dict[str, float]:
    """Seconds of a small message that all wait for, and bytes a second of sums and copies."""
    numbers = torch.ones(_BUS_NUMBERS, dtype=torch.int64)
    hop = timed(lambda: [ranks.meet() for _ in range(_HOPS)], 3) / _HOPS
    summing = timed(lambda: ranks.total(numbers), 3)
    copying = timed(lambda: ranks.broadcast({"numbers": numbers}), 3)
    ring = 2 * (ranks.size - 1) / ranks.size * numbers.nbytes / summing
    return {"hop": hop / max(1, ranks.size - 1), "bus": min(ring, numbers.nbytes / copying)}


def disk_rate() -> float:
    """Bytes a second that are written here and outlive a power cut."""
    content = {"numbers": torch.zeros(_DISK_BYTES // 4)}
    with tempfile.TemporaryDirectory(dir=".", prefix=".comingle-disk-") as folder:
        return _DISK_BYTES / timed(lambda: write_tensors(Path(folder) / "numbers.safetensors", content), 3)


def timed(work: Callable[[], Any], times: int) -> float:
    """Seconds of it, the median."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what processes tell each other meanwhile."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _COUNTED}

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return originals[name](*args, **kwargs)

    try:
        for name in _COUNTED:
            setattr(dist, name, partial(counted, name))
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


if __name__ == "__main__":
    main()
