from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from comingle.cost.skeleton import load_skeleton
from comingle.models import folders
from comingle.models.folders import read_folder
from comingle.models.loading import lm_head, load_base
from comingle.models.random_bases import FAMILIES
from comingle.utils.errors import BaseModelError


def refused(folder: Path, match: str) -> None:
    with pytest.raises(BaseModelError, match=match) as caught:
        load_base(str(folder), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_model_comes_back(saved: Path) -> None:
    base = load_base(str(saved), dtype="float32", device="cpu")
    original = load_base("random:llama", dtype="float32", device="cpu")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(base.model(input_ids=tokens).logits, original.model(input_ids=tokens).logits)
    assert base.name == str(saved)
    assert base.tokenizer is not None
    assert base.tokenizer.decode(base.tokenizer("any\n text").input_ids) == "any\n text"
    lm_head(base)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapped_model_is_that_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    load_base(f"random:{family}", dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    config = folders.drop_kernel_choice(AutoConfig.from_pretrained(tmp_path))
    mapped = folders._map_model(tmp_path, config, dtype=dtype, attention="eager")
    if family == "gpt_neox":  # its tensors have other names in files
        assert mapped is None
        return
    assert mapped is not None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    ours, others = tensors_of(mapped), tensors_of(theirs)
    assert ours.keys() == others.keys()
    assert all(torch.equal(t, others[name]) and t.dtype == others[name].dtype for name, t in ours.items())
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(mapped(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    assert mapped.config.to_dict() == theirs.config.to_dict()
    assert mapped.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert not mapped.training


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mapped files")
def test_weights_in_the_dtype_of_the_file_stay_in_it(saved: Path) -> None:
    base = load_base(str(saved), dtype="float32", device="cpu")
    address = base.model.get_input_embeddings().weight.data_ptr()
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = {tuple(int(bound, 16) for bound in m[0].split("-")): m[5] for m in mappings if len(m) > 5}
    assert [name for (low, high), name in bounds.items() if low <= address < high] == [str(saved / "model.safetensors")]


def cut_in_two(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, saved / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_weights(saved: Path) -> None:
    cut_in_two(saved)
    lm_head(load_base(str(saved), dtype="float32", device="cpu"))
    (saved / "b.safetensors").unlink()
    refused(saved, "b.safetensors .*model.safetensors.index.json")


def test_a_folder_without_a_tokenizer_has_none(saved: Path) -> None:
    for path in saved.glob("tokenizer*"):
        path.unlink()
    assert load_base(str(saved), device="cpu").tokenizer is None


def test_no_config(saved: Path) -> None:
    (saved / "config.json").unlink()
    refused(saved, "config.json .*generation_config.json, model.safetensors")
    empty = saved / "empty"
    empty.mkdir()
    refused(empty, "config.json .*nothing")


def test_damaged_config(saved: Path) -> None:
    (saved / "config.json").write_text('{"model_type": "lla')
    refused(saved, "config.json .*JSON.*line 1")
    (saved / "config.json").write_text("[1]")
    refused(saved, r"config.json .*got \[1\]")
    (saved / "config.json").write_text("{}")
    refused(saved, "config.json .*model_type")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "got BertForMaskedLM of type 'bert'"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "got T5ForConditionalGeneration"),
        ({"model_type": "bart", "architectures": None, "is_encoder_decoder": True}, "got an encoder-decoder of type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "got weights quantised with 'gptq'"),
        ({"model_type": "nonesuch"}, "transformers.*nonesuch"),
    ],
)
def test_models_of_another_kind(saved: Path, changes: dict[str, Any], match: str) -> None:
    edit_config(saved, **changes)
    refused(saved, match)


def test_code_in_a_folder_is_never_run(saved: Path) -> None:
    (saved / "modeling_own.py").write_text(f"open({str(saved / 'ran')!r}, 'w')")
    edit_config(saved, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "x.Y"})
    refused(saved, "transformers")
    assert not (saved / "ran").exists()


def test_pickles_are_refused(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    refused(saved, r"\(pytorch_model.bin\).*model.safetensors")


def test_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    refused(saved, "no weights.*model.safetensors or model.safetensors.index.json")


@pytest.mark.parametrize("length", [0, 5, 100, 4000, -1])
def test_truncated_weights(saved: Path, length: int) -> None:
    path = saved / "model.safetensors"
    content = path.read_bytes()[:length]
    path.write_bytes(content)
    refused(saved, rf"model.safetensors \({len(content)} bytes\)")


def test_missing_tensors_are_not_made_up(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    refused(saved, "1 tensors.*'model.layers.1.mlp.up_proj.weight'")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (32,)),
        ("model.layers.9.mlp.up_proj.weight", (32, 32)),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", (8, 32)),
        ("v_head.summary.weight", (1, 32)),
        ("model.layers.0.attn.bias", (32,)),
        ("model.layers.0.attn.masked_bias", (32,)),
    ],
)
def test_tensors_without_a_place_are_not_left_out(saved: Path, name: str, shape: tuple[int, ...]) -> None:
    path = saved / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(shape)}, path, metadata={"format": "pt"})
    refused(saved, f"1 tensors .*config.json .*{re.escape(name)}")


def test_a_config_with_fewer_layers_is_refused(saved: Path) -> None:
    edit_config(saved, num_hidden_layers=1)
    refused(saved, r"9 tensors .*config.json .*model\.layers\.1\.input_layernorm\.weight\W, \.\.\.")


def test_buffers_that_models_compute_are_no_loss(saved: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    path = saved / "model.safetensors"
    more = {"lm_head.weight": load_file(path)["model.embed_tokens.weight"].clone()}  # the same, tied
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    load_base(str(saved), dtype="float32", device="cpu")
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    path = tmp_path / "gpt2" / "model.safetensors"
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16).tril()}
    masks["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file({**load_file(path), **masks}, path, metadata={"format": "pt"})
    load_base(str(path.parent), dtype="float32", device="cpu")


def test_an_adapter_beside_the_weights_is_refused(saved: Path) -> None:
    (saved / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(saved, r"adapter_config\.json .*merge_and_unload")


def test_tensors_of_another_shape(saved: Path) -> None:
    edit_config(saved, intermediate_size=48)
    refused(saved, "transformers")


def test_damaged_tokenizer(saved: Path) -> None:
    (saved / "tokenizer.json").write_text('{"version"')
    refused(saved, "tokenizer")


def test_a_file_that_is_no_gguf_needs_its_folder(saved: Path) -> None:
    refused(saved / "model.safetensors", ".gguf")


def test_home_is_expanded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    monkeypatch.setenv("USERPROFILE", str(saved.parent))
    assert load_base("~/saved", device="cpu").name == "~/saved"
    shutil.rmtree(saved)
    with pytest.raises(BaseModelError, match="'~/saved'"):
        load_base("~/saved")


# ---------------------------------------------------------------- foreign settings, damaged numbers, too little memory


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("attention", [None, "eager"])
def test_a_foreign_config_chooses_no_kernel(saved: Path, key: str, attention: str | None) -> None:
    """A name such as owner/kernel would be fetched from the hub and run."""
    edit_config(saved, **{key: "owner/kernel"})
    model, _ = read_folder(saved, dtype=torch.float32, device=torch.device("cpu"), attention=attention)
    assert model.config._attn_implementation == attention or model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation in (None, "eager")
    bare = load_skeleton(str(saved), device="cpu", attention=attention or "auto")
    assert bare.model.config._attn_implementation in ("eager", "sdpa")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named(saved: Path, value: float, name: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(BaseModelError, match=f"weight {name} .*finite") as caught:
            load_base(str(saved), dtype=dtype, device="cpu")
        assert "\n" not in str(caught.value)


def test_logits_that_are_not_finite_are_named_as_such(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    base = load_base(str(saved), dtype="float32", device="cpu")
    with pytest.raises(BaseModelError, match=r"logits .*finite") as caught:
        lm_head(base)
    assert "nan" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_weights_larger_than_memory_are_refused_before_they_are_loaded(
    saved: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int
) -> None:
    """The dtype asked for counts, not the file's."""
    needed = size * sum(t.numel() for t in load_file(saved / "model.safetensors").values())
    monkeypatch.setattr(folders, "free_bytes", lambda device: needed)
    load_base(str(saved), dtype=dtype, device="cpu")
    monkeypatch.setattr(folders, "free_bytes", lambda device: needed - 1)
    monkeypatch.setattr(folders, "_load_model", lambda *_, **__: pytest.fail("loaded"))
    message = rf"0\.000 GB .*{dtype}.* 0\.000 GB .*cpu"
    with pytest.raises(BaseModelError, match=message) as caught:
        load_base(str(saved), dtype=dtype, device="cpu")
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_shards_count(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum(t.numel() for t in load_file(saved / "model.safetensors").values()) * 4
    cut_in_two(saved)
    monkeypatch.setattr(folders, "free_bytes", lambda device: whole - 1)
    refused(saved, "weights .*GB .*cpu")
