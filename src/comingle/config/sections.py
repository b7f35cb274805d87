"""Sections of a recipe, checked key by key.

The error for an unknown key suggests the nearest known one. A recipe is data: nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from comingle.config.hints import problems_of
from comingle.config.settings import (
    AUTO,
    AdaptersSection,
    AggregationSection,
    CheckpointSection,
    Count,
    DataSection,
    EvaluationSection,
    OptimizerSection,
    Positive,
    PrivacySection,
    RuntimeSection,
    Section,
    TrainingSection,
    expand_plain_name,
    number_in,
    section_of,
    values_in_order,
)
from comingle.utils.errors import RecipeError


class MethodSection(Section):
    """The method and its settings; in YAML a plain name, or ``{name: NAME, setting: value}``."""

    name: str = "comigs-1g1s"
    """A method's name; ``comingle methods`` lists them."""
    settings: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """The method's settings; usually written beside the name."""

    @field_validator("settings")
    @classmethod
    def _convert_exponents(cls, settings: Mapping[str, object]) -> dict[str, object]:
        """Convert a method's settings such as "1e-3", which YAML 1.1 reads as text, to numbers."""
        return {key: number_in(value) for key, value in settings.items()}


class ContinuationSection(Section):
    """The run that this one continues, with changed text or users; in YAML also a plain path.

    Users of both runs keep their tensors, and the server its state; the rounds of this run are added. Round numbers and
    learning-rate schedules start again: ``training.experts.schedule: constant`` keeps the rate.
    """

    run: str
    """Folder of the earlier run, which is only read; of a federation that of its server."""
    moments: bool = False
    """Also keep the optimisers' moments and step counts; needs constant learning rates."""


class FloralSection(Section):
    """Adapters of a client-level mixture in a net whose weights are all trained."""

    rank: Count | None = None
    """Rank of every low-rank adapter; this or ``floral.budget``."""
    budget: Annotated[float, Field(gt=0, le=1)] | None = None
    """Parameters of an adapter relative to its layer; without a rank either 0.01, at least rank 1."""
    alpha: Positive = 1.0
    """Factor of every adapter's output."""
    conv: Literal["balanced-2d", "channel", "in", "out", "filter", "linear", "none"] = "balanced-2d"
    """Form of the adapters of convolutions."""
    lora: bool = True
    """Low-rank adapters on linear layers."""
    bias: bool = True
    """Adapters of biases."""
    norm: bool = True
    """Gain and shift adapters on norms."""
    batch_nora: bool = False
    """BatchNorA's reparameterisation on batch norms."""


VALUES_OF_USERS = (
    "method.specialists",
    "adapters.rank",
    "adapters.start",
    "training.local_steps",
    "training.batch_size",
    "training.max_seconds_per_round",
)
"""Keys whose value may be one for all users, a list in the order of the users, or a mapping by user."""

_LATER_DATA_KEYS = {
    "train_on_valid": False,
    "on_bad_row": "refuse",
    "add_bos_token": False,
    "clusters": None,
    "seed": None,
    "deduplicate": False,
    "max_conversations": None,
    "replay": 0.0,
}
"""Keys of ``data`` that are newer than published runs, with the values that those runs correspond to.

A key with this value does not change the fingerprint, so older run folders can be resumed.
"""


class Recipe(Section):
    """Description of a whole run, as read from a YAML file.

    Raises:
        RecipeError: The recipe is wrong. The error has all problems, each with place, value and allowed values.
    """

    base: str = "smollm2-135m"
    """The model: frozen for text and conversations, trained for samples."""
    quantise: Literal["none", "8bit", "4bit"] = "none"
    """``8bit`` or ``4bit``: store the weights of the base's layers in 8 or 4 bits."""
    method: MethodSection = MethodSection()
    """The method and its settings."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    """Determines the initial adapters, the batches and the participants, and the splits unless ``data.seed`` is given.
    """
    data: SerializeAsAny[DataSection]
    """The users and their data."""
    adapters: AdaptersSection = AdaptersSection()
    """Shape of the adapters."""
    floral: FloralSection = FloralSection()
    """Adapters of a client-level mixture in a net."""
    training: TrainingSection = TrainingSection()
    """Rounds, steps, batches, optimisers."""
    evaluation: EvaluationSection = EvaluationSection()
    """Time of evaluation, and the model that is scored."""
    privacy: PrivacySection | None = None
    """Protection of uploads."""
    aggregation: AggregationSection = AggregationSection()
    """Robust aggregation."""
    checkpoints: CheckpointSection = CheckpointSection()
    """Frequency and number of checkpoints."""
    continue_from: ContinuationSection | None = None
    """An earlier run whose users' models this one starts from."""
    runtime: RuntimeSection = RuntimeSection()
    """Device, memory and speed."""

    def __init__(self, **content: object):
        """Check the content of a recipe and convert it.

        Raises:
            RecipeError: The recipe is wrong. The error has one line for each problem.
        """
        try:
            super().__init__(**content)
        except ValidationError as error:
            problems = problems_of(error, Recipe, _section_or_none(content.get("data")))
            raise RecipeError(*(f"recipe: {problem}" for problem in problems)) from None

    @model_validator(mode="before")
    @classmethod
    def _accept_rate_of_nets(cls, content: object) -> object:
        """Read ``training.learning_rate`` of nets, which have no experts, as ``training.experts.learning_rate``."""
        if not isinstance(content, Mapping) or "training" not in content:
            return content
        if not _trains_nets(content.get("data")):
            return content
        return {**content, "training": _move_rate_to_experts(content["training"])}

    @field_validator("data", mode="before")
    @classmethod
    def _validate_by_kind(cls, data: object) -> object:
        """Validate the raw content of ``data`` with the section class of its kind; return a section unchanged."""
        if not isinstance(data, Mapping):
            return data
        section_class = section_of(data)
        return section_class.model_validate(data)

    @field_validator("method", mode="before")
    @classmethod
    def _normalise_method(cls, method: object) -> object:
        """Convert each way to write ``method`` in a recipe to ``{name: NAME, settings: {...}}``.

        Allowed are a plain name, ``{name: NAME, settings: {...}}``, and ``{name: NAME, KEY: VALUE, ...}`` with the
        settings beside the name.
        """
        if isinstance(method, str):
            return {"name": method}
        if not isinstance(method, Mapping):
            return method
        normalised = {key: value for key, value in method.items() if key in ("name", "settings")}
        beside_name = {key: value for key, value in method.items() if key not in normalised}
        settings = normalised.get("settings", {})
        if isinstance(settings, Mapping):
            # Settings may be in both places: `--set method.router_every=5` adds one beside those of a parsed recipe.
            settings = {**settings, **beside_name}
        return {**normalised, "settings": settings}

    @model_validator(mode="after")
    def _check_users_of_mappings(self) -> Recipe:
        """Check that mappings such as ``training.batch_size: {ada: 8, ben: 16}`` have the recipe's users.

        Does nothing if the recipe does not name its users.
        """
        names = self.data.names
        if not names:
            return self
        for key, values in self.values_of_users().items():
            if isinstance(values, Mapping):
                values_in_order(values, names, key)  # raises an error for a missing or unknown user
        return self

    @field_validator("continue_from", mode="before")
    @classmethod
    def _normalise_continuation(cls, continuation: object) -> object:
        """Convert ``continue_from``, if it is the plain path of a run, to ``{run: PATH}``."""
        return expand_plain_name(continuation, key="run")

    @field_validator("aggregation", mode="before")
    @classmethod
    def _normalise_aggregation(cls, aggregation: object) -> object:
        """Convert ``aggregation``, if it is the plain name of a rule, to ``{rule: NAME}``."""
        return expand_plain_name(aggregation, key="rule")

    @property
    def data_seed(self) -> int:
        """The seed of the draws in reading or generating users' data: splits, samples, partitions."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def result_content(self) -> dict[str, Any]:
        """The content of the recipe that determines a run's result; the fingerprint is its hash.

        The sections ``runtime`` and ``checkpoints`` are left out, and most of ``evaluation`` unless it selects the best
        round. Lists with a value per user become mappings by name, so that the order of the users does not count. Keys
        that older versions lack are left out if they have no effect, so that older runs keep their fingerprints.
        """
        selects_best = self.evaluation.select == "best"
        keys_without_effect = set[str]() if selects_best else {"select", "every", "first", "users"}
        excluded: dict[str, Any] = {"runtime": True, "checkpoints": True, "evaluation": keys_without_effect}
        if self.privacy is None:
            excluded["privacy"] = True
        if self.continue_from is None:
            excluded["continue_from"] = True
        if self.aggregation.is_mean:
            excluded["aggregation"] = True
        content = self.model_dump(mode="json", exclude=excluded)
        _drop_later_keys(content)
        sections = {**content, "method": content["method"]["settings"]}  # "method.KEY" is a key of these settings
        for dotted_key in VALUES_OF_USERS:  # such as "training.batch_size"
            section_name, _dot, key = dotted_key.partition(".")
            section = sections[section_name]  # part of `content`
            if key in section:
                section[key] = self._by_name(section[key])
        return content

    def values_of_users(self) -> dict[str, Any]:
        """Return the settings with a value for each user, such as ``{"training.batch_size": [8, 16]}``.

        Settings of :data:`VALUES_OF_USERS` with one value for all users are left out.
        """
        found: dict[str, Any] = {}
        adapters, training = dict(self.adapters), dict(self.training)  # settings by key
        sections = {"method": self.method.settings, "adapters": adapters, "training": training}
        for dotted_key in VALUES_OF_USERS:
            section_name, _dot, key = dotted_key.partition(".")
            value = sections[section_name].get(key)
            if isinstance(value, list | tuple | Mapping):
                found[dotted_key] = value
        return found

    def for_users(self, names: Sequence[str]) -> Recipe:
        """Return the recipe with lists in the order of the users, in place of mappings by user.

        Args:
            names: Names of the users, in order. The recipe's data may name further users, who were left out.

        Raises:
            RecipeError: A mapping names an unknown user, or lacks one.
        """
        lists: dict[str, object] = {}
        for key, values in self.values_of_users().items():
            if isinstance(values, Mapping):
                lists[key] = values_in_order(values, names, key, ignored=self.data.names)
        return self.with_changes(lists) if lists else self

    def _by_name(self, value: object) -> object:
        """Convert a list to a mapping by user name if it has one value for each user of the recipe, in their order.

        Other values are returned unchanged. With mappings the recipe's fingerprint does not depend on the users' order.
        """
        names = self.data.names
        if isinstance(value, list) and len(value) == len(names):
            return dict(zip(names, value, strict=True))
        return value

    @property
    def fingerprint(self) -> str:
        """Short hash of :attr:`result_content`; equal for recipes whose runs have the same results.

        A run is resumed only if its recipe has the same fingerprint as at its start.
        """
        content = json.dumps(self.result_content, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def with_changes(self, changes: Mapping[str, object], *, where: str = "recipe") -> Recipe:
        """Return a copy with dotted keys replaced.

        A section is replaced before its keys, whatever their order: ``{"method.models": 5, "method": "ifca"}``. As in a
        recipe's YAML, ``training.learning_rate`` of nets means ``training.experts.learning_rate``.

        Args:
            changes: New values by dotted key, for example ``{"training.rounds": 3}``.
            where: Name of the changes in messages.

        Raises:
            RecipeError: A key is unknown or a value is wrong.
        """
        content = self.model_dump(mode="json", exclude_unset=True)
        trains_nets = _trains_nets(content["data"])
        for dotted_key in sorted(changes, key=lambda key: key.count(".")):  # sections first
            is_rate_of_nets = trains_nets and dotted_key == _RATE_OF_NETS
            meant_key = _RATE_OF_EXPERTS if is_rate_of_nets else dotted_key
            *section_names, last = meant_key.split(".")
            section: dict[str, Any] = content
            for name in section_names:
                # A section may be a plain name: `method: ifca` is short for {name: ifca}.
                key_of_name = "rule" if name == "aggregation" else "name"
                inner_section = expand_plain_name(section.get(name), key=key_of_name)
                # A copy, since the section may be from `changes`.
                section[name] = dict(inner_section) if isinstance(inner_section, Mapping) else {}
                section = section[name]
            section[last] = changes[dotted_key]
        return parse_recipe(content, where=where)

    def as_yaml(self) -> str:
        """Return the recipe as YAML with all defaults.

        Some data has a default model (``has_base``). The key ``base`` is then left out unless the recipe sets it, as
        its default would replace that model.
        """
        uses_model_of_data = self.data.has_base and "base" not in self.model_fields_set
        excluded = {"base"} if uses_model_of_data else None
        content = self.model_dump(mode="json", exclude=excluded)
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _drop_later_keys(content: dict[str, Any]) -> None:
    """Delete keys that older versions did not have, where their values are those with which older versions ran.

    Otherwise a recipe would get another fingerprint than in an older version, and its runs could not be resumed.

    Args:
        content: Content of a recipe, as sections by key; changed in place.
    """
    evaluation, data, training = content.get("evaluation", {}), content["data"], content["training"]
    if "users" in evaluation and evaluation["users"] is None:
        del evaluation["users"]
    if "guard" in evaluation and evaluation["guard"] is None:
        del evaluation["guard"]
    for key, older_value in _LATER_DATA_KEYS.items():
        if key in data and data[key] == older_value:
            del data[key]
    if data.get("split", {}).get("stable") is False:
        del data["split"]["stable"]
    if content["adapters"]["start"] is None:
        del content["adapters"]["start"]
    if content["quantise"] == "none":
        del content["quantise"]
    if training["max_seconds_per_round"] is None:
        del training["max_seconds_per_round"]
    if training["normalise_steps"] is False:
        del training["normalise_steps"]
    if training["router"]["learning_rate"] == AUTO:
        training["router"]["learning_rate"] = OptimizerSection().learning_rate


_RATE_OF_NETS, _RATE_OF_EXPERTS = "training.learning_rate", "training.experts.learning_rate"


def _trains_nets(data: object) -> bool:
    """Return whether users train all weights of a net, without adapters; False if ``data`` is invalid.

    Args:
        data: The section ``data``, or its raw content.
    """
    section_class = type(data) if isinstance(data, DataSection) else _section_or_none(data)
    if section_class is None:
        return False
    return "adapters" in section_class.unread  # nets do not use the section `adapters`


def _move_rate_to_experts(training: Any) -> object:
    """Move ``learning_rate`` in the section ``training`` of a recipe for nets to ``experts.learning_rate``.

    Content that is not a mapping is returned unchanged; the validation that follows refuses it.

    Args:
        training: The content of the key ``training`` as read from YAML.

    Raises:
        ValueError: Both ``learning_rate`` and ``experts.learning_rate`` are given.
    """
    if not isinstance(training, Mapping) or "learning_rate" not in training:
        return training
    experts = training.get("experts", {})
    if not isinstance(experts, Mapping):
        return training
    if "learning_rate" in experts:
        raise ValueError(f"{_RATE_OF_NETS} and {_RATE_OF_EXPERTS}: got both, which mean the same for nets; give one")
    moved = dict(training)
    learning_rate = moved.pop("learning_rate")
    moved["experts"] = {**experts, "learning_rate": learning_rate}
    return moved


def with_older_defaults(content: object) -> Any:
    """Return a run's recipe with ``data.add_bos_token: false`` if it lacks this key.

    It was then written by an older version, which added no such token. In a recipe that a user wrote, a missing key has
    its default instead.

    Args:
        content: Content of a run's ``recipe.yaml``; returned unchanged if its kind of data has no such key.
    """
    data = content.get("data") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(data, Mapping):
        return content
    section_class = _section_or_none(data)
    if section_class is None or "add_bos_token" not in section_class.model_fields:
        return content
    data_with_key = {"add_bos_token": False, **data}  # the data's own value has priority
    return {**content, "data": data_with_key}


def _section_or_none(data: object) -> type[DataSection] | None:
    """Return the section class of the raw content of the key ``data``; None if it is invalid."""
    if not isinstance(data, Mapping):
        return None
    try:
        return section_of(data)
    except ValueError:  # validation reports it
        return None


def parse_recipe(content: object, *, where: str = "recipe") -> Recipe:
    """Return the recipe for content as read from YAML, after checking it.

    Args:
        content: The content: a mapping of keys to values.
        where: Name of the recipe in messages, for example its path.

    Raises:
        RecipeError: The recipe is wrong. The error has all problems, each with place, value and allowed values.
    """
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: a recipe is a mapping of keys to values; got {type(content).__name__}")
    try:
        return Recipe(**{str(key): value for key, value in content.items()})
    except RecipeError as error:  # its problems start with "recipe: "
        raise RecipeError(*(f"{where}: {problem.removeprefix('recipe: ')}" for problem in error.problems)) from None
