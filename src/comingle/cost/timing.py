"""Time of a round: measured parts, and formulas that scale them to other machines.

A round runs local work, the server's work, messages between processes, and disk access one after another:

    round = compute + server + network + disk

Work is measured in *core seconds*, so that it can be divided by another number of cores: half as many cores take twice
as long. This is exact for machines with more processes than cores, and a lower bound for processes with more threads
than the measured one.

    python -m comingle.cost.timing ORDER.json

is one of the measuring processes. Its participants are copies of the recipe's users under other names, as many as a
process of the planned machines would have. Its rounds are those of a run.
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
from comingle.runs.distributed import build_sharded, check_device, keep_users, spans
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

INTEGER_BYTES = 8
"""Bytes of a number in an integer sum (:mod:`comingle.training.backends.distributed`)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical machines.

    Args:
        machines: Number of machines.
        processes: Processes per machine.
        cores: Cores per machine, shared by its processes.
        gpus: Whether each process has a GPU. Cores are then not counted.
        threads: Threads per process, if the recipe sets them.
        link: Bandwidth between two machines, in bytes per second.
        latency: Latency between two machines, in seconds.
        disk: Write and read rate of a machine's disk, in bytes per second.
        price: Price of a machine per hour; None if unknown.
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
        """Number of processes on all machines."""
        return self.machines * self.processes

    @property
    def cores_each(self) -> float:
        """Cores per process; below 1 if there are more processes than cores."""
        return 1.0 if self.gpus else cores_of_process(self.cores, self.processes, self.threads)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Collective operations of all processes per round, by type."""

    gathers: float = 0.0
    broadcasts: float = 0.0
    reduces: float = 0.0
    sends: float = 0.0
    """Messages from or to each of the other processes, one after another."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Measured or given times of the parts of a round.

    Args:
        user: Core seconds of one user's local steps.
        handling: Core seconds for the messages that one user receives and sends.
        evaluation: Core seconds of an evaluation on one user's test data.
        upload: Core seconds of the server for one upload that it reads.
        words: Seconds per participant for data that processes exchange about it.
        fixed: Seconds of a round that do not depend on the number of participants.
        hop: Seconds of a small message between two processes of a machine.
        bus: Bandwidth between them, in bytes per second.
        steps: Collective operations per round.
    """

    user: float
    handling: float
    evaluation: float
    upload: float
    words: float
    fixed: float
    hop: float
    bus: float
    steps: Collectives


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """Amount of work in a run.

    Args:
        users: Size of the population.
        present: Participants per round.
        evaluated: Users in one evaluation.
        rounds: Number of rounds.
        evaluate_every: Rounds between evaluations.
        checkpoint_every: Rounds between checkpoints.
        upload_bytes: Bytes of one user's upload.
        download_bytes: Bytes of one user's download.
        state_bytes: Bytes of one user's tensors.
        shared: Numbers that are summed if the server needs sums alone.
        adds: Whether the server needs sums alone.
        common: Whether all users download the same tensors.
        on_disk: Whether users are stored on disk.
        exchanges: Fraction of the rounds that end with an exchange.
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
    """Mean seconds of a round; evaluations and checkpoints are spread over all rounds."""

    compute: float
    server: float
    network: float
    disk: float

    @property
    def seconds(self) -> float:
        """Sum of all parts, which run one after another."""
        return self.compute + self.server + self.network + self.disk

    @property
    def binds(self) -> str:
        """Name of the largest part."""
        return max(("compute", "server", "network", "disk"), key=lambda name: getattr(self, name))


# ---------------------------------------------------------------- equations


def cores_of_process(cores: int, processes: int, threads: int | None) -> float:
    """Return the cores per process: ``min(threads, cores / processes)``.

    Args:
        cores: Cores of the machine.
        processes: Processes on the machine.
        threads: Threads per process; None for ``max(1, cores // processes)``.
    """
    return min(threads or max(1, cores // processes), cores / processes)


def share(count: int, processes: int) -> int:
    """Return the number of users in the process that has most: ``ceil(count / processes)``."""
    return -(-count // processes)


def compute_seconds(load: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds of local work and evaluation, in the process that has most users.

    ``(n/P (user + exchanges handling) + m/P evaluation / every) / cores`` with n participants, m evaluated users and P
    processes.

    Args:
        load: Amount of work.
        parts: Measured times.
        cluster: The machines.
    """
    present, evaluated = share(load.present, cluster.size), share(load.evaluated, cluster.size)
    steps = present * (parts.user + load.exchanges * parts.handling)
    return (steps + evaluated * parts.evaluation / load.evaluate_every) / cluster.cores_each


def server_seconds(load: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds of the server, which runs in the first process.

    ``fixed + n words + n upload / cores`` with n participants. If sums are reduced between processes, the server reads
    no uploads and the last term is 0.

    Args:
        load: Amount of work.
        parts: Measured times.
        cluster: The machines.
    """
    distributed = cluster.size > 1
    read_seconds = 0.0 if distributed and load.adds else parts.upload / cluster.cores_each
    return parts.fixed + load.present * load.exchanges * (read_seconds + (parts.words if distributed else 0.0))


def ring_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """Return the seconds of a ring all-reduce: ``2 (P-1)/P bytes / rate`` (Patarasuk and Yuan 2009).

    Args:
        size_bytes: Bytes that are reduced.
        processes: Number of processes P.
        rate: Bandwidth of a link, in bytes per second.
    """
    return 2 * (processes - 1) / processes * size_bytes / rate


def tree_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """Return the seconds of a tree broadcast: ``ceil(log2 P) bytes / rate``.

    Args:
        size_bytes: Bytes that every process receives.
        processes: Number of processes P.
        rate: Bandwidth of a link, in bytes per second.
    """
    return math.ceil(math.log2(processes)) * size_bytes / rate


def one_end_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """Return the seconds of a gather or scatter through the link of one process: ``(1 - 1/P) bytes / rate``.

    Args:
        size_bytes: Bytes of all processes together.
        processes: Number of processes P.
        rate: Bandwidth of a link, in bytes per second.
    """
    return (1 - 1 / processes) * size_bytes / rate


def hops(steps: Collectives, processes: int) -> float:
    """Return the number of small messages per round that wait for each other.

    A gather takes ``P - 1``, a reduction ``2 (P - 1)`` and a broadcast ``ceil(log2 P)``.
    """
    others, depth = processes - 1, math.ceil(math.log2(processes))
    return (steps.gathers + steps.sends + 2 * steps.reduces) * others + steps.broadcasts * depth


def network_seconds(load: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds of an exchange between processes over the slowest link, and of all small messages.

    Args:
        load: Amount of work.
        parts: Measured times.
        cluster: The machines.
    """
    if cluster.size == 1:
        return 0.0
    P = cluster.size
    rate, hop = parts.bus, parts.hop
    if cluster.machines > 1:
        rate, hop = min(cluster.link, parts.bus), parts.hop + cluster.latency
    if load.adds:
        up = ring_seconds(INTEGER_BYTES * load.shared, P, rate)
    else:
        up = one_end_seconds(load.present * load.upload_bytes, P, rate)
    if load.common:
        down = tree_seconds(load.download_bytes, P, rate)
    else:
        down = one_end_seconds(load.present * load.download_bytes, P, rate)
    return load.exchanges * (up + down) + hops(parts.steps, P) * hop


def disk_seconds(load: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds of disk access that are not hidden by local steps.

    In memory, a machine writes checkpoints of its users: ``U/P p state / (every disk)`` with U users, P processes and p
    processes per machine. On disk, it reads and writes the records of n participants while others train:
    ``max(0, 2 n/P p state / disk - compute)``.

    Args:
        load: Amount of work.
        parts: Measured times.
        cluster: The machines.
    """
    # The users of a machine's processes share its disk; this is the time for one user of each process.
    seconds = cluster.processes * load.state_bytes / cluster.disk
    if not load.on_disk:
        return share(load.users, cluster.size) * seconds / load.checkpoint_every
    return max(0.0, 2 * share(load.present, cluster.size) * seconds - compute_seconds(load, parts, cluster))


def round_of(load: RunWork, parts: Parts, cluster: Cluster) -> Round:
    """Return the seconds of all parts of a round.

    Args:
        load: Amount of work.
        parts: Measured times.
        cluster: The machines.
    """
    return Round(
        compute=compute_seconds(load, parts, cluster),
        server=server_seconds(load, parts, cluster),
        network=network_seconds(load, parts, cluster),
        disk=disk_seconds(load, parts, cluster),
    )


def money(seconds: float, machines: int, price: float) -> float:
    """Return the price of a run: ``machines price hours``.

    Args:
        seconds: Seconds of the run.
        machines: Number of machines.
        price: Price of a machine per hour.
    """
    return machines * price * seconds / 3600


ROUNDS = 5
"""Number of measured rounds, the first of which warms up and is not counted."""

FEW = 4
"""In some rounds only ``1 / FEW`` of the users send, in others all; the difference is the time that users take."""

MAX_TRAINED, MAX_SENDING, MAX_STATE_BYTES = 128, 1024, 2**28
"""Limits per process: users that train together, users that send without training, and bytes of their tensors."""

_HOPS, _DISK_BYTES, _BUS_NUMBERS = 50, 2**25, 2**20
"""Sizes of measurements: barriers, bytes written to disk, and numbers that are reduced and broadcast."""
_COUNTED = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")
"""Operations of torch.distributed that are counted."""


def main() -> None:
    """Measure as one of several processes, or alone; the first process writes the result."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    place = find_place()
    torch.set_num_threads(order["threads"])
    with nullcontext() if place is None else joined(place) as ranks:
        try:
            result = measured(load_recipe(order["recipe"]), order["users"], ranks)
        except ComingleError as error:
            result = {"error": str(error)}
    if place is None or place.leads:
        Path(order["out"]).write_text(json.dumps(result), encoding="utf-8")


def measured(recipe: Recipe, own_users: int, ranks: Ranks | None) -> dict[str, object]:
    """Measure all parts of a round.

    Args:
        recipe: The recipe.
        own_users: Users per process.
        ranks: The processes; None for one process.

    Returns:
        Seconds, sizes and counts, for JSON (:class:`comingle.cost.machines.Measured`).
    """
    size = 1 if ranks is None else ranks.size
    run_data = prepare(recipe)
    one_user = build(recipe, copy_users(run_data, 1)).clients
    cohort, state = min(MAX_TRAINED, one_user.pass_size.users), user_bytes(one_user.state, MEMORY)
    sending = min(MAX_SENDING, MAX_STATE_BYTES // max(1, state.params + state.moments))
    per_process = max(own_users, cohort, sending)
    federation = _build_federation(recipe, copy_users(run_data, per_process * size), ranks)
    clients, meet = federation.clients, _no_barrier if ranks is None else ranks.barrier
    with counting() as counts:
        own_s, _ = rounds_of(federation, min(own_users, cohort), size)
    cohort_s = own_s if own_users >= cohort else rounds_of(federation, cohort, size)[0]
    fewer = max(1, per_process // FEW)
    with untrained():
        other_seconds = [rounds_of(federation, count, size)[1] for count in (fewer, per_process)]
    clients.scored = range(cohort)
    meet()
    times = describe_sizes(federation) | {
        "amounts": amounts_of(clients),
        "cohort": cohort,
        "own_user_s": own_s / min(own_users, cohort),
        "user_s": cohort_s / cohort if own_users < cohort else own_s / min(own_users, cohort),
        "evaluation_s": timed(clients.evaluate, 1) / cohort,
        "others_s": other_seconds,
        "counts_of_users": [fewer, per_process],
        "counts": {name: count / ROUNDS for name, count in counts.items()},
    }
    meet()
    if federation.leads:
        times |= time_exchange(federation) | {"disk": disk_rate()}
    meet()
    return times | (link_rates(ranks) if ranks is not None else {})


def _build_federation(recipe: Recipe, run_data: RunData, ranks: Ranks | None) -> InProcess:
    """Build the federation of a measurement: this process's shard of it, if there are several processes.

    Args:
        recipe: The recipe.
        run_data: Base and data, with the users of all processes.
        ranks: The processes; None for one process.
    """
    if ranks is None:
        return build(recipe, run_data)
    check_device(recipe, ranks.place)
    here = spans(len(run_data.users), ranks.size, 1)[ranks.rank]
    return build_sharded(recipe, keep_users(run_data, here), make(recipe.method.name, **recipe.method.settings), ranks)


def _no_barrier() -> None:
    """Return at once: a single process has no others to wait for."""


def copy_users(run_data: RunData, count: int) -> RunData:
    """Return ``count`` users that are copies of the given ones under other names."""
    users = run_data.users
    return run_data.with_users(replace(users[i % len(users)], name=f"user {i}") for i in range(count))


def rounds_of(federation: InProcess, members_each: int, size: int) -> tuple[float, float]:
    """Run :data:`ROUNDS` rounds and return the median seconds of local steps, and of everything else, in a round.

    Args:
        federation: The federation.
        members_each: Participants in every process.
        size: Number of processes.
    """
    clients = federation.clients
    num_users, first = len(clients.trainers), federation.server.version
    members = tuple(rank * num_users + i for rank in range(size) for i in range(members_each))
    # Evaluations and the end of the run, which are not measured, are later than the rounds that are run.
    plan = replace(clients.plan, participation=(members,)).updated("training", rounds=10**6)
    clients.plan = plan.updated("evaluation", every=10**6, first=False).updated("checkpoints", every=1)
    local_seconds: list[float] = []
    ends: list[float] = []  # times at which rounds ended

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            local_seconds.append(event["seconds"])

    def end_round(done: int, clock: Clock) -> None:
        """Note the time, and stop the run after the last measured round."""
        ends.append(time.perf_counter())
        if len(ends) == ROUNDS:
            raise _RoundsDoneError

    with suppress(_RoundsDoneError):
        run_rounds(federation, observe=observe, checkpoint=end_round, first_round=first)
    counted = local_seconds[1:]  # the first round warms up
    others = [after - before - own for (before, after), own in zip(pairwise(ends), counted, strict=True)]
    return median(counted), max(0.0, median(others))


class _RoundsDoneError(Exception):
    """Ends a run after :data:`ROUNDS` rounds."""


@contextmanager
def untrained() -> Iterator[None]:
    """Skip local steps, so that rounds consist of messages, the server's work and collective operations."""

    def skip_steps(clients: Clients, members: Sequence[int], *_: Any) -> LocalRound:
        """Return a round's result without training."""
        return LocalRound(losses=dict.fromkeys(members, 1.0), rejected={}, tokens=0, seconds=0.0)

    train, local.train = local.train, skip_steps
    try:
        yield
    finally:
        local.train = train


def describe_sizes(federation: InProcess) -> dict[str, object]:
    """Return the sizes of messages and users, and whether the server needs sums alone."""
    clients, server = federation.clients, federation.server
    sizes: dict[str, object] = {"adds": bool(server.needs_only_sums and not getattr(federation, "ordered", False))}
    user = user_bytes(clients.state, clients.plan.runtime.store)
    return sizes | {"shared": server.size, "state_bytes": user.record, "columns": clients.model.layout.columns}


def time_exchange(federation: InProcess) -> dict[str, object]:
    """Time the messages of this process's users, once each on the client and on the server.

    Returns:
        Seconds per user to receive a download (``receive_s``), to make an upload (``send_s``), to sum uploads before
        they are sent (``sum_s``) and to aggregate them on the server (``aggregate_s``); and ``common``, whether all
        users download the same tensors.
    """
    clients, server = federation.clients, federation.server
    if not clients.shares:
        return {"receive_s": 0.0, "send_s": 0.0, "sum_s": 0.0, "aggregate_s": 0.0, "common": True}
    members = list(range(len(clients.trainers)))
    names = [clients.names[member] for member in members]
    message = server.download(names) if not clients.method.server.peer_to_peer else None
    receive_s = 0.0 if message is None else timed(lambda: clients.receive(message), 3)
    losses = {LOSS: torch.zeros(len(members))}
    send_s = timed(lambda: clients.upload(members, 1, losses, counts=True), 3)
    upload = clients.upload(members, 1, losses, counts=True)
    times = {"receive_s": receive_s, "send_s": send_s, "sum_s": 0.0, "aggregate_s": 0.0}
    if server.sums is None:
        times["aggregate_s"] = timed(lambda: server.aggregate(replace(upload, round=server.version)), 3)
    if server.needs_only_sums:
        weights = dict.fromkeys(upload.tensors, torch.full((len(members),), 1 / len(members), dtype=torch.float64))

        def sum_uploads() -> None:
            """Sum the uploads of this process as integers, as several processes do before they exchange sums."""
            largest = largest_terms(upload.tensors, weights)
            whole_sums(upload.tensors, weights, shifts_of(largest, len(members)))

        times["sum_s"] = timed(sum_uploads, 3) if clients.plan.training.uploads == "float32" else send_s
    # Tensors that all users download are expanded along the users, without copies.
    common = message is None or all(t.stride(0) == 0 or len(names) == 1 for t in message.tensors.values())
    return {**{key: value / len(members) for key, value in times.items()}, "common": common}


def link_rates(ranks: Ranks) -> dict[str, float]:
    """Return the seconds of a barrier per hop, and the bandwidth of reductions and broadcasts in bytes per second."""
    numbers = torch.ones(_BUS_NUMBERS, dtype=torch.int64)
    barrier_seconds = timed(lambda: [ranks.barrier() for _ in range(_HOPS)], 3) / _HOPS
    sum_seconds = timed(lambda: ranks.total(numbers), 3)
    broadcast_seconds = timed(lambda: ranks.broadcast({"numbers": numbers}), 3)
    ring_rate = 2 * (ranks.size - 1) / ranks.size * numbers.nbytes / sum_seconds  # inverts `ring_seconds`
    return {
        "hop": barrier_seconds / max(1, ranks.size - 1),
        "bus": min(ring_rate, numbers.nbytes / broadcast_seconds),
    }


def disk_rate() -> float:
    """Return the rate of durable (synced) writes to the current directory, in bytes per second."""
    content = {"numbers": torch.zeros(_DISK_BYTES // 4)}
    with tempfile.TemporaryDirectory(dir=".", prefix=".comingle-disk-") as folder:
        return _DISK_BYTES / timed(lambda: write_tensors(Path(folder) / "numbers.safetensors", content), 3)


def timed(work: Callable[[], object], times: int) -> float:
    """Return the median seconds of ``times`` calls."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return median(durations)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the collective operations of torch.distributed within the block."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _COUNTED}

    def counted(name: str, *args: object, **kwargs: object) -> object:
        """Count a call of an operation and run it."""
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
