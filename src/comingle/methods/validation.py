"""Checks of a method when it is made, and of what its client hooks return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import values_in
from comingle.methods.base import ROUTERS, ClientHook, Method
from comingle.models.lora import RESIDUAL
from comingle.utils.errors import PluginError, RecipeError, did_you_mean, run_checks
from comingle.utils.trees import ADAPTOR, ATTENTION, BASE, GENERALIST, ROUTER, SPECIALIST, STATISTICS

ROLES: Mapping[str, tuple[str, ...]] = {
    ATTENTION: ("a", "b", "body"),
    GENERALIST: ("a", "b", "body", "head", "norm"),
    SPECIALIST: ("a", "b", "body", "head", "norm"),
    ROUTER: ("body", "head"),
    RESIDUAL: ("body", "head"),
    BASE: ("body", "head", "norm"),
    ADAPTOR: (),
    STATISTICS: ("adaptor", "base", "own", "shared", "body", "head", "norm"),
}
"""Roles of all models, each with the suffixes that narrow it to a factor or a part."""


def defined_at(defined: Callable[..., object]) -> str:
    """Return file, line and name of a class or function."""
    name = getattr(defined, "__name__", type(defined).__name__)
    try:
        return f"{inspect.getsourcefile(defined)}:{inspect.getsourcelines(defined)[1]}, {name}"
    except (OSError, TypeError):  # built in, or from a notebook cell that no longer exists
        return name


def check_method(name: str, method: Method) -> None:
    """Check that placement, phases and hooks of a method fit each other.

    Args:
        name: Name of the method, for messages.
        method: The method.

    Raises:
        RecipeError: A user has no expert, a role does not exist, a phase trains a router that the placement does not
            have, or nothing trains the router that it has.
    """
    if method.placement.generalists + min(values_in(method.placement.specialists)) < 1:
        raise RecipeError(f"method {name}: generalists + specialists is 0 for some user; at least 1 expert is needed")
    run_checks(*(_role_check(f"method {name}: {place}", roles) for place, roles in _all_roles(method)))
    _require_router(name, method)
    _require_trained_router(name, method)


def _all_roles(method: Method) -> Iterator[tuple[str, object]]:
    """Yield all sets of roles in a method's definition: the field's name, such as "Placement.shared", and the set.

    Roles name parts of a model, such as "attention" or "router". Error messages use the field's name.
    """
    placement, client = method.placement, method.client
    for key in ("shared", "received", "needs"):
        yield f"Placement.{key}", getattr(placement, key)
    for kind, phases in (("phases", client.phases), ("tuning", client.tuning)):
        for number, phase in enumerate(phases):
            for key in ("roles", "leaves", "without"):
                yield f"Client.{kind}[{number}].{key}", getattr(phase, key)
    for hook in client.parts:
        yield f"{type(hook).__name__}.roles", hook.roles


def _role_check(place: str, roles: object) -> Callable[[], None]:
    """Return a function that checks whether all roles of a set exist.

    Args:
        place: Where the method names the roles, such as "Placement.shared", for the message.
        roles: The set. None stands for a default, which needs no check.

    Returns:
        A function that raises a :class:`RecipeError` if the value is no set, or has an unknown role.
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
        place: Where the role is named, for the message.
        role: The role.

    Raises:
        RecipeError: The role, or the suffix that narrows it, is unknown; the message lists the nearest allowed ones.
    """
    plain, _, suffix = str(role).partition(".")
    if role in ROLES or (plain in ROLES and suffix in ROLES[plain]):
        return
    candidates = {plain: ROLES[plain]} if plain in ROLES else ROLES
    known = []
    for each, suffixes in candidates.items():
        known += [each, *(f"{each}.{suffix}" for suffix in suffixes)]
    raise RecipeError(f"{place}: got {role!r}; allowed: {', '.join(known)}.{did_you_mean(str(role), known)}")


def _require_router(name: str, method: Method) -> None:
    """Check that the placement has a router if a phase trains one.

    Args:
        name: Name of the method, for the message.
        method: The method.

    Raises:
        RecipeError: A phase has the role "router" and the placement has no router.
    """
    if method.placement.routed or method.placement.mixture is not None:  # a mixture has a router for each user
        return
    for kind, phases in (("phases", method.client.phases), ("tuning", method.client.tuning)):
        for number, phase in enumerate(phases):
            if phase.roles & ROUTERS:
                raise RecipeError(
                    f"method {name}: Client.{kind}[{number}] trains role {ROUTER!r}, which a placement without "
                    f"routed=True does not have; set Placement(routed=True), or take {ROUTER!r} out of the phase "
                    "(joint(routed=False))"
                )


def _require_trained_router(name: str, method: Method) -> None:
    """Check that a phase, a hook or the server changes the router that the placement has.

    Args:
        name: Name of the method, for the message.
        method: The method.

    Raises:
        RecipeError: The router would keep its random initial values.
    """
    changed = {role.partition(".")[0] for role in method.client.trained | method.received}
    if method.placement.routed and method.trains and ROUTER not in changed:
        raise RecipeError(
            f"method {name}: Placement.routed: got True, but nothing trains role {ROUTER!r}; allowed: a phase with the "
            f"role (joint(routed=True)), a ClientHook with roles = ROUTERS, or {ROUTER!r} in Placement.received; or "
            "take routed=True out of the placement"
        )


def require_per_user(
    name: str, hook: ClientHook, penalty: Tensor | float, users: int
) -> Float[Tensor, " users"] | float:
    """Return the penalty of a client hook if it has one value for each user, or is 0.

    Args:
        name: Name of the method, for messages.
        hook: The hook.
        penalty: What its ``penalty`` returned.
        users: Number of users in the pass.

    Raises:
        PluginError: The penalty is another number, or a tensor of another shape.
    """
    if (isinstance(penalty, Tensor) and tuple(penalty.shape) == (users,)) or (
        isinstance(penalty, int | float) and penalty == 0
    ):
        return penalty
    got = f"a tensor of shape {tuple(penalty.shape)}" if isinstance(penalty, Tensor) else repr(penalty)
    raise PluginError(
        f"method {name}: {defined_at(type(hook))}.penalty: got {got}; allowed: a tensor of shape ({users},), one value "
        "for each user, or 0.0; sum over all dimensions but the first, as in t.flatten(1).sum(1)"
    )
