"""The server: its state, and the aggregation of uploads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.data.populations import MAX_HASHED_NAMES, UserNumbers
from comingle.methods.base import Method
from comingle.methods.server import Mean, Received, ServerSetup
from comingle.models.hardware import require_room
from comingle.models.lora import PeftAdapter
from comingle.models.model import Model
from comingle.privacy.accounting import Account, Work
from comingle.privacy.base import (
    CLIP_NORM,
    PrivacyMechanism,
    RuleResult,
    ServerRound,
    mean_as_upload,
    one_model,
    overrides,
)
from comingle.privacy.noise import without_padding
from comingle.privacy.secure_sum import Sums
from comingle.protocol import Format
from comingle.protocol.messages import (
    COUNT,
    LOWEST,
    STEPS,
    VALIDATION,
    Download,
    Upload,
    decompress,
    fill_ranks,
    validation_reply,
)
from comingle.training.plan import server_mechanisms
from comingle.training.settings import RunPlan, participants, round_sizes
from comingle.training.state import draw
from comingle.utils.errors import RecipeError
from comingle.utils.trees import ADAPTOR, STATISTICS, Layout, Tree, restrict

logger = logging.getLogger("comingle")

VERSION, RANKS = "version", "ranks"
"""Keys of server state that does not belong to the method; ``LOWEST`` is that of the lowest validation loss."""
BEST_PREFIX = "best/"
"""Prefix of the keys of tensors as of the best round."""


class Mechanisms(tuple[PrivacyMechanism, ...]):
    """The privacy mechanisms of a server, in the order in which they see uploads."""

    @property
    def state(self) -> Tree:
        """State to resume from, under the keys of a checkpoint."""
        state: Tree = {}
        for mechanism in self:
            state.update(mechanism.state)
        return state

    def restore(self, state: Tree) -> None:
        """Restore the mechanisms from a checkpoint, whose state has the keys of :attr:`state` and maybe others."""
        for mechanism in self:
            mechanism.restore(state)

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of :attr:`state` whose tensors have users on the leading dimension."""
        keys: set[str] = set()
        for mechanism in self:
            keys.update(mechanism.by_user)
        return frozenset(keys)

    def admit(self, selected: list[int], number: int, *, releases: bool) -> list[int] | None:
        """Return which of the selected users may take part in a round; None if the privacy budget ends the run.

        Each mechanism may leave out users whose privacy budget is spent.

        Args:
            selected: Numbers of the selected users.
            number: The round, counted from 0.
            releases: Whether users upload in this round. A round without uploads costs no privacy budget.
        """
        remaining = selected
        for mechanism in self:
            admitted = mechanism.admit(remaining, number, releases=releases)
            if admitted is None:
                return None
            remaining = admitted
        return remaining

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Pass the uploads of a round through all mechanisms, each of which may replace them, such as by a noised sum.

        Args:
            received: Uploads of the round.
            server_round: The round and the method's server state.

        Returns:
            The uploads as the method aggregates them; None if too few are left, so that the model stays unchanged.
        """
        for mechanism in self:
            protected = mechanism.server_sum(received, server_round)
            if protected is None:
                return None
            received = protected
        return received

    def charge(self, numbers: Sequence[int]) -> None:
        """Charge the noisy uploads of a round to the privacy budgets of users, also if they were not aggregated.

        Args:
            numbers: Numbers of the users who have uploaded.
        """
        if self.account is not None:
            self.account.charge(numbers)

    def set_works(self, compute_works: Callable[[], Mapping[str, Work]]) -> None:
        """Set the function from which the privacy account gets each user's numbers of examples, steps and rounds.

        They determine the privacy loss of a user with example-level privacy.

        Args:
            compute_works: Returns these numbers by user; called when the account computes a privacy loss.
        """
        if self.account is not None:
            self.account.works = compute_works

    @property
    def adaptive(self) -> bool:
        """True if users download a clip norm and report whether their updates were within it."""
        num_users = 1  # any number: all downloads have the same entries
        return any(CLIP_NORM in mechanism.download(num_users) for mechanism in self)

    @property
    def account(self) -> Account | None:
        """Record of the noisy uploads (releases) of each user and their privacy loss; None in a run without noise."""
        for mechanism in self:
            if mechanism.account is not None:
                return mechanism.account
        return None

    @property
    def rule_result(self) -> RuleResult | None:
        """Result of the robust aggregation rule in the last round; None without such a rule."""
        for mechanism in self:
            if mechanism.rule_result is not None:
                return mechanism.rule_result
        return None

    @property
    def metrics(self) -> dict[str, object]:
        """Metrics of privacy under the key "privacy"; empty in a run without noise."""
        metrics_of_mechanisms: dict[str, object] = {}
        for mechanism in self:
            metrics_of_mechanisms.update(mechanism.metrics)
        if not metrics_of_mechanisms:
            return {}
        return {"privacy": metrics_of_mechanisms}


@dataclass
class BestRound:
    """Round with the lowest validation loss, for ``evaluation.select: best``.

    Attributes:
        loss: Mean validation loss after the round, in nats; infinite before the first validation.
        tensors: The method's tensors and version after the round; empty if no round is selected.
    """

    loss: float = math.inf
    tensors: Tree = field(default_factory=dict)


@dataclass(kw_only=True)
class ServerState:
    """State of a method's server.

    Attributes:
        method: Method of the run.
        layout: Layout of the trainable tensors.
        users: Names of all users.
        scales: LoRA scale of each user, which follows from public settings.
        ranks: LoRA rank of each user at its last upload.
        weighted: Whether uploads are weighted by amounts of training data.
        normalises: Whether changes are normalised by numbers of local steps (:func:`normalise_steps`).
        uploads: Number format of uploads.
        clustered: Names of the tensors with one entry per mixture component on the leading axis.
        centred: Moves the mean of components into the base.
        kept: Tensors of the method.
        version: Number of rounds that were done at the last aggregation.
        best: Round with the lowest validation loss so far, if the best round is selected.
        mechanisms: Privacy mechanisms, in the order in which they see uploads.
        sums: Settings of secure sums, with which the server sees only sums of uploads.
    """

    method: Method
    layout: Layout
    users: Sequence[str]
    scales: Float[Tensor, " users"]
    ranks: Int[Tensor, " users"]
    weighted: bool
    uploads: Format
    clustered: tuple[str, ...]
    centred: Callable[[Tree, Float[Tensor, " clusters"]], Tree]
    kept: Tree = field(default_factory=dict)
    version: int = 0
    best: BestRound = field(default_factory=BestRound)
    mechanisms: Mechanisms = field(default_factory=lambda: Mechanisms())
    sums: Sums | None = None
    normalises: bool = False

    @cached_property
    def numbers(self) -> UserNumbers:
        """Maps names of users to their numbers."""
        return UserNumbers(self.users)

    @property
    def state(self) -> Tree:
        """All state to resume from: tensors of the method, progress, and state of the privacy mechanisms."""
        return {
            **self.kept,
            VERSION: torch.tensor(self.version),
            RANKS: self._saved_ranks,
            LOWEST: torch.tensor(self.best.loss, dtype=torch.float64),
            **self.mechanisms.state,
            **{BEST_PREFIX + name: t for name, t in self.best.tensors.items()},
        }

    def remember(self) -> None:
        """Store a copy of the method's tensors as those of the best round, for ``evaluation.select: best``."""
        self.best.tensors = {VERSION: torch.tensor(self.version)}
        if not self.method.server.peer_to_peer:  # such a server keeps nothing between rounds
            self.best.tensors |= {name: t.clone() for name, t in self.kept.items()}

    @property
    def _saved_ranks(self) -> Int[Tensor, " _"]:
        """LoRA ranks to save: one per user, or a single one for over :data:`MAX_HASHED_NAMES` users of equal rank."""
        changes_ranks = any(hook.resizes for hook in self.method.client.parts)
        has_many_users = len(self.users) > MAX_HASHED_NAMES
        if has_many_users and not changes_ranks and bool((self.ranks == self.ranks[0]).all()):
            return self.ranks[:1].clone()
        return self.ranks.clone()

    def restore(self, state: Tree) -> None:
        """Restore the state from a checkpoint, in which :attr:`state` was saved."""
        self.mechanisms.restore(state)
        best_names = [name for name in state if name.startswith(BEST_PREFIX)]
        best_tensors = {name.removeprefix(BEST_PREFIX): state[name] for name in best_names}
        self.best = BestRound(float(state[LOWEST]), best_tensors)
        # All other tensors of the checkpoint are those that the method keeps.
        other_keys = {VERSION, RANKS, LOWEST, *self.mechanisms.state, *best_names}
        self.kept = {name: t for name, t in state.items() if name not in other_keys}
        self.version = int(state[VERSION])
        self.ranks = _one_per_user(state[RANKS], len(self.users))  # a single saved rank is that of all users

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of state tensors with users on the leading dimension."""
        of_best = {BEST_PREFIX + name for name in self.method.server.by_user if name in self.best.tensors}
        return self.method.server.by_user | {RANKS} | self.mechanisms.by_user | of_best

    @property
    def model(self) -> Tree:
        """Model that all users download, if the method has one."""
        return one_model(self.method.server, self.kept)

    @property
    def size(self) -> int:
        """Number of shared entries per user."""
        return self.layout.count(self.method.shared)

    @property
    def shares(self) -> bool:
        """True if users share any tensors."""
        return bool(self.layout.mask(self.method.shared).any())

    def clear_uploads(self) -> None:
        """Delete the uploads of peers after all participants have downloaded."""
        self.kept.clear()


class ServerHalf(ServerState):
    """A method's server: sends downloads and aggregates uploads."""

    def with_download(self, users: Sequence[str]) -> list[str]:
        """Return those of the given users for which the server has a download.

        With peer-to-peer methods only users that have uploaded in this round get one, with others all users.
        """
        if not self.method.server.peer_to_peer:
            return list(users)
        uploaders = {self.users[number] for number in self.method.server.senders(self.kept)}
        return [user for user in users if user in uploaders]

    def invite(self, plan: RunPlan, number: int, *, releases: bool = True) -> list[int] | None:
        """Return the numbers of a round's participants; None if no privacy budget is left, which ends the run.

        If users are sampled independently of each other, the list may be empty.

        Args:
            plan: Settings of the run, in the form that training uses.
            number: The round, counted from 0.
            releases: Whether users upload in this round. A round without uploads costs no privacy budget.
        """
        selected = participants(plan, number, self.users)
        return self.mechanisms.admit(selected, number, releases=releases)

    def check_rounds(self, plan: RunPlan) -> None:
        """Check that rounds have enough participants for all privacy mechanisms, and equal ranks where these need them.

        Raises:
            RecipeError: A round has too few participants, or LoRA ranks differ between users and a mechanism compares
                uploads entry by entry.
        """
        if not self.shares:  # nothing is uploaded
            return
        if not self.mechanisms:
            return
        numbers_of_participants = round_sizes(plan, self.users)  # all that a round may have, such as {3, 5}
        same_ranks = len(set(self.ranks.tolist())) == 1
        for mechanism in self.mechanisms:
            mechanism.check_rounds(numbers_of_participants, same_ranks=same_ranks)

    def warn_of_noise(self, plan: RunPlan) -> None:
        """Log a warning if the noise of a private run is larger than the updates of its users."""
        uploads_tensors = self.shares
        if not uploads_tensors:
            return
        for mechanism in self.mechanisms:
            warning = mechanism.warn(self.size, plan.training.rounds)  # empty if the noise is small
            if warning:
                logger.warning("%s", warning)

    def download(self, users: Sequence[str], *, once: bool = True) -> Download:
        """Return what some users download now, joined in one message.

        Args:
            users: Names of the users.
            once: Include the tensors that a user downloads once.

        Returns:
            The shared tensors ``(users, models, *shape)``, as a user may download several models; their version (number
            of rounds done); the users' LoRA ranks; and for peer-to-peer methods the names of the users who uploaded
            the models.
        """
        numbers = self.numbers(users)
        senders = self.method.server.senders(self.kept)
        tensors = self.method.server.download(self.kept, numbers)
        if not once:
            for slot in self.layout.touching(self.method.placement.once).slots:
                tensors.pop(slot.name, None)
        for mechanism in self.mechanisms:  # may add a clip norm
            tensors |= mechanism.download(len(numbers))
        return Download(
            version=self.version,
            users=tuple(users),
            tensors=tensors,
            ranks=self.ranks[numbers],
            senders=tuple(self.users[sender] for sender in senders),
        )

    @torch.no_grad()
    def aggregate(self, upload: Upload) -> None:
        """Aggregate the uploads of a round into the state of the method's server, ``self.kept``.

        Also charges the privacy budgets of the users, and stores their LoRA ranks.

        Args:
            upload: Uploads of all participants, joined in one message.
        """
        method_server = self.method.server
        numbers = self.numbers(upload.users)
        tensors = fill_ranks(decompress(upload.tensors, self.uploads), self.layout)
        self._charge_privacy(numbers)
        received = self._make_received(numbers, tensors, upload)
        if self.normalises:  # by numbers of local steps, as in FedNova
            starts = method_server.starts(self.kept, received)  # what each participant had before it trained
            received = normalise_steps(received, starts)
        server_round = ServerRound(
            round_index=upload.round - 1, names=upload.users, server=method_server, kept=self.kept
        )
        protected = self.mechanisms.server_sum(received, server_round)
        if protected is not None:  # None: too few uploads for an aggregation rule, so the model stays unchanged
            method_server.aggregate(self.kept, protected)
        self.ranks[numbers] = upload.ranks
        self._end_round(upload.round, aggregated=protected is not None)

    @property
    def needs_only_sums(self) -> bool:
        """True if the server aggregates by weighted sums of uploads, so that it need not see each upload.

        If users are spread over several processes, each process may then send the sum over its own users.
        """
        server = self.method.server
        if self.sums is not None:  # secure sums have a protocol of their own, which adds up integers
            return False
        if self.normalises:  # changes are scaled before they are added up
            return False
        if any(overrides(mechanism, "server_sum") for mechanism in self.mechanisms):
            return False  # such a mechanism clips or compares uploads, so it needs each of them
        # A server that overrides ``Mean.aggregate`` may use the uploads in other ways.
        return isinstance(server, Mean) and server.kind == "sum" and type(server).aggregate is Mean.aggregate

    def coefficients(self, names: Sequence[str], upload: Upload) -> Tree:
        """Return the weight of each upload in the server's weighted sums, by tensor name.

        With these weights each of several processes adds up the uploads of its own users, so that the server receives
        only one sum per process. Requires :attr:`needs_only_sums`: weights do not depend on the uploaded tensors.

        Args:
            names: Names of the shared tensors.
            upload: The uploads of all users in one message, with what they report, such as amounts of data. Its tensors
                are not used and may be empty.
        """
        method_server = self.method.server
        assert isinstance(method_server, Mean)
        empty_tensors = dict.fromkeys(names, torch.zeros(0))
        received = self._make_received(self.numbers(upload.users), empty_tensors, upload)
        return method_server.coefficients(received)

    @torch.no_grad()
    def aggregate_weighted(self, sums: Tree, upload: Upload) -> None:
        """Aggregate the uploads of a round from their weighted sums; only with :attr:`needs_only_sums`.

        Args:
            sums: Sums of the uploads times :meth:`coefficients`, by tensor name.
            upload: The joined uploads without tensors: users, reports and ranks.
        """
        method_server, numbers = self.method.server, self.numbers(upload.users)
        assert isinstance(method_server, Mean)
        self._charge_privacy(numbers)
        received_without_tensors = self._make_received(numbers, {}, upload)
        method_server.step(self.kept, sums, received_without_tensors)
        self.ranks[numbers] = upload.ranks
        self.version = upload.round

    @torch.no_grad()
    def aggregate_sum(self, total: np.ndarray | Int[Tensor, " entries"], users: Sequence[str], done: int) -> None:
        """Aggregate a secure sum of uploads.

        Args:
            total: The sum of the users' vectors of integers, in which all shared entries are concatenated.
            users: Names of the users in the sum.
            done: The round, counted from 1.
        """
        assert self.sums is not None
        self._charge_privacy(self.numbers(users))
        downloaded = self.model  # the model that all users downloaded before the round
        mean = self.sums.mean(total, downloaded, len(users), done)
        mean_upload = mean_as_upload(downloaded, mean, self._roles)  # as if a single user had uploaded the mean
        self.method.server.aggregate(self.kept, mean_upload)
        self.version = done

    def skip_round(self, done: int, received: Sequence[int] = ()) -> None:
        """End a round without aggregation, so that the model is unchanged.

        Args:
            done: The round, counted from 1.
            received: Numbers of the users whose uploads have arrived and are not used.
        """
        self._end_round(done, aggregated=False)
        for mechanism in self.mechanisms:
            mechanism.skip_round(received)

    def _end_round(self, done: int, *, aggregated: bool) -> None:
        """Set the version to ``done``; keep 0 if tensors are sent once and no upload with them has been aggregated."""
        if aggregated or self.version > 0 or not self.method.placement.once:
            self.version = done

    def _make_received(self, numbers: Sequence[int], tensors: Tree, upload: Upload) -> Received:
        """Return uploads with the users' aggregation weights and LoRA scales, as strategies and mechanisms take them.

        Args:
            numbers: Numbers of the users that have uploaded.
            tensors: Uploaded tensors ``(users, *shape)``, decompressed.
            upload: The joined uploads, for reports and ranks.
        """
        return Received(
            users=numbers,
            tensors=tensors,
            weights=self._weights(upload),
            ranks=upload.ranks,
            scales=self.scales[numbers],
            reports=upload.reports,
            clustered=self.clustered,
            centred=self.centred,
            roles=self._roles,
        )

    @cached_property
    def _roles(self) -> dict[str, frozenset[str]]:
        """Roles of the shared entries of each tensor, by tensor name."""
        return self.layout.named_roles(self.method.shared)

    def _charge_privacy(self, numbers: Sequence[int]) -> None:
        """Charge the release of uploads to the privacy budgets of users; does nothing in a run without noise."""
        account = self.mechanisms.account
        if account is not None and self.shares:
            account.charge_uploads(numbers)

    def judge(self, report: Upload, users: Sequence[str] | None = None) -> Download:
        """Return a message that says whether the mean validation loss after a round is the lowest so far.

        If it is, users store their models as the best ones.

        Args:
            report: Validation losses of users after a round.
            users: Names of the receivers; the users that have reported if None.
        """
        mean_loss = fmean(report.reports[VALIDATION].tolist())
        is_lowest = mean_loss < self.best.loss
        if is_lowest:
            self.best.loss = mean_loss
            self.remember()
        receivers = users or report.users
        return validation_reply(receivers, report.round, lowest=is_lowest)

    def _weights(self, upload: Upload) -> Float[Tensor, " users"]:
        """Return the weight of each upload in means: equal, or by the amount of training data."""
        counts = upload.reports[COUNT] if self.weighted else torch.ones(len(upload.users))
        return averaging_weights(counts)


def averaging_weights(counts: Tensor) -> Float[Tensor, " users"]:
    """Return the weight of each upload in a mean: proportional to a count per user, with sum 1, in float64."""
    return counts.double() / counts.double().sum()


def normalise_steps(received: Received, starts: Tree) -> Received:
    """Return uploads whose changes are normalised by the users' numbers of local steps, as in FedNova.

    User i has taken ``tau_i`` local steps from ``x`` to ``x_i``. Its upload becomes
    ``x + tau_eff / tau_i (x_i - x)`` with ``tau_eff = sum_i p_i tau_i`` for aggregation weights ``p_i``, so that users
    with more steps do not count more. This is exact for SGD without momentum, and an approximation for other
    optimisers. Running statistics of batch norm stay as they are.

    Source: Wang et al. 2020, arXiv:2007.07481, eq. 6 with the normaliser of local SGD.

    Args:
        received: Uploads of a round, with the report :data:`STEPS`.
        starts: Tensors with which each participant began the round, ``(users, *shape)``.
    """
    tau, p = received.reports[STEPS].double(), received.weights.double()
    if bool((tau == tau[0]).all()):  # all factors are 1
        return received
    tau_eff = (p * tau).sum()
    factors = tau_eff / tau
    x = without_padding(starts, received.ranks)  # zero where a user of a smaller rank has no parameter
    normalised: Tree = {}
    for name, x_i in received.tensors.items():
        is_statistics = any(role.partition(".")[0] == STATISTICS for role in received.roles.get(name, ()))
        if is_statistics:
            normalised[name] = x_i
        else:
            factor = factors.to(x_i).view(-1, *[1] * (x_i.dim() - 1))  # (users, 1, ..., 1)
            normalised[name] = x[name] + factor * (x_i - x[name])
    return replace(received, tensors=normalised)


def tensors_of_components(model: Model, method: Method) -> tuple[str, ...]:
    """Return the names of the tensors whose leading axis is the components of a mixture, in the order of the layout.

    The server averages each component with weights of its own. The tensors are the adaptors and, in a mixture of whole
    models, the running statistics of batch norm. A mixture of adaptors in one model has no running statistics for each
    component.
    """
    component_roles = {ADAPTOR}
    mixture = method.placement.mixture
    mixes_whole_models = mixture is not None and mixture.of == "models"
    if mixes_whole_models:
        component_roles.add(STATISTICS)
    names = []
    for slot in model.layout.slots:
        roles = set(slot.roles)
        if len(roles) == 1 and roles <= component_roles:
            names.append(slot.name)
    return tuple(names)


def start_server(model: Model, users: Sequence[str], plan: RunPlan) -> ServerHalf:
    """Return the server before the first round.

    Args:
        model: The model that all users train.
        users: Names of all users.
        plan: Settings of the run, in the form that training uses.

    Raises:
        RecipeError: The server merges or sends whole models and ranks differ between users, or it forwards uploads
            between peers and uploads are compressed.
    """
    method = plan.method
    mechanisms = Mechanisms(server_mechanisms(plan, users))
    for mechanism in mechanisms:
        mechanism.check_server(method, model.layout, len(users))
    _check_uploads_and_ranks(model, plan)
    server = ServerHalf(
        method=method,
        layout=model.layout,
        users=users,
        scales=_one_per_user(model.scales, len(users)),
        ranks=_one_per_user(model.ranks, len(users)),
        weighted=plan.training.weighting != "uniform" and plan.privacy is None,
        uploads=plan.training.uploads,
        clustered=tensors_of_components(model, method),
        centred=model.centre,
        mechanisms=mechanisms,
        sums=plan.sums,
        normalises=plan.training.normalise_steps,
    )
    if method.shared:
        # The method's strategy computes its state from the tensors that users will download.
        all_tensors = model.layout.views(_initial_models(model, plan))
        setup = ServerSetup(
            models=restrict(all_tensors, model.layout, method.received),
            users=server.users,
            scales=server.scales,
            seed=plan.seed,
            roles=model.layout.named_roles(method.received),
        )
        initial_state = method.server.start(setup)
        server.kept = {name: t.to(model.device) for name, t in initial_state.items()}
    if plan.evaluation.select == "best":
        server.remember()
    return server


def _check_uploads_and_ranks(model: Model, plan: RunPlan) -> None:
    """Check that the server of the method supports the number format of uploads and the LoRA ranks of users.

    Args:
        model: The model that all users train.
        plan: Settings of the run, in the form that training uses.

    Raises:
        RecipeError: See :func:`start_server`.
    """
    method, number_format = plan.method, plan.training.uploads
    if method.server.peer_to_peer and number_format != "float32":
        raise RecipeError(
            f"training.uploads: got {number_format!r} for {method.name}, whose users mix uploads; allowed: float32"
        )
    # A server with ``first_download`` sends models of one rank to all users before the first round.
    needs_equal_ranks = method.server.first_download or method.server.one_rank
    has_padding = not bool(model.mask().all())  # of users with a smaller rank than others
    if needs_equal_ranks and has_padding:
        raise RecipeError(
            f"method {method.name}: adapters.rank differs between users; the server's models have one rank"
        )


def _one_per_user(values: Tensor, users: int) -> Tensor:
    """Return one value per user; a single value is repeated."""
    return values.cpu().expand(users).clone()


def _initial_models(model: Model, plan: RunPlan) -> Float[Tensor, "models columns"]:
    """Return the initial models of the server: one, or several with different weights if the method keeps several.

    Users start from the first one.
    """
    method, seed = plan.method, plan.seed
    num_models, layout = method.server.server_models, model.layout
    first_model = draw(layout, seed, "server").unsqueeze(0)  # (1, columns)
    if model.other_initial_rows is not None:  # those of nets come from the net's own initialisation
        other_models = [model.other_initial_rows]
    else:
        require_room(f"method {method.name}", num_models, layout.columns)  # an error before memory runs out
        other_models = [draw(layout, seed, f"server/{number}").unsqueeze(0) for number in range(1, num_models)]
    dtype = torch.promote_types(model.dtype, torch.float32)
    models = torch.cat([first_model, *other_models]).to(model.device, dtype)
    if isinstance(plan.start, PeftAdapter):
        model.set_adapter(models, plan.start, [0] * len(models))  # all users have the same rank
    return models
