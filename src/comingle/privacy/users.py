"""The user's side: what is done to a change before it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import Privacy
from comingle.methods.base import Cohort
from comingle.privacy.accounting import epsilon, release_of
from comingle.privacy.clipping import clipped, norms, scaled, without_padding
from comingle.privacy.noise import add_noise
from comingle.privacy.secure.sizes import VECTOR
from comingle.privacy.summing import Sums
from comingle.utils.trees import Tree

REFERENCE = "reference/"
"""Under which names a user keeps what it has downloaded, against which its change is measured."""
CLIP_NORM = "clip_norm"
"""What the server says of the bound, where it is adaptive; and under which name a user keeps it."""
WITHIN = "within"
"""What a user then reports: 1 where its change was no longer than the bound."""


@dataclass(kw_only=True)
class Shield:
    """What users do; ``key`` is theirs, and never the server's. ``sums`` is there where the server sees sums alone."""

    privacy: Privacy
    key: str
    sums: Sums | None = None

    def epsilon(self, count: int) -> float:
        """What so many uploads with local noise reveal."""
        return epsilon(release_of(self.privacy, 1.0, 1), count, self.privacy.delta, self.privacy.accountant)

    def start(self, shared: Tree) -> Tree:
        """What users keep for it between rounds: what they have in common with the server, and the bound."""
        first = next(iter(shared.values()))
        bounds = torch.full((len(first),), self.privacy.first_bound, dtype=torch.float64, device=first.device)
        return {REFERENCE + name: t.clone() for name, t in shared.items()} | {CLIP_NORM: bounds}

    def remember(self, kept: Tree, shared: Tree, bounds: Float[Tensor, " users"] | None) -> None:
        """Take note of what was downloaded."""
        for name, t in shared.items():
            kept[REFERENCE + name].copy_(t)
        if bounds is not None:
            kept[CLIP_NORM].copy_(bounds)

    def protect(self, tensors: Tree, cohort: Cohort, counts: Sequence[int], round_number: int) -> tuple[Tree, Tree]:
        """What was downloaded plus each user's clipped change, times its weight, with noise where that is local.

        With it come the reports that a server with an adaptive bound needs. ``counts`` are users' amounts of data. For
        a secure sum it is the change alone, in whole numbers, which are not to leave without masks.
        """
        references, bounds = {name: cohort.kept[REFERENCE + name] for name in tensors}, cohort.kept[CLIP_NORM]
        changes = {name: t.double() - references[name].double() for name, t in tensors.items()}
        if self.sums is not None:
            whole = self.sums.uploads(changes, self._weights(counts), cohort.names, self.key, round_number)
            return {VECTOR: whole}, {}
        leaving = scaled(clipped(changes, bounds), self._weights(counts))
        if self.privacy.mechanism == "local":
            leaving = without_padding(self._noised(leaving, cohort.names, bounds, round_number), cohort.ranks)
        sent = {name: (references[name].double() + t).to(tensors[name].dtype) for name, t in leaving.items()}
        within = (norms(changes) <= bounds).long().cpu()
        return sent, {WITHIN: within} if self.privacy.adaptive else {}

    def _weights(self, counts: Sequence[int]) -> Float[Tensor, " users"]:
        cap = self.privacy.weight_cap
        return torch.tensor([1.0 if cap is None else min(1.0, count / cap) for count in counts], dtype=torch.float64)

    def _noised(self, changes: Tree, names: Sequence[str], bounds: Float[Tensor, " users"], round_number: int) -> Tree:
        """Streams are each user's own."""
        rows = [
            add_noise(
                {key: t[i] for key, t in changes.items()},
                self.privacy.multiplier * float(bounds[i]),
                self.key, name, round_number, "local noise",
            )
            for i, name in enumerate(names)
        ]  # fmt: skip
        return {key: torch.stack([row[key] for row in rows]) for key in changes}


def without_bound(tensors: Tree) -> tuple[Tensor | None, Tree]:
    """What a download says of the bound ``(users,)``, and the rest of it."""
    if CLIP_NORM not in tensors:
        return None, tensors
    return tensors[CLIP_NORM][:, 0], {name: t for name, t in tensors.items() if name != CLIP_NORM}
