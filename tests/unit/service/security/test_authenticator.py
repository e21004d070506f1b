"""The identity of a caller, and how long it lasts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.base.access import LOCAL, Identity, Role
from tessera.formulation.base.errors import NotAuthenticated, TesseraError, Unavailable
from tessera.formulation.base.secrets import JOIN_PREFIX, USER_PREFIX, format_token, hash_secret
from tessera.formulation.records.access import TokenRecord, TokenSpec
from tessera.service.server.security import authenticator as module
from tessera.service.server.security.authenticator import FRESH_S, Authenticator
from tessera.service.server.security.sessions import Sessions
from tests.support.certificates import make_site
from tests.support.hand_clock import HandClock
from tests.support.store_double import StoreDouble

SECRET = "s" * 43
NOW_S = 1000.0


def text_of(token_id: str, secret: str = SECRET, prefix: str = USER_PREFIX) -> str:
    return format_token(prefix, token_id, secret)


class Call:
    """The parts of a call that the authenticator reads."""

    def __init__(
        self,
        *authorization: Any,
        certificate: bytes = b"",
        peer: str = "ipv4:10.0.0.1:50000",
        **metadata: Any,
    ) -> None:
        self._peer, self._certificate = peer, certificate
        self._metadata = [("authorization", value) for value in authorization]
        self._metadata += list(metadata.items())

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate]} if self._certificate else {}

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return self._metadata


class TokenStore(StoreDouble):
    """A store of tokens and revoked certificates, which counts how often it is asked."""

    def __init__(self) -> None:
        self.records: dict[str, TokenRecord] = {}
        self.revoked: set[str] = set()
        self.asked: list[str] = []
        self.is_down = False

    def add(self, token_id: str, **changes: Any) -> str:
        """Store a token, and return its authorization."""
        revoked_s = changes.pop("revoked_s", None)
        spec = TokenSpec(
            **{
                "id": token_id,
                "name": f"user-{token_id[0]}",
                "secret_hash": hash_secret(SECRET),
                "role": Role.USER,
                "tenants": frozenset({"blue"}),
            }
            | changes
        )
        self.records[token_id] = TokenRecord(
            spec=spec, created_s=0.0, created_by="root", revoked_s=revoked_s
        )
        return f"Bearer {text_of(token_id)}"

    def find_token(self, token_id: str) -> TokenRecord | None:
        self.asked.append(token_id)
        if self.is_down:
            raise Unavailable("the database is gone")
        return self.records.get(token_id)

    def find_revoked(self, serials: Collection[str]) -> set[str]:
        self.asked += serials
        return self.revoked & set(serials)


async def run(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


@pytest.fixture
def store() -> TokenStore:
    return TokenStore()


@pytest.fixture
def clock() -> HandClock:
    return HandClock(NOW_S)


@pytest.fixture
def authenticator(store: TokenStore, clock: HandClock) -> Authenticator:
    return make(store, clock)


def make(store: TokenStore, clock: HandClock, run_: Any = run, **rest: Any) -> Authenticator:
    return Authenticator(store, run_, wall_s=clock, monotonic_s=clock, **rest)  # type: ignore[arg-type] # two methods


async def refusal(authenticator: Authenticator, call: Call) -> str:
    with pytest.raises(TesseraError) as caught:
        await authenticator.identify(call)  # type: ignore[arg-type] # three methods
    return f"{type(caught.value).__name__}: {caught.value}"


async def identify(authenticator: Authenticator, call: Call) -> Any:
    return await authenticator.identify(call)  # type: ignore[arg-type] # three methods


def unknown(number: int) -> str:
    return f"Bearer {text_of(f'u{number:011d}')}"


async def test_a_token_is_whoever_it_was_made_for(
    authenticator: Authenticator, store: TokenStore
) -> None:
    found = await identify(authenticator, Call(store.add("aaaaaaaaaaaa", expires_s=2000.0)))
    assert (found.subject, found.role, found.key) == ("user-a", Role.USER, "token/aaaaaaaaaaaa")
    assert (found.tenants, found.clusters, found.expires_s) == (frozenset({"blue"}), None, 2000.0)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (Call(), "the call has no token"),
        (Call(""), "must be `Bearer` and a token"),
        (Call("Bearer"), "must be `Bearer` and a token"),
        (Call("Bearer "), "must be `Bearer` and a token"),
        (Call("Bearer  "), "has no token"),
        (Call("Basic YTpi"), "must be `Bearer` and a token"),
        (Call(text_of("aaaaaaaaaaaa")), "must be `Bearer` and a token"),
        (Call(unknown(1), unknown(2)), "several authorization headers"),
        (Call(unknown(1), ""), "several authorization headers"),
        (Call(unknown(1)), "no such token"),
        (Call(f"Bearer {text_of('aaaaaaaaaaaa', 'x' * 43)}"), "no such token"),
        (Call(f"Bearer {text_of('aaaaaaaaaaaa')[:-1]}"), "cut short or damaged"),
        (Call(f"Bearer {text_of('aaaaaaaaaaaa')}x"), "cut short or damaged"),
        (Call(f"Bearer {text_of('AAAAAAAAAAAA')}"), "cut short or damaged"),
        (Call(f"Bearer {USER_PREFIX}_\N{CYRILLIC SMALL LETTER A}"), "cut short or damaged"),
        (Call(f"Bearer {USER_PREFIX}_" + "\udce4\x00\x7f"), "cut short or damaged"),
        (Call(f"Bearer {USER_PREFIX}_" + "a" * 1_000_000), "cut short or damaged"),
        (Call("Bearer " + "a" * 1_000_000), "not one of this server"),
        (Call(f"Bearer {text_of('aaaaaaaaaaaa', prefix=JOIN_PREFIX)}"), "not one of this server"),
        (Call("Bearer eyJhbGciOiJub25lIn0.e30."), "not one of this server"),
        (Call(b"\xff\xfe"), "must be `Bearer` and a token"),
        (Call(peer="ipv6:%5B::1%5D:5"), "the call has no token"),
    ],
)
async def test_whoever_proves_nothing_is_refused(
    authenticator: Authenticator, store: TokenStore, call: Call, why: str
) -> None:
    store.add("aaaaaaaaaaaa")
    message = await refusal(authenticator, call)
    assert message.startswith("NotAuthenticated")
    assert why in message
    assert SECRET not in message


async def test_headers_with_other_names_prove_nothing(
    authenticator: Authenticator, store: TokenStore
) -> None:
    good = store.add("aaaaaaaaaaaa")
    names: dict[str, Any] = {
        "authorization-bin": good.encode(),
        "x-authorization": good,
        "cookie": good,
    }
    assert "no token" in await refusal(authenticator, Call(**names))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"revoked_s": 5.0}, "the token user-a was revoked"),
        ({"expires_s": NOW_S}, "the token user-a has expired"),
        ({"expires_s": NOW_S - 1e-6}, "the token user-a has expired"),
    ],
)
async def test_a_token_that_has_ended_is_refused(
    authenticator: Authenticator, store: TokenStore, changes: dict[str, float], why: str
) -> None:
    assert why in await refusal(authenticator, Call(store.add("aaaaaaaaaaaa", **changes)))


async def test_whoever_has_no_secret_does_not_learn_that_a_token_has_ended(
    authenticator: Authenticator, store: TokenStore
) -> None:
    store.add("aaaaaaaaaaaa", revoked_s=5.0)
    forged = Call(f"Bearer {text_of('aaaaaaaaaaaa', 'x' * 43)}")
    assert await refusal(authenticator, forged) == await refusal(authenticator, Call(unknown(1)))


async def test_a_token_that_expires_while_it_is_remembered_is_refused(
    authenticator: Authenticator, store: TokenStore, clock: HandClock
) -> None:
    call = Call(store.add("aaaaaaaaaaaa", expires_s=NOW_S + 1))
    await identify(authenticator, call)
    clock.now_s += 1
    assert "has expired" in await refusal(authenticator, call)
    assert store.asked == ["aaaaaaaaaaaa"]


async def test_a_token_is_looked_up_again_when_it_is_stale_or_was_revoked(
    authenticator: Authenticator, store: TokenStore, clock: HandClock
) -> None:
    call = Call(store.add("aaaaaaaaaaaa"))
    for _ in range(3):
        await identify(authenticator, call)
    assert len(store.asked) == 1
    clock.now_s += FRESH_S + 1
    await identify(authenticator, call)
    assert len(store.asked) == 2
    store.add("aaaaaaaaaaaa", revoked_s=NOW_S)
    await identify(authenticator, call)
    authenticator.forget("token/aaaaaaaaaaaa")
    assert "was revoked" in await refusal(authenticator, call)
    authenticator.forget("")
    await refusal(authenticator, call)
    assert len(store.asked) == 4


@pytest.mark.parametrize("notice", ["token/aaaaaaaaaaaa", ""])
async def test_a_revocation_during_the_lookup_is_not_missed(
    store: TokenStore, clock: HandClock, notice: str
) -> None:
    """The lookup may have read the token before the revocation, and end after its notice."""
    read, noticed = asyncio.Event(), asyncio.Event()

    async def read_slowly(work: Callable[..., Any], *args: Any) -> Any:
        found = work(*args)
        read.set()
        await noticed.wait()
        return found

    authenticator = make(store, clock, read_slowly)
    call = Call(store.add("aaaaaaaaaaaa"))
    refused = asyncio.create_task(refusal(authenticator, call))
    await read.wait()
    store.add("aaaaaaaaaaaa", revoked_s=NOW_S)
    authenticator.forget(notice)
    noticed.set()
    assert "was revoked" in await refused
    assert "was revoked" in await refusal(authenticator, call)


async def test_few_unknown_tokens_of_a_host_are_looked_up(
    authenticator: Authenticator, store: TokenStore, clock: HandClock
) -> None:
    known = Call(store.add("aaaaaaaaaaaa"))
    await identify(authenticator, known)
    store.asked.clear()
    messages = [await refusal(authenticator, Call(unknown(n))) for n in range(1000)]
    assert sum(message.startswith("TooBusy") for message in messages) == 900
    assert len(store.asked) == 100
    # The token that was known before goes on, even after it has to be looked up again.
    await identify(authenticator, known)
    clock.now_s += FRESH_S + 1
    for n in range(1000):
        await refusal(authenticator, Call(unknown(10_000 + n)))
    await identify(authenticator, known)
    # So do other hosts.
    elsewhere = Call(unknown(1), peer="ipv4:10.0.0.2:1")
    assert "no such token" in await refusal(authenticator, elsewhere)


async def test_unknown_tokens_that_come_at_once_are_not_all_looked_up(
    store: TokenStore, clock: HandClock
) -> None:
    going = asyncio.Event()

    async def run_later(work: Callable[..., Any], *args: Any) -> Any:
        await going.wait()
        return work(*args)

    authenticator = make(store, clock, run_later)
    calls = [asyncio.create_task(refusal(authenticator, Call(unknown(n)))) for n in range(500)]
    await asyncio.sleep(0)
    assert sum(call.done() for call in calls) == 400
    going.set()
    await asyncio.gather(*calls)
    assert len(store.asked) == 100


async def test_forged_secrets_of_a_known_token_do_not_ask_the_store(
    authenticator: Authenticator, store: TokenStore
) -> None:
    store.add("aaaaaaaaaaaa")
    forged = Call(f"Bearer {text_of('aaaaaaaaaaaa', 'x' * 43)}")
    for _ in range(1000):
        assert "no such token" in await refusal(authenticator, forged)
    assert len(store.asked) == 1


async def test_new_users_of_one_host_and_outages_do_not_count_as_unknown_tokens(
    authenticator: Authenticator, store: TokenStore
) -> None:
    for n in range(500):
        await identify(authenticator, Call(store.add(f"b{n:011d}")))
    call = Call(store.add("aaaaaaaaaaaa"))
    store.is_down = True
    for _ in range(500):
        assert (await refusal(authenticator, call)).startswith(Unavailable.__name__)
    store.is_down = False
    await identify(authenticator, call)


async def test_a_flood_of_unknown_tokens_does_not_fill_the_memory(
    authenticator: Authenticator, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 5)
    for n in range(50):
        await refusal(authenticator, Call(unknown(n)))
    assert len(authenticator._recent._kept) == 5


async def test_a_certificate_is_the_agent_that_it_names(
    authenticator: Authenticator, store: TokenStore, clock: HandClock, tmp_path: Path
) -> None:
    settings = make_site(tmp_path).agent(nodes=("n0", "n1"))
    assert settings.certificate is not None
    pem = settings.certificate.read_bytes()
    found = await identify(authenticator, Call(certificate=pem))
    assert (found.subject, found.role, found.agent) == ("agents/agent-1", Role.AGENT, "agent-1")
    assert (found.clusters, found.nodes) == (frozenset({"main"}), frozenset({"n0", "n1"}))
    both = Call(store.add("aaaaaaaaaaaa"), certificate=pem)
    assert "a certificate and a token; send one" in await refusal(authenticator, both)
    wrong = Call("Bearer x", certificate=pem)
    assert "a certificate and a token" in await refusal(authenticator, wrong)
    serial = found.key.removeprefix("certificate/")
    store.revoked.add(serial)
    authenticator.forget(found.key)
    assert "was revoked" in await refusal(authenticator, Call(certificate=pem))
    store.revoked.clear()
    authenticator.forget("")
    clock.now_s = found.expires_s
    assert "has expired" in await refusal(authenticator, Call(certificate=pem))


async def test_certificates_that_name_no_agent_are_refused(
    authenticator: Authenticator, tmp_path: Path
) -> None:
    make_site(tmp_path)
    for name in ("server.pem", "ca.pem"):
        call = Call(certificate=(tmp_path / name).read_bytes())
        assert "names 0 agents instead of one" in await refusal(authenticator, call)
    assert "cannot be read" in await refusal(authenticator, Call(certificate=b"-----BEGIN"))


@pytest.mark.parametrize("peer", ["unix:", "unix:/run/x.sock"])
async def test_nobody_is_asked_on_a_trusted_socket_or_by_a_server_without_a_store(
    store: TokenStore, clock: HandClock, peer: str
) -> None:
    assert await identify(make(store, clock, trusts_sockets=True), Call(peer=peer)) is LOCAL
    assert "no token" in await refusal(make(store, clock), Call(peer=peer))
    open_ = Authenticator(None, run, wall_s=clock)
    assert await identify(open_, Call("Bearer nonsense")) is LOCAL
    assert await open_.revoked(["token/aaaaaaaaaaaa"]) == []


async def test_open_calls_are_looked_up_by_what_proved_them(
    authenticator: Authenticator, store: TokenStore
) -> None:
    store.add("aaaaaaaaaaaa")
    store.add("bbbbbbbbbbbb", revoked_s=5.0)
    store.add("cccccccccccc", expires_s=NOW_S - 1)
    store.revoked = {"2b"}
    keys = [f"token/{c * 12}" for c in "abcd"]
    keys += ["certificate/1a", "certificate/2b", "oidc/https://id.example.com"]
    gone = await authenticator.revoked(keys)
    assert sorted(gone) == ["certificate/2b", *(f"token/{c * 12}" for c in "bcd")]


class Provider:
    """An identity provider whose tokens are all of one user."""

    def __init__(self) -> None:
        self.verified: list[str] = []

    def find_verified(self, text: str, now_s: float) -> Any:
        return LOCAL if text in self.verified else None

    def verify(self, text: str, now_s: float) -> Any:
        if text == "bad":
            raise NotAuthenticated("bad")
        self.verified.append(text)
        return LOCAL


async def test_tokens_of_a_provider_are_verified_once_and_our_own_never_reach_it(
    store: TokenStore, clock: HandClock
) -> None:
    threads: list[str] = []

    async def run_in_thread(work: Callable[..., Any], *args: Any) -> Any:
        threads.append(getattr(work, "__name__", ""))
        return work(*args)

    provider = Provider()
    authenticator = make(store, clock, run_in_thread, verifier=provider)
    for _ in range(3):
        assert await identify(authenticator, Call("bearer  a.b.c ")) is LOCAL
    assert provider.verified == ["a.b.c"]
    assert threads == ["verify"]
    assert "bad" in await refusal(authenticator, Call("Bearer bad"))
    assert "no such token" in await refusal(authenticator, Call(unknown(1)))
    assert provider.verified == ["a.b.c"]


def an_identity(key: str = "token/a", expires_s: float = math.inf) -> Identity:
    return Identity(subject="ana", role=Role.USER, key=key, expires_s=expires_s)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(lambda: NOW_S)


async def stay(
    sessions: Sessions, identity: Identity, entered: Callable[[], None] = lambda: None
) -> str:
    """Hold a call open until it is ended, and return the reason."""
    try:
        async with sessions.open(identity):
            entered()
            await asyncio.Event().wait()
    except NotAuthenticated as error:
        return str(error)
    raise AssertionError("unreachable")


async def started(sessions: Sessions, *identities: Identity) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(stay(sessions, identity)) for identity in identities]
    await asyncio.sleep(0)
    return tasks


async def test_a_revocation_ends_all_calls_of_its_key_and_no_others(sessions: Sessions) -> None:
    first, second, other = await started(
        sessions, an_identity(), an_identity(), an_identity("token/b")
    )
    assert sorted(sessions.keys()) == ["token/a", "token/b"]
    assert sessions.end("token/a") == 2
    assert "the token with which this call began was revoked" in await first
    assert await second == await first
    assert sessions.keys() == ["token/b"]
    assert not other.done()
    sessions.end("token/b")
    await other


async def test_a_call_ends_when_its_proof_expires(sessions: Sessions) -> None:
    identity = an_identity("certificate/1f", NOW_S + 0.001)
    assert "the certificate with which this call began" in await stay(sessions, identity)
    assert sessions.keys() == []
    assert "has expired" in await stay(sessions, an_identity(expires_s=NOW_S - 5))


async def test_a_call_that_is_ending_does_not_keep_others_open(sessions: Sessions) -> None:
    """A call may take a while to end, for example because its client reads nothing."""
    going, slow_is_ending = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> str:
        try:
            async with sessions.open(an_identity()):
                try:
                    await asyncio.Event().wait()
                finally:
                    slow_is_ending.set()
                    await going.wait()
        except NotAuthenticated as error:
            return str(error)
        raise AssertionError("unreachable")

    slow = asyncio.create_task(end_slowly())
    await asyncio.sleep(0)
    assert sessions.end("token/a") == 1
    await slow_is_ending.wait()
    (late,) = await started(sessions, an_identity())
    assert sessions.end("token/a") == 1
    assert "revoked" in await late
    assert sessions.end("token/a") == 0
    going.set()
    assert "revoked" in await slow
    assert sessions.keys() == []


async def test_an_error_of_the_call_itself_is_left_as_it_is_and_callers_whom_nobody_asked_have_no_session(
    sessions: Sessions,
) -> None:
    with pytest.raises(TimeoutError, match="its own"):
        async with sessions.open(an_identity()):
            raise TimeoutError("its own")
    assert sessions.keys() == []
    async with sessions.open(LOCAL):
        assert sessions.keys() == []
