"""A participant's settings and its file. The module does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from comingle.config.files import read_yaml
from comingle.config.hints import first_problem
from comingle.config.settings import PATHS, Count, Section, parse_bytes
from comingle.federation.conditions import (
    DeviceConditions,
    LocalTime,
    UploadCounter,
    Wait,
    local_time,
    parse_condition,
)
from comingle.utils.errors import RecipeError
from comingle.utils.names import as_folder, name_problem
from comingle.utils.records import write_text

Model = TypeVar("Model", bound=BaseModel)

Tells = Literal["all", "scores", "losses", "nothing"]
"""How much a client reports; each value includes the following ones."""

TELLS: tuple[Tells, ...] = get_args(Tells)
"""All values of ``tells``, from the most to the least reported."""

LEVELS_WITH_SCORES: frozenset[Tells] = frozenset({"all", "scores"})
"""Values of ``tells`` with which a client reports test scores and amounts of data."""


class Own(Section):
    """A user's own settings.

    Args:
        name: Name of the user.
        data: A source, as under ``data.users.NAME`` of a recipe, or a mapping with ``dataset``, from which the user
            reads its own rows.
        runtime: Keys of a recipe's section ``runtime``.
        tells: Metrics that the server may see: "all" (with weights of experts or components), "scores" (losses, test
            scores, amounts of data), "losses" or "nothing". The default is "scores", or "nothing" with privacy.
        base: Path of the base model on this machine, if it differs from the federation's recipe.
        expects: Digests of recipe and base; the user joins no federation with others.
        max_runs: Largest number of runs in the user's folder, so that a server cannot fill the disk.
        only_when: Conditions that all have to hold while the device trains: "idle", "plugged-in" or
            "between HH:MM-HH:MM" in local time; one of them, or a list.
        max_threads: Largest number of CPU threads.
        nice: Increment of the niceness of the process, which lowers its priority.
        max_upload_per_day: Bytes that may be sent from one local midnight to the next, as a number or a text such as
            "50MB"; None for no limit.
    """

    name: str
    data: Any
    runtime: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    tells: Tells | None = None
    base: str | None = None
    expects: dict[Literal["recipe", "base"], str] = {}  # noqa: RUF012
    max_runs: Count = 20
    only_when: tuple[str, ...] = ()
    max_threads: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    nice: Annotated[int, Field(ge=0, le=19, strict=True)] = 0
    max_upload_per_day: Count | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        """Return the user's name, after checking that it is text on one line without control characters."""
        problem = name_problem([name])
        if problem:
            raise ValueError(problem)
        return name

    @field_validator("only_when", mode="before")
    @classmethod
    def _check_conditions(cls, conditions: object) -> object:
        """Return a list of conditions such as "idle", after checking that each is known."""
        if isinstance(conditions, str):
            conditions = [conditions]
        if isinstance(conditions, list | tuple):
            for condition in conditions:
                if isinstance(condition, str):  # pydantic refuses values of other types
                    parse_condition(condition)  # raises if it is unknown
        return conditions

    @field_validator("max_upload_per_day", mode="before")
    @classmethod
    def _in_bytes(cls, size: object) -> object:
        """Return a size as a number of bytes: 50,000,000 for "50MB"; pydantic checks values other than text."""
        if not isinstance(size, str):
            return size
        try:
            return parse_bytes(size)
        except ValueError:
            raise ValueError("allowed: a positive number with a unit, such as 50MB") from None

    def runtime_section(self, public: dict[str, Any]) -> dict[str, Any]:
        """Return the section ``runtime`` of the user's own recipe: the federation's, changed by the user's settings.

        Args:
            public: The section ``runtime`` of the federation's recipe.
        """
        runtime = {**public, **self.runtime}
        if self.max_threads is not None:
            wanted_threads = runtime.get("threads") or os.cpu_count() or 1
            runtime["threads"] = min(self.max_threads, wanted_threads)
        return runtime

    def conditions(
        self,
        state: Path,
        *,
        say: Callable[[str], None] = lambda line: None,
        wait: Wait = time.sleep,
        clock: LocalTime = local_time,
    ) -> DeviceConditions:
        """Return the conditions under which this user's device trains, and its limit on uploads.

        Args:
            state: The user's state folder.
            say: Called with each line to show to the user.
            wait: Waits some seconds between two checks of conditions that do not hold.
            clock: Returns the local time, for conditions and for the day of the limit; tests pass another.
        """
        conditions = [parse_condition(text, wait) for text in self.only_when]
        uploads = UploadCounter(state, self.max_upload_per_day, clock)
        return DeviceConditions(conditions, uploads=uploads, say=say, wait=wait, clock=clock)

    def data_section(self, public: dict[str, Any]) -> dict[str, Any]:
        """Return the section ``data`` of the user's own recipe: the federation's options, and the user's data source.

        Args:
            public: The section ``data`` of the federation's recipe, with ``given`` in place of a source.
        """
        section = {key: value for key, value in public.items() if key != "given"}
        has_dataset = isinstance(self.data, dict) and "dataset" in self.data
        if has_dataset:
            only_this_user = {"users": [self.name]}
            section["dataset"] = {**self.data["dataset"], **only_this_user}
        else:
            section["users"] = {self.name: self.data}
        return section


class Participant(Own):
    """A client's file: the user's own settings, the folder for private state, and how to reach the server."""

    state: Annotated[str, Field(min_length=1)]
    server: str | None = None
    certificates: str | None = None
    key: str | None = None

    @property
    def own(self) -> Own:
        """The settings that the client's code reads: those of this file without its state folder and connection."""
        return Own(**{name: getattr(self, name) for name in Own.model_fields})


def load_participant(path: Path, **changes: Any) -> Participant:
    """Read a client's file, and make its relative paths absolute.

    Args:
        path: The file, to whose folder paths are relative.
        changes: Values that replace those of the file; None keeps a value of the file.

    Raises:
        RecipeError: The file does not exist, or a value is wrong.
    """
    content = read_mapping(path)
    for key, value in changes.items():
        if value is not None:
            content[key] = value
    folder = path.parent
    participant = parse_section(Participant, content, str(path))
    base = participant.base
    if base and (folder / base).exists():  # otherwise it is a name on the hub
        base = str((folder / base).resolve())
    updates = {"base": base, "data": _with_absolute_paths(folder, participant.data)}
    for key in ("state", "certificates", "key"):
        relative_path = getattr(participant, key)
        if relative_path:
            updates[key] = _absolute(folder, relative_path)
    return participant.model_copy(update=updates)


def save_participant(path: Path, participant: Participant) -> None:
    """Write a client's file that only the user can read."""
    text = yaml.safe_dump(participant.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, text, private=True)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping.

    Raises:
        RecipeError: The file does not exist, or its content is something else.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: no such file")
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path}: got {type(content).__name__}; allowed: a mapping of keys to values")
    return dict(content)


def parse_section(kind: type[Model], content: object, where: str) -> Model:
    """Return an object of a pydantic class; raise an error with the first mistake in its fields.

    Args:
        kind: The class.
        content: Its fields.
        where: Beginning of the error's message, such as "user 'ann'".

    Raises:
        RecipeError: A value is wrong or missing, or a key unknown.
    """
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: got {type(content).__name__}; allowed: a mapping of keys to values")
    try:
        return kind(**content)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error, kind)}") from None


def _with_absolute_paths(folder: Path, data: Any) -> Any:
    """Return a user's source of data with existing paths made absolute; URLs and names on a hub stay unchanged.

    For example, ``{"train": "a.txt"}`` becomes ``{"train": "/home/ann/a.txt"}``.

    Args:
        folder: Folder of the client's file, to which paths are relative.
        data: The source.
    """
    return map_sources(data, partial(_absolute_if_exists, folder))


def map_sources(data: Any, change: Callable[[str], str]) -> Any:
    """Return a user's source of data with each path or name changed.

    Args:
        data: A path or name, a mapping with one under each of the keys :data:`PATHS`, or a mapping with ``dataset``.
        change: Called with each path or name.
    """
    if isinstance(data, str):
        return change(data)
    if not isinstance(data, Mapping):
        return data
    changed = dict(data)
    for key in PATHS:  # such as "path" and "train"
        if isinstance(data.get(key), str):
            changed[key] = change(data[key])
        elif isinstance(data.get(key), list):
            changed[key] = [map_sources(source, change) for source in data[key]]
    if isinstance(data.get("dataset"), Mapping):
        changed["dataset"] = map_sources(data["dataset"], change)
    return changed


def _absolute_if_exists(folder: Path, source: str) -> str:
    """Return a data source as an absolute path if it is one, relative to a folder; otherwise it is a data set's name.

    Args:
        folder: Folder to which paths are relative.
        source: Path or name; "~" and environment variables are expanded.
    """
    source = os.path.expandvars(os.path.expanduser(source))
    path = folder / source
    return str(path.resolve()) if os.path.exists(path) else source


def _absolute(folder: Path, value: str) -> str:
    """Return a path relative to a folder as an absolute path; "~" is the home folder."""
    return str((folder / os.path.expanduser(value)).absolute())


FILE = "participant.yaml"
"""File of a participant in its state folder, from which ``comingle client --name NAME`` reads the settings."""

_OPTIONS_OF_ONE_USER = ("data", "state", "key")
"""Options of a command that several users must not share."""


def load_participants(
    files: Sequence[Path],
    names: Sequence[str],
    options: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: None,
) -> list[Participant]:
    """Return the participants of a command line, which lists either their files or their names.

    Args:
        files: Files of the participants; empty if names are given.
        names: Names of the users. With a single file, a single name may be given, which replaces that in the file.
        options: Options of the command by key, None for those that are not given. They replace values of all files.
        say: Called with a line for each file that is found by name.

    Raises:
        RecipeError: There is no participant, a setting is missing or wrong, or an option for a single user, such as
            its data, is given for several.
    """
    count = max(len(files), len(names))
    if count == 0:
        raise RecipeError("client: no user; give a participant's file, or --name and --data")
    if files and len(names) > 1:
        raise RecipeError(f"client: got {len(files)} files and {len(names)} names; give files or --name")
    if count > 1:
        for key in _OPTIONS_OF_ONE_USER:
            if options.get(key) is not None:
                raise RecipeError(f"client: got --{key} for {count} users; set `{key}` in each user's file")
    if files:
        new_name = names[0] if names else None  # None keeps the name in the file
        changes = {**options, "name": new_name}
        participants = [load_participant(file, **changes) for file in files]
    else:
        participants = [_named_participant(name, options, say) for name in names]
    problem = name_problem([participant.name for participant in participants])
    if problem:
        raise RecipeError(f"client: {problem}")
    return participants


def _named_participant(name: str, options: Mapping[str, Any], say: Callable[[str], None]) -> Participant:
    """Return a user's settings from the file in its state folder, if there is one, and from the command's options.

    Args:
        name: Name of the user.
        options: Options of the command by key, None for those that are not given. They replace values of the file. The
            state folder is ``state``, by default a folder named after the user.
        say: Called with a line if settings are read from the file.

    Raises:
        RecipeError: There is no file, and the options have no data; or the file is another user's.
    """
    state_folder = Path(options.get("state") or as_folder(name)).expanduser()
    file = state_folder / FILE
    other_options = {key: value for key, value in options.items() if key != "state"}
    if file.exists():
        owner = read_mapping(file).get("name", name)
        if owner != name:
            raise RecipeError(f"user {name!r}: got the folder of user {owner!r}, {state_folder}; use another --state")
        say(f"{name}: settings from {file}")
        return load_participant(file, **{**other_options, "name": name})
    content: dict[str, Any] = {"name": name, "state": str(state_folder.absolute())}
    for key, value in other_options.items():
        if value is not None:
            content[key] = value
    if "data" not in content:
        raise RecipeError(
            f"user {name!r}: no data: there is no {file}, the file with settings that the first start saves; give "
            "--data PATH, or such a file: comingle client FILE"
        )
    return parse_section(Participant, content, f"user {name!r}")
