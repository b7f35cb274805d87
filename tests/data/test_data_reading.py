"""Texts that would never end, or are far longer than what is kept of them, or are no text at all."""

from __future__ import annotations

import gzip
import logging
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comingle.config import parse_recipe
from comingle.data import files
from comingle.data.files import BYTES_PER_TOKEN, max_read_bytes
from comingle.data.sources import read_dataset, read_documents
from comingle.data.text.reading import read_users
from comingle.utils.errors import DataError


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- what is no file


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl", "pipe.txt.gz"])
def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert refused(tmp_path / name).startswith(f"{tmp_path / name}: not a regular file")
    with pytest.raises(DataError, match=rf"{name}: not a regular file"):
        read_dataset(tmp_path / name, user="who")


def test_a_device_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    assert refused(Path("/dev/zero")).startswith("/dev/zero: not a regular file")
    (tmp_path / "link.txt").symlink_to("/dev/zero")
    assert refused(tmp_path / "link.txt").startswith(f"{tmp_path / 'link.txt'}: not a regular file")


def test_pipes_and_devices_in_a_folder_are_skipped_and_counted(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("/dev/zero")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING, logger="comingle"):
        assert read_documents(tmp_path) == ["text"]
    (message,) = caplog.messages
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}: .*3 files .*b\.txt", message)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "some words\n" * 100])
def test_what_cannot_be_a_path_is_a_missing_file(name: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(name)}: no such file"):
        read_documents(name)
    with pytest.raises(DataError, match=f"^/{re.escape(name)}: no such file"):
        read_dataset(f"/{name}", user="who")


# ---------------------------------------------------------------- what is no text


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"%PDF-1.4\n1 0 obj\n", "PDF"),
        (b"%PDF-1.7\n\xb5\xb5\x00", "PDF"),
        (b"PK\x03\x04\x14\0", ".docx"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Office"),
        (b"\x89PNG\r\n\x1a\n\0", "image"),
        (b"\xff\xd8\xff\xe0\0", "image"),
        (gzip.compress(b"text"), ".gz"),
        (b"GGUF\3\0\0\0", "GGUF"),
        (b"\x7fELF\2\1\1\0", "offset 7"),
        (b"some words, then\0", "offset 16"),
    ],
)
def test_a_binary_file_is_called_what_it_is(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert re.match(rf"{re.escape(str(path))}: is .*{re.escape(what)}\b.*, not text; allowed: ", refused(path))


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be", "latin-1"])
def test_text_of_another_coding_is_to_be_converted(tmp_path: Path, coding: str) -> None:
    path = tmp_path / "notes.txt"
    content = "Grüße aus Köln".encode(coding)
    path.write_bytes(b"\xfe\xff" + content if coding == "utf-16-be" else content)
    assert refused(path).startswith(f"{path}: not UTF-8 text")


def test_a_pdf_in_a_folder_is_skipped(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.pdf").write_text("%PDF-1.4 all of it ASCII")
    assert read_documents(tmp_path) == ["text"]
    (message,) = caplog.messages
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}: .*1 files .*b\.pdf", message)


# ---------------------------------------------------------------- no more than is kept


def paragraphs(count: int, start: int = 0) -> str:
    return "\n\n".join(f"paragraph {i} of words" for i in range(start, start + count))


def test_a_file_is_read_to_the_last_whole_line_of_its_beginning(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "long.txt"
    path.write_text(paragraphs(1000))
    whole = "\n\n".join(read_documents(path))
    head = "\n\n".join(read_documents(path, max_bytes=500))
    assert whole.startswith(head + "\n")
    assert 450 < len(head) <= 500
    (message,) = caplog.messages
    assert re.match(f"{re.escape(str(path))}: .*500 bytes", message)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_limit_that_is_not_reached_changes_nothing(tmp_path: Path, suffix: str, caplog: Any) -> None:
    path = tmp_path / f"short.txt{suffix}"
    content = paragraphs(50).encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert read_documents(path, max_bytes=len(content)) == read_documents(path)
    assert caplog.messages == []


def test_a_character_of_many_bytes_may_lie_on_the_border(tmp_path: Path) -> None:
    path = tmp_path / "greek.txt"
    path.write_text("αβγδε")
    assert [read_documents(path, max_bytes=n) for n in (3, 4, 5)] == [["α"], ["αβ"], ["αβ"]]


def test_a_folder_and_rows_end_with_the_document_that_reaches_the_limit(tmp_path: Path, caplog: Any) -> None:
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    assert len(read_documents(tmp_path, max_bytes=250)) == 3
    (message,) = caplog.messages
    assert re.match(f"{re.escape(str(tmp_path))}: .*250 bytes", message)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{"y" * 100}"}}\n' for _ in range(9)))
    assert len(read_documents(rows, max_bytes=250)) == 3


def test_how_much_is_read_follows_from_what_is_kept() -> None:
    most = files.MIN_READ_BYTES
    assert max_read_bytes(train=(None, 0.8), valid=(7, 0.1)) is None
    assert max_read_bytes(train=(4000, 0.8)) == most
    assert max_read_bytes(train=(10**7, 0.5)) == 2 * 10**7 * BYTES_PER_TOKEN
    assert max_read_bytes(train=(10, 0.8), valid=(10**6, 0.1), test=(None, 0.1)) == 10**7 * BYTES_PER_TOKEN


def test_users_whose_text_is_cut_short_have_what_their_limits_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Splits are parted from what is read: the same as those of a file that ends there."""
    monkeypatch.setattr(files, "MIN_READ_BYTES", 20_000)
    (tmp_path / "long.txt").write_text(paragraphs(20_000))
    (tmp_path / "head.txt").write_text((tmp_path / "long.txt").read_text()[:20_000].rpartition("\n")[0])

    def read(path: str, **data: Any) -> Any:
        content = {"users": {"ann": {"path": str(tmp_path / path)}}, **data}
        return read_users(parse_recipe({"data": content}).data, 0)[0]

    assert read("long.txt", max_train_tokens=100) == read("head.txt")
    assert len("".join(read("long.txt").train)) > 300_000
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_two_gigabytes_are_not_read_for_four_thousand_tokens(tmp_path: Path) -> None:
    """A sparse file of that size that is text at its beginning."""
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.write(b"word " * 100 + b"\n\n")
        for _ in range(80):
            file.write((b"word " * 100 + b"\n\n") * 1000)
        file.truncate(2 << 30)
    code = (
        "from comingle.data.text.reading import read_users; from comingle.config import parse_recipe\n"
        f"data = parse_recipe({{'data': {{'users': {{'ann': {str(path)!r}}}, 'max_train_tokens': 4000}}}}).data\n"
        "print(sum(map(len, read_users(data, 0)[0].train)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30)),
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert 20e6 < int(done.stdout) < 32e6
