from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comingle.data.samples.samples import SampleBank, Samples, UserSamples, bank_of
from comingle.data.samples.scoring import score_samples
from comingle.models.scoring import CROSS_ENTROPY, LOSSES, MSE, SampleScore, find_loss
from comingle.utils.errors import RecipeError
from comingle.utils.seeds import generator

COUNTS = (7, 1, 33, 64, 12, 20)
CLASSES = 5


def some_bank(*, regression: bool, counts: Sequence[int] = COUNTS) -> SampleBank:
    source = generator("scores")

    def draw(count: int) -> Samples:
        x = torch.randn(count, 3, generator=source, dtype=torch.float64)
        if regression:
            return Samples(inputs=x, targets=torch.randn(count, CLASSES, generator=source, dtype=torch.float64))
        return Samples(inputs=x, targets=torch.randint(CLASSES, (count,), generator=source))

    users = [
        UserSamples(name=str(k), train=(samples := draw(count)), valid=samples, test=samples)
        for k, count in enumerate(counts)
    ]
    return bank_of([user.test for user in users])


class Linears:
    """User k's model is its own matrix; notes who was asked, and how many samples were passed through."""

    def __init__(self) -> None:
        source = generator("linears")
        self.weights = torch.randn(len(COUNTS), 3, CLASSES, generator=source, dtype=torch.float64)
        self.passed: list[int] = []

    def __call__(self, rows: Sequence[int], inputs: Tensor) -> Tensor:
        self.passed.append(inputs.shape[0] * inputs.shape[1])
        return torch.bmm(inputs, self.weights[list(rows)])


def one_by_one(bank: SampleBank, weights: Tensor, row: int) -> tuple[float, float | None]:
    """Loss and accuracy of a user from single samples."""
    losses, hits = [], []
    start, count = int(bank.starts[row]), int(bank.counts[row])
    for i in range(start, start + count):
        outputs, target = (bank.inputs[i] @ weights[row]).tolist(), bank.targets[i]
        if target.is_floating_point():
            losses.append(sum((o - t) ** 2 for o, t in zip(outputs, target.tolist(), strict=True)) / CLASSES)
        else:
            losses.append(math.log(sum(math.exp(o) for o in outputs)) - outputs[int(target)])
            hits.append(outputs.index(max(outputs)) == int(target))
    return sum(losses) / count, sum(hits) / count if hits else None


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (8, None), (8, 4), (13, 2), (100, 3), (100, None)])
def test_scores_equal_those_of_single_samples(regression: bool, batch: int, slots: int | None) -> None:
    bank, models = some_bank(regression=regression), Linears()
    scores = score_samples(models, bank, range(6), loss=MSE if regression else CROSS_ENTROPY, batch=batch, slots=slots)
    for row, score in enumerate(scores):
        loss, accuracy = one_by_one(bank, models.weights, row)
        assert score.samples == COUNTS[row]
        assert score.mean_loss == pytest.approx(loss, rel=1e-12)
        assert score.accuracy == (None if regression else pytest.approx(accuracy, rel=1e-12))


def test_scores_come_in_the_order_of_the_rows() -> None:
    bank, models = some_bank(regression=False), Linears()
    everybody = score_samples(models, bank, range(6), loss=CROSS_ENTROPY, batch=8)
    chosen = score_samples(models, bank, [4, 0, 5], loss=CROSS_ENTROPY, batch=8)
    for score, row in zip(chosen, (4, 0, 5), strict=True):
        assert score.samples == everybody[row].samples
        assert score.mean_loss == pytest.approx(everybody[row].mean_loss, rel=1e-12)


def test_long_and_short_users_waste_little() -> None:
    models = Linears()
    score_samples(models, some_bank(regression=True), range(6), loss=MSE, batch=8, slots=4)
    total = sum(COUNTS)
    assert sum(models.passed) <= 1.15 * total
    assert max(COUNTS) * len(COUNTS) >= 2.5 * total  # what padding every user to the longest would cost


def test_what_a_model_says_to_padding_does_not_count() -> None:
    bank = some_bank(regression=False, counts=(5, 2))

    def forward(rows: Sequence[int], inputs: Tensor) -> Tensor:
        outputs = torch.zeros(*inputs.shape[:2], CLASSES, dtype=torch.float64)
        for slot, row in enumerate(rows):
            outputs[slot, (5, 2)[row] :] = math.nan
        return outputs

    for score in score_samples(forward, bank, [0, 1], loss=CROSS_ENTROPY, batch=8):
        assert score.mean_loss == pytest.approx(math.log(CLASSES))


def test_a_user_without_samples_has_no_number() -> None:
    scores = score_samples(Linears(), some_bank(regression=False, counts=(3, 0)), [0, 1], loss=CROSS_ENTROPY, batch=8)
    assert scores[1].samples == 0
    assert math.isnan(scores[1].mean_loss)
    assert math.isnan(scores[1].accuracy or 0)
    assert score_samples(Linears(), some_bank(regression=True), [], loss=MSE, batch=8) == []


def test_losses_are_those_of_torch_and_carry_gradients() -> None:
    source = generator("losses")
    outputs = torch.randn(2, 3, CLASSES, generator=source, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(CLASSES, (2, 3), generator=source)
    real = torch.randn(2, 3, CLASSES, generator=source, dtype=torch.float64)
    torch.testing.assert_close(MSE(outputs, real).mean(), F.mse_loss(outputs, real))
    losses = CROSS_ENTROPY(outputs, classes)
    expected = -outputs.log_softmax(-1).gather(-1, classes[..., None])[..., 0]
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    torch.testing.assert_close(gradient, outputs.softmax(-1) - F.one_hot(classes, CLASSES))


@pytest.mark.parametrize(
    ("name", "function"),
    [("l1", F.l1_loss), ("smooth_l1", F.smooth_l1_loss), ("bce", F.binary_cross_entropy_with_logits)],
)
def test_a_loss_by_name_is_torchs_mean_over_a_samples_outputs(name: str, function: Callable[..., Tensor]) -> None:
    source = generator("losses")
    outputs = torch.randn(2, 3, 4, generator=source, dtype=torch.float64)
    targets = torch.rand(2, 3, 4, generator=source, dtype=torch.float64)
    losses = find_loss(name, classes=False)(outputs, targets)
    for user in range(2):
        for i in range(3):
            torch.testing.assert_close(losses[user, i], function(outputs[user, i], targets[user, i]))


def test_an_own_loss_is_asked_for_all_samples_at_once() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.randint(4, (2, 3))

    def hits(got: Tensor, wanted: Tensor) -> Tensor:
        assert got.shape == (6, 4)
        assert wanted.shape == (6,)
        return (got.argmax(-1) != wanted).float()

    loss = find_loss(hits, classes=True)
    assert (loss.name, loss.classes) == ("hits", True)
    assert torch.equal(loss(outputs, targets), (outputs.argmax(-1) != targets).float())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (nn.CrossEntropyLoss(), r"loss 'CrossEntropyLoss': got \(\) for 6 samples.*reduction='none'"),
        (lambda outputs, targets: outputs, r"got \(6, 4\) for 6 samples"),
        (lambda outputs, targets: 3, "got int for 6 samples"),
    ],
)
def test_a_loss_that_is_not_one_a_sample_is_said(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_loss(function, classes=True)(torch.randn(2, 3, 4), torch.randint(4, (2, 3)))


def test_losses_are_found_and_registered_by_name() -> None:
    LOSSES.register("doubled", lambda outputs, targets: 2 * (outputs - targets).square().mean(-1))
    outputs, targets = torch.randn(5, 2), torch.randn(5, 2)
    assert torch.equal(find_loss("doubled", classes=False)(outputs, targets), 2 * MSE(outputs, targets))
    with pytest.raises(RecipeError, match=r"^data\.loss: .*'ms'"):
        find_loss("ms", classes=False)


def test_a_score_is_a_value() -> None:
    assert SampleScore(mean_loss=0.5, accuracy=None, samples=3) == SampleScore(mean_loss=0.5, accuracy=None, samples=3)
