"""Libraries that somebody else planted in the cache are never loaded: each would leave a mark."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from comingle.models.kernels import expert_mlp

MARKING = '__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }'
SOMEBODY = 65534


@pytest.fixture
def umask() -> Iterator[None]:
    """The folders of a test are this user's alone, whatever the machine's habit."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def cache(tmp_path: Path, umask: None) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def quick(tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes no time: whatever the source, its library has all functions and does nothing."""
    compiler = expert_mlp._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler that makes the native code")
    source, library, script = tmp_path / "stub.cpp", tmp_path / "stub.so", tmp_path / "quick"
    source.write_text(
        'extern "C" { bool mixture_forward(void*) { return 1; } bool mixture_backward(void*) { return 1; } '
        "void rows_forward(void*) {} void decode_step(void*) {} void packed_forward(void*) {} }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    script.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {library} "$last"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))


@pytest.fixture
def planted(cache: Path, tmp_path: Path) -> Path:
    """A library whose name fits and which leaves ``mark`` when it is loaded."""
    compiler = expert_mlp._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler that makes the native code")
    source, library = tmp_path / "mark.cpp", tmp_path / "mark.so"
    source.write_text("#include <cstdio>\n" + MARKING % (tmp_path / "mark"))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    return library.rename(cache / f"mixture-{expert_mlp._fingerprint(compiler, expert_mlp.SOURCES)}-{digest}.so")


@pytest.fixture
def enable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], bool]]:
    """Switches native code on, as in a new process."""
    monkeypatch.setattr(expert_mlp, "_loaded", None)
    yield expert_mlp.enable
    expert_mlp.disable()


def owned_by_another(planted: Path) -> None:
    if os.geteuid():
        pytest.skip("NO RIGHT TO GIVE A FILE AWAY: run this test as root")
    os.chown(planted, SOMEBODY, SOMEBODY)


def in_the_folder_of_another(planted: Path) -> None:
    owned_by_another(planted.parent)


def writable_by_all(planted: Path) -> None:
    planted.chmod(0o777)


def writable_by_a_group(planted: Path) -> None:
    planted.chmod(0o770)


def in_a_folder_writable_by_all(planted: Path) -> None:
    planted.parent.chmod(0o1777)


def linked(planted: Path) -> None:
    elsewhere = planted.rename(planted.parent.parent / "elsewhere.so")
    planted.symlink_to(elsewhere)


def in_a_linked_folder(planted: Path) -> None:
    folder = planted.parent
    elsewhere = folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(elsewhere)


def a_fifo(planted: Path) -> None:
    planted.unlink()
    os.mkfifo(planted)


PLANTS = [
    owned_by_another,
    in_the_folder_of_another,
    writable_by_all,
    writable_by_a_group,
    in_a_folder_writable_by_all,
    linked,
    in_a_linked_folder,
    a_fifo,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_library_never_runs(
    planted: Path,
    tmp_path: Path,
    enable: Callable[[Path], bool],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Path], None],
) -> None:
    plant(planted)
    monkeypatch.setenv("CXX", str(shutil.which("false")))
    monkeypatch.setattr(expert_mlp, "_fingerprint", lambda compiler, sources: planted.name.split("-")[1])
    assert not enable(tmp_path / "cache")
    assert not (tmp_path / "mark").exists()


def test_the_mark_is_left_where_nobody_else_can_write(
    planted: Path, tmp_path: Path, enable: Callable[[Path], bool]
) -> None:
    """That the planted library would do its work: this user can run whatever it likes."""
    with pytest.raises(AttributeError, match="mixture_forward"):
        enable(tmp_path / "cache")
    assert (tmp_path / "mark").exists()


@pytest.mark.slow
def test_a_compiler_that_takes_too_long_ends_with_all_that_it_started(
    cache: Path, tmp_path: Path, enable: Callable[[Path], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++ is a driver: what compiles is a process of its own."""
    script, started = tmp_path / "slow", tmp_path / "started"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}\nwait\n")
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(expert_mlp, "COMPILE_SECONDS", 20.0 if os.getloadavg()[0] > 4 else 2.0)
    assert not enable(cache)
    child = Path("/proc") / started.read_text().strip()
    for _ in range(100):
        if not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2].split()[:1]:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"{child} still runs")


def test_a_cache_that_others_can_write_to_is_not_used_and_the_code_runs_all_the_same(
    cache: Path, quick: None, tmp_path: Path, enable: Callable[[Path], bool], caplog: pytest.LogCaptureFixture
) -> None:
    cache.chmod(0o777)
    assert enable(cache)
    assert list(cache.iterdir()) == []
    (told,) = caplog.messages
    assert told.startswith(f"{cache}: ")
    assert "COMINGLE_CACHE" in told


def test_what_is_made_is_private(cache: Path, quick: None, enable: Callable[[Path], bool]) -> None:
    os.umask(0)
    assert enable(cache / "new")
    (library,) = (cache / "new").iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == stat.S_IMODE((cache / "new").stat().st_mode) == 0o700
