"""Secure sums: fixed-point grid, message sizes, and the sum itself.

Users send their changes from the last download as integers on a grid, so that masks can hide them. If there is noise,
each user adds a part of it: the parts of ``threshold - colluders`` users make up the noise of the account, and there is
no sum of fewer than ``threshold`` uploads. A part is a rounded Gaussian with a standard deviation of many grid steps.
The sum of parts is treated as the Gaussian of their joint standard deviation; for discrete Gaussians Kairouz et al.
2021 (arXiv:2102.06387) bound the difference: exponentially small in the squared standard deviation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.sections import Recipe
from comingle.config.settings import LEAST_USERS_IN_SUM, PrivacySection, SecureSection, Terms, no_sum_message
from comingle.methods.base import Method
from comingle.privacy.accounting import Participation, expected_participants
from comingle.privacy.base import PrivacyMechanism, Update
from comingle.privacy.noise import capped_weights, clipped, digest, gaussian, scaled
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import packed_bytes
from comingle.utils.errors import NoSumError, RecipeError
from comingle.utils.trees import Layout, Tree

DTYPES = {32: torch.int32, 64: torch.int64}
"""Dtypes of numbers modulo ``2^word``; their bits are read as unsigned."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of ``step`` from ``-bound`` to ``bound``, each sent as an integer of ``bits`` bits including the sign.

    A number is rounded to the nearest multiple: with step 0.5 the number 1.2 becomes the integer 2.
    """

    bound: float
    bits: int

    @property
    def largest(self) -> int:
        """Largest integer that is sent, ``2^(bits - 1) - 1``; it stands for the number ``bound``."""
        return 2 ** (self.bits - 1) - 1

    @property
    def step(self) -> float:
        """Distance of neighbouring grid points: the sent integer i stands for the number ``i * step``."""
        return self.bound / self.largest

    def slack(self, entries: int) -> float:
        """Return by how much rounding to the grid can increase the L2 norm of a vector: ``step / 2 * sqrt(entries)``.

        Uploads are clipped to a norm smaller by this, so that they still have at most the clip norm when rounded.
        Rounding changes each entry by at most half a step.

        Args:
            entries: Number of entries of the vector.
        """
        return self.step * math.sqrt(entries) / 2

    def to_integers(self, values: Float[Tensor, ...]) -> Int[Tensor, ...]:
        """Return the integers of the nearest grid points; values beyond the bound are clamped."""
        return self.clamp((values.double() / self.step).round()).long()

    def clamp(self, integers: Tensor) -> Tensor:
        """Clamp integers to the range from ``-largest`` to ``largest``."""
        return integers.clamp(-self.largest, self.largest)

    def num_beyond(self, values: Float[Tensor, "users ..."]) -> list[int]:
        """Return the number of entries of each user that exceed the bound in magnitude or are not finite."""
        is_within = values.abs() <= self.bound  # False for NaN
        return (~is_within).flatten(1).sum(1).tolist()


def flat(tree: Tree) -> Float[Tensor, "users entries"]:
    """Return each user's tensors, flattened and concatenated in the order of their names, float64."""
    return torch.cat([tree[name].double().flatten(1) for name in sorted(tree)], 1)


def shaped(row: Float[Tensor, " entries"], like: Tree) -> Tree:
    """Split one user's vector into tensors, the inverse of :func:`flat`.

    Args:
        row: Concatenated entries of all tensors, in the order of their names.
        like: Tensors with the wanted names and shapes, without a users dimension.
    """
    names = sorted(like)
    flat_tensors = torch.split(row, [like[name].numel() for name in names])
    return {name: t.view(like[name].shape) for name, t in zip(names, flat_tensors, strict=True)}


def as_words(row: Tensor) -> np.ndarray:
    """View an int32 or int64 tensor as unsigned integers of the same bits, to add masks modulo ``2^bits``.

    The array is of numpy, as torch supports few operations on unsigned integers. :func:`as_tensor` is the inverse.
    """
    numbers = row.contiguous().numpy()
    return numbers.view(f"<u{numbers.itemsize}")


def as_tensor(words: np.ndarray) -> Tensor:
    """Return unsigned numbers as a tensor of signed integers with the same bits; the inverse of :func:`as_words`."""
    return torch.from_numpy(np.ascontiguousarray(words).view(f"<i{words.itemsize}").copy())


KEYS, SHARES, VECTOR = "keys", "shares", "sum"
"""Names of tensors in messages: public keys, shares, and the masked upload."""

KEY_BYTES = 32
"""Bytes of every key and seed."""
PUBLIC_KEYS_BYTES = 2 * KEY_BYTES
"""Bytes of a user's two public keys, for sealing and for masks."""
SHARE_BYTES = KEY_BYTES + 1
"""Bytes of a share."""
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Bytes of a sealed message between two users: two shares, encrypted and authenticated."""

_NO_RANKS = torch.zeros(1, dtype=torch.int64)
"""LoRA rank in messages of the protocol: none, as padding is masked too."""


def make_upload(name: str, round_number: int, tensors: dict[str, Tensor]) -> Upload:
    """Return a user's message to the server in the protocol of a secure sum.

    Args:
        name: Name of the user.
        round_number: Number of the round, from 1.
        tensors: Contents of the message: keys, shares or the masked upload.
    """
    # No LoRA rank is given: masked uploads have the size of the largest rank, as padding is masked too.
    return Upload(round=round_number, users=(name,), tensors=tensors, ranks=_NO_RANKS)


def make_download(name: str, round_number: int, senders: Sequence[str], tensors: dict[str, Tensor]) -> Download:
    """Return a message from the server to a user in the protocol of a secure sum.

    Args:
        name: Name of the user who receives the message.
        round_number: Number of the round, from 1.
        senders: Users that the contents come from.
        tensors: Contents of the message: keys or shares; empty if it only names users.
    """
    return Download(version=round_number, users=(name,), tensors=tensors, ranks=_NO_RANKS, senders=tuple(senders))


def sent_bytes(terms: Terms, name: str, count: int) -> int:
    """Return the bytes that a user sends for a sum if no user drops out: the lengths of its four messages.

    Args:
        terms: Public terms of the sum, with the number of entries and the bits of each.
        name: Name of the user.
        count: Number of users in the sum.
    """
    masked_upload = torch.empty((1, terms.entries), dtype=DTYPES[terms.word], device="meta")
    contents_by_step = {
        "advertise": {KEYS: _meta_bytes(1, PUBLIC_KEYS_BYTES)},
        "share": {SHARES: _meta_bytes(count - 1, SEALED_BYTES)},  # for each other user
        "mask": {VECTOR: masked_upload},
        "unmask": {SHARES: _meta_bytes(count, SHARE_BYTES)},  # one of each user, itself included
    }
    return sum(_message_bytes(make_upload(name, terms.round, tensors)) for tensors in contents_by_step.values())


def keys_bytes(terms: Terms, name: str) -> int:
    """Return the bytes that a user uploads if a secure sum ends after its first step: only its public keys."""
    return _message_bytes(make_upload(name, terms.round, {KEYS: _meta_bytes(1, PUBLIC_KEYS_BYTES)}))


def received_bytes(terms: Terms, name: str, names: Sequence[str]) -> int:
    """Return the bytes that a user downloads in the steps of a secure sum, without the model of the round.

    Args:
        terms: Public terms of the sum, with its round.
        name: Name of the user.
        names: All users of the sum.
    """
    round_number = terms.round
    others = [other for other in names if other != name]
    public_keys = {KEYS: _meta_bytes(len(names), PUBLIC_KEYS_BYTES)}
    sealed_shares = {SHARES: _meta_bytes(len(others), SEALED_BYTES)}
    messages = (
        make_download(name, round_number, senders=names, tensors=public_keys),
        make_download(name, round_number, senders=others, tensors=sealed_shares),
        make_download(name, round_number, senders=names, tensors={}),  # the names of the users in the sum
    )
    return sum(_message_bytes(message) for message in messages)


def _message_bytes(message: Upload | Download) -> int:
    """Return the packed length of a message of or for a single user."""
    (length,) = packed_bytes(message)
    return length


def _meta_bytes(rows: int, width: int) -> Tensor:
    """Return a stand-in for ``rows`` byte strings of length ``width``, to compute the size of a message with them.

    It is an int8 tensor ``(1, rows, width)`` on the meta device, which takes no memory.
    """
    return torch.empty((1, rows, width), dtype=torch.int8, device="meta")


logger = logging.getLogger("comingle")

RANGE = 8.0
"""Largest magnitude of an entry of a change, if there is neither noise nor the setting ``range``."""

TAIL = 12
"""Standard deviations beyond which noise is cut off; an entry reaches that with a probability below 1e-32."""

MOST_SLACK = 0.1
"""Largest fraction of the clip norm by which rounding may increase the norm of a change."""

LEAST_STEPS = 1000
"""Smallest standard deviation of a user's noise, in grid steps."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Settings of a run's secure sums: number format, noise, and how many users a sum needs.

    Rounds are counted from 1.

    Args:
        privacy: Section ``privacy`` of the recipe, with ``secure_aggregation``.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: Names of all users of the run.
        weighted: Whether users have different weights. An upload then has one more entry, the user's weight.
    """

    privacy: PrivacySection
    participation: Participation
    users: tuple[str, ...]
    weighted: bool

    @property
    def secure(self) -> SecureSection:
        """Section ``privacy.secure_aggregation`` of the recipe."""
        assert self.privacy.secure_aggregation is not None
        return self.privacy.secure_aggregation

    @property
    def word(self) -> int:
        """Bit width of the integers that are sent: 32, or 64 if a sum over all users needs more bits."""
        return self.secure.word_bits(len(self.users))

    def num_selected(self, round_number: int) -> int:
        """Return the number of users that are selected for round ``round_number`` (from 1), before any drops out."""
        return int(expected_participants(self.privacy, self.participation, len(self.users), round_number - 1))

    def num_required(self, round_number: int) -> int:
        """Return the smallest number of uploads in the sum of round ``round_number`` (from 1); fewer give no sum."""
        return self.secure.required_users(self.num_selected(round_number))

    def noise_deviation(self, round_number: int) -> float:
        """Return the standard deviation of each user's part of the noise: ``z C / sqrt(n)``.

        z is the noise multiplier, C the clip norm, and n the smallest number of users in the round's sum who do not
        collude. Their n parts together have the standard deviation ``z C``.
        """
        if not self.privacy.noisy:
            return 0.0
        z = self.privacy.multiplier
        clip_norm = self.privacy.first_bound  # C
        num_honest = self.num_required(round_number) - self.secure.colluders  # n
        return z * clip_norm / math.sqrt(num_honest)

    def grid(self, round_number: int) -> Grid:
        """Return the grid for a round's uploads.

        With noise its bound is the clip norm plus 12 (:data:`TAIL`) standard deviations of the noise. Without noise it
        is the setting ``range``, by default 8.
        """
        if self.privacy.noisy:
            bound = self.privacy.first_bound + TAIL * self.noise_deviation(round_number)
        else:
            bound = self.secure.range or RANGE
        return Grid(bound=bound, bits=self.secure.bits)

    def terms(self, run: str, round_number: int, size: int, selected: tuple[str, ...]) -> Terms:
        """Return the public terms of a round's sum, on which users and server agree.

        Args:
            run: Name of the run.
            round_number: Number of the round, from 1.
            size: Number of shared parameters.
            selected: Names of the users selected for the round.
        """
        num_weights = 1 if self.weighted else 0  # an upload ends with the user's weight if it is weighted
        return Terms(
            run=run,
            round=round_number,
            users=selected,
            expected=self.num_selected(round_number),
            threshold=self.num_required(round_number),
            word=self.word,
            entries=size + num_weights,
        )

    def check(self) -> None:
        """Check that each round has enough users for a sum, and that uploads have enough bits for the noise.

        Raises:
            RecipeError: A check fails.
        """
        secure, where = self.secure, "privacy.secure_aggregation"
        num_rounds_to_check = 1  # If a fraction of the users is drawn, all rounds have equally many users.
        if isinstance(self.participation, tuple):
            num_rounds_to_check = len(self.participation)
        for round_number in range(1, num_rounds_to_check + 1):
            num_selected, num_required = self.num_selected(round_number), self.num_required(round_number)
            if num_selected < num_required:
                raise RecipeError(
                    f"{where}: {num_selected} user(s) in a round, too few to hide in a sum; needed: {num_required}"
                )
            # Colluders can subtract their own uploads from the sum. The remainder must still have enough uploads.
            if num_required - secure.colluders < LEAST_USERS_IN_SUM:
                raise RecipeError(
                    f"{where}.colluders: got {secure.colluders}, but a sum may have only {num_required} users; "
                    f"allowed: up to {num_required - LEAST_USERS_IN_SUM}"
                )
            # Noise is rounded to grid steps; with few steps per standard deviation it would not be Gaussian.
            min_deviation = LEAST_STEPS * self.grid(round_number).step
            if self.privacy.noisy and self.noise_deviation(round_number) < min_deviation:
                raise RecipeError(f"{where}.bits: got {secure.bits}, too few for such small noise; use more bits")

    def check_size(self, size: int) -> None:
        """Check that rounding to the grid increases the norm of a change of ``size`` entries by at most 10%.

        This only matters with noise: changes are then clipped to the clip norm minus this increase.

        Raises:
            RecipeError: The increase may exceed 10% (:data:`MOST_SLACK`) of the clip norm.
        """
        if not self.privacy.noisy:
            return
        max_increase = self.grid(round_number=1).slack(size)
        if max_increase > MOST_SLACK * self.privacy.first_bound:
            raise RecipeError(
                f"privacy.secure_aggregation.bits: got {self.secure.bits}; rounding {size:,} entries may take more "
                f"than {MOST_SLACK:.0%} of the clip norm; use more bits"
            )

    def sent_bytes(self, name: str, size: int) -> int:
        """Return the bytes that a user sends in a round in which no user drops out.

        Args:
            name: Name of the user.
            size: Number of shared parameters.
        """
        terms = self.terms(run="", round_number=1, size=size, selected=self.users)
        return sent_bytes(terms, name, count=self.num_selected(1))

    def received_bytes(self, name: str, size: int) -> int:
        """Return the bytes that a user receives in the messages of a round's sum, without the model.

        Args:
            name: Name of the user.
            size: Number of shared parameters.
        """
        terms = self.terms(run="", round_number=1, size=size, selected=self.users)  # messages do not name the run
        # The participants of a round are not known yet, so count round 1 with this user and the first others.
        others = [other for other in self.users if other != name]
        participants = [name, *others][: self.num_selected(1)]
        return received_bytes(terms, name, participants)

    # ---------------------------------------------------------------- on clients

    def uploads(
        self, changes: Tree, weights: Float[Tensor, " users"], names: Sequence[str], key: str, round_number: int
    ) -> Int[Tensor, "users entries"]:
        """Return each user's upload before masks are added: its weighted change as integers.

        With ``weighted`` the last entry is the user's weight as an integer.

        Args:
            changes: Changes ``(users, *shape)``.
            weights: Weights of the users, up to 1.
            names: Names of the users.
            key: Secret key from which the noise is drawn.
            round_number: Number of the round, from 1.
        """
        if self.privacy.noisy:
            integers = self._clip_and_add_noise(changes, weights, names, key, round_number)
        else:
            integers = self._clamp_and_weigh(changes, weights, names, round_number)
        if self.weighted:
            integer_weights = self._integer_weights(weights, self.grid(round_number))
            integers = torch.cat([integers, integer_weights.unsqueeze(1)], dim=1)
        return integers.to(DTYPES[self.word])

    def _clamp_and_weigh(
        self, changes: Tree, weights: Tensor, names: Sequence[str], round_number: int
    ) -> Int[Tensor, "users entries"]:
        """Clamp each user's change to the grid's range, multiply it by the user's weight, and round it to integers.

        The log warns of users whose change exceeds the range.

        Args:
            changes: Changes ``(users, *shape)``.
            weights: Weights of the users, up to 1.
            names: Names of the users.
            round_number: Number of the round, from 1.
        """
        grid = self.grid(round_number)
        values = flat(changes).cpu()  # (users, entries)
        for name, num_beyond in zip(names, grid.num_beyond(values), strict=True):
            if num_beyond:
                logger.warning(
                    "user %r, round %d: %d of %d entries of its change are clipped to the range %g "
                    "(privacy.secure_aggregation.range)", name, round_number, num_beyond, values.shape[1], grid.bound,
                )  # fmt: skip
        # Weights are rounded too, since the sum is later divided by the sum of the rounded weights.
        rounded_weights = self._integer_weights(weights, grid).double() / grid.largest
        clamped = values.nan_to_num(0.0).clamp(-grid.bound, grid.bound)
        return grid.to_integers(clamped * rounded_weights.unsqueeze(1))

    def _clip_and_add_noise(
        self, changes: Tree, weights: Tensor, names: Sequence[str], key: str, round_number: int
    ) -> Int[Tensor, "users entries"]:
        """Return each user's clipped, weighted change plus its part of the noise, rounded to integers.

        Args:
            changes: Changes ``(users, *shape)``.
            weights: Weights of the users, up to 1.
            names: Names of the users.
            key: Secret key from which the noise is drawn.
            round_number: Number of the round, from 1.
        """
        grid = self.grid(round_number)
        entries = sum(t[0].numel() for t in changes.values())  # of one user
        # Rounding may increase the norm by up to the slack, so clip to less than the clip norm.
        bound = self.privacy.first_bound - grid.slack(entries)
        integers = grid.to_integers(flat(scaled(clipped(changes, bound), weights)).cpu())
        standard_noises: list[Tensor] = []  # of each user
        for name, integers_of_user in zip(names, integers, strict=True):
            # Part of the noise's seed: a repeated upload gets the same noise, another upload gets other noise.
            values_digest = digest({"": integers_of_user})
            standard_noises.append(gaussian((entries,), key, name, round_number, "noise share", values_digest))
        deviation_in_steps = self.noise_deviation(round_number) / grid.step
        integer_noise = (torch.stack(standard_noises) * deviation_in_steps).round().long()
        return grid.clamp(integers + integer_noise)

    def _integer_weights(self, weights: Float[Tensor, " users"], grid: Grid) -> Int[Tensor, " users"]:
        """Return the users' aggregation weights as integers, because secure sums add integers only.

        Args:
            weights: Weights from 0 to 1.
            grid: Range of the integers; the largest one stands for the weight 1. No weight is rounded down to 0.
        """
        return (weights.double() * grid.largest).round().clamp(1, grid.largest).long()

    # ---------------------------------------------------------------- on the server

    def require(self, num_advertised: int, round_number: int) -> None:
        """Check that enough users have sent their public keys (step "advertise") for the sum of a round.

        Args:
            num_advertised: Number of users who have sent keys.
            round_number: Number of the round, from 1.

        Raises:
            NoSumError: They are fewer than the sum needs.
        """
        num_required = self.num_required(round_number)
        if num_advertised < num_required:
            fact = f"{num_advertised} of {self.num_selected(round_number)} users completed step 'advertise'"
            raise NoSumError(no_sum_message(round_number, fact, num_required))

    def mean(
        self, total: np.ndarray | Int[Tensor, " entries"], model: Tree, num_uploads: int, round_number: int
    ) -> Tree:
        """Return the mean change of the users, float64, from the sum of their uploads.

        Args:
            total: Sum of the uploads, integers.
            model: The model, for its shapes.
            num_uploads: Number of uploads in the sum.
            round_number: Number of the round, from 1.
        """
        integers, grid = torch.as_tensor(total), self.grid(round_number)
        if self.privacy.noisy:
            divisor = float(self.num_selected(round_number))  # public, unlike the number of uploads and their weights
        elif self.weighted:
            sum_of_weights = integers[-1]  # the integer ``grid.largest`` stands for the weight 1
            divisor = float(sum_of_weights) / grid.largest
        else:
            divisor = float(num_uploads)
        entries = sum(t.numel() for t in model.values())
        return shaped(integers[:entries].double() * grid.step / divisor, model)


@dataclass(kw_only=True)
class SecureSum(PrivacyMechanism):
    """The client's side of secure aggregation: turns uploads into integers with noise, to be masked by the protocol.

    Args:
        privacy: Section ``privacy`` of the recipe, with ``secure_aggregation``.
        sums: Settings of the run's secure sums; None before users and rounds are known.
    """

    privacy: PrivacySection
    sums: Sums | None = None

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Raise a ``RecipeError`` if the server needs single uploads, or a setting does not fit a secure sum."""
        where, privacy, secure = "privacy.secure_aggregation", self.privacy, self.privacy.secure_aggregation
        assert secure is not None
        if method.shared and method.server.kind != "sum":
            raise RecipeError(
                f"{where}: method {method.name}: its server ({type(method.server).__name__}) needs single uploads, "
                "but would see only their sum"
            )
        if privacy.noise_at in ("upload", "steps"):
            raise RecipeError(
                f"{where}: cannot be used with mechanism: {privacy.mechanism}, whose noise hides each upload; allowed: "
                "central, none"
            )
        if privacy.adaptive:
            raise RecipeError(f"{where}: cannot be used with clip_norm: adaptive, for which users report their norms")
        if recipe.training.uploads != "float32":
            raise RecipeError(
                f"{where}: has its own number format (bits); training.uploads: got {recipe.training.uploads!r}; "
                "allowed: float32"
            )
        if privacy.noisy and secure.range is not None:
            raise RecipeError(f"{where}.range: has no effect with noise, where privacy.clip_norm sets it; remove it")

    def check_server(self, method: Method, layout: Layout, users: int) -> None:
        """Check that rounding uploads to integers increases the norm of a change by at most 10%.

        Args:
            method: The method, which decides what is uploaded.
            layout: Layout of the model's tensors.
            users: Not used.

        Raises:
            RecipeError: The increase may be larger, so the recipe needs more bits.
        """
        if self.sums is not None and method.shared:
            num_shared = layout.count(method.shared)
            self.sums.check_size(num_shared)

    def client_update(self, update: Update) -> Update:
        """Return the users' weighted changes as integers, with noise if the recipe has any.

        The protocol of secure sums adds the masks when it sends them.
        """
        assert self.sums is not None
        weights = capped_weights(update.counts, self.privacy.weight_cap)
        integers = self.sums.uploads(update.changes, weights, update.names, self.key, update.round_number)
        return replace(update, masked={VECTOR: integers})
