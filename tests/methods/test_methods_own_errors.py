"""Exceptions in a user's own methods are one line that names the place; those of other code stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import comingle
from comingle.methods import base
from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import Mean, Received, Server, ServerSetup
from comingle.utils.errors import PluginError
from comingle.utils.trees import Tree

USERS = {name: torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1)) for name in "ab"}
RECIPE: dict[str, Any] = {"training": {"rounds": 2, "batch_size": 8}, "data": {"loss": "mse"}}


def mine(*, parts: Sequence[ClientHook] = (), server: Server | None = None) -> Method:
    client = Client(phases=joint(routed=False), parts=tuple(parts))
    return Method(name="mine", placement=Placement(shared=MODEL), client=client, server=server or Mean())


def run(method: Any, **how: Any) -> Any:
    return comingle.run(RECIPE, users=USERS, base=lambda: torch.nn.Linear(3, 1), method=method, **how)


def line_of(text: str) -> int:
    """The first line of this file that ends with a text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


class Begins(ClientHook):
    def begin(self, cohort: Cohort) -> None:
        {}["begun"]  # begin


class Corrects(ClientHook):
    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        for gradient in gradients.values():
            gradient.copy_(torch.zeros(7, 7, 7))  # correct


class Punishes(ClientHook):
    def penalty(self, tensors: Tree, ranks: Any) -> Any:
        return 1 / 0  # penalty


class Starts(ClientHook):
    def start(self, names: Sequence[str], seed: int) -> Tree:
        raise StopIteration  # start


class Helps(ClientHook):
    def end(self, cohort: Cohort) -> None:
        help_out(cohort)


def help_out(cohort: Cohort) -> None:
    raise RuntimeError("two\nlines")  # help


@dataclass(frozen=True, kw_only=True)
class Aggregates(Mean):
    def aggregate(self, kept: Tree, received: Received) -> None:
        received.tensors["no such tensor"]  # aggregate


@dataclass(frozen=True, kw_only=True)
class Sets(Mean):
    def start(self, setup: ServerSetup) -> Tree:
        assert len(setup.users) > 5, "five users"  # set up
        return super().start(setup)


@dataclass(frozen=True, kw_only=True)
class Weighs(Mean):
    def coefficients(self, received: Received) -> Tree:
        return {name: torch.ones(9) for name in received.tensors}  # comingle fails on it


@pytest.mark.parametrize(
    ("method", "mark", "said"),
    [
        (mine(parts=[Begins()]), "# begin", "in Begins.begin: KeyError: 'begun'"),
        (mine(parts=[Corrects()]), "# correct", "in Corrects.correct: RuntimeError: "),
        (mine(parts=[Punishes()]), "# penalty", "in Punishes.penalty: ZeroDivisionError: "),
        (mine(parts=[Starts()]), "# start", "in Starts.start: StopIteration; "),
        (mine(parts=[Helps()]), "# help", "in help_out: RuntimeError: two lines"),
        (mine(server=Aggregates()), "# aggregate", "in Aggregates.aggregate: KeyError: 'no such tensor'"),
        (mine(server=Sets()), "# set up", "in Sets.start: AssertionError: five users"),
    ],
)
def test_an_exception_in_a_hook_is_one_line_with_its_place(method: Method, mark: str, said: str) -> None:
    with pytest.raises(PluginError) as caught:
        run(method)
    message = str(caught.value)
    assert message.startswith(f"method mine: {__file__}:{line_of(mark)}, {said}")
    assert "\n" not in message
    assert caught.value.__cause__ is not None


def test_what_comingle_cannot_use_names_the_class() -> None:
    with pytest.raises(PluginError, match=r"^method mine: \S+test_methods_own_errors.py:\d+, Weighs: RuntimeError: "):
        run(mine(server=Weighs()))


def test_a_report_that_is_none_names_the_class() -> None:
    class Silent(ClientHook):
        def report(self, cohort: Cohort) -> Any:
            return None

    with pytest.raises(PluginError, match=r"^method mine: \S+:\d+, Silent .*, used at \S+:\d+"):
        run(mine(parts=[Silent()]))


@pytest.mark.parametrize(
    ("penalty", "got"),
    [
        (lambda t: t.square().sum(), "a tensor of shape ()"),
        (lambda t: t.square().flatten(1).sum(1, keepdim=True), "a tensor of shape (2, 1)"),
        (lambda t: float(t.detach().square().sum() + 1), ""),
    ],
)
def test_a_penalty_that_is_not_by_user_is_refused(penalty: Any, got: str) -> None:
    class Sums(ClientHook):
        def penalty(self, tensors: Tree, ranks: Any) -> Any:
            return penalty(next(iter(tensors.values())))

    with pytest.raises(PluginError, match=r"^method mine: \S+:\d+, Sums\.penalty: got .*; allowed: .*\(2,\)") as caught:
        run(mine(parts=[Sums()]))
    assert got in str(caught.value)


def test_a_penalty_by_user_or_zero_is_allowed() -> None:
    class Nothing(ClientHook):
        def penalty(self, tensors: Tree, ranks: Any) -> Any:
            return 0

    class Each(ClientHook):
        def penalty(self, tensors: Tree, ranks: Any) -> Any:
            return 0.0 * next(iter(tensors.values())).flatten(1).sum(1)

    plain = run(mine()).metrics["users"]
    assert run(mine(parts=[Nothing(), Each()])).metrics["users"] == plain


@pytest.mark.parametrize(("read", "flag"), [("began", "looks_back"), ("exchanged", "looks_across")])
def test_tensors_that_no_hook_asked_for_name_the_flag_to_set(read: str, flag: str) -> None:
    class Reads(ClientHook):
        def correct(self, cohort: Cohort, gradients: Tree) -> None:
            getattr(cohort, read)  # read

    said = rf"^method mine: \S+:{line_of('# read')}, in \S*Reads.correct: .*Cohort\.{read}: .*set {flag} = True"
    with pytest.raises(PluginError, match=said):
        run(mine(parts=[Reads()]))

    class Late(ClientHook):
        def received(self, cohort: Cohort) -> None:
            getattr(cohort, read)

    setattr(Late, flag, True)
    with pytest.raises(PluginError, match=rf"in \S*Late.received: .*Cohort\.{read}: .* end of a ClientHook"):
        run(mine(parts=[Late()]))


def test_a_reset_without_its_flag_names_it() -> None:
    class Restarts(ClientHook):
        def begin(self, cohort: Cohort) -> None:
            cohort.reset(MODEL)

    with pytest.raises(PluginError, match=r"in \S*Restarts.begin: .*Cohort\.reset: .*set resets = True"):
        run(mine(parts=[Restarts()]))


def test_components_without_a_mixture_are_refused_with_the_field_to_set() -> None:
    class Compares(ClientHook):
        def begin(self, cohort: Cohort) -> None:
            cohort.component_losses()

    with pytest.raises(PluginError, match=r"in \S*Compares.begin: .*Cohort\.component_losses: .*Placement\.mixture"):
        run(mine(parts=[Compares()]))


def test_constructors_too() -> None:
    def mine(*, size: int = 3) -> Method:
        raise ValueError(f"size {size}")  # construct

    with pytest.raises(PluginError) as caught:
        run({"name": mine, "size": 4})
    place = f"{__file__}:{line_of('# construct')}, in test_constructors_too.<locals>.mine"
    assert str(caught.value).startswith(f"method mine: {place}: ValueError: size 3")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"client": None}, "client is NoneType; .* Client "),
        ({"server": Mean}, "server is .* Mean; .* Server "),
        ({"client": Client(parts=(Begins,))}, "client.parts .*<class .*ClientHook"),  # type: ignore[arg-type]
    ],
)
def test_a_method_of_wrong_parts_says_which(parts: dict[str, Any], said: str) -> None:
    def wrong() -> Method:
        whole = {"placement": Placement(shared=MODEL), "client": Client(), "server": Mean()}
        return Method(name="wrong", **{**whole, **parts})

    with pytest.raises(PluginError, match=said) as caught:
        run(wrong)
    assert __file__ in str(caught.value)


def test_other_exceptions_stay_as_they_are() -> None:
    class StoppedError(Exception):
        """A user's own."""

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            raise StoppedError

    with pytest.raises(StoppedError):
        run(mine(parts=[ClientHook()]), observers=[stop])
    with pytest.raises(StoppedError):
        run(mine(server=LongMean()), observers=[stop])


@dataclass(frozen=True, kw_only=True)
class LongMean(Mean):
    """A strategy of the user's that works."""


def test_the_old_name_of_a_client_hook_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"base\.Part .*ClientHook"):
        assert base.Part is ClientHook


def test_the_old_flag_of_a_client_hook_warns() -> None:
    with pytest.warns(DeprecationWarning, match="forgets .*only_resets_moments"):

        class Old(ClientHook):
            forgets = True

    assert Old.only_resets_moments
    assert not ClientHook.only_resets_moments


def test_the_old_name_of_resetting_moments_warns() -> None:
    calls: list[frozenset[str]] = []

    class Recorded(base.Cohort):
        def reset_moments(self, roles: frozenset[str]) -> None:
            calls.append(roles)

    Recorded.__abstractmethods__ = frozenset()
    with pytest.warns(DeprecationWarning, match="forget .*reset_moments"):
        Recorded().forget(frozenset({"router"}))  # type: ignore[abstract]
    assert calls == [frozenset({"router"})]
