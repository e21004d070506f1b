"""A small authority: it issues the server's certificate, and signs those of agents.

An agent's certificate carries its identity as URIs in its subject alternative name:

    tessera://clusters/{cluster}/agents/{agent}                     exactly one
    tessera://clusters/{cluster}/nodes/{node}                       for a node that it speaks for
    tessera://clusters/{cluster}/nodes/{prefix}?numbers=0-7,12-15   for nodes named by numbers

The last form keeps certificates small: see ``MAX_CERTIFICATE_BYTES``. Nothing here reads the clock
or a file.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tessera.formulation.base.errors import InvalidInput, NotAllowed, NotAuthenticated

AUTHORITY_DAYS: Final = 3650
"""The lifetime of an authority."""

SERVER_DAYS: Final = 90
"""The default lifetime of a server's certificate."""

BACKDATE: Final = timedelta(minutes=5)
"""The time for which a certificate is valid already, because clocks disagree."""

MAX_NODES: Final = 1000
"""Largest number of nodes of an agent."""

MAX_CERTIFICATE_BYTES: Final = 8000
"""Largest size of an agent's certificate (DER).

A server writes two session tickets after the handshake, each with the client's certificates, and
gRPC loses what exceeds its buffer of 17 KiB. Connections with more than 8,418 bytes were measured
to fail in gRPC 1.85, without a word on why.
"""

MAX_REQUEST_CHARS: Final = 20_000
MAX_RSA_BITS: Final = 8192
"""Limits of signing requests, which anyone may send."""

# Not Ed25519: gRPC's TLS library offers no signature algorithm for it.
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey

_ID: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
_IDENTIFIER: Final = re.compile(_ID)
_AGENT_URI: Final = re.compile(rf"tessera://clusters/({_ID})/agents/({_ID})")
_NODE_URI: Final = re.compile(
    rf"tessera://clusters/({_ID})/nodes/({_ID})"
    r"(?:\?numbers=([0-9]{1,18}(?:-[0-9]{1,18})?(?:,[0-9]{1,18}(?:-[0-9]{1,18})?)*))?"
)
_NUMBERED: Final = re.compile(r"(.*?[^0-9])([0-9]{1,18})")
_DNS_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME: Final = re.compile(rf"(?=.{{1,253}}\Z)(?:\*\.)?{_DNS_LABEL}(?:\.{_DNS_LABEL})*")


@dataclass(frozen=True, slots=True)
class KeyedCertificate:
    """A certificate and its private key, which the ``repr`` does not show."""

    certificate: x509.Certificate
    key: PrivateKey = field(repr=False)

    def certificate_pem(self) -> bytes:
        """Return the certificate as PEM."""
        return format_certificate(self.certificate)

    def key_pem(self) -> bytes:
        """Return the private key as PEM, not encrypted."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """The identity of an agent, as its certificate states it.

    ``serial`` is the certificate's serial number in lower-case hex without leading zeros, and
    ``expires_s`` the end of the certificate, in seconds since 1970.
    """

    cluster: str
    agent: str
    nodes: frozenset[str]
    serial: str
    expires_s: float


def create_authority(now_s: float) -> KeyedCertificate:
    """Return a new authority, which may sign certificates but no other authority."""
    key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    name = _common_name(f"Tessera authority {serial:040x}"[:26])
    start = _moment(now_s)
    builder = _builder(name, name, key.public_key(), serial, start - BACKDATE)
    builder = builder.not_valid_after(start + timedelta(days=AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
    )
    return KeyedCertificate(builder.sign(key, hashes.SHA256()), key)


def issue_server_certificate(
    authority: KeyedCertificate, hosts: Sequence[str], now_s: float, days: int = SERVER_DAYS
) -> KeyedCertificate:
    """Return a certificate, with a new key, for a server that clients call by ``hosts``.

    Raises:
        InvalidInput: a host is neither a DNS name nor an IP address, or no host is named.
        NotAllowed: the authority is not valid now.
    """
    if not hosts:
        raise InvalidInput("host", "name at least one, as clients will write it")
    names = [_host_name(host) for host in dict.fromkeys(hosts)]
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign(
        authority,
        key.public_key(),
        subject=_common_name("Tessera server"),
        names=names,
        purpose=ExtendedKeyUsageOID.SERVER_AUTH,
        now_s=now_s,
        lifetime=timedelta(days=days),
    )
    return KeyedCertificate(certificate, key)


def sign_agent_certificate(
    authority: KeyedCertificate,
    signing_request: str,
    *,
    cluster: str,
    agent: str,
    nodes: Collection[str],
    now_s: float,
    hours: float,
) -> tuple[str, AgentIdentity]:
    """Return a certificate (PEM) for the public key of ``signing_request``, and what it states.

    Nothing else of the request is used.

    Raises:
        InvalidInput: the request or a name is wrong, or the certificate would be too large.
        NotAllowed: the authority is not valid now.
    """
    public_key = read_signing_request(signing_request)
    for place, text in (("cluster", cluster), ("agent", agent), *(("nodes", n) for n in nodes)):
        require_identifier(place, text)
    if not 1 <= len(nodes) <= MAX_NODES:
        raise InvalidInput("nodes", f"must be 1 to {MAX_NODES:,}, not {len(nodes):,}")
    certificate = _sign(
        authority,
        public_key,
        subject=_common_name(agent[:64]),  # the longest common name; the whole id is in the URI
        names=[x509.UniformResourceIdentifier(uri) for uri in _uris(cluster, agent, nodes)],
        purpose=ExtendedKeyUsageOID.CLIENT_AUTH,
        now_s=now_s,
        lifetime=timedelta(hours=hours),
    )
    size_bytes = len(certificate.public_bytes(serialization.Encoding.DER))
    if size_bytes > MAX_CERTIFICATE_BYTES:
        raise InvalidInput(
            "nodes",
            f"a certificate for {len(nodes):,} nodes with these names would have {size_bytes:,} bytes,"
            f" more than {MAX_CERTIFICATE_BYTES:,}; divide the nodes among several agents, or number"
            " them (node-0, node-1, ...), which takes less",
        )
    return format_certificate(certificate).decode(), _identity_of(certificate)


def read_signing_request(text: str) -> PublicKey:
    """Return the public key of a certificate signing request (PKCS#10, PEM).

    Raises:
        InvalidInput: it is not one, its signature is wrong, or its key is weak or of another kind.
    """
    place = "signing_request"
    if len(text) > MAX_REQUEST_CHARS:
        raise InvalidInput(place, f"must have at most {MAX_REQUEST_CHARS:,} characters")
    try:
        request = x509.load_pem_x509_csr(text.encode())
        key, is_valid = request.public_key(), request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise InvalidInput(place, "is not a certificate signing request (PKCS#10, PEM)") from error
    if not is_valid:
        raise InvalidInput(place, "its signature is not by its own key")
    match key:
        case ec.EllipticCurvePublicKey(curve=ec.SECP256R1() | ec.SECP384R1()):
            return key
        case rsa.RSAPublicKey() if 2048 <= key.key_size <= MAX_RSA_BITS:
            return key
    raise InvalidInput(
        place,
        f"its key must be EC P-256, EC P-384, or RSA of 2,048 to {MAX_RSA_BITS:,} bits",
    )


def read_agent_identity(certificate: bytes | str) -> AgentIdentity:
    """Return the identity that an agent's certificate (PEM) states. Its signature is not checked.

    Raises:
        NotAuthenticated: it is not an agent's certificate.
    """
    pem = certificate.encode() if isinstance(certificate, str) else certificate
    try:
        return _identity_of(x509.load_pem_x509_certificate(pem))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise NotAuthenticated("the certificate cannot be read; enrol the agent again") from error


def require_identifier(place: str, text: str) -> str:
    """Return ``text`` if it is a valid id of a cluster, node or agent. Raises InvalidInput."""
    if not _IDENTIFIER.fullmatch(text):
        raise InvalidInput(
            place,
            "must be 1 to 100 letters, digits, '-', '_' or '.', the first a letter or digit",
        )
    return text


def format_certificate(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def list_hosts(certificate: x509.Certificate) -> list[str]:
    """Return the DNS names and IP addresses that a certificate is for."""
    names = _alternative_names(certificate)
    if names is None:
        return []
    addresses = names.get_values_for_type(x509.IPAddress)
    return [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]


def serial_text(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number in lower-case hex without leading zeros."""
    return f"{certificate.serial_number:x}"


def _identity_of(certificate: x509.Certificate) -> AgentIdentity:
    names = _alternative_names(certificate)
    texts = names.get_values_for_type(x509.UniformResourceIdentifier) if names is not None else []
    uris = [text for text in texts if text.startswith("tessera:")]
    agents = [match for text in uris if (match := _AGENT_URI.fullmatch(text))]
    if len(agents) != 1:
        raise NotAuthenticated(
            f"the certificate names {len(agents)} agents instead of one (tessera://clusters/CLUSTER/"
            "agents/AGENT in its subject alternative name); enrol the agent again"
        )
    cluster, agent = agents[0].groups()
    nodes: set[str] = set()
    for text in uris:
        if text == agents[0][0]:
            continue
        match = _NODE_URI.fullmatch(text)
        if match is None or match[1] != cluster:
            raise NotAuthenticated(
                f"the certificate of the agent {agent} of the cluster {cluster} holds a URI that is not"
                " one of the nodes of this cluster; enrol the agent again"
            )
        nodes.update(_node_names(match[2], match[3]))
        if len(nodes) > MAX_NODES:
            raise NotAuthenticated(
                f"the certificate of the agent {agent} names more than {MAX_NODES:,} nodes"
            )
    return AgentIdentity(
        cluster=cluster,
        agent=agent,
        nodes=frozenset(nodes),
        serial=serial_text(certificate),
        expires_s=certificate.not_valid_after_utc.timestamp(),
    )


def _uris(cluster: str, agent: str, nodes: Collection[str]) -> Iterator[str]:
    """Yield the URIs that state an identity, those of numbered nodes together."""
    yield f"tessera://clusters/{cluster}/agents/{agent}"
    numbers: dict[str, list[str]] = {}
    for node in sorted(set(nodes)):
        match = _NUMBERED.fullmatch(node)
        if match is None:
            yield f"tessera://clusters/{cluster}/nodes/{node}"
        else:
            numbers.setdefault(match[1], []).append(match[2])
    for prefix, texts in numbers.items():
        path = f"tessera://clusters/{cluster}/nodes/{prefix}"
        yield f"{path}{texts[0]}" if len(texts) == 1 else f"{path}?numbers={_join_runs(texts)}"


def _join_runs(texts: Collection[str]) -> str:
    """Return numbers as runs, e.g. ``0-7,12``. All numbers of a run have the width of its first."""
    runs: list[tuple[str, str]] = []
    for text in sorted(texts, key=lambda t: (len(t) if t[0] == "0" else 0, int(t))):
        if runs and text == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1] = (runs[-1][0], text)
        else:
            runs.append((text, text))
    return ",".join(first if first == last else f"{first}-{last}" for first, last in runs)


def _node_names(prefix: str, runs: str | None) -> Iterator[str]:
    """Yield the nodes of a URI, at most one more than an agent may have."""
    if runs is None:
        yield prefix
        return
    for run in runs.split(","):
        first, _, last = run.partition("-")
        end = min(int(last or first), int(first) + MAX_NODES)
        for number in range(int(first), end + 1):
            yield f"{prefix}{str(number).zfill(len(first))}"


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _sign(
    authority: KeyedCertificate,
    public_key: PublicKey,
    *,
    subject: x509.Name,
    names: Sequence[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
    now_s: float,
    lifetime: timedelta,
) -> x509.Certificate:
    """Return a certificate that ends with its authority at the latest."""
    issuer, now = authority.certificate, _moment(now_s)
    if not issuer.not_valid_before_utc <= now < issuer.not_valid_after_utc:
        raise NotAllowed(
            f"the authority is valid from {issuer.not_valid_before_utc:%Y-%m-%d} to"
            f" {issuer.not_valid_after_utc:%Y-%m-%d}, but it is {now:%Y-%m-%d %H:%M} UTC now; make another"
            " one with `tessera ca rotate`, or correct the clock"
        )
    end = min(now + lifetime, issuer.not_valid_after_utc)
    serial = x509.random_serial_number()
    builder = _builder(subject, issuer.subject, public_key, serial, now - BACKDATE)
    builder = builder.not_valid_after(end)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(_issuer_key_id(issuer), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, serial: int, start: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key).serial_number(serial).not_valid_before(start)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _issuer_key_id(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Return the identifier of an issuer's key, which another program may have chosen."""
    try:
        own = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier(
            x509.SubjectKeyIdentifier.from_public_key(issuer.public_key()).digest, None, None
        )
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise InvalidInput(
                "host", f"must be a DNS name or an IP address without a port, not {host!r}"
            ) from None
        return x509.DNSName(host)


def _moment(now_s: float) -> datetime:
    """Return a time without fractions of a second, which certificates do not have."""
    return datetime.fromtimestamp(int(now_s), UTC)
