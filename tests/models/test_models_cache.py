from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comingle.utils.files import cache_folder, make_once


def write(folder: Path, text: str = "whole") -> None:
    (folder / "file").write_text(text)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("COMINGLE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "comingle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "comingle"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "comingle"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "comingle"


def test_made_once(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "target"
    assert make_once(target, write) == target
    assert make_once(target, lambda folder: write(folder, "again")) == target
    assert (target / "file").read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced, named = tmp_path / "target", set[int](), list[bool]()
    rename = Path.rename

    def fill(folder: Path) -> None:
        write(folder)
        (folder / "inner").mkdir()
        write(folder / "inner")

    def renaming(partial: Path, name: Path) -> Path:
        named.append({path.stat().st_ino for path in partial.rglob("*") if path.is_file()} == synced)
        return rename(partial, name)

    monkeypatch.setattr("os.fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    monkeypatch.setattr(Path, "rename", renaming)
    make_once(target, fill)
    assert named == [True]
    assert len(synced) == 2


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder, "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "target", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_processes_wins(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        write(folder, "second")
        make_once(tmp_path / "target", lambda other: write(other, "first"))

    make_once(tmp_path / "target", slow)
    assert (tmp_path / "target" / "file").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is POSIX")
def test_kill_9_leaves_no_target_and_is_swept_later(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from comingle.utils.files import make_once\n"
        "def fill(folder): (folder / 'file').write_text('half'); print('begun', flush=True); time.sleep(60)\n"
        "make_once(Path(sys.argv[1]), fill)"
    )
    target = tmp_path / "target"
    with subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGKILL)
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith("target.partial-")
    make_once(target, write)
    assert partial.is_dir()  # young: it could belong to a process that still runs
    (target / "file").unlink()
    target.rmdir()
    long_ago = time.time() - 2 * 3600
    os.utime(partial, (long_ago, long_ago))
    make_once(target, write)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
