"""PCL: weights from cross-validation, and who receives what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comingle.engines.rounds import run_rounds
from comingle.methods import make
from comingle.methods.pcl import collaboration
from federations import exchange, local_round

NAN = float("nan")


def test_weights_are_a_softmax_of_minus_the_perplexities() -> None:
    losses = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    weights = collaboration(losses)
    for i in range(3):
        terms = [math.exp(-math.exp(losses[i, j])) for j in range(3)]
        for j in range(3):
            assert weights[i, j].item() == pytest.approx(terms[j] / sum(terms), rel=1e-12)


def test_the_absent_are_not_heard_and_keep_their_own() -> None:
    losses = torch.tensor([[1.0, NAN, 1.0], [NAN, NAN, NAN], [1.0, NAN, 1.0]], dtype=torch.float64)
    expected = [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]]
    assert collaboration(losses).tolist() == expected


def test_a_perplexity_beyond_all_numbers_is_infinitely_bad() -> None:
    losses = torch.tensor([[1.0, 5000.0], [5000.0, 5000.0]], dtype=torch.float64)
    assert collaboration(losses).tolist() == [[1, 0], [0, 1]]


def test_cross_validation_is_a_loop_over_models_and_texts(federate: Any) -> None:
    federation = federate("pcl")
    local_round(federation, [0, 1, 2], 0)
    found = federation.cross_validate([0, 2])
    assert found.isnan().tolist() == [[False, True, False], [True] * 3, [False, True, False]]
    for i in (0, 2):
        for j in (0, 2):
            alone = federation.clients.scorer.score(
                federation.clients.models, [federation.clients.trainers[i].valid], [j]
            )[0].mean_nats
            assert found[i, j].item() == pytest.approx(alone, rel=1e-12)
    assert found[0, 2] != found[2, 0]


def test_everybody_gets_a_mixture_of_their_own(federate: Any) -> None:
    federation = federate("pcl")
    local_round(federation, [0, 1, 2], 0)
    before, weights = federation.clients.state.rows.clone(), collaboration(federation.cross_validate([0, 1, 2]))
    exchange(federation, [0, 1, 2])
    torch.testing.assert_close(federation.clients.state.rows, weights @ before, rtol=1e-12, atol=1e-15)


def test_models_travel_in_the_rounds_that_are_due_to_all_peers(federate: Any) -> None:
    federation = federate({"name": "pcl", "exchange_from": 2, "exchange_every": 3}, changes={"training.rounds": 6})
    events: list[dict[str, Any]] = []
    run_rounds(federation, observe=events.append)
    sent = {e["round"]: (e["upload_bytes"], e["download_bytes"]) for e in events if e["event"] == "round"}
    one = federation.clients.upload_bytes()[0]
    assert [number for number, pair in sent.items() if pair != (0, 0)] == [2, 5]
    assert sent[2] == (3 * one, 3 * 2 * one)


def test_by_default_models_travel_after_rounds_5_7_and_9() -> None:
    """The code that is followed: ``epoch > 3 and epoch % 2 == 0`` at the end of epochs that are counted from 0."""
    theirs = [epoch + 1 for epoch in range(12) if epoch > 3 and epoch % 2 == 0]
    assert theirs[:3] == [5, 7, 9]
    assert [done for done in range(1, 13) if make("pcl").exchanges(done)] == theirs
