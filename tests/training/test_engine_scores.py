"""The one exact pass over everybody's test text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comingle.models.scoring import PAD, Score, score_streams
from comingle.training.client import train
from comingle.utils.seeds import generator


def stream(size: int) -> Tensor:
    return torch.randint(1, 50, (size,), generator=generator("stream", size), dtype=torch.int32)


def target_times_model(models: Sequence[int], windows: Tensor) -> Tensor:
    """A model whose loss on a token is the token times the model's number: any slip changes a whole number."""
    targets = windows[..., 1:]
    return targets.masked_fill(targets == PAD, 0).double() * torch.tensor(models).view(-1, 1, 1)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("context", [2, 7, 64])
def test_every_token_but_the_first_counts_once_for_its_own_model(batch: int, slots: int, context: int) -> None:
    streams, models = [stream(size) for size in (2, 50, 8, 131)], [3, 1, 3, 2]
    found = score_streams(target_times_model, streams, models, context=context, batch=batch, slots=slots)
    for score, tokens, model in zip(found, streams, models, strict=True):
        assert score == Score(loss_nats=float(tokens[1:].sum() * model), tokens=len(tokens) - 1)


def test_no_pass_is_larger_than_asked_for() -> None:
    shapes = []

    def losses(models: Sequence[int], windows: Tensor) -> Tensor:
        shapes.append((len(models), *windows.shape))
        return target_times_model(models, windows)

    score_streams(losses, [stream(100), stream(33)], [0, 1], context=8, batch=4, slots=2)
    assert all(models == slots <= 2 and batch <= 4 and window == 9 for models, slots, batch, window in shapes)
    assert sum(slots for slots, *_ in shapes) == 5  # 13 windows in jobs of 4, 4 windows in a job of 4


def test_a_federation_scores_as_a_loop_over_windows_does(federate: Any, make_user: Any) -> None:
    """One window of one user at a time, through all logits, without padding; portions of any size change nothing.

    Not closer than 1e-8: inside attention transformers computes the softmax in float32 also for a float64 model.
    """
    users = [make_user("ann", test=60), make_user("bob", test=17), make_user("cem", test=2)]
    sim = federate("fedavg", users=users, changes={"training.experts.learning_rate": 0.05}).clients
    train(sim, [0, 1, 2], 0)
    naive = [naive_score(sim, row) for row in range(3)]
    for users_per_step, micro_batch in [(None, None), (1, 1), (2, 3), (3, 1)]:
        other = federate(
            "fedavg",
            users=users,
            changes={"runtime.users_per_step": users_per_step, "runtime.micro_batch": micro_batch},
        ).clients
        other.state = sim.state
        for score, (loss_nats, tokens) in zip(other.evaluate(), naive, strict=True):
            assert score.tokens == tokens
            assert score.loss_nats == pytest.approx(loss_nats, rel=1e-8)
            assert score.perplexity == pytest.approx(math.exp(loss_nats / tokens), rel=1e-8)


def naive_score(sim: Any, row: int) -> tuple[float, int]:
    tokens, context = sim.users[row].test.long(), sim.plan.training.context
    tensors = {name: tensor[row : row + 1] for name, tensor in sim.model.layout.views(sim.state.rows).items()}
    loss = 0.0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        sim.model.adapters.bind(tensors, [row])
        logits = sim.model.network(input_ids=window[:-1].unsqueeze(0)).logits[0]
        loss += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    return loss, len(tokens) - 1


def test_a_user_scores_with_the_model_of_its_row(federate: Any) -> None:
    sim = federate("local", changes={"training.experts.learning_rate": 0.05}).clients
    train(sim, [0, 1, 2], 0)
    before = sim.evaluate()
    sim.state.rows[1] = 0
    after = sim.evaluate()
    assert [a.loss_nats == b.loss_nats for a, b in zip(after, before, strict=True)] == [True, False, True]


def test_perplexity_is_the_exponential_of_the_mean_or_infinite() -> None:
    assert Score(loss_nats=20 * math.log(7), tokens=20).perplexity == pytest.approx(7)
    assert Score(loss_nats=1e6, tokens=10).perplexity == math.inf
