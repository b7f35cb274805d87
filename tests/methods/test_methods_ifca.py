"""IFCA against its algorithm written out user by user, what travels, and who is in which cluster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_task import EVERYONE, LINEAR, Own, batches, descend, sample_losses, samples_of, unequal
from torch import Tensor

from comingle.methods.clustered import CHOICE, best_model
from comingle.training.backends.local import InProcess
from federations import crossing, download_all, everyone, exchange, local_round, message_bytes

MODELS = 3
METHOD = {"name": "ifca", "models": MODELS}


def soup_of(federation: InProcess) -> list[Own]:
    soup = {n.removeprefix("soup."): t for n, t in federation.server.kept.items() if n.startswith("soup.")}
    return [{name: t[j].clone() for name, t in soup.items()} for j in range(MODELS)]


def picks(federation: InProcess, soup: list[Own]) -> list[int]:
    """Everybody's model with the lowest loss on all of its training data."""
    losses = [[float(sample_losses(own, *samples_of(federation, k)).mean()) for own in soup] for k in EVERYONE]
    return [row.index(min(row)) for row in losses]


def settled(federation: InProcess) -> InProcess:
    """With the first download, which each user makes of it."""
    return download_all(federation)


def chosen(federation: InProcess) -> list[int]:
    """Who has which model."""
    return federation.clients.state.kept[CHOICE].tolist()


def assessed(federation: InProcess, soup: Own, round_number: int) -> Tensor:
    """What each user loses with each model on all of its training data."""
    users = list(everyone(federation))
    models = {name: t.unsqueeze(0).expand(len(users), *t.shape) for name, t in soup.items()}
    return federation.clients.cohort(users, round_number).training_losses(models)


def by_hand(federation: InProcess, rounds: int, members: list[int]) -> tuple[list[Own], list[list[int]]]:
    """Algorithm 1 with model averaging: the models, and who took which before each round and after the last."""
    soup, taken = soup_of(federation), []
    for number in range(rounds):
        taken.append(picks(federation, soup))
        uploads: dict[int, Own] = {}
        for k in members:
            own, (x, y) = soup[taken[-1][k]], samples_of(federation, k)
            for at in batches(federation, k, number):
                own = descend(own, lambda leaves, at=at, x=x, y=y: sample_losses(leaves, x[at], y[at]).mean())
            uploads[k] = own
        for j in range(MODELS):
            size = {k: len(federation.clients.trainers[k].train) for k in members if taken[-1][k] == j}
            if size:
                total = sum(size.values())
                soup[j] = {name: sum(n / total * uploads[k][name] for k, n in size.items()) for name in soup[j]}
    return soup, [*taken, picks(federation, soup)]


@pytest.mark.parametrize("members", [EVERYONE, [0, 2, 3]], ids=["everybody", "sampled"])
def test_rounds_equal_the_algorithm_written_out(federate_nets: Any, members: list[int]) -> None:
    federation, twin = (settled(unequal(federate_nets(METHOD, changes=LINEAR))) for _ in range(2))
    wanted, taken = by_hand(twin, 3, members)
    assert len(set(taken[-1])) > 1
    for number in range(3):
        assert chosen(federation) == taken[number]
        local_round(federation, members, number)
        exchange(federation, members)
    assert chosen(federation) == taken[-1]
    rows = federation.clients.model.layout.views(federation.clients.state.rows)
    for j, found in enumerate(soup_of(federation)):
        for name, t in wanted[j].items():
            torch.testing.assert_close(found[name], t, rtol=1e-6, atol=1e-8)
    for k in EVERYONE:  # who was away too
        for name, t in wanted[taken[-1][k]].items():
            torch.testing.assert_close(rows[name][k], t, rtol=1e-6, atol=1e-8)


def test_the_first_download_is_what_each_user_picks(federate_nets: Any) -> None:
    federation = settled(federate_nets(METHOD, changes=LINEAR))
    soup = soup_of(federation)
    assert chosen(federation) == picks(federation, soup)
    for name, t in federation.clients.model.layout.views(federation.clients.state.rows).items():
        assert torch.equal(t, torch.stack([soup[j][name] for j in chosen(federation)]))


def test_a_model_that_nobody_takes_stays_as_it_is(federate_nets: Any) -> None:
    federation = federate_nets({"name": "ifca", "models": 6}, changes=LINEAR)
    before = {name: t.clone() for name, t in federation.server.kept.items()}
    local_round(federation, EVERYONE, 0)
    taken_at_first = chosen(federation)
    exchange(federation, EVERYONE)
    taken = torch.eye(6)[taken_at_first].sum(0) > 0
    assert 0 < int(taken.sum()) < 6
    for name in ("soup.weight", "soup.bias"):
        same = (federation.server.kept[name] == before[name]).flatten(1).all(1)
        assert torch.equal(same, ~taken)


def test_users_download_every_model_and_send_one_with_its_number(federate_nets: Any) -> None:
    federation, plain = federate_nets(METHOD), federate_nets("fedavg")
    model = {name: t[0] for name, t in plain.clients.model.layout.views(plain.clients.state.rows).items()}
    said = {"choice": torch.tensor(1), "count": torch.tensor(51), "loss": torch.tensor(0.5)}
    upload = {"kind": "upload", "round": 1, "user": "user-0", "rank": 0}
    wanted = message_bytes(model, upload, said)
    assert federation.clients.upload_bytes() == [wanted] * 4
    models = {name: torch.stack([t] * MODELS) for name, t in model.items()}
    download = {"kind": "download", "version": 1, "user": "user-0", "rank": 0}
    download_all(federation)
    assert crossing(federation, [0, 2]) == (2 * wanted, 2 * message_bytes(models, download, {}))


def test_losses_are_those_of_whole_training_sets_with_batch_norm(federate_nets: Any) -> None:
    """In evaluation mode, whatever the portions; a net of one user at a time, by torch alone."""
    federation, parts = (federate_nets(METHOD, changes={"runtime.users_per_step": n}) for n in (4, 3))
    soup = {n.removeprefix("soup."): t for n, t in federation.server.kept.items() if n.startswith("soup.")}
    found = assessed(federation, soup, 0)
    torch.testing.assert_close(assessed(parts, soup, 0), found, rtol=1e-9, atol=1e-12)
    net = federation.clients.model.net.eval()
    for k in EVERYONE:
        x, y = samples_of(federation, k)
        for j in range(MODELS):
            made = torch.func.functional_call(net, {name: t[j] for name, t in soup.items()}, (x,))
            assert float(found[k, j]) == pytest.approx(float((made - y).square().mean()), rel=1e-9)


def test_the_lowest_loss_is_taken_and_a_tie_changes_nothing() -> None:
    losses = torch.tensor([[2.0, 1.0, 3.0], [1.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
    assert best_model(losses, torch.tensor([0, 2, 2])).tolist() == [1, 2, 0]


def test_language_models_begin_with_random_clusters(federate: Any) -> None:
    """LoRA changes nothing before training, so all models are equally good; each user draws by its own name."""
    names = ("ann", "bob", "cem", "dan", "eva", "fay")
    federation = federate({"name": "ifca", "models": 2}, users=names)
    first = chosen(federation)
    assert set(first) == {0, 1}
    local_round(federation, range(6), 0)
    assert chosen(federation) == first
    exchange(federation, range(6))
    soup = {n.removeprefix("soup."): t for n, t in federation.server.kept.items() if n.startswith("soup.")}
    losses = assessed(federation, soup, 1)
    assert bool((losses[:, 0] != losses[:, 1]).all())
