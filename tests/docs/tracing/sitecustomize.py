"""Python imports this module as it starts: writes down, in each process, which functions hold a user's upload.

Lines of ``$UPLOAD_TRACE/PID`` are the monotonic time in nanoseconds and ``file: function``, at each call with an upload
among the arguments and at each return of one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = "/src/comingle/"
KINDS = ("Upload", "Answer", "Message", "_Job")
MARKS = (b'"kind":"upload"', b'"kind":"answer"')
"""Headers of a packed upload and of the answer around it."""


def holds_upload(value: Any, *, inside: bool = False) -> bool:
    """Return whether a value is an upload in one of its forms, or a collection of some."""
    if isinstance(value, bytes | bytearray | memoryview):
        return any(mark in bytes(value) for mark in MARKS)
    if type(value).__name__ in KINDS:
        return True
    if inside or not isinstance(value, tuple | list | dict):
        return False
    return any(holds_upload(one, inside=True) for one in (value.values() if isinstance(value, dict) else value))


def start(folder: Path) -> None:
    """Trace this process from now on."""
    trace = (folder / str(os.getpid())).open("a", buffering=1, encoding="utf-8")
    names: dict[CodeType, str] = {}

    def note(frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if (name := names.get(code)) is None:
            _, found, file = code.co_filename.partition(PACKAGE)
            name = names[code] = f"{file}: {code.co_name}" if found else ""
        if name and (holds_upload(result) if event == "return" else any(map(holds_upload, frame.f_locals.values()))):
            trace.write(f"{time.monotonic_ns()} {name}\n")

    threading.setprofile(note)
    sys.setprofile(note)


if "UPLOAD_TRACE" in os.environ:
    start(Path(os.environ["UPLOAD_TRACE"]))
