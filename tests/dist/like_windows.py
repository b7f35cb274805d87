"""Runs Python code almost as on Windows: without the modules, functions and constants that only POSIX systems have.

``python like_windows.py MODULES CODE [ARGUMENT]...``: MODULES is a file with names of modules of other packages. They
are imported first, as they have own code for Windows, which would need Windows. CODE is then run with what Windows has.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

MODULES = ("crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog")
MODULES += ("termios", "tty")

FLAGS = ("CLOEXEC", "DIRECTORY", "DSYNC", "NOATIME", "NOCTTY", "NOFOLLOW", "NONBLOCK", "PATH", "SYNC", "TMPFILE")
IDS = ("egid", "euid", "gid", "groups", "loadavg", "pgid", "pgrp", "priority", "resgid", "resuid", "sid", "uid")
OF_OS = {f"O_{flag}" for flag in FLAGS} | {f"{verb}{name}" for name in IDS for verb in ("get", "set")}
OF_OS |= {"chown", "chroot", "confstr", "ctermid", "fchdir", "fchmod", "fchown", "fork", "forkpty", "killpg", "lchown"}
OF_OS |= {"lockf", "mkfifo", "mknod", "nice", "openpty", "pipe2", "pread", "preadv", "pwrite", "pwritev", "readv"}
OF_OS |= {"register_at_fork", "sendfile", "statvfs", "fstatvfs", "sync", "sysconf", "uname", "wait", "wait3", "wait4"}
OF_OS |= {"waitid", "writev"} | {name for name in vars(os) if name.startswith(("W", "posix_", "sched_"))} - {"W_OK"}

SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN")
OF_SIGNAL = {name for name in vars(signal) if name.startswith("SIG") and name not in SIGNALS}
OF_SIGNAL |= {name for name in vars(signal) if name.startswith(("ITIMER", "pthread_", "sig"))} - {"signal"}
OF_SIGNAL |= {"alarm", "getitimer", "pause", "setitimer"}


def without(module: ModuleType, names: set[str]) -> ModuleType:
    """Return a module with the content of another, except for some names."""
    copy = ModuleType(module.__name__)
    vars(copy).update({name: value for name, value in vars(module).items() if name not in names})
    return copy


def open_as_windows(path: object, *arguments: int, open: object = os.open, **options: object) -> int:
    """Open a file, but no folder."""
    if os.path.isdir(path):  # type: ignore[arg-type]
        raise PermissionError(13, "Permission denied", path)
    return open(path, *arguments, **options)  # type: ignore[operator]


if __name__ == "__main__":
    names, code = Path(sys.argv[1]).read_text().split(), sys.argv[2]
    sys.argv[1:] = sys.argv[3:]
    sys.path.pop(0)  # the folder of this file
    for name in names:
        importlib.import_module(name)
    windows = without(os, OF_OS)
    windows.open = open_as_windows  # type: ignore[attr-defined]
    sys.modules |= {"os": windows, "signal": without(signal, OF_SIGNAL), **dict.fromkeys(MODULES)}  # type: ignore[arg-type]
    sys.platform = "win32"
    exec(code, {"__name__": "__main__"})
