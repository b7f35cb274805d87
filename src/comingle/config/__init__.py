"""Recipes: the YAML that describes a run, as checked sections and as files."""

from comingle.config.files import load_recipe, shipped_recipes
from comingle.config.sections import Recipe, parse_recipe
from comingle.config.settings import DataSection, SplitSection

__all__ = ["DataSection", "Recipe", "SplitSection", "load_recipe", "parse_recipe", "shipped_recipes"]
