"""Recipe files: a strict YAML reader, and a check for settings that do not apply to the users' kind of data.

YAML 1.1 converts ``no`` to False and ``2024-01-01`` to a date, and silently keeps the last of two equal keys; each of
these would rename or drop a user. So keys stay as typed, each occurs once, and nesting is limited.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from comingle.config.sections import Recipe, parse_recipe, with_older_defaults
from comingle.utils.errors import RecipeError
from comingle.utils.names import is_named

MAX_BYTES = 4 << 20
"""Largest size in bytes. 10,000 users with a file each need 1 MB; parsing takes about 200 times the size in memory."""

MAX_DEPTH = 50
"""Deepest nesting of a recipe; recipes need fewer than ten levels."""

MAX_REPEATED = 100_000
"""Largest total number of values that aliases repeat; a chain of aliases repeats exponentially many."""

_MERGE = "tag:yaml.org,2002:merge"
_KINDS = {yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


def read_text(text: str, where: str) -> Any:
    """Return the content of a YAML text.

    Args:
        text: The YAML text.
        where: Name of the text in messages.

    Raises:
        RecipeError: The text is not YAML, a key is a duplicate or not text, or nesting or aliases exceed the limits.
    """
    if len(text) > MAX_BYTES:
        raise too_large(len(text), where)
    try:
        return yaml.load(text, Loader=_Loader)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid dates and numbers
        raise RecipeError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def too_large(size: int, where: str) -> RecipeError:
    """Return the error for a recipe that is larger than ``MAX_BYTES`` and might fill memory when it is parsed.

    Args:
        size: Size of the recipe in bytes.
        where: Name of the recipe in the error, such as its path.
    """
    advice = "keep data in files, and name them in the recipe"
    return RecipeError(f"{where}: got {size:,} bytes; allowed: at most {MAX_BYTES:,}; {advice}")


class _Loader(yaml.SafeLoader):
    """YAML loader that limits nesting and repetition by aliases, and refuses duplicate keys."""

    def __init__(self, stream: str):
        """Start to read a YAML text.

        Values are counted because aliases of aliases in a small file may repeat a value exponentially often.
        """
        super().__init__(stream)
        self._depth = 0
        """Number of nodes that contain the current one."""
        self._num_values = 0
        """Number of values so far, with aliases expanded."""
        self._num_repeated = 0
        """Number of those values that come from aliases."""
        self._sizes: dict[int, int] = {}
        """Number of values in each completely read node, itself included, by the node's ``id``."""

    def compose_node(self, parent: yaml.Node | None, index: int | yaml.Node | None) -> yaml.Node | None:
        """Parse a value of a YAML text to a node, and record how many values are in it, itself included.

        Args:
            parent: The node that contains this one; None for the root.
            index: The place in the parent: a number in a list, the key's node in a mapping.
        """
        event: Any = self.peek_event()
        if self._depth >= MAX_DEPTH:
            raise _error_at(event, f"nested more than {MAX_DEPTH} levels deep; a recipe needs fewer than ten")
        num_values_before = self._num_values
        self._depth += 1
        node: Any = super().compose_node(parent, index)  # type: ignore[arg-type]  (the stub lacks None for the root)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(node, event)
        else:
            self._num_values += 1
            self._sizes[id(node)] = self._num_values - num_values_before
        return node

    def _count_alias(self, node: yaml.Node | None, event: yaml.AliasEvent) -> None:
        """Count the values that an alias repeats; refuse recursive aliases and more than ``MAX_REPEATED`` values.

        Aliases of aliases in a small file may repeat a value exponentially often.

        Args:
            node: Node to which the alias refers.
            event: The alias, for its name and line.
        """
        size = self._sizes.get(id(node))
        if size is None:  # the node is not finished, so the alias is inside it
            raise _error_at(event, f"alias '*{event.anchor}' refers to a value that contains it")
        self._num_values += size
        self._num_repeated += size
        if self._num_repeated > MAX_REPEATED:
            raise _error_at(event, f"aliases repeat more than {MAX_REPEATED:,} values; write them out")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping after a check for duplicate keys; keys keep their text, so ``1`` and ``no`` are names."""
        _check_keys(node)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_map(self, node: yaml.MappingNode) -> Iterator[dict[Hashable, object]]:
        """Convert a mapping of the YAML text to a dictionary; PyYAML calls this for each mapping.

        The dictionary is yielded before it is filled, as PyYAML expects of constructors of collections.
        """
        mapping: dict[Hashable, object] = {}
        yield mapping
        mapping.update(self.construct_mapping(node))


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise an error if a key of a mapping is not text or occurs twice, or if its entry ``users`` has merge keys.

    Outside of ``users``, merge keys (``<<``) are allowed, also several.

    Args:
        node: The mapping, before it is converted to a dictionary, which would keep the last of two equal keys.
    """
    line_of_key: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error_at(key, f"a key must be text; got {_KINDS[type(key)]}")
        is_merge_key = key.tag == _MERGE
        if not is_merge_key:
            if key.value in line_of_key:
                raise _error_at(key, f"duplicate key {key.value!r}, first given in line {line_of_key[key.value]}")
            line_of_key[key.value] = key.start_mark.line + 1
        if key.value == "users" and isinstance(value, yaml.MappingNode):
            _refuse_merge_keys(value)


def _refuse_merge_keys(node: yaml.MappingNode) -> None:
    """Raise an error if the mapping of users has a merge key (``<<``), which inserts the entries of another mapping.

    If both mappings had the same user, one entry would be ignored silently.

    Args:
        node: The mapping below a key ``users``.
    """
    for key, _value in node.value:
        if key.tag == _MERGE:
            hint = "list all users (quote '<<' if it is a name)"
            raise _error_at(key, f"'<<' is not allowed among users, as it can hide duplicate names; {hint}")


def _error_at(place: Any, text: str) -> RecipeError:
    """Return an error with the line of a YAML node or event."""
    return RecipeError(f"line {place.start_mark.line + 1}: {text}")


def load_recipe(path: str | Path, *, change: Callable[[object], object] = lambda content: content) -> Recipe:
    """Read a recipe file, or the recipe of a run folder.

    Relative paths in a recipe file are relative to the folder of the file. The paths in a run folder's recipe stay
    unchanged, since they are part of the run's fingerprint.

    Args:
        path: The file or run folder.
        change: Function from the file's content to the content that is checked instead, for example with overrides.

    Raises:
        RecipeError: There is no such file, it is not YAML, or the recipe is wrong.
    """
    path = Path(path)
    is_run_folder = path.is_dir()
    if is_run_folder:
        path = path / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe.{_shipped_hint(path)}")
    content = read_yaml(path)
    if is_run_folder:  # keys that an older version did not write get the values with which it ran
        content = with_older_defaults(content)
    recipe = parse_recipe(change(content), where=str(path))
    if is_run_folder:
        return recipe
    return _with_absolute_paths(recipe, path.parent)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        RecipeError: The file cannot be read or is not YAML; see :func:`read_text`.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise too_large(size, str(path))
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    return read_text(text, str(path))


def shipped_recipes() -> Path:
    """Return the folder of the recipes that are part of comingle."""
    package, repository = Path(__file__).parents[1], Path(__file__).parents[3]
    in_installed_package = package / "shipped_recipes"
    return in_installed_package if in_installed_package.is_dir() else repository / "recipes"


def _shipped_hint(path: Path) -> str:
    """Return a hint if a shipped recipe has the file name of a missing one; otherwise an empty text."""
    shipped = shipped_recipes() / path.name
    return f" Did you mean {str(shipped)!r}?" if shipped.is_file() else ""


def _with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with absolute paths of data and base, where these exist relative to ``folder``.

    Other text, such as names of models and data sets on the hub, stays as it is.

    Args:
        recipe: Settings of the run.
        folder: Folder of the recipe's file.
    """

    def make_absolute(source: object) -> object:
        """Return a path, or each path of a list, as an absolute path if it exists below the folder."""
        if isinstance(source, list):
            return [make_absolute(entry) for entry in source]
        if not isinstance(source, str) or is_named(source):  # a data set of the hub, or a demo
            return source
        expanded = os.path.expandvars(os.path.expanduser(source))
        path = folder / expanded
        return str(path.resolve()) if os.path.exists(path) else expanded

    content = recipe.model_dump(mode="json", exclude_unset=True)
    keys_with_paths = recipe.data.resolve_paths(make_absolute)
    content["data"].update(keys_with_paths)
    if os.path.exists(folder / recipe.base):
        content["base"] = make_absolute(recipe.base)
    start = recipe.adapters.start
    if isinstance(start, dict):
        content["adapters"]["start"] = {name: make_absolute(adapter) for name, adapter in start.items()}
    elif start is not None:
        content["adapters"]["start"] = make_absolute(start)
    if recipe.continue_from is not None:
        content["continue_from"]["run"] = make_absolute(recipe.continue_from.run)
    return Recipe.model_validate(content)


def check_used(recipe: Recipe) -> None:
    """Check that the recipe changes no settings that its kind of data does not use.

    Keys with their default values are accepted, since the recipe that a run saves has all keys. Also check that the
    kind of data allows the value of ``training.weighting``.

    Raises:
        RecipeError: A setting is not used for this kind, or its value is not allowed for it.
    """
    data = recipe.data
    for unread_key, instead in data.unread.items():  # keys that are not used, each with what to use instead
        if unread_key.startswith("data."):  # these keys were refused when the section `data` was parsed
            continue
        changed = changed_settings(recipe, unread_key)
        if changed:
            key, value = changed[0]
            raise RecipeError(f"{key}: got {value!r}, which is not used for {data.label}; {instead}")
    weighting = recipe.training.weighting
    if weighting not in data.weightings:
        allowed = ", ".join(data.weightings)
        raise RecipeError(f"training.weighting: got {weighting!r} for {data.label}; allowed: {allowed}")


def changed_settings(recipe: Recipe, dotted_key: str) -> list[tuple[str, object]]:
    """Return the settings at or below a dotted key that differ from their defaults, as pairs (dotted key, value).

    Args:
        recipe: Settings of the run.
        dotted_key: Key of a setting, or of a section, whose settings are compared one by one.
    """
    section: Any = recipe
    *section_names, last = dotted_key.split(".")
    for name in section_names:
        section = getattr(section, name)
    value = getattr(section, last)
    is_section = hasattr(value, "model_fields_set")
    if is_section:
        changed: list[tuple[str, object]] = []
        for name in type(value).model_fields:
            changed += changed_settings(recipe, f"{dotted_key}.{name}")
        return changed
    default = type(section).model_fields[last].get_default(call_default_factory=True)
    if value == default:
        return []
    return [(dotted_key, value)]
