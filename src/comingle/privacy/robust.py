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
    """Result of a robust rule.

    Args:
        tensors: The uploads combined into one, without a users dimension.
        counted: How much each upload counts, from 0 to 1. For rules that choose whole uploads 1 or 0, for the geometric
            median a weight, else the share of coordinates in which the upload's value is used.
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

    def choose_middle_users(t: Tensor) -> Tensor:
        users_by_value = t.argsort(dim=0, stable=True)  # in each coordinate
        return users_by_value[hostile : len(t) - hostile]

    return _mean_by_coordinate(uploads, choose_middle_users)


def krum(uploads: Tree, hostile: int) -> Combined:
    """Return the upload with the smallest sum of squared distances to its ``n - hostile - 2`` nearest other uploads.

    Source: Blanchard et al. 2017, arXiv:1703.02757.

    Args:
        uploads: Tensors ``(users, *shape)`` of n users.
        hostile: Largest number of hostile users to withstand.
    """
    best, *_others = krum_order(squared_distances(uploads), hostile)
    return _mean_of_users(uploads, [best])


def multi_krum(uploads: Tree, hostile: int) -> Combined:
    """Return the mean of the ``n - hostile - 2`` uploads with the smallest scores of Krum.

    Source: Blanchard et al. 2017, arXiv:1703.02757, section 4; the number of uploads is the largest that Damaskinos et
    al. 2019 (AggregaThor) allow.

    Args:
        uploads: Tensors ``(users, *shape)`` of n users.
        hostile: Largest number of hostile users to withstand.
    """
    order = krum_order(squared_distances(uploads), hostile)
    num_chosen = len(order) - hostile - 2
    return _mean_of_users(uploads, order[:num_chosen])


def bulyan(uploads: Tree, hostile: int) -> Combined:
    """Choose ``n - 2 hostile`` uploads one by one with Krum; return a trimmed mean of the chosen uploads.

    In each coordinate it is the mean of the ``n - 4 hostile`` chosen values that are nearest to their median.

    Source: El Mhamdi et al. 2018, arXiv:1802.07927, Algorithm 2.

    Args:
        uploads: Tensors ``(users, *shape)`` of n users.
        hostile: Largest number of hostile users to withstand.
    """
    distances = squared_distances(uploads)
    num_users = len(distances)
    remaining, chosen = list(range(num_users)), list[int]()
    while len(chosen) < num_users - 2 * hostile:
        distances_of_remaining = distances[remaining][:, remaining]
        best = krum_order(distances_of_remaining, hostile)[0]
        chosen.append(remaining.pop(best))
    num_values = num_users - 4 * hostile

    def choose_users(t: Tensor) -> Tensor:
        return _users_nearest_to_median(t, num_values)

    chosen_uploads = {name: t[chosen] for name, t in uploads.items()}
    combined = _mean_by_coordinate(chosen_uploads, choose_users)
    counted = torch.zeros(num_users, dtype=torch.float64)  # stays 0 for users that are not chosen
    counted[chosen] = combined.counted
    return Combined(tensors=combined.tensors, counted=counted)


def geometric_median(uploads: Tree, weights: Float[Tensor, " users"]) -> Combined:
    """Return the point v with the smallest weighted sum of distances to the uploads, float64.

    The smoothed Weiszfeld algorithm repeats ``v = sum_u b_u x_u / sum_u b_u`` with ``b_u = w_u / max(nu, |v - x_u|)``
    until v hardly moves; nu is :data:`LEAST_DISTANCE`. It starts here from the median of each coordinate.

    Source: Pillutla et al. 2022, arXiv:1912.13445, Algorithm 2.

    Args:
        uploads: Tensors ``(users, *shape)``: the points x_u.
        weights: The users' weights w_u.

    Returns:
        The point v, and as ``counted`` each user's ``b_u / median(b)``, at most 1.
    """
    v = {name: _coordinate_medians(t).double() for name, t in uploads.items()}
    b = weights
    for _ in range(MAX_STEPS):
        distances = norms({name: t.double() - v[name] for name, t in uploads.items()}).clamp(min=LEAST_DISTANCE)
        b = weights.to(distances) / distances
        shares = b / b.sum()
        new_v = {name: torch.tensordot(shares.to(t.device), t.double(), 1) for name, t in uploads.items()}
        step = {name: (t - v[name]).unsqueeze(0) for name, t in new_v.items()}  # `norms` takes (users, *shape)
        step_length = float(norms(step))
        v = new_v
        if step_length <= RELATIVE_TOLERANCE * float(distances.median()):
            break
    counted = (b / b.quantile(0.5)).clamp(max=1.0)
    return Combined(tensors=v, counted=counted.cpu())


def norm_bound(changes: Tree, bound: float | None = None) -> Tree:
    """Return changes scaled down to an L2 norm of at most ``bound``, float64.

    Source: Sun et al. 2019, "Can You Really Backdoor Federated Learning?", arXiv:1911.07963, norm thresholding.

    Args:
        changes: Changes ``(users, *shape)``.
        bound: Largest norm of a change; None for the median of the changes' norms.
    """
    if bound is None:
        bound = float(norms(changes).quantile(0.5))
    return clipped(changes, bound)


def squared_distances(uploads: Tree) -> Float[Tensor, "users users"]:
    """Return the squared L2 distances between all pairs of uploads, float64."""
    mode = "donot_use_mm_for_euclid_dist"  # Products of large values would round small distances away.
    distances_by_tensor: list[Tensor] = []
    for t in uploads.values():
        rows = t.double().reshape(len(t), -1)
        distances_by_tensor.append(torch.cdist(rows, rows, compute_mode=mode).square().cpu())
    return torch.stack(distances_by_tensor).sum(0)


def krum_order(distances: Float[Tensor, "users users"], hostile: int) -> list[int]:
    """Return the uploads' indices by increasing score of Krum; equal scores by increasing sum of all distances.

    The score of an upload is the sum of the squared distances to its ``n - hostile - 2`` nearest other uploads.

    Args:
        distances: Squared distances between n uploads.
        hostile: Largest number of hostile users to withstand.
    """
    distances_to_others = distances.clone().fill_diagonal_(torch.inf)
    num_neighbours = max(1, len(distances) - hostile - 2)  # at least 1, as Bulyan also ranks few uploads
    scores = distances_to_others.topk(num_neighbours, largest=False).values.sum(1).tolist()
    sums_of_distances = distances.sum(1).tolist()
    return sorted(range(len(scores)), key=lambda upload: (scores[upload], sums_of_distances[upload]))


ChooseUsers = Callable[[Float[Tensor, "users ..."]], Int[Tensor, "chosen ..."]]
"""Function that returns, for each coordinate, the indices of the users whose values are used."""


def _mean_by_coordinate(uploads: Tree, choose_users: ChooseUsers) -> Combined:
    """Return the mean of the chosen values in each coordinate, and the share of coordinates in which a user is chosen.

    Args:
        uploads: Tensors ``(users, *shape)``.
        choose_users: Returns the users whose values are used, for each coordinate of a tensor.
    """
    num_users = len(next(iter(uploads.values())))
    num_coordinates = sum(t[0].numel() for t in uploads.values())
    means: Tree = {}
    times_chosen = torch.zeros(num_users, dtype=torch.float64)
    for name, t in uploads.items():
        chosen_users = choose_users(t)
        means[name] = _mean(t.gather(0, chosen_users))
        times_chosen += chosen_users.flatten().bincount(minlength=num_users).cpu()
    return Combined(tensors=means, counted=times_chosen / num_coordinates)


def _mean_of_users(uploads: Tree, chosen: Sequence[int]) -> Combined:
    """Return the mean of the chosen users' uploads; ``counted`` is 1 for these users, 0 for others."""
    num_users = len(next(iter(uploads.values())))
    counted = torch.zeros(num_users, dtype=torch.float64).index_fill(0, torch.tensor(chosen), 1.0)
    means = {name: _mean(t[chosen]) for name, t in uploads.items()}
    return Combined(tensors=means, counted=counted)


def _middle_users(t: Float[Tensor, "users ..."]) -> Int[Tensor, "chosen ..."]:
    """Return for each coordinate the index of the user with the median value, or of two for an even number of users."""
    middle = (len(t) - 1) // 2
    users_by_value = t.argsort(dim=0, stable=True)
    return users_by_value[middle : len(t) - middle]


def _users_nearest_to_median(t: Float[Tensor, "users ..."], count: int) -> Int[Tensor, "chosen ..."]:
    """Return for each coordinate the indices of the ``count`` users with the values nearest to the median."""
    distances = (t - _coordinate_medians(t)).abs()
    return distances.topk(count, dim=0, largest=False).indices


def _coordinate_medians(t: Float[Tensor, "users ..."]) -> Tensor:
    """Return the median of each coordinate; for an even number of users the mean of the two middle values."""
    return _mean(t.gather(0, _middle_users(t)))


def _mean(t: Float[Tensor, "users ..."]) -> Tensor:
    """Return the mean, computed in float64 and cast back to the uploads' dtype."""
    return t.double().mean(0).to(t.dtype)


WEIGHTED = ("geometric-median", "norm-bound")
"""Rules that use the users' aggregation weights; other rules count all users equally."""


@dataclass(kw_only=True)
class RobustRule(PrivacyMechanism):
    """Aggregates uploads by a robust rule, such as Krum, instead of the mean, as some uploads may be hostile."""

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
        reason = _why_not_boundable(method) if rule == "norm-bound" else _why_not_combinable(method)
        if reason:
            raise RecipeError(f"aggregation: {rule} with method {method.name}: {reason}")
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
            same_ranks: Whether all users have the same LoRA rank.

        Raises:
            RecipeError: A check fails.
        """
        aggregation, rule = self.aggregation, self.aggregation.rule
        for size in sorted(sizes):
            if not aggregation.enough(size):
                hostile = aggregation.hostile_among(size)
                needed = aggregation.least_uploads(hostile)
                raise RecipeError(
                    f"aggregation: {rule} needs {needed} users in a round with {hostile} hostile users, but "
                    f"training.participation selects {size}; allowed: more users, a smaller aggregation.hostile, or "
                    "another rule"
                )
        if rule != "norm-bound" and not same_ranks:
            raise RecipeError(
                f"aggregation: {rule} compares users coordinate by coordinate, but adapters.rank differs between them; "
                "allowed: one rank, or norm-bound"
            )

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Apply the rule to the uploads of a round, and store how much of each upload counts in ``rule_result``.

        Args:
            received: The uploads of a round.
            server_round: The round on the server: its method's server and state, and the participants' names.

        Returns:
            The uploads that the server aggregates instead of ``received``; None if there are too few for the rule. If
            nothing was uploaded, ``received`` itself.
        """
        self.rule_result = None
        if not received.tensors:
            return received
        # Tensors with which each participant began the round, from which the rule measures its change.
        initial = server_round.server.starts(server_round.kept, received)
        aggregated, self.rule_result = apply_rule(self.aggregation, received, initial, server_round.names)
        if aggregated is None:
            _log.warning("%s", self.rule_result.reason)
        return aggregated


def _why_not_boundable(method: Method) -> str:
    """Return why bounding a user's change does not bound its influence on the server; an empty string if it does.

    The rule norm-bound is allowed only if it does.
    """
    if method.server.knows_starts:  # The server uses only the change from the tensors that it sent.
        return ""
    if method.server.peer_to_peer:
        return "users mix each other's uploads themselves, so the server does not aggregate them"
    return (
        f"its server ({type(method.server).__name__}) uses more of uploads than their change against the download, so "
        "bounding the change does not bound the result"
    )


def _why_not_combinable(method: Method) -> str:
    """Return why a robust rule cannot replace the server's mean; an empty string if it can."""
    takes_plain_mean = method.server.clipped_mean  # a mean with weights that are independent of the uploads
    if takes_plain_mean:
        return ""
    allowed = "" if _why_not_boundable(method) else "; allowed: norm-bound"
    server = type(method.server).__name__
    return f"its server ({server}) does not compute a mean with weights that are independent of the uploads{allowed}"


_DIGITS = 4
"""Decimal places in events of how much an upload counts."""


def apply_rule(
    aggregation: AggregationSection, received: Received, initial: Tree, names: Sequence[str]
) -> tuple[Received | None, RuleResult]:
    """Apply the robust rule of a recipe to the uploads of a round.

    Args:
        aggregation: Section ``aggregation`` of the recipe.
        received: The uploads of a round, with weights, ranks and scales of the participants.
        initial: Tensors of each participant before it trained, ``(users, *shape)``.
        names: Names of the participants.

    Returns:
        The uploads that the server aggregates instead of those received, and how much each of those counts. For the
        rule norm-bound they are all uploads with shortened changes, for other rules a single upload, the rule's result.
        They are None if too few uploads were received for the rule.
    """
    rule = aggregation.rule
    if not aggregation.enough(len(received.weights)):
        reason = f"{len(names)} uploads are too few for {rule}; the model stays unchanged"
        return None, RuleResult(rule=rule, reason=reason)
    received = replace(received, weights=capped(received.weights))  # users may lie about their amount of data
    if rule == "norm-bound":
        shortened, counted = _shorten_changes(aggregation, received, initial)
        aggregated = replace(received, tensors=shortened)
    else:
        combined = _apply_combining_rule(aggregation, received)
        aggregated = _as_single_upload(received, combined.tensors)
        counted = combined.counted
    counted_by_name: dict[str, float] = {}
    for name, value in zip(names, counted.tolist(), strict=True):
        rounded = round(value, _DIGITS)
        counted_by_name[name] = rounded if rounded != 0 else value  # rounded to 0, it would seem to be left out
    return aggregated, RuleResult(rule=rule, counted=counted_by_name)


def _as_single_upload(received: Received, tensors: Tree) -> Received:
    """Return the result of a rule as a single upload that belongs to no user, with a weight of 1.

    Args:
        received: The combined uploads; the result gets their dtypes and roles.
        tensors: Result of the rule, without a users dimension.
    """
    return Received(
        users=[],
        tensors={name: t.to(received.tensors[name].dtype).unsqueeze(0) for name, t in tensors.items()},
        weights=torch.ones(1, dtype=torch.float64),
        ranks=received.ranks[:1],  # all users have equal ranks, see RobustRule.check_rounds
        scales=received.scales[:1],
        roles=received.roles,
    )


def capped(weights: Float[Tensor, " users"]) -> Float[Tensor, " users"]:
    """Return weights clamped to their median and normalised to a sum of 1.

    A user who reports a false amount of data then has at most the weight of the median user.
    """
    median = float(weights.quantile(0.5))
    clamped = weights.clamp(max=median)
    return clamped / clamped.sum()


def _apply_combining_rule(aggregation: AggregationSection, received: Received) -> Combined:
    """Combine the uploads by the recipe's rule, which is not norm-bound.

    Args:
        aggregation: Section ``aggregation`` of the recipe.
        received: The uploads of a round, with the participants' weights.
    """
    uploads = received.tensors
    hostile = aggregation.hostile_among(len(received.weights))  # number of hostile users to withstand
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
    aggregation: AggregationSection, received: Received, initial: Tree
) -> tuple[Tree, Float[Tensor, " users"]]:
    """Shorten each user's change to the bound of the recipe.

    Args:
        aggregation: Section ``aggregation`` of the recipe; its bound is a number, or "median" for that of the norms.
        received: The uploads of a round, with the participants' LoRA ranks.
        initial: Tensors of each participant before it trained, ``(users, *shape)``.

    Returns:
        The initial tensors plus the shortened changes, and the factors ``(users,)`` from 0 to 1 of shortening.
    """
    initial = without_padding(initial, received.ranks)
    changes = {name: t.double() - initial[name].double() for name, t in received.tensors.items()}
    bound = None if aggregation.bound == "median" else aggregation.bound  # norm_bound takes None for the median
    shortened = norm_bound(changes, bound)
    lengths = norms(changes)
    factors = norms(shortened) / lengths
    factors = torch.where(lengths == 0, 1.0, factors).nan_to_num(0.0)  # 0 for a NaN: norm_bound makes the change 0
    tensors = {name: (initial[name].double() + t).to(received.tensors[name].dtype) for name, t in shortened.items()}
    return tensors, factors
