"""Stacking: two models that are fedavg's and local's in every bit, and a weight that is the likeliest."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.data.text.streams import UserData
from comingle.methods.stacking import likeliest_weight
from comingle.models.personal import PersonalModel
from comingle.models.routers import mix_losses
from comingle.models.scoring import PAD, evaluation_windows, inputs_of
from comingle.training.client import settle
from comingle.training.rounds import run_rounds
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.trees import CLIENT_ROUTER
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
    found = likeliest_weight(losses)
    grid = torch.linspace(0, 1, 10001, dtype=torch.float64)
    for user, weight in enumerate(found.tolist()):
        mixed = grid.unsqueeze(1) * (-losses[user, 0]).exp() + (1 - grid.unsqueeze(1)) * (-losses[user, 1]).exp()
        assert weight == pytest.approx(float(grid[mixed.log().sum(1).argmax()]), abs=1.1e-4)


def test_a_model_that_is_better_everywhere_gets_all_the_weight() -> None:
    better, worse = torch.tensor([[0.1, 0.2, 900.0]]).double(), torch.tensor([[0.3, 0.2, 1800.0]]).double()
    assert likeliest_weight(torch.stack([better, worse], 1)).tolist() == [1.0]
    assert likeliest_weight(torch.stack([worse, better], 1)).tolist() == [0.0]
    assert likeliest_weight(torch.stack([better, better], 1)).tolist() == [0.5]


def test_what_is_filled_up_does_not_count() -> None:
    losses = torch.rand(1, 2, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    filled = torch.cat([losses, losses.new_zeros(1, 2, 1000)], 2)
    torch.testing.assert_close(likeliest_weight(filled), likeliest_weight(losses), rtol=0, atol=1e-12)


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
    with pytest.raises(RecipeError, match="method stacking: shares "):
        federate_nets("stacking")


@pytest.mark.parametrize("powers", [None, [[2.0, 0.5], [0.7, 3.0], [1.0, 1.5]]])
def test_what_it_says_is_the_mixtures_likeliest_token_after_token(federate: Any, powers: Any) -> None:
    """Without a cache, from probabilities of two models by themselves; several users and prompts in one pass."""
    names = ({"name": "stacking", "temperatures": powers is not None}, *NAMES[1:])
    both, *alone = (federate(name, changes={"training.experts.learning_rate": 0.05}) for name in names)
    for federation in (both, *alone):
        run_rounds(federation, observe=lambda event: None)
    clients, draw = both.clients, torch.Generator().manual_seed(2)
    router = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]).log()
    router = router if powers is None else torch.cat([router, torch.tensor(powers).log()], 1)
    clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER].copy_(router)
    prompts = torch.randint(256, (3, 2, 5), generator=draw)
    said = clients.scorer.generate(clients.models, EVERYONE, prompts, 6)
    for user, weight in enumerate((0.7, 0.2, 0.5)):
        a, b = (1.0, 1.0) if powers is None else powers[user]
        for prompt, tokens in zip(prompts[user], said[user], strict=True):
            text = prompt
            for token in tokens.tolist():
                shared, own = (next_token(one, user, text) for one in alone)
                mixed = weight * shared**a / (shared**a).sum() + (1 - weight) * own**b / (own**b).sum()
                assert token == int(mixed.argmax())
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
    with pytest.raises(DataError, match=r"^user 'ann': .*generate, score, comingle chat") as caught:
        person.merge() if action == "merge" else person.export(tmp_path / "folder")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "folder").exists()


# ---------------------------------------------------------------- temperatures


@pytest.fixture(scope="module")
def tempered(federate: Any) -> Any:
    """Two finished runs, with temperatures and without, of users one of whom has seen its validation text."""
    changes = {"training.experts.learning_rate": 0.05, "training.rounds": 3}
    known = torch.randint(256, (60,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    ann = UserData(name="ann", train=known, valid=known[:50], test=known[:17])
    found = [
        federate({"name": "stacking", "temperatures": on}, users=(ann, "bob", "cem"), changes=changes)
        for on in (True, False)
    ]
    for federation in found:
        run_rounds(federation, observe=lambda event: None)
    return found


def of_validation_text(federation: Any, user: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities ``(models, tokens, vocab)`` under both of a user's models, and the tokens that came."""
    clients = federation.clients
    windows = evaluation_windows(clients.users[user].valid, context=clients.plan.training.context)
    clients.model.bind(clients.model.tensors(clients.state.rows[[user]]), [user])
    found = clients.model.inner.network(input_ids=inputs_of(windows).repeat(2, 1), use_cache=False).logits
    here = windows[:, 1:] != PAD
    return found.detach().double().unflatten(0, (2, -1))[:, here].log_softmax(-1), windows[:, 1:][here]


def tempered_losses(models: torch.Tensor, said: torch.Tensor, powers: Any) -> torch.Tensor:
    """``-log (p^a / sum p^a)`` of the tokens that came, for both models."""
    scaled = (models * torch.as_tensor(powers, dtype=torch.float64).view(2, 1, 1)).log_softmax(-1)
    return -scaled.gather(2, said.expand(2, -1).unsqueeze(2)).squeeze(2)


def test_powers_are_the_likeliest_of_a_fine_grid_and_weights_come_after_them(tempered: Any) -> None:
    """Against logits of the whole network and every power of a grid; within what eight halvings leave open."""
    clients = tempered[0].clients
    numbers = clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER].double()
    grid = torch.linspace(-math.log(4), math.log(4), 801, dtype=torch.float64).exp()
    beyond = []
    for user in EVERYONE:
        models, said = of_validation_text(tempered[0], user)
        sums = torch.stack([tempered_losses(models, said, [a, a]).sum(1) for a in grid])
        wanted = grid[sums.argmin(0)]
        torch.testing.assert_close(numbers[user, 2:].exp(), wanted, rtol=0.012, atol=0)
        beyond += [a for a in wanted.tolist() if 0.3 < a < 3.5 and abs(a - 1) > 0.05]
        lost = tempered_losses(models, said, numbers[user, 2:].exp())
        torch.testing.assert_close(
            numbers[user, :2].softmax(0)[0], likeliest_weight(lost.unsqueeze(0))[0], rtol=0, atol=1e-5
        )
    assert beyond  # somebody's temperature is neither 1 nor the last that is allowed


def test_on_validation_text_nobody_loses_more_than_with_the_better_model_and_its_temperature(tempered: Any) -> None:
    scores = tempered[0].clients.validate()
    clients = tempered[0].clients
    powers = clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER][:, 2:].double().exp()
    for user, name in enumerate(scores):
        models, said = of_validation_text(tempered[0], user)
        own, plain = (tempered_losses(models, said, a).mean(1) for a in (powers[user], [1.0, 1.0]))
        assert bool((own <= plain + 1e-7).all())  # rows are float32
        assert scores[name] <= float(own.min()) + 1e-7
        found = tempered_losses(models, said, powers[user]).unsqueeze(0)
        weights = clients.model.layout.views(clients.state.rows)[CLIENT_ROUTER][user, :2].double().softmax(0)
        assert scores[name] == pytest.approx(float(mix_losses(found, weights.unsqueeze(0)).mean()), rel=1e-6)


def test_temperatures_train_nothing_and_leave_out_nothing(tempered: Any) -> None:
    """The models are those without, in every bit; what is sent is as long; and so are the powers, settled again."""
    views = [one.clients.model.layout.views(one.clients.state.rows) for one in tempered]
    for name, tensor in views[1].items():
        assert name == CLIENT_ROUTER or torch.equal(views[0][name], tensor)
    assert tempered[0].clients.upload_bytes() == tempered[1].clients.upload_bytes()
    before = views[0][CLIENT_ROUTER].clone()
    settle(tempered[0].clients)
    assert torch.equal(tempered[0].clients.model.layout.views(tempered[0].clients.state.rows)[CLIENT_ROUTER], before)


def test_a_head_that_caps_what_it_says_has_no_temperature(federate: Any) -> None:
    with pytest.raises(RecipeError, match=r"^method.temperatures: got true, .*'random:gemma2'"):
        federate({"name": "stacking", "temperatures": True}, base="random:gemma2")
