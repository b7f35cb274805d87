"""From a relative budget to ranks, out of each layer's true number of parameters.

``rho`` allows an adaptor ``rho`` times the entries of its base weight (FLoRAL section 3.2, "Relative parameter
budget"), so ``rank = floor(rho * base / parameters of one rank)``: for a linear ``floor(rho m n / (m + n))``. The
public code gives every form of convolution one rank; here each form is sized by what it really costs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from comingle.adapters.clustered.geometry import Geometry
from comingle.utils.errors import RecipeError, is_number

logger = logging.getLogger("comingle")


def check_size(rank: int | None, budget: float | None) -> None:
    """Exactly one of the two, and in range.

    Raises:
        RecipeError: both or neither, a rank below 1 or not whole, a budget outside (0, 1].
    """
    if (rank is None) == (budget is None):
        raise RecipeError(f"floral: got rank={rank} and budget={budget}, needs exactly one of the two")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise RecipeError(f"floral rank: got {rank!r}, needs a whole number of at least 1")
    if budget is not None and not (is_number(budget) and 0 < budget <= 1):
        raise RecipeError(f"floral budget: got {budget!r}, needs a share of the base above 0 and at most 1")


def affordable_rank(geometry: Geometry, budget: float) -> int:
    """The largest rank within ``budget`` of the base weight, 0 where not even one fits; ``geometry`` is of rank 1."""
    # 0.29 * 100 is 28.999999999999996 in binary; the nudge keeps a rank that fits exactly.
    return math.floor(budget * geometry.base_size / geometry.size + 1e-9)


def log_excess(budget: float, over: Collection[str], layers: int, *, clusters: int, growth: float) -> None:
    """One line where the minimum rank of 1 broke the budget in the layers named in ``over``; nothing otherwise.

    ``growth`` is the number of adaptor parameters of all clusters over that of the base's parameters.
    """
    if over:
        logger.warning(
            "floral: rank 1 is more than budget %g allows in %d of %d low-rank layers (%s); "
            "%d clusters add %+.0f%% parameters where the budget allows %+.0f%%",
            budget, len(over), layers, shorten(over), clusters, 100 * growth, 100 * budget * clusters,
        )  # fmt: skip


def log_cut(rank: int, cut: Collection[str], layers: int) -> None:
    """One line where ``rank`` is more than the weights of the layers named in ``cut`` can have; nothing otherwise."""
    if cut:
        logger.warning(
            "floral: rank %d is more than a weight can have in %d of %d low-rank layers (%s); they get all that it can",
            rank, len(cut), layers, shorten(cut),
        )  # fmt: skip


def shorten(names: Collection[str], most: int = 5) -> str:
    """The names, or the first few and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
