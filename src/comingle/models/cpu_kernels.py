"""Native code for language models with adapters on CPUs."""

from __future__ import annotations

from comingle.models import loss
from comingle.models.kernels import cpu
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.files import cache_folder


def faster(network: PreTrainedModel, *, attention: bool) -> None:
    """Compute losses, and with ``attention`` the attention of ``network``, by native code from now on."""
    if cpu.enable(cache_folder() / "native"):
        loss.elsewhere = cpu.softmax
        if attention:
            cpu.use(network)
