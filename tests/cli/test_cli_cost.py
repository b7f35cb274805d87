"""``comingle cost``: what it says, as tables and as JSON, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from comingle.config import load_recipe
from comingle.cost import memory
from comingle.cost.planning import with_method

FREE_BYTES = "comingle.cost.planning.free_bytes"


@pytest.mark.slow
def test_a_newcomer_sees_everything_with_units(comingle: Any, recipe_file: Path) -> None:
    answer = comingle("cost", recipe_file, "--method", "comigs-1g1s,fedavg", "--method", "local")
    assert (answer.code, answer.err) == (0, "")
    assert "3 users: ann, bob, cem" in answer.out
    assert "4 rounds of 3 steps with 2 x 16 tokens" in answer.out
    assert "MB = 10^6 bytes" in answer.out
    for word in ("attention", "router", "upload", "MFLOPs", "overhead", "naive", "activations", "moments"):
        assert word in answer.out, word
    for figure in ("+5 MFLOPs (+1.25%)", "+0.035 MB (+1.25%)", "-1.41 MB (-50%)"):
        assert figure in answer.out, figure
    for name in ("comigs-1g1s", "fedavg", "local"):
        assert re.search(rf"^{name}: fits: needs [\d.]+ GB, [\d.]+ GB free on cpu$", answer.out, re.MULTILINE), name


@pytest.mark.slow
def test_json_has_what_a_run_then_counts(comingle: Any, recipe_file: Path) -> None:
    """The recipe's own method is the default."""
    found = json.loads(comingle("cost", recipe_file, "--json").out)
    assert comingle("run", recipe_file, "--out", recipe_file.parent / "run").code == 0
    metrics = json.loads((recipe_file.parent / "run" / "metrics.json").read_text())
    assert [method["method"] for method in found["methods"]] == ["comigs-1g1s"]
    (user,) = found["methods"][0]["users"]
    assert user["names"] == list(metrics["users"])
    assert {user["trainable_parameters"]} == {u["trainable_parameters"] for u in metrics["users"].values()}
    events = [json.loads(line) for line in (recipe_file.parent / "run" / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    # Local models count, so the last round needs no exchange; what comes of one is downloaded in the next round.
    assert len(rounds) - 1 == found["methods"][0]["exchanges"] == found["rounds"] - 1
    assert [event["upload_bytes"] for event in rounds] == [3 * user["upload_bytes"]] * 3 + [0]
    assert metrics["upload_bytes_per_user_round"] == user["upload_bytes_per_user_round"] == 3 / 4 * user["upload_bytes"]
    assert [event["download_bytes"] for event in rounds] == [0] + [3 * user["download_bytes"]] * 3
    assert found["free_bytes"] > found["methods"][0]["machine"]["total_bytes"] > 0
    assert found["comigs_1g1s_minus_fedavg"][-1]["true"] < 0


PLAN = """
base: random:llama?layers=1&dim=32
participants: [ada, ben, cem, dan]
network: {min_participants: 3}
method: fedavg
training: {rounds: 2, local_steps: 1, batch_size: 2, context: 16}
"""


def test_a_federations_file_is_counted_without_data(comingle: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN + "privacy: {epsilon: 8, accountant: rdp}\n")
    found = json.loads(comingle("cost", tmp_path / "plan.yaml", "--json").out)
    (method,) = found["methods"]
    assert found["users"] == ["ada", "ben", "cem", "dan"]
    assert method["privacy"]["epsilon"] == pytest.approx(8, rel=0.01)
    chats = "data: {kind: conversations}\n"
    (tmp_path / "chats.yaml").write_text(PLAN.replace(" local_steps: 1,", "") + chats)
    words = ("cost", tmp_path / "chats.yaml", "--set", "training.batch_size=4", "--json")
    assert json.loads(comingle(*words).out)["batch_size"] == 4


@pytest.mark.parametrize(
    ("added", "options", "said"),
    [
        ("data: {kind: samples}", (), "the clients have the data; got data.kind samples"),
        ("privacy: {mechanism: example, epsilon: 8}", (), "got privacy.mechanism example.*--set privacy=null"),
        ("", ("--machines", "2"), "--machines: got a server's file"),
        ("", ("--set", "trainng.rounds=3"), "--set: unknown key 'trainng'"),
    ],
)
def test_what_of_a_federation_depends_on_data_is_one_line(
    comingle: Any, tmp_path: Path, added: str, options: tuple[str, ...], said: str
) -> None:
    of_text = " local_steps: 1, batch_size: 2, context: 16"
    plan = PLAN.replace(f",{of_text}", "") if "samples" in added else PLAN
    (tmp_path / "plan.yaml").write_text(f"{plan}{added}\n")
    answer = comingle("cost", tmp_path / "plan.yaml", *options)
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert re.search(said, answer.err)


@pytest.mark.slow
def test_what_does_not_fit_comes_with_advice_that_helps(
    comingle: Any, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(*sets: str) -> dict[str, Any]:
        words = [word for one in sets for word in ("--set", one)]
        return json.loads(comingle("cost", recipe_file, "--json", *words).out)["methods"][0]

    whole = first()["machine"]
    monkeypatch.setattr(FREE_BYTES, lambda device: whole["total_bytes"] - 1)
    said = comingle("cost", recipe_file).out.splitlines()[-1]
    advice = re.search(r"does not fit: needs .* free on cpu; try (\S+) (\S+)$", said)
    assert advice, said
    assert first(*advice.groups())["fits"]
    monkeypatch.setattr(FREE_BYTES, lambda device: whole["weights_bytes"])
    assert comingle("cost", recipe_file).out.splitlines()[-1].endswith("or a smaller adapters.rank")


def test_neither_text_nor_weights_are_needed(comingle: Any, tmp_path: Path) -> None:
    """The users' files do not exist, and the base would take 80 GB."""
    recipe = tmp_path / "absent.yaml"
    recipe.write_text(
        "base: random:llama?layers=4&dim=8192&heads=64&vocab=200000\n"
        "data: {dataset: {path: absent.csv, user: topic}}\n"
        "training: {batch_size: 1, context: 16, rounds: 1}\n"
        "adapters: {rank: 1}\n"
        "runtime: {dtype: float32, device: cpu}\n"
    )
    found = json.loads(comingle("cost", recipe, "--users", 2, "--method", "fedavg", "--json").out)
    assert found["users"] == ["user 1", "user 2"]
    assert found["base_parameters"] * 4 == pytest.approx(found["methods"][0]["machine"]["weights_bytes"], rel=1e-5)
    assert found["base_parameters"] > 5e9


REFUSED = [
    "training.context=2000",
    "data.split.valid=0",
    "data.max_train_tokens={dan: 5}",
    "training.local_epochs=3",
    "training.weighting=samples",
    "method=ensemble",
    "data.on_small_user=skip",
]


@pytest.mark.parametrize("setting", REFUSED)
def test_cost_refuses_what_a_run_refuses_in_the_same_words(comingle: Any, recipe_file: Path, setting: str) -> None:
    words = ["--set", setting]
    if setting == "data.on_small_user=skip":
        words += ["--set", "training.context=2000"]
    run, cost = (comingle(verb, recipe_file, *words) for verb in ("run", "cost"))
    assert (run.code, cost.code) == (2, 2)
    if "skip" not in setting:
        assert cost.err == run.err


@pytest.mark.slow
def test_users_who_would_be_left_out_are_not_counted(comingle: Any, recipe_file: Path) -> None:
    (recipe_file.parent / "texts" / "cem.txt").write_text("few words")
    found = json.loads(comingle("cost", recipe_file, "--set", "data.on_small_user=skip", "--json").out)
    assert found["users"] == ["ann", "bob"]


def test_text_that_is_not_here_is_said(comingle: Any, recipe_file: Path) -> None:
    (recipe_file.parent / "texts" / "cem.txt").unlink()
    assert "Some of the users' text" in comingle("cost", recipe_file).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "fedavgg"], "method: no method 'fedavgg'. Did you mean 'fedavg'?"),
        (["--method", " , "], "--methods: no method given"),
        (["--users", "0"], "--users: got 0; allowed: whole numbers from 1"),
        (["--set", "base=random:nothing"], "unknown family 'nothing'"),
        (["--set", "method={name: comigs-1gxs, specialists: [1, 2]}"], "2 numbers for 3 users"),
        (["--set", "runtime.dtype=float8"], "dtype: got 'float8'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, comingle: Any, recipe_file: Path) -> None:
    answer = comingle("cost", recipe_file, *words)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_participation_and_compilation_are_nothing_to_a_plan(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.participation": [["ann"]], "runtime.compile": True})
    plain = with_method(recipe, "local")
    assert (plain.training.participation, plain.runtime.compile) == (1.0, False)


def test_the_allocators_share_is_only_known_for_the_cpu() -> None:
    assert set(memory.ALLOCATOR_GAPS) == {"cpu"}


def test_settings_of_the_line_are_for_all_methods_and_those_of_the_recipe_for_its_own(
    comingle: Any, recipe_file: Path
) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": {"name": "comigs", "generalists": 2, "specialists": 2}})
    assert with_method(recipe, "comigs").method.settings == {"generalists": 2, "specialists": 2}
    assert with_method(recipe, "pfedmoe").method.settings == {}
    assert with_method(recipe, "comigs-1g1s", {"router_every": 3}).method.settings == {"router_every": 3}
    answer = comingle("cost", recipe_file, "--method", "local", "--set", "method.router_every=1")
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)
    assert "--set method.router_every: " in answer.err
