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
"""First bytes of a Fleet API's response to :data:`_REQUEST`, which is unsigned."""


class ProbeResult(Enum):
    """Results of a probe."""

    SECURE = "TLS"
    PLAIN = "a server of comingle without TLS"
    OTHER = "not a server of comingle"
    NO_RESPONSE = "no response"


def probe_server(server: str, seconds: float = _SECONDS) -> ProbeResult:
    """Find out what listens at an address: first with an HTTP request without TLS, then with a TLS handshake.

    A server of comingle refuses the request, which is not signed, with status 401.

    Args:
        server: The address, ``HOST:PORT``.
        seconds: Timeout of each step.
    """
    try:
        received = _first_bytes(server, seconds)
        if received == _REFUSAL:
            return ProbeResult.PLAIN
        if received.startswith(b"HTTP/"):  # any other answer in HTTP
            return ProbeResult.OTHER
        # A TLS server has taken the request for a broken handshake: `received` is an alert, or empty.
        if _is_secure(server, seconds):
            return ProbeResult.SECURE
        was_cut_off = len(received) < len(_REFUSAL)  # perhaps the connection was lost
        return ProbeResult.NO_RESPONSE if was_cut_off else ProbeResult.OTHER
    except (OSError, UnicodeError):  # No connection, a timeout, or an invalid host name.
        return ProbeResult.NO_RESPONSE


def tls_problem(server: str, found: ProbeResult, *, secure: bool) -> str:
    """Return why client and server cannot talk to each other: only one of them uses TLS.

    Args:
        server: Address of the server, as host and port.
        found: Result of the probe.
        secure: Whether the client uses TLS.

    Returns:
        The reason; an empty string if both use TLS, if neither does, or if no server of comingle has answered (it may
        start later).
    """
    if found is ProbeResult.SECURE and not secure:
        return f"{server} uses TLS; give the certificate of the server or its authority with --certificates FILE"
    if found is ProbeResult.PLAIN and secure:
        return f"{server} does not use TLS; omit --certificates and --key, or start the server with --certificates"
    return ""


def certificate_problem(server: str, authority: Path, seconds: float = _SECONDS) -> str:
    """Return why the server's certificate is not trusted; an empty string if it is, or if the server does not respond.

    Args:
        server: Address of the server, as host and port.
        authority: The authority's certificate.
        seconds: Timeout of each step.

    Raises:
        RecipeError: The authority's file holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, ValueError):
        raise RecipeError(f"certificates: {authority} is not a certificate; allowed: the server's ca.pem") from None
    except OSError as error:
        raise RecipeError(f"certificates: {authority} cannot be read ({error.strerror})") from None
    try:
        host, port = split_address(server)
        with (
            socket.create_connection((host, port), timeout=seconds) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        return _why_untrusted(server, authority, error)
    except (OSError, UnicodeError):  # no connection, or an invalid host name
        return ""


_EXPIRED, _NOT_YET_VALID = 10, 9
"""OpenSSL's codes of these errors (X509_V_ERR)."""


def _why_untrusted(server: str, authority: Path, error: ssl.SSLCertVerificationError) -> str:
    """Return why a certificate is not trusted, and what to do: it has expired, is not valid yet, or has another signer.

    Args:
        server: Address of the server.
        authority: File with the authority's certificate.
        error: The error of the TLS handshake.
    """
    now = f"this machine's clock says {datetime.datetime.now(datetime.UTC):%F %H:%M} UTC"
    if error.verify_code == _EXPIRED:
        return f"the certificate of {server} has expired ({now}); ask the operator of the server for a new one"
    if error.verify_code == _NOT_YET_VALID:
        return f"the certificate of {server} is not valid yet ({now}); correct the clock here or on the server"
    return f"the certificate of {server} is not signed by {authority} for this address"


def _first_bytes(server: str, seconds: float) -> bytes:
    """Return the first bytes of the response to an unsigned HTTP request of the Fleet API, sent without TLS.

    Args:
        server: Address of the server, as host and port.
        seconds: Timeout of the connection and of each read.

    Returns:
        As many bytes as :data:`_REFUSAL` has, or fewer if the server sends fewer.
    """
    with socket.create_connection(split_address(server), timeout=seconds) as connection:
        connection.sendall(_REQUEST)
        received = b""
        try:
            while len(received) < len(_REFUSAL):
                more = connection.recv(len(_REFUSAL) - len(received))
                if not more:  # The server has closed the connection.
                    break
                received += more
        except OSError:  # The connection is broken, or the server waits for more.
            pass
        return received


def _is_secure(server: str, seconds: float) -> bool:
    """Return whether a TLS handshake succeeds, regardless of who has signed the certificate.

    Raises:
        TimeoutError: It takes too long.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    host, port = split_address(server)
    try:
        with (
            socket.create_connection((host, port), timeout=seconds) as connection,
            context.wrap_socket(connection, server_hostname=host),  # The certificate may depend on the name.
        ):
            return True
    except TimeoutError:
        raise
    except OSError:  # includes TLS errors
        return False
