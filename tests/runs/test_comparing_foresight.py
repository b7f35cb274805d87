"""Advice says before training what will make it weak or wrong, and takes as many seeds as the data needs."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

import comingle
from comingle.config import Recipe
from comingle.runs import METHODS_FOR_NETS, advise
from comingle.runs.advise import choose_seeds, warnings_before_advice
from comingle.runs.given import given_of, recipe_with
from comingle.runs.session import build, prepare

SHORT = {"base": "random:llama?layers=1&dim=32", "training": {"rounds": 5, "local_steps": 2, "batch_size": 4}}


def words(seed: int, documents: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(str(draw.randrange(10_000)) for _ in range(40)) for _ in range(documents)]


def read(users: dict[str, Any], **changes: Any) -> tuple[Recipe, Any]:
    given = given_of(users, None)
    recipe = recipe_with(SHORT, given, base=None, method="fedavg", changes={"training.context": 16, **changes})
    return recipe, prepare(recipe, given=given)


def told(users: dict[str, Any], seeds: tuple[int, ...] = (0, 1, 2), **changes: Any) -> list[str]:
    return list(warnings_before_advice(*read(users, **changes), seeds, "tokens"))


ENOUGH: dict[str, Any] = {"training.local_steps": 200}


def test_good_data_needs_no_word_and_three_seeds() -> None:
    users = {"ada": words(1, 200), "ben": words(2, 200)}
    assert told(users, **ENOUGH) == []
    assert choose_seeds(*read(users, **ENOUGH), "tokens") == advise.SEEDS


def test_users_with_equal_or_nearly_equal_text_are_named() -> None:
    users = {"ada": words(1, 200), "ben": words(2, 200), "cem": words(1, 200), "dan": words(1, 190) + words(3, 100)}
    found = [re.fullmatch(r"users (\w+) and (\w+) \w+ \d+ of \d+ documents.*", line) for line in told(users, **ENOUGH)]
    pairs = [match.groups() for match in found if match is not None]
    assert pairs == [("ada", "cem"), ("ada", "dan"), ("cem", "dan")]


def test_little_test_data_is_named_and_takes_five_seeds() -> None:
    users = {"ada": words(1, 200), "ben": {"train": words(2, 200), "valid": words(4, 20), "test": words(3, 2)}}
    (line,) = told(users, **ENOUGH)
    assert line.startswith("little test data (")
    assert "ben; intervals will be wide" in line
    assert choose_seeds(*read(users, **ENOUGH), "tokens") == (0, 1, 2, 3, 4)


def test_many_users_take_five_seeds_and_sampled_users_one() -> None:
    users = {name: words(number, 200) for number, name in enumerate(("ada", "ben", "cem"))}
    recipe, run_data = read(users, **ENOUGH)
    assert choose_seeds(recipe, run_data, "tokens") == (0, 1, 2, 3, 4)
    assert choose_seeds(recipe.with_changes({"evaluation.users": 2}), run_data, "tokens") == (0,)


def test_too_few_rounds_are_named_with_how_many_would_do() -> None:
    users = {"ada": words(1, 200), "ben": words(2, 200)}
    (line,) = told(users)
    assert line.startswith("5 rounds read 640 tokens of each user, ")
    enough = int(line.partition("give --rounds ")[2].partition(" ")[0])
    for rounds, silent in ((enough, True), (enough - 1, False)):
        changes: dict[str, Any] = {"training.rounds": rounds}
        assert (told(users, **changes) == []) == silent


def test_one_seed_and_text_that_is_tested_again_are_named() -> None:
    texts = words(1, 200)
    users = {"ada": {"train": texts, "valid": words(5, 20), "test": texts[:100]}, "ben": words(2, 200)}
    seed, again = told(users, (0,), **ENOUGH)
    assert seed.startswith("one seed gives no intervals")
    assert again.startswith("user ada: 100 of 100 test documents are in the training text, ")


def test_it_is_said_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class TrainedError(Exception):
        """Training has begun."""

    def run(*given: Any) -> Any:
        raise TrainedError

    monkeypatch.setattr(advise, "_run_and_measure", run)
    same = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    with pytest.raises(TrainedError):
        comingle.advise(
            {"data": {"loss": "mse"}}, ["fedavg"], users={"ada": same, "ben": same}, base=lambda: torch.nn.Linear(3, 1)
        )
    alike = r"advise: users ada and ben \w+ 20 of 20 samples.*"
    assert any(re.match(alike, line) for line in caplog.messages)
    little = r"advise: little test data \(.*\b2 samples.*\): ada, ben; "
    assert any(re.match(little, line) for line in caplog.messages)


def test_conversations_are_counted_as_such(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def run(*given: Any) -> Any:
        raise InterruptedError  # training has begun

    monkeypatch.setattr(advise, "_run_and_measure", run)
    users = {
        name: [{"prompt": f"{name} {number}?", "response": f"{number}."} for number in range(50)]
        for name in ("ada", "ben")
    }
    chats = {"base": SHORT["base"], "data": {"kind": "conversations"}, "training": {"rounds": 5, "batch_size": 4}}
    with pytest.raises(InterruptedError):
        comingle.advise(chats, ["fedavg"], users=users, seeds=[0])
    (line,) = (line for line in caplog.messages if "little test data" in line)
    assert re.match(r"advise: little test data \(from \d+ conversations\): ada, ben; ", line)


def test_smaller_groups_of_nets_are_of_their_users_alone() -> None:
    users = {
        name: torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1)) for name in ("ada", "ben", "cem")
    }
    given = given_of(users, lambda: torch.nn.Linear(3, 1))
    recipe = recipe_with({"data": {"loss": "mse"}}, given, base=None, method="fedavg", changes={})
    some = advise.select_users(prepare(recipe, given=given), (0, 2))
    assert [user.name for user in build(recipe, some).clients.users] == ["ada", "cem"]


def test_default_methods_for_samples_train_nets(capsys: pytest.CaptureFixture[str]) -> None:
    users = {name: torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1)) for name in ("ada", "ben")}
    found = comingle.advise(
        {"data": {"loss": "mse"}}, users=users, base=lambda: torch.nn.Linear(3, 1), seeds=[0], rounds=2, progress=True
    )
    assert tuple(found.methods) == METHODS_FOR_NETS
    shown = capsys.readouterr().err
    assert "loading the net and the users' data" in shown
    assert "base model" not in shown
