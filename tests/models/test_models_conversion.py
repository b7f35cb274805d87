from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comingle.models import conversion, folders
from comingle.models.base import Base, digests_of
from comingle.models.conversion import convert_gguf
from comingle.models.loading import lm_head, load_base
from comingle.models.random_bases import byte_tokenizer
from comingle.serving.export.gguf import write_gguf as export_gguf
from comingle.utils.errors import BaseModelError

gguf = pytest.importorskip("gguf", reason="the extra demo is not installed")


def pair_rotations(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of a query or key projection."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, base: Base, *, leave_out: str = "", linear: bool = False) -> None:
    """Write `base`, a Llama, with the byte tokenizer and two merges, as llama.cpp's converter does."""
    config = base.model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if linear:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)
    vocab = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*sorted(vocab, key=lambda token: vocab[token]), "ĠĠ", "12"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1] * 2)
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in base.model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name:
            array = pair_rotations(array, config.num_attention_heads)
        if "k_proj" in name:
            array = pair_rotations(array, config.num_key_value_heads)
        if name != leave_out and not (name == "lm_head.weight" and config.tie_word_embeddings):
            writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def original() -> Base:
    return load_base("random:llama?vocab=261", dtype="float32", device="cpu")


@pytest.fixture
def file(tmp_path: Path, original: Base) -> Path:
    write_gguf(tmp_path / "tiny.gguf", original)
    return tmp_path / "tiny.gguf"


def test_a_gguf_gives_the_same_model(file: Path, original: Base, capfd: pytest.CaptureFixture[str]) -> None:
    base = load_base(str(file), dtype="float32", device="cpu")
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(base.model(input_ids=tokens).logits, original.model(input_ids=tokens).logits)
    lm_head(base)
    assert not base.model.config.tie_word_embeddings
    assert base.name == str(file)
    assert base.tokenizer is not None
    text = "Hello, world!\n  def f(x): return x"
    assert base.tokenizer.decode(base.tokenizer(text).input_ids) == text
    assert base.tokenizer.eos_token_id == 256
    assert capfd.readouterr() == ("", "")


def test_a_copy_in_bfloat16_is_written_once_and_mapped(
    file: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = load_base(str(file), dtype="float32", device="cpu")
    first = load_base(str(file), dtype="bfloat16", device="cpu")
    (copy,) = folders.gguf_cache().glob("*-bfloat16")
    assert [path.name for path in copy.iterdir()] == ["model.safetensors"]
    monkeypatch.setattr(folders, "_write_converted", lambda *_: pytest.fail("written twice"))
    again = load_base(str(file), dtype="bfloat16", device="cpu")
    expected = {name: t.bfloat16() for name, t in exact.model.named_parameters()}
    for base in (first, again):
        assert all(torch.equal(t, expected[name]) for name, t in base.model.named_parameters())
    assert digests_of(first) == digests_of(exact)


def test_without_room_for_a_copy_weights_are_converted_in_memory(
    file: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(folders, "_write_converted", full)
    base = load_base(str(file), dtype="bfloat16", device="cpu")
    assert base.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert not list(folders.gguf_cache().glob("*-bfloat16*"))


def test_tied_embeddings_stay_tied(tmp_path: Path, original: Base) -> None:
    original.model.config.tie_word_embeddings = True
    original.model.tie_weights()
    write_gguf(tmp_path / "tied.gguf", original)
    base = load_base(str(tmp_path / "tied.gguf"), dtype="float32", device="cpu")
    assert base.model.config.tie_word_embeddings
    assert base.model.get_input_embeddings().weight is base.model.get_output_embeddings().weight
    lm_head(base)


def test_digits_are_kept_apart(file: Path) -> None:
    base = load_base(str(file), device="cpu")
    assert base.tokenizer is not None
    assert base.tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]  # GPT-2's own rule: "Ġ", "Ġ", "12"


def test_converted_once_and_found_by_content(
    file: Path, own_caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = convert_gguf(file)
    assert folder.parent == own_caches / "gguf"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    monkeypatch.setattr(conversion, "_convert_into", None)  # a second conversion would fail
    os.utime(file, (0, 0))
    moved = file.rename(tmp_path / "elsewhere.gguf").rename(file)
    assert convert_gguf(moved) == folder


def test_a_files_words_are_gone_through_once(file: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds of a large vocabulary, each time."""
    import gguf

    read = []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: str):
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    convert_gguf(file)
    assert read == [str(file)]
    assert gguf.GGUFReader is Reader


def test_an_interrupted_conversion_leaves_nothing(
    file: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert_gguf(file)
    assert list((own_caches / "gguf").iterdir()) == []
    assert convert_gguf(file).is_dir()


def refused(path: Path, match: str) -> None:
    with pytest.raises(BaseModelError, match=match) as caught:
        load_base(str(path), device="cpu")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_truncated(file: Path, own_caches: Path, fraction: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * fraction)])
    refused(file, "GGUF")
    assert list((own_caches / "gguf").iterdir()) == []


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    refused(path, r"b'PK\\x03\\x04'.*b'GGUF'")


def test_missing_tensors(tmp_path: Path, original: Base) -> None:
    write_gguf(tmp_path / "tiny.gguf", original, leave_out="model.norm.weight")
    refused(tmp_path / "tiny.gguf", "1 tensors.*'model.norm.weight'")


def test_the_package_gguf_is_needed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(file, r"pip install 'comingle\[demo\]'")


def test_a_cache_that_cannot_be_written(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "occupied"))
    refused(file, "occupied.*COMINGLE_CACHE")


def test_a_file_larger_than_memory_is_refused_before_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors become float32, and stand beside the model that they are copied into."""
    numbers = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors)
    monkeypatch.setattr(folders, "free_bytes", lambda device: 8 * numbers - 1)
    with pytest.raises(BaseModelError, match=r"0\.000 GB .*float32.*safetensors") as caught:
        convert_gguf(file)
    assert str(file) in str(caught.value)
    monkeypatch.setattr(folders, "free_bytes", lambda device: 8 * numbers)
    assert convert_gguf(file).is_dir()


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ({"attention_bias": True}, "attn_"),
        ({"mlp_bias": True}, "ffn_"),
        ({"rope_parameters": LLAMA3}, "rope_freqs.weight"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}, "rope_freqs.weight"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path: Path, original: Base, more: dict[str, Any], left: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**original.model.config.to_dict(), "rope_parameters": None, **more})
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter))
    export_gguf(tmp_path / "file.gguf", "tiny", network, original.tokenizer, "F32")
    with pytest.raises(BaseModelError, match=f"file.gguf: .*{left}.*safetensors"):
        convert_gguf(tmp_path / "file.gguf")


def test_scaling_that_settings_tell_of_is_refused(tmp_path: Path, original: Base) -> None:
    write_gguf(tmp_path / "file.gguf", original, linear=True)
    with pytest.raises(BaseModelError, match=r"file.gguf: .*linear RoPE scaling.*safetensors"):
        convert_gguf(tmp_path / "file.gguf")
