"""Published tables and figures, run again from the recipes in ``papers/recipes``."""
