"""Classes of transformers for annotations, without the slow import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:
    # Stand-ins for a runtime type checker.
    GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase = object, torch.nn.Module, object
    PreTrainedConfig = object

__all__ = ["GenerationConfig", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase"]
