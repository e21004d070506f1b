"""The stream to the servers: hello, heartbeats and reports go out, and desired states come in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from tessera.client import ChannelRefused, open_async_channel
from tessera.formulation.base.errors import NotAllowed, Unavailable
from tessera.formulation.job.runtime_offers import AgentOffers
from tessera.service.agent.backoff import backoff_s
from tessera.service.agent.credentials import Credentials, failure_text
from tessera.service.agent.hardware.monitor import Report
from tessera.service.agent.logreads import READ_THREADS, LogAnswers
from tessera.service.agent.network.map_worker import settings_from_message
from tessera.service.agent.runtimes.offers import add_offers
from tessera.service.agent.state import StateDir
from tessera.service.agent.supervisor import Supervisor
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import agents_pb2_grpc as rpc

log = logging.getLogger(__name__)

Call = grpc.aio.StreamStreamCall[pb.AgentMessage, pb.ServerMessage]
BootClock = Callable[[], float]

CONNECT_S = 5.0
"""Seconds that a server may take to answer a hello before the next server is tried."""

CHANGE_GAP_S = 0.05
"""Seconds within which successive changes are sent together."""

SAVE_LEASE_S, SAVE_SHARE = 1.0, 0.1
"""The largest lag of the lease on disk behind the actual lease: in seconds, and as its share."""

REFUSAL_CODES = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION})
"""Codes with which a server ends the stream after a newer incarnation took over the agent's nodes.

Before the welcome, FAILED_PRECONDITION means that the server itself cannot serve yet, e.g. because
a migration is missing.
"""

_NOT_FOUND = grpc.StatusCode.NOT_FOUND
"""The code with which a server answers an agent whose cluster does not exist."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # otherwise a new channel inherits an old one's back-off
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 * 2**20),
)


class AgentSuperseded(NotAllowed):
    """A newer incarnation of this agent has taken over its nodes, so this one must end."""

    reason = "SUPERSEDED"


class _RenewedCredentials(Exception):
    """The end of a stream that another one with newer credentials replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOverrides:
    """Seconds that override the server's welcome. None keeps the server's value."""

    lease_s: float | None = None
    heartbeat_s: float | None = None
    inspect_s: float | None = None


class AgentLease:
    """The time for which the agent may go on without being heard. It outlives the agent's restart.

    The lease counts from when the agent sent the message that a server has recorded, not from when
    the answer was read. An answer may have waited in a socket, while the servers count the agent's
    silence from its message.
    """

    def __init__(self, state: StateDir, clock: BootClock, lease_s: float | None = None) -> None:
        """Continue the lease of the agent that ran before, if there was one in this boot.

        If ``lease_s`` is None, its earlier value is kept; without one, the lease does not end
        before the first welcome.
        """
        self._state = state
        self._clock = clock
        now_s = clock()
        self._heard_s, stored_s = state.load_lease() or (now_s, math.inf)
        if not 0 <= self._heard_s <= now_s:  # keepers believe it as little
            self._heard_s, stored_s = now_s, math.inf
        self._saved_s = -math.inf
        self._unsaved = ""  # why it could not be written the last time
        self.lease_s = min(lease_s or math.inf, stored_s)
        self.margin_s = 0.0  # after the lease, until servers give the GPUs away

    def renew(self, sent_at_s: float) -> None:
        """Note that the message sent at ``sent_at_s``, by the agent's own clock, is recorded."""
        self._heard_s = max(self._heard_s, sent_at_s)
        if self._heard_s >= self._saved_s + min(SAVE_LEASE_S, SAVE_SHARE * self.lease_s):
            self._save()

    def _save(self) -> None:
        """Write the lease down.

        If that fails, an older one stays on disk, so gangs end earlier.
        """
        try:
            self._state.save_lease(self._heard_s, self.lease_s, self.margin_s)
        except OSError as error:
            if str(error) != self._unsaved:
                log.warning(
                    "cannot write the lease to disk",
                    extra={"event": "lease_unwritten", "error": error},
                )
            self._unsaved = str(error)
            return
        self._saved_s, self._unsaved = self._heard_s, ""

    def left_s(self) -> float:
        """Return the seconds until the lease runs out, negative once it has run out."""
        return self._heard_s + self.lease_s - self._clock()


async def watch_lease(lease: AgentLease, supervisor: Supervisor) -> None:
    """Stop all gangs whenever the lease runs out; never return.

    Once half of it has passed unheard, the gangs are asked for checkpoints.
    """
    stopped = warned = False
    while True:
        left_s = lease.left_s()
        if left_s <= lease.lease_s / 2 and not warned:
            supervisor.request_checkpoints()
        warned = left_s <= lease.lease_s / 2
        if left_s <= 0 and not stopped:
            log.error(
                "no server has answered in time; stopping all gangs",
                extra={"event": "lease_expired", "lease_s": lease.lease_s},
            )
            supervisor.stop_all()
        stopped = left_s <= 0
        await asyncio.sleep(min(max(left_s, CHANGE_GAP_S), 1.0))


class ServerLink:
    """The agent's one stream to whichever of several servers answers. Any server will do.

    ``logs`` is the folder of the output of jobs, which servers ask for.
    """

    def __init__(
        self,
        *,
        servers: Sequence[str],
        credentials: Credentials,
        hello: pb.Hello,
        supervisor: Supervisor,
        lease: AgentLease,
        timing: TimingOverrides,
        changed: asyncio.Event,
        leave: asyncio.Event,
        clock: BootClock,
        logs: Path,
        health: Report = list,
    ) -> None:
        self._log_threads = ThreadPoolExecutor(READ_THREADS, "logs")
        self._logs, self._log_answers = logs, LogAnswers(logs, self._log_threads)
        self._writing = asyncio.Lock()  # a stream takes one message at a time
        self._servers = servers
        self._health = health
        self._credentials = credentials
        self._renewed = asyncio.Event()  # the credentials are newer than the stream
        self._hello = hello
        self._supervisor = supervisor
        self._lease = lease
        self._timing = timing
        self._changed = changed
        self._leave = leave
        self._clock = clock
        self._failures = 0  # in a row; 0 during and after a session
        self._deleted: frozenset[str] = frozenset()  # nodes of the hello that the cluster lacks
        self._logged = ""  # the last connection failure; repeated ones are not logged
        self._heartbeat_s = timing.heartbeat_s or 5.0
        self._inspect_s = timing.inspect_s or 20.0

    async def run(self) -> None:
        """Stay connected until it is cancelled, or the agent leaves and the stream ends.

        Raises:
            AgentSuperseded: a server reported that a newer incarnation of this agent has taken over.
        """
        try:
            await self._stay_connected()
        finally:
            self._log_threads.shutdown(wait=False, cancel_futures=True)

    async def _stay_connected(self) -> None:
        turn = 0
        while True:
            server = self._servers[turn % len(self._servers)]
            turn += 1
            refused, is_renewed = "", False
            self._failures += 1
            self._renewed.clear()
            try:
                await self._session(server)
            except* _RenewedCredentials:
                self._failures, turn, is_renewed = 0, turn - 1, True
            except* (grpc.aio.AioRpcError, TimeoutError, Unavailable, ChannelRefused) as group:
                for error in _leaves(group):
                    refused = refused or _refusal(error, welcomed=self._failures == 0)
                    self._log_failure(server, error)
            if self._leave.is_set():  # a cancelled read may report "ended" instead
                return
            if refused:
                raise AgentSuperseded(f"{server} refused this agent: {refused}")
            if is_renewed:
                continue
            await asyncio.sleep(
                backoff_s(self._hello.incarnation, self._failures, len(self._servers))
            )

    def _log_failure(self, server: str, error: BaseException) -> None:
        """Log why a stream ended. A missing cluster is logged once, because it may stay missing."""
        if not (isinstance(error, grpc.aio.AioRpcError) and error.code() is _NOT_FOUND):
            self._logged = ""
            log.warning(
                "the stream to a server ended",
                extra={"event": "disconnected", "server": server, "error": failure_text(error)},
            )
            return
        missing = error.details() or "the cluster does not exist"
        if missing != self._logged:
            log.error(
                "the cluster was deleted or never created; this agent runs nothing and waits for it;"
                " stop the agent if the cluster will not be created again",
                extra={"event": "cluster_unknown", "server": server, "error": missing},
            )
        self._logged = missing

    def _log_deleted(self, deleted: frozenset[str]) -> None:
        """Log which nodes the cluster has lost or regained since the last desired state."""
        if gone := sorted(deleted - self._deleted):
            log.error(
                "nodes were deleted from the cluster; nothing runs there, and this process does not"
                " register them again; restart the agent to do so, or stop it",
                extra={"event": "nodes_deleted", "nodes": gone},
            )
        if back := sorted(self._deleted - deleted):
            log.info(
                "nodes are in the cluster again", extra={"event": "nodes_returned", "nodes": back}
            )
        self._deleted = deleted

    async def _session(self, server: str) -> None:
        """Hold one stream, and raise when it ends."""
        # An answer that the last stream lost is made again, because it is asked for again.
        self._log_answers = LogAnswers(self._logs, self._log_threads)
        address, settings = self._credentials.address(server), self._credentials.settings()
        async with open_async_channel(address, settings, CHANNEL_OPTIONS) as channel:
            call = rpc.AgentsStub(channel).Sync()
            await self._write(call, pb.AgentMessage(hello=self._hello))
            await self._take(call, CONNECT_S)
            log.info("connected to a server", extra={"event": "connected", "server": server})
            self._failures, self._logged = 0, ""
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._end_when_renewed())
                tasks.create_task(self._receive(call))
                tasks.create_task(self._send(call))
                tasks.create_task(self._send_answers(call))

    def offer(self, offers: AgentOffers) -> None:
        """Register again, with other runtimes. Gangs and the lease go on meanwhile."""
        self._hello = add_offers(self._hello, offers)
        self.renew()

    def renew(self) -> None:
        """Open another stream, because the credentials are new. The lease goes on meanwhile."""
        self._renewed.set()

    async def _end_when_renewed(self) -> None:
        await self._renewed.wait()
        raise _RenewedCredentials

    async def _receive(self, call: Call) -> None:
        while True:
            patience_s = min(3 * self._heartbeat_s, 0.7 * self._lease.lease_s)
            await self._take(call, max(1.0, patience_s))

    async def _take(self, call: Call, patience_s: float) -> None:
        """Process one message from the server.

        Raises:
            TimeoutError: no message came in time.
            Unavailable: the stream ended.
        """
        async with asyncio.timeout(patience_s):
            message = await call.read()
        if not isinstance(message, pb.ServerMessage):
            raise Unavailable("the server ended the stream")
        if message.HasField("welcome"):
            welcome, own = message.welcome, self._timing
            self._lease.lease_s = min(own.lease_s or math.inf, welcome.lease_s or math.inf)
            self._lease.margin_s = welcome.margin_s
            self._heartbeat_s = own.heartbeat_s or welcome.heartbeat_s or self._heartbeat_s
            self._inspect_s = own.inspect_s or welcome.inspect_s or self._inspect_s
        self._lease.renew(message.lease_start_s)
        if message.HasField("desired"):
            self._log_answers.take(message.desired.log_reads)
        if message.HasField("desired") and self._lease.left_s() > 0:
            settings = settings_from_message(message.desired)
            self._log_deleted(frozenset(message.desired.deleted_nodes))
            self._supervisor.apply(message.desired.revision, message.desired.gangs, settings)

    async def _send(self, call: Call) -> None:
        """Send changes immediately, everything every ``inspect_s``, and heartbeats."""
        next_inspect_s = self._clock()
        next_heartbeat_s = next_inspect_s + self._heartbeat_s
        while True:
            now_s = self._clock()
            if now_s >= next_inspect_s:
                self._supervisor.inspect()
                self._changed.set()
                next_inspect_s = now_s + self._inspect_s
            if now_s >= next_heartbeat_s:
                await self._write(call, pb.AgentMessage(heartbeat=pb.Heartbeat()))
                next_heartbeat_s = now_s + self._heartbeat_s
            if self._changed.is_set():
                self._changed.clear()
                reports = self._supervisor.reports()
                state = pb.Observed(
                    gangs=reports,
                    revision=self._supervisor.revision,
                    network_remarks=self._supervisor.network_remarks,
                    health=self._health(),
                )
                await self._write(call, pb.AgentMessage(observed=state))
                self._supervisor.note_sent(reports)
                await asyncio.sleep(CHANGE_GAP_S)
            wait_s = min(next_inspect_s, next_heartbeat_s) - self._clock()
            with contextlib.suppress(TimeoutError):  # on a timeout, something else is due
                async with asyncio.timeout(max(0.0, wait_s)):  # wait_for may lose a cancellation
                    await self._changed.wait()

    async def _send_answers(self, call: Call) -> None:
        """Send answers to requests for output. At most one of them is ahead of a heartbeat."""
        while True:
            answer = await self._log_answers.next_answer()
            await self._write(call, pb.AgentMessage(log_answer=answer))

    async def _write(self, call: Call, message: pb.AgentMessage) -> None:
        try:
            async with self._writing:
                message.sent_at_s = self._clock()
                await call.write(message)
        except asyncio.InvalidStateError as error:
            raise Unavailable("the server ended the stream") from error


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


def _refusal(error: BaseException, *, welcomed: bool) -> str:
    """Return the server's message to an agent that must end, or "" if the agent may try again."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() not in REFUSAL_CODES:
        return ""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION and not welcomed:
        return ""
    return error.details() or error.code().name
