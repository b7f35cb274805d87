"""Membership with reference models: it succeeds where models have learnt windows by heart, and fails where not."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

import comingle
from comingle.audits.canaries import (
    MIN_WINDOWS,
    SERVER,
    USERS,
    Shadow,
    auc,
    draw_halves,
    indices_to_score,
    likelihood_ratios,
    membership_by_shadows,
    run_shadow,
    windows_of,
)
from comingle.config import Recipe
from comingle.data.text.streams import UserData
from comingle.reports.audit import Shadowed
from comingle.runs.given import given_of
from comingle.runs.session import prepare
from comingle.utils.errors import RecipeError

NAMES = ("ann", "bob", "cem")


def prose(name: str) -> list[str]:
    draw = random.Random(name)
    words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(150)]
    return [" ".join(words[i : i + 25]) + "." for i in range(0, len(words), 25)]


TEXTS = {name: prose(name) for name in NAMES}


def recipe_of(steps: int, method: Any = "fedavg", **more: Any) -> Recipe:
    training = {"rounds": 2, "local_steps": steps, "batch_size": 8, "context": 16}
    content = {
        "base": "random:llama",
        "method": method,
        "adapters": {"rank": 16},
        "data": {"split": {"valid": 0.15, "test": 0.15}, "max_train_tokens": 320},
        "training": {**training, "experts": {"learning_rate": 0.02}},
        "evaluation": {"every": 2, "first": False, "model": "exchanged"},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
        **more,
    }
    return comingle.run(
        content | {"training": {**content["training"], "rounds": 1, "local_steps": 1}}, users=TEXTS
    ).recipe.with_changes({"training.rounds": 2, "training.local_steps": steps})


def attacked(recipe: Recipe, runs: int) -> list[Shadowed]:
    run_data = prepare(recipe, given=given_of(TEXTS, None))
    return membership_by_shadows(
        NAMES, [run_shadow(recipe, run_data, number, lambda clients: []) for number in range(runs)]
    )


def mean_auc(found: list[Shadowed], view: str, of: str = "auc") -> float:
    return fmean(getattr(one, of) for one in found if one.view == view)


# -------------------------------------------------------------------- where it must succeed, and fail


@pytest.mark.slow
def test_windows_that_a_model_has_learnt_by_heart_are_told_and_references_help() -> None:
    found = attacked(recipe_of(60), 6)
    assert mean_auc(found, SERVER) > 0.75
    assert mean_auc(found, SERVER) > mean_auc(found, SERVER, "auc_of_scores")
    assert mean_auc(found, USERS) > 0.52  # of whom everybody has a third
    assert mean_auc(found, SERVER) > mean_auc(found, USERS)


@pytest.mark.slow
def test_with_much_noise_nothing_is_told() -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"mechanism": "local", "noise_multiplier": 20.0, "clip_norm": 1.0, "delta": 1e-5}
    found = attacked(recipe_of(40, privacy=privacy), 6)
    for view in (SERVER, USERS):
        assert 0.35 < mean_auc(found, view) < 0.65


@pytest.mark.slow
def test_nor_where_nothing_is_learnt() -> None:
    recipe = recipe_of(2).with_changes({"training.experts.learning_rate": 1e-9})
    found = attacked(recipe, 6)
    assert 0.35 < mean_auc(found, SERVER) < 0.65


@pytest.mark.parametrize(
    "method", ["comigs-2g", "comigs-1g1s", {"name": "ifca", "models": 2}, {"name": "fedmerge", "models": 2}]
)
def test_methods_with_several_shared_models_are_attacked(method: Any) -> None:
    recipe = recipe_of(1, method)
    run_data = prepare(recipe, given=given_of(TEXTS, None))
    shadow = run_shadow(recipe, run_data, 0, lambda clients: [])
    for view in (SERVER, USERS):
        assert sorted(shadow.scores[view]) == [0, 1, 2]
        assert all(bool(t.isfinite().all()) and bool(t.any()) for t in shadow.scores[view].values())


# -------------------------------------------------------------------- the attack alone


def population(gap: float, runs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Windows that differ in how hard they are far more than in whether they are in."""
    draw = torch.Generator().manual_seed(seed)
    inside = torch.rand(runs, 60, generator=draw) < 0.5
    hard = 3 * torch.randn(60, generator=draw, dtype=torch.float64)
    run = 5 * torch.randn(runs, 1, generator=draw, dtype=torch.float64)  # how far it has trained
    noise = torch.randn(runs, 60, generator=draw, dtype=torch.float64)
    return hard + run + noise + gap * inside, inside


def aucs(gap: float, runs: int = 8) -> tuple[float, float]:
    """With references and without, mean over populations."""
    told = []
    for seed in range(12):
        scores, inside = population(gap, runs, seed)
        ratios = likelihood_ratios(scores, inside)
        told.append([auc(t[inside].tolist(), t[~inside].tolist()) for t in (ratios, scores)])
    return fmean(one[0] for one in told), fmean(one[1] for one in told)


def test_references_say_how_hard_a_window_is() -> None:
    with_references, without = aucs(1.5)
    assert with_references > 0.8
    assert without < 0.65
    assert aucs(1.5, runs=16)[0] > with_references


def test_they_find_nothing_where_there_is_nothing() -> None:
    assert aucs(0.0)[0] == pytest.approx(0.5, abs=0.04)


def test_it_is_near_the_best_that_can_be() -> None:
    """Who knew all means could do no better than Phi(gap / sqrt 2)."""
    best = 0.5 * (1 + torch.erf(torch.tensor(1.5 / 2)).item())
    assert best - 0.06 < aucs(1.5, runs=32)[0] < best + 0.01


def test_a_run_is_judged_by_the_others_alone() -> None:
    """Its own coins change nothing of what is said of it."""
    scores, inside = population(1.0, 6, 0)
    turned = inside.clone()
    turned[2] = ~turned[2]
    assert torch.equal(likelihood_ratios(scores, inside)[2], likelihood_ratios(scores, turned)[2])
    assert not torch.equal(likelihood_ratios(scores, inside)[1], likelihood_ratios(scores, turned)[1])


def test_coins_all_on_one_side_are_no_fault() -> None:
    scores, inside = population(1.0, 4, 0)
    for side in (torch.ones_like(inside), torch.zeros_like(inside)):
        assert bool((likelihood_ratios(scores, side) == 0).all())


# -------------------------------------------------------------------- halves


def user_of(tokens: int, name: str = "ann") -> UserData:
    stream = torch.arange(tokens, dtype=torch.int32)
    return UserData(name=name, train=stream, valid=stream[:0], test=stream[:5])


def test_a_half_has_the_windows_that_are_in_and_no_other() -> None:
    users = [user_of(205), user_of(100, "bob")]
    parts = draw_halves(users, 9, seed=0, run=1)
    for number, user in enumerate(users):
        kept = parts.with_included(number, user).train
        expected = [
            w for w, inside in zip(windows_of(user.train, 9, most=999), parts.inside[number], strict=True) if inside
        ]
        tail = user.train[len(user.train) // 10 * 10 :]
        assert torch.equal(kept, torch.cat([*expected, tail]))
    assert 4 <= int(parts.inside[0].sum()) <= 16
    assert not torch.equal(parts.inside[0], draw_halves(users, 9, seed=0, run=2).inside[0])


def test_hardly_any_windows_are_left_together_and_not_scored() -> None:
    short = user_of(10 * MIN_WINDOWS - 1)
    parts = draw_halves([short], 9, seed=0, run=0)
    assert torch.equal(parts.with_included(0, short).train, short.train)
    assert len(indices_to_score(MIN_WINDOWS - 1)) == 0
    assert indices_to_score(MIN_WINDOWS).tolist() == list(range(MIN_WINDOWS))
    assert len(indices_to_score(1000)) == len(set(indices_to_score(1000).tolist())) == 64


def test_too_few_runs_say_nothing() -> None:
    scores, inside = population(1.0, 2, 0)
    shadows = [Shadow(scores={SERVER: {0: scores[at]}, USERS: {}}, inside=[inside[at]]) for at in range(2)]
    assert membership_by_shadows(["ann"], shadows) == []
    with pytest.raises(RecipeError, match="shadows: got 2; allowed: 0, or a whole number from 3"):
        comingle.audit("nowhere", shadows=2)
