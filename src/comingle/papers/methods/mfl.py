"""Mixtures of whole models with nothing in common: FLoRAL's objectives (MFL) and (FML) without weight sharing."""

from __future__ import annotations

from comingle.methods.base import Method
from comingle.methods.cohort import ROUTERS, Phase
from comingle.methods.settings import Models, Positive
from comingle.models.routers import ClientMixture
from comingle.papers.methods.mixtures import Entropic, client_mixture
from comingle.utils.trees import ADAPTOR, STATISTICS

MODELS = frozenset({ADAPTOR})
"""Whole models are a mixture's components, as adaptors are."""

SHARED_MODELS = MODELS | {STATISTICS}
"""They travel with their running statistics, which are averaged as they are."""


def mfl(*, clusters: Models = 4) -> Method:
    """C whole models, each trained on its own loss, mixed outside of the loss: what Theorem 4.5 is about.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), (MFL), eq. 4 and 5, Theorem 4.5.
    Shared: C models with their running statistics.  Local: one logit for each.  Frozen: nothing.
    Client: pi_c ~ exp(-eta f_c), f_c the loss of each model as received on all training data of the user and eta the
    router's learning rate; then descent on every f(w_c) by itself, C passes a step.  Server: each model by p(k|c), with
    the pi of the round's start.
    Differs from the paper: a user predicts sum_c pi_c f_c(x), of which the paper says nothing.  Models start at
    different values, or all would stay one; p(k) and the user's own loss for f_c as by ``floral-mfl``.
    """
    mixture = ClientMixture(clusters=clusters, of="models", at="losses")
    phases, parts = (Phase(roles=MODELS),), (Entropic(),)
    return client_mixture("mfl", mixture, phases=phases, parts=parts, shared=SHARED_MODELS)


def fml(*, clusters: Models = 4, temperature: Positive = 1.0) -> Method:
    """C whole models, mixed in their weights into one that each user trains and uses.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), (FML) and Algorithm 1 where all is a component.
    Shared: C models with their running statistics.  Local: one logit for each.  Frozen: nothing.
    Client: simultaneous descent on f(sum_c pi_c w_c), models and router (its own learning rate).  Server: each model by
    p(k|c).
    Differs from the paper: models start at different values; p(k) as by ``floral``; all models of a user have the
    running statistics of the mixed one.
    """
    mixture = ClientMixture(clusters=clusters, of="models", temperature=temperature)
    phase = Phase(roles=MODELS | ROUTERS, optimizer="both")
    return client_mixture("fml", mixture, phases=(phase,), shared=SHARED_MODELS)
