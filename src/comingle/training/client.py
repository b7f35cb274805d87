"""Clients: their users' rows, data and optimizer state; download, local rounds, upload.

Users are a batch dimension over one frozen base; nothing couples them. A user on a machine of its own is one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.config.settings import MEMORY
from comingle.data.populations import Numbers, drawn, names_of
from comingle.methods.base import ClientHook, Method
from comingle.models.hardware import require_bytes
from comingle.models.model import Model
from comingle.privacy.base import (
    PrivacyMechanism,
    change_updates,
    keep_references,
    protect_uploads,
    start_references,
    without_bound,
)
from comingle.protocol.messages import (
    COUNT,
    LOSS,
    LOWEST,
    RESIDUAL,
    Download,
    Upload,
    compress_kept,
    fill_ranks,
    insert_own,
)
from comingle.protocol.wire import packed_bytes
from comingle.training.batch_sources import AnyScore, AnyUser, BatchSource
from comingle.training.cohort import Cohort, Models, Scorer
from comingle.training.events import JsonObject
from comingle.training.plan import client_mechanisms
from comingle.training.settings import Portions, RunPlan, cohorts
from comingle.training.state import State, draw, initial_state, true_clusters
from comingle.training.steps import TUNING, Steps, diverged, find_broken, private_steps, within_memory
from comingle.utils.errors import DataError
from comingle.utils.registry import Registry
from comingle.utils.trees import CLIENT_ROUTER, Tree, assign, restrict

MAX_LISTED_USERS = 100
"""Of so many users who were skipped events tell."""

MAX_MESSAGE_VALUES = 2**24
"""Of so many numbers messages are made at once, where all users have one."""

Population = Sequence[AnyUser]
"""Users have a name, and what they train, validate and test on."""

STORES: Registry[Any] = Registry(
    "comingle.stores",
    {
        "disk": "comingle.training.storage.disk:on_disk",
        "disk-bf16": "comingle.training.storage.disk:on_disk_bf16",
    },
)
"""Classes that keep users' tensors outside of memory, by the value of ``runtime.store``."""


def batch_size(plan: RunPlan, users: int) -> int:
    """Sequences or samples in a trainer's step: a pooled one sees as many as its users would have together."""
    return plan.training.batch_size * (users if plan.method.placement.pooled else 1)


class Roster:
    """Who takes part in a run.

    Args:
        plan: The plan of the run.
        trainers: Owners of rows of the state: the users, or the one trainer of pooled data. If a method keeps several
            copies, row ``copy * len(trainers) + i`` is a copy of trainer i.
        users: The users.
        skipped: Users who were left out beforehand, and why.
        skipped_rows: Number of rows of data that were left out.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        trainers: Population,
        users: Population,
        skipped: Mapping[str, str] = MappingProxyType({}),
        skipped_rows: int = 0,
    ):
        placement = plan.method.placement
        self.plan, self.trainers, self.users = plan, trainers, users
        self.skipped, self.skipped_rows = skipped, skipped_rows
        self.names = names_of(trainers)
        self.numbers = Numbers(self.names)
        self.population_names = self.names  # where others have theirs elsewhere, they too
        self.rows = placement.copies * len(trainers)
        last = self.rows - len(trainers)
        self.row_of: Sequence[int] = [last] * len(users) if placement.pooled else range(last, last + len(users))
        """The row whose model each user has."""
        self.batch_size = batch_size(plan, len(users))

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.plan.method

    @property
    def left_out(self) -> JsonObject:
        """Skipped users (of many some) and the number of skipped rows, for the start event and the metrics."""
        shown = dict(islice(self.skipped.items(), MAX_LISTED_USERS))
        more = {"skipped": len(self.skipped)} if len(shown) < len(self.skipped) else {}
        rows = {"skipped_rows": self.skipped_rows} if self.skipped_rows else {}
        return ({"skipped_users": shown, **more} if shown else {}) | rows

    def owners(self, rows: Sequence[int]) -> list[int]:
        """The trainer to whom each row belongs."""
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Name of the trainer to whom a row belongs."""
        return self.names[row % len(self.trainers)]

    @cached_property
    def scored(self) -> Sequence[int]:
        """The users who are evaluated, by number: all, or those who were drawn once for the whole run."""
        count = self.plan.evaluation.users
        if count is None or count >= len(self.population_names):
            return range(len(self.users))
        chosen = drawn(self.population_names, count, self.plan.seed, "evaluation")
        if len(self.population_names) == len(self.users):
            return chosen
        return Numbers(names_of(self.users)).there([self.population_names[number] for number in chosen])

    @property
    def scored_users(self) -> list[AnyUser]:
        """The same users themselves."""
        return [self.users[number] for number in self.scored]

    @property
    def scored_rows(self) -> list[int]:
        """The rows whose models they use."""
        return [self.row_of[number] for number in self.scored]

    @property
    def scored_trainers(self) -> Sequence[int]:
        """Those who train these models."""
        return [0] if self.method.placement.pooled else self.scored


class Users(Roster):
    """The users' tensors over one frozen base model.

    Args:
        model: The model that all users train.
        plan: The plan of the run.
        trainers: As of :class:`Roster`.
        users: As of :class:`Roster`.
        batch_source: The trainers' batch source, or what makes it when something needs it.
        reads: Whether users' data may be read now.
        skipped: As of :class:`Roster`.
        skipped_rows: As of :class:`Roster`.
    """

    def __init__(
        self,
        model: Model,
        plan: RunPlan,
        *,
        trainers: Population,
        users: Population,
        batch_source: BatchSource | Callable[[], BatchSource],
        reads: bool = True,
        skipped: Mapping[str, str] = MappingProxyType({}),
        skipped_rows: int = 0,
    ):
        super().__init__(plan, trainers=trainers, users=users, skipped=skipped, skipped_rows=skipped_rows)
        self.model, method = model, plan.method
        self.stopped_after: int | None = None  # where the privacy budget allows no more rounds
        self.steps = Steps(model=model, plan=plan, trainers=len(trainers), source=batch_source)
        # Where nobody has more than one expert there is no router, and nothing to do in its phase.
        self.phases = [phase for phase in method.client.phases if model.layout.touching(phase.roles).slots]
        self.scorer = Scorer(steps=self.steps)
        self.shares = bool(model.layout.mask(method.shared).any())
        self.mechanisms: tuple[PrivacyMechanism, ...] = client_mechanisms(plan) if self.shares else ()
        self.steps.private = private_steps(self.mechanisms, model, plan)
        self.state = self._started()
        self.initial = self.state.rows.clone() if method.client.resets else self.state.rows[:0]
        self.update_masks()
        if plan.evaluation.select == "best":
            if reads:
                self.require_validation(any(len(user.valid) for user in self.users))
            self.state.remember(0)

    @property
    def batch_source(self) -> BatchSource:
        """The trainers' data."""
        return self.steps.batch_source

    @property
    def portions(self) -> Portions:
        """What goes through the model at once."""
        return self.steps.portions

    # ---------------------------------------------------------------- state

    def _started(self) -> State:
        if self.plan.runtime.store != MEMORY:
            return STORES[self.plan.runtime.store](self)
        what = f"method {self.method.name}: the trained tensors of {len(self.trainers)} users"
        advice = "; runtime.store: disk keeps those elsewhere who do not take part"
        require_bytes(what, 4 * self.rows * self.model.layout.columns, advice)
        return self.begin(range(self.rows))

    @cached_property
    def _first(self) -> Tensor:
        return draw(self.model.layout, self.plan.seed, "server")

    def begin(self, rows: Sequence[int]) -> State:
        """What some rows are before the first round: it follows from the seed and whose they are, and nothing else."""
        layout, method, owners = self.model.layout, self.method, self.owners(rows)
        names, model = [self.names[owner] for owner in owners], self.model.only(owners)
        state = initial_state(
            layout,
            model.mask(),
            names=names,
            local=layout.mask(method.client.trained) & ~layout.mask(method.shared),
            ranks=model.ranks,
            seed=self.plan.seed,
            first=self._first,
            moments=self.plan.training.experts.moments | self.plan.training.router.moments,
            accumulates=method.client.accumulates,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        shared = restrict(layout.views(state.rows), layout, method.shared)
        for part in method.client.parts:
            state.kept |= part.start(names, self.plan.seed) | part.start_like(shared)
        if self.plan.training.uploads == "int8":
            state.kept |= {RESIDUAL + name: torch.zeros_like(t) for name, t in shared.items()}
        if change_updates(self.mechanisms) and self.plan.privacy is not None:
            state.kept |= start_references(shared, self.plan.privacy.first_bound)
        if method.server.first_download:
            state.versions -= 1
        if (mixture := method.placement.mixture) is not None and mixture.optimal:
            known = [getattr(self.trainers[owner], "cluster", None) for owner in owners]
            layout.views(state.rows)[CLIENT_ROUTER].copy_(true_clusters(method.name, known, mixture.clusters))
        return state

    def require_validation(self, there: bool) -> None:
        """Whether somebody has validation data.

        Raises:
            DataError: nobody has.
        """
        if not there:
            raise DataError(
                "evaluation.select: best needs validation data and no user has any; give some (data.task.valid, "
                "data.questions.valid or a valid split), or select: last"
            )

    def update_masks(self) -> None:
        """Take note of the users' ranks, which are part of the state."""
        if not self.state.in_memory:
            self.mask, ranks = self.model.only([0]).mask(), self.model.ranks
            alike = isinstance(self.method.placement.specialists, int) and bool((ranks == ranks[0]).all())
            self.padded = self._resizes or not (alike and bool(self.mask.all()))
            return
        masks = [self.model.mask(r) for r in self.state.ranks.cpu().view(-1, len(self.trainers))]
        self.mask: Bool[Tensor, "rows columns"] = torch.cat(masks) if len(masks) > 1 else masks[0]
        self.padded = not bool(self.mask.all())
        if self.padded:
            _zero_masked(self.state, self.mask)

    @property
    def _resizes(self) -> bool:
        return any(part.resizes for part in self.method.client.parts)

    def apply_masks(self, cohort: Cohort) -> None:
        """Zero the padding of users whose ranks have changed; in memory :meth:`update_masks` does so for all users."""
        if self._resizes and not self.state.in_memory:
            _zero_masked(cohort.part, self.masks(cohort.rows, cohort.part))

    def masks(self, rows: Sequence[int], part: State) -> Bool[Tensor, "some columns"]:
        """True where users really have a parameter; ``part`` is their state."""
        if not self.state.in_memory:
            return self.model.only(self.owners(rows)).mask(part.ranks.cpu())
        return self.mask[list(rows)]

    @property
    def users_per_message(self) -> int:
        """Of how many users messages are made at once, where there are more."""
        users = self.portions.users
        return users * max(1, MAX_MESSAGE_VALUES // (users * self.model.layout.columns))

    def cohort(
        self, rows: list[int], round_number: int, *, looks_back: bool = False, state: State | None = None
    ) -> Cohort:
        """Some users to be worked on together; who ``looks_back`` remembers what the users have now.

        ``state`` is what they are taken from, where that is not all that the users have.
        """
        part = (state or self.state).take(rows)
        return Cohort(
            steps=self.steps,
            scorer=self.scorer,
            trainers=self.trainers,
            initial=self._initial_rows,
            layout=self.model.layout,
            rows=rows,
            owners=self.owners(rows),
            names=[self.name(row) for row in rows],
            part=part,
            round_number=round_number,
            before=part.rows.clone() if looks_back else None,
            mask=self.masks(rows, part) if self.padded else None,
        )

    def _initial_rows(self, rows: Sequence[int]) -> Float[Tensor, "some columns"]:
        return self.initial[list(rows)] if self.state.in_memory else self.begin(rows).rows


def _zero_masked(state: State, mask: Bool[Tensor, "some columns"]) -> None:
    for rows in (state.rows, state.first, state.second):
        rows.mul_(mask[:, : rows.shape[1]])


class Clients(Users):
    """What everybody receives, sends, and scores."""

    # ---------------------------------------------------------------- messages

    def stale(self, version: int, members: Sequence[int]) -> list[int]:
        """Whoever of these has not received what the server has had since ``version``."""
        versions = self.state.versions[list(members)].tolist()
        return [member for member, received in zip(members, versions, strict=True) if received < version]

    @torch.no_grad()
    def receive(self, download: Download) -> None:
        """Everybody who is addressed takes one model, or makes one of several."""
        members = self.numbers(download.users)
        layout, state = self.model.layout, self.state.without_moments()
        cohort = self.cohort(members, download.version, state=state)
        bounds, tensors = without_bound(download.tensors)
        models, made = self._completed(cohort, replace(download, tensors=fill_ranks(tensors, layout))), None
        for part in self.method.client.parts:
            made = part.receive(cohort, models, download.senders) if made is None else made
        taken = {name: t[:, 0] for name, t in models.items()} if made is None else made
        assign(cohort.tensors, layout, self.method.received, taken)
        if cohort.mask is not None:  # a server may answer users of unequal size alike
            cohort.part.rows.mul_(cohort.mask)
        if change_updates(self.mechanisms):
            keep_references(cohort.kept, restrict(cohort.tensors, layout, self.method.shared), bounds)
        for part in self.method.client.parts:
            part.received(cohort)
        cohort.part.versions.fill_(download.version)
        state.put(members, cohort.part)

    def receive_verdict(self, verdict: Download) -> None:
        """Keep what everybody has, if the server says that it is the best so far."""
        if bool(verdict.tensors[LOWEST].all()):
            self.state.remember(verdict.version)

    def _completed(self, cohort: Cohort, download: Download) -> Tree:
        """What peers have sent, with what a wire left out because its receiver has it."""
        models = download.tensors
        if len(download.senders) <= next(iter(models.values())).shape[1]:
            return models
        at = [download.senders.index(name) for name in cohort.names]
        return insert_own(models, restrict(cohort.tensors, self.model.layout, self.method.shared), at)

    def upload(self, members: Sequence[int], round_number: int, losses: Tree, *, counts: bool = False) -> Upload:
        """What these users send after their local steps: copies of what is shared, and what they report.

        What rounding takes away is kept for their next upload, unless this one is only made so that it ``counts``.
        """
        state = self.state.without_moments()
        cohort = self.cohort(list(members), round_number, state=state)
        tensors = restrict(cohort.tensors, self.model.layout, self.method.shared)
        copies = {name: t.clone() for name, t in tensors.items()}
        reports = losses if self.plan.privacy is None else {}
        if change_updates(self.mechanisms):
            amounts = [len(self.trainers[owner].train) for owner in cohort.owners]
            copies, reports = protect_uploads(self.mechanisms, copies, cohort, amounts, round_number)
        form, places = self.plan.training.uploads, list(range(len(cohort.rows)))
        sent = compress_kept(copies, form, cohort.kept, places, remembers=not counts)
        if form == "int8" and not counts:
            state.put(cohort.rows, cohort.part)
        return Upload(
            round=round_number,
            users=tuple(cohort.names),
            tensors=sent,
            ranks=cohort.ranks.cpu().clone(),
            reports={name: t.clone() for name, t in self._reports(cohort, members).items()} | reports,
        )

    def _reports(self, cohort: Cohort, members: Sequence[int]) -> Tree:
        counts = {COUNT: torch.tensor([len(self.trainers[member].train) for member in members])}
        reports = counts if self.plan.training.weighting != "uniform" and self.plan.privacy is None else {}
        for part in self.method.client.parts:
            reports = reports | part.report(cohort)
        return reports

    # ---------------------------------------------------------------- scores

    @property
    def models(self) -> Models:
        """Everybody's tensors as they are now, by row."""
        owners = range(self.rows) if self.rows == len(self.trainers) else self.owners(range(self.rows))
        return Models(rows=self.state.rows_of, owners=owners)

    def evaluate(self) -> Sequence[AnyScore]:
        """Test score of whoever is evaluated with the model that it has now, and how much each of its experts said."""
        if not self.scored:
            return []
        return self.scorer.examine(self.models, [user.test for user in self.scored_users], self.scored_rows)

    def validate(self) -> dict[str, float]:
        """Mean loss in nats on the validation data of all who are evaluated and have any."""
        pairs = zip(self.scored_rows, self.scored_users, strict=True)
        frozen_columns = [(row, user) for row, user in pairs if len(user.valid)]
        if not frozen_columns:
            return {}
        scores = self.scorer.score(
            self.models, [user.valid for _, user in frozen_columns], [row for row, _ in frozen_columns]
        )
        return {user.name: score.mean_loss for (_, user), score in zip(frozen_columns, scores, strict=True)}

    @property
    def chosen_round(self) -> int:
        """After how many rounds users have had the models with which the run ends."""
        if self.state.best:
            return int(self.state.best["round"])
        return self.rounds_done

    @property
    def rounds_done(self) -> int:
        """After how many rounds the run ends: as planned, or before the privacy budget would be exceeded."""
        return self.plan.training.rounds * self.method.trains if self.stopped_after is None else self.stopped_after

    def choose(self) -> None:
        """End with the models of the best round, where that is asked for."""
        if self.state.best:
            self.state = self.state.restored_best()
            self.update_masks()

    def trainable_parameters(self) -> list[int]:
        """Number of parameters that each user who is evaluated really trains."""
        trained = self.model.layout.mask(self.method.client.trained).to(self.mask.device)
        copies, counts = range(self.method.placement.copies), dict[int, int]()
        for some in cohorts(self.scored_trainers, self.users_per_message):
            rows = [copy * len(self.trainers) + trainer for copy in copies for trainer in some]
            masks = self.masks(rows, self.state.without_moments().take(rows))
            counts |= dict(zip(some, (masks & trained).sum(1).view(len(copies), -1).sum(0).tolist(), strict=True))
        return [counts[owner] for owner in self.owners(self.scored_rows)]

    def upload_bytes(self) -> list[int]:
        """Bytes that each of them sends in an exchange in which it takes part; 0 where there is none."""
        if not self.shares:
            return [0] * len(self.scored)
        if (sums := self.plan.sums) is not None:
            size = self.model.layout.count(self.method.shared)
            return [sums.sent_bytes(self.name(row), size) for row in self.scored_rows]
        sent: dict[int, int] = {}
        for some in cohorts(self.scored_trainers, self.users_per_message):
            message = self.upload(some, 1, {LOSS: torch.zeros(len(some))}, counts=True)
            sent |= dict(zip(some, packed_bytes(message), strict=True))
        return [sent[owner] for owner in self.owners(self.scored_rows)]


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


EMPTY_ROUND = LocalRound(losses={}, rejected={}, tokens=0, seconds=0.0)
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
    clients.steps.known_suspects.clear()
    losses: dict[int, float] = {}
    rejected: dict[int, str] = {}
    copies = range(method.placement.copies)
    working = [copy * len(clients.trainers) + member for copy in copies for member in members]
    place = {member: i for i, member in enumerate(members)}
    firsts = clients.state.rows_of(members) if method.client.looks_across else None
    groups = cohorts(working, clients.portions.users)
    for rows, following in zip(groups, [*groups[1:], []], strict=True):
        cohort = clients.cohort(rows, round_number, looks_back=method.client.looks_back)
        clients.state.prefetch(following)
        cohort.across = None if firsts is None else firsts[[place[owner] for owner in cohort.owners]]
        steps = torch.tensor([clients.batch_source.steps(owner) for owner in cohort.owners])
        losses_of_steps = _work(clients, cohort, steps, tick)
        broken = find_broken(losses_of_steps, cohort.part.rows, round_number)
        _drop_diverged(clients, cohort, broken)
        for part in method.client.parts:
            part.end(cohort)
        clients.apply_masks(cohort)
        clients.state.put(rows, cohort.part)
        losses |= dict(zip(cohort.owners, (losses_of_steps.sum(0) / steps).tolist(), strict=True))
        rejected |= {cohort.owners[user]: what for user, what in broken.items()}
    if any(part.resizes for part in method.client.parts):
        clients.update_masks()
    seen = len(copies) * sum(clients.batch_source.seen(member) for member in members)
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


def _drop_diverged(clients: Clients, cohort: Cohort, broken: dict[int, str]) -> None:
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
    last = clients.plan.training.rounds - 1
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
    parts = [part for part in clients.method.client.parts if type(part).settle is not ClientHook.settle]
    trainers, copies = len(clients.trainers), clients.method.placement.copies
    some = range(trainers) if ends else clients.scored_trainers
    everything = [copy * trainers + trainer for copy in range(copies) for trainer in some] if parts else []
    for rows in cohorts(everything, clients.portions.users):
        cohort = clients.cohort(rows, clients.plan.training.rounds, state=clients.state.without_moments())
        for part in parts:
            part.settle(cohort)
        clients.state.put(rows, cohort.part)


def finish(clients: Clients) -> None:
    """What users do once, after the last exchange: their last copies become their models."""
    trainers, copies = len(clients.trainers), clients.method.placement.copies
    parts = clients.method.client.finishing
    for some in cohorts(range(trainers), clients.users_per_message) if parts else ():
        everything = [copy * trainers + trainer for copy in range(copies) for trainer in some]
        for part in parts:
            cohort = clients.cohort(everything, clients.plan.training.rounds)
            cohort.part.rows[-len(some) :] = part.finish(cohort)
            clients.state.put(everything, cohort.part)
