"""Recipes: the YAML that describes a run, as checked sections and as files."""

from comingle.recipes.files import load_recipe, parse_recipe, shipped_recipes
from comingle.recipes.sections import DataSection, Recipe, SplitSection, UserSource

__all__ = [
    "DataSection",
    "Recipe",
    "SplitSection",
    "UserSource",
    "load_recipe",
    "parse_recipe",
    "shipped_recipes",
]
