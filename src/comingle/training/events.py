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

    Args:
        names: Names of trackers, which are those of their packages: "wandb", "mlflow".

    Raises:
        RecipeError: A package is not installed.
    """
    commands = {"wandb": "pip install 'comingle[wandb]'", "mlflow": "pip install 'comingle[mlflow]'"}
    for name in names:
        is_installed = importlib.util.find_spec(name) is not None
        if not is_installed:
            raise RecipeError(f"runtime.track: {name} is not installed: {commands[name]}")


MAX_SERIES = 100
"""Largest number of users with a series of their own in TensorBoard, Weights & Biases and MLflow."""

_QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "largest": 1.0}


class QuantileTracker:
    """A tracker that records quantiles over users; for runs with more than :data:`MAX_SERIES` users."""

    def __init__(self, tracker: Tracker):
        """Create a tracker that passes quantiles over users to another one, instead of each user's values.

        Args:
            tracker: Records the quantiles, for example with TensorBoard.
        """
        self._tracker = tracker
        self.close = tracker.close

    def __call__(self, event: Event) -> None:
        """Record one event of the run, with quantiles over users in place of each user's values."""
        self._tracker(to_quantiles(event))


def to_quantiles(event: Event) -> Event:
    """Return an event in which the minimum, three quantiles, the maximum and the mean replace the values of users.

    The quantiles are 10%, 50% and 90%. The mean is added where the event has none.

    >>> to_quantiles({"event": "round", "train_loss_nats": {"ann": 1.0, "bob": 3.0}})["train_loss_nats"]["mean"]
    2.0
    """
    if event["event"] == "round" and event["train_loss_nats"]:
        losses = event["train_loss_nats"].values()
        return {**event, "train_loss_nats": {"mean": fmean(losses), **_quantiles(losses)}}
    if event["event"] == "evaluation" and event["users"]:
        measure = f"test_{measure_of(event)}"
        quantiles = _quantiles([scores[measure] for scores in event["users"].values()])
        scores_by_quantile = {name: {measure: value} for name, value in quantiles.items()}  # "median" and others
        return {**event, "users": scores_by_quantile, **_mean_expert_scores(event)}
    return event


def _quantiles(values: Collection[float]) -> dict[str, float]:
    """Return the quantiles of some values by name, such as ``{"least": 1.0, ..., "largest": 3.0}``."""
    probabilities = list(_QUANTILES.values())
    # Each quantile is one of the values: interpolating with an infinite loss is undefined.
    quantiles = np.quantile(np.fromiter(values, float), probabilities, method="nearest")
    return dict(zip(_QUANTILES, quantiles.tolist(), strict=True))


def _mean_expert_scores(event: Event) -> Event:
    """Return the entries of an evaluation event with the mean expert scores over users, in place of each user's.

    For example ``{"expert_scores": {"mean": [[0.7, 0.3], ...]}, "experts": {"mean": ["generalist", "specialist"]}}``,
    with a list per layer. If users have experts of different names there is no mean, and the scores are left out.
    """
    scores_by_user = event.get("expert_scores")  # (layers, experts) of each user
    if not scores_by_user:
        return {}
    names_of_users = [event["experts"][user] for user in scores_by_user]
    expert_names = names_of_users[0]
    if any(names != expert_names for names in names_of_users):
        return {"expert_scores": {}}
    means = []  # (layers, experts)
    for scores_in_layer in zip(*scores_by_user.values(), strict=True):  # (users, experts)
        scores_by_expert = zip(*scores_in_layer, strict=True)  # (experts, users)
        means.append([fmean(scores_of_users) for scores_of_users in scores_by_expert])
    return {"expert_scores": {"mean": means}, "experts": {"mean": expert_names}}


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
        """Open the log, and delete all events after the first ``keep_bytes`` bytes.

        Args:
            path: The log; made if it does not exist.
            keep_bytes: Size in bytes that a checkpoint recorded, to resume a run from it; 0 for a new run.
        """
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
            written_bytes = 0
            while written_bytes < len(line):  # the system may write a part only
                written_bytes += self._file.write(line[written_bytes:])
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
    """Open a file like :func:`os.open`, but raise an error if the path is a symbolic link."""
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
        if size == 0:
            state = "missing or empty; started anew"
        else:
            state = f"truncated after {size} bytes, its last complete line"
        logger.warning("%s: %s; %d bytes were expected, so reports lack the lost events", path, state, expected)
    return size


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event that trackers plot, by name, such as ``train_loss_nats/ann``.

    They are the losses, test results and expert scores of each user, their means, and epsilon; empty for other events.
    """
    values: dict[str, float] = {}
    if event["event"] == "round":
        for user, loss in event["train_loss_nats"].items():
            values[f"train_loss_nats/{user}"] = loss
        if event["seconds"]:  # rounds without participants take no time
            values["tokens_per_second"] = event["tokens"] / event["seconds"]
    elif event["event"] == "privacy":
        values["epsilon"] = event["epsilon"]
    elif event["event"] == "evaluation":
        measure = f"test_{measure_of(event)}"
        for user, scores in event["users"].items():
            values[f"{measure}/{user}"] = scores[measure]
        for mean in (f"mean_{measure}", GEOMETRIC):
            if event.get(mean) is not None:
                values[mean] = event[mean]
        values.update(_expert_scalars(event))
    return values


def _expert_scalars(event: Event) -> dict[str, float]:
    """Return the mean score over layers of each expert of each user: ``{"expert_score/ann/generalist": 0.7}``."""
    means: dict[str, float] = {}
    for user, scores_by_layer in event.get("expert_scores", {}).items():
        for number, expert in enumerate(event["experts"][user]):
            scores = [scores_of_layer[number] for scores_of_layer in scores_by_layer]
            means[f"expert_score/{user}/{expert.replace(' ', '_')}"] = sum(scores) / len(scores)
    return means


class TensorBoard:
    """Tracker that writes TensorBoard event files; needs the extra ``reports``."""

    def __init__(self, folder: Path):
        """Make a writer of event files in a folder; raise an ``ImportError`` if the package is missing."""
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
        """Start a run of Weights & Biases with the recipe as its configuration."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            group=run.group,
            config=run.recipe,
            reinit="create_new",
        )
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Record one event."""
        if event["event"] == "end":
            self._ended = True
        values = scalars(event)
        if values:
            self._run.log(values, step=event["round"])

    def close(self) -> None:
        """Send remaining data; mark the run as failed if it has not ended."""
        self._run.finish(exit_code=0 if self._ended else 1)


class MLflow:
    """Tracker of MLflow that stores the recipe as ``recipe.yaml``; needs the extra ``mlflow``."""

    def __init__(self, run: TrackedRun):
        """Start a run of MLflow in its experiment, which is made if it does not exist, and store the recipe."""
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.MlflowClient()
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(experiment_name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(experiment_name)
        created_run = self._client.create_run(experiment_id, run_name=run.name, tags={"comparison": run.group})
        self._run_id = created_run.info.run_id
        self._client.log_text(self._run_id, run.text, "recipe.yaml")
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Record one event."""
        if event["event"] == "end":
            self._ended = True
        for name, value in scalars(event).items():
            self._client.log_metric(self._run_id, mlflow_name(name), value, step=event["round"])

    def close(self) -> None:
        """End the run; mark it as failed if it has not ended."""
        status = "FINISHED" if self._ended else "FAILED"
        self._client.set_terminated(self._run_id, status)


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: other characters, as in names of users, become their code point.

    >>> mlflow_name("test_perplexity/b<b>ob")
    'test_perplexity/b_3c_b_3e_ob'
    """

    def code_point(match: re.Match[str]) -> str:
        """Return ``"_3c_"`` for the character ``"<"``."""
        return f"_{ord(match[0]):x}_"

    return re.sub(r"[^\w\-. :/]", code_point, name)
