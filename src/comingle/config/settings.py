"""The section ``data``, and settings of adapters, optimizers, privacy and aggregation, as the engine uses them.

Recipes take their defaults from here. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    cast,
    runtime_checkable,
)

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from comingle.protocol import Format
from comingle.utils import registry
from comingle.utils.errors import LARGEST, PluginError, RecipeError, did_you_mean, list_names
from comingle.utils.names import name_problem
from comingle.utils.registry import Registry, load_object

if TYPE_CHECKING:
    from comingle.privacy.mechanisms import DifferentialPrivacy


Count = Annotated[int, Field(ge=1, le=10**15, strict=True)]
"""A positive count. The upper bound catches typing errors; no tensor has more elements."""
Steps = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
"""Number of consecutive steps."""
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Source = Annotated[str, Field(min_length=1)]
TokenLimit = Count | dict[str, Count] | None
"""Number of tokens to keep of a split: one number for all users, or a number per named user."""

V = TypeVar("V")


def values_in_order(
    values: Mapping[str, V], names: Sequence[str], where: str, *, ignored: Collection[str] = ()
) -> list[V]:
    """Return users' values in the order of the users.

    Args:
        values: A value for each user, by name.
        names: Names of the users, in order.
        where: The recipe's key, for the error.
        ignored: Names of users whose values are left out.

    Raises:
        RecipeError: The mapping names an unknown user, or lacks one.
    """
    allowed = {*names, *ignored}
    for name in values:
        if name not in allowed:
            raise RecipeError(f"{where}: no user {name!r}; allowed: {list_names(names)}.{did_you_mean(name, names)}")
    missing = [name for name in names if name not in values]
    if missing:
        raise RecipeError(f"{where}: no value for {list_names(missing)}; give one for each user, or one for all")
    return [values[name] for name in names]


def values_in(setting: V | Sequence[V] | Mapping[str, V]) -> list[V]:
    """Return as a list the values of a setting that may differ between users, such as ``training.batch_size``.

    Args:
        setting: One value for all users, a list with one for each, or a mapping by user.
    """
    if isinstance(setting, Mapping):
        return list(setting.values())
    if isinstance(setting, list | tuple):
        return list(setting)
    return [cast(V, setting)]


def largest(values: Sequence[V | None]) -> V | None:
    """Return the largest of the users' values of a setting; None, which is no limit, is larger than any number."""
    if None in values:
        return None
    return max(cast(Any, values))


class Section(BaseModel):
    """Base class of the sections of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def expand_plain_name(section: object, *, key: str = "name") -> object:
    """Return ``{key: "median"}`` for a section that is given as the plain name "median"; return others unchanged."""
    return {key: section} if isinstance(section, str) else section


def number_in(value: object) -> object:
    """Convert text such as "1e-3", which YAML 1.1 reads as text, to a number; return other values unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


PATHS = ("path", "train", "valid", "test")
"""Keys whose values are paths of a user's data."""

PathResolver = Callable[[Any], Any]
"""Function that makes a relative path, or a list of them, absolute if it exists beside the recipe."""


class DataSection(Section):
    """Base class of the section ``data`` of each kind."""

    kind: Any  # a literal in each subclass
    """``text``, ``conversations``, ``samples``, ``questions``, ``task``, or a plug-in's kind; by default the kind that
    has the keys given.
    """
    given: Literal[True] | None = None
    """A Python program passes the users, and nothing is read from here."""
    seed: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Determines splits, held-out mixtures, and the samples and partitions of tasks and questions, so that ``seed``
    changes only the training; by default ``seed`` determines both.
    """
    replay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """With ``continue_from``: the share of training data that is drawn from users' earlier data, if it differs and the
    files of the earlier runs are still there.
    """

    label: ClassVar[str]
    """Name of the data in messages."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Keys that select this kind if a recipe does not name one."""
    implementation: ClassVar[str]
    """Import path ``package.module:NAME`` of the kind, which reads the data, trains on it and scores it."""
    unread: ClassVar[Mapping[str, str]] = {}
    """Settings that are not used for this kind, each with the alternative."""
    weightings: ClassVar[tuple[str, ...]] = ("uniform", "samples")
    """Allowed values of ``training.weighting``."""
    accepted: ClassVar[Mapping[str, str]] = {}
    """Accepted values of keys with several types, for messages; pydantic names only one type."""
    has_base: ClassVar[bool] = False
    """True if the data has a default model, so that a recipe need not name a base."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys_of_other_kinds(cls, content: object) -> object:
        """Refuse keys of ``data`` that only other kinds have, and name what to use instead for this kind.

        The content is returned unchanged. Keys that no kind has are refused later, by pydantic.
        """
        if not isinstance(content, Mapping):
            return content
        for key in content:
            instead = cls.unread.get(f"data.{key}")
            if key not in cls.model_fields and instead:
                raise ValueError(f"{key} is not used for {cls.label}; {instead}")
        return content

    @property
    def names(self) -> list[str]:
        """Names of the users that the recipe lists; empty for kinds of data whose users are found or made elsewhere."""
        return []

    @property
    def cluster_numbers(self) -> dict[str, int]:
        """The index of each user's true cluster, by user name; empty unless the recipe assigns users to clusters.

        Kinds of data whose recipes can do so override this.
        """
        return {}

    @property
    def in_distribution(self) -> bool:
        """True if users are tested on data from their own training distribution, as with most kinds of data.

        If not, as with text whose held-out documents are a mixture of all users' text, it is overridden.
        """
        return True

    def resolve_paths(self, resolve: PathResolver) -> dict[str, object]:
        """Return the keys of ``data`` that contain paths, with each relative path made absolute.

        The caller replaces these keys in the content of ``data``. The result is empty for a kind without paths.

        Args:
            resolve: Makes a path absolute if it exists beside the recipe's file, and returns other text unchanged.
        """
        return {}


class UserFiles(Section):
    """Data of one user: one source to be split, or one source per split."""

    path: Source | None = None
    """One source, to be split; this or ``train``."""
    train: Source | None = None
    """Source of the training text."""
    valid: Source | None = None
    """Source of the validation text; by default the fraction ``data.split.valid`` of train."""
    test: Source | None = None
    """Source of the test text; needed with ``train``."""

    @model_validator(mode="after")
    def _check_sources(self) -> UserFiles:
        """Check that a user has either one source to be split (``path``), or sources for train and test.

        A source for valid is optional, besides those for train and test.
        """
        has_path, has_train = self.path is not None, self.train is not None
        has_held_out = bool(self.valid or self.test)
        has_both_or_neither = has_path == has_train
        if has_both_or_neither or (has_path and has_held_out):
            raise ValueError("give either path alone, or train and test (and valid)")
        if has_train and self.test is None:
            raise ValueError("train without test; give test too")
        return self


Files = TypeVar("Files", bound=UserFiles)


class OwnUsersSection(DataSection, Generic[Files]):
    """Base class of sections that name each user's files; users may be assigned to true clusters.

    ``Files`` is the type of a user's entry.
    """

    clusters: dict[str, str] | None = None
    """The true cluster of each user, as ``{ada: a, ben: a, cem: b}``, for methods that know it (``floral-optimal``,
    ``ensemble-optimal``) and to score learned mixtures; not for tasks and questions.
    """
    users: dict[str, Files] | None = None
    """Each user's data: a path, or a section."""

    @field_validator("users", mode="before")
    @classmethod
    def _wrap_plain_paths(cls, users: object) -> object:
        """Convert a user's plain path to a mapping with the key ``path``, and names to text; check the names."""
        if not isinstance(users, Mapping):
            return users
        if problem := name_problem(str(name) for name in users):
            raise ValueError(problem)
        wrapped: dict[str, object] = {}
        for name, path_or_entry in users.items():
            wrapped[str(name)] = {"path": path_or_entry} if isinstance(path_or_entry, str) else path_or_entry
        return wrapped

    @field_validator("clusters", mode="before")
    @classmethod
    def _convert_to_text(cls, clusters: object) -> object:
        """Convert names of users, and labels of clusters, to text if YAML has read them as whole numbers."""
        if not isinstance(clusters, Mapping):
            return clusters
        converted: dict[str, object] = {}
        for name, label in clusters.items():
            is_whole_number = type(label) is int  # not a bool
            converted[str(name)] = str(label) if is_whole_number else label
        return converted

    @property
    def cluster_numbers(self) -> dict[str, int]:
        """The number of each named user's cluster, from 0, in the alphabetical order of the labels."""
        clusters = self.clusters or {}
        labels = sorted(set(clusters.values()))
        return {name: labels.index(label) for name, label in clusters.items()}

    @property
    def names(self) -> list[str]:
        """Names of the users in the recipe; empty if the rows of a data set name the users."""
        return list(self.users or {})

    def resolve_paths(self, resolve: PathResolver) -> dict[str, object]:
        """Return the keys ``users`` and ``dataset``, as far as they are set, with each relative path made absolute.

        Args:
            resolve: Makes a path absolute if it exists beside the recipe's file, and returns other text unchanged.
        """
        content = self.model_dump(mode="json", exclude_unset=True, include={"users", "dataset"})
        users, dataset = content.get("users") or {}, content.get("dataset")
        mappings = list(users.values())
        if dataset:
            mappings.append(dataset)
        for mapping in mappings:  # with the key `path`, or with `train`, `valid` and `test`
            for key in PATHS:
                if mapping.get(key) is not None:
                    mapping[key] = resolve(mapping[key])
        return content


class SplitSection(Section):
    """Splits of a user's data: by fractions, or the source's own."""

    valid: Fraction = 0.1
    """Validation data, as a fraction of the characters or samples; with given splits that lack valid, the fraction of
    train that becomes valid.
    """
    test: Fraction = 0.1
    """Test data, as a fraction of the characters or samples."""
    stable: bool = False
    """Split in the order of the data, so that appending text or conversations never moves earlier ones between splits;
    ``seed`` has no effect. For files that grow from run to run (``continue_from``, ``server --continuous``).
    """
    given: bool = False
    """Use the data set's own splits; for ``data.dataset`` only."""
    train_name: str = "train"
    """The given split for training."""
    valid_name: str | None = None
    """The given split for validation."""
    test_name: str = "test"
    """The given split for testing."""


KINDS: registry.Registry[type[DataSection]] = registry.Registry(
    "comingle.kinds",
    {
        "text": "comingle.data.text.section:TextSection",
        "samples": "comingle.data.samples.section:SamplesSection",
        "conversations": "comingle.data.conversations.section:ConversationsSection",
    },
)
"""The section ``data`` of each kind."""


def section_of(content: Mapping[str, object]) -> type[DataSection]:
    """Return the section class for the content of a recipe's key ``data``.

    The key ``kind`` names the kind of data. If it is missing, the kind follows from the keys (``marks``) that only one
    kind has.

    Args:
        content: The content as read from YAML, before validation.

    Raises:
        ValueError: There is no kind of this name; or no kind is named, and the keys are those of no kind or of several.
    """
    kind = content.get("kind")
    if kind is not None:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"no kind {kind!r}.{KINDS.hint(str(kind))} Allowed: {', '.join(KINDS)}")
        return KINDS[kind]
    section_by_mark: dict[str, type[DataSection]] = {}
    for section in _importable_sections():
        section_by_mark.update(dict.fromkeys(section.marks, section))
    sections = {section for mark, section in section_by_mark.items() if content.get(mark) is not None}
    if len(sections) != 1:
        *other_marks, last_mark = section_by_mark
        raise ValueError(f"give one of {', '.join(other_marks)} and {last_mark}")
    (only_section,) = sections
    return only_section


def _importable_sections() -> Iterator[type[DataSection]]:
    """Yield the section class of each kind of data, except those of plug-ins that cannot be imported."""
    for kind in KINDS:
        with suppress(PluginError):
            yield KINDS[kind]


ON_LANGUAGE: Mapping[str, str] = {"floral": "adaptors on a language model use adapters.rank and adapters.alpha"}
"""Settings of nets that language models do not use."""

_TRAIN_ON_VALID = {"data.train_on_valid": "rounds are passes, which more training data would make longer"}

_LIMITS = ("data.max_train_tokens", "data.max_valid_tokens", "data.max_test_tokens")


def unread_local_steps(items: str) -> dict[str, str]:
    """Return the key ``training.local_steps``, with what recipes use instead if users train for whole epochs.

    The result goes into ``DataSection.unread``: the recipe keys that a kind of data does not use, each with the end of
    the error for recipes that set it.

    Args:
        items: Plural noun for a user's data: "samples" or "conversations".
    """
    return {"training.local_steps": f"training.local_epochs is the number of passes over a user's {items}"}


def unread_keys_of_text(*, limits: str | tuple[str, str, str], **instead: str) -> dict[str, str]:
    """Return the recipe keys that text has and another kind of data does not use, each with an explanation.

    The explanations are the errors for recipes that set such a key; the result goes into ``DataSection.unread`` of the
    kind. For example ``{"data.max_train_tokens": "samples have no tokens", ...}``.

    Args:
        limits: Why the token limits of train, valid and test are not used: one text for all, or one each.
        **instead: Why other keys of ``data`` are not used, such as ``held_out="all users have the same questions"``.
    """
    limit_texts = (limits, limits, limits) if isinstance(limits, str) else limits
    return {
        **_TRAIN_ON_VALID,
        **{f"data.{key}": text for key, text in instead.items()},
        **dict(zip(_LIMITS, limit_texts, strict=True)),
    }


@runtime_checkable
class Gating(Protocol):
    """Weighting of experts that a method defines, the same for all routers of a model; ``str`` describes it."""

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Any]:
        """Return the number of rows of a router's matrix, and the function that draws their initial values.

        The matrix has the shape ``(rows, width)``. With at most as many rows as experts, each row belongs to an expert,
        and a user has only the rows of its own experts. With fewer rows, the first experts have none: of 3 experts, 2
        rows belong to experts 1 and 2. With more rows than experts, rows belong to no expert, and each user has all of
        them.

        Args:
            experts: Number of experts.
            rank: LoRA rank of the experts.
            width: Width of the router's input.
        """
        ...

    def __call__(self, router: Any, products: Any, x: Any) -> Any:
        """Return gates ``(users, n, experts)`` that sum to one.

        Args:
            router: The router module.
            products: Product of each input with each row of the router's matrix, ``(users, n, rows)``.
            x: Inputs of the router for n tokens of each user, ``(users, n, width)``.
        """


Balance = Literal["none", "uniform", "generalist"]
"""Load that the balancing penalty aims at: none, equal for all experts, or one half on the generalist."""


RANK = 8
"""Default rank of the experts."""


class TargetsSection(Section):
    """Names of the linear layers to adapt, relative to a decoder layer, for a model family that comingle does not know.

    A routed MLP replaces the module ``mlp``. Where the decoder layer itself holds the MLP's linears (OPT), the mixture
    takes the place of ``up``, and the activation and ``down`` become identities.
    """

    attention: tuple[str, ...]
    """The attention's linear layers."""
    up: str
    """The MLP's first linear layer."""
    down: str
    """The MLP's last linear layer."""
    gate: str | None = None
    """The gate of a gated MLP."""
    mlp: str = ""
    """The module that holds exactly these MLP layers; empty if the decoder layer itself holds them."""
    activation: str | None = None
    """The MLP's activation, by transformers' name; by default from the model's configuration."""

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the name of each linear layer, such as ``("up", "fc1")``."""
        for name in self.attention:
            yield "attention", name
        for key in ("up", "down", "gate"):
            name = getattr(self, key)
            if name:
                yield key, name

    @property
    def names(self) -> set[str]:
        """Names of the linear layers that get adapters, in attention and MLP, such as "self_attn.q_proj"."""
        return {name for _key, name in self.named()}


class AdaptersSection(Section):
    """Shape of the adapters: LoRA rank and alpha, top-k of the router, how experts are mixed, load balancing.

    LoRAs of users with a smaller rank than others are padded and masked.
    """

    rank: Count | list[Count] | dict[str, Count] = RANK
    """Rank of every LoRA: one number, a mapping such as ``{ada: 8, ben: 2}``, or a list with one for each user in the
    recipe's order. A rank above the smaller side of a weight has no further effect and causes a warning; one above both
    sides of the largest weight together is refused.
    """
    alpha: Positive = 16.0
    """The scale of the LoRA is alpha / sqrt(rank)."""
    top_k: Count = 2
    """Experts of a token; at most those that its user has."""
    mix: Literal["output", "linear"] = "output"
    """``output`` mixes the outputs of whole MLPs, as the paper; ``linear`` mixes the LoRA terms in each linear layer,
    which is cheaper and another function.
    """
    balance: Balance = "generalist"
    """Load-balancing penalty; ``generalist`` (eq. 10) becomes ``uniform`` unless there is exactly one generalist."""
    targets: TargetsSection | None = None
    """Names of the linear layers in a decoder layer, for a family that comingle does not know."""
    start: str | list[str | None] | dict[str, str | None] | None = None
    """PEFT adapter from which all users' LoRAs start: its folder, or its name on the Hugging Face hub. A mapping such
    as ``{ada: FOLDER, ben: null}`` is for the LoRAs that the method leaves to each user.
    """


WORD_BITS = (32, 64)
"""Bit widths of the integers on which masks are uniform."""

LEAST_USERS_IN_SUM = 2
"""Least number of users in a sum; a sum over one user would reveal that upload."""


class SecureSection(Section):
    """Settings of secure aggregation: the server sees only the sum of the uploads.

    The threshold is above one half, so that a round has at most one sum.
    """

    threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.66
    """Fraction of a round's users that must respond for the round to have a sum; at least 2 users."""
    bits: Annotated[int, Field(ge=16, le=32, strict=True)] = 24
    """Bits of a number in an upload, including the sign."""
    range: Positive | None = None
    """Largest magnitude of an entry of a user's change; larger ones are cut. ``null`` is 8, and with noise it follows
    from the clip norm.
    """
    colluders: Annotated[int, Field(ge=0, le=10**6, strict=True)] = 0
    """Users that may reveal their noise to the server without weakening the bound."""

    def required_users(self, participants: int) -> int:
        """Return the least number of users whose uploads a round must sum, ``max(2, ceil(threshold * participants))``.

        Args:
            participants: Number of participants of the round.
        """
        rounding_error = 1e-9  # a product such as 3.0000000001 is 3, not to be rounded up to 4
        return max(LEAST_USERS_IN_SUM, math.ceil(self.threshold * participants - rounding_error))

    def word_bits(self, users: int) -> int:
        """Return the bit width of the integers that masked uploads consist of: 32, or 64 if sums need more.

        A sum of ``users`` integers of ``bits`` bits has at most ``bits + ceil(log2 users)`` bits. One more bit keeps
        sums within half of the range.

        Args:
            users: Largest number of uploads in a sum.
        """
        small_word, large_word = WORD_BITS
        needed_bits = self.bits + math.ceil(math.log2(max(users, 1))) + 1
        return small_word if needed_bits <= small_word else large_word


def no_sum_message(round_number: int, completed: str, required: int) -> str:
    """Return the one-line message for a round of secure aggregation that too few users completed for a sum.

    Args:
        round_number: Number of the round, from 1.
        completed: How many users completed which step: "1 of 3 users completed step 'mask'".
        required: Number of users that a sum requires.
    """
    return f"round {round_number}: {completed}; needed: {required}; the round ends without a sum"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms of a secure sum, which users and server agree on beforehand.

    Args:
        run: Name of the run.
        round: Number of the round, from 1.
        users: Names of the users selected for the round.
        expected: Number of participants of the round.
        threshold: Least number of users that a sum requires.
        word: Bit width of the integers of a masked upload, 32 or 64.
        entries: Number of integers of an upload: one per shared parameter, and one for the weight of a weighted mean.
    """

    run: str
    round: int
    users: tuple[str, ...]
    expected: int
    threshold: int
    word: int
    entries: int

    @property
    def digest(self) -> str:
        """Return a SHA-256 digest of all fields, which users mix into all keys of the sum.

        If a server gives users different terms, their masks do not cancel and the sum is useless.
        """
        content = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


ADAPTIVE = "adaptive"
KEY = "privacy.key"
"""Name of the file with the key of the noise."""
ACCOUNT = "privacy.json"
"""Name of the file with the releases of a run's users, in the run folder."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A privacy mechanism as recipes, costs and reports know it, without its implementation, which needs torch.

    Args:
        implementation: A subclass of ``comingle.privacy.mechanisms.DifferentialPrivacy``, or ``"package.module:NAME"``,
            which is imported on first use.
        protects: The unit of privacy: all data of a user, or each of its examples.
        noise_at: Where noise is added: by the server to its sum, by users to their uploads or local steps, or nowhere.
    """

    implementation: type[DifferentialPrivacy] | str
    protects: Literal["user", "example"] = "user"
    noise_at: Literal["server", "upload", "steps", "none"]

    def load(self) -> type[DifferentialPrivacy]:
        """Return the implementation."""
        return load_object(self.implementation) if isinstance(self.implementation, str) else self.implementation


_IMPLEMENTED = "comingle.privacy.mechanisms:"
MECHANISMS: Registry[Mechanism] = Registry(
    "comingle.mechanisms",
    {
        "central": Mechanism(implementation=_IMPLEMENTED + "Central", noise_at="server"),
        "local": Mechanism(implementation=_IMPLEMENTED + "Local", noise_at="upload"),
        "example": Mechanism(implementation=_IMPLEMENTED + "Example", noise_at="steps", protects="example"),
        "none": Mechanism(implementation=_IMPLEMENTED + "Unnoised", noise_at="none"),
    },
)
"""Privacy mechanisms by the value of ``privacy.mechanism``."""


def protects_examples(mechanism: str) -> bool:
    """Return whether a mechanism protects single examples; False for one that is not installed here."""
    return mechanism in MECHANISMS and MECHANISMS[mechanism].protects == "example"


class PrivacySection(Section):
    """Differential privacy: changing one user's data changes what others observe by at most (epsilon, delta).

    With the mechanism ``example`` (DP-SGD) each step on shared tensors uses a noised sum of clipped gradients. Without
    a noise multiplier each user then has its own, which depends on its number of examples.

    The adaptive clip norm follows a quantile of the users' norms (Andrew et al. 2021). With their values, which are
    the defaults, it grows at most tenfold in 23 rounds.
    """

    mechanism: str = "central"
    """Who adds the noise: the server to the mean (with ``secure_aggregation`` each user a part of it), each user to its
    upload, or each user to its steps, which protects single examples and not users; ``none`` is for
    ``secure_aggregation`` alone.
    """
    clip_norm: Positive | Literal["adaptive"] = 1.0
    """Largest L2 norm of a user's change, over all shared tensors (with ``example``: of an example's gradient);
    ``adaptive`` follows the users' norms (``central`` only).
    """
    noise_multiplier: Positive | None = None
    """Standard deviation of the noise in units of the clip norm; by default the noise with which the run spends
    ``epsilon``.
    """
    epsilon: Positive | None = None
    """The budget: a user takes part in no round that would exceed it; with ``continue_from`` that of all runs together.
    """
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Below 1 / number of users (with ``example``: of a user's examples)."""
    sampling: Literal["poisson", "fixed"] = "poisson"
    """Secret draw of participants: each user independently, or a fixed number (``central`` only)."""
    accountant: Literal["pld", "rdp"] = "pld"
    """Computes epsilon; always ``rdp`` for ``fixed`` and for epsilon above 200."""
    weight_cap: Count | None = None
    """With weighted means: the amount of data from which a user has full weight."""
    noise: Literal["secret", "reproducible"] = "secret"
    """Noise from a key that is drawn once and kept in ``privacy.key``, or, for simulations, from the seed."""
    first_clip_norm: Positive = 0.1
    """Adaptive clip norm of the first round."""
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Target share of users within the adaptive clip norm."""
    clip_rate: Positive = 0.2
    """Step size of the adaptive clip norm, on a logarithmic scale."""
    secure_aggregation: SecureSection | None = None
    """The server sees only sums of uploads."""

    def __hash__(self) -> int:
        """Return a hash of all values, the cache key of accountants."""
        return hash(tuple(self.__dict__.values()))

    @field_validator("mechanism", mode="before")
    @classmethod
    def _check_mechanism(cls, mechanism: object) -> object:
        """Check that there is a privacy mechanism of this name: a built-in one, or one of a plug-in."""
        if isinstance(mechanism, str) and mechanism in MECHANISMS:
            return mechanism
        # Worded like pydantic's error for a fixed list of allowed values.
        *others, last = map(repr, MECHANISMS)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")

    @property
    def noisy(self) -> bool:
        """True if noise is added, so that a privacy account is kept."""
        return self.noise_at != "none"

    @property
    def noise_at(self) -> str:
        """Where noise is added: by the ``server`` to its sum, users to an ``upload`` or to ``steps``, or ``none``."""
        return MECHANISMS[self.mechanism].noise_at

    @property
    def protects(self) -> str:
        """Unit of privacy: ``user`` or ``example``."""
        return MECHANISMS[self.mechanism].protects

    @property
    def multiplier(self) -> float:
        """The noise multiplier. It is known once a plan is made."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    @property
    def adaptive(self) -> bool:
        """True if the clip norm is adapted every round to a quantile of the users' norms (``clip_norm: adaptive``)."""
        return self.clip_norm == ADAPTIVE

    @property
    def first_bound(self) -> float:
        """The clip norm of the first round: the fixed norm, or the first one if ``clip_norm`` is ``adaptive``."""
        return self.first_clip_norm if isinstance(self.clip_norm, str) else self.clip_norm


Rule = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-bound", "bulyan"]


class AggregationSection(Section):
    """Aggregation rule of the server, which tolerates some hostile uploads."""

    rule: Rule = "mean"
    """Rule that combines uploads; ``aggregation: median`` is short for it."""
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Assumed share of hostile uploads in a round, rounded up to whole users; determines how many users a round needs.
    """
    bound: Positive | Literal["median"] = "median"
    """For ``norm-bound``: largest L2 norm of a user's change; ``median`` is the median of the round's norms."""

    @property
    def is_mean(self) -> bool:
        """True if the method's own weighted mean combines uploads, without a robust aggregation rule."""
        return self.rule == "mean"

    def hostile_among(self, users: int) -> int:
        """Return how many of ``users`` uploads are assumed to be hostile: the share ``hostile``, rounded up."""
        rounding_error = 1e-9  # a product such as 3.0000000001 is 3, not to be rounded up to 4
        return math.ceil(self.hostile * users - rounding_error)

    def enough(self, users: int) -> bool:
        """Return whether the rule's guarantee holds for a round with one upload from each of ``users`` users."""
        return users >= self.least_uploads(self.hostile_among(users))

    def least_uploads(self, hostile: int) -> int:
        """Return the least number of uploads in a round for which the rule's guarantee holds.

        With h hostile uploads it is ``2 h + 3`` for "krum" and "multi-krum" (Blanchard et al. 2017), ``4 h + 3`` for
        "bulyan" (El Mhamdi et al. 2018) and ``2 h + 1``, a majority of honest uploads, for the medians, "trimmed-mean"
        and a norm bound that is the median. "mean" and a fixed norm bound have no guarantee that depends on the number.

        Args:
            hostile: Number h of hostile uploads in the round.
        """
        has_fixed_bound = self.rule == "norm-bound" and self.bound != "median"
        if self.rule == "mean" or has_fixed_bound:
            return 1
        if self.rule in ("krum", "multi-krum"):
            return 2 * hostile + 3
        if self.rule == "bulyan":
            return 4 * hostile + 3
        return 2 * hostile + 1


ALL_USERS = 1.0
"""Participation of all users, as a fraction of the population."""

AUTO: Final = "auto"

SHORTEST = 5
"""Least number of rounds between two evaluations if the recipe says "auto"; each evaluation costs a download."""

MEMORY: Final = "memory"
"""Default store of users' tensors."""


class OptimizerSection(Section):
    """Optimiser and schedule. ``momentum`` is for SGD; ``betas`` and ``eps`` are for AdamW."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimiser."""
    learning_rate: Positive = 2e-3
    """The initial learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Schedule over all local steps of the run, without warm-up."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """End of the cosine, as a fraction of the learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's betas."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, for SGD too."""
    momentum: Fraction = 0.0
    """SGD's momentum."""
    clip_norm: Positive | None = None
    """Largest norm of a user's gradient; ``null`` does not clip."""

    @property
    def moments(self) -> frozenset[str]:
        """Moments that the optimiser keeps: ``first``, ``second``."""
        if self.name == "adamw":
            return frozenset({"first", "second"})
        if self.momentum:  # of SGD
            return frozenset({"first"})
        return frozenset()

    @property
    def memoryless(self) -> bool:
        """True if a step changes each number of a tensor by its own gradient alone, as plain SGD does.

        Tensors can then be updated one by one. Moments need history, and clipping the norm of all gradients.
        """
        return not self.moments and self.clip_norm is None


class RouterSection(OptimizerSection):
    """Optimiser of routers: a constant learning rate by default."""

    learning_rate: Positive | Literal["auto"] = AUTO  # pyright: ignore[reportIncompatibleVariableOverride]
    """The initial learning rate; ``auto``: 0.002, or the method's own default."""
    schedule: Literal["cosine", "constant"] = "constant"
    """Schedule over all local steps of the run, without warm-up."""


EXPERTS_OPTIMIZER = OptimizerSection()


class TrainingSection(Section):
    """Amount of training, and the optimisers."""

    rounds: Steps = 20
    """Rounds: local steps, then one exchange."""
    local_steps: Steps | list[Steps] | dict[str, Steps] = 10
    """Local steps of a user in a round, for text: one number, a mapping such as ``{ada: 20, ben: 5}``, or a list in the
    recipe's order. Learning rates follow the largest number.
    """
    local_epochs: Steps = 1
    """Passes of a user over its samples or conversations in a round; not for text."""
    batch_size: Count | list[Count] | dict[str, Count] = 64
    """Sequences or samples of a user in one step: one number, or one for each user by name or as a list."""
    max_seconds_per_round: Positive | list[Positive | None] | dict[str, Positive | None] | None = None
    """Seconds of a user's local steps in a round, after which it stops and uploads what it has; it takes at least one
    step. One number, or one for each user by name or as a list; ``null``: no limit. Results then depend on speed.
    """
    normalise_steps: bool = False
    """Divide the change of each user by its number of local steps before the server's mean, as in FedNova, so that
    users that take more steps do not pull the mean towards their own optimum.
    """
    context: Annotated[int, Field(ge=2, le=10**15, strict=True)] = 128
    """Tokens of a sequence, at most those that the base supports."""
    experts: OptimizerSection = EXPERTS_OPTIMIZER
    """Optimiser of the LoRA, or of nets."""
    router: RouterSection = RouterSection()
    """Optimiser of the routers."""
    balance_weight: NotNegative = 0.01
    """Weight of the load-balancing penalty."""
    weighting: Literal["uniform", "tokens", "samples"] = "uniform"
    """Weights of the server's mean: equal, by training tokens (text), or by samples."""
    participation: Annotated[float, Field(gt=0, le=1)] | list[list[str]] = ALL_USERS
    """The fraction of users drawn for each round, or the names of the users of each round; the list repeats when it
    ends.
    """
    uploads: Format = "float32"
    """Number format of uploads. ``int8`` has a scale for each row, and adds the rounding error to the user's next
    upload. Not for ``pcl``.
    """

    @property
    def most_local_steps(self) -> int:
        """Largest number of local steps of a user in a round, for text; other kinds of data have local epochs."""
        return max(values_in(self.local_steps))

    @property
    def largest_batch_size(self) -> int:
        """Largest number of sequences or samples of a user in one step."""
        return max(values_in(self.batch_size))

    @field_validator("participation")
    @classmethod
    def _check_rounds(cls, participation: float | list[list[str]]) -> float | list[list[str]]:
        """Check that each listed round has participants and names none of them twice; a fraction needs no check."""
        if not isinstance(participation, list):
            return participation
        if not participation or not all(participation):
            raise ValueError("a round without users; list at least one user for each round")
        for round_number, names in enumerate(participation, start=1):
            seen: set[str] = set()
            for name in names:
                if name in seen:
                    raise ValueError(f"user {name!r} is listed twice in round {round_number}; list each user once")
                seen.add(name)
        return participation


class EvaluationSection(Section):
    """Evaluation interval, the models that are evaluated, and the selection of the best round.

    :func:`comingle.training.evaluation.evaluation_interval` chooses the interval for ``every: auto``. The local model
    is the one that Algorithm 1 of CoMiGS returns.
    """

    every: Literal["auto"] | Count = AUTO
    """Rounds between two evaluations of the test text."""
    users: Count | None = None
    """Number of users to evaluate, drawn once for the run; the mean then has a 95% interval. ``null``: all."""
    first: bool = True
    """Evaluate once before training, so that curves start at the pretrained model."""
    model: Literal["local", "exchanged"] = "local"
    """The scored model: after a user's local steps, or after the download that follows. ``fedavg+`` always tunes the
    exchanged model, ``fdlora`` always fuses after the last exchange.
    """
    select: Literal["last", "best"] = "last"
    """End with the models of the last round, or of the evaluated round with the lowest mean validation loss."""
    guard: Literal["local"] | None = None
    """``local``: also train each user alone, and serve the user the model with the lowest validation loss."""


class CheckpointSection(Section):
    """Checkpoint interval, and the number of checkpoints to keep."""

    every: Count = 5
    """Rounds between two checkpoints; the last round is always saved."""
    keep: Count = 2
    """Number of checkpoints to keep, the newest."""


_BYTES = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Number of bytes by unit."""


def parse_bytes(size: str | int) -> int:
    """Return the number of bytes of a size such as ``800MB``; upper and lower case are equal.

    Raises:
        ValueError: The text is not a positive number with a unit.
    """
    if isinstance(size, int):
        return size
    bytes_of_unit = {unit.lower(): number for unit, number in _BYTES.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower())
    if match is not None:
        number, unit = float(match[1]), match[2]
        if number > 0 and unit in bytes_of_unit:
            return int(number * bytes_of_unit[unit])
    raise ValueError(f"got {size!r}; allowed: auto, or a number with a unit: {', '.join(filter(None, _BYTES))}")


class RuntimeSection(Section):
    """Settings of the machine, which change results only by rounding.

    One exception: if the load-balancing penalty has a gradient (more than two experts, or top-1), it is the mean over
    micro-batches, as in the paper's code.
    """

    device: str = "auto"
    """``auto`` (a CUDA GPU if there is one, else the CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``."""
    dtype: str = "auto"
    """Format of the base's weights and of products: ``auto`` (bfloat16 where the device is fast at it, else float32),
    ``bfloat16``, ``float16``, ``float32`` or ``float64``. Trained parameters are float32 at least. ``float16`` is for
    language models on GPUs without bfloat16, with loss scaling.
    """
    attention: str = "auto"
    """``eager``, ``sdpa``, or ``auto``: native code on a CPU if the run uses it (``native_code``), else eager;
    transformers' choice on other devices.
    """
    compile: Literal["auto"] | bool = "auto"
    """Use torch.compile, and native code for the convolutions of nets; ``auto``: if the run is long enough (nets: 20
    rounds).
    """
    native_code: Literal["auto"] | bool = "auto"
    """C++ kernels for expert mixtures, attention and losses on a CPU, compiled once per machine: less memory and time
    than PyTorch, and results that differ by rounding. ``auto``: if the model is compiled, and in the clients of a
    federation whose base has a 16-bit format. Without a C++ compiler PyTorch is used.
    """
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    """CPU threads; ``null``: torch's default."""
    shard_sums: Literal["reduced", "ordered"] = "reduced"
    """With several processes: ``reduced`` (processes send sums where the server needs no more) or ``ordered`` (every
    upload is gathered, bit for bit as in one process).
    """
    store: Literal["memory", "disk", "disk-bf16"] = MEMORY
    """Place of users' tensors and data: ``memory``; ``disk``, for more users than fit in memory; ``disk-bf16``, with
    optimiser state rounded to bfloat16 between rounds.
    """
    memory: str | Count | None = None
    """Largest memory of the process, or of a GPU: a size such as ``800MB`` or ``1.5GiB``, or ``auto`` for what is free.
    Keys that are not set are then chosen so that a language model fits, before it is loaded: smaller passes or
    checkpointing, then bfloat16, then ``quantise``. ``null`` chooses nothing.
    """
    users_per_step: Literal["auto"] | Count | None = None
    """Users in one pass; ``null`` chooses by tokens or parameters, ``auto`` also by the free memory."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time; not for client-level mixtures."""
    gpu: list[Literal["triton", "graphs"]] = Field(default_factory=list)
    """Options for NVIDIA GPUs: Triton kernels for experts, CUDA graphs. Never run on one yet. Not for nets and
    client-level mixtures.
    """
    micro_batch: Count | None = None
    """Sequences of one user in one pass; ``null`` chooses."""
    track: list[Literal["wandb", "mlflow"]] = Field(default_factory=list)
    """Send metrics to Weights & Biases or MLflow."""

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, memory: str | int | None) -> str | int | None:
        """Check that a text is ``auto`` or a size."""
        if isinstance(memory, str) and memory != AUTO:
            parse_bytes(memory)
        return memory
