"""The assembly of the running system.

This is the only place that names the store, the clock and the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tessera.db.access.tokens import ACCESS_CHANNEL
from tessera.db.agents.log_reads import LOGS_CHANNEL
from tessera.db.base.turn import ROUNDS_CHANNEL
from tessera.db.base.webhooks import WEBHOOKS_CHANNEL
from tessera.db.clusters.deletion import PURGE_CHANNEL
from tessera.db.estimates.derived_estimates import ESTIMATING_CHANNEL as ESTIMATING
from tessera.db.schema import embedded
from tessera.db.schema.migrate import head_revision
from tessera.db.store.notify import Listener
from tessera.db.store.store import Store
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.rounds.cluster_task import ClusterTask
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.periodic import PeriodicRounds
from tessera.service.server.rounds.worker import SolveProcesses
from tessera.service.server.rpc.serving.server import Server
from tessera.service.server.rpc.webhooks import WebhookParts
from tessera.service.server.security.key_files import read_file
from tessera.service.server.security.oidc import make_verifier
from tessera.service.server.server_tasks import make_server_tasks
from tessera.service.server.settings.config import Config
from tessera.service.server.settings.database import open_database
from tessera.service.server.tasks.embedded_watch import EmbeddedWatch
from tessera.service.server.tasks.memory import give_back_repeatedly
from tessera.service.server.tasks.noticed_task import NoticedTask
from tessera.service.server.tasks.purger import ClusterPurger
from tessera.service.server.tasks.shutdown import end_by, end_in_order
from tessera.service.server.webhooks.deliverer import WebhookDeliverer
from tessera.service.server.webhooks.sending import Sender

MIN_KEY_BYTES: Final = 32
"""Least length of the key from which the secrets of webhooks are derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A running server, and the functions that close its parts even if its threads do not end."""

    port: int
    server: Server
    closings: tuple[Callable[[], object], ...]


@contextlib.asynccontextmanager
async def run_server(config: Config) -> AsyncIterator[int]:
    """Run a server inside the block; yield its port. Raises what ``assemble_server`` raises."""
    async with assemble_server(config) as parts:
        yield parts.port


def _webhook_parts(config: Config, clock: SystemClock) -> WebhookParts:
    """Return what a server sends to webhooks with. Raises InvalidInput."""
    key = None
    if config.webhook_key_file:
        path = Path(config.webhook_key_file)
        key = read_file(path, private=True).strip()
        if len(key) < MIN_KEY_BYTES:
            raise InvalidInput(
                "webhook_key_file", f"{path} must have at least {MIN_KEY_BYTES} random characters"
            )
    sender = Sender(config.webhook_options(), clock.wall_s)
    return WebhookParts(sender=sender, key=key)


@contextlib.asynccontextmanager
async def assemble_server(config: Config) -> AsyncIterator[RunningServer]:
    """Run a server inside the block; yield it.

    Raises:
        InvalidInput: the address cannot be bound, or the database's URL is invalid.
        Unavailable: the embedded database does not start. A database that does not answer is not an
            error: the server reports NOT_SERVING until it does.
    """
    async with contextlib.AsyncExitStack() as stack:
        # The parts that all others need: the database, the store and the round loop.
        database = await asyncio.to_thread(open_database, config)
        stack.callback(database.engine.dispose)
        clock = SystemClock()
        store = Store(
            database,
            config.lease_s,
            config.margin_s,
            config.limits(),
            probation_s=config.probation_s,
        )
        workers = None
        if config.solve_process_from_jobs:
            workers = await asyncio.to_thread(SolveProcesses)
            stack.callback(workers.close)
        rounds = RoundLoop(
            store, clock, workers, config.solve_process_from_jobs, config.clock_factor
        )
        stack.callback(rounds.close)
        oidc, webhooks = config.oidc(), _webhook_parts(config, clock)
        server = Server(
            config,
            store,
            rounds,
            clock,
            new_id=lambda: f"job-{uuid.uuid4().hex[:16]}",
            wall_s=clock.wall_s,
            access=store,
            verifier=None if oidc is None else make_verifier(oidc, clock),
            schema=head_revision(),
            webhooks=webhooks,
        )
        # The background tasks. Those for a cluster run on the replica that holds its lease.
        holder = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        own = make_server_tasks(config, store, clock, server, holder)
        # Notices from the database wake streams and tasks.
        listener, loop = Listener(database.url), asyncio.get_running_loop()
        listener.subscribe(_in_loop(loop, server.wakeups.changed))
        listener.subscribe(_in_loop(loop, server.wakeups.changed), LOGS_CHANNEL)
        listener.subscribe(_in_loop(loop, own.networks.wake))
        purger = ClusterPurger(store, server.threads.background)
        listener.subscribe(_in_loop(loop, purger.wake), PURGE_CHANNEL)
        listener.subscribe(_in_loop(loop, server.gate.note_revocation), ACCESS_CHANNEL)
        listener.subscribe(_in_loop(loop, own.cells.wake), ESTIMATING)
        tasks: list[NoticedTask | ClusterTask | PeriodicRounds] = [
            purger,
            own.cells,
            own.networks,
            *own.others,
        ]
        if webhooks.key is not None:
            deliverer = WebhookDeliverer(
                store, webhooks.sender, server.threads.webhooks, clock, webhooks.key
            )
            listener.subscribe(_in_loop(loop, deliverer.wake), WEBHOOKS_CHANNEL)
            tasks.append(deliverer)
        if config.period_s:
            periodic = PeriodicRounds(
                store,
                rounds,
                clock,
                calls=server.threads.leases,
                round_calls=server.threads.rounds,
                holder=holder,
                spacing_s=config.round_spacing_s,
                period_s=config.period_s,
                deadline_s=config.round_limit_s(),
                policies=server.policies,
            )
            listener.subscribe(_in_loop(loop, periodic.wake), ROUNDS_CHANNEL)
            tasks.append(periodic)
        directory = Path(config.database_directory) if config.database_directory else None
        if not config.database_url:
            tasks.append(EmbeddedWatch(directory))
        # Start everything. The stack stops it in the reverse order.
        listener.start()
        stack.push_async_callback(asyncio.to_thread, listener.close)
        port = await server.start()
        stack.push_async_callback(server.stop)
        for task in tasks:
            task.start()
            stack.push_async_callback(task.stop)
        trimming = asyncio.create_task(give_back_repeatedly(server.threads.is_busy))
        stack.callback(trimming.cancel)
        # What must be closed even if threads do not end.
        closings = [rounds.close, *([workers.close] if workers else [])]
        if not config.database_url:
            closings.append(partial(embedded.stop_server, directory))
        yield RunningServer(port=port, server=server, closings=tuple(closings))


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that any thread may call and that makes the call in the loop's thread.

    While a call waits for the loop, further ones with the same argument are the same call. A storm
    of notices therefore takes no memory.
    """
    waiting = set[str]()

    def make_call(cluster: str) -> None:
        waiting.discard(cluster)  # before the call, so that a notice during it is not lost
        call(cluster)

    def hand_over(cluster: str) -> None:
        if cluster not in waiting:
            waiting.add(cluster)
            loop.call_soon_threadsafe(make_call, cluster)

    return hand_over


async def serve_until_signal(config: Config, started: Callable[[int], None]) -> None:
    """Run a server until SIGINT or SIGTERM. ``started`` is called with its port once it listens.

    The process ends within a second after the grace period, whatever the server's threads do.
    """
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with assemble_server(config) as parts:
        started(parts.port)
        await stopping.wait()
        off = end_by(config.grace_s, parts.server.threads.running, parts.closings)
    if not parts.server.threads.running():
        end_in_order(off)
