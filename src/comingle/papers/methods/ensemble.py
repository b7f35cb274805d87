"""What FLoRAL is compared with: adaptors that stay at home, and ensembles of whole models."""

from __future__ import annotations

from comingle.methods.base import Method
from comingle.methods.cohort import ROUTERS, Phase
from comingle.methods.server import Mean
from comingle.methods.settings import Models, NotNegative, Positive
from comingle.models.routers import ClientMixture
from comingle.papers.methods.mfl import MODELS, SHARED_MODELS
from comingle.papers.methods.mixtures import TRAINED, ClusterSteps, client_mixture
from comingle.utils.trees import BASE, BASE_STATISTICS


def local_adaptor(*, precondition: bool = True, server_adam_rate: NotNegative = 0.0) -> Method:
    """One adaptor set of each user's own beside a federated base.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), section 6, Local Adaptor.
    Shared: the base where it is trained, with its running statistics.  Local: one adaptor a layer, with statistics of
    its own.  Frozen: a language model's base.
    Client: joint descent on base and adaptors.  Server: mean, or Adam as by ``floral`` with ``server_adam_rate``.
    Differs from the paper: p(k) and the adaptors' start as by ``floral``.
    """
    mixture = ClientMixture(clusters=1, precondition=precondition)
    return client_mixture(
        "local-adaptor",
        mixture,
        phases=(Phase(roles=TRAINED),),
        shared=frozenset({BASE, BASE_STATISTICS}),
        server=Mean(adam_rate=server_adam_rate),
    )


def ensemble(*, clusters: Models = 4, temperature: Positive = 1.0, server_adam_rate: NotNegative = 0.0) -> Method:
    """C whole models, federated; each user mixes their outputs by a router of its own.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), section 6, Ensemble.
    Shared: C models with their running statistics.  Local: one logit for each.  Frozen: nothing.
    Client: simultaneous descent on models and router.  Server: each model by p(k|c), or Adam as by
    ``floral`` with ``server_adam_rate``.
    Differs from the paper: outputs are mixed before the softmax, as in the public code; p(k) as by ``floral``.
    """
    mixture = ClientMixture(clusters=clusters, of="models", at="outputs", temperature=temperature)
    phase = Phase(roles=MODELS | ROUTERS, optimizer="both")
    server = ClusterSteps(adam_rate=server_adam_rate)
    return client_mixture("ensemble", mixture, phases=(phase,), shared=SHARED_MODELS, server=server)


def ensemble_optimal(*, clusters: Models = 4, server_adam_rate: NotNegative = 0.0) -> Method:
    """C whole models, one for each true cluster: FedAvg within the clusters.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), Table 1, optimal routing.
    Shared: C models with their running statistics.  Local: nothing.  Frozen: routers, one-hot.
    Client: descent on the own cluster's model.  Server: mean by cluster, or Adam as by
    ``floral`` with ``server_adam_rate``.
    Differs from the paper: p(k) as by ``floral``.
    """
    mixture = ClientMixture(clusters=clusters, of="models", at="outputs", optimal=True)
    phases, server = (Phase(roles=MODELS),), ClusterSteps(adam_rate=server_adam_rate)
    return client_mixture("ensemble-optimal", mixture, phases=phases, shared=SHARED_MODELS, server=server)
