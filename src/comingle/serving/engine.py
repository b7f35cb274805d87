"""Continuous batching over all users' models.

A step reads prompts of waiting requests while rows are free, up to a number of tokens, and generates a token for every
row. So a long prompt is read in several steps, and does not stall other texts. With native code a single pass reads a
part of a long prompt and generates the tokens of all rows. The engine knows neither threads nor the network:
:mod:`comingle.serving.schemas` calls ``step``, and :mod:`comingle.serving.api` submits requests.
"""

from __future__ import annotations

import logging
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
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
from comingle.models.quantised import QuantisedLinear
from comingle.models.routing import Routing
from comingle.serving.access import Limits
from comingle.serving.rows import (
    BLOCK_TOKENS,
    PrefixBlock,
    PrefixCache,
    RowCache,
    prefilled_cache,
    rows_of,
)
from comingle.utils.errors import ComingleError, DataError, require_user

logger = logging.getLogger("comingle")

PROMPT_TOKENS = {"cpu": 128}
"""Largest number of prompt tokens, with padding, that a step reads while texts are being generated, by device."""
PROMPT_TOKENS_ELSEWHERE = 2048
"""The same number for devices that are not in :data:`PROMPT_TOKENS`."""
NATIVE_PART_TOKENS = 32
"""The same number with native passes, which read small parts of prompts as fast as large ones."""
IDLE_PROMPT_TOKENS = 512
"""Smallest number of prompt tokens that a step may read while no text is being generated."""
NATIVE_PROMPT_TOKENS = 64
"""Most prompt tokens, with padding, that native passes read by themselves. PyTorch reads longer prompts about as fast,
or faster where the processor has instructions for matrices. With packed weights native passes read all prompts."""


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


Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Result of one step of the engine for one text.

    Args:
        text: New text; empty if the token only begins a character or a stop string.
        sampled: The token; None if there is an error.
        finish: Why the text has ended; None if it has not.
        error: The error that has ended the text.
        cached_tokens: With a text's first token, how many tokens of its prompt were in the cache of prefixes.
    """

    text: str
    sampled: SampledToken | None = None
    finish: Finish | None = None
    error: Exception | None = None
    cached_tokens: int = 0


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
    """A row of the batch: a text that is being generated.

    Args:
        request: The request.
        sampler: Samples its tokens.
        detokenizer: Decodes its tokens.
        prefix: The cached beginning of the prompt.
        version: Version of the user's model in the cache of prefixes.
        tokens: The prompt, and the new tokens.
        cached_tokens: Tokens of the prompt that were not read, since their keys and values were cached.
        num_read: Tokens of the prompt whose keys and values are in ``prompt_cache``.
        prompt_cache: Keys and values of a prompt that is read in several steps; else empty.
        native: Native passes of such a prompt with the user's adapters; None if native code does not read it.
    """

    request: Request
    sampler: TokenSampler
    detokenizer: Detokenizer
    prefix: list[PrefixBlock]
    version: int
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    num_read: int = 0
    prompt_cache: DynamicCache = field(default_factory=DynamicCache)
    native: decoding.NativeNetwork | None = None


class Engine:
    """Generates texts with the users' models, one text per row of a batch; all models share one base."""

    def __init__(
        self,
        models: Mapping[str, PersonalModel],
        *,
        rows: int,
        cache_bytes: int | None = None,
        prompt_tokens: int | None = None,
        prefix_bytes: int = Limits.prefix_bytes,
    ) -> None:
        """Create an engine without requests.

        Args:
            models: Model by user; all have the same base.
            rows: Largest number of texts that are generated at the same time, one per row of a batch.
            cache_bytes: Size of the adapters in memory besides those of rows, if ``models`` are read from disk on
                access; None if they are in memory.
            prompt_tokens: Largest number of prompt tokens, with padding, that a step reads while texts are being
                generated; None for a default by device (:data:`PROMPT_TOKENS`, :data:`NATIVE_PART_TOKENS`).
            prefix_bytes: Size of the cache of prompts' prefixes; 0 for none.
        """
        any_model = next(iter(models.values())).model
        base = any_model.base
        assert base.tokenizer is not None
        # Models that are read from disk stay there; those of `replace` are in memory.
        self.models: ChainMap[str, PersonalModel] = ChainMap({}, cast(Any, models))
        self.tokenizer, self.device = base.tokenizer, base.device
        self.base, self.routed = base, any_model.routed  # whether the models have routers
        self.begin = base.begin  # the begin-of-text token; None if texts have none
        # Rows of different lengths need padding, which not all architectures support.
        max_rows = rows if can_pad(base.model) else 1
        self.row_adapters = rows_of(self.models, max_rows, cache_bytes)  # a copy of the adapters of each row's user
        self.network = self.row_adapters.network
        self.cache = RowCache(max_rows)  # the keys and values of each row
        self.prefixes = PrefixCache(prefix_bytes)
        self.prompt_tokens = prompt_tokens  # None for the default
        self.active: list[_Row] = []
        self.reading: _Row | None = None  # a text whose prompt is read in several steps, with the adapters' last row
        self._has_read_part = False  # whether the last forward pass over prompts was over a part of such a prompt
        self.waiting: deque[Request] = deque()
        self.context_length = max_positions(base.model)
        # Not all architectures have these two arguments.
        forward_arguments = signature(self.network.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in forward_arguments
        self._takes_position_ids = "position_ids" in forward_arguments
        self._all_rows_bound = False  # whether the network uses the adapters of all active rows
        self._native: decoding.NativeNetwork | None = None  # None if native code does not support the network
        self._native_template: decoding.NativeNetwork | None = None  # with any adapters, to make others from it
        self._rows_changed = True  # whether rows were added or freed since `_native` was made

    # ------------------------------------------------------------ public interface

    def engine_of(self, name: str) -> Engine:
        """Return the engine of a user's model, this one; see :class:`comingle.serving.models.EnginePool`."""
        return self

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
        self.prefixes.drop(personal.name)

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
        return self.cache.max_rows - self.num_running

    @property
    def num_running(self) -> int:
        """Number of texts that have a row, including one whose prompt is being read."""
        return len(self.active) + (self.reading is not None)

    @property
    def busy(self) -> bool:
        """True if any text is being generated or waits for a row."""
        return bool(self.num_running or self.waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Do one step of continuous batching: generate the next token of every text in the batch.

        First, texts of cancelled requests are removed from the batch, and waiting requests take the free rows as far as
        their prompts may be read in this step.
        """
        # In reverse order, since freeing a row moves the last row to its index.
        for row_index in reversed(range(len(self.active))):
            if self.active[row_index].request.cancelled:
                self._free_row(row_index)
        if self.reading is not None and self.reading.request.cancelled:
            self.reading = None
        # The cache grows with every token, so compiled code would be compiled again in each step.
        with without_compiling(), padded_attention(self.network):
            prompt_batch = self._read_prompts()
            if self.active:
                self._decode(prompt_batch)

    def fail_all(self, error: Exception) -> None:
        """End all active and waiting requests with an error, and free all rows."""
        rows = self.active if self.reading is None else [*self.active, self.reading]
        for request in [*(row.request for row in rows), *self.waiting]:
            request.on_piece(Piece(text="", error=error))
        self.active, self.reading, self._all_rows_bound, self._rows_changed = [], None, False, True
        self.waiting.clear()
        self.cache = RowCache(self.cache.max_rows)

    def forget(self, name: str) -> None:
        """Drop what is in memory of a user's model, which was replaced or removed; texts go on with their rows."""
        self.row_adapters.forget(name)
        self.prefixes.drop(name)

    @property
    def num_prefix_bytes(self) -> int:
        """Size of the cache of prompts' prefixes."""
        return self.prefixes.num_bytes

    @property
    def num_adapter_bytes(self) -> int:
        """Size of the adapters in memory that may be evicted, besides those of rows."""
        return self.row_adapters.user_tensors.num_bytes

    def release(self) -> None:
        """Free the memory of keys and values; only without active texts."""
        self.cache = RowCache(self.cache.max_rows)

    # ------------------------------------------------------------ a step

    def _read_prompts(self) -> decoding.Batch | None:
        """Read prompts of waiting requests in one forward pass and generate their first tokens, or read a part of one.

        Prompts that are longer than a step may read are read in parts, in every other step; the steps between read
        shorter prompts.

        Returns:
            The part of a prompt that the native pass of :meth:`_decode` is to read; else None.
        """
        most = self.prompt_tokens or self._default_prompt_tokens()
        if not self.active:
            most = max(most, IDLE_PROMPT_TOKENS)
        rows = []
        if self.reading is None or self._has_read_part:
            rows = self._take_waiting(most)
        if rows:
            self._has_read_part = False
            self._read_whole_prompts(rows)
        elif self.reading is not None:
            self._has_read_part = True
            return self._read_part(self.reading, most)
        return None

    def _default_prompt_tokens(self) -> int:
        """Return the largest number of prompt tokens that a step reads while texts are being generated."""
        if self._native is not None:
            return NATIVE_PART_TOKENS
        return PROMPT_TOKENS.get(self.device.type, PROMPT_TOKENS_ELSEWHERE)

    def _take_waiting(self, most: int) -> list[_Row]:
        """Remove from the queue the requests whose prompts the next forward pass reads, and return their rows.

        It takes as many as there are free rows and as fit into ``most`` after padding. If a prompt is longer, and no
        other was taken or is being read in parts, its request is assigned to ``reading``.

        Args:
            most: Largest number of tokens, with padding and without cached prefixes.
        """
        taken: list[_Row] = []
        longest = 0  # tokens of a prompt that must be read
        for request in self._next_waiting():
            if len(taken) == self.num_free_rows:
                break
            is_idle = not self.num_running and not taken
            if not (is_idle or self.row_adapters.user_tensors.is_available(request.name)):
                continue
            prefix = self.prefixes.find(request.name, request.prompt)
            num_unread = len(request.prompt) - len(prefix) * BLOCK_TOKENS
            is_long = num_unread > most
            others = taken if self.reading is None else [*taken, self.reading]
            if (is_long and others) or self._gains_by_waiting(request, len(prefix), others):
                continue
            if taken and max(longest, num_unread) * (len(taken) + 1) > most:
                break
            self.waiting.remove(request)
            if not self._load_adapters(request):
                continue
            longest = max(longest, num_unread)
            row = self._make_row(request, prefix)
            if is_long:
                self.reading = row
                self.row_adapters.set(self.cache.max_rows - 1, request.name)
                break
            taken.append(row)
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

    def _gains_by_waiting(self, request: Request, num_blocks: int, others: Sequence[_Row]) -> bool:
        """Return whether a prompt that is being read begins with more of the request's prompt than the cache has.

        Args:
            request: The request.
            num_blocks: Number of cached blocks with which its prompt begins.
            others: Rows whose prompts are being read.
        """
        num_shared = (num_blocks + 1) * BLOCK_TOKENS
        if not self.prefixes.max_bytes or num_shared >= len(request.prompt):
            return False
        beginning = request.prompt[:num_shared]
        return any(row.request.name == request.name and row.request.prompt[:num_shared] == beginning for row in others)

    def _make_row(self, request: Request, prefix: list[PrefixBlock]) -> _Row:
        """Return a new row for a request, with a sampler, a detokenizer and the prompt's tokens.

        Args:
            request: The request.
            prefix: The cached beginning of its prompt.
        """
        ends = self.ends(request)
        sampler = TokenSampler(request.sampling, len(request.prompt), ends, self.device, request.logprobs)
        text_before: list[int] = []
        if request.continues:  # then the text may begin with a space, depending on the tokens before it
            text_before = decodable_suffix(self.tokenizer, request.prompt)
        detokenizer = Detokenizer(self.tokenizer, request.sampling.stop, ends=ends, after=text_before)
        return _Row(
            request=request,
            sampler=sampler,
            detokenizer=detokenizer,
            prefix=prefix,
            version=self.prefixes.version(request.name),
            tokens=list(request.prompt),
        )

    def _read_whole_prompts(self, rows: list[_Row]) -> None:
        """Read prompts in one forward pass, add their texts to the batch, and generate the first token of each.

        The pass uses the adapters of these texts' users only; the keys and values of the prompts are then added to the
        cache of the batch. Prompts are padded on the left. To avoid padding between the cached and the other tokens of
        a prompt, cached ones are read again where another prompt has more tokens to read.

        Args:
            rows: The new rows.
        """
        first_new_row = len(self.active)
        self.active += rows
        self._rows_changed = True
        for row_index, row in enumerate(rows, start=first_new_row):
            self.row_adapters.set(row_index, row.request.name)
        self.row_adapters.bind(slice(first_new_row, len(self.active)))
        self._all_rows_bound = False  # the network uses the adapters of the new rows only
        prompts = [row.request.prompt for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        width = max(len(row.request.prompt) - len(row.prefix) * BLOCK_TOKENS for row in rows)
        nums_cached = [max(0, length - width) for length in lengths]
        cache = prefilled_cache([row.prefix for row in rows], nums_cached)
        padding_token = 0  # any token will do, since the mask excludes it
        unread = [prompt[start:] for prompt, start in zip(prompts, nums_cached, strict=True)]
        ids = torch.tensor([[padding_token] * (width - len(tokens)) + tokens for tokens in unread])
        total_width = max(nums_cached) + width
        mask = torch.arange(total_width) >= total_width - torch.tensor(lengths).unsqueeze(1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)  # 0, 1, ... from the prompt's first token; 0 for padding
        logits = self._read(ids, mask, positions[:, -width:], cache)
        self.cache.join(cache, lengths)
        for index, (row, num_cached) in enumerate(zip(rows, nums_cached, strict=True)):
            row.cached_tokens = num_cached
            self._keep_prefix(row, cache, index)
        self._sample_tokens(first_new_row, logits)

    def _read_part(self, row: _Row, most: int) -> decoding.Batch | None:
        """Read the next part of a long prompt now, or return it if the pass that generates tokens can read it.

        Args:
            row: The row, which is not in the batch yet.
            most: Largest number of tokens to read.
        """
        if not row.num_read:
            row.num_read = row.cached_tokens = len(row.prefix) * BLOCK_TOKENS
            row.prompt_cache = prefilled_cache([row.prefix], [row.num_read])
        prompt = row.request.prompt
        tokens = slice(row.num_read, min(row.num_read + most, len(prompt)))
        ids, positions = torch.tensor([prompt[tokens]]), torch.arange(tokens.start, tokens.stop).unsqueeze(0)
        fits_into_pass = ids.numel() + len(self.active) <= MOST_ROWS
        if self.active and fits_into_pass and self._native_for_rows() is not None:
            if row.native is None:
                self._bind_reading()
                row.native = self._make_native(1)
            if row.native is not None:  # native code may have been disabled since it was made for the other rows
                num_left = len(prompt) - row.num_read
                return row.native.make_prompt_batch(ids, positions, row.prompt_cache, num_left=num_left)
        self._bind_reading()
        mask = torch.ones(1, tokens.stop, dtype=torch.bool)
        self._finish_part(row, ids.numel(), self._read(ids, mask, positions, row.prompt_cache))
        return None

    def _bind_reading(self) -> None:
        """Make the network use the adapters of the text whose prompt is read in several steps."""
        last_row = self.cache.max_rows - 1  # of the adapters; `num_free_rows` keeps it free of other texts
        self.row_adapters.bind(slice(last_row, last_row + 1))
        self._all_rows_bound = False

    def _finish_part(self, row: _Row, num_tokens: int, logits: Float[Tensor, "1 vocab"] | None) -> None:
        """Advance a long prompt past a part; after its last part, add the text to the batch with its first token.

        Args:
            row: The row of the prompt.
            num_tokens: Number of tokens of the part.
            logits: Logits after the part; None if it is not the last.
        """
        prompt = row.request.prompt
        row.num_read += num_tokens
        if row.num_read < len(prompt):
            return
        assert logits is not None
        self.reading = None
        new_row = len(self.active)
        self.row_adapters.move(self.cache.max_rows - 1, new_row)
        self.active.append(row)
        self._rows_changed = True
        self.cache.join(row.prompt_cache, [len(prompt)])
        self._keep_prefix(row, row.prompt_cache, 0)
        row.prompt_cache, row.native = DynamicCache(), None
        self._sample_tokens(new_row, logits)

    def _keep_prefix(self, row: _Row, cache: DynamicCache, index: int) -> None:
        """Add the keys and values of a prompt to the cache of prefixes, and drop the row's own prefix.

        Args:
            row: The row.
            cache: Keys and values of prompts that are padded on the left.
            index: Index of the prompt in ``cache``.
        """
        row.prefix = []
        if not self.prefixes.max_bytes:
            return
        prompt = row.request.prompt
        text = slice(index, index + 1), slice(None), slice(-len(prompt), None)
        cache_layers: list[Any] = cache.layers
        layers = [(layer.keys[text], layer.values[text]) for layer in cache_layers]
        self.prefixes.add(row.request.name, row.version, prompt, layers)

    def _decode(self, prompt_batch: decoding.Batch | None) -> None:
        """Generate a token for every row, in one forward pass.

        Args:
            prompt_batch: Part of the long prompt, which the same pass reads.
        """
        native = self._native_for_rows()
        ids = torch.tensor([[row.tokens[-1]] for row in self.active])
        position_ids = self.cache.lengths().unsqueeze(1)  # (rows, 1): one new token per row
        if native is not None:
            logits = native.decode(ids, position_ids, self.cache, prompt_batch)
        else:
            if not self._all_rows_bound:
                self.row_adapters.bind(slice(0, len(self.active)))
                self._all_rows_bound = True
            logits = self._forward(ids, self.cache.mask(), position_ids, self.cache)
        self.cache.advance()
        self._sample_tokens(0, logits)
        if prompt_batch is not None:
            assert self.reading is not None
            self._finish_part(self.reading, prompt_batch.struct.rows, prompt_batch.logits)

    def _native_for_rows(self) -> decoding.NativeNetwork | None:
        """Return native passes with the adapters of all rows; None if native code does not support them.

        They stay valid when other rows are bound, until rows are added or freed.
        """
        if self._rows_changed:
            self.row_adapters.bind(slice(0, len(self.active)))
            self._all_rows_bound = True
            self._native = self._make_native(len(self.active))
            self._rows_changed = False
        return self._native

    def _read(
        self,
        ids: Int[Tensor, "texts n"],
        mask: Bool[Tensor, "texts total"],
        positions: Int[Tensor, "texts n"],
        cache: DynamicCache,
    ) -> Float[Tensor, "texts vocab"]:
        """Return the logits after the last token of some prompts, or of a part of them.

        Args:
            ids: Tokens of the prompts, padded on the left.
            mask: False for padding, which comes before the first token of a prompt, cached tokens included.
            positions: Positions of ``ids`` in their prompts.
            cache: Keys and values of earlier tokens, to which those of ``ids`` are appended.
        """
        is_packed = isinstance(self.network.get_output_embeddings(), QuantisedLinear)
        is_short = ids.numel() <= NATIVE_PROMPT_TOKENS
        native = self._make_native(len(ids)) if is_short or is_packed else None
        if native is None:
            return self._forward(ids, mask, positions, cache)
        num_padding = (~mask).sum(1)
        return native.read(ids, positions, num_padding.tolist(), cache)

    def _make_native(self, texts: int) -> decoding.NativeNetwork | None:
        """Return the native network for the adapters that are bound; None if native code does not support it.

        Args:
            texts: Number of texts, whose adapters are bound.
        """
        if texts > MOST_ROWS or self.row_adapters.mixes_predictions or not decoding.is_enabled():
            return None
        if self._native_template is not None:
            return self._native_template.rebind(texts)
        if decoding.supports(self.network):
            self._native_template = decoding.NativeNetwork(self.network, texts)
        return self._native_template

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
        num_new_tokens = len(row.tokens) - len(row.request.prompt)
        finish: Finish | None = None
        if row.detokenizer.stopped:
            finish = "stop"
        elif num_new_tokens >= row.request.sampling.max_new_tokens:
            finish = "length"
            new_text += row.detokenizer.finish()
        cached_tokens = row.cached_tokens if num_new_tokens == 1 else 0
        return Piece(text=new_text, sampled=sampled, finish=finish, cached_tokens=cached_tokens)

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
        self._rows_changed, self._all_rows_bound = True, False  # the next step uses the adapters of the remaining rows
