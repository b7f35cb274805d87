"""Run folders as records: which are found, which belong together, what is told about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comingle.reports.comparisons import folder_name
from comingle.reports.page import notices
from comingle.reports.runs import find_runs, read_entries, read_run
from comingle.utils.errors import RunError
from comingle.utils.inputs import SPLITS, Inputs, UserInputs, write_inputs

CURVE = {0: {"ann": 9.0, "bob": 7.0}, 2: {"ann": 4.0, "bob": 6.0}}


def test_a_folder_of_runs_stands_for_all_of_them_and_none_is_taken_twice(write_run: Any, tmp_path: Path) -> None:
    one = write_run("compare/local-seed0", "local", CURVE)
    two = write_run("compare/fedavg-seed0", "fedavg", CURVE)
    other = write_run("alone", "comigs-1g1s", CURVE)
    assert find_runs([other, tmp_path / "compare", one]) == [other, two, one]
    (tmp_path / "compare" / "table.json").write_text(
        json.dumps({"methods": [{"method": "local"}, {"method": "fedavg"}]})
    )
    assert find_runs([tmp_path / "compare"]) == [one, two]


def test_what_is_no_run_is_named(write_run: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere: no such run folder"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty: neither a run folder \(no events.jsonl in it\) nor"):
        find_runs([tmp_path / "empty"])
    folder = write_run("begun", "local", CURVE)
    lines = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(RunError, match=r"begun: no evaluation in its events.jsonl yet"):
        read_run(folder)
    broken = write_run("broken", "local", CURVE)
    (broken / "recipe.yaml").write_text("{")
    with pytest.raises(RunError, match=r"broken: its recipe.yaml cannot be read"):
        read_run(broken)


def test_a_run_before_iterations_were_told_counts_them_itself(write_run: Any) -> None:
    folder = write_run("old", "local", CURVE)
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"iterations"', '"ignored"'))
    assert [e.iterations for e in read_run(folder).evaluations] == [0, 20]


def test_seeds_belong_together_and_other_recipes_do_not(write_run: Any) -> None:
    paths = [write_run(f"a{seed}", "local", CURVE, seed=seed, recipe={"runtime": {"threads": seed}}) for seed in (1, 0)]
    paths.append(write_run("b", "fedavg", CURVE))
    entries = read_entries(paths)
    assert [(entry.label, [run.seed for run in entry.runs]) for entry in entries] == [
        ("local", [0, 1]),
        ("fedavg", [0]),
    ]


def test_entries_of_one_method_are_told_apart_by_what_differs(write_run: Any) -> None:
    paths = [
        write_run(f"c{i}", "comigs", CURVE, recipe={"method": {"name": "comigs", "settings": {"specialists": count}}})
        for i, count in enumerate([1, [1, 3]])
    ]
    paths.append(write_run("l", "local", CURVE))
    labels = [entry.label for entry in read_entries(paths)]
    assert labels == ["comigs (specialists 1)", "comigs (specialists 1,3)", "local"]


def test_all_entries_are_labelled_by_a_setting_in_which_two_runs_differ(write_run: Any) -> None:
    rates = {"a": ("fedavg", 0.005), "b": ("fedavg", 0.001), "c": ("local", 0.01)}
    paths = [
        write_run(name, method, CURVE, recipe={"training": {"experts": {"learning_rate": rate}, "rounds": 2}})
        for name, (method, rate) in rates.items()
    ]
    entries = read_entries(paths)
    labels = [entry.label for entry in entries]
    assert labels == ["fedavg (learning_rate 0.005)", "fedavg (learning_rate 0.001)", "local (learning_rate 0.01)"]
    (notice,) = notices(entries)
    assert "differ in training.experts.learning_rate, not only in method and seed" in notice
    assert notices(read_entries(paths[:1])) == []


def test_variants_have_the_names_of_their_comparison(write_run: Any) -> None:
    names = ["fedprox", "fedprox:proximal=0.1", "local"]
    settings = [{}, {"proximal": 0.1}, {}]
    paths = [
        write_run(
            f"compare/{folder_name(name)}-seed{seed}",
            name.partition(":")[0],
            CURVE,
            seed=seed,
            recipe={"method": {"name": name.partition(":")[0], "settings": of_method}},
        )
        for name, of_method in zip(names, settings, strict=True)
        for seed in (0, 1)
    ]
    folder = paths[0].parent
    without_table = [entry.label for entry in read_entries(paths)]
    assert without_table == ["fedprox (proximal default)", "fedprox (proximal 0.1)", "local"]
    (folder / "table.json").write_text(json.dumps({"methods": [{"method": name} for name in names]}))
    assert [entry.label for entry in read_entries([folder])] == names


def test_runs_of_other_users_are_refused(write_run: Any) -> None:
    one, two = write_run("one", "local", CURVE), write_run("two", "local", {0: {"cem": 3.0}})
    with pytest.raises(
        RunError, match=r"two: its users are cem, those of .*one are ann, bob; give runs of the same users"
    ):
        read_entries([one, two])


def test_runs_that_are_measured_otherwise_are_refused(write_run: Any) -> None:
    one = write_run("one", "local", {0: {"ann": 0.5}}, measure="accuracy")
    two = write_run("two", "local", {0: {"ann": 0.5}}, measure="loss")
    with pytest.raises(
        RunError,
        match=r"two: .*loss.*one by accuracy",
    ):
        read_entries([one, two])


def test_a_task_and_what_it_is_counted_in_are_told(write_run: Any) -> None:
    task = {"name": "mnist", "shift": "labels", "fraction": 1.0, "users": None}
    net = read_run(write_run("net", "floral", {0: {"ann": 0.5}}, measure="accuracy", recipe={"data": {"task": task}}))
    assert (net.task, net.unit, net.measure) == ("mnist (shift labels)", "samples", "accuracy")
    plain = {"data": {"task": {"name": "linear"}}}
    assert read_run(write_run("linear", "floral", {0: {"ann": 0.5}}, measure="loss", recipe=plain)).task == "linear"
    text = read_run(write_run("text", "floral", CURVE, recipe={"data": {"task": None, "users": {"ann": "a.txt"}}}))
    assert (text.task, text.unit, text.measure) == ("", "tokens", "perplexity")


def test_less_of_the_same_task_can_be_compared_and_another_cannot(write_run: Any) -> None:
    def of(name: str, **task: Any) -> Path:
        curve = {0: {"ann": 0.5}}
        return write_run(
            name, "floral", curve, measure="accuracy", recipe={"data": {"task": {"name": "mnist", **task}}}
        )

    full, reduced = of("full", fraction=1.0), of("reduced", fraction=0.05)
    assert notices(read_entries([full, reduced])) == []
    (notice,) = notices(read_entries([full, of("turned", fraction=1.0, shift="rotate")]))
    assert notice == "These runs have different tasks: their numbers may not be comparable."


def test_data_that_changed_between_runs_of_one_recipe_is_told(write_run: Any) -> None:
    """As where a comparison goes on with another method after somebody's file was edited."""

    def of(name: str, method: str, text: str = "old", base: str = "b", seed: int = 0) -> Path:
        folder = write_run(name, method, CURVE, seed=seed)
        digests = {"ann": "ann's", "bob": text}
        users = {
            user: UserInputs(counts=dict.fromkeys(SPLITS, 5), digests=dict.fromkeys(SPLITS, digest))
            for user, digest in digests.items()
        }
        write_inputs(folder, Inputs(kind="text", base=base, tokenizer="t", users=users))
        return folder

    one, other_seed = of("one", "local"), of("other-seed", "local", text="drawn otherwise", seed=1)
    silent = write_run("old", "pfedmoe", CURVE)
    assert notices(read_entries([one, of("two", "fedavg"), other_seed, silent])) == []
    edited = of("edited", "comigs-1g1s", text="new")
    (notice,) = notices(read_entries([one, edited]))
    assert f"{edited} and {one} have the same recipe, but the data of bob changed in between: do not compare" in notice
    (notice,) = notices(read_entries([one, of("rebased", "ditto", base="c")]))
    assert "the base changed in between: do not compare" in notice


def test_one_of_two_runs_of_a_recipe_and_seed_counts_and_that_is_said(
    write_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, again = write_run("one", "local", CURVE), write_run("again", "local", CURVE)
    (entry,) = read_entries([one, again])
    assert [run.folder for run in entry.runs] == [one]
    (line,) = caplog.messages
    assert line.startswith(f"{again}: left out")
    assert line.endswith(str(one))


def test_a_reader_is_told_what_cannot_be_compared(write_run: Any) -> None:
    one = write_run("one", "local", CURVE, recipe={"data": {"held_out": "own", "max_train_tokens": 5}})
    less = write_run("less", "fedavg", CURVE, recipe={"data": {"held_out": "own", "max_train_tokens": 4}})
    assert notices(read_entries([one, less])) == []
    mixed = write_run("mixed", "fedavg", CURVE, recipe={"data": {"held_out": "mixture"}}, base="gpt2", finished=False)
    found = notices(read_entries([one, mixed]))
    for notice, words in zip(found, ("bases (gpt2, random:llama)", "different ways", "has not finished"), strict=True):
        assert words in notice
    assert "evaluated after round 2 of 2" in found[2]
