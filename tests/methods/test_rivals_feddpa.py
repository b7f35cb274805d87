"""FedDPA against loops from its code, user by user: training in turn, and weights out of cosines, one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import Own, played, rows_of, same
from torch import Tensor, nn

from comingle.config import parse_recipe
from comingle.methods.base import Phase
from comingle.models.ensembles import cache_name
from comingle.models.personal import PersonalModel
from comingle.runs.session import build, execute, prepare
from comingle.training.backends.local import InProcess
from comingle.training.client import finetuned, settle
from comingle.utils.errors import DataError
from exporting import trained as after_rounds
from naive import Mixture, Reference, Rules, honest_double

RATE, SCALING, INSTANCES = 0.5, 0.8, 3
USERS = [0, 1, 2]
ROUNDS = [USERS, [0, 2], USERS]
SGD = {"name": "sgd", "learning_rate": RATE, "schedule": "constant", "weight_decay": 0}
CHANGES = {"training.experts": SGD, "training.router": SGD, "training.rounds": 3, "training.local_steps": 2}
METHOD = {"name": "feddpa", "scaling": SCALING, "instances": INSTANCES}


@pytest.fixture
def tiny(federate: Any) -> Callable[..., InProcess]:
    def make(method: Any = METHOD, **changes: Any) -> InProcess:
        layers = changes.pop("layers", 1)
        return federate(method, base=f"random:llama?layers={layers}&dim=32", changes={**CHANGES, **changes})

    return make


def of_experts(name: str) -> bool:
    return ".mlp." in name and not name.endswith(".router")


def step(federation: Any, own: Own, windows: Tensor, mix: str, expert: int, experts: list[int]) -> Own:
    """One of plain descent on one expert, and on attention with the first, of a model that has these experts."""
    clients = federation.clients
    leaves = {n: t.clone().requires_grad_() for n, t in own.items() if not n.endswith(".router")}
    there = {n: t[experts] if of_experts(n) else t for n, t in leaves.items()}
    rules = Rules(scale=clients.model.adapters.scale, mix=mix)
    loss = Reference(clients.model.base.model, "llama", there, rules).losses(windows)[0].mean()
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True))
    moved = dict(own)
    for name, gradient in found.items():
        if of_experts(name):
            moved[name] = own[name].clone()
            moved[name][expert] -= RATE * gradient[expert]
        elif expert == 0:
            moved[name] = own[name] - RATE * gradient
    return moved


def local_round(federation: Any, own: Own, user: int, number: int, mix: str) -> Own:
    """The local LoRA with half of the global one, which stands still; then the global one alone."""
    clients = federation.clients
    alone, everybody = clients.phases
    for at in range(clients.plan.training.local_steps):
        own = step(federation, own, clients.batch_source.draw([user], alone, number, at, 0)[0].long(), mix, 1, [0, 1])
        own = step(federation, own, clients.batch_source.draw([user], everybody, number, at, 0)[0].long(), mix, 0, [0])
    return own


@pytest.mark.parametrize("mix", ["output", "linear"])
def test_feddpa_is_its_algorithm(tiny: Any, mix: str) -> None:
    """Local LoRA go on from themselves, whoever is there; global ones from their users' mean."""
    federation = tiny(**{"adapters.mix": mix})
    owns = rows_of(federation)
    with honest_double():
        for number, members in enumerate(ROUNDS):
            for user in members:
                owns[user] = local_round(federation, owns[user], user, number, mix)
            for name in [name for name in owns[0] if not name.endswith(".router")]:
                parts = [owns[user][name][0] if of_experts(name) else owns[user][name] for user in members]
                mean = torch.stack(parts).mean(0)
                for user in USERS:
                    own = owns[user][name]
                    owns[user] = owns[user] | {name: torch.stack([mean, own[1]]) if of_experts(name) else mean}
        found = played(federation, ROUNDS)
    same(found, owns)
    assert not torch.allclose(owns[0]["layers.0.mlp.up.b"][1], owns[1]["layers.0.mlp.up.b"][1])
    assert not torch.allclose(owns[0]["layers.0.mlp.up.b"][0], owns[0]["layers.0.mlp.up.b"][1])


def test_afterwards_the_local_lora_goes_on_from_the_global_one(tiny: Any) -> None:
    """FedDPA-F: rounds train the global LoRA; a local round of its own makes each user's model, and is forgotten."""
    federation = tiny({**METHOD, "afterwards": True})
    clients, owns = federation.clients, rows_of(federation)
    (everybody,), (alone,) = clients.phases, clients.method.client.tuning
    with honest_double():
        for number, members in enumerate(ROUNDS):
            uploads = []
            for user in members:
                own = owns[user]
                for at in range(2):
                    windows = clients.batch_source.draw([user], everybody, number, at, 0)[0].long()
                    own = step(federation, own, windows, "output", 0, [0])
                uploads.append(own)
            for name in [name for name in owns[0] if not name.endswith(".router")]:
                mean = torch.stack([own[name][0] if of_experts(name) else own[name] for own in uploads]).mean(0)
                both = torch.stack([mean, mean]) if of_experts(name) else mean
                owns = [own | {name: both} for own in owns]
        played(federation, ROUNDS)
        settle(clients)
        directions = clients.model.layout.mask(["router"])
        before = clients.state.rows.clone()
        with finetuned(clients, 3):
            found = rows_of(federation)
            assert torch.equal(clients.state.rows[:, directions], before[:, directions])
        assert torch.equal(clients.state.rows, before)
        for user in USERS:
            own = owns[user]
            for at in range(2):
                windows = clients.batch_source.draw([user], replace(alone, label="tuning"), 2, at, 0)[0].long()
                own = step(federation, own, windows, "output", 1, [0, 1])
            owns[user] = own | {name: t for name, t in found[user].items() if name.endswith(".router")}
    same(found, owns)
    assert not torch.allclose(owns[0]["layers.0.mlp.up.b"][1], owns[0]["layers.0.mlp.up.b"][0])
    assert all(bool(t.any()) for own in found for name, t in own.items() if name.endswith(".router"))


class Weigh:
    """Gates of a block by the mean of cosines with what it read of each instance, one token and instance at a time."""

    def __init__(self, read: list[Tensor]) -> None:
        self.read, self.weights = read, list[float]()

    def __call__(self, x: Tensor) -> list[Tensor]:
        weights = torch.zeros_like(x[..., :1])
        for place in [(i, j) for i in range(x.shape[0]) for j in range(x.shape[1])]:
            cosines = [float(x[place] @ other / (x[place].norm() * other.norm())) for other in self.read]
            weights[place] = min(1.0, max(0.0, SCALING * sum(cosines) / len(cosines)))
        self.weights += weights.flatten().tolist()
        return [1 - weights, weights]


def read_by_mlps(reference: Reference, windows: Tensor, at: int) -> list[list[Tensor]]:
    """What each block's MLP reads at one place of each window."""
    layers, found = list(reference.model.model.layers), []
    for layer in layers:
        found.append([])
        layer.mlp.register_forward_pre_hook(lambda _, args, to=found[-1]: to.extend(args[0][:, at]))
    reference.losses(windows)
    return found


def test_the_local_lora_has_scaling_times_the_mean_cosine_with_training_instances(tiny: Any) -> None:
    """Instances are random training windows, read to their ends by both LoRA at one half each."""
    federation = tiny(layers=2, **{"training.experts": {**SGD, "learning_rate": 5.0}})
    played(federation, ROUNDS)
    clients = federation.clients
    before = clients.state.rows.clone()
    with honest_double():
        settle(clients)
        settle(clients)  # the same however often
    rules = Rules(scale=clients.model.adapters.scale)
    base, phase = clients.model.base.model, Phase(roles=frozenset(), label="instances")
    routers = clients.model.layout.mask(["router"])
    assert torch.equal(clients.state.rows[:, ~routers], before[:, ~routers])
    drawn = torch.cat(
        [clients.batch_source.draw(USERS, phase, clients.plan.training.rounds, 0, i) for i in range(2)], 1
    ).long()
    tests = torch.stack([user.test[:17].long() for user in clients.users]).unsqueeze(1)
    weights: list[float] = []
    with honest_double(), torch.no_grad():
        got = clients.scorer.predict(clients.models, USERS, tests)
        for user in USERS:
            own = {n: t for n, t in rows_of(federation)[user].items() if not n.endswith(".router")}
            read = read_by_mlps(Reference(base, "llama", own, rules), drawn[user, :INSTANCES], -1)
            reference = Reference(base, "llama", own, rules)
            for layer, of_block in zip(reference.model.model.layers, read, strict=True):
                assert isinstance(layer.mlp, Mixture)
                layer.mlp.gating = weigh = Weigh(of_block)
            torch.testing.assert_close(got[user], reference.losses(tests[user])[0], rtol=1e-9, atol=1e-9)
            weights += weigh.weights
    assert 0 == min(weights) < max(weights) < SCALING
    assert len(set(weights)) > len(weights) / 2


def test_directions_are_a_users_own(tiny: Any) -> None:
    """Whoever else is there: the mean of unit vectors, so shorter than one."""
    three, one = tiny(), tiny()
    settle(three.clients)
    cohort = one.clients.cohort([1], one.clients.plan.training.rounds)
    for name, mean in cohort.router_directions(INSTANCES).items():
        wanted = three.clients.model.layout.views(three.clients.state.rows)[name][1:2, 0]
        torch.testing.assert_close(SCALING * mean, wanted, rtol=1e-12, atol=1e-14)
        assert 0 < mean.norm() < 1


def test_of_conversations_the_prompts_alone_are_compared(tmp_path: Path) -> None:
    """Read to their ends and no further; who has fewer than are asked for has them again, and padding never counts."""
    for name, count in (("ada", 12), ("ben", 4)):
        turns = [
            [("user", f"{name} asks {i}" * (1 + i % 3)), ("assistant", "yes"), ("user", "so?")] for i in range(count)
        ]
        chats = [{"messages": [{"role": r, "content": c} for r, c in [*chat, ("assistant", "no")]]} for chat in turns]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    users = {name: str(tmp_path / f"{name}.jsonl") for name in ("ada", "ben")}
    content = {
        "base": "random:llama?layers=1&dim=32",
        "method": {"name": "feddpa", "instances": 4},
        "data": {"kind": "conversations", "users": users, "split": {"valid": 0.25, "test": 0.25}},
        "training": {"rounds": 1, "batch_size": 3, "context": 96},
        "runtime": {"dtype": "float64", "device": "cpu", "threads": 1, "compile": False},
    }
    recipe = parse_recipe(content)
    clients = execute(build(recipe, prepare(recipe)), recipe, None).federation.clients
    rules = Rules(scale=clients.model.adapters.scale)
    routers = clients.model.layout.views(clients.state.rows)["layers.0.mlp.router"]
    for user in range(2):
        views = clients.model.layout.views(clients.state.rows)
        tensors = {n: t[user] for n, t in views.items() if not n.endswith(".router")}
        phase, prompts = Phase(roles=frozenset(), label="instances"), list[Tensor]()
        for repeat in range(2):
            for window in clients.batch_source.draw([user], phase, 1, 0, repeat)[0].tolist():
                if window[0] != -1:  # not filled up
                    prompts.append(torch.tensor([-2 - token for token in takewhile(lambda t: t < 0, window)]))
        with honest_double(), torch.no_grad():
            vectors = []
            for prompt in prompts[:4]:
                reference = Reference(clients.model.base.model, "llama", tensors, rules)
                (x,) = read_by_mlps(reference, torch.cat([prompt, prompt[:1]]).unsqueeze(0), -1)[0]
                vectors.append(x / x.norm())
        torch.testing.assert_close(routers[user, 0], 0.5 * torch.stack(vectors).mean(0), rtol=1e-5, atol=1e-7)


@pytest.fixture
def ann(federate: Any) -> PersonalModel:
    run = after_rounds(federate, METHOD, dtype="float64")
    settle(run.federation.clients)
    return run.user("ann")


def test_no_prediction_knows_what_follows(ann: PersonalModel) -> None:
    """All that comes after a token is changed, and what is said before stays; the same token by token as at once."""
    tokens = torch.arange(20).unsqueeze(0) * 7 % 256
    changed = torch.cat([tokens[:, :12], 255 - tokens[:, 12:]], 1)
    logits = ann.logits(tokens)
    torch.testing.assert_close(ann.logits(changed)[:, :12], logits[:, :12], rtol=1e-9, atol=1e-9)
    with ann.generating() as network, torch.no_grad():
        name, cache, parts = cache_name(type(network)), None, []
        for at in range(20):
            out = network(input_ids=tokens[:, at : at + 1], use_cache=True, **{name: cache})
            cache, parts = getattr(out, name), [*parts, out.logits]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=1e-5, atol=1e-5)
    shares = ann.route("some text that is read").gates[..., 1]
    assert 0 <= shares.min() < shares.max() < SCALING


def test_no_architecture_weighs_by_similarity(ann: PersonalModel, tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"similarity.*--format merged-approximately"):
        ann.export(tmp_path / "t")
    assert ann.export(tmp_path / "m", format="merged-approximately").lost
    with pytest.raises(DataError, match=r"user 'ann': .*experts .*token"):
        ann.merge()
    assert isinstance(ann.model.network, nn.Module)
