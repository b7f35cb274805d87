"""What the training verbs share beyond options; imports torch, so only from inside a verb."""

from __future__ import annotations

from rich.text import Text

from comingle.kinds.base import Materials
from comingle.terminal import errors, words


def warn_overlaps(materials: Materials) -> None:
    """Say which users' held-out text also occurs in their training text."""
    for overlap in materials.overlaps():
        told = (
            f"user {overlap.user}: {overlap.valid} of {overlap.valid_documents} validation and "
            f"{overlap.test} of {overlap.test_documents} test documents also occur in the training text"
        )
        errors.print(Text.assemble(("warning: ", "yellow"), words(told)), highlight=False, soft_wrap=True)
