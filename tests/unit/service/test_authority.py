"""The built-in authority: the certificates that it issues, and the identities in them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput, NotAllowed, NotAuthenticated
from tessera.service.server.security.authority import (
    AgentIdentity,
    KeyedCertificate,
    create_authority,
    issue_server_certificate,
    list_hosts,
    read_agent_identity,
    sign_agent_certificate,
)
from tests.support.certificates import DAY_S, signing_request
from tests.support.laws import examples

NOW_S = 1.8e9
NOW = datetime.fromtimestamp(NOW_S, UTC)
AUTHORITY = create_authority(NOW_S)
REQUEST = signing_request()


def sign(**changes: Any) -> tuple[str, AgentIdentity]:
    values: dict[str, Any] = {
        "authority": AUTHORITY,
        "signing_request": REQUEST,
        "cluster": "main",
        "agent": "agent-1",
        "nodes": ["n0"],
        "now_s": NOW_S,
        "hours": 24.0,
    }
    return sign_agent_certificate(**(values | changes))


def certificate_with(*uris: str) -> bytes:
    """Return a certificate with URIs that the authority would not write."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(7)
    builder = builder.not_valid_before(NOW).not_valid_after(NOW + timedelta(days=1))
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return KeyedCertificate(builder.sign(key, hashes.SHA256()), key).certificate_pem()


def test_an_authority_signs_itself_and_no_other_authority() -> None:
    certificate = AUTHORITY.certificate
    certificate.verify_directly_issued_by(certificate)
    extensions = certificate.extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    usage = extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert not usage.digital_signature
    assert certificate.not_valid_after_utc - NOW == timedelta(days=3650)


def test_a_server_s_certificate_names_its_hosts() -> None:
    hosts = ["tessera.example", "*.gpu.example", "10.0.0.7", "::1"]
    server = issue_server_certificate(AUTHORITY, hosts, NOW_S)
    server.certificate.verify_directly_issued_by(AUTHORITY.certificate)
    assert list_hosts(server.certificate) == hosts
    assert server.certificate.not_valid_after_utc - NOW == timedelta(days=90)
    assert "PRIVATE" not in repr(server)


@pytest.mark.parametrize("host", ["", "a b", "a:7070", "https://a", "a..b", "-a", "a" * 254])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="DNS name or an IP address"):
        issue_server_certificate(AUTHORITY, [host], NOW_S)


def test_a_certificate_states_what_was_signed() -> None:
    pem, signed = sign(nodes=["n0", "login", "n1"])
    assert read_agent_identity(pem) == signed
    assert (signed.cluster, signed.agent) == ("main", "agent-1")
    assert signed.nodes == {"n0", "n1", "login"}
    assert signed.expires_s == NOW_S + DAY_S
    certificate = x509.load_pem_x509_certificate(pem.encode())
    certificate.verify_directly_issued_by(AUTHORITY.certificate)
    assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    assert int(signed.serial, 16) == certificate.serial_number
    assert not signed.serial.startswith("0")


@given(
    st.sets(
        st.one_of(
            st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True),
            st.from_regex(r"(?:n|n-|0-)[0-9]{1,3}", fullmatch=True),
        ),
        min_size=1,
        max_size=40,
    )
)
@examples(200)
def test_every_set_of_nodes_is_read_as_it_was_written(nodes: set[str]) -> None:
    assert read_agent_identity(sign(nodes=nodes)[0]).nodes == nodes


def test_an_agent_may_have_a_thousand_numbered_nodes_that_a_connection_can_carry() -> None:
    nodes = [f"v100-{k:04}" for k in range(1001)]
    assert read_agent_identity(sign(nodes=nodes[:1000])[0]).nodes == set(nodes[:1000])
    with pytest.raises(InvalidInput, match="must be 1 to 1,000, not 1,001"):
        sign(nodes=nodes)
    with pytest.raises(InvalidInput, match="must be 1 to 1,000, not 0"):
        sign(nodes=[])
    nodes = [f"{k}-{'x' * 60}" for k in range(100)]
    with pytest.raises(InvalidInput, match="divide the nodes among several agents"):
        sign(nodes=nodes)


@pytest.mark.parametrize("field", ["cluster", "agent", "nodes"])
@pytest.mark.parametrize("text", ["", "a/b", "-a", "a?numbers=1", "a b", "a" * 101, "a\n", "ä"])
def test_names_that_are_no_ids_are_refused(field: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field}: must be 1 to 100 letters"):
        sign(**{field: [text] if field == "nodes" else text})


def test_only_keys_that_connections_can_use_are_signed() -> None:
    usable = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
    )
    for key in usable:
        pem, _ = sign(signing_request=signing_request(key))
        assert x509.load_pem_x509_certificate(pem.encode()).public_key() == key.public_key()
    for other in (
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 1024),
    ):
        with pytest.raises(InvalidInput, match="its key must be EC P-256"):
            sign(signing_request=signing_request(other))


def test_a_request_that_its_key_did_not_sign_is_refused() -> None:
    forged = x509.load_pem_x509_csr(REQUEST.encode())
    der = bytearray(forged.public_bytes(Encoding.DER))
    der[-1] ^= 1
    pem = x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM)
    with pytest.raises(InvalidInput, match="signature is not by its own key"):
        sign(signing_request=pem.decode())
    for text in ("", "x", REQUEST[:100], sign()[0]):
        with pytest.raises(InvalidInput, match="not a certificate signing request"):
            sign(signing_request=text)
    with pytest.raises(InvalidInput, match="at most 20,000 characters"):
        sign(signing_request="x" * 20_001)


def test_a_certificate_never_outlives_its_authority() -> None:
    end_s = NOW_S + 3650 * DAY_S
    assert sign(now_s=end_s - 60.0)[1].expires_s == end_s
    for now_s in (end_s, NOW_S - 3600.0):
        with pytest.raises(NotAllowed, match="the authority is valid from"):
            sign(now_s=now_s)


@pytest.mark.parametrize(
    ("uris", "problem"),
    [
        ([], "names 0 agents"),
        (["tessera://clusters/c/agents/a", "tessera://clusters/c/agents/b"], "names 2 agents"),
        (["tessera://clusters/c/agents/a", "tessera://clusters/d/nodes/n"], "not one of the nodes"),
        (["tessera://clusters/c/agents/a", "tessera://clusters/c/jobs/n"], "not one of the nodes"),
        (["tessera://clusters/c/agents/a", "tessera:x"], "not one of the nodes"),
        (
            ["tessera://clusters/c/agents/a", "tessera://clusters/c/nodes/n?numbers=0-999999999"],
            "more than 1,000 nodes",
        ),
    ],
)
def test_certificates_that_are_not_an_agent_s_are_refused(uris: list[str], problem: str) -> None:
    with pytest.raises(NotAuthenticated, match=problem):
        read_agent_identity(certificate_with(*uris))


def test_what_is_no_certificate_is_refused_and_names_of_other_systems_are_ignored() -> None:
    for text in ("", "x", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(NotAuthenticated, match="cannot be read"):
            read_agent_identity(text)
    pem = certificate_with("spiffe://x/y", "tessera://clusters/c/agents/a")
    identity = read_agent_identity(pem)
    assert (identity.agent, identity.nodes, identity.serial) == ("a", frozenset(), "7")
