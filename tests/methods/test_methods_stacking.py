"""Stacking: two models that are fedavg's and local's in every bit, and a weight that is the likeliest."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.engines.local import settle
from comingle.engines.rounds import run_rounds
from comingle.errors import DataError, RecipeError
from comingle.methods.stacking import likeliest
from comingle.models.personal import PersonalModel
from comingle.routers.mixtures import mix_losses
from comingle.trees import CLIENT_ROUTER
from federations import exchange, local_round

EVERYONE = [0, 1, 2]


def component(federation: Any, number: int) -> dict[str, torch.Tensor]:
    """Everybody's tensors of one of the two models."""
    clients = federation.clients
    views = clients.model.layout.views(clients.state.rows)
    return {name: t[:, number] for name, t in views.items() if name != CLIENT_ROUTER}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_both_models_are_those_of_fedavg_and_of_local_in_every_bit(federate: Any, dtype: str) -> None:
    """Three rounds, in one of which somebody is absent; batch by batch, moments included."""
    both, *alone = (federate(name, dtype=dtype) for name in ("stacking", "fedavg", "local"))
    for number, members in enumerate((EVERYONE, [0, 2], EVERYONE)):
        for federation in (both, *alone):
            local_round(federation, members, number)
            if federation.clients.method.exchanges(number + 1):
                exchange(federation, members, number + 1)
    for number, federation in enumerate(alone):
        clients = federation.clients
        assert torch.unique(clients.state.rows, dim=0).shape[0] == (1 if number == 0 else 3)
        for name, tensor in clients.model.layout.views(clients.state.rows).items():
            assert torch.equal(component(both, number)[name], tensor), name
        moments = clients.model.layout.views(clients.state.second)
        mine = both.clients.model.layout.views(both.clients.state.second)
        assert all(torch.equal(mine[name][:, number], t) for name, t in moments.items())


def test_it_loses_what_the_mixture_of_the_two_runs_loses(federate: Any) -> None:
    """Against probabilities mixed token by token, of models that were trained in runs of their own."""
    both, *alone = (federate(name) for name in ("stacking", "fedavg", "local"))
    for federation in (both, *alone):
        run_rounds(federation, observe=lambda event: None)
    clients, windows = both.clients, torch.stack([user.test[:17].long() for user in both.clients.users]).unsqueeze(1)
    weights = clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER].softmax(-1)
    got = clients.scorer.predict(clients.models, EVERYONE, windows)
    apart = [one.clients.scorer.predict(one.clients.models, EVERYONE, windows) for one in alone]
    for user in EVERYONE:
        for place in range(16):
            shared, own = (math.exp(-float(losses[user, 0, place])) for losses in apart)
            wanted = -math.log(float(weights[user, 0]) * shared + float(weights[user, 1]) * own)
            assert float(got[user, 0, place]) == pytest.approx(wanted, rel=1e-6)


def test_no_user_is_worse_off_on_validation_text_than_with_the_better_model(federate: Any) -> None:
    federations = [federate(name) for name in ("stacking", "fedavg", "local")]
    for federation in federations:
        run_rounds(federation, observe=lambda event: None)
    mixed, *alone = (federation.clients.validate() for federation in federations)
    assert mixed.keys() == {"ann", "bob", "cem"}
    for name, loss in mixed.items():
        assert loss <= min(one[name] for one in alone) + 1e-7  # logits are float32
        assert loss < max(one[name] for one in alone)


def test_the_weight_is_the_likeliest_of_a_fine_grid() -> None:
    draw = torch.Generator().manual_seed(0)
    losses = torch.rand(4, 2, 50, generator=draw, dtype=torch.float64) * 3
    found = likeliest(losses)
    grid = torch.linspace(0, 1, 10001, dtype=torch.float64)
    for user, weight in enumerate(found.tolist()):
        mixed = grid.unsqueeze(1) * (-losses[user, 0]).exp() + (1 - grid.unsqueeze(1)) * (-losses[user, 1]).exp()
        assert weight == pytest.approx(float(grid[mixed.log().sum(1).argmax()]), abs=1.1e-4)


def test_a_model_that_is_better_everywhere_gets_all_the_weight() -> None:
    better, worse = torch.tensor([[0.1, 0.2, 900.0]]).double(), torch.tensor([[0.3, 0.2, 1800.0]]).double()
    assert likeliest(torch.stack([better, worse], 1)).tolist() == [1.0]
    assert likeliest(torch.stack([worse, better], 1)).tolist() == [0.0]
    assert likeliest(torch.stack([better, better], 1)).tolist() == [0.5]


def test_what_is_filled_up_does_not_count() -> None:
    losses = torch.rand(1, 2, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    filled = torch.cat([losses, losses.new_zeros(1, 2, 1000)], 2)
    torch.testing.assert_close(likeliest(filled), likeliest(losses), rtol=0, atol=1e-12)


def test_a_mixture_loses_at_most_the_weighted_mean_of_losses_and_its_bounds() -> None:
    """Jensen, and that a sum is no less than each of its terms: the promises of the docstring, on any text."""
    losses = torch.rand(1, 2, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5
    for weight in (0.01, 0.3, 0.99):
        shares = torch.tensor([[weight, 1 - weight]], dtype=torch.float64)
        mixed = mix_losses(losses, shares)[0]
        assert bool((mixed <= weight * losses[0, 0] + (1 - weight) * losses[0, 1] + 1e-12).all())
        assert bool((mixed <= losses[0, 0] - math.log(weight) + 1e-12).all())
        assert bool((mixed <= losses[0, 1] - math.log(1 - weight) + 1e-12).all())


def test_settling_twice_changes_nothing_and_users_share_a_pass(federate: Any) -> None:
    found = []
    for together in (1, 3):
        federation = federate("stacking", changes={"runtime.users_per_step": together})
        local_round(federation, EVERYONE, 0)
        exchange(federation, EVERYONE, 1)
        for _ in range(2):
            settle(federation.clients)
            found.append(component_weights(federation))
    for one, other in pairwise(found):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert bool((found[0] != 0.5).all())


def component_weights(federation: Any) -> torch.Tensor:
    clients = federation.clients
    return clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER].softmax(-1)


@pytest.mark.parametrize(("generalists", "shared"), [(0, 0), (1, 1), (2, 2)])
def test_models_of_one_kind_start_differently_and_only_shared_ones_travel(
    federate: Any, generalists: int, shared: int
) -> None:
    federation = federate({"name": "stacking", "generalists": generalists})
    layout = federation.clients.model.layout
    assert layout.count(federation.clients.method.shared) == shared * (layout.columns - 2) // 2
    first, second = component(federation, 0), component(federation, 1)
    assert all(not torch.equal(first[name], second[name]) for name in first if name.endswith(".a"))


def test_nets_are_refused_in_one_line(federate_nets: Any) -> None:
    with pytest.raises(RecipeError, match=r"method stacking: shares nothing of a net; it is for language models"):
        federate_nets("stacking")


def test_what_it_says_is_the_mixtures_likeliest_token_after_token(federate: Any) -> None:
    """Without a cache, from probabilities of two models by themselves; several users and prompts in one pass."""
    both, *alone = (federate(name, changes={"training.experts.learning_rate": 0.05}) for name in NAMES)
    for federation in (both, *alone):
        run_rounds(federation, observe=lambda event: None)
    clients, draw = both.clients, torch.Generator().manual_seed(2)
    clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER].copy_(
        torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]).log()
    )
    prompts = torch.randint(256, (3, 2, 5), generator=draw)
    said = clients.scorer.generate(clients.models, EVERYONE, prompts, 6)
    for user, weight in enumerate((0.7, 0.2, 0.5)):
        for prompt, tokens in zip(prompts[user], said[user], strict=True):
            text = prompt
            for token in tokens.tolist():
                shared, own = (next_token(one, user, text) for one in alone)
                assert token == int((weight * shared + (1 - weight) * own).argmax())
                text = torch.cat([text, torch.tensor([token])])


NAMES = ("stacking", "fedavg", "local")


def next_token(federation: Any, user: int, text: torch.Tensor) -> torch.Tensor:
    """A user's probabilities of the token after ``text``."""
    clients = federation.clients
    clients.model.adapters.bind(clients.model.tensors(clients.state.rows[[user]]), [user])
    return clients.model.network(input_ids=text.unsqueeze(0), use_cache=False).logits[0, -1].softmax(-1)


@pytest.mark.parametrize("action", ["merge", "export"])
def test_no_weights_can_hold_it_and_that_is_one_line(federate: Any, tmp_path: Path, action: str) -> None:
    clients = federate("stacking").clients
    person = PersonalModel(
        name="ann", model=clients.model, tensors=clients.model.tensors(clients.state.rows[:1]), row=0
    )
    with pytest.raises(DataError) as caught:
        person.merge() if action == "merge" else person.export(tmp_path / "folder")
    assert str(caught.value).startswith(
        "user 'ann': several whole models whose predictions are mixed, which no weights"
    )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "folder").exists()
