"""Kinds of data: text, conversations and samples.

A kind is a folder: its section of the recipe, its :class:`Kind`, its feed. Nothing outside asks which kind it is.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from comingle.config import Recipe
from comingle.config.files import check_used
from comingle.config.settings import EVERYBODY, KINDS
from comingle.data.populations import as_sequence, select_users
from comingle.data.samples.samples import SPLITS
from comingle.data.splits import Overlap, UserText, find_overlap
from comingle.data.streaming import ListedRows, StreamingReader
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.base import Base
from comingle.models.ensembles import EnsembleModel, ensemble
from comingle.models.floral.wrapper import adaptor_size
from comingle.models.hardware import require_room
from comingle.models.injection import ExpertCounts
from comingle.models.loading import backbone
from comingle.models.lora import lora_scale
from comingle.models.model import Model
from comingle.models.personal import Personal
from comingle.models.stacked import MixedLanguageModel, mix_language_model
from comingle.privacy.mechanisms import check_supported
from comingle.training.batch_sources import AnyUser
from comingle.training.client import Clients
from comingle.training.events import JsonObject, check_trackers
from comingle.training.settings import RunPlan
from comingle.training.state import NEEDS_CLUSTERS
from comingle.utils.errors import DataError, PluginError, RecipeError, run_checks
from comingle.utils.names import name_problem
from comingle.utils.registry import load_object
from comingle.utils.trees import Tree, digest_split

logger = logging.getLogger("comingle")

LoadBase = Callable[[], Base]
"""Loads the base, when something needs it."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The base and the users' data of a run, or of all runs of a comparison."""

    kind: Kind
    base: Base | None
    users: Sequence[AnyUser]
    """Everybody: a name, and ``train``, ``valid`` and ``test`` with a length."""
    texts: tuple[UserText, ...] = ()
    """Everybody's documents, where they have any."""
    common: Any = None
    """What all users have in common besides the base: a task."""
    unread: bool = False
    """Whether users' data is read on demand, as by :mod:`comingle.runs.api`."""
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

    def with_users(self, users: Sequence[AnyUser]) -> RunData:
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
    def present(self) -> Sequence[AnyUser]:
        """The users whose data is on this machine."""
        return select_users(self.users, self.here)

    @property
    def documents(self) -> str:
        """Plural noun for what :attr:`texts` hold."""
        return "conversations" if self.kind.name == "conversations" else "documents"

    def overlaps(self) -> list[Overlap]:
        """Users whose held-out documents also occur in their training text."""
        return [overlap for text in self.texts if (overlap := find_overlap(text)).total]


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What a run asks its kind of data for: the users of a recipe, or those that a program passes.

    Args:
        recipe: The recipe.
        load_base: Loads the base model, if the kind needs it.
        validates: Whether users need validation data to have enough.
        given: The users' data by their names, if a program passes it.
        net: Makes a net, if a program passes one.
        loss: The loss of each sample, if a program passes one.
    """

    recipe: Recipe
    load_base: LoadBase
    validates: bool
    given: Mapping[str, Any] | None = None
    net: Callable[..., nn.Module] | None = None
    loss: Callable[..., Tensor] | None = None


class Kind(ABC):
    """One kind of data."""

    name: str
    needs_base: bool = True
    """Whether users train adapters on a language model; else nets of their own, whose costs depend on their data."""
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

    def reader(self, request: DataRequest) -> StreamingReader[Any, Any] | None:
        """Return what reads users one after another; None for a kind that makes them all at once (:meth:`make`).

        Raises:
            RecipeError: A setting is wrong.
            DataError: The request has no data.
        """
        return None

    def make(self, recipe: Recipe) -> RunData:
        """Return all users' data at once, for a kind without a reader.

        Raises:
            RecipeError: A setting is wrong.
            DataError: A user's data cannot be used.
        """
        raise NotImplementedError(f"{self.name}: has neither a reader nor a method make of its own")

    def read(self, request: DataRequest) -> RunData:
        """Return all users' data in memory, and the base model.

        Raises:
            RecipeError: A setting is wrong, or a net or a loss that a program passes cannot be used.
            DataError: A user's data cannot be used.
            BaseModelError: The base model cannot be used.
        """
        if (reader := self.reader(request)) is not None:
            return self._in_memory(reader)
        if request.given is not None:
            raise DataError(f"users: {self.name} is read where a recipe says, and not handed over")
        return self.make(request.recipe)

    def _in_memory(self, reader: StreamingReader[Any, Any]) -> RunData:
        users, texts, skipped = list[Any](), list[UserText](), dict[str, str]()
        reader.on_skip = skipped.__setitem__
        read: Iterable[Any] = reader.read(ListedRows())
        if self.needs_base:  # which is loaded when the data could be read, as more can be wrong with that
            read = list(read)
        for found, user in reader.stream(read):
            users.append(user)
            if (text := reader.text(found)) is not None:
                texts.append(text)
        about, lines = reader.summary()
        for line in lines:
            logger.warning("%s", line)
        return RunData(
            kind=self,
            base=reader.base,
            users=tuple(users),
            texts=tuple(texts),
            common=reader.common(tuple(users), about),
            skipped=skipped,
            skipped_rows=about.get("skipped_rows", 0),
        )

    def takes(self, data: object, options: Mapping[str, object]) -> bool:
        """Whether this is what a program may hand over as one user's data of this kind, by its section's options."""
        return False

    @abstractmethod
    def model(self, recipe: Recipe, materials: RunData, plan: RunPlan) -> Model:
        """The model that all users train, be they here or not; looks at no data.

        Raises:
            ComingleError: settings and base do not fit each other.
        """

    @abstractmethod
    def clients(self, recipe: Recipe, materials: RunData, plan: RunPlan) -> Clients:
        """The users who are here, with the model that they train.

        Raises:
            ComingleError: settings, data and base do not fit each other.
        """

    def pooled(self, users: Sequence[AnyUser]) -> AnyUser:
        """One user named "everyone" that has what all have: the centralized baseline."""
        raise NotImplementedError

    # ---------------------------------------------------------------- afterwards

    @abstractmethod
    def personal(self, name: str, model: Model, tensors: Tree, row: int) -> Personal:
        """A user's own model; ``row`` is the user's row in the federation."""

    def settings(self, materials: RunData) -> JsonObject:
        """What a run folder keeps of the materials besides names and digests, so that the run opens without data."""
        return {}

    def reopened(
        self, base: Base | None, users: Sequence[AnyUser], settings: Mapping[str, Any], *, net: Any = None
    ) -> RunData:
        """The materials of a run that is opened again, whose users are read when something asks for them.

        ``net`` makes a net, where a program hands that over.
        """
        return RunData(kind=self, base=base, users=users, unread=True)

    # ---------------------------------------------------------------- looked at

    def sample(self, user: Any) -> Any:
        """Tokens of a test set of a user, for a view of where they are routed."""
        return user.test

    # ---------------------------------------------------------------- counted without data

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


def with_full_participation(plan: RunPlan) -> RunPlan:
    """Return a plan in which the one trainer of pooled data takes part in every round."""
    return replace(plan, participation=EVERYBODY) if plan.method.placement.pooled else plan


def model_here(model: Model, materials: RunData) -> Model:
    """Return a model of all users as one of the users whose data is on this machine."""
    return model if materials.here is None else model.only(materials.here)


def users_and_trainers(kind: Kind, materials: RunData, method: Method) -> tuple[Sequence[AnyUser], Sequence[AnyUser]]:
    """Return the users whose data is here, and who trains: the same, or the one who has the data of all."""
    users = as_sequence(materials.present)
    if not method.placement.pooled:
        return users, users
    if materials.unread:
        return users, [lazy_user(kind.user, "everyone", lambda: kind.pooled(users))]
    return users, [kind.pooled(users)]


def count_trainers(materials: RunData, method: Method) -> int:
    """How many train, here and elsewhere."""
    return 1 if method.placement.pooled else len(materials.users)


class _LazyUser:
    """Fields that nobody has filled in are read, all at once."""

    _read: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:  # asked only for what is not there
        if name not in ("train", "valid", "test"):
            raise AttributeError(name)
        read = self._read()
        vars(self).update({split: getattr(read, split) for split in ("train", "valid", "test")})
        return vars(self)[name]


def lazy_user(kind: type, name: str, read: Callable[[], Any], *, cluster: int | None = None) -> Any:
    """A user of some type of whom the name, and the true cluster if any, is known without reading."""
    user = object.__new__(type(f"Later{kind.__name__}", (_LazyUser, kind), {}))
    vars(user).update(name=name, _read=read, cluster=cluster)
    return user


_LAST = "text"
"""Asked after all others: paths and tables may be of a more particular kind."""


def section_for(users: Mapping[str, object], options: Mapping[str, Any]) -> str:
    """The ``data.kind`` of users who are handed over by their names: that of the section's options, or one that takes
    them all.

    Raises:
        DataError: nobody, a name that cannot be one, data that no kind takes, or users of several kinds.
        PluginError: the kind that is wanted cannot be used.
    """
    if not isinstance(users, Mapping) or not users:
        raise DataError(f"users: got {_described(users)}; allowed: a mapping of names to data, as {{'ada': [...]}}")
    if problem := name_problem(name if isinstance(name, str) else "" for name in users):
        raise DataError(f"users: {problem}")
    offered = dict(_kinds(options.get("kind")))
    found = {
        name: next((key for key, kind in offered.items() if kind.takes(data, options)), None)
        for name, data in users.items()
    }
    for name, key in found.items():
        if key is None:
            allowed = "; ".join(f"{kind.name}: {kind.handed}" for kind in offered.values() if kind.handed)
            raise DataError(f"users: {name!r} is {_described(users[name])}; allowed: {allowed}")
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {key}" for name, key in _one_of_each(found))
        raise DataError(f"users: all must have one kind of data; {told}")
    return next(key for key in found.values() if key)


def _kinds(wanted: str | None) -> Iterator[tuple[str, Kind]]:
    """The kind that is wanted, or all that can be used, by the ``kind`` of their sections."""
    if wanted is not None:
        yield wanted, load_object(KINDS[wanted].implementation)
        return
    for key in sorted(KINDS, key=lambda key: key == _LAST):
        with suppress(PluginError):
            yield key, load_object(KINDS[key].implementation)


def _one_of_each(found: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    firsts: dict[str | None, str] = {}
    for name, key in found.items():
        firsts.setdefault(key, name)
    return [(name, key) for key, name in firsts.items()]


def _described(data: object) -> str:
    """What somebody has handed over, in a few words."""
    kind = type(data).__name__
    if columns := getattr(data, "column_names", None):
        return f"{kind} with {', '.join(map(str, columns)):.100}"
    if isinstance(data, Mapping):
        return f"{kind} with {', '.join(map(str, data)):.100}" if data else f"an empty {kind}"
    if isinstance(data, list | tuple):
        return f"{kind} of {_described(data[0])}" if data else f"an empty {kind}"
    return kind


COMPILE_FROM, OVERHEAD = 5e12, 8e6
"""``compile: auto`` compiles from this many training tokens times base parameters on: below, it takes longer than it
saves. Compiling takes some tens of seconds whatever the model; SmolLM2-135M gets there with 35,000 tokens. What
a token takes of any model, and compiled code saves most of, counts as ``OVERHEAD`` parameters: stories260K gets there
with 610,000."""

NETS = "net:"
"""How a recipe's ``base`` names a net, as "net:mlp"."""

ADAPTOR_SETS = "adaptor sets"

_FOR_NETS = "nets are for users with samples (data.kind: samples)"


def check_on_language(recipe: Recipe, method: Method) -> None:
    """Whether the method and the base are for users of a language model.

    Raises:
        RecipeError: they are not.
    """
    if recipe.base.startswith(NETS):
        raise RecipeError(f"base: got {recipe.base!r} for text; allowed: a language model; {_FOR_NETS}")
    if why := method.unfit_for_language:
        raise RecipeError(f"method {method.name}: {why}; {_FOR_NETS}")
    if (mixture := method.placement.mixture) is None or mixture.trains_independently:
        return
    if mixture.optimal and not recipe.data.cluster_numbers:
        raise RecipeError(f"method {method.name}: {NEEDS_CLUSTERS}")
    if mixture.optimal and mixture.clusters < (true := len(set(recipe.data.cluster_numbers.values()))):
        raise RecipeError(
            f"method {method.name}: clusters is {mixture.clusters}; allowed: from {true}, as data.clusters"
        )
    if mixture.centre:
        raise RecipeError(f"method {method.name}: centre moves a mean into the base, which is frozen; leave it out")
    if not isinstance(rank := recipe.adapters.rank, int):
        raise RecipeError(f"method {method.name}: adapters.rank is {rank}; components have one rank for all users")


def language_model(recipe: Recipe, base: Base, method: Method, trainers: int, tokens: int) -> Model:
    """The base as the method trains it, for so many trainers and training tokens."""
    mixture = method.placement.mixture
    if mixture is not None and not mixture.trains_independently:
        return mix_base(recipe, base, method, trainers)
    return adapt_base(recipe, base, method, trainers, tokens)


def adapt_base(recipe: Recipe, base: Base, method: Method, trainers: int, tokens: int) -> AdaptedModel | EnsembleModel:
    """The base with the adapters that the recipe and the method ask for, for so many trainers and training tokens.

    Whole models whose predictions are mixed have generalists for experts, as many as the mixture says.
    """
    settings, mixture = recipe.adapters, method.placement.mixture
    if method.placement.pooled and not isinstance(settings.rank, int):  # the one trainer can afford what anybody can
        settings = settings.model_copy(update={"rank": max(settings.rank)})
    specialists = method.placement.specialists_of(trainers)
    counts = ExpertCounts(generalists=method.placement.generalists, specialists=specialists)
    if mixture is not None:
        counts = ExpertCounts(generalists=mixture.experts, specialists=(0,) * trainers)
    compiled = recipe.runtime.compile
    if compiled == "auto":
        compiled = method.trains and tokens * (base.model.num_parameters() + OVERHEAD) >= COMPILE_FROM
    placement = method.placement
    model = adapt(
        base,
        settings,
        counts,
        routed=placement.routed,
        gating=placement.gating,
        compiled=bool(compiled),
        residual=placement.residual,
        checkpointed=recipe.runtime.gradient_checkpointing,
    )
    for name in recipe.runtime.gpu:
        from comingle.models.gpu import recorded, with_triton

        model = {"graphs": recorded, "triton": with_triton}[name](model)
    if mixture is None:
        return model
    return ensemble(model, mixture, generalists=method.placement.generalists, specialists=max(specialists))


def mix_base(recipe: Recipe, base: Base, method: Method, users: int) -> MixedLanguageModel:
    """A frozen language model with the method's mixture of adaptors, of the rank and alpha that LoRA has elsewhere.

    Raises:
        RecipeError: a mixture of whole models, or ranks of each user's own.
    """
    check_on_language(recipe, method)
    _check_plain(recipe, method)
    mixture, section = method.placement.mixture, recipe.adapters
    assert mixture is not None
    assert isinstance(section.rank, int)
    alpha = lora_scale(section.alpha, section.rank)
    size = adaptor_size(backbone(base.model), rank=section.rank, bias=False, norm=False)
    require_room(f"method {method.name}", mixture.clusters, size, ADAPTOR_SETS)
    return mix_language_model(base, mixture, users=users, rank=section.rank, alpha=alpha)


def _check_plain(recipe: Recipe, method: Method) -> None:
    for key, found in {
        "quantise": recipe.quantise != "none",
        "runtime.gradient_checkpointing": recipe.runtime.gradient_checkpointing,
        "runtime.gpu": recipe.runtime.gpu,
    }.items():
        if found:
            raise RecipeError(f"{key}: method {method.name} wraps every linear by itself; allowed: methods of LoRAs")


def __getattr__(name: str) -> Any:
    if name != "Materials":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.training.kinds.base.Materials is now RunData", DeprecationWarning, stacklevel=2)
    return RunData


def check_recipe(recipe: Recipe) -> Method:
    """Check that the parts of a recipe can be used together, and return its method; reads no data.

    The kind of data, the privacy mechanisms and the aggregation rule are asked in turn; each checks only what it knows.

    Raises:
        RecipeError: The method does not exist or has a wrong setting, or parts do not fit; it has all problems.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    run_checks(
        partial(kind_of(recipe).check, recipe, method),
        partial(check_supported, method, recipe),
        partial(check_used, recipe),
        partial(check_trackers, recipe.runtime.track),
    )
    return method
