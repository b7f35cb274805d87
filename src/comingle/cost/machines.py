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
    hops,
    money,
    round_of,
    share,
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
    fewer: Parts
    """Parts for processes with as many participants as the recipe has."""
    cohort: int
    adds: bool
    """Whether the server needs sums alone."""
    common: bool
    """Whether all users download the same tensors."""
    shared: int
    """Numbers that are summed if the server needs sums alone."""
    state_bytes: int
    """Bytes of one user's tensors."""
    disk: float
    """Write rate of this machine's disk, in bytes per second."""
    amounts: tuple[int, int, int]
    """The arguments of :func:`comingle.training.evaluation.period`."""


def measure(recipe: Recipe, cluster: Cluster, present: int, user: float | None = None) -> Measurement:
    """Measure rounds of the recipe's users on this machine.

    Runs in as many processes as a machine of the cluster has, limited to :data:`MAX_PROCESSES` or the number of cores.

    Args:
        recipe: The recipe to measure.
        cluster: The machines to plan for.
        present: Participants per round.
        user: Seconds that the local steps of one user take in a process of the cluster; None measures them here.

    Raises:
        RecipeError: Users have settings of their own, so that copies of them cannot stand for other users.
        ComingleError: A run of the recipe would fail with the same message.
    """
    _check_single_values(recipe)
    num_cores = cores()
    count = 1 if cluster.size == 1 else max(2, min(cluster.processes, max(num_cores, MAX_PROCESSES)))
    threads = recipe.runtime.threads or max(1, num_cores // count)
    recipe, longer = _shorten(recipe, MAX_STEPS if user is None else 1)
    times = _measure_in_processes(recipe, count, threads, share(present, cluster.size))
    user_seconds = None if user is None else user * cluster.cores_each
    return _to_measurement(times, count, cores_of_process(num_cores, count, threads), longer, user_seconds)


class _MessageSeconds(TypedDict):
    receive_s: float
    send_s: float
    sum_s: float
    aggregate_s: float


class _Measured(_MessageSeconds):
    adds: bool
    common: bool
    shared: int
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
    """Seconds and sizes from :func:`comingle.cost.timing.measured`; ``hop`` and ``bus`` only with several processes."""

    hop: float
    bus: float
    error: str


_OPERATIONS = ("all_gather", "broadcast", "reduce", "all_reduce", "send", "recv")


def _to_measurement(times: Measured, count: int, each: float, longer: float, user: float | None) -> Measurement:
    """Convert the seconds of a measurement into parts, which are core seconds where work is divided among cores.

    The rest of a round, without local steps, was measured with few and with many participants. From their difference
    follow the seconds that one participant adds, and ``fixed``.

    Args:
        times: The measurement.
        count: Number of processes that measured.
        each: Cores per process.
        longer: Local steps of the recipe per step that was measured.
        user: Core seconds that the local steps of one user take, if they were given; None for the measured ones.
    """
    counts = {name: times["counts"].get(name, 0.0) for name in _OPERATIONS}
    steps = Collectives(
        gathers=counts["all_gather"],
        broadcasts=counts["broadcast"],
        reduces=counts["reduce"] + counts["all_reduce"],
        sends=(counts["send"] + counts["recv"]) / max(1, count - 1),
    )
    handling = times["receive_s"] + times["send_s"] + (times["sum_s"] if count > 1 else 0.0)
    upload_seconds = 0.0 if count > 1 and times["adds"] else times["aggregate_s"]
    hop = times.get("hop", 0.0)
    few, many = (users * count for users in times["counts_of_users"])
    slope = (times["others_s"][1] - times["others_s"][0]) / (many - few) if many > few else 0.0
    waits = hops(steps, count) * hop if count > 1 else 0.0
    fixed = times["others_s"][0] - waits - few * max(slope, 0.0)
    parts = Parts(
        user=longer * times["user_s"] * each if user is None else user,
        handling=handling * each,
        evaluation=times["evaluation_s"] * each,
        upload=times["aggregate_s"] * each,
        words=max(0.0, slope - handling / count - upload_seconds) if count > 1 else 0.0,
        fixed=max(0.0, fixed),
        hop=hop,
        bus=times.get("bus", float("inf")),
        steps=steps,
    )
    trainers, trained, scored = times["amounts"]
    # With fewer participants than a cohort, a pass has fewer users and takes longer for each.
    own_user = longer * times["own_user_s"] * each if user is None else user
    return Measurement(
        parts=parts,
        fewer=replace(parts, user=own_user),
        cohort=times["cohort"],
        adds=times["adds"],
        common=times["common"],
        shared=times["shared"],
        state_bytes=times["state_bytes"],
        disk=times["disk"],
        amounts=(trainers, round(longer * trained), scored),
    )


def run_work(recipe: Recipe, cost: MethodCost, measurement: Measurement, users: int) -> RunWork:
    """Return the work of a run with ``users`` users like those of the recipe.

    Args:
        recipe: The recipe.
        cost: Costs of its method.
        measurement: Measurements of the recipe.
        users: Size of the population.
    """
    named = [user for user in cost.users for _ in user.names]
    training, evaluated = recipe.training, min(users, recipe.evaluation.users or users)
    present = _num_participants(training.participation, len(named), users)
    return RunWork(
        users=users,
        present=present,
        evaluated=evaluated,
        rounds=training.rounds,
        evaluate_every=min(_evaluation_period(recipe, measurement, users, present, evaluated), training.rounds),
        checkpoint_every=min(recipe.checkpoints.every, training.rounds),
        upload_bytes=fmean(user.upload_bytes for user in named),
        download_bytes=fmean(user.download_bytes for user in named),
        state_bytes=measurement.state_bytes,
        shared=measurement.shared,
        adds=measurement.adds,
        common=measurement.common,
        on_disk=recipe.runtime.store != MEMORY,
        exchanges=cost.exchanges / max(1, training.rounds),
    )


def plan_time(load: RunWork, measurement: Measurement, cluster: Cluster) -> TimePlan:
    """Return the seconds and the price of a run: the sum of its rounds, without its start.

    Args:
        load: The work of the run.
        measurement: Measurements of its recipe.
        cluster: The machines.
    """
    full = share(load.present, cluster.size) >= measurement.cohort
    estimate = round_of(load, measurement.parts if full else measurement.fewer, cluster)
    seconds = load.rounds * estimate.seconds
    return TimePlan(
        users=load.users,
        present=load.present,
        round=estimate,
        run_seconds=seconds,
        state_bytes=share(load.users, cluster.machines) * load.state_bytes,
        money=None if cluster.price is None else money(seconds, cluster.machines, cluster.price),
    )


def plan_times(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster,
    *,
    step: float | None = None,
    for_all: Mapping[str, object] = NO_SETTINGS,
) -> dict[str, object]:
    """Estimate the rounds of each method, for the recipe's number of users and for the sizes in :data:`POPULATIONS`.

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
    kept = {"training.participation": recipe.training.participation, "runtime.compile": recipe.runtime.compile}
    for cost in plan.methods:
        short_recipe = with_method(recipe, cost.method, for_all).with_changes(kept)
        present = largest_round(recipe.training.participation, num_users)
        measurement = measure(short_recipe, cluster, present, None if step is None else step * plan.local_steps)
        with_disk = cluster if cluster.disk else replace(cluster, disk=measurement.disk)
        rows = [
            plan_time(run_work(short_recipe, cost, measurement, users), measurement, with_disk).as_dict()
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
    """Return the measured parts of a round, and rates and messages between processes, for JSON."""
    parts = measurement.parts
    plain = {key: getattr(parts, key) for key in ("user", "handling", "evaluation", "upload", "words", "fixed", "hop")}
    return {f"{key}_seconds": value for key, value in plain.items()} | {
        "bus": parts.bus if cluster.size > 1 else None,
        "disk": cluster.disk,
        "adds": measurement.adds,
        "hops": hops(parts.steps, cluster.size) if cluster.size > 1 else 0,
    }


def _evaluation_period(recipe: Recipe, measurement: Measurement, users: int, present: int, evaluated: int) -> int:
    """Return the rounds between evaluations in a run of ``users`` users like those that were measured."""
    if recipe.evaluation.every != AUTO:
        return recipe.evaluation.every
    trainers, trained, scored = measurement.amounts
    plan = RunPlan(
        method=make(recipe.method.name, **recipe.method.settings),
        training=recipe.training,
        evaluation=recipe.evaluation,
        participation=present / users,
        test_limit=test_limit_of(recipe),
    )
    return period(plan, [trainers, trained, scored * evaluated // trainers], users)


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
    """Check that no setting has a value for each user, which does not say what other users would have.

    Raises:
        RecipeError: A setting has one.
    """
    lists = {"adapters.rank": recipe.adapters.rank, **recipe.method.settings}
    for key, value in lists.items():
        if isinstance(value, list):
            why = "which does not scale to larger populations"
            raise RecipeError(f"--machines: {key} has a value for each user, {why}; give one value")


def _shorten(recipe: Recipe, most: int) -> tuple[Recipe, float]:
    """Return the recipe of a measurement: few local steps, and all users in every round and evaluation.

    Args:
        recipe: The recipe.
        most: Largest number of local steps per round.

    Returns:
        The recipe, and the number of its original local steps per remaining one.
    """
    changes: dict[str, object] = {
        "training.participation": 1.0,
        "evaluation.users": None,
        "evaluation.select": "last",
        "runtime.store": MEMORY,
        "runtime.track": [],
    }
    steps = recipe.training.local_steps
    has_steps = kind_of(recipe).needs_base  # for samples the number of steps follows from the data
    if has_steps:
        changes["training.local_steps"] = min(most, steps)
    if recipe.runtime.users_per_step == "auto":
        changes["runtime.users_per_step"] = None
    return recipe.with_changes(changes), steps / min(most, steps) if has_steps else 1.0


def _measure_in_processes(recipe: Recipe, count: int, threads: int, users: int) -> Measured:
    """Measure rounds in ``count`` processes with ``users`` users each, by :mod:`comingle.cost.timing`.

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
