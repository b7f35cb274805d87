"""A TCP proxy that records, and on demand disturbs, connections between a client and a server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from comingle.federation.flower.processes import free_port

CHUNK_BYTES = 65536
DELAY_SECONDS = 2.0


@dataclass
class Proxy:
    """Forwards connections to ``port``.

    ``disturbance`` is None or a key of :data:`DISTURBANCES`; ``up`` is False while new connections are refused.
    ``carried`` holds the bytes that went up, and those that came down.
    """

    port: int
    own: int = field(default_factory=free_port)
    up: bool = True
    disturbance: str | None = None
    carried: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    _open: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Proxy:
        self._listener = socket.create_server(("127.0.0.1", self.own))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        """Close all connections and refuse new ones until ``up`` is set."""
        self.up = False
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    @contextmanager
    def disturbed(self, how: str) -> Iterator[None]:
        """Disturb all connections, old and new, within the block."""
        self.disturbance = how
        try:
            yield
        finally:
            self.disturbance = None

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self.up:
                    client.close()
                    continue
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self.port)) as server:
            self._open += [client, server]
            back = threading.Thread(target=self._pump, args=(server, client, 1), daemon=True)
            back.start()
            self._pump(client, server, 0)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, way: int) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self.carried[way].extend(data)
                if self.disturbance is None:
                    target.sendall(data)
                else:
                    DISTURBANCES[self.disturbance](data, target)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _delay(data: bytes, target: socket.socket) -> None:
    time.sleep(DELAY_SECONDS)
    target.sendall(data)


def _split(data: bytes, target: socket.socket) -> None:
    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(data), 7):
        target.sendall(data[at : at + 7])
        time.sleep(0.001)


def _cut(data: bytes, target: socket.socket) -> None:
    target.sendall(data[: len(data) // 2])
    raise OSError("cut")


def _double(data: bytes, target: socket.socket) -> None:
    half = len(data) // 2
    target.sendall(data[:half] + data[max(0, half - 16) :])


def _swallow(data: bytes, target: socket.socket) -> None:
    """Keep the connection open and carry nothing."""


def _garble(data: bytes, target: socket.socket) -> None:
    target.sendall(bytes(byte ^ (at % 50 == 25) for at, byte in enumerate(data)))


DISTURBANCES: dict[str, Callable[[bytes, socket.socket], None]] = {
    "delayed": _delay,
    "split": _split,
    "cut": _cut,
    "doubled": _double,
    "silent": _swallow,
    "garbled": _garble,
}
