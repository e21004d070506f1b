"""WhatIf over a socket: answers on stored clusters, of which nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.service.what_if import asking
from tessera.v1 import estimates_pb2, jobs_pb2, scheduler_pb2, what_if_pb2
from tests.support.api import (
    Api,
    C,
    a_round,
    a_submit,
    a_tenant,
    api_with_agent,
    refusal_of,
    some_tenants,
)
from tests.support.database import digest_tables

WEAK, ONE = f"{C}/jobs/weak", f"{C}/jobs/one"
Change = what_if_pb2.HypotheticalChange
ADDED = Change(nodes_added=what_if_pb2.AddedNodes(gpu_type="a100", count=1))


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store whose agents do not expire, however slow the machine is."""
    return PostgresStore(database, lease_s=3600.0)


@pytest.fixture
def in_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let questions be answered in the server's own process, which is already started."""

    def compute(
        answer: Callable[[Any], Any], order: Any, *_rest: object, **_options: object
    ) -> Any:
        return answer(order)

    monkeypatch.setattr(asking, "run_in_process", compute)


POLICY = {"policy": "{objective: throughput}"}


@asynccontextmanager
async def busy(store: PostgresStore) -> AsyncIterator[Api]:
    """Yield the stubs of a server on whose two nodes two jobs run, while a third waits."""
    async with api_with_agent(store, **POLICY) as a:
        for name, weight in (("one", 5.0), ("two", 5.0), ("weak", 1.0)):
            await a.jobs.SubmitJob(a_submit(name, weight=weight, requested_gpus=8, min_gpus=8))
        await a.scheduler.Schedule(a_round())
        yield a


def a_question(
    *changes: Change, hours: float = 0.0, **options: object
) -> scheduler_pb2.WhatIfRequest:
    return scheduler_pb2.WhatIfRequest(
        parent=C,
        hypothesis=scheduler_pb2.Hypothesis(
            changes=changes,
            options=scheduler_pb2.RoundOptions(**options),  # type: ignore[arg-type]
        ),
        horizon=Duration(seconds=int(3600 * hours)),
        futures=9,
    )


def a_job_change(job: str = WEAK, **values: object) -> Change:
    return Change(job_changed=what_if_pb2.JobChange(job=job, **values))  # type: ignore[arg-type]


def a_new_workload(name: str) -> jobs_pb2.SubmitJobRequest:
    """Return a job of a workload that has no estimates, which the server can make."""
    request = a_submit(name, requested_gpus=4, weight=50.0)
    workload = estimates_pb2.Workload(model="moe", params="690M", global_batch=256)
    request.job.workload.CopyFrom(workload)
    return request


async def test_a_node_starts_the_waiting_job_now_and_saves_waiting_over_the_next_hours(
    store: PostgresStore,
) -> None:
    """The answer comes from a process of its own."""
    async with busy(store) as a:
        answer = await a.scheduler.WhatIf(a_question(ADDED, hours=1))
    (job,) = answer.now.jobs
    assert (job.job, job.effect) == (WEAK, "starts")
    assert (job.before.kind, job.after.kind, job.after.cell.gpus) == ("wait", "start", 8)
    assert (answer.now.before.gpus["a100"], answer.now.after.gpus["a100"]) == (16, 24)
    assert answer.now.after.effective_gpus > answer.now.before.effective_gpus
    assert answer.now.unchanged_jobs == 2
    assert answer.hours.futures == 9
    assert answer.hours.mean_wait_seconds.high < 0
    (hours,) = answer.hours.jobs
    assert hours.start_after.earliest.seconds < hours.start_before.earliest.seconds


@pytest.mark.usefixtures("in_server")
async def test_no_question_writes_to_any_table(store: PostgresStore, database: Database) -> None:
    questions = [
        a_question(ADDED, Change(job_added=a_new_workload("new")), hours=0.2),
        scheduler_pb2.WhatIfRequest(parent=C, node_worth=what_if_pb2.NodeWorthQuestion()),
        scheduler_pb2.WhatIfRequest(parent=C, rule_prices=what_if_pb2.RulePriceQuestion()),
        scheduler_pb2.WhatIfRequest(
            parent=C, needed_weight=what_if_pb2.NeededWeightQuestion(job=WEAK)
        ),
    ]
    async with busy(store) as a:
        before = digest_tables(database)
        for question in questions:
            await a.scheduler.WhatIf(question)
        assert digest_tables(database) == before


@pytest.mark.usefixtures("in_server")
async def test_a_supposed_job_gets_what_the_next_round_gives_it_once_it_is_submitted(
    store: PostgresStore,
) -> None:
    strong = a_submit("strong", weight=20.0, requested_gpus=8)
    async with busy(store) as a:
        answer = await a.scheduler.WhatIf(a_question(Change(job_added=strong)))
        await a.jobs.SubmitJob(strong)
        decided = await a.scheduler.Schedule(a_round())
    told = {job.job: job.after for job in answer.now.jobs}
    real = {one.job: one for one in decided.decisions}
    (offer,) = answer.offers
    assert offer.cell == real[offer.job].allocation.cell
    assert [offer.rate] == [told[offer.job].rate]
    assert [len(offer.stopped), offer.other_losers] == [1, 0]
    assert offer.price > 0
    assert offer.runner_up.gpus == 1
    for job, outlook in told.items():
        assert (outlook.kind, outlook.cell) == (real[job].kind, real[job].allocation.cell), job
    unchanged = [one for name, one in real.items() if name not in told]
    assert [one.kind for one in unchanged] == ["keep", "wait"]


@pytest.mark.usefixtures("in_server")
async def test_a_supposed_job_of_a_new_workload_is_estimated_as_a_submitted_one(
    store: PostgresStore,
) -> None:
    async with api_with_agent(store, **POLICY) as a:
        question = a_question(Change(job_added=a_new_workload("new")))
        answer = await a.scheduler.WhatIf(question)
    (offer,) = answer.offers
    assert offer.cell.gpu_type == "a100", offer.reason
    assert offer.rate > 0


@pytest.mark.usefixtures("in_server")
async def test_the_needed_weight_is_shown_by_the_next_round(store: PostgresStore) -> None:
    question = scheduler_pb2.WhatIfRequest(
        parent=C, needed_weight=what_if_pb2.NeededWeightQuestion(job=WEAK)
    )
    async with busy(store) as a:
        needed = (await a.scheduler.WhatIf(question)).needed_weight
        (change,) = needed.step.changes
        assert (needed.weight, change.kind, needed.step.claim) == (1.0, "WEIGHT", "RUNS")
        assert (await a.jobs.ExplainJob(jobs_pb2.ExplainJobRequest(name=WEAK))).steps[0].changes[
            0
        ].amount == change.amount
        supposed = await a.scheduler.WhatIf(a_question(a_job_change(weight=change.amount)))
        job = jobs_pb2.Job(name=WEAK, weight=change.amount)
        await a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=job))
        decided = await a.scheduler.Schedule(a_round())
    assert {d.job: d.kind for d in decided.decisions}[WEAK] == "start"
    effects = {d.job: d.effect for d in supposed.now.jobs}
    assert effects[WEAK] == "starts"
    assert sorted(effects.values()) == ["starts", "stops"]


@pytest.mark.usefixtures("in_server")
async def test_a_node_is_worth_a_start_and_a_quota_or_a_lost_node_stops_jobs(
    store: PostgresStore,
) -> None:
    async with busy(store) as a:
        (worth,) = (
            await a.scheduler.WhatIf(
                scheduler_pb2.WhatIfRequest(
                    parent=C,
                    node_worth=what_if_pb2.NodeWorthQuestion(),
                    horizon=Duration(seconds=600),
                    futures=9,
                )
            )
        ).node_worths
        assert (worth.gpu_type, worth.gpus, worth.starts) == ("a100", 8, 1)
        assert worth.effective_gpus_change > 0
        assert worth.objective_change > 0
        assert worth.price > 0
        assert worth.hours.mean_wait_seconds.high < 0
        lost = await a.scheduler.WhatIf(a_question(Change(node_lost=f"{C}/nodes/n1")))
        assert sorted(job.effect for job in lost.now.jobs) == ["stops"]
        removed = await a.scheduler.WhatIf(a_question(Change(job_removed=ONE)))
        assert {job.job: job.effect for job in removed.now.jobs} == {
            ONE: "removed",
            WEAK: "starts",
        }


@pytest.mark.usefixtures("in_server")
async def test_rules_in_force_have_a_price_and_others_a_reason(store: PostgresStore) -> None:
    policy = "{objective: max-min then throughput, queue_order: true}"
    async with api_with_agent(store, policy=policy) as a:
        for name, queue, weight in (("first", 1, 1.0), ("second", 2, 9.0), ("third", 2, 9.0)):
            await a.jobs.SubmitJob(
                a_submit(name, weight=weight, priority=queue, requested_gpus=8, min_gpus=8)
            )
        question = scheduler_pb2.WhatIfRequest(
            parent=C, rule_prices=what_if_pb2.RulePriceQuestion()
        )
        prices = {p.rule: p for p in (await a.scheduler.WhatIf(question)).rule_prices}
    assert prices["guarantees"].why_free == "no job is guaranteed"
    assert prices["deadlines"].why_free == "no job has a deadline"
    assert not prices["queue-order"].why_free
    assert prices["queue-order"].HasField("objective")
    assert not prices["fairness"].HasField("objective")  # it is the objective itself


BAD = {
    "an unknown job": ([a_job_change(f"{C}/jobs/none", weight=2.0)], StatusCode.NOT_FOUND, "jobs"),
    "an unknown node": ([Change(node_lost=f"{C}/nodes/n9")], StatusCode.NOT_FOUND, "nodes"),
    "an unknown tenant": (
        [Change(tenant_changed=what_if_pb2.TenantChange(tenant=f"{C}/tenants/x", weight=2.0))],
        StatusCode.NOT_FOUND,
        "tenants",
    ),
    "an unknown type": (
        [Change(nodes_added=what_if_pb2.AddedNodes(gpu_type="none", count=1))],
        StatusCode.NOT_FOUND,
        "cluster",
    ),
    "more nodes than one addition may have, in parts": (
        11 * [Change(nodes_added=what_if_pb2.AddedNodes(gpu_type="a100", count=1000))],
        StatusCode.INVALID_ARGUMENT,
        r"hypothesis.changes: nodes_added.count in all: must lie in 0 to 10,000; it is 11,000",
    ),
    "a removed and changed job": (
        [Change(job_removed=WEAK), a_job_change(weight=2.0)],
        StatusCode.INVALID_ARGUMENT,
        r"changes\[1\].job_changed.weight: changes job weak, which hypothesis.changes\[0\] removes",
    ),
    "two weights": (
        [a_job_change(weight=2.0), a_job_change(weight=3.0)],
        StatusCode.INVALID_ARGUMENT,
        r"changes\[1\].*sets the weight of job weak as hypothesis.changes\[0\].*does",
    ),
    "a past deadline": (
        [a_job_change(deadline=Timestamp(seconds=10))],
        StatusCode.INVALID_ARGUMENT,
        "has passed",
    ),
    "two deadlines": (
        [a_job_change(deadline=Timestamp(seconds=4_000_000_000), no_deadline=True)],
        StatusCode.INVALID_ARGUMENT,
        "contradicts",
    ),
    "a bound below the request": (
        [a_job_change(max_gpus=4)],
        StatusCode.INVALID_ARGUMENT,
        "requests 8",
    ),
    "a name that exists": (
        [Change(job_added=a_submit("weak"))],
        StatusCode.ALREADY_EXISTS,
        "exists already",
    ),
    "one name twice": (
        [Change(job_added=a_submit("x")), Change(job_added=a_submit("x"))],
        StatusCode.INVALID_ARGUMENT,
        r"adds job x as hypothesis.changes\[0\] does",
    ),
    "nothing": ([], StatusCode.INVALID_ARGUMENT, "changes nothing"),
}


@pytest.mark.usefixtures("in_server")
async def test_what_contradicts_itself_or_does_not_exist_is_refused_by_name(
    store: PostgresStore,
) -> None:
    async with busy(store) as a:
        for case, (changes, code, why) in BAD.items():
            with pytest.raises(Exception, match=why) as caught:
                await a.scheduler.WhatIf(a_question(*changes))
            assert caught.value.code() is code, case  # type: ignore[attr-defined]
        code, reason, _ = await refusal_of(
            a.scheduler.WhatIf(scheduler_pb2.WhatIfRequest(parent=C))
        )
        assert (code, reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
        await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=WEAK))
        ended = scheduler_pb2.WhatIfRequest(
            parent=C, needed_weight=what_if_pb2.NeededWeightQuestion(job=WEAK)
        )
        code, _, _ = await refusal_of(a.scheduler.WhatIf(ended))
        assert code is StatusCode.FAILED_PRECONDITION


@pytest.mark.usefixtures("in_server")
async def test_a_quota_of_a_tenant_without_settings_binds_its_guaranteed_jobs(
    store: PostgresStore,
) -> None:
    async with api_with_agent(store, **POLICY) as a:
        await a.tenants.UpsertTenants(some_tenants(a_tenant("rich", quotas={"any": 16})))
        for name in ("one", "two"):
            await a.jobs.SubmitJob(
                a_submit(name, tenant="rich", guaranteed=True, requested_gpus=8, min_gpus=8)
            )
        change = what_if_pb2.TenantChange(tenant=f"{C}/tenants/rich", quotas={"any": 8})
        answer = await a.scheduler.WhatIf(a_question(Change(tenant_changed=change)))
    (job,) = answer.now.jobs
    assert (job.effect, job.after.reason.code) == ("stops", "QUOTA_SPENT")


@pytest.mark.usefixtures("in_server")
async def test_long_answers_count_the_jobs_that_they_leave_out(store: PostgresStore) -> None:
    async with api_with_agent(store, **POLICY) as a:
        for number in range(5):
            await a.jobs.SubmitJob(a_submit(f"j{number}"))
        question = a_question(Change(node_lost=f"{C}/nodes/n1"), Change(node_lost=f"{C}/nodes/n2"))
        question.max_jobs = 2
        answer = await a.scheduler.WhatIf(question)
    assert [job.effect for job in answer.now.jobs] == ["stops", "stops"]
    assert dict(answer.now.other_jobs) == {"reason": 3}  # they waited for other jobs before
