"""The mixture's hidden part in Triton against the PyTorch path in float64: on a GPU compiled, without one interpreted.

Triton reads TRITON_INTERPRET when kernels are made, and what is compiled for a GPU must not be interpreted; so without
a GPU this file asks for the interpreter when it is imported, and is skipped where there is no Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import method, text_recipe
from mixtures import ACTS, Problem, by_part, check_mixture, problem
from on_device import apart, play, recipe_of

from comingle.models.kernels import expert_mlp
from comingle.utils.errors import RecipeError

HERE = "cuda" if torch.cuda.is_available() else "cpu"
if find_spec("triton") is None:
    pytest.skip("NO TRITON HERE: pip install triton, or the GPU's kernels go untested", allow_module_level=True)
if HERE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from comingle.models import gpu  # noqa: E402

# The interpreter computes with NumPy, which tells of each exponential that overflows on its way to 1 / inf = 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if HERE == "cuda" else []),
]
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def on_here(request: pytest.FixtureRequest) -> Any:
    yield
    expert_mlp.disable()


def part() -> gpu.TritonBackend:
    return gpu.triton_backend(torch.device(HERE))


def check(given: Problem, dtype: torch.dtype, train: tuple[bool, bool, bool] = (True, True, True)) -> None:
    check_mixture(part(), given.at(HERE), dtype, train)


@DTYPE
@pytest.mark.parametrize("first", [1, 2], ids=["plain", "gated"])
@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act: str, first: int, dtype: torch.dtype) -> None:
    check(problem(act, first=first, hidden=72, n=33), dtype)


@DTYPE
@pytest.mark.parametrize(("count", "rank"), [(1, 4), (2, 16), (3, 8), (2, 3)])
def test_every_rank_and_number_of_experts(count: int, rank: int, dtype: torch.dtype) -> None:
    check(problem("silu", first=2, experts=count, rank=rank, hidden=40, n=9), dtype)


@DTYPE
@pytest.mark.parametrize(("users", "n", "hidden"), [(1, 1, 1), (3, 31, 65), (2, 65, 128)])
def test_sizes_that_fill_no_tile(users: int, n: int, hidden: int, dtype: torch.dtype) -> None:
    check(problem(users=users, n=n, hidden=hidden), dtype)


def test_sums_over_several_ranges_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SPAN_TOKENS", gpu.TILE_TOKENS)
    check(problem(n=3 * gpu.TILE_TOKENS + 5, hidden=20), torch.float32)


@pytest.mark.parametrize("train", [(True, True, False), (False, True, False), (True, False, True)])
def test_steps_that_train_a_part(train: tuple[bool, bool, bool]) -> None:
    check(problem(n=9, hidden=20), torch.float32, train)


@pytest.mark.parametrize("act", ACTS)
def test_large_and_broken_values(act: str) -> None:
    """Far from zero the activations are at their limits; a NaN arrives, or nobody would notice a divergence."""
    given = problem(act, n=2, hidden=4).to(torch.float32).at(HERE)
    given.weights[1].copy_(torch.tensor([-1e4, 1e4, -90.0, 90.0]))
    assert all(t.isfinite().all() for t in given.solve(by_part(part())))
    given.weights[1][0] = torch.nan
    assert given.solve(by_part(part()))[0].isnan().all()


def test_a_user_is_alone_with_its_results() -> None:
    """Bit for bit, whoever else is in the cohort."""
    given = problem(users=3, n=9, hidden=70).to(torch.float32).at(HERE)
    together = given.solve(by_part(part()))
    alone = given.users(slice(1, 2)).solve(by_part(part()))
    close = torch.equal if HERE == "cpu" else torch.allclose  # base products around it are cuBLAS's
    assert all(close(mine[0], ours[1]) for mine, ours in zip(alone, together, strict=True))


def test_the_rest_goes_the_other_way() -> None:
    x, act = torch.zeros(1, 1, 4, device=HERE), ACTS["silu"]
    assert part().supports(x, act, 8)
    assert not part().supports(x.double(), act, 8)
    assert not part().supports(x, act, 33)
    assert not part().supports(x, lambda x: (x, x), 8)
    assert not part().supports(x[:0], act, 8)


def test_what_is_on_a_cpu_is_not_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use holds for the whole process, where the next base may be on the CPU."""
    compiled = part()
    monkeypatch.setattr(compiled.programs, "INTERPRETED", False)
    assert not compiled.supports(torch.zeros(1, 1, 4), ACTS["silu"], 8)


def test_a_run_with_it_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    call = gpu.TritonBackend.backward
    monkeypatch.setattr(gpu.TritonBackend, "backward", lambda *args: calls.append(1) or call(*args))
    content = text_recipe(tmp_path, method("comigs-1g1s"))
    short = {"training.rounds": 1, "evaluation.first": False, "adapters.rank": 4}
    plain = play(recipe_of(content, HERE, **short))
    assert not calls
    there = play(recipe_of(content, HERE, **short, **{"runtime.gpu": ["triton"]}))
    assert calls
    assert apart(plain, there) <= (1e-4 if HERE == "cpu" else 1e-2)


@pytest.mark.slow
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """An interpreter takes more than the compiler does; this needs neither a GPU nor a driver."""
    code = (Path(__file__).parent / "compiling.py").read_text(encoding="utf-8")
    given = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(tmp_path), "COMINGLE_NO_TYPECHECK": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["forward", "backward", "backward_factors"]


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from comingle.models.kernels import triton_kernels as programs

    monkeypatch.setattr(programs, "INTERPRETED", False)
    with pytest.raises(RecipeError, match=r"^runtime\.gpu: got 'triton' on device 'cpu'; allowed: a CUDA GPU$"):
        gpu.triton_backend(torch.device("cpu"))
