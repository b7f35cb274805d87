"""Keys of a server's users: which files are refused, and where a server may do without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import comingle as library
from comingle.serving.access import DAY, Buckets, Keys, WatchedKeys, check_host, is_loopback, make_keys, read_keys


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


def test_several_keys_of_a_user_and_keys_of_any_user(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"ann": ["a" * 16, "b" * 16], "bob": "c" * 16}))
    path.chmod(0o600)
    keys = read_keys(path, None)
    assert keys == {"ann": ("a" * 16, "b" * 16), "bob": "c" * 16}
    access = Keys(["ann", "bob"], keys)
    assert [access.users_of(key * 16) for key in "abcd"] == [("ann",), ("ann",), ("bob",), ()]
    path.write_text(yaml.safe_dump({"ann": []}))
    with pytest.raises(library.ComingleError, match="'ann'"):
        read_keys(path, None)


def test_keys_rotate_while_the_server_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, models = tmp_path / "keys.yaml", ["ann", "bob"]

    def write(content: Any) -> None:
        draft = tmp_path / "draft"
        draft.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        draft.chmod(0o600)
        draft.rename(path)

    write({"ann": "a" * 16, "eve": "e" * 16})
    access = WatchedKeys(path, models)
    assert [access.users_of(key * 16) for key in "aebx"] == [("ann",), (), (), ()]  # there is no model of eve
    write({"ann": ["a" * 16, "n" * 16], "bob": "b" * 16})
    assert [access.users_of(key * 16) for key in "anbe"] == [("ann",), ("ann",), ("bob",), ()]
    write("ann: [")  # half written: the last keys remain
    assert access.users_of("n" * 16) == ("ann",)
    assert str(path) in caplog.text
    write({"ann": "n" * 16})
    assert [access.users_of(key * 16) for key in "anb"] == [(), ("ann",), ()]
    models.remove("ann")
    assert access.users_of("n" * 16) == ()
    models.append("ann")
    path.unlink()
    assert access.required
    assert access.users_of("n" * 16) == ()


def test_a_bucket_gives_back_what_was_not_used() -> None:
    now = [0.0]
    buckets = Buckets(100, DAY, clock=lambda: now[0])
    assert buckets.take("ann", 80) == 0
    assert buckets.take("ann", 40) == pytest.approx(0.2 * DAY)
    assert buckets.left("ann") == 20
    assert buckets.take("bob", 100) == 0
    assert buckets.take("ann", -50) == 0
    assert buckets.left("ann") == 70
    assert buckets.take("ann", -50) == 0
    assert buckets.left("ann") == 100
    buckets.take("ann", 100)
    now[0] = DAY / 2
    assert buckets.left("ann") == pytest.approx(50)
