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
    out: Annotated[Path, out_option("Write to this folder.")] = Path("runs/demo"),
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train a small language model for four users: pretrained, alone, averaged, and with CoMiGS."""
    from comingle.cli.compare import compare_methods
    from comingle.config import shipped_recipes

    recipe = read_recipe(shipped_recipes() / "demo.yaml", sets)
    console.print(
        "Four users have different text: the standard library's source, the language reference, NumPy's documentation\n"
        "and licences. No text leaves its user: CoMiGS averages the attention's LoRA and one shared expert between\n"
        "rounds, and keeps each user's specialist and router local.\n"
    )
    last = compare_methods(recipe, METHODS, [recipe.seed], out, resume=resume, force=force, quiet=quiet)
    if last is not None:
        _print_samples(last)
    console.print("\nNext steps", style="bold")
    console.print(
        f"  comingle show {out}/comigs-1g1s-seed{recipe.seed}        one run: all users and evaluations\n"
        "  comingle methods                                the other methods; comingle methods comigs for one\n"
        "  comingle data recipes/demo.yaml                 the users' text\n"
        "  your own users: copy recipes/demo.yaml, set folders or files under data.users, then\n"
        "  comingle compare RECIPE --methods local,fedavg,comigs-1g1s --seeds 0,1,2",
        highlight=False,
    )


def _print_samples(run: Run) -> None:
    """Print the text with which each user's model continues a prompt from that user's domain."""
    from rich.text import Text

    from comingle.runs.views import generating_model
    from comingle.utils.terminal import literal_text, printable

    title = Text.assemble(("\nText from each user's model", "bold"), f" ({run.metrics['method']}, greedy)")
    console.print(title, highlight=False)
    for name in run.users:
        prompt = PROMPTS.get(name, "The")
        generated = generating_model(run, name).generate(prompt, max_new_tokens=40)
        is_source_code = name == "library"
        if not is_source_code:
            generated = re.sub(r"\s+", " ", generated)  # on one line
        line = Text.assemble("  ", literal_text(name, "cyan"), ": ", literal_text(prompt, "bold"))
        console.print(line + printable(generated.rstrip(), keep="\n\t"), highlight=False)
