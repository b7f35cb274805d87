"""Users who leave the real numbers: how they are found, and what is said of them."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from comingle.errors import DivergenceError


def diverged(user: str, what: str) -> DivergenceError:
    """The error for a user who has left the real numbers."""
    advice = "try a smaller training.experts.learning_rate, or training.experts.clip_norm: 1.0"
    return DivergenceError(f"user {user!r}: {what}; {advice}")


def find_broken(
    losses: Float[Tensor, "steps users"], rows: Float[Tensor, "users columns"], round_number: int
) -> dict[int, str]:
    """Who of a cohort is no longer finite after its local steps, by place in the cohort, with the reason."""
    broken: dict[int, str] = {}
    for step, user in (~losses.isfinite()).nonzero().tolist():
        what = f"training loss is {losses[step, user].item()} in round {round_number + 1}, local step {step + 1}"
        broken.setdefault(user, what)
    # The rows too: what breaks in the last step shows in no loss of this round, and the exchange would spread it.
    for user in (~rows.sum(1).isfinite()).nonzero().flatten().tolist():  # one pass, without a copy
        broken.setdefault(user, f"not all tensors are finite after round {round_number + 1}")
    return broken
