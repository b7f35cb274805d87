"""What users were read into is used again until something has changed, and never as anything else than it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from populations import contents, paint, recipe_of, require_same, said

from comingle.data import population_files
from comingle.data.populations import FILES, LazyPopulation
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.utils.errors import ComingleError, DataError, RunError
from resuming import StoppedError, final, stop_in_round_3


def test_users_are_read_once_until_a_file_changes(files: dict[str, str], written: list[Path]) -> None:
    recipe = recipe_of({"users": files})
    first = prepare(recipe).users
    again = prepare(recipe.with_changes({"method": "local", "training.rounds": 1})).users
    assert isinstance(first, LazyPopulation)
    assert isinstance(again, LazyPopulation)
    assert len(written) == 1
    assert again.digest == first.digest
    Path(files["ann"]).write_text("\n\n".join(said("other", 9, 200)))
    changed = prepare(recipe).users
    assert isinstance(changed, LazyPopulation)
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
    assert isinstance(first, LazyPopulation)
    assert isinstance(again, LazyPopulation)
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


@pytest.mark.slow
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
        assert tuple(disk.users.names) == users


@pytest.mark.parametrize("name", ["about.json", "names.text", "names.index", "names.hashes", "skipped.jsonl"])
@pytest.mark.parametrize("keeps", [None, 0.5])
@pytest.mark.sampled(2)
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
    assert [disk.users.names.index(one) for one in ("ann", "dag")] == [0, 3]
    assert len(written) == 2


@pytest.mark.parametrize("name", ["users.ends", "users.sizes", *FILES, "skipped.jsonl"])
@pytest.mark.sampled(1)
def test_zeros_in_place_of_a_file_of_the_cache_have_all_read_anew(
    files: dict[str, str], tmp_path: Path, written: list[Path], own_cache: Path, name: str
) -> None:
    """As a disk that loses what was written: all files are as long as they were."""
    (tmp_path / "eve").write_text("x\n")
    data = {"users": files | {"eve": str(tmp_path / "eve")}, "on_small_user": "skip"}
    require_same(data)
    (place,) = (own_cache / "populations").glob(f"*/{name}")
    place.write_bytes(bytes(place.stat().st_size))
    require_same(data)
    assert len(written) == 2


def test_zeros_in_place_of_a_users_data_are_never_trained_on(files: dict[str, str], own_cache: Path) -> None:
    recipe = recipe_of({"users": files})
    users = prepare(recipe).users
    (place,) = (own_cache / "populations").glob("*/users.bin")
    content = bytearray(place.read_bytes())
    content[-16:] = bytes(16)
    place.write_bytes(content)
    opened = prepare(recipe).users
    assert contents(opened[0].train) == contents(users[0].train)
    told = rf"^{place.parent}: .*'dag'"
    with pytest.raises(DataError, match=told):
        opened[3]
    with pytest.raises(DataError, match=told):
        api.run(recipe)


def test_what_reading_warns_of_is_said_again_without_reading(
    files: dict[str, str], written: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in memory, where files that are passed over are named in each run; of very many lines the first."""
    (Path(files["dag"]) / "9.txt").write_bytes(b"\xff\xfe")
    said_each_time = []
    for store in ("memory", "disk", "disk"):
        caplog.clear()
        prepare(recipe_of({"users": files}, store))
        said_each_time.append([line for line in caplog.messages if "not UTF-8" in line])
    assert len(written) == 1
    assert len(said_each_time[0]) == 1
    assert said_each_time[0] == said_each_time[1] == said_each_time[2]
    monkeypatch.setattr(population_files, "MAX_RECORDED_WARNINGS", 2)
    users = {f"user {number}": files["dag"] for number in range(4)}
    counts = []
    for _ in range(2):
        caplog.clear()
        prepare(recipe_of({"users": users}))
        counts.append(len([line for line in caplog.messages if "not UTF-8" in line]))
    assert counts == [4, 1]  # the other one says that users have the same file
    assert caplog.messages[-1].startswith("3 more ")
