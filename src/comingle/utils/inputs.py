"""Inputs of a run, as ``inputs.json`` in its folder: names and digests of the data, the base and the tokenizer.

A run can be resumed only with the inputs that it was started with. Names and clusters of users are included, so that a
run can be opened without their data. Of the data itself only the amount and the digest are kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comingle.utils.errors import RunError, list_names
from comingle.utils.records import write_json

INPUTS = "inputs.json"
SPLITS = ("train", "valid", "test")
DATE = "date"
"""Key in the settings: the date in the base's chat template, if the template writes the current date."""
POPULATION = "population"
"""Key in the settings: the number of users and their common digests, for populations that are not listed."""


@dataclass(frozen=True, kw_only=True)
class UserInputs:
    """Amount and digest of each split of a user, and the true ``cluster`` if it is known.

    ``given`` are this user's values from lists in the recipe with a value per user.
    """

    counts: dict[str, int]
    digests: dict[str, str]
    cluster: int | None = None
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All inputs of a run: the kind of data, base, tokenizer, users, and settings of the kind."""

    kind: str
    base: str
    tokenizer: str
    users: dict[str, UserInputs]
    settings: dict[str, Any] = field(default_factory=dict)


def write_inputs(folder: Path, inputs: Inputs) -> None:
    """Write a run's inputs to its folder."""
    write_json(folder / INPUTS, asdict(inputs))


def read_inputs(folder: Path) -> Inputs:
    """Return the inputs that a run was started with.

    Raises:
        RunError: The file is missing, as in folders of older versions, or damaged.
    """
    path = folder / INPUTS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        users = {name: UserInputs(**inputs) for name, inputs in content.pop("users").items()}
        return Inputs(users=users, **content)
    except FileNotFoundError:
        raise RunError(f"{path}: no such file, so the run's inputs are unknown; run it again with --force") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise RunError(f"{path}: damaged ({error}); run it again with --force") from None


def recorded_date(folder: Path) -> str:
    """Return the date in a run's chat template; empty if none is recorded."""
    try:
        return str(read_inputs(folder).settings.get(DATE, ""))
    except RunError:  # reported when the run is resumed
        return ""


def check_inputs(where: Path, was: Inputs, now: Inputs, *, pooled: str = "") -> None:
    """Check that a run is resumed with the inputs that it was started with.

    Args:
        where: The run folder, for messages.
        was: The recorded inputs.
        now: The current inputs.
        pooled: Name of a method that pools all users' data, whose result depends on their order.

    Raises:
        RunError: The base, the tokenizer or a user's data changed. The message names it.
    """
    check_base(where, was, now.base, now.tokenizer)
    check_users(where, was, now)
    for name, user in now.users.items():
        for key, value in user.given.items():
            if (before := was.users[name].given.get(key)) != value:
                raise RunError(f"{where}: user {name!r}: {key} was {before} and is {value}; use another --out")
    if pooled and list(was.users) != list(now.users):
        orders = f"was {list_names(was.users)} and is {list_names(now.users)}"
        raise RunError(f"{where}: the order of users {orders}, and {pooled} depends on it; use another --out")


def check_base(where: Path, was: Inputs, base: str, tokenizer: str) -> None:
    """Check the digests of base and tokenizer; older digests do not include a chat template.

    Args:
        where: The run folder, for messages.
        was: The recorded inputs.
        base: Current digest of the base.
        tokenizer: Current digest of the tokenizer.

    Raises:
        RunError: One of them changed.
    """
    for part, before, now in (("base", was.base, base), ("tokenizer", was.tokenizer, tokenizer)):
        if now not in (before, f"{before}:{now.partition(':')[2]}"):
            raise RunError(f"{where}: the {part} changed since the run began; {_ADVICE}")


def check_users(where: Path, was: Inputs, now: Inputs) -> None:
    """Check that the users and their data are the same; their order does not matter.

    Args:
        where: The run folder, for messages.
        was: The recorded inputs.
        now: The current inputs.

    Raises:
        RunError: A user was added or removed, or has other data.
    """
    if (POPULATION in was.settings) != (POPULATION in now.settings):
        kept, got = ("disk", "memory") if POPULATION in was.settings else ("memory", "disk")
        raise RunError(
            f"{where}: the run was started with runtime.store: {kept}; got {got}; resume it with the same one"
        )
    if was.settings.get(POPULATION) != now.settings.get(POPULATION):
        raise RunError(f"{where}: the users or their data changed since the run began; {_ADVICE}")
    for name in [*now.users, *was.users]:
        if name not in now.users or name not in was.users:
            change = "was removed" if name in was.users else "was added"
            raise RunError(f"{where}: user {name!r} {change} since the run began; {_ADVICE}")
        for split in SPLITS:
            if was.users[name].digests[split] != now.users[name].digests[split]:
                raise RunError(f"{where}: user {name!r}: the {split} data changed since the run began; {_ADVICE}")


_ADVICE = "restore it, or start again with another --out"
