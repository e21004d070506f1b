"""Tenants, pins, promises and policies over a real socket against PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.db.store import PostgresStore
from tessera.formulation.records.clusters import NodeSpec
from tessera.v1 import jobs_pb2, scheduler_pb2, tenants_pb2
from tests.support.api import (
    Api,
    C,
    a_batch,
    a_cell,
    a_round,
    a_submit,
    a_tenant,
    api,
    some_cells,
    some_tenants,
)
from tests.support.patience import PATIENCE_S
from tests.support.rpc import WALL_S


def connect_agent(store: PostgresStore) -> None:
    """Connect an agent for both nodes."""
    nodes = [NodeSpec(name=name, gpu_type="a100", gpus=8) for name in ("n1", "n2")]
    store.hello("c", "agent", "first", nodes)


async def list_tenants(a: Api, **page: Any) -> tenants_pb2.ListTenantsResponse:
    return await a.tenants.ListTenants(tenants_pb2.ListTenantsRequest(parent=C, **page))


async def test_tenants_are_stored_replaced_and_deleted(store: PostgresStore) -> None:
    async with api(store) as a:
        nlp = a_tenant(
            "nlp", weight=2.0, borrow_gpus=0, keeps_idle_quota=True, quotas={"a100": 8, "": 4}
        )
        answer = await a.tenants.UpsertTenants(some_tenants(nlp, a_tenant("vision")))
        plain = a_tenant("vision", weight=1.0)
        assert list(answer.tenants) == [nlp, plain]
        assert list((await list_tenants(a)).tenants) == [nlp, plain]
        await a.tenants.UpsertTenants(some_tenants(a_tenant("nlp", weight=0.0)))
        assert list((await list_tenants(a)).tenants) == [a_tenant("nlp", weight=0.0), plain]
        deletion = tenants_pb2.DeleteTenantsRequest(parent=C, names=[nlp.name], request_id="r")
        await a.tenants.DeleteTenants(deletion)
        await a.tenants.DeleteTenants(deletion)  # the same request: answered as before
        assert list((await list_tenants(a)).tenants) == [plain]


async def test_bounds_on_gpus_hold_in_rounds(store: PostgresStore) -> None:
    async with api(store) as a:
        connect_agent(store)
        await a.jobs.SubmitJob(a_submit(requested_gpus=1, min_gpus=1, max_gpus=1))
        done = await a.scheduler.Schedule(a_round(), timeout=PATIENCE_S)
        assert [d.allocation.cell.gpus for d in done.decisions] == [1]


async def test_a_job_with_contradictory_pins_waits_with_a_reason_and_the_round_continues(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        everywhere = [f"{C}/nodes/n1", f"{C}/nodes/n2"]
        stuck = a_submit("stuck", avoid_nodes=everywhere)
        connect_agent(store)
        await a.jobs.SubmitJobs(a_batch(stuck, a_submit("fine")))
        done = await a.scheduler.Schedule(a_round(), timeout=PATIENCE_S)
        kinds = {d.job.rpartition("/")[2]: (d.kind, d.reason.code) for d in done.decisions}
        assert done.outcome == "committed"
        assert kinds == {"stuck": ("wait", "PINS_CONTRADICT"), "fine": ("start", "")}


async def test_a_round_stores_its_policy_and_lists_its_goals_in_order(store: PostgresStore) -> None:
    async with api(store) as a:
        connect_agent(store)
        await a.jobs.SubmitJobs(a_batch(a_submit("a"), a_submit("b")))
        done = await a.scheduler.Schedule(
            a_round(
                objective="max-min then throughput",
                queue_order=True,
                promote_after=Duration(seconds=60),
                max_changes=2,
            ),
            timeout=PATIENCE_S,
        )
        assert (done.outcome, done.verified) == ("committed", True)
        assert [g.name for g in done.goals] == ["max-min", "throughput"]
        stored = await a.scheduler.GetRound(scheduler_pb2.GetRoundRequest(name=done.name))
        assert (stored.goals, stored.options) == (done.goals, done.options)
        assert (stored.options.promote_after.seconds, stored.options.max_changes) == (60, 2)
        again = await a.scheduler.ReplayRound(scheduler_pb2.ReplayRoundRequest(name=done.name))
        assert again.same_decisions


async def test_a_round_keeps_and_replays_the_parameters_of_its_scheduler(
    store: PostgresStore,
) -> None:
    def gpus(done: scheduler_pb2.Round) -> list[int]:
        return [decision.allocation.cell.gpus for decision in done.decisions]

    fixed = {"scheduler": "arena", "scheduler_parameters": "max_upgrades=0,depth=5"}
    async with api(store, policy=str(fixed)) as a:
        await a.estimates.UpsertCells(some_cells(a_cell(2), a_cell(4)))
        connect_agent(store)
        await a.jobs.SubmitJob(a_submit(requested_gpus=1, iterations=10**6))
        done = await a.scheduler.Schedule(a_round(), timeout=PATIENCE_S)
        assert (done.outcome, gpus(done)) == ("committed", [1])
        stored = await a.scheduler.GetRound(scheduler_pb2.GetRoundRequest(name=done.name))
        assert stored.options == done.options
        assert stored.options.scheduler_parameters == "max_upgrades=0,depth=5"
        request = scheduler_pb2.ReplayRoundRequest(name=done.name)
        assert (await a.scheduler.ReplayRound(request)).same_decisions
        request.options.scheduler = "arena"
        default = await a.scheduler.ReplayRound(request)
        assert (default.round.options.scheduler_parameters, gpus(default.round)) == ("", [8])
        other = await a.scheduler.Schedule(a_round(scheduler="fcfs"), timeout=PATIENCE_S)
        assert other.options.scheduler_parameters == ""


@pytest.mark.parametrize("mode", ["myopic", "look-ahead"])
async def test_a_deadline_is_promised_or_refused_with_the_earliest_possible_one(
    store: PostgresStore, mode: str
) -> None:
    far, near = Timestamp(seconds=int(WALL_S) + 10**7), Timestamp(seconds=int(WALL_S) + 1)
    async with api(store) as a:
        never = a_submit("never", iterations=10**9, deadline=near)
        connect_agent(store)
        await a.jobs.SubmitJobs(a_batch(a_submit("easy", deadline=far), never))
        request = a_round(objective="deadline then throughput", deadlines=mode)
        done = await a.scheduler.Schedule(request, timeout=PATIENCE_S)
        assert done.outcome == "committed", done.violations
        decisions = {d.job.rpartition("/")[2]: d for d in done.decisions}
        assert decisions["easy"].admitted
        assert not decisions["never"].admitted
        assert decisions["never"].reason.code == "DEADLINE_UNREACHABLE"
        assert decisions["never"].reason.evidence["earliest_deadline"]
        job = await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{C}/jobs/easy"))
        assert job.deadline_admitted
        assert bool(job.certificate) == (mode == "look-ahead")
        for leg in job.certificate:
            assert leg.start_time.seconds < leg.end_time.seconds <= far.seconds
            assert leg.cell.gpu_type == "a100"


@pytest.mark.parametrize("mode", ["myopic", "look-ahead"])
@pytest.mark.parametrize(
    ("clock_factor", "promised"), [(1.0, {"short"}), (60.0, {"short", "hours"})]
)
async def test_deadlines_are_in_real_time_even_if_training_is_replayed_faster(
    store: PostgresStore, mode: str, clock_factor: float, promised: set[str]
) -> None:
    """By the estimates, training takes 100 s, 2 hours and 40 hours. Each deadline is in 20 minutes."""
    due = Timestamp()
    due.GetCurrentTime()
    due.seconds += 1200
    async with api(store, clock_factor=clock_factor, real_time=True) as a:
        connect_agent(store)
        jobs = {"short": 800, "hours": 57_600, "days": 1_152_000}
        await a.jobs.SubmitJobs(
            a_batch(*[a_submit(k, iterations=n, deadline=due) for k, n in jobs.items()])
        )
        request = a_round(objective="deadline then throughput", deadlines=mode)
        done = await a.scheduler.Schedule(request, timeout=PATIENCE_S)
        decisions = {d.job.rpartition("/")[2]: d for d in done.decisions}
        assert {name for name, d in decisions.items() if d.admitted} == promised
        earliest = Timestamp()
        earliest.FromJsonString(decisions["days"].reason.evidence["earliest_deadline"])
        real_s = earliest.seconds - due.seconds + 1200
        assert 36_000 < real_s * clock_factor < 360_000
        rates = {d.allocation.rate for d in decisions.values() if d.admitted}
        assert rates <= {256.0, 2048.0}  # the rates of the estimates
        again = await a.scheduler.ReplayRound(scheduler_pb2.ReplayRoundRequest(name=done.name))
        assert again.same_decisions
