"""``runtime.memory``: settings with which a language model fits into a given memory."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.commands import comingle as comingle
from tests.federation.direct import nodes_of
from tests.federation.tiny import tiny

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.config.settings import parse_bytes
from comingle.cost import planning
from comingle.cost.planning import _MemoryByPassSize, choose_within, memory_choices
from comingle.cost.records import MemoryChoice
from comingle.federation import client
from comingle.federation.client import CHOICE
from comingle.federation.launch import federate
from comingle.federation.public import public_part
from comingle.models import hardware
from comingle.models.hardware import free_bytes
from comingle.models.loading import load_base
from comingle.runs import api, session
from comingle.utils.errors import RecipeError

USERS = ("ann", "bob", "cem")
DEEP = "random:llama?layers=5&dim=128&heads=4&vocab=512"
SIZES = {"4bit": 2000, "8bit": 3000}
BATCH = {"training.batch_size": 2, "training.context": 64}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume a process's own memory."""
    monkeypatch.setattr(planning, "measured_process_bytes", lambda *_: 1)


def write_limited(path: Path, **changes: Any) -> None:
    """Write :func:`limited` without the keys that have their defaults."""
    path.write_text(yaml.safe_dump(limited(path, **changes).model_dump(mode="json", exclude_unset=True)))


def limited(recipe_file: Path, **changes: Any) -> Recipe:
    recipe = load_recipe(recipe_file)
    unset = recipe.model_dump(mode="json", exclude_unset=True)
    unset.pop("runtime", None)
    runtime = {"device": "cpu", "memory": "1GB", **changes.pop("runtime", {})}
    return parse_recipe({**unset, "base": DEEP, "runtime": runtime}).with_changes({**BATCH, **changes})


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable[[Path], Path]) -> list[MemoryChoice]:
    """All settings for a limit of memory, without the process."""
    return list(memory_choices(limited(write_recipe(tmp_path_factory.mktemp("choices"))), USERS, process_bytes=0))


@pytest.mark.slow
def test_the_first_settings_that_fit_are_chosen(
    recipe_file: Path, choices: list[MemoryChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = limited(recipe_file)
    monkeypatch.setattr(planning, "memory_choices", lambda *_, **__: iter(choices))
    bases = [choice.changes.get("quantise", "none") for choice in choices]
    assert sorted(set(bases), key=bases.index) == ["none", "8bit", "4bit"]
    assert choices[0].changes == {"runtime.native_code": True, "runtime.compile": False}
    assert choices[0].slowdown == 1.0
    assert choices[-1].needed_bytes == min(choice.needed_bytes for choice in choices)
    # Those of one format are ordered by time; passes of fewer users come before those of fewer sequences.
    unpacked = [choice for choice in choices if "quantise" not in choice.changes]
    assert [choice.slowdown for choice in unpacked] == sorted(choice.slowdown for choice in unpacked)
    halved = [c.changes for c in unpacked if "runtime.micro_batch" in c.changes and len(c.changes) == 4]
    assert [(c["runtime.users_per_step"], c["runtime.micro_batch"]) for c in halved] == [(1, 2), (1, 1)]
    assert "runtime.gradient_checkpointing" in unpacked[2].changes
    assert choose_within(recipe, 10**12, USERS, process_bytes=0).changes == choices[0].changes
    second = choose_within(recipe, choices[0].needed_bytes - 1, USERS, process_bytes=0)
    assert second.changes == choices[1].changes


@pytest.mark.slow
def test_estimates_are_those_of_all_layers_and_of_quantised_weights(
    recipe_file: Path, choices: list[MemoryChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = limited(recipe_file)
    monkeypatch.setattr(planning, "_TRACED_LAYERS", (9,))  # all five
    for choice in (choices[1], choices[-1]):
        exact = _MemoryByPassSize(recipe.with_changes(choice.changes), USERS, own_indices=None, process_bytes=0)
        assert choice.needed_bytes == pytest.approx(exact.bytes_at(exact.pass_size), rel=0.02)


def test_what_a_recipe_sets_is_kept(recipe_file: Path) -> None:
    runtime = {"micro_batch": 4, "gradient_checkpointing": False, "dtype": "float32", "native_code": False}
    recipe = limited(recipe_file, runtime=runtime, quantise="none")
    (only,) = memory_choices(recipe, USERS, process_bytes=0)
    assert only.changes == {"runtime.compile": False}


def test_too_little_memory_and_other_models_are_refused(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = limited(recipe_file)
    with pytest.raises(RecipeError, match=r"runtime\.memory: got '1GB'; allowed: .*adapters"):
        next(memory_choices(recipe.with_changes({"method": "floral"}), USERS, process_bytes=0))
    large = [MemoryChoice(changes={"quantise": bits}, needed_bytes=size, slowdown=1.2) for bits, size in SIZES.items()]
    monkeypatch.setattr(planning, "memory_choices", lambda *_, **__: iter(large))
    with pytest.raises(RecipeError, match=r"runtime\.memory: got '1GB'; the smallest settings are quantise 4bit"):
        choose_within(recipe, 1000, USERS, process_bytes=0)
    for wrong in ("much", "12 parsecs", "-1MB", "0MB", ""):
        with pytest.raises(RecipeError, match=r"runtime\.memory"):
            limited(recipe_file, runtime={"memory": wrong})
    assert [parse_bytes(size) for size in ("800MB", "1.5 GiB", "2gb", 10)] == [800_000_000, 3 << 29, 2 * 10**9, 10]


@pytest.mark.slow
def test_a_run_within_its_memory_is_the_run_with_these_settings(recipe_file: Path, tmp_path: Path) -> None:
    """The settings are said, recorded, and kept when the run is resumed with more memory."""
    recipe = limited(recipe_file, **{"training.rounds": 1, "runtime.dtype": "float32"})
    larger, choice = itertools.islice(memory_choices(recipe, USERS, process_bytes=1), 2)
    limit = (larger.needed_bytes + choice.needed_bytes) // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "memory_limit", lambda _: limit)
        limited_run = api.run(recipe, out=tmp_path / "limited")
    by_hand = api.run(recipe.with_changes({"runtime.memory": None, **choice.changes}))
    assert limited_run.metrics["users"] == by_hand.metrics["users"]
    assert limited_run.recipe.runtime.micro_batch == choice.changes["runtime.micro_batch"]
    resumed = api.run(recipe, out=tmp_path / "limited", resume=True)
    assert resumed.recipe.runtime == limited_run.recipe.runtime
    with pytest.raises(RecipeError, match=r"runtime\.memory: got '1GB'; allowed: with a base and users"):
        api.run(recipe, users={"ann": ["some text " * 100]})


# ---------------------------------------------------------------- commands


@pytest.mark.slow
def test_a_plan_shows_the_choices_and_has_the_costs_of_the_chosen_one(comingle: Any, recipe_file: Path) -> None:
    write_limited(recipe_file, runtime={"gradient_checkpointing": False})
    words = ("cost", recipe_file, "--set", "runtime.dtype=float32")
    found = json.loads(comingle(*words, "--json").out)
    choices = found["memory"]["choices"]
    assert found["memory"]["limit_bytes"] == 10**9
    # The limit lies between the first two settings.
    limit = sum(choice["needed_bytes"] for choice in choices[:2]) // 2
    answer = comingle(*words, "--set", f"runtime.memory={limit}")
    assert re.search(r"micro_batch 2, users_per_step 1 \* ", answer.out), answer.out
    assert f"runtime.memory {limit / 1e6:,.1f} MB: micro_batch 2" in answer.out
    chosen = json.loads(comingle(*words, "--set", f"runtime.memory={limit}", "--json").out)
    assert chosen["methods"][0]["machine"]["pass_bytes"] < found["methods"][0]["machine"]["pass_bytes"]
    assert "none of the settings fits" in comingle(*words, "--set", "runtime.memory=1kB").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cost", "--method", "local,fedavg"), "runtime.memory: got '1GB' with 2 methods; allowed: with one"),
        (
            ("compare", "--methods", "local,fedavg", "--out", "new"),
            "runtime.memory: got '1GB'; allowed: null for this command",
        ),
    ],
)
def test_commands_that_train_several_runs_refuse_it(
    comingle: Any, recipe_file: Path, words: tuple[str, ...], said: str
) -> None:
    write_limited(recipe_file)
    command, *options = words
    answer = comingle(command, recipe_file, *options)
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert said in answer.err


def test_clients_of_one_machine_get_a_size(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"runtime\.memory: got 'auto' for clients that share this machine"):
        federate(limited(recipe_file, runtime={"memory": "auto"}), tmp_path / "run")


# ---------------------------------------------------------------- clients


@pytest.mark.slow
def test_a_client_chooses_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is kept for a restart; with another limit it chooses again."""
    recipe = parse_recipe(tiny(tmp_path))
    _, nodes = nodes_of(recipe, tmp_path)
    public = public_part(recipe, tuple(nodes), {}, load_base(recipe.base, dtype="float32", device="cpu"))
    node = next(iter(nodes.values()))
    started: list[Any] = []
    lines: list[str] = []
    run = subprocess.run
    monkeypatch.setattr(client.subprocess, "run", lambda *args, **options: started.append(1) or run(*args, **options))

    def chosen(memory: str) -> Recipe:
        own = node.own.model_copy(update={"runtime": {"memory": memory, "dtype": "float32"}})
        return client._with_choices(tmp_path, client._own_recipe(own, public), public, own, lines.append)

    first = chosen("8GB")
    assert (first.runtime.native_code, first.runtime.compile) == (True, False)
    assert json.loads((tmp_path / CHOICE).read_text())["changes"]["runtime.native_code"] is True
    assert chosen("8GB").runtime == first.runtime
    assert len(started) == 1
    assert [line.split(", ")[0].split(": ")[0] for line in lines] == [
        "choosing settings for runtime.memory 8GB",
        "runtime.memory 8GB",
        "runtime.memory 8GB",
    ]
    with pytest.raises(
        RecipeError, match=rf"user '{node.own.name}': runtime\.memory: got '1kB'; the smallest settings are"
    ):
        chosen("1kB")
    assert len(started) == 2


# ---------------------------------------------------------------- memory that is free


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_an_outer_group_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached files that were not read lately are free."""
    outer, inner = tmp_path / "machine", tmp_path / "machine" / "client"
    inner.mkdir(parents=True)
    files = hardware._CGROUP_FILES[version]._replace(root=tmp_path)
    for folder, limit in ((outer, 900_000_000), (inner, 2_000_000_000)):
        (folder / files.limit).write_text(f"{limit}\n")
        (folder / files.used).write_text("400000000\n")
        (folder / "memory.stat").write_text(f"anon 300000000\n{files.cached} 50000000\n")
    groups = "0::/machine/client\n" if version == 2 else "4:cpu:/\n3:memory:/machine/client\n"
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr(hardware, "_CGROUP_FILES", {version: files})
    monkeypatch.setattr(hardware, "_OWN_CGROUPS", tmp_path / "cgroup")
    assert free_bytes(torch.device("cpu")) == 900_000_000 - 400_000_000 + 50_000_000
    (outer / files.limit).write_text("max\n")
    assert free_bytes(torch.device("cpu")) == 2_000_000_000 - 350_000_000
