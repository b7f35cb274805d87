"""FLoRAL with a router for each layer (section 7) against its algorithm written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.federation.messages import check_upload
from comingle.methods import make
from comingle.methods.mixtures import ClusterSteps, mixtures_by_tensor
from comingle.methods.server import Received
from comingle.models.floral.wrapper import floral
from comingle.protocol.messages import LOSS
from comingle.training.backends.local import InProcess
from comingle.training.evaluation import mixture_at_users
from comingle.utils.errors import MessageError, RecipeError
from comingle.utils.trees import CLIENT_ROUTER
from federations import exchange, local_round

RATE, ROUTER_RATE, CLUSTERS = 0.05, 0.3, 2
EVERYONE = [0, 1, 2, 3]
MLP = {"data.task.name": "mlp", "training.batch_size": 20, "training.router.learning_rate": ROUTER_RATE}
METHOD = {"name": "floral", "clusters": CLUSTERS, "per_layer": True, "precondition": False}
LAYERS = ("model.0", "model.2")
Own = dict[str, Tensor]


def start(federation: InProcess) -> list[Own]:
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    return [{name: t[user].clone() for name, t in views.items()} for user in EVERYONE]


def layer(own: Own, name: str, pi: Tensor, x: Tensor) -> Tensor:
    """``(W + sum_c pi_c B_c A_c) x + w + sum_c pi_c b_c``, one component after another."""
    y = x @ own[f"{name}.base.weight"].T + own[f"{name}.base.bias"]
    for c in range(CLUSTERS):
        y = y + pi[c] * ((x @ own[f"{name}.a"][c].T) @ own[f"{name}.b"][c].T + own[f"{name}.bias"][c])
    return y


def output(own: Own, x: Tensor) -> Tensor:
    first, second = own[CLIENT_ROUTER].softmax(-1)
    return layer(own, LAYERS[1], second, layer(own, LAYERS[0], first, x).relu())


def by_hand(federation: InProcess, rounds: int) -> list[Own]:
    """Algorithm 1 with a pi of each layer's own in lines 6, 7 and 12."""
    users, phase = start(federation), federation.clients.phases[0]
    count = torch.tensor([len(t.train) for t in federation.clients.trainers], dtype=torch.float64)
    for number in range(rounds):
        for k, own in enumerate(users):
            data: Any = federation.clients.trainers[k].train
            for step in range(federation.clients.batch_source.steps(k)):
                at = federation.clients.batch_source.draw([k], phase, number, step, 0)[0]
                at = at[at >= 0]
                leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
                loss = (output(leaves, data.inputs.double()[at]) - data.targets.double()[at]).square().mean()
                for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    own[name] = own[name] - (ROUTER_RATE if name == CLIENT_ROUTER else RATE) * gradient
        pi = torch.stack([own[CLIENT_ROUTER].softmax(-1) for own in users])
        for name in [n for n in users[0] if n != CLIENT_ROUTER]:
            parts = torch.stack([own[name] for own in users])
            if ".base." in name:
                mean = torch.einsum("k,k...->...", count / count.sum(), parts)
            else:
                at_layer = pi[:, LAYERS.index(name.rpartition(".")[0])] * count.unsqueeze(1)
                mean = torch.einsum("kc,kc...->c...", at_layer / at_layer.sum(0), parts)
            for own in users:
                own[name] = mean.clone()
    return users


def played(federation: InProcess, rounds: int = 2) -> InProcess:
    for number in range(rounds):
        local_round(federation, EVERYONE, number)
        exchange(federation, EVERYONE)
    return federation


def test_two_rounds_equal_the_algorithm_written_out(federate_nets: Any) -> None:
    expected = by_hand(federate_nets(METHOD, changes=MLP), 2)
    found = start(played(federate_nets(METHOD, changes=MLP)))
    for own, wanted in zip(found, expected, strict=True):
        assert own[CLIENT_ROUTER].shape == (2, CLUSTERS)
        assert not torch.equal(own[CLIENT_ROUTER][0], own[CLIENT_ROUTER][1])
        for name, value in wanted.items():
            torch.testing.assert_close(own[name], value, rtol=1e-8, atol=1e-11, msg=name)


def test_equal_routers_of_all_layers_compute_what_one_router_does() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).double()
    draw = torch.Generator().manual_seed(0)
    models = [floral(net, num_clusters=3, rank=2, per_layer=own, generator=draw) for own in (False, True)]
    models[1].model.load_state_dict(models[0].model.state_dict())
    theta = torch.tensor([0.4, -1.0, 0.2])
    with torch.no_grad():
        for layer_ in [*models[0].layers().values(), *models[1].layers().values()]:
            layer_.get_parameter("b").fill_(0.3)
        models[0].router.theta.copy_(theta)
        models[1].router.theta.copy_(theta.expand(2, 3))
    x = torch.randn(4, 5, dtype=torch.float64, generator=draw)
    torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        models[1].router.theta[1] = -theta
    assert not torch.allclose(models[0](x), models[1](x))
    torch.testing.assert_close(models[1].merge()(x), models[1](x), rtol=1e-6, atol=1e-9)
    with pytest.raises(RecipeError, match=r"mixture: got shape \(3, 3\).*\(2, 3\)"):
        models[1](x, mixture=torch.zeros(3, 3))


def test_a_users_own_net_is_what_it_trained_and_people_see_the_mean_over_layers(federate_nets: Any) -> None:
    federation = played(federate_nets(METHOD, changes=MLP))
    clients = federation.clients
    shares = mixture_at_users(clients)
    owns = start(federation)
    wanted = torch.stack([own[CLIENT_ROUTER].softmax(-1).mean(0) for own in owns])
    torch.testing.assert_close(shares, wanted)


def test_on_a_language_model_each_linear_has_a_router(federate: Any) -> None:
    federation = federate({"name": "floral", "clusters": 2, "per_layer": True}, base="random:llama?layers=1&dim=32")
    theta = federation.clients.model.layout.views(federation.clients.state.rows)[CLIENT_ROUTER]
    assert theta.shape == (3, 7, 2)
    for number in range(2):
        local_round(federation, [0, 1, 2], number)
        exchange(federation, [0, 1, 2])
    theta = federation.clients.model.layout.views(federation.clients.state.rows)[CLIENT_ROUTER]
    assert len({tuple(row.tolist()) for row in theta[0]}) == 7


def test_a_report_for_other_layers_is_refused(federate_nets: Any) -> None:
    federation = federate_nets(METHOD, changes=MLP)
    clients = federation.clients
    upload = clients.upload([0], 1, {LOSS: torch.zeros(1)})
    name, layout = clients.names[0], clients.model.layout
    check_upload(upload, layout, clients.method, user=name, number=1, rank=0, weighted=True)
    upload.reports["mixture"] = upload.reports["mixture"][:, :1]
    with pytest.raises(MessageError, match=r"'mixture' .*\(1, 2\).*\(2, 2\)"):
        check_upload(upload, layout, clients.method, user=name, number=1, rank=0, weighted=True)


def test_one_p_of_c_is_needed_for_centring() -> None:
    with pytest.raises(RecipeError, match=r"method floral: centre: .*per_layer"):
        make("floral", per_layer=True, centre=True)


def test_layers_are_counted_as_the_model_counts_them_however_uploads_are_ordered() -> None:
    names = ("layers.2.a", "layers.2.b", "layers.10.a", "layers.10.b")
    mixtures = torch.rand(3, 2, 4, dtype=torch.float64)
    found = mixtures_by_tensor(mixtures, names)
    assert all(torch.equal(found[name], mixtures[:, number // 2]) for number, name in enumerate(names))
    weights = torch.tensor([0.2, 0.3, 0.5]).double()
    given = {"users": [0, 1, 2], "weights": weights, "ranks": torch.zeros(3, dtype=torch.int64), "scales": weights}
    upload = Received(
        **given,
        tensors={name: torch.zeros(3, 4, 1) for name in sorted(names)},
        reports={"mixture": mixtures},
        clustered=names,
    )
    shares = ClusterSteps().coefficients(upload)
    for number, name in enumerate(names):
        at_layer = mixtures[:, number // 2] * weights.unsqueeze(1)
        torch.testing.assert_close(shares[name], at_layer / at_layer.sum(0))
