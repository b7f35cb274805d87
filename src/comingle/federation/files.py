"""The server's file of a federation, and the conversion of a recipe into files of server and clients.

The server's file has the keys of a recipe except data sources, and

    participants: [ada, ben, cem]       names of the users
    network: {min_participants: 2, round_timeout: 600, join_timeout: 300}
    shapes: {...}                       for samples: shapes and labels of networks (see docs/federation.md)
    rounds: {when: {users: 3, new_tokens: 2000, at_most_every: 1h}}     only with --continuous

A client's file is a :class:`comingle.federation.participant.Participant`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from comingle.config import Recipe, parse_recipe
from comingle.federation.participant import Own, parse_section, read_mapping
from comingle.federation.public import check_remote_clients, without_data
from comingle.federation.run_folder import Plan, RoundsSection
from comingle.federation.server_session import NetworkSection
from comingle.runs.continuation import check_endless
from comingle.runs.session import prepare
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import RecipeError
from comingle.utils.names import name_problem
from comingle.utils.records import JsonObject, expand_home, write_text


def load_plan(path: Path, *, continue_from: str = "", continuous: bool | None = None) -> Plan:
    """Read a server's file: a recipe without data sources, and the keys ``participants``, ``network`` and ``shapes``.

    The data is text unless the file names another kind. Relative paths are relative to the file.

    Args:
        path: Path of the file.
        continue_from: Folder of an earlier run to continue, instead of the one in the file; empty for that.
        continuous: Whether the federation is continuous, which ``rounds`` is for; None if either is allowed.

    Raises:
        RecipeError: The file does not exist, a value is wrong, or clients on other machines cannot run the recipe.
    """
    plan = _parse_plan(read_mapping(path), path, continue_from)
    if continuous is False and plan.rounds is not None:
        raise RecipeError(f"{path}: rounds: got a section; allowed: with --continuous")
    if not continuous:
        return plan
    _check_continuous(path, plan.recipe)
    rounds, privacy = plan.rounds or RoundsSection(), plan.recipe.privacy
    if rounds.keep is not None and privacy is not None and privacy.noise == "reproducible":
        # Deleted runs do not show which seeds were used.
        raise RecipeError(
            f"{path}: rounds.keep: got it with privacy.noise: reproducible; allowed: privacy.noise: secret"
        )
    return replace(plan, rounds=rounds)


def _check_continuous(path: Path, recipe: Recipe) -> None:
    """Check that a federation can be continuous: that runs follow one another as users get new data.

    Args:
        path: Path of the server's file, for messages.
        recipe: The recipe in the file.

    Raises:
        RecipeError: A value in the file does not allow it, such as another kind of data than text or conversations.
    """
    if recipe.data.kind not in _CONTINUOUS_KINDS:
        allowed = ", ".join(_CONTINUOUS_KINDS)
        raise RecipeError(f"{path}: data.kind: got {recipe.data.kind}; allowed with --continuous: {allowed}")
    check_endless(recipe, f"{path}: ")
    if isinstance(recipe.training.participation, list):
        raise RecipeError(f"{path}: training.participation: got names; allowed with --continuous: a fraction")


_CONTINUOUS_KINDS = ("text", "conversations")


def change_participants(path: Path, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> tuple[str, ...]:
    """Add users to a server's file and remove others, and return the names of all users.

    The file is replaced atomically, so a running server reads either the old or the new one.

    Args:
        path: The file. Its comments are lost.
        add: Names of the new users.
        remove: Names of the users to remove.

    Raises:
        RecipeError: The file is wrong, or would be: a user is there already, is not there, or too few remain.
    """
    names = _parse_plan(read_mapping(path), path).users
    for name in add:
        if name in names:
            raise RecipeError(f"--add-user: got {name!r}, who is a user in {path} already")
    for name in remove:
        if name not in names:
            raise RecipeError(f"--remove-user: got {name!r}; allowed: {', '.join(names)}")
    content = read_mapping(path)
    content["participants"] = [*(name for name in names if name not in remove), *add]
    plan = _parse_plan(dict(content), path)
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return plan.users


def _parse_plan(content: JsonObject, path: Path, continue_from: str = "") -> Plan:
    """Return the recipe, the participants and the network settings of a federation from the file of its server.

    The file is a recipe without data and with further sections: ``participants``, ``network``, ``rounds``, ``shapes``.

    Args:
        content: Content of the file, from which the further sections are removed.
        path: Path of the file, for messages and relative paths.
        continue_from: Folder of a run to continue, in place of that in the file; empty for that in the file.

    Raises:
        RecipeError: The file is wrong; the message has its path and the key.
    """
    names = content.pop("participants", None)
    is_list_of_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list_of_names or not names:
        raise RecipeError(f"{path}: participants: got {names!r}; allowed: a list of names, such as [ada, ben]")
    problem = name_problem(names)
    if problem:
        raise RecipeError(f"{path}: participants: {problem}")
    network = parse_section(NetworkSection, content.pop("network", {}), f"{path}: network")
    if network.min_participants > len(names):
        raise RecipeError(
            f"{path}: network.min_participants: got {network.min_participants}; allowed: up to the number of "
            f"users, {len(names)}"
        )
    rounds = parse_section(RoundsSection, content.pop("rounds"), f"{path}: rounds") if "rounds" in content else None
    # Shapes of a net that is trained from scratch, such as {"input_shape": [28, 28], "classes": 10}; else empty.
    net_settings = content.pop("shapes", {})
    data = content.get("data", {"kind": "text"})
    if isinstance(data, Mapping):
        for source in ("users", "dataset"):
            if data.get(source) is not None:
                raise RecipeError(
                    f"{path}: data.{source}: not allowed in the server's file; set `data` in each client's file"
                )
        content["data"] = {"kind": "text", **data, "given": True}  # "given" makes a recipe without sources valid
    recipe = parse_recipe(content, where=str(path))
    if continue_from:
        recipe = recipe.with_changes({"continue_from.run": continue_from}, where="--continue-from")
    try:
        check_remote_clients(recipe)
    except RecipeError as error:
        raise RecipeError(*(f"{path}: {problem}" for problem in error.problems)) from None
    base_path = path.parent / recipe.base
    if os.path.exists(base_path):
        recipe = recipe.with_changes({"base": str(base_path.resolve())})
    if recipe.continue_from is not None:
        recipe = recipe.with_changes({"continue_from.run": str((path.parent / recipe.continue_from.run).resolve())})
    return Plan(recipe=recipe, users=tuple(names), settings=net_settings, network=network, rounds=rounds)


def save_plan(path: Path, plan: Plan) -> None:
    """Write a server's file, to be read by :func:`load_plan`."""
    content = without_data(plan.recipe)
    content["participants"] = list(plan.users)
    content["network"] = plan.network.model_dump()
    if plan.settings:  # such as {"input_shape": [28, 28], "classes": 10}
        content["shapes"] = plan.settings
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def split_recipe(recipe: Recipe, network: NetworkSection | None = None) -> tuple[Plan, list[Own]]:
    """Split a recipe with the data of all users into the server's plan and each user's own settings.

    Args:
        recipe: Recipe whose section ``data`` has a source for each user, or a data set with all users.
        network: Section ``network`` of the server's file, such as timeouts; None for the defaults.

    Raises:
        RecipeError: The recipe cannot be run with clients on other machines.
        DataError: The users' names cannot be read.
    """
    check_remote_clients(recipe)
    kind = kind_of(recipe)
    names = kind.names_of(recipe)
    shapes_and_labels = {}
    if not kind.needs_base:  # The input shapes and labels of a net depend on all users' data.
        shapes_and_labels = kind.settings(prepare(recipe))
    plan = Plan(recipe=recipe, users=names, settings=shapes_and_labels, network=network or NetworkSection())
    base_path = None
    if kind.needs_base and expand_home(recipe.base).exists():  # Clients refuse paths from a server.
        base_path = recipe.base
    own_settings = []
    for name in names:
        # "all": the data of all users is on this machine, so metrics reveal nothing.
        own_settings.append(Own(name=name, data=_source_of_user(recipe, name), base=base_path, tells="all"))
    return plan, own_settings


def _source_of_user(recipe: Recipe, name: str) -> Any:
    """Return the value of ``data`` for a user's own file: the user's source in ``data.users`` of the recipe.

    If the recipe has ``data.dataset`` instead, all of it is returned, and the client reads only the rows of its user.

    Raises:
        RecipeError: The recipe has no source for this user.
    """
    content = recipe.data.model_dump(mode="json", exclude_unset=True)
    if content.get("dataset") is not None:
        return {"dataset": content["dataset"]}
    source_by_user = content.get("users") or {}
    if source_by_user.get(name) is None:
        raise RecipeError(f"data: no source for user {name!r}; allowed: users, dataset")
    return source_by_user[name]
