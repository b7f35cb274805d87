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


class Mechanisms(tuple[PrivacyMechanism, ...]):
    """The privacy mechanisms of a server, in the order in which they see uploads."""

    @property
    def state(self) -> Tree:
        """State to resume from, under the keys of a checkpoint."""
        return {name: t for mechanism in self for name, t in mechanism.state.items()}

    def restore(self, state: Tree) -> None:
        """Restore the mechanisms from a checkpoint."""
        for mechanism in self:
            mechanism.restore(state)

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of state tensors with users on the leading dimension."""
        return frozenset(name for mechanism in self for name in mechanism.by_user)

    def admit(self, members: list[int], number: int, *, releases: bool) -> list[int] | None:
        """Return which participants of a round may take part; None if the privacy budget ends the run.

        Each mechanism may leave out users whose privacy budget is spent.

        Args:
            members: Numbers of the selected users.
            number: The round, counted from 0.
            releases: Whether users upload in this round. A round without uploads costs no privacy budget.
        """
        admitted: list[int] | None = members
        for mechanism in self:
            admitted = None if admitted is None else mechanism.admit(admitted, number, releases=releases)
        return admitted

    def server_sum(self, received: Received, server_round: ServerRound) -> Received | None:
        """Pass the uploads of a round through all mechanisms, and return them as the method aggregates them.

        A mechanism may replace the uploads, for example by a noised sum; None stands for nothing to aggregate.

        Args:
            received: Uploads of the round.
            server_round: The round and the method's server state.
        """
        protected: Received | None = received
        for mechanism in self:
            protected = None if protected is None else mechanism.server_sum(protected, server_round)
        return protected

    def charge(self, numbers: Sequence[int]) -> None:
        """Charge a release to the privacy budgets of users, whether or not it was aggregated."""
        if self.account is not None:
            self.account.charge(numbers)

    def set_works(self, compute_works: Callable[[], Mapping[str, Work]]) -> None:
        """Set the function from which the privacy account gets each user's work.

        The example-level privacy loss of a user follows from its work: its numbers of examples, steps and rounds.

        Args:
            compute_works: Returns the work by user; called when the account computes a privacy loss.
        """
        if self.account is not None:
            self.account.works = compute_works

    @property
    def adaptive(self) -> bool:
        """True if users download a clip norm and report whether their updates were within it."""
        return any(CLIP_NORM in mechanism.download(1) for mechanism in self)

    @property
    def account(self) -> Account | None:
        """Account of what was released, in a run with noise."""
        return next((one.account for one in self if one.account is not None), None)

    @property
    def rule_result(self) -> RuleResult | None:
        """Judgement of a robust aggregation rule on the last round's uploads."""
        return next((one.rule_result for one in self if one.rule_result is not None), None)

    @property
    def metrics(self) -> dict[str, object]:
        """Metrics of privacy, in a run with noise."""
        found = {key: value for mechanism in self for key, value in mechanism.metrics.items()}
        return {"privacy": found} if found else {}


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
        clustered: Names of the tensors whose leading axis is the components of a mixture.
        centred: Moves the mean of components into the base.
        kept: Tensors of the method.
        version: Number of rounds that were done at the last aggregation.
        lowest_loss: Lowest mean validation loss so far, if the best round is selected.
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
    lowest_loss: float = math.inf
    mechanisms: Mechanisms = field(default_factory=lambda: Mechanisms())
    sums: Sums | None = None
    normalises: bool = False

    @cached_property
    def numbers(self) -> UserNumbers:
        """Maps names of users to their numbers."""
        return UserNumbers(self.users)

    @property
    def state(self) -> Tree:
        """All state to resume from."""
        lowest = torch.tensor(self.lowest_loss, dtype=torch.float64)
        progress = {VERSION: torch.tensor(self.version), RANKS: self._saved_ranks, LOWEST: lowest}
        return {**self.kept, **progress, **self.mechanisms.state}

    @property
    def _saved_ranks(self) -> Int[Tensor, " _"]:
        """LoRA ranks to save ``(users,)``.

        If more than :data:`MAX_HASHED_NAMES` users have the same rank, which no hook changes, a single rank ``(1,)``
        is saved, so that the size of the server's state does not grow with the number of users.
        """
        ranks_fixed = not any(hook.resizes for hook in self.method.client.parts)
        may_shorten = len(self.users) > MAX_HASHED_NAMES and ranks_fixed
        saves_one = may_shorten and bool((self.ranks == self.ranks[0]).all())
        return self.ranks[:1].clone() if saves_one else self.ranks.clone()

    def restore(self, state: Tree) -> None:
        """Restore the state from a checkpoint."""
        self.mechanisms.restore(state)
        # All other tensors of the checkpoint are those that the method keeps.
        other_keys = {VERSION, RANKS, LOWEST, *self.mechanisms.state}
        self.kept = {name: t for name, t in state.items() if name not in other_keys}
        self.version = int(state[VERSION])
        self.ranks = _one_per_user(state[RANKS], len(self.users))  # a single saved rank is that of all users
        self.lowest_loss = float(state[LOWEST])

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of state tensors with users on the leading dimension."""
        return self.method.server.by_user | {RANKS} | self.mechanisms.by_user

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

        With peer-to-peer methods these are the users that have uploaded in this round, with others all users.
        """
        if not self.method.server.peer_to_peer:
            return list(users)
        senders = {self.users[sender] for sender in self.method.server.senders(self.kept)}
        return [user for user in users if user in senders]

    def invite(self, plan: RunPlan, number: int, *, releases: bool = True) -> list[int] | None:
        """Return the numbers of a round's participants; None if no privacy budget is left, which ends the run.

        If users are sampled independently of each other, the list may be empty.

        Args:
            plan: Plan of the run.
            number: The round, counted from 0.
            releases: Whether users upload in this round. A round without uploads costs no privacy budget.
        """
        return self.mechanisms.admit(participants(plan, number, self.users), number, releases=releases)

    def check_rounds(self, plan: RunPlan) -> None:
        """Check that rounds have enough participants for all privacy mechanisms, and that users' ranks suit them.

        Raises:
            RecipeError: A round has too few participants, or LoRA ranks differ between users and a mechanism compares
                uploads entry by entry.
        """
        if not self.shares or not self.mechanisms:  # nothing is uploaded, or nothing has to be checked
            return
        numbers_of_participants, same_ranks = round_sizes(plan, self.users), len(set(self.ranks.tolist())) == 1
        for mechanism in self.mechanisms:
            mechanism.check_rounds(numbers_of_participants, same_ranks=same_ranks)

    def warn_of_noise(self, plan: RunPlan) -> None:
        """Log a warning if the noise of a private run is larger than the updates of its users."""
        for mechanism in self.mechanisms if self.shares else ():
            if why := mechanism.warn(self.size, plan.training.rounds):
                logger.warning("%s", why)

    def download(self, users: Sequence[str]) -> Download:
        """Return the current download of some users, joined in one message.

        It has the shared tensors ``(users, models, *shape)``, their version, the users' LoRA ranks, and for
        peer-to-peer methods the names of those whose models are sent.
        """
        numbers = self.numbers(users)
        senders = self.method.server.senders(self.kept)
        tensors = self.method.server.download(self.kept, numbers)
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
        """Aggregate the uploads of a round, joined in one message.

        Also charges the privacy budgets of the users, and stores their LoRA ranks.
        """
        numbers = self.numbers(upload.users)
        tensors = fill_ranks(decompress(upload.tensors, self.uploads), self.layout)
        self._charge_privacy(numbers)
        context = ServerRound(
            round_index=upload.round - 1, names=upload.users, server=self.method.server, kept=self.kept
        )
        received = self._make_received(numbers, tensors, upload)
        if self.normalises:
            received = normalise_steps(received, self.method.server.starts(self.kept, received))
        received = self.mechanisms.server_sum(received, context)
        if received is not None:  # None: too few uploads for an aggregation rule, so the model stays unchanged
            self.method.server.aggregate(self.kept, received)
        self.ranks[numbers] = upload.ranks
        self.version = upload.round

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
        """Return the weight of each upload in the weighted sums, by tensor name; only with :attr:`needs_only_sums`.

        Weights depend on the users and their reports, not on the uploaded tensors.

        Args:
            names: Names of the shared tensors.
            upload: The joined uploads; their tensors may be empty.
        """
        server, numbers = self.method.server, self.numbers(upload.users)
        assert isinstance(server, Mean)
        no_tensors = dict.fromkeys(names, torch.zeros(0))
        return server.coefficients(self._make_received(numbers, no_tensors, upload))

    @torch.no_grad()
    def aggregate_weighted(self, sums: Tree, upload: Upload) -> None:
        """Aggregate the uploads of a round from their weighted sums; only with :attr:`needs_only_sums`.

        Args:
            sums: Sums of the uploads times :meth:`coefficients`, by tensor name.
            upload: The joined uploads without tensors: users, reports and ranks.
        """
        server, numbers = self.method.server, self.numbers(upload.users)
        assert isinstance(server, Mean)
        self._charge_privacy(numbers)
        server.step(self.kept, sums, self._make_received(numbers, {}, upload))
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
        # The strategy aggregates the mean as it would the upload of a single user.
        self.method.server.aggregate(self.kept, mean_as_upload(downloaded, mean, self._roles))
        self.version = done

    def skip_round(self, done: int, received: Sequence[int] = ()) -> None:
        """End round ``done`` without aggregation; the model is unchanged, even if uploads were received."""
        self.version = done
        for mechanism in self.mechanisms:
            mechanism.skip_round(received)

    def _make_received(self, numbers: Sequence[int], tensors: Tree, upload: Upload) -> Received:
        """Return uploads in the form that strategies and mechanisms take, with weights, ranks and scales of the users.

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
            clustered=self.clustered,  # names of the tensors with one entry per mixture component
            centred=self.centred,  # moves the mean of the components into the base
            roles=self._roles,
        )

    @cached_property
    def _roles(self) -> dict[str, frozenset[str]]:
        """Roles of the shared entries of each tensor, by tensor name."""
        return self.layout.named_roles(self.method.shared)

    def _charge_privacy(self, numbers: Sequence[int]) -> None:
        """Charge the release of uploads to the privacy budgets of users."""
        if (account := self.mechanisms.account) is not None and self.shares:
            account.charge_uploads(numbers)

    def judge(self, report: Upload, users: Sequence[str] | None = None) -> Download:
        """Return a message that says whether the mean of reported validation losses is the lowest so far.

        After a lowest mean, users store their models as the best ones. The server remembers the lowest mean.

        Args:
            report: Validation losses of users after a round.
            users: Names of the receivers; the users that have reported if None.
        """
        loss = fmean(report.reports[VALIDATION].tolist())
        is_lowest = loss < self.lowest_loss
        self.lowest_loss = min(loss, self.lowest_loss)
        return validation_reply(users or report.users, report.round, lowest=is_lowest)

    def _weights(self, upload: Upload) -> Float[Tensor, " users"]:
        """Return the weight of each upload in means: equal, or by the amount of training data."""
        counts = upload.reports[COUNT] if self.weighted else torch.ones(len(upload.users))
        return averaging_weights(counts)


def averaging_weights(counts: Tensor) -> Float[Tensor, " users"]:
    """Return float64 weights proportional to counts, with sum 1."""
    return counts.double() / counts.double().sum()


def normalise_steps(received: Received, starts: Tree) -> Received:
    """Return uploads whose changes are normalised by the users' numbers of local steps, as in FedNova.

    User i has taken ``tau_i`` local steps from ``x`` to ``x_i``. Its upload becomes

    ``x + tau_eff / tau_i (x_i - x)``  with  ``tau_eff = sum_i p_i tau_i``

    for aggregation weights ``p_i``. Their mean is FedNova's new model ``x + tau_eff sum_i p_i (x_i - x) / tau_i``. In a
    plain mean, users with more steps have moved further and so count more. With equal numbers of steps, uploads stay as
    they are. The result is exact for SGD without momentum, for which the paper's normaliser is ``tau_i``, and an
    approximation for other optimisers.

    Running statistics have no steps and stay as they are.

    Source: Wang et al. 2020, arXiv:2007.07481, eq. 6 with the normaliser of local SGD.

    Args:
        received: Uploads of a round, with the report :data:`STEPS`.
        starts: Tensors with which each participant began the round, ``(users, *shape)``.
    """
    steps = received.reports[STEPS].double()
    if bool((steps == steps[0]).all()):
        return received
    factors = (received.weights.double() * steps).sum() / steps
    began = without_padding(starts, received.ranks)  # a user of a smaller rank began without the rest
    tensors = {}
    for name, t in received.tensors.items():
        if any(role.partition(".")[0] == STATISTICS for role in received.roles.get(name, ())):
            tensors[name] = t
            continue
        factor = factors.to(t).view(-1, *[1] * (t.dim() - 1))
        tensors[name] = began[name] + factor * (t - began[name])
    return replace(received, tensors=tensors)


def tensors_of_components(model: Model, method: Method) -> tuple[str, ...]:
    """Return the names of the tensors whose leading axis is the components of a mixture, in the order of the layout.

    They are the adaptors of the components and, in a mixture of whole models, their running statistics. In other
    mixtures, running statistics belong to the one model in which the adaptors are mixed.
    """
    mixture = method.placement.mixture
    component_roles = {ADAPTOR, STATISTICS} if mixture is not None and mixture.of == "models" else {ADAPTOR}
    return tuple(
        slot.name
        for slot in model.layout.slots
        if len(set(slot.roles)) == 1 and set(slot.roles) <= component_roles  # all entries have one such role
    )


def start_server(model: Model, users: Sequence[str], plan: RunPlan) -> ServerHalf:
    """Return the server before the first round.

    Args:
        model: The model that all users train.
        users: Names of all users.
        plan: Plan of the run.

    Raises:
        RecipeError: The server merges or sends whole models and ranks differ between users, or it forwards uploads
            between peers and uploads are compressed.
    """
    method, uploads, mechanisms = plan.method, plan.training.uploads, Mechanisms(server_mechanisms(plan, users))
    for mechanism in mechanisms:
        mechanism.check_server(method, model.layout, len(users))
    if method.server.peer_to_peer and uploads != "float32":
        raise RecipeError(
            f"training.uploads: got {uploads!r} for {method.name}, whose users mix uploads; allowed: float32"
        )
    has_padding = not bool(model.mask().all())  # of users with a smaller rank than others
    if (method.server.first_download or method.server.one_rank) and has_padding:
        raise RecipeError(
            f"method {method.name}: adapters.rank differs between users; the server's models have one rank"
        )
    server = ServerHalf(
        method=method,
        layout=model.layout,
        users=users,
        scales=_one_per_user(model.scales, len(users)),
        ranks=_one_per_user(model.ranks, len(users)),
        weighted=plan.training.weighting != "uniform" and plan.privacy is None,
        uploads=uploads,
        clustered=tensors_of_components(model, method),
        centred=model.centre,
        mechanisms=mechanisms,
        sums=plan.sums,
        normalises=plan.training.normalise_steps,
    )
    if method.shared:
        # The method's strategy computes its state from the tensors that users will download.
        all_tensors = model.layout.views(_initial_models(model, method, plan.seed))
        models = restrict(all_tensors, model.layout, method.received)
        roles = model.layout.named_roles(method.received)
        setup = ServerSetup(models=models, users=server.users, scales=server.scales, seed=plan.seed, roles=roles)
        kept = method.server.start(setup)
        server.kept = {name: t.to(model.device) for name, t in kept.items()}
    return server


def _one_per_user(values: Tensor, users: int) -> Tensor:
    """Return one value per user; a single value is repeated."""
    return values.cpu().expand(users).clone()


def _initial_models(model: Model, method: Method, seed: int) -> Float[Tensor, "models columns"]:
    """Return the initial models of the server: one, or several with different weights if the method keeps several.

    Users start from the first model, which is always drawn here. The others are ``model.other_initial_rows`` if the
    model has them, as nets do; otherwise they are drawn here, too.
    """
    num_models, layout = method.server.server_models, model.layout
    dtype = torch.promote_types(model.dtype, torch.float32)
    rows = [draw(layout, seed, "server").unsqueeze(0)]
    if model.other_initial_rows is not None:
        rows.append(model.other_initial_rows)
    else:
        require_room(f"method {method.name}", num_models, layout.columns)  # an error before memory runs out
        rows += [draw(layout, seed, f"server/{number}").unsqueeze(0) for number in range(1, num_models)]
    return torch.cat(rows).to(model.device, dtype)
