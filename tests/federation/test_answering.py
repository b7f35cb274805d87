"""Who answers at an address: real servers of a federation with and without TLS, web pages, and nothing."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from comingle.federation.flower.certificates import make_certificates
from comingle.federation.flower.fleet_server import make_fleet_api, make_states, serve_fleet_api
from comingle.federation.flower.probe import ProbeResult, probe_server, tls_problem
from comingle.federation.flower.processes import free_port


@contextmanager
def serving_clients(folder: Path | None = None, *, keys_only: bool = False) -> Iterator[str]:
    files, port = make_certificates(folder, ["localhost"]) if folder else None, free_port()
    api = make_fleet_api(make_states(), keys_only=keys_only)
    server = serve_fleet_api(api, "127.0.0.1", port, files and files.certificate, files and files.key)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True


@contextmanager
def speaking_http(folder: Path | None = None) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    if folder is not None:
        files = make_certificates(folder, ["localhost"])
        secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        secure.load_cert_chain(files.certificate, files.key)
        server.socket = secure.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("keys_only", [False, True])
def test_a_server_without_tls(*, keys_only: bool) -> None:
    with serving_clients(keys_only=keys_only) as address:
        assert probe_server(address) is ProbeResult.PLAIN
        assert tls_problem(address, probe_server(address), secure=False) == ""
        assert f"{address} does not use TLS; omit --certificates" in tls_problem(
            address, probe_server(address), secure=True
        )


def test_a_server_with_tls(tmp_path: Path) -> None:
    with serving_clients(tmp_path) as address:
        assert probe_server(address) is ProbeResult.SECURE
        assert tls_problem(address, probe_server(address), secure=True) == ""
        assert f"{address} uses TLS" in tls_problem(address, probe_server(address), secure=False)


def test_a_page_is_no_server_of_a_federation() -> None:
    with speaking_http() as address:
        assert probe_server(address) is ProbeResult.OTHER
        assert (
            tls_problem(address, ProbeResult.OTHER, secure=True)
            == tls_problem(address, ProbeResult.OTHER, secure=False)
            == ""
        )


def test_nobody_is_no_problem_since_a_server_may_come_later() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert probe_server(address) is ProbeResult.NO_RESPONSE
        assert (
            tls_problem(address, probe_server(address), secure=True)
            == tls_problem(address, probe_server(address), secure=False)
            == ""
        )
    for name in ("nobody.invalid", "a..b", "x" * 70):
        assert probe_server(f"{name}:9092") is ProbeResult.NO_RESPONSE


def test_who_listens_and_says_nothing_is_asked_for_so_long_and_no_longer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert probe_server(f"127.0.0.1:{silent.getsockname()[1]}", seconds=0.2) is ProbeResult.NO_RESPONSE


def test_who_is_too_slow_to_be_known_is_nobody_yet() -> None:
    """Something was said, as by TLS to words that are none of it, and the handshake then takes too long."""

    def answer(listening: socket.socket) -> None:
        for said in (b"\x15\x03\x01\x00\x02\x02\x46 and more", b""):
            connection, _ = listening.accept()
            with connection:
                connection.sendall(said)
                connection.settimeout(0.6)
                with suppress(OSError):
                    while connection.recv(1000):
                        pass

    with socket.socket() as slow:
        slow.bind(("127.0.0.1", 0))
        slow.listen()
        threading.Thread(target=answer, args=(slow,), daemon=True).start()
        assert probe_server(f"127.0.0.1:{slow.getsockname()[1]}", seconds=0.2) is ProbeResult.NO_RESPONSE
