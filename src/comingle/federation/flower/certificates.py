"""Certificates and keys for trials: a certificate authority, the server's certificate, and a key per user.

    FOLDER/ca.pem            the authority's certificate; every user needs it
    FOLDER/server.pem .key   the server's certificate and private key; they stay with the operator
    FOLDER/users/ada.key     Ada's private key, for Ada only
    FOLDER/users/ada.pub     Ada's public key, with which the server recognises Ada

The authority's private key is not stored, so nothing can be signed with it later.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from comingle.utils.errors import RecipeError
from comingle.utils.records import write_new

AUTHORITY, CERTIFICATE, KEY, USERS = "ca.pem", "server.pem", "server.key", "users"

_DAYS = 825
"""Validity period; some programs reject certificates that are valid for longer."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Certificates, the server's key, and the users' public keys by name."""

    authority: Path
    certificate: Path
    key: Path
    users: Mapping[str, Path]


def quote_name(user: str) -> str:
    """Return a user's name in a form that is valid as a file name."""
    return quote(user, safe=" ")


def read_certificates(folder: Path) -> Files:
    """Return the files written by :func:`make_certificates`, or the same files from another authority.

    Raises:
        RecipeError: A file is missing or damaged, or a certificate has expired or is not yet valid.
    """
    for name in (AUTHORITY, CERTIFICATE, KEY):
        if not (folder / name).is_file():
            raise RecipeError(f"certificates: {folder / name} does not exist; create it with --make-certificates")
    for name in (CERTIFICATE, AUTHORITY):
        require_valid(folder / name)
    users = {unquote(path.stem): path for path in sorted((folder / USERS).glob("*.pub"))}
    return Files(authority=folder / AUTHORITY, certificate=folder / CERTIFICATE, key=folder / KEY, users=users)


def require_valid(path: Path) -> None:
    """Check that a file's first certificate is within its validity period.

    Raises:
        RecipeError: It has expired, is not valid yet, or is no certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (ValueError, OSError) as error:
        raise RecipeError(f"certificates: {path} is not a certificate ({' '.join(str(error).split())})") from None
    valid_from, valid_until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now, time_format = datetime.datetime.now(datetime.UTC), "%F %H:%M UTC"
    clock = f"this machine's clock says {now:{time_format}}"
    if now > valid_until:
        raise RecipeError(
            f"certificates: {path} expired on {valid_until:{time_format}} ({clock}); create new ones with "
            "--make-certificates NEW_FOLDER"
        )
    if now < valid_from:
        raise RecipeError(
            f"certificates: {path} is not valid before {valid_from:{time_format}} ({clock}); correct the clock"
        )


def make_certificates(folder: Path, hosts: Sequence[str], users: Sequence[str] = ()) -> Files:
    """Create the authority and the server's certificate, if there is none, and keys for users without one.

    Args:
        folder: Where to write.
        hosts: Names and addresses under which clients reach the server.
        users: Users who need a key.

    Raises:
        RecipeError: The folder has a certificate and hosts are given, or it has none and no host is given.
    """
    (folder / USERS).mkdir(parents=True, exist_ok=True)
    if (folder / CERTIFICATE).exists():
        if hosts:
            raise RecipeError(f"certificates: {folder} has a server's certificate; omit --host, or use a new folder")
    else:
        _make_server(folder, hosts)
    for user in users:
        make_key(folder / USERS, user)
    return read_certificates(folder)


def _make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Create a certificate authority, and with it sign a certificate of the server for the given hosts and loopback.

    Writes both certificates and the server's private key. The authority's private key is not stored, so it cannot be
    stolen to sign a certificate of another server.

    Args:
        folder: Where to write.
        hosts: Names and addresses under which clients reach the server.

    Raises:
        RecipeError: There are no hosts.
    """
    if not hosts:
        raise RecipeError("certificates: no --host; give the name or address at which clients reach the server")
    authority_key = ec.generate_private_key(ec.SECP384R1())
    server_key = ec.generate_private_key(ec.SECP384R1())
    issuer = _name("comingle's authority")
    authority_certificate = (
        _certificate(issuer, issuer, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    all_hosts = dict.fromkeys([*hosts, "localhost", "127.0.0.1"])  # each once
    names = [_alternative_name(host) for host in all_hosts]
    server_certificate = (
        _certificate(_name(hosts[0]), issuer, server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    write_new(folder / AUTHORITY, authority_certificate.public_bytes(Encoding.PEM))
    server_key_bytes = server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_new(folder / KEY, server_key_bytes, private=True)
    write_new(folder / CERTIFICATE, server_certificate.public_bytes(Encoding.PEM))


def make_key(folder: Path, user: str) -> tuple[Path, Path]:
    """Return the paths of a user's private and public key; create the files if they do not exist.

    With its key a client proves to the server which user it belongs to.

    Args:
        folder: Folder of the files.
        user: Name of the user, after which the files are named.
    """
    private_path = folder / f"{quote_name(user)}.key"
    public_path = folder / f"{quote_name(user)}.pub"
    if not public_path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP384R1())
        private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public_bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_new(private_path, private_bytes, private=True)
        write_new(public_path, public_bytes)
    return private_path, public_path


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    """Return a certificate of the subject's key that is valid from now on; the caller adds extensions and signs it.

    Args:
        subject: Name of the key's owner.
        issuer: Name of the authority that will sign the certificate.
        key: The subject's private key, of which the certificate has the public part.
    """
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of machines differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Return what a certificate's key may be used for: to sign other certificates, or else to authenticate itself."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # X.509 allows up to 64 characters


def _alternative_name(host: str) -> x509.GeneralName:
    """Return a host as a subject alternative name: an IP address, or else a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
