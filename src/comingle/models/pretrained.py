"""Classes of transformers for annotations, without the slow import; and a check before that import."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from comingle.utils.errors import BaseModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:
    # Stand-ins for a runtime type checker.
    GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase = object, torch.nn.Module, object
    PreTrainedConfig = object

__all__ = ["GenerationConfig", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase", "require_docstrings"]


def require_docstrings() -> None:
    """Check that Python keeps docstrings, which transformers parses when it imports a model class.

    Raises:
        BaseModelError: Python runs with ``-OO``.
    """
    if sys.flags.optimize > 1:
        raise BaseModelError("python: got -OO, which removes docstrings that transformers reads; allowed: -O")
