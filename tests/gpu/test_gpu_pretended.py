"""The pretended GPU refuses what a GPU refuses; and a method of each kind runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import method, net_recipe, text_recipe
from on_device import apart, play, recipe_of
from pretend import Pretended, pretending


def test_tensors_of_two_devices_are_refused() -> None:
    with pretending():
        there = torch.zeros(3, 4, device="cuda")
        assert isinstance(there, Pretended)
        assert str((there + 1.0).device) == "cuda:0"
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3, 4)
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros(3)[torch.tensor([0, 1], device="cuda")]
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        there[torch.tensor([0, 2])] += 1.0
        there[1] = torch.full((4,), 2.0)
        assert there.cpu().sum(1).tolist() == [4.0, 8.0, 4.0]


def test_gradients_come_from_there() -> None:
    with pretending():
        weight = torch.ones(2, 2).to("cuda").requires_grad_()
        (torch.eye(2, device="cuda") @ weight).cpu().sum().backward()
        assert isinstance(weight.grad, Pretended)
        assert weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("kind", ["text", "net"])
def test_a_method_of_each_kind(tmp_path: Path, kind: str) -> None:
    content = text_recipe(tmp_path, method("comigs-1g1s")) if kind == "text" else net_recipe(method("fedavg"))
    short = {"training.rounds": 1, "evaluation.first": False}
    here = play(recipe_of(content, "cpu", **short))
    with pretending():
        there = play(recipe_of(content, "cuda", **short))
    assert apart(here, there) <= 1e-4
