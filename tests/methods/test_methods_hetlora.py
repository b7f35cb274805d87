"""HetLoRA: norms, weights, tails and pruning against naive loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from receiving import downloaded, received, started

from comingle.methods.heterogeneous_ranks import (
    NormWeightedMean,
    Prune,
    TailPenalty,
    change_norm,
    smaller_ranks,
    tail_norms,
)
from federations import exchange, local_round, message_bytes

EVERYONE = [0, 1, 2]


def tree(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two linears, one with an expert axis; users of rank 2, 3 and 4."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q.a": (4, 5), "q.b": (4, 6), "up.a": (2, 4, 5), "up.b": (2, 4, 3)}
    found = {k: torch.randn(3, *s, dtype=torch.float64, generator=draw) for k, s in shapes.items()}
    for t in found.values():
        for user, rank in enumerate((2, 3, 4)):
            t[user, ..., rank:, :] = 0
    return found


RANKS = torch.tensor([2, 3, 4])


def test_the_norm_of_a_change_is_that_of_the_dense_product() -> None:
    found = tree()
    dense = (found["up.b"].mT @ found["up.a"]).flatten(1).norm(dim=1)
    torch.testing.assert_close(change_norm(found["up.a"], found["up.b"]), dense, rtol=1e-12, atol=0)


def averaged(uploads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What all users get, of whom the first weighs twice as much as the others."""
    server = NormWeightedMean()
    kept = started(server, {name: torch.zeros_like(t[0]) for name, t in uploads.items()}, users=3)
    server.aggregate(kept, received(uploads, [0.5, 0.25, 0.25]))
    return downloaded(server, kept, 2)


def test_larger_changes_weigh_more() -> None:
    uploads = tree()
    answer = averaged(uploads)
    for name in ("q", "up"):
        a, b = uploads[f"{name}.a"], uploads[f"{name}.b"]
        share = [p * float((b[u].mT @ a[u]).norm()) for u, p in enumerate((0.5, 0.25, 0.25))]
        for factor, t in (("a", a), ("b", b)):
            expected = sum(s * t[u] for u, s in enumerate(share)) / sum(share)
            torch.testing.assert_close(answer[f"{name}.{factor}"], expected, rtol=1e-12, atol=1e-14)


def test_where_nothing_has_changed_it_is_the_plain_mean() -> None:
    uploads = tree()
    uploads["q.b"].zero_()
    answer = averaged(uploads)
    expected = 0.5 * uploads["q.a"][0] + 0.25 * (uploads["q.a"][1] + uploads["q.a"][2])
    torch.testing.assert_close(answer["q.a"], expected, rtol=1e-12, atol=1e-14)


def test_the_tail_begins_at_gamma_times_the_rank() -> None:
    assert smaller_ranks(torch.tensor([1, 2, 8, 16]), 0.99).tolist() == [1, 1, 7, 15]
    assert smaller_ranks(torch.tensor([8, 16]), 0.5).tolist() == [4, 8]


@pytest.mark.parametrize("gamma", [0.99, 0.5])
def test_tail_norms_are_a_loop_over_linears(gamma: float) -> None:
    found, total = tree(), []
    for user, rank in enumerate((2, 3, 4)):
        start = max(1, int(rank * gamma))
        norms = [found[k][user][..., start:rank, :].norm() for k in ("q.a", "q.b", "up.a", "up.b")]
        total.append(float(norms[0] * norms[1] + norms[2] * norms[3]))
    torch.testing.assert_close(
        tail_norms(found, RANKS, gamma), torch.tensor(total, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_the_penalty_has_a_gradient_on_tails_alone_and_none_at_zero() -> None:
    found = {name: t.requires_grad_() for name, t in tree().items()}
    TailPenalty(0.1, 0.99).penalty(found, RANKS).sum().backward()
    gradient = found["q.a"].grad
    assert gradient is not None
    for user, rank in enumerate((2, 3, 4)):
        assert gradient[user].any(1).nonzero().flatten().tolist() == [rank - 1]
    zero = {name: torch.zeros_like(t).requires_grad_() for name, t in found.items()}
    TailPenalty(0.1, 0.99).penalty(zero, RANKS).sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in zero.values())


def test_ranks_whose_tail_shrinks_are_given_up(federate: Any) -> None:
    clients = federate("hetlora", changes={"adapters.rank": RANKS.tolist()}).clients
    clients.state.rows.normal_(generator=torch.Generator().manual_seed(0)).mul_(clients.mask)
    cohort = clients.cohort(EVERYONE, 0, looks_back=True)
    cohort.state.rows.mul_(torch.tensor([0.9, 1.1, 1.0], dtype=torch.float64).unsqueeze(1))
    Prune(0.99).end(cohort)
    assert cohort.ranks.tolist() == [1, 3, 4]


def test_a_user_who_prunes_sends_less_and_resumes_so(federate: Any) -> None:
    """A regularisation so strong that it only shrinks the tail."""
    method = {"name": "hetlora", "regularisation": 1000.0, "gamma": 0.7}
    federation = federate(method, changes={"adapters.rank": [4, 4, 2], "training.experts.learning_rate": 0.05})
    ranks = [federation.clients.state.ranks.tolist()]
    for number in range(4):
        local_round(federation, EVERYONE, number)
        exchange(federation, EVERYONE)
        ranks.append(federation.clients.state.ranks.tolist())
        assert not federation.clients.state.rows[~federation.clients.mask].any()
    assert ranks[1] == [4, 4, 2]  # B starts at zero: a tail can only grow at first
    assert all((torch.tensor(later) <= torch.tensor(sooner)).all() for sooner, later in itertools.pairwise(ranks))
    assert ranks[-1] != ranks[0]
    model = federation.clients.model.layout.views(federation.clients.state.rows)
    for user, (sent, rank) in enumerate(zip(federation.clients.upload_bytes(), ranks[-1], strict=True)):
        own = {name: t[user, ..., :rank, :] for name, t in model.items()}
        header = {"kind": "upload", "round": 1, "user": federation.clients.name(user), "rank": rank}
        assert sent == message_bytes(own, header, {"loss": torch.tensor(0.0)})


def test_without_pruning_ranks_stay(federate: Any) -> None:
    federation = federate(
        {"name": "hetlora", "regularisation": 1000.0, "prune": False}, changes={"adapters.rank": [4, 4, 2]}
    )
    for number in range(3):
        local_round(federation, EVERYONE, number)
        exchange(federation, EVERYONE)
    assert federation.clients.state.ranks.tolist() == [4, 4, 2]
