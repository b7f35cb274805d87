"""A base model as a folder in the Hugging Face layout, checked before loading, and its digests."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from comingle.models.hardware import free_bytes
from comingle.models.pretrained import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError
from comingle.utils.trees import digest_all

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# Architectures with a causal head; what else a config.json may name (masked, sequence-to-sequence) has none.
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a configuration, a tokenizer and every file of the weights."""
    if not (folder / "config.json").is_file() or not has_tokenizer(folder):
        return False
    try:
        return all(path.is_file() for path in weight_files(folder))
    except BaseModelError:
        return False


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer of any of the known kinds."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def read_folder(
    folder: Path, *, dtype: torch.dtype, device: torch.device, attention: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Model (on the CPU) and tokenizer (None where the folder holds none); never unpickles, never runs its code.

    `device` is where the model will be moved to.

    Raises:
        BaseModelError: no configuration, not a causal or a quantised model, weights missing, pickled, damaged or larger
            than memory.
    """
    check_config(folder, _read_json(folder / "config.json"))
    if (folder / _ADAPTER).is_file():  # which transformers would load too, or leave out where peft is not installed
        raise BaseModelError(
            f"base model {folder}: {_ADAPTER} says that an adapter lies beside the weights; merge it into them "
            "(peft: merge_and_unload), or move it out of this folder."
        )
    parameters = sum(_count_weights(path) for path in weight_files(folder))
    for place in {torch.device("cpu"), device}:  # loaded there first
        require_memory(f"base model {folder}:", parameters, dtype, place)
    model = _load_model(folder, dtype=dtype, attention=attention)
    require_finite(folder, model)
    return model, load_tokenizer(folder)


def require_memory(what: str, parameters: int, dtype: torch.dtype, device: torch.device, advice: str = "") -> None:
    """See that so many weights fit into what `device` has free, before the system ends the process for it.

    `advice` is what to do besides taking a smaller base.

    Raises:
        BaseModelError: they do not.
    """
    needed, free = parameters * dtype.itemsize, free_bytes(device) if device.type in ("cpu", "cuda") else math.inf
    if needed > free:
        advice = advice or ("runtime.dtype: bfloat16" if dtype.itemsize > 2 else "")
        raise BaseModelError(
            f"{what} its weights need {needed / 1e9:,.3f} GB of memory in {str(dtype).removeprefix('torch.')}, and "
            f"{free / 1e9:,.3f} GB are free on {device.type}; take a smaller base{advice and f', or {advice}'}."
        )


def own_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config` without its own choice of kernels: a foreign one may name code on the hub, which would be run."""
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def check_config(where: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration that is not of a plain causal language model.

    Raises:
        BaseModelError: encoder-decoder, masked or other architectures, quantised weights, no model type.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    if not model_type:
        raise BaseModelError(f"base model {where}: config.json names no model_type, so it is not a transformers model.")
    if config.get("is_encoder_decoder") or not (not architectures or any(a.endswith(_CAUSAL) for a in architectures)):
        raise BaseModelError(
            f"base model {where}: expected a causal language model (...ForCausalLM), "
            f"got {', '.join(architectures) or 'an encoder-decoder'} of type {model_type!r}."
        )
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown")
        raise BaseModelError(
            f"base model {where}: expected bfloat16 or float32 weights, got weights quantised with {method!r}."
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        holds = ", ".join(sorted(entry.name for entry in path.parent.iterdir())[:5]) or "nothing"
        raise BaseModelError(f"base model {path.parent}: no {path.name} in this folder; it holds {holds}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaseModelError(f"base model {path.parent}: {path.name} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise BaseModelError(f"base model {path.parent}: {path.name} must hold an object, got {content!r:.40}.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights, which may be missing.

    Raises:
        BaseModelError: none are named, or they are pickled.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        shards = _read_json(folder / _INDEX).get("weight_map", {})
        return sorted({folder / name for name in shards.values()})
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise BaseModelError(
            f"base model {folder}: its weights are pickled ({pickles[0]}); comingle never unpickles, because that runs "
            f"code. Convert them to {_WEIGHTS} (transformers' save_pretrained writes it)."
        )
    raise BaseModelError(f"base model {folder}: no weights; expected {_WEIGHTS} or {_INDEX} (pickles are never read).")


def _count_weights(path: Path) -> int:
    """Numbers in a file of weights, out of its header.

    Raises:
        BaseModelError: missing, truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise BaseModelError(f"base model {path.parent}: {path.name} is named in {_INDEX} but missing.")
    try:
        with safe_open(path, framework="pt") as file:  # which compares the header with the length of the file
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise BaseModelError(
            f"base model {path.parent}: {path.name} ({path.stat().st_size} bytes) is truncated or damaged ({error}); "
            f"delete it and fetch it again."
        ) from error


def _load_model(folder: Path, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=own_config(config),
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a foreign file meets a foreign library here; whatever it says, the file is at fault
        raise BaseModelError(f"base model {folder}: transformers cannot load it: {one_line(error)}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random weights in their place
        raise BaseModelError(f"base model {folder}: the weights lack {len(missing)} tensors, first {missing[0]!r}.")
    _require_places(folder, sorted(report["unexpected_keys"]))
    return model


def _require_places(folder: Path, unexpected: Sequence[str]) -> None:
    """Check that the model has a place for all weights in the files: transformers leaves out the others.

    ``unexpected`` are those that it left out. Buffers that the model computes itself are no loss.

    Raises:
        BaseModelError: weights would be lost.
    """
    shapes = _shapes_of(folder, unexpected)
    lost = [name for name in unexpected if not _is_computed(name, shapes.get(name, []))]
    if lost:
        count = f"{len(lost)} tensor{'s' * (len(lost) > 1)} that its config.json has no place for"
        raise BaseModelError(
            f"base model {folder}: {lost[0]}{', ...' if len(lost) > 1 else ''} would be lost ({count}), and with it "
            "what the model says; give a config.json that fits the weights, or weights without them."
        )


def _is_computed(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a buffer of older files: rotary frequencies or a causal mask (GPT-2, GPT-J, GPT-NeoX)."""
    if re.search(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$", name):
        return True
    if re.search(r"(^|\.)(attn|attention)\.masked_bias$", name):
        return math.prod(shape) == 1
    return bool(re.search(r"(^|\.)(attn|attention)\.bias$", name)) and len(shape) == 4 and shape[:2] == [1, 1]


def _shapes_of(folder: Path, names: Collection[str]) -> dict[str, list[int]]:
    """Read the shapes of some tensors from the headers of the weights' files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder) if names else ():
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys() if name in names}  # noqa: SIM118
    return shapes


def require_finite(folder: Path, model: PreTrainedModel) -> None:
    """See that every weight is a finite number; ``folder`` is what messages call the model.

    Raises:
        BaseModelError: one is not.
    """
    for name, tensor in model.named_parameters():
        if tensor.numel() and not torch.stack(tensor.detach().aminmax()).isfinite().all():
            raise BaseModelError(f"base model {folder}: its weight {name} holds numbers that are not finite.")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `folder`, None where it holds none.

    Raises:
        BaseModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise BaseModelError(f"base model {folder}: its tokenizer cannot be loaded: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The first line of what `error` says, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
