"""Print the lower bound of every requirement in pyproject.toml as a pin: constraints for `make lowest`.

`python .ci/lowest.py torch==2.13.0` prints that pin in place of torch's lower bound.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?(?:[>=]=(?P<version>[\d.]+))?")


def lowest(pyproject: Path) -> dict[str, str]:
    """Return the lowest version of each package that ``pyproject`` allows.

    Raises:
        SystemExit: a requirement has no lower bound.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    bounds: dict[str, str] = {}
    for requirement in (*project["dependencies"], *(one for extra in extras for one in extra)):
        match = _REQUIREMENT.match(requirement)
        if match is None or match["version"] is None:
            sys.exit(f"{pyproject}: requirement {requirement!r} has no lower bound; allowed: NAME>=VERSION")
        bounds[match["name"]] = match["version"]
    return bounds


if __name__ == "__main__":
    pins = dict(pin.split("==") for pin in sys.argv[1:])
    for name, version in {**lowest(Path(__file__).parents[1] / "pyproject.toml"), **pins}.items():
        print(f"{name}=={version}")
