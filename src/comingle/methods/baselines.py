"""Baselines: local training, FedAvg with its variants, Ditto, one model for all data, and the unchanged base model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.fedmerge import Proximal
from comingle.methods.server import Mean, Server
from comingle.methods.settings import NotNegative
from comingle.utils.trees import Tree


def local() -> Method:
    """Train each user's model on its own data alone.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2.
    Shared: nothing.  Local: attention, 2 averaged LoRA experts per MLP.  Frozen: the base.
    Client: local steps on training text.  Server: none.
    Differs from the paper: no difference is known.
    """
    return Method(
        name="local",
        placement=Placement(generalists=0, specialists=2),
        client=Client(phases=joint(routed=False)),
        server=Server(),
    )


def centralized() -> Method:
    """Train one model on the pooled data of all users: an upper bound for federated methods.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2 and App. B.1.
    Shared: nothing, as there is a single client.  Local: attention, 2 averaged LoRA experts per MLP.  Frozen: the base.
    Client: steps on the training text of all users, with the batch size times the number of users.  Server: none.
    Differs from the paper: no difference is known.
    """
    return Method(
        name="centralized",
        placement=Placement(generalists=0, specialists=2, pooled=True),
        client=Client(phases=joint(routed=False)),
        server=Server(),
    )


def pretrained() -> Method:
    """Use the pretrained base model without any training: a lower bound for federated methods.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2.
    Shared: nothing.  Local: nothing.  Frozen: everything.
    Client: none.  Server: none.
    Differs from the paper: no difference is known.
    """
    return Method(name="pretrained", placement=Placement(), client=Client(), server=Server())


def fedavg(*, server_adam_rate: NotNegative = 0.0) -> Method:
    """FedAvg: each user trains the downloaded model, and the server averages the uploads.

    Source: McMahan et al. 2017, arXiv:1602.05629; on LoRA as in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention, 2 averaged LoRA experts per MLP.  Local: nothing.  Frozen: the base.
    Client: local steps on training text.  Server: mean over users, or a step of Adam towards it (Reddi et al. 2021,
    arXiv:2003.00295).
    Differs from the paper: a user keeps its optimiser's moments between rounds, as in CoMiGS's public code.

    Args:
        server_adam_rate: Learning rate of Adam on the server, with its model minus the mean of the uploads as gradient;
            0 takes that mean.
    """
    return Method(
        name="fedavg",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False)),
        server=Mean(adam_rate=server_adam_rate),
    )


def fedavg_plus() -> Method:
    """FedAvg+: FedAvg, after which each user fine-tunes the global model on its own data.

    Source: FedAvg+ in FedEM (Marfoq et al. 2021, arXiv:2108.10252), section 4, after Jiang et al. 2019.
    Shared: attention, 2 averaged LoRA experts per MLP; a whole net, with running statistics of its norm layers.
    Local: the fine-tuned copy.  Frozen: a language model's base.
    Client: as for FedAvg.  Before each evaluation and after the last round, a user fine-tunes a copy of the global
    model by one more local round, on other random batches.  Server: mean over users.
    Differs from the paper: no difference is known.  ``evaluation.model`` has no effect: the fine-tuned copy is
    evaluated.
    """
    client = Client(phases=joint(routed=False), finetunes=True)
    return replace(fedavg(), name="fedavg+", client=client)


def fedprox(*, proximal: NotNegative = 0.01) -> Method:
    """FedProx: FedAvg with the term ``proximal / 2 |theta - theta_t|^2`` in each user's objective.

    theta is the user's model, theta_t the downloaded one.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127, Algorithm 2, eq. 2.
    Shared: attention, 2 averaged LoRA experts per MLP; a whole net, with running statistics of its norm layers.
    Local: nothing.  Frozen: a language model's base.
    Client: local steps on training data, with the proximal term.  Server: mean over users.
    Differs from the paper: all users take the same number of local steps, where the paper's users may stop early
    (gamma).  Means are weighted by ``training.weighting``; the paper draws users by their share of the data and weighs
    them equally.

    Args:
        proximal: Weight of half the squared distance to the downloaded model in each user's objective: FedProx's mu.
    """
    client = Client(phases=joint(routed=False), parts=(Proximal(proximal / 2),))
    return replace(fedavg(), name="fedprox", client=client)


def ditto(*, nearness: NotNegative = 0.1) -> Method:
    """Ditto: FedAvg, and for each user a personal model v that is kept near the global model.

    Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", arXiv:2012.04221,
    Algorithm 1.
    Shared: the global model: attention and 1 LoRA expert per MLP; a whole net, with running statistics of its norm
    layers.  Local: the personal model, of the same shapes, which the user predicts with.  Frozen: a language model's
    base.
    Client: local steps on training data, which train both models together; the personal model's loss has the additional
    term ``nearness / 2 |v - w_t|^2``, with the downloaded global model w_t.
    Server: mean of the global models over users.
    Differs from the paper: both models see the same batches and take equally many steps.  The paper chooses lambda
    (``nearness``) for each data set; the default here is ours.

    Args:
        nearness: Weight of half the squared distance of the personal model to the global one: Ditto's lambda.
    """
    return Method(
        name="ditto",
        placement=Placement(shared=MODEL, copies=2),
        client=Client(phases=joint(routed=False), parts=(NearGlobal(nearness),)),
        server=Mean(),
    )


@dataclass(frozen=True)
class NearGlobal(ClientHook):
    """Client hook of Ditto: adds ``weight / 2 |v - w_t|^2`` to the objective of a user's personal model v.

    w_t is the global model, the user's first copy, at the start of the round.
    """

    weight: float
    looks_across = True

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Add ``weight (v - w_t)`` to the gradients of personal models, and nothing to those of global models.

        v is the user's personal model, w_t the global model at the start of the round (``cohort.exchanged``).

        Args:
            cohort: The models in training, two for each user: ``copy`` is 0 for its copy of the global model, 1 for its
                personal model.
            gradients: Gradients by tensor, ``(models, *shape)``, which are replaced by the sums.
        """
        any_gradient = next(iter(gradients.values()))
        is_personal = (cohort.copy > 0).to(any_gradient)
        weight_by_model = self.weight * is_personal
        for name, gradient in gradients.items():
            difference = cohort.tensors[name] - cohort.exchanged[name]  # v - w_t for personal models
            gradients[name] = gradient + weight_by_model.view(-1, *[1] * (difference.dim() - 1)) * difference
