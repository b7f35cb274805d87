"""Events of a run: events.jsonl, TensorBoard, Weights & Biases and MLflow.

Trackers get the recipe, and the losses and scores of each user by name, never a user's data. Their own environment
variables, such as ``WANDB_MODE`` and ``MLFLOW_TRACKING_URI``, decide where these are sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import numpy as np

from comingle.utils.errors import RecipeError
from comingle.utils.records import GEOMETRIC, finite, logger, measure_of
from comingle.utils.registry import Registry

JsonObject = dict[str, Any]
"""A JSON object, such as a run's metrics. The type of a value follows from its key, so it is not stated."""

JsonMapping = Mapping[str, Any]
"""A JSON object that is only read."""

Event = JsonObject
"""One line of events.jsonl."""

AN_EVENT = {"is_an_event": True}
"""Extra fields of a log record whose warning is an event as well."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before it begins: its name, that of the comparison around it, and its recipe."""

    name: str
    group: str
    recipe: JsonObject
    text: str
    """The recipe as YAML."""


@runtime_checkable
class Tracker(Protocol):
    """An observer that has an end."""

    def __call__(self, event: Event) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """Send what is left; a run that has not ended has failed."""
        ...


TRACKERS: Registry[Callable[[TrackedRun], Tracker]] = Registry(
    "comingle.trackers",
    {"wandb": "comingle.training.events:WeightsAndBiases", "mlflow": "comingle.training.events:MLflow"},
)
"""What makes a tracker of a run, under the name of the package that it needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Whether the packages are installed.

    Raises:
        RecipeError: one is not.
    """
    extras = {"wandb": "pip install 'comingle[wandb]'", "mlflow": "pip install 'comingle[mlflow]'"}
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(f"runtime.track: {name} is not installed: {extras[name]}")


MAX_SERIES = 100
"""Users of a run up to whom each has numbers of their own in TensorBoard, Weights & Biases and MLflow."""

_QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "largest": 1.0}


class QuantileTracker:
    """A tracker of a run of more users than can be looked at one by one."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self.close = tracker.close

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._tracker(to_quantiles(event))


def to_quantiles(event: Event) -> Event:
    """The event with least, 10%, 50%, 90% and largest in the place of users' names, and the mean where that is missing.

    >>> spread({"event": "round", "train_loss_nats": {"ann": 1.0, "bob": 3.0}})["train_loss_nats"]["mean"]
    2.0
    """
    if event["event"] == "round" and event["train_loss_nats"]:
        losses = event["train_loss_nats"].values()
        return event | {"train_loss_nats": {"mean": fmean(losses)} | _quantiles(losses)}
    if event["event"] != "evaluation" or not event["users"]:
        return event
    name = f"test_{measure_of(event)}"
    scores = _quantiles([score[name] for score in event["users"].values()])
    return event | {"users": {part: {name: value} for part, value in scores.items()}} | _experts(event)


def _quantiles(values: Collection[float]) -> dict[str, float]:
    # As numbers that there are: what diverged is infinite, and nothing lies between that and another.
    found = np.quantile(np.fromiter(values, float), list(_QUANTILES.values()), method="nearest")
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def _experts(event: Event) -> Event:
    """Experts' scores as a mean over users, where all have experts of the same names; else nothing of them."""
    scores = event.get("expert_scores")
    if not scores:
        return {}
    names = [event["experts"][user] for user in scores]
    if any(other != names[0] for other in names):
        return {"expert_scores": {}}
    layers = zip(*scores.values(), strict=True)
    means = [[fmean(of_expert) for of_expert in zip(*layer, strict=True)] for layer in layers]
    return {"expert_scores": {"mean": means}, "experts": {"mean": names[0]}}


Observer = Callable[[Event], None]
"""Receives every event: ``{"event": NAME, ...}``. "step" events only tell of progress and are not kept."""


class EventLog:
    """Appends events to a file, one JSON object a line, each with the system at once.

    ``size_bytes`` goes into each checkpoint, after :meth:`to_disk`: on resume the file is cut there, so that rounds
    which are run again do not appear twice, and a line torn by a crash disappears. A file that has lost something since
    is cut at its last whole line, which is told; never is it filled up or written through a link.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0):
        self._file = open(path, "a+b", buffering=0, opener=_open_unlinked)  # noqa: SIM115
        self._file.seek(0)
        self.size_bytes = _whole(path, self._file.read(keep_bytes), keep_bytes)
        self._file.truncate(self.size_bytes)

    def __call__(self, event: Event) -> None:
        """Take one event.

        Raises:
            OSError: the disk does not take it; what it took is removed again.
        """
        if event["event"] == "step":
            return
        line = (json.dumps(finite(event)) + "\n").encode()
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += len(line)

    def to_disk(self) -> None:
        """Return when everything so far would outlive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open_unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _whole(path: Path, kept: bytes, expected: int) -> int:
    """How many bytes of a log are whole lines, of as many as a checkpoint expects; told if it is fewer."""
    size = kept.rfind(b"\n") + 1
    if size < expected:
        state = f"cut after {size} bytes, its last whole line" if size else "missing or empty, so begun anew"
        logger.warning("%s: %s; %d bytes were written, and reports lack what is lost", path, state, expected)
    return size


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by name: losses, test results and expert scores of each user, and means."""
    if event["event"] == "round":
        found = {f"train_loss_nats/{user}": loss for user, loss in event["train_loss_nats"].items()}
        # Somebody took part:
        return found | ({"tokens_per_second": event["tokens"] / event["seconds"]} if event["seconds"] else {})
    if event["event"] == "privacy":
        return {"epsilon": event["epsilon"]}
    if event["event"] != "evaluation":
        return {}
    name = f"test_{measure_of(event)}"
    users = {f"{name}/{user}": score[name] for user, score in event["users"].items()}
    means = {mean: event[mean] for mean in (f"mean_{name}", GEOMETRIC) if event.get(mean) is not None}
    return users | means | _expert_scalars(event)


def _expert_scalars(event: Event) -> dict[str, float]:
    """Each expert's score, mean over layers."""
    return {
        f"expert_score/{user}/{expert.replace(' ', '_')}": sum(scores) / len(scores)
        for user, layers in event.get("expert_scores", {}).items()
        for expert, *scores in zip(event["experts"][user], *layers, strict=True)
    }


class TensorBoard:
    """Writes losses, test perplexities and expert scores to TensorBoard event files; needs the extra ``reports``."""

    def __init__(self, folder: Path):
        # torch's own writer needs nothing but the tensorboard package.
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        """Take one event."""
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["round"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def tensorboard(folder: Path) -> TensorBoard | None:
    """A TensorBoard writer, or None (said once in the log) where the package is missing."""
    try:
        return TensorBoard(folder)
    except ImportError:
        logger.info("no TensorBoard files: pip install 'comingle[reports]'")
        return None


PROJECT = "comingle"
"""The project or experiment of runs, unless ``WANDB_PROJECT`` or ``MLFLOW_EXPERIMENT_NAME`` says another."""


class WeightsAndBiases:
    """A run of Weights & Biases; needs the extra ``wandb``."""

    def __init__(self, run: TrackedRun):
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = importlib.import_module("wandb").init(
            project=project, name=run.name, group=run.group, config=run.recipe, reinit="create_new"
        )
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._ended = self._ended or event["event"] == "end"
        if values := scalars(event):
            self._run.log(values, step=event["round"])

    def close(self) -> None:
        """Send what is left; a run that has not ended has failed."""
        self._run.finish(exit_code=0 if self._ended else 1)


class MLflow:
    """A run of MLflow, with the recipe as ``recipe.yaml``; needs the extra ``mlflow``."""

    def __init__(self, run: TrackedRun):
        self._client = importlib.import_module("mlflow").MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = {"comparison": run.group}
        self._run = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        self._client.log_text(self._run, run.text, "recipe.yaml")
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._ended = self._ended or event["event"] == "end"
        for name, value in scalars(event).items():
            self._client.log_metric(self._run, mlflow_name(name), value, step=event["round"])

    def close(self) -> None:
        """Say that the run is over; one that has not ended has failed."""
        self._client.set_terminated(self._run, "FINISHED" if self._ended else "FAILED")


def mlflow_name(name: str) -> str:
    """A name that MLflow takes: other characters, as a user's name may have, become their number.

    >>> allowed("test_perplexity/b<b>ob")
    'test_perplexity/b_3c_b_3e_ob'
    """
    return re.sub(r"[^\w\-. :/]", lambda found: f"_{ord(found[0]):x}_", name)
