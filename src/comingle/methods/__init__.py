"""Registry of methods, and conversion of errors in users' own methods to one line with the place."""

from __future__ import annotations

import inspect
import logging
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from comingle.methods.base import Client, ClientHook, Method, Placement
from comingle.methods.server import Server
from comingle.methods.settings import allowed_by_type, allowed_values, setting_hint
from comingle.methods.validation import check_method, defined_at
from comingle.utils.errors import ComingleError, PluginError, RecipeError, UnknownMethodError, lacks_memory
from comingle.utils.registry import Registry

_log = logging.getLogger(__name__)

_COMINGLE = Path(__file__).parents[1]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TRACEBACK_HINT = "; `comingle -v` shows the traceback"


@contextmanager
def own_errors(method: Method) -> Iterator[None]:
    """Replace exceptions from the user's own code in a method by a :class:`PluginError` with file and line.

    All other exceptions are raised unchanged, and so are ``ComingleError``, ``OSError`` and out-of-memory errors.

    Args:
        method: Method whose code may run inside the ``with`` block.

    Raises:
        PluginError: A hook, server, mixture or gating that is defined outside comingle raised an exception or returned
            an invalid value.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ComingleError | OSError) or lacks_memory(error):
            raise
        user_classes = _external_classes(method)
        if not user_classes:
            raise
        place = _place_of_error(error, user_classes)
        if place is None:  # the exception comes from other code
            raise
        raise _plugin_error(method.name, error, place) from error


def call_constructor(name: str, constructor: Callable[..., object], settings: Mapping[str, object]) -> Method:
    """Call a method's constructor with its settings and check the result.

    Args:
        name: Name of the method, for error messages.
        constructor: Function that returns the method.
        settings: Arguments of the constructor.

    Raises:
        PluginError: The constructor raised an exception, or did not return a valid ``Method``; the message has the file
            and line.
    """
    try:
        made = constructor(**settings)
    except Exception as error:
        is_explained_elsewhere = isinstance(error, ComingleError) or lacks_memory(error)
        if is_explained_elsewhere or not _is_external(constructor):
            raise
        place = _deepest_place(error, constructor) or defined_at(constructor)
        raise _plugin_error(name, error, place) from error
    if not isinstance(made, Method):
        raise PluginError(f"method {name}: its function returned {type(made).__name__}; allowed: a Method")
    _check_types_of_parts(name, made, defined_at(constructor))
    return made


def _check_types_of_parts(name: str, method: Method, where: str) -> None:
    """Check the types of a method's placement, client, server and client hooks.

    Args:
        name: Name of the method, for error messages.
        method: The federated method of the run.
        where: File and line of its constructor, for error messages.

    Raises:
        PluginError: A part has another type, such as the class ``Mean`` instead of the object ``Mean()``.
    """
    for attribute, allowed_type in (("placement", Placement), ("client", Client), ("server", Server)):
        part = getattr(method, attribute)
        if not isinstance(part, allowed_type):
            shown = f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__
            raise PluginError(
                f"method {name}: {where}: {attribute} is {shown}; allowed: a {allowed_type.__name__} object"
            )
    for hook in method.client.parts:
        if not isinstance(hook, ClientHook):
            raise PluginError(f"method {name}: {where}: client.parts has {hook!r}; allowed: ClientHook objects")


def _plugin_error(name: str, error: Exception, place: str) -> PluginError:
    """Return an error for the user with an exception's place and message, on one line; log the traceback.

    Args:
        name: Name of the method.
        error: Exception from the method's code.
        place: File and line.
    """
    _log.info("method %s", name, exc_info=error)
    type_and_message = f"{type(error).__name__}: {error}"
    on_one_line = " ".join(type_and_message.split()).removesuffix(":")  # "KeyError:" without a message
    return PluginError(f"method {name}: {place}: {on_one_line}{_TRACEBACK_HINT}")


def _external_classes(method: Method) -> list[type]:
    """Return those classes of a method's hooks, server, mixture and gating that are not comingle's own.

    If there are any, an exception in a run may be a mistake of their author, and its message then names their file.
    """
    parts = [*method.client.parts, method.server, method.placement.mixture, method.placement.gating]
    classes = [type(part) for part in parts if part is not None]
    return [part_class for part_class in classes if _is_external(part_class)]


def _is_external(defined: object) -> bool:
    """Return whether a class or function is defined outside comingle."""
    module = getattr(defined, "__module__", None) or ""
    package = module.partition(".")[0]
    return package != "comingle"


def _place_of_error(error: Exception, user_classes: list[type]) -> str | None:
    """Return the file and line of the user's code that caused an exception, or None if other code did.

    The code may have raised the exception, or returned a value that made comingle raise it later.

    Args:
        error: The exception, with its traceback.
        user_classes: Classes of the method that are defined outside comingle.

    Returns:
        Text for a message, such as "/home/ada/near.py:12, in Near.begin".
    """
    frames = list(_frames(error))
    # First case: a method of one of the user's classes was running.
    for frame, _ in frames:
        frame_class = type(frame.f_locals.get("self"))
        if frame_class in user_classes:
            return _deepest_place(error, frame_class) or defined_at(frame_class)
    # Second case: comingle failed, perhaps because of an invalid value that one of the user's classes returned before.
    comingle_indices = [index for index, (frame, _) in enumerate(frames) if _in_comingle(frame)]
    if not comingle_indices:
        return None
    called_by_comingle = frames[comingle_indices[0] :]
    if any(_is_user_code(frame) for frame, _ in called_by_comingle):  # other code of the user, such as an observer
        return None
    last_frame, line = frames[comingle_indices[-1]]
    places_of_classes = " or ".join(dict.fromkeys(map(defined_at, user_classes)))
    used_at = f"{last_frame.f_code.co_filename}:{line}"
    return f"{places_of_classes} returned or stored an invalid value, used at {used_at}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of an exception's traceback with their line numbers, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _in_comingle(frame: FrameType) -> bool:
    """Return whether a frame's code belongs to comingle."""
    return Path(frame.f_code.co_filename).is_relative_to(_COMINGLE)


def _is_user_code(frame: FrameType) -> bool:
    """Return whether a frame's code belongs neither to comingle nor to an installed library."""
    file = frame.f_code.co_filename
    in_library = file.startswith(("<frozen", *_LIBRARIES))
    return not _in_comingle(frame) and not in_library


def _deepest_place(error: Exception, defined: object) -> str | None:
    """Return the innermost line of a traceback in the user's own code, such as "near.py:12, in Near.begin", or None.

    Args:
        error: Exception with the traceback.
        defined: A class or function of the user; all code of its package counts as the user's.
    """
    return user_place(error, defined.__module__)


def user_place(error: BaseException, module: str) -> str | None:
    """Return the innermost line of a traceback in the user's own code, such as "near.py:12, in Near.begin".

    Messages about an error in a plug-in name this line instead of one inside comingle or another library.

    Args:
        error: Exception with the traceback.
        module: Name of a module of the user. Code of its package counts as the user's even if it is installed.

    Returns:
        File, line and function; None if no frame of the traceback is the user's.
    """
    user_package = module.partition(".")[0]
    innermost = None
    for frame, line in _frames(error):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if _is_user_code(frame) or package == user_package:
            innermost = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return innermost


Make = Callable[..., Method]

_METHODS = {
    "pretrained": "comingle.methods.baselines:pretrained",
    "centralized": "comingle.methods.baselines:centralized",
    "local": "comingle.methods.baselines:local",
    "fedavg": "comingle.methods.baselines:fedavg",
    "ffa-lora": "comingle.methods.partial_sharing:ffa_lora",
    "fedsa-lora": "comingle.methods.partial_sharing:fedsa_lora",
    "pcl": "comingle.methods.pcl:pcl",
    "fdlora": "comingle.methods.dual_lora:fdlora",
    "hetlora": "comingle.methods.heterogeneous_ranks:hetlora",
    "flexlora": "comingle.methods.heterogeneous_ranks:flexlora",
    "local-moe": "comingle.methods.moe:local_moe",
    "fedavg-moe": "comingle.methods.moe:fedavg_moe",
    "pfedmoe": "comingle.methods.moe:pfedmoe",
    "local-moe-tr": "comingle.methods.moe:local_moe_tr",
    "fedavg-moe-tr": "comingle.methods.moe:fedavg_moe_tr",
    "comigs-tr": "comingle.methods.comigs:comigs_tr",
    "comigs": "comingle.methods.comigs:comigs",
    "comigs-1g1s": "comingle.methods.comigs:comigs_1g1s",
    "comigs-2g": "comingle.methods.comigs:comigs_2g",
    "comigs-2s": "comingle.methods.comigs:comigs_2s",
    "comigs-1gxs": "comingle.methods.comigs:comigs_1gxs",
    "floral": "comingle.methods.floral:floral",
    "floral-optimal": "comingle.methods.floral:floral_optimal",
    "floral-mfl": "comingle.methods.floral:floral_mfl",
    "local-adaptor": "comingle.methods.ensemble:local_adaptor",
    "ensemble": "comingle.methods.ensemble:ensemble",
    "ensemble-optimal": "comingle.methods.ensemble:ensemble_optimal",
    "mfl": "comingle.methods.ensemble:mfl",
    "fml": "comingle.methods.ensemble:fml",
    "fedmerge": "comingle.methods.fedmerge:fedmerge",
    "fedmerge-fixed": "comingle.methods.fedmerge:fedmerge_fixed",
    "fedavg+": "comingle.methods.baselines:fedavg_plus",
    "ifca": "comingle.methods.clustered:ifca",
    "fedem": "comingle.methods.clustered:fedem",
    "fedit": "comingle.methods.dual_lora:fedit",
    "fedlora": "comingle.methods.dual_lora:fedlora",
    "stacking": "comingle.methods.stacking:stacking",
    "ditto": "comingle.methods.baselines:ditto",
    "fedalt": "comingle.methods.fedalt:fedalt",
    "fedamole": "comingle.methods.fedamole:fedamole",
    "fed-sb": "comingle.methods.fedex:fed_sb",
    "fedbn": "comingle.methods.partial_sharing:fedbn",
    "feddpa": "comingle.methods.dual_lora:feddpa",
    "fedex-lora": "comingle.methods.fedex:fedex_lora",
    "fedlease": "comingle.methods.clustered:fedlease",
    "fedrot-lora": "comingle.methods.fedex:fedrot_lora",
    "fedtreelora": "comingle.methods.fedalt:fedtreelora",
    "fedper": "comingle.methods.partial_sharing:fedper",
    "fedprox": "comingle.methods.baselines:fedprox",
    "flora-stacking": "comingle.methods.fedex:flora_stacking",
    "momentum-clustering": "comingle.methods.momentum_clustering:momentum_clustering",
    "rolora": "comingle.methods.partial_sharing:rolora",
    "scaffold": "comingle.methods.scaffold:scaffold",
    "sdflora": "comingle.methods.dual_lora:sdflora",
}
"""Constructors of the built-in methods, imported on first use; in the order in which methods are listed."""

REGISTRY: Registry[Make] = Registry("comingle.methods", _METHODS)
"""Constructors of all methods: built-in, registered by a program, and of other packages."""

SKIPPED: dict[str, str] = {}
"""Functions of plug-in files that are no methods, as their return value is not annotated: file and line by name."""


def register(name: str, method: Method | Make) -> None:
    """Register a method under a name in this process, replacing an earlier registration of the name.

    Args:
        name: Name of the method.
        method: A ``Method``, or a constructor: a function that returns a ``Method`` and whose parameters are the
            method's settings.

    Raises:
        PluginError: The name belongs to a built-in method or a plug-in.
    """
    REGISTRY.register(name, _as_constructor(method))


def _as_constructor(method: Method | Make) -> Make:
    """Return a method's constructor; for a ``Method``, a constructor without settings that returns it."""
    if isinstance(method, Method):
        return lambda: method
    return method


@contextmanager
def temporarily_registered(method: str | Method | Make) -> Iterator[str]:
    """Register a method for the duration of a ``with`` block, in which recipes can name it, and yield its name.

    A method that was registered before the block stays registered after it.

    Args:
        method: Name of a registered method, a ``Method`` object, or a constructor: a function that returns a
            ``Method``.

    Raises:
        PluginError: Another method has the name.
        RecipeError: The constructor fails with its default settings.
    """
    if isinstance(method, str):
        yield method
        return
    with_defaults = make(method)
    name = with_defaults.name
    if _is_registered(with_defaults, method):
        yield name
        return
    with REGISTRY.temporarily_registered(name, _as_constructor(method)):
        yield name


def _is_registered(with_defaults: Method, given: Method | Make) -> bool:
    """Return whether a method is registered under its name: the same constructor, or an equal ``Method``.

    Otherwise :func:`temporarily_registered` registers it, so that a recipe can name it.

    Args:
        with_defaults: The method with its default settings.
        given: The method as the user gave it: a ``Method`` or a constructor.
    """
    name = with_defaults.name
    if name not in REGISTRY:
        return False
    if given is REGISTRY[name]:
        return True
    return isinstance(given, Method) and make(name) == given


def settings_of(method: str | Method | Make) -> dict[str, Any]:
    """Return the settings of a method and their defaults: the parameters of its constructor.

    Args:
        method: Name of the method, its constructor, or a ``Method`` object, which has no settings.

    Raises:
        RecipeError: The method is unknown; the message names the nearest known one.
        PluginError: A setting has no default, or a plug-in cannot be used.
    """
    parameters = inspect.signature(_constructor(method)).parameters.values()
    for p in parameters:
        if p.default is p.empty:
            raise PluginError(f"method {_name_of(method)}: {str(p)!r} has no default; each setting needs one")
    # `name` is the name of the method that is made, as in comigs(name=...), and not a setting.
    return {p.name: p.default for p in parameters if p.name != "name"}


def settings_in_comparison(
    name: str, recipe_method: str, settings: Mapping[str, Any], for_all: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a method in a comparison, without those that keep their defaults.

    The recipe's method has the recipe's settings. Then each method gets the settings of ``for_all`` that it knows.

    Args:
        name: Name of the method.
        recipe_method: Name of the recipe's method.
        settings: Settings of the recipe's method.
        for_all: Settings for all methods of the comparison, from ``--set method.KEY=VALUE``.
    """
    known_keys = settings_of(name)
    result = {}
    if name == recipe_method:
        # ``settings`` includes ``for_all``, even settings that this method does not know.
        result = {key: value for key, value in settings.items() if key not in for_all}
    for key, value in for_all.items():
        if key in known_keys:
            result[key] = value
    return result


def make(method: str | Method | Make, /, **settings: object) -> Method:
    """Return a method with the given settings, and check it.

    Args:
        method: Name of the method, its constructor, or a ``Method`` object, which has no settings and is returned.
        settings: Values of the method's settings; others have their defaults.

    Raises:
        RecipeError: The method or a setting is unknown, a value is out of range, or the method's parts do not fit each
            other (:func:`comingle.methods.validation.check_method`).
        PluginError: A plug-in cannot be used.
    """
    constructor = _constructor(method)
    name = _name_of(method)
    defaults = settings_of(method)
    allowed = allowed_values(constructor)
    for key, value in settings.items():
        if key not in defaults:
            names = ", ".join(sorted(defaults)) or "no settings"
            raise RecipeError(f"method {name}: no setting {key!r}.{setting_hint(key, defaults)} Allowed: {names}")
        # A setting without annotation has the type of its default.
        description, fits = allowed.get(key) or allowed_by_type(type(defaults[key]))
        if not fits(value):
            raise RecipeError(f"method {name}: {key} is {value!r}; allowed: {description}")
    made = call_constructor(name, constructor, settings)
    check_method(name, made)
    return made


def _constructor(method: str | Method | Make) -> Make:
    """Return the function that makes a method, from a name, a ``Method`` or the function itself.

    Raises:
        UnknownMethodError: No method has the name.
        PluginError: The argument is of another type.
    """
    if isinstance(method, str):
        if method not in REGISTRY:
            raise _unknown_method(method)
        method = REGISTRY[method]
    if not callable(method) and not isinstance(method, Method):
        raise PluginError(
            f"method: got {type(method).__name__}; allowed: a name, a Method, or a function that returns one"
        )
    return _as_constructor(method)


def _unknown_method(name: str) -> UnknownMethodError:
    """Return an error with the names of all methods, and what to do if a plug-in file has a function of the name."""
    allowed_names = ", ".join(REGISTRY)
    if name in SKIPPED:
        return UnknownMethodError(
            f"method: got {name!r}, a function in {SKIPPED[name]} whose return value is not annotated; allowed: "
            f"{allowed_names}; write `def {name}(...) -> Method:` there"
        )
    return UnknownMethodError(f"method: no method {name!r}.{REGISTRY.hint(name)} Allowed: {allowed_names}")


def _name_of(method: str | Method | Make) -> str:
    """Return the name of a method for messages; for a constructor, the function's name."""
    if isinstance(method, str):
        return method
    if isinstance(method, Method):
        return method.name
    return getattr(method, "__name__", type(method).__name__)
