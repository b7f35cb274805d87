"""The native mixture against the PyTorch path in float64; what happens where it cannot be compiled."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mixtures import ACTS, Problem, by_part, check_mixture, problem
from torch import Tensor

from comingle.config.settings import AdaptersSection
from comingle.models.adapted import adapt
from comingle.models.injection import ExpertCounts
from comingle.models.kernels import expert_mlp
from comingle.models.loading import load_base


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not asked for native code yet."""
    monkeypatch.setattr(expert_mlp, "_loaded", None)
    yield
    expert_mlp.disable()


native_mixture = by_part(expert_mlp)


def check(given: Problem, dtype: torch.dtype, train: tuple[bool, bool, bool] = (True, True, True)) -> None:
    check_mixture(expert_mlp, given, dtype, train)


DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPE
@pytest.mark.parametrize("first", [1, 2], ids=["plain", "gated"])
@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act: str, first: int, dtype: torch.dtype, library: Path) -> None:
    check(problem(act, first=first), dtype)


@DTYPE
@pytest.mark.parametrize("rank", expert_mlp.RANKS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_rank_and_number_of_experts(count: int, rank: int, dtype: torch.dtype, library: Path) -> None:
    check(problem("silu", first=2, experts=count, rank=rank, hidden=80), dtype)


@DTYPE
@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize(
    ("n", "hidden"), [(1, 1), (1, 256), (31, 15), (32, 64), (33, 257), (65, 800), (1030, 40), (33, 2050)]
)
def test_sizes_that_fill_no_tile(n: int, hidden: int, users: int, dtype: torch.dtype, library: Path) -> None:
    check(problem(users=users, n=n, hidden=hidden), dtype)


@DTYPE
def test_experts_that_a_user_has_not(dtype: torch.dtype, library: Path) -> None:
    given = problem(experts=3)
    given.gates[1, :, 2] = 0
    check(given, dtype)
    absent = [g[1, 2] for g in given.to(dtype).solve(native_mixture)[3:]]
    assert not any(g.any() for g in absent)


@DTYPE
@pytest.mark.parametrize("train", [(True, True, False), (False, True, False), (True, False, True)])
def test_steps_that_train_a_part(train: tuple[bool, bool, bool], dtype: torch.dtype, library: Path) -> None:
    check(problem(), dtype, train)


@DTYPE
def test_without_gradients_the_output_is_the_same(dtype: torch.dtype, library: Path) -> None:
    given = problem().to(dtype)
    assert torch.equal(given.solve(native_mixture, (False,) * 3)[0], given.solve(native_mixture)[0])


@DTYPE
def test_large_and_broken_values(dtype: torch.dtype, library: Path) -> None:
    """Far from zero the activations are at their limits; a NaN arrives, or nobody would notice a divergence."""
    for act in ACTS:
        given = problem(act, n=2, hidden=4).to(dtype)
        given.weights[1].copy_(torch.tensor([-1e4, 1e4, -90.0, 90.0]))
        assert all(t.isfinite().all() for t in given.solve(native_mixture)), act
        given.weights[1][0] = torch.nan
        assert given.solve(native_mixture)[0].isnan().all(), act


@DTYPE
def test_a_user_is_alone_with_its_results(dtype: torch.dtype, library: Path) -> None:
    """Bit for bit, whoever else is in the cohort and however many threads there are."""
    given = problem(users=3, n=530, hidden=2100).to(dtype)
    gates, z = given.gates.contiguous(), given.dy[..., :16].contiguous()
    bases = [torch.nn.functional.linear(given.x, given.weights[0])]

    def results(part: slice, threads: int) -> list[Tensor]:
        cut: Callable[[Tensor], Tensor] = lambda t: t[part].contiguous()  # noqa: E731
        factors = [cut(given.factors[1])], cut(given.factors[2])
        args = (given.act, 0.7, [cut(bases[0])], [given.weights[1]], cut(z), cut(gates), *factors)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        mixed, last, gated = expert_mlp.forward(*args)
        d_bases, d_z, d_gates, d_b, d_a = expert_mlp.backward(*args, last, mixed, gated, True)
        torch.set_num_threads(before)
        assert d_a is not None
        return [mixed, last, gated, *d_bases, d_z, d_gates, *d_b, d_a]

    together = results(slice(None), 2)
    for user in range(3):
        alone = results(slice(user, user + 1), 1)
        assert all(torch.equal(mine[0], ours[user]) for mine, ours in zip(alone, together, strict=True))


@pytest.mark.parametrize("kind", ["float64", "rank 3", "activation", "off"])
def test_the_rest_goes_the_other_way(kind: str, library: Path) -> None:
    x, act, rank = torch.zeros(1, 1, 4), expert_mlp.silu, 8
    assert expert_mlp.supports(x, act, rank)
    if kind == "float64":
        assert not expert_mlp.supports(x.double(), act, rank)
    elif kind == "rank 3":
        assert not expert_mlp.supports(x, act, 3)
    elif kind == "activation":
        assert not expert_mlp.supports(x, lambda x: (x, x), rank)
    else:
        expert_mlp.disable()
        assert not expert_mlp.supports(x, act, rank)


def test_a_model_takes_it_and_computes_the_same(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base("random:llama?layers=2&dim=32&heads=4", dtype="float32", device="cpu")
    counts = ExpertCounts(generalists=1, specialists=(0, 2))
    model = adapt(base, AdaptersSection(rank=4), counts, routed=True, compiled=False)
    rows = torch.randn(model.mask().shape, generator=torch.Generator().manual_seed(0)) * 0.1 * model.mask()
    windows = torch.randint(0, 256, (2, 2, 7))
    found, calls = [], []
    call = expert_mlp.forward
    monkeypatch.setattr(expert_mlp, "forward", lambda *args: calls.append(1) or call(*args))
    for on in (True, False):
        expert_mlp.enable(library) if on else expert_mlp.disable()
        tensors = {name: t.clone().requires_grad_() for name, t in model.layout.views(rows).items()}
        losses, _ = model.losses(tensors, [0, 1], windows)
        found.append((losses.detach(), *torch.autograd.grad(losses.sum(), list(tensors.values()))))
    assert len(calls) == 2
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- where it cannot be compiled


def name_of_library() -> str:
    """Return the first part of the file name, which is the same for equal sources, compiler and processor."""
    compiler = expert_mlp._compiler()
    assert compiler is not None
    return f"mixture-{expert_mlp._fingerprint(compiler, expert_mlp.SOURCES)}"


@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_compiler_it_stays_off(
    compiler: str | None, tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_mlp, "_compiler", lambda: compiler)
    assert not expert_mlp.enable(tmp_path / "cache")
    assert not expert_mlp.supports(torch.zeros(1, 1, 4), expert_mlp.silu, 8)


def test_a_cache_that_cannot_be_written_to(compiled_once: Path, tmp_path: Path, unloaded: None) -> None:
    (tmp_path / "cache").write_text("a file")
    assert not expert_mlp.enable(tmp_path / "cache")


def test_a_damaged_library_is_made_again(
    compiled_once: Path, tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not even opened: a shortened one would kill the process."""
    (sound,) = compiled_once.glob(f"{name_of_library()}-*.so")
    damaged = tmp_path / sound.name
    damaged.write_bytes(sound.read_bytes()[:5000])
    made = []

    def compile_again(compiler: str, cache: Path, name: str, source: Path) -> int:
        made.append(name)
        damaged.write_bytes(sound.read_bytes())
        return os.open(damaged, os.O_RDONLY)

    monkeypatch.setattr(expert_mlp, "_compile", compile_again)
    assert expert_mlp.enable(tmp_path)
    monkeypatch.setattr(expert_mlp, "_loaded", None)
    assert expert_mlp.enable(tmp_path)  # now out of the cache
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86-64 level")
@pytest.mark.parametrize(
    "processor", [["-march=x86-64-v3"], ["-march=native", "-mno-amx-bf16"]], ids=["avx2", "no-amx"]
)
def test_processors_without_wide_registers_or_tiles(
    processor: list[str], tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same source for AVX2 and without AMX: other instructions for exponentials, roundings and thin products."""
    monkeypatch.setattr(expert_mlp, "FLAGS", [*expert_mlp.FLAGS, *processor])  # the last -march counts
    if not expert_mlp.enable(tmp_path):
        pytest.skip("no C++ compiler that makes the native code")
    for dtype in expert_mlp.DTYPES:
        for act in ACTS:
            check(problem(act, first=2, hidden=257), dtype)
        for rank in expert_mlp.RANKS:
            check(problem(rank=rank, experts=3), dtype)


@pytest.mark.parametrize(("compiled", "native_code", "used"), [(False, None, 0), (False, True, 2), (False, False, 0)])
@pytest.mark.slow
def test_adapt_switches_it(
    compiled: bool, native_code: bool | None, used: int, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    call = expert_mlp.forward
    monkeypatch.setattr(expert_mlp, "forward", lambda *args: calls.append(1) or call(*args))
    base = load_base("random:gpt2?layers=2&dim=32&heads=4", dtype="float32", device="cpu")
    counts = ExpertCounts(generalists=1, specialists=(1,))
    model = adapt(base, AdaptersSection(), counts, routed=True, compiled=compiled, native_code=native_code)
    rows = torch.zeros(model.mask().shape)
    model.losses(dict(model.layout.views(rows)), [0], torch.randint(0, 256, (1, 2, 7)))
    assert len(calls) == used


def test_compiling_leaves_one_file(compiled_once: Path) -> None:
    """Earlier versions of the source may have left others in the same cache."""
    assert [path.suffix for path in compiled_once.glob(f"{name_of_library()}*")] == [".so"]
