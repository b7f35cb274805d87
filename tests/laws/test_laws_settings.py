"""A setting that is documented to change something changes something: every setting of every method, every option of
adaptors and adapters, away from its default in a tiny run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comingle.config.sections import FloralSection
from comingle.config.settings import AdaptersSection
from comingle.methods import REGISTRY, make, settings_of
from comingle.models.floral.layers import CONV_FORMS
from comingle.models.floral.wrapper import floral
from comingle.training.backends.local import InProcess
from comingle.training.client import finish, settle
from federations import exchange, local_round

ROUNDS = 3
TINY = "random:llama?layers=1&dim=32"

WITH: dict[str, Any] = {"router_every": 2, "router_steps": 1, "exchange_from": 1, "exchange_every": 1}
"""In place of defaults that are longer than a tiny run."""

OTHER: dict[str, Any] = {
    "router_every": 1,
    "router_stream": "train",
    "inner_product_keys": "all",
    "fusion_steps": 1,
    "gamma": 0.5,
    "quantile": 0.9,
    "weights": "random",
    "exchange_from": 2,
    "exchange_every": 2,
    "experts": 6,
    "choices": 1,
    "threshold": -1.0,
    "window": 1,
}
"""Values where the rule of :func:`other` would not do."""

COMPANY: dict[tuple[str, str], dict[str, Any]] = {
    ("fedtreelora", "window"): {"threshold": -1.0},  # or all users are one cluster
    ("hetlora", "gamma"): {"regularisation": 5.0},  # which shrinks the tails that are cut
    ("hetlora", "prune"): {"regularisation": 5.0},
    ("momentum-clustering", "quantile"): {"clusters": 1},  # or each of three users is a cluster
    ("momentum-clustering", "iterations"): {"clusters": 1, "quantile": 0.9},
}
"""Settings that have to be there for another to matter."""

CASES = [(name, key) for name in REGISTRY for key in settings_of(name)]


def other(key: str, default: Any) -> Any:
    """A value that is not the default."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    return default / 2 if default else 0.5


def outcome(federation: InProcess) -> list[Tensor]:
    """What users and server have after a few rounds."""
    everyone = list(range(len(federation.clients.trainers)))
    for number in range(ROUNDS):
        local_round(federation, everyone, number)
        if federation.clients.method.exchanges(number + 1):
            exchange(federation, everyone)
    finish(federation.clients)
    settle(federation.clients)
    return [federation.clients.state.rows, federation.clients.state.ranks, *federation.server.kept.values()]


def differ(one: list[Tensor], two: list[Tensor]) -> bool:
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def run(federate: Any, federate_nets: Any, name: str, **settings: Any) -> list[Tensor]:
    method = {"name": name, **settings}
    made, mixture = make(name), make(name).placement.mixture
    # Settings of a server with several models are about whole models.
    if (mixture is not None and not mixture.trains_independently) or made.server.server_models > 1:
        return outcome(federate_nets(method, changes={"training.rounds": ROUNDS}))
    ranks = {"adapters.rank": [2, 3, 4]} if name == "hetlora" else {}
    return outcome(federate(method, changes={"training.rounds": ROUNDS, **ranks}))


@cache
def plain(federate: Any, federate_nets: Any, name: str, company: frozenset[tuple[str, Any]]) -> list[Tensor]:
    return run(federate, federate_nets, name, **dict(company))


@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{name}, {key}" for name, key in CASES])
@pytest.mark.sampled(15)
def test_a_methods_setting_changes_what_is_learnt(federate: Any, federate_nets: Any, name: str, key: str) -> None:
    known = settings_of(name)
    company = {k: v for k, v in WITH.items() if k in known} | COMPANY.get((name, key), {})
    before = plain(federate, federate_nets, name, frozenset(company.items()))
    value = other(key, company.get(key, known[key]))
    assert value != company.get(key, known[key])
    assert differ(before, run(federate, federate_nets, name, **{**company, key: value}))


# ---------------------------------------------------------------- options of adaptors in nets

ADAPTORS: dict[str, dict[str, Any]] = {
    "rank": {"floral.rank": 1},
    "budget": {"floral.rank": None, "floral.budget": 0.9},
    "alpha": {"floral.alpha": 0.5},
    "lora": {"floral.lora": False},
    "bias": {"floral.bias": False},
    "norm": {"floral.norm": False},
    "batch_nora": {"floral.batch_nora": True},
}


def test_no_option_of_adaptors_is_forgotten() -> None:
    assert {*ADAPTORS, "conv"} == set(FloralSection.model_fields)
    others = {"targets", "start"}  # for families that nobody knows; an adapter, in test_adapters_peft.py
    assert {*ADAPTERS, *others} == set(AdaptersSection.model_fields)


@pytest.mark.parametrize("option", ADAPTORS)
def test_an_option_of_adaptors_changes_what_is_learnt(federate_nets: Any, option: str) -> None:
    method = {"name": "floral", "clusters": 2}
    assert differ(outcome(federate_nets(method)), outcome(federate_nets(method, changes=ADAPTORS[option])))


@pytest.mark.parametrize("form", [form for form in CONV_FORMS if form != "balanced-2d"])
def test_a_form_of_convolutions_is_not_the_default_one(form: Any) -> None:
    def shapes(form: Any) -> dict[str, torch.Size]:
        model = floral(nn.Conv2d(4, 6, (2, 3)), num_clusters=2, rank=1, conv=form)
        return {name: parameter.shape for name, parameter in model.named_parameters()}

    assert shapes(form) != shapes("balanced-2d")


# ---------------------------------------------------------------- options of adapters on language models

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank": {"adapters.rank": 3},
    "alpha": {"adapters.alpha": 8.0},
    "top_k": {"adapters.top_k": 1},
    "mix": {"adapters.mix": "linear"},
    "balance": {"adapters.balance": "none"},
}


@pytest.mark.parametrize("option", ADAPTERS)
def test_an_option_of_adapters_changes_what_is_learnt(federate: Any, option: str) -> None:
    method, base = {"name": "comigs", "specialists": 2, "router_every": 2, "router_steps": 1}, TINY
    found = [outcome(federate(method, base=base, changes=changes)) for changes in ({}, ADAPTERS[option])]
    assert differ(*found)


def test_both_penalties_of_experts_differ(federate: Any) -> None:
    method, base = {"name": "comigs", "specialists": 2, "router_every": 2, "router_steps": 1}, TINY
    found = [outcome(federate(method, base=base, changes={"adapters.balance": b})) for b in ("generalist", "uniform")]
    assert differ(*found)
