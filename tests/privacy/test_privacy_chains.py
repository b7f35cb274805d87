"""Privacy accounts over runs that continue one another: one budget, per user, against dp-accounting by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.tiny import one_base, tiny

import comingle as library
from comingle.config import parse_recipe
from comingle.config.settings import ACCOUNT, KEY
from comingle.federation.run_folder import run_federation
from comingle.privacy.accounting import Release, epsilon, read_account
from comingle.runs.results import Run
from comingle.runs.session import prepare, run_in
from comingle.utils.errors import ComingleError, RecipeError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events
from resuming import StoppedError, stop_in_round_3

DELTA = 1e-5
TOLERANCE = 1e-9
PRIVATE = {"noise_multiplier": 1.0, "accountant": "rdp", "delta": DELTA}


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def recipe(folder: Path, *names: str, continues: str = "", **privacy: Any) -> dict[str, Any]:
    """Two rounds of these users; ``privacy`` has also dotted keys of the recipe, with ``__``."""
    rest = {key: privacy.pop(key) for key in list(privacy) if "__" in key or key == "seed"}
    content = tiny(folder, "fedavg", users=3, **{"evaluation__model": "exchanged", **rest})
    content["data"]["users"] = {name: content["data"]["users"][name] for name in names or ("ann", "bob", "cem")}
    if continues:
        content["continue_from"] = str(folder / continues)
    return {**content, "privacy": {**PRIVATE, **privacy}}


def run(content: dict[str, Any], folder: Path, *, resume: bool = False, stops: bool = False) -> Run:
    made = parse_recipe(content)
    watching = (stop_in_round_3,) if stops else ()
    return run_in(folder, made, prepare(made), resume=resume, force=False, observers=lambda clients: watching)


def composed(*events: tuple[Any, int], accountant: str = "rdp", replaced: bool = False) -> float:
    """Epsilon of all runs in one accountant of the package, round by round where truncation makes no difference."""
    relations = dp.NeighboringRelation
    made = rdp.RdpAccountant if accountant == "rdp" else pld.PLDAccountant
    account = made(neighboring_relation=relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE)
    for event, count in events:
        for _ in range(count if accountant == "rdp" else 1):
            account.compose(event, 1 if accountant == "rdp" else count)
    return float(account.get_epsilon(DELTA))


def gaussian(noise: float) -> Any:
    return dp.GaussianDpEvent(noise)


def spent(done: Run) -> dict[str, float]:
    """Epsilon by user, as the metrics have it."""
    privacy = done.metrics["privacy"]
    return dict(privacy.get("users") or dict.fromkeys(done.metrics["users"], privacy["epsilon"]))


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_users_who_took_part_in_fewer_runs_have_spent_less(tmp_path: Path, accountant: str) -> None:
    """Ben is absent from the second run and his account is still there in the third; dan is new in the second."""
    run(recipe(tmp_path, "ann", "bob", accountant=accountant), tmp_path / "1")
    run(recipe(tmp_path, "ann", "cem", continues="1", noise_multiplier=2.0, accountant=accountant), tmp_path / "2")
    third = run(recipe(tmp_path, continues="2", noise_multiplier=1.5, accountant=accountant), tmp_path / "3")
    first, second, now = (gaussian(1.0), 2), (gaussian(2.0), 2), (gaussian(1.5), 2)
    expected = {
        "ann": composed(first, second, now, accountant=accountant),
        "bob": composed(first, now, accountant=accountant),
        "cem": composed(second, now, accountant=accountant),
    }
    assert spent(third) == pytest.approx(expected, rel=TOLERANCE)
    privacy = third.metrics["privacy"]
    assert privacy["epsilon"] == max(spent(third).values())
    assert privacy["earlier_epsilon"] == pytest.approx(composed(first, second, accountant=accountant), rel=TOLERANCE)
    events = [event for event in read_events(tmp_path / "3") if event["event"] == "privacy"]
    assert events[-1]["epsilon"] == privacy["epsilon"]
    assert len({(tmp_path / name / KEY).read_text() for name in "123"}) == 3


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_sampled_rounds_of_all_runs_are_composed(tmp_path: Path, sampling: str) -> None:
    run(recipe(tmp_path, sampling=sampling, training__participation=0.5), tmp_path / "1")
    options = {"sampling": sampling, "noise_multiplier": 2.0, "training__participation": 0.6, "training__rounds": 3}
    second = run(recipe(tmp_path, continues="1", **options), tmp_path / "2")
    if sampling == "poisson":
        events = [(dp.PoissonSampledDpEvent(0.5, gaussian(1.0)), 2), (dp.PoissonSampledDpEvent(0.6, gaussian(2.0)), 3)]
    else:
        events = [
            (dp.SampledWithoutReplacementDpEvent(3, 2, gaussian(0.5)), 2),
            (dp.SampledWithoutReplacementDpEvent(3, 2, gaussian(1.0)), 3),
        ]
    expected = composed(*events, replaced=sampling == "fixed")
    assert second.metrics["privacy"]["epsilon"] == pytest.approx(expected, rel=TOLERANCE)


def test_local_and_example_accounts_are_composed(tmp_path: Path) -> None:
    for mechanism in ("local", "example"):
        options = {"mechanism": mechanism, "training__local_steps": 2}
        first = run(recipe(tmp_path, **options), tmp_path / f"{mechanism}1")
        content = recipe(tmp_path, continues=f"{mechanism}1", noise_multiplier=2.0, **options)
        text = Path(content["data"]["users"]["ann"])
        text.write_text(text.read_text()[:600])
        second = run(content, tmp_path / f"{mechanism}2")
        for name in ("ann", "bob", "cem"):
            if mechanism == "local":
                events = [(gaussian(0.5), 2), (gaussian(1.0), 2)]
            else:
                rates = [rate_of(done, name) for done in (first, second)]
                assert (rates[0] == rates[1]) == (name != "ann")
                events = [(dp.PoissonSampledDpEvent(rates[0], gaussian(1.0)), 4)]
                events += [(dp.PoissonSampledDpEvent(rates[1], gaussian(2.0)), 4)]
            assert spent(second)[name] == pytest.approx(composed(*events), rel=TOLERANCE)


def rate_of(done: Run, name: str) -> float:
    users = {user.name: user for user in done.federation.clients.trainers}
    recorded = done.recipe.training
    assert isinstance(recorded.batch_size, int)
    return recorded.batch_size / math.ceil(len(users[name].train) / (recorded.context + 1))


@pytest.mark.parametrize("participation", [1.0, 0.9])
def test_a_user_whose_budget_is_spent_is_left_out_while_others_train(
    tmp_path: Path, participation: float, caplog: pytest.LogCaptureFixture
) -> None:
    run(recipe(tmp_path, "ann", "bob", training__participation=participation), tmp_path / "1")
    release = Release(noise=1.0, rate=participation)
    budget = epsilon(release, 3, DELTA, "rdp") * 1.001
    options = {"epsilon": budget, "training__participation": participation, "training__rounds": 4}
    second = run(recipe(tmp_path, continues="1", **options), tmp_path / "2")
    counts = dict(zip(("ann", "bob", "cem"), (3, 3, 3), strict=True))
    expected = {name: epsilon(release, count, DELTA, "rdp") for name, count in counts.items()}
    assert spent(second) == pytest.approx(expected, rel=TOLERANCE)
    account = second.federation.server.mechanisms.account
    assert account is not None
    assert account.counts.tolist() == [1, 1, 3]
    assert second.metrics["rounds"] == 3
    assert [record.message for record in caplog.records if "ann, bob" in record.message] == [
        "ann, bob: one more round would exceed the privacy budget, so they stop training; other users continue"
    ]
    trained = [set(event["train_loss_nats"]) for event in read_events(tmp_path / "2") if event["event"] == "round"]
    assert all(users <= {"cem"} for users in trained[1:])


def test_a_run_without_budget_trains_nobody(tmp_path: Path) -> None:
    run(recipe(tmp_path, "ann", "bob"), tmp_path / "1")
    second = run(recipe(tmp_path, "ann", "bob", continues="1", epsilon=epsilon(Release(noise=1.0), 2, DELTA, "rdp")),
                 tmp_path / "2")  # fmt: skip
    assert second.metrics["rounds"] == 0
    assert not [event for event in read_events(tmp_path / "2") if event["event"] == "round"]


def test_a_resumed_run_knows_the_account_of_the_earlier_one_that_is_gone(tmp_path: Path) -> None:
    run(recipe(tmp_path, "ann"), tmp_path / "1")
    content = recipe(tmp_path, "ann", "bob", continues="1", training__rounds=4, checkpoints__every=2)
    whole = run(content, tmp_path / "whole")
    with pytest.raises(StoppedError):
        run(content, tmp_path / "2", stops=True)
    (tmp_path / "1" / ACCOUNT).unlink()
    resumed = run(content, tmp_path / "2", resume=True)
    assert resumed.metrics["privacy"] == whole.metrics["privacy"]
    assert read_account(tmp_path / "2") == read_account(tmp_path / "whole")


def test_the_account_of_an_interrupted_run_has_the_rounds_after_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        run(recipe(tmp_path, "ann", training__rounds=4, checkpoints__every=2), tmp_path / "1", stops=True)
    assert [path.name for path in list_checkpoints(tmp_path / "1")] == ["round-0002"]
    second = run(recipe(tmp_path, "ann", continues="1"), tmp_path / "2")
    assert second.metrics["privacy"]["epsilon"] >= epsilon(Release(noise=1.0), 4, DELTA, "rdp")


def test_the_clip_norm_is_that_of_the_new_recipe_unless_it_adapts(tmp_path: Path) -> None:
    run(recipe(tmp_path, clip_norm=1.0), tmp_path / "1")
    second = run(recipe(tmp_path, clip_norm=0.25, continues="1"), tmp_path / "2")
    assert second.federation.clients.state.kept["clip_norm"].tolist() == [0.25] * 3
    adaptive = run(recipe(tmp_path, clip_norm="adaptive"), tmp_path / "3")
    norm = adaptive.metrics["privacy"]["clip_norm"]
    options = {"clip_norm": "adaptive", "epsilon": 0.1}  # no round can be afforded
    fourth = run(recipe(tmp_path, continues="3", **options), tmp_path / "4")
    assert fourth.metrics["privacy"]["clip_norm"] == norm != 0.1


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ({}, {"mechanism": "local"}, "privacy"),
        ({}, {"mechanism": "example"}, "privacy"),
        ({}, {"sampling": "fixed", "training__participation": 0.5}, "privacy"),
        ({}, {"noise_multiplier": None, "epsilon": 9.0}, "privacy.noise_multiplier"),
        ({"noise": "reproducible"}, {"noise": "reproducible"}, "privacy.noise"),
        ({"mechanism": "example"}, {"mechanism": "example", "data__replay": 0.2}, "data.replay"),
    ],
)
def test_refused(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], where: str) -> None:
    run(recipe(tmp_path, **first), tmp_path / "1")
    with pytest.raises(RecipeError, match=f"^{where}: got"):
        run(recipe(tmp_path, continues="1", **second), tmp_path / "2")
    if "noise" in first:
        run(recipe(tmp_path, continues="1", seed=5, **second), tmp_path / "2")


def test_noise_in_only_one_of_two_runs_is_refused(tmp_path: Path) -> None:
    private = recipe(tmp_path)
    open_recipe = {key: value for key, value in private.items() if key != "privacy"}
    for first, second in ((private, open_recipe), (open_recipe, private)):
        folder = tmp_path / ("private" if first is private else "open")
        run(first, folder)
        with pytest.raises(RecipeError, match=r"^privacy\.mechanism: got"):
            run({**second, "continue_from": str(folder)}, tmp_path / "later")


def test_a_run_without_account_or_with_a_damaged_one_is_not_continued(tmp_path: Path) -> None:
    run(recipe(tmp_path, "ann"), tmp_path / "1")
    path = tmp_path / "1" / ACCOUNT
    content = json.loads(path.read_text())
    del content["groups"][0]["releases"]
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=ACCOUNT):
        run(recipe(tmp_path, "ann", continues="1"), tmp_path / "2")
    path.unlink()
    with pytest.raises(ComingleError, match=ACCOUNT):
        run(recipe(tmp_path, "ann", continues="1"), tmp_path / "2")
    assert library.load(tmp_path / "1").metrics["rounds"] == 2


def continued(content: dict[str, Any], apart: Path, out: Path) -> tuple[dict[str, Any], Direct]:
    """Metrics of a federation that continues the one in ``apart``, whose users keep their state folders."""
    content = {key: value for key, value in content.items() if key != "continue_from"}
    plan, nodes = nodes_of(parse_recipe({**content, "continue_from": str(apart / "server")}), apart)
    channel = Direct(nodes)
    return run_federation(plan, channel, out), channel


@pytest.mark.parametrize("mechanism", ["central", "local", "example"])
def test_a_federation_continues_the_accounts_of_server_and_clients(tmp_path: Path, mechanism: str) -> None:
    """As in one process; clients that add noise have the same epsilon in their own ledgers."""
    first = recipe(tmp_path, "ann", "bob", mechanism=mechanism)
    second = recipe(tmp_path, mechanism=mechanism, noise_multiplier=2.0, continues="together")
    run(first, tmp_path / "together")
    together = run(second, tmp_path / "together later")
    federated(first, tmp_path / "apart")
    metrics, _ = continued(second, tmp_path / "apart", tmp_path / "later")
    assert metrics["privacy"] == together.metrics["privacy"]
    assert read_account(tmp_path / "later") == read_account(tmp_path / "together later")
    ledgers = {
        path.parent.parent.name: json.loads(path.read_text())
        for path in tmp_path.glob(f"apart/*/run-*/{ACCOUNT}")
        if "earlier" in path.read_text() or "/cem/" in str(path)
    }
    if mechanism == "central":
        assert not ledgers
        return
    assert {name: ledger["epsilon"] for name, ledger in ledgers.items()} == pytest.approx(
        spent(together), rel=TOLERANCE
    )
    keys = [path.read_text() for path in tmp_path.glob(f"apart/ann/run-*/{KEY}")]
    assert len(set(keys)) == len(keys) == 2


@pytest.mark.parametrize("mechanism", ["local", "example"])
def test_a_client_refuses_what_its_own_ledger_does_not_allow(tmp_path: Path, mechanism: str) -> None:
    """The server has forgotten the account of the earlier federation."""
    first = recipe(tmp_path, "ann", "bob", mechanism=mechanism)
    federated(first, tmp_path / "apart")
    ledger = next((tmp_path / "apart" / "ann").glob(f"run-*/{ACCOUNT}"))
    spent_before = json.loads(ledger.read_text())["epsilon"]
    server = tmp_path / "apart" / "server" / ACCOUNT
    account = json.loads(server.read_text())
    account["groups"] = [{"users": ["ann", "bob"], "earlier": [], "releases": []}]
    server.write_text(json.dumps(account))
    second = recipe(tmp_path, "ann", "bob", mechanism=mechanism, epsilon=spent_before * 1.01)
    with pytest.raises(RunError):  # all users are left out of the round
        continued(second, tmp_path / "apart", tmp_path / "later")
    ledgers = [json.loads(path.read_text()) for path in (tmp_path / "apart" / "ann").glob(f"run-*/{ACCOUNT}")]
    assert [len(each["releases"]) for each in sorted(ledgers, key=lambda each: "earlier" in each)] == [2, 0]
    for path in (tmp_path / "apart" / "bob").glob(f"run-*/{ACCOUNT}"):
        if "earlier" not in json.loads(path.read_text()):
            path.unlink()
    with pytest.raises(RunError):
        continued(second, tmp_path / "apart", tmp_path / "again")
    reasons = [event["reason"] for event in read_events(tmp_path / "again") if event.get("user") == "bob"]
    assert any("unusable state folder" in reason for reason in reasons)


def test_secure_sums_after_a_run_without_them_start_from_the_earlier_model(tmp_path: Path) -> None:
    """Users measure their changes from a download, which the earlier run has not stored."""
    content = {key: value for key, value in recipe(tmp_path).items() if key != "privacy"}
    run(content, tmp_path / "1")
    later = {**content, "continue_from": str(tmp_path / "1")}
    plain = run(later, tmp_path / "plain")
    summed = run({**later, "privacy": {"mechanism": "none", "secure_aggregation": {}}}, tmp_path / "sums")
    for name, t in plain.federation.server.kept.items():
        assert float((summed.federation.server.kept[name] - t).abs().max()) < 1e-4
