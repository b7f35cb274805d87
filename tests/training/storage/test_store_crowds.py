"""Populations of which nobody holds a list, and means over samples of them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import load_recipe
from comingle.data.population_files import read_population, write_population
from comingle.data.populations import (
    MAX_HASHED_NAMES,
    LazyPopulation,
    NumberedNames,
    UserNumbers,
    as_users,
    digest_names,
    draw_users,
)
from comingle.data.text.streams import UserData
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.training.backends.local import InProcess
from comingle.training.evaluation import sample_entry
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import KIND as TEXT
from comingle.training.rounds import run_rounds
from comingle.utils.errors import DataError, RunError
from comingle.utils.records import describe_sample
from comingle.utils.seeds import derive
from resuming import StoppedError, final, stop_in_round_3

NAMES = ["ann", "bob", "cem", "dag", "eva", "fay"]
SAMPLE = {"evaluation.users": 3, "training.participation": 0.5, "training.rounds": 2}


def test_names_are_numbers() -> None:
    names = NumberedNames("user-", 1000)
    assert names[17] == "user-17"
    assert names[-1] == "user-999"
    assert UserNumbers(names)(["user-3", "user-999"]) == [3, 999]
    assert "user-1000" not in names
    assert "user-07" not in names
    assert list(names[2:4]) == ["user-2", "user-3"]


def test_up_to_a_limit_everybody_has_a_lot() -> None:
    """As runs of before there was a limit have drawn, whatever the order."""
    lots = sorted(range(6), key=lambda i: derive(0, 3, "participation", NAMES[i]))
    assert draw_users(NAMES, 2, 0, 3, "participation") == sorted(lots[:2])
    shuffled = random.Random(0).sample(NAMES, 6)
    named = {shuffled[i] for i in draw_users(shuffled, 2, 0, 3, "participation")}
    assert named == {NAMES[i] for i in lots[:2]}


def test_beyond_it_each_is_as_likely() -> None:
    names = NumberedNames("user-", MAX_HASHED_NAMES + 1)
    counts = [0] * 10
    for number in range(40):
        found = draw_users(names, 500, 0, number)
        assert found == sorted(set(found))
        assert len(found) == 500
        for user in found:
            counts[user * 10 // len(names)] += 1
    # 2,000 each of 20,000, whose deviation is below sqrt(20000 * 0.1 * 0.9) = 43
    assert all(abs(count - 2000) < 5 * 43 for count in counts)


def test_a_sample_is_what_everybody_would_have_been(federate: Callable[..., InProcess]) -> None:
    """The same scores as where all are evaluated, of those who were drawn; nobody else is told of."""
    whole = federate("comigs-1g1s", users=NAMES, changes=SAMPLE | {"evaluation.users": 6})
    some = federate("comigs-1g1s", users=NAMES, changes=SAMPLE)
    events: list[dict[str, Any]] = []
    all_scores = run_rounds(whole, observe=lambda event: None)
    scores = run_rounds(some, observe=events.append)
    clients = some.clients
    assert len(scores) == 3
    assert [score.mean_loss for score in scores] == [all_scores[number].mean_loss for number in clients.scored]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    names = [user.name for user in clients.scored_users]
    assert all(list(event["users"]) == names for event in evaluations)
    values = [evaluations[-1]["users"][name]["test_perplexity"] for name in names]
    mean, error = statistics.fmean(values), statistics.stdev(values) * math.sqrt((1 - 3 / 6) / 3)
    told = evaluations[-1]["sample"]
    assert (told["users"], told["of"]) == (3, 6)
    # Student's t with 2 degrees of freedom reaches 4.3027 with 95%
    assert told["interval"] == pytest.approx([mean - 4.302653 * error, mean + 4.302653 * error])
    assert describe_sample(evaluations[-1]).startswith("mean of 3 of 6 users, 95% interval ")
    assert sample_entry(whole.clients, {name: {} for name in NAMES}, "perplexity") == {}


def test_an_interval_holds_the_mean_of_all_as_often_as_it_says(federate: Callable[..., InProcess]) -> None:
    clients = federate("local", users=[f"user-{i}" for i in range(60)]).clients
    draw, held = random.Random(1), 0
    population = [draw.gauss(3, 1) for _ in range(60)]
    for _ in range(1000):
        users = {str(i): {"test_loss": value} for i, value in enumerate(draw.sample(population, 20))}
        low, high = sample_entry(clients, users, "loss")["sample"]["interval"]
        held += low <= statistics.fmean(population) <= high
    assert 925 <= held <= 975  # 950 and 3.6 deviations


@pytest.fixture
def crowd(tmp_path: Path, make_user: Callable[..., UserData]) -> LazyPopulation:
    assert write_population(tmp_path / "tokens", (make_user(name) for name in NAMES)) == 6
    return read_population(tmp_path / "tokens")


def test_streams_are_read_as_they_were_written(crowd: LazyPopulation, make_user: Callable[..., UserData]) -> None:
    assert list(crowd.names) == NAMES
    for user in crowd:
        for split in ("train", "valid", "test"):
            assert torch.equal(getattr(user, split), getattr(make_user(user.name), split))


@pytest.mark.parametrize(("largest", "span", "expected"), [(3, range(2, 5), 1), (3, range(4, 6), 0), (0, range(3), 0)])
def test_a_span_of_a_population_knows_its_largest_user(largest: int, span: range, expected: int) -> None:
    """Without sizes, as far as it is in the span."""
    users = LazyPopulation(NAMES, lambda number: number, digest="", largest=largest)  # type: ignore[arg-type]
    assert users.select(span).largest_users == [expected]


@pytest.mark.slow
def test_a_run_of_a_crowd_is_one_of_its_users(
    crowd: LazyPopulation, make_user: Callable[..., UserData], tmp_path: Path, write_recipe: Callable[[Path], Path]
) -> None:
    """On disk, stopped and resumed, with users that are read when they take part; nothing lists them."""
    recipe = load_recipe(write_recipe(tmp_path / "project")).with_changes(
        {"runtime.store": "disk", "training.participation": 0.5, "evaluation.users": 3}
    )
    base = prepare(recipe).base
    people = RunData(kind=TEXT, base=base, users=as_users(make_user(name) for name in NAMES))
    api.run(recipe, run_data=people, out=tmp_path / "people")
    lazy = RunData(kind=TEXT, base=base, users=crowd, unread=True)
    with pytest.raises(StoppedError):
        api.run(recipe, run_data=lazy, out=tmp_path / "crowd", observers=[stop_in_round_3])
    api.run(recipe, run_data=lazy, out=tmp_path / "crowd", resume=True)
    assert final(tmp_path / "crowd") == final(tmp_path / "people")
    assert not any(name in (tmp_path / "crowd" / "inputs.json").read_text() for name in NAMES)
    other = RunData(kind=TEXT, base=base, users=LazyPopulation(crowd.names, crowd.make, digest="other"), unread=True)
    with pytest.raises(RunError, match="the users or their data changed since the run began"):
        api.run(recipe, run_data=other, out=tmp_path / "crowd", resume=True)


def test_a_population_that_is_torn_is_said(tmp_path: Path, make_user: Callable[..., UserData]) -> None:
    write_population(tmp_path, [make_user("ann")])
    (tmp_path / "users.bin").write_bytes(b"\0" * 40)
    with pytest.raises(DataError, match=rf"^{tmp_path}: .*\(1 names, 1 users, 40 bytes\)"):
        read_population(tmp_path)
    with pytest.raises(DataError, match=f"^{tmp_path}/elsewhere: .*population"):
        read_population(tmp_path / "elsewhere")


def test_names_are_known_by_their_digest() -> None:
    assert digest_names(["a", "b"]) != digest_names(["b", "a"])
    assert digest_names(NumberedNames("user-", 10)) != digest_names(NumberedNames("user-", 11))
