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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.base import Base
from comingle.models.chat_templates import ChatTemplate
from comingle.models.generation import as_tuple
from comingle.models.hardware import DTYPES, without_compiling
from comingle.models.loading import GIVEN, describe_hub_error, is_public, quiet_transformers, why_no_hub
from comingle.models.personal import (
    CONVERSATIONS,
    Change,
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
from comingle.serving.export.gguf import (
    GGUF_ADAPTER_TYPES,
    GGUF_WEIGHT_TYPES,
    LLAMA_CPP_TYPES,
    Render,
    quantize_gguf,
    why_no_gguf,
    write_gguf,
    write_gguf_adapter,
    write_modelfile,
)
from comingle.serving.export.networks import (
    SPARSE,
    Source,
    cast_parameters,
    changes_of,
    check_same_logits,
    check_sparse,
    format_hint,
    is_mixture,
    lora_factors,
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
    """Example in the model card that generates a text.

    Args:
        code: Python code that uses the variables ``model`` and ``tokenizer``.
        prompt: The prompt as the model reads it, in the chat template if there is one; empty to omit it.
        ends: Tokens that end the text, such as "<|im_end|>".
        is_chat: Whether the model answers messages rather than continues a text.
    """

    code: str
    prompt: str
    ends: Sequence[str]
    is_chat: bool

    def text(self) -> list[str]:
        """Return the lines of the card that show the prompt and the tokens that end a text."""
        if self.is_chat:
            heading, what_ends = "The model answers messages in its chat template. The prompt above is:", "An answer"
        else:
            heading, what_ends = "The prompt is:", "A text"
        lines: list[str] = []
        if self.prompt:
            lines += [heading, "", *_block("text", self.prompt)]
        if self.ends:
            quoted_ends = [f"`{end}`" for end in self.ends]
            lines += [f"{what_ends} ends with {' or '.join(quoted_ends)}.", ""]
        return lines


_EXAMPLE_MESSAGES = """messages = [{"role": "user", "content": "Hello!"}]"""
_EXAMPLE_TEXT = "Once upon a time"
_GENERATE = """answer = model.generate(**prompt, max_new_tokens=100)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))"""
_EXAMPLE_CODE = {  # by the library that opens the export, and whether the model answers messages
    ("transformers", True): f"""{_EXAMPLE_MESSAGES}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
{_GENERATE}""",
    ("transformers", False): f"""prompt = tokenizer("{_EXAMPLE_TEXT}", return_tensors="pt")
{_GENERATE}""",
    ("gguf", True): f"""{_EXAMPLE_MESSAGES}
answer = model.create_chat_completion(messages, max_tokens=100)
print(answer["choices"][0]["message"]["content"])""",
    ("gguf", False): f"""answer = model("{_EXAMPLE_TEXT}", max_tokens=100)
print(answer["choices"][0]["text"])""",
}


def usage_example(base: Base, model_info: ModelInfo | None, format: str) -> UsageExample:
    """Return the model card's example: a message to answer, or a text to continue.

    Args:
        base: The base.
        model_info: What the run knows about the user's data; None without a run.
        format: The export format.
    """
    tokenizer, template = base.tokenizer, chat_template_of(base, model_info)
    assert tokenizer is not None
    was_trained_on_texts = model_info is not None and model_info.kind != CONVERSATIONS
    if template is not None and not was_trained_on_texts:
        is_chat, prompt = True, ""
        with suppress(DataError):  # the template refuses this message; the card then shows no prompt
            prompt = template.render([{"role": "user", "content": "Hello!"}], add_prompt=True)
    else:
        is_chat, prompt = False, _EXAMPLE_TEXT
    end_tokens = generation_of(base, model_info).eos_token_id  # an integer, a list or None
    end_ids = () if end_tokens is None else as_tuple(end_tokens)
    library = "gguf" if format.startswith("gguf") else "transformers"
    return UsageExample(
        code=_EXAMPLE_CODE[library, is_chat],
        prompt=prompt,
        ends=[str(tokenizer.decode([token_id])) for token_id in end_ids],
        is_chat=is_chat,
    )


def _block(language: str, text: str) -> list[str]:
    """Return the lines of a fenced code block in Markdown.

    The fence has three backticks, or one more than the longest run of backticks in the text.
    """
    num_backticks = 3
    for run in re.findall("`+", text):
        num_backticks = max(num_backticks, len(run) + 1)
    fence = "`" * num_backticks
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A model card.

    Args:
        name: The user.
        base: The base.
        library: The library that opens the export, such as "transformers".
        form: Sentence on the format that was written.
        usage: Code that opens the model.
        model_info: What the run knows about the user's data and scores; None without a run.
        example: Example that generates a text; None without a tokenizer.
        lost: Scores of the model before and after an approximation, by name; empty for an exact export.
    """

    name: str
    base: Base
    library: str
    form: str
    usage: str
    model_info: ModelInfo | None
    example: UsageExample | None = None
    lost: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """Return the card as Markdown with the Hugging Face Hub's front matter."""
        body = [*self._head(), *self._data(), *self._metrics(), *self._licence()]
        return "\n".join([*self._front_matter(), "", *body, ""])

    def _front_matter(self) -> list[str]:
        """Return the front matter that the Hugging Face Hub reads."""
        licence, base_name = licence_of(self.base), name_of(self.base)
        is_random = base_name.startswith(RANDOM_BASE_PREFIX)  # such as "random:llama"
        is_on_hub = "/" in base_name and is_public(base_name) and not is_random
        lines = ["---"]
        if is_on_hub:
            lines.append(f"base_model: {base_name}")
        if licence:
            lines.append(f"license: {licence}")
        lines += [f"library_name: {self.library}", "tags:", f"- {TAG}", "- federated-learning", "---"]
        return lines

    def _head(self) -> list[str]:
        """Return the first lines of the card: title, summary, format and code."""
        how = "with adapters"
        if self.model_info is not None:
            how = f"with the method {self.model_info.method}"
            if self.model_info.users > 1:
                how += f", in a federation of {self.model_info.users} users"
        base_name = name_of(self.base)
        summary = f"The personal language model of one user, {self.name}: {base_name} fine-tuned {how}."
        lines = [f"# {self.name}", "", summary, "", self.form, "", "## Usage", ""]
        if self.example is None:
            return [*lines, *_block("python", self.usage)]
        code = f"{self.usage}\n{self.example.code}"
        return [*lines, *_block("python", code), *self.example.text()]

    def _data(self) -> list[str]:
        """Return the lines of the section on the amount of the user's data; empty if it is unknown."""
        if self.model_info is None or not self.model_info.counts:
            return []
        amounts = [f"{count:,} {key.replace('_', ' ')}" for key, count in self.model_info.counts.items()]
        note = "This folder contains none of it, only the trained weights."
        return ["## Data", "", f"The user's own {self.model_info.kind}: {', '.join(amounts)}. {note}", ""]

    def _metrics(self) -> list[str]:
        """Return the lines of the section with the model's scores; empty if there are none."""
        scores: dict[str, float] = {}
        if self.model_info is not None:
            scores.update(self.model_info.scores)
        scores.update(self.lost)
        if not scores:
            return []
        table_rows = [f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in scores.items()]
        return ["## Metrics", "", "| on the user's own data | |", "|---|---|", *table_rows, ""]

    def _licence(self) -> list[str]:
        licence = licence_of(self.base) or "the base's files do not name it; see the base model"
        return ["## Licence", "", f"The weights have the licence of the base model: {licence}."]


def name_of(base: Base) -> str:
    """Return the base's name for the model card: its name on the Hub, or the name of its local folder."""
    if base.name == GIVEN:  # a program has passed the model as an object
        return f"a {type(base.model).__name__} without a name"
    path = expand_home(base.name)
    is_local = path.exists() or path.is_absolute() or base.name.startswith(".")
    if not is_local:
        return base.name
    path = Path(os.path.normpath(path.absolute()))
    # In Hugging Face's cache, the path ends with "models--OWNER--NAME/snapshots/COMMIT".
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name


def licence_of(base: Base) -> str:
    """Return the licence in the base's model card, such as "apache-2.0"; empty if there is none."""
    if not isinstance(base.origin, Path):
        return ""
    card = base.origin / "README.md"
    if not card.is_file():
        return ""
    # A card begins with YAML between two lines "---".
    parts = card.read_text(encoding="utf-8", errors="replace").split("---")
    if len(parts) < 2:
        return ""
    _before, front_matter, *_after = parts
    match = re.search(r"^license:\s*([\w.-]+)\s*$", front_matter, re.MULTILINE)
    return match[1] if match else ""


CARD = "README.md"
FILE_LIST = "comingle_export.json"
"""File that lists what an export has written, so that the next export replaces these files only."""

_KNOWN_FILES = {
    *(CARD, FILE_LIST, "config.json", "generation_config.json", "adapter_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "model.gguf"),
    *("adapter.gguf", "Modelfile"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""Files that exports write; used for exports of older versions, which have no list."""


def check_target(folder: Path, *, force: bool) -> None:
    """Raise an error if an export may not be written to a folder.

    Args:
        folder: The folder, which need not exist.
        force: Whether an existing export may be replaced.

    Raises:
        RunError: The path is a file, the folder exists without ``force``, or it has files that no export has written.
    """
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; allowed for --to: a folder")
    if not folder.exists():
        return
    is_empty = not any(folder.iterdir())
    if is_empty:
        return
    if not force:
        raise RunError(f"{folder}: exists; --force replaces an export, --to names another folder")
    if not _is_export(folder):
        raise RunError(f"{folder}: is not an exported model, so --force does not touch it; use another --to")
    other_file = _file_not_exported(folder)
    if other_file is not None:
        reason = f"has a file that export did not write, {other_file!r}, so --force does not touch it"
        raise RunError(f"{folder}: {reason}; move the file, or use another --to")


@contextmanager
def replace_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty draft folder, to which the caller writes; then put it in the place of ``folder``.

    If the caller raises an error, ``folder`` stays as it was. Only the owner can read the new folder, since the weights
    were trained on private text.

    Args:
        folder: The folder to create or to replace.
        force: Whether an existing export may be replaced.

    Raises:
        RunError: An export may not be written to the folder (:func:`check_target`), or the disk cannot be written to.
    """
    from safetensors import SafetensorError

    check_target(folder, force=force)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{DRAFT}")
    outgoing = draft.with_name(f"{draft.name}.old")
    try:
        with convert_disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir(mode=0o700)
            yield draft
            write_json(draft / FILE_LIST, {"written": sorted(_relative_paths(draft))})
            check_target(folder, force=force)  # the folder may have changed since the first check
            if folder.exists():
                folder.rename(outgoing)
            draft.rename(folder)
    except (SafetensorError, OSError) as error:
        is_error_of_system = isinstance(error, OSError) and error.errno is not None
        if is_error_of_system:
            raise
        # A library has raised its own error for a failed write.
        raise RunError(f"{folder}: cannot be written to: {error}") from None
    finally:
        if outgoing.exists() and not folder.exists():  # the new folder could not be put into its place
            outgoing.rename(folder)
        for leftover in (draft, outgoing):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_export(folder: Path) -> bool:
    """Return whether a folder has a model card with the tag of exports."""
    card = folder / CARD
    return card.is_file() and f"- {TAG}" in card.read_text(encoding="utf-8", errors="replace").splitlines()


def _relative_paths(folder: Path) -> set[str]:
    """Return the relative paths of all files, links and folders in a folder, at any depth."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _file_not_exported(folder: Path) -> str | None:
    """Return a file in an export's folder that no export has written, the first by name; None if there is none."""
    try:
        file_list = json.loads((folder / FILE_LIST).read_text(encoding="utf-8"))
        exported = {FILE_LIST, *file_list["written"]}
    except (OSError, ValueError, KeyError, TypeError):  # the list is damaged, or an older version wrote none
        exported = {path.name for path in folder.iterdir() if path.name in _KNOWN_FILES or _SHARD.fullmatch(path.name)}
    return min(_relative_paths(folder) - exported, default=None)


def validate_with_gates(source: Source) -> tuple[float, list[Float[Tensor, " experts"]]]:
    """Return the perplexity of a model on its user's validation data, and the mean gate of each expert.

    A gate is the weight of an expert for a token.

    Returns:
        The perplexity, and for each layer the mean gates of the experts. The list is empty for a mixture of clusters'
        LoRAs, which has no gates.
    """
    model = source.model
    if not isinstance(model, AdaptedModel):  # a mixture of clusters' LoRAs
        return perplexity(source, _losses_of_user(source)), []
    present = model.adapters.present[source.row]  # (experts,): whether the user has the expert
    if not routing.routed(model.adapters):  # without routers, experts have equal weights
        num_experts, num_layers = int(present.sum()), len(model.adapters.experts)
        equal_gates = torch.full((num_experts,), 1 / num_experts)
        return perplexity(source, _losses_of_user(source)), [equal_gates] * num_layers
    # For each batch, `validate` calls the function of losses, which fills this list, and then `gates_of_batch`.
    recorded_gates: list[Tensor] = []
    assert source.model_info is not None

    def gates_of_batch() -> Tensor:
        """Return the gates of the tokens whose losses were computed last, ``(layers, windows, ...)``."""
        return torch.cat(recorded_gates, 1)

    # Compiled code does not record gates.
    with routing.record_gates(model.adapters), without_compiling():
        score = source.model_info.validate(_losses_of_user(source, recorded_gates), gates_of_batch)
    mean_gates_by_layer = []
    for mean_gates in score.expert_scores:  # of one layer: the mean gate of each expert, present or not
        mean_gates_by_layer.append(torch.tensor(mean_gates)[present])
    return perplexity_of(score.mean_loss), mean_gates_by_layer


def perplexity(source: Source, losses: Callable[[Sequence[int], Tensor], Tensor]) -> float:
    """Return the perplexity of the user's validation data; of conversations only responses count.

    Args:
        source: The user's model, with its data.
        losses: Computes the loss of each token, by the user's model or by an exported one.
    """
    assert source.model_info is not None
    no_gates = None  # `validate` then averages losses only, not the gates of experts
    score = source.model_info.validate(losses, no_gates)
    return perplexity_of(score.mean_loss)


def _losses_of_user(
    source: Source, recorded_gates: list[Tensor] | None = None
) -> Callable[[Sequence[int], Tensor], Tensor]:
    """Return a function that computes the loss of each token by the user's model, to score it on validation data.

    The function takes users' numbers, which it ignores, and windows of tokens ``(..., n)``; it returns the losses of
    all tokens but the first, ``(..., n - 1)``.

    Args:
        source: The user's model.
        recorded_gates: A list in which each call of the function stores the gates of its tokens, within
            :func:`comingle.models.routing.record_gates`. None to store no gates.
    """
    model = source.model

    def losses(_users: Sequence[int], windows: Tensor) -> Tensor:  # there is only one user
        if recorded_gates is not None:
            recorded_gates.clear()
        losses_of_windows = []
        for window in windows.to(model.device).unsqueeze(1):  # the new axis of length 1 is that of users
            (losses_of_window,) = model.predict(source.tensors, [source.row], window)
            losses_of_windows.append(losses_of_window)
            if recorded_gates is not None:
                assert isinstance(model, AdaptedModel)
                recorded_gates.append(routing.gates(model.adapters))  # of the last `predict`
        return torch.stack(losses_of_windows)

    return losses


def losses_of(network: PreTrainedModel) -> Callable[[Sequence[int], Tensor], Tensor]:
    """Return a function that computes the loss of each token by a network of transformers, to score an export.

    It takes users' numbers, which it ignores, and windows of tokens ``(..., n)``; it returns the losses of all
    tokens but the first, ``(..., n - 1)``.

    Padding and tokens outside a conversation's responses have negative numbers in the windows, and a loss of 0. For
    padding the number is ``PAD`` = -1, for the others it is lower.
    """

    def losses(_users: Sequence[int], windows: Tensor) -> Tensor:  # all users share the network
        targets = windows[..., 1:].clamp(min=PAD)  # every negative number becomes PAD, which the loss ignores
        logits = network(input_ids=inputs_of(windows).flatten(0, 1), use_cache=False).logits
        token_losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="none"
        )
        return token_losses.view(targets.shape)

    return losses


FORMATS = ("transformers", "peft", "gguf", "gguf-adapter", "merged-approximately")
GGUF_FILE, GGUF_ADAPTER_FILE, MODELFILE = "model.gguf", "adapter.gguf", "Modelfile"
_PROBE_TOKENS = 16
"""Number of tokens on which logits of the exported network are compared with those of the user's model."""


def export_personal(
    personal: PersonalModel, folder: Path, *, format: str, dtype: str | None, force: bool, repository: str
) -> Exported:
    """Export a user's model to a folder; implements ``PersonalModel.export``.

    Args:
        personal: The model to export.
        folder: Where to write.
        format: One of :data:`FORMATS`.
        dtype: Number format of the weights; None for the base's.
        force: Whether to replace an existing export.
        repository: Name on the Hugging Face hub to which the folder will be uploaded; empty for none.

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
        model_info=personal.model_info,
        logits=personal.logits,
    )
    with torch.no_grad():
        return export(source, folder, format=format, dtype=dtype, force=force, repository=repository)


def export(source: Source, folder: Path, *, format: str, dtype: str | None, force: bool, repository: str) -> Exported:
    """Write a user's model, its tokenizer and a model card to a folder, in a format of another program.

    Args:
        source: The user's model.
        folder: Where to write.
        format: One of :data:`FORMATS`.
        dtype: Number format of the weights; None for the base's.
        force: Whether to replace an existing export.
        repository: Name on the Hugging Face hub to which the folder will be uploaded; empty for none.

    Raises:
        DataError: The model cannot be exported in this format; the message names the reason and a format that works.
        RunError: The format or number format is unknown, or the folder cannot be written to.
    """
    number_format = _number_format(source, format, dtype)
    check_target(folder, force=force)
    write = {
        "peft": _write_peft_folder,
        "gguf": _write_gguf_folder,
        "gguf-adapter": _write_gguf_adapter_folder,
        "transformers": _write_transformers,
        "merged-approximately": _write_approximate,
    }[format]
    base = source.model.base
    with replace_folder(folder, force=force) as draft, quiet_transformers():
        exported, library, code_template = write(source, draft, number_format)
        tokenizer = _tokenizer_with_template(base, source.model_info)
        example = None
        if tokenizer is not None:
            example = usage_example(base, source.model_info, format)
            if not format.startswith("gguf"):  # GGUF files of models contain the tokenizer
                tokenizer.save_pretrained(draft)
        card = Card(
            name=source.name,
            base=base,
            library=library,
            form=exported.form,
            usage=_usage(code_template, folder, base, repository),
            example=example,
            model_info=source.model_info,
            lost=exported.lost,
        )
        (draft / CARD).write_text(card.text(), encoding="utf-8")
    return replace(exported, folder=folder, format=format)


def _usage(code_template: str, folder: Path, base: Base, repository: str) -> str:
    """Return the code that opens an export, for its model card.

    Args:
        code_template: The code, with placeholders for folder and base.
        folder: The folder of the export.
        base: The base.
        repository: Name on the Hugging Face hub, which libraries accept in place of a folder; empty for none.
    """
    code = code_template.format(folder=repository or folder.name, base=name_of(base))
    if repository and code_template in (_OPEN_GGUF, _OPEN_GGUF_ADAPTER):  # llama.cpp reads files
        return f"# In a terminal: hf download {repository} --local-dir {repository}\n{code}"
    return code


def _number_format(source: Source, format: str, dtype: str | None) -> str:
    """Return the number format of the exported weights, such as "bfloat16".

    Args:
        source: The model to export.
        format: Export format, one of :data:`FORMATS`.
        dtype: The requested number format; None for that of the base, or float32 if the export format does not have it.

    Raises:
        RunError: The export format is unknown, or does not have the requested number format.
    """
    if format not in FORMATS:
        raise RunError(f"--format: got {format!r}; allowed: {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}")
    formats_of_gguf = {"gguf": (*GGUF_WEIGHT_TYPES, *LLAMA_CPP_TYPES), "gguf-adapter": tuple(GGUF_ADAPTER_TYPES)}
    number_formats = formats_of_gguf.get(format, tuple(DTYPES))
    if dtype is None:
        base_dtype = str(source.model.base.dtype).removeprefix("torch.")
        return base_dtype if base_dtype in number_formats else "float32"
    if dtype not in number_formats:
        raise RunError(f"--dtype: got {dtype!r}; allowed for {format}: {', '.join(number_formats)}")
    return dtype


# -------------------------------------------------------------------- formats

_Written = tuple[Exported, str, str]
"""The written export, the library that opens it, and code that opens it with placeholders for folder and base."""

_OPEN_TRANSFORMERS = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""

_OPEN_PEFT = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}")
model.generation_config = GenerationConfig.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""

_OPEN_GGUF = f"""from llama_cpp import Llama

model = Llama("{{folder}}/{GGUF_FILE}")
# In a terminal: llama-cli -m "{{folder}}/{GGUF_FILE}" -p "Once upon a time" -n 40
# With Ollama: ollama create NAME -f "{{folder}}/{MODELFILE}" """

_OPEN_GGUF_ADAPTER = f"""from llama_cpp import Llama

model = Llama("BASE.gguf", lora_path="{{folder}}/{GGUF_ADAPTER_FILE}")  # BASE.gguf is {{base}}
# In a terminal: llama-cli -m BASE.gguf --lora "{{folder}}/{GGUF_ADAPTER_FILE}" -p "Once upon a time" -n 40"""


def _write_transformers(source: Source, draft: Path, number_format: str) -> _Written:
    """Write a network of transformers that computes the same as the user's model.

    Args:
        source: The user's model.
        draft: Folder to which the export is written before it replaces the final one.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.
    """
    network, description = _exact_network(source)
    _save(source, cast_parameters(network, DTYPES[number_format]), draft)
    return _exported(draft, f"{description} Weights: {number_format}."), "transformers", _OPEN_TRANSFORMERS


def _write_gguf_folder(source: Source, draft: Path, number_format: str) -> _Written:
    """Write a GGUF file for llama.cpp.

    Args:
        source: The user's model.
        draft: Folder to which the export is written before it replaces the final one.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: llama.cpp cannot represent the model, or the base has no tokenizer.
    """
    base = source.model.base
    becomes_sparse_mixture = base.model.config.model_type in SPARSE and is_mixture(source)
    if not becomes_sparse_mixture:  # else `write_gguf` checks the new network's configuration, not the base's
        problem = why_no_gguf(base.model.config)
        if problem:
            raise DataError(f"user {source.name!r}: {problem}; --format transformers has no such limit")
    if base.tokenizer is None:
        raise DataError(f"user {source.name!r}: base {name_of(base)} has no tokenizer, which a GGUF file needs")
    network, description = _exact_network(source)
    network.generation_config = generation_of(base, source.model_info)
    tokenizer = _tokenizer_with_template(base, source.model_info)
    assert tokenizer is not None
    weight_type = GGUF_WEIGHT_TYPES.get(number_format, "F32")
    end_token = turn_end(base, source.model_info)
    path = draft / GGUF_FILE
    write_gguf(path, source.name, network, tokenizer, weight_type, turn_end=end_token)
    if number_format in LLAMA_CPP_TYPES:
        quantize_gguf(path, LLAMA_CPP_TYPES[number_format])
    _write_modelfile(source, draft, f"./{GGUF_FILE}", "")
    form = f"{description} Saved as {GGUF_FILE} for llama.cpp. Weights: {number_format}."
    return _exported(draft, form), "gguf", _OPEN_GGUF


def _write_gguf_adapter_folder(source: Source, draft: Path, number_format: str) -> _Written:
    """Write the user's model as a LoRA adapter for llama.cpp, without the base.

    Args:
        source: The user's model.
        draft: Folder to which the export is written before it replaces the final one.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: The model is not a single LoRA, or llama.cpp does not support the base.
    """
    base = source.model.base
    rank, factors = lora_factors(_changes_of_one_lora(source))
    weight_type = GGUF_ADAPTER_TYPES[number_format]
    write_gguf_adapter(draft / GGUF_ADAPTER_FILE, source.name, base.model.config, rank, factors, weight_type)
    base_name = name_of(base)
    _write_modelfile(source, draft, "./BASE.gguf", f"./{GGUF_ADAPTER_FILE}")
    description = f"One LoRA of rank {rank} for the base {base_name}, saved as {GGUF_ADAPTER_FILE} for llama.cpp."
    form = f"{description} The base is not in this folder. Weights: {number_format}."
    return _exported(draft, form), "gguf", _OPEN_GGUF_ADAPTER


def _write_modelfile(source: Source, draft: Path, model: str, adapter: str) -> None:
    """Write the file from which ``ollama create`` makes the user's model.

    Args:
        source: The user's model.
        draft: Folder to which the export is written before it replaces the final one.
        model: Path of the model's GGUF file.
        adapter: Path of a LoRA adapter; empty for none.
    """
    base = source.model.base
    tokenizer = _tokenizer_with_template(base, source.model_info)
    render: Render | None = None
    ends: Sequence[str] = ()
    if tokenizer is not None:
        example = usage_example(base, source.model_info, "gguf")
        ends = example.ends
        if example.is_chat:
            begin = str(tokenizer.bos_token) if base.begin is not None else ""
            render = partial(_render_without, begin, ChatTemplate(tokenizer))
    write_modelfile(draft / MODELFILE, source.name, model, adapter, render, ends)


def _render_without(
    begin: str, template: ChatTemplate, messages: Sequence[Mapping[str, str]], *, add_prompt: bool
) -> str:
    """Return a conversation as a template renders it, without the begin-of-text token, which llama.cpp adds itself.

    Args:
        begin: The begin-of-text token; empty if there is none.
        template: The chat template.
        messages: The conversation.
        add_prompt: Append the text that begins a response.
    """
    return template.render(list(messages), add_prompt=add_prompt).removeprefix(begin)


def _write_peft_folder(source: Source, draft: Path, number_format: str) -> _Written:
    """Write the user's model as a LoRA adapter for PEFT, without the base.

    Args:
        source: The user's model.
        draft: Folder to which the export is written before it replaces the final one.
        number_format: Number format of the weights, such as "bfloat16".

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: The model cannot be written as a single LoRA, for example if it is a mixture of experts.
    """
    base = source.model.base
    base_name = name_of(base)
    weight_changes = _changes_of_one_lora(source)
    rank = write_peft(draft, base.model, base_name, weight_changes, DTYPES[number_format])
    generation_config = generation_of(base, source.model_info)
    generation_config.save_pretrained(draft)
    description = f"One LoRA of rank {rank} for the base {base_name}, which is not in this folder."
    exported = _exported(draft, f"{description} Weights: {number_format}.")
    return exported, "peft", _OPEN_PEFT


def _changes_of_one_lora(source: Source) -> list[Change]:
    """Return the changes of the base's weights by a user's model that is a single LoRA.

    Raises:
        DataError: It is not, for example because it mixes experts.
    """
    reason = why_not_plain(source)
    if reason:
        raise DataError(f"user {source.name!r}: its model is not one LoRA: {reason}; {format_hint(source)}")
    return plain_changes(source)


def _write_approximate(source: Source, draft: Path, number_format: str) -> _Written:
    """Write a network with the base's architecture that approximates a mixture of experts.

    The experts' LoRAs are merged into the base's weights. Each expert's LoRA is multiplied by its mean gate on the
    user's validation data, instead of a gate for each token. The perplexity of both models on this data is recorded.

    Args:
        source: The user's model.
        draft: Folder to which the export is written before it replaces the final one.
        number_format: Number format of the weights.

    Returns:
        The written export, the name of the library that opens it, and code that opens it.

    Raises:
        DataError: There is no validation data.
    """
    if source.model_info is None:
        raise DataError(f"user {source.name!r}: the model has no validation data; open the user's run")
    perplexity_of_mixture, mean_gates_by_layer = validate_with_gates(source)
    changes = []
    for change in changes_of(source):
        if change.key:  # "gate", "up" or "down": a linear layer of the experts
            change = change.reweighted(mean_gates_by_layer[change.layer])
        changes.append(change)
    network = cast_parameters(plain_network(source.model.base.model, changes), DTYPES[number_format])
    perplexities = {
        "validation_perplexity_of_the_mixture": perplexity_of_mixture,
        "validation_perplexity_of_this_model": perplexity(source, losses_of(network)),
    }
    _save(source, network, draft)
    if is_mixture(source):
        relation = "that replaces a mixture of experts, with gates fixed at their mean"
    else:
        relation = "equal to the trained one, which has no mixture"
    exported = _exported(draft, f"A plain model {relation}. Weights: {number_format}.", perplexities)
    return exported, "transformers", _OPEN_TRANSFORMERS


def _save(source: Source, network: PreTrainedModel, draft: Path) -> None:
    """Write the configuration and weights of a network of transformers to a folder, with its generation settings.

    Args:
        source: The user's model, which has the settings: tokens that end a text, and sampling.
        network: The exported network; its generation settings are replaced.
        draft: Folder to which the export is written before it replaces the final one.
    """
    network.generation_config = generation_of(source.model.base, source.model_info)
    network.save_pretrained(draft)
    if needs_eager_experts(network.config):
        # transformers reads this key of config.json but does not write it.
        path = draft / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["experts_implementation"] = "eager"
        write_json(path, config)


def _tokenizer_with_template(base: Base, model_info: ModelInfo | None) -> PreTrainedTokenizerBase | None:
    """Return the base's tokenizer with the chat template of the user's model; None if the base has no tokenizer.

    Args:
        base: The base model.
        model_info: What the run knows about the training data; None without a run.
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
    """Return a description of the written files; :func:`export` then sets the format and the final folder."""
    return Exported(folder=draft, format="", form=form, lost=lost or {})


def _exact_network(source: Source) -> tuple[PreTrainedModel, str]:
    """Return a network of transformers that computes the same as the user's model, and a description for the card.

    Raises:
        DataError: No architecture of transformers supports the user's mixture of experts.
        BaseModelError: The network's logits differ from those of the user's model.
    """
    base = source.model.base
    if is_mixture(source):
        network, description = _mixture_network(source)
    else:
        network = plain_network(base.model, plain_changes(source))
        description = f"{type(network).__name__} with the user's adapters merged into its weights."
    multiples_of_7 = torch.arange(_PROBE_TOKENS).unsqueeze(0) * 7  # [[0, 7, 14, ...]], arbitrary tokens
    arbitrary_tokens = multiples_of_7 % base.model.config.vocab_size
    user_logits = source.logits(arbitrary_tokens).cpu()
    exported_logits = network(input_ids=arbitrary_tokens).logits
    check_same_logits(source.name, user_logits, exported_logits, base.dtype)
    return network, description


def _mixture_network(source: Source) -> tuple[PreTrainedModel, str]:
    """Return a user's mixture of experts as a network of transformers, and a description for the card.

    Raises:
        DataError: No architecture of transformers supports the mixture.
    """
    base = source.model.base
    mixing = unsupported_mixing(source)
    if mixing:
        raise DataError(
            f"user {source.name!r}: its experts are {mixing}, which no architecture of transformers supports; "
            f"{format_hint(source)}"
        )
    check_sparse(source.name, base.model.config)
    routing = routing_of(source)
    network = sparse_network(base.model, changes_of(source), routing)
    description = (
        f"{type(network).__name__} with {len(routing.gates[0])} experts, of which {routing.top_k} are chosen for "
        "each token; every expert is the base's MLP with that expert's LoRA merged in."
    )
    return network, description


# -------------------------------------------------------------------- the hub


def check_push(repository: str, *, public: bool, force: bool) -> str:
    """Return the full name of the repository to which an export can be uploaded, without changing anything on the hub.

    Args:
        repository: Name on the Hugging Face hub, such as "owner/model"; without an owner, that of the token's owner.
        public: Whether everyone may read the model.
        force: Whether an earlier export in the repository may be replaced.

    Raises:
        RunError: The name is not one of the hub's, the hub cannot be reached, there is no valid token, the repository
            has files, or it is public although the model is not.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    where = f"--push {repository}"
    if not is_public(repository) or repository.startswith(RANDOM_BASE_PREFIX):
        raise RunError(f"--push: got {repository!r}; allowed: a name on the Hugging Face hub, OWNER/NAME")
    problem = why_no_hub()
    if problem:
        raise RunError(f"{where}: {problem}; export with --to FOLDER, and push when the hub can be reached")
    hub = HfApi()
    with _hub_errors(where):
        owner = hub.whoami()["name"]
        repository = repository if "/" in repository else f"{owner}/{repository}"
        try:
            found = hub.model_info(repository)
        except RepositoryNotFoundError:
            return repository
    files = {file.rfilename for file in found.siblings or ()} - {".gitattributes"}
    if files and not force:
        raise RunError(f"{where}: exists; --force replaces an earlier export")
    if files and FILE_LIST not in files:
        raise RunError(f"{where}: got {min(files)!r} without {FILE_LIST}; allowed with --force: an earlier export")
    if not (found.private or public):
        raise RunError(f"{where}: is public; allowed: a private repository, or --public")
    return repository


def push(folder: Path, repository: str, *, public: bool) -> str:
    """Upload an export to the Hugging Face hub, and return its address there.

    Files of an earlier export are deleted in the same commit; the repository's history keeps them.

    Args:
        folder: The folder of the export.
        repository: The full name that :func:`check_push` has returned; the repository is created if there is none.
        public: Whether everyone may read a repository that is created.

    Raises:
        RunError: The hub has not accepted the export.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    hub = HfApi()
    with _hub_errors(f"--push {repository}"):
        url = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, delete_patterns=["*"], commit_message="Export from comingle"
        )
    return str(url)


@contextmanager
def _hub_errors(where: str) -> Iterator[None]:
    """Raise errors of the hub's client as a :class:`RunError` of one line that begins with ``where``."""
    try:
        yield
    except Exception as error:  # includes errors of the client's HTTP library, which change between versions
        raise RunError(f"{where}: {describe_hub_error(error, 'uploading')}") from error
