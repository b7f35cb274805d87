from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from comingle.models.base import Base
from comingle.models.loading import backbone, lm_head, load_base
from comingle.utils.errors import BaseModelError

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def saved_base(folder: Path, model_type: str, **settings: Any) -> Base:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(TINY | settings))).save_pretrained(folder)
    return load_base(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("cohere", {"logit_scale": 0.25}, (0.25, None)),
        ("granite", {"logits_scaling": 8.0}, (0.125, None)),
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 0.01}, (1.0, 0.01)),  # small, so that the cap bites
        ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 8}, (1.0, None)),
    ],
)
def test_scale_and_cap(
    tmp_path: Path, model_type: str, settings: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    base = saved_base(tmp_path, model_type, **settings)
    head = lm_head(base)
    assert (head.scale, head.softcap) == expected
    assert head.weight.shape == (40, 8 if model_type == "opt" else 16)
    tokens = torch.tensor([[3, 9, 4]])
    hidden = backbone(base.model)(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(head.logits(hidden), base.model(input_ids=tokens).logits)


def test_formula() -> None:
    head = lm_head(load_base("random:phi", dtype="float64", device="cpu"))
    assert head.bias is not None
    head = replace(head, scale=3.0, softcap=2.0)
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    raw = (hidden @ head.weight.T + head.bias) * 3.0
    torch.testing.assert_close(head.logits(hidden), 2.0 * torch.tanh(raw / 2.0))


def test_a_head_that_does_more_is_refused() -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")
    base.model.config.logit_scale = 2.0  # the model itself does not scale
    with pytest.raises(BaseModelError, match=r"'random:llama' \(model type 'llama'\): its logits .*hidden states"):
        lm_head(base)


def test_a_model_that_looks_ahead_is_refused() -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")

    def look_ahead(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    base.model.base_model.register_forward_hook(look_ahead)
    with pytest.raises(BaseModelError, match=r"'random:llama' .*not causal.* 4"):
        lm_head(base)


def test_nan_is_refused() -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")
    base.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(BaseModelError, match=r"'random:llama' .*logits .*finite"):
        lm_head(base)


def test_a_nonlinear_head_is_refused() -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")
    base.model.lm_head = torch.nn.Sequential(base.model.lm_head)
    with pytest.raises(BaseModelError, match=r"'llama': .*got Sequential"):
        lm_head(base)


def test_a_backbone_is_needed() -> None:
    base = load_base("random:llama", device="cpu")
    base.model.base_model_prefix = "absent"
    with pytest.raises(BaseModelError, match=r"'llama': .*backbone"):
        backbone(base.model)
