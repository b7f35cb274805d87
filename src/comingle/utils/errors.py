"""Everything that can go wrong for a user, as one tree.

    ComingleError            a mistake a user can correct; the CLI prints its one line and exits with code 2
    ├── RecipeError          a recipe or a setting: unknown key, wrong type, value out of range
    │   └── UnknownMethodError  no method of that name is known
    ├── DataError            a user's text: missing file, empty user, too little text, no validation set
    │   └── NoTextError      no text at all, or none of a split that was asked for
    ├── BaseModelError       the pretrained model: not found, unknown family, wrong dtype
    ├── RunError             a run folder or checkpoint: exists, truncated, foreign, not resumable
    │   └── RankLostError    another process of the same run has ended
    ├── NoSumError           secure aggregation: too few users for a sum, so the round has none
    ├── PluginError          an installed package that adds to comingle: cannot be imported, or its name is taken
    ├── MessageError         a message between users and server: truncated, changed on the way, of another version
    └── DivergenceError      training left the real numbers (which user, which round)

Each message is one line that says where, what was wrong, what was got, and what is allowed. Our own broken
invariants are ``assert``s, never one of these.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable
from itertools import islice

_SHORT, _LONG = 4, 7
_LISTED = 20
_COMPARED = 10_000
"""With so many names a misspelt one is compared; with more it would take minutes."""


class ComingleError(ValueError):
    """A mistake a user can correct."""


class RecipeError(ComingleError):
    """A recipe or a setting is wrong.

    Args:
        problems: Descriptions of what is wrong, one or more, each of one line. The message joins them in one line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def run_checks(*checks: Callable[[], object]) -> None:
    """Run all checks of a recipe.

    Raises:
        RecipeError: One or more checks raised it; it has all their problems.
    """
    problems: dict[str, None] = {}  # without repetitions, in order
    for check in checks:
        try:
            check()
        except RecipeError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise RecipeError(*problems)


class UnknownMethodError(RecipeError):
    """No method of that name is known."""


class DataError(ComingleError):
    """A user's text cannot be used."""


class NoTextError(DataError):
    """A user has no text, or none of a split."""


class BaseModelError(ComingleError):
    """The pretrained model cannot be used."""


class RunError(ComingleError):
    """A run folder or a checkpoint cannot be used."""


class RankLostError(RunError):
    """Another process of the same run has ended."""


class NoSumError(ComingleError):
    """Too few users for a sum of their uploads."""


class MessageError(ComingleError):
    """A message cannot be read."""


class PluginError(ComingleError):
    """An installed plug-in cannot be used."""


class DivergenceError(ComingleError):
    """A loss became NaN or infinite."""


def require_user(name: str, known: Iterable[str], where: str = "") -> str:
    """The name of somebody who is there; ``where`` begins what is said otherwise.

    Raises:
        DataError: nobody of that name.
    """
    names = known if isinstance(known, Collection) else list(known)
    if name not in names:
        raise DataError(f"{where}no user {name!r}; there are: {list_names(names)}.{did_you_mean(name, names)}")
    return name


def list_names(names: Iterable[object]) -> str:
    """Names in one line, the first twenty in full."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, or the beginning of one: `` Did you mean 'x'?``, or nothing when none is near."""
    # One wrong letter of three, of four, and fewer of longer ones; and names that begin alike are not near.
    cutoff = 0.65 if len(got) < _SHORT else 0.75 if len(got) < _LONG else 0.77
    names = list(islice(known, _COMPARED))
    longer = [name for name in names if len(got) > _SHORT and name.startswith(got)]
    near = difflib.get_close_matches(got, names, n=1, cutoff=cutoff) or (longer if len(longer) == 1 else [])
    return f" Did you mean {near[0]!r}?" if near else ""


def lacks_memory(error: BaseException) -> bool:
    """Whether it was raised because there is not enough memory, on a CPU or a GPU; asks without importing torch."""
    of_gpus = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or of_gpus or _ALLOCATION in str(error)


_ALLOCATION = "can't allocate memory"  # torch's allocator for CPUs raises a RuntimeError


LARGEST = 1e38
"""No setting is above it: float32 ends at 3.4e38, and PyTorch refuses to scale its tensors by more."""


def is_number(value: object) -> bool:
    """Whether a setting is a real number that float32 has, which a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def require_docstrings() -> None:
    """Check that Python keeps docstrings, which transformers parses when it imports a model class.

    Raises:
        BaseModelError: Python runs with ``-OO``.
    """
    if sys.flags.optimize > 1:
        raise BaseModelError("python: got -OO, which removes docstrings that transformers reads; allowed: -O")
