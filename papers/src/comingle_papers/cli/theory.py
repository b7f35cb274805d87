"""``comingle theory``: convergence results, measured beside their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.options import Force, Out, console, status
from comingle.utils.errors import ComingleError

if TYPE_CHECKING:
    from comingle.reports.formatting import Table
    from comingle_papers.recipes import TheoryRecipe
    from comingle_papers.theory.claims import Row


def theory(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A theory recipe (default: comigs/theory.yaml).")
    ] = None,
    out: Out = None,
    force: Force = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Use this random seed (default: the recipe's).")] = None,
) -> None:
    """Run the schemes of CoMiGS and FLoRAL on small problems, and compare them with the bounds of their theory."""
    path, theory_recipe = _load_recipe(recipe, seed)
    _require_packages()
    from comingle.utils.terminal import literal_text
    from comingle_papers.theory.checks import (
        LinearSettings,
        QuadraticSettings,
        as_json,
        check_all,
        check_folder,
        write_folder,
    )
    from comingle_papers.theory.claims import summarise
    from comingle_papers.theory.clusters import ClusterSettings
    from comingle_papers.theory.quadratics import CoupledSettings

    folder = out or Path("runs") / path.stem
    check_folder(folder, force=force)
    with status("running gradient descent"):
        curves = check_all(
            theory_recipe.seed,
            QuadraticSettings(**theory_recipe.quadratic.model_dump()),
            LinearSettings(**theory_recipe.linear.model_dump()),
            CoupledSettings(**theory_recipe.coupled.model_dump()),
            ClusterSettings(**theory_recipe.clusters.model_dump()),
        )
        write_folder(folder, theory_recipe.as_yaml(), as_json(theory_recipe.seed, curves), curves)
    console.print(render(summarise(curves)))
    console.print(literal_text(f"{folder}/  residuals.png · residuals.svg · theory.json · recipe.yaml", "dim"))


def _load_recipe(recipe: Path | None, seed: int | None) -> tuple[Path, TheoryRecipe]:
    """Load the recipe of ``comingle theory``; return its path and content.

    Args:
        recipe: The file; None for ``comigs/theory.yaml``.
        seed: Seed that replaces the recipe's; None keeps it.
    """
    from comingle_papers.recipes import load_theory_recipe, parse_theory_recipe, published_recipes

    path = recipe or published_recipes() / "comigs" / "theory.yaml"
    loaded = load_theory_recipe(path)
    if seed is None:
        return path, loaded
    with_seed = {**loaded.model_dump(), "seed": seed}
    return path, parse_theory_recipe(with_seed, where="--seed")


def _require_packages() -> None:
    """Check that the packages of the theory's computations and figures are installed.

    Raises:
        ComingleError: One is missing; the message names it.
    """
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"comingle theory needs {error.name}: pip install 'comingle[reports]'") from None


def render(rows: list[Row]) -> Table:
    """Return the terminal table of ``comingle theory``: the papers' statements with measured values and bounds.

    Each kind of problem ("scheme") has a heading, then a line for each statement about it, such as
    ``Theorem F.1, experts   0.41   ≤   0.43   20 of 20``.

    Args:
        rows: The statements; rows of the same scheme follow each other.
    """
    from comingle.reports.formatting import Table
    from comingle.utils.terminal import literal_text

    table = Table("", title="tightest instance: measured and predicted", title_justify="left", box=None)
    for name in ("measured", "", "bound", "holds for"):
        table.add_column(name, justify="right")
    scheme = None
    for row in rows:
        if row.scheme != scheme:
            scheme = row.scheme
            table.add_row(literal_text(scheme, "bold"))
        if row.bound is None:
            relation, bound = "", "none"
        else:
            relation = "≥" if row.at_least else "≤"
            bound = number(row.bound)
        holds_where_it_applies = row.held == row.covered
        style = "" if holds_where_it_applies else "red"
        table.add_row(f"  {row.statement}", number(row.measured), relation, bound, _count_instances(row), style=style)
    table.caption = (
        "CoMiGS: largest share of the residual left by one step. Clusters: the instance closest to its bound.\n"
        "No bound: the conditions do not hold. 'As printed' is the paper's inequality, which need not hold "
        "(papers/docs/papers.md)."
    )
    table.caption_justify = "left"
    return table


def _count_instances(row: Row) -> str:
    """Return how many random problems obey a statement, as "3 of 5, 2 without bound".

    A problem is without bound if the statement's conditions do not hold for it.
    """
    parts = []
    if row.covered:
        parts.append(f"{row.held} of {row.covered}")
    num_without_bound = row.instances - row.covered
    if num_without_bound:
        parts.append(f"{num_without_bound} without bound")
    return ", ".join(parts)


def number(value: float) -> str:
    """Format a number with four digits; one just below 1, as many rates of convergence, as ``1 - 2e-05``."""
    if 0.9999 < value < 1:
        return f"1 - {1 - value:.0e}"
    return f"{value:.4g}"
