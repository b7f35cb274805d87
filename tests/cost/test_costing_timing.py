"""Seconds and money of a round: each equation against another way to find it, and what is measured here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from plans import recipe_of

from comingle.config import load_recipe
from comingle.cost import machines, timing
from comingle.cost.machines import Measurement, measure, plan_time, run_work
from comingle.cost.records import Flops, MemoryCost, MethodCost, UserCost
from comingle.cost.timing import Cluster, Collectives, Parts, Round, RunWork
from comingle.utils.errors import RecipeError

STEPS = Collectives(gathers=20, broadcasts=10, reduces=1, sends=4)
PARTS = Parts(
    training_core_seconds=0.5,
    message_core_seconds=0.01,
    evaluation_core_seconds=0.2,
    aggregation_core_seconds=0.003,
    report_seconds=0.0005,
    fixed_seconds=0.02,
    hop_seconds=1e-4,
    bus_rate=1e9,
    collectives=STEPS,
)
LOAD = RunWork(
    users=1000, participants=100, evaluated_users=1000, rounds=50, evaluate_every=10, checkpoint_every=5,
    upload_bytes=4e6,
    download_bytes=4e6, state_bytes=12e6, summed_numbers=10**6, needs_only_sums=True, same_download=True,
)  # fmt: skip
HERE = Cluster(machines=1, processes=4, cores=8, link=1e9, latency=1e-3, disk=5e8, price=2.0)
FOUND = Measurement(
    parts=PARTS,
    parts_below_cohort=replace(PARTS, training_core_seconds=0.8),
    cohort=8,
    needs_only_sums=True,
    same_download=True,
    summed_numbers=100,
    state_bytes=10**6,
    disk=1e8,
    amounts=(8, 80_000, 8_000),
)


# ---------------------------------------------------------------- equations


@pytest.mark.parametrize(
    ("cores", "processes", "threads", "each"),
    [(8, 4, None, 2), (8, 3, None, 2), (8, 4, 1, 1), (2, 4, 1, 0.5), (2, 4, None, 0.5), (8, 1, 3, 3), (2, 1, 8, 2)],
)
def test_cores_of_a_process(cores: int, processes: int, threads: int | None, each: float) -> None:
    """No more than its threads, and no more than are left for it."""
    assert timing.cores_of_process(cores, processes, threads) == each
    assert Cluster(machines=1, processes=processes, gpus=True, link=1, latency=0, disk=1).cores_per_process == 1


@pytest.mark.parametrize(("users", "processes"), [(10, 3), (9, 3), (1, 4), (100, 7)])
def test_the_process_that_has_most_is_waited_for(users: int, processes: int) -> None:
    dealt = [0] * processes
    for number in range(users):
        dealt[number % processes] += 1
    assert timing.users_per_process(users, processes) == max(dealt)


def test_local_work_is_that_of_one_process_after_another_users() -> None:
    """User by user: steps and messages of whoever takes part, and a tenth of all evaluations."""
    longest = 0.0
    for rank in range(4):
        here = sum(0.5 + 0.01 for user in range(100) if user % 4 == rank)
        here += sum(0.2 for user in range(1000) if user % 4 == rank) / 10
        longest = max(longest, here / 2)  # two cores
    assert timing.compute_seconds(LOAD, PARTS, HERE) == pytest.approx(longest)


@pytest.mark.parametrize("processes", [2, 3, 4, 7, 64])
def test_a_reduction_goes_around_a_ring(processes: int) -> None:
    """Each of P parts is passed on P-1 times until it is summed, and P-1 times until all have it."""
    part, seconds = 8e6 / processes, 0.0
    for _ in range(2):
        for _ in range(processes - 1):
            seconds += part / 1e9  # all links at once
    assert timing.ring_seconds(8e6, processes, 1e9) == pytest.approx(seconds)


@pytest.mark.parametrize("processes", [2, 3, 4, 5, 64, 65])
def test_a_broadcast_doubles_those_who_have_it(processes: int) -> None:
    have, seconds = 1, 0.0
    while have < processes:
        have, seconds = 2 * have, seconds + 4e6 / 1e9
    assert timing.tree_seconds(4e6, processes, 1e9) == pytest.approx(seconds)


def test_uploads_of_others_go_through_one_link() -> None:
    sizes = [3e6] * 12  # the first of four processes has three users of its own
    assert timing.gather_seconds(sum(sizes), 4, 1e9) == pytest.approx(sum(sizes[3:]) / 1e9)


@pytest.mark.parametrize(("processes", "expected"), [(2, 20 + 4 + 2 + 10), (4, 3 * (20 + 4 + 2) + 2 * 10)])
def test_small_messages_wait_for_each_other(processes: int, expected: int) -> None:
    assert timing.num_hops(STEPS, processes) == expected


def test_the_slowest_link_counts() -> None:
    """Between machines that of the network, within one its own."""
    near = timing.network_seconds(LOAD, PARTS, HERE)
    assert near == pytest.approx(2 * 3 / 4 * 8e6 / 1e9 + 2 * 4e6 / 1e9 + timing.num_hops(STEPS, 4) * 1e-4)
    far = timing.network_seconds(LOAD, PARTS, replace(HERE, machines=2, link=1e8))
    assert far == pytest.approx(2 * 7 / 8 * 8e6 / 1e8 + 3 * 4e6 / 1e8 + timing.num_hops(STEPS, 8) * 1.1e-3)
    assert timing.network_seconds(LOAD, PARTS, replace(HERE, processes=1)) == 0


def test_a_server_that_looks_at_every_upload_gets_them_all() -> None:
    stack = replace(LOAD, needs_only_sums=False, same_download=False)
    through = 2 * 3 / 4 * 100 * 4e6 / 1e9
    assert timing.network_seconds(stack, PARTS, HERE) == pytest.approx(through + timing.num_hops(STEPS, 4) * 1e-4)
    assert timing.server_seconds(stack, PARTS, HERE) == pytest.approx(0.02 + 100 * (0.003 / 2 + 0.0005))
    assert timing.server_seconds(LOAD, PARTS, HERE) == pytest.approx(0.02 + 100 * 0.0005)
    assert timing.server_seconds(LOAD, PARTS, replace(HERE, processes=1)) == pytest.approx(0.02 + 100 * 0.003 / 8)


def test_checkpoints_are_of_all_users_and_records_of_those_who_took_part() -> None:
    """A machine's processes write to one disk; what steps hide is nothing."""
    assert timing.disk_seconds(LOAD, PARTS, HERE) == pytest.approx(1000 * 12e6 / 5e8 / 5)
    stored = replace(LOAD, on_disk=True)
    assert timing.disk_seconds(stored, PARTS, HERE) == 0  # 2.4 GB in 4.8 s, steps take longer
    slow = replace(HERE, disk=1e7)
    busy = timing.compute_seconds(LOAD, PARTS, HERE)
    assert timing.disk_seconds(stored, PARTS, slow) == pytest.approx(2 * 100 * 12e6 / 1e7 - busy)


def test_what_binds_is_the_largest() -> None:
    one = Round(compute=1.0, server=2.0, network=4.0, disk=3.0)
    assert (one.seconds, one.longest_part) == (10.0, "network")
    assert timing.run_price(7200, 3, 2.5) == 15.0


def test_a_hundred_times_as_many_users_on_a_hundred_times_as_many_machines() -> None:
    """Local work stays; words about everybody, and waiting for everybody, grow with them."""
    one = timing.estimate_round(LOAD, PARTS, HERE)
    many = timing.estimate_round(
        replace(LOAD, users=100_000, participants=10_000, evaluated_users=100_000), PARTS, replace(HERE, machines=100)
    )
    assert many.compute == pytest.approx(one.compute)
    assert many.disk == pytest.approx(one.disk)
    assert many.server == pytest.approx(0.02 + 10_000 * 0.0005)
    assert many.network > one.network


# ---------------------------------------------------------------- from what was measured


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("adds", [True, False])
def test_parts_are_found_again_in_the_times_that_follow_from_them(count: int, adds: bool) -> None:
    """Rounds without steps: what is fixed, what waits, and users whose messages are made at the same time."""
    each = timing.cores_of_process(2, count, 1)
    few, many = 4, 16
    local, looks = (
        PARTS.message_core_seconds / each,
        0.0 if adds and count > 1 else PARTS.aggregation_core_seconds / each,
    )
    words = PARTS.report_seconds if count > 1 else 0.0
    waits = timing.num_hops(STEPS, count) * PARTS.hop_seconds if count > 1 else 0.0
    counts = {"all_gather": 20, "broadcast": 10, "reduce": 1, "send": 3 * (count - 1), "recv": count - 1}
    told: dict[str, Any] = {
        "receive_s": local / 2, "send_s": local / 2, "sum_s": 0.0, "aggregate_s": PARTS.aggregation_core_seconds / each,
        "needs_only_sums": adds, "same_download": True, "summed_numbers": 7, "state_bytes": 9, "disk": 1e8, "cohort": 4,
        "amounts": [4, 400, 50],
        "full_batch_user_s": PARTS.training_core_seconds / each / 3,
        "planned_batch_user_s": 2 * PARTS.training_core_seconds / each / 3,
        "evaluation_s": 0.2 / each,
        "other_work_users": [few, many], "collectives": counts if count > 1 else {},
        "hop": PARTS.hop_seconds, "bus": PARTS.bus_rate,
        "other_work_s": [0.02 + waits + n * (local + count * (looks + words)) for n in (few, many)],
    }  # fmt: skip
    found = machines._to_measurement(told, count, each, 3.0, None)
    assert found.amounts == (4, 1200, 50)  # a third of the local steps were measured
    expected = replace(PARTS, report_seconds=words)
    if count == 1:
        expected = replace(PARTS, report_seconds=0.0, collectives=Collectives())
    for name in (field.name for field in fields(Parts) if field.name != "collectives"):
        assert getattr(found.parts, name) == pytest.approx(getattr(expected, name)), name
    assert found.parts.collectives == expected.collectives
    assert found.parts_below_cohort.training_core_seconds == pytest.approx(2 * PARTS.training_core_seconds)
    assert machines._to_measurement(told, count, each, 1.0, 42.0).parts.training_core_seconds == 42.0


def cost_of(names: tuple[str, ...], exchanges: int) -> MethodCost:
    """Of a method of which only messages count."""
    nothing = Flops()
    user = UserCost(
        names=names, experts=0, parameters={}, upload_bytes=10, download_bytes=20, forward=nothing, training=nothing,
        round=nothing,
    )  # fmt: skip
    held = MemoryCost(
        **dict.fromkeys(("weights_bytes", "adapters_bytes", "moments_bytes"), 0), **dict.fromkeys(PASS, 0)
    )
    return MethodCost(
        method="fedavg", users=(user,), exchanges=exchanges, users_per_step=1, micro_batch=1, machine=held,
        own_device=held, fits=True, advice="",
    )  # fmt: skip


PASS = ("gradients_bytes", "activations_bytes", "allocator_bytes")


def test_populations_are_planned_with_the_recipes_participation() -> None:
    recipe = recipe_of("random:llama", "fedavg", users=4, **{"training.participation": 0.5, "training.rounds": 10})
    cost = cost_of(("a", "b", "c", "d"), exchanges=9)
    load = run_work(recipe, cost, FOUND, 10**6)
    assert (load.users, load.participants, load.evaluated_users, load.exchange_share) == (10**6, 500_000, 10**6, 0.9)
    listed = recipe.with_changes({"training.participation": [["user0"], ["user1", "user2", "user3"]]})
    assert run_work(listed, cost, FOUND, 1000).participants == 500
    planned = plan_time(load, FOUND, HERE)
    assert planned.money == pytest.approx(planned.run_seconds / 3600 * 2.0)
    assert planned.state_bytes == 10**12
    few = plan_time(run_work(recipe, cost, FOUND, 4), FOUND, HERE)  # a user a process: not as many as go together
    assert few.round.compute == pytest.approx(
        timing.compute_seconds(run_work(recipe, cost, FOUND, 4), FOUND.parts_below_cohort, HERE)
    )


def test_a_guard_trains_twice_and_sends_nothing_more() -> None:
    recipe = recipe_of("random:llama", "fedavg", users=4)
    cost, local = cost_of(("a", "b", "c", "d"), exchanges=9), recipe.with_changes({"method": "local"})
    plain, guarded, useless = (
        run_work(each.with_changes({"evaluation.guard": guard}), cost, FOUND, 4)
        for each, guard in ((recipe, None), (recipe, "local"), (local, "local"))
    )
    assert (plain.trainings, guarded.trainings, useless.trainings) == (1, 2, 1)
    more = timing.compute_seconds(guarded, FOUND.parts, HERE) - timing.compute_seconds(plain, FOUND.parts, HERE)
    participants = timing.users_per_process(4, HERE.num_processes)
    assert more == pytest.approx(participants * FOUND.parts.training_core_seconds / HERE.cores_per_process)


def test_evaluations_are_planned_as_often_as_a_run_has_them() -> None:
    """All together score at most 0.23 of what is trained on."""
    changes = {
        "training.participation": 0.5,
        "training.rounds": 40,
        "evaluation.every": "auto",
        "evaluation.first": True,
    }
    recipe, cost = recipe_of("random:llama", "fedavg", users=4, **changes), cost_of(("a", "b", "c", "d"), exchanges=9)
    found = replace(FOUND, amounts=(8, 80_000, 80_000))  # 4.6 evaluations
    assert run_work(recipe, cost, found, 1000).evaluate_every == 14
    assert run_work(recipe.with_changes({"evaluation.users": 100}), cost, found, 1000).evaluate_every == 5
    assert run_work(recipe.with_changes({"evaluation.every": 3}), cost, found, 1000).evaluate_every == 3


@pytest.mark.parametrize(
    "changes", [{"adapters.rank": [2, 4]}, {"method": {"name": "comigs-1gxs", "specialists": [1, 2]}}]
)
def test_users_who_are_unlike_stand_for_nobody(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"--machines: (adapters\.rank|method\.specialists) "):
        measure(recipe_of("random:llama", "fedavg").with_changes(changes), HERE, 2)


def test_what_processes_tell_each_other_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *args: args)
    before = dist.broadcast
    with timing.count_collectives() as counts:
        assert dist.broadcast(1, 2) == (1, 2)
        dist.broadcast(3)
    assert (counts["broadcast"], counts["reduce"]) == (2, 0)
    assert dist.broadcast is before


def test_one_process_measures_itself(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes part in rounds without steps is no other than before; nothing is left behind."""
    monkeypatch.chdir(recipe_file.parent)
    monkeypatch.setattr(timing, "MAX_SENDING", 8)
    monkeypatch.setattr(timing, "ROUNDS", 3)
    before = sorted(recipe_file.parent.iterdir())
    recipe = load_recipe(recipe_file).with_changes({"method": "fedavg", "training.local_steps": 1})
    found = timing.measure_parts(recipe, 2, None)
    assert (
        found["other_work_users"] == [max(1, found["cohort"] // 4), found["cohort"]]
        or found["other_work_users"][1] == 8
    )
    keys = ("full_batch_user_s", "planned_batch_user_s", "evaluation_s", "send_s", "aggregate_s", "disk")
    assert all(found[key] > 0 for key in keys)
    assert (found["needs_only_sums"], found["same_download"], found["collectives"]) == (True, True, {})
    assert sorted(recipe_file.parent.iterdir()) == before


# ---------------------------------------------------------------- against real rounds


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "planned_time.py"


@pytest.mark.slow
def test_a_planned_round_takes_as_long_as_a_real_one() -> None:
    """A wide margin for machines with other work; the benchmark's table has what was seen."""
    command = [sys.executable, str(BENCHMARK), "text, sums", "--processes", "1,2", "--turns", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        assert abs(json.loads(line)["off"]) < 0.5, line


@pytest.mark.parametrize("gpus", [True, False])
def test_times_of_gpus_do_not_depend_on_the_cores_here(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many cores here as in the cluster, seconds in the plan are the measured ones, too."""
    times = {
        **dict.fromkeys(("receive_s", "send_s", "sum_s", "aggregate_s"), 3.0),
        **dict.fromkeys(("full_batch_user_s", "planned_batch_user_s", "evaluation_s"), 3.0),
        "other_work_s": (1.0, 2.0),
        "other_work_users": (1, 2),
        "collectives": {},
        "amounts": (2, 10, 10),
        "cohort": 2,
        "needs_only_sums": True,
        "same_download": True,
        "summed_numbers": 1,
        "state_bytes": 1,
        "disk": 1.0,
    }
    monkeypatch.setattr(machines, "_measure_in_processes", lambda *_: times)
    monkeypatch.setattr(machines, "cores", lambda: 2)
    cluster = replace(HERE, gpus=gpus, cores=2)
    measured = measure(recipe_of("random:llama", "fedavg"), cluster, 2)
    assert measured.parts.evaluation_core_seconds / cluster.cores_per_process == 3.0
