"""The chat template and the end tokens of a user's model, for chats, the server and exports."""

from __future__ import annotations

import copy

from comingle.data.templates import ChatTemplate
from comingle.models.about import About
from comingle.models.base import Base
from comingle.models.pretrained import GenerationConfig
from comingle.models.sampling import as_tuple
from comingle.utils.errors import DataError

CONVERSATIONS = "conversations"


def chat_template_of(base: Base, about: About | None) -> ChatTemplate | None:
    """Return the template that a model answers in: its base's, or the plain one if it was trained on conversations."""
    if base.tokenizer is None:
        return None
    template = ChatTemplate(base.tokenizer, base.date)
    return template if template.own or (about is not None and about.kind == CONVERSATIONS) else None


def chat_ends(base: Base) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's, the template's, and those of the base's own settings.

    Raises:
        DataError: the base's template refuses a conversation of one turn, its tokenizer has no end of text, or the
            end has no row in the embedding.
    """
    assert base.tokenizer is not None
    ends = ChatTemplate(base.tokenizer, base.date).ends()
    base.require_rows(ends, "the end of a response")
    return tuple(dict.fromkeys([*ends, *base.ends]))


def turn_end(base: Base, about: About | None) -> int | None:
    """Return the token that ends a response in the template; None without a template or such a token."""
    template = chat_template_of(base, about)
    try:
        return next(reversed(template.ends()), None) if template is not None else None
    except DataError:  # of a template that was never used in training
        return None


def generation_of(base: Base, about: About | None) -> GenerationConfig:
    """Return the settings for an exported model, which ends its texts where the user's model does."""
    found = copy.deepcopy(base.model.generation_config)
    assert found is not None
    known = () if found.eos_token_id is None else as_tuple(found.eos_token_id)
    last = turn_end(base, about)
    ends = list(dict.fromkeys([*known, *base.ends, *(() if last is None else (last,))]))
    found.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    return found
