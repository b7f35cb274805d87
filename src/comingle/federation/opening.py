"""A user's part of a run as it was left: opened once server and user are known to speak of the same federation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from comingle.config import Recipe, parse_recipe
from comingle.config.sections import complete_older
from comingle.federation.home import Home
from comingle.federation.own import Own
from comingle.federation.public import Public, build_house, read_public, tokens_of
from comingle.models.base import digests_of
from comingle.models.loading import is_public
from comingle.runs.given import Given
from comingle.runs.session import describe, prepare
from comingle.training.kinds.base import Materials
from comingle.training.privacy import keep_key
from comingle.utils.errors import BaseModelError, DataError, MessageError, RunError, list_names
from comingle.utils.inputs import DATE, INPUTS, SPLITS, Inputs, read_inputs, write_inputs
from comingle.utils.records import PUBLIC, expand_home, write_json


def open_home(folder: Path, own: Own, public: Public) -> Home:
    """The user's part of a run, as it was left.

    Raises:
        MessageError: server and user do not speak of the same federation; says what each has.
        ComingleError: the user's data or base cannot be used.
    """
    public.check()
    recipe = _own_recipe(own, public)
    _check_expected(own, public)
    read = prepare(recipe, given=Given(date=str(public.settings.get(DATE, ""))))
    _check_base(public, read)
    house = build_house(public, recipe, read.base)
    number = public.users.index(own.name)
    _check_settings(own, public, read)
    users = tuple(read.users[0] if i == number else user for i, user in enumerate(house.materials.users))
    common = house.materials.common
    common = None if common is None else replace(common, users=users)
    materials = replace(house.materials, users=users, common=common, here=(number,), unread=False)
    clients = materials.kind.clients(recipe, materials, house.method, house.training)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "answers").mkdir(exist_ok=True)
    if not (folder / PUBLIC).exists():
        write_json(folder / PUBLIC, public.as_dict())
    home = Home(folder=folder, public=public, recipe=recipe, read=read, clients=clients, first=clients.state.copy())
    begun = any((folder / "answers").glob("*.bin"))  # so something may have been released
    _check_inputs(folder, own, describe(read, recipe), begun=begun)
    keep_key(folder, clients.shield, clients.steps.examples, begun=begun)
    home.tidy()
    home.newest()
    return home


def _check_inputs(folder: Path, own: Own, now: Inputs, *, begun: bool) -> None:
    """Whether the folder is this user's, and the data what the user has ``begun`` the run with; a new one is told both.

    Raises:
        RunError: the folder is another user's.
        DataError: the data is other than it was.
    """
    if not begun or not (folder / INPUTS).exists():
        return write_inputs(folder, now)
    try:
        was = read_inputs(folder)
    except RunError:
        raise RunError(f"{folder / INPUTS}: damaged; delete {folder} to begin this run anew") from None
    if list(was.users) != [own.name]:
        raise RunError(f"{folder}: of user {list_names(was.users)}, not of {own.name!r}; use another --state")
    before, after = was.users[own.name].digests, now.users[own.name].digests
    if changed := [split for split in SPLITS if before[split] != after[split]]:
        raise DataError(
            f"{folder}: user {own.name!r}: the {' and '.join(changed)} data changed since the run began; "
            "restore it, or take part anew with another --state"
        )
    return None


def known_public(folder: Path) -> Public | None:
    """What the server said of a run's federation, if the user has taken part before."""
    path = folder / PUBLIC
    if not path.exists():
        return None
    try:
        return read_public(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); delete {folder} to begin this run anew") from None


def _own_recipe(own: Own, public: Public) -> Recipe:
    if own.name not in public.users:
        raise MessageError(f"user {own.name!r}: not among the participants: {', '.join(public.users)}")
    content: dict[str, Any] = dict(complete_older(public.recipe))
    content["data"] = own.data_section(content["data"])
    if own.base is not None:
        content["base"] = own.base
    else:
        _check_base_name(public.whole_recipe().base)
    content["runtime"] = {**content.get("runtime", {}), **own.runtime}
    return parse_recipe(content, where=f"user {own.name!r}")


def _check_base_name(name: str) -> None:
    """A server names no file of the user's, and does not learn which there are."""
    if not is_public(name):
        raise MessageError(
            f"base: the server names a file or folder, {name!r}; `base` in your own file says where it is"
        )
    if expand_home(name).exists():
        raise BaseModelError(
            f"base: {name} of the server is a folder here; `base` in your own file says which is meant"
        )


def _check_expected(own: Own, public: Public) -> None:
    said: Mapping[str, str] = {"recipe": public.digest, "base": public.base}
    for what, wanted in own.expects.items():
        if said[what] != wanted:
            raise MessageError(f"user {own.name!r}: expects {what} {wanted}; the server has {said[what]}")


def _check_base(public: Public, read: Materials) -> None:
    for what, mine in digests_of(read.base).items():
        theirs = getattr(public, what)
        if mine not in (theirs, tokens_of(theirs)) and theirs != tokens_of(mine):
            raise MessageError(
                f"{what}: the server's is {theirs or 'none'}, this user's {mine or 'none'}; use the same"
            )


def _check_settings(own: Own, public: Public, read: Materials) -> None:
    """Nets fit each other where shapes and labels are the same."""
    mine = read.kind.settings(read)
    for key, value in public.settings.items():
        if key == "classes" and isinstance(value, int) and mine.get(key, value) <= value:
            continue  # who has not seen every class
        if json.dumps(mine.get(key, value)) != json.dumps(value):
            raise MessageError(f"user {own.name!r}: {key} of the data is {mine[key]}; the federation's is {value}")
