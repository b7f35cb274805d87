"""Users who leave the real numbers, and passes that need more memory than there is: what is said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.engines.training import Portions
from comingle.utils.errors import DivergenceError, RecipeError, lacks_memory
from comingle.utils.trees import Layout


@contextmanager
def within_memory(portions: Portions, users: int, device: torch.device) -> Iterator[None]:
    """Passes of so many users, in such portions.

    Raises:
        RecipeError: they need more memory than ``device`` has; says which setting to lower to what.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        at_once, sequences = min(portions.users, users), portions.sequences
        lower = (
            f"runtime.users_per_step={at_once // 2}, or auto" if at_once > 1
            else f"runtime.micro_batch={sequences // 2}" if sequences > 1
            else "a smaller base, training.context or adapters.rank"
        )  # fmt: skip
        what = f"{at_once} {'user' if at_once == 1 else 'users'} with {sequences} sequences or samples each"
        raise RecipeError(f"runtime: {device} has not the memory for a pass of {what}; try {lower}") from None


def diverged(user: str, what: str, suspects: Sequence[str] = ("experts",)) -> DivergenceError:
    """The error for a user who has left the real numbers.

    ``suspects`` are the optimisers that may have done it; none before any training.
    """
    keys = ("learning_rate", "clip_norm")
    rates, norms = (" and ".join(f"training.{name}.{key}" for name in suspects) for key in keys)
    advice = f"try a smaller {rates}, or {norms}: 1.0" if suspects else "nothing was trained, so the base is at fault"
    return DivergenceError(f"user {user!r}: {what}; {advice}")


def broke_first(
    layout: Layout, row: Float[Tensor, " columns"], trained: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Which optimisers, each with the roles that it trains, made a user's tensors so large that a loss broke.

    What breaks a loss is larger than the rest by orders of magnitude. Where two are within one, or neither is a number
    any more, that cannot be told, and both are named.
    """
    magnitudes = {name: row[layout.mask(roles).to(row.device)].abs() for name, roles in trained.items()}
    sizes = {
        name: magnitude.nan_to_num(nan=torch.inf).max().item()
        for name, magnitude in magnitudes.items()
        if len(magnitude)
    }
    return tuple(name for name, size in sizes.items() if size >= max(sizes.values()) / 10)


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
