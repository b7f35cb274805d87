"""Conversations as tokens with a loss mask.

A question with its answer is a conversation of one turn.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comingle.config import Recipe
from comingle.data.conversations.reading import PlacedConversation, UserConversations, iterate_users
from comingle.data.conversations.section import ConversationsSection
from comingle.data.row_files import BadRows
from comingle.data.samples.samples import SPLITS
from comingle.data.splits import UserText
from comingle.data.streaming import FirstUsers, ListedRows, Rows, list_shortages
from comingle.data.text.reading import DocumentsReader, local_tokenizer
from comingle.models.base import Base
from comingle.models.chat_templates import ChatTemplate, Encoded, begin_of
from comingle.models.scoring import PAD, hide
from comingle.utils.errors import DataError

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Prompt as the model reads it, and the expected answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Conversations of one user, one per row of ``windows``, padded with ``PAD``.

    Tokens without loss are hidden (:func:`comingle.models.scoring.hide`); the loss is on responses.

    Args:
        windows: Tokens of n conversations.
        owners: For each of the m responses, the row of ``windows`` with its conversation.
        prompt_tokens: Number of tokens before each response in its row.
        references: Text of each response.
        limit: Number of tokens of the user's longest response, including its end token; generation stops there.
        measures: Measures to report (:mod:`comingle.data.conversations.scoring`); the first one compares models.
        ends: Tokens that end a response.
    """

    windows: Int64[Tensor, "n window"]
    owners: Int64[Tensor, " m"]
    prompt_tokens: Int64[Tensor, " m"]
    references: tuple[str, ...]
    limit: int
    measures: tuple[str, ...]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def contents(self) -> tuple[object, ...]:
        """All fields, from which the run's fingerprint of the user's data is computed."""
        return self.windows, self.owners, self.prompt_tokens, [self.references, self.limit, self.measures, self.ends]

    def select(self, numbers: Int64[Tensor, " k"]) -> Answers:
        """Return the conversations with these numbers, which are in ascending order, with their responses."""
        new_numbers = torch.full((len(self),), -1).index_put((numbers,), torch.arange(len(numbers)))
        owners = new_numbers[self.owners]  # -1 for responses of other conversations
        kept = owners >= 0
        return replace(
            self,
            windows=self.windows[numbers],
            owners=owners[kept],
            prompt_tokens=self.prompt_tokens[kept],
            references=tuple(compress(self.references, kept.tolist())),
        )

    def prompt(self, number: int) -> Int64[Tensor, " tokens"]:
        """Return the tokens before response ``number``, including earlier turns; shape ``(tokens,)``."""
        return self.tokens(int(self.owners[number]))[: int(self.prompt_tokens[number])]

    def tokens(self, number: int) -> Int64[Tensor, " tokens"]:
        """Return all token ids of conversation ``number``, counted from 0, without padding.

        In ``windows``, tokens without loss are stored as negative numbers; here they are decoded.
        """
        row = self.windows[number]
        row = row[row != PAD]
        return torch.where(row < 0, hide(row), row)  # hiding twice restores a token

    def only(self, kept: Bool[Tensor, " n"]) -> Answers:
        """Return a copy with only some of the conversations, and their responses.

        Args:
            kept: Whether to keep each conversation. The kept ones are numbered anew, in the same order.
        """
        new_rows = kept.cumsum(0) - 1  # [0, 0, 1] for [True, False, True]: row 2 becomes row 1
        is_kept_response = kept[self.owners]
        references = tuple(compress(self.references, is_kept_response.tolist()))
        return replace(
            self,
            windows=self.windows[kept],
            owners=new_rows[self.owners[is_kept_response]],
            prompt_tokens=self.prompt_tokens[is_kept_response],
            references=references,
        )


@dataclass(frozen=True, kw_only=True)
class UserAnswers:
    """Conversations of one user.

    Args:
        name: Name of the user.
        train: Conversations to train on.
        valid: Conversations to validate on; may be empty.
        test: Conversations to test on.
        cluster: True cluster of the user, if the recipe names it.
        left_out: Number of conversations that were left out, as they are longer than ``training.context``.
        longest: Number of tokens of the longest of those; 0 if there is none.
    """

    name: str
    train: Answers
    valid: Answers
    test: Answers
    cluster: int | None = None
    left_out: int = 0
    longest: int = 0

    def split(self, split: Split) -> Answers:
        """Return the conversations of a split."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


def encode(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Tokenise questions: begin-of-text token (if the base model uses one), prompt, answer, end-of-text token.

    Prompt and answer are tokenised separately, so that the border between them is where generation starts. Special
    tokens that are spelt out in them are tokenised as plain text.

    Raises:
        DataError: The tokenizer has no end-of-text token, so that an answer would not end.
    """
    end: Any = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            "base: the tokenizer has no end-of-text token, so answers would not end; choose another base model"
        )
    begin = begin_of(tokenizer)
    prompts = _tokenise_plain([question.prompt for question in questions], tokenizer)
    answers = _tokenise_plain([question.answer for question in questions], tokenizer)
    conversations: list[Encoded] = []
    for question, prompt, answer in zip(questions, prompts, answers, strict=True):
        conversation = _encode_one_turn((*begin, *prompt), (*answer, end), question.answer)
        conversations.append(conversation)
    return conversations


def _encode_one_turn(prompt: tuple[int, ...], answer: tuple[int, ...], reference: str) -> Encoded:
    """Return a conversation of one prompt and one answer, with the loss on the answer's tokens.

    Args:
        prompt: Tokens of the prompt.
        answer: Tokens of the answer.
        reference: Text of the answer.
    """
    tokens = (*prompt, *answer)
    answer_span = (len(prompt), len(tokens))
    return Encoded(tokens=tokens, responses=(answer_span,), references=(reference,))


def _tokenise_plain(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each text; a special token that is spelt out, such as ``</s>``, is encoded as plain text."""
    if not texts:
        return []
    encoded: Any = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,  # no warning about long texts: they are cut or skipped later
    )
    return encoded["input_ids"]


def build_answers(
    encoded: Sequence[Encoded], *, limit: int, measures: Sequence[str], ends: Sequence[int], loss_on_all: bool = False
) -> Answers:
    """Return conversations as padded windows with the loss on responses.

    Tokens without a loss are hidden: they are input, but no targets. A conversation may have responses without a loss
    (``Encoded.masked``) besides those with a loss (``Encoded.responses``).

    Args:
        encoded: Conversations as tokens.
        limit: Number of tokens of the user's longest response.
        measures: Measures to report.
        ends: Tokens that end a response.
        loss_on_all: Put the loss on all tokens instead, except on masked responses.

    Returns:
        A window for each conversation. Each response with a loss has an entry in ``owners`` (row of its conversation),
        ``prompt_tokens`` (number of tokens before it) and ``references`` (its text).
    """
    shortest_width = 2  # an input and a target
    width = max((len(conversation) for conversation in encoded), default=shortest_width)
    windows = torch.full((len(encoded), width), PAD, dtype=torch.int64)
    owners: list[int] = []
    prompt_tokens: list[int] = []
    references: list[str] = []
    for row, conversation in enumerate(encoded):
        tokens = torch.tensor(conversation.tokens)
        window = windows[row]
        window[: len(conversation)] = tokens if loss_on_all else hide(tokens)
        for start, stop in conversation.masked or ():
            window[start:stop] = hide(tokens[start:stop])
        for start, stop in conversation.responses:
            window[start:stop] = tokens[start:stop]
            owners.append(row)
            prompt_tokens.append(start)
        references += conversation.references
    return Answers(
        windows=windows,
        owners=torch.tensor(owners, dtype=torch.int64),
        prompt_tokens=torch.tensor(prompt_tokens, dtype=torch.int64),
        references=tuple(references),
        limit=limit,
        measures=tuple(measures),
        ends=tuple(ends),
    )


def check_validation_questions(user: UserAnswers, *, needs_validation: bool) -> None:
    """Check that a user has validation questions if the method needs them.

    Raises:
        DataError: The method needs validation questions, and there are none.
    """
    if needs_validation and not len(user.valid):
        raise DataError(
            f"user {user.name!r}: valid has 0 questions but needs at least 1; give data.questions.valid, or choose a "
            "method without validation data"
        )


def pool_answers(users: Sequence[UserAnswers]) -> UserAnswers:
    """Return a user "everyone" with the conversations of all users, for the centralized baseline."""
    train, valid, test = (_concatenate([user.split(split) for user in users]) for split in ("train", "valid", "test"))
    return UserAnswers(name="everyone", train=train, valid=valid, test=test)


def _concatenate(parts: Sequence[Answers]) -> Answers:
    """Concatenate the conversations of several users; see :class:`Answers` for the fields.

    Windows are padded to the widest. ``owners``, which has the row of each response's conversation, is shifted by the
    number of earlier rows.
    """
    owners: list[Tensor] = []
    references: list[str] = []
    num_earlier_rows = 0
    for part in parts:
        owners.append(part.owners + num_earlier_rows)
        references += part.references
        num_earlier_rows += len(part)
    all_ends = [end for part in parts for end in part.ends]
    return Answers(
        windows=torch.cat(widen([part.windows for part in parts])),
        owners=torch.cat(owners),
        prompt_tokens=torch.cat([part.prompt_tokens for part in parts]),
        references=tuple(references),
        limit=max(part.limit for part in parts),  # length of the longest response
        measures=parts[0].measures,  # the same for all users of a run
        ends=tuple(dict.fromkeys(all_ends)),  # each once, in order
    )


def widen(parts: Sequence[Int64[Tensor, "_ _"]]) -> list[Int64[Tensor, "_ window"]]:
    """Pad windows (token sequences) of several users with ``PAD`` to the width of the widest, to stack them.

    Args:
        parts: The windows of each user, ``(windows, width of this user)``.
    """
    width = max(part.shape[1] for part in parts)
    return [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=PAD) for part in parts]


logger = logging.getLogger("comingle")


class Encoder:
    """Encoder of users' conversations as windows; counts those that are too long over all users.

    Args:
        data: The section ``data`` of the recipe.
        template: Chat template of the base model.
        context: Largest number of tokens of a conversation.
        bad_rows: Collects conversations that the template rejects.
    """

    def __init__(self, data: ConversationsSection, template: ChatTemplate, context: int, bad_rows: BadRows):
        """Prepare to encode users' conversations as token windows.

        Args:
            data: The section ``data`` of the recipe, which says whether to cut long conversations.
            template: Chat template of the base model.
            context: Largest number of tokens of a conversation.
            bad_rows: Collects conversations that the template rejects.
        """
        self.data, self.context, self.template, self.bad_rows = data, context, template, bad_rows
        self.ends = self.template.ends()
        """Tokens that end a response."""
        self.counts = Counter[str]()
        """Numbers of conversations (``all``, ``cut``, ``left out``), and of responses with ``unwritten calls``."""
        self.longest = 0
        """Number of tokens of the longest conversation so far, before it is cut."""

    def encode(self, user: UserConversations) -> UserAnswers:
        """Encode a user's conversations as windows of tokens, and cut them to the context.

        Conversations that the chat template rejects become bad rows.
        """
        encoded_by_split: dict[str, list[Encoded]] = {}
        left_out_lengths: list[int] = []  # of the conversations that are too long
        for split in SPLITS:
            encoded_by_split[split] = self._encode_split(user.name, getattr(user, split), left_out_lengths)

        # The user's longest response, in tokens, limits the length of generated responses.
        all_encoded = chain.from_iterable(encoded_by_split.values())
        longest_response = max((conversation.longest for conversation in all_encoded), default=1)

        def build(split: str) -> Answers:
            loss_on_all = self.data.loss_on == "all" and split == "train"
            return build_answers(
                encoded_by_split[split],
                limit=longest_response,
                measures=self.data.measures,
                ends=self.ends,
                loss_on_all=loss_on_all,
            )

        return UserAnswers(
            name=user.name,
            train=build("train"),
            valid=build("valid"),
            test=build("test"),
            left_out=len(left_out_lengths),
            longest=max(left_out_lengths, default=0),
        )

    def _encode_split(
        self, name: str, conversations: Sequence[PlacedConversation], left_out_lengths: list[int]
    ) -> list[Encoded]:
        """Return the conversations of a split as tokens, each with at most ``self.context`` tokens.

        A longer one is cut after its last response that fits. It is left out if no response fits, or if the recipe
        does not allow to cut.

        Args:
            name: Name of the user, for error messages.
            conversations: File and line, and messages, of each conversation.
            left_out_lengths: Numbers of tokens of the conversations that are left out; extended here.
        """
        fitting: list[Encoded] = []
        may_cut = self.data.too_long == "cut"
        for placed in conversations:
            for encoded in self._encode_turns(name, placed):  # one, unless the template rewrites turns
                self.longest = max(self.longest, len(encoded))
                cut = _cut_to_context(encoded, self.context, may_cut, self.counts)
                if cut is None:
                    left_out_lengths.append(len(encoded))
                else:
                    fitting.append(cut)
        return fitting

    def _encode_turns(self, name: str, placed: PlacedConversation) -> list[Encoded]:
        """Return a conversation as tokens; several results if the chat template rewrites earlier turns.

        A conversation that the template rejects becomes a bad row, and the result is empty.

        Args:
            name: Name of the user, for error messages.
            placed: File and line (or another place in the data, for error messages) and messages of the conversation.

        Raises:
            DataError: The loss is on all tokens, but the template rewrites earlier turns.
        """
        where, messages = placed
        with self.bad_rows.catch(f"user {name!r}: {where}"):  # an error of the template makes a bad row
            encoded = self.template.encode_turns(messages)
            # None: the template rewrites a response without loss as the conversation grows, so it cannot be located.
            has_unknown_masks = any(conversation.masked is None for conversation in encoded)
            rewrites_turns = len(encoded) > 1 or has_unknown_masks
            if self.data.loss_on == "all" and rewrites_turns:  # an earlier turn would have a loss several times
                raise DataError(
                    "data.loss_on: got all, but the base model's chat template rewrites earlier turns as a "
                    "conversation grows; allowed: responses"
                )
            self.counts["unwritten calls"] += sum(conversation.unwritten_calls for conversation in encoded)
            return encoded
        return []

    @property
    def too_long_line(self) -> str:
        """Numbers of conversations that were too long, as a line; empty if there are none."""
        num_cut, num_left_out = self.counts["cut"], self.counts["left out"]
        num_too_long = num_cut + num_left_out
        if num_too_long == 0:
            return ""
        return (
            f"{num_too_long} of {self.counts['all']} conversations are longer than {self.context} tokens "
            f"(training.context): {num_cut} cut at whole turns, {num_left_out} left out; the longest has "
            f"{self.longest} tokens; set training.context to at least {self.longest} to keep all"
        )

    @property
    def notes(self) -> list[str]:
        """Warnings over all users: conversations that are too long, and tool calls that the template does not write."""
        notes: list[str] = []
        if self.too_long_line:
            notes.append(self.too_long_line)
        num_responses = self.counts["unwritten calls"]
        if num_responses > 0:
            notes.append(
                f"{num_responses} responses have tool calls that the base model's chat template does not write; they "
                "have no loss"
            )
        return notes


def _cut_to_context(encoded: Encoded, context: int, may_cut: bool, counts: Counter[str]) -> Encoded | None:
    """Cut a conversation after its last whole response within ``context`` tokens.

    Args:
        encoded: The conversation as tokens.
        context: Largest number of tokens that the result may have.
        may_cut: Whether to cut; if not, a conversation that is too long is left out as a whole.
        counts: Numbers of conversations by ``all``, ``cut`` and ``left out``; updated.

    Returns:
        The conversation, cut if necessary; None if it is left out, as when no response fits.
    """
    counts["all"] += 1
    if len(encoded) <= context:
        return encoded
    fitting_responses = [(start, stop) for start, stop in encoded.responses if stop <= context]  # token spans
    if not may_cut or not fitting_responses:
        counts["left out"] += 1
        return None
    counts["cut"] += 1
    _start, end = fitting_responses[-1]
    return replace(
        encoded,
        tokens=encoded.tokens[:end],
        responses=tuple(fitting_responses),
        references=encoded.references[: len(fitting_responses)],
        masked=tuple((start, stop) for start, stop in encoded.masked or () if stop <= end),
    )


def find_shortages(users: Sequence[Any], *, needs_validation: bool) -> dict[str, str]:
    """Return a phrase for each user that lacks conversations in a split that a run needs.

    Args:
        users: Users, encoded or not.
        needs_validation: A run needs valid besides train and test, since the method uses validation data.

    Returns:
        Phrases such as "no conversations in train and test, 2 left out as too long: ...", by the name of the user.
    """
    needed_splits = ("train", "valid", "test") if needs_validation else ("train", "test")
    phrases: dict[str, str] = {}
    for user in users:
        empty_splits = [split for split in needed_splits if len(getattr(user, split)) == 0]
        if empty_splits:
            phrases[user.name] = f"no conversations in {' and '.join(empty_splits)}{_left_out_phrase(user)}"
    return phrases


def _left_out_phrase(user: object) -> str:
    """Return the phrase ", 2 left out as too long: the longest has 900 tokens; set training.context to at least 900".

    It is empty if no conversation was left out, or if the user is not encoded, so that its tokens are not counted.
    """
    if not isinstance(user, UserAnswers) or user.left_out == 0:
        return ""
    return (
        f", {user.left_out} left out as too long: the longest has {user.longest} tokens; set training.context to at "
        f"least {user.longest}"
    )


def check_nonempty(users: Sequence[UserAnswers]) -> None:
    """Check that every user has a conversation in at least one split; one error lists all users without any.

    Raises:
        DataError: Users have no conversations, such as when all are longer than the context.
    """
    users_without_any = [user for user in users if not any(len(user.split(split)) for split in SPLITS)]
    shortages = find_shortages(users_without_any, needs_validation=True)  # so that the error names all three splits
    if shortages:
        raise too_few_error(list_shortages(shortages), len(shortages), len(users))


def check_shortages(users: Sequence[object], *, needs_validation: bool) -> None:
    """Check that every user has the conversations that will be used; one error lists all users that lack some.

    Raises:
        DataError: Users lack conversations.
    """
    shortages = find_shortages(users, needs_validation=needs_validation)
    if shortages:
        raise too_few_error(list_shortages(shortages), len(shortages), len(users))


def too_few_error(listed: str, num_small: int, num_users: int) -> DataError:
    """Return the error for users with too few conversations.

    Args:
        listed: The first of these users, such as "'ada' (no conversations in test)".
        num_small: Number of these users.
        num_users: Number of all users.
    """
    if num_small > 1:
        problem = f"{num_small} of {num_users} users have too few conversations: {listed}"
    else:
        problem = f"user {listed}"
    advice = "give more conversations, change the fractions or raise training.context"
    if num_small < num_users:
        advice += "; or skip such users with data.on_small_user: skip"
    return DataError(f"{problem}; {advice}")


class ConversationReader(DocumentsReader[UserConversations, UserAnswers]):
    """Reader of users with conversations, encoded with the chat template of a base model."""

    too_little, documents_noun = "too few conversations", "conversations"
    data: ConversationsSection

    @cached_property
    def encoder(self) -> Encoder:
        """Encoder of all users, which reports conversations that the template rejects as bad rows."""
        return Encoder(self.data, ChatTemplate(self.tokenizer, self.base.date), self.context, self.bad_rows)

    def key(self) -> list[object]:
        """Return what changes the tokens of encoded conversations, for the cache key of the users.

        Besides the base class's entries it is the chat template and, if the template writes the current date, the date.
        """
        template = str(getattr(self.base.tokenizer, "chat_template", None))
        key = [*super().key(), template]
        if self.base.date is not None:
            key.append(self.base.date.isoformat())
        return key

    def read(self, rows: Rows) -> Generator[UserConversations, None, None]:
        """Yield the messages of each user."""
        return iterate_users(self.data, self.seed, rows, self.bad_rows, self.duplicates, self.given)

    def encode(self, unencoded: UserConversations) -> UserAnswers:
        """Return the conversations as windows, none longer than the context."""
        return self.encoder.encode(unencoded)

    def shortage(self, user: UserAnswers | UserConversations) -> str | None:
        """Return a phrase that names the needed splits without conversations; None if there is no such split."""
        return find_shortages([user], needs_validation=self.validates).get(user.name)

    def refuse(self, small_users: FirstUsers) -> DataError:
        """Return the error that lists the first small users."""
        return too_few_error(small_users.listed, small_users.count, self.num_users)

    def report(self) -> None:
        """Report conversations that the template rejects."""
        self.bad_rows.report()

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return facts about all users, which are stored with them, and warnings for the start of every run.

        Besides those of the base class there are warnings about conversations that are too long.
        """
        facts, warnings = super().summary()
        return facts, [*self.encoder.notes, *warnings]

    def text(self, unencoded: UserConversations) -> UserText:
        """Return a user's conversations as plain texts, to find held-out texts that are also in the training data.

        System messages are excluded, since a user's conversations often share one.
        """

        def texts_of(conversations: Sequence[PlacedConversation]) -> tuple[str, ...]:
            """Return one text for each conversation: its messages, joined."""
            texts: list[str] = []
            for _place, messages in conversations:
                contents = [message["content"] for message in messages if message["role"] != "system"]
                texts.append(" ".join(contents))
            return tuple(texts)

        return UserText(
            name=unencoded.name,
            train=texts_of(unencoded.train),
            valid=texts_of(unencoded.valid),
            test=texts_of(unencoded.test),
        )


class _UnencodedReader(ConversationReader):
    """Reader that counts conversations without a tokenizer, so that none is too long."""

    def encode(self, unencoded: UserConversations) -> Any:
        """Return the user without encoding it."""
        return unencoded

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return warnings about skipped users."""
        return {}, self.skip_warnings


def _no_base() -> Base:
    """Stand in for the function that loads a base model, which counting never calls."""
    raise AssertionError("counts need no base")


def count_conversations(recipe: Recipe, data: ConversationsSection, validates: bool) -> tuple[dict[str, int], set[str]]:
    """Return the number of train conversations of each user, and the users that a run would skip for lack of data.

    No base model is loaded. If its tokenizer is not on this machine, no conversation counts as too long.

    Args:
        recipe: Settings of the run.
        data: The recipe's section ``data``.
        validates: Whether the method needs validation data.

    Raises:
        DataError: Conversations cannot be read, or a run would refuse them.
    """
    tokenizer = local_tokenizer(recipe.base)
    reader_class = _UnencodedReader if tokenizer is None else ConversationReader
    reader = reader_class(data, recipe.data_seed, _no_base, context=recipe.training.context, validates=validates)
    if tokenizer is not None:  # else the reader would load the base model to make an encoder
        reader.encoder = Encoder(data, ChatTemplate(tokenizer), recipe.training.context, reader.bad_rows)
    skipped: set[str] = set()

    def add_skipped(name: str, _shortage: str) -> None:
        skipped.add(name)

    reader.on_skip = add_skipped
    unencoded_users = list(reader.read(ListedRows()))  # in memory
    users = [user for _unencoded, user in reader.stream(unencoded_users)]
    _facts, warnings = reader.summary()
    for warning in warnings:
        logger.warning("%s", warning)
    check_shortages(users, needs_validation=validates)
    return {user.name: len(user.train) for user in users}, skipped
