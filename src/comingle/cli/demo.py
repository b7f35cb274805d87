"""``comingle demo``: a comparison of four methods on text that is part of every installation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from comingle.cli.options import Force, Quiet, Resume, Sets, console, out_option, read_recipe

if TYPE_CHECKING:
    from comingle.runs.results import Run

METHODS = ["pretrained", "local", "fedavg", "comigs-1g1s"]
PROMPTS = {
    "library": "def main(",
    "reference": "The with statement",
    "numpy": "Return the elements of an array",
    "licences": "Permission is hereby granted",
}


def demo(
    sets: Sets = None,
    out: Annotated[Path, out_option("Folder to write to.")] = Path("runs/demo"),
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train a small language model for four users: pretrained, alone, averaged, and with CoMiGS."""
    from comingle.cli.compare import compare_methods
    from comingle.config import shipped_recipes

    recipe = read_recipe(shipped_recipes() / "demo.yaml", sets)
    console.print(
        "Four users read different text: the standard library's source, the language reference, NumPy's documentation\n"
        "and licences. Nobody's text leaves them: with CoMiGS the attention's LoRA and one shared expert\n"
        "are averaged between rounds, each user's own expert and router stay at home.\n"
    )
    last = compare_methods(recipe, METHODS, [recipe.seed], out, resume=resume, force=force, quiet=quiet)
    if last is not None:
        _print_samples(last)
    console.print("\nWhat next", style="bold")
    console.print(
        f"  comingle show {out}/comigs-1g1s-seed{recipe.seed}        one run: every user, every evaluation\n"
        "  comingle methods                                the other methods; comingle methods comigs for one\n"
        "  comingle data recipes/demo.yaml                 what the users read\n"
        "  your own users: copy recipes/demo.yaml, name folders or files under data.users, then\n"
        "  comingle compare RECIPE --methods local,fedavg,comigs-1g1s --seeds 0,1,2",
        highlight=False,
    )


def _print_samples(run: Run) -> None:
    """Print a generated text of each user's model."""
    from rich.text import Text

    from comingle.runs.views import generating_model
    from comingle.utils.terminal import printable, words

    title = ("\nEach user's own model speaks", "bold"), f" ({run.metrics['method']}, greedy)"
    console.print(Text.assemble(*title), highlight=False)
    for name in run.users:
        prompt = PROMPTS.get(name, "The")
        said = generating_model(run, name).generate(prompt, max_new_tokens=40)
        # Source code keeps its lines; prose is joined to one line.
        shown = said.rstrip() if name == "library" else re.sub(r"\s+", " ", said).rstrip()
        line = Text.assemble("  ", words(name, "cyan"), ": ", words(prompt, "bold"))
        console.print(line + printable(shown, keep="\n\t"), highlight=False)
