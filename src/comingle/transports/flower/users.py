"""Who a node is: read from its ``--node-config``, and from the participant's own file that this may name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from comingle.utils.errors import RecipeError
from comingle.utils.records import expand_home

INSTANCE = "instance"
"""File in a state folder: a random text that no other state folder has."""

REFUSAL = "refused"
"""File in a state folder: why the coordinator does not want this user."""


UNFIT = "cannot-take-part"
"""File in a state folder: why the user's own settings, data or base do not fit a federation, said by its worker."""


@dataclass(frozen=True, kw_only=True)
class User:
    """A participant on its own machine: its name, the folder for all that is private, and its file of settings."""

    name: str
    state: Path
    config: Path | None = None

    def options(self) -> list[str]:
        """As a worker's command line."""
        config = ["--config", str(self.config)] if self.config else []
        return ["--name", self.name, "--state", str(self.state), *config]


def read_user(node_config: Mapping[str, Any]) -> User:
    """The user of ``--node-config 'name="ada" state="FOLDER"'`` or ``'config="ada.yaml"'``; the former go before.

    Raises:
        RecipeError: no name or no folder, or the file cannot be read.
    """
    config = expand_home(str(node_config["config"])) if node_config.get("config") else None
    from_file = _read(config) if config else {}
    name = node_config.get("name") or node_config.get("client-key") or from_file.get("name")
    if not name:
        raise RecipeError('node-config: no name; give name="NAME", or config="FILE" that has \'name\'')
    state = node_config.get("state") or node_config.get("state-dir")
    if not state and config and from_file.get("state"):
        state = config.parent / str(from_file["state"])  # as all paths in a file: beside it
    if not state:
        raise RecipeError(
            f"node-config: {name} has no folder for its state; give state=\"FOLDER\", or 'state' in its file"
        )
    return User(name=str(name), state=expand_home(str(state)).absolute(), config=config and config.absolute())


def instance_of(state: Path) -> str:
    """The random text of a state folder, made when it is first asked for."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / INSTANCE
    if not path.exists():
        own = state / f".{INSTANCE}-{os.getpid()}"
        own.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            os.link(own, path)  # unlike a renaming it does not replace what another process has just made
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return path.read_text(encoding="utf-8").strip()


def _read(config: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{config}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(read, dict):
        raise RecipeError(f"{config}: is {type(read).__name__}; allowed: a mapping with 'name' and 'state'")
    return read
