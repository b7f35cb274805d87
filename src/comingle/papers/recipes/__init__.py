"""Where the published recipes are: a folder for each paper, with ``study.yaml`` and a file for each table or figure."""

from __future__ import annotations

from pathlib import Path


def published_recipes() -> Path:
    """The folder with the papers' folders."""
    installed = Path(__file__).parents[1] / "shipped_recipes"
    return installed if installed.is_dir() else Path(__file__).parents[4] / "recipes"
