"""The model card of an exported folder: what it is, measured how, under whose licence; none of anybody's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from comingle.models.about import About
from comingle.models.base import Base
from comingle.models.sources import is_public
from comingle.records import expand_home

TAG = "comingle"
"""By which an exported folder is known again."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What stands in a model card. ``form`` says what was written and how it is opened, ``losses`` what it costs."""

    name: str
    base: Base
    library: str
    form: str
    usage: str
    about: About | None
    lost: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """As Markdown with the front matter that the hub reads."""
        return "\n".join([*self._front(), "", *self._head(), *self._data(), *self._measured(), *self._end(), ""])

    def _front(self) -> list[str]:
        licence = licence_of(self.base)
        given = [f"license: {licence}"] if licence else []
        name = name_of(self.base)
        public = [f"base_model: {name}"] if "/" in name and is_public(name) else []
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
        return [f"# {self.name}", "", first, "", self.form, "", "```python", self.usage, "```", ""]

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
    """What the base is called, without the way to it on this machine."""
    return Path(base.name).name if expand_home(base.name).exists() else base.name


def licence_of(base: Base) -> str:
    """What the base's own card says, in the hub's spelling; empty where there is none."""
    card = base.origin / "README.md" if isinstance(base.origin, Path) else None
    if card is None or not card.is_file():
        return ""
    front = card.read_text(encoding="utf-8", errors="replace").split("---")[1:2]
    found = re.search(r"^license:\s*([\w.-]+)\s*$", front[0], re.MULTILINE) if front else None
    return found[1] if found else ""
