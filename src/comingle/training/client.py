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
from comingle.methods.base import Method
from comingle.models.hardware import require_bytes
from comingle.models.lora import PeftAdapter
from comingle.models.model import Model
from comingle.privacy.base import (
    PrivacyMechanism,
    change_updates,
    keep_references,
    protect_uploads,
    split_clip_norms,
    start_references,
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
from comingle.training.steps import TUNING, Steps, diverged, find_nonfinite_users, private_steps, within_memory
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.records import JsonObject, logger
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
        trained_bytes = 4 * clients.num_rows * clients.model.layout.columns  # float32
        require_bytes(
            f"method {clients.method.name}: the trained tensors of {len(clients.trainers)} users",
            trained_bytes,
            "; runtime.store: disk keeps users who are not training on disk",
        )
        all_rows = range(clients.num_rows)
        return clients.begin(all_rows)

    def read(self, kind: Kind, request: DataRequest) -> RunData:
        """Read the data of a run's users, by default all into memory.

        Args:
            kind: Kind of the data, which knows how to read it.
            request: The recipe, and any data that the program passes instead of files.

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

    Args:
        plan: Settings of the run, in the form that training uses.
        users: Number of users. If data is pooled, the single trainer takes as many samples as all users together.
    """
    largest_of_user = plan.training.largest_batch_size
    if not plan.method.placement.pooled:
        return largest_of_user
    size_or_size_by_user = plan.training.batch_size
    if isinstance(size_or_size_by_user, Mapping):
        return sum(values_in(size_or_size_by_user))
    return largest_of_user * users


class UsersAndTrainers:
    """Users, who are evaluated, and trainers, who own models: the same, or one trainer with the data of all users.

    Args:
        plan: Settings of the run, in the form that training uses.
        trainers: Owners of the rows of the state: the users, or the one trainer of pooled data. If a method keeps
            several copies of a model, row ``copy * len(trainers) + i`` is a copy of trainer i.
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
        """Assign rows of the state to trainers and users; a row holds the parameters of one model.

        For example, trainers a and b with 2 copies of a model each own the rows ``[a, b, a, b]``.

        Args:
            plan: Plan of the run; its method decides how many copies of its model a trainer has.
            trainers: Owners of the models: the users, or one trainer with the data of all users.
            users: The users, who are evaluated with these models.
            skipped: Users who were left out before the run, with the reason.
            skipped_rows: Number of rows of data that were left out.
        """
        placement = plan.method.placement
        self.plan = plan
        self.trainers = as_users(trainers)
        self.users = as_users(users)
        self.skipped = skipped
        self.skipped_rows = skipped_rows
        self.names = self.trainers.names
        self.numbers = UserNumbers(self.names)
        self.population_names = self.names  # of all users of the run, in other processes too
        self.num_rows = placement.copies * len(trainers)
        first_row_of_last_copy = self.num_rows - len(trainers)  # users are evaluated with their last copy
        self.row_of: Sequence[int]
        """Row that holds the model of each user."""
        if placement.pooled:  # all users have the model of the one trainer
            self.row_of = [first_row_of_last_copy] * len(users)
        else:
            self.row_of = range(first_row_of_last_copy, first_row_of_last_copy + len(users))
        self.batch_size = batch_size(plan, len(users))

    @property
    def method(self) -> Method:
        """Method of the run."""
        return self.plan.method

    @property
    def left_out(self) -> JsonObject:
        """Skipped users and rows, for the start event and the metrics; empty if nothing was skipped.

        For example ``{"skipped_users": {"u7": "no text in train, valid or test"}, "skipped_rows": 3}``. At most
        :data:`MAX_LISTED_USERS` users are listed; if there are more, ``"skipped"`` is the number of all.
        """
        entries: JsonObject = {}
        if self.skipped:
            entries["skipped_users"] = dict(islice(self.skipped.items(), MAX_LISTED_USERS))
        if len(self.skipped) > MAX_LISTED_USERS:
            entries["skipped"] = len(self.skipped)
        if self.skipped_rows:
            entries["skipped_rows"] = self.skipped_rows
        return entries

    def trainers_of(self, rows: Sequence[int]) -> list[int]:
        """Return for each row of the state the number of the trainer who owns it.

        A row holds the parameters of one model. A trainer owns one row, or one for each copy of its model. For example,
        rows 0 to 5 of 3 trainers with 2 copies each have the trainers ``[0, 1, 2, 0, 1, 2]``.
        """
        return [row % len(self.trainers) for row in rows]

    def name(self, row: int) -> str:
        """Return the name of the user that a model belongs to, or "everyone" for a model of all users.

        Args:
            row: Number of the model: the row of its parameters in the state. If users train several copies, all first
                copies come first.
        """
        return self.names[row % len(self.trainers)]

    @cached_property
    def scored(self) -> Sequence[int]:
        """Numbers of the users who are evaluated: all, or a sample that is drawn once per run."""
        sample_size = self.plan.evaluation.users
        if sample_size is None or sample_size >= len(self.population_names):
            return range(len(self.users))
        numbers_in_population = draw_users(self.population_names, sample_size, self.plan.seed, "evaluation")
        if len(self.population_names) == len(self.users):
            return numbers_in_population
        # This process has only some users of the population: keep those of the sample that are here.
        drawn_names = [self.population_names[number] for number in numbers_in_population]
        return UserNumbers(self.users.names).existing(drawn_names)

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
        """Numbers of the users whose models are evaluated, or 0 if one model is trained on all users' data."""
        return [0] if self.method.placement.pooled else self.scored


class Users(UsersAndTrainers):
    """Users and their trained tensors, over one frozen base model.

    Args:
        model: The model that all users train.
        plan: Settings of the run, in the form that training uses.
        trainers: See :class:`UsersAndTrainers`.
        users: See :class:`UsersAndTrainers`.
        batch_source: Batch source of the trainers, or a function that makes it on first use.
        reads: Whether users' data may be read now.
        skipped: See :class:`UsersAndTrainers`.
        skipped_rows: See :class:`UsersAndTrainers`.
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

        Args:
            model: The model that all users train.
            plan: Settings of the run, in the form that training uses.
            trainers: Owners of the models: the users, or one trainer with the data of all users.
            users: The users, who are evaluated with these models.
            batch_source: Batch source of the trainers, or a function that makes it on first use.
            reads: Whether users' data may be read now, to check that there is validation data if the run needs it.
            skipped: Users who were left out before the run, with the reason.
            skipped_rows: Number of rows of data that were left out.
        """
        super().__init__(plan, trainers=trainers, users=users, skipped=skipped, skipped_rows=skipped_rows)
        self.model = model
        self.stopped_after: int | None = None
        """Number of rounds after which the privacy budget was spent; None before."""
        self.steps = Steps(model=model, plan=plan, trainers=len(trainers), source=batch_source)
        self.scorer = Scorer(steps=self.steps)
        method = plan.method
        # A phase without tensors is skipped: for example that of the router, if users have a single expert.
        self.phases = [phase for phase in method.client.phases if model.layout.touching(phase.roles).slots]
        self.shares = bool(model.layout.mask(method.shared).any())  # whether users share any tensor
        self.mechanisms: tuple[PrivacyMechanism, ...] = ()
        if self.shares:
            self.mechanisms = client_mechanisms(plan)
        self.steps.private = private_steps(self.mechanisms, model, plan)
        self.state = STORES[plan.runtime.store].begin(self)
        self.initial = self.state.rows[:0]
        """Parameters before the first round, for methods that reset tensors to them; no rows for other methods."""
        if method.client.resets:
            self.initial = self.state.rows.clone()
        self.update_masks()
        if plan.evaluation.select == "best":
            if reads:
                self.require_validation(any(len(user.valid) for user in self.users))
            self.state.remember(0)  # the models before the first round may turn out to be the best

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
        """Return the state of some users before the first round: parameters, moments, and tensors that hooks keep.

        It depends only on the seed and the names of the users. So a store on disk need not save users that are
        untrained.

        Args:
            rows: Numbers of the rows; a user has one, or several if the method trains copies of its model.
        """
        layout, method, owners = self.model.layout, self.method, self.trainers_of(rows)
        names = [self.names[owner] for owner in owners]
        model_of_rows = self.model.only(owners)
        trained, starts_equal = layout.mask(method.client.trained), layout.mask(method.starts_equal)
        state = initial_state(
            layout,
            model_of_rows.mask(),
            names=names,
            local=trained & ~starts_equal,  # columns that are never aggregated, so that users may start differently
            ranks=model_of_rows.ranks,
            seed=self.plan.seed,
            common_values=self._common_initial_values,
            moments=self.plan.training.experts.moments | self.plan.training.router.moments,  # of either optimizer
            accumulates=method.client.accumulates,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        self._set_adapters(state.rows, owners, trained & ~starts_equal)
        self._start_kept_tensors(state, names)
        if method.server.first_download:  # version -1: all users download before the first round
            state.versions -= 1
        mixture = method.placement.mixture
        if mixture is not None and mixture.optimal:  # mixture weights are given by users' true clusters
            clusters = [getattr(self.trainers[owner], "cluster", None) for owner in owners]
            router_logits = layout.views(state.rows)[CLIENT_ROUTER]
            router_logits.copy_(true_clusters(method.name, clusters, mixture.clusters))
        return state

    def _set_adapters(
        self, rows: Float[Tensor, "some columns"], owners: Sequence[int], local: Bool[Tensor, " columns"]
    ) -> None:
        """Set parameters before the first round to the adapters of ``adapters.start``, in place.

        Args:
            rows: Parameters of some users.
            owners: Number of the user of each row.
            local: True for columns that are never aggregated; adapters of single users are for these.

        Raises:
            RecipeError: An adapter does not fit the model, or has no linear with local columns.
        """
        start = self.plan.start
        if start is None:
            return
        if isinstance(start, PeftAdapter):
            self.model.set_adapter(rows, start, owners)
            return
        for row, owner in zip(rows, owners, strict=True):
            adapter = start.get(self.names[owner])
            if adapter is None:
                continue
            adapted_row = row.clone()
            columns = self.model.set_adapter(adapted_row.unsqueeze(0), adapter, [owner]).to(local.device)
            where = f"adapters.start.{self.names[owner]}: {adapter.name}"
            if not (columns & local).any():
                allowed = "one adapter for all users, or a method with local LoRAs of the adapter's linears"
                raise RecipeError(f"{where}: {self.method.name} shares all of its LoRAs; allowed: {allowed}")
            shared_roles = self._roles_without(local, columns)
            if shared_roles:
                roles = ", ".join(shared_roles)
                logger.warning("%s: its LoRAs of %s are not used, as %s shares these", where, roles, self.method.name)
            row[columns & local] = adapted_row[columns & local]

    def _roles_without(self, local: Bool[Tensor, " columns"], columns: Bool[Tensor, " columns"]) -> list[str]:
        """Return the roles of tensors that have some of the columns, but no local ones.

        Args:
            local: True for columns that are never aggregated.
            columns: True for the columns in question.
        """
        roles = set[str]()
        for slot in self.model.layout.slots:
            start = self.model.layout.starts[slot.name]
            of_slot = slice(start, start + slot.size)
            if columns[of_slot].any() and not (columns & local)[of_slot].any():
                roles |= set(slot.roles)
        return sorted(roles)

    def _start_kept_tensors(self, state: State, names: Sequence[str]) -> None:
        """Add to ``state.kept`` the tensors that hooks, compressed uploads and privacy keep for each user.

        Args:
            state: State of some rows before the first round, changed in place.
            names: Names of the rows' owners.
        """
        layout, method = self.model.layout, self.method
        shared_tensors = restrict(layout.views(state.rows), layout, method.shared)
        for hook in method.client.parts:
            tensors_of_any_shape = hook.start(names, self.plan.seed)
            tensors_like_shared = hook.start_like(shared_tensors)
            state.kept |= tensors_of_any_shape
            state.kept |= tensors_like_shared
        if self.plan.training.uploads == "int8":  # keep the rounding errors of an upload, to add them to the next one
            for name, t in shared_tensors.items():
                state.kept[RESIDUAL + name] = torch.zeros_like(t)
        if change_updates(self.mechanisms) and self.plan.privacy is not None:
            # Keep the tensors of the previous download: the difference between upload and download is clipped.
            state.kept |= start_references(shared_tensors, self.plan.privacy.first_bound)

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
        """Recompute which entries of each row are padding, and set them to zero, after LoRA ranks were changed.

        The parameters of a user are a row. Users with a smaller LoRA rank or fewer experts than others have unused
        entries in it, the padding. For tensors on disk this is done when a cohort is read (:meth:`masks`).
        """
        if not self.state.in_memory:
            self._update_may_be_padded()
            return
        # A method may keep several copies of each user's model, which may differ in rank: (copies, trainers).
        ranks_by_copy = self.state.ranks.cpu().view(-1, len(self.trainers))
        mask_by_copy = [self.model.mask(ranks_of_copy) for ranks_of_copy in ranks_by_copy]
        has_one_copy = len(mask_by_copy) == 1
        self.mask: Bool[Tensor, "rows columns"] = mask_by_copy[0] if has_one_copy else torch.cat(mask_by_copy)
        self.may_be_padded = not bool(self.mask.all())
        if self.may_be_padded:
            _zero_where_false(self.state, self.mask)

    def _update_may_be_padded(self) -> None:
        """Set ``may_be_padded`` for tensors on disk: whether a user may lack parameters that others have.

        The columns of parameters that a user lacks, as its LoRA rank or its number of experts is smaller, are padding.
        If there may be any, each cohort gets a mask when it is read from disk. A mask of all users would be too large,
        so ``mask`` is that of the first user.
        """
        self.mask = self.model.only([0]).mask()
        if self._resizes:  # LoRA ranks may shrink during the run
            self.may_be_padded = True
            return
        same_num_experts = isinstance(self.method.placement.specialists, int)
        same_ranks = bool((self.model.ranks == self.model.ranks[0]).all())
        if same_num_experts and same_ranks:  # all users have the mask of the first one
            self.may_be_padded = not bool(self.mask.all())
        else:
            self.may_be_padded = True

    @property
    def _resizes(self) -> bool:
        """True if a client hook of the method changes LoRA ranks during the run."""
        return any(hook.resizes for hook in self.method.client.parts)

    def apply_masks(self, cohort: Cohort) -> None:
        """Zero the padding of a cohort (entries beyond the rank of a user) after its local steps, if ranks may change.

        Does nothing for tensors in memory, whose padding :meth:`update_masks` zeros.
        """
        if self._resizes and not self.state.in_memory:
            _zero_where_false(cohort.state, self.masks(cohort.rows, cohort.state))

    def masks(self, rows: Sequence[int], state: State) -> Bool[Tensor, "some columns"]:
        """Return a mask that is True where a user has a parameter and False on padding.

        Users with a smaller LoRA rank or fewer experts than others have unused columns in their row, the padding.

        Args:
            rows: Numbers of the rows; a row holds the parameters of one model of a user.
            state: State of these rows, with their LoRA ranks.
        """
        if self.state.in_memory:
            return self.mask[list(rows)]
        return self.model.only(self.trainers_of(rows)).mask(state.ranks.cpu())

    @property
    def users_per_message(self) -> int:
        """Largest number of users whose uploads are computed in one batch, which bounds the memory for them.

        Their models have at most :data:`MAX_MESSAGE_VALUES` parameters together. The number is a multiple of the number
        of users that one training pass (forward and backward) has, and at least that number.
        """
        users_per_pass = self.pass_size.users
        parameters_per_user = self.model.layout.columns  # a row of the layout has all trained parameters of a model
        parameters_per_pass = users_per_pass * parameters_per_user
        num_passes = max(1, MAX_MESSAGE_VALUES // parameters_per_pass)
        return users_per_pass * num_passes

    def cohort(
        self, rows: list[int], round_number: int, *, looks_back: bool = False, state: State | None = None
    ) -> Cohort:
        """Return some users as a cohort that is trained in one batch.

        Args:
            rows: Rows of these users in the state; a user has several rows if the method trains copies of its model.
            round_number: The round, counted from 0.
            looks_back: Whether the cohort keeps a copy of its parameters as they are now, in ``round_start``.
            state: State to take the rows from; that of all users if None.
        """
        cohort_state = self.state.take(rows) if state is None else state.take(rows)
        return Cohort(
            steps=self.steps,
            scorer=self.scorer,
            trainers=self.trainers,
            initial=self._initial_rows,
            layout=self.model.layout,
            rows=rows,
            owners=self.trainers_of(rows),
            names=[self.name(row) for row in rows],
            state=cohort_state,
            round_number=round_number,
            round_start=cohort_state.rows.clone() if looks_back else None,
            mask=self.masks(rows, cohort_state) if self.may_be_padded else None,
        )

    def _initial_rows(self, rows: Sequence[int]) -> Float[Tensor, "some columns"]:
        """Return the parameters of some users before the first round, for methods that reset tensors to them.

        They are kept in memory or, if users' tensors are on disk, drawn anew from the seed.

        Args:
            rows: Numbers of the users' rows in the state.
        """
        if self.state.in_memory:
            return self.initial[list(rows)]
        return self.begin(rows).rows


def _zero_where_false(state: State, mask: Bool[Tensor, "some columns"]) -> None:
    """Set padding (parameters that a user does not have) to zero in parameters and moments, in place.

    Args:
        state: State of some users; it may be without moments.
        mask: True where a user has a parameter, False on padding.
    """
    for values in (state.rows, state.first, state.second):
        num_columns = values.shape[1]  # 0 for moments that the state does not have
        values.mul_(mask[:, :num_columns])


class Clients(Users):
    """Users that download, upload and are scored."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Clock of the time limit of local steps, in seconds."""

    @cached_property
    def steps_taken(self) -> dict[int, int]:
        """Number of local steps that each trainer took in its last round, by number of the trainer; uploads report it.

        Empty at first; :func:`train` enters the participants of each round.
        """
        return {}

    @property
    def is_fine_tuning(self) -> bool:
        """True in the block of :func:`finetuned`, in which results stay local."""
        return any(phase.label == TUNING for phase in self.phases)

    def time_limit(self, trainer: int) -> float:
        """Return the seconds after which a trainer ends its local steps; infinite if it is unlimited or fine-tunes."""
        if self.is_fine_tuning:
            return math.inf
        return self.plan.max_seconds_of(self.trainers[trainer].name)

    # ---------------------------------------------------------------- messages

    def stale(self, version: int, users: Sequence[int]) -> list[int]:
        """Return those of the users that have not downloaded version ``version`` of the server yet.

        Args:
            version: Newest version of the server, the number of rounds done at its last aggregation.
            users: Numbers of the users.
        """
        downloaded_versions = self.state.versions[list(users)].tolist()
        stale_users = []
        for user, downloaded_version in zip(users, downloaded_versions, strict=True):
            if downloaded_version < version:
                stale_users.append(user)
        return stale_users

    @torch.no_grad()
    def receive(self, download: Download) -> None:
        """Write a download into the state of the users it is addressed to, before they train or are evaluated.

        A client hook of the method may combine several downloaded models into one.

        Args:
            download: Message of the server to one or several users: shared tensors ``(users, models, *shape)`` and,
                with an adaptive clip norm, that norm.
        """
        receivers = self.numbers(download.users)
        layout = self.model.layout
        state = self.state.without_moments()
        cohort = self.cohort(receivers, download.version, state=state)
        clip_norms, tensors = split_clip_norms(download.tensors)
        # Between peers, a user's own model need not be sent to itself.
        models = self._insert_own_models(cohort, replace(download, tensors=fill_ranks(tensors, layout)))
        combined_model: Tree | None = None
        for hook in self.method.client.parts:
            if combined_model is None:
                combined_model = hook.receive(cohort, models, download.senders)  # None if it combines no models
        if combined_model is None:  # no hook combines models, so there is a single model per user
            combined_model = {name: t[:, 0] for name, t in models.items()}  # (users, *shape)
        has_once = all(slot.name in tensors for slot in layout.touching(self.method.placement.once).slots)
        assign(cohort.tensors, layout, self.method.downloaded(0 if has_once else 1), combined_model)
        if cohort.mask is not None:  # a server may send one model to users of different ranks: zero the padding
            cohort.state.rows.mul_(cohort.mask)
        if change_updates(self.mechanisms):  # the change from this download to the next upload is clipped
            keep_references(cohort.kept, restrict(cohort.tensors, layout, self.method.shared), clip_norms)
        for hook in self.method.client.parts:
            hook.received(cohort)  # after the new tensors are assigned
        cohort.state.versions.fill_(download.version)
        state.put(receivers, cohort.state)

    def receive_verdict(self, verdict: Download) -> None:
        """Store the current models as the best ones if the server reports the lowest loss so far."""
        if bool(verdict.tensors[LOWEST].all()):
            self.state.remember(verdict.version)

    def _insert_own_models(self, cohort: Cohort, download: Download) -> Tree:
        """Return one model per sender, with each receiver's own model inserted if the download left it out.

        Args:
            cohort: Names of the users who receive it.
            download: Models ``(users, models, *shape)`` by tensor name, and the names of their senders, in the same
                order.

        Returns:
            Models ``(users, senders, *shape)`` by tensor name.
        """
        models = download.tensors
        any_tensor = next(iter(models.values()))
        num_downloaded_models = any_tensor.shape[1]
        if len(download.senders) <= num_downloaded_models:  # no model is left out
            return models
        own_models = restrict(cohort.tensors, self.model.layout, self.method.shared)
        own_indices = [download.senders.index(name) for name in cohort.names]
        return insert_own(models, own_models, own_indices=own_indices)

    def upload(
        self,
        users: Sequence[int],
        round_number: int,
        losses: Tree,
        *,
        counts: bool = False,
        version: int | None = None,
        copies: bool = True,
    ) -> Upload:
        """Return the upload of some users after their local steps, joined in one message.

        Privacy mechanisms may clip the upload and add noise. Each user keeps the rounding errors of an int8 upload and
        adds them to its next upload.

        Args:
            users: Numbers of the users.
            round_number: The round, counted from 1.
            losses: Mean training losses to report, ``{"loss": tensor of (users,)}``; may be empty.
            counts: Whether the upload is made only to count its bytes and is never sent; rounding errors are not kept.
            version: Version that the users have downloaded, on which the roles in an upload may depend; None for their
                own.
            copies: Whether to copy the shared tensors. Without a copy they change with the users' state, so the upload
                must be aggregated before that; single numbers are copied, as their distance in memory may change the
                last bit of a sum.

        Returns:
            The shared tensors ``(users, *shape)``, the method's reports, and ``losses`` if privacy permits.
        """
        state = self.state.without_moments()
        cohort = self.cohort(list(users), round_number, state=state)
        # The users' own versions are equal if they have trained.
        downloaded_version = min(cohort.state.versions.tolist()) if version is None else version
        tensors = restrict(cohort.tensors, self.model.layout, self.method.uploaded(downloaded_version))
        uploaded = {name: t.clone() if copies or t[0].numel() == 1 else t for name, t in tensors.items()}
        reports = losses if self.plan.privacy is None else {}  # losses reveal data
        if change_updates(self.mechanisms):
            # Mechanisms clip and noise the tensors, and decide what is reported.
            num_samples = [len(self.trainers[owner].train) for owner in cohort.owners]
            uploaded, reports = protect_uploads(self.mechanisms, uploaded, cohort, num_samples, round_number)
        number_format = self.plan.training.uploads
        keeps_rounding_errors = number_format == "int8" and not counts
        all_positions = list(range(len(cohort.rows)))  # of users in the cohort
        # ``cohort.kept`` has the rounding errors of the previous upload; those of this one replace them.
        sent = compress_with_feedback(uploaded, number_format, cohort.kept, all_positions, store_residuals=not counts)
        if keeps_rounding_errors:
            state.put(cohort.rows, cohort.state)  # with the new rounding errors, without changes of moments
        reports_of_method = {name: t.clone() for name, t in self._reports(cohort, users).items()}
        return Upload(
            round=round_number,
            users=tuple(cohort.names),
            tensors=sent,
            ranks=cohort.ranks.cpu().clone(),
            reports=reports_of_method | reports,
        )

    def _reports(self, cohort: Cohort, users: Sequence[int]) -> Tree:
        """Return the values that users upload besides tensors, such as ``{"count": tensor([120, 80])}``.

        They are amounts of data (not with differential privacy, as they reveal data), numbers of local steps, and the
        reports of client hooks.

        Args:
            cohort: The users.
            users: Their numbers.

        Returns:
            Values by name, with users on the leading dimension.
        """
        reports: Tree = {}
        if self.plan.training.weighting != "uniform" and self.plan.privacy is None:
            reports[COUNT] = torch.tensor([len(self.trainers[user].train) for user in users])
        if self.plan.reports_steps:
            # Before the first round, an upload is made only to count its bytes; then the planned steps are reported.
            steps = [self.steps_taken.get(user, self.batch_source.steps(user)) for user in users]
            reports[STEPS] = torch.tensor(steps)
        for hook in self.method.client.parts:
            reports |= hook.report(cohort)
        return reports

    # ---------------------------------------------------------------- scores

    @property
    def models(self) -> Models:
        """Current models to score: the tensors of each model, by number of its row, and the trainer who owns it."""
        if self.num_rows == len(self.trainers):  # a single copy each: row i belongs to trainer i
            owners: Sequence[int] = range(self.num_rows)
        else:
            owners = self.trainers_of(range(self.num_rows))
        return Models(parameters_of=self.state.rows_of, owners=owners)

    def evaluate(self) -> Sequence[AnyScore]:
        """Return the test score of each evaluated user with its current model, and its mean gate per expert."""
        if not self.scored:
            return []
        test_splits = [user.test for user in self.scored_users]
        return self.scorer.examine(self.models, test_splits, self.scored_rows)

    def validate(self) -> dict[str, float]:
        """Return the mean validation loss in nats of each evaluated user that has validation data, by name."""
        rows, names, valid_splits = [], [], []
        for row, user in zip(self.scored_rows, self.scored_users, strict=True):
            if len(user.valid):
                rows.append(row)
                names.append(user.name)
                valid_splits.append(user.valid)
        if not rows:
            return {}
        scores = self.scorer.score(self.models, valid_splits, rows)
        return {name: score.mean_loss for name, score in zip(names, scores, strict=True)}

    @property
    def chosen_round(self) -> int:
        """Number of rounds after which users had the models with which the run ends."""
        if self.state.best:
            return int(self.state.best["round"])
        return self.rounds_done

    @property
    def rounds_done(self) -> int:
        """Number of rounds of the run: as planned, or fewer if the privacy budget is spent earlier; 0 if untrained."""
        if self.stopped_after is not None:
            return self.stopped_after
        return self.plan.training.rounds if self.method.trains else 0

    def restore_best_round(self) -> None:
        """Restore the models of the best round if the recipe selects it."""
        if self.state.best:
            self.state = self.state.restored_best()
            self.update_masks()

    def trainable_parameters(self) -> list[int]:
        """Return the number of parameters that each evaluated user trains, over all its copies and without padding."""
        is_trained = self.model.layout.mask(self.method.client.trained).to(self.mask.device)
        copies = range(self.method.placement.copies)
        count_by_trainer: dict[int, int] = {}
        for trainers in cohorts(self.scored_trainers, self.users_per_message):
            rows = [copy * len(self.trainers) + trainer for copy in copies for trainer in trainers]
            not_padded = self.masks(rows, self.state.without_moments().take(rows))
            counts_of_rows = (not_padded & is_trained).sum(1)
            counts = counts_of_rows.view(len(copies), len(trainers)).sum(0)  # of each trainer
            count_by_trainer.update(zip(trainers, counts.tolist(), strict=True))
        return [count_by_trainer[trainer] for trainer in self.trainers_of(self.scored_rows)]

    def upload_bytes(self) -> list[int]:
        """Return the upload size in bytes per round of each evaluated user; 0 if nothing is shared.

        Uploads are made only to count their bytes (``counts=True``), and not sent. Messages of secure sums are not even
        made, as their sizes follow from the number of entries.
        """
        if not self.shares:
            return [0] * len(self.scored)
        secure_sums = self.plan.sums
        if secure_sums is not None:
            num_entries = self.model.layout.count(self.method.shared)
            return [secure_sums.sent_bytes(self.name(row), num_entries) for row in self.scored_rows]
        bytes_by_trainer: dict[int, int] = {}
        for trainers in cohorts(self.scored_trainers, self.users_per_message):
            # The size depends neither on the values of the losses nor on the round.
            any_losses = {LOSS: torch.zeros(len(trainers))}
            message = self.upload(trainers, round_number=1, losses=any_losses, counts=True)
            bytes_by_trainer.update(zip(trainers, packed_bytes(message), strict=True))
        return [bytes_by_trainer[trainer] for trainer in self.trainers_of(self.scored_rows)]


def first_downloads(clients: Clients, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the users whose next download has the tensors that are sent once, and all others, by name.

    Args:
        clients: The users.
        names: Names of some of them.
    """
    if not clients.method.placement.once:
        return [], list(names)
    first, later = [], []
    for name, user in zip(names, clients.numbers(names), strict=True):
        (first if clients.stale(1, [user]) else later).append(name)
    return first, later


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


def train(clients: Clients, participants: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
    """Take the local steps of all participants of a round, cohort by cohort.

    Args:
        clients: All users, with their data, models and local steps.
        participants: Numbers of the participants.
        round_number: The round, counted from 0.
        tick: Called after each local step of a cohort.

    Returns:
        Mean losses, rejected participants, the number of training tokens or samples, and the time.

    Raises:
        DivergenceError: The loss of a user is not finite; names the user and the round.
        RecipeError: A pass does not fit into memory; names the setting to lower.
    """
    with within_memory(clients.pass_size, len(participants), clients.model.device):
        return _train_cohorts(clients, participants=participants, round_number=round_number, tick=tick)


def _train_cohorts(clients: Clients, participants: Sequence[int], round_number: int, tick: Tick) -> LocalRound:
    """Take the local steps of all participants, as :func:`train` does, without converting out-of-memory errors.

    If a participant has several copies of its model, all are trained; the result has the loss of the last copy.

    Args:
        clients: All users, with their data, models and local steps.
        participants: Numbers of the participants.
        round_number: The round, counted from 0.
        tick: Called after each local step of a cohort.
    """
    started, method = time.perf_counter(), clients.method
    clients.steps.suspects_by_row.clear()  # optimizers that may have caused non-finite values in the previous round
    losses: dict[int, float] = {}
    rejected: dict[int, str] = {}
    steps_taken: dict[int, int] = {}
    # Some methods compare each copy with the first copy of the same user, as it was before this round.
    first_copies = clients.state.rows_of(participants) if method.client.looks_across else None
    index_of_participant = {participant: index for index, participant in enumerate(participants)}

    rows_of_cohorts = _split_into_cohorts(clients, participants)
    num_cohorts_of: Counter[int] = Counter()  # by participant, as its copies may be in several cohorts
    for rows in rows_of_cohorts:
        num_cohorts_of.update(set(clients.trainers_of(rows)))
    rows_of_next_cohorts = [*rows_of_cohorts[1:], []]
    for rows, next_rows in zip(rows_of_cohorts, rows_of_next_cohorts, strict=True):
        cohort = clients.cohort(rows, round_number, looks_back=method.client.looks_back)
        clients.state.prefetch(next_rows)
        if first_copies is not None:
            cohort.first_copies = first_copies[[index_of_participant[owner] for owner in cohort.owners]]
        planned_steps, time_limits = _plan_local_steps(clients, cohort.owners, steps_taken, num_cohorts_of)
        losses_of_steps, num_steps = _take_local_steps(clients, cohort, planned_steps, time_limits, tick)
        reason_by_position = _end_local_steps(clients, cohort, losses_of_steps)
        mean_losses = losses_of_steps.sum(0) / num_steps
        steps_taken.update(zip(cohort.owners, num_steps.tolist(), strict=True))
        losses.update(zip(cohort.owners, mean_losses.tolist(), strict=True))
        for position, reason in reason_by_position.items():
            rejected[cohort.owners[position]] = reason

    if any(hook.resizes for hook in method.client.parts):
        clients.update_masks()
    if not clients.is_fine_tuning:  # users do not report the steps of fine-tuning
        clients.steps_taken.update(steps_taken)
    return LocalRound(
        losses={participant: loss for participant, loss in losses.items() if participant not in rejected},
        rejected=rejected,
        steps=steps_taken,
        tokens=_amount_of_round(clients, participants, steps_taken),
        seconds=time.perf_counter() - started,
    )


def _split_into_cohorts(clients: Clients, participants: Sequence[int]) -> list[list[int]]:
    """Divide the models of the participants into cohorts, each of which is trained in one batch.

    The users of a cohort have equal batch sizes: no batch is padded, so that they train exactly as they would alone.

    Args:
        clients: All users, with their data, models and local steps.
        participants: Numbers of the participants.

    Returns:
        For each cohort, the numbers of the rows that hold its models. If the method trains several copies of a
        participant's model, each copy has a row: ``copy * (number of trainers) + participant``.
    """
    copies = range(clients.method.placement.copies)
    rows = [copy * len(clients.trainers) + participant for copy in copies for participant in participants]
    rows_by_batch_size: dict[int, list[int]] = {}
    for row, owner in zip(rows, clients.trainers_of(rows), strict=True):
        batch_size_of_owner = clients.batch_source.size_of(owner)
        rows_by_batch_size.setdefault(batch_size_of_owner, []).append(row)
    rows_of_cohorts: list[list[int]] = []
    for rows_of_size in rows_by_batch_size.values():
        rows_of_cohorts += cohorts(rows_of_size, clients.pass_size.users)
    return rows_of_cohorts


def _plan_local_steps(
    clients: Clients, owners: Sequence[int], steps_taken: Mapping[int, int], num_cohorts_of: Mapping[int, int]
) -> tuple[Int[Tensor, " users"], Float[Tensor, " users"]]:
    """Return the largest number of local steps of each model of a cohort, and the seconds after which it stops earlier.

    A method may train several copies of a trainer's model, in one cohort or one after another in several. All copies
    take equally many steps: the time limit of the round stops the first one, and the others repeat its number.

    Args:
        clients: All users, with their data, models and local steps.
        owners: For each model of the cohort, the number of the trainer that owns it.
        steps_taken: For trainers with a copy in an earlier cohort of this round, the number of steps it took.
        num_cohorts_of: Number of cohorts that have copies of a trainer's model, among which its time is divided.
    """
    planned_steps, time_limits = [], []
    for owner in owners:
        if owner in steps_taken:
            planned_steps.append(steps_taken[owner])
            time_limits.append(math.inf)
        else:
            planned_steps.append(clients.batch_source.steps(owner))
            time_limits.append(clients.time_limit(owner) / num_cohorts_of[owner])  # cohorts train one after another
    return torch.tensor(planned_steps), torch.tensor(time_limits)


def _amount_of_round(clients: Clients, participants: Sequence[int], steps_taken: Mapping[int, int]) -> int:
    """Return the number of tokens or samples that participants have trained on, once for each copy of their models.

    Args:
        clients: All users, with their data, models and local steps.
        participants: Numbers of the participants.
        steps_taken: Number of local steps of each participant.
    """
    amount_per_copy = 0
    for participant in participants:
        amount_per_copy += _amount_of_steps(clients.batch_source, participant, steps_taken[participant])
    return clients.method.placement.copies * amount_per_copy


def _amount_of_steps(batch_source: BatchSource, trainer: int, steps: int) -> int:
    """Return the number of tokens or samples that a trainer has trained on in a round.

    If it took only some of the planned steps, the planned amount is multiplied by their fraction and rounded. This is
    an estimate if batches have different sizes.

    Args:
        batch_source: Batch source of the trainers.
        trainer: Number of the user who trains (0 if one model is trained on all users' data).
        steps: Number of steps that it took.
    """
    planned_amount = batch_source.trained_amount(trainer)
    planned_steps = batch_source.steps(trainer)
    if steps == planned_steps:
        return planned_amount
    return round(planned_amount * steps / planned_steps)


def _take_local_steps(
    clients: Clients,
    cohort: Cohort,
    most_steps: Int[Tensor, " users"],
    time_limits: Float[Tensor, " users"],
    tick: Tick,
) -> tuple[Float[Tensor, "steps users"], Int[Tensor, " users"]]:
    """Take the local steps of a cohort.

    Args:
        clients: All users, with their data, models and local steps.
        cohort: The cohort, updated in place.
        most_steps: Largest number of local steps of each user.
        time_limits: Seconds after which each user takes no further step; it takes at least one.
        tick: Called after each local step.

    Returns:
        Training losses in nats, 0 where a user has no more steps; and the number of steps that each user took.
    """
    has_time_limit = not bool(time_limits.isinf().all())
    started = clients.clock() if has_time_limit else 0.0
    for hook in clients.method.client.parts:
        hook.begin(cohort)
    if clients.is_fine_tuning and clients.method.client.tuning:  # separate fine-tuning phases start from zero moments
        cohort.reset_moments(clients.method.client.trained)
    losses, steps = [], most_steps
    for step in range(int(most_steps.max())):
        if has_time_limit and step > 0:
            out_of_time = clients.clock() - started >= time_limits
            steps = torch.where(out_of_time, steps.clamp(max=step), steps)
        is_active = step < steps  # users with less data or time have fewer steps
        if not bool(is_active.any()):
            break
        losses.append(clients.steps.take_local_step(cohort, clients.phases, step, is_active))
        tick()
    return torch.stack(losses), steps


def _end_local_steps(clients: Clients, cohort: Cohort, losses: Float[Tensor, "steps users"]) -> dict[int, str]:
    """Drop users who diverged, run the ``end`` hooks of the method, and store the tensors of the cohort.

    Args:
        clients: All users, with their data, models and local steps.
        cohort: The cohort after its local steps.
        losses: Training losses in nats.

    Returns:
        The reason for each dropped user, by position in the cohort.

    Raises:
        DivergenceError: A user diverged, and the method does not drop such users.
    """
    reason_by_position = find_nonfinite_users(losses, cohort.state.rows, cohort.round_number)
    _drop_diverged(clients, cohort, reason_by_position)
    for hook in clients.method.client.parts:
        hook.end(cohort)
    clients.apply_masks(cohort)
    clients.state.put(cohort.rows, cohort.state)
    return reason_by_position


def _drop_diverged(clients: Clients, cohort: Cohort, reason_by_position: dict[int, str]) -> None:
    """Undo the round of users whose losses or tensors are not finite; raise if the method does not drop such users.

    Args:
        clients: All users, with their data, models and local steps.
        cohort: The cohort; dropped users get their parameters of the start of the round, and their moments become 0.
        reason_by_position: For each user whose values are not finite, the reason, by position in the cohort.

    Raises:
        DivergenceError: The method does not drop such users.
    """
    state = cohort.state
    for position, reason in reason_by_position.items():
        if cohort.round_start is None or not clients.method.client.drops_nonfinite:
            suspect_optimizers = clients.steps.suspect_optimizers(cohort.rows[position], state.rows[position])
            raise diverged(cohort.names[position], reason, suspect_optimizers)
        state.rows[position] = cohort.round_start[position]
        for moments_or_count in (state.first, state.second, state.iterations, state.router_steps):
            moments_or_count[position] = 0


@contextmanager
def finetuned(clients: Clients, done: int | None = None, trainers: Sequence[int] | None = None) -> Iterator[None]:
    """Fine-tune the models of users for the duration of the block, in which they are scored; restore them on exit.

    Users take the local steps of one more round. Does nothing for methods that do not fine-tune, and in a nested block.

    Args:
        clients: All users, with their data, models and local steps.
        done: Number of rounds that are done; None for the round that the final models come from. Learning rates are
            those of the next round, or of the last one if all are done.
        trainers: Numbers of the trainers to fine-tune; those that are evaluated if None.
    """
    if not clients.method.client.finetunes or clients.is_fine_tuning:
        yield
        return
    original_state, original_phases = clients.state, clients.phases
    clients.state = original_state.copy()
    # The label gives batches a random stream of their own.
    tuning_phases = clients.method.client.tuning or original_phases
    clients.phases = [replace(phase, label=TUNING) for phase in tuning_phases]
    try:
        if done is None:
            done = clients.chosen_round
        if trainers is None:
            trainers = clients.scored_trainers
        last_round = clients.plan.training.rounds - 1  # rounds are counted from 0
        if trainers:
            train(clients, trainers, round_number=min(done, last_round))
        yield
    finally:
        clients.state.release()
        clients.state, clients.phases = original_state, original_phases


@torch.no_grad()
def settle(clients: Clients, *, all_users: bool = True) -> None:
    """Run the ``settle`` hooks of the method before scoring: they compute tensors that depend on trained ones.

    For example, a method may fit the weights of an ensemble to the models as they are after the round.

    Args:
        clients: All users, with their data, models and local steps.
        all_users: Whether to update all users, as at the end of a run; otherwise only those that are evaluated.
    """
    hooks = clients.method.client.settling
    if not hooks:
        return
    num_trainers, copies = len(clients.trainers), range(clients.method.placement.copies)
    trainers = range(num_trainers) if all_users else clients.scored_trainers
    all_rows = [copy * num_trainers + trainer for copy in copies for trainer in trainers]
    for rows in cohorts(all_rows, clients.pass_size.users):
        # Batches that hooks draw are of the round after the last one, so that no training step has the same batch.
        cohort = clients.cohort(rows, clients.plan.training.rounds, state=clients.state.without_moments())
        for hook in hooks:
            hook.settle(cohort)
        clients.state.put(rows, cohort.state)


@contextmanager
def settled(clients: Clients) -> Iterator[None]:
    """Settle the models of all users in the block, in which they are scored or copied; restore them on exit."""
    original_state = clients.state
    if clients.method.client.settling:
        clients.state = original_state.copy()
    try:
        settle(clients)
        yield
    finally:
        clients.state = original_state


def finish(clients: Clients) -> None:
    """Run the ``finish`` hooks of the method after the last round, and store the final models that they return.

    A final model replaces the last copy of its user, with which the user is evaluated.
    """
    hooks = clients.method.client.finishing
    if not hooks:
        return
    num_trainers, copies = len(clients.trainers), range(clients.method.placement.copies)
    for trainers in cohorts(range(num_trainers), clients.users_per_message):
        # All first copies, then all second copies: rows [0, 1, 10, 11] of trainers 0 and 1 among 10.
        rows = [copy * num_trainers + trainer for copy in copies for trainer in trainers]
        for hook in hooks:
            cohort = clients.cohort(rows, clients.plan.training.rounds)
            final_models = hook.finish(cohort)
            cohort.state.rows[-len(trainers) :] = final_models  # of the last copies
            clients.state.put(rows, cohort.state)
