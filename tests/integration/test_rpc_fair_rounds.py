"""Rounds over a real socket: what one caller's rounds leave to others, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from tessera.benchmarks.rounds.instances import make_instance
from tessera.db.store.reads import get_cluster, get_job
from tessera.db.store.store import Store
from tessera.formulation.base.errors import DeadlineTooShort, NotFound
from tessera.formulation.records.rounds import (
    RoundCommit,
    RoundRecord,
    RoundSummary,
    decision_record,
)
from tessera.formulation.records.store import Request
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds import deciding, loop
from tessera.service.server.rpc.serving.server import Server
from tessera.solvers.base import Budget
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2 as pb
from tessera.v1 import scheduler_pb2_grpc
from tests.support import rpc
from tests.support.builders import a_random_snapshot
from tests.support.decided_rounds import schedule
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details, serving
from tests.support.store_double import StoreDouble
from tests.support.stored_cluster import C, a_cluster, a_round, a_spec, submit, wait

HOUR_S = 3600.0


ENDLESS = pb.RoundOptions(
    objective="max-min then makespan", fairness_levels=64, promise_starts=False
)
"""Options of a round that takes minutes on the cluster ``huge``, all of them to solve it."""


@cache
def a_huge_snapshot() -> Snapshot:
    return make_instance(3000, 1500, 4, seed=1, running=0.5)


class TwoClusters(StoreDouble):
    """A store of a huge and a small cluster, with only the methods that rounds use."""

    def __init__(self) -> None:
        self._found = {"huge": a_huge_snapshot(), "small": a_random_snapshot(1, jobs=5)}
        self.loaded = threading.Semaphore(0)  # counts the snapshots of ``huge``
        self.committed: list[RoundCommit] = []

    def tenants_of_jobs(self, cluster: str, names: Collection[str]) -> dict[str, str]:
        return dict.fromkeys(names, "")

    def ready(self) -> None:
        return None

    def newest_policy(self, _cluster: str) -> None:
        return None

    def begin_round(
        self, cluster: str, _request: Request | None, _use_half_life_s: float = 0.0
    ) -> Snapshot:
        return self.snapshot(cluster)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        if cluster not in self._found:
            raise NotFound(cluster)
        if cluster == "huge":
            self.loaded.release()
        return self._found[cluster]

    def commit(self, commit: RoundCommit, in_time: Callable[[], bool]) -> RoundRecord:
        if not in_time():
            raise DeadlineTooShort("too late")
        self.committed.append(commit)
        return self._record(commit.snapshot, commit.summary, commit.decisions)

    @staticmethod
    def _record(snapshot: Snapshot, summary: RoundSummary, decisions: Any) -> RoundRecord:
        records = tuple(decision_record(snapshot, d) for d in decisions)
        return RoundRecord(summary=replace(summary, number=1), decisions=records)


class Api:
    """Calls of the scheduler, with its server and its store."""

    def __init__(self, store: TwoClusters, server: Server, channel: grpc.aio.Channel) -> None:
        self.store, self.server = store, server
        self.stub = scheduler_pb2_grpc.SchedulerStub(channel)

    def schedule(self, cluster: str, timeout: float = PATIENCE_S, **request: Any) -> Any:
        return self.stub.Schedule(
            pb.ScheduleRequest(parent=f"clusters/{cluster}", **request), timeout=timeout
        )

    async def hold(self, calls: int, **request: Any) -> list[Any]:
        """Begin rounds of the huge cluster that take minutes, and return once the first one runs."""
        begun = [self.schedule("huge", HOUR_S, options=ENDLESS, **request) for _ in range(calls)]
        assert await asyncio.to_thread(self.store.loaded.acquire, timeout=PATIENCE_S)
        return begun

    async def idle(self) -> None:
        """Wait until no thread works for a call."""
        async with asyncio.timeout(PATIENCE_S):
            while self.server.threads.running():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def api(**settings: Any) -> AsyncIterator[Api]:
    store = TwoClusters()
    async with serving(cast(Store, store), **settings) as (channel, server):
        yield Api(store, server, channel)


async def cancel_all(calls: list[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_periodic_rounds_wait_for_no_caller() -> None:
    async with api(round_threads=1, trial_threads=1) as a:
        held = await a.hold(1, dry_run=True) + await a.hold(1)
        async with asyncio.timeout(PATIENCE_S):
            assert await a.server.threads.rounds.run(lambda: "decided") == "decided"
        assert not any(call.done() for call in held)
        await cancel_all(held)


async def test_a_long_deadline_is_cut_to_the_maximum_and_returns_the_best_answer_so_far() -> None:
    async with api(max_deadline_s=1.0) as a:
        answer = await a.schedule("huge", HOUR_S, dry_run=True, options=ENDLESS, summary_only=True)
        assert answer.verified
        assert answer.seconds["solve"] < PATIENCE_S
        assert any(work.solver.startswith("over:") for work in answer.work)  # the limit ended it


async def test_an_uninterrupted_baseline_ends_with_its_call() -> None:
    async with api() as a:
        call = a.schedule("huge", HOUR_S, dry_run=True, options=pb.RoundOptions(solver="highs"))
        assert await asyncio.to_thread(a.store.loaded.acquire, timeout=PATIENCE_S)
        assert (await a.schedule("small", dry_run=True)).verified
        await cancel_all([call])
        await a.idle()


REQUEST = pb.ScheduleRequest(
    parent=f"clusters/{C}", options=pb.RoundOptions(solver="greedy"), request_id="once"
)


@pytest.fixture
def filled(store: Store) -> Store:
    a_cluster(store)
    submit(store, a_spec("a"))
    return store


def before_each_decision(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Budget], None]
) -> list[int]:
    """Call ``act`` with the number of the attempt while a round is decided; return the attempts."""
    attempts: list[int] = []
    really = deciding.plan_here

    def plan(snapshot: Any, options: RoundOptions, budget: Budget, *rest: Any) -> Any:
        attempts.append(len(attempts) + 1)
        act(attempts[-1], budget)
        return really(snapshot, options, budget, *rest)

    monkeypatch.setattr(loop, "plan_here", plan)
    return attempts


def commit_another(store: Store) -> None:
    snapshot = store.snapshot(C)
    store.commit(a_round(snapshot, wait(snapshot, "a")))


async def test_a_call_that_other_rounds_overtake_is_decided_again_on_the_new_state(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(attempt: int, _: Budget) -> None:
        if attempt <= 3:
            commit_another(filled)

    attempts = before_each_decision(monkeypatch, act)
    async with serving(filled) as (channel, _):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        answer = await stub.Schedule(REQUEST, timeout=PATIENCE_S)
        again = await stub.Schedule(REQUEST, timeout=PATIENCE_S)
    assert attempts == [1, 2, 3, 4]
    assert answer.name == again.name == f"clusters/{C}/rounds/4"
    assert filled.read(get_cluster, C).last_round == 4
    assert filled.read(get_job, C, "a").allocation is not None


async def test_a_call_whose_deadline_leaves_no_time_to_decide_again_says_so(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = before_each_decision(monkeypatch, lambda _, __: commit_another(filled))
    async with serving(filled, default_deadline_s=3.0) as (channel, _):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Schedule(REQUEST)
    assert refused.value.code() is grpc.StatusCode.ABORTED
    info, _ = error_details(refused.value)
    assert info.reason == "ROUND_SUPERSEDED"
    assert refused.value.details() == (
        f"{info.metadata['winner']} was committed while this round was being solved, and the deadline"
        " leaves no time to decide again; call with a longer one"
    )
    assert filled.read(get_cluster, C).last_round == len(attempts)  # none of them is the call's


async def test_an_attempt_ends_as_soon_as_this_server_has_committed_another_round(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of its solution would be in vain, and its time is the next attempt's."""
    loops: list[loop.RoundLoop] = []
    wanted: list[bool] = []

    def make_loop(*args: Any, **settings: Any) -> loop.RoundLoop:
        loops.append(loop.RoundLoop(*args, **settings))
        return loops[-1]

    def act(attempt: int, budget: Budget) -> None:
        if attempt == 1:  # the server's own round, as after an event
            schedule(loops[0], RoundOptions(solver="greedy"))
        wanted.append(not budget.cancelled())

    attempts = before_each_decision(monkeypatch, act)
    monkeypatch.setattr(rpc, "RoundLoop", make_loop)
    async with serving(filled) as (channel, _):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        answer = await stub.Schedule(REQUEST, timeout=PATIENCE_S)
    assert attempts == [1, 2, 3]
    assert wanted == [True, False, True]  # of the server's round, and of both attempts
    assert answer.name == f"clusters/{C}/rounds/2"
