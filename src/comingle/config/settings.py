"""The section ``data``, and settings of adapters, optimizers, privacy and aggregation, as the engine uses them.

Recipes take their defaults from here. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
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
    runtime_checkable,
)

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from comingle.protocol import Format
from comingle.utils import registry
from comingle.utils.errors import LARGEST, PluginError
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


class Section(BaseModel):
    """Base class of the sections of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def plain_name(section: object, *, key: str = "name") -> object:
    """Return the mapping ``{key: name}`` for a section that is given as a plain name; return others unchanged."""
    return {key: section} if isinstance(section, str) else section


def number_in(value: object) -> object:
    """Convert text such as "1e-3", which YAML 1.1 reads as text, to a number; return other values unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


PATHS = ("path", "train", "valid", "test")
"""Keys whose values are paths of a user's data."""

Anchor = Callable[[Any], Any]
"""Function that makes a relative path, or a list of them, absolute if it exists beside the recipe."""


class DataSection(Section):
    """Base class of the section ``data`` of each kind."""

    kind: Any  # a literal in each subclass
    given: Literal[True] | None = None
    """True if a program passes the users' data; the section then has no sources."""
    seed: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Seed of splits, samples and partitions; None for the recipe's ``seed``, which determines all other draws."""

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
    def _of_other_kinds(cls, content: object) -> object:
        """Refuse keys of ``data`` that only other kinds have, and name the alternative of this kind.

        Other unknown keys are refused later, by the model itself.
        """
        keys = content if isinstance(content, Mapping) else ()
        for key in keys:
            if key not in cls.model_fields and (instead := cls.unread.get(f"data.{key}")):
                raise ValueError(f"{key} is not used for {cls.label}; {instead}")
        return content

    @property
    def names(self) -> list[str]:
        """Names of users in the recipe."""
        return []

    @property
    def cluster_numbers(self) -> dict[str, int]:
        """The number of each user's true cluster, if the recipe names clusters."""
        return {}

    @property
    def in_distribution(self) -> bool:
        """True if users are tested on data from their training distribution."""
        return True

    def anchored(self, anchor: Anchor) -> dict[str, object]:
        """Return the keys of ``data`` that contain paths, with ``anchor`` applied to each path.

        The result replaces these keys in the content of ``data``. A kind without paths has none.
        """
        return {}


class UserFiles(Section):
    """Data of one user: one source to be split, or one source per split."""

    path: Source | None = None
    train: Source | None = None
    valid: Source | None = None
    test: Source | None = None

    @model_validator(mode="after")
    def _one_or_splits(self) -> UserFiles:
        """Check that a user has either one source to be split (``path``), or sources for train and test.

        A source for valid is optional, besides those for train and test.
        """
        if (self.path is None) == (self.train is None) or (self.path and (self.valid or self.test)):
            raise ValueError("give either path alone, or train and test (and valid)")
        if self.train is not None and self.test is None:
            raise ValueError("train without test; give test too")
        return self


Files = TypeVar("Files", bound=UserFiles)


class OwnUsersSection(DataSection, Generic[Files]):
    """Base class of sections that name each user's files; users may be assigned to true clusters.

    ``Files`` is the type of a user's entry.
    """

    clusters: dict[str, str] | None = None
    """The true cluster of each user, for methods that know it."""
    users: dict[str, Files] | None = None

    @field_validator("users", mode="before")
    @classmethod
    def _wrap_plain_paths(cls, users: object) -> object:
        """Convert a user's plain path to a mapping with the key ``path``, and names to text; check the names."""
        if not isinstance(users, Mapping):
            return users
        if problem := name_problem(str(name) for name in users):
            raise ValueError(problem)
        return {str(name): {"path": files} if isinstance(files, str) else files for name, files in users.items()}

    @field_validator("clusters", mode="before")
    @classmethod
    def _labels(cls, clusters: object) -> object:
        """Convert names of users, and labels of clusters that are whole numbers, to text."""
        if not isinstance(clusters, Mapping):
            return clusters
        return {str(name): str(label) if type(label) is int else label for name, label in clusters.items()}

    @property
    def cluster_numbers(self) -> dict[str, int]:
        """The number of each named user's cluster, from 0, in the alphabetical order of the labels."""
        clusters = self.clusters or {}
        labels = sorted(set(clusters.values()))
        return {name: labels.index(label) for name, label in clusters.items()}

    @property
    def names(self) -> list[str]:
        """Names of the users in the recipe; empty with a data set."""
        return list(self.users or {})

    def anchored(self, anchor: Anchor) -> dict[str, object]:
        """Return the keys ``users`` and ``dataset`` after applying ``anchor`` to their paths."""
        content = self.model_dump(mode="json", exclude_unset=True, include={"users", "dataset"})
        entries_with_paths = list((content.get("users") or {}).values())
        if content.get("dataset"):
            entries_with_paths.append(content["dataset"])
        for entry in entries_with_paths:
            entry |= {key: anchor(entry[key]) for key in PATHS if entry.get(key) is not None}
        return content


class SplitSection(Section):
    """Splits of a user's data: by fractions, or the source's own."""

    valid: Fraction = 0.1
    test: Fraction = 0.1
    given: bool = False
    train_name: str = "train"
    valid_name: str | None = None
    test_name: str = "test"


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
    """Return the section class for the raw content of the key ``data``.

    It is that of the kind that ``kind`` names. Without it, the kind is recognised by a key that only this kind has
    (``marks``).

    Raises:
        ValueError: There is no such kind, or the content has such keys of no kind, or of several kinds.
    """
    if (kind := content.get("kind")) is not None:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"no kind {kind!r}.{KINDS.hint(str(kind))} Allowed: {', '.join(KINDS)}")
        return KINDS[kind]
    section_by_mark = {mark: section for section in _loadable() for mark in section.marks}
    given = [mark for mark in section_by_mark if content.get(mark) is not None]
    if len({section_by_mark[mark] for mark in given}) != 1:
        *others, last = section_by_mark
        raise ValueError(f"give one of {', '.join(others)} and {last}")
    return section_by_mark[given[0]]


def _loadable() -> Iterator[type[DataSection]]:
    """Yield all sections, except those of plug-ins that cannot be imported."""
    for kind in KINDS:
        with suppress(PluginError):
            yield KINDS[kind]


ON_LANGUAGE: Mapping[str, str] = {"floral": "adaptors on a language model use adapters.rank and adapters.alpha"}
"""Settings of nets that language models do not use."""

_PASSES = {"data.train_on_valid": "rounds are passes, which more training data would make longer"}

_LIMITS = ("data.max_train_tokens", "data.max_valid_tokens", "data.max_test_tokens")


def steps_of(what: str) -> dict[str, str]:
    """Return an entry of ``unread``: why ``local_steps`` is not used if users make passes over their data.

    Args:
        what: The items of a pass, for example "samples".
    """
    return {"training.local_steps": f"training.local_epochs is the number of passes over a user's {what}"}


def keys_of_text(*, limits: str | tuple[str, str, str], **instead: str) -> dict[str, str]:
    """Return entries of ``unread`` for another kind: the keys of ``data`` that only text has, and what to do instead.

    Args:
        limits: Alternatives to the token limits of the three splits: one text for all, or one each.
        instead: Alternatives to other keys, by key without ``data.``.
    """
    limit_texts = (limits,) * len(_LIMITS) if isinstance(limits, str) else limits
    other_texts = {f"data.{key}": text for key, text in instead.items()}
    return _PASSES | other_texts | dict(zip(_LIMITS, limit_texts, strict=True))


@runtime_checkable
class Gating(Protocol):
    """Weighting of experts that a method defines, the same for all routers of a model; ``str`` describes it."""

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Any]:
        """Return the number of rows of a router's matrix, and the function that draws their first values.

        With fewer rows than experts, the rows belong to the last experts, in order. If there are no more rows than
        experts, a user has only the rows of its own experts.

        Args:
            experts: Number of experts.
            rank: Rank of the experts.
            width: Width of the input.
        """
        ...

    def __call__(self, router: Any, products: Any, x: Any) -> Any:
        """Return gates ``(users, n, experts)`` that sum to one.

        ``x`` is ``(users, n, width)``; ``products`` are its products with all rows of the router.
        """


Balance = Literal["none", "uniform", "generalist"]
"""Load that the balancing penalty aims at: none, equal for all experts, or one half on the generalist."""


RANK = 8
"""Default rank of the experts."""


class TargetsSection(Section):
    """Names of the linear layers to adapt, relative to a decoder layer, for a model family that comingle does not know.

    ``mlp`` is the module that a routed MLP replaces; empty where the layer itself holds the MLP's linears (OPT). Then
    the mixture takes the place of ``up`` and the activation and ``down`` become identities. ``activation`` names a
    transformers activation; None reads it from the model's configuration.
    """

    attention: tuple[str, ...]
    up: str
    down: str
    gate: str | None = None
    mlp: str = ""
    activation: str | None = None

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the name of each linear layer."""
        yield from (("attention", name) for name in self.attention)
        yield from ((key, name) for key in ("up", "down", "gate") if (name := getattr(self, key)))

    @property
    def names(self) -> set[str]:
        """Names of all linear layers."""
        return {name for _, name in self.named()}


class AdaptersSection(Section):
    """Shape of the adapters: LoRA rank and alpha, top-k of the router, how experts are mixed, load balancing.

    ``rank`` is one number for all users or one per user; a user with a smaller rank than another is padded and masked.
    """

    rank: Count | list[Count] = RANK
    alpha: Positive = 16.0
    top_k: Count = 2
    mix: Literal["output", "linear"] = "output"
    balance: Balance = "generalist"
    targets: TargetsSection | None = None


WORDS = (32, 64)
"""Bit widths of the integers on which masks are uniform."""

LEAST = 2
"""Least number of users in a sum; a sum over one user would reveal that upload."""


class SecureSection(Section):
    """Settings of secure aggregation: the server sees only the sum of the uploads.

    ``threshold`` is the fraction of a round's users that a sum requires; it is above one half, so that a round has at
    most one sum. ``bits`` is the size of an entry of an upload, sign included. ``range`` is the largest
    magnitude of an entry of a user's change, by default 8; with noise it follows from the clip norm. ``colluders`` is
    the number of users that may collude with the server without reducing the noise below the accounted amount.
    """

    threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.66
    bits: Annotated[int, Field(ge=16, le=32, strict=True)] = 24
    range: Positive | None = None
    colluders: Annotated[int, Field(ge=0, le=10**6, strict=True)] = 0

    def least(self, users: int) -> int:
        """Return the number of users that a sum requires in a round with ``users`` participants.

        ``max(LEAST, ceil(threshold users))``; a product that is whole except for rounding errors is not rounded up.
        """
        return max(LEAST, math.ceil(self.threshold * users - 1e-9))

    def word(self, users: int) -> int:
        """Return the bit width of masked uploads: 32, or 64 if a sum over ``users`` entries needs more.

        A sum of that many entries of ``bits`` bits has ``bits + ceil(log2 users)`` bits. One more is spare, so that a
        sum uses at most half of the range.
        """
        needed_bits = self.bits + math.ceil(math.log2(max(users, 1))) + 1
        return WORDS[0] if needed_bits <= WORDS[0] else WORDS[1]


def no_sum(done: int, fact: str, least: int) -> str:
    """Return a one-line message for a round without a sum.

    Args:
        done: The round.
        fact: Number of users who completed a step, as a clause: "1 of 3 users completed step 'mask'".
        least: Number of users that a sum requires.
    """
    return f"round {done}: {fact}; needed: {least}; the round ends without a sum"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms of a secure sum, which users and server agree on beforehand: round, users and number of entries.

    ``expected`` is the number of participants of the round, ``threshold`` the least number that a sum requires.
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
        """Return a digest of all terms, to which keys are bound."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


ADAPTIVE = "adaptive"
KEY = "privacy.key"
"""Name of the file with the key of the noise."""


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

    ``mechanism`` says where noise is added: "central" at the server, to the mean; "local" at each user; "none" nowhere.
    "example" protects single examples of a user instead of users (DP-SGD): each step on shared tensors uses a noised
    sum of clipped gradients, and ``clip_norm`` bounds the gradient of an example. Without a noise multiplier each user
    then has its own, which depends on its number of examples.

    With ``secure_aggregation`` the server sees only sums of uploads, and each user adds a share of the central noise.

    ``clip_norm`` bounds the L2 norm of a user's change; "adaptive" follows ``clip_quantile`` of the users' norms,
    starting at ``first_clip_norm`` with steps of ``clip_rate`` (Andrew et al. 2021, with their values; a norm grows
    tenfold in 23 rounds at most). The standard deviation of the noise is ``noise_multiplier`` times the clip norm.
    Without a multiplier the run spends ``epsilon``; with both, it stops before epsilon is exceeded.

    ``sampling`` draws each participant independently ("poisson") or a fixed number ("fixed"). ``weight_cap`` is the
    amount of data from which a user has the full weight, if ``training.weighting`` is not uniform. ``noise`` is
    "secret", or for simulations "reproducible" from the seed.
    """

    mechanism: str = "central"
    clip_norm: Positive | Literal["adaptive"] = 1.0
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    sampling: Literal["poisson", "fixed"] = "poisson"
    accountant: Literal["pld", "rdp"] = "pld"
    weight_cap: Count | None = None
    noise: Literal["secret", "reproducible"] = "secret"
    first_clip_norm: Positive = 0.1
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    clip_rate: Positive = 0.2
    secure_aggregation: SecureSection | None = None

    def __hash__(self) -> int:
        """Return a hash of all values, the cache key of accountants."""
        return hash(tuple(self.__dict__.values()))

    @field_validator("mechanism", mode="before")
    @classmethod
    def _registered(cls, mechanism: object) -> object:
        """Check that a privacy mechanism is registered."""
        if isinstance(mechanism, str) and mechanism in MECHANISMS:
            return mechanism
        *others, last = map(repr, MECHANISMS)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")

    @property
    def noisy(self) -> bool:
        """True if noise is added, so that a privacy account is kept."""
        return self.noise_at != "none"

    @property
    def noise_at(self) -> str:
        """Place where noise is added: ``server``, ``upload``, ``steps`` or ``none``."""
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
        """True if the clip norm follows the users' norms."""
        return self.clip_norm == ADAPTIVE

    @property
    def first_bound(self) -> float:
        """The clip norm of the first round."""
        return self.first_clip_norm if isinstance(self.clip_norm, str) else self.clip_norm


Rule = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-bound", "bulyan"]


class AggregationSection(Section):
    """Aggregation rule of the server, which tolerates some hostile uploads.

    In YAML it is the plain name of a rule, or a mapping. ``hostile`` is the share of a round's uploads that is assumed
    to be hostile, below a half. ``bound`` is the largest L2 norm of a user's change with "norm-bound": a number, or the
    "median" of the round's norms.
    """

    rule: Rule = "mean"
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    bound: Positive | Literal["median"] = "median"

    @property
    def is_mean(self) -> bool:
        """True if uploads are combined by the method's own mean."""
        return self.rule == "mean"

    def hostile_among(self, users: int) -> int:
        """Return the number of uploads that are assumed to be hostile: their share, rounded up."""
        return math.ceil(self.hostile * users - 1e-9)

    def enough(self, users: int) -> bool:
        """Return whether the rule's guarantee holds for this number of uploads."""
        return users >= self.needed(self.hostile_among(users))

    def needed(self, hostile: int) -> int:
        """Return the least number of uploads for which the rule's guarantee holds with ``hostile`` hostile ones.

        The mean and a fixed bound on norms guarantee nothing that depends on the number. Other rules need a majority of
        honest uploads (``2 hostile + 1``) or more, as their papers say.
        """
        if self.rule == "mean" or (self.rule == "norm-bound" and self.bound != "median"):
            return 1
        if self.rule in ("krum", "multi-krum"):
            return 2 * hostile + 3
        return 4 * hostile + 3 if self.rule == "bulyan" else 2 * hostile + 1


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
    learning_rate: Positive = 2e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    momentum: Fraction = 0.0
    clip_norm: Positive | None = None

    @property
    def moments(self) -> frozenset[str]:
        """Moments that the optimiser keeps: ``first``, ``second``."""
        if self.name == "adamw":
            return frozenset({"first", "second"})
        return frozenset({"first"} if self.momentum else ())

    @property
    def memoryless(self) -> bool:
        """True if a step of an entry depends on its gradient alone, so that tensors can be updated one by one."""
        return not self.moments and self.clip_norm is None


EXPERTS_OPTIMIZER = OptimizerSection()
ROUTER_OPTIMIZER = OptimizerSection(schedule="constant")


class TrainingSection(Section):
    """Amount of training, and the optimisers.

    A round has ``local_steps`` steps on random windows of text, or ``local_epochs`` passes over samples. ``uploads`` is
    the format of what users send, see :mod:`comingle.protocol.messages`. ``participation`` is a fraction of the users
    drawn each round, or a list of users for each round, which is repeated when it ends.
    """

    rounds: Steps = 20
    local_steps: Steps = 10
    local_epochs: Steps = 1
    batch_size: Count = 64
    context: Annotated[int, Field(ge=2, le=10**15, strict=True)] = 128
    experts: OptimizerSection = EXPERTS_OPTIMIZER
    router: OptimizerSection = ROUTER_OPTIMIZER
    balance_weight: NotNegative = 0.01
    weighting: Literal["uniform", "tokens", "samples"] = "uniform"
    participation: Annotated[float, Field(gt=0, le=1)] | list[list[str]] = ALL_USERS
    uploads: Format = "float32"

    @field_validator("router", mode="before")
    @classmethod
    def _constant_router(cls, router: object) -> object:
        return {"schedule": ROUTER_OPTIMIZER.schedule, **router} if isinstance(router, Mapping) else router

    @field_validator("participation")
    @classmethod
    def _check_rounds(cls, participation: float | list[list[str]]) -> float | list[list[str]]:
        """Check that each round in a list has users and names none twice; a fraction needs no check."""
        if not isinstance(participation, list):
            return participation
        if not participation or not all(participation):
            raise ValueError("a round without users; list at least one user for each round")
        for number, names in enumerate(participation, start=1):
            if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
                raise ValueError(f"user {twice!r} is listed twice in round {number}; list each user once")
        return participation


class EvaluationSection(Section):
    """Evaluation interval, the models that are evaluated, and the selection of the best round.

    With ``every: auto`` :func:`comingle.training.evaluation.period` chooses the interval. With ``first`` there is an
    evaluation before any training. ``users`` is the number of users that are evaluated, drawn once for all evaluations;
    None for all. ``model`` is "local", the user's model after its local steps, which Algorithm 1 of CoMiGS returns, or
    "exchanged", the model after aggregation. ``select`` is the round whose models a run ends with: the "last", or the
    "best" of the evaluated ones, with the lowest validation loss, mean over users.
    """

    every: Literal["auto"] | Count = AUTO
    users: Count | None = None
    first: bool = True
    model: Literal["local", "exchanged"] = "local"
    select: Literal["last", "best"] = "last"


class CheckpointSection(Section):
    """Checkpoint interval, and the number of checkpoints to keep."""

    every: Count = 5
    keep: Count = 2


class RuntimeSection(Section):
    """Settings of the machine, which change results only by rounding.

    One exception: if the load-balancing penalty has a gradient (more than two experts, or top-1), it is the mean over
    micro-batches, as in the paper's code. ``users_per_step`` and ``micro_batch`` (sequences of one user per pass) bound
    memory; None chooses them. ``store`` is the place of users' tensors while they do not train.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    compile: Literal["auto"] | bool = "auto"
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    shard_sums: Literal["reduced", "ordered"] = "reduced"
    store: Literal["memory", "disk", "disk-bf16"] = MEMORY
    users_per_step: Literal["auto"] | Count | None = None
    gradient_checkpointing: bool = False
    gpu: list[Literal["triton", "graphs"]] = Field(default_factory=list)
    micro_batch: Count | None = None
    track: list[Literal["wandb", "mlflow"]] = Field(default_factory=list)
