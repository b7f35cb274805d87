"""A user leaves a run: afterwards it is as if the user had never taken part, or at least nothing of its own is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import comingle as comingle

from comingle.audits.canaries import Attacker, draw_canaries, published, windows_of
from comingle.privacy.accounting import read_account
from comingle.runs import api
from comingle.runs.leaving import STATEMENTS, plan_removal, recipe_without, remove_user
from comingle.utils.errors import ComingleError, DataError, RecipeError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events, read_metrics

USERS = ("ada", "ben", "cem")
OPTIONS: dict[str, Any] = {
    "base": "random:llama?layers=1&dim=32",
    "method": "comigs-1g1s",
    "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16, "participation": 0.7},
    "evaluation": {"every": 1},
    "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
}


def data_of(folder: Path, names: tuple[str, ...], word: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    users = {}
    for name in names:
        users[name] = str(folder / f"{name}-{word}.txt")
        lines = [f"{name} {word} {number} of {number}." for number in range(60)]
        (folder / f"{name}-{word}.txt").write_text("\n\n".join(lines))
    return {"users": users}


def train_months(folder: Path, texts: Path, *, without: str = "", **changes: Any) -> None:
    """May with ada and ben, June with cem too, July with other text: each continues the one before."""
    months = {"may": ("ada", "ben"), "june": USERS, "july": USERS}
    earlier = {}
    for month, names in months.items():
        remaining = tuple(name for name in names if name != without)
        recipe = {**OPTIONS, **changes, "data": data_of(texts, remaining, month)}
        api.run(recipe, out=folder / month, **earlier)
        earlier = {"continue_from": str(folder / month)}


def tensors_of(run: api.Run) -> dict[str, torch.Tensor]:
    return {**run.federation.clients.state.tensors(), **run.federation.server.state}


def assert_equal(run: Path, other: Path, **options: Any) -> None:
    mine, theirs = tensors_of(api.load(run)), tensors_of(api.load(other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in mine.items())
    assert read_metrics(run)["users"] == read_metrics(other)["users"]


@pytest.mark.parametrize("user", ["cem", "ben"])
def test_exact_is_bit_for_bit_a_run_without_the_user(user: str, tmp_path: Path) -> None:
    """cem came in June, so that May is kept; ben was there from the beginning."""
    train_months(tmp_path / "with", tmp_path / "texts")
    train_months(tmp_path / "never", tmp_path / "texts", without=user)
    may = (tmp_path / "with" / "may" / "metrics.json").read_bytes()
    removal = plan_removal(tmp_path / "with" / "july", user, "exact")
    months = ["june", "july"] if user == "cem" else ["may", "june", "july"]
    assert [folder.name for folder in removal.runs] == months
    assert removal.rounds == 2 * len(months)
    assert removal.seconds > 0
    remove_user(removal)
    for month in months:
        assert_equal(tmp_path / "with" / month, tmp_path / "never" / month)
        assert user not in read_metrics(tmp_path / "with" / month)["users"]
    assert ((tmp_path / "with" / "may" / "metrics.json").read_bytes() == may) == (user == "cem")
    (certificate,) = json.loads((tmp_path / "with" / "july" / "left.json").read_text())["left"]
    assert certificate["user"] == user
    assert certificate["statement"] == STATEMENTS["exact"]
    assert certificate["checkpoint_before"] != certificate["checkpoint_after"]
    assert "metrics.json" in certificate["deleted"]
    assert not list((tmp_path / "with").glob(".*"))


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedmerge", "pcl", "floral", "ifca", "centralized"])
def test_forward_keeps_the_others_and_nothing_of_the_user(method: str, tmp_path: Path) -> None:
    recipe = {**OPTIONS, "method": method, "data": data_of(tmp_path / "texts", USERS, "may")}
    if method == "ifca":
        recipe["method"] = {"name": "ifca", "models": 2}
    api.run(recipe, out=tmp_path / "run")
    before = api.load(tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    remove_user(plan_removal(tmp_path / "run", "ben", "forward"))
    after = api.load(tmp_path / "run")
    for name in ("ada", "cem"):
        old, new = before.user(name), after.user(name)
        assert all(torch.equal(t, old.tensors[key]) for key, t in new.tensors.items())
    assert read_metrics(tmp_path / "run")["users"] == {name: metrics["users"][name] for name in ("ada", "cem")}
    mean = sum(metrics["users"][name]["test_perplexity"] for name in ("ada", "cem")) / 2
    assert read_metrics(tmp_path / "run")["mean_test_perplexity"] == pytest.approx(mean)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.name != "left.json":
            assert b"ben" not in path.read_bytes(), path
    assert any(event["event"] == "evaluation" for event in read_events(tmp_path / "run"))


def test_a_run_goes_on_after_a_user_has_left(tmp_path: Path) -> None:
    train_months(tmp_path / "runs", tmp_path / "texts")
    remove_user(plan_removal(tmp_path / "runs" / "july", "ada", "forward"))
    assert not (tmp_path / "runs" / "june").exists()
    recipe = {**OPTIONS, "data": data_of(tmp_path / "texts", ("ben", "cem"), "august")}
    later = api.run(recipe, out=tmp_path / "runs" / "august", continue_from=str(tmp_path / "runs" / "july"))
    assert set(later.metrics["users"]) == {"ben", "cem"}


def test_an_interrupted_removal_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_months(tmp_path / "with", tmp_path / "texts")
    train_months(tmp_path / "never", tmp_path / "texts", without="ben")
    from comingle.runs import leaving

    original, runs = leaving.run, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        runs.append(options["out"])
        if len(runs) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(leaving, "run", interrupted)
    july = tmp_path / "with" / "july"
    with pytest.raises(KeyboardInterrupt):
        remove_user(plan_removal(july, "ben", "exact"))
    removal = plan_removal(july, "ben", "exact")
    assert [folder.name for folder in removal.runs] == ["june", "july"]
    remove_user(removal)
    assert_equal(july, tmp_path / "never" / "july")


@pytest.mark.parametrize("step", ["rename", "rmtree"])
def test_killed_while_folders_are_exchanged_no_run_is_lost(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the second renaming, or before the old folder is deleted; the next plan completes it."""
    from comingle.runs import leaving

    api.run({**OPTIONS, "data": data_of(tmp_path / "texts", USERS, "may")}, out=tmp_path / "run")
    calls: list[Path] = []
    original_rename, original_rmtree = Path.rename, leaving.shutil.rmtree

    def rename(path: Path, target: Path) -> Path:
        if step == "rename" and path.parent.name == ".run.leaving":
            raise KeyboardInterrupt
        return original_rename(path, target)

    def rmtree(path: Path, **options: Any) -> None:
        calls.append(path)
        if step == "rmtree" and path.name == "outgoing":
            raise KeyboardInterrupt
        original_rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(leaving.shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt):
            remove_user(plan_removal(tmp_path / "run", "ben", "forward"))
    with pytest.raises(RunError, match="no user 'ben'"):
        plan_removal(tmp_path / "run", "ben", "forward")
    assert set(read_metrics(tmp_path / "run")["users"]) == {"ada", "cem"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_link_to_a_run_leads_to_its_folder(tmp_path: Path) -> None:
    api.run({**OPTIONS, "data": data_of(tmp_path / "texts", USERS, "may")}, out=tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    remove_user(plan_removal(tmp_path / "latest", "ben", "forward"))
    assert set(read_metrics(tmp_path / "run")["users"]) == {"ada", "cem"}


def test_an_interrupted_removal_continues_with_runs_that_the_user_had_left_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ben was dropped from June, which continues May with him."""
    from comingle.runs import leaving

    def train(folder: Path, *users: str) -> None:
        api.run({**OPTIONS, "data": data_of(tmp_path / "texts", users, "may")}, out=folder / "may")
        june = {**OPTIONS, "data": data_of(tmp_path / "texts", ("ada", "cem"), "june")}
        api.run(june, out=folder / "june", continue_from=str(folder / "may"))

    train(tmp_path / "with", "ada", "ben")
    train(tmp_path / "never", "ada")
    original, june = leaving.run, tmp_path / "with" / "june"

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if options["out"].name == "june":
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(leaving, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove_user(plan_removal(june, "ben", "exact"))
    removal = plan_removal(june, "ben", "exact")
    assert [folder.name for folder in removal.runs] == ["june"]
    remove_user(removal)
    assert_equal(june, tmp_path / "never" / "june")
    with pytest.raises(RunError, match="no user 'ben'"):
        plan_removal(june, "ben", "exact")


def test_changed_data_of_others_is_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    train_months(tmp_path / "runs", tmp_path / "texts")
    (tmp_path / "texts" / "ada-july.txt").write_text("other text\n\n" * 60)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    with pytest.raises(DataError, match="'ada' has changed"):
        remove_user(plan_removal(tmp_path / "runs" / "july", "ben", "exact"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_settings_by_user_leave_with_the_user(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "adapters": {"rank": {"ada": 4, "ben": 2, "cem": 4}},
        "training": {**OPTIONS["training"], "participation": [["ada", "ben"], ["cem"]]},
    }
    run = api.run({**OPTIONS, **changes, "data": data_of(tmp_path / "texts", USERS, "may")}, out=tmp_path / "run")
    recipe = recipe_without(run.recipe, USERS, "ben")
    assert recipe.adapters.rank == {"ada": 4, "cem": 4}
    assert recipe.training.participation == [["ada"], ["cem"]]
    with pytest.raises(RecipeError, match="participation"):
        recipe_without(run.recipe, USERS, "cem")


@pytest.mark.parametrize(("user", "place"), [("dan", "no user 'dan'"), ("ada", "only user")])
def test_users_who_cannot_leave(user: str, place: str, tmp_path: Path) -> None:
    api.run({**OPTIONS, "data": data_of(tmp_path / "texts", ("ada",), "may")}, out=tmp_path / "run")
    with pytest.raises(ComingleError, match=place):
        plan_removal(tmp_path / "run", user, "exact")


def test_exact_needs_the_earlier_runs(tmp_path: Path) -> None:
    train_months(tmp_path / "runs", tmp_path / "texts")
    (tmp_path / "runs" / "may").rename(tmp_path / "runs" / "elsewhere")
    with pytest.raises(RunError, match="--mode forward"):
        plan_removal(tmp_path / "runs" / "july", "ada", "exact")


def test_the_command_shows_first_and_deletes_with_yes(comingle: Any, tmp_path: Path) -> None:
    api.run({**OPTIONS, "data": data_of(tmp_path / "texts", USERS, "may")}, out=tmp_path / "run")
    checkpoint = list_checkpoints(tmp_path / "run")[-1]
    shown = comingle("leave", tmp_path / "run", "--user", "ben")
    assert shown.code == 0
    out = " ".join(shown.out.split())
    assert "2 rounds" in out
    assert "nothing is changed" in out
    assert "delete" in out
    assert checkpoint.exists()
    assert "ben" in read_metrics(tmp_path / "run")["users"]
    done = comingle("leave", tmp_path / "run", "--user", "ben", "--yes")
    assert done.code == 0, done.err
    assert set(read_metrics(tmp_path / "run")["users"]) == {"ada", "cem"}
    refused = comingle("leave", tmp_path / "run", "--user", "ben", "--mode", "somehow")
    assert refused.code == 2
    assert comingle("leave", tmp_path / "run", "--user", "ben").code == 2


def test_events_lose_the_user_at_any_depth() -> None:
    from comingle.runs.leaving import without_name

    event: Mapping[str, Any] = {"users": {"ben": {"x": 1}, "ada": {"steps": ["ben", "ada"]}}, "round": 1}
    assert without_name(event, "ben") == {"users": {"ada": {"steps": ["ada"]}}, "round": 1}


def test_who_leaves_a_private_run_keeps_its_account_there(tmp_path: Path) -> None:
    """Training again would spend the budgets of the others a second time."""
    recipe = {**OPTIONS, "data": data_of(tmp_path, USERS, "may"), "privacy": {"noise_multiplier": 1.0}}
    api.run(recipe, out=tmp_path / "run")
    with pytest.raises(RunError, match="differential privacy"):
        plan_removal(tmp_path / "run", "ben", "exact")
    account = read_account(tmp_path / "run")
    remove_user(plan_removal(tmp_path / "run", "ben", "forward"))
    assert account == read_account(tmp_path / "run")
    returned = api.run(recipe, out=tmp_path / "later", continue_from=str(tmp_path / "run"))
    assert set(returned.metrics["users"]) == set(USERS)
    assert "users" not in returned.metrics["privacy"]  # all have spent the same


CANARY = "ZQXKVJWHGQZXKUJV"
"""Text that no other user has."""


def canary_ranks(run: api.Run, windows: torch.Tensor) -> tuple[int, float]:
    """Rank of the canary, the first window, among references by its loss under ben's download; and its loss in nats."""
    clients = run.federation.clients
    ben = list(clients.names).index("ben")
    observed = {name: t[ben : ben + 1] for name, t in published(run.federation.server).items()}
    attacker = Attacker(clients=clients)
    (after,) = attacker.losses([ben], observed, windows.unsqueeze(0))
    (before,) = attacker.losses([ben], {}, windows.unsqueeze(0))
    decrease = before - after
    return int((decrease > decrease[0]).sum()), float(after[0])


@pytest.mark.slow
def test_a_canary_is_forgotten_after_exact_and_not_after_forward(tmp_path: Path) -> None:
    """ben's download knows ada's canary, which only ada has; after ``exact`` it is as in a run without ada."""
    recipe: dict[str, Any] = {
        **OPTIONS,
        "method": "fedavg",
        "training": {
            "rounds": 4,
            "local_steps": 12,
            "batch_size": 4,
            "context": 16,
            "experts": {"learning_rate": 0.02},
        },
        "evaluation": {"first": False},
    }
    data = data_of(tmp_path / "texts", USERS, "may")
    Path(data["users"]["ada"]).write_text("\n\n".join([CANARY * 20] * 60))
    without = {"users": {name: path for name, path in data["users"].items() if name != "ada"}}
    trained = api.run({**recipe, "data": data}, out=tmp_path / "exact")
    shutil.copytree(tmp_path / "exact", tmp_path / "forward")
    never = api.run({**recipe, "data": without}, out=tmp_path / "never")

    ada = next(user for user in trained.federation.clients.users if user.name == "ada")
    canary = windows_of(ada.train, 16)[:1]
    references = draw_canaries(1, vocabulary=256, context=16, seed=0, trial=0).references[:99]
    windows = torch.cat([canary, references.to(canary)[:, : canary.shape[1]]])

    for mode in ("exact", "forward"):
        remove_user(plan_removal(tmp_path / mode, "ada", mode))  # type: ignore[arg-type]
    before, exact, forward, without_ada = (
        canary_ranks(run, windows)
        for run in (trained, api.load(tmp_path / "exact"), api.load(tmp_path / "forward"), never)
    )
    assert before[0] == 0  # no reference has gained more
    assert forward == before
    assert exact == without_ada
    assert exact[0] > 10
    assert exact[1] > before[1] + 0.2


def test_branches_are_named_and_not_changed(comingle: Any, tmp_path: Path) -> None:
    train_months(tmp_path / "runs", tmp_path / "texts")
    branch = tmp_path / "runs" / "branch"
    recipe = {**OPTIONS, "data": data_of(tmp_path / "texts", ("ben", "cem"), "june")}
    api.run(recipe, out=branch, continue_from=str(tmp_path / "runs" / "june"))
    july = tmp_path / "runs" / "july"
    assert plan_removal(july, "ada", "forward").branches == [branch]
    shown = comingle("leave", july, "--user", "ada", "--mode", "forward")
    assert f"not changed: {branch}" in shown.out
    (other,) = plan_removal(branch, "cem", "exact").branches
    assert other == july
    remove_user(plan_removal(july, "ada", "forward"))
    assert branch.exists()
    (certificate,) = json.loads((july / "left.json").read_text())["left"]
    assert certificate["not_changed"] == [str(branch)]
    assert str(july.parent) in certificate["searched"]


def test_a_folder_of_several_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    train_months(tmp_path / "runs", tmp_path / "texts")
    with pytest.raises(RunError, match="july, june, may"):
        plan_removal(tmp_path / "runs", "ada", "exact")
