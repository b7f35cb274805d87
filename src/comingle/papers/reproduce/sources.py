"""Where the users of a published experiment come from: a local folder, the hub, demo texts, or a made task."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from comingle.papers.reproduce.published import DataSet, Scale, Study
from comingle.papers.tasks.images import has_images
from comingle.utils.errors import RecipeError
from comingle.utils.names import FOLDER_VARIABLE
from comingle.utils.records import expand_home

IMAGES = "images"
SPLITS = ("train", "valid", "test")
ANYWHERE = Path("{data}")
"""In the place of the folder with local text, where it does not matter which that is; it holds all that is needed."""


def data_folder(given: Path | None) -> Path | None:
    """The folder with local text and images: the one given, or what ``$COMINGLE_DATA`` names, or none.

    Raises:
        RecipeError: it does not exist.
    """
    if given == ANYWHERE:
        return ANYWHERE
    named = str(given) if given is not None else os.environ.get(FOLDER_VARIABLE, "")
    if not named:
        return None
    folder = expand_home(named).resolve()
    if not folder.is_dir():
        where = "--data" if given is not None else FOLDER_VARIABLE
        raise RecipeError(f"{where} {named}: no such folder; it should hold the data, laid out as docs/results.md says")
    return folder


def placed(content: Any, folder: Path | None) -> Any:
    """Part of a recipe as it is on every machine: with :data:`ANYWHERE` for the folder that text and base lie in."""
    if isinstance(content, Mapping):
        return {key: placed(value, folder) for key, value in content.items()}
    if isinstance(content, list):
        return [placed(value, folder) for value in content]
    if folder is None or not isinstance(content, str) or not Path(content).is_relative_to(folder):
        return content
    return str(PurePosixPath(ANYWHERE, *Path(content).relative_to(folder).parts))


def inside(path: str, folder: Path | None) -> str:
    """A base that is asked for: where it lies in the folder, by its place in there, however the path is spelt."""
    found = expand_home(path)
    within = folder is not None and found.is_dir() and found.resolve().is_relative_to(folder)
    return str(found.resolve()) if within else path


def find_absent(data: DataSet, scale: Scale, folder: Path | None) -> str:
    """Why the text or the images of a column cannot be had; empty where they can."""
    if scale.text == "demo" or folder == ANYWHERE:
        return ""
    if data.task is not None or data.questions is not None or folder is None:
        what = find_hubs(data, folder) if folder is not None else "there is no folder; give --data FOLDER"
        made = data.task is not None and not data.images
        return "" if made or not what or scale.text == "real" else f"{what}, and this scale takes nothing from the hub"
    absent = [path for path in _local_paths(data) if not (folder / path).exists()]
    return f"{folder / absent[0]} does not exist" if absent else ""


def _found_below(data: DataSet, folder: Path | None) -> Path | None:
    """Where the images or the questions are, if they are below the folder; otherwise they are the hub's."""
    if folder is None:
        return None
    if data.questions is not None:
        questions = folder / data.questions["name"]
        return questions if folder == ANYWHERE or questions.is_dir() else None
    images = folder / IMAGES
    return images if folder == ANYWHERE or has_images(data.images, images) else None


def find_hubs(data: DataSet, folder: Path) -> str:
    """What a folder lacks of images or questions, which are the hub's then; empty where it has them."""
    if not (data.images or data.questions) or _found_below(data, folder) is not None:
        return ""
    if data.questions is not None:
        return f"{folder / data.questions['name']} does not exist"
    return f"{folder / IMAGES} has no {data.images}"


def _local_paths(data: DataSet) -> list[str]:
    if "users" in data.local:
        return [source if isinstance(source, str) else source["path"] for source in data.local["users"].values()]
    path = data.local["dataset"]["path"]
    return [path] if isinstance(path, str) else list(path)


def data_section(study: Study, data: DataSet, folder: Path | None, *, demo: bool) -> tuple[dict[str, Any], list[str]]:
    """The section ``data`` and the users' names in the paper's order."""
    if data.task is not None or data.questions is not None:
        place = _found_below(data, folder) if data.images or data.questions else None
        section = {**(data.task or data.questions or {}), **({} if place is None else {"path": str(place)})}
        return {"questions" if data.task is None else "task": section}, []
    if demo:
        texts = dict(zip(data.users, study.demo, strict=True))
        held_out = {key: data.local[key] for key in ("held_out",) if key in data.local}
        return {"users": texts, **held_out}, data.users
    section = data.hub if folder is None else _anchored(data.local, folder)
    names = list(section["users"]) if "users" in section else list(section["dataset"]["users"])
    limits = {f"max_{split}_tokens": data.tokens[split] for split in SPLITS if not data.chats}
    return {**section, **limits}, names


def _anchored(local: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Paths below the folder; of the sections that have some, these are copies."""
    if "users" in local:
        users = {n: {"path": s} if isinstance(s, str) else dict(s) for n, s in local["users"].items()}
        return {**local, "users": {n: {**s, "path": str(folder / s["path"])} for n, s in users.items()}}
    path = local["dataset"]["path"]
    paths = str(folder / path) if isinstance(path, str) else [str(folder / one) for one in path]
    return {**local, "dataset": {**local["dataset"], "path": paths}}


def limits_by_name(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A limit given as a list is one number for each user, in the paper's order."""
    lists = {key: value for key, value in data.items() if key.endswith("_tokens") and isinstance(value, list)}
    return {**data, **{key: dict(zip(names, value, strict=True)) for key, value in lists.items()}}
