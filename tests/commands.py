"""The command line within this process: fast, and through the same ``main`` as the console script."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from comingle.cli import main

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


@dataclass(frozen=True)
class Answer:
    """What a command left behind; lines of progress, which begin with the time, are kept apart from other errors."""

    code: int
    out: str
    err: str
    progress: tuple[str, ...] = ()


@pytest.fixture
def comingle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answer]]:
    """Runs ``comingle ARGUMENTS``."""
    level = logging.getLogger("comingle").level

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["comingle", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        code = stop.value.code
        lines = captured.err.splitlines(keepends=True)
        told = tuple(TIME.sub("", line).rstrip("\n") for line in lines if TIME.match(line))
        others = "".join(line for line in lines if not TIME.match(line))
        return Answer(int(code) if code is not None else 0, captured.out, others, told)

    yield run
    logging.getLogger("comingle").setLevel(level)
