"""``comingle export``: a user's model as other programs read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comingle.cli.options import Force, Quiet
from comingle.errors import DataError, RunError, did_you_mean


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of a comparison.")],
    user: Annotated[str, typer.Option("--user", metavar="NAME", help='Whose model; "all" is everybody\'s.')],
    to: Annotated[
        Path, typer.Option("--to", metavar="<path>", help="Folder to write to; with all, one below it for each user.")
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="One of transformers, peft, gguf and merged-approximately.",
            show_default=True,
        ),
    ] = "transformers",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float32, bfloat16 or float64; for gguf float32, bfloat16 or q8_0 (default: the base's)."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help="Which method's run, of a comparison.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Which seed's run, of a comparison (default: the first).")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a user's model for transformers, PEFT or llama.cpp, with a model card and the tokenizer."""
    folder = _run_of(run, method, seed)
    import comingle
    from comingle.cli.progress import console, status
    from comingle.cli.views import generating_model
    from comingle.models.export.folders import check_target

    with status("opening the run"):
        opened = comingle.load(folder)
    if user != "all" and user not in opened.users:
        hint = did_you_mean(user, opened.users)
        raise DataError(f"--user: no user {user!r}; there are: {', '.join(opened.users)}.{hint}")
    everybody = user == "all" and "all" not in opened.users
    targets = {name: to / name for name in opened.users} if everybody else {user: to}
    for target in targets.values():  # before the first is written
        check_target(target, force=force)
    for name, target in targets.items():
        with status(f"exporting {name}"):
            made = generating_model(opened, name).export(target, format=format, dtype=dtype, force=force)
        if quiet:
            continue
        console.print(f"{name}: {target}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"  {made.form}", highlight=False, markup=False)
        for key, value in made.lost.items():
            console.print(f"  {key.replace('_', ' ')}: {value:.4g}", highlight=False, markup=False)


def _run_of(folder: Path, method: str | None, seed: int | None) -> Path:
    """The run folder, chosen from a comparison's by method and seed.

    Raises:
        RunError: which one is not said, or there is none such.
    """
    from comingle.reports.tables import read_comparison

    if not (folder / "table.json").exists():
        if method is not None or seed is not None:
            raise RunError(f"{folder}: is not the folder of a comparison, so leave out --method and --seed")
        return folder
    rows = {row["method"]: row["seeds"] for row in read_comparison(folder)["methods"]}
    if method is None and len(rows) > 1:
        raise RunError(f"{folder}: is a comparison; say which run with --method: {', '.join(rows)}")
    name = method if method is not None else next(iter(rows))
    if name not in rows:
        raise RunError(f"--method: got {name!r}; in {folder} are: {', '.join(rows)}.{did_you_mean(name, rows)}")
    if seed is not None and seed not in rows[name]:
        raise RunError(f"--seed: got {seed}; of {name} there are: {', '.join(map(str, rows[name]))}")
    return folder / f"{name}-seed{rows[name][0] if seed is None else seed}"
