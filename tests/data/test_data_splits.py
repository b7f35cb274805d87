from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.data.samples.samples import Samples, UserSamples, hold_out, warn_unseen
from comingle.utils.errors import DataError
from comingle.utils.seeds import generator
from comingle_papers.tasks.images import check_labels, hold_out_valid


def draw_labels(seed: int) -> Tensor:
    """Skewed: some labels are frequent, some have a sample or two, some have none."""
    source = generator("labels", seed)
    shares = torch.rand(12, generator=source).pow(6) + 1e-9
    return shares.multinomial(5 + 40 * seed, replacement=True, generator=source)


@pytest.mark.parametrize("share", [1 / 6, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("seed", range(8))
def test_about_the_share_of_each_label_is_held_out_and_never_the_last(seed: int, share: float) -> None:
    labels = draw_labels(seed)
    kept, held = hold_out(labels, share)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(labels)))
    assert kept.tolist() == sorted(kept.tolist())
    assert held.tolist() == sorted(held.tolist())
    least = most = 0
    for label in labels.unique():
        places = (labels == label).nonzero().flatten()
        out = int((labels[held] == label).sum())
        assert out <= len(places) - 1
        assert abs(out - share * len(places)) <= 1 or out == len(places) - 1
        assert torch.equal(held[labels[held] == label], places[:out])  # the first, whichever they are
        least += min(len(places) - 1, int(share * len(places)))
        most += min(len(places) - 1, int(share * len(places)) + 1)
    # The share of all samples, as far as labels can give their part.
    assert len(held) == min(max(round(share * len(labels)), least, 1), most)


@pytest.mark.parametrize(
    ("labels", "share", "expected"),
    [
        ([0] * 12, 1 / 6, [0, 1]),
        ([0, 1] * 6, 1 / 6, [0, 1]),  # one of each
        ([0] * 5 + [1], 1 / 6, [0]),
        ([3, 3], 0.1, [0]),  # at least one
        ([4, 2, 0], 0.5, []),  # none can be spared
        ([1] * 4 + [2] * 2, 0.0, []),
        ([1, 1, 1, 2, 2, 2, 2], 0.99, [0, 1, 3, 4, 5]),
        ([], 0.5, []),
    ],
)
def test_examples_by_hand(labels: list[int], share: float, expected: list[int]) -> None:
    kept, held = hold_out(torch.tensor(labels, dtype=torch.int64), share)
    assert held.tolist() == expected
    assert kept.tolist() == [place for place in range(len(labels)) if place not in expected]


def numbered(targets: Any) -> Samples:
    targets = targets if isinstance(targets, Tensor) else torch.tensor(targets, dtype=torch.int64)
    return Samples(inputs=torch.arange(len(targets)).float()[:, None], targets=targets)


def user(train: Any, test: Any = (0,), valid: Any = ()) -> UserSamples:
    return UserSamples(name="ann", train=numbered(train), valid=numbered(valid), test=numbered(test))


def test_validation_samples_come_out_of_training_samples() -> None:
    found = hold_out_valid(user([0, 1, 1, 0, 0, 1, 0, 0, 1, 1]), 0.2)
    assert found.valid.inputs.flatten().tolist() == [0, 1]
    assert found.valid.targets.tolist() == [0, 1]
    assert found.train.inputs.flatten().tolist() == list(range(2, 10))
    assert found.test is not None
    unchanged = user([0, 1])
    assert hold_out_valid(unchanged, 0.0) is unchanged


def test_regressions_have_no_labels_to_keep() -> None:
    found = hold_out_valid(user(torch.arange(10.0)[:, None], test=torch.zeros(1, 1), valid=torch.zeros(0, 1)), 0.3)
    assert found.valid.targets.flatten().tolist() == [0, 1, 2]
    assert found.train.targets.flatten().tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_a_user_of_whom_nothing_can_be_spared_is_said() -> None:
    with pytest.raises(DataError, match=r"^user 'ann': .*valid=0\.1 .*3 train samples .*3 labels"):
        hold_out_valid(user([0, 1, 2]), 0.1)


def test_labels_that_are_not_trained_on_are_said() -> None:
    check_labels([user([0, 1, 2], test=[2, 0], valid=[1])])
    with pytest.raises(DataError, match=r"^user 'ann': test .*labels .*: 1, 5;"):
        check_labels([user([0, 1]), user([0, 2], test=[1, 2, 5, 1], valid=[0])])
    with pytest.raises(DataError, match=r"valid .*labels .*: 1, 2, 3, 4, 5 \.\.\.;"):
        check_labels([user([0], valid=[6, 5, 4, 3, 2, 1])])


def test_labels_that_are_dealt_and_not_trained_on_are_said_once_for_all_users(caplog: pytest.LogCaptureFixture) -> None:
    people = [user([0, 1, 2], test=[2, 0], valid=[1]), replace(user([0], test=[1, 5, 1], valid=[7]), name="bob")]
    warn_unseen(people[:1])
    assert not caplog.messages
    warn_unseen(people)
    (message,) = caplog.messages
    assert re.fullmatch("1 of 2 users .*labels .*: 'bob' on 1, 5, 7", message)
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    warn_unseen([replace(people[1], name=f"user-{k}") for k in range(5)])
    named = "; ".join(f"'user-{k}' on 1, 5, 7" for k in range(3))
    (message,) = caplog.messages
    assert re.fullmatch(f"5 of 5 users .*labels .*: {named}; and 2 more users", message)
