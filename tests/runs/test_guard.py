"""``evaluation.guard``: every user is served the best of its personal, local and shared model."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.commands import comingle as comingle

from comingle.methods import REGISTRY, make
from comingle.models.generation import encode_prompt, read_sampling
from comingle.models.personal import PersonalModel
from comingle.runs import api
from comingle.runs.folders import LEFT
from comingle.runs.guard import LOCAL
from comingle.runs.leaving import plan_removal, remove_user
from comingle.runs.results import Run
from comingle.serving.engine import Engine, Request
from comingle.utils.errors import RecipeError
from comingle.utils.records import read_metrics

OPTIONS: dict[str, Any] = {
    "base": "random:llama?layers=1&dim=32",
    "method": "fedavg",
    "training": {"rounds": 3, "local_steps": 2, "batch_size": 2, "context": 16},
    "evaluation": {"first": False, "guard": "local"},
    "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
}
USERS = ("ada", "ben", "cem")
MADE = {name: make(name) for name in REGISTRY}
SHARING = [
    name
    for name, method in MADE.items()
    if "language" in method.applies_to and method.shared and not method.needs_clusters
]
"""Methods on text whose users share tensors, with their default settings."""
NETS = ["fedavg", "ifca", "fedper", "floral", "fedem", "pfedmoe"]


def texts(*names: str) -> dict[str, list[str]]:
    return {name: [f"{name} counts {number} of {number}." for number in range(60)] for name in names}


def run(users: Any = None, **changes: Any) -> Run:
    return api.run(OPTIONS, users=texts(*USERS) if users is None else users, **changes)


def local_tensors(finished: Run, name: str) -> torch.Tensor:
    assert finished.local is not None
    clients = finished.local.clients
    return clients.state.rows[list(clients.names).index(name) :: len(clients.names)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", SHARING)
def test_local_models_do_not_depend_on_other_users(method: str) -> None:
    first = run(texts("ada", "ben"), method=method)
    second = run(texts("cem", "ada"), method=method)
    torch.testing.assert_close(local_tensors(first, "ada"), local_tensors(second, "ada"), rtol=1e-4, atol=1e-5)
    for name, entry in first.metrics["served"].items():
        losses = {candidate: each["valid_loss"] for candidate, each in entry["candidates"].items()}
        assert losses["personal"] > losses[entry["model"]] or entry["model"] == "personal", (name, losses)
        assert min(losses.values()) == losses[entry["model"]]


@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "ditto", "fedper", "stacking", "fedavg+"])
def test_a_local_model_is_that_of_a_run_with_one_user(method: str) -> None:
    """Of the same method: a mean over one user changes nothing."""
    together, alone = run(method=method), run(texts("ada"), method=method)
    assert torch.equal(local_tensors(together, "ada"), alone.federation.clients.state.rows)


@pytest.mark.parametrize("method", ["scaffold", "fedmerge", "ifca"])
def test_without_other_users_there_is_nothing_to_correct_or_to_choose(method: str) -> None:
    """The local models are those of methods that average the same tensors."""
    plain = "fedavg" if method == "scaffold" else "fedit"
    torch.testing.assert_close(local_tensors(run(method=method), "ada"), local_tensors(run(method=plain), "ada"))


def test_the_copies_of_a_user_are_fused_alone_too() -> None:
    """They are equal before, as both are trained on the same batches; fused, they are a multiple of each other."""
    tensors = local_tensors(run(method="fdlora"), "ada")
    is_trained = tensors[0] != 0
    factors = (tensors[1] / tensors[0])[is_trained]
    torch.testing.assert_close(factors, factors[:1].expand_as(factors), rtol=1e-4, atol=1e-6)
    assert abs(float(factors[0]) - 1) > 1e-4


def test_users_train_alone_in_the_rounds_in_which_they_take_part() -> None:
    finished = run(**{"training.participation": [["ada", "ben"], ["ben"], ["ben"]]})
    assert finished.local is not None
    for federation in (finished.federation, finished.local):
        assert federation.clients.state.iterations.tolist() == [2, 6, 0]


def test_without_a_guard_nothing_changes(tmp_path: Path) -> None:
    guarded = run(out=tmp_path / "guarded")
    plain = run(out=tmp_path / "plain", **{"evaluation.guard": None})
    assert torch.equal(guarded.federation.clients.state.rows, plain.federation.clients.state.rows)
    assert guarded.metrics["users"] == plain.metrics["users"]
    events = [event["event"] for event in guarded.events]
    assert [event for event in events if event != "served"] == [event["event"] for event in plain.events]
    assert events.count("served") == 1
    assert "served" not in plain.metrics
    assert plain.local is None
    assert not (tmp_path / "plain" / LOCAL).exists()
    assert plain.recipe.fingerprint == api.load(tmp_path / "plain").recipe.fingerprint
    assert "guard" not in plain.recipe.result_content["evaluation"]


def sentences(words: str, count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(words.split()) for _ in range(8)) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two users with little text of one kind, and one with much text of another kind, which averaging harms."""
    users = {name: sentences("alpha beta gamma delta", 25, seed) for seed, name in enumerate(("ada", "ben", "eve"))}
    users["cem"] = sentences("one two three four", 200, 9)
    training = {"rounds": 8, "local_steps": 8, "batch_size": 4, "context": 16, "experts": {"learning_rate": 0.1}}
    return run(users, training=training, out=tmp_path_factory.mktemp("harmed") / "run")


def test_who_is_harmed_by_averaging_is_served_the_local_model(harmed: Run) -> None:
    served, users = harmed.metrics["served"], harmed.metrics["users"]
    assert served["ada"]["model"] == "personal"
    assert served["cem"]["model"] == "local"
    losses = {name: each["valid_loss"] for name, each in served["cem"]["candidates"].items()}
    assert losses["local"] < losses["personal"]
    low, high = served["cem"]["candidates"]["local"]["interval"]
    assert low < served["cem"]["candidates"]["local"]["difference"] < high < 0
    assert served["cem"]["candidates"]["local"]["difference"] == pytest.approx(losses["local"] - losses["personal"])
    assert served["cem"]["test_loss_nats"] < users["cem"]["test_loss_nats"]
    assert served["ada"]["test_loss_nats"] == users["ada"]["test_loss_nats"]
    alone = harmed.local
    assert alone is not None
    number = harmed.users.index("cem")
    (score,) = alone.clients.scorer.score(alone.clients.models, [alone.clients.users[number].test], [number])
    assert served["cem"]["test_loss_nats"] == pytest.approx(score.mean_loss)


def test_the_recorded_losses_are_those_of_validation(harmed: Run) -> None:
    for candidate, federation in (("personal", harmed.federation), ("local", harmed.local)):
        assert federation is not None
        for name, loss in federation.clients.validate().items():
            recorded = harmed.metrics["served"][name]["candidates"][candidate]["valid_loss"]
            assert recorded == pytest.approx(loss, rel=1e-9)


def test_a_program_gets_the_served_models(harmed: Run) -> None:
    """Also after the run was opened again."""
    assert harmed.folder is not None
    for each in (harmed, api.load(harmed.folder)):
        tensors = torch.cat([t.flatten() for t in each.user("cem").tensors.values()])
        assert torch.equal(tensors, local_tensors(harmed, "cem").flatten())
        assert each.user("cem").model_info.scores["test_loss_nats"] == harmed.metrics["served"]["cem"]["test_loss_nats"]
        personal = harmed.federation.clients.state.rows[harmed.users.index("ada")]
        assert torch.equal(torch.cat([t.flatten() for t in each.user("ada").tensors.values()]), personal)


def test_a_user_may_be_served_the_shared_model(tmp_path: Path) -> None:
    """With little text, on which its own steps overfit."""
    users = {"ada": sentences("alpha beta", 8, 1)}
    users |= {name: sentences("alpha beta", 400, seed) for seed, name in enumerate(("ben", "cem"), start=2)}
    training = {"rounds": 6, "local_steps": 12, "batch_size": 4, "context": 16, "experts": {"learning_rate": 0.1}}
    finished = run(users, training=training, out=tmp_path / "run")
    served = finished.metrics["served"]
    losses = served["ada"]["candidates"]
    assert served["ada"]["model"] == "shared", losses
    version = finished.federation.server.model
    for each in (finished, api.load(tmp_path / "run")):
        for name, tensor in each.user("ada").tensors.items():
            assert torch.equal(tensor[0], version[name])
    for name, loss in finished.federation.clients.validate().items():  # the state is as before
        assert served[name]["candidates"]["personal"]["valid_loss"] == pytest.approx(loss, rel=1e-9)


def test_without_validation_data_users_keep_their_personal_models() -> None:
    served = run(**{"data.split.valid": 0}).metrics["served"]
    assert [(entry["model"], entry["candidates"]) for entry in served.values()] == [("personal", {})] * len(USERS)


@pytest.mark.parametrize("method", NETS)
def test_nets_have_a_guard(method: str) -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    users = {"ada": (inputs, (inputs[:, 0] > 0).long()), "ben": (inputs, (inputs[:, 1] > 0).long())}
    options = {key: value for key, value in OPTIONS.items() if key in ("evaluation", "runtime")}
    finished = api.run(options, users=users, method=method, **{"training.rounds": 2, "training.batch_size": 8})
    for name, loss in finished.federation.clients.validate().items():
        recorded = finished.metrics["served"][name]["candidates"]["personal"]["valid_loss"]
        assert recorded == pytest.approx(loss, rel=1e-5)


KILLED = """
import os, signal, sys
from tests.runs.test_guard import run
def kill(event):
    if event.get("alone") and event["round"] == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
run(out=sys.argv[1], observers=[kill], **{"checkpoints.every": 1})
"""


@pytest.mark.slow
@pytest.mark.parametrize("round_number", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_killed_run_is_resumed(tmp_path: Path, round_number: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(round_number)]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (tmp_path / "killed" / "metrics.json").exists()
    trained: list[int] = []

    def record(event: Any) -> None:
        if event.get("alone"):
            trained.append(event["round"])

    resumed = run(out=tmp_path / "killed", resume=True, observers=[record], **{"checkpoints.every": 1})
    assert min(trained) == round_number
    whole = run(out=tmp_path / "whole" / "killed")
    assert resumed.metrics["served"] == whole.metrics["served"]
    for name in USERS:
        assert torch.equal(local_tensors(resumed, name), local_tensors(whole, name))
    assert read_metrics(tmp_path / "killed")["served"] == whole.metrics["served"]


@pytest.mark.parametrize("method", ["local", "pretrained", "centralized"])
def test_methods_without_personal_and_shared_tensors_have_no_guard(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert "served" not in run(method=method).metrics
    assert "evaluation.guard" in caplog.text


def test_users_on_disk_have_no_guard(tmp_path: Path) -> None:
    for name, lines in texts(*USERS).items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lines))
    data = {"kind": "text", "users": {name: {"path": str(tmp_path / f"{name}.txt")} for name in USERS}}
    with pytest.raises(RecipeError, match=r"evaluation\.guard.*runtime\.store"):
        api.run({**OPTIONS, "data": data}, out=tmp_path / "run", **{"runtime.store": "disk"})


def test_show_and_report_say_who_is_served_what(harmed: Run, comingle: Any, tmp_path: Path) -> None:
    assert harmed.folder is not None
    shown = " ".join(comingle("show", harmed.folder).out.split())
    entry = harmed.metrics["served"]["cem"]
    assert "served personal since run: ada, ben, eve" in shown
    losses = [entry["candidates"][name]["valid_loss"] for name in ("local", "personal")]
    wanted = f"served local since run: cem; validation loss {losses[0]:.3f} (personal {losses[1]:.3f}, difference "
    assert wanted in shown
    assert f"test perplexity {entry['test_perplexity']:.2f}" in shown
    comingle("report", harmed.folder, "--out", tmp_path / "page.html")
    assert wanted in (tmp_path / "page.html").read_text()


def test_local_models_continue(tmp_path: Path) -> None:
    """As the models of runs with one user do; and a newcomer's begins with initial values."""
    months: dict[str, Run] = {}
    for month, names in (("may", ("ada", "ben")), ("june", USERS)):
        later = {"continue_from": str(tmp_path / "may")} if month == "june" else {}
        months[month] = run(texts(*names), out=tmp_path / month, **later)
    first = run(texts("ada"), out=tmp_path / "alone", **{"evaluation.guard": None})
    assert first.folder is not None
    alone = run(texts("ada"), continue_from=str(first.folder), **{"evaluation.guard": None})
    assert torch.equal(local_tensors(months["june"], "ada"), alone.federation.clients.state.rows)
    newcomer = run(texts("cem"), **{"evaluation.guard": None})
    assert torch.equal(local_tensors(months["june"], "cem"), newcomer.federation.clients.state.rows)
    served = {month: finished.metrics["served"] for month, finished in months.items()}
    for name, entry in served["june"].items():
        stays = name in served["may"] and served["may"][name]["model"] == entry["model"]
        assert entry["since"] == ("may" if stays else "june")
    assert {entry["since"] for entry in served["june"].values()} == {"may", "june"}


def test_local_models_begin_anew_after_a_run_without_a_guard(tmp_path: Path) -> None:
    run(out=tmp_path / "may", **{"evaluation.guard": None})
    continued = run(out=tmp_path / "june", continue_from=str(tmp_path / "may"))
    assert torch.equal(local_tensors(continued, "ada"), local_tensors(run(), "ada"))
    assert {entry["since"] for entry in continued.metrics["served"].values()} == {"june"}


@pytest.mark.parametrize("mode", ["exact", "forward"])
def test_a_user_who_leaves_takes_its_local_model_along(mode: Any, tmp_path: Path) -> None:
    for name, lines in texts(*USERS).items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lines))
    recipe = {**OPTIONS, "data": {"users": {name: str(tmp_path / f"{name}.txt") for name in USERS}}}
    before = api.run(recipe, out=tmp_path / "run")
    certificate = remove_user(plan_removal(tmp_path / "run", "ben", mode))
    assert any(path.startswith(f"{LOCAL}/checkpoints/") for path in certificate["deleted"])
    after = api.load(tmp_path / "run")
    assert list(after.metrics["served"]) == ["ada", "cem"]
    for name in ("ada", "cem"):
        assert torch.equal(local_tensors(after, name), local_tensors(before, name))
        assert after.user(name).generate("counts", max_new_tokens=3)
    for path in (tmp_path / "run").rglob("*.json*"):
        assert path.name == LEFT or "ben" not in path.read_text(), path
    continued = api.run(
        {**recipe, "data": {"users": {"ada": str(tmp_path / "ada.txt")}}},
        out=tmp_path / "later",
        continue_from=str(tmp_path / "run"),
    )
    assert continued.metrics["served"]["ada"]["candidates"]


def test_one_batch_has_models_of_both_kinds(harmed: Run) -> None:
    """Answers of the engine are those of each user's model alone."""
    models = {name: cast(PersonalModel, harmed.user(name)) for name in ("ada", "cem")}
    engine, answers = Engine(models, rows=4), dict[str, str]()
    for name in models:

        def add(piece: Any, name: str = name) -> None:
            answers[name] = answers.get(name, "") + piece.text

        prompt = encode_prompt(engine.tokenizer, "one alpha")
        sampling = read_sampling(max_new_tokens=8)
        engine.submit(Request(name=name, prompt=prompt, sampling=sampling, on_piece=add, continues=True))
    engine.step()
    assert len(engine.active) == 2
    while engine.busy:
        engine.step()
    assert answers == {name: model.generate("one alpha", max_new_tokens=8) for name, model in models.items()}
    assert answers["ada"] != answers["cem"]
