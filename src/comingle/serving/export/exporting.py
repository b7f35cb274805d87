"""Export of a user's model, with a model card, to a folder that other programs open.

The format follows from the model: how many experts the user has, whether a router chooses between them, where they are
mixed, and the base. Methods are not looked up by name.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.base import Base
from comingle.models.generation import as_tuple
from comingle.models.hardware import DTYPES, without_compiling
from comingle.models.loading import GIVEN, is_public, quiet_transformers
from comingle.models.personal import (
    CONVERSATIONS,
    Exported,
    ModelInfo,
    PersonalModel,
    chat_template_of,
    generation_of,
    turn_end,
)
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.random_bases import RANDOM_BASE_PREFIX
from comingle.models.scoring import PAD, inputs_of, perplexity_of
from comingle.models.stacked import MixedLanguageModel
from comingle.serving.export.gguf import KINDS, why_no_gguf, write_gguf
from comingle.serving.export.networks import (
    SPARSE,
    Source,
    cast_parameters,
    changes_of,
    check_same_logits,
    check_sparse,
    format_hint,
    is_mixture,
    needs_eager_experts,
    plain_changes,
    plain_network,
    routing_of,
    sparse_network,
    unsupported_mixing,
    why_not_plain,
    write_peft,
)
from comingle.utils.errors import DataError, RunError, did_you_mean
from comingle.utils.records import DRAFT, check_name, convert_disk_errors, expand_home, write_json

TAG = "comingle"
"""Tag in the model card that marks a folder as an export."""


@dataclass(frozen=True, kw_only=True)
class UsageExample:
    """Example for the model card that generates a text.

    Args:
        code: Code that follows the lines that open the model.
        prompt: The prompt as the model reads it.
        ends: Tokens that end the text.
        is_chat: Whether the model answers messages rather than continues a text.
    """

    code: str
    prompt: str
    ends: Sequence[str]
    is_chat: bool

    def text(self) -> list[str]:
        """Return the lines of the card that follow the code: the prompt as the model reads it, and how texts end."""
        lines: list[str] = []
        if self.prompt:
            template = "The model answers messages in its chat template. The prompt above is:"
            lines += [template if self.is_chat else "The prompt is:", "", *_block("text", self.prompt)]
        if self.ends:
            what = "An answer" if self.is_chat else "A text"
            lines += [f"{what} ends with {' or '.join(f'`{end}`' for end in self.ends)}.", ""]
        return lines


_MESSAGES = """messages = [{"role": "user", "content": "Hello!"}]"""
_EXAMPLE_TEXT = "Once upon a time"
_GENERATE = """answer = model.generate(**prompt, max_new_tokens=100)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))"""
_CODE = {
    ("transformers", True): f"""{_MESSAGES}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
{_GENERATE}""",
    ("transformers", False): f"""prompt = tokenizer("{_EXAMPLE_TEXT}", return_tensors="pt")
{_GENERATE}""",
    ("gguf", True): f"""{_MESSAGES}
answer = model.create_chat_completion(messages, max_tokens=100)
print(answer["choices"][0]["message"]["content"])""",
    ("gguf", False): f"""answer = model("{_EXAMPLE_TEXT}", max_tokens=100)
print(answer["choices"][0]["text"])""",
}


def usage_example(base: Base, about: ModelInfo | None, format: str) -> UsageExample:
    """Return the model card's example of usage: code that generates a text, its prompt, and the tokens that end it.

    The prompt is a message in the chat template if the model was trained on conversations, else a text to continue.

    Args:
        base: The base.
        about: Facts about the user's data; None if unknown.
        format: The export format.
    """
    tokenizer, template = base.tokenizer, chat_template_of(base, about)
    assert tokenizer is not None
    is_chat = template is not None and (about is None or about.kind == CONVERSATIONS)
    prompt = "" if is_chat else _EXAMPLE_TEXT
    if is_chat and template is not None:
        with suppress(DataError):  # The template requires other roles, so the card shows no prompt.
            prompt = template.render([{"role": "user", "content": "Hello!"}], add_prompt=True)
    eos = generation_of(base, about).eos_token_id
    ends = () if eos is None else as_tuple(eos)
    return UsageExample(
        code=_CODE["gguf" if format == "gguf" else "transformers", is_chat],
        prompt=prompt,
        ends=[str(tokenizer.decode([end])) for end in ends],
        is_chat=is_chat,
    )


def _block(language: str, text: str) -> list[str]:
    """Return a fenced block whose fence is longer than any in its text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A model card.

    Args:
        name: The user.
        base: The base.
        library: The library that opens the export.
        form: Sentence on the format that was written.
        usage: Code that opens the model.
        about: Facts about the user's data and scores; None if unknown.
        example: Example that generates a text; None without a tokenizer.
        lost: Scores before and after an approximation.
    """

    name: str
    base: Base
    library: str
    form: str
    usage: str
    about: ModelInfo | None
    example: UsageExample | None = None
    lost: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """Return the card as Markdown with the Hugging Face Hub's front matter."""
        body = [*self._head(), *self._data(), *self._metrics(), *self._licence()]
        return "\n".join([*self._front_matter(), "", *body, ""])

    def _front_matter(self) -> list[str]:
        """Return the front matter that the Hugging Face Hub reads: licence and base if known, library, tags."""
        licence, name = licence_of(self.base), name_of(self.base)
        # Random bases ("random:...") are made here, not loaded from the Hub.
        is_on_hub = "/" in name and is_public(name) and not name.startswith(RANDOM_BASE_PREFIX)
        return [
            "---",
            *([f"base_model: {name}"] if is_on_hub else []),
            *([f"license: {licence}"] if licence else []),
            f"library_name: {self.library}",
            "tags:",
            f"- {TAG}",
            "- federated-learning",
            "---",
        ]

    def _head(self) -> list[str]:
        """Return the first lines of the card: title, what the model is, its format, and its usage with an example."""
        how = f"with the method {self.about.method}" if self.about else "with adapters"
        others = f", in a federation of {self.about.users} users" if self.about and self.about.users > 1 else ""
        tuned = f"{name_of(self.base)} fine-tuned {how}{others}"
        summary = f"The personal language model of one user, {self.name}: {tuned}."
        code = self.usage if self.example is None else f"{self.usage}\n{self.example.code}"
        example_lines = [] if self.example is None else self.example.text()
        lines = [f"# {self.name}", "", summary, "", self.form, "", "## Usage", ""]
        return [*lines, *_block("python", code), *example_lines]

    def _data(self) -> list[str]:
        """Return the section on the amount of the user's data; no lines if it is unknown."""
        if self.about is None or not self.about.counts:
            return []
        amounts = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in self.about.counts.items())
        note = "This folder contains none of it, only the trained weights."
        return ["## Data", "", f"The user's own {self.about.kind}: {amounts}. {note}", ""]

    def _metrics(self) -> list[str]:
        """Return the section with the model's scores as Markdown lines; no lines if there are none.

        The card of an approximation also compares two perplexities (``lost``): that of the exported model, and that of
        the mixture of experts that it replaces.
        """
        scores = {**(self.about.scores if self.about else {}), **self.lost}
        if not scores:
            return []
        rows = [f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in scores.items()]
        return ["## Metrics", "", "| on the user's own data | |", "|---|---|", *rows, ""]

    def _licence(self) -> list[str]:
        licence = licence_of(self.base) or "the base's files do not name it; see the base model"
        return ["## Licence", "", f"The weights have the licence of the base model: {licence}."]


def name_of(base: Base) -> str:
    """Return the base's name for the model card: its name on the Hub, or else the last part of its local path."""
    path = expand_home(base.name)
    if base.name == GIVEN:  # a program has passed the model as an object
        return f"a {type(base.model).__name__} without a name"
    if not (path.exists() or path.is_absolute() or base.name.startswith(".")):
        return base.name
    path = Path(os.path.normpath(path.absolute()))
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):  # Hugging Face's cache
        return path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return path.name


def licence_of(base: Base) -> str:
    """Return the licence in the base's model card, as the Hub spells it; an empty string if there is none."""
    card = base.origin / "README.md" if isinstance(base.origin, Path) else None
    if card is None or not card.is_file():
        return ""
    # A card begins with YAML between two lines "---"; the text before the first of them is empty.
    front_matter = card.read_text(encoding="utf-8", errors="replace").split("---")[1:2]
    match = re.search(r"^license:\s*([\w.-]+)\s*$", front_matter[0], re.MULTILINE) if front_matter else None
    return match[1] if match else ""


CARD = "README.md"
LIST = "comingle_export.json"
"""File that lists what an export has written, so that the next export replaces these files only."""

_KNOWN = {
    *(CARD, LIST, "config.json", "generation_config.json", "adapter_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "model.gguf"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""Files that exports write; used for exports of older versions, which have no list."""


def check_target(folder: Path, *, force: bool) -> None:
    """Check that an export may be written to a folder, without changing anything.

    Raises:
        RunError: The path is a file, the folder exists without ``force``, or it has files that no export has written.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; allowed for --to: a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise RunError(f"{folder}: exists; --force replaces an export, --to names another folder")
    if not _is_export(folder):
        raise RunError(f"{folder}: is not an exported model, so --force does not touch it; use another --to")
    if (foreign := _foreign_file(folder)) is not None:
        reason = f"has a file that export did not write, {foreign!r}, so --force does not touch it"
        raise RunError(f"{folder}: {reason}; move the file, or use another --to")


@contextmanager
def replace_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty temporary folder, which replaces ``folder`` when the caller has written its files.

    If the caller fails, ``folder`` stays as it was. Only the owner can read the new folder, because the weights have
    been trained on private text.

    Args:
        folder: Where the export is to be.
        force: Whether to replace an existing export.

    Raises:
        RunError: An export may not be written to the folder (:func:`check_target`), or the disk cannot be written to.
    """
    from safetensors import SafetensorError

    check_target(folder, force=force)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        with convert_disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir(mode=0o700)
            yield draft
            write_json(draft / LIST, {"written": sorted(_relative_paths(draft))})
            check_target(folder, force=force)  # The folder may have changed in the meantime.
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise RunError(f"{folder}: cannot be written to: {error}") from None  # an OSError wrapped by a library
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_export(folder: Path) -> bool:
    card = folder / CARD
    return card.is_file() and f"- {TAG}" in card.read_text(encoding="utf-8", errors="replace").splitlines()


def _relative_paths(folder: Path) -> set[str]:
    """Return relative paths of everything below the folder, folders and links included; links are not followed."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _foreign_file(folder: Path) -> str | None:
    """Return a file in an exported folder that no export has written, the first by name; None if there is none.

    The caller then refuses to replace the folder, since the file would be lost.
    """
    try:
        exported = {LIST, *json.loads((folder / LIST).read_text(encoding="utf-8"))["written"]}
    except (OSError, ValueError, KeyError, TypeError):  # The list is damaged, or an older version wrote none.
        # Names of files that exports write: fixed ones, and parts of large models.
        exported = {path.name for path in folder.iterdir() if path.name in _KNOWN or _SHARD.fullmatch(path.name)}
    return min(_relative_paths(folder) - exported, default=None)


def validate_with_gates(source: Source) -> tuple[float, list[Float[Tensor, " experts"]]]:
    """Validate a model on its user's validation data, and measure how much its routers use each expert.

    A gate is the weight of an expert for a token. Without a router all gates are equal.

    Returns:
        The perplexity, and for each layer the mean gate of each expert over all tokens. The list is empty for a mixture
        of components, whose weights do not depend on the token.
    """
    model = source.model
    if not isinstance(model, AdaptedModel):  # a mixture of components, without token routers
        return perplexity(source, _personal_losses(source, [])), []
    num_experts = int(model.adapters.present[source.row].sum())
    num_layers = len(model.adapters.experts)
    if not routing.routed(model.adapters):
        equal_gates = torch.full((num_experts,), 1 / num_experts)
        return perplexity(source, _personal_losses(source, [])), [equal_gates] * num_layers
    # The gates of the last batch of windows: `validate` computes the losses of a batch, which writes the gates here,
    # and then asks for the gates.
    last_gates: list[Tensor] = []
    assert source.model_info is not None  # it has the user's validation data

    def gates_of_last_batch() -> Tensor:
        """Return the gates of the last batch, ``(layers, windows, ...)``."""
        return torch.cat(last_gates, 1)

    # Compiled code does not record gates.
    with routing.record_gates(model.adapters), without_compiling():
        score = source.model_info.validate(_personal_losses(source, last_gates), gates_of_last_batch)
    present = model.adapters.present[source.row]
    mean_gates = score.expert_scores  # the score averages the gates that it gets, by layer and expert
    return perplexity_of(score.mean_loss), [torch.tensor(layer)[present] for layer in mean_gates]


def perplexity(source: Source, losses: Callable[[Sequence[int], Tensor], Tensor]) -> float:
    """Return the perplexity of the user's validation data; of conversations only responses count.

    Args:
        source: The user's model, with its data.
        losses: Computes per-token losses of windows of tokens.
    """
    assert source.model_info is not None
    score = source.model_info.validate(losses, None)  # None: without the gates of experts
    return perplexity_of(score.mean_loss)


def _personal_losses(source: Source, last_gates: list[Tensor]) -> Callable[[Sequence[int], Tensor], Tensor]:
    """Return a function that computes per-token losses of the user's model for windows of tokens.

    While routers record their gates (:func:`comingle.models.routing.record_gates`), each call of the function replaces
    the content of ``last_gates`` with the gates of its windows.

    Args:
        source: The user's model.
        last_gates: A list to which the gates are written.
    """
    model = source.model
    mlps = model.adapters.experts.values() if isinstance(model, AdaptedModel) else ()

    def losses(_users: Sequence[int], windows: Tensor) -> Tensor:  # there is only one user
        last_gates.clear()  # each call of model.predict overwrites the routers' gates, so they are collected here
        losses_of_batches = []
        for batch in windows.to(model.device).unsqueeze(1):
            (losses_of_batch,) = model.predict(source.tensors, [source.row], batch)  # (1, ...): of the only user
            losses_of_batches.append(losses_of_batch)
            if isinstance(model, AdaptedModel) and any(mlp.router.record_gates for mlp in mlps):
                last_gates.append(routing.gates(model.adapters))
        return torch.stack(losses_of_batches)

    return losses


def losses_of(network: PreTrainedModel) -> Callable[[Sequence[int], Tensor], Tensor]:
    """Return a function that computes per-token losses of a network of transformers.

    Targets that do not count are marked by negative numbers: padding by ``PAD`` = -1, and tokens of a conversation
    outside responses by numbers below it. Their loss is 0.
    """

    def losses(_users: Sequence[int], windows: Tensor) -> Tensor:  # all users share the network
        targets = windows[..., 1:].clamp(min=PAD)  # all targets that do not count become PAD, which is ignored
        logits = network(input_ids=inputs_of(windows).flatten(0, 1), use_cache=False).logits
        token_losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="none"
        )
        return token_losses.view(targets.shape)

    return losses


FORMATS = ("transformers", "peft", "gguf", "merged-approximately")
GGUF_FILE = "model.gguf"
_PROBE_TOKENS = 16
"""Number of tokens on which logits of the exported network are compared with those of the user's model."""


def export_personal(personal: PersonalModel, folder: Path, *, format: str, dtype: str | None, force: bool) -> Exported:
    """Export a user's model to a folder, in a format of another program; this implements ``PersonalModel.export``.

    Args:
        personal: The model to export.
        folder: Where to write.
        format: One of :data:`FORMATS`.
        dtype: Number format of the weights; None for the base's.
        force: Whether to replace an existing export.

    Raises:
        DataError: The model cannot be exported in this format; the message names the reason and a format that works.
        RunError: The base is quantised, the format or number format is unknown, or the folder cannot be written to.
    """
    if personal.model.base.quantised:
        problem = f"quantise: got {personal.model.base.quantised}; an export needs unquantised base weights"
        raise RunError(f"{problem}; train with quantise: none to export")
    source = Source(
        name=personal.name,
        model=cast(AdaptedModel | MixedLanguageModel, personal.model),
        tensors=personal.tensors,
        row=personal.row,
        model_info=personal.about,
        logits=personal.logits,
    )
    with torch.no_grad():
        return export(source, folder, format=format, dtype=dtype, force=force)


def export(source: Source, folder: Path, *, format: str, dtype: str | None, force: bool) -> Exported:
    """Write a user's model, its tokenizer and a model card to a folder, in a format of another program.

    Args:
        source: The user's model.
        folder: Where to write.
        format: One of :data:`FORMATS`.
        dtype: Number format of the weights; None for the base's.
        force: Whether to replace an existing export.

    Raises:
        DataError: The model cannot be exported in this format; the message names the reason and a format that works.
        RunError: The format or number format is unknown, or the folder cannot be written to.
    """
    number_format = _number_format(source, format, dtype)
    check_target(folder, force=force)
    write = {
        "peft": _write_peft_folder,
        "gguf": _write_gguf_folder,
        "transformers": _write_transformers,
        "merged-approximately": _write_approximate,
    }[format]
    with replace_folder(folder, force=force) as draft, quiet_transformers():
        # For the card: the library that opens the files, and code to do so with placeholders for folder and base.
        exported, library, usage = write(source, draft, number_format)
        tokenizer = _tokenizer_with_template(source.model.base, source.model_info)
        if tokenizer is not None and format != "gguf":
            tokenizer.save_pretrained(draft)
        card = Card(
            name=source.name,
            base=source.model.base,
            library=library,
            form=exported.form,
            usage=usage.format(folder=folder.name, base=name_of(source.model.base)),
            example=usage_example(source.model.base, source.model_info, format) if tokenizer is not None else None,
            about=source.model_info,
            lost=exported.lost,
        )
        (draft / CARD).write_text(card.text(), encoding="utf-8")
    return replace(exported, folder=folder, format=format)


def _number_format(source: Source, format: str, dtype: str | None) -> str:
    """Return the number format of the exported weights: the requested one, or by default that of the base.

    If the export format has no weights of the base's dtype, the default is float32.

    Args:
        source: The model to export.
        format: Export format, one of :data:`FORMATS`.
        dtype: The requested number format; None for the default.

    Raises:
        RunError: The format or the number format is unknown.
    """
    if format not in FORMATS:
        raise RunError(f"--format: got {format!r}; allowed: {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}")
    base_dtype = str(source.model.base.dtype).removeprefix("torch.")
    allowed = tuple(KINDS) if format == "gguf" else tuple(DTYPES)
    if dtype is None:
        return base_dtype if base_dtype in allowed else "float32"
    if dtype not in allowed:
        raise RunError(f"--dtype: got {dtype!r}; allowed for {format}: {', '.join(allowed)}")
    return dtype


# -------------------------------------------------------------------- formats

_Written = tuple[Exported, str, str]
"""The written export, the name of the library that opens it, and code that opens it."""

_OPEN = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""

_OPEN_PEFT = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}")
model.generation_config = GenerationConfig.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""

_OPEN_GGUF = f"""from llama_cpp import Llama

model = Llama("{{folder}}/{GGUF_FILE}")
# In a terminal: llama-cli -m "{{folder}}/{GGUF_FILE}" -p "Once upon a time" -n 40"""


def _write_transformers(source: Source, draft: Path, number_format: str) -> _Written:
    """Write a network of transformers that computes the same as the user's model.

    Args:
        source: The user's model.
        draft: The folder.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.
    """
    network, form = _exact_network(source)
    _save(source, cast_parameters(network, DTYPES[number_format]), draft)
    return _exported(draft, f"{form} Weights: {number_format}."), "transformers", _OPEN


def _write_gguf_folder(source: Source, draft: Path, number_format: str) -> _Written:
    """Write a GGUF file for llama.cpp.

    Args:
        source: The user's model.
        draft: The folder.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: llama.cpp cannot represent the model, or the base has no tokenizer.
    """
    base = source.model.base
    is_sparse = base.model.config.model_type in SPARSE and is_mixture(source)
    # Fail before any computation. A sparse network has another configuration and is checked when it is written.
    if not is_sparse and (why := why_no_gguf(base.model.config)):
        raise DataError(f"user {source.name!r}: {why}; --format transformers has no such limit")
    if base.tokenizer is None:
        raise DataError(f"user {source.name!r}: base {name_of(base)} has no tokenizer, which a GGUF file needs")
    network, form = _exact_network(source)
    network.generation_config = generation_of(base, source.model_info)
    tokenizer = _tokenizer_with_template(base, source.model_info)
    assert tokenizer is not None
    weight_type, end_token = KINDS[number_format], turn_end(base, source.model_info)
    write_gguf(draft / GGUF_FILE, source.name, network, tokenizer, weight_type, turn_end=end_token)
    return _exported(draft, f"{form} Saved as {GGUF_FILE} for llama.cpp. Weights: {number_format}."), "gguf", _OPEN_GGUF


def _write_peft_folder(source: Source, draft: Path, number_format: str) -> _Written:
    """Write the user's model as a LoRA adapter for PEFT, without the base.

    Args:
        source: The user's model.
        draft: The folder.
        number_format: Number format of the weights, such as "bfloat16".

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: The model cannot be written as a single LoRA, for example if it is a mixture of experts.
    """
    if reason := why_not_plain(source):
        raise DataError(f"user {source.name!r}: its model is not one LoRA: {reason}; {format_hint(source)}")
    base = source.model.base
    base_name = name_of(base)
    weight_changes = plain_changes(source)
    rank = write_peft(draft, base.model, base_name, weight_changes, DTYPES[number_format])
    generation_config = generation_of(base, source.model_info)
    generation_config.save_pretrained(draft)
    description = f"One LoRA of rank {rank} for the base {base_name}, which is not in this folder."
    exported = _exported(draft, f"{description} Weights: {number_format}.")
    return exported, "peft", _OPEN_PEFT


def _write_approximate(source: Source, draft: Path, number_format: str) -> _Written:
    """Write a network with the base's architecture, in which a mixture of experts is approximated.

    The experts' LoRAs are added to the base's weights with the same gates for every token: their mean on the user's
    validation data. The model card compares the perplexities of both models.

    Args:
        source: The user's model.
        draft: The folder.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: There is no validation data.
    """
    if source.model_info is None:
        raise DataError(f"user {source.name!r}: the model has no validation data; open the user's run")
    perplexity_before, gates = validate_with_gates(source)
    # Changes with a key belong to experts, which get the mean gates as weights. Other changes, such as those of
    # attention, are the same for all tokens and stay exact.
    changes = [change.reweighted(gates[change.layer]) if change.key else change for change in changes_of(source)]
    network = cast_parameters(plain_network(source.model.base.model, changes), DTYPES[number_format])
    perplexity_after = perplexity(source, losses_of(network))
    _save(source, network, draft)
    perplexities = {
        "validation_perplexity_of_the_mixture": perplexity_before,
        "validation_perplexity_of_this_model": perplexity_after,
    }
    if is_mixture(source):
        relation = "that replaces a mixture of experts, with gates fixed at their mean"
    else:
        relation = "equal to the trained one, which has no mixture"
    return _exported(draft, f"A plain model {relation}. Weights: {number_format}.", perplexities), "transformers", _OPEN


def _save(source: Source, network: PreTrainedModel, draft: Path) -> None:
    """Write a network of transformers with the generation settings for the user's data.

    transformers' default implementation of experts fails for some sizes. For a network of such a size, a key in
    ``config.json`` selects the implementation "eager", which runs the experts one after another.
    """
    network.generation_config = generation_of(source.model.base, source.model_info)
    network.save_pretrained(draft)
    if needs_eager_experts(network.config):  # transformers reads this key of config.json but does not write it.
        path = draft / "config.json"
        write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "experts_implementation": "eager"})


def _tokenizer_with_template(base: Base, model_info: ModelInfo | None) -> PreTrainedTokenizerBase | None:
    """Return the base's tokenizer with the chat template to export; None if the base has no tokenizer.

    Args:
        base: The base model.
        model_info: Facts about the training data, such as whether it has conversations; None if unknown.
    """
    if base.tokenizer is None:
        return None
    template = chat_template_of(base, model_info)
    if template is None:  # the model is not for conversations
        return base.tokenizer
    jinja_template = template.source
    if jinja_template == base.tokenizer.chat_template:
        return base.tokenizer
    tokenizer = copy.deepcopy(base.tokenizer)
    tokenizer.chat_template = jinja_template
    return tokenizer


def _exported(draft: Path, form: str, lost: Mapping[str, float] | None = None) -> Exported:
    return Exported(folder=draft, format="", form=form, lost=lost or {})


def _exact_network(source: Source) -> tuple[PreTrainedModel, str]:
    """Return a network of transformers that computes the same as the user's model, and a description for the card.

    A model without a mixture is the base with merged adapters; a mixture is a sparse mixture-of-experts architecture.

    Raises:
        DataError: No architecture of transformers supports the mixture.
        BaseModelError: The network's logits differ from those of the user's model.
    """
    base = source.model.base
    if not is_mixture(source):
        network = plain_network(base.model, plain_changes(source))
        form = f"{type(network).__name__} with the user's adapters merged into its weights."
    else:
        if mixing := unsupported_mixing(source):
            raise DataError(
                f"user {source.name!r}: its experts are {mixing}, which no architecture of transformers supports; "
                f"{format_hint(source)}"
            )
        check_sparse(source.name, base.model.config)
        routing = routing_of(source)
        network = sparse_network(base.model, changes_of(source), routing)
        form = (
            f"{type(network).__name__} with {len(routing.gates[0])} experts, of which {routing.top_k} are chosen for "
            "each token; every expert is the base's MLP with that expert's LoRA merged in."
        )
    # Compare the logits of both networks for arbitrary tokens.
    tokens = torch.arange(_PROBE_TOKENS).unsqueeze(0) * 7 % base.model.config.vocab_size
    check_same_logits(source.name, source.logits(tokens).cpu(), network(input_ids=tokens).logits, base.dtype)
    return network, form
