"""Data sets named as ``hub:NAME``: a folder laid out like one of the hub goes the same way, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from comingle.data.sources import read_dataset, read_documents
from comingle.utils.errors import DataError
from comingle.utils.names import HubName, parse_hub_name

CARD = """---
configs:
- config_name: news
  data_files: [{split: train, path: news/train.jsonl}, {split: test, path: news/test.jsonl}]
- config_name: torn
  data_files: [{split: train, path: [news/train.jsonl, torn.jsonl]}]
- config_name: books
  data_files: [{split: train, path: books/train.jsonl}]
---
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two configurations; the rows of one name their origin within a mapping, as SlimPajama's do."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    parts = {"news/train": 2000, "news/test": 4, "books/train": 3}
    for part, count in parts.items():
        path = folder / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": f"{part} {i}", "meta": {"set": "ab"[i % 2], "n": i}} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "torn.jsonl").write_text("no row\n")
    (folder / "README.md").write_text(CARD)
    return folder


def test_the_parts_of_a_name() -> None:
    assert parse_hub_name("hub:owner/name") == HubName(name="owner/name")
    found = parse_hub_name("hub:owner/name?config=c&split=s&files=a/*.parquet&documents=12")
    assert found == HubName(name="owner/name", config="c", split="s", files="a/*.parquet", documents=12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:o/n?splt=s", "'splt'. Did you mean 'split'? Allowed: config, split, files, documents"),
        ("hub:o/n?documents=0", "documents is '0'"),
        ("hub:o/n?split=", "write hub:OWNER/NAME?"),
        ("hub:?split=s", "write hub:OWNER/NAME?"),
    ],
)
def test_a_wrong_name_is_said(name: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_hub_name(name)
    assert str(error.value).startswith(f"{name}: ")
    assert message in str(error.value)


def test_a_user_reads_one_split_of_one_configuration(repository: Path) -> None:
    assert read_documents(f"hub:{repository}?config=books") == [f"books/train {i}" for i in range(3)]
    found = read_documents(f"hub:{repository}?config=news&split=test")
    assert found == [f"news/test {i}" for i in range(4)]
    assert len(read_documents(f"hub:{repository}?config=news")) == 2004


def test_a_limit_streams_the_first_rows(repository: Path, tmp_path: Path) -> None:
    found = read_documents(f"hub:{repository}?config=news&split=train&documents=5")
    assert found == [f"news/train {i}" for i in range(5)]
    # A stream leaves no table in the cache of the data sets.
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_users_by_a_field_of_a_column(repository: Path) -> None:
    name = f"hub:{repository}?config=news"
    found = read_dataset(name, user="meta.set", users=["b", "a"])
    assert list(found) == ["b", "a"]
    assert found["b"]["test"] == ["news/test 1", "news/test 3"]
    assert len(found["a"]["train"]) == 1000


def test_a_data_set_is_read_no_further_than_all_users_have_enough(repository: Path) -> None:
    name = f"hub:{repository}?config=news&split=train"
    assert read_dataset(name, user="meta.set", users=["b", "a"], max_documents=2) == {
        "b": {"train": ["news/train 1", "news/train 3"]},
        "a": {"train": ["news/train 0", "news/train 2"]},
    }
    # The next file of the split is broken: whoever goes on reading says so.
    name = f"hub:{repository}?config=torn"
    assert len(read_dataset(name, user="meta.set", users=["b", "a"], max_documents=500)["a"]["train"]) == 500
    assert len(read_documents(f"{name}&documents=40")) == 40
    with pytest.raises(DataError, match=r"^hub:.*config=torn"):
        read_dataset(name, user="meta.set", users=["b", "a"], max_documents=1001)


def test_limits_are_said_in_their_own_place(repository: Path) -> None:
    with pytest.raises(DataError, match=r"^hub:.*documents=3: .*max_documents"):
        read_dataset(f"hub:{repository}?config=news&documents=3", user="meta.set")


def test_an_unknown_split_and_column_are_said(repository: Path) -> None:
    with pytest.raises(DataError, match=r"split=dev: .*data set: .*dev"):
        read_documents(f"hub:{repository}?config=news&split=dev")
    with pytest.raises(DataError, match=r"config=news: .*'mta\.set'.*text, meta"):
        read_dataset(f"hub:{repository}?config=news", user="mta.set")
