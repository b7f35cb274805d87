"""Messages as bytes: the only way in which data leaves a user.

    magic "CMGL" · format version · length of the header · length of the tensors · CRC-32 of both · header · tensors

The header is JSON: the message's kind, round or version, user and rank. The tensors are in the safetensors format.
Nothing in a message is executed. A message with a wrong length, checksum, version or tensor is refused.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from comingle.protocol.messages import SCALE, Download, Upload
from comingle.utils.errors import MessageError
from comingle.utils.trees import Tree

FORMAT = 1
"""Version of the format; incremented when the meaning of a message's bytes changes."""

_MAGIC = b"CMGL"
_PREFIX = struct.Struct("<4sHIQI")
_REPORT_PREFIX = "report/"
_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
}
_BYTES_PER_ENTRY = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1}
_DTYPE_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I8")
"""Order of dtypes in a safetensors file; tensors of one dtype are in the order of their names."""
_LENGTH_BYTES = 8
"""Size of the header length with which a safetensors file begins."""

MAX_BYTES = 8 << 30
"""Size limit of a message; a longer one is refused before any of it is read."""


def pack(message: Download | Upload) -> bytes:
    """Return one user's message as bytes: lengths and checksum, JSON header, and tensors in the safetensors format."""
    header = _encode_header(message)
    tensors = save({name: t.detach().contiguous().cpu() for name, t in _tensors_to_send(message).items()})
    checksum = zlib.crc32(tensors, zlib.crc32(header))
    prefix = _PREFIX.pack(_MAGIC, FORMAT, len(header), len(tensors), checksum)
    return prefix + header + tensors


def unpack(data: bytes) -> Download | Upload:
    """Return the message that :func:`pack` has encoded.

    Raises:
        MessageError: The bytes are no message: truncated, corrupted, or of another version.
    """
    header, tensors = _split(data)
    try:
        return _message_from(json.loads(header), load(tensors))
    # torch raises RuntimeError for numbers that a tensor cannot hold.
    except (KeyError, TypeError, ValueError, SafetensorError, OverflowError, RecursionError, RuntimeError) as error:
        raise MessageError(f"message: not a valid message ({type(error).__name__}: {error})") from None


def packed_bytes(message: Download | Upload) -> list[int]:
    """Return the length of each user's packed message, computed from names, shapes and dtypes without packing it.

    Apart from the user's name, the length depends only on the user's rank, and on whether a download leaves out the
    user's own upload. It is computed once for each combination.
    """
    senders: set[str] = set()
    if isinstance(message, Download):
        senders.update(message.senders)
    length_without_name: dict[tuple[int, bool], int] = {}  # by rank, and whether the user is a sender
    lengths: list[int] = []
    for index, (user, rank) in enumerate(zip(message.users, message.ranks.tolist(), strict=True)):
        rank_and_is_sender = (rank, user in senders)
        name_length = _name_bytes(user)
        if rank_and_is_sender not in length_without_name:
            length_without_name[rank_and_is_sender] = _packed_length(message.of_user(index)) - name_length
        lengths.append(length_without_name[rank_and_is_sender] + name_length)
    return lengths


def _packed_length(message: Download | Upload) -> int:
    """Return the length of one user's packed message."""
    if isinstance(message, Download) and message.senders:
        # ``_tensors_to_send`` indexes these tensors, which copies them; tensors on the meta device have no content.
        message = replace(message, tensors={name: t.to("meta") for name, t in message.tensors.items()})
    names_dtypes_and_shapes = []
    for name, t in _tensors_to_send(message).items():
        names_dtypes_and_shapes.append((name, _DTYPES[t.dtype], tuple(t.shape)))
    return _PREFIX.size + len(_encode_header(message)) + _safetensors_bytes(tuple(names_dtypes_and_shapes))


@lru_cache(maxsize=1 << 16)
def _name_bytes(user: str) -> int:
    """Return the bytes that a user's name takes in a message's JSON header, quotes included."""
    return len(json.dumps(user).encode())


def _encode_header(message: Download | Upload) -> bytes:
    """Return the JSON header of one user's message, such as ``{"kind":"upload","round":3,"user":"ada","rank":8}``."""
    (user,) = message.users
    rank = int(message.ranks[0])
    header: dict[str, Any]
    if isinstance(message, Upload):
        header = {"kind": "upload", "round": message.round, "user": user, "rank": rank}
    else:
        header = {"kind": "download", "version": message.version, "user": user, "rank": rank}
        if message.senders:
            header["senders"] = list(message.senders)
    return json.dumps(header, separators=(",", ":")).encode()


def _tensors_to_send(message: Download | Upload) -> Tree:
    """Return the tensors of one user's message as they are sent: without users dimension, cut to the user's LoRA rank.

    A download with the uploads of other users (``senders``) leaves out the receiver's own upload, which it has already.
    """
    rank = int(message.ranks[0])
    tensors = {name: _without_rank_padding(name, t[0], rank) for name, t in message.tensors.items()}
    if isinstance(message, Upload):
        for name, report in message.reports.items():
            tensors[_REPORT_PREFIX + name] = report[0]
        return tensors
    (receiver,) = message.users
    if receiver not in message.senders:
        return tensors
    rows_of_others = [row for row, sender in enumerate(message.senders) if sender != receiver]
    return {name: t[rows_of_others] for name, t in tensors.items()}  # a tensor is (senders, *shape)


def _without_rank_padding(name: str, t: Tensor, rank: int) -> Tensor:
    """Return a LoRA factor without the padding beyond its user's rank; other tensors unchanged.

    Args:
        name: Name of the tensor; ends in ".a" or ".b" for a factor, and in ".a.scale" for the scales of a compressed
            one.
        t: The tensor; a factor is ``(..., rank, width)``.
        rank: The user's rank; 0 without LoRA.
    """
    is_factor = name.removesuffix(SCALE).endswith((".a", ".b"))
    if not is_factor or rank == 0:
        return t
    return t[..., :rank, :]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Split a packed message into its JSON header and its tensors in the safetensors format.

    Raises:
        MessageError: Lengths, format version or checksum are wrong.
    """
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise MessageError(f"message: got {len(data)} bytes that do not begin with the header of a message")
    _magic, version, header_length, tensors_length, checksum = _PREFIX.unpack_from(data)
    if version != FORMAT:
        raise MessageError(f"message: got format {version}; allowed: {FORMAT}")
    length = _PREFIX.size + header_length + tensors_length
    if length != len(data) or length > MAX_BYTES:
        raise MessageError(f"message: got {len(data)} bytes, header says {length}; allowed: at most {MAX_BYTES}")
    if zlib.crc32(data[_PREFIX.size :]) != checksum:
        raise MessageError("message: wrong checksum; the message was changed on the way")
    header_end = _PREFIX.size + header_length
    return data[_PREFIX.size : header_end], data[header_end:]


def _message_from(header: Mapping[str, Any], tensors: Tree) -> Download | Upload:
    """Return the message of one user with this header and these tensors, which get a users dimension of 1.

    Raises:
        KeyError, TypeError, ValueError: The header lacks a key or has a wrong value.
    """
    if header["kind"] == "download":
        return Download(
            version=int(header["version"]),
            users=(str(header["user"]),),
            tensors={name: t.unsqueeze(0) for name, t in tensors.items()},
            ranks=torch.tensor([int(header["rank"])]),
            senders=tuple(str(sender) for sender in header.get("senders", ())),
        )
    message_tensors: Tree = {}
    reports: Tree = {}
    for name, t in tensors.items():
        if name.startswith(_REPORT_PREFIX):
            reports[name.removeprefix(_REPORT_PREFIX)] = t.unsqueeze(0)
        else:
            message_tensors[name] = t.unsqueeze(0)
    return Upload(
        round=int(header["round"]),
        users=(str(header["user"]),),
        tensors=message_tensors,
        ranks=torch.tensor([int(header["rank"])]),
        reports=reports,
    )


@lru_cache(maxsize=256)
def _safetensors_bytes(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> int:
    """Return the length of a safetensors file: 8 bytes, its header padded to a multiple of 8, and the tensors.

    Args:
        tensors: Name, dtype and shape of each tensor, such as ``("up.a", "F32", (8, 64))``.
    """

    def by_dtype_and_name(tensor: tuple[str, str, tuple[int, ...]]) -> tuple[int, str]:
        name, dtype, _shape = tensor
        return _DTYPE_ORDER.index(dtype), name

    entries: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in sorted(tensors, key=by_dtype_and_name):  # in the order in which safetensors stores them
        size = math.prod(shape) * _BYTES_PER_ENTRY[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    header_length = len(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())
    padded_header_length = math.ceil(header_length / 8) * 8
    return _LENGTH_BYTES + padded_header_length + offset
