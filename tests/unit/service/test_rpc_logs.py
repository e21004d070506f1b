"""The reader of output on a server, with agents that do not answer, or answer strangely."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from tessera.db.store.store import Store
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput, NodeSilent, TooBusy
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.logs import JobStart, LogAnswer, LogRead, StartedJob, answer_key
from tessera.service.server.rpc import logs
from tessera.service.server.rpc.logs import LogTiming, OutputReader
from tessera.service.server.tasks.calls import StreamPlaces, Wakeups
from tessera.service.server.tasks.lanes import FairCalls, Lane, LaneLimits
from tessera.v1 import jobs_pb2
from tests.support.patience import PATIENCE_S
from tests.support.store_double import StoreDouble

QUICK = LogTiming(answer_s=0.05, follow_s=0.001, follow_most_s=0.002, poll_s=0.01)
START = JobStart(generation=1, shares=(("n0", (0, 1)), ("n1", (0,))), waits=False, holds=True)
STARTED = StartedJob(
    number=1, tenant="", state=JobState.RUNNING, start=START, first=1, last=1, following=0
)
ENDED = replace(STARTED, state=JobState.SUCCEEDED, start=replace(START, holds=False))

Answer = LogAnswer | Exception | None


class Job:
    """A job with a runtime."""

    class spec:
        runtime = "command"


class ScriptedLogs(StoreDouble):
    """A store of one job with scripted answers. After the last one, the job has ended.

    None is an answer that never comes. ``notifies`` says whether answers are announced.
    """

    def __init__(self, wakeups: Wakeups, loop: asyncio.AbstractEventLoop) -> None:
        self.answers: list[Answer] = []
        self.started = STARTED
        self.reads: list[LogRead] = []
        self.withdrawn: list[str] = []
        self.notifies = True
        self._wakeups, self._loop = wakeups, loop

    def get_job(self, _cluster: str, _job: str) -> type[Job]:
        return Job

    def find_start(self, _cluster: str, _job: str, _generation: int) -> StartedJob:
        return self.started

    def store_request(self, _cluster: str, read: LogRead, _client: str, _lease_s: float) -> None:
        self.reads.append(read)
        if self.answers and isinstance(self.answers[0], Exception):
            raise cast(Exception, self.answers.pop(0))
        if self.notifies:
            self._loop.call_soon_threadsafe(self._wakeups.changed, answer_key(read.id))

    def take_answer(self, read_id: str) -> LogAnswer | None:
        answer = self.answers[0]
        if answer is None:
            return None
        self.answers.pop(0)
        if not self.answers:
            self.started = ENDED
        assert isinstance(answer, LogAnswer)
        return replace(answer, id=read_id)

    def drop_request(self, read_id: str) -> None:
        self.withdrawn.append(read_id)

    def silence_of_node(self, _cluster: str, _node: str) -> float | None:
        return 3.0


class World:
    """A reader with a scripted store."""

    def __init__(self) -> None:
        self.wakeups = Wakeups()
        self.logs = ScriptedLogs(self.wakeups, asyncio.get_running_loop())
        self.calls = FairCalls(Lane(2, "log", LaneLimits(client=2, cluster=2, share=2)))

    def reader(self, timing: LogTiming = QUICK) -> OutputReader:
        numbers = itertools.count()
        return OutputReader(
            cast(Store, self.logs),
            self.calls,
            self.wakeups,
            places=StreamPlaces(10, 10, "streams of output"),
            clock=SystemClock(),
            new_id=lambda: f"r{next(numbers)}",
            timing=timing,
        )

    async def read(
        self, answers: Sequence[Answer], timing: LogTiming = QUICK, **request: Any
    ) -> list[tuple[int, bytes]]:
        """Return the (offset, data) of all parts."""
        self.logs.answers = list(answers)
        asked = jobs_pb2.ReadLogsRequest(name="clusters/c/jobs/j", **request)
        async with asyncio.timeout(PATIENCE_S), aclosing(self.reader(timing).read(asked)) as parts:
            return [(part.offset, part.data) async for part in parts]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    yield found
    await found.calls.close()


def an_answer(data: bytes = b"", offset: int = 0, **more: Any) -> LogAnswer:
    return LogAnswer(id="", data=data, offset=offset, **more)


async def test_an_agent_that_does_not_answer_is_named_and_its_request_withdrawn(
    world: World,
) -> None:
    with pytest.raises(NodeSilent) as refused:
        await world.read([None])
    assert str(refused.value).startswith(
        "node n0 did not answer within 0.05 s; it was last heard 3 s ago"
    )
    assert world.logs.withdrawn == ["r0"]


async def test_an_answer_whose_notice_was_lost_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "RECHECK_S", 0.01)
    world.logs.notifies = False
    patient = replace(QUICK, answer_s=PATIENCE_S)
    assert await world.read([an_answer(b"x", ended=True)], patient) == [(0, b"x")]
    assert world.logs.withdrawn == []


async def test_output_that_an_agent_repeats_is_not_sent_twice(world: World) -> None:
    answers = [
        an_answer(b"0123"),
        an_answer(b"0123456", 0),
        an_answer(b"01", 0),
        an_answer(b"789", 7, ended=True),
    ]
    assert await world.read(answers, follow=True) == [(0, b"0123"), (4, b"456"), (7, b"789")]
    assert [read.offset for read in world.logs.reads] == [0, 4, 7, 7]


async def test_a_follower_survives_a_busy_store_and_a_silent_node(world: World) -> None:
    answers: list[Answer] = [
        an_answer(b"a"),
        TooBusy("many"),
        NodeSilent("for a moment"),
        an_answer(b"b", 1),
        an_answer(offset=2),
        an_answer(b"c", 2, ended=True),
    ]
    assert await world.read(answers, follow=True) == [(0, b"a"), (1, b"b"), (2, b"c")]


@pytest.mark.parametrize("error", [TooBusy("many"), NodeSilent("gone")])
async def test_the_first_request_of_a_follower_is_not_tried_again(
    world: World, error: Exception
) -> None:
    with pytest.raises(type(error), match=str(error)):
        await world.read([error], follow=True)


async def test_a_follower_ends_if_a_job_has_ended_on_a_silent_node(world: World) -> None:
    world.logs.started = ENDED
    assert await world.read([an_answer(b"a"), NodeSilent("gone")], follow=True) == [(0, b"a")]


async def test_a_rank_is_one_of_the_gangs(world: World) -> None:
    await world.read([an_answer(b"x", ended=True)], rank=1)
    assert world.logs.reads[0].node == "n1"
    with pytest.raises(InvalidInput, match="must be below 2"):
        await world.read([], rank=2)


async def test_ranks_are_gpus_if_the_runtime_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job.spec, "runtime", "torchrun")
    for rank, node in ((0, "n0"), (1, "n0"), (2, "n1")):
        world.logs.started = STARTED
        await world.read([an_answer(b"x", ended=True)], rank=rank)
        assert (world.logs.reads[-1].node, world.logs.reads[-1].rank) == (node, rank)
    with pytest.raises(InvalidInput, match="has 3 ranks, one for each GPU"):
        await world.read([], rank=3)


async def test_quiet_output_is_read_less_and_less_often(world: World) -> None:
    reader = world.reader(LogTiming())
    assert [reader.pause_s(quiet) for quiet in (0, 1, 2, 3, 10**9)] == [1.0, 2.0, 4.0, 5.0, 5.0]
