"""Base models in Hugging Face folders: checks before loading, loading without pickle, and digests."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comingle.models.hardware import free_bytes
from comingle.models.pretrained import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.quantised import Bits, QuantisedLinear, quantise, quantise_shapes
from comingle.utils.errors import BaseModelError
from comingle.utils.files import cache_folder, make_once
from comingle.utils.records import JsonObject
from comingle.utils.trees import digest_all

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_config.json"
_GENERATION_FILE = "generation_config.json"
# Files of pickled weights, which are never read.
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# Suffixes of architectures with a causal head; masked and sequence-to-sequence models have other names.
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds a configuration, a tokenizer and all weight files."""
    if not (folder / "config.json").is_file() or not has_tokenizer(folder):
        return False
    try:
        files = weight_files(folder)
    except BaseModelError:
        return False
    return all(path.is_file() for path in files)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer file of a known kind."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def read_folder(
    folder: Path, *, dtype: torch.dtype, device: torch.device, attention: str | None, bits: Bits | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model onto the CPU, and its tokenizer, without unpickling and without running code from the folder.

    Args:
        folder: A folder in the Hugging Face layout.
        dtype: Number format of the weights.
        device: Device to which the model will be moved, for a check of its memory.
        attention: Attention implementation of transformers; None: transformers' choice.
        bits: Format to which the linears of the decoder layers are quantised; None: they are not.

    Returns:
        The model, and the tokenizer or None if the folder holds none.

    Raises:
        BaseModelError: The configuration is missing, the model is not causal or is quantised, or the weights are
            missing, pickled, damaged or larger than memory.
    """
    check_config(folder, read_json(folder / "config.json"))
    if (folder / _ADAPTER_FILE).is_file():  # transformers would load it if peft is installed, else ignore it
        raise BaseModelError(
            f"base model {folder}: {_ADAPTER_FILE} belongs to an adapter; merge it into the weights "
            "(peft: merge_and_unload), or move it out of this folder."
        )
    cpu = torch.device("cpu")
    model = None
    if bits is not None:
        model = _map_quantised(folder, bits, dtype=dtype, attention=attention)
    if model is None:
        num_weights = sum(_count_weights(path) for path in weight_files(folder))
        for used_device in {cpu, device}:  # loaded onto the CPU, then moved
            require_memory(f"base model {folder}:", num_weights, dtype, used_device)
        model = _load_model(folder, dtype=dtype, attention=attention)
        if bits is not None:
            quantise(model, bits, cpu)
    require_finite(folder, model)
    return model, load_tokenizer(folder)


def require_memory(what: str, parameters: int, dtype: torch.dtype, device: torch.device, advice: str = "") -> None:
    """Raise an error if weights do not fit into the free memory of a device.

    Args:
        what: The model, for the message.
        parameters: Number of weights.
        dtype: Their number format.
        device: The device; only CPUs and CUDA GPUs are checked.
        advice: What to do instead of using a smaller base, for the message; by default bfloat16 if that is smaller.

    Raises:
        BaseModelError: They do not fit.
    """
    if device.type not in ("cpu", "cuda"):
        return
    needed, free = parameters * dtype.itemsize, free_bytes(device)
    if needed <= free:
        return
    if not advice and dtype.itemsize > 2:
        advice = "runtime.dtype: bfloat16"
    alternative = f", or {advice}" if advice else ""
    raise BaseModelError(
        f"{what} its weights need {needed / 1e9:,.3f} GB of memory in {str(dtype).removeprefix('torch.')}, and "
        f"{free / 1e9:,.3f} GB are free on {device.type}; use a smaller base{alternative}."
    )


def drop_kernel_choice(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove a configuration's choice of kernels in place, and return the configuration.

    The choice may name a repository on the hub, from which transformers would download and run code.
    """
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def check_config(where: Path, config: dict[str, Any]) -> None:
    """Raise an error unless a configuration is that of a plain causal language model.

    Args:
        where: Folder of the model, for error messages.
        config: The content of its ``config.json``.

    Raises:
        BaseModelError: It has another architecture (encoder-decoder, masked), quantised weights, or no model type.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    if not model_type:
        raise BaseModelError(f"base model {where}: config.json names no model_type, so it is not a transformers model.")
    is_causal = not architectures or any(name.endswith(_CAUSAL_SUFFIXES) for name in architectures)
    if config.get("is_encoder_decoder") or not is_causal:
        raise BaseModelError(
            f"base model {where}: expected a causal language model (...ForCausalLM), "
            f"got {', '.join(architectures) or 'an encoder-decoder'} of type {model_type!r}."
        )
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown")
        raise BaseModelError(
            f"base model {where}: expected bfloat16 or float32 weights, got weights quantised with {method!r}."
        )


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file of a model's folder.

    Raises:
        BaseModelError: The file is missing, is not JSON, or holds another value.
    """
    if not path.is_file():
        entries = ", ".join(sorted(entry.name for entry in path.parent.iterdir())[:5]) or "nothing"
        raise BaseModelError(f"base model {path.parent}: no {path.name} in this folder; it holds {entries}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaseModelError(f"base model {path.parent}: {path.name} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise BaseModelError(f"base model {path.parent}: {path.name} must hold an object, got {content!r:.40}.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: a single file, or all files that the folder's index names.

    Raises:
        BaseModelError: There is neither a file nor an index.
    """
    if (folder / _WEIGHTS_FILE).is_file():
        return [folder / _WEIGHTS_FILE]
    if (folder / _INDEX_FILE).is_file():
        shards = read_json(folder / _INDEX_FILE).get("weight_map", {})
        return sorted({folder / name for name in shards.values()})
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise BaseModelError(
            f"base model {folder}: its weights are pickled ({pickles[0]}); comingle never unpickles, because that runs "
            f"code. Convert them to {_WEIGHTS_FILE} (transformers' save_pretrained writes it)."
        )
    raise BaseModelError(
        f"base model {folder}: no weights; expected {_WEIGHTS_FILE} or {_INDEX_FILE} (pickles are never read)."
    )


def _count_weights(path: Path) -> int:
    """Return the number of weights in a file, read from its header.

    Raises:
        BaseModelError: The file is missing, truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise BaseModelError(f"base model {path.parent}: {path.name} is named in {_INDEX_FILE} but missing.")
    try:
        with safe_open(path, framework="pt") as file:  # raises an error if header and file size do not match
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
            return sum(math.prod(shape) for shape in shapes)
    except SafetensorError as error:
        raise BaseModelError(
            f"base model {path.parent}: {path.name} ({path.stat().st_size} bytes) is truncated or damaged ({error}); "
            f"delete it and fetch it again."
        ) from error


def _load_model(folder: Path, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Load a causal language model from safetensors, without running code from its folder.

    Weights are memory-mapped if the tensors in the files have the names and shapes of the model's.

    Args:
        folder: A folder in the Hugging Face layout.
        dtype: Number format of the weights.
        attention: Attention implementation of transformers; None: transformers' choice.

    Raises:
        BaseModelError: transformers cannot load the model, or its files lack tensors or have unused ones.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        # A configuration may name kernels on the hub, whose code transformers would download and run.
        config = drop_kernel_choice(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        memory_mapped = _map_model(folder, config, dtype=dtype, attention=attention)
        if memory_mapped is not None:
            return memory_mapped
        # Names or shapes in the files differ from the model's: let transformers convert them, or report an error.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=drop_kernel_choice(config),  # again, as _map_model sets `attention` in the configuration
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many types of error for invalid files
        raise BaseModelError(f"base model {folder}: transformers cannot load it: {one_line(error)}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers has initialised them at random
        raise BaseModelError(f"base model {folder}: the weights lack {len(missing)} tensors, first {missing[0]!r}.")
    _raise_if_unused(folder, sorted(report["unexpected_keys"]))
    return model


def _map_model(
    folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype, attention: str | None
) -> PreTrainedModel | None:
    """Return a model with memory-mapped weights, so that all processes that load a folder share their memory.

    Weights that the files hold in another dtype than ``dtype`` are converted copies.

    Args:
        folder: A folder in the Hugging Face layout.
        config: Its configuration.
        dtype: Number format of the weights.
        attention: Attention implementation of transformers; None: transformers' choice.

    Returns:
        The model; None in float16, or if names or shapes in the files are not the model's.
    """
    if dtype == torch.float16:  # transformers keeps some weights of some families in float32
        return None
    model = _model_without_values(config, dtype=dtype, attention=attention)
    has_all_weights = _assign_tensors(model, _map_tensors(folder, dtype), folder)
    return model if has_all_weights else None


def _model_without_values(config: PreTrainedConfig, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Return a model whose weights are allocated but not written, so that they take no memory yet.

    Args:
        config: The configuration of a causal language model.
        dtype: Number format of the weights.
        attention: Attention implementation of transformers; None: transformers' choice.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model.eval()


def _assign_tensors(model: PreTrainedModel, tensors: dict[str, torch.Tensor], folder: Path) -> bool:
    """Replace a model's tensors by those of its files, without copies, and read its settings of generation if any.

    Args:
        model: The model.
        tensors: The tensors of the files by name.
        folder: The model's folder.

    Returns:
        Whether the files have all of the model's tensors and no others. If not, the model cannot be used.
    """
    from transformers import GenerationConfig

    expected = model.state_dict()
    for name, tensor in tensors.items():
        if name not in expected or tensor.shape != expected[name].shape:
            return False
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    assigned_ids = {id(tensor) for name, tensor in _all_tensors(model) if name in tensors}
    for name, tensor in _all_tensors(model):
        is_missing = name in expected and name not in tensors
        is_tied = id(tensor) in assigned_ids  # such as the head's weight to that of the embedding
        if is_missing and not is_tied:
            return False
    if (folder / _GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return True


def _map_quantised(folder: Path, bits: Bits, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel | None:
    """Return a quantised model with weights memory-mapped from a file in the cache, which the first call writes.

    Args:
        folder: A folder in the Hugging Face layout.
        bits: Format of the quantised weights.
        dtype: Number format of the other weights, and of products.
        attention: Attention implementation of transformers; None: transformers' choice.

    Returns:
        The model; None if the cache cannot be written, or the weights cannot be mapped (:func:`_map_model`).
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    if dtype == torch.float16:  # as in _map_model
        return None
    config = drop_kernel_choice(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    model = _model_without_values(config, dtype=dtype, attention=attention)
    transposed = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    quantise_shapes(model, bits, torch.device("cpu"))
    cache_name = f"{digest_folder(folder)[:16]}-{bits}-{str(dtype).removeprefix('torch.')}"
    write = partial(_write_quantised, folder, model, transposed, dtype)
    try:
        quantised_folder = make_once(cache_folder() / "quantised" / cache_name, write)
    except OSError:  # a full disk, or no permission
        return None
    has_all_weights = _assign_tensors(model, load_file(quantised_folder / _WEIGHTS_FILE), folder)
    return model if has_all_weights else None


def _write_quantised(
    folder: Path, model: PreTrainedModel, transposed: Collection[str], dtype: torch.dtype, target: Path
) -> None:
    """Quantise the weights of ``folder``, one after another, and write them to the folder ``target``.

    Args:
        folder: A folder in the Hugging Face layout.
        model: The quantised model without values; weights of its :class:`QuantisedLinear` layers are quantised.
        transposed: Names of the weights that the files hold as ``(d_in, d_out)``, as GPT-2 does.
        dtype: Number format of the other weights.
        target: The folder to write to.

    Raises:
        OSError: The target cannot be written.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    layer_of_weight = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)
    }
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    if name in layer_of_weight:
                        weight = tensor.t() if name in transposed else tensor
                        packed, scales = layer_of_weight[name].code.pack(weight)
                        layer_name = name.removesuffix(".weight")
                        tensors[f"{layer_name}.packed"] = packed
                        tensors[f"{layer_name}.scales"] = scales
                    else:
                        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        save_file(tensors, target / _WEIGHTS_FILE)
    except SafetensorError as error:
        raise OSError(one_line(error)) from error


def _all_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names of parameters and buffers; a tied tensor is yielded under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _map_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the weight files by name, floating-point ones in ``dtype``.

    GGUF files are cached as float32. The first call in bfloat16 writes a bfloat16 copy to the cache, which all calls
    map into memory instead of converting the weights in memory each time.
    """
    is_from_gguf = folder.parent == gguf_cache()
    if dtype == torch.bfloat16 and is_from_gguf:
        bfloat16_folder = folder.with_name(f"{folder.name}-bfloat16")
        with suppress(OSError):  # a full disk: convert in memory
            folder = make_once(bfloat16_folder, partial(_write_converted, folder, dtype))
    return _read_converted(folder, dtype)


def _read_converted(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the weight files by name, floating-point ones in ``dtype``.

    Tensors whose file has this dtype are mapped into memory, others are converted copies.
    """
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        tensors.update(load_file(path))
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _write_converted(folder: Path, dtype: torch.dtype, target: Path) -> None:
    """Write the weights of ``folder`` in ``dtype`` to the folder ``target``.

    Raises:
        OSError: The target cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_read_converted(folder, dtype), target / _WEIGHTS_FILE)
    except SafetensorError as error:
        raise OSError(one_line(error)) from error


def gguf_cache() -> Path:
    """Return the folder with converted GGUF files, each in a folder that never changes once it is complete."""
    return cache_folder() / "gguf"


def _raise_if_unused(folder: Path, unexpected: Sequence[str]) -> None:
    """Raise an error if the model does not use a tensor of the files, except for buffers that it computes itself.

    Args:
        folder: The model's folder.
        unexpected: Names of the tensors that transformers ignored.

    Raises:
        BaseModelError: A tensor is neither used nor such a buffer.
    """
    shapes = _shapes_of(folder, unexpected)
    unused = [name for name in unexpected if not _is_computed(name, shapes.get(name, []))]
    if unused:
        names = f"{unused[0]!r}, ..." if len(unused) > 1 else repr(unused[0])
        raise BaseModelError(
            f"base model {folder}: the weights have {len(unused)} tensors that the model of config.json does not use "
            f"({names}), so its predictions would change; give a config.json that fits the weights, or weights "
            "without these tensors."
        )


def _is_computed(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor of a file is a buffer that models compute: rotary frequencies or a causal mask.

    Args:
        name: Name of the tensor.
        shape: Its shape, which tells a mask from a trained bias of the same name.
    """
    if re.search(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$", name):
        return True
    if re.search(r"(^|\.)(attn|attention)\.masked_bias$", name):
        return math.prod(shape) == 1
    is_bias_or_mask = bool(re.search(r"(^|\.)(attn|attention)\.bias$", name))
    has_shape_of_mask = len(shape) == 4 and shape[:2] == [1, 1]
    return is_bias_or_mask and has_shape_of_mask


def _shapes_of(folder: Path, names: Collection[str]) -> dict[str, list[int]]:
    """Return the shapes of the tensors ``names`` by name, read from the headers of the weight files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    if not names:
        return shapes
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name in names:
                    shapes[name] = file.get_slice(name).get_shape()
    return shapes


def require_finite(folder: Path, model: PreTrainedModel) -> None:
    """Raise an error unless all weights are finite.

    Args:
        folder: Folder of the model, for the message.
        model: The model.

    Raises:
        BaseModelError: A weight is infinite or NaN.
    """
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            continue
        smallest, largest = weight.detach().aminmax()  # NaN if a value is NaN
        if not (smallest.isfinite() and largest.isfinite()):
            raise BaseModelError(f"base model {folder}: its weight {name} has values that are not finite.")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder; return None if it holds none.

    Raises:
        BaseModelError: The tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as in _load_model
        raise BaseModelError(f"base model {folder}: its tokenizer cannot be loaded: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_UNDESCRIPTIVE_KEYS = ("transformers_version", "_name_or_path")
"""Keys of a configuration that do not describe the model."""


def digest_folder(folder: Path) -> str:
    """Return a digest of a model's configuration and weight files, which is equal for copies of the folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Leave out the path and transformers' version, which may differ between copies.
    described = {key: value for key, value in config.items() if key not in _UNDESCRIPTIVE_KEYS}
    file_digests: list[Any] = []
    for path in weight_files(folder):
        with path.open("rb") as file:
            file_digests.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    return digest_all(described, *file_digests)


def digest_model(model: PreTrainedModel) -> str:
    """Return a digest of all tensors of a model in memory."""
    names_and_tensors: list[Any] = []
    for name, tensor in sorted(model.state_dict().items()):
        names_and_tensors += [name, tensor]
    return digest_all(*names_and_tensors)


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return digests of a tokenizer and of its chat template, joined by a colon; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    template = getattr(tokenizer, "chat_template", None) or ""
    return f"{_digest_tokens(tokenizer)}:{digest_all(template)}"


def _digest_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of a tokenizer's definition and its special tokens that begin, end and pad a text."""
    special_tokens = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # not a fast tokenizer
        return digest_all(type(tokenizer).__name__, tokenizer.get_vocab(), special_tokens)
    definition = json.loads(backend.to_str())
    for setting_of_last_call in ("truncation", "padding"):
        definition.pop(setting_of_last_call, None)
    return digest_all(definition, special_tokens)
