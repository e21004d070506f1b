"""A call of Schedule that another round overtakes is decided again within its deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tessera.db.store import PostgresStore
from tessera.service import deciding, loop
from tessera.solvers.base import Budget
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2 as pb
from tessera.v1 import scheduler_pb2_grpc
from tests.support import rpc
from tests.support.decided_rounds import schedule
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details, serving
from tests.support.stored_cluster import C, a_cluster, a_round, a_spec, submit, wait

REQUEST = pb.ScheduleRequest(
    parent=f"clusters/{C}", options=pb.RoundOptions(solver="greedy"), request_id="once"
)


@pytest.fixture
def filled(store: PostgresStore) -> PostgresStore:
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


def commit_another(store: PostgresStore) -> None:
    snapshot = store.snapshot(C)
    store.commit(a_round(snapshot, wait(snapshot, "a")))


async def test_a_call_that_other_rounds_overtake_is_decided_again_on_the_new_state(
    filled: PostgresStore, monkeypatch: pytest.MonkeyPatch
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
    assert filled.get_cluster(C).last_round == 4
    assert filled.get_job(C, "a").allocation is not None


async def test_a_call_whose_deadline_leaves_no_time_to_decide_again_says_so(
    filled: PostgresStore, monkeypatch: pytest.MonkeyPatch
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
    assert filled.get_cluster(C).last_round == len(attempts)  # none of them is the call's


async def test_an_attempt_ends_as_soon_as_this_server_has_committed_another_round(
    filled: PostgresStore, monkeypatch: pytest.MonkeyPatch
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
