"""What several kinds of data leave unread, and what their sections say is there instead."""

from __future__ import annotations

from collections.abc import Mapping

ON_LANGUAGE: Mapping[str, str] = {"floral": "adaptors on a language model take adapters.rank and adapters.alpha"}
"""Settings of nets, which no users of a language model read."""

_PASSES = {"data.train_on_valid": "rounds are passes, which would be longer with more to train on"}

_LIMITS = ("data.max_train_tokens", "data.max_valid_tokens", "data.max_test_tokens")


def steps_of(what: str) -> dict[str, str]:
    """Iterations, where users pass over what they have."""
    return {"training.local_steps": f"passes over a user's {what} are counted by training.local_epochs"}


def keys_of_text(*, limits: str | tuple[str, str, str], **instead: str) -> dict[str, str]:
    """Keys of ``data`` that text has, by name; ``limits`` are what there is instead of those on tokens of the splits.

    One text stands for all three of them.
    """
    each = (limits,) * len(_LIMITS) if isinstance(limits, str) else limits
    return _PASSES | {f"data.{key}": text for key, text in instead.items()} | dict(zip(_LIMITS, each, strict=True))
