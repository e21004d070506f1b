"""Files of keys and certificates (PEM): each problem is an error that says what to do about it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tessera.client.secretfiles import MAX_FILE_BYTES, OTHERS_RIGHTS
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.security.authority import KeyedCertificate, PrivateKey

_BEGIN_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_BEGIN_KEY: Final = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_BEGIN, _END = re.compile(rb"-----BEGIN "), re.compile(rb"-----END [A-Z0-9 ]+-----")


def read_file(path: Path, *, private: bool = False) -> bytes:
    """Return what a file holds. A ``private`` one must be closed to other users.

    Raises:
        InvalidInput: the file is missing, empty, too large or open to others.
    """
    place = str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not for a pipe
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput(place, "is not a regular file; correct the path")
            if private and status.st_mode & OTHERS_RIGHTS:
                raise InvalidInput(
                    place,
                    f"is a secret, but other users can read or change it; run chmod 600 {path}",
                )
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise InvalidInput(place, "does not exist; correct the path, or make the file") from error
    except OSError as error:
        raise InvalidInput(place, f"cannot be read: {error.strerror}") from error
    if not content.strip():
        raise InvalidInput(place, "is empty; write it again")
    if len(content) > MAX_FILE_BYTES:
        raise InvalidInput(place, f"has more than {MAX_FILE_BYTES:,} bytes, so it is another file")
    return content


def parse_certificates(path: Path, content: bytes) -> list[x509.Certificate]:
    """Return the certificates of a file with this content, at least one. Raises InvalidInput."""
    place = str(path)
    if _BEGIN_CERTIFICATE not in content:
        if _BEGIN_KEY.search(content):
            raise InvalidInput(place, "holds a private key, where a certificate is expected")
        raise InvalidInput(
            place,
            "holds no certificate; it must be PEM, which begins with -----BEGIN CERTIFICATE-----",
        )
    if len(_BEGIN.findall(content)) != len(_END.findall(content)):
        raise InvalidInput(place, "ends in the middle of a certificate; write it again")
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput(place, f"holds a certificate that cannot be read: {error}") from error


def parse_key(path: Path, content: bytes) -> PrivateKey:
    """Return the private key of a file with this content. Raises InvalidInput."""
    place = str(path)
    if not _BEGIN_KEY.search(content):
        if _BEGIN_CERTIFICATE in content:
            raise InvalidInput(place, "holds a certificate, where its private key is expected")
        raise InvalidInput(
            place,
            "holds no private key; it must be PEM, which begins with -----BEGIN PRIVATE KEY-----",
        )
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError as error:
        raise InvalidInput(
            place, "is encrypted; decrypt it with openssl pkey, and keep it at mode 600"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput(
            place, "holds a private key that cannot be read; write it again"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise InvalidInput(place, "holds a key that is neither EC nor RSA; gRPC can use no other")
    return key


def read_authority(
    certificate_path: Path, key_path: Path, now_s: float
) -> tuple[KeyedCertificate, bytes]:
    """Return the authority that the key belongs to, and the file of all authorities to trust.

    It is usually the first of the file. While ``tessera ca rotate`` has written one of the two
    files, it is another one.

    Raises:
        InvalidInput: a file is wrong, or the authority is not one, or not valid now.
    """
    content = read_file(certificate_path)
    authorities = parse_certificates(certificate_path, content)
    require_authorities(authorities, certificate_path, now_s)
    key = parse_key(key_path, read_file(key_path, private=True))
    owned = [held for held in authorities if held.public_key() == key.public_key()]
    authority = owned[0] if owned else authorities[0]
    require_pair(authority, certificate_path, key, key_path)
    require_current(authority, certificate_path, now_s)
    return KeyedCertificate(authority, key), content


def require_pair(
    certificate: x509.Certificate, certificate_path: Path, key: PrivateKey, key_path: Path
) -> None:
    """Check that a key belongs to a certificate. Raises InvalidInput."""
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise InvalidInput(
            str(key_path),
            f"does not belong to the certificate in {certificate_path}; put the two of one pair there",
        )


def require_current(certificate: x509.Certificate, path: Path, now_s: float) -> None:
    """Check that a certificate is valid now. Raises InvalidInput."""
    now = datetime.fromtimestamp(now_s, UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= end:
        raise InvalidInput(
            str(path), f"expired at {end:%Y-%m-%d %H:%M} UTC; replace it with a new certificate"
        )
    if now < start:
        ahead = format_length((start - now).total_seconds())
        raise InvalidInput(
            str(path),
            f"is not valid before {start:%Y-%m-%d %H:%M} UTC, which is {ahead} from now by this machine's"
            " clock; clocks may disagree: compare them, or wait",
        )


def require_authorities(authorities: Sequence[x509.Certificate], path: Path, now_s: float) -> None:
    """Check that certificates are those of authorities, at least one valid now.

    Raises:
        InvalidInput: they are not.
    """
    for certificate in authorities:
        try:
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        except x509.ExtensionNotFound:
            continue  # an old root
        if not constraints.value.ca:
            raise InvalidInput(
                str(path),
                f"holds the certificate of {certificate.subject.rfc4514_string() or 'a client'}, which is"
                " not an authority's; put the certificates of authorities there, such as ca.pem",
            )
    newest = max(authorities, key=lambda certificate: certificate.not_valid_after_utc)
    require_current(newest, path, now_s)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, in one step. Raises InvalidInput."""
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that everyone can read, in one step. Raises InvalidInput."""
    _write(path, content, 0o644)


def make_private_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing, for their owner alone.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_private_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file. A missing directory is made for its owner alone; others stay as they are."""
    try:
        make_private_directory(path.parent)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be written: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def format_length(seconds: float) -> str:
    """Return a length of time in words, e.g. ``45 s``, ``12 min``, ``5 h`` or ``3 days``."""
    for most_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < most_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
