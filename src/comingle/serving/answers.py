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
        assert base.tokenizer is not None
        self.base, self.tokenizer, self.template = base, base.tokenizer, ChatTemplate(base.tokenizer, base.date)
        self.begin = base.begin

    def of_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of messages in the chat template, up to where the model's answer begins.

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
            DataError: There is no prompt, or a token is outside the vocabulary. Or a prompt is empty, and the tokenizer
                has no token with which a text begins.
        """
        # A list that begins with a number is the tokens of one prompt; other lists have an item for each prompt.
        is_single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        items = [prompt] if is_single else list(prompt)
        if not items:
            raise DataError("prompt: got an empty list; allowed: a text, tokens, or a list of either")
        given_tokens = [token for item in items if not isinstance(item, str) for token in item]
        for token in given_tokens:
            if not 0 <= token < self.base.rows:
                raise DataError(f"prompt: got token {token}; allowed: 0 to {self.base.rows - 1:,}")
        prompts = [encode_prompt(self.tokenizer, item, self.begin) for item in items]
        for tokens in prompts:
            self.base.require_rows(tokens, "the prompt")
        return prompts


DONE = "data: [DONE]\n\n"
"""The last event of a stream."""


@dataclass(kw_only=True)
class Choice:
    """One text of an answer, as generated so far."""

    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    count: int = 0
    finish: Finish | None = None

    def add(self, piece: Piece, ends: Sequence[int]) -> list[SampledToken]:
        """Append the result of one step.

        Args:
            piece: The result.
            ends: Tokens that end a text and are not part of it.

        Returns:
            The token that belongs to the text, in a list; an empty list if there is none or it only ends the text.
        """
        self.text += piece.text
        if piece.sampled is not None:
            self.count += 1  # also a token that only ends the text, as in the API's usage
        self.finish = piece.finish
        new_tokens = [piece.sampled] if piece.sampled and piece.sampled.token not in ends else []
        self.tokens += new_tokens
        return new_tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Values common to all chunks of one answer.

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
            "choices": [self._choice(number, choice) for number, choice in enumerate(choices)],
            "usage": self.usage(choices),
        }

    def _choice(self, number: int, choice: Choice) -> dict[str, object]:
        """Return a complete choice in the API's form: text of a completion, or message of a chat."""
        rest = {"logprobs": self._logprobs(choice.tokens), "finish_reason": choice.finish}
        if not self.chat:
            return {"index": number, "text": choice.text, **rest}
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": number, "message": message, **rest}

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Return the API's ``usage``: numbers of prompt tokens, generated tokens, and both."""
        generated = sum(choice.count for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }

    # ------------------------------------------------------------ in chunks

    def chunk(self, choices: Sequence[Mapping[str, object]], usage: Mapping[str, int] | None = None) -> str:
        """Return one server-sent event of a stream."""
        body = {**self._common_fields("chat.completion.chunk" if self.chat else "text_completion"), "choices": choices}
        return event(body if usage is None else {**body, "usage": usage})

    def first_choice(self, number: int) -> dict[str, object]:
        """Return the first choice of a chat's stream, which carries the role."""
        return {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice_chunk(
        self, number: int, text: str, tokens: Sequence[SampledToken], finish: Finish | None
    ) -> dict[str, object]:
        """Return a choice of a stream's chunk with newly generated text.

        Args:
            number: Index of the choice.
            text: The new text.
            tokens: Its tokens.
            finish: Why the text has ended; None if it has not.
        """
        rest = {"logprobs": self._logprobs(tokens), "finish_reason": finish}
        if not self.chat:
            return {"index": number, "text": text, **rest}
        return {"index": number, "delta": {"content": text} if text else {}, **rest}

    # ------------------------------------------------------------ parts of both

    def _common_fields(self, kind: str) -> dict[str, object]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.random_id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, object] | None:
        """Return the tokens' log probabilities in the API's form for chats or completions; None if not requested."""
        if not self.wants_logprobs:
            return None
        if self.chat:
            entries = [
                {**self._token_entry(sampled.token, sampled.logprob), "top_logprobs": self._top_entries(sampled)}
                for sampled in tokens
            ]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [self._text(sampled.token) for sampled in tokens],
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": [{self._text(token): value for token, value in sampled.top} for sampled in tokens],
            "text_offset": [sampled.text_offset for sampled in tokens],
        }

    def _top_entries(self, sampled: SampledToken) -> list[dict[str, object]]:
        return [self._token_entry(token, value) for token, value in sampled.top]

    def _token_entry(self, token: int, logprob: float | None) -> dict[str, object]:
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
    """A conversation with one user's model; with ``plain``, independent texts that the model continues."""

    engine: Engine
    user: str
    plain: bool
    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: tuple[str, list[int], str] | None = None
    """The last answer: its user, the prompt's tokens and the text."""

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
        """Answer a message and add both to the conversation; with ``plain`` continue the text instead.

        Args:
            text: The message.
            show: Called with each piece of the answer as it is generated.

        Returns:
            The whole answer.

        Raises:
            DataError: The conversation is too long, or the base's template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._prompt(text)
        answer = self._generate(self.engine, self.user, prompt, show)
        if not self.plain:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.last = (self.user, prompt, answer)  # from which `route` shows the experts of each token
        return answer

    def compare(self, models: Mapping[str, tuple[Engine, str]], text: str) -> dict[str, str]:
        """Return the answers of several models to the same message, without adding them to the conversation.

        Args:
            models: By title of each answer, the engine that generates it, and the user whose model answers.
            text: The message.

        Returns:
            The answers by title.

        Raises:
            DataError: The conversation is too long, or the base's template refuses it.
        """
        prompt = self._prompt(text)

        def ignore(_piece: str) -> None:
            """Do not show pieces of text, since only whole answers are returned."""

        return {title: self._generate(engine, name, prompt, ignore) for title, (engine, name) in models.items()}

    def route(self) -> Routing:
        """Return the expert that each token of the last answer was routed to.

        Raises:
            DataError: There is no answer yet, or no router.
        """
        user, prompt, answer = self.last or ("", [], "")  # None before the first answer
        if not answer:
            raise DataError("/route: no answer yet, or an empty one")
        tokens: Any = self.engine.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return self.engine.route(user, prompt, list(tokens))

    def _prompt(self, text: str) -> list[int]:
        if self.plain:
            return self.prompts.of_texts(text)[0]  # one text, so one prompt
        return self.prompts.of_messages([*self.messages, {"role": "user", "content": text}])

    def _generate(self, engine: Engine, name: str, prompt: list[int], show: Callable[[str], object]) -> str:
        """Generate an answer with an engine that has no other requests, and return the whole text.

        Args:
            engine: Generates the tokens. To compare models, it may be another engine than the conversation's.
            name: User whose model answers.
            prompt: The prompt's tokens.
            show: Called with each piece of text.

        Raises:
            TooLongError: The conversation and the answer exceed the context; the message says what to do.
        """
        texts: list[str] = []

        def on_piece(piece: Piece) -> None:
            texts.append(piece.text)
            show(piece.text)

        sampling = self._sampling(engine, len(prompt))
        request = Request(name=name, prompt=prompt, sampling=sampling, on_piece=on_piece, continues=self.plain)
        try:
            engine.submit(request)
        except TooLongError as error:
            advice = "start a new conversation with /clear" if self.messages else "give a shorter text"
            raise TooLongError(f"{error}; {advice}") from None
        try:
            while engine.busy:
                engine.step()
        except BaseException:  # Ctrl-C cancels the answer only.
            engine.fail_all(InterruptedError())
            raise
        return "".join(texts)

    def _sampling(self, engine: Engine, prompt_tokens: int) -> Sampling:
        """Return the sampling settings of an answer.

        Args:
            engine: Generates the tokens; its context limits their number.
            prompt_tokens: Number of tokens in the prompt.
        """
        max_new_tokens = self.max_tokens
        if engine.context_length is not None:
            max_new_tokens = min(max_new_tokens, engine.context_length - prompt_tokens)
        return Sampling(
            max_new_tokens=max(1, max_new_tokens),  # without room for one, the engine reports the error
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=50 if self.temperature else 0,  # transformers' default; temperature 0 does not sample
            eos_token_id=None if self.plain else self.prompts.chat_ends(),
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )
