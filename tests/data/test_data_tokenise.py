from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from comingle.data.sources import read_documents
from comingle.data.splits import UserText
from comingle.data.text.streams import tokenise


@pytest.mark.parametrize(
    ("special", "stream"),
    [
        ({"eos_token": "<eos>"}, [1, 2, 5, 3, 5]),
        ({"bos_token": "<bos>"}, [1, 2, 5, 3, 5]),
        ({"bos_token": "<bos>", "eos_token": "<eos>"}, [1, 2, 6, 3, 6]),
        ({}, [1, 2, 3]),
    ],
)
def test_documents_end_in_the_tokenizers_border(make_word_tokenizer, special: dict, stream: list[int]):
    tokens = tokenise(["a b", "c"], make_word_tokenizer(**special))
    assert tokens.tolist() == stream
    assert tokens.dtype == torch.int32


def test_no_documents_make_an_empty_stream(word_tokenizer):
    tokens = tokenise([], word_tokenizer)
    assert (tokens.shape, tokens.dtype) == ((0,), torch.int32)


def test_an_empty_document_is_a_border(word_tokenizer):
    assert tokenise(["", "a"], word_tokenizer).tolist() == [5, 1, 5]


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 900, 2000])
def test_a_limit_keeps_the_head_of_the_stream(word_tokenizer, limit: int):
    documents = ["a b", "c"] * 300
    everything = tokenise(documents, word_tokenizer)
    assert len(everything) == 1500
    assert tokenise(documents, word_tokenizer, max_tokens=limit).tolist() == everything[:limit].tolist()


def test_a_special_token_in_a_document_is_text(gpt2_tokenizer):
    border = gpt2_tokenizer.eos_token_id
    tokens = tokenise(["before <|endoftext|> after"], gpt2_tokenizer)
    assert tokens.tolist().count(border) == 1
    assert gpt2_tokenizer.decode(tokens[:-1].tolist()) == "before <|endoftext|> after"


def test_a_tokenizer_that_adds_special_tokens_adds_only_borders(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models" / "stories260K")
    assert tokenizer("Once upon a time")["input_ids"][0] == tokenizer.bos_token_id
    tokens = tokenise(["Once upon a time", "</s> the end"], tokenizer).tolist()
    assert tokens.count(tokenizer.bos_token_id) == 0
    assert tokens.count(tokenizer.eos_token_id) == 2
    assert tokens[-1] == tokenizer.eos_token_id


def test_a_document_longer_than_the_model_is_not_warned_about(word_tokenizer, caplog):
    word_tokenizer.model_max_length = 4
    assert len(tokenise(["a " * 50], word_tokenizer)) == 51
    assert caplog.messages == []


def test_real_text_has_the_published_number_of_tokens(shared_data, gpt2_tokenizer):
    documents = read_documents(shared_data / "users" / "stackexchange_users.jsonl.xz", column="text")
    counted = 65_818 + 85_454 + 197_625 + 68_257 + 64_975 + 245_035 + 396_927 + 66_164
    assert len(tokenise(documents, gpt2_tokenizer)) == counted + len(documents)


def test_a_real_document_comes_back_from_its_tokens(shared_data, gpt2_tokenizer):
    user = UserText(name="code", train=tuple(read_documents(shared_data / "slim4" / "code.jsonl.xz")[:20]))
    stream = tokenise(user.train, gpt2_tokenizer).tolist()
    decoded = gpt2_tokenizer.decode(stream, clean_up_tokenization_spaces=False)
    assert decoded.split("<|endoftext|>") == [*user.train, ""]
