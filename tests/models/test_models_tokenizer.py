from __future__ import annotations

from typing import Any

import pytest

from comingle.models.loading import load_base
from comingle.models.random_bases import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing ",
        "Hello, world!\n  def f(x): return x",
        "don't , space . before ! marks",
        "é 漢字 🙂 e\u0301 \ufeff",
        "\x00\t\r\n\x7f",
        "a <|eos|> in the text",
        "".join(map(chr, range(0x500))),
    ],
)
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_ids_are_byte_values(tokenizer: Any) -> None:
    assert tokenizer("Aé").input_ids == [65, 0xC3, 0xA9]
    assert len(tokenizer) == 259
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


def test_ids_beyond_the_bytes_decode_to_nothing() -> None:
    base = load_base("random:gpt2?vocab=300", device="cpu")
    assert base.tokenizer is not None
    assert base.tokenizer.decode([65, 299, 66]) == "AB"
