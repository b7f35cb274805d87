"""YAML as recipes have it: keys are text, none comes twice, and no file however odd hangs or ends in a traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.config import load_recipe, parse_recipe, shipped_recipes
from comingle.config.files import MAX_DEPTH, MAX_REPEATED, read_text
from comingle.utils.errors import RecipeError

ODD_NAMES = ["no", "yes", "on", "off", "~", "null", "2024-01-01", "1", "1_000", "0x1F", "1e3", "true", "<<", "=", "é ö"]


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read_text(text, "mine.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


# ---------------------------------------------------------------- keys


def test_keys_are_text_as_typed() -> None:
    found = read_text("users: {no: a, yes: b, on: c, 1: d, 1_000: e, 2024-01-01: f, ~: g, 0x1F: h}", "mine.yaml")
    assert list(found["users"]) == ["no", "yes", "on", "1", "1_000", "2024-01-01", "~", "0x1F"]


def test_values_are_what_yaml_makes_of_them() -> None:
    assert read_text("a: no\nb: 3\nc: [1.5, ~]\nd: 2e-3", "mine.yaml") == {
        "a": False,
        "b": 3,
        "c": [1.5, None],
        "d": "2e-3",
    }


def test_a_merge_key_still_merges_and_an_own_key_wins() -> None:
    text = "base: &b {x: 1, no: 2}\nmine: {<<: *b, x: 3}"
    assert read_text(text, "mine.yaml")["mine"] == {"x": 3, "no": 2}


@pytest.mark.parametrize("path", sorted(shipped_recipes().rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_read_as_yaml_has_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert read_text(text, str(path)) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data:\n  users:\n    ann: a.txt\n    bob: b.txt\n    ann: c.txt\n", "line 5: .*'ann'.* 3$"),
        ("seed: 1\ndata: {}\nseed: 2\n", "line 3: .*'seed'.* 1$"),
        ("a:\n  - {x: 1,\n     x: 2}\n", "line 3: .*'x'.* 2$"),
        ("users: {'no': a, no: b}", "line 1: .*'no'.* 1$"),
        ("users: {1: a, '1': b}", "line 1: .*'1'.* 1$"),
        ("x: &x {ann: a}\ndata: {users: {<<: *x, ann: b}}", "line 2: .*'<<'"),
        ("? [a, b]\n: c\n", "line 1: .*a list"),
        ("{{a: b}: c}", "line 1: .*a mapping"),
    ],
)
def test_a_key_that_is_there_twice_or_no_text_is_refused_with_its_line(text: str, said: str) -> None:
    assert re.match(f"mine.yaml: {said}", refusal(text))


# ---------------------------------------------------------------- files that would hang or break


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000 + "a", "a: " + "[" * 500 + "]" * 500])
def test_deep_nesting_is_refused(text: str) -> None:
    assert re.match(rf"mine.yaml: line 1: nested .*\b{MAX_DEPTH}\b", refusal(text))


def test_an_anchor_bomb_is_refused() -> None:
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 12)]
    message = refusal("method:\n  settings:\n" + "\n".join(f"    {line}" for line in lines))
    assert re.search(rf"alias.*\b{MAX_REPEATED:,}\b", message)


def test_an_anchor_within_itself_is_refused() -> None:
    assert re.match(r"mine.yaml: line 1: .*'\*a'", refusal("method: &a [*a]"))


def test_an_alias_or_two_is_fine() -> None:
    assert read_text("a: &x {r: 1}\nb: *x\nc: *x", "mine.yaml") == {"a": {"r": 1}, "b": {"r": 1}, "c": {"r": 1}}


@pytest.mark.parametrize("text", ["a: 2024-13-45", "a: !!int x", "a: \0", "a: [", "a: *b", "a: !!float many"])
def test_whatever_yaml_finds_is_one_line(text: str) -> None:
    assert refusal(text).startswith("mine.yaml: not YAML: ")


def test_a_recipe_file_is_read_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data:\n  users:\n    no: a.txt\n    2024-01-01: b.txt\n")
    assert list(load_recipe(path).data.users or {}) == ["no", "2024-01-01"]
    path.write_text("data:\n  users:\n    ann: a.txt\n    ann: b.txt\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml: line 4: .*'ann'"):
        load_recipe(path)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_survive_a_run_folder(tmp_path: Path, name: str) -> None:
    content = {"data": {"users": {name: "a.txt", "z": "b.txt"}, "max_train_tokens": {name: 9}}}
    content["training"] = {"participation": [[name], [name, "z"]]}
    recipe = parse_recipe(content)
    (tmp_path / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
    again = load_recipe(tmp_path)
    assert again == recipe
    assert list(again.data.users or {}) == [name, "z"]
    assert again.as_yaml() == recipe.as_yaml()


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("", "data.users: ", "empty"),
        ("  ", "data.users: ", "empty"),
        ("a\nb", r"data.users: user 'a\nb': ", r"'\n'"),
        ("a\0", r"data.users: user 'a\x00': ", r"'\x00'"),
        ("\x1b[31mred", r"data.users: user '\x1b[31mred': ", r"'\x1b'"),
        ("a\u2028b", r"data.users: user 'a\u2028b': ", r"'\u2028'"),
        ("a\u202eb", r"data.users: user 'a\u202eb': ", r"'\u202e'"),
        ("\u2066a", r"data.users: user '\u2066a': ", r"'\u2066'"),
        ("\ufeffa", r"data.users: user '\ufeffa': ", r"'\ufeff'"),
        ("\ud800", r"data.users: user '\ud800': ", r"'\ud800'"),
    ],
)
def test_names_that_no_table_can_show_are_refused(name: str, place: str, value: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"data": {"users": {name: "a.txt"}}})
    assert str(caught.value).startswith(f"recipe: {place}")
    assert value in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_all_scripts_are_fine() -> None:
    names = ["Zoë", "نگار", "می‌خواهم", "日本", "👩‍💻", "o'brien", "a b", "[x]", "a/b"]
    recipe = parse_recipe({"data": {"users": dict.fromkeys(names, "a.txt")}})
    assert list(recipe.data.users or {}) == names


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"data": {"users": {1: "a", "1": "b"}}}, "data.users: .*'1'"),
        (
            {"data": {"dataset": {"path": "a.csv", "user": "who", "users": ["ann", "bob", "ann"]}}},
            "data.dataset.users: .*'ann'",
        ),
        (
            {"data": {"users": {"ann": "a"}}, "training": {"participation": [["ann", "ann"]]}},
            "training.participation: .*'ann'.* 1",
        ),
        (
            {"data": {"dataset": {"path": "a.csv", "user": "who", "users": [False, "se"]}}},
            "data.dataset.users.0: .*False",
        ),
    ],
)
def test_nobody_is_named_twice_or_by_accident(content: Any, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(content)
    assert re.match(f"recipe: {said}", str(caught.value))


def test_a_recipe_that_would_fill_memory_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"# a long comment\n" * 6_000_000)
    with pytest.raises(RecipeError, match=r"large\.yaml: .*102,000,000 .*4,194,304"):
        load_recipe(path)
    with pytest.raises(RecipeError, match=r"^here: .*5,000,000 "):
        read_text("#" * 5_000_000, "here")
