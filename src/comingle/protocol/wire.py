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
_REPORT = "report/"
_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
}
_WIDTHS = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1}
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I8")
"""Order of dtypes in a safetensors file; tensors of one dtype are in the order of their names."""
_LENGTH_BYTES = 8
"""Size of the header length with which a safetensors file begins."""

MAX_BYTES = 8 << 30
"""Size limit of a message; a longer one is refused before any of it is read."""


def pack(message: Download | Upload) -> bytes:
    """Return one user's message as bytes: lengths and checksum, JSON header, and tensors in the safetensors format."""
    header = json.dumps(_header(message), separators=(",", ":")).encode()
    tensors = save({name: t.detach().contiguous().cpu() for name, t in _tensors_to_send(message).items()})
    checksum = zlib.crc32(tensors, zlib.crc32(header))
    return _PREFIX.pack(_MAGIC, FORMAT, len(header), len(tensors), checksum) + header + tensors


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

    Messages to users of one rank differ in length only by the users' names, and by whether a download leaves out the
    user's own upload; so few lengths are computed even for many users.
    """
    senders = set(message.senders) if isinstance(message, Download) else set[str]()
    lengths_without_name: dict[tuple[int, bool], int] = {}
    lengths = []
    for index, (user, rank) in enumerate(zip(message.users, message.ranks.tolist(), strict=True)):
        key = rank, user in senders
        name_length = _name_bytes(user)
        if key not in lengths_without_name:
            lengths_without_name[key] = _packed_length(message.of(index)) - name_length
        lengths.append(lengths_without_name[key] + name_length)
    return lengths


def _packed_length(message: Download | Upload) -> int:
    """Return the length of one user's packed message."""
    if isinstance(message, Download) and message.senders:
        # Leaving out the user's own upload would copy tensors; on the meta device it takes no memory.
        message = replace(message, tensors={name: t.to("meta") for name, t in message.tensors.items()})
    header = len(json.dumps(_header(message), separators=(",", ":")).encode())
    shapes = tuple((name, _DTYPES[t.dtype], tuple(t.shape)) for name, t in _tensors_to_send(message).items())
    return _PREFIX.size + header + _tensors_bytes(shapes)


@lru_cache(maxsize=1 << 16)
def _name_bytes(user: str) -> int:
    """Return the length of a user's name in the JSON header, quotes included."""
    return len(json.dumps(user).encode())


def _header(message: Download | Upload) -> dict[str, Any]:
    """Return the JSON header of one user's message: kind, round or version, user, rank, and a download's senders."""
    (user,), rank = message.users, int(message.ranks[0])
    if isinstance(message, Upload):
        return {"kind": "upload", "round": message.round, "user": user, "rank": rank}
    header: dict[str, Any] = {"kind": "download", "version": message.version, "user": user, "rank": rank}
    return header | ({"senders": list(message.senders)} if message.senders else {})


def _tensors_to_send(message: Download | Upload) -> Tree:
    """Return the tensors of one user's message as they are sent: without users dimension, cut to the user's LoRA rank.

    A download may contain the uploads of other users (``senders``), for the receiver to combine. If the receiver is
    among the senders, its own upload is left out, as it has that already.
    """
    rank = int(message.ranks[0])
    tensors = {name: _without_rank_padding(name, t[0], rank) for name, t in message.tensors.items()}
    if isinstance(message, Upload):
        return tensors | {_REPORT + name: t[0] for name, t in message.reports.items()}
    (receiver,) = message.users
    if receiver not in message.senders:
        return tensors
    others = [i for i, sender in enumerate(message.senders) if sender != receiver]
    return {name: t[others] for name, t in tensors.items()}


def _without_rank_padding(name: str, t: Tensor, rank: int) -> Tensor:
    """Return a LoRA factor without the padding beyond its user's rank."""
    return t[..., :rank, :] if rank and name.removesuffix(SCALE).endswith((".a", ".b")) else t


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Split a packed message into its JSON header and its tensors in the safetensors format.

    Raises:
        MessageError: Lengths, format version or checksum are wrong.
    """
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise MessageError(f"message: got {len(data)} bytes that do not begin with the header of a message")
    _, version, header_length, tensors_length, checksum = _PREFIX.unpack_from(data)
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
    stacked = {name: t.unsqueeze(0) for name, t in tensors.items()}
    if header["kind"] == "download":
        return Download(
            version=int(header["version"]),
            users=(str(header["user"]),),
            tensors=stacked,
            ranks=torch.tensor([int(header["rank"])]),
            senders=tuple(str(sender) for sender in header.get("senders", ())),
        )
    return Upload(
        round=int(header["round"]),
        users=(str(header["user"]),),
        tensors={name: t for name, t in stacked.items() if not name.startswith(_REPORT)},
        ranks=torch.tensor([int(header["rank"])]),
        reports={n.removeprefix(_REPORT): t for n, t in stacked.items() if n.startswith(_REPORT)},
    )


@lru_cache(maxsize=256)
def _tensors_bytes(shapes: tuple[tuple[str, str, tuple[int, ...]], ...]) -> int:
    """Return the length of a safetensors file: 8 bytes, its header padded to a multiple of 8, and the tensors.

    Args:
        shapes: Name, dtype and shape of each tensor.
    """
    # A safetensors file has its tensors sorted by dtype and name.
    ordered = sorted(shapes, key=lambda shape: (_ORDER.index(shape[1]), shape[0]))
    entries, offset = {}, 0
    for name, dtype, shape in ordered:
        size = math.prod(shape) * _WIDTHS[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    header_length = len(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())
    padded_header_length = math.ceil(header_length / 8) * 8
    return _LENGTH_BYTES + padded_header_length + offset
