"""Files that are written whole, and for their owner alone where they hold secrets."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from comingle.utils import records


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize(("private", "wanted"), [(True, 0o600), (False, 0o666)])
def test_a_private_file_is_nobody_elses_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool, wanted: int
) -> None:
    modes, replace = list[int](), os.replace

    def seen(draft: Path, path: Path) -> None:
        modes.append(stat.S_IMODE(draft.stat().st_mode))
        replace(draft, path)

    monkeypatch.setattr(os, "replace", seen)
    records.write_text(tmp_path / "key", "secret\n", private=private)
    records.write_text(tmp_path / "key", "another\n", private=private)
    modes.append(stat.S_IMODE((tmp_path / "key").stat().st_mode))
    assert modes == [wanted] * 3
    assert (tmp_path / "key").read_text() == "another\n"
    assert os.listdir(tmp_path) == ["key"]


def test_a_new_file_is_never_a_replaced_one(tmp_path: Path) -> None:
    records.write_new(tmp_path / "key", b"mine", private=True)
    with pytest.raises(FileExistsError):
        records.write_new(tmp_path / "key", b"another's", private=True)
    assert (tmp_path / "key").read_bytes() == b"mine"
