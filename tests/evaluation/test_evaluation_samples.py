from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from comingle.data.samples import SampleBank, Samples, UserSamples, bank_of
from comingle.data.seeds import generator
from comingle.evaluation.samples import SampleScore, sample_losses, score_samples

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
    scores = score_samples(models, bank, range(6), batch=batch, slots=slots)
    for row, score in enumerate(scores):
        loss, accuracy = one_by_one(bank, models.weights, row)
        assert score.samples == COUNTS[row]
        assert score.mean_loss == pytest.approx(loss, rel=1e-12)
        assert score.accuracy == (None if regression else pytest.approx(accuracy, rel=1e-12))


def test_scores_come_in_the_order_of_the_rows() -> None:
    bank, models = some_bank(regression=False), Linears()
    everybody = score_samples(models, bank, range(6), batch=8)
    chosen = score_samples(models, bank, [4, 0, 5], batch=8)
    for score, row in zip(chosen, (4, 0, 5), strict=True):
        assert score.samples == everybody[row].samples
        assert score.mean_loss == pytest.approx(everybody[row].mean_loss, rel=1e-12)


def test_long_and_short_users_waste_little() -> None:
    models = Linears()
    score_samples(models, some_bank(regression=True), range(6), batch=8, slots=4)
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

    for score in score_samples(forward, bank, [0, 1], batch=8):
        assert score.mean_loss == pytest.approx(math.log(CLASSES))


def test_a_user_without_samples_has_no_number() -> None:
    scores = score_samples(Linears(), some_bank(regression=False, counts=(3, 0)), [0, 1], batch=8)
    assert scores[1].samples == 0
    assert math.isnan(scores[1].mean_loss)
    assert math.isnan(scores[1].accuracy or 0)
    assert score_samples(Linears(), some_bank(regression=True), [], batch=8) == []


def test_losses_are_those_of_torch_and_carry_gradients() -> None:
    source = generator("losses")
    outputs = torch.randn(2, 3, CLASSES, generator=source, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(CLASSES, (2, 3), generator=source)
    real = torch.randn(2, 3, CLASSES, generator=source, dtype=torch.float64)
    torch.testing.assert_close(sample_losses(outputs, real).mean(), F.mse_loss(outputs, real))
    losses = sample_losses(outputs, classes)
    expected = -outputs.log_softmax(-1).gather(-1, classes[..., None])[..., 0]
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    torch.testing.assert_close(gradient, outputs.softmax(-1) - F.one_hot(classes, CLASSES))


def test_a_score_is_a_value() -> None:
    assert SampleScore(mean_loss=0.5, accuracy=None, samples=3) == SampleScore(mean_loss=0.5, accuracy=None, samples=3)
