"""What a recipe says of privacy, as the inside has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from comingle.privacy.secure.settings import Secure

ADAPTIVE = "adaptive"
KEY = "privacy.key"
"""The file with the key of the noise."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy: whatever one user's data is changes what others see by at most epsilon, delta.

    ``mechanism`` says where the noise is added: at the server, to the mean ("central"), or at each user ("local"); with
    "none" there is none. With "example" it is privacy of single examples of a user instead of users (DP-SGD): each step
    on what is shared is taken on a sum of clipped gradients with noise, and ``clip_norm`` bounds an example's gradient.
    Without a noise multiplier each user has its own, by how many examples it has.
    With ``secure_aggregation`` the server sees sums of uploads alone, and what "central" adds to
    the sum comes from its users, each a part of it.
    ``clip_norm`` bounds the L2 norm of a user's change; "adaptive" follows ``clip_quantile`` of the users' norms, from
    ``first_clip_norm`` on, with steps of ``clip_rate`` (Andrew et al. 2021, whose values they are; a norm grows tenfold
    in 23 rounds at most). The noise's deviation is ``noise_multiplier`` times the clip norm. Without it the whole run
    spends ``epsilon``; with it the run stops before it is exceeded. ``sampling`` says how a fraction of the users is
    drawn: each by itself ("poisson"), or so many ("fixed"). ``weight_cap`` is the amount of data from which on a user
    has the full weight, where ``training.weighting`` is not uniform. ``noise`` is "secret", or for simulations
    "reproducible" from the seed.
    """

    mechanism: Literal["central", "local", "example", "none"] = "central"
    clip_norm: float | Literal["adaptive"] = 1.0
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    sampling: Literal["poisson", "fixed"] = "poisson"
    accountant: Literal["pld", "rdp"] = "pld"
    weight_cap: int | None = None
    noise: Literal["secret", "reproducible"] = "secret"
    first_clip_norm: float = 0.1
    clip_quantile: float = 0.5
    clip_rate: float = 0.2
    secure_aggregation: Secure | None = None

    @property
    def noisy(self) -> bool:
        """Whether there is noise, and so an account of what is revealed."""
        return self.mechanism != "none"

    @property
    def of_examples(self) -> bool:
        """Whether it is single examples that are hidden, and not users."""
        return self.mechanism == "example"

    @property
    def multiplier(self) -> float:
        """The noise multiplier, once it is known."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    @property
    def adaptive(self) -> bool:
        """Whether the clip norm follows the users' norms."""
        return self.clip_norm == ADAPTIVE

    @property
    def first_bound(self) -> float:
        """The clip norm of the first round."""
        return self.first_clip_norm if isinstance(self.clip_norm, str) else self.clip_norm
