"""The interface between the engine and users' models."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.func import functional_call

from comingle.models.pretrained import PreTrainedModel
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout, Tree

_known: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def call_with(net: nn.Module, tensors: Tree, *inputs: Tensor, options: Mapping[str, object] | None = None) -> Any:
    """``net(*inputs, **options)`` with ``tensors`` by the names that ``named_parameters`` and ``named_buffers`` have.

    What is tied has its tensor everywhere. torch ties by names, of which a module that is used twice has several: it
    would be given the same tensor twice, and keep it.
    """
    if net not in _known:
        _known[net] = _tied(net)
    also = {name: tensors[first] for name, first in _known[net].items() if first in tensors}
    return functional_call(net, tensors | also, inputs, dict(options or {}), tie_weights=False)


def _tied(net: nn.Module) -> dict[str, str]:
    """Further places of a tensor, in other modules, by name: the name of the first."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for prefix, module in net.named_modules():  # each once
        for own, t in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{own}" if prefix else own
            if t is not None and first.setdefault(id(t), name) != name:
                tied[name] = first[id(t)]
    return tied


Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def own_copy(net: Module, tensors: Tree, *, shared: Iterable[Tensor] = ()) -> Module:
    """A copy of ``net`` that holds one user's tensors ``(1, ...)``; those in ``shared`` are not copied but the same."""
    copied = copy.deepcopy(net, {id(t): t for t in shared})
    values = dict(copied.named_parameters()) | dict(copied.named_buffers())
    for name, tensor in tensors.items():
        values[name].copy_(tensor[0])
    return copied


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module structure over the very same parameters and buffers."""
    kept: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)


@runtime_checkable
class FakeWeights(Protocol):
    """Fake tensors in the place of real ones: :class:`comingle.cost.memory.Fakes`."""

    def of(self, real: Tensor, device: torch.device) -> Tensor:
        """Return the fake of a tensor."""
        ...

    def size_of(self, module: nn.Module) -> int:
        """Return the bytes of the parameters and buffers of a module."""
        ...

    def replace(self, module: nn.Module, device: torch.device) -> None:
        """Put fakes in the place of the parameters and buffers of a module."""
        ...


Gates = Callable[[], Float[Tensor, "layers users n experts"]]
"""The gates of the last pass, first layer first."""


class TokenRouting:
    """What a model with token-level routers tells of them; by default a model has none."""

    name: str

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return False

    def watched(self) -> AbstractContextManager[Gates]:
        """Within, every pass leaves its gates behind; only where tokens are routed."""
        raise NotImplementedError(f"{self.name}: no routers")

    def expert_names(self, user: int) -> list[str]:
        """What a user's experts are called; only where tokens are routed."""
        raise NotImplementedError(f"{self.name}: no experts")

    def router_inputs(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"], *, whole: bool = False
    ) -> Tree:
        """What each token-level router reads at the end of every window's prompt, ``(users, batch, width)``, while
        experts are averaged; by the names of the routers' tensors, and zeros for a window that is none. With ``whole``
        the mean over all of the window."""
        raise NotImplementedError(f"{self.name}: no routers")


class ClientMixing:
    """What a model with client-level mixtures tells of them; by default a model has none."""

    name: str

    def shares(self, tensors: Tree) -> Float[Tensor, "users clusters"]:
        """Each user's mixture; only where there is one."""
        raise NotImplementedError(f"{self.name}: no client-level mixture")

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False
    ) -> Float[Tensor, "users clusters batch ..."]:
        """The losses under each component alone; only where there is a client-level mixture."""
        raise NotImplementedError(f"{self.name}: no client-level mixture")

    def precondition(self, tensors: Tree, gradients: Tree) -> Tree:
        """Gradients as a client-level mixture preconditions them."""
        return gradients

    def centre(self, tensors: Tree, shares: Float[Tensor, " clusters"]) -> Tree:
        """Components centred under ``shares``, their mean in the base, where a mixture's base is trained too."""
        return tensors

    @property
    def other_starts(self) -> Float[Tensor, "others columns"] | None:
        """Further models that a server may begin with, initialised differently; None: drawn as the users' own are."""
        return None


class Model(TokenRouting, ClientMixing, ABC):
    """Everybody's model at once: ``tensors`` are stacked over rows, row i belongs to user ``users[i]``."""

    name: str
    layout: Layout
    device: torch.device
    dtype: torch.dtype

    batchwise: bool = False
    """Whether in training what becomes of a sample depends on the others of its batch, as with batch norm."""

    # ---------------------------------------------------------------- sizes

    @property
    @abstractmethod
    def ranks(self) -> Int[Tensor, " users"]:
        """Each user's LoRA rank."""

    @property
    @abstractmethod
    def scales(self) -> Float[Tensor, " users"]:
        """Each user's LoRA scale."""

    @abstractmethod
    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """True where a user really has a parameter, on the model's device."""

    @property
    @abstractmethod
    def base_parameters(self) -> int:
        """How many parameters the base has, or one copy of the net."""

    @abstractmethod
    def only(self, users: Sequence[int]) -> Model:
        """The same model of some of its users, numbered anew in this order; layout, scales and weights stay."""

    # ---------------------------------------------------------------- passes

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Named tensors out of rows, in the dtype that the model computes in."""
        return {name: t.to(self.dtype) for name, t in self.layout.views(rows).items()}

    def randomness(self, *key: object) -> AbstractContextManager[None]:
        """Within, draw what is random in a pass in training from a stream of the key; by default nothing is."""
        return nullcontext()

    @abstractmethod
    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False, shares: Tensor | None = None
    ) -> tuple[Float[Tensor, "users batch ..."], Float[Tensor, " users"] | float]:
        """Loss of every token or sample of a batch, and each user's penalty; ``shares`` are samples' own mixtures."""

    def losses_of_each(self, tensors: Tree, users: Sequence[int], batch: Any) -> Float[Tensor, "users batch ..."]:
        """The same in training, by arithmetic that does not depend on how many places of the batch have a loss."""
        return self.losses(tensors, users, batch, train=True)[0]

    @abstractmethod
    def predict(self, tensors: Tree, users: Sequence[int], batch: Any) -> Float[Tensor, "users batch ..."]:
        """What a score is made of: losses of text, outputs for samples."""

    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """Up to ``limit`` tokens after each prompt, each the likeliest one; prompts are filled with PAD on the left."""
        raise NotImplementedError(f"{self.name}: a net has nothing to say")

    def without(self, roles: frozenset[str]) -> Model:
        """The model of what is left of its tensors when all entries of some roles are cut away.

        Raises:
            RecipeError: that is no model.
        """
        if found := sorted(roles & self.layout.roles):
            raise RecipeError(f"{self.name}: without {', '.join(found)} nothing is left that predicts")
        return self

    # ---------------------------------------------------------------- costs

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """The model with ``fakes`` (:class:`comingle.cost.memory.Fakes`) in the place of what is frozen and
        not a user's, and how many bytes that was."""
        return self, 0
