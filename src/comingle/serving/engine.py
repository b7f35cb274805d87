"""Continuous batching over all users' models.

A step reads the prompts of waiting requests while rows are free, and then generates a token for every row. The engine
knows neither threads nor the network: :mod:`comingle.serving.schemas` calls ``step``, and :mod:`comingle.serving.api`
submits requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from comingle.models.ensembles import cache_name
from comingle.models.generation import (
    UNFINISHED,
    Sampling,
    added_text,
    can_pad,
    decodable_suffix,
    max_positions,
    padded_attention,
    row_processors,
    stop_tokens,
    truncate_at,
)
from comingle.models.hardware import without_compiling
from comingle.models.personal import PersonalModel
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.models.routing import Routing
from comingle.serving.rows import RowCache, rows_of
from comingle.utils.errors import DataError, require_user


class TooLongError(DataError):
    """Prompt and new tokens exceed the base's context length."""


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """A sampled token.

    Args:
        token: The token.
        logprob: Its log probability under the model, before temperature and other settings; None if not requested.
        top: The most likely tokens with theirs, in descending order.
        text_offset: Length of the text before the token, in characters.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


class TokenSampler:
    """Samples the tokens of one text as transformers' ``generate`` does, with a random stream of its own."""

    def __init__(
        self, sampling: Sampling, prompt_tokens: int, ends: tuple[int, ...], device: torch.device, logprobs: int | None
    ) -> None:
        """Create the sampler of a text that has not begun.

        Args:
            sampling: How tokens are sampled.
            prompt_tokens: Number of tokens in the prompt.
            ends: Tokens that end the text.
            device: Device of the logits.
            logprobs: Number of most likely tokens to return with each token; None for no log probabilities.
        """
        # Temperature, top-k and so on. If sampling is on, the last one draws a token and sets all other scores to -inf.
        self.process_scores: Callable[..., Tensor] = row_processors(sampling, prompt_tokens, ends, device)
        self.has_processors = bool(self.process_scores)  # the list of processors may be empty
        self.device, self.logprobs = device, logprobs

    def __call__(self, logits: Float[Tensor, " vocab"], tokens: list[int]) -> SampledToken:
        """Return the token that follows ``tokens``, prompt included, from the logits after the last of them."""
        scores = logits.float().unsqueeze(0)
        if self.has_processors:
            scores = self.process_scores(torch.tensor([tokens], device=self.device), scores.clone())
        # If sampling is on, the last processor has drawn the token: all other scores are minus infinity.
        token = int(scores.argmax())
        if self.logprobs is None:
            return SampledToken(token=token)
        log_probs = logits.float().log_softmax(-1)
        top_pairs: tuple[tuple[int, float], ...] = ()
        if self.logprobs:  # 0 asks for the log probability of the token alone
            top = log_probs.topk(self.logprobs)
            top_pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return SampledToken(token=token, logprob=float(log_probs[token]), top=top_pairs)


class Detokenizer:
    """Incremental detokenizer of one answer.

    It returns complete characters only, and holds back text that may be the beginning of a stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        *,
        ends: Sequence[int],
        after: Sequence[int] = (),
    ) -> None:
        """Create the detokenizer of a text that has not begun.

        Args:
            tokenizer: Decodes the tokens.
            stops: Strings that end the text.
            ends: Tokens that end the text.
            after: Tokens before the text, which decide whether the text begins with a space; the last few suffice.
        """
        self.tokenizer, self.stops, self.ends = tokenizer, tuple(stops), frozenset(ends)
        self.tokens = list(after)
        # tokens[:read] are decoded; tokens[context_start:read] are decoded again together with the next ones.
        self.read, self.context_start = len(after), 0
        self.text = ""
        self.emitted = 0  # number of characters of the text that were returned
        self.stopped = False  # whether a token or a string has ended the text

    def add(self, token: int) -> str:
        """Add a token and return the new text that no later token can change; it may be empty."""
        self.tokens.append(token)
        self._read(last=token in self.ends)
        self.stopped = token in self.ends or any(stop in self.text for stop in self.stops)
        return self.finish() if self.stopped else self._emit(len(self.text) - self._num_held_back())

    def finish(self) -> str:
        """Return the rest of the text up to a stop string."""
        self._read(last=True)
        self.text = truncate_at(self.text, self.stops)
        return self._emit(len(self.text))

    def _read(self, *, last: bool) -> None:
        """Decode the tokens that are not decoded yet, and append their text to ``self.text``.

        Some tokenizers drop a space at the beginning of a text. So the new tokens are decoded together with the tokens
        before them (from ``context_start``), and only the text that the new tokens add is appended.

        Args:
            last: Whether no token follows; otherwise tokens that end within a character wait for the next one.
        """
        added = added_text(self.tokenizer, self.tokens[self.context_start : self.read], self.tokens[self.read :])
        if added.endswith(UNFINISHED) and not last:  # part of a character, which the next token may complete
            return
        self.text += added
        # Next time, the tokens decoded now are the context, unless they are special tokens, which have no text.
        if self._decode(self.read, len(self.tokens)):
            self.context_start = self.read
        self.read = len(self.tokens)

    def _decode(self, start: int, stop: int) -> str:
        return str(self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=True))

    def _num_held_back(self) -> int:
        """Return the number of characters at the end of the text that may be the beginning of a stop string.

        These characters are held back until later tokens show whether the stop string is complete.
        """
        longest = 0
        for stop in self.stops:
            for length in range(1, min(len(stop), len(self.text) + 1)):
                if self.text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest

    def _emit(self, upto: int) -> str:
        """Return the text up to a position that has not been returned before."""
        start, self.emitted = self.emitted, max(self.emitted, upto)
        return self.text[start : self.emitted]


logger = logging.getLogger("comingle")

PROMPT_TOKENS = 2048
"""Limit on prompt tokens, with padding, in one forward pass; rows being generated wait for it."""

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Result of one step for one text: a token, newly certain text, and at the end why the text has ended."""

    text: str
    sampled: SampledToken | None = None
    finish: Finish | None = None
    error: Exception | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """A text to continue with a user's model.

    Args:
        name: The user.
        prompt: The prompt's tokens.
        sampling: How tokens are sampled.
        on_piece: Called with each piece, in the thread that calls :meth:`Engine.step`.
        logprobs: Number of most likely tokens to return with each token's log probability; None for no probabilities.
        continues: Whether the text continues the prompt's, so that it may begin with a space. An answer does not.
        cancelled: Set to free the row before the next step.
    """

    name: str
    prompt: list[int]
    sampling: Sampling
    on_piece: Callable[[Piece], None]
    logprobs: int | None = None
    continues: bool = False
    cancelled: bool = False


@dataclass(eq=False, kw_only=True)
class _Row:
    request: Request
    sampler: TokenSampler
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Generates text with the models of one run's users over one base in memory."""

    def __init__(self, models: Mapping[str, PersonalModel], *, rows: int) -> None:
        """Create an engine without requests.

        Args:
            models: Model by user; all have the same base.
            rows: Largest number of texts that are generated at the same time, one per row of a batch.
        """
        base = next(iter(models.values())).model.base
        assert base.tokenizer is not None
        self.models, self.tokenizer, self.device = dict(models), base.tokenizer, base.device
        self.begin = base.begin  # the begin-of-text token; None if texts have none
        # Rows of different lengths need padding, which not all architectures support.
        max_rows = rows if can_pad(base.model) else 1
        self.rows = rows_of(models, max_rows)
        self.network = self.rows.network
        self.cache = RowCache(max_rows)
        self.active: list[_Row] = []
        self.waiting: deque[Request] = deque()
        self.context_length = max_positions(base.model)
        # Not all architectures have these two arguments. `logits_to_keep=1` computes the logits of the last token only.
        known = signature(self.network.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._takes_position_ids = "position_ids" in known
        self._is_bound = False  # whether the network has the adapters of the active rows

    # ------------------------------------------------------------ asked from outside

    def check(self, request: Request) -> None:
        """Check that a request can be answered.

        Raises:
            DataError: There is no such user or no prompt.
            TooLongError: Prompt and new tokens exceed the base's context length.
        """
        require_user(request.name, self.models)
        if not request.prompt:
            raise DataError("the prompt has no tokens")
        longest = len(request.prompt) + request.sampling.max_new_tokens
        if self.context_length is not None and longest > self.context_length:
            new = request.sampling.max_new_tokens
            raise TooLongError(
                f"the prompt has {len(request.prompt):,} tokens, and {new:,} new ones are requested; allowed together: "
                f"{self.context_length:,}"
            )

    def submit(self, request: Request) -> None:
        """Queue a request, which :meth:`step` answers.

        Raises:
            DataError: There is no such user or no prompt.
            TooLongError: Prompt and new tokens exceed the base's context length.
        """
        self.check(request)
        self.waiting.append(request)

    def replace(self, personal: PersonalModel) -> None:
        """Replace a user's model, or add one, for requests that begin later; its tensors have the shapes of the others.

        Call it between two steps.
        """
        self.models[personal.name] = personal
        self.rows.replace(personal)

    def ends(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that end an answer."""
        return stop_tokens(self.network, self.tokenizer, request.sampling)

    def route(self, name: str, prompt: list[int], text: list[int]) -> Routing:
        """Return how a user's model routes the tokens of ``text``.

        Call it between two steps, as it uses the network with another batch.

        Args:
            name: The user.
            prompt: Tokens before the text.
            text: The tokens.

        Raises:
            DataError: The model has no routers.
        """
        self._is_bound = False  # the next step has to bind the adapters of its rows again
        tokens = torch.tensor([*prompt, *text])
        # One pass over all tokens; the prompt has the begin-of-text token already.
        routing = self.models[name].route(tokens, context=len(tokens), begins=False)
        start = len(prompt)
        return Routing(tokens=routing.tokens[start:], experts=routing.experts, gates=routing.gates[:, start:])

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.cache.max_rows - len(self.active)

    @property
    def busy(self) -> bool:
        """Whether a step has work to do."""
        return bool(self.active or self.waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Free the rows of cancelled requests, read waiting prompts, and generate a token for every row."""
        # From the last row on: freeing a row moves the last row, which is checked by then, into its place.
        for number in reversed(range(len(self.active))):
            if self.active[number].request.cancelled:
                self._free_row(number)
        # Lengths change with every token, so compiling for each would cost more than it saves.
        with without_compiling(), padded_attention(self.network):
            self._add_waiting()
            if self.active:
                self._decode()

    def fail_all(self, error: Exception) -> None:
        """Answer all requests with an error and free all rows."""
        for request in [*(row.request for row in self.active), *self.waiting]:
            request.on_piece(Piece(text="", error=error))
        self.active, self._is_bound = [], False
        self.waiting.clear()
        self.cache = RowCache(self.cache.max_rows)

    # ------------------------------------------------------------ a step

    def _add_waiting(self) -> None:
        """Read the prompts of waiting requests in one forward pass, and add a row with its first token for each.

        Requests wait for the next step if no row is free, or if the padded prompts of the pass would have more than
        :data:`PROMPT_TOKENS` tokens. A pass has at least one prompt, whatever its length.
        """
        admitted: list[Request] = []
        while self.waiting and len(self.active) + len(admitted) < self.cache.max_rows:
            if self.waiting[0].cancelled:
                self.waiting.popleft()
                continue
            longest = max(len(request.prompt) for request in [*admitted, self.waiting[0]])
            if admitted and longest * (len(admitted) + 1) > PROMPT_TOKENS:
                break
            admitted.append(self.waiting.popleft())
        if not admitted:
            return
        first = len(self.active)
        self.active += [self._make_row(request) for request in admitted]
        for number, request in enumerate(admitted, start=first):
            self.rows.set(number, request.name)
        self.rows.bind(slice(first, first + len(admitted)))
        self._is_bound = False  # the network has the adapters of the new rows only
        lengths = [len(request.prompt) for request in admitted]
        prompt_cache = DynamicCache()
        logits = self._read_prompts(admitted, lengths, prompt_cache)
        self.cache.join(prompt_cache, lengths)
        self._emit(first, logits)

    def _make_row(self, request: Request) -> _Row:
        """Return the state of a text that is to be generated: its sampler, its detokenizer and the prompt's tokens."""
        ends = self.ends(request)
        sampler = TokenSampler(request.sampling, len(request.prompt), ends, self.device, request.logprobs)
        # The end of the prompt decides whether a text that continues it begins with a space.
        after = decodable_suffix(self.tokenizer, request.prompt) if request.continues else ()
        detokenizer = Detokenizer(self.tokenizer, request.sampling.stop, ends=ends, after=after)
        return _Row(request=request, sampler=sampler, detokenizer=detokenizer, tokens=list(request.prompt))

    def _read_prompts(
        self, requests: list[Request], lengths: list[int], cache: DynamicCache
    ) -> Float[Tensor, "rows vocab"]:
        """Return the logits after each prompt, from one forward pass over all left-padded prompts.

        Args:
            requests: The requests.
            lengths: Numbers of tokens of their prompts.
            cache: An empty cache, to which keys and values of the prompts are written.
        """
        width = max(lengths)
        # Padding may be any token, here 0: the mask excludes it.
        ids = torch.tensor([[0] * (width - len(request.prompt)) + request.prompt for request in requests])
        mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)  # 0, 1, ... from the prompt's first token; 0 for padding
        return self._forward(ids, mask, position_ids, cache)

    def _decode(self) -> None:
        """Generate a token for every row, in one forward pass."""
        if not self._is_bound:  # rows were added or freed, so the network has the adapters of other rows
            self.rows.bind(slice(0, len(self.active)))
            self._is_bound = True
        ids = torch.tensor([[row.tokens[-1]] for row in self.active])
        position_ids = self.cache.lengths().unsqueeze(1)
        logits = self._forward(ids, self.cache.mask(), position_ids, self.cache)
        self.cache.advance()
        self._emit(0, logits)  # from row 0 on: every row gets a token

    def _forward(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: object) -> Float[Tensor, "rows vocab"]:
        """Return the logits after each row's last token; the network appends keys and values to the cache.

        Args:
            ids: Token IDs, ``(rows, tokens)``.
            mask: 1 for tokens of the row, cached ones included; 0 for padding.
            position_ids: Positions of ``ids`` in their rows.
            cache: Keys and values of earlier tokens.
        """
        options: dict[str, Any] = {"position_ids": position_ids.to(self.device)} if self._takes_position_ids else {}
        out = self.network(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device, torch.long),
            use_cache=True,
            **{cache_name(type(self.network)): cache},
            **options,
            **self._options,
        )
        return out.logits[:, -1]  # all rows end at the last position

    def _emit(self, first: int, logits: Float[Tensor, "rows vocab"]) -> None:
        """Sample a token for each row from ``first`` on, pass it to the request, and free rows that have finished."""
        # From the last row on: freeing a row moves the last row into its place, and the last row has its token by then.
        for number in reversed(range(first, len(self.active))):
            row = self.active[number]
            try:
                piece = self._next_piece(row, row.sampler(logits[number - first], row.tokens))
            except Exception as error:  # Other rows are not affected.
                logger.exception("failed to sample a token for %r", row.request.name)
                row.request.on_piece(Piece(text="", error=error))
                self._free_row(number)
                continue
            row.request.on_piece(piece)
            if piece.finish:
                self._free_row(number)

    def _next_piece(self, row: _Row, sampled: SampledToken) -> Piece:
        """Append a token to a row; return it with the text that it completes, and the reason if the text has ended."""
        row.tokens.append(sampled.token)
        sampled = replace(sampled, text_offset=len(row.detokenizer.text))  # where the token's text begins
        text = row.detokenizer.add(sampled.token)
        if row.detokenizer.stopped:
            return Piece(text=text, sampled=sampled, finish="stop")
        if len(row.tokens) - len(row.request.prompt) >= row.request.sampling.max_new_tokens:
            return Piece(text=text + row.detokenizer.finish(), sampled=sampled, finish="length")
        return Piece(text=text, sampled=sampled)

    def _free_row(self, number: int) -> None:
        """Remove a row whose text has ended or was cancelled.

        The last row moves into its place, so that the active rows stay contiguous.
        """
        last = len(self.active) - 1
        self.cache.leave(number)
        if number != last:
            self.rows.move(last, number)
        self.active[number] = self.active[last]
        self.active.pop()
        self._is_bound = False  # so that the next step binds the adapters of the remaining rows
