"""The time of a round: measured parts, and arithmetic on them.

A round is local work, what the server does by itself, messages between processes, and the disk, one after another:

    round = compute + server + network + disk

Work is kept in *core seconds*, so that it can be shared out over other cores than those on which it was measured: half
as many cores take twice as long, which is exact where a machine has more processes than cores, and the best that can be
hoped for where a process has more threads than the one that was measured.

    python -m comingle.cost.timing ORDER.json

is one of those processes. What takes part are copies of the recipe's users, under other names, so that there are as
many as a process would have; its rounds are those of a run.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from comingle.config import Recipe, load_recipe
from comingle.config.settings import MEMORY
from comingle.cost.memory import user_bytes
from comingle.methods import make
from comingle.protocol.messages import LOSS
from comingle.runs.distributed import build_sharded, check_device, share_out, spans
from comingle.runs.session import build, prepare
from comingle.training.backends import local
from comingle.training.backends.distributed import largest_terms, shifts_of, whole_sums
from comingle.training.backends.launched import find_place
from comingle.training.backends.local import InProcess
from comingle.training.backends.ranks import Ranks, joined
from comingle.training.checkpoints import Clock, write_tensors
from comingle.training.client import Clients, LocalRound
from comingle.training.evaluation import amounts_of
from comingle.training.kinds.base import RunData
from comingle.training.rounds import run_rounds
from comingle.utils.errors import ComingleError

WHOLE = 8
"""Bytes of a number in a sum of whole numbers (:mod:`comingle.training.backends.distributed`)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines that are alike.

    ``cores`` are those of a machine, for its ``processes`` together; with ``gpus`` each process has a GPU and cores are
    not counted. ``threads`` are a process's, if the recipe says so. ``link`` and ``latency`` are those between two
    machines, ``disk`` is what a machine writes and reads; both in bytes a second. ``price`` is of a machine an hour.
    """

    machines: int
    processes: int = 1
    cores: int = 1
    gpus: bool = False
    threads: int | None = None
    link: float
    latency: float
    disk: float
    price: float | None = None

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.machines * self.processes

    @property
    def cores_each(self) -> float:
        """Cores that work for a process; below 1 where there are more processes than cores."""
        return 1.0 if self.gpus else cores_of_process(self.cores, self.processes, self.threads)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How often all processes of a round tell each other something, by how they do it."""

    gathers: float = 0.0
    broadcasts: float = 0.0
    reduces: float = 0.0
    sends: float = 0.0
    """From or to each of the others, one after another."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What was measured, or given.

    Core seconds of one user: ``user`` its local steps, ``handling`` what it receives and sends, ``evaluation`` its test
    data. Of the server: ``upload`` core seconds for an upload that it looks at, ``words`` seconds for a participant
    of whom several processes tell each other, ``fixed`` seconds of a round whoever takes part. ``hop`` is how long a
    small message between two processes of a machine takes, in seconds, ``bus`` how many bytes a second they send.
    """

    user: float
    handling: float
    evaluation: float
    upload: float
    words: float
    fixed: float
    hop: float
    bus: float
    steps: Steps


@dataclass(frozen=True, kw_only=True)
class Load:
    """What there is to do: ``users`` in all, of whom ``present`` take part in a round and ``evaluated`` are scored.

    Bytes of messages and of a user's tensors (``state_bytes``). ``shared`` numbers are summed where the server needs
    sums alone (``adds``); ``common`` says whether everybody downloads the same. ``evaluate_every`` and
    ``checkpoint_every`` are rounds; of them ``exchanges`` (0 to 1) end with messages.
    """

    users: int
    present: int
    evaluated: int
    rounds: int
    evaluate_every: int
    checkpoint_every: int
    upload_bytes: float
    download_bytes: float
    state_bytes: float
    shared: int
    adds: bool
    common: bool
    on_disk: bool = False
    exchanges: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of a round in the mean, evaluations and checkpoints spread over all rounds."""

    compute: float
    server: float
    network: float
    disk: float

    @property
    def seconds(self) -> float:
        """All of them: one waits for the other."""
        return self.compute + self.server + self.network + self.disk

    @property
    def binds(self) -> str:
        """Which of them is the largest."""
        return max(("compute", "server", "network", "disk"), key=lambda name: getattr(self, name))


# ---------------------------------------------------------------- equations


def cores_of_process(cores: int, processes: int, threads: int | None) -> float:
    """``min(threads, cores / processes)``; without ``threads`` a process takes ``max(1, cores // processes)``."""
    return min(threads or max(1, cores // processes), cores / processes)


def share(count: int, processes: int) -> int:
    """Of so many users, those of the process that has most: ``ceil(count / processes)``."""
    return -(-count // processes)


def compute_seconds(load: Load, parts: Parts, cluster: Cluster) -> float:
    """``(n/P (user + handling) + m/P evaluation / every) / cores``, of the process that has most."""
    present, evaluated = share(load.present, cluster.size), share(load.evaluated, cluster.size)
    steps = present * (parts.user + load.exchanges * parts.handling)
    return (steps + evaluated * parts.evaluation / load.evaluate_every) / cluster.cores_each


def server_seconds(load: Load, parts: Parts, cluster: Cluster) -> float:
    """``fixed + n words + n upload / cores`` of the first process; where sums are made on the way it sees no upload."""
    several = cluster.size > 1
    looks = 0.0 if several and load.adds else parts.upload / cluster.cores_each
    return parts.fixed + load.present * load.exchanges * (looks + (parts.words if several else 0.0))


def ring_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """A reduction around a ring: ``2 (P-1)/P bytes / rate`` (Patarasuk and Yuan 2009)."""
    return 2 * (processes - 1) / processes * size_bytes / rate


def tree_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """The same bytes to everybody: ``ceil(log2 P) bytes / rate``."""
    return math.ceil(math.log2(processes)) * size_bytes / rate


def one_end_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """All to one, or one to all, each something else: ``(1 - 1/P) bytes / rate`` through the one's link."""
    return (1 - 1 / processes) * size_bytes / rate


def hops(steps: Steps, processes: int) -> float:
    """How many small messages wait for each other in a round: a gathering takes ``P-1``, a broadcast ``log2 P``."""
    others, depth = processes - 1, math.ceil(math.log2(processes))
    return (steps.gathers + steps.sends + 2 * steps.reduces) * others + steps.broadcasts * depth


def network_seconds(load: Load, parts: Parts, cluster: Cluster) -> float:
    """Messages of an exchange between processes, by the slowest link on the way, and the hops of all small ones."""
    if cluster.size == 1:
        return 0.0
    far, P = cluster.machines > 1, cluster.size
    rate, hop = (min(cluster.link, parts.bus), parts.hop + cluster.latency) if far else (parts.bus, parts.hop)
    if load.adds:
        up = ring_seconds(WHOLE * load.shared, P, rate)
    else:
        up = one_end_seconds(load.present * load.upload_bytes, P, rate)
    if load.common:
        down = tree_seconds(load.download_bytes, P, rate)
    else:
        down = one_end_seconds(load.present * load.download_bytes, P, rate)
    return load.exchanges * (up + down) + hops(parts.steps, P) * hop


def disk_seconds(load: Load, parts: Parts, cluster: Cluster) -> float:
    """What a machine writes: checkpoints of its users, or the records of who takes part as far as steps do not hide it.

    ``U/P p state / (every disk)``, p processes a machine; from disk ``max(0, 2 n/P p state / disk - compute)``.
    """
    here = cluster.processes * load.state_bytes / cluster.disk
    if not load.on_disk:
        return share(load.users, cluster.size) * here / load.checkpoint_every
    return max(0.0, 2 * share(load.present, cluster.size) * here - compute_seconds(load, parts, cluster))


def round_of(load: Load, parts: Parts, cluster: Cluster) -> Round:
    """All of it."""
    return Round(
        compute=compute_seconds(load, parts, cluster),
        server=server_seconds(load, parts, cluster),
        network=network_seconds(load, parts, cluster),
        disk=disk_seconds(load, parts, cluster),
    )


def money(seconds: float, machines: int, price: float) -> float:
    """``machines price hours``."""
    return machines * price * seconds / 3600


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


def measured(recipe: Recipe, own: int, ranks: Ranks | None) -> dict[str, object]:
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


def _federation(recipe: Recipe, materials: RunData, ranks: Ranks | None) -> InProcess:
    if ranks is None:
        return build(recipe, materials)
    check_device(recipe, ranks.place)
    here = spans(len(materials.users), ranks.size, 1)[ranks.rank]
    return build_sharded(recipe, share_out(materials, here), make(recipe.method.name, **recipe.method.settings), ranks)


def _alone() -> None:
    """Nobody else is waited for."""


def several(materials: RunData, count: int) -> RunData:
    """So many users, each a copy of one of those that there are, by other names."""
    users = tuple(replace(materials.users[i % len(materials.users)], name=f"user {i}") for i in range(count))
    return materials.with_users(users)


def rounds_of(federation: InProcess, each: int, size: int) -> tuple[float, float]:
    """Seconds of local steps, and of all else, of a round in which ``each`` users of every process take part."""
    clients = federation.clients
    here, first = len(clients.trainers), federation.server.version
    members = tuple(rank * here + i for rank in range(size) for i in range(each))
    plan = replace(clients.plan, participation=(members,)).updated("training", rounds=10**6)
    clients.plan = plan.updated("evaluation", every=10**6, first=False).updated("checkpoints", every=1)
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

    trains, local.train = local.train, idle
    try:
        yield
    finally:
        local.train = trains


def about(federation: InProcess) -> dict[str, object]:
    """What messages and users are as large as, and whether the server needs sums alone."""
    clients, server = federation.clients, federation.server
    found: dict[str, object] = {"adds": bool(server.adds and not getattr(federation, "ordered", False))}
    user = user_bytes(clients.state, clients.plan.runtime.store)
    return found | {"shared": server.size, "state_bytes": user.record, "columns": clients.model.layout.columns}


def exchange_of(federation: InProcess) -> dict[str, object]:
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

        found["sum_s"] = timed(summed, 3) if clients.plan.training.uploads == "float32" else send_s
    common = message is None or all(t.stride(0) == 0 or len(names) == 1 for t in message.tensors.values())
    return {**{key: value / len(members) for key, value in found.items()}, "common": common}


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


def timed(work: Callable[[], object], times: int) -> float:
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

    def counted(name: str, *args: object, **kwargs: object) -> object:
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
