"""Batches that are drawn and copied ahead are those that would have been drawn, and are there when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cases import method, net_recipe, text_recipe
from on_device import apart, play, recipe_of
from pretend import pretending
from torch import Tensor

from comingle.methods.base import Phase
from comingle.training.batch_sources import BatchSource, Prefetcher

EXPERTS, ROUTER = Phase(roles=frozenset({"a"})), Phase(roles=frozenset({"router"}), optimizer="router", steps=2)


@BatchSource.register
class Numbers:
    """A batch is what it was asked with."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def steps(self, trainer: int) -> int:
        return 3 + trainer

    def draw(self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int) -> Tensor:
        self.asked.append((tuple(trainers), phase, round_number, step, repeat))
        return torch.tensor([[t, phase.steps, round_number, step, repeat] for t in trainers])


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "pretended"])
def ahead(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU here")
        yield Prefetcher(cast(BatchSource, Numbers()), torch.device("cuda"))
        return
    if torch.cuda.is_available():
        pytest.skip("a real GPU is here")
    with pretending():
        yield Prefetcher(cast(BatchSource, Numbers()), torch.device("cuda"))


def taken(ahead: Prefetcher, *place: Any) -> list[list[int]]:
    """What a step reads on the device."""
    drawn = ahead.draw(*place)
    there = ahead.move(drawn, ahead.device)
    assert there.device.type == "cuda"
    found = there.tolist()
    assert found == drawn.tolist()
    ahead.prefetch()
    return found


def test_the_next_batch_is_there_before_it_is_asked_for(ahead: Any) -> None:
    for step in range(4):
        for phase in (EXPERTS, ROUTER):
            for repeat in range(phase.steps):
                found = taken(ahead, [1], phase, 7, step, repeat)
                assert found == [[1, phase.steps, 7, step, repeat]]
    # Each once, none after the last step, and all but the first of each phase early.
    assert len(ahead.batch_source.asked) == len(set(ahead.batch_source.asked)) == 4 * 3
    assert not ahead.ready


def test_a_wrong_guess_is_another_batch_than_was_asked_for(ahead: Any) -> None:
    taken(ahead, [0, 1], EXPERTS, 0, 0, 0)
    assert ahead.ready[EXPERTS].arguments == ((0, 1), EXPERTS, 0, 1, 0)
    assert taken(ahead, [1, 0], EXPERTS, 0, 1, 0) == [[1, 1, 0, 1, 0], [0, 1, 0, 1, 0]]
    assert taken(ahead, [0, 1], EXPERTS, 1, 0, 0) == [[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]]


def test_who_has_no_step_left_is_left_out(ahead: Any) -> None:
    taken(ahead, [0, 2], EXPERTS, 0, 2, 0)
    assert ahead.ready[EXPERTS].arguments == ((2,), EXPERTS, 0, 3, 0)


def test_a_part_of_a_batch_is_copied_by_itself(ahead: Any) -> None:
    taken(ahead, [0, 1], EXPERTS, 0, 0, 0)
    drawn = ahead.draw([0, 1], EXPERTS, 0, 1, 0)
    assert ahead.move(drawn[1:], ahead.device).tolist() == [[1, 1, 0, 1, 0]]


def test_before_the_first_step_nothing_is_guessed(ahead: Any) -> None:
    taken(ahead, [0], EXPERTS, 0, -1, 0)
    assert not ahead.ready


def test_nobody_reads_before_the_copy_is_done() -> None:
    """That the pretended device would notice: its copy happens when the stream is waited for."""
    with pretending():
        made = Prefetcher(cast(BatchSource, Numbers()), torch.device("cuda"))
        taken(made, [0], EXPERTS, 0, 0, 0)
        early = made.ready[EXPERTS]
        assert early.on_device is not None
        assert early.on_device.tolist() != early.drawn.tolist()
        made.draw([0], EXPERTS, 0, 1, 0)
        assert made.move(early.drawn, made.device).tolist() == early.drawn.tolist()


@pytest.mark.parametrize("kind", ["text", "net"])
def test_a_run_takes_batches_from_there(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = text_recipe(tmp_path, method("comigs-1g1s")) if kind == "text" else net_recipe(method("fedavg"))
    short, found = {"training.rounds": 1, "evaluation.first": False}, []
    move = Prefetcher.move
    monkeypatch.setattr(
        Prefetcher, "move", lambda self, *args: found.append(self.current.on_device is None) or move(self, *args)
    )
    here = play(recipe_of(content, "cpu", **short))
    assert not found
    if torch.cuda.is_available():
        there = play(recipe_of(content, "cuda", **short))
    else:
        with pretending():
            there = play(recipe_of(content, "cuda", **short))
    assert False in found
    assert apart(here, there) <= (1e-2 if torch.cuda.is_available() else 1e-4)
