"""What the method's server sees instead of the uploads that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import Aggregation
from comingle.methods.server import Received
from comingle.privacy.clipping import norms, without_padding
from comingle.robust import rules
from comingle.robust.judged import Judged
from comingle.utils.trees import Tree

_DIGITS = 4
"""Of what events say; what counts a little is not said to count nothing."""


def defended(
    aggregation: Aggregation, received: Received, started: Tree, names: Sequence[str]
) -> tuple[Received | None, Judged]:
    """Uploads with shortened changes, or the one upload of nobody that the rule makes of all; and whose counted.

    ``started`` is what each of the round's users had before it trained, ``names`` are theirs. None where too few
    uploads have arrived for the rule: the server's model then stays as it is.
    """
    rule = aggregation.rule
    if not aggregation.enough(len(received.weights)):
        return None, Judged(rule=rule, reason=f"{len(names)} uploads are too few for {rule}: nothing changes")
    received = replace(received, weights=capped(received.weights))
    if rule == "norm-bound":
        tensors, counted = _bounded(aggregation, received, started)
        made = replace(received, tensors=tensors)
    else:
        combined = _combined(aggregation, received)
        made, counted = _of_all(received, combined.tensors), combined.counted
    shares = [round(share, _DIGITS) or min(share, 10.0**-_DIGITS) for share in counted.tolist()]
    return made, Judged(rule=rule, counted=dict(zip(names, shares, strict=True)))


def _of_all(received: Received, tensors: Tree) -> Received:
    """The one upload of nobody."""
    return Received(
        users=[],
        tensors={name: t.to(received.tensors[name].dtype).unsqueeze(0) for name, t in tensors.items()},
        weights=torch.ones(1, dtype=torch.float64),
        ranks=received.ranks[:1],
        scales=received.scales[:1],
        roles=received.roles,
    )


def capped(weights: Float[Tensor, " users"]) -> Float[Tensor, " users"]:
    """No weight above the median of the round's: an amount of data can be a lie."""
    return (most := weights.clamp(max=float(weights.quantile(0.5)))) / most.sum()


def _combined(aggregation: Aggregation, received: Received) -> rules.Combined:
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


def _bounded(aggregation: Aggregation, received: Received, started: Tree) -> tuple[Tree, Float[Tensor, " users"]]:
    """What each user had plus its shortened change, of smaller ranks without what is beyond them; and by how much."""
    had = without_padding(started, received.ranks)
    changes = {name: t.double() - had[name].double() for name, t in received.tensors.items()}
    shortened = rules.norm_bound(changes, None if isinstance(aggregation.bound, str) else aggregation.bound)
    lengths = norms(changes)
    counted = torch.where(lengths == 0, 1.0, norms(shortened) / lengths).nan_to_num(0.0)
    return {name: (had[name].double() + t).to(received.tensors[name].dtype) for name, t in shortened.items()}, counted
