"""GGUF files as safetensors folders, dequantised once and kept in the user's cache."""

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

from comingle.models.base import logger
from comingle.models.folders import check_config, one_line, require_memory
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError
from comingle.utils.files import cache_folder, make_once

# Part of every cached folder's name: raise it when the conversion changes what it writes.
_VERSION = 2


def convert_gguf(path: Path) -> Path:
    """The folder with the model of `path` as float32 safetensors; converted on the first call, found on the next.

    Raises:
        BaseModelError: not a GGUF file, damaged, of an unsupported kind, or the cache cannot be written.
    """
    _require_gguf(path)
    target = cache_folder() / "gguf" / f"{path.stem}-{_fingerprint(path)}-v{_VERSION}"
    try:
        return make_once(target, lambda folder: _convert_into(folder, path))
    except OSError as error:
        raise BaseModelError(
            f"base model {path}: cannot write the conversion to {target.parent} ({error}); "
            f"free space there or set COMINGLE_CACHE to another folder."
        ) from error


def _require_gguf(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BaseModelError(f"base model {path}: not a GGUF file; it starts with {magic!r} instead of b'GGUF'.")
    if importlib.util.find_spec("gguf") is None:
        raise BaseModelError(f"base model {path}: reading GGUF needs the package gguf; pip install 'comingle[demo]'.")


def _fingerprint(path: Path) -> str:
    # The content, not path and time: a reinstalled package or a second environment finds the same conversion.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _convert_into(folder: Path, path: Path) -> None:
    from safetensors import SafetensorError

    logger.info("converting %s to safetensors, once; this takes up to a minute", path.name)
    try:
        with _read_once():
            model, tokenizer = _read_gguf(path)
    except BaseModelError:
        raise
    except Exception as error:  # a foreign file meets a foreign library here; whatever it says, the file is at fault
        raise BaseModelError(f"base model {path}: damaged or unsupported GGUF: {_told(error)}") from error
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(one_line(error)) from error


def _told(error: Exception) -> str:
    """All of it in one line: torch says in the first that tensors do not fit, and then which."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Have a file's words be gone through once meanwhile; transformers does it for each thing that it wants to know."""
    import gguf

    reader = gguf.GGUFReader
    setattr(gguf, "GGUFReader", cache(reader))  # noqa: B010 (to a type checker it stays what it is)
    try:
        yield
    finally:
        setattr(gguf, "GGUFReader", reader)  # noqa: B010


def _read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32 and tokenizer of a GGUF file.

    transformers' from_pretrained would need accelerate for this, and would keep some kinds packed.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = GGUFReader(str(path))
    numbers = sum(int(tensor.n_elements) for tensor in file.tensors)
    # Twice: the tensors stand beside the model that they are copied into.
    advice = "its folder of safetensors"
    require_memory(f"base model {path}: converted,", 2 * numbers, torch.float32, torch.device("cpu"), advice)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    check_config(path, config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    _require_all_read(path, file, model)
    _fill(path, model, tensors)
    return model, _read_tokenizer(path)


def _require_all_read(path: Path, file: Any, model: PreTrainedModel) -> None:
    """Whether the model has a place for all that is in the file: transformers leaves out what it has none for."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    kind = str(file.get_field("general.architecture").contents())
    make = TENSOR_PROCESSORS.get(kind, TensorProcessor)
    places = get_gguf_hf_weights_map(model, make(config=model.config.to_dict()))
    left = [tensor.name for tensor in file.tensors if tensor.name not in places]
    scaling = file.get_field(f"{kind}.rope.scaling.type")
    if scaling is not None and str(scaling.contents()) not in ("", "none"):
        left.append(f"{scaling.contents()} RoPE scaling")
    if left:
        raise BaseModelError(
            f"base model {path}: {left[0]}{', ...' if len(left) > 1 else ''} would be lost, and with it what the model "
            "says; give its folder of safetensors."
        )


def _fill(path: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys)
    if model.config.tie_word_embeddings:
        missing -= set(model._tied_weights_keys or ())
        model.tie_weights()
    if missing:
        raise BaseModelError(f"base model {path}: the weights lack {len(missing)} tensors, first {min(missing)!r}.")


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    kind = GGUFReader(str(path)).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        # transformers takes it for GPT-2's; SmolLM also keeps every digit apart, as the hub's tokenizer does.
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer
