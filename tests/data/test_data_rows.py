"""Names out of rows, valid JSON in unusual forms, folders of rows, and rows that cannot be used."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from comingle.config import parse_recipe
from comingle.data import row_files
from comingle.data.files import list_files
from comingle.data.row_files import MAX_REFUSED_ROWS, BadRows, BadRowsError, read_json
from comingle.data.sources import read_dataset, read_documents
from comingle.data.text.reading import read_users
from comingle.utils.errors import DataError


def write(path: Path, users: Sequence[Any], **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"user": user, "text": f"text {number}", **more} for number, user in enumerate(users)]
    if path.suffix == ".csv":
        path.write_text("user,text\n" + "".join(f"{row['user']},{row['text']}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names(source: Path | Sequence[Path], **options: Any) -> list[str]:
    return list(read_dataset(source, **{"user": "user", **options}))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json"])
@pytest.mark.parametrize(
    "users",
    [
        [2**63 + 1, 2**63 + 2],
        [2**53 + 1, 2**53, 0.5],
        ["007", 7, "ada"],
        ["null", "NaN", "true", "1e5", 3, '"ada"', "ada"],
        ["2024-01-01", "2024-01-01T00:00:00"],
        [1, "1.0", "01"],
    ],
)
def test_names_of_json_are_as_typed(tmp_path: Path, users: list[Any], suffix: str) -> None:
    assert names(write(tmp_path / f"rows.{suffix}", users)) == [str(user) for user in users]


def test_names_are_as_typed_whatever_another_file_or_a_later_row_holds(tmp_path: Path) -> None:
    files = [write(tmp_path / "folder" / "a.jsonl", [7]), write(tmp_path / "folder" / "b.jsonl", ["007"])]
    assert names(files) == names(tmp_path / "folder") == ["7", "007"]
    late = write(tmp_path / "late.jsonl", [*[7] * 30_000, "007", 7.50], note="n" * 400)
    late.write_text(late.read_text().replace("7.5,", "7.50,"))
    assert {user: len(splits["train"]) for user, splits in read_dataset(late, user="user").items()} == {
        "7": 30_000,
        "007": 1,
        "7.50": 1,
    }


def test_a_field_that_names_users_is_as_typed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"meta": {"set": "007"}, "text": "a"}, {"meta": {"set": 7}, "text": "b"}, {"meta": 3, "text": "c"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert names(path, user="meta.set") == ["007", "7"]


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), [1], {"a": 1}])
def test_a_json_value_that_is_no_name_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: line 2: column 'user' .*; allowed: "):
        names(write(tmp_path / "rows.jsonl", ["ada", value]))


@pytest.mark.parametrize("value", [b"a", Decimal("7.00"), float("nan"), 1.0, True, date(2024, 1, 1)])
def test_a_parquet_value_that_is_no_name_is_refused(tmp_path: Path, value: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"user": [value, None], "text": ["a", "b"]}), path)
    with pytest.raises(DataError, match=r"rows\.parquet: row 1: column 'user' .*; allowed: "):
        names(path)


def test_parquet_has_names_of_labels_large_numbers_and_other_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "user": datasets.ClassLabel(names=["sport", "world"]),
            "id": datasets.Value("int64"),
            "text": datasets.Value("string"),
        }
    )
    rows = {"user": [1, 0], "id": [2**53 + 1, 2**53], "text": ["a", "b"]}
    for suffix in (".parquet", ".parquet.gz"):
        path = tmp_path / f"rows{suffix}"
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
        if suffix.endswith("gz"):
            path.write_bytes(gzip.compress((tmp_path / "rows.parquet").read_bytes()))
        assert names(path) == ["world", "sport"]
        assert names(path, user="id") == [str(2**53 + 1), str(2**53)]
    with pytest.raises(DataError, match=r"rows\.parquet\.gz: .*'usr'; found: user, id, text\. Did you mean 'user'"):
        names(path, user="usr")


# ---------------------------------------------------------------- JSON in unusual forms

A, B = '{"user": "a", "text": "eins"}', '{"user": "b", "text": "zwei"}'


@pytest.mark.parametrize(
    "content",
    [
        f"\ufeff[{A}, {B}]",
        f"\n[{A},\n{B}]\n",
        f"   [ {A} , {B} ]",
        f"{A}\n\n{B}\n",
        f"\ufeff{A}\r\n{B}",
        json.dumps([json.loads(A), json.loads(B)], indent=4),
    ],
)
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_valid_json_is_read(tmp_path: Path, content: str, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text(content, encoding="utf-8")
    assert names(path) == ["a", "b"]
    assert read_documents(path) == ["eins", "zwei"]


def test_objects_over_several_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n".join(json.dumps(json.loads(row), indent=2) for row in (A, B)))
    assert names(path) == ["a", "b"]


@pytest.mark.parametrize("name", ["a::b.jsonl", "a?b#c.jsonl", "rows [1].json", "zip:x.jsonl"])
def test_signs_in_a_files_name_are_part_of_it(tmp_path: Path, name: str) -> None:
    assert names(write(tmp_path / name, ["a"])) == ["a"]


def test_columns_that_are_not_asked_for_may_change_their_type(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    notes = [None, 1, 2.5, "x", [1], {"k": 1}, {"k": "v"}, True]
    more = [{"user": "a", "text": "t", "type": "user", "message": note} for note in notes]
    path.write_text("".join(json.dumps(row) + "\n" for row in more))
    assert read_dataset(path, user="user") == {"a": {"train": ["t"] * len(notes)}}


def test_a_long_list_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_CHUNK_CHARACTERS", 16)
    text = 'a "quoted\\" ü \U0001f600 '
    rows = [{"user": f"u{i}", "text": text * (i % 7 + 1), "n": [1, None, {"k": -1.5}]} for i in range(99)]
    path = tmp_path / "rows.json"
    for indent in (None, 3):
        path.write_text(json.dumps(rows, indent=indent))
        assert [row for _, row in read_json(path, BadRows())] == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows$"),
        ("\n \n", "no rows$"),
        ("[]", "no rows$"),
        (f"[{A}, {{bad}}]", "line 1: row 2: .*Expecting property name"),
        (f"[{A}\n{B}]", "line 2: row 2: .*Expecting ',' delimiter"),
        (f"[{A},\n", "line 2: row 2: .*Expecting value"),
        (f"[{A}", "line 1: row 2: .*not closed"),
        (f"[{A}] {B}", "line 1: row 2: .*after the end"),
        (f"[{A}, 3]", "row 2: .*number; allowed: an object"),
        ('{"user": "a", "text": "half \\ud83d"}', "line 1: column 'text' .*surrogate"),
        ('{"user": ' + "9" * 5000 + "}", "line 1: row 1: .*Exceeds the limit"),
        ("[" * 200_000, "line 1: row 1: .*nested"),
        ('{"a":' * 200_000, "line 1: row 1: .*nested"),
        (f"[{A}, " + '{"a":' * 200_000, "line 1: row 2: .*nested"),
    ],
)
def test_what_is_wrong_with_json_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {message}") as raised:
        names(path)
    assert "\n" not in str(raised.value)


def test_utf_16_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(A, encoding="utf-16")
    with pytest.raises(DataError, match=r"rows\.jsonl: .*UTF-8"):
        names(tmp_path / "rows.jsonl")


# ---------------------------------------------------------------- folders


def test_every_file_of_rows_below_a_folder_is_read(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path / "ada_latest.jsonl", ["ada"])
    write(tmp_path / "ben_test_run.jsonl", ["ben"])
    write(tmp_path / "cem.json", ["cem"], extra=1)
    write(tmp_path / "dev" / "deep" / "dora.csv", ["dora"])
    write(tmp_path / ".hidden" / "x.jsonl", ["x"])
    write(tmp_path / "__MACOSX" / "y.jsonl", ["y"])
    assert sorted(names(tmp_path)) == ["ada", "ben", "cem", "dora"]
    assert caplog.messages == []
    for name in ("notes.txt", "more.xml", "README.md"):
        (tmp_path / name).write_text("bought milk\n")
    assert sorted(names(tmp_path)) == ["ada", "ben", "cem", "dora"]
    (message,) = caplog.messages
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}: .*2 files .*more\.xml", message)


def test_files_named_as_splits_are_splits(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002.jsonl", "train_1.jsonl", "validation/a.jsonl", "test.jsonl.gz", "other.jsonl"):
        path = write(tmp_path / name.removesuffix(".gz"), ["ada"])
        if name.endswith(".gz"):
            path.with_name("test.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    (ada,) = read_dataset(tmp_path, user="user").values()
    assert {split: len(texts) for split, texts in ada.items()} == {"train": 3, "validation": 1, "test": 1}


def test_files_that_all_have_a_split_in_their_names_are_splits(tmp_path: Path) -> None:
    for name in ("news_train.jsonl", "news_test.jsonl", "news_val.jsonl"):
        write(tmp_path / name, ["ada"])
    assert list(read_dataset(tmp_path, user="user")["ada"]) == ["train", "validation", "test"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "ben.jsonl", ["ben"])
    folder = write(tmp_path / "data" / "ada.jsonl", ["ada"]).parent
    (folder / "b").symlink_to(tmp_path / "elsewhere")
    (folder / "c").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    assert list_files(folder) == ["ada.jsonl", "b/ben.jsonl"]
    assert names(folder) == ["ada", "ben"]
    (tmp_path / "elsewhere" / "note.txt").write_text("a note")
    assert read_documents(tmp_path / "data") == ["a note"]


def test_folders_that_name_a_column_give_it_to_their_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for user, part in (("ada", "x"), ("007", "y"), ("b%20c", "z")):
        path = tmp_path / f"user={user}" / f"part={part}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.table({"text": [f"of {user}"]}), path)
    assert read_dataset(tmp_path, user="user", split="part") == {
        "007": {"y": ["of 007"]},
        "ada": {"x": ["of ada"]},
        "b c": {"z": ["of b%20c"]},
    }


def test_a_folder_without_rows_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}: .*found: nothing; allowed: \.jsonl, "):
        names(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(DataError, match=r"found: 1 .*notes\.txt"):
        names(tmp_path)


def test_a_file_below_a_folder_without_the_column_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["ada"])
    (tmp_path / "package.json").write_text('{"name": "x"}')
    with pytest.raises(DataError, match=r"package\.json: .*'text'; found: name"):
        names(tmp_path)


# ---------------------------------------------------------------- rows that cannot be used

MIXED = '{"user": "ada", "text": "one"}\n{bad\n{"user": [1], "text": "two"}\n[3]\n{"user": "ada", "text": 4}\n'


def test_all_rows_that_cannot_be_used_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(MIXED)
    with pytest.raises(BadRowsError) as raised:
        names(path)
    assert [problem.partition(": ")[2].split(":")[0] for problem in raised.value.problems] == [
        "line 2",
        "line 3",
        "line 4",
        "line 5",
    ]
    assert re.match(f"4 rows .*: {re.escape(str(path))}: line 2: .*; .*line 5: ", str(raised.value))
    assert str(raised.value).endswith(" data.on_bad_row: skip")
    assert "\n" not in str(raised.value)


def test_rows_that_cannot_be_used_are_left_out_where_asked_for(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(MIXED + '{"user": "ada", "text": "five"}\n')
    content = {"dataset": {"path": str(tmp_path / "rows.jsonl"), "user": "user"}, "split": {"valid": 0, "test": 0}}
    with caplog.at_level(logging.WARNING, logger="comingle"):
        (ada,) = read_users(parse_recipe({"data": {**content, "on_bad_row": "skip"}}).data, 0)  # type: ignore[arg-type]
    assert sorted(ada.train) == ["five", "one"]
    (message,) = caplog.messages
    assert re.match(r"data\.on_bad_row: .*4 rows.*rows\.jsonl: line 2: ", message)
    with pytest.raises(BadRowsError):
        read_users(parse_recipe({"data": content}).data, 0)  # type: ignore[arg-type]


def test_rows_of_several_users_files_are_named_at_once(tmp_path: Path) -> None:
    files = {name: write(tmp_path / f"{name}.jsonl", [1, 2]) for name in ("ada", "ben")}
    for path in files.values():
        path.write_text(path.read_text() + "{bad\n")
    users = {name: str(path) for name, path in files.items()}
    with pytest.raises(BadRowsError) as raised:
        read_users(parse_recipe({"data": {"users": users}}).data, 0)  # type: ignore[arg-type]
    assert len(raised.value.problems) == 2


def test_reading_ends_when_very_many_rows_are_refused() -> None:
    bad = BadRows()
    for number in range(1, MAX_REFUSED_ROWS):
        bad.add(f"line {number}", "wrong")
    with pytest.raises(BadRowsError, match=f"^{MAX_REFUSED_ROWS} rows .*; and 980 more"):
        bad.add(f"line {MAX_REFUSED_ROWS}", "wrong")


# ---------------------------------------------------------------- documents and files there twice


def users_of(data: dict[str, Any]) -> list[Any]:
    return read_users(parse_recipe({"data": data}).data, 0)  # type: ignore[arg-type]


def test_repeated_documents_are_left_out_where_asked_for(tmp_path: Path, caplog: Any) -> None:
    texts = ["one two", "ONE  two\n", "three", "one two", "four"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"user": "ada", "text": text}) + "\n" for text in texts))
    data = {"dataset": {"path": str(path), "user": "user"}, "split": {"valid": 0, "test": 0}}
    assert len(users_of(data)[0].train) == 5
    assert caplog.messages == []
    assert sorted(users_of(data | {"deduplicate": True})[0].train) == ["four", "one two", "three"]
    (message,) = caplog.messages
    assert re.fullmatch(r"data\.deduplicate: .*2 .*'ada' \(2\)", message)


def test_a_repeated_document_stays_where_it_is_held_out(tmp_path: Path) -> None:
    for name, texts in {"old": ["a", "b", "c"], "new": ["c", "d", "d"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = {"train": str(tmp_path / "old.jsonl"), "test": str(tmp_path / "new.jsonl")}
    data = {"users": {"ada": files}, "split": {"valid": 0}, "deduplicate": True}
    (ada,) = users_of(data)
    assert (ada.train, ada.test) == (("a", "b"), ("c", "d"))


def test_users_with_the_same_file_are_said(tmp_path: Path, caplog: Any) -> None:
    for name, text in {"a.txt": "one text", "copy.txt": "one text", "b.txt": "two text"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    files = {"ada": "a.txt", "ben": "copy.txt", "cem": "b.txt", "dora": "link.txt"}
    users_of({"users": {name: str(tmp_path / file) for name, file in files.items()}})
    (message,) = caplog.messages
    assert re.fullmatch("data.users: .*: 'ada' and 'ben'; 'cem' and 'dora'", message)
    caplog.clear()
    users_of({"users": {"ada": str(tmp_path / "a.txt"), "cem": str(tmp_path / "b.txt")}})
    assert caplog.messages == []


# ---------------------------------------------------------------- sources made to fill memory


def peak_and_error(path: Path, read: str) -> tuple[float, str]:
    """Read in a process of its own: how many MiB it took at most, besides those of the imports, and the error."""
    code = f"""if 1:
        import resource
        from comingle.data.sources import read_dataset, read_documents
        from comingle.utils.errors import DataError
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            {read}({str(path)!r}{', user="user"' if read == "read_dataset" else ""})
        except DataError as error:
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, error)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, _, message = run.stdout.strip().partition(" ")
    assert "\n" not in message
    return float(peak), message


EXPANDS = "200 times"
ROW = b'{"user": "ada", "text": "' + b"a " * 500 + b'"}\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "body", "times", "message"),
    [
        ("rows.jsonl.gz", b"", ROW, 300_000, EXPANDS),
        (
            "rows.csv.gz",
            b"user,text\n",
            b"ada," + b"a " * 500 + b"\n",
            600_000,
            EXPANDS,
        ),
        ("rows.json.gz", b'[{"text": "', b"a " * 500, 600_000, EXPANDS),
        ("rows.jsonl", b'{"text": "', b"a " * 500, 80_000, "line 1.* 64 MiB"),
        ("rows.json", b'[{"text": "', b"a " * 500, 80_000, "line 1: row 1: .*64 MiB"),
        ("rows.csv", b'user,text\nada,"', b"a " * 500, 80_000, "line 2.* 64 MiB"),
    ],
)
def test_a_source_made_to_fill_memory_is_one_line(
    tmp_path: Path, name: str, head: bytes, body: bytes, times: int, message: str
) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=9) if name.endswith(".gz") else path.open("wb") as file:
        file.write(head)
        for _ in range(times // 1000):
            file.write(body * 1000)
    peak, error = peak_and_error(path, "read_dataset")
    assert re.match(f"{re.escape(str(path))}: .*{message}", error)
    assert peak < 700


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "text.txt.gz", "rows.csv.xz"])
def test_decompressed_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Text that is compressed so little that the bound on expansion does not apply."""
    path, line = tmp_path / name, '{"text": "a b"}' if "jsonl" in name else "text" if "csv" in name else "a b"
    content = "\n".join([line] * 3000).encode()
    path.write_bytes(gzip.compress(content, 1) if name.endswith("gz") else lzma.compress(content))
    monkeypatch.setenv("COMINGLE_MAX_DECOMPRESSED_BYTES", str(len(content) - 1))
    with pytest.raises(DataError, match=rf"{name}: .*{len(content) - 1:,} bytes; .*COMINGLE_MAX_DECOMPRESSED_BYTES"):
        read_documents(path)
    monkeypatch.setenv("COMINGLE_MAX_DECOMPRESSED_BYTES", str(len(content)))
    assert read_documents(path)


def test_a_limit_of_decompressed_bytes_that_is_no_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"a b"))
    for given in ("8 GiB", "0", "-1"):
        monkeypatch.setenv("COMINGLE_MAX_DECOMPRESSED_BYTES", given)
        with pytest.raises(DataError, match=f"^COMINGLE_MAX_DECOMPRESSED_BYTES: got '{given}'; allowed: "):
            read_documents(path)


def test_rows_with_the_same_problem_share_a_message(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[1, 2, {"text": "a"}, 3, "b"]')
    with pytest.raises(BadRowsError) as raised:
        read_documents(path)
    place = re.escape(str(path))
    expected = f"4 rows .*: {place}: row 1, row 2, row 4: [^:]*number; [^:]*: [^:]*; {place}: row 5: [^:]*string; "
    assert re.match(expected, str(raised.value))
    assert re.match(f"{place}: row 1: [^:]*number; ", raised.value.problems[0])


@pytest.mark.parametrize("name", ["word.txt", "word.jsonl"])
def test_a_text_without_white_space_is_refused(tmp_path: Path, name: str) -> None:
    word = "aGVsbG8g" * 200_000
    path = tmp_path / name
    path.write_text(json.dumps({"text": word}) if name.endswith("jsonl") else word)
    with pytest.raises(DataError, match=rf"{name}: .*1,048,576 characters"):
        read_documents(path)
    path.write_text("\n".join(json.dumps({"text": f"{word[:1000]} "}) for _ in range(1500)))
    assert read_documents(path)
