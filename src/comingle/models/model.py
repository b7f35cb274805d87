"""Interface between the engine and the users' models."""

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

from comingle.models.lora import PeftAdapter
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout, Tree

_tied_names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def call_with(net: nn.Module, tensors: Tree, *inputs: Tensor, options: Mapping[str, object] | None = None) -> Any:
    """Return ``net(*inputs, **options)`` with other parameters and buffers; tied weights are replaced everywhere.

    Args:
        net: The module to call; it is not modified.
        tensors: Replacements, by the names in ``named_parameters`` and ``named_buffers``.
        inputs: Positional arguments of the call.
        options: Keyword arguments of the call.
    """
    if net not in _tied_names:
        _tied_names[net] = _find_tied(net)
    replacements = dict(tensors)
    for tied_name, first_name in _tied_names[net].items():
        if first_name in tensors:
            replacements[tied_name] = tensors[first_name]
    # Not torch's `tie_weights`, which does not restore the tensors of a module that occurs twice.
    return functional_call(net, replacements, inputs, dict(options or {}), tie_weights=False)


def _find_tied(net: nn.Module) -> dict[str, str]:
    """Find parameters and buffers that a net holds under several names, such as tied embeddings.

    Returns:
        The first name of the tensor by each further name, such as ``{"head.weight": "embedding.weight"}``.
    """
    first_name_by_id: dict[int, str] = {}
    tied: dict[str, str] = {}
    for module_name, module in net.named_modules():
        for local_name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            name = f"{module_name}.{local_name}" if module_name else local_name
            if id(tensor) in first_name_by_id:
                tied[name] = first_name_by_id[id(tensor)]
            else:
                first_name_by_id[id(tensor)] = name
    return tied


Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def copy_with_tensors(net: Module, tensors: Tree, *, shared: Iterable[Tensor] = ()) -> Module:
    """Return a copy of ``net`` that holds one user's tensors.

    Args:
        net: The module to copy.
        tensors: The user's tensors ``(1, ...)`` by name.
        shared: Tensors of ``net`` that the copy shares instead of copying.
    """
    not_copied = {id(t): t for t in shared}
    copied = copy.deepcopy(net, memo=not_copied)
    values = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    for name, tensor in tensors.items():
        user_value = tensor[0]
        values[name].copy_(user_value)
    return copied


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules that shares all parameters and buffers, for adapters to be added to."""
    not_copied: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo=not_copied)


@runtime_checkable
class FakeWeights(Protocol):
    """Replacements of real tensors by fake ones, as in :class:`comingle.cost.memory.Fakes`."""

    def of(self, real: Tensor, device: torch.device) -> Tensor:
        """Return a tensor with the shape and dtype of a real one, but without values, to count costs."""
        ...

    def size_of(self, module: nn.Module) -> int:
        """Return the bytes of a module's parameters and buffers."""
        ...

    def replace(self, module: nn.Module, device: torch.device) -> None:
        """Replace a module's parameters and buffers by tensors without values (:meth:`of`), in place."""
        ...


Gates = Callable[[], Float[Tensor, "layers users n experts"]]
"""Function that returns the gates of the last forward pass, first layer first."""


class TokenRouting:
    """Queries about token-level routers; the defaults are those of a model without routers."""

    name: str

    @property
    def routed(self) -> bool:
        """True if tokens are routed to experts; False by default."""
        return False

    def record_gates(self) -> AbstractContextManager[Gates]:
        """Record the gates of every forward pass in the context; requires token-level routers."""
        raise NotImplementedError(f"{self.name}: no routers")

    def expert_names(self, user: int) -> list[str]:
        """Return the names of a user's experts; requires token-level routers."""
        raise NotImplementedError(f"{self.name}: no experts")

    def router_inputs(
        self, tensors: Tree, users: Sequence[int], batch: Int[Tensor, "users batch window"], *, whole: bool = False
    ) -> Tree:
        """Return each router's input for each window: the hidden state at the last token of the window's prompt.

        It serves to initialise a router with the mean of its inputs. Routers are off in this pass: the experts are
        averaged. Requires token-level routers.

        Args:
            tensors: Tensors of ``users``; those of the routers are not used.
            users: Indices of the users, in the order of the rows of ``tensors``.
            batch: Windows of tokens.
            whole: Average the hidden states over all tokens of a window instead.

        Returns:
            ``(users, batch, width)`` by the names of the routers' tensors; zeros for windows of padding.
        """
        raise NotImplementedError(f"{self.name}: no routers")


class ClientMixing:
    """Queries about client-level mixtures, in which a user has one weight per component for all inputs.

    The defaults are those of a model without a mixture.
    """

    name: str

    def shares(self, tensors: Tree) -> Float[Tensor, "users clusters"]:
        """Return the weights with which each user mixes several models or sets of adapters, the same for all inputs.

        Models with such a mixture override this; others cannot be asked.

        Args:
            tensors: The users' tensors by name, among them the logits of these weights.
        """
        raise NotImplementedError(f"{self.name}: no client-level mixture")

    def component_losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False
    ) -> Float[Tensor, "users clusters batch ..."]:
        """Return the losses that each component of the users' mixtures has alone, without the other components.

        A component is one of the models or sets of adaptors that a client-level mixture combines. Models with such a
        mixture override this.

        Args:
            tensors: Tensors of ``users``.
            users: Indices of the users, in the order of the rows of ``tensors``.
            batch: The users' data: windows of tokens, or samples.
            train: Run in training mode.

        Returns:
            The loss of each sample, or of each token of each window.
        """
        raise NotImplementedError(f"{self.name}: no client-level mixture")

    def precondition(self, tensors: Tree, gradients: Tree) -> Tree:
        """Precondition gradients before the optimiser step; by default return them unchanged.

        Mixtures of adaptors divide the gradient of each low-rank factor by the other's Gram matrix (FLoRAL eq. 36).

        Args:
            tensors: The users' tensors by name, at which the gradients were taken.
            gradients: Gradients of these tensors by name.
        """
        return gradients

    def centre(self, tensors: Tree, shares: Float[Tensor, " clusters"]) -> Tree:
        """Move the mean of the components' adaptors into the base; by default return the tensors unchanged.

        The base then holds what all components have in common, and the adaptors only differences (FLoRAL eq. 37).

        Args:
            tensors: Tensors of base and adaptors by name.
            shares: Weight of each component in the mean.
        """
        return tensors

    @property
    def other_initial_rows(self) -> Float[Tensor, "others columns"] | None:
        """Initial models 2, 3, ... of a server that keeps several models, one per row.

        None: the server draws them at random from the layout's initialisers, as it always draws model 1.
        """
        return None


class Model(TokenRouting, ClientMixing, ABC):
    """The models of all users; ``tensors`` are stacked over rows, and row i belongs to user ``users[i]``."""

    name: str
    layout: Layout
    device: torch.device
    dtype: torch.dtype

    batchwise: bool = False
    """Whether a sample's output in training depends on the other samples of its batch, as with batch norm."""

    # ---------------------------------------------------------------- sizes

    @property
    @abstractmethod
    def ranks(self) -> Int[Tensor, " users"]:
        """Each user's LoRA rank."""

    @property
    @abstractmethod
    def scales(self) -> Float[Tensor, " users"]:
        """Factor of each user's LoRA in the forward pass, ``alpha / sqrt(rank)``."""

    @abstractmethod
    def mask(self, ranks: Int[Tensor, " users"] | None = None) -> Bool[Tensor, "users columns"]:
        """Return which parameters each user has, on the model's device; users with a smaller rank have fewer."""

    @property
    @abstractmethod
    def base_parameters(self) -> int:
        """Number of parameters of the base model; with nets, which have no base, those of one user's net."""

    @abstractmethod
    def only(self, users: Sequence[int]) -> Model:
        """Return the model of some users, renumbered in this order; layout, scales and weights are unchanged."""

    def set_adapter(
        self, rows: Float[Tensor, "rows columns"], adapter: PeftAdapter, users: Sequence[int]
    ) -> Bool[Tensor, " columns"]:
        """Set the LoRAs in rows of parameters to an adapter, in place; only models with LoRA experts override this.

        Args:
            rows: Parameters before the first round.
            adapter: The adapter.
            users: Index of the user of each row.

        Returns:
            True for columns of linears that the adapter changes.

        Raises:
            RecipeError: The adapter does not fit the model.
        """
        raise RecipeError(f"adapters.start: got {adapter.name} for {type(self).__name__}; allowed: null")

    # ---------------------------------------------------------------- passes

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return the users' tensors by name, in the dtype of the model's computations.

        Args:
            rows: All parameters of each user as one row, in the order of the layout.
        """
        return {name: t.to(self.dtype) for name, t in self.layout.views(rows).items()}

    def randomness(self, *key: object) -> AbstractContextManager[None]:
        """Return a context that seeds a training pass's random numbers by ``key``; by default a pass draws none."""
        return nullcontext()

    @abstractmethod
    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False, shares: Tensor | None = None
    ) -> tuple[Float[Tensor, "users batch ..."], Float[Tensor, " users"] | float]:
        """Return the loss of every token or sample, and each user's load-balancing penalty (0.0 without token routers).

        Args:
            tensors: Tensors of ``users``.
            users: Indices of the users, in the order of the rows of ``tensors``.
            batch: The users' data: windows of tokens, or samples.
            train: Run in training mode.
            shares: Mixture weights of each sample, in methods that mix losses sample by sample; None: the users' own.
        """

    def losses_in_fixed_order(
        self, tensors: Tree, users: Sequence[int], batch: Any
    ) -> Float[Tensor, "users batch ..."]:
        """Return the training losses, each with the same bits whether or not other tokens of the batch have a target.

        Differential privacy needs it: the clipped gradient of an example must not depend on the other examples. By
        default the result of :meth:`losses`, for models that compute the loss of every sample in any case.

        Args:
            tensors: Tensors of ``users``.
            users: Indices of the users, in the order of the rows of ``tensors``.
            batch: The users' data: windows of tokens, or samples.
        """
        losses, _penalty = self.losses(tensors, users, batch, train=True)
        return losses

    @abstractmethod
    def predict(self, tensors: Tree, users: Sequence[int], batch: Any) -> Float[Tensor, "users batch ..."]:
        """Return the values from which evaluation computes a score: losses of text, outputs for samples.

        Args:
            tensors: Tensors of ``users``.
            users: Indices of the users, in the order of the rows of ``tensors``.
            batch: The users' data: windows of tokens, or samples.
        """

    def generate(
        self, tensors: Tree, users: Sequence[int], prompts: Int[Tensor, "users batch prompt"], limit: int
    ) -> Int64[Tensor, "users batch new"]:
        """Continue each prompt greedily; language models override this, as other nets cannot.

        Args:
            tensors: Tensors of ``users``.
            users: Indices of the users, in the order of the rows of ``tensors``.
            prompts: Token ids, padded on the left with ``PAD``.
            limit: Largest number of new tokens.
        """
        raise NotImplementedError(f"{self.name}: a net cannot generate text")

    def without(self, roles: frozenset[str]) -> Model:
        """Return a model that predicts without the tensors of some roles, for a phase that leaves out the router, say.

        By default the model itself, if it has no tensors of these roles.

        Raises:
            RecipeError: The model cannot predict without these tensors.
        """
        needed = sorted(roles & self.layout.roles)
        if needed:
            raise RecipeError(f"{self.name}: cannot predict without {', '.join(needed)}")
        return self

    # ---------------------------------------------------------------- costs

    def without_weights(self, fakes: FakeWeights) -> tuple[Model, int]:
        """Replace the frozen weights by fake tensors, to estimate memory; by default nothing, for nets without any.

        Args:
            fakes: Maker of fake tensors (:class:`comingle.cost.memory.Fakes`).

        Returns:
            The model, and the bytes of the replaced weights.
        """
        return self, 0
