"""What a method's settings may be is said by the annotations of the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.base import MODEL, ROUTERS, Client, ClientHook, Method, Phase, Placement, alternating, joint
from comingle.methods.baselines import fedavg
from comingle.methods.server import Mean
from comingle.methods.settings import Range, allowed_values
from comingle.utils.errors import RecipeError
from comingle.utils.trees import ATTENTION, ROUTER


def mine(
    *,
    share: Annotated[float, Range(least=0, most=1, below=True)] = 0.5,
    rate: Annotated[float, Range(least=0, above=True)] = 1.0,
    steps: Annotated[int, Range(least=2, most=5)] = 3,
    side: Literal["left", "right"] = "left",
    bold: bool = False,
    word: str = "a",
    many: int = 1,
    loose=7,  # type: ignore[no-untyped-def]
) -> Method:
    """A method of another package."""
    return fedavg()


WRONG = {
    "share": (1.0, "numbers from 0, below 1"),
    "rate": (0, "numbers above 0, up to 1e+38"),
    "steps": (6, "whole numbers from 2 to 5"),
    "side": ("up", "left, right"),
    "bold": (1, "true, false"),
    "word": (3, "text"),
    "many": (True, "whole numbers"),
    "loose": (0.5, "whole numbers"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_setting_out_of_range_is_refused_in_one_line(key: str) -> None:
    value, words = WRONG[key]
    with pytest.raises(RecipeError) as error:
        make(mine, **{key: value})
    assert str(error.value) == f"method mine: {key} is {value!r}; allowed: {words}"


def test_settings_in_their_ranges_are_taken() -> None:
    right: dict[str, Any] = {
        "share": 0,
        "rate": 1e-9,
        "steps": 5,
        "side": "right",
        "bold": True,
        "word": "",
        "many": -1,
    }
    assert make(mine, **right).name == "fedavg"


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_setting_has_a_range_that_its_default_lies_in(name: str) -> None:
    ranges = allowed_values(REGISTRY[name])
    for key, default in settings_of(name).items():
        words, fits = ranges[key]
        assert fits(default), (name, key)
        assert words not in ("anything", "numbers", "whole numbers", "text"), (name, key)


@pytest.mark.parametrize(
    ("client", "place"),
    [
        (Client(phases=joint(routed=True)), "Client.phases[0]"),
        (Client(phases=alternating("valid", 30, 1, accumulate=False)), "Client.phases[1]"),
        (Client(phases=joint(routed=False), finetunes=True, tuning=joint(routed=True)), "Client.tuning[0]"),
    ],
)
def test_a_phase_that_trains_a_router_needs_one_in_the_placement(client: Client, place: str) -> None:
    method = Method(name="near", placement=Placement(specialists=1, shared=MODEL), client=client, server=Mean())
    for made in (method, lambda: method):
        with pytest.raises(RecipeError, match=r"Placement\(routed=True\)") as caught:
            make(made)
        assert place in str(caught.value)
    routed = replace(method, placement=replace(method.placement, routed=True))
    assert make(routed) == routed


@pytest.mark.parametrize(
    ("role", "near"),
    [("attenton", "attention"), ("generalists", "generalist"), ("base.hed", "base.head"), ("attention.norm", "")],
)
def test_an_unknown_role_is_refused_wherever_a_method_names_roles(role: str, near: str) -> None:
    @dataclass(frozen=True)
    class Trains(ClientHook):
        roles = frozenset({role})

    right = Method(
        name="near", placement=Placement(shared=MODEL), client=Client(phases=joint(routed=False)), server=Mean()
    )
    roles, placement, client = frozenset({ATTENTION, role}), right.placement, right.client
    (phase,) = client.phases
    wrong = {
        "Client.tuning[0].roles": replace(right, client=replace(client, tuning=(Phase(roles=roles),))),
        "Trains.roles": replace(right, client=replace(client, parts=(Trains(),))),
    }
    for key in ("shared", "received", "needs"):
        wrong[f"Placement.{key}"] = replace(right, placement=replace(placement, **{key: roles}))
    for key in ("roles", "leaves", "without"):
        phases: Any = (replace(phase, **{key: roles}),)
        wrong[f"Client.phases[0].{key}"] = replace(right, client=replace(client, phases=phases))
    for place, method in wrong.items():
        with pytest.raises(RecipeError) as caught:
            make(method)
        message = str(caught.value)
        assert message.startswith(f"method near: {place}: got {role!r};"), message
        assert (f"Did you mean {near!r}?" in message) == bool(near), message
        assert "attention.a" in message or role.startswith("base"), message


def test_roles_that_are_no_set_are_refused() -> None:
    placement = Placement()
    object.__setattr__(placement, "shared", "attention")
    method = Method(name="near", placement=placement, client=Client(), server=Mean())
    with pytest.raises(RecipeError, match=r"Placement\.shared: got 'attention'; allowed: a set"):
        make(method)


def test_a_router_that_nothing_trains_is_refused() -> None:
    @dataclass(frozen=True)
    class Sets(ClientHook):
        roles = ROUTERS

    placement = Placement(specialists=1, routed=True, shared=frozenset({ATTENTION}))
    client = Client(phases=joint(routed=False))
    method = Method(name="near", placement=placement, client=client, server=Mean())
    with pytest.raises(RecipeError, match=r"method near: Placement\.routed: got True, .*joint\(routed=True\)"):
        make(method)
    by_server = replace(placement, received=frozenset({ATTENTION, ROUTER}))
    for right in (
        replace(method, client=replace(client, phases=joint(routed=True))),
        replace(method, client=replace(client, parts=(Sets(),))),
        replace(method, placement=by_server),
        replace(method, client=Client()),
    ):
        assert make(right) is right
