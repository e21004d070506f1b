"""Jobs that wait for others, and arrays: what frees them, what rejects them, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import AlreadyExists, InvalidInput
from tessera.formulation.base.limits import MAX_JOBS
from tessera.formulation.job.arrays import ArrayRange
from tessera.formulation.job.dependencies import Condition, Dependency
from tessera.formulation.job.lifecycle import TERMINAL, JobEvent, JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.records.jobs import JobSpec
from tessera.service.cli import main
from tessera.service.cli.simulation import importing
from tessera.service.server.wiring import run_server
from tessera.v1 import jobs_pb2
from tests.support.api import INVALID, Api, a_batch, a_submit, api, refusal_of
from tests.support.api import C as PLACE
from tests.support.database import EmptyDatabases, digest_tables
from tests.support.laws import examples
from tests.support.notices import round_requests
from tests.support.running_server import a_cluster as stored_cluster
from tests.support.running_server import settings
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    fail,
    job,
    run,
    start,
    states,
    submit,
    wait,
)

A0 = "a100-0"


def after(*names: str, **conditions: Condition) -> tuple[Dependency, ...]:
    plain = [Dependency(job=name) for name in names]
    return (*plain, *(Dependency(job=j, condition=c) for j, c in conditions.items()))


def members(name: str, last: int, limit: int = 0, **more: Any) -> list[JobSpec]:
    indices = ArrayRange(first=0, last=last, max_running=limit)
    return [a_spec(m.name, array=m, **more) for m in indices.members(name)]


def finish(store: Store, name: str) -> None:
    """Run a job to its success."""
    run(store, **{name: [(A0, [0])]})
    agents_report(store, phase="succeeded")
    assert job(store, name).state is JobState.SUCCEEDED


def test_a_job_waits_until_the_jobs_that_it_names_have_succeeded(lab: Store) -> None:
    submit(lab, a_spec("c", after=after("a", "b")), a_spec("a"), a_spec("b"))
    finish(lab, "a")
    reason = job(lab, "c").reason
    assert reason is not None
    assert reason.code is ReasonCode.WAITS_FOR_JOBS
    assert {str(job): state for job, state in reason.evidence} == {
        "b": "queued, must have succeeded"
    }
    snapshot = lab.snapshot(C)
    assert dict(zip(snapshot.jobs.name, snapshot.jobs.may_run().tolist(), strict=True)) == {
        "c": False,
        "b": True,
    }
    finish(lab, "b")
    assert lab.snapshot(C).jobs.may_run().tolist() == [True]
    assert [d.met for d in job(lab, "c").dependencies] == [True, True]
    finish(lab, "c")


def test_the_database_refuses_to_start_a_job_before_its_dependencies(lab: Store) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after("a")))
    snapshot = lab.snapshot(C)
    with pytest.raises(Exception, match="ck_jobs_dependencies"):
        commit(lab, snapshot, start(snapshot, "b", [(A0, [0])]))
    assert states(lab)["b"] is JobState.QUEUED


def test_a_job_that_can_never_start_is_rejected_with_those_that_wait_for_it(
    lab: Store,
) -> None:
    submit(
        lab,
        a_spec("a", max_retries=0),
        a_spec("b", after=after("a")),
        a_spec("c", after=after("b")),
        a_spec("cleanup", after=after(b=Condition.FAILED)),
        a_spec("report", after=after(a=Condition.ENDED, c=Condition.ENDED)),
    )
    apply_event(lab, "c", JobEvent.HOLD)
    run(lab, a=[(A0, [0])])
    fail(lab, "a")
    assert states(lab) == {
        "a": JobState.FAILED,
        "b": JobState.REJECTED,
        "c": JobState.REJECTED,
        "cleanup": JobState.QUEUED,
        "report": JobState.QUEUED,
    }
    reason = job(lab, "c").reason
    assert reason is not None
    assert reason.code is ReasonCode.DEPENDENCY_BROKEN
    assert "after b had succeeded" in str(reason.message)
    assert lab.snapshot(C).jobs.may_run().all()


def test_a_met_dependency_asks_for_a_round_and_stays_met_when_its_job_is_deleted(
    lab: Store, database: Database
) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after(a=Condition.ENDED)))
    with round_requests(database) as requests:
        apply_event(lab, "a", JobEvent.CANCEL)
        assert requests.take() == [C]
    execute(database, "DELETE FROM jobs WHERE name = 'a'")
    (dependency,) = job(lab, "b").dependencies
    assert (dependency.job, dependency.met, dependency.state) == ("a", True, "")
    submit(lab, a_spec("a"))  # another job of the name is none of its business
    finish(lab, "b")


def test_a_job_may_wait_for_one_that_has_ended_already(lab: Store) -> None:
    submit(lab, a_spec("a"), a_spec("lost"))
    finish(lab, "a")
    apply_event(lab, "lost", JobEvent.CANCEL)
    submit(lab, a_spec("b", after=after("a", lost=Condition.FAILED)))
    assert lab.snapshot(C).jobs.may_run().all()
    with pytest.raises(InvalidInput, match="has already ended without success"):
        submit(lab, a_spec("c", after=after("lost")))


def test_unknown_jobs_circles_and_jobs_of_other_tenants_are_refused(lab: Store) -> None:
    for specs, says in (
        ([a_spec("b", after=after("nothing"))], "no job or array nothing"),
        ([a_spec("b", after=after("b"))], "b -> b"),
        ([a_spec("x", after=after("y")), a_spec("y", after=after("x"))], "x -> y -> x"),
        (members("swarm", 2, after=after("swarm")), "swarm -> swarm"),
    ):
        with pytest.raises(InvalidInput, match=says):
            submit(lab, *specs)
        assert not states(lab)
    submit(lab, a_spec("theirs", tenant="vision"))
    spec = a_spec("mine", tenant="nlp", after=after("theirs"))
    with pytest.raises(InvalidInput, match="no job or array theirs"):
        lab.change(submit_jobs, C, [spec], ["nlp"])
    lab.change(submit_jobs, C, [spec], ["nlp", "vision"])


def test_a_job_waits_for_all_members_of_an_array(lab: Store, database: Database) -> None:
    submit(lab, *members("swarm", 2), a_spec("all", after=after("swarm")))
    submit(lab, a_spec("any", after=after(swarm=Condition.FAILED)))
    finish(lab, "swarm.0")
    execute(database, "DELETE FROM jobs WHERE name = 'swarm.0'")  # it is counted still
    finish(lab, "swarm.1")
    waits = job(lab, "all").reason
    assert waits is not None
    assert {str(job): state for job, state in waits.evidence} == {
        "swarm": "2 of 3 ended, must have succeeded"
    }
    finish(lab, "swarm.2")
    assert states(lab)["any"] is JobState.REJECTED
    finish(lab, "all")


def test_the_first_lost_member_rejects_who_needs_all_and_the_last_frees_who_needs_one(
    lab: Store,
) -> None:
    submit(lab, *members("swarm", 1), a_spec("all", after=after("swarm")))
    submit(lab, a_spec("handler", after=after(swarm=Condition.FAILED)))
    apply_event(lab, "swarm.0", JobEvent.CANCEL)
    assert states(lab)["all"] is JobState.REJECTED
    assert not lab.snapshot(C).jobs.may_run()[-1]
    finish(lab, "swarm.1")
    assert lab.snapshot(C).jobs.may_run().all()


def test_a_job_and_an_array_of_one_name_are_refused(lab: Store) -> None:
    submit(lab, a_spec("sweep"), *members("swarm", 1))
    for specs in (members("sweep", 1), [a_spec("swarm")], members("swarm", 1)):
        with pytest.raises(AlreadyExists):
            submit(lab, *specs)


NAMES = tuple(f"j{i}" for i in range(6))


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, dict[str, Condition]]:
    """Return the conditions of each job on earlier ones."""
    return {
        name: {
            other: draw(st.sampled_from(Condition))
            for other in draw(st.sets(st.sampled_from(NAMES[:i]), max_size=3))
        }
        for i, name in enumerate(NAMES)
        if i
    }


@given(graphs(), st.integers(0, 2**32))
@examples(25)
def test_no_job_starts_before_its_dependencies_and_every_job_ends(
    empty_databases: EmptyDatabases, graph: dict[str, dict[str, Condition]], seed: int
) -> None:
    with empty_databases.take() as database:
        store = Store(database)
        a_cluster(store, nodes=1)
        follow_graph(store, graph, np.random.default_rng(seed))


def follow_graph(
    store: Store, graph: dict[str, dict[str, Condition]], rng: np.random.Generator
) -> None:
    """Let jobs end in a random order, and check that none could start too early or wait for ever."""
    specs = [a_spec(name, after=after(**graph.get(name, {}))) for name in NAMES]
    submit(store, *(specs[i] for i in rng.permutation(len(specs))))
    ends: dict[str, bool] = {}
    while any(state not in TERMINAL for state in states(store).values()):
        jobs = store.snapshot(C).jobs
        free = [name for name, may in zip(jobs.name, jobs.may_run().tolist(), strict=True) if may]
        assert free, "the jobs that are left wait for each other"
        name = str(rng.choice(free))
        assert all(c.is_met(succeeded=ends[on]) for on, c in graph.get(name, {}).items())
        if rng.random() < 0.5:
            finish(store, name)
        else:
            apply_event(store, name, JobEvent.CANCEL)
        ends |= {n: s is JobState.SUCCEEDED for n, s in states(store).items() if s in TERMINAL}
    for name, conditions in graph.items():
        rejected = states(store)[name] is JobState.REJECTED
        assert rejected == any(not c.is_met(succeeded=ends[on]) for on, c in conditions.items())


def test_a_rejected_decision_rejects_dependents(lab: Store) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after("a")))
    snapshot = lab.snapshot(C)
    commit(lab, snapshot, wait(snapshot, "a", DecisionKind.REJECT))
    assert set(states(lab).values()) == {JobState.REJECTED}


Indices = jobs_pb2.ArrayIndices


@pytest.fixture
async def a(store: Store) -> AsyncIterator[Api]:
    """Return the stubs of a server."""
    async with api(store) as found:
        yield found


def an_array(name: str = "sweep", last: int = 3, **more: Any) -> jobs_pb2.SubmitJobRequest:
    request = a_submit(name)
    request.array.CopyFrom(Indices(last=last, **more))
    return request


def after_jobs(*jobs: str, condition: Any = 0) -> list[jobs_pb2.Dependency]:
    return [jobs_pb2.Dependency(job=f"{PLACE}/jobs/{job}", condition=condition) for job in jobs]


async def change(a: Api, what: Any, name: str = "sweep") -> jobs_pb2.JobArray:
    request = jobs_pb2.ChangeArrayRequest(name=f"{PLACE}/arrays/{name}", change=what)
    return await a.jobs.ChangeArray(request)


async def test_jobs_of_one_call_may_wait_for_each_other(a: Api) -> None:
    request = a_batch(
        a_submit("b", after=after_jobs("a", condition=jobs_pb2.Dependency.ENDED)), a_submit("a")
    )
    b = (await a.jobs.SubmitJobs(request)).jobs[0]
    (dependency,) = b.after
    assert dependency.condition == jobs_pb2.Dependency.ENDED
    assert (dependency.met, dependency.state) == (False, "queued")
    assert (b.reason.code, b.reason.message) == ("WAITS_FOR_JOBS", "the job waits for a (queued)")
    await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=f"{PLACE}/jobs/a"))
    b = await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=b.name))
    assert b.after[0].met
    assert not b.reason.code


async def test_bad_dependencies_are_refused(a: Api) -> None:
    for submitted, field in (
        (a_submit("j", after=after_jobs("j")), "jobs/j.after"),
        (a_submit("j", after=after_jobs("none")), "jobs/j.after[0]"),
        (a_submit("j", after=[jobs_pb2.Dependency(job="clusters/d/jobs/x")]), "job.after[0].job"),
        (a_submit("j", after=[jobs_pb2.Dependency(job="x")]), "job.after[0].job"),
        (a_submit("j", after=after_jobs(*(f"x{i}" for i in range(101)))), "job.after"),
        (a_submit("j", after=after_jobs("x", "x")), "job.after[1].job"),
        (an_array(), "array"),
    ):
        code, _, fields = await refusal_of(a.jobs.SubmitJob(submitted))
        assert (code, fields) == (INVALID, [field])


async def test_an_array_is_submitted_once_and_as_a_whole(a: Api) -> None:
    request = a_batch(an_array(last=6, first=2, step=2, max_running=2), a_submit("all"))
    request.requests[1].job.after.extend(after_jobs("sweep"))
    request.request_id = "once"
    first = await a.jobs.SubmitJobs(request)
    assert await a.jobs.SubmitJobs(request) == first
    names = [job.name.rpartition("/")[2] for job in first.jobs]
    assert names == ["sweep.2", "sweep.4", "sweep.6", "all"]
    member = first.jobs[1].array
    assert (member.array, member.index) == (f"{PLACE}/arrays/sweep", 4)
    assert (member.size, member.max_running) == (3, 2)
    assert first.jobs[3].reason.evidence == {"sweep": "0 of 3 ended, must have succeeded"}
    array = await a.jobs.GetArray(jobs_pb2.GetArrayRequest(name=f"{PLACE}/arrays/sweep"))
    assert dict(array.states) == {JobState.QUEUED.name: 3}


async def test_an_array_is_changed_as_a_whole(a: Api) -> None:
    await a.jobs.SubmitJobs(a_batch(an_array()))
    held = await change(a, jobs_pb2.ChangeArrayRequest.HOLD)
    assert dict(held.states) == {"HELD": 4}
    await a.jobs.ReleaseJob(jobs_pb2.ReleaseJobRequest(name=f"{PLACE}/jobs/sweep.1"))
    ended = await change(a, jobs_pb2.ChangeArrayRequest.CANCEL)
    assert dict(ended.states) == {"CANCELLED": 4}
    assert (await refusal_of(change(a, 0)))[0] is INVALID
    missing = change(a, jobs_pb2.ChangeArrayRequest.HOLD, "none")
    assert (await refusal_of(missing))[0] is StatusCode.NOT_FOUND


async def test_bad_arrays_are_refused_before_they_are_expanded(a: Api) -> None:
    for request, says in (
        (a_batch(an_array(last=MAX_JOBS)), "10,001 members"),
        (a_batch(an_array(last=999_999_999)), "1,000,000,000 members"),
        (a_batch(an_array("x", MAX_JOBS - 1), a_submit("y")), "10,001 jobs"),
        (a_batch(an_array(first=5)), "FIRST <= LAST"),
        (a_batch(an_array(step=-1)), "step"),
        (a_batch(an_array(max_running=-1)), "limit"),
        (a_batch(an_array(95 * "x")), "1 to 100 letters"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await a.jobs.SubmitJobs(request)
    assert not (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=PLACE))).jobs


async def test_a_limited_array_has_no_deadline(a: Api) -> None:
    request = an_array(max_running=1)
    request.job.deadline.FromSeconds(4_000_000_000)
    code, _, fields = await refusal_of(a.jobs.SubmitJobs(a_batch(request)))
    assert (code, fields) == (INVALID, ["requests[0].job.deadline"])
    await a.jobs.SubmitJobs(a_batch(an_array(max_running=1)))
    later = jobs_pb2.Job(name=f"{PLACE}/jobs/sweep.0", deadline=request.job.deadline)
    code, _, fields = await refusal_of(a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=later)))
    assert (code, fields) == (INVALID, ["job.deadline"])


TRACE = """\
job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,after
report,0,m,1B,8,9,1,train:ended
train,1,m,1B,8,9,1,
"""


async def test_the_command_line_submits_folds_and_changes_arrays(
    store: Store, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "JOBS_PER_CALL", 1)
    (tmp_path / "t.csv").write_text(TRACE)
    stored_cluster(store)
    async with run_server(settings(database, estimate_cells=False, period_s=0.0)) as port:

        async def run(*words: str) -> str:
            options = ["--server", f"127.0.0.1:{port}", "--cluster", "c"]
            done = await asyncio.to_thread(CliRunner().invoke, main.app, [*words, *options])
            assert done.exit_code == 0, done.output
            return done.output

        job = ["--model", "m", "--batch", "8", "--iterations", "9", "--gpus", "1"]
        assert "4 jobs submitted" in await run("submit", "sweep", "--array", "0-3%2", *job)
        await run("submit", "all", "--after", "sweep:ended", *job)
        assert "4 QUEUED" in await run("jobs")
        assert "sweep.3" in await run("jobs", "--expand")
        assert "array sweep: 4 HELD" in await run("hold", "sweep")
        assert "array sweep: 4 CANCELLED" in await run("cancel", "sweep")
        assert "sweep must have ended (met)" in " ".join((await run("job", "all")).split())
        trace = ("import", "trace", str(tmp_path / "t.csv"))
        assert "2 jobs valid; nothing changed" in await run(*trace, "--validate-only")
        assert "2 jobs imported" in await run(*trace)
        assert "train: queued, must have ended" in " ".join((await run("job", "report")).split())
        assert "2 jobs already there, left unchanged" in await run(*trace)


UNFIT = """\
job_id,submit_time_s,model,params,global_batch,iterations,num_gpus
a,0,m,1B,8,9,1
b,0,m,1B,8,9,1
c,0,m,1B,8,9,99
"""


async def test_an_import_in_several_calls_leaves_nothing_if_one_of_them_is_refused(
    store: Store, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "JOBS_PER_CALL", 1)
    (tmp_path / "t.csv").write_text(UNFIT)
    stored_cluster(store)
    before = await asyncio.to_thread(digest_tables, database)
    async with run_server(settings(database, estimate_cells=False)) as port:
        words = ("import", "trace", str(tmp_path / "t.csv"), "--cluster", "c")
        where = ("--server", f"127.0.0.1:{port}")
        for options in ((), ("--validate-only",)):
            done = await asyncio.to_thread(CliRunner().invoke, main.app, [*words, *where, *options])
            assert done.exit_code == 1
            assert "requested_gpus" in done.output
            assert "0 of 3 jobs were stored before the failure" in " ".join(done.output.split())
    assert await asyncio.to_thread(digest_tables, database) == before
