"""Differential privacy: noise of the server, of each user, or in each local step; and the list of a run's mechanisms.

A further mechanism is a subclass of :class:`DifferentialPrivacy` that is registered by name::

    MECHANISMS.register("mine", Mechanism(implementation=Mine, noise_at="upload"))

Recipes then have ``privacy: {mechanism: mine}``, and costs, audits and reports read the rest from the class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from comingle.config.sections import Recipe
from comingle.config.settings import MECHANISMS, AggregationSection, PrivacySection
from comingle.methods.base import ClientHook, Method
from comingle.methods.server import Received
from comingle.models.scoring import PAD
from comingle.privacy.accounting import (
    Account,
    Participation,
    Release,
    ReplacingAccount,
    StepAccount,
    UploadAccount,
    Work,
    expected_participants,
    least_noise,
    multiplier_of,
    sample_size,
)
from comingle.privacy.base import (
    CLIP_NORM,
    WITHIN,
    PrivacyMechanism,
    PrivateStep,
    ServerRound,
    Update,
    mean_as_upload,
    overrides,
)
from comingle.privacy.noise import (
    add_noise,
    capped_weights,
    clipped,
    gaussian,
    norms,
    scaled,
    uniform,
    without_padding,
)
from comingle.privacy.robust import RobustRule
from comingle.privacy.secure_sum import SecureSum, Sums
from comingle.utils.errors import RecipeError, run_checks
from comingle.utils.trees import STATISTICS, Layout, Tree

COUNTS, BOUND = "privacy/releases", "privacy/clip_norm"
"""Checkpoint keys of the number of releases of each user, and of the clip norm."""


@dataclass(kw_only=True)
class DifferentialPrivacy(PrivacyMechanism):
    """Base class of the privacy mechanisms that a recipe can name, with an account of the epsilon that users spend.

    Args:
        privacy: Settings, with the noise multiplier once it is known.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: All users of the run; not used on a client.
        bound: Clip norm of the next round.
    """

    privacy: PrivacySection
    participation: Participation = 1.0
    users: tuple[str, ...] = ()
    bound: float = 0.0

    account_type: ClassVar[type[Account]] = UploadAccount
    """Class of the account, which computes the epsilon that a round costs its users."""

    def __post_init__(self) -> None:
        """Set the clip norm of the first round, and open the users' account of epsilon if noise is added."""
        # A new run begins with the recipe's clip norm; `restore` sets a later one of an adaptive clip norm.
        self.bound = self.bound or self.privacy.first_bound
        if self.privacy.noisy:
            self.account = self.account_type(privacy=self.privacy, participation=self.participation, users=self.users)

    @property
    def needs_key(self) -> bool:
        """True if noise is drawn from a secret key, which must then be stored to repeat a round with the same noise."""
        return self.privacy.noisy and self.privacy.noise == "secret"

    # ---------------------------------------------------------------- before a run

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Raise an error if noise does not protect everything that users send, or if privacy settings are wrong.

        Raises:
            RecipeError: The mechanism does not support the method or the recipe; the message says why.
        """
        self.check_noise()
        if method.placement.pooled:
            raise RecipeError(
                f"privacy: method {method.name} pools all users' data, which noise on uploads does not protect"
            )
        if not method.shared:  # Users send nothing that has to be protected.
            return
        reason = _why_unprotected(method) or self.why_unsupported(method)
        if reason:
            raise RecipeError(f"privacy: method {method.name}: {reason}")
        if recipe.evaluation.select == "best":
            raise RecipeError(
                "privacy: evaluation.select: best makes users report validation losses, which have no noise"
            )
        self.check_weights(recipe)
        # An adaptive clip norm changes in each round; `download` sends it to the users.
        sends_clip_norm = overrides(self, "download")
        if self.privacy.adaptive and not sends_clip_norm:
            raise RecipeError(
                "privacy.clip_norm: adaptive needs a server that counts clipped changes; allowed with mechanism "
                f"{self.privacy.mechanism}: a number"
            )

    def check_noise(self) -> None:
        """Check that the settings determine the amount of noise.

        Raises:
            RecipeError: Neither a noise multiplier nor an epsilon is given.
        """
        if self.privacy.noise_multiplier is None and self.privacy.epsilon is None:
            raise RecipeError(
                "privacy: the amount of noise is missing; give noise_multiplier, or epsilon for the whole run"
            )

    def why_unsupported(self, method: Method) -> str:
        """Return why the mechanism cannot protect this method's uploads; an empty string if it can."""
        takes_plain_mean = method.server.clipped_mean  # a mean with weights that are independent of the uploads
        if takes_plain_mean:  # so clipping an upload bounds its influence
            return ""
        return (
            f"its server ({type(method.server).__name__}) does not publish a mean with weights that are independent of "
            "the uploads, so clipping does not bound a user's influence; allowed: mechanism: local"
        )

    def check_weights(self, recipe: Recipe) -> None:
        """Check that ``privacy.weight_cap`` is given if users have different weights, and only then.

        Raises:
            RecipeError: The cap is missing, or has no effect because all weights are equal.
        """
        has_equal_weights = recipe.training.weighting == "uniform"
        if not has_equal_weights and self.privacy.weight_cap is None:
            raise RecipeError(
                f"privacy.weight_cap: missing; with training.weighting: {recipe.training.weighting} give the amount of "
                "data from which a user has the full weight, because weights must not depend on other users' data"
            )
        if has_equal_weights and self.privacy.weight_cap is not None:
            raise RecipeError("privacy.weight_cap: has no effect with training.weighting: uniform; remove it")

    def check_server(self, method: Method, layout: Layout, users: int) -> None:
        """Check that delta is below 1 / users, and that no running statistics of batch norm are shared.

        Args:
            method: The federated method of the run.
            layout: Layout of the model's tensors.
            users: Number of users.

        Raises:
            RecipeError: A check fails.
        """
        if not self.privacy.noisy:
            return
        if self.privacy.protects == "user" and self.privacy.delta * users >= 1:
            raise RecipeError(
                f"privacy.delta: got {self.privacy.delta:g} for {users} users; allowed: below 1/{users}, because a "
                "user may be revealed entirely with probability delta"
            )
        shared_statistics: list[str] = []  # names of tensors with running means and variances of batch norm
        for slot in layout.slots:
            is_shared = any(slot.role_mask(method.shared))
            if is_shared and STATISTICS in slot.roles:
                shared_statistics.append(slot.name)
        if shared_statistics:
            raise RecipeError(
                f"privacy: method {method.name} shares running statistics of batch norm ({shared_statistics[0]}, ...), "
                "which noise could make negative; allowed: a net with group norm, such as net:resnet9-group"
            )

    def warn(self, num_shared: int, rounds: int) -> str | None:
        """Return a warning if the noise of the whole run is larger than the largest possible change, else None.

        The change in a round has a norm of at most C, the clip norm. The noise on it has the norm ``z C sqrt(d / n)``
        if each of n users adds noise, and ``z C sqrt(d) / n`` if the server does; z is the noise multiplier. In R
        rounds changes add up to ``R C``, but noise, which is independent, only to ``sqrt(R)`` times its norm.

        Args:
            num_shared: Number d of parameters that a user shares.
            rounds: Number R of rounds.
        """
        if not self.privacy.noisy:
            return None
        z = self.privacy.multiplier
        users = self.expected_participants(0)  # n
        users_add_noise = self.privacy.noise_at == "upload"
        round_ratio = z * math.sqrt(num_shared / users)  # norm of the noise over C, in one round
        if not users_add_noise:
            round_ratio /= math.sqrt(users)
        run_ratio = round_ratio / math.sqrt(max(1, rounds))  # sqrt(R) z C sqrt(d / n) over R C, for noise of users
        if run_ratio <= 1:
            return None
        # The number at which run_ratio is 1; run_ratio falls with 1 / sqrt(n) if users add the noise, else with 1 / n.
        needed_users = users * run_ratio**2 if users_add_noise else users * run_ratio
        return (
            f"privacy: too much noise to learn: with noise_multiplier {z:.3g}, clip_norm {self.bound:g}, {users:,.4g} "
            f"users per round and {num_shared:,} shared parameters the norm of the noise is {round_ratio:,.3g} times "
            f"that of the largest possible change in one round, and {run_ratio:,.3g} times over all {rounds} rounds. "
            f"Use about {needed_users:,.0f} users or more, fewer shared parameters (adapters.rank) or a larger "
            "epsilon; or mechanism: example, which protects each example of a user instead of the user"
        )

    # ---------------------------------------------------------------- participants

    def admit(self, selected: Sequence[int], round_index: int, *, releases: bool) -> list[int] | None:
        """Return the participants of a round, or None to end the run because the budget is spent.

        Args:
            selected: Indices of the users that the public schedule selects. Not used if the account is for participants
                drawn in secret (``account.sampled``).
            round_index: Number of the round, from 0.
            releases: Whether users upload anything in the round. A round without uploads costs no budget.
        """
        if self.account is None:  # no noise, so no budget
            return list(selected)
        if self.account.sampled and self.account.earlier:
            return self._draw_within_budget(round_index, releases=releases)
        if self.account.sampled:
            # A round costs all users the same, drawn or not, so the budget of user 0 stands for all.
            if releases and not self.account.affordable([0]):
                return None
            return self.draw_participants(round_index)
        if not releases:
            return list(selected)
        users_with_budget = self.account.affordable(selected)
        return users_with_budget or None

    def _draw_within_budget(self, round_index: int, *, releases: bool) -> list[int] | None:
        """Draw participants, and leave out those whose budget is spent; return None to end the run.

        Users have spent different amounts in earlier runs. They are left out after the draw, as if their changes were
        zero, so that the others are drawn with the same probability as before. Only users with budget are charged.

        Args:
            round_index: Number of the round, from 0.
            releases: Whether users upload anything in the round.
        """
        assert isinstance(self.account, UploadAccount)
        drawn = self.draw_participants(round_index)
        if not releases:
            return drawn
        self.account.drawable = self.account.affordable(range(len(self.users)))
        if not self.account.drawable:
            return None
        has_budget = set(self.account.drawable)
        return [user for user in drawn if user in has_budget]

    def draw_participants(self, round_index: int) -> list[int]:
        """Draw the participants of round ``round_index`` (from 0) with the secret key; return their indices.

        With Poisson sampling each user takes part independently of the others, so there may be none. Otherwise the
        number of participants is fixed.
        """
        assert isinstance(self.participation, float | int)  # the fraction of users to draw
        draws = [float(uniform(1, self.key, name, round_index, "participation")[0]) for name in self.users]
        all_users = range(len(draws))
        if self.privacy.sampling == "poisson":
            return [user for user in all_users if draws[user] < self.participation]
        smallest_draw_first = sorted(all_users, key=lambda user: draws[user])
        num_participants = sample_size(self.participation, len(draws))
        return sorted(smallest_draw_first[:num_participants])

    def expected_participants(self, round_index: int) -> float:
        """Return the expected number of participants of round ``round_index`` (from 0).

        The round's sum is divided by it, as it is public, unlike the number of users drawn.
        """
        return expected_participants(self.privacy, self.participation, len(self.users), round_index)

    # ---------------------------------------------------------------- state and results

    @property
    def state(self) -> Tree:
        """Tensors for the checkpoint: each user's number of noisy uploads, and the clip norm; empty without noise."""
        if self.account is None:
            return {}
        return {COUNTS: self.account.counts.clone(), BOUND: torch.tensor(self.bound, dtype=torch.float64)}

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of the state whose tensors have one entry per user: that of the number of releases (noisy uploads)."""
        return frozenset() if self.account is None else frozenset({COUNTS})

    def restore(self, state: Tree) -> None:
        """Restore each user's number of noisy uploads (releases) and the clip norm from a checkpoint."""
        if self.account is not None:
            self.account.counts = state[COUNTS].cpu().clone()
            self.bound = float(state[BOUND])

    @property
    def metrics(self) -> dict[str, object]:
        """Epsilon so far, with the settings behind it."""
        return {} if self.account is None else self.account.metrics(self.bound)


class Central(DifferentialPrivacy):
    """Central differential privacy: users clip their changes; the server clips them again and adds noise to the sum.

    The clip norm may follow a quantile of the users' norms (Andrew et al. 2021, arXiv:1905.03871). With secure sums
    each user adds a part of the noise, see :class:`comingle.privacy.secure_sum.SecureSum`.
    """

    def client_update(self, update: Update) -> Update:
        """Return the clipped changes times the users' weights.

        If the clip norm is adaptive, each user also reports 1 if its change was within the clip norm, else 0.
        """
        if self.privacy.secure_aggregation is not None:
            return update  # `SecureSum.client_update` clips instead.
        clipped_update = clip_update(update, self.privacy)
        if not self.privacy.adaptive:
            return clipped_update
        is_within = norms(update.changes) <= update.bounds
        reports = {**update.reports, WITHIN: is_within.long().cpu()}
        return replace(clipped_update, reports=reports)

    def download(self, users: int) -> Tree:
        """Return the clip norm for each of ``users`` users, if it is adaptive."""
        if not self.privacy.adaptive:
            return {}
        return {CLIP_NORM: torch.full((users, 1), self.bound, dtype=torch.float64)}

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Return the model plus the noisy mean of the users' changes, as a single upload.

        A user's change is its upload minus the model that it downloaded.

        Args:
            received: The uploads of a round. With Poisson sampling there may be none; the mean is then noise only.
            server_round: The round on the server: its number, the model before it, and the participants' names.
        """
        model, uploads = server_round.model, received.tensors
        changes: Tree = {}
        if uploads:
            num_users = len(server_round.names)
            model_of_each = {name: t.unsqueeze(0).expand(num_users, *t.shape) for name, t in model.items()}
            # A user downloads and uploads only rows up to its LoRA rank; other rows are 0 in both, so the change is 0.
            downloads = without_padding(model_of_each, received.ranks)
            changes = {name: t.double() - downloads[name].double() for name, t in uploads.items()}
        within = received.reports.get(WITHIN)  # which changes were within the clip norm; None unless it is adaptive
        mean = self.mean(changes, model, server_round.round_index, within)
        return mean_as_upload(model, mean, received.roles)

    def mean(self, changes: Tree, model: Tree, round_index: int, within: Tensor | None) -> Tree:
        """Return the mean change with noise, ``(sum_u clip(change_u) + noise) / users``; adapt an adaptive clip norm.

        The divisor ``users`` is the expected number of participants, which is public.

        Args:
            changes: Changes ``(users, *shape)``; empty if no user was drawn.
            model: The model, for its shapes.
            round_index: Number of the round, from 0.
            within: 1 for each participant whose change is within the clip norm, 0 for others; None if the clip norm is
                not adaptive, or if no user was drawn.
        """
        users = self.expected_participants(round_index)
        sums = self.clipped_sum(changes, model)
        multiplier = self.privacy.multiplier
        if self.privacy.adaptive:
            multiplier = self._multiplier_of_sum(users)
        noised = add_noise(sums, multiplier * self.bound, self.key, round_index, "central noise")
        if self.privacy.adaptive:
            self._adapt_clip_norm(within, users, round_index)
        return {name: t / users for name, t in noised.items()}

    def clipped_sum(self, changes: Tree, model: Tree) -> Tree:
        """Clip each user's change to the clip norm, and return the sum of the clipped changes, float64.

        Args:
            changes: Changes ``(users, *shape)``; empty if no user was drawn, for which the sum is 0.
            model: The model, for its shapes.
        """
        if not changes:
            return {name: torch.zeros_like(t, dtype=torch.float64) for name, t in model.items()}
        return {name: t.sum(0) for name, t in clipped(changes, self.bound).items()}

    def _count_deviation(self, users: float) -> float:
        """Return the standard deviation of the noise on the number of users whose change is within the clip norm.

        It is ``users / 20`` as in Andrew et al. 2021 (arXiv:1905.03871), but at least the noise multiplier z:
        :meth:`_multiplier_of_sum` is then at most ``1.16 z``.

        Args:
            users: Expected number of users in the round.
        """
        return max(users / 20, self.privacy.multiplier)

    def _multiplier_of_sum(self, users: float) -> float:
        """Return the noise multiplier of the sum of changes if the clip norm is adaptive: more than the recipe's.

        The server then also reveals a noisy count of the users whose change is within the clip norm. With
        ``(z^-2 - (2 s)^-2)^(-1/2)`` sum and count together reveal as much as a sum alone with the recipe's multiplier
        z; s is the standard deviation of the noise on the count (Andrew et al. 2021, arXiv:1905.03871, Theorem 1).

        Args:
            users: Expected number of users in the round.
        """
        z, s = self.privacy.multiplier, self._count_deviation(users)
        return (z**-2 - (2 * s) ** -2) ** -0.5

    def _adapt_clip_norm(self, within: Tensor | None, users: float, round_index: int) -> None:
        """Move the clip norm towards a quantile of users' norms: ``bound *= exp(-clip_rate (share - clip_quantile))``.

        ``share`` is the noisy share of users whose change is within the clip norm ``bound``, clamped to [0, 1].

        Args:
            within: 1 for each participant whose change was within the clip norm, else 0; None if no user was drawn.
            users: Expected number of users in the round.
            round_index: Number of the round, from 0.
        """
        # Each user adds 1/2 or -1/2, so one user changes the sum by at most 1/2.
        centred_count = 0.0 if within is None else float((within.double() - 0.5).sum())
        # The count is part of the seed: a repeated round draws the same noise only if it has the same count.
        standard_noise = float(gaussian((1,), self.key, round_index, "count noise", repr(centred_count))[0])
        noise = self._count_deviation(users) * standard_noise
        noisy_share = (centred_count + noise) / users + 0.5  # 1/2 was subtracted for each user
        share = min(1.0, max(0.0, noisy_share))
        self.bound *= math.exp(-self.privacy.clip_rate * (share - self.privacy.clip_quantile))


class Local(DifferentialPrivacy):
    """Local differential privacy: users clip their changes and add noise, whatever the server does."""

    account_type = ReplacingAccount

    def why_unsupported(self, method: Method) -> str:
        """Return an empty string: each upload has its own noise, so the mechanism supports every method."""
        return ""

    def client_update(self, update: Update) -> Update:
        """Return the clipped changes times the users' weights, plus noise from a separate stream for each user.

        The standard deviation of the noise is the noise multiplier times the user's clip norm.
        """
        changes = clip_update(update, self.privacy).changes
        noisy_changes: list[Tree] = []  # of each user
        for i, user in enumerate(update.names):
            clipped_change = {name: t[i] for name, t in changes.items()}
            deviation = self.privacy.multiplier * float(update.bounds[i])
            purpose_of_noise = (user, update.round_number, "local noise")
            noisy_changes.append(add_noise(clipped_change, deviation, self.key, *purpose_of_noise))
        stacked = {name: torch.stack([change[name] for change in noisy_changes]) for name in changes}
        # LoRA factors are padded to the largest rank; the padding of users of smaller ranks must stay zero.
        return replace(update, changes=without_padding(stacked, update.ranks))

    def skip_round(self, received: Sequence[int]) -> None:
        """End a round without aggregation.

        Its uploads still cost their users budget: the server has seen them, and their noise is each user's own.

        Args:
            received: Indices of the users whose uploads have arrived.
        """
        super().skip_round(received)
        assert self.account is not None
        self.account.charge(received)


class Unnoised(DifferentialPrivacy):
    """No noise: secure sums only, which :class:`comingle.privacy.secure_sum.SecureSum` computes."""

    def check_noise(self) -> None:
        """Check the settings of ``mechanism: none``: there must be a secure sum, and no noise.

        Raises:
            RecipeError: A check fails.
        """
        if self.privacy.secure_aggregation is None:
            raise RecipeError("privacy.mechanism: none needs secure_aggregation; by itself it hides nothing")
        if self.privacy.noise_multiplier is not None or self.privacy.epsilon is not None:
            raise RecipeError("privacy.mechanism: none adds no noise; remove noise_multiplier and epsilon")


class Example(DifferentialPrivacy):
    """DP-SGD: each local step on shared tensors uses a noisy sum of clipped gradients of single examples.

    Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv:1607.00133, Algorithm 1. Each example is
    drawn independently (Poisson sampling), and the sum of clipped gradients is divided by the expected number of
    examples. Neighbouring data sets differ in whether one example is present or contributes nothing; their size is
    public.

    Draws and noise depend on the user's key and on the tensors at the start of the step. A server that requests a round
    again with other tensors gets another batch and other noise; with the same tensors it gets the same answer.
    """

    account_type = StepAccount

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Check that training data reach the uploads only through gradients that are clipped and noised.

        Also check that gradients of single examples can be computed in the recipe's dtype.

        Raises:
            RecipeError: A check fails.
        """
        super().supports(method, recipe)
        clip_norm = recipe.training.experts.clip_norm
        if clip_norm is not None:
            raise RecipeError(
                f"training.experts.clip_norm: got {clip_norm:g}; with privacy.mechanism: example, a common norm of "
                "noised and plain gradients would leak the plain ones into uploads; allowed: null (privacy.clip_norm "
                "clips instead)"
            )
        if getattr(recipe.data, "train_on_valid", False):
            raise RecipeError(
                "data.train_on_valid: with privacy.mechanism: example, validation text only trains routers, which have "
                "no noise; allowed: false"
            )
        if recipe.runtime.dtype == "float16":
            raise RecipeError(
                "runtime.dtype: got 'float16'; with privacy.mechanism: example, gradients of single examples would "
                "overflow or underflow before clipping; allowed: auto, bfloat16, float32, float64"
            )

    def why_unsupported(self, method: Method) -> str:
        """Return why DP-SGD cannot protect this method's uploads; an empty string if it can."""
        return _why_beyond_gradients(method)

    def check_weights(self, recipe: Recipe) -> None:
        """Check that the recipe gives all users the same weight, which DP-SGD requires.

        Raises:
            RecipeError: It weighs users by their amounts of data, or sets ``privacy.weight_cap``.
        """
        if recipe.training.weighting != "uniform" or self.privacy.weight_cap is not None:
            raise RecipeError(
                "training.weighting: with privacy.mechanism: example, all users have the same weight and do not send "
                "amounts of data; allowed: uniform, without privacy.weight_cap"
            )

    def warn(self, num_shared: int, rounds: int) -> str | None:
        """Return None: the noise is in users' steps, not in uploads."""
        return None

    # ---------------------------------------------------------------- on a client

    def client_gradients(self, step: PrivateStep) -> tuple[Float[Tensor, " users"], Tree]:
        """Draw a batch for each user; return each user's mean loss and noisy mean gradients.

        A batch is split into chunks of ``step.batch`` examples, as many as fit into one pass. Their losses and clipped
        gradients are added up. The sums are divided by the expected size of the batch, which is public, unlike the
        actual size.

        Args:
            step: The users' work, keys of their random streams, and the clipped sums of given examples.
        """
        batches = [self.draw_examples(work, *stream) for work, stream in zip(step.works, step.streams, strict=True)]
        gradient_sums: Tree = {}  # (users, *shape)
        loss_sums = torch.zeros(len(batches), dtype=torch.float64)
        for chunk in padded(batches, step.batch).split(step.batch, dim=1):  # (users, step.batch) indices of examples
            chunk_gradients, chunk_losses = step.clipped_sums(chunk, self.privacy.first_bound)
            for name, t in chunk_gradients.items():
                gradient_sums[name] = gradient_sums.get(name, torch.zeros_like(t)) + t
            loss_sums += chunk_losses
        gradients_by_user: list[Tree] = []
        for i, (work, stream) in enumerate(zip(step.works, step.streams, strict=True)):
            sums_of_user = {name: t[i] for name, t in gradient_sums.items()}
            gradients_by_user.append(self.noised(sums_of_user, work, *stream))
        stacked: Tree = {}
        for name in gradient_sums:
            stacked[name] = torch.stack([gradients[name] for gradients in gradients_by_user])
        expected_sizes = torch.tensor([work.expected for work in step.works], dtype=torch.float64)
        return loss_sums / expected_sizes, stacked

    def draw_examples(self, work: Work, *stream: str | int) -> Int64[Tensor, " drawn"]:
        """Draw a batch: each of a user's examples with probability ``work.rate``; return the indices of those drawn.

        Args:
            work: Amount of the user's work, with its number of examples.
            stream: Purpose of the draws, such as user and step, which determines them together with the secret key.
        """
        draws = uniform(work.examples, self.key, *stream, "examples")
        return torch.from_numpy(np.flatnonzero(draws < work.rate))

    def noised(self, gradient_sums: Tree, work: Work, *stream: str | int) -> Tree:
        """Return one user's noisy mean gradients ``(gradient_sums + N(0, (z C)^2)) / work.expected``, float64.

        z is the noise multiplier and C the clip norm.

        Args:
            gradient_sums: Sums of the clipped gradients of a batch.
            work: Amount of the user's work; ``work.expected`` is the expected number of examples in a batch.
            stream: Purpose of the noise, such as user and step, which determines it together with the secret key.
        """
        z = multiplier_of(self.privacy, work)  # the noise multiplier
        clip_norm = self.privacy.first_bound  # C
        noisy_sums = add_noise(gradient_sums, z * clip_norm, self.key, *stream, "example noise")
        return {name: t / work.expected for name, t in noisy_sums.items()}

    # ---------------------------------------------------------------- on the server

    def admit(self, selected: Sequence[int], round_index: int, *, releases: bool) -> list[int] | None:
        """Charge the selected users whose budget allows the steps of a round, and return them.

        Without such a user return None, which ends the run.

        Args:
            selected: Indices of the selected users.
            round_index: Not used.
            releases: Not used.
        """
        assert self.account is not None
        admitted = self.account.affordable(selected)
        self.account.charge(admitted)  # before the round, as a user's steps cost budget even if no upload arrives
        return admitted or None


# -------------------------------------------------------------------- a run's mechanisms


def make_mechanisms(
    privacy: PrivacySection | None,
    aggregation: AggregationSection | None = None,
    *,
    sums: Sums | None = None,
    participation: Participation = 1.0,
    users: Sequence[str] = (),
    key: str = "",
) -> tuple[PrivacyMechanism, ...]:
    """Return the mechanisms of a run in the order in which they process uploads: noise, a secure sum, a robust rule.

    Args:
        privacy: Section ``privacy`` of the recipe; None for no noise and no secure sum.
        aggregation: Section ``aggregation`` of the recipe; None or the rule ``mean`` for no robust rule.
        sums: Settings of the run's secure sums; None before users and rounds are known.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Names of all users; not needed on a client.
        key: Key of the noise.
    """
    mechanisms: list[PrivacyMechanism] = []
    if privacy is not None:
        implementation = MECHANISMS[privacy.mechanism].load()
        mechanisms.append(implementation(privacy=privacy, participation=participation, users=tuple(users), key=key))
        if privacy.secure_aggregation is not None:
            mechanisms.append(SecureSum(privacy=privacy, sums=sums, key=key))
    if aggregation is not None and not aggregation.is_mean:
        mechanisms.append(RobustRule(aggregation=aggregation))
    return tuple(mechanisms)


def check_supported(method: Method, recipe: Recipe) -> None:
    """Check that all mechanisms of a recipe support the method and the other settings.

    Raises:
        RecipeError: One or more do not; the message has all reasons.
    """
    mechanisms = make_mechanisms(recipe.privacy, recipe.aggregation)
    # Secure sums come first: they support the fewest methods, so their reason is the most useful.
    secure_sums = [mechanism for mechanism in mechanisms if isinstance(mechanism, SecureSum)]
    other_mechanisms = [mechanism for mechanism in mechanisms if not isinstance(mechanism, SecureSum)]
    checks = [partial(mechanism.supports, method, recipe) for mechanism in secure_sums + other_mechanisms]
    run_checks(*checks)  # `supports` raises a RecipeError with its reason; run_checks joins the reasons of all.


def release_of(privacy: PrivacySection, participation: Participation, users: int) -> Release:
    """Return the noise multiplier and the sampling of one noisy upload or step, from which epsilon is computed.

    Args:
        privacy: Section of the recipe, with a known noise multiplier.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Number of users of the run.
    """
    mechanism_type = MECHANISMS[privacy.mechanism].load()
    return mechanism_type.account_type.release_of(privacy, participation, users)


def calibrate(privacy: PrivacySection, participation: Participation, users: int, count: int) -> float:
    """Return the smallest noise multiplier with which a whole run stays within the recipe's epsilon.

    Args:
        privacy: Section ``privacy`` of the recipe, with epsilon, delta and the accountant.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Number of users of the run.
        count: Number of rounds in which one user takes part.

    Raises:
        RecipeError: No amount of noise is enough, or the package dp-accounting is not installed.
    """

    def release_with(multiplier: float) -> Release:
        privacy_with_noise = privacy.model_copy(update={"noise_multiplier": multiplier})
        return release_of(privacy_with_noise, participation, users)

    return least_noise(privacy, count, release_with)


def clip_update(update: Update, privacy: PrivacySection) -> Update:
    """Clip each user's change to its clip norm and multiply it by its weight.

    The change of user u becomes ``change_u * min(1, bounds_u / norm(change_u)) * weight_u``. The weight is
    ``min(1, counts_u / weight_cap)``, or 1 without a cap.

    Args:
        update: A cohort's changes; ``bounds`` are the users' clip norms, ``counts`` their amounts of data.
        privacy: Section ``privacy`` of the recipe.
    """
    clipped_changes = clipped(update.changes, update.bounds)
    weights = capped_weights(update.counts, privacy.weight_cap)
    return replace(update, changes=scaled(clipped_changes, weights))


def padded(drawn: Sequence[Int[Tensor, " _"]], size: int) -> Int[Tensor, "users width"]:
    """Stack users' indices of examples as rows, padded with ``PAD`` to a common width, a multiple of ``size``.

    Users draw different numbers of examples, but one pass takes equally many of each user.

    For example, ``[3, 0, 2]`` and ``[1]`` with size 2 become ``[3, 0, 2, PAD]`` and ``[1, PAD, PAD, PAD]``.

    Args:
        drawn: Indices of each user's examples.
        size: Number of examples in one chunk of a batch. There is at least one chunk, even without examples.
    """
    most_examples = max(len(indices) for indices in drawn)
    num_chunks = max(1, math.ceil(most_examples / size))
    rows = torch.full((len(drawn), num_chunks * size), PAD, dtype=torch.int64)
    for row, indices in zip(rows, drawn, strict=True):
        row[: len(indices)] = indices
    return rows


# -------------------------------------------------------------------- unsupported methods


def _why_unprotected(method: Method) -> str:
    """Return why no mechanism can protect a method's uploads; an empty string if one can.

    Mechanisms clip and noise the change of a user's shared tensors since the download. So a user must reveal nothing
    but this change, and must start from the download.
    """
    hooks = method.client.parts  # what the method does on clients besides training steps
    reports = sorted(name for hook in hooks for name in hook.reports)
    if reports:
        return f"its users report {', '.join(reports)} with each upload, which clipping and noise do not cover"
    if method.server.peer_to_peer or any(type(hook).receive is not ClientHook.receive for hook in hooks):
        return "its users combine downloads with their own data, so changes against the download are not bounded"
    roles_not_downloaded = method.shared - method.received
    if roles_not_downloaded:
        return "its users start from their own tensors, not from the download, so changes against it are not bounded"
    if method.placement.once:
        return "users upload factors once that they make of their data, not changes against a download"
    if any(hook.resizes for hook in hooks):  # LoRA ranks are pruned by their importance for a user's data
        return "ranks depend on users' data and are visible to all; allowed: prune: false"
    return ""


_HOOKS_IN_ROUND = ("received", "begin", "stepped", "end", "penalty")
"""Methods of a client hook that run in a round besides phases, and may read data."""


def _why_beyond_gradients(method: Method) -> str:
    """Return why a method's training data reach uploads by another way than noised gradients; empty if they do not.

    DP-SGD protects uploads only if training data reach the shared tensors through these gradients alone.
    """
    client = method.client
    if method.placement.mixture is not None:
        return "mixture weights are trained without noise and scale every gradient"
    # Shared parts of trained roles, such as one LoRA factor, "attention.a", of the role "attention".
    partly_shared: list[str] = []
    for role in sorted(method.shared):
        whole_role, dot, _part = role.partition(".")
        if dot and whole_role in client.trained:
            partly_shared.append(role)
    if partly_shared:
        return (
            f"it shares only {', '.join(partly_shared)}, whose gradients depend on the other factor, which stays "
            "local and has no noise"
        )
    for phase in method.sharing:
        trains_on_validation_data = phase.stream != "train"
        if trains_on_validation_data:
            names = ", ".join(sorted(phase.roles & method.shared))
            return f"it trains {names} on validation data, which the account does not count"
    if method.placement.residual is not None:  # the server also makes a low-rank change of the frozen weights
        return "its server changes frozen weights, which are not part of the model whose noised gradients are sent"
    if any(phase.turns > 1 for phase in client.phases):
        return "its phases alternate between rounds, but the account counts the same steps in every round"
    if client.accumulates:
        return "gradients that router steps pass to shared experts have no noise; allowed: accumulate_gradients: false"
    for hook in client.parts:
        is_after_last_upload = hook in client.finishing
        validates_before_upload = hook.validates and not is_after_last_upload
        computes_training_losses = hook.sweeps
        runs_phases = bool(hook.before)
        if computes_training_losses or runs_phases or validates_before_upload or _may_change_tensors_in_round(hook):
            return f"{type(hook).__name__} changes users' tensors by more than steps on noised gradients"
    return ""


def _may_change_tensors_in_round(hook: ClientHook) -> bool:
    """Return whether a client hook has code in a round, such as ``stepped``, by which data might reach the tensors.

    Such a method is refused under DP-SGD, which only noises gradients. A ``begin`` that only resets the optimizer's
    moments is harmless.
    """
    for name in _HOOKS_IN_ROUND:
        is_overridden = getattr(type(hook), name) is not getattr(ClientHook, name)
        only_resets_moments = name == "begin" and hook.only_resets_moments
        if is_overridden and not only_resets_moments:
            return True
    return False
