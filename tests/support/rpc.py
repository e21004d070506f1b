"""A real server on a free port of loopback, and a channel to it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tessera.client import PLAIN_TEXT, open_async_channel
from tessera.db.store.store import Store
from tessera.formulation.base.clock import SystemClock
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rpc.serving.server import MAX_MESSAGE_BYTES, Server
from tessera.service.server.settings.config import Config

WALL_S = 1.8e9
"""The server's fixed time."""

CLIENTS_OWN_ERROR = "Internal error from Core"
"""The client's own message for a stream that has ended while the client still wrote to it."""


@asynccontextmanager
async def serving(store: Store, **settings: Any) -> AsyncIterator[tuple[grpc.aio.Channel, Server]]:
    """Yield a channel to a server over ``store``, and the server, which is stopped at the end.

    With ``real_time`` among the settings, the server has the system's time, like the database.
    ``access`` is the store of tokens, if there is one.
    """
    access = settings.pop("access", None)
    clock, numbers = SystemClock(), itertools.count(1)
    defaults: dict[str, Any] = {"listen": "127.0.0.1:0", "grace_s": 2.0, "poll_s": 30.0}
    wall_s = clock.wall_s if settings.pop("real_time", False) else lambda: WALL_S
    config = Config(**(defaults | settings))
    rounds = RoundLoop(store, clock, clock_factor=config.clock_factor)
    server = Server(
        config,
        store,
        rounds,
        clock,
        new_id=lambda: f"job-{next(numbers)}",
        wall_s=wall_s,
        access=access,
    )
    port = await server.start()
    try:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        async with open_async_channel(f"127.0.0.1:{port}", PLAIN_TEXT, options) as channel:
            yield channel, server
    finally:
        await server.stop()


def error_details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, list[str]]:
    """Return the ErrorInfo of a failed call and the fields that it reports as invalid."""
    metadata = error.trailing_metadata() or ()
    raw = dict(metadata)["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert status.message == error.details()
    assert rpc_status.code_to_grpc_status_code(status.code) is error.code()
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    if len(status.details) > 1:
        assert status.details[1].Unpack(bad)
    return info, [violation.field for violation in bad.field_violations]
