"""Random base models of every supported family, which need no download."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import BaseModelError, did_you_mean

EOS, BOS, PAD = 256, 257, 258  # ids below are the byte values themselves
NUM_TOKENS = 259
"""Size of the vocabulary of random bases: 256 bytes and three special tokens."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer of `NUM_TOKENS` tokens; decoding an encoded text always restores it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|bos|>", "<|pad|>"])  # in the order of their ids
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|eos|>",
        bos_token="<|bos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters = []
    next_spare = 256  # other bytes get the code points from 256, in order
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(next_spare))
            next_spare += 1
    return characters


RANDOM_BASE_PREFIX = "random:"
"""Prefix of the names of bases with random weights, for tests and cost estimates."""

# Divisor of every head's width: some families rotate a quarter of it, and rotations need pairs.
_HEAD_DIM_STEP = 8
MAX_LAYERS = 1000
"""Limit far above real models, because each layer takes time to create whatever its size."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a random base, and the overrides that its name may contain.

    ``kv_heads`` and ``mlp`` are 0 for the family's usual ratio; ``ctx`` is the largest number of positions.
    """

    layers: int = 2
    dim: int = 32
    heads: int = 4
    kv_heads: int = 0
    mlp: int = 0
    vocab: int = NUM_TOKENS
    ctx: int = 1024


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names and features of a family in transformers.

    Args:
        model_type: Name of the family.
        mlp_setting: Configuration key of the MLP's width.
        grouped: It supports grouped-query attention.
        gated: Its MLP has a gate.
        learned_positions: Its position embeddings are parameters.
    """

    model_type: str
    mlp_setting: str = "intermediate_size"
    grouped: bool = False
    gated: bool = False
    learned_positions: bool = False


def _llama_like(model_type: str) -> Family:
    """Return a family with Llama's features: grouped-query attention and a gated MLP."""
    return Family(model_type=model_type, grouped=True, gated=True)


FAMILIES = {
    "gpt2": Family(model_type="gpt2", mlp_setting="n_inner", learned_positions=True),
    "llama": _llama_like("llama"),
    "qwen2": _llama_like("qwen2"),
    "qwen3": _llama_like("qwen3"),
    "gemma2": _llama_like("gemma2"),
    "gemma3": _llama_like("gemma3_text"),
    "mistral": _llama_like("mistral"),
    "phi": Family(model_type="phi", grouped=True),
    "gpt_neox": Family(model_type="gpt_neox"),
    "opt": Family(model_type="opt", mlp_setting="ffn_dim", learned_positions=True),
}


def random_base(name: str, *, dtype: torch.dtype, attention: str | None, seed: int) -> PreTrainedModel:
    """Return an untrained causal language model with random weights, for tests and trials without a download.

    Args:
        name: ``random:FAMILY``, optionally with overrides (``?layers=4&dim=64``).
        dtype: Dtype that the float32 weights are rounded to.
        attention: Implementation of attention in transformers; None for its default.
        seed: Seed of the weights; the same name and seed give the same weights.

    Raises:
        BaseModelError: A family or override is unknown, sizes are inconsistent, or the family lacks the attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shape = parse_random(name)
    config = AutoConfig.for_model(family.model_type, **_config_settings(family, shape))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        except ValueError as error:
            raise BaseModelError(f"base model {name!r}, attention {attention!r}: {error}".splitlines()[0]) from error
        _perturb_vectors(model)  # biases of 0 and norms of 1 would hide errors from tests
    # Only parameters: buffers such as the rotary frequencies stay float32, as in loaded checkpoints.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _perturb_vectors(model: PreTrainedModel) -> None:
    """Move biases and norms away from 0 and 1, so that tests detect a missing bias or norm."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def parse_random(name: str) -> tuple[Family, Shape]:
    """Return the family and the sizes that a base's name gives, such as ``random:llama?layers=4&dim=64``.

    Args:
        name: ``random:FAMILY``, optionally with sizes that override the default ones.

    Raises:
        BaseModelError: A family or override is unknown, or sizes are inconsistent.
    """
    family_name, _, query = name.removeprefix(RANDOM_BASE_PREFIX).partition("?")
    if family_name not in FAMILIES:
        known, hint = ", ".join(FAMILIES), did_you_mean(family_name, FAMILIES)
        raise BaseModelError(f"base model {name!r}: unknown family {family_name!r}; allowed: {known}.{hint}")
    family = FAMILIES[family_name]
    overrides = {}
    for text in query.split("&"):  # such as "layers=4"
        if text:
            key, value = _parse_override(name, family, text)
            overrides[key] = value
    shape = replace(Shape(), **overrides)
    _raise_unless_consistent(name, shape)
    return family, shape


def _parse_override(name: str, family: Family, text: str) -> tuple[str, int]:
    """Return key and value of an override such as ``layers=4``.

    Args:
        name: Name of the base, such as ``random:llama?layers=4``, for error messages.
        family: Family of the base.
        text: The override.

    Raises:
        BaseModelError: The key is unknown, or the value is not a positive integer.
    """
    key, _, value = text.partition("=")
    allowed = [field.name for field in fields(Shape)]
    if not family.grouped:
        allowed.remove("kv_heads")
    if key not in allowed:
        hint = did_you_mean(key, allowed)
        raise BaseModelError(f"base model {name!r}: unknown override {key!r}; allowed: {', '.join(allowed)}.{hint}")
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise BaseModelError(f"base model {name!r}: {key}: got {value!r}; allowed: a whole number above 0.")
    return key, int(value)


def estimate_parameters(family: Family, shape: Shape) -> int:
    """Estimate the number of parameters of a random base: attention, MLPs, token embeddings and learned positions.

    Args:
        family: The family, such as Llama's.
        shape: The sizes of the base.
    """
    mlp_width = _config_settings(family, shape)[family.mlp_setting]
    num_mlp_linears = 3 if family.gated else 2  # gate, up and down, or up and down
    mlp = num_mlp_linears * mlp_width * shape.dim
    kv_heads = _num_kv_heads(shape) if family.grouped else shape.heads
    kv_width = kv_heads * shape.dim // shape.heads
    query_and_output = 2 * shape.dim * shape.dim
    key_and_value = 2 * kv_width * shape.dim
    num_positions = shape.ctx if family.learned_positions else 0
    embeddings = (shape.vocab + num_positions) * shape.dim
    return shape.layers * (query_and_output + key_and_value + mlp) + embeddings


def _raise_unless_consistent(name: str, shape: Shape) -> None:
    """Raise an error unless the sizes of a random base fit together, and its vocabulary holds the byte tokenizer's.

    Args:
        name: Name of the base, such as ``random:llama?layers=4``, for error messages.
        shape: The sizes.

    Raises:
        BaseModelError: A size does not fit.
    """
    # Some families apply rotary embeddings to a quarter of a head's width, in pairs: a multiple of 8.
    dim_step = _HEAD_DIM_STEP * shape.heads
    if shape.dim % dim_step != 0:
        raise BaseModelError(
            f"base model {name!r}: dim: got {shape.dim}; allowed: a multiple of {_HEAD_DIM_STEP} * heads = {dim_step}."
        )
    if shape.layers > MAX_LAYERS:
        raise BaseModelError(f"base model {name!r}: layers: got {shape.layers}; allowed: up to {MAX_LAYERS:,}.")
    if shape.heads % _num_kv_heads(shape) != 0:
        raise BaseModelError(
            f"base model {name!r}: kv_heads: got {shape.kv_heads}; allowed: a divisor of heads ({shape.heads})."
        )
    if shape.vocab < NUM_TOKENS:
        raise BaseModelError(
            f"base model {name!r}: vocab: got {shape.vocab}; allowed: from {NUM_TOKENS} (256 bytes, end, begin, pad)."
        )


def _num_kv_heads(shape: Shape) -> int:
    """Return the number of key-value heads of a random base with grouped-query attention.

    By default it is half the number of query heads, so that two of these share one; all of them if it is odd.
    """
    if shape.kv_heads:
        return shape.kv_heads
    is_even = shape.heads % 2 == 0
    return shape.heads // 2 if is_even else shape.heads


def _config_settings(family: Family, shape: Shape) -> dict[str, Any]:
    """Return the settings of transformers' configuration for a random base.

    Args:
        family: Names and features of the family.
        shape: Sizes of the base; without ``mlp`` the MLP has the usual width of the family.
    """
    head_dim = shape.dim // shape.heads
    mlp_width = shape.mlp
    if mlp_width == 0:
        # With a gate usually 8/3 dim, rounded up to a multiple of 8. Without a gate 4 dim.
        mlp_width = math.ceil(shape.dim / 3) * 8 if family.gated else 4 * shape.dim
    settings: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.ctx,
        family.mlp_setting: mlp_width,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
    }
    if family.grouped:
        settings["num_key_value_heads"] = _num_kv_heads(shape)
        settings["head_dim"] = head_dim
    if family.model_type.startswith("gemma"):
        settings["query_pre_attn_scalar"] = head_dim
    if family.model_type == "opt":
        settings["word_embed_proj_dim"] = shape.dim
    return settings
