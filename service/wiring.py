"""Puts the running system together: the only place that names the store, the clock and the database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from db.engine import Database, connect
from db.estimating import CHANNEL as ESTIMATING
from db.notify import Listener
from db.store import PostgresStore
from service.automatic import Deriving
from service.clock import SystemClock
from service.config import Config
from service.loop import RoundLoop
from service.periodic import PeriodicRounds
from service.rpc.server import ESTIMATE_THREADS, Server
from service.watching import Watching
from service.worker import Workers

NETWORK_PERIOD_S: Final = 60.0
"""A network plan is looked after so often, beside when allocations change."""


def open_database(config: Config) -> Database:
    """Return the database of the settings; the embedded one is started if need be.

    It has a connection for each thread that may want one.
    """
    directory = Path(config.database_directory) if config.database_directory else None
    size = config.store_threads + config.round_threads + ESTIMATE_THREADS + 1
    return connect(config.database_url or None, directory=directory, pool_size=size)


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[int]:
    """Run a server for the length of the block; yield its port.

    Raises:
        InvalidInput: the address cannot be bound, or the database's URL is none.
        Unavailable: the embedded database does not start. A database that does not answer is no error:
            the server says NOT_SERVING until it does.
    """
    async with contextlib.AsyncExitStack() as stack:
        database = await asyncio.to_thread(open_database, config)
        stack.callback(database.engine.dispose)
        clock = SystemClock()
        store = PostgresStore(database, config.lease_s, config.margin_s)
        workers = None
        if config.solve_process_from_jobs:
            workers = await asyncio.to_thread(Workers)
            stack.callback(workers.close)
        rounds = RoundLoop(store, clock, workers, config.solve_process_from_jobs)
        server = Server(
            config, store, rounds, clock,
            new_id=lambda: f"job-{uuid.uuid4().hex[:16]}", wall_s=clock.wall_s,
        )  # fmt: skip
        holder = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        deriving = Deriving(
            store, config.catalogue(), config.estimate_multiples(), learns=config.learn,
            profiling=config.profiling(),
        )  # fmt: skip
        cells = Watching(
            store, clock, deriving.derive, calls=server.calls, work=server.estimate_calls,
            holder=holder, period_s=config.estimate_period_s, fails="nothing is estimated",
            action="estimating_failed",
        )  # fmt: skip
        networks = Watching(
            store, clock, server.replanning.keep, calls=server.calls, work=server.round_calls,
            holder=holder, period_s=NETWORK_PERIOD_S, fails="no network plan",
            action="network_failed", again_in_s=server.replanning.again_in_s,
        )  # fmt: skip
        listener, loop = Listener(database.url), asyncio.get_running_loop()
        listener.subscribe(_in_loop(loop, server.wakeups.changed))
        listener.subscribe(_in_loop(loop, networks.wake))
        if config.estimate_cells:
            listener.subscribe(_in_loop(loop, cells.wake), ESTIMATING)
        listener.start()
        stack.push_async_callback(asyncio.to_thread, listener.close)
        port = await server.start()
        stack.push_async_callback(server.stop)
        if config.estimate_cells:
            cells.start()
            stack.push_async_callback(cells.stop)
        networks.start()
        stack.push_async_callback(networks.stop)
        if config.period_s:
            periodic = PeriodicRounds(
                store, rounds, clock, calls=server.calls, round_calls=server.round_calls,
                holder=holder, period_s=config.period_s,
                deadline_s=min(config.period_s, config.default_deadline_s),
                options=config.round_options(),
            )  # fmt: skip
            periodic.start()
            stack.push_async_callback(periodic.stop)
        yield port


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[str], None]) -> Callable[[str], None]:
    """Return what makes the call in the loop's thread, from any other."""

    def hand_over(cluster: str) -> None:
        loop.call_soon_threadsafe(call, cluster)

    return hand_over


async def serve(config: Config, started: Callable[[int], None]) -> None:
    """Run a server until SIGINT or SIGTERM; ``started`` is called with its port once it listens."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with running(config) as port:
        started(port)
        await stopping.wait()
