"""Several models that the server keeps between the rounds, among what else it remembers."""

from __future__ import annotations

from comingle.utils.errors import RecipeError
from comingle.utils.trees import Tree

MERGING = "merging"
"""Merging weights ``(users, models)``, or the logits of a softmax that they are."""

_SOUP = "soup."


def start_soup(models: Tree) -> Tree:
    """What to remember of ``models (models, ...)`` that the server begins with.

    Raises:
        RecipeError: several models that are all the same: no weight could ever tell them apart.
    """
    count = len(next(iter(models.values())))
    if count > 1 and all(bool((t == t[:1]).all()) for t in models.values()):
        raise RecipeError(
            f"the server's {count} models are identical, so merging weights could never move; give a base whose weights"
            " are drawn at random, or models: 1"
        )
    return {_SOUP + name: t.clone() for name, t in models.items()}


def soup_of(memory: Tree) -> Tree:
    """The models ``(models, ...)``, to be changed in place."""
    return {name.removeprefix(_SOUP): t for name, t in memory.items() if name.startswith(_SOUP)}
