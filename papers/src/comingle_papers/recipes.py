"""Published recipes and measured runs of the papers, and the recipes of ``comingle theory``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from comingle.config.files import read_yaml
from comingle.config.hints import first_problem
from comingle.config.settings import Section
from comingle.utils.errors import RecipeError


def published_recipes() -> Path:
    """Return the folder with one folder of recipes per paper, such as ``comigs``.

    An installed package contains them; in a checkout they are outside of the package's sources.
    """
    in_package = Path(__file__).parent / "shipped_recipes"
    in_checkout = Path(__file__).parents[2] / "recipes"
    return in_package if in_package.is_dir() else in_checkout


def published_runs() -> dict[str, Path]:
    """Return the archives of finished runs that come with comingle, by name, such as ``comigs-cpu``.

    An installed package contains them; in a checkout they are outside of the package's sources.
    """
    in_package = Path(__file__).parent / "shipped_measured"
    in_checkout = Path(__file__).parents[2] / "measured"
    folder = in_package if in_package.is_dir() else in_checkout
    return {path.name.removesuffix(RUNS_SUFFIX): path for path in sorted(folder.glob(f"*{RUNS_SUFFIX}"))}


RUNS_SUFFIX = ".jsonl.xz"
"""End of the file name of an archive of runs."""


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
    """Functions coupled by an inner product (an earlier version's Assumption 3, Propositions 1 and 2)."""

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
    """Recipe of ``comingle theory``."""

    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    quadratic: QuadraticSection = QuadraticSection()
    linear: LinearSection = LinearSection()
    coupled: CoupledSection = CoupledSection()
    clusters: ClustersSection = ClustersSection()

    def as_yaml(self) -> str:
        """Return the whole recipe as YAML, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_theory_recipe(path: Path) -> TheoryRecipe:
    """Read a recipe of ``comingle theory``, which checks the convergence theory of the papers.

    Raises:
        RecipeError: The file is missing, is not YAML, or has an invalid value, the first of which is reported.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: no such theory recipe; omit the name to run the shipped one")
    return parse_theory_recipe(read_yaml(path), where=str(path))


def parse_theory_recipe(content: object, *, where: str = "theory recipe") -> TheoryRecipe:
    """Return a theory recipe from parsed YAML, after checking its keys and values.

    Args:
        content: The parsed YAML.
        where: Name of its source, for error messages.

    Raises:
        RecipeError: A value is invalid; the first is reported with its place, its value and what is allowed.
    """
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: a recipe is a mapping of keys to values; got {type(content).__name__}")
    try:
        return TheoryRecipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error, TheoryRecipe)}") from None
