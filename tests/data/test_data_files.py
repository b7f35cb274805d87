from __future__ import annotations

import gzip
import logging
import lzma
import re
from pathlib import Path

import pytest

from comingle.data.files import join_paragraphs, split_paragraphs
from comingle.data.sources import read_documents
from comingle.utils.errors import DataError, NoTextError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_folder_gives_its_text_files_by_path_and_reports_what_it_skips(tmp_path: Path, caplog):
    write(tmp_path / "b.txt", "second\r\nline")
    write(tmp_path / "a" / "z.md", "\ufefffirst")
    write(tmp_path / "c.py", "print('third')\n")
    write(tmp_path / "latin.txt", "Überfluß".encode("latin-1"))
    write(tmp_path / "picture.png", b"\x89PNG\0\0")
    write(tmp_path / ".hidden.txt", "secret")
    write(tmp_path / "a" / ".git" / "config", "secret")
    write(tmp_path / "blank.txt", " \n\t\n")
    with caplog.at_level(logging.WARNING, logger="comingle"):
        documents = read_documents(tmp_path)
    assert documents == ["first", "second\nline", "print('third')\n"]
    (message,) = caplog.messages
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}: .*2 files .*latin\.txt", message)


def test_a_folder_without_skipped_files_warns_of_nothing(tmp_path: Path, caplog):
    write(tmp_path / "a.txt", "text")
    assert read_documents(tmp_path) == ["text"]
    assert caplog.messages == []


def test_the_order_of_a_folder_is_that_of_whole_relative_paths(tmp_path: Path):
    for name in ("a/1.txt", "a.txt", "a-b/1.txt", "B.txt"):
        write(tmp_path / name, name)
    assert read_documents(tmp_path) == ["B.txt", "a-b/1.txt", "a.txt", "a/1.txt"]


def test_a_text_file_becomes_blocks_of_whole_paragraphs(tmp_path: Path):
    paragraphs = [f"paragraph {index}: " + "word " * 100 for index in range(12)]
    documents = read_documents(write(tmp_path / "book.txt", "\n\n \n".join(paragraphs) + "\n"))
    assert [document.count("paragraph") for document in documents] == [4, 4, 4]
    assert "\n\n".join(documents).split("\n\n") == paragraphs
    assert all(len(document) >= 2000 for document in documents[:-1])


def test_cutting_keeps_indentation_and_single_line_ends():
    assert join_paragraphs(split_paragraphs("\n\n  def f():\n    pass\n\n\n  end\n")) == [
        "  def f():\n    pass\n\n  end"
    ]
    assert join_paragraphs(split_paragraphs(" \n\n\t\n")) == []


@pytest.mark.parametrize(("suffix", "opener"), [(".txt.xz", lzma.open), (".txt.gz", gzip.open), (".XZ", lzma.open)])
def test_a_compressed_text_file_is_read(tmp_path: Path, suffix: str, opener):
    path = tmp_path / f"notes{suffix}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("Grüße\n\naus Köln")
    assert read_documents(path) == ["Grüße\n\naus Köln"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "Stra\xdfe".encode("latin-1"), "byte 0xdf at offset 4"),
        ("binary.txt", b"ELF\0\1", "zero byte at offset 3"),
        ("utf16.txt", "hello".encode("utf-16"), "UTF-16"),
        ("empty.txt", b"", "no text"),
        ("blank.txt", b" \n\n \t", "no text"),
        ("broken.txt.gz", b"no gzip", "Not a gzipped file"),
        ("broken.txt.xz", b"no xz at all", "Input format not supported"),
        (
            "bent.txt.gz",
            gzip.compress(b"text" * 999)[:20] + b"\xff" * 20,
            "Error -3 while decompressing",
        ),
        ("short.txt.xz", lzma.compress(b"text" * 999)[:40], "Compressed file ended before"),
    ],
)
def test_a_file_that_gives_no_text_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as raised:
        read_documents(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_path_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere/user\.txt: no such file"):
        read_documents(tmp_path / "nowhere" / "user.txt")


def test_a_folder_with_nothing_readable_is_an_empty_user(tmp_path: Path):
    write(tmp_path / "picture.png", b"\0\0")
    with pytest.raises(NoTextError, match=f"^{re.escape(str(tmp_path))}: "):
        read_documents(tmp_path)


def test_real_text_survives_the_cutting(shared_data: Path, tmp_path: Path):
    speech = read_documents(shared_data / "users" / "shakespeare_roles.jsonl.xz")[:400]
    blocks = read_documents(write(tmp_path / "play.txt", "\n\n".join(speech)))
    assert "".join("\n".join(blocks).split()) == "".join("\n".join(speech).split())
    assert 20 < len(blocks) < 40
