"""What a federation's memory holds at its worst moment: one pass of the largest cohort, run without data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.settings import MEMORY
from comingle.costing.memory import ALLOCATOR_GAPS, CHECKPOINTED_GAPS, Fakes, LiveBytes
from comingle.costing.records import MemoryCost
from comingle.costing.stored import held_moments, held_params, received_bytes, taken_bytes, user_bytes
from comingle.methods.base import Phase
from comingle.protocol.messages import LOSS
from comingle.training.backends.local import InProcess
from comingle.training.cohort import Cohort, Scorer
from comingle.training.settings import Portions
from comingle.training.state import GRADIENTS
from comingle.training.steps import Steps
from comingle.utils.trees import Tree, restrict

TRACED_BATCHES = 2
"""From the second micro-batch on every further one does the same, with the sum of gradients at hand."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A federation, steps of its users whose model and samples have no data, and the fakes that stand for them.

    ``trainers`` is their true number, of whom at most ``present`` take part in a round, ``store`` where they are kept,
    ``checkpointed`` whether layers are computed twice.
    ``data_bytes`` is what is kept of their samples, with ``reads_cohorts`` of those alone who train; ``process_bytes``
    is what a process holds in any case, ``known`` what has been found out about passes.
    """

    federation: InProcess
    steps: Steps
    fakes: Fakes
    weights_bytes: int
    trainers: int
    present: int
    store: str = MEMORY
    checkpointed: bool = False
    data_bytes: int = 0
    reads_cohorts: bool = False
    process_bytes: int = 0
    known: dict[tuple[tuple[int, ...], Portions], tuple[int, int]] = field(default_factory=dict)

    def in_portions(self, portions: Portions) -> Steps:
        """Steps with other numbers of users and sequences in a pass."""
        steps = replace(self.steps)
        steps.portions = portions
        return steps

    def cohort(self, rows: Sequence[int]) -> Cohort:
        """Users without data."""
        clients, device = self.federation.clients, self.steps.model.device
        cohort = clients.cohort(list(rows), 0)
        part = {name: self.fakes.of(getattr(cohort.part, name), device) for name in ("rows", "first", "second")}
        return replace(cohort, part=replace(cohort.part, **part))


def rehearse(
    federation: InProcess,
    trainers: int,
    *,
    present: int | None = None,
    store: str = MEMORY,
    checkpointed: bool = False,
    data_bytes: int = 0,
    reads_cohorts: bool = False,
    process_bytes: int = 0,
) -> Rehearsal:
    """Put fakes in the place of everything frozen, in place, and of samples."""
    clients = federation.clients
    fakes, device = Fakes(), clients.model.device
    model, size = clients.model.without_weights(fakes)
    feed = clients.feed.without_data(lambda real: fakes.of(real, device))
    steps = replace(clients.steps, model=model, source=feed)
    return Rehearsal(
        federation=federation,
        steps=steps,
        fakes=fakes,
        trainers=trainers,
        present=min(trainers if present is None else present, trainers),
        store=store,
        checkpointed=checkpointed,
        weights_bytes=size,
        data_bytes=data_bytes,
        reads_cohorts=reads_cohorts,
        process_bytes=process_bytes,
    )


def memory(stage: Rehearsal, *, alone: bool = False, portions: Portions | None = None) -> MemoryCost:
    """The worst moment on this machine, or (``alone``) on a device with nobody but the user who has most.

    ``portions`` tries out other numbers of users and sequences in a pass.
    """
    clients, chosen = stage.federation.clients, portions or stage.steps.portions
    count = 1 if alone else min(chosen.users, len(clients.state.rows))
    first = int(clients.mask.sum(1).argmax()) if count == 1 else 0
    peak, gradients = _worst_pass(stage, tuple(range(first, first + count)), chosen)
    state = clients.state
    share = (1 if alone else stage.trainers) / len(clients.trainers)
    left = int(share * state.kept[GRADIENTS].nbytes) if GRADIENTS in state.kept else 0
    exchange = _exchange_bytes(stage, alone=alone)
    gaps = (CHECKPOINTED_GAPS if stage.checkpointed else ALLOCATOR_GAPS).get(clients.model.device.type, 0.0)
    adapters, moments = _in_memory(stage, share) if alone or stage.store == MEMORY else _of_cohorts(stage, chosen)
    return MemoryCost(
        weights_bytes=stage.weights_bytes,
        adapters_bytes=adapters + (0 if alone else _server_bytes(stage.federation, share)),
        moments_bytes=moments,
        gradients_bytes=gradients + left,
        activations_bytes=peak - gradients,
        allocator_bytes=int(gaps * max(peak, exchange)),
        data_bytes=_data_bytes(stage, 1 if alone else chosen.users if stage.reads_cohorts else stage.trainers),
        process_bytes=stage.process_bytes,
        exchange_bytes=exchange,
    )


def _in_memory(stage: Rehearsal, share: float) -> tuple[int, int]:
    """Models and moments of ``share`` times as many users as were built."""
    clients = stage.federation.clients
    state = clients.state
    models = state.rows.nbytes + clients.initial.nbytes + clients.mask.untyped_storage().nbytes()
    models += sum(t.nbytes for t in state.best.values())
    return int(share * models), int(share * (state.first.nbytes + state.second.nbytes))


def _of_cohorts(stage: Rehearsal, portions: Portions) -> tuple[int, int]:
    """Models and moments of those who are in memory while the others are on disk."""
    clients = stage.federation.clients
    user, copies = user_bytes(clients.state, stage.store), clients.method.placement.copies
    rows = stage.trainers * copies
    at_once = min(portions.users, stage.present * copies)
    return held_params(user, at_once, rows) + clients.mask[:1].nbytes, held_moments(user, at_once)


def _exchange_bytes(stage: Rehearsal, *, alone: bool) -> int:
    """What messages take while all of a round make their uploads, out of those of one who was built.

    From disk everybody's tensors are read for that; downloads, before an evaluation, are of fewer at once.
    """
    clients = stage.federation.clients
    if not clients.shares:
        return 0
    with LiveBytes() as live:
        clients.upload([0], 1, {LOSS: torch.zeros(1)}, counts=True)
    if alone or stage.store == MEMORY:
        return live.peak * (1 if alone else stage.present)
    user = user_bytes(clients.state, stage.store)
    evaluated = min(clients.at_once, clients.training.evaluate_users or stage.trainers)
    return max(stage.present * (live.peak + taken_bytes(user)), evaluated * received_bytes(user))


def _data_bytes(stage: Rehearsal, users: int) -> int:
    """Of so many of those whose samples there are."""
    return stage.data_bytes * min(users, stage.trainers) // stage.trainers


def _server_bytes(federation: InProcess, share: float) -> int:
    """What the server keeps, with as many times as many users as were built."""
    server, rows = federation.server, federation.clients.method.server.by_user
    return int(sum(t.nbytes * (share if name in rows else 1) for name, t in server.kept.items()))


def _worst_pass(stage: Rehearsal, rows: tuple[int, ...], portions: Portions) -> tuple[int, int]:
    """Peak bytes of a step of a cohort, and how many of them are its gradients.

    Of several phases that which trains most tensors: the others keep the same activations, or fewer.
    """
    layout = stage.steps.model.layout
    if (rows, portions) not in stage.known:
        steps = stage.in_portions(portions)
        phases = sorted(stage.federation.clients.phases, key=lambda phase: layout.touching(phase.roles).columns)
        peak = step_peak(stage, rows, phases[-1], steps) if phases else (0, 0)
        if not phases or steps.feed.scores_more:
            peak = max(peak, (_evaluation_peak(stage, rows, steps), 0))
        stage.known[rows, portions] = peak
    return stage.known[rows, portions]


def step_peak(stage: Rehearsal, rows: Sequence[int], phase: Phase, steps: Steps | None = None) -> tuple[int, int]:
    """Peak bytes of one optimiser step of a phase, micro-batches and update, and the bytes of its gradients."""
    steps, cohort = steps or stage.steps, stage.cohort(rows)
    most = TRACED_BATCHES * steps.portions.sequences
    drawn = empty_batch(stage, len(rows), min(stage.federation.clients.batch_size, most))
    examples = empty_batch(stage, len(rows), steps.portions.sequences)
    hidden = steps.noised is not None and steps.noised.applies(phase, steps.model.layout)
    with quietly(), _telling(stage), LiveBytes() as live:
        if hidden:
            gradients = _hidden(cohort, phase, steps, drawn, examples)
        else:
            gradients = steps.gradient(cohort, drawn, phase)[1]
        size = sum(gradient.nbytes for gradient in gradients.values())
        steps.descend(phase, cohort, gradients, 0)
    return live.peak, size


def _hidden(cohort: Cohort, phase: Phase, steps: Steps, drawn: Tensor, examples: Tensor) -> Tree:
    """As :meth:`comingle.training.privacy.Noised.step`: single examples' gradients beside those of what is a user's
    own.

    Passes are full, whoever is drawn; the noise itself is of one user at a time, and no larger than the sums.
    """
    noised, model, users = steps.noised, steps.model, len(cohort.rows)
    assert noised is not None
    layout, leaves, copied = model.layout, noised.leaves(phase, model.layout), max(cohort.rows) >= steps.trainers
    names = noised.alone(phase, layout, everything=copied)
    own = steps.gradient(cohort, drawn, phase, names=names)[1] if names else Tree()
    tensors, sums = restrict(model.tensors(cohort.part.rows), layout, layout.roles - noised.own(layout)), Tree()
    for _ in range(TRACED_BATCHES):
        found, _ = noised.sums_over(model, steps.feed, tensors, leaves, cohort.owners, examples)
        sums = {name: t + sums[name] if name in sums else t for name, t in found.items()}
    made = {name: (t + torch.zeros_like(t)).to(cohort.part.rows.dtype) for name, t in sums.items()}
    return noised.joined(layout, phase, own, made, range(users), users)


@torch.no_grad()
def _evaluation_peak(stage: Rehearsal, rows: Sequence[int], steps: Steps) -> int:
    """One pass of an evaluation, which is all that a method without training does."""
    clients = stage.federation.clients
    count = steps.feed.scored_at_once(clients.users, steps.portions)
    inputs = empty_inputs(stage, len(rows), count)
    with quietly(), _telling(stage), LiveBytes() as live:
        Scorer(steps=steps).predict(clients.models, rows, inputs)
    return live.peak


def empty_batch(stage: Rehearsal, users: int, count: int) -> Int[Tensor, "users count ..."]:
    """A batch to train on, as the engine draws it: windows without data, or the first sample again and again."""
    return stage.steps.feed.blank(users, count, lambda meta: stage.fakes.of(meta, stage.steps.model.device))


def empty_inputs(stage: Rehearsal, users: int, count: int) -> Int[Tensor, "users count _"] | Float[Tensor, "users ..."]:
    """What :meth:`Scorer.predict` takes, without data."""
    return stage.steps.feed.blank_inputs(users, count, lambda meta: stage.fakes.of(meta, stage.steps.model.device))


def _telling(stage: Rehearsal) -> AbstractContextManager[None]:
    """Within, the form that a net has takes tensors without data, where it can be asked what it takes."""
    form = getattr(stage.steps.model, "form", None)
    return getattr(form, "telling", nullcontext)()


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warning that it looks at ``.grad`` of something in the middle, which it does itself here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
        yield
