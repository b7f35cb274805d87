"""Classes of transformers for annotations, without importing it, and an import of it that takes less memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:
    # Stand-ins for a runtime type checker.
    GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase = object, torch.nn.Module, object
    PreTrainedConfig = object

__all__ = ["GenerationConfig", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase", "import_lean"]


def import_lean() -> None:
    """Import transformers' language models without torch's compiler, ``torch.distributed.tensor`` and scipy.

    This saves 100 MB of memory. Other code can still import these packages later.
    """
    utils: Any = importlib.import_module("transformers.utils")
    with (
        _returning_false(utils, "is_scipy_available"),  # scipy is for object detection
        _returning_false(torch.distributed, "is_available"),  # for models that are split over processes
        _compiler_stubs(),
    ):
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("transformers.models.llama.modeling_llama")  # imports what all families use
    utils.is_torch_distributed_available.cache_clear()  # otherwise it keeps returning False


@contextmanager
def _returning_false(module: ModuleType, name: str) -> Iterator[None]:
    """Replace a function of a module by one that returns False, in the context.

    Args:
        module: The module, changed in place.
        name: Name of the function.
    """
    function = getattr(module, name)
    setattr(module, name, lambda: False)
    try:
        yield
    finally:
        setattr(module, name, function)


_COMPILER = "torch._dynamo"
_INDEXING = f"{_COMPILER}._trace_wrapped_higher_order_op"


@contextmanager
def _compiler_stubs() -> Iterator[None]:
    """Keep torch's compiler from being imported with transformers in the context, as it takes much memory.

    It is replaced by stubs unless it is loaded already.
    The stubs are two modules with only the names that transformers imports.
    """
    if _COMPILER in sys.modules:
        yield
        return
    compiler: Any = ModuleType(_COMPILER)
    compiler.disable = _do_not_decorate
    compiler.assume_constant_result = _do_not_decorate
    compiler.allow_in_graph = _do_not_decorate
    indexing: Any = ModuleType(_INDEXING)
    indexing.TransformGetItemToIndex = _LazyIndexing
    sys.modules.update({_COMPILER: compiler, _INDEXING: indexing})
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_INDEXING]


def _do_not_decorate(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Stand in for a decorator of torch's compiler: return the function unchanged.

    It serves both ``@decorator``, where ``function`` is given, and ``@decorator(option=...)``, where it is None.
    """
    if function is not None:
        return function
    return _do_not_decorate


class _LazyIndexing:
    """``TransformGetItemToIndex`` of torch's compiler, which is imported when the context is entered."""

    def __enter__(self) -> None:
        """Import the context of torch's compiler, and enter it."""
        self._context = importlib.import_module(_INDEXING).TransformGetItemToIndex()
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
