"""A GPU that is full, and what makes a model fit into a small one; on a real GPU alone, but for checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import method, text_recipe
from on_device import apart, play, recipe_of

from comingle.utils.errors import RecipeError

LARGE = {"base": "random:llama?layers=4&dim=256", "training.context": 512, "training.batch_size": 64}
ROOM = 2**27


@pytest.mark.gpu
def test_a_full_gpu_names_the_setting_to_lower(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    recipe = recipe_of(text_recipe(tmp_path, method("comigs-1g1s")), "cuda", **LARGE, **{"training.rounds": 1})
    recipe = recipe.with_changes({"data.max_train_tokens": None, "runtime.users_per_step": 4})
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / whole)
    try:
        with pytest.raises(RecipeError, match=r"runtime: .*cuda.* 4 users .* users_per_step=2, or auto"):
            play(recipe)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_checkpointing(tmp_path: Path, device: str, rounding: float) -> None:
    content = text_recipe(tmp_path, method("comigs-1g1s"))
    plain = play(recipe_of(content, device))
    twice = play(recipe_of(content, device, **{"runtime.gradient_checkpointing": True}))
    assert apart(plain, twice) <= rounding


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_packed_base(tmp_path: Path, device: str, bits: str) -> None:
    """Kernels of CPUs and GPUs may round a weight to either neighbour: less alike than products are."""
    content = text_recipe(tmp_path, method("comigs-1g1s"))
    here, there = (play(recipe_of(content, place, quantise=bits)) for place in ("cpu", device))
    assert there.rows.isfinite().all()
    assert there.losses == pytest.approx(here.losses, rel=0.01)
