"""Conversion of GGUF files to folders of float32 safetensors in the Hugging Face layout, cached per file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from comingle.models.folders import check_config, gguf_cache, one_line, require_memory
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError
from comingle.utils.files import make_once
from comingle.utils.records import logger

# Part of the cached folder's name: raise it when the conversion's output changes.
_CONVERSION_VERSION = 2


def convert_gguf(path: Path) -> Path:
    """Return a folder with the model of a GGUF file as float32 safetensors; cached after the first conversion.

    Raises:
        BaseModelError: The file is not GGUF, damaged or of an unsupported kind, or the cache cannot be written.
    """
    _raise_unless_gguf(path)
    target = gguf_cache() / f"{path.stem}-{_fingerprint(path)}-v{_CONVERSION_VERSION}"
    try:
        return make_once(target, lambda folder: _convert_into(folder, path))
    except OSError as error:
        raise BaseModelError(
            f"base model {path}: cannot write the conversion to {target.parent} ({error}); "
            f"free space there or set COMINGLE_CACHE to another folder."
        ) from error


def _raise_unless_gguf(path: Path) -> None:
    """Raise a :class:`BaseModelError` if a file is not GGUF, or the package that reads it is missing."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BaseModelError(f"base model {path}: not a GGUF file; it starts with {magic!r} instead of b'GGUF'.")
    if importlib.util.find_spec("gguf") is None:
        raise BaseModelError(f"base model {path}: reading GGUF needs the package gguf; pip install 'comingle[demo]'.")


def _fingerprint(path: Path) -> str:
    """Return a short digest of the file's content, for the name of the cached folder."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _convert_into(folder: Path, path: Path) -> None:
    """Write model and tokenizer of a GGUF file to a folder in the Hugging Face layout.

    Args:
        folder: The folder, which exists.
        path: The GGUF file.

    Raises:
        BaseModelError: The file is damaged or unsupported.
        OSError: The folder cannot be written.
    """
    from safetensors import SafetensorError

    logger.info("converting %s to safetensors, once; this takes up to a minute", path.name)
    try:
        with _cached_reader():  # parses the file only once
            model, tokenizer = _read_gguf(path)
    except BaseModelError:
        raise
    except Exception as error:  # the library's errors for bad files have no common type
        raise BaseModelError(f"base model {path}: damaged or unsupported GGUF: {_one_line_message(error)}") from error
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(one_line(error)) from error


def _one_line_message(error: Exception) -> str:
    """Return the whole message in one line; torch names the mismatched tensors only after the first line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _cached_reader() -> Iterator[None]:
    """Replace ``gguf.GGUFReader`` in the context by a cached one, so that a GGUF file is parsed only once.

    transformers makes a reader, which parses the whole file, for each of the config, the tokenizer and the weights.
    """
    import gguf

    original_reader = gguf.GGUFReader
    setattr(gguf, "GGUFReader", cache(original_reader))  # noqa: B010 (type checkers reject a plain assignment)
    try:
        yield
    finally:
        setattr(gguf, "GGUFReader", original_reader)  # noqa: B010


def _read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, in float32, and the tokenizer of a GGUF file."""
    # Not with `from_pretrained`, which requires accelerate and leaves some tensors quantised.
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = GGUFReader(str(path))
    parameters = sum(int(tensor.n_elements) for tensor in file.tensors)
    require_memory(
        f"base model {path}: after conversion",
        2 * parameters,  # the tensors, and the model that they are copied into
        torch.float32,
        torch.device("cpu"),
        advice="its folder of safetensors",
    )
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    check_config(path, config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be disabled
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    _raise_if_dropped(path, file, model)
    _load_tensors(path, model, tensors)
    return model, _read_tokenizer(path)


def _raise_if_dropped(path: Path, file: Any, model: PreTrainedModel) -> None:
    """Raise an error if the file has tensors or RoPE scaling that transformers drops silently.

    Args:
        path: The GGUF file, for the message.
        file: The reader of the file.
        model: The model that transformers has made of it.

    Raises:
        BaseModelError: Something was dropped.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = str(file.get_field("general.architecture").contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names_that_are_read = get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    dropped = [tensor.name for tensor in file.tensors if tensor.name not in names_that_are_read]
    scaling = file.get_field(f"{architecture}.rope.scaling.type")
    if scaling is not None and str(scaling.contents()) not in ("", "none"):
        dropped.append(f"{scaling.contents()} RoPE scaling")
    if dropped:
        listed = f"{dropped[0]}, ..." if len(dropped) > 1 else dropped[0]
        raise BaseModelError(
            f"base model {path}: transformers does not read {listed}, "
            "so its predictions would change; give its folder of safetensors."
        )


def _load_tensors(path: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Copy tensors by name into a model.

    Args:
        path: The GGUF file, for the message.
        model: The model, changed in place.
        tensors: Its tensors; those tied to another may be missing.

    Raises:
        BaseModelError: A tensor of the model is missing.
    """
    result = model.load_state_dict(tensors, strict=False)
    missing = set(result.missing_keys)
    if model.config.tie_word_embeddings:
        missing -= set(model._tied_weights_keys or ())
        model.tie_weights()
    if missing:
        raise BaseModelError(f"base model {path}: the weights lack {len(missing)} tensors, first {min(missing)!r}.")


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file; SmolLM's also splits numbers into digits, as on the hub."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    pre_tokenizer = GGUFReader(str(path)).get_field("tokenizer.ggml.pre")
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":  # transformers would use GPT-2's
        split_digits = pre_tokenizers.Digits(individual_digits=True)
        split_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, split_words])
    return tokenizer
