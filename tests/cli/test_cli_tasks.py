"""Mistakes in recipes of tasks, and in what text and tasks do not share: one line, exit code 2, nothing left behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from test_cli_mistakes import one_line

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.config.sections import FloralSection
from comingle.data.populations import as_users
from comingle.data.samples.samples import Samples
from comingle.models.floral.layers import CONV_FORMS
from comingle.runs import api
from comingle.runs.session import check_and_set_up, default_method_note, prepare, warn_unread
from comingle.utils.errors import ComingleError, RecipeError
from comingle_papers.tasks.kind import KIND as TASKS

SGD = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
TASK = {
    "method": {"name": "floral", "clusters": 2},
    "data": {"task": {"name": "mlp-norm", "users": 4, "clusters": 2, "test_samples": 9}},
    "training": {"rounds": 1, "batch_size": 40, "weighting": "samples", "experts": SGD, "router": SGD},
    "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
}


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(TASK), encoding="utf-8")
    return path


ON_TASKS = {
    "rank 0": ("floral.rank=0", "--set: floral.rank: Input should be greater than or equal to 1; got 0"),
    "a rank in words": ("floral.rank=two", "--set: floral.rank: Input should be a valid integer; got 'two'"),
    "a budget above 1": ("floral.budget=1.5", "--set: floral.budget: Input should be less than or equal to 1; got 1.5"),
    "a budget of 0": ("floral.budget=0", "--set: floral.budget: Input should be greater than 0; got 0"),
    "no budget": ("floral.budget=.nan", "--set: floral.budget: Input should be a finite number; got nan"),
    "rank and budget": (
        "floral={rank: 2, budget: 0.1}",
        "floral: got rank=2 and budget=0.1",
    ),
    "an unknown form": ("floral.conv=chanel", "--set: floral.conv: Input should be 'balanced-2d', 'channel', "),
    "nothing to adapt": (
        "floral={lora: false, bias: false, norm: false}",
        "floral: ",
    ),
    "no clusters": ("method.clusters=0", "method floral: clusters is 0; allowed: whole numbers from 1"),
    "half a cluster": ("method.clusters=2.5", "method floral: clusters is 2.5; allowed: whole numbers from 1"),
    "temperature 0": ("method.temperature=0", "method floral: temperature is 0; allowed: numbers above 0"),
    "endless temperature": ("method.temperature=.inf", "method floral: temperature is inf; allowed: numbers above 0"),
    "negative noise": ("method.noise=-0.1", "method floral: noise is -0.1; allowed: numbers from 0"),
    "endless noise": ("method.noise=.inf", "method floral: noise is inf; allowed: numbers from 0"),
    "fewer components than clusters": (
        "method={name: ensemble-optimal, clusters: 1}",
        "method ensemble-optimal: clusters is 1; allowed: at least 2",
    ),
    "more clusters than users": (
        "data.task.clusters=9",
        "task 'mlp-norm': clusters=9; allowed: 1 to 4, the number of users",
    ),
    "means by tokens": (
        "training.weighting=tokens",
        "training.weighting: got 'tokens' for data.task; allowed: uniform, samples",
    ),
    "steps": ("training.local_steps=3", "training.local_steps: got 3"),
    "a context": ("training.context=64", "training.context: got 64"),
    "a rank of LoRA": ("adapters.rank=4", "adapters.rank: got 4"),
    "a limit on tokens": (
        "data.max_train_tokens=40",
        "--set: data: max_train_tokens ",
    ),
    "fractions of text": (
        "data.split.valid=0.3",
        "--set: data: split ",
    ),
    "a batch of one": (
        "training.batch_size=1",
        "training.batch_size: got 1; net:mlp-norm has batch norm, which needs at least 2",
    ),
    "parts of a batch": (
        "runtime.micro_batch=39",
        "runtime.micro_batch: got 39; net:mlp-norm has batch norm, which needs whole batches; allowed: at least 40, ",
    ),
    "a language model": (
        "base=smollm2-135m",
        "base: got 'smollm2-135m' for data.task; allowed: net:NAME, ",
    ),
    "an unknown net": ("base=net:mlpp", "base: no net 'mlpp'. Did you mean 'mlp'? Allowed: linear, mlp, cnn, "),
    "a net for images": (
        "base=net:cifar10",
        "net 'cifar10': inputs of shape (10,); allowed: (channels, height",
    ),
    "nobody": ("training.participation=[[]]", "--set: training.participation: a round without users; list at least"),
    "a stranger": (
        "training.participation=[[user-9]]",
        "training.participation: no user 'user-9'; allowed: user-0, user-1, user-2, user-3",
    ),
}

ON_TEXT = {
    "means by samples": (
        "training.weighting=samples",
        "training.weighting: got 'samples' for text; allowed: uniform, tokens",
    ),
    "epochs": ("training.local_epochs=3", "training.local_epochs: got 3"),
    "adaptors in nets": (
        "floral.budget=0.1",
        "floral.budget: got 0.1",
    ),
    "a net": (
        "base=net:mlp",
        "base: got 'net:mlp' for text; allowed: a language model; nets are for users with samples",
    ),
    "whole models": (
        "method=ensemble",
        "method ensemble: mixes whole models",
    ),
    "true clusters": (
        "method=floral-optimal",
        "method floral-optimal: needs the true cluster of every user",
    ),
    "ranks of their own": (
        "{method: floral, adapters.rank: [1, 2, 3]}",
        "method floral: adapters.rank is [1, 2, 3]; ",
    ),
}


def test_the_recipe_knows_the_forms_of_convolutions() -> None:
    assert get_args(FloralSection.model_fields["conv"].annotation) == CONV_FORMS


def changes(setting: str) -> list[str]:
    """``--set KEY=VALUE`` for one setting, or for each of a mapping of them."""
    found = yaml.safe_load(setting) if setting.startswith("{") else None
    return [f"--set={key}={value}" for key, value in found.items()] if found else [f"--set={setting}"]


@pytest.mark.parametrize("mistake", ON_TASKS)
def test_a_wrong_setting_of_a_task(comingle: Any, task_file: Path, tmp_path: Path, mistake: str) -> None:
    setting, said = ON_TASKS[mistake]
    line = one_line(comingle("run", task_file, "--out", tmp_path / "run", *changes(setting)))
    assert line.startswith(said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mistake", ON_TEXT)
def test_a_setting_of_tasks_on_text(comingle: Any, recipe_file: Path, tmp_path: Path, mistake: str) -> None:
    setting, said = ON_TEXT[mistake]
    line = one_line(comingle("run", recipe_file, "--out", tmp_path / "run", *changes(setting)))
    assert line.startswith(said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["comigs", "comigs-2s", "fedavg-moe", "local-moe-tr", "fedit", "ffa-lora"])
def test_methods_that_train_nothing_of_a_net(comingle: Any, task_file: Path, name: str) -> None:
    line = one_line(comingle("run", task_file, "--set", f"method={name}"))
    assert line.startswith(f"method {name}: trains no part of a net")


def test_a_default_method_is_named_as_the_default(task_file: Path, recipe_file: Path) -> None:
    def without_method(path: Path) -> Recipe:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content.pop("method", None)
        return parse_recipe(content)

    with pytest.raises(RecipeError, match=r"method comigs-1g1s: trains no part of a net.*the default.*method: fedavg$"):
        check_and_set_up(without_method(task_file))
    note = default_method_note(without_method(recipe_file))
    assert note == "method comigs-1g1s: the default, as the recipe has no method"
    for chosen in (load_recipe(recipe_file), without_method(recipe_file).with_changes({"method": "comigs-1g1s"})):
        assert default_method_note(chosen) == ""


@pytest.mark.parametrize("name", ["fedsa-lora", "flexlora", "hetlora", "fdlora", "fedlora"])
def test_methods_that_share_nothing_of_a_net(comingle: Any, task_file: Path, name: str) -> None:
    """They would train everybody alone under another name."""
    line = one_line(comingle("run", task_file, "--set", f"method={name}"))
    assert line.startswith(f"method {name}: shares no part of a net")


def test_compare_refuses_methods_for_the_other_users_before_it_trains(
    comingle: Any, task_file: Path, recipe_file: Path, tmp_path: Path
) -> None:
    command = ("--out", tmp_path / "out", "--methods")
    line = one_line(comingle("compare", task_file, *command, "fedavg,comigs-1g1s"))
    assert line.startswith("method comigs-1g1s: trains no part of a net")
    line = one_line(comingle("compare", recipe_file, *command, "fedavg,floral-optimal"))
    assert line.startswith("method floral-optimal: needs the true cluster ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "fedavg", "adapters.top_k": 1}, r"method fedavg: .*: adapters\.top_k"),
        (
            {"training.experts.momentum": 0.9},
            r"training\.experts: adamw .*: training\.experts\.momentum",
        ),
        (
            {"training.router": {"name": "sgd", "betas": (0.8, 0.9), "eps": 1e-6, "momentum": 0.5}},
            r"training\.router: sgd .*: training\.router\.betas, training\.router\.eps",
        ),
        ({"adapters.top_k": 1, "training.router.betas": (0.8, 0.9)}, ""),
    ],
)
def test_settings_of_other_methods_and_optimisers_are_said(
    changes: dict[str, Any], said: str, recipe_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(recipe_file).with_changes(changes)
    warn_unread(recipe, check_and_set_up(recipe))
    assert len(caplog.messages) == bool(said)
    assert re.fullmatch(said, "".join(caplog.messages))


@pytest.mark.parametrize("given", [False, True])
def test_a_column_of_splits_that_is_not_read_is_said(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = {"dataset": {"path": "rows.jsonl", "user": "user", "split": "part"}, "split": {"given": given}}
    recipe = parse_recipe({"data": data, "method": "fedavg"})
    warn_unread(recipe, check_and_set_up(recipe))
    assert [line.rpartition(": ")[2] for line in caplog.messages] == ([] if given else ["data.dataset.split"])


def test_settings_of_adaptors_that_a_run_does_not_read_are_said(
    comingle: Any, task_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no mistake: the other methods of a comparison read them."""
    out, said = tmp_path / "out", r"method fedavg: .*: floral\.rank"
    command = (task_file, "--set", "floral.rank=1")
    assert comingle("run", *command, "--out", out / "run", "--set", "method=fedavg").code == 0
    (message,) = caplog.messages
    assert re.fullmatch(said, message)
    caplog.clear()
    recipe = load_recipe(task_file).with_changes({"floral.rank": 1})
    api.run(recipe, method="fedavg")
    (message,) = caplog.messages
    assert re.fullmatch(said, message)
    caplog.clear()
    assert comingle("compare", *command, "--out", out / "both", "--seeds", 0, "--methods", "fedavg,floral").code == 0
    assert not caplog.messages


def test_batches_and_ranks_may_be_larger_than_there_is(comingle: Any, task_file: Path, tmp_path: Path) -> None:
    settings = ("--set", "training.batch_size=1000", "--set", "floral.rank=999", "--set", "method.temperature=1e-1")
    assert comingle("run", task_file, "--out", tmp_path / "run", *settings).code == 0
    assert load_recipe(tmp_path / "run").method.settings["temperature"] == 0.1


def test_everybody_together_is_always_there(comingle: Any, task_file: Path, tmp_path: Path) -> None:
    settings = ("--set", "method=centralized", "--set", "training.participation=[[user-2]]")
    assert comingle("run", task_file, "--out", tmp_path / "run", *settings).code == 0


def test_a_finished_run_of_a_task_resumes_from_its_own_recipe(comingle: Any, task_file: Path, tmp_path: Path) -> None:
    """Which spells out every default, those that only text reads too."""
    assert comingle("run", task_file, "--out", tmp_path / "run").code == 0
    answer = comingle("run", "--resume", tmp_path / "run")
    assert answer.code == 0, answer.err


def test_data_shows_the_users_of_a_task(comingle: Any, task_file: Path) -> None:
    answer = comingle("data", task_file)
    rows = [line.split() for line in answer.out.splitlines()]
    assert rows[0] == ["net:mlp-norm:", "samples", "of", "10"]
    assert rows[2:] == [[f"user-{k}", str(k % 2), "97", "0", "9"] for k in range(4)]
    assert comingle("data", task_file, "--set", "base=net:mlp").out.startswith("net:mlp: samples of 10")


# ---------------------------------------------------------------- users that come from elsewhere


def refused(recipe: Recipe, inputs: tuple[int, ...], *, first: bool = False) -> str:
    """What is said where a user's inputs have another shape, through the library."""
    task = prepare(recipe).common
    assert task is not None
    users = list(task.users)
    for i in range(len(users)) if first else [2]:
        user = users[i]
        parts = {
            split: Samples(inputs=torch.zeros(len(part), *inputs), targets=part.targets)
            for split, part in (("train", user.train), ("test", user.test))
        }
        users[i] = replace(user, **parts)
    own = TASKS.run_data(replace(task, users=as_users(users)))
    with pytest.raises(ComingleError) as error:
        api.run(recipe, run_data=own)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_users_whose_data_differ_in_shape_are_named(task_file: Path) -> None:
    recipe = load_recipe(task_file)
    line = refused(recipe, (8,))
    assert line.startswith("user 'user-2': train inputs ")
    assert all(part in line for part in ("(8,)", "'user-0'", "(10,)"))
    line = refused(recipe, (8,), first=True)
    assert line.startswith("user 'user-0': ")
    assert all(part in line for part in ("(8,)", "(10,)"))
