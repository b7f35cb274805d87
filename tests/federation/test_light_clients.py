"""Settings with which a client on a small device differs from a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.federation.direct import nodes_of
from tests.federation.tiny import tiny

from comingle.config import Recipe, parse_recipe
from comingle.config.settings import RuntimeSection
from comingle.federation.client import LIGHT_TOKENS, _own_recipe
from comingle.federation.public import public_part
from comingle.models.loading import load_base

CONTEXT = 8


def runtime_of_client(content: dict[str, Any], folder: Path, **own_runtime: Any) -> RuntimeSection:
    recipe = parse_recipe(content)
    _, nodes = nodes_of(recipe, folder)
    public = public_part(recipe, tuple(nodes), {}, load_base(recipe.base, dtype="float32", device="cpu"))
    node = next(iter(nodes.values()))
    recipe_of_client: Recipe = _own_recipe(node.own.model_copy(update={"runtime": own_runtime}), public)
    return recipe_of_client.runtime


def test_a_client_in_float32_computes_what_a_simulation_computes(tmp_path: Path) -> None:
    runtime = runtime_of_client(tiny(tmp_path, runtime__dtype="float32"), tmp_path)
    assert runtime.native_code == "auto"
    assert runtime.micro_batch is None


@pytest.mark.parametrize("own", [{}, {"micro_batch": 3}, {"native_code": False}])
def test_a_client_in_bfloat16_saves_memory_but_for_what_its_user_has_set(own: dict[str, Any], tmp_path: Path) -> None:
    content = tiny(tmp_path, runtime__dtype="bfloat16", training__context=CONTEXT)
    runtime = runtime_of_client(content, tmp_path, **own)
    assert runtime.native_code is own.get("native_code", True)
    assert runtime.micro_batch == own.get("micro_batch", LIGHT_TOKENS // CONTEXT)
    assert runtime.users_per_step == 1
