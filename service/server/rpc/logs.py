"""The output of jobs for their users, read from the disks of nodes through the nodes' agents.

The agent of a node has a stream to any one replica. A request is therefore stored. The replica with
the agent's stream passes it on and stores the answer, and this replica takes it from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Final

from tessera.db.agents import log_reads
from tessera.db.store.reads import get_job
from tessera.db.store.store import Store
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import (
    InvalidInput,
    NodeSilent,
    NotAllowed,
    NotFound,
    TesseraError,
    TooBusy,
)
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.records.logs import (
    LAUNCHER_RANK,
    JobStart,
    LogAnswer,
    LogRead,
    StartedJob,
    answer_key,
)
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.agents import MAX_OUTPUT_BYTES
from tessera.service.server.tasks.calls import StreamPlaces, Subscription, Wakeups
from tessera.service.server.tasks.lanes import CALLER, FairCalls
from tessera.v1 import jobs_pb2 as pb

MAX_GENERATION: Final = 2**62

RECHECK_S: Final = 5.0
"""Seconds after which an answer is looked for even without a notice."""

WITHDRAW_S: Final = 1.0
"""Seconds that a stream which ends may take to withdraw its request. Otherwise it expires."""

READS_PER_S: Final = 50
"""Approximate number of quiet outputs that are read in ``LogTiming.follow_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTiming:
    """The times of reading output, in seconds."""

    answer_s: float = 20.0
    """Time that an agent may take to answer. It is less than the time for which requests live."""
    follow_s: float = 1.0
    follow_most_s: float = 5.0
    """Time until output that has not grown is read again, and its maximum after further ones."""
    poll_s: float = 30.0
    """Time after which a job that holds no GPUs is read even without a notice."""


class OutputReader:
    """The reader of jobs' output for all streams of this server.

    It belongs to the event loop's thread. ``places`` limits the number of streams, and ``new_id``
    chooses ids of requests.
    """

    def __init__(
        self,
        store: Store,
        calls: FairCalls,
        wakeups: Wakeups,
        *,
        places: StreamPlaces,
        clock: Clock,
        new_id: Callable[[], str],
        timing: LogTiming,
    ) -> None:
        self._store, self.calls, self.wakeups = store, calls, wakeups
        self._places, self._clock, self._new_id = places, clock, new_id
        self.timing = timing

    async def read(self, request: pb.ReadLogsRequest) -> AsyncGenerator[pb.ReadLogsResponse]:
        """Yield the output of a rank."""
        cluster, job = names.parse_job("name", request.name)
        fields.require_whole("generation", request.generation, 0, MAX_GENERATION)
        fields.require_whole("offset", request.offset, -MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES)
        with (
            self._places.take(CALLER.get().client),
            self.wakeups.listen(cluster) as changes,
        ):
            record = await self.calls.run(self._store.read, get_job, cluster, job)
            runtime = RUNTIMES.get(record.spec.runtime)
            stream = _RankOutput(
                self,
                request,
                cluster=cluster,
                job=job,
                ranks_are_gpus=runtime is not None and runtime.ranks_are_gpus,
                changes=changes,
            )
            async with contextlib.aclosing(stream.parts()) as parts:
                async for part in parts:
                    yield part

    async def find_start(self, cluster: str, job: str, generation: int) -> StartedJob:
        """Return a job that the caller sees, and one of its starts. Raises NotFound."""
        started = await self.calls.run(
            self._store.read, log_reads.find_start, cluster, job, generation
        )
        if not IDENTITY.get().sees_tenant(started.tenant):  # another job of this name
            raise NotFound(names.job_name(cluster, job))
        return started

    async def ask_agent(self, cluster: str, read: LogRead) -> LogAnswer:
        """Ask an agent, and return its answer. An id is chosen for ``read``.

        Raises:
            NodeSilent: the agent cannot be asked, or does not answer. NotAllowed: it cannot read
                the output. TooBusy: too many requests wait.
        """
        read = replace(read, id=self._new_id())
        with self.wakeups.listen(answer_key(read.id)) as answered:
            await self.calls.run(
                self._store.update,
                log_reads.store_request,
                cluster,
                read,
                CALLER.get().client,
                self._store.lease_s,
            )
            answer = None
            try:
                answer = await self._await_answer(read.id, answered)
            finally:
                if answer is None:
                    await self._withdraw(read.id)
        if answer is None:
            silent_s = await self.calls.run(
                self._store.read, log_reads.silence_of_node, cluster, read.node
            )
            heard = "not heard" if silent_s is None else f"last heard {silent_s:.0f} s ago"
            raise NodeSilent(
                f"node {read.node} did not answer within {self.timing.answer_s:g} s; it was {heard}."
                " Try again, or upgrade its agent to the release of the server"
            )
        if answer.error:
            raise NotAllowed(f"node {read.node} cannot read this output: {answer.error}")
        return answer

    def pause_s(self, quiet: int) -> float:
        """Return the seconds until output that was not longer ``quiet`` times is read again."""
        longer = max(1.0, self._places.taken() / READS_PER_S)
        return min(self.timing.follow_s * 2.0 ** min(quiet, 32), self.timing.follow_most_s) * longer

    async def _await_answer(self, read_id: str, answered: Subscription) -> LogAnswer | None:
        end_s = self._clock.monotonic_s() + self.timing.answer_s
        while (left_s := end_s - self._clock.monotonic_s()) > 0:
            await answered.wait(min(left_s, RECHECK_S))
            if (
                answer := await self.calls.run(self._store.update, log_reads.take_answer, read_id)
            ) is not None:
                return answer
        return None

    async def _withdraw(self, read_id: str) -> None:
        """Delete a request. If that fails, the request expires."""
        with contextlib.suppress(TimeoutError, TesseraError):
            async with asyncio.timeout(WITHDRAW_S):
                await self.calls.run(self._store.update, log_reads.drop_request, read_id)


class _RankOutput:
    """The output of one rank of a job, over one or, if it is followed, several starts."""

    def __init__(
        self,
        reader: OutputReader,
        request: pb.ReadLogsRequest,
        *,
        cluster: str,
        job: str,
        ranks_are_gpus: bool,
        changes: Subscription,
    ) -> None:
        self._reader, self._request = reader, request
        self._cluster, self._job = cluster, job
        self._ranks_are_gpus, self._changes = ranks_are_gpus, changes
        self._number = 0  # of the job, once it is known
        self._has_sent = False

    async def parts(self) -> AsyncGenerator[pb.ReadLogsResponse]:
        """Yield the output. The first part of each start may be empty."""
        generation, offset, read = self._request.generation, self._request.offset, 0
        while True:
            started = await self._find(generation)
            if (start := started.start) is None or start.waits:
                if not self._may_wait(started, generation, read):
                    raise self._unknown_start(started, generation)
                if not self._has_sent:
                    self._has_sent = True
                    yield pb.ReadLogsResponse()
                await self._changes.wait(self._reader.timing.poll_s)
            else:
                async with contextlib.aclosing(self._parts_of(started, start, offset)) as parts:
                    async for part in parts:
                        yield part
                if not self._request.follow:
                    return
                read, offset = start.generation, 0
            if read and not (generation := await self._next_generation(read)):
                return

    async def _parts_of(
        self, started: StartedJob, start: JobStart, offset: int
    ) -> AsyncGenerator[pb.ReadLogsResponse]:
        """Yield the output of one start, to its end or, if it is followed, until it is complete."""
        node, follows, quiet, is_first = self._node(start), self._request.follow, 0, True
        while True:
            try:
                answer = await self._ask(started, start, node, offset)
            except (NodeSilent, TooBusy) as error:
                if is_first or not follows:
                    raise
                has_left = started.following or started.has_ended
                if has_left and isinstance(error, NodeSilent):
                    return
                quiet += 1
            else:
                begin = max(offset, answer.offset)
                data = answer.data[begin - answer.offset :]
                if not (data or self._has_sent) and _is_missing(start, answer, offset):
                    raise NotAllowed(
                        f"start {start.generation} of {self._name()} has no output on node {node}: it wrote"
                        " nothing, or its output was deleted"
                    )
                if is_first or data:
                    is_first, self._has_sent = False, True
                    yield pb.ReadLogsResponse(
                        data=data,
                        offset=begin,
                        generation=start.generation,
                        node=names.node_name(self._cluster, node),
                    )
                offset, quiet = begin + len(data), 0 if data else quiet + 1
                if answer.ended or (not data and not (follows and start.holds)):
                    return
            if quiet:
                await self._pause(quiet - 1)
            started = await self._find(start.generation)
            if started.start is None:
                return  # this start was forgotten, because it is one of many
            start = started.start

    async def _ask(self, started: StartedJob, start: JobStart, node: str, offset: int) -> LogAnswer:
        """Return the part of the output at ``offset``."""
        read = LogRead(
            id="",
            job=self._job,
            job_number=started.number,
            generation=start.generation,
            rank=max(self._request.rank, LAUNCHER_RANK),
            node=node,
            offset=offset,
        )
        return await self._reader.ask_agent(self._cluster, read)

    async def _find(self, generation: int) -> StartedJob:
        """Return the job and one of its starts. Raises NotFound if it is not the same job."""
        started = await self._reader.find_start(self._cluster, self._job, generation)
        self._number = self._number or started.number
        if started.number != self._number:
            raise NotFound(self._name())
        return started

    async def _next_generation(self, after: int) -> int:
        """Return the generation after one that was read, once there is one.

        If the job ends first, return 0.
        """
        while True:
            started = await self._find(after)
            if started.following or started.has_ended:
                return started.following
            await self._changes.wait(self._reader.timing.poll_s)

    async def _pause(self, quiet: int) -> None:
        """Wait before quiet output is read again. Changes of the cluster do not end the wait."""
        with self._reader.wakeups.listen(answer_key("")) as stream:  # only to learn of a shutdown
            await stream.wait(self._reader.pause_s(quiet))

    def _node(self, start: JobStart) -> str:
        """Return the node of the requested rank. Raises InvalidInput."""
        rank = self._request.rank
        if rank < 0:
            return start.shares[0][0]
        ranks = start.nodes_of_ranks(ranks_are_gpus=self._ranks_are_gpus)
        if rank >= len(ranks):
            each = "GPU" if self._ranks_are_gpus else "node"
            raise InvalidInput(
                "rank",
                f"must be below {len(ranks)}, because start {start.generation} of {self._name()} has"
                f" {len(ranks)} ranks, one for each {each}",
            )
        return ranks[rank]

    def _may_wait(self, started: StartedJob, generation: int, read: int) -> bool:
        """Return whether a start that has not begun, or is not there, will be awaited."""
        if not self._request.follow or started.has_ended:
            return False
        return bool(read) or started.start is not None or generation == 0

    def _unknown_start(self, started: StartedJob, generation: int) -> TesseraError:
        if generation and started.start is None and started.last:
            return InvalidInput(
                "generation",
                f"{self._name()} has no start {generation} whose place is known; the first known is"
                f" {started.first}, and the last is {started.last}",
            )
        if started.start is not None:
            return NotAllowed(
                f"start {started.start.generation} of {self._name()} still waits for GPUs that others give"
                " back, so it has no output yet; follow it, or try again later"
            )
        if started.has_ended:
            return NotAllowed(f"{self._name()} ended without being started, so it has no output")
        return NotAllowed(
            f"{self._name()} has not been started yet, so it has no output; follow it, or try again later"
        )

    def _name(self) -> str:
        return names.job_name(self._cluster, self._job)


def _is_missing(start: JobStart, answer: LogAnswer, offset: int) -> bool:
    """Return whether there is no output at all, and there will not be any."""
    return offset <= 0 and answer.offset == 0 and not (start.holds or answer.ended)
