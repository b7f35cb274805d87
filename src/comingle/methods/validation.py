"""Checks of a method when it is made, and of what its client hooks return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import values_in
from comingle.methods.base import ROUTERS, ClientHook, Method, Phase
from comingle.models.lora import MIDDLE, RESIDUAL
from comingle.utils.errors import PluginError, RecipeError, did_you_mean, run_checks
from comingle.utils.trees import ADAPTOR, ATTENTION, BASE, GENERALIST, ROUTER, SPECIALIST, STATISTICS

ROLES: Mapping[str, tuple[str, ...]] = {
    ATTENTION: ("a", "b", MIDDLE, "body"),
    GENERALIST: ("a", "b", MIDDLE, "body", "head", "norm"),
    SPECIALIST: ("a", "b", MIDDLE, "body", "head", "norm"),
    ROUTER: ("body", "head"),
    RESIDUAL: ("body", "head"),
    BASE: ("body", "head", "norm"),
    ADAPTOR: (),
    STATISTICS: ("adaptor", "base", "own", "shared", "body", "head", "norm"),
}
"""Roles of all models, each with the suffixes that narrow it to a factor or a part."""


def defined_at(defined: Callable[..., object]) -> str:
    """Return file, line and name of a class or function, such as "near.py:12, Near"; without a file only the name."""
    name = getattr(defined, "__name__", type(defined).__name__)
    try:
        file = inspect.getsourcefile(defined)
        _lines, first_line = inspect.getsourcelines(defined)
    except (OSError, TypeError):  # built in, or from a notebook cell that no longer exists
        return name
    return f"{file}:{first_line}, {name}"


def check_method(name: str, method: Method) -> None:
    """Check that placement, phases and hooks of a method fit each other.

    Args:
        name: Name of the method, for error messages.
        method: The federated method of the run.

    Raises:
        RecipeError: A user has no expert, a role does not exist, a phase trains a router that the placement does not
            have, or nothing trains the router that it has.
    """
    fewest_specialists = min(values_in(method.placement.specialists))
    if method.placement.generalists + fewest_specialists < 1:
        raise RecipeError(f"method {name}: generalists + specialists is 0 for some user; at least 1 expert is needed")
    checks = [_role_check(f"method {name}: {field}", roles) for field, roles in _all_roles(method)]
    run_checks(*checks)
    _require_router(name, method)
    _require_trained_router(name, method)


def _all_roles(method: Method) -> Iterator[tuple[str, object]]:
    """Yield name and value of each field of a method that holds roles, for a check that all these roles exist.

    Example: ``("Placement.shared", frozenset({"attention"}))``.
    """
    placement, client = method.placement, method.client
    for key in ("shared", "received", "needs", "once"):
        yield f"Placement.{key}", getattr(placement, key)
    for place, phase in _all_phases(method):
        for key in ("roles", "leaves", "without"):
            yield f"{place}.{key}", getattr(phase, key)
    for hook in client.parts:
        yield f"{type(hook).__name__}.roles", hook.roles


def _all_phases(method: Method) -> Iterator[tuple[str, Phase]]:
    """Yield each phase of a method and its place for messages, such as "Client.phases[0]" or "Client.tuning[0]"."""
    for index, phase in enumerate(method.client.phases):
        yield f"Client.phases[{index}]", phase
    for index, phase in enumerate(method.client.tuning):
        yield f"Client.tuning[{index}]", phase


def _role_check(place: str, roles: object) -> Callable[[], None]:
    """Return a function that raises a :class:`RecipeError` unless ``roles`` is a set of roles that exist, or None.

    ``run_checks`` calls such functions and reports the errors of all together.

    Args:
        place: Field that has the roles, such as "Placement.shared", for the message.
        roles: Value of the field; None is a default.
    """

    def check() -> None:
        if roles is None:
            return
        if not isinstance(roles, set | frozenset):
            raise RecipeError(f"{place}: got {roles!r}; allowed: a set of roles, such as frozenset({{{ATTENTION!r}}})")
        for role in sorted(roles, key=str):
            _require_role(place, role)

    return check


def _require_role(place: str, role: object) -> None:
    """Check that a role exists, such as "attention", or "attention.a" for one LoRA factor.

    Args:
        place: Field that has the role, such as "Placement.shared", for the message.
        role: The role.

    Raises:
        RecipeError: The role, or its suffix, is unknown.
    """
    role_without_suffix, _dot, suffix = str(role).partition(".")  # "attention" and "a"
    if role in ROLES or suffix in ROLES.get(role_without_suffix, ()):
        return
    # After a wrong suffix only the role's own suffixes are listed, otherwise all roles.
    only_suffix_is_wrong = role_without_suffix in ROLES
    suggested = {role_without_suffix: ROLES[role_without_suffix]} if only_suffix_is_wrong else ROLES
    allowed = []
    for allowed_role, suffixes in suggested.items():
        allowed.append(allowed_role)
        allowed.extend(f"{allowed_role}.{suffix}" for suffix in suffixes)
    raise RecipeError(f"{place}: got {role!r}; allowed: {', '.join(allowed)}.{did_you_mean(str(role), allowed)}")


def _require_router(name: str, method: Method) -> None:
    """Check that the placement has a router if a phase trains one.

    Args:
        name: Name of the method, for the message.
        method: The federated method of the run.

    Raises:
        RecipeError: A phase has the role "router" and the placement has no router.
    """
    mixes_components = method.placement.mixture is not None  # with a router for each user
    if method.placement.routed or mixes_components:
        return
    for place, phase in _all_phases(method):
        if phase.roles & ROUTERS:
            raise RecipeError(
                f"method {name}: {place} trains role {ROUTER!r}, which a placement without routed=True does not have; "
                f"set Placement(routed=True), or take {ROUTER!r} out of the phase (joint(routed=False))"
            )


def _require_trained_router(name: str, method: Method) -> None:
    """Check that a phase, a hook or a download changes the router, if the placement has one.

    Args:
        name: Name of the method, for the message.
        method: The federated method of the run.

    Raises:
        RecipeError: The router would keep its random initial values.
    """
    changed_roles = {role.partition(".")[0] for role in method.client.trained | method.received}
    if method.placement.routed and method.trains and ROUTER not in changed_roles:
        raise RecipeError(
            f"method {name}: Placement.routed: got True, but nothing trains role {ROUTER!r}; allowed: a phase with the "
            f"role (joint(routed=True)), a ClientHook with roles = ROUTERS, or {ROUTER!r} in Placement.received; or "
            "take routed=True out of the placement"
        )


def require_one_penalty_per_user(
    name: str, hook: ClientHook, penalty: Tensor | float, users: int
) -> Float[Tensor, " users"] | float:
    """Return a client hook's penalty unchanged, or raise an error unless it has one value for each user, or is 0.

    Args:
        name: Name of the method, for error messages.
        hook: Part of a method that runs on clients.
        penalty: Value that the hook's ``penalty`` returned.
        users: Number of users.

    Raises:
        PluginError: The penalty is another number, or a tensor of another shape.
    """
    if isinstance(penalty, Tensor):
        if tuple(penalty.shape) == (users,):
            return penalty
        got = f"a tensor of shape {tuple(penalty.shape)}"
    else:
        if isinstance(penalty, int | float) and penalty == 0:
            return penalty
        got = repr(penalty)
    raise PluginError(
        f"method {name}: {defined_at(type(hook))}.penalty: got {got}; allowed: a tensor of shape ({users},), one value "
        "for each user, or 0.0; sum over all dimensions but the first, as in t.flatten(1).sum(1)"
    )
