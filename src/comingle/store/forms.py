"""What each kind's users are made of, as arrays that a file can hold side by side.

A package with users of another type has a pair of functions for it registered: :data:`FORMS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comingle.data.conversations.encoding import Answers, UserAnswers
from comingle.data.samples.samples import SPLITS, Samples, UserSamples
from comingle.data.text.streams import UserData
from comingle.models.windows import PAD

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class UserForm:
    """``parts`` of a user, and the user of a name and parts; ``counts`` is what there is to be known of all users
    together: sums, and what begins with ``most_`` is the largest."""

    parts: Callable[[Any], Arrays]
    user: Callable[[str, Arrays], Any]
    counts: Callable[[Any], Mapping[str, int]] = lambda user: {}


def _answers_parts(user: UserAnswers) -> Arrays:
    found: dict[str, Tensor] = {}
    for split in SPLITS:
        part = user.split(split)
        told = json.dumps([part.references, part.limit, part.measures, part.ends]).encode()
        words = torch.from_numpy(np.frombuffer(told, dtype=np.uint8).copy())
        of_split = {"windows": part.windows, "owners": part.owners, "prompts": part.prompt_tokens, "told": words}
        found |= {f"{split}.{key}": t for key, t in of_split.items()}
    return found


def _answers_user(name: str, arrays: Arrays) -> UserAnswers:
    def of_split(split: str) -> Answers:
        references, limit, measures, ends = json.loads(arrays[f"{split}.told"].numpy().tobytes())
        return Answers(
            windows=arrays[f"{split}.windows"],
            owners=arrays[f"{split}.owners"],
            prompt_tokens=arrays[f"{split}.prompts"],
            references=tuple(references),
            limit=limit,
            measures=tuple(measures),
            ends=tuple(ends),
        )

    train, valid, test = (of_split(split) for split in SPLITS)
    return UserAnswers(name=name, train=train, valid=valid, test=test)


def _answers_counts(user: UserAnswers) -> Mapping[str, int]:
    return {"most_width": user.train.windows.shape[1], "tokens": int((user.train.windows != PAD).sum())}


def _samples_parts(user: UserSamples) -> Arrays:
    parts = {split: user.split(split) for split in SPLITS}
    return {f"{s}.{key}": getattr(part, key) for s, part in parts.items() for key in ("inputs", "targets")}


def _samples_user(name: str, arrays: Arrays) -> UserSamples:
    train, valid, test = (Samples(inputs=arrays[f"{s}.inputs"], targets=arrays[f"{s}.targets"]) for s in SPLITS)
    return UserSamples(name=name, train=train, valid=valid, test=test)


FORMS: dict[type, UserForm] = {
    UserData: UserForm(
        parts=lambda user: {split: getattr(user, split) for split in SPLITS},
        user=lambda name, arrays: UserData(
            name=name, train=arrays["train"], valid=arrays["valid"], test=arrays["test"]
        ),
    ),
    UserAnswers: UserForm(parts=_answers_parts, user=_answers_user, counts=_answers_counts),
    UserSamples: UserForm(parts=_samples_parts, user=_samples_user),
}
"""By the type of a user."""
