"""A real client, except for its answers in some rounds: ``faults.json`` in its folder names them, from 1.

A fault is one of the answer to the task that has a round's training, or "FAULT in STEP" to the one that has that step.

The user does its work and keeps it, as an honest one does; what leaves the process is something else, or leaves late.
"""

from __future__ import annotations

import json
import math
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import torch

from comingle.federation.client import Client
from comingle.federation.messages import Answer, unpack_answer, unpack_task
from comingle.protocol.messages import Upload
from comingle.protocol.wire import pack, unpack

GO = "go"
"""File in a user's folder for which it waits before it answers, where its fault is to wait."""
WAITING = "waiting"
"""And the one by which it says that it does."""
WAITS_SECONDS = 120.0
HUGE = 10**10

_MESSAGE = struct.Struct("<4sHIQI")


class FaultyClient(Client):
    """A client whose answers are changed, or held back, before they leave."""

    def handle(self, data: bytes, deadline: float = math.inf) -> bytes:
        task, honest = unpack_task(data), super().handle(data, deadline)
        path = self.folder / "faults.json"
        faults = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        fault, _, step = faults.get(str(task.round + 1), "").partition(" in ")
        if (step or "train") not in task.todo:
            return honest
        if fault == "waits":
            (self.folder / WAITING).touch()
            until = time.monotonic() + WAITS_SECONDS
            while not (self.folder / GO).exists() and time.monotonic() < until:
                time.sleep(0.2)
        return FAULTS[fault](honest) if fault in FAULTS else honest


def of_message(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """An answer with another upload in it, itself as it must be."""

    def lie(data: bytes) -> bytes:
        answer: Answer = unpack_answer(data)
        return replace(answer, messages=tuple(change(message) for message in answer.messages)).pack()

    return lie


def of_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    """An upload whose first tensor is another."""

    def lie(message: bytes) -> bytes:
        upload = unpack(message)
        assert isinstance(upload, Upload)
        name, t = next(iter(upload.tensors.items()))
        return pack(replace(upload, tensors={**upload.tensors, name: change(t)}))

    return of_message(lie)


def of_another_version(message: bytes) -> bytes:
    magic, version, *rest = _MESSAGE.unpack_from(message)
    return _MESSAGE.pack(magic, version + 1, *rest) + message[_MESSAGE.size :]


def huge_message(message: bytes) -> bytes:
    """It says that 10 GB of tensors follow."""
    magic, version, header, _, check = _MESSAGE.unpack_from(message)
    return _MESSAGE.pack(magic, version, header, HUGE, check) + message[_MESSAGE.size :]


def huge_tensor(message: bytes) -> bytes:
    """Its lengths and checksum are right, and one of its tensors says that it has 10 GB."""
    magic, version, length, _, _ = _MESSAGE.unpack_from(message)
    header = message[_MESSAGE.size : _MESSAGE.size + length]
    said = {"w": {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}
    words = json.dumps(said).encode()
    tensors = struct.pack("<Q", len(words)) + words
    check = zlib.crc32(tensors, zlib.crc32(header))
    return _MESSAGE.pack(magic, version, length, len(tensors), check) + header + tensors


def huge_answer(data: bytes) -> bytes:
    """Its words say that 10 GB follow."""
    magic, version, length, _ = struct.unpack_from("<4sHII", data)
    words = json.loads(data[14 : 14 + length])
    header = json.dumps(words | {"lengths": [HUGE]}).encode()
    return struct.pack("<4sHII", magic, version, len(header), zlib.crc32(header)) + header + data[14 + length :]


FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": of_message(lambda message: message[:-5]),
    "another version": of_message(of_another_version),
    "wrong shapes": of_tensor(lambda t: t[..., :-1]),
    "NaN": of_tensor(lambda t: torch.full_like(t, float("nan"))),
    "message of 10 GB": of_message(huge_message),
    "tensor of 10 GB": of_message(huge_tensor),
    "answer of 10 GB": huge_answer,
    "answer cut off": lambda data: data[: len(data) // 2],
}
