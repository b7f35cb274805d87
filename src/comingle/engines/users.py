"""What users have: their rows, data and optimiser state, who of them is scored, and cohorts of some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comingle.config.settings import MEMORY, Training
from comingle.data.populations import Numbers, drawn, names_of
from comingle.engines.cohort import Cohort
from comingle.engines.feeds import Feed
from comingle.engines.noised import noised_steps
from comingle.engines.private import shield_of
from comingle.engines.scoring import Scorer
from comingle.engines.state import State, Stored, draw, initial_state, true_clusters
from comingle.engines.steps import Steps
from comingle.engines.training import Portions
from comingle.methods.base import Method
from comingle.models.hardware import require_bytes
from comingle.models.model import Model
from comingle.protocol.messages import RESIDUAL
from comingle.utils.errors import DataError
from comingle.utils.registry import Registry
from comingle.utils.trees import CLIENT_ROUTER, restrict

LISTED = 100
"""Of so many users who were skipped events tell."""

MESSAGES_AT_ONCE = 2**24
"""Of so many numbers messages are made at once, where all users have one."""

Population = Sequence[Any]
"""Users have a name, and what they train, validate and test on."""

STORES: Registry[Any] = Registry(
    "comingle.stores",
    {"disk": "comingle.store.opening:on_disk", "disk-bf16": "comingle.store.opening:on_disk_bf16"},
)
"""Classes that keep users' tensors outside of memory, by the value of ``runtime.store``."""


def batch_size(method: Method, training: Training, users: int) -> int:
    """Sequences or samples in a trainer's step: a pooled one sees as many as its users would have together."""
    return training.batch_size * (users if method.placement.pooled else 1)


class Users:
    """Everybody's tensors over one frozen base.

    ``trainers`` own rows of the state: the users themselves, or the single pooled trainer of an upper bound; where a
    method keeps several copies, row ``copy * trainers + i`` is a copy of trainer i. ``users`` are always the real ones;
    ``row_of`` maps each to the row whose model it uses. Without ``reads``, nobody's data is asked for before something
    needs it, and then ``feed`` may be what makes the feed. ``skipped`` are users who were left out beforehand, and why;
    ``skipped_rows`` is the number of rows left out.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        training: Training,
        *,
        trainers: Population,
        users: Population,
        feed: Feed | Callable[[], Feed],
        reads: bool = True,
        skipped: Mapping[str, str] = MappingProxyType({}),
        skipped_rows: int = 0,
    ):
        self.model, self.method, self.training = model, method, training
        self.trainers, self.users, self.skipped = trainers, users, skipped
        self.skipped_rows = skipped_rows
        self.names = names_of(trainers)
        self.numbers = Numbers(self.names)
        self.everybody = self.names  # where others have theirs elsewhere, they too
        self.rows = method.placement.copies * len(trainers)
        last = self.rows - len(trainers)
        self.row_of: Sequence[int] = [last] * len(users) if method.placement.pooled else range(last, last + len(users))
        self.batch_size = batch_size(method, training, len(users))
        self.stopped_after: int | None = None  # where the privacy budget allows no more rounds
        self.steps = Steps(model=model, method=method, training=training, trainers=len(trainers), source=feed)
        # Where nobody has more than one expert there is no router, and nothing to do in its phase.
        self.phases = [phase for phase in method.client.phases if model.layout.touching(phase.roles).slots]
        self.scorer = Scorer(steps=self.steps)
        self.shares = bool(model.layout.mask(method.shared).any())
        self.shield = shield_of(training) if self.shares else None
        self.steps.noised = noised_steps(model, method, training) if self.shares else None
        self.state = self._started()
        self.initial = self.state.rows.clone() if method.client.resets else self.state.rows[:0]
        self.resized()
        if training.select == "best":
            if reads:
                self.require_validation(any(len(user.valid) for user in self.users))
            self.state.remember(0)

    @property
    def feed(self) -> Feed:
        """The trainers' data."""
        return self.steps.feed

    @property
    def portions(self) -> Portions:
        """What goes through the model at once."""
        return self.steps.portions

    @property
    def left_out(self) -> dict[str, Any]:
        """Skipped users (of many some) and the number of skipped rows, for the start event and the metrics."""
        shown = dict(islice(self.skipped.items(), LISTED))
        more = {"skipped": len(self.skipped)} if len(shown) < len(self.skipped) else {}
        rows = {"skipped_rows": self.skipped_rows} if self.skipped_rows else {}
        return ({"skipped_users": shown, **more} if shown else {}) | rows

    # ---------------------------------------------------------------- state

    def _started(self) -> State:
        if self.training.store != MEMORY:
            return STORES[self.training.store](self)
        what = f"method {self.method.name}: the trained tensors of {len(self.trainers)} users"
        advice = "; runtime.store: disk keeps those elsewhere who do not take part"
        require_bytes(what, 4 * self.rows * self.model.layout.columns, advice)
        return self.begin(range(self.rows))

    @cached_property
    def _first(self) -> Tensor:
        return draw(self.model.layout, self.training.seed, "server")

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
            seed=self.training.seed,
            first=self._first,
            moments=self.training.experts.moments | self.training.router.moments,
            accumulates=method.client.accumulates,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        shared = restrict(layout.views(state.rows), layout, method.shared)
        for part in method.client.parts:
            state.kept |= part.start(names, self.training.seed) | part.start_like(shared)
        if self.training.uploads == "int8":
            state.kept |= {RESIDUAL + name: torch.zeros_like(t) for name, t in shared.items()}
        if self.shield is not None:
            state.kept |= self.shield.start(shared)
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

    def resized(self) -> None:
        """Take note of the users' ranks, which are part of the state."""
        if isinstance(self.state, Stored):
            self.mask, ranks = self.model.only([0]).mask(), self.model.ranks
            alike = isinstance(self.method.placement.specialists, int) and bool((ranks == ranks[0]).all())
            self.padded = self._resizes or not (alike and bool(self.mask.all()))
            return
        masks = [self.model.mask(r) for r in self.state.ranks.cpu().view(-1, len(self.trainers))]
        self.mask: Bool[Tensor, "rows columns"] = torch.cat(masks) if len(masks) > 1 else masks[0]
        self.padded = not bool(self.mask.all())
        if self.padded:
            _cut(self.state, self.mask)

    @property
    def _resizes(self) -> bool:
        return any(part.resizes for part in self.method.client.parts)

    def cut(self, cohort: Cohort) -> None:
        """Users whose ranks have changed have tensors as large as these; in memory :meth:`resized` does it for all."""
        if self._resizes and isinstance(self.state, Stored):
            _cut(cohort.part, self.masks(cohort.rows, cohort.part))

    def masks(self, rows: Sequence[int], part: State) -> Bool[Tensor, "some columns"]:
        """True where users really have a parameter; ``part`` is their state."""
        if isinstance(self.state, Stored):
            return self.model.only(self.owners(rows)).mask(part.ranks.cpu())
        return self.mask[list(rows)]

    def owners(self, rows: Sequence[int]) -> list[int]:
        """The trainer to whom each row belongs."""
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Name of the trainer to whom a row belongs."""
        return self.names[row % len(self.trainers)]

    @property
    def at_once(self) -> int:
        """Of how many users messages are made at once, where there are more."""
        users = self.portions.users
        return users * max(1, MESSAGES_AT_ONCE // (users * self.model.layout.columns))

    @cached_property
    def scored(self) -> Sequence[int]:
        """The users who are evaluated, by number: all, or those who were drawn once for the whole run."""
        count = self.training.evaluate_users
        if count is None or count >= len(self.everybody):
            return range(len(self.users))
        chosen = drawn(self.everybody, count, self.training.seed, "evaluation")
        if len(self.everybody) == len(self.users):
            return chosen
        return Numbers(names_of(self.users)).there([self.everybody[number] for number in chosen])

    @property
    def scored_users(self) -> list[Any]:
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
            initial=self._began,
            layout=self.model.layout,
            rows=rows,
            owners=self.owners(rows),
            names=[self.name(row) for row in rows],
            part=part,
            round_number=round_number,
            before=part.rows.clone() if looks_back else None,
            mask=self.masks(rows, part) if self.padded else None,
        )

    def _began(self, rows: Sequence[int]) -> Float[Tensor, "some columns"]:
        return self.begin(rows).rows if isinstance(self.state, Stored) else self.initial[list(rows)]


def _cut(state: State, mask: Bool[Tensor, "some columns"]) -> None:
    for rows in (state.rows, state.first, state.second):
        rows.mul_(mask[:, : rows.shape[1]])
