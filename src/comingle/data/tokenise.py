"""Documents to one stream of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Fast tokenizers work on the documents of a batch in parallel; a stream that is limited stops after a batch.
_BATCH_DOCUMENTS = 256


def tokenise(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None
) -> Int32[Tensor, " tokens"]:
    """One stream of tokens, every document followed by the tokenizer's end-of-sequence token.

    A tokenizer without one marks documents by its begin-of-sequence token, in the same place; without either they
    touch. No other special token is added, and a special token spelt out in a document is tokenised as the text it is:
    only a real border is a border. ``max_tokens`` keeps the head of the stream.
    """
    parts: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
    kept = 0
    for part in _encode(documents, tokenizer):
        parts.append(part)
        kept += len(part)
        if max_tokens is not None and kept >= max_tokens:
            break
    return torch.cat(parts)[:max_tokens]


def _encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Int32[Tensor, " tokens"]]:
    """The tokens of a batch of documents at a time, borders included."""
    border: Any = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
    suffix = [] if border is None else [border]
    for start in range(0, len(documents), _BATCH_DOCUMENTS):
        encoded = tokenizer(
            list(documents[start : start + _BATCH_DOCUMENTS]),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,  # no warning that a document is longer than the model's context: it is cut into windows
        )
        tokens = chain.from_iterable([*document, *suffix] for document in encoded["input_ids"])
        yield torch.tensor(list(tokens), dtype=torch.int32)
