"""Servers: what happens to uploads between two rounds, and what is sent back. They see messages and nothing else."""

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
"""What servers keep of the model that everybody downloads, by the names of its tensors."""


FIRST_MOMENT, SECOND_MOMENT, ADAM_STEPS = "adam.first.", "adam.second.", "adam.steps"
"""Keys of the state of a server's Adam: moments by the names of their tensors, and the number of steps."""

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Settings of a server's Adam, which are PyTorch's defaults."""

NEVER = 10**18
"""A round that no run comes to."""


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """What a server knows before the first round.

    ``models`` are differently initialised ``(models, *shape)``; users have names and LoRA factors. ``roles`` are those
    of the tensors, as of :class:`Received`.
    """

    models: Tree
    users: Sequence[str]
    scales: Float[Tensor, " users"]
    seed: int
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What each user reports under a name: numbers of this shape, or of a tensor's that it trains (``like``), from
    ``least`` to ``most``."""

    shape: tuple[int, ...] = ()
    like: str = ""
    least: float = 0.0
    most: float
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Received:
    """The uploads of a round: tensors ``(users, *shape)`` of those who took part.

    ``users`` are their numbers among all, in the order of the tensors. ``weights`` sum to 1. ``reports`` is what users
    said besides their tensors, ``ranks`` and ``scales`` are their LoRA ranks and factors, and ``clustered`` names the
    tensors whose second dimension is a mixture's components, in the model's order; ``centred`` maps aggregated base and
    components, and the components' p(c), to the same with the components' mean in the base. ``roles`` says what each
    tensor is, by its name, in the words of :class:`comingle.methods.base.Placement`, as ``{"attention", "attention.a",
    "attention.body"}``.
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
    """A server without uploads, for methods that share nothing; the others derive from it.

    What it keeps between rounds is a tree of tensors, which :meth:`start` makes and :meth:`aggregate` changes in place.
    There is an exchange after round ``exchange_from``, then after every ``exchange_every``-th.
    """

    exchange_from: int = 1
    exchange_every: int = 1

    kind: ClassVar[Literal["none", "sum", "stack"]] = "none"
    """"sum": all that it needs of uploads are weighted sums over users; "stack": it looks at each by itself."""
    clipped_mean: ClassVar[bool] = False
    """Whether what it publishes is a mean of uploads with weights that no upload decides on: then clipping uploads
    bounds what one user can change, and differential privacy can be computed."""
    knows_starts: ClassVar[bool] = False
    """Whether :meth:`starts` says what each user had before it trained, and uploads count by their change against that:
    then bounding it bounds what one user can change."""
    peer_to_peer: ClassVar[bool] = False
    """Whether everybody who took part downloads the others' uploads, at once."""
    by_user: ClassVar[frozenset[str]] = frozenset()
    """What of it has the users on its leading dimension."""
    one_rank: ClassVar[bool] = False
    """Whether all users' LoRA must have one rank."""
    first_download: ClassVar[bool] = False
    """Whether users download something before the first round."""

    @property
    def server_models(self) -> int:
        """How many differently initialised models the server begins with."""
        return 1

    def exchanges(self, done: int) -> bool:
        """Whether there is an exchange after round ``done`` (from 1)."""
        since = done - self.exchange_from
        return since >= 0 and since % self.exchange_every == 0

    def start(self, setup: ServerSetup) -> Tree:
        """What the server keeps before the first round."""
        return {}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """What it keeps after a round."""

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Models ``(users, models, *shape)`` for some users, by their number among all."""
        return {}

    def starts(self, kept: Tree, received: Received) -> Tree:
        """What each user of a round had before it trained, ``(users, *shape)``; asked for before :meth:`aggregate`."""
        return {name: t[:, 0] for name, t in self.download(kept, received.users).items()}

    def senders(self, kept: Tree) -> Sequence[int]:
        """Of peers, whose uploads :meth:`download` gives, by their number among all users."""
        return ()

    def merging_weights(self, kept: Tree) -> Float[Tensor, "users models"] | None:
        """How much of each of the server's models every user has, where it knows."""
        return None

    def settled(self) -> Server:
        """The same server for somebody who joins when the others have finished: what it keeps for all stays as it is.

        Where it keeps nothing of each user (:attr:`by_user`) nothing is left to be sent to it, so there is no exchange.
        """
        return replace(self, exchange_from=NEVER)


@dataclass(frozen=True, kw_only=True)
class Mean(Server):
    """Server that sends the weighted mean (McMahan et al. 2017); subclasses change weights or take steps.

    With ``adam_rate`` above 0 the server takes a step of Adam with that learning rate instead (Reddi et al. 2021,
    arXiv:2003.00295, with PyTorch's bias correction). Its gradient is the old model minus the mean. Running statistics
    have no gradient, so they take the mean.
    """

    adam_rate: float = 0.0

    kind = "sum"
    clipped_mean = True
    knows_starts = True

    def start(self, setup: ServerSetup) -> Tree:
        """Return the model that users start from, and Adam's state where the server has it."""
        model = {MODEL_PREFIX + name: t[0].clone() for name, t in setup.models.items()}
        return {**model, **_adam_state(setup)} if self.adam_rate else model

    def coefficients(self, received: Received) -> Tree:
        """By what each upload is multiplied in the sums: one number, or one for each component."""
        return dict.fromkeys(received.tensors, received.weights)

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Set the model to the uploads' weighted sums, or take a step of Adam towards them."""
        if self.adam_rate:
            kept[ADAM_STEPS].add_(1)
        for name, mean in sums.items():
            if FIRST_MOMENT + name in kept:
                _adam_step(kept, name, mean, self.adam_rate)
            else:
                kept[MODEL_PREFIX + name].copy_(mean)

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Sums, then a step."""
        self.step(kept, weighted_sums(received.tensors, self.coefficients(received)), received)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """The one model, not copied."""
        return {name: t.expand(len(users), 1, *t.shape) for name, t in model_of(kept).items()}


def _adam_state(setup: ServerSetup) -> Tree:
    trained = {name: t[0] for name, t in setup.models.items() if not _is_statistic(setup.roles.get(name, frozenset()))}
    moments = {key + name: torch.zeros_like(t) for key in (FIRST_MOMENT, SECOND_MOMENT) for name, t in trained.items()}
    return {**moments, ADAM_STEPS: torch.tensor(0)}


def _is_statistic(roles: frozenset[str]) -> bool:
    return any(role.partition(".")[0] == STATISTICS for role in roles)


def _adam_step(kept: Tree, name: str, mean: Tensor, rate: float) -> None:
    """Take the step of ``torch.optim.Adam`` on one tensor, in place, with ``old - mean`` as its gradient."""
    theta, first, second = kept[MODEL_PREFIX + name], kept[FIRST_MOMENT + name], kept[SECOND_MOMENT + name]
    steps, (beta1, beta2) = int(kept[ADAM_STEPS]), BETAS
    gradient = theta - mean
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (second.sqrt() / (1 - beta2**steps) ** 0.5).add_(EPSILON)
    theta.addcdiv_(first, scale, value=-rate / (1 - beta1**steps))


def weighted_sums(uploads: Tree, coefficients: Tree) -> Tree:
    """``sum_u weight_u upload_u``; where weights have components, of each component by its own."""
    return {name: _weighted_sum(t, coefficients[name].to(t)) for name, t in uploads.items()}


def _weighted_sum(uploads: Tensor, weights: Float[Tensor, "users ..."]) -> Tensor:
    if weights.dim() == 1:
        return torch.tensordot(weights, uploads, dims=1)
    return torch.einsum("uc,uc...->c...", weights, uploads)


def model_of(kept: Tree) -> Tree:
    """The tensors of the one model that a server keeps."""
    return {name.removeprefix(MODEL_PREFIX): t for name, t in kept.items() if name.startswith(MODEL_PREFIX)}


def aggregation_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, "users clusters"]:
    """``p(k|c) = pi_c^k p(k) / sum_k' pi_c^k' p(k')`` (FLoRAL eq. 2).

    A component that nobody present makes anything of has been changed by nobody: its plain mean keeps it as it is.
    """
    joint = mixtures.to(weights) * weights.unsqueeze(1)
    total = joint.sum(0)
    return torch.where(total > EMPTY, joint / total.clamp(min=EMPTY), weights.unsqueeze(1))


EMPTY = 1e-12
"""A cluster with less weight than this has no users."""


def __getattr__(name: str) -> str:
    if name == "MODEL":
        warnings.warn("comingle.methods.server.MODEL is now MODEL_PREFIX", DeprecationWarning, stacklevel=2)
        return MODEL_PREFIX
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
