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
from comingle.methods.user_files import load_files_of_command
from comingle.protocol.messages import LOSS, Upload
from comingle.runs.distributed import build_sharded, divide_users, keep_users, select_gpu
from comingle.runs.session import build, prepare
from comingle.training.backends import local
from comingle.training.backends.distributed import choose_shifts, integer_sums, largest_terms
from comingle.training.backends.launched import find_place
from comingle.training.backends.local import InProcess
from comingle.training.backends.ranks import Ranks, joined
from comingle.training.checkpoints import Clock, write_tensors
from comingle.training.client import Clients, LocalRound
from comingle.training.evaluation import data_amounts
from comingle.training.kinds.base import RunData
from comingle.training.rounds import run_rounds
from comingle.training.settings import RunPlan
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
    def num_processes(self) -> int:
        """Number of processes on all machines."""
        return self.machines * self.processes

    @property
    def cores_per_process(self) -> float:
        """Cores per process; below 1 if there are more processes than cores."""
        if self.gpus:  # steps run on the GPU, so times of the process do not depend on its cores
            return 1.0
        return cores_of_process(self.cores, self.processes, self.threads)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Numbers of collective operations (torch.distributed) of all processes per round, by type."""

    gathers: float = 0.0
    broadcasts: float = 0.0
    reduces: float = 0.0
    sends: float = 0.0
    """Messages from or to each of the other processes, one after another."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Measured or given times of the parts of a round. A core second is one second of one core.

    Args:
        training_core_seconds: Core seconds of one user's local steps.
        message_core_seconds: Core seconds to make and to read the messages of one user.
        evaluation_core_seconds: Core seconds of an evaluation on one user's test data.
        aggregation_core_seconds: Core seconds of the server for one upload.
        report_seconds: Seconds per participant for the numbers about it, such as its loss, that processes send to each
            other.
        fixed_seconds: Seconds of a round that do not depend on the number of participants.
        hop_seconds: Seconds of a small message between two processes of a machine.
        bus_rate: Bandwidth between two processes of a machine, in bytes per second.
        collectives: Collective operations per round.
    """

    training_core_seconds: float
    message_core_seconds: float
    evaluation_core_seconds: float
    aggregation_core_seconds: float
    report_seconds: float
    fixed_seconds: float
    hop_seconds: float
    bus_rate: float
    collectives: Collectives


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """Amount of work in a run.

    Args:
        users: Size of the population.
        participants: Participants per round.
        evaluated_users: Users in one evaluation.
        rounds: Number of rounds.
        evaluate_every: Rounds between evaluations.
        checkpoint_every: Rounds between checkpoints.
        upload_bytes: Bytes of one user's upload.
        download_bytes: Bytes of one user's download.
        state_bytes: Bytes of one user's tensors.
        summed_numbers: Numbers that are summed if the server needs sums alone.
        needs_only_sums: Whether the server needs only sums of uploads, so that processes can reduce them.
        same_download: Whether all users download the same tensors.
        on_disk: Whether users are stored on disk.
        exchange_share: Fraction of the rounds that end with an exchange.
        trainings: Number of times that a participant trains per round: 2 if it is also trained alone.
    """

    users: int
    participants: int
    evaluated_users: int
    rounds: int
    evaluate_every: int
    checkpoint_every: int
    upload_bytes: float
    download_bytes: float
    state_bytes: float
    summed_numbers: int
    needs_only_sums: bool
    same_download: bool
    on_disk: bool = False
    exchange_share: float = 1.0
    trainings: int = 1


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
    def longest_part(self) -> str:
        """Name of the part that takes the most time, such as "network"."""
        return max(("compute", "server", "network", "disk"), key=lambda name: getattr(self, name))


# ---------------------------------------------------------------- equations


def cores_of_process(cores: int, processes: int, threads: int | None) -> float:
    """Return the cores that a process can use, at most its threads: 0.5 if 4 processes share 2 cores.

    Args:
        cores: Cores of the machine.
        processes: Processes on the machine.
        threads: Threads per process; None for ``max(1, cores // processes)``.
    """
    if not threads:
        threads = max(1, cores // processes)
    return min(threads, cores / processes)


def users_per_process(num_users: int, num_processes: int) -> int:
    """Return the number of users in the process that has the most: 4 if 3 processes share 10 users."""
    return -(-num_users // num_processes)  # rounded up


def compute_seconds(work: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the mean seconds per round of local steps, messages and evaluations, in the process with the most users.

    An evaluation of 10 seconds every 5 rounds counts as 2 seconds per round.

    Args:
        work: Amounts of work in the run.
        parts: Measured times of the parts of a round.
        cluster: Number and speed of the machines on which the run would train.
    """
    participants = users_per_process(work.participants, cluster.num_processes)
    evaluated_users = users_per_process(work.evaluated_users, cluster.num_processes)
    # `exchange_share` is the fraction of the rounds that end with an exchange of messages.
    training = work.trainings * parts.training_core_seconds + work.exchange_share * parts.message_core_seconds
    evaluation = evaluated_users * parts.evaluation_core_seconds / work.evaluate_every
    return (participants * training + evaluation) / cluster.cores_per_process


def server_seconds(work: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds per round of the server, which runs in the first process.

    Args:
        work: Amounts of work in the run.
        parts: Measured times of the parts of a round.
        cluster: Number and speed of the machines on which the run would train.
    """
    is_distributed = cluster.num_processes > 1
    aggregation_seconds = parts.aggregation_core_seconds / cluster.cores_per_process  # of one upload
    if is_distributed and work.needs_only_sums:
        aggregation_seconds = 0.0  # processes sum the uploads on the way to the server
    # Seconds in which processes send the numbers about one participant, such as its loss, to each other.
    report_seconds = parts.report_seconds if is_distributed else 0.0
    uploads_per_round = work.participants * work.exchange_share  # mean: half of them if every second round exchanges
    return parts.fixed_seconds + uploads_per_round * (aggregation_seconds + report_seconds)


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


def gather_seconds(size_bytes: float, processes: int, rate: float) -> float:
    """Return the seconds of a gather or scatter through the link of one process: ``(1 - 1/P) bytes / rate``.

    Args:
        size_bytes: Bytes of all processes together.
        processes: Number of processes P.
        rate: Bandwidth of a link, in bytes per second.
    """
    return (1 - 1 / processes) * size_bytes / rate


def num_hops(collectives: Collectives, processes: int) -> float:
    """Return the number of messages of a round that are sent one after another, so that their latencies add up.

    With P processes a gather takes ``P - 1`` such messages, as do messages to all others; a broadcast along a tree
    takes ``ceil(log2 P)``. A reduction takes ``2 (P - 1)``, also if only one process gets the result: Gloo reduces
    around a ring, which leaves a part of the result in each process, and gathers the parts.

    Args:
        collectives: Collective operations per round.
        processes: Number of processes P.
    """
    num_others = processes - 1
    tree_depth = math.ceil(math.log2(processes))
    operations_over_others = collectives.gathers + collectives.sends + 2 * collectives.reduces
    return operations_over_others * num_others + collectives.broadcasts * tree_depth


def network_seconds(work: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds per round of messages between processes: uploads, downloads and latencies.

    Uploads are reduced around a ring if the server needs only their sum, else gathered in the first process. The
    download is broadcast if it is the same for all users, else each process gets those of its users.

    Args:
        work: Amounts of work in the run.
        parts: Measured times of the parts of a round.
        cluster: Number and speed of the machines on which the run would train.
    """
    P = cluster.num_processes
    if P == 1:
        return 0.0
    rate, latency = parts.bus_rate, parts.hop_seconds  # between processes of one machine
    if cluster.machines > 1:  # messages also cross the network between machines
        rate = min(cluster.link, rate)
        latency = latency + cluster.latency
    if work.needs_only_sums:  # sums are of integers, which are exact in any order
        upload_seconds = ring_seconds(INTEGER_BYTES * work.summed_numbers, P, rate)
    else:
        upload_seconds = gather_seconds(work.participants * work.upload_bytes, P, rate)
    if work.same_download:
        download_seconds = tree_seconds(work.download_bytes, P, rate)
    else:
        download_seconds = gather_seconds(work.participants * work.download_bytes, P, rate)
    latency_seconds = num_hops(parts.collectives, P) * latency
    # `exchange_share` is the fraction of the rounds that end with an exchange.
    return work.exchange_share * (upload_seconds + download_seconds) + latency_seconds


def disk_seconds(work: RunWork, parts: Parts, cluster: Cluster) -> float:
    """Return the seconds per round in which local steps wait for the disk.

    If users are kept in memory, each machine writes its users to every checkpoint. If they are kept on disk, it reads
    and writes the participants while others train, so only the time beyond that of training counts.

    Args:
        work: Amounts of work in the run.
        parts: Measured times of the parts of a round.
        cluster: Number and speed of the machines on which the run would train.
    """
    # All processes of a machine write to its disk at the same time, so a user takes that many times as long.
    seconds_per_user = cluster.processes * work.state_bytes / cluster.disk
    if not work.on_disk:
        checkpoint_seconds = users_per_process(work.users, cluster.num_processes) * seconds_per_user
        return checkpoint_seconds / work.checkpoint_every
    read_and_write = 2
    access_seconds = read_and_write * users_per_process(work.participants, cluster.num_processes) * seconds_per_user
    return max(0.0, access_seconds - compute_seconds(work, parts, cluster))


def estimate_round(work: RunWork, parts: Parts, cluster: Cluster) -> Round:
    """Return the seconds of all parts of a round.

    Args:
        work: Amounts of work in the run.
        parts: Measured times of the parts of a round.
        cluster: Number and speed of the machines on which the run would train.
    """
    return Round(
        compute=compute_seconds(work, parts, cluster),
        server=server_seconds(work, parts, cluster),
        network=network_seconds(work, parts, cluster),
        disk=disk_seconds(work, parts, cluster),
    )


def run_price(seconds: float, machines: int, price: float) -> float:
    """Return the price of a run, in the currency of ``price``: ``machines * price * seconds / 3600``.

    Args:
        seconds: Seconds of the run.
        machines: Number of machines.
        price: Price of a machine per hour.
    """
    return machines * price * seconds / 3600


ROUNDS = 5
"""Number of measured rounds, the first of which warms up and is not counted."""

MANY_PER_FEW = 4
"""Ratio of the numbers of participants in two measurements of a round; their difference is the time of participants."""

MAX_TRAINED, MAX_SENDING, MAX_STATE_BYTES = 128, 1024, 2**28
"""Limits per process: users that train together, users that send without training, and bytes of their tensors."""

_NUM_BARRIERS, _DISK_BYTES, _BUS_NUMBERS = 50, 2**25, 2**20
"""Sizes of measurements: barriers, bytes written to disk, and numbers that are reduced and broadcast."""
_COUNTED = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")
"""Operations of torch.distributed that are counted."""


def main() -> None:
    """Measure the parts of a round, as one of several processes or alone, and write them to a JSON file.

    The only command-line argument is the path of a JSON request with the keys ``recipe`` (path), ``users``
    (participants per process), ``threads`` (per process) and ``out`` (path of the result, which the first process
    writes). The result of a failure is ``{"error": MESSAGE}``.
    """
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    place = find_place()  # None if there is one process
    torch.set_num_threads(request["threads"])
    group = nullcontext() if place is None else joined(place)
    with group as ranks:
        try:
            load_files_of_command()
            result = measure_parts(load_recipe(request["recipe"]), request["users"], ranks)
        except ComingleError as error:
            result = {"error": str(error)}
    if place is None or place.is_first_process:
        Path(request["out"]).write_text(json.dumps(result), encoding="utf-8")


def measure_parts(recipe: Recipe, own_users: int, ranks: Ranks | None) -> dict[str, object]:
    """Measure all parts of a round, in this process and in the other processes of ``ranks`` at the same time.

    Local steps are timed with ``own_users`` participants, and with a full cohort (as many users as train in one batch).
    Everything else is timed in rounds without local steps, with few and with many participants: if 10 take 3 s and 30
    take 5 s, each takes 0.1 s.

    Args:
        recipe: The recipe, with few local steps.
        own_users: Participants per process in the planned run.
        ranks: The group of processes; None for one process.

    Returns:
        Seconds, sizes and counts, for JSON: the keys of :class:`comingle.cost.machines.Measured`.
    """
    num_processes = 1 if ranks is None else ranks.size
    wait_for_others = _no_barrier if ranks is None else ranks.barrier
    run_data = prepare(recipe)
    one_user = build(recipe, copy_users(run_data, 1)).clients  # shows how large a user and a cohort are
    cohort_size = min(MAX_TRAINED, one_user.pass_size.users)
    tensor_bytes = user_bytes(one_user.state, MEMORY)
    # Build as many users as fit, since the messages of a few take too little time to measure.
    users_that_fit = MAX_STATE_BYTES // max(1, tensor_bytes.params + tensor_bytes.moments)
    built_users = max(own_users, cohort_size, min(MAX_SENDING, users_that_fit))
    federation = _build_federation(recipe, copy_users(run_data, built_users * num_processes), ranks)
    clients = federation.clients
    trained_users = min(own_users, cohort_size)
    with count_collectives() as collective_counts:
        training_seconds, _other_seconds = time_rounds(federation, trained_users, num_processes)
    planned_batch_user_seconds = full_batch_user_seconds = training_seconds / trained_users
    if own_users < cohort_size:  # a full cohort takes less time per user
        training_seconds, _other_seconds = time_rounds(federation, cohort_size, num_processes)
        full_batch_user_seconds = training_seconds / cohort_size
    few_users = max(1, built_users // MANY_PER_FEW)
    with skip_local_steps():
        _no_seconds, seconds_with_few = time_rounds(federation, few_users, num_processes)
        _no_seconds, seconds_with_many = time_rounds(federation, built_users, num_processes)
    clients.scored = range(cohort_size)  # indices of the users that `clients.evaluate` evaluates
    wait_for_others()
    measured: dict[str, object] = {
        **describe_messages(federation),
        "amounts": data_amounts(clients),
        "cohort": cohort_size,
        "planned_batch_user_s": planned_batch_user_seconds,
        "full_batch_user_s": full_batch_user_seconds,
        "evaluation_s": median_seconds(clients.evaluate, times=1) / cohort_size,
        "other_work_s": [seconds_with_few, seconds_with_many],
        "other_work_users": [few_users, built_users],
        "collectives": {name: count / ROUNDS for name, count in collective_counts.items()},
    }
    wait_for_others()
    if federation.is_first_process:
        measured.update(time_exchange(federation))
        measured["disk"] = measure_disk_rate()
    wait_for_others()
    if ranks is not None:
        measured.update(measure_links(ranks))
    return measured


def _build_federation(recipe: Recipe, run_data: RunData, ranks: Ranks | None) -> InProcess:
    """Build the federation of a measurement; in one of several processes, the part with this process's users.

    Args:
        recipe: Settings of the run.
        run_data: Base and data, with equally many users for each process.
        ranks: The processes; None for one process.
    """
    if ranks is None:
        return build(recipe, run_data)
    select_gpu(recipe, ranks.place)
    users_by_rank = divide_users(len(run_data.users), ranks.size, cohort_size=1)  # 1: undivided cohorts may be unequal
    own_users = users_by_rank[ranks.rank]
    method = make(recipe.method.name, **recipe.method.settings)
    return build_sharded(recipe, keep_users(run_data, own_users), method, ranks)


def _no_barrier() -> None:
    """Return at once: a single process has no others to wait for."""


def copy_users(run_data: RunData, count: int) -> RunData:
    """Return the data with ``count`` users named "user 0", "user 1" and so on, copies of the given users in turn.

    Timing thus depends on how many users are planned rather than on how many have data.
    """
    users = run_data.users
    copies = (replace(users[i % len(users)], name=f"user {i}") for i in range(count))
    return run_data.with_users(copies)


def time_rounds(federation: InProcess, participants_each: int, num_processes: int) -> tuple[float, float]:
    """Run :data:`ROUNDS` rounds and return the median seconds of local steps, and of everything else, in a round.

    Changes the plan of ``federation.clients``: the first ``participants_each`` users of each process take part in every
    round, and no evaluation takes place.

    Args:
        federation: The federation; in one of several processes, this process's part of it.
        participants_each: Participants in every process.
        num_processes: Number of processes.
    """
    clients = federation.clients
    first_round = federation.server.version
    users_each = len(clients.trainers)
    participants: list[int] = []
    for rank in range(num_processes):
        first_user = rank * users_each  # users are numbered process by process
        participants += range(first_user, first_user + participants_each)
    clients.plan = _plan_of_timed_rounds(clients.plan, participants)
    local_seconds: list[float] = []
    end_times: list[float] = []

    def note_local_seconds(event: dict[str, Any]) -> None:
        """Note the seconds of a round's local steps, which the event "round" has."""
        if event["event"] == "round":
            local_seconds.append(event["seconds"])

    def end_round(done: int, clock: Clock) -> None:
        """Note the time, and stop the run after the last measured round."""
        end_times.append(time.perf_counter())
        if len(end_times) == ROUNDS:
            raise _RoundsDoneError

    with suppress(_RoundsDoneError):
        run_rounds(federation, observe=note_local_seconds, checkpoint=end_round, first_round=first_round)
    # The first round warms up; its end is the start of the second.
    counted_seconds = local_seconds[1:]
    round_seconds = [end - start for start, end in pairwise(end_times)]
    other_seconds = [whole - local for whole, local in zip(round_seconds, counted_seconds, strict=True)]
    # Local seconds are those of the slowest process, so the difference may be a little below 0.
    return median(counted_seconds), max(0.0, median(other_seconds))


def _plan_of_timed_rounds(plan: RunPlan, participants: Sequence[int]) -> RunPlan:
    """Return a plan of many rounds with the same participants, a checkpoint after each, and no evaluation.

    A run with this plan calls its function for checkpoints after each round. The function may stop the run.

    Args:
        plan: Plan of the recipe's run.
        participants: Indices of the users that take part in every round.
    """
    never = 10**6  # a later round than any that is run
    plan = replace(plan, participation=(tuple(participants),))
    plan = plan.updated("training", rounds=never)
    plan = plan.updated("evaluation", every=never, first=False)
    return plan.updated("checkpoints", every=1)


class _RoundsDoneError(Exception):
    """Ends a run after :data:`ROUNDS` rounds."""


@contextmanager
def skip_local_steps() -> Iterator[None]:
    """Skip local steps within the block, so that rounds consist of messages, the server's work and collectives.

    Replaces the function ``comingle.training.backends.local.train`` until the end of the block.
    """

    def skip_steps(clients: Clients, members: Sequence[int], *_: object) -> LocalRound:
        """Return a round's result without training, as if every participant had a loss of 1."""
        losses = dict.fromkeys(members, 1.0)
        return LocalRound(losses=losses, rejected={}, steps={}, tokens=0, seconds=0.0)

    original_train = local.train
    local.train = skip_steps
    try:
        yield
    finally:
        local.train = original_train


def describe_messages(federation: InProcess) -> dict[str, object]:
    """Return the properties of a federation on which the time of messages and of disk access depends, for JSON.

    Keys are ``needs_only_sums`` (whether processes sum uploads on the way to the server), ``summed_numbers`` (numbers
    in such a sum), ``state_bytes`` (bytes of a user on disk) and ``columns`` (entries of a user's model).
    """
    clients, server = federation.clients, federation.server
    # With `runtime.shard_sums: ordered` the server gets every upload, to sum them in the order of the users.
    sums_in_order = getattr(federation, "ordered", False)
    return {
        "needs_only_sums": bool(server.needs_only_sums and not sums_in_order),
        "summed_numbers": server.size,
        "state_bytes": user_bytes(clients.state, clients.plan.runtime.store).record,
        "columns": clients.model.layout.columns,
    }


def time_exchange(federation: InProcess) -> dict[str, object]:
    """Time the messages of one exchange of this process's users, on the client and on the server.

    Returns:
        Seconds per user to receive a download (``receive_s``), to make an upload (``send_s``), to sum uploads before
        processes send the sums (``sum_s``) and to aggregate uploads on the server (``aggregate_s``); 0 for what the
        method does not do. Also ``same_download``, whether all users download the same tensors.
    """
    clients, server = federation.clients, federation.server
    seconds = {"receive_s": 0.0, "send_s": 0.0, "sum_s": 0.0, "aggregate_s": 0.0}
    if not clients.shares:
        return {**seconds, "same_download": True}
    num_users = len(clients.trainers)
    members = list(range(num_users))
    same_download = True
    has_server = not clients.method.server.peer_to_peer  # peers download from each other
    if has_server:
        download = server.download([clients.names[member] for member in members])
        seconds["receive_s"] = median_seconds(lambda: clients.receive(download))
        # Tensors that all users share are expanded along the users, without copies, so their first stride is 0.
        same_download = num_users == 1 or all(t.stride(0) == 0 for t in download.tensors.values())
    losses = {LOSS: torch.zeros(num_users)}

    def make_upload() -> Upload:
        """Make an upload of all users in round 1, with losses of 0."""
        return clients.upload(members, 1, losses, counts=True)

    seconds["send_s"] = median_seconds(make_upload)
    upload = make_upload()
    has_secure_sum = server.sums is not None  # then the server has no plain uploads to aggregate
    if not has_secure_sum:

        def aggregate() -> None:
            """Aggregate the upload. It has the number of the server's current round, which therefore stays the same."""
            server.aggregate(replace(upload, round=server.version))

        seconds["aggregate_s"] = median_seconds(aggregate)
    if server.needs_only_sums:
        if clients.plan.training.uploads == "float32":
            seconds["sum_s"] = _seconds_of_sums(upload)
        else:  # another number format: assume that sums take as long as making the uploads
            seconds["sum_s"] = seconds["send_s"]
    seconds_per_user = {key: value / num_users for key, value in seconds.items()}
    return {**seconds_per_user, "same_download": same_download}


def _seconds_of_sums(upload: Upload) -> float:
    """Return the seconds in which a process sums the uploads of its users, before processes send each other the sums.

    Args:
        upload: Uploads of the users, joined in tensors ``(users, *shape)``.
    """
    num_users = len(upload.users)
    weights = dict.fromkeys(upload.tensors, torch.full((num_users,), 1 / num_users, dtype=torch.float64))

    def sum_uploads() -> None:
        """Sum the uploads as integers, as a run does, so that the order of the terms does not matter."""
        largest = largest_terms(upload.tensors, weights)
        integer_sums(upload.tensors, weights, choose_shifts(largest, num_users))

    return median_seconds(sum_uploads)


def measure_links(ranks: Ranks) -> dict[str, float]:
    """Measure latency and bandwidth between the processes.

    Latency is that of a barrier, which takes ``P - 1`` small messages with P processes. Bandwidth is the lower one of a
    sum around a ring, in which each process sends ``2 (P - 1) / P`` of the bytes, and of a broadcast.

    Returns:
        ``hop``: seconds of a small message; ``bus``: bandwidth in bytes per second.
    """
    P = ranks.size
    numbers = torch.ones(_BUS_NUMBERS, dtype=torch.int64)

    def run_barriers() -> None:
        """Run barriers one after another."""
        for _ in range(_NUM_BARRIERS):
            ranks.barrier()

    barrier_seconds = median_seconds(run_barriers) / _NUM_BARRIERS
    sum_seconds = median_seconds(lambda: ranks.reduce_sum(numbers))
    broadcast_seconds = median_seconds(lambda: ranks.broadcast({"numbers": numbers}))
    sum_rate = 2 * (P - 1) / P * numbers.nbytes / sum_seconds
    broadcast_rate = numbers.nbytes / broadcast_seconds
    return {"hop": barrier_seconds / max(1, P - 1), "bus": min(sum_rate, broadcast_rate)}


def measure_disk_rate() -> float:
    """Return the rate of durable (synced) writes to the current directory, in bytes per second."""
    float32_bytes = 4
    content = {"numbers": torch.zeros(_DISK_BYTES // float32_bytes)}
    with tempfile.TemporaryDirectory(dir=".", prefix=".comingle-disk-") as folder:
        file = Path(folder) / "numbers.safetensors"
        return _DISK_BYTES / median_seconds(lambda: write_tensors(file, content))


def median_seconds(work: Callable[[], object], times: int = 3) -> float:
    """Call ``work`` a number of times and return the median of the seconds that a call takes."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return median(durations)


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Count the calls of torch.distributed's collective operations within the block, by name.

    Replaces the operations in ``torch.distributed`` until the end of the block.
    """
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _COUNTED}

    def count_and_call(name: str, *args: object, **kwargs: object) -> object:
        """Count a call of an operation and run it."""
        counts[name] += 1
        return originals[name](*args, **kwargs)

    try:
        for name in _COUNTED:
            setattr(dist, name, partial(count_and_call, name))
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


if __name__ == "__main__":
    main()
