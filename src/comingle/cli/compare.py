"""``comingle compare`` and ``comingle demo``: several methods on the same base, data and budget."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.cli.options import (
    AllUsers,
    Force,
    Out,
    Quiet,
    RecipePath,
    Resume,
    Sets,
    console,
    method_settings,
    out_option,
    read_recipe,
    shorten,
)
from comingle.runs import SEEDS
from comingle.utils.errors import ComingleError, RecipeError, RunError

if TYPE_CHECKING:
    from comingle.config import Recipe
    from comingle.runs.compare import Ended, Key
    from comingle.runs.results import Run

SEEDS = ",".join(map(str, SEEDS))

DEMO_METHODS = ["pretrained", "local", "fedavg", "comigs-1g1s"]
DEMO_PROMPTS = {
    "library": "def main(",
    "reference": "The with statement",
    "numpy": "Return the elements of an array",
    "licences": "Permission is hereby granted",
}


def compare(
    recipe: RecipePath,
    methods: Annotated[
        str,
        typer.Option("--methods", help="Compare these methods, separated by commas; NAME:KEY=VALUE changes a setting."),
    ],
    seeds: Annotated[
        str, typer.Option("--seeds", help="Run each method with these seeds, separated by commas.")
    ] = SEEDS,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="METHODS", help="Use the best of these as the baseline (default: local, or the first)."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Run N runs in parallel, each in its own process.")] = 1,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            "--tune",
            metavar="KEY=V1,V2,...",
            help="Train each method with each value on the first seed, and pick by validation loss.",
        ),
    ] = None,
    sets: Sets = None,
    out: Out = None,
    resume: Resume = False,
    force: Force = False,
    all_users: AllUsers = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods with several seeds; print and write means, deviations and verdicts.

    The recipe's method settings apply to its own method; others have their defaults. --set method.KEY=VALUE applies to
    every method that has KEY. A method can be given several times with different settings, for example
    fedprox:proximal=0.01,fedprox:proximal=0.1. --tune can be given several times: then all combinations are tried.
    """
    loaded_recipe = read_recipe(recipe, sets)
    labels = split_names(methods)  # such as "fedprox:proximal=0.1"
    names = [label.partition(":")[0] for label in labels]
    for_all = method_settings(sets, names)  # values of --set method.KEY=VALUE, for every method that has KEY
    compare_methods(
        loaded_recipe,
        labels,
        split_seeds(seeds),
        folder=out or Path("runs") / f"compare-{recipe.stem}",
        resume=resume,
        force=force,
        all_users=all_users,
        quiet=quiet,
        jobs=jobs,
        against=against,
        for_all=for_all,
        tune=parse_tune(tune or []),
    )


def compare_methods(
    recipe: Recipe,
    methods: list[str],
    seeds: list[int],
    folder: Path,
    *,
    resume: bool,
    force: bool,
    all_users: bool = False,
    quiet: bool = False,
    jobs: int = 1,
    against: str | None = None,
    for_all: Mapping[str, object] = MappingProxyType({}),
    tune: Mapping[str, Sequence[object]] = MappingProxyType({}),
) -> Run | None:
    """Run every method with every seed, each in its own run folder, and print and write the comparison.

    Args:
        recipe: The recipe. Its own method keeps its settings; others have their defaults.
        methods: Names of methods, each with or without settings, as ``fedprox:proximal=0.1``.
        seeds: Seeds.
        folder: Folder of the comparison.
        resume: Resume interrupted runs.
        force: Replace existing runs.
        all_users: Print a row for each user.
        quiet: Do not print progress.
        jobs: Number of parallel runs; with more than 1, each runs in its own process.
        against: Value of ``--against``, such as "local" or "local,fedavg"; None for the default baseline.
        for_all: Settings such as ``{"proximal": 0.1}``, for every method that has a setting of this name.
        tune: Candidate values by recipe key, of which each method gets those with the lowest validation loss.

    Returns:
        The last run; None if it failed, or if it ran in another process.

    Raises:
        RunError: Some runs failed. It is raised after all others have finished and the table is written.
    """
    from comingle.cli.training import warn_overlaps
    from comingle.reports.tables import render_with_verdicts
    from comingle.runs.compare import check_baseline, folders_of, recipes_of, run_recipes, tune_recipes, write_table
    from comingle.runs.progress import reporting
    from comingle.utils.terminal import literal_text

    recipes = recipes_of(recipe, methods, seeds, for_all)  # by method's label and seed
    check_baseline(recipes, folder, against)
    last_outcome = None
    failures: dict[Key, ComingleError] = {}
    with reporting(quiet=quiet or jobs > 1) as reporter:  # bars of several processes would overwrite each other
        say = reporter.say
        options = {"resume": resume, "force": force, "on_data": warn_overlaps}
        run_all = partial(run_recipes, reporter=reporter, **options)
        if jobs > 1:
            run_all = partial(_run_in_parallel, jobs=jobs, quiet=quiet, **options)
            say = partial(_print_progress, quiet=quiet)
        outcomes: Iterator[tuple[Key, Run | dict[str, Any] | ComingleError]]
        if tune:
            tuned = tune_recipes(recipes, tune, folder, run_all, resume=resume, force=force, say=say)
            recipes, outcomes = tuned.recipes, tuned.outcomes_of_all_runs(folder, run_all)
        else:
            outcomes = run_all(recipes, folder)
        for key, outcome in outcomes:  # an outcome is a run, an error, or the metrics of a run in another process
            if isinstance(outcome, ComingleError):
                failures[key] = outcome
            last_outcome = outcome

    folder_by_key = folders_of(recipes, folder)
    failed_folders = [folder_by_key[key] for key in failures]
    label_by_finished_folder: dict[Path, str] = {}
    for key, run_folder in folder_by_key.items():
        if key not in failures:
            label, _ = key
            label_by_finished_folder[run_folder] = label
    if not label_by_finished_folder:
        raise next(iter(failures.values()))
    table, _ = write_table(folder, label_by_finished_folder, against, failed=failed_folders)
    for part in render_with_verdicts(table, all_users=all_users):
        console.print(part)
    console.print(literal_text(f"{folder}/  table.md · table.json · one run folder for each method and seed", "dim"))
    if failures:
        raise RunError(_failures_text(failures, len(recipes)))
    return None if isinstance(last_outcome, dict | ComingleError) else last_outcome


def _failures_text(failures: Mapping[Key, ComingleError], num_runs: int) -> str:
    causes = "; ".join(f"{method}, seed {seed}: {error}" for (method, seed), error in failures.items())
    return f"{len(failures)} of {num_runs} runs failed and are not in the table: {causes}"


def _run_in_parallel(recipes: Mapping[Key, Recipe], folder: Path, *, quiet: bool, **options: Any) -> Iterator[Ended]:
    """Run recipes in parallel processes, and print a line for each run, except candidates, as it ends.

    Yield the method and seed of each run, in the order in which they end, with its metrics or, if it failed, its error.

    Args:
        recipes: Recipes by method and seed.
        folder: Folder of the comparison.
        quiet: Print nothing.
        options: Options of :func:`comingle.runs.compare.run_recipes_in_processes`.
    """
    from comingle.runs.compare import run_recipes_in_processes
    from comingle.utils.records import measure_of, number

    outcomes = run_recipes_in_processes(recipes, folder, quiet=quiet, **options)
    for num_ended, (key, outcome) in enumerate(outcomes, start=1):
        if isinstance(outcome, ComingleError):
            result = f"failed: {outcome}"
        else:
            measure = measure_of(outcome)
            score = number(outcome[f"mean_test_{measure}"], measure)
            result = f"test {measure} {score} · {outcome['wall_seconds']:.0f} s"
        method, seed = key
        line = f"{num_ended} of {len(recipes)} runs ended · {method}, seed {seed} · {result}"
        _print_progress(line, quiet=quiet or options.get("are_candidates", False))
        yield key, outcome


def _print_progress(line: str, *, quiet: bool) -> None:
    """Print a line on standard error, unless ``quiet``."""
    from comingle.utils.terminal import errors, literal_text

    if not quiet:
        errors.print(literal_text(line), soft_wrap=True, highlight=False)


_COMMA_OUTSIDE_BRACKETS = r",(?![^\[]*\])"  # no closing bracket follows before an opening one


def parse_tune(texts: Sequence[str]) -> dict[str, list[object]]:
    """Convert values of ``--tune``: "training.experts.learning_rate=1e-3,3e-3" to the key and its list of values.

    Raises:
        RecipeError: A text is not of the form KEY=V1,V2, a key occurs twice, or a value is not YAML.
    """
    from comingle.config.files import read_text

    tune: dict[str, list[object]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not key or not equals or not values or key in tune:
            raise RecipeError(
                f"--tune {shorten(text)!r}: give KEY=V1,V2,..., each key once, for example "
                "training.experts.learning_rate=1e-3,3e-3,1e-2"
            )
        tune[key] = [read_text(value, f"--tune {key}") for value in re.split(_COMMA_OUTSIDE_BRACKETS, values)]
    return tune


def split_names(text: str) -> list[str]:
    """Split the value of ``--methods`` at commas: "a, b:ranks=[1,2]" becomes ``["a", "b:ranks=[1,2]"]``.

    Raises:
        RecipeError: There are no names.
    """
    parts = [part.strip() for part in re.split(_COMMA_OUTSIDE_BRACKETS, text)]
    names = list(dict.fromkeys(part for part in parts if part))  # each once
    if not names:
        raise RecipeError("--methods: no method given; `comingle methods` lists them")
    return names


def split_seeds(text: str) -> list[int]:
    """Split the value of ``--seeds`` at commas and return each seed once, in order.

    Raises:
        RecipeError: A seed is not an integer, or there are none.
    """
    try:
        return [int(seed) for seed in split_names(text)]
    except (ValueError, RecipeError):
        raise RecipeError(f"--seeds {text!r}: give whole numbers separated by commas, for example 0,1,2") from None


def demo(
    sets: Sets = None,
    out: Annotated[Path, out_option("Write to this folder.")] = Path("runs/demo"),
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train a small language model for four users: pretrained, alone, averaged, and with CoMiGS."""
    from comingle.config import shipped_recipes

    recipe = read_recipe(shipped_recipes() / "demo.yaml", sets)
    console.print(
        "Four users have different text: the standard library's source, the language reference, NumPy's documentation\n"
        "and licences. No text leaves its user: CoMiGS averages the attention's LoRA and one shared expert between\n"
        "rounds, and keeps each user's specialist and router local.\n"
    )
    last = compare_methods(recipe, DEMO_METHODS, [recipe.seed], out, resume=resume, force=force, quiet=quiet)
    if last is not None:
        _print_continuations(last)
    console.print("\nNext steps", style="bold")
    console.print(
        f"  comingle show {out}/comigs-1g1s-seed{recipe.seed}        one run: all users and evaluations\n"
        "  comingle methods                                the other methods; comingle methods comigs for one\n"
        "  comingle data recipes/demo.yaml                 the users' text\n"
        "  your own users: copy recipes/demo.yaml, set folders or files under data.users, then\n"
        "  comingle compare RECIPE --methods local,fedavg,comigs-1g1s --seeds 0,1,2",
        highlight=False,
    )


def _print_continuations(run: Run) -> None:
    """Print the text with which each user's model continues a prompt from that user's domain."""
    from rich.text import Text

    from comingle.runs.views import generating_model
    from comingle.utils.terminal import literal_text, printable

    title = Text.assemble(("\nText from each user's model", "bold"), f" ({run.metrics['method']}, greedy)")
    console.print(title, highlight=False)
    for name in run.users:
        prompt = DEMO_PROMPTS.get(name, "The")
        generated = generating_model(run, name).generate(prompt, max_new_tokens=40)
        is_source_code = name == "library"
        if not is_source_code:
            generated = re.sub(r"\s+", " ", generated)  # on one line
        line = Text.assemble("  ", literal_text(name, "cyan"), ": ", literal_text(prompt, "bold"))
        console.print(line + printable(generated.rstrip(), keep="\n\t"), highlight=False)
