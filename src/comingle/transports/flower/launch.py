"""Parts that the processes of a federation share: their end with the process that has started them, and their app."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from typing import Any

PARENT = "COMINGLE_PARENT"
"""Environment variable: the process with which this one is to end; it may be gone before this one can look."""

_LOOK_SECONDS, _GRACE_SECONDS = 0.3, 8.0


def end_with_parent() -> None:
    """End this process, politely first, when its parent is gone, however that ended."""
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def load_app(path: str) -> Any:
    """Return the object of an import path, ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
