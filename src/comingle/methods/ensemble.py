"""Mixtures of whole models: local adapters, ensembles, MFL and FML."""

from __future__ import annotations

from comingle.methods.base import ROUTERS, Method, Phase
from comingle.methods.mixtures import TRAINED, ClusterSteps, Entropic, client_mixture
from comingle.methods.server import Mean
from comingle.methods.settings import Models, NotNegative, Positive
from comingle.models.routers import ClientMixture
from comingle.utils.trees import ADAPTOR, BASE, BASE_STATISTICS, STATISTICS

MODELS = frozenset({ADAPTOR})
"""Role of whole models as the components of a mixture, the same as for adapters."""

SHARED_MODELS = MODELS | {STATISTICS}
"""Roles that are shared: whole models with their running statistics, which are averaged like the rest."""


def mfl(*, clusters: Models = 4) -> Method:
    """MFL: all users train C whole models, each on its own loss, and each user mixes their outputs.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), (MFL), eq. 4 and 5, Theorem 4.5.
    Shared: C models with their running statistics.  Local: one logit for each.  Frozen: nothing.
    Client: mixture weights pi_c ~ exp(-eta f_c), where f_c is the loss of model c on all of the user's training data
    and eta the router's learning rate; then steps of each model on its own loss, with C passes for each step.
    Server: the mean of each model c over users k with weights p(k|c) ~ pi_c p(k), where p(k) are the aggregation
    weights and pi the mixture weights of user k at the start of the round.
    Differs from the paper: a user predicts the mean of the models' outputs with the weights pi_c, which the paper
    leaves open.  Models start at different values, or they would all stay equal.  p(k) is ``training.weighting``.  In
    eq. 5 f_c is the mean loss over a cluster; here, as in C.1, it is the user's own.

    Args:
        clusters: Number C of models that users mix.
    """
    mixture = ClientMixture(clusters=clusters, of="models", at="losses")
    phase = Phase(roles=MODELS)
    return client_mixture("mfl", mixture, phases=(phase,), parts=(Entropic(),), shared=SHARED_MODELS)


def fml(*, clusters: Models = 4, temperature: Positive = 1.0) -> Method:
    """FML: all users train C whole models, and each user uses its own weighted mean of their parameters.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), (FML) and Algorithm 1, with whole models as components.
    Shared: C models with their running statistics.  Local: one logit for each.  Frozen: nothing.
    Client: local steps on the models w_c and on the router, with its own learning rate, for the loss f(sum_c pi_c w_c).
    Server: the mean of each model c over users k with weights p(k|c) ~ pi_c p(k), where p(k) are the aggregation
    weights and pi the mixture weights of user k.
    Differs from the paper: models start at different values.  p(k) is ``training.weighting``.  All models of a user
    have the running statistics of the mixed model.

    Args:
        clusters: Number C of models that users mix.
        temperature: Divisor of the router's logits, above 0.
    """
    mixture = ClientMixture(clusters=clusters, of="models", temperature=temperature)
    phase = Phase(roles=MODELS | ROUTERS, optimizer="both")
    return client_mixture("fml", mixture, phases=(phase,), shared=SHARED_MODELS)


def local_adaptor(*, precondition: bool = True, server_adam_rate: NotNegative = 0.0) -> Method:
    """Local Adaptor: all users train a shared base, and each user its own local adapter set.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), section 6, Local Adaptor.
    Shared: the base where it is trained, with its running statistics.  Local: one adapter a layer, with its own running
    statistics.  Frozen: a language model's base.
    Client: local steps on base and adapters.  Server: mean over users, or a step of Adam towards it.
    Differs from the paper: means are weighted by ``training.weighting``.  The adapters' factor on the input side starts
    random and the output side zero, where section 3.2 says the reverse.

    Args:
        precondition: Precondition the adapters' gradients (FLoRAL eq. 36).
        server_adam_rate: Learning rate of Adam on the server, with its model minus the mean of the uploads as gradient;
            0 takes that mean.
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
    """Ensemble: all users train C whole models, and each user learns its own weights to mix their outputs.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), section 6, Ensemble.
    Shared: C models with their running statistics.  Local: one logit for each.  Frozen: nothing.
    Client: local steps on models and router.
    Server: the mean of each model c over users k with weights p(k|c) ~ pi_c p(k), where p(k) are the aggregation
    weights and pi the mixture weights of user k, or a step of Adam towards that mean.
    Differs from the paper: outputs are mixed before the softmax, as in the public code; p(k) is ``training.weighting``.

    Args:
        clusters: Number C of models that users mix.
        temperature: Divisor of the router's logits, above 0.
        server_adam_rate: Learning rate of Adam on the server, with its model minus the mean of the uploads as gradient;
            0 takes that mean.
    """
    mixture = ClientMixture(clusters=clusters, of="models", at="outputs", temperature=temperature)
    phase = Phase(roles=MODELS | ROUTERS, optimizer="both")
    server = ClusterSteps(adam_rate=server_adam_rate)
    return client_mixture("ensemble", mixture, phases=(phase,), shared=SHARED_MODELS, server=server)


def ensemble_optimal(*, clusters: Models = 4, server_adam_rate: NotNegative = 0.0) -> Method:
    """Ensemble with one whole model for each true cluster of users, trained by FedAvg within the cluster.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), Table 1, optimal routing.
    Shared: C models with their running statistics.  Local: nothing.  Frozen: routers, one-hot.
    Client: steps on the model of the user's cluster.  Server: mean over each cluster's users, or a step of Adam towards
    it.
    Differs from the paper: means are weighted by ``training.weighting``.

    Args:
        clusters: Number of true clusters, hence of models.
        server_adam_rate: Learning rate of Adam on the server, with its model minus the mean of the uploads as gradient;
            0 takes that mean.
    """
    mixture = ClientMixture(clusters=clusters, of="models", at="outputs", optimal=True)
    phase = Phase(roles=MODELS)
    server = ClusterSteps(adam_rate=server_adam_rate)
    return client_mixture("ensemble-optimal", mixture, phases=(phase,), shared=SHARED_MODELS, server=server)
