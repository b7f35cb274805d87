"""FedEM: every user's data is a mixture of distributions that all share, one model for each."""

from __future__ import annotations

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, Part
from comingle.methods.cohort import Cohort, Phase
from comingle.methods.server import Mean
from comingle.methods.settings import Models
from comingle.models.routers import ClientMixture
from comingle.utils.trees import ADAPTOR, STATISTICS


def fedem(*, models: Models = 3) -> Method:
    """FedEM: M whole models; every sample says how much it belongs to each, and every user mixes their predictions.

    Source: Marfoq et al. 2021, "Federated Multi-Task Learning under a Mixture of Distributions", arXiv:2108.10252,
    Algorithm 2 (FedEM), eq. 7, 8 and 11.
    Shared: M models with their statistics.  Local: the mixture pi, M numbers.  Frozen: nothing.
    Client: q_m(s) ~ pi_m exp(-loss_m(s)) for all training samples s with the models as received, then pi = mean_s q(s),
    then joint steps on sum_m q_m(s) loss_m(s) with q as it is.  Server: mean of each model over users.
    Differs from the paper: none known.  A user predicts sum_m pi_m p_m(y|x), for a regression the mean of outputs.
    """
    roles = frozenset({ADAPTOR})
    return Method(
        name="fedem",
        placement=Placement(
            shared=roles | {STATISTICS}, mixture=ClientMixture(clusters=models, of="models", at="samples")
        ),
        client=Client(phases=(Phase(roles=roles),), parts=(DivideSamples(),)),
        server=Mean(),
    )


class DivideSamples(Part):
    """Says at the start of a round how much each sample belongs to each model."""

    sweeps = True

    def begin(self, cohort: Cohort) -> None:
        """With the models as received."""
        cohort.divide_samples()
