"""A network of transformers as one GGUF file, as llama.cpp reads it: weights, settings and tokenizer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comingle.export.gguf_tokens import Vocabulary, vocabulary
from comingle.models.generation import as_tuple
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import DataError, RunError

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt2": "gpt2",
}
"""llama.cpp's names of architectures, by transformers' model type."""
KINDS = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""Numbers of weights in a GGUF file, by what ``--dtype`` calls them."""

_ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "qwen3moe": "silu", "gpt2": "gelu_new"}
_BLOCK = 32
_MIXTURE = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")
_KEEP = ("ffn_gate_inp", "position_embd", "rope_freqs")
"""Small tensors that llama.cpp keeps in float32."""


def write_gguf(
    path: Path,
    name: str,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    *,
    turn_end: int | None = None,
) -> None:
    """Write the network with its weights as F32, BF16 or Q8_0, and read the file again to see that it is the same.

    Vectors, routers and positions stay F32; of Q8_0, so do rows that are no multiple of 32 numbers, as BF16.
    ``turn_end`` ends a response; what else ends a text is in the network's generation settings.

    Raises:
        DataError: llama.cpp has no such architecture, or computes something else with these settings.
        RunError: the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise RunError("--format gguf needs the package gguf: pip install 'comingle[demo]'")
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    architecture = _architecture(name, network.config)
    config: Any = network.generation_config
    ends = () if config is None or config.eos_token_id is None else as_tuple(config.eos_token_id)
    words = vocabulary(name, tokenizer, network.config.vocab_size, turn_end=turn_end, ends=ends)
    written = {}
    with closing(GGUFWriter(path, architecture)) as writer:
        _add_settings(writer, architecture, name, network, kind)
        _add_words(writer, words)
        for key, tensor in _tensors(architecture, name, network):
            array = np.ascontiguousarray(tensor.to(torch.float32).numpy())
            wanted = GGMLQuantizationType[_kind_of(key, array, kind)]
            written[key] = quantize(array, wanted)
            writer.add_tensor(key, written[key], raw_dtype=wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    _read_again(path, written)


def why_no_gguf(config: Any) -> str:
    """Why llama.cpp cannot compute what such a network does; empty where it can."""
    if config.model_type not in ARCHITECTURES:
        return f"no GGUF is written of {config.model_type} (only of {', '.join(ARCHITECTURES)})"
    architecture = ARCHITECTURES[config.model_type]
    if (act := getattr(config, "hidden_act", None) or config.activation_function) != _ACTIVATIONS[architecture]:
        return f"its MLPs have the activation {act!r}, and llama.cpp computes {_ACTIVATIONS[architecture]!r} there"
    if why := _why_no_attention(architecture, config):
        return f"its attention{why}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind != "default" and not (architecture == "llama" and kind in ("linear", "llama3")):
        return f"its rotary positions are of type {kind!r}, which is not written"
    return ""


def _why_no_attention(architecture: str, config: Any) -> str:
    """A GGUF file has no place for such settings, and llama.cpp looks for no bias behind these attentions."""
    if architecture == "gpt2" and not config.scale_attn_weights:
        return "'s scores are not divided by the root of a head's width (scale_attn_weights: false), as llama.cpp's are"
    if architecture == "gpt2" and config.scale_attn_by_inverse_layer_idx:
        return "'s scores are divided by a layer's number (scale_attn_by_inverse_layer_idx: true), llama.cpp's are not"
    if architecture in ("qwen3", "qwen3moe") and config.attention_bias:
        return f" has biases (attention_bias: true), and that of llama.cpp's {architecture} has none"
    return ""


def _architecture(name: str, config: Any) -> str:
    if why := why_no_gguf(config):
        raise DataError(f"user {name!r}: {why}; --format transformers has no such limit")
    return ARCHITECTURES[config.model_type]


def _kind_of(key: str, array: np.ndarray, kind: str) -> str:
    if array.ndim == 1 or any(part in key for part in _KEEP):
        return "F32"
    return "BF16" if kind == "Q8_0" and array.shape[-1] % _BLOCK else kind


def _add_settings(writer: Any, architecture: str, name: str, network: PreTrainedModel, kind: str) -> None:
    from gguf import LlamaFileType

    config = network.config
    writer.add_name(name)
    types = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(LlamaFileType[types[kind]])
    # Within the window it makes no difference, and llama.cpp knows of none in these architectures.
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_context_length(min(window, config.max_position_embeddings))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_words(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    if words.scores:
        writer.add_token_scores(words.scores)
        writer.add_add_space_prefix(words.adds_space)
    if words.model == "gpt2":
        # A tokenizer of bytes alone merges nothing, but a file without merges is refused: this pair makes no token.
        writer.add_token_merges(words.merges or (f"{words.tokens[0]} {words.tokens[0]}",))
    for key, number in words.numbers.items():
        getattr(writer, f"add_{key}_token_id")(number)
    writer.add_add_bos_token(words.adds_bos)
    writer.add_add_eos_token(words.adds_eos)
    if words.chat_template:
        writer.add_chat_template(words.chat_template)


def _tensors(architecture: str, name: str, network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by the name that it has in the file, in llama.cpp's order of rows."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    config, tied = network.config, network.config.tie_word_embeddings
    number = next(one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    for key, tensor in network.state_dict().items():
        if key == "lm_head.weight" and tied:
            continue
        if found := _MIXTURE.fullmatch(key):
            yield from _experts(int(found[1]), found[2], tensor)
            continue
        if (to := names.get_name(key, try_suffixes=(".weight", ".bias"))) is None:
            raise DataError(f"user {name!r}: no GGUF tensor for {key!r}; --format transformers has no such limit")
        yield to, _arranged(architecture, config, key, tensor)
    if (factors := _rope_factors(network)) is not None:
        yield "rope_freqs.weight", factors


def _experts(layer: int, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key == "experts.gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    else:
        yield f"blk.{layer}.ffn_{'down_exps' if 'down' in key else 'gate_inp'}.weight", tensor


def _arranged(architecture: str, config: Any, key: str, tensor: Tensor) -> Tensor:
    """GPT-2 keeps weights as (d_in, d_out); llama.cpp's Llama rotates neighbours, and transformers' halves."""
    if architecture == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.mT
    if architecture == "llama" and (found := re.search(r"\.([qk])_proj\.", key)):
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        halves = tensor.unflatten(0, (heads, 2, -1))
        return halves.transpose(1, 2).flatten(0, 2)
    return tensor


def _rope_factors(network: PreTrainedModel) -> Tensor | None:
    """By what rotary frequencies are divided, where they are not ``theta^(-2i/d)``."""
    config = network.config
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") == "default":
        return None
    frequencies = network.get_buffer(f"{network.base_model_prefix}.rotary_emb.inv_freq").double()
    steps = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    return (config.rope_parameters["rope_theta"] ** -steps / frequencies).float()


def _read_again(path: Path, written: dict[str, np.ndarray]) -> None:
    from gguf import GGUFReader

    read = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    same = read.keys() == written.keys() and all(
        np.array_equal(read[key].reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8))
        for key, array in written.items()
    )
    if not same:
        raise RunError(f"{path}: what was read again is not what was written; the disk has changed it")
