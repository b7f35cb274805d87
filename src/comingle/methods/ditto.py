"""Ditto: a global model, and a personal model for each user that is regularised towards it."""

from __future__ import annotations

from dataclasses import dataclass

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import Mean
from comingle.methods.settings import NotNegative
from comingle.utils.trees import Tree


def ditto(*, nearness: NotNegative = 0.1) -> Method:
    """Ditto: FedAvg, and for each user a personal model v that is kept near the global model.

    Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", arXiv:2012.04221,
    Algorithm 1.
    Shared: the global model: attention and 1 LoRA expert per MLP; a net with its statistics.  Local: the personal
    model, of the same shapes, which the user predicts with.  Frozen: a language model's base.
    Client: joint steps on both models on training data; the personal model's loss has the additional term ``nearness /
    2 |v - w_t|^2``, with the downloaded global model w_t.
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
