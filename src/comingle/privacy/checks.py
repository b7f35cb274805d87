"""Which methods and settings a mechanism applies to; the others are refused with the reason."""

from __future__ import annotations

from comingle.config.settings import Privacy
from comingle.methods.base import Method, Part, Phase
from comingle.utils.errors import RecipeError
from comingle.utils.trees import STATISTICS, Layout


def check_private(method: Method, privacy: Privacy, *, weighting: str, select: str, uploads: str = "float32") -> None:
    """Whether what the method's users send can be covered.

    Raises:
        RecipeError: it cannot; says why.
    """
    if privacy.secure_aggregation is not None:
        _check_summed(method, privacy, uploads)
    if not privacy.noisy:
        _check_quiet(privacy)
    elif privacy.noise_multiplier is None and privacy.epsilon is None:
        raise RecipeError("privacy: says nothing of the noise; give noise_multiplier, or epsilon for the whole run")
    if method.placement.pooled:
        raise RecipeError(f"privacy: method {method.name} pools everybody's data, which no noise on uploads covers")
    if not method.shared:
        return
    if why := _uncovered(method) or _not_for(method, privacy):
        raise RecipeError(f"privacy: method {method.name}: {why}")
    if select == "best":
        raise RecipeError("privacy: evaluation.select: best has users report validation losses, which have no noise")
    if privacy.of_examples:
        _check_examples(privacy, weighting)
    if weighting != "uniform" and privacy.weight_cap is None:
        raise RecipeError(
            f"privacy.weight_cap: missing; with training.weighting: {weighting} it says from how much data on a user "
            "has the full weight, as no weight may depend on other users' amounts"
        )
    if weighting == "uniform" and privacy.weight_cap is not None:
        raise RecipeError("privacy.weight_cap: is not read where training.weighting is uniform")
    if privacy.adaptive and privacy.mechanism != "central":
        raise RecipeError(
            f"privacy.clip_norm: adaptive needs a server that counts; allowed with {privacy.mechanism}: a number"
        )


def check_steps(privacy: Privacy, *, clip_norm: float | None, train_on_valid: bool, dtype: str) -> None:
    """Whether users' steps hide single examples, where that is asked for.

    Raises:
        RecipeError: they would not; says why.
    """
    if not privacy.of_examples:
        return
    if clip_norm is not None:
        raise RecipeError(
            f"training.experts.clip_norm: got {clip_norm:g}; with privacy.mechanism: example one norm of noised and "
            "plain gradients would let the plain ones into what is sent; allowed: null (privacy.clip_norm clips)"
        )
    if train_on_valid:
        raise RecipeError(
            "data.train_on_valid: with privacy.mechanism: example validation text is for routers, which have no noise; "
            "allowed: false"
        )
    if dtype == "float16":
        raise RecipeError(
            "runtime.dtype: got 'float16'; with privacy.mechanism: example gradients of single examples would overflow "
            "or vanish before they are clipped; allowed: auto, bfloat16, float32, float64"
        )


def sharing(method: Method) -> list[Phase]:
    """The phases that train something that is sent."""
    shared = {role.partition(".")[0] for role in method.shared}
    return [phase for phase in method.client.phases if shared & {role.partition(".")[0] for role in phase.roles}]


def check_delta(privacy: Privacy, name: str, examples: int) -> None:
    """Whether delta means something for so many examples of a user.

    Raises:
        RecipeError: it would allow one of them to be published.
    """
    if privacy.delta * examples >= 1:
        raise RecipeError(
            f"privacy.delta: got {privacy.delta:g} for {examples:,} examples of user {name!r}; allowed: below "
            f"1/{examples}, as with that chance an example may be revealed whole"
        )


def check_population(privacy: Privacy, users: int) -> None:
    """Whether delta means something for so many users.

    Raises:
        RecipeError: it would allow one of them to be published.
    """
    if privacy.delta * users >= 1:
        raise RecipeError(
            f"privacy.delta: got {privacy.delta:g} for {users} users; allowed: below 1/{users}, as with that chance a "
            "user may be revealed whole"
        )


def check_layout(method: Method, layout: Layout) -> None:
    """Whether noise can be added to what is shared.

    Raises:
        RecipeError: running variances are, which noise would make negative.
    """
    shared = [slot.name for slot in layout.slots if STATISTICS in slot.roles and any(slot.chosen(method.shared))]
    if shared:
        raise RecipeError(
            f"privacy: method {method.name} shares running statistics of batch norm ({shared[0]}, ...), which noise "
            "would make negative; allowed: a net with group norm, as net:resnet9-group"
        )


def _check_summed(method: Method, privacy: Privacy, uploads: str) -> None:
    """Whether all that the server needs is a sum. Whatever else looks at single uploads is to be refused here."""
    where, secure = "privacy.secure_aggregation", privacy.secure_aggregation
    assert secure is not None
    if method.shared and method.server.kind != "sum":
        raise RecipeError(
            f"{where}: method {method.name}: its server ({type(method.server).__name__}) looks at each upload by "
            "itself, and would see their sum alone"
        )
    if privacy.mechanism in ("local", "example"):
        raise RecipeError(
            f"{where}: not with mechanism: {privacy.mechanism}, whose noise hides each upload; allowed: central, none"
        )
    if privacy.adaptive:
        raise RecipeError(f"{where}: not with clip_norm: adaptive, for which each user says whether it was within")
    if uploads != "float32":
        raise RecipeError(
            f"{where}: has a format of its own (bits); training.uploads: got {uploads!r}; allowed: float32"
        )
    if privacy.noisy and secure.range is not None:
        raise RecipeError(f"{where}.range: is not read with noise, where it follows from privacy.clip_norm")


def _check_quiet(privacy: Privacy) -> None:
    """Without noise nothing is read of it, and sums are all that is asked for."""
    if privacy.secure_aggregation is None:
        raise RecipeError("privacy.mechanism: none needs secure_aggregation; by itself it hides nothing")
    if privacy.noise_multiplier is not None or privacy.epsilon is not None:
        raise RecipeError("privacy.mechanism: none has no noise; noise_multiplier and epsilon are not read")


def _uncovered(method: Method) -> str:
    """What of a user's data would leave besides clipped tensors, with either mechanism."""
    parts = method.client.parts
    if reported := sorted(name for part in parts for name in part.reports):
        return f"its users report {', '.join(reported)} with each upload, which clipping and noise do not cover"
    if method.server.peer_to_peer or any(type(part).receive is not Part.receive for part in parts):
        return "its users make a model of what they download with data of their own, against which no change is bounded"
    if method.shared - method.received:
        return "its users go on from what they have, not from what they download, and so no change of it is bounded"
    if any(part.resizes for part in parts):
        return "ranks change with users' data and are seen by all; allowed: prune: false"
    return ""


def _not_for(method: Method, privacy: Privacy) -> str:
    """What else the mechanism asks for."""
    if privacy.of_examples:
        return _entangled(method)
    return _unbounded(method) if privacy.mechanism != "local" else ""


def _check_examples(privacy: Privacy, weighting: str) -> None:
    """Settings that are not read, or not covered, where single examples are hidden."""
    if weighting != "uniform" or privacy.weight_cap is not None:
        raise RecipeError(
            "training.weighting: with privacy.mechanism: example all users weigh the same, and no amounts of data are "
            "sent; allowed: uniform, without privacy.weight_cap"
        )


_HOOKS = ("received", "begin", "stepped", "end", "penalty")
"""What a part may do in a round besides its phases, and may read data for."""


def _entangled(method: Method) -> str:
    """Why what is sent would be more than a function of noised gradients."""
    client, trained = method.client, method.client.trained
    if method.placement.mixture is not None:
        return "the shares by which users mix components are trained without noise, and weigh every gradient"
    if split := sorted(r for r in method.shared if (role := r.partition(".")[0]) != r and role in trained):
        return (
            f"it shares {', '.join(split)} alone, whose gradients follow from the other factor, which stays with its "
            "user and has no noise"
        )
    for phase in sharing(method):
        if phase.stream != "train":
            return (
                f"it trains {', '.join(sorted(phase.roles & method.shared))} on validation data, which is not counted"
            )
    if method.placement.residual is not None:
        return "its server changes frozen weights, which are no part of the model whose noised gradients are sent"
    if any(phase.turns > 1 for phase in client.phases):
        return "its phases take turns of rounds, and the account counts the same steps in every round"
    if client.accumulates:
        return (
            "gradients that routers' steps leave to shared experts have no noise; allowed: accumulate_gradients: false"
        )
    for part in client.parts:
        looks = part.sweeps or bool(part.before) or (part.validates and not part.finishes)
        hooks = [hook for hook in _HOOKS if not (hook == "begin" and part.forgets)]
        if looks or any(getattr(type(part), hook) is not getattr(Part, hook) for hook in hooks):
            return f"{type(part).__name__} changes what users have by more than steps on noised gradients"
    return ""


def _unbounded(method: Method) -> str:
    """Why one user could change what the server publishes by more than its clipped change."""
    if method.server.clipped_mean:
        return ""
    return (
        f"what its server ({type(method.server).__name__}) publishes is no mean whose weights no upload decides "
        "on, so clipping bounds nobody's influence; allowed: mechanism: local"
    )
