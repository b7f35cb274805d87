"""Servers: how uploads are aggregated and what is sent back. A server sees messages and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.utils.trees import STATISTICS, Tree

MODEL_PREFIX = "model."
"""Prefix of the shared model's tensors in the server's state."""


FIRST_MOMENT, SECOND_MOMENT, ADAM_STEPS = "adam.first.", "adam.second.", "adam.steps"
"""Keys of the server's Adam state: prefixes of the moments, and the number of steps."""

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Settings of the server's Adam: PyTorch's defaults."""

NEVER = 10**18
"""A round number that no run reaches."""


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """Data that a server has before the first round.

    Args:
        models: Models with different initial values, ``(models, *shape)``.
        users: Names of the users.
        scales: LoRA scale of each user.
        seed: Seed of the run.
        roles: Roles of each tensor, as in :class:`Received`.
    """

    models: Tree
    users: Sequence[str]
    scales: Float[Tensor, " users"]
    seed: int
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """Specification of a number, or tensor of numbers, that each user reports.

    Args:
        shape: Shape of a user's report.
        like: Name of a trained tensor whose shape a report has, instead of ``shape``.
        least: Smallest number allowed.
        most: Largest number allowed.
        whole: Whether the numbers are integers.
    """

    shape: tuple[int, ...] = ()
    like: str = ""
    least: float = 0.0
    most: float
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Received:
    """Uploads of a round, with the participants on the leading dimension.

    Args:
        users: Participants, as indices into all users, in the order of the tensors.
        tensors: Uploaded tensors, ``(users, *shape)``.
        weights: Aggregation weight of each participant; they sum to 1.
        ranks: LoRA rank of each participant.
        scales: LoRA scale of each participant.
        reports: Numbers that participants sent with their tensors.
        clustered: Names of the tensors whose second dimension is a mixture's components, in the model's order.
        centred: Function of the aggregated tensors and of the components' weights p(c), which moves the components'
            weighted mean into the base.
        roles: Roles of each tensor, in the words of :class:`comingle.methods.base.Placement`, such as ``{"attention",
            "attention.a", "attention.body"}``.
    """

    users: Sequence[int]
    tensors: Tree
    weights: Float[Tensor, " users"]
    ranks: Int[Tensor, " users"]
    scales: Float[Tensor, " users"]
    reports: Tree = field(default_factory=dict)
    clustered: Collection[str] = ()
    centred: Callable[[Tree, Float[Tensor, " clusters"]], Tree] = lambda tensors, shares: tensors
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Server:
    """Base class of servers; by itself, the server of methods that share nothing.

    The server's state is a tree of tensors that :meth:`start` returns and :meth:`aggregate` changes in place. There is
    an exchange after round ``exchange_from`` and after every ``exchange_every``-th round from there.
    """

    exchange_from: int = 1
    exchange_every: int = 1

    kind: ClassVar[Literal["none", "sum", "stack"]] = "none"
    """Use of the uploads: none, only weighted sums over users ("sum"), or each upload by itself ("stack")."""
    clipped_mean: ClassVar[bool] = False
    """Whether the server publishes a mean whose weights do not depend on the uploads.

    Then clipping the uploads bounds the influence of one user, and differential privacy can be computed.
    """
    knows_starts: ClassVar[bool] = False
    """Whether :meth:`starts` returns what each user had before it trained, and uploads count by their change from it.

    Then bounding that change bounds the influence of one user.
    """
    peer_to_peer: ClassVar[bool] = False
    """Whether participants download each other's uploads right after the round."""
    by_user: ClassVar[frozenset[str]] = frozenset()
    """Keys of state with the users on the leading dimension."""
    one_rank: ClassVar[bool] = False
    """Whether all users must have the same LoRA rank."""
    first_download: ClassVar[bool] = False
    """Whether users download models before the first round."""
    keeps_adapters: ClassVar[bool] = True
    """Whether users still have the LoRAs that they start from (``adapters.start``) after their first download."""

    @property
    def server_models(self) -> int:
        """Number of models with different initial values that the server starts with."""
        return 1

    @property
    def merging_setting(self) -> str:
        """Name of the setting that sizes steps on users' merging weights; empty if the server learns none."""
        return ""

    def exchanges(self, done: int) -> bool:
        """Return whether there is an exchange after round ``done`` (from 1)."""
        rounds_since_first_exchange = done - self.exchange_from
        return rounds_since_first_exchange >= 0 and rounds_since_first_exchange % self.exchange_every == 0

    def start(self, setup: ServerSetup) -> Tree:
        """Return the server's state before the first round: tensors by name, which checkpoints store.

        Args:
            setup: Initial models, and the users' names and LoRA scales.
        """
        return {}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Update the state with the uploads of a round; this base class has no state.

        Args:
            kept: State of the server: tensors by name, changed in place.
            received: The uploads, with the participants' indices, aggregation weights and reports.
        """

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return what users download: by tensor one or several models for each, ``(users, models, *shape)``.

        This base class shares nothing, so that downloads are empty.

        Args:
            kept: State of the server: tensors by name.
            users: Indices of the users.
        """
        return {}

    def starts(self, kept: Tree, received: Received) -> Tree:
        """Return the shared tensors that each participant had before its local steps, ``(users, *shape)`` by name.

        These are the tensors that it downloaded, as the server's state is still that of the download.

        Args:
            kept: State of the server before :meth:`aggregate`.
            received: The participants' uploads.
        """
        return {name: t[:, 0] for name, t in self.download(kept, received.users).items()}

    def senders(self, kept: Tree) -> Sequence[int]:
        """Return the indices of the users whose uploads :meth:`download` returns; for peer-to-peer methods."""
        return ()

    def merging_weights(self, kept: Tree) -> Float[Tensor, "users models"] | None:
        """Return each user's weight on each of the server's models, if the server has such weights."""
        return None

    def settled(self) -> Server:
        """Return a copy of the server for users who join after the run has ended.

        The uploads of a new user alone must not change the state that the server has learned from all users.
        In this base class the copy never exchanges anything. Servers with state of single users (:attr:`by_user`)
        override it.
        """
        return replace(self, exchange_from=NEVER)


@dataclass(frozen=True, kw_only=True)
class Mean(Server):
    """Server whose model becomes the weighted mean of the uploads (McMahan et al. 2017).

    With ``adam_rate`` above 0 it takes a step of Adam with that learning rate instead, with the old model minus the
    mean as gradient (Reddi et al. 2021, arXiv:2003.00295, with PyTorch's bias correction). Running statistics become
    the mean in any case.
    """

    adam_rate: float = 0.0

    kind = "sum"
    clipped_mean = True
    knows_starts = True

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial model, and the state of Adam if the server uses it."""
        # `setup.models` has several initial models; this server starts from the first one.
        state = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        if self.adam_rate:
            state.update(_adam_state(setup))
        return state

    def coefficients(self, received: Received) -> Tree:
        """Return the weights ``(users,)`` of the uploads in the sum of each tensor: here the aggregation weights.

        Subclasses may return ``(users, components)`` for tensors whose second dimension is a mixture's components.

        Args:
            received: The uploads of a round, with the participants' aggregation weights.
        """
        return dict.fromkeys(received.tensors, received.weights)

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Set the model to the mean of the uploads, or with ``adam_rate`` take a step of Adam towards it.

        Args:
            kept: State of the server: tensors by name, updated in place.
            sums: Mean of the uploads: their weighted sum, by tensor.
            received: The uploads of a round, not used here.
        """
        if self.adam_rate:
            kept[ADAM_STEPS].add_(1)
        for name, mean in sums.items():
            has_moments = FIRST_MOMENT + name in kept  # running statistics have none
            if has_moments:
                _adam_step(kept, name, mean, self.adam_rate)
            else:
                kept[MODEL_PREFIX + name].copy_(mean)

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Compute the weighted sum of the uploads for each tensor, and update the state with them by :meth:`step`.

        Args:
            kept: State of the server: tensors by name, changed in place.
            received: The uploads of a round, with the participants' aggregation weights.
        """
        sums = weighted_sums(received.tensors, self.coefficients(received))
        self.step(kept, sums, received)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the server's model as the download of each user, without copying it.

        Args:
            kept: State of the server: the model, and perhaps Adam's moments.
            users: Numbers of the users who download.

        Returns:
            Views ``(users, 1, *shape)`` of the model's tensors; the 1 is the number of models that a user downloads.
        """
        return {name: t.expand(len(users), 1, *t.shape) for name, t in model_of(kept).items()}


def _adam_state(setup: ServerSetup) -> Tree:
    """Return Adam's initial state: a step count and moments of 0, with moments for all tensors but running statistics.

    Its keys are "adam.steps", and "adam.first.NAME" and "adam.second.NAME" for each tensor.
    """
    state = {}
    for prefix in (FIRST_MOMENT, SECOND_MOMENT):
        for name, models in setup.models.items():
            roles = setup.roles.get(name, frozenset())
            if not _is_statistic(roles):
                state[prefix + name] = torch.zeros_like(models[0])
    state[ADAM_STEPS] = torch.tensor(0)
    return state


def _is_statistic(roles: frozenset[str]) -> bool:
    """Return whether a tensor with these roles, such as {"statistics.base"}, is a running statistic."""
    return any(role.partition(".")[0] == STATISTICS for role in roles)


def _adam_step(kept: Tree, name: str, mean: Tensor, rate: float) -> None:
    """Take the step of ``torch.optim.Adam`` on one tensor, in place, with ``old - mean`` as its gradient.

    Args:
        kept: State of the server; its step count already counts this step.
        name: Name of the tensor.
        mean: Mean upload.
        rate: Learning rate.
    """
    theta = kept[MODEL_PREFIX + name]
    first_moment, second_moment = kept[FIRST_MOMENT + name], kept[SECOND_MOMENT + name]
    steps = int(kept[ADAM_STEPS])
    beta1, beta2 = BETAS
    gradient = theta - mean
    first_moment.lerp_(gradient, 1 - beta1)
    second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second_moment.sqrt() / (1 - beta2**steps) ** 0.5).add_(EPSILON)
    theta.addcdiv_(first_moment, denominator, value=-rate / (1 - beta1**steps))


def weighted_sums(uploads: Tree, coefficients: Tree) -> Tree:
    """Return each tensor's weighted sum over users, ``sum_u weight_u upload_u``.

    Args:
        uploads: Tensors ``(users, *shape)``, or ``(users, components, *shape)``.
        coefficients: Weights by tensor: ``(users,)``, or ``(users, components)`` with weights for each component.
    """
    return {name: _weighted_sum(t, coefficients[name].to(t)) for name, t in uploads.items()}


def _weighted_sum(uploads: Tensor, weights: Float[Tensor, "users ..."]) -> Tensor:
    """Return the weighted sum over users of one tensor, or of each component of it.

    Args:
        uploads: The tensor of all users, ``(users, *shape)``, or ``(users, components, *shape)``.
        weights: ``(users,)``, or ``(users, components)`` with weights for each component.
    """
    has_components = weights.dim() == 2
    if not has_components:
        return torch.tensordot(weights, uploads, dims=1)
    return torch.einsum("uc,uc...->c...", weights, uploads)


def model_of(kept: Tree) -> Tree:
    """Return the tensors of the shared model from a server's state."""
    return {name.removeprefix(MODEL_PREFIX): t for name, t in kept.items() if name.startswith(MODEL_PREFIX)}


def aggregation_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users clusters"]:
    """Return the weight of user k in the mean of component c, ``p(k|c) = pi_c^k p(k) / sum_j pi_c^j p(j)``.

    A component that no participant uses has the weights ``p(k)``. No user has trained it, so the mean changes nothing.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), eq. 2.

    Args:
        mixtures: Mixture weights pi of each user.
        weights: Aggregation weights p of the users.
    """
    products = mixtures.to(weights) * weights.unsqueeze(1)  # pi_c^k p(k)
    total_by_component = products.sum(0)
    shares = products / total_by_component.clamp(min=EMPTY)
    return torch.where(total_by_component > EMPTY, shares, weights.unsqueeze(1))


EMPTY = 1e-12
"""Total weight below which a component counts as unused."""


def __getattr__(name: str) -> str:
    """Return ``MODEL_PREFIX`` for its former name ``MODEL``, with a warning."""
    if name == "MODEL":
        warnings.warn("comingle.methods.server.MODEL is now MODEL_PREFIX", DeprecationWarning, stacklevel=2)
        return MODEL_PREFIX
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
