"""FedMerge in the engine: against its algorithm written out user by user, what travels, and users who break."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linear_task import EVERYONE, LINEAR, Own, batches, descend, sample_losses, samples_of, unequal
from scipy.stats import kstest
from torch import Tensor

from comingle.methods import make
from comingle.methods.fedmerge import Proximal
from comingle.methods.server import ServerSetup
from comingle.models import hardware
from comingle.training.backends.local import InProcess
from comingle.training.evaluation import merged_mixtures_event, mixtures_of_users
from comingle.training.kinds import nets
from comingle.training.rounds import run_rounds
from comingle.utils.errors import DivergenceError, RecipeError
from federations import crossing, download_all, exchange, local_round, message_bytes

STEP = 0.01
MODELS = 3


def merge(soup: Own, shares: Tensor) -> Own:
    return {name: sum(shares[j] * t[j] for j in range(len(shares))) for name, t in soup.items()}


def inner(one: Own, other: Own) -> Tensor:
    return sum((one[name] * other[name]).sum() for name in one)


class ByHand:
    """Algorithm 1 on the linear task, whose only layer is its head."""

    def __init__(self, federation: InProcess, *, softmax: bool, models_first: bool, column: bool, proximal: float):
        memory = federation.server.kept
        self.federation, self.softmax, self.column, self.proximal = federation, softmax, column, proximal
        self.soup = {n.removeprefix("soup."): t.clone() for n, t in memory.items() if n.startswith("soup.")}
        self.logits = memory["merging"].clone()
        self.moves = [self.move_models, self.move_weights] if models_first else [self.move_weights, self.move_models]

    def shares(self, user: int) -> Tensor:
        return self.logits[user].softmax(0) if self.softmax else self.logits[user]

    def round(self, number: int, members: Sequence[int]) -> None:
        total = sum(len(self.federation.clients.trainers[k].train) for k in members)
        p = {k: len(self.federation.clients.trainers[k].train) / total for k in members}
        updates = {k: self.local(k, number) for k in members}
        for move in self.moves:
            move(updates, p)

    def local(self, user: int, number: int) -> Own:
        """What the merged model was minus what the user made of it."""
        (x, y), start = samples_of(self.federation, user), merge(self.soup, self.shares(user))

        def loss(own: Own, at: Tensor) -> Tensor:
            away = sum((own[name] - start[name]).square().sum() for name in own)
            return sample_losses(own, x[at], y[at]).mean() + self.proximal * away

        own = dict(start)
        for at in batches(self.federation, user, number):
            own = descend(own, lambda leaves, at=at: loss(leaves, at))
        return {name: start[name] - own[name] for name in own}

    def move_models(self, updates: dict[int, Own], p: dict[int, float]) -> None:
        shares = {k: self.shares(k) for k in updates}
        for j in range(len(self.logits[0])):
            total = sum(p[k] * abs(shares[k][j]) for k in updates) if self.column else 1.0
            if float(total) == 0:
                continue
            for name, t in self.soup.items():
                t[j] -= sum(p[k] * shares[k][j] / total * updates[k][name] for k in updates)

    def move_weights(self, updates: dict[int, Own], p: dict[int, float]) -> None:
        gradient = torch.zeros_like(self.logits)
        for k, g in updates.items():
            w, merged = self.shares(k), merge(self.soup, self.shares(k))
            for j in range(len(w)):
                model = {name: t[j] for name, t in self.soup.items()}
                difference = {name: model[name] - merged[name] for name in model}
                gradient[k, j] = w[j] * inner(difference, g) if self.softmax else inner(model, g)
        gradient /= gradient.abs().sum()
        moved = torch.zeros_like(gradient)
        while float(moved.abs().max()) <= STEP:
            for k in updates:
                moved[k] -= STEP * p[k] * gradient[k]
        self.logits += moved


@pytest.mark.parametrize("members", [EVERYONE, [0, 2, 3]], ids=["everybody", "sampled"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"models_first": False, "proximal": 0.3},
        {"softmax": False, "column_normalize": False},
        {"softmax": False, "models_first": False},
    ],
    ids=["defaults", "weights first, proximal", "eq. 5", "no softmax, weights first"],
)
def test_two_rounds_equal_the_algorithm_written_out(
    federate_nets: Any, settings: dict[str, Any], members: list[int]
) -> None:
    federation = unequal(
        federate_nets({"name": "fedmerge", "models": MODELS, "weight_step": STEP, **settings}, changes=LINEAR)
    )
    chosen = {"softmax": True, "models_first": True, "column_normalize": True, "proximal": 0.0, **settings}
    hand = ByHand(federation, column=chosen.pop("column_normalize"), **chosen)
    for number in range(2):
        hand.round(number, members)
        local_round(federation, members, number)
        exchange(federation, members)
    rows = federation.clients.model.layout.views(federation.clients.state.rows)
    torch.testing.assert_close(federation.server.kept["merging"], hand.logits, rtol=1e-9, atol=1e-12)
    assert float((hand.logits - hand.logits[:1]).abs().max()) > STEP / 2
    for name, t in hand.soup.items():
        torch.testing.assert_close(federation.server.kept[f"soup.{name}"], t, rtol=1e-6, atol=1e-8)
        for k in EVERYONE:  # who was away too
            torch.testing.assert_close(rows[name][k], merge(hand.soup, hand.shares(k))[name], rtol=1e-6, atol=1e-8)


def test_the_first_download_is_the_mean_of_the_soup(federate_nets: Any) -> None:
    federation = download_all(federate_nets({"name": "fedmerge", "models": MODELS}))
    for name, t in federation.clients.model.layout.views(federation.clients.state.rows).items():
        soup = federation.server.kept[f"soup.{name}"]
        assert len(soup) == MODELS
        torch.testing.assert_close(t, soup.mean(0).expand_as(t))
    weight = federation.server.kept["soup.0.weight"]
    assert not torch.equal(weight[0], weight[1])


def test_one_model_travels_whatever_is_in_the_soup(federate_nets: Any) -> None:
    for models in (1, 7):
        federation, plain = federate_nets({"name": "fedmerge", "models": models}), federate_nets("fedavg")
        assert crossing(download_all(federation), EVERYONE) == crossing(plain, EVERYONE)
        model = {name: t[:1] for name, t in plain.clients.model.layout.views(plain.clients.state.rows).items()}
        header = {"kind": "download", "version": 2, "user": "user-1", "rank": 0}
        assert crossing(federation, [1])[1] == message_bytes(model, header, {})


def test_one_adapter_travels_on_a_language_model(federate: Any) -> None:
    federation, plain = federate({"name": "fedmerge", "models": 4}), federate("fedit")
    assert crossing(download_all(federation), [0, 2]) == crossing(plain, [0, 2])
    assert federate("fedavg").clients.upload_bytes()[0] > plain.clients.upload_bytes()[0]  # it has two experts
    assert len(federation.server.kept["soup.layers.0.mlp.up.a"]) == 4


def test_one_model_is_fedavg(federate_nets: Any) -> None:
    federation, plain = federate_nets({"name": "fedmerge", "models": 1}), federate_nets("fedavg")
    for each in (federation, plain):
        for number in range(2):
            local_round(each, EVERYONE, number)
            exchange(each, EVERYONE)
    torch.testing.assert_close(federation.clients.state.rows, plain.clients.state.rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("models", [2, 7])
def test_a_soup_whose_equal_weights_stay_is_fedavg_from_the_mean_of_its_models(federate_nets: Any, models: int) -> None:
    """So the number of models decides on where such a federation starts, and on nothing else."""
    soup, plain = federate_nets({"name": "fedmerge", "models": models, "weight_step": 0.0}), federate_nets("fedavg")
    for name, t in plain.server.kept.items():
        t.copy_(soup.server.kept[name.replace("model.", "soup.")].mean(0))
    plain.clients.state.rows.copy_(download_all(soup).clients.state.rows)
    for each in (soup, plain):
        for number in range(3):
            local_round(each, EVERYONE, number)
            exchange(each, EVERYONE)
    torch.testing.assert_close(soup.clients.state.rows, plain.clients.state.rows, rtol=1e-9, atol=1e-12)


def test_fixed_weights_are_even_over_a_subset_and_stay(federate_nets: Any) -> None:
    federation = federate_nets({"name": "fedmerge-fixed", "models": 6, "chosen": 2})
    before = federation.server.kept["merging"].clone()
    shares = before.softmax(1)
    assert sorted(shares[0].tolist()) == [0, 0, 0, 0, 0.5, 0.5]
    assert len({tuple(row) for row in shares.tolist()}) > 1
    local_round(federation, EVERYONE, 0)
    exchange(federation, EVERYONE)
    assert torch.equal(federation.server.kept["merging"], before)


def test_random_fixed_weights_are_anywhere_on_the_simplex_and_stay(federate_nets: Any) -> None:
    method = {"name": "fedmerge-fixed", "models": 6, "chosen": 2}
    even, federation = (federate_nets({**method, "weights": how}) for how in ("even", "random"))
    before = federation.server.kept["merging"].clone()
    shares = before.softmax(1)
    torch.testing.assert_close(shares.sum(1), torch.ones(4, dtype=shares.dtype))
    assert torch.equal(shares > 0, even.server.kept["merging"].softmax(1) > 0)  # of the same models
    assert len({float(row.max()) for row in shares}) == 4
    exchange(local(federation), EVERYONE)
    assert torch.equal(federation.server.kept["merging"], before)


def local(federation: InProcess) -> InProcess:
    local_round(federation, EVERYONE, 0)
    return federation


def test_random_fixed_weights_are_uniform_on_the_simplex() -> None:
    """The share of the first of two models is uniform on [0, 1]: Kolmogorov and Smirnov's test over 4,000 users."""
    server = make("fedmerge-fixed", models=2, chosen=2, weights="random").server
    users = [f"user-{number}" for number in range(4_000)]
    models = {"w": torch.arange(2.0).unsqueeze(1)}
    kept = server.start(ServerSetup(models=models, users=users, scales=torch.ones(len(users)), seed=0))
    assert kstest(kept["merging"].softmax(1)[:, 0].numpy(), "uniform").pvalue > 0.01


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"inner_product_keys": "first"}, ["0.weight", "0.bias"]),
        ({"inner_product_keys": "body"}, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ({"inner_product_keys": "trained"}, ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]),
        ({"inner_product_keys": "trained", "inner_product_share": 0.02}, None),
    ],
    ids=["first", "body", "trained", "share"],
)
def test_weights_move_by_the_numbers_that_are_named(
    federate_nets: Any, settings: dict[str, Any], names: list[str] | None
) -> None:
    """Eq. 6 with a softmax on these numbers alone, user by user, on a net with batch norm."""
    method = {"name": "fedmerge", "models": 2, "models_first": False, **settings}
    federation = federate_nets(method)
    kept = federation.server.kept
    soup = {n.removeprefix("soup."): t.clone() for n, t in kept.items() if n.startswith("soup.")}
    logits = kept["merging"].clone()
    download_all(federation)
    local_round(federation, EVERYONE, 0)
    rows = federation.clients.model.layout.views(federation.clients.state.rows)
    counts = torch.tensor([len(t.train) for t in federation.clients.trainers], dtype=torch.float64)
    weights, gradient = counts / counts.sum(), torch.zeros_like(logits)
    for user in EVERYONE:
        shares = logits[user].softmax(0)
        merged = merge(soup, shares)
        update = {name: merged[name] - rows[name][user] for name in soup}
        trained = [name for name in soup if "running" not in name]
        kept_names = trained if names is None else names
        if names is None:
            every = torch.cat([update[name].flatten() for name in trained]).abs().sort(descending=True).values
            least = every[-(-len(every) // 50) - 1]
            update = {name: torch.where(t.abs() >= least, t, 0.0) for name, t in update.items()}
        for j in range(2):
            apart = {name: soup[name][j] - merged[name] for name in kept_names}
            gradient[user, j] = weights[user] * shares[j] * inner(apart, update)
    exchange(federation, EVERYONE)
    moved = logits - federation.server.kept["merging"]
    torch.testing.assert_close(moved / moved.abs().max(), gradient / gradient.abs().max(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("column", [True, False], ids=["column-normalised", "eq. 5"])
def test_models_of_the_absent_stay_where_they_are(federate_nets: Any, column: bool) -> None:
    """Two models, each with users of its own; only the first one's are there."""
    method = {"name": "fedmerge", "models": 2, "softmax": False, "weight_step": 0.0, "column_normalize": column}
    federation = federate_nets(method, changes={"data.task.name": "mlp"})  # behind batch norm no bias moves
    federation.server.kept["merging"].copy_(torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]]))
    download_all(federation)
    before = {name: t.clone() for name, t in federation.server.kept.items()}
    local_round(federation, [0, 2], 0)
    exchange(federation, [0, 2])
    for name, t in federation.server.kept.items():
        assert torch.equal(t[1], before[name][1]), name
        assert torch.equal(t[0], before[name][0]) == (name == "merging"), name


def test_fixed_weights_leave_models_alone_that_nobody_present_has(federate_nets: Any) -> None:
    federation = federate_nets({"name": "fedmerge-fixed", "models": 6, "chosen": 2})
    before = {name: t.clone() for name, t in federation.server.kept.items()}
    used = federation.server.kept["merging"][0].softmax(0) > 0
    local_round(federation, [0], 0)
    exchange(federation, [0])
    weight, start = federation.server.kept["soup.0.weight"], before["soup.0.weight"]
    assert torch.equal((weight != start).flatten(1).any(1), used)


@pytest.mark.parametrize("name", ["fedmerge", "fedmerge-fixed"])
def test_merging_weights_are_as_precise_as_the_models(federate_nets: Any, name: str) -> None:
    sizes = {"models": 3, "chosen": 2} if name == "fedmerge-fixed" else {"models": 3}
    for dtype in (torch.float64, torch.float32):
        changes = {"runtime.dtype": str(dtype).removeprefix("torch.")}
        assert federate_nets({"name": name, **sizes}, changes=changes).server.kept["merging"].dtype == dtype


def test_the_proximal_gradient_is_that_of_autograd(federate_nets: Any) -> None:
    federation = federate_nets({"name": "fedmerge", "models": 2, "proximal": 0.3})
    layout, users = federation.clients.model.layout, [1, 3]
    cohort = federation.clients.cohort(users, 0, looks_back=True)
    assert cohort.round_start is not None
    cohort.round_start.normal_(generator=torch.Generator().manual_seed(1))
    leaves = {name: t.detach().clone().requires_grad_() for name, t in cohort.tensors.items()}
    before = layout.views(cohort.round_start)
    penalty = 0.3 * sum((leaves[name] - before[name]).square().sum() for name in leaves)
    wanted = dict(zip(leaves, torch.autograd.grad(penalty, list(leaves.values())), strict=True))
    found = {name: torch.ones_like(t) for name, t in leaves.items()}
    Proximal(0.3).correct(cohort, found)
    for name in leaves:
        torch.testing.assert_close(found[name], 1 + wanted[name], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- users who break


def broken(federate_nets: Any, users: Sequence[int], value: float, **changes: Any) -> InProcess:
    federation = federate_nets(
        {"name": "fedmerge", "models": MODELS}, changes={**LINEAR, "training.rounds": 1, **changes}
    )
    bank = federation.clients.batch_source.banks["train"]
    for user in users:
        bank.inputs[int(bank.starts[user])] = value
    return federation


@pytest.mark.parametrize("value", [float("nan"), 1e300])
def test_a_user_who_leaves_the_real_numbers_is_left_out(
    federate_nets: Any, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[dict[str, Any]] = []
    federation = broken(federate_nets, [1], value)
    name = federation.clients.trainers[1].name
    with caplog.at_level("WARNING", logger="comingle"):
        run_rounds(federation, observe=events.append)
    (event,) = (e for e in events if e["event"] == "rejected")
    assert (event["round"], event["user"]) == (1, name)
    assert event["reason"]
    (warning,) = (told for told in caplog.messages if "evaluation will take" not in told)
    assert f"user {name!r} " in warning
    assert "round 1: " in warning
    (done,) = (e for e in events if e["event"] == "round")
    assert set(done["train_loss_nats"]) == {federation.clients.trainers[k].name for k in (0, 2, 3)}
    sent, received = crossing(federation, [0, 2, 3])
    # All have received their first model before they are evaluated for the first time.
    assert (done["upload_bytes"], federation.server.version) == (sent, 2)
    assert done["download_bytes"] == received // 3 * 4

    absent = broken(
        federate_nets,
        [],
        value,
        **{"training.participation": [[federation.clients.trainers[k].name for k in (0, 2, 3)]]},
    )
    run_rounds(absent, observe=lambda event: None)
    assert bool(federation.clients.state.rows.isfinite().all())
    assert torch.equal(federation.clients.state.rows, absent.clients.state.rows)
    assert all(torch.equal(t, absent.server.kept[key]) for key, t in federation.server.kept.items())


def test_what_breaks_in_the_last_step_is_seen_in_the_rows(federate_nets: Any) -> None:
    """The losses of such a round are all finite: a step of infinite length is its last thing."""
    changes = {"data.task.name": "linear", "training.batch_size": 64}  # one step a round
    federation = federate_nets({"name": "fedmerge", "models": MODELS}, changes=changes)
    bank = federation.clients.batch_source.banks["train"]
    bank.inputs[int(bank.starts[1])] = 1e15  # its loss and its gradient are numbers still
    plan = federation.clients.plan
    experts = plan.training.experts.model_copy(update={"learning_rate": 1e300})
    federation.clients.steps.plan = plan.updated("training", experts=experts)
    download_all(federation)
    before = federation.clients.state.rows[1].clone()
    found = local_round(federation, EVERYONE, 0)
    assert found.rejected[1] == "not all tensors are finite after round 1"
    assert torch.equal(federation.clients.state.rows[1], before)
    assert bool(federation.clients.state.rows[1].isfinite().all())


def test_who_is_left_out_loses_the_moments_of_the_round(federate_nets: Any) -> None:
    """Else they would be NaN, or push a user on who stands where it began; and steps are counted with them."""
    adam = {"training.experts.name": "adamw", "training.experts.learning_rate": 0.05}
    federation = broken(federate_nets, [], 0.0, **adam)
    local_round(federation, EVERYONE, 0)
    for kept in (federation.clients.state.first, federation.clients.state.second):
        assert bool((kept[EVERYONE] != 0).any(1).all())
    bank = federation.clients.batch_source.banks["train"]
    bank.inputs[int(bank.starts[1])] = float("nan")
    assert set(local_round(federation, EVERYONE, 1).rejected) == {1}
    for kept in (federation.clients.state.first, federation.clients.state.second):
        assert not kept[1].any()
        assert bool((kept[[0, 2, 3]] != 0).any(1).all())
    assert [bool(n) for n in federation.clients.state.iterations] == [True, False, True, True]


def test_a_round_without_anybody_ends_the_run(federate_nets: Any) -> None:
    with pytest.raises(DivergenceError, match=r"nan .*round 1") as error:
        run_rounds(broken(federate_nets, EVERYONE, float("nan")), observe=lambda event: None)
    assert "\n" not in str(error.value)


def test_other_servers_do_not_forgive(federate_nets: Any) -> None:
    federation = federate_nets("fedavg", changes=LINEAR)
    federation.clients.batch_source.banks["train"].inputs[0] = float("nan")
    with pytest.raises(DivergenceError, match=f"user '{federation.clients.trainers[0].name}'"):
        run_rounds(federation, observe=lambda event: None)


# ---------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "fedmerge", "models": 0}, "method fedmerge: models is 0; allowed: whole numbers from 1"),
        ({"name": "fedmerge-fixed", "models": 3, "chosen": 4}, "chosen is 4 of 3 models; allowed: 1 to 3"),
        (
            {"name": "fedmerge", "inner_product_keys": "tail"},
            "inner_product_keys is 'tail'; allowed: head, all, trained, body, first",
        ),
        ({"name": "fedmerge", "proximal": -1.0}, "proximal is -1.0; allowed: numbers from 0"),
    ],
)
def test_settings_out_of_range_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        make(settings.pop("name"), **settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fedmerge", "ifca"])
def test_models_of_the_server_have_one_rank(federate: Any, name: str) -> None:
    for models in (1, 2):
        with pytest.raises(RecipeError, match=f"method {name}: .*adapters.rank"):
            federate({"name": name, "models": models}, changes={"adapters.rank": [2, 4, 2]})


@pytest.mark.parametrize("build", ["federate", "federate_nets"])
def test_more_models_than_the_memory_holds_are_refused_before_they_are_drawn(
    build: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    federate = request.getfixturevalue(build)
    federate({"name": "fedmerge", "models": 2})
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 20))
    with pytest.raises(RecipeError, match=r"method fedmerge: 10,000 models of [\d,]+ parameters"):
        federate({"name": "fedmerge", "models": 10_000})


def test_identical_models_are_refused_with_the_reason(federate_nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "SEED_STEP", 0)
    with pytest.raises(RecipeError, match=r"method\.models: .* 2 models"):
        federate_nets({"name": "fedmerge", "models": 2})


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"name": "fedmerge", "models": 3}, True),
        ({"name": "fedmerge", "models": 3, "softmax": False}, False),
        ({"name": "ifca", "models": 3}, True),
    ],
    ids=["fedmerge", "unconstrained", "ifca"],
)
def test_evaluations_tell_the_merging_weights(federate_nets: Any, method: dict[str, Any], told: bool) -> None:
    federation = federate_nets(method)
    local_round(federation, [0, 1, 2, 3], 0)
    exchange(federation, [0, 1, 2, 3])
    if method["name"] == "ifca":
        weights = torch.eye(3)[federation.clients.state.kept["choice"]]
    else:
        weights = federation.clients.method.server.merging_weights(federation.server.kept)
    if not told:
        weights[0, 0] = -0.5
    event = merged_mixtures_event(federation.clients, federation.server, mixtures_of_users(federation.clients))
    found = torch.tensor(list(event["mixtures"].values()), dtype=torch.float64)
    torch.testing.assert_close(found, weights.double(), rtol=0, atol=1e-6)
    assert event["clusters"] == {"user-0": 0, "user-1": 1, "user-2": 0, "user-3": 1}
    assert ("router_entropy_nats" in event) == ("aggregation_mismatch" in event) == told
