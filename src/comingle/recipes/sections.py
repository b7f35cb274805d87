"""Recipes: the YAML that describes a run, checked key by key.

Unknown keys are refused with the nearest known one. A recipe is data: nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from comingle.errors import RecipeError
from comingle.recipes.data import DataSection, section_of
from comingle.recipes.fields import Count, Fraction, NotNegative, Positive, Section, Steps, number_in
from comingle.recipes.problems import first_problem


class MethodSection(Section):
    """Which method, with which settings; in YAML a plain name, or ``{name: NAME, setting: value}``."""

    name: str = "comigs-1g1s"
    settings: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)

    @field_validator("settings")
    @classmethod
    def _numbers_with_exponents(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return {key: number_in(value) for key, value in settings.items()}


class TargetsSection(Section):
    """Names of the linears to adapt in each decoder layer, for a family that comingle does not know."""

    attention: list[str]
    up: str
    down: str
    gate: str | None = None
    mlp: str = ""
    activation: str | None = None


class AdaptersSection(Section):
    """Shape of the adapters."""

    rank: Count | list[Count] = 8
    alpha: Positive = 16.0
    top_k: Count = 2
    mix: Literal["output", "linear"] = "output"
    balance: Literal["none", "uniform", "generalist"] = "generalist"
    targets: TargetsSection | None = None


class FloralSection(Section):
    """Adaptors of a client-level mixture in a net that is trained whole: see ``comingle.floral``.

    ``rank`` or ``budget`` (parameters of one adaptor relative to the layer); without either the budget is 1%.
    """

    rank: Count | None = None
    budget: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha: Positive = 1.0
    conv: Literal["balanced-2d", "channel", "in", "out", "filter", "linear", "none"] = "balanced-2d"
    lora: bool = True
    bias: bool = True
    norm: bool = True
    batch_nora: bool = False


class OptimizerSection(Section):
    """An optimiser and its schedule; see ``comingle.engines.optimizers``."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Positive = 2e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    momentum: Fraction = 0.0
    clip_norm: Positive | None = None


class TrainingSection(Section):
    """How long, on how much, with which optimisers."""

    rounds: Steps = 20
    local_steps: Steps = 10
    local_epochs: Steps = 1
    batch_size: Count = 64
    context: Annotated[int, Field(ge=2, le=10**15, strict=True)] = 128
    experts: OptimizerSection = OptimizerSection()
    router: OptimizerSection = OptimizerSection(schedule="constant")
    balance_weight: NotNegative = 0.01
    weighting: Literal["uniform", "tokens", "samples"] = "uniform"
    participation: Annotated[float, Field(gt=0, le=1)] | list[list[str]] = 1.0
    uploads: Literal["float32", "bfloat16", "int8"] = "float32"

    @field_validator("router", mode="before")
    @classmethod
    def _constant_router(cls, router: Any) -> Any:
        return {"schedule": "constant", **router} if isinstance(router, Mapping) else router

    @field_validator("participation")
    @classmethod
    def _somebody_each_round(cls, participation: Any) -> Any:
        if isinstance(participation, list) and (not participation or not all(participation)):
            raise ValueError("a round without users; list at least one user for each round")
        for number, members in enumerate(participation if isinstance(participation, list) else (), start=1):
            if twice := next((name for i, name in enumerate(members) if name in members[:i]), None):
                raise ValueError(f"user {twice!r} twice in round {number}; list each once")
        return participation


class EvaluationSection(Section):
    """When the test text is scored, on which model (as it is after the local steps, or after the exchange), and which
    round's models the run ends with: the last, or those whose validation loss was the lowest."""

    every: Count = 5
    first: bool = True
    model: Literal["local", "exchanged"] = "local"
    select: Literal["last", "best"] = "last"


class PrivacySection(Section):
    """What is done to uploads so that they reveal little of a user; see ``comingle.privacy.settings``."""

    mechanism: Literal["central", "local"] = "central"
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


class CheckpointSection(Section):
    """How often everything is saved, and how many checkpoints are kept."""

    every: Count = 5
    keep: Count = 2


class RuntimeSection(Section):
    """The machine: nothing here changes what is computed, but for rounding.

    One exception: where the load-balancing penalty has a gradient (more than two experts, or top-1), it is the mean
    over micro-batches, as in the paper's code.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    compile: Literal["auto"] | bool = "auto"
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    users_per_step: Count | None = None
    micro_batch: Count | None = None


class Recipe(Section):
    """A whole run.

    Raises:
        RecipeError: the first thing that is wrong, with its place, what was got and what is allowed.
    """

    base: str = "smollm2-135m"
    method: MethodSection = MethodSection()
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    data: SerializeAsAny[DataSection]
    adapters: AdaptersSection = AdaptersSection()
    floral: FloralSection = FloralSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    privacy: PrivacySection | None = None
    checkpoints: CheckpointSection = CheckpointSection()
    runtime: RuntimeSection = RuntimeSection()

    def __init__(self, **content: Any):
        try:
            super().__init__(**content)
        except ValidationError as error:
            raise RecipeError(f"recipe: {first_problem(error, Recipe, _section(content.get('data')))}") from None

    @field_validator("data", mode="before")
    @classmethod
    def _of_its_kind(cls, data: Any) -> Any:
        return section_of(data).model_validate(data) if isinstance(data, Mapping) else data

    @field_validator("method", mode="before")
    @classmethod
    def _plain_name(cls, method: Any) -> Any:
        if isinstance(method, str):
            return {"name": method}
        if not isinstance(method, Mapping):
            return method
        # Both spellings at once: ``--set method.router_every=5`` on a recipe that was read before.
        named = {key: value for key, value in method.items() if key in ("name", "settings")}
        beside = {key: value for key, value in method.items() if key not in named}
        settings = named.get("settings", {})
        return {**named, "settings": {**settings, **beside} if isinstance(settings, Mapping) else settings}

    @property
    def computed(self) -> dict[str, Any]:
        """What decides on the result: everything but the runtime and what is written when.

        Where the best of the evaluated rounds is selected, so does when models are evaluated. The order of the users
        does not: a value for each of them stands under the name.
        """
        aside = {"select", "every", "first"} if self.evaluation.select == "last" else set[str]()
        without: dict[str, Any] = {"runtime": True, "checkpoints": True, "evaluation": aside}
        without |= {} if self.privacy is not None else {"privacy": True}
        content = self.model_dump(mode="json", exclude=without)
        if not content["data"].get("train_on_valid"):  # runs of before there was a choice stay known
            content["data"].pop("train_on_valid", None)
        for section, key in ((content["adapters"], "rank"), (content["method"]["settings"], "specialists")):
            if key in section:
                section[key] = self._by_name(section[key])
        return content

    def _by_name(self, value: Any) -> Any:
        """A list with a value for each of the users named in the recipe as what each of them has."""
        names = self.data.names
        return dict(zip(names, value, strict=True)) if isinstance(value, list) and len(value) == len(names) else value

    @property
    def fingerprint(self) -> str:
        """A short name of :attr:`computed`."""
        return hashlib.sha256(json.dumps(self.computed, sort_keys=True).encode()).hexdigest()[:16]

    def with_changes(self, changes: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """A copy with dotted keys replaced, as ``{"training.rounds": 3}``; ``where`` is what messages call them.

        Raises:
            RecipeError: an unknown key or a wrong value.
        """
        content = self.model_dump(mode="json", exclude_unset=True)
        for key, value in changes.items():
            place = content
            *path, last = key.split(".")
            for part in path:
                inner = place.get(part)
                place[part] = place = inner if isinstance(inner, dict) else {}
            place[last] = value
        return parse_recipe(content, where=where)

    def as_yaml(self) -> str:
        """The whole recipe, defaults included; a base that was not named stays so where a task has a net of its own."""
        net_of_task = self.data.has_base and "base" not in self.model_fields_set
        content = self.model_dump(mode="json", exclude={"base"} if net_of_task else None)
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _section(data: Any) -> type[DataSection] | None:
    try:
        return section_of(data) if isinstance(data, Mapping) else None
    except ValueError:  # which is what is wrong with the recipe
        return None


def parse_recipe(content: Any, *, where: str = "recipe") -> Recipe:
    """Check a recipe.

    Raises:
        RecipeError: the first thing that is wrong, with its place, what was got and what is allowed.
    """
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: a recipe is a mapping of keys to values; got {type(content).__name__}")
    try:
        return Recipe(**{str(key): value for key, value in content.items()})
    except RecipeError as error:
        raise RecipeError(f"{where}: {str(error).removeprefix('recipe: ')}") from None
