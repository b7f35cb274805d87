"""Compare local models trained within the mixture, on the residual of the shared model, with models trained alone.

    python papers/benchmarks/residual.py RUNS/stacking-seed0-...

Takes a finished run of ``stacking``, keeps every user's shared model as it is, and trains its own model again from its
start, on the same batches, by ``-log(w p_shared + (1 - w) p_own)``, with w fitted anew on validation text after each
round. Prints one JSON line with test perplexities of every user before (both trained apart) and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comingle

# isort: split
import torch
from torch import Tensor

from comingle.models.ensembles import EnsembleModel
from comingle.models.routers import mix_losses
from comingle.runs.results import Run
from comingle.training.client import Clients, settle, train
from comingle.training.cohort import Scorer
from comingle.training.cohort_state import FrozenColumns
from comingle.utils.trees import GENERALIST, SPECIALIST, Tree


@dataclass(frozen=True, kw_only=True)
class Together(EnsembleModel):
    """Ensemble whose local model is trained on the mixture's loss; the shared model is frozen."""

    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False, shares: Any = None
    ) -> tuple[Tensor, float]:
        """Return the losses of the mixture."""
        alone = self.component_losses(tensors, users, batch, train=train)
        fixed = torch.cat([alone[:, :1].detach(), alone[:, 1:]], 1)
        return mix_losses(fixed, self.shares(tensors).detach()), 0.0


def main() -> None:
    """Measure runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    for folder in parser.parse_args().run:
        print(json.dumps(measure(comingle.load(folder))), flush=True)


def measure(run: Run) -> dict[str, Any]:
    """Return the perplexities of every user before and after training."""
    clients = run.federation.clients
    before = perplexities(clients)
    model = clients.model
    assert isinstance(model, EnsembleModel)
    together = Together(**vars(model))
    layout, state, started = model.layout, clients.state, clients.begin(range(clients.num_rows))
    shared = layout.mask({GENERALIST})
    started.rows[:, shared] = state.rows[:, shared]
    clients.state, clients.model = started, together
    held = FrozenColumns(columns=~layout.mask({SPECIALIST}), rounds=clients.plan.training.rounds)
    clients.steps = replace(clients.steps, model=together, frozen_columns=held)
    clients.scorer = Scorer(steps=clients.steps)
    for number in range(clients.plan.training.rounds):
        train(clients, range(len(clients.trainers)), number)
        settle(clients)
    assert torch.equal(clients.state.rows[:, shared], state.rows[:, shared])
    after = perplexities(clients)
    means = {"apart": statistics.fmean(before.values()), "together": statistics.fmean(after.values())}
    return {"seed": run.recipe.seed, "means": means, "apart": before, "together": after}


def perplexities(clients: Clients) -> dict[str, float]:
    """Return the test perplexity of every user."""
    names = [user.name for user in clients.users]
    return {name: score.measures["perplexity"] for name, score in zip(names, clients.evaluate(), strict=True)}


if __name__ == "__main__":
    main()
