"""Names of the classes of transformers in annotations, without its slow import, and what the import requires."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from comingle.utils.errors import BaseModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:
    # What a runtime type checker sees.
    GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase = object, torch.nn.Module, object
    PreTrainedConfig = object

__all__ = ["GenerationConfig", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase", "require_docstrings"]


def require_docstrings() -> None:
    """Check that Python keeps docstrings, which transformers parses when a model class is imported.

    Raises:
        BaseModelError: Python runs with ``-OO``.
    """
    if sys.flags.optimize > 1:
        raise BaseModelError("python: got -OO, which removes docstrings that transformers reads; allowed: -O")
