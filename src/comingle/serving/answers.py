"""Prompts as tokens, tokens as the API's response bodies, and a chat in the terminal."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comingle.models.base import Base
from comingle.models.chat_templates import ChatTemplate, Message
from comingle.models.generation import Sampling, encode_prompt
from comingle.models.personal import chat_ends
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.models.routing import Routing
from comingle.serving.engine import Engine, Finish, Piece, Request, SampledToken, TooLongError
from comingle.utils.errors import DataError, require_user


class Prompts:
    """Encodes texts, tokens and messages of requests as prompts for one base model."""

    def __init__(self, base: Base) -> None:
        """Create an encoder for a base with a tokenizer, whose chat template is used for messages."""
        assert base.tokenizer is not None
        self.base, self.tokenizer, self.template = base, base.tokenizer, ChatTemplate(base.tokenizer, base.date)
        self.begin = base.begin  # the begin-of-text token; None if texts have none

    def of_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of messages in the chat template, followed by the template's beginning of an answer.

        Raises:
            DataError: The template refuses the messages, or a token has no row in the embedding.
        """
        tokens = encode_prompt(self.tokenizer, self.template.prompt(messages))
        self.base.require_rows(tokens, "the messages")
        return tokens

    def chat_ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer in a chat.

        Raises:
            DataError: The base has no token that ends an answer.
        """
        return chat_ends(self.base)

    def of_texts(self, prompt: Any) -> list[list[int]]:
        """Return the tokens of each prompt of a completion request.

        Args:
            prompt: A text, the tokens of one prompt, or a list of texts or of tokens.

        Raises:
            DataError: There is no prompt; a token is outside the vocabulary; or a prompt is empty, and the base has no
                begin-of-text token.
        """
        is_text = isinstance(prompt, str)
        is_tokens = not is_text and bool(prompt) and isinstance(prompt[0], int)  # such as [5, 8, 2]
        text_or_tokens_by_prompt = [prompt] if is_text or is_tokens else list(prompt)
        if not text_or_tokens_by_prompt:
            raise DataError("prompt: got an empty list; allowed: a text, tokens, or a list of either")
        vocabulary_size = self.base.rows
        for text_or_tokens in text_or_tokens_by_prompt:
            if isinstance(text_or_tokens, str):
                continue
            for token in text_or_tokens:
                if not 0 <= token < vocabulary_size:
                    raise DataError(f"prompt: got token {token}; allowed: 0 to {vocabulary_size - 1:,}")
        prompts = [encode_prompt(self.tokenizer, item, self.begin) for item in text_or_tokens_by_prompt]
        for tokens in prompts:
            self.base.require_rows(tokens, "the prompt")
        return prompts


DONE = "data: [DONE]\n\n"
"""The last event of a stream."""


@dataclass(kw_only=True)
class Choice:
    """One text of an answer, as generated so far.

    Args:
        text: The text.
        tokens: Its tokens, without the one that ends it.
        num_sampled: Number of sampled tokens, with the one that ends it; the API's usage counts these.
        finish: Why the text has ended; None if it has not.
    """

    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    num_sampled: int = 0
    finish: Finish | None = None

    def add(self, piece: Piece, ends: Sequence[int]) -> list[SampledToken]:
        """Append a piece to the text.

        Args:
            piece: New text and the token that was sampled.
            ends: Tokens that end a text and are not part of it.

        Returns:
            The tokens that were appended: one, or none if the piece has no token or one of ``ends``.
        """
        self.text += piece.text
        self.finish = piece.finish
        new_tokens: list[SampledToken] = []
        if piece.sampled is not None:
            self.num_sampled += 1
            if piece.sampled.token not in ends:
                new_tokens.append(piece.sampled)
        self.tokens += new_tokens
        return new_tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Formats one answer as a response body or as server-sent events of the OpenAI API.

    Args:
        chat: Whether it answers a chat request rather than a completion request.
        model: The user whose model answers.
        tokenizer: Decodes tokens for the log probabilities.
        wants_logprobs: Whether the client has requested log probabilities.
        prompt_tokens: Tokens of all prompts.
        created: When the answer was created, in seconds since 1970.
        random_id: Random part of the answer's ID.
    """

    chat: bool
    model: str
    tokenizer: PreTrainedTokenizerBase
    wants_logprobs: bool
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    random_id: str = field(default_factory=lambda: secrets.token_hex(12))

    # ------------------------------------------------------------ whole

    def body(self, choices: Sequence[Choice]) -> dict[str, object]:
        """Return the body of an answer that is not streamed."""
        return {
            **self._common_fields("chat.completion" if self.chat else "text_completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self.usage(choices),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        """Return an item of ``choices`` for a text that has ended."""
        fields: dict[str, object] = {"index": index}
        if self.chat:
            fields["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            fields["text"] = choice.text
        fields["logprobs"] = self._logprobs(choice.tokens)
        fields["finish_reason"] = choice.finish
        return fields

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Return the API's ``usage``: numbers of prompt tokens, generated tokens, and both."""
        num_generated = sum(choice.num_sampled for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.prompt_tokens + num_generated,
        }

    # ------------------------------------------------------------ in chunks

    def chunk(self, choices: Sequence[Mapping[str, object]], usage: Mapping[str, int] | None = None) -> str:
        """Return one server-sent event of a stream.

        Args:
            choices: Items from :meth:`first_choice` or :meth:`choice_chunk`; empty for an event with usage alone.
            usage: Numbers of tokens from :meth:`usage`, for the final event; None to omit them.
        """
        body = self._common_fields("chat.completion.chunk" if self.chat else "text_completion")
        body["choices"] = choices
        if usage is not None:
            body["usage"] = usage
        return event(body)

    def first_choice(self, index: int) -> dict[str, object]:
        """Return the item of ``choices`` with which a text of a streamed chat begins: its role, without content."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice_chunk(
        self, index: int, text: str, tokens: Sequence[SampledToken], finish: Finish | None
    ) -> dict[str, object]:
        """Return an item of ``choices`` with the text that a streamed answer adds.

        Args:
            index: Index of the choice.
            text: The new text.
            tokens: Its tokens.
            finish: Why the text has ended; None if it has not.
        """
        fields: dict[str, object] = {"index": index}
        if self.chat:
            fields["delta"] = {"content": text} if text else {}
        else:
            fields["text"] = text
        fields["logprobs"] = self._logprobs(tokens)
        fields["finish_reason"] = finish
        return fields

    # ------------------------------------------------------------ parts of both

    def _common_fields(self, object_type: str) -> dict[str, object]:
        """Return the fields that the API's responses and events begin with."""
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.random_id}",
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, object] | None:
        """Return the API's ``logprobs`` of tokens, in its form for chats or completions; None if not requested."""
        if not self.wants_logprobs:
            return None
        return self._chat_logprobs(tokens) if self.chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, object]:
        """Return ``logprobs`` in the form for chats: a list with an entry per token."""
        entries = []
        for sampled in tokens:
            entry = self._token_entry(sampled.token, sampled.logprob)
            entry["top_logprobs"] = [self._token_entry(token, logprob) for token, logprob in sampled.top]
            entries.append(entry)
        return {"content": entries, "refusal": None}

    def _completion_logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, object]:
        """Return ``logprobs`` in the form for completions: a list per field, each with a value per token."""
        top_logprobs = []
        for sampled in tokens:
            top_logprobs.append({self._text(token): logprob for token, logprob in sampled.top})
        return {
            "tokens": [self._text(sampled.token) for sampled in tokens],
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": top_logprobs,
            "text_offset": [sampled.text_offset for sampled in tokens],
        }

    def _token_entry(self, token: int, logprob: float | None) -> dict[str, object]:
        """Return a token's text, log probability and UTF-8 bytes, as in the API's log probabilities of chats."""
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def event(body: Mapping[str, object]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


Show = Callable[[str], None]
"""Called with each piece of text as it is generated."""


@dataclass(kw_only=True)
class Chat:
    """A conversation with a user's model in the terminal.

    With ``plain``, there is no conversation: the model continues each text that the person types.
    """

    engine: Engine
    user: str
    plain: bool
    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: tuple[str, list[int], str] | None = None
    """The most recent answer: its user, the prompt's tokens and the text; None before the first answer."""

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.engine.models[self.user].model.base)

    def switch(self, user: str) -> None:
        """Continue the conversation with another user's model.

        Raises:
            DataError: There is no such user.
        """
        self.user = require_user(user, list(self.engine.models))

    def clear(self) -> None:
        """Delete the conversation."""
        self.messages, self.last = [], None

    def say(self, text: str, show: Show) -> str:
        """Answer a message, and add message and answer to the conversation; with ``plain`` only continue the text.

        Args:
            text: The message.
            show: Called with each piece of the answer as it is generated.

        Returns:
            The whole answer.

        Raises:
            DataError: The conversation is too long, or the base's template refuses it.
        """
        prompt = self._prompt(text)
        answer = self._generate(self.engine, self.user, prompt, show)
        if not self.plain:
            question_and_answer = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            self.messages = [*self.messages, *question_and_answer]
        self.last = (self.user, prompt, answer)
        return answer

    def compare(self, models: Mapping[str, tuple[Engine, str]], text: str) -> dict[str, str]:
        """Return the answers of several models to the same message, without adding them to the conversation.

        Args:
            models: Engine and user of each model, by a title such as "ann's model".
            text: The message.

        Returns:
            The answers by title.

        Raises:
            DataError: The conversation is too long, or the base's template refuses it.
        """
        prompt = self._prompt(text)

        def show_nothing(_piece: str) -> None:
            pass

        answers = {}
        for title, (engine, user) in models.items():
            answers[title] = self._generate(engine, user, prompt, show_nothing)
        return answers

    def route(self) -> Routing:
        """Return the expert that each token of the most recent answer was routed to.

        Raises:
            DataError: There is no answer yet, it is empty, or the model has no routers.
        """
        if self.last is None:
            raise DataError("/route: no answer yet")
        user, prompt, answer = self.last
        if not answer:
            raise DataError("/route: the last answer is empty")
        tokens: Any = self.engine.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return self.engine.route(user, prompt, list(tokens))

    def _prompt(self, text: str) -> list[int]:
        """Return the tokens of the conversation with a new message; with ``plain`` the tokens of the text alone."""
        if self.plain:
            (tokens,) = self.prompts.of_texts(text)
            return tokens
        return self.prompts.of_messages([*self.messages, {"role": "user", "content": text}])

    def _generate(self, engine: Engine, user: str, prompt: list[int], show: Show) -> str:
        """Generate an answer and return it.

        Args:
            engine: Generates the tokens; has no other requests.
            user: User whose model answers.
            prompt: The prompt's tokens.
            show: Called with each piece of the answer as it is generated.

        Raises:
            TooLongError: The conversation and the answer exceed the context; the message says what to do.
        """
        texts: list[str] = []

        def on_piece(piece: Piece) -> None:
            texts.append(piece.text)
            show(piece.text)

        sampling = self._sampling(engine, len(prompt))
        request = Request(name=user, prompt=prompt, sampling=sampling, on_piece=on_piece, continues=self.plain)
        try:
            engine.submit(request)
        except TooLongError as error:
            advice = "start a new conversation with /clear" if self.messages else "give a shorter text"
            raise TooLongError(f"{error}; {advice}") from None
        try:
            while engine.busy:
                engine.step()
        except BaseException:  # also Ctrl-C: the engine must not continue this answer with the next one
            engine.fail_all(InterruptedError())
            raise
        return "".join(texts)

    def _sampling(self, engine: Engine, num_prompt_tokens: int) -> Sampling:
        """Return the sampling settings of an answer.

        Args:
            engine: Generates the tokens; its context limits their number.
            num_prompt_tokens: Number of tokens in the prompt.
        """
        max_new_tokens = self.max_tokens
        if engine.context_length is not None:
            max_new_tokens = min(max_new_tokens, engine.context_length - num_prompt_tokens)
        return Sampling(
            max_new_tokens=max(1, max_new_tokens),  # without room for one token, `Engine.submit` raises an error
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=50 if self.temperature else 0,  # transformers' default; temperature 0 does not sample
            # With `plain` the model continues a text, which ends as the base's texts do; else a token ends the answer.
            eos_token_id=None if self.plain else self.prompts.chat_ends(),
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )
