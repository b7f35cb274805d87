"""Kinds of data: text, conversations and samples.

A kind has a section of the recipe, a :class:`Kind` and a batch source. Other modules do not depend on which kind it is.
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
from comingle.config.settings import ALL_USERS, KINDS, values_in
from comingle.data.populations import UserCollection, as_users
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
from comingle.training.events import check_trackers
from comingle.training.plan import check_normalisation, check_start
from comingle.training.settings import RunPlan
from comingle.training.state import NEEDS_CLUSTERS
from comingle.utils.errors import DataError, PluginError, RecipeError, run_checks
from comingle.utils.names import name_problem
from comingle.utils.records import JsonObject
from comingle.utils.registry import load_object
from comingle.utils.trees import Tree, digest_split

logger = logging.getLogger("comingle")

LoadBase = Callable[[], Base]
"""Loads the base model on first use."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The base model and the users of a run, or of all runs of a comparison."""

    kind: Kind
    base: Base | None
    users: UserCollection[AnyUser]
    """All users: each has a name, and ``train``, ``valid`` and ``test`` with a length."""
    texts: tuple[UserText, ...] = ()
    """Documents of all users, if the kind has documents."""
    common: Any = None
    """Data that all users have in common besides the base model: a task."""
    unread: bool = False
    """Whether users' data is read on demand, as by :mod:`comingle.runs.api`."""
    here: Sequence[int] | None = None
    """Numbers of the users whose data is on this machine, if others are elsewhere; None for all."""
    is_shard: bool = False
    """Whether the other users are in other processes of this run, which has checked the data of all together."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Users that ``data.on_small_user: skip`` left out, with the data that they lack."""
    skipped_rows: int = 0
    """Number of rows that ``data.on_bad_row`` left out."""

    @cached_property
    def digests(self) -> dict[str, dict[str, str]]:
        """Digest of each split of the users on this machine, by user and split."""
        return {user.name: {split: digest_split(getattr(user, split)) for split in SPLITS} for user in self.present}

    def with_users(self, users: Iterable[AnyUser]) -> RunData:
        """Return a copy with other users, or with only some of the present ones.

        Args:
            users: The users of the copy.
        """
        users = as_users(users)
        common = self.common
        if hasattr(common, "users"):  # such as the population of a task with nets
            common = replace(common, users=users)
        names = set(users.names)
        texts = tuple(text for text in self.texts if text.name in names)
        return replace(self, users=users, common=common, texts=texts)

    @property
    def checks_validation_data(self) -> bool:
        """True if this process must check that users have the validation data that the run needs."""
        return not self.unread and not self.is_shard

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the users :attr:`present`."""
        return range(len(self.users)) if self.here is None else self.here

    @property
    def present(self) -> UserCollection[AnyUser]:
        """Users whose data is on this machine."""
        return self.users if self.here is None else self.users.select(self.here)

    @property
    def documents(self) -> str:
        """Plural noun for the entries of :attr:`texts`."""
        return "conversations" if self.kind.name == "conversations" else "documents"

    def overlaps(self) -> list[Overlap]:
        """Return the overlaps of users whose held-out documents also occur in their training text."""
        overlaps = [find_overlap(text) for text in self.texts]
        return [overlap for overlap in overlaps if overlap.total]


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Request of a run to its kind of data: the users of a recipe, or those that a program passes.

    Args:
        recipe: The recipe.
        load_base: Loads the base model, if the kind needs it.
        validates: Whether each user needs validation data.
        given: Data of the users by name, if a program passes it.
        net: Makes a net, if a program passes one.
        loss: Loss of each sample, if a program passes one.
    """

    recipe: Recipe
    load_base: LoadBase
    validates: bool
    given: Mapping[str, Any] | None = None
    net: Callable[..., nn.Module] | None = None
    loss: Callable[..., Tensor] | None = None


class Kind(ABC):
    """A kind of data."""

    name: str
    needs_base: bool = True
    """Whether users train adapters on a language model; otherwise nets, whose costs depend on the data."""
    accepted_data: str = ""
    """Description of the data of one user that a program may pass; empty if it may not."""
    user: type
    """Type of a user, with ``name``, ``train``, ``valid`` and ``test``."""

    # ---------------------------------------------------------------- before training

    @abstractmethod
    def check(self, recipe: Recipe, method: Method) -> None:
        """Check that the method of a recipe supports users of this kind; reads no data.

        Raises:
            RecipeError: The method does not support them.
        """

    def reader(self, request: DataRequest) -> StreamingReader[Any, Any] | None:
        """Return a reader that reads one user at a time; None for a kind that overrides :meth:`read`.

        Raises:
            RecipeError: A setting is wrong.
            DataError: The request has no data.
        """
        return None

    def read(self, request: DataRequest) -> RunData:
        """Return the data of all users in memory, and the base model.

        Raises:
            RecipeError: A setting is wrong, or a net or a loss that a program passes cannot be used.
            DataError: The data of a user cannot be used.
            BaseModelError: The base model cannot be used.
        """
        reader = self.reader(request)
        if reader is None:
            raise NotImplementedError(f"{self.name}: must override reader or read")
        return self._in_memory(reader)

    def _in_memory(self, reader: StreamingReader[Any, Any]) -> RunData:
        """Read all users with a reader, log its warnings, and return their data in memory.

        Args:
            reader: Reads one user at a time and encodes its data.
        """
        skipped: dict[str, str] = {}  # the reason, by user

        def record_skipped(name: str, reason: str) -> None:
            skipped[name] = reason

        reader.on_skip = record_skipped
        rows_of_users: Iterable[Any] = reader.read(ListedRows())
        if self.needs_base:
            # Read all rows before the base model is loaded to encode them: rows fail more often.
            rows_of_users = list(rows_of_users)
        users: list[Any] = []
        texts: list[UserText] = []
        for rows, user in reader.stream(rows_of_users):
            users.append(user)
            text = reader.text(rows)
            if text is not None:  # the kind has documents
                texts.append(text)
        totals, warning_lines = reader.summary()
        for line in warning_lines:
            logger.warning("%s", line)
        collection = as_users(users)
        return RunData(
            kind=self,
            base=reader.base,
            users=collection,
            texts=tuple(texts),
            common=reader.common(collection, totals),
            skipped=skipped,
            skipped_rows=totals.get("skipped_rows", 0),
        )

    def accepts(self, data: object, options: Mapping[str, object]) -> bool:
        """Return whether a program may pass ``data`` as the data of one user of this kind.

        Args:
            data: Data of any type.
            options: Options of the recipe's section ``data``, such as names of columns.
        """
        return False

    @abstractmethod
    def model(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Model:
        """Return the model that all users of the run train; reads no data.

        Args:
            recipe: Settings of the run.
            run_data: Base model and users of the run.
            plan: Settings of the run, in the form that training uses.

        Raises:
            ComingleError: Settings and base model do not fit each other.
        """

    @abstractmethod
    def clients(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Clients:
        """Return the users on this machine, with the model that they train.

        Args:
            recipe: Settings of the run.
            run_data: Base model and users of the run.
            plan: Settings of the run, in the form that training uses.

        Raises:
            ComingleError: Settings, data and base model do not fit each other.
        """

    def pooled(self, users: Sequence[AnyUser]) -> AnyUser:
        """Return one user named "everyone" with the data of all users, for methods that train a single model."""
        raise NotImplementedError

    # ---------------------------------------------------------------- afterwards

    @abstractmethod
    def personal(self, name: str, model: Model, tensors: Tree, row: int) -> Personal:
        """Return the model of one user.

        Args:
            name: Name of the user.
            model: The model that all users train.
            tensors: Trained tensors of the user by name, ``(1, *shape)``.
            row: Number of the user's model among those of all users, for models that differ in rank or experts.
        """

    def with_inputs(self, personal: Personal, recipe: Recipe, settings: Mapping[str, Any]) -> Personal:
        """Return the model of a user, extended by settings for reading its inputs, such as the shape of images.

        This class returns the model unchanged; kinds whose models need such settings override the method.

        Args:
            personal: The model.
            recipe: Recipe of the run.
            settings: Settings of the kind that the run folder stores.
        """
        return personal

    def with_test_data(self, personal: Personal, test_data: Callable[[], Any]) -> Personal:
        """Return the model of a user, extended by a function that reads the test data on which to evaluate it.

        This class returns the model unchanged; kinds whose models can be evaluated override the method.

        Args:
            personal: The model.
            test_data: Reads the user's test data.
        """
        return personal

    def settings(self, run_data: RunData) -> JsonObject:
        """Return what a run folder stores besides names and digests, so that the run opens without its data."""
        return {}

    def reopened(
        self, base: Base | None, users: Sequence[AnyUser], settings: Mapping[str, Any], *, net: Any = None
    ) -> RunData:
        """Return the data of a finished run whose folder is opened; the data of users is read on demand.

        Args:
            base: The pretrained model, with its tokenizer if it has one.
            users: The users.
            settings: Result of :meth:`settings`, stored in the run folder.
            net: Function that returns a new net, if the caller passed one instead of a recipe's.
        """
        return RunData(kind=self, base=base, users=as_users(users), unread=True)

    # ---------------------------------------------------------------- counted without data

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of the users; reads as little data as possible.

        Raises:
            DataError: The names cannot be found out.
        """
        return tuple(recipe.data.names)

    def with_num_users(self, recipe: Recipe, users: int) -> Recipe:
        """Return the recipe with another number of users, to count the costs of nets; by default unchanged.

        Args:
            recipe: Settings of the run.
            users: Number of users.
        """
        return recipe

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Convert recipes of several methods to text recipes of the same cost, to count costs in tokens.

        By default the recipes are returned unchanged.

        Args:
            recipes: Recipes with the same data.
            users: Number of users, if it is given; then their data need not be readable.

        Returns:
            The recipes, the names of users that would be left out, and a note for the user on how costs are counted.

        Raises:
            DataError: A run would refuse data on this machine.
        """
        return list(recipes), set(), ""


def kind_of(recipe: Recipe) -> Kind:
    """Return the kind of data of a recipe (text, conversations or samples), which knows how to read and train on it."""
    return load_object(recipe.data.implementation)


def with_full_participation(plan: RunPlan) -> RunPlan:
    """Return the plan, in which every round has all participants if the method trains one model on all users' data.

    That single trainer cannot be sampled; other methods keep their participation.
    """
    return replace(plan, participation=ALL_USERS) if plan.method.placement.pooled else plan


def model_here(model: Model, run_data: RunData) -> Model:
    """Return the model restricted to the users whose data is on this machine, with only their ranks and experts.

    Args:
        model: The model of all users of the run.
        run_data: Users of the run; ``run_data.here`` are the numbers of those on this machine, None for all.
    """
    return model if run_data.here is None else model.only(run_data.here)


def users_and_trainers(
    kind: Kind, run_data: RunData, method: Method
) -> tuple[UserCollection[AnyUser], UserCollection[AnyUser]]:
    """Return the users on this machine, and the trainers: the owners of the models that are trained.

    In most methods each user is a trainer. A method that trains one model on pooled data has a single trainer, with
    the data of all users.

    Args:
        kind: Kind of the data.
        run_data: Users of the run.
        method: Method of the run.
    """
    users = run_data.present
    if not method.placement.pooled:
        return users, users
    if run_data.unread:
        lazy_everyone = lazy_user(kind.user, "everyone", lambda: kind.pooled(users))  # reads the users on first access
        return users, as_users([lazy_everyone])
    return users, as_users([kind.pooled(users)])


def count_trainers(run_data: RunData, method: Method) -> int:
    """Return the number of models that are trained in the whole run: one per user, or 1 if users' data is pooled."""
    return 1 if method.placement.pooled else len(run_data.users)


class _LazyUser:
    """User that reads all its splits when one of them is first accessed."""

    _read: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:
        """Read all splits and return one of them; Python calls this only for attributes that are not set yet."""
        splits = ("train", "valid", "test")
        if name not in splits:
            raise AttributeError(name)
        user = self._read()
        for split in splits:
            vars(self)[split] = getattr(user, split)
        return vars(self)[name]


def lazy_user(user_type: type, name: str, read: Callable[[], Any], *, cluster: int | None = None) -> Any:
    """Return a user whose data is read on first access, as an instance of ``user_type``.

    Args:
        user_type: Type of the user, such as ``UserSamples``.
        name: Name of the user.
        read: Reads the user.
        cluster: True cluster of the user, if there is one.
    """
    lazy_type = type(f"Later{user_type.__name__}", (_LazyUser, user_type), {})
    user = object.__new__(lazy_type)  # without the constructor, which takes data
    vars(user).update(name=name, _read=read, cluster=cluster)
    return user


_TRIED_LAST = "text"
"""Kind that is tried last, because paths and tables may belong to a more specific kind."""


def kind_of_users(users: Mapping[str, object], options: Mapping[str, Any]) -> str:
    """Return the kind of data that a program passes for its users, such as ``"samples"``.

    Args:
        users: Data by user name.
        options: Options of the recipe's section ``data``; a ``kind`` among them must accept every user's data.

    Raises:
        DataError: There are no users, a name is not allowed, no kind accepts a user's data, or users have several
            kinds.
        PluginError: The kind in the options does not exist or cannot be loaded.
    """
    if not isinstance(users, Mapping) or not users:
        raise DataError(
            f"users: got {_describe_data(users)}; allowed: a mapping of names to data, such as {{'ada': [...]}}"
        )
    names = [name if isinstance(name, str) else "" for name in users]  # an empty name is a problem
    if problem := name_problem(names):
        raise DataError(f"users: {problem}")
    candidates = dict(_candidate_kinds(options.get("kind")))
    first_user_of_kind: dict[str, str] = {}
    for name, data in users.items():
        kind_name = _first_accepting(candidates, data, options)
        if kind_name is None:
            described_kinds = [kind for kind in candidates.values() if kind.accepted_data]
            allowed = "; ".join(f"{kind.name}: {kind.accepted_data}" for kind in described_kinds)
            raise DataError(f"users: {name!r} is {_describe_data(data)}; allowed: {allowed}{_advice_on_splits(data)}")
        first_user_of_kind.setdefault(kind_name, name)
    if len(first_user_of_kind) > 1:
        examples = ", ".join(f"{name} has {kind_name}" for kind_name, name in first_user_of_kind.items())
        raise DataError(f"users: all must have the same kind of data; {examples}")
    return next(iter(first_user_of_kind))


def _first_accepting(candidates: Mapping[str, Kind], data: object, options: Mapping[str, Any]) -> str | None:
    """Return the name of the first kind that accepts a user's data; None if none does.

    Args:
        candidates: Kinds by name.
        data: Data of the user.
        options: Options of the recipe's section ``data``.
    """
    for name, kind in candidates.items():
        if kind.accepts(data, options):
            return name
    return None


def _candidate_kinds(chosen: str | None) -> Iterator[tuple[str, Kind]]:
    """Yield the kinds of data that users may have, each with its name in ``data.kind``.

    Args:
        chosen: The recipe's ``data.kind``, the only candidate; None for all kinds, with text as the last.
    """
    if chosen is not None:
        yield chosen, load_object(KINDS[chosen].implementation)
        return
    for name in (*sorted(KINDS.keys() - {_TRIED_LAST}), _TRIED_LAST):
        with suppress(PluginError):  # a kind of a plug-in that cannot be loaded
            yield name, load_object(KINDS[name].implementation)


def _advice_on_splits(data: object) -> str:
    """Return what to do with rows that name their split in a column, for errors; empty for other data.

    >>> _advice_on_splits([{"text": "a", "split": "train"}])
    "; to use the column 'split', pass {train: [...], valid: [...], test: [...]}"
    """
    first_row = data[0] if isinstance(data, list | tuple) and data else None
    columns_of_frame = getattr(data, "columns", None)  # of a pandas.DataFrame
    columns_of_table = getattr(data, "column_names", columns_of_frame)  # of a datasets.Dataset
    columns = first_row if isinstance(first_row, Mapping) else columns_of_table
    if not isinstance(columns, Iterable) or "split" not in list(columns):
        return ""
    return "; to use the column 'split', pass {train: [...], valid: [...], test: [...]}"


def _describe_data(data: object) -> str:
    """Return a short description of data that a program passes, for errors: its type, with column names or keys.

    >>> _describe_data([{"text": "a"}])
    'list of dict with text'
    """
    type_name = type(data).__name__
    if columns := getattr(data, "column_names", None):
        return f"{type_name} with {', '.join(map(str, columns)):.100}"
    if not isinstance(data, Mapping | list | tuple):
        return type_name
    if not data:
        return f"an empty {type_name}"
    if isinstance(data, Mapping):
        return f"{type_name} with {', '.join(map(str, data)):.100}"
    return f"{type_name} of {_describe_data(data[0])}"


MIN_COST_TO_COMPILE, OVERHEAD_PER_TOKEN = 5e12, 8e6
"""Thresholds of ``runtime.compile: auto`` for language models.

The model is compiled if training tokens times (base parameters + overhead) reach the minimum; below that, compiling
takes longer than it saves. Compiling takes tens of seconds for every model. The overhead is the cost per token that
does not depend on the size of the model, and most of which compiled code saves. SmolLM2-135M reaches the
threshold with 35,000 tokens, stories260K with 610,000."""

NETS = "net:"
"""Prefix of nets in the ``base`` of a recipe, as in "net:mlp"."""

ADAPTOR_SETS = "adaptor sets"
"""Name of the components of a mixture of adaptors, for the error if they do not fit into memory."""

_FOR_NETS = "nets are for users with samples (data.kind: samples)"


def check_on_language(recipe: Recipe, method: Method) -> None:
    """Check that the method and the base of a recipe support users of a language model.

    Raises:
        RecipeError: The base is a net, the method does not support language models, or its mixture of adaptors does not
            fit the recipe's clusters or LoRA ranks.
    """
    if recipe.base.startswith(NETS):
        raise RecipeError(f"base: got {recipe.base!r} for text; allowed: a language model; {_FOR_NETS}")
    if why := method.unfit_for_language:
        raise RecipeError(f"method {method.name}: {why}; {_FOR_NETS}")
    mixture = method.placement.mixture
    if mixture is None or mixture.trains_independently:  # no mixture of adaptors
        return
    num_true_clusters = len(set(recipe.data.cluster_numbers.values()))
    assigns_true_clusters = mixture.optimal
    if assigns_true_clusters and not num_true_clusters:
        raise RecipeError(f"method {method.name}: {NEEDS_CLUSTERS}")
    if assigns_true_clusters and mixture.clusters < num_true_clusters:
        raise RecipeError(
            f"method {method.name}: clusters is {mixture.clusters}; allowed: at least {num_true_clusters}, as in "
            "data.clusters"
        )
    if mixture.centre:
        raise RecipeError(f"method {method.name}: centre moves a mean into the base, which is frozen; leave it out")
    if not isinstance(recipe.adapters.rank, int):
        raise RecipeError(
            f"method {method.name}: adapters.rank is {recipe.adapters.rank}; allowed: one rank for all users"
        )


def language_model(recipe: Recipe, base: Base, method: Method, num_trainers: int, num_tokens: int) -> Model:
    """Return the base model with the adapters or the mixture that the method trains.

    Args:
        recipe: Settings of the run.
        base: The pretrained model, with its tokenizer if it has one.
        method: Method of the run.
        num_trainers: Number of trainers.
        num_tokens: Number of training tokens of the run, to decide whether to compile.
    """
    mixture = method.placement.mixture
    mixes_adaptors_in_layers = mixture is not None and not mixture.trains_independently
    if mixes_adaptors_in_layers:
        return mix_base(recipe, base, method, num_trainers)
    return adapt_base(recipe, base, method, num_trainers, num_tokens)


def adapt_base(
    recipe: Recipe, base: Base, method: Method, num_trainers: int, num_tokens: int
) -> AdaptedModel | EnsembleModel:
    """Return the frozen base model with trainable LoRA adapters, as recipe and method require.

    An adapted layer has one or several experts: generalists, which users share, and specialists, which are local. If
    the method mixes whole models, each of them is an adapter, represented as an expert.

    Args:
        recipe: The recipe, with the adapters' rank and settings of the runtime, such as compilation and GPU kernels.
        base: The pretrained model, with its tokenizer if it has one.
        method: Method of the run.
        num_trainers: Number of users that own a model; 1 if the data of all users is pooled.
        num_tokens: Number of training tokens of the run, to decide whether to compile.
    """
    settings = recipe.adapters
    placement = method.placement
    mixture = placement.mixture
    if placement.pooled and not isinstance(settings.rank, int):  # the one trainer has the largest rank
        settings = settings.model_copy(update={"rank": max(values_in(settings.rank))})
    specialists = placement.specialists_of(num_trainers)
    if mixture is None:
        counts = ExpertCounts(generalists=placement.generalists, specialists=specialists)
    else:  # the adapters of all models of the mixture, in one layout, with no specialists
        counts = ExpertCounts(generalists=mixture.experts, specialists=(0,) * num_trainers)
    native_code = recipe.runtime.native_code
    model = adapt(
        base,
        settings,
        counts,
        routed=placement.routed,
        gating=placement.gating,
        compiled=_should_compile(recipe, base, method, num_tokens),
        native_code=None if native_code == "auto" else native_code,
        residual=placement.residual,
        middle=placement.middle,
        checkpointed=recipe.runtime.gradient_checkpointing,
    )
    for name in recipe.runtime.gpu:
        from comingle.models.gpu import recorded, with_triton

        make_faster = {"graphs": recorded, "triton": with_triton}[name]  # CUDA graphs, Triton kernels
        model = make_faster(model)
    if mixture is None:
        return model
    return ensemble(model, mixture, generalists=placement.generalists, specialists=max(specialists))


def _should_compile(recipe: Recipe, base: Base, method: Method, num_tokens: int) -> bool:
    """Return ``runtime.compile``, with "auto" resolved: whether compiling saves more time than it takes.

    Args:
        recipe: Settings of the run.
        base: The pretrained model, with its tokenizer if it has one.
        method: Method of the run.
        num_tokens: Number of training tokens of the run.
    """
    if recipe.runtime.compile != "auto":
        return bool(recipe.runtime.compile)
    cost_of_training = num_tokens * (base.model.num_parameters() + OVERHEAD_PER_TOKEN)
    return method.trains and cost_of_training >= MIN_COST_TO_COMPILE


def mix_base(recipe: Recipe, base: Base, method: Method, num_trainers: int) -> MixedLanguageModel:
    """Return a frozen language model with the method's mixture of adaptors in every linear layer.

    The adaptors have the rank and scale that the recipe sets for LoRA (section ``adapters``).

    Args:
        recipe: Settings of the run.
        base: The pretrained model, with its tokenizer if it has one.
        method: Method of the run.
        num_trainers: Number of trainers.

    Raises:
        RecipeError: The method or a setting does not support adaptors in a language model, such as users with
            different ranks.
    """
    check_on_language(recipe, method)
    _check_lora_settings_unused(recipe, method)
    mixture = method.placement.mixture
    rank = recipe.adapters.rank
    assert mixture is not None
    assert isinstance(rank, int)
    scale = lora_scale(recipe.adapters.alpha, rank)
    # Only linear layers get adaptors; biases and norms of the base stay frozen.
    size = adaptor_size(backbone(base.model), rank=rank, bias=False, norm=False)
    require_room(f"method {method.name}", mixture.clusters, size, ADAPTOR_SETS)
    # This ``alpha`` multiplies the adaptors' outputs as it is; that of the recipe is divided by the root of the rank.
    return mix_language_model(base, mixture, users=num_trainers, rank=rank, alpha=scale)


def _check_lora_settings_unused(recipe: Recipe, method: Method) -> None:
    """Check that a recipe has no setting that only LoRA adapters support, for methods with a mixture of adaptors.

    Raises:
        RecipeError: The recipe has a setting for LoRA adapters.
    """
    lora_settings = {
        "quantise": recipe.quantise != "none",
        "runtime.gradient_checkpointing": recipe.runtime.gradient_checkpointing,
        "runtime.gpu": bool(recipe.runtime.gpu),
    }
    for key, is_set in lora_settings.items():
        if is_set:
            raise RecipeError(
                f"{key}: method {method.name} wraps every linear layer itself; allowed: with methods that train LoRA"
            )


def __getattr__(name: str) -> Any:
    """Return :class:`RunData` under its former name ``Materials``, with a warning."""
    if name != "Materials":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.training.kinds.base.Materials is now RunData", DeprecationWarning, stacklevel=2)
    return RunData


def check_recipe(recipe: Recipe) -> Method:
    """Check that the parts of a recipe can be used together, and return its method; reads no data.

    Raises:
        RecipeError: The method does not exist or has a wrong setting, or parts do not fit; lists all problems.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    try:
        run_checks(
            partial(kind_of(recipe).check, recipe, method),
            partial(check_supported, method, recipe),
            partial(check_normalisation, recipe, method),
            partial(check_start, recipe, method),
            partial(check_used, recipe),
            partial(check_trackers, recipe.runtime.track),
        )
    except RecipeError as error:
        names_method = "method" in recipe.model_fields_set
        if names_method:
            raise
        advice = "; it is the default, as the recipe has no method: set method, for example method: fedavg"
        problems = []
        for problem in error.problems:
            is_about_method = problem.startswith(f"method {method.name}: ")
            problems.append(problem + advice if is_about_method else problem)
        raise RecipeError(*problems) from None
    return method
