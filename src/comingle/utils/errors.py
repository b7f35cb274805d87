"""Errors that a user can correct, as one tree.

    ComingleError            a mistake that a user can correct; the CLI prints its one line and exits with code 2
    ├── RecipeError          a recipe or a setting: unknown key, wrong type, value out of range
    │   └── UnknownMethodError  no method has this name
    ├── DataError            a user's data: missing file, empty user, too little text, no validation set
    │   └── NoTextError      no text at all, or none of a required split
    ├── BaseModelError       the pretrained model: not found, unknown family, wrong dtype
    ├── RunError             a run folder or checkpoint: exists, truncated, of another run, cannot be resumed
    │   └── RankLostError    another process of the same run has ended
    ├── NoSumError           secure aggregation: too few users for a sum, so the round has none
    ├── PluginError          an installed plug-in: cannot be imported, or its name is taken
    ├── MessageError         a message between users and server: truncated, modified, of another version
    ├── DeclinedError        a client does not carry out a task, as its user's conditions do not hold
    └── DivergenceError      a loss became NaN or infinite (which user, which round)

Each message is one line with the place, the mistake, the value and the allowed values. Broken invariants of our own
are ``assert``s, never one of these errors.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable
from itertools import islice

_SHORT_NAME, _LONG_NAME = 4, 7  # in characters
_MAX_LISTED = 20
_MAX_COMPARED = 10_000
"""Largest number of names with which a misspelt one is compared; more would take minutes."""


class ComingleError(ValueError):
    """A mistake that a user can correct."""


class RecipeError(ComingleError):
    """A recipe or a setting is wrong.

    Args:
        problems: Descriptions of what is wrong, one or more, each of one line. The message joins them in one line.
    """

    def __init__(self, *problems: str) -> None:
        """Join several problems to one message."""
        super().__init__("; ".join(problems))
        self.problems = problems


def run_checks(*checks: Callable[[], object]) -> None:
    """Run all checks of a recipe, and report the problems that they find together, in one error.

    Raises:
        RecipeError: One or more checks raised it.
    """
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except RecipeError as error:
            problems += error.problems
    if problems:
        without_repetitions = dict.fromkeys(problems)
        raise RecipeError(*without_repetitions)


class UnknownMethodError(RecipeError):
    """No method has this name."""


class DataError(ComingleError):
    """A user's data cannot be used."""


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


class DeclinedError(ComingleError):
    """A client does not carry out a task; the reason is one that the server may see."""


class PluginError(ComingleError):
    """An installed plug-in cannot be used."""


class DivergenceError(ComingleError):
    """A loss became NaN or infinite."""


def require_user(name: str, known: Iterable[str], where: str = "") -> str:
    """Return a name after checking that a user has it; the error for an unknown name suggests a similar one.

    Args:
        name: The name.
        known: Names of all users.
        where: Beginning of the message, for example ``"--user: "``.

    Raises:
        DataError: No user has this name.
    """
    names = known if isinstance(known, Collection) else list(known)
    if name not in names:
        raise DataError(f"{where}no user {name!r}; allowed: {list_names(names)}.{did_you_mean(name, names)}")
    return name


def list_names(names: Iterable[object]) -> str:
    """Return the first 20 names, and the number of others, on one line: "ann, bob, ... and 80 more"."""
    all_names = [str(name) for name in names]
    listed = ", ".join(all_names[:_MAX_LISTED])
    num_others = len(all_names) - _MAX_LISTED
    return f"{listed} and {num_others} more" if num_others > 0 else listed


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt or abbreviated name, `` Did you mean 'x'?``; empty if no known name is similar.

    Args:
        got: The name that is not known.
        known: The known names.
    """
    names = list(islice(known, _MAX_COMPARED))  # a comparison with very many names would take minutes
    # Smallest similarity of a near name, as a share of equal letters. It rises with the length, as long names often
    # have a prefix in common.
    if len(got) < _SHORT_NAME:
        cutoff = 0.65
    elif len(got) < _LONG_NAME:
        cutoff = 0.75
    else:
        cutoff = 0.77
    near = difflib.get_close_matches(got, names, n=1, cutoff=cutoff)
    if near:
        return f" Did you mean {near[0]!r}?"
    is_too_short = len(got) <= _SHORT_NAME  # a short prefix would match by chance
    completions = [name for name in names if name.startswith(got)]
    if is_too_short or len(completions) != 1:
        return ""
    return f" Did you mean {completions[0]!r}?"


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error was raised for lack of memory, on a CPU or a GPU. This does not import torch."""
    if isinstance(error, MemoryError):
        return True
    is_of_gpu = type(error).__name__ == "OutOfMemoryError"  # torch.cuda's class
    is_of_cpu = _CPU_OUT_OF_MEMORY in str(error)
    return is_of_gpu or is_of_cpu


_CPU_OUT_OF_MEMORY = "can't allocate memory"  # torch's allocator for CPUs raises a RuntimeError


LARGEST = 1e38
"""Largest value of a setting. The largest float32 is 3.4e38, and PyTorch does not scale float32 tensors by more."""


def is_number(value: object) -> bool:
    """Return whether a setting is an int or float of at most 1e38 in magnitude, which float32 can hold.

    NaN, infinity and booleans are not numbers in this sense.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def require_docstrings() -> None:
    """Check that Python has kept docstrings: transformers parses them when it imports a model class, and fails without.

    Raises:
        BaseModelError: Python runs with ``-OO``.
    """
    if sys.flags.optimize > 1:
        raise BaseModelError("python: got -OO, which removes docstrings that transformers reads; allowed: -O")
