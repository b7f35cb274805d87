"""The server: aggregated state and what it does with uploads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from comingle.privacy.secure_sum import Sums
from comingle.protocol import Format
from comingle.protocol.messages import COUNT, LOWEST, VALIDATION, Download, Upload, expand, fill_ranks, verdict
from comingle.training.plan import server_mechanisms
from comingle.training.settings import RunPlan, participants, round_sizes
from comingle.training.state import draw
from comingle.utils.errors import RecipeError
from comingle.utils.trees import ADAPTOR, STATISTICS, Layout, Tree, restrict

logger = logging.getLogger("comingle")

VERSION, RANKS = "version", "ranks"
"""By which names its state holds what it knows besides its method's; ``LOWEST`` is that of the lowest loss."""


class Mechanisms(tuple[PrivacyMechanism, ...]):
    """The privacy mechanisms of a server, in the order in which they see uploads."""

    @property
    def state(self) -> Tree:
        """What they go on from, with the checkpoint's keys."""
        return {name: t for mechanism in self for name, t in mechanism.state.items()}

    def restore(self, state: Tree) -> None:
        """Restore them from a checkpoint."""
        for mechanism in self:
            mechanism.restore(state)

    @property
    def by_user(self) -> frozenset[str]:
        """Keys of their state that have the users on their leading dimension."""
        return frozenset(name for mechanism in self for name in mechanism.by_user)

    def admit(self, members: list[int], number: int, *, releases: bool) -> list[int] | None:
        """Return which of the participants of a round may take part; None where the privacy budget ends the run."""
        admitted: list[int] | None = members
        for mechanism in self:
            admitted = None if admitted is None else mechanism.admit(admitted, number, releases=releases)
        return admitted

    def server_sum(self, received: Received, about: ServerRound) -> Received | None:
        """Return what the method aggregates instead of the uploads; None for nothing."""
        left: Received | None = received
        for mechanism in self:
            left = None if left is None else mechanism.server_sum(left, about)
        return left

    def charge(self, numbers: Sequence[int]) -> None:
        """Count that something of these users was revealed, whether or not it was aggregated."""
        if self.account is not None:
            self.account.charge(numbers)

    def set_works(self, works: Callable[[], Mapping[str, Work]]) -> None:
        """Tell the account of single examples what each user does in a run."""
        if self.account is not None:
            self.account.works = works

    @property
    def adaptive(self) -> bool:
        """Whether users download a bound of their changes, and report whether they were within."""
        return any(CLIP_NORM in mechanism.download(1) for mechanism in self)

    @property
    def account(self) -> Account | None:
        """What has been revealed of users, in a run with noise."""
        return next((one.account for one in self if one.account is not None), None)

    @property
    def judged(self) -> RuleResult | None:
        """What a robust rule made of the last round's uploads."""
        return next((one.judged for one in self if one.judged is not None), None)

    @property
    def metrics(self) -> dict[str, object]:
        """Metrics of privacy, in a run with noise."""
        found = {key: value for mechanism in self for key, value in mechanism.metrics.items()}
        return {"privacy": found} if found else {}


@dataclass(kw_only=True)
class ServerState:
    """What a method's server keeps.

    ``users`` are the names of all who may take part; ``uploads`` is the format of what they send. ``scales`` are their
    LoRA factors, which follow from settings that everybody knows; ``ranks`` are their LoRA ranks, as of the last upload
    of each. ``version`` is the number of rounds after which it last aggregated, ``lowest_loss`` the lowest mean
    validation loss that users have reported, where the best round is selected. ``mechanisms`` are those of privacy, in
    the order in which they see uploads. With ``sums`` the server sees sums of uploads alone.
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

    @cached_property
    def numbers(self) -> UserNumbers:
        """The number of each of these names among all."""
        return UserNumbers(self.users)

    @property
    def state(self) -> Tree:
        """Everything that it goes on from."""
        lowest = torch.tensor(self.lowest_loss, dtype=torch.float64)
        own = {VERSION: torch.tensor(self.version), RANKS: self._saved_ranks, LOWEST: lowest}
        return {**self.kept, **own, **self.mechanisms.state}

    @property
    def _saved_ranks(self) -> Int[Tensor, " _"]:
        """Of very many users who have the same rank for good, that one."""
        alike = len(self.users) > MAX_HASHED_NAMES and not any(part.resizes for part in self.method.client.parts)
        return self.ranks[:1].clone() if alike and bool((self.ranks == self.ranks[0]).all()) else self.ranks.clone()

    def restore(self, state: Tree) -> None:
        """Go on from there."""
        self.mechanisms.restore(state)
        others = {VERSION, RANKS, LOWEST, *self.mechanisms.state}
        self.kept = {name: t for name, t in state.items() if name not in others}
        self.version, self.ranks, self.lowest_loss = (
            int(state[VERSION]),
            _of_all(state[RANKS], self.users),
            float(state[LOWEST]),
        )

    @property
    def by_user(self) -> frozenset[str]:
        """What of its state has the users on its leading dimension."""
        return self.method.server.by_user | {RANKS} | self.mechanisms.by_user

    @property
    def model(self) -> Tree:
        """The model that all users download, where there is one."""
        return one_model(self.method.server, self.kept)

    @property
    def size(self) -> int:
        """How many numbers of a user are shared."""
        return self.layout.count(self.method.shared)

    @property
    def shares(self) -> bool:
        """Whether users have anything to send."""
        return bool(self.layout.mask(self.method.shared).any())

    def forget(self) -> None:
        """Keep nothing of what peers have sent, once all of them have been answered."""
        self.kept.clear()


class ServerHalf(ServerState):
    """A method's server at work: what it tells users, and what it does with their uploads."""

    def answers(self, users: Sequence[str]) -> list[str]:
        """Those of some users for whom there is something; peers answer nobody who has sent nothing."""
        if not self.method.server.peer_to_peer:
            return list(users)
        senders = {self.users[sender] for sender in self.method.server.senders(self.kept)}
        return [user for user in users if user in senders]

    def invite(self, plan: RunPlan, number: int, *, releases: bool = True) -> list[int] | None:
        """Return the participants of round ``number`` (from 0), by number; None where the privacy budget ends the run.

        No user may take part where users are drawn one by one. A round that ``releases`` nothing costs nothing.
        """
        return self.mechanisms.admit(participants(plan, number, self.users), number, releases=releases)

    def check_rounds(self, plan: RunPlan) -> None:
        """Check that rounds are large enough for all privacy mechanisms.

        Raises:
            RecipeError: They are not, or users' ranks differ where they must not.
        """
        if self.shares and self.mechanisms:
            sizes, same = round_sizes(plan, self.users), len(set(self.ranks.tolist())) == 1
            for mechanism in self.mechanisms:
                mechanism.check_rounds(sizes, same_ranks=same)

    def warn_of_noise(self, plan: RunPlan) -> None:
        """Log a warning where the noise of a private run drowns what its users can change."""
        for mechanism in self.mechanisms if self.shares else ():
            if why := mechanism.warn(self.size, plan.training.rounds):
                logger.warning("%s", why)

    def download(self, users: Sequence[str]) -> Download:
        """What these users get now."""
        numbers = self.numbers(users)
        senders = self.method.server.senders(self.kept)
        tensors = self.method.server.download(self.kept, numbers)
        for mechanism in self.mechanisms:
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
        """Take in the uploads of a round."""
        numbers = self.numbers(upload.users)
        tensors = fill_ranks(expand(upload.tensors, self.uploads), self.layout)
        self._charge(numbers)
        about = ServerRound(number=upload.round - 1, names=upload.users, server=self.method.server, kept=self.kept)
        received = self.mechanisms.server_sum(self._received(numbers, tensors, upload), about)
        if received is not None:
            self.method.server.aggregate(self.kept, received)
        self.ranks[numbers] = upload.ranks
        self.version = upload.round

    @property
    def adds(self) -> bool:
        """Whether all that it does with uploads are the weighted sums of :class:`Mean`, and a step."""
        server = self.method.server
        plain = self.sums is None and not any(overrides(one, "server_sum") for one in self.mechanisms)
        return plain and isinstance(server, Mean) and server.kind == "sum" and type(server).aggregate is Mean.aggregate

    def coefficients(self, names: Sequence[str], upload: Upload) -> Tree:
        """Where it :attr:`adds`, by what the uploads' tensors of these names are multiplied; looks at none of them."""
        server, numbers = self.method.server, self.numbers(upload.users)
        assert isinstance(server, Mean)
        return server.coefficients(self._received(numbers, dict.fromkeys(names, torch.zeros(0)), upload))

    @torch.no_grad()
    def aggregate_weighted(self, sums: Tree, upload: Upload) -> None:
        """Take in weighted sums of a round's uploads, of which the rest is here."""
        server, numbers = self.method.server, self.numbers(upload.users)
        assert isinstance(server, Mean)
        self._charge(numbers)
        server.step(self.kept, sums, self._received(numbers, {}, upload))
        self.ranks[numbers] = upload.ranks
        self.version = upload.round

    @torch.no_grad()
    def aggregate_sum(self, total: np.ndarray | Int[Tensor, " entries"], users: Sequence[str], done: int) -> None:
        """Take in the sum of what these users have uploaded in round ``done`` (from 1)."""
        assert self.sums is not None
        self._charge(self.numbers(users))
        model = self.model
        mean = self.sums.mean(total, model, len(users), done)
        self.method.server.aggregate(self.kept, mean_as_upload(model, mean, self._roles))
        self.version = done

    def skip_round(self, done: int, received: Sequence[int] = ()) -> None:
        """End round ``done`` without a sum: the model stays as it is, though uploads may have been received."""
        self.version = done
        for mechanism in self.mechanisms:
            mechanism.skip_round(received)

    def _received(self, numbers: Sequence[int], tensors: Tree, upload: Upload) -> Received:
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
        return self.layout.named_roles(self.method.shared)

    def _charge(self, numbers: Sequence[int]) -> None:
        """Count what these users' uploads reveal."""
        if (account := self.mechanisms.account) is not None and self.shares:
            account.charge_uploads(numbers)

    def judge(self, report: Upload, users: Sequence[str] | None = None) -> Download:
        """What those who have reported validation losses, or all of ``users``, hear of them."""
        loss = fmean(report.reports[VALIDATION].tolist())
        lowest = loss < self.lowest_loss
        self.lowest_loss = min(loss, self.lowest_loss)
        return verdict(users or report.users, report.round, lowest=lowest)

    def _weights(self, upload: Upload) -> Float[Tensor, " users"]:
        """Weight of each upload in means: equal, or by the amount of training data."""
        counts = upload.reports[COUNT] if self.weighted else torch.ones(len(upload.users))
        return averaging_weights(counts)


def _of_all(ranks: Int[Tensor, " _"], users: Sequence[str]) -> Int[Tensor, " users"]:
    return ranks.cpu().expand(len(users)).clone()


def averaging_weights(counts: Tensor) -> Float[Tensor, " users"]:
    """Weights in proportion to counts, float64."""
    return counts.double() / counts.double().sum()


def clustered(model: Model, method: Method) -> tuple[str, ...]:
    """The tensors whose leading axis is a mixture's components; whole models have statistics of their own. In the
    layout's order, so that who counts layers by them counts as the model does.
    """
    mixture = method.placement.mixture
    roles = {ADAPTOR, STATISTICS} if mixture is not None and mixture.of == "models" else {ADAPTOR}
    return tuple(
        slot.name for slot in model.layout.slots if len(slot_roles := set(slot.roles)) == 1 and slot_roles <= roles
    )


def start_server(model: Model, users: Sequence[str], plan: RunPlan) -> ServerHalf:
    """The server before the first round.

    Raises:
        RecipeError: it merges or hands out whole models, and users' ranks differ; or it passes uploads on, compressed.
    """
    method, uploads, mechanisms = plan.method, plan.training.uploads, Mechanisms(server_mechanisms(plan, users))
    for mechanism in mechanisms:
        mechanism.check_server(method, model.layout, len(users))
    if method.server.peer_to_peer and uploads != "float32":
        raise RecipeError(
            f"training.uploads: got {uploads!r} for {method.name}, whose users mix uploads; allowed: float32"
        )
    if (method.server.first_download or method.server.one_rank) and not bool(model.mask().all()):
        raise RecipeError(
            f"method {method.name}: adapters.rank differs between users; the server's models have one rank"
        )
    half = ServerHalf(
        method=method,
        layout=model.layout,
        users=users,
        scales=_of_each(model.scales, len(users)),
        ranks=_of_each(model.ranks, len(users)),
        weighted=plan.training.weighting != "uniform" and plan.privacy is None,
        uploads=uploads,
        clustered=clustered(model, method),
        centred=model.centre,
        mechanisms=mechanisms,
        sums=plan.sums,
    )
    if method.shared:
        first = model.layout.views(_first_models(model, method, plan.seed))
        models = restrict(first, model.layout, method.received)
        roles = model.layout.named_roles(method.received)
        setup = ServerSetup(models=models, users=half.users, scales=half.scales, seed=plan.seed, roles=roles)
        kept = method.server.start(setup)
        half.kept = {name: t.to(model.device) for name, t in kept.items()}
    return half


def _of_each(values: Tensor, users: int) -> Tensor:
    """Everybody's own, where one number may be that of all."""
    return values.cpu().expand(users).clone()


def _first_models(model: Model, method: Method, seed: int) -> Float[Tensor, "models columns"]:
    """The differently initialised models that the server begins with; the first is what users start from."""
    count, layout = method.server.server_models, model.layout
    dtype = torch.promote_types(model.dtype, torch.float32)
    first = draw(layout, seed, "server").unsqueeze(0)
    if (others := model.other_initial_rows) is None:
        require_room(f"method {method.name}", count, layout.columns)
        others = torch.stack([draw(layout, seed, f"server/{n}") for n in range(1, count)]) if count > 1 else first[:0]
    return torch.cat([first, others]).to(model.device, dtype)
