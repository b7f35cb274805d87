"""What the method's server sees instead of the uploads that have arrived."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.server import Received
from comingle.privacy.clipping import without_padding
from comingle.robust import rules
from comingle.robust.settings import Aggregation
from comingle.trees import Tree


def defended(aggregation: Aggregation, received: Received, started: Tree) -> Received | None:
    """Uploads with shortened changes, or the one upload of nobody that the rule makes of all.

    ``started`` is what each of the round's users had before it trained. None where too few uploads have arrived for
    the rule: the server's model then stays as it is.
    """
    if not received.tensors:
        return received
    if not aggregation.enough(len(received.weights)):
        return None
    received = replace(received, weights=capped(received.weights))
    if aggregation.rule == "norm-bound":
        return replace(received, tensors=_bounded(aggregation, received, started))
    tensors = _combined(aggregation, received)
    return Received(
        users=[],
        tensors={name: t.to(received.tensors[name].dtype).unsqueeze(0) for name, t in tensors.items()},
        weights=torch.ones(1, dtype=torch.float64),
        ranks=received.ranks[:1],
        scales=received.scales[:1],
    )


def capped(weights: Float[Tensor, " users"]) -> Float[Tensor, " users"]:
    """No weight above the median of the round's: an amount of data can be a lie."""
    return (most := weights.clamp(max=float(weights.quantile(0.5)))) / most.sum()


def _combined(aggregation: Aggregation, received: Received) -> Tree:
    uploads, hostile = received.tensors, aggregation.hostile_among(len(received.weights))
    match aggregation.rule:
        case "median":
            return rules.coordinate_median(uploads)
        case "trimmed-mean":
            return rules.trimmed_mean(uploads, hostile)
        case "krum":
            return rules.krum(uploads, hostile)
        case "multi-krum":
            return rules.multi_krum(uploads, hostile)
        case "bulyan":
            return rules.bulyan(uploads, hostile)
        case "geometric-median":
            return rules.geometric_median(uploads, received.weights)
        case other:
            raise AssertionError(other)


def _bounded(aggregation: Aggregation, received: Received, started: Tree) -> Tree:
    """What each user had plus its shortened change; of smaller ranks without what is beyond them."""
    had = without_padding(started, received.ranks)
    changes = {name: t.double() - had[name].double() for name, t in received.tensors.items()}
    shortened = rules.norm_bound(changes, None if isinstance(aggregation.bound, str) else aggregation.bound)
    return {name: (had[name].double() + t).to(received.tensors[name].dtype) for name, t in shortened.items()}
