"""Client-level mixtures: shared parts of FLoRAL, ensembles, FedEM and MFL."""

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
    """The router takes some steps before the others, at the start of each round; maybe from what it was at first."""

    steps: int
    resets: bool
    roles = ROUTERS

    def begin(self, cohort: Cohort) -> None:
        """Reset the router if asked for, then take the steps."""
        if self.resets:
            cohort.reset(ROUTERS)
            cohort.forget(ROUTERS)
        for phase in self.before:
            cohort.take_steps(phase)

    @property
    def before(self) -> tuple[Phase, ...]:
        """The router's steps."""
        return (Phase(roles=ROUTERS, steps=self.steps, optimizer="router"),) if self.steps else ()


def by_layer(mixtures: Float[Tensor, "users *layers clusters"], names: Collection[str]) -> Tree:
    """The vector that each adaptor's tensor is mixed by; layers are numbered in the order of the names."""
    if mixtures.ndim == 2:
        return dict.fromkeys(names, mixtures)
    places = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return {name: mixtures[:, places.index(name.rpartition(".")[0])].contiguous() for name in names}


TRAINED = frozenset({BASE, ADAPTOR})

SHARED = TRAINED | {BASE_STATISTICS}
"""What of a mixture travels; the adaptors' own running statistics stay at home (FLoRAL App. F.2)."""


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
    """A method whose users mix components; where they share them, they report the mixture, unless it stays a secret."""
    told = (ReportMixture(mixture),) if reports and ADAPTOR in shared else ()
    return Method(
        name=name,
        placement=Placement(shared=shared, mixture=mixture),
        client=Client(phases=phases, parts=(*parts, *told)),
        server=server or ClusterSteps(centre=mixture.centre),
        components="adaptor set" if mixture.of == "adaptors" else "model",
    )


@dataclass(frozen=True)
class ReportMixture(ClientHook):
    """Users say how they mix components."""

    mixture: ClientMixture

    def report(self, cohort: Cohort) -> Tree:
        """Their vector pi."""
        return {"mixture": self.mixture.shares(cohort.tensors[CLIENT_ROUTER])}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Shares of the components."""
        return {"mixture": Reported(shape=(self.mixture.clusters,), like=CLIENT_ROUTER, most=1.0 + 1e-4)}


class Entropic(ClientHook):
    """Users set their router, as soon as they have received the components, out of what these lose on their data."""

    sweeps = True

    def received(self, cohort: Cohort) -> None:
        """By :func:`entropic`."""
        theta = cohort.tensors[CLIENT_ROUTER]
        theta.copy_(entropic(cohort.component_losses(), cohort.router_rate))


def entropic(losses: Float[Tensor, "users clusters"], rate: float) -> Float[Tensor, "users clusters"]:
    """Logits of ``pi_c ~ exp(-rate f_c)``, which minimises ``sum_c pi_c f_c + (1/rate) pi_c log pi_c`` (eq. 5, 34)."""
    return -rate * losses


@dataclass(frozen=True, kw_only=True)
class MeanByCluster(Mean):
    """The weighted mean, of each component by how much its users make of it (FLoRAL, Algorithm 1, lines 11 and 12)."""

    clipped_mean = False

    def coefficients(self, received: Received) -> Tree:
        """``p(k)``, and of components ``p(k|c)``: with routers of each layer's own, by that of theirs."""
        mixtures = by_layer(received.reports["mixture"], received.clustered)
        shares = {name: aggregation_weights(m, received.weights) for name, m in mixtures.items()}
        return {**super().coefficients(received), **shares}


@dataclass(frozen=True, kw_only=True)
class ClusterSteps(MeanByCluster):
    """The mean by cluster, or a step towards it: ``old + rate (mean - old)``, with a rate for each group.

    With ``centre`` the components' mean under p(c) then moves into the base (FLoRAL App. E, eq. 30 and 37).
    """

    base_rate: float = 1.0
    component_rate: float = 1.0
    centre: bool = False

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """One step, then centring."""
        if (self.base_rate, self.component_rate) == (1.0, 1.0):
            super().step(kept, sums, received)
        else:
            for name, mean in sums.items():
                rate = self.component_rate if name in received.clustered else self.base_rate
                kept[MODEL_PREFIX + name].lerp_(mean, rate)
        if self.centre:
            shares = cluster_weights(received.reports["mixture"], received.weights)
            super().step(kept, received.centred(model_of(kept), shares), received)


def cluster_weights(
    mixtures: Float[Tensor, "users clusters"], weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """``p(c) = sum_k p(k) pi_c^k`` (FLoRAL eq. 2)."""
    return weights @ mixtures.to(weights)
