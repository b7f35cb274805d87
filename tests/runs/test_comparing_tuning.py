"""``compare --tune``: candidates with equal budgets, picked for each method by validation loss."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml

import comingle
from comingle.cli.compare import parse_tune
from comingle.config import load_recipe
from comingle.reports.comparisons import read_comparison, read_tuning
from comingle.runs import session
from comingle.runs.api import load, run
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.records import read_metrics

RATE = "training.experts.learning_rate"
RATES = "training.experts.learning_rate=1e-3,3e-2,3e-3"
USERS = {
    name: torch.utils.data.TensorDataset(x := torch.randn(20, 3), x.sum(1, keepdim=True)) for name in ("ada", "ben")
}
NET: dict[str, Any] = {"training": {"rounds": 1, "batch_size": 8}, "data": {"loss": "mse"}}


@pytest.fixture(scope="module")
def short(write_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of two rounds."""
    recipe = write_recipe(tmp_path_factory.mktemp("short") / "project")
    content = yaml.safe_load(recipe.read_text())
    content["training"] |= {"rounds": 2, "local_steps": 2}
    content["method"] = "local"
    recipe.write_text(yaml.safe_dump(content))
    return recipe


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that train a round, each with its rate and seed."""
    runs: list[str] = []
    train = session.run_rounds

    def record(federation: Any, **options: Any) -> Any:
        plan = federation.clients.plan
        if options["first_round"] < plan.training.rounds and federation.clients.method.trains:
            runs.append(f"{plan.method.name} {plan.training.experts.learning_rate} {plan.seed}")
        return train(federation, **options)

    monkeypatch.setattr(session, "run_rounds", record)
    return runs


def results(folder: Path) -> dict[str, Any]:
    return {row["method"]: row["results"] for row in read_comparison(folder)["methods"]}


def compare(methods: Any, **how: Any) -> Any:
    return comingle.compare(NET, methods, users=USERS, base=lambda: torch.nn.Linear(3, 1), **how)


def test_each_method_is_picked_by_validation_loss_and_its_first_run_is_reused(
    comingle_command: Any, short: Path, tmp_path: Path, trained: list[str]
) -> None:
    folder = tmp_path / "out"
    options = ("--methods", "pretrained,local,fedavg", "--seeds", "0,1", "--tune", RATES, "--out", folder)
    answer = comingle_command("compare", short, *options)
    assert (answer.code, answer.err) == (0, "")
    tuning = read_tuning(folder)
    assert tuning is not None
    assert (tuning["seed"], tuning["keys"]) == (0, {RATE: [0.001, 0.03, 0.003]})
    assert list(tuning["methods"]) == ["local", "fedavg"]
    candidates = [f"{name} {rate} 0" for name in ("local", "fedavg") for rate in (0.001, 0.03, 0.003)]
    after = [f"{name} {method['picked'][RATE]} 1" for name, method in tuning["methods"].items()]
    assert trained == [*candidates, *after]
    for name, method in tuning["methods"].items():
        losses = {one["values"][RATE]: one["mean_valid_loss"] for one in method["candidates"]}
        rate = method["picked"][RATE]
        assert losses[rate] == min(losses.values())
        clients = load(folder / f"{name}-seed0").federation.clients
        assert losses[rate] == pytest.approx(fmean(clients.validate().values()), abs=1e-6)
        for seed in (0, 1):
            assert load_recipe(folder / f"{name}-seed{seed}").training.experts.learning_rate == rate
        alone = run(load_recipe(short).with_changes({"method": name, RATE: rate}), out=tmp_path / f"{name}-alone")
        assert alone.metrics["users"] == read_metrics(folder / f"{name}-seed0")["users"]
        others = {path.name for path in (folder / "tuning").glob(f"{name}-*")}
        assert others == {f"{name}-learning_rate={other}-seed0" for other in losses if other != rate}
    assert read_comparison(folder)["tuning"] == tuning
    report = tmp_path / "report.html"
    assert comingle_command("report", folder, "--out", report).code == 0
    assert comingle_command("show", folder, "--latex", tmp_path / "table.tex").code == 0
    shown = comingle_command("show", folder).out
    texts = [answer.out, shown, (folder / "table.md").read_text(), report.read_text()]
    for text in [*texts, (tmp_path / "table.tex").read_text().replace("\\_", "_")]:
        assert "picked by mean validation loss" in text.replace("Picked", "picked")
        for method in tuning["methods"].values():
            assert f"learning_rate={method['picked'][RATE]}" in text
    assert "not only in method and seed" not in report.read_text()


def test_an_interrupted_tuning_is_resumed(
    comingle_command: Any, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    options = ("--seeds", "0,1", "--tune", RATES)
    assert (
        comingle_command("compare", short, "--methods", "local,fedavg", *options, "--out", tmp_path / "one").code == 0
    )
    folder = tmp_path / "two"
    whole = comingle.runs.compare._mean_valid_loss

    def interrupt(run: Any) -> Any:
        if run.recipe.method.name == "fedavg":
            raise KeyboardInterrupt
        return whole(run)

    with monkeypatch.context() as patched:
        patched.setattr("comingle.runs.compare._mean_valid_loss", interrupt)
        stopped = comingle_command("compare", short, "--methods", "local,fedavg", *options, "--out", folder)
    assert stopped.code == 130
    trained.clear()
    again = comingle_command("compare", short, "--methods", "local", *options, "--out", folder)
    assert again.code == 2
    assert "exists" in again.err
    first = comingle_command("compare", short, "--methods", "local", *options, "--out", folder, "--resume")
    assert (first.code, len(trained)) == (0, 1)  # seed 1 of the picked rate
    trained.clear()
    both = comingle_command("compare", short, "--methods", "local,fedavg", *options, "--out", folder, "--resume")
    assert (both.code, len(trained)) == (0, 3)  # two more candidates, and seed 1
    assert results(folder) == results(tmp_path / "one")
    assert read_tuning(folder) == read_tuning(tmp_path / "one")
    trained.clear()
    last = comingle_command("compare", short, "--methods", "local,fedavg", *options, "--out", folder, "--resume")
    assert (last.code, trained) == (0, [])
    assert results(folder) == results(tmp_path / "one")
    added = comingle_command("compare", short, "--methods", "pretrained", "--seeds", "0", "--out", folder, "--resume")
    assert (added.code, list(results(folder))) == (0, ["pretrained", "local", "fedavg"])  # though rates differ
    assert "picked by mean validation loss" in added.out
    replaced = comingle_command("compare", short, "--methods", "local,fedavg", *options, "--out", folder, "--force")
    assert (replaced.code, len(trained)) == (0, 8)
    picked = read_tuning(folder)["methods"]["local"]["picked"][RATE]  # type: ignore[index]
    assert not (folder / "tuning" / f"local-learning_rate={picked}-seed0").exists()  # it replaced the method's run
    assert {name: results(folder)[name] for name in ("local", "fedavg")} == results(tmp_path / "one")
    other = ("--seeds", "0,1", "--tune", "training.experts.learning_rate=1e-3,3e-2")
    changed = comingle_command("compare", short, "--methods", "local", *other, "--out", folder, "--resume")
    assert changed.code == 2
    assert "tuning.json: --tune: keys were" in changed.err
    unrated = comingle_command("compare", short, "--methods", "local", "--seeds", "0", "--out", folder, "--resume")
    assert unrated.code == 2


def test_runs_without_tuning_are_not_taken_for_tuned_ones(tmp_path: Path) -> None:
    compare(["local"], seeds=[0], out=tmp_path / "out")
    with pytest.raises(RunError, match="exists and was not tuned"):
        compare(["local", "fedavg"], seeds=[0], out=tmp_path / "out", resume=True, tune={RATE: [1e-3, 1e-2]})
    (tmp_path / "other/local-seed0").mkdir(parents=True)
    with pytest.raises(RunError, match="local-seed0: exists and was not tuned"):
        compare(["local"], seeds=[0], out=tmp_path / "other", resume=True, tune={RATE: [1e-3, 1e-2]})


def test_a_run_that_is_not_the_picked_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """As after an interruption of ``force`` between writing what was picked and replacing the earlier run."""
    out, tune = tmp_path / "out", {RATE: [1e-3, 1e-2]}
    picked = compare(["local"], seeds=[0], out=out, tune=tune).tuning["methods"]["local"]["picked"][RATE]
    (out / "local-seed0").rename(out / f"tuning/local-learning_rate={picked}-seed0")
    (out / "local-seed0").mkdir()
    with pytest.raises(RunError, match=f"local-seed0: is not the picked run, .*learning_rate={picked}-seed0"):
        compare(["local"], seeds=[0], out=out, resume=True, tune=tune)
    (out / "local-seed0").rmdir()
    found = compare(["local"], seeds=[0], out=out, resume=True, tune=tune)  # which moves it
    assert found.tuning["methods"]["local"]["picked"][RATE] == picked
    assert not (out / f"tuning/local-learning_rate={picked}-seed0").exists()


@pytest.mark.slow
def test_two_jobs_pick_the_same(comingle_command: Any, short: Path, tmp_path: Path) -> None:
    options = ("--methods", "local,fedavg", "--seeds", "0,1", "--tune", RATES)
    one, two = tmp_path / "one", tmp_path / "two"
    assert comingle_command("compare", short, *options, "--out", one).code == 0
    answer = comingle_command("compare", short, *options, "--out", two, "--jobs", "2")
    assert answer.code == 0
    assert read_tuning(two) == read_tuning(one)
    assert results(two) == results(one)


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ("training.experts.learning_rat=1e-3,1e-2", "training.experts.learning_rat"),
        ("training.experts.learning_rate=1e-3,-1", "training.experts.learning_rate"),
        ("training.experts.learning_rate=1e-3", "got 1 value; allowed: 2 or more"),
        ("training.experts.learning_rate=1e-3,0.001", "got learning_rate=0.001 twice"),
        ("training.rounds=1,2", "equal data and budgets; allowed: training.KEY, but not rounds"),
        ("seed=1,2", "equal data and budgets"),
        ("data.max_test_tokens=10,20", "equal data and budgets"),
        ("method.proximal=1,2", "no setting of these methods"),
        ("training.experts.learning_rate", "give KEY=V1,V2,..."),
        ("training.experts.learning_rate=[1,2", "not YAML"),
    ],
)
def test_mistakes_are_found_before_training(
    comingle_command: Any, short: Path, tmp_path: Path, trained: list[str], tune: str, said: str
) -> None:
    options = ("--methods", "local,fedavg", "--seeds", "0", "--out", tmp_path / "out", "--tune", tune)
    answer = comingle_command("compare", short, *options)
    assert answer.code == 2
    assert said in answer.err
    assert "--tune" in answer.err
    assert (trained, (tmp_path / "out").exists()) == ([], False)


def test_validation_data_is_needed(comingle_command: Any, short: Path, tmp_path: Path, trained: list[str]) -> None:
    options = ("--methods", "local", "--seeds", "0", "--out", tmp_path / "out", "--tune", RATES)
    untold = comingle_command("compare", short, *options, "--set", "data.train_on_valid=true")
    assert (untold.code, "data.train_on_valid" in untold.err) == (2, True)
    without = comingle_command("compare", short, *options, "--set", "data.split.valid=0")
    assert (without.code, "valid" in without.err) == (2, True)
    assert trained == []


def test_only_methods_that_train_have_candidates() -> None:
    with pytest.raises(RecipeError, match=rf"got pretrained; none of them trains and has a setting of {RATE}"):
        compare(["pretrained"], tune={RATE: [1e-3, 1e-2]})
    found = compare(["local", "fedprox"], seeds=[0], tune={"method.proximal": [0.1, 1.0]})
    assert list(found.tuning["methods"]) == ["fedprox"]
    picked = found.tuning["methods"]["fedprox"]["picked"]["method.proximal"]
    assert found.metrics["fedprox", 0]["method_settings"] == {"proximal": picked}
    with pytest.raises(RecipeError, match="'fedprox:proximal=1' sets it"):
        compare(["fedprox", "fedprox:proximal=1"], tune={"method.proximal": [0.1, 2.0]})


def test_combinations_variants_and_edges(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    methods = ["local", "fedprox:proximal=0.1", "fedprox:proximal=2"]
    tune = {RATE: [1e-4, 1e-3, 1e-1], "training.experts.momentum": [0.0, 0.5]}
    with caplog.at_level(logging.WARNING):
        found = compare(methods, seeds=[0, 1], tune=tune, out=tmp_path / "out")
    assert list(found.tuning["methods"]) == methods
    assert {len(method["candidates"]) for method in found.tuning["methods"].values()} == {6}
    assert [*found.metrics] == [(method, seed) for seed in (0, 1) for method in methods]
    assert "local: training.experts.learning_rate=0.1 is at the edge of its candidates" in caplog.text
    assert "momentum=" not in caplog.text  # of two candidates each is at the edge
    assert "learning_rate=0.1, momentum=" in found._repr_html_()
    assert "Picked by mean validation loss" in found.to_latex()
    assert "learning\\_rate=0.1" in found.to_latex()
    assert not any("mean_valid_loss" in metrics for metrics in found.metrics.values())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert compare(methods, seeds=[0, 1], tune=tune, out=tmp_path / "out", resume=True).tuning == found.tuning
    assert "edge" not in caplog.text  # it has been said


def test_a_candidate_that_diverges_is_not_picked(tmp_path: Path, trained: list[str]) -> None:
    sgd = {"training.experts.name": "sgd", "training.rounds": 20}
    found = compare(["local"], seeds=[0], tune={RATE: [1e-3, 1e30]}, out=tmp_path / "out", **sgd)
    failed = [one for one in found.tuning["methods"]["local"]["candidates"] if one["mean_valid_loss"] is None]
    assert failed
    assert all(one["values"][RATE] == 1e30 for one in failed)
    assert json.loads((tmp_path / "out/table.json").read_text())["tuning"] == found.tuning
    trained.clear()
    with pytest.raises(RunError, match=r"no candidate of --tune has a finite loss; learning_rate=1e\+30: failed: user"):
        compare(["local"], seeds=[0, 1], tune={RATE: [1e30, 1e31]}, **sgd)
    assert trained == ["local 1e+30 0", "local 1e+31 0"]  # no second seed without values


def test_no_candidate_has_a_finite_validation_loss() -> None:
    """No run fails, as only validation data is so far away."""
    far = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.full((4, 1), 1e30))
    users = {name: {"train": samples, "valid": far, "test": samples} for name, samples in USERS.items()}
    with pytest.raises(RunError, match=r"no candidate of --tune has a finite loss; .*: validation loss not finite"):
        comingle.compare(
            NET, ["local"], users=users, base=lambda: torch.nn.Linear(3, 1), seeds=[0], tune={RATE: [1e-3, 1e-2]}
        )


def test_values_may_be_lists() -> None:
    assert parse_tune(["adapters.targets=[q,v],[q]", "a.b=1, 2"]) == {
        "adapters.targets": [["q", "v"], ["q"]],
        "a.b": [1, 2],
    }
    with pytest.raises(RecipeError, match="each key once"):
        parse_tune(["a.b=1,2", "a.b=3,4"])
