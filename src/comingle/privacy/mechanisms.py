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
    """Type of the account: it defines what a round reveals."""

    def __post_init__(self) -> None:
        self.bound = self.bound or self.privacy.first_bound
        if self.privacy.noisy:
            self.account = self.account_type(privacy=self.privacy, participation=self.participation, users=self.users)

    @property
    def needs_key(self) -> bool:
        """Whether the noise is secret."""
        return self.privacy.noisy and self.privacy.noise == "secret"

    # ---------------------------------------------------------------- before a run

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Raise an error if noise does not protect all that users send, or if privacy settings are wrong.

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
        reason = _why_data_unprotected(method) or self.why_unsupported(method)
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
        """Return the reason why the mechanism does not cover a method that shares something; empty if it does."""
        if method.server.clipped_mean:  # its result is a mean, so that clipping bounds each user's influence
            return ""
        return (
            f"its server ({type(method.server).__name__}) does not publish a mean with weights that are independent of "
            "the uploads, so clipping does not bound a user's influence; allowed: mechanism: local"
        )

    def check_weights(self, recipe: Recipe) -> None:
        """Check that users' weights do not depend on the data of others, and that no setting of weights is ignored.

        Raises:
            RecipeError: Weights depend on other users' data, as there is no cap, or a cap is given for equal weights.
        """
        if recipe.training.weighting != "uniform" and self.privacy.weight_cap is None:
            raise RecipeError(
                f"privacy.weight_cap: missing; with training.weighting: {recipe.training.weighting} give the amount of "
                "data from which a user has the full weight, because weights must not depend on other users' data"
            )
        if recipe.training.weighting == "uniform" and self.privacy.weight_cap is not None:
            raise RecipeError("privacy.weight_cap: has no effect with training.weighting: uniform; remove it")

    def check_server(self, method: Method, layout: Layout, users: int) -> None:
        """Check that delta is small enough for the number of users, and that noise can be added to the shared tensors.

        Args:
            method: The method.
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
        # Names of shared tensors with running means and variances of batch norm.
        statistics = [
            slot.name for slot in layout.slots if STATISTICS in slot.roles and any(slot.chosen(method.shared))
        ]
        if statistics:
            raise RecipeError(
                f"privacy: method {method.name} shares running statistics of batch norm ({statistics[0]}, ...), which "
                "noise could make negative; allowed: a net with group norm, such as net:resnet9-group"
            )

    def warn(self, num_shared: int, rounds: int) -> str | None:
        """Return a warning if the noise exceeds all that users can change, else None.

        With n users in a round and the noise multiplier z, the mean change is at most the clip norm C, and the noise on
        it has norm ``z C sqrt(d) / n``, or ``z C sqrt(d / n)`` if each user adds noise. Over R rounds changes add up to
        ``R C``, noise to ``sqrt(R)`` times its norm.

        Args:
            num_shared: Number d of parameters that a user shares.
            rounds: Rounds R of the whole run, each with a release.
        """
        if not self.privacy.noisy:
            return None
        users, z, is_local = self.expected(0), self.privacy.multiplier, self.privacy.noise_at == "upload"
        round_ratio = z * math.sqrt(num_shared / users) / (1.0 if is_local else math.sqrt(users))  # noise over change
        run_ratio = round_ratio / math.sqrt(max(1, rounds))
        if run_ratio <= 1:
            return None
        needed_users = users * run_ratio**2 if is_local else users * run_ratio
        return (
            f"privacy: too much noise to learn: with noise_multiplier {z:.3g}, clip_norm {self.bound:g}, {users:,.4g} "
            f"users per round and {num_shared:,} shared parameters the norm of the noise is {round_ratio:,.3g} times "
            f"that of the largest possible change in one round, and {run_ratio:,.3g} times over all {rounds} rounds. "
            f"Use about {needed_users:,.0f} users or more, fewer shared parameters (adapters.rank) or a larger "
            "epsilon; or mechanism: example, which protects each example of a user instead of the user"
        )

    # ---------------------------------------------------------------- participants

    def admit(self, selected: Sequence[int], round_index: int, *, releases: bool) -> list[int] | None:
        """Return the participants of a round: the selected users whose budget is not spent.

        If there are none, return None, which ends the run. With privacy amplification by sampling, the draw of
        participants must stay secret. Then ``selected`` is ignored, and :meth:`draw` draws them with the secret key.

        Args:
            selected: Indices of the users selected by the public schedule.
            round_index: Number of the round, from 0.
            releases: Whether users upload anything in the round. A round without uploads costs no budget, so budgets
                are not checked.
        """
        if self.account is None:  # no noise, so no budget
            return list(selected)
        if self.account.sampled:
            # With sampling a round costs all users the same, drawn or not, so the first user's budget stands for all.
            is_affordable = not releases or bool(self.account.affordable([0]))
            return self.draw(round_index) if is_affordable else None
        if not releases:
            return list(selected)
        return self.account.affordable(selected) or None

    def draw(self, round_index: int) -> list[int]:
        """Draw the participants of round ``round_index`` (from 0) with the secret key.

        With Poisson sampling each user takes part independently of the others, so there may be none; otherwise the
        number of participants is fixed.
        """
        assert isinstance(self.participation, float | int)
        draws = [float(uniform(1, self.key, name, round_index, "participation")[0]) for name in self.users]
        all_users = range(len(draws))
        if self.privacy.sampling == "poisson":
            return [user for user in all_users if draws[user] < self.participation]
        by_draw = sorted(all_users, key=draws.__getitem__)
        return sorted(by_draw[: sample_size(self.participation, len(draws))])

    def expected(self, round_index: int) -> float:
        """Return the expected number of participants of round ``round_index`` (from 0), the divisor of its sum."""
        return expected_participants(self.privacy, self.participation, len(self.users), round_index)

    # ---------------------------------------------------------------- state and results

    @property
    def state(self) -> Tree:
        """Number of releases of each user, and the clip norm, if there is noise."""
        if self.account is None:
            return {}
        return {COUNTS: self.account.counts.clone(), BOUND: torch.tensor(self.bound, dtype=torch.float64)}

    @property
    def by_user(self) -> frozenset[str]:
        """Key of the number of releases."""
        return frozenset() if self.account is None else frozenset({COUNTS})

    def restore(self, state: Tree) -> None:
        """Restore the number of releases and the clip norm from a checkpoint."""
        if self.account is not None:
            self.account.counts, self.bound = state[COUNTS].cpu().clone(), float(state[BOUND])

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
        """Return the clipped changes times the users' weights, and report who was within an adaptive clip norm."""
        if self.privacy.secure_aggregation is not None:
            return update  # the secure sum clips, to a norm that leaves room for rounding
        clipped_update = clip_update(update, self.privacy)
        if not self.privacy.adaptive:
            return clipped_update
        within = (norms(update.changes) <= update.bounds).long().cpu()
        return replace(clipped_update, reports={**update.reports, WITHIN: within})

    def download(self, users: int) -> Tree:
        """Return the clip norm, if it is adaptive."""
        return {CLIP_NORM: torch.full((users, 1), self.bound, dtype=torch.float64)} if self.privacy.adaptive else {}

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Return the model plus the mean change with noise, as one upload.

        Uploads are clipped again here, so the server need not trust users. Without participants the sum is noise only.

        Args:
            received: The uploads of a round, of which there may be none, and reports of who was within the clip norm.
            server_round: The round on the server: its number, the model before it, and the participants' names.
        """
        model, uploads, users = server_round.model, received.tensors, len(server_round.names)
        downloads: Tree = {}
        if uploads:  # with Poisson sampling a round may have no participants
            downloads = {name: t.unsqueeze(0).expand(users, *t.shape) for name, t in model.items()}
        # Entries beyond a user's LoRA rank are 0 in its upload, and 0 here too, so its change there is 0.
        downloads = without_padding(downloads, received.ranks)
        changes = {name: t.double() - downloads[name].double() for name, t in uploads.items()}
        mean = self.mean(changes, model, server_round.round_index, received.reports.get(WITHIN))
        return mean_as_upload(model, mean, received.roles)

    def mean(self, changes: Tree, like: Tree, round_index: int, within: Tensor | None) -> Tree:
        """Return the mean change with noise, float64: ``(sum_u clip(change_u) + noise) / expected``.

        Args:
            changes: Changes ``(users, *shape)``; empty if no user was drawn.
            like: The model, for its shapes.
            round_index: Number of the round, from 0.
            within: 1 for each user whose change is within an adaptive clip norm, 0 for others, from which the clip norm
                of the next round follows; None if there are no reports.
        """
        users = self.expected(round_index)
        sums = self.sums(changes, like)
        # An adaptive clip norm also depends on the number of users within it, so the round reveals both a noisy count
        # and a noisy sum. For the same epsilon the sum then needs more noise.
        multiplier = self._multiplier_beside_count(users) if self.privacy.adaptive else self.privacy.multiplier
        noised = add_noise(sums, multiplier * self.bound, self.key, round_index, "central noise")
        if self.privacy.adaptive:
            self._adapt_clip_norm(within, users, round_index)
        return {name: t / users for name, t in noised.items()}

    def sums(self, changes: Tree, like: Tree) -> Tree:
        """Clip each user's change to the clip norm ``bound``, and return the sum of the changes, float64.

        Args:
            changes: Changes ``(users, *shape)``; empty if no user was drawn, and the sum is then zero.
            like: The model, for its shapes.
        """
        if not changes:
            return {name: torch.zeros_like(t, dtype=torch.float64) for name, t in like.items()}
        return {name: t.sum(0) for name, t in clipped(changes, self.bound).items()}

    def _count_deviation(self, users: float) -> float:
        """Return the standard deviation of the noise on the count of users within the clip norm.

        The deviation is a twentieth of the number of users, the choice of Andrew et al. 2021, but at least the noise
        multiplier z of the settings. With z / 2 or less, the count alone would reveal as much as z allows, and nothing
        would be left for the sum of changes (:meth:`_multiplier_beside_count`).

        Args:
            users: Expected number of users in the round.
        """
        return max(users / 20, self.privacy.multiplier)

    def _multiplier_beside_count(self, users: float) -> float:
        """Return the noise multiplier of the sum of changes if an adaptive clip norm makes a round reveal a count too.

        The count is that of users within the clip norm, with noise of standard deviation s. The result is
        ``(z^-2 - (2 s)^-2)^(-1/2)`` with z the multiplier of the settings. Sum and count together then reveal as much
        as a sum alone with z (Andrew et al. 2021, Theorem 1). A user moves the centred count by 1/2, so the count's own
        noise multiplier is 2 s.

        Args:
            users: Expected number of users in the round.
        """
        return (self.privacy.multiplier**-2 - (2 * self._count_deviation(users)) ** -2) ** -0.5

    def _adapt_clip_norm(self, within: Tensor | None, users: float, round_index: int) -> None:
        """Move the clip norm towards the quantile of users' norms: ``bound *= exp(-rate (share - quantile))``.

        ``share`` is the share of users whose change is within the bound, with noise. Each user counts as +1/2 or -1/2,
        which has half the sensitivity of a count. The noisy share is clamped to [0, 1], so the bound changes by a
        factor of at most ``exp(rate)``.

        Args:
            within: 1 for each user within the bound, 0 for others; None if there are no reports.
            users: Expected number of users in the round.
            round_index: Number of the round, from 0.
        """
        centred = float((within.double() - 0.5).sum()) if within is not None else 0.0
        # Seeded with the count too. If a round is repeated, an equal count gets the same noise. Different counts never
        # share noise, as their difference would then be revealed without noise.
        draw = float(gaussian((1,), self.key, round_index, "count noise", repr(centred))[0])
        noise = self._count_deviation(users) * draw
        share = min(1.0, max(0.0, (centred + noise) / users + 0.5))
        self.bound *= math.exp(-self.privacy.clip_rate * (share - self.privacy.clip_quantile))


class Local(DifferentialPrivacy):
    """Local differential privacy: users clip their changes and add noise, whatever the server does."""

    account_type = ReplacingAccount

    def why_unsupported(self, method: Method) -> str:
        """Return an empty string: noise covers each upload by itself."""
        return ""

    def client_update(self, update: Update) -> Update:
        """Return the clipped changes times the users' weights, with noise from a separate stream for each user.

        The noise has a standard deviation of the noise multiplier times the user's clip norm, ``update.bounds``.
        Padding beyond a user's LoRA rank gets no noise.
        """
        changes = clip_update(update, self.privacy).changes
        rows = [
            add_noise(
                {key: t[i] for key, t in changes.items()},
                self.privacy.multiplier * float(update.bounds[i]),
                self.key, name, update.round_number, "local noise",
            )
            for i, name in enumerate(update.names)
        ]  # fmt: skip
        noised = {key: torch.stack([row[key] for row in rows]) for key in changes}
        return replace(update, changes=without_padding(noised, update.ranks))

    def skip_round(self, received: Sequence[int]) -> None:
        """Charge uploads that were sent, although they change nothing."""
        super().skip_round(received)
        assert self.account is not None
        self.account.charge(received)


class Unnoised(DifferentialPrivacy):
    """No noise: secure sums only, which :class:`comingle.privacy.secure_sum.SecureSum` computes."""

    def check_noise(self) -> None:
        """Check that there is a secure sum, and that no noise is given."""
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
        """Check that uploads depend on users' training data only by gradients that are clipped and have noise.

        Also check that single examples' gradients can be computed in the recipe's dtype.

        Raises:
            RecipeError: A check fails.
        """
        super().supports(method, recipe)
        if (clip_norm := recipe.training.experts.clip_norm) is not None:
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
        """Return the reason why uploads would depend on users' data other than by noisy gradients; else empty."""
        return _why_gradients_unprotected(method)

    def check_weights(self, recipe: Recipe) -> None:
        """Check that all users have the same weight."""
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
        """Draw a batch for each user; return the user's mean loss and noisy mean gradients on it.

        Both are sums divided by the expected size of the batch, which is public; the actual size depends on the draw of
        private examples. A batch is split into parts of ``step.batch`` examples, whose sums are added up.

        Args:
            step: The users' work, keys of their random streams, and the clipped sums of given examples.
        """
        drawn = [self.draw_examples(work, *stream) for work, stream in zip(step.works, step.streams, strict=True)]
        sums: Tree = {}
        losses = torch.zeros(len(drawn), dtype=torch.float64)
        for part in padded(drawn, step.batch).split(step.batch, 1):
            part_sums, part_losses = step.clipped_sums(part, self.privacy.first_bound)
            sums = {name: sums.get(name, torch.zeros_like(t)) + t for name, t in part_sums.items()}
            losses += part_losses
        gradients_of_users = [
            self.noised({name: t[i] for name, t in sums.items()}, work, *stream)
            for i, (work, stream) in enumerate(zip(step.works, step.streams, strict=True))
        ]
        mean_losses = losses / torch.tensor([work.expected for work in step.works], dtype=torch.float64)
        gradients = {name: torch.stack([of_user[name] for of_user in gradients_of_users]) for name in sums}
        return mean_losses, gradients

    def draw_examples(self, work: Work, *stream: str | int) -> Int64[Tensor, " drawn"]:
        """Return the indices of a user's examples in a batch; each is drawn with probability ``work.rate``."""
        draws = uniform(work.examples, self.key, *stream, "examples")
        return torch.from_numpy(np.flatnonzero(draws < work.rate))

    def noised(self, sums: Tree, work: Work, *stream: str | int) -> Tree:
        """Return one user's noisy mean gradients ``(sum of clipped gradients + N(0, (z C)^2)) / expected``, float64.

        z is the noise multiplier, C the clip norm, ``expected`` the expected number of examples in a batch.

        Args:
            sums: Sums of clipped gradients.
            work: Work of the user, which gives the expected number of examples and the noise multiplier z.
            stream: Key of the random stream.
        """
        deviation = multiplier_of(self.privacy, work) * self.privacy.first_bound
        noisy_sums = add_noise(sums, deviation, self.key, *stream, "example noise")
        return {name: t / work.expected for name, t in noisy_sums.items()}

    # ---------------------------------------------------------------- on the server

    def admit(self, selected: Sequence[int], round_index: int, *, releases: bool) -> list[int] | None:
        """Return the users whose budget allows the steps of a round, and charge them; None if there are none.

        None ends the run.

        Args:
            selected: Indices of the selected users.
            round_index: Number of the round, from 0.
            releases: Not used.
        """
        assert self.account is not None
        admitted = self.account.affordable(selected)
        self.account.charge(admitted)  # now, as a user's steps use its budget even if their result never arrives
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
        privacy: Section of the recipe.
        aggregation: Section of the recipe; without effect if its rule is the mean.
        sums: Secure sums of the run, once users and rounds are known.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: All users, on the server.
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
    # Secure sums are checked first: they support the fewest methods, so their reason is the most useful one.
    secure_sums = [mechanism for mechanism in mechanisms if isinstance(mechanism, SecureSum)]
    others = [mechanism for mechanism in mechanisms if not isinstance(mechanism, SecureSum)]
    # `supports` returns nothing; it raises a RecipeError with the reason if the mechanism does not support them.
    run_checks(*(partial(mechanism.supports, method, recipe) for mechanism in secure_sums + others))


def release_of(privacy: PrivacySection, participation: Participation, users: int) -> Release:
    """Return noise and sampling of a round under a recipe's mechanism, from which the epsilon of a user follows.

    Args:
        privacy: Section of the recipe, with a known noise multiplier.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Number of users of the run.
    """
    return MECHANISMS[privacy.mechanism].load().account_type.release_of(privacy, participation, users)


def calibrate(privacy: PrivacySection, participation: Participation, users: int, count: int) -> float:
    """Return the smallest noise multiplier with which ``count`` rounds of a recipe stay within its epsilon.

    It is found by bisection, to a few parts in ten thousand.

    Args:
        privacy: Section ``privacy`` of the recipe, with epsilon, delta and the accountant.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Number of users of the run.
        count: Number of rounds in which one user takes part in the whole run.

    Raises:
        RecipeError: No amount of noise is enough, or the package that computes it is not installed.
    """

    def release_with(multiplier: float) -> Release:
        return release_of(privacy.model_copy(update={"noise_multiplier": multiplier}), participation, users)

    return least_noise(privacy, count, release_with)


def clip_update(update: Update, privacy: PrivacySection) -> Update:
    """Return uploads with each user's change clipped to its norm and multiplied by its weight.

    ``change_u min(1, bound_u / norm_u) weight_u``; the weight is ``min(1, count_u / weight_cap)``, or 1 without a cap.

    Args:
        update: A cohort's changes, with the clip norm (bound) and the amount of data (count) of each user.
        privacy: Section ``privacy`` of the recipe.
    """
    weights = capped_weights(update.counts, privacy.weight_cap)
    return replace(update, changes=scaled(clipped(update.changes, update.bounds), weights))


def padded(drawn: Sequence[Int[Tensor, " _"]], size: int) -> Int[Tensor, "users width"]:
    """Stack users' indices of examples as rows, padded with ``PAD`` to a common width.

    Args:
        drawn: Indices of each user, maybe of different numbers.
        size: Number of examples in one part of a batch. The width is a multiple of ``size``, so that the rows can be
            split into parts. There is at least one part, even without examples.
    """
    num_parts = max(1, math.ceil(max(len(numbers) for numbers in drawn) / size))
    rows = torch.full((len(drawn), num_parts * size), PAD, dtype=torch.int64)
    for row, numbers in zip(rows, drawn, strict=True):
        row[: len(numbers)] = numbers
    return rows


# -------------------------------------------------------------------- unsupported methods


def _why_data_unprotected(method: Method) -> str:
    """Return why no mechanism can protect the users of a method; an empty string if one can.

    Mechanisms clip the change of a user's shared tensors against the download, and add noise to it. A method cannot be
    protected if users reveal more than this change, or if their change does not start from the download.
    """
    parts = method.client.parts
    if reported := sorted(name for part in parts for name in part.reports):
        return f"its users report {', '.join(reported)} with each upload, which clipping and noise do not cover"
    if method.server.peer_to_peer or any(type(part).receive is not ClientHook.receive for part in parts):
        return "its users combine downloads with their own data, so changes against the download are not bounded"
    if method.shared - method.received:
        return "its users start from their own tensors, not from the download, so changes against it are not bounded"
    if any(part.resizes for part in parts):
        return "ranks depend on users' data and are visible to all; allowed: prune: false"
    return ""


_ROUND_HOOKS = ("received", "begin", "stepped", "end", "penalty")
"""Client hooks that run in a round besides phases, and may read data."""


def _why_gradients_unprotected(method: Method) -> str:
    """Return why DP-SGD cannot protect the uploads of a method; an empty string if it can.

    DP-SGD adds noise to gradients of shared tensors. It protects an upload only if these gradients are the only way in
    which the user's training data changes the shared tensors.
    """
    client, trained = method.client, method.client.trained
    if method.placement.mixture is not None:
        return "mixture weights are trained without noise and scale every gradient"
    # Shared parts of roles, such as one of the two LoRA factors ("attention.a"). The role itself may be trained as a
    # whole.
    parts_of_roles = [shared for shared in method.shared if "." in shared]
    if shared_parts := sorted(shared for shared in parts_of_roles if shared.partition(".")[0] in trained):
        return (
            f"it shares only {', '.join(shared_parts)}, whose gradients depend on the other factor, which stays local "
            "and has no noise"
        )
    for phase in method.sharing:
        if phase.stream != "train":
            names = ", ".join(sorted(phase.roles & method.shared))
            return f"it trains {names} on validation data, which the account does not count"
    if method.placement.residual is not None:  # rank of the change that the server makes to frozen weights
        return "its server changes frozen weights, which are not part of the model whose noised gradients are sent"
    if any(phase.turns > 1 for phase in client.phases):
        return "its phases alternate between rounds, but the account counts the same steps in every round"
    if client.accumulates:
        return "gradients that router steps pass to shared experts have no noise; allowed: accumulate_gradients: false"
    for part in client.parts:
        # ``sweeps``: computes losses on all training data. ``before``: phases that the hook runs. ``validates``: reads
        # validation data, which hooks that run after the last upload (``finishing``) may do.
        reads_data = part.sweeps or bool(part.before) or (part.validates and part not in client.finishing)
        hooks = [hook for hook in _ROUND_HOOKS if not (hook == "begin" and part.only_resets_moments)]
        if reads_data or any(getattr(type(part), hook) is not getattr(ClientHook, hook) for hook in hooks):
            return f"{type(part).__name__} changes users' tensors by more than steps on noised gradients"
    return ""
