"""The files of a federation, and the conversion of a recipe into them.

The server's file has the keys of a recipe except data sources, and

    participants: [ada, ben, cem]       names of the users
    network: {min_participants: 2, round_timeout: 600, join_timeout: 300}
    shapes: {...}                       for samples: shapes and labels of networks (see docs/federation.md)

A client's file has ``name``, ``data``, ``state`` and the options of :class:`comingle.federation.public.Own`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from comingle.config import Recipe, parse_recipe
from comingle.config.files import read_yaml
from comingle.config.hints import first_problem
from comingle.config.settings import PATHS
from comingle.federation.public import Own, check_possible, without_data
from comingle.federation.run_folder import Plan
from comingle.federation.server_session import NetworkSection
from comingle.runs.session import prepare
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import RecipeError
from comingle.utils.names import name_problem
from comingle.utils.records import expand_home, write_text


class Participant(Own):
    """A client's file: the user's own settings, the folder for private state, and how to reach the server."""

    state: Annotated[str, Field(min_length=1)]
    server: str | None = None
    certificates: str | None = None
    key: str | None = None

    @property
    def own(self) -> Own:
        """The user's own settings."""
        return Own(**{name: getattr(self, name) for name in Own.model_fields})


def load_plan(path: Path) -> Plan:
    """Read a server's file.

    Raises:
        RecipeError: The file does not exist, or a value is wrong.
    """
    content = _mapping(path)
    names = content.pop("participants", None)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise RecipeError(f"{path}: participants: got {names!r}; allowed: a list of names, such as [ada, ben]")
    if problem := name_problem(names):
        raise RecipeError(f"{path}: participants: {problem}")
    network = _section(NetworkSection, content.pop("network", {}), f"{path}: network")
    if network.min_participants > len(names):
        raise RecipeError(
            f"{path}: network.min_participants: got {network.min_participants}; allowed: up to the number of "
            f"users, {len(names)}"
        )
    shapes = content.pop("shapes", {})
    data = content.get("data", {"kind": "text"})
    if isinstance(data, Mapping):
        if where := next((key for key in ("users", "dataset") if data.get(key) is not None), None):
            raise RecipeError(
                f"{path}: data.{where}: not allowed in the server's file; set `data` in each client's file"
            )
        content["data"] = {"kind": "text", **data, "given": True}
    recipe = parse_recipe(content, where=str(path))
    if os.path.exists(path.parent / recipe.base):
        recipe = recipe.with_changes({"base": str((path.parent / recipe.base).resolve())})
    return Plan(recipe=recipe, users=tuple(names), settings=shapes, network=network)


def save_plan(path: Path, plan: Plan) -> None:
    """Write a server's file, to be read by :func:`load_plan`."""
    content = without_data(plan.recipe) | {"participants": list(plan.users), "network": plan.network.model_dump()}
    content |= {"shapes": plan.settings} if plan.settings else {}
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def load_participant(path: Path, **changes: Any) -> Participant:
    """Read a client's file; values of ``changes`` that are not None replace those of the file.

    Raises:
        RecipeError: The file does not exist, or a value is wrong.
    """
    content = _mapping(path) | {key: value for key, value in changes.items() if value is not None}
    folder = path.parent
    read = _section(Participant, content, str(path))
    near = {key: _beside(folder, value) for key in ("state", "certificates", "key") if (value := getattr(read, key))}
    base = str((folder / read.base).resolve()) if read.base and (folder / read.base).exists() else read.base
    return read.model_copy(update={**near, "base": base, "data": _anchored(folder, read.data)})


def save_participant(path: Path, participant: Participant) -> None:
    """Write a client's file that only the user can read."""
    text = yaml.safe_dump(participant.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, text, private=True)


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"{path}: no such file")
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path}: got {type(content).__name__}; allowed: a mapping of keys to values")
    return dict(content)


def _section(kind: type[Any], content: Any, where: str) -> Any:
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: got {type(content).__name__}; allowed: a mapping of keys to values")
    try:
        return kind(**content)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error, kind, None)}") from None


def _anchored(folder: Path, data: Any) -> Any:
    """Make paths relative to the file absolute; leave URLs and names on a hub unchanged."""
    if isinstance(data, str):
        return _existing(folder, data)
    if isinstance(data, Mapping):
        inner = data.get("dataset")
        found = {key: _existing(folder, data[key]) for key in PATHS if isinstance(data.get(key), str)}
        return {**data, **found, **({"dataset": _anchored(folder, inner)} if isinstance(inner, Mapping) else {})}
    return data


def _existing(folder: Path, source: str) -> str:
    source = os.path.expandvars(os.path.expanduser(source))
    return str((folder / source).resolve()) if os.path.exists(folder / source) else source


def _beside(folder: Path, value: str) -> str:
    return str((folder / os.path.expanduser(value)).absolute())


def split_recipe(recipe: Recipe, network: NetworkSection | None = None) -> tuple[Plan, list[Own]]:
    """Return the server's plan and each user's own settings, for the users of the recipe or of its data set.

    Raises:
        RecipeError: The recipe cannot be run with clients on other machines.
        DataError: The users' names cannot be read.
    """
    check_possible(recipe)
    kind = kind_of(recipe)
    names = kind.names_of(recipe)
    settings = {} if kind.needs_base else kind.settings(prepare(recipe))  # Shapes and labels depend on all users.
    plan = Plan(recipe=recipe, users=names, settings=settings, network=network or NetworkSection())
    # Clients refuse paths from a server, so each gets its own copy of the same path.
    base = recipe.base if kind.needs_base and expand_home(recipe.base).exists() else None
    # All data is on this machine, so all metrics may be reported, even with privacy.
    return plan, [Own(name=name, data=_data(recipe, name), base=base, tells="all") for name in names]


def _data(recipe: Recipe, name: str) -> Any:
    content = recipe.data.model_dump(mode="json", exclude_unset=True)
    if content.get("dataset") is not None:
        return {"dataset": content["dataset"]}
    if (content.get("users") or {}).get(name) is None:
        raise RecipeError(f"data: no source for user {name!r}; allowed: users, dataset")
    return content["users"][name]
