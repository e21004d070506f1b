"""An agent's keys and certificates. It needs the package cryptography, which other parts do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

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


def make_loopback_certificate(now_s: float, days: int) -> tuple[str, str]:
    """Return a certificate of this host's loopback address that signs itself, and its key (PEM).

    It serves as a server's certificate and as the authority that clients trust.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tessera-agent")])
    begin = datetime.fromtimestamp(now_s, UTC) - timedelta(days=1)
    public = key.public_key()
    address = x509.IPAddress(ip_address("127.0.0.1"))
    signing = {name: name in ("digital_signature", "key_cert_sign") for name in _KEY_USES}
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**signing), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), text.decode()


_KEY_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def read_facts(certificate: str) -> CertificateFacts:
    """Return the facts of the first certificate (PEM)."""
    read = x509.load_pem_x509_certificates(certificate.encode())[0]
    return CertificateFacts(f"{read.serial_number:x}", read.not_valid_after_utc.timestamp())
