"""Run folders: made, gone on with, or refused; nothing that a user made is overwritten without being asked to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comingle.config import Recipe, load_recipe
from comingle.config.settings import KEY
from comingle.methods.user_files import ORIGIN, check_origin, write_origin
from comingle.utils.errors import RunError
from comingle.utils.files import HOLDER, LOCK, check_free, list_checkpoints, locked
from comingle.utils.inputs import INPUTS, Inputs, check_inputs, read_inputs, write_inputs
from comingle.utils.records import DRAFT, FEDERATION, check_name, told_in_one_line, write_text

NETWORK = ("flower", "users")
"""What a federation's processes keep in its run folder, before and besides the run itself."""

BOS = "add_bos_token"
"""The key of ``data`` that says whether windows and prompts begin with the begin-of-text token."""

SKIPPED = "skipped.json"
"""In a run folder: who was left out for having too little, and what of."""

RUN_FILES = (
    SKIPPED,
    ORIGIN,
    *NETWORK,
    FEDERATION,
    "federation.yaml",
    "recipe.yaml",
    INPUTS,
    KEY,
    "events.jsonl",
    "metrics.json",
    "joined.json",
    "checkpoints",
    "store",
    "tensorboard",
    "report.html",
    "figures",
)
"""What a run folder holds, with the report and the figures that may be made of it."""


@contextmanager
def open_folder(
    folder: Path, recipe: Recipe, inputs: Inputs, *, resume: bool, force: bool, pooled: bool = False
) -> Iterator[None]:
    """Make a run folder, or take one up again; after everything that could be wrong with the recipe has been checked.

    For as long as this is entered nobody else writes to it, and a disk that takes no more is one line. A new folder is
    for its owner alone, since reports show text.

    Raises:
        RunError: as :func:`check_folder` and :func:`check_inputs`, or it cannot be written to.
    """
    check_folder(folder, recipe, resume=resume, force=force)
    _make(folder)
    with told_in_one_line(folder), locked(folder):
        check_folder(folder, recipe, resume=resume, force=force, mine=True)  # somebody may have been faster
        _refuse_links(folder)
        if resume:
            check_inputs(folder, read_inputs(folder), inputs, pooled=recipe.method.name if pooled else "")
            if not _has_trained(folder):
                write_origin(folder, recipe.method.name)
        else:
            _clear(folder)
            write_inputs(folder, inputs)
            write_origin(folder, recipe.method.name)
            write_text(folder / "recipe.yaml", recipe.as_yaml())
        yield


def check_folder(folder: Path, recipe: Recipe, *, resume: bool | None, force: bool, mine: bool = False) -> None:
    """Whether a run may be written to a folder; touches nothing. ``resume`` None: such a run cannot be gone on with.

    Raises:
        RunError: it exists and neither ``resume`` nor ``force`` is given, it belongs to another recipe, no folder can
            have its name, or (unless the lock is ``mine``) another process writes to it.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    if not mine:
        with told_in_one_line(folder):
            check_free(folder)
    if resume:
        check_recipe(folder, recipe)
    else:
        _check_new(folder, force, "" if resume is None else "--resume goes on with it, ")


def check_recipe(folder: Path, recipe: Recipe) -> None:
    """Whether a run folder is one of this recipe.

    Raises:
        RunError: it is not, with what differs.
    """
    if not (folder / "recipe.yaml").exists():
        hint = "; it was never begun, so leave out --resume" if folder.exists() and not _content(folder) else ""
        raise RunError(f"{folder}: nothing to resume, no recipe.yaml in it{hint}")
    if (was := load_recipe(folder)).fingerprint != recipe.fingerprint:
        raise RunError(f"{folder}: belongs to another recipe, {_difference(was, recipe)}; use another --out")
    check_origin(folder, recipe.method.name, begun=_has_trained(folder))


def _has_trained(folder: Path) -> bool:
    """Return whether a run to resume keeps something that its method has made."""
    return (folder / "metrics.json").exists() or bool(list_checkpoints(folder))


def as_begun(folder: Path, recipe: Recipe, *, resume: bool) -> Recipe:
    """Return the recipe of a run to resume, whose windows stay as they were begun where it does not say otherwise.

    Runs of versions before ``data.add_bos_token`` had no begin-of-text tokens, and a recipe file that does not name the
    key has today's default.
    """
    if not resume or not (folder / "recipe.yaml").exists():
        return recipe
    began, now = (getattr(one.data, BOS, None) for one in (load_recipe(folder), recipe))
    if began == now or None in (began, now) or BOS in recipe.data.model_fields_set:
        return recipe
    return recipe.with_changes({f"data.{BOS}": began})


def _check_new(folder: Path, force: bool, goes_on: str) -> None:
    names = _content(folder) if folder.exists() else set()
    if names and not force:
        raise RunError(f"{folder}: exists; {goes_on}--force replaces it, --out names another")
    # Only what a run writes, drafts that a crash left included: a recipe alone, or one among other files, is a user's.
    strange = sorted(
        n for n in names if n not in RUN_FILES and not n.startswith(tuple(f".{run_file}." for run_file in RUN_FILES))
    )
    ours = (folder / LOCK).exists() or {"recipe.yaml", "events.jsonl"} <= names
    if names and (strange or not ours):
        hint = f" ({strange[0]!r} is in it)" if strange else ""
        raise RunError(f"{folder}: is not a run folder{hint}, so --force does not touch it; use another --out")


def _content(folder: Path) -> set[str]:
    """The names in a folder, but for what a process leaves that was stopped before it had a recipe in there."""
    names = {path.name for path in folder.iterdir()} - {LOCK, HOLDER}
    names -= set() if "recipe.yaml" in names else {INPUTS, "federation.yaml", *NETWORK}  # which are written before it
    drafts = (".recipe.yaml.", f".{INPUTS}.", f".{HOLDER}.")
    return {n for n in names if not (n.startswith(drafts) and n.endswith(DRAFT))}


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name in (LOCK, HOLDER, "federation.yaml", *NETWORK):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _refuse_links(folder: Path) -> None:
    """What is written to a run stays in its folder, so nothing in there may be a link."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise RunError(f"{path}: is a link, and a run writes to no other folder; put there what it points to")


def _difference(was: Recipe, now: Recipe) -> str:
    before, after = _flat(was.computed), _flat(now.computed)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
    return "they differ"


def _flat(content: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(content, dict):
        return {prefix: content}
    inner = [_flat(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in content.items()]
    return {k: v for part in inner for k, v in part.items()}
