"""What a run writes down: plain records that reports can read without torch.

A run folder holds ``recipe.yaml``, ``inputs.json`` (:mod:`comingle.utils.inputs`), ``events.jsonl`` (one event a line,
in order), ``metrics.json`` (written at the end) and ``checkpoints/round-NNNN/``.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
import shlex
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comingle.utils.errors import RunError

logger = logging.getLogger("comingle")

DRAFT = ".draft"
"""How the temporary name of a file ends that is being written."""

_DISK = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "EIO", "ELOOP", "ENOTDIR", "ENAMETOOLONG")
    if hasattr(errno, name)
}

MEASURES = {"perplexity": "lower", "accuracy": "higher", "exact_match": "higher", "rouge1": "higher", "loss": "lower"}
"""What models are compared by, and which way is better."""
SHARES = ("accuracy", "exact_match")
"""Measures from 0 to 1 that are read in per cent."""
GEOMETRIC = "geometric_mean_test_perplexity"
"""Beside ``mean_test_perplexity``: the exponential of the mean loss over users, which one bad user does not rule."""


PARTICIPANTS = "participants.json"
"""In the run folder of a federation: how its users fare."""

_NAME_MAX, _SHOWN = 255, 200


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return the path with a leading ``~`` or ``~NAME`` replaced by that user's home directory.

    Raises:
        RunError: there is no such user, or this one has no home directory, as in a container without ``HOME``.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0].removeprefix("~")
        why = f"no user {name} on this machine" if name else "no home directory (HOME is not set)"
        raise RunError(f"{os.fspath(path)}: {why}; give the whole path") from None


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """Test results of a run's users.

    ``measure`` is what models are compared by: each user has ``test_<measure>``, and ``mean`` is over users. ``unit``
    is what data is counted in, tokens or samples: each user has ``train_<unit>`` and so on. ``selected_round`` is the
    round whose models the run ended with.
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
    """The result of a run: its scores and what they cost.

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

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``metrics.json``.

        The mean is ``mean_test_<measure>``, beside :data:`GEOMETRIC` for perplexities, and the speed is
        ``<unit>_per_second``.
        """
        content = {key: value for key, value in asdict(self).items() if value is not None}
        content[f"mean_test_{self.measure}"] = content.pop("mean")
        content |= geometric(self.users, self.measure)
        content[f"{self.unit}_per_second"] = content.pop("per_second")
        return content


def check_name(folder: Path) -> None:
    """See that a folder could have this name; touches nothing.

    Raises:
        RunError: it is too long for the file system, holds a NUL, or lies below a file.
    """
    for above in folder.parents:
        if os.path.isfile(above):
            raise RunError(f"{folder}: cannot be a folder: {above} is a file")
    try:
        os.lstat(folder)
        why = None
    except (FileNotFoundError, NotADirectoryError):  # also where a folder above is still to be made
        why = os.strerror(errno.ENAMETOOLONG) if any(len(os.fsencode(p)) > _NAME_MAX for p in folder.parts) else None
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if why:
        shown = str(folder)
        raise RunError(f"{shown[:_SHOWN] + '...' if len(shown) > _SHOWN else shown}: cannot be a folder: {why}")


def measure_of(record: Container[str]) -> str:
    """What a run's metrics, an evaluation or a row of a comparison is measured by: a key of :data:`MEASURES`."""
    return next(name for name in MEASURES if f"mean_test_{name}" in record)


def number(value: float | None, measure: str = "perplexity") -> str:
    """A measure as people read it: accuracy in per cent, losses and ROUGE-1 with three digits."""
    if value is None:
        return "not finite"
    if measure in SHARES:
        return f"{100 * value:,.1f}%"
    told = {"rouge1": f"{value:.3f}", "loss": f"{value:,.3g}"}
    return told.get(measure, f"{value:,.2f}")


def geometric(users: Mapping[str, Mapping[str, float | None]], measure: str) -> dict[str, float | None]:
    """:data:`GEOMETRIC` and its value, for perplexities; nothing for other measures."""
    if measure != "perplexity":
        return {}
    return {GEOMETRIC: geometric_mean([user["test_perplexity"] for user in users.values()])}


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """``exp(mean(log(value)))``; None where a value is not finite or not positive, or there is none."""
    known = [value for value in values if value is not None and 0 < value < math.inf]
    return statistics.geometric_mean(known) if known and len(known) == len(values) else None


def sample_told(record: Mapping[str, Any]) -> str:
    """Of how many users a mean is, where not of all, and how far it may be from theirs; else nothing."""
    if "sample" not in record:
        return ""
    sample, measure = record["sample"], measure_of(record)
    told = f"mean of {sample['users']:,} of {sample['of']:,} users"
    if sample["interval"] is None:
        return told
    low, high = (number(value, measure) for value in sample["interval"])
    return f"{told}, 95% interval {low} to {high}"


def privacy_told(privacy: Mapping[str, Any]) -> str:
    """Return the privacy of a run in half a line: mechanism, epsilon, delta, noise and clip norm."""
    if not math.isfinite(privacy["epsilon"] if privacy["epsilon"] is not None else math.inf):
        spent = "no bound on epsilon"
    else:
        spent = f"epsilon {privacy['epsilon']:.4g}"
    noise = f"noise multiplier {privacy['noise_multiplier']:.3g}, clip norm {privacy['clip_norm']:.3g}"
    return f"{privacy['mechanism']}, {spent} at delta {privacy['delta']:g}, {noise}, {privacy['releases']} releases"


def describe_metrics(metrics: Mapping[str, Any]) -> str:
    """A run's metrics in half a line."""
    measure = measure_of(metrics)
    mean = metrics[f"mean_test_{measure}"]
    told = "not finite" if mean is None else f"{mean:.4g}"
    size = f"{len(metrics['users'])} users, {metrics['rounds']} rounds"
    return f"{metrics['method']} on {metrics['base']}, {size}, mean test {measure} {told}"


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """As :func:`write_bytes`, in UTF-8 with the system's line ends."""
    write_bytes(path, text.replace("\n", os.linesep).encode(), private=private)


def write_bytes(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file under a temporary name, then rename: a reader or a crash sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        write_new(draft, data, private=private)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_new(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file that is not there yet, down to the disk; a ``private`` one is its owner's alone from the start.

    Raises:
        FileExistsError: it is there.
    """
    mode = 0o600 if private else 0o666  # less what the umask takes
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def told_in_one_line(folder: Path) -> Iterator[None]:
    """A disk that takes nothing (full, read-only, forbidden, broken) is a user's to mend, wherever it is noticed.

    Raises:
        RunError: instead of such an OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno not in _DISK:
            raise
        raise RunError(f"{error.filename or folder}: cannot be written to: {os.strerror(error.errno)}") from None


def to_disk(path: Path) -> None:
    """Return when a file or folder would outlive a power cut."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # some systems sync what may be written alone
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically; NaN and infinity become null, which every JSON reader understands."""
    write_text(path, json.dumps(finite(content), indent=2) + "\n")


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, which takes an s unless the number is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def finite(value: object) -> Any:
    """``value`` with every non-finite number replaced by None."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FEDERATION, PUBLIC = "federation.json", "public.json"
"""What is in a folder of a federation's server, and in a participant's of a run."""


def is_server(run: Path) -> bool:
    """Whether it is the folder of a federation's server, in which nobody's model is."""
    return (run / FEDERATION).exists()


def resume_command(run: Path) -> str:
    """What to type to go on with a run; neither a server's nor a participant's is resumed by its folder."""
    if is_server(run) or (run / PUBLIC).exists():
        return "the federation, started again,"
    return f"`comingle run --resume {shlex.quote(str(run))}`"


def read_metrics(run: Path) -> dict[str, Any]:
    """The metrics of a finished run.

    Raises:
        RunError: no such run, one that has not finished, or a damaged file.
    """
    path = run / "metrics.json"
    if not run.is_dir():
        raise RunError(f"{run}: no such run folder")
    if not path.exists():
        unfinished = (run / "events.jsonl").exists()
        hint = f"{resume_command(run)} goes on with it" if unfinished else "it is not a run folder"
        raise RunError(f"{run}: no metrics.json; {hint}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error}); once it is deleted {resume_command(run)} writes it anew") from None


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, in order; a last line torn by a crash is skipped, and damage before it is told of."""
    path = run / "events.jsonl"
    if not path.exists():
        return
    *lines, last = path.read_bytes().split(b"\n")
    damaged = []
    for number, line in enumerate(lines, 1):
        event = parse_event(line)
        if event is None:
            damaged.append(number)
        else:
            yield event
    if (event := parse_event(last)) is not None:
        yield event
    if damaged:
        told = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        logger.warning("%s: damaged, so %d of %d events are missing: line %s", path, len(damaged), len(lines), told)


def read_evaluations(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the evaluation events of a run one by one; parses no other line."""
    path = run / "events.jsonl"
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if b'"event": "evaluation"' in line and (event := parse_event(line)) is not None:
                yield event


def parse_event(line: bytes) -> dict[str, Any] | None:
    """A line of an event log; None if it is not one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
