"""What users are read into lies in a folder that goes with the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from populations import said

from comingle.data import population_files


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for each test."""
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def common_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for fixtures that several tests have in common."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMINGLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, count in {"ann": 9, "bob": 5, "cem": 7}.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(said(name, count, 200)))
    folder = tmp_path / "dag"
    folder.mkdir()
    for number, text in enumerate(said("dag", 6)):
        (folder / f"{number}.txt").write_text(text)
    return {name: str(tmp_path / f"{name}.txt") for name in ("ann", "bob", "cem")} | {"dag": str(folder)}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders into which users were read."""
    folders: list[Path] = []
    original: Callable[..., None] = population_files.write_users

    def write(reader: Any, folder: Path) -> None:
        folders.append(folder)
        original(reader, folder)

    monkeypatch.setattr(population_files, "write_users", write)
    return folders
