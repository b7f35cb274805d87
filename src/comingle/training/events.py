"""Events of a run: events.jsonl, TensorBoard, Weights & Biases and MLflow.

Trackers receive the recipe, and the losses and scores of each user by name; they never receive users' data. Their own
environment variables, such as ``WANDB_MODE`` and ``MLFLOW_TRACKING_URI``, decide where these are sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol, runtime_checkable

import numpy as np

from comingle.utils.errors import RecipeError
from comingle.utils.records import GEOMETRIC, JsonObject, finite, logger, measure_of
from comingle.utils.registry import Registry

Event = JsonObject
"""One line of events.jsonl."""

AN_EVENT = {"is_an_event": True}
"""Extra fields of a log record for a warning that is also logged as an event."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Description of a run for its tracker.

    Attributes:
        name: Name of the run.
        group: Name of its comparison.
        recipe: The recipe.
        text: The recipe as YAML.
    """

    name: str
    group: str
    recipe: JsonObject
    text: str


@runtime_checkable
class Tracker(Protocol):
    """An observer that is closed at the end of a run."""

    def __call__(self, event: Event) -> None:
        """Record one event."""
        ...

    def close(self) -> None:
        """Send remaining data; mark the run as failed if it has not ended."""
        ...


TRACKERS: Registry[Callable[[TrackedRun], Tracker]] = Registry(
    "comingle.trackers",
    {"wandb": "comingle.training.events:WeightsAndBiases", "mlflow": "comingle.training.events:MLflow"},
)
"""Factories of trackers, by the name of the package that they need."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        RecipeError: A package is not installed.
    """
    extras = {"wandb": "pip install 'comingle[wandb]'", "mlflow": "pip install 'comingle[mlflow]'"}
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(f"runtime.track: {name} is not installed: {extras[name]}")


MAX_SERIES = 100
"""Largest number of users with a series of their own in TensorBoard, Weights & Biases and MLflow."""

_QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "largest": 1.0}


class QuantileTracker:
    """A tracker that records quantiles over users; for runs with more than :data:`MAX_SERIES` users."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self.close = tracker.close

    def __call__(self, event: Event) -> None:
        """Record one event."""
        self._tracker(to_quantiles(event))


def to_quantiles(event: Event) -> Event:
    """Return an event in which the minimum, three quantiles, the maximum and the mean replace the values of users.

    The quantiles are 10%, 50% and 90%. The mean is added where the event has none.

    >>> to_quantiles({"event": "round", "train_loss_nats": {"ann": 1.0, "bob": 3.0}})["train_loss_nats"]["mean"]
    2.0
    """
    if event["event"] == "round" and event["train_loss_nats"]:
        losses = event["train_loss_nats"].values()
        return event | {"train_loss_nats": {"mean": fmean(losses)} | _quantiles(losses)}
    if event["event"] != "evaluation" or not event["users"]:
        return event
    name = f"test_{measure_of(event)}"
    quantiles = _quantiles([score[name] for score in event["users"].values()])
    users = {quantile: {name: value} for quantile, value in quantiles.items()}  # under names such as "median"
    return event | {"users": users} | _mean_expert_scores(event)


def _quantiles(values: Collection[float]) -> dict[str, float]:
    # Use existing values: interpolating with an infinite loss is undefined.
    found = np.quantile(np.fromiter(values, float), list(_QUANTILES.values()), method="nearest")
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def _mean_expert_scores(event: Event) -> Event:
    """Return the entries of an evaluation event with the mean expert scores over users, in place of each user's.

    If users have experts of different names there is no mean, and the scores are left out.
    """
    scores = event.get("expert_scores")  # by user: (layers, experts)
    if not scores:
        return {}
    names = [event["experts"][user] for user in scores]
    if any(other != names[0] for other in names):
        return {"expert_scores": {}}
    means = []
    for users_scores_of_layer in zip(*scores.values(), strict=True):
        means.append([fmean(scores_of_expert) for scores_of_expert in zip(*users_scores_of_layer, strict=True)])
    return {"expert_scores": {"mean": means}, "experts": {"mean": names[0]}}


Observer = Callable[[Event], None]
"""Receives every event: ``{"event": NAME, ...}``. "step" events only report progress and are not stored."""


class EventLog:
    """Appends events to a file, one JSON object per line, each with a single system call.

    Each checkpoint records ``size_bytes``, after :meth:`to_disk`. On resume the file is truncated to it, so that
    repeated rounds do not appear twice, and a line that a crash left incomplete is removed. If the file is shorter than
    that, it is truncated after its last whole line, with a warning. It is never padded, and never written through a
    link.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0):
        self._file = open(path, "a+b", buffering=0, opener=_open_unlinked)  # noqa: SIM115
        self._file.seek(0)
        self.size_bytes = _whole_lines_bytes(path, self._file.read(keep_bytes), keep_bytes)
        self._file.truncate(self.size_bytes)

    def __call__(self, event: Event) -> None:
        """Append one event.

        Raises:
            OSError: The disk cannot be written to; the incomplete line is removed.
        """
        if event["event"] == "step":  # only for progress bars: a step may take milliseconds
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
        """Flush all events to disk, so that they survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open_unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _whole_lines_bytes(path: Path, content: bytes, expected: int) -> int:
    """Return the size in bytes of the complete lines of a log; warn if it is less than a checkpoint expects.

    Args:
        path: The log, for the warning.
        content: The log as it was read, at most ``expected`` bytes.
        expected: Size of the log in bytes that a checkpoint recorded.
    """
    size = content.rfind(b"\n") + 1
    if size < expected:
        state = f"truncated after {size} bytes, its last complete line" if size else "missing or empty; started anew"
        logger.warning("%s: %s; %d bytes were expected, so reports lack the lost events", path, state, expected)
    return size


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event that trackers plot, by name, such as ``train_loss_nats/ann``.

    They are the losses, test results and expert scores of each user, their means, and epsilon; empty for other events.
    """
    if event["event"] == "round":
        found = {f"train_loss_nats/{user}": loss for user, loss in event["train_loss_nats"].items()}
        # Rounds without participants take no time.
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
    """Return the mean score over layers of each expert of each user, by name."""
    means = {}
    for user, layers in event.get("expert_scores", {}).items():
        for expert, *scores_by_layer in zip(event["experts"][user], *layers, strict=True):
            name = f"expert_score/{user}/{expert.replace(' ', '_')}"
            means[name] = sum(scores_by_layer) / len(scores_by_layer)
    return means


class TensorBoard:
    """Tracker that writes TensorBoard event files; needs the extra ``reports``."""

    def __init__(self, folder: Path):
        # The writer of torch needs only the tensorboard package.
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        """Record one event."""
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["round"])

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def tensorboard(folder: Path) -> TensorBoard | None:
    """Return a TensorBoard tracker; None, with a log line, if the package is missing."""
    try:
        return TensorBoard(folder)
    except ImportError:
        logger.info("no TensorBoard files: pip install 'comingle[reports]'")
        return None


PROJECT = "comingle"
"""Default project or experiment; ``WANDB_PROJECT`` and ``MLFLOW_EXPERIMENT_NAME`` override it."""


class WeightsAndBiases:
    """Tracker of Weights & Biases; needs the extra ``wandb``."""

    def __init__(self, run: TrackedRun):
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = importlib.import_module("wandb").init(
            project=project, name=run.name, group=run.group, config=run.recipe, reinit="create_new"
        )
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Record one event."""
        self._ended = self._ended or event["event"] == "end"
        if values := scalars(event):
            self._run.log(values, step=event["round"])

    def close(self) -> None:
        """Send remaining data; mark the run as failed if it has not ended."""
        self._run.finish(exit_code=0 if self._ended else 1)


class MLflow:
    """Tracker of MLflow that stores the recipe as ``recipe.yaml``; needs the extra ``mlflow``."""

    def __init__(self, run: TrackedRun):
        self._client = importlib.import_module("mlflow").MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        tags = {"comparison": run.group}
        self._run = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        self._client.log_text(self._run, run.text, "recipe.yaml")
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Record one event."""
        self._ended = self._ended or event["event"] == "end"
        for name, value in scalars(event).items():
            self._client.log_metric(self._run, mlflow_name(name), value, step=event["round"])

    def close(self) -> None:
        """End the run; mark it as failed if it has not ended."""
        self._client.set_terminated(self._run, "FINISHED" if self._ended else "FAILED")


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: other characters, as in names of users, become their code point.

    >>> mlflow_name("test_perplexity/b<b>ob")
    'test_perplexity/b_3c_b_3e_ob'
    """
    return re.sub(r"[^\w\-. :/]", lambda found: f"_{ord(found[0]):x}_", name)
