"""What README and docs say is true: examples and commands run, tables are complete, names exist."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from comingle.cli import app
from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.base import Method
from comingle.methods.mixtures import Entropic
from comingle.recipes import Recipe, parse_recipe

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
RECIPE_KEYS = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
PAPERS = (REPOSITORY / "docs" / "papers.md").read_text(encoding="utf-8")

# What a README command gets on top where it would need the pretrained model or minutes.
TINY = {
    "base": "random:llama?layers=1",
    "data.max_train_tokens": 300,
    "data.max_valid_tokens": 100,
    "data.max_test_tokens": 100,
    "training.rounds": 1,
    "training.local_steps": 1,
    "training.batch_size": 1,
    "training.context": 16,
    "runtime.threads": 1,
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def table_rows(page: str) -> Iterator[list[str]]:
    """The cells of every row of every table that begins with code."""
    for line in page.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


# ---------------------------------------------------------------- examples and commands


def test_the_python_example_runs_as_it_is_printed(tmp_path: Path) -> None:
    (example,) = blocks(README, "python")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # fastest for a toy, and fair to other tests
    command = [sys.executable, "-W", "error", "-c", example]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ada: test perplexity [\d.]+ with CoMiGS, [\d.]+ alone\n", done.stdout)
    assert not list(tmp_path.iterdir())
    assert len(example.splitlines()) <= 25


@pytest.fixture
def friends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The README's recipe as ``friends.yaml``, and text for its users."""
    recipe = next(block for block in blocks(README, "yaml") if block.startswith("# friends.yaml"))
    (tmp_path / "friends.yaml").write_text(recipe)
    texts = tmp_path / "texts"
    (texts / "ada").mkdir(parents=True)
    prose = [f"Line {i} of a text that is private, as {i * i} other lines are.\n\n" for i in range(60)]
    for name in ("ada/one.txt", "ben.txt", "dora-old.txt", "dora-new.txt"):
        (texts / name).write_text("".join(prose))
    (texts / "cleo.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in prose))
    monkeypatch.chdir(tmp_path)
    threads, logger = torch.get_num_threads(), logging.getLogger("comingle")
    level = logger.level
    yield
    torch.set_num_threads(threads)
    logger.setLevel(level)


def commands() -> list[list[str]]:
    """The README's command lines that begin with ``comingle``."""
    lines = [shlex.split(line, comments=True) for block in blocks(README, "bash") for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "comingle"]


def verbs() -> set[str]:
    """The core's, and those that this project's own plug-in adds."""
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    core = {command.callback.__name__ for command in app.registered_commands if command.callback}
    return core | set(points["comingle.verbs"])


@pytest.mark.usefixtures("friends")
def test_the_commands_run_one_after_the_other() -> None:
    found = commands()
    assert {words[0] for words in found} == verbs()
    for words in found:
        if words[0] == "demo":  # needs the pretrained model
            words = ["demo", "--help"]
        elif words[0] in ("run", "compare", "data", "cost"):
            given = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--set"}
            tiny = {key: value for key, value in TINY.items() if key not in given}
            words = [*words, *(part for key, value in tiny.items() for part in ("--set", f"{key}={value}"))]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        assert done.stdout.strip(), words
    folders = ["runs/friends-comigs-1g1s-seed0", "runs/short", "runs/compare-friends"]
    assert all(Path(folder).is_dir() for folder in folders)
    written = {path.name for path in Path(folders[0]).iterdir()}
    assert written >= {"recipe.yaml", "events.jsonl", "metrics.json", "checkpoints"}
    assert {path.name for path in Path(folders[2]).glob("table.*")} == {"table.md", "table.json"}


def test_every_yaml_is_a_recipe() -> None:
    found = [yaml.safe_load(block) for block in blocks(README, "yaml")]
    assert [parse_recipe(content).data.held_out for content in found] == ["own", "mixture", "own"]


def test_make_targets_and_extras_are_those_that_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {t for page in PAGES for t in re.findall(r"(?:`|^)make ([\w-]+)", page.read_text("utf-8"), re.MULTILINE)}
    assert named <= targets
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = README[README.index("| extra |") :].partition("\n\n")[0]
    listed = {name for row in table_rows(table) for name in re.findall(r"`([\w-]+)`", row[0])}
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
        titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
        assert not anchor or anchor in {title.lower().replace(" ", "-") for title in titles}, target


# ---------------------------------------------------------------- the table of methods


def rerouted(method: Method) -> bool:
    """Whether routers are not trained but made out of losses."""
    return any(isinstance(part, Entropic) for part in method.client.parts)


def trained_on(method: Method) -> str:
    """What the README should say about a method's router."""
    if rerouted(method):
        return "set from each component's loss"
    router = [phase for phase in method.client.phases if "router" in phase.roles]
    if not router:
        return "no router"
    if router[0].optimizer == "both":
        routed = method.placement.routed
        return f"training {'text, together with the experts' if routed else 'data, together with the rest'}"
    return {"train": "fresh training text", "valid": "validation text"}[router[0].stream] + ", in alternation"


def attends(roles: frozenset[str]) -> bool:
    """Whether attention, or one factor of it, is among the roles."""
    return any(role.partition(".")[0] == "attention" for role in roles)


def test_the_table_of_methods_is_complete_and_true() -> None:
    table = README[README.index("| method |") :].partition("\n\n")[0]
    rows = {row[0].strip("`"): row[1:] for row in table_rows(table)}
    assert list(rows) == list(REGISTRY)
    for name, (shared, local, router) in rows.items():
        method = make(name)
        assert router == trained_on(method), name
        assert shared.startswith("nothing") == (not method.shared), name
        assert ("attention" in shared) == attends(method.shared), name
        placement, trained = method.placement, method.client.trained
        private = attends(trained - method.shared) or placement.copies > 1
        assert ("attention" in local) == (private and not placement.pooled), name
        assert ("router" in local) == ("router" in trained or rerouted(method)), name
        if placement.mixture is not None:
            assert (f"{placement.mixture.clusters} " in shared) == (placement.mixture.clusters > 1), name
        elif name != "comigs" and method.shared:
            assert re.search(rf"\b{placement.generalists} (generalist|expert)s?", shared), name


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


def test_every_recipe_key_is_documented_with_its_default() -> None:
    tables = [table for table in RECIPE_KEYS.split("\n\n") if table.startswith("| key |")]
    rows = [row for table in tables for row in table_rows(table)]
    documented = {key: row[2] for row in rows for key in re.findall(r"`([^`]+)`", row[0])}
    assert documented == dict(recipe_keys(Recipe))
    assert {"data.users.NAME.path", "training.router.schedule", "adapters.targets.gate"} <= documented.keys()


def test_every_setting_of_a_method_is_documented_with_its_default() -> None:
    table = RECIPE_KEYS[RECIPE_KEYS.index("| setting |") :].partition("\n\n")[0]
    documented = {(row[0].strip("`"), row[2].strip("`")) for row in table_rows(table)}
    settings = {(key, str(value)) for name in REGISTRY for key, value in settings_of(name).items()}
    assert documented == settings


# ---------------------------------------------------------------- names of functions and tests


def test_the_functions_and_tests_of_the_paper_table_exist() -> None:
    table = PAPERS[PAPERS.index("| paper | function |") :].partition("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for _, functions, tests, *_ in rows:
        for name in re.findall(r"`([^`]+)`", functions):
            assert resolves(name), name
        for path, test in re.findall(r"`(\S+\.py)::(\w+)`", tests):
            assert f"def {test}(" in (REPOSITORY / "tests" / path).read_text(encoding="utf-8"), test


def test_every_test_named_anywhere_exists() -> None:
    """A file, or files by a pattern, below ``tests``, and the function if one is named."""
    count, named = 0, re.compile(r"`(?:tests/)?((?:[a-z]+/)+test_[\w*]+\.py)(?:::(\w+))?`")
    for page in PAGES:
        for path, test in named.findall(page.read_text(encoding="utf-8")):
            found = sorted((REPOSITORY / "tests").glob(path))
            assert found, (page.name, path)
            assert not test or any(f"def {test}(" in file.read_text(encoding="utf-8") for file in found), (path, test)
            count += 1
    assert count > 50


def test_names_of_the_library_in_prose_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`comingle\.([\w.]+)`", page.read_text(encoding="utf-8")):
            assert resolves(name), (page.name, name)


def resolves(name: str) -> bool:
    """Whether a dotted name below ``comingle`` is there."""
    parts = name.split(".")
    for cut in range(len(parts), -1, -1):
        module = ".".join(["comingle", *parts[:cut]])
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
