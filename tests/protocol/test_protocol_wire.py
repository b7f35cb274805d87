"""Messages as bytes: nothing is lost, lengths are known beforehand, and damage is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from comingle.protocol.messages import Download, Upload, join_downloads, join_uploads
from comingle.protocol.wire import FORMAT, MAX_BYTES, pack, packed_bytes, unpack
from comingle.utils.errors import MessageError
from comingle.utils.trees import Tree


def tree(*lead: int) -> Tree:
    """Tensors of several types and names; two are factors of a LoRA of rank 3."""
    draw = torch.Generator().manual_seed(0)
    return {
        "layers.0.q.a": torch.randn(*lead, 3, 5, generator=draw),
        "layers.0.q.b": torch.randn(*lead, 2, 3, 4, generator=draw),
        "weight é": torch.randn(*lead, 7, generator=draw).double(),
        "half": torch.randn(*lead, 3, generator=draw).bfloat16(),
        "count": torch.randint(9, lead, generator=draw),
    }


def upload(ranks: tuple[int, ...] = (3, 3)) -> Upload:
    names = tuple(f"user {i}" for i in range(len(ranks)))
    tensors = tree(len(ranks))
    for i, rank in enumerate(ranks):
        tensors["layers.0.q.a"][i, rank or 3 :] = 0
        tensors["layers.0.q.b"][i, :, rank or 3 :] = 0
    reports = {"mixture": torch.rand(len(ranks), 2), "loss": torch.rand(len(ranks))}
    return Upload(round=4, users=names, tensors=tensors, ranks=torch.tensor(ranks), reports=reports)


def same(left: Tree, right: Tree) -> bool:
    return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.parametrize("ranks", [(3, 3), (1, 3, 2), (0, 0), (3,)])
def test_an_upload_comes_back_as_it_was(ranks: tuple[int, ...]) -> None:
    sent = upload(ranks)
    parts = [unpack(pack(part)) for part in sent.split()]
    assert all(isinstance(part, Upload) for part in parts)
    back = join_uploads([part for part in parts if isinstance(part, Upload)])
    assert (back.round, back.users, back.ranks.tolist()) == (4, sent.users, list(ranks))
    if max(ranks) == 3 or not any(ranks):  # padding that nobody needs does not come back
        assert same(back.tensors, sent.tensors)
    assert same(back.reports, sent.reports)


def test_padding_beyond_a_users_rank_does_not_travel() -> None:
    small, large = (len(pack(part)) for part in upload((1, 3)).split())
    assert large - small >= 2 * (5 + 2 * 4) * 4 - 8  # two ranks of A and of both B, but for the header's padding
    assert b"user 1" not in pack(upload((1, 3)).split()[0])


def test_a_download_comes_back_as_it_was() -> None:
    sent = Download(version=2, users=("a", "b"), tensors=tree(2, 4), ranks=torch.tensor([0, 0]))
    parts = [unpack(pack(part)) for part in sent.split()]
    back = join_downloads([part for part in parts if isinstance(part, Download)])
    assert (back.version, back.users, back.senders) == (2, ("a", "b"), ())
    assert same(back.tensors, sent.tensors)


def test_what_a_peer_has_sent_is_not_sent_back_to_it() -> None:
    own = {"w": torch.arange(3.0).view(1, 3, 1)}
    sent = Download(version=1, users=("b",), tensors=own, ranks=torch.tensor([0]), senders=("a", "b", "c"))
    back = unpack(pack(sent))
    assert isinstance(back, Download)
    assert back.senders == ("a", "b", "c")
    assert back.tensors["w"].flatten().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("ranks", [(3, 3), (1, 3, 2), (0,)])
def test_the_length_is_known_without_packing(ranks: tuple[int, ...]) -> None:
    together = upload(ranks)
    assert packed_bytes(together) == [len(pack(part)) for part in together.split()]
    peers = Download(version=12, users=("u",), tensors=tree(1, 3), ranks=torch.tensor([2]), senders=("t", "u", "ü"))
    assert packed_bytes(peers) == [len(pack(peers))]
    nothing = Upload(round=1, users=("u",), tensors={}, ranks=torch.tensor([0]))
    assert packed_bytes(nothing) == [len(pack(nothing))]


def test_the_length_is_known_whatever_users_are_called_and_whoever_has_sent() -> None:
    """Of one rank all, so that only names and what each has sent itself tell their messages apart."""
    names = ("u", "ü", "a long name", 'a "quoted" one', "雪", "b\\s")
    sent = replace(upload((0,) * len(names)), users=names)
    assert packed_bytes(sent) == [len(pack(part)) for part in sent.split()]
    peers = Download(
        version=3, users=names, tensors=tree(len(names), 3), ranks=sent.ranks, senders=("ü", "somebody", "雪")
    )
    assert packed_bytes(peers) == [len(pack(part)) for part in peers.split()]


def test_uploads_are_copied_out_of_views() -> None:
    rows = torch.arange(12.0).view(2, 6)
    sent = Upload(round=1, users=("u",), tensors={"w": rows[:1, ::2]}, ranks=torch.tensor([0]))
    data = pack(sent)
    rows.zero_()
    back = unpack(data)
    assert back.tensors["w"].tolist() == [[0.0, 2.0, 4.0]]


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    data, draw = pack(upload().split()[0]), random.Random(0)
    for _ in range(300):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        broken = bytearray(data)
        broken[at] ^= 1 << bit
        with pytest.raises(MessageError, match=r"^message: "):
            unpack(bytes(broken))
    for length in (0, 3, 20, len(data) - 1):
        with pytest.raises(MessageError, match=rf"^message: .*{length}"):
            unpack(data[:length])
    with pytest.raises(MessageError, match=f"^message: .*{len(data) + 1} bytes.*{len(data)}"):
        unpack(data + b"x")


def test_another_format_is_refused_with_both_numbers() -> None:
    data = bytearray(pack(upload().split()[0]))
    data[4] += 1
    with pytest.raises(MessageError, match=f"^message: .*format {FORMAT + 1}; allowed: {FORMAT}$"):
        unpack(bytes(data))


def test_a_message_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    data = bytearray(pack(upload().split()[0]))
    data[10:18] = (2**62).to_bytes(8, "little")
    with pytest.raises(MessageError, match=f"^message: .*{str(2**62)[:15]}.*; allowed: .*{MAX_BYTES}"):
        unpack(bytes(data))


def test_one_users_part_holds_nothing_of_another() -> None:
    sent = upload((3, 3))
    poisoned = replace(sent, tensors={n: t.clone() for n, t in sent.tensors.items()})
    for t in poisoned.tensors.values():
        t[1] = 77 if t.dtype == torch.int64 else torch.nan
    assert pack(poisoned.split()[0]) == pack(sent.split()[0])


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_counted_whatever_types_are_mixed(narrow: torch.dtype) -> None:
    """The order of types decides where tensors lie, and so with how many digits the header says it."""
    for size in range(1, 140, 3):
        tensors = {"a": torch.zeros(1, size, dtype=torch.float64), "b": torch.zeros(1, size, dtype=narrow)}
        tensors["c"] = torch.zeros(1, size, dtype=torch.bfloat16)
        message = replace(upload((0,)), tensors=tensors, reports={"count": torch.tensor([5])})
        assert packed_bytes(message) == [len(pack(message))]
