from __future__ import annotations

import os
import subprocess
import sys

import pytest

from comingle.data import demo
from comingle.data.sources import read_documents
from comingle.data.splits import UserText, find_overlap, split_by_fractions
from comingle.utils.errors import DataError


def test_there_are_four_demo_users():
    assert list(demo.DEMO_USERS) == ["library", "reference", "numpy", "licences"]


@pytest.mark.parametrize("name", demo.DEMO_USERS)
def test_a_demo_user_is_bounded_and_does_not_repeat_itself(name: str):
    documents = read_documents(f"demo:{name}")
    assert sum(map(len, documents)) <= 400_000
    assert all(document.strip() for document in documents)
    for half in (0, 1):
        text = UserText(name=name, train=tuple(documents[half::2]), test=tuple(documents[1 - half :: 2]))
        assert find_overlap(text).total == 0


@pytest.mark.parametrize("name", demo.DEMO_USERS)
@pytest.mark.sampled(1)
def test_a_document_cut_by_a_split_does_not_repeat_the_rest_of_its_demo_user(name: str):
    documents = demo.read_demo(name)
    for seed in range(20):
        assert find_overlap(split_by_fractions(documents, valid=0.1, test=0.1, seed=seed, name=name)).total == 0


@pytest.mark.parametrize(
    ("name", "least", "phrase"),
    [
        ("library", 300_000, "import "),
        ("reference", 100_000, 'The "with" statement'),
        ("numpy", 100_000, "Parameters\n----------"),
        ("licences", 20_000, "WITHOUT WARRANTY"),
    ],
)
def test_a_demo_user_reads_what_it_is_named_after(name: str, least: int, phrase: str):
    documents = demo.read_demo(name)
    assert sum(map(len, documents)) >= least
    assert any(phrase in document for document in documents)


@pytest.mark.slow
def test_demo_users_are_the_same_in_another_process():
    code = """if 1:
        import hashlib
        from comingle.data import demo
        print(hashlib.sha256(repr([read() for read in demo.DEMO_USERS.values()]).encode()).hexdigest())"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(runs[0].strip()) == 64
    assert runs[0] == runs[1]


def test_an_unknown_demo_user_gets_the_known_ones():
    message = r"'licenses'.*: library, reference, numpy, licences\. Did you mean 'licences'"
    with pytest.raises(DataError, match=message):
        read_documents("demo:licenses")


def test_a_python_without_sources_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"^demo users: "):
        demo.read_library()


@pytest.mark.slow
def test_what_numpy_says_does_not_depend_on_what_was_imported() -> None:
    code = "import {0}; from comingle.data.demo import read_numpy; print(hash(tuple(read_numpy())))"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    found = {
        subprocess.run(
            [sys.executable, "-c", code.format(module)], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for module in ("numpy", "scipy.special, numpy")
    }
    assert len(found) == 1
