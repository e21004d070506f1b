"""Jobs that wait for others, in the store: what frees them, what rejects them, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.arrays import ArrayRange
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.dependencies import Condition, Dependency
from tessera.formulation.errors import AlreadyExists, InvalidInput
from tessera.formulation.lifecycle import TERMINAL, JobEvent, JobState
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.records.jobs import JobSpec
from tests.support.laws import examples
from tests.support.notices import round_requests
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    do,
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


@pytest.fixture
def lab(store: PostgresStore) -> PostgresStore:
    """Return a store with two nodes of four GPUs."""
    a_cluster(store)
    return store


def after(*names: str, **conditions: Condition) -> tuple[Dependency, ...]:
    plain = [Dependency(job=name) for name in names]
    return (*plain, *(Dependency(job=j, condition=c) for j, c in conditions.items()))


def members(name: str, last: int, limit: int = 0, **more: Any) -> list[JobSpec]:
    indices = ArrayRange(first=0, last=last, limit=limit)
    return [a_spec(m.name, array=m, **more) for m in indices.members(name)]


def change_array(store: PostgresStore, name: str, event: JobEvent) -> None:
    do(store, lambda w: w.array_event(C, name, event))


def finish(store: PostgresStore, name: str) -> None:
    """Run a job to its success."""
    run(store, **{name: [(A0, [0])]})
    agents_report(store, phase="succeeded")
    assert job(store, name).state is JobState.SUCCEEDED


def test_a_job_waits_until_the_jobs_that_it_names_have_succeeded(lab: PostgresStore) -> None:
    submit(lab, a_spec("c", after=after("a", "b")), a_spec("a"), a_spec("b"))
    finish(lab, "a")
    reason = job(lab, "c").reason
    assert reason is not None
    assert reason.code is ReasonCode.WAITS_FOR_JOBS
    assert reason.evidence == (("b", "queued, must have succeeded"),)
    snapshot = lab.snapshot(C)
    assert dict(zip(snapshot.jobs.name, snapshot.jobs.may_run().tolist(), strict=True)) == {
        "c": False,
        "b": True,
    }
    finish(lab, "b")
    assert lab.snapshot(C).jobs.may_run().tolist() == [True]
    assert [d.met for d in job(lab, "c").dependencies] == [True, True]
    finish(lab, "c")


def test_the_database_refuses_to_start_a_job_before_its_dependencies(lab: PostgresStore) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after("a")))
    snapshot = lab.snapshot(C)
    with pytest.raises(Exception, match="ck_jobs_dependencies"):
        commit(lab, snapshot, start(snapshot, "b", [(A0, [0])]))
    assert states(lab)["b"] is JobState.QUEUED


def test_a_job_that_can_never_start_is_rejected_with_those_that_wait_for_it(
    lab: PostgresStore,
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
    assert "after b had succeeded" in reason.message
    assert lab.snapshot(C).jobs.may_run().all()


def test_a_job_for_failures_is_rejected_after_a_success(lab: PostgresStore) -> None:
    submit(
        lab,
        a_spec("a"),
        a_spec("handler", after=after(a=Condition.FAILED)),
        a_spec("next", after=after("handler")),
    )
    finish(lab, "a")
    assert set(states(lab).values()) == {JobState.SUCCEEDED, JobState.REJECTED}


def test_the_end_of_a_dependency_asks_for_a_round(lab: PostgresStore, database: Database) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after(a=Condition.ENDED)))
    with round_requests(database) as requests:
        apply_event(lab, "a", JobEvent.CANCEL)
        assert requests.take() == [C]


def test_a_met_dependency_stays_met_when_its_job_is_deleted(
    lab: PostgresStore, database: Database
) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after(a=Condition.ENDED)))
    apply_event(lab, "a", JobEvent.CANCEL)
    execute(database, "DELETE FROM jobs WHERE name = 'a'")
    (dependency,) = job(lab, "b").dependencies
    assert (dependency.job, dependency.met, dependency.state) == ("a", True, "")
    submit(lab, a_spec("a"))  # another job of the name is none of its business
    finish(lab, "b")


def test_a_job_may_wait_for_one_that_has_ended_already(lab: PostgresStore) -> None:
    submit(lab, a_spec("a"), a_spec("lost"))
    finish(lab, "a")
    apply_event(lab, "lost", JobEvent.CANCEL)
    submit(lab, a_spec("b", after=after("a", lost=Condition.FAILED)))
    assert lab.snapshot(C).jobs.may_run().all()
    with pytest.raises(InvalidInput, match="has already ended without success"):
        submit(lab, a_spec("c", after=after("lost")))


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([a_spec("b", after=after("nothing"))], "no job or array nothing"),
        ([a_spec("b", after=after("b"))], "b -> b"),
        ([a_spec("x", after=after("y")), a_spec("y", after=after("x"))], "x -> y -> x"),
        (members("swarm", 2, after=after("swarm")), "swarm -> swarm"),
    ],
)
def test_unknown_jobs_and_circles_are_refused(
    lab: PostgresStore, specs: list[JobSpec], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        submit(lab, *specs)
    assert not states(lab)


def test_jobs_of_other_tenants_count_as_unknown(lab: PostgresStore) -> None:
    submit(lab, a_spec("theirs", tenant="vision"))
    spec = a_spec("mine", tenant="nlp", after=after("theirs"))
    with pytest.raises(InvalidInput, match="no job or array theirs"):
        do(lab, lambda w: w.submit_jobs(C, [spec], ["nlp"]))
    do(lab, lambda w: w.submit_jobs(C, [spec], ["nlp", "vision"]))


def test_a_job_waits_for_all_members_of_an_array(lab: PostgresStore, database: Database) -> None:
    submit(lab, *members("swarm", 2), a_spec("all", after=after("swarm")))
    submit(lab, a_spec("any", after=after(swarm=Condition.FAILED)))
    finish(lab, "swarm.0")
    execute(database, "DELETE FROM jobs WHERE name = 'swarm.0'")  # it is counted still
    finish(lab, "swarm.1")
    waits = job(lab, "all").reason
    assert waits is not None
    assert waits.evidence == (("swarm", "2 of 3 ended, must have succeeded"),)
    finish(lab, "swarm.2")
    assert states(lab)["any"] is JobState.REJECTED
    finish(lab, "all")


def test_the_first_lost_member_rejects_who_needs_all_and_the_last_frees_who_needs_one(
    lab: PostgresStore,
) -> None:
    submit(lab, *members("swarm", 1), a_spec("all", after=after("swarm")))
    submit(lab, a_spec("handler", after=after(swarm=Condition.FAILED)))
    apply_event(lab, "swarm.0", JobEvent.CANCEL)
    assert states(lab)["all"] is JobState.REJECTED
    assert not lab.snapshot(C).jobs.may_run()[-1]
    finish(lab, "swarm.1")
    assert lab.snapshot(C).jobs.may_run().all()


def test_an_array_is_changed_as_a_whole(lab: PostgresStore) -> None:
    submit(lab, *members("swarm", 3, limit=2))
    finish(lab, "swarm.0")
    for event, state in (
        (JobEvent.HOLD, JobState.HELD),
        (JobEvent.RELEASE, JobState.QUEUED),
        (JobEvent.CANCEL, JobState.CANCELLED),
    ):
        change_array(lab, "swarm", event)
        record = lab.get_array(C, "swarm")
        assert record.states == {JobState.SUCCEEDED: 1, state: 3}
    assert (record.size, record.limit, record.live) == (4, 2, 0)


def test_a_job_and_an_array_of_one_name_are_refused(lab: PostgresStore) -> None:
    submit(lab, a_spec("sweep"), *members("swarm", 1))
    for specs in (members("sweep", 1), [a_spec("swarm")], members("swarm", 1)):
        with pytest.raises(AlreadyExists):
            submit(lab, *specs)


def test_the_snapshot_numbers_limited_arrays(lab: PostgresStore) -> None:
    submit(lab, *members("free", 1), *members("two", 2, limit=2), *members("one", 0, limit=1))
    jobs = lab.snapshot(C).jobs
    assert jobs.array.tolist() == [-1, -1, 0, 0, 0, 1]
    assert jobs.array_limit.tolist() == [0, 0, 2, 2, 2, 1]


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
@examples(25, HealthCheck.function_scoped_fixture)
def test_no_job_starts_before_its_dependencies_and_every_job_ends(
    make_database: Callable[[], Any], graph: dict[str, dict[str, Condition]], seed: int
) -> None:
    with make_database() as database:
        store = PostgresStore(database)
        a_cluster(store, nodes=1)
        follow_graph(store, graph, np.random.default_rng(seed))


def follow_graph(
    store: PostgresStore, graph: dict[str, dict[str, Condition]], rng: np.random.Generator
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


def test_a_rejected_decision_rejects_dependents(lab: PostgresStore) -> None:
    submit(lab, a_spec("a"), a_spec("b", after=after("a")))
    snapshot = lab.snapshot(C)
    commit(lab, snapshot, wait(snapshot, "a", DecisionKind.REJECT))
    assert set(states(lab).values()) == {JobState.REJECTED}
