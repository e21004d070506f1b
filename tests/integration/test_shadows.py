"""Shadows: what they decide on the states of rounds, and that their failures harm nothing."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from grpc import StatusCode

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import NotFound
from tessera.formulation.records.policies import DecisionFigures, ShadowRound
from tessera.formulation.records.rounds import RoundRecord
from tessera.service import server_tasks
from tessera.service.background import run_in_process
from tessera.service.shadowing import Decide, ShadowKeeper, ShadowOrder, decide_ordered_round
from tessera.service.standing_policy import StandingPolicies
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.api import C as PLACE
from tests.support.api import api, refusal_of
from tests.support.decided_rounds import schedule
from tests.support.hand_clock import HandClock
from tests.support.patience import PATIENCE_S
from tests.support.running_server import channel_to, settings
from tests.support.stored_cluster import C, a_cluster, a_record, a_spec, do, submit


@pytest.fixture
def busy(store: PostgresStore) -> PostgresStore:
    """Return a store with more jobs than GPUs, of which two have been decided."""
    a_cluster(store)
    do(
        store,
        lambda w: w.upsert_estimates(C, [a_record(n, iter_time_s=n**-0.7) for n in (1, 2, 4, 8)]),
    )
    for i in range(12):
        submit(
            store, a_spec(f"j{i:02}", requested_gpus=1 + i % 4, iterations=100 * (1 + 7 * i % 5))
        )
    return store


def decide_round(
    store: PostgresStore, shadow_half_life_s: float = 0.0, **options: Any
) -> RoundRecord:
    return schedule(store, RoundOptions(**options), shadow_half_life_s=shadow_half_life_s)


def set_shadow(store: PostgresStore, **options: Any) -> None:
    do(store, lambda w: w.set_shadow(C, options, set_by="ada", message="curious"))


def keeper(store: PostgresStore, decide: Decide, clock: HandClock | None = None) -> ShadowKeeper:
    return ShadowKeeper(
        store,
        StandingPolicies(store),
        clock or HandClock(),
        limit_s=60.0,
        share=0.1,
        decide=decide,
    )


def follow(store: PostgresStore, decide: Decide) -> None:
    keeper(store, decide).follow(C, lambda: False)


def decide_here(order: ShadowOrder, _cancelled: Callable[[], bool]) -> ShadowRound:
    return decide_ordered_round(order)


def raise_error(_order: ShadowOrder) -> ShadowRound:
    raise ZeroDivisionError("a mistake")


def die(_order: ShadowOrder) -> ShadowRound:
    os._exit(7)


def decide_by(
    work: Callable[[ShadowOrder], ShadowRound], order: ShadowOrder, cancelled: Callable[[], bool]
) -> ShadowRound | None:
    return run_in_process(work, order, cancelled, name="shadow")


def only_round(store: PostgresStore) -> ShadowRound:
    (decided,) = store.list_shadow_rounds(C, 3600.0)
    return decided


@pytest.mark.parametrize(
    "objective", ["jct", "max-min within 5% then throughput", "deadline then balanced:0.25"]
)
def test_a_shadow_with_the_policy_in_force_decides_the_same(
    busy: PostgresStore, objective: str
) -> None:
    set_shadow(busy, objective=objective)
    record = decide_round(busy, objective=objective)
    follow(busy, decide_here)
    decided = only_round(busy)
    assert decided.policy is not None
    assert decided.shadow is not None
    assert decided.problem == ""
    assert decided.number == record.summary.number
    # The measure of the decisions is the value that the round itself reported.
    values = [goal.objective for goal in record.summary.goals[:-1]] + [record.summary.placed_score]
    assert decided.policy.by_policy == pytest.approx(values, rel=1e-4)
    assert decided.shadow.by_policy == pytest.approx(decided.policy.by_policy, rel=1e-4)
    assert decided.policy.by_shadow == decided.policy.by_policy
    assert decided.policy.used_gpus == sum(record.summary.used_gpus.values())
    assert decided.policy.running == record.summary.running


def test_a_shadow_may_have_a_fair_share_that_the_policy_in_force_lacks(busy: PostgresStore) -> None:
    set_shadow(busy, fair_share="gpus", fair_half_life="7200s")
    half_life_s = StandingPolicies(busy).shadow_half_life_s(C)
    assert half_life_s == 7200.0
    record = decide_round(busy, objective="throughput", shadow_half_life_s=half_life_s)
    assert not record.summary.options["fair_share"]
    assert busy.round_snapshot(C, record.summary.number).use_half_life_s == 7200.0
    follow(busy, decide_here)
    decided = only_round(busy)
    assert decided.problem == ""
    assert decided.shadow is not None


def test_without_a_shadow_that_needs_it_no_use_is_recorded(busy: PostgresStore) -> None:
    policies = StandingPolicies(busy)
    assert policies.shadow_half_life_s(C) == 0.0
    set_shadow(busy, objective="jct")
    assert policies.shadow_half_life_s(C) == 0.0
    set_shadow(busy, fair_share="an option of a later release")
    assert policies.shadow_half_life_s(C) == 0.0


def test_a_shadow_with_another_policy_is_measured_by_both_objectives(busy: PostgresStore) -> None:
    set_shadow(busy, scheduler="fcfs")
    decide_round(busy, objective="throughput")
    follow(busy, decide_here)
    decided = only_round(busy)
    assert decided.policy is not None
    assert decided.shadow is not None
    assert decided.policy_goals == ("throughput (effective GPUs)",)
    # Throughput is what the policy in force maximises, in effective GPUs.
    assert decided.policy.by_policy[0] >= decided.shadow.by_policy[0]
    assert decided.policy.effective_gpus >= decided.shadow.effective_gpus > 0
    assert math.isnan(decided.shadow.gap)  # nothing was proven of its answer


@pytest.mark.parametrize(
    ("work", "problem"), [(raise_error, "ZeroDivisionError: a mistake"), (die, "exit code 7")]
)
def test_a_shadow_that_fails_fails_no_round(
    busy: PostgresStore, work: Callable[[ShadowOrder], ShadowRound], problem: str
) -> None:
    set_shadow(busy, objective="jct")
    decide_round(busy)
    follow(busy, partial(decide_by, work))
    assert problem in only_round(busy).problem
    assert only_round(busy).shadow is None
    assert decide_round(busy).summary.outcome == "committed"
    follow(busy, decide_here)  # the next round has another chance
    assert busy.list_shadow_rounds(C, 3600.0)[0].problem == ""


def test_each_round_is_decided_once_and_a_share_of_the_time_is_used(busy: PostgresStore) -> None:
    clock, orders = HandClock(), []

    def decide(order: ShadowOrder, _cancelled: Callable[[], bool]) -> ShadowRound:
        orders.append(order.record.summary.number)
        clock.now_s += 2.0
        return ShadowRound(number=order.record.summary.number, created_s=1.0, problem="none")

    decide_round(busy)  # before the shadow
    set_shadow(busy, objective="jct")
    shadows = keeper(busy, decide, clock)
    shadows.follow(C, lambda: False)
    assert orders == []
    decide_round(busy)
    shadows.follow(C, lambda: False)
    shadows.follow(C, lambda: False)
    assert orders == [2]
    decide_round(busy)
    decide_round(busy)
    clock.now_s += 17.0
    shadows.follow(C, lambda: False)  # 2 s of 20 s are the share
    assert orders == [2]
    clock.now_s += 1.5
    shadows.follow(C, lambda: False)  # the newest round; the one before is left out
    assert orders == [2, 4]


def test_another_shadow_starts_without_the_rounds_of_the_one_before(busy: PostgresStore) -> None:
    set_shadow(busy, objective="jct")
    first = busy.find_shadow(C)
    assert first is not None
    decided = ShadowRound(number=1, created_s=SystemClock().wall_s(), problem="slow")
    busy.add_shadow_round(first.key, decided)
    assert only_round(busy) == replace(decided, created_s=only_round(busy).created_s)
    set_shadow(busy, objective="throughput")
    busy.add_shadow_round(first.key, decided)  # it was being decided meanwhile
    assert busy.list_shadow_rounds(C, 3600.0) == []
    do(busy, lambda w: w.drop_shadow(C))
    with pytest.raises(NotFound):
        busy.list_shadow_rounds(C, 3600.0)


def figures(value: float) -> DecisionFigures:
    return DecisionFigures(
        by_policy=(value,),
        by_shadow=(-value,),
        effective_gpus=value,
        used_gpus=8,
        running=2,
        waiting=1,
        started=1,
        suspended=0,
        changed=0,
        solve_s=0.5,
        gap=math.nan,
    )


async def test_a_shadow_is_set_compared_and_deleted_by_call(store: PostgresStore) -> None:
    async with api(store) as a:
        missing = scheduler_pb2.GetShadowRequest(name=f"{PLACE}/shadow")
        assert (await refusal_of(a.scheduler.GetShadow(missing)))[0] is StatusCode.NOT_FOUND
        options = scheduler_pb2.RoundOptions(objective="jct", solver="highs")  # a baseline may
        shadow = await a.scheduler.SetShadow(
            scheduler_pb2.SetShadowRequest(parent=PLACE, options=options, message="why not")
        )
        assert (shadow.options, shadow.message) == (options, "why not")
        stored = store.find_shadow("c")
        assert stored is not None
        for number, value in enumerate((1.0, 2.0, 4.0), 1):
            decided = ShadowRound(
                number=number,
                created_s=SystemClock().wall_s(),
                policy_goals=("throughput",),
                shadow_goals=("jct",),
                policy=figures(1.0),
                shadow=figures(value),
            )
            store.add_shadow_round(stored.key, decided)
        failed = ShadowRound(number=4, created_s=SystemClock().wall_s(), problem="slow")
        store.add_shadow_round(stored.key, failed)
        request = scheduler_pb2.GetShadowRequest(name=f"{PLACE}/shadow", rounds=2)
        compared = await a.scheduler.GetShadow(request)
        assert (compared.compared_rounds, compared.failed_rounds) == (3, 1)
        assert compared.problem == "slow"
        by_policy, by_shadow = compared.by_policy, compared.by_shadow
        assert (by_policy.better, by_policy.equal, by_policy.worse) == (2, 1, 0)
        assert (by_shadow.better, by_shadow.equal, by_shadow.worse) == (0, 1, 2)
        gpus = next(f for f in compared.figures if f.name == "effective GPUs")
        assert gpus.difference == pytest.approx(4 / 3)
        assert gpus.low < gpus.difference < gpus.high
        assert [r.round for r in compared.rounds] == [f"{PLACE}/rounds/4", f"{PLACE}/rounds/3"]
        await a.scheduler.DeleteShadow(scheduler_pb2.DeleteShadowRequest(name=f"{PLACE}/shadow"))
        assert (await refusal_of(a.scheduler.GetShadow(request)))[0] is StatusCode.NOT_FOUND


async def test_a_server_lets_the_shadow_decide_what_it_has_committed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tasks, "SHADOW_PERIOD_S", 0.2)
    store = PostgresStore(database)
    a_cluster(store)
    submit(store, a_spec("j"))
    set_shadow(store, scheduler="fcfs")
    async with channel_to(settings(database, shadow_share=1.0)) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        await stub.Schedule(scheduler_pb2.ScheduleRequest(parent=f"clusters/{C}"))
        async with asyncio.timeout(PATIENCE_S):
            while not store.list_shadow_rounds(C, 3600.0):
                await asyncio.sleep(0.1)
    decided = only_round(store)
    assert decided.problem == ""
    assert decided.shadow is not None
    assert (decided.number, decided.shadow.running, decided.shadow.started) == (1, 1, 1)
