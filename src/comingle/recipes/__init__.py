"""Recipes: the YAML that describes a run, as checked sections and as files."""

from comingle.recipes.data import DataSection, QuestionsSection, SplitSection, TaskSection, UserSource
from comingle.recipes.files import load_recipe, parse_recipe, shipped_recipes
from comingle.recipes.sections import Recipe

__all__ = [
    "DataSection",
    "QuestionsSection",
    "Recipe",
    "SplitSection",
    "TaskSection",
    "UserSource",
    "load_recipe",
    "parse_recipe",
    "shipped_recipes",
]
