"""Run folders: create, resume or refuse; nothing is overwritten without ``force``."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from comingle.config import Recipe, load_recipe
from comingle.config.settings import KEY
from comingle.methods.user_files import ORIGIN, check_origin, write_origin
from comingle.utils.errors import ComingleError, RunError
from comingle.utils.files import HOLDER, LOCK, check_free, list_checkpoints, locked
from comingle.utils.inputs import INPUTS, Inputs, check_inputs, read_inputs, write_inputs
from comingle.utils.records import DRAFT, FEDERATION, check_name, convert_disk_errors, write_text

NETWORK = ("flower", "users")
"""Files of a federation's processes in its run folder, besides those of the run."""

BOS = "add_bos_token"
"""Key of ``data``: whether windows and prompts begin with the begin-of-text token."""

SKIPPED = "skipped.json"
"""File of a run folder that lists the users left out, and what they have too little of."""

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
"""Names in a run folder, including its report and figures."""


@contextmanager
def open_folder(
    folder: Path, recipe: Recipe, inputs: Inputs, *, resume: bool, force: bool, pooled: bool = False
) -> Iterator[None]:
    """Create a run folder or open an existing one, and lock it while the context is entered.

    Errors of the file system, such as a full disk, become one line. A new folder is readable by its owner only, since
    reports in it may show users' texts.

    Args:
        folder: The run folder.
        recipe: The recipe, which has been checked.
        inputs: The record of what the run read.
        resume: Whether to resume the run in the folder.
        force: Whether to replace what is in the folder.
        pooled: Whether the method trains one model on all users' data.

    Raises:
        RunError: The folder may not be written to (:func:`check_folder`), the run in it has read another base or other
            data (:func:`check_inputs`), or the file system refuses to write.
    """
    check_folder(folder, recipe, resume=resume, force=force)
    _create_folder(folder)
    with convert_disk_errors(folder), locked(folder):
        # Again, since another process may have written to the folder before it was locked.
        check_folder(folder, recipe, resume=resume, force=force, locked_here=True)
        _refuse_links(folder)
        if resume:
            check_inputs(folder, read_inputs(folder), inputs, pooled=recipe.method.name if pooled else "")
            # Before the first checkpoint, nothing depends on the code of a user's own method or net. The code may
            # change until then, and the files that define it are recorded anew.
            if not _has_trained(folder):
                write_origin(folder, recipe.method.name, recipe.base.removeprefix("net:"))
        else:
            _delete_run_files(folder)
            write_inputs(folder, inputs)
            write_origin(folder, recipe.method.name, recipe.base.removeprefix("net:"))
            write_text(folder / "recipe.yaml", recipe.as_yaml())
        yield


def check_folder(folder: Path, recipe: Recipe, *, resume: bool | None, force: bool, locked_here: bool = False) -> None:
    """Check that a run may be written to a folder, without changing it.

    Args:
        folder: The run folder.
        recipe: The recipe.
        resume: Whether to resume the run in the folder. None: such a run cannot be resumed.
        force: Whether to replace what is in the folder.
        locked_here: Whether this process holds the folder's lock.

    Raises:
        RunError: The folder exists and neither ``resume`` nor ``force`` is given, it belongs to another recipe, its
            name is not valid, or another process writes to it.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    if not locked_here:
        with convert_disk_errors(folder):
            check_free(folder)
    if resume:
        check_recipe(folder, recipe)
    else:
        difference = ""
        resume_hint = ""
        if resume is not None:
            difference = _difference_from_run(folder, recipe)
            if not difference:  # a run with another recipe cannot be resumed
                resume_hint = "--resume continues it, "
        _check_replaceable(folder, force, resume_hint, difference)


def _difference_from_run(folder: Path, recipe: Recipe) -> str:
    """Return the first difference between a recipe and that of the run in a folder.

    Returns:
        For example ``"training.rounds was 10 and is 20"``. Empty if there is no difference, or no readable recipe in
        the folder.
    """
    if not (folder / "recipe.yaml").is_file():
        return ""
    try:
        recipe_of_run = load_recipe(folder)
        # If the recipe does not set `data.add_bos_token`, the value of the run does not count as a difference.
        recipe = with_bos_of_run(folder, recipe, resume=True)
    except ComingleError:  # recipe.yaml is damaged
        return ""
    if recipe.fingerprint == recipe_of_run.fingerprint:
        return ""
    return first_difference(recipe_of_run, recipe)


def check_recipe(folder: Path, recipe: Recipe) -> None:
    """Check that the run in a folder, which is to be resumed, has this recipe and the same code of the method.

    Raises:
        RunError: There is no run, or it has another recipe; the message names the difference. Or the code of a method
            from a user's file has changed.
    """
    if not (folder / "recipe.yaml").exists():
        hint = ""
        if folder.exists() and not _run_file_names(folder):
            hint = "; the run has not started, so leave out --resume"
        raise RunError(f"{folder}: nothing to resume: no recipe.yaml in it{hint}")
    old_recipe = load_recipe(folder)
    if old_recipe.fingerprint != recipe.fingerprint:
        difference = first_difference(old_recipe, recipe)
        raise RunError(f"{folder}: belongs to another recipe, {difference}; use another --out")
    check_origin(folder, recipe.method.name, begun=_has_trained(folder))


def _has_trained(folder: Path) -> bool:
    """Return whether a run to resume has a result or a checkpoint of its method."""
    return (folder / "metrics.json").exists() or bool(list_checkpoints(folder))


def with_bos_of_run(folder: Path, recipe: Recipe, *, resume: bool) -> Recipe:
    """Return the recipe with ``data.add_bos_token`` as in the run to resume, if the recipe does not set the key.

    The default is True now; runs of older versions had no such key and added no begin-of-text tokens, which
    :func:`load_recipe` reads as False.

    Args:
        folder: The run folder.
        recipe: The recipe; returned unchanged if it sets the key.
        resume: Whether to resume; if not, the recipe is returned unchanged.
    """
    if not resume or not (folder / "recipe.yaml").exists():
        return recipe
    value_of_run = getattr(load_recipe(folder).data, BOS, None)
    value = getattr(recipe.data, BOS, None)
    if value_of_run is None or value is None:  # only some kinds of data have the key
        return recipe
    if value == value_of_run or BOS in recipe.data.model_fields_set:
        return recipe
    return recipe.with_changes({f"data.{BOS}": value_of_run})


def _check_replaceable(folder: Path, force: bool, resume_hint: str, difference: str) -> None:
    """Check that a new run may be written to a folder: it is empty, or ``force`` is set and it has only a run's files.

    Args:
        folder: The run folder.
        force: Whether to replace what is in the folder.
        resume_hint: The beginning of the hint in the error; empty if the run cannot be resumed.
        difference: How the recipe differs from that of the run in the folder, for the error; empty if they are equal.

    Raises:
        RunError: The folder is not empty, or has files that ``force`` must not delete.
    """
    names = _run_file_names(folder) if folder.exists() else set()
    if names and not force:
        of_another = f" and belongs to another recipe, {difference}" if difference else ""
        raise RunError(f"{folder}: exists{of_another}; {resume_hint}--force replaces it, --out names another")
    # Drafts, such as ".metrics.json.x1.draft", are temporary files of a run that was killed while it wrote a file.
    draft_prefixes = tuple(f".{run_file}." for run_file in RUN_FILES)
    foreign = sorted(name for name in names if name not in RUN_FILES and not name.startswith(draft_prefixes))
    # A run leaves its lock file. Without this file, a recipe and events together show that the folder is a run's; a
    # recipe alone may be a file that a user wrote.
    is_run = (folder / LOCK).exists() or {"recipe.yaml", "events.jsonl"} <= names
    if names and (foreign or not is_run):
        example = f" (it contains {foreign[0]!r})" if foreign else ""
        raise RunError(f"{folder}: is not a run folder{example}, so --force does not replace it; use another --out")


def _run_file_names(folder: Path) -> set[str]:
    """Return the names of the files in a run folder; the set is empty if no run has begun in it.

    A run begins when its ``recipe.yaml`` is written. A process that was killed before that may leave its lock, files
    that are written earlier, and drafts (temporary files that would have been renamed). None of these is returned, so
    that such a folder counts as empty and a new run may use it.
    """
    names = {path.name for path in folder.iterdir()} - {LOCK, HOLDER}
    if "recipe.yaml" not in names:
        names -= {INPUTS, "federation.yaml", *NETWORK}  # written before the recipe
    draft_prefixes = (".recipe.yaml.", f".{INPUTS}.", f".{HOLDER}.")
    return {name for name in names if not (name.startswith(draft_prefixes) and name.endswith(DRAFT))}


def _create_folder(folder: Path) -> None:
    """Create a run folder, which only its owner can read, if it does not exist.

    Raises:
        RunError: The file system refuses.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def _delete_run_files(folder: Path) -> None:
    """Delete the files of an old run in a folder, so that a new run can use the folder.

    Two kinds of files stay, since they belong to the new run: the lock of this process, and the files that the
    processes of a federation write before the run begins.
    """
    for path in folder.iterdir():
        if path.name in (LOCK, HOLDER, "federation.yaml", *NETWORK):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _refuse_links(folder: Path) -> None:
    """Check that a run folder has no symbolic links, through which a run would write outside of it.

    Raises:
        RunError: There is a link.
    """
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise RunError(f"{path}: is a link; a run writes only to its folder; replace the link by its target")


def first_difference(old: Recipe, new: Recipe, *, ignored: Collection[str] = ()) -> str:
    """Return the first key in alphabetical order whose value differs, with both values, for a message.

    Args:
        old: The recipe before.
        new: The recipe now.
        ignored: Top-level keys that may differ.

    Returns:
        The key and the values; empty if both recipes compute the same.
    """
    old_content = {key: value for key, value in old.result_content.items() if key not in ignored}
    new_content = {key: value for key, value in new.result_content.items() if key not in ignored}
    if old_content == new_content:
        return ""
    # `result_content` has further keys of `evaluation` only with `select: best`, so `select` is reported first.
    if old.evaluation.select != new.evaluation.select:
        return f"evaluation.select was {old.evaluation.select!r} and is {new.evaluation.select!r}"
    before, after = _flattened(old_content), _flattened(new_content)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
    return "they differ"  # for example if a key is missing in one recipe and None in the other


def _flattened(content: object, prefix: str = "") -> dict[str, object]:
    """Return ``{"training.rounds": 5}`` for ``{"training": {"rounds": 5}}``; ``prefix`` begins all keys."""
    if not isinstance(content, dict):
        return {prefix: content}
    flat: dict[str, object] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        flat.update(_flattened(value, path))
    return flat
