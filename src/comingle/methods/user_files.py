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
from collections.abc import Collection, Iterator
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
    where, path = f"--plugin {path}", expand_home(path).resolve()
    if path in _loaded:
        return _loaded[path]
    if not path.is_file():
        raise PluginError(f"{where}: no such file; allowed: a Python file with a method")
    methods_before, nets_before, losses_before = set(REGISTRY), set(NETS), set(LOSSES)
    module = _import_file(path, where)
    for name, method in _methods(module):
        registered_itself = name in REGISTRY and name not in methods_before and REGISTRY[name] is method
        if name in REGISTRY and not registered_itself:
            raise PluginError(f"{where}: method {name!r} exists already{_origin_suffix(name)}; give it another name")
        register(name, method)
    names = [name for name in REGISTRY if name not in methods_before]
    # Functions that may be meant as methods: file and line of each, and whether its code names the class Method.
    skipped = _functions_without_annotation(module, [REGISTRY[name] for name in names])
    if not names and (set(NETS), set(LOSSES)) == (nets_before, losses_before):
        found = f" Functions without `-> Method`: {list_names(skipped)}." if skipped else ""
        raise PluginError(
            f"{where}: registers nothing; allowed: functions annotated to return a Method (`def near() -> Method:`), "
            f"Method objects, comingle.methods.register(NAME, FUNCTION), and NETS.register or LOSSES.register.{found}"
        )
    _loaded[path], _nets[path] = names, set(NETS) - nets_before
    SKIPPED.update({name: place for name, (place, _) in skipped.items()})
    paths_of_command = os.environ.get(FILES, "").split(os.pathsep)
    if str(path) not in paths_of_command:  # else this is a subprocess, and the main process has already warned
        # Only functions that name the class Method, as others are probably helpers.
        for name in [name for name, (_place, names_method) in skipped.items() if names_method]:
            advice = f"write `def {name}(...) -> Method:`, or begin its name with _ if it is a helper"
            _log.warning("%s: %s is no method, as its return value is not annotated; %s", SKIPPED[name], name, advice)
    os.environ[FILES] = os.pathsep.join(dict.fromkeys([*filter(None, paths_of_command), str(path)]))
    return names


def load_files_of_command() -> None:
    """Load the Python files that the command that started this process has loaded with ``--plugin``.

    Subprocesses inherit their paths in the environment variable :data:`FILES`.

    Raises:
        PluginError: As in :func:`load_file`.
    """
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        load_file(Path(path))


def write_origin(folder: Path, method: str, net: str = "") -> None:
    """Record in a run folder which Python files of the user define its method and its net.

    Built-in methods and nets have no such file. If both are built in, nothing is written.

    Args:
        folder: Run folder.
        method: Name of the method.
        net: Name of the net; empty for a language model.
    """
    record: dict[str, Any] = {}
    if (path := _file_of(method)) is not None:
        record = {"method": method, "file": str(path), "sha256": _digest(path)}
    if (path := _file_of_net(net)) is not None:
        record["net"] = {"name": net, "file": str(path), "sha256": _digest(path)}
    if record:
        write_json(folder / ORIGIN, record)


def check_origin(folder: Path, method: str, *, begun: bool = True) -> None:
    """Check that the method of a run folder is registered; warn if the run's Python files have changed since it began.

    The folder's file :data:`ORIGIN` has the paths and the SHA-256 of the Python files that defined the method and the
    net, if the user has written them.

    Args:
        folder: Run folder.
        method: Name of its method.
        begun: Whether the run has trained anything. If not, a change of the file does not matter and is not reported.

    Raises:
        RunError: The method is not registered; the message names the Python file. Or ``ORIGIN`` is damaged.
    """
    path = folder / ORIGIN
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        file, digest = str(record.get("file", "")), str(record.get("sha256", ""))
        net_record = record.get("net", {})
        net, net_digest = str(net_record.get("name", "")), str(net_record.get("sha256", ""))
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: damaged ({error}); delete it and give --plugin FILE") from None
    if begun:
        _warn_if_changed(f"net {net!r}", _file_of_net(net), net_digest, folder)
    if method in REGISTRY:
        if begun and file:  # without a recorded file there is nothing to compare
            _warn_if_changed(f"method {method!r}", _file_of(method), digest, folder)
        return
    hint = "if it is your own method, give --plugin FILE"
    if file:
        gone = "" if Path(file).is_file() else ", which no longer exists"
        hint = f"it came from {file}{gone}: give --plugin {file}"
    raise RunError(f"{folder}: no method {method!r} here; {hint}, or in Python comingle.load(FOLDER, method=...)")


def _warn_if_changed(subject: str, file: Path | None, digest: str, folder: Path) -> None:
    """Warn if the Python file of a method or of a net has changed since the run began.

    The processes of a command print the warning only once for each run and change.

    Args:
        subject: The method or the net, such as "method 'near'".
        file: The file that defines the method or the net now; None if it is not in a file of the user.
        digest: SHA-256 of the file when the run began.
        folder: Run folder.
    """
    if file is None:
        return
    new_digest = _digest(file)
    if new_digest == digest:
        return
    old_start, new_start = digest[:_DIGEST_CHARACTERS], new_digest[:_DIGEST_CHARACTERS]
    run_digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    change = f"{run_digest}-{old_start}-{new_start}"
    reported_changes = os.environ.get(REPORTED_CHANGES, "").split()  # by this process or the one that started it
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
    """Import a Python file under a unique module name, without writing bytecode; return the module.

    Args:
        path: The file.
        where: Name of the file in messages.

    Raises:
        PluginError: The file raised an exception or exited; the message has its place.
    """
    name = f"comingle_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations look it up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that files beside it do not shadow libraries
    setting_before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise PluginError(f"{where}: {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except ComingleError as error:
        raise PluginError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        _log.info("%s", path, exc_info=True)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"{where}: {user_place(error, name) or path}: {what}") from error
    finally:
        sys.dont_write_bytecode = setting_before
    return module


def _methods(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the methods that a module defines, by name: objects, and functions annotated to return one."""
    for key, defined in list(vars(module).items()):
        if key.startswith("_"):
            continue
        if isinstance(defined, Method):
            yield defined.name, defined
        elif inspect.isfunction(defined) and defined.__module__ == module.__name__ and _returns_method(defined):
            yield make(defined).name, defined


def _functions_without_annotation(module: ModuleType, registered: Collection[object]) -> dict[str, tuple[str, bool]]:
    """Return the functions of a module that may be meant as methods, as their return value is not annotated.

    Args:
        module: The module.
        registered: Methods that the module has registered itself.

    Returns:
        By name: file and line, and whether the function's code names the class ``Method``.
    """
    functions = {
        name: defined
        for name, defined in vars(module).items()
        if inspect.isfunction(defined) and not name.startswith("_") and defined.__module__ == module.__name__
    }
    codes = {
        name: defined.__code__
        for name, defined in functions.items()
        if "return" not in defined.__annotations__ and defined not in registered
    }
    return {
        name: (f"{code.co_filename}:{code.co_firstlineno}", "Method" in code.co_names) for name, code in codes.items()
    }


def _returns_method(function: object) -> bool:
    """Return whether a function is annotated to return a ``Method``, as a class or as a text."""
    annotation = function.__annotations__.get("return")
    return annotation is Method or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Method")


def _origin_suffix(name: str) -> str:
    """Return ``, from FILE`` for a method of a loaded file; otherwise an empty text."""
    path = _file_of(name)
    return "" if path is None else f", from {path}"


def _file_of(method: str) -> Path | None:
    """Return the loaded file that has a method; None for built-in methods and installed packages."""
    return next((path for path, names in _loaded.items() if method in names), None)


def _file_of_net(net: str) -> Path | None:
    """Return the loaded file that has registered a net; None for others."""
    return next((path for path, names in _nets.items() if net in names), None)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
