"""``comingle compare``: several methods and seeds on the same base, data and budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.cli.options import (
    Everybody,
    Force,
    Out,
    Quiet,
    RecipePath,
    Resume,
    Sets,
    method_settings,
    read_recipe,
)
from comingle.errors import RecipeError

if TYPE_CHECKING:
    from comingle.recipes import Recipe
    from comingle.runs.results import Run


def compare(
    recipe: RecipePath,
    methods: Annotated[str, typer.Option("--methods", help="Methods, separated by commas.")],
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas.")] = "0",
    sets: Sets = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    everybody: Everybody = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods over several seeds; print and write a table of means and deviations.

    The recipe's method settings are for its own method, and the others have their defaults; --set method.KEY=VALUE is
    for every method that has KEY.
    """
    read, names = read_recipe(recipe, sets), split_names(methods)
    folder = out or Path("runs") / f"compare-{recipe.stem}"
    options = {"resume": resume, "force": force, "everybody": everybody, "quiet": quiet}
    compare_methods(read, names, split_seeds(seeds), folder, for_all=method_settings(sets, names), **options)


def compare_methods(
    recipe: Recipe,
    methods: list[str],
    seeds: list[int],
    folder: Path,
    *,
    resume: bool,
    force: bool,
    everybody: bool = False,
    quiet: bool = False,
    for_all: Mapping[str, Any] = MappingProxyType({}),
) -> list[Run]:
    """Every method with every seed, each in its own run folder below ``folder``; the last seed's runs are returned.

    The recipe's own method has its settings, another its defaults; ``for_all`` goes to whichever has such a setting.
    """
    from comingle.cli.progress import console
    from comingle.cli.training import warn_overlaps
    from comingle.comparing.comparing import compare_runs, folders_of, recipes_of
    from comingle.progress import reporting
    from comingle.reports.tables import tables_of, write_comparison
    from comingle.terminal import words

    recipes = recipes_of(recipe, methods, seeds, for_all)
    runs: list[Run] = []
    with reporting(quiet=quiet) as reporter:
        for _, run in compare_runs(recipes, folder, reporter, resume=resume, force=force, ready=warn_overlaps):
            runs = [*runs, run][-len(methods) :]
    for part in tables_of(write_comparison(folder, list(folders_of(recipes, folder).values())), everybody=everybody):
        console.print(part)
    console.print(words(f"{folder}/  table.md · table.json · one run folder for each method and seed", "dim"))
    return runs


def split_names(text: str) -> list[str]:
    """Comma-separated names, each once.

    Raises:
        RecipeError: none given.
    """
    names = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not names:
        raise RecipeError("--methods: no method given; `comingle methods` lists them")
    return names


def split_seeds(text: str) -> list[int]:
    """Comma-separated whole numbers.

    Raises:
        RecipeError: something else.
    """
    try:
        return [int(seed) for seed in split_names(text)]
    except (ValueError, RecipeError):
        raise RecipeError(f"--seeds {text!r}: give whole numbers separated by commas, as 0,1,2") from None
