"""Robust aggregation: rules, and the mechanism that applies one of them on the server.

Krum, Bulyan and the geometric median treat all tensors of an upload as one vector: distances are sums over tensors.
Distances are computed from differences in float64, not from products, so that one huge upload cannot round away the
distances of the others. Each rule also returns how much each upload counts in its result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.sections import Recipe
from comingle.config.settings import AggregationSection
from comingle.methods.base import Method
from comingle.methods.server import Received
from comingle.privacy.base import PrivacyMechanism, RuleResult, ServerRound
from comingle.privacy.noise import clipped, norms, without_padding
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Tree

_log = logging.getLogger("comingle")

LEAST_DISTANCE, MAX_STEPS, RELATIVE_TOLERANCE = 1e-6, 1000, 1e-9
"""Settings of the geometric median: smallest distance (nu), step limit, and relative step length at which it stops."""


@dataclass(frozen=True, kw_only=True)
class Combined:
    """Result of a rule, and how much each upload counts in it, from 0 to 1.

    ``counted`` is 1 or 0 for rules that choose whole uploads, else the share of coordinates in which the upload's value
    is used; for the geometric median it is the upload's weight over the median weight, at most 1.
    """

    tensors: Tree
    counted: Float[Tensor, " users"]


def coordinate_median(uploads: Tree) -> Combined:
    """Return the median of each coordinate; with an even number of uploads, the mean of the two in the middle.

    Source: Yin et al. 2018, arXiv:1803.01498, option I.
    """
    return _mean_by_coordinate(uploads, _middle_users)


def trimmed_mean(uploads: Tree, hostile: int) -> Combined:
    """Return the mean of each coordinate without the ``hostile`` smallest and the ``hostile`` largest values.

    Source: Yin et al. 2018, arXiv:1803.01498, option II.

    Args:
        uploads: Tensors ``(users, *shape)``.
        hostile: Largest number of hostile users to withstand.
    """

    def users_between(t: Tensor) -> Tensor:
        return t.argsort(dim=0, stable=True)[hostile : len(t) - hostile]

    return _mean_by_coordinate(uploads, users_between)


def krum(uploads: Tree, hostile: int) -> Combined:
    """Return the upload with the smallest sum of squared distances to its ``n - hostile - 2`` nearest other uploads.

    Source: Blanchard et al. 2017, arXiv:1703.02757.

    Args:
        uploads: Tensors ``(users, *shape)`` of n users.
        hostile: Largest number of hostile users to withstand.
    """
    return _mean_of_users(uploads, krum_order(squared_distances(uploads), hostile)[:1])


def multi_krum(uploads: Tree, hostile: int) -> Combined:
    """Return the mean of the ``n - hostile - 2`` uploads with the smallest scores of Krum.

    The score of an upload is the sum of squared distances to its ``n - hostile - 2`` nearest other uploads.

    Source: Blanchard et al. 2017, arXiv:1703.02757, section 4. They leave open how many uploads are averaged; ``n -
    hostile - 2`` is the largest number that Damaskinos et al. 2019 (AggregaThor) allow.

    Args:
        uploads: Tensors ``(users, *shape)`` of n users.
        hostile: Largest number of hostile users to withstand.
    """
    order = krum_order(squared_distances(uploads), hostile)
    return _mean_of_users(uploads, order[: len(order) - hostile - 2])


def bulyan(uploads: Tree, hostile: int) -> Combined:
    """Choose ``n - 2 hostile`` uploads one by one with Krum; return the mean of the values nearest to their median.

    In each coordinate the mean is over ``n - 4 hostile`` values. Krum uses at least one neighbour, even when few
    uploads are left.

    Source: El Mhamdi et al. 2018, arXiv:1802.07927, Algorithm 2.

    Args:
        uploads: Tensors ``(users, *shape)`` of n users.
        hostile: Largest number of hostile users to withstand.
    """
    distances = squared_distances(uploads)
    num_users = len(distances)
    remaining, chosen = list(range(num_users)), list[int]()
    while len(chosen) < num_users - 2 * hostile:
        best = krum_order(distances[remaining][:, remaining], hostile)[0]
        chosen.append(remaining.pop(best))
    num_values = num_users - 4 * hostile
    of_chosen = _mean_by_coordinate(
        {name: t[chosen] for name, t in uploads.items()}, lambda t: _users_nearest_to_median(t, num_values)
    )
    # For each user the share of coordinates in which its value is part of the mean; 0 for users that were not chosen.
    counted = torch.zeros(num_users, dtype=torch.float64).index_copy(0, torch.tensor(chosen), of_chosen.counted)
    return Combined(tensors=of_chosen.tensors, counted=counted)


def geometric_median(uploads: Tree, weights: Float[Tensor, " users"]) -> Combined:
    """Return the point with the smallest weighted sum of distances, by the smoothed Weiszfeld algorithm; float64.

    It repeats ``v = sum_u b_u x_u / sum_u b_u`` with ``b_u = w_u / max(nu, |v - x_u|)`` until v hardly moves. It starts
    from the coordinate-wise median instead of the mean, which a single upload can move arbitrarily far.

    Source: Pillutla et al. 2022, arXiv:1912.13445, Algorithm 2.

    Args:
        uploads: Tensors ``(users, *shape)``.
        weights: The users' weights w_u.

    Returns:
        The point, and as ``counted`` how much each upload counts in it: its last b_u over the median of all, at most 1.
    """
    point = {name: _coordinate_medians(t).double() for name, t in uploads.items()}  # v
    factors = weights  # b_u
    for _ in range(MAX_STEPS):
        distances = norms({name: t.double() - point[name] for name, t in uploads.items()}).clamp(min=LEAST_DISTANCE)
        factors = weights.to(distances) / distances
        shares = factors / factors.sum()
        new_point = {name: torch.tensordot(shares.to(t.device), t.double(), 1) for name, t in uploads.items()}
        step_length = norms({name: (t - point[name]).unsqueeze(0) for name, t in new_point.items()})
        point = new_point
        if float(step_length) <= RELATIVE_TOLERANCE * float(distances.median()):
            break
    counted = (factors / factors.quantile(0.5)).clamp(max=1.0)  # 1 for uploads with at least the median weight
    return Combined(tensors=point, counted=counted.cpu())


def norm_bound(changes: Tree, bound: float | None = None) -> Tree:
    """Return changes scaled down to an L2 norm of at most ``bound``, float64; None for the median of their norms.

    Source: Sun et al. 2019, "Can You Really Backdoor Federated Learning?", arXiv:1911.07963, norm thresholding.

    Args:
        changes: Changes ``(users, *shape)``.
        bound: Largest norm of a change.
    """
    return clipped(changes, float(norms(changes).quantile(0.5)) if bound is None else bound)


def squared_distances(uploads: Tree) -> Float[Tensor, "users users"]:
    """Return the squared L2 distances between all pairs of uploads, float64."""
    flat_tensors = [t.double().reshape(len(t), -1) for t in uploads.values()]
    mode = "donot_use_mm_for_euclid_dist"  # products of large values would round small distances away
    return torch.stack([torch.cdist(t, t, compute_mode=mode).square().cpu() for t in flat_tensors]).sum(0)


def krum_order(distances: Float[Tensor, "users users"], hostile: int) -> list[int]:
    """Return the uploads' indices, the most trustworthy first, by the score of Krum.

    The score is the sum of squared distances to the ``n - hostile - 2`` nearest other uploads; the smallest is best.
    Ties, as of two uploads that are each other's only neighbour, are broken by the sum of all distances, not by
    position.

    Args:
        distances: Squared distances between n uploads.
        hostile: Largest number of hostile users to withstand.
    """
    to_others = distances.clone().fill_diagonal_(torch.inf)
    num_neighbours = max(1, len(to_others) - hostile - 2)  # Bulyan also calls this for the few uploads that are left.
    scores = to_others.topk(num_neighbours, largest=False).values.sum(1)
    keys = list(zip(scores.tolist(), distances.sum(1).tolist(), strict=True))
    return sorted(range(len(keys)), key=keys.__getitem__)


ChooseUsers = Callable[[Float[Tensor, "users ..."]], Int[Tensor, "chosen ..."]]
"""Function that returns, for each coordinate, the indices of the users whose values are used."""


def _mean_by_coordinate(uploads: Tree, choose_users: ChooseUsers) -> Combined:
    """Return the mean of the chosen values in each coordinate, and the share of coordinates in which a user is chosen.

    Args:
        uploads: Tensors ``(users, *shape)``.
        choose_users: Returns the users whose values are used, for each coordinate of a tensor.
    """
    num_users = len(next(iter(uploads.values())))
    tensors: Tree = {}
    times_chosen = torch.zeros(num_users, dtype=torch.float64)
    for name, t in uploads.items():
        users = choose_users(t)
        tensors[name] = _mean(t.gather(0, users))
        times_chosen += users.flatten().bincount(minlength=num_users).cpu()
    return Combined(tensors=tensors, counted=times_chosen / sum(t[0].numel() for t in uploads.values()))


def _mean_of_users(uploads: Tree, chosen: Sequence[int]) -> Combined:
    """Return the mean of the chosen users' uploads; only these count."""
    num_users = len(next(iter(uploads.values())))
    counted = torch.zeros(num_users, dtype=torch.float64).index_fill(0, torch.tensor(chosen), 1.0)
    return Combined(tensors={name: _mean(t[chosen]) for name, t in uploads.items()}, counted=counted)


def _middle_users(t: Float[Tensor, "users ..."]) -> Int[Tensor, "chosen ..."]:
    """Return the indices of the users with the middle values of each coordinate: one, or two of an even number."""
    middle = (len(t) - 1) // 2
    return t.argsort(dim=0, stable=True)[middle : len(t) - middle]


def _users_nearest_to_median(t: Float[Tensor, "users ..."], count: int) -> Int[Tensor, "chosen ..."]:
    """Return the indices of the ``count`` users with the values nearest to the median of each coordinate."""
    return (t - _coordinate_medians(t)).abs().topk(count, dim=0, largest=False).indices


def _coordinate_medians(t: Float[Tensor, "users ..."]) -> Tensor:
    """Return the median of each coordinate; for an even number of users the mean of the two middle values."""
    return _mean(t.gather(0, _middle_users(t)))


def _mean(t: Float[Tensor, "users ..."]) -> Tensor:
    """Return the mean, computed in float64 and cast back to the uploads' dtype."""
    return t.double().mean(0).to(t.dtype)


WEIGHTED = ("geometric-median", "norm-bound")
"""Rules that use the users' weights."""


@dataclass(kw_only=True)
class RobustRule(PrivacyMechanism):
    """Applies a robust rule instead of the mean, as some uploads may be hostile."""

    aggregation: AggregationSection

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Check that the rule can replace the method's mean, and that the other settings of the recipe allow it.

        Raises:
            RecipeError: A check fails.
        """
        rule, privacy = self.aggregation.rule, recipe.privacy
        if method.placement.pooled:
            raise RecipeError(
                f"aggregation: method {method.name} pools all users' data, so there are no uploads to combine"
            )
        if not method.shared:  # nothing is uploaded, so the rule has no effect
            return
        if why := _why_not_boundable(method) if rule == "norm-bound" else _why_not_combinable(method):
            raise RecipeError(f"aggregation: {rule} with method {method.name}: {why}")
        if recipe.training.weighting != "uniform" and rule not in WEIGHTED:
            raise RecipeError(
                f"training.weighting: got {recipe.training.weighting}, but {rule} gives all users the same weight, "
                "because reported amounts of data may be false; allowed: uniform, or aggregation "
                f"{' or '.join(WEIGHTED)}"
            )
        if recipe.evaluation.select == "best":
            raise RecipeError(
                "aggregation: evaluation.select: best uses the mean of users' validation losses, which one false loss "
                "can decide; allowed: last"
            )
        if privacy is not None and privacy.secure_aggregation is not None:
            raise RecipeError(
                f"aggregation: {rule} cannot be used with privacy.secure_aggregation, where the server sees only a sum "
                "and no single upload; allowed: mean, or no secure_aggregation"
            )
        if privacy is not None and privacy.noise_at == "server":
            raise RecipeError(
                f"aggregation: {rule} cannot be used with privacy.mechanism: {privacy.mechanism}, whose noise covers "
                "only a sum of clipped changes; its clip norm already bounds each user's influence; allowed: mean, or "
                "mechanism: local"
            )

    def check_rounds(self, sizes: Collection[int], *, same_ranks: bool) -> None:
        """Check that each round has enough users for the rule, and that all uploads have the same coordinates.

        Args:
            sizes: All numbers of users that a round may have.
            same_ranks: Whether all users have the same LoRA rank. If not, a user's missing ranks are padded with zeros,
                which rules that compare uploads coordinate by coordinate would take for values.

        Raises:
            RecipeError: A check fails.
        """
        aggregation, rule = self.aggregation, self.aggregation.rule
        for size in sorted(sizes):
            if not aggregation.enough(size):
                hostile = aggregation.hostile_among(size)
                least = aggregation.least_uploads(hostile)
                raise RecipeError(
                    f"aggregation: {rule} needs {least} users in a round with {hostile} hostile users, but "
                    f"training.participation selects {size}; allowed: more users, a smaller aggregation.hostile, or "
                    "another rule"
                )
        if rule != "norm-bound" and not same_ranks:
            raise RecipeError(
                f"aggregation: {rule} compares users coordinate by coordinate, but adapters.rank differs between them; "
                "allowed: one rank, or norm-bound"
            )

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Return the result of the rule; None if too few uploads have arrived.

        It also sets ``rule_result``, which says how much each upload counts.

        Args:
            received: The uploads of a round, of which there may be none.
            server_round: The round on the server: its method's server and state, and the participants' names.
        """
        self.rule_result = None
        if not received.tensors:  # nothing was uploaded, so there is nothing to combine
            return received
        # Rules compare changes, so they need the tensors with which each participant began the round.
        started = server_round.server.starts(server_round.kept, received)
        aggregated, self.rule_result = apply_rule(self.aggregation, received, started, server_round.names)
        if aggregated is None:
            _log.warning("%s", self.rule_result.reason)
        return aggregated


def _why_not_boundable(method: Method) -> str:
    """Return why bounding a user's change would not bound its influence on a method's server; empty if it would.

    The influence is bounded if the server knows the tensors from which a user started, and uses only the change from
    them.
    """
    if method.server.knows_starts:
        return ""
    if method.server.peer_to_peer:
        return "users mix each other's uploads themselves, so the server does not aggregate them"
    return (
        f"its server ({type(method.server).__name__}) uses more of uploads than their change against the download, so "
        "bounding the change does not bound the result"
    )


def _why_not_combinable(method: Method) -> str:
    """Return the reason why a robust rule cannot take the place of the server's mean; empty if it can.

    A rule decides itself how much each upload counts, so the server's weights must not depend on the uploads.
    """
    if method.server.clipped_mean:  # the server takes a mean with weights that do not depend on the uploads
        return ""
    allowed = "" if _why_not_boundable(method) else "; allowed: norm-bound"
    server = type(method.server).__name__
    return f"its server ({server}) does not compute a mean with weights that are independent of the uploads{allowed}"


_DIGITS = 4
"""Digits of the shares in events; a small share is not rounded to 0."""


def apply_rule(
    aggregation: AggregationSection, received: Received, started: Tree, names: Sequence[str]
) -> tuple[Received | None, RuleResult]:
    """Apply the robust rule of a recipe to the uploads of a round.

    Args:
        aggregation: Section ``aggregation`` of the recipe.
        received: The uploads of a round, with weights, ranks and scales of the participants.
        started: Tensors of each participant before it trained, ``(users, *shape)``.
        names: Names of the participants.

    Returns:
        The uploads for the server's mean, and how much each upload counts. The rule norm-bound returns all uploads,
        with shortened changes. Other rules return a single upload, their result. With too few uploads for the rule,
        None is returned instead of uploads, and the server's model stays unchanged.
    """
    rule = aggregation.rule
    if not aggregation.enough(len(received.weights)):
        return None, RuleResult(
            rule=rule, reason=f"{len(names)} uploads are too few for {rule}; the model stays unchanged"
        )
    received = replace(received, weights=capped(received.weights))  # users may lie about their amount of data
    if rule == "norm-bound":
        tensors, counted = _shorten_changes(aggregation, received, started)
        aggregated = replace(received, tensors=tensors)
    else:
        combined = _apply_combining_rule(aggregation, received)
        aggregated, counted = _as_single_upload(received, combined.tensors), combined.counted
    # A share that would be rounded to 0 is not rounded: 0 would mean that the upload is left out.
    shares = [round(share, _DIGITS) or share for share in counted.tolist()]
    return aggregated, RuleResult(rule=rule, counted=dict(zip(names, shares, strict=True)))


def _as_single_upload(received: Received, tensors: Tree) -> Received:
    """Return an aggregated model as a single upload that belongs to no user, with a weight of 1.

    Args:
        received: Uploads that were aggregated, with their dtypes and roles.
        tensors: Aggregated tensors, without a users dimension.
    """
    return Received(
        users=[],
        tensors={name: t.to(received.tensors[name].dtype).unsqueeze(0) for name, t in tensors.items()},
        weights=torch.ones(1, dtype=torch.float64),
        ranks=received.ranks[:1],  # the same for all users: combining rules need equal ranks (check_rounds)
        scales=received.scales[:1],
        roles=received.roles,
    )


def capped(weights: Float[Tensor, " users"]) -> Float[Tensor, " users"]:
    """Return weights clamped to their median and normalised, as users may lie about their amount of data."""
    clamped = weights.clamp(max=float(weights.quantile(0.5)))
    return clamped / clamped.sum()


def _apply_combining_rule(aggregation: AggregationSection, received: Received) -> Combined:
    """Return the result of the rule in ``aggregation``, for all rules but norm-bound.

    Args:
        aggregation: Settings; ``hostile_among`` gives the number of hostile users to withstand.
        received: The uploads of a round, with weights, ranks and scales of the participants.
    """
    uploads, hostile = received.tensors, aggregation.hostile_among(len(received.weights))
    match aggregation.rule:
        case "median":
            return coordinate_median(uploads)
        case "trimmed-mean":
            return trimmed_mean(uploads, hostile)
        case "krum":
            return krum(uploads, hostile)
        case "multi-krum":
            return multi_krum(uploads, hostile)
        case "bulyan":
            return bulyan(uploads, hostile)
        case "geometric-median":
            return geometric_median(uploads, received.weights)
        case other:
            raise AssertionError(other)


def _shorten_changes(
    aggregation: AggregationSection, received: Received, started: Tree
) -> tuple[Tree, Float[Tensor, " users"]]:
    """Return each user's initial tensors plus its change, shortened to the bound, and the shortening factors.

    Padding beyond a user's smaller LoRA rank is set to zero first, so that it is not part of the change.

    Args:
        aggregation: Settings with the bound; a text means the median of the changes' norms.
        received: The uploads of a round, with weights, ranks and scales of the participants.
        started: Tensors of each participant before it trained, ``(users, *shape)``.

    Returns:
        Shortened uploads ``(users, *shape)``, and factors ``(users,)`` from 0 to 1.
    """
    initial = without_padding(started, received.ranks)
    changes = {name: t.double() - initial[name].double() for name, t in received.tensors.items()}
    shortened = norm_bound(changes, None if isinstance(aggregation.bound, str) else aggregation.bound)
    lengths = norms(changes)
    # A change of zero counts in full, a change of unknown length (NaN) not at all: norm_bound has set it to zero.
    counted = torch.where(lengths == 0, 1.0, norms(shortened) / lengths).nan_to_num(0.0)
    tensors = {name: (initial[name].double() + t).to(received.tensors[name].dtype) for name, t in shortened.items()}
    return tensors, counted
