"""Users with too little text: all are named at once, or left out, counted and listed."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.config import load_recipe, parse_recipe
from comingle.runs import api, session
from comingle.runs.session import prepare
from comingle.utils.errors import ComingleError, DataError, RecipeError
from comingle.utils.records import read_events, read_metrics


@pytest.fixture
def small(recipe_file: Path) -> Path:
    """The tiny recipe with three users more: too little text, a blank file, and no test text worth the name."""
    content = yaml.safe_load(recipe_file.read_text())
    for name, text in {"dan": "few words", "eve": " \n", "fay": "word " * 30}.items():
        (recipe_file.parent / "texts" / f"{name}.txt").write_text(text)
        content["data"]["users"][name] = f"texts/{name}.txt"
    recipe_file.write_text(yaml.safe_dump(content, sort_keys=False))
    return recipe_file


def said(recipe: Any) -> str:
    with pytest.raises(ComingleError) as caught:
        session.build(recipe, prepare(recipe))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_who_are_too_small_are_named_at_once(small: Path) -> None:
    (small.parent / "texts" / "eve.txt").write_text("x")
    message = said(load_recipe(small))
    assert re.match(r"3 of 6 users .*: 'dan' \(train [^)]*\b5 [^)]*17\), 'eve' \(train [^)]*17\), 'fay' ", message)
    assert re.search(r"'fay' \(valid [^)]*\b16 [^)]*17\); .*training\.context; ", message)
    assert message.endswith(" data.on_small_user: skip")


def test_all_who_have_no_text_are_named_at_once(small: Path) -> None:
    (small.parent / "texts" / "dan.txt").write_text("")
    message = said(load_recipe(small))
    assert re.match(r"2 of 6 users .*: 'dan' \(", message)
    assert "'eve' (" in message


def test_the_first_ten_are_named_and_the_others_counted(recipe_file: Path) -> None:
    (recipe_file.parent / "texts" / "few.txt").write_text("few words")
    users = {f"u{i}": "texts/few.txt" for i in range(25)}
    message = said(
        load_recipe(recipe_file).with_changes(
            {"data.users": {n: str(recipe_file.parent / p) for n, p in users.items()}}
        )
    )
    assert re.match(r"25 of 25 users .*: 'u0' \(", message)
    assert re.search(r"'u9' \(train [^)]*\b5 [^)]*17\) and 15 more .*context 16; ", message)
    assert "'u10'" not in message


def test_small_users_are_left_out_counted_and_listed(small: Path, tmp_path: Path, caplog: Any) -> None:
    recipe = load_recipe(small).with_changes({"data.on_small_user": "skip", "training.rounds": 1})
    with caplog.at_level(logging.WARNING, logger="comingle"):
        done = api.run(recipe, out=tmp_path / "run")
    (warning,) = [m for m in caplog.messages if "'dan'" in m]
    assert re.search(r"3 of 6 users.*: 'dan' \(train [^)]*\b5 tokens", warning)
    assert done.users == ["ann", "bob", "cem"]
    (start,) = [event for event in read_events(tmp_path / "run") if event["event"] == "start"]
    assert list(start["users"]) == done.users
    assert list(start["skipped_users"]) == ["dan", "eve", "fay"]
    assert read_metrics(tmp_path / "run")["skipped_users"] == start["skipped_users"]
    assert start["skipped_users"]["eve"].startswith("no text")


@pytest.mark.parametrize("held_out", ["own", "mixture"])
def test_who_is_left_out_leaves_no_trace(small: Path, held_out: str) -> None:
    """The others' results are those of a recipe that never named them."""
    recipe = load_recipe(small).with_changes({"data.held_out": held_out, "training.rounds": 1})
    alone = recipe.with_changes({"data.users": {n: recipe.data.users[n].path for n in ("ann", "bob", "cem")}})
    with_small = api.run(recipe.with_changes({"data.on_small_user": "skip"}))
    assert with_small.metrics["users"] == api.run(alone).metrics["users"]


def test_limits_may_name_who_is_left_out_and_nobody_else(small: Path) -> None:
    recipe = load_recipe(small).with_changes({"data.on_small_user": "skip"})
    assert len(prepare(recipe.with_changes({"data.max_train_tokens": {"dan": 5}})).users) == 3
    with pytest.raises(RecipeError, match=r"^data\.max_train_tokens: .*'don'"):
        prepare(recipe.with_changes({"data.max_train_tokens": {"don": 5}}))


def test_nothing_changes_where_nobody_is_small(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.rounds": 1})
    skipping = api.run(recipe.with_changes({"data.on_small_user": "skip"}))
    assert skipping.metrics["users"] == api.run(recipe).metrics["users"]
    assert "skipped_users" not in skipping.metrics


def test_everybody_cannot_be_left_out(small: Path) -> None:
    recipe = load_recipe(small).with_changes({"data.on_small_user": "skip", "training.context": 1000})
    with pytest.raises(DataError, match=r"^all 6 users .*: 'ann' \(valid "):
        prepare(recipe)


def test_rows_of_users_without_a_split_may_be_left_out_too(tmp_path: Path) -> None:
    rows = [{"t": "words " * 200, "who": who, "part": part} for who in ("ann", "bob") for part in ("train", "test")]
    rows.append({"t": "words " * 200, "who": "cem", "part": "train"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": str(path), "user": "who", "text": "t", "split": "part"}
    content: Any = {"base": "random:llama", "data": {"dataset": dataset, "split": {"given": True}}}
    content |= {"training": {"context": 16}, "method": "comigs-1g1s"}
    with pytest.raises(DataError, match=r"^user 'cem': .*'test'; found: train"):
        prepare(parse_recipe(content))
    content["data"]["on_small_user"] = "skip"
    found = prepare(parse_recipe(content))
    assert [user.name for user in found.users] == ["ann", "bob"]
    assert list(found.skipped) == ["cem"]


def test_a_comparison_leaves_the_same_users_out_of_every_method(small: Path) -> None:
    """'fay' has enough to train on but not to validate: whoever goes first, the strictest method decides."""
    recipe = load_recipe(small).with_changes({"data.on_small_user": "skip", "method": "local"})
    assert list(prepare(recipe).skipped) == ["dan", "eve"]
    assert list(prepare(recipe, validates=True).skipped) == ["dan", "eve", "fay"]
