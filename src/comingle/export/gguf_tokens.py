"""A tokenizer as the keys of a GGUF file: byte-level BPE, and sentencepiece's BPE with bytes to fall back on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.utils.errors import DataError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
"""Expressions by which a text is split before it is merged, and what llama.cpp calls them."""
_SPACE = "▁"


class Kind(IntEnum):
    """What a token is, as GGUF numbers it."""

    NORMAL, UNKNOWN, CONTROL, GIVEN, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Everything that llama.cpp needs to read and write text."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    numbers: Mapping[str, int]
    """Of the tokens bos, eos, eot, eom, unk and pad, where there are such."""
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    chat_template: str | list[dict[str, str]] | None


def vocabulary(
    name: str, tokenizer: PreTrainedTokenizerBase, size: int, *, turn_end: int | None = None, ends: Sequence[int] = ()
) -> Vocabulary:
    """The vocabulary of a tokenizer, filled up with tokens that nothing uses to ``size``.

    Args:
        name: The user, for messages.
        tokenizer: A fast tokenizer.
        size: Rows of the model's embedding.
        turn_end: The token that ends a response.
        ends: All tokens that end a text; a file has a place for one more than the tokenizer's and ``turn_end``.

    Raises:
        DataError: a tokenizer of another kind, or one that splits text in a way that llama.cpp has no name for.
    """
    spec = _spec(name, tokenizer)
    model, merges = spec["model"], _merges(spec["model"])
    sentencepiece = bool(model.get("byte_fallback"))
    pre = "default" if sentencepiece else _pre(name, spec)
    added = {one["id"]: one for one in spec["added_tokens"]}
    by_number = {number: token for token, number in model["vocab"].items()}
    by_number |= {number: one["content"] for number, one in added.items()}
    tokens = tuple(by_number.get(number, f"[UNUSED{number}]") for number in range(size))
    kinds = tuple(_kind(n, t, by_number, added, model, sentencepiece) for n, t in enumerate(tokens))
    numbers = {key: getattr(tokenizer, f"{key}_token_id", None) for key in ("bos", "eos", "unk", "pad")}
    numbers["eot"] = turn_end
    numbers["eom"] = next((end for end in ends if end not in (numbers["eos"], turn_end)), None)
    alone, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    return Vocabulary(
        model="llama" if sentencepiece else "gpt2",
        pre=pre,
        tokens=tokens,
        kinds=kinds,
        scores=_scores(tokens, merges) if sentencepiece else (),
        merges=() if sentencepiece else tuple(" ".join(pair) for pair in merges),
        numbers={key: number for key, number in numbers.items() if number is not None},
        adds_bos=alone[0] == numbers["bos"],
        adds_eos=alone[-1] == numbers["eos"],
        adds_space=tokens[plain[0]].startswith(_SPACE),
        chat_template=[{"name": name, "template": one} for name, one in template.items()]
        if isinstance(template := getattr(tokenizer, "chat_template", None), dict)
        else template,
    )


def _spec(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if spec["model"].get("type") != "BPE":
        raise _refused(name, f"a tokenizer of type {spec['model'].get('type')}, not of byte pairs")
    return spec


def _pre(name: str, spec: Mapping[str, Any]) -> str:
    """What llama.cpp calls the way in which a byte-level tokenizer splits text."""
    outer = spec["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    kinds = [part.get("type") for part in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1]["add_prefix_space"]:
        if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
            return "smollm"
        pattern = parts[0].get("pattern", {}).get("Regex")
        if kinds == ["Split", "ByteLevel"] and pattern in _SPLITS and not parts[1]["use_regex"]:
            found = _SPLITS[pattern]
            if bool(spec["model"].get("ignore_merges")) == (found == "llama-bpe"):  # as llama.cpp has it
                return found
    raise _refused(name, "a tokenizer that splits text in a way that GGUF has no name for here")


def _kind(
    number: int, token: str, known: Mapping[int, str], added: Mapping[int, Any], model: Any, sentencepiece: bool
) -> int:
    if number not in known:
        return Kind.UNUSED
    if sentencepiece and token == model.get("unk_token"):
        return Kind.UNKNOWN
    if number in added:
        return Kind.CONTROL if added[number]["special"] else Kind.GIVEN
    bytelike = sentencepiece and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return Kind.BYTE if bytelike else Kind.NORMAL


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """As pairs, in whichever of the two spellings that tokenizers have had."""
    pairs = (one.split(" ", 1) if isinstance(one, str) else one for one in model["merges"])
    return [(first, second) for first, second in pairs]


def _scores(tokens: tuple[str, ...], merges: list[tuple[str, str]]) -> tuple[float, ...]:
    """sentencepiece merges the pair whose result scores highest, so a result's score is the rank of its first merge."""
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    return tuple(-float(ranks.get(token, len(merges))) for token in tokens)


def _refused(name: str, why: str) -> DataError:
    return DataError(f"user {name!r}: the base has {why}, so there is no GGUF file of it; --format transformers is one")
