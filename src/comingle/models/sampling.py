"""What ``generate`` understands, in the words of transformers, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from comingle.utils.errors import RecipeError, did_you_mean, is_number


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to continue a text, checked; the names are those of transformers' ``GenerationConfig``.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``repetition_penalty`` 1 and
    ``no_repeat_ngram_size`` 0 change nothing. ``stop_strings`` end a text and stay in it, ``stop`` is cut off.
    ``eos_token_id`` None is the base's own.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    eos_token_id: tuple[int, ...] | None = None
    seed: int = 0


_Rule = tuple[Callable[[Any], bool], str]


def _whole(least: int, below: float = math.inf) -> _Rule:
    upto = "" if below == math.inf else f" and below {below:,}"
    return lambda v: isinstance(v, int) and is_number(v) and least <= v < below, f"a whole number from {least}{upto}"


def _texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


_RULES: Mapping[str, _Rule] = {
    "max_new_tokens": _whole(1),
    "min_new_tokens": _whole(0),
    "temperature": (lambda v: is_number(v) and v >= 0, "a number from 0 (greedy)"),
    "top_k": _whole(0),
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "a number above 0, up to 1"),
    "min_p": (lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: is_number(v) and 0.01 <= v <= 100, "a number from 0.01 to 100"),
    "no_repeat_ngram_size": _whole(0),
    "stop": (_texts, "a text or a list of texts, none empty"),
    "stop_strings": (_texts, "a text or a list of texts, none empty"),
    "eos_token_id": (
        lambda v: isinstance(v, tuple) and all(isinstance(i, int) and is_number(i) and i >= 0 for i in v),
        "a token's number or a list of them",
    ),
    "seed": _whole(0, 2**63),
}

_SAMPLING_ONLY = ("top_k", "top_p", "min_p")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"num_beams": (1,), "num_return_sequences": (1,), "use_cache": (True, False)}
_BOOKKEEPING = {"transformers_version", "bos_token_id", "pad_token_id"}


def read_sampling(config: object | None = None, **given: Any) -> Sampling:
    """The settings of a transformers ``GenerationConfig``, with those ``given`` by name over them; None is not given.

    Sampling is on where ``do_sample`` says so or, without it, where ``temperature`` is above 0. Without a ``config``,
    ``top_p`` is 0.95.

    Raises:
        RecipeError: an unknown or unsupported name, a value out of range, or settings that contradict each other.
    """
    typed = {key: value for key, value in given.items() if value is not None}
    values = {**_of_config(config), **typed}
    for key in [key for key in values if key not in _RULES and key != "do_sample"]:
        _refuse_unsupported(key, values.pop(key))
    for key in ("stop", "stop_strings", "eos_token_id"):
        values |= {key: as_tuple(values[key])} if key in values else {}
    for key, value in values.items():
        _check(key, value)
    do_sample = values.pop("do_sample", None)
    _require_agreement(do_sample, values, typed)
    if do_sample is False:
        values["temperature"] = 0.0
    elif do_sample:
        values.setdefault("temperature", 1.0)
    values = {"top_p": 0.95, **values} if config is None else values
    sampling = Sampling(**values)
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise RecipeError(
            f"min_new_tokens: got {sampling.min_new_tokens}, above max_new_tokens ({sampling.max_new_tokens})"
        )
    return sampling


def _of_config(config: object | None) -> dict[str, Any]:
    """What a ``GenerationConfig`` says that is not transformers' default; its sampling only where it samples."""
    if config is None:
        return {}
    tell = getattr(config, "to_diff_dict", None)
    if tell is None:
        raise RecipeError(f"generation_config: got {config!r:.60}, expected transformers.GenerationConfig(...)")
    values_told = {key: value for key, value in tell().items() if value is not None and key not in _BOOKKEEPING}
    if not values_told.setdefault("do_sample", False):  # transformers ignores these, too
        values_told = {key: value for key, value in values_told.items() if key not in (*_SAMPLING_ONLY, "temperature")}
    return values_told


def _refuse_unsupported(key: str, value: Any) -> None:
    if value in _HARMLESS.get(key, ()):
        return
    allowed = sorted(["do_sample", *_RULES])
    hint = " Use max_new_tokens." if key in ("max_length", "max_tokens") else did_you_mean(key, allowed)
    raise RecipeError(f"{key}: not supported in generate (got {value!r:.40}); allowed are {', '.join(allowed)}.{hint}")


def as_tuple(value: Any) -> Any:
    """One thing, or a list of them, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _check(key: str, value: Any) -> None:
    rule, allowed = _RULES.get(key, (lambda v: isinstance(v, bool), "True or False"))
    if not rule(value):
        got = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        raise RecipeError(f"{key}: got {got!r:.60}, allowed is {allowed}")


def _require_agreement(do_sample: bool | None, values: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    temperature = values.get("temperature")
    if do_sample and temperature == 0:
        raise RecipeError("temperature: got 0 with do_sample=True; sampling needs a temperature above 0")
    if do_sample is False and typed.get("do_sample") is False and typed.get("temperature"):
        raise RecipeError(
            f"temperature: got {temperature} with do_sample=False, which is greedy; leave one of them out"
        )
    idle = [key for key in _SAMPLING_ONLY if key in typed]
    if idle and not do_sample and not temperature:
        raise RecipeError(f"{idle[0]}: changes nothing in a greedy text; give do_sample=True or a temperature above 0")
