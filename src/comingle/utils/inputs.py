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
    """Write a record of what a run reads (base model, tokenizer and each user's data, as digests) to its folder."""
    write_json(folder / INPUTS, asdict(inputs))


def read_inputs(folder: Path) -> Inputs:
    """Return the inputs that a run was started with.

    Raises:
        RunError: The file is missing, as in folders of older versions, or damaged.
    """
    path = folder / INPUTS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        inputs_by_user = content.pop("users")
        users = {name: UserInputs(**inputs) for name, inputs in inputs_by_user.items()}
        return Inputs(users=users, **content)
    except FileNotFoundError:
        raise RunError(f"{path}: no such file, so the run's inputs are unknown; run it again with --force") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise RunError(f"{path}: damaged ({error}); run it again with --force") from None


def recorded_date(folder: Path) -> str:
    """Return the date that a run's chat template has in every prompt; empty if it has none.

    Some templates write the current date. A resumed run has to write the date of its start.
    """
    try:
        return str(read_inputs(folder).settings.get(DATE, ""))
    except RunError:  # reported when the run is resumed
        return ""


def check_inputs(where: Path, recorded: Inputs, now: Inputs, *, pooled: str = "") -> None:
    """Check that a run is resumed with the inputs that it was started with.

    Args:
        where: The run folder, for error messages.
        recorded: The inputs that the run was started with.
        now: The current inputs.
        pooled: Name of the run's method if it pools all users' data, as its result then depends on the order of users;
            empty for other methods.

    Raises:
        RunError: The base, the tokenizer or a user's data changed. The message names it.
    """
    check_base(where, recorded, now.base, now.tokenizer)
    check_users(where, recorded, now)
    for name, user in now.users.items():
        recorded_values = recorded.users[name].given
        for key, value in user.given.items():  # settings for which the recipe lists a value per user
            recorded_value = recorded_values.get(key)
            if recorded_value != value:
                raise RunError(f"{where}: user {name!r}: {key} was {recorded_value} and is {value}; use another --out")
    has_same_order = list(recorded.users) == list(now.users)
    if pooled and not has_same_order:
        raise RunError(
            f"{where}: the order of users was {list_names(recorded.users)} and is {list_names(now.users)}, and "
            f"{pooled} depends on it; use another --out"
        )


def check_base(where: Path, recorded: Inputs, base: str, tokenizer: str) -> None:
    """Check that base and tokenizer have the digests that the run was started with.

    Args:
        where: The run folder, for error messages.
        recorded: The inputs that the run was started with.
        base: Current digest of the base.
        tokenizer: Current digest of the tokenizer, ``TOKENIZER:TEMPLATE``; older runs recorded the first part only.

    Raises:
        RunError: The base or the tokenizer changed.
    """
    if recorded.base != base:
        raise RunError(f"{where}: the base changed since the run began; {_ADVICE}")
    without_template = tokenizer.partition(":")[0]
    if recorded.tokenizer not in (tokenizer, without_template):
        raise RunError(f"{where}: the tokenizer changed since the run began; {_ADVICE}")


def check_users(where: Path, recorded: Inputs, now: Inputs) -> None:
    """Check that the users and their data are those with which the run was started; their order does not matter.

    Args:
        where: The run folder, for error messages.
        recorded: The inputs that the run was started with.
        now: The current inputs.

    Raises:
        RunError: A user was added or removed, or has other data.
    """
    # Populations that are stored on disk have one digest for all users, under the key POPULATION.
    recorded_store = "disk" if POPULATION in recorded.settings else "memory"
    store = "disk" if POPULATION in now.settings else "memory"
    if store != recorded_store:
        raise RunError(
            f"{where}: the run was started with runtime.store: {recorded_store}; got {store}; resume it with the same "
            "one"
        )
    if recorded.settings.get(POPULATION) != now.settings.get(POPULATION):
        raise RunError(f"{where}: the users or their data changed since the run began; {_ADVICE}")
    for name in [*now.users, *recorded.users]:
        if name not in now.users:
            raise RunError(f"{where}: user {name!r} was removed since the run began; {_ADVICE}")
        if name not in recorded.users:
            raise RunError(f"{where}: user {name!r} was added since the run began; {_ADVICE}")
        for split in SPLITS:
            if recorded.users[name].digests[split] != now.users[name].digests[split]:
                raise RunError(f"{where}: user {name!r}: the {split} data changed since the run began; {_ADVICE}")


_ADVICE = "restore it, or start again with another --out"
