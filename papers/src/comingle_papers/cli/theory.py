"""``comingle theory``: convergence results, measured beside their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml
from pydantic import Field, ValidationError

from comingle.cli.options import Force, Out
from comingle.config.data import Section
from comingle.config.files import read_yaml
from comingle.config.hints import first_problem
from comingle.utils.errors import ComingleError, RecipeError

if TYPE_CHECKING:
    from comingle.reports.formatting import Table
    from comingle_papers.theory.claims import Row


Steps = Annotated[int, Field(ge=2, le=10_000, strict=True)]
# The Hessian is dense: at the limits it has some thousand rows.
Size = Annotated[int, Field(ge=1, le=100, strict=True)]
Few = Annotated[int, Field(ge=1, le=20, strict=True)]
Samples = Annotated[int, Field(ge=2, le=200, strict=True)]
Instances = Annotated[int, Field(ge=1, le=1000, strict=True)]
Mismatch = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=1e-4, le=1e3)]
LossName = Literal["logistic", "squared"]


class QuadraticSection(Section):
    """Eq. 12 on random strictly convex quadratics (Example 1, Theorem F.1)."""

    instances: Instances = 20
    experts_size: Size = 6
    router_size: Size = 4
    condition: Annotated[float, Field(gt=1, le=1e6)] = 50.0
    mismatches: Annotated[tuple[Mismatch, ...], Field(min_length=1)] = (0.0, 0.2)
    steps: Steps = 60


class LinearSection(Section):
    """Eq. 28 on linear experts (Proposition 1, Theorem F.2)."""

    instances: Instances = 3
    samples: Samples = 40
    features: Few = 3
    specialists: Few = 2
    coupling: Annotated[float, Field(ge=1e-2, le=1e2)] = 1.0
    losses: Annotated[tuple[LossName, ...], Field(min_length=1)] = ("logistic", "squared")
    decays: Annotated[tuple[Decay, ...], Field(min_length=1)] = (0.003, 0.1, 1.0)
    steps: Steps = 60


class CoupledSection(Section):
    """Functions that meet in an inner product (an earlier version's Assumption 3, Propositions 1 and 2)."""

    instances: Instances = 5
    size: Few = 4
    meeting: Few = 3
    lipschitz: Annotated[tuple[Annotated[float, Field(gt=0, le=100)], ...], Field(min_length=1)] = (0.5, 0.9, 2.0)
    pairs: Annotated[int, Field(ge=1, le=1000, strict=True)] = 50
    steps: Steps = 30


class ClustersSection(Section):
    """FLoRAL's eq. 4 on random clusters of quadratics (appendices A and B)."""

    instances: Instances = 5
    clients: Annotated[int, Field(ge=2, le=100, strict=True)] = 6
    size: Annotated[int, Field(ge=2, le=20, strict=True)] = 4
    condition: Annotated[float, Field(gt=1, le=1e3)] = 20.0
    mismatches: Annotated[tuple[Mismatch, ...], Field(min_length=1)] = (0.0, 1.0)
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.5
    local_steps: Annotated[int, Field(ge=1, le=100, strict=True)] = 4
    steps: Steps = 400
    replicas: Annotated[int, Field(ge=2, le=1000, strict=True)] = 64


class TheoryRecipe(Section):
    """What ``comingle theory`` runs."""

    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    quadratic: QuadraticSection = QuadraticSection()
    linear: LinearSection = LinearSection()
    coupled: CoupledSection = CoupledSection()
    clusters: ClustersSection = ClustersSection()

    def as_yaml(self) -> str:
        """The whole recipe, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_theory_recipe(path: Path) -> TheoryRecipe:
    """Read a theory recipe.

    Raises:
        RecipeError: no such file, not YAML, or the first thing that is wrong in it.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: no such theory recipe; without a name the shipped one is run")
    return parse_theory_recipe(read_yaml(path), where=str(path))


def parse_theory_recipe(content: Any, *, where: str = "theory recipe") -> TheoryRecipe:
    """Check a theory recipe.

    Raises:
        RecipeError: the first thing that is wrong, with its place, what was got and what is allowed.
    """
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: a recipe is a mapping of keys to values; got {type(content).__name__}")
    try:
        return TheoryRecipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error, TheoryRecipe)}") from None


def theory(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A theory recipe (default: comigs/theory.yaml).")
    ] = None,
    out: Out = None,
    force: Force = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: the recipe's).")] = None,
) -> None:
    """Run CoMiGS's and FLoRAL's schemes on small problems, beside what theory predicts."""
    path, read = _read(recipe, seed)
    _require_packages()
    from comingle.cli.options import console, status
    from comingle.utils.terminal import words
    from comingle_papers.theory.checks import LinearSettings, QuadraticSettings, as_json, check_all
    from comingle_papers.theory.claims import summarise
    from comingle_papers.theory.clusters import ClusterSettings
    from comingle_papers.theory.coupled import CoupledSettings
    from comingle_papers.theory.plots import check_folder, write_folder

    folder = out or Path("runs") / path.stem
    check_folder(folder, force=force)
    with status("descending"):
        curves = check_all(
            read.seed,
            QuadraticSettings(**read.quadratic.model_dump()),
            LinearSettings(**read.linear.model_dump()),
            CoupledSettings(**read.coupled.model_dump()),
            ClusterSettings(**read.clusters.model_dump()),
        )
        write_folder(folder, read.as_yaml(), as_json(read.seed, curves), curves)
    console.print(render(summarise(curves)))
    console.print(words(f"{folder}/  residuals.png · residuals.svg · theory.json · recipe.yaml", "dim"))


def _read(recipe: Path | None, seed: int | None) -> tuple[Path, TheoryRecipe]:
    from comingle_papers.recipes import published_recipes

    path = recipe or published_recipes() / "comigs" / "theory.yaml"
    read = load_theory_recipe(path)
    if seed is None:
        return path, read
    return path, parse_theory_recipe({**read.model_dump(), "seed": seed}, where="--seed")


def _require_packages() -> None:
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        raise ComingleError(f"comingle theory needs {error.name}: pip install 'comingle[reports]'") from None


def render(rows: list[Row]) -> Table:
    """A heading for each scheme, a line for each statement about it."""
    from comingle.reports.formatting import Table
    from comingle.utils.terminal import words

    table = Table("", title="what the tightest instance does, and what is predicted", title_justify="left", box=None)
    for name in ("measured", "", "bound", "holds for"):
        table.add_column(name, justify="right")
    scheme = None
    for row in rows:
        if row.scheme != scheme:
            scheme = row.scheme
            table.add_row(words(scheme, "bold"))
        relation = "" if row.bound is None else ("≥" if row.at_least else "≤")
        style = "" if row.held == row.covered else "red"
        bound = "none" if row.bound is None else number(row.bound)
        table.add_row(f"  {row.statement}", number(row.measured), relation, bound, _count(row), style=style)
    table.caption = (
        "CoMiGS: the share of the residual that the worst step leaves. Clusters: where most of a bound is used.\n"
        "No bound: conditions fail. 'As printed' is the paper's inequality, which need not hold: see docs/papers.md."
    )
    table.caption_justify = "left"
    return table


def _count(row: Row) -> str:
    without = row.instances - row.covered
    held = f"{row.held} of {row.covered}" if row.covered else ""
    return ", ".join(part for part in (held, f"{without} without bound" if without else "") if part)


def number(value: float) -> str:
    """Four digits, or the distance from 1 where that says more."""
    if 0.9999 < value < 1:
        return f"1 - {1 - value:.0e}"
    return f"{value:.4g}"
