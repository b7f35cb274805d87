"""FLoRAL against its algorithms written out user by user, and its equations against independent computations."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from receiving import downloaded, received, started
from scipy.optimize import minimize
from torch import Tensor
from torch.utils.data import TensorDataset

import comingle
from comingle.methods import make
from comingle.methods.mixtures import ClusterSteps, cluster_weights, entropic
from comingle.methods.server import aggregation_weights
from comingle.training.backends.local import InProcess
from comingle.training.evaluation import entropy, mismatch, mixture_at_users
from comingle.utils.errors import RecipeError
from federations import exchange, local_round

RATE, ROUTER_RATE, EPS = 0.05, 0.2, 1e-5
LINEAR = {"data.task.name": "linear", "training.batch_size": 3, "training.router.learning_rate": ROUTER_RATE}
EVERYONE = [0, 1, 2, 3]
Own = dict[str, Tensor]


def start(federation: InProcess) -> list[Own]:
    """Everybody's tensors as a dictionary each: W, w (bias), A, B, b (of the adaptors) and theta."""
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    names = {"W": "model.base.weight", "w": "model.base.bias", "A": "model.a", "B": "model.b", "b": "model.bias"}
    names["theta"] = "router.theta"
    return [{key: views[name][user].clone() for key, name in names.items()} for user in EVERYONE]


def output(own: Own, x: Tensor, pi: Tensor) -> Tensor:
    weight = own["W"] + sum(pi[c] * own["B"][c] @ own["A"][c] for c in range(len(pi)))
    return x @ weight.T + own["w"] + sum(pi[c] * own["b"][c] for c in range(len(pi)))


def preconditioned(own: Own, gradient: Own) -> Own:
    """Eq. 36 by explicit inverses, cluster by cluster."""
    found, eye = dict(gradient), torch.eye(own["A"].shape[1], dtype=torch.float64)
    inner, outer = own["A"].unbind(), own["B"].unbind()
    found["A"] = torch.stack([(o.T @ o + EPS * eye).inverse() @ g for o, g in zip(outer, gradient["A"], strict=True)])
    found["B"] = torch.stack([g @ (i @ i.T + EPS * eye).inverse() for i, g in zip(inner, gradient["B"], strict=True)])
    return found


def by_hand(federation: InProcess, rounds: int) -> list[Own]:
    """Algorithm 1 on the linear task, one user after another."""
    users, phase = start(federation), federation.clients.phases[0]
    count = torch.tensor([len(t.train) for t in federation.clients.trainers], dtype=torch.float64)
    for number in range(rounds):
        for k, own in enumerate(users):
            data = federation.clients.trainers[k].train
            x, y = data.inputs.double(), data.targets.double()
            for step in range(federation.clients.batch_source.steps(k)):
                at = federation.clients.batch_source.draw([k], phase, number, step, 0)[0]
                leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
                loss = (output(leaves, x[at], leaves["theta"].softmax(0)) - y[at]).square().mean()
                gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                gradient = preconditioned(own, dict(zip(leaves, gradients, strict=True)))
                for name in own:
                    rate = ROUTER_RATE if name == "theta" else RATE
                    own[name] = own[name] - rate * gradient[name]
        pi = torch.stack([own["theta"].softmax(0) for own in users])
        plain = count / count.sum()
        for name in ("W", "w"):
            mean = torch.stack([plain[k] * users[k][name] for k in EVERYONE]).sum(0)
            for own in users:
                own[name] = mean.clone()
        for name in ("A", "B", "b"):
            parts = [
                sum(pi[k, c] * count[k] * users[k][name][c] for k in EVERYONE) / (pi[:, c] * count).sum()
                for c in range(pi.shape[1])
            ]
            for own in users:
                own[name] = torch.stack(parts)
    return users


def test_two_rounds_equal_the_algorithm_written_out(federate_nets: Any) -> None:
    federation = federate_nets({"name": "floral", "clusters": 2}, changes=LINEAR)
    expected = by_hand(federate_nets({"name": "floral", "clusters": 2}, changes=LINEAR), 2)
    for number in range(2):
        local_round(federation, EVERYONE, number)
        exchange(federation, EVERYONE)
    for found, wanted in zip(start(federation), expected, strict=True):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9, msg=key)


def test_optimal_routing_is_one_hot_at_the_true_cluster(federate_nets: Any) -> None:
    federation = federate_nets({"name": "floral-optimal", "clusters": 2})
    found = mixture_at_users(federation.clients)
    assert found is not None
    assert found.tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]
    local_round(federation, EVERYONE, 0)
    again = mixture_at_users(federation.clients)
    assert again is not None
    assert torch.equal(again, found)


def test_an_ensemble_of_one_is_fedavg(federate_nets: Any) -> None:
    """With the running statistics, which whole models take along."""
    one, plain = federate_nets({"name": "ensemble", "clusters": 1}), federate_nets("fedavg")
    for federation in (one, plain):
        for number in range(2):
            local_round(federation, EVERYONE, number)
            exchange(federation, EVERYONE)
    merged = one.clients.model.layout.views(one.clients.state.rows)
    for name, value in plain.clients.model.layout.views(plain.clients.state.rows).items():
        torch.testing.assert_close(merged[name].squeeze(1), value, rtol=1e-9, atol=1e-12)


def test_a_cluster_averages_its_models_statistics(federate_nets: Any) -> None:
    """FedAvg within the true clusters: users 0 and 2, and 1 and 3."""
    federation = federate_nets({"name": "ensemble-optimal", "clusters": 2})
    local_round(federation, EVERYONE, 0)
    views = federation.clients.model.layout.views
    sent = views(federation.clients.state.rows)["1.running_mean"].clone()
    exchange(federation, EVERYONE)
    averaged = views(federation.clients.state.rows)["1.running_mean"]
    wanted = torch.stack([(sent[0, 0] + sent[2, 0]) / 2, (sent[1, 1] + sent[3, 1]) / 2])
    torch.testing.assert_close(averaged, wanted.expand(4, -1, -1))


def test_stateless_users_forget_and_learn_again(federate_nets: Any) -> None:
    """The warm-up alone has moved theta when the joint steps begin, and nothing else has moved."""
    method = {"name": "floral", "clusters": 2, "stateless": True, "warmup_steps": 3}
    federation = federate_nets(method)
    local_round(federation, EVERYONE, 0)  # until then all components are zero, and routers have no gradient
    exchange(federation, EVERYONE)
    federation.clients.model.layout.views(federation.clients.state.rows)["router.theta"].fill_(5.0)
    before = federation.clients.state.rows.clone()
    cohort = federation.clients.cohort(EVERYONE, 1)
    for part in federation.clients.method.client.parts:
        part.begin(cohort)
    theta, rows = cohort.tensors["router.theta"], cohort.state.rows
    assert (theta.abs() < 4).all()
    assert (theta != 0).any()
    still = ~federation.clients.model.layout.mask({"router", "statistics"})
    assert torch.equal(rows[:, still], before[:, still])


def test_stateless_users_forget_what_their_optimiser_knows_of_the_router(federate_nets: Any) -> None:
    """The first step of AdamW after that is again as long as its rate."""
    method = {"name": "floral", "clusters": 2, "stateless": True, "warmup_steps": 1}
    adamw = {"name": "adamw", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0, "betas": [0.9, 0.999]}
    federation = federate_nets(method, changes={"training.router": adamw})
    for number in range(2):
        local_round(federation, EVERYONE, number)
        exchange(federation, EVERYONE)
    cohort = federation.clients.cohort(EVERYONE, 2)
    for part in federation.clients.method.client.parts:
        part.begin(cohort)
    torch.testing.assert_close(
        cohort.tensors["router.theta"].abs(), torch.full((4, 2), 0.05).double(), rtol=1e-3, atol=0
    )


def test_aggregation_weights_are_those_of_eq_2_and_guarded() -> None:
    pi = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    n = torch.tensor([10.0, 30.0, 60.0], dtype=torch.float64)
    found = aggregation_weights(pi, n / n.sum())
    for c in range(2):
        for k in range(3):
            assert found[k, c] == pytest.approx(float(pi[k, c] * n[k] / (pi[:, c] * n).sum()))
    assert found[:, 2].tolist() == pytest.approx((n / n.sum()).tolist())


def test_the_entropic_router_minimises_loss_plus_entropy() -> None:
    losses, rate = torch.tensor([[0.7, 0.1, 1.9]], dtype=torch.float64), 0.8

    def objective(logits: Any) -> float:
        pi = torch.tensor(logits, dtype=torch.float64).softmax(0)
        return float((pi * losses[0]).sum() + (pi * pi.log()).sum() / rate)

    best = minimize(objective, [0.0, 0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14}).x
    expected = torch.tensor(best).softmax(0)
    torch.testing.assert_close(entropic(losses, rate).softmax(1)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_server_centres_under_how_much_all_make_of_a_component(federate_nets: Any) -> None:
    """App. E, eq. 30: with p(c) = .8, .1, .1 the mean under p(c) is zero, and no user's model has changed."""
    settings = {"name": "floral", "clusters": 3}
    changes = {**LINEAR, "data.task.clusters": 3, "floral.rank": 3}  # the rank of the weight, so nothing is cut
    plain, centred = (federate_nets({**settings, "centre": c}, changes=changes) for c in (False, True))
    pi, found = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64), []
    for federation in (plain, centred):
        local_round(federation, EVERYONE, 0)
        views = federation.clients.model.layout.views(federation.clients.state.rows)
        views["model.b"].add_(torch.arange(1.0, 4).view(3, 1, 1))
        views["router.theta"].copy_(pi.log().expand(4, -1))
        exchange(federation, EVERYONE)
        found.append(start(federation))
    for before, after in zip(*found, strict=True):
        products = after["B"] @ after["A"]
        assert torch.tensordot(pi, products, 1).abs().max() < 1e-9
        assert torch.tensordot(pi, after["b"], 1).abs().max() < 1e-9
        assert products.mean(0).abs().max() > 0.1  # under any other p(c) it is not
        x = torch.randn(5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for one in (*torch.eye(3, dtype=torch.float64), pi):
            torch.testing.assert_close(output(after, x, one), output(before, x, one), rtol=1e-7, atol=1e-7)


def test_how_much_all_make_of_a_component_is_weighted_by_their_data() -> None:
    """p(c) = sum_k p(k) pi_c^k: .75 x .8 + .25 x .2, and so on."""
    pi = torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=torch.float64)
    found = cluster_weights(pi, torch.tensor([0.75, 0.25], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([0.65, 0.35], dtype=torch.float64))


def test_a_frozen_base_takes_no_mean(federate: Any) -> None:
    with pytest.raises(RecipeError, match=r"method floral: centre .*frozen"):
        federate({"name": "floral", "centre": True})


def test_a_server_rate_steps_towards_the_mean() -> None:
    uploads = {"base": torch.tensor([[2.0], [4.0]]), "parts": torch.tensor([[[2.0]], [[6.0]]])}
    server = ClusterSteps(base_rate=0.5, component_rate=0.1)
    kept = started(server, {"base": torch.tensor([1.0]), "parts": torch.tensor([[0.0]])}, users=2)
    reports = {"mixture": torch.ones(2, 1)}
    server.aggregate(kept, received(uploads, [0.5, 0.5], reports=reports, clustered=frozenset({"parts"})))
    for user in range(2):
        found = downloaded(server, kept, user)
        assert found["base"].tolist() == [2.0]  # 1 + 0.5 (3 - 1)
        assert found["parts"].flatten().tolist() == pytest.approx([0.4])  # 0 + 0.1 (4 - 0)


@pytest.mark.parametrize(
    "method", ["fedavg", "local-adaptor", "floral", "floral-optimal", "ensemble", "ensemble-optimal"]
)
def test_a_server_with_adam_takes_the_public_code_s_steps(federate_nets: Any, method: str) -> None:
    """``p.grad = p0 - mean; p = p0; Adam.step()`` on each parameter, and the mean for running statistics."""
    rate, settings = 0.01, {} if method in ("fedavg", "local-adaptor") else {"clusters": 2}
    federations = [
        federate_nets({"name": method, **settings, **more}, changes={"training.router.learning_rate": ROUTER_RATE})
        for more in ({}, {"server_adam_rate": rate})
    ]
    plain, stepped = federations
    parameters = {name: t.clone().requires_grad_() for name, t in stepped.server.model.items() if "running" not in name}
    assert len(parameters) < len(stepped.server.model)  # there are statistics
    optimizer = torch.optim.Adam(parameters.values(), lr=rate)
    for number in range(3):
        local_round(stepped, EVERYONE, number)
        plain.clients.state.rows.copy_(stepped.clients.state.rows)
        for federation in federations:
            exchange(federation, EVERYONE)
        mean, found = plain.server.model, stepped.server.model
        for name, p in parameters.items():
            p.grad = p.detach() - mean[name]
        optimizer.step()
        for name, t in found.items():
            wanted = parameters[name].detach() if name in parameters else mean[name]
            torch.testing.assert_close(t, wanted, rtol=1e-9, atol=1e-12, msg=name)
        assert any(not torch.equal(found[name], mean[name]) for name in parameters)


def test_a_server_s_adam_at_rate_0_keeps_no_state(federate_nets: Any) -> None:
    plain, named = (federate_nets({"name": "floral", **more}) for more in ({}, {"server_adam_rate": 0.0}))
    assert plain.server.state.keys() == named.server.state.keys()
    assert not any(name.startswith("adam") for name in plain.server.state)


def test_entropy_and_mismatch() -> None:
    even, sure = torch.full((1, 4), 0.25), torch.eye(4)[:1]
    assert float(entropy(even)) == pytest.approx(1.3862943611)
    assert float(entropy(sure)) == 0.0
    truth, weights = torch.tensor([0, 1, 0, 1]), torch.full((4,), 0.25)
    swapped = torch.eye(2)[[1, 0, 1, 0]]
    assert mismatch(swapped, truth, weights).tolist() == [0.0, 0.0]  # a permutation of the names
    assert mismatch(torch.full((4, 2), 0.5), truth, weights).tolist() == pytest.approx([1.0, 1.0])


def test_faults_are_one_line() -> None:
    for settings, said in (
        ({"clusters": 0}, "clusters is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"centre": True, "adaptor_server_rate": 0.5}, "centre: got true with server rates"),
        ({"server_adam_rate": 0.1, "centre": True}, "server_adam_rate: got 0.1 with centre true"),
        ({"server_adam_rate": 0.1, "base_server_rate": 0.5}, "server_adam_rate: got 0.1 with centre false and server"),
        ({"server_adam_rate": -1.0}, "server_adam_rate is -1.0"),
        ({"report_mixture": False, "centre": True}, "report_mixture: got false with centre true"),
        ({"report_mixture": False, "base_server_rate": 0.5}, "report_mixture: got false with centre false"),
    ):
        with pytest.raises(RecipeError, match=said) as error:
            make("floral", **settings)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("method", "said"), [("comigs-1g1s", "language models"), ("pcl", "language model")])
def test_methods_for_language_models_say_so(federate_nets: Any, method: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        federate_nets(method)


def test_optimal_routing_needs_true_clusters(federate: Any) -> None:
    with pytest.raises(RecipeError, match=r"method floral-optimal: .*data\.clusters"):
        federate("floral-optimal")
    with pytest.raises(RecipeError, match="whole models"):
        federate("ensemble")


def test_unreported_mixtures_leave_a_plain_mean(federate_nets: Any) -> None:
    """Of base and adaptors alike; users mix as they have learned to, and nothing but tensors is sent."""
    kept = {}
    for told in (True, False):
        method = {"name": "floral", "clusters": 2, "report_mixture": told}
        federation = federate_nets(method, changes=LINEAR | {"training.weighting": "uniform"})
        local_round(federation, EVERYONE, 0)
        upload = federation.clients.upload(EVERYONE, 1, {"loss": torch.ones(4)})
        assert ("mixture" in upload.reports) == told
        federation.server.aggregate(upload)
        kept[told] = {name: federation.server.kept[f"model.{name}"].clone() for name in upload.tensors}
    means = {name: t.mean(0) for name, t in upload.tensors.items()}
    assert all(torch.allclose(kept[False][name], mean, atol=1e-12) for name, mean in means.items())
    different = {name for name, t in kept[True].items() if not torch.allclose(t, kept[False][name], atol=1e-9)}
    assert different == {"model.b", "model.bias"} & set(means) or different == {"model.a", "model.b", "model.bias"}


@pytest.mark.parametrize(("section", "said"), [({}, 0), ({"budget": 0.01}, 1)])
def test_only_a_budget_that_was_set_is_warned_about(
    section: dict[str, float], said: int, caplog: pytest.LogCaptureFixture
) -> None:
    users = {name: torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1)) for name in "ab"}
    recipe = {"training": {"rounds": 1, "batch_size": 8}, "data": {"loss": "mse"}, "floral": section}
    with caplog.at_level(logging.WARNING, logger="comingle"):
        comingle.run(recipe, users=users, base=lambda: torch.nn.Linear(3, 1), method="floral")
    assert sum("exceeds budget 0.01" in line for line in caplog.messages) == said


def images_of(user: int, count: int, seed: int) -> TensorDataset:
    """Noisy pictures of ten random patterns with their numbers, which users with odd numbers count from 1."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=draw)
    pictures = patterns[labels] + torch.randn(count, 1, 12, 12, generator=draw)
    return TensorDataset(pictures, (labels + user % 2) % 10)


@pytest.mark.slow
def test_default_settings_win_where_users_form_two_clusters() -> None:
    users: Any = {
        f"user-{n}": {"train": images_of(n, 40, 2 * n), "test": images_of(n, 200, 2 * n + 1)} for n in range(8)
    }
    recipe: Any = {
        "training": {"rounds": 20, "local_epochs": 2, "batch_size": 10},
        "evaluation": {"every": 20},
        "floral": {"budget": 0.25},
    }
    accuracy: dict[str, float] = {}
    for method in ("local", "fedavg", {"name": "floral", "clusters": 2}, "fedmerge"):
        run = comingle.run(recipe, users=users, base="net:mlp", method=method)
        accuracy[run.metrics["method"]] = run.metrics["mean_test_accuracy"]
        assert "warnings" not in run.metrics
    for name in ("floral", "fedmerge"):
        assert accuracy[name] > max(accuracy["local"], accuracy["fedavg"]) + 0.02


def test_the_routers_default_rate_is_the_methods(federate_nets: Any) -> None:
    def tensors_of(method: str, **changes: float) -> Tensor:
        federation = federate_nets({"name": method, "clusters": 2}, changes={"training.router": {}, **changes})
        local_round(federation, EVERYONE, 0)
        return federation.clients.state.rows

    key = "training.router.learning_rate"
    assert torch.equal(tensors_of("floral"), tensors_of("floral", **{key: 0.1}))
    assert not torch.equal(tensors_of("floral"), tensors_of("floral", **{key: 0.002}))
    assert torch.equal(tensors_of("ensemble"), tensors_of("ensemble", **{key: 0.002}))
