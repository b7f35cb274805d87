"""FedALT, FedEx-LoRA, FLoRA, RoLoRA, Fed-SB and FedRot-LoRA against loops from their papers, user by user."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import Own, played, rows_of, same
from scipy.linalg import orthogonal_procrustes
from torch import Tensor

from comingle.methods.base import Phase
from comingle.methods.fedex import procrustes
from comingle.models.personal import changes_of_adapted
from comingle.training.backends.local import InProcess
from comingle.utils.errors import RecipeError
from federations import download_all, exchange, play_round
from federations import local_round as train
from naive import FAMILIES, Reference, Rules, honest_double

RATE = 0.5
USERS = [0, 1, 2]
ROUNDS = [USERS, [0, 2], USERS]
SGD = {"name": "sgd", "learning_rate": RATE, "schedule": "constant", "weight_decay": 0}
CHANGES = {"training.experts": SGD, "training.router": SGD, "training.rounds": 3, "training.local_steps": 2}


@pytest.fixture
def tiny(federate: Any) -> Callable[..., InProcess]:
    def make(method: Any, **changes: Any) -> InProcess:
        return federate(method, base="random:llama?layers=1&dim=32", changes={**CHANGES, **changes})

    return make


def local_round(
    federation: Any, start: Own, user: int, number: int, moves: Any, mix: str = "output", added: Own | None = None
) -> Own:
    """Plain descent from ``start`` by what ``moves`` makes of gradients; ``added`` are changes of weights, whole."""
    clients, own = federation.clients, {name: t.clone() for name, t in start.items()}
    rules = Rules(scale=clients.model.adapters.scale, mix=mix)
    for step in range(clients.plan.training.local_steps):
        windows = clients.batch_source.draw([user], clients.phases[0], number, step, 0)[0].long()
        leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
        whole = leaves | {n: t for stem in added or {} for n, t in changed(leaves, stem, added, rules.scale).items()}
        loss = Reference(clients.model.base.model, "llama", whole, rules).losses(windows)[0].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            own[name] = own[name] - RATE * moves(name, gradient)
    return own


def changed(leaves: Own, stem: str, added: Any, scale: float) -> Own:
    """A's and B's of a weight with ``s B A`` and a change of its own: with A' = (A, 1) and B' = (B, change / s)."""
    a, b, change = leaves[f"{stem}.a"], leaves[f"{stem}.b"], added[stem]
    one = torch.eye(a.shape[-1], dtype=a.dtype).expand(*a.shape[:-2], -1, -1)
    return {f"{stem}.a": torch.cat([a, one], -2), f"{stem}.b": torch.cat([b, change.mT / scale], -2)}


def mean(trees: list[Own]) -> Own:
    return {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}


def test_rolora_trains_and_averages_one_factor_a_round(tiny: Any) -> None:
    """B in the first round and in the third, A in the second; weights' mean change is the change of mean weights."""
    federation = tiny("rolora")
    model = rows_of(federation)[0]
    with honest_double():
        for number, members in enumerate(ROUNDS):
            trained = ".b" if number % 2 == 0 else ".a"
            only = lambda name, g, trained=trained: g * name.endswith(trained)  # noqa: E731
            uploads = [local_round(federation, model, user, number, only) for user in members]
            exact = {n: torch.stack([product(own, n) for own in uploads]).mean(0) for n in stems(model)}
            model = mean(uploads)
            for stem, change in exact.items():
                torch.testing.assert_close(product(model, stem), change, rtol=1e-9, atol=1e-12)
        found = played(federation, ROUNDS)
    assert any(bool(t.any()) for name, t in model.items() if name.endswith(".b"))
    same(found, [model] * 3)


def stems(tree: Own) -> list[str]:
    return [name.removesuffix(".a") for name in tree if name.endswith(".a")]


def product(tree: Own, stem: str) -> Tensor:
    """``B A`` of each expert."""
    return torch.einsum("...ro,...ri->...oi", tree[f"{stem}.b"], tree[f"{stem}.a"])


@pytest.mark.parametrize("mix", ["output", "linear"])
def test_fedalt_is_its_algorithm(tiny: Any, mix: str) -> None:
    """Individual LoRA go on from themselves; a mean of all others' stands frozen beside each."""
    federation = tiny("fedalt", **{"adapters.mix": mix})
    owns = rows_of(federation)
    sent: dict[int, Own] = {}

    def individual(name: str, gradient: Tensor) -> Tensor:
        """All of attention and of routers; of experts the second, as the first is the rest of the world."""
        if ".mlp." not in name or name.endswith(".router"):
            return gradient
        return torch.stack([torch.zeros_like(gradient[0]), gradient[1]])

    with honest_double():
        for number, members in enumerate(ROUNDS):
            for user in members:
                owns[user] = local_round(federation, owns[user], user, number, individual, mix)
            sent |= {user: owns[user] for user in members}
            for user in USERS:
                rest = mean([own for other, own in sent.items() if other != user])
                for name, t in owns[user].items():
                    if ".mlp." in name and not name.endswith(".router"):
                        owns[user] = owns[user] | {name: torch.stack([rest[name][1], t[1]])}
        found = played(federation, ROUNDS)
    same(found, owns)
    assert not torch.allclose(owns[0]["layers.0.mlp.up.b"][0], owns[1]["layers.0.mlp.up.b"][0])


def test_what_fedalt_trains_does_not_decay_what_it_does_not(tiny: Any) -> None:
    """The frozen half of a tensor stands still under AdamW with weight decay, and has no moments."""
    adamw = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.5}
    federation = tiny("fedalt", **{"training.experts": adamw})
    before = rows_of(federation)
    clients = federation.clients
    train(federation, USERS, 0)
    layout = clients.model.layout
    row_of_world = layout.mask({"generalist"})
    assert row_of_world.any()
    for own, started in zip(rows_of(federation), before, strict=True):
        assert torch.equal(own["layers.0.mlp.up.a"][0], started["layers.0.mlp.up.a"][0])
        assert not torch.equal(own["layers.0.mlp.up.a"][1], started["layers.0.mlp.up.a"][1])
    assert not clients.state.first[:, row_of_world].any()
    assert clients.state.first[:, layout.mask({"specialist"})].any()


def lora(tree: Own) -> Own:
    return {name: t for name, t in tree.items() if name.endswith((".a", ".b"))}


def check_added(federation: InProcess, added: Own) -> None:
    """What everybody has received beside the base."""
    for own in rows_of(federation):
        for stem, change in added.items():
            found = torch.einsum("...ro,...ri->...oi", own[f"{stem}.residual_out"], own[f"{stem}.residual_in"])
            torch.testing.assert_close(found, change, rtol=1e-8, atol=1e-10, msg=stem)


def everything(name: str, gradient: Tensor) -> Tensor:
    return gradient


def test_fedex_puts_the_error_of_mean_factors_into_the_weights(tiny: Any) -> None:
    """Equation by equation, with whole weights."""
    federation = tiny("fedex-lora")
    model, scale = lora(rows_of(federation)[0]), federation.clients.model.adapters.scale
    added = {stem: torch.zeros_like(product(model, stem)) for stem in stems(model)}
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = [local_round(federation, model, user, number, everything, added=added) for user in members]
            model = mean(uploads)
            for stem, change in added.items():
                exact = torch.stack([product(own, stem) for own in uploads]).mean(0)
                added[stem] = change + scale * (exact - product(model, stem))
        found = played(federation, ROUNDS)
    assert max(float(change.abs().max()) for change in added.values()) > 1e-6
    same([lora(own) for own in found], [model] * 3)
    check_added(federation, added)


def test_a_residual_of_a_small_rank_is_the_best_of_that_rank(tiny: Any) -> None:
    """After one round it is the truncated singular value decomposition of the exact one."""
    whole, cut = (tiny({"name": "flora-stacking", "residual_rank": rank}) for rank in (0, 3))
    for federation in (whole, cut):
        played(federation, [USERS])
    own = rows_of(whole)[0]
    stem = "layers.0.self_attn.q_proj"
    exact = own[f"{stem}.residual_out"].mT @ own[f"{stem}.residual_in"]
    left, values, right = torch.linalg.svd(exact)
    assert values[3] > 1e-6 * values[0]
    check_added(cut, {stem: left[:, :3] @ torch.diag(values[:3]) @ right[:3]})


@pytest.mark.parametrize("name", ["fedex-lora", "flora-stacking"])
def test_what_a_user_takes_home_has_the_residual_in_its_weights(tiny: Any, name: str) -> None:
    """Averaged and merged into a plain model, that model has the change of the weights that was added."""
    federation: Any = tiny(name)
    played(federation, [USERS])
    model, own = federation.clients.model, rows_of(federation)[1]
    change = next(c for c in changes_of_adapted(model, {n: t.unsqueeze(0) for n, t in own.items()}, 1) if not c.key)
    stem = "layers.0.self_attn.q_proj"
    residual = own[f"{stem}.residual_out"].mT @ own[f"{stem}.residual_in"]
    torch.testing.assert_close(change.summed(), model.adapters.scale * product(own, stem) + residual)
    assert residual.abs().max() > 1e-7


@pytest.mark.parametrize("name", ["fedex-lora", "scaffold", "momentum-clustering"])
def test_servers_that_count_movements_need_one_rank(tiny: Any, name: str) -> None:
    """Else what a user of a lower rank has not would count as having moved to 0."""
    with pytest.raises(RecipeError, match=rf"{name}: .*adapters\.rank"):
        tiny(name, **{"adapters.rank": [1, 2, 2]})


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["scaffold", "fedalt", "momentum-clustering", "flora-stacking"])
def test_compressed_uploads_reach_a_server_in_float64(federate: Any, name: str, form: str) -> None:
    federation = federate(name, dtype="float64", changes={"training.uploads": form})
    play_round(federation, 0)
    assert download_all(federation).clients.state.rows.isfinite().all()


def test_sdflora_averages_products_of_what_is_shared_and_keeps_the_rest(tiny: Any) -> None:
    """Everybody gets the best approximation of the shared LoRA's mean product; private ones go on by themselves."""
    federation = tiny("sdflora", **{"adapters.mix": "linear"})
    owns = rows_of(federation)
    with honest_double():
        for number, members in enumerate(ROUNDS):
            for user in members:
                owns[user] = local_round(federation, owns[user], user, number, everything, "linear")
            train(federation, members, number)
            same([rows_of(federation)[user] for user in members], [owns[user] for user in members])
            exchange(federation, members)
            got = rows_of(federation)
            for stem in stems(owns[0]):
                mean_change = torch.stack([product(owns[user], stem) for user in members]).mean(0)
                shared = mean_change[0] if ".mlp." in stem else mean_change
                left, values, right = torch.linalg.svd(shared)
                best = left[:, :2] @ torch.diag(values[:2]) @ right[:2]
                for user, own in enumerate(got):
                    found = product(own, stem)
                    torch.testing.assert_close(found[0] if ".mlp." in stem else found, best, rtol=1e-7, atol=1e-10)
                    if ".mlp." in stem:
                        torch.testing.assert_close(found[1], product(owns[user], stem)[1], rtol=1e-9, atol=1e-12)
            owns = got


Silver = dict[str, tuple[Tensor, Tensor, Tensor]]
"""B ``(d_out, rank)``, R ``(rank, rank)`` and A ``(rank, d_in)`` of each linear."""


def gradients_of_weights(federation: Any, user: int, number: int) -> Own:
    """Of the plain base's own weights, ``(d_out, d_in)``, by the name that its LoRA has."""
    clients, linears = federation.clients, FAMILIES["llama"].linears
    plain = copy.deepcopy(clients.model.base.model).requires_grad_()
    windows = clients.batch_source.draw([user], Phase(roles=frozenset(), label="weights"), number, 0, 0)[0].long()
    weights = {}
    for stem in stems(rows_of(federation)[0]):
        path, _, last = stem.rpartition(".")
        weights[stem] = plain.model.get_submodule(f"{path}.{linears.get(last, last)}").weight
    logits = plain(input_ids=windows[:, :-1], use_cache=False).logits
    loss = -logits.log_softmax(-1).gather(-1, windows[:, 1:, None]).mean()
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def truncated(change: Tensor, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(change)
    assert values[rank] < 0.999 * values[rank - 1]  # else another choice would be as good
    return left[:, :rank], torch.diag(values[:rank]) / scale, right[:rank]


def middle_round(federation: Any, start: Silver, user: int, number: int) -> Silver:
    """Plain descent on R alone."""
    clients, middles = federation.clients, {stem: r for stem, (_b, r, _a) in start.items()}
    for step in range(clients.plan.training.local_steps):
        windows = clients.batch_source.draw([user], clients.phases[0], number, step, 0)[0].long()
        leaves = {stem: r.clone().requires_grad_() for stem, r in middles.items()}
        whole = {}
        for stem, (b, _r, a) in start.items():
            experts = (1,) if ".mlp." in stem else ()
            whole[f"{stem}.a"] = (leaves[stem] @ a).expand(*experts, -1, -1)
            whole[f"{stem}.b"] = b.mT.expand(*experts, -1, -1)
        rules = Rules(scale=clients.model.adapters.scale)
        loss = Reference(clients.model.base.model, "llama", whole, rules).losses(windows)[0].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        middles = {stem: r - RATE * g for (stem, r), g in zip(middles.items(), gradients, strict=True)}
    return {stem: (b, middles[stem], a) for stem, (b, _r, a) in start.items()}


def test_fed_sb_trains_and_averages_what_is_between_singular_vectors(tiny: Any) -> None:
    """The SVD of the first Adam step on whole weights; then of the users' mean change; then means of R alone."""
    federation = tiny({"name": "fed-sb", "first_rate": 0.01})
    scale, rank = federation.clients.model.adapters.scale, 2
    with honest_double():
        firsts = []
        for user in USERS:
            first = {n: -0.01 * g.sign() for n, g in gradients_of_weights(federation, user, 0).items()}
            start = {stem: truncated(update, rank, scale) for stem, update in first.items()}
            firsts.append(middle_round(federation, start, user, 0))
        model = {s: truncated(sum(b @ r @ a for b, r, a in (own[s] for own in firsts)) / 3, rank) for s in firsts[0]}
        for number, members in enumerate(ROUNDS[1:], 1):
            uploads = [middle_round(federation, model, user, number) for user in members]
            model = {s: (b, sum(own[s][1] for own in uploads) / len(members), a) for s, (b, _r, a) in model.items()}
        found = played(federation, ROUNDS)
    for own in found:
        for stem, (b, r, a) in model.items():
            middle, a_found = own[f"{stem}.r"], own[f"{stem}.a"]
            change = torch.einsum("...ro,...ri->...oi", own[f"{stem}.b"], middle @ a_found)
            torch.testing.assert_close(change.squeeze(0), b @ r @ a, rtol=1e-7, atol=1e-10, msg=stem)


def test_fed_sb_sends_its_frozen_factors_once(tiny: Any) -> None:
    """Also to a user who was absent at first; later messages have a matrix of rank by rank for each linear."""
    federation = tiny("fed-sb")
    clients = federation.clients
    sizes = {name: t.numel() for name, t in rows_of(federation)[0].items()}
    whole, small = set(sizes), {name for name in sizes if name.endswith(".r")}
    received: list[tuple[list[str], set[str]]] = []
    receive = clients.receive

    def note(message: Any) -> None:
        received.append((list(message.users), set(message.tensors)))
        receive(message)

    clients.receive = note
    assert set(clients.upload([0, 1], 1, {}).tensors) == whole
    play_round(federation, 0, [0, 1])
    assert received == []
    play_round(federation, 1, [0, 1])
    assert received == [(["ann", "bob"], whole)]
    play_round(federation, 2, [0, 2])
    assert received[1:] == [(["cem"], whole), (["ann"], small)]
    assert set(clients.upload([0, 2], 3, {}).tensors) == small
    assert {sizes[name] for name in small} == {2 * 2}


def test_fed_sb_starts_again_after_a_first_round_without_uploads(tiny: Any) -> None:
    """What the server has is not a model until it has aggregated, and users go on sending their own factors."""
    federation = tiny("fed-sb")
    federation.server.skip_round(1)
    play_round(federation, 1)
    assert federation.server.version == 2
    found = download_all(federation).clients.model.layout.views(federation.clients.state.rows)
    for stem in stems(found):
        a, b, r = (found[f"{stem}.{suffix}"] for suffix in "abr")
        assert r.any()
        assert all(torch.equal(factor[0], factor[2]) for factor in (a, b, r))
        torch.testing.assert_close(a @ a.mT, torch.eye(2, dtype=a.dtype).expand_as(r))
        torch.testing.assert_close(b @ b.mT, torch.eye(2, dtype=a.dtype).expand_as(r))


def rotation_of(own: Tensor, reference: Tensor, strength: float) -> Tensor:
    """R for which ``R^T own`` is closest to the reference; of rank 2 and below strength 1 by the angle of a turn."""
    if strength == 1:
        return torch.from_numpy(orthogonal_procrustes(own.T.numpy(), reference.T.numpy())[0])
    m = own @ reference.T
    angle = math.atan2(m[1, 0] - m[0, 1], m[0, 0] + m[1, 1])
    part = math.atan2(strength * math.sin(angle), 1 - strength + strength * math.cos(angle))
    return torch.tensor([[math.cos(part), -math.sin(part)], [math.sin(part), math.cos(part)]], dtype=own.dtype)


@pytest.mark.parametrize("strength", [1.0, 0.3, 0.0])
def test_fedrot_averages_factors_that_were_turned_towards_the_download(tiny: Any, strength: float) -> None:
    """Nobody turns in the first round; then A leads, then B. Their product stays what it was."""
    federation = tiny({"name": "fedrot-lora", "rotation_strength": strength})
    draw = torch.Generator().manual_seed(0)
    for name, t in federation.clients.model.layout.views(federation.clients.state.rows).items():
        t.copy_(0.1 * torch.randn(t.shape[1:], dtype=t.dtype, generator=draw))  # a B other than zero could turn at once
        federation.server.kept[f"model.{name}"].copy_(t[0])
    model, turned = rows_of(federation)[0], 0.0
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = [local_round(federation, model, user, number, everything) for user in members]
            for own in uploads if number else []:
                leading = "a" if number == 1 else "b"
                for stem in stems(own):
                    change = product(own, stem)
                    name = f"{stem}.{leading}"
                    ones, references = (tree[name].view(-1, *tree[name].shape[-2:]) for tree in (own, model))
                    turns = torch.stack([rotation_of(a, b, strength) for a, b in zip(ones, references, strict=True)])
                    turns = turns.view(*own[f"{stem}.a"].shape[:-2], 2, 2)
                    for factor in "ab":
                        own[f"{stem}.{factor}"] = turns.mT @ own[f"{stem}.{factor}"]
                    torch.testing.assert_close(product(own, stem), change, rtol=1e-9, atol=1e-12)
                    turned = max(turned, float((turns - torch.eye(2)).abs().max()))
            model = mean(uploads)
        found = played(federation, ROUNDS)
    assert (turned > 1e-4) == (strength > 0)
    same(found, [model] * 3)


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_procrustes_is_no_worse_than_any_other_orthogonal_matrix(rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    own, reference = (torch.randn(rank, 9, dtype=torch.float64, generator=draw) for _ in range(2))
    found, rotation = procrustes(own, reference), procrustes(own, reference, reflections=False)
    torch.testing.assert_close(found.mT @ found, torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones((), dtype=torch.float64))
    for _ in range(200):
        other, _r = torch.linalg.qr(torch.randn(rank, rank, dtype=torch.float64, generator=draw))
        least = rotation if torch.linalg.det(other) > 0 else found
        assert (least.mT @ own - reference).norm() <= (other.mT @ own - reference).norm() + 1e-12


def test_users_of_unequal_rank_turn_within_their_ranks(tiny: Any) -> None:
    federation = tiny("fedrot-lora", **{"adapters.rank": [1, 2, 4]})
    played(federation, [USERS, USERS])
    assert not federation.clients.state.rows[~federation.clients.mask].any()
