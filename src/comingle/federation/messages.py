"""Messages between server and clients: tasks and answers, their format, and the checks of what arrives.

    magic "CMGT" · format version · length of the header · CRC-32 of the header · header · messages, one after another

The header is JSON. Each message is in the format of :mod:`comingle.protocol.wire`. Nothing is executed.

Either side may be faulty or hostile, so no part of a message is used before it has been checked: sender, round, tensors
and values.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, StringConstraints, ValidationError, field_validator
from torch import Tensor

from comingle.config.hints import first_problem
from comingle.config.settings import Section, Steps
from comingle.methods.base import Method
from comingle.methods.server import Reported
from comingle.privacy.base import CLIP_NORM, WITHIN, split_clip_norms
from comingle.protocol.messages import COUNT, LOSS, STEPS, VALIDATION, Download, Upload
from comingle.protocol.wire import FORMAT, MAX_BYTES
from comingle.training.settings import RunPlan
from comingle.utils.errors import DeclinedError, MessageError
from comingle.utils.records import MEASURES
from comingle.utils.trees import Layout, Tree, restrict

_MAGIC = b"CMGT"
_PREFIX = struct.Struct("<4sHII")
MAX_HEADER_BYTES = 16 << 20
"""Size limit of a header; a larger one is refused before it is read."""

_PARSE_ERRORS = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors that reading a malformed header raises."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Steps that a client carries out in order.

    Args:
        run: Name of the run.
        serial: Number of the task among the client's tasks of this run, from 1; 0 for the task to join.
        user: Name of the user.
        todo: Names of the steps.
        round: The round to train, from 0, or the number of rounds that are done.
        arguments: Values that the steps need, by key: ``public``, the public part of the federation, only for the step
            "join" and "count"; ``since``, the names of earlier runs of a continuous federation, the newest first, for
            the same steps; ``deleted``, the names of runs that the server has deleted as a user has left, for "join";
            ``continuous``, for "end" of a run after which another one will follow; ``done``, the number
            of rounds that are done, for "evaluate"; ``local_steps``, the largest number of local steps of a client in a
            round, for all tasks once it is known.
        messages: Downloads that the steps need, in their order.
    """

    run: str
    serial: int
    user: str
    todo: tuple[str, ...]
    round: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Return the task as bytes; equal tasks yield equal bytes."""
        # "about" is the key of `arguments` in messages.
        header = {"todo": list(self.todo), "round": self.round, "about": dict(self.arguments)}
        return _pack("task", self.run, self.serial, self.user, header, self.messages)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A client's answer to a task.

    Args:
        run: Name of the run.
        serial: Number of the task.
        user: Name of the user.
        reported: Values that the client reports (:func:`check_reported`).
        messages: Its upload and its validation losses, if the task requests them.
    """

    run: str
    serial: int
    user: str
    reported: Mapping[str, Any]
    messages: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Return the answer as bytes."""
        header = {"told": dict(self.reported)}  # "told" is the key of `reported` in messages
        return _pack("answer", self.run, self.serial, self.user, header, self.messages)

    @property
    def refused(self) -> str:
        """Why the client did not carry out the task; empty if it did."""
        return str(self.reported.get("refused", ""))

    @property
    def declined(self) -> bool:
        """True if the client refused the task because a condition of its user does not hold now."""
        return bool(self.refused) and self.reported.get("kind") == DeclinedError.__name__


def unpack_task(data: bytes) -> Task:
    """Return the task that :meth:`Task.pack` has encoded, without checking its values.

    :class:`Task` describes the fields. Keys of the header have the same names, except "about" for ``arguments``.

    Raises:
        MessageError: The bytes are no task.
    """
    header, messages = _unpack("task", data)
    with _as_message_error("task"):
        return Task(
            run=str(header["run"]),
            serial=int(header["serial"]),
            user=str(header["user"]),
            todo=tuple(str(step) for step in header["todo"]),
            round=int(header["round"]),
            arguments=dict(header["about"]),
            messages=messages,
        )


def unpack_answer(data: bytes) -> Answer:
    """Return the answer that :meth:`Answer.pack` has encoded, without checking its values.

    :class:`Answer` describes the fields. Keys of the header have the same names, except "told" for ``reported``.

    Raises:
        MessageError: The bytes are no answer.
    """
    header, messages = _unpack("answer", data)
    with _as_message_error("answer"):
        return Answer(
            run=str(header["run"]),
            serial=int(header["serial"]),
            user=str(header["user"]),
            reported=dict(header["told"]),
            messages=messages,
        )


def _pack(kind: str, run: str, serial: int, user: str, header: Mapping[str, Any], messages: tuple[bytes, ...]) -> bytes:
    """Return the bytes of a task or an answer: prefix, header in JSON, and the messages one after another.

    The prefix has magic, format, and length and CRC-32 of the header. The header has the length of each message.

    Args:
        kind: "task" or "answer".
        run: Name of the run.
        serial: Number of the task.
        user: Name of the user.
        header: Other values of the header.
        messages: Uploads or downloads, as bytes.
    """
    lengths = [len(message) for message in messages]
    full_header = {"kind": kind, "run": run, "serial": serial, "user": user, "lengths": lengths, **header}
    packed_header = json.dumps(full_header, separators=(",", ":"), allow_nan=False).encode()
    prefix = _PREFIX.pack(_MAGIC, FORMAT, len(packed_header), zlib.crc32(packed_header))
    return b"".join([prefix, packed_header, *messages])


def _unpack(kind: str, data: bytes) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return header and messages of a task or an answer, which :func:`_pack` has packed.

    Args:
        kind: "task" or "answer".
        data: The bytes: prefix, header in JSON, and the messages one after another.

    Raises:
        MessageError: The bytes are damaged, too many, of another format or of another kind.
    """
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise MessageError(f"{kind}: got {len(data)} bytes that are not a message of comingle")
    _magic, version, header_length, checksum = _PREFIX.unpack_from(data)
    if version != FORMAT:
        raise MessageError(f"{kind}: got format {version}; allowed: {FORMAT}")
    if header_length > MAX_HEADER_BYTES or len(data) > MAX_BYTES:
        sizes = f"got {len(data)} bytes, header {header_length} bytes"
        raise MessageError(f"{kind}: {sizes}; allowed: {MAX_BYTES}, header {MAX_HEADER_BYTES}")
    header_end = _PREFIX.size + header_length
    packed_header = data[_PREFIX.size : header_end]
    if zlib.crc32(packed_header) != checksum:
        raise MessageError(f"{kind}: wrong checksum; the message was damaged in transit")
    with _as_message_error(kind):
        header = json.loads(packed_header, parse_constant=_refuse_constant)
        lengths = [int(length) for length in header["lengths"]]
        if header["kind"] != kind:
            raise MessageError(f"{kind}: got a message of kind {header['kind']!r}")
    declared_bytes = header_end + sum(lengths)
    has_negative_length = any(length < 0 for length in lengths)
    if has_negative_length or declared_bytes != len(data):
        raise MessageError(f"{kind}: got {len(data)} bytes; its header declares {declared_bytes}")
    messages, start = [], header_end
    for length in lengths:
        messages.append(data[start : start + length])
        start += length
    return header, tuple(messages)


@contextmanager
def _as_message_error(kind: str) -> Iterator[None]:
    """Convert errors that reading a malformed header raises in the context, such as a KeyError, to a MessageError.

    Args:
        kind: "task" or "answer", the beginning of the error's message.
    """
    try:
        yield
    except MessageError:
        raise
    except _PARSE_ERRORS as error:
        raise MessageError(f"{kind}: malformed ({type(error).__name__}: {error})") from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a finite number")


_RUN = re.compile(r"[A-Za-z0-9]{1,64}")
_MOST_STEPS = 10_000_000
"""Largest number of local steps of a round that a recipe allows."""
_STEPS_WITH_MESSAGE = ("receive", "hear", "share", "mask", "unmask")
"""Steps that read a message of the task; each reads one."""


def check_address(task: Task, user: str) -> None:
    """Check that a task is for this user, and that its run's name is safe as a folder name.

    Args:
        task: What the server asks of the client, such as local steps.
        user: Name of the user whose client has received it.

    Raises:
        MessageError: A check fails.
    """
    if task.user != user:
        raise MessageError(f"task: got one for user {task.user!r}; this client is of user {user!r}")
    if not _RUN.fullmatch(task.run):
        raise MessageError(f"task: got run {task.run[:70]!r}; allowed: up to 64 letters and digits")


def earlier_runs(task: Task) -> tuple[str, ...] | None:
    """Return the names of earlier runs of a continuous federation, the newest first, after checking them.

    Args:
        task: A task to join or to count.

    Returns:
        None if the federation is not continuous.

    Raises:
        MessageError: The value is not a list of names, which have to be safe as folder names.
    """
    return _names_of_runs(task, "since")


def deleted_runs(task: Task) -> tuple[str, ...]:
    """Return the names of runs that the server has deleted as a user has left, after checking them.

    Args:
        task: A task to join.

    Raises:
        MessageError: The value is not a list of names, which have to be safe as folder names.
    """
    return _names_of_runs(task, "deleted") or ()


def _names_of_runs(task: Task, key: str) -> tuple[str, ...] | None:
    """Return the names of runs in an argument of a task; None if it is missing."""
    runs = task.arguments.get(key)
    if runs is None:
        return None
    if not isinstance(runs, list) or not all(isinstance(run, str) and _RUN.fullmatch(run) for run in runs):
        raise MessageError(f"task: {key} is {str(runs)[:70]!r}; allowed: a list of names of runs")
    return tuple(runs)


def check_task(task: Task, plan: RunPlan, steps: Collection[str], *, steps_follow_from_data: bool) -> None:
    """Check a task that a client has received, before the client carries it out, as its server may be faulty.

    Its steps must be known and unique, with one message for each step that reads one. Its round, number of rounds done
    and number of local steps must be within the recipe's.

    Args:
        task: A task of a client that has joined; the task to join has no steps to check.
        plan: Settings of the run.
        steps: Names of the steps that a client knows.
        steps_follow_from_data: Whether the number of local steps follows from the users' data; otherwise the recipe
            sets it.

    Raises:
        MessageError: A check fails.
    """
    if not task.todo:
        raise MessageError(f"task: no step; allowed: join, {', '.join(steps)}")
    for index, step in enumerate(task.todo):
        if step not in steps:
            raise MessageError(f"task: no step {step[:70]!r}; allowed: join, {', '.join(steps)}")
        if step in task.todo[:index]:
            raise MessageError(f"task: got step {step!r} twice")
    num_messages_needed = sum(step in _STEPS_WITH_MESSAGE for step in task.todo)
    if len(task.messages) != num_messages_needed:
        raise MessageError(f"task: got {len(task.messages)} messages; its steps need {num_messages_needed}")
    rounds_done = task.arguments.get("done", 0)  # rounds that the run has completed, say before an evaluation
    local_steps = task.arguments.get("local_steps", 0)  # 0 if the task does not say
    _check_number("round", task.round, plan.training.rounds)
    _check_number("done", rounds_done, plan.training.rounds)
    _check_number("local_steps", local_steps, _MOST_STEPS)
    steps_in_recipe = plan.training.most_local_steps
    if not steps_follow_from_data and local_steps not in (0, steps_in_recipe):
        raise MessageError(f"task: local_steps is {local_steps}; allowed: {steps_in_recipe}, as in the recipe")


def _check_number(key: str, value: Any, most: int) -> None:
    """Check that a value of a task is a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise MessageError(f"task: {key} is {str(value)[:70]!r}; allowed: 0 to {most}")


_LONGEST = 400
_Key = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Amount = Annotated[int, Field(ge=0, le=10**15, strict=True)]
_Whole = Annotated[int, Field(strict=True, ge=-(10**15), le=10**15)]
_Number = _Whole | Annotated[float, Field(strict=True)]
_Share = Annotated[float, Field(ge=0, le=1.001, strict=True)]  # rounded
_Shares = Annotated[list[_Share], Field(max_length=1000)]
_NotNegative = Annotated[float, Field(ge=0, strict=True)]


def _one_line(text: str) -> str:
    """Return text as one line of at most 400 printable characters, which cannot move a terminal's cursor."""
    text = text[: 2 * _LONGEST]  # a hostile client may send megabytes
    printable = "".join(character if character.isprintable() else " " for character in text)
    words = printable.split()
    return " ".join(words)[:_LONGEST]


_Line = Annotated[str, AfterValidator(_one_line)]


class _Refusal(Section):
    """Reason why a client did not carry out a task."""

    refused: _Line = ""
    kind: _Line = ""


class _JoinReport(Section):
    """Values that a client reports when it joins."""

    unit: _Key = ""
    steps: Steps = 1
    done: _Amount = 0
    back: _Amount = 0
    downloads: bool = False  # whether it has no shared tensors of the run that this one continues
    examples: _Amount = 0
    amounts: dict[_Key, _Amount] = {}  # noqa: RUF012 (pydantic copies it)
    skipped_rows: _Amount = 0
    works: tuple[_Amount, _Amount] = (0, 0)
    specialists: Annotated[int, Field(ge=0, le=1000, strict=True)] | None = None


class _CountReport(Section):
    """Number of tokens or conversations that a client has not trained on yet."""

    new: _Amount = 0


class _TrainingReport(Section):
    """Values that a client reports after its local steps."""

    seconds: _NotNegative = 0.0
    tokens: _Amount = 0
    train_seconds: _NotNegative = 0.0
    train_loss: _Number = 0.0
    local_steps: _Amount = 0
    left_out: _Line = ""


class _EvaluationReport(Section):
    """Values that a client reports after an evaluation."""

    measure: str = ""
    evaluated: Literal[True] = True
    score: dict[_Key, _Number] = {}  # noqa: RUF012
    metrics: dict[_Key, _Number | None] = {}  # noqa: RUF012
    gates: Annotated[list[_Shares], Field(max_length=1000)] = []  # noqa: RUF012
    mixture: _Shares = []  # noqa: RUF012

    @field_validator("measure")
    @classmethod
    def _check_measure(cls, measure: str) -> str:
        """Return the name of the measure of test scores, such as "loss", after checking that it is known."""
        if measure not in MEASURES:
            raise ValueError(f"allowed: {', '.join(MEASURES)}")
        return measure


_REPORTS: tuple[type[Section], ...] = (_Refusal, _JoinReport, _CountReport, _TrainingReport, _EvaluationReport)


def check_reported(reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an answer reports, after checking them; text is shortened to one line.

    Args:
        reported: Values by key, as received from a client that may be faulty or hostile.

    Raises:
        MessageError: A key is unknown, or a value has another type or is out of range; names the first one.
    """
    allowed_keys = [key for report in _REPORTS for key in report.model_fields]
    for key in reported:
        if key not in allowed_keys:
            problem = f"unknown key {key!r}. Allowed: {', '.join(allowed_keys)}"
            raise MessageError(f"answer: {_one_line(problem)}")
    checked: dict[str, Any] = {}
    for report in _REPORTS:  # a pydantic class for each kind of report, such as _JoinReport
        values = {key: reported[key] for key in report.model_fields if key in reported}
        try:
            checked_report = report(**values)
        except ValidationError as error:
            raise MessageError(f"answer: {_one_line(first_problem(error, report))}") from None
        checked.update(checked_report.model_dump(exclude_unset=True))
    return checked


_FACTORS = (".a", ".b")
_DTYPES = (torch.float32, torch.float64)
_MOST_DATA = 10**15
_LARGEST_FACTOR, _LARGEST_NUMBER = 1e6, 1e15
"""Largest magnitudes in an upload: in a LoRA factor, which is multiplied by the other one, and in any other tensor."""
_LARGEST_FLOAT = float(torch.finfo(torch.float32).max)
_LOSS = Reported(least=-_LARGEST_FLOAT, most=_LARGEST_FLOAT)


def check_upload(
    upload: Upload,
    layout: Layout,
    method: Method,
    *,
    user: str,
    number: int,
    rank: int,
    version: int = 0,
    weighted: bool = False,
    adaptive: bool = False,
    most_data: int = _MOST_DATA,
    most_steps: int = 0,
) -> None:
    """Check that an upload is the user's own, of this round, and holds exactly the tensors that the method shares.

    Shapes, dtypes, ranges of values and the reported numbers are checked too, as a client may be faulty or hostile.

    Args:
        upload: The upload.
        layout: Layout of the model's tensors.
        method: The federated method of the run.
        user: Name of the user.
        number: The round, from 1.
        rank: Largest LoRA rank that the user may have.
        version: Version of the server that the user has downloaded, 0 for none.
        weighted: Whether the upload reports the user's amount of data.
        adaptive: Whether the upload reports if its change was within the server's clipping bound.
        most_data: Largest amount of data that the upload may report.
        most_steps: Largest number of local steps that the upload may report; 0 if it reports none.

    Raises:
        MessageError: A check fails.
    """
    if upload.users != (user,):
        raise MessageError(f"upload: user {user!r} sent one of user {upload.users[0]!r}")
    if upload.round != number:
        raise MessageError(f"upload: got round {upload.round}; allowed: {number}")
    declared_rank = int(upload.ranks[0])  # an upload is of a single user
    _check_rank("upload", declared_rank, rank)
    # Tensors of an upload are (1, *shape), without the axis of models that downloads have.
    _check_tensors("upload", upload.tensors, layout, method.uploaded(version), leading=0, rank=declared_rank)
    _check_sizes(upload.tensors)
    required = _required_reports(
        method, layout, weighted=weighted, adaptive=adaptive, most_data=most_data, most_steps=most_steps
    )
    _check_reports(upload.reports, required)


def check_download(
    download: Download,
    layout: Layout,
    method: Method,
    *,
    user: str,
    users: tuple[str, ...],
    rounds: int,
    rank: int,
    version: int = 0,
) -> None:
    """Check that a download is for this user and holds exactly the tensors that the method sends to users.

    Args:
        download: The download.
        layout: Layout of the model's tensors.
        method: The federated method of the run.
        user: Name of the user.
        users: Names of all users.
        rounds: Number of rounds of the run.
        rank: Largest LoRA rank that the user may have.
        version: Version of the server that the user has downloaded before, 0 for none.

    Raises:
        MessageError: A check fails.
    """
    if download.users != (user,):
        raise MessageError(f"download: got one for user {download.users[0]!r}; this client is of user {user!r}")
    if not 0 <= download.version <= rounds:
        raise MessageError(f"download: got version {download.version}; allowed: 0 to {rounds}")
    declared_rank = int(download.ranks[0])  # a download is for a single user
    _check_rank("download", declared_rank, rank)
    clip_norm, model_tensors = split_clip_norms(download.tensors)
    if clip_norm is not None:  # sent only by a server that adapts it
        is_valid = len(clip_norm) == 1 and 0 < float(clip_norm) <= _LARGEST_FLOAT
        if not is_valid:
            raise MessageError(f"download: {CLIP_NORM} is {clip_norm.tolist()}; allowed: a number above 0")
    download = replace(download, tensors=model_tensors)
    # Tensors of a download are (1, models, *shape): one axis more than those of an upload.
    _check_tensors("download", download.tensors, layout, method.downloaded(version), leading=1, rank=declared_rank)
    possible_senders = users if method.server.peer_to_peer else ()
    _check_models(download, possible_senders, user)


def check_verdict(verdict: Download, name: str, *, user: str, rounds: int) -> None:
    """Check that a download is a verdict: one number, which says whether the mean validation loss is the lowest so far.

    Args:
        verdict: The download.
        name: Name of its only tensor.
        user: Name of the user.
        rounds: Number of rounds of the run.

    Raises:
        MessageError: A check fails.
    """
    has_only_this_tensor = list(verdict.tensors) == [name]
    has_one_number = has_only_this_tensor and verdict.tensors[name].numel() == 1
    if not has_one_number or verdict.users != (user,):
        raise MessageError(f"verdict: not a single number {name!r} for user {user!r}")
    if not 0 <= verdict.version <= rounds:
        raise MessageError(f"verdict: got round {verdict.version}; allowed: 0 to {rounds}")


def validation_loss(message: Download | Upload, *, user: str, done: int) -> float | None:
    """Return the validation loss, in nats, that a user reports after ``done`` rounds; None for any other message.

    Args:
        message: The message, which may be malformed.
        user: Name of the user.
        done: Number of rounds.

    Raises:
        MessageError: The message is from another user or round, or the loss is not finite.
    """
    is_validation_loss = isinstance(message, Upload) and not message.tensors  # it has a report, and no tensors
    if not is_validation_loss:
        return None
    assert isinstance(message, Upload)
    if message.users != (user,) or message.round != done:
        got = f"user {message.users[0]!r}, round {message.round}"
        raise MessageError(f"validation loss: got {got}; allowed: user {user!r}, round {done}")
    _check_reports(message.reports, {VALIDATION: _LOSS})
    return float(message.reports[VALIDATION])


def _check_rank(kind: str, rank: int, largest: int) -> None:
    """Check the LoRA rank that an upload or a download declares; ``largest`` is 0 for models without LoRA."""
    smallest = 1 if largest > 0 else 0
    if not smallest <= rank <= largest:
        raise MessageError(f"{kind}: got rank {rank}; allowed: {smallest} to {largest}")


def _check_models(download: Download, possible_senders: tuple[str, ...], user: str) -> None:
    """Check the senders of a download, and that all its tensors ``(1, models, *shape)`` have the same number of models.

    With a peer-to-peer method, there is one model of each sender other than the user.

    Args:
        download: The download.
        possible_senders: Users that may be senders; empty unless the method is peer-to-peer.
        user: Name of the user.

    Raises:
        MessageError: A number differs, or a sender is unknown or named twice.
    """
    senders = set(download.senders)
    has_duplicates = len(senders) != len(download.senders)
    if has_duplicates or not senders <= set(possible_senders):
        raise MessageError(
            f"download: got senders {list(download.senders)[:9]}; allowed: {list(possible_senders)[:9]}, each once"
        )
    distinct_numbers = {tensor.shape[1] for tensor in download.tensors.values()}  # {3} if all have 3 models
    are_valid = len(distinct_numbers) == 1 and 0 not in distinct_numbers
    allowed: int | str = "the same number"
    if possible_senders:
        num_other_senders = len(senders - {user})  # 0 if no other user has uploaded
        are_valid = distinct_numbers == {num_other_senders}
        if num_other_senders > 0:
            allowed = num_other_senders
    if not are_valid:
        raise MessageError(f"download: got {sorted(distinct_numbers)} models per tensor; allowed: {allowed}")


def _check_tensors(
    kind: str, tensors: Tree, layout: Layout, shared: frozenset[str], *, leading: int, rank: int
) -> None:
    """Check that tensors are exactly the shared ones, finite, and have an allowed shape and dtype.

    Args:
        kind: "upload" or "download", the beginning of an error's message.
        tensors: Tensors ``(1, *shape)`` of an upload, or ``(1, models, *shape)`` of a download.
        layout: Layout of the model's tensors.
        shared: Roles of the tensors that are expected.
        leading: Number of axes between the first one and ``shape``: 0 for an upload, 1 for a download.
        rank: LoRA rank that the message declares.

    Raises:
        MessageError: A check fails.
    """
    allowed_shapes = _allowed_shapes(layout, shared, rank)
    for name in sorted(allowed_shapes.keys() | tensors.keys()):
        is_missing = name not in tensors
        shape = None if is_missing else tuple(tensors[name].shape[1 + leading :])
        if name not in allowed_shapes:
            raise MessageError(f"{kind}: tensor {name!r} has shape {shape}; allowed: no tensor of this name")
        if is_missing or shape not in allowed_shapes[name]:
            raise MessageError(f"{kind}: tensor {name!r} has shape {shape}; allowed: {allowed_shapes[name][0]}")
        if tensors[name].dtype not in _DTYPES:
            raise MessageError(f"{kind}: tensor {name!r} is {_dtype_name(tensors[name])}; allowed: float32, float64")
        if not bool(tensors[name].isfinite().all()):
            raise MessageError(f"{kind}: tensor {name!r} is not finite")


def _check_sizes(tensors: Tree) -> None:
    """Check that the numbers of an upload are so small that aggregation in float32 does not overflow.

    Aggregation may square a number, or the product of two LoRA factors.

    Raises:
        MessageError: A number is too large.
    """
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        limit = _LARGEST_FACTOR if name.endswith(_FACTORS) else _LARGEST_NUMBER
        largest = float(tensor.abs().max())
        if largest > limit:
            raise MessageError(
                f"upload: tensor {name!r} has a value of magnitude {largest:.3g}; allowed: up to {limit:g}"
            )


def _allowed_shapes(layout: Layout, shared: frozenset[str], rank: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes that each shared tensor may have, by name: with the user's LoRA rank, or padded.

    For example ``{"x.a": [(4, 64), (16, 64)]}`` for rank 4, if the largest rank of any user is 16.

    Args:
        layout: Layout of the model's tensors, padded to the largest rank.
        shared: Roles of the shared tensors.
        rank: The user's LoRA rank; 0 for models without LoRA.
    """
    # Tensors (1, *shape) for one user; on the device "meta" they take no memory.
    all_tensors = layout.views(torch.zeros(1, layout.columns, device="meta"))
    shared_tensors = restrict(all_tensors, layout, shared)
    padded_shapes = {name: tuple(t.shape[1:]) for name, t in shared_tensors.items()}
    return {name: [_cut_to_rank(name, shape, rank), shape] for name, shape in padded_shapes.items()}


def _cut_to_rank(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor without padded ranks: ``(4, 64)`` for a LoRA factor ``(16, 64)`` and rank 4.

    Args:
        name: Name of the tensor; those of LoRA factors end with ".a" or ".b".
        shape: The padded shape, in which the ranks of both factors are the second-last axis.
        rank: The rank; 0 for models without LoRA.
    """
    is_factor = name.endswith(_FACTORS)
    if rank == 0 or not is_factor:
        return shape
    *leading, padded_rank, width = shape
    return (*leading, min(rank, padded_rank), width)


def _required_reports(
    method: Method, layout: Layout, *, weighted: bool, adaptive: bool, most_data: int, most_steps: int
) -> dict[str, Reported]:
    """Return the reports that an upload must have, by name, with their shapes and ranges of values.

    Reports are numbers that a client sends beside its tensors.

    Args:
        method: The method, whose client hooks declare reports.
        layout: Layout of the model's tensors; a report may have the shape of one of them (``like``).
        weighted: Whether the amount of data is required, as the weight of the upload.
        adaptive: Whether a flag, 0 or 1, is required that says if the change was within the clip norm.
        most_data: Largest amount of data that is accepted.
        most_steps: Largest number of local steps that is accepted; 0 if none is required.
    """
    shapes = {slot.name: slot.shape for slot in layout.slots}
    required = {}
    for hook in method.client.parts:
        for name, report in hook.reports.items():
            shape = shapes.get(report.like, report.shape)
            required[name] = replace(report, shape=shape)
    if adaptive:
        required[WITHIN] = Reported(most=1, whole=True)
    if weighted:
        required[COUNT] = Reported(least=1, most=most_data, whole=True)
    if most_steps:
        required[STEPS] = Reported(least=1, most=most_steps, whole=True)
    return required


def _check_reports(reports: Tree, required: dict[str, Reported]) -> None:
    """Check that reports are exactly the required ones; the mean training loss is also allowed.

    Args:
        reports: Tensors ``(1, *shape)`` by name.
        required: Shapes and ranges by name.

    Raises:
        MessageError: A report is missing, not allowed, or not as required.
    """
    allowed = {LOSS: _LOSS, **required}
    for name in sorted(required.keys() | reports.keys()):
        if name not in reports:
            raise MessageError(f"upload: report {name!r} is missing")
        if name not in allowed:
            raise MessageError(f"upload: report {name!r} is not allowed")
    for name, t in reports.items():
        _check_report(name, t, allowed[name])


def _check_report(name: str, t: Tensor, allowed: Reported) -> None:
    """Check shape, dtype and range of one report of an upload.

    Args:
        name: Name of the report.
        t: Its numbers ``(1, *shape)``.
        allowed: The shape and the range; NaN is in no range.

    Raises:
        MessageError: The report is not as allowed.
    """
    shape = tuple(t.shape[1:])
    if shape != allowed.shape:
        raise MessageError(f"upload: report {name!r} has shape {shape}; allowed: {allowed.shape}")
    if allowed.whole and t.dtype != torch.int64:
        raise MessageError(f"upload: report {name!r} is {_dtype_name(t)}; allowed: int64")
    if not allowed.whole and t.dtype not in _DTYPES:
        raise MessageError(f"upload: report {name!r} is {_dtype_name(t)}; allowed: float32")
    is_in_range = (t >= allowed.least) & (t <= allowed.most)
    if not bool(is_in_range.all()):
        allowed_range = f"{allowed.least:g} to {allowed.most:g}"
        raise MessageError(f"upload: report {name!r} is out of range or not finite; allowed: {allowed_range}")


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
