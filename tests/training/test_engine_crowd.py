"""Curves of many users are of how their numbers are spread; the run's own log keeps each one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comingle.config import parse_recipe
from comingle.runs import api
from comingle.training.events import MAX_SERIES, scalars, to_quantiles
from comingle.utils.records import read_events

PARTS = {"mean", "least", "p10", "median", "p90", "largest"}


def run(users: int, folder: Path) -> list[dict[str, Any]]:
    task = {"name": "mlp", "users": users, "clusters": 2}
    content = {"method": "fedavg", "data": {"task": task}, "training": {"rounds": 2, "batch_size": 40}}
    api.run(parse_recipe(content), out=folder)
    return list(read_events(folder))


def series(folder: Path) -> dict[str, list[float]]:
    """What TensorBoard's files hold, by name."""
    pytest.importorskip("tensorboard", reason="NO TENSORBOARD TEST: pip install 'comingle[reports]'")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[float]] = {}
    for file in (folder / "tensorboard").iterdir():
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(value.tensor.float_val[0])
    return found


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_up_to_a_hundred_users_have_curves_of_their_own_and_more_share_some(tmp_path: Path) -> None:
    run(MAX_SERIES, tmp_path / "few")
    assert sum(name.startswith("train_loss_nats/") for name in series(tmp_path / "few")) == MAX_SERIES
    events, many = run(MAX_SERIES + 1, tmp_path / "many"), series(tmp_path / "many")
    assert {name.removeprefix("train_loss_nats/") for name in many if "train_loss" in name} == PARTS
    assert len(many) < 20
    losses = [sorted(e["train_loss_nats"].values()) for e in events if e["event"] == "round"]
    assert [len(of_round) for of_round in losses] == [MAX_SERIES + 1] * 2
    for name, place in (("least", 0), ("median", MAX_SERIES // 2), ("largest", -1)):
        assert many[f"train_loss_nats/{name}"] == pytest.approx([of_round[place] for of_round in losses])
    assert many["train_loss_nats/mean"] == pytest.approx([sum(of_round) / len(of_round) for of_round in losses])


def test_experts_are_told_as_means_over_users() -> None:
    event = {
        "event": "evaluation",
        "mean_test_perplexity": 3.0,
        "users": {name: {"test_perplexity": p, "test_loss_nats": 1.0} for name, p in (("ann", 2.0), ("bob", 4.0))},
        "experts": {"ann": ["generalist", "specialist"], "bob": ["generalist", "specialist"]},
        "expert_scores": {"ann": [[0.25, 0.75], [0.5, 0.5]], "bob": [[0.75, 0.25], [1.0, 0.0]]},
    }
    found = scalars(to_quantiles(event))
    assert found["expert_score/mean/generalist"] == 0.625
    assert found["test_perplexity/largest"] == 4.0
    assert not any(name in key for key in found for name in ("ann", "bob"))
    event["experts"]["bob"] = ["generalist", "specialist 1"]  # type: ignore[index]
    assert not any(name.startswith("expert_score") for name in scalars(to_quantiles(event)))


def test_a_round_of_nobody_and_other_events_stay_as_they_are() -> None:
    for event in ({"event": "round", "train_loss_nats": {}, "seconds": 0.0}, {"event": "privacy", "epsilon": 1.0}):
        assert to_quantiles(event) == event
