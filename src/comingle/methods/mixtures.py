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
    """Client hook that trains the router alone for some steps at the start of each round."""

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
        """The phase that trains the router before the local steps of a round; none if ``steps`` is 0."""
        if self.steps == 0:
            return ()
        return (Phase(roles=ROUTERS, steps=self.steps, optimizer="router"),)


def mixtures_by_tensor(mixtures: Float[Tensor, "users *layers clusters"], names: Collection[str]) -> Tree:
    """Return the users' mixture weights ``(users, clusters)`` for each of the components' tensors.

    Args:
        mixtures: Mixture weights of the whole model ``(users, clusters)``, or of each layer ``(users, layers,
            clusters)``.
        names: Names of the components' tensors, in the order of the layers. "fc.a" and "fc.b" belong to the layer "fc".
    """
    has_layers = mixtures.ndim == 3
    if not has_layers:
        return dict.fromkeys(names, mixtures)
    layer_by_name = {name: name.rpartition(".")[0] for name in names}
    layers = list(dict.fromkeys(layer_by_name.values()))  # without repetitions
    return {name: mixtures[:, layers.index(layer)].contiguous() for name, layer in layer_by_name.items()}


TRAINED = frozenset({BASE, ADAPTOR})
"""Roles of nets that users train: a base and adaptors."""

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
    """Return a method in which each user mixes components, sets of adaptors or whole models, with its own weights.

    Args:
        name: Name of the method.
        mixture: The mixture: number and type of components, and how they are mixed.
        phases: Phases of a round.
        parts: Client hooks.
        shared: Roles that are shared.
        server: The server; by default :class:`ClusterSteps`.
        reports: Whether users upload their mixture weights, from which the server computes the users' weights in the
            mean of each component. Without effect if the components are not shared.
    """
    hooks = list(parts)
    shares_components = ADAPTOR in shared
    if reports and shares_components:
        hooks.append(ReportMixture(mixture))
    if server is None:
        server = ClusterSteps(centre=mixture.centre)
    return Method(
        name=name,
        placement=Placement(shared=shared, mixture=mixture),
        client=Client(phases=phases, parts=tuple(hooks)),
        server=server,
        components="adaptor set" if mixture.of == "adaptors" else "model",
    )


@dataclass(frozen=True)
class ReportMixture(ClientHook):
    """Client hook that sends a user's mixture weights to the server."""

    mixture: ClientMixture

    def report(self, cohort: Cohort) -> Tree:
        """Return each user's mixture weights pi on the components."""
        return {"mixture": self.mixture.shares(cohort.tensors[CLIENT_ROUTER])}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Specification of the report "mixture", which the server checks: a weight for each component."""
        largest_weight = 1.0 + 1e-4  # 1, with a tolerance for rounding
        return {"mixture": Reported(shape=(self.mixture.clusters,), like=CLIENT_ROUTER, most=largest_weight)}


class Entropic(ClientHook):
    """Client hook that gives a user larger mixture weights for components with a lower loss, after each download."""

    sweeps = True

    def received(self, cohort: Cohort) -> None:
        """Set the logits of a user's mixture weights to ``-rate`` times the losses of the downloaded components.

        The weights ``pi_c ~ exp(-rate f_c)`` (FLoRAL eq. 5) thus follow from the losses f_c on the user's training
        data, and no optimiser trains them. The rate is the router's learning rate.
        """
        logits = cohort.tensors[CLIENT_ROUTER]
        losses = cohort.component_losses()
        logits.copy_(entropic(losses, rate=cohort.router_rate))


def entropic(losses: Float[Tensor, "users clusters"], rate: float) -> Float[Tensor, "users clusters"]:
    """Return the logits ``-rate f_c`` of each user's mixture weights ``pi_c ~ exp(-rate f_c)``.

    These weights minimise ``sum_c pi_c f_c + (1/rate) pi_c log pi_c``.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), eq. 5 and 34.

    Args:
        losses: Loss f_c of each user under each component c.
        rate: The larger, the more a user prefers the component with the lowest loss.
    """
    return -rate * losses


@dataclass(frozen=True, kw_only=True)
class MeanByCluster(Mean):
    """Server that averages each component with larger weights for users who use it more (FLoRAL, Algorithm 1)."""

    clipped_mean = False

    def coefficients(self, received: Received) -> Tree:
        """Return each user's weight in the mean of each tensor: ``p(k)`` in the base, ``p(k|c)`` in component c.

        ``p(k|c)`` is proportional to ``pi_c^k p(k)`` for user k with the mixture weights ``pi^k``.

        Args:
            received: The uploads, with ``p(k)`` (``weights``) and ``pi`` (the report "mixture").

        Returns:
            Weights by tensor name: ``(users,)`` for the base, ``(users, components)`` for components.
        """
        weights_by_tensor = super().coefficients(received)  # p(k)
        pi_by_tensor = mixtures_by_tensor(received.reports["mixture"], names=received.clustered)  # of components
        for name, pi in pi_by_tensor.items():
            weights_by_tensor[name] = aggregation_weights(pi, received.weights)  # p(k|c)
        return weights_by_tensor


@dataclass(frozen=True, kw_only=True)
class ClusterSteps(MeanByCluster):
    """Server that moves its base and components towards the means of the uploads, with a rate for each of the two.

    With ``centre`` it then moves the components' mean into the base (FLoRAL App. E, eq. 30 and 37).
    """

    base_rate: float = 1.0
    component_rate: float = 1.0
    centre: bool = False

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Set each tensor to ``old + rate (mean - old)``; with ``centre``, move the components' mean into the base.

        Component c has the weight ``p(c)`` in that mean: how much all users together use it.

        Args:
            kept: State of the server: tensors by name, updated in place.
            sums: Means of the uploads: their weighted sums, by tensor.
            received: The uploads of a round, with the users' aggregation weights and mixtures.
        """
        if self.base_rate == 1 and self.component_rate == 1:
            super().step(kept, sums, received)  # sets the model to the means, or takes a step of Adam
        else:
            for name, mean in sums.items():
                is_component = name in received.clustered  # names of the components' tensors
                rate = self.component_rate if is_component else self.base_rate
                kept[MODEL_PREFIX + name].lerp_(mean, rate)
        if self.centre:
            p_c = cluster_weights(received.reports["mixture"], received.weights)
            centred = received.centred(model_of(kept), p_c)  # with the components' mean in the base
            super().step(kept, centred, received)  # stores the tensors; ``floral`` refuses Adam with ``centre``


def cluster_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """Return how much all users together use each component: ``p(c) = sum_k p(k) pi_c^k`` (FLoRAL eq. 2).

    Args:
        mixtures: Mixture weights ``pi^k`` of each user k.
        weights: Aggregation weights ``p(k)``.
    """
    return weights @ mixtures.to(weights)
