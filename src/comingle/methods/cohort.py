"""Phases of training, and users who are worked on together, as a method's parts see them.

A :class:`Cohort` is users in one batch, none of whom knows of another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from comingle.models.routers import Powers
from comingle.utils.trees import ROUTER, Tree

Stream = Literal["train", "valid"]

ROUTERS = frozenset({ROUTER})


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Which tensors a user updates on which text, how often.

    After every ``every``-th of a user's own local iterations the phase takes ``steps`` optimiser steps on the roles it
    names, each on a fresh random batch of ``stream``; of every ``turns`` rounds it has one, the
    ``turn``-th (from 0). ``optimizer`` names whose settings and step count it uses;
    "both" descends on all roles together, the routers with the router's settings, everything else with the experts'.
    ``label`` names a random stream of its own for the batches. Of the roles that it ``leaves`` to other phases it
    computes gradients too, which are added up until a phase trains these roles and takes them with its own. The model
    of its passes is ``without`` some roles: what is left of a mixture's experts is averaged where its router is not.
    """

    roles: frozenset[str]
    stream: Stream = "train"
    every: int = 1
    steps: int = 1
    turn: int = 0
    turns: int = 1
    optimizer: Literal["experts", "router", "both"] = "experts"
    label: str = ""
    leaves: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def rounds_of(self, rounds: int) -> int:
        """In how many of so many rounds it has a turn."""
        return len(range(self.turn, rounds, self.turns))

    @property
    def reached(self) -> frozenset[str]:
        """Every role of which it computes a gradient."""
        return self.roles | self.leaves

    @property
    def purpose(self) -> str:
        """Whose random stream draws the batches: methods that train the same at one seed see the same."""
        if self.label:
            return self.label
        return "router" if self.optimizer == "router" else "experts"

    @property
    def optimizers(self) -> tuple[tuple[Literal["experts", "router"], frozenset[str]], ...]:
        """Which optimiser updates which roles."""
        if self.optimizer != "both":
            return ((self.optimizer, self.roles),)
        routers = self.roles & ROUTERS
        return (("experts", self.roles - routers), ("router", routers))


class Cohort(ABC):
    """Users that are worked on together, as a part sees them. Tensors have the users on their leading dimension."""

    names: list[str]
    """The users' names."""

    @property
    @abstractmethod
    def tensors(self) -> Tree:
        """Everything that the users train, shared and local, to be changed in place."""

    @property
    @abstractmethod
    def began(self) -> Tree:
        """The same as it was when the round began; only for parts that say that they look back."""

    @property
    @abstractmethod
    def exchanged(self) -> Tree:
        """What their first copy, which is exchanged, was when the round began; only for parts that look across."""

    @property
    @abstractmethod
    def copy(self) -> Int[Tensor, " users"]:
        """Which copy of its user's tensors each row is, from 0; where methods have several, all of them take steps."""

    @property
    @abstractmethod
    def kept(self) -> Tree:
        """What parts keep of each user between rounds, to be changed in place."""

    @property
    @abstractmethod
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA ranks, to be changed in place."""

    @property
    @abstractmethod
    def router_rate(self) -> float:
        """The router's learning rate in this round."""

    @abstractmethod
    def reset(self, roles: frozenset[str]) -> None:
        """Make the tensors of some roles what they were before any training."""

    @abstractmethod
    def forget(self, roles: frozenset[str]) -> None:
        """Have optimisers forget what they remember of the tensors of some roles.

        Where these are all that an optimiser trains, it also forgets how many steps it has taken.
        """

    @abstractmethod
    def take_steps(self, phase: Phase) -> None:
        """The optimiser steps of a phase."""

    @abstractmethod
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Mean training loss in nats under each component."""

    @abstractmethod
    def divide_samples(self) -> None:
        """Have each training sample mixed by shares of its own for the rest of the round, a user's by their mean."""

    @abstractmethod
    def training_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Mean training loss in nats under each of its ``models (users, models, *shape)``; 0 for users without data."""

    @abstractmethod
    def validation_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Mean validation loss in nats under each of its ``models (users, models, *shape)``."""

    @abstractmethod
    def held_out_losses(self, powers: Powers = None) -> Float[Tensor, "users clusters losses"]:
        """Every loss in nats on each user's validation data under each component, filled up with zeros.

        With ``powers`` under each taken to its own, in which the losses are differentiable.
        """

    @abstractmethod
    def router_directions(self, instances: int, *, whole: bool = False) -> Tree:
        """The mean of the unit vectors along what each token-level router reads, experts averaged, at the end of the
        prompts of random training instances (of whole windows where nothing is a prompt), the same at each call:
        ``(users, width)`` by the names of the routers' tensors. With ``whole`` along the mean of what it reads of each
        window, all of it. Only for language models with routers."""

    @abstractmethod
    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Every set of tensors that the users train."""

    @abstractmethod
    def validate(self, candidate: Float[Tensor, " columns"], user: int) -> float:
        """Mean validation loss in nats of one user (by place) with these tensors as its model."""
