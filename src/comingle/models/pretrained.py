"""Names of the classes of transformers that we use: its import costs a second, which a name is not worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    # What a runtime type checker sees.
    PreTrainedModel, PreTrainedTokenizerBase = torch.nn.Module, object

__all__ = ["PreTrainedModel", "PreTrainedTokenizerBase"]
