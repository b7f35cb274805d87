"""YAML as recipes have it: keys are text as typed, each once, and neither depth nor aliases can hang what reads it.

YAML 1.1 makes a truth value of ``no``, a date of ``2024-01-01``, and takes the last of two equal keys without a word;
each of these would rename or drop a user.
"""

from __future__ import annotations

from typing import Any

import yaml

from comingle.utils.errors import RecipeError

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
    def __init__(self, stream: Any):
        super().__init__(stream)
        self._depth = 0
        self._composed = 0
        self._repeated = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if self._depth >= MAX_DEPTH:
            raise _problem(event, f"nested more than {MAX_DEPTH} deep; a recipe needs less than ten")
        before, self._depth = self._composed, self._depth + 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._repeat(node, event)
        else:
            self._composed += 1
            self._sizes[id(node)] = self._composed - before
        return node

    def _repeat(self, node: Any, event: Any) -> None:
        if id(node) not in self._sizes:
            raise _problem(event, f"alias '*{event.anchor}' lies within what it repeats")
        self._composed += self._sizes[id(node)]
        self._repeated += self._sizes[id(node)]
        if self._repeated > MAX_REPEATED:
            raise _problem(event, f"aliases repeat more than {MAX_REPEATED:,} values; write them out")

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        _check_keys(node)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_map(self, node: Any) -> Any:
        mapping: dict[str, Any] = {}
        yield mapping
        mapping.update(self.construct_mapping(node))


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


def _check_keys(node: Any) -> None:
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


def _check_users(node: Any) -> None:
    """A name that is merged in and stands there too would be two people, one of them dropped."""
    if merged := next((key for key, _ in node.value if key.tag == _MERGE), None):
        raise _problem(merged, "'<<' among users hides who is named twice; write all out (in quotes it is a name)")


def _problem(place: Any, what: str) -> RecipeError:
    return RecipeError(f"line {place.start_mark.line + 1}: {what}")
