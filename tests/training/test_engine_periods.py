"""How often models are evaluated where a recipe leaves it open: counted, kept to, and told where it cannot be."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import federated
from tests.federation.tiny import one_base, tiny

import comingle
from comingle.config import parse_recipe
from comingle.config.settings import SHORTEST, EvaluationSection, TrainingSection
from comingle.federation import run_folder
from comingle.methods import make
from comingle.runs import api
from comingle.training import evaluation
from comingle.training.backends.local import InProcess
from comingle.training.rounds import run_rounds
from comingle.training.settings import RunPlan
from comingle.utils.errors import RecipeError

SIZES = {"train": 2, "valid": 1, "test": 30}
LONG = {"training.rounds": 12, "training.local_steps": 1}
make_run_plan = partial(RunPlan, method=make("fedavg"))
TRAINED = 12 * 3 * 2 * 16
"""Tokens of such a run of three users with two windows of 16."""


def passes(federation: InProcess) -> tuple[list[int], int, int]:
    """After which rounds a run evaluated; how many tokens its models were trained on, and were scored on."""
    scored, events = 0, []
    score = federation.clients.batch_source.score

    def counted(predict: Any, sets: Any, rows: Any, pass_size: Any, gates: Any) -> Any:
        nonlocal scored
        found = score(predict, sets, rows, pass_size, gates)
        scored += sum(one.tokens for one in found)
        return found

    federation.clients.batch_source.score = counted  # type: ignore[method-assign]
    run_rounds(federation, observe=events.append)
    done = [event["round"] for event in events if event["event"] == "evaluation"]
    return done, sum(event["tokens"] for event in events if event["event"] == "round"), scored


@pytest.mark.parametrize(("tokens", "done"), [(3, [0, 5, 10, 12]), (25, [0, 6, 12]), (40, [0, 12])])
@pytest.mark.parametrize("method", ["fedavg", "centralized"])
@pytest.mark.sampled(1)
def test_all_evaluations_take_at_most_a_tenth(
    federate: Any, make_user: Any, method: str, tokens: int, done: list[int]
) -> None:
    """A token that is scored counts 1/2.3 of one that is trained on; one more evaluation would be too many."""
    users = [make_user(name, test=tokens) for name in ("ann", "bob", "cem")]
    was, trained, scored = passes(federate(method, users=users, changes=LONG))
    assert (was, trained) == (done, TRAINED)
    assert scored == 3 * (tokens - 1) * len(done)  # nothing is said of a text's first token
    assert scored / 2.3 <= trained / 10
    if tokens > 3:
        assert 3 * tokens * (len(done) + 1) / 2.3 > trained / 10


def test_what_is_read_to_select_the_best_round_counts(federate: Any, make_user: Any) -> None:
    users = [make_user(name, test=10, valid=10) for name in ("ann", "bob", "cem")]
    was, trained, scored = passes(federate("fedavg", users=users, changes=LONG | {"evaluation.select": "best"}))
    assert was == [0, 6, 12]
    assert scored / 2.3 <= trained / 10


def test_a_sample_of_the_users_is_evaluated_more_often(federate: Any, make_user: Any) -> None:
    users = [make_user(name, test=30) for name in ("ann", "bob", "cem")]
    assert passes(federate("fedavg", users=users, changes=LONG))[0] == [0, 12]
    one, trained, scored = passes(federate("fedavg", users=users, changes=LONG | {"evaluation.users": 1}))
    assert one == [0, 5, 10, 12]
    assert scored / 2.3 <= trained / 10


def test_fewer_participants_are_evaluated_less_often(federate: Any, make_user: Any) -> None:
    users = [make_user(name, test=16) for name in ("ann", "bob", "cem")]
    for part in (0.3, [["ann"], ["bob"]]):
        changes = LONG | {"training.participation": part}
        assert passes(federate("fedavg", users=users, changes=changes))[0] == [0, 12]


def test_a_number_is_kept_to(federate: Any) -> None:
    assert passes(federate("fedavg", changes=LONG | {"evaluation.every": 4}))[0] == [0, 4, 8, 12]


def test_more_than_a_tenth_is_said_once_with_what_to_set(
    federate: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation._warn_once.cache_clear()
    passes(federate("local", changes=LONG))
    assert not caplog.messages  # evaluations of milliseconds
    monkeypatch.setattr(evaluation, "LEAST_WARNED_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, logger="comingle"):
        for method in ("local", "fedavg"):
            was, trained, scored = passes(federate(method, changes=LONG))
            assert was == [0, 12]
    share = math.floor(100 * scored * 50 / 49 / 2.3 / trained + 0.5)
    (line,) = caplog.messages
    assert re.search(rf"^evaluation .*\b{share}%.*data\.max_test_tokens .*evaluation\.first: false$", line)


CHAT = [{"prompt": "One?", "response": f"Two {n}."} for n in range(30)]
"""Conversations, of which hardly any are trained on."""


@pytest.mark.parametrize(
    ("sets", "options"),
    [
        (
            {split: torch.utils.data.TensorDataset(torch.randn(n, 3), torch.randn(n, 1)) for split, n in SIZES.items()},
            {"recipe": {"data": {"loss": "mse"}}, "base": lambda: torch.nn.Linear(3, 1)},
        ),
        (
            {"train": CHAT[:2], "valid": CHAT[2:3], "test": CHAT},
            {
                "recipe": {"runtime": {"compile": False}, "adapters": {"rank": 1}},
                "base": "random:llama?layers=1&dim=16&heads=2",
            },
        ),
    ],
)
def test_advice_names_no_key_that_other_kinds_of_data_refuse(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sets: Any, options: Mapping[str, Any]
) -> None:
    evaluation._warn_once.cache_clear()
    monkeypatch.setattr(evaluation, "LEAST_WARNED_SECONDS", 0.0)
    recipe = {**options["recipe"], "training": {"rounds": 1, "batch_size": 2}}
    with caplog.at_level(logging.WARNING, logger="comingle"):
        comingle.run(recipe, base=options["base"], users={"ada": sets, "ben": sets}, method="fedavg")
    (said,) = (line for line in caplog.messages if line.startswith("evaluation will take "))
    assert "data." not in said
    assert "evaluation.first: false" in said


def test_a_period_is_the_smallest_that_keeps_to_it() -> None:
    """A tenth of ten rounds of 100 has room for 230 that are read once: two evaluations of 115."""
    plan = make_run_plan(training=TrainingSection(rounds=10), evaluation=EvaluationSection(first=False))
    assert evaluation.evaluation_interval(plan, [1, 100, 115], 1) == SHORTEST
    assert evaluation.evaluation_interval(plan, [1, 100, 116], 1) == 10


def test_nothing_is_known_of_nobody() -> None:
    assert evaluation.evaluation_interval(make_run_plan(), [0, 0, 0], 4) == SHORTEST


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"evaluation.every: .*'often'"):
        parse_recipe({"data": {"users": {"ann": "a.txt"}}, "evaluation": {"every": "often"}})


# -------------------------------------------------------------------- elsewhere


def content_of(folder: Path) -> dict[str, Any]:
    """Two users' run of twelve rounds that has room for one evaluation."""
    content = tiny(folder, "fedavg", training__rounds=12, evaluation__first=True)
    content["evaluation"].pop("every", None)
    return content


def evaluated(events: Any) -> list[int]:
    return [event["round"] for event in events if event["event"] == "evaluation"]


@pytest.mark.slow
def test_users_elsewhere_evaluate_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one process, and a server that is stopped goes on with what it began with, whoever tells by then."""
    content, elsewhere = content_of(tmp_path), tmp_path / "there"
    here = api.run(parse_recipe(content), out=tmp_path / "here")
    done = evaluated(here.events)
    assert done == [0, 12]
    events: list[Mapping[str, Any]] = []

    def stop(event: Mapping[str, Any]) -> None:
        events.append(event)
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    with one_base():
        with pytest.raises(KeyboardInterrupt):
            federated(content, elsewhere, observers=[stop])
        monkeypatch.setattr(run_folder, "evaluation_interval", None)  # is not asked again
        federated(content, elsewhere, resume=True, observers=[events.append])
    assert sorted(set(evaluated(events))) == done
