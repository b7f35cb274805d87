"""Probe a server's address: a federation server with TLS, one without TLS, another service, or no response.

A client retries on any response, so without this check one with wrong settings would wait forever.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from enum import Enum
from pathlib import Path

from comingle.federation.flower.processes import split_address
from comingle.utils.errors import RecipeError

_SECONDS = 3.0
_REQUEST = (
    b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/protobuf\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_REFUSAL = b"HTTP/1.1 401"
"""How a server of Flower's Fleet API begins its answer to :data:`_REQUEST`, which nobody has signed."""


class Answer(Enum):
    """What is found at an address."""

    SECURE = "TLS"
    PLAIN = "a federation's server without TLS"
    OTHER = "something that is no server of a federation"
    NOBODY = "nobody, or nobody who says anything"


def who_answers(server: str, seconds: float = _SECONDS) -> Answer:
    """Ask at ``HOST:PORT``; each step takes so many seconds at most."""
    try:
        said = _said(server, seconds)
        if said == _REFUSAL:
            return Answer.PLAIN
        if said.startswith(b"HTTP/"):
            return Answer.OTHER
        if _is_secure(server, seconds):  # it takes our words for a broken handshake, and may say so in an alert
            return Answer.SECURE
        return Answer.OTHER if len(said) >= len(_REFUSAL) else Answer.NOBODY
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
        with (
            socket.create_connection(split_address(server), timeout=seconds) as connection,
            context.wrap_socket(connection, server_hostname=split_address(server)[0]),
        ):
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


def _said(server: str, seconds: float) -> bytes:
    """Return the first bytes of what is answered to a request of the Fleet API."""
    with socket.create_connection(split_address(server), timeout=seconds) as connection:
        connection.sendall(_REQUEST)
        said = b""
        try:
            while len(said) < len(_REFUSAL) and (more := connection.recv(len(_REFUSAL) - len(said))):
                said += more
        except OSError:  # it has hung up, or waits for something else
            pass
        return said


def _is_secure(server: str, seconds: float) -> bool:
    """Whether a handshake succeeds, whoever has signed the certificate.

    Raises:
        TimeoutError: it is not over in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = split_address(server)
    try:
        with (
            socket.create_connection(address, timeout=seconds) as connection,
            context.wrap_socket(connection, server_hostname=address[0]),  # some have another certificate for each name
        ):
            return True
    except TimeoutError:
        raise
    except OSError:  # of which an error of TLS is one
        return False
