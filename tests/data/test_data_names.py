"""Users' names as folders."""

from __future__ import annotations

import pytest

from comingle.utils.names import as_folder


@pytest.mark.parametrize("name", ["ann", "Émile Müller", "ann.lee", "12", "..ann", "a b"])
def test_ordinary_names_are_folders_as_they_are(name: str) -> None:
    assert as_folder(name) == name


def test_no_two_names_share_a_folder_and_none_leaves_it() -> None:
    names = ["a/b", "a%2Fb", "a%252Fb", "a\\b", "a%5Cb", ".", "..", "...", "%2E", "%2E%2E", "/a", "../a", "50%"]
    folders = [as_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    assert not any("/" in folder or "\\" in folder or folder in (".", "..") for folder in folders)
