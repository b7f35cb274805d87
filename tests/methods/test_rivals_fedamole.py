"""FedAMoLE against loops from its code: gates token by token, assignments by trying all, rounds user by user."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from by_hand import Own, played, same
from torch import Tensor

from comingle.methods import make
from comingle.methods.base import Phase
from comingle.methods.fedamole import (
    ASSIGNED,
    EMBEDDINGS,
    EXPERTS,
    TOKENS,
    AssignmentServer,
    PairGating,
    solve_assignment,
)
from comingle.methods.server import Received, ServerSetup
from comingle.models.personal import PersonalModel
from comingle.models.routers import Router
from comingle.training.backends.local import InProcess
from comingle.utils.errors import DataError, DivergenceError, RecipeError
from exporting import trained as after_rounds
from naive import Gating, Reference, Rules, honest_double, top_k_softmax

RATE, ALL, CHOICES, MOST, INSTANCES, TOP = 0.5, 4, 2, 3, 3, 2
USERS = [0, 1, 2]
ROUNDS = [USERS, [0, 2], USERS]
SGD = {"name": "sgd", "learning_rate": RATE, "schedule": "constant", "weight_decay": 0}
CHANGES = {
    "training.experts": SGD,
    "training.router": SGD,
    "training.rounds": 3,
    "training.local_steps": 2,
    "training.batch_size": 2,
    "training.context": 8,
}
METHOD = {"name": "fedamole", "experts": ALL, "choices": CHOICES, "most": MOST, "instances": INSTANCES}


@pytest.fixture
def tiny(federate: Any) -> Callable[..., InProcess]:
    def make(**changes: Any) -> InProcess:
        return federate(METHOD, base="random:llama?layers=2&dim=32", changes={**CHANGES, **changes})

    return make


# ---------------------------------------------------------------- gates and assignments


class ByHandGates(Gating):
    """One half for the shared expert; a softmax over the top of ``(A_e x) (T x) / sqrt(r)`` has the other."""

    a: Tensor
    t: Tensor

    def __call__(self, x: Tensor) -> list[Tensor]:
        rank, held = self.a.shape[1], [e for e in range(1, len(self.a)) if bool((self.a[e] != 0).any())]
        rows, found, logits = x.reshape(-1, x.shape[-1]), [], []
        for token in rows:
            said = [((self.a[e] @ token) * (self.t[:rank] @ token)).sum() / math.sqrt(rank) for e in held]
            logits.append(torch.stack(said))
            shares = dict(zip(held, top_k_softmax(logits[-1], TOP), strict=True))
            none = token.new_zeros(())
            found.append(torch.stack([none + 0.5] + [shares.get(e, none) / 2 for e in range(1, len(self.a))]))
        self.logits[:] = [torch.stack(logits)]
        return [gate.view(*x.shape[:-1], 1) for gate in torch.stack(found).T]


def test_gates_are_pairs_of_projections_of_the_experts_that_are_there() -> None:
    draw = torch.Generator().manual_seed(0)
    x, t = (torch.randn(2, n, 7, generator=draw, dtype=torch.float64) for n in (9, 5))
    router = Router()
    router.gating, router.weight, router.balance = PairGating(), t, "generalist"
    router.keys = torch.randn(2, 5, 3, 7, generator=draw, dtype=torch.float64)
    router.keys[0, 2] = 0
    router.keys[1, 1:4] = 0
    router.present = torch.ones(2, 5, dtype=torch.bool)
    gates = router(x)
    for user in range(2):
        hand = ByHandGates(5, None, Rules(scale=1))
        hand.a, hand.t = router.keys[user], t[user]
        torch.testing.assert_close(gates[user], torch.cat(hand(x[user]), -1))
    torch.testing.assert_close(gates.sum(-1), torch.ones(2, 9, dtype=torch.float64))
    assert gates[0, :, 2].count_nonzero() == gates[1, :, 1:4].count_nonzero() == 0
    assert router.penalty is not None
    router.keys[1, 4] += 1  # who has one expert has it always
    assert torch.equal(router(x)[1], gates[1])


def by_trying(scores: Tensor, choices: int, most: int) -> tuple[list[list[int]], float]:
    """The users of each expert for which the sum is largest, of all that may be."""
    experts, users = scores.shape
    least = min(2, experts * choices // users)
    best: tuple[list[list[int]], float] = [], -math.inf
    for chosen in product(*(combinations(range(users), choices) for _ in range(experts))):
        counts = [sum(user in of for of in chosen) for user in range(users)]
        total = sum(float(scores[e, user]) for e, of in enumerate(chosen) for user in of)
        if least <= min(counts) and max(counts) <= most and total > best[1]:
            best = [list(of) for of in chosen], total
    return best


@pytest.mark.parametrize(
    ("experts", "users", "choices", "most"), [(4, 3, 2, 3), (4, 3, 1, 2), (3, 4, 2, 2), (5, 2, 1, 4), (2, 5, 2, 1)]
)
def test_an_assignment_is_the_best_of_all(experts: int, users: int, choices: int, most: int) -> None:
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        scores = (10.0 ** -(2 * seed) * torch.randn(experts, users, generator=draw).double()).softmax(1)
        if experts * choices < users:  # then some user has none, and nobody may ask for that
            continue
        wanted, _ = by_trying(scores, choices, most)
        found = solve_assignment(scores, choices, most)
        assert [row.nonzero().flatten().tolist() for row in found] == wanted


@pytest.mark.parametrize(("settings", "total"), [({"experts": 2, "choices": 1}, 2), ({"experts": 9, "most": 5}, 18)])
def test_more_or_fewer_experts_than_users_may_have_are_refused(federate: Any, settings: Any, total: int) -> None:
    with pytest.raises(RecipeError, match=rf"method fedamole: .* {total} .*allowed: 3 to \d+ \(method"):
        federate({"name": "fedamole", **settings})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("users", [1, 3])
def test_scores_that_are_no_numbers_are_a_divergence(value: float, users: int) -> None:
    scores = torch.zeros(ALL, users)
    scores[1, 0] = value
    server = make("fedamole", experts=ALL, choices=CHOICES, most=MOST).server
    assert isinstance(server, AssignmentServer)
    message = r"^method fedamole: 1 of \d+ scores .*training\.router\.learning_rate"
    with pytest.raises(DivergenceError, match=message):
        server.assign(scores)


def test_a_run_that_diverges_says_so(federate: Any) -> None:
    """While every tensor is still finite: products of two of them are not."""
    large = {"training.experts.learning_rate": 1e6, "training.router.learning_rate": 1e6}
    federation = federate("fedamole", dtype="float32", changes=large)
    with pytest.raises(DivergenceError, match=r"^method fedamole: \d+ of \d+ scores"):
        played(federation, [USERS] * 3)


# ---------------------------------------------------------------- rounds


def reference(federation: Any, own: Own, mix: str, *, routed: bool) -> Reference:
    clients = federation.clients
    rules = Rules(scale=clients.model.adapters.scale, mix=mix, balance="uniform")
    tensors = {name: t for name, t in own.items() if not name.endswith(".router")}
    made = Reference(clients.model.base.model, "llama", tensors, rules)
    for i, gating in enumerate(made.gatings if routed else []):
        gating.__class__ = ByHandGates
        gating.a, gating.t = own[f"layers.{i}.mlp.up.a"], own[f"layers.{i}.mlp.router"]
    return made


def step(federation: Any, own: Own, windows: Tensor, mix: str) -> Own:
    """One of plain descent on everything."""
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    losses, penalty = reference(federation, leaves, mix, routed=True).losses(windows)
    objective = losses.mean() + federation.clients.plan.training.balance_weight * penalty
    found = torch.autograd.grad(objective, list(leaves.values()), materialize_grads=True)
    return {name: own[name] - RATE * gradient for (name, gradient) in zip(leaves, found, strict=True)}


def directions(federation: Any, own: Own, user: int, number: int, mix: str) -> list[Tensor]:
    """For each MLP the mean over windows of the unit vector along the mean of what it reads."""
    clients, phase = federation.clients, Phase(roles=frozenset(), label="instances")
    windows = torch.cat([clients.batch_source.draw([user], phase, number, 0, i)[0].long() for i in range(2)])[
        :INSTANCES
    ]
    made, read = reference(federation, own, mix, routed=False), []
    for layer in made.model.model.layers:
        read.append([])
        layer.mlp.register_forward_pre_hook(lambda _, args, to=read[-1]: to.append(args[0]))
    with torch.no_grad():
        made.losses(windows)
    means = [x.mean(1) for (x,) in read]
    return [torch.stack([m / m.norm() for m in of_mlp]).mean(0) for of_mlp in means]


class Hand:
    """The server, expert by expert."""

    def __init__(self, federation: Any) -> None:
        kept = federation.server.kept
        self.shared = {n.removeprefix("model."): t.clone() for n, t in kept.items() if n.startswith("model.")}
        self.experts = {n.removeprefix(EXPERTS): t.clone() for n, t in kept.items() if n.startswith(EXPERTS)}
        self.rank = next(iter(self.experts.values())).shape[1]
        held = kept[ASSIGNED].tolist()
        self.held = [[[e for e in of if e < ALL] for of in user] for user in held]
        self.tokens = [list(kept[TOKENS][user].clone()) for user in USERS]
        self.embedded = [list(kept[EMBEDDINGS][layer].clone()) for layer in range(2)]

    def sent(self, user: int) -> Own:
        """Shared tensors, the user's own experts in their order, zeros in the places that are left."""
        found = {}
        for name, t in self.shared.items():
            found[name] = t.clone()
            if name.endswith(".router"):
                found[name][self.rank :] = 0
            if name in self.experts:
                own = [self.experts[name][e] for e in self.held[user][int(name.split(".")[1])]]
                rest = [torch.zeros_like(t[0])] * (MOST - len(own))
                found[name] = torch.stack([t[0], *own, *rest])
        return found

    def take(self, uploads: dict[int, Own], told: dict[int, list[Tensor]]) -> None:
        for name, t in self.shared.items():
            parts = [own[name][:1] if name in self.experts else own[name] for own in uploads.values()]
            t.copy_(torch.stack(parts).mean(0))
        for layer, expert in product(range(2), range(ALL)):
            at = {u: self.held[u][layer].index(expert) for u in uploads if expert in self.held[u][layer]}
            if not at:
                continue
            for name, t in self.experts.items():
                if name.startswith(f"layers.{layer}."):
                    t[expert] = torch.stack([uploads[u][name][1 + place] for u, place in at.items()]).mean(0)
            keys = {u: uploads[u][f"layers.{layer}.mlp.up.a"][1 + place] for u, place in at.items()}
            self.embedded[layer][expert] = torch.stack([a @ told[u][layer] for u, a in keys.items()]).mean(0)
        for user, own in uploads.items():
            for layer in range(2):
                self.tokens[user][layer] = own[f"layers.{layer}.mlp.router"][: self.rank] @ told[user][layer]
        for layer in range(2):
            fit = torch.stack([torch.stack([e @ self.tokens[u][layer] for u in USERS]) for e in self.embedded[layer]])
            chosen, _ = by_trying((fit / math.sqrt(self.rank)).softmax(1), CHOICES, MOST)
            for user in USERS:
                self.held[user][layer] = [e for e in range(ALL) if user in chosen[e]]


@pytest.mark.parametrize("mix", ["output", "linear"])
@pytest.mark.sampled(1)
def test_fedamole_is_its_algorithm(tiny: Any, mix: str) -> None:
    federation = tiny(**{"adapters.mix": mix})
    clients, hand, held = federation.clients, Hand(federation), []
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads, told = {}, {}
            for user in members:
                own = hand.sent(user)
                for at in range(clients.plan.training.local_steps):
                    windows = clients.batch_source.draw([user], clients.phases[0], number, at, 0)[0].long()
                    own = step(federation, own, windows, mix)
                told[user] = [math.sqrt(32) * d for d in directions(federation, own, user, number, mix)]
                uploads[user] = own
            held.append([list(map(list, of)) for of in hand.held])
            hand.take(uploads, told)
        found = played(federation, ROUNDS)
    same(found, [hand.sent(user) for user in USERS])
    torch.testing.assert_close(federation.server.kept[TOKENS], torch.stack([torch.stack(t) for t in hand.tokens]))
    embedded = torch.stack([torch.stack(e) for e in hand.embedded])
    torch.testing.assert_close(federation.server.kept[EMBEDDINGS], embedded)
    held.append(hand.held)
    assert any(one != other for one, other in pairwise(held))  # assignments have changed
    assert {len(of) for each in held for user in each for of in user} == {2, 3}


def test_who_joins_has_the_experts_that_fit_best_and_moves_nothing(tiny: Any) -> None:
    federation = tiny()
    found = played(federation, [USERS])
    settled = federation.server.method.server.settled()
    assert isinstance(settled, AssignmentServer)
    assert [settled.exchanges(done) for done in (1, 2, 3)] == [True, False, False]
    models = {name: t.unsqueeze(0) for name, t in found[0].items()}
    alone = settled.start(ServerSetup(models=models, users=["new"], scales=torch.ones(1), seed=0))
    kept = {n: (alone[n] if n in settled.by_user else t.clone()) for n, t in federation.server.kept.items()}
    sent = {name: torch.randn_like(t.unsqueeze(0)) for name, t in found[0].items()}
    one = torch.ones(1)
    settled.aggregate(kept, Received(users=[0], tensors=sent, weights=one, ranks=torch.tensor([2]), scales=one))
    for name, t in federation.server.kept.items():
        assert name in settled.by_user or torch.equal(kept[name], t)
    fit = torch.einsum("ler,lr->le", kept[EMBEDDINGS], kept[TOKENS][0])
    for layer in range(2):
        best = sorted(range(ALL), key=lambda e, of=fit[layer]: -float(of[e]))[:MOST]
        assert kept[ASSIGNED][0, layer].tolist() == sorted(best)


# ---------------------------------------------------------------- models in use


@pytest.fixture
def ann(federate: Any) -> PersonalModel:
    return after_rounds(federate, METHOD, dtype="float64").user("ann")


def test_no_architecture_weighs_by_pairs(ann: PersonalModel, tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"pairs of projections.*--format merged-approximately"):
        ann.export(tmp_path / "t")
    assert ann.export(tmp_path / "m", format="merged-approximately").lost
    with pytest.raises(DataError, match=r"user 'ann': .*experts .*token"):
        ann.merge()
    gates = ann.route("some text that is read").gates
    assert torch.equal(gates[..., 0], torch.full_like(gates[..., 0], 0.5))
    torch.testing.assert_close(gates.sum(-1), torch.ones_like(gates[..., 0]))


def test_defaults_are_the_papers() -> None:
    server = make("fedamole").server
    assert isinstance(server, AssignmentServer)
    assert (server.choices, server.most, server.experts) == (2, 8, 0)
