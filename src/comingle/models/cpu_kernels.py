"""What a language model on a processor computes faster than PyTorch does, once it has adapters."""

from __future__ import annotations

from comingle.models import loss
from comingle.models.kernels import cpu
from comingle.models.kernels import cpu as causal
from comingle.models.kernels.cpu import softmax
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.files import cache_folder


def faster(network: PreTrainedModel, *, attention: bool) -> None:
    """Have losses, and with ``attention`` the attention of ``network``, computed by native code from now on."""
    if cpu.enable(cache_folder() / "native"):
        loss.elsewhere = softmax
        if attention:
            causal.use(network)
