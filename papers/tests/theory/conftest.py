"""Random instances that the tests of theory share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from comingle_papers.theory.linear import LOSSES, LinearProblem, Point, draw_linear

MakeProblem = Callable[..., LinearProblem]
MakePoint = Callable[..., Point]


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="session")
def make_problem() -> MakeProblem:
    def make(seed: int, loss: str = "logistic", **changes: Any) -> LinearProblem:
        settings = {"samples": 12, "features": 3, "num_experts": 3, "decay": 0.3, "coupling": 0.7} | changes
        return draw_linear(np.random.default_rng(seed), loss=LOSSES[loss], **settings)

    return make


@pytest.fixture(scope="session")
def make_point() -> MakePoint:
    """Normal weights and shares from anywhere in the simplex, near its border too."""

    def make(seed: int, problem: LinearProblem, scale: float = 1.0) -> Point:
        rng = np.random.default_rng([seed, 1])
        shape = problem.inputs.shape[1], problem.num_experts
        return Point(
            experts=scale * rng.standard_normal(shape),
            router=scale * rng.standard_normal(shape),
            shares=rng.dirichlet(np.full(problem.num_experts, rng.choice([0.3, 1.0, 3.0])), size=len(problem.inputs)),
        )

    return make
