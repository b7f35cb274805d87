"""What users let be known of their experts and mixtures is in events and reports as of one process; the rest is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Answer as CliAnswer
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.test_federation_coordinator import Lying, of_words
from tests.federation.tiny import one_base, tiny
from tests.quick import quick

from comingle.config import parse_recipe
from comingle.federation.client import Client
from comingle.federation.messages import unpack_answer
from comingle.federation.participant import Tells
from comingle.federation.run_folder import run_federation
from comingle.reports.figures import read_mixtures
from comingle.runs import api
from comingle.utils.records import read_events

KEYS = ("experts", "expert_scores", "mixtures", "component", "router_entropy_nats")
OPTIONS: dict[str, Any] = {"users": 3, "evaluation__every": 1}


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def routing_in(folder: Path) -> list[dict[str, Any]]:
    events = [event for event in read_events(folder) if event["event"] == "evaluation"]
    return [{key: event[key] for key in KEYS if key in event} for event in events]


def told_by(folder: Path, name: str, tells: dict[str, Tells | None]) -> tuple[Path, Direct]:
    """The server's run folder of a federation in which these users tell that much."""
    plan, nodes = nodes_of(parse_recipe(tiny(folder, name, **OPTIONS)), folder / "run")
    for user, said in tells.items():
        nodes[user] = Client(nodes[user].folder, nodes[user].own.model_copy(update={"tells": said}))
    channel = Direct(nodes)
    run_federation(plan, channel, folder / "run" / "server")
    return folder / "run" / "server", channel


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("comigs-1g1s", "expert_scores"),
        pytest.param("comigs-1gxs", "expert_scores", marks=pytest.mark.slow),
        ("floral", "mixtures"),
        pytest.param("local-adaptor", None, marks=pytest.mark.slow),
        ("fedmerge", "mixtures"),
        pytest.param("ifca", "mixtures", marks=pytest.mark.slow),
        ("fedavg", None),
    ],
)
def test_of_users_who_tell_all_events_say_what_they_say_of_one_process(
    name: str, has: str | None, tmp_path: Path
) -> None:
    content = tiny(tmp_path, name, **OPTIONS)
    api.run(parse_recipe(content), out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    together, apart = routing_in(tmp_path / "together"), routing_in(tmp_path / "apart" / "server")
    assert apart == together
    assert [has in event for event in apart] == [True, True] if has else apart == [{}, {}]


@pytest.mark.parametrize("tells", ["scores", "losses", "nothing", None])
@pytest.mark.parametrize(
    ("name", "key"),
    [("comigs-1g1s", "expert_scores"), pytest.param("floral", "mixtures", marks=pytest.mark.slow)],
)
@pytest.mark.sampled(1)
def test_who_does_not_agree_tells_none_of_it(
    name: str, key: str, tells: Tells | None, tmp_path: Path, comingle: Callable[..., CliAnswer]
) -> None:
    server, channel = told_by(tmp_path, name, {"bob": tells})
    assert [list(event[key]) for event in routing_in(server)] == [["ann", "cem"]] * 2
    answers = [unpack_answer(answer) for who, _, answer in channel.recorded if who == "bob"]
    assert not any({"gates", "mixture"} & answer.reported.keys() for answer in answers)
    if tells == "losses":
        assert shown(server, comingle).count("cem: generalist" if key == "expert_scores" else "each user's mixture")


@pytest.mark.slow
def test_of_users_who_all_keep_it_to_themselves_there_is_nothing(
    tmp_path: Path, comingle: Callable[..., CliAnswer]
) -> None:
    server, _ = told_by(tmp_path, "comigs-1g1s", dict.fromkeys(("ann", "bob", "cem"), "scores"))
    assert routing_in(server) == [{}, {}]
    assert "generalist (solid" not in shown(server, comingle)


def shown(server: Path, comingle: Callable[..., CliAnswer]) -> str:
    for verb in ("show", "report", "plot"):
        answer = comingle(verb, server)
        assert answer.code == 0, (verb, answer)
        assert "Traceback" not in answer.err
    return (server / "report.html").read_text(encoding="utf-8")


def test_a_user_who_was_away_at_an_evaluation_is_left_out_of_the_picture(tmp_path: Path) -> None:
    server, _ = told_by(tmp_path, "floral", {})
    events = [json.loads(line) for line in (server / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["event"] == "evaluation")
    del first["mixtures"]["bob"]
    (server / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = read_mixtures(server)
    assert found is not None
    assert found.users == ("ann", "cem")


LIES: dict[str, dict[str, Any]] = {
    "an expert more": {"gates": [[0.2, 0.3, 0.5]] * 2},
    "no layers": {"gates": []},
    "other layers": {"gates": [[0.5, 0.5]] * 7},
    "ragged": {"gates": [[0.5, 0.5], [1.0]]},
    "a mixture of nothing": {"mixture": [0.5, 0.5]},
}
REFUSED: dict[str, dict[str, Any]] = {
    "no shares": {"gates": [[-5.0, 6.0]] * 2},
    "text": {"gates": "many"},
    "endless": {"mixture": [0.0] * 100_000},
    "deep": {"gates": [[[0.5, 0.5]]]},
}


@pytest.mark.parametrize("what", quick(LIES, "ragged", "a mixture of nothing"))
def test_numbers_that_cannot_be_a_users_are_as_if_not_told(what: str, tmp_path: Path) -> None:
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, **OPTIONS)), tmp_path / "run")
    run_federation(plan, Lying(nodes, of_words(**LIES[what]), step="evaluate"), tmp_path / "run" / "server")
    believed = ["ann", "bob", "cem"] if what == "a mixture of nothing" else ["ann", "cem"]
    assert [list(event["expert_scores"]) for event in routing_in(tmp_path / "run" / "server")] == [believed] * 2
    assert not any("mixtures" in event for event in routing_in(tmp_path / "run" / "server"))


def test_nor_are_those_of_a_method_that_has_none(tmp_path: Path) -> None:
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, "fedavg", **OPTIONS)), tmp_path / "run")
    lie = of_words(gates=[[1.0]], mixture=[0.5, 0.5])
    run_federation(plan, Lying(nodes, lie, step="evaluate"), tmp_path / "run" / "server")
    assert routing_in(tmp_path / "run" / "server") == [{}, {}]


@pytest.mark.parametrize("what", quick(REFUSED, "no shares", "deep"))
@pytest.mark.slow
def test_what_is_no_share_at_all_is_a_wrong_answer(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lies = [of_words(**REFUSED[what])]
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, **OPTIONS)), tmp_path / "run")
    plan = replace(plan, network=plan.network.model_copy(update={"round_timeout": 60.0}))
    channel = Lying(nodes, lambda answer: lies.pop(0)(answer) if lies else answer, step="evaluate")
    run_federation(plan, channel, tmp_path / "run" / "server")
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("user 'bob': answer: ")]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert list(routing_in(tmp_path / "run" / "server")[0]["expert_scores"]) == ["ann", "bob", "cem"]
