"""What README and docs say is true: links lead somewhere, tables are complete, names exist."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.util
import json
import pkgutil
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from documents import DOCS, PAGES, README, REPOSITORY, blocks, read, table_at, table_rows
from pydantic import BaseModel

import comingle
import comingle_papers
from comingle.config import Recipe
from comingle.config.settings import KINDS
from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.base import ClientHook, Method
from comingle.methods.dual_lora import SimilarityGating
from comingle.methods.mixtures import Entropic

RECIPE_KEYS, PAPERS, CHOOSING = read("recipes.md"), read("papers.md"), read("choosing-a-method.md")


def test_the_readme_is_a_quickstart() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_make_targets_and_extras_are_those_that_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {t for page in PAGES for t in re.findall(r"(?:`|^)make ([\w-]+)", page.read_text("utf-8"), re.MULTILINE)}
    assert named <= targets
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = table_rows(table_at(read("install.md"), "| extra |"))
    listed = {name for row in extras for name in re.findall(r"`([\w-]+)`", row[0])}
    assert listed == set(project["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / path if path else page
        assert linked.is_file(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {_anchor(title) for title in titles}, target


@pytest.mark.parametrize("page", sorted((REPOSITORY / "papers" / "docs").glob("*.md")), ids=lambda page: page.name)
def test_functions_and_tests_of_the_papers_pages_exist(page: Path) -> None:
    """Such as `methods.baselines.ditto` and `methods/test_rivals_classics.py::test_ditto_is_algorithm_1`."""
    text = page.read_text(encoding="utf-8")
    packages = {module.name for root in (comingle, comingle_papers) for module in iter_modules(root.__path__)}
    names = set(re.findall(r"`((?:[a-z]\w*\.)+\w+)`", text))
    recipe_keys = set(re.findall(r"`([\w.]+)`", RECIPE_KEYS))
    files = {name for name in names if name.endswith((".py", ".md", ".yaml", ".json", ".html", ".toml"))}
    unknown = [
        name for name in names - recipe_keys - files if name.split(".")[0] in packages and not _is_in_a_package(name)
    ]
    assert unknown == []
    for path, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        candidates = [REPOSITORY / folder / path for folder in (".", "tests", "papers/tests")]
        sources = [candidate.read_text(encoding="utf-8") for candidate in candidates if candidate.exists()]
        assert any(f"def {test}(" in source for source in sources), f"{path}::{test}"


def _is_in_a_package(name: str) -> bool:
    """Return whether a name such as "methods.fedmerge.Merge" is an object of comingle or comingle_papers."""
    for root in ("comingle", "comingle_papers"):
        try:
            pkgutil.resolve_name(f"{root}.{name}")
        except (ImportError, AttributeError):
            continue
        return True
    return False


def _anchor(title: str) -> str:
    """By which name a heading is linked, on the site and where Markdown is shown as it is."""
    return re.sub(r"[^\w\s-]", "", title.strip().lower()).replace(" ", "-")


# ---------------------------------------------------------------- messages


def text_of(node: ast.AST) -> str:
    """Return the constant parts of a string expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "\n" for value in node.values)
    return ""


def test_the_headings_of_troubleshooting_are_messages_of_the_code() -> None:
    sources = sorted((REPOSITORY / "src" / "comingle").rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    strings = {text_of(node) for tree in trees for node in ast.walk(tree)}
    everything = re.sub(r"%[.\d]*[a-z%]", "\n", "\n".join(strings).replace("`", ""))
    headings = re.findall(r"^### `(.*)`$", read("troubleshooting.md"), re.MULTILINE)
    assert len(headings) >= 30
    for heading in headings:
        parts = [part.strip(" '()%") for part in heading.split("…")]
        missing = [part for part in parts if len(part) > 5 and part not in everything]
        assert not missing, (heading, missing)


# ---------------------------------------------------------------- the table of methods


def rerouted(method: Method) -> bool:
    """Whether routers are not trained but made out of losses."""
    return any(isinstance(part, Entropic) for part in method.client.parts)


def trained_on(method: Method) -> str:
    """What the table should say about a method's router."""
    if rerouted(method):
        return "set from each component's loss"
    if any(type(part).settle is not ClientHook.settle for part in method.client.parts):
        near = ": the user's expert counts more for similar texts"
        by_similarity = method.placement.gating == SimilarityGating()
        return "set from training text" + near if by_similarity else "set from validation text"
    router = [phase for phase in method.client.phases if "router" in phase.roles]
    if not router:
        return "no router"
    if router[0].optimizer == "both":
        routed = method.placement.routed
        return f"training {'text, with the experts' if routed else 'data, with the rest'}"
    return {"train": "fresh training text", "valid": "validation text"}[router[0].stream] + ", in alternation"


def attends(roles: frozenset[str]) -> bool:
    """Whether attention, or one factor of it, is among the roles."""
    return any(role.partition(".")[0] == "attention" for role in roles)


def test_the_index_for_language_models_lists_every_page_of_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", navigation, re.MULTILINE)
    assert len(pages) > 25
    listed = re.findall(r"^- \[.+?\]\((\S+)\.html\): \S", read("llms.txt"), re.MULTILINE)
    assert sorted(listed) == sorted(page.removesuffix(".md") for page in pages)


def test_the_table_of_methods_is_complete_and_true() -> None:
    rows = {row[0].strip("`"): row[1:] for row in table_rows(table_at(CHOOSING, "| method | shared"))}
    assert list(rows) == list(REGISTRY)
    for name, (shared, local, router) in rows.items():
        method = make(name)
        assert router == trained_on(method), name
        assert shared.startswith("nothing") == (not method.shared), name
        assert ("attention" in shared) == attends(method.shared), name
        placement, trained = method.placement, method.client.trained
        private = attends(trained - method.shared) or placement.copies > 1
        assert ("attention" in local) == (private and not placement.pooled), name
        assert ("router" in local) == ("router" in trained - method.shared or rerouted(method)), name
        if placement.mixture is not None:
            assert (f"{placement.mixture.clusters} " in shared) == (placement.mixture.clusters > 1), name
        elif name != "comigs" and method.shared and not placement.needs:  # nets have no experts
            assert re.search(rf"\b{placement.generalists} (generalist|expert)s?", shared), name


def test_the_list_of_methods_for_nets_is_that_of_the_code() -> None:
    section = CHOOSING.partition("## Methods for nets")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w+-]+)`", section))
    assert named == {name for name in REGISTRY if "nets" in make(name).applies_to}


def test_the_code_of_methods_is_the_code() -> None:
    """Find each piece of own-method.md in the file that its first line names, apart from layout and docstrings.

    The first one is a whole example.
    """
    example, *pieces = blocks(read("own-method.md"), "python")
    assert example == (REPOSITORY / "examples" / "own_method.py").read_text(encoding="utf-8")
    assert len(pieces) > 5
    for piece in pieces:
        name, _, lines = piece.partition("\n")
        file = REPOSITORY / name.removeprefix("# ")
        code = (file if file.exists() else REPOSITORY / "src" / "comingle" / name[2:]).read_text(encoding="utf-8")
        assert without_layout(lines) in without_layout(code), (name, lines)


def without_layout(code: str) -> str:
    """Return the lines of code without docstrings, indents and empty lines."""
    code = re.sub(r'^ *"""[^"]*"""$', "", code, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


# ---------------------------------------------------------------- every key of a recipe


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The section inside an annotation, and what stands between its name and its keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, "."
    between = ".NAME." if typing.get_origin(annotation) is dict else "."
    found = [section_of(argument) for argument in typing.get_args(annotation)]
    section, inner = next((pair for pair in found if pair[0]), (None, "."))
    return section, max(between, inner, key=len)


def recipe_keys(model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None) -> Iterator[Any]:
    """Every dotted key below a section with its default, as the documentation spells it."""
    for name, field in model.model_fields.items():
        default = getattr(defaults, name) if defaults is not None else field.get_default()
        required = field.is_required() and defaults is None
        yield prefix + name, "required" if required else spelt(default)
        section, between = section_of(field.annotation)
        if section is not None:
            inner = default if isinstance(default, section) and prefix + name != "method" else None
            yield from recipe_keys(section, prefix + name + between, inner)


def spelt(default: Any) -> str:
    if isinstance(default, BaseModel):
        return "section"
    return f"`{default}`" if isinstance(default, str) and default else f"`{json.dumps(default)}`"


def test_the_page_of_recipe_keys_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("write_recipe_keys", DOCS / "write_recipe_keys.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.write() == RECIPE_KEYS, "write it again: python docs/write_recipe_keys.py"


def test_every_recipe_key_is_documented_with_its_default() -> None:
    tables = [table for table in RECIPE_KEYS.split("\n\n") if table.startswith("| key |")]
    rows = [row for table in tables for row in table_rows(table)]
    documented = {key: row[2] for row in rows for key in re.findall(r"`([^`]+)`", row[0])}
    keys = dict(recipe_keys(Recipe))
    for kind in KINDS:
        keys |= recipe_keys(KINDS[kind], "data.")
    assert documented == keys | {"data.kind": "by its keys"}
    assert {"data.users.NAME.path", "training.router.schedule", "adapters.targets.gate"} <= documented.keys()


def test_every_setting_of_a_method_is_documented_with_its_default() -> None:
    documented = [
        (method, row[0].strip("`"), row[2].strip("`"))
        for row in table_rows(table_at(RECIPE_KEYS, "| setting |"))
        for pattern in re.findall(r"`([^`]+)`", row[1])
        for method in fnmatch.filter(REGISTRY, pattern)
    ]
    settings = [(name, key, str(value)) for name in REGISTRY for key, value in settings_of(name).items()]
    assert sorted(documented) == sorted(settings)


# ---------------------------------------------------------------- names of functions and tests


def test_the_functions_and_tests_of_the_paper_table_exist() -> None:
    rows = [row.split(" | ") for row in table_at(PAPERS, "| paper | function |").splitlines()[2:]]
    assert len(rows) > 10
    for _, functions, tests, *_ in rows:
        for name in re.findall(r"`([^`]+)`", functions):
            assert resolves(name), name
        for path, test in re.findall(r"`(\S+\.py)::(\w+)`", tests):
            assert any(f"def {test}(" in file.read_text(encoding="utf-8") for file in files_of_test(path)), test


def test_every_test_named_anywhere_exists() -> None:
    """A file, or files by a pattern, in one of the two folders of tests, and the function if one is named."""
    count, named = 0, re.compile(r"`(?:tests/)?((?:[a-z]+/)+test_[\w*]+\.py)(?:::(\w+))?`")
    for page in PAGES:
        for path, test in named.findall(page.read_text(encoding="utf-8")):
            found = files_of_test(path)
            assert found, (page.name, path)
            assert not test or any(f"def {test}(" in file.read_text(encoding="utf-8") for file in found), (path, test)
            count += 1
    assert count > 50


def test_names_of_the_library_in_prose_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`comingle\.([\w.]+)`", page.read_text(encoding="utf-8")):
            assert resolves(name), (page.name, name)


def files_of_test(path: str) -> list[Path]:
    """Return the files of a path or pattern below ``tests``, or below the repository for those of comingle-papers."""
    return sorted({*(REPOSITORY / "tests").glob(path.removeprefix("tests/")), *REPOSITORY.glob(path)})


def resolves(name: str) -> bool:
    """Return whether a dotted name below ``comingle``, or of ``comingle_papers``, exists."""
    parts = name.split(".")
    for cut in range(len(parts), 0 if parts[0] == "comingle_papers" else -1, -1):
        module = ".".join([*([] if parts[0] == "comingle_papers" else ["comingle"]), *parts[:cut]])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
