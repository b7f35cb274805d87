"""Secure sums: fixed-point grid, message sizes, and the sum itself.

Users send their changes against what they have downloaded, on a grid, so that masks can hide them. Where there is noise
each user adds a part of it: the parts of ``threshold - colluders`` users make the noise that the account counts, and
there is no sum of fewer than ``threshold``. A part is a rounded Gaussian of many steps of the grid; a sum of them is as
good as the Gaussian of their joint deviation (Kairouz et al. 2021, arXiv:2102.06387, bound the difference for discrete
Gaussians: exponentially small in the squared deviation).
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
from comingle.config.settings import LEAST, PrivacySection, SecureSection, Terms, no_sum
from comingle.methods.base import Method
from comingle.privacy.accounting import Participation, expected
from comingle.privacy.base import PrivacyMechanism, Update
from comingle.privacy.noise import capped_weights, clipped, digest, gaussian, scaled
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import packed_bytes
from comingle.utils.errors import NoSumError, RecipeError
from comingle.utils.trees import Layout, Tree

DTYPES = {32: torch.int32, 64: torch.int64}
"""How a tensor holds numbers modulo ``2^word``; they are read without a sign."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of ``step`` up to ``bound`` in magnitude, as whole numbers of ``bits`` bits, the sign included.

    A number within the bound is sent as the nearest multiple, so it is wrong by at most half a step, and a sum of n by
    at most n / 2 steps. Rounding is to the nearest and not at random: the same upload is the same bytes again.
    """

    bound: float
    bits: int

    @property
    def levels(self) -> int:
        """The largest whole number."""
        return 2 ** (self.bits - 1) - 1

    @property
    def step(self) -> float:
        """The distance of two neighbours."""
        return self.bound / self.levels

    def slack(self, entries: int) -> float:
        """By how much rounding may lengthen ``entries`` numbers together (L2)."""
        return self.step * math.sqrt(entries) / 2

    def place(self, values: Float[Tensor, ...]) -> Int[Tensor, ...]:
        """The nearest multiples, as whole numbers; what is beyond the bound is put on it."""
        return self.cut((values.double() / self.step).round()).long()

    def cut(self, levels: Tensor) -> Tensor:
        """Whole numbers within the bound."""
        return levels.clamp(-self.levels, self.levels)

    def beyond(self, values: Float[Tensor, "users ..."]) -> list[int]:
        """How many of each user's numbers are out of range, or are none."""
        return (~(values.abs() <= self.bound)).flatten(1).sum(1).tolist()


def flat(tree: Tree) -> Float[Tensor, "users entries"]:
    """Each user's tensors one behind the other, in the order of their names."""
    return torch.cat([tree[name].double().flatten(1) for name in sorted(tree)], 1)


def shaped(row: Float[Tensor, " entries"], like: Tree) -> Tree:
    """The tensors again, with the shapes of ``like``, which has no dimension of users."""
    parts = torch.split(row, [like[name].numel() for name in sorted(like)])
    return {name: part.view(like[name].shape) for name, part in zip(sorted(like), parts, strict=True)}


def as_words(row: Tensor) -> np.ndarray:
    """Whole numbers modulo ``2^word``, without a sign."""
    numbers = row.contiguous().numpy()
    return numbers.view(f"<u{numbers.itemsize}")


def as_tensor(words: np.ndarray) -> Tensor:
    """The same with a sign, as tensors have them."""
    return torch.from_numpy(np.ascontiguousarray(words).view(f"<i{words.itemsize}").copy())


KEYS, SHARES, VECTOR = "keys", "shares", "sum"
"""By which names tensors travel: public keys, shares, and what is summed."""

KEY = 32
"""Bytes of every key and seed."""
PUBLIC = 2 * KEY
"""Bytes of a user's two public keys: that for sealing, that for masks."""
SHARE = KEY + 1
"""Bytes of a share."""
SEALED = 2 * SHARE + 16
"""Bytes of what one user sends another: two shares, encrypted and authenticated."""

_NOBODYS = torch.zeros(1, dtype=torch.int64)
"""No LoRA rank: padding is masked too."""


def upload(name: str, done: int, tensors: dict[str, Tensor]) -> Upload:
    """What a user sends of round ``done``."""
    return Upload(round=done, users=(name,), tensors=tensors, ranks=_NOBODYS)


def download(
    name: str, done: int, senders: Mapping[str, bytes] | Sequence[str], tensors: dict[str, Tensor]
) -> Download:
    """What it receives, of these others."""
    return Download(version=done, users=(name,), tensors=tensors, ranks=_NOBODYS, senders=tuple(senders))


def sent_bytes(terms: Terms, name: str, count: int) -> int:
    """What a user sends for a sum of ``count`` users, if nobody is lost."""
    done = terms.round
    vector = torch.empty((1, terms.entries), dtype=DTYPES[terms.word], device="meta")
    sealed, opened = (_empty(rows, width) for rows, width in ((count - 1, SEALED), (count, SHARE)))
    contents = ({KEYS: _empty(1, PUBLIC)}, {SHARES: sealed}, {VECTOR: vector}, {SHARES: opened})
    return sum(packed_bytes(upload(name, done, tensors))[0] for tensors in contents)


def keys_bytes(terms: Terms, name: str) -> int:
    """What a user sends for a sum of which nothing came."""
    return packed_bytes(upload(name, terms.round, {KEYS: _empty(1, PUBLIC)}))[0]


def received_bytes(terms: Terms, name: str, names: Sequence[str]) -> int:
    """What it receives for a sum of these users, besides the model."""
    done, others = terms.round, [other for other in names if other != name]
    messages = (
        download(name, done, names, {KEYS: _empty(len(names), PUBLIC)}),
        download(name, done, others, {SHARES: _empty(len(others), SEALED)}),
        download(name, done, names, {}),
    )
    return sum(packed_bytes(message)[0] for message in messages)


def _empty(rows: int, width: int) -> Tensor:
    return torch.empty((1, rows, width), dtype=torch.int8, device="meta")


logger = logging.getLogger("comingle")

RANGE = 8.0
"""The largest magnitude of an entry of a change where neither the recipe nor a clip norm says one."""

TAIL = 12
"""Noise of more deviations is cut off; with a chance below 1e-32 an entry has any."""

MOST_SLACK = 0.1
"""The part of the clip norm that rounding may need."""

LEAST_STEPS = 1000
"""A user's noise has a deviation of at least so many steps of the grid."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums of a run, of which users and server know all the settings; rounds are counted from 1.

    With ``weighted`` the sum of the users' weights is the last entry, masked as all are.
    """

    privacy: PrivacySection
    participation: Participation
    users: tuple[str, ...]
    weighted: bool

    @property
    def secure(self) -> SecureSection:
        """The settings."""
        assert self.privacy.secure_aggregation is not None
        return self.privacy.secure_aggregation

    @property
    def word(self) -> int:
        """Bits of the numbers that are sent."""
        return self.secure.word(len(self.users))

    def expected(self, done: int) -> int:
        """How many users a round asks."""
        return int(expected(self.privacy, self.participation, len(self.users), done - 1))

    def least(self, done: int) -> int:
        """Without how many there is no sum."""
        return self.secure.least(self.expected(done))

    def deviation(self, done: int) -> float:
        """Of a user's part of the noise."""
        if not self.privacy.noisy:
            return 0.0
        return self.privacy.multiplier * self.privacy.first_bound / math.sqrt(self.least(done) - self.secure.colluders)

    def grid(self, done: int) -> Grid:
        """On which a round's uploads lie: a change no longer than the clip norm, and the noise."""
        bound = self.secure.range or RANGE
        if self.privacy.noisy:
            bound = self.privacy.first_bound + TAIL * self.deviation(done)
        return Grid(bound=bound, bits=self.secure.bits)

    def terms(self, run: str, done: int, size: int, asked: tuple[str, ...]) -> Terms:
        """What everybody knows of a round's sum of so many shared numbers, for which these users are asked."""
        return Terms(
            run=run,
            round=done,
            users=asked,
            expected=self.expected(done),
            threshold=self.least(done),
            word=self.word,
            entries=size + int(self.weighted),
        )

    def check(self) -> None:
        """Whether every round can have a sum, and the noise fits its grid.

        Raises:
            RecipeError: not so; says why.
        """
        rounds = len(self.participation) if isinstance(self.participation, tuple) else 1
        secure, where = self.secure, "privacy.secure_aggregation"
        for done in range(1, rounds + 1):
            if (asked := self.expected(done)) < (least := self.least(done)):
                raise RecipeError(f"{where}: a round asks {asked} user, whom no sum hides; needed: {least}")
            if least - secure.colluders < LEAST:
                raise RecipeError(
                    f"{where}.colluders: got {secure.colluders}, and a sum may be of {least} users; allowed: up to "
                    f"{least - LEAST}"
                )
            if self.privacy.noisy and self.deviation(done) < LEAST_STEPS * self.grid(done).step:
                raise RecipeError(f"{where}.bits: got {secure.bits}, too few for so little noise; give more")

    def check_size(self, size: int) -> None:
        """Whether so many numbers can be rounded without making a change much longer.

        Raises:
            RecipeError: they cannot.
        """
        if self.privacy.noisy and self.grid(1).slack(size) > MOST_SLACK * self.privacy.first_bound:
            raise RecipeError(
                f"privacy.secure_aggregation.bits: got {self.secure.bits}; rounding {size:,} entries may take more "
                f"than {MOST_SLACK:.0%} of the clip norm; give more bits"
            )

    def sent_bytes(self, name: str, size: int) -> int:
        """What a user sends in a round in which nobody is lost."""
        return sent_bytes(self.terms("", 1, size, self.users), name, self.expected(1))

    def received_bytes(self, name: str, size: int) -> int:
        """What it receives, besides the model."""
        others = [other for other in self.users if other != name]
        return received_bytes(self.terms("", 1, size, self.users), name, [name, *others][: self.expected(1)])

    # ---------------------------------------------------------------- what users put into it

    def uploads(
        self, changes: Tree, weights: Float[Tensor, " users"], names: Sequence[str], key: str, done: int
    ) -> Int[Tensor, "users entries"]:
        """What each user sends, before its masks: whole numbers modulo ``2^word``."""
        grid = self.grid(done)
        if self.privacy.noisy:
            levels = self._noised(changes, weights, names, key, done)
        else:
            levels = self._cut(changes, weights, names, done)
        if self.weighted:
            levels = torch.cat([levels, self._whole(weights, grid).unsqueeze(1)], 1)
        return levels.to(DTYPES[self.word])

    def _cut(self, changes: Tree, weights: Tensor, names: Sequence[str], done: int) -> Int[Tensor, "users entries"]:
        """Entries within the range; who had any beyond it is told."""
        grid, values = self.grid(done), flat(changes).cpu()
        for name, beyond in zip(names, grid.beyond(values), strict=True):
            if beyond:
                logger.warning(
                    "user %r, round %d: %d of %d entries of its change are cut to the range of %g "
                    "(privacy.secure_aggregation.range)", name, done, beyond, values.shape[1], grid.bound,
                )  # fmt: skip
        weight = self._whole(weights, grid).double() / grid.levels
        return grid.place(values.nan_to_num(0.0).clamp(-grid.bound, grid.bound) * weight.unsqueeze(1))

    def _noised(
        self, changes: Tree, weights: Tensor, names: Sequence[str], key: str, done: int
    ) -> Int[Tensor, "users entries"]:
        """Changes no longer than the clip norm, after rounding too, each with its user's part of the noise."""
        grid, entries = self.grid(done), sum(t[0].numel() for t in changes.values())
        bound = self.privacy.first_bound - grid.slack(entries)
        levels = grid.place(flat(scaled(clipped(changes, bound), weights)).cpu())
        steps = self.deviation(done) / grid.step
        drawn = [
            gaussian((entries,), key, name, done, "noise share", digest({"": row}))
            for name, row in zip(names, levels, strict=True)
        ]
        return grid.cut(levels + (torch.stack(drawn) * steps).round().long())

    def _whole(self, weights: Float[Tensor, " users"], grid: Grid) -> Int[Tensor, " users"]:
        """Weights up to 1 as whole numbers; nobody's is 0."""
        return (weights.double() * grid.levels).round().clamp(1, grid.levels).long()

    # ---------------------------------------------------------------- what comes out

    def require(self, there: int, done: int) -> None:
        """Whether a round's users are enough for a sum.

        Raises:
            NoSumError: they are not.
        """
        if there < (least := self.least(done)):
            raise NoSumError(no_sum(done, there, self.expected(done), "have advertised", least))

    def mean(self, total: np.ndarray | Int[Tensor, " entries"], like: Tree, senders: int, done: int) -> Tree:
        """The mean change, float64: with noise over all whom the round asked, else over the weights in the sum."""
        numbers, grid = torch.as_tensor(total), self.grid(done)
        over = float(senders)
        if self.weighted:
            over = float(numbers[-1]) / grid.levels
        if self.privacy.noisy:
            over = float(self.expected(done))
        entries = sum(t.numel() for t in like.values())
        return shaped(numbers[:entries].double() * grid.step / over, like)


@dataclass(kw_only=True)
class SecureSum(PrivacyMechanism):
    """Uploads behind masks, so that the server sees their sum alone; with a part of the noise where there is any.

    The server has no hook here: it never sees an upload. A backend carries the messages of the protocol and hands over
    the total, see :meth:`comingle.training.server.ServerHalf.aggregate_sum`.

    Args:
        privacy: With ``secure_aggregation``.
        sums: How uploads are summed; None before users and rounds are known.
    """

    privacy: PrivacySection
    sums: Sums | None = None

    def supports(self, method: Method, recipe: Recipe) -> None:
        """Check that a sum is all that the server needs."""
        where, privacy, secure = "privacy.secure_aggregation", self.privacy, self.privacy.secure_aggregation
        assert secure is not None
        if method.shared and method.server.kind != "sum":
            raise RecipeError(
                f"{where}: method {method.name}: its server ({type(method.server).__name__}) looks at each upload by "
                "itself, and would see their sum alone"
            )
        if privacy.noise_at in ("upload", "steps"):
            raise RecipeError(
                f"{where}: not with mechanism: {privacy.mechanism}, whose noise hides each upload; allowed: central, "
                "none"
            )
        if privacy.adaptive:
            raise RecipeError(f"{where}: not with clip_norm: adaptive, for which each user says whether it was within")
        if recipe.training.uploads != "float32":
            raise RecipeError(
                f"{where}: has a format of its own (bits); training.uploads: got {recipe.training.uploads!r}; "
                "allowed: float32"
            )
        if privacy.noisy and secure.range is not None:
            raise RecipeError(f"{where}.range: is not read with noise, where it follows from privacy.clip_norm")

    def check_server(self, method: Method, layout: Layout, users: int) -> None:
        """Check that rounding does not make changes much longer."""
        if self.sums is not None and method.shared:
            self.sums.check_size(layout.count(method.shared))

    def client_update(self, update: Update) -> Update:
        """Return changes as whole numbers modulo ``2^word``, before their masks."""
        assert self.sums is not None
        weights = capped_weights(update.counts, self.privacy.weight_cap)
        whole = self.sums.uploads(update.changes, weights, update.names, self.key, update.round_number)
        return replace(update, masked={VECTOR: whole})
