"""Digests of a base and its tokenizer, by which a run knows again what it was begun with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from comingle.models.folders import weight_files
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.digests import digest_all

_ASIDE = ("transformers_version", "_name_or_path")
"""What a configuration says of how it was written."""


def digest_folder(folder: Path) -> str:
    """Of the files of the weights, read once, and of the configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts: list[Any] = [{key: value for key, value in config.items() if key not in _ASIDE}]
    for path in weight_files(folder):
        with path.open("rb") as file:
            parts.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    return digest_all(*parts)


def digest_model(model: PreTrainedModel) -> str:
    """Of all tensors, for a model that is in memory alone."""
    parts = [part for name, tensor in sorted(model.state_dict().items()) for part in (name, tensor)]
    return digest_all(*parts)


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Of what decides on the tokens of a text or, behind a colon, of a conversation; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    return f"{_digest_tokens(tokenizer)}:{digest_all(getattr(tokenizer, 'chat_template', None) or '')}"


def _digest_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what decides on the tokens of a text, and of the tokens that begin and end one."""
    ids = [getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad")]
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest_all(type(tokenizer).__name__, tokenizer.get_vocab(), ids)
    content = json.loads(backend.to_str())
    aside = ("truncation", "padding")  # settings of the last call
    return digest_all({key: value for key, value in content.items() if key not in aside}, ids)
