"""Parameters and bytes of a plan against those of a real federation, for every method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from exchanges import exchanged

from comingle.config import Recipe, parse_recipe
from comingle.cost.counts import count_users
from comingle.cost.planning import compare_with_paper, federate_bare, plan, user_names, with_method
from comingle.cost.records import Difference, UserCost
from comingle.cost.skeleton import load_skeleton
from comingle.methods import REGISTRY, make
from comingle.models.base import Base
from comingle.utils.errors import ComingleError, RecipeError
from federations import download_all, play_round

NAMES = ("ann", "bob", "cem")


def recipe_of(base: str, method: Any, **changes: Any) -> Recipe:
    content = {
        "base": base,
        "method": method,
        "data": {"users": dict.fromkeys(NAMES, "nowhere")},
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16},
        "runtime": {"dtype": "float32", "device": "cpu"},
    }
    return parse_recipe(content).with_changes(changes)


def planned(recipe: Recipe, names: Sequence[str] = NAMES) -> list[UserCost]:
    base = load_skeleton(recipe.base, dtype="float32", device="cpu")
    return count_users(federate_bare(with_method(recipe, recipe.method.name), base, tuple(names)), tuple(names))


def check(costs: list[UserCost], federation: Any) -> None:
    """Every user of the federation is in ``costs`` once, with its counts, and their bytes are those of an exchange."""
    clients = federation.clients
    if clients.method.placement.once:  # costs are those of later exchanges
        play_round(federation, 0)
        download_all(federation)
    parameters, sent = clients.trainable_parameters(), clients.upload_bytes()
    if clients.method.placement.pooled:
        assert [c.trainable_parameters for c in costs] == parameters[:1]
        assert [c.upload_bytes for c in costs] == [0]
        return
    assert sorted(name for cost in costs for name in cost.names) == sorted(user.name for user in clients.users)
    for i, user in enumerate(clients.users):
        (cost,) = (c for c in costs if user.name in c.names)
        assert cost.trainable_parameters == parameters[i], user.name
        assert cost.upload_bytes == sent[i], user.name
    assert (total(costs, "upload_bytes"), total(costs, "download_bytes")) == exchanged(federation)


def total(costs: list[UserCost], key: str) -> int:
    return sum(getattr(cost, key) * len(cost.names) for cost in costs)


ON_ADAPTERS = [n for n in REGISTRY if make(n).placement.mixture is None and not make(n).placement.needs]


@pytest.mark.parametrize("base", ["random:llama", "random:gpt2"])
@pytest.mark.parametrize("method", ON_ADAPTERS)
@pytest.mark.sampled(10)
def test_counts_are_those_of_a_real_federation(method: str, base: str, federate: Any) -> None:
    costs = planned(recipe_of(base, method))
    check(costs, federate(method, users=NAMES, base=base, dtype="float32"))
    assert len(costs) == 1  # all users are alike


@pytest.mark.parametrize("specialists", [[1, 3, 1], [0, 1, 2]])
def test_users_of_unequal_size_are_counted_each(specialists: list[int], federate: Any) -> None:
    method = {"name": "comigs-1gxs", "specialists": specialists}
    costs = planned(recipe_of("random:opt", method))
    check(costs, federate(method, users=NAMES, base="random:opt", dtype="float32"))
    by_user = {name: cost for cost in costs for name in cost.names}
    assert [by_user[name].experts for name in NAMES] == [1 + s for s in specialists]
    assert [by_user[name].parameters["router"] > 0 for name in NAMES] == [s > 0 for s in specialists]
    assert len(costs) == len(set(specialists))


def test_users_of_unequal_rank_are_counted_each(federate: Any) -> None:
    ranks = {"adapters.rank": [2, 4, 2]}
    costs = planned(recipe_of("random:gpt2", "hetlora", **ranks))
    check(costs, federate("hetlora", users=NAMES, base="random:gpt2", dtype="float32", changes=ranks))
    small, large = sorted(costs, key=lambda cost: cost.trainable_parameters)
    assert (small.names, large.names) == (("ann", "cem"), ("bob",))
    assert large.trainable_parameters == 2 * small.trainable_parameters


def test_a_user_who_stands_for_many_is_counted_as_all_of_them(federate: Any) -> None:
    """With PCL everybody downloads what everybody else sends; one user at a time is in a pass."""
    costs = planned(recipe_of("random:llama", "pcl", **{"runtime.users_per_step": 1}))
    assert [cost.names for cost in costs] == [NAMES]
    check(costs, federate("pcl", users=NAMES, base="random:llama", dtype="float32"))


def test_picking_a_model_costs_a_pass_of_each_over_as_much_text() -> None:
    (picked,), (plain,) = (planned(recipe_of("random:llama", name)) for name in ("ifca", "fedmerge"))
    assert plain.forward == picked.forward
    tokens = plain.round.total / plain.training.total
    assert picked.round.total - plain.round.total == pytest.approx(5 * tokens * plain.forward.total, rel=1e-9)


# ---------------------------------------------------------------- the paper's table


def table3(base: str, **method: int) -> tuple[list[Difference], Base]:
    content = {
        "base": base,
        "method": {"name": "comigs-1g1s", **method},
        "data": {"users": {"ann": "nowhere"}},
        "training": {"rounds": 30, "batch_size": 1},
    }
    bare = load_skeleton(base, dtype="bfloat16", device="cpu")
    return compare_with_paper(parse_recipe(content), bare), bare


def test_counted_its_way_the_papers_table_3_comes_out_and_the_truth_beside_it() -> None:
    """5 MFLOPs and 1.25%, 0.035 MiB and 1.25%, 1.41 MiB and 50%; then 38.5% of what really travels."""
    (forward, training, memory, upload), base = table3("random:gpt2?layers=12&dim=768&heads=12&vocab=50257")
    assert base.model.num_parameters() == 124_439_808
    assert (round(forward.theirs / 1e6), forward.theirs_share) == (5, 0.0125)
    assert (round(memory.theirs / 2**20, 3), memory.theirs_share) == (0.035, 0.0125)
    assert (round(upload.theirs / 2**20, 2), upload.theirs_share) == (-1.41, -0.5)
    assert upload.true == pytest.approx((1_179_648 - 1_916_928) * 4, abs=100)  # float32, and a few digits of shapes
    assert upload.true_share == pytest.approx(-0.385, abs=1e-3)  # of messages, whose headers are alike
    assert "1.180M of 1.917M" in upload.why
    assert forward.true == 18_432 * 2 * 128
    # The base takes 32 GFLOPs for 128 tokens, and 2 sets of LoRA 490 MFLOPs (earlier version, App. B.1).
    assert forward.true / forward.true_share == pytest.approx(32e9 + 490e6, rel=0.01)
    assert memory.true == 18_432 * 12  # with two moments
    assert training.theirs is None
    assert 0.32 < training.true_share < 1 / 3


def test_a_guard_costs_a_second_training_and_its_tensors() -> None:
    """Not a second upload, nor anything with a method that shares nothing."""

    def plan_of(method: str, guard: str | None) -> Any:
        (cost,) = plan(recipe_of("random:llama", method, **{"evaluation.guard": guard})).methods
        return cost

    plain, guarded = plan_of("fedavg", None), plan_of("fedavg", "local")
    for before, after in zip(plain.users, guarded.users, strict=True):
        assert (after.round, after.training) == (before.round * 2, before.training * 2)
        assert (after.upload_bytes, after.forward) == (before.upload_bytes, before.forward)
    assert guarded.machine.moments_bytes == 2 * plain.machine.moments_bytes
    assert plain.machine.adapters_bytes < guarded.machine.adapters_bytes < 2 * plain.machine.adapters_bytes
    assert plan_of("local", "local") == plan_of("local", None)


def test_routers_cost_passes_of_their_own() -> None:
    """Every 30 iterations 10 steps: a third of a forward pass more, and a little less than that backward."""
    (_, training, *_), _ = table3("random:llama")
    assert 0.25 < training.true_share < 1 / 3
    (_, often, *_), _ = table3("random:llama", router_every=10)
    assert often.true_share == pytest.approx(3 * training.true_share, rel=0.01)


# ---------------------------------------------------------------- who the users are


def test_users_are_named_by_the_recipe_without_reading_text() -> None:
    assert user_names(recipe_of("random:llama", "local")) == NAMES
    assert user_names(recipe_of("random:llama", "local"), 2) == ("user 1", "user 2")
    listed = {"path": "nobody/nothing", "user": "topic", "users": ["b", "a"]}
    assert user_names(parse_recipe({"data": {"dataset": listed}})) == ("b", "a")


def test_users_of_a_file_of_rows_are_found_in_it(tmp_path: Any) -> None:
    (tmp_path / "rows.csv").write_text("text,topic\nx y,sea\nz,sky\nw,sea\n")
    recipe = parse_recipe({"data": {"dataset": {"path": str(tmp_path / "rows.csv"), "user": "topic"}}})
    assert user_names(recipe) == ("sea", "sky")


def test_rows_out_of_reach_ask_for_a_number_of_users(tmp_path: Any) -> None:
    recipe = parse_recipe({"data": {"dataset": {"path": str(tmp_path / "absent.csv"), "user": "topic"}}})
    with pytest.raises(ComingleError, match=r"absent.csv: .*--users N$"):
        user_names(recipe)
    assert len(user_names(recipe, 5)) == 5


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "ensemble",
            {},
            "method ensemble: .*data.kind: samples",
        ),
        ("floral", {"adapters.rank": [2, 2, 4]}, r"method floral: adapters.rank is \[2, 2, 4\]"),
    ],
)
def test_what_cannot_be_run_is_not_counted_either(method: str, changes: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        planned(recipe_of("random:llama", method, **changes))
