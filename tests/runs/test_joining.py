"""Joining a federation that is over: what is taken stands still, what is the newcomer's own is trained."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from comingle.methods.base import joint
from comingle.methods.fedmerge import MERGING_WEIGHTS, server_models_in
from comingle.methods.server import model_of
from comingle.models.personal import PersonalModel
from comingle.runs.api import load, run
from comingle.runs.join import join
from comingle.runs.results import Run
from comingle.utils.errors import ComingleError, DataError, RecipeError, RunError
from comingle.utils.files import locked
from comingle.utils.trees import restrict

SETTINGS = {
    "base": "random:llama",
    "adapters": {"rank": 2},
    "training": {"rounds": 3, "local_steps": 2, "batch_size": 2, "context": 16, "experts": {"learning_rate": 0.01}},
    "runtime": {"dtype": "float64", "device": "cpu", "compile": False},
}
WORDS = {"animals": ["dog", "eel", "cat", "asp"], "numbers": ["1492", "77", "3,5", "1e9"]}
ALONE = {"router_every": 2, "router_steps": 1}


def texts(seed: int, words: str = "animals", documents: int = 30) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS[words]) for _ in range(40)) for _ in range(documents)]


USERS = {"ann": texts(1), "bob": texts(2), "cem": texts(3, "numbers"), "dan": texts(4, "numbers")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A finished run of a method, in a folder, once for all tests."""
    runs: dict[str, Run] = {}

    def make(method: Any, **changes: Any) -> Run:
        key = repr((method, changes))
        if key not in runs:
            folder = tmp_path_factory.mktemp("federation") / "run"
            runs[key] = run(SETTINGS, users=USERS, method=method, out=folder, **changes)
        return runs[key]

    return make


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "comigs-1g1s", **ALONE},
        "floral",
        "fedlora",
        "stacking",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fedsa-lora", "pfedmoe", "fdlora", "fedavg-moe", "feddpa")
        ),
    ],
)
@pytest.mark.sampled(1)
def test_what_is_taken_stands_still(trained: Callable[..., Run], method: Any, tmp_path: Path) -> None:
    federation = trained(method)
    assert federation.folder is not None
    before = content(federation.folder)
    joined = join(federation.folder, name="eve", data=texts(9), out=tmp_path / "eve")
    assert content(federation.folder) == before
    clients = joined.run.federation.clients
    views = restrict(clients.model.layout.views(clients.state.rows[:1]), clients.model.layout, clients.method.shared)
    taken = model_of({n: t for n, t in federation.federation.server.kept.items() if not n.endswith(".velocity")})
    assert views.keys() == taken.keys()
    for name, t in views.items():
        assert torch.equal(t[0], taken[name]), name
    assert bool(clients.state.first[-1].any())  # something else has moved
    for name, t in restrict(
        clients.model.layout.views(clients.state.first[:1]), clients.model.layout, clients.method.shared
    ).items():
        assert not t.any(), name


@pytest.mark.parametrize(
    "method", [{"name": "comigs-1g1s", **ALONE}, "floral", "fedmerge", "ifca", "fedavg", "fedavg+", "flexlora"]
)
@pytest.mark.sampled(1)
def test_the_folder_is_a_run_of_one_user(trained: Callable[..., Run], method: Any, tmp_path: Path) -> None:
    data = tmp_path / "eve.txt"
    data.write_text("\n\n".join(texts(9)))
    joined = join(trained(method), name="eve", data=str(data), out=tmp_path / "eve")
    rows = joined.rows
    assert list(rows) == ["pretrained", "local", "shared", "joined"]
    assert rows["local"]["train_tokens"] == rows["joined"]["train_tokens"] > 0
    assert rows["pretrained"]["train_tokens"] == rows["shared"]["train_tokens"] == 0
    opened = load(tmp_path / "eve")
    assert opened.users == ["eve"]
    assert opened.metrics["users"]["eve"]["test_perplexity"] == rows["joined"]["test_perplexity"]
    assert torch.equal(opened.federation.clients.state.rows, joined.run.federation.clients.state.rows)
    assert isinstance(cast(PersonalModel, opened.user("eve")).generate("dog", max_new_tokens=2), str)
    alone = run(
        joined.run.recipe, method="local", **{"training.rounds": 3 + (method == "fedavg+"), "evaluation.first": False}
    )
    assert alone.metrics["users"]["eve"]["test_perplexity"] == rows["local"]["test_perplexity"]


def test_merging_weights_move_by_equation_6(trained: Callable[..., Run]) -> None:
    sgd = {"name": "sgd", "schedule": "constant", "weight_decay": 0.0}
    changes: dict[str, Any] = {"training.experts": sgd, "evaluation.model": "exchanged", "training.local_steps": 1}
    federation = trained("fedmerge", **changes)
    joined = join(federation, name="eve", data=texts(9), rounds=1)
    server, clients = joined.run.federation.server, joined.run.federation.clients
    soup = server_models_in(federation.federation.server.kept)
    for name, t in server_models_in(server.kept).items():
        assert torch.equal(t, soup[name]), name
    # The gradient of the loss of sum_j softmax(a)_j Theta_j on eve's one batch, with respect to a.
    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    merged = {name: torch.tensordot(logits.softmax(0), t, dims=1).unsqueeze(0) for name, t in soup.items()}
    (phase,) = joint(routed=False)
    drawn = clients.batch_source.draw([0], phase, 0, 0, 0)
    losses, _ = clients.model.losses(merged, [0], clients.batch_source.read("train", [0], drawn), train=True)
    (gradient,) = torch.autograd.grad(losses.mean(), logits)
    moved = server.kept[MERGING_WEIGHTS][0]
    torch.testing.assert_close(moved / moved.abs().max(), -gradient / gradient.abs().max())
    assert 0.5 < float(moved.abs().max()) < 1  # weight_step is 0.5


@pytest.mark.parametrize("words", ["animals", "numbers"])
@pytest.mark.slow
def test_the_best_cluster_is_chosen(trained: Callable[..., Run], words: str) -> None:
    federation = trained({"name": "ifca", "models": 3}, **{"training.rounds": 6})
    joined = join(federation, name="eve", data=texts(9, words), rounds=1)
    clients = joined.run.federation.clients
    layout, losses = clients.model.layout, []
    for number in range(3):
        rows = torch.cat([t[number].flatten() for t in server_models_in(federation.federation.server.kept).values()])
        tensors = layout.views(rows.unsqueeze(0))
        stream = clients.users[0].train
        windows = stream[: len(stream) // 17 * 17].view(1, -1, 17).long()
        losses.append(float(clients.model.losses(tensors, [0], windows, train=False)[0].mean()))
    assert int(clients.state.kept["choice"]) == min(range(3), key=losses.__getitem__)
    assert len(set(losses)) == 3


def test_a_step_more_trains_what_was_taken_too(trained: Callable[..., Run]) -> None:
    joined = join(trained("floral"), name="eve", data=texts(9), local_step=True)
    assert joined.rows["joined"]["train_tokens"] == joined.rows["local"]["train_tokens"] == 4 * 2 * 2 * 16
    clients = joined.run.federation.clients
    taken = model_of(trained("floral").federation.server.kept)
    views = clients.model.layout.views(clients.state.rows)
    assert all(not torch.equal(views[name][0], t) for name, t in taken.items())


@pytest.mark.parametrize(
    ("method", "options", "error", "said"),
    [
        ("fedavg", {"name": "bob"}, DataError, "--name: got 'bob'"),
        ("fedavg", {"name": " "}, DataError, "a user's name is empty"),
        ("fedavg", {"data": ["dog"]}, DataError, "'eve'"),
        ("fedavg", {"data": [{"messages": []}]}, DataError, "allowed: text"),
        ("fedavg", {"local_step": True}, RecipeError, "leave --local-step out"),
        ("fedavg", {"data": "nowhere/to/be/found"}, DataError, "nowhere"),
        ("local", {}, RunError, "shares nothing"),
        ("pretrained", {}, RunError, "shares nothing"),
        ("centralized", {}, RunError, "centralized trains one model"),
        ({"name": "pcl", "exchange_from": 1}, {}, RunError, "pcl"),
    ],
)
def test_what_cannot_be_is_one_line(
    trained: Callable[..., Run],
    method: Any,
    options: dict[str, Any],
    error: type[ComingleError],
    said: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error) as raised:
        join(trained(method), **{"name": "eve", "data": texts(9), "out": tmp_path / "eve", **options})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_exchanged_nothing_has_nothing(trained: Callable[..., Run]) -> None:
    with pytest.raises(RunError, match="has not aggregated anything"):
        join(trained("fedavg", **{"training.rounds": 1}), name="eve", data=texts(9))


def test_a_folder_is_kept_unless_it_may_be_replaced(trained: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "eve"
    join(trained("fedavg"), name="eve", data=texts(9), out=folder, rounds=1)
    before = content(folder)
    with pytest.raises(RunError, match=r"exists; --force replaces it, --out names another$"):
        join(trained("fedavg"), name="eve", data=texts(8), out=folder, rounds=1)
    assert content(folder) == before
    join(trained("fedavg"), name="eve", data=texts(8), out=folder, rounds=1, force=True)
    assert content(folder)["metrics.json"] != before["metrics.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["eve"]


def test_the_run_that_is_joined_is_only_read(trained: Callable[..., Run], tmp_path: Path) -> None:
    there = trained("fedavg").folder
    assert there is not None
    folder = Path(shutil.copytree(there, tmp_path / "friends" / "run"))
    run, before = load(folder), content(folder)
    for out, why in ((folder, "overlaps"), (tmp_path / "friends", "contains 'run'")):
        with pytest.raises(RunError, match=f"^{re.escape(str(out))}: .*{why}.*--out$"):
            join(run, name="eve", data=texts(9), out=out, rounds=1, force=True)
    assert content(folder) == before


def test_nobody_else_joins_into_the_same_folder_meanwhile(trained: Callable[..., Run], tmp_path: Path) -> None:
    with locked(tmp_path / ".eve.joining"), pytest.raises(RunError, match=r"\.eve\.joining: in use by process \d+"):
        join(trained("fedavg"), name="eve", data=texts(9), out=tmp_path / "eve", rounds=1)
    assert [path.name for path in tmp_path.iterdir()] == [".eve.joining"]


def test_one_users_own_run_has_no_server_to_join(trained: Callable[..., Run], tmp_path: Path) -> None:
    join(trained("fedavg"), name="eve", data=texts(9), out=tmp_path / "eve", rounds=1)
    with pytest.raises(RunError, match=r"eve: .*server.*`comingle run`"):
        join(load(tmp_path / "eve"), name="fay", data=texts(8), rounds=1)


@pytest.mark.parametrize("temperatures", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_of_models_trained_apart_the_shared_one_is_told_alone(
    temperatures: bool, trained: Callable[..., Run], tmp_path: Path
) -> None:
    """It is FedAvg's, in the score too, and not half of a mixture with an own model that has learnt nothing."""
    told, stacking = {}, {"name": "stacking", "temperatures": True} if temperatures else "stacking"
    for name, method in (("stacking", stacking), ("fedavg", "fedavg")):
        folder = trained(method).folder
        assert folder is not None
        told[name] = join(folder, name="eve", data=texts(9), out=tmp_path / name).rows
    assert told["stacking"]["shared"] == pytest.approx(told["fedavg"]["shared"], rel=1e-6)
    assert told["stacking"]["shared"]["test_perplexity"] != pytest.approx(
        told["stacking"]["pretrained"]["test_perplexity"]
    )
