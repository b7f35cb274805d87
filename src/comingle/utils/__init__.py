"""Shared helpers that import nothing else of the package."""
