"""Lanes: fair turns of calls, shared reads, and calls that are cancelled."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf.message import Message

from tessera.benchmarks.rounds.instances import make_instance
from tessera.formulation.base.errors import DeadlineTooShort, NotFound, TooBusy
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rpc.sharing import SharedReads
from tessera.service.server.tasks import memory
from tessera.service.server.tasks.calls import StreamPlaces
from tessera.service.server.tasks.lanes import (
    CALLER,
    QUICK_BYTES,
    QUICK_ITEMS,
    FairCalls,
    Lane,
    LaneLimits,
    LaneTurn,
    Share,
    SizedCalls,
    client_of,
)
from tessera.solvers import registry
from tessera.solvers.base import Budget
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.network.swaps import PlayEffort
from tessera.solvers.rounds.plan import RoundOptions, RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of
from tessera.v1.jobs_pb2 import ListJobsRequest, SubmitJobsRequest
from tests.support.patience import PATIENCE_S

T = TypeVar("T")

EVIL, GOOD = Share("evil", "a"), Share("good", "b")


class BlockingWork:
    """Work that holds its thread until it may end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.turn: LaneTurn | None = None

    def __call__(self, turn: LaneTurn) -> str:
        self.turn = turn
        self.began.set()
        assert self.may_end.wait(PATIENCE_S)
        return "done"


class LaneBench:
    """A lane and the work submitted to it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.works: list[BlockingWork] = []
        self.tasks: list[asyncio.Task[str]] = []

    def give(self, share: Share) -> BlockingWork:
        work = BlockingWork()
        self.works.append(work)
        self.tasks.append(asyncio.create_task(self.lane.run(share, "work", work)))
        return work

    async def begun(self, work: BlockingWork) -> None:
        assert await asyncio.to_thread(work.began.wait, PATIENCE_S)

    async def end(self, work: BlockingWork) -> None:
        work.may_end.set()
        assert await self.tasks[self.works.index(work)] == "done"
        await asyncio.sleep(0)  # the lane takes the thread back in the next step of the event loop


@asynccontextmanager
async def bench(
    threads: int, limits: LaneLimits | None = None, **settings: object
) -> AsyncIterator[LaneBench]:
    lane = Lane(threads, "test", limits or LaneLimits.leaving_room(threads), **settings)  # type: ignore[arg-type]
    lane_bench = LaneBench(lane)
    try:
        yield lane_bench
    finally:
        for work in lane_bench.works:
            work.may_end.set()
        await asyncio.gather(*lane_bench.tasks, return_exceptions=True)
        await lane.close()


async def test_one_client_leaves_a_thread_to_others() -> None:
    async with bench(3) as b:
        works = [b.give(Share("evil", name)) for name in ("a", "b", "c", "d")]
        await b.begun(works[0])
        await b.begun(works[1])
        other = b.give(GOOD)
        await b.begun(other)
        assert not works[2].began.is_set()


async def test_one_cluster_leaves_a_thread_to_others() -> None:
    async with bench(3) as b:
        works = [b.give(Share(client, "a")) for client in ("x", "y", "z")]
        await b.begun(works[1])
        other = b.give(GOOD)
        await b.begun(other)
        assert not works[2].began.is_set()


async def test_a_client_with_many_calls_gives_precedence_to_one_with_none() -> None:
    async with bench(1) as b:
        first = b.give(EVIL)
        await b.begun(first)
        more = [b.give(Share("evil", name)) for name in "aabbc"]
        await asyncio.sleep(0)
        other = b.give(GOOD)
        await asyncio.sleep(0)
        await b.end(first)
        await b.begun(other)
        assert not any(work.began.is_set() for work in more)


async def test_work_is_asked_to_end_only_when_others_wait() -> None:
    now = [0.0]
    async with bench(1, turn_s=10.0, now_s=lambda: now[0]) as b:
        first = b.give(EVIL)
        await b.begun(first)
        assert first.turn is not None
        now[0] = 8.0
        b.give(EVIL)
        await asyncio.sleep(0)
        # calls of the same client do not count as others
        assert first.turn.left_s() == math.inf
        b.give(GOOD)
        await asyncio.sleep(0)
        assert first.turn.left_s() == 2.0
        now[0] = 12.0
        assert first.turn.left_s() == -2.0


async def test_work_of_a_disconnected_caller_is_never_started() -> None:
    async with bench(1) as b:
        first, second = b.give(EVIL), b.give(EVIL)
        await b.begun(first)
        b.tasks[1].cancel()
        await asyncio.gather(b.tasks[1], return_exceptions=True)
        assert not b.lane.others_wait(GOOD)
        third = b.give(EVIL)
        await b.end(first)
        await b.begun(third)
        assert not second.began.is_set()


async def test_a_caller_that_leaves_does_not_free_the_thread_that_works_for_it() -> None:
    async with bench(1) as b:
        first, second = b.give(EVIL), b.give(GOOD)
        await b.begun(first)
        b.tasks[0].cancel()
        await asyncio.gather(b.tasks[0], return_exceptions=True)
        assert not second.began.is_set()
        first.may_end.set()
        await b.begun(second)


async def test_a_full_queue_refuses_at_once_and_says_what_to_do() -> None:
    async with bench(1, most_waiting=8) as b:
        await b.begun(b.give(EVIL))
        for name in "abcdefgh":
            b.give(Share("evil", name))
        await asyncio.sleep(0)
        with pytest.raises(TooBusy, match=r"4 calls of this client are waiting.*then call again"):
            await b.lane.run(Share("evil", "z"), "work", BlockingWork())
        for name in "stuv":
            b.give(Share("good", name))
        await asyncio.sleep(0)
        with pytest.raises(TooBusy, match="8 calls in all are waiting"):
            await b.lane.run(Share("third", "z"), "work", BlockingWork())


async def test_one_share_fills_at_most_a_quarter_of_the_queue() -> None:
    async with bench(1, most_waiting=8) as b:
        await b.begun(b.give(EVIL))
        b.give(EVIL), b.give(EVIL)
        await asyncio.sleep(0)
        with pytest.raises(TooBusy, match="2 calls of this client and cluster are waiting"):
            await b.lane.run(EVIL, "work", BlockingWork())


async def test_rounds_of_one_cluster_wait_for_each_other() -> None:
    async with bench(2, LaneLimits(client=2, cluster=1, share=1)) as b:
        first, second = b.give(Share("x", "a")), b.give(Share("y", "a"))
        third = b.give(Share("x", "b"))
        await b.begun(first)
        await b.begun(third)
        assert not second.began.is_set()
        await b.end(first)
        await b.begun(second)


async def test_a_closing_lane_names_the_calls_still_running() -> None:
    async with bench(1) as b:
        first = b.give(EVIL)
        await b.begun(first)
        assert b.lane.running() == ["work"]
        assert await b.lane.close(0.01) == ["work"]
        first.may_end.set()
        assert await b.lane.close() == []


async def run_as(share: Share, calls: FairCalls, work: Callable[[], T]) -> T:
    CALLER.set(share)  # in this task only
    return await calls.run(work)


async def test_short_calls_run_on_the_share_of_their_caller() -> None:
    """Callers of one cluster that wait for its row leave threads to callers of another cluster."""
    calls = FairCalls(Lane(4, "store", LaneLimits(client=3, cluster=2, share=2)))
    go = threading.Event()
    crowd = [
        asyncio.create_task(run_as(EVIL, calls, lambda: go.wait(PATIENCE_S))) for _ in range(9)
    ]
    await asyncio.sleep(0)
    for _ in range(5):
        assert await run_as(GOOD, calls, lambda: "quick") == "quick"
    assert sum(task.done() for task in crowd) == 0
    go.set()
    assert await asyncio.gather(*crowd) == [True] * 9
    assert await calls.close() == []


async def test_heavy_calls_leave_the_threads_of_short_ones_alone() -> None:
    quick_calls, heavy_calls = (
        FairCalls(Lane(1, name, LaneLimits(client=1, cluster=1, share=1)))
        for name in ("quick", "heavy")
    )
    calls = SizedCalls(quick_calls, heavy_calls)
    request: Message
    for request, thread in (
        (ListJobsRequest(page_size=QUICK_ITEMS), "quick_0"),
        (ListJobsRequest(page_size=QUICK_ITEMS + 1), "heavy_0"),
        (ListJobsRequest(parent="x" * (QUICK_BYTES - 10)), "quick_0"),
        (ListJobsRequest(parent="x" * QUICK_BYTES), "heavy_0"),
        (SubmitJobsRequest(request_id="short"), "quick_0"),
    ):
        assert await calls.run_by_size(lambda _: threading.current_thread().name, request) == thread
    assert await calls.run_heavy(lambda _: threading.current_thread().name, request) == "heavy_0"
    assert await calls.run(lambda: threading.current_thread().name) == "quick_0"


async def test_short_calls_beyond_the_queue_are_refused() -> None:
    lane = Lane(1, "store", LaneLimits(client=1, cluster=1, share=1), most_waiting=4)
    calls, go = FairCalls(lane), threading.Event()
    waiting = [
        asyncio.create_task(run_as(EVIL, calls, lambda: go.wait(PATIENCE_S))) for _ in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(
        TooBusy, match="1 calls of this client and cluster are waiting for one of 1 store"
    ):
        await run_as(EVIL, calls, go.is_set)
    go.set()
    await asyncio.gather(*waiting)
    assert await calls.close() == []


def test_streams_are_limited_in_total_and_for_each_client() -> None:
    places = StreamPlaces(3, 2, "streams")
    with places.take("x"), places.take("x"):
        with pytest.raises(TooBusy, match="2 streams of this client are open"), places.take("x"):
            pass
        with (
            places.take("y"),
            pytest.raises(TooBusy, match="3 streams in all are open"),
            places.take("z"),
        ):
            pass
        assert places.taken() == 2
    assert places.taken() == 0


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.7:50123", "10.0.0.7"),
        ("ipv6:%5B::1%5D:50123", "%5B::1%5D"),
        ("unix:", "unix"),
        ("unix:/run/tessera.sock", "unix"),
    ],
)
def test_a_client_is_the_host_of_its_address(peer: str, client: str) -> None:
    assert client_of(peer) == client


class VersionedShelf:
    """A value with a version, which is read when the gate opens. It counts the reads."""

    def __init__(self) -> None:
        self.version, self.reads, self.gate = 1, 0, asyncio.Event()

    async def read(self, key: str) -> int:
        self.reads += 1
        version = self.version
        await self.gate.wait()
        if key == "absent":
            raise NotFound(key)
        return version


async def test_a_hundred_callers_share_a_read() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    callers = [asyncio.create_task(shared.get("a")) for _ in range(100)]
    shelf.gate.set()
    assert await asyncio.gather(*callers) == [1] * 100
    assert shelf.reads == 1


async def test_a_caller_during_a_read_shares_the_next_read_and_sees_the_change() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    early = asyncio.create_task(shared.get("a"))
    while not shelf.reads:
        await asyncio.sleep(0)
    shelf.version = 2
    late = [asyncio.create_task(shared.get("a")) for _ in range(10)]
    await asyncio.sleep(0)
    shelf.gate.set()
    assert await early == 1
    assert await asyncio.gather(*late) == [2] * 10
    assert shelf.reads == 2


async def test_keys_are_read_separately_and_errors_reach_all_callers() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    shelf.gate.set()
    assert list(await asyncio.gather(shared.get("a"), shared.get("b"))) == [1, 1]
    failed = await asyncio.gather(
        shared.get("absent"), shared.get("absent"), return_exceptions=True
    )
    assert [type(error) for error in failed] == [NotFound, NotFound]
    assert shelf.reads == 3


async def test_a_disconnecting_caller_does_not_affect_the_others() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    first, second = (asyncio.create_task(shared.get("a")) for _ in range(2))
    while not shelf.reads:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    shelf.gate.set()
    assert await second == 1


JOBS = 100


@cache
def a_crowded_snapshot() -> Snapshot:
    """Return many jobs with deadlines on a few GPUs, half of which are taken."""
    snapshot = make_instance(JOBS, JOBS // 2, 4, seed=1, running=0.5)
    deadline_s = np.linspace(3600.0, 3600.0 + 60.0 * (JOBS - 1), JOBS)
    return replace(snapshot, jobs=replace(snapshot.jobs, deadline_s=deadline_s))


class LeavingCaller:
    """A caller that leaves at the ``leaves_at``-th check. It counts the checks.

    Only those of the thread that decides count. CP-SAT's watcher has its own, and their number
    depends on how busy the machine is.
    """

    def __init__(self, leaves_at: float = math.inf) -> None:
        self.leaves_at, self.asked = leaves_at, 0
        self._decides = threading.current_thread()

    def has_left(self) -> bool:
        self.asked += threading.current_thread() is self._decides
        return self.asked >= self.leaves_at


def plan_crowd(options: RoundOptions, caller: LeavingCaller, **budget: Any) -> RoundOutcome:
    limits: dict[str, Any] = {"remaining_s": lambda: math.inf, "gap": 1e-2} | budget
    return plan_round(
        a_crowded_snapshot(),
        options,
        registry.make_solver(options.solver),
        Budget(cancelled=caller.has_left, **limits),
        scheduler=scheduler_of(options.scheduler),
    )


@pytest.mark.parametrize(
    ("options", "per_job"),
    [
        ({"objective": "throughput", "solver": "greedy"}, 0),
        ({"objective": "max-min", "fairness_levels": 8}, 0),
        ({"objective": "makespan then jct", "fairness_levels": 8}, 0),
        ({"objective": "deadline then jct", "solver": "greedy"}, 0.5),
        ({"keep_requests": False, "max_changes": 10, "solver": "greedy"}, 0),
        ({"scheduler": "arena"}, 0.5),
        ({"scheduler": "morphling"}, 0.5),
        ({"scheduler": "antman"}, 0.5),
        ({"scheduler": "sia"}, 0),
    ],
)
def test_a_round_ends_when_its_caller_leaves(options: Mapping[str, Any], per_job: float) -> None:
    stays = LeavingCaller()
    plan_crowd(RoundOptions(**options), stays)
    assert stays.asked > 3 + per_job * JOBS
    for share in (0.0, 0.3, 0.6, 0.9):
        leaves = LeavingCaller(leaves_at=1 + share * (stays.asked - 4))
        with pytest.raises(DeadlineTooShort, match="no round was committed"):
            plan_crowd(RoundOptions(**options), leaves)
        # Searches that only look whether time is left end one after the other before the round.
        assert leaves.asked <= leaves.leaves_at + 20


def test_cp_sat_can_be_stopped_during_its_search() -> None:
    searching = threading.Event()

    def has_left() -> bool:
        if threading.current_thread().name == "cp-sat-watcher":
            searching.set()
        return searching.is_set()

    problem = build_problem(make_instance(400, 200, 4, seed=1, family="tight"), Policy())
    with pytest.raises(DeadlineTooShort):
        CpSat().solve(problem, Budget(remaining_s=lambda: math.inf, gap=0.0, cancelled=has_left))
    assert searching.is_set()


def test_the_calls_time_limits_the_library_and_searches_stop_when_their_caller_leaves() -> None:
    budget = Budget(remaining_s=lambda: math.inf, left_s=lambda: 7.0)
    assert budget.time_limit_s() == 7.0
    assert not budget.expired()
    assert budget.share(0.5).time_limit_s() == 7.0
    effort = PlayEffort(2, cancelled=lambda: True)
    for use in (effort.share, lambda: effort.spend(1.0), effort.check):
        with pytest.raises(DeadlineTooShort):
            use()


class Countdown:
    """A remaining time that falls by one second whenever it is read."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> float:
        self.left -= 1
        return float(self.left)


@pytest.mark.parametrize("questions", [1, 5, 20, 80])
@pytest.mark.parametrize("objective", ["max-min", "makespan then max-min then jct"])
def test_a_round_cut_short_by_time_can_be_repeated(objective: str, questions: int) -> None:
    options = RoundOptions(objective=objective, fairness_levels=16)
    first = plan_crowd(options, LeavingCaller(), remaining_s=Countdown(questions))
    again = plan_crowd(options, LeavingCaller(), work=dict(first.solution.work))
    assert again.decisions == first.decisions
    assert again.goals == first.goals


def test_memory_is_given_back_after_growth_only(monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[int] = []
    sizes = [2**20, 2**21, 2**30, 2**20, 2**21]
    last = iter([*sizes, *([sizes[-1]] * 1000)])
    readings: list[int] = []

    def resident() -> int:
        readings.append(next(last))
        return readings[-1]

    monkeypatch.setattr(memory, "give_back", lambda: releases.append(len(readings)))

    async def test() -> None:
        task = asyncio.create_task(memory.give_back_repeatedly(lambda: False, resident, 0.0))
        while len(readings) < len(sizes) + 4:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(test())
    assert releases == [3]


def test_memory_of_a_busy_process_is_released_once_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    releases: list[int] = []
    rests_from = memory.MAX_BUSY_PERIODS + 3
    looks = 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        return looks < rests_from

    def resident() -> int:
        return 2**30 if looks else 2**20

    async def test() -> None:
        monkeypatch.setattr(memory, "give_back", lambda: releases.append(looks))
        task = asyncio.create_task(memory.give_back_repeatedly(is_busy, resident, 0.0))
        while looks < rests_from + 5:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(test())
    assert releases == [memory.MAX_BUSY_PERIODS, rests_from]


def test_free_memory_is_returned_to_the_system() -> None:
    memory.give_back()
    before = memory.resident_bytes()
    objects = [bytes(1000) for _ in range(200_000)]
    grown = memory.resident_bytes()
    del objects
    memory.give_back()
    assert memory.resident_bytes() < before + (grown - before) // 2
