"""The proofs that a server asks of callers by default, and on Unix sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import grpc.aio
import pytest
from grpc import StatusCode

from tessera.client import PLAIN_TEXT, open_async_channel
from tessera.db.engine import Database
from tessera.formulation.errors import InvalidInput
from tessera.service.config import Config
from tessera.service.wiring import run_server
from tessera.v1 import access_pb2, access_pb2_grpc
from tests.support.certificates import make_site
from tests.support.logged import logged_lines
from tests.support.running_server import settings


async def ask(address: str) -> access_pb2.Caller:
    async with open_async_channel(address, PLAIN_TEXT) as channel:
        return await access_pb2_grpc.AccessStub(channel).GetCaller(access_pb2.GetCallerRequest())


async def test_without_settings_a_server_is_for_this_machine_and_says_that_it_asks_nobody(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert Config().listen.startswith("127.0.0.1:")
    async with run_server(settings(database)) as port:
        caller = await ask(f"127.0.0.1:{port}")
    assert (caller.subject, caller.role, caller.verified) == ("local", "admin", False)
    (line,) = logged_lines(caplog, "callers_not_asked")
    assert "everyone on this machine" in line


async def test_a_server_that_is_insecure_on_purpose_says_who_may_do_everything(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(settings(database, insecure=True)):
        (line,) = logged_lines(caplog, "callers_not_asked")
        assert "everyone who reaches the port" in line


async def test_a_server_on_loopback_asks_for_tokens_if_configured(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(settings(database, authenticate=True)) as port:
        with pytest.raises(grpc.aio.AioRpcError, match="the call has no token") as refused:
            await ask(f"127.0.0.1:{port}")
    assert refused.value.code() is StatusCode.UNAUTHENTICATED
    assert not logged_lines(caplog, "callers_not_asked")


async def test_the_socket_of_a_server_with_tls_is_for_its_user_alone(
    database: Database, tmp_path: Path
) -> None:
    make_site(tmp_path)
    path = tmp_path / "private" / "tessera.sock"
    config = settings(database, tls_directory=str(tmp_path), socket=str(path))
    async with run_server(config):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == os.getuid()
        assert (await ask(f"unix:{path}")).subject == "local"


async def test_a_socket_in_a_directory_that_others_can_enter_is_refused(
    database: Database, tmp_path: Path
) -> None:
    for mode in (0o755, 0o710, 0o701):
        tmp_path.chmod(mode)
        with pytest.raises(InvalidInput, match="other users can enter"):
            async with run_server(settings(database, socket=str(tmp_path / "tessera.sock"))):
                pass


async def test_callers_on_a_socket_of_the_setting_listen_are_asked_for_tokens(
    database: Database, tmp_path: Path
) -> None:
    """Its directory is not checked, so others may reach it."""
    address = f"unix:{tmp_path / 'tessera.sock'}"
    async with run_server(settings(database, listen=address, authenticate=True)):
        with pytest.raises(grpc.aio.AioRpcError, match="the call has no token"):
            await ask(address)
