"""Which methods and settings a mechanism applies to; the others are refused with the reason."""

from __future__ import annotations

from comingle.errors import RecipeError
from comingle.methods.base import Method
from comingle.methods.client import Part
from comingle.privacy.settings import Privacy
from comingle.trees import STATISTICS, Layout


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
    if why := _uncovered(method) or (_unbounded(method) if privacy.mechanism != "local" else ""):
        raise RecipeError(f"privacy: method {method.name}: {why}")
    if select == "best":
        raise RecipeError("privacy: evaluation.select: best has users report validation losses, which have no noise")
    if weighting != "uniform" and privacy.weight_cap is None:
        raise RecipeError(
            f"privacy.weight_cap: missing; with training.weighting: {weighting} it says from how much data on a user "
            "has the full weight, as no weight may depend on other users' amounts"
        )
    if weighting == "uniform" and privacy.weight_cap is not None:
        raise RecipeError("privacy.weight_cap: is not read where training.weighting is uniform")
    if privacy.adaptive and privacy.mechanism == "local":
        raise RecipeError("privacy.clip_norm: adaptive needs a server that counts; allowed with local: a number")


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
    if privacy.mechanism == "local":
        raise RecipeError(f"{where}: not with mechanism: local, whose noise hides each upload; allowed: central, none")
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


def _unbounded(method: Method) -> str:
    """Why one user could change what the server publishes by more than its clipped change."""
    if method.server.clipped_mean:
        return ""
    return (
        f"what its server ({type(method.server).__name__}) publishes is no mean whose weights no upload decides "
        "on, so clipping bounds nobody's influence; allowed: mechanism: local"
    )
