"""What a run would refuse of conversations that lie on this machine, found before its costs are counted."""

from __future__ import annotations

from typing import Any

from comingle.config import Recipe
from comingle.kinds.conversations.encoding import check_small, encode_users, enough
from comingle.kinds.conversations.reading import read_users
from comingle.kinds.conversations.section import ConversationsSection
from comingle.kinds.text.checking import tokenizer_here
from comingle.models.chat_templates import ChatTemplate


def count_here(recipe: Recipe, data: ConversationsSection, validates: bool) -> tuple[dict[str, int], set[str]]:
    """How many conversations each user trains on, and who would be left out, who is not among them.

    Where the base's tokenizer is not here, none counts as too long.

    Raises:
        DataError: they cannot be read, or a run would refuse them.
    """
    read, tokenizer = read_users(data, recipe.data_seed), tokenizer_here(recipe.base)
    users = (
        list[Any](read)
        if tokenizer is None
        else encode_users(data, read, ChatTemplate(tokenizer), recipe.training.context)
    )
    users, small = enough(data, users, validates)
    check_small(users, needs_validation=validates)
    return {user.name: len(user.train) for user in users}, set(small)
