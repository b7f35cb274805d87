"""What of a task a user is validated and tested on, beside what it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from comingle.data.samples.samples import UserSamples, find_unseen, hold_out, list_labels, take
from comingle.utils.errors import DataError


def hold_out_valid(user: UserSamples, share: float) -> UserSamples:
    """The user with ``share`` of the train samples as validation samples; a regression has no labels to keep.

    Raises:
        DataError: a share above 0 of samples of which none can be spared.
    """
    if share <= 0:
        return user
    targets = user.train.targets
    labels = torch.zeros(len(targets), dtype=torch.int64) if targets.is_floating_point() else targets.long()
    kept, held = hold_out(labels, share)
    if not len(held):
        got = f"{len(targets)} train samples of {len(labels.unique())} labels"
        raise DataError(f"user {user.name!r}: valid={share} of {got}: none can be spared; allowed: 0, or more samples")
    return replace(user, train=take(user.train, kept), valid=take(user.train, held))


def check_labels(users: Sequence[UserSamples]) -> None:
    """Whether users have seen, in training, every label that they are validated and tested on.

    Raises:
        DataError: some user has not.
    """
    for user in users:
        for split, samples in (("valid", user.valid), ("test", user.test)):
            if unseen := find_unseen(user, samples):
                raise DataError(
                    f"user {user.name!r}: {split} holds labels that train does not: {list_labels(unseen)}; "
                    "allowed: those of train"
                )
