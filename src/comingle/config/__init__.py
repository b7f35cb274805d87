"""Recipes: the YAML that describes a run, as checked sections and as files."""

from comingle.config.data import DataSection, SplitSection
from comingle.config.files import load_recipe, shipped_recipes
from comingle.config.sections import Recipe, parse_recipe

__all__ = ["DataSection", "Recipe", "SplitSection", "load_recipe", "parse_recipe", "shipped_recipes"]
