"""Entry points and a check of dependencies for a checkout that is not installed.

    python benchmarks/metadata.py FOLDER      then FOLDER first on PYTHONPATH
    python benchmarks/metadata.py             exits with 1 if something is missing

The first form writes the metadata that an installation would generate from this checkout's ``pyproject.toml``.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def write_metadata(project: dict[str, Any], place: Path) -> None:
    """Write the metadata of an installed distribution, with its entry points.

    Args:
        project: Table ``project`` of ``pyproject.toml``.
        place: Folder to write to.
    """
    folder = place / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(about, encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def find_missing(project: dict[str, Any]) -> list[str]:
    """Return the names of required packages, pytest included, that are not installed."""
    required = [re.split(r"[<>=\[ ]", dependency)[0] for dependency in project["dependencies"]]
    absent = []
    for name in [*required, "pytest"]:
        try:
            version(name)
        except PackageNotFoundError:
            absent.append(name)
    return absent


def main() -> None:
    """Write metadata, or exit with 1 if a required package is missing."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if sys.argv[1:]:
        write_metadata(project, Path(sys.argv[1]))
    elif lacking := find_missing(project):
        sys.exit(f"missing here: {' '.join(lacking)}; bring wheels of them and of what they need (WHEELS=FOLDER)")


if __name__ == "__main__":
    main()
