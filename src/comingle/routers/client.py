"""The client-level router: one softmax vector per user, the same for every input and mostly at every layer.

``pi = softmax((theta + noise) / temperature)`` (FLoRAL section 5, "Learning the mixture weights"). Theta starts at
zero, so the clusters start equal; pi is never clamped (the public code cuts it at 0.01 without renormalising, which
loses the gradient below). The noise is Gaussian and off by default: the paper names none, the public code adds uniform
noise in [0, 1) by default.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.routers.mixtures import softmax_mixture
from comingle.utils.errors import RecipeError, is_number


class ClientRouter(nn.Module):
    """One user's mixture over the clusters, or one for each of so many ``layers``.

    ``noise`` is the standard deviation of Gaussian noise on theta, drawn from torch's global stream at each call of
    :meth:`mixture` in training mode; under ``torch.func.vmap`` that needs ``randomness="different"``.

    Raises:
        RecipeError: fewer than one cluster, a temperature that is not positive, or a negative noise.
    """

    def __init__(
        self,
        num_clusters: int,
        *,
        temperature: float = 1.0,
        noise: float = 0.0,
        layers: int | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if isinstance(num_clusters, bool) or not isinstance(num_clusters, int) or num_clusters < 1:
            raise RecipeError(f"num_clusters: got {num_clusters!r}, needs a whole number of at least 1")
        if not (is_number(temperature) and temperature > 0):
            raise RecipeError(f"router temperature: got {temperature!r}, needs a finite number above 0")
        if not (is_number(noise) and noise >= 0):
            raise RecipeError(f"router noise: got {noise!r}, needs a finite standard deviation of at least 0")
        self.theta = nn.Parameter(torch.zeros(*(() if layers is None else (layers,)), num_clusters, dtype=dtype))
        self.temperature = temperature
        self.noise = noise

    def mixture(self) -> Float[Tensor, "*layers clusters"]:
        """``softmax((theta + noise) / temperature)``; the noise in training mode only."""
        theta = self.theta
        if self.training and self.noise > 0:
            theta = theta + self.noise * torch.randn_like(theta)
        return softmax_mixture(theta, self.temperature)

    def forward(self) -> Float[Tensor, "*layers clusters"]:
        """:meth:`mixture`."""
        return self.mixture()

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"num_clusters={self.theta.shape[-1]}, temperature={self.temperature}, noise={self.noise}"
