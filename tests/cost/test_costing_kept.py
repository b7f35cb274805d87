"""Packed weights, checkpointed layers and users on disk: what a plan counts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import planned, recipe_of

from comingle.config import load_recipe
from comingle.cost.memory import Writes, peak_memory, storage_bytes
from comingle.cost.planning import method_cost, plan
from comingle.cost.skeleton import load_skeleton
from comingle.models.loading import load_base
from comingle.runs import api
from comingle.utils.errors import RecipeError


@pytest.mark.parametrize(("bits", "per_byte", "block"), [("8bit", 1, 256), ("4bit", 2, 64)])
@pytest.mark.slow
def test_packed_weights_are_counted(bits: str, per_byte: int, block: int) -> None:
    """The weights, and a scale for each block of them; embeddings and head stay float32."""
    name = "random:llama?layers=2&dim=64&heads=4&mlp=256&vocab=512"
    plain, packed = (load_skeleton(name, dtype="float32", device="cpu", quantise=q) for q in ("none", bits))
    numbers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256)  # half as many heads for keys and values
    saved = storage_bytes(plain.model) - storage_bytes(packed.model)
    assert saved == 4 * numbers - (numbers // per_byte + 4 * numbers // block)
    cost = method_cost(recipe_of(name, "fedavg", quantise=bits), packed, ("a", "b"), free=10**12)
    assert cost.machine.weights_bytes == storage_bytes(packed.model)
    whole = method_cost(recipe_of(name, "fedavg"), plain, ("a", "b"), free=10**12)
    assert cost.users == whole.users
    assert 0 <= cost.machine.pass_bytes - whole.machine.pass_bytes <= 4 * numbers // 2  # one layer's


def test_packed_weights_are_as_large_as_those_of_a_run() -> None:
    for bits in ("8bit", "4bit"):
        real = load_base("random:gpt2", dtype="float32", device="cpu", quantise=bits)  # type: ignore[arg-type]
        bare = load_skeleton("random:gpt2", dtype="float32", device="cpu", quantise=bits)
        assert storage_bytes(real.model) == storage_bytes(bare.model)


@pytest.mark.slow
def test_checkpointed_layers_hold_less() -> None:
    name = "random:llama?layers=6&dim=64&heads=4"
    plain, checkpointed = (
        planned(recipe_of(name, "fedavg", **{"runtime.gradient_checkpointing": on})) for on in (False, True)
    )
    assert peak_memory(checkpointed).pass_bytes < peak_memory(plain).pass_bytes / 2


def on_disk(store: str, users: int, method: str = "fedavg", **changes: Any) -> Any:
    few = {"training.context": 16, "training.batch_size": 2, "runtime.users_per_step": 2, "training.rounds": 4}
    recipe = recipe_of("random:llama", method, users=2, **few, **{"runtime.store": store}, **changes)
    base = load_skeleton(recipe.base, dtype="float32", device="cpu")
    names = tuple(f"user {i}" for i in range(users))
    return method_cost(recipe, base, names, 10**12, participation=4 / users)


@pytest.mark.slow
def test_memory_of_users_on_disk_is_that_of_cohorts() -> None:
    """What grows with everybody are 20 bytes for places."""
    few, many = (on_disk("disk", users) for users in (2_000, 10_000))
    assert many.machine.total_bytes - few.machine.total_bytes == 8_000 * 20
    assert on_disk("memory", 10_000).machine.total_bytes > many.machine.total_bytes + 9_000 * 8 * numbers_of(few)
    assert many.machine.moments_bytes == few.machine.moments_bytes
    assert on_disk("disk-bf16", 2_000).machine.moments_bytes < few.machine.moments_bytes


def numbers_of(cost: Any) -> int:
    return cost.users[0].trainable_parameters


@pytest.mark.slow
def test_bytes_on_disk_are_those_of_whoever_took_part() -> None:
    """All 4 of 4 users in 4 rounds with a checkpoint every 5: a record of model and moments each."""
    cost = on_disk("disk", 4)
    numbers = 4 * numbers_of(cost)
    small = 4 * (2 * 16 + 4 * 8)  # heads, and four whole numbers of each user
    assert cost.store_bytes == 12 * numbers + small
    half = on_disk("disk-bf16", 4)
    assert half.store_bytes == 8 * numbers + small
    assert on_disk("memory", 4).store_bytes == 0


@pytest.mark.parametrize(
    ("every", "keep", "rounds", "times"), [(1, 2, 10, 4), (2, 2, 10, 4), (1, 1, 10, 3), (5, 2, 10, 2), (1, 2, 1, 1)]
)
def test_records_that_checkpoints_name_are_counted(every: int, keep: int, rounds: int, times: int) -> None:
    """As many as real stores had after such runs of 8 users who all took part."""
    writes = Writes(
        users=8,
        participants=8,
        evaluated_users=0,
        rounds=rounds,
        evaluate_every=100,
        checkpoint_every=every,
        kept_checkpoints=keep,
    )
    assert writes.max_moment_records() == times * 8


@pytest.mark.slow
def test_a_store_is_no_larger_than_planned(recipe_file: Path, tmp_path: Path) -> None:
    """And not much smaller: two of three users a round, all of whom are evaluated."""
    recipe = load_recipe(recipe_file).with_changes(
        {"training.participation": 0.6, "runtime.store": "disk", "checkpoints.every": 1, "method": "fedavg"}
    )
    api.run(recipe, out=tmp_path / "run")
    found = sum(path.stat().st_size for path in (tmp_path / "run" / "store").glob("*.bin"))
    (cost,) = plan(recipe).methods
    assert 0.7 * cost.store_bytes < found <= cost.store_bytes


def test_what_the_store_refuses_is_refused_before() -> None:
    with pytest.raises(RecipeError, match=r"method centralized: .*runtime.store: memory"):
        on_disk("disk", 4, method="centralized")


@pytest.mark.slow
def test_the_best_round_is_kept_beside_the_last() -> None:
    """Nobody's validation data is asked for, as none is read."""
    last, best = (
        planned(recipe_of("random:gpt2", "fedavg", **{"evaluation.select": kind})) for kind in ("last", "best")
    )
    state = best.federation.clients.state
    kept = sum(t.nbytes for t in state.best.values())
    assert kept > 3 * state.rows.nbytes
    assert peak_memory(best).adapters_bytes - peak_memory(last).adapters_bytes == kept
