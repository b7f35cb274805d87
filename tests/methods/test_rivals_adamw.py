"""Methods over LoRA with AdamW, unequal data and users who stay away, against torch's AdamW user by user."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from by_hand import Own, played, rows_of, same
from test_rivals_lora import changed, check_added, lora, product, stems
from torch import Tensor
from torch.optim import AdamW

from comingle.models.lora import init_a
from comingle.training.backends.local import InProcess
from comingle.training.client import finetuned
from comingle.utils.seeds import generator
from naive import Reference, Rules, honest_double

RATE, STEPS, DECAY = 0.02, 3, 0.1
AMOUNTS = [120, 300, 60]
ROUNDS = [[0, 1, 2], [0, 2], [1, 2], [0, 1], [0, 1, 2]]
ADAMW = {"name": "adamw", "learning_rate": RATE, "betas": [0.9, 0.999], "weight_decay": DECAY, "schedule": "cosine"}
CHANGES = {
    "training.experts": ADAMW,
    "training.router": {**ADAMW, "learning_rate": 2 * RATE, "schedule": "constant"},
    "training.rounds": len(ROUNDS),
    "training.local_steps": STEPS,
    "training.weighting": "tokens",
}


@pytest.fixture
def tiny(federate: Any, make_user: Any) -> Callable[..., InProcess]:
    users = [make_user(name, train=n) for name, n in zip(("ann", "bob", "cem"), AMOUNTS, strict=True)]

    def make(method: Any, **changes: Any) -> InProcess:
        base = "random:llama?layers=1&dim=32"
        return federate(method, users=users, base=base, changes={**CHANGES, **changes})

    return make


class Person:
    """A user's tensors, and an optimiser of torch for each group of them that asks for one."""

    def __init__(self, federation: Any, number: int):
        self.clients, self.number = federation.clients, number
        self.own = {n: t.requires_grad_() for n, t in rows_of(federation)[number].items()}
        self.scale = float(self.clients.model.adapters.scales[number])

    def takes(self, tree: Own) -> None:
        """What it has becomes this."""
        with torch.no_grad():
            for name, t in tree.items():
                self.own[name].copy_(t)

    @property
    def has(self) -> Own:
        """A copy."""
        return {name: t.detach().clone() for name, t in self.own.items()}

    def anew(self, trained: Callable[[str], bool]) -> AdamW:
        """An optimiser of some tensors that has not taken a step."""
        return AdamW([t for n, t in self.own.items() if trained(n)], lr=RATE, betas=(0.9, 0.999), weight_decay=DECAY)

    def loss(self, number: int, step: int, added: Own, mix: str) -> Tensor:
        """The mean over its batch."""
        windows = self.clients.batch_source.draw([self.number], self.clients.phases[0], number, step, 0)[0].long()
        factors = lora(self.own)
        whole = factors | {n: t for stem in added for n, t in changed(factors, stem, added, self.scale).items()}
        model = Reference(self.clients.model.base.model, "llama", whole, Rules(scale=self.scale, mix=mix))
        return model.losses(windows)[0].mean()

    def round(
        self,
        optimizer: AdamW,
        number: int,
        added: Own | None = None,
        stepped: Callable[[float], None] = lambda rate: None,
        near: tuple[float, Own] | None = None,
        mix: str = "output",
    ) -> Own:
        """Local steps ``near`` something; after each ``stepped`` hears of the rate."""
        for step in range(STEPS):
            done = (number * STEPS + step) / (len(ROUNDS) * STEPS)
            rate = RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
            for t in self.own.values():
                t.grad = None
            loss = self.loss(number, step, added or {}, mix)
            if near is not None:
                loss = loss + near[0] / 2 * sum((t - near[1][n]).square().sum() for n, t in self.own.items())
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            with torch.no_grad():
                stepped(rate)
        return self.has


def people(federation: InProcess) -> list[Person]:
    return [Person(federation, number) for number in range(3)]


def weighted(members: Sequence[int], trees: Sequence[Own]) -> Own:
    """The mean by amounts of text."""
    total = sum(AMOUNTS[user] for user in members)
    shares = [AMOUNTS[user] / total for user in members]
    return {n: torch.stack([p * tree[n] for p, tree in zip(shares, trees, strict=True)]).sum(0) for n in trees[0]}


def of_a(name: str) -> bool:
    return name.endswith(".a")


def of_b(name: str) -> bool:
    return name.endswith(".b")


def of_both(name: str) -> bool:
    return of_a(name) or of_b(name)


def test_rolora_begins_each_round_with_an_optimiser_that_has_not_taken_a_step(tiny: Any) -> None:
    federation = tiny("rolora")
    everybody = people(federation)
    with honest_double():
        for number, members in enumerate(ROUNDS):
            trained = of_b if number % 2 == 0 else of_a
            uploads = [everybody[u].round(everybody[u].anew(trained), number) for u in members]
            mean = weighted(members, uploads)
            for person in everybody:
                person.takes(mean)
        found = played(federation, ROUNDS)
    same(found, [person.has for person in everybody])


@pytest.mark.parametrize("ranks", [2, [2, 1, 2]])
@pytest.mark.slow
def test_flora_begins_each_round_with_a_lora_that_is_drawn_anew(tiny: Any, ranks: Any) -> None:
    """A of each user and round by itself, B zero, and an optimiser that has not taken a step."""
    federation = tiny("flora-stacking", **{"adapters.rank": ranks})
    everybody, own_ranks = people(federation), [ranks] * 3 if isinstance(ranks, int) else ranks
    added = {stem: torch.zeros_like(product(everybody[0].has, stem)) for stem in stems(lora(everybody[0].has))}
    times = [0, 0, 0]
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = {}
            for u in members:
                fresh = {
                    n: t * 0 if of_b(n) else drawn_anew(u, times[u], n, t, own_ranks[u])
                    for n, t in lora(everybody[u].has).items()
                }
                times[u] += 1
                everybody[u].takes(fresh)
                uploads[u] = everybody[u].round(everybody[u].anew(of_both), number, added)
            total = sum(AMOUNTS[u] for u in members)
            for stem, change in added.items():
                parts = [AMOUNTS[u] / total * everybody[u].scale * product(own, stem) for u, own in uploads.items()]
                added[stem] = change + sum(parts)
        played(federation, ROUNDS)
    assert max(float(change.abs().max()) for change in added.values()) > 1e-3
    check_added(federation, added)
    for own in rows_of(federation):
        assert not any(t.any() for n, t in own.items() if of_b(n))


def drawn_anew(user: int, times: int, name: str, like: Tensor, rank: int) -> Tensor:
    drawn = init_a(tuple(like.shape), generator(0, ("ann", "bob", "cem")[user], "anew", name, times)).to(like)
    drawn[..., rank:, :] = 0
    return drawn


def test_fedex_goes_on_with_everybodys_optimiser(tiny: Any) -> None:
    federation = tiny("fedex-lora")
    everybody = people(federation)
    optimizers = [person.anew(of_both) for person in everybody]
    scale, model = everybody[0].scale, lora(everybody[0].has)
    added = {stem: torch.zeros_like(product(model, stem)) for stem in stems(model)}
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = [lora(everybody[u].round(optimizers[u], number, added)) for u in members]
            mean = weighted(members, uploads)
            products = weighted(members, [{stem: product(own, stem) for stem in added} for own in uploads])
            added = {stem: t + scale * (products[stem] - product(mean, stem)) for stem, t in added.items()}
            for person in everybody:
                person.takes(mean)
        played(federation, ROUNDS)
    assert max(float(change.abs().max()) for change in added.values()) > 1e-3
    same([lora(own) for own in rows_of(federation)], [lora(person.has) for person in everybody])
    check_added(federation, added)


def test_scaffold_controls_the_steps_of_adamw(tiny: Any) -> None:
    """Controls are means of steps: of everybody, also of who is absent, by 1 / N; the model is a mean by amounts."""
    federation = tiny({"name": "scaffold", "server_rate": 0.8})
    everybody = people(federation)
    optimizers = [person.anew(of_both) for person in everybody]
    model = everybody[0].has
    common = {n: torch.zeros_like(t) for n, t in model.items()}
    own = [dict(common) for _ in everybody]
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads, changes = [], []
            for u in members:
                person, pull, rates = everybody[u], {n: common[n] - own[u][n] for n in common}, []
                person.takes(model)

                def stepped(rate: float, person: Person = person, pull: Own = pull, rates: list[float] = rates) -> None:
                    rates.append(rate)
                    for n, t in person.own.items():
                        t.sub_(rate * pull[n])

                y = person.round(optimizers[u], number, stepped=stepped)
                after = {n: own[u][n] - common[n] + (model[n] - y[n]) / sum(rates) for n in common}
                changes.append({n: after[n] - own[u][n] for n in common})
                uploads.append(y)
                own[u] = after
            mean = weighted(members, uploads)
            model = {n: t + 0.8 * (mean[n] - t) for n, t in model.items()}
            common = {n: t + sum(change[n] for change in changes) / 3 for n, t in common.items()}
        found = played(federation, ROUNDS)
    same(found, [model] * 3)


@pytest.mark.parametrize("name", ["flexlora", "sdflora"])
@pytest.mark.slow
def test_who_gets_other_factors_begins_with_an_optimiser_that_has_not_taken_a_step(tiny: Any, name: str) -> None:
    """Singular vectors of a mean change are other directions each round; each user has as many as its rank."""
    ranks = [2, 1, 2]
    federation = tiny(name, **{"adapters.rank": ranks, "adapters.mix": "linear"})
    everybody = people(federation)
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = {u: everybody[u].round(everybody[u].anew(of_both), number, mix="linear") for u in members}
            total = sum(AMOUNTS[u] for u in members)
            for stem in stems(lora(everybody[0].has)):
                mixed = ".mlp." in stem
                parts = [AMOUNTS[u] / total * everybody[u].scale * product(uploads[u], stem) for u in members]
                dense = torch.stack(parts).sum(0)
                left, values, right = torch.linalg.svd(dense[0] if mixed else dense, full_matrices=False)
                signs = torch.stack([row[row.abs().argmax()].sign() for row in right])
                for person, rank in zip(everybody, ranks, strict=True):
                    a, b = (person.own[f"{stem}.{factor}"].detach() for factor in "ab")
                    a, b = (t[0] if mixed else t for t in (a, b))
                    kept = slice(0, rank)
                    a[kept] = signs[kept, None] * right[kept]
                    b[kept] = signs[kept, None] * (left * values).T[kept] / person.scale
        found = played(federation, ROUNDS)
    for own, person in zip(found, everybody, strict=True):
        for stem in stems(lora(own)):
            # AdamW's first steps magnify the rounding of gradients that are next to nothing.
            torch.testing.assert_close(product(own, stem), product(person.has, stem), rtol=1e-6, atol=1e-8, msg=stem)


def test_ditto_adds_its_nearness_to_what_adamw_sees(tiny: Any) -> None:
    federation = tiny({"name": "ditto", "nearness": 0.4})
    everybody, personal = people(federation), people(federation)
    optimizers = [(person.anew(of_both), own.anew(of_both)) for person, own in zip(everybody, personal, strict=True)]
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = []
            for u in members:
                personal[u].round(optimizers[u][1], number, near=(0.4, everybody[u].has))
                uploads.append(everybody[u].round(optimizers[u][0], number))
            for person in everybody:
                person.takes(weighted(members, uploads))
        found = played(federation, ROUNDS)
    same(found, [person.has for person in (*everybody, *personal)])
    assert any(not torch.equal(t, found[0][n]) for n, t in found[3].items())


def test_feddpa_f_tunes_with_an_optimiser_that_has_not_taken_a_step(tiny: Any) -> None:
    """One step of AdamW from no moments moves every number by the rate, whatever was trained before."""
    federation = tiny({"name": "feddpa", "afterwards": True}, **{"training.local_steps": 1})
    played(federation, ROUNDS)
    clients = federation.clients
    own = clients.model.layout.mask({"specialist"})
    begun = rows_of(federation)
    with finetuned(clients, 2):
        rows, rate = rows_of(federation), RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * 2 / len(ROUNDS))))
    for before, after in zip(begun, rows, strict=True):
        for name in (n for n in before if ".mlp." in n and of_both(n)):
            moved = (after[name][1] - (1 - rate * DECAY) * before[name][0]).abs()
            assert float(moved.max()) == pytest.approx(rate, rel=1e-3), name
    assert own.any()
