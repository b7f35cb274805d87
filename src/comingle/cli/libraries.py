"""Filters for warnings that libraries of the command line raise about each other, for ``python -W error``."""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", ".*will be removed in Click 9", DeprecationWarning)  # typer on the newest click
