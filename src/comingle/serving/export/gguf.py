"""Export of a user's model as one GGUF file."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comingle.models.generation import as_tuple
from comingle.models.pretrained import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import DataError, RunError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
"""llama.cpp's names of pre-tokenizers by their regular expressions."""
_SPACE = "▁"


class TokenType(IntEnum):
    """Token types, numbered as in GGUF."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The vocabulary and tokenizer settings of a GGUF file."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int]
    """IDs of the special tokens bos, eos, eot, eom, unk and pad, as far as they exist."""
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    chat_template: str | list[dict[str, str]] | None


def vocabulary(
    name: str, tokenizer: PreTrainedTokenizerBase, size: int, *, turn_end: int | None = None, ends: Sequence[int] = ()
) -> Vocabulary:
    """Return a tokenizer's vocabulary and settings in GGUF's form, padded with unused tokens to ``size``.

    GGUF knows two kinds of BPE tokenizers: "llama" (SentencePiece, with a score for each token) and "gpt2" (byte-level,
    with a list of merges).

    Args:
        name: The user, for messages.
        tokenizer: A fast tokenizer.
        size: Rows of the model's embedding.
        turn_end: The token that ends a response.
        ends: All tokens that end a text. A GGUF file has fields for three: the tokenizer's own ("eos"), ``turn_end``
            ("eot"), and one more ("eom"), for which the first other token of ``ends`` is taken.

    Raises:
        DataError: The tokenizer is of another kind, or llama.cpp has no name for its pre-tokenizer.
    """
    settings = _tokenizer_json(name, tokenizer)
    model, merges = settings["model"], _merges(settings["model"])
    is_sentencepiece = bool(model.get("byte_fallback"))
    added = {token["id"]: token for token in settings["added_tokens"]}
    token_by_id = {token_id: token for token, token_id in model["vocab"].items()}
    token_by_id |= {token_id: token["content"] for token_id, token in added.items()}
    tokens = tuple(token_by_id.get(token_id, f"[UNUSED{token_id}]") for token_id in range(size))
    types = [
        _token_type(token_id, token, token_by_id, added, model, is_sentencepiece)
        for token_id, token in enumerate(tokens)
    ]
    special_ids = {key: getattr(tokenizer, f"{key}_token_id", None) for key in ("bos", "eos", "unk", "pad")}
    special_ids["eot"] = turn_end
    special_ids["eom"] = next((end for end in ends if end not in (special_ids["eos"], turn_end)), None)
    # Encode any text with and without special tokens, to see whether the tokenizer adds bos, eos and a space to texts.
    with_added, without_added = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": key, "template": text} for key, text in template.items()]
    return Vocabulary(
        model="llama" if is_sentencepiece else "gpt2",
        pre="default" if is_sentencepiece else _pre_tokenizer(name, settings),
        tokens=tokens,
        token_types=tuple(types),
        scores=_scores(tokens, merges) if is_sentencepiece else (),
        merges=() if is_sentencepiece else tuple(" ".join(pair) for pair in merges),
        special_ids={key: token_id for key, token_id in special_ids.items() if token_id is not None},
        adds_bos=with_added[0] == special_ids["bos"],
        adds_eos=with_added[-1] == special_ids["eos"],
        adds_space=tokens[without_added[0]].startswith(_SPACE),
        chat_template=template,
    )


def _tokenizer_json(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the content of a tokenizer's ``tokenizer.json``.

    Args:
        name: The user, for the error.
        tokenizer: The tokenizer.

    Raises:
        DataError: The tokenizer is not a BPE tokenizer, or it is written in Python (not "fast") and has no such file.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if settings["model"].get("type") != "BPE":
        raise _unsupported(name, f"a tokenizer of type {settings['model'].get('type')}; allowed: BPE")
    return settings


def _pre_tokenizer(name: str, settings: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for a byte-level pre-tokenizer, which splits texts before merges are applied.

    GGUF files cannot describe a pre-tokenizer. They name one of those that llama.cpp implements.

    Args:
        name: The user, for messages.
        settings: Content of ``tokenizer.json``.

    Raises:
        DataError: llama.cpp does not implement the pre-tokenizer.
    """
    # A pre-tokenizer that llama.cpp implements is recognised by the types and settings of its parts.
    outer = settings["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    kinds = [part.get("type") for part in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1]["add_prefix_space"]:
        if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
            return "smollm"
        pattern = parts[0].get("pattern", {}).get("Regex")
        if kinds == ["Split", "ByteLevel"] and pattern in _SPLITS and not parts[1]["use_regex"]:
            known_name = _SPLITS[pattern]
            # `ignore_merges`: a word that is in the vocabulary becomes one token, without merges. llama.cpp does this
            # only under the name "llama-bpe".
            if bool(settings["model"].get("ignore_merges")) == (known_name == "llama-bpe"):
                return known_name
    raise _unsupported(name, "a tokenizer with a pre-tokenizer unknown to GGUF")


def _token_type(
    token_id: int,
    token: str,
    token_by_id: Mapping[int, str],
    added: Mapping[int, Mapping[str, object]],
    model: Mapping[str, object],
    is_sentencepiece: bool,
) -> int:
    """Return llama.cpp's type of a token.

    Args:
        token_id: ID of the token.
        token: Its text.
        token_by_id: Tokens by ID; IDs between them are unused.
        added: Settings of tokens that were added to the trained vocabulary, by ID. Special ones (as end of text)
            control the model; others are plain text that is never split.
        model: Section ``model`` of the tokenizer's JSON.
        is_sentencepiece: Whether it is a SentencePiece tokenizer, with tokens such as ``<0x0A>`` for bytes.
    """
    if token_id not in token_by_id:
        return TokenType.UNUSED
    if is_sentencepiece and token == model.get("unk_token"):
        return TokenType.UNKNOWN
    if token_id in added:
        return TokenType.CONTROL if added[token_id]["special"] else TokenType.USER_DEFINED
    is_byte = is_sentencepiece and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a BPE model's merges as pairs; ``tokenizer.json`` has them as pairs or as texts "FIRST SECOND"."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _scores(tokens: tuple[str, ...], merges: list[tuple[str, str]]) -> tuple[float, ...]:
    """Return each token's score, the negative rank of the first merge that makes it; the lowest for other tokens.

    For SentencePiece tokenizers GGUF stores scores in place of merges: pairs that make a token with a higher score are
    merged first.
    """
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    return tuple(-float(ranks.get(token, len(merges))) for token in tokens)


def _unsupported(name: str, why: str) -> DataError:
    return DataError(f"user {name!r}: GGUF does not support the base: got {why}; use --format transformers")


ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt2": "gpt2",
}
"""llama.cpp's names of architectures by transformers' model type."""
GGUF_WEIGHT_TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""GGUF's weight types by ``--dtype``."""

_ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "qwen3moe": "silu", "gpt2": "gelu_new"}
_BLOCK = 32
_MIXTURE = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")
_FLOAT32_NAMES = ("ffn_gate_inp", "position_embd", "rope_freqs")
"""Parts of the GGUF names of small tensors that llama.cpp keeps in float32."""


def write_gguf(
    path: Path,
    name: str,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weight_type: str,
    *,
    turn_end: int | None = None,
) -> None:
    """Write a network to a GGUF file, and read it back to verify it.

    Vectors, routers and positions are F32. With Q8_0, rows whose length is not a multiple of 32 are BF16.

    Args:
        path: The file.
        name: The user, for messages and as the model's name.
        network: The network; its generation settings list the tokens that end a text.
        tokenizer: Its tokenizer.
        weight_type: F32, BF16 or Q8_0.
        turn_end: The token that ends a response.

    Raises:
        DataError: llama.cpp has no such architecture, or computes something else with these settings.
        RunError: The package gguf is missing, or the file read back differs.
    """
    if importlib.util.find_spec("gguf") is None:
        raise RunError("--format gguf needs the package gguf: pip install 'comingle[demo]'")
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    architecture = _architecture(name, network.config)
    config: Any = network.generation_config
    ends = () if config is None or config.eos_token_id is None else as_tuple(config.eos_token_id)
    vocab = vocabulary(name, tokenizer, network.config.vocab_size, turn_end=turn_end, ends=ends)
    written = {}
    with closing(GGUFWriter(path, architecture)) as writer:
        _add_settings(writer, architecture, name, network, weight_type)
        _add_vocabulary(writer, vocab)
        for key, tensor in _tensors(architecture, name, network):
            array = np.ascontiguousarray(tensor.to(torch.float32).numpy())
            tensor_type = GGMLQuantizationType[_tensor_type(key, array, weight_type)]
            written[key] = quantize(array, tensor_type)
            writer.add_tensor(key, written[key], raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    _verify(path, written)


def why_no_gguf(config: PreTrainedConfig) -> str:
    """Return the reason why llama.cpp cannot compute a network with this configuration; empty if it can."""
    if config.model_type not in ARCHITECTURES:
        return f"GGUF export: got a base of type {config.model_type}; allowed: {', '.join(ARCHITECTURES)}"
    architecture = ARCHITECTURES[config.model_type]
    if (act := getattr(config, "hidden_act", None) or config.activation_function) != _ACTIVATIONS[architecture]:
        return f"its MLPs have the activation {act!r}; llama.cpp supports only {_ACTIVATIONS[architecture]!r}"
    if why := _attention_problem(architecture, config):
        return f"its attention{why}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind != "default" and not (architecture == "llama" and kind in ("linear", "llama3")):
        return f"its rotary embeddings have type {kind!r}, which GGUF export does not support"
    return ""


def _attention_problem(architecture: str, config: PreTrainedConfig) -> str:
    """Return the end of a sentence "its attention ..." that says why llama.cpp cannot compute it; empty if it can.

    GGUF has no setting for these variants of attention.

    Args:
        architecture: llama.cpp's name of the architecture.
        config: Configuration of the network.
    """
    if architecture == "gpt2" and not config.scale_attn_weights:
        return " does not scale scores by the head width (scale_attn_weights: false), which llama.cpp always does"
    if architecture == "gpt2" and config.scale_attn_by_inverse_layer_idx:
        return " divides scores by the layer index (scale_attn_by_inverse_layer_idx: true), which llama.cpp does not"
    if architecture in ("qwen3", "qwen3moe") and config.attention_bias:
        return f" has biases (attention_bias: true), which llama.cpp does not support for {architecture}"
    return ""


def _architecture(name: str, config: PreTrainedConfig) -> str:
    if why := why_no_gguf(config):
        raise DataError(f"user {name!r}: {why}; --format transformers has no such limit")
    return ARCHITECTURES[config.model_type]


def _tensor_type(key: str, array: np.ndarray, weight_type: str) -> str:
    """Return the number format of a tensor in a file with the format ``weight_type``.

    Vectors, routers, positions and rotary factors are F32, as llama.cpp expects. Q8_0 stores blocks of 32 numbers, so a
    tensor whose rows are not a multiple of 32 long is BF16.

    Args:
        key: GGUF name of the tensor.
        array: The tensor.
        weight_type: F32, BF16 or Q8_0.
    """
    if array.ndim == 1 or any(part in key for part in _FLOAT32_NAMES):
        return "F32"
    return "BF16" if weight_type == "Q8_0" and array.shape[-1] % _BLOCK else weight_type


def _add_settings(writer: Any, architecture: str, name: str, network: PreTrainedModel, weight_type: str) -> None:
    """Write the hyperparameters of the network.

    Args:
        writer: A ``gguf.GGUFWriter``.
        architecture: llama.cpp's name of the architecture.
        name: Name of the model.
        network: The network.
        weight_type: Number format of the weights.
    """
    from gguf import LlamaFileType

    config = network.config
    writer.add_name(name)
    types = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(LlamaFileType[types[weight_type]])
    # llama.cpp has no sliding window in these architectures; a context no longer than the window needs none.
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
    # The key of this number differs between Mixtral and Qwen3; networks without experts have neither.
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_vocabulary(writer: Any, vocab: Vocabulary) -> None:
    """Write tokens, merges, special tokens and the chat template with a ``gguf.GGUFWriter``."""
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.token_types)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
        writer.add_add_space_prefix(vocab.adds_space)
    if vocab.model == "gpt2":
        # llama.cpp refuses a file without merges. A tokenizer of bytes only has none, so a merge is written that has no
        # effect: its result is not a token.
        writer.add_token_merges(vocab.merges or (f"{vocab.tokens[0]} {vocab.tokens[0]}",))
    for key, number in vocab.special_ids.items():
        getattr(writer, f"add_{key}_token_id")(number)
    writer.add_add_bos_token(vocab.adds_bos)
    writer.add_add_eos_token(vocab.adds_eos)
    if vocab.chat_template:
        writer.add_chat_template(vocab.chat_template)


def _tensors(architecture: str, name: str, network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a network with its GGUF name, with rows in llama.cpp's order.

    Args:
        architecture: llama.cpp's name of the architecture.
        name: The user, for messages.
        network: The network.

    Raises:
        DataError: GGUF has no name for a tensor.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    config = network.config
    architecture_id = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    names = get_tensor_name_map(architecture_id, config.num_hidden_layers)
    for key, tensor in network.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:  # llama.cpp uses the embedding
            continue
        if match := _MIXTURE.fullmatch(key):
            yield from _expert_tensors(int(match[1]), match[2], tensor)
            continue
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise DataError(f"user {name!r}: no GGUF tensor for {key!r}; --format transformers has no such limit")
        yield gguf_name, _reordered(architecture, config, key, tensor)
    if (factors := _rope_factors(network)) is not None:
        yield "rope_freqs.weight", factors


def _expert_tensors(layer: int, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer's experts or router with their GGUF names; gate and up projections are separate.

    Args:
        layer: Index of the layer.
        key: Name of the tensor in transformers, after the name of the MLP.
        tensor: The tensor, stacked over experts.
    """
    if key == "experts.gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    elif key == "experts.down_proj":
        yield f"blk.{layer}.ffn_down_exps.weight", tensor
    else:  # "gate.weight", as transformers calls the router
        yield f"blk.{layer}.ffn_gate_inp.weight", tensor


def _reordered(architecture: str, config: PreTrainedConfig, key: str, tensor: Tensor) -> Tensor:
    """Return a weight with its entries in llama.cpp's order.

    GPT-2's weights are ``(d_in, d_out)`` in transformers. Rotary embeddings of a Llama rotate entry i of a head with
    entry i + d / 2 in transformers, and adjacent entries in llama.cpp, so rows of queries and keys are reordered.

    Args:
        architecture: llama.cpp's name of the architecture.
        config: Configuration of the network.
        key: Name of the weight in transformers.
        tensor: The weight.
    """
    if architecture == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.mT
    if architecture == "llama" and (match := re.search(r"\.([qk])_proj\.", key)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        halves = tensor.unflatten(0, (heads, 2, -1))
        return halves.transpose(1, 2).flatten(0, 2)
    return tensor


def _rope_factors(network: PreTrainedModel) -> Tensor | None:
    """Return the divisors that a network applies to the default rotary frequencies ``theta^(-2i/d)``.

    None if it has the default frequencies. llama.cpp reads these numbers for networks with scaled frequencies.
    """
    config = network.config
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") == "default":
        return None
    frequencies = network.get_buffer(f"{network.base_model_prefix}.rotary_emb.inv_freq").double()
    num_frequencies = len(frequencies)  # d/2, so i / num_frequencies is 2i/d
    exponents = torch.arange(num_frequencies, dtype=torch.float64) / num_frequencies
    default_frequencies = config.rope_parameters["rope_theta"] ** -exponents
    return (default_frequencies / frequencies).float()


def _verify(path: Path, written: dict[str, np.ndarray]) -> None:
    """Read the file back and compare every tensor, byte by byte.

    Raises:
        RunError: A tensor differs.
    """
    from gguf import GGUFReader

    read = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    same = read.keys() == written.keys() and all(
        np.array_equal(read[key].reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8))
        for key, array in written.items()
    )
    if not same:
        raise RunError(f"{path}: content read back differs from what was written; check the disk")
