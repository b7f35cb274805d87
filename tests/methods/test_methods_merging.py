"""FedMerge's equations: against autograd on its objective, and against the public code's line search."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from comingle.methods.fedmerge import (
    column_shares,
    fixed_step,
    head,
    inner_products,
    logit_gradient,
    mix,
    models_gradient,
    state_from_models,
    weight_gradient,
)
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Tree

USERS, MODELS = 5, 3
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def soup() -> Tree:
    return {"body.weight": some(MODELS, 4, 3, seed=1), "head.weight": some(MODELS, 2, 4, seed=2)}


# Two users are away.
@pytest.fixture(params=[(0.1, 0.3, 0.2, 0.15, 0.25), (0.5, 0.0, 0.2, 0.0, 0.3)], ids=["everybody", "sampled"])
def weights(request: pytest.FixtureRequest) -> Tensor:
    return torch.tensor(request.param, dtype=torch.float64)


def objective(merged: Tree, weights: Tensor) -> Tensor:
    """Eq. 3 with a loss of each user's own, which is not quadratic."""
    x = some(USERS, 6, 3, seed=3)
    hidden = torch.einsum("uni,uhi->unh", x, merged["body.weight"]).tanh()
    out = torch.einsum("unh,uoh->uno", hidden, merged["head.weight"])
    losses = (out - some(USERS, 6, 2, seed=4)).square().mean((1, 2))
    return (weights * losses).sum()


def gradients_of_merged(models: Tree, shares: Tensor) -> Tree:
    """``d loss_i / d theta_i``, what users would send after one step of rate 1."""
    merged = {name: t.detach().requires_grad_() for name, t in mix(models, shares).items()}
    found = torch.autograd.grad(objective(merged, torch.ones(USERS, dtype=torch.float64)), list(merged.values()))
    return dict(zip(merged, found, strict=True))


@pytest.mark.parametrize("softmax", [True, False])
def test_gradients_are_those_of_the_objective(weights: Tensor, softmax: bool) -> None:
    logits = some(USERS, MODELS, seed=5).requires_grad_()
    models = {name: t.requires_grad_() for name, t in soup().items()}
    shares = logits.softmax(1) if softmax else logits
    merged = {name: torch.einsum("ij,j...->i...", shares, t) for name, t in models.items()}
    wanted = torch.autograd.grad(objective(merged, weights), [logits, *models.values()])

    fixed, shares = {name: t.detach() for name, t in models.items()}, shares.detach()
    updates = gradients_of_merged(fixed, shares)
    inner = inner_products(fixed, updates, list(fixed))
    found = logit_gradient(shares, inner, weights) if softmax else weight_gradient(inner, weights)
    torch.testing.assert_close(found, wanted[0], **TIGHT)
    moved = models_gradient(weights.unsqueeze(1) * shares, updates)
    for name, expected in zip(models, wanted[1:], strict=True):
        torch.testing.assert_close(moved[name], expected, **TIGHT)


def test_absent_users_keep_their_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.2, 0.0, 0.3], dtype=torch.float64)
    shares = some(USERS, MODELS).softmax(1)
    inner = some(USERS, MODELS, seed=9)
    step = fixed_step(logit_gradient(shares, inner, weights), weights, 0.01)
    assert bool((step[[1, 3]] == 0).all())
    assert bool((step[[0, 2, 4]] != 0).all())


@pytest.mark.parametrize("size", [0.01, 0.3])
def test_the_closed_form_is_the_line_search(weights: Tensor, size: float) -> None:
    """Small steps along the normalised gradient until an entry has moved by more than ``size``."""
    shares, inner = some(USERS, MODELS).softmax(1), some(USERS, MODELS, seed=9)
    plain = shares * (inner - (shares * inner).sum(1, keepdim=True)) * (weights > 0).unsqueeze(1)
    plain = plain / plain.abs().sum()
    moved, tries = torch.zeros_like(plain), 0
    while float(moved.abs().max()) <= size and tries < 10_000:
        moved, tries = moved + size * weights.unsqueeze(1) * plain, tries + 1
    found = fixed_step(logit_gradient(shares, inner, weights), weights, size)
    torch.testing.assert_close(found, moved, rtol=1e-9, atol=1e-12)
    assert size < float(found.abs().max()) < 2 * size


def test_without_a_gradient_there_is_no_step() -> None:
    weights = torch.full((2,), 0.5)
    assert torch.equal(fixed_step(torch.zeros(2, 3), weights, 0.01), torch.zeros(2, 3))


def test_the_search_gives_up_as_the_public_code_does() -> None:
    gradient = torch.zeros(1000, 30)
    gradient[0, 0] = 1e-9
    gradient[1:] = 1e-12
    weights = torch.full((1000,), 1e-3)
    assert float(fixed_step(gradient, weights, 0.01).abs().max()) <= 0.011


def moved_by(shares: list[list[float]], weights: list[float], updates: list[float]) -> list[float]:
    """How far each of the server's numbers moves, with column normalisation and rate 1: ``-sum_i q_ij g_i``."""
    found = column_shares(torch.tensor(shares), torch.tensor(weights))
    gradient = models_gradient(found, {"w": torch.tensor(updates).unsqueeze(1)})["w"]
    return (-gradient.flatten()).tolist()


def test_a_model_that_nobody_present_uses_stays() -> None:
    """Two present users, with updates 1 and 3, who share model 0; eq. 5 sums nothing for model 1."""
    moved = moved_by([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0.25, 0.75, 0.0], [1.0, 3.0, 100.0])
    assert moved == [-(0.25 * 1 + 0.75 * 3), 0.0]


def test_a_column_below_zero_moves_as_eq_5_does_but_for_its_length() -> None:
    """Eq. 5 by hand: -(.5 * -.4 * 1 + .5 * -.3 * 1) = +.35, which normalised is +1; a sum with signs gives -1."""
    shares, weights = [[-0.4], [-0.3]], [0.5, 0.5]
    eq_5 = models_gradient(torch.tensor(weights).unsqueeze(1) * torch.tensor(shares), {"w": torch.ones(2, 1)})["w"]
    assert -float(eq_5) == pytest.approx(0.35)
    assert moved_by(shares, weights, [1.0, 1.0]) == pytest.approx([1.0])


def test_columns_of_both_signs_move_no_further_than_an_update() -> None:
    """1 and -.99 nearly cancel: divided by their sum they would move the model by 199 updates."""
    assert moved_by([[1.0], [-0.99]], [0.5, 0.5], [1.0, -1.0]) == pytest.approx([-1.0])


def test_column_normalised_shares_replace_a_model_by_its_users() -> None:
    """With rate 1 a model moves by a mean of its users' updates: one user, one model, and the model is the upload."""
    updates = {"w": some(1, 4)}
    shares = column_shares(torch.ones(1, 1), torch.ones(1))
    torch.testing.assert_close(models_gradient(shares, updates)["w"], updates["w"])
    total = column_shares(some(USERS, MODELS).softmax(1), torch.full((USERS,), 0.2)).sum(0)
    torch.testing.assert_close(total, torch.ones(MODELS, dtype=torch.float64))


def test_the_head_is_the_last_layer_without_statistics() -> None:
    names = ["conv.weight", "bn.weight", "head.weight", "head.bias", "bn.running_mean"]
    assert head({name: torch.zeros(1) for name in names}) == ["head.weight", "head.bias"]
    lora = {"layers.0.q.a": torch.zeros(1), "layers.0.q.b": torch.zeros(1)}
    assert head(lora) == list(lora)


def test_identical_models_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"method\.models: .* 3 models"):
        state_from_models({"w": torch.ones(3, 2)})
    state_from_models({"w": torch.ones(1, 2)})
    state_from_models({"a": torch.eye(3), "b": torch.zeros(3, 2)})


def test_identical_models_have_no_gradient_for_their_weights() -> None:
    models = {"w": some(1, 4).expand(MODELS, 4)}
    inner = inner_products(models, {"w": some(USERS, 4, seed=7)}, ["w"])
    found = logit_gradient(some(USERS, MODELS).softmax(1), inner, torch.full((USERS,), 1 / USERS))
    assert float(found.abs().max()) < 10 * math.ulp(1.0)


@pytest.mark.parametrize("senders", [1, 2, 5, 30])
@pytest.mark.parametrize("size", [1, 7, 33, 5000])
def test_what_somebody_receives_does_not_depend_on_who_receives_beside(senders: int, size: int) -> None:
    """To the last bit, or a user who is rejected would have another one's upload look like a step."""
    drawn = torch.Generator().manual_seed(senders * size)
    uploads = {"w": torch.randn(senders, size, 3, generator=drawn)}
    matrix = torch.rand(9, senders, generator=drawn)
    everyone = mix(uploads, matrix)["w"]
    torch.testing.assert_close(everyone, torch.einsum("rs,snk->rnk", matrix, uploads["w"]))
    for chosen in ([4], [0, 8], [1, 2, 3, 5, 7]):
        assert torch.equal(mix(uploads, matrix[chosen])["w"], everyone[chosen])


# ---------------------------------------------------------------- how far a merged model moves


@pytest.mark.parametrize("models", [1, 2, 5, 30])
def test_a_merged_model_moves_by_a_whole_mean_of_the_updates_however_many_models_there_are(
    models: int, weights: Tensor
) -> None:
    """Not by a small part of them: ``theta_i`` moves by ``sum_k M_ik g_k`` whose shares sum to 1, whatever the weights.

    M = W S^T, W the rows of a softmax, S the columns of :func:`column_shares`, both summing to 1.
    """
    shares = some(USERS, models, seed=7).softmax(1)
    moves = column_shares(shares, weights)
    updates = {"head.weight": some(USERS, 2, 4, seed=8)}
    moved = mix(models_gradient(moves, updates), shares)["head.weight"]
    mixing = shares @ moves.T
    assert (mixing >= 0).all()
    torch.testing.assert_close(mixing.sum(1), torch.ones(USERS, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(moved, torch.einsum("ik,koh->ioh", mixing, updates["head.weight"]), **TIGHT)


@pytest.mark.parametrize("models", [1, 2, 5, 30])
def test_the_first_step_of_a_merged_model_is_the_mean_update_for_any_number_of_models(
    models: int, weights: Tensor
) -> None:
    """Weights are equal at first, so every model, and every merge of them, moves by ``sum_k p_k g_k``, as in FedAvg."""
    shares = torch.zeros(USERS, models, dtype=torch.float64).softmax(1)
    updates = {"head.weight": some(USERS, 2, 4, seed=8)}
    moved = mix(models_gradient(column_shares(shares, weights), updates), shares)["head.weight"]
    mean = torch.einsum("k,koh->oh", weights, updates["head.weight"])
    torch.testing.assert_close(moved, mean.expand_as(moved), **TIGHT)
