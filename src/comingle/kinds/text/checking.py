"""What a run would refuse of text that lies on this machine, found before its costs are counted."""

from __future__ import annotations

import os

from comingle.config import Recipe
from comingle.data.pack import check, find_shortage, pack, with_validation
from comingle.data.partition import UserText, mix_held_out
from comingle.kinds.text.reading import read_users, token_limits
from comingle.kinds.text.section import TextSection
from comingle.models.chat_templates import begin_of
from comingle.models.folders import load_tokenizer
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.models.random_bases import PREFIX, byte_tokenizer
from comingle.utils.names import is_named
from comingle.utils.records import expand_home

ABSENT_NOTE = "Some of the users' text is not here, so nobody's text is checked: a run may refuse it."


def check_texts(recipe: Recipe, data: TextSection, validates: bool) -> tuple[set[str], str]:
    """Whether users named in the recipe have the text that a run needs, where it is here: who would be left out, and
    a note where nothing could be checked. Text of demo users, of the hub and of data sets is not looked at.

    Raises:
        DataError: text that a run would refuse.
        RecipeError: a limit for somebody who is no user.
    """
    here, note = found_here(data)
    if not here:
        return set(), note
    texts, tokenizer = read_users(data, recipe.data_seed), tokenizer_here(recipe.base)
    return set() if tokenizer is None else _check_lengths(recipe, data, texts, tokenizer, validates), ""


def found_here(data: TextSection) -> tuple[bool, str]:
    """Whether text is looked at, which is here and of users named one by one; else maybe a note."""
    sources = _sources(data)
    if not sources or any(is_named(source) for source in sources):
        return False, ""
    here = all(os.path.exists(os.path.expanduser(source)) for source in sources)
    return here, "" if here else ABSENT_NOTE


def _check_lengths(
    recipe: Recipe, data: TextSection, texts: list[UserText], tokenizer: PreTrainedTokenizerBase, validates: bool
) -> set[str]:
    """A window's length of every stream is enough to know whether it is too short."""
    context = recipe.training.context
    skip = data.on_small_user == "skip"
    if data.held_out == "mixture" and not skip:
        texts = mix_held_out(texts, seed=recipe.data_seed)
    limits = token_limits(data, [text.name for text in texts])
    heads = {
        name: {key: min(limit or context + 1, context + 1) for key, limit in limits_of_user.items()}
        for name, limits_of_user in limits.items()
    }
    users = [pack(text, tokenizer, **heads[text.name]) for text in texts]
    users = [with_validation(user) for user in users] if data.train_on_valid else users
    begins = data.add_bos_token and bool(begin_of(tokenizer))
    needed = {"context": context, "needs_validation": validates, "begins": begins}
    small = {user.name for user in users if find_shortage(user, **needed)}
    if not skip or len(small) == len(users):
        check(users, **needed)
    return small


def _sources(data: TextSection) -> list[str]:
    users = (data.users or {}).values()
    return [source for user in users for source in (user.path, user.train, user.valid, user.test) if source]


def tokenizer_here(base: str) -> PreTrainedTokenizerBase | None:
    """The base's tokenizer where that takes neither weights nor the hub."""
    if base.startswith(PREFIX):
        return byte_tokenizer()
    folder = expand_home(base)
    return load_tokenizer(folder) if os.path.isdir(folder) else None
