"""Write ``docs/recipes.md``: the text of ``docs/recipes.template``, with tables of recipe keys and method settings.

Run it after a change of keys or settings: ``python docs/write_recipe_keys.py``. In a table of keys of the template a
row has a key, a type and a note. An empty type is filled in from the annotation. The default and the meaning, which is
the docstring below the field, are added; the note follows the meaning. In the table of settings a row has a setting,
its methods and a note. The meaning is the setting's entry in ``Args:`` of the methods' docstrings.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import inspect
import itertools
import json
import re
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from comingle.config import Recipe
from comingle.config.settings import KINDS, DataSection
from comingle.methods import REGISTRY, settings_of

DOCS = Path(__file__).parent
TEMPLATE, PAGE = DOCS / "recipes.template", DOCS / "recipes.md"
LARGEST_COUNT = 10_000_000
"""Upper bounds above it only catch slips and are not printed."""

KEY_HEADER = "| key | type | note |"
SETTING_HEADER = "| setting | of | note |"
ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)
"""An entry of a docstring's ``Args:``, with its continuation lines."""


class Key(NamedTuple):
    """Type, default and meaning of a key, as text for the table."""

    type: str
    default: str
    meaning: str


def write() -> str:
    """Return the page."""
    keys = dict(recipe_keys())
    lines, table = [], ""
    for line in TEMPLATE.read_text(encoding="utf-8").splitlines():
        if line in (KEY_HEADER, SETTING_HEADER):
            table = line
            lines.append(line.replace("| note |", "| default | meaning |"))
        elif not line.startswith("|"):
            table = ""
            lines.append(line)
        elif line.startswith("|---"):
            lines.append(line + "---|")
        else:
            lines.append(key_row(line, keys) if table == KEY_HEADER else setting_row(line))
    return "\n".join(lines) + "\n"


def key_row(line: str, keys: Mapping[str, Key]) -> str:
    """Return the row of a key with its type, default and meaning."""
    names, kind, note = (cell.strip() for cell in line.strip("|").split("|"))
    found = [keys[name] for name in re.findall(r"`([^`]+)`", names)]
    assert all(key == found[0] for key in found), f"{names}: keys of one row differ in type, default or meaning"
    key = found[0]
    assert key.meaning, f"{names}: no docstring below the field"
    return f"| {names} | {kind or key.type} | {key.default} | {key.meaning}{' ' if note else ''}{note} |"


def setting_row(line: str) -> str:
    """Return the row of a method's setting with its default and meaning."""
    name, of, note = (cell.strip() for cell in line.strip("|").split("|"))
    setting, patterns = name.strip("`"), re.findall(r"`([^`]+)`", of)
    methods = [method for pattern in patterns for method in fnmatch.filter(REGISTRY, pattern)]
    found = [(settings_of(method)[setting], arguments_of(method).get(setting)) for method in methods]
    assert all(pair == found[0] for pair in found), f"{name} of {of}: settings of one row differ in default or meaning"
    default, meaning = found[0]
    assert meaning, f"{name} of {of}: no entry in Args of the method's docstring"
    return f"| {name} | {of} | `{default}` | {meaning}{' ' if note else ''}{note} |"


def arguments_of(method: str) -> dict[str, str]:
    """Return the entries of ``Args:`` in a method's docstring, as Markdown."""
    arguments = (inspect.getdoc(REGISTRY[method]) or "").partition("\n\nArgs:\n")[2].partition("\n\n")[0]
    return {name: as_markdown(text) for name, text in ARGUMENT.findall(arguments)}


def as_markdown(text: str) -> str:
    """Return the text of a docstring on one line, with code as Markdown has it."""
    return " ".join(text.split()).replace("``", "`")


def recipe_keys() -> Iterator[tuple[str, Key]]:
    """Yield every dotted key of a recipe and what the page says of it."""
    yield from section_keys(Recipe, "")
    for kind in KINDS:
        yield from section_keys(KINDS[kind], "data.")
    yield "data.kind", Key("name", "by its keys", meanings_in(DataSection)["kind"])


def section_keys(section: type[BaseModel], prefix: str, defaults: BaseModel | None = None) -> Iterator[tuple[str, Key]]:
    """Yield the keys of a section and of the sections inside.

    Args:
        section: its class.
        prefix: what stands before each key.
        defaults: the section as it is by default, where it differs from that of its class.
    """
    meanings = meanings_in(section)
    for name, field in section.model_fields.items():
        default = getattr(defaults, name) if defaults is not None else field.get_default()
        is_required = field.is_required() and defaults is None
        yield prefix + name, Key(type_of(field), "required" if is_required else default_text(default), meanings[name])
        inner, between = section_in(field.annotation)
        if inner is not None:
            own = default if isinstance(default, inner) and prefix + name != "method" else None
            yield from section_keys(inner, prefix + name + between, own)


@functools.cache
def meanings_in(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of a section and of its base classes, as Markdown; empty without one."""
    meanings: dict[str, str] = defaultdict(str)
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base.__module__.startswith("pydantic") or "[" in base.__name__:
            continue  # "Section[Files]" has the fields of its generic class
        body = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_docstring = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if is_docstring:
                    meanings[field.target.id] = as_markdown(str(text.value.value))
    return meanings


def section_in(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the section inside an annotation, and the text between its name and its keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, "."
    between = ".NAME." if typing.get_origin(annotation) is dict else "."
    found = [section_in(argument) for argument in typing.get_args(annotation)]
    inner, nested = next((pair for pair in found if pair[0]), (None, "."))
    return inner, max(between, nested, key=len)


def default_text(default: Any) -> str:
    """Return a default as YAML has it."""
    if isinstance(default, BaseModel):
        return "section"
    return f"`{default}`" if isinstance(default, str) and default else f"`{json.dumps(default)}`"


# ---------------------------------------------------------------- types


def type_of(field: FieldInfo) -> str:
    """Return the type of a field in words."""
    return words(field.annotation, field.metadata)


def words(annotation: Any, constraints: list[Any]) -> str:
    """Return an annotation and its constraints in words, without None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = [part for one in arguments[1:] for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return words(arguments[0], [*inner, *constraints])
    if origin is Literal:
        *first, last = [f"`{json.dumps(one)}`" if isinstance(one, bool) else f"`{one}`" for one in arguments]
        return " or ".join([", ".join(first), last]) if first else last
    if origin in (typing.Union, types.UnionType):
        choices = [words(one, constraints) for one in arguments if one is not types.NoneType]
        return ", or ".join(dict.fromkeys(choices))
    if origin in (list, tuple):
        number = "" if origin is list or Ellipsis in arguments else f"{len(arguments)} "
        return f"list of {number}{plural(words(arguments[0], []))}"
    if origin is dict:
        return "mapping"
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return " ".join(["whole number" if annotation is int else "number", *limits(constraints)])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return "text" if annotation is str else "value"


def plural(kind: str) -> str:
    """Return the plural of a type."""
    return re.sub(r"^(text|list|whole number|number|mapping|section)\b", r"\1s", kind).replace(" or `", ", `")


def limits(constraints: list[Any]) -> Iterator[str]:
    """Yield the bounds of a number in words."""
    low = high = None
    for one in constraints:
        for part in one if isinstance(one, annotated_types.GroupedMetadata) else [one]:
            if isinstance(part, annotated_types.Ge | annotated_types.Gt):
                low = part
            if isinstance(part, annotated_types.Le | annotated_types.Lt):
                high = part
    least: Any = None if low is None else low.ge if isinstance(low, annotated_types.Ge) else low.gt
    most: Any = None if high is None else high.le if isinstance(high, annotated_types.Le) else high.lt
    if most is not None and most > LARGEST_COUNT:
        most = None
    if least is not None and most is not None:
        left = "[" if isinstance(low, annotated_types.Ge) else "("
        right = "]" if isinstance(high, annotated_types.Le) else ")"
        yield f"in {left}{least:,}, {most:,}{right}"
    elif least is not None:
        yield f"{'>=' if isinstance(low, annotated_types.Ge) else '>'} {least:,}"
    elif most is not None:
        yield f"{'<=' if isinstance(high, annotated_types.Le) else '<'} {most:,}"


if __name__ == "__main__":
    PAGE.write_text(write(), encoding="utf-8")
