"""How much of its text each user keeps: one number, one for each user, or a user's own."""

from __future__ import annotations

from typing import Any

import pytest

from comingle.config import parse_recipe
from comingle.data.splits import UserText
from comingle.data.text.reading import token_limits, tokenise_user
from comingle.models.base import tokenizer_of
from comingle.models.loading import load_base
from comingle.utils.errors import RecipeError

NAMES = ["ada", "ben"]


def limits(**data: Any) -> dict[str, dict[str, int | None]]:
    content = {"users": {"ada": "a.txt", "ben": "b.txt"}, **data}
    return token_limits(parse_recipe({"data": content}).data, NAMES)


def test_one_number_is_for_all() -> None:
    none = {"max_train_tokens": None, "max_valid_tokens": None, "max_test_tokens": None}
    assert limits() == {"ada": none, "ben": none}
    assert limits(max_test_tokens=7) == {name: {**none, "max_test_tokens": 7} for name in NAMES}


def test_a_mapping_is_for_those_it_names() -> None:
    found = limits(max_train_tokens={"ben": 50}, max_valid_tokens={"ada": 3, "ben": 4})
    assert [found[n]["max_train_tokens"] for n in NAMES] == [None, 50]
    assert [found[n]["max_valid_tokens"] for n in NAMES] == [3, 4]


def test_a_users_own_number_comes_first() -> None:
    users = {"ada": {"path": "a.txt", "max_train_tokens": 9}, "ben": "b.txt"}
    assert [limits(users=users, max_train_tokens=5)[n]["max_train_tokens"] for n in NAMES] == [9, 5]
    assert [limits(users=users, max_train_tokens={"ada": 5})[n]["max_train_tokens"] for n in NAMES] == [9, None]


def test_tokens_are_really_cut() -> None:
    recipe = parse_recipe({"data": {"users": {"ada": "a", "ben": "b"}, "max_train_tokens": {"ada": 20, "ben": 40}}})
    texts = [UserText(name=n, train=("word " * 50,), test=("end " * 10,)) for n in NAMES]
    tokenizer = tokenizer_of(load_base("random:llama", dtype="float32", device="cpu"))
    found = [tokenise_user(recipe.data, text, tokenizer) for text in texts]
    assert [len(user.train) for user in found] == [20, 40]
    assert len(found[0].test) == len(found[1].test) > 30


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_train_tokens": {"bem": 3}}, r"data\.max_train_tokens: .*'bem'.*ada, ben\. Did you mean 'ben'"),
        ({"max_train_tokens": {"ben": 0}}, r"data\.max_train_tokens\.ben: .*1"),
        ({"max_train_tokens": "many"}, r"data\.max_train_tokens: .*'many'"),
    ],
)
def test_wrong_limits_are_said(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        limits(**data)
