"""What installed packages add to comingle, found through their entry points.

A package offers a function under a name in its ``pyproject.toml``::

    [project.entry-points."comingle.methods"]
    halfway = "my_package.halfway:halfway"

Groups: ``comingle.methods`` (functions that make a :class:`comingle.methods.base.Method`), ``comingle.nets`` (functions
of an input shape and a number of outputs that make an ``nn.Module``), ``comingle.forms`` (functions of a net that make
it run for all users at once, or return None), ``comingle.kinds``, ``comingle.personal`` (what is done with a personal
model), ``comingle.texts`` (functions of ``prefix:NAME`` that return documents), ``comingle.trackers`` (who is told of
a run), ``comingle.defences`` (what
makes something else of uploads some of which may be hostile), ``comingle.plans`` (what chooses how
much goes through a model at once), ``comingle.gpu`` (what ``runtime.gpu`` names makes of a language model; ``ahead`` of
what users' data comes from), ``comingle.verbs`` (functions for typer) and ``comingle.orders`` (under the name of
a group, the order in which its names are listed). Names are read from the metadata of what is installed; a plug-in's
code is imported when its name is asked for, never because a recipe or a message names a path.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from comingle.errors import PluginError, did_you_mean

Offered = TypeVar("Offered")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What the installed packages offer under a name: one entry point, or several that nobody can choose among."""

    group: str
    name: str
    points: tuple[EntryPoint, ...]

    @property
    def distributions(self) -> str:
        """The packages that offer it, as ``halfway 1.0``."""
        return " and ".join(sorted(f"{point.dist.name} {point.dist.version}" for point in self.points if point.dist))

    def load(self) -> Any:
        """What is offered, imported.

        Raises:
            PluginError: several packages offer the name, or the package that does cannot be imported.
        """
        point, *others = self.points
        if others:
            raise PluginError(f"{self.group}: {self.distributions} both offer {self.name!r}; uninstall all but one")
        try:
            return point.load()
        except Exception as error:
            _log.info("%s", point.value, exc_info=True)
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise PluginError(
                f"{self.group}: {self.name!r} of {self.distributions} cannot be imported: {what}"
            ) from error


@cache
def load(group: str) -> Mapping[str, Plugin]:
    """The names that installed packages offer in a group, in alphabetical order; nothing is imported."""
    by_name: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        by_name.setdefault(point.name, []).append(point)
    return {name: Plugin(group=group, name=name, points=tuple(by_name[name])) for name in sorted(by_name)}


def require(group: str, name: str) -> Any:
    """What is offered under a name, imported.

    Raises:
        PluginError: nothing is, or it cannot be imported.
    """
    if (plugin := load(group).get(name)) is None:
        raise PluginError(f"{group}: no installed package offers {name!r}.{stale_hint(group, name)}")
    return plugin.load()


class Registry(Mapping[str, Offered], Generic[Offered]):
    """The core's own by name, what was registered, and what plug-ins offer, which is imported on first use.

    Names are listed in the order that a package publishes for the group; others after them, the core's own first.
    """

    def __init__(self, group: str, own: Mapping[str, Offered]) -> None:
        self._group = group
        self._own = dict(own)
        self._registered: dict[str, Offered] = {}

    def register(self, name: str, offered: Offered) -> None:
        """Make something known under a name, for this process; a name that was registered before is replaced.

        Raises:
            PluginError: the core or a plug-in has the name.
        """
        if name in self._own or name in load(self._group):
            whose = "comingle itself" if name in self._own else load(self._group)[name].distributions
            raise PluginError(f"{self._group}: {whose} has {name!r}; register it under another name")
        self._registered[name] = offered

    @contextmanager
    def lent(self, name: str, offered: Offered) -> Iterator[None]:
        """Make something known while this lasts; what was registered under the name before comes back.

        Raises:
            PluginError: as :meth:`register`.
        """
        before = dict(self._registered)
        self.register(name, offered)
        try:
            yield
        finally:
            del self._registered[name]
            self._registered |= {name: before[name]} if name in before else {}

    def __getitem__(self, name: str) -> Offered:
        """Raises PluginError where a plug-in has a name of the core or cannot be imported, else as any mapping."""
        if name in self._registered:
            return self._registered[name]
        plugin = load(self._group).get(name)
        if name in self._own:
            if plugin is not None:
                raise taken(plugin)
            return self._own[name]
        if plugin is None:
            raise KeyError(name)
        return plugin.load()

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._registered or name in load(self._group)

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys([*self._own, *self._registered, *load(self._group)])
        published = [name for name in _published_order(self._group) if name in names]
        return iter(dict.fromkeys([*published, *names]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def hint(self, name: str) -> str:
        """What may help somebody who asked for a name that is not here."""
        return did_you_mean(name, self) + stale_hint(self._group, name)


def _published_order(group: str) -> Sequence[str]:
    """In which order an installed package wants a group's names listed; none where nobody says so, or it is broken."""
    plugin = load("comingle.orders").get(group)
    try:
        return plugin.load() if plugin is not None else ()
    except PluginError as error:
        _log.warning("%s", error)
        return ()


def taken(plugin: Plugin) -> PluginError:
    """What is said of a plug-in whose name comingle itself has."""
    return PluginError(
        f"{plugin.group}: {plugin.distributions} offers {plugin.name!r}, which comingle itself has; uninstall it"
    )


def stale_hint(group: str, name: str) -> str:
    """What to do where this source checkout offers a name, but was installed before it did; else nothing."""
    import tomllib  # here, since only a mistake needs it, and every command imports this module

    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return ""
    points = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
    if name not in points.get(group, {}) or name in load(group):
        return ""
    return f" This checkout has it, but was installed before it had: pip install -e {project.parent}"
