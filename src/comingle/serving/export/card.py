"""The model card of an exported folder: what it is, measured how, under whose licence; none of anybody's text."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from comingle.models.base import Base
from comingle.models.generation import as_tuple
from comingle.models.loading import GIVEN, is_public
from comingle.models.personal import CONVERSATIONS, About, chat_template_of, generation_of
from comingle.models.random_bases import PREFIX
from comingle.utils.errors import DataError
from comingle.utils.records import expand_home

TAG = "comingle"
"""By which an exported folder is known again."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """A worked prompt: code behind the lines that open a model, the prompt as the model reads it, and its ends."""

    code: str
    prompt: str
    ends: Sequence[str]
    turns: bool

    def text(self) -> list[str]:
        """Return the lines of the card behind the code."""
        form = "The model answers messages in its chat template. The prompt above is" if self.turns else "The prompt is"
        what = "An answer" if self.turns else "A text"
        ends = [f"{what} ends with {' or '.join(f'`{end}`' for end in self.ends)}.", ""] if self.ends else []
        return [f"{form}:", "", *_block("text", self.prompt), *ends] if self.prompt else ends


_MESSAGES = """messages = [{"role": "user", "content": "Hello!"}]"""
_TEXT = "Once upon a time"
_GENERATE = """answer = model.generate(**prompt, max_new_tokens=100)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))"""
_CODE = {
    ("transformers", True): f"""{_MESSAGES}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
{_GENERATE}""",
    ("transformers", False): f"""prompt = tokenizer("{_TEXT}", return_tensors="pt")
{_GENERATE}""",
    ("gguf", True): f"""{_MESSAGES}
answer = model.create_chat_completion(messages, max_tokens=100)
print(answer["choices"][0]["message"]["content"])""",
    ("gguf", False): f"""answer = model("{_TEXT}", max_tokens=100)
print(answer["choices"][0]["text"])""",
}


def asking_of(base: Base, about: About | None, format: str) -> Asking:
    """Return how an exported model is asked: in turns if it was trained on them, else by a text to continue."""
    tokenizer, template = base.tokenizer, chat_template_of(base, about)
    assert tokenizer is not None
    turns = template is not None and (about is None or about.kind == CONVERSATIONS)
    prompt = "" if turns else _TEXT
    if turns and template is not None:
        with suppress(DataError):  # a template that wants other roles
            prompt = template.render([{"role": "user", "content": "Hello!"}], asks=True)
    ends = generation_of(base, about).eos_token_id
    return Asking(
        code=_CODE["gguf" if format == "gguf" else "transformers", turns],
        prompt=prompt,
        ends=[str(tokenizer.decode([end])) for end in (() if ends is None else as_tuple(ends))],
        turns=turns,
    )


def _block(language: str, text: str) -> list[str]:
    """Return a fenced block, whose fence is longer than those in its text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A model card. ``form`` says what was written, ``usage`` opens it, ``lost`` is what the form costs."""

    name: str
    base: Base
    library: str
    form: str
    usage: str
    about: About | None
    asks: Asking | None = None
    lost: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """As Markdown with the front matter that the hub reads."""
        return "\n".join([*self._front(), "", *self._head(), *self._data(), *self._measured(), *self._end(), ""])

    def _front(self) -> list[str]:
        licence = licence_of(self.base)
        given = [f"license: {licence}"] if licence else []
        name = name_of(self.base)
        public = [f"base_model: {name}"] if "/" in name and is_public(name) and not name.startswith(PREFIX) else []
        return [
            "---",
            *public,
            *given,
            f"library_name: {self.library}",
            "tags:",
            f"- {TAG}",
            "- federated-learning",
            "---",
        ]

    def _head(self) -> list[str]:
        made = f"by the method {self.about.method}" if self.about else "with adapters"
        others = f", in a federation of {self.about.users} users" if self.about and self.about.users > 1 else ""
        first = f"The personal language model of one user, {self.name}: {name_of(self.base)} fine-tuned {made}{others}."
        code = self.usage if self.asks is None else f"{self.usage}\n{self.asks.code}"
        shown = [] if self.asks is None else self.asks.text()
        return [f"# {self.name}", "", first, "", self.form, "", "## How to ask", "", *_block("python", code), *shown]

    def _data(self) -> list[str]:
        if self.about is None or not self.about.counts:
            return []
        told = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in self.about.counts.items())
        whose = "Nothing of it is in this folder but what the weights have learned."
        return ["## Data", "", f"The user's own {self.about.kind}: {told}. {whose}", ""]

    def _measured(self) -> list[str]:
        scores = {**(self.about.scores if self.about else {}), **self.lost}
        if not scores:
            return []
        rows = [f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in scores.items()]
        return ["## Measured", "", "| on the user's own data | |", "|---|---|", *rows, ""]

    def _end(self) -> list[str]:
        licence = licence_of(self.base)
        told = f"that of the base, {licence}" if licence else "that of the base, which its files do not name; see there"
        return ["## Licence", "", f"Of the weights: {told}."]


def name_of(base: Base) -> str:
    """Return the base's name, without its place on this machine."""
    path = expand_home(base.name)
    if base.name == GIVEN:
        return f"a {type(base.model).__name__} without a name"
    if not (path.exists() or path.is_absolute() or base.name.startswith(".")):
        return base.name
    path = Path(os.path.normpath(path.absolute()))
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):  # the hub's cache
        return path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return path.name


def licence_of(base: Base) -> str:
    """What the base's own card says, in the hub's spelling; empty where there is none."""
    card = base.origin / "README.md" if isinstance(base.origin, Path) else None
    if card is None or not card.is_file():
        return ""
    front = card.read_text(encoding="utf-8", errors="replace").split("---")[1:2]
    found = re.search(r"^license:\s*([\w.-]+)\s*$", front[0], re.MULTILINE) if front else None
    return found[1] if found else ""
