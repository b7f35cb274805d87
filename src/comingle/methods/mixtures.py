"""Client-level mixtures: code shared by FLoRAL, ensembles, FedEM and MFL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import ROUTERS, Client, ClientHook, Cohort, Method, Phase, Placement
from comingle.methods.server import MODEL_PREFIX, Mean, Received, Reported, Server, aggregation_weights, model_of
from comingle.models.routers import ClientMixture
from comingle.utils.trees import ADAPTOR, BASE, BASE_STATISTICS, CLIENT_ROUTER, Tree


@dataclass(frozen=True)
class WarmUp(ClientHook):
    """Takes router steps before the other steps of each round, optionally after resetting the router."""

    steps: int
    resets: bool
    roles = ROUTERS

    def begin(self, cohort: Cohort) -> None:
        """Reset the router if ``resets`` is True, then take the router's steps."""
        if self.resets:
            cohort.reset(ROUTERS)
            cohort.reset_moments(ROUTERS)
        for phase in self.before:
            cohort.take_steps(phase)

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phase of the router's steps."""
        return (Phase(roles=ROUTERS, steps=self.steps, optimizer="router"),) if self.steps else ()


def by_layer(mixtures: Float[Tensor, "users *layers clusters"], names: Collection[str]) -> Tree:
    """Return the users' mixture weights ``(users, clusters)`` for each tensor of the components that users mix.

    Args:
        mixtures: Mixture weights, one vector per user for the whole model ``(users, clusters)``, or one for each layer
            ``(users, layers, clusters)``.
        names: Names of the components' tensors, in the order of the layers; a layer is a name without its last part.
    """
    if mixtures.ndim == 2:
        return dict.fromkeys(names, mixtures)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return {name: mixtures[:, layers.index(name.rpartition(".")[0])].contiguous() for name in names}


TRAINED = frozenset({BASE, ADAPTOR})

SHARED = TRAINED | {BASE_STATISTICS}
"""Roles of a mixture that are shared; the adaptors' own running statistics are local (FLoRAL App. F.2)."""


def client_mixture(
    name: str,
    mixture: ClientMixture,
    *,
    phases: tuple[Phase, ...],
    parts: Sequence[ClientHook] = (),
    shared: frozenset[str] = SHARED,
    server: Server | None = None,
    reports: bool = True,
) -> Method:
    """Return a method in which all users train the same components and each user has its own weights to mix them.

    Components are sets of adaptors (as in FLoRAL), or whole models.

    Args:
        name: Name of the method.
        mixture: The mixture: number and type of components, and how they are mixed.
        phases: Phases of a round.
        parts: Client hooks.
        shared: Roles that are shared.
        server: The server; by default :class:`ClusterSteps`.
        reports: Whether users also upload their mixture weights, if components are shared. Servers use them to weigh
            the uploads of each component.
    """
    report_hooks = (ReportMixture(mixture),) if reports and ADAPTOR in shared else ()
    return Method(
        name=name,
        placement=Placement(shared=shared, mixture=mixture),
        client=Client(phases=phases, parts=(*parts, *report_hooks)),
        server=server or ClusterSteps(centre=mixture.centre),
        components="adaptor set" if mixture.of == "adaptors" else "model",
    )


@dataclass(frozen=True)
class ReportMixture(ClientHook):
    """Reports how a user mixes components."""

    mixture: ClientMixture

    def report(self, cohort: Cohort) -> Tree:
        """Return the mixture weights pi."""
        return {"mixture": self.mixture.shares(cohort.tensors[CLIENT_ROUTER])}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Weights of the components."""
        return {"mixture": Reported(shape=(self.mixture.clusters,), like=CLIENT_ROUTER, most=1.0 + 1e-4)}


class Entropic(ClientHook):
    """Sets the router from the components' losses on the user's data, after each download."""

    sweeps = True

    def received(self, cohort: Cohort) -> None:
        """Set the router's logits to ``-rate`` times the components' losses, by :func:`entropic`."""
        logits = cohort.tensors[CLIENT_ROUTER]
        logits.copy_(entropic(cohort.component_losses(), cohort.router_rate))


def entropic(losses: Float[Tensor, "users clusters"], rate: float) -> Float[Tensor, "users clusters"]:
    """Return the logits of each user's mixture weights pi, which are larger for components with a lower loss.

    ``pi_c ~ exp(-rate f_c)`` for the losses f of the components. These weights minimise ``sum_c pi_c f_c + (1/rate)
    pi_c log pi_c`` (FLoRAL eq. 5 and 34).

    Args:
        losses: Loss f of each user under each component.
        rate: Rate of the exponent; the larger, the more a user prefers its best component.
    """
    return -rate * losses


@dataclass(frozen=True, kw_only=True)
class MeanByCluster(Mean):
    """Server that weighs each component by how much its users use it (FLoRAL, Algorithm 1, lines 11 and 12)."""

    clipped_mean = False

    def coefficients(self, received: Received) -> Tree:
        """Return each user's weight in the mean of each tensor.

        User k has the weight ``p(k)`` in tensors of the base, and ``p(k|c)`` in tensors of component c, which is
        proportional to ``pi_c^k p(k)``. Here ``pi_c^k`` is how much user k's mixture uses component c.

        Args:
            received: The uploads, with ``p(k)`` (``weights``) and ``pi`` (the report "mixture").

        Returns:
            Weights by tensor name: ``(users,)`` for the base, ``(users, components)`` for components.
        """
        weights = super().coefficients(received)  # p(k), for all tensors
        # Each tensor of the components has the pi of its layer, or of the whole model.
        pi_by_tensor = by_layer(received.reports["mixture"], names=received.clustered)
        for name, pi in pi_by_tensor.items():
            weights[name] = aggregation_weights(pi, received.weights)  # p(k|c)
        return weights


@dataclass(frozen=True, kw_only=True)
class ClusterSteps(MeanByCluster):
    """Server that takes a step towards the mean by cluster: ``old + rate (mean - old)``, with separate rates.

    With rates of 1 that is the mean, or a step of Adam. With ``centre`` the components' mean under p(c) then moves into
    the base (FLoRAL App. E, eq. 30 and 37).
    """

    base_rate: float = 1.0
    component_rate: float = 1.0
    centre: bool = False

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Move the model towards the mean of the uploads; with ``centre``, move the components' mean into the base.

        The components' mean is weighted by ``p(c)``, how much all users together use component c.

        Args:
            kept: State of the server: tensors by name, updated in place.
            sums: Weighted sums of the uploads.
            received: The uploads of a round, with weights, ranks and scales of the participants.
        """
        if (self.base_rate, self.component_rate) == (1.0, 1.0):
            super().step(kept, sums, received)  # sets the model to the mean, or takes a step of Adam
        else:
            for name, mean in sums.items():
                rate = self.component_rate if name in received.clustered else self.base_rate
                kept[MODEL_PREFIX + name].lerp_(mean, rate)
        if self.centre:
            shares = cluster_weights(received.reports["mixture"], received.weights)
            centred = received.centred(model_of(kept), shares)
            super().step(kept, centred, received)  # only stores the tensors: floral refuses centre with Adam or rates


def cluster_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """Return how much all users together use each component: ``p(c) = sum_k p(k) pi_c^k`` (FLoRAL eq. 2).

    Args:
        mixtures: Mixture weights pi of each user.
        weights: Aggregation weights p(k).
    """
    return weights @ mixtures.to(weights)
