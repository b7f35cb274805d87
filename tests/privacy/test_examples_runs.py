"""Whole runs that hide single examples: the account, the budget, resumed, with users elsewhere, refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm
from tests.federation.direct import federated
from tests.federation.tiny import answer_of, download_in, one_base, own_of, tasks_of, tiny, with_message
from tests.golden import cases
from tests.privacy.examples import HIDDEN, TRAINED
from tests.quick import recipe_with

from comingle.config import parse_recipe
from comingle.config.settings import KEY, PrivacySection
from comingle.federation.client import Client
from comingle.methods import REGISTRY, make
from comingle.privacy import noise
from comingle.privacy.accounting import Work, multiplier_of, spent_by
from comingle.privacy.mechanisms import check_supported
from comingle.protocol.wire import unpack
from comingle.runs.results import Run
from comingle.runs.session import prepare, run_in
from comingle.training.kinds.base import check_recipe
from comingle.utils.errors import RecipeError
from comingle.utils.records import read_events
from resuming import StoppedError, outcome, stop_in_round_3, told

DELTA = 1e-5


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def recipe(folder: Path, method: str = "comigs-1g1s", **privacy: Any) -> dict[str, Any]:
    """Three users, four rounds of two steps; the third has less text than the others."""
    rest = {key: privacy.pop(key) for key in list(privacy) if "__" in key}
    rounds = {"training__rounds": 4, "training__local_steps": 2, "evaluation__model": "exchanged"}
    content = tiny(folder, method, **{**rounds, "checkpoints__every": 2, "users": 3, **rest})
    path = Path(content["data"]["users"]["cem"])
    path.write_text(path.read_text()[:600])
    return {**content, "privacy": {**HIDDEN, **privacy}}


def rates_of(done: Run) -> dict[str, float]:
    """Two windows of seventeen tokens in a batch, of as many as each user has."""
    return {user.name: 2 / math.ceil(len(user.train) / 17) for user in done.federation.clients.trainers}


def run(content: dict[str, Any], folder: Path, *, resume: bool = False, stops: bool = False) -> Run:
    made = parse_recipe(content)
    watching = (stop_in_round_3,) if stops else ()
    return run_in(folder, made, prepare(made), resume=resume, force=False, observers=lambda clients: watching)


def of_event(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == name]


def by_hand(rate: float, multiplier: float, steps: int, accountant: str = "rdp") -> float:
    """Epsilon of so many steps, by the package itself."""
    made = rdp.RdpAccountant if accountant == "rdp" else pld.PLDAccountant
    account = made(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    account.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps)
    return float(account.get_epsilon(DELTA))


# -------------------------------------------------------------------- the account


@pytest.mark.slow
def test_epsilon_of_each_user_is_told_after_every_round_and_in_the_metrics(tmp_path: Path) -> None:
    whole = run(recipe(tmp_path), tmp_path / "run")
    metrics, told_of = whole.metrics["privacy"], of_event(tmp_path / "run", "privacy")
    for done, event in enumerate(told_of, start=1):
        wanted = {name: by_hand(rate, 1.0, 2 * done) for name, rate in rates_of(whole).items()}
        assert event["users"] == pytest.approx(wanted, rel=1e-9)
        assert event["epsilon"] == max(event["users"].values())
    assert metrics["users"] == told_of[-1]["users"]
    assert metrics["users"]["cem"] > metrics["users"]["ann"] == metrics["users"]["bob"]
    assert (metrics["releases"], metrics["mechanism"], metrics["delta"]) == (8, "example", DELTA)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_batch_of_everything_is_the_gaussian_mechanism(accountant: Any) -> None:
    """In closed form: Balle and Wang 2018, Theorem 8."""

    def excess(eps: float, sigma: float) -> float:
        low, high = -1 / (2 * sigma) - eps * sigma, 1 / (2 * sigma) - eps * sigma
        return float(norm.cdf(high) - math.exp(eps + float(norm.logcdf(low)))) - DELTA

    privacy = PrivacySection(mechanism="example", noise_multiplier=4.0, accountant=accountant)
    for steps in (1, 9, 50):
        exact = float(brentq(excess, 1e-6, 1e3, args=(4.0 / math.sqrt(steps),)))  # type: ignore[arg-type]
        ours = spent_by(privacy, Work(examples=5, batch=8, steps=1, rounds=1), steps)
        assert exact - 1e-6 <= ours <= exact * (1.001 if accountant == "pld" else 1.25)


@pytest.mark.slow
def test_without_a_noise_multiplier_each_user_has_its_own(tmp_path: Path) -> None:
    content = recipe(tmp_path, epsilon=3.0, noise_multiplier=None)
    metrics = run(content, tmp_path / "run").metrics["privacy"]
    assert all(2.98 < spent <= 3.0 for spent in metrics["users"].values())
    assert metrics["noise_multipliers"]["ann"] < metrics["noise_multipliers"]["cem"] == metrics["noise_multiplier"]


@pytest.mark.slow
def test_rounds_count_in_which_a_user_takes_part(tmp_path: Path) -> None:
    listed = [["ann", "bob"], ["ann"], ["ann", "cem"], ["ann"]]
    done = run(recipe(tmp_path, training__participation=listed), tmp_path / "run")
    steps = {"ann": 8, "bob": 2, "cem": 2}
    wanted = {name: by_hand(rate, 1.0, steps[name]) for name, rate in rates_of(done).items()}
    assert done.metrics["privacy"]["users"] == pytest.approx(wanted)


def test_what_shares_nothing_reveals_nothing(tmp_path: Path) -> None:
    metrics = run(recipe(tmp_path, "local", epsilon=1.0, noise_multiplier=None), tmp_path / "run").metrics
    assert metrics["privacy"]["epsilon"] == 0


# -------------------------------------------------------------------- the budget


@pytest.mark.slow
def test_who_has_too_few_examples_takes_no_part_and_the_run_ends_before_anybody_exceeds_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rate = rates_of(run(recipe(tmp_path, training__rounds=1), tmp_path / "one"))["ann"]
    budget = (by_hand(rate, 1.0, 6) + by_hand(rate, 1.0, 8)) / 2
    content = recipe(tmp_path, epsilon=budget)
    metrics = run(content, tmp_path / "run").metrics
    excluded, ended = (text for text in caplog.messages if "budget" in text)
    assert excluded.startswith("cem: ")
    assert re.search(r"^comigs-1g1s: .*round 3 of 4", ended)
    rounds = of_event(tmp_path / "run", "round")
    assert [sorted(event["train_loss_nats"]) for event in rounds] == [["ann", "bob"]] * 3
    assert metrics["privacy"]["users"]["cem"] == 0  # whose first round would have been too much
    assert metrics["privacy"]["epsilon"] <= budget
    there, _ = federated(content, tmp_path / "elsewhere")
    assert there["privacy"] == metrics["privacy"]
    assert scores(there) == scores(metrics)


def scores(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: user["test_perplexity"] for name, user in metrics["users"].items()}


# -------------------------------------------------------------------- before training


@pytest.mark.slow
@pytest.mark.parametrize("sets", [{"noise_multiplier": 1.5}, {"epsilon": 4.0, "noise_multiplier": None}], ids=str)
def test_cost_says_what_a_run_spends(comingle: Any, tmp_path: Path, sets: dict[str, Any]) -> None:
    content = recipe(tmp_path, **sets)
    (tmp_path / "tiny.yaml").write_text(json.dumps(content))
    answer = comingle("cost", tmp_path / "tiny.yaml", "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)["methods"][0]["privacy"]
    answer = comingle("run", tmp_path / "tiny.yaml", "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    spent = json.loads((tmp_path / "run" / "metrics.json").read_text())["privacy"]
    assert {key: said[key] for key in ("epsilon", "delta", "releases")} == {
        key: spent[key] for key in ("epsilon", "delta", "releases")
    }
    words = comingle("cost", tmp_path / "tiny.yaml")
    assert "about any example" in words.out
    assert re.search(
        r"^comigs-1g1s: epsilon [\d.]+ at delta 1e-05, example noise of .* 8 steps, by RDP", words.out, re.M
    )


def test_a_number_of_users_says_nothing_of_their_examples(comingle: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe(tmp_path)))
    answer = comingle("cost", tmp_path / "tiny.yaml", "--users", "5")
    assert answer.code == 2
    assert "--users: got 5; with privacy.mechanism: example" in " ".join(answer.err.split())


# -------------------------------------------------------------------- resumed


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("comigs-1g1s", "reproducible"),
        ("fedmerge", "secret"),
        pytest.param("comigs-1g1s", "secret", marks=pytest.mark.slow),
        pytest.param("fedmerge", "reproducible", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_run(tmp_path: Path, method: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and noise are drawn from the key that was kept, and what was counted stays counted."""
    content = recipe(tmp_path, method, noise=kept)
    monkeypatch.setattr(noise, "new_key", lambda: 64 * "7")
    run(content, tmp_path / "whole")
    with pytest.raises(StoppedError):
        run(content, tmp_path / "stopped", stops=True)
    monkeypatch.setattr(noise, "new_key", lambda: 64 * "8")  # which is not asked for again
    run(content, tmp_path / "stopped", resume=True)
    one, other = outcome(tmp_path / "stopped"), outcome(tmp_path / "whole")
    assert one[0] == other[0]
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []
    assert told(tmp_path / "stopped") == told(tmp_path / "whole")
    run(content, tmp_path / "again")  # with the other key
    assert (outcome(tmp_path / "again")[0] == other[0]) == (kept == "reproducible")
    assert (tmp_path / "whole" / KEY).exists() == (kept == "secret")


# -------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("comigs-1g1s", {}),
        ("fedavg", {"training__participation": 0.6, "training__uploads": "int8"}),
        pytest.param("fdlora", {}, marks=pytest.mark.slow),
        pytest.param("fedmerge", {"epsilon": 2.0, "noise_multiplier": None}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_users_elsewhere_end_with_the_same(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    content = recipe(tmp_path, method, **settings)
    here = run(content, tmp_path / "run").metrics
    there, channel = federated(content, tmp_path / "elsewhere")
    assert scores(there) == scores(here)
    assert there["privacy"] == here["privacy"]
    for message in channel.uploads:
        assert message.reports == {}  # neither losses nor amounts of data
    assert not any("train_loss" in of_user for of_user in channel.told)


def test_a_user_tells_nothing_but_how_many_examples_it_has(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    _, channel = federated(content, tmp_path / "all")
    node = Client(tmp_path / "ann", own_of(content, "ann"))
    words: set[str] = set()
    for task in tasks_of(channel, "ann"):
        words |= answer_of(node, task).reported.keys()
    assert words <= {"unit", "steps", "done", "back", "examples", "measure", "evaluated"}
    assert "examples" in words


@pytest.fixture
def user(tmp_path: Path) -> tuple[Any, Client]:
    content = recipe(tmp_path, "fedavg", noise="secret", epsilon=100.0)
    _, channel = federated(content, tmp_path / "all")
    return channel, Client(tmp_path / "again", own_of(content, "ann"))


@pytest.mark.slow
def test_a_server_that_asks_twice_with_other_models_gets_other_noise_and_both_are_counted(
    tmp_path: Path, user: tuple[Any, Client]
) -> None:
    channel, node = user
    tasks = tasks_of(channel, "ann")
    at = next(i for i, task in enumerate(tasks) if "receive" in task.todo and "upload" in task.todo)
    for task in tasks[:at]:
        assert not answer_of(node, task).refused
    download = download_in(tasks[at])
    other = with_message(tasks[at], replace(download, tensors={n: t + 1e-6 for n, t in download.tensors.items()}))
    one, same_again, two, first_again = (answer_of(node, task) for task in (tasks[at], tasks[at], other, tasks[at]))
    assert one.messages == same_again.messages == first_again.messages  # the same beginning has the same steps
    uploads = [unpack(answer.messages[0]) for answer in (one, two)]
    moved = [torch.cat([(t - download.tensors[n][:, 0]).flatten() for n, t in up.tensors.items()]) for up in uploads]
    assert abs(float(torch.corrcoef(torch.stack(moved))[0, 1])) < 0.9
    known = ledger(tmp_path / "again")
    assert len(known["releases"]) == 3  # one of the first round, and two of this
    privacy = PrivacySection(mechanism="example", noise_multiplier=1.0, accountant="rdp")
    home = node._store
    assert home is not None
    private = home.clients.steps.private
    assert private is not None
    work = private.work(home.clients.batch_source, 0)
    assert known["epsilon"] == spent_by(privacy, work, 6)


def ledger(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("privacy.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_user_whose_budget_is_spent_takes_no_step_whatever_the_server_asks(
    tmp_path: Path, user: tuple[Any, Client]
) -> None:
    channel, node = user
    tasks = tasks_of(channel, "ann")
    at = [number for number, task in enumerate(tasks) if "train" in task.todo]
    for task in tasks[: at[1]]:
        answer_of(node, task)
    (path,) = (tmp_path / "again").rglob("privacy.json")
    path.write_text(json.dumps({"releases": [f"{i:064}" for i in range(50_000)]}))
    answer = answer_of(node, tasks[at[1]])
    assert answer.reported["left_out"] == "its privacy budget of epsilon 100 is spent"
    assert answer.messages == ()
    assert len(ledger(tmp_path / "again")["releases"]) == 50_000  # nothing was begun


@pytest.mark.slow
def test_a_resumed_federation_counts_the_round_that_may_have_been_played(tmp_path: Path) -> None:
    content = recipe(tmp_path)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "privacy" and event["round"] == 2:
            raise StoppedError

    rates = rates_of(run(content, tmp_path / "here"))
    with pytest.raises(StoppedError):
        federated(content, tmp_path / "run", observers=(stop,))
    metrics, _ = federated(content, tmp_path / "run", resume=True)
    assert metrics["privacy"]["releases"] == 10
    assert metrics["privacy"]["users"]["ann"] == pytest.approx(by_hand(rates["ann"], 1.0, 10))


# -------------------------------------------------------------------- other kinds of data


@pytest.mark.slow
def test_conversations_and_nets(tmp_path: Path) -> None:
    """Passes over few examples: a user's number of steps follows from how many it has, which is public."""
    small = {**HIDDEN, "clip_norm": 0.5}
    asked = cases.question_recipe(tmp_path, cases.method("comigs-1g1s"))
    metrics = run({**asked, "privacy": small}, tmp_path / "asked").metrics["privacy"]
    assert metrics["epsilon"] == pytest.approx(by_hand(1.0, 1.0, 2))  # all four questions, one step a round
    nets = cases.net_recipe(cases.method("fedavg"), **{"data.task.name": "mlp", "training.weighting": "uniform"})
    done = run({**nets, "privacy": small}, tmp_path / "nets")
    users = done.federation.clients.trainers
    for user in users:
        rate, steps = 40 / len(user.train), 4 * math.ceil(len(user.train) / 40)
        spent = done.metrics["privacy"].get("users", {}).get(user.name, done.metrics["privacy"]["epsilon"])
        assert spent == pytest.approx(by_hand(rate, 1.0, steps))


# -------------------------------------------------------------------- refused


def reason(method: str, **settings: Any) -> str:
    clustered = {"clusters": 2} if method in ("floral", "ensemble") else {}
    own = {key: settings.pop(key) for key in list(settings) if key in ("prune", "accumulate_gradients")}
    privacy = PrivacySection(mechanism="example", noise_multiplier=1.0)
    try:
        check_supported(make(method, **clustered, **own), recipe_with(privacy=privacy))
    except RecipeError as error:
        return str(error)
    return ""


ENTANGLED = {
    "centralized", "fedsa-lora", "pcl", "hetlora", "floral", "floral-optimal", "floral-mfl", "local-adaptor",
    "ensemble", "ensemble-optimal", "mfl", "fml", "ifca", "fedem", "stacking", "fedalt", "fedamole", "fedbn",
    "fedex-lora", "fedper", "flora-stacking", "momentum-clustering", "rolora", "scaffold", "fed-sb",
}  # fmt: skip
"""Methods whose uploads follow from more than noised gradients."""


def test_every_method_says_whether_it_can_hide_examples() -> None:
    """Known methods stay as they are."""
    accepted = {name for name in REGISTRY if not reason(name)}
    nothing = {name for name in REGISTRY if not make(name).shared and not make(name).placement.pooled}
    assert {*TRAINED} | nothing <= accepted
    assert not accepted & ENTANGLED


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("fedsa-lora", {}, r"method fedsa-lora: .*attention\.a, generalist\.a\b"),
        ("local-adaptor", {}, "method local-adaptor: mixture weights"),
        ("fedem", {}, "method fedem: mixture weights"),
        ("floral", {}, "its users report mixture"),
        ("ifca", {}, "its users report choice"),
        ("pcl", {}, "method pcl: .*downloads"),
        ("hetlora", {}, "prune: false"),
        ("hetlora", {"prune": False}, "TailPenalty"),
        ("comigs-1g1s", {"accumulate_gradients": True}, "accumulate_gradients: false"),
        ("centralized", {}, "method centralized: pools |method centralized pools "),
    ],
)
def test_what_breaks_the_account_is_refused_with_the_reason(method: str, settings: dict[str, Any], why: str) -> None:
    assert re.search(why, reason(method, **settings))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"privacy.clip_norm": "adaptive"}, r"privacy\.clip_norm: adaptive .*example: a number"),
        ({"training.weighting": "tokens"}, r"training\.weighting: with privacy\.mechanism: example.*weight_cap"),
        ({"training.experts.clip_norm": 1.0}, r"training\.experts\.clip_norm: got 1; with privacy\.mechanism: example"),
        ({"data.train_on_valid": True}, r"data\.train_on_valid: with privacy\.mechanism: example"),
        ({"privacy.secure_aggregation.bits": 24}, r"secure_aggregation: .*mechanism: example.*central, none"),
        ({"evaluation.select": "best"}, r"privacy: evaluation\.select: best"),
        ({"privacy.noise_multiplier": None}, r"privacy: .*noise_multiplier, or epsilon"),
    ],
)
def test_settings_that_break_the_account_are_refused(changes: dict[str, Any], why: str) -> None:
    content = {"data": {"users": {"a": "x"}}, "method": "fedavg", "privacy": HIDDEN}
    with pytest.raises(RecipeError, match=why):
        check_recipe(parse_recipe(content).with_changes(changes))


def test_a_delta_that_allows_an_example_to_be_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"privacy\.delta: got 0\.03 for \d+ examples of user 'ann'; allowed: below 1/"
    ):
        run(recipe(tmp_path, delta=0.03), tmp_path / "run")


def test_nets_with_batch_norm_or_parts_of_their_own_are_refused(federate_nets: Any) -> None:
    changes = {f"privacy.{key}": value for key, value in HIDDEN.items()} | {"training.weighting": "uniform"}
    with pytest.raises(RecipeError, match=r"method fedavg: .*net:resnet9-group"):
        federate_nets("fedavg", changes=changes)
    with pytest.raises(RecipeError, match=r"^privacy: method pfedmoe: "):
        federate_nets("pfedmoe", changes=changes | {"data.task.name": "mlp"})


def test_without_it_nothing_is_different(tmp_path: Path) -> None:
    content = {key: value for key, value in recipe(tmp_path).items() if key != "privacy"}
    done = run(content, tmp_path / "run")
    assert done.federation.clients.steps.private is None
    assert done.federation.clients.plan.users == ()
    assert not (tmp_path / "run" / KEY).exists()


@pytest.mark.slow
def test_noise_is_calibrated_once_for_the_same_work() -> None:
    privacy = PrivacySection(mechanism="example", epsilon=2.0, accountant="rdp")
    work = Work(examples=100, batch=10, steps=5, rounds=4)
    found = multiplier_of(privacy, work)
    assert by_hand(0.1, found, 20) <= 2.0 < by_hand(0.1, found * 0.998, 20)
    assert multiplier_of(privacy, replace(work, rounds=8)) > found
