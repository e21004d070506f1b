"""Tokens of an identity provider: which are accepted, who their callers are, and what errors say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tessera.formulation.base.access import Identity, Role
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput, NotAuthenticated, PermissionDenied
from tessera.service.server.security.oidc import (
    ALGORITHMS,
    CACHE_S,
    MAX_CACHED_TOKENS,
    MAX_TOKEN_BYTES,
    OidcSettings,
    TokenVerifier,
    make_verifier,
)
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    NOW_S,
    IdentityProvider,
    encode_segments,
    join_segments,
    make_key,
    running_provider,
    sign_segments,
)


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        provider.keys = [make_key(name, name) for name in ALGORITHMS]
        yield provider


def a_verifier(provider: IdentityProvider, **settings: Any) -> TokenVerifier:
    usual: dict[str, Any] = {
        "issuer": provider.issuer,
        "audience": AUDIENCE,
        "client_id": CLIENT_ID,
    }
    return make_verifier(OidcSettings(**(usual | settings)), SystemClock())


@pytest.fixture(scope="module")
def verifier(provider: IdentityProvider) -> TokenVerifier:
    return a_verifier(provider)


def refusal_of(verifier: TokenVerifier, text: str, now_s: float = NOW_S) -> str:
    """Return the message with which a token is refused, which must not repeat any part of it."""
    with pytest.raises(NotAuthenticated) as caught:
        verifier.verify(text, now_s)
    message = str(caught.value)
    assert not any(part in message for part in text.split(".") if len(part) > 6)
    return message


def test_a_valid_token_names_its_subject_role_tenants_and_end(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    assert verifier.verify(provider.make_token(), NOW_S) == Identity(
        subject="ada",
        role=Role.USER,
        key=f"oidc/{provider.issuer}",
        tenants=frozenset({"vision"}),
        expires_s=NOW_S + 300 + 60,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_allowed_algorithm_is_accepted_with_its_own_key(
    provider: IdentityProvider, verifier: TokenVerifier, algorithm: str
) -> None:
    token = provider.make_token(make_key(algorithm, algorithm))
    assert verifier.verify(token, NOW_S).subject == "ada"


def test_a_token_without_a_signature_is_refused(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    for name in ("none", "None", "NONE", "nOnE"):
        token = encode_segments({"alg": name, "kid": "RS256"}, provider.usual_claims())
        assert "no other algorithm is accepted" in refusal_of(verifier, token)


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
def test_the_public_key_is_no_secret_with_which_a_token_can_be_signed(
    provider: IdentityProvider, verifier: TokenVerifier, algorithm: str
) -> None:
    secret = make_key("RS256", "RS256").public_pem()
    header = {"alg": algorithm, "kid": "RS256", "typ": "JWT"}
    token = sign_segments(header, provider.usual_claims(), secret, algorithm)
    assert "no other algorithm is accepted" in refusal_of(verifier, token)


def test_a_key_is_not_used_for_another_algorithm_than_its_own(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    rs256 = make_key("RS256", "RS256")
    assert "a key that" in refusal_of(verifier, provider.make_token(rs256, "PS256"))
    es256 = make_key("ES256", "ES256")
    named = provider.make_token(es256, headers={"kid": "ES384"})
    assert "a key that" in refusal_of(verifier, named)


def test_a_token_that_someone_else_signed_or_changed_is_refused(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    forger = make_key("RS256", "RS256", number=99)
    assert "signature is wrong" in refusal_of(verifier, provider.make_token(forger))
    header, _, signature = provider.make_token().split(".")
    claims = join_segments(json.dumps(provider.usual_claims() | {"roles": ["admin"]}).encode())
    assert "signature is wrong" in refusal_of(verifier, f"{header}.{claims}.{signature}")
    forger = make_key("own", "RS256", number=98)
    inside = {"jwk": forger.as_jwk(), "jku": "https://evil.example/keys", "x5u": "https://evil"}
    assert "a key that" in refusal_of(verifier, provider.make_token(forger, headers=inside))


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"typ": "logout+jwt"}, "not for calls"),
        ({"typ": 7}, "not for calls"),
        ({"crit": ["exp"]}, "neither a token"),
        ({"crit": ["b64"], "b64": False}, "neither a token"),
    ],
)
def test_a_token_with_another_purpose_or_form_is_refused(
    provider: IdentityProvider, verifier: TokenVerifier, headers: dict[str, Any], message: str
) -> None:
    header, key = {"alg": "RS256", "kid": "RS256", **headers}, make_key("RS256", "RS256").private
    token = sign_segments(header, provider.usual_claims(), key, "RS256")
    assert message in refusal_of(verifier, token)


def test_access_tokens_untyped_ones_and_one_of_several_audiences_are_accepted(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    tokens = [
        provider.make_token(headers={"typ": typ})
        for typ in ("JWT", "jwt", "at+jwt", "application/at+jwt")
    ]
    for token in (*tokens, provider.make_token(aud=["account", AUDIENCE])):
        assert verifier.verify(token, NOW_S).subject == "ada"


def test_an_expired_token_says_when_it_expired_after_the_allowed_difference_of_clocks(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    token = provider.make_token(exp=int(NOW_S) - 600)
    message = refusal_of(verifier, token)
    assert "expired 10 min ago by the clock of this server" in message
    assert "tessera login" in message
    assert "clocks" in message
    token = provider.make_token(exp=int(NOW_S))
    assert verifier.verify(token, NOW_S + 59).subject == "ada"
    assert "expired 60 s ago" in refusal_of(verifier, token, NOW_S + 60)


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_a_token_of_the_future_says_by_how_much_the_clocks_disagree(
    provider: IdentityProvider, verifier: TokenVerifier, claim: str
) -> None:
    ahead: dict[str, Any] = {claim: int(NOW_S) + 300}
    token = provider.make_token(exp=int(NOW_S) + 900, **ahead)
    message = refusal_of(verifier, token)
    assert "5 min in the future" in message
    assert "the server's clock is 5 min behind" in message
    ahead[claim] = int(NOW_S) + 60
    within_skew = provider.make_token(**ahead)
    assert verifier.verify(within_skew, NOW_S).subject == "ada"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iss": "https://evil.example"}, "which this server trusts"),
        ({"iss": None}, "which this server trusts"),
        ({"iss": ["a", "b"]}, "which this server trusts"),
        ({"aud": "another"}, f"not for {AUDIENCE}"),
        ({"aud": None}, f"not for {AUDIENCE}"),
        ({"aud": ["x", "y"]}, f"not for {AUDIENCE}"),
        ({"aud": f"{AUDIENCE}2"}, f"not for {AUDIENCE}"),
        ({"aud": {AUDIENCE: 1}}, f"not for {AUDIENCE}"),
        ({"exp": None}, "never expires"),
        ({"exp": "tomorrow"}, "`exp` is not a time"),
        ({"exp": True}, "`exp` is not a time"),
        ({"exp": float("nan")}, "`exp` is not a time"),
        ({"exp": float("inf")}, "`exp` is not a time"),
        ({"exp": 10**400}, "`exp` is not a time"),
        ({"exp": [1]}, "`exp` is not a time"),
        ({"nbf": "now"}, "`nbf` is not a time"),
        ({"iat": -1}, "`iat` is not a time"),
        ({"sub": None}, "needs a subject"),
        ({"sub": ""}, "needs a subject"),
        ({"sub": " "}, "needs a subject"),
        ({"sub": "a\nb"}, "needs a subject"),
        ({"sub": "x" * 256}, "needs a subject"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(
    provider: IdentityProvider, verifier: TokenVerifier, changes: dict[str, Any], message: str
) -> None:
    claims = {k: v for k, v in (provider.usual_claims() | changes).items() if v is not None}
    header, key = {"alg": "RS256", "kid": "RS256"}, make_key("RS256", "RS256").private
    assert message in refusal_of(verifier, sign_segments(header, claims, key, "RS256"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a.b.c",
        "....",
        "\ud800",
        "ä.ö.ü",
        join_segments(b"[" * 4000, b"{}", b""),
        join_segments(b'{"alg":"RS256","kid":"RS256"}', b"[" * 4000, b""),
        join_segments(b'{"alg":"RS256"}', b'{"exp":' + b"9" * 4400 + b"}", b""),
        join_segments(b"[]", b"[]", b""),
        join_segments(b'"text"', b"{}", b""),
        encode_segments({"alg": "RS256", "kid": "RS256"}, "text"),
        encode_segments({"alg": "RS256", "kid": 7}, {}),
    ],
)
def test_a_text_that_is_no_token_is_refused(verifier: TokenVerifier, text: str) -> None:
    assert "tessera login" in refusal_of(verifier, text)


def test_a_huge_token_is_refused_before_it_is_parsed(
    provider: IdentityProvider, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = provider.make_token(groups="x" * MAX_TOKEN_BYTES)
    monkeypatch.setattr("tessera.service.server.security.oidc.jwt.decode_complete", None)
    assert "longer than 8,192 bytes" in refusal_of(verifier, token)
    assert verifier.find_verified(token, NOW_S) is None


@pytest.mark.parametrize(
    ("settings", "claims", "role"),
    [
        ({}, {"roles": ["viewer", "operator", "user"]}, Role.OPERATOR),
        ({}, {"roles": "admin"}, Role.ADMIN),
        ({}, {"roles": ["agent", "viewer"]}, Role.VIEWER),
        ({"default_role": "viewer"}, {"roles": ["unknown"]}, Role.VIEWER),
        ({"default_role": "viewer"}, {"roles": None}, Role.VIEWER),
        ({"default_role": "viewer"}, {"roles": {"admin": True}}, Role.VIEWER),
        ({"default_role": "viewer"}, {"roles": "not an admin"}, Role.VIEWER),
        ({"default_role": "viewer"}, {"roles": [["admin"], 7]}, Role.VIEWER),
        ({"default_role": "user"}, {"roles": ["viewer"]}, Role.VIEWER),
        (
            {"role_names": {"ml-admins": "admin", "ml": "user"}},
            {"roles": ["ml", "ml-admins"]},
            Role.ADMIN,
        ),
        ({"role_names": {"ml": "user"}}, {"roles": ["admin", "ml"]}, Role.USER),
        ({"roles_claim": "realm_access.roles"}, {"realm_access": {"roles": ["admin"]}}, Role.ADMIN),
        (
            {"roles_claim": "https://example.com/roles"},
            {"https://example.com/roles": ["operator"]},
            Role.OPERATOR,
        ),
        (
            {"roles_claim": "realm_access.roles", "default_role": "viewer"},
            {"realm_access": "x"},
            Role.VIEWER,
        ),
    ],
)
def test_the_highest_role_of_the_claim_counts(
    provider: IdentityProvider, settings: dict[str, Any], claims: dict[str, Any], role: Role
) -> None:
    identity = a_verifier(provider, **settings).verify(provider.make_token(**claims), NOW_S)
    assert identity.role is role


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, ["agent"]),
        ({}, None),
        ({}, []),
        ({"role_names": {"ml": "user"}}, ["admin"]),
        ({"role_names": {"ml": "user"}}, ["user"]),
    ],
)
def test_a_caller_without_a_role_is_refused_unless_there_is_a_usual_one(
    provider: IdentityProvider, settings: dict[str, Any], roles: Any
) -> None:
    verifier = a_verifier(provider, **settings)
    with pytest.raises(PermissionDenied, match="ask the administrator of the identity provider"):
        verifier.verify(provider.make_token(roles=roles), NOW_S)


@pytest.mark.parametrize(
    ("settings", "claims", "tenants", "clusters"),
    [
        ({}, {"tenants": ["a", "b", 7]}, {"a", "b"}, None),
        ({}, {"tenants": "a"}, {"a"}, None),
        ({}, {"tenants": None}, set(), None),
        ({}, {"roles": ["viewer"], "tenants": None}, set(), None),
        ({}, {"roles": ["operator"]}, None, None),
        ({}, {"roles": ["admin"], "tenants": None}, None, None),
        ({"tenants_claim": "org.teams"}, {"org": {"teams": ["a"]}}, {"a"}, None),
        ({"tenants_claim": ""}, {}, None, None),
        ({"clusters_claim": "sites"}, {"sites": ["main"]}, {"vision"}, {"main"}),
        ({"clusters_claim": "sites"}, {}, {"vision"}, set()),
        ({"clusters_claim": "sites"}, {"roles": ["admin"]}, None, set()),
    ],
)
def test_tenants_and_clusters_are_those_of_the_claims(
    provider: IdentityProvider,
    settings: dict[str, Any],
    claims: dict[str, Any],
    tenants: set[str] | None,
    clusters: set[str] | None,
) -> None:
    identity = a_verifier(provider, **settings).verify(provider.make_token(**claims), NOW_S)
    assert (identity.tenants, identity.clusters) == (tenants, clusters)


def test_a_verified_token_is_not_verified_again_for_a_minute(
    provider: IdentityProvider, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = provider.make_token(jti="cached")
    assert verifier.find_verified(token, NOW_S) is None
    identity = verifier.verify(token, NOW_S)
    with monkeypatch.context() as patched:
        patched.setattr("tessera.service.server.security.oidc.jwt.decode", None)
        assert verifier.verify(token, NOW_S + CACHE_S - 1) is identity
        assert verifier.find_verified(token, NOW_S + CACHE_S - 1) is identity
    assert verifier.find_verified(token, NOW_S + CACHE_S) is None
    assert verifier.find_verified(token, NOW_S - 1) is None  # the clock was set back


def test_a_remembered_token_ends_when_it_expires(
    provider: IdentityProvider, verifier: TokenVerifier
) -> None:
    token = provider.make_token(exp=int(NOW_S) - 50)
    verifier.verify(token, NOW_S)
    assert verifier.find_verified(token, NOW_S + 9) is not None
    assert verifier.find_verified(token, NOW_S + 10) is None


def test_the_oldest_remembered_tokens_make_room(
    provider: IdentityProvider, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_CACHED_TOKENS >= 1000
    monkeypatch.setattr("tessera.service.server.security.oidc.MAX_CACHED_TOKENS", 2)
    tokens = [provider.make_token(jti=str(i)) for i in range(3)]
    for token in tokens:
        verifier.verify(token, NOW_S)
    assert [verifier.find_verified(t, NOW_S) is not None for t in tokens] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"issuer": ""}, "oidc_issuer: must not be empty"),
        ({"audience": " "}, "oidc_audience: must not be empty"),
        ({"issuer": "http://idp.example"}, "oidc_issuer: must begin with https://"),
        ({"issuer": "ftp://idp.example"}, "oidc_issuer: must begin with https://"),
        ({"issuer": "https://"}, "oidc_issuer: must begin with https://"),
        ({"keys_url": "http://10.0.0.1/keys"}, "oidc_keys_url: must begin with https://"),
        ({"skew_s": 3600.0}, "oidc_skew_s: must be 0 to 600"),
        ({"skew_s": float("nan")}, "oidc_skew_s: must be 0 to 600"),
        ({"default_role": "agent"}, "oidc_default_role"),
        ({"role_names": {"nodes": "agent"}}, "oidc_role_names"),
        ({"role_names": {"nodes": "root"}}, "oidc_role_names"),
    ],
)
def test_settings_that_would_trust_too_much_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    usual = {"issuer": "https://idp.example", "audience": "a", "client_id": "c"}
    with pytest.raises(InvalidInput, match=message):
        OidcSettings(**(usual | changes))
