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
from comingle.training.backends.launched import MEETING
from comingle.training.evaluation import period, warn_of_share
from comingle.training.kinds.base import kind_of
from comingle.training.plan import test_limit_of
from comingle.training.settings import RunPlan
from comingle.utils.errors import RecipeError

NO_SETTINGS: Mapping[str, object] = MappingProxyType({})

POPULATIONS = (10**4, 10**6, 10**8)

MAX_STEPS = 10
"""Most local steps that are measured per user. The time of a round with more steps is extrapolated linearly."""

MAX_PROCESSES = 4
"""Most processes that are started for a measurement, unless this machine has more cores."""

_SECONDS = 3600
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
        """Return nested dictionaries, for JSON."""
        parts = {f"{key}_seconds": getattr(self.round, key) for key in ("compute", "server", "network", "disk")}
        plain = {key: getattr(self, key) for key in ("users", "present", "run_seconds", "state_bytes", "money")}
        return plain | {"round_seconds": self.round.seconds, **parts, "binds": self.round.binds}


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

    Copies have the same costs, and there may be as many as the planned machines would train.

    Rounds run in as many processes as a machine of the cluster has, but in no more than this machine has cores (or
    :data:`MAX_PROCESSES`, if that is more). They run in at least 2 processes if the cluster has several, since their
    messages are measured too.

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
    num_processes = 1 if cluster.size == 1 else max(2, min(cluster.processes, max(num_cores, MAX_PROCESSES)))
    threads = recipe.runtime.threads or max(1, num_cores // num_processes)
    # Given seconds replace the measured ones, so one local step is enough.
    # steps_ratio: local steps of the recipe per step that is measured
    recipe, steps_ratio = _shorten(recipe, max_steps=MAX_STEPS if given_user_seconds is None else 1)
    times = _measure_in_processes(recipe, num_processes, threads, users_per_process(participants, cluster.size))
    cores_each = cores_of_process(num_cores, num_processes, threads)
    given_core_seconds = None if given_user_seconds is None else given_user_seconds * cluster.cores_each
    return _to_measurement(times, num_processes, cores_each, steps_ratio, given_core_seconds)


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
    own_user_s: float
    user_s: float
    evaluation_s: float
    other_work_s: tuple[float, float]
    other_work_users: tuple[int, int]
    collectives: Mapping[str, float]


class Measured(_Measured, total=False):
    """Seconds and sizes from :func:`comingle.cost.timing.measure_parts`.

    ``own_user_s`` and ``user_s`` are seconds of one user's local steps, with as many participants as planned and with a
    full cohort. ``other_work_s`` are seconds of rounds without local steps, with the two numbers of participants per
    process in ``other_work_users``. ``collectives`` are calls of torch.distributed per round. Only several processes
    have ``hop`` and ``bus``.
    """

    hop: float
    bus: float
    error: str


_OPERATIONS = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")


def _to_measurement(
    times: Measured, num_processes: int, cores_each: float, steps_ratio: float, given_core_seconds: float | None
) -> Measurement:
    """Convert the seconds of a measurement into parts of a round, which formulas scale to other machines.

    Core seconds are seconds times ``cores_each``, for work that is faster with more cores.

    Rounds without local steps were measured with few and with many participants (``other_work_s``). A line through both
    points has the time that one participant adds as its slope. From this time the participant's messages and the
    aggregation of its upload are subtracted, which were measured on their own. The remainder is ``report``: seconds for
    the numbers about a participant, such as its loss, that processes send to each other. The line's value at 0
    participants, minus the latencies of messages between processes, is ``fixed``.

    Args:
        times: Seconds, sizes and counts from the processes that measured.
        num_processes: Number of these processes.
        cores_each: Cores per process.
        steps_ratio: Local steps of the recipe per step that was measured.
        given_core_seconds: Core seconds of the local steps of one user, if they were given; None for the measured ones.
    """
    counts = {name: times["collectives"].get(name, 0.0) for name in _OPERATIONS}
    collectives = Collectives(
        gathers=counts["all_gather"],
        broadcasts=counts["broadcast"],
        reduces=counts["reduce"] + counts["all_reduce"],
        # Messages with each of the other processes count once.
        sends=(counts["send"] + counts["recv"]) / max(1, num_processes - 1),  # a single process has no others
    )
    # A single process does not sum uploads before the server gets them.
    handling_seconds = times["receive_s"] + times["send_s"] + (times["sum_s"] if num_processes > 1 else 0.0)
    aggregation_seconds = 0.0 if num_processes > 1 and times["needs_only_sums"] else times["aggregate_s"]
    hop = times.get("hop", 0.0)
    few, many = (users * num_processes for users in times["other_work_users"])
    few_seconds, many_seconds = times["other_work_s"]
    slope = (many_seconds - few_seconds) / (many - few) if many > few else 0.0
    latency_seconds = num_hops(collectives, num_processes) * hop if num_processes > 1 else 0.0
    fixed_seconds = few_seconds - latency_seconds - few * max(slope, 0.0)
    # All processes make messages at the same time, so a participant adds 1 / num_processes of their seconds.
    report_seconds = slope - handling_seconds / num_processes - aggregation_seconds

    def core_seconds_of_user(measured_seconds: float) -> float:
        """Return the core seconds of one user's local steps in the planned run, unless they were given.

        Args:
            measured_seconds: Seconds of one user's local steps in the measurement, which had fewer of them.
        """
        return steps_ratio * measured_seconds * cores_each if given_core_seconds is None else given_core_seconds

    parts = Parts(
        user=core_seconds_of_user(times["user_s"]),
        handling=handling_seconds * cores_each,
        evaluation=times["evaluation_s"] * cores_each,
        upload=times["aggregate_s"] * cores_each,
        report=max(0.0, report_seconds) if num_processes > 1 else 0.0,  # max: differences of measured times may be < 0
        fixed=max(0.0, fixed_seconds),
        hop=hop,
        bus=times.get("bus", float("inf")),  # a single process has no connections
        collectives=collectives,
    )
    # Number of users, and the tokens or samples of a round's training and of an evaluation.
    trainers, trained, scored = times["amounts"]
    return Measurement(
        parts=parts,
        # With fewer participants than a cohort, a pass has fewer users and takes longer for each.
        parts_below_cohort=replace(parts, user=core_seconds_of_user(times["own_user_s"])),
        cohort=times["cohort"],
        needs_only_sums=times["needs_only_sums"],
        same_download=times["same_download"],
        summed_numbers=times["summed_numbers"],
        state_bytes=times["state_bytes"],
        disk=times["disk"],
        amounts=(trainers, round(steps_ratio * trained), scored),
    )


def run_work(recipe: Recipe, cost: MethodCost, measurement: Measurement, users: int) -> RunWork:
    """Return the amounts of work in a run with ``users`` users like those of the recipe.

    Message sizes are means over the recipe's users; participants are the same fraction of the population as in the
    recipe.

    Args:
        recipe: The recipe.
        cost: Costs of its method.
        measurement: Measurements of the recipe.
        users: Size of the population.
    """
    cost_of_each = [user for user in cost.users for _ in user.names]  # users with equal costs share an entry
    training, evaluated_users = recipe.training, min(users, recipe.evaluation.users or users)
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
    )


def plan_time(work: RunWork, measurement: Measurement, cluster: Cluster) -> TimePlan:
    """Return the seconds and the price of a run: the sum of its rounds, without its start.

    Args:
        work: The amounts of work in the run.
        measurement: Measurements of its recipe.
        cluster: The machines.
    """
    # A batch with fewer users than a cohort takes longer per user, which was measured separately.
    fills_cohort = users_per_process(work.participants, cluster.size) >= measurement.cohort
    parts = measurement.parts if fills_cohort else measurement.parts_below_cohort
    mean_round = estimate_round(work, parts, cluster)
    run_seconds = work.rounds * mean_round.seconds
    users_per_machine = -(-work.users // cluster.machines)  # of the machine that has most
    return TimePlan(
        users=work.users,
        present=work.participants,
        round=mean_round,
        run_seconds=run_seconds,
        state_bytes=users_per_machine * work.state_bytes,
        money=None if cluster.price is None else run_price(run_seconds, cluster.machines, cluster.price),
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
        recipe: The recipe.
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
    methods, num_users = [], len(plan.users)
    if cluster.size > (largest := max(num_users, *POPULATIONS)):
        why = f"allowed: up to {largest:,} processes, one for each user of the largest population"
        raise RecipeError(f"--machines: {cluster.size:,} processes in all; {why}")
    # `with_method` changes these two settings, which do not matter for costs; a run's time depends on them.
    original = {"training.participation": recipe.training.participation, "runtime.compile": recipe.runtime.compile}
    participants = largest_round(recipe.training.participation, num_users)
    user_seconds = None if step is None else step * plan.local_steps
    for cost in plan.methods:
        variant = with_method(recipe, cost.method, for_all).with_changes(original)
        measurement = measure(variant, cluster, participants, user_seconds)
        with_disk = cluster if cluster.disk else replace(cluster, disk=measurement.disk)
        rows = [
            plan_time(run_work(variant, cost, measurement, users), measurement, with_disk).as_dict()
            for users in dict.fromkeys((num_users, *POPULATIONS))
            if users >= with_disk.size
        ]
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

    Keys are ``PART_seconds`` for each part that :class:`comingle.cost.timing.Parts` describes (its ``report`` has the
    key ``words_seconds``), the rates of the connection between processes (``bus``, None for a single process) and of
    the ``disk`` in bytes per second, ``adds`` (whether the server needs sums alone) and ``hops`` (messages of a round
    that wait for each other).

    Args:
        measurement: Measurements of the recipe.
        cluster: The machines to plan for.
    """
    parts = measurement.parts
    return {
        "user_seconds": parts.user,
        "handling_seconds": parts.handling,
        "evaluation_seconds": parts.evaluation,
        "upload_seconds": parts.upload,
        "words_seconds": parts.report,
        "fixed_seconds": parts.fixed,
        "hop_seconds": parts.hop,
        "bus": parts.bus if cluster.size > 1 else None,
        "disk": cluster.disk,
        "adds": measurement.needs_only_sums,
        "hops": num_hops(parts.collectives, cluster.size) if cluster.size > 1 else 0,
    }


def _evaluation_period(
    recipe: Recipe, measurement: Measurement, num_users: int, num_participants: int, num_evaluated: int
) -> int:
    """Return the number of rounds between evaluations in a run with a population of ``num_users`` users.

    With ``evaluation.every: auto`` a run chooses the interval so that evaluations take a small part of its time. The
    interval depends on how much data an evaluation scores relative to how much a round trains on; both are extrapolated
    from the users that were measured. A warning is logged, as in the run, if the fewest possible evaluations already
    take a larger part.

    Args:
        recipe: The recipe.
        measurement: Measurements of the recipe.
        num_users: Size of the population.
        num_participants: Participants per round.
        num_evaluated: Users in one evaluation.
    """
    if recipe.evaluation.every != AUTO:
        return recipe.evaluation.every
    # Of the measured users: their number, and the tokens or samples of a round's training and of an evaluation.
    measured_users, trained, scored = measurement.amounts
    plan = RunPlan(
        method=make(recipe.method.name, **recipe.method.settings),
        training=recipe.training,
        evaluation=recipe.evaluation,
        participation=num_participants / num_users,
        test_limit=test_limit_of(recipe),
    )
    amounts = [measured_users, trained, scored * num_evaluated // measured_users]
    warn_of_share(plan, amounts, num_users, seconds=measurement.parts.evaluation * num_evaluated)
    return period(plan, amounts, num_users)


def _num_participants(participation: Participation, num_recipe_users: int, num_users: int) -> int:
    """Return the number of participants per round in a population larger or smaller than the recipe's.

    The same fraction of the users takes part as in the recipe. If the recipe lists the participants of each round by
    name, the fraction is their mean number, divided by the number of the recipe's users.

    Args:
        participation: Participation of the recipe: a fraction, or the names of each round's participants.
        num_recipe_users: Number of the recipe's users.
        num_users: Size of the population.
    """
    if isinstance(participation, float | int):
        fraction = participation
    else:
        mean_participants = fmean(len(set(names)) for names in participation)
        fraction = min(1.0, mean_participants / num_recipe_users)  # at most all users
    return largest_round(fraction, num_users)  # with a fraction all rounds are equally large


def _check_single_values(recipe: Recipe) -> None:
    """Refuse settings that list one value per user, as a larger population has users without a value.

    Raises:
        RecipeError: A setting has such a list.
    """
    for key in recipe.values_of_users():
        why = "which does not scale to larger populations"
        raise RecipeError(f"--machines: {key} has a value for each user, {why}; give one value")


def _shorten(recipe: Recipe, max_steps: int) -> tuple[Recipe, float]:
    """Return the recipe of a measurement: with few local steps, and without work that is not measured.

    Args:
        recipe: The recipe.
        max_steps: Largest number of local steps per round; not applied to samples, whose number of steps follows from
            the data.

    Returns:
        The recipe, and the ratio of its original to its remaining local steps.
    """
    changes: dict[str, object] = {
        "training.participation": 1.0,  # the measurement chooses the participants
        "evaluation.users": None,  # and the evaluated users
        "evaluation.select": "last",  # keeps no copies of the best round
        "runtime.store": MEMORY,  # the disk is measured separately
        "runtime.track": [],  # nothing is sent to Weights & Biases or MLflow
    }
    if recipe.runtime.users_per_step == "auto":
        changes["runtime.users_per_step"] = None  # the default, without a measurement of memory
    if not kind_of(recipe).needs_base:
        return recipe.with_changes(changes), 1.0
    local_steps = recipe.training.most_local_steps
    measured_steps = min(max_steps, local_steps)
    changes["training.local_steps"] = measured_steps
    return recipe.with_changes(changes), local_steps / measured_steps


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
    with tempfile.TemporaryDirectory(prefix="comingle-") as folder:
        workdir = Path(folder)
        (workdir / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
        order = {
            "recipe": str(workdir / "recipe.yaml"),
            "users": participants_each,
            "threads": threads,
            "out": str(workdir / "measured.json"),
        }
        (workdir / "order.json").write_text(json.dumps(order), encoding="utf-8")
        command = [sys.executable, "-m", "comingle.cost.timing", str(workdir / "order.json")]
        children = [
            subprocess.Popen(
                command,
                env=_process_environment(rank, num_processes, threads, workdir),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_processes)
        ]
        try:
            stderr = [child.communicate(timeout=_SECONDS)[1] for child in children]
        finally:
            for child in children:
                child.kill()
        if not (workdir / "measured.json").is_file():  # the first process failed before it could write an error
            raise RecipeError(
                f"--machines: rounds could not be measured: {(stderr[0].strip() or '?').splitlines()[-1]}"
            )
        times = json.loads((workdir / "measured.json").read_text(encoding="utf-8"))
    if "error" in times:
        raise RecipeError(f"--machines: rounds could not be measured: {times['error']}")
    return times


def _process_environment(rank: int, num_processes: int, threads: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of a measuring process.

    Several processes get the variables that torch's launcher (torchrun) would set, and the path of a file by which they
    find each other.

    Args:
        rank: Number of the process, from 0.
        num_processes: Number of processes.
        threads: Threads per process.
        folder: Folder for that file.
    """
    variables = {"OMP_NUM_THREADS": str(threads)}
    if num_processes > 1:
        ranks = {"RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_processes}
        variables |= {key: str(value) for key, value in ranks.items()} | {MEETING: str(folder / "meeting")}
    if sys.platform.startswith("linux"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # loopback interface: no message leaves this machine
    return {**os.environ, **variables}


def on_gpu() -> bool:
    """Return whether a step on a GPU can be measured here."""
    return torch.cuda.is_available()
