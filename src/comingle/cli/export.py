"""``comingle export``: users' models in the formats of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from comingle.cli.options import Force, Quiet, console, status
from comingle.utils.errors import RecipeError, list_names, require_user
from comingle.utils.names import as_folder


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
    to: Annotated[
        Path, typer.Option("--to", metavar="<path>", help="Write to this folder; with all, to a folder in it per user.")
    ],
    user: Annotated[
        str | None,
        typer.Option(
            "--user", metavar="NAME", help='Export this user\'s model; "all" for all users (default: the only user).'
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Write this format: transformers, peft, gguf or merged-approximately.",
            show_default=True,
        ),
    ] = "transformers",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Use float32, bfloat16, float16 or float64; for gguf float32, bfloat16 or q8_0 (default: the run's).",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help="Export this method's run of a comparison.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Export this seed's run of a comparison (default: the first).")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a user's model for transformers, PEFT or llama.cpp, with a model card and the tokenizer."""
    import comingle
    from comingle.runs.views import generating_model
    from comingle.serving.export.exporting import check_target
    from comingle.serving.models import find_run

    folder = find_run(run, method, seed)
    with status("opening the run"):
        opened = comingle.load(folder)
    targets = target_by_user(user, opened.users, to)
    for target in targets.values():  # all are checked before the first is written
        check_target(target, force=force)
    for name, target in targets.items():
        with status(f"exporting {name}"):
            exported = generating_model(opened, name).export(target, format=format, dtype=dtype, force=force)
        if quiet:
            continue
        description = exported.form  # a sentence on the format
        scores_before_and_after = exported.lost  # of an approximation; empty for exact formats
        console.print(f"{name}: {target}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"  {description}", highlight=False, markup=False)
        for key, value in scores_before_and_after.items():
            console.print(f"  {key.replace('_', ' ')}: {value:.4g}", highlight=False, markup=False)


def target_by_user(user: str | None, users: Sequence[str], to: Path) -> dict[str, Path]:
    """Return the folder to which each exported user's model is written: ``{"ann": Path("out/ann")}``.

    Args:
        user: Name of a user, or "all" for all users; None for the only user of the run.
        users: All users of the run.
        to: Folder to write to; with "all" each user has a folder in it.

    Raises:
        RecipeError: No user is named, and the run has several.
        DataError: There is no such user.
    """
    if user is None:
        if len(users) > 1:
            raise RecipeError(f"--user: got none for {len(users)} users; allowed: {list_names(users)}, or all")
        return dict.fromkeys(users, to)
    means_all_users = user == "all" and "all" not in users  # not a user with this name
    if means_all_users:
        return {name: to / as_folder(name) for name in users}
    name = require_user(user, users, "--user: ")
    return {name: to}
