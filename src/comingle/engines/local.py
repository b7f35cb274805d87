"""Local rounds: what a cohort does between two messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.engines.client import Clients
from comingle.engines.cohort import Cohort
from comingle.engines.faults import diverged, find_broken, within_memory
from comingle.engines.noised import TUNING
from comingle.engines.training import cohorts
from comingle.methods.base import Part

Tick = Callable[[], None]
"""Called after every local iteration of a cohort."""


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """What one round of local work yielded: mean training loss per participant, training tokens or samples, seconds.

    ``rejected`` says whose work is left out, and why.
    """

    losses: dict[int, float]
    rejected: dict[int, str]
    tokens: int
    seconds: float


NOBODY = LocalRound(losses={}, rejected={}, tokens=0, seconds=0.0)
"""A round in which nobody takes part."""


def train(clients: Clients, members: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
    """Local iterations of every member, cohort by cohort.

    Raises:
        DivergenceError: a user's loss is not finite; names the user and the round.
        RecipeError: there is not enough memory; says which setting to lower.
    """
    with within_memory(clients.portions, len(members), clients.model.device):
        return _train(clients, members, round_number, tick)


def _train(clients: Clients, members: Sequence[int], round_number: int, tick: Tick) -> LocalRound:
    started, method = time.perf_counter(), clients.method
    clients.steps.blamed.clear()
    losses: dict[int, float] = {}
    rejected: dict[int, str] = {}
    copies = range(method.placement.copies)
    working = [copy * len(clients.trainers) + member for copy in copies for member in members]
    place = {member: i for i, member in enumerate(members)}
    firsts = clients.state.rows_of(members) if method.client.looks_across else None
    groups = cohorts(working, clients.portions.users)
    for rows, following in zip(groups, [*groups[1:], []], strict=True):
        cohort = clients.cohort(rows, round_number, looks_back=method.client.looks_back)
        clients.state.ahead(following)
        cohort.across = None if firsts is None else firsts[[place[owner] for owner in cohort.owners]]
        steps = torch.tensor([clients.feed.steps(owner) for owner in cohort.owners])
        losses_of_steps = _work(clients, cohort, steps, tick)
        broken = find_broken(losses_of_steps, cohort.part.rows, round_number)
        _leave_out(clients, cohort, broken)
        for part in method.client.parts:
            part.end(cohort)
        clients.cut(cohort)
        clients.state.put(rows, cohort.part)
        losses |= dict(zip(cohort.owners, (losses_of_steps.sum(0) / steps).tolist(), strict=True))
        rejected |= {cohort.owners[user]: what for user, what in broken.items()}
    if any(part.resizes for part in method.client.parts):
        clients.resized()
    seen = len(copies) * sum(clients.feed.seen(member) for member in members)
    losses = {user: loss for user, loss in losses.items() if user not in rejected}
    return LocalRound(losses=losses, rejected=rejected, tokens=seen, seconds=time.perf_counter() - started)


def _work(clients: Clients, cohort: Cohort, steps: Int[Tensor, " users"], tick: Tick) -> Float[Tensor, "steps users"]:
    """The local iterations of a cohort in one round, ``steps`` of each user. Returns every training loss."""
    for part in clients.method.client.parts:
        part.begin(cohort)
    if clients.method.client.tuning and clients.phases[0].label == TUNING:
        cohort.forget(clients.method.client.trained)  # of this nothing outlives the tuning
    history = []
    for step in range(int(steps.max())):
        history.append(clients.steps.iteration(cohort, clients.phases, step, step < steps))
        tick()
    return torch.stack(history)


def _leave_out(clients: Clients, cohort: Cohort, broken: dict[int, str]) -> None:
    """Users who are not finite end the run; where the method drops them, they have not taken part."""
    for user, what in broken.items():
        if cohort.before is None or not clients.method.client.drops_nonfinite:
            raise diverged(cohort.names[user], what, clients.steps.suspects(cohort.rows[user], cohort.part.rows[user]))
        cohort.part.rows[user] = cohort.before[user]
        for t in (cohort.part.first, cohort.part.second, cohort.part.iterations, cohort.part.router_steps):
            t[user] = 0


@contextmanager
def finetuned(clients: Clients, done: int | None = None, members: Sequence[int] | None = None) -> Iterator[None]:
    """Where the method finetunes: everybody's tensors as another local round makes them, until the end of the block.

    Its batches have a random stream of their own, and nothing of it is left behind. Learning rates are those of the
    round after ``done`` (None: of the round with whose models the run ends; at most of the last). Another one within
    such a block changes nothing.
    """
    if not clients.method.client.finetunes or any(phase.label == TUNING for phase in clients.phases):
        yield
        return
    last = clients.training.rounds - 1
    state, phases = clients.state, clients.phases
    clients.state = state.copy()
    clients.phases = [replace(phase, label=TUNING) for phase in clients.method.client.tuning or phases]
    try:
        done = clients.chosen_round if done is None else done
        some = clients.scored_trainers if members is None else members
        train(clients, some, min(done, last)) if some else None
        yield
    finally:
        clients.state.release()
        clients.state, clients.phases = state, phases


@torch.no_grad()
def settle(clients: Clients, *, ends: bool = True) -> None:
    """What follows from users' models as they are now, before they are scored; the same however often it is done.

    Before the run ``ends``, it is of those who are scored.
    """
    parts = [part for part in clients.method.client.parts if type(part).settle is not Part.settle]
    trainers, copies = len(clients.trainers), clients.method.placement.copies
    some = range(trainers) if ends else clients.scored_trainers
    everything = [copy * trainers + trainer for copy in range(copies) for trainer in some] if parts else []
    for rows in cohorts(everything, clients.portions.users):
        cohort = clients.cohort(rows, clients.training.rounds, state=clients.state.without_moments())
        for part in parts:
            part.settle(cohort)
        clients.state.put(rows, cohort.part)


def finish(clients: Clients) -> None:
    """What users do once, after the last exchange: their last copies become their models."""
    trainers, copies = len(clients.trainers), clients.method.placement.copies
    parts = [part for part in clients.method.client.parts if part.finishes]
    for some in cohorts(range(trainers), clients.at_once) if parts else ():
        everything = [copy * trainers + trainer for copy in range(copies) for trainer in some]
        for part in parts:
            cohort = clients.cohort(everything, clients.training.rounds)
            cohort.part.rows[-len(some) :] = part.finish(cohort)
            clients.state.put(everything, cohort.part)
