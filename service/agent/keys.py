"""An agent's keys and certificates. It needs the package cryptography, which other parts do not."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new private key (PEM, not shown) and the request to sign a certificate for it (PEM)."""

    key: str = field(repr=False)
    signing_request: str


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """A certificate's serial number in lower-case hex, and its end in seconds since 1970."""

    serial: str
    expires_s: float


def make_key(agent: str) -> NewKey:
    """Return a new key (EC P-256) with a signing request for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, agent[:64])])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return NewKey(text.decode(), request.public_bytes(serialization.Encoding.PEM).decode())


def read_facts(certificate: str) -> CertificateFacts:
    """Return the facts of the first certificate (PEM)."""
    read = x509.load_pem_x509_certificates(certificate.encode())[0]
    return CertificateFacts(f"{read.serial_number:x}", read.not_valid_after_utc.timestamp())
