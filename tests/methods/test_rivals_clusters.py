"""FedLEASE and FedTreeLoRA against loops from their papers: silhouettes user by user, gates token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from by_hand import Own, rows_of, same
from receiving import downloaded, received, started
from torch import Tensor

from comingle.methods import make
from comingle.methods.clustered import (
    NUM_CLUSTERS,
    OWN_CLUSTER,
    AdaptiveGating,
    ClusterExperts,
    agglomerate,
    best_clusters,
    cosine_distances,
    cut,
    silhouette,
    unit_factors,
)
from comingle.methods.fedalt import (
    LABELS,
    ScalarGating,
    TreeOfUsers,
    choose_clusters,
    factors_by_layer,
    frobenius_distances,
    means_of_clusters,
)
from comingle.models.personal import PersonalModel
from comingle.models.routers import Router
from comingle.training.backends.local import InProcess
from comingle.utils.errors import DataError, DivergenceError
from exporting import trained as after_rounds
from federations import download_all, play_round
from naive import Gating, Reference, Rules, honest_double, top_k_softmax

RATE, MOST = 0.2, 3
SGD = {"name": "sgd", "learning_rate": RATE, "schedule": "constant", "weight_decay": 0}
CHANGES = {
    "training.experts": SGD,
    "training.router": SGD,
    "training.rounds": 5,
    "training.local_steps": 2,
    "training.batch_size": 2,
    "training.context": 8,
}
METHOD = {"name": "fedlease", "max_experts": MOST, "warmup_rounds": 2}


# ---------------------------------------------------------------- clusters


def some_points(seed: int, users: int) -> Tensor:
    """The users' distances on a plane, where no two are equal."""
    points = torch.randn(users, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.tensor([[math.dist(a, b) for b in points.tolist()] for a in points.tolist()], dtype=torch.float64)


def groups_by_hand(far: list[list[float]], count: int) -> list[list[int]]:
    """Merge the two closest groups, by the mean distance of their users, until ``count`` are left."""
    groups = [[user] for user in range(len(far))]
    while len(groups) > count:
        apart = {
            (a, b): sum(far[i][j] for i in groups[a] for j in groups[b]) / (len(groups[a]) * len(groups[b]))
            for a, b in combinations(range(len(groups)), 2)
        }
        a, b = min(apart, key=lambda pair: apart[pair])
        groups = [group for at, group in enumerate(groups) if at not in (a, b)] + [groups[a] + groups[b]]
    return sorted(sorted(group) for group in groups)


def silhouette_by_hand(far: list[list[float]], groups: list[list[int]]) -> float:
    total = 0.0
    for group in groups:
        for user in group:
            if len(group) == 1:
                continue
            a = sum(far[user][other] for other in group if other != user) / (len(group) - 1)
            b = min(sum(far[user][other] for other in rest) / len(rest) for rest in groups if rest is not group)
            total += (b - a) / max(a, b)
    return total / len(far)


def best_by_hand(far: list[list[float]], most: int) -> list[list[int]]:
    counts = range(2, min(most, len(far) - 1) + 1)
    found = [groups_by_hand(far, count) for count in counts]
    return max(found, key=lambda groups: silhouette_by_hand(far, groups), default=groups_by_hand(far, 1))


def as_groups(labels: Tensor) -> list[list[int]]:
    return [(labels == label).nonzero().flatten().tolist() for label in range(int(labels.max()) + 1)]


@pytest.mark.parametrize("users", [1, 2, 3, 7, 12])
def test_clusters_are_those_of_merging_the_closest_by_hand(users: int) -> None:
    for seed in range(4):
        distances = some_points(seed, users)
        far, merges = distances.tolist(), agglomerate(distances)
        for count in range(1, users + 1):
            groups = groups_by_hand(far, count)
            labels = cut(merges, count)
            assert as_groups(labels) == groups
            if 1 < count < users:
                assert silhouette(distances, labels) == pytest.approx(silhouette_by_hand(far, groups), rel=1e-12)
        for most in (2, 4, 99):
            assert as_groups(best_clusters(distances, most)) == best_by_hand(far, most)


def test_users_at_one_point_have_a_silhouette_of_zero() -> None:
    assert silhouette(torch.zeros(4, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1])) == 0
    assert as_groups(best_clusters(torch.zeros(5, 5, dtype=torch.float64), 3)) == [[0, 1, 2, 3], [4]]


def far_by_hand(one: Own, other: Own) -> float:
    """Equation 2: one minus the cosine of two users' B, averaged over adapted layers."""
    names = [name for name in one if name.endswith(".b")]
    parts = []
    for name in names:
        a, b = one[name].flatten().tolist(), other[name].flatten().tolist()
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        parts.append(1 - dot / (math.hypot(*a) * math.hypot(*b)))
    return sum(parts) / len(parts)


def some_uploads(seed: int, users: int) -> Own:
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "0.q.a": (2, 5),
        "0.q.b": (2, 3),
        "0.mlp.up.a": (1, 2, 5),
        "0.mlp.up.b": (1, 2, 4),
        "0.mlp.router": (5, 5),
    }
    return {name: torch.randn(users, *shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def test_distances_are_means_of_cosines_of_b() -> None:
    uploads = some_uploads(0, 4)
    units = unit_factors(uploads)
    found = cosine_distances(units, units, 2)
    for i in range(4):
        for j in range(4):
            wanted = far_by_hand({n: t[i] for n, t in uploads.items()}, {n: t[j] for n, t in uploads.items()})
            assert float(found[i, j]) == pytest.approx(wanted, abs=1e-12)
    mean = units[1:].mean(0, keepdim=True)
    torch.testing.assert_close(cosine_distances(units, mean, 2)[0, 0], found[0, 1:].mean())
    uploads["0.q.b"][0] = 0  # who has not trained is as far from all as a right angle
    units = unit_factors(uploads)
    assert bool(units.isfinite().all())


# ---------------------------------------------------------------- gates


class ByHandGates(Gating):
    """The paper's router of 2M - 1 outputs: M for the user's own expert, one for each other; the M largest count."""

    a: Tensor
    t: Tensor

    def __call__(self, x: Tensor) -> list[Tensor]:
        slots, held = len(self.a), [e for e in range(len(self.a)) if bool((self.a[e] != 0).any())]
        count, found = len(held), []
        for token in x.reshape(-1, x.shape[-1]):
            rows = [*range(count), *(slots + e - 1 for e in held if e > 0)]
            shares = top_k_softmax(torch.stack([self.t[row] @ token for row in rows]), count)
            gates = [token.new_zeros(()) for _ in range(slots)]
            for row, share in zip(rows, shares, strict=True):
                e = 0 if row < slots else row - slots + 1
                gates[e] = gates[e] + share
            found.append(torch.stack(gates))
        return [gate.view(*x.shape[:-1], 1) for gate in torch.stack(found).T]


def test_gates_are_the_largest_of_outputs_of_which_half_are_the_users_own() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 9, 7, generator=draw, dtype=torch.float64)
    router = Router()
    router.gating = AdaptiveGating()
    router.weight = torch.randn(3, 2 * 4 - 1, 7, generator=draw, dtype=torch.float64)
    router.keys = torch.randn(3, 4, 2, 7, generator=draw, dtype=torch.float64)
    router.keys[1, 3] = 0  # three experts
    router.keys[2, 1:] = 0  # its own alone
    router.present = torch.ones(3, 4, dtype=torch.bool)
    gates = router(x)
    for user in range(3):
        hand = ByHandGates(4, None, Rules(scale=1))
        hand.a, hand.t = router.keys[user], router.weight[user]
        torch.testing.assert_close(gates[user], torch.cat(hand(x[user]), -1))
    torch.testing.assert_close(gates.sum(-1), torch.ones(3, 9, dtype=torch.float64))
    assert bool((gates[..., 0] > 0).all())  # the user's own always takes part
    assert len({int(n) for n in gates[0].count_nonzero(-1)}) > 1  # and a number of others that tokens decide on
    assert torch.equal(gates[2, :, 0], torch.ones(9, dtype=torch.float64))


# ---------------------------------------------------------------- rounds


@pytest.fixture
def tiny(federate: Any) -> Callable[..., InProcess]:
    def make(**changes: Any) -> InProcess:
        users = ("ann", "bob", "cem", "dan", "eve")
        return federate(METHOD, users=users, base="random:llama?layers=2&dim=32", changes={**CHANGES, **changes})

    return make


def reference(federation: Any, own: Own, mix: str, gates: type[Gating]) -> Reference:
    clients = federation.clients
    tensors = {name: t for name, t in own.items() if not name.endswith(".router")}
    made = Reference(clients.model.base.model, "llama", tensors, Rules(scale=clients.model.adapters.scale, mix=mix))
    for i, gating in enumerate(made.gatings):
        gating.__class__ = gates
        gating.a, gating.t = own[f"layers.{i}.mlp.up.a"], own[f"layers.{i}.mlp.router"]
    return made


def step(federation: Any, own: Own, windows: Tensor, mix: str, gates: type[Gating]) -> Own:
    """One of plain descent on the user's own expert, attention and the router."""
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    losses, _ = reference(federation, leaves, mix, gates).losses(windows)
    gradients = torch.autograd.grad(losses.mean(), list(leaves.values()), materialize_grads=True)
    moved = {}
    for (name, t), gradient in zip(own.items(), gradients, strict=True):
        moved[name] = t - RATE * gradient
        if t.dim() == 3:
            moved[name][1:] = t[1:]  # the others' experts are frozen
    return moved


def shared(own: Own) -> Own:
    return {name: t[:1] if t.dim() == 3 else t for name, t in own.items()}


def mean(parts: list[Own]) -> Own:
    return {name: torch.stack([one[name] for one in parts]).mean(0) for name in parts[0]}


class Hand:
    """The server: a list of experts, and whose each user trains."""

    def __init__(self, owns: list[Own]) -> None:
        self.first = [{name: t.clone() for name, t in own.items()} for own in owns]
        self.experts: list[Own] = []
        self.members: list[list[int]] = []
        self.warm: dict[int, Own] = {}

    def cluster(self, user: int) -> int | None:
        return next((c for c, members in enumerate(self.members) if user in members), None)

    def take(self, uploads: dict[int, Own]) -> None:
        new = {user: own for user, own in uploads.items() if self.cluster(user) is None}
        if not self.members:
            users = sorted(new)
            far = [[far_by_hand(new[i], new[j]) if i != j else 0.0 for j in users] for i in users]
            self.members = [[users[at] for at in group] for group in best_by_hand(far, MOST)]
            self.founders = [list(members) for members in self.members]
            self.experts = [mean([uploads[user] for user in members]) for members in self.members]
            self.warm = dict(new)
            return
        for c, members in enumerate(self.members):
            if trained := [uploads[user] for user in members if user in uploads]:
                self.experts[c] = mean(trained)
        for user, own in new.items():
            apart = [
                sum(far_by_hand(own, self.warm[other]) for other in founders) / len(founders)
                for founders in self.founders
            ]
            self.members[apart.index(min(apart))].append(user)

    def sent(self, user: int) -> Own:
        """The user's own expert, then the other clusters', then nothing."""
        own = self.cluster(user)
        found = {}
        for name, t in self.first[user].items():
            if t.dim() != 3:
                found[name] = t if own is None else self.experts[own][name]
                continue
            parts = [t[:1]] if own is None else [self.experts[own][name]]
            parts += [] if own is None else [e[name] for c, e in enumerate(self.experts) if c != own]
            parts += [torch.zeros_like(t[:1])] * (MOST - len(parts))
            found[name] = torch.cat(parts)
        return found


@pytest.mark.parametrize("mix", ["output", "linear"])
@pytest.mark.sampled(1)
def test_fedlease_is_its_algorithm(tiny: Any, mix: str) -> None:
    federation = tiny(**{"adapters.mix": mix})
    clients = federation.clients
    users = list(range(len(clients.trainers)))
    rounds = [users, users[:-1], users[:-1], users, users]  # the last user misses the first exchange
    hand = Hand(rows_of(download_all(federation)))
    owns = {user: hand.sent(user) for user in users}
    with honest_double():
        for number, members in enumerate(rounds):
            for user in members:
                for at in range(clients.plan.training.local_steps):
                    windows = clients.batch_source.draw([user], clients.phases[0], number, at, 0)[0].long()
                    owns[user] = step(federation, owns[user], windows, mix, ByHandGates)
            if number + 1 >= METHOD["warmup_rounds"]:
                hand.take({user: shared(owns[user]) for user in members})
                owns = {user: hand.sent(user) for user in users}
        for number, members in enumerate(rounds):
            play_round(federation, number, members)
    same(rows_of(download_all(federation)), [owns[user] for user in users])
    assert len(hand.members) > 1
    assert federation.server.kept[OWN_CLUSTER].tolist() == [hand.cluster(user) for user in users]


# ---------------------------------------------------------------- the server alone


def begun(users: int) -> tuple[ClusterExperts, Own]:
    """A server whose users have not exchanged anything."""
    server = make("fedlease", max_experts=MOST).server
    assert isinstance(server, ClusterExperts)
    first = {name: t[0] for name, t in some_uploads(9, 1).items()}
    first = {name: torch.cat([t] * MOST) if t.dim() == 3 else t for name, t in first.items()}
    return server, started(server, first, users)


def two_groups() -> Own:
    """Uploads of six users: three whose B are alike, and three with the opposite."""
    near = torch.tensor([1.0, 1.1, 0.9, -1.0, -1.1, -0.9], dtype=torch.float64)
    found = some_uploads(1, 6)
    for name, t in found.items():
        if name.endswith(".b"):
            found[name] = t[:1] * near.view(-1, *[1] * (t.dim() - 1)) + 0.01 * t
    return found


def test_two_groups_are_two_experts_that_start_as_means() -> None:
    server, kept = begun(6)
    uploads = two_groups()
    weights = [0.1, 0.2, 0.1, 0.3, 0.2, 0.1]
    server.aggregate(kept, received(uploads, weights))
    assert (int(kept[NUM_CLUSTERS]), kept[OWN_CLUSTER].tolist()) == (2, [0, 0, 0, 1, 1, 1])
    for user in range(6):
        group = [0, 1, 2] if user < 3 else [3, 4, 5]
        rest = [other for other in range(6) if other not in group]
        sent = downloaded(server, kept, user)
        for name, t in uploads.items():
            own, others = (sum(weights[u] * t[u] for u in of) / sum(weights[u] for u in of) for of in (group, rest))
            wanted = torch.cat([own, others, torch.zeros_like(own)]) if t.dim() == 4 else own
            torch.testing.assert_close(sent[name], wanted)


def test_one_user_or_two_are_one_cluster() -> None:
    server, kept = begun(6)
    uploads = {name: t[2:4] for name, t in two_groups().items()}
    server.aggregate(kept, received(uploads, [0.5, 0.5], users=[2, 3]))
    assert (int(kept[NUM_CLUSTERS]), kept[OWN_CLUSTER].tolist()) == (1, [MOST, MOST, 0, 0, MOST, MOST])


def test_who_joins_takes_the_closest_expert_and_moves_nothing() -> None:
    server, kept = begun(6)
    uploads = two_groups()
    server.aggregate(kept, received(uploads, [1 / 6] * 6))
    settled = server.settled()
    assert [settled.exchanges(done) for done in (1, 2, 3)] == [True, False, False]
    for user, cluster in ((1, 0), (5, 1)):
        alone = {name: t.clone() for name, t in kept.items()}
        alone[OWN_CLUSTER] = torch.tensor([MOST])
        like = {name: 3 * t[user : user + 1] for name, t in uploads.items()}
        settled.aggregate(alone, received(like, [1.0]))
        assert alone[OWN_CLUSTER].tolist() == [cluster]
        assert all(torch.equal(t, kept[name]) for name, t in alone.items() if name != OWN_CLUSTER)
        sent = downloaded(settled, alone, 0)
        assert all(torch.equal(t, downloaded(server, kept, user)[name]) for name, t in sent.items())


def test_factors_that_are_no_numbers_are_a_divergence() -> None:
    server, kept = begun(6)
    uploads = two_groups()
    uploads["0.q.b"][3, 0, 0] = math.nan
    with pytest.raises(DivergenceError, match=r"^method fedlease: \d+ of 84 numbers.*learning_rate"):
        server.aggregate(kept, received(uploads, [1 / 6] * 6))


# ---------------------------------------------------------------- models in use


@pytest.fixture
def ann(federate: Any) -> PersonalModel:
    return after_rounds(federate, {"name": "fedlease", "max_experts": 2}, dtype="float64").user("ann")


def test_no_architecture_chooses_a_number_of_outputs(ann: PersonalModel, tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"adaptive number of outputs.*--format merged-approximately"):
        ann.export(tmp_path / "t")
    assert ann.export(tmp_path / "m", format="merged-approximately").lost
    gates = ann.route("some text that is read").gates
    assert bool((gates[..., 0] > 0).all())
    torch.testing.assert_close(gates.sum(-1), torch.ones_like(gates[..., 0]))


def test_defaults_are_the_codes() -> None:
    server = make("fedlease").server
    assert isinstance(server, ClusterExperts)
    assert (server.max_experts, server.exchange_from) == (4, 1)


# ---------------------------------------------------------------- FedTreeLoRA

TAU, WINDOW = -0.2, 2
TREE = {"name": "fedtreelora", "threshold": TAU, "window": WINDOW, "warmup_rounds": 2}


def clusters_by_hand(far_by_layer: list[list[list[float]]], tau: float, window: int) -> list[list[list[int]]]:
    """The groups of each layer: of cuts of the tree of mean distances the one with the best score within the window."""
    users = range(len(far_by_layer[0]))
    whole = [[sum(far[i][j] for far in far_by_layer) / len(far_by_layer) for j in users] for i in users]
    before, chosen = 1, []
    for far in far_by_layer:
        best: tuple[float, int] = (-math.inf, 1)
        for count in range(before, min(len(users), before + window)):
            score = tau if count == 1 else silhouette_by_hand(far, groups_by_hand(whole, count))
            if score > best[0]:
                best = score, count
        before = best[1]
        chosen.append(groups_by_hand(whole, before))
    return chosen


@pytest.mark.parametrize(("tau", "window"), [(0.3, 2), (-1.0, 2), (-1.0, 4), (1.0, 3)])
@pytest.mark.parametrize("users", [2, 5, 9])
def test_clusters_are_cuts_of_one_tree_that_grow_by_less_than_the_window(users: int, tau: float, window: int) -> None:
    for seed in range(4):
        distances = [some_points(10 * seed + layer, users) for layer in range(4)]
        merges = agglomerate(torch.stack(distances).mean(0))
        labels = choose_clusters(merges, distances, tau, window)
        wanted = clusters_by_hand([far.tolist() for far in distances], tau, window)
        assert [as_groups(labels[:, layer]) for layer in range(4)] == wanted
        counts = [1, *(int(of_layer.max()) + 1 for of_layer in labels.T)]
        assert all(0 <= after - before < window for before, after in pairwise(counts))
        assert tau < 1 or counts == [1] * 5  # no silhouette is above 1


def test_one_user_is_one_cluster_in_each_layer() -> None:
    assert choose_clusters([], [torch.zeros(1, 1).double()] * 2, 0.1, 3).tolist() == [[0, 0]]


def test_distances_are_norms_of_differences_of_all_factors_of_a_layer() -> None:
    draw = torch.Generator().manual_seed(0)
    names = ["layers.10.q.b", "layers.2.q.b", "layers.2.mlp.up.b", "layers.2.q.a"]
    uploads = {name: torch.randn(3, 2, 4, generator=draw, dtype=torch.float64) for name in names}
    of_second, of_last = factors_by_layer(uploads)  # by number: 2, then 10
    for factors, parts in ((of_second, names[1:3]), (of_last, names[:1])):
        found = frobenius_distances(factors, factors)
        for i, j in combinations(range(3), 2):
            wanted = math.sqrt(sum(float((uploads[name][i] - uploads[name][j]).square().sum()) for name in parts))
            assert float(found[i, j]) == pytest.approx(wanted, rel=1e-12)


class ByHandShares(Gating):
    """The same for all tokens: lambda and the rest, or all for an expert without another."""

    a: Tensor
    t: Tensor

    def __call__(self, x: Tensor) -> list[Tensor]:
        share = 1 / (1 + torch.exp(-self.t[0, 0]))
        if not bool((self.a[1] != 0).any()):
            share = torch.ones_like(share)
        return [torch.ones_like(x[..., :1]) * one for one in (share, 1 - share)]


def without_router(own: Own) -> Own:
    return {name: t for name, t in own.items() if not name.endswith(".router")}


class HandTree:
    """The server: the most recent upload of each user, and groups of users for each layer."""

    def __init__(self, owns: list[Own]) -> None:
        self.first = owns
        self.uploads: dict[int, Own] = {}
        self.warm: dict[int, Own] = {}
        self.groups: list[list[list[int]]] = []

    def far(self, one: Own, other: Own) -> list[float]:
        return [
            math.sqrt(sum(float((one[n] - other[n]).square().sum()) for n in one if n.endswith(".b") and f".{i}." in n))
            for i in range(2)
        ]

    def take(self, uploads: dict[int, Own]) -> None:
        new = {user: own for user, own in uploads.items() if user not in self.uploads}
        self.uploads |= uploads
        if not self.groups:
            users = sorted(new)
            far = [[[self.far(new[i], new[j])[layer] for j in users] for i in users] for layer in range(2)]
            found = clusters_by_hand(far, TAU, WINDOW)
            self.groups = [[[users[at] for at in group] for group in groups] for groups in found]
            self.warm = dict(new)
            return
        for user, own in new.items():
            closest = min(self.warm, key=lambda other: sum(self.far(own, self.warm[other])))
            for groups in self.groups:
                next(group for group in groups if closest in group).append(user)

    def sent(self, user: int) -> Own:
        found = {}
        for name, t in self.first[user].items():
            if name.endswith(".router"):
                continue
            groups = self.groups[int(name.split(".")[1])] if self.groups else []
            group = next((group for group in groups if user in group), None)
            own, rest = t[:1] if t.dim() == 3 else t, [other for other in self.uploads if other not in (group or [])]
            external = torch.zeros_like(own)
            if group is not None:
                own = torch.stack([self.uploads[other][name] for other in group]).mean(0)
                if rest:
                    external = torch.stack([self.uploads[other][name] for other in rest]).mean(0)
            found[name] = torch.cat([own, external]) if t.dim() == 3 else own
        return found


@pytest.mark.parametrize("mix", ["output", "linear"])
@pytest.mark.sampled(1)
def test_fedtreelora_is_its_algorithm(federate: Any, mix: str) -> None:
    names, changes = ("ann", "bob", "cem", "dan", "eve"), {**CHANGES, "adapters.mix": mix}
    federation = federate(TREE, users=names, base="random:llama?layers=2&dim=32", changes=changes)
    clients = federation.clients
    users = list(range(len(names)))
    rounds = [users, users[:-1], users[:-1], users, users[1:]]  # the last user misses the first exchange
    owns = dict(enumerate(rows_of(download_all(federation))))
    hand = HandTree(list(owns.values()))
    with honest_double():
        for number, members in enumerate(rounds):
            for user in members:
                for at in range(clients.plan.training.local_steps):
                    windows = clients.batch_source.draw([user], clients.phases[0], number, at, 0)[0].long()
                    owns[user] = step(federation, owns[user], windows, mix, ByHandShares)
            if number + 1 >= TREE["warmup_rounds"]:
                uploads = {user: shared(owns[user]) for user in members}
                hand.take({user: without_router(own) for user, own in uploads.items()})
                owns = {user: {**owns[user], **hand.sent(user)} for user in users}
        for number, members in enumerate(rounds):
            play_round(federation, number, members)
    same(rows_of(download_all(federation)), [owns[user] for user in users])
    labels = federation.server.kept[LABELS]
    assert [sorted(map(sorted, groups)) for groups in hand.groups] == [sorted(as_groups(of)) for of in labels.T]
    assert len(hand.groups[0]) < len(hand.groups[1])
    assert all(float(own["layers.1.mlp.router"][0, 0]) != 0 for own in owns.values())


def test_shares_are_one_number_of_the_user() -> None:
    router = Router()
    router.gating, router.weight = ScalarGating(), torch.zeros(2, 1, 3).double()
    router.weight[:, 0, 0] = math.log(3)
    router.keys, router.present = torch.ones(2, 2, 1, 3).double(), torch.ones(2, 2, dtype=torch.bool)
    router.keys[1, 1] = 0
    gates = router(torch.randn(2, 4, 3).double())
    torch.testing.assert_close(gates, torch.tensor([[[0.75, 0.25]] * 4, [[1.0, 0.0]] * 4]).double())


def test_means_are_over_the_cluster_and_over_the_rest() -> None:
    uploads = torch.tensor([[1.0], [2.0], [4.0], [100.0]]).double()
    own, rest = means_of_clusters(uploads, torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
    assert (own.flatten().tolist(), rest.flatten().tolist()) == ([1.5, 4.0], [4.0, 1.5])
    own, rest = means_of_clusters(uploads[:2], torch.tensor([0, 0]), torch.ones(2).double())
    assert (own.tolist(), rest.tolist()) == ([[1.5]], [[0.0]])


def test_a_tree_of_factors_that_are_no_numbers_is_a_divergence() -> None:
    server = make("fedtreelora").server
    assert isinstance(server, TreeOfUsers)
    assert (server.threshold, server.window, server.exchange_from) == (0.1, 3, 1)
    uploads = {"layers.0.q.a": torch.ones(3, 2, 4).double(), "layers.0.q.b": torch.ones(3, 2, 4).double()}
    kept = started(server, {name: t[0] for name, t in uploads.items()}, 3)
    uploads["layers.0.q.b"][1, 0, 0] = math.inf
    with pytest.raises(DivergenceError, match=r"^method fedtreelora: 1 of 24 numbers.*learning_rate"):
        server.aggregate(kept, received(uploads, [1 / 3] * 3))
