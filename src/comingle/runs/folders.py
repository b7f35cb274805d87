"""Run folders: create, resume or refuse; nothing is overwritten without ``force``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from comingle.config import Recipe, load_recipe
from comingle.config.settings import ACCOUNT, KEY
from comingle.methods.user_files import ORIGIN, check_origin, write_origin
from comingle.utils.errors import ComingleError, RunError
from comingle.utils.files import HOLDER, LOCK, check_free, list_checkpoints, locked
from comingle.utils.inputs import INPUTS, Inputs, check_inputs, read_inputs, write_inputs
from comingle.utils.records import DRAFT, FEDERATION, JsonObject, check_name, convert_disk_errors, is_server, write_text

NETWORK = ("flower", "users")
"""Files of a federation's processes in its run folder, besides those of the run."""

BOS = "add_bos_token"
"""Key of ``data``: whether windows and prompts begin with the begin-of-text token."""

SKIPPED = "skipped.json"
"""File of a run folder that lists the users left out, and what they have too little of."""

LEFT = "left.json"
"""File of a run folder with the certificates of users who have left the run (:mod:`comingle.runs.leaving`)."""


RUN_FILES = (
    SKIPPED,
    LEFT,
    ORIGIN,
    *NETWORK,
    FEDERATION,
    "federation.yaml",
    "recipe.yaml",
    INPUTS,
    KEY,
    ACCOUNT,
    "events.jsonl",
    "metrics.json",
    "joined.json",
    "checkpoints",
    "local",
    "store",
    "tensorboard",
    "report.html",
    "figures",
)
"""Names in a run folder, including its report and figures."""


def certificates_of(folder: Path) -> list[JsonObject]:
    """Return the certificates of users who have left a run, or a federation; empty if there are none."""
    path = folder / LEFT
    if not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["left"])


def is_continuous_server(folder: Path) -> bool:
    """Return whether a folder has the runs of ``comingle server --continuous``."""
    has_plans = any(path.stem.isdigit() for path in folder.glob("[0-9]*.yaml"))
    return has_plans and not (folder / "recipe.yaml").exists()


def is_server_folder(folder: Path) -> bool:
    """Return whether a folder is that of a federation's server, with one run or with those of ``--continuous``."""
    has_left_server = any("mode" in certificate for certificate in certificates_of(folder))  # not only a client
    is_emptied = has_left_server and not (folder / "recipe.yaml").exists()  # its run is to be trained again
    return is_server(folder) or is_continuous_server(folder) or is_emptied


@contextmanager
def open_folder(
    folder: Path, recipe: Recipe, inputs: Inputs, *, resume: bool, force: bool, pooled: bool = False
) -> Iterator[None]:
    """Create a run folder or open an existing one, and lock it while the context is entered.

    Errors of the file system, such as a full disk, are raised as one-line errors. Only its owner can read a new folder,
    since reports in it may show users' texts.

    Args:
        folder: The run folder.
        recipe: The recipe, which has been checked.
        inputs: The record of what the run read.
        resume: Whether to resume the run in the folder.
        force: Whether to replace what is in the folder.
        pooled: Whether the method trains one model on all users' data. The run can then be resumed only with the users
            in the same order.

    Raises:
        RunError: The folder may not be written to (:func:`check_folder`), the run in it has read another base or other
            data (:func:`check_inputs`), or the file system refuses to write.
    """
    check_folder(folder, recipe, resume=resume, force=force)
    _create_folder(folder)
    net_name = recipe.base.removeprefix("net:")  # the name of a language model is no net's, so it has no effect
    with convert_disk_errors(folder), locked(folder):
        # Check again, since another process may have written to the folder before it was locked.
        check_folder(folder, recipe, resume=resume, force=force, is_locked_here=True)
        _refuse_links(folder)
        if resume:
            pooling_method = recipe.method.name if pooled else ""
            check_inputs(folder, read_inputs(folder), inputs, pooled=pooling_method)
            if not _has_trained(folder):  # until the first checkpoint a user may change the code of a method or net
                write_origin(folder, recipe.method.name, net_name)
        else:
            _delete_run_files(folder)
            write_inputs(folder, inputs)
            write_origin(folder, recipe.method.name, net_name)
            write_text(folder / "recipe.yaml", recipe.as_yaml())
        yield


def check_folder(
    folder: Path,
    recipe: Recipe,
    *,
    resume: bool,
    force: bool,
    is_resumable: bool = True,
    is_locked_here: bool = False,
) -> None:
    """Check that a run may be written to a folder, without changing it.

    Args:
        folder: The run folder.
        recipe: The recipe of the run to write.
        resume: Whether to resume the run in the folder.
        force: Whether to replace what is in the folder.
        is_resumable: Whether errors suggest to resume the run in the folder.
        is_locked_here: Whether this process holds the folder's lock.

    Raises:
        RunError: The folder exists and neither ``resume`` nor ``force`` is given, it belongs to another recipe, its
            name is not valid, or another process writes to it.
    """
    check_name(folder)
    if recipe.continue_from is not None and not resume:
        earlier, target = Path(recipe.continue_from.run).resolve(), folder.resolve()
        if earlier.is_relative_to(target) or target.is_relative_to(earlier):
            raise RunError(f"{folder}: overlaps the run in continue_from, which is only read; use another --out")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    if not is_locked_here:
        with convert_disk_errors(folder):
            check_free(folder)
    if resume:
        check_recipe(folder, recipe)
        return
    difference = ""
    resume_hint = ""
    if is_resumable:
        difference = _difference_from_run(folder, recipe)
        if not difference:  # a run with another recipe cannot be resumed
            resume_hint = "--resume continues it, "
    _check_replaceable(folder, force=force, resume_hint=resume_hint, difference=difference)


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
    """Check that the run in a folder, which is to be resumed, has this recipe and that its method is registered.

    Raises:
        RunError: There is no run, it has another recipe, or its method is not registered.
    """
    if not (folder / "recipe.yaml").exists():
        hint = ""
        if folder.exists() and not _names_in_folder(folder):
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
    """Return the recipe with ``data.add_bos_token`` as in the run to resume; unchanged if the recipe sets the key.

    The default is True now. Runs of older versions added no begin-of-text tokens: :func:`load_recipe` gives their
    recipes the value False.

    Args:
        folder: The run folder.
        recipe: The recipe of the run to start, which may set the key.
        resume: Whether to resume; if not, the recipe is returned unchanged.
    """
    if not resume or not (folder / "recipe.yaml").exists():
        return recipe
    value_of_run = getattr(load_recipe(folder).data, BOS, None)
    value = getattr(recipe.data, BOS, None)
    if value_of_run is None or value is None:  # only some kinds of data have the key
        return recipe
    is_set_in_recipe = BOS in recipe.data.model_fields_set
    if is_set_in_recipe or value == value_of_run:
        return recipe
    return recipe.with_changes({f"data.{BOS}": value_of_run})


def _check_replaceable(folder: Path, *, force: bool, resume_hint: str, difference: str) -> None:
    """Check that a new run may be written to a folder: it is empty, or ``force`` is set and it has only a run's files.

    Args:
        folder: The run folder.
        force: Whether to replace what is in the folder.
        resume_hint: Part of the error, such as ``"--resume continues it, "``; empty if the run cannot be resumed.
        difference: Part of the error, such as ``"training.rounds was 10 and is 20"``; empty if the recipe is that of
            the run in the folder.

    Raises:
        RunError: The folder is not empty, or has files that ``force`` must not delete.
    """
    if not folder.exists():
        return
    names = _names_in_folder(folder)
    if not names:
        return
    if not force:
        other_recipe = f" and belongs to another recipe, {difference}" if difference else ""
        raise RunError(f"{folder}: exists{other_recipe}; {resume_hint}--force replaces it, --out names another")
    # Drafts, such as ".metrics.json.x1.draft", are temporary files of a run that was killed while it wrote a file.
    draft_prefixes = tuple(f".{run_file}." for run_file in RUN_FILES)
    foreign_names = sorted(name for name in names if name not in RUN_FILES and not name.startswith(draft_prefixes))
    # A run leaves its lock file. Without this file, a recipe and events together show that the folder is a run's; a
    # recipe alone may be a file that a user wrote.
    is_run_folder = (folder / LOCK).exists() or names.issuperset({"recipe.yaml", "events.jsonl"})
    if foreign_names or not is_run_folder:
        example = f" (it contains {foreign_names[0]!r})" if foreign_names else ""
        raise RunError(f"{folder}: is not a run folder{example}, so --force does not replace it; use another --out")


def _names_in_folder(folder: Path) -> set[str]:
    """Return the names of the files in a folder, without the remains of a run that was killed before its start.

    Remains are its lock, files that it writes before ``recipe.yaml``, and drafts, such as ".recipe.yaml.x1.draft". A
    folder with nothing else counts as empty, so a new run may use it.
    """
    names = {path.name for path in folder.iterdir()} - {LOCK, HOLDER}
    if "recipe.yaml" not in names:
        # Written before the recipe; certificates remain of a federation's run that is to be trained again.
        names -= {INPUTS, "federation.yaml", LEFT, *NETWORK}
    draft_prefixes = (".recipe.yaml.", f".{INPUTS}.", f".{HOLDER}.")
    drafts = {name for name in names if name.startswith(draft_prefixes) and name.endswith(DRAFT)}
    return names - drafts


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
    """Delete the files of an old run in a folder, so that a new run can use the folder."""
    # The lock of this process, and files that the processes of a federation write before the run begins.
    files_of_new_run = [LOCK, HOLDER, "federation.yaml", *NETWORK]
    if not (folder / "recipe.yaml").exists():  # of a federation's run that is trained again
        files_of_new_run.append(LEFT)
    for path in folder.iterdir():
        if path.name in files_of_new_run:
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
    """Return the first difference between two recipes, such as ``"training.rounds was 10 and is 20"``, for an error.

    The first one is that of the first key in alphabetical order. Only keys that change a run's result count, so not
    those of ``runtime``, for example. The result is empty if there is no difference.

    Args:
        old: The recipe before.
        new: The recipe now.
        ignored: Top-level keys that may differ.
    """
    old_content = {key: value for key, value in old.result_content.items() if key not in ignored}
    new_content = {key: value for key, value in new.result_content.items() if key not in ignored}
    if old_content == new_content:
        return ""
    # Report `select` first: if only one recipe has `select: best`, other keys of `evaluation` differ too.
    if old.evaluation.select != new.evaluation.select:
        return f"evaluation.select was {old.evaluation.select!r} and is {new.evaluation.select!r}"
    old_values = _values_by_dotted_key(old_content)
    new_values = _values_by_dotted_key(new_content)
    for key in sorted(old_values.keys() | new_values.keys()):
        if old_values.get(key) != new_values.get(key):
            return f"{key} was {old_values.get(key)!r} and is {new_values.get(key)!r}"
    return "they differ"  # for example if a key is missing in one recipe and None in the other


def _values_by_dotted_key(content: object, section: str = "") -> dict[str, object]:
    """Return ``{"training.rounds": 5}`` for ``{"training": {"rounds": 5}}``.

    Args:
        content: A section of a recipe, or a value.
        section: The key of this section; empty for the whole recipe.
    """
    if not isinstance(content, dict):
        return {section: content}
    values: dict[str, object] = {}
    for key, value in content.items():
        dotted_key = f"{section}.{key}" if section else str(key)
        values.update(_values_by_dotted_key(value, dotted_key))
    return values
