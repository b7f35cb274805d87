"""Checks of clients' answers: sender, round, tensors and values.

A client may be faulty or hostile, so no part of an answer is used before it has been checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StringConstraints, ValidationError, field_validator
from torch import Tensor

from comingle.config.hints import first_problem
from comingle.config.settings import Section, Steps
from comingle.methods.base import Method
from comingle.methods.server import Reported
from comingle.privacy.base import CLIP_NORM, WITHIN, without_bound
from comingle.protocol.messages import COUNT, LOSS, VALIDATION, Download, Upload
from comingle.utils.errors import MessageError
from comingle.utils.records import MEASURES
from comingle.utils.trees import Layout, Tree, restrict

_LONGEST = 400
_Key = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Amount = Annotated[int, Field(ge=0, le=10**15, strict=True)]
_Whole = Annotated[int, Field(strict=True, ge=-(10**15), le=10**15)]
_Number = _Whole | Annotated[float, Field(strict=True)]
_Share = Annotated[float, Field(ge=0, le=1.001, strict=True)]  # rounded
_Shares = Annotated[list[_Share], Field(max_length=1000)]
_NotNegative = Annotated[float, Field(ge=0, strict=True)]


class _Told(Section):
    """Every word that an answer may have."""

    refused: str = ""
    kind: str = ""
    unit: _Key = ""
    steps: Steps = 1
    done: _Amount = 0
    back: _Amount = 0
    examples: _Amount = 0
    amounts: dict[_Key, _Amount] = {}  # noqa: RUF012 (pydantic copies it)
    skipped_rows: _Amount = 0
    works: tuple[_Amount, _Amount] = (0, 0)
    seconds: _NotNegative = 0.0
    tokens: _Amount = 0
    train_seconds: _NotNegative = 0.0
    train_loss: _Number = 0.0
    left_out: str = ""
    measure: str = ""
    evaluated: Literal[True] = True
    score: dict[_Key, _Number] = {}  # noqa: RUF012
    metrics: dict[_Key, _Number | None] = {}  # noqa: RUF012
    gates: Annotated[list[_Shares], Field(max_length=1000)] = []  # noqa: RUF012
    mixture: _Shares = []  # noqa: RUF012

    @field_validator("refused", "kind", "left_out")
    @classmethod
    def _one_line(cls, text: str) -> str:
        """Nothing that moves a terminal's cursor or begins another line of a log."""
        line = "".join(sign if sign.isprintable() else " " for sign in text[: 2 * _LONGEST])
        return " ".join(line.split())[:_LONGEST]

    @field_validator("measure")
    @classmethod
    def _known(cls, measure: str) -> str:
        if measure not in MEASURES:
            raise ValueError(f"allowed: {', '.join(MEASURES)}")
        return measure


def check_told(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a user told, and nothing else.

    Raises:
        MessageError: a word that is none of an answer's, or one of another type; names the first one.
    """
    try:
        return _Told(**told).model_dump(exclude_unset=True)
    except (ValidationError, TypeError) as error:
        why = first_problem(error, _Told) if isinstance(error, ValidationError) else "its words are no names"
        raise MessageError(f"answer: {_Told._one_line(why)}") from None


_FACTORS = (".a", ".b")
_DTYPES = (torch.float32, torch.float64)
_MOST = 10**15
_LARGEST_FACTOR, _LARGEST_NUMBER = 1e6, 1e15
_LARGEST = float(torch.finfo(torch.float32).max)
_LOSS = Reported(least=-_LARGEST, most=_LARGEST)


def check_upload(
    upload: Upload,
    layout: Layout,
    method: Method,
    *,
    user: str,
    number: int,
    rank: int,
    weighted: bool = False,
    adaptive: bool = False,
    most: int = _MOST,
) -> None:
    """Whether an upload is a user's own of round ``number`` (from 1); ``rank`` is the largest that the user may have.

    With ``adaptive`` it says whether its change was within the server's bound; ``weighted`` it says how much data it
    has, up to ``most``.

    Raises:
        MessageError: it is not; says what is wrong.
    """
    if upload.users != (user,):
        raise MessageError(f"upload: from user {user!r}, in the name of {upload.users[0]!r}")
    if upload.round != number:
        raise MessageError(f"upload: of round {upload.round}; now it is round {number}")
    _check_rank("upload", int(upload.ranks[0]), rank)
    _check_tensors("upload", upload.tensors, layout, method.shared, leading=0, rank=int(upload.ranks[0]))
    _check_sizes(upload.tensors)
    _check_reports(upload.reports, _reported(method, layout, weighted=weighted, adaptive=adaptive, most=most))


def check_download(
    download: Download, layout: Layout, method: Method, *, user: str, users: tuple[str, ...], rounds: int, rank: int
) -> None:
    """Whether a download is for this user, one of ``users``, of what its method shares.

    Raises:
        MessageError: it is not.
    """
    if download.users != (user,):
        raise MessageError(f"download: for {download.users[0]!r}, and this is user {user!r}")
    if not 0 <= download.version <= rounds:
        raise MessageError(f"download: of version {download.version}; allowed: 0 to {rounds}")
    _check_rank("download", int(download.ranks[0]), rank)
    bounds, tensors = without_bound(download.tensors)
    if bounds is not None and not (len(bounds) == 1 and 0 < float(bounds) <= _LARGEST):
        raise MessageError(f"download: {CLIP_NORM} is {bounds.tolist()}; allowed: a number above 0")
    download = replace(download, tensors=tensors)
    _check_tensors("download", download.tensors, layout, method.received, leading=1, rank=int(download.ranks[0]))
    _check_models(download, users if method.server.peer_to_peer else (), user)


def check_verdict(verdict: Download, name: str, *, user: str, rounds: int) -> None:
    """Whether a download is what the server says of validation losses: 0 or 1, under a name.

    Raises:
        MessageError: it is not.
    """
    t = verdict.tensors.get(name)
    if t is None or len(verdict.tensors) != 1 or t.numel() != 1 or verdict.users != (user,):
        raise MessageError("task: a verdict on validation losses is something else")
    if not 0 <= verdict.version <= rounds:
        raise MessageError(f"verdict: after round {verdict.version}; allowed: 0 to {rounds}")


def validation_loss(message: Download | Upload, *, user: str, done: int) -> float | None:
    """What a user says of its model after ``done`` rounds; None where the message is about something else.

    Raises:
        MessageError: it is not the user's, or of another round, or no loss.
    """
    if not isinstance(message, Upload) or message.tensors:
        return None
    if message.users != (user,) or message.round != done:
        raise MessageError(f"validation loss: of {message.users[0]!r} after round {message.round}; now it is {done}")
    _check_reports(message.reports, {VALIDATION: _LOSS})
    return float(message.reports[VALIDATION])


def _check_rank(what: str, got: int, most: int) -> None:
    if not min(1, most) <= got <= most:
        raise MessageError(f"{what}: of rank {got}; allowed: {min(1, most)} to {most}")


def _check_models(download: Download, peers: tuple[str, ...], user: str) -> None:
    """As many models everywhere: one or more, or one for each of the others who have sent theirs."""
    counts = {t.shape[1] for t in download.tensors.values()}
    senders = download.senders
    if len(set(senders)) != len(senders) or not set(senders) <= set(peers):
        raise MessageError(f"download: its senders are {list(senders)[:9]}; allowed: {list(peers)[:9]}, each once")
    wanted = len(set(senders) - {user}) if peers else None
    if len(counts) != 1 or 0 in counts or (wanted is not None and counts != {wanted}):
        raise MessageError(f"download: has {sorted(counts)} models; allowed: {wanted or 'the same number of each'}")


def _check_tensors(
    what: str, tensors: Tree, layout: Layout, shared: frozenset[str], *, leading: int, rank: int
) -> None:
    """Every shared tensor and no other, ``(1, [models,] *shape)``, LoRA factors of the user's rank."""
    wanted = _shapes(layout, shared, rank)
    for name in sorted(wanted.keys() | tensors.keys()):
        got = tuple(tensors[name].shape[1 + leading :]) if name in tensors else None
        if name not in wanted or got not in wanted[name]:
            allowed = wanted[name][0] if name in wanted else "none of this name"
            raise MessageError(f"{what}: tensor {name!r} has shape {got}; allowed: {allowed}")
        if tensors[name].dtype not in _DTYPES:
            raise MessageError(f"{what}: tensor {name!r} is {_called(tensors[name])}; allowed: float32, float64")
        if not bool(tensors[name].isfinite().all()):
            raise MessageError(f"{what}: tensor {name!r} is not finite")


def _check_sizes(tensors: Tree) -> None:
    """No honest user sends larger numbers, and of larger ones a server's products and squares may have no finite sum.

    What it makes of them, and users download, may be larger: FlexLoRA puts singular values of products into one factor.
    """
    for name, t in tensors.items():
        most = _LARGEST_FACTOR if name.endswith(_FACTORS) else _LARGEST_NUMBER
        if t.numel() and (largest := float(t.abs().max())) > most:
            raise MessageError(f"upload: tensor {name!r} has a number of size {largest:.3g}; allowed: up to {most:g}")


def _shapes(layout: Layout, shared: frozenset[str], rank: int) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that each shared tensor may have: cut to the rank, or as wide as the widest user's."""
    whole = {name: tuple(t.shape[1:]) for name, t in restrict(_empty(layout), layout, shared).items()}
    return {name: [_cut(name, shape, rank), shape] for name, shape in whole.items()}


def _empty(layout: Layout) -> Tree:
    return layout.views(torch.zeros(1, layout.columns, device="meta"))


def _cut(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if not rank or not name.endswith(_FACTORS):
        return shape
    return (*shape[:-2], min(rank, shape[-2]), shape[-1])


def _reported(method: Method, layout: Layout, *, weighted: bool, adaptive: bool, most: int) -> dict[str, Reported]:
    """What goes with an upload besides the mean training loss, which not everybody tells."""
    shapes = {slot.name: slot.shape for slot in layout.slots}
    of_method = {
        name: replace(one, shape=shapes.get(one.like, one.shape))
        for part in method.client.parts
        for name, one in part.reports.items()
    }
    of_method |= {WITHIN: Reported(most=1, whole=True)} if adaptive else {}
    return of_method | ({COUNT: Reported(least=1, most=most, whole=True)} if weighted else {})


def _check_reports(reports: Tree, wanted: dict[str, Reported]) -> None:
    """Each that was asked for, and no other."""
    for name in sorted((wanted.keys() | reports.keys()) - ({LOSS} - wanted.keys())):
        if name not in wanted or name not in reports:
            raise MessageError(f"upload: report {name!r} {'is missing' if name in wanted else 'belongs to nothing'}")
    for name, t in reports.items():
        _check_numbers(name, t, wanted.get(name, _LOSS))


def _check_numbers(name: str, t: Tensor, wanted: Reported) -> None:
    if tuple(t.shape[1:]) != wanted.shape:
        raise MessageError(f"upload: report {name!r} has shape {tuple(t.shape[1:])}; allowed: {wanted.shape}")
    if (t.dtype not in _DTYPES) != wanted.whole or (wanted.whole and t.dtype != torch.int64):
        raise MessageError(
            f"upload: report {name!r} is {_called(t)}; allowed: {'int64' if wanted.whole else 'float32'}"
        )
    if not bool(((t >= wanted.least) & (t <= wanted.most)).all()):
        raise MessageError(f"upload: report {name!r} is not finite, or not from {wanted.least:g} to {wanted.most:g}")


def _called(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
