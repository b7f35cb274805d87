"""A user's three token streams, and whether they are enough to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int32
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comingle.data.partition import UserText
from comingle.data.tokenise import tokenise
from comingle.errors import DataError


@dataclass(frozen=True, kw_only=True)
class UserData:
    """The token streams of one user; valid may be empty."""

    name: str
    train: Int32[Tensor, " train_tokens"]
    valid: Int32[Tensor, " valid_tokens"]
    test: Int32[Tensor, " test_tokens"]


def pack(
    user: UserText,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_train_tokens: int | None = None,
    max_valid_tokens: int | None = None,
    max_test_tokens: int | None = None,
) -> UserData:
    """Tokenise a user once; a limit keeps the first tokens of a split."""
    return UserData(
        name=user.name,
        train=tokenise(user.train, tokenizer, max_tokens=max_train_tokens),
        valid=tokenise(user.valid, tokenizer, max_tokens=max_valid_tokens),
        test=tokenise(user.test, tokenizer, max_tokens=max_test_tokens),
    )


def check(user: UserData, *, context: int, needs_validation: bool) -> None:
    """Whether every stream that will be used is long enough.

    Train, and valid where the method needs it, must hold one window of ``context + 1`` tokens (the last token is only
    a target); test must hold two tokens, one input and one target.

    Raises:
        DataError: the user has no text, or one of the streams is too short.
    """
    if not (len(user.train) or len(user.valid) or len(user.test)):
        raise DataError(f"user {user.name!r}: no text in train, valid or test; give it text or remove the user")
    window = context + 1
    purpose = f"for one window of context {context}"
    _need(user.name, "train", len(user.train), window, f"{purpose}; give the user more text or shorten the context")
    if needs_validation:
        advice = "give a valid split or fraction, or choose a method without validation data"
        _need(user.name, "valid", len(user.valid), window, f"{purpose}; {advice}")
    _need(user.name, "test", len(user.test), 2, "to measure perplexity; give a test split or fraction")


def pool(users: Sequence[UserData]) -> UserData:
    """One user named "everyone" that holds the streams of all, one after another: the centralized baseline."""
    return UserData(
        name="everyone",
        train=torch.cat([user.train for user in users]),
        valid=torch.cat([user.valid for user in users]),
        test=torch.cat([user.test for user in users]),
    )


def _need(name: str, split: str, got: int, needed: int, purpose: str) -> None:
    if got < needed:
        raise DataError(f"user {name!r}: {split} holds {got} tokens, needs at least {needed} {purpose}")
