"""Base models with quantised weights: by bitsandbytes, or from a GGUF file.

8 bits are a dynamic floating-point code with one scale per 256 weights (Dettmers et al. 2022, arXiv:2110.02861); 4 bits
are NF4 with one scale per 64 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). Weights are unpacked for each product in
the forward and the backward pass and freed afterwards; products are computed in the base's dtype, and gradients flow
through them to the adapters. Embeddings, norms, biases and the head are not quantised. A GGUF file is converted to
float32.
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
from comingle.models.folders import check_config, gguf_cache, one_line, require_memory
from comingle.models.layouts import decoder_layers, linear_names
from comingle.models.lora import base_weight
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError
from comingle.utils.files import make_once

Bits = Literal["8bit", "4bit"]
BLOCKS = {"8bit": 256, "4bit": 64}
"""Number of weights that share a scale."""

_sources: dict[int, tuple[Any, QuantisedLinear]] = {}
"""Layer of each live unpacked weight, by the weight's storage."""


class QuantisedLinear(nn.Linear):
    """A frozen linear with a packed weight; each access to ``weight`` unpacks it."""

    def __init__(self, weight: Float[Tensor, "d_out d_in"], bias: nn.Parameter | None, bits: Bits):
        """Pack the weight of a linear layer.

        Args:
            weight: The weight; its dtype is that of computations.
            bias: The bias, which is not packed.
            bits: "4bit" (NF4) or "8bit", for each entry of the weight.
        """
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate the weight
        self.out_features, self.in_features = weight.shape
        self.bits, self.dtype, self.bias = bits, weight.dtype, bias
        functional = _bitsandbytes()
        pack = functional.quantize_nf4 if bits == "4bit" else functional.quantize_blockwise
        packed, state = pack(weight.contiguous(), blocksize=BLOCKS[bits])
        for name, t in {"packed": packed, "scales": state.absmax, "code": state.code}.items():
            self.register_buffer(name, t)

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:  # type: ignore[override]
        """The unpacked weight, a new tensor at each access.

        It is registered while it is alive, so that :func:`unpack_in_backward` knows from which layer it comes.
        """
        unpacked = self.unpack()
        storage = unpacked.untyped_storage()
        key = storage._cdata
        _sources[key] = (weakref.ref(storage, lambda _: _sources.pop(key, None)), self)
        return unpacked

    def unpack(self) -> Float[Tensor, "d_out d_in"]:
        """Return the weight as a new tensor in the base's dtype."""
        functional = _bitsandbytes()
        shape = torch.Size([self.out_features, self.in_features])
        settings: dict[str, Any] = {"code": self.code, "blocksize": BLOCKS[self.bits], "dtype": self.dtype}
        if self.bits == "4bit":
            state = functional.QuantState(self.scales, shape=shape, quant_type="nf4", **settings)
            return functional.dequantize_4bit(self.packed, state)
        return functional.dequantize_blockwise(self.packed, functional.QuantState(self.scales, **settings))


def quantise(model: nn.Module, bits: Bits, device: torch.device) -> None:
    """Quantise the linears of a model's decoder layers, in place.

    Args:
        model: The model.
        bits: Bits per weight.
        device: Device on which the weights are packed, and stay.

    Raises:
        BaseModelError: The package bitsandbytes is not installed, or does not work here.
    """
    _bitsandbytes()  # raise its error before any change
    replace_linears(model, lambda weight, bias: QuantisedLinear(weight.to(device), bias, bits))


@torch.no_grad()
def replace_linears(model: nn.Module, make: Callable[[Tensor, Any], nn.Module]) -> None:
    """Replace the decoder layers' linears by ``make(weight, bias)``; the weight is ``(d_out, d_in)``."""
    for layer in decoder_layers(model):
        for name in list(linear_names(layer)):
            parent, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(parent), attribute, make(*base_weight(layer.get_submodule(name))))


def packed_parameters(model: nn.Module) -> int:
    """Return the number of quantised weights of a model."""
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))


@contextmanager
def unpack_in_backward() -> Iterator[None]:
    """Save no unpacked weight for the backward pass in the context, which then unpacks it again."""
    with torch.autograd.graph.saved_tensors_hooks(_pack_saved, _restore_saved):
        yield


_PackedView = tuple["QuantisedLinear", torch.Size, tuple[int, ...], int | torch.SymInt]
"""A packed linear, and shape, strides and offset of a view of its weight."""


def _pack_saved(t: Tensor) -> Tensor | _PackedView:
    """Return what autograd saves for a tensor: the packed linear for views of unpacked weights, else the tensor."""
    source = _sources.get(t.untyped_storage()._cdata)
    return t if source is None else (source[1], t.shape, t.stride(), t.storage_offset())


def _restore_saved(saved: Tensor | _PackedView) -> Tensor:
    """Return a saved tensor of the forward pass to autograd's backward pass.

    Args:
        saved: What :func:`_pack_saved` returned: the tensor itself, or a view of a packed linear's weight, which is
            unpacked again.
    """
    if isinstance(saved, Tensor):
        return saved
    linear, shape, strides, offset = saved
    return linear.weight.as_strided(shape, strides, offset)


def _bitsandbytes() -> ModuleType:
    """Return the module ``bitsandbytes.functional``.

    Raises:
        BaseModelError: It cannot be imported.
    """
    try:
        return importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # the import searches for GPUs, compilers and kernels, and can fail in many ways
        raise BaseModelError(
            f"quantise: needs the package bitsandbytes (pip install 'comingle[quantised]'): {error}"
        ) from error


# Part of the cached folder's name: raise it when the conversion's output changes.
_CONVERSION_VERSION = 2


def convert_gguf(path: Path) -> Path:
    """Return a folder with the model of a GGUF file as float32 safetensors; cached after the first conversion.

    Raises:
        BaseModelError: The file is not GGUF, damaged or of an unsupported kind, or the cache cannot be written.
    """
    _require_gguf(path)
    target = gguf_cache() / f"{path.stem}-{_fingerprint(path)}-v{_CONVERSION_VERSION}"
    try:
        return make_once(target, lambda folder: _convert_into(folder, path))
    except OSError as error:
        raise BaseModelError(
            f"base model {path}: cannot write the conversion to {target.parent} ({error}); "
            f"free space there or set COMINGLE_CACHE to another folder."
        ) from error


def _require_gguf(path: Path) -> None:
    """Raise a :class:`BaseModelError` if a file is not GGUF, or the package that reads it is missing."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BaseModelError(f"base model {path}: not a GGUF file; it starts with {magic!r} instead of b'GGUF'.")
    if importlib.util.find_spec("gguf") is None:
        raise BaseModelError(f"base model {path}: reading GGUF needs the package gguf; pip install 'comingle[demo]'.")


def _fingerprint(path: Path) -> str:
    """Return a digest of the file for the name of the cached folder."""
    # By content, not path and time: a reinstalled package or a second environment reuses the conversion.
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
        with _cached_reader():
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

    reader = gguf.GGUFReader
    setattr(gguf, "GGUFReader", cache(reader))  # noqa: B010 (type checkers reject a plain assignment)
    try:
        yield
    finally:
        setattr(gguf, "GGUFReader", reader)  # noqa: B010


def _read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, in float32, and the tokenizer of a GGUF file.

    transformers' from_pretrained would require accelerate, and would leave some kinds of tensors packed.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = GGUFReader(str(path))
    parameters = sum(int(tensor.n_elements) for tensor in file.tensors)
    # Twice: the tensors and the model that they are copied into are in memory together.
    advice = "its folder of safetensors"
    require_memory(f"base model {path}: after conversion", 2 * parameters, torch.float32, torch.device("cpu"), advice)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    check_config(path, config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be disabled
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    _require_all_read(path, file, model)
    _load_tensors(path, model, tensors)
    return model, _read_tokenizer(path)


def _require_all_read(path: Path, file: Any, model: PreTrainedModel) -> None:
    """Check that the model represents the whole file; transformers silently drops unknown tensors and RoPE scaling."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = str(file.get_field("general.architecture").contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    known = get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    unsupported = [tensor.name for tensor in file.tensors if tensor.name not in known]
    scaling = file.get_field(f"{architecture}.rope.scaling.type")
    if scaling is not None and str(scaling.contents()) not in ("", "none"):
        unsupported.append(f"{scaling.contents()} RoPE scaling")
    if unsupported:
        raise BaseModelError(
            f"base model {path}: transformers does not read {unsupported[0]}{', ...' if len(unsupported) > 1 else ''}, "
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
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys)
    if model.config.tie_word_embeddings:
        missing -= set(model._tied_weights_keys or ())
        model.tie_weights()
    if missing:
        raise BaseModelError(f"base model {path}: the weights lack {len(missing)} tensors, first {min(missing)!r}.")


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, which splits numbers as the one on the hub does."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    pre_tokenizer = GGUFReader(str(path)).get_field("tokenizer.ggml.pre")
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        # transformers uses GPT-2's pre-tokenizer; SmolLM's also splits numbers into digits, as on the hub.
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer
