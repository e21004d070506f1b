"""Signing keys of an identity provider: kept, fetched rarely, and refused if they are weak."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from jwt.algorithms import RSAAlgorithm

from tessera.formulation.base.errors import NotAuthenticated, Unavailable
from tessera.service.server.security import keys as keys_module
from tessera.service.server.security.keys import (
    FETCH_INTERVAL_S,
    KEEP_S,
    MAX_WAITERS,
    REFRESH_S,
    KeySet,
    SigningKey,
    load_keys,
    read_keys,
)
from tessera.service.server.security.oidc import ALGORITHMS, OidcSettings, TokenVerifier
from tessera.service.server.security.provider import ProviderConnection
from tests.support.hand_clock import HandClock
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    NOW_S,
    IdentityProvider,
    ProviderKey,
    make_key,
    make_private_key,
    running_provider,
)
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S

KEYS_PATH = "/keys"


class TestedKeys:
    """A key set with its provider and clock, whose fetches can be awaited."""

    __test__ = False

    def __init__(self, provider: IdentityProvider, keys_url: str = "") -> None:
        self.provider, self.clock = provider, HandClock(1000.0)
        self._connection, self._keys_url = ProviderConnection(), keys_url
        self._ended = threading.Semaphore(0)
        self.set = KeySet(self._load, self.clock)
        settings = OidcSettings(issuer=provider.issuer, audience=AUDIENCE, client_id=CLIENT_ID)
        self.verifier = TokenVerifier(settings, self.set)

    def _load(self) -> list[SigningKey]:
        try:
            return load_keys(self._connection, self.provider.issuer, self._keys_url, ALGORITHMS)
        finally:
            self._ended.release()

    def find(self, key_id: str = "k1") -> str:
        return self.set.find_key(key_id, "RS256").id

    def wait_for_fetch(self) -> None:
        """Wait until one more fetch has ended and its result is in place."""
        assert self._ended.acquire(timeout=PATIENCE_S)
        for thread in threading.enumerate():
            if thread.name == "oidc-keys":
                thread.join(PATIENCE_S)

    @property
    def fetches(self) -> int:
        return self.provider.count_requests(KEYS_PATH)


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def tested(provider: IdentityProvider) -> TestedKeys:
    tested = TestedKeys(provider)
    assert tested.find() == "k1"
    tested.wait_for_fetch()
    return tested


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.__dict__["event"] for record in caplog.records if record.name.startswith("tessera")
    ]


def test_known_keys_are_fetched_once_and_refreshed_each_hour_without_waiting(
    tested: TestedKeys,
) -> None:
    for _ in range(100):
        assert tested.find() == "k1"
    assert tested.fetches == 1
    tested.provider.hold_answers()
    tested.clock.now_s += REFRESH_S + 1
    assert [tested.find() for _ in range(10)] == ["k1"] * 10  # the provider has not answered
    tested.provider.release_answers()
    tested.wait_for_fetch()
    assert tested.fetches == 2
    assert tested.find() == "k1"
    assert tested.fetches == 2


def test_a_new_key_is_fetched_when_a_token_asks_for_it(
    tested: TestedKeys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tested.provider.rotate_keys("k2", keep_old=True)
    tested.clock.now_s += FETCH_INTERVAL_S
    assert tested.find("k2") == "k2"
    assert tested.find("k1") == "k1"
    assert events(caplog) == ["oidc_keys_rotated"]
    assert logged_lines(caplog, "oidc_keys_rotated")[0].endswith(" added=1 withdrawn=0")


def test_tokens_that_were_verified_with_a_withdrawn_key_end(tested: TestedKeys) -> None:
    old = tested.provider.make_token()
    tested.verifier.verify(old, NOW_S)
    tested.provider.rotate_keys("k2")
    tested.clock.now_s += FETCH_INTERVAL_S
    assert tested.verifier.verify(tested.provider.make_token(), NOW_S).subject == "ada"
    assert tested.verifier.find_verified(old, NOW_S) is None
    with pytest.raises(NotAuthenticated, match="did not have"):
        tested.verifier.verify(old, NOW_S)


def test_a_flood_of_unknown_keys_causes_one_fetch_in_ten_seconds(tested: TestedKeys) -> None:
    for period in range(1, 4):
        tested.clock.now_s += FETCH_INTERVAL_S
        for number in range(200):
            with pytest.raises(NotAuthenticated, match="did not have"):
                tested.find(f"forged-{period}-{number}")
            assert tested.find() == "k1"
        assert tested.fetches == 1 + period


def test_callers_with_known_keys_go_on_while_others_wait_for_unknown_ones(
    tested: TestedKeys,
) -> None:
    tested.provider.hold_answers()
    tested.clock.now_s += FETCH_INTERVAL_S
    with ThreadPoolExecutor(50) as pool:
        flood = [pool.submit(tested.find, f"forged-{i}") for i in range(50)]
        refused: list[Future[str]] = []
        while len(refused) < len(flood) - MAX_WAITERS:  # the rest waits for the provider
            refused = [call for call in flood if call.done()]
            assert tested.find() == "k1"
        assert all(isinstance(call.exception(), Unavailable) for call in refused)
        tested.provider.release_answers()
        errors = [call.exception(PATIENCE_S) for call in flood]
    assert sum(isinstance(error, NotAuthenticated) for error in errors) == MAX_WAITERS
    assert tested.fetches == 2


def test_tokens_of_other_issuers_cause_no_fetch(tested: TestedKeys) -> None:
    tested.clock.now_s += FETCH_INTERVAL_S
    token = tested.provider.make_token(make_key("other"), iss="https://other.example")
    with pytest.raises(NotAuthenticated, match="which this server trusts"):
        tested.verifier.verify(token, NOW_S)
    assert tested.fetches == 1


def test_known_keys_are_used_for_a_day_while_the_provider_is_down(
    tested: TestedKeys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tested.provider.switch_off()
    for hour in (2, 12, 23):
        tested.clock.now_s = 1000.0 + hour * 3600.0
        assert tested.find() == "k1"
        tested.wait_for_fetch()
    assert events(caplog) == ["oidc_unreachable"]  # once, not at each attempt
    with pytest.raises(Unavailable, match="cannot be reached"):
        tested.find("k2")
    tested.clock.now_s = 1000.0 + KEEP_S + 1
    with pytest.raises(Unavailable, match=r"keys are unknown: .* cannot be reached"):
        tested.find()
    tested.provider.switch_on()
    tested.clock.now_s += FETCH_INTERVAL_S
    assert tested.find() == "k1"
    assert events(caplog) == ["oidc_unreachable", "oidc_reachable"]


def test_a_server_that_starts_before_its_provider_finds_it_later(
    provider: IdentityProvider,
) -> None:
    provider.switch_off()
    tested = TestedKeys(provider)
    tested.set.start()
    tested.wait_for_fetch()
    with pytest.raises(Unavailable, match="cannot be reached"):
        tested.find()
    provider.switch_on()
    tested.clock.now_s += FETCH_INTERVAL_S
    assert tested.find() == "k1"


def test_a_provider_that_never_answers_holds_no_caller_for_ever(
    tested: TestedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "WAIT_S", 0.01)
    tested.provider.hold_answers()
    tested.clock.now_s += FETCH_INTERVAL_S
    with pytest.raises(Unavailable, match="does not answer"):
        tested.find("k2")
    tested.clock.now_s += keys_module.ABANDON_S  # the old fetch no longer prevents another one
    with pytest.raises(Unavailable, match="does not answer"):
        tested.find("k2")
    tested.provider.release_answers()
    tested.wait_for_fetch()
    tested.wait_for_fetch()
    assert tested.fetches == 3


def test_an_unexpected_error_of_a_fetch_reaches_its_callers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load() -> list[SigningKey]:
        raise ZeroDivisionError

    with pytest.raises(Unavailable, match="ZeroDivisionError"):
        KeySet(load, HandClock(1000.0)).find_key("k1", "RS256")
    assert "oidc_failed" in events(caplog)


def test_a_token_without_a_key_id_needs_the_provider_to_have_one_key(
    provider: IdentityProvider,
) -> None:
    nameless = ProviderKey("", make_private_key())
    provider.keys = [nameless, make_key("e1", "ES256")]
    tested = TestedKeys(provider)
    assert tested.verifier.verify(provider.make_token(nameless), NOW_S).subject == "ada"
    provider.keys = [nameless, make_key("k2")]
    with pytest.raises(NotAuthenticated):
        TestedKeys(provider).verifier.verify(provider.make_token(nameless), NOW_S)


def test_an_address_of_keys_needs_no_discovery_and_redirects_of_the_same_kind_are_followed(
    provider: IdentityProvider,
) -> None:
    tested = TestedKeys(provider, f"{provider.issuer}/keys")
    assert tested.find() == "k1"
    assert provider.requests == ["/keys"]
    provider.discovery = {"jwks_uri": f"{provider.issuer}/moved"}
    provider.redirects = {"/moved": f"{provider.issuer}/keys"}
    assert TestedKeys(provider).find() == "k1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bodies": {"/keys": b"not JSON"}}, "something else than a JSON object"),
        ({"bodies": {"/keys": b"\xff\xfe"}}, "something else than a JSON object"),
        ({"bodies": {"/keys": b"[" * 100_000}}, "something else than a JSON object"),
        ({"bodies": {"/keys": b"[]"}}, "something else than a JSON object"),
        ({"bodies": {"/keys": b'{"keys": 7}'}}, "without a set of keys"),
        ({"bodies": {"/keys": b'{"keys": []}'}}, "no key with which tokens may be signed"),
        ({"bodies": {"/keys": b" " * (1 << 20)}}, "more than 262,144 bytes"),
        ({"statuses": {"/keys": 500}}, "answered 500"),
        ({"statuses": {"/.well-known/openid-configuration": 404}}, "check the issuer"),
        ({"discovery": {"issuer": "https://another.example"}}, "calls itself by another name"),
        ({"discovery": {"jwks_uri": None}}, "names no address of its keys"),
        ({"discovery": {"jwks_uri": "http://10.0.0.1/keys"}}, "names no address of its keys"),
        ({"discovery": {"jwks_uri": "file:///etc/passwd"}}, "names no address of its keys"),
        ({"redirects": {"/keys": "file:///etc/passwd"}}, "must have an https:// address"),
        ({"redirects": {"/keys": "http://10.0.0.1/keys"}}, "must have an https:// address"),
        ({"redirects": {"/keys": "https://127.0.0.1/keys"}}, "redirects to another kind"),
        ({"redirects": {"/keys": "/keys"}}, "redirects too often"),
    ],
)
def test_a_broken_provider_is_unavailable_and_its_old_keys_stay(
    tested: TestedKeys, changes: dict[str, Any], message: str
) -> None:
    for name, value in changes.items():
        setattr(tested.provider, name, value)
    tested.clock.now_s += FETCH_INTERVAL_S
    with pytest.raises(Unavailable, match=message):
        tested.find("k2")
    assert tested.find() == "k1"


def test_keys_that_are_weak_private_or_for_other_uses_are_left_out() -> None:
    good = make_key().as_jwk()
    weak = ProviderKey("weak", make_private_key(bits=1024)).as_jwk()
    entries: list[Any] = [
        weak,
        good | {"kid": "enc", "use": "enc"},
        good | {"kid": "ops", "key_ops": ["sign"]},
        good | {"kid": "oaep", "alg": "RSA-OAEP"},
        good | {"kid": "hmac", "alg": "HS256"},
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0", "alg": "HS256"},
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
        {"kty": "EC", "crv": "secp256k1", "kid": "coin", "x": "AA", "y": "AA"},
        {"kty": "EC", "crv": "P-256", "kid": "off-curve", "x": "A" * 43, "y": "A" * 43},
        {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
        {"kty": "RSA", "kid": "partial"},
        {"kty": ["RSA"], "kid": "list"},
        {"kid": "empty"},
        "text",
        None,
        good,
        good | {"kid": 7},
    ]
    assert [key.id for key in read_keys(entries, ALGORITHMS)] == ["k1", ""]


def test_a_published_private_key_is_not_kept_and_one_without_an_algorithm_serves_all_of_its_type() -> (
    None
):
    private = json.loads(RSAAlgorithm.to_jwk(make_private_key())) | {"key_ops": ["verify"]}
    (key,) = read_keys([private], ALGORITHMS)
    assert "d" in private
    assert not hasattr(key.key, "private_numbers")
    entry = {k: v for k, v in make_key().as_jwk().items() if k not in ("alg", "use")}
    (key,) = read_keys([entry], ALGORITHMS)
    assert key.algorithms == {"RS256", "RS384", "RS512", "PS256"}
