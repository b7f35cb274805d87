"""Users of a recipe who are read one after another are those who are read all at once, and are read once."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from comingle.data.answers import Answers
from comingle.data.crowds import Crowd, names_of
from comingle.data.partition import UserText
from comingle.data.samples import SPLITS, UserSamples
from comingle.errors import ComingleError, RunError, require_user
from comingle.kinds.base import Materials
from comingle.recipes import Recipe, parse_recipe
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.store import arrays, opening, turns
from comingle.store.grouping import Spool
from comingle.store.mixing import Mixture
from comingle.store.names import Names, NamesWriter
from resuming import StoppedError, final, stop_in_round_3

WORDS = ["tide", "lamp", "chalk", "river", "bread", "stone", "cloud", "glass"]


def said(name: str, count: int, words: int = 40) -> list[str]:
    draw = random.Random(name)
    return [f"{name} " + " ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def write_rows(path: Path, people: Mapping[str, list[Any]], column: str) -> Path:
    """Everybody's rows, in an order in which they are mixed."""
    rows = [{"who": name, column: what} for name, has in people.items() for what in has]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talks(name: str, count: int) -> list[Any]:
    return [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in said(name, count)]


def recipe_of(data: Mapping[str, Any], store: str = "disk", **more: Any) -> Recipe:
    content: dict[str, Any] = {
        "base": "random:llama",
        "method": "fedavg",
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "local_steps": 1, "batch_size": 2, "context": 16},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": False, "store": store},
    }
    if data.get("kind") == "conversations":
        content["training"] = {"rounds": 2, "batch_size": 2, "context": 300}
    if data.get("kind") == "samples":
        del content["base"], content["adapters"]
        content["training"] = {"rounds": 2, "batch_size": 4}
    return parse_recipe(content | {"data": data} | more)


def contents(part: Any) -> list[Any]:
    parts = getattr(part, "contents", (part,))
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in parts]


def both(data: Mapping[str, Any]) -> tuple[Materials, Materials]:
    return prepare(recipe_of(data, "memory")), prepare(recipe_of(data))


def require_same(data: Mapping[str, Any]) -> Materials:
    memory, disk = both(data)
    assert isinstance(disk.users, Crowd)
    assert list(disk.users.names) == [user.name for user in memory.users]
    for one, other in zip(memory.users, disk.users, strict=True):
        assert type(one) is type(other)
        assert [contents(getattr(one, split)) for split in SPLITS] == [
            contents(getattr(other, split)) for split in SPLITS
        ]
    assert dict(memory.skipped) == dict(disk.skipped)
    return disk


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, count in {"ann": 9, "bob": 5, "cem": 7}.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(said(name, count, 200)))
    folder = tmp_path / "dag"
    folder.mkdir()
    for number, text in enumerate(said("dag", 6)):
        (folder / f"{number}.txt").write_text(text)
    return {name: str(tmp_path / f"{name}.txt") for name in ("ann", "bob", "cem")} | {"dag": str(folder)}


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


@pytest.mark.parametrize("loss", [None, "mse"])
def test_samples_in_arrays(tmp_path: Path, loss: str | None) -> None:
    draw = np.random.default_rng(0)
    for name, count in {"ann": 20, "bob": 12}.items():
        arrays = {"inputs": draw.normal(size=(count, 5)).astype(np.float32), "targets": draw.integers(0, 3, count)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    data = {"kind": "samples", "users": {name: str(tmp_path / f"{name}.npz") for name in ("ann", "bob")}}
    data |= {"loss": loss} if loss else {}
    for more in ({}, {"classes": 5}):
        memory, disk = both(data | more)
        require_same(data | more)
        assert replace(memory.common, users=()) == replace(disk.common, users=())


def paint(folder: Path, classes: Mapping[str, int], count: int = 8, size: tuple[int, int] = (5, 4)) -> str:
    """Images in one colour each; a class without images is one too."""
    image = pytest.importorskip("PIL.Image")
    for name, value in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count if value else 0):
            image.new("RGB", size, (value, i, 255 - value)).save(folder / name / f"{i}.png")
    return str(folder)


def test_folders_of_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Classes are those of all users, whoever is read first."""
    users: dict[str, Any] = {
        "ann": paint(tmp_path / "ann", {"cat": 10, "owl": 90}),
        "bob": paint(tmp_path / "bob", {"ape": 50, "cat": 20, "dog": 0}),
        "cem": {split: paint(tmp_path / "cem" / split, {"owl": 70, "cat": 30}) for split in ("train", "test")},
    }
    data = {"kind": "samples", "users": users}
    for more in ({}, {"image_size": [3, 6], "grayscale": True}, {"classes": ["owl", "cat", "fox", "ape", "dog"]}):
        caplog.clear()
        memory, disk = both(data | more)
        assert replace(memory.common, users=()) == replace(disk.common, users=())
        lines = [line for line in caplog.messages if "lack some" in line]
        assert (len(lines), len({*lines})) == (2, 1)
        require_same(data | more)
    for store in ("memory", "disk"):
        api.run(recipe_of(data, store), out=tmp_path / store)
    assert final(tmp_path / "memory") == final(tmp_path / "disk")


def test_folders_of_images_are_refused_in_the_same_words(tmp_path: Path) -> None:
    np.savez(tmp_path / "dag.npz", inputs=np.zeros((9, 5), dtype=np.float32), targets=np.arange(9) % 2)
    ann, dag = paint(tmp_path / "ann", {"cat": 10, "owl": 90}), str(tmp_path / "dag.npz")
    for data in (
        {"users": {"ann": ann, "dag": dag}},
        {"users": {"dag": dag}, "grayscale": True},
        {"users": {"ann": ann}, "classes": ["cat", "dog"]},
        {"users": {"ann": ann, "bob": str(tmp_path / "nowhere")}},
        {"users": {"ann": ann, "bob": paint(tmp_path / "bob", {"cat": 10}, size=(7, 4))}},
    ):
        told = []
        for store in ("memory", "disk"):
            with pytest.raises(ComingleError) as caught:
                api.run(recipe_of({"kind": "samples", **data}, store))
            told.append(str(caught.value))
        assert told[0] == told[1]


def test_a_new_class_is_seen_though_it_has_no_images(tmp_path: Path) -> None:
    data = {"kind": "samples", "users": {"ann": paint(tmp_path / "ann", {"cat": 10, "owl": 90})}}
    assert require_same(data).common.labels == ("cat", "owl")
    (tmp_path / "ann" / "dog").mkdir()
    assert require_same(data).common.labels == ("cat", "dog", "owl")


def test_one_user_with_images_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first, to whose shapes those of the others are held."""
    users = {f"user {i}": paint(tmp_path / str(i), {"cat": 10, "owl": 90}) for i in range(6)}
    alive, most = weakref.WeakSet[Any](), list[int]()
    original = arrays.part

    def part(*args: Any, **more: Any) -> UserSamples:
        user = original(*args, **more)
        alive.add(user.train.inputs)
        most.append(len(alive))
        return user

    monkeypatch.setattr(arrays, "part", part)
    prepare(recipe_of({"kind": "samples", "users": users}))
    assert len(most) == 6
    assert max(most) <= 3


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
    assert list(names_of(skipping.users)) == ["ann", "bob", "cem", "dag"]
    assert len({line for line in caplog.messages if "left out" in line}) == 1  # by both stores, in the same words
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


# ---------------------------------------------------------------- who has too little


@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_who_has_too_little_is_refused_in_the_same_words(tmp_path: Path, kind: str) -> None:
    has = {"ann": 8, "bob": 1, "cem": 1, "dag": 9}
    for name, count in has.items():
        if kind == "text":
            write_rows(tmp_path / f"{name}.jsonl", {name: said(name, count) if count > 1 else ["x"]}, "text")
        else:
            write_rows(tmp_path / f"{name}.jsonl", {name: talks(name, count)}, "messages")
    data: dict[str, Any] = {"kind": kind, "users": {name: str(tmp_path / f"{name}.jsonl") for name in has}}
    told = []
    for store in ("memory", "disk"):
        recipe = recipe_of(data, store)
        with pytest.raises(ComingleError, match=r"2 of 4 users have too (little|few)") as caught:
            api.run(recipe)
        told.append(str(caught.value))
    assert told[0] == told[1]
    skipping = {**data, "on_small_user": "skip"}
    assert list(names_of(require_same(skipping).users)) == ["ann", "dag"]


def test_who_is_left_out_is_counted_and_stands_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that is looked at grows with their number."""
    has = {f"small-{i}": ["x"] for i in range(150)} | {name: said(name, 8) for name in ("ann", "bob")}
    path = write_rows(tmp_path / "rows.jsonl", has, "text")
    data = {"dataset": {"path": str(path), "user": "who"}, "on_small_user": "skip"}
    pytest.importorskip("datasets")
    for out in ("first", "second"):  # the second time they are not read anew
        caplog.clear()
        api.run(recipe_of(data), out=tmp_path / out)
        (line,) = [text for text in caplog.messages if "left out" in text]
        assert line.startswith("150 of 152 users are left out, as they have too little text: ")
        assert line.endswith("and 140 more")
        skipped = json.loads((tmp_path / out / "skipped.json").read_text())
        assert skipped.keys() == has.keys() - {"ann", "bob"}
        for told in (final(tmp_path / out), json.loads((tmp_path / out / "events.jsonl").read_text().split("\n")[0])):
            assert len(told["skipped_users"]) == 100
            assert told["skipped"] == 150


# ---------------------------------------------------------------- once


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders into which users were read."""
    folders: list[Path] = []
    original: Callable[..., None] = opening.write_in_turn

    def write(turns: Any, folder: Path) -> None:
        folders.append(folder)
        original(turns, folder)

    monkeypatch.setattr(opening, "write_in_turn", write)
    return folders


def test_users_are_read_once_until_a_file_changes(files: dict[str, str], written: list[Path]) -> None:
    recipe = recipe_of({"users": files})
    first = prepare(recipe).users
    again = prepare(recipe.with_changes({"method": "local", "training.rounds": 1})).users
    assert isinstance(first, Crowd)
    assert isinstance(again, Crowd)
    assert len(written) == 1
    assert again.digest == first.digest
    Path(files["ann"]).write_text("\n\n".join(said("other", 9, 200)))
    changed = prepare(recipe).users
    assert isinstance(changed, Crowd)
    assert len(written) == 2
    assert changed.digest != first.digest
    prepare(recipe.with_changes({"seed": 1}))
    prepare(recipe.with_changes({"training.context": 17}))
    assert len(written) == 4


def test_what_is_torn_is_written_anew(files: dict[str, str], written: list[Path], own_cache: Path) -> None:
    recipe = recipe_of({"users": files, "max_test_tokens": 40})
    first = prepare(recipe).users
    (place,) = [path for path in (own_cache / "populations").glob("*/users.bin") if path.stat().st_size]
    place.write_bytes(place.read_bytes()[:-16])
    again = prepare(recipe).users
    assert isinstance(first, Crowd)
    assert isinstance(again, Crowd)
    assert len(written) == 2
    assert again.digest == first.digest


def test_what_two_processes_delete_at_once_is_deleted(
    files: dict[str, str], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes what this one is looking at, or is about to use it."""
    gone, used, old = (own_cache / "populations" / name for name in ("gone", "used", "old"))
    for place in (used, old):
        place.mkdir(parents=True)
        (place / "about.json").write_text("{}")
        os.utime(place / "about.json", (0, 0))
    original = Path.glob

    def glob(where: Path, pattern: str) -> Any:
        late = [gone / "about.json"] if "about" in pattern else [where / "gone.partial-1"]
        return iter([*late, *original(where, pattern)])

    monkeypatch.setattr(Path, "glob", glob)
    with FileLock(own_cache / "populations" / "used.lock"):
        prepare(recipe_of({"users": files, "max_test_tokens": 30}))
    assert (used.exists(), old.exists()) == (True, False)


@pytest.mark.slow
def test_what_is_no_file_is_read_anew(written: list[Path]) -> None:
    recipe = recipe_of(
        {"users": {"ann": "demo:licences", "bob": "demo:library"}, "max_train_tokens": 100, "max_test_tokens": 50}
    )
    prepare(recipe)
    prepare(recipe)
    assert len(written) == 2


def test_a_run_opens_without_its_users_data(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are in its folder; the data is asked for where it is needed, and has to be the same."""
    recipe = recipe_of({"users": files})
    api.run(recipe, out=tmp_path / "run")
    Path(files["ann"]).unlink()
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "elsewhere"))
    opened = api.load(tmp_path / "run")
    assert opened.users == ["ann", "bob", "cem", "dag"]
    assert opened.user("cem").name == "cem"
    with pytest.raises(ComingleError, match="this needs the users' data, which is not in a run folder"):
        len(opened.federation.clients.users[0].train)
    Path(files["ann"]).write_text("\n\n".join(said("other", 9, 200)))
    with pytest.raises(RunError, match="the users or their data changed since the run began"):
        len(api.load(tmp_path / "run").federation.clients.users[0].train)


def test_a_run_goes_on_with_the_same_text_alone(files: dict[str, str], tmp_path: Path) -> None:
    recipe = recipe_of({"users": files}, training={"rounds": 4, "local_steps": 1, "batch_size": 2, "context": 16})
    api.run(recipe, out=tmp_path / "whole")
    for name in ("stopped", "changed"):
        with pytest.raises(StoppedError):
            api.run(recipe, out=tmp_path / name, observers=[stop_in_round_3])
    api.run(recipe, out=tmp_path / "stopped", resume=True)
    assert final(tmp_path / "stopped") == final(tmp_path / "whole")
    shutil.move(files["ann"], files["ann"] + ".old")
    Path(files["ann"]).write_text("\n\n".join(said("other", 9, 200)))
    with pytest.raises(RunError, match="the users or their data changed since the run began"):
        api.run(recipe, out=tmp_path / "changed", resume=True)


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
    with pytest.raises(ComingleError, match=r"no user 'nobody'; there are: user-0, .* and 29980 more") as caught:
        require_user("nobody", names)
    assert len(str(caught.value)) < 300


# ---------------------------------------------------------------- parts


def test_rows_are_grouped_without_holding_them(tmp_path: Path) -> None:
    def peak(users: int) -> int:
        tracemalloc.start()
        spool = Spool(tmp_path)
        spool.fill((f"user-{i % users}", "train", bytes(1000)) for i in range(3 * users))
        for name, groups in spool.groups(spool.owners):
            assert len(groups["train"]) == 3, name
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = peak(200), peak(1000)
    assert (many - few) / 800 < 600  # of 3,000 bytes of text each


def test_names_are_found_in_files(tmp_path: Path) -> None:
    wanted = [f"user {i * 7919 % 1000}" for i in range(1000)]
    writer = NamesWriter(tmp_path)
    for name in wanted:
        writer.add(name)
    names = writer.finish()
    assert list(names) == wanted
    assert [names.index(name) for name in wanted] == list(range(1000))
    part = names[300:400]
    assert isinstance(part, Names)
    assert (list(part), part.index(wanted[317])) == (wanted[300:400], 17)
    assert wanted[299] not in part
    assert "nobody" not in names
    twice = NamesWriter(tmp_path)
    for name in ("ann", "bob", "ann"):
        twice.add(name)
    with pytest.raises(ComingleError, match="user 'ann' twice"):
        twice.finish()


def test_a_mixture_is_made_without_a_list_of_all(tmp_path: Path) -> None:
    """Of 40,000 bytes of held-out text each, and of what is trained on, one user's are in memory at a time."""

    def peak(users: int) -> int:
        mixture = Mixture(tmp_path, seed=0)
        tracemalloc.start()
        for i in range(users):
            train, *held_out = (tuple(f"{i} {split} {n:05d}" * 100 for n in range(20)) for split in SPLITS)
            mixture.add(UserText(name=f"user {i}", train=train, valid=held_out[0], test=held_out[1]))
        assert sum(len(text().test) > users // 2 for _, text in mixture.texts()) == users
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        mixture.remove()
        return most

    few, many = peak(10), peak(40)
    assert (many - few) / 30 < 4000


# ---------------------------------------------------------------- not stale


def test_a_class_behind_a_link_is_read_anew_when_it_changes(tmp_path: Path, written: list[Path]) -> None:
    paint(tmp_path / "elsewhere", {"owl": 50, "dog": 70})
    folder = tmp_path / "ann"
    paint(folder, {"cat": 10})
    (folder / "owl").symlink_to(tmp_path / "elsewhere" / "owl")
    (folder / "cat" / "round").symlink_to(folder)
    data = {"kind": "samples", "users": {"ann": str(folder)}}
    require_same(data)
    shutil.copy(tmp_path / "elsewhere" / "dog" / "0.png", tmp_path / "elsewhere" / "owl" / "9.png")
    require_same(data)
    (folder / "owl").unlink()
    (folder / "owl").symlink_to(tmp_path / "elsewhere" / "dog")
    require_same(data)
    require_same(data)
    assert len(written) == 3


def test_a_link_to_nowhere_is_passed_over_as_in_memory(tmp_path: Path) -> None:
    for number, text in enumerate(said("dag", 6)):
        (tmp_path / "dag").mkdir(exist_ok=True)
        (tmp_path / "dag" / f"{number}.txt").write_text(text)
    (tmp_path / "dag" / "9.txt").symlink_to("nowhere")
    require_same({"users": {"dag": str(tmp_path / "dag")}})
    for store in ("memory", "disk"):
        with pytest.raises(ComingleError, match="no such file or folder"):
            prepare(recipe_of({"users": {"dag": "x" * 300}}, store))


def test_a_file_of_equal_size_and_time_is_read_anew(files: dict[str, str]) -> None:
    """As archives that are made to be the same whenever they are made have them."""
    data, path = {"users": files}, Path(files["ann"])
    require_same(data)
    was = path.stat()
    path.write_text(path.read_text().replace("tide", "edit"))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_size == was.st_size
    require_same(data)


def test_users_who_change_places_are_read_anew(files: dict[str, str]) -> None:
    """Two with the same file, too: their order is that of the rows of a run."""
    for users in (("ann", "eve"), ("eve", "ann")):
        disk = require_same({"users": dict.fromkeys(users, files["ann"])})
        assert tuple(names_of(disk.users)) == users


@pytest.mark.parametrize("name", ["about.json", "names.text", "names.index", "names.hashes", "skipped.jsonl"])
@pytest.mark.parametrize("keeps", [None, 0.5])
def test_a_file_of_the_cache_that_is_torn_or_gone_has_all_read_anew(
    files: dict[str, str], tmp_path: Path, written: list[Path], own_cache: Path, name: str, keeps: float | None
) -> None:
    for user in ("eve", "fay"):
        files |= {user: str(tmp_path / user)}
        Path(files[user]).write_text("x\n")
    data = {"users": files, "on_small_user": "skip"}
    require_same(data)
    (place,) = (own_cache / "populations").glob(f"*/{name}")
    content = place.read_bytes()
    place.unlink()
    if keeps is not None:
        lines = content.splitlines(keepends=True)  # whole lines and numbers, as they are harder to see
        at = len(lines[0]) if name == "skipped.jsonl" else int(len(content) * keeps) // 8 * 8
        place.write_bytes(content[:at])
    disk = require_same(data)
    assert [names_of(disk.users).index(one) for one in ("ann", "dag")] == [0, 3]
    assert len(written) == 2


# ---------------------------------------------------------------- as in memory, refused or not


def require_refused_alike(data: Mapping[str, Any]) -> str:
    told = []
    for store in ("memory", "disk"):
        with pytest.raises(ComingleError) as caught:
            api.run(recipe_of(data, store))
        told.append(str(caught.value))
    assert told[0] == told[1]
    return told[0]


@pytest.mark.parametrize("loss", [None, "mse", "cross_entropy"])
@pytest.mark.parametrize("first", ["int64", "float32"])
def test_classes_of_one_and_numbers_of_another_are_refused(tmp_path: Path, loss: str | None, first: str) -> None:
    """Whoever comes first: the one's classes would be regressed on."""
    inputs, targets = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32), np.arange(12) % 3
    for dtype in ("int64", "float32"):
        np.savez(tmp_path / f"{dtype}.npz", inputs=inputs, targets=targets.astype(dtype))
    names = sorted(("int64", "float32"), key=lambda dtype: dtype != first)
    users = {name: str(tmp_path / f"{name}.npz") for name in names}
    require_refused_alike({"kind": "samples", "users": users} | ({"loss": loss} if loss else {}))


def test_classes_called_train_and_test(tmp_path: Path) -> None:
    """In folders that are named as splits; a folder of both is in splits."""
    pictures = {"train": 10, "test": 90}
    parts = {split: paint(tmp_path / split, pictures) for split in ("train", "test")}
    for split in ("train", "test"):
        paint(tmp_path / "bob" / split, pictures)
    for users in ({"ann": parts}, {"bob": str(tmp_path / "bob")}):
        assert require_same({"kind": "samples", "users": users}).common.labels == ("test", "train")


def test_conversations_beside_columns_that_are_no_text(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    when = datetime(2026, 11, 23)
    rows = [
        {"who": name, "messages": one, "when": when, "whens": [when], "raw": b"\xff"}
        for name in "ab"
        for one in talks(name, 6)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    dataset = {"path": str(tmp_path / "rows.parquet"), "user": "who"}
    require_same({"kind": "conversations", "dataset": dataset})
    for columns in ({"prompt": "when", "response": "raw"}, {"messages": "when"}, {"messages": "whens"}):
        for store in ("memory", "disk"):
            with pytest.raises(ComingleError, match=r"row 1: .*; allowed: "):
                prepare(recipe_of({"kind": "conversations", "dataset": dataset} | columns, store))


def test_a_limit_for_nobody_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = write_rows(tmp_path / "rows.jsonl", {name: said(name, 8) for name in ("ann", "bob")}, "text")
    data = {"dataset": {"path": str(path), "user": "who"}, "max_train_tokens": {"ann": 90}}
    told = require_refused_alike(data | {"max_test_tokens": {"bobb": 9, "abe": 9}})
    assert "data.max_test_tokens: no user 'bobb'; there are: " in told


def test_what_reading_warns_of_is_said_again_without_reading(
    files: dict[str, str], written: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in memory, where files that are passed over are named in each run; of very many lines the first."""
    (Path(files["dag"]) / "9.txt").write_bytes(b"\xff\xfe")
    said_each_time = []
    for store in ("memory", "disk", "disk"):
        caplog.clear()
        prepare(recipe_of({"users": files}, store))
        said_each_time.append([line for line in caplog.messages if "skipped that are not UTF-8" in line])
    assert len(written) == 1
    assert len(said_each_time[0]) == 1
    assert said_each_time[0] == said_each_time[1] == said_each_time[2]
    monkeypatch.setattr(turns, "HEARD", 2)
    users = {f"user {number}": files["dag"] for number in range(4)}
    counts = []
    for _ in range(2):
        caplog.clear()
        prepare(recipe_of({"users": users}))
        counts.append(len([line for line in caplog.messages if "skipped that are not UTF-8" in line]))
    assert counts == [4, 2]
    assert caplog.messages[-1] == "2 more such lines were said when the users were read"


def test_who_has_one_class_has_no_gradient_and_trains_as_in_memory(tmp_path: Path) -> None:
    np.savez(tmp_path / "ann.npz", inputs=np.ones((12, 5), dtype=np.float32), targets=np.zeros(12, dtype=np.int64))
    for store in ("memory", "disk"):
        data = {"kind": "samples", "users": {"ann": str(tmp_path / "ann.npz")}}
        api.run(recipe_of(data, store), out=tmp_path / store)
    assert final(tmp_path / "memory") == final(tmp_path / "disk")
