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
    unread_keys_of_text,
    unread_local_steps,
)

Side = Annotated[int, Field(ge=1, le=16_384, strict=True)]
"""Height or width of an image in pixels."""

UNREAD: Mapping[str, str] = {
    **unread_local_steps("samples"),
    "training.context": "samples have no windows",
    "training.balance_weight": "nets have no token routers",
    "adapters": "use the section floral for adapters in nets",
    "quantise": "all parameters of a net are trained",
    "runtime.attention": "nets have no attention to choose",
    "runtime.gradient_checkpointing": "nets have no base model layers to recompute",
    "runtime.gpu": "kernels and CUDA graphs are for LoRA on language models",
}
"""Settings that runs with nets do not read, with the reason."""

NO_WINDOWS = "samples have no windows, so none can be too short"
"""Reason why ``on_small_user`` is not read."""


class SampleSource(UserFiles):
    """Samples of one user: one source to be split, or one source per split."""


class FractionsSection(Section):
    """Fractions of samples that are held out for splits that are not given."""

    valid: Fraction = 0.1
    """Validation data, as a fraction of the samples."""
    test: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Test data, as a fraction of the samples."""


class SamplesSection(OwnUsersSection[SampleSource]):
    """Users with samples: a folder of images with one subfolder per class, an ``.npz`` file, or data from a program."""

    kind: Literal["samples"] = "samples"
    image_size: Side | tuple[Side, Side] | None = None
    """Scale images to this size."""
    grayscale: bool = False
    """One channel instead of three."""
    classes: Count | tuple[str, ...] | None = None
    """The number of classes, if users lack some; for folders of images also their names, in the order of the net's
    outputs.
    """
    loss: str | None = None
    """Name of the loss; by default ``cross_entropy`` for classes, else ``mse``."""
    split: FractionsSection = FractionsSection()
    """The division of a user's data."""

    label: ClassVar[str] = "samples"
    implementation: ClassVar[str] = "comingle.training.kinds.samples:KIND"
    has_base: ClassVar[bool] = True
    accepted: ClassVar[Mapping[str, str]] = {
        "users": "a mapping from names to folders or .npz files, for example {ada: path/to/ada}",
        "users.*": "a path, or a mapping with path, or with train, test and optionally valid",
        "image_size": "a number of pixels, or [height, width]",
        "classes": "the number of classes, or the names of folders in order, for example [cat, dog]",
    }
    unread: ClassVar[Mapping[str, str]] = {
        **UNREAD,
        **unread_keys_of_text(
            add_bos_token="samples have no tokens",
            held_out="each user is tested on its own samples",
            on_small_user=NO_WINDOWS,
            limits="samples have no tokens",
        ),
    }

    @model_validator(mode="after")
    def _check_users_and_fractions(self) -> SamplesSection:
        """Check that there is exactly one source of users, and that splits leave samples to train on."""
        names_users = self.users is not None
        gets_users_from_program = self.given is not None
        if names_users == gets_users_from_program:
            raise ValueError("give users, for example {ada: path/to/ada}; or given: true if a program passes the users")
        if self.users is not None and not self.users:
            raise ValueError("no users; name at least one, for example `users: {ada: path/to/ada}`")
        if self.split.valid + self.split.test >= 1:
            raise ValueError(f"split: valid {self.split.valid} and test {self.split.test} leave nothing to train on")
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; empty if the recipe has only their number (``data.classes: 10``) or nothing."""
        return self.classes if isinstance(self.classes, tuple) else ()

    @property
    def outputs(self) -> int | None:
        """Number of classes, which ``data.classes`` gives or lists by name; None if the recipe does not say."""
        return len(self.classes) if isinstance(self.classes, tuple) else self.classes
