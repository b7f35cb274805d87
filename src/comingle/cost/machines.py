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
    hops,
    run_price,
    users_per_process,
)
from comingle.methods import make
from comingle.runs.distributed import cores
from comingle.training.backends.launched import MEETING
from comingle.training.evaluation import period
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
    """Estimated cost of a run with ``users`` users and ``present`` participants per round."""

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
    """The arguments of :func:`comingle.training.evaluation.period`."""


def measure(
    recipe: Recipe, cluster: Cluster, participants: int, given_user_seconds: float | None = None
) -> Measurement:
    """Measure rounds of copies of the recipe's users on this machine.

    Runs in as many processes as a machine of the cluster has, limited to :data:`MAX_PROCESSES` or the number of cores,
    but at least 2 for a cluster with several processes, whose messages are measured too.

    Args:
        recipe: The recipe to measure.
        cluster: The machines to plan for.
        participants: Participants per round.
        given_user_seconds: Seconds that the local steps of one user take in a process of the cluster; None measures
            them here.

    Raises:
        RecipeError: Users have settings of their own, so that copies of them cannot stand for other users.
        ComingleError: A run of the recipe would fail with the same message.
    """
    _check_single_values(recipe)
    num_cores = cores()
    count = 1 if cluster.size == 1 else max(2, min(cluster.processes, max(num_cores, MAX_PROCESSES)))
    threads = recipe.runtime.threads or max(1, num_cores // count)
    recipe, steps_ratio = _shorten(recipe, MAX_STEPS if given_user_seconds is None else 1)
    times = _measure_in_processes(recipe, count, threads, users_per_process(participants, cluster.size))
    core_seconds = None if given_user_seconds is None else given_user_seconds * cluster.cores_each
    return _to_measurement(times, count, cores_of_process(num_cores, count, threads), steps_ratio, core_seconds)


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
    others_s: tuple[float, float]
    counts_of_users: tuple[int, int]
    counts: Mapping[str, float]


class Measured(_Measured, total=False):
    """Seconds and sizes from :func:`comingle.cost.timing.measure_parts`.

    Only several processes have ``hop`` and ``bus``.
    """

    hop: float
    bus: float
    error: str


_OPERATIONS = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")


def _to_measurement(
    times: Measured, count: int, cores_each: float, steps_ratio: float, given_core_seconds: float | None
) -> Measurement:
    """Convert the seconds of a measurement into parts of a round.

    Seconds of work that scales with the number of cores are multiplied by ``cores_each``, which gives core seconds.

    Rounds without local steps were measured with few and with many participants (``others_s``). The slope between the
    two is the time that one participant adds. The remainder at 0 participants, less the messages between processes, is
    ``fixed``.

    Args:
        times: The measurement.
        count: Number of processes that measured.
        cores_each: Cores per process.
        steps_ratio: Local steps of the recipe per step that was measured.
        given_core_seconds: Core seconds of the local steps of one user, if they were given; None for the measured ones.
    """
    counts = {name: times["counts"].get(name, 0.0) for name in _OPERATIONS}
    steps = Collectives(
        gathers=counts["all_gather"],
        broadcasts=counts["broadcast"],
        reduces=counts["reduce"] + counts["all_reduce"],
        sends=(counts["send"] + counts["recv"]) / max(1, count - 1),
    )
    handling = times["receive_s"] + times["send_s"] + (times["sum_s"] if count > 1 else 0.0)
    aggregation_seconds = 0.0 if count > 1 and times["needs_only_sums"] else times["aggregate_s"]
    hop = times.get("hop", 0.0)
    few, many = (users * count for users in times["counts_of_users"])
    few_seconds, many_seconds = times["others_s"]
    slope = (many_seconds - few_seconds) / (many - few) if many > few else 0.0
    message_seconds = hops(steps, count) * hop if count > 1 else 0.0
    fixed = few_seconds - message_seconds - few * max(slope, 0.0)

    def core_seconds_of_user(measured_seconds: float) -> float:
        """Return the core seconds of one user's local steps: the given ones, or those of as many steps as planned."""
        return steps_ratio * measured_seconds * cores_each if given_core_seconds is None else given_core_seconds

    parts = Parts(
        user=core_seconds_of_user(times["user_s"]),
        handling=handling * cores_each,
        evaluation=times["evaluation_s"] * cores_each,
        upload=times["aggregate_s"] * cores_each,
        # Messages, which are made in `count` processes at once, and aggregation are parts of their own.
        words=max(0.0, slope - handling / count - aggregation_seconds) if count > 1 else 0.0,
        fixed=max(0.0, fixed),
        hop=hop,
        bus=times.get("bus", float("inf")),
        steps=steps,
    )
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

    Message sizes are means over the recipe's users; participants are the same fraction of the population.

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
        evaluate_every=min(evaluate_every, training.rounds),
        checkpoint_every=min(recipe.checkpoints.every, training.rounds),
        upload_bytes=fmean(user.upload_bytes for user in cost_of_each),
        download_bytes=fmean(user.download_bytes for user in cost_of_each),
        state_bytes=measurement.state_bytes,
        summed_numbers=measurement.summed_numbers,
        needs_only_sums=measurement.needs_only_sums,
        same_download=measurement.same_download,
        on_disk=recipe.runtime.store != MEMORY,
        exchange_share=cost.exchanges / max(1, training.rounds),
    )


def plan_time(work: RunWork, measurement: Measurement, cluster: Cluster) -> TimePlan:
    """Return the seconds and the price of a run: the sum of its rounds, without its start.

    Args:
        work: The amounts of work in the run.
        measurement: Measurements of its recipe.
        cluster: The machines.
    """
    fills_cohort = users_per_process(work.participants, cluster.size) >= measurement.cohort
    estimate = estimate_round(work, measurement.parts if fills_cohort else measurement.parts_below_cohort, cluster)
    seconds = work.rounds * estimate.seconds
    users_per_machine = users_per_process(work.users, cluster.machines)
    return TimePlan(
        users=work.users,
        present=work.participants,
        round=estimate,
        run_seconds=seconds,
        state_bytes=users_per_machine * work.state_bytes,
        money=None if cluster.price is None else run_price(seconds, cluster.machines, cluster.price),
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
        plan: Its costs.
        cluster: The machines to plan for.
        step: Seconds of one local step of one user in a process of the cluster; None measures them here.
        for_all: Settings for every method that has them, as in :func:`comingle.cost.planning.plan`.

    Returns:
        Nested dictionaries, for JSON.

    Raises:
        RecipeError: There are more processes than users in the largest population.
        ComingleError: As :func:`measure`.
    """
    methods, num_users = [], len(plan.users)
    if cluster.size > (largest := max(num_users, *POPULATIONS)):
        why = f"allowed: up to {largest:,} processes, one for each user of the largest population"
        raise RecipeError(f"--machines: {cluster.size:,} processes in all; {why}")
    # `with_method` changes these two, on which a run's time depends.
    kept = {"training.participation": recipe.training.participation, "runtime.compile": recipe.runtime.compile}
    participants = largest_round(recipe.training.participation, num_users)
    user_seconds = None if step is None else step * plan.local_steps
    for cost in plan.methods:
        variant = with_method(recipe, cost.method, for_all).with_changes(kept)
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

    These are seconds by part, the rates of the connection between processes (``bus``, None for a single process) and of
    the disk in bytes per second, ``adds`` (whether the server needs sums alone) and ``hops`` (messages of a round that
    wait for each other).
    """
    parts = measurement.parts
    plain = {key: getattr(parts, key) for key in ("user", "handling", "evaluation", "upload", "words", "fixed", "hop")}
    return {f"{key}_seconds": value for key, value in plain.items()} | {
        "bus": parts.bus if cluster.size > 1 else None,
        "disk": cluster.disk,
        "adds": measurement.needs_only_sums,
        "hops": hops(parts.steps, cluster.size) if cluster.size > 1 else 0,
    }


def _evaluation_period(
    recipe: Recipe, measurement: Measurement, users: int, participants: int, evaluated_users: int
) -> int:
    """Return the rounds between evaluations in a run of ``users`` users like those that were measured.

    If the recipe leaves the interval to the run (``every: auto``), it depends on how much data an evaluation scores
    relative to how much a round trains on.

    Args:
        recipe: The recipe.
        measurement: Measurements of the recipe.
        users: Size of the population.
        participants: Participants per round.
        evaluated_users: Users in one evaluation.
    """
    if recipe.evaluation.every != AUTO:
        return recipe.evaluation.every
    trainers, trained, scored = measurement.amounts
    plan = RunPlan(
        method=make(recipe.method.name, **recipe.method.settings),
        training=recipe.training,
        evaluation=recipe.evaluation,
        participation=participants / users,
        test_limit=test_limit_of(recipe),
    )
    return period(plan, [trainers, trained, scored * evaluated_users // trainers], users)


def _num_participants(participation: Participation, recipe_users: int, users: int) -> int:
    """Return the number of participants in the largest round of a population.

    Args:
        participation: Participation of the recipe: a fraction, or the names of each round's participants, whose mean
            number as a fraction of the recipe's users is taken.
        recipe_users: Number of the recipe's users.
        users: Size of the population.
    """
    if not isinstance(participation, float | int):
        participation = min(1.0, fmean(len(set(members)) for members in participation) / recipe_users)
    return largest_round(participation, users)


def _check_single_values(recipe: Recipe) -> None:
    """Check that no setting lists a value for each user: larger populations have users that it does not cover.

    Raises:
        RecipeError: A setting does.
    """
    lists = {"adapters.rank": recipe.adapters.rank, **recipe.method.settings}
    for key, value in lists.items():
        if isinstance(value, list):
            why = "which does not scale to larger populations"
            raise RecipeError(f"--machines: {key} has a value for each user, {why}; give one value")


def _shorten(recipe: Recipe, most: int) -> tuple[Recipe, float]:
    """Return the recipe of a measurement: few local steps, and all users in every round and evaluation.

    Users are kept in memory, and nothing is reported to trackers. If ``users_per_step`` is "auto", it becomes the
    default number.

    Args:
        recipe: The recipe.
        most: Largest number of local steps per round; not applied to samples, whose number of steps follows from the
            data.

    Returns:
        The recipe, and the ratio of its original to its remaining local steps.
    """
    changes: dict[str, object] = {
        "training.participation": 1.0,
        "evaluation.users": None,
        "evaluation.select": "last",
        "runtime.store": MEMORY,
        "runtime.track": [],
    }
    steps = recipe.training.local_steps
    has_steps = kind_of(recipe).needs_base
    if has_steps:
        changes["training.local_steps"] = min(most, steps)
    if recipe.runtime.users_per_step == "auto":
        changes["runtime.users_per_step"] = None
    return recipe.with_changes(changes), steps / min(most, steps) if has_steps else 1.0


def _measure_in_processes(recipe: Recipe, count: int, threads: int, users: int) -> Measured:
    """Measure rounds in new processes that run :mod:`comingle.cost.timing`.

    Args:
        recipe: The recipe of the measurement.
        count: Number of processes.
        threads: Threads per process.
        users: Participants per process.

    Raises:
        RecipeError: A process failed.
    """
    with tempfile.TemporaryDirectory(prefix="comingle-") as folder:
        workdir = Path(folder)
        (workdir / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
        order = {
            "recipe": str(workdir / "recipe.yaml"),
            "users": users,
            "threads": threads,
            "out": str(workdir / "found"),
        }
        (workdir / "order.json").write_text(json.dumps(order), encoding="utf-8")
        command = [sys.executable, "-m", "comingle.cost.timing", str(workdir / "order.json")]
        children = [
            subprocess.Popen(
                command, env=_process_environment(rank, count, threads, workdir), stderr=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        try:
            stderr = [child.communicate(timeout=_SECONDS)[1] for child in children]
        finally:
            for child in children:
                child.kill()
        if not (workdir / "found").is_file():
            raise RecipeError(
                f"--machines: rounds could not be measured: {(stderr[0].strip() or '?').splitlines()[-1]}"
            )
        times = json.loads((workdir / "found").read_text(encoding="utf-8"))
    if "error" in times:
        raise RecipeError(f"--machines: rounds could not be measured: {times['error']}")
    return times


def _process_environment(rank: int, count: int, threads: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of a measuring process.

    Args:
        rank: Number of the process.
        count: Number of processes; several of them find each other by the variables of torch's launcher.
        threads: Threads per process.
        folder: A folder in which the processes meet.
    """
    variables = {"OMP_NUM_THREADS": str(threads)}
    if count > 1:
        ranks = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
        variables |= {key: str(value) for key, value in ranks.items()} | {MEETING: str(folder / "meeting")}
    if sys.platform.startswith("linux"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # nothing leaves this machine
    return {**os.environ, **variables}


def on_gpu() -> bool:
    """Return whether a step on a GPU can be measured here."""
    return torch.cuda.is_available()
