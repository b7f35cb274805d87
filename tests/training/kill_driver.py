"""Runs a recipe in children of this process, each of which kills itself (SIGKILL) at a moment of its own.

    python kill_driver.py RECIPE FOLDER [MOMENT ...]

writes one run folder below FOLDER for each moment. RECIPE may be a folder of recipes, each of which then has a folder
of its own below FOLDER. Children are forked before any work, but after all imports, which take longer than the runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401 (the tests' language model: it is imported at first use)

from comingle.runs import api
from comingle.training import checkpoints
from comingle.training.backends import local
from comingle.training.events import Observer


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_steps(count: int) -> Observer:
    """Dies in the middle of a round, when a number of local iterations has been done."""
    left = [count]

    def observe(event: dict[str, Any]) -> None:
        left[0] -= event.get("advance", 0)
        if left[0] <= 0:
            die()

    return observe


def in_round(number: int) -> Observer:
    """Dies after the second local iteration of a round."""
    left = [2]

    def observe(event: dict[str, Any]) -> None:
        left[0] -= event["event"] == "step" and event["round"] == number and event["advance"] > 0
        if left[0] == 0:
            die()

    return observe


def on_call(owner: Any, name: str, number: int, before_death: Callable[..., None] = lambda *_: None) -> None:
    """Dies instead of the ``number``-th call of a function, having done only part of its work."""
    original, left = getattr(owner, name), [number]

    def replacement(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            before_death(*args)
            die()
        return original(*args, **options)

    setattr(owner, name, replacement)


def write_half(tensors: Any, path: Path) -> None:
    from safetensors.torch import save

    content = save(tensors)
    path.write_bytes(content[: len(content) // 2])


def delete_half(folder: Path, **_: Any) -> None:
    (folder / "state.safetensors").unlink(missing_ok=True)


def in_tensors() -> None:
    on_call(checkpoints, "save_file", 3, write_half)


def before_json() -> None:
    on_call(checkpoints, "write_json", 3)


def before_rename() -> None:
    on_call(Path, "rename", 3)


def in_pruning() -> None:
    original = shutil.rmtree

    def replacement(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).name == "round-0001":
            delete_half(Path(path))
            die()
        original(path, *args, **options)

    shutil.rmtree = replacement  # type: ignore[assignment]


def before_metrics() -> None:
    on_call(local, "write_json", 1)


MOMENTS: dict[str, Callable[[], Any]] = {
    "in round 1": lambda: after_steps(2),
    "in round 3": lambda: in_round(3),
    "in the last step": lambda: after_steps(12),
    "half of the tensors written": in_tensors,
    "tensors written, no json": before_json,
    "written, not renamed": before_rename,
    "half of an old one deleted": in_pruning,
    "all rounds done, no metrics": before_metrics,
}


def main(recipe: str, folder: str, *moments: str) -> None:
    if Path(recipe).is_dir():
        for path in sorted(Path(recipe).glob("*.yaml")):
            main(str(path), str(Path(folder) / path.stem), *moments)
        return
    for moment in moments or MOMENTS:
        arm = MOMENTS[moment]
        child = os.fork()
        if child == 0:
            observer = arm()
            api.run(recipe, out=Path(folder) / moment, observers=[observer] if observer else [])
            os._exit(1)  # it should not have come to this
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"{moment}: not killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
