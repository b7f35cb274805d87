"""The frozen pretrained language model of a run, with its tokenizer."""

from __future__ import annotations

import logging
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

logger = logging.getLogger("comingle")


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
        return next(iter(begin_of(self.tokenizer)), None)

    @property
    def rows(self) -> int:
        """The number of rows of the embedding; the tokenizer's vocabulary may be larger."""
        return rows_of(self.model)

    def require_rows(self, tokens: Int[Tensor, "*any"] | Sequence[int], source: str) -> None:
        """Raise an error if a token has no row in the embedding, or a predicted token none in the output head.

        Args:
            tokens: A tensor of tokens, which the model reads and predicts; tokens that it only reads are encoded as
                negative numbers by :func:`~comingle.models.scoring.hide`. Or a sequence of tokens that it only reads.
            source: Where the tokens come from, for the message.

        Raises:
            DataError: A token has no row; the message names the first such token.
        """
        tokens = tokens if isinstance(tokens, Tensor) else hide(torch.tensor(tokens, dtype=torch.int64))
        if not tokens.numel():
            return
        # Tokens that are only read are negative, the largest token as the smallest number.
        smallest, largest = (int(end) for end in torch.aminmax(tokens))
        head: Any = getattr(self.model.get_output_embeddings(), "weight", None)
        largest_hidden = PAD - 1 - smallest  # decoded as by `hide`
        if max(largest, largest_hidden) >= self.rows:
            inputs = torch.where(tokens < PAD, hide(tokens), tokens)
            raise self._missing_row_error("embedding", self.rows, int(inputs[inputs >= self.rows][0]), source)
        if head is not None and largest >= len(head):
            raise self._missing_row_error("head", len(head), int(tokens[tokens >= len(head)][0]), source)

    def _missing_row_error(self, part: str, rows: int, token: int, source: str) -> DataError:
        """Return the error for a token ID that is beyond the rows of the embedding or of the output head.

        Args:
            part: The matrix without a row for the token, "embedding" or "head".
            rows: Number of rows of that matrix.
            token: The token ID.
            source: Origin of the token, for the message.
        """
        size, spelling = "", ""
        if self.tokenizer is not None:
            size = f"its tokenizer has {len(self.tokenizer):,} tokens, "  # type: ignore[arg-type]
            spelling = f" ({self.tokenizer.convert_ids_to_tokens(token)})" if token < len(self.tokenizer) else ""  # type: ignore[arg-type]
        reason = f"{size}its {part} only {rows:,} rows; call resize_token_embeddings first"
        return DataError(f"base {self.name}: got token {token}{spelling} in {source}; {reason}")

    @cached_property
    def digest(self) -> str:
        """A digest of the weights; it does not depend on ``dtype`` if there is an ``origin``."""
        if self.origin is None:
            return digest_model(self.model)
        return digest_folder(self.origin) if isinstance(self.origin, Path) else digest_all(self.origin)


def rows_of(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's embedding."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def freeze(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Freeze a model in place (no gradients, dropout, cache in training or sampling), and return its end tokens.

    Args:
        model: The model.
        tokenizer: Its tokenizer, which gives the special tokens of generation; None: the model's configuration does.

    Returns:
        The tokens that end a text by the model's original generation settings.
    """
    from transformers import GenerationConfig

    candidates = [getattr(config, "eos_token_id", None) for config in (model.generation_config, model.config)]
    ends = next((tokens for tokens in candidates if tokens is not None), ())
    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = False
    # With a checkpoint's sampling defaults generation would depend on its source. Without a padding ID transformers
    # prints a warning at each call.
    source = model.config if tokenizer is None else tokenizer
    eos, bos, pad = (getattr(source, f"{key}_token_id", None) for key in ("eos", "bos", "pad"))
    pad = eos if pad is None or pad >= rows_of(model) else pad  # the embedding reads padding after finished texts
    model.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=bos, pad_token_id=pad, use_cache=True)
    return tuple(ends) if isinstance(ends, list | tuple) else (ends,)


def with_date(base: Base, recorded: str) -> Base:
    """Return the base with a fixed date for its chat template, if the template writes the current date.

    So training, evaluation and a resumed run see the same prompts.

    Args:
        base: The base model; returned unchanged if it has a date.
        recorded: The date of the run in ISO format; empty for a new run, which gets the current date.
    """
    if base.tokenizer is None or base.date is not None or not ChatTemplate(base.tokenizer).dated:
        return base
    return replace(base, date=datetime.fromisoformat(recorded) if recorded else datetime.now().replace(microsecond=0))


def digests_of(base: Base | None) -> dict[str, str]:
    """Return the digests of a base model and its tokenizer by name; empty strings for runs that train nets."""
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
