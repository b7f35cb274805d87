"""Text of a user as three token streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comingle.data.splits import UserText
from comingle.data.streaming import list_shortages
from comingle.utils.errors import DataError

# Fast tokenizers process a batch of documents in parallel. Tokenising up to a token limit stops after a batch.
_BATCH_DOCUMENTS = 256


def tokenise(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None
) -> Int32[Tensor, " tokens"]:
    """Return the documents as one token stream, each followed by a separator token.

    The separator is the tokenizer's end-of-text token, or else its begin-of-text token; without either, documents are
    concatenated directly. No other special tokens are added. Special tokens that are spelt out in a document are
    tokenised as plain text, so that the separator never occurs inside a document.

    Args:
        documents: Documents in order.
        tokenizer: Tokenizer of the base model.
        max_tokens: Number of first tokens to keep; None for all.

    Returns:
        Tokens of shape ``(tokens,)``.
    """
    no_tokens = torch.empty(0, dtype=torch.int32)
    batches: list[Tensor] = [no_tokens]
    num_tokens = 0
    for batch in _tokenise_batches(documents, tokenizer):
        batches.append(batch)
        num_tokens += len(batch)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    return torch.cat(batches)[:max_tokens]


def _tokenise_batches(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Int32[Tensor, " tokens"]]:
    """Yield the tokens of 256 documents at a time, each document followed by the separator (:func:`tokenise`)."""
    separator: Any = tokenizer.eos_token_id
    if separator is None:  # a begin-of-text token separates documents just as well
        separator = tokenizer.bos_token_id
    for start in range(0, len(documents), _BATCH_DOCUMENTS):
        encoded = tokenizer(
            list(documents[start : start + _BATCH_DOCUMENTS]),
            add_special_tokens=False,
            split_special_tokens=True,  # special tokens that are spelt out in a document are plain text
            return_attention_mask=False,
            verbose=False,  # no warning that a document is longer than the model's context: it is cut into windows
        )
        tokens: list[int] = []
        for document_tokens in encoded["input_ids"]:
            tokens += document_tokens
            if separator is not None:
                tokens.append(separator)
        yield torch.tensor(tokens, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class UserData:
    """Token streams of one user.

    Args:
        name: Name of the user.
        train: Tokens to train on.
        valid: Tokens to validate on; may be empty.
        test: Tokens to test on.
        cluster: True cluster of the user, if the recipe names it.
    """

    name: str
    train: Int32[Tensor, " train_tokens"]
    valid: Int32[Tensor, " valid_tokens"]
    test: Int32[Tensor, " test_tokens"]
    cluster: int | None = None


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Description of too little data of a user.

    Args:
        what: The short split, such as "train has 10 tokens but needs at least 33".
        advice: Purpose of the data and what to do, as the end of a sentence that begins with ``what``.
    """

    what: str
    advice: str


def tokenise_splits(
    user: UserText,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_train_tokens: int | None = None,
    max_valid_tokens: int | None = None,
    max_test_tokens: int | None = None,
) -> UserData:
    """Tokenise the three splits of a user.

    Args:
        user: Documents of the user.
        tokenizer: Tokenizer of the base model.
        max_train_tokens: Number of first train tokens to keep; None for all.
        max_valid_tokens: Number of first valid tokens to keep; None for all.
        max_test_tokens: Number of first test tokens to keep; None for all.
    """
    return UserData(
        name=user.name,
        train=tokenise(user.train, tokenizer, max_tokens=max_train_tokens),
        valid=tokenise(user.valid, tokenizer, max_tokens=max_valid_tokens),
        test=tokenise(user.test, tokenizer, max_tokens=max_test_tokens),
    )


def add_validation_to_train(user: UserData) -> UserData:
    """Return the user with its validation stream appended to the train stream."""
    return replace(user, train=torch.cat([user.train, user.valid]))


def check(users: Sequence[UserData], *, context: int, needs_validation: bool, begins: bool = False) -> None:
    """Check that every stream that will be used is long enough; one error lists all users with a shorter one.

    Args:
        users: The users.
        context: Number of tokens that the model reads at once. A window has one token more, which is only a target.
        needs_validation: The method needs validation data.
        begins: Every window gets a begin-of-text token in front, so that a stream may be one token shorter.

    Raises:
        DataError: Users have no text, or a stream that is too short (:func:`find_shortage`).
    """
    shortages: dict[str, Shortage] = {}
    for user in users:
        shortage = find_shortage(user, context=context, needs_validation=needs_validation, begins=begins)
        if shortage is not None:
            shortages[user.name] = shortage
    if shortages:
        raise too_short_error(shortages, len(shortages), len(users))


def too_short_error(shortages: Mapping[str, Shortage], count: int, num_users: int) -> DataError:
    """Return the error for users with too little text.

    Args:
        shortages: Shortages of the first of these users, by name.
        count: Number of these users.
        num_users: Number of all users.
    """
    some_users_suffice = count < num_users
    skip_advice = "; or skip such users with data.on_small_user: skip" if some_users_suffice else ""
    if count == 1:
        name, shortage = next(iter(shortages.items()))
        return DataError(f"user {name!r}: {shortage.what}{shortage.advice}{skip_advice}")
    listed = list_shortages({name: shortage.what for name, shortage in shortages.items()}, count)
    advice_of_users = {shortage.advice for shortage in shortages.values()}
    if len(advice_of_users) == 1:
        (advice,) = advice_of_users
    else:  # users lack different things
        advice = "; give them more text or shorten training.context"
    return DataError(f"{count} of {num_users} users have too little text: {listed}{advice}{skip_advice}")


def find_shortage(user: UserData, *, context: int, needs_validation: bool, begins: bool = False) -> Shortage | None:
    """Return the first stream of a user that is too short; None if all are long enough.

    Train, and valid if the method needs it, must have one window of ``context + 1`` tokens (the last token is only a
    target). Test must have two tokens, one input and one target.

    Args:
        user: The user with its data.
        context: Number of tokens that the model reads at once. A window has one token more, which is only a target.
        needs_validation: The method needs validation data.
        begins: A begin-of-text token is put in front of each window, so that one token less suffices.
    """
    if not (len(user.train) or len(user.valid) or len(user.test)):
        return Shortage(what="no text in train, valid or test", advice="; add text or remove the user")
    window_tokens = context if begins else context + 1
    test_tokens = 1 if begins else 2
    for_window = f"for one window of context {context}"
    if len(user.train) < window_tokens:
        advice = f" {for_window}; give more text or shorten training.context"
        return _shortage("train", user.train, window_tokens, advice)
    if needs_validation and len(user.valid) < window_tokens:
        advice = f" {for_window}; give a valid split or fraction, or choose a method without validation data"
        return _shortage("valid", user.valid, window_tokens, advice)
    if len(user.test) < test_tokens:
        advice = " to measure perplexity; give a test split or fraction"
        return _shortage("test", user.test, test_tokens, advice)
    return None


def _shortage(split: str, stream: Int32[Tensor, " tokens"], needed: int, advice: str) -> Shortage:
    """Return a shortage such as "train has 10 tokens but needs at least 33"; ``advice`` ends the sentence."""
    return Shortage(what=f"{split} has {len(stream)} tokens but needs at least {needed}", advice=advice)


def draw_windows(
    stream: Int32[Tensor, " tokens"], count: int, *, width: int, generator: torch.Generator
) -> Int32[Tensor, " drawn"]:
    """Return at most ``count`` tokens of a stream: random windows of ``width`` tokens without overlap, in their order.

    Args:
        stream: Tokens to draw from; returned unchanged if it has at most ``count``.
        count: Number of tokens to draw.
        width: Tokens per window; the last window that is returned may be shorter.
        generator: Source of randomness.
    """
    if len(stream) <= count:
        return stream
    windows = stream.split(width)
    num_drawn = -(-count // width)  # rounded up
    drawn = torch.randperm(len(windows), generator=generator)[:num_drawn].sort().values
    return torch.cat([windows[number] for number in drawn.tolist()])[:count]


def pool(users: Sequence[UserData]) -> UserData:
    """Return a user "everyone" with the concatenated streams of all users, for the centralized baseline."""
    return UserData(
        name="everyone",
        train=torch.cat([user.train for user in users]),
        valid=torch.cat([user.valid for user in users]),
        test=torch.cat([user.test for user in users]),
    )
