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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.sections import Recipe
from comingle.config.settings import LEAST, PrivacySection, SecureSection, Terms, no_sum_message
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
    """Multiples of ``step`` up to ``bound`` in magnitude, as integers of ``bits`` bits including the sign.

    A number within the bound is rounded to the nearest multiple, with an error of at most half a step; a sum of n has
    at most n / 2 steps. Rounding is not random, so the same upload always gives the same bytes.
    """

    bound: float
    bits: int

    @property
    def largest(self) -> int:
        """Integer of the largest grid point, ``bound``."""
        return 2 ** (self.bits - 1) - 1

    @property
    def step(self) -> float:
        """Distance of neighbouring grid points."""
        return self.bound / self.largest

    def slack(self, entries: int) -> float:
        """Return the largest increase of the L2 norm of ``entries`` numbers by rounding."""
        return self.step * math.sqrt(entries) / 2

    def place(self, values: Float[Tensor, ...]) -> Int[Tensor, ...]:
        """Return the nearest grid points as integers; values beyond the bound are clamped."""
        return self.clamp((values.double() / self.step).round()).long()

    def clamp(self, integers: Tensor) -> Tensor:
        """Clamp integers to those of grid points within the bound."""
        return integers.clamp(-self.largest, self.largest)

    def num_beyond(self, values: Float[Tensor, "users ..."]) -> list[int]:
        """Return the number of entries of each user that exceed the bound in magnitude or are not finite."""
        return (~(values.abs() <= self.bound)).flatten(1).sum(1).tolist()


def flat(tree: Tree) -> Float[Tensor, "users entries"]:
    """Return each user's tensors, flattened and concatenated in the order of their names, float64."""
    return torch.cat([tree[name].double().flatten(1) for name in sorted(tree)], 1)


def shaped(row: Float[Tensor, " entries"], like: Tree) -> Tree:
    """Split a vector into tensors, the inverse of :func:`flat` for one row.

    Args:
        row: Concatenated entries of all tensors, in the order of their names.
        like: Tensors with the wanted names and shapes, without a users dimension.
    """
    names = sorted(like)
    parts = torch.split(row, [like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def as_words(row: Tensor) -> np.ndarray:
    """Return int32 or int64 integers as unsigned numbers modulo ``2^word``, with the same bits."""
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
        name: The user.
        round_number: Number of the round, from 1.
        tensors: Contents.
    """
    # No LoRA rank is given: masked uploads have the size of the largest rank, as padding is masked too.
    return Upload(round=round_number, users=(name,), tensors=tensors, ranks=_NO_RANKS)


def make_download(
    name: str, round_number: int, senders: Mapping[str, bytes] | Sequence[str], tensors: dict[str, Tensor]
) -> Download:
    """Return a message from the server to a user in the protocol of a secure sum.

    Args:
        name: The user.
        round_number: Number of the round, from 1.
        senders: Users that the contents come from.
        tensors: Contents.
    """
    return Download(version=round_number, users=(name,), tensors=tensors, ranks=_NO_RANKS, senders=tuple(senders))


def sent_bytes(terms: Terms, name: str, count: int) -> int:
    """Return the bytes that a user sends for a sum if no user drops out: the lengths of its messages in all four steps.

    Args:
        terms: Public terms of the sum: its round, users, threshold, number of entries and bits of each.
        name: The user.
        count: Number of users in the sum.
    """
    vector = torch.empty((1, terms.entries), dtype=DTYPES[terms.word], device="meta")
    # Of the steps "advertise", "share", "mask" and "unmask": public keys, shares sealed for each other user, the masked
    # upload, and a revealed share of each user.
    contents = (
        {KEYS: _meta_bytes(1, PUBLIC_KEYS_BYTES)},
        {SHARES: _meta_bytes(count - 1, SEALED_BYTES)},
        {VECTOR: vector},
        {SHARES: _meta_bytes(count, SHARE_BYTES)},
    )
    messages = [make_upload(name, terms.round, tensors) for tensors in contents]
    return sum(packed_bytes(message)[0] for message in messages)  # [0]: each message is of one user


def keys_bytes(terms: Terms, name: str) -> int:
    """Return the bytes that a user sends for a sum that fails after the first step."""
    message = make_upload(name, terms.round, {KEYS: _meta_bytes(1, PUBLIC_KEYS_BYTES)})
    return packed_bytes(message)[0]  # [0]: the message is of one user


def received_bytes(terms: Terms, name: str, names: Sequence[str]) -> int:
    """Return the bytes that a user downloads in the steps of a secure sum, in addition to the model of the round.

    Args:
        terms: Public terms of the sum: its round, users, threshold, number of entries and bits of each.
        name: The user.
        names: All users of the sum.
    """
    round_number, others = terms.round, [other for other in names if other != name]
    # The public keys of all users, the shares that the others sealed for this user, and the names of those in the sum.
    messages = (
        make_download(name, round_number, names, {KEYS: _meta_bytes(len(names), PUBLIC_KEYS_BYTES)}),
        make_download(name, round_number, others, {SHARES: _meta_bytes(len(others), SEALED_BYTES)}),
        make_download(name, round_number, names, {}),
    )
    return sum(packed_bytes(message)[0] for message in messages)  # [0]: each message is for one user


def _meta_bytes(rows: int, width: int) -> Tensor:
    """Return an int8 tensor ``(1, rows, width)`` on the meta device, to compute its packed length without memory."""
    return torch.empty((1, rows, width), dtype=torch.int8, device="meta")


logger = logging.getLogger("comingle")

RANGE = 8.0
"""Default for the largest magnitude of an entry of a change, without a setting or clip norm."""

TAIL = 12
"""Standard deviations beyond which noise is cut off; an entry reaches that with a probability below 1e-32."""

MOST_SLACK = 0.1
"""Largest part of the clip norm that rounding may use."""

LEAST_STEPS = 1000
"""Smallest standard deviation of a user's noise, in grid steps."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Rules of secure aggregation for users and server: number format, noise, and how many users a sum needs.

    Rounds are counted from 1.

    Args:
        privacy: Settings with ``secure_aggregation``.
        participation: Fraction of the users drawn for each round, or lists of the users of each round.
        users: All users of the run.
        weighted: Whether users have weights; their sum is then the last entry, masked like the others.
    """

    privacy: PrivacySection
    participation: Participation
    users: tuple[str, ...]
    weighted: bool

    @property
    def secure(self) -> SecureSection:
        """Section ``secure_aggregation``."""
        assert self.privacy.secure_aggregation is not None
        return self.privacy.secure_aggregation

    @property
    def word(self) -> int:
        """Bit width of the integers that are sent, 32 or 64."""
        return self.secure.word_bits(len(self.users))

    def expected(self, round_number: int) -> int:
        """Return the number of users that round ``round_number`` selects."""
        return int(expected_participants(self.privacy, self.participation, len(self.users), round_number - 1))

    def least(self, round_number: int) -> int:
        """Return the smallest number of uploads in the sum of round ``round_number``; with fewer there is no sum."""
        return self.secure.required_users(self.expected(round_number))

    def deviation(self, round_number: int) -> float:
        """Return the standard deviation of each user's part of the noise: ``z C / sqrt(least - colluders)``.

        z is the noise multiplier, C the clip norm and ``least`` the smallest number of users in the round's sum.
        Colluding users know their own parts, so only the others' hide anything: together they have at least the
        deviation ``z C`` that the account assumes.
        """
        if not self.privacy.noisy:
            return 0.0
        num_parts = self.least(round_number) - self.secure.colluders
        return self.privacy.multiplier * self.privacy.first_bound / math.sqrt(num_parts)

    def grid(self, round_number: int) -> Grid:
        """Return the grid for a round's uploads.

        With noise its bound is the clip norm plus :data:`TAIL` standard deviations of the noise, which an upload
        practically never exceeds. Without noise it is the setting ``range``, or :data:`RANGE`.
        """
        bound = self.secure.range or RANGE
        if self.privacy.noisy:
            bound = self.privacy.first_bound + TAIL * self.deviation(round_number)
        return Grid(bound=bound, bits=self.secure.bits)

    def terms(self, run: str, round_number: int, size: int, selected: tuple[str, ...]) -> Terms:
        """Return the public terms of a round's sum, on which users and server agree.

        Args:
            run: Name of the run.
            round_number: Number of the round, from 1.
            size: Number of shared parameters. With weights there is one more entry, the user's weight.
            selected: Users selected for the round.

        Returns:
            Among others ``expected``, the number of selected users; ``threshold``, the smallest number of uploads in
            the sum; ``word``, the bits of each sent number; and ``entries``, how many numbers a user sends.
        """
        return Terms(
            run=run,
            round=round_number,
            users=selected,
            expected=self.expected(round_number),
            threshold=self.least(round_number),
            word=self.word,
            entries=size + int(self.weighted),
        )

    def check(self) -> None:
        """Check that every round can have a sum, and that uploads have enough bits for the noise.

        Users send integers, the multiples of a grid step, so their noise is rounded too.

        Raises:
            RecipeError: A round has too few users for a sum, or the grid has too few bits for the noise.
        """
        # ``participation`` is a tuple with the users of each round, or a fraction. With a fraction all rounds select
        # equally many users, so the first round stands for all.
        rounds = len(self.participation) if isinstance(self.participation, tuple) else 1
        secure, where = self.secure, "privacy.secure_aggregation"
        for round_number in range(1, rounds + 1):
            num_users, least = self.expected(round_number), self.least(round_number)
            if num_users < least:
                raise RecipeError(f"{where}: {num_users} user(s) in a round, too few to hide in a sum; needed: {least}")
            if least - secure.colluders < LEAST:  # the others' uploads must be hidden in a sum of at least LEAST users
                raise RecipeError(
                    f"{where}.colluders: got {secure.colluders}, but a sum may have only {least} users; allowed: up to "
                    f"{least - LEAST}"
                )
            # Noise is rounded to grid steps; only many steps per deviation keep it close to Gaussian.
            if self.privacy.noisy and self.deviation(round_number) < LEAST_STEPS * self.grid(round_number).step:
                raise RecipeError(f"{where}.bits: got {secure.bits}, too few for such small noise; use more bits")

    def check_size(self, size: int) -> None:
        """Check that rounding ``size`` numbers to the grid does not increase the norm of a change by much.

        With noise, changes are clipped to the clip norm minus the largest possible increase by rounding (slack). If the
        slack were large, little of the changes would be left. Only the grid of the first round is checked; grids of
        other rounds differ only if other numbers of users are selected.

        Raises:
            RecipeError: Rounding may increase the norm by more than :data:`MOST_SLACK` of the clip norm.
        """
        if self.privacy.noisy and self.grid(1).slack(size) > MOST_SLACK * self.privacy.first_bound:
            raise RecipeError(
                f"privacy.secure_aggregation.bits: got {self.secure.bits}; rounding {size:,} entries may take more "
                f"than {MOST_SLACK:.0%} of the clip norm; use more bits"
            )

    def sent_bytes(self, name: str, size: int) -> int:
        """Return the bytes that a user sends in a round in which none drops out."""
        return sent_bytes(self.terms("", 1, size, self.users), name, self.expected(1))

    def received_bytes(self, name: str, size: int) -> int:
        """Return the bytes that a user receives in the messages of a round's sum, which do not include the model."""
        others = [other for other in self.users if other != name]
        return received_bytes(self.terms("", 1, size, self.users), name, [name, *others][: self.expected(1)])

    # ---------------------------------------------------------------- on clients

    def uploads(
        self, changes: Tree, weights: Float[Tensor, " users"], names: Sequence[str], key: str, round_number: int
    ) -> Int[Tensor, "users entries"]:
        """Return each user's upload before masks are added: integers of :attr:`word` bits.

        An entry of a change becomes the nearest multiple of the step of the round's grid. With noise, the grid depends
        on the round: its range has to cover the noise, which depends on the number of users in the round's sum. With
        ``weighted`` the last entry is the user's weight as an integer, which is summed like the changes.

        Args:
            changes: Changes ``(users, *shape)``.
            weights: Weights of the users, up to 1.
            names: Names of the users.
            key: Key of the noise.
            round_number: Number of the round, from 1.
        """
        grid = self.grid(round_number)
        if self.privacy.noisy:
            integers = self._clip_and_add_noise(changes, weights, names, key, round_number)
        else:
            integers = self._clamp_and_weigh(changes, weights, names, round_number)
        if self.weighted:
            integers = torch.cat([integers, self._integer_weights(weights, grid).unsqueeze(1)], 1)
        # The cast changes no value, as grid points have fewer bits. Masks and sums then wrap around modulo 2^word.
        return integers.to(DTYPES[self.word])

    def _clamp_and_weigh(
        self, changes: Tree, weights: Tensor, names: Sequence[str], round_number: int
    ) -> Int[Tensor, "users entries"]:
        """Return each user's upload for a sum without noise: clamp its change, multiply by its weight, and round.

        Changes are clamped to the range of the grid, whose points are the integers that users send. The log warns of
        users whose change exceeds the range.

        Args:
            changes: Changes ``(users, *shape)``.
            weights: Weights of the users, up to 1.
            names: Names of the users.
            round_number: Number of the round, from 1.
        """
        grid, values = self.grid(round_number), flat(changes).cpu()
        for name, num_beyond in zip(names, grid.num_beyond(values), strict=True):
            if num_beyond:
                logger.warning(
                    "user %r, round %d: %d of %d entries of its change are clipped to the range %g "
                    "(privacy.secure_aggregation.range)", name, round_number, num_beyond, values.shape[1], grid.bound,
                )  # fmt: skip
        # The sum is divided by the sum of integer weights, so changes get the same rounded weights.
        weight = self._integer_weights(weights, grid).double() / grid.largest
        return grid.place(values.nan_to_num(0.0).clamp(-grid.bound, grid.bound) * weight.unsqueeze(1))

    def _clip_and_add_noise(
        self, changes: Tree, weights: Tensor, names: Sequence[str], key: str, round_number: int
    ) -> Int[Tensor, "users entries"]:
        """Return each user's clipped, weighted change plus its part of the noise, as grid points.

        Rounding to grid points may increase the norm of a change. So changes are clipped to the clip norm minus the
        largest increase, the slack.

        Args:
            changes: Changes ``(users, *shape)``.
            weights: Weights of the users, up to 1.
            names: Names of the users.
            key: Secret key from which the noise is drawn.
            round_number: Number of the round, from 1.
        """
        grid, entries = self.grid(round_number), sum(t[0].numel() for t in changes.values())
        # Secure sums need a constant clip norm, so the norm of the first round is used in all rounds.
        bound = self.privacy.first_bound - grid.slack(entries)
        integers = grid.place(flat(scaled(clipped(changes, bound), weights)).cpu())
        deviation_steps = self.deviation(round_number) / grid.step
        # Seeded with the user's grid points too: a repeated upload gets the same noise, and different ones never do.
        noises = [
            gaussian((entries,), key, name, round_number, "noise share", digest({"": row}))  # a tree of one tensor
            for name, row in zip(names, integers, strict=True)
        ]
        return grid.clamp(integers + (torch.stack(noises) * deviation_steps).round().long())

    def _integer_weights(self, weights: Float[Tensor, " users"], grid: Grid) -> Int[Tensor, " users"]:
        """Return weights from 0 to 1 as integers from 1 to the grid's largest, to be summed like changes."""
        return (weights.double() * grid.largest).round().clamp(1, grid.largest).long()

    # ---------------------------------------------------------------- on the server

    def require(self, num_advertised: int, round_number: int) -> None:
        """Check that enough users have advertised keys for the sum of round ``round_number``.

        Raises:
            NoSumError: They are too few.
        """
        if num_advertised < (least := self.least(round_number)):
            fact = f"{num_advertised} of {self.expected(round_number)} users completed step 'advertise'"
            raise NoSumError(no_sum_message(round_number, fact, least))

    def mean(self, total: np.ndarray | Int[Tensor, " entries"], like: Tree, senders: int, round_number: int) -> Tree:
        """Return the mean change of the users, float64, from the sum of their uploads.

        The sum is divided by the number of uploads, or by the sum of weights if users have weights. With noise it is
        divided by the number of users that the round selects, which is public.

        Args:
            total: Sum of the uploads, integers.
            like: The model, for its shapes.
            senders: Number of uploads in the sum.
            round_number: Number of the round, from 1.
        """
        numbers, grid = torch.as_tensor(total), self.grid(round_number)
        divisor = float(senders)
        if self.weighted:  # the last entry is the sum of the integer weights, in which ``grid.largest`` stands for 1
            divisor = float(numbers[-1]) / grid.largest
        if self.privacy.noisy:  # also with weights: neither their sum nor the number of uploads has noise
            divisor = float(self.expected(round_number))
        entries = sum(t.numel() for t in like.values())
        return shaped(numbers[:entries].double() * grid.step / divisor, like)


@dataclass(kw_only=True)
class SecureSum(PrivacyMechanism):
    """Masks uploads so that the server sees only their sum; adds a part of the noise if there is any.

    The server has no hook here: it never sees an upload. A backend carries the messages of the protocol and passes on
    the total, see :meth:`comingle.training.server.ServerHalf.aggregate_sum`.

    Args:
        privacy: Settings with ``secure_aggregation``.
        sums: Secure sums of the run; None before users and rounds are known.
    """

    privacy: PrivacySection
    sums: Sums | None = None

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Check that the method's server needs only the sum of uploads, and that other settings fit a secure sum."""
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
        """Check that rounding to the grid does not increase the norms of changes by much."""
        if self.sums is not None and method.shared:
            self.sums.check_size(layout.count(method.shared))

    def client_update(self, update: Update) -> Update:
        """Return the users' changes as integers modulo ``2^word``, to which the protocol of the secure sum adds masks.

        Each change is multiplied by the user's weight. Without noise it is clamped to the range of the integers. With
        noise it is clipped to the clip norm, and the user adds its part of the noise.
        """
        assert self.sums is not None
        weights = capped_weights(update.counts, self.privacy.weight_cap)
        integers = self.sums.uploads(update.changes, weights, update.names, self.key, update.round_number)
        return replace(update, masked={VECTOR: integers})
