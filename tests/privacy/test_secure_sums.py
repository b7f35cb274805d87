"""Sums in one process: the plain ones to within the stated error, whatever the method, the weights, who is absent."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from tests.federation.tiny import tiny
from tests.quick import recipe_with

from comingle.config import parse_recipe
from comingle.config.settings import PrivacySection, SecureSection
from comingle.cost.planning import plan
from comingle.methods import REGISTRY, make
from comingle.privacy.accounting import Release
from comingle.privacy.base import REFERENCE
from comingle.privacy.mechanisms import check_supported, release_of
from comingle.privacy.secure_sum import VECTOR, Grid, Sums, flat
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess
from comingle.training.kinds.base import check_recipe
from comingle.utils.errors import RecipeError
from federations import crossing, local_round

USERS = ("ann", "bob", "cem", "dan")
SUMMED = (
    "fedavg", "ffa-lora", "fedsa-lora", "fdlora", "fedavg-moe", "fedavg-moe-tr", "pfedmoe", "comigs-tr", "comigs",
    "comigs-1g1s", "comigs-2g", "comigs-1gxs", "fedem", "fedavg+", "fedit", "fedlora", "local-adaptor",
    "stacking",
)  # fmt: skip
RIVALS = ("ditto", "fedbn", "feddpa", "fedper", "fedprox", "rolora")
"""The same of plug-ins, whose servers are plain means."""
TRAINED = tuple(name for name in SUMMED if name not in ("fedem", "local-adaptor"))
COARSE = {"privacy.secure_aggregation.bits": 16, "privacy.secure_aggregation.range": 0.5}
STEP = 0.5 / (2**15 - 1)
QUIET = {"privacy.mechanism": "none", "privacy.secure_aggregation.threshold": 0.51}


def made(federate: Any, method: str = "fedavg", users: Any = USERS, **changes: Any) -> InProcess:
    return federate(method, users=users, base="random:llama?layers=1&dim=32", dtype="float64", changes=changes)


def model_after(federation: InProcess, members: list[int]) -> torch.Tensor:
    """What the server has after one round of these users."""
    local_round(federation, members, 0)
    federation.upload(members, 1, dict.fromkeys(members, 0.0))
    federation.aggregate()
    assert federation.server.version == 1
    return flat({name: t.unsqueeze(0) for name, t in federation.server.model.items()})[0]


# -------------------------------------------------------------------- the sum


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [0, 2, 3]], ids=["all", "without bob"])
@pytest.mark.parametrize("weighting", ["uniform", "tokens"])
@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.sampled(10)
def test_the_sum_is_the_plain_one_within_the_stated_error(
    federate: Any, make_user: Any, method: str, weighting: str, members: list[int]
) -> None:
    """Half a step for each upload in a mean; where weights are rounded too, as much again of the largest change."""
    users = [make_user(name, train=100 * (at + 1)) for at, name in enumerate(USERS)]
    weights = {"training.weighting": weighting}
    plain = model_after(made(federate, method, users, **weights), members)
    capped = {"privacy.weight_cap": 400} if weighting == "tokens" else {}
    federation = made(federate, method, users, **weights, **QUIET, **COARSE, **capped)
    summed = model_after(federation, members)
    share = [(1 + at) / 4 if weighting == "tokens" else 1.0 for at in members]
    bound = STEP / 2 * len(members) / sum(share) * (1.0 if weighting == "uniform" else 2.0)
    bound *= 1.33 if method == "fdlora" else 1.0  # whose server takes a step with the mean: 0.7 (1 + 0.9) times it
    error = float((summed - plain).abs().max())
    assert error <= bound * (1 + 1e-9)
    assert error > bound / 50  # the grid is there


@pytest.mark.parametrize("weighting", ["uniform", "tokens"])
@pytest.mark.parametrize("noise", [None, 0.5])
def test_masks_put_on_and_taken_off_change_no_bit(
    federate: Any, make_user: Any, weighting: str, noise: float | None
) -> None:
    """The whole protocol, every message packed and unpacked; and as many bytes as are counted without it."""
    users = [make_user(name, train=100 * (at + 1)) for at, name in enumerate(USERS)]
    changes: dict[str, Any] = {"training.weighting": weighting, **QUIET}
    if weighting == "tokens":
        changes["privacy.weight_cap"] = 400
    if noise:
        changes |= {"privacy.mechanism": "central", "privacy.noise_multiplier": noise, "privacy.accountant": "rdp"}
        changes["privacy.noise"] = "reproducible"
    federations = [made(federate, "comigs-1g1s", users, **changes) for _ in range(2)]
    federations[1].serialise = True
    one, two = (model_after(federation, [0, 1, 3]) for federation in federations)
    assert torch.equal(one, two)
    assert federations[0].clock.upload_bytes == federations[1].clock.upload_bytes


def test_too_few_users_end_the_round_without_a_sum(federate: Any, caplog: pytest.LogCaptureFixture) -> None:
    for serialise in (False, True):
        federation = made(federate, **{**QUIET, "privacy.secure_aggregation.threshold": 0.7})
        federation.serialise = serialise
        before = flat({name: t.unsqueeze(0) for name, t in federation.server.model.items()})[0].clone()
        caplog.clear()
        assert torch.equal(model_after(federation, [0, 1]), before)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("round 1: 2 of 4 users ")
        assert "needed: 3" in line
        federation.download(range(4))  # and everybody goes on from what all have in common
        rows = federation.clients.state.rows[:, federation.clients.model.layout.mask(federation.clients.method.shared)]
        assert bool((rows == rows[0]).all())


def test_what_is_beyond_the_range_is_cut_and_said(federate: Any, caplog: pytest.LogCaptureFixture) -> None:
    federation = made(federate, **QUIET, **{"privacy.secure_aggregation.range": 1e-4})
    local_round(federation, [0, 1, 2, 3], 0)
    with caplog.at_level(logging.WARNING):
        sent = federation.clients.upload([0, 1, 2, 3], 1, {}).tensors[VECTOR]
    assert caplog.records[0].getMessage().startswith("user 'ann', round 1: ")
    assert "0.0001 (privacy.secure_aggregation.range)" in caplog.records[0].getMessage()
    assert int(sent.abs().max()) == Grid(bound=1e-4, bits=24).largest


def test_rounding_is_to_the_nearest_and_never_beyond_the_bound() -> None:
    grid = Grid(bound=2.0, bits=16)
    values = torch.linspace(-2.5, 2.5, 100_001, dtype=torch.float64).unsqueeze(0)
    placed = grid.to_integers(values)
    inside = values.abs() <= 2
    assert float((placed.double() * grid.step - values)[inside].abs().max()) <= grid.step / 2 * (1 + 1e-12)
    assert int(placed.max()) == -int(placed.min()) == grid.largest == 2**15 - 1
    assert grid.num_beyond(values) == [int((~inside).sum())]
    assert grid.num_beyond(torch.tensor([[math.nan, math.inf, 0.0]])) == [2]


# -------------------------------------------------------------------- with noise


def noisy(federate: Any, **changes: Any) -> InProcess:
    settings = {"noise_multiplier": 1.0, "clip_norm": 0.05, "accountant": "rdp", "secure_aggregation.threshold": 0.75}
    return made(federate, **{f"privacy.{key}": value for key, value in settings.items()}, **changes)


def test_the_users_parts_are_the_noise_that_is_counted(federate: Any) -> None:
    """Of three of four users, the threshold, the noise is that of the multiplier; each has its own."""
    federation = noisy(federate)
    clients, sums = federation.clients, federation.clients.plan.sums
    assert sums is not None
    grid = sums.grid(1)
    sent = clients.upload([0, 1, 2, 3], 1, {}).tensors[VECTOR].double() * grid.step  # nobody has trained
    assert kstest((sent[:3].sum(0) / 0.05).numpy(), "norm").pvalue > 1e-4
    assert kstest((sent[3] / (0.05 / 3**0.5)).numpy(), "norm").pvalue > 1e-4
    assert float(torch.corrcoef(sent).fill_diagonal_(0).abs().max()) < 0.1
    assert sums.noise_deviation(1) == pytest.approx(0.05 / 3**0.5)


def test_colluders_noise_is_not_counted_on(federate: Any) -> None:
    sums = noisy(federate, **{"privacy.secure_aggregation.colluders": 1}).clients.plan.sums
    assert sums is not None
    assert sums.noise_deviation(1) == pytest.approx(0.05 / 2**0.5)


def test_rounded_changes_are_no_longer_than_the_clip_norm(federate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise aside, also on the coarsest grid that is allowed, and whatever has been trained."""
    federation = noisy(federate, **{"privacy.secure_aggregation.bits": 20})
    clients, sums = federation.clients, federation.clients.plan.sums
    assert sums is not None
    clients.state.rows += torch.randn(clients.state.rows.shape, dtype=torch.float64)
    monkeypatch.setattr(
        "comingle.privacy.secure_sum.gaussian", lambda shape, *key: torch.zeros(shape, dtype=torch.float64)
    )
    sent = clients.upload([0, 1, 2, 3], 1, {}).tensors[VECTOR].double() * sums.grid(1).step
    lengths = sent.square().sum(1).sqrt()
    assert float(lengths.max()) <= 0.05
    assert float(lengths.min()) > 0.045


def test_noise_is_another_for_another_upload_and_the_same_for_the_same(federate: Any) -> None:
    federation = noisy(federate)
    clients = federation.clients
    first, again = (clients.upload([0, 1], 1, {}).tensors[VECTOR] for _ in range(2))
    assert torch.equal(first, again)
    clients.state.rows[0] += 1e-3
    other = clients.upload([0, 1], 1, {}).tensors[VECTOR]
    assert float((other[0] != first[0]).double().mean()) > 0.99
    assert torch.equal(other[1], first[1])


def test_the_account_takes_nobody_for_hidden_who_was_not_drawn() -> None:
    """The server and the other users of a round know who takes part in it."""
    privacy = PrivacySection(noise_multiplier=2.0, secure_aggregation=SecureSection())
    assert release_of(privacy, 0.1, 100) == Release(noise=2.0)
    assert release_of(privacy.model_copy(update={"sampling": "fixed"}), 0.1, 100) == Release(noise=2.0)
    assert release_of(privacy.model_copy(update={"secure_aggregation": None}), 0.1, 100) == Release(noise=2.0, rate=0.1)


# -------------------------------------------------------------------- refused, and off


def why(method: str, **privacy: Any) -> str:
    clustered = {"clusters": 2} if method in ("floral", "ensemble") else {}
    settings = PrivacySection(**{"mechanism": "none", "secure_aggregation": SecureSection(), **privacy})
    try:
        check_supported(make(method, **clustered), recipe_with(privacy=settings))
    except RecipeError as error:
        return str(error)
    return ""


STACKED = {
    "centralized", "pcl", "hetlora", "flexlora", "floral", "floral-optimal", "floral-mfl", "ensemble",
    "ensemble-optimal", "mfl", "fml", "fedmerge", "fedmerge-fixed", "ifca", "fedalt", "fedamole", "fedex-lora",
    "fed-sb", "fedlease", "fedtreelora", "flora-stacking", "momentum-clustering", "scaffold", "sdflora",
}  # fmt: skip
"""Methods that need more than a sum."""


def test_every_method_says_whether_it_can_be_summed() -> None:
    accepted = {name for name in REGISTRY if not why(name)}
    nothing = {name for name in REGISTRY if not make(name).shared and not make(name).placement.pooled}
    assert {*SUMMED, *RIVALS} | nothing <= accepted
    assert not accepted & STACKED


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedmerge", "secure_aggregation: method fedmerge: its server (Merge)"),
        ("flexlora", "secure_aggregation: method flexlora: its server (Redistribute)"),
        ("hetlora", "secure_aggregation: method hetlora: its server "),
        ("pcl", "secure_aggregation: method pcl: its server "),
        ("ifca", "report choice "),
        ("floral", "report mixture "),
        ("centralized", "method centralized pools "),
    ],
)
def test_what_cannot_be_summed_is_refused_with_the_reason(method: str, reason: str) -> None:
    assert reason in why(method)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy.mechanism": "local", "privacy.noise_multiplier": 1.0}, "secure_aggregation: .*mechanism: local"),
        (
            {"privacy.mechanism": "central", "privacy.noise_multiplier": 1.0, "privacy.clip_norm": "adaptive"},
            "secure_aggregation: .*clip_norm: adaptive",
        ),
        ({"training.uploads": "int8"}, "training.uploads: got 'int8'; allowed: float32"),
        ({"evaluation.select": "best"}, "privacy: evaluation.select: best"),
        ({"training.weighting": "tokens"}, "privacy.weight_cap: missing"),
        ({"privacy.noise_multiplier": 1.0}, "mechanism: none .*noise_multiplier and epsilon"),
        ({"privacy.secure_aggregation": None}, "mechanism: none .*secure_aggregation"),
        (
            {
                "privacy.mechanism": "central",
                "privacy.noise_multiplier": 1.0,
                "privacy.secure_aggregation.range": 1.0,
            },
            "secure_aggregation.range: .*privacy.clip_norm",
        ),
        ({"privacy.secure_aggregation.threshold": 0.5}, "threshold: Input should be greater than 0.5"),
        ({"privacy.secure_aggregation.bits": 8}, "bits: Input should be greater than or equal to 16"),
    ],
)
def test_settings_that_do_not_go_with_sums_are_refused(changes: dict[str, Any], reason: str) -> None:
    base = {
        "data": {"users": {"a": "x", "b": "y"}},
        "method": "fedavg",
        "privacy": {"mechanism": "none", "secure_aggregation": {"threshold": 0.6}},
    }
    check_recipe(parse_recipe(base))
    with pytest.raises(RecipeError, match=reason.replace("(", r"\(")):
        check_recipe(parse_recipe(base).with_changes(changes))


def sums(users: int, participation: Any = 1.0, **secure: Any) -> Sums:
    privacy = PrivacySection(mechanism="central", noise_multiplier=1.0, secure_aggregation=SecureSection(**secure))
    names = tuple(f"user {at}" for at in range(users))
    return Sums(privacy=privacy, participation=participation, users=names, weighted=False)


@pytest.mark.parametrize(
    ("made_of", "reason"),
    [
        (sums(1), r"secure_aggregation: .*\b1 .*needed: 2"),
        (sums(9, ((0, 1), (3,))), r"secure_aggregation: .*\b1 .*needed: 2"),
        (sums(3, colluders=1), "colluders: got 1.* 2 users; allowed: up to 0"),
        (sums(10**6, bits=16), "bits: got 16.*noise"),
    ],
)
def test_populations_of_which_no_sum_hides_anybody_are_refused(made_of: Sums, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        made_of.check()


def test_a_grid_that_is_too_coarse_for_so_many_entries_is_refused() -> None:
    coarse = sums(3, bits=16)
    coarse.check_size(10_000)
    with pytest.raises(RecipeError, match=r"bits: got 16; .*100,000,000 .*10%"):
        coarse.check_size(10**8)


@pytest.mark.slow
def test_what_is_planned_is_what_is_sent(tmp_path: Path) -> None:
    """`comingle cost` counts the messages of the sum, keys and shares among them."""
    content = tiny(tmp_path, "comigs-1g1s", users=3, evaluation__model="exchanged")
    read = parse_recipe({**content, "privacy": {"mechanism": "none", "secure_aggregation": {}}})
    (cost,) = plan(read).methods
    federation = build(read, prepare(read))
    up, down = crossing(federation, [0, 1, 2])
    assert up == sum(federation.clients.upload_bytes())
    assert [(user.upload_bytes, user.download_bytes) for user in cost.users] == [(round(up / 3), round(down / 3))]


def test_off_there_is_nothing_of_it(federate: Any) -> None:
    federation = made(federate)
    assert federation.server.sums is None
    assert federation.clients.plan.sums is None
    assert not federation.clients.mechanisms
    assert not any(name.startswith(REFERENCE) for name in federation.clients.state.kept)
