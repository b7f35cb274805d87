"""What the routers say during the evaluation: the mean gate of every expert, over real tokens only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comingle.models import routing
from comingle.training.client import train
from comingle.training.rounds import run_rounds

USERS = ("ann", "bob", "cem")


def naive_scores(clients: Any, row: int) -> list[list[float]]:
    """One window at a time: softmax of the router's own product with the MLP's input, averaged over positions."""
    tensors = {name: tensor[row : row + 1] for name, tensor in clients.model.layout.views(clients.state.rows).items()}
    tokens, context = clients.users[row].test.long(), clients.plan.training.context
    count = int(clients.model.adapters.present[row].sum())
    total: dict[str, torch.Tensor] = {}
    hooks: list[Any] = []
    for name, mlp in clients.model.adapters.experts.items():
        total[name] = torch.zeros(count, dtype=torch.float64)

        def hook(module: Any, inputs: Any, name: str = name) -> None:
            logits = inputs[0].flatten(0, 1) @ tensors[f"{name}.router"][0, :count].mT
            top = logits.topk(min(2, count), dim=-1)
            gates = torch.zeros_like(logits).scatter(-1, top.indices, top.values.softmax(-1))
            total[name] += gates.sum(0)

        hooks.append(mlp.register_forward_pre_hook(hook))
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        clients.model.adapters.bind(tensors, [row])
        with torch.no_grad():
            clients.model.network(input_ids=window[:-1].unsqueeze(0))
    for hook_handle in hooks:
        hook_handle.remove()
    return [(layer / (len(tokens) - 1)).tolist() for layer in total.values()]


@pytest.mark.parametrize("method", ["comigs-1g1s", {"name": "comigs-1gxs", "specialists": [1, 3, 2]}], ids=str)
def test_expert_scores_are_the_mean_gates_over_real_tokens(federate: Any, make_user: Any, method: Any) -> None:
    """Tests of unequal length: their windows are padded, and padding must not count."""
    users = [make_user("ann", test=60), make_user("bob", test=17), make_user("cem", test=2)]
    clients = federate(method, users=users, changes={"training.experts.learning_rate": 0.05}).clients
    train(clients, [0, 1, 2], 0)
    clients.state.rows += (
        torch.randn(clients.state.rows.shape, generator=torch.Generator().manual_seed(0)) * 0.3 * clients.mask
    )
    naive = [naive_scores(clients, row) for row in range(3)]
    assert max(max(layer) for layer in naive[0]) > 0.53  # the routers have an opinion
    for users_per_step, micro_batch in [(None, None), (1, 3)]:
        changes = {"runtime.users_per_step": users_per_step, "runtime.micro_batch": micro_batch}
        other = federate(method, users=users, changes=changes).clients
        other.state = clients.state
        for row, score in enumerate(other.evaluate()):
            own = int(clients.model.adapters.present[row].sum())
            assert [layer[:own] for layer in score.expert_scores] == [pytest.approx(n, rel=1e-7) for n in naive[row]]
            assert all(sum(layer) == pytest.approx(1) and not any(layer[own:]) for layer in score.expert_scores)


def test_watching_changes_no_loss_and_leaves_nothing_behind(federate: Any) -> None:
    clients = federate("comigs-1g1s").clients
    tokens = clients.users[0].test[:17].long().view(1, 1, -1)
    plain = clients.scorer.predict(clients.models, [0], tokens)
    with routing.record_gates(clients.model.adapters):
        watched = clients.scorer.predict(clients.models, [0], tokens)
        assert routing.gates(clients.model.adapters).shape == (2, 1, 16, 2)
    assert torch.equal(plain, watched)
    clients.scorer.predict(clients.models, [0], tokens)
    assert all(mlp.router.gates is None for mlp in clients.model.adapters.experts.values())


def evaluations(federation: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    run_rounds(federation, observe=events.append)
    return [event for event in events if event["event"] == "evaluation"]


def test_every_evaluation_of_a_routed_method_tells_the_scores(federate: Any) -> None:
    changes = {"evaluation.every": 1, "training.local_steps": 3}
    found = evaluations(federate({"name": "comigs-1gxs", "specialists": [0, 1, 2]}, changes=changes))
    assert [event["iterations"] for event in found] == [0, 3, 6]
    names = {"ann": ["generalist"], "bob": ["generalist", "specialist"]}
    names["cem"] = ["generalist", "specialist 1", "specialist 2"]
    for event in found:
        assert event["experts"] == names
        for user, layers in event["expert_scores"].items():
            assert [len(layer) for layer in layers] == [len(names[user])] * 2
            assert all(sum(layer) == pytest.approx(1, abs=3e-4) for layer in layers)
            assert all(score == round(score, 4) for layer in layers for score in layer)


@pytest.mark.parametrize("method", ["local", "centralized", "pretrained"])
def test_methods_without_routers_tell_none(federate: Any, method: str) -> None:
    assert all("expert_scores" not in event and "experts" not in event for event in evaluations(federate(method)))


def test_several_experts_of_a_kind_are_numbered(federate: Any) -> None:
    clients = federate("comigs-2g").clients
    assert routing.expert_names(clients.model.adapters, 0) == ["generalist 1", "generalist 2"]
