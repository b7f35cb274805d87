"""PCL: weights from cross-validation, and who receives what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comingle.methods import make
from comingle.methods.pcl import collaboration_weights
from comingle.training.backends.local import InProcess
from comingle.training.rounds import run_rounds
from federations import exchange, local_round, message_bytes


def validated(federation: InProcess, members: list[int]) -> torch.Tensor:
    """What each of these users loses on its validation text with the upload of each."""
    cohort = federation.clients.cohort(members, 1)
    uploads = federation.clients.upload(members, 1, {}).tensors
    return cohort.validation_losses({n: t.unsqueeze(0).expand(len(t), *t.shape) for n, t in uploads.items()})


def test_weights_are_a_softmax_of_minus_the_perplexities() -> None:
    losses = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    weights = collaboration_weights(losses, torch.eye(3))
    for i in range(3):
        terms = [math.exp(-math.exp(losses[i, j])) for j in range(3)]
        for j in range(3):
            assert weights[i, j].item() == pytest.approx(terms[j] / sum(terms), rel=1e-12)


def test_the_absent_are_not_heard_and_keep_their_own(federate: Any) -> None:
    federation = federate("pcl")
    local_round(federation, [0, 1, 2], 0)
    federation.clients.state.rows[1] = torch.nan
    before, weights = (
        federation.clients.state.rows.clone(),
        collaboration_weights(validated(federation, [0, 2]), torch.eye(2)),
    )
    exchange(federation, [0, 2])
    after = federation.clients.state.rows
    torch.testing.assert_close(after[[0, 2]], weights @ before[[0, 2]], rtol=1e-12, atol=1e-15)
    assert bool(after[1].isnan().all())


def test_a_perplexity_beyond_all_numbers_is_infinitely_bad() -> None:
    losses = torch.tensor([[1.0, 5000.0], [5000.0, 5000.0]], dtype=torch.float64)
    assert collaboration_weights(losses, torch.eye(2)).tolist() == [[1, 0], [0, 1]]
    assert collaboration_weights(losses, torch.eye(2)[[1, 0]]).tolist() == [[1, 0], [1, 0]]


def test_cross_validation_is_a_loop_over_models_and_texts(federate: Any) -> None:
    federation = federate("pcl")
    local_round(federation, [0, 1, 2], 0)
    found = validated(federation, [0, 1, 2])
    for i in range(3):
        for j in range(3):
            alone = federation.clients.scorer.score(
                federation.clients.models, [federation.clients.trainers[i].valid], [j]
            )[0].mean_loss
            assert found[i, j].item() == pytest.approx(alone, rel=1e-12)
    assert found[0, 2] != found[2, 0]


def test_everybody_gets_a_mixture_of_their_own(federate: Any) -> None:
    federation = federate("pcl")
    local_round(federation, [0, 1, 2], 0)
    before, weights = (
        federation.clients.state.rows.clone(),
        collaboration_weights(validated(federation, [0, 1, 2]), torch.eye(3)),
    )
    exchange(federation, [0, 1, 2])
    torch.testing.assert_close(federation.clients.state.rows, weights @ before, rtol=1e-12, atol=1e-15)


def test_models_travel_in_the_rounds_that_are_due_to_all_peers(federate: Any) -> None:
    federation = federate({"name": "pcl", "exchange_from": 2, "exchange_every": 3}, changes={"training.rounds": 6})
    events: list[dict[str, Any]] = []
    run_rounds(federation, observe=events.append)
    sent = {e["round"]: (e["upload_bytes"], e["download_bytes"]) for e in events if e["event"] == "round"}
    uploads = federation.clients.upload([0], 2, {"loss": torch.tensor([0.0])})
    own = {name: t[0] for name, t in uploads.tensors.items()}
    header = {"kind": "upload", "round": 2, "user": "ann", "rank": 2}
    assert sent[2] == (3 * message_bytes(own, header, {"loss": torch.tensor(0.0)}), 0)
    both = {name: torch.stack([t, t]) for name, t in own.items()}  # its own it has
    header = {"kind": "download", "version": 2, "user": "ann", "rank": 2, "senders": ["ann", "bob", "cem"]}
    assert sent[3] == (0, 3 * message_bytes(both, header, {}))  # the next event tells of it
    assert [number for number, pair in sent.items() if pair != (0, 0)] == [2, 3, 5, 6]


def test_by_default_models_travel_after_rounds_5_7_and_9() -> None:
    """The code that is followed: ``epoch > 3 and epoch % 2 == 0`` at the end of epochs that are counted from 0."""
    theirs = [epoch + 1 for epoch in range(12) if epoch > 3 and epoch % 2 == 0]
    assert theirs[:3] == [5, 7, 9]
    assert [done for done in range(1, 13) if make("pcl").exchanges(done)] == theirs
