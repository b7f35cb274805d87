"""Every byte of whole federations: no number of a tensor that stays at home, no word of anybody's text.

Tensors are compared as pairs of neighbours, 8 bytes at any place of a message: a single float may come by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.federation.direct import Direct, nodes_of
from tests.federation.tiny import one_base, tiny

from comingle.config import parse_recipe
from comingle.federation.client import Client
from comingle.federation.messages import unpack_answer, unpack_task
from comingle.federation.participant import Tells
from comingle.federation.run_folder import run_federation
from comingle.protocol.messages import COUNT, LOSS, VALIDATION, Download, Upload
from comingle.protocol.wire import unpack
from comingle.training.client import Clients
from comingle.utils.trees import restrict

Numbers = np.ndarray
WORDS_CHARACTERS = 12
ALWAYS_TOLD = {"unit", "steps", "done", "back", "evaluated", "measure"}


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


class Watch:
    """What users have of their own at each moment that is looked at, and what they share, as pairs of neighbours."""

    def __init__(self) -> None:
        self.own: list[Numbers] = []
        self.shared: list[Numbers] = []

    def look(self, clients: Clients) -> None:
        state, layout = clients.state, clients.model.layout
        first_copy = state.rows[: len(clients.trainers)]
        rest = [state.rows[len(clients.trainers) :], state.first, state.second]
        mask = layout.mask(clients.method.shared)
        for name, t in layout.views(first_copy).items():
            columns = mask[layout.starts[name] : layout.starts[name] + t[0].numel()]
            self.own.append(pairs_of(t.flatten(1)[:, ~columns]))
            self.shared.append(pairs_of(t.flatten(1)[:, columns]))
        self.own += [pairs_of(t) for t in rest]

    @property
    def secret(self) -> Numbers:
        """Pairs of what is never shared; a copy that begins as what all share is no secret before it is trained."""
        return np.setdiff1d(np.concatenate(self.own), np.concatenate(self.shared))


def pairs_of(t: torch.Tensor) -> Numbers:
    """Neighbours as 8 bytes each; without zeros, of which padding consists."""
    values = t.detach().float().reshape(-1).numpy()
    left, right = values[:-1], values[1:]
    both = np.stack([left, right], 1)[(left != 0) & (right != 0) & (left != right)]
    return np.unique(np.ascontiguousarray(both).view(np.uint64))


def pairs_in(data: bytes) -> Numbers:
    """Every 8 bytes of a message, wherever they begin."""
    at = [np.frombuffer(data[start : start + (len(data) - start) // 8 * 8], dtype=np.uint64) for start in range(8)]
    return np.unique(np.concatenate(at))


def run(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, tells: Tells = "all") -> tuple[Direct, Watch]:
    """A federation of three, with all that went to and fro, and what everybody had whenever anything was sent."""
    best = {"evaluation__select": "best", "evaluation__every": 1, "training__weighting": "tokens"}
    content = tiny(folder, name, users=3, training__rounds=3, training__local_steps=2, **best)
    content |= {"method": SETTINGS.get(name, content["method"])}
    plan, nodes = nodes_of(parse_recipe(content), folder / "run")
    nodes = {name: Client(node.folder, node.own.model_copy(update={"tells": tells})) for name, node in nodes.items()}
    watch, upload, receive = Watch(), Clients.upload, Clients.receive

    def watched(clients: Clients, *args: object, **options: object) -> Upload:
        watch.look(clients)
        return upload(clients, *args, **options)  # pyright: ignore[reportArgumentType]

    def received(clients: Clients, download: Download) -> None:
        receive(clients, download)
        watch.look(clients)

    monkeypatch.setattr(Clients, "upload", watched)
    monkeypatch.setattr(Clients, "receive", received)
    channel = Direct(nodes)
    run_federation(plan, channel, folder / "run" / "server")
    for node in nodes.values():
        assert node._store is not None
        watch.look(node._store.clients)
    return channel, watch


SETTINGS = {"stacking": {"name": "stacking", "temperatures": True}}
METHODS = ("comigs-1g1s", "floral", "pcl", "fedsa-lora", "fdlora", "stacking", "feddpa")


@pytest.mark.parametrize(
    ("name", "tells"),
    [
        *((name, "all") for name in METHODS[:2]),
        *(pytest.param(name, "all", marks=pytest.mark.slow) for name in METHODS[2:]),
        pytest.param("comigs-1g1s", "scores", marks=pytest.mark.slow),
        pytest.param("floral", "scores", marks=pytest.mark.slow),
        pytest.param("comigs-1g1s", "losses", marks=pytest.mark.slow),
        ("comigs-1g1s", "nothing"),
        pytest.param("pcl", "nothing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_nothing_private_is_in_any_byte(
    name: str, tells: Tells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, watch = run(tmp_path, name, monkeypatch, tells)
    every = [data for _, task, answer in channel.recorded for data in (task, answer)]
    assert len(watch.secret) > 1000
    assert_no_numbers(every, watch)
    assert_no_text(every, tmp_path / "texts")
    assert_as_declared(channel)
    assert_told(channel, tells)


def assert_no_numbers(every: list[bytes], watch: Watch) -> None:
    secret = watch.secret
    shared = np.unique(np.concatenate(watch.shared))
    sent = np.unique(np.concatenate([pairs_in(data) for data in every]))
    assert np.intersect1d(sent, shared).size > 1000, "the comparison finds nothing, not even what is sent"
    assert np.intersect1d(sent, secret).size == 0


def assert_no_text(every: list[bytes], texts: Path) -> None:
    """Neither as text, nor as numbers of its characters, which a tokenizer of bytes makes of it."""
    passed = b"\n".join(every)
    for width in (1, 4, 8):
        window = WORDS_CHARACTERS * width
        seen = {passed[at : at + window] for at in range(len(passed) - window)}
        for path in texts.iterdir():
            text = path.read_bytes()
            for at in range(len(text) - WORDS_CHARACTERS):
                words = text[at : at + WORDS_CHARACTERS]
                assert b"".join(byte.to_bytes(width, "little") for byte in words) not in seen, words


def assert_as_declared(channel: Direct) -> None:
    for name, task, answer in channel.recorded:
        home = channel.nodes[name]._store
        assert home is not None
        method, layout = home.clients.method, home.clients.model.layout
        shared = restrict(layout.views(home.clients.state.rows), layout, method.shared)
        reported = {COUNT, LOSS} | {key for part in method.client.parts for key in part.reports}
        for data in (*unpack_task(task).messages, *unpack_answer(answer).messages):
            message = unpack(data)
            assert message.users == (name,)
            assert message.tensors.keys() in (shared.keys(), {"lowest_loss"}, set[str]())
            if isinstance(message, Upload):
                assert message.reports.keys() <= ({VALIDATION} if not message.tensors else reported)


def assert_told(channel: Direct, tells: str) -> None:
    for _, _, data in channel.recorded:
        answer = unpack_answer(data)
        if tells != "all":
            assert not {"gates", "mixture"} & answer.reported.keys()
        if tells in ("losses", "nothing"):
            assert set(answer.reported) <= ALWAYS_TOLD | ({"train_loss"} if tells == "losses" else set())
        for one in answer.messages if tells == "nothing" else ():
            message = unpack(one)
            assert isinstance(message, Upload)
            assert LOSS not in message.reports
