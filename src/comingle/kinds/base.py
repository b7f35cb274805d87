"""What a kind of data is: how users are read, trained on and scored, and what a user's own model is afterwards.

A kind is a folder: its section of the recipe, its :class:`Kind`, its feed. Nothing outside asks which kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import Training
from comingle.data.populations import Crowd, listed
from comingle.data.samples.samples import SPLITS
from comingle.data.splits import Overlap, UserText, find_overlap
from comingle.engines.client import Clients
from comingle.methods.base import Method
from comingle.models.base import Base
from comingle.models.model import Model
from comingle.models.personal import Personal
from comingle.utils.digests import digest_split
from comingle.utils.errors import DataError
from comingle.utils.registry import load_object
from comingle.utils.trees import Tree

LoadBase = Callable[[], Base]
"""Loads the base, when something needs it."""


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What several runs of a comparison have in common: the base and everybody's data.

    ``unread`` says that the users' data is read when something asks for it, as by :mod:`comingle.runs.opening`.
    """

    kind: Kind
    base: Base | None
    users: Sequence[Any]
    """Everybody: a name, and ``train``, ``valid`` and ``test`` with a length."""
    texts: tuple[UserText, ...] = ()
    """Everybody's documents, where they have any."""
    common: Any = None
    """What all users have in common besides the base: a task."""
    unread: bool = False
    here: Sequence[int] | None = None
    """The numbers of those whose data is on this machine, where others have theirs elsewhere; None: everybody's is."""
    shared_out: bool = False
    """Whether the others are in other processes of this run, which have been looked at together."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Users who were left out, as ``data.on_small_user`` asks for, and what they have too little of."""
    skipped_rows: int = 0
    """Number of rows that were left out, as ``data.on_bad_row`` asks for."""

    @cached_property
    def digests(self) -> dict[str, dict[str, str]]:
        """By which the splits of everybody who is here are known again."""
        return {user.name: {split: digest_split(getattr(user, split)) for split in SPLITS} for user in self.present}

    def with_users(self, users: Sequence[Any]) -> Materials:
        """Return the same materials with other users, or with some of them."""
        names = {user.name for user in users}
        common = replace(self.common, users=users) if hasattr(self.common, "users") else self.common
        return replace(self, users=users, common=common, texts=tuple(t for t in self.texts if t.name in names))

    @property
    def reads(self) -> bool:
        """Whether it has to be seen to that there is validation data where it is needed."""
        return not self.unread and not self.shared_out

    @property
    def numbers(self) -> Sequence[int]:
        """Which of the users :attr:`present` are."""
        return range(len(self.users)) if self.here is None else self.here

    @property
    def present(self) -> Sequence[Any]:
        """The users whose data is on this machine."""
        if isinstance(self.users, Crowd) and isinstance(self.here, range):
            return self.users.part(self.here)
        return self.users if self.here is None else tuple(self.users[number] for number in self.numbers)

    @property
    def documents(self) -> str:
        """Plural noun for what :attr:`texts` hold."""
        return "conversations" if self.kind.name == "conversations" else "documents"

    def overlaps(self) -> list[Overlap]:
        """Users whose held-out documents also occur in their training text."""
        return [overlap for text in self.texts if (overlap := find_overlap(text)).total]


class Kind(ABC):
    """One kind of data."""

    name: str
    needs_base: bool = True
    """Whether users train adapters on a language model; else nets of their own."""
    handed: str = ""
    """What a program may hand over as one user's data, in words; empty where it may not."""
    user: type
    """What a user is: ``name``, ``train``, ``valid``, ``test``."""

    # ---------------------------------------------------------------- before training

    @abstractmethod
    def check(self, recipe: Recipe, method: Method) -> None:
        """Whether the recipe's method is for such users; reads no data.

        Raises:
            RecipeError: it is not.
        """

    @abstractmethod
    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """Everybody's data, and the base; ``validates`` says whether users need validation data to be large enough.

        Raises:
            RecipeError: a setting is wrong.
            DataError: somebody's data cannot be used.
            BaseModelError: the base cannot.
        """

    def takes(self, data: Any, options: Mapping[str, Any]) -> bool:
        """Whether this is what a program may hand over as one user's data of this kind, by its section's options."""
        return False

    def adopt(
        self, recipe: Recipe, given: Mapping[str, Any], load_base: LoadBase, *, validates: bool, net: Any = None
    ) -> Materials:
        """As :meth:`read`, of data that a program hands over by users' names; ``net`` makes a net where there is one.

        Raises:
            DataError: somebody's data cannot be used.
        """
        raise DataError(f"users: {self.name} is read where a recipe says, and not handed over")

    @abstractmethod
    def model(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Model:
        """The model that all users train, be they here or not; looks at no data.

        Raises:
            ComingleError: settings and base do not fit each other.
        """

    def model_here(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Model:
        """The same, of the users who are here."""
        model = self.model(recipe, materials, method, training)
        return model if materials.here is None else model.only(materials.here)

    @abstractmethod
    def clients(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Clients:
        """The users who are here, with the model that they train.

        Raises:
            ComingleError: settings, data and base do not fit each other.
        """

    def pooled(self, users: Sequence[Any]) -> Any:
        """One user named "everyone" that has what all have: the centralized baseline."""
        raise NotImplementedError

    def trainers(self, materials: Materials, method: Method) -> tuple[Sequence[Any], Sequence[Any]]:
        """Everybody who is here, and those who train: all of them, or the one who has what all have."""
        users = listed(materials.present)
        if not method.placement.pooled:
            return users, users
        if materials.unread:
            return users, [later(self.user, "everyone", lambda: self.pooled(users))]
        return users, [self.pooled(users)]

    # ---------------------------------------------------------------- afterwards

    @abstractmethod
    def personal(self, name: str, model: Model, tensors: Tree, row: int) -> Personal:
        """A user's own model; ``row`` is the user's row in the federation."""

    def settings(self, materials: Materials) -> dict[str, Any]:
        """What a run folder keeps of the materials besides names and digests, so that the run opens without data."""
        return {}

    def reopened(
        self, base: Base | None, users: Sequence[Any], settings: Mapping[str, Any], *, net: Any = None
    ) -> Materials:
        """The materials of a run that is opened again, whose users are read when something asks for them.

        ``net`` makes a net, where a program hands that over.
        """
        return Materials(kind=self, base=base, users=users, unread=True)

    # ---------------------------------------------------------------- looked at

    def sample(self, user: Any) -> Any:
        """Tokens of a test set of a user, for a view of where they are routed."""
        return user.test

    # ---------------------------------------------------------------- counted without data

    read_for_costs: bool = False
    """Whether costs depend on what users have, so that it is read before they are counted."""

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Who the users are, without reading more than has to be.

        Raises:
            DataError: that cannot be found out.
        """
        return tuple(recipe.data.names)

    def of_users(self, recipe: Recipe, users: int) -> Recipe:
        """The recipe with so many users, where their number alone decides on the costs that are read for."""
        return recipe

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Recipes of several methods, with text that costs as much, where costs are counted in tokens.

        Who would be left out comes with them, and a note. With a number of ``users`` their data may be out of reach.

        Raises:
            DataError: what a run would refuse of data that lies on this machine.
        """
        return list(recipes), set(), ""


def kind_of(recipe: Recipe) -> Kind:
    """The kind of a recipe's users."""
    return load_object(recipe.data.implementation)


def always_there(method: Method, training: Training) -> Training:
    """The one trainer of pooled data takes part in every round."""
    return replace(training, participation=1.0) if method.placement.pooled else training


def count_trainers(materials: Materials, method: Method) -> int:
    """How many train, here and elsewhere."""
    return 1 if method.placement.pooled else len(materials.users)


class _Later:
    """Fields that nobody has filled in are read, all at once."""

    _read: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:  # asked only for what is not there
        if name not in ("train", "valid", "test"):
            raise AttributeError(name)
        read = self._read()
        vars(self).update({split: getattr(read, split) for split in ("train", "valid", "test")})
        return vars(self)[name]


def later(kind: type, name: str, read: Callable[[], Any], *, cluster: int | None = None) -> Any:
    """A user of some type of whom the name, and the true cluster if any, is known without reading."""
    user = object.__new__(type(f"Later{kind.__name__}", (_Later, kind), {}))
    vars(user).update(name=name, _read=read, cluster=cluster)
    return user
