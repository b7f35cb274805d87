"""Who takes part, in which cohorts, with which weight."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from comingle.config import parse_recipe
from comingle.config.settings import RuntimeSection, TrainingSection
from comingle.methods import make
from comingle.training.plan import make_plan
from comingle.training.server import averaging_weights
from comingle.training.settings import TOKENS_PER_PASS, RunPlan, cohorts, participants, pass_size
from comingle.utils.errors import RecipeError
from federations import exchange

CPU = torch.device("cpu")
FEDAVG = make("fedavg")
make_run_plan = partial(RunPlan, method=FEDAVG)
NAMES = [f"user {i}" for i in range(10)]


def plan_of(*, context: int, **runtime: int) -> RunPlan:
    return make_run_plan(training=TrainingSection(context=context), runtime=RuntimeSection.model_validate(runtime))


def test_everybody_takes_part_by_default() -> None:
    assert [participants(make_run_plan(), number, NAMES[:4]) for number in range(3)] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize(
    ("fraction", "users", "count"), [(0.5, 4, 2), (0.5, 5, 3), (0.7, 10, 7), (0.01, 3, 1), (1, 3, 3)]
)
def test_a_fraction_is_rounded_up(fraction: float, users: int, count: int) -> None:
    drawn = [participants(make_run_plan(participation=fraction), number, NAMES[:users]) for number in range(20)]
    assert all(len(members) == count and members == sorted(set(members)) for members in drawn)
    assert {user for members in drawn for user in members} == set(range(users))


def test_a_draw_depends_on_seed_and_round_alone() -> None:
    half, other = make_run_plan(participation=0.5), make_run_plan(participation=0.5, seed=1)
    drawn = [participants(half, number, NAMES[:8]) for number in range(10)]
    assert [participants(half, number, NAMES[:8]) for number in reversed(range(10))] == drawn[::-1]
    assert len({tuple(members) for members in drawn}) > 1
    assert [participants(other, number, NAMES[:8]) for number in range(10)] != drawn


def test_a_draw_is_of_names_whatever_their_order() -> None:
    plan = make_run_plan(participation=0.5)
    for number in range(10):
        drawn = {NAMES[i] for i in participants(plan, number, NAMES)}
        again = {NAMES[::-1][i] for i in participants(plan, number, NAMES[::-1])}
        assert again == drawn


def test_everybody_is_drawn_equally_often() -> None:
    plan = make_run_plan(participation=0.3)
    drawn = [user for number in range(2000) for user in participants(plan, number, NAMES)]
    counts = torch.tensor(drawn).bincount(minlength=len(NAMES))
    assert (counts - 600).abs().max() < 4 * (2000 * 0.3 * 0.7) ** 0.5


def test_a_list_names_the_users_of_each_round_and_repeats() -> None:
    plan = make_run_plan(participation=((2, 0), (1,)))
    assert [participants(plan, number, NAMES[:3]) for number in range(4)] == [[0, 2], [1], [0, 2], [1]]


def test_a_list_with_a_number_too_high_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"training.participation: .*\b3; .*0 to 2"):
        participants(make_run_plan(participation=((3,),)), 0, NAMES[:3])


def test_names_in_a_recipe_become_numbers() -> None:
    content: dict[str, Any] = {
        "data": {"users": {"ann": "a", "bob": "b"}},
        "training": {"participation": [["bob"], ["ann"]]},
    }
    assert make_plan(parse_recipe(content), FEDAVG, ["ann", "bob"]).participation == ((1,), (0,))
    with pytest.raises(RecipeError, match=r"training.participation: .*'bob'.*ann, cem"):
        make_plan(parse_recipe(content), FEDAVG, ["ann", "cem"])


def test_cohorts_are_consecutive_and_bounded() -> None:
    assert cohorts([0, 2, 3, 5, 6], 2) == [[0, 2], [3, 5], [6]]
    assert cohorts([4, 7], 9) == [[4, 7]]


def test_portions_bound_the_tokens_of_a_pass() -> None:
    room = TOKENS_PER_PASS["cpu"]
    for batch, context in [(64, 128), (1, 16), (8, room), (3, 2 * room)]:
        found = pass_size(make_run_plan(training=TrainingSection(context=context)), CPU, batch)
        assert found.users * found.sequences * context <= max(room, context)
        assert 1 <= found.sequences <= batch
    chosen = pass_size(plan_of(context=16, users_per_step=3, micro_batch=2), CPU, 64)
    assert (chosen.users, chosen.sequences) == (3, 2)


def test_a_micro_batch_is_no_larger_than_the_batch() -> None:
    assert pass_size(plan_of(context=16, micro_batch=16), CPU, 4).sequences == 4


@pytest.mark.parametrize(("weighting", "shares"), [("uniform", [0.5, 0.5]), ("tokens", [0.25, 0.75])])
def test_means_are_of_those_present_equal_or_by_the_training_tokens(
    federate: Any, make_user: Any, weighting: str, shares: list[float]
) -> None:
    users = [make_user("ann", train=100), make_user("bob", train=200), make_user("cem", train=300)]
    federation = federate("fedavg", users=users, changes={"training.weighting": weighting})
    rows = federation.clients.state.rows
    rows += torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=rows.dtype)
    expected = shares[0] * rows[0] + shares[1] * rows[2]
    exchange(federation, [0, 2])
    torch.testing.assert_close(rows, expected.expand(3, -1), rtol=1e-12, atol=1e-14)


def test_weights_are_in_proportion_to_counts() -> None:
    assert averaging_weights(torch.tensor([10, 30])).tolist() == [0.25, 0.75]
    assert averaging_weights(torch.ones(4)).tolist() == [0.25] * 4
