"""False, replayed and outdated reports of agents, and their effect on the store."""

from __future__ import annotations

import math

import pytest

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.base import forecasts
from tessera.db.schema.engine import Database
from tessera.db.store.reads import job_history
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import NotAllowed, NotFound
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.server.convert.agents import to_observed
from tessera.v1 import agents_pb2 as pb
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    commit,
    job,
    record_heartbeat,
    run,
    start,
    submit,
)

A0, A1 = "a100-0", "a100-1"
AGENT0, AGENT1 = f"agent-{A0}", f"agent-{A1}"
PHASE = pb.ObservedGang.Phase


@pytest.fixture
def pair(store: Store) -> Store:
    """Return a store where a, of 100 iterations, runs on the first node and b on the second."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a", iterations=100), a_spec("b", iterations=100))
    run(store, a=[(A0, [0])], b=[(A1, [0])])
    return store


def report_gang(store: Store, revision: int = 99, **facts: object) -> None:
    """Let the first node's agent report one gang, in a message as a server reads it."""
    fields = {"job": "a", "generation": 1, "node": A0, "phase": PHASE.RUNNING, **facts}
    message = pb.Observed(revision=revision, gangs=[pb.ObservedGang(**fields)])  # type: ignore[arg-type]
    store.update(record_observation, C, AGENT0, "first", to_observed("observed", message), revision)


@pytest.mark.parametrize("lie", [-1.0, -1e300, math.nan, math.inf, -math.inf, 39.0, 0.0])
def test_meaningless_or_decreasing_progress_changes_nothing(pair: Store, lie: float) -> None:
    report_gang(pair, iterations_done=40.0)
    report_gang(pair, iterations_done=lie, iter_time_s=lie)
    record = job(pair, "a")
    assert (record.iterations_done, record.state) == (40.0, JobState.RUNNING)


def test_progress_beyond_the_iterations_is_capped_and_is_no_success(pair: Store) -> None:
    report_gang(pair, iterations_done=1e18)
    record = job(pair, "a")
    assert (record.iterations_done, record.state) == (100.0, JobState.RUNNING)
    snapshot = pair.snapshot(C)
    assert snapshot.jobs.iterations_left[snapshot.jobs.name.index("a")] == 0.0


@pytest.mark.parametrize("done", [-1.0, 0.0, 30.0, 99.0, math.nan])
def test_a_success_that_its_iterations_do_not_prove_is_a_failure(pair: Store, done: float) -> None:
    report_gang(pair, phase=PHASE.SUCCEEDED, iterations_done=done)
    record, count = job(pair, "a"), 0.0 if math.isnan(done) else max(done, 0.0)
    assert (record.state, record.retries) == (JobState.STOPPING, 1)
    assert record.iterations_done == count
    assert record.last_error == (
        f"its agent reports success after {count:.0f} of 100 iterations; if the program decides when"
        f" it is done, submit the job with --until-exit; otherwise upgrade tessera on {A0}"
    )
    assert record.training is not None
    assert record.training.exit_reason is ExitReason.ENDED_EARLY
    agents_report(pair)
    assert job(pair, "a").state is JobState.QUEUED


def test_a_program_that_decides_its_end_succeeds_with_the_count_that_it_reported(
    pair: Store,
) -> None:
    launch = LaunchSpec(until_exit=True)
    names = {"silent": -1.0, "fewer": 30.0, "more": 130.0}
    submit(pair, *(a_spec(name, iterations=100, launch=launch) for name in names))
    for gpu, (name, done) in enumerate(names.items(), 1):
        run(pair, **{name: [(A0, [gpu])]})
        report_gang(pair, job=name, iterations_done=done)
        record = job(pair, name)
        assert (record.state, record.iterations_done) == (JobState.RUNNING, max(done, 0.0))
        snapshot = pair.snapshot(C)
        left = snapshot.jobs.iterations_left[snapshot.jobs.name.index(name)]
        assert left == max(100.0 - max(done, 0.0), 1.0), "it always has an iteration left"
        report_gang(pair, job=name, phase=PHASE.SUCCEEDED, iterations_done=done)
        record = job(pair, name)
        assert (record.state, record.iterations_done) == (JobState.SUCCEEDED, max(done, 0.0))
    shares = [one.trained_share for one in pair.read(forecasts.load_history, C).submissions]
    assert sorted(share for share in shares if not math.isnan(share)) == [0.3, 1.0]


@pytest.mark.parametrize("phase", ["succeeded", "running", "failed"])
def test_a_gang_that_waits_for_its_gpus_has_not_run(pair: Store, phase: str) -> None:
    snapshot = pair.snapshot(C)
    commit(pair, snapshot, start(snapshot, "a", [(A0, [1])], DecisionKind.MOVE))
    before = job(pair, "a")
    assert (before.state, before.generation) == (JobState.STARTING, 2)
    gang = ObservedGang(job="a", generation=2, node=A0, phase=phase, iterations_done=100.0)
    pair.update(record_observation, C, AGENT0, "first", [gang], 99)
    after = job(pair, "a")
    assert (after.state, after.iterations_done, after.retries) == (JobState.STARTING, 0.0, 0)


def test_an_agent_reports_only_gangs_of_its_own_nodes(pair: Store) -> None:
    for node in (A0, A1):
        report_gang(pair, job="b", node=node, phase=PHASE.SUCCEEDED, iterations_done=100.0)
        report_gang(pair, job="b", node=node, phase=PHASE.FAILED, error="forged")
    record = job(pair, "b")
    assert (record.state, record.iterations_done, record.retries) == (JobState.RUNNING, 0.0, 0)
    report_gang(pair, job="nobody", node="nowhere")


@pytest.mark.parametrize("generation", [0, 2, 2**62, -1])
def test_a_report_of_an_older_or_invented_generation_changes_nothing(
    pair: Store, generation: int
) -> None:
    report_gang(pair, generation=generation, phase=PHASE.FAILED, error="old", iterations_done=99.0)
    record = job(pair, "a")
    assert (record.state, record.iterations_done, record.retries) == (JobState.RUNNING, 0.0, 0)


def test_a_replayed_end_is_counted_once(pair: Store, database: Database) -> None:
    for _ in range(3):
        report_gang(pair, phase=PHASE.FAILED, error="boom")
    assert job(pair, "a").retries == 1
    agents_report(pair)
    for _ in range(3):  # of the ended generation, after its last gang is gone
        report_gang(pair, phase=PHASE.FAILED, error="boom")
        report_gang(pair, phase=PHASE.SUCCEEDED)
    assert (job(pair, "a").state, job(pair, "a").retries) == (JobState.QUEUED, 1)
    run(pair, a=[(A0, [1])])
    report_gang(pair, phase=PHASE.FAILED, error="boom")
    report_gang(pair, phase=PHASE.SUCCEEDED)
    assert (job(pair, "a").state, job(pair, "a").retries) == (JobState.RUNNING, 1)
    history = [entry.event for entry in pair.read(job_history, C, "a")]
    assert history.count("crash") == 1


def test_an_unknown_or_replaced_agent_is_refused(pair: Store) -> None:
    gang = ObservedGang(job="a", generation=1, node=A0, phase="succeeded")
    with pytest.raises(NotFound, match="agents/forged"):
        pair.update(record_observation, C, "forged", "first", [gang], 99)
    with pytest.raises(NotFound):
        record_heartbeat(pair, "forged", "first")
    with pytest.raises(NotAllowed, match="another process has taken over"):
        pair.update(record_observation, C, AGENT0, "forged", [gang], 99)
    pair.hello(C, AGENT0, "second", [NodeSpec(name=A0, gpu_type="a100", gpus=4)])
    for call in (
        lambda: pair.update(record_observation, C, AGENT0, "first", [gang], 99),
        lambda: record_heartbeat(pair, AGENT0, "first"),
    ):
        with pytest.raises(NotAllowed, match="another process has taken over as agent"):
            call()
    record_heartbeat(pair, AGENT0, "second")
    assert [g.spec.name for g in pair.read(load_desired_gangs, C, AGENT0).gangs] == ["a"]
    assert job(pair, "a").state is JobState.RUNNING


def test_an_agent_cannot_take_over_a_node_of_another_live_agent(pair: Store) -> None:
    nodes = [NodeSpec(name=name, gpu_type="a100", gpus=4) for name in (A0, A1)]
    with pytest.raises(NotAllowed, match=f"node {A1} belongs to agent {AGENT1}"):
        pair.hello(C, AGENT0, "greedy", nodes)
    record_heartbeat(pair, AGENT0, "first")  # nothing has changed, not even the incarnation
