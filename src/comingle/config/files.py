"""Recipe files: YAML read strictly, and settings that the users' kind of data does not read.

YAML 1.1 turns ``no`` into False and ``2024-01-01`` into a date, and keeps the last of two equal keys without a word;
each of these would rename or drop a user. So keys stay as typed, each occurs once, and nesting is limited.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from comingle.config.sections import Recipe, complete_older, parse_recipe
from comingle.utils.errors import RecipeError
from comingle.utils.names import is_named

MAX_BYTES = 4 << 20
"""Ten thousand users with a file each need one million; reading YAML takes about 200 times its size in memory."""

MAX_DEPTH = 50
"""A recipe needs less than ten."""

MAX_REPEATED = 100_000
"""How many values aliases may repeat in all; a chain of aliases repeats exponentially many."""

_MERGE = "tag:yaml.org,2002:merge"
_KINDS = {yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


def read_text(text: str, where: str) -> Any:
    """The content of a YAML text; ``where`` is what messages call it.

    Raises:
        RecipeError: not YAML, a key that is there twice or no text, or nesting and aliases beyond reason.
    """
    if len(text) > MAX_BYTES:
        raise too_large(len(text), where)
    try:
        return yaml.load(text, Loader=_Loader)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # the latter of dates and numbers that are none
        raise RecipeError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def too_large(size: int, where: str) -> RecipeError:
    """Return the error for a recipe that would fill memory."""
    advice = "allowed: at most {:,}; a recipe names data and does not hold it"
    return RecipeError(f"{where}: {size:,} bytes; {advice.format(MAX_BYTES)}")


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0
        self._composed = 0
        self._repeated = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int | yaml.Node | None) -> yaml.Node | None:
        event: Any = self.peek_event()
        if self._depth >= MAX_DEPTH:
            raise _problem(event, f"nested more than {MAX_DEPTH} deep; a recipe needs less than ten")
        before, self._depth = self._composed, self._depth + 1
        node: Any = super().compose_node(parent, index)  # type: ignore[arg-type]  (the stub lacks None, for the root)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._repeat(node, event)
        else:
            self._composed += 1
            self._sizes[id(node)] = self._composed - before
        return node

    def _repeat(self, node: yaml.Node | None, event: yaml.AliasEvent) -> None:
        if id(node) not in self._sizes:
            raise _problem(event, f"alias '*{event.anchor}' lies within what it repeats")
        self._composed += self._sizes[id(node)]
        self._repeated += self._sizes[id(node)]
        if self._repeated > MAX_REPEATED:
            raise _problem(event, f"aliases repeat more than {MAX_REPEATED:,} values; write them out")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _check_keys(node)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_map(self, node: yaml.MappingNode) -> Iterator[dict[Hashable, object]]:
        mapping: dict[Hashable, object] = {}
        yield mapping
        mapping.update(self.construct_mapping(node))


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _problem(key, f"a key must be text; got {_KINDS[type(key)]}")
        if key.value in lines and key.tag != _MERGE:
            raise _problem(key, f"key {key.value!r} a second time; it is in line {lines[key.value]} already")
        if key.tag != _MERGE:
            lines[key.value] = key.start_mark.line + 1
        if key.value == "users" and isinstance(value, yaml.MappingNode):
            _check_users(value)


def _check_users(node: yaml.MappingNode) -> None:
    """A name that is merged in and stands there too would be two people, one of them dropped."""
    if merged := next((key for key, _ in node.value if key.tag == _MERGE), None):
        raise _problem(merged, "'<<' among users hides who is named twice; write all out (in quotes it is a name)")


def _problem(place: Any, what: str) -> RecipeError:
    return RecipeError(f"line {place.start_mark.line + 1}: {what}")


def load_recipe(path: str | Path, *, change: Callable[[object], object] = lambda content: content) -> Recipe:
    """Read a recipe file, or the recipe of a run folder. Relative paths in it are relative to the file.

    What is checked is what ``change`` makes of the file's content.

    Raises:
        RecipeError: no such file, not YAML, or a wrong recipe.
    """
    path = Path(path)
    written = path.is_dir()  # by a run, and not by a user
    if written:
        path = path / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe.{_shipped_hint(path)}")
    content = complete_older(read_yaml(path)) if written else read_yaml(path)
    return _anchor(parse_recipe(change(content), where=str(path)), path.parent)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        RecipeError: as :func:`comingle.config.files.read_text`, or it cannot be read.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise too_large(size, str(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    return read_text(text, str(path))


def shipped_recipes() -> Path:
    """The folder of the recipes that come with comingle."""
    installed = Path(__file__).parents[1] / "shipped_recipes"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def _shipped_hint(path: Path) -> str:
    shipped = shipped_recipes() / path.name
    return f" Did you mean {str(shipped)!r}?" if shipped.is_file() else ""


def _anchor(recipe: Recipe, folder: Path) -> Recipe:
    """Make relative paths of the data absolute where they exist below ``folder``; leave hub names alone."""
    content = recipe.model_dump(mode="json", exclude_unset=True)

    def anchored(source: object) -> object:
        if isinstance(source, list):
            return [anchored(s) for s in source]
        if not isinstance(source, str) or is_named(source):
            return source
        source = os.path.expandvars(os.path.expanduser(source))
        return str((folder / source).resolve()) if os.path.exists(folder / source) else source

    content["data"] |= recipe.data.anchored(anchored)
    if os.path.exists(folder / recipe.base):
        content["base"] = anchored(recipe.base)
    return Recipe.model_validate(content)


def check_used(recipe: Recipe) -> None:
    """Whether the recipe's users have the kind of data that its settings are for.

    Raises:
        RecipeError: a setting that would not be read, or a word of the other kind.
    """
    data = recipe.data
    for place, instead in data.unread.items():
        for key, value in changed(recipe, place) if not place.startswith("data.") else ():
            raise RecipeError(f"{key}: got {value!r}, which is not read for {data.label}; {instead}")
    if (got := recipe.training.weighting) not in data.weightings:
        raise RecipeError(f"training.weighting: got {got!r} for {data.label}; allowed: {', '.join(data.weightings)}")


def changed(recipe: Recipe, place: str) -> list[tuple[str, object]]:
    """The values at a dotted key, or below it, that are not the defaults."""
    section: Any = recipe
    *path, last = place.split(".")
    for part in path:
        section = getattr(section, part)
    value, default = getattr(section, last), type(section).model_fields[last].get_default(call_default_factory=True)
    if not hasattr(value, "model_fields_set"):
        return [(place, value)] if value != default else []
    return [place_changed for name in type(value).model_fields for place_changed in changed(recipe, f"{place}.{name}")]
