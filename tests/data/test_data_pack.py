from __future__ import annotations

import pytest
import torch

from comingle.cli.training import summarise
from comingle.data.splits import UserText
from comingle.data.text.streams import UserData, check, pool, tokenise_splits
from comingle.utils.errors import DataError


def make_user(name: str = "anna", *, train: int = 0, valid: int = 0, test: int = 0) -> UserData:
    train_tokens, valid_tokens, test_tokens = (torch.arange(n, dtype=torch.int32) for n in (train, valid, test))
    return UserData(name=name, train=train_tokens, valid=valid_tokens, test=test_tokens)


TEXT = UserText(name="anna", train=("a b", "c d"), valid=("a",), test=("b c d", "d"))


def test_packing_tokenises_every_split(word_tokenizer):
    data = tokenise_splits(TEXT, word_tokenizer)
    assert data.name == "anna"
    assert [stream.tolist() for stream in (data.train, data.valid, data.test)] == [
        [1, 2, 5, 3, 4, 5],
        [1, 5],
        [2, 3, 4, 5, 4, 5],
    ]


def test_limits_hold_for_their_own_split(word_tokenizer):
    data = tokenise_splits(TEXT, word_tokenizer, max_train_tokens=4, max_valid_tokens=1, max_test_tokens=2)
    assert [stream.tolist() for stream in (data.train, data.valid, data.test)] == [[1, 2, 5, 3], [1], [2, 3]]
    assert len(tokenise_splits(TEXT, word_tokenizer, max_test_tokens=2).train) == 6


@pytest.mark.parametrize(
    ("user", "needs_validation"),
    [(make_user(train=9, valid=9, test=2), True), (make_user(train=9, valid=0, test=2), False)],
)
def test_just_enough_is_enough(user: UserData, needs_validation: bool):
    check([user], context=8, needs_validation=needs_validation)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (make_user(), "no text in train, valid or test"),
        (make_user(train=8, valid=9, test=9), r"train .*\b8 tokens.* 9 .*context 8;.*training\.context"),
        (make_user(train=0, valid=9, test=9), r"train .*\b0 tokens.* 9 .*context 8;.*training\.context"),
        (make_user(train=9, valid=0, test=9), r"valid .*\b0 tokens.* 9 .*context 8;"),
        (make_user(train=9, valid=8, test=9), r"valid .*\b8 tokens.* 9 .*context 8;"),
        (make_user(train=9, valid=9, test=0), r"test .*\b0 tokens.* 2 .*perplexity"),
        (make_user(train=9, valid=9, test=1), r"test .*\b1 tokens.* 2 .*perplexity"),
    ],
)
def test_too_little_is_named(user: UserData, message: str):
    with pytest.raises(DataError, match=f"^user 'anna': {message}") as raised:
        check([user], context=8, needs_validation=True)
    assert "\n" not in str(raised.value)


def test_the_pool_holds_everybody():
    everyone = pool([make_user("anna", train=3, valid=1, test=2), make_user("ben", train=2, valid=0, test=2)])
    assert everyone.name == "everyone"
    assert everyone.train.tolist() == [0, 1, 2, 0, 1]
    assert everyone.valid.tolist() == [0]
    assert everyone.test.tolist() == [0, 1, 0, 1]
    assert everyone.train.dtype == torch.int32


def test_the_pool_of_packed_users_keeps_documents_apart(word_tokenizer):
    users = [tokenise_splits(UserText(name=name, train=("a b",)), word_tokenizer) for name in ("anna", "ben")]
    assert pool(users).train.tolist() == [1, 2, 5, 1, 2, 5]


def test_a_summary_counts_documents_characters_and_tokens(word_tokenizer):
    text = UserText(name="anna", train=("a  b\nc", "d"), test=("b " * 200,))
    assert summarise(text, tokenise_splits(text, word_tokenizer, max_test_tokens=50)) == {
        "user": "anna",
        "documents": {"train": 2, "valid": 0, "test": 1},
        "characters": {"train": 7, "valid": 0, "test": 400},
        "tokens": {"train": 6, "valid": 0, "test": 50},
        "samples": {"train": "a b c", "test": "b " * 79 + "b…"},
    }


def test_a_summary_of_a_user_without_text_has_no_samples(word_tokenizer):
    text = UserText(name="anna", train=())
    assert summarise(text, tokenise_splits(text, word_tokenizer))["samples"] == {}
