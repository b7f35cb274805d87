"""Memory: what a computation holds at its worst moment, found without holding it, and what this machine has free.

A pass is run on *fake* tensors, which have a shape, a dtype and a device but no data. Every tensor that an operation
makes, in the forward or the backward pass and inside hand-written gradients alike, is counted from its birth until the
last reference to it is gone. So nothing is assumed about what a module saves for its backward pass: the modules
themselves are asked.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATOR_GAPS = {"cpu": 0.7}
"""What the allocator keeps beyond live tensors, as a fraction of a pass's peak: an estimate, not a bound. On the CPU
``runtime.keep_buffers`` trades memory for speed: freed blocks stay with the process, with gaps between them, which no
shape predicts. Twenty runs on five shapes kept 0.3 to 1.0 (more after five rounds than after one), four others 0.7 to
1.0 over 20 rounds, and three whole runs 0.6 to 0.7. docs/log.md has the measurements."""

CHECKPOINTED_GAPS = {"cpu": 2.0}
"""The same with ``runtime.gradient_checkpointing``, whose passes are smaller and made of as many blocks: whole runs on
three shapes kept 1.5 to 2.5."""


class LiveBytes(TorchDispatchMode):
    """While active, counts the bytes of living tensors that were made since it began: ``live`` now, ``peak`` at most.

    A view costs nothing: storages are counted, not tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in before:
                self._add(t.untyped_storage())
        self.peak = max(self.peak, self.live)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes()
            self._known[key] = weakref.ref(storage, functools.partial(self._remove, key, size))
            self.live += size

    def _remove(self, key: int, size: int, _: Any) -> None:
        self._known.pop(key, None)
        self.live -= size


class Fakes:
    """Fake tensors that stand for real ones, each real one always for the same fake."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, real: Tensor, device: torch.device) -> Tensor:
        """A fake on ``device`` with shape and dtype of ``real``."""
        if id(real) not in self._made:
            with self._mode:
                fake = torch.empty(real.shape, dtype=real.dtype, device=device)
            kept = nn.Parameter(fake, requires_grad=False) if isinstance(real, nn.Parameter) else fake
            self._made[id(real)] = (real, kept)  # the real one is kept, so that its id is not given away
        return self._made[id(real)][1]

    def of_head(self, head: Any, device: torch.device) -> Any:
        """A :class:`comingle.models.loading.Head` of fakes."""
        bias = None if head.bias is None else self.of(head.bias, device)
        return replace(head, weight=self.of(head.weight, device), bias=bias)

    def size_of(self, module: nn.Module) -> int:
        """Bytes of all parameters and buffers of a module that has not been replaced, shared ones once."""
        return storage_bytes(module)

    def replace(self, module: nn.Module, device: torch.device) -> None:
        """Put fakes in the place of all parameters and buffers, shared ones included."""
        for inner in module.modules():
            for store in (inner._parameters, inner._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = self.of(tensor, device)  # pyright: ignore[reportArgumentType]


def storage_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
