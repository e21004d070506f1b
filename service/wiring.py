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

from tessera.db import embedded
from tessera.db.access_store import PostgresAccessStore
from tessera.db.deletion import PURGE_CHANNEL
from tessera.db.derived_estimates import ESTIMATING_CHANNEL as ESTIMATING
from tessera.db.engine import Database
from tessera.db.log_reads import LOGS_CHANNEL
from tessera.db.log_store import PostgresLogStore
from tessera.db.migrate import head_revision
from tessera.db.notify import Listener
from tessera.db.store import PostgresStore
from tessera.db.tokens import ACCESS_CHANNEL
from tessera.db.turn import ROUNDS_CHANNEL
from tessera.db.webhook_store import PostgresWebhookStore
from tessera.db.webhooks import WEBHOOKS_CHANNEL
from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import InvalidInput
from tessera.service.cells.deriver import CellDeriver
from tessera.service.cluster_task import ClusterTask
from tessera.service.collectivechecker import CollectiveChecker
from tessera.service.config import Config
from tessera.service.database import open_database
from tessera.service.forecaster import Forecaster, forecast_rhythm
from tessera.service.loop import RoundLoop
from tessera.service.memory import give_back_repeatedly
from tessera.service.periodic import PeriodicRounds
from tessera.service.purger import ClusterPurger
from tessera.service.retention import PERIOD_S as RETENTION_PERIOD_S
from tessera.service.retention import Pruner
from tessera.service.rpc.server import Server
from tessera.service.rpc.webhooks import WebhookParts
from tessera.service.security.key_files import read_file
from tessera.service.security.oidc import make_verifier
from tessera.service.shadowing import PERIOD_S as SHADOW_PERIOD_S
from tessera.service.shadowing import ShadowKeeper
from tessera.service.shutdown import end_by, end_in_order
from tessera.service.webhooks.deliverer import WebhookDeliverer
from tessera.service.webhooks.sending import Sender
from tessera.service.worker import SolveProcesses

MIN_KEY_BYTES: Final = 32
"""Least length of the key from which the secrets of webhooks are derived."""

NETWORK_PERIOD_S: Final = 60.0
"""Seconds between checks of network plans. They are also checked when allocations change."""


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


def _cluster_tasks(
    config: Config, store: PostgresStore, clock: SystemClock, server: Server, holder: str
) -> tuple[ClusterTask, ClusterTask, ClusterTask, list[ClusterTask]]:
    """Return the tasks that estimate Cells, plan networks and delete old rows, none of them started.

    The list has the tasks that forecast jobs, follow shadows and check collectives, if the settings ask
    for them.
    """
    deriving = CellDeriver(
        store,
        config.catalogue(),
        config.estimate_multiples(),
        derives=config.estimate_cells,
        learns=config.learn,
        profiling=config.profiling(),
    )
    watch = partial(ClusterTask, store, clock, calls=server.threads.leases, holder=holder)
    cells = watch(
        deriving.derive,
        work=server.threads.cells,
        period_s=config.estimate_period_s,
        fails="no estimates were updated",
        action="estimating_failed",
        forget=deriving.forget,
    )
    networks = watch(
        server.planner.keep,
        work=server.threads.networks,
        period_s=NETWORK_PERIOD_S,
        fails="no network plan was made",
        action="network_failed",
        again_in_s=server.planner.again_in_s,
        forget=server.planner.forget,
    )
    pruning = watch(
        Pruner(store, config.retention()).prune,
        work=server.threads.cleaning,
        period_s=RETENTION_PERIOD_S,
        fails="no old rows were deleted",
        action="prune_failed",
        idle_too=True,
    )
    checks = watch(
        CollectiveChecker(store, config.check_collectives_s).check,
        work=server.threads.checks,
        period_s=config.estimate_period_s,
        fails="no collectives were checked",
        action="checking_failed",
    )
    shadowing = ShadowKeeper(
        store,
        server.policies,
        clock,
        limit_s=config.round_limit_s(),
        share=config.shadow_share or 1.0,
    )
    forecasts = watch(
        Forecaster(
            store,
            server.policies,
            forecast_rhythm(config.round_spacing_s, config.period_s),
            config.forecast_share * config.forecast_period_s,
        ).refresh,
        work=server.threads.forecasts,
        period_s=config.forecast_period_s,
        fails="no jobs were forecast",
        action="forecast_failed",
    )
    shadows = watch(
        shadowing.follow,
        work=server.threads.shadows,
        period_s=SHADOW_PERIOD_S,
        fails="no shadow decided",
        action="shadow_failed",
        forget=shadowing.forget,
    )
    forecasts_asked = config.forecast_period_s > 0 and config.period_s > 0
    asked = (
        (checks, config.check_collectives),
        (forecasts, forecasts_asked),
        (shadows, config.shadow_share > 0),
    )
    return cells, networks, pruning, [task for task, is_asked in asked if is_asked]


def _webhook_parts(config: Config, database: Database, clock: SystemClock) -> WebhookParts:
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
    return WebhookParts(store=PostgresWebhookStore(database), sender=sender, key=key)


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
        store = PostgresStore(
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
        oidc, webhooks = config.oidc(), _webhook_parts(config, database, clock)
        server = Server(
            config,
            store,
            rounds,
            clock,
            new_id=lambda: f"job-{uuid.uuid4().hex[:16]}",
            wall_s=clock.wall_s,
            access=PostgresAccessStore(database),
            verifier=None if oidc is None else make_verifier(oidc, clock),
            logs=PostgresLogStore(database, config.lease_s),
            schema=head_revision(),
            webhooks=webhooks,
        )
        # The background tasks. Those for a cluster run on the replica that holds its lease.
        holder = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        cells, networks, pruning, checks = _cluster_tasks(config, store, clock, server, holder)
        # Notices from the database wake streams and tasks.
        listener, loop = Listener(database.url), asyncio.get_running_loop()
        listener.subscribe(_in_loop(loop, server.wakeups.changed))
        listener.subscribe(_in_loop(loop, server.wakeups.changed), LOGS_CHANNEL)
        listener.subscribe(_in_loop(loop, networks.wake))
        purger = ClusterPurger(store, server.threads.cleaning)
        listener.subscribe(_in_loop(loop, purger.wake), PURGE_CHANNEL)
        listener.subscribe(_in_loop(loop, server.gate.note_revocation), ACCESS_CHANNEL)
        listener.subscribe(_in_loop(loop, cells.wake), ESTIMATING)
        tasks: list[ClusterPurger | ClusterTask | PeriodicRounds | WebhookDeliverer] = [
            purger,
            cells,
            networks,
            pruning,
            *checks,
        ]
        if webhooks.key is not None:
            deliverer = WebhookDeliverer(
                webhooks.store, webhooks.sender, server.threads.webhooks, clock, webhooks.key
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
            directory = Path(config.database_directory) if config.database_directory else None
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
