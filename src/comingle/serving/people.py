"""Everybody of a run as models to speak with; the run's training state is let go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from comingle.models.kernels import expert_mlp
from comingle.models.personal import PersonalModel
from comingle.runs.api import load
from comingle.serving.finding import find_run
from comingle.serving.rows import prepare
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import DataError
from comingle.utils.files import cache_folder
from comingle.utils.inputs import read_inputs
from comingle.utils.records import read_metrics

TURNS = ("conversations", "questions")
"""Kinds of data that are made of turns."""
WORTH_COMPILING = 10_000_000
"""Parameters of a base from which on compiled code is waited for, seconds once on a machine; smaller ones are fast."""


@dataclass(frozen=True, kw_only=True)
class People:
    """The users' models of a run by name, and whether they answer (in turns) or continue a text.

    They answer where they were trained on conversations, or their base has a chat template.
    """

    models: dict[str, PersonalModel]
    answers: bool


def open_people(run: Path, method: str | None = None) -> People:
    """The users' models of a finished run; of a comparison's folder, the run of ``method``.

    Raises:
        RunError: no finished run, or several and ``method`` does not say which.
        DataError: the models are nets, which say nothing.
        BaseModelError: the base is gone or has changed.
    """
    folder = find_run(run, method)
    opened = load(folder)
    if not kind_of(opened.recipe).needs_base:
        raise DataError(f"{folder}: {opened.federation.clients.model.name} predicts and generates no text")
    models = {name: cast(PersonalModel, opened.user(name)) for name in opened.users}
    base = next(iter(models.values())).model.base
    wanted = opened.recipe.runtime.compile is not False and base.model.num_parameters() >= WORTH_COMPILING
    if wanted and expert_mlp.fits(base.device, base.dtype):
        expert_mlp.enable(cache_folder() / "native")
    prepare(base.model)
    template = getattr(base.tokenizer, "chat_template", None)
    return People(models=models, answers=kind_of(opened.recipe).name in TURNS or bool(template))


def names_in(run: Path) -> list[str]:
    """Who is in a run, without its models.

    Raises:
        RunError: not a finished run.
    """
    scored = list(read_metrics(run)["users"])  # of a sample, where the recipe says evaluation.users
    return list(read_inputs(run).users) or scored  # of a population on disk inputs name nobody
