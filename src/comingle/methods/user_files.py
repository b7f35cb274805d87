"""Methods in users' own Python files: loaded by ``--plugin FILE``, never because a recipe names them.

The methods of a file are its functions that are annotated to return a ``Method``, its ``Method`` objects, and all that
it passes to ``comingle.methods.register``. A function without an annotation that makes a ``Method`` is skipped with a
warning. A run folder records the file of its method, so that opening the folder without the file fails with a message
that names it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from comingle.methods import REGISTRY, SKIPPED, make, register, user_place
from comingle.methods.base import Method
from comingle.models.nets import NETS
from comingle.models.scoring import LOSSES
from comingle.utils.errors import ComingleError, PluginError, RunError, list_names
from comingle.utils.records import expand_home, write_json

FILES = "COMINGLE_PLUGINS"
"""Environment variable that tells subprocesses of a command to load the same files."""

REPORTED_CHANGES = "COMINGLE_CHANGED_PLUGINS"
"""Environment variable with the changes (RUN-OLD-NEW digests) that a command's processes have already warned about."""

ORIGIN = "plugins.json"
"""File of a run folder that records the Python file of its method."""

_log = logging.getLogger(__name__)

_nets: dict[Path, set[str]] = {}
"""Loaded files and the names of their nets."""

_loaded: dict[Path, list[str]] = {}
"""Loaded files and the names of their methods."""


_DIGEST_CHARACTERS = 8
"""Characters of a digest in messages."""


def load_file(path: Path) -> list[str]:
    """Run a Python file, register its methods and return their names; a file is loaded only once.

    The file may also register nets and losses, or these alone. Its path is added to the environment variable
    :data:`FILES`, so that subprocesses load it too.

    Raises:
        PluginError: The file does not exist, cannot be run or registers nothing, or a method's name is taken.
    """
    where = f"--plugin {path}"
    path = expand_home(path).resolve()
    if path in _loaded:
        return _loaded[path]
    if not path.is_file():
        raise PluginError(f"{where}: no such file; allowed: a Python file with a method")
    methods_before, nets_before, losses_before = set(REGISTRY), set(NETS), set(LOSSES)
    module = _import_file(path, where)
    _register_methods(module, methods_before, where)
    method_names = [name for name in REGISTRY if name not in methods_before]
    net_names = set(NETS) - nets_before
    loss_names = set(LOSSES) - losses_before
    skipped = _functions_without_annotation(module, registered=[REGISTRY[name] for name in method_names])
    if not method_names and not net_names and not loss_names:
        found = f" Functions without `-> Method`: {list_names(skipped)}." if skipped else ""
        raise PluginError(
            f"{where}: registers nothing; allowed: functions annotated to return a Method (`def near() -> Method:`), "
            f"Method objects, comingle.methods.register(NAME, FUNCTION), and NETS.register or LOSSES.register.{found}"
        )
    _loaded[path], _nets[path] = method_names, net_names
    SKIPPED.update({name: function.place for name, function in skipped.items()})  # for the error of an unknown method
    paths_of_command = _paths_of_command()
    if str(path) not in paths_of_command:  # otherwise this is a subprocess, and the main process has warned
        _warn_of_skipped(skipped)
        os.environ[FILES] = os.pathsep.join([*paths_of_command, str(path)])
    return method_names


def _register_methods(module: ModuleType, methods_before: Collection[str], where: str) -> None:
    """Register the methods that a user's module defines.

    Args:
        module: The module.
        methods_before: Names of the methods that were registered before the module was imported.
        where: Name of its file, for the message.

    Raises:
        PluginError: Another method has the name.
    """
    for name, method in _methods(module):
        if name in REGISTRY:
            # True if the module itself has called `register` for the method: then there is no conflict.
            is_registered_by_module = name not in methods_before and REGISTRY[name] is method
            if not is_registered_by_module:
                suffix = _origin_suffix(name)
                raise PluginError(f"{where}: method {name!r} exists already{suffix}; give it another name")
        register(name, method)


def _warn_of_skipped(skipped: Mapping[str, _SkippedFunction]) -> None:
    """Warn of functions that use the class ``Method``, but are not registered, for lack of a return annotation."""
    for name, function in skipped.items():
        if function.uses_method_class:
            advice = f"write `def {name}(...) -> Method:`, or begin its name with _ if it is a helper"
            _log.warning("%s: %s is no method, as its return value is not annotated; %s", function.place, name, advice)


def load_files_of_command() -> None:
    """Load the files given with ``--plugin``, in a subprocess of the command that has loaded them.

    Raises:
        PluginError: As in :func:`load_file`.
    """
    for path in _paths_of_command():
        load_file(Path(path))


def _paths_of_command() -> list[str]:
    """Return the paths of the user's Python files that the command was given with ``--plugin``.

    They are in the environment variable :data:`FILES`, so that subprocesses of the command find them too.
    """
    paths = os.environ.get(FILES, "").split(os.pathsep)
    return [path for path in paths if path]


def write_origin(folder: Path, method: str, net: str = "") -> None:
    """Record in a run folder the Python files of the user that define its method and its net, if there are any.

    Args:
        folder: Run folder.
        method: Name of the method.
        net: Name of the net; empty for a language model.
    """
    record: dict[str, Any] = {}
    method_file = file_of(method)
    if method_file is not None:
        record = {"method": method, "file": str(method_file), "sha256": _digest(method_file)}
    net_file = _file_of_net(net)
    if net_file is not None:
        record["net"] = {"name": net, "file": str(net_file), "sha256": _digest(net_file)}
    if record:
        write_json(folder / ORIGIN, record)


def check_origin(folder: Path, method: str, *, begun: bool = True) -> None:
    """Check that a run folder's method is registered; warn if the files of its method or net have changed.

    The file :data:`ORIGIN` in the folder has the paths and the SHA-256 of the user's Python files.

    Args:
        folder: Run folder.
        method: Name of its method.
        begun: Whether the run has trained anything. If not, there is no warning.

    Raises:
        RunError: The method is not registered, or ``ORIGIN`` is damaged.
    """
    path = folder / ORIGIN
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        method_file, method_digest = str(record.get("file", "")), str(record.get("sha256", ""))
        net_record = record.get("net", {})
        net, net_digest = str(net_record.get("name", "")), str(net_record.get("sha256", ""))
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: damaged ({error}); delete it and give --plugin FILE") from None
    if begun:
        _warn_if_changed(f"net {net!r}", _file_of_net(net), net_digest, folder)
    if method in REGISTRY:
        if begun and method_file:
            _warn_if_changed(f"method {method!r}", file_of(method), method_digest, folder)
        return
    if method_file:
        gone = "" if Path(method_file).is_file() else ", which no longer exists"
        hint = f"it came from {method_file}{gone}: give --plugin {method_file}"
    else:
        hint = "if it is your own method, give --plugin FILE"
    raise RunError(f"{folder}: no method {method!r} here; {hint}, or in Python comingle.load(FOLDER, method=...)")


def _warn_if_changed(subject: str, file: Path | None, digest: str, folder: Path) -> None:
    """Warn, once per command, if the Python file of a method or of a net has changed since the run began.

    Args:
        subject: The method or the net, such as "method 'near'".
        file: The file that defines it now; None if it is not in a file of the user.
        digest: SHA-256 of the file when the run began.
        folder: Run folder.
    """
    if file is None:
        return
    new_digest = _digest(file)
    if new_digest == digest:
        return
    old_start, new_start = digest[:_DIGEST_CHARACTERS], new_digest[:_DIGEST_CHARACTERS]
    folder_start = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    change = f"{folder_start}-{old_start}-{new_start}"
    reported_changes = os.environ.get(REPORTED_CHANGES, "").split()  # subprocesses inherit the variable
    if change in reported_changes:
        return
    os.environ[REPORTED_CHANGES] = " ".join([*reported_changes, change])
    is_finished = (folder / "metrics.json").is_file()
    old_results = "its results" if is_finished else "the rounds before the last checkpoint"
    message = (
        f"{folder}: {subject} has changed since the run began: {file} had sha256 {old_start}, now {new_start}; "
        f"{old_results} are those of the old file; --force trains again, or use another --out"
    )
    _log.warning("%s", message)


def _import_file(path: Path, where: str) -> ModuleType:
    """Import a Python file under a unique module name, such as "comingle_plugin_1b2c3d4e_near"; return the module.

    Args:
        path: Path of the file.
        where: Name of the file in messages.

    Raises:
        PluginError: The file raised an exception or exited; the message has file and line.
    """
    path_digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"comingle_plugin_{path_digest}_{path.stem}"
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations look it up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that files beside it do not shadow libraries
    wrote_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise PluginError(f"{where}: {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except ComingleError as error:
        raise PluginError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        _log.info("%s", path, exc_info=True)
        place = user_place(error, name) or path
        type_and_message = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
        raise PluginError(f"{where}: {place}: {type_and_message}") from error
    finally:
        sys.dont_write_bytecode = wrote_no_bytecode
    return module


def _methods(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each method of a module: a ``Method``, or a function annotated to return one."""
    for variable, value in list(vars(module).items()):
        if variable.startswith("_"):
            continue
        if isinstance(value, Method):
            yield value.name, value
        elif _is_function_of(module, value) and _returns_method(value):
            yield make(value).name, value


def _is_function_of(module: ModuleType, value: object) -> bool:
    """Return whether a value is a function that the module defines, not one that it imports."""
    return inspect.isfunction(value) and value.__module__ == module.__name__


@dataclass(frozen=True, kw_only=True)
class _SkippedFunction:
    """A function of a user's file that is no method, as its return value is not annotated.

    Args:
        place: File and line, such as "near.py:12".
        uses_method_class: Whether its code names the class ``Method``.
    """

    place: str
    uses_method_class: bool


def _functions_without_annotation(module: ModuleType, registered: Collection[object]) -> dict[str, _SkippedFunction]:
    """Return a module's public functions, by name, whose return type is not annotated, for a warning about them.

    Args:
        module: The module.
        registered: Functions to leave out, as they are registered as methods.
    """
    skipped = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not _is_function_of(module, value):
            continue
        if "return" in value.__annotations__ or value in registered:
            continue
        code = value.__code__
        skipped[name] = _SkippedFunction(
            place=f"{code.co_filename}:{code.co_firstlineno}", uses_method_class="Method" in code.co_names
        )
    return skipped


def _returns_method(function: object) -> bool:
    """Return whether a function's return annotation is ``Method``, or a string such as "Method" or "base.Method"."""
    annotation = function.__annotations__.get("return")
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] == "Method"
    return annotation is Method


def _origin_suffix(name: str) -> str:
    """Return where a method was defined, for a message that its name is taken.

    Returns:
        ", from FILE" for a method of a loaded file; empty for built-in methods and installed packages.
    """
    path = file_of(name)
    return "" if path is None else f", from {path}"


def file_of(method: str) -> Path | None:
    """Return the loaded file that has a method; None for built-in methods and installed packages."""
    return next((path for path, names in _loaded.items() if method in names), None)


def _file_of_net(net: str) -> Path | None:
    """Return the loaded file that has registered a net; None for others."""
    return next((path for path, names in _nets.items() if net in names), None)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
