"""Train a recipe in a process that may take so many bytes more than it has when everything is loaded: a real failure.

``python memory_driver.py RECIPE BYTES [KEY=VALUE ...]``; a mistake is printed as one line, exit code 2.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import yaml

from comingle.config import load_recipe
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.utils.errors import ComingleError


def address_space() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmSize:")[2].split()[0]) * 1024


def main() -> None:
    changes = {key: yaml.safe_load(value) for key, _, value in (given.partition("=") for given in sys.argv[3:])}
    recipe = load_recipe(sys.argv[1]).with_changes(changes)
    run_data = prepare(recipe)
    small = recipe.with_changes({"training.rounds": 1, "training.batch_size": 1, "runtime.users_per_step": 1})
    api.run(small, run_data=prepare(small))  # whatever is imported or started on the way is there
    most = address_space() + int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        api.run(recipe, run_data=run_data)
    except ComingleError as error:
        print(error)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
