"""What a recipe says of optimisers and training, as the inside has it.

Recipes take their defaults from here, and are read without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from comingle.privacy.settings import Privacy
from comingle.protocol.messages import Format
from comingle.robust.settings import Aggregation

if TYPE_CHECKING:
    from comingle.privacy.summing import Sums

EVERYBODY = 1.0
"""As a fraction of the users."""

AUTO: Final = "auto"

SHORTEST = 5
"""Rounds between two evaluations where a recipe says "auto": more would hardly show more, and each is a download."""

MEMORY: Final = "memory"
"""Where users' tensors are, unless a recipe says otherwise."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """An optimiser and its schedule. ``momentum`` belongs to SGD, ``betas`` and ``eps`` to AdamW."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 2e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    final_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    clip_norm: float | None = None

    @property
    def moments(self) -> frozenset[str]:
        """Which moments the optimiser keeps: ``first``, ``second``."""
        if self.name == "adamw":
            return frozenset({"first", "second"})
        return frozenset({"first"} if self.momentum else ())

    @property
    def memoryless(self) -> bool:
        """Whether a step needs nothing but each entry's own gradient, and so can go tensor by tensor."""
        return not self.moments and self.clip_norm is None


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, on how much, in what portions.

    A round has ``local_steps`` iterations on random windows of text, or ``local_epochs`` passes over samples.
    ``uploads`` is the format of what users send, see :mod:`comingle.protocol.messages`.
    ``users_per_step`` and ``micro_batch`` (sequences of one user in one pass) bound memory; None chooses them.
    ``participation`` is a fraction of the users drawn each round, or a list of users (by number) for each round, which
    is repeated when it ends. ``evaluate`` says which model counts: "local", as a user has it after its local steps
    (Algorithm 1 of CoMiGS returns that one), or "exchanged", after the exchange that ends the round. With
    ``evaluate_first`` there is an evaluation before any training too; how often there are others, ``evaluate_every``,
    may be left to :mod:`comingle.engines.periods`. ``select`` says with which round's models a run
    ends: the "last", or of those that were evaluated the "best", with the lowest validation loss, mean over users.
    ``evaluate_users`` are drawn once for all evaluations; None: everybody is evaluated. ``store`` says where the
    tensors of users are whom nobody works on, see :class:`comingle.engines.state.Stored`.
    ``privacy`` says what is done to uploads so that they reveal little of a user; its noise is known, but for that on
    single examples, which follows from how many rounds each of all ``users`` takes part in. ``sums`` is there where the
    server sees sums of uploads alone. ``aggregation`` says what it makes of uploads some of which may be hostile; None
    is the method's mean.
    """

    rounds: int = 20
    local_steps: int = 10
    local_epochs: int = 1
    batch_size: int = 64
    context: int = 128
    experts: OptimizerSettings = OptimizerSettings()
    router: OptimizerSettings = OptimizerSettings(schedule="constant")
    balance_weight: float = 0.01
    weighting: Literal["uniform", "tokens", "samples"] = "uniform"
    participation: float | tuple[tuple[int, ...], ...] = EVERYBODY
    uploads: Format = "float32"
    users_per_step: int | None = None
    micro_batch: int | None = None
    evaluate: Literal["local", "exchanged"] = "local"
    evaluate_every: int | Literal["auto"] = AUTO
    evaluate_first: bool = True
    select: Literal["last", "best"] = "last"
    checkpoint_every: int = 5
    evaluate_users: int | None = None
    store: Literal["memory", "disk", "disk-bf16"] = MEMORY
    seed: int = 0
    privacy: Privacy | None = None
    users: tuple[str, ...] = ()
    sums: Sums | None = None
    aggregation: Aggregation | None = None
    test_limit: str = ""
    """Recipe key that limits each user's test data; empty where the kind of data has none."""

    @property
    def period(self) -> int:
        """Rounds from one evaluation to the next; at least, where that is still to be found."""
        return SHORTEST if self.evaluate_every == AUTO else self.evaluate_every

    @property
    def iterations(self) -> int:
        """Local iterations of a user who takes part in every round."""
        return self.rounds * self.local_steps
