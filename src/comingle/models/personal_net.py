"""One user's net: a plain module that predicts, apart from the federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.data.samples.samples import SampleBank, Samples, read_samples
from comingle.data.samples.scoring import score_samples
from comingle.models.floral.model import FloralModel
from comingle.models.hardware import torch_defaults
from comingle.models.model import own_copy
from comingle.models.personal import Personal
from comingle.models.routers import merge_models, mix_probabilities
from comingle.models.scoring import MSE, Loss, SampleScore
from comingle.models.stacked import StackedModel
from comingle.utils.errors import DataError
from comingle.utils.trees import CLIENT_ROUTER, Tree

SCORED_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, repr=False)
class PersonalNet(Personal):
    """Predicts as one user's model.

    ``model`` belongs to nobody else: in evaluation mode, its parameters can be trained on, and its state dict is one of
    the plain net, with adaptors merged into its tensors (for an ensemble, of a :class:`MixtureOfModels`).
    """

    model: nn.Module
    loss: Loss = MSE
    """What :meth:`evaluate` measures."""

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        return f"PersonalNet({self.name!r}, {type(self.model).__name__} of {count:,} parameters)"

    @torch_defaults()
    @torch.no_grad()
    def predict(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Outputs for inputs of any floating dtype, on any device."""
        return self.model(inputs.to(next(self.model.parameters())))

    @torch_defaults()
    def evaluate(self, samples: Any) -> SampleScore:
        """Return the mean loss, and accuracy where targets are classes; NaN without samples.

        Args:
            samples: a map-style ``torch.utils.data.Dataset`` of ``(input, target)``, a pair of arrays or tensors, or
                :class:`comingle.data.samples.samples.Samples`.

        Raises:
            DataError: something else, or targets that are not of the net's task.
        """
        like, where = next(self.model.parameters()), f"user {self.name!r}: samples"
        samples = read_samples(samples, where)
        if not self.loss.classes and not samples.targets.is_floating_point():
            samples = Samples(inputs=samples.inputs, targets=samples.targets.float().reshape(-1, 1))
        elif self.loss.classes and samples.targets.is_floating_point():
            raise DataError(f"{where}: targets are real numbers; allowed: class numbers, as the net was trained on")
        targets = samples.targets.to(like if samples.targets.is_floating_point() else like.device)
        counts = torch.tensor([len(samples)])
        bank = SampleBank(inputs=samples.inputs.to(like), targets=targets, starts=counts - counts, counts=counts)

        def forward(rows: Sequence[int], inputs: Tensor) -> Tensor:
            outputs = self.predict(inputs[0])
            if self.loss.classes and self.loss.paired and len(targets):
                low, high, most = int(targets.min()), int(targets.max()), outputs.shape[-1] - 1
                if low < 0 or high > most:
                    raise DataError(f"{where}: targets go from {low} to {high}; allowed: 0 to {most}")
            return outputs.unsqueeze(0)

        return score_samples(forward, bank, [0], loss=self.loss, batch=SCORED_AT_ONCE, slots=1)[0]


class MixtureOfModels(nn.Module):
    """``sum_c shares_c models_c(x)``: an ensemble as one user mixes it, before any softmax over classes.

    Of ``probabilities`` the logits of the mixture: ``log sum_c shares_c softmax(models_c(x))``.
    """

    shares: Float[Tensor, " clusters"]

    def __init__(self, models: Sequence[nn.Module], shares: Float[Tensor, " clusters"], *, probabilities: bool = False):
        super().__init__()
        self.models, self.probabilities = nn.ModuleList(models), probabilities
        self.register_buffer("shares", shares.clone())

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """The mixed outputs."""
        outputs = torch.stack([model(inputs) for model in self.models])
        if self.probabilities:
            return mix_probabilities(outputs, self.shares)
        return torch.tensordot(self.shares, outputs, dims=1)


def personal_net(name: str, model: StackedModel, tensors: Tree) -> PersonalNet:
    """The net of a user called ``name``, out of its tensors ``(1, ...)``."""
    net = _own_net(model, tensors)
    return PersonalNet(name=name, model=net.requires_grad_(True).eval(), loss=model.loss)


def _own_net(model: StackedModel, tensors: Tree) -> nn.Module:
    """A user's mixture in the weights where components are adaptors, whatever its place was in training, or merge."""
    if model.mixture is None:
        return own_copy(model.net, tensors)
    shares = model.shares(tensors)[0]
    if isinstance(model.net, FloralModel):
        return own_copy(model.net, tensors).merge(shares)
    if model.mixture.merges_models:
        return own_copy(model.net, merge_models(tensors, shares.unsqueeze(0)))
    parts = {name: t for name, t in tensors.items() if name != CLIENT_ROUTER}
    models = [own_copy(model.net, {n: t[:, c] for n, t in parts.items()}) for c in range(len(shares))]
    return MixtureOfModels(models, shares, probabilities=model.mixes_probabilities)
