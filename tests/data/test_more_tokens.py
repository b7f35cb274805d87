"""Bases whose tokenizer was given tokens that the embedding has no rows for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.quick import TINY_TRAINING

import comingle
from comingle.models.loading import load_base
from comingle.models.random_bases import byte_tokenizer
from comingle.models.scoring import hide
from comingle.serving.access import Keys, Limits
from comingle.serving.answers import Prompts
from comingle.serving.api import make_app
from comingle.serving.engine import Engine
from comingle.utils.errors import DataError

ROWS, START = 259, "<|im_start|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATS = [{"prompt": f"Say {n}.", "response": "Yes."} for n in range(20)]
TEXT = ["The dog ran to the park and it met a cat there. " * 4] * 6
ASKED = [{"role": "user", "content": "Say yes."}]


def no_row(place: str = ".*") -> str:
    """Return a pattern of the error for the token without a row, found in ``place``."""
    return rf"got token 259 \(<\|im_start\|>\) in {place}; .*261 tokens.*259 rows"


def loaded(**specials: str) -> tuple[Any, Any]:
    """A base with two tokens more than rows; ``specials`` are what else they are for."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [START, "<|im_end|>"], **specials})
    tokenizer.chat_template = CHATML
    return load_base("random:llama?layers=1&dim=16&heads=2&mlp=32", dtype="float32", device="cpu").model, tokenizer


def person(**specials: str) -> Any:
    """A user of text that lacks the tokens."""
    options: Any = {"base": loaded(**specials), "method": "pretrained"}
    return comingle.run({"training": TINY_TRAINING}, users={"ada": TEXT, "ben": TEXT}, **options).user("ada")


def run_files(folder: Path, data: dict[str, Any], *, store: str = "disk", **specials: str) -> comingle.Run:
    for part in loaded(**specials):
        part.save_pretrained(folder / "base")
    recipe = {"base": str(folder / "base"), "data": data, "training": {"context": 64, "rounds": 1, "batch_size": 1}}
    return comingle.run({**recipe, "runtime": {"store": store}}, method="fedavg")


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_conversations_in_a_template_without_rows_are_refused(store: str, tmp_path: Path) -> None:
    (tmp_path / "ada.jsonl").write_text("\n".join(json.dumps(row) for row in CHATS))
    data = {"kind": "conversations", "users": {"ada": str(tmp_path / "ada.jsonl")}}
    with pytest.raises(DataError, match=f"base .*: {no_row()}.*resize_token_embeddings"):
        run_files(tmp_path, data, store=store)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_so_are_texts_with_such_a_border(store: str, tmp_path: Path) -> None:
    (tmp_path / "ada.txt").write_text("\n\n".join(TEXT))
    data = {"users": {"ada": {"train": str(tmp_path / "ada.txt"), "test": str(tmp_path / "ada.txt")}}}
    with pytest.raises(DataError, match=no_row("user 'ada'")):
        run_files(tmp_path, data, store=store, eos_token=START)
    run_files(tmp_path, data, store=store)


def test_users_read_for_a_base_with_rows_are_checked_for_one_without(tmp_path: Path) -> None:
    """Tokens on disk are of a tokenizer, which bases with more and with fewer rows share."""
    (tmp_path / "ada.jsonl").write_text("\n".join(json.dumps(row) for row in CHATS))
    data = {"kind": "conversations", "users": {"ada": str(tmp_path / "ada.jsonl")}}
    model, tokenizer = loaded()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "whole")
    recipe = {"data": data, "training": {"context": 64, "rounds": 1, "batch_size": 1}, "runtime": {"store": "disk"}}
    comingle.run({"base": str(tmp_path / "whole"), **recipe}, method="fedavg")
    with pytest.raises(DataError, match=no_row()):
        run_files(tmp_path, data)


def test_prompts_and_streams_are_refused() -> None:
    ada = person()
    for prompt in (f"a {START} b", ["a", START]):
        with pytest.raises(DataError, match=no_row("the prompt")):
            ada.generate(prompt, max_new_tokens=2)
    with pytest.raises(DataError, match=r"token 260 \(<\|im_end\|>\) in"):
        ada.generate(ASKED, max_new_tokens=2)
    for call in (lambda ids: ada.score(ids, context=8), lambda ids: ada.logits(ids.view(1, -1))):
        with pytest.raises(DataError, match=no_row()):
            call(torch.tensor([1, 2, ROWS, 3]))
    assert ada.perplexity(f"a {START} b") > 1  # spelt out, it is text


def test_a_text_that_begins_with_such_a_token_is_refused() -> None:
    ada = person()
    object.__setattr__(ada.model, "base", replace(ada.model.base))
    ada.model.base.__dict__["begin"] = ROWS
    with pytest.raises(DataError, match=no_row()):
        ada.perplexity("a text")


def test_padding_without_a_row_changes_nothing() -> None:
    ada, prompts = person(pad_token=START), ["a", "a longer one"]
    assert ada.generate(prompts, max_new_tokens=4) == [ada.generate(one, max_new_tokens=4) for one in prompts]


def test_the_server_refuses_them_with_400() -> None:
    ada = person()
    app = make_app(Engine({"ada": ada}, rows=1), Keys({"ada": ada}, None), Limits(rate=10_000))

    async def post(path: str, asked: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(f"/v1/{path}", json={"model": "ada", "max_tokens": 2, **asked})

    def answer(path: str, **asked: Any) -> tuple[int, str]:
        found = asyncio.run(post(path, asked))
        return found.status_code, json.dumps(found.json())

    for path, asked in (
        ("chat/completions", {"messages": ASKED}),
        ("completions", {"prompt": f"a {START}"}),
        ("completions", {"prompt": ["a", f"a {START}"]}),
    ):
        code, told = answer(path, **asked)
        assert code == 400
        assert f"got token 259 ({START})" in told
    for prompt in ([97, ROWS], [[97], [ROWS]]):
        code, told = answer("completions", prompt=prompt)
        assert code == 400
        assert "got token 259" in told
    assert answer("completions", prompt=[97, ROWS - 1])[0] == 200
    with pytest.raises(DataError, match=no_row()):
        Prompts(ada.model.base).of_messages(ASKED)


def test_labels_without_a_row_in_the_head_are_refused_and_what_is_only_read_is_not() -> None:
    base = load_base("random:gpt2?layers=1&dim=32", dtype="float32", device="cpu")
    base.model.set_output_embeddings(torch.nn.Linear(32, 250, bias=False))
    stream = torch.tensor([1, 255, 2])
    base.require_rows(hide(stream), "user 'ada'")
    base.require_rows([1, 255], "the prompt")
    with pytest.raises(DataError, match=r"token 255 .*user 'ada'.*head .*250 rows"):
        base.require_rows(stream, "user 'ada'")
