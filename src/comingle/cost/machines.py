"""Seconds and money of a round and of a run on given machines, for populations of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TypedDict

import torch

from comingle.config import Recipe
from comingle.config.settings import AUTO, MEMORY
from comingle.cost.planning import Participation, largest_round, with_method
from comingle.cost.records import MethodCost, Plan
from comingle.cost.timing import (
    Cluster,
    Collectives,
    Parts,
    Round,
    RunWork,
    cores_of_process,
    estimate_round,
    num_hops,
    run_price,
    users_per_process,
)
from comingle.methods import make
from comingle.runs.distributed import cores
from comingle.runs.guard import is_guarded
from comingle.training.backends.launched import MEETING
from comingle.training.evaluation import evaluation_interval, warn_of_share
from comingle.training.kinds.base import kind_of
from comingle.training.plan import test_limit_of
from comingle.training.settings import RunPlan
from comingle.utils.errors import RecipeError

NO_SETTINGS: Mapping[str, object] = MappingProxyType({})
"""Default for settings that all methods get: none."""

POPULATIONS = (10**4, 10**6, 10**8)
"""Numbers of users for which times are planned by default."""

MAX_STEPS = 10
"""Most local steps that are measured per user. The time of a round with more steps is extrapolated linearly."""

MAX_PROCESSES = 4
"""Most processes that are started for a measurement, unless this machine has more cores."""

_TIMEOUT_SECONDS = 3600
"""Largest time that a measurement may take."""


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """Estimated time and price of a run with ``users`` users and ``present`` participants per round."""

    users: int
    present: int
    round: Round
    run_seconds: float
    state_bytes: float
    """Bytes of the tensors of one machine's users."""
    money: float | None

    def as_dict(self) -> dict[str, object]:
        """Return a dictionary for JSON: the fields, the seconds of a round and of its parts, and the longest part.

        ``present`` is the number of participants per round, ``money`` the price, and ``binds`` the name of the part
        that takes the most time.
        """
        return {
            "users": self.users,
            "present": self.present,
            "run_seconds": self.run_seconds,
            "state_bytes": self.state_bytes,
            "money": self.money,
            "round_seconds": self.round.seconds,
            "compute_seconds": self.round.compute,
            "server_seconds": self.round.server,
            "network_seconds": self.round.network,
            "disk_seconds": self.round.disk,
            "binds": self.round.longest_part,
        }


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of a recipe, with the sizes of its users' tensors."""

    parts: Parts
    """Parts for processes with at least ``cohort`` participants each, which are trained in one batch."""
    parts_below_cohort: Parts
    """Parts for processes with as many participants as the recipe has, which may be fewer than ``cohort``."""
    cohort: int
    """Users that are trained in one batch."""
    needs_only_sums: bool
    """Whether the server needs sums alone."""
    same_download: bool
    """Whether all users download the same tensors."""
    summed_numbers: int
    """Numbers that are summed if the server needs sums alone."""
    state_bytes: int
    """Bytes of one user's tensors."""
    disk: float
    """Write rate of this machine's disk, in bytes per second."""
    amounts: tuple[int, int, int]
    """Number of trainers, tokens or samples that they train on per round, and that one evaluation scores."""


def measure(
    recipe: Recipe, cluster: Cluster, participants: int, given_user_seconds: float | None = None
) -> Measurement:
    """Measure the parts of a round on this machine, in rounds of copies of the recipe's users.

    Rounds run in as many processes as a machine of the cluster has, but in no more than this machine has cores (or
    :data:`MAX_PROCESSES`, if that is more). If the cluster has several processes, at least 2 are started, as messages
    between them are measured, too.

    Args:
        recipe: The recipe to measure.
        cluster: The machines to plan for.
        participants: Participants per round.
        given_user_seconds: Seconds that the local steps of one user take in a process of the cluster, if the user gives
            them (``--step``); None measures them here.

    Raises:
        RecipeError: A setting has a value for each user, which copies of users do not have.
        ComingleError: A run of the recipe would fail with the same message.
    """
    _check_single_values(recipe)
    num_cores = cores()
    num_processes = 1
    if cluster.num_processes > 1:
        most_here = max(num_cores, MAX_PROCESSES)
        num_processes = min(cluster.processes, most_here)
        num_processes = max(2, num_processes)  # to measure messages
    threads = recipe.runtime.threads or max(1, num_cores // num_processes)
    given_core_seconds, max_steps = None, MAX_STEPS
    if given_user_seconds is not None:
        given_core_seconds = given_user_seconds * cluster.cores_per_process
        max_steps = 1  # the measured seconds of local steps are not used
    short_recipe, steps_ratio = _shorten(recipe, max_steps)
    participants_each = users_per_process(participants, cluster.num_processes)
    times = _measure_in_processes(short_recipe, num_processes, threads, participants_each)
    cores_each = 1.0 if cluster.gpus else cores_of_process(num_cores, num_processes, threads)
    return _to_measurement(
        times,
        num_processes,
        cores_each=cores_each,
        steps_ratio=steps_ratio,
        given_core_seconds=given_core_seconds,
    )


class _MessageSeconds(TypedDict):
    receive_s: float
    send_s: float
    sum_s: float
    aggregate_s: float


class _Measured(_MessageSeconds):
    needs_only_sums: bool
    same_download: bool
    summed_numbers: int
    state_bytes: int
    disk: float
    amounts: tuple[int, int, int]
    cohort: int
    planned_batch_user_s: float
    full_batch_user_s: float
    evaluation_s: float
    other_work_s: tuple[float, float]
    other_work_users: tuple[int, int]
    collectives: Mapping[str, float]


class Measured(_Measured, total=False):
    """Seconds and sizes from :func:`comingle.cost.timing.measure_parts`.

    ``cohort`` is the largest number of users that are trained in one batch. These keys are seconds per user::

        full_batch_user_s      local steps, in a batch of ``cohort`` users
        planned_batch_user_s   local steps, in a batch of the planned participants, which may be fewer than ``cohort``
        evaluation_s           evaluation

    Rounds without local steps are measured with few and with many participants::

        other_work_s        seconds of a round with few, and with many
        other_work_users    participants per process: few, and many

    ``collectives`` are calls of torch.distributed per round. Only several processes have ``hop`` (seconds of a small
    message between two of them) and ``bus`` (bandwidth in bytes per second).
    """

    hop: float
    bus: float
    error: str


_OPERATIONS = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")
"""Functions of torch.distributed whose calls are counted."""


def _to_measurement(
    times: Measured, num_processes: int, cores_each: float, steps_ratio: float, given_core_seconds: float | None
) -> Measurement:
    """Return the measured parts of a round, from which the time of a round on other machines is computed.

    Work that is faster with more cores is converted to core seconds: seconds times ``cores_each``.

    Args:
        times: Seconds, sizes and counts from the processes that measured; :class:`Measured` describes the keys.
        num_processes: Number of these processes.
        cores_each: Cores per process.
        steps_ratio: Local steps of the recipe per step that was measured.
        given_core_seconds: Core seconds of the local steps of one user, if they were given; None for the measured ones.
    """
    is_distributed = num_processes > 1
    collectives = _count_by_type(times["collectives"], num_processes)
    message_seconds = times["receive_s"] + times["send_s"]
    if is_distributed:
        message_seconds = message_seconds + times["sum_s"]  # of uploads, before processes send the sums
    hop_seconds = times.get("hop", 0.0)
    latency_seconds = num_hops(collectives, num_processes) * hop_seconds if is_distributed else 0.0
    fixed_seconds, report_seconds = _fit_other_work(times, num_processes, message_seconds, latency_seconds)

    def training_core_seconds(measured_seconds: float) -> float:
        """Return the core seconds of one user's local steps in the planned run, from measured or given ones."""
        if given_core_seconds is not None:
            return given_core_seconds
        return steps_ratio * measured_seconds * cores_each

    parts = Parts(
        training_core_seconds=training_core_seconds(times["full_batch_user_s"]),
        message_core_seconds=message_seconds * cores_each,
        evaluation_core_seconds=times["evaluation_s"] * cores_each,
        aggregation_core_seconds=times["aggregate_s"] * cores_each,
        report_seconds=report_seconds,
        fixed_seconds=fixed_seconds,
        hop_seconds=hop_seconds,
        bus_rate=times.get("bus", float("inf")),  # a single process has no connections
        collectives=collectives,
    )
    # A batch with fewer than `cohort` users takes longer per user.
    smaller_batch_core_seconds = training_core_seconds(times["planned_batch_user_s"])
    parts_below_cohort = replace(parts, training_core_seconds=smaller_batch_core_seconds)
    num_trainers, trained_items, scored_items = times["amounts"]  # items: tokens or samples
    return Measurement(
        parts=parts,
        parts_below_cohort=parts_below_cohort,
        cohort=times["cohort"],
        needs_only_sums=times["needs_only_sums"],
        same_download=times["same_download"],
        summed_numbers=times["summed_numbers"],
        state_bytes=times["state_bytes"],
        disk=times["disk"],
        amounts=(num_trainers, round(steps_ratio * trained_items), scored_items),
    )


def _fit_other_work(
    times: Measured, num_processes: int, message_seconds: float, latency_seconds: float
) -> tuple[float, float]:
    """Return the fixed seconds of a round, and the seconds per participant for the numbers that are reported about it.

    The seconds of a round without local steps are a line in the number of participants, and two points of it were
    measured::

        seconds                 = fixed_seconds + latency_seconds + participants * seconds_per_participant
        seconds_per_participant = message_seconds / num_processes + aggregation_seconds + report_seconds

    Messages are divided by the number of processes, which make them at the same time. The reported numbers, such as
    losses, are sent from process to process.

    Args:
        times: Seconds and numbers of participants; :class:`Measured` describes the keys.
        num_processes: Number of the processes that measured.
        message_seconds: Seconds in which a process makes and reads the messages of one participant.
        latency_seconds: Seconds of latency in a round.
    """
    is_distributed = num_processes > 1
    aggregation_seconds = times["aggregate_s"]
    if is_distributed and times["needs_only_sums"]:
        aggregation_seconds = 0.0  # processes sum the uploads on the way to the server
    # Participants of all processes together, in the two measured rounds.
    few, many = (users * num_processes for users in times["other_work_users"])
    seconds_with_few, seconds_with_many = times["other_work_s"]
    seconds_per_participant = (seconds_with_many - seconds_with_few) / (many - few) if many > few else 0.0
    fixed_seconds = seconds_with_few - latency_seconds - few * max(seconds_per_participant, 0.0)
    report_seconds = seconds_per_participant - message_seconds / num_processes - aggregation_seconds
    if not is_distributed:  # there is no other process to send numbers to
        report_seconds = 0.0
    return max(0.0, fixed_seconds), max(0.0, report_seconds)  # differences of measured times may be below 0


def _count_by_type(calls: Mapping[str, float], num_processes: int) -> Collectives:
    """Return the collective operations of a round by type, as the formulas for other machines need them.

    Args:
        calls: Calls of functions of torch.distributed per round, by the function's name, such as "all_gather".
        num_processes: Number of processes that were measured.
    """
    count = {name: calls.get(name, 0.0) for name in _OPERATIONS}
    num_others = max(1, num_processes - 1)  # 1, to divide by it, for a single process, which sends nothing
    return Collectives(
        gathers=count["all_gather"],
        broadcasts=count["broadcast"],
        reduces=count["reduce"] + count["all_reduce"],
        sends=(count["send"] + count["recv"]) / num_others,  # one message with each other process counts 1 in total
    )


def run_work(recipe: Recipe, cost: MethodCost, measurement: Measurement, users: int) -> RunWork:
    """Return the amounts of work in a run with ``users`` users like those of the recipe.

    Message sizes are means over the recipe's users; the same fraction of users takes part in a round.

    Args:
        recipe: Settings of the run.
        cost: Costs of its method.
        measurement: Measurements of the recipe.
        users: Size of the population.
    """
    training, method = recipe.training, make(recipe.method.name, **recipe.method.settings)
    cost_of_each = [user for user in cost.users for _ in user.names]  # users with equal costs share an entry
    evaluated_users = min(users, recipe.evaluation.users or users)
    participants = _num_participants(training.participation, len(cost_of_each), users)
    evaluate_every = _evaluation_period(recipe, measurement, users, participants, evaluated_users)
    return RunWork(
        users=users,
        participants=participants,
        evaluated_users=evaluated_users,
        rounds=training.rounds,
        # A run evaluates and writes a checkpoint after its last round in any case.
        evaluate_every=min(evaluate_every, training.rounds),
        checkpoint_every=min(recipe.checkpoints.every, training.rounds),
        upload_bytes=fmean(user.upload_bytes for user in cost_of_each),
        download_bytes=fmean(user.download_bytes for user in cost_of_each),
        state_bytes=measurement.state_bytes,
        summed_numbers=measurement.summed_numbers,
        needs_only_sums=measurement.needs_only_sums,
        same_download=measurement.same_download,
        on_disk=recipe.runtime.store != MEMORY,
        exchange_share=cost.exchanges / max(1, training.rounds),  # fraction of the rounds that end with an exchange
        trainings=2 if is_guarded(recipe.evaluation, method) else 1,
    )


def plan_time(work: RunWork, measurement: Measurement, cluster: Cluster) -> TimePlan:
    """Return the seconds and the price of a run: the sum of its rounds, without its start.

    Args:
        work: The amounts of work in the run.
        measurement: Measurements of its recipe.
        cluster: Number and speed of the machines on which the run would train.
    """
    participants_each = users_per_process(work.participants, cluster.num_processes)
    fills_cohort = participants_each >= measurement.cohort
    # A batch with fewer users than a cohort takes longer per user, which was measured separately.
    parts = measurement.parts if fills_cohort else measurement.parts_below_cohort
    mean_round = estimate_round(work, parts, cluster)
    run_seconds = work.rounds * mean_round.seconds
    money = None
    if cluster.price is not None:
        money = run_price(run_seconds, cluster.machines, cluster.price)
    most_users_per_machine = -(-work.users // cluster.machines)  # rounded up
    return TimePlan(
        users=work.users,
        present=work.participants,
        round=mean_round,
        run_seconds=run_seconds,
        state_bytes=most_users_per_machine * work.state_bytes,
        money=money,
    )


def plan_times(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster,
    *,
    step: float | None = None,
    for_all: Mapping[str, object] = NO_SETTINGS,
) -> dict[str, object]:
    """Estimate the time and price of each method's run, for the recipe's number of users and for :data:`POPULATIONS`.

    Populations with fewer users than processes are left out.

    Args:
        recipe: Settings of the run.
        plan: Costs of the recipe with each of the methods.
        cluster: The machines to plan for.
        step: Seconds of one local step of one user in a process of the cluster; None measures them here.
        for_all: Settings for every method that has them, as in :func:`comingle.cost.planning.plan`.

    Returns:
        Nested dictionaries, for JSON: the machines, and for each of ``methods`` its ``rows``, one per population
        (:meth:`TimePlan.as_dict`), and the measured ``parts`` of a round.

    Raises:
        RecipeError: There are more processes than users in the largest population.
        ComingleError: As :func:`measure`.
    """
    num_users = len(plan.users)
    num_processes = cluster.num_processes
    largest_population = max(num_users, *POPULATIONS)
    if num_processes > largest_population:
        why = f"allowed: up to {largest_population:,} processes, one for each user of the largest population"
        raise RecipeError(f"--machines: {num_processes:,} processes in all; {why}")
    distinct_populations = dict.fromkeys((num_users, *POPULATIONS))
    populations = [users for users in distinct_populations if users >= num_processes]
    participants = largest_round(recipe.training.participation, num_users)
    user_seconds = None if step is None else step * plan.local_steps
    methods = []
    for cost in plan.methods:
        # `with_method` changes two settings that do not matter for costs, but for the time of a run: restore them.
        recipe_of_method = with_method(recipe, cost.method, for_all).with_changes(
            {"training.participation": recipe.training.participation, "runtime.compile": recipe.runtime.compile}
        )
        measurement = measure(recipe_of_method, cluster, participants, user_seconds)
        with_disk = cluster if cluster.disk else replace(cluster, disk=measurement.disk)
        rows = []
        for users in populations:
            work = run_work(recipe_of_method, cost, measurement, users)
            rows.append(plan_time(work, measurement, with_disk).as_dict())
        methods.append({"method": cost.method, "rows": rows, "parts": _parts_as_dict(measurement, with_disk)})
    return {
        "machines": cluster.machines,
        "processes": cluster.processes,
        "cores": cluster.cores,
        "gpus": cluster.gpus,
        "price": cluster.price,
        "link": cluster.link,
        "latency": cluster.latency,
        "step_given": step is not None,
        "on_disk": recipe.runtime.store != MEMORY,
        "methods": methods,
    }


def _parts_as_dict(measurement: Measurement, cluster: Cluster) -> dict[str, object]:
    """Return the measured parts of a round, for JSON.

    Keys in seconds of one core are ``user_seconds`` (local steps of a user), ``handling_seconds`` (to make and read its
    messages), ``evaluation_seconds`` and ``upload_seconds`` (to aggregate an upload). Keys in elapsed seconds are
    ``words_seconds`` (for a participant's numbers, such as its loss, that processes send each other), ``fixed_seconds``
    (of a round without participants) and ``hop_seconds`` (of a small message between two processes). Other keys are the
    rates ``bus`` (between processes) and ``disk`` in bytes per second, ``adds`` (whether the server needs only sums)
    and ``hops`` (messages of a round that are sent one after another).

    Args:
        measurement: Measurements of the recipe.
        cluster: The machines to plan for.
    """
    parts = measurement.parts
    is_distributed = cluster.num_processes > 1
    return {
        "user_seconds": parts.training_core_seconds,
        "handling_seconds": parts.message_core_seconds,
        "evaluation_seconds": parts.evaluation_core_seconds,
        "upload_seconds": parts.aggregation_core_seconds,
        "words_seconds": parts.report_seconds,
        "fixed_seconds": parts.fixed_seconds,
        "hop_seconds": parts.hop_seconds,
        "bus": parts.bus_rate if is_distributed else None,
        "disk": cluster.disk,
        "adds": measurement.needs_only_sums,
        "hops": num_hops(parts.collectives, cluster.num_processes) if is_distributed else 0,
    }


def _evaluation_period(
    recipe: Recipe, measurement: Measurement, num_users: int, num_participants: int, num_evaluated: int
) -> int:
    """Return the number of rounds between evaluations in a run with a population of ``num_users`` users.

    With ``evaluation.every: auto`` it depends on the data that an evaluation scores and that a round trains on, scaled
    from the measured users. As in a run, a warning is logged if evaluations take a large share of the time.

    Args:
        recipe: Settings of the run.
        measurement: Measurements of the recipe.
        num_users: Size of the population.
        num_participants: Participants per round.
        num_evaluated: Users in one evaluation.
    """
    if recipe.evaluation.every != AUTO:
        return recipe.evaluation.every
    num_measured, trained_items, scored_items = measurement.amounts  # items: tokens or samples
    plan = RunPlan(
        method=make(recipe.method.name, **recipe.method.settings),
        training=recipe.training,
        evaluation=recipe.evaluation,
        participation=num_participants / num_users,
        test_limit=test_limit_of(recipe),
    )
    items_in_evaluation = scored_items * num_evaluated // num_measured
    amounts = [num_measured, trained_items, items_in_evaluation]
    evaluation_seconds = measurement.parts.evaluation_core_seconds * num_evaluated
    warn_of_share(plan, amounts, num_users, seconds=evaluation_seconds)
    return evaluation_interval(plan, amounts, num_users)


def _num_participants(participation: Participation, num_recipe_users: int, num_users: int) -> int:
    """Return the number of participants per round in a population larger or smaller than the recipe's.

    The same fraction takes part as in the recipe, on average if the recipe lists the participants of each round.

    Args:
        participation: Participation of the recipe: a fraction, or the names of each round's participants.
        num_recipe_users: Number of the recipe's users.
        num_users: Size of the population.
    """
    if isinstance(participation, float | int):
        fraction = participation
    else:
        mean_participants = fmean(len(set(names)) for names in participation)
        fraction = min(1.0, mean_participants / num_recipe_users)
    return largest_round(fraction, num_users)  # with a fraction all rounds are equally large


def _check_single_values(recipe: Recipe) -> None:
    """Refuse settings that list one value per user, such as ``adapters.rank: [2, 4]``, in ``cost --machines``.

    The command estimates populations of other sizes than the recipe's, for which such a list has no values.

    Raises:
        RecipeError: A setting has such a list.
    """
    keys_with_lists = list(recipe.values_of_users())
    if keys_with_lists:
        why = "which does not scale to larger populations"
        raise RecipeError(f"--machines: {keys_with_lists[0]} has a value for each user, {why}; give one value")


def _shorten(recipe: Recipe, max_steps: int) -> tuple[Recipe, float]:
    """Return the recipe of a measurement: with few local steps, and without work that is not measured.

    Args:
        recipe: Settings of the run.
        max_steps: Largest number of local steps per round. Not applied to samples, where it follows from the data.

    Returns:
        The recipe, and the ratio of its original to its remaining local steps.
    """
    changes: dict[str, object] = {
        "training.participation": 1.0,  # the measurement itself chooses participants
        "evaluation.users": None,  # and the users to evaluate
        "evaluation.select": "last",  # keeps no copies of the best round
        "runtime.store": MEMORY,  # the disk is measured separately
        "runtime.track": [],  # nothing is sent to Weights & Biases or MLflow
    }
    if recipe.runtime.users_per_step == "auto":
        changes["runtime.users_per_step"] = None  # the default, without a measurement of memory
    is_language_model = kind_of(recipe).needs_base
    if not is_language_model:
        return recipe.with_changes(changes), 1.0
    local_steps = recipe.training.most_local_steps
    remaining_steps = min(max_steps, local_steps)
    changes["training.local_steps"] = remaining_steps
    return recipe.with_changes(changes), local_steps / remaining_steps


def _measure_in_processes(recipe: Recipe, num_processes: int, threads: int, participants_each: int) -> Measured:
    """Start processes that measure rounds together (:mod:`comingle.cost.timing`), and return what they measured.

    Args:
        recipe: The recipe of the measurement.
        num_processes: Number of processes.
        threads: Threads per process.
        participants_each: Participants per process.

    Raises:
        RecipeError: A process failed.
    """
    with tempfile.TemporaryDirectory(prefix="comingle-") as temporary:
        folder = Path(temporary)
        recipe_file = folder / "recipe.yaml"
        request_file = folder / "request.json"
        result_file = folder / "measured.json"
        recipe_file.write_text(recipe.as_yaml(), encoding="utf-8")
        request = {
            "recipe": str(recipe_file),
            "users": participants_each,
            "threads": threads,
            "out": str(result_file),
        }
        request_file.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "comingle.cost.timing", str(request_file)]
        processes = []
        for rank in range(num_processes):
            environment = _process_environment(rank, num_processes, threads, folder)
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        try:
            errors = []
            for process in processes:
                _output, error = process.communicate(timeout=_TIMEOUT_SECONDS)
                errors.append(error)
        finally:
            for process in processes:
                process.kill()
        if not result_file.is_file():  # the first process failed before it could write an error
            last_line = (errors[0].strip() or "?").splitlines()[-1]
            raise RecipeError(f"--machines: rounds could not be measured: {last_line}")
        times = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in times:
        raise RecipeError(f"--machines: rounds could not be measured: {times['error']}")
    return times


def _process_environment(rank: int, num_processes: int, threads: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of a measuring process.

    Several processes get the variables that torchrun would set, and the path of a file to find each other.

    Args:
        rank: Number of the process, from 0.
        num_processes: Number of processes.
        threads: Threads per process.
        folder: Folder for that file.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if num_processes > 1:
        variables["RANK"] = variables["LOCAL_RANK"] = str(rank)
        variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = str(num_processes)
        variables[MEETING] = str(folder / "meeting")
    if sys.platform.startswith("linux"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # loopback interface: no message leaves this machine
    return variables


def on_gpu() -> bool:
    """Return whether a step on a GPU can be measured here."""
    return torch.cuda.is_available()
