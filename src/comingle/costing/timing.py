"""How long a round takes on machines that are not here: arithmetic on measured parts.

A round is local work, what the server does by itself, messages between processes, and the disk, one after another:

    round = compute + server + network + disk

Work is kept in *core seconds*, so that it can be shared out over other cores than those on which it was measured: half
as many cores take twice as long, which is exact where a machine has more processes than cores, and the best that can be
hoped for where a process has more threads than the one that was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
