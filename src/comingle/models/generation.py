"""Texts that a causal language model continues.

Prompts of different lengths share every pass, filled on the left. What chooses tokens sees each row by itself, without
its filling and with a random stream of its own, so a prompt is continued as it is alone (to rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.data.templates import require_characters
from comingle.models.base import Base, rows_of
from comingle.models.greedy import can_pad, padded_attention
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.sampling import Sampling, as_tuple
from comingle.utils.errors import DataError, RecipeError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What is decoded of half a character."""

_CONTEXT = 16
"""So many tokens a character and the special tokens behind it may be."""


@torch.no_grad()
def continue_texts(
    network: PreTrainedModel,
    base: Base,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling,
) -> list[str]:
    """Continue each prompt (text or tokens); an empty text starts from the token between documents.

    A text begins with the base's begin-of-text token where there is one; tokens are continued as they are.

    Args:
        network: the base with a user's adapters.
        base: the tokenizer's, and the embedding's, which must have a row for each token of the prompts.
        prompts: none gives no texts.
        sampling: how tokens are chosen, and how many.

    Raises:
        DataError: a prompt with its continuation is longer than the base can read, is empty and has no start, or has
            tokens without a row in the embedding.
        RecipeError: ``eos_token_id`` is not in the vocabulary.
    """
    if not prompts:
        return []
    tokenizer = base.tokenizer
    assert tokenizer is not None
    encoded = [encode_prompt(tokenizer, prompt, base.begin) for prompt in prompts]
    for one in encoded:
        base.require_rows(one, "the prompt")
    if len({len(ids) for ids in encoded}) > 1 and not can_pad(network):
        return [text for prompt in prompts for text in continue_texts(network, base, [prompt], sampling)]
    _require_places(network, encoded, sampling)
    width, device = max(map(len, encoded)), next(network.parameters()).device
    starts = [width - len(ids) for ids in encoded]
    ends = stop_tokens(network, tokenizer, sampling)
    own: Any = tokenizer.pad_token_id
    pad = own if own is not None and own < base.rows else next((end for end in ends if end < base.rows), 0)
    ids = torch.tensor([[pad] * start + ids for start, ids in zip(starts, encoded, strict=True)], device=device)
    mask = (torch.arange(width, device=device) >= torch.tensor(starts, device=device).unsqueeze(1)).long()
    after = [place_of(tokenizer, ids) if isinstance(p, str) else [] for ids, p in zip(encoded, prompts, strict=True)]
    watch = _Watch(tokenizer, width, ends, sampling.stop + sampling.stop_strings, after)
    # Lengths change with every token: compiling for each of them would not pay.
    with torch.compiler.set_stance("force_eager"), padded_attention(network, padded=any(starts)):
        out = _generate(network, ids, mask, starts, ends, pad, sampling, watch)
    said = [added_text(tokenizer, after[i], row[width : watch.ends[i]]) for i, row in enumerate(out.tolist())]
    return [cut_at(text, sampling.stop) for text in said]


def added_text(tokenizer: PreTrainedTokenizerBase, before: list[int], tokens: list[int]) -> str:
    """What tokens add to the text of those before them: some tokenizers drop a space where a text begins."""
    old, new = (str(tokenizer.decode(some, skip_special_tokens=True)) for some in (before, [*before, *tokens]))
    # Some make several of a half of a character, and of the whole one before it too.
    return new[len(old) :] if new.startswith(old) else str(tokenizer.decode(tokens, skip_special_tokens=True))


def place_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The last tokens of a prompt that are text by themselves, and give what follows its place."""
    for count in range(1, min(len(ids), _CONTEXT) + 1):
        text = str(tokenizer.decode(ids[-count:], skip_special_tokens=True))
        if text and UNFINISHED not in text:
            return ids[-count:]
    return []


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int], begin: int | None = None
) -> list[int]:
    """Return the tokens of a prompt (text or tokens); an empty one becomes the token between documents.

    A text begins with the token ``begin``, once, also where it spells it out; a prompt of tokens stays as it is.

    Raises:
        DataError: invalid Unicode, or an empty prompt where the tokenizer has no such token.
    """
    if isinstance(prompt, str):
        require_characters(prompt)
        prompt = cast(list[int], tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if begin is not None and list(prompt[:1]) != [begin]:
            return [begin, *prompt]
    if len(prompt):
        return list(prompt)
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise DataError(
            "an empty prompt: the base's tokenizer has no token between documents to begin with; give some text"
        )
    return [cast(int, start)]


def _require_places(network: PreTrainedModel, encoded: Sequence[Sequence[int]], sampling: Sampling) -> None:
    most, longest = max_places(network), max(map(len, encoded))
    if most is not None and longest + sampling.max_new_tokens > most:
        where = (
            f"prompt {next(i for i, ids in enumerate(encoded) if len(ids) == longest) + 1}"
            if encoded[1:]
            else "the prompt"
        )
        raise DataError(
            f"{where} has {longest:,} tokens, with max_new_tokens={sampling.max_new_tokens:,} more than the {most:,} "
            "that the base reads at once; shorten one of them"
        )


def max_places(network: PreTrainedModel) -> int | None:
    """How many tokens the base reads at once; None where its configuration does not say."""
    places = getattr(network.config, "max_position_embeddings", None)
    return places if isinstance(places, int) and places > 0 else None


def check_places(where: str, context: int, network: PreTrainedModel) -> None:
    """Whether the base reads windows of ``context`` tokens at once.

    Raises:
        RecipeError: it does not.
    """
    if (most := max_places(network)) is not None and context > most:
        raise RecipeError(f"{where}: got {context:,}, but the base reads at most {most:,} tokens at once")


def stop_tokens(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> tuple[int, ...]:
    """The tokens after which a text ends.

    Raises:
        RecipeError: ``eos_token_id`` is not in the vocabulary.
    """
    if sampling.eos_token_id is None:
        config = network.generation_config
        stops = tokenizer.eos_token_id if config is None else config.eos_token_id
        return () if stops is None else as_tuple(stops)
    size = rows_of(network)
    if wrong := [i for i in sampling.eos_token_id if i >= size]:
        raise RecipeError(f"eos_token_id: got {wrong[0]}, allowed are tokens below {size:,}")
    return sampling.eos_token_id


def _generate(
    network: PreTrainedModel,
    ids: Int[Tensor, "n prompt"],
    mask: Int[Tensor, "n prompt"],
    starts: Sequence[int],
    ends: Sequence[int],
    pad: int,
    sampling: Sampling,
    watch: _Watch,
) -> Int[Tensor, "n total"]:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    device = ids.device
    rows = [
        chooser_of(sampling, len(prompt_ids) - start, ends, device)
        for prompt_ids, start in zip(ids, starts, strict=True)
    ]

    def choose(tokens: Tensor, scores: Tensor) -> Tensor:
        parts = [pick(tokens[i : i + 1, starts[i] :], scores[i : i + 1]) for i, pick in enumerate(rows)]
        return torch.cat(parts)

    generate = cast(Callable[..., Tensor], network.generate)  # torch types every attribute as a Tensor
    return generate(
        ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # the rows draw by themselves
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
            use_cache=True,
        ),
        logits_processor=LogitsProcessorList([choose]),  # type: ignore[list-item]
        stopping_criteria=StoppingCriteriaList([watch]),  # type: ignore[list-item]
    )


_COLDEST = 1e-6
"""A lower temperature chooses no other tokens, and logits over it would not be finite."""


def chooser_of(sampling: Sampling, prompt: int, ends: Sequence[int], device: torch.device) -> Callable[..., Tensor]:
    """One row's processors, in transformers' own order; the last one draws and leaves a single token possible."""
    import transformers as library

    choosers: list[Any] = []
    if sampling.repetition_penalty != 1:
        choosers.append(library.RepetitionPenaltyLogitsProcessor(penalty=float(sampling.repetition_penalty)))
    if sampling.no_repeat_ngram_size:
        choosers.append(library.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.min_new_tokens and ends:
        least = sampling.min_new_tokens
        choosers.append(library.MinNewTokensLengthLogitsProcessor(prompt, least, list(ends), device=str(device)))
    if sampling.temperature:
        choosers += _warpers(sampling)
        choosers.append(_Draw(torch.Generator(device).manual_seed(sampling.seed)))
    return library.LogitsProcessorList(choosers)


def _warpers(sampling: Sampling) -> list[Any]:
    import transformers as library

    warpers: list[Any] = []
    if sampling.temperature != 1:
        warpers.append(library.TemperatureLogitsWarper(max(float(sampling.temperature), _COLDEST)))
    if sampling.top_k:
        warpers.append(library.TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(library.TopPLogitsWarper(top_p=float(sampling.top_p)))
    if sampling.min_p:
        warpers.append(library.MinPLogitsWarper(min_p=float(sampling.min_p)))
    return warpers


class _Draw:
    """Draws one token from a row's probabilities."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def __call__(self, tokens: Int[Tensor, "1 n"], scores: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        return torch.full_like(scores, -math.inf).scatter(1, drawn, 0.0)


@dataclass
class _Watch:
    """Ends a row after a token of ``stop_ids`` or one of the ``stops``, and keeps where: ``ends``."""

    tokenizer: PreTrainedTokenizerBase
    width: int
    stop_ids: Sequence[int]
    stops: Sequence[str]
    after: Sequence[list[int]]
    ends: dict[int, int | None] = field(default_factory=dict)

    def __call__(self, tokens: Int[Tensor, "n total"], scores: Any, **_: Any) -> Bool[Tensor, " n"]:
        for i, row in enumerate(tokens[:, self.width :].tolist()):
            if self.ends.get(i) is None:
                self.ends[i] = tokens.shape[1] if self._over(row, self.after[i]) else None
        return torch.tensor([end is not None for end in self.ends.values()], device=tokens.device)

    def _over(self, said: list[int], after: list[int]) -> bool:
        if said[-1] in self.stop_ids or not self.stops:
            return said[-1] in self.stop_ids
        text = added_text(self.tokenizer, after, said)
        return any(stop in text for stop in self.stops)


def cut_at(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of ``stops``."""
    return text[: min([at for stop in stops if (at := text.find(stop)) >= 0], default=len(text))]
