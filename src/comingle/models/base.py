"""The frozen pretrained language model of a run, with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from comingle.models.chat_templates import ChatTemplate, begin_of
from comingle.models.folders import digest_folder, digest_model, digest_tokenizer
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.scoring import PAD, hide
from comingle.utils.errors import DataError
from comingle.utils.trees import digest_all


@dataclass(frozen=True, kw_only=True)
class Base:
    """A pretrained model that is loaded once, never trained and never copied.

    Args:
        model: The model, in evaluation mode (no dropout), without gradients and without a key-value cache in training.
        tokenizer: Its tokenizer; None if its folder holds none.
        name: The source. For an alias or a hub name it contains no local path.
        dtype: Number format of the weights.
        device: Device of the weights.
        origin: The folder of the weights, or the text that defines random ones; None for a model given in memory.
        quantised: The quantisation of the decoder layers' linear weights; empty for none.
        attention: The attention implementation that was asked for; only with "auto" comingle may use its own kernels.
        date: The current date as chat templates write it; one for the whole run.
        ends: Tokens that end a text by the model's generation settings, which may name more than the tokenizer does.
        adds_bos: Whether texts begin with the tokenizer's begin-of-text token.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    dtype: torch.dtype
    device: torch.device
    origin: Path | str | None = None
    quantised: str = ""
    attention: str = "auto"
    date: datetime | None = None
    ends: tuple[int, ...] = ()
    adds_bos: bool = True

    @cached_property
    def begin(self) -> int | None:
        """The begin-of-text token; None if the tokenizer adds none or ``adds_bos`` is False."""
        if self.tokenizer is None or not self.adds_bos:
            return None
        begin_tokens = begin_of(self.tokenizer)  # one or none
        return begin_tokens[0] if begin_tokens else None

    @property
    def rows(self) -> int:
        """The number of rows of the embedding; the tokenizer's vocabulary may be larger."""
        return num_embedding_rows(self.model)

    def require_rows(self, tokens: Int[Tensor, "*any"] | Sequence[int], source: str) -> None:
        """Raise an error if the embedding has no row for a token to read, or the head no row for a token to predict.

        Args:
            tokens: A tensor of tokens to read and predict, in which tokens that are only read are hidden: hide(5) = -7
                (:func:`~comingle.models.scoring.hide`); or a sequence of tokens that are only read.
            source: Where the tokens come from, for the message.

        Raises:
            DataError: A token has no row; the message names the first such token.
        """
        if not isinstance(tokens, Tensor):
            tokens = hide(torch.tensor(tokens, dtype=torch.int64))
        if tokens.numel() == 0:
            return
        smallest, largest_target = (int(value) for value in torch.aminmax(tokens))  # hidden tokens are negative
        largest_hidden = -2 - smallest  # decoded: hide(token) is -2 - token
        if max(largest_target, largest_hidden) >= self.rows:
            inputs = torch.where(tokens < PAD, hide(tokens), tokens)  # `hide` decodes hidden tokens, those below PAD
            first_without_row = int(inputs[inputs >= self.rows][0])
            raise self._missing_row_error("embedding", self.rows, first_without_row, source)
        head_weight: Any = getattr(self.model.get_output_embeddings(), "weight", None)
        if head_weight is not None and largest_target >= len(head_weight):
            first_without_row = int(tokens[tokens >= len(head_weight)][0])
            raise self._missing_row_error("head", len(head_weight), first_without_row, source)

    def _missing_row_error(self, matrix: str, rows: int, token: int, source: str) -> DataError:
        """Return the error for a token that has no row in the embedding or in the output head.

        Args:
            matrix: "embedding" or "head".
            rows: Number of its rows.
            token: The token ID.
            source: Origin of the token, for the message.
        """
        tokenizer_size, token_text = "", ""
        if self.tokenizer is not None:
            num_tokens = len(self.tokenizer)  # type: ignore[arg-type]
            tokenizer_size = f"its tokenizer has {num_tokens:,} tokens, "
            if token < num_tokens:
                token_text = f" ({self.tokenizer.convert_ids_to_tokens(token)})"
        reason = f"{tokenizer_size}its {matrix} only {rows:,} rows; call resize_token_embeddings first"
        return DataError(f"base {self.name}: got token {token}{token_text} in {source}; {reason}")

    @cached_property
    def digest(self) -> str:
        """A digest that identifies the weights.

        It is a digest of the weights' files, of the text that defines a random base, or, for a model that was given in
        memory, of the tensors themselves.
        """
        if self.origin is None:
            return digest_model(self.model)
        if isinstance(self.origin, Path):
            return digest_folder(self.origin)
        return digest_all(self.origin)


def num_embedding_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's input embedding: tokens have IDs below it."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def freeze(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Freeze a model in place, and return its end tokens.

    It gets no gradients, no dropout, no key-value cache in training, and greedy generation.

    Args:
        model: The model.
        tokenizer: Its tokenizer, which gives the special tokens of generation; None: the model's configuration does.

    Returns:
        The tokens that end a text by the model's original generation settings.
    """
    from transformers import GenerationConfig

    ends = getattr(model.generation_config, "eos_token_id", None)  # a token or a list
    if ends is None:
        ends = getattr(model.config, "eos_token_id", None)
    if ends is None:
        ends = ()
    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = False
    source = model.config if tokenizer is None else tokenizer
    eos, bos, pad = (getattr(source, f"{key}_token_id", None) for key in ("eos", "bos", "pad"))
    # Generation stops at `eos` alone; at other tokens in `ends` the caller has to stop it.
    if pad is None or pad >= num_embedding_rows(model):  # the embedding has no row for padding
        pad = eos
    # Without the model's settings of sampling.
    model.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=bos, pad_token_id=pad, use_cache=True)
    return tuple(ends) if isinstance(ends, list | tuple) else (ends,)


def with_date(base: Base, run_date: str) -> Base:
    """Return the base with a fixed date for its chat template, if the template writes the current date.

    Args:
        base: The base model; returned unchanged if it has a date.
        run_date: The date of the run, such as "2026-03-01T09:30:00"; empty for a new run, which gets the current one.
    """
    if base.tokenizer is None or base.date is not None:
        return base
    if not ChatTemplate(base.tokenizer).writes_date:
        return base
    date = datetime.fromisoformat(run_date) if run_date else datetime.now().replace(microsecond=0)
    return replace(base, date=date)


def digests_of(base: Base | None) -> dict[str, str]:
    """Return the digests of a base model and of its tokenizer, with the keys "base" and "tokenizer".

    Args:
        base: The base; None for a run that trains nets from scratch, whose digests are empty.
    """
    if base is None:
        return {"base": "", "tokenizer": ""}
    return {"base": base.digest, "tokenizer": digest_tokenizer(base.tokenizer)}


def tokenizer_of(base: Base) -> PreTrainedTokenizerBase:
    """Return the base model's tokenizer.

    Raises:
        DataError: The base has no tokenizer.
    """
    if base.tokenizer is None:
        raise DataError(f"base {base.name}: it has no tokenizer, so text cannot be tokenised; give a base with one")
    return base.tokenizer
