"""Who answers at a server's address: gRPC with TLS, without, something else, or nobody yet.

Flower tries again and again whatever answers, so a client with the wrong settings would wait for ever.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from enum import Enum
from pathlib import Path

from comingle.errors import RecipeError

_SECONDS = 3.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How whoever speaks HTTP/2, as gRPC does, begins: the words, and a frame of no settings (RFC 9113, section 3.4)."""
_FRAME, _SETTINGS, _SETTINGS_AT = 9, 4, 3


_UNKNOWN = {404, 405}
"""What web servers say of paths that they do not have, or on which nothing is to be posted."""


class Answer(Enum):
    """What is found at an address."""

    SECURE = "TLS"
    PLAIN = "a SuperLink without TLS"
    OTHER = "something that is no server of a federation"
    NOBODY = "nobody, or nobody who says anything"


def who_answers(server: str, seconds: float = _SECONDS) -> Answer:
    """Ask at ``HOST:PORT``; each step takes so many seconds at most."""
    try:
        said = _said(server, seconds)
        if len(said) >= _FRAME and said[_SETTINGS_AT] == _SETTINGS:
            return Answer.PLAIN
        if said[:1] in (b"H", b"<"):  # a web server, in words
            return Answer.PLAIN if _has_fleet(server, seconds) else Answer.OTHER
        if _is_secure(server, seconds):  # it takes our words for a broken handshake, and may say so in an alert
            return Answer.SECURE
        return Answer.OTHER if len(said) >= _FRAME else Answer.NOBODY
    except (OSError, UnicodeError):  # nobody is there, or too slow to be sure; or there can be no such name
        return Answer.NOBODY


def problem_of(server: str, found: Answer, *, secure: bool) -> str:
    """Why somebody who expects TLS (``secure``) or none cannot talk to who was ``found`` there; empty where it may be.

    Something else that answers may be a gateway, before the server behind it is there.
    """
    match found:
        case Answer.SECURE if not secure:
            return f"{server} speaks TLS; give its certificate, or who has signed it, with --certificates FILE"
        case Answer.PLAIN if secure:
            return (
                f"{server} speaks no TLS; leave --certificates and --key out, or start the server with --certificates"
            )
        case _:
            return ""


def certificate_problem(server: str, authority: Path, seconds: float = _SECONDS) -> str:
    """Return why the certificate of a server is not to be trusted; nothing where it is, or where nobody answers.

    Raises:
        RecipeError: the authority's file holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, ValueError):
        raise RecipeError(f"certificates: {authority} holds no certificate; allowed: the server's ca.pem") from None
    except OSError as error:
        raise RecipeError(f"certificates: {authority} cannot be read ({error.strerror})") from None
    try:
        with _connect(server, seconds) as connection, context.wrap_socket(connection, server_hostname=_host(server)):
            return ""
    except ssl.SSLCertVerificationError as error:
        return _untrusted(server, authority, error)
    except (OSError, UnicodeError):
        return ""


_EXPIRED, _NOT_YET_VALID = 10, 9
"""OpenSSL's numbers of these errors (X509_V_ERR)."""


def _untrusted(server: str, authority: Path, error: ssl.SSLCertVerificationError) -> str:
    now = f"this machine's clock says {datetime.datetime.now(datetime.UTC):%F %H:%M} UTC"
    if error.verify_code == _EXPIRED:
        return f"the certificate of {server} has expired ({now}); whoever runs the server has to make new ones"
    if error.verify_code == _NOT_YET_VALID:
        return f"the certificate of {server} is not valid yet ({now}); set the clock right, here or at the server"
    return f"the certificate of {server} is not one that {authority} has signed for this address"


def _connect(server: str, seconds: float) -> socket.socket:
    return socket.create_connection((_host(server), int(server.rpartition(":")[2])), timeout=seconds)


def _host(server: str) -> str:
    return server.rpartition(":")[0].strip("[]")


def _said(server: str, seconds: float) -> bytes:
    """What is answered to the beginning of HTTP/2."""
    with _connect(server, seconds) as connection:
        connection.sendall(_PREFACE)
        said = b""
        try:
            while len(said) < _FRAME and (more := connection.recv(_FRAME - len(said))):
                said += more
        except OSError:  # it has hung up, or waits for something else
            pass
        return said


def _has_fleet(server: str, seconds: float) -> bool:
    """Whether a web server has the path by which SuperNodes log in, as Flower's has; others do not know or allow it."""
    asks = f"POST /v1/fleet/activate-node HTTP/1.1\r\nHost: {server}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with _connect(server, seconds) as connection:
        connection.sendall(asks.encode(errors="replace"))
        status = connection.makefile("rb").readline(1000).split()[1:2]
    return bool(status) and status[0].isdigit() and int(status[0]) not in _UNKNOWN and 400 <= int(status[0]) < 500


def _is_secure(server: str, seconds: float) -> bool:
    """Whether a handshake succeeds, whoever has signed the certificate.

    Raises:
        TimeoutError: it is not over in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        name = _host(server)  # some have another certificate for each
        with _connect(server, seconds) as connection, context.wrap_socket(connection, server_hostname=name):
            return True
    except TimeoutError:
        raise
    except OSError:  # of which an error of TLS is one
        return False
