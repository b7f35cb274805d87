"""FDLoRA: the outer optimiser, two copies side by side, and the fusion at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from receiving import downloaded, received, started

from comingle.methods.dual_lora import Fuse, OuterSteps, minimise_loss
from comingle.training.client import finish
from comingle.training.rounds import run_rounds
from federations import exchange, local_round

EVERYONE = [0, 1, 2]


def test_outer_steps_are_those_of_torch_with_nesterov() -> None:
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(4, dtype=torch.float64, generator=draw)
    reference = theta.clone().requires_grad_()
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    server, shares = OuterSteps(rate=0.7, momentum=0.9), [0.5, 0.25, 0.25]
    kept = started(server, {"x": theta}, users=3)
    for _ in range(4):
        uploads = torch.randn(3, 4, dtype=torch.float64, generator=draw)
        reference.grad = reference.detach() - sum(w * t for w, t in zip(shares, uploads, strict=True))
        optimizer.step()
        server.aggregate(kept, received({"x": uploads}, shares))
        for user in EVERYONE:
            torch.testing.assert_close(
                downloaded(server, kept, user), {"x": reference.detach()}, rtol=1e-12, atol=1e-14
            )


def test_a_plain_outer_step_is_the_mean(federate: Any) -> None:
    federation = federate({"name": "fdlora", "outer_rate": 1.0, "outer_momentum": 0.0})
    for number in range(2):
        local_round(federation, EVERYONE, number)
        before = federation.clients.state.rows.clone()
        exchange(federation, EVERYONE)
        torch.testing.assert_close(
            federation.clients.state.rows[:3], before[:3].mean(0).expand(3, -1), rtol=1e-12, atol=1e-15
        )
        assert torch.equal(federation.clients.state.rows[3:], before[3:])


def test_the_personal_copy_is_trained_alone(federate: Any) -> None:
    """It equals a method that shares nothing, from the same start on the same batches."""
    both, alone = federate("fdlora"), federate("local")
    assert both.clients.trainable_parameters()[0] == 2 * both.clients.model.layout.columns
    alone = federate({"name": "comigs", "generalists": 1, "specialists": 0})
    alone.clients.state.rows.copy_(both.clients.state.rows[3:])
    for number in range(2):
        for federation in (both, alone):
            local_round(federation, EVERYONE, number)
        exchange(both, EVERYONE)  # and nobody exchanges in the other
    torch.testing.assert_close(both.clients.state.rows[3:], alone.clients.state.rows, rtol=1e-9, atol=1e-12)
    assert not torch.equal(both.clients.state.rows[:3], both.clients.state.rows[3:])


def test_the_search_finds_the_lowest_point_of_a_bowl() -> None:
    best = minimise_loss(lambda w: float((w[0] - 0.3) ** 2 + 2 * (w[1] - 0.8) ** 2 + 0.5 * w[0] * w[1]), 200)
    hessian, linear = torch.tensor([[2.0, 0.5], [0.5, 4.0]]).double(), torch.tensor([0.6, 3.2]).double()
    torch.testing.assert_close(best, torch.linalg.solve(hessian, linear), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_fusion_is_never_worse_than_either_copy(federate: Any, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """On a bowl in place of the validation loss."""
    draw = torch.Generator().manual_seed(1)
    copies, target = torch.randn(2, 3, 5, generator=draw), torch.randn(3, 5, generator=draw)

    def validate(candidate: torch.Tensor, user: int) -> float:
        return float((candidate - target[user]).square().sum())

    cohort = federate("fdlora").clients.cohort(list(range(6)), 2)
    monkeypatch.setattr(cohort, "copies", lambda: copies)
    monkeypatch.setattr(cohort, "validate", validate)
    fused = Fuse(steps).finish(cohort)
    for user in EVERYONE:
        either = min(validate(copies[0, user], user), validate(copies[1, user], user))
        assert validate(fused[user], user) <= either + 1e-6


def test_a_run_ends_with_fused_models_and_scores_them(federate: Any) -> None:
    federation = federate("fdlora")
    scores = run_rounds(federation, observe=lambda event: None)
    assert list(federation.clients.row_of) == [3, 4, 5]
    for user, score in enumerate(scores):
        assert score.loss_nats == pytest.approx(
            federation.clients.scorer.score(
                federation.clients.models, [federation.clients.users[user].test], [3 + user]
            )[0].loss_nats
        )
        valid = [
            federation.clients.scorer.score(
                federation.clients.models, [federation.clients.trainers[user].valid], [row]
            )[0].mean_loss
            for row in (user, 3 + user)
        ]
        assert valid[1] <= valid[0]  # no worse than the global copy


@pytest.mark.parametrize("which", ["local", "exchanged"])
@pytest.mark.slow
def test_fusion_comes_after_the_last_exchange_whichever_model_counts(federate: Any, which: str) -> None:
    """What is fused is the global LoRA that everybody has in common, not what a user's last steps made of it."""
    run, hand = (federate("fdlora", changes={"evaluation.model": which}) for _ in range(2))
    run_rounds(run, observe=lambda event: None)
    for number in range(2):
        local_round(hand, EVERYONE, number)
        exchange(hand, EVERYONE)
    for row in (1, 2):
        assert torch.equal(hand.clients.state.rows[row], hand.clients.state.rows[0])
    finish(hand.clients)
    assert torch.equal(run.clients.state.rows, hand.clients.state.rows)
    assert not torch.equal(run.clients.state.rows[3], run.clients.state.rows[4])
