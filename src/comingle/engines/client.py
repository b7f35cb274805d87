"""The client half: users' rows, data and optimiser state, and all that users do with them. Nothing of the server's.

Users are a batch dimension over one frozen base; nothing couples them. A user on a machine of its own is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from comingle.engines.cohort import Cohort
from comingle.engines.feeds import Feed
from comingle.engines.noised import noised_steps
from comingle.engines.private import shield_of
from comingle.engines.scoring import AnyScore, Models, Scorer
from comingle.engines.settings import Training
from comingle.engines.state import State, initial_state, true_clusters
from comingle.engines.steps import Steps
from comingle.engines.training import Portions
from comingle.errors import DataError
from comingle.methods.base import Method
from comingle.models.hardware import require_bytes
from comingle.models.model import Model
from comingle.privacy.users import without_bound
from comingle.protocol.compression import RESIDUAL, compress_kept
from comingle.protocol.messages import COUNT, LOSS, LOWEST, Download, Upload, fill_ranks, insert_own
from comingle.protocol.wire import packed_bytes
from comingle.trees import CLIENT_ROUTER, Tree, assign, restrict

Population = Sequence[Any]
"""Users have a name, and what they train, validate and test on."""


def batch_size(method: Method, training: Training, users: int) -> int:
    """Sequences or samples in a trainer's step: a pooled one sees as many as its users would have together."""
    return training.batch_size * (users if method.placement.pooled else 1)


class Clients:
    """Everybody's tensors over one frozen base.

    ``trainers`` own rows of the state: the users themselves, or the single pooled trainer of an upper bound; where a
    method keeps several copies, row ``copy * trainers + i`` is a copy of trainer i. ``users`` are always the real ones;
    ``row_of`` maps each to the row whose model it uses. Without ``reads``, nobody's data is asked for before something
    needs it, and then ``feed`` may be what makes the feed. ``skipped`` are users who were left out beforehand, and why.
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
    ):
        self.model, self.method, self.training = model, method, training
        self.trainers, self.users, self.skipped = list(trainers), list(users), dict(skipped)
        self.everybody = [trainer.name for trainer in trainers]  # where others have theirs elsewhere, they too
        last = (method.placement.copies - 1) * len(trainers)
        self.row_of = [last] * len(users) if method.placement.pooled else list(range(last, last + len(users)))
        self.batch_size = batch_size(method, training, len(users))
        self.stopped_after: int | None = None  # where the privacy budget allows no more rounds
        self.steps = Steps(model=model, method=method, training=training, trainers=len(trainers), source=feed)
        # Where nobody has more than one expert there is no router, and nothing to do in its phase.
        self.phases = [phase for phase in method.client.phases if model.layout.touching(phase.roles).slots]
        self.scorer = Scorer(steps=self.steps)
        self.shares = bool(model.layout.mask(method.shared).any())
        self.shield = shield_of(training) if self.shares else None
        self.steps.noised = noised_steps(model, method, training) if self.shares else None
        self.state = self._initial()
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
    def left_out(self) -> dict[str, dict[str, str]]:
        """Who was skipped, as the start event and the metrics have it; nothing where nobody was."""
        return {"skipped_users": self.skipped} if self.skipped else {}

    # ---------------------------------------------------------------- state

    def _initial(self) -> State:
        layout, method, copies = self.model.layout, self.method, self.method.placement.copies
        names = [trainer.name for trainer in self.trainers]
        what = f"method {method.name}: the trained tensors of {len(names)} users"
        require_bytes(what, 4 * copies * len(names) * layout.columns)
        state = initial_state(
            layout,
            self.model.mask().repeat(copies, 1),
            names=names * copies,
            local=layout.mask(method.client.trained) & ~layout.mask(method.shared),
            ranks=self.model.ranks.repeat(copies),
            seed=self.training.seed,
            moments=self.training.experts.moments | self.training.router.moments,
            accumulates=method.client.accumulates,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        shared = restrict(layout.views(state.rows), layout, method.shared)
        for part in method.client.parts:
            state.kept |= part.start(names * copies, self.training.seed) | part.start_like(shared)
        if self.training.uploads == "int8":
            state.kept |= {RESIDUAL + name: torch.zeros_like(t) for name, t in shared.items()}
        if self.shield is not None:
            state.kept |= self.shield.start(shared)
        if method.server.first_download:
            state.versions -= 1
        if (mixture := method.placement.mixture) is not None and mixture.optimal:
            known = [getattr(trainer, "cluster", None) for trainer in self.trainers] * copies
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
        masks = [self.model.mask(r) for r in self.state.ranks.cpu().view(-1, len(self.trainers))]
        self.mask: Bool[Tensor, "rows columns"] = torch.cat(masks) if len(masks) > 1 else masks[0]
        self.padded = not bool(self.mask.all())
        if self.padded:
            for rows in (self.state.rows, self.state.first, self.state.second):
                rows.mul_(self.mask[:, : rows.shape[1]])

    def owners(self, rows: Sequence[int]) -> list[int]:
        """The trainer to whom each row belongs."""
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Name of the trainer to whom a row belongs."""
        return self.trainers[row % len(self.trainers)].name

    def numbers(self, names: Sequence[str]) -> list[int]:
        """The trainers of these names."""
        known = {trainer.name: i for i, trainer in enumerate(self.trainers)}
        return [known[name] for name in names]

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
            initial=self.initial,
            layout=self.model.layout,
            rows=rows,
            owners=self.owners(rows),
            names=[self.name(row) for row in rows],
            part=part,
            round_number=round_number,
            before=part.rows.clone() if looks_back else None,
            mask=self.mask[rows] if self.padded else None,
        )

    # ---------------------------------------------------------------- messages

    def behind(self, version: int, members: Sequence[int]) -> list[int]:
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
        if self.shield is not None:
            self.shield.remember(cohort.kept, restrict(cohort.tensors, layout, self.method.shared), bounds)
        for part in self.method.client.parts:
            part.received(cohort)
        cohort.part.versions.fill_(download.version)
        state.put(members, cohort.part)

    def hear(self, verdict: Download) -> None:
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
        cohort = self.cohort(list(members), round_number, state=self.state.without_moments())
        tensors = restrict(self.model.layout.views(self.state.rows), self.model.layout, self.method.shared)
        copies = {name: t[list(members)] for name, t in tensors.items()}
        reports = losses if self.training.privacy is None else {}
        if self.shield is not None:
            amounts = [len(self.trainers[owner].train) for owner in cohort.owners]
            copies, reports = self.shield.protect(copies, cohort, amounts, round_number)
        return Upload(
            round=round_number,
            users=tuple(self.trainers[member].name for member in members),
            tensors=compress_kept(copies, self.training.uploads, self.state.kept, list(members), remembers=not counts),
            ranks=cohort.ranks.cpu().clone(),
            reports={name: t.clone() for name, t in self._reports(cohort, members).items()} | reports,
        )

    def _reports(self, cohort: Cohort, members: Sequence[int]) -> Tree:
        counts = {COUNT: torch.tensor([len(self.trainers[member].train) for member in members])}
        reports = counts if self.training.weighting != "uniform" and self.training.privacy is None else {}
        for part in self.method.client.parts:
            reports = reports | part.report(cohort)
        return reports

    # ---------------------------------------------------------------- scores

    @property
    def models(self) -> Models:
        """Everybody's tensors as they are now, by row."""
        rows = self.state.rows
        return Models(rows=lambda numbers: rows[list(numbers)], owners=self.owners(range(len(rows))))

    def evaluate(self) -> Sequence[AnyScore]:
        """Test score of every user with the model that it has now, and how much each of its experts said."""
        return self.scorer.examine(self.models, [user.test for user in self.users], self.row_of)

    def validate(self) -> dict[str, float]:
        """Mean loss in nats on the validation data of every user who has any."""
        held = [(row, user) for row, user in zip(self.row_of, self.users, strict=True) if len(user.valid)]
        if not held:
            return {}
        scores = self.scorer.score(self.models, [user.valid for _, user in held], [row for row, _ in held])
        return {user.name: score.mean_loss for (_, user), score in zip(held, scores, strict=True)}

    @property
    def chosen_round(self) -> int:
        """After how many rounds users have had the models with which the run ends."""
        if self.state.best:
            return int(self.state.best["round"])
        return self.training.rounds * self.method.trains if self.stopped_after is None else self.stopped_after

    def choose(self) -> None:
        """End with the models of the best round, where that is asked for."""
        if self.state.best:
            self.state = self.state.recalled()
            self.resized()

    def trainable_parameters(self) -> list[int]:
        """Number of parameters that each user really trains."""
        trained = self.model.layout.mask(self.method.client.trained).to(self.mask.device)
        rows = (self.mask & trained).sum(1).view(self.method.placement.copies, -1).sum(0).tolist()
        return [rows[owner] for owner in self.owners(self.row_of)]

    def upload_bytes(self) -> list[int]:
        """Bytes that each user sends in an exchange in which it takes part; 0 where there is none."""
        if not self.shares:
            return [0] * len(self.users)
        if (sums := self.training.sums) is not None:
            return [sums.sent_bytes(self.name(row), self.model.layout.count(self.method.shared)) for row in self.row_of]
        everybody = range(len(self.trainers))
        sent = packed_bytes(self.upload(everybody, 1, {LOSS: torch.zeros(len(everybody))}, counts=True))
        return [sent[owner] for owner in self.owners(self.row_of)]
