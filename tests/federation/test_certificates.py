"""Certificates for trying: what is written, who may read it, and that it is believed by whom it should."""

from __future__ import annotations

import datetime
import http.server
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from comingle.federation.flower import certificates
from comingle.federation.flower.certificates import Files, make_certificates, read_certificates
from comingle.federation.flower.probe import certificate_problem
from comingle.utils.errors import RecipeError


def fetch(folder: Path, authority: Path, host: str) -> int:
    """The status of a page that a server with this folder's certificate gives to who believes the authority."""
    files = read_certificates(folder)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(files.certificate, files.key)
    server.socket = secure.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.handle_request, daemon=True).start()
    try:
        trusting = ssl.create_default_context(cafile=authority)
        with urllib.request.urlopen(f"https://{host}:{server.server_port}/", context=trusting, timeout=10) as page:
            return page.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    finally:
        server.server_close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_servers_certificate_is_believed_by_who_has_its_authority(tmp_path: Path, host: str) -> None:
    files = make_certificates(tmp_path, ["example.org"])
    assert fetch(tmp_path, files.authority, host) == 501  # it has answered, that it knows no such thing


def test_and_not_by_who_has_another(tmp_path: Path) -> None:
    make_certificates(tmp_path / "one", ["localhost"])
    other = make_certificates(tmp_path / "two", ["localhost"])
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(tmp_path / "one", other.authority, "localhost")


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], ["ada"])
    for secret in (tmp_path / "server.key", tmp_path / "users" / "ada.key"):
        assert secret.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "ada.key",
        "ada.pub",
        "ca.pem",
        "server.key",
        "server.pem",
    ]


def test_a_users_keys_belong_together(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["localhost"], ["ada", "bob"])
    assert list(files.users) == ["ada", "bob"]
    private = load_ssh_private_key((tmp_path / "users" / "ada.key").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key(files.users["ada"].read_bytes())


def test_users_may_come_later_and_nobodys_key_is_replaced(tmp_path: Path) -> None:
    first = make_certificates(tmp_path, ["localhost"], ["ada"])
    before = first.users["ada"].read_bytes(), first.certificate.read_bytes()
    later = make_certificates(tmp_path, [], ["ada", "bob"])
    assert list(later.users) == ["ada", "bob"]
    assert (later.users["ada"].read_bytes(), later.certificate.read_bytes()) == before


def test_any_name_has_its_file_and_stays_in_the_folder(tmp_path: Path) -> None:
    names = ["../eve", "Zoë Ångström", "a.b", "."]
    files = make_certificates(tmp_path, ["localhost"], names)
    assert sorted(files.users) == sorted(names)
    assert {path.parent for path in files.users.values()} == {tmp_path / "users"}


@pytest.fixture
def aged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Files]:
    """Makes certificates as many days ago as it is told; a negative number makes them in the future."""

    def make(days: int) -> Files:
        made = certificates._certificate

        def shifted(*given: Any) -> x509.CertificateBuilder:
            now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
            builder = made(*given)
            builder._not_valid_before = now.replace(tzinfo=None, microsecond=0)
            builder._not_valid_after = (now + datetime.timedelta(days=825)).replace(tzinfo=None, microsecond=0)
            return builder

        with monkeypatch.context() as patch:
            patch.setattr(certificates, "_certificate", shifted)
            patch.setattr(certificates, "require_valid", lambda path: None)
            return make_certificates(tmp_path / "aged", ["localhost"], ["ada"])

    return make


@pytest.mark.parametrize(
    ("days", "server", "client"),
    [
        (826, r"server.pem expired on \d{4}-", r"expired .*UTC"),
        (-2, r"server.pem is not valid before \d{4}-", r"valid yet .*UTC"),
    ],
    ids=["expired", "not yet valid"],
)
def test_a_certificate_outside_its_time_is_said_to_be_that(
    days: int, server: str, client: str, aged: Callable[[int], Files]
) -> None:
    files = aged(days)
    with pytest.raises(RecipeError, match=server) as refused:
        read_certificates(files.authority.parent)
    assert str(refused.value).count(" UTC") == 2  # the limit, and this machine's clock
    with listening(files) as address:
        assert re.search(client, certificate_problem(address, files.authority))


def test_a_certificate_that_is_trusted_is_no_problem_and_others_say_why(tmp_path: Path) -> None:
    files, other = (make_certificates(tmp_path / name, ["localhost"]) for name in ("one", "two"))
    with listening(files) as address:
        assert certificate_problem(address, files.authority) == ""
        told = certificate_problem(address, other.authority)
        assert address in told
        assert str(other.authority) in told
        with pytest.raises(RecipeError, match=r"certificates: .*server.key .*ca.pem"):
            certificate_problem(address, files.key)
    assert certificate_problem(address, files.authority) == ""  # nobody is there, which is another matter
    files.certificate.write_text("nothing")
    with pytest.raises(RecipeError, match=r"certificates: .*server.pem "):
        read_certificates(tmp_path / "one")


@contextmanager
def listening(files: Files) -> Iterator[str]:
    """A server that shakes hands with these certificates and hangs up."""
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(files.certificate, files.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                secure.wrap_socket(connection, server_side=True).close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^certificates: .*--host"):
        make_certificates(tmp_path, [])
    make_certificates(tmp_path, ["localhost"])
    with pytest.raises(RecipeError, match=r"^certificates: .*--host"):
        make_certificates(tmp_path, ["localhost"])
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(RecipeError, match=r"^certificates: .*ca.pem .*--make-certificates"):
        read_certificates(tmp_path)
