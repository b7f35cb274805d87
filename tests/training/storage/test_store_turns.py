"""Users of a recipe who are read one after another are those who are read all at once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from populations import recipe_of, require_same, said, talks, write_rows

from comingle.data.conversations.encoding import Answers
from comingle.data.populations import StoredNames, StoredNamesWriter
from comingle.data.samples.samples import SPLITS
from comingle.data.splits import Mixture, UserText
from comingle.data.streaming import StoredRows
from comingle.runs import api
from comingle.utils.errors import ComingleError, require_user
from resuming import final


def test_files_of_text(files: dict[str, str]) -> None:
    require_same({"users": files, "max_train_tokens": {"ann": 100}, "max_test_tokens": 50})


def test_files_of_text_with_validation_text_to_train_on(files: dict[str, str]) -> None:
    require_same({"users": files, "train_on_valid": True})


def test_rows_of_text(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = write_rows(tmp_path / "rows.jsonl", {name: said(name, 8) for name in ("ann", "bob", "cem", "dag")}, "text")
    dataset = {"path": str(path), "user": "who"}
    disk = require_same({"dataset": dataset})
    assert len(disk.users) == 4
    require_same({"dataset": dataset | {"users": 3, "max_documents": 5}})
    require_same({"dataset": dataset | {"users": ["cem", "ann"]}})


def test_conversations_in_files_and_in_rows(tmp_path: Path) -> None:
    people = {name: talks(name, 6) for name in ("ann", "bob")}
    for name, has in people.items():
        write_rows(tmp_path / f"{name}.jsonl", {name: has}, "messages")
    named = {name: str(tmp_path / f"{name}.jsonl") for name in people}
    disk = require_same({"kind": "conversations", "users": named})
    assert isinstance(disk.users[0].train, Answers)
    path = write_rows(tmp_path / "all.jsonl", people, "messages")
    dataset = {"path": str(path), "user": "who", "max_conversations": 5}
    require_same({"kind": "conversations", "dataset": dataset, "scores": ["rouge1"]})


def test_a_mixture_of_everybodys_held_out_text(files: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Who has too little text of their own gives none; who has then too little of the mixture is refused."""
    pytest.importorskip("datasets")
    data = {"users": files, "held_out": "mixture", "max_test_tokens": {"bob": 60}}
    assert len(require_same(data).users[1].test) == 60
    require_same(data | {"train_on_valid": True, "split": {"valid": 0.2, "test": 0.2}})
    small = Path(files["ann"]).with_name("small.jsonl")
    write_rows(small, {"eve": ["x"]}, "text")
    with_eve = data | {"users": {"eve": str(small), **files}}
    caplog.clear()
    skipping = require_same(with_eve | {"on_small_user": "skip"})
    assert list(skipping.users.names) == ["ann", "bob", "cem", "dag"]
    assert len({line for line in caplog.messages if "skipped " in line}) == 1  # by both stores, in the same words
    told = []
    for store in ("memory", "disk"):
        with pytest.raises(ComingleError) as caught:
            api.run(recipe_of(with_eve, store))
        told.append(str(caught.value))
        with pytest.raises(ComingleError) as caught:
            api.run(recipe_of(data, store, method="comigs-1g1s", training={"rounds": 1, "context": 2000}))
        told.append(str(caught.value))
    assert told[:2] == told[2:]


def test_a_mixture_trains_as_in_memory(files: dict[str, str], tmp_path: Path) -> None:
    for store in ("memory", "disk"):
        api.run(recipe_of({"users": files, "held_out": "mixture"}, store), out=tmp_path / store)
    assert final(tmp_path / "memory") == final(tmp_path / "disk")
    assert not [*tmp_path.rglob("*.pieces"), *tmp_path.rglob("rows.bin")]  # no text is left in the cache


@pytest.mark.slow
def test_conversations_and_samples_train_as_in_memory(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "all.jsonl", {name: talks(name, 6) for name in ("ann", "bob", "cem")}, "messages")
    draw = np.random.default_rng(0)
    for name in ("ann", "bob", "cem"):
        arrays = {"inputs": draw.normal(size=(15, 5)).astype(np.float32), "targets": draw.integers(0, 3, 15)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    for kind, data in {
        "conversations": {"dataset": {"path": str(path), "user": "who"}},
        "samples": {"users": {name: str(tmp_path / f"{name}.npz") for name in ("ann", "bob", "cem")}},
    }.items():
        for store in ("memory", "disk"):
            api.run(recipe_of({"kind": kind, **data}, store), out=tmp_path / kind / store)
        assert final(tmp_path / kind / "memory") == final(tmp_path / kind / "disk")


def test_text_that_does_not_change_trains_as_in_memory(files: dict[str, str], tmp_path: Path) -> None:
    for store in ("memory", "disk"):
        api.run(recipe_of({"users": files}, store, evaluation={"users": 2}), out=tmp_path / store)
    assert final(tmp_path / "memory") == final(tmp_path / "disk")


def test_a_line_about_a_name_has_an_end() -> None:
    names = [f"user-{number}" for number in range(30_000)]
    with pytest.raises(ComingleError, match=r"no user 'nobody'.* user-0, .* and 29980 more") as caught:
        require_user("nobody", names)
    assert len(str(caught.value)) < 300


def test_rows_are_grouped_without_holding_them(tmp_path: Path) -> None:
    def peak(users: int) -> int:
        tracemalloc.start()
        spool = StoredRows(tmp_path)
        spool.fill((f"user-{i % users}", "train", bytes(1000)) for i in range(3 * users))
        for name, groups in spool.groups(spool.users):
            assert len(groups["train"]) == 3, name
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = peak(200), peak(1000)
    assert (many - few) / 800 < 600  # of 3,000 bytes of text each


def test_names_are_found_in_files(tmp_path: Path) -> None:
    wanted = [f"user {i * 7919 % 1000}" for i in range(1000)]
    writer = StoredNamesWriter(tmp_path)
    for name in wanted:
        writer.add(name)
    names = writer.finish()
    assert list(names) == wanted
    assert [names.index(name) for name in wanted] == list(range(1000))
    part = names[300:400]
    assert isinstance(part, StoredNames)
    assert (list(part), part.index(wanted[317])) == (wanted[300:400], 17)
    assert wanted[299] not in part
    assert "nobody" not in names
    twice = StoredNamesWriter(tmp_path)
    for name in ("ann", "bob", "ann"):
        twice.add(name)
    with pytest.raises(ComingleError, match=r"user 'ann' .*twice"):
        twice.finish()


@pytest.mark.slow
def test_a_mixture_is_made_without_a_list_of_all(tmp_path: Path) -> None:
    """Of 40,000 bytes of held-out text each, and of what is trained on, one user's are in memory at a time."""

    def peak(users: int) -> int:
        mixture = Mixture(StoredRows(tmp_path).new_document_lists, seed=0)
        tracemalloc.start()
        for i in range(users):
            train, *held_out = (tuple(f"{i} {split} {n:05d}" * 100 for n in range(20)) for split in SPLITS)
            mixture.add(UserText(name=f"user {i}", train=train, valid=held_out[0], test=held_out[1]))
        assert sum(len(text.test) > users // 2 for text in mixture.texts()) == users
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        mixture.remove()
        return most

    few, many = peak(10), peak(40)
    assert (many - few) / 30 < 4000
