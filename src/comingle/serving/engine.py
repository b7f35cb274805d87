"""Continuous batching over all users' models.

A step reads the prompts of waiting requests while rows are free, and then generates a token for every row. The engine
knows neither threads nor the network: :mod:`comingle.serving.schemas` calls ``step``, and :mod:`comingle.serving.api`
submits requests.
"""

from __future__ import annotations

import logging
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from comingle.models import decoding
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
from comingle.models.kernels.expert_mlp import MOST_ROWS
from comingle.models.personal import PersonalModel
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.models.routing import Routing
from comingle.serving.rows import RowCache, rows_of
from comingle.utils.errors import ComingleError, DataError, require_user


class TooLongError(DataError):
    """Prompt and new tokens exceed the base's context length."""


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """A sampled token.

    Args:
        token: ID of the token.
        logprob: Its log probability before temperature and other settings are applied; None if not requested.
        top: ID and log probability of the most likely tokens, most likely first.
        text_offset: Length of the text before the token, in characters.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


class TokenSampler:
    """Samples the tokens of one text as transformers' ``generate`` does, with its own random generator."""

    def __init__(
        self,
        sampling: Sampling,
        num_prompt_tokens: int,
        end_tokens: tuple[int, ...],
        device: torch.device,
        num_top_logprobs: int | None,
    ) -> None:
        """Create the sampler.

        Args:
            sampling: Temperature, top-k and so on.
            num_prompt_tokens: Number of tokens in the prompt.
            end_tokens: Tokens that end the text.
            device: Device of the logits.
            num_top_logprobs: How many of the most likely tokens to return with their log probabilities at each step; 0
                to return only that of the sampled token, None to return no log probabilities.
        """
        # transformers' logits processors. With temperature 0 the list is empty if no other setting changes the scores.
        self.process_scores: Callable[..., Tensor] = row_processors(sampling, num_prompt_tokens, end_tokens, device)
        self.has_processors = bool(self.process_scores)
        self.device, self.num_top_logprobs = device, num_top_logprobs

    def __call__(self, logits: Float[Tensor, " vocab"], tokens: list[int]) -> SampledToken:
        """Sample the token that follows ``tokens``.

        Args:
            logits: The network's output after the last token.
            tokens: The prompt and all tokens generated so far.
        """
        scores = logits.float().unsqueeze(0)
        if self.has_processors:
            scores = self.process_scores(torch.tensor([tokens], device=self.device), scores.clone())
        # If the temperature is not 0, the last processor draws a token and sets the scores of all others to -inf.
        token = int(scores.argmax())
        if self.num_top_logprobs is None:
            return SampledToken(token=token)
        log_probs = logits.float().log_softmax(-1)
        top_pairs: tuple[tuple[int, float], ...] = ()
        if self.num_top_logprobs > 0:
            top = log_probs.topk(self.num_top_logprobs)
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
            after: The prompt's last tokens, if the text continues the prompt. Some tokenizers drop the space at the
                beginning of a text; with tokens before it the space stays.
        """
        self.tokenizer, self.stops, self.ends = tokenizer, tuple(stops), frozenset(ends)
        self.tokens = list(after)
        self.num_decoded = len(after)  # tokens[:num_decoded] are decoded
        self.context_start = 0  # tokens[context_start:num_decoded] are decoded again together with the next tokens
        self.text = ""
        self.num_returned = 0  # text[:num_returned] was returned to the caller
        self.stopped = False  # whether a token or a string has ended the text

    def add(self, token: int) -> str:
        """Add a token and return the new text that no later token can change; it may be empty."""
        is_end_token = token in self.ends
        self.tokens.append(token)
        self._decode_new_tokens(is_last=is_end_token)
        self.stopped = is_end_token or any(stop in self.text for stop in self.stops)
        if self.stopped:
            return self.finish()
        return self._take_text(len(self.text) - self._num_held_back())

    def finish(self) -> str:
        """Return the text that :meth:`add` has not returned, up to the first stop string."""
        self._decode_new_tokens(is_last=True)
        self.text = truncate_at(self.text, self.stops)
        return self._take_text(len(self.text))

    def _decode_new_tokens(self, *, is_last: bool) -> None:
        """Decode the tokens that are not decoded yet, and append their text to ``self.text``.

        Args:
            is_last: Whether no token follows. Otherwise, tokens that end within a character are decoded with the next.
        """
        context = self.tokens[self.context_start : self.num_decoded]
        new_tokens = self.tokens[self.num_decoded :]
        # Some tokenizers drop a space at the beginning of a text. So context and new tokens are decoded together.
        new_text = added_text(self.tokenizer, context, new_tokens)
        if new_text.endswith(UNFINISHED) and not is_last:
            return
        self.text += new_text
        has_text = bool(self.tokenizer.decode(new_tokens, skip_special_tokens=True))
        if has_text:  # else they are special tokens, and the earlier context is kept
            self.context_start = self.num_decoded  # the next tokens are decoded together with these
        self.num_decoded = len(self.tokens)

    def _num_held_back(self) -> int:
        """Return the number of characters at the end of the text that may be the beginning of a stop string.

        For the text "Hello wo" and the stop string "world" it is 2.
        """
        longest = 0
        for stop in self.stops:
            for length in range(1, min(len(stop), len(self.text) + 1)):
                if self.text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest

    def _take_text(self, end: int) -> str:
        """Return the part of ``text[:end]`` that was not returned before."""
        start = self.num_returned
        self.num_returned = max(start, end)
        return self.text[start : self.num_returned]


logger = logging.getLogger("comingle")

PROMPT_TOKENS = 2048
"""Largest number of prompt tokens, with padding, in one forward pass."""

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Result of one step of the engine for one text.

    Args:
        text: New text; empty if the token only begins a character or a stop string.
        sampled: The token; None if there is an error.
        finish: Why the text has ended; None if it has not.
        error: The error that has ended the text.
    """

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
        logprobs: How many of the most likely tokens to return with their log probabilities at each step; 0 to return
            only that of the sampled token, None to return no log probabilities.
        continues: Whether the text continues the prompt's text, rather than answers it; then it may begin with a space.
        cancelled: Set to True to stop the generation before the next step.
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
    """A row of the batch: a text that is being generated. ``tokens`` begins with the prompt."""

    request: Request
    sampler: TokenSampler
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Generates texts with the users' models, one text per row of a batch; all models share one base."""

    def __init__(self, models: Mapping[str, PersonalModel], *, rows: int, cache_bytes: int | None = None) -> None:
        """Create an engine without requests.

        Args:
            models: Model by user; all have the same base.
            rows: Largest number of texts that are generated at the same time, one per row of a batch.
            cache_bytes: Size of the adapters in memory besides those of rows, if ``models`` are read from disk on
                access; None if they are in memory.
        """
        any_model = next(iter(models.values())).model
        base = any_model.base
        assert base.tokenizer is not None
        # Models that are read from disk stay there; those of `replace` are in memory.
        self.models: MutableMapping[str, PersonalModel] = ChainMap({}, cast(Any, models))
        self.tokenizer, self.device = base.tokenizer, base.device
        self.routed = any_model.routed  # whether the models have routers
        self.begin = base.begin  # the begin-of-text token; None if texts have none
        # Rows of different lengths need padding, which not all architectures support.
        max_rows = rows if can_pad(base.model) else 1
        self.row_adapters = rows_of(models, max_rows, cache_bytes)  # a copy of the adapters of each row's user
        self.network = self.row_adapters.network
        self.cache = RowCache(max_rows)  # the keys and values of each row
        self.active: list[_Row] = []
        self.waiting: deque[Request] = deque()
        self.context_length = max_positions(base.model)
        # Not all architectures have these two arguments.
        forward_arguments = signature(self.network.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in forward_arguments
        self._takes_position_ids = "position_ids" in forward_arguments
        self._all_rows_bound = False  # whether the network uses the adapters of all active rows
        self._native_step: decoding.DecodingStep | None = None  # None if native code does not support the network

    # ------------------------------------------------------------ asked from outside

    def raise_unless_valid(self, request: Request) -> None:
        """Raise an error if a request cannot be answered.

        Raises:
            DataError: There is no such user or no prompt.
            TooLongError: Prompt and new tokens exceed the base's context length.
        """
        require_user(request.name, self.models)
        num_prompt_tokens, max_new_tokens = len(request.prompt), request.sampling.max_new_tokens
        if num_prompt_tokens == 0:
            raise DataError("the prompt has no tokens")
        if self.context_length is not None and num_prompt_tokens + max_new_tokens > self.context_length:
            raise TooLongError(
                f"the prompt has {num_prompt_tokens:,} tokens, and {max_new_tokens:,} new ones are requested; "
                f"allowed together: {self.context_length:,}"
            )

    def submit(self, request: Request) -> None:
        """Append a request to the queue, from which :meth:`step` takes it.

        Raises:
            DataError: There is no such user or no prompt.
            TooLongError: Prompt and new tokens exceed the base's context length.
        """
        self.raise_unless_valid(request)
        self.waiting.append(request)

    def replace(self, personal: PersonalModel) -> None:
        """Replace or add a user's model. Texts that are being generated continue with the old model.

        Not to be called during :meth:`step`.

        Args:
            personal: The new model; its tensors have the same shapes as the other users'.
        """
        self.models[personal.name] = personal
        self.row_adapters.replace(personal)

    def ends(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that end the answer to a request."""
        return stop_tokens(self.network, self.tokenizer, request.sampling)

    def route(self, name: str, prompt: list[int], text: list[int]) -> Routing:
        """Return how a user's model routes each token of ``text``.

        Not to be called during :meth:`step`, since it binds the user's adapters to the network.

        Args:
            name: The user.
            prompt: Tokens before the text, which begin with the begin-of-text token if the base has one.
            text: Tokens of the text.

        Raises:
            DataError: The model has no routers.
        """
        self._all_rows_bound = False  # the next step binds the adapters of the active rows again
        tokens = torch.tensor([*prompt, *text])
        one_pass = len(tokens)  # all tokens in one forward pass
        routing = self.models[name].route(tokens, context=one_pass, begins=False)  # adds no begin-of-text token
        text_start = len(prompt)
        return Routing(tokens=routing.tokens[text_start:], experts=routing.experts, gates=routing.gates[:, text_start:])

    @property
    def num_free_rows(self) -> int:
        """Number of rows of the batch that have no text."""
        return self.cache.max_rows - len(self.active)

    @property
    def busy(self) -> bool:
        """True if any text is being generated or waits for a row."""
        return bool(self.active or self.waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Do one step of continuous batching: generate the next token of every text in the batch.

        First, texts of cancelled requests are removed from the batch, and waiting requests take the free rows.
        """
        # In reverse order, since freeing a row moves the last row to its index.
        for row_index in reversed(range(len(self.active))):
            if self.active[row_index].request.cancelled:
                self._free_row(row_index)
        # The cache grows with every token, so compiled code would be compiled again in each step.
        with without_compiling(), padded_attention(self.network):
            self._start_waiting()
            if self.active:
                self._decode()

    def fail_all(self, error: Exception) -> None:
        """End all active and waiting requests with an error, and free all rows."""
        active_requests = [row.request for row in self.active]
        for request in [*active_requests, *self.waiting]:
            request.on_piece(Piece(text="", error=error))
        self.active, self._all_rows_bound = [], False
        self.waiting.clear()
        self.cache = RowCache(self.cache.max_rows)

    # ------------------------------------------------------------ a step

    def _start_waiting(self) -> None:
        """Add waiting requests to the batch, as many as fit, and generate the first token of each.

        Their prompts are read in a forward pass of their own, with the adapters of their users only; the keys and
        values of the prompts are then added to the cache of the batch.
        """
        requests = self._take_waiting()
        if not requests:
            return
        first_new_row = len(self.active)
        self.active += [self._make_row(request) for request in requests]
        for row_index, request in enumerate(requests, start=first_new_row):
            self.row_adapters.set(row_index, request.name)
        self.row_adapters.bind(slice(first_new_row, len(self.active)))
        self._all_rows_bound = False  # the network uses the adapters of the new rows only
        prompt_cache = DynamicCache()
        logits = self._read_prompts(requests, prompt_cache)
        self.cache.join(prompt_cache, [len(request.prompt) for request in requests])
        self._sample_tokens(first_new_row, logits)

    def _take_waiting(self) -> list[Request]:
        """Remove from the queue the requests whose prompts the next forward pass reads, and return them.

        It takes as many as there are free rows and as fit into :data:`PROMPT_TOKENS` after padding. If a row is free,
        it takes at least one request, however long the prompt is.
        """
        taken: list[Request] = []
        for candidate in self._next_waiting():
            if len(self.active) + len(taken) == self.cache.max_rows:
                break
            padded_length = max(len(request.prompt) for request in [*taken, candidate])
            if taken and padded_length * (len(taken) + 1) > PROMPT_TOKENS:
                break
            is_needed_now = not self.active and not taken
            if is_needed_now or self.row_adapters.user_tensors.is_loaded(candidate.name):
                self.waiting.remove(candidate)
                if self._load_adapters(candidate):
                    taken.append(candidate)
        return taken

    def _next_waiting(self) -> list[Request]:
        """Return the first waiting requests, whose adapters are read from disk meanwhile; drop cancelled ones."""
        first: list[Request] = []
        for request in tuple(self.waiting):
            if len(first) == self.cache.max_rows:
                break
            if request.cancelled:
                self.waiting.remove(request)
            else:
                first.append(request)
        self.row_adapters.user_tensors.prefetch(request.name for request in first)
        return first

    def _load_adapters(self, request: Request) -> bool:
        """Load the adapters for a request; end it with an error and return False if they cannot be read."""
        try:
            self.row_adapters.user_tensors[request.name]
        except ComingleError as error:
            logger.exception("cannot read the model of %r", request.name)
            request.on_piece(Piece(text="", error=error))
            return False
        return True

    def _make_row(self, request: Request) -> _Row:
        """Return a new row for a request, with a sampler, a detokenizer and the prompt's tokens."""
        ends = self.ends(request)
        sampler = TokenSampler(request.sampling, len(request.prompt), ends, self.device, request.logprobs)
        text_before: list[int] = []
        if request.continues:  # then the text may begin with a space, depending on the tokens before it
            text_before = decodable_suffix(self.tokenizer, request.prompt)
        detokenizer = Detokenizer(self.tokenizer, request.sampling.stop, ends=ends, after=text_before)
        return _Row(request=request, sampler=sampler, detokenizer=detokenizer, tokens=list(request.prompt))

    def _read_prompts(self, requests: list[Request], cache: DynamicCache) -> Float[Tensor, "rows vocab"]:
        """Return the logits after each prompt, from one forward pass over all prompts with padding on the left.

        Args:
            requests: The requests.
            cache: An empty cache, to which the network writes the keys and values of the prompts.
        """
        lengths = [len(request.prompt) for request in requests]
        padded_length = max(lengths)
        padding_token = 0  # any token will do, since the mask excludes it
        ids = torch.tensor(
            [[padding_token] * (padded_length - len(request.prompt)) + request.prompt for request in requests]
        )
        mask = torch.arange(padded_length) >= padded_length - torch.tensor(lengths).unsqueeze(1)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)  # 0, 1, ... from the prompt's first token; 0 for padding
        return self._forward(ids, mask, position_ids, cache)

    def _decode(self) -> None:
        """Generate a token for every row, in one forward pass."""
        if not self._all_rows_bound:  # rows were added or freed since the adapters were bound
            self.row_adapters.bind(slice(0, len(self.active)))
            self._all_rows_bound = True
            self._native_step = self._make_native_step()
        ids = torch.tensor([[row.tokens[-1]] for row in self.active])
        position_ids = self.cache.lengths().unsqueeze(1)  # (rows, 1): one new token per row
        if self._native_step is not None:
            logits = self._native_step(ids, position_ids, self.cache)
        else:
            logits = self._forward(ids, self.cache.mask(), position_ids, self.cache)
        self.cache.advance()
        self._sample_tokens(0, logits)

    def _make_native_step(self) -> decoding.DecodingStep | None:
        """Return the native step of the network for the rows that are bound; None if it does not support them."""
        num_rows = len(self.active)
        if num_rows > MOST_ROWS or self.row_adapters.mixes_predictions or not decoding.supports(self.network):
            return None
        return decoding.DecodingStep(self.network, num_rows)

    def _forward(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: object) -> Float[Tensor, "rows vocab"]:
        """Return the logits after each row's last token; the network appends keys and values to the cache.

        Args:
            ids: Token IDs, ``(rows, tokens)``.
            mask: 1 for tokens of the row, cached ones included; 0 for padding.
            position_ids: Positions of ``ids`` in their rows.
            cache: Keys and values of earlier tokens.
        """
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "attention_mask": mask.to(self.device, torch.long),
            "use_cache": True,
            cache_name(type(self.network)): cache,  # "past_key_values", or "cache" in newer versions of transformers
        }
        if self._takes_position_ids:
            arguments["position_ids"] = position_ids.to(self.device)
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1  # compute the logits of the last token only
        return self.network(**arguments).logits[:, -1]

    def _sample_tokens(self, first_row: int, logits: Float[Tensor, "rows vocab"]) -> None:
        """Sample a token for each row, pass it to the row's request, and free rows whose text has ended.

        Args:
            first_row: The first row that gets a token; all later rows get one too.
            logits: Logits of these rows.
        """
        # In reverse order, since freeing a row moves the last row to its index.
        for row_index in reversed(range(first_row, len(self.active))):
            row = self.active[row_index]
            try:
                sampled = row.sampler(logits[row_index - first_row], row.tokens)
                piece = self._add_token(row, sampled)
            except Exception as error:  # ends the text of this row only
                logger.exception("failed to sample a token for %r", row.request.name)
                row.request.on_piece(Piece(text="", error=error))
                self._free_row(row_index)
                continue
            row.request.on_piece(piece)
            if piece.finish:
                self._free_row(row_index)

    def _add_token(self, row: _Row, sampled: SampledToken) -> Piece:
        """Append a token to a row, and return it with the new text and the reason if the text has ended."""
        row.tokens.append(sampled.token)
        sampled = replace(sampled, text_offset=len(row.detokenizer.text))  # where the token's text begins
        new_text = row.detokenizer.add(sampled.token)
        if row.detokenizer.stopped:
            return Piece(text=new_text, sampled=sampled, finish="stop")
        num_new_tokens = len(row.tokens) - len(row.request.prompt)
        if num_new_tokens >= row.request.sampling.max_new_tokens:
            new_text += row.detokenizer.finish()
            return Piece(text=new_text, sampled=sampled, finish="length")
        return Piece(text=new_text, sampled=sampled)

    def _free_row(self, row_index: int) -> None:
        """Remove a text that has ended or was cancelled from the batch, so that its row can generate another.

        The last row moves to its index, so that there is no gap between the remaining rows.

        Args:
            row_index: Index of the text's row in the batch.
        """
        last = len(self.active) - 1
        self.cache.leave(row_index)
        if row_index != last:
            self.row_adapters.move(last, row_index)
        self.active[row_index] = self.active[last]
        self.active.pop()
        self._all_rows_bound = False  # the next step makes the network use the adapters of the remaining rows
