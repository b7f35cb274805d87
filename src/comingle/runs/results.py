"""Results of a run in a program: its metrics, its events and all users' models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comingle.config import Recipe
from comingle.data.samples.samples import SPLITS
from comingle.models.hardware import torch_defaults
from comingle.models.personal import Gates, Losses, ModelInfo, Personal, PersonalModel
from comingle.reports.formatting import html_of
from comingle.reports.tables import curve_svg, render_run
from comingle.training.backends.local import InProcess
from comingle.training.batch_sources import AnyScore
from comingle.training.checkpoints import personal_tensors
from comingle.training.client import finetuned
from comingle.training.cohort import Models
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import DataError, RunError, require_user
from comingle.utils.records import JsonMapping, JsonObject, describe_metrics, read_events
from comingle.utils.terminal import printable

if TYPE_CHECKING:
    import pandas

_SPLIT_SIZES = tuple(f"{split}_{unit}" for split in SPLITS for unit in ("tokens", "samples"))
"""Keys of a user's metrics that give the size of its splits."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its folder, its metrics and all users' models."""

    folder: Path | None
    recipe: Recipe
    metrics: JsonObject
    federation: InProcess
    local: InProcess | None = field(default=None, repr=False)
    """The users as they have trained alone; None without ``evaluation.guard``."""
    shared: Models | None = field(default=None, repr=False)
    """The models that users are served as "shared", if a client has saved them; None if the server has them."""
    events_in_memory: tuple[JsonObject, ...] = field(default=(), repr=False)
    """The events of a run without a folder."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings of the kind of data: for samples their shapes, classes, loss and net."""

    def __repr__(self) -> str:
        folder_text = "" if self.folder is None else f", in {self.folder}"
        return printable(f"Run({describe_metrics(self.metrics)}{folder_text})")

    def _repr_html_(self) -> str:
        """Return the table of users of ``comingle show`` and the learning curve, for a notebook."""
        return html_of([render_run(self.metrics)]) + curve_svg(self.events)

    @property
    def events(self) -> list[JsonObject]:
        """The events in order, as in ``events.jsonl``: ``event`` is start, round, evaluation or end."""
        if self.folder is None:
            return list(self.events_in_memory)
        return list(read_events(self.folder))

    def records(self) -> list[JsonObject]:
        """Return one record per user.

        The keys of a record are ``user``, the test result (such as ``test_perplexity``), the amount of data of each
        split, the number of trained parameters and the bytes uploaded in a round.
        """
        return records_of(self.metrics)

    def to_pandas(self) -> pandas.DataFrame:
        """Return :meth:`records` as a table with a row for each user.

        Raises:
            RunError: Pandas is not installed.
        """
        return table_of(self.records())

    @property
    def users(self) -> list[str]:
        """Names of the users."""
        return list(self.federation.clients.users.names)

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of the net's outputs; empty if the classes have no names."""
        return list(self.settings.get("labels", ()))

    @torch_defaults()
    def user(self, name: str) -> Personal:
        """Return the model of a user: a language model that generates text, or a net that predicts.

        With ``evaluation.guard`` it is the model that the user is served.

        Raises:
            DataError: There is no such user.
        """
        from comingle.runs.guard import LOCAL, PERSONAL, SHARED, shared_models

        require_user(name, self.users)
        model = self.federation.clients.model
        number = self.users.index(name)
        served = self.metrics.get("served", {}).get(name, {}).get("model", PERSONAL)
        clients = self.federation.clients if served != LOCAL or self.local is None else self.local.clients
        row = clients.row_of[number]  # the index of the user's model in the stacked tensors of all models
        (trainer,) = clients.trainers_of([row])  # who trains this model: the user's number, or 0 if all users share one
        if served == SHARED:
            shared = shared_models(self.federation) if self.shared is None else self.shared
            stored_tensors = model.layout.views(shared.parameters_of([number]))
        else:
            # Methods that fine-tune at the end do so here, for this user only and while its tensors are copied.
            with finetuned(clients, trainers=[trainer]):
                stored_tensors = personal_tensors(model.layout, clients.state, row)
        tensors = {tensor_name: tensor.to(model.dtype) for tensor_name, tensor in stored_tensors.items()}
        kind = kind_of(self.recipe)
        personal = kind.personal(name, model, tensors, trainer)
        personal = kind.with_inputs(personal, self.recipe, self.settings)  # adds how a net reads its inputs
        if isinstance(personal, PersonalModel):
            return replace(personal, model_info=self._model_info(name))
        return kind.with_test_data(personal, lambda: clients.users[number].test)

    def _model_info(self, name: str) -> ModelInfo:
        """Return the method, amounts of data, test scores and a validation function of a user's language model."""
        from comingle.runs.guard import test_scores_of

        clients = self.federation.clients
        metrics = self.metrics.get("users", {}).get(name, {})
        served = self.metrics.get("served", {}).get(name)  # with evaluation.guard
        test_scores = test_scores_of(metrics if served is None else served)
        split_sizes = {key: metrics[key] for key in _SPLIT_SIZES if metrics.get(key)}

        def validate(losses: Losses, gates: Gates | None) -> AnyScore:
            """Return the score of a model, such as an exported one, on the user's validation data.

            Args:
                losses: Computes the model's loss of each token.
                gates: Returns the weight of each expert for these tokens; None if their means are not needed.
            """
            user = clients.users[self.users.index(name)]
            if not len(user.valid):
                raise DataError(f"user {name!r}: no validation data")
            (score,) = clients.steps.batch_source.score(
                losses,
                splits=[user.valid],
                model_numbers=[0],  # `losses` has only one model
                pass_size=clients.pass_size,
                gates=gates,
            )
            return score

        return ModelInfo(
            method=self.metrics.get("method", self.recipe.method.name),
            kind=self.recipe.data.label,
            users=len(self.users),
            counts=split_sizes,
            scores=test_scores,
            validate=validate,
        )


def records_of(metrics: JsonMapping) -> list[JsonObject]:
    """Return a run's metrics as one record per user."""
    return [{"user": name, **metrics_of_user} for name, metrics_of_user in metrics["users"].items()]


def table_of(records: Sequence[JsonMapping]) -> pandas.DataFrame:
    """Return records, such as :func:`records_of`, as a pandas table with a row for each.

    Raises:
        RunError: Pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise RunError(
            "to_pandas needs the package pandas: pip install pandas; records() returns the same without it"
        ) from None
    return pandas.DataFrame.from_records(list(records))
