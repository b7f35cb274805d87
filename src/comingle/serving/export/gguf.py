"""Export of a user's model or adapter as a GGUF file, and the Modelfile of Ollama."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from comingle.models.generation import as_tuple
from comingle.models.pretrained import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from comingle.utils.errors import DataError, RunError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {_LLAMA3_PATTERN: "llama-bpe", _LLAMA3_PATTERN.replace("{1,3}", ""): "qwen2"}
"""llama.cpp's names of pre-tokenizers by their regular expressions."""
_SPACE = "▁"
"""SentencePiece's character for a space."""


class TokenType(IntEnum):
    """Token types, numbered as in GGUF."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The vocabulary and tokenizer settings of a GGUF file."""

    model: str
    """Kind of tokenizer: "llama" (SentencePiece) or "gpt2" (byte-level BPE)."""
    pre: str
    """llama.cpp's name of the pre-tokenizer, such as "smollm"."""
    tokens: tuple[str, ...]
    """Text of each token, by ID."""
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
    """Return a tokenizer's vocabulary and settings in GGUF's form.

    Args:
        name: The user, for error messages.
        tokenizer: A fast BPE tokenizer.
        size: Rows of the model's embedding. The vocabulary is padded to this size with unused tokens.
        turn_end: The token that ends a response.
        ends: All tokens that end a text.

    Raises:
        DataError: The tokenizer is of another kind, or llama.cpp has no name for its pre-tokenizer.
    """
    settings = _tokenizer_json(name, tokenizer)
    model, merges = settings["model"], _merges(settings["model"])
    added_tokens = {token["id"]: token for token in settings["added_tokens"]}
    token_by_id: dict[int, str] = {token_id: token for token, token_id in model["vocab"].items()}
    for token_id, added_token in added_tokens.items():
        token_by_id[token_id] = added_token["content"]
    tokens = tuple(token_by_id.get(token_id, f"[UNUSED{token_id}]") for token_id in range(size))
    # GGUF has two kinds of BPE tokenizers: "llama" is SentencePiece, with scores; "gpt2" is byte-level, with merges.
    is_sentencepiece = bool(model.get("byte_fallback"))
    if is_sentencepiece:
        kind, pre_tokenizer = "llama", "default"
        scores, merges_as_text = _scores(tokens, merges), ()
    else:
        kind, pre_tokenizer = "gpt2", _pre_tokenizer(name, settings)
        scores, merges_as_text = (), tuple(" ".join(pair) for pair in merges)
    types = [
        _token_type(token_id, token, token_by_id, added_tokens, model, is_sentencepiece)
        for token_id, token in enumerate(tokens)
    ]
    # Encode "a", to see whether the tokenizer adds the tokens bos and eos, and a space before the text.
    ids = tokenizer("a")["input_ids"]
    ids_without_special_tokens = tokenizer("a", add_special_tokens=False)["input_ids"]
    special_ids = _special_ids(tokenizer, turn_end, ends)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": key, "template": text} for key, text in template.items()]
    return Vocabulary(
        model=kind,
        pre=pre_tokenizer,
        tokens=tokens,
        token_types=tuple(types),
        scores=scores,
        merges=merges_as_text,
        special_ids=special_ids,
        adds_bos=ids[0] == special_ids.get("bos"),
        adds_eos=ids[-1] == special_ids.get("eos"),
        adds_space=tokens[ids_without_special_tokens[0]].startswith(_SPACE),
        chat_template=template,
    )


def _special_ids(tokenizer: PreTrainedTokenizerBase, turn_end: int | None, ends: Sequence[int]) -> dict[str, int]:
    """Return the IDs of the special tokens that exist, by their names in GGUF.

    GGUF has names for three tokens that end a text: "eos", "eot" for ``turn_end``, and "eom" for the first other one.

    Args:
        tokenizer: The tokenizer.
        turn_end: The token that ends a response.
        ends: All tokens that end a text.
    """
    id_or_none = {key: getattr(tokenizer, f"{key}_token_id", None) for key in ("bos", "eos", "unk", "pad")}
    id_or_none["eot"] = turn_end
    other_ends = [end for end in ends if end not in (id_or_none["eos"], turn_end)]
    id_or_none["eom"] = other_ends[0] if other_ends else None
    return {key: token_id for key, token_id in id_or_none.items() if token_id is not None}


def _tokenizer_json(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the content of a tokenizer's ``tokenizer.json``.

    Args:
        name: The user, for the error.
        tokenizer: The tokenizer.

    Raises:
        DataError: The tokenizer is not a BPE tokenizer, or it is written in Python and has no such file.
    """
    settings: dict[str, Any] = {"model": {}}
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None for a tokenizer that is written in Python
    if backend is not None:
        settings = json.loads(backend.to_str())
    kind = settings["model"].get("type")
    if kind != "BPE":
        raise _unsupported(name, f"a tokenizer of type {kind}; allowed: BPE")
    return settings


def _pre_tokenizer(name: str, settings: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for a byte-level pre-tokenizer, such as "gpt-2".

    A pre-tokenizer splits a text into words, before merges are applied within each word.

    Args:
        name: The user, for error messages.
        settings: Content of ``tokenizer.json``.

    Raises:
        DataError: llama.cpp does not implement the pre-tokenizer.
    """
    unknown = _unsupported(name, "a tokenizer with a pre-tokenizer unknown to GGUF")
    pre_tokenizer = settings["pre_tokenizer"] or {}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])  # a sequence of pre-tokenizers, or a single one
    kinds = [part.get("type") for part in parts]
    if not kinds or kinds[-1] != "ByteLevel" or parts[-1]["add_prefix_space"]:
        raise unknown
    first_part, byte_level = parts[0], parts[-1]
    if kinds == ["ByteLevel"] and byte_level["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and first_part["individual_digits"] and byte_level["use_regex"]:
        return "smollm"
    pattern = first_part.get("pattern", {}).get("Regex")
    if kinds == ["Split", "ByteLevel"] and pattern in _PRE_TOKENIZERS and not byte_level["use_regex"]:
        known_name = _PRE_TOKENIZERS[pattern]
        # With `ignore_merges`, a word that is in the vocabulary becomes one token. llama.cpp does so for "llama-bpe".
        ignores_merges = bool(settings["model"].get("ignore_merges"))
        llama_cpp_ignores_merges = known_name == "llama-bpe"
        if ignores_merges == llama_cpp_ignores_merges:
            return known_name
    raise unknown


def _token_type(
    token_id: int,
    token: str,
    token_by_id: Mapping[int, str],
    added_tokens: Mapping[int, Mapping[str, object]],
    model: Mapping[str, object],
    is_sentencepiece: bool,
) -> int:
    """Return llama.cpp's type of a token.

    Args:
        token_id: ID of the token.
        token: Its text.
        token_by_id: The tokenizer's tokens. The embedding may have more rows, which are unused.
        added_tokens: Settings of tokens that were added to the trained vocabulary, by ID.
        model: Section ``model`` of ``tokenizer.json``.
        is_sentencepiece: Whether it is a SentencePiece tokenizer.
    """
    if token_id not in token_by_id:
        return TokenType.UNUSED
    if is_sentencepiece and token == model.get("unk_token"):
        return TokenType.UNKNOWN
    if token_id in added_tokens:
        is_special = added_tokens[token_id]["special"]  # such as "<|im_end|>"
        return TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    if is_sentencepiece and len(token) == len("<0x0A>") and token.startswith("<0x") and token.endswith(">"):
        return TokenType.BYTE
    return TokenType.NORMAL


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a BPE model's merges as pairs, such as ``("th", "e")``.

    Args:
        model: Section ``model`` of ``tokenizer.json``, which has pairs or, in older files, texts such as "th e".
    """
    merges = []
    for merge in model["merges"]:
        first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
        merges.append((first, second))
    return merges


def _scores(tokens: tuple[str, ...], merges: list[tuple[str, str]]) -> tuple[float, ...]:
    """Return a score per token, from which llama.cpp finds the order of merges: those with a high score come first.

    The score is the negative rank of the first merge that makes the token. Tokens that no merge makes have the lowest.
    """
    rank_by_token: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        rank_by_token.setdefault(first + second, rank)
    lowest_rank = len(merges)
    return tuple(-float(rank_by_token.get(token, lowest_rank)) for token in tokens)


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
LLAMA_CPP_TYPES = {"q4_k_m": "Q4_K_M", "q5_k_m": "Q5_K_M", "q6_k": "Q6_K"}
"""Kinds of quantisation that llama.cpp's own ``llama-quantize`` makes, by ``--dtype``."""
GGUF_ADAPTER_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Weight types of a LoRA adapter by ``--dtype``."""

_ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "qwen3moe": "silu", "gpt2": "gelu_new"}
_Q8_0_BLOCK = 32
"""Numbers in a block of the number format Q8_0, whose rows are whole blocks."""
_EXPERT_OR_ROUTER = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")
"""transformers' names of the tensors of a sparse mixture's experts and routers."""
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
    _require_gguf()
    from gguf import GGUFWriter

    architecture = _architecture(name, network.config)
    generation_config: Any = network.generation_config
    ends: tuple[int, ...] = ()
    if generation_config is not None and generation_config.eos_token_id is not None:
        ends = as_tuple(generation_config.eos_token_id)
    vocab = vocabulary(name, tokenizer, network.config.vocab_size, turn_end=turn_end, ends=ends)
    written: dict[str, np.ndarray] = {}
    with closing(GGUFWriter(path, architecture)) as writer:
        _add_settings(writer, architecture, name, network, weight_type)
        _add_vocabulary(writer, vocab)
        for tensor_name, tensor in _tensors(architecture, name, network):
            written[tensor_name] = _add_tensor(writer, tensor_name, tensor, weight_type)
        _write_all(writer)
    _verify(path, written)


def write_gguf_adapter(
    path: Path,
    name: str,
    config: PreTrainedConfig,
    rank: int,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    weight_type: str,
) -> None:
    """Write a LoRA to a GGUF file that llama.cpp adds to the plain base, and read it back to verify it.

    Args:
        path: The file.
        name: The user, for messages and as the adapter's name.
        config: Configuration of the base.
        rank: Rank of the LoRA, which is also its alpha: llama.cpp multiplies the product of the factors by alpha/rank.
        factors: A ``(rank, d_in)`` and B ``(d_out, rank)`` by name of the adapted linear layer.
        weight_type: F32, F16 or BF16.

    Raises:
        DataError: llama.cpp has no such architecture, or no name for an adapted layer.
        RunError: The package gguf is missing, or the file read back differs.
    """
    _require_gguf()
    from gguf import GGUFType, GGUFWriter, Keys

    architecture = _architecture(name, config)
    written: dict[str, np.ndarray] = {}
    with closing(GGUFWriter(path, architecture)) as writer:
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, float(rank))
        writer.add_name(name)
        find_name = _name_finder(architecture, name, config)
        for layer, (a, b) in factors.items():
            key = f"{layer}.weight"
            gguf_name = find_name(key)
            rows_of_b = b if architecture == "gpt2" else _reordered(architecture, config, key, b)
            for tensor_name, factor in ((f"{gguf_name}.lora_a", a), (f"{gguf_name}.lora_b", rows_of_b)):
                written[tensor_name] = _add_tensor(writer, tensor_name, factor, weight_type)
        _write_all(writer)
    _verify(path, written)


def _require_gguf() -> None:
    """Raise an error if the package gguf is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise RunError("--format gguf needs the package gguf: pip install 'comingle[demo]'")


def _add_tensor(writer: GGUFWriter, tensor_name: str, tensor: Tensor, weight_type: str) -> np.ndarray:
    """Add a tensor to a ``gguf.GGUFWriter``, and return it as it is written.

    Args:
        writer: The writer.
        tensor_name: Name of the tensor in GGUF.
        tensor: The tensor.
        weight_type: Number format of the file.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    array = np.ascontiguousarray(tensor.detach().cpu().to(torch.float32).numpy())
    tensor_type = GGMLQuantizationType[_tensor_type(tensor_name, array, weight_type)]
    written = quantize(array, tensor_type)
    writer.add_tensor(tensor_name, written, raw_dtype=tensor_type)
    return written


def _write_all(writer: GGUFWriter) -> None:
    """Write what was added to a ``gguf.GGUFWriter`` to its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def quantize_gguf(path: Path, kind: str) -> None:
    """Replace a GGUF file by one that llama.cpp's own program ``llama-quantize`` makes of it.

    Args:
        path: The file, in F32 or BF16.
        kind: Kind of quantisation as the program names it, such as "Q4_K_M".

    Raises:
        RunError: The program is not on the PATH, or fails.
    """
    program = shutil.which("llama-quantize")
    if program is None:
        raise RunError(
            f"--dtype {kind.lower()}: needs llama.cpp's llama-quantize on the PATH; allowed without it: q8_0"
        )
    quantized = path.with_name(f"{path.name}.quantized")
    done = subprocess.run([program, str(path), str(quantized), kind], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        last_line = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RunError(f"--dtype {kind.lower()}: llama-quantize failed: {last_line}")
    quantized.replace(path)


# ---------------------------------------------------------------- Ollama

Render = Callable[..., str]
"""Renders a conversation with the model's chat template: ``render(messages, add_prompt=True)``."""


def write_modelfile(
    path: Path, name: str, model: str, adapter: str, render: Render | None, ends: Sequence[str]
) -> None:
    """Write a ``Modelfile``, from which ``ollama create`` makes a model.

    Args:
        path: The file.
        name: The user.
        model: Path of the GGUF file of the model, relative to the Modelfile.
        adapter: That of a LoRA adapter; empty for none.
        render: Renders a conversation; None if the model continues texts.
        ends: Tokens that end a text, such as "<|im_end|>".
    """
    lines = [f"# The model of {name!r}: ollama create NAME -f Modelfile"]
    if adapter:
        lines += [f"# {model} is the base, without adapters.", f"FROM {model}", f"ADAPTER {adapter}"]
    else:
        lines.append(f"FROM {model}")
    template = "{{ .Prompt }}" if render is None else chat_template_for_ollama(render)
    if template is None:  # Ollama then reads the template from the GGUF file, if it knows it
        lines.append("# The chat template is in the model file: it is not one of turns with a fixed beginning and end.")
    else:
        lines.append(f'TEMPLATE """{template}"""')
    for end in ends:
        if _fits_modelfile(end):
            quotes = '"""' if '"' in end else '"'
            lines.append(f"PARAMETER stop {quotes}{end}{quotes}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8", newline="")


def _fits_modelfile(text: str) -> bool:
    """Return whether Ollama reads a text between quotes in a Modelfile as it is.

    Its parser has no escapes, and drops characters that cannot be printed.
    """
    return '"""' not in text and all(character.isprintable() or character in "\t\r\n" for character in text)


def chat_template_for_ollama(render: Render) -> str | None:
    """Return a template of Ollama that renders conversations as a chat template does; None if there is none.

    The pieces around messages are read off rendered conversations, and the result is compared on others.

    Args:
        render: Renders a conversation with the model's chat template.
    """
    pieces = _template_pieces(render)
    if pieces is None:
        return None
    for messages in (_conversation("u"), _conversation("uau"), _conversation("su"), _conversation("suauau")):
        try:
            expected = render(messages, add_prompt=True)
        except DataError:  # the template accepts no message of the system
            return None
        if pieces.render(messages) != expected:
            return None
    return pieces.template()


@dataclass(frozen=True, kw_only=True)
class _TemplatePieces:
    """Text around the messages of a conversation.

    Args:
        begin: Before the first message if it is not the system's.
        before: Before a message, by role.
        after: After a message, by role.
        prompt: At the end, where the response begins.
    """

    begin: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    prompt: str

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return what :meth:`template` makes of a conversation."""
        text = "" if messages[0]["role"] == "system" else self.begin
        for message in messages:
            role = message["role"]
            text += self.before[role] + message["content"] + self.after[role]
        return text + self.prompt

    def template(self) -> str:
        """Return the template in the language of Ollama, which is that of Go."""
        turns = "{{ else if ".join(
            f'eq .Role "{role}" }}}}{self.before[role]}{{{{ .Content }}}}{self.after[role]}'
            for role in ("system", "user", "assistant")
        )
        begin = f'{{{{ if ne (index .Messages 0).Role "system" }}}}{self.begin}{{{{ end }}}}' if self.begin else ""
        return f"{begin}{{{{ range .Messages }}}}{{{{ if {turns}{{{{ end }}}}{{{{ end }}}}{self.prompt}"


_CONTENTS = {"s": ("system", "SYSTEM"), "u": ("user", "USER"), "a": ("assistant", "ASSISTANT")}


def _conversation(roles: str) -> list[dict[str, str]]:
    """Return a conversation of messages with different contents: ``"ua"`` is a user's message and a response."""
    messages = []
    for number, letter in enumerate(roles):
        role, content = _CONTENTS[letter]
        messages.append({"role": role, "content": f"{content}{number}"})
    return messages


def _template_pieces(render: Render) -> _TemplatePieces | None:
    """Return the pieces of a chat template, read off rendered conversations; None if they cannot be read.

    With contents U0, A1, U2 a conversation is ``start U0 first A1 second U2 last``. ``last`` follows a user's message,
    so ``first`` is ``last`` and what precedes a response. ``start`` and ``second`` both end with what precedes a user's
    message.
    """
    try:
        start, first, second, last = re.split("USER0|ASSISTANT1|USER2", render(_conversation("uau"), add_prompt=False))
        prompt_start, prompt_end = render(_conversation("u"), add_prompt=True).split("USER0")
        before_system, after_system, rest = re.split("SYSTEM0|USER1", render(_conversation("su"), add_prompt=False))
    except (DataError, ValueError):  # the template refuses a conversation, changes a content or repeats it
        return None
    is_regular = prompt_start == start and rest == last and first.startswith(last) and prompt_end.startswith(last)
    text = "".join((start, first, second, last, prompt_end, before_system, after_system))
    if not is_regular or "{{" in text or not _fits_modelfile(text):
        return None
    before_user = _common_end(_common_end(start, second), after_system)
    return _TemplatePieces(
        begin=start.removesuffix(before_user),
        before={"system": before_system, "user": before_user, "assistant": first.removeprefix(last)},
        after={
            "system": after_system.removesuffix(before_user),
            "user": last,
            "assistant": second.removesuffix(before_user),
        },
        prompt=prompt_end.removeprefix(last),
    )


def _common_end(first: str, second: str) -> str:
    """Return the longest text with which both texts end."""
    length = 0
    while length < min(len(first), len(second)) and first[-length - 1] == second[-length - 1]:
        length += 1
    return first[len(first) - length :]


# ---------------------------------------------------------------- architectures


def why_no_gguf(config: PreTrainedConfig) -> str:
    """Return the reason why llama.cpp cannot compute a network with this configuration; empty if it can."""
    if config.model_type not in ARCHITECTURES:
        return f"GGUF export: got a base of type {config.model_type}; allowed: {', '.join(ARCHITECTURES)}"
    architecture = ARCHITECTURES[config.model_type]
    activation = getattr(config, "hidden_act", None) or config.activation_function
    if activation != _ACTIVATIONS[architecture]:
        return f"its MLPs have the activation {activation!r}; llama.cpp supports only {_ACTIVATIONS[architecture]!r}"
    attention_problem = _attention_problem(architecture, config)
    if attention_problem:
        return attention_problem
    rope_type = _rope_type(config)
    rope_types = ("default", "linear", "llama3") if architecture == "llama" else ("default",)
    if rope_type not in rope_types:
        return f"its rotary embeddings have type {rope_type!r}, which GGUF export does not support"
    return ""


def _attention_problem(architecture: str, config: PreTrainedConfig) -> str:
    """Return the reason why llama.cpp cannot compute a network's attention; empty if it can.

    Args:
        architecture: llama.cpp's name of the architecture.
        config: Configuration of the network.
    """
    if architecture == "gpt2" and not config.scale_attn_weights:
        problem = "does not scale scores by the head width (scale_attn_weights: false), which llama.cpp always does"
    elif architecture == "gpt2" and config.scale_attn_by_inverse_layer_idx:
        problem = "divides scores by the layer index (scale_attn_by_inverse_layer_idx: true), which llama.cpp does not"
    elif architecture in ("qwen3", "qwen3moe") and config.attention_bias:
        problem = f"has biases (attention_bias: true), which llama.cpp does not support for {architecture}"
    else:
        return ""
    return f"its attention {problem}"


def _rope_type(config: PreTrainedConfig) -> str:
    """Return the type of a network's rotary embeddings: "default", or the name of its frequency scaling."""
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    return rope_parameters.get("rope_type", "default")


def _architecture(name: str, config: PreTrainedConfig) -> str:
    """Return llama.cpp's name of a network's architecture.

    Raises:
        DataError: llama.cpp cannot compute the network.
    """
    problem = why_no_gguf(config)
    if problem:
        raise DataError(f"user {name!r}: {problem}; --format transformers has no such limit")
    return ARCHITECTURES[config.model_type]


def _tensor_type(tensor_name: str, array: np.ndarray, weight_type: str) -> str:
    """Return the number format of one tensor in a GGUF file.

    Args:
        tensor_name: Name of the tensor in GGUF.
        array: The tensor.
        weight_type: Number format of the file: F32, BF16 or Q8_0.
    """
    is_kept_in_float32 = any(part in tensor_name for part in _FLOAT32_NAMES)
    if array.ndim == 1 or is_kept_in_float32:
        return "F32"
    row_length = array.shape[-1]
    if weight_type == "Q8_0" and row_length % _Q8_0_BLOCK != 0:
        return "BF16"
    return weight_type


def _add_settings(writer: Any, architecture: str, name: str, network: PreTrainedModel, weight_type: str) -> None:
    """Write a network's hyperparameters, such as its numbers of layers and heads, to a GGUF file.

    llama.cpp builds the network from them. GPT-2 has other ones than Llama and its relatives, and networks of experts
    have some in addition.

    Args:
        writer: Writer of the file, a ``gguf.GGUFWriter``.
        architecture: llama.cpp's name of the architecture, such as "llama", "gpt2" or "qwen3moe".
        name: Name of the model, for programs that list models.
        network: The network, whose configuration has the hyperparameters.
        weight_type: Number format of the weights: "F32", "BF16" or "Q8_0".
    """
    from gguf import LlamaFileType

    config = network.config
    writer.add_name(name)
    types = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(LlamaFileType[types[weight_type]])
    # llama.cpp has no sliding window in these architectures, so the context is limited to the window.
    sliding_window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_context_length(min(sliding_window, config.max_position_embeddings))
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
        # llama.cpp refuses a file without merges. For a tokenizer of single bytes, write a merge without effect: its
        # result is not a token.
        first_token = vocab.tokens[0]
        writer.add_token_merges(vocab.merges or (f"{first_token} {first_token}",))
    for key, token_id in vocab.special_ids.items():
        add_special_id = getattr(writer, f"add_{key}_token_id")  # such as `add_bos_token_id`
        add_special_id(token_id)
    writer.add_add_bos_token(vocab.adds_bos)
    writer.add_add_eos_token(vocab.adds_eos)
    if vocab.chat_template:
        writer.add_chat_template(vocab.chat_template)


def _tensors(architecture: str, name: str, network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor in GGUF, and the tensor with its entries in llama.cpp's order.

    Args:
        architecture: llama.cpp's name of the architecture.
        name: The user, for error messages.
        network: The network.

    Raises:
        DataError: GGUF has no name for a tensor.
    """
    config = network.config
    find_name = _name_finder(architecture, name, config)
    for key, tensor in network.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:  # the same tensor as the embedding
            continue
        match = _EXPERT_OR_ROUTER.fullmatch(key)
        if match:
            layer, name_in_mlp = int(match[1]), match[2]
            yield from _expert_tensors(layer, name_in_mlp, tensor)
            continue
        yield find_name(key), _reordered(architecture, config, key, tensor)
    if _rope_type(config) != "default":
        yield "rope_freqs.weight", _rope_factors(network)


def _name_finder(architecture: str, name: str, config: PreTrainedConfig) -> Callable[[str], str]:
    """Return a function that finds the name in GGUF of a tensor of transformers; it raises DataError if there is none.

    Args:
        architecture: llama.cpp's name of the architecture.
        name: The user, for error messages.
        config: Configuration of the network.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    architecture_id = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    name_map = get_tensor_name_map(architecture_id, config.num_hidden_layers)

    def find_name(key: str) -> str:
        gguf_name = name_map.get_name(key, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise DataError(f"user {name!r}: no GGUF tensor for {key!r}; --format transformers has no such limit")
        return gguf_name

    return find_name


def _expert_tensors(layer: int, name_in_mlp: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the GGUF names and tensors for one tensor of a layer's experts or router.

    Args:
        layer: Index of the layer.
        name_in_mlp: Name of the tensor in transformers, after the name of the MLP.
        tensor: The tensor, stacked over experts.
    """
    if name_in_mlp == "experts.gate_up_proj":  # GGUF has two tensors
        gate, up = tensor.chunk(2, 1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    elif name_in_mlp == "experts.down_proj":
        yield f"blk.{layer}.ffn_down_exps.weight", tensor
    else:  # "gate.weight", the router
        yield f"blk.{layer}.ffn_gate_inp.weight", tensor


def _reordered(architecture: str, config: PreTrainedConfig, key: str, tensor: Tensor) -> Tensor:
    """Return a weight with its entries in llama.cpp's order.

    Args:
        architecture: llama.cpp's name of the architecture.
        config: Configuration of the network.
        key: Name of the weight in transformers.
        tensor: The weight.
    """
    if architecture == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.mT  # transformers stores these as (d_in, d_out)
    query_or_key = re.search(r"\.([qk])_proj\.", key)
    if architecture == "llama" and query_or_key:
        # Rotary embeddings rotate entries i and i + d/2 of a head in transformers, and adjacent entries in llama.cpp.
        heads = config.num_attention_heads if query_or_key[1] == "q" else config.num_key_value_heads
        halves = tensor.unflatten(0, (heads, 2, -1))  # (heads, 2, d/2, d_in)
        pairs = halves.transpose(1, 2)  # (heads, d/2, 2, d_in)
        return pairs.flatten(0, 2)
    return tensor


def _rope_factors(network: PreTrainedModel) -> Tensor:
    """Return ``theta^(-2i/d) / f_i`` for each rotary frequency f_i of a network.

    llama.cpp divides its default frequencies ``theta^(-2i/d)`` by these factors. d is the width of a head.
    """
    frequencies = network.get_buffer(f"{network.base_model_prefix}.rotary_emb.inv_freq").double()
    half_d = len(frequencies)
    exponents = torch.arange(half_d, dtype=torch.float64) / half_d  # 2i/d
    theta = network.config.rope_parameters["rope_theta"]
    default_frequencies = theta**-exponents
    return (default_frequencies / frequencies).float()


def _verify(path: Path, written: dict[str, np.ndarray]) -> None:
    """Read the file back and compare the bytes of every tensor.

    Args:
        path: The file.
        written: The tensors that were written, by name.

    Raises:
        RunError: A tensor differs.
    """
    from gguf import GGUFReader

    def as_bytes(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1).view(np.uint8)

    read = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    is_same = read.keys() == written.keys()
    for name in written:
        is_same = is_same and np.array_equal(as_bytes(read[name]), as_bytes(written[name]))  # bit for bit
    if not is_same:
        raise RunError(f"{path}: content read back differs from what was written; check the disk")
