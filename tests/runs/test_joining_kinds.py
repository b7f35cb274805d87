"""Joining where users have conversations, or samples of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from comingle.models.personal import PersonalModel
from comingle.runs.api import load, run
from comingle.runs.join import join
from comingle.training.kinds.samples import PersonalNet
from comingle.utils.errors import DataError

ROWS = ["pretrained", "local", "shared", "joined"]
TRAINING = {"rounds": 3, "batch_size": 2, "context": 64, "experts": {"learning_rate": 0.01}}
CHATS = {
    "base": "random:llama?layers=1&dim=32",
    "adapters": {"rank": 2},
    "training": TRAINING,
    "runtime": {"dtype": "float64", "device": "cpu", "compile": False},
}
SGD = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "weight_decay": 0}
SAMPLES = {
    "training": {"rounds": 3, "batch_size": 8, "experts": SGD, "router": SGD},
    "evaluation": {"model": "exchanged"},
    "runtime": {"device": "cpu", "dtype": "float64"},
}
METHODS = [{"name": "floral", "clusters": 2}, {"name": "ifca", "models": 2}, "fedavg"]


def chats(name: str, count: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{name} asks {number}"},
                {"role": "assistant", "content": "yes" if number % 2 else "no"},
            ]
        }
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "method",
    [{"name": "comigs-1g1s", "router_every": 2, "router_steps": 1}, pytest.param("fedavg", marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
def test_somebody_with_conversations(method: Any, tmp_path: Path) -> None:
    users = {name: chats(name) for name in ("ann", "bob")}
    run(CHATS, users=users, method=method, out=tmp_path / "run")
    (tmp_path / "eve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats("eve")))
    joined = join(tmp_path / "run", name="eve", data=str(tmp_path / "eve.jsonl"), out=tmp_path / "eve")
    assert list(joined.rows) == ROWS
    unit = next(key for key in joined.rows["joined"] if key.startswith("train_"))
    assert joined.rows["joined"][unit] == joined.rows["local"][unit] > 0
    eve = cast(PersonalModel, load(tmp_path / "eve").user("eve"))
    assert isinstance(eve.generate([{"role": "user", "content": "eve asks 3"}], max_new_tokens=2), str)
    handed = join(tmp_path / "run", name="eve", data=chats("eve"))
    assert handed.rows == joined.rows
    with pytest.raises(DataError, match="allowed: conversations"):
        join(tmp_path / "run", name="eve", data=["only", "a", "text"])


def images(seed: int, count: int = 60, classes: tuple[int, ...] = (0, 1, 2)) -> tuple[Tensor, Tensor]:
    """A bright row says which class it is."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.rand(count, 1, 6, 6, generator=draw), torch.tensor(classes)[torch.arange(count) % len(classes)]
    x[torch.arange(count), 0, 2 * y] += 1
    return x, y


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.slow
def test_somebody_with_images(method: Any, tmp_path: Path) -> None:
    """Eve lacks the last class, which the net has all the same."""
    trained = run(SAMPLES, users={"ann": images(1), "bob": images(2)}, method=method, out=tmp_path / "run")
    in_hand = join(trained, name="eve", data=images(3, classes=(0, 1)), out=tmp_path / "eve")
    opened = join(tmp_path / "run", name="eve", data=images(3, classes=(0, 1)))
    assert in_hand.rows == opened.rows
    assert list(in_hand.rows) == ROWS
    assert "the net with its initial weights" in in_hand._repr_html_()
    assert in_hand.rows["joined"]["train_samples"] == in_hand.rows["local"]["train_samples"] == 3 * 48
    eve = cast(PersonalNet, load(tmp_path / "eve").user("eve"))
    assert eve.model(images(4)[0].double()).shape == (60, 3)
    assert load(tmp_path / "eve").metrics["users"]["eve"]["test_accuracy"] == in_hand.rows["joined"]["test_accuracy"]


def pictures(folder: Path, seed: int, *names: str) -> Path:
    from PIL import Image

    order = ("cat", "dog", "owl", "ape")
    draw = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(15):
            pixels = draw.integers(0, 120, (6, 6), dtype=np.uint8)
            pixels[order.index(name)] = 250
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("method", ["local", {"name": "floral", "clusters": 2}], ids=str)
def test_a_net_is_scored_on_its_own_test_data_without_an_argument(method: Any, tmp_path: Path) -> None:
    places = {name: str(pictures(tmp_path / name, i, "cat", "dog")) for i, name in enumerate(("ann", "bob"))}
    content = {**SAMPLES, "data": {"kind": "samples", "users": places, "grayscale": True}, "method": method}
    trained = run(content, out=tmp_path / "run")
    opened = load(tmp_path / "run")
    for name in ("ann", "bob"):
        scored = trained.metrics["users"][name]
        for score in (found.user(name).evaluate() for found in (trained, opened)):
            assert score.samples == scored["test_samples"] > 0
            assert (score.accuracy, score.mean_loss) == pytest.approx((scored["test_accuracy"], scored["test_loss"]))
    shutil.rmtree(tmp_path / "ann")
    with pytest.raises(DataError, match="ann"):
        load(tmp_path / "run").user("ann").evaluate()


@pytest.mark.slow
def test_classes_keep_their_numbers(tmp_path: Path) -> None:
    """A newcomer's folders are classes of the run by name: the dog is no cat because she has no cat."""
    places = {name: str(pictures(tmp_path / name, i, "cat", "dog", "owl")) for i, name in enumerate(("ann", "bob"))}
    content = {**SAMPLES, "method": "fedavg", "data": {"kind": "samples", "users": places, "grayscale": True}}
    content["training"] = {**SAMPLES["training"], "rounds": 6, "local_epochs": 10}
    run(content, out=tmp_path / "run")
    eve = pictures(tmp_path / "eve-pictures", 9, "dog", "owl")
    joined = join(tmp_path / "run", name="eve", data=str(eve), out=tmp_path / "eve", rounds=1)
    assert joined.rows["shared"]["test_accuracy"] == 1
    again = load(tmp_path / "eve")
    assert again.settings["labels"] == ["cat", "dog", "owl"]
    assert again.federation.clients.users[0].train.targets.unique().tolist() == [1, 2]
    pictures(tmp_path / "eve-pictures", 8, "ape")
    with pytest.raises(DataError, match=r"^user 'eve': .*'ape'; allowed: .*cat, dog, owl"):
        join(tmp_path / "run", name="eve", data=str(eve))


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of a program's own."""
    return 2 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_samples_that_do_not_fit(tmp_path: Path) -> None:
    trained = run(SAMPLES, users={"ann": images(1), "bob": images(2)}, method="fedavg", out=tmp_path / "run")
    x, y = images(3)
    for data, said in [
        ((x[..., :5], y), "input shape"),
        ((x, y + 1), "targets go from 1 to 3; allowed: 0 to 2"),
        ((x, y.double()), "loss"),
    ]:
        with pytest.raises(DataError, match=said) as raised:
            join(trained, name="eve", data=data)
        assert "\n" not in str(raised.value)
    own = run(SAMPLES, users={"ann": images(1), "bob": images(2)}, method="fedavg", loss=weighted)
    with pytest.raises(DataError, match="user 'eve': loss: got 'cross_entropy'; allowed: the run's, 'weighted'"):
        join(own, name="eve", data=images(3))
    joined = join(own, name="eve", data=images(3), loss=weighted)
    assert joined.rows["shared"]["test_loss"] > 0
