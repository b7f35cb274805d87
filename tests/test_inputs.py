"""What a run has read is part of what it is: nobody's data, base or tokenizer may change before a resume."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from comingle.cli.compare import compare_methods
from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.data.populations import as_users
from comingle.models.loading import load_base
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.utils.errors import RunError
from comingle_papers.tasks.kind import KIND as TASKS

QUICK = {"training.rounds": 2, "training.local_steps": 1, "base": "random:llama?layers=1"}


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file).with_changes(QUICK)


@pytest.fixture
def stopped(recipe: Recipe, tmp_path: Path) -> Path:
    api.run(recipe, out=tmp_path / "run")
    return stop(tmp_path / "run")


def stop(folder: Path) -> Path:
    """The run as if it had been stopped after its first round."""
    shutil.rmtree(folder / "checkpoints" / "round-0002")
    (folder / "metrics.json").unlink()
    return folder


def refused(recipe: Recipe, folder: Path) -> str:
    with pytest.raises(RunError) as caught:
        api.run(recipe, out=folder, resume=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text_of(recipe: Recipe, name: str) -> Path:
    assert recipe.data.users is not None
    return Path(str(recipe.data.users[name].path))


def test_changed_text_is_refused_with_whose_it_is(recipe: Recipe, stopped: Path) -> None:
    path = text_of(recipe, "bob")
    first, rest = path.read_text()[:1], path.read_text()[1:]
    path.write_text(("b" if first == "a" else "a") + rest)
    message = refused(recipe, stopped)
    assert message.startswith(f"{stopped}: user 'bob': the ")
    assert "data changed since the run began" in message
    assert "--out" in message
    path.write_text(first + rest)
    api.run(recipe, out=stopped, resume=True)


def test_each_split_is_told_apart(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "parts"
    path.mkdir()
    for split in ("train", "valid", "test"):
        (path / f"{split}.txt").write_text(text_of(recipe, "ann").read_text())
    sources = {split: str(path / f"{split}.txt") for split in ("train", "valid", "test")}
    recipe = recipe.with_changes({"data.users": {"ann": sources}})
    api.run(recipe, out=tmp_path / "run")
    stop(tmp_path / "run")
    for split in sources:
        before = (path / f"{split}.txt").read_text()
        (path / f"{split}.txt").write_text("q" + before[1:])
        assert f"user 'ann': the {split} data changed" in refused(recipe, tmp_path / "run")
        (path / f"{split}.txt").write_text(before)


def test_a_changed_base_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    folder = saved_base(tmp_path / "base")
    recipe = recipe.with_changes({"base": str(folder)})
    api.run(recipe, out=tmp_path / "run")
    stop(tmp_path / "run")
    saved_base(folder, seed=1)
    assert "run: the base changed since the run began" in refused(recipe, tmp_path / "run")
    saved_base(folder)
    api.run(recipe, out=tmp_path / "run", resume=True)
    saved_base(folder, seed=1)
    with pytest.raises(RunError, match="the base changed since the run began"):
        api.load(tmp_path / "run")


def test_a_changed_tokenizer_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    folder = saved_base(tmp_path / "base")
    recipe = recipe.with_changes({"base": str(folder)})
    api.run(recipe, out=tmp_path / "run")
    stop(tmp_path / "run")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}  # the users' text has no capital letters
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "run: the tokenizer changed since the run began" in refused(recipe, tmp_path / "run")


def test_a_changed_chat_template_is_refused_and_older_folders_say_nothing_of_it(recipe: Recipe, tmp_path: Path) -> None:
    folder = saved_base(tmp_path / "base")
    recipe = recipe.with_changes({"base": str(folder)})
    api.run(recipe, out=tmp_path / "run")
    inputs = tmp_path / "run" / "inputs.json"
    older = json.loads(inputs.read_text())
    older["tokenizer"] = older["tokenizer"].partition(":")[0]
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(RunError, match="the tokenizer changed since the run began"):
        api.load(tmp_path / "run")
    inputs.write_text(json.dumps(older))
    api.load(tmp_path / "run")


def saved_base(folder: Path, seed: int = 0) -> Path:
    base = load_base("random:llama?layers=1", dtype="float32", device="cpu", seed=seed)
    assert base.tokenizer is not None
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return folder


def test_a_base_in_memory_is_known_by_its_tensors(recipe: Recipe) -> None:
    base = load_base("random:llama?layers=1", dtype="float32", device="cpu")
    own = replace(base, origin=None)
    assert own.digest == replace(base, origin=None).digest
    other = replace(load_base("random:llama?layers=1", dtype="float32", device="cpu", seed=1), origin=None)
    assert other.digest != own.digest
    assert base.digest != replace(other, origin="random:llama?layers=1 seed 1").digest


def test_a_comparison_goes_on_with_the_same_text_only(recipe: Recipe, tmp_path: Path) -> None:
    compare_methods(recipe, ["local"], [0], tmp_path / "both", resume=False, force=False)
    stop(tmp_path / "both" / "local-seed0")
    text_of(recipe, "cem").write_text(text_of(recipe, "ann").read_text())
    with pytest.raises(RunError, match="user 'cem': the train data changed since the run began"):
        compare_methods(recipe, ["local"], [0], tmp_path / "both", resume=True, force=False)


def test_lists_by_position_are_refused_where_rows_bring_other_users_first(recipe: Recipe, tmp_path: Path) -> None:
    """The recipe does not name these users, so only what was read says who is who."""
    rows = [{"text": text_of(recipe, name).read_text(), "who": name} for name in ("ann", "bob")]
    write_rows(tmp_path / "rows.jsonl", rows)
    data = {"dataset": {"path": str(tmp_path / "rows.jsonl"), "user": "who"}}
    recipe = recipe.with_changes({"data": data, "adapters.rank": [4, 2]})
    api.run(recipe, out=tmp_path / "run")
    stop(tmp_path / "run")
    write_rows(tmp_path / "rows.jsonl", rows[::-1])
    said = "user 'bob': adapters.rank was 2 and is 4; use another --out"
    assert said in refused(recipe, tmp_path / "run")


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_who_pools_text_does_so_in_the_order_of_the_users(recipe: Recipe, tmp_path: Path) -> None:
    recipe = recipe.with_changes({"method": "centralized"})
    api.run(recipe, out=tmp_path / "run")
    stop(tmp_path / "run")
    users = recipe.model_dump(mode="json", exclude_unset=True)["data"]["users"]
    turned = recipe.with_changes({"data.users": dict(reversed(users.items()))})
    assert re.search("ann, bob, cem.*cem, bob, ann.*centralized", refused(turned, tmp_path / "run"))


def test_samples_of_a_task_are_part_of_it(tmp_path: Path) -> None:
    content = {
        "method": "local",
        "data": {"task": {"name": "linear", "users": 3, "clusters": 1}},
        "training": {"rounds": 2, "batch_size": 7},
        "checkpoints": {"every": 1},
        "runtime": {"device": "cpu", "dtype": "float32"},
    }
    recipe = parse_recipe(content)
    api.run(recipe, out=tmp_path / "run")
    stop(tmp_path / "run")
    run_data = prepare(recipe)
    task = run_data.common
    assert task is not None
    spoilt = replace(task.users[1], test=task.users[0].test)
    other = TASKS.run_data(replace(task, users=as_users([task.users[0], spoilt, task.users[2]])))
    with pytest.raises(RunError, match=r"user 'user-1'.* test "), pytest.warns(DeprecationWarning, match="run_data"):
        api.run(recipe, out=tmp_path / "run", resume=True, materials=other)
    api.run(recipe, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"users": 3}'])
@pytest.mark.sampled(1)
def test_a_folder_must_say_what_was_read(recipe: Recipe, stopped: Path, content: str | None) -> None:
    path = stopped / "inputs.json"
    path.unlink() if content is None else path.write_text(content)
    assert f"{path}: " in refused(recipe, stopped)


def test_nothing_of_the_text_is_in_the_run_folder(recipe: Recipe, stopped: Path) -> None:
    found = json.loads((stopped / "inputs.json").read_text())
    assert list(found["users"]) == ["ann", "bob", "cem"]
    words = set(text_of(recipe, "ann").read_text().split())
    assert not words & set((stopped / "inputs.json").read_text().replace('"', " ").split())
