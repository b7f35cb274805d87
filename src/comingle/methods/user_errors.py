"""Exceptions in a user's own method, as one line with the place; those of other code stay as they are."""

from __future__ import annotations

import inspect
import logging
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from comingle.methods.base import Client, Method, Part, Placement
from comingle.methods.server import Server
from comingle.utils.errors import ComingleError, PluginError, lacks_memory

_log = logging.getLogger(__name__)

_CORE = Path(__file__).parents[1]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SEE = "; `comingle -v` shows the traceback"


@contextmanager
def own_errors(method: Method) -> Iterator[None]:
    """Convert exceptions raised by user-defined method code to a :class:`PluginError` with file and line.

    This covers client parts, server, mixture and gating whose classes are defined outside comingle. Exceptions from
    other code, ``ComingleError``, ``OSError`` and out-of-memory errors propagate unchanged.

    Raises:
        PluginError: user-defined code of the method raised an exception, or returned an invalid value.
    """
    try:
        yield
    except Exception as error:
        owners = _owners(method)
        if isinstance(error, ComingleError | OSError) or lacks_memory(error) or not owners:
            raise
        if (place := _place(error, owners)) is None:
            raise
        raise _told(method.name, error, place) from error


def call_constructor(name: str, constructor: Callable[..., Any], settings: dict[str, Any]) -> Method:
    """Call a method's constructor with its settings and check the type of the result.

    Raises:
        PluginError: the constructor raised an exception, or did not return a valid ``Method``; the message has the
            file and line.
    """
    try:
        made = constructor(**settings)
    except Exception as error:
        if isinstance(error, ComingleError) or lacks_memory(error) or not _is_own(constructor):
            raise
        raise _told(name, error, _deepest(error, constructor) or _definition(constructor)) from error
    if not isinstance(made, Method):
        raise PluginError(f"method {name}: its function returned {type(made).__name__}; allowed: a Method")
    for part, kind in (("placement", Placement), ("client", Client), ("server", Server)):
        if not isinstance(got := getattr(made, part), kind):
            shown = got.__name__ + " itself, not an object of it" if isinstance(got, type) else type(got).__name__
            where = _definition(constructor)
            raise PluginError(f"method {name}: {where}: {part} is {shown}; allowed: a {kind.__name__}")
    if wrong := next((part for part in made.client.parts if not isinstance(part, Part)), None):
        where = _definition(constructor)
        raise PluginError(f"method {name}: {where}: client.parts has {wrong!r}; allowed: objects of Part")
    return made


def _told(name: str, error: Exception, place: str) -> PluginError:
    _log.info("method %s", name, exc_info=error)
    what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return PluginError(f"method {name}: {place}: {what}{_SEE}")


def _owners(method: Method) -> list[type]:
    """Return those classes of a method's objects that are not comingle's."""
    placement = method.placement
    objects = [*method.client.parts, method.server, placement.mixture, placement.gating]
    return [type(one) for one in objects if one is not None and _is_own(type(one))]


def _is_own(defined: Any) -> bool:
    """Return whether a class or function is defined outside of comingle."""
    return (getattr(defined, "__module__", None) or "").partition(".")[0] != "comingle"


def _place(error: Exception, owners: list[type]) -> str | None:
    """Return where an exception arose if a method's own code raised it, or comingle on what that code had returned."""
    frames = list(_frames(error))
    classes = [type(frame.f_locals.get("self")) for frame, _ in frames]
    if called := next((one for one in classes if one in owners), None):
        return _deepest(error, called) or _definition(called)
    core = [number for number, (frame, _) in enumerate(frames) if _in_core(frame)]
    if not core or any(_is_users(frame) for frame, _ in frames[core[0] :]):
        return None  # another function of the user's, as an observer
    frame, line = frames[core[-1]]
    hooks = " or ".join(dict.fromkeys(map(_definition, owners)))
    return f"{hooks} returned or left what does not fit, at {frame.f_code.co_filename}:{line}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _in_core(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(_CORE)


def _is_users(frame: FrameType) -> bool:
    """Return whether code is neither comingle's nor of an installed library."""
    name = frame.f_code.co_filename
    return not _in_core(frame) and not name.startswith(("<frozen", *_LIBRARIES))


def _deepest(error: Exception, defined: Any) -> str | None:
    return user_place(error, defined.__module__)


def user_place(error: BaseException, module: str) -> str | None:
    """Return the last place of a traceback in the user's code, or in the package of a module."""
    package = module.partition(".")[0]
    found = None
    for frame, line in _frames(error):
        if _is_users(frame) or frame.f_globals.get("__name__", "").partition(".")[0] == package:
            found = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return found


def _definition(defined: Any) -> str:
    """Return file, line and name of a class or function."""
    name = getattr(defined, "__name__", type(defined).__name__)
    try:
        return f"{inspect.getsourcefile(defined)}:{inspect.getsourcelines(defined)[1]}, {name}"
    except (OSError, TypeError):  # of a notebook's cell that is gone, or built in
        return name
