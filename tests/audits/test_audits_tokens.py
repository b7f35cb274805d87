"""Tokens out of an upload: all of a small batch after a step of SGD, none worth mentioning behind noise."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from tests.audits.test_audits_shadows import TEXTS, recipe_of

from comingle.audits.uploads import first_inputs, nearest_tokens, recover, token_factors
from comingle.config import Recipe
from comingle.reports.audit import Recovery
from comingle.runs.given import given_of
from comingle.runs.session import build, prepare
from comingle.training.kinds.base import RunData

SGD = {"name": "sgd", "learning_rate": 1.0, "schedule": "constant", "weight_decay": 0}


def made(steps: int = 4, **changes: Any) -> tuple[Recipe, RunData]:
    experts = changes.pop("experts", SGD)
    recipe = recipe_of(steps, **changes).with_changes({"training.experts": experts, "adapters.rank": 4})
    return recipe, prepare(recipe, given=given_of(TEXTS, None))


def recovered(**changes: Any) -> list[Recovery]:
    return recover(*made(**changes), lambda clients: [])


def test_a_step_of_sgd_gives_all_tokens_of_a_window_away() -> None:
    short, whole = recovered()
    assert short.recovered == [1.0] * 3
    assert fmean(short.guesses) < 0.9
    assert max(whole.tokens) > max(short.tokens)


@pytest.mark.slow
def test_noise_hides_them() -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"mechanism": "local", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
    for found in recovered(privacy=privacy):
        assert fmean(found.recovered) < 0.4


def test_nothing_is_read_where_the_factors_stay_or_are_frozen() -> None:
    assert recovered(method="ffa-lora") == []
    assert len(recovered(method="fedsa-lora")) == 2


@pytest.mark.parametrize("tokens", [3, 8, 20])
def test_tokens_in_the_span_come_first(tokens: int) -> None:
    """Mixtures of so many inputs in 12 rows: all are found while they are no more than the rows."""
    draw = torch.Generator().manual_seed(tokens)
    inputs = torch.randn(300, 1, 32, generator=draw, dtype=torch.float64)
    truth = torch.randperm(300, generator=draw)[:tokens]
    rows = torch.randn(12, tokens, generator=draw, dtype=torch.float64) @ inputs[truth, 0]
    found = len(set(nearest_tokens(rows, inputs)[:tokens]) & set(truth.tolist())) / tokens
    assert found == 1 if tokens <= 12 else 0.2 < found < 1
    assert nearest_tokens(torch.zeros(12, 32, dtype=torch.float64), inputs) == list(range(300))


def test_where_positions_are_added_every_position_is_tried() -> None:
    recipe, run_data = made(base="random:gpt2")
    clients = build(recipe, run_data).clients
    inputs = first_inputs(clients, 8, token_factors(clients)[0])
    assert inputs.shape[1] == 8
    assert not torch.allclose(inputs[:, 0], inputs[:, 1])
    short, _ = recover(recipe, run_data, lambda clients: [])
    assert fmean(short.recovered) > fmean(short.guesses)  # 4 rows, of one projection, for 5 to 8 inputs


def test_what_a_layer_reads_is_computed_from_the_base_alone() -> None:
    recipe, run_data = made()
    clients = build(recipe, run_data).clients
    names = token_factors(clients)
    assert names == [f"layers.0.self_attn.{part}_proj.a" for part in "qkv"]
    inputs = first_inputs(clients, 8, names[0])
    base = vars(clients.model)["base"].model.model
    with torch.no_grad():
        expected = base.layers[0].input_layernorm(base.embed_tokens(torch.arange(inputs.shape[0])))
    torch.testing.assert_close(inputs[:, 0], expected.double(), atol=1e-6, rtol=0)
    assert inputs.shape[1] == 1  # the same at every position
