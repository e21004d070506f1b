"""An agent's certificate: renewed when due or asked, and replaced when it is of no use any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tessera.client import ChannelRefused
from tessera.formulation.base.errors import InvalidInput
from tessera.service.agent import credentials
from tessera.service.agent.credentials import EnrolledCredentials, FixedCredentials
from tessera.service.agent.keys import make_key
from tessera.service.server.security.authority import sign_agent_certificate
from tests.support.agents import until
from tests.support.certificates import Site, make_site

HOURS = 24.0


JOIN_TOKEN = "a join token"


class ScriptedCredentials(EnrolledCredentials):
    """Credentials whose server is a list of errors of its next answers. ``calls`` has all attempts."""

    def __init__(self, site: Site, folder: Path, token: str = JOIN_TOKEN) -> None:
        self.now_s = site.now_s
        super().__init__(
            directory=folder,
            servers=["server-a:1", "server-b:1"],
            authorities=site.authorities,
            join_token=lambda: token,
            cluster="main",
            agent="n0",
            nodes=["n0"],
            wall_s=lambda: self.now_s,
        )
        self.site = site
        self.calls: list[str] = []
        self.errors: dict[str, list[Exception]] = {"renew": [], "enrol": []}

    async def _renew(self, server: str) -> None:
        self._answer("renew")

    async def _enrol_at(self, server: str, token: str) -> None:
        assert token == JOIN_TOKEN
        self._answer("enrol")

    def _answer(self, kind: str) -> None:
        self.calls.append(kind)
        if self.errors[kind]:
            raise self.errors[kind].pop(0)
        made = make_key("n0")
        text, _ = sign_agent_certificate(
            self.site.authority,
            made.signing_request,
            cluster="main",
            agent="n0",
            nodes=["n0"],
            now_s=self.now_s,
            hours=HOURS,
        )
        self._store(made.key, text, Path(self.site.authorities).read_text(), 7071)

    def folder_in_use(self) -> Path:
        return (self._directory / "current").resolve()


def unavailable() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "handshake failed")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "backoff_s", lambda *_: 0.0)


@asynccontextmanager
async def kept(
    held: EnrolledCredentials | FixedCredentials, asked: asyncio.Event
) -> AsyncIterator[Callable[[], int]]:
    """Keep the credentials valid inside the block. Yield a function that counts the renewals."""
    renewals: list[None] = []
    task = asyncio.create_task(held.keep(lambda: renewals.append(None), asked))
    try:
        yield lambda: len(renewals)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask_for_renewals(
    credentials: EnrolledCredentials | FixedCredentials, renewals: int = 1
) -> None:
    """Ask for renewals one after another, and wait for each."""
    asked = asyncio.Event()
    async with kept(credentials, asked) as count:
        for number in range(1, renewals + 1):
            asked.set()
            await until(partial(has_counted, count, number))
    assert not asked.is_set()


def has_counted(count: Callable[[], int], number: int) -> bool:
    return count() == number


async def test_a_certificate_is_renewed_when_that_is_asked_although_it_is_not_due(
    site: Site, tmp_path: Path
) -> None:
    held = ScriptedCredentials(site, tmp_path / "identity")
    await held.prepare()
    first = held.folder_in_use()
    await ask_for_renewals(held, 2)
    assert held.calls == ["enrol", "renew", "renew"]
    assert held.folder_in_use() != first
    assert not first.exists()
    await ask_for_renewals(FixedCredentials())  # the files of the site are read again


async def test_a_certificate_is_renewed_after_two_thirds_of_its_lifetime(
    site: Site, tmp_path: Path
) -> None:
    held = ScriptedCredentials(site, tmp_path / "identity")
    await held.prepare()
    held.now_s += HOURS * 3600 * 2 / 3 + 1
    async with kept(held, asyncio.Event()) as renewals:
        await until(lambda: renewals() == 1)
    assert held.calls == ["enrol", "renew"]


@pytest.mark.parametrize("error", [unavailable(), ChannelRefused("empty"), ValueError("no key")])
async def test_an_agent_without_a_join_token_or_with_files_that_cannot_be_read_goes_on_renewing(
    site: Site, tmp_path: Path, error: Exception
) -> None:
    folder = tmp_path / "identity"
    await ScriptedCredentials(site, folder).prepare()
    held = ScriptedCredentials(site, folder, token="")
    await held.prepare()
    held.errors["renew"] = [error for _ in range(6)]
    await ask_for_renewals(held)
    assert held.calls == ["renew"] * 7


async def test_an_agent_that_can_renew_no_more_enrols_again(site: Site, tmp_path: Path) -> None:
    held = ScriptedCredentials(site, tmp_path / "identity")
    await held.prepare()
    held.errors["renew"] = [unavailable() for _ in range(6)]
    held.errors["enrol"] = [unavailable()]
    await ask_for_renewals(held)
    assert held.calls == ["enrol", *["renew"] * 4, "enrol", "renew", "enrol"]


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "authorities.pem"])
@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_a_half_written_identity_is_replaced_when_the_agent_starts(
    site: Site, tmp_path: Path, name: str, share: float
) -> None:
    folder = tmp_path / "identity"
    earlier = ScriptedCredentials(site, folder)
    await earlier.prepare()
    path = earlier.folder_in_use() / name
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    held = ScriptedCredentials(site, folder)
    await held.prepare()
    assert held.calls == ["enrol"]
    again = ScriptedCredentials(site, folder)
    await again.prepare()
    assert again.calls == []


async def test_an_agent_whose_file_of_authorities_is_wrong_ends_with_the_reason(
    site: Site, tmp_path: Path
) -> None:
    held = ScriptedCredentials(site, tmp_path / "identity")
    held.errors["enrol"] = [ChannelRefused("the file of authorities (TESSERA_CA) is empty")]
    with pytest.raises(InvalidInput, match="--ca: the file of authorities"):
        await held.prepare()
