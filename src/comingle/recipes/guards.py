"""Sections of a recipe that guard users from each other, and from the server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from comingle.privacy.secure.settings import Secure
from comingle.privacy.settings import Privacy
from comingle.recipes.fields import Count, Positive, Section
from comingle.robust.settings import Aggregation, Rule


class SecureSection(Section):
    """How uploads are summed behind masks; see ``comingle.privacy.secure.settings``."""

    threshold: Annotated[float, Field(gt=0.5, le=1)] = Secure.threshold
    bits: Annotated[int, Field(ge=16, le=32, strict=True)] = Secure.bits
    range: Positive | None = Secure.range
    colluders: Annotated[int, Field(ge=0, le=10**6, strict=True)] = Secure.colluders


class PrivacySection(Section):
    """What is done to uploads so that they reveal little of a user; see ``comingle.privacy.settings``."""

    mechanism: Literal["central", "local", "example", "none"] = Privacy.mechanism
    clip_norm: Positive | Literal["adaptive"] = Privacy.clip_norm
    noise_multiplier: Positive | None = Privacy.noise_multiplier
    epsilon: Positive | None = Privacy.epsilon
    delta: Annotated[float, Field(gt=0, lt=1)] = Privacy.delta
    sampling: Literal["poisson", "fixed"] = Privacy.sampling
    accountant: Literal["pld", "rdp"] = Privacy.accountant
    weight_cap: Count | None = Privacy.weight_cap
    noise: Literal["secret", "reproducible"] = Privacy.noise
    first_clip_norm: Positive = Privacy.first_clip_norm
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] = Privacy.clip_quantile
    clip_rate: Positive = Privacy.clip_rate
    secure_aggregation: SecureSection | None = None


class AggregationSection(Section):
    """What the server makes of uploads some of which may be hostile; in YAML a rule's plain name, or a mapping."""

    rule: Rule = Aggregation.rule
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = Aggregation.hostile
    bound: Positive | Literal["median"] = Aggregation.bound
