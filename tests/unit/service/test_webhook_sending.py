"""Webhooks: where servers may connect to, what they send, and what counts as accepted."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.formulation.base.secrets import hide_secrets
from tessera.formulation.records.webhooks import (
    MAX_RETRY_S,
    Delivery,
    derive_secret,
    retry_after_s,
    write_body,
)
from tessera.service.server.webhooks.addresses import is_allowed, read_networks, resolve_endpoint
from tessera.service.server.webhooks.sending import Sender, SendingOptions, check_url
from tests.support.certificates import make_site
from tests.support.hook_target import HookTarget, hook_target

LOOPBACK = read_networks("networks", "127.0.0.0/8, ::1/128")
DELIVERY = Delivery(number=7, event="failed", facts={"job": "a", "error": "boom"})
SECRET = derive_secret(b"k" * 32, "salt")


def sender(**options: Any) -> Sender:
    defaults: dict[str, Any] = {"plain_http": True, "networks": LOOPBACK}
    return Sender(SendingOptions(**defaults | options), lambda: 1234.5)


PRIVATE = """127.0.0.1 10.1.2.3 172.16.0.1 192.168.0.1 100.64.0.1 169.254.169.254 0.0.0.0 224.0.0.1
    255.255.255.255 ::1 :: fe80::1 fd00::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::a9fe:a9fe 2002:7f00:0001::"""


def test_only_public_addresses_are_allowed() -> None:
    for address in ("93.184.216.34", "2606:2800:220:1::"):
        assert is_allowed(ipaddress.ip_address(address), ())
    for address in PRIVATE.split():
        assert not is_allowed(ipaddress.ip_address(address), ()), address


def test_an_operator_can_allow_networks() -> None:
    networks = read_networks("n", "10.0.0.0/8,fd00::/8")
    assert is_allowed(ipaddress.ip_address("10.1.2.3"), networks)
    assert is_allowed(ipaddress.ip_address("fd12::1"), networks)
    assert not is_allowed(ipaddress.ip_address("192.168.0.1"), networks)
    with pytest.raises(InvalidInput, match=r"networks such as"):
        read_networks("n", "10.0.0.0/99")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "::1"])
def test_names_and_forms_of_loopback_are_refused(host: str) -> None:
    with pytest.raises(Unavailable, match=r"not public|does not resolve"):
        resolve_endpoint(host, 443, ())


def test_a_name_with_a_private_address_among_others_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(2, 1, 6, "", (ip, 443)) for ip in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Unavailable, match="not public"):
        resolve_endpoint("example.com", 443, ())


def test_the_checked_address_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, answers = socket.getaddrinfo, iter(["127.0.0.1", "10.0.0.1"])

    def rebind(host: str, port: int, *rest: Any, **more: Any) -> Any:
        return real(next(answers) if host == "rebinds.example" else host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    with hook_target() as target:
        url = target.url.replace("127.0.0.1", "rebinds.example")
        sender().send(url, SECRET, DELIVERY)
        assert target.taken[0].headers["Host"].startswith("rebinds.example")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://example.com/", "https"),
        ("ftp://example.com/", "https"),
        ("https:///x", "name a host"),
        ("https://me:pass@example.com/", "user and password"),
        ("https://example.com/#x", "fragment"),
        ("https://example.com/a b", "spaces"),
        ("https://example.com/\r\nX: y", "spaces"),
        ("https://example.com:99999/", "not a URL"),
        ("https://exämple.com/", "ASCII"),
        ("https://example.com/" + 2000 * "x", "characters"),
        ("", "https"),
    ],
)
def test_bad_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_url("url", url, SendingOptions())


def test_a_delivery_is_signed_json() -> None:
    with hook_target() as target:
        sender().send(target.url, SECRET, DELIVERY)
        (taken,) = target.taken
    assert taken.path == "/hook?team=nlp"
    assert json.loads(taken.body) == {
        "version": 1,
        "id": 7,
        "event": "failed",
        "job": "a",
        "error": "boom",
    }
    moment, _, signature = taken.headers["Tessera-Signature"].partition(",v1=")
    expected = hmac.new(SECRET.encode(), b"1234." + taken.body, hashlib.sha256).hexdigest()
    assert (moment, signature) == ("t=1234", expected)
    assert (taken.headers["Tessera-Event"], taken.headers["Tessera-Delivery"]) == ("failed", "7")


def fail_with(target: HookTarget, **options: Any) -> str:
    with pytest.raises(Unavailable) as caught:
        sender(**options).send(target.url, SECRET, DELIVERY)
    return str(caught.value)


def test_redirects_are_not_followed_and_other_statuses_are_failures() -> None:
    with hook_target() as target, hook_target() as other:
        target.status, target.location = 307, other.url
        assert "redirects are not followed" in fail_with(target)
        assert not other.taken
        target.status = 500
        assert "answered 500" in fail_with(target)


def test_a_silent_target_does_not_hold_the_sender() -> None:
    with hook_target() as target:
        target.silent = True
        assert "took too long" in fail_with(target, timeout_s=0.2)


def test_a_target_that_trickles_does_not_hold_the_sender_even_with_tls(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    with hook_target(tmp_path / "server.pem", tmp_path / "server.key") as target:
        options = {"plain_http": False, "authorities": str(site.authorities)}
        sender(**options).send(target.url, SECRET, DELIVERY)
        assert "certificate is not valid" in fail_with(target, plain_http=False)
        assert len(target.taken) == 1
        target.trickles = True
        assert "took too long" in fail_with(target, timeout_s=0.5, **options)


def test_an_address_that_is_not_allowed_gets_nothing() -> None:
    with hook_target() as target:
        assert "not public" in fail_with(target, networks=())
        assert "must begin with https" in fail_with(target, plain_http=False)
        assert not target.taken


def test_bodies_have_no_html_control_characters_or_secrets() -> None:
    secret = "tessera_token_" + 12 * "a" + "_" + 43 * "b"
    facts = {"job": "<script>&\x07é\u2028", "error": f"token {secret}", "labels": {"a": "</x>"}}
    body = write_body(Delivery(number=1, event="failed", facts=facts))
    assert not any(byte < 32 or byte > 126 or byte in b"<>&" for byte in body)
    assert secret.encode() not in body
    assert json.loads(body)["job"] == facts["job"]


def test_secrets_are_derived_and_are_hidden_in_logs() -> None:
    assert derive_secret(b"k" * 32, "salt") == SECRET
    assert len({SECRET, derive_secret(b"k" * 32, "other"), derive_secret(b"j" * 32, "salt")}) == 3
    assert SECRET not in hide_secrets(f"it is {SECRET}")


def test_retries_are_spaced_more_and_more() -> None:
    spaces = [retry_after_s(failures) for failures in (1, 2, 3, 100)]
    assert spaces == [15.0, 30.0, 60.0, MAX_RETRY_S]
