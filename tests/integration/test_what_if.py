"""Questions: what if, why a job is where it is, and when jobs will start and end."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

from tessera.db.base import forecasts
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.forecasts import FINISH, START, Band, JobForecast
from tessera.formulation.records.spreads import ClusterForecast, ForecastHistory, Spread
from tessera.service.server.rounds.forecaster import (
    Forecaster,
    ForecastOrder,
    forecast_rhythm,
    make_ordered_forecast,
)
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.settings.config import Config
from tessera.service.server.what_if import asking
from tessera.service.server.wiring import run_server
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
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    BERT,
    a_cluster,
    a_planned_start,
    a_spec,
    apply_event,
    commit,
    execute,
    job,
    plan_of,
    run,
    submit,
    wait,
)
from tests.support.stored_cluster import C as LAB

WEAK, ONE = f"{C}/jobs/weak", f"{C}/jobs/one"
Change = what_if_pb2.HypotheticalChange
ADDED = Change(nodes_added=what_if_pb2.AddedNodes(gpu_type="a100", count=1))


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store whose agents do not expire, however slow the machine is."""
    return Store(database, lease_s=3600.0)


@pytest.fixture
def in_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let questions be answered in the server's own process, which is already started."""

    def compute(
        answer: Callable[[Any], Any], order: Any, *_rest: object, **_options: object
    ) -> Any:
        return answer(order)

    monkeypatch.setattr(asking, "run_in_process", compute)


FREE: dict[str, Any] = {
    "objective": "throughput",
    "keep_requests": False,
    "promise_starts": False,
    "change_spacing": 0.0,
}
"""Options without the laws over time, so that the objective alone chooses who runs."""
POLICY = {"policy": json.dumps(FREE)}


@asynccontextmanager
async def a_busy_server(store: Store) -> AsyncIterator[Api]:
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
    store: Store,
) -> None:
    """The answer comes from a process of its own."""
    async with a_busy_server(store) as a:
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
async def test_a_question_writes_to_no_table(store: Store, database: Database) -> None:
    question = a_question(ADDED, Change(job_added=a_new_workload("new")), hours=0.2)
    async with a_busy_server(store) as a:
        before = digest_tables(database)
        (offer,) = (await a.scheduler.WhatIf(question)).offers
        assert offer.cell.gpu_type == "a100", "the new workload is estimated as a submitted one"
        assert digest_tables(database) == before


@pytest.mark.usefixtures("in_server")
async def test_a_supposed_job_gets_what_the_next_round_gives_it_once_it_is_submitted(
    store: Store,
) -> None:
    strong = a_submit("strong", weight=20.0, requested_gpus=8)
    async with a_busy_server(store) as a:
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
    for name, outlook in told.items():
        assert (outlook.kind, outlook.cell) == (real[name].kind, real[name].allocation.cell), name
    unchanged = [one for name, one in real.items() if name not in told]
    assert [one.kind for one in unchanged] == ["keep", "wait"]


@pytest.mark.usefixtures("in_server")
async def test_the_weight_that_explain_names_lets_the_job_start(store: Store) -> None:
    async with a_busy_server(store) as a:
        step = (await a.jobs.ExplainJob(jobs_pb2.ExplainJobRequest(name=WEAK))).steps[0]
        (change,) = step.changes
        assert (change.code, step.claim) == ("WEIGHT", "RUNS")
        supposed = await a.scheduler.WhatIf(a_question(a_job_change(weight=change.amount)))
        job = jobs_pb2.Job(name=WEAK, weight=change.amount)
        await a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=job))
        decided = await a.scheduler.Schedule(a_round())
    assert {d.job: d.kind for d in decided.decisions}[WEAK] == "start"
    effects = {d.job: d.effect for d in supposed.now.jobs}
    assert effects[WEAK] == "starts"
    assert sorted(effects.values()) == ["starts", "stops"]


@pytest.mark.usefixtures("in_server")
async def test_a_lost_node_stops_jobs_and_a_removed_job_makes_room(store: Store) -> None:
    async with a_busy_server(store) as a:
        lost = await a.scheduler.WhatIf(a_question(Change(node_lost=f"{C}/nodes/n1")))
        assert sorted(job.effect for job in lost.now.jobs) == ["stops"]
        removed = await a.scheduler.WhatIf(a_question(Change(job_removed=ONE)))
        assert {job.job: job.effect for job in removed.now.jobs} == {ONE: "removed", WEAK: "starts"}


BAD = {
    "an unknown job": ([a_job_change(f"{C}/jobs/none", weight=2.0)], StatusCode.NOT_FOUND, "jobs"),
    "more nodes than one addition may have, in parts": (
        11 * [Change(nodes_added=what_if_pb2.AddedNodes(gpu_type="a100", count=1000))],
        StatusCode.INVALID_ARGUMENT,
        r"hypothesis.changes: nodes_added.count in all: must lie in 0 to 10,000; it is 11,000",
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
    "nothing": ([], StatusCode.INVALID_ARGUMENT, "changes nothing"),
}


@pytest.mark.usefixtures("in_server")
async def test_what_contradicts_itself_or_does_not_exist_is_refused_by_name(
    store: Store,
) -> None:
    async with a_busy_server(store) as a:
        for case, (changes, code, why) in BAD.items():
            with pytest.raises(Exception, match=why) as caught:
                await a.scheduler.WhatIf(a_question(*changes))
            assert caught.value.code() is code, case  # type: ignore[attr-defined]
        code, reason, _ = await refusal_of(
            a.scheduler.WhatIf(scheduler_pb2.WhatIfRequest(parent=C))
        )
        assert (code, reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")


@pytest.mark.usefixtures("in_server")
async def test_a_quota_of_a_tenant_without_settings_binds_its_guaranteed_jobs(
    store: Store,
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
async def test_long_answers_count_the_jobs_that_they_leave_out(store: Store) -> None:
    async with api_with_agent(store, **POLICY) as a:
        for number in range(5):
            await a.jobs.SubmitJob(a_submit(f"j{number}"))
        question = a_question(Change(node_lost=f"{C}/nodes/n1"), Change(node_lost=f"{C}/nodes/n2"))
        question.max_jobs = 2
        answer = await a.scheduler.WhatIf(question)
    assert [job.effect for job in answer.now.jobs] == ["stops", "stops"]
    assert dict(answer.now.other_jobs) == {"reason": 3}  # they waited for other jobs before


JOB = f"{C}/jobs/weak"


async def submit_three(a: Api) -> None:
    """Submit three jobs of 8 GPUs for two nodes: the third waits."""
    for name, weight in (("one", 5.0), ("two", 5.0), ("weak", 1.0)):
        await a.jobs.SubmitJob(a_submit(name, weight=weight, requested_gpus=8, min_gpus=8))


def a_request(name: str = JOB, **more: object) -> jobs_pb2.ExplainJobRequest:
    return jobs_pb2.ExplainJobRequest(name=name, **more)  # type: ignore[arg-type]


async def test_a_waiting_job_is_explained_and_the_step_works_in_the_next_round(
    store: Store,
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        await a.scheduler.Schedule(a_round(**FREE))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.round, explained.kind) == ("", "wait")
        assert (explained.reason.code, explained.cause) == ("OUTPRICED", "capacity")
        assert explained.complete
        assert explained.rounds_tried > 0
        assert {d.job for d in explained.displaced_by} <= {f"{C}/jobs/one", f"{C}/jobs/two"}
        assert [d.rule for d in explained.displaced_by] == ["VALUE"]
        assert explained.displaced_by[0].value_per_gpu > explained.value_per_gpu
        step = explained.steps[0]
        assert (step.actor, step.claim, step.changes[0].code) == ("user", "RUNS", "WEIGHT")
        assert explained.reason.next_step == step.message
        job = jobs_pb2.Job(name=JOB, weight=step.changes[0].amount)
        await a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=job))
        await a.scheduler.Schedule(a_round(**FREE))
        now = await a.jobs.ExplainJob(a_request(without_steps=True))
        assert (now.round, now.kind, now.reason.code) == (f"{C}/rounds/2", "start", "STARTED")
        spans = [(s.first_round, s.last_round, s.kind, s.cause, s.cell) for s in now.history]
        assert spans == [(2, 2, "start", "", "8 x a100"), (1, 1, "wait", "capacity", "")]


async def test_a_job_that_no_round_has_seen_is_held_or_has_ended_is_explained_as_of_now(
    store: Store,
) -> None:
    async with api_with_agent(store) as a:
        await a.jobs.SubmitJob(a_submit("weak"))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.round, explained.kind, explained.reason.code) == ("", "start", "STARTED")
        assert (await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=JOB))).state == jobs_pb2.QUEUED
        await a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=JOB))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.round, explained.reason.code) == ("", "HELD")
        assert explained.reason.message.startswith("a user has held the job since")
        assert explained.steps[0].changes[0].code == "RELEASE"
        assert explained.steps[0].claim == "RUNS"
        assert not explained.history
        await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=JOB))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.kind, explained.note) == ("", "the job has ended")


async def test_an_earlier_round_is_explained_as_it_was_and_by_the_stored_reason_without_its_snapshot(
    store: Store, database: Database
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        for _ in range(3):
            await a.scheduler.Schedule(a_round(**FREE))
        explained = await a.jobs.ExplainJob(a_request(round=2))
        assert explained.round == f"{C}/rounds/2"
        (span,) = explained.history
        assert (span.first_round, span.last_round, span.code) == (1, 2, "OUTPRICED")
        before = await a.jobs.ExplainJob(a_request(round=1))
        execute(database, "UPDATE rounds SET snapshot = NULL, base = NULL")  # as retention does
        after = await a.jobs.ExplainJob(a_request(round=1))
        assert (after.kind, after.reason.code) == (before.kind, before.reason.code)
        assert not after.steps
        assert not after.complete
        assert "is no longer kept" in after.note


async def test_unknown_jobs_and_rounds_are_refused(store: Store) -> None:
    invalid, missing = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
    async with api_with_agent(store) as a:
        await a.scheduler.Schedule(a_round())  # round 1 is before the job
        await a.jobs.SubmitJob(a_submit("weak"))
        for name, number, code in (
            (f"{C}/jobs/none", 0, missing),
            (JOB, 9, missing),
            (JOB, 1, invalid),
            (JOB, -1, invalid),
            ("weak", 0, invalid),
        ):
            assert (await refusal_of(a.jobs.ExplainJob(a_request(name, round=number))))[0] is code
        for number, code in ((9, missing), (-1, invalid)):
            request = a_request(round=number, recorded_only=True)
            assert (await refusal_of(a.jobs.ExplainJob(request)))[0] is code


async def test_what_is_recorded_is_reported_without_deciding_a_round(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        new = await a.jobs.ExplainJob(a_request(recorded_only=True))
        assert (new.round, new.kind, new.reason.code, len(new.history)) == ("", "", "", 0)
        for _ in range(2):
            await a.scheduler.Schedule(a_round(**FREE))
        monkeypatch.setattr(RoundLoop, "decide", None)  # a call of it would fail
        waits = await a.jobs.ExplainJob(a_request(recorded_only=True))
        stored = await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=JOB))
        assert (waits.round, waits.kind, waits.cause) == (f"{C}/rounds/2", "wait", "capacity")
        assert waits.reason == stored.reason
        assert not waits.steps
        assert not waits.displaced_by
        assert waits.complete
        earlier = await a.jobs.ExplainJob(a_request(recorded_only=True, round=1))
        assert (earlier.round, earlier.reason.code) == (f"{C}/rounds/1", "OUTPRICED")
        runs = await a.jobs.ExplainJob(a_request(f"{C}/jobs/one", recorded_only=True))
        assert (runs.round, runs.kind, runs.reason.code) == (f"{C}/rounds/2", "keep", "")
        await a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=JOB))
        held = await a.jobs.ExplainJob(a_request(recorded_only=True))
        assert (held.round, held.kind, held.reason.code) == ("", "wait", "HELD")


async def test_the_planned_and_promised_start_of_a_job_are_shown_wherever_it_waits(
    store: Store,
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        await a.scheduler.Schedule(a_round(**FREE))
        snapshot = store.snapshot("c")
        start = a_planned_start(start_s=3e9, end_s=math.inf, nodes=(("n2", 8),))
        plan = plan_of(snapshot, {"weak": 4e9}, weak=start)
        commit(store, snapshot, wait(snapshot, "weak"), plan=plan)
        job = await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=JOB))
        assert (job.start_by.seconds, job.planned_start.start_time.seconds) == (
            4 * 10**9,
            3 * 10**9,
        )
        assert job.planned_start.cell.gpus == 8
        waiting = jobs_pb2.ListJobsRequest(parent=C, states=[jobs_pb2.QUEUED])
        (list_entry,) = (await a.jobs.ListJobs(waiting)).jobs
        record = await a.jobs.ExplainJob(a_request(recorded_only=True))
        as_of_now = await a.jobs.ExplainJob(a_request(without_steps=True))
        for starts in (list_entry, record, as_of_now):
            assert starts.start_by == job.start_by
            assert starts.planned_start == job.planned_start
        for is_recorded in (False, True):
            request = a_request(round=1, recorded_only=is_recorded)
            assert not (await a.jobs.ExplainJob(request)).HasField("start_by")
        runs = await a.jobs.ExplainJob(a_request(ONE, recorded_only=True))
        assert not runs.HasField("planned_start")


A0 = "a100-0"
SPREAD = Spread((10.0, 20.0, 40.0))


@pytest.fixture
def busy(store: Store) -> Store:
    """Return a store with a node of four GPUs, on which a runs while b waits for it."""
    a_cluster(store, nodes=1, gpus=4)
    submit(store, a_spec("a", requested_gpus=4), a_spec("b", requested_gpus=4))
    run(store, a=[(A0, range(4))])
    return store


def a_forecast(created_s: float, *names: str) -> ClusterForecast:
    """Return a forecast that says the same of each of ``names``."""
    band = Band(low_s=created_s + 10, median_s=created_s + 20, high_s=math.inf)
    return ClusterForecast(
        created_s=created_s,
        futures=8,
        jobs=tuple(
            JobForecast(job=name, created_s=created_s, coverage=0.8, position=1, start=band)
            for name in names
        ),
        spreads={(event, name): SPREAD for event in (START, FINISH) for name in names},
    )


def test_a_job_has_its_newest_forecast(busy: Store) -> None:
    assert job(busy, "b").forecast is None
    busy.update(forecasts.put_forecast, LAB, a_forecast(1000.0, "a", "b", "unheard"))
    busy.update(forecasts.put_forecast, LAB, a_forecast(3000.0, "b"))
    busy.update(forecasts.put_forecast, LAB, a_forecast(2000.0, "b"))  # of a replica that was late
    assert job(busy, "a").forecast == a_forecast(1000.0, "a").jobs[0]
    assert job(busy, "b").forecast == a_forecast(3000.0, "b").jobs[0]


def test_later_forecasts_learn_the_first_spreads_and_what_became_of_them(
    busy: Store, database: Database
) -> None:
    now_s = busy.snapshot(LAB).now_s
    busy.update(forecasts.put_forecast, LAB, a_forecast(now_s - 100.0, "a", "b"))
    later = ClusterForecast(
        created_s=now_s, futures=8, jobs=(), spreads={(START, "b"): Spread((1.0, 2.0, 3.0))}
    )
    busy.update(forecasts.put_forecast, LAB, later)
    execute(database, "UPDATE job_starts SET given_at = now() - interval '40 s'")
    past = busy.read(forecasts.load_history, LAB).past
    starts = {one.happened: one for one in past[START]}
    assert starts[True].after_s == pytest.approx(60.0, abs=30.0)  # a has started
    assert starts[False].after_s >= 100.0  # b has not, until now
    assert all(one.spread == SPREAD for one in past[START])
    assert [one.happened for one in past[FINISH]] == [False, False]
    apply_event(busy, "b", JobEvent.CANCEL)
    ended = busy.read(forecasts.load_history, LAB).past
    assert sorted(one.happened for one in ended[FINISH]) == [False, True]
    assert sorted(one.happened for one in ended[START]) == [False, True]  # b never starts


def test_submissions_tell_what_ended_jobs_had_trained(busy: Store, database: Database) -> None:
    apply_event(busy, "b", JobEvent.CANCEL)
    execute(database, "UPDATE jobs SET iterations_done = 250 WHERE name = 'b'")
    submit(busy, a_spec("old"))
    execute(database, "UPDATE jobs SET created_at = now() - interval '9 days' WHERE name = 'old'")
    first, second = busy.read(forecasts.load_history, LAB).submissions
    assert math.isnan(first.trained_share)
    assert second.trained_share == 0.25
    assert (first.workload, first.requested_gpus, first.iterations) == (BERT, 4, 1000)


def test_the_forecaster_tells_a_waiting_job_when_it_starts(busy: Store) -> None:
    policies = StandingPolicies(busy)
    forecaster = Forecaster(busy, policies, forecast_rhythm(3.0, 300.0), limit_s=600.0)
    forecaster.refresh(LAB, lambda: False)
    now_s = busy.snapshot(LAB).now_s
    running, waiting = job(busy, "a").forecast, job(busy, "b").forecast
    assert running is not None
    assert waiting is not None
    assert (running.position, waiting.position) == (0, 1)
    assert running.start is None
    assert running.finish is not None
    assert waiting.start is not None
    assert waiting.finish is not None
    assert waiting.finish.median_s >= waiting.start.median_s
    assert waiting.created_s == pytest.approx(now_s, abs=600.0)
    assert waiting.why_not == ""


def test_forecasts_are_in_real_seconds_under_a_clock_factor(busy: Store) -> None:
    made: list[ClusterForecast] = []
    asked_s: list[float] = []

    def make_without_history(
        order: ForecastOrder, _cancelled: Callable[[], bool]
    ) -> ClusterForecast | None:
        """Make a forecast without arrivals, whose gaps are times of the machine's clock."""
        asked_s.append(order.snapshot.now_s)
        forecast = make_ordered_forecast(replace(order, history=ForecastHistory()))
        made.extend([] if forecast is None else [forecast])
        return forecast

    for factor in (1.0, 10.0):
        Forecaster(
            busy,
            StandingPolicies(busy),
            forecast_rhythm(3.0, 300.0),
            limit_s=600.0,
            clock_factor=factor,
            make=make_without_history,
        ).refresh(LAB, lambda: False)
    # The bands themselves are wider by corrections in seconds, which no clock factor divides.
    slow_s, fast_s = (statistics.median(one.spreads[FINISH, "a"].times_s) for one in made)
    trained_s = asked_s[1] - asked_s[0]
    assert slow_s == pytest.approx(10 * (fast_s + trained_s), rel=0.1)


def test_a_forecast_without_time_or_that_is_cancelled_stores_nothing(busy: Store) -> None:
    busy.update(forecasts.put_forecast, LAB, a_forecast(1000.0, "b"))
    policies = StandingPolicies(busy)
    Forecaster(busy, policies, forecast_rhythm(3.0, 300.0), limit_s=0.0).refresh(LAB, lambda: False)
    assert job(busy, "b").forecast == a_forecast(1000.0, "b").jobs[0]
    Forecaster(busy, policies, forecast_rhythm(3.0, 300.0), limit_s=600.0).refresh(
        LAB, lambda: True
    )
    assert job(busy, "b").forecast == a_forecast(1000.0, "b").jobs[0]


async def test_a_server_forecasts_its_jobs_in_the_background(
    busy: Store, database: Database
) -> None:
    config = Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=3600.0,
        forecast_period_s=3600.0,
        estimate_cells=False,
        grace_s=2.0,
        store_threads=4,
        lease_s=3600.0,
    )
    async with run_server(config):
        async with asyncio.timeout(PATIENCE_S):
            while (await asyncio.to_thread(job, busy, "a")).forecast is None:
                await asyncio.sleep(0.1)
    forecast = job(busy, "a").forecast
    assert forecast is not None
    assert forecast.finish is not None
