"""The laws hold for the whole registry: every method with its defaults, and mixtures of unequal users."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.base import Method
from comingle.methods.server import Mean, Server
from comingle.training.backends.local import InProcess

Federate = Callable[..., InProcess]

ROUTER_EVERY, ROUTER_STEPS = 3, 2


def _with_short_period(name: str, **settings: Any) -> dict[str, Any]:
    period = {"router_every": ROUTER_EVERY, "router_steps": ROUTER_STEPS}
    return {"name": name, **{key: value for key, value in period.items() if key in settings_of(name)}, **settings}


METHODS = {name: make(name) for name in REGISTRY}

CASES = {
    **{
        name: _with_short_period(name)
        for name, made in METHODS.items()
        if "language" in made.applies_to and not made.needs_clusters
    },
    "ifca": {"name": "ifca", "models": 2},
    "fedamole": {"name": "fedamole", "experts": 3, "choices": 2, "most": 3},
    "comigs, specialists 0 1 2": _with_short_period("comigs", specialists=[0, 1, 2]),
    "comigs, 1 expert": _with_short_period("comigs", specialists=0),
    "comigs, gradients accumulated": _with_short_period("comigs", specialists=[0, 1, 2], accumulate_gradients=True),
    "floral, stateless": {"name": "floral", "stateless": True, "warmup_steps": 2},
    "comigs, 3 generalists": _with_short_period("comigs", generalists=3, specialists=0),
}

FEW = {"clusters": 2, "models": 2}
"""In place of defaults that are more than a few users need."""

NETS = {
    **{
        name: {"name": name, **{key: few for key, few in FEW.items() if key in settings_of(name)}}
        for name, made in METHODS.items()
        if "nets" in made.applies_to and made.trains and not made.placement.pooled
    },
    "floral, stateless": {"name": "floral", "clusters": 2, "stateless": True, "warmup_steps": 2},
    "floral, with noise": {"name": "floral", "clusters": 2, "noise": 0.5},
    "floral, per layer": {"name": "floral", "clusters": 2, "per_layer": True, "noise": 0.2},
    "floral, centred": {"name": "floral", "clusters": 2, "centre": True},
    "fedmerge": {"name": "fedmerge", "models": 3},
    "fedmerge, eq. 5, proximal, unconstrained": {
        "name": "fedmerge",
        "models": 2,
        "softmax": False,
        "column_normalize": False,
        "models_first": False,
        "inner_product_keys": "all",
        "proximal": 0.01,
        "weight_step": 0.01,  # the default diverges without softmax, as its documentation says
    },
    "fedmerge-fixed": {"name": "fedmerge-fixed", "models": 3, "chosen": 2},
    "momentum-clustering": {"name": "momentum-clustering", "clusters": 2, "quantile": 0.5},
    "floral, the public code's rates": {"name": "floral", "clusters": 2, "adaptor_server_rate": 0.1},
}
"""Methods on small nets that are trained whole."""


@pytest.fixture(scope="session")
def federate(federate: Federate) -> Federate:
    """As elsewhere, on a base of one narrow layer: what laws say of users, methods and servers needs no more."""
    return partial(federate, base="random:llama?layers=1&dim=32")


def has_router_phase(method: Method) -> bool:
    """Whether routers have a phase of their own."""
    return any(phase.optimizer == "router" for phase in method.client.phases)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``method`` by all cases, ``federated`` by those where users train, others by what their names say."""
    for argument, cases in _cases().items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, list(cases.values()), ids=list(cases))


@cache
def _cases() -> dict[str, dict[str, Any]]:
    """Return the cases of each argument that tests are parametrized by."""
    methods = {
        name: make(case["name"], **{k: v for k, v in case.items() if k != "name"}) for name, case in CASES.items()
    }
    # Client-level mixtures have no experts, which some laws are about; "federated" laws hold for them too.
    routed = {name: method for name, method in methods.items() if method.placement.mixture is None}
    chosen = {
        "method": list(routed),
        "trained": [name for name, method in routed.items() if method.client.phases],
        "federated": [name for name, method in methods.items() if method.client.phases and not method.placement.pooled],
        "averaged": [
            n
            for n, m in routed.items()
            if m.client.phases and not m.placement.pooled and type(m.server) in (Server, Mean)
        ],
        "netted": list(NETS),
        "normless": [n for n, case in NETS.items() if not make(case["name"]).placement.needs],
        "alternating": [n for n, m in methods.items() if has_router_phase(m) and not m.client.accumulates],
    }
    nets = ("netted", "normless")
    return {
        argument: {name: (NETS if argument in nets else CASES)[name] for name in names}
        for argument, names in chosen.items()
    }
