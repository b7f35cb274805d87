"""FedEM against its algorithm written out user by user and sample by sample, and what its users predict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linear_task import EVERYONE, LINEAR, Own, batches, descend, outputs, sample_losses, samples_of, unequal
from torch import Tensor, nn

from comingle.config import parse_recipe
from comingle.models.routers import ClientMixture
from comingle.models.scoring import CROSS_ENTROPY
from comingle.models.stacked import stack
from comingle.runs.api import run
from comingle.training.backends.local import InProcess
from comingle.training.evaluation import mixture_at_users
from comingle.training.kinds.samples import MixtureOfModels, personal_net
from comingle.utils.errors import RecipeError
from federations import crossing, exchange, local_round, message_bytes

MODELS = 3
METHOD = {"name": "fedem", "models": MODELS}


def learners(federation: InProcess, user: int) -> list[Own]:
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    return [{name: views[name][user, m].clone() for name in ("weight", "bias")} for m in range(MODELS)]


def by_hand(federation: InProcess, rounds: int, members: list[int]) -> tuple[list[Own], list[list[float]]]:
    """Algorithm 2: the learners, and everybody's mixture."""
    shared, pi = learners(federation, 0), [[1 / MODELS] * MODELS for _ in EVERYONE]
    total = sum(len(federation.clients.trainers[k].train) for k in members)
    for number in range(rounds):
        trained: dict[int, list[Own]] = {}
        for k in members:
            x, y = samples_of(federation, k)
            q = [responsibility(pi[k], [float(sample_losses(o, x[s : s + 1], y[s : s + 1])) for o in shared])
                 for s in range(len(x))]  # fmt: skip
            pi[k] = [sum(row[m] for row in q) / len(q) for m in range(MODELS)]
            trained[k] = []
            for m in range(MODELS):
                own, mine = shared[m], torch.tensor([row[m] for row in q], dtype=torch.float64)
                for at in batches(federation, k, number):

                    def loss(leaves: Own, at: Tensor = at, mine: Tensor = mine, x: Tensor = x, y: Tensor = y) -> Tensor:
                        return (mine[at] * sample_losses(leaves, x[at], y[at])).sum() / len(at)

                    own = descend(own, loss)
                trained[k].append(own)
        share = {k: len(federation.clients.trainers[k].train) / total for k in members}
        shared = [
            {name: sum(share[k] * trained[k][m][name] for k in members) for name in shared[m]} for m in range(MODELS)
        ]
    return shared, pi


def responsibility(pi: list[float], losses: list[float]) -> list[float]:
    parts = [p * math.exp(-loss) for p, loss in zip(pi, losses, strict=True)]
    return [part / sum(parts) for part in parts]


@pytest.mark.parametrize("members", [EVERYONE, [0, 2, 3]], ids=["everybody", "sampled"])
@pytest.mark.parametrize("changes", [{}, {"training.local_epochs": 2, "runtime.users_per_step": 2}], ids=["one", "two"])
def test_rounds_equal_the_algorithm_written_out(
    federate_nets: Any, members: list[int], changes: dict[str, Any]
) -> None:
    """Over two epochs the responsibilities stay those of the start of the round."""
    federation, twin = (unequal(federate_nets(METHOD, changes={**LINEAR, **changes})) for _ in range(2))
    wanted, pi = by_hand(twin, 2, members)
    for number in range(2):
        local_round(federation, members, number)
        exchange(federation, members)
    found = mixture_at_users(federation.clients)
    assert found is not None
    torch.testing.assert_close(found, torch.tensor(pi, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    assert float((found[0] - 1 / MODELS).abs().max()) > 0.01
    for k in EVERYONE:  # who was away too
        for own, expected in zip(learners(federation, k), wanted, strict=True):
            for name, t in expected.items():
                torch.testing.assert_close(own[name], t, rtol=1e-6, atol=1e-8)
    scores = federation.clients.evaluate()
    for k in EVERYONE:
        x, y = samples_of(federation, k, "test")
        mixed = sum(pi[k][m] * outputs(own, x) for m, own in enumerate(wanted))
        assert scores[k].mean_loss == pytest.approx(float((mixed - y).square().mean()), rel=1e-5)


def test_learners_start_differently_and_mixtures_even(federate_nets: Any) -> None:
    federation = federate_nets(METHOD, changes=LINEAR)
    first, second, _ = learners(federation, 0)
    assert not torch.equal(first["weight"], second["weight"])
    assert torch.equal(mixture_at_users(federation.clients), torch.full((4, MODELS), 1 / MODELS, dtype=torch.float64))


def test_every_learner_travels_each_way_and_no_mixture(federate_nets: Any) -> None:
    federation, plain = federate_nets(METHOD), federate_nets("fedavg")
    model = plain.clients.model.layout.views(plain.clients.state.rows)
    models = {name: torch.stack([t[0]] * MODELS) for name, t in model.items()}
    header = {"user": "user-1", "rank": 0}
    upload = message_bytes(
        models, {"kind": "upload", "round": 1, **header}, {"count": torch.tensor(51), "loss": torch.tensor(0.0)}
    )
    download = message_bytes(
        {name: t.unsqueeze(0) for name, t in models.items()}, {"kind": "download", "version": 1, **header}, {}
    )
    assert crossing(federation, [1, 2]) == (2 * upload, 2 * download)


def test_one_learner_is_fedavg(federate_nets: Any) -> None:
    one, plain = federate_nets({"name": "fedem", "models": 1}), federate_nets("fedavg")
    for federation in (one, plain):
        for number in range(2):
            local_round(federation, EVERYONE, number)
            exchange(federation, EVERYONE)
    found = one.clients.model.layout.views(one.clients.state.rows)
    for name, value in plain.clients.model.layout.views(plain.clients.state.rows).items():
        torch.testing.assert_close(found[name].squeeze(1), value, rtol=1e-9, atol=1e-12)


def test_a_component_without_share_is_not_lost_for_good(federate_nets: Any) -> None:
    """Its logit stays finite, as checkpoints and checks for broken users need it."""
    federation = federate_nets(METHOD, changes=LINEAR)
    federation.clients.model.layout.views(federation.clients.state.rows)["bias"][:, 0] += 1e6
    local_round(federation, EVERYONE, 0)
    assert bool(federation.clients.state.rows.isfinite().all())
    assert float(mixture_at_users(federation.clients)[:, 0].max()) < 1e-300


# ---------------------------------------------------------------- predictions


def test_classes_are_predicted_by_mixed_probabilities() -> None:
    """``sum_m pi_m softmax(f_m(x))``, not the softmax of mixed outputs; the user's own module agrees."""
    nets = [nn.Linear(5, 4) for _ in range(MODELS)]
    mixture = ClientMixture(clusters=MODELS, of="models", at="samples")
    model = stack(nets, name="net", users=1, mixture=mixture, dtype=torch.float64, loss=CROSS_ENTROPY)
    theta = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    tensors = {
        "weight": torch.stack([net.weight.detach() for net in nets]).unsqueeze(0),
        "bias": torch.stack([net.bias.detach() for net in nets]).unsqueeze(0),
        "router.theta": theta,
    }
    x = 3 * torch.randn(1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pi = theta.softmax(1)[0]
    wanted = sum(pi[m] * nets[m](x[0]).softmax(-1) for m in range(MODELS)).detach()
    found = model.predict(tensors, [0], x)[0]
    torch.testing.assert_close(found.softmax(-1), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(6, dtype=torch.float64))
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    torch.testing.assert_close(CROSS_ENTROPY(found, targets), -wanted[range(6), targets].log())
    own = personal_net("ann", model, tensors)
    assert isinstance(own.model, MixtureOfModels)
    torch.testing.assert_close(own.predict(x[0]), found, rtol=1e-10, atol=1e-12)


def test_a_run_on_images_predicts_as_it_scores(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 255, (60, 28, 28), dtype=np.uint8), np.arange(60) % 10
    np.savez(tmp_path / "mnist.npz", x_train=pixels, y_train=labels, x_test=pixels[:30], y_test=labels[:30])
    recipe = parse_recipe(
        {
            "method": METHOD,
            "data": {"task": {"name": "mnist", "users": 3, "clusters": 3, "path": str(tmp_path)}},
            "training": {"rounds": 2, "batch_size": 8, "experts": {"name": "sgd", "learning_rate": 0.1}},
            "runtime": {"device": "cpu"},
        }
    )
    done = run(recipe)
    federation = done.federation
    assert federation.clients.model.mixes_probabilities
    for user, score in zip(federation.clients.users, federation.clients.evaluate(), strict=True):
        own = done.user(user.name)
        assert own.evaluate(user.test).measures == pytest.approx(score.measures, rel=1e-5)


def test_it_is_for_small_nets(federate: Any) -> None:
    with pytest.raises(RecipeError, match=r"method fedem: .*whole models"):
        federate("fedem")
