"""Real text and tokenizers for the tests of ``comingle.data``."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from commands import comingle as comingle


@pytest.fixture(scope="session")
def gpt2_tokenizer(shared_data: Path) -> PreTrainedTokenizerFast:
    """GPT-2's own byte-level BPE, 50,257 tokens."""
    with lzma.open(shared_data / "tokenizers" / "gpt2_tokenizer.json.xz", "rt", encoding="utf-8") as file:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(file.read()), eos_token="<|endoftext|>")


@pytest.fixture
def make_word_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Builds a tokenizer of the words a, b, c, d (ids 1 to 4; 0 is unknown); special tokens are numbered after them."""

    def make(**special: str) -> PreTrainedTokenizerFast:
        vocabulary = {word: index for index, word in enumerate(["?", "a", "b", "c", "d", *special.values()])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)

    return make


@pytest.fixture
def word_tokenizer(make_word_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """Words a, b, c, d with ``<eos>`` (5)."""
    return make_word_tokenizer(eos_token="<eos>")
