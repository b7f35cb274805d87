"""Section ``data`` of recipes whose users have samples: inputs with targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from comingle.config.settings import (
    Count,
    Fraction,
    OwnUsersSection,
    Section,
    UserFiles,
    keys_of_text,
    steps_of,
)

Side = Annotated[int, Field(ge=1, le=16_384, strict=True)]
"""Height or width of an image in pixels."""

UNREAD: Mapping[str, str] = {
    **steps_of("samples"),
    "training.context": "samples have no windows",
    "training.balance_weight": "nets have no token routers",
    "adapters": "the section floral is for adaptors in nets",
    "quantise": "nets are trained whole",
    "runtime.attention": "nets are computed as they are",
    "runtime.gradient_checkpointing": "nets have no layers of a base to compute once more",
    "runtime.gpu": "kernels and graphs are for LoRAs on a language model",
}
"""Settings that runs with nets do not read, with the reason."""

NO_WINDOWS = "samples have no windows to be too short for"
"""Reason why ``on_small_user`` is not read."""


class SampleSource(UserFiles):
    """Samples of one user: one source to be split, or one source per split."""


class FractionsSection(Section):
    """Fractions of samples that are held out for splits that are not given."""

    valid: Fraction = 0.1
    test: Annotated[float, Field(gt=0, lt=1)] = 0.1


class SamplesSection(OwnUsersSection[SampleSource]):
    """Users with samples: a folder of images with one subfolder per class, an ``.npz`` file, or data from a program."""

    kind: Literal["samples"] = "samples"
    image_size: Side | tuple[Side, Side] | None = None
    grayscale: bool = False
    classes: Count | tuple[str, ...] | None = None
    loss: str | None = None
    split: FractionsSection = FractionsSection()

    label: ClassVar[str] = "samples"
    implementation: ClassVar[str] = "comingle.training.kinds.samples:KIND"
    has_base: ClassVar[bool] = True
    accepted: ClassVar[Mapping[str, str]] = {
        "users": "a mapping of names to folders or .npz files, as {ada: path/to/ada}",
        "users.*": "a path, or a mapping with path, or with train and test (and valid)",
        "image_size": "a number of pixels, or [height, width]",
        "classes": "how many there are, or the names of folders in their order, as [cat, dog]",
    }
    unread: ClassVar[Mapping[str, str]] = {
        **UNREAD,
        **keys_of_text(
            add_bos_token="samples have no tokens",
            held_out="each user is tested on samples of its own",
            on_small_user=NO_WINDOWS,
            limits="samples have no tokens",
        ),
    }

    @model_validator(mode="after")
    def _somebody(self) -> SamplesSection:
        if (self.users is None) == (self.given is None):
            raise ValueError("give users, as {ada: path/to/ada}; or given, where a program hands them over")
        if self.users is not None and not self.users:
            raise ValueError("zero users; name at least one, as `users: {ada: path/to/ada}`")
        if self.split.valid + self.split.test >= 1:
            raise ValueError(f"split: valid {self.split.valid} and test {self.split.test} leave nothing to train on")
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, if the recipe has them."""
        return self.classes if isinstance(self.classes, tuple) else ()

    @property
    def outputs(self) -> int | None:
        """Number of classes, if the recipe has it."""
        return len(self.classes) if isinstance(self.classes, tuple) else self.classes
