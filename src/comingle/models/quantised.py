"""Bases whose weights are kept in fewer bits: by bitsandbytes, or in a GGUF file.

8 bits are a dynamic floating-point code with one scale for 256 weights (Dettmers et al. 2022, arXiv:2110.02861), 4 bits
are NF4 with one for 64 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). Products are computed in the base's format on
weights that are unpacked when they are needed and given back at once, in the forward and in the backward pass;
gradients flow through them to the adapters. Embeddings, norms, biases and the head stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.models.base import logger
from comingle.models.folders import check_config, one_line, require_memory
from comingle.models.layouts import decoder_layers, linear_names
from comingle.models.lora import base_weight
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError
from comingle.utils.files import cache_folder, make_once

Bits = Literal["8bit", "4bit"]
BLOCKS = {"8bit": 256, "4bit": 64}

_sources: dict[int, tuple[Any, QuantisedLinear]] = {}
"""By the storage of each unpacked weight that is alive, whose it is."""


class QuantisedLinear(nn.Linear):
    """A frozen linear that keeps its weight packed; ``weight`` unpacks it anew each time."""

    def __init__(self, weight: Float[Tensor, "d_out d_in"], bias: nn.Parameter | None, bits: Bits):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.bits, self.dtype, self.bias = bits, weight.dtype, bias
        functional = _functional()
        pack = functional.quantize_nf4 if bits == "4bit" else functional.quantize_blockwise
        packed, state = pack(weight.contiguous(), blocksize=BLOCKS[bits])
        for name, t in {"packed": packed, "scales": state.absmax, "code": state.code}.items():
            self.register_buffer(name, t)

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:  # type: ignore[override]
        """The weight as products take it."""
        unpacked = self.unpack()
        storage = unpacked.untyped_storage()
        key = storage._cdata
        _sources[key] = (weakref.ref(storage, lambda _: _sources.pop(key, None)), self)
        return unpacked

    def unpack(self) -> Float[Tensor, "d_out d_in"]:
        """A new tensor with the weight in the base's format."""
        functional = _functional()
        shape = torch.Size([self.out_features, self.in_features])
        kept: dict[str, Any] = {"code": self.code, "blocksize": BLOCKS[self.bits], "dtype": self.dtype}
        if self.bits == "4bit":
            state = functional.QuantState(self.scales, shape=shape, quant_type="nf4", **kept)
            return functional.dequantize_4bit(self.packed, state)
        return functional.dequantize_blockwise(self.packed, functional.QuantState(self.scales, **kept))


def quantise(model: nn.Module, bits: Bits, device: torch.device) -> None:
    """Pack the linears of a model's decoder layers, in place; each is packed on ``device``.

    Raises:
        BaseModelError: bitsandbytes is not installed, or cannot be used here.
    """
    _functional()
    replace_linears(model, lambda weight, bias: QuantisedLinear(weight.to(device), bias, bits))


@torch.no_grad()
def replace_linears(model: nn.Module, make: Callable[[Tensor, Any], nn.Module]) -> None:
    """Put what ``make`` makes of weight ``(d_out, d_in)`` and bias in the place of the decoder layers' linears."""
    for layer in decoder_layers(model):
        for name in list(linear_names(layer)):
            linear = layer.get_submodule(name)
            setattr(layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], make(*base_weight(linear)))


def packed_parameters(model: nn.Module) -> int:
    """How many weights of a model are packed."""
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))


@contextmanager
def giving_back() -> Iterator[None]:
    """Within, no unpacked weight is kept for the backward pass: it is unpacked once more there."""
    with torch.autograd.graph.saved_tensors_hooks(_put_away, _bring_back):
        yield


_Place = tuple["QuantisedLinear", torch.Size, tuple[int, ...], int | torch.SymInt]
"""A packed linear, and shape, strides and offset of a view of its weight."""


def _put_away(t: Tensor) -> Tensor | _Place:
    source = _sources.get(t.untyped_storage()._cdata)
    return t if source is None else (source[1], t.shape, t.stride(), t.storage_offset())


def _bring_back(kept: Tensor | _Place) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    linear, shape, strides, offset = kept
    return linear.weight.as_strided(shape, strides, offset)


def _functional() -> ModuleType:
    try:
        return importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # a library that looks for GPUs, compilers and kernels as it is imported
        raise BaseModelError(
            f"quantise: needs the package bitsandbytes (pip install 'comingle[quantised]'): {error}"
        ) from error


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
