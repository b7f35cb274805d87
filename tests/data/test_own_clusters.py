"""True clusters of a user's own users, named in the recipe, for methods that know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import comingle
from comingle.utils.errors import RecipeError
from comingle.utils.inputs import read_inputs
from comingle.utils.records import read_events

CLUSTERS = {"ada": "a", "ben": "a", "cem": "b"}
NUMBERS = {"ada": 0, "ben": 0, "cem": 1}
TEXTS = {n: [f"{n} counts {i}, then {i * 7 % 50} and {i % 5}." for i in range(60)] for n in CLUSTERS}


def samples(slope: float) -> Any:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(int(slope)))
    return torch.utils.data.TensorDataset(x, slope * x.sum(1, keepdim=True))


SAMPLES = {"ada": samples(1.0), "ben": samples(1.0), "cem": samples(-1.0)}


def run_nets(method: Any, clusters: Any = CLUSTERS, **how: Any) -> Any:
    data = {"loss": "mse", "clusters": clusters}
    recipe: dict[str, Any] = {"data": data, "training": {"rounds": 2, "batch_size": 8}}
    return comingle.run(recipe, users=SAMPLES, base=lambda: torch.nn.Linear(3, 1), method=method, **how)


def run_texts(method: Any, clusters: Any = CLUSTERS, **how: Any) -> Any:
    recipe: dict[str, Any] = {
        "base": "random:llama?layers=1&dim=32",
        "data": {"clusters": clusters},
        "training": {"rounds": 2, "local_steps": 1, "batch_size": 1, "context": 16},
    }
    return comingle.run(recipe, users=TEXTS, method=method, **how)


@pytest.mark.parametrize("run", [run_nets, run_texts])
def test_an_oracle_mixes_by_the_named_clusters(run: Any, tmp_path: Path) -> None:
    done = run({"name": "floral-optimal", "clusters": 2}, out=tmp_path / "run")
    last = [event for event in read_events(tmp_path / "run") if event["event"] == "evaluation"][-1]
    assert last["mixtures"] == {"ada": [1.0, 0.0], "ben": [1.0, 0.0], "cem": [0.0, 1.0]}
    assert last["clusters"] == NUMBERS
    assert {name: user.cluster for name, user in read_inputs(tmp_path / "run").users.items()} == NUMBERS
    assert done.recipe.data.clusters == CLUSTERS


def test_a_finished_run_opens_and_resumes_with_them(tmp_path: Path) -> None:
    method = {"name": "ensemble-optimal", "clusters": 2}
    done = run_nets(method, out=tmp_path / "run")
    again = run_nets(method, out=tmp_path / "run", resume=True)
    assert again.metrics["mean_test_loss"] == done.metrics["mean_test_loss"]
    with pytest.raises(comingle.ComingleError, match=r"data\.clusters\.cem .*'b' .*'a'"):
        run_nets(method, dict.fromkeys(CLUSTERS, "a"), out=tmp_path / "run", resume=True)


def test_labels_may_be_numbers_in_any_order() -> None:
    done = run_nets({"name": "floral-optimal", "clusters": 2}, {"cem": 7, "ada": 3, "ben": 3})
    assert [user.cluster for user in done.federation.clients.users] == [0, 0, 1]


@pytest.mark.parametrize("run", [run_nets, run_texts])
@pytest.mark.parametrize(
    ("clusters", "method", "said"),
    [
        (
            None,
            "floral-optimal",
            r"data\.clusters: {ada: ",
        ),
        ({"ada": "a"}, "floral-optimal", r"data\.clusters: .*ben, cem"),
        (
            {**CLUSTERS, "bem": "a"},
            "floral-optimal",
            r"'bem'.*ada, ben, cem\. Did you mean '",
        ),
        (CLUSTERS, {"name": "floral-optimal", "clusters": 1}, "clusters.* 1; allowed: .*2"),
        ([1, 2], "fedavg", r"data\.clusters: "),
    ],
)
def test_mistakes_are_one_line(run: Any, clusters: Any, method: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        run(method, clusters)
    assert "\n" not in str(caught.value)


def test_recipes_without_clusters_have_the_fingerprint_that_they_had() -> None:
    recipe = comingle.Recipe(data={"users": {"ada": "ada.txt"}})
    assert "clusters" not in recipe.result_content["data"]
