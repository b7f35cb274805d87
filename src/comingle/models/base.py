"""A frozen pretrained language model, as the rest of the library sees it."""

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
    """One pretrained model that is loaded once, never trained and never copied.

    `model` has no parameter that requires a gradient, is in evaluation mode (no dropout) and keeps no cache.
    `tokenizer` is None for a folder that holds none. `name` says which source was used and, for an alias or a hub
    name, holds no path of this machine. `dtype` is that of the weights. `origin` is the folder that they are from, or
    the words that define random ones; None where only the model itself says what it is. `quantised` says in how many
    bits the linears of its decoder layers are kept, where these are fewer than those of `dtype`. Whose `attention` is
    "auto", its attention may be computed by other code. `adds_bos` is False for runs whose texts do not begin with the
    tokenizer's begin-of-text token. `ends` are the tokens that end a text by the model's own generation settings,
    which may be more than the tokenizer's one.
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
    """The date that the chat template writes, where it writes today's: one for all of a run."""
    ends: tuple[int, ...] = ()
    adds_bos: bool = True

    @cached_property
    def begin(self) -> int | None:
        """The token that every text begins with; None where the tokenizer adds none, or it is not wanted."""
        if self.tokenizer is None or not self.adds_bos:
            return None
        return next(iter(begin_of(self.tokenizer)), None)

    @property
    def rows(self) -> int:
        """The number of tokens that the embedding has rows for, which a tokenizer may exceed."""
        return rows_of(self.model)

    def require_rows(self, tokens: Int[Tensor, "*any"] | Sequence[int], whose: str) -> None:
        """Refuse tokens without a row in the embedding, or predicted ones without one in the head.

        Args:
            tokens: a stream or windows, whose hidden tokens are read and not predicted
            (:mod:`comingle.models.scoring`);
                a sequence of numbers is read.
            whose: what has the tokens, as the message says.

        Raises:
            DataError: there is such a token; the first is named.
        """
        tokens = tokens if isinstance(tokens, Tensor) else hide(torch.tensor(tokens, dtype=torch.int64))
        if not tokens.numel():
            return
        low, high = (int(end) for end in torch.aminmax(tokens))
        head: Any = getattr(self.model.get_output_embeddings(), "weight", None)
        if max(high, PAD - 1 - low) >= self.rows:
            shown = torch.where(tokens < PAD, hide(tokens), tokens)
            raise self._no_row("embedding", self.rows, int(shown[shown >= self.rows][0]), whose)
        if head is not None and high >= len(head):
            raise self._no_row("head", len(head), int(tokens[tokens >= len(head)][0]), whose)

    def _no_row(self, part: str, rows: int, token: int, whose: str) -> DataError:
        known, spelt = "", ""
        if self.tokenizer is not None:
            known = f"its tokenizer knows {len(self.tokenizer):,} tokens, "  # type: ignore[arg-type]
            spelt = f"{self.tokenizer.convert_ids_to_tokens(token)} " if token < len(self.tokenizer) else ""  # type: ignore[arg-type]
        told = f"{known}its {part} has {rows:,} rows, and {spelt}({token}) is used by {whose}"
        return DataError(f"base {self.name}: {told}; resize_token_embeddings first")

    @cached_property
    def digest(self) -> str:
        """By which the weights are known again: whatever they are rounded to, where they have an origin."""
        if self.origin is None:
            return digest_model(self.model)
        return digest_folder(self.origin) if isinstance(self.origin, Path) else digest_all(self.origin)


def rows_of(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model's embedding has rows for."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def freeze(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Make `model` a constant: no gradients, no dropout, no cache in training; plain greedy generation.

    Returns:
        The tokens that end a text by the model's own generation settings.
    """
    from transformers import GenerationConfig

    own = [getattr(part, "eos_token_id", None) for part in (model.generation_config, model.config)]
    ends = next((one for one in own if one is not None), ())
    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = False
    # A checkpoint's own sampling defaults would make generation depend on the source, and a missing padding id would
    # print a warning at every call.
    ids = model.config if tokenizer is None else tokenizer
    eos, bos, pad = (getattr(ids, f"{key}_token_id", None) for key in ("eos", "bos", "pad"))
    pad = eos if pad is None or pad >= rows_of(model) else pad  # a finished text goes through the embedding with it
    model.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=bos, pad_token_id=pad, use_cache=True)
    return tuple(ends) if isinstance(ends, list | tuple) else (ends,)


def with_date(base: Base, recorded: str) -> Base:
    """Return the base with one date for its chat template, where it writes today's.

    Args:
        base: kept as it is if it has a date already.
        recorded: the date of the run in ISO format; empty: the run begins now.
    """
    if base.tokenizer is None or base.date is not None or not ChatTemplate(base.tokenizer).dated:
        return base
    return replace(base, date=datetime.fromisoformat(recorded) if recorded else datetime.now().replace(microsecond=0))


def digests_of(base: Base | None) -> dict[str, str]:
    """Of a base and of its tokenizer, by what each is called; empty where users train nets."""
    if base is None:
        return {"base": "", "tokenizer": ""}
    return {"base": base.digest, "tokenizer": digest_tokenizer(base.tokenizer)}


def tokenizer_of(base: Base) -> PreTrainedTokenizerBase:
    """Return the base model's tokenizer.

    Raises:
        DataError: it has none.
    """
    if base.tokenizer is None:
        raise DataError(f"base {base.name}: no tokenizer in it, so text cannot become tokens")
    return base.tokenizer
