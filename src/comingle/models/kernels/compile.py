"""Libraries out of C++ sources, compiled once for each machine into a cache folder that is the user's alone.

What is found there is loaded only if nobody else could have written it, and if it is what was written.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from comingle.utils.files import open_private
from comingle.utils.records import logger

# Nothing that changes values: the sources round on purpose, and a NaN has to arrive.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
COMPILE_SECONDS = 300.0


def load_library(cache: Path, name: str, sources: Sequence[Path]) -> ctypes.CDLL | None:
    """A library out of the cache, compiled first where it is missing or not what was written there.

    The first of ``sources`` is compiled, the others are what it includes. None where there is no compiler, or it fails.
    """
    compiler = _compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    name = f"{name}-{_fingerprint(compiler, sources)}"
    try:
        handle = _find(cache, name)
        handle = _compile(compiler, cache, name, sources[0]) if handle is None else handle
        # The very file that was looked at. It stays open: the loader takes two libraries of one name for the same.
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler() -> str | None:
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _fingerprint(compiler: str, sources: Sequence[Path]) -> str:
    """Of everything that the library depends on; a cache folder may serve several machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = sorted({line for line in lines if line.lower().startswith(("flags", "features", "model name"))})
    parts = [compiler, *FLAGS, platform.machine(), torch.__version__, *flags, *(s.read_text() for s in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _find(cache: Path, name: str) -> int | None:
    """The cached library, opened. Its name ends in a digest of its content: a damaged one could kill the process."""
    folder = open_private(cache)
    if folder is None:
        return None
    try:
        for file in sorted(os.listdir(folder)):
            if not (file.startswith(f"{name}-") and file.endswith(".so")):
                continue
            library = open_private(file, folder=folder)
            if library is not None and file == f"{name}-{_digest(library)}.so":
                return library
            if library is not None:
                os.close(library)
    finally:
        os.close(folder)
    return None


def _digest(handle: int) -> str:
    with os.fdopen(os.dup(handle), "rb") as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _run(command: Sequence[str]) -> None:
    """Run a compiler; if it is given up, so is what it has started, which would go on for minutes."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    try:
        code = process.wait(COMPILE_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _compile(compiler: str, cache: Path, name: str, source: Path) -> int:
    """The library, compiled and opened; kept in the cache if that is this user's alone."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = open_private(cache)
    if kept is None:
        logger.warning(
            "%s: belongs to somebody else, is a link, or others can write to it; native code is compiled anew for this "
            "process; set COMINGLE_CACHE to a folder of your own, or take away the right to write",
            cache,
        )
    else:
        os.close(kept)
    with tempfile.TemporaryDirectory(prefix=f"{name}.partial-", dir=None if kept is None else cache) as folder:
        made = Path(folder) / "made.so"
        command = [compiler, *FLAGS, str(source), "-o", str(made)]
        _run(command)
        made.chmod(0o700)  # whatever the umask is
        library = open_private(made)
        if library is None:
            raise PermissionError(f"{made}: somebody else has replaced it")
        if kept is not None:
            made.replace(cache / f"{name}-{_digest(library)}.so")
    return library
