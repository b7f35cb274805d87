"""The update of many users at once against torch's own optimisers, one per user."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.config.settings import OptimizerSection
from comingle.training.cohort_state import clip, learning_rate, update

USERS, COLUMNS, STEPS = 3, 11, 12
TAKES_PART = [lambda step: True, lambda step: step % 3 == 0, lambda step: step >= 7]
"""Which of the steps each user takes: step counts differ."""


def gradients(dtype: torch.dtype = torch.float64) -> Tensor:
    """``(steps, users, columns)``, of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(STEPS, USERS, COLUMNS, generator=generator, dtype=torch.float64)
    return (drawn * torch.tensor([[0.01], [1.0], [30.0]])).to(dtype)


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(USERS, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def ours(settings: OptimizerSection, dtype: torch.dtype = torch.float64) -> Tensor:
    rows, counts = start(dtype), torch.zeros(USERS, dtype=torch.int64)
    first, second = torch.zeros_like(rows), torch.zeros_like(rows)
    for step, gradient in enumerate(gradients(dtype)):
        users = [u for u in range(USERS) if TAKES_PART[u](step)]
        counts[users] += 1
        part = [t[users] for t in (rows, first, second)]
        rate = learning_rate(settings, step, STEPS)
        update(settings, rate, part[0], gradient[users], part[1], part[2], counts[users])
        for t, values in zip((rows, first, second), part, strict=True):
            t[users] = values
    return rows


def torchs(settings: OptimizerSection, user: int, dtype: torch.dtype = torch.float64) -> Tensor:
    parameter = start(dtype)[user].clone().requires_grad_()
    optimizer: torch.optim.Optimizer
    if settings.name == "adamw":
        options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
        optimizer = torch.optim.AdamW([parameter], lr=settings.learning_rate, **options)
    else:
        optimizer = torch.optim.SGD([parameter], lr=settings.learning_rate, momentum=settings.momentum)
    for step, gradient in enumerate(gradients(dtype)):
        if not TAKES_PART[user](step):
            continue
        parameter.grad = gradient[user].clone()
        if settings.clip_norm is not None:
            norm = math.sqrt(sum(g * g for g in gradient[user].tolist()))
            parameter.grad *= min(1.0, settings.clip_norm / norm)
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step, STEPS)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSection(),
        OptimizerSection(schedule="constant", learning_rate=0.3),
        OptimizerSection(weight_decay=0.0, betas=(0.5, 0.999), eps=1e-3),
        OptimizerSection(weight_decay=0.5, learning_rate=0.1),
        OptimizerSection(clip_norm=1.0),
        OptimizerSection(name="sgd", weight_decay=0.0, learning_rate=0.1),
        OptimizerSection(name="sgd", weight_decay=0.0, momentum=0.9),
        OptimizerSection(name="sgd", weight_decay=0.0, momentum=0.9, clip_norm=0.5, schedule="constant"),
    ],
)
def test_every_user_gets_what_its_own_optimizer_would_do(settings: OptimizerSection) -> None:
    found = ours(settings)
    for user in range(USERS):
        torch.testing.assert_close(found[user], torchs(settings, user), rtol=1e-12, atol=1e-14)
    assert (found != start()).all()


def test_float32_follows_torch_in_float32() -> None:
    settings = OptimizerSection()
    found = ours(settings, torch.float32)
    for user in range(USERS):
        torch.testing.assert_close(found[user], torchs(settings, user, torch.float32), rtol=1e-6, atol=1e-7)


def test_weight_decay_is_decoupled_in_sgd_too() -> None:
    settings = OptimizerSection(name="sgd", weight_decay=0.1)
    rows, first = start(), torch.zeros(USERS, COLUMNS, dtype=torch.float64)
    update(settings, 0.5, rows, torch.zeros_like(rows), first, first.clone(), torch.ones(USERS, dtype=torch.int64))
    torch.testing.assert_close(rows, start() * (1 - 0.5 * 0.1))
    assert (first == 0).all()


def test_works_in_place_on_a_span_of_columns() -> None:
    """As the engine calls it: the columns of a phase, which are a view."""
    rows, before = start(), start()
    first, second = torch.zeros_like(rows), torch.zeros_like(rows)
    span = slice(2, 6)
    counts = torch.ones(USERS, dtype=torch.int64)
    gradient = gradients()[0][:, span]
    update(OptimizerSection(), 1e-3, rows[:, span], gradient, first[:, span], second[:, span], counts)
    outside = [c for c in range(COLUMNS) if not 2 <= c < 6]
    assert torch.equal(rows[:, outside], before[:, outside])
    assert (rows[:, span] != before[:, span]).all()
    for moment in (first, second):
        assert (moment[:, span] != 0).all()
        assert (moment[:, outside] == 0).all()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_zeros_stay_zeros(name: str) -> None:
    """Padding: zero parameters with zero gradients."""
    settings = OptimizerSection(name=name, momentum=0.9)  # type: ignore[arg-type]
    rows = torch.zeros(USERS, COLUMNS)
    first, second = torch.zeros_like(rows), torch.zeros_like(rows)
    for step in range(1, 4):
        update(settings, 0.1, rows, torch.zeros_like(rows), first, second, torch.full((USERS,), step))
    assert (rows == 0).all()


def test_clipping_is_per_user_and_only_downwards() -> None:
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(clip(gradient, 1.0), expected, rtol=1e-15, atol=0)
    for row, found in zip(gradient, clip(gradient, 1.0), strict=True):
        parameter = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        parameter.grad = row.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)  # adds 1e-6 to the norm
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=0)


def test_cosine_goes_from_the_rate_to_a_tenth() -> None:
    settings = OptimizerSection(learning_rate=2e-3)
    assert learning_rate(settings, 0, 200) == 2e-3
    assert learning_rate(settings, 200, 200) == pytest.approx(2e-4, rel=1e-12)
    assert learning_rate(settings, 317, 200) == learning_rate(
        settings, 200, 200
    )  # of who takes more steps than planned
    assert learning_rate(settings, 100, 200) == pytest.approx(1.1e-3, rel=1e-12)
    rates = [learning_rate(settings, step, 200) for step in range(201)]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


def test_cosine_is_that_of_torch() -> None:
    settings = OptimizerSection(learning_rate=0.5, final_fraction=0.25)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.125)
    for step in range(30):
        assert learning_rate(settings, step, 30) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_constant_is_constant() -> None:
    settings = OptimizerSection(schedule="constant", learning_rate=0.7)
    assert {learning_rate(settings, step, 10) for step in range(11)} == {0.7}
    assert learning_rate(settings, 0, 0) == 0.7


def test_a_run_of_no_steps_has_a_rate() -> None:
    assert learning_rate(OptimizerSection(), 0, 0) == 2e-3
