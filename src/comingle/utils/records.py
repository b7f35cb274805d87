"""Files that a run writes: plain records that reports can read without torch.

A run folder holds ``recipe.yaml``, ``inputs.json`` (:mod:`comingle.utils.inputs`), ``events.jsonl`` (one event per
line, in order), ``metrics.json`` (written at the end) and ``checkpoints/round-NNNN/``.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comingle.utils.errors import RunError

logger = logging.getLogger("comingle")

JsonObject = dict[str, Any]
"""A JSON object, such as a run's metrics. The type of a value follows from its key, so it is not stated."""

JsonMapping = Mapping[str, Any]
"""A read-only JSON object."""

DRAFT = ".draft"
"""Suffix of the temporary name of a file that is being written."""

_DISK_ERRORS = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "EIO", "ELOOP", "ENOTDIR", "ENAMETOOLONG")
    if hasattr(errno, name)
}

MEASURES = {"perplexity": "lower", "accuracy": "higher", "exact_match": "higher", "rouge1": "higher", "loss": "lower"}
"""Measures by which models are compared, and whether lower or higher is better."""
SHARES = ("accuracy", "exact_match")
"""Measures from 0 to 1 that are shown in per cent."""
GEOMETRIC = "geometric_mean_test_perplexity"
"""Key beside ``mean_test_perplexity``: the exponential of the mean loss over users, which is robust to outliers."""


PARTICIPANTS = "participants.json"
"""File in the run folder of a federation with the state of its participants."""

_MAX_NAME_BYTES, _MAX_SHOWN = 255, 200


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return the path with a leading ``~`` or ``~NAME`` replaced by that user's home directory.

    Raises:
        RunError: There is no such user, or the current one has no home directory, as in a container without ``HOME``.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")  # empty for the current user
        why = f"no user {user} on this machine" if user else "no home directory (HOME is not set)"
        raise RunError(f"{os.fspath(path)}: {why}; give the full path") from None


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """Test results of a run's users.

    ``measure`` is the measure by which models are compared: each user has ``test_<measure>``, and ``mean`` is over
    users. ``unit`` is the unit of the data, tokens or samples: each user has ``train_<unit>`` and so on.
    ``selected_round`` is the round whose models the run ended with.
    """

    method: str
    seed: int
    base: str
    rounds: int
    selected_round: int
    measure: str
    unit: str
    users: dict[str, dict[str, float | int | None]]
    mean: float


@dataclass(frozen=True, kw_only=True)
class Metrics(RunScores):
    """The result of a run: its scores and their cost.

    ``per_second`` counts tokens or samples over the time of local steps. ``planned_rounds`` is the number of rounds
    of a run that its privacy budget ended earlier, otherwise None.
    """

    upload_bytes_per_user_round: float
    download_bytes_per_user_round: float
    trainable_parameters: int
    per_second: float
    wall_seconds: float
    peak_memory_bytes: int
    dtype: str
    device: str
    planned_rounds: int | None = None

    def as_dict(self) -> JsonObject:
        """Return the content of ``metrics.json``: the fields that are not None, by name.

        Two fields have other keys: ``mean`` becomes ``mean_test_<measure>``, such as ``mean_test_perplexity``, and
        ``per_second`` becomes ``<unit>_per_second``, such as ``tokens_per_second``. If the measure is perplexity, the
        geometric mean over users is added.
        """
        content = {key: value for key, value in asdict(self).items() if value is not None}
        content[f"mean_test_{self.measure}"] = content.pop("mean")
        content.update(geometric(self.users, self.measure))
        content[f"{self.unit}_per_second"] = content.pop("per_second")
        return content


def check_name(folder: Path) -> None:
    """Check that a folder of this name can be created, without creating it, before the results for it are computed.

    Raises:
        RunError: The name is too long for the file system, contains a NUL, or is below a file.
    """
    for parent in folder.parents:
        if os.path.isfile(parent):
            raise RunError(f"{folder}: cannot be a folder: {parent} is a file")
    reason = _refusal_of_name(folder)
    if reason:
        shown = str(folder)
        if len(shown) > _MAX_SHOWN:
            shown = shown[:_MAX_SHOWN] + "..."
        raise RunError(f"{shown}: cannot be a folder: {reason}")


def _refusal_of_name(folder: Path) -> str:
    """Return why no folder of this name can be created, such as "File name too long"; empty if it can."""
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        # If parent folders are missing too, the system has not looked at the length of the last part.
        is_too_long = any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in folder.parts)
        return os.strerror(errno.ENAMETOOLONG) if is_too_long else ""
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a NUL
        return str(error)
    return ""


def measure_of(record: Container[str]) -> str:
    """Return the measure that ranks models, such as perplexity, from the keys of a record of results.

    Args:
        record: A run's metrics, an evaluation, or a comparison's row, with a key such as ``mean_test_perplexity``.
    """
    return next(name for name in MEASURES if f"mean_test_{name}" in record)


def number(value: float | None, measure: str = "perplexity") -> str:
    """Format the value of a measure: accuracy in per cent, losses and ROUGE-1 with three digits, others with two.

    None, which stands for NaN or infinity, becomes "not finite".
    """
    if value is None:
        return "not finite"
    if measure in SHARES:
        return f"{100 * value:,.1f}%"
    if measure == "rouge1":
        return f"{value:.3f}"
    if measure == "loss":
        return f"{value:,.3g}"
    return f"{value:,.2f}"


def geometric(users: Mapping[str, Mapping[str, float | None]], measure: str) -> dict[str, float | None]:
    """Return the geometric mean of the users' test perplexities, as ``{"geometric_mean_test_perplexity": 12.3}``.

    The result is empty for other measures. The mean is None if a perplexity is not finite.

    Args:
        users: Results by user name, such as ``{"ann": {"test_perplexity": 12.3}}``.
        measure: Measure of the results.
    """
    if measure != "perplexity":
        return {}
    perplexities = [results["test_perplexity"] for results in users.values()]
    return {GEOMETRIC: geometric_mean(perplexities)}


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return ``exp(mean(log(value)))``; None if a value is not finite or not positive, or if there are no values."""
    import statistics  # slow to import, and most commands need no mean

    valid = [value for value in values if value is not None and 0 < value < math.inf]
    if not valid or len(valid) < len(values):
        return None
    return statistics.geometric_mean(valid)


def describe_sample(record: JsonMapping) -> str:
    """Return a text about a mean over a sample of the users, with its 95% interval; empty for a mean over all users.

    For example "mean of 50 of 1,000 users, 95% interval 11.20 to 12.10".

    Args:
        record: A run's metrics or an evaluation, with the key ``sample`` if only a sample was evaluated.
    """
    if "sample" not in record:
        return ""
    sample = record["sample"]
    size = f"mean of {sample['users']:,} of {sample['of']:,} users"
    if sample["interval"] is None:
        return size
    measure = measure_of(record)
    low, high = sample["interval"]
    return f"{size}, 95% interval {number(low, measure)} to {number(high, measure)}"


def describe_privacy(privacy: JsonMapping) -> str:
    """Return a run's privacy as text: mechanism, epsilon, delta, noise multiplier, clip norm, number of releases.

    A release is one sum of private data that is published with noise, such as the mean change of a round.

    Args:
        privacy: Entry ``privacy`` of the run's metrics.
    """
    epsilon = privacy["epsilon"]
    has_bound = epsilon is not None and math.isfinite(epsilon)  # JSON has None in place of infinity
    spent = f"epsilon {epsilon:.4g}" if has_bound else "no bound on epsilon"
    if earlier := privacy.get("earlier_epsilon"):
        spent += f" of all runs together ({earlier:.4g} before this one)"
    noise = f"noise multiplier {privacy['noise_multiplier']:.3g}, clip norm {privacy['clip_norm']:.3g}"
    return f"{privacy['mechanism']}, {spent} at delta {privacy['delta']:g}, {noise}, {privacy['releases']} releases"


def describe_metrics(metrics: JsonMapping) -> str:
    """Return a run's method, base, numbers of users and rounds, and mean test result over users as text."""
    measure = measure_of(metrics)
    mean = metrics[f"mean_test_{measure}"]
    value = "not finite" if mean is None else f"{mean:.4g}"
    size = f"{len(metrics['users'])} users, {metrics['rounds']} rounds"
    return f"{metrics['method']} on {metrics['base']}, {size}, mean test {measure} {value}"


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically, in UTF-8 with the system's line ends.

    Args:
        path: Path of the file.
        text: Its content.
        private: Make it readable by its owner only.
    """
    write_bytes(path, text.replace("\n", os.linesep).encode(), private=private)


def write_bytes(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file atomically: under a temporary name that is then renamed.

    Readers see either the old or the new file, also after a crash.

    Args:
        path: Path of the file.
        data: Its content.
        private: Make it readable by its owner only.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}{DRAFT}")
    try:
        write_new(draft, data, private=private)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_new(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a new file and flush it to the disk.

    Args:
        path: Path of the file.
        data: Its content.
        private: Make it readable by its owner only, from the start.

    Raises:
        FileExistsError: The file exists.
    """
    mode = 0o600 if private else 0o666  # restricted by the umask

    def open_with_mode(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open(path, "xb", opener=open_with_mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def convert_disk_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the disk within a ``with`` block, such as a full disk or missing permissions, to a run error.

    Args:
        folder: The folder that is written to, for errors that name no file.

    Raises:
        RunError: In place of an OSError of the disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno not in _DISK_ERRORS:
            raise
        path = error.filename or folder
        raise RunError(f"{path}: cannot be written to: {os.strerror(error.errno)}") from None


def to_disk(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a power cut; on Windows only files can be flushed."""
    if sys.platform == "win32" and path.is_dir():
        return
    # Some systems flush a file only if it is open for writing; folders cannot be opened for writing.
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically; NaN and infinity become null, as JSON has neither."""
    write_text(path, json.dumps(finite(content), indent=2) + "\n")


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, which takes an s unless the number is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def finite(value: object) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None in nested dicts and lists; tuples become lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


FEDERATION, PUBLIC = "federation.json", "public.json"
"""Files that mark the folder of a federation's server, and a user's folder of a federated run."""


def is_server(run: Path) -> bool:
    """Return whether a run folder is that of a federation's server, which contains no user's model."""
    return (run / FEDERATION).exists()


def resume_command(run: Path) -> str:
    """Return the action that resumes a run, for messages: a command in backquotes, or "restarting the federation".

    No command resumes a federated run: it resumes when its server and clients are started again.
    """
    if is_server(run) or (run / PUBLIC).exists():
        return "restarting the federation"
    return f"`comingle run --resume {shlex.quote(str(run))}`"


CLIENT_MODEL = "model"
"""Folder, in a run's folder on a client's machine, of the user's final model: a run folder with one user."""

SERVED = "served.json"
"""File in a run's folder on a client's machine, with ``evaluation.guard``: which of its models the user is served."""


def client_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in a client's state folder, in the order in which the user has joined them.

    For the folder of one of these runs it is only that one; for any other folder the list is empty.
    """
    files = [folder / PUBLIC] if (folder / PUBLIC).exists() else folder.glob(f"run-*/{PUBLIC}")
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime)]


def client_models(folder: Path) -> list[Path]:
    """Return the user's final models in a client's state folder, as run folders; empty for any other folder."""
    models = [run / CLIENT_MODEL for run in client_runs(folder)]
    return [model for model in models if (model / "metrics.json").exists()]


def read_choices(run: Path) -> list[JsonObject]:
    """Return the choices of a client with ``evaluation.guard`` in a run, the oldest first; empty without any.

    Each has the number of the ``task`` in which it was made, the number of rounds that were done (``round``), and under
    ``served`` the result of :func:`comingle.runs.guard.choose_served`.

    Args:
        run: Folder of the run on the user's machine.

    Raises:
        RunError: The file is damaged.
    """
    path = run / SERVED
    if not path.exists():
        return []
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))["choices"]
        keys = {"task": int, "round": int, "served": dict}
        return [{key: kind(choice[key]) for key, kind in keys.items()} for choice in choices]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: damaged ({error}); delete it, and the next validation writes it again") from None


def numbered_runs(folder: Path) -> list[Path]:
    """Return the run folders 0001, 0002, ... in a folder of runs that follow one another, the oldest first.

    The folder is that of a continuous federation, or of ``comingle live``, whose runs are in ``FOLDER/runs``. The list
    is empty for every other folder, also for a run folder.
    """
    is_live = (folder / "incoming").is_dir() and (folder / "runs").is_dir()
    numbered = [path for path in (folder / "runs" if is_live else folder).glob("[0-9]*") if path.name.isdecimal()]
    runs = [path for path in numbered if (path / "recipe.yaml").exists()]
    return sorted(runs, key=lambda path: int(path.name))


def read_metrics(run: Path) -> JsonObject:
    """Return the metrics of a finished run.

    Raises:
        RunError: There is no such run, it has not finished, or the file is damaged.
    """
    path = run / "metrics.json"
    if not run.is_dir():
        raise RunError(f"{run}: no such run folder")
    if not path.exists():
        raise RunError(f"{run}: no metrics.json; {_hint_without_metrics(run)}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error}); delete it, then {resume_command(run)} writes it again") from None


def _hint_without_metrics(run: Path) -> str:
    """Return what to do with a folder without metrics: resume the run, or open a run folder in it."""
    is_unfinished = (run / "events.jsonl").exists()
    hint = f"{resume_command(run)} resumes the run" if is_unfinished else "not a run folder"
    # It may be the folder of a comparison, which holds run folders, or of clients, whose runs are in "model".
    inner_metrics = [*run.glob("*/metrics.json"), *run.glob("*/model/metrics.json")]
    if inner_metrics:
        first_run = min(path.parent for path in inner_metrics)
        hint += f"; open one in it, such as {first_run}"
    return hint


def read_events(run: Path) -> Iterator[JsonObject]:
    """Yield the events of a run, in order, and skip damaged lines.

    Log a warning with the number of damaged lines. A damaged last line does not count, as a crash may truncate it.
    """
    path = run / "events.jsonl"
    if not path.exists():
        return
    *lines, last_line = path.read_bytes().split(b"\n")
    damaged: list[int] = []  # line numbers
    for line_number, line in enumerate(lines, start=1):
        event = parse_event(line)
        if event is None:
            damaged.append(line_number)
        else:
            yield event
    last_event = parse_event(last_line)
    if last_event is not None:
        yield last_event
    if damaged:
        numbers = ", ".join(str(line_number) for line_number in damaged[:5])
        if len(damaged) > 5:
            numbers += ", ..."
        logger.warning("%s: %d of %d events are damaged and skipped: line %s", path, len(damaged), len(lines), numbers)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Totals of a run's events.

    Args:
        started: When the run has begun, in seconds since 1970; None if it has not.
        trained: Users who have trained and report losses.
        rounds: Number of rounds that are done.
        measure: The measure of test results; empty before the first evaluation.
        mean_test: Mean test result of the last evaluation with scores; None if there is none.
        upload_bytes: Bytes of all uploads.
        download_bytes: Bytes of all downloads.
    """

    started: float | None
    trained: tuple[str, ...]
    rounds: int
    measure: str
    mean_test: float | None
    upload_bytes: int
    download_bytes: int


def summarize_run(run: Path) -> RunSummary:
    """Return the totals of a run's events, also while the run is not done."""
    trained = dict[str, None]()
    rounds, upload_bytes, download_bytes = 0, 0, 0
    measure, mean_test = "", None
    for event in read_events(run):
        if event["event"] == "round":
            rounds = event["round"]
            trained.update(dict.fromkeys(event["train_loss_nats"]))
            upload_bytes += event["upload_bytes"]
            download_bytes += event["download_bytes"]
        elif event["event"] == "evaluation" and event["users"]:
            measure = measure_of(event)
            mean_test = event[f"mean_test_{measure}"]
    try:
        started = (run / "recipe.yaml").stat().st_mtime  # written when the run begins, and not changed
    except OSError:
        started = None
    return RunSummary(
        started=started,
        trained=tuple(trained),
        rounds=rounds,
        measure=measure,
        mean_test=mean_test,
        upload_bytes=upload_bytes,
        download_bytes=download_bytes,
    )


def read_evaluations(run: Path) -> Iterator[JsonObject]:
    """Yield the evaluation events of a run, in order, without parsing the other lines of the event log."""
    path = run / "events.jsonl"
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if b'"event": "evaluation"' not in line:
                continue
            event = parse_event(line)
            if event is not None:
                yield event


def parse_event(line: bytes) -> JsonObject | None:
    """Return the event in a line of an event log; None if it is not an event."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(content, dict) and "event" in content
    return content if is_event else None
