"""The command line within this process: fast, and through the same ``main`` as the console script."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from comingle.cli import main


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str


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
        return Answer(int(code) if code is not None else 0, captured.out, captured.err)

    yield run
    logging.getLogger("comingle").setLevel(level)
