"""A chat without a screen: whose turn it is, what was said, and what the next tokens are."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from comingle.models.generation import Sampling
from comingle.models.routing import Routing
from comingle.serving.answers import Prompts
from comingle.serving.engine import Engine, Piece, Request
from comingle.utils.errors import DataError, require_user

Show = Callable[[str], None]
"""Is handed the text as it comes."""


@dataclass(kw_only=True)
class Chat:
    """A conversation with one of the people of an engine, or plain texts that are continued where ``plain``."""

    engine: Engine
    user: str
    plain: bool
    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: tuple[str, list[int], str] | None = None
    """Of the last answer: who gave it, after which tokens, and what."""

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.engine.people[self.user].model.base)

    def switch(self, user: str) -> None:
        """Speak with somebody else, about what has been said.

        Raises:
            DataError: nobody of that name.
        """
        self.user = require_user(user, list(self.engine.people))

    def clear(self) -> None:
        """Begin anew."""
        self.messages, self.last = [], None

    def say(self, text: str, show: Show) -> str:
        """What the user's model answers, shown as it comes.

        Raises:
            DataError: it is too long, or the base's template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._prompt(text)
        answer = self._answer(self.engine, self.user, prompt, show)
        if not self.plain:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.last = (self.user, prompt, answer)
        return answer

    def compare(self, models: Mapping[str, tuple[Engine, str]], text: str) -> dict[str, str]:
        """What several models say to the same words at the same place of the conversation, each by its title.

        Raises:
            DataError: as :meth:`say`.
        """
        prompt = self._prompt(text)
        return {title: self._answer(engine, name, prompt, str) for title, (engine, name) in models.items()}

    def route(self) -> Routing:
        """Where the tokens of the last answer went.

        Raises:
            DataError: there is no answer yet, or no router.
        """
        if self.last is None or not self.last[2]:
            raise DataError("/route: no answer yet, or an empty one")
        user, prompt, answer = self.last
        tokens: Any = self.engine.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return self.engine.route(user, prompt, list(tokens))

    def _prompt(self, text: str) -> list[int]:
        if self.plain:
            return self.prompts.of_texts(text)[0]
        return self.prompts.of_messages([*self.messages, {"role": "user", "content": text}])

    def _answer(self, engine: Engine, name: str, prompt: list[int], show: Callable[[str], Any]) -> str:
        said: list[str] = []

        def tell(piece: Piece) -> None:
            said.append(piece.text)
            show(piece.text)

        sampling = self._sampling(engine, len(prompt))
        request = Request(name=name, prompt=prompt, sampling=sampling, tell=tell, continues=self.plain)
        engine.submit(request)
        try:
            while engine.busy:
                engine.step()
        except BaseException:  # Ctrl-C ends an answer, and no more than that
            engine.drop(InterruptedError())
            raise
        return "".join(said)

    def _sampling(self, engine: Engine, prompt: int) -> Sampling:
        room = self.max_tokens if engine.most_tokens is None else min(self.max_tokens, engine.most_tokens - prompt)
        return Sampling(
            max_new_tokens=max(1, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=50 if self.temperature else 0,
            eos_token_id=None if self.plain else self.prompts.chat_ends(),
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )
