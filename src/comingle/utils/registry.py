"""Registries: implementations by name, from comingle itself, from a program, and from other installed packages.

Another package offers an implementation under a name in its ``pyproject.toml``::

    [project.entry-points."comingle.methods"]
    halfway = "my_package.halfway:halfway"

Groups:

- ``comingle.methods``: functions that return a :class:`comingle.methods.base.Method`.
- ``comingle.nets``: functions of an input shape and a number of outputs that return an ``nn.Module``.
- ``comingle.losses``: functions of outputs and targets.
- ``comingle.kinds``: sections ``data`` of further kinds of data.
- ``comingle.stores``: instances of :class:`comingle.training.client.Store`.
- ``comingle.mechanisms``: privacy mechanisms, as :class:`comingle.config.settings.Mechanism`.
- ``comingle.trackers``: functions that start a tracker of a run.
- ``comingle.verbs``: functions for typer, which become commands.

Names are read from the metadata of installed packages. Code is imported when its name is used; a path in a recipe or
in a message never causes an import.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from comingle.utils.errors import PluginError, did_you_mean

Offered = TypeVar("Offered")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The entry points of installed packages with one name; more than one is an error."""

    group: str
    name: str
    points: tuple[EntryPoint, ...]

    @property
    def distributions(self) -> str:
        """The packages that offer this plug-in, with versions, such as "halfway 1.0 and third 0.2"."""
        packages = [f"{point.dist.name} {point.dist.version}" for point in self.points if point.dist]
        return " and ".join(sorted(packages))

    def load(self) -> Any:
        """Import the implementation that the package offers under this name, and return it.

        Raises:
            PluginError: Several packages offer the name, or the package cannot be imported.
        """
        point, *other_points = self.points
        if other_points:
            raise PluginError(f"{self.group}: {self.distributions} both offer {self.name!r}; uninstall all but one")
        try:
            return point.load()
        except Exception as error:
            _log.info("%s", point.value, exc_info=True)
            reason = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
            raise PluginError(
                f"{self.group}: {self.name!r} of {self.distributions} cannot be imported: {reason}"
            ) from error


@cache
def find_plugins(group: str) -> Mapping[str, Plugin]:
    """Return the plug-ins that installed packages declare, sorted by name, without importing them.

    Args:
        group: Group of entry points, one for each kind of plug-in.
    """
    points_by_name: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        points_by_name.setdefault(point.name, []).append(point)
    plugins: dict[str, Plugin] = {}
    for name in sorted(points_by_name):
        plugins[name] = Plugin(group=group, name=name, points=tuple(points_by_name[name]))
    return plugins


def load_object(path: str) -> Any:
    """Import ``package.module:NAME`` and return the object of that name."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(Mapping[str, Offered], Generic[Offered]):
    """Implementations by name: comingle's own, those that a program registered, and those of other packages.

    Args:
        group: The group of entry points in which other packages offer implementations.
        own: The built-in ones by name; a string ``"package.module:NAME"`` is imported on first use.
    """

    def __init__(self, group: str, own: Mapping[str, Offered | str]) -> None:
        """Start with the built-in implementations ``own``; those of the entry points ``group`` are looked up later."""
        self._group = group
        self._own: dict[str, Offered | str] = dict(own)
        self._registered: dict[str, Offered] = {}  # by the running program

    def register(self, name: str, offered: Offered) -> None:
        """Register an implementation in this process; it replaces one that was registered under the same name.

        Args:
            name: The name by which recipes refer to it.
            offered: The implementation.

        Raises:
            PluginError: The name is that of a built-in implementation or of a plug-in.
        """
        plugin = find_plugins(self._group).get(name)
        if name in self._own:
            raise self._name_taken(name, owner="comingle itself")
        if plugin is not None:
            raise self._name_taken(name, owner=plugin.distributions)
        self._registered[name] = offered

    def _name_taken(self, name: str, owner: str) -> PluginError:
        """Return the error for a name that is registered already."""
        return PluginError(f"{self._group}: {name!r} is taken by {owner}; register it under another name")

    @contextmanager
    def temporarily_registered(self, name: str, offered: Offered) -> Iterator[None]:
        """Register an implementation within a ``with`` block; afterwards restore the previous one of this name.

        Raises:
            PluginError: As for :meth:`register`.
        """
        registered_before = dict(self._registered)
        self.register(name, offered)
        try:
            yield
        finally:
            del self._registered[name]
            if name in registered_before:
                self._registered[name] = registered_before[name]

    def __getitem__(self, name: str) -> Offered:
        """Return the implementation of this name; import it if necessary.

        An implementation that the program registered comes first, then the built-in one, then one of an installed
        package.

        Raises:
            KeyError: There is none.
            PluginError: A plug-in has a built-in name, several have this name, or it cannot be imported.
        """
        if name in self._registered:
            return self._registered[name]
        plugin = find_plugins(self._group).get(name)
        if name in self._own:
            if plugin is not None:
                raise name_conflict(plugin)
            built_in: Any = self._own[name]
            if isinstance(built_in, str):  # "package.module:NAME"
                return load_object(built_in)
            return built_in
        if plugin is None:
            raise KeyError(name)
        return plugin.load()

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._registered or name in find_plugins(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._own, *self._registered, *find_plugins(self._group)]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def hint(self, name: str) -> str:
        """Return a suggestion for a name that is not in the registry, or an empty string."""
        return did_you_mean(name, self)


def name_conflict(plugin: Plugin) -> PluginError:
    """Return the error for a plug-in with a built-in name."""
    offered = f"{plugin.distributions} offers {plugin.name!r}"
    return PluginError(f"{plugin.group}: {offered}, a name that comingle itself has; uninstall it")
