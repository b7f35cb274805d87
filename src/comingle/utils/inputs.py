"""What a run has read, as ``inputs.json`` in its folder: names and digests of the data, the base and the tokenizer.

A run goes on only with what it began with. What a model needs of its users (names, clusters) is here too, so that a
run opens without their data; of the data itself there is nothing but its amount and its digest.
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
"""In the settings: the date that the base's chat template writes, where it writes today's."""
POPULATION = "population"
"""In the settings: how many users there are and digests of them all, where nobody holds a list of them."""


@dataclass(frozen=True, kw_only=True)
class UserInputs:
    """How much a user has of each split and its digest; the true ``cluster``, where one is known.

    ``given`` are the recipe's values for this user out of its lists with a value for each.
    """

    counts: dict[str, int]
    digests: dict[str, str]
    cluster: int | None = None
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that was read: of which kind, and what the kind keeps besides."""

    kind: str
    base: str
    tokenizer: str
    users: dict[str, UserInputs]
    settings: dict[str, Any] = field(default_factory=dict)


def write_inputs(folder: Path, inputs: Inputs) -> None:
    """Keep a run's inputs in its folder."""
    write_json(folder / INPUTS, asdict(inputs))


def read_inputs(folder: Path) -> Inputs:
    """What a run was begun with.

    Raises:
        RunError: nothing says so, as in folders of older versions, or it is damaged.
    """
    path = folder / INPUTS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        users = {name: UserInputs(**of_user) for name, of_user in content.pop("users").items()}
        return Inputs(users=users, **content)
    except FileNotFoundError:
        raise RunError(f"{path}: not there, so nothing says what the run has read; run it anew with --force") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise RunError(f"{path}: damaged ({error}); run it anew with --force") from None


def recorded_date(folder: Path) -> str:
    """Return the date with which a run's chat template was begun, or nothing where none is recorded."""
    try:
        return str(read_inputs(folder).settings.get(DATE, ""))
    except RunError:  # whoever goes on with the run says so
        return ""


def check_inputs(where: Path, was: Inputs, now: Inputs, *, pooled: str = "") -> None:
    """Whether a run would go on with what it began with; ``pooled`` names a method that has all data in one row.

    Raises:
        RunError: the base, the tokenizer or somebody's data changed; says what and whose.
    """
    check_base(where, was, now.base, now.tokenizer)
    check_users(where, was, now)
    for name, of_user in now.users.items():
        for key, value in of_user.given.items():
            if (before := was.users[name].given.get(key)) != value:
                raise RunError(f"{where}: user {name!r}: {key} was {before} and is {value}; use another --out")
    if pooled and list(was.users) != list(now.users):
        orders = f"were {list_names(was.users)} and are {list_names(now.users)}"
        raise RunError(
            f"{where}: the users {orders}, in this order, in which {pooled} reads their data; use another --out"
        )


def check_base(where: Path, was: Inputs, base: str, tokenizer: str) -> None:
    """Whether base and tokenizer are the same, by their digests; older ones say nothing of a chat template.

    Raises:
        RunError: one of them changed.
    """
    for part, before, now in (("base", was.base, base), ("tokenizer", was.tokenizer, tokenizer)):
        if now not in (before, f"{before}:{now.partition(':')[2]}"):
            raise RunError(f"{where}: the {part} changed since the run began; {_ADVICE}")


def check_users(where: Path, was: Inputs, now: Inputs) -> None:
    """Whether the users and their data are the same; their order does not matter.

    Raises:
        RunError: somebody is new or gone, or has other data.
    """
    if (POPULATION in was.settings) != (POPULATION in now.settings):
        raise RunError(f"{where}: begun with another runtime.store; a run goes on with what it began with")
    if was.settings.get(POPULATION) != now.settings.get(POPULATION):
        raise RunError(f"{where}: the users or their data changed since the run began; {_ADVICE}")
    for name in [*now.users, *was.users]:
        if name not in now.users or name not in was.users:
            change = "has gone" if name in was.users else "is new"
            raise RunError(f"{where}: user {name!r} {change} since the run began; {_ADVICE}")
        for split in SPLITS:
            if was.users[name].digests[split] != now.users[name].digests[split]:
                raise RunError(f"{where}: user {name!r}: the {split} data changed since the run began; {_ADVICE}")


_ADVICE = "restore it, or begin anew with another --out"
