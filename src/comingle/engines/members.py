"""Some users, worked on in one batch: who they are, and their part of the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.engines.state import State
from comingle.methods import base
from comingle.utils.trees import Layout, Tree


@dataclass(kw_only=True)
class Members(base.Cohort):
    """Users whose tensors are ``part``; ``rows`` are their rows in the state of all, ``owners`` the trainers to whom
    these belong, ``names`` their names.

    ``before`` is what they began the round with, ``across`` what their first copies did, where that is asked for.
    ``mask`` is None where nobody's tensors are padded. ``sample_shares`` are each user's training samples' own mixtures
    ``(clusters, samples)``.
    """

    layout: Layout
    rows: list[int]
    owners: list[int]
    names: list[str]
    part: State
    round_number: int
    before: Float[Tensor, "users columns"] | None = None
    across: Float[Tensor, "users columns"] | None = None
    mask: Bool[Tensor, "users columns"] | None = None
    sample_shares: list[Float[Tensor, "clusters samples"]] | None = None

    @property
    def tensors(self) -> Tree:
        """Views of the users' tensors."""
        return self.layout.views(self.part.rows)

    @property
    def began(self) -> Tree:
        """What they were when the round began."""
        assert self.before is not None
        return self.layout.views(self.before)

    @property
    def exchanged(self) -> Tree:
        """What their first copies were when the round began."""
        assert self.across is not None
        return self.layout.views(self.across)

    @property
    def kept(self) -> Tree:
        """What parts of the method keep of each user."""
        return self.part.kept

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA ranks."""
        return self.part.ranks

    @contextmanager
    def some(self, at: Sequence[int]) -> Iterator[Members]:
        """Some of these users; what is changed of them is changed here."""
        if list(at) == list(range(len(self.rows))):
            yield self
            return
        sub = self._of(at, self.part.take(at))
        yield sub
        self.part.put(at, sub.part)

    def only(self, at: Sequence[int]) -> Members:
        """Some of these users, for a look: their rows are a copy, and there is nothing to take steps with."""
        nothing = self.part.rows.new_empty(len(at), 0)
        small = {
            name: getattr(self.part, name)[list(at)] for name in ("iterations", "router_steps", "versions", "ranks")
        }
        rows = self.part.rows[list(at)]
        kept = {name: t[list(at)] for name, t in self.part.kept.items()}
        return self._of(at, replace(self.part, rows=rows, first=nothing, second=nothing, kept=kept, **small))

    def _of(self, at: Sequence[int], part: State) -> Members:
        return replace(
            self,
            rows=[self.rows[i] for i in at],
            owners=[self.owners[i] for i in at],
            names=[self.names[i] for i in at],
            part=part,
            before=None if self.before is None else self.before[list(at)],
            across=None if self.across is None else self.across[list(at)],
            mask=None if self.mask is None else self.mask[list(at)],
            sample_shares=None if self.sample_shares is None else [self.sample_shares[i] for i in at],
        )

    def shares_of(self, drawn: Int[Tensor, "users batch"]) -> Float[Tensor, "users clusters batch"]:
        """What of :attr:`sample_shares` belongs to these samples; anything where there is none."""
        assert self.sample_shares is not None
        numbers = drawn.to(self.part.rows.device).clamp(min=0)
        return torch.stack([shares[:, at] for shares, at in zip(self.sample_shares, numbers, strict=True)])
