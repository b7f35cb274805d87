"""Load a base: any causal language model of transformers, frozen, by one name.

A name is a hub name (``owner/model``), a folder, a GGUF file, an alias (``smollm2-135m``) or ``random:FAMILY``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import psutil
import torch

from comingle.models.base import Base, freeze
from comingle.models.byte_tokenizer import byte_tokenizer
from comingle.models.families import PREFIX, about_parameters, parse_random, random_base
from comingle.models.folders import read_folder
from comingle.models.hardware import fast_bf16, resolve_attention, resolve_device, resolve_dtype
from comingle.models.head import Head, backbone, lm_head
from comingle.models.pretrained import require_docstrings
from comingle.models.quantised import quantise as pack
from comingle.models.sources import ALIASES, locate
from comingle.utils.errors import BaseModelError
from comingle.utils.files import cache_folder

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
    """The frozen model called `name`, in `dtype`, on `device`.

    With `quantise` its decoder layers' weights take 8 or 4 bits (:mod:`comingle.models.quantised`). `seed` draws the
    weights of a ``random:`` base and means nothing to the others. Prints nothing; the logger "comingle" says where the
    model came from.

    Raises:
        BaseModelError: not found, not loadable, not a causal language model, or an unknown dtype, device or attention.
    """
    require_docstrings()
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    style = resolve_attention(attention, place)
    with quiet_transformers():
        if name.startswith(PREFIX):
            _require_room(name)
            model = random_base(name, dtype=number, attention=style, seed=seed)
            tokenizer, source, origin = byte_tokenizer(), name, f"{name} seed {seed}"
        else:
            location = locate(name)
            model, tokenizer = read_folder(location.folder, dtype=number, device=place, attention=style)
            source, origin = location.name, location.folder
        ends = freeze(model, tokenizer)
    bits = "" if quantise == "none" else quantise
    if bits:
        pack(model, bits, place)
    torch.nn.Module.to(model, place)
    found = Base(model=model, tokenizer=tokenizer, name=source, dtype=number, device=place, origin=origin)
    return replace(found, quantised=bits, attention=attention, ends=ends)


def _require_room(name: str) -> None:
    """A random base is drawn in float32 whatever it is kept in."""
    parameters, there = about_parameters(*parse_random(name)), psutil.virtual_memory().total
    if 4 * parameters > there:
        raise BaseModelError(
            f"base model {name!r}: about {parameters:,} parameters are {4 * parameters / 2**30:,.0f} GiB in float32; "
            f"this machine has {there / 2**30:,.0f}"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, reports or advice from transformers meanwhile; its settings are put back."""
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
