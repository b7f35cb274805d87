"""Text generation: sampling settings, greedy decoding and batches of prompts.

Prompts of different lengths are padded on the left and share each forward pass. Each row has its own logits processors,
which do not see its padding, and its own random generator. So a prompt's continuation does not depend on the other
prompts in its batch, except for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from comingle.models.base import Base, num_embedding_rows
from comingle.models.chat_templates import require_characters
from comingle.models.hardware import without_compiling
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.scoring import PAD
from comingle.utils.errors import DataError, RecipeError, did_you_mean, is_number


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Validated settings of text generation, named as in transformers' ``GenerationConfig``.

    Args:
        max_new_tokens: The largest number of new tokens.
        min_new_tokens: The smallest number of new tokens.
        temperature: Temperature of sampling; 0 for greedy decoding.
        top_k: Sample from the k most probable tokens; 0: from all.
        top_p: Sample from the most probable tokens with this total probability; 1: from all.
        min_p: Exclude tokens below this share of the largest probability; 0: none.
        repetition_penalty: Reduces the logits of tokens that have occurred, as in transformers; 1 for no penalty.
        no_repeat_ngram_size: Length of n-grams that must not repeat; 0: all may.
        stop: Strings that end a text and are removed from it.
        stop_strings: Strings that end a text and stay in it.
        eos_token_id: Tokens that end a text; None: those of the base model.
        seed: Seed of each row's random generator.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    eos_token_id: tuple[int, ...] | None = None
    seed: int = 0


_Rule = tuple[Callable[[Any], bool], str]
"""Check of a value, and a description of the allowed values for messages."""


def _integer_rule(least: int, below: float = math.inf) -> _Rule:
    """Return a check for integers from ``least`` up to, but not including, ``below``, and the text for its errors."""
    allowed = f"a whole number from {least}"
    if below != math.inf:
        allowed += f" and below {below:,}"

    def is_allowed(value: Any) -> bool:
        return isinstance(value, int) and is_number(value) and least <= value < below  # a boolean is not a number

    return is_allowed, allowed


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


_RULES: Mapping[str, _Rule] = {
    "max_new_tokens": _integer_rule(1),
    "min_new_tokens": _integer_rule(0),
    "temperature": (lambda v: is_number(v) and v >= 0, "a number from 0 (greedy)"),
    "top_k": _integer_rule(0),
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "a number above 0, up to 1"),
    "min_p": (lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: is_number(v) and 0.01 <= v <= 100, "a number from 0.01 to 100"),
    "no_repeat_ngram_size": _integer_rule(0),
    "stop": (_are_texts, "a non-empty text or a list of them"),
    "stop_strings": (_are_texts, "a non-empty text or a list of them"),
    "eos_token_id": (
        lambda v: isinstance(v, tuple) and all(isinstance(i, int) and is_number(i) and i >= 0 for i in v),
        "a token ID or a list of them",
    ),
    "seed": _integer_rule(0, 2**63),
}

_SAMPLING_ONLY = ("top_k", "top_p", "min_p")
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True, False),
}
"""Values of unsupported settings that change no text."""
_IGNORED_KEYS = {"transformers_version", "bos_token_id", "pad_token_id"}


def read_sampling(config: object | None = None, **given: object) -> Sampling:
    """Return validated settings from a transformers ``GenerationConfig`` and from keyword arguments, which override it.

    Without ``do_sample`` a ``temperature`` above 0 switches sampling on. Without a config the default of ``top_p`` is
    0.95.

    Args:
        config: A ``GenerationConfig``; None for none.
        **given: Settings by name; those that are None are ignored.

    Raises:
        RecipeError: A name is unknown or unsupported, a value is out of range, or settings contradict each other.
    """
    arguments = {key: value for key, value in given.items() if value is not None}
    values: dict[str, Any] = {**_config_values(config), **arguments}
    unsupported = [key for key in values if key not in _RULES and key != "do_sample"]
    for key in unsupported:
        _raise_unless_neutral(key, values.pop(key))
    for key in ("stop", "stop_strings", "eos_token_id"):
        if key in values:
            values[key] = as_tuple(values[key])
    for key, value in values.items():
        _raise_unless_allowed(key, value)
    do_sample = values.pop("do_sample", None)
    _raise_if_contradictory(do_sample, values, arguments)
    if do_sample is False:
        values["temperature"] = 0.0  # greedy
    elif do_sample:
        values.setdefault("temperature", 1.0)
    if config is None:
        values.setdefault("top_p", 0.95)
    sampling = Sampling(**values)
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise RecipeError(
            f"min_new_tokens: got {sampling.min_new_tokens}; allowed: up to max_new_tokens ({sampling.max_new_tokens})"
        )
    return sampling


def _config_values(config: object | None) -> dict[str, Any]:
    """Return ``do_sample`` of a ``GenerationConfig``, and those of its other values that differ from the defaults.

    Settings of sampling, such as ``top_p``, are left out unless ``do_sample`` is true.
    """
    if config is None:
        return {}
    to_dict = getattr(config, "to_diff_dict", None)
    if to_dict is None:
        raise RecipeError(f"generation_config: got {config!r:.60}; allowed: transformers.GenerationConfig(...)")
    values = {key: value for key, value in to_dict().items() if value is not None and key not in _IGNORED_KEYS}
    values.setdefault("do_sample", False)
    if not values["do_sample"]:
        for key in (*_SAMPLING_ONLY, "temperature"):
            values.pop(key, None)
    return values


def _raise_unless_neutral(key: str, value: object) -> None:
    """Raise an error for a setting that is not supported, unless its value changes nothing, such as ``num_beams=1``."""
    if value in _NEUTRAL_VALUES.get(key, ()):
        return
    allowed = sorted(["do_sample", *_RULES])
    hint = " Use max_new_tokens." if key in ("max_length", "max_tokens") else did_you_mean(key, allowed)
    raise RecipeError(f"{key}: not supported in generate (got {value!r:.40}); allowed: {', '.join(allowed)}.{hint}")


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple, and any other value as a tuple of one item."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _raise_unless_allowed(key: str, value: object) -> None:
    """Raise an error if a generation setting has a value that is not allowed.

    Args:
        key: Name of the setting: a key of ``_RULES``, or "do_sample".
        value: Value of the setting; a tuple if the setting may be one value or a list, such as ("###",).

    Raises:
        RecipeError: The value is not allowed.
    """
    if key == "do_sample":
        is_allowed, allowed = isinstance(value, bool), "True or False"
    else:
        rule, allowed = _RULES[key]
        is_allowed = rule(value)
    if not is_allowed:
        if isinstance(value, tuple) and len(value) == 1:
            (value,) = value
        raise RecipeError(f"{key}: got {value!r:.60}; allowed: {allowed}")


def _raise_if_contradictory(do_sample: object, values: Mapping[str, object], arguments: Mapping[str, object]) -> None:
    """Raise an error if settings ask for sampling and for greedy decoding at once.

    Args:
        do_sample: The setting ``do_sample``; None if it is not given.
        values: All other settings: those of ``generation_config``, overridden by those given by name.
        arguments: Only the settings given by name.

    Raises:
        RecipeError: ``do_sample`` and the temperature disagree, or a setting of sampling has no effect.
    """
    temperature = values.get("temperature")
    if do_sample and temperature == 0:
        raise RecipeError("temperature: got 0 with do_sample=True; sampling needs a temperature above 0")
    # A temperature of the config is no contradiction, because an argument ``do_sample=False`` overrides it.
    if arguments.get("do_sample") is False and arguments.get("temperature"):
        raise RecipeError(
            f"temperature: got {temperature} with do_sample=False, which is greedy; leave one of them out"
        )
    sampling_only = [key for key in _SAMPLING_ONLY if key in arguments]
    if sampling_only and not do_sample and not temperature:
        raise RecipeError(
            f"{sampling_only[0]}: has no effect in greedy decoding; give do_sample=True or a temperature above 0"
        )


def continue_greedily(network: PreTrainedModel, prompts: Int[Tensor, "n prompt"], limit: int) -> Int64[Tensor, "n new"]:
    """Continue prompts by greedy decoding.

    A prompt whose continuation would exceed the base's maximum number of positions gets fewer tokens. The continuation
    of a prompt does not depend on the others.

    Args:
        network: The base model with bound adapters; a row's index determines its user.
        prompts: Token IDs, padded with ``PAD`` on the left.
        limit: The maximum number of new tokens.

    Returns:
        New tokens on the CPU, padded with ``PAD`` on the right. Tokens after an end of text are meaningless.
    """
    lengths = (prompts != PAD).sum(1)
    positions = getattr(network.config, "max_position_embeddings", None)
    limits = torch.full_like(lengths, limit)  # largest number of new tokens of each prompt
    if positions:
        limits = (positions - lengths).clamp(min=1, max=limit)  # transformers requires at least 1
    distinct_limits = limits.unique().tolist()
    if len(distinct_limits) == 1:
        (common_limit,) = distinct_limits
        return _generate_greedily(network, prompts, common_limit)
    new_tokens = torch.full((len(prompts), max(distinct_limits)), PAD, dtype=torch.int64)
    width = prompts.shape[1]
    is_last_column = torch.arange(width, device=prompts.device) == width - 1
    for common_limit in distinct_limits:
        has_limit = limits == common_limit
        # A row's index determines its user, so keep all rows, but only the last token of prompts with other limits.
        is_kept = has_limit.unsqueeze(1) | is_last_column
        prompts_of_limit = prompts.masked_fill(~is_kept, PAD)
        longest = int(lengths[has_limit].max())
        continued = _generate_greedily(network, prompts_of_limit[:, -longest:], common_limit)
        rows = has_limit.cpu()
        new_tokens[rows, : continued.shape[1]] = continued[rows]
    return new_tokens


def _generate_greedily(
    network: PreTrainedModel, prompts: Int[Tensor, "n prompt"], limit: int
) -> Int64[Tensor, "n new"]:
    """Continue prompts greedily.

    Args:
        network: The base model with bound adapters.
        prompts: Token ids, padded with ``PAD`` on the left.
        limit: Largest number of new tokens; the base must have positions for prompts and new tokens.

    Returns:
        New tokens on the CPU; fewer than ``limit`` if all texts have ended.
    """
    config = network.generation_config
    generate = cast(Callable[..., Tensor], network.generate)  # torch types every attribute as a Tensor
    with padded_attention(network):
        tokens = generate(
            prompts.clamp(min=0),  # token 0 instead of PAD, which is negative; the mask excludes it
            attention_mask=(prompts != PAD).long(),
            max_new_tokens=limit,
            use_cache=True,
            do_sample=False,
            pad_token_id=config.pad_token_id if config is not None else None,
        )
    prompt_width = prompts.shape[1]
    return tokens[:, prompt_width:].cpu()


def can_pad(network: PreTrainedModel) -> bool:
    """Return whether a model supports padded prompts; soft-capped attention (Gemma 2) in float64 does not."""
    has_softcap = getattr(network.config, "attn_logit_softcapping", None) is not None
    return not (has_softcap and network.dtype == torch.float64)


@contextmanager
def padded_attention(network: PreTrainedModel, *, padded: bool = True) -> Iterator[None]:
    """Use "sdpa" instead of "eager" attention in the context for padded prompts in float64, which become NaN in eager.

    Args:
        network: The model.
        padded: Whether a prompt is padded; otherwise nothing changes.
    """
    config: Any = network.base_model.config
    implementation = config._attn_implementation
    # Eager attention computes the softmax in float32, in which the mask's value, the lowest float64, is infinite.
    if padded and network.dtype == torch.float64 and implementation == "eager":
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = implementation


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text that an incomplete character is decoded to."""

_MAX_SUFFIX_TOKENS = 16
"""The largest number of tokens of a character and of special tokens after it."""


@torch.no_grad()
def continue_texts(
    network: PreTrainedModel,
    base: Base,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling,
) -> list[str]:
    """Continue each prompt (text or tokens).

    A text gets the base's begin-of-text token if there is one. An empty text starts from the tokenizer's begin-of-text
    token, or without one from its end-of-text token. Prompts of tokens are used unchanged.

    Args:
        network: The base model with a user's adapters.
        base: The base model, for its tokenizer and embedding.
        prompts: The prompts; may be empty.
        sampling: Settings of the generation.

    Returns:
        The new text of each prompt.

    Raises:
        DataError: A prompt with its continuation exceeds the base's maximum number of positions, is empty although the
            tokenizer has no end-of-text token, or has tokens without a row in the embedding.
        RecipeError: ``eos_token_id`` is not in the vocabulary.
    """
    if not prompts:
        return []
    tokenizer = base.tokenizer
    assert tokenizer is not None
    encoded = [encode_prompt(tokenizer, prompt, base.begin) for prompt in prompts]
    for ids in encoded:
        base.require_rows(ids, "the prompt")
    needs_padding = len({len(ids) for ids in encoded}) > 1
    if needs_padding and not can_pad(network):  # without padding: continue one prompt after another
        texts = []
        for prompt in prompts:
            texts += continue_texts(network, base, [prompt], sampling)
        return texts
    _raise_unless_positions_suffice(network, encoded, sampling)

    width, device = max(map(len, encoded)), next(network.parameters()).device
    num_padding = [width - len(ids) for ids in encoded]
    end_tokens = stop_tokens(network, tokenizer, sampling)
    pad_token = _pad_token(tokenizer, end_tokens, base.rows)
    padded, mask = _pad_left(encoded, num_padding, pad_token, device)
    contexts = []  # the last tokens of each text, with which its new tokens are decoded
    for prompt, ids in zip(prompts, encoded, strict=True):
        contexts.append(decodable_suffix(tokenizer, ids) if isinstance(prompt, str) else [])
    criterion = _StopCriterion(
        tokenizer=tokenizer,
        prompt_width=width,
        stop_ids=end_tokens,
        stops=sampling.stop + sampling.stop_strings,
        contexts=contexts,
    )
    # Eager, as the length changes with each token.
    with without_compiling(), padded_attention(network, padded=needs_padding):
        tokens = _generate_batch(
            network,
            padded,
            mask,
            num_padding=num_padding,
            end_tokens=end_tokens,
            pad_token=pad_token,
            sampling=sampling,
            criterion=criterion,
        )
    texts = []
    for row, row_tokens in enumerate(tokens.tolist()):
        new_tokens = row_tokens[width : criterion.ends[row]]
        text = added_text(tokenizer, contexts[row], new_tokens)
        texts.append(truncate_at(text, sampling.stop))
    return texts


def _pad_token(tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], rows: int) -> int:
    """Return the tokenizer's padding token, or another one if the embedding has no row for it.

    Args:
        tokenizer: The tokenizer.
        end_tokens: Tokens that end a text.
        rows: Number of rows of the embedding.
    """
    pad_token: Any = tokenizer.pad_token_id
    if pad_token is not None and pad_token < rows:
        return pad_token
    return next((token for token in end_tokens if token < rows), 0)  # any will do, as attention ignores padding


def _pad_left(
    prompts: Sequence[list[int]], num_padding: Sequence[int], pad_token: int, device: torch.device
) -> tuple[Int[Tensor, "n prompt"], Int[Tensor, "n prompt"]]:
    """Return prompts of one length, padded on the left, and their attention mask: 1 for tokens, 0 for padding.

    Args:
        prompts: Tokens of each prompt.
        num_padding: Number of padding tokens of each prompt.
        pad_token: The padding token.
        device: Device of the result.
    """
    padded_rows = [[pad_token] * count + ids for count, ids in zip(num_padding, prompts, strict=True)]
    padded = torch.tensor(padded_rows, device=device)
    first_token_columns = torch.tensor(num_padding, device=device).unsqueeze(1)  # (n, 1)
    mask = torch.arange(padded.shape[1], device=device) >= first_token_columns
    return padded, mask.long()


def added_text(tokenizer: PreTrainedTokenizerBase, before: list[int], tokens: list[int]) -> str:
    """Return the text that new tokens add to the text before them.

    New tokens are decoded together with earlier ones, as some tokenizers drop a space at the beginning of a text.

    Args:
        tokenizer: The tokenizer.
        before: Tokens right before the new ones, as from :func:`decodable_suffix`.
        tokens: The new tokens.
    """
    text_before = str(tokenizer.decode(before, skip_special_tokens=True))
    whole_text = str(tokenizer.decode([*before, *tokens], skip_special_tokens=True))
    if whole_text.startswith(text_before):
        return whole_text[len(text_before) :]
    # Some tokenizers change the character before an incomplete one.
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def decodable_suffix(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the shortest suffix of a prompt's tokens that decodes to complete characters.

    :func:`added_text` decodes new tokens together with this suffix, because a tokenizer may decode a token differently
    at the beginning of a text.

    Args:
        tokenizer: The tokenizer.
        ids: Tokens of the prompt.

    Returns:
        The suffix; empty if none of up to ``_MAX_SUFFIX_TOKENS`` tokens decodes to complete characters.
    """
    for count in range(1, min(len(ids), _MAX_SUFFIX_TOKENS) + 1):
        text = str(tokenizer.decode(ids[-count:], skip_special_tokens=True))
        if text and UNFINISHED not in text:
            return ids[-count:]
    return []


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int], begin: int | None = None
) -> list[int]:
    """Return the tokens of a prompt; an empty one becomes the begin-of-text token, or without it the end-of-text token.

    Args:
        tokenizer: The tokenizer.
        prompt: A text, or tokens, which are unchanged.
        begin: Begin-of-text token to add to a text that does not start with it; None for none.

    Raises:
        DataError: The text is invalid Unicode, or the prompt is empty and the tokenizer has neither of these tokens.
    """
    if isinstance(prompt, str):
        require_characters(prompt)
        tokens = cast(list[int], tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if begin is not None and tokens[:1] != [begin]:
            return [begin, *tokens]
    else:
        tokens = list(prompt)
    if tokens:
        return tokens
    start = tokenizer.bos_token_id
    if start is None:
        start = tokenizer.eos_token_id
    if start is None:
        raise DataError(
            "an empty prompt: the base's tokenizer has no begin-of-text or end-of-text token to start from; give a text"
        )
    return [cast(int, start)]


def _raise_unless_positions_suffice(
    network: PreTrainedModel, encoded: Sequence[Sequence[int]], sampling: Sampling
) -> None:
    """Raise an error if the longest prompt and its new tokens exceed the base's maximum number of positions.

    Args:
        network: The base model.
        encoded: Tokens of each prompt.
        sampling: Settings with the number of new tokens.

    Raises:
        DataError: The positions do not suffice; the message names the first of the longest prompts.
    """
    positions = max_positions(network)
    lengths = [len(ids) for ids in encoded]
    longest = max(lengths)
    if positions is None or longest + sampling.max_new_tokens <= positions:
        return
    prompt_number = lengths.index(longest) + 1
    where = f"prompt {prompt_number}" if len(encoded) > 1 else "the prompt"
    raise DataError(
        f"{where}: {longest:,} tokens and max_new_tokens={sampling.max_new_tokens:,}; allowed: {positions:,} in all, "
        "the base's maximum number of positions"
    )


def max_positions(network: PreTrainedModel) -> int | None:
    """Return the base's maximum number of positions; None if its configuration has none."""
    positions = getattr(network.config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def check_context_length(where: str, context: int, network: PreTrainedModel) -> None:
    """Raise an error if a context length exceeds the base's maximum number of positions.

    Args:
        where: The setting that has the length, for the message.
        context: Number of tokens.
        network: The base model.

    Raises:
        RecipeError: The context is too long.
    """
    positions = max_positions(network)
    if positions is not None and context > positions:
        raise RecipeError(
            f"{where}: got {context:,}; allowed: up to {positions:,}, the base's maximum number of positions"
        )


def stop_tokens(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> tuple[int, ...]:
    """Return the tokens that end a text.

    Args:
        network: The base model.
        tokenizer: Its tokenizer.
        sampling: Settings, whose ``eos_token_id`` takes precedence.

    Raises:
        RecipeError: ``eos_token_id`` is not in the vocabulary.
    """
    if sampling.eos_token_id is None:
        config = network.generation_config
        ends = tokenizer.eos_token_id if config is None else config.eos_token_id
        return () if ends is None else as_tuple(ends)
    vocabulary_size = num_embedding_rows(network)
    for token in sampling.eos_token_id:
        if token >= vocabulary_size:
            raise RecipeError(f"eos_token_id: got {token}; allowed: tokens below {vocabulary_size:,}")
    return sampling.eos_token_id


def _generate_batch(
    network: PreTrainedModel,
    ids: Int[Tensor, "n prompt"],
    mask: Int[Tensor, "n prompt"],
    *,
    num_padding: Sequence[int],
    end_tokens: Sequence[int],
    pad_token: int,
    sampling: Sampling,
    criterion: _StopCriterion,
) -> Int[Tensor, "n total"]:
    """Continue padded prompts with transformers' ``generate``, each with its own logits processors.

    Args:
        network: The base model with a user's adapters.
        ids: Prompts, padded on the left.
        mask: 1 for tokens, 0 for padding.
        num_padding: Number of padding tokens of each prompt.
        end_tokens: Tokens that end a text.
        pad_token: Token that fills up rows that have ended.
        sampling: Settings of the generation.
        criterion: Ends rows, and records their lengths.

    Returns:
        Prompts and new tokens.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width = ids.shape[1]
    processors = [row_processors(sampling, width - count, end_tokens, ids.device) for count in num_padding]

    def process_rows(tokens: Tensor, logits: Tensor) -> Tensor:
        """Apply each row's processors to its logits and its tokens without padding."""
        processed = []
        for row, process in enumerate(processors):
            row_tokens = tokens[row : row + 1, num_padding[row] :]
            processed.append(process(row_tokens, logits[row : row + 1]))
        return torch.cat(processed)

    generate = cast(Callable[..., Tensor], network.generate)  # torch types every attribute as a Tensor
    return generate(
        ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # each row's processors draw its token
            eos_token_id=list(end_tokens) or None,
            pad_token_id=pad_token,
            use_cache=True,
        ),
        logits_processor=LogitsProcessorList([process_rows]),  # type: ignore[list-item]
        stopping_criteria=StoppingCriteriaList([criterion]),  # type: ignore[list-item]
    )


_MIN_TEMPERATURE = 1e-6
"""The smallest temperature in use: below it tokens would not change, but logits would overflow."""


def row_processors(
    sampling: Sampling, prompt_tokens: int, ends: Sequence[int], device: torch.device
) -> Callable[..., Tensor]:
    """Return the logits processors of one text: a function of its tokens and next-token logits that returns new logits.

    If the temperature is not 0, the last processor draws the next token and sets all other logits to minus infinity.
    Each text has its own random generator.

    Args:
        sampling: Settings of the generation.
        prompt_tokens: Number of tokens of the prompt without padding.
        ends: Tokens that end a text.
        device: Device of the logits.
    """
    import transformers as library

    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(library.RepetitionPenaltyLogitsProcessor(penalty=float(sampling.repetition_penalty)))
    if sampling.no_repeat_ngram_size:
        processors.append(library.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.min_new_tokens and ends:
        min_new = sampling.min_new_tokens
        processors.append(
            library.MinNewTokensLengthLogitsProcessor(prompt_tokens, min_new, list(ends), device=str(device))
        )
    if sampling.temperature:
        processors += _sampling_warpers(sampling)
        processors.append(_SampleToken(torch.Generator(device).manual_seed(sampling.seed)))
    return library.LogitsProcessorList(processors)


def _sampling_warpers(sampling: Sampling) -> list[Any]:
    """Return the logits processors for temperature, top_k, top_p and min_p, without those whose setting is neutral."""
    import transformers as library

    warpers: list[Any] = []
    if sampling.temperature != 1:
        temperature = max(float(sampling.temperature), _MIN_TEMPERATURE)
        warpers.append(library.TemperatureLogitsWarper(temperature))
    if sampling.top_k:
        warpers.append(library.TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(library.TopPLogitsWarper(top_p=float(sampling.top_p)))
    if sampling.min_p:
        warpers.append(library.MinPLogitsWarper(min_p=float(sampling.min_p)))
    return warpers


class _SampleToken:
    """A logits processor that draws one token with a generator of its own."""

    def __init__(self, generator: torch.Generator):
        """Draw tokens with a generator of random numbers."""
        self.generator = generator

    def __call__(self, tokens: Int[Tensor, "1 n"], scores: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        """Return logits of 0 for a token drawn from the softmax of ``scores``, and minus infinity for all others."""
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        return torch.full_like(scores, -math.inf).scatter(1, drawn, 0.0)


@dataclass
class _StopCriterion:
    """A stopping criterion that ends a row after a stop token or string, and records its length in ``ends``.

    Args:
        tokenizer: The tokenizer.
        prompt_width: Tokens of the padded prompts, which are not searched.
        stop_ids: Tokens that end a text.
        stops: Strings that end a text.
        contexts: For each row the tokens before its new text, as :func:`added_text` needs them.
        ends: For each row its total length once it has ended, else None.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_width: int
    stop_ids: Sequence[int]
    stops: Sequence[str]
    contexts: Sequence[list[int]]
    ends: dict[int, int | None] = field(default_factory=dict)

    def __call__(self, tokens: Int[Tensor, "n total"], scores: object, **_: object) -> Bool[Tensor, " n"]:
        """Return True for each row whose text has ended; transformers calls this after every token.

        Args:
            tokens: Padded prompts and the new tokens after them.
            scores: Ignored, like further arguments of transformers.
        """
        length = tokens.shape[1]
        for row, new_tokens in enumerate(tokens[:, self.prompt_width :].tolist()):
            has_ended = self.ends.get(row) is not None
            if has_ended:
                continue
            self.ends[row] = None  # from the first call on, `ends` has all rows in order
            if self._is_finished(new_tokens, self.contexts[row]):
                self.ends[row] = length
        return torch.tensor([end is not None for end in self.ends.values()], device=tokens.device)

    def _is_finished(self, tokens: list[int], context: list[int]) -> bool:
        """Return whether a row's new tokens end with a stop token or contain a stop string.

        Args:
            tokens: The new tokens.
            context: The tokens before them, with which they are decoded (:func:`added_text`).
        """
        if tokens[-1] in self.stop_ids:
            return True
        if not self.stops:  # no stop strings: spare the decoding
            return False
        text = added_text(self.tokenizer, context, tokens)
        return any(stop in text for stop in self.stops)


def truncate_at(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first occurrence of one of ``stops``."""
    end = len(text)
    for stop in stops:
        start_of_stop = text.find(stop)
        if start_of_stop >= 0:
            end = min(end, start_of_stop)
    return text[:end]
