"""A base without its weights: every shape, no data. What a run would cost can be counted on it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from comingle.costing.packed import pack_shapes
from comingle.models.base import Base, freeze
from comingle.models.folders import check_config, one_line, own_config
from comingle.models.hardware import resolve_attention, resolve_device, resolve_dtype
from comingle.models.loading import ALIASES, hub_answers, locate
from comingle.models.pretrained import require_docstrings
from comingle.models.random_bases import PREFIX, random_base
from comingle.utils.errors import BaseModelError
from comingle.utils.records import expand_home


def load_skeleton(
    name: str, *, dtype: str = "auto", device: str = "auto", attention: str = "auto", quantise: str = "none"
) -> Base:
    """The base called ``name`` on torch's meta device, without a tokenizer; all else as in a run.

    Of a model on the hub only config.json is fetched.

    Raises:
        BaseModelError: as :func:`comingle.models.loading.load_base`.
    """
    require_docstrings()
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    style = resolve_attention(attention, place)
    with torch.device("meta"):
        if name.startswith(PREFIX):
            model = random_base(name, dtype=number, attention=style, seed=0)
        else:
            model = _from_config(name, number, style)
    freeze(model, None)
    bits: Any = "" if quantise == "none" else quantise
    if bits:
        pack_shapes(model, bits)
    return Base(model=model, tokenizer=None, name=name, dtype=number, device=place, quantised=bits)


def _from_config(name: str, dtype: torch.dtype, attention: str | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _config_folder(name)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_config(folder, config.to_dict())
        return AutoModelForCausalLM.from_config(own_config(config), dtype=dtype, attn_implementation=attention)
    except BaseModelError:
        raise
    except Exception as error:  # a foreign file meets a foreign library here; whatever it says, the file is at fault
        raise BaseModelError(f"base model {name!r}: its config.json cannot be used: {one_line(error)}") from error


def _config_folder(name: str) -> Path:
    """A folder with the configuration: from the hub without the weights where that can be had, else the whole model."""
    alias = ALIASES.get(name)
    if alias is not None:
        return _hub_config(alias.repository) or locate(name).folder
    if not name or expand_home(name).exists() or name.startswith((".", "~", "/")) or name.count("/") > 1:
        return locate(name).folder
    return _hub_config(name) or locate(name).folder


def _hub_config(repository: str) -> Path | None:
    """The folder that holds config.json of a repository; None where it cannot be had, for whatever reason."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE or not hub_answers(constants.ENDPOINT):
        return None
    try:
        return Path(hf_hub_download(repository, "config.json")).parent
    except Exception:  # `locate` says what is wrong, in its own words
        return None
