"""Memory: the planned peak against resident memory of a process that really trains, and what is counted on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from plans import planned, recipe_of

from comingle.config import Recipe
from comingle.cost import memory as footprint
from comingle.cost.memory import Fakes, LiveBytes, peak_memory, rehearse, step_peak, storage_bytes
from comingle.cost.planning import federate_bare, method_cost, with_method
from comingle.cost.skeleton import load_skeleton
from comingle.models.hardware import free_bytes
from comingle.models.loading import load_base

DRIVER = Path(__file__).with_name("memory_driver.py")
WITHIN = 0.10


def measured(recipe: Recipe, folder: Path, *options: str) -> int:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    if options:
        environment = {k: v for k, v in environment.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, str(DRIVER), str(path), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


HIDDEN = {"mechanism": "example", "noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp"}
GPT2 = "random:gpt2?layers=3&dim=256&heads=4&vocab=8192"
DEEP = "random:llama?layers=6&dim=256&heads=4&vocab=2048"
CASES = {
    "small": recipe_of("random:gpt2?layers=1&dim=256&heads=4&vocab=4096", "comigs-1g1s"),
    "two experts": recipe_of(GPT2, "comigs-1g1s"),
    "bf16, micro-batches": recipe_of(
        GPT2, "fedavg", dtype="bfloat16", **{"training.batch_size": 16, "runtime.micro_batch": 8}
    ),
    "gated, many experts": recipe_of(
        "random:llama?layers=3&dim=256&heads=4&vocab=8192", {"name": "comigs-1gxs", "specialists": [1, 3]}
    ),
    "checkpointed": recipe_of(DEEP, "comigs-1g1s", **{"runtime.gradient_checkpointing": True}),
    "native code": recipe_of(DEEP, "comigs-1g1s", **{"runtime.native_code": True}),
    "native code, checkpointed": recipe_of(
        DEEP, "comigs-1g1s", **{"runtime.native_code": True, "runtime.gradient_checkpointing": True}
    ),
    "4 bits": recipe_of(DEEP, "fedavg", quantise="4bit"),
    "8 bits, checkpointed": recipe_of(DEEP, "fedavg", quantise="8bit", **{"runtime.gradient_checkpointing": True}),
    "single examples": recipe_of(GPT2, "comigs-1g1s", privacy=HIDDEN, **{"runtime.micro_batch": 4}),
    "single examples, all shared": recipe_of(GPT2, "fedavg", privacy=HIDDEN, **{"runtime.micro_batch": 4}),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_planned_peak_is_the_measured_one(case: str, tmp_path: Path) -> None:
    """Within 10%: what tensors hold is exact, what libraries hold meanwhile is not in the plan."""
    found = measured(CASES[case], tmp_path)
    assert peak_memory(planned(CASES[case])).pass_bytes == pytest.approx(found, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_small_pass_in_bf16_is_off_by_what_the_matrix_library_holds(tmp_path: Path) -> None:
    """Some 20 MB beside 160 were measured: more than 10%, so a plan this small is only good to 25 MB."""
    recipe = recipe_of(GPT2, "fedavg", dtype="bfloat16", **{"runtime.micro_batch": 4})
    assert peak_memory(planned(recipe)).pass_bytes == pytest.approx(measured(recipe, tmp_path), abs=25e6)


# Shapes that had no part in choosing the margin.
OTHERS = {
    "opt": recipe_of("random:opt?layers=2&dim=320&heads=4&vocab=6000", "fedavg", users=3, **{"training.batch_size": 4}),
    "gemma2": recipe_of("random:gemma2?layers=2&dim=256&heads=4&vocab=12000", "comigs-1g1s", dtype="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("case", OTHERS)
def test_a_pass_with_its_own_allocator_is_near_the_plan(case: str, tmp_path: Path) -> None:
    """Over several rounds: the gaps between kept blocks grow at first. They are an estimate, far from exact.

    In bfloat16 on a processor with instructions for it, oneDNN keeps about 200 MB of working memory more.
    """
    recipe = OTHERS[case].with_changes({"training.rounds": 5})
    found, plan = measured(recipe, tmp_path, "keep"), peak_memory(planned(recipe))
    above = 1.4 if recipe.runtime.dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported() else 1.25
    assert plan.pass_bytes * (1 - WITHIN) <= found <= above * (plan.pass_bytes + plan.allocator_bytes)


# ---------------------------------------------------------------- the whole process


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "planned_memory.py"
SHAPES = ("comigs", "large vocabulary, bf16", "wide", "mixture", "checkpointed", "on disk", "net")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator's share is that of glibc")
@pytest.mark.parametrize("case", SHAPES)
def test_the_whole_plan_is_what_a_run_takes(case: str) -> None:
    """Python and its libraries included: within 15% of the peak of a process that runs the recipe."""
    done = subprocess.run([sys.executable, str(BENCHMARK), case], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["planned_mb"] == pytest.approx(found["measured_mb"], rel=0.15)


@pytest.mark.slow
def test_a_plan_counts_the_process_too() -> None:
    """Measured in a process of its own that runs the smallest recipe, for nets as for text; not for a GPU."""
    task, text = (footprint.measured_process_bytes(kind, torch.device("cpu")) for kind in ("samples", "text"))
    assert 100e6 < task < text < 1.5e9
    assert footprint.measured_process_bytes("text", torch.device("cuda")) == 0
    recipe = recipe_of("random:llama", "fedavg")
    base = load_skeleton(recipe.base, dtype="float32", device="cpu")
    cost = method_cost(recipe, base, ("a", "b"), free=text)
    assert cost.machine.process_bytes == cost.own_device.process_bytes == text
    assert cost.machine.total_bytes > text
    assert not cost.fits


# ---------------------------------------------------------------- the parts


def test_native_code_is_counted_without_running() -> None:
    """It keeps fewer tensors for the backward pass; on tensors without data it must not run."""
    name = "random:llama?layers=2&dim=64&heads=4"
    torch_pass, native_pass = (
        peak_memory(planned(recipe_of(name, "comigs-1g1s", **{"runtime.native_code": on}))).pass_bytes
        for on in (False, True)
    )
    assert native_pass < 0.9 * torch_pass


def test_parts_that_are_there_all_the_time_are_those_of_the_real_federation(federate: Any) -> None:
    real = federate({"name": "comigs-1gxs", "specialists": [1, 3]}, users=("ann", "bob"), dtype="float32")
    server, real = real.server, real.clients
    recipe = recipe_of("random:llama", {"name": "comigs-1gxs", "specialists": [1, 3]}, **{"adapters.rank": 2})
    found = peak_memory(planned(recipe))
    assert found.weights_bytes == storage_bytes(real.model.network)
    kept = sum(t.nbytes for t in server.kept.values())
    assert kept == 4 * int(real.model.layout.mask(real.method.shared).sum())  # the model that it averages
    assert found.adapters_bytes == real.state.rows.nbytes + real.mask.nbytes + kept
    assert found.moments_bytes == real.state.first.nbytes + real.state.second.nbytes
    assert found.gradients_bytes <= real.state.rows.nbytes
    assert found.total_bytes == found.fixed_bytes + found.pass_bytes + found.allocator_bytes


@pytest.mark.slow
def test_users_who_are_alike_need_not_all_be_built() -> None:
    """A pass takes two of them; the state is still everybody's."""
    base, changes = "random:gpt2", {"training.batch_size": 2, "training.context": 16, "runtime.users_per_step": 2}
    few, many = (planned(recipe_of(base, "fedavg", users=n, **changes)) for n in (2, 6))
    assert len(few.federation.clients.trainers) == len(many.federation.clients.trainers) == 2
    server = sum(t.nbytes for t in few.federation.server.kept.values())
    assert peak_memory(many).adapters_bytes - server == 3 * (peak_memory(few).adapters_bytes - server)
    assert peak_memory(many).pass_bytes == peak_memory(few).pass_bytes
    assert peak_memory(many, one_user=True) == peak_memory(few, one_user=True)
    assert peak_memory(few, one_user=True).pass_bytes < peak_memory(few).pass_bytes


@pytest.mark.slow
def test_the_phase_that_trains_most_is_the_one_that_holds_most() -> None:
    stage = planned(recipe_of("random:llama", "comigs-1g1s"))
    experts, router = (step_peak(stage, (0, 1), phase).peak for phase in stage.federation.clients.phases)
    assert peak_memory(stage).pass_bytes == experts > router


@pytest.mark.slow
def test_gradients_of_single_examples_are_counted() -> None:
    """In float64 as they are clipped, one of all that is shared for each example of a pass, and no fewer."""
    small = {"training.batch_size": 4, "training.context": 16}
    stage = planned(recipe_of("random:llama", "fedavg", privacy=HIDDEN, **small))
    plain = planned(recipe_of("random:llama", "fedavg", **small))
    layout, shared = stage.steps.model.layout, stage.federation.clients.method.shared
    examples, columns = 2 * 4, int(layout.mask(shared).sum())
    assert peak_memory(stage).pass_bytes > peak_memory(plain).pass_bytes
    assert peak_memory(stage).pass_bytes > examples * columns * (4 + 8)
    fewer = planned(recipe_of("random:llama", "fedavg", privacy=HIDDEN, **small, **{"runtime.micro_batch": 1}))
    assert peak_memory(fewer).pass_bytes < peak_memory(stage).pass_bytes / 2


def test_without_training_a_pass_holds_less() -> None:
    alone, trained = (peak_memory(planned(recipe_of("random:gpt2", name))) for name in ("pretrained", "local"))
    assert alone.gradients_bytes == 0 < alone.activations_bytes < trained.activations_bytes / 2


def test_a_rehearsal_takes_no_memory_and_leaves_the_base_to_others() -> None:
    recipe = recipe_of("random:gpt2?layers=2&dim=4096&heads=32&vocab=50257", "local")
    base = load_skeleton(recipe.base, dtype="float32", device="cpu")
    assert storage_bytes(base.model) > 2e9
    for _ in range(2):  # the second federation finds the base as the first did
        stage = rehearse(federate_bare(with_method(recipe, "local"), base, ("a", "b")), num_trainers=2)
        assert peak_memory(stage).weights_bytes == storage_bytes(base.model)
    assert all(p.is_meta for p in base.model.parameters())


# ---------------------------------------------------------------- the counter itself


def test_live_bytes_follow_tensors_from_birth_to_death() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        a = torch.zeros(1000)  # 4,000 bytes
        view = a[:10].add_(1)
        b = a + before  # 8,000
        assert live.live == 8000
        del a
        assert live.live == 8000  # a view keeps its storage alive
        del view
        assert live.live == 4000
        before.mul_(2)
        del b
    assert (live.live, live.peak) == (0, 8000)


def test_what_a_backward_pass_needs_is_counted_until_it_is_used() -> None:
    x = Fakes().of(torch.empty(100, 100), torch.device("cpu")).requires_grad_()
    with LiveBytes() as live:
        y = (x * 2).exp()  # exp keeps its result, the product is gone
        assert live.live == 40_000
        z = y.sum()
        del y
        assert live.live == 40_004
        torch.autograd.grad(z, x)
    assert live.live == 4


def test_free_memory_is_that_of_this_machine() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 1e14


def test_a_skeleton_is_the_base_without_its_weights() -> None:
    for name in ("random:gemma3", "random:opt"):
        real, bare = (
            load_base(name, dtype="bfloat16", device="cpu"),
            load_skeleton(name, dtype="bfloat16", device="cpu"),
        )
        shapes = [{n: (p.shape, p.dtype) for n, p in base.model.named_parameters()} for base in (real, bare)]
        assert shapes[0] == shapes[1]
        assert storage_bytes(real.model) == storage_bytes(bare.model)
        assert not any(p.requires_grad for p in bare.model.parameters())
