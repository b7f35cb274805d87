"""One-line descriptions of mistakes in a recipe, with hints for keys of other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from comingle.config.settings import DataSection
from comingle.utils.errors import ComingleError, did_you_mean

_RATE = "training.experts.learning_rate"
_EPOCHS = "training.rounds training.local_epochs training.local_steps"
_RANK = "adapters.rank floral.rank"
_BASE, _DATA = "base", "data.dataset data"

_KEYS: Mapping[str, str] = {
    # optimiser
    "lr": _RATE,
    "learning_rate": _RATE,
    "client_lr": _RATE,
    "local_lr": _RATE,
    "init_lr": _RATE,
    "base_lr": _RATE,
    "max_lr": _RATE,
    "step_size": _RATE,
    "optimizer": "training.experts.name",
    "optimiser": "training.experts.name",
    "optim": "training.experts.name",
    "scheduler": "training.experts.schedule",
    "lr_scheduler": "training.experts.schedule",
    "lr_scheduler_type": "training.experts.schedule",
    "lr_schedule": "training.experts.schedule",
    "wd": "training.experts.weight_decay",
    "weight_decay": "training.experts.weight_decay",
    "momentum": "training.experts.momentum",
    "betas": "training.experts.betas",
    "adam_betas": "training.experts.betas",
    "adam_epsilon": "training.experts.eps",
    "max_grad_norm": "training.experts.clip_norm",
    "grad_clip": "training.experts.clip_norm",
    "gradient_clip": "training.experts.clip_norm",
    "gradient_clip_val": "training.experts.clip_norm",
    "clip_grad_norm": "training.experts.clip_norm",
    "clip_norm": "training.experts.clip_norm privacy.clip_norm",
    "router_lr": "training.router.learning_rate",
    # length and amount
    "epoch": _EPOCHS,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "n_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "num_local_epochs": "training.local_epochs training.local_steps",
    "local_epochs": "training.local_epochs training.local_steps",
    "local_ep": "training.local_epochs training.local_steps",
    "steps": "training.local_steps training.rounds",
    "num_steps": "training.local_steps training.rounds",
    "max_steps": "training.local_steps training.rounds",
    "iterations": "training.local_steps training.rounds",
    "local_iterations": "training.local_steps",
    "num_local_steps": "training.local_steps",
    "num_rounds": "training.rounds",
    "n_rounds": "training.rounds",
    "num_server_rounds": "training.rounds",
    "comm_rounds": "training.rounds",
    "communication_rounds": "training.rounds",
    "global_rounds": "training.rounds",
    "bs": "training.batch_size",
    "batch": "training.batch_size",
    "mini_batch_size": "training.batch_size",
    "train_batch_size": "training.batch_size",
    "local_batch_size": "training.batch_size",
    "per_device_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "runtime.micro_batch",
    "micro_batch_size": "runtime.micro_batch",
    "max_length": "training.context",
    "max_len": "training.context",
    "max_seq_length": "training.context",
    "max_seq_len": "training.context",
    "model_max_length": "training.context",
    "seq_len": "training.context",
    "seq_length": "training.context",
    "sequence_length": "training.context",
    "sequence_len": "training.context",
    "block_size": "training.context",
    "context_length": "training.context",
    "context_size": "training.context",
    "cutoff_len": "training.context",
    # adapters
    "r": _RANK,
    "lora_r": _RANK,
    "lora_rank": _RANK,
    "lora_dim": _RANK,
    "lora": "adapters floral",
    "peft": "adapters floral",
    "adapter": "adapters floral",
    "lora_config": "adapters floral",
    "peft_config": "adapters floral",
    "alpha": "adapters.alpha floral.alpha",
    "lora_alpha": "adapters.alpha floral.alpha",
    "target_modules": "adapters.targets",
    "lora_target_modules": "adapters.targets",
    "load_in_4bit": "quantise",
    "load_in_8bit": "quantise",
    "quantize": "quantise",
    "quantization": "quantise",
    "quantization_config": "quantise",
    # model, users, method
    "model": _BASE,
    "model_name": _BASE,
    "model_id": _BASE,
    "model_path": _BASE,
    "model_name_or_path": _BASE,
    "pretrained_model_name_or_path": _BASE,
    "pretrained": _BASE,
    "base_model": _BASE,
    "checkpoint": "base checkpoints",
    "net": _BASE,
    "dataset": _DATA,
    "datasets": _DATA,
    "dataset_name": _DATA,
    "train_dataset": _DATA,
    "train_data": _DATA,
    "train_file": "data.users data",
    "data_path": "data.users data",
    "data_dir": "data.users data",
    "client": "data.users data",
    "clients": "data.users data",
    "algorithm": "method",
    "algo": "method",
    "strategy": "method",
    "aggregator": "method aggregation",
    "mu": "method.proximal",
    "proximal_mu": "method.proximal",
    "prox_mu": "method.proximal",
    "num_clusters": "method.clusters",
    "n_clusters": "method.clusters",
    "num_models": "method.models",
    "num_experts": "method.specialists",
    # participants
    "fraction_fit": "training.participation",
    "client_fraction": "training.participation",
    "fraction": "training.participation",
    "frac": "training.participation",
    "sample_rate": "training.participation",
    "sampling_rate": "training.participation",
    "participation_rate": "training.participation",
    "clients_per_round": "training.participation",
    "num_clients_per_round": "training.participation",
    # privacy
    "dp": "privacy",
    "differential_privacy": "privacy",
    "target_epsilon": "privacy.epsilon",
    "target_delta": "privacy.delta",
    "sigma": "privacy.noise_multiplier",
    "noise": "privacy.noise_multiplier",
    "noise_scale": "privacy.noise_multiplier",
    "max_per_sample_grad_norm": "privacy.clip_norm",
    "secagg": "privacy.secure_aggregation",
    # evaluation, checkpoints, machine
    "eval": "evaluation",
    "eval_every": "evaluation.every",
    "eval_steps": "evaluation.every",
    "eval_interval": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "evaluation_strategy": "evaluation.every",
    "load_best_model_at_end": "evaluation.select",
    "save_steps": "checkpoints.every",
    "save_every": "checkpoints.every",
    "save_strategy": "checkpoints.every",
    "save_total_limit": "checkpoints.keep",
    "random_state": "seed",
    "random_seed": "seed",
    "manual_seed": "seed",
    "fp16": "runtime.dtype",
    "bf16": "runtime.dtype",
    "torch_dtype": "runtime.dtype",
    "precision": "runtime.dtype",
    "mixed_precision": "runtime.dtype",
    "attn_implementation": "runtime.attention",
    "torch_compile": "runtime.compile",
    "num_threads": "runtime.threads",
    "report_to": "runtime.track",
    "logger": "runtime.track",
    "wandb": "runtime.track",
    "mlflow": "runtime.track",
    "file": "path",
    "filename": "path",
    "file_path": "path",
    "folder": "path",
}
"""Names in other libraries, each with the dotted keys that it may stand for."""

_METHOD = "method."


def _plain(name: str) -> str:
    """Return a name in lower case without separators: learning-rate, learningRate and LEARNING_RATE are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_KEYS_BY_SPELLING = {_plain(name): keys for name, keys in _KEYS.items()}


def other_name_hint(
    place: Sequence[str], known: Sequence[str], recipe: type[BaseModel], data: type[DataSection] | None
) -> str:
    """Return a hint for a key of another library or of another section; empty if there is none.

    At most two keys are suggested: of the same section if possible.

    Args:
        place: The unknown key, after the sections that contain it: ``["training", "lr"]``.
        known: The keys of its section.
        recipe: The class of a whole recipe.
        data: The section class of the key ``data``, which depends on the kind of data; None if that is unknown.
    """
    *section, name = place
    meant_keys = _KEYS_BY_SPELLING.get(_plain(name), "").split()  # such as ["training.experts.learning_rate"]

    # 1. A key of the same section with the last part of a meant key: "training.router.learning_rate".
    if section:
        in_section: list[str] = []
        for meant_name in dict.fromkeys(_last_part(key) for key in meant_keys):
            key = ".".join((*section, meant_name))
            if meant_name in known and _is_used(key, data):
                in_section.append(key)
        if in_section:
            return _suggestion(in_section[:2], place)

    # 2. A meant key: a key of the recipe, except the sections around the unknown key, or a setting of a method.
    outer_sections = {".".join(section[:depth]) for depth in range(len(section) + 1)}
    all_keys = [key for key in _dotted_keys(recipe, data) if _is_used(key, data) and key not in outer_sections]
    candidates = [key for key in meant_keys if key in all_keys or key.startswith(_METHOD)]

    # 3. A key with the same name in another section, or else a setting of a method.
    if not candidates:
        candidates = [key for key in all_keys if _plain(_last_part(key)) == _plain(name)]
    if not candidates:
        candidates = _method_setting(name)
    return _suggestion(candidates[:2], place)


def _last_part(key: str) -> str:
    """Return the name after the last dot of a dotted key: "learning_rate" for "training.experts.learning_rate"."""
    return key.rpartition(".")[2]


def _suggestion(keys: Sequence[str], place: Sequence[str]) -> str:
    """Return the hint `` Did you mean 'training.rounds'?`` for an unknown key; empty without suggestions.

    Args:
        keys: Suggested dotted keys.
        place: The unknown key, after the sections that contain it: ``["training", "lr"]``.
    """
    if not keys:
        return ""
    is_in_section = len(place) > 1
    quoted: list[str] = []
    for key in keys:
        is_at_top_level = "." not in key
        place_of_key = " (at the top level)" if is_in_section and is_at_top_level else ""
        quoted.append(f"{key!r}{place_of_key}")
    return f" Did you mean {' or '.join(quoted)}?"


def _dotted_keys(model: type[BaseModel], data: type[DataSection] | None, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a recipe or of a section: ``training``, ``training.rounds`` and so on.

    Args:
        model: The class of the recipe or of the section.
        data: The section class of the key ``data``, which depends on the kind of data; None if that is unknown.
        prefix: Dotted key of the section with a final dot; empty for a whole recipe.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        section = data if key == "data" else section_in(field.annotation)
        is_mapping_by_user = key == "data.users"  # its keys are names of users, not keys of a section
        if section is not None and not is_mapping_by_user:
            yield from _dotted_keys(section, data, prefix=f"{key}.")


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section (pydantic model) in the annotation of a recipe's key; None if it has none.

    For ``dict[str, UserSource] | None`` it is ``UserSource``.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    arguments = getattr(annotation, "__args__", ())  # such as (str, UserSource)
    for argument in arguments:
        section = section_in(argument)
        if section is not None:
            return section
    return None


def _is_used(key: str, data: type[DataSection] | None) -> bool:
    """Return whether a dotted key has an effect for a kind of data.

    The key has no effect if the kind does not use the key (``data.unread``) or a section that contains the key.

    Args:
        key: The dotted key.
        data: The section class of the kind; None if it is unknown, and then every key counts as used.
    """
    if data is None:
        return True
    return not any(key == unread_key or key.startswith(f"{unread_key}.") for unread_key in data.unread)


def _method_setting(name: str) -> list[str]:
    """Return ``["method.NAME"]`` if any method has a setting of this name, else ``[]``.

    Called with the last part of an unknown key of a recipe, to suggest the setting that the user may have meant.
    """
    from comingle.methods import REGISTRY, settings_of  # imports torch, so only when there is a mistake

    for method in REGISTRY:
        with suppress(ComingleError):  # a plug-in that cannot be loaded
            if name in settings_of(method):
                return [f"{_METHOD}{name}"]
    return []


_UNION_BRANCHES = ("function-", "constrained-", "list[", "dict[", "literal[")
"""Prefixes of names that pydantic puts into a problem's location for a key of several types, one name per type."""

_PLAIN_TYPES = ("str", "int", "float", "bool")
"""Names that pydantic puts into a problem's location for plain types."""

_NAMED = "a name, or a mapping with name"
_ACCEPTED = {
    "method": _NAMED,
    **dict.fromkeys(
        ("adapters.rank", "training.local_steps", "training.batch_size"),
        "a whole number from 1, or a list or a mapping with one for each user",
    ),
    "training.max_seconds_per_round": "a number above 0, null, or a list or a mapping with one for each user",
    "training.participation": "a number above 0 and up to 1, or a list with the names of each round",
    "runtime.compile": "auto, true or false",
    "runtime.native_code": "auto, true or false",
    "evaluation.every": "auto, or a whole number from 1",
}
"""Accepted values of keys with several types, for which pydantic would name only one."""

_TYPE_NAMES: Mapping[type, str] = {list: "a list", dict: "a mapping"}
_WRONG_TYPES = ("_type", "_parsing", "literal_error", "int_from_float")
"""Endings of pydantic's error types for values of a wrong type."""


def first_problem(error: ValidationError, model: type[BaseModel], data: type[DataSection] | None = None) -> str:
    """Return one line for the most specific mistake in a recipe or file: its place, the value, the allowed values.

    Args:
        error: The error of pydantic.
        model: The class of the recipe or file that was validated.
        data: The section class of the key ``data``, which depends on the kind of data; None if that is unknown.
    """
    return problems_of(error, model, data)[0]


def problems_of(
    error: ValidationError, model: type[BaseModel], data: type[DataSection] | None = None
) -> tuple[str, ...]:
    """Return a line for each mistake: its place, the value, the allowed values. The most specific one is first.

    For a key of several types, pydantic reports a problem per type. Only the most specific of these problems is kept:
    an unknown key, or else the problem deepest inside the value.

    Args:
        error: The error of pydantic.
        model: The class of the recipe or file that was validated.
        data: The section class of the key ``data``, which depends on the kind of data; None if that is unknown.
    """
    accepted = dict(_ACCEPTED)
    if data is not None:
        accepted.update({f"data.{key}": values for key, values in data.accepted.items()})
    problems = sorted(error.errors(), key=_specificity, reverse=True)
    sections_with_unknown_keys = {problem["loc"][:-1] for problem in problems if problem["type"] == "extra_forbidden"}
    problem_by_place: dict[tuple[str, ...], ErrorDetails] = {}
    for problem in problems:
        # A missing key in a section with an unknown key is probably misspelt there; only the unknown key is reported.
        if problem["type"] == "missing" and problem["loc"][:-1] in sections_with_unknown_keys:
            continue
        place = _without_type_names(problem["loc"])
        # Of problems in nested places, such as ("data", "users") and ("data",), the first is the most specific.
        if not any(_are_nested(place, earlier_place) for earlier_place in problem_by_place):
            problem_by_place[place] = problem
    return tuple(_describe_problem(problem, accepted, model, data) for problem in problem_by_place.values())


def _without_type_names(location: Sequence[str | int]) -> tuple[str, ...]:
    """Return a problem's location without the names of types that pydantic puts into it for a key of several types.

    For example, ``("training", "local_steps", "list[int]", 0)`` becomes ``("training", "local_steps", "0")``. Names of
    plain types, such as ``int``, are dropped only at the end.
    """
    place = tuple(str(part) for part in location if not str(part).startswith(_UNION_BRANCHES))
    if place and place[-1] in _PLAIN_TYPES:
        return place[:-1]
    return place


def _are_nested(place: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether one of two keys of a recipe, as tuples such as ``("data", "users")``, is or contains the other."""
    depth = min(len(place), len(other))
    return place[:depth] == other[:depth]


def _specificity(problem: ErrorDetails) -> tuple[bool, int]:
    """Return the sort key of a problem: larger for an unknown key, then for a deeper place."""
    return problem["type"] == "extra_forbidden", len(problem["loc"])


def _describe_problem(
    problem: ErrorDetails, accepted: Mapping[str, str], model: type[BaseModel], data: type[DataSection] | None
) -> str:
    """Return a validation problem as a line: place, value and allowed values.

    Args:
        problem: The problem, as pydantic reports it.
        accepted: Accepted values by dotted key, for keys of several types, such as ``{"runtime.compile": "auto, true or
            false"}``; ``data.users.*`` is the entry of any user.
        model: The class of the recipe or file that was validated.
        data: The section class of the key ``data``, which depends on the kind of data; None if that is unknown.
    """
    keys = _keys_in(problem["loc"], accepted)
    place = ".".join(keys)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"], model, data)
        hint = other_name_hint(keys, known, model, data) or did_you_mean(keys[-1], known)
        return f"unknown key {place!r}.{hint} Allowed: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"key {place!r} is missing"
    got = _got_suffix(problem)  # empty for a list or mapping
    is_entry_of_user = len(keys) == 3 and keys[:2] == ["data", "users"]
    accepted_values = accepted.get("data.users.*" if is_entry_of_user else place)
    has_wrong_type = problem["type"].endswith(_WRONG_TYPES)
    if accepted_values and has_wrong_type:
        got = got or f"; got {_TYPE_NAMES.get(type(problem['input']), 'a section')}"
        return f"{place}: give {accepted_values}{got}"
    # pydantic's own text, in the words of YAML.
    reason = re.sub("a valid dictionary( or instance of .*)?", "a mapping", problem["msg"])
    reason = reason.removeprefix("Value error, ")
    return f"{place}: {reason}{got}" if place else f"{reason}{got}"


def _keys_in(location: Sequence[str | int], accepted: Mapping[str, str]) -> list[str]:
    """Return the keys of the location that pydantic reports for a problem, from the outermost section inwards.

    For a key of several types, pydantic adds the name of a type to the location, such as ``list[int]`` or ``int``; it
    is left out. After a key of a single type, ``int`` is kept, since it may be the name of a user.

    Args:
        location: The location.
        accepted: Descriptions of allowed values by dotted key, for keys of several types.
    """
    keys = [str(part) for part in location if not str(part).startswith(_UNION_BRANCHES)]
    if not keys:
        return []
    *outer_keys, last = keys
    outer_key = ".".join(outer_keys)
    has_several_types = outer_key in accepted and outer_key != "data.users"  # whose keys are names of users
    if last in _PLAIN_TYPES and has_several_types:
        return outer_keys
    return keys


def _got_suffix(problem: ErrorDetails) -> str:
    """Return the end of a message, ``; got VALUE``, for a scalar that was not valid; empty for lists and mappings."""
    value = problem.get("input")
    if isinstance(value, dict | list | BaseModel):
        return ""
    suffix = f"; got {value!r}"
    if problem["type"] == "string_type" and value is not None:
        suffix += "; quote it to make it text"  # YAML reads a name such as no, 1 or 2024-01-01 as another type
    return suffix


def _known_keys(location: Iterable[str | int], model: Any, data: type[DataSection] | None) -> list[str]:
    """Return the keys that are allowed in the section in which pydantic found an unknown key.

    Args:
        location: Such as ``("training", "router", "lr")``: sections from the outermost inwards, then the unknown key.
            Users' names, list indices and names of types may be in between; they are skipped.
        model: The class of the recipe or file that was validated.
        data: The section class of the key ``data``, which depends on the kind of data; None if that is unknown.
    """
    *section_names, _unknown_key = location
    section = model
    for name in section_names:
        if name == "data" and data is not None:
            section = data
            continue
        field = section.model_fields.get(str(name))
        inner_section = section_in(field.annotation) if field is not None else None
        section = inner_section or section
    return list(section.model_fields)
