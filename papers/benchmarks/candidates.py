"""Candidate methods that might never fall behind the better of local and fedavg, compared with a run of ``stacking``.

    python papers/benchmarks/candidates.py RUNS/stacking-seed0-... [--only
    temperatures,choice,early,gate,folds,leftover]

Such a run has FedAvg's and Local's models of every user. Candidates have its recipe: text, seed, steps and rates.
Prints one JSON line for each, with every user's test perplexity, how many users are ahead of the better of the two
models, and the mean:

- ``stacking``: the run as it is.
- ``temperatures``: the same models, their powers and weights set as ``temperatures: true`` sets them.
- ``lowest``: of the two models the one with the lower validation loss. ``own if clear``: the own one if it is ahead by
  more than one standard error of the difference, over windows of validation text; ``shared if clear``: the reverse.
- ``early``: of both models after every round the one with the lowest validation loss. ``early, one error``: the first
  whose loss is above that by at most one standard error of the difference.
- ``plain``: ``comigs-1g1s``. ``gate``: the same with a number of each user that multiplies what the shared attention
  LoRA adds, ``2 sigmoid(10 z)`` with z from 0, trained with the routers on validation text.
- ``folds``: two of ``comigs-1g1s``, the experts of one trained on the first half of a user's training and validation
  text and its routers on the second, the other the other way round; predictions averaged. Nothing is held out of both.
- ``leftover``: FedAvg's attention LoRA and both its experts stand still as generalists of ``comigs``; a specialist and
  the routers are trained beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comingle

# isort: split
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.data.populations import as_users
from comingle.data.text.streams import UserData
from comingle.methods import make
from comingle.models.adapted import AdaptedModel
from comingle.models.ensembles import EnsembleModel, ensemble
from comingle.models.lora import init_zero
from comingle.models.model import Model
from comingle.models.routers import mix_losses
from comingle.models.scoring import PAD, evaluation_windows
from comingle.runs.results import Run
from comingle.runs.session import build, prepare
from comingle.training.client import Clients, settle
from comingle.training.cohort import Scorer
from comingle.training.cohort_state import FrozenColumns
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import TextKind
from comingle.training.rounds import run_rounds
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, Layout, Slot, Tree

BATCH = 16
GATE, SPEED = "attention.gate", 10.0

Perplexities = dict[str, float]
"""Test perplexity of every user."""


def main() -> None:
    """Measure one run after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--only", default=",".join(CANDIDATES), help="candidates, with commas between them")
    args = parser.parse_args()
    for folder in args.run:
        for line in measure(comingle.load(folder), args.only.split(",")):
            print(json.dumps(line), flush=True)


def measure(run: Run, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a record for each candidate, the run's own first."""
    shared, own = (of_component(run, number) for number in (0, 1))
    better = {name: min(shared[name], own[name]) for name in run.users}
    found = {"stacking": perplexities(run.federation.clients)}
    for name in names:
        found |= CANDIDATES[name](run)
    about = {"seed": run.recipe.seed, "shared": shared, "own": own}
    return [
        about | {"candidate": name, "mean": statistics.fmean(users.values()), "users": users} | ahead(users, better)
        for name, users in found.items()
    ]


def ahead(users: Perplexities, better: Perplexities) -> dict[str, Any]:
    """Count the users ahead of the better of the two models; return also how far behind it the last user is."""
    behind = {name: users[name] / better[name] - 1 for name in users}
    return {"ahead": sum(value < 0 for value in behind.values()), "worst_percent": 100 * max(behind.values())}


def perplexities(clients: Clients) -> Perplexities:
    """Return the test perplexity of every user under its current model."""
    names = [user.name for user in clients.users]
    return {name: score.measures["perplexity"] for name, score in zip(names, clients.evaluate(), strict=True)}


# ---------------------------------------------------------------- candidates that train nothing


def temperatures(run: Run) -> dict[str, Perplexities]:
    """Fit temperatures as the method does, on the run's models."""
    clients = run.federation.clients
    before, rows = (clients.plan, clients.model, clients.steps, clients.scorer), clients.state.rows
    assert isinstance(clients.model, EnsembleModel)
    clients.plan = replace(clients.plan, method=make("stacking", temperatures=True))
    mixture = clients.method.placement.mixture
    assert mixture is not None
    clients.model = ensemble(clients.model.inner, mixture, generalists=1, specialists=1)
    clients.steps = replace(clients.steps, model=clients.model, plan=clients.plan)
    clients.scorer = Scorer(steps=clients.steps)
    clients.state.rows = torch.cat([rows, rows.new_zeros(len(rows), mixture.num_logits - mixture.clusters)], 1)
    clients.update_masks()
    settle(clients)
    found = perplexities(clients)
    clients.plan, clients.model, clients.steps, clients.scorer = before
    clients.state.rows = rows
    clients.update_masks()
    return {"temperatures": found}


def choice(run: Run) -> dict[str, Perplexities]:
    """Choose one of the two models of each user by validation text."""
    found: dict[str, Perplexities] = {"lowest": {}, "own if clear": {}, "shared if clear": {}}
    tests = [of_component(run, number) for number in (0, 1)]
    for number, name in enumerate(run.users):
        windows = window_losses(run, number)
        gained = windows[0] - windows[1]  # by the own model
        mean, error = float(gained.mean()), float(gained.std() / math.sqrt(len(gained)))
        found["lowest"][name] = tests[mean > 0][name]
        found["own if clear"][name] = tests[mean > error][name]
        found["shared if clear"][name] = tests[mean > -error][name]
    return found


def component_losses(
    run: Run, number: int, split: str, rows: Float[Tensor, "users columns"] | None = None
) -> tuple[Float[Tensor, "2 n context"], Bool[Tensor, "n context"]]:
    """Return losses of both models of a user at each position of its windows, and a mask of valid positions.

    Args:
        run: The finished run.
        number: Index of the user.
        split: Split that is scored.
        rows: Other parameters than the run's.
    """
    clients = run.federation.clients
    row = clients.row_of[number]
    tensors = clients.model.tensors((clients.state.rows if rows is None else rows)[[row]])
    windows = evaluation_windows(getattr(clients.users[number], split), context=run.recipe.training.context)
    assert isinstance(clients.model, EnsembleModel)
    with torch.no_grad():
        parts = [clients.model.component_losses(tensors, [row], w.unsqueeze(0))[0] for w in windows.split(BATCH)]
    return torch.cat(parts, 1).double(), windows[:, 1:] != PAD


def window_losses(run: Run, number: int, rows: Float[Tensor, "users columns"] | None = None) -> Float[Tensor, "2 n"]:
    """Return the mean loss of each validation window under both models.

    Args:
        run: The finished run.
        number: Index of the user.
        rows: Other parameters than the run's.
    """
    losses, here = component_losses(run, number, "valid", rows)
    return losses.sum(2) / here.sum(1)


def of_both(run: Run, number: int, rows: Float[Tensor, "users columns"] | None = None) -> list[float]:
    """Return the test perplexities of both models of a user.

    Args:
        run: The finished run.
        number: Index of the user.
        rows: Other parameters than the run's.
    """
    losses, here = component_losses(run, number, "test", rows)
    return losses[:, here].mean(1).exp().tolist()


def of_component(run: Run, component: int) -> Perplexities:
    """Return the test perplexity of every user under one of its two models."""
    return {name: of_both(run, number)[component] for number, name in enumerate(run.users)}


# ---------------------------------------------------------------- candidates that train


def trained(
    run: Run, method: str | dict[str, Any], change: Callable[[RunData], RunData] = lambda run_data: run_data
) -> Clients:
    """Return the clients at the end of a run of another method.

    Args:
        run: The finished run whose recipe and text are used.
        method: The other method: its name, or a mapping of name and settings.
        change: Function that changes the data before training.
    """
    changes = {"method": method, "evaluation.every": run.recipe.training.rounds, "evaluation.first": False}
    recipe = run.recipe.with_changes(changes)
    federation = build(recipe, change(prepare(recipe)))
    run_rounds(federation, observe=lambda event: None)
    return federation.clients


def early(run: Run) -> dict[str, Perplexities]:
    """Repeat the run's training, keeping every user's model after each round."""
    recipe = run.recipe.with_changes({"evaluation.every": run.recipe.training.rounds, "evaluation.first": False})
    federation, kept = build(recipe, prepare(recipe)), list[Tensor]()

    def keep(event: Any) -> None:
        if event["event"] == "round":
            kept.append(federation.clients.state.rows.clone())

    run_rounds(federation, observe=keep)
    found: dict[str, Perplexities] = {"early": {}, "early, one error": {}}
    mine, given = (rows[:, :-2] for rows in (kept[-1], run.federation.clients.state.rows))
    torch.testing.assert_close(mine, given, rtol=1e-3, atol=1e-4)  # the last round's models are the run's
    for number, name in enumerate(run.users):
        windows = torch.cat([window_losses(run, number, rows) for rows in kept])  # (2 rounds, windows)
        tests = [value for rows in kept for value in of_both(run, number, rows)]
        best = int(windows.mean(1).argmin())
        above = windows - windows[best]
        close = above.mean(1) <= above.std(1) / math.sqrt(windows.shape[1])
        found["early"][name] = tests[best]
        found["early, one error"][name] = tests[int(close.nonzero()[0])]
    return found


@dataclass(frozen=True, kw_only=True)
class Gated(AdaptedModel):
    """Adapted model with a gate per user that scales attention's LoRA; router steps train the gate."""

    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return the mask of the method, with the gate of every user."""
        rest = super().mask(ranks)
        return torch.cat([rest, rest.new_ones(len(rest), 1)], 1)

    def losses(self, tensors: Tree, users: Sequence[int], batch: Any, **options: Any) -> Any:
        """Compute the losses with attention's B factors multiplied by the gate."""
        gate = (2 * (SPEED * tensors[GATE]).sigmoid()).unsqueeze(2)
        gated = {slot.name for slot in self.layout.slots if slot.roles == (ATTENTION,) and slot.factor == "b"}
        rest = {name: t * gate if name in gated else t for name, t in tensors.items() if name != GATE}
        return super().losses(rest, users, batch, **options)


class GatedText(TextKind):
    """Text for models that are gated."""

    def model(self, *args: Any, **named: Any) -> Model:
        """Return the method's model with a gate as its last parameter."""
        model = super().model(*args, **named)
        slot = Slot(name=GATE, shape=(1,), roles=(ROUTER,), init=init_zero)
        fields: dict[str, Any] = {**vars(model), "layout": Layout(slots=(*model.layout.slots, slot))}
        return Gated(**fields)


def gate(run: Run) -> dict[str, Perplexities]:
    """Train CoMiGS with and without the gate."""
    plain = perplexities(trained(run, "comigs-1g1s"))
    gated = trained(run, "comigs-1g1s", lambda run_data: replace(run_data, kind=GatedText()))
    return {"plain": plain, "gate": perplexities(gated)}


def folds(run: Run) -> dict[str, Perplexities]:
    """Mix the predictions of two runs, each trained on one half of the data, with equal weights."""
    both = [trained(run, "comigs-1g1s", lambda run_data, k=k: halved(run_data, k)) for k in (0, 1)]
    found: Perplexities = {}
    for number, name in enumerate(run.users):
        windows = evaluation_windows(both[0].users[number].test, context=run.recipe.training.context)
        losses = [
            torch.cat([one.scorer.predict(one.models, [number], part.unsqueeze(0))[0] for part in windows.split(BATCH)])
            for one in both
        ]
        alone = torch.stack(losses)[:, windows[:, 1:] != PAD].double().unsqueeze(0)
        found[name] = math.exp(float(mix_losses(alone, torch.full((1, 2), 0.5)).mean()))
    return {"folds": found}


def halved(run_data: RunData, fold: int) -> RunData:
    """Split each user's training and validation text: one half for the experts, the other for the routers."""

    def of(user: UserData) -> UserData:
        text = torch.cat([user.train, user.valid])
        halves = text.split(math.ceil(len(text) / 2))
        return replace(user, train=halves[fold], valid=halves[1 - fold])

    return replace(run_data, users=as_users(of(user) for user in run_data.users))


def leftover(run: Run) -> dict[str, Perplexities]:
    """Train CoMiGS with FedAvg's model as frozen generalists."""
    method = {"name": "comigs", "generalists": 2, "specialists": 1}
    changes = {"method": method, "evaluation.every": run.recipe.training.rounds, "evaluation.first": False}
    recipe = run.recipe.with_changes(changes)
    federation = build(recipe, prepare(recipe))
    clients, given = federation.clients, run.federation.clients
    views, shared = clients.model.layout.views(clients.state.rows), given.model.layout.views(given.state.rows)
    for slot in clients.model.layout.slots:
        if slot.roles == (ATTENTION,):
            views[slot.name].copy_(shared[slot.name][:, 0])
        elif GENERALIST in slot.roles:
            views[slot.name][:, :2] = shared[slot.name][:, 0]
    held = clients.model.layout.mask({ATTENTION, GENERALIST})
    before = clients.state.rows[:, held].clone()
    clients.steps.frozen_columns = FrozenColumns(columns=held, rounds=clients.plan.training.rounds)
    clients.shares = False  # nothing of it moves, so nothing is sent
    run_rounds(federation, observe=lambda event: None)
    assert torch.equal(clients.state.rows[:, held], before)
    return {"leftover": perplexities(clients)}


CANDIDATES: dict[str, Callable[[Run], dict[str, Perplexities]]] = {
    "temperatures": temperatures,
    "choice": choice,
    "early": early,
    "gate": gate,
    "folds": folds,
    "leftover": leftover,
}


if __name__ == "__main__":
    main()
