"""What the engine asks of users' models, whatever they are: adapters over one base, copies of a net, or a mixture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from comingle.utils.errors import RecipeError
from comingle.utils.trees import Layout, Tree

Gates = Callable[[], Float[Tensor, "layers users n experts"]]
"""The gates of the last pass, first layer first."""


class Model(ABC):
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

    @abstractmethod
    def randomness(self, *key: object) -> AbstractContextManager[None]:
        """Within, what is random in a pass in training follows from the key."""

    @abstractmethod
    def losses(
        self, tensors: Tree, users: Sequence[int], batch: Any, *, train: bool = False, shares: Any = None
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

    # ---------------------------------------------------------------- token-level routers

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

    def router_inputs(self, tensors: Tree, users: Sequence[int], batch: Any, *, whole: bool = False) -> Tree:
        """What each token-level router reads at the end of every window's prompt, ``(users, batch, width)``, while
        experts are averaged; by the names of the routers' tensors, and zeros for a window that is none. With ``whole``
        the mean over all of the window."""
        raise NotImplementedError(f"{self.name}: no routers")

    # ---------------------------------------------------------------- client-level mixtures

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

    # ---------------------------------------------------------------- costs

    def without_weights(self, fakes: Any) -> tuple[Model, int]:
        """The model with ``fakes`` (:class:`comingle.costing.memory.Fakes`) in the place of what is frozen and
        not a user's, and how many bytes that was."""
        return self, 0
