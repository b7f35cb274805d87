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

_CORE = Path(__file__).parents[1]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TRACEBACK_HINT = "; `comingle -v` shows the traceback"


@contextmanager
def own_errors(method: Method) -> Iterator[None]:
    """Convert exceptions raised by user-defined method code to a :class:`PluginError` with file and line.

    This covers client hooks, server, mixture and gating whose classes are defined outside comingle. Exceptions from
    other code, ``ComingleError``, ``OSError`` and out-of-memory errors propagate unchanged.

    Args:
        method: Method whose code may run inside the ``with`` block.

    Raises:
        PluginError: User-defined code of the method raised an exception or returned an invalid value.
    """
    try:
        yield
    except Exception as error:
        user_classes = _external_classes(method)
        if isinstance(error, ComingleError | OSError) or lacks_memory(error) or not user_classes:
            raise
        if (place := _place_of_error(error, user_classes)) is None:
            raise
        raise _plugin_error(method.name, error, place) from error


def call_constructor(name: str, constructor: Callable[..., object], settings: Mapping[str, object]) -> Method:
    """Call a method's constructor with its settings and check the result.

    Args:
        name: Name of the method, for messages.
        constructor: Function that returns the method.
        settings: Arguments of the constructor.

    Raises:
        PluginError: The constructor raised an exception, or did not return a valid ``Method``; the message has the file
            and line.
    """
    try:
        made = constructor(**settings)
    except Exception as error:
        # Errors of comingle's own constructors, and those that already have a message for users, stay as they are.
        if isinstance(error, ComingleError) or lacks_memory(error) or not _is_external(constructor):
            raise
        raise _plugin_error(name, error, _deepest_place(error, constructor) or defined_at(constructor)) from error
    if not isinstance(made, Method):
        raise PluginError(f"method {name}: its function returned {type(made).__name__}; allowed: a Method")
    for part, kind in (("placement", Placement), ("client", Client), ("server", Server)):
        if not isinstance(got := getattr(made, part), kind):
            shown = f"the class {got.__name__}" if isinstance(got, type) else type(got).__name__
            where = defined_at(constructor)
            raise PluginError(f"method {name}: {where}: {part} is {shown}; allowed: a {kind.__name__} object")
    if wrong := next((part for part in made.client.parts if not isinstance(part, ClientHook)), None):
        where = defined_at(constructor)
        raise PluginError(f"method {name}: {where}: client.parts has {wrong!r}; allowed: ClientHook objects")
    return made


def _plugin_error(name: str, error: Exception, place: str) -> PluginError:
    """Log the traceback of an exception in a method's code; return an error with the place and its message."""
    _log.info("method %s", name, exc_info=error)
    what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return PluginError(f"method {name}: {place}: {what}{_TRACEBACK_HINT}")


def _external_classes(method: Method) -> list[type]:
    """Return the classes of a method's objects that are defined outside comingle, whose errors are the user's."""
    placement = method.placement
    objects = [*method.client.parts, method.server, placement.mixture, placement.gating]
    return [type(each) for each in objects if each is not None and _is_external(type(each))]


def _is_external(defined: object) -> bool:
    """Return whether a class or function is defined outside comingle."""
    return (getattr(defined, "__module__", None) or "").partition(".")[0] != "comingle"


def _place_of_error(error: Exception, user_classes: list[type]) -> str | None:
    """Return where an exception comes from if user-defined code is to blame.

    The user's code may have raised the exception, or may have returned a value that made comingle raise it later.

    Args:
        error: The exception, with its traceback.
        user_classes: Classes of the method that are defined outside comingle.

    Returns:
        Text for a message with file and line, or None if the exception comes from other code.
    """
    frames = list(_frames(error))
    classes = [type(frame.f_locals.get("self")) for frame, _ in frames]
    if outermost_class := next((frame_class for frame_class in classes if frame_class in user_classes), None):
        return _deepest_place(error, outermost_class) or defined_at(outermost_class)
    # No method of these classes is on the stack. If comingle itself failed, it got an invalid value from one of them.
    core_indices = [index for index, (frame, _) in enumerate(frames) if _in_core(frame)]
    # Comingle did not run, or it called other code of the user's, such as an observer: the method is not to blame.
    if not core_indices or any(_is_user_code(frame) for frame, _ in frames[core_indices[0] :]):
        return None
    frame, line = frames[core_indices[-1]]
    places_of_classes = " or ".join(dict.fromkeys(map(defined_at, user_classes)))
    return f"{places_of_classes} returned or stored an invalid value, used at {frame.f_code.co_filename}:{line}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of an exception's traceback with their line numbers, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _in_core(frame: FrameType) -> bool:
    """Return whether a frame's code belongs to comingle."""
    return Path(frame.f_code.co_filename).is_relative_to(_CORE)


def _is_user_code(frame: FrameType) -> bool:
    """Return whether code belongs neither to comingle nor to an installed library."""
    name = frame.f_code.co_filename
    return not _in_core(frame) and not name.startswith(("<frozen", *_LIBRARIES))


def _deepest_place(error: Exception, defined: object) -> str | None:
    """Return the last place of a traceback in the package that defines a class or function, or in the user's code."""
    return user_place(error, defined.__module__)


def user_place(error: BaseException, module: str) -> str | None:
    """Return the innermost place of a traceback that the user can mend, as "file:line, in function".

    Args:
        error: Exception with the traceback.
        module: Name of a module. Code of its package counts as the user's, even if the package is installed like a
            library.

    Returns:
        The place, or None if the traceback has no code of the user's.
    """
    package = module.partition(".")[0]
    found = None
    for frame, line in _frames(error):
        if _is_user_code(frame) or frame.f_globals.get("__name__", "").partition(".")[0] == package:
            found = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return found


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
    "ditto": "comingle.methods.ditto:ditto",
    "fedalt": "comingle.methods.fedalt:fedalt",
    "fedamole": "comingle.methods.fedamole:fedamole",
    "fedbn": "comingle.methods.partial_sharing:fedbn",
    "feddpa": "comingle.methods.dual_lora:feddpa",
    "fedex-lora": "comingle.methods.fedex:fedex_lora",
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
    # The registry has constructors; a ``Method`` is registered as a constructor without settings.
    REGISTRY.register(name, (lambda: method) if isinstance(method, Method) else method)


@contextmanager
def temporarily_registered(method: str | Method | Make) -> Iterator[str]:
    """Register a method for the duration of a ``with`` block and yield its name.

    A method that is registered already is not registered again, and stays registered after the block.

    Args:
        method: Name of a registered method, a ``Method`` object, or a constructor: a function that returns a
            ``Method``.

    Raises:
        PluginError: Another method has the name.
        RecipeError: The constructor fails with its default settings.
    """
    if isinstance(method, str):  # a registered method's name
        yield method
        return
    made = make(method)  # a constructor is called with its default settings
    if _is_registered(made, method):
        yield made.name
        return
    with REGISTRY.temporarily_registered(made.name, (lambda: method) if isinstance(method, Method) else method):
        yield made.name


def _is_registered(made: Method, method: Method | Make) -> bool:
    """Return whether a method is registered already: the same constructor, or an equal ``Method``.

    Args:
        made: The method, made with its default settings.
        method: The method as a caller gave it.
    """
    if made.name not in REGISTRY:
        return False
    return method is REGISTRY[made.name] or (isinstance(method, Method) and make(made.name) == method)


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
    """Return the settings to pass to a method that a comparison runs beside the method of a recipe.

    The recipe's own method keeps its settings; other methods have their defaults. Settings in ``for_all`` override both
    in every method that has a setting of that name, and are left out for the others.

    Args:
        name: The method for which settings are returned.
        recipe_method: Name of the recipe's method.
        settings: Settings of the recipe's method in the recipe.
        for_all: Settings for all methods of the comparison, as given with ``--set method.KEY=VALUE``.

    Returns:
        Settings by name; the method's other settings keep their defaults.
    """
    existing = settings_of(name)
    from_recipe = {}
    if name == recipe_method:
        # ``--set method.KEY=VALUE`` has put KEY into the recipe's method, too, even if only other methods have such a
        # setting. So it is left out here, and added below if this method has it.
        from_recipe = {key: value for key, value in settings.items() if key not in for_all}
    common = {key: value for key, value in for_all.items() if key in existing}
    return {**from_recipe, **common}


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
    constructor, name, known = _constructor(method), _name_of(method), settings_of(method)
    allowed = allowed_values(constructor)
    for key, value in settings.items():
        if key not in known:
            names = ", ".join(sorted(known)) or "no settings"
            raise RecipeError(f"method {name}: no setting {key!r}.{setting_hint(key, known)} Allowed: {names}")
        description, fits = allowed.get(key) or allowed_by_type(type(known[key]))
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
            allowed_names = ", ".join(REGISTRY)
            if method in SKIPPED:
                raise UnknownMethodError(
                    f"method: got {method!r}, a function in {SKIPPED[method]} whose return value is not annotated; "
                    f"allowed: {allowed_names}; write `def {method}(...) -> Method:` there"
                )
            raise UnknownMethodError(f"method: no method {method!r}.{REGISTRY.hint(method)} Allowed: {allowed_names}")
        method = REGISTRY[method]
    if isinstance(method, Method):
        return lambda: method  # a constructor without settings
    if not callable(method):
        raise PluginError(
            f"method: got {type(method).__name__}; allowed: a name, a Method, or a function that returns one"
        )
    return method


def _name_of(method: str | Method | Make) -> str:
    """Return the name of a method for messages; for a constructor, the function's name."""
    if isinstance(method, Method):
        return method.name
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
