"""Clients: the tensors, data and optimizer state of users; they download, take local steps and upload.

Users are a batch dimension over one frozen base model; no operation mixes them. A user on a machine of its own is a
batch of one row.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.config.settings import MEMORY, values_in
from comingle.data.populations import UserNumbers, as_users, draw_users
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
    STEPS,
    Download,
    Upload,
    compress_with_feedback,
    fill_ranks,
    insert_own,
)
from comingle.protocol.wire import packed_bytes
from comingle.training.batch_sources import AnyScore, AnyUser, BatchSource
from comingle.training.cohort import Cohort, Models, Scorer
from comingle.training.plan import client_mechanisms
from comingle.training.settings import PassSize, RunPlan, cohorts
from comingle.training.state import State, draw, initial_state, true_clusters
from comingle.training.steps import TUNING, Steps, diverged, find_broken, private_steps, within_memory
from comingle.utils.errors import DataError
from comingle.utils.records import JsonObject
from comingle.utils.registry import Registry
from comingle.utils.trees import CLIENT_ROUTER, Tree, assign, restrict

if TYPE_CHECKING:
    from comingle.training.kinds.base import DataRequest, Kind, RunData

MAX_LISTED_USERS = 100
"""Largest number of skipped users that the start event and the metrics list by name."""

MAX_MESSAGE_VALUES = 2**24
"""Largest number of tensor entries for which messages are made in one batch."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """Storage of a run's users, tensors and data; this class keeps them in memory.

    Args:
        moments: Dtype of optimiser moments in the store; None for their own.
    """

    moments: torch.dtype | None = None

    def begin(self, clients: Users) -> State:
        """Return the state of all users before the first round, after checking that it fits into memory."""
        what = f"method {clients.method.name}: the trained tensors of {len(clients.trainers)} users"
        advice = "; runtime.store: disk keeps users who are not training on disk"
        require_bytes(what, 4 * clients.rows * clients.model.layout.columns, advice)  # float32
        return clients.begin(range(clients.rows))

    def read(self, kind: Kind, request: DataRequest) -> RunData:
        """Return the users of a recipe.

        Raises:
            ComingleError: See :meth:`comingle.training.kinds.base.Kind.read`.
        """
        return kind.read(request)

    def names(self, folder: Path) -> Sequence[str] | None:
        """Return the names of the users in a run folder; None if they are not stored there."""
        return None


STORES: Registry[Store] = Registry(
    "comingle.stores",
    {
        MEMORY: Store(),
        "disk": "comingle.training.storage.disk:on_disk",
        "disk-bf16": "comingle.training.storage.disk:on_disk_bf16",
    },
)
"""Stores of users' tensors and data, by the value of ``runtime.store``."""


def batch_size(plan: RunPlan, users: int) -> int:
    """Return the largest number of sequences or samples of a trainer in one local step.

    The one trainer of pooled data takes as many as its users would take together.
    """
    sizes = plan.training.batch_size
    if plan.method.placement.pooled:
        return sum(values_in(sizes)) if isinstance(sizes, Mapping) else plan.training.largest_batch_size * users
    return plan.training.largest_batch_size


class Roster:
    """The users and trainers of a run, and the rows of the state that belong to them.

    Args:
        plan: Plan of the run.
        trainers: Owners of the rows: the users, or the one trainer of pooled data. If a method keeps several copies,
            row ``copy * len(trainers) + i`` is a copy of trainer i.
        users: The users.
        skipped: Users who were left out before the run, with the reason.
        skipped_rows: Number of rows of data that were left out.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        trainers: Sequence[AnyUser],
        users: Sequence[AnyUser],
        skipped: Mapping[str, str] = MappingProxyType({}),
        skipped_rows: int = 0,
    ):
        """Assign rows of the state to trainers and users; ``skipped`` has the reason for each user that was left out.

        Trainers own the models: they are the users, or a single one with the data of all users if data is pooled.
        """
        placement = plan.method.placement
        self.plan, self.trainers, self.users = plan, as_users(trainers), as_users(users)
        self.skipped, self.skipped_rows = skipped, skipped_rows
        self.names = self.trainers.names
        self.numbers = UserNumbers(self.names)
        self.population_names = self.names  # of all users of the run, in other processes too
        self.rows = placement.copies * len(trainers)
        first_of_last_copies = self.rows - len(trainers)  # users are evaluated with their last copy
        self.row_of: Sequence[int] = range(first_of_last_copies, first_of_last_copies + len(users))
        """Row that holds the model of each user."""
        if placement.pooled:  # all users have the model of the one trainer
            self.row_of = [first_of_last_copies] * len(users)
        self.batch_size = batch_size(plan, len(users))

    @property
    def method(self) -> Method:
        """Method of the run."""
        return self.plan.method

    @property
    def left_out(self) -> JsonObject:
        """Skipped users, at most :data:`MAX_LISTED_USERS` by name, and the number of skipped rows.

        Part of the start event and of the metrics; empty if nothing was skipped.
        """
        entries: JsonObject = {}
        if self.skipped:
            entries["skipped_users"] = dict(islice(self.skipped.items(), MAX_LISTED_USERS))
        if len(self.skipped) > MAX_LISTED_USERS:
            entries["skipped"] = len(self.skipped)
        if self.skipped_rows:
            entries["skipped_rows"] = self.skipped_rows
        return entries

    def owners(self, rows: Sequence[int]) -> list[int]:
        """Return the number of the trainer that owns each row; a trainer owns one row per copy."""
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Return the name of the trainer that owns a row."""
        return self.names[row % len(self.trainers)]

    @cached_property
    def scored(self) -> Sequence[int]:
        """Numbers of the users who are evaluated: all, or a sample that is drawn once per run."""
        count = self.plan.evaluation.users
        if count is None or count >= len(self.population_names):
            return range(len(self.users))
        sample = draw_users(self.population_names, count, self.plan.seed, "evaluation")
        if len(self.population_names) == len(self.users):
            return sample
        # Other users are in other processes, so numbers among all become numbers among the users here.
        return UserNumbers(self.users.names).existing([self.population_names[number] for number in sample])

    @property
    def scored_users(self) -> list[AnyUser]:
        """Users who are evaluated."""
        return [self.users[number] for number in self.scored]

    @property
    def scored_rows(self) -> list[int]:
        """Rows of the models of the users who are evaluated."""
        return [self.row_of[number] for number in self.scored]

    @property
    def scored_trainers(self) -> Sequence[int]:
        """Numbers of the trainers of the models that are evaluated."""
        return [0] if self.method.placement.pooled else self.scored


class Users(Roster):
    """Tensors of the users over one frozen base model.

    Args:
        model: The model that all users train.
        plan: Plan of the run.
        trainers: See :class:`Roster`.
        users: See :class:`Roster`.
        batch_source: Batch source of the trainers, or a function that makes it on first use.
        reads: Whether users' data may be read now.
        skipped: See :class:`Roster`.
        skipped_rows: See :class:`Roster`.
    """

    def __init__(
        self,
        model: Model,
        plan: RunPlan,
        *,
        trainers: Sequence[AnyUser],
        users: Sequence[AnyUser],
        batch_source: BatchSource | Callable[[], BatchSource],
        reads: bool = True,
        skipped: Mapping[str, str] = MappingProxyType({}),
        skipped_rows: int = 0,
    ):
        """Make the state of all users before the first round, in the store that the recipe chooses.

        ``trainers`` own the models with which ``users`` are evaluated. ``batch_source`` may be a function that makes
        the source on first use. Without ``reads``, the data of users is not read to check for validation data.
        """
        super().__init__(plan, trainers=trainers, users=users, skipped=skipped, skipped_rows=skipped_rows)
        self.model, method = model, plan.method
        self.stopped_after: int | None = None
        """Number of rounds after which the privacy budget was spent; None before."""
        self.steps = Steps(model=model, plan=plan, trainers=len(trainers), source=batch_source)
        # Without a second expert there is no router, so its phase is skipped.
        self.phases = [phase for phase in method.client.phases if model.layout.touching(phase.roles).slots]
        self.scorer = Scorer(steps=self.steps)
        self.shares = bool(model.layout.mask(method.shared).any())  # whether users share any tensor
        self.mechanisms: tuple[PrivacyMechanism, ...] = client_mechanisms(plan) if self.shares else ()
        self.steps.private = private_steps(self.mechanisms, model, plan)
        self.state = STORES[plan.runtime.store].begin(self)
        # Some methods reset tensors to these values.
        self.initial = self.state.rows.clone() if method.client.resets else self.state.rows[:0]
        self.update_masks()
        if plan.evaluation.select == "best":
            if reads:
                self.require_validation(any(len(user.valid) for user in self.users))
            self.state.remember(0)  # the start may turn out to be the best round

    @property
    def batch_source(self) -> BatchSource:
        """Batch source of the trainers."""
        return self.steps.batch_source

    @property
    def pass_size(self) -> PassSize:
        """Number of users and sequences in one forward pass."""
        return self.steps.pass_size

    # ---------------------------------------------------------------- state

    @cached_property
    def _common_initial_values(self) -> Tensor:
        """Initial values ``(columns,)`` that all users share, drawn from the random stream of the server."""
        return draw(self.model.layout, self.plan.seed, "server")

    def begin(self, rows: Sequence[int]) -> State:
        """Return the state of some rows before the first round: parameters, moments, and what hooks keep per user.

        It depends on nothing but the seed and the owners' names, so a store can leave out rows that were never trained.
        """
        layout, method, owners = self.model.layout, self.method, self.owners(rows)
        names, model = [self.names[owner] for owner in owners], self.model.only(owners)
        state = initial_state(
            layout,
            model.mask(),
            names=names,
            local=layout.mask(method.client.trained) & ~layout.mask(method.shared),
            ranks=model.ranks,
            seed=self.plan.seed,
            common_values=self._common_initial_values,
            moments=self.plan.training.experts.moments | self.plan.training.router.moments,
            accumulates=method.client.accumulates,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        shared = restrict(layout.views(state.rows), layout, method.shared)
        for hook in method.client.parts:
            state.kept |= hook.start(names, self.plan.seed) | hook.start_like(shared)
        if self.plan.training.uploads == "int8":  # rounding errors, to add to the next upload
            state.kept |= {RESIDUAL + name: torch.zeros_like(t) for name, t in shared.items()}
        if change_updates(self.mechanisms) and self.plan.privacy is not None:  # the last download, to clip changes
            state.kept |= start_references(shared, self.plan.privacy.first_bound)
        if method.server.first_download:  # version -1: all users download before the first round
            state.versions -= 1
        if (mixture := method.placement.mixture) is not None and mixture.optimal:  # weights from true clusters
            clusters = [getattr(self.trainers[owner], "cluster", None) for owner in owners]
            layout.views(state.rows)[CLIENT_ROUTER].copy_(true_clusters(method.name, clusters, mixture.clusters))
        return state

    def require_validation(self, any_has_data: bool) -> None:
        """Check that at least one user has validation data, which ``evaluation.select: best`` needs.

        Args:
            any_has_data: Whether a user of the run has any, here or in another process.

        Raises:
            DataError: No user has any.
        """
        if not any_has_data:
            raise DataError(
                "evaluation.select: best needs validation data, but no user has any; add some (data.task.valid, "
                "data.questions.valid or a valid split), or use select: last"
            )

    def update_masks(self) -> None:
        """Recompute the masks of padding after ranks were restored or changed; in memory, zero the padding.

        Users with a smaller LoRA rank or fewer experts than others have unused entries in their row, the padding. With
        tensors on disk, masks are made for each cohort, and only whether there is padding is computed here.
        """
        if not self.state.in_memory:
            # One row stands for all if all users have the same numbers of experts and ranks.
            self.mask, ranks = self.model.only([0]).mask(), self.model.ranks
            same_shapes = isinstance(self.method.placement.specialists, int) and bool((ranks == ranks[0]).all())
            # A hook that changes ranks during the run may make padding later.
            self.padded = self._resizes or not (same_shapes and bool(self.mask.all()))
            return
        ranks_by_copy = self.state.ranks.cpu().view(-1, len(self.trainers))
        masks = [self.model.mask(ranks_of_copy) for ranks_of_copy in ranks_by_copy]
        self.mask: Bool[Tensor, "rows columns"] = torch.cat(masks) if len(masks) > 1 else masks[0]
        self.padded = not bool(self.mask.all())
        if self.padded:
            _zero_masked(self.state, self.mask)

    @property
    def _resizes(self) -> bool:
        """True if a client hook of the method changes LoRA ranks during the run."""
        return any(hook.resizes for hook in self.method.client.parts)

    def apply_masks(self, cohort: Cohort) -> None:
        """Zero the padding of a cohort whose ranks may have changed; in memory, :meth:`update_masks` does so."""
        if self._resizes and not self.state.in_memory:
            _zero_masked(cohort.part, self.masks(cohort.rows, cohort.part))

    def masks(self, rows: Sequence[int], part: State) -> Bool[Tensor, "some columns"]:
        """Return a mask that is True where a row has a parameter and False where it is padded.

        Args:
            rows: Numbers of the rows.
            part: State of these rows, with their ranks.
        """
        if not self.state.in_memory:  # there is no mask of all users
            return self.model.only(self.owners(rows)).mask(part.ranks.cpu())
        return self.mask[list(rows)]

    @property
    def users_per_message(self) -> int:
        """Largest number of users whose messages are made in one batch."""
        users = self.pass_size.users
        return users * max(1, MAX_MESSAGE_VALUES // (users * self.model.layout.columns))

    def cohort(
        self, rows: list[int], round_number: int, *, looks_back: bool = False, state: State | None = None
    ) -> Cohort:
        """Return some users as a cohort that is trained in one batch.

        Args:
            rows: Rows of these users in the state; a user has several rows if the method trains copies of its model.
            round_number: The round, counted from 0.
            looks_back: Whether the cohort keeps a copy of its tensors as they are now, in ``before``.
            state: State to take the rows from; that of all users if None.
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
        """Return the parameters of some rows before any training: kept in memory, or drawn again from the seed."""
        return self.initial[list(rows)] if self.state.in_memory else self.begin(rows).rows


def _zero_masked(state: State, mask: Bool[Tensor, "some columns"]) -> None:
    """Set parameters and moments to zero, in place, where ``mask`` is False; without moments, only parameters."""
    for rows in (state.rows, state.first, state.second):
        rows.mul_(mask[:, : rows.shape[1]])


class Clients(Users):
    """Users that download, upload and are scored."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Clock of the time limit of local steps, in seconds."""

    @cached_property
    def steps_taken(self) -> dict[int, int]:
        """Number of local steps that trainers took in their last round, by number."""
        return {}

    @property
    def is_fine_tuning(self) -> bool:
        """True in the block of :func:`finetuned`, in which results stay local."""
        return any(phase.label == TUNING for phase in self.phases)

    def time_limit(self, trainer: int) -> float:
        """Return the seconds after which a trainer ends its local steps; infinite without limit and to fine-tune."""
        return math.inf if self.is_fine_tuning else self.plan.max_seconds_of(self.trainers[trainer].name)

    # ---------------------------------------------------------------- messages

    def stale(self, version: int, members: Sequence[int]) -> list[int]:
        """Return those members that have not downloaded version ``version`` of the server yet."""
        versions = self.state.versions[list(members)].tolist()
        return [member for member, received in zip(members, versions, strict=True) if received < version]

    @torch.no_grad()
    def receive(self, download: Download) -> None:
        """Write a download into the state of the users it is addressed to.

        A client hook of the method may combine several downloaded models into one.
        """
        members = self.numbers(download.users)
        layout, state = self.model.layout, self.state.without_moments()
        cohort = self.cohort(members, download.version, state=state)
        bounds, tensors = without_bound(download.tensors)  # a clip norm that privacy mechanisms send along
        models = self._insert_own_models(cohort, replace(download, tensors=fill_ranks(tensors, layout)))
        combined: Tree | None = None
        for hook in self.method.client.parts:
            combined = hook.receive(cohort, models, download.senders) if combined is None else combined
        # Without a hook that combines models, a download has a single model per user.
        new_model = {name: t[:, 0] for name, t in models.items()} if combined is None else combined
        assign(cohort.tensors, layout, self.method.received, new_model)
        if cohort.mask is not None:  # a server may send one model to users of different ranks
            cohort.part.rows.mul_(cohort.mask)
        if change_updates(self.mechanisms):  # the next upload is clipped relative to this download
            keep_references(cohort.kept, restrict(cohort.tensors, layout, self.method.shared), bounds)
        for hook in self.method.client.parts:
            hook.received(cohort)
        cohort.part.versions.fill_(download.version)
        state.put(members, cohort.part)

    def receive_verdict(self, verdict: Download) -> None:
        """Store the current models as the best ones if the server reports the lowest loss so far."""
        if bool(verdict.tensors[LOWEST].all()):
            self.state.remember(verdict.version)

    def _insert_own_models(self, cohort: Cohort, download: Download) -> Tree:
        """Return one model per sender: the downloaded ones, with the receiver's own model among them.

        A receiver that is itself a sender does not download its own model; it is taken from the receiver's state.

        Args:
            cohort: The receivers.
            download: Models ``(users, models, *shape)`` by tensor name, and the names of their senders, in the same
                order; the receiver's own model may be left out.

        Returns:
            Models ``(users, senders, *shape)`` by tensor name.
        """
        models = download.tensors
        num_downloaded = next(iter(models.values())).shape[1]
        if len(download.senders) <= num_downloaded:  # no model is left out
            return models
        own_places = [download.senders.index(name) for name in cohort.names]
        return insert_own(models, restrict(cohort.tensors, self.model.layout, self.method.shared), own_places)

    def upload(self, members: Sequence[int], round_number: int, losses: Tree, *, counts: bool = False) -> Upload:
        """Return the upload of some users after their local steps, joined in one message.

        Privacy mechanisms may clip the upload and add noise. Each user keeps the rounding errors of an int8 upload and
        adds them to its next upload.

        Args:
            members: Numbers of the users.
            round_number: The round, counted from 1.
            losses: Mean training losses ``(users,)`` to report.
            counts: Whether the upload is made only to count its bytes and is never sent; rounding errors are not kept.

        Returns:
            Copies of the shared tensors ``(users, *shape)``, and the reports of the method.
        """
        state = self.state.without_moments()
        cohort = self.cohort(list(members), round_number, state=state)
        tensors = restrict(cohort.tensors, self.model.layout, self.method.shared)
        copies = {name: t.clone() for name, t in tensors.items()}
        reports = losses if self.plan.privacy is None else {}  # losses reveal data
        if change_updates(self.mechanisms):
            # Mechanisms clip and noise the tensors, and decide what is reported.
            amounts = [len(self.trainers[owner].train) for owner in cohort.owners]
            copies, reports = protect_uploads(self.mechanisms, copies, cohort, amounts, round_number)
        number_format, all_places = self.plan.training.uploads, list(range(len(cohort.rows)))  # all users of the cohort
        # ``cohort.kept`` has the residuals, the rounding errors of the previous upload.
        sent = compress_with_feedback(copies, number_format, cohort.kept, all_places, store_residuals=not counts)
        if number_format == "int8" and not counts:  # the rounding errors have changed
            state.put(cohort.rows, cohort.part)
        return Upload(
            round=round_number,
            users=tuple(cohort.names),
            tensors=sent,
            ranks=cohort.ranks.cpu().clone(),
            reports={name: t.clone() for name, t in self._reports(cohort, members).items()} | reports,
        )

    def _reports(self, cohort: Cohort, members: Sequence[int]) -> Tree:
        """Return the values that users upload besides tensors.

        They are amounts of data as weights, numbers of local steps, and reports of client hooks. With differential
        privacy amounts and numbers are not reported, as they would reveal data.

        Args:
            cohort: The users.
            members: Their numbers.

        Returns:
            Values by name, with users on the leading dimension.
        """
        counts = {COUNT: torch.tensor([len(self.trainers[member].train) for member in members])}
        reports = counts if self.plan.training.weighting != "uniform" and self.plan.privacy is None else {}
        if self.plan.reports_steps:
            # Before the first round, an upload is only made to count its bytes.
            taken = [self.steps_taken.get(member, self.batch_source.steps(member)) for member in members]
            reports = reports | {STEPS: torch.tensor(taken)}
        for hook in self.method.client.parts:
            reports = reports | hook.report(cohort)
        return reports

    # ---------------------------------------------------------------- scores

    @property
    def models(self) -> Models:
        """Current tensors of all rows, by row number."""
        owners = range(self.rows) if self.rows == len(self.trainers) else self.owners(range(self.rows))
        return Models(rows=self.state.rows_of, owners=owners)

    def evaluate(self) -> Sequence[AnyScore]:
        """Return the test score of each evaluated user with its current model, and its mean gate per expert."""
        if not self.scored:
            return []
        return self.scorer.examine(self.models, [user.test for user in self.scored_users], self.scored_rows)

    def validate(self) -> dict[str, float]:
        """Return the mean validation loss in nats of each evaluated user that has validation data, by name."""
        pairs = zip(self.scored_rows, self.scored_users, strict=True)
        with_data = [(row, user) for row, user in pairs if len(user.valid)]
        if not with_data:
            return {}
        scores = self.scorer.score(self.models, [user.valid for _, user in with_data], [row for row, _ in with_data])
        return {user.name: score.mean_loss for (_, user), score in zip(with_data, scores, strict=True)}

    @property
    def chosen_round(self) -> int:
        """Number of rounds after which users had the models with which the run ends."""
        if self.state.best:
            return int(self.state.best["round"])
        return self.rounds_done

    @property
    def rounds_done(self) -> int:
        """Number of rounds of the run: as planned, or fewer if the privacy budget is spent earlier."""
        return self.plan.training.rounds * self.method.trains if self.stopped_after is None else self.stopped_after

    def choose(self) -> None:
        """Restore the models of the best round if the recipe selects it."""
        if self.state.best:
            self.state = self.state.restored_best()
            self.update_masks()

    def trainable_parameters(self) -> list[int]:
        """Return the number of parameters that each evaluated user trains, over all its copies and without padding."""
        trained = self.model.layout.mask(self.method.client.trained).to(self.mask.device)
        copies, count_of_trainer = range(self.method.placement.copies), dict[int, int]()
        for group in cohorts(self.scored_trainers, self.users_per_message):
            rows = [copy * len(self.trainers) + trainer for copy in copies for trainer in group]
            masks = self.masks(rows, self.state.without_moments().take(rows))
            counts_by_copy = (masks & trained).sum(1).view(len(copies), -1)
            count_of_trainer |= dict(zip(group, counts_by_copy.sum(0).tolist(), strict=True))
        return [count_of_trainer[owner] for owner in self.owners(self.scored_rows)]

    def upload_bytes(self) -> list[int]:
        """Return the upload size in bytes per round of each evaluated user; 0 if nothing is shared.

        Uploads are made, but not sent, to count their bytes; sizes of messages of secure sums are computed.
        """
        if not self.shares:
            return [0] * len(self.scored)
        if (sums := self.plan.sums) is not None:
            size = self.model.layout.count(self.method.shared)
            return [sums.sent_bytes(self.name(row), size) for row in self.scored_rows]
        bytes_of_trainer: dict[int, int] = {}
        for group in cohorts(self.scored_trainers, self.users_per_message):
            no_losses = torch.zeros(len(group))  # neither they nor the round change the number of bytes
            message = self.upload(group, 1, {LOSS: no_losses}, counts=True)
            bytes_of_trainer |= dict(zip(group, packed_bytes(message), strict=True))
        return [bytes_of_trainer[owner] for owner in self.owners(self.scored_rows)]


Tick = Callable[[], None]
"""Function that is called after each local step of a cohort."""


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """Result of the local steps of one round.

    Attributes:
        losses: Mean training loss in nats of each participant, by number.
        rejected: Reason for each participant whose work is left out.
        steps: Number of local steps that each participant took, by number.
        tokens: Number of training tokens or samples.
        seconds: Duration of the local steps.
    """

    losses: dict[int, float]
    rejected: dict[int, str]
    steps: dict[int, int]
    tokens: int
    seconds: float


EMPTY_ROUND = LocalRound(losses={}, rejected={}, steps={}, tokens=0, seconds=0.0)
"""Result of a round without participants."""


def train(clients: Clients, members: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
    """Take the local steps of all participants, cohort by cohort.

    Args:
        clients: All clients.
        members: Numbers of the participants.
        round_number: The round, counted from 0.
        tick: Called after each local step of a cohort.

    Returns:
        Mean losses, rejected participants, the number of training tokens or samples, and the time.

    Raises:
        DivergenceError: The loss of a user is not finite; names the user and the round.
        RecipeError: A pass does not fit into memory; names the setting to lower.
    """
    with within_memory(clients.pass_size, len(members), clients.model.device):
        return _train_cohorts(clients, members, round_number, tick)


def _train_cohorts(clients: Clients, members: Sequence[int], round_number: int, tick: Tick) -> LocalRound:
    """Take the local steps of all participants, as :func:`train` does, without converting out-of-memory errors.

    All copies of the model that a participant keeps are trained, by equally many steps. The result has the loss of its
    last copy.
    """
    started, method = time.perf_counter(), clients.method
    clients.steps.known_suspects.clear()  # optimizers blamed for non-finite tensors, of the previous round
    losses: dict[int, float] = {}
    rejected: dict[int, str] = {}
    copies = range(method.placement.copies)
    all_rows = [copy * len(clients.trainers) + member for copy in copies for member in members]
    place_of_member = {member: place for place, member in enumerate(members)}

    # Some methods compare each copy with the first one as it was before this round.
    first_copies = clients.state.rows_of(members) if method.client.looks_across else None
    # A cohort has equal batch sizes, so that no batch is padded and users train exactly as they would alone.
    rows_by_size: dict[int, list[int]] = {}
    for row, owner in zip(all_rows, clients.owners(all_rows), strict=True):
        rows_by_size.setdefault(clients.batch_source.size_of(owner), []).append(row)
    groups = [group for rows in rows_by_size.values() for group in cohorts(rows, clients.pass_size.users)]
    cohorts_of_owner = Counter(owner for group in groups for owner in set(clients.owners(group)))
    taken: dict[int, int] = {}
    for rows, next_rows in zip(groups, [*groups[1:], []], strict=True):
        cohort = clients.cohort(rows, round_number, looks_back=method.client.looks_back)
        clients.state.prefetch(next_rows)
        if first_copies is not None:
            cohort.across = first_copies[[place_of_member[owner] for owner in cohort.owners]]
        # A user whose copies are in several cohorts divides its time among them. It stops in the first one.
        limits = [
            math.inf if owner in taken else clients.time_limit(owner) / cohorts_of_owner[owner]
            for owner in cohort.owners
        ]
        planned = [taken.get(owner, clients.batch_source.steps(owner)) for owner in cohort.owners]
        losses_of_steps, steps = _take_local_steps(clients, cohort, torch.tensor(planned), torch.tensor(limits), tick)
        taken |= dict(zip(cohort.owners, steps.tolist(), strict=True))
        broken = find_broken(losses_of_steps, cohort.part.rows, round_number)
        _drop_diverged(clients, cohort, broken)
        for hook in method.client.parts:
            hook.end(cohort)
        clients.apply_masks(cohort)
        clients.state.put(rows, cohort.part)
        mean_losses = losses_of_steps.sum(0) / steps
        losses |= dict(zip(cohort.owners, mean_losses.tolist(), strict=True))
        rejected |= {cohort.owners[place]: reason for place, reason in broken.items()}
    if any(hook.resizes for hook in method.client.parts):
        clients.update_masks()
    if not clients.is_fine_tuning:
        clients.steps_taken.update(taken)
    tokens = len(copies) * sum(_amount_of_steps(clients.batch_source, member, taken[member]) for member in members)
    losses = {user: loss for user, loss in losses.items() if user not in rejected}
    seconds = time.perf_counter() - started
    return LocalRound(losses=losses, rejected=rejected, steps=taken, tokens=tokens, seconds=seconds)


def _amount_of_steps(batch_source: BatchSource, trainer: int, steps: int) -> int:
    """Return the number of tokens or samples in the first local steps of a trainer in a round.

    If the trainer took fewer steps than planned, and its batches have different sizes, the number is rounded.

    Args:
        batch_source: Batch source of the trainers.
        trainer: Number of the trainer.
        steps: Number of steps that it took.
    """
    amount, planned = batch_source.trained_amount(trainer), batch_source.steps(trainer)
    return amount if steps == planned else round(amount * steps / planned)


def _take_local_steps(
    clients: Clients,
    cohort: Cohort,
    steps: Int[Tensor, " users"],
    limits: Float[Tensor, " users"],
    tick: Tick,
) -> tuple[Float[Tensor, "steps users"], Int[Tensor, " users"]]:
    """Take the local steps of a cohort.

    Args:
        clients: All clients.
        cohort: The cohort, updated in place.
        steps: Largest number of local steps of each user.
        limits: Seconds after which each user takes no further step; it takes at least one.
        tick: Called after each local step.

    Returns:
        Training losses in nats, 0 where a user has no more steps; and the number of steps that each user took.
    """
    has_limit = not bool(limits.isinf().all())
    started = clients.clock() if has_limit else 0.0
    for hook in clients.method.client.parts:
        hook.begin(cohort)
    # All phases of a round fine-tune or none does. Fine-tuning begins with new moments.
    if clients.method.client.tuning and clients.is_fine_tuning:
        cohort.reset_moments(clients.method.client.trained)
    losses = []
    for step in range(int(steps.max())):
        if has_limit and step:
            steps = torch.where(clients.clock() - started >= limits, steps.clamp(max=step), steps)
        is_active = step < steps  # users with less data or time have fewer steps
        if not bool(is_active.any()):
            break
        losses.append(clients.steps.iteration(cohort, clients.phases, step, is_active))
        tick()
    return torch.stack(losses), steps


def _drop_diverged(clients: Clients, cohort: Cohort, broken: dict[int, str]) -> None:
    """Undo the round of users whose values are not finite if the method drops them; otherwise raise.

    Args:
        clients: All clients.
        cohort: The cohort; dropped users get their parameters of the start of the round and empty moments.
        broken: Reasons, by place in the cohort.

    Raises:
        DivergenceError: The method does not drop such users.
    """
    for place, reason in broken.items():
        # Without a copy of the parameters from the start of the round there is nothing to go back to.
        if cohort.before is None or not clients.method.client.drops_nonfinite:
            suspect_optimizers = clients.steps.suspect_optimizers(cohort.rows[place], cohort.part.rows[place])
            raise diverged(cohort.names[place], reason, suspect_optimizers)
        cohort.part.rows[place] = cohort.before[place]
        for t in (cohort.part.first, cohort.part.second, cohort.part.iterations, cohort.part.router_steps):
            t[place] = 0


@contextmanager
def finetuned(clients: Clients, done: int | None = None, members: Sequence[int] | None = None) -> Iterator[None]:
    """Fine-tune the models of users for the duration of the block, in which they are scored; restore them on exit.

    Users take the local steps of one round; their batches have a random stream of their own. Does nothing for methods
    that do not fine-tune, and in a nested block.

    Args:
        clients: All clients.
        done: Number of rounds that are done, which decides the learning rates: those of the next round, or after the
            last round those of the last one. If None, the number of rounds after which the final models were chosen.
        members: Numbers of the trainers to fine-tune; those that are evaluated if None.
    """
    if not clients.method.client.finetunes or clients.is_fine_tuning:
        yield
        return
    last_round = clients.plan.training.rounds - 1  # rounds are counted from 0
    state, phases = clients.state, clients.phases
    clients.state = state.copy()  # fine-tuned in place of the original, which is restored below
    clients.phases = [replace(phase, label=TUNING) for phase in clients.method.client.tuning or phases]
    try:
        done = clients.chosen_round if done is None else done
        chosen = clients.scored_trainers if members is None else members
        if chosen:
            train(clients, chosen, min(done, last_round))
        yield
    finally:
        clients.state.release()
        clients.state, clients.phases = state, phases


@torch.no_grad()
def settle(clients: Clients, *, ends: bool = True) -> None:
    """Run the ``settle`` hooks of the method before scoring.

    These client hooks compute tensors that depend on trained ones. A second call changes nothing.

    Args:
        clients: All clients.
        ends: Whether the run ends, so that all users are updated; otherwise only those that are evaluated.
    """
    # Hooks that do not override the empty method are left out, so that no tensors are read for them.
    hooks = [hook for hook in clients.method.client.parts if type(hook).settle is not ClientHook.settle]
    num_trainers, copies = len(clients.trainers), clients.method.placement.copies
    chosen = range(num_trainers) if ends else clients.scored_trainers
    all_rows = [copy * num_trainers + trainer for copy in range(copies) for trainer in chosen] if hooks else []
    for rows in cohorts(all_rows, clients.pass_size.users):
        cohort = clients.cohort(rows, clients.plan.training.rounds, state=clients.state.without_moments())
        for hook in hooks:
            hook.settle(cohort)
        clients.state.put(rows, cohort.part)


def finish(clients: Clients) -> None:
    """Run the ``finish`` hooks of the method once after the last exchange; they return the final models of users.

    A final model replaces the last copy of its user, with which the user is evaluated.
    """
    num_trainers, copies = len(clients.trainers), clients.method.placement.copies
    hooks = clients.method.client.finishing
    for group in cohorts(range(num_trainers), clients.users_per_message) if hooks else ():
        rows = [copy * num_trainers + trainer for copy in range(copies) for trainer in group]  # last copies come last
        for hook in hooks:
            cohort = clients.cohort(rows, clients.plan.training.rounds)
            cohort.part.rows[-len(group) :] = hook.finish(cohort)
            clients.state.put(rows, cohort.part)
