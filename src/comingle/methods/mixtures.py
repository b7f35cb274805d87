"""What methods with a client-level mixture have in common."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Beginning, Context, Method, Phase, Server
from comingle.methods.servers import centred, mean_by_cluster
from comingle.routers.mixtures import ClientMixture
from comingle.trees import ADAPTOR, BASE, BASE_STATISTICS, CLIENT_ROUTER, Tree

TRAINED = frozenset({BASE, ADAPTOR})

SHARED = TRAINED | {BASE_STATISTICS}
"""What of a mixture travels; the adaptors' own running statistics stay at home (FLoRAL App. F.2)."""


def client_mixture(
    name: str,
    mixture: ClientMixture,
    *,
    phases: tuple[Phase, ...],
    shared: frozenset[str] = SHARED,
    server: Server = mean_by_cluster,
    **options: Any,
) -> Method:
    """A method whose users mix components; where they share them, they report the mixture."""

    def report(tensors: Tree) -> Tree:
        return {"mixture": mixture.shares(tensors[CLIENT_ROUTER])}

    reports = report if ADAPTOR in shared else None
    server = centred(server) if mixture.centre else server
    return Method(name=name, mixture=mixture, phases=phases, shared=shared, server=server, report=reports, **options)


def entropic(losses: Float[Tensor, "users clusters"], rate: float) -> Float[Tensor, "users clusters"]:
    """Logits of ``pi_c ~ exp(-rate f_c)``, which minimises ``sum_c pi_c f_c + (1/rate) pi_c log pi_c`` (eq. 5, 34)."""
    return -rate * losses


def first_upload(beginning: Beginning) -> Tree:
    """What everybody starts from, which a server that takes steps of its own keeps."""
    return {name: t[0].clone() for name, t in beginning.starts.items()}


def at_rates(base_rate: float, component_rate: float) -> Server:
    """The mean by cluster, or a step towards it: ``old + rate (mean - old)``, with a rate for each group."""
    if base_rate == component_rate == 1.0:
        return mean_by_cluster

    def server(uploads: Tree, context: Context) -> Tree:
        found = {}
        for name, mean in mean_by_cluster(uploads, context).items():
            rate = component_rate if name in context.clustered else base_rate
            found[name] = torch.lerp(context.memory[name], mean[0], rate)
            context.memory[name].copy_(found[name])
        return {name: t.expand(uploads[name].shape) for name, t in found.items()}

    return server
