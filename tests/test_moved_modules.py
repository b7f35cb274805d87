"""Documented modules under the names that they had up to version 0.1.0."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import comingle

SOURCE = Path(comingle.__file__).parent

DOCUMENTED = {
    "comingle.methods.client": ("MODEL", "Client", "Cohort", "ClientHook", "joint"),
    "comingle.trees": ("Tree",),
    "comingle.evaluation.losses": ("LOSSES",),
    "comingle.store.tokens": ("read_population", "write_population"),
    "comingle.models.byte_tokenizer": ("byte_tokenizer",),
    "comingle.errors": ("ComingleError",),
    "comingle.recipes": ("Recipe",),
    "comingle.adapters.clustered": ("floral",),
    "comingle.comparing.results": ("Comparison",),
    "comingle.joining.joining": ("Joined",),
    "comingle.models.personal_net": ("PersonalNet",),
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_an_old_name_gives_the_same_objects_with_a_warning(module: str) -> None:
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=f"{module} is now"):
        old = importlib.import_module(module)
    new = importlib.import_module(comingle._moved()[module])
    assert all(getattr(old, name) is getattr(new, name) for name in DOCUMENTED[module])


def test_every_new_name_exists_and_no_old_one_does() -> None:
    places = [SOURCE.parent, SOURCE.parents[1] / "papers" / "src"]
    there = {
        ".".join(path.relative_to(place).with_suffix("").parts).removesuffix(".__init__")
        for place in places
        for path in place.rglob("*.py")
    }
    assert len(comingle._moved()) > 400
    assert set(comingle._moved().values()) <= there
    assert set(comingle._moved()) & there == set()


@pytest.mark.slow
def test_a_documented_method_imports_as_it_did() -> None:
    program = (
        "from comingle.methods.client import MODEL, Client, Part, joint\n"
        "from comingle.methods.server import MODEL as KEPT, Mean\n"
        "from comingle.trees import Tree\nprint(KEPT)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "model.\n"


def test_what_never_was_is_still_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"comingle\.nothing"):
        importlib.import_module("comingle.nothing")


def test_no_module_hides_a_function_of_the_package() -> None:
    modules = {module.name for module in pkgutil.iter_modules(comingle.__path__)}
    assert modules & set(comingle.__all__) == set()
