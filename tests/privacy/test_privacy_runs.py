"""Whole runs with privacy: the account, the budget, resumed, with users elsewhere, and switched off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import federated
from tests.federation.tiny import answer_of, download_in, one_base, own_of, tasks_of, tiny, with_message

import comingle as library
from comingle.config import parse_recipe
from comingle.config.settings import KEY
from comingle.federation.client import Client
from comingle.privacy import noise
from comingle.privacy.accounting import Release, epsilon
from comingle.protocol.wire import unpack
from comingle.reports.tables import render_run
from comingle.runs.results import Run
from comingle.runs.session import prepare, run_in
from comingle.utils.errors import RunError
from comingle.utils.records import read_events
from resuming import StoppedError, outcome, stop_in_round_3, told

PRIVATE = {"noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp"}


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def run(
    content: dict[str, Any], folder: Path, *, resume: bool = False, stops: bool = False, force: bool = False
) -> Run:
    recipe = parse_recipe(content)
    watching = (stop_in_round_3,) if stops else ()
    return run_in(
        folder, recipe, prepare(recipe), resume=resume, force=force, observers=lambda clients: watching
    )  # fmt: skip


def recipe(folder: Path, method: str = "comigs-1g1s", **privacy: Any) -> dict[str, Any]:
    rest = {key: privacy.pop(key) for key in list(privacy) if "__" in key}
    rounds = {"training__rounds": 4, "evaluation__model": "exchanged", "checkpoints__every": 2, "users": 3}
    return tiny(folder, method, **{**rounds, **rest}, privacy={**PRIVATE, **privacy})


def of_event(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == name]


# -------------------------------------------------------------------- the account


def test_epsilon_is_told_after_every_round_and_in_the_metrics(tmp_path: Path) -> None:
    metrics = run(recipe(tmp_path), tmp_path / "run").metrics["privacy"]
    expected = [epsilon(Release(noise=1.0), count, 1e-5, "rdp") for count in range(1, 5)]
    assert [event["epsilon"] for event in of_event(tmp_path / "run", "privacy")] == expected
    assert metrics["epsilon"] == expected[-1]
    assert (metrics["releases"], metrics["mechanism"], metrics["delta"]) == (4, "central", 1e-5)
    assert "users" not in metrics


def test_users_who_take_part_more_often_have_spent_more(tmp_path: Path) -> None:
    listed = [["ann", "bob"], ["ann"], ["ann", "cem"], ["ann"]]
    metrics = run(recipe(tmp_path, training__participation=listed), tmp_path / "run").metrics["privacy"]
    each = [epsilon(Release(noise=1.0), count, 1e-5, "rdp") for count in (4, 1, 1)]
    assert metrics["users"] == dict(zip(("ann", "bob", "cem"), each, strict=True))
    assert metrics["epsilon"] == each[0]


@pytest.mark.slow
def test_a_budget_for_the_whole_run_is_spent_and_not_exceeded(tmp_path: Path) -> None:
    content = recipe(tmp_path, epsilon=5.0, noise_multiplier=None, training__participation=0.5)
    metrics = run(content, tmp_path / "run").metrics["privacy"]
    assert 4.98 < metrics["epsilon"] <= 5.0
    assert metrics["releases"] == 4


def test_what_shares_nothing_reveals_nothing(tmp_path: Path) -> None:
    metrics = run(recipe(tmp_path, "local", epsilon=1.0, noise_multiplier=None), tmp_path / "run").metrics
    assert metrics["privacy"]["epsilon"] == 0


# -------------------------------------------------------------------- the budget


@pytest.mark.parametrize("model", ["exchanged", "local"])
@pytest.mark.slow
def test_a_run_stops_before_its_budget_is_exceeded(tmp_path: Path, model: str) -> None:
    spent = [epsilon(Release(noise=1.0), count, 1e-5, "rdp") for count in range(5)]
    content = recipe(tmp_path, epsilon=(spent[2] + spent[3]) / 2, evaluation__model=model)
    stopped = run(content, tmp_path / "run")
    assert stopped.metrics["privacy"]["epsilon"] == spent[2]
    assert stopped.metrics["selected_round"] == 2
    assert [event["round"] for event in of_event(tmp_path / "run", "round")] == [1, 2]
    assert of_event(tmp_path / "run", "evaluation")[-1]["round"] == 2
    again, _ = federated(content, tmp_path / "elsewhere")
    assert again["privacy"] == stopped.metrics["privacy"]
    assert scores(again) == scores(stopped.metrics)
    told = ("rounds", "planned_rounds", "selected_round")
    assert [again[key] for key in told] == [stopped.metrics[key] for key in told] == [2, 4, 2]
    own = [json.loads(path.read_text()) for path in (tmp_path / "elsewhere").rglob("model/metrics.json")]
    assert [[one[key] for key in told] for one in own] == [[2, 4, 2]] * 3
    resumed, _ = federated(content, tmp_path / "elsewhere", resume=True)
    assert resumed["privacy"] == again["privacy"]
    assert [resumed[key] for key in told] == [2, 4, 2]
    assert scores(resumed) == scores(again)


@pytest.mark.parametrize(
    ("method", "every", "store"),
    [("fedavg", 1, "memory"), ("fedavg", 5, "memory"), ("fedavg+", 5, "disk"), ("fdlora", 1, "memory")],
)
@pytest.mark.sampled(1)
def test_the_models_of_a_run_that_its_budget_ended_are_kept(
    tmp_path: Path, method: str, every: int, store: str
) -> None:
    spent = [epsilon(Release(noise=1.0), count, 1e-5, "rdp") for count in range(5)]
    rest = {"checkpoints__every": every, "runtime__store": store}
    content = recipe(tmp_path, method, epsilon=(spent[2] + spent[3]) / 2, **rest)
    stopped = run(content, tmp_path / "run")
    assert (stopped.metrics["rounds"], stopped.metrics["planned_rounds"]) == (2, 4)
    text = "one two three four five six seven eight nine ten"
    said = {name: stopped.user(name).perplexity(text) for name in stopped.users}  # type: ignore[union-attr]
    kept = library.load(tmp_path / "run")
    assert {name: kept.user(name).perplexity(text) for name in kept.users} == said  # type: ignore[union-attr]
    shown = " ".join(str(render_run(kept.metrics).caption).split())
    assert "the privacy budget was spent after round 2 of 4" in shown
    assert "lowest" not in shown
    again = run(content, tmp_path / "run", resume=True)
    assert scores(again.metrics) == scores(stopped.metrics)
    assert {name: again.user(name).perplexity(text) for name in again.users} == said  # type: ignore[union-attr]
    assert [event["round"] for event in of_event(tmp_path / "run", "round")] == [1, 2]


def test_a_run_whose_budget_allows_no_round_has_the_models_it_began_with(tmp_path: Path) -> None:
    one = epsilon(Release(noise=1.0), 1, 1e-5, "rdp")
    content = recipe(tmp_path, "fedavg", epsilon=one / 2)
    run(content, tmp_path / "run")
    assert library.load(tmp_path / "run").metrics["rounds"] == 0
    run(content, tmp_path / "run", resume=True)
    assert len(of_event(tmp_path / "run", "start")) == 1


def test_users_drop_out_one_by_one_where_they_have_spent_unequally(tmp_path: Path) -> None:
    listed = [["ann", "bob"], ["ann", "bob"], ["ann", "cem"], ["cem"]]
    two = epsilon(Release(noise=1.0), 2, 1e-5, "rdp")
    content = recipe(tmp_path, epsilon=two * 1.01, training__participation=listed)
    run(content, tmp_path / "run")
    rounds = of_event(tmp_path / "run", "round")
    assert [sorted(event["train_loss_nats"]) for event in rounds] == [["ann", "bob"], ["ann", "bob"], ["cem"], ["cem"]]


# -------------------------------------------------------------------- resumed


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": "secret"},
        {"noise": "secret", "mechanism": "local", "training__uploads": "int8"},
        {"noise": "secret", "clip_norm": "adaptive", "training__participation": 0.9},
    ],
    ids=["central", "local", "adaptive"],
)
@pytest.mark.sampled(1)
def test_a_resumed_run_draws_no_noise_twice(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as one that was never stopped and had the same key; with another key it would end elsewhere."""
    content = recipe(tmp_path, **settings)
    run(content, tmp_path / "other")
    monkeypatch.setattr(noise, "new_key", lambda: 64 * "7")
    run(content, tmp_path / "whole")
    with pytest.raises(StoppedError):
        run(content, tmp_path / "stopped", stops=True)
    monkeypatch.setattr(noise, "new_key", lambda: 64 * "8")  # which is not asked for again
    run(content, tmp_path / "stopped", resume=True)
    same(outcome(tmp_path / "stopped"), outcome(tmp_path / "whole"))
    assert told(tmp_path / "stopped") == told(tmp_path / "whole")
    assert outcome(tmp_path / "other")[0] != outcome(tmp_path / "whole")[0]


def test_a_run_whose_key_is_gone_does_not_go_on_with_another(tmp_path: Path) -> None:
    content = recipe(tmp_path, noise="secret")
    with pytest.raises(StoppedError):
        run(content, tmp_path / "run", stops=True)
    (tmp_path / "run" / KEY).unlink()
    with pytest.raises(RunError, match=f"{KEY}: missing"):
        run(content, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / KEY).exists()
    run(content, tmp_path / "run", force=True)


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


# -------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("comigs-1g1s", {"training__participation": 0.5}),
        ("fedavg", {"training__participation": 0.7, "sampling": "fixed", "clip_norm": "adaptive"}),
        pytest.param("fdlora", {"training__weighting": "tokens", "weight_cap": 1000}, marks=pytest.mark.slow),
        ("fedmerge", {"mechanism": "local", "training__uploads": "bfloat16"}),
        pytest.param(
            "fedavg",
            {"mechanism": "local", "training__uploads": "int8", "training__participation": 0.6},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.sampled(1)
def test_users_elsewhere_end_with_the_same(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    content = recipe(tmp_path, method, **settings)
    here = run(content, tmp_path / "run").metrics
    there, channel = federated(content, tmp_path / "elsewhere")
    assert scores(there) == scores(here)
    assert there["privacy"] == here["privacy"]
    wanted = {"within"} if settings.get("clip_norm") == "adaptive" else set()
    for message in channel.uploads:
        assert set(message.reports) == wanted
    assert not any("train_loss" in of_user for of_user in channel.told)


def scores(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: user["test_perplexity"] for name, user in metrics["users"].items()}


def test_a_user_tells_nothing_of_itself_unless_it_says_so(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    _, channel = federated(content, tmp_path / "all")
    node = Client(tmp_path / "ann", own_of(content, "ann"))
    for task in tasks_of(channel, "ann"):
        answer = answer_of(node, task)
        assert (
            not {"train_loss", "score", "metrics", "tokens", "seconds", "amounts", "gates", "mixture"}
            & answer.reported.keys()
        )


@pytest.fixture
def local_user(tmp_path: Path) -> tuple[dict[str, Any], Any, Client]:
    content = recipe(tmp_path, "fedavg", mechanism="local", noise="secret", epsilon=100.0, noise_multiplier=3.0)
    _, channel = federated(content, tmp_path / "all")
    return content, channel, Client(tmp_path / "again", own_of(content, "ann"))


def test_a_server_that_asks_twice_with_other_models_gets_no_difference_without_noise(
    tmp_path: Path, local_user: tuple[dict[str, Any], Any, Client]
) -> None:
    """Two uploads of one round have noise of their own, and both are in the user's ledger for good."""
    _, channel, node = local_user
    tasks = tasks_of(channel, "ann")
    at = next(i for i, task in enumerate(tasks) if "receive" in task.todo and "upload" in task.todo)
    for task in tasks[:at]:
        assert not answer_of(node, task).refused
    download = download_in(tasks[at])
    other = with_message(tasks[at], replace(download, tensors={n: t + 1e-6 for n, t in download.tensors.items()}))
    spent = ledger(tmp_path / "again")["epsilon"]
    one, same_again, two = (answer_of(node, task) for task in (tasks[at], tasks[at], other))
    assert one.messages == same_again.messages
    uploads = [unpack(answer.messages[0]) for answer in (one, two)]
    difference = torch.cat([(t - uploads[1].tensors[n]).flatten() for n, t in uploads[0].tensors.items()])
    assert float(difference.std()) == pytest.approx(3.0 * 2**0.5, rel=0.1)
    assert len(ledger(tmp_path / "again")["releases"]) == 3  # one of the first round, and two of this
    assert ledger(tmp_path / "again")["epsilon"] == epsilon(Release(noise=1.5), 3, 1e-5, "rdp") > spent


def ledger(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("privacy.json")
    return json.loads(path.read_text())


def test_a_user_whose_budget_is_spent_sends_nothing_whatever_the_server_asks(
    tmp_path: Path, local_user: tuple[dict[str, Any], Any, Client]
) -> None:
    _, channel, node = local_user
    tasks = tasks_of(channel, "ann")
    for task in tasks[:2]:
        answer_of(node, task)
    (path,) = (tmp_path / "again").rglob("privacy.json")
    path.write_text(json.dumps({"releases": [f"{i:064}" for i in range(1000)]}))
    answer = answer_of(node, tasks[2])
    assert answer.reported["left_out"] == "its privacy budget of epsilon 100 is spent"
    assert answer.messages == ()


@pytest.mark.slow
def test_a_resumed_federation_counts_the_round_that_may_have_been_published(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    with pytest.raises(StoppedError):
        federated(content, tmp_path / "run", observers=(_stop_after_2,))
    metrics, _ = federated(content, tmp_path / "run", resume=True)
    assert metrics["privacy"]["releases"] == 5
    assert metrics["privacy"]["epsilon"] == epsilon(Release(noise=1.0), 5, 1e-5, "rdp")


def _stop_after_2(event: dict[str, Any]) -> None:
    if event["event"] == "privacy" and event["round"] == 2:
        raise StoppedError


# -------------------------------------------------------------------- the key, and none


def test_the_key_is_the_owners_alone_and_in_no_other_file(tmp_path: Path) -> None:
    run(recipe(tmp_path, noise="secret"), tmp_path / "run")
    key = (tmp_path / "run" / KEY).read_bytes()
    assert (tmp_path / "run" / KEY).stat().st_mode & 0o077 == 0
    others = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != KEY]
    assert others
    assert not any(key in path.read_bytes() for path in others)


def test_a_run_anew_in_the_same_folder_draws_other_users(tmp_path: Path) -> None:
    content = recipe(tmp_path, noise="secret", training__rounds=2)
    run(content, tmp_path / "run")
    key = (tmp_path / "run" / KEY).read_text()
    run(content, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / KEY).read_text() == key
    run(content, tmp_path / "run", force=True)
    assert (tmp_path / "run" / KEY).read_text() != key


def test_without_privacy_a_recipe_is_what_it_was(tmp_path: Path) -> None:
    content = tiny(tmp_path, users=2)
    plain = parse_recipe(content)
    assert "privacy" not in plain.result_content
    assert plain.fingerprint != parse_recipe({**content, "privacy": PRIVATE}).fingerprint
    federation = run(content, tmp_path / "run").federation
    assert not any(name.startswith(("reference/", "clip")) for name in federation.clients.state.kept)
    assert not any(name.startswith("privacy/") for name in federation.server.state)
    assert not (tmp_path / "run" / KEY).exists()
    assert not federation.server.mechanisms


# -------------------------------------------------------------------- seen by people


@pytest.mark.slow
def test_epsilon_stands_beside_accuracy(tmp_path: Path) -> None:
    """In the page and in the server's table; what is sent without privacy has no bound."""
    from comingle.reports.page import render_page
    from comingle.reports.runs import read_entries
    from comingle.reports.tables import render_participants
    from comingle.utils.terminal import Terminal

    metrics, _ = federated(recipe(tmp_path), tmp_path / "apart")
    told = f"{metrics['privacy']['epsilon']:.3g}"
    private = run(recipe(tmp_path), tmp_path / "private").metrics["privacy"]["epsilon"]
    assert f"{private:.3g}" == told
    for name in ("comigs-1g1s", "local"):
        run({**recipe(tmp_path, name), "privacy": None}, tmp_path / f"open-{name}")
    page = render_page(read_entries([tmp_path / "private", tmp_path / "open-comigs-1g1s", tmp_path / "open-local"]))
    table = page[page.index('<section id="results">') : page.index('<section id="curves">')]
    assert [word for word in (f">{told}<", ">no bound<", ">nothing is sent<") if word not in table] == []
    assert "at delta 1e-05, bounds what" in table
    assert "epsilon" not in render_page(read_entries([tmp_path / "open-local"])).lower()
    console = Terminal(width=160)
    with console.capture() as captured:
        console.print(render_participants(tmp_path / "apart" / "server"))
    title, head, *rows = [line for line in captured.get().splitlines() if line.strip()]
    assert f"epsilon {told} at delta 1e-05" in title
    assert head.split()[-1] == "epsilon"
    assert [row.split()[-1] for row in rows] == [told] * 3
