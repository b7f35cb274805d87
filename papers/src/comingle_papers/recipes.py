"""Published recipes, a folder for each paper with ``study.yaml`` and a file for each table or figure; measured runs."""

from __future__ import annotations

from pathlib import Path


def published_recipes() -> Path:
    """The folder with the papers' folders."""
    installed = Path(__file__).parent / "shipped_recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def published_runs() -> dict[str, Path]:
    """Files of measured runs that come with comingle, by name as ``comigs-cpu``."""
    installed = Path(__file__).parent / "shipped_measured"
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "measured"
    return {path.name.removesuffix(RUNS_SUFFIX): path for path in sorted(folder.glob(f"*{RUNS_SUFFIX}"))}


RUNS_SUFFIX = ".jsonl.xz"
