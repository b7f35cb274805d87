"""Runs: from a recipe to users' models, in one place for the command line, comparisons, tables and Python."""
