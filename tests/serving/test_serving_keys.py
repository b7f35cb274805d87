"""Keys of a server's users: which files are refused, and where a server may do without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import comingle as library
from comingle.serving.access import check_host, is_loopback, make_keys, read_keys


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"eve": "k" * 16}, "'eve'.*ann, bob"),
        ({"ann": "sk-äöüäöüäöüäöüäöü"}, "'ann' has characters"),
        ({"ann": " " * 20}, "'ann' has characters"),
        ({"ann": "short"}, "'ann' .*16 characters"),
        ({"ann": 1234567890123456789}, "'ann' .*16 characters"),
        ({"ann": "k" * 16, "bob": "k" * 16}, "'bob'"),
        (["ann"], "USER: KEY"),
        ({}, "USER: KEY"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path: Path, content: Any, told: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
    with pytest.raises(library.ComingleError) as error:
        read_keys(path, ["ann", "bob"])
    assert re.match(rf"--keys {re.escape(str(path))}: .*{told}", str(error.value))


def test_without_keys_only_loopback(tmp_path: Path) -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9")] == [True] * 5
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org")] == [
        False
    ] * 6
    with pytest.raises(library.ComingleError, match=r"--host 0.0.0.0: .*--keys"):
        check_host("0.0.0.0", None)
    check_host("0.0.0.0", {"ann": "k" * 16})
    make_keys(tmp_path / "keys", ["ann"])
