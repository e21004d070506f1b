"""Failures with reasons: plans out of memory, programs that are refused, and nodes that start nothing."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest

from tessera.db.agents.observe import record_observation
from tessera.db.clusters.deletion import delete_cells, delete_nodes
from tessera.db.clusters.drains import drain_nodes
from tessera.db.clusters.failed_starts import DRAINED_BY, MAX_FAILED_STARTS
from tessera.db.estimates.derived_estimates import ESTIMATING_CHANNEL, put_derived_estimates
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.notify import Listener
from tessera.db.store.reads import get_node, job_history, list_estimates
from tessera.db.store.store import Store
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, ZeroStage
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import CellFilter, EstimateRecord
from tessera.formulation.records.jobs import RestartTimes
from tessera.formulation.state.cells import build_cells
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.v1 import launch_pb2
from tests.support.decided_rounds import schedule
from tests.support.execution_plans import a_plan
from tests.support.logged import logged_lines
from tests.support.notices import round_requests
from tests.support.patience import PATIENCE_S
from tests.support.reports import OUT_OF_MEMORY, PHASE, a_member, report_members, report_training
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    agents_report,
    commit,
    execute,
    job,
    run,
    start,
    submit,
)

A0, A1 = "a100-0", "a100-1"
MOE = Workload(model="moe", params="1.3B", global_batch=256)
FAST = a_plan(MOE, 2)
SLOW = a_plan(MOE, 2, zero=ZeroStage.OPTIMIZER)
FULL = "[Errno 28] No space left on device"


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store whose agents do not expire, however slow the machine is."""
    return Store(database, lease_s=3600.0)


def an_estimate(plan: ExecutionPlan, iter_time_s: float, nodes: int = 1) -> EstimateRecord:
    return a_record(
        plan.gpus,
        workload=MOE,
        nodes=nodes,
        iter_time_s=iter_time_s,
        source=EstimateSource.ANALYTIC,
    ).with_plan(plan)


@pytest.fixture
def two_plans(store: Store) -> Store:
    """Return a store where job a may run by a fast plan and by a slow one, on two GPUs of a node."""
    a_cluster(store)
    rows = [an_estimate(FAST, 1.0), an_estimate(SLOW, 2.0)]
    store.change(upsert_estimates, C, rows)
    submit(store, a_spec("a", workload=MOE, requested_gpus=2))
    return store


def decide(store: Store) -> None:
    """Decide a round by the default policy, and let agents start its jobs."""
    schedule(store)
    agents_report(store)


def plan_of(store: Store, name: str) -> ExecutionPlan | None:
    allocation = job(store, name).allocation
    return None if allocation is None else allocation.plan


def end_back_off(database: Database) -> None:
    execute(database, "UPDATE jobs SET retry_at = now() - interval '1 s' WHERE retry_at > now()")


def report_failure(
    store: Store,
    name: str,
    reason: launch_pb2.ExitReason.ValueType = OUT_OF_MEMORY,
    **facts: object,
) -> None:
    """Let the first member of a job's gang fail, and all agents report that the gang is gone."""
    record = job(store, name)
    assert record.allocation is not None
    node, _ = record.allocation.shares[0]
    failed: dict[str, Any] = {"phase": PHASE.FAILED, "exit_reason": reason} | facts
    report_training(store, name, node, record.generation, **failed)
    agents_report(store)


def estimates_of(store: Store, workload: Workload = MOE) -> dict[str, tuple[float, EstimateSource]]:
    rows, _ = store.read(list_estimates, C, workload, 0, 1000)
    return {e.cell.plan: (e.iter_time_s, e.source) for e in rows}


INFEASIBLE = (math.inf, EstimateSource.MEASURED)


def feasible_plans(store: Store) -> set[str]:
    """Return the plans by which a round could start jobs."""
    snapshot = store.snapshot(C)
    return {snapshot.plans[plan] for plan in build_cells(snapshot).plan.tolist()}


def test_a_plan_that_runs_out_of_memory_is_infeasible_and_others_of_its_cell_stay(
    two_plans: Store, database: Database
) -> None:
    decide(two_plans)
    assert plan_of(two_plans, "a") == FAST
    report_failure(two_plans, "a", error="CUDA out of memory")
    analytic = (2.0, EstimateSource.ANALYTIC)
    assert estimates_of(two_plans) == {FAST.digest: INFEASIBLE, SLOW.digest: analytic}
    assert feasible_plans(two_plans) == {SLOW.digest}
    submit(two_plans, a_spec("b", workload=MOE, requested_gpus=2))
    end_back_off(database)
    decide(two_plans)
    assert [plan_of(two_plans, name) for name in "ab"] == [SLOW, SLOW]
    rows, _ = two_plans.read(list_estimates, C, MOE, 0, 10)
    (excluded,) = (e for e in rows if e.cell.plan == FAST.digest)
    assert (excluded.sd, excluded.plan, excluded.cell.nodes) == (None, FAST, 1)
    assert excluded.provenance == f"ran out of memory on {A0}: start 1 of job a"


def test_later_derivations_and_measurements_do_not_bring_the_plan_back(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    store.change(put_derived_estimates, C, [an_estimate(FAST, 1.0)], {MOE: "x"})
    submit(store, a_spec("a", workload=MOE, requested_gpus=2))
    run(store, a=[(A0, [0, 1])])
    for done in range(1, 8):  # it was measured before it ran out of memory
        report_training(store, "a", A0, iterations_done=float(done), iter_time_s=1.5)
    report_failure(store, "a")
    (measured,) = store.estimation(C).measurements
    again = [an_estimate(FAST, 1.0)]
    own = [a_record(2, workload=MOE, nodes=1, iter_time_s=1.5).with_plan(FAST)]
    for rows in (again, own, again):
        store.change(put_derived_estimates, C, rows, {MOE: "y"})
        assert estimates_of(store) == {FAST.digest: INFEASIBLE}
    assert (measured.cell.plan, measured.iter_time_s) == (FAST.digest, 1.5)
    # An estimate of the excluded plan does not replace that of the plan in its place.
    store.change(put_derived_estimates, C, [an_estimate(SLOW, 2.0)], {MOE: "z"})
    store.change(put_derived_estimates, C, again, {MOE: "z"})
    assert estimates_of(store).keys() == {FAST.digest, SLOW.digest}


def test_users_may_state_a_plan_again_that_ran_out_of_memory(two_plans: Store) -> None:
    decide(two_plans)
    report_failure(two_plans, "a")
    two_plans.change(upsert_estimates, C, [an_estimate(FAST, 3.0)])
    assert estimates_of(two_plans)[FAST.digest] == (3.0, EstimateSource.ANALYTIC)
    two_plans.change(delete_cells, C, CellFilter(workload=MOE))
    assert estimates_of(two_plans) == {}


def test_a_cell_whose_plan_is_not_recorded_stays_feasible(store: Store) -> None:
    a_cluster(store)
    before = estimates_of(store, a_spec("a").workload)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    report_failure(store, "a")
    assert estimates_of(store, a_spec("a").workload) == before
    record = job(store, "a").training
    assert record is not None
    assert record.exit_reason is ExitReason.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "facts",
    [
        {"runtime": "replay"},
        {"runtime": "unheard-of"},
        {"exit_reason": launch_pb2.EXIT_KILLED},
        {"exit_reason": launch_pb2.EXIT_REASON_UNSPECIFIED, "error": "out of memory"},
        {"phase": PHASE.STOPPING},
        {"phase": PHASE.RUNNING},
        {"generation": 2},
        {"node": A1},
        {"job": "nobody"},
    ],
)
def test_a_plan_stays_feasible_if_no_program_of_the_job_ran_out_of_memory(
    two_plans: Store, facts: dict[str, Any]
) -> None:
    decide(two_plans)
    usual: dict[str, Any] = {"job": "a", "node": A0, "phase": PHASE.FAILED}
    report_members(two_plans, a_member(**usual | {"exit_reason": OUT_OF_MEMORY} | facts))
    assert estimates_of(two_plans)[FAST.digest] == (1.0, EstimateSource.ANALYTIC)


def run_wide(store: Store, *names: str) -> None:
    """Let jobs run by FAST on a GPU of each of both nodes."""
    a_cluster(store)
    store.change(upsert_estimates, C, [an_estimate(FAST, 1.0, nodes=2)])
    submit(store, *(a_spec(name, workload=MOE, requested_gpus=2) for name in names))
    run(store, **{name: [(A0, [i]), (A1, [i])] for i, name in enumerate(names)})


def test_the_member_that_ran_out_of_memory_counts_even_if_others_end_first(
    store: Store,
) -> None:
    run_wide(store, "a")
    killed: dict[str, Any] = {
        "phase": PHASE.FAILED,
        "exit_reason": launch_pb2.EXIT_ERROR,
        "error": "NCCL",
    }
    report_training(store, "a", A0, **killed)
    assert (job(store, "a").state, job(store, "a").allocation) == (JobState.STOPPING, None)
    assert estimates_of(store)[FAST.digest] == (1.0, EstimateSource.ANALYTIC)
    for _ in range(2):
        report_training(store, "a", A1, phase=PHASE.FAILED, exit_reason=OUT_OF_MEMORY)
    assert estimates_of(store) == {FAST.digest: INFEASIBLE}
    record = job(store, "a")
    assert record.training is not None
    assert record.training.exit_reason is ExitReason.OUT_OF_MEMORY
    assert (record.retries, record.last_error) == (1, "NCCL")


def test_jobs_of_one_plan_may_run_out_of_memory_in_one_report(store: Store) -> None:
    run_wide(store, "a", "b")
    facts: dict[str, Any] = {"phase": PHASE.FAILED, "exit_reason": OUT_OF_MEMORY, "error": "oom"}
    report_members(store, *(a_member(name, A0, **facts) for name in "ab"))
    assert estimates_of(store) == {FAST.digest: INFEASIBLE}
    assert [job(store, name).state for name in "ab"] == [JobState.STOPPING] * 2


def test_of_a_gangs_failures_the_cause_is_reported(store: Store) -> None:
    store.change(upsert_cluster, C, [GpuType(name="a100", memory_bytes=2**35)], None)
    store.hello(
        C, f"agent-{A0}", "first", [NodeSpec(name=n, gpu_type="a100", gpus=1) for n in (A0, A1)]
    )
    store.change(upsert_estimates, C, [an_estimate(FAST, 1.0, nodes=2)])
    submit(store, a_spec("a", workload=MOE, requested_gpus=2))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [(A0, [0]), (A1, [0])]))
    failed: dict[str, Any] = {"phase": PHASE.FAILED}
    report_members(
        store,
        a_member("a", A0, exit_reason=launch_pb2.EXIT_KILLED, error="killed", **failed),
        a_member("a", A1, exit_reason=OUT_OF_MEMORY, error="CUDA out of memory", **failed),
    )
    assert job(store, "a").last_error == "CUDA out of memory"
    assert estimates_of(store) == {FAST.digest: INFEASIBLE}


def test_estimators_are_woken_and_search_another_plan(store: Store, database: Database) -> None:
    known = Workload(model="bert", params="1.3B", global_batch=256)
    a_bare_cluster(store)
    submit(store, a_spec("a", workload=known, requested_gpus=2))
    deriver = CellDeriver(store, catalogue_of(), (1.0,))
    deriver.derive(C)
    run(store, a=[(A0, [0, 1])])
    failed = plan_of(store, "a")
    assert failed is not None
    others = {plan for plan in estimates_of(store, known) if plan != failed.digest}
    woken, listener = threading.Event(), Listener(database.url)
    listener.subscribe(lambda cluster: woken.set() if cluster == C else None, ESTIMATING_CHANNEL)
    with listener:
        assert listener.listening.wait(PATIENCE_S)
        report_failure(store, "a")
        assert woken.wait(PATIENCE_S)
    (wanted,) = store.estimation(C).wanted
    (cell,) = wanted.exhausted
    assert (cell.plan, cell.gpus, cell.nodes, cell.pipeline_degree) == (failed.digest, 2, 1, 1)
    assert deriver.derive(C) == 1
    after = estimates_of(store, known)
    assert after.pop(failed.digest) == INFEASIBLE
    assert after.keys() >= others
    (new,) = after.keys() - others
    assert math.isfinite(after[new][0])
    assert deriver.derive(C) == 0
    end_back_off(database)
    decide(store)
    assert plan_of(store, "a") not in (None, failed)


def a_bare_cluster(store: Store) -> None:
    """Create a cluster with two nodes of four GPUs and no estimates."""
    kinds = [GpuType(name="a100", memory_bytes=40 * 2**30)]
    store.change(upsert_cluster, C, kinds, None)
    for node in (A0, A1):
        spec = NodeSpec(name=node, gpu_type="a100", gpus=4)
        store.hello(C, f"agent-{node}", "first", [spec])


def test_a_job_whose_stated_plan_runs_out_of_memory_waits_with_that_reason(
    two_plans: Store, database: Database
) -> None:
    submit(two_plans, a_spec("own", workload=MOE, requested_gpus=2, plan=FAST))
    decide(two_plans)
    report_failure(two_plans, "own")
    end_back_off(database)
    decide(two_plans)
    reason = job(two_plans, "own").reason
    assert reason is not None
    assert reason.code is ReasonCode.PLAN_UNUSABLE
    assert "out of memory" in str(reason.message)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (ExitReason.REFUSED, "no program train.py"),
        (ExitReason.LOSS_NOT_FINITE, "the loss of iteration 4 is nan"),
    ],
)
def test_a_program_whose_end_no_retry_can_change_fails_at_once(
    two_plans: Store, reason: ExitReason, error: str
) -> None:
    decide(two_plans)
    number = launch_pb2.ExitReason.Value(f"EXIT_{reason.name}")
    report_failure(two_plans, "a", number, error=error)
    record = job(two_plans, "a")
    assert record.spec.max_retries > record.retries == 1
    assert (record.state, record.last_error) == (JobState.FAILED, error)
    assert record.training is not None
    assert record.training.exit_reason is reason
    (fail,) = (e for e in two_plans.read(job_history, C, "a") if e.event == "fail")
    assert "so it is not tried again" in str(fail.detail)
    assert estimates_of(two_plans)[FAST.digest] == (1.0, EstimateSource.ANALYTIC)


@pytest.fixture
def pair(store: Store) -> Store:
    """Return a store with two nodes of 8 GPUs."""
    a_cluster(store, nodes=2, gpus=8)
    return store


def begin(store: Store, name: str, node: str = A0, gpu: int = 0) -> None:
    """Submit a job, and give it a GPU."""
    submit(store, a_spec(name))
    give(store, name, node, gpu)


def give(store: Store, name: str, node: str, gpu: int = 0) -> None:
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, name, [(node, [gpu])]))


def report_start(
    store: Store, name: str, node: str = A0, phase: str = "failed", **facts: Any
) -> None:
    """Let the agent of a node report on a job's present generation."""
    facts = (
        {"exit_reason": ExitReason.NODE_UNFIT, "error": FULL} | facts if phase == "failed" else {}
    )
    gang = ObservedGang(
        job=name, generation=job(store, name).generation, node=node, phase=phase, **facts
    )
    store.update(record_observation, C, f"agent-{node}", "first", [gang], 0)


def fail(store: Store, name: str, node: str = A0, gpu: int = 0, **facts: Any) -> None:
    begin(store, name, node, gpu)
    report_start(store, name, node, **facts)
    agents_report(store)


def avoided(store: Store, name: str) -> set[str]:
    snapshot = store.snapshot(C)
    at = snapshot.jobs.name.index(name)
    return {
        snapshot.nodes.name[n]
        for n in snapshot.avoided_nodes.node[snapshot.avoided_nodes.job == at]
    }


@pytest.mark.parametrize(
    ("reason", "retries"), [(ExitReason.NODE_UNFIT, 0), (ExitReason.NOT_STARTED, 1)]
)
def test_what_a_node_cannot_start_avoids_the_node_unless_no_other_can(
    pair: Store, reason: ExitReason, retries: int
) -> None:
    fail(pair, "a", exit_reason=reason)
    record = job(pair, "a")
    assert (record.state, record.retries) == (JobState.QUEUED, retries)
    assert avoided(pair, "a") == {A0}
    give(pair, "a", A1)
    assert avoided(pair, "a") == set()  # it is not moved for that
    report_start(pair, "a", A1, exit_reason=ExitReason.NOT_STARTED)
    agents_report(pair)
    assert avoided(pair, "a") == set()  # no node can start it
    pair.change(drain_nodes, C, [A1], draining=True)
    fail(pair, "b", gpu=1)
    assert avoided(pair, "b") == set()  # no other node has room


def test_a_node_is_drained_after_three_starts_in_a_row_that_failed_because_of_it(
    pair: Store, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(MAX_FAILED_STARTS - 1):
        fail(pair, f"a{place}", gpu=place)
    assert not pair.read(get_node, C, A0).draining
    with round_requests(database) as requests, caplog.at_level(logging.WARNING):
        fail(pair, "last", gpu=7)
        assert C in requests.take()
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drained_by) == (True, DRAINED_BY)
    assert node.drain_reason == (
        f"3 starts in a row failed because of this node, the last one with: {FULL}; mend it, then"
        " restart its agent or undrain it"
    )
    (line,) = logged_lines(caplog, "node_unfit")
    assert f'node=a100-0 reason="{node.drain_reason}"' in line
    assert not pair.read(get_node, C, A1).draining


def test_failed_starts_of_the_same_report_count_each(pair: Store) -> None:
    for place in range(MAX_FAILED_STARTS):
        begin(pair, f"a{place}", gpu=place)
    facts: dict[str, Any] = {"generation": 1, "node": A0, "phase": "failed"}
    facts |= {"exit_reason": ExitReason.NODE_UNFIT, "error": 9 * FULL}
    gangs = [ObservedGang(job=f"a{place}", **facts) for place in range(MAX_FAILED_STARTS)]
    for _ in range(2):
        pair.update(record_observation, C, f"agent-{A0}", "first", gangs, 0)
        assert pair.read(get_node, C, A0).drain_reason.startswith("3 starts")


def test_a_program_that_fails_everywhere_drains_no_node(pair: Store) -> None:
    for place in range(2 * MAX_FAILED_STARTS):
        node = (A0, A1)[place % 2]
        fail(pair, f"a{place}", node, place, exit_reason=ExitReason.NOT_STARTED, error="no program")
        fail(pair, f"b{place}", node, place, exit_reason=ExitReason.ERROR, error="crashed")
    assert not any(pair.read(get_node, C, node).draining for node in (A0, A1))


def test_a_start_that_succeeds_begins_the_count_again(pair: Store) -> None:
    for place in range(MAX_FAILED_STARTS - 1):
        fail(pair, f"a{place}", gpu=place)
    begin(pair, "good", gpu=6)
    report_start(pair, "good", phase="running")
    fail(pair, "last", gpu=7)
    assert not pair.read(get_node, C, A0).draining


def test_a_fault_of_a_node_uses_no_retry_and_counts_once_for_each_job(
    pair: Store,
) -> None:
    submit(pair, a_spec("a", max_retries=0))
    for _ in range(2 * MAX_FAILED_STARTS):
        give(pair, "a", A0)
        report_start(pair, "a", A0)
        agents_report(pair)
    record = job(pair, "a")
    assert (record.state, record.retries, record.last_error) == (JobState.QUEUED, 0, FULL)
    assert not pair.read(get_node, C, A0).draining  # it may be the job
    fail(pair, "b", gpu=1)
    fail(pair, "c", gpu=2)
    assert pair.read(get_node, C, A0).draining


TRAINS: dict[str, Any] = {"command": ("train.py",), "max_retries": 9}


def fail_early(store: Store, name: str, node: str = A0, gpu: int = 0) -> None:
    """Let the program of a job exit with an error before its first iteration."""
    give(store, name, node, gpu)
    agents_report(store)  # it runs
    report_start(store, name, node, exit_reason=ExitReason.ERROR, error="CUDA error: no device")
    agents_report(store)


def train(store: Store, name: str, node: str, gpu: int = 0) -> None:
    """Let the program of a job train on a node."""
    give(store, name, node, gpu)
    times = RestartTimes(launch_s=1.0, first_iteration_s=1.0)
    agents_report(store, iterations_done=5.0, iter_time_s=1.0, restart_times=times)
    assert job(store, name).state is JobState.RUNNING


def test_programs_that_fail_on_one_node_and_train_on_another_count_against_it(
    pair: Store, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"a{k}" for k in range(MAX_FAILED_STARTS)]
    submit(pair, *(a_spec(name, **TRAINS) for name in names))
    for gpu, name in enumerate(names):
        fail_early(pair, name, gpu=gpu)
        assert avoided(pair, name) == {A0}
    assert not pair.read(get_node, C, A0).draining  # these programs may fail everywhere
    for gpu, name in enumerate(names):
        assert not pair.read(get_node, C, A0).draining
        train(pair, name, A1, gpu)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drained_by) == (True, DRAINED_BY)
    assert (
        "a program that failed before it trained, and trains on another node" in node.drain_reason
    )
    assert logged_lines(caplog, "node_unfit")
    assert not pair.read(get_node, C, A1).draining
    assert [job(pair, name).retries for name in names] == [1] * len(names)


def test_programs_that_fail_on_each_node_count_against_none(pair: Store) -> None:
    names = [f"a{k}" for k in range(2 * MAX_FAILED_STARTS)]
    submit(pair, *(a_spec(name, **TRAINS) for name in names))
    for node in (A0, A1):
        for name in names:
            fail_early(pair, name, node)
    assert not any(pair.read(get_node, C, node).draining for node in (A0, A1))


def test_a_failure_after_training_counts_against_no_node(pair: Store) -> None:
    submit(pair, a_spec("a", **TRAINS))
    train(pair, "a", A0)
    report_start(pair, "a", A0, exit_reason=ExitReason.ERROR, error="boom")
    agents_report(pair)
    assert job(pair, "a").state is JobState.QUEUED
    assert avoided(pair, "a") == set()


def test_a_start_that_succeeds_ends_the_drain(pair: Store) -> None:
    for place in range(MAX_FAILED_STARTS - 1):
        fail(pair, f"a{place}", gpu=place)
    begin(pair, "last", gpu=6)
    begin(pair, "good", gpu=7)
    report_start(pair, "last")
    assert pair.read(get_node, C, A0).draining
    report_start(pair, "good", phase="running")
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drain_reason, node.drained_by) == (False, "", "")
    pair.hello(C, f"agent-{A0}", "second", [node.spec])
    assert avoided(pair, "a0") == set()  # the agent was restarted, so the job may try again


def drain_by_failed_starts(store: Store) -> None:
    for place in range(MAX_FAILED_STARTS):
        fail(store, f"a{place}", gpu=place)
    assert store.read(get_node, C, A0).draining


def test_a_restart_of_the_agent_ends_the_drain_but_a_new_connection_does_not(
    pair: Store,
) -> None:
    drain_by_failed_starts(pair)
    spec = pair.read(get_node, C, A0).spec
    pair.hello(C, f"agent-{A0}", "first", [spec])
    assert pair.read(get_node, C, A0).draining
    pair.hello(C, f"agent-{A0}", "second", [spec])
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drain_reason, node.drained_by) == (False, "", "")
    assert node.drained_s is None


def test_an_operator_has_the_last_word(pair: Store) -> None:
    drain_by_failed_starts(pair)
    spec = pair.read(get_node, C, A0).spec
    pair.change(drain_nodes, C, [A0], draining=True, drained_by="ana")
    pair.hello(C, f"agent-{A0}", "second", [spec])
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drained_by) == (True, "ana")
    pair.change(drain_nodes, C, [A0], draining=False)
    pair.hello(C, f"agent-{A0}", "first", [spec])
    fail(pair, "next")
    assert not pair.read(get_node, C, A0).draining  # the count has begun again


def test_a_node_that_could_not_start_a_job_can_be_deleted(pair: Store, database: Database) -> None:
    fail(pair, "a")
    execute(
        database, "UPDATE agents SET heard_at = now() - interval '1 h' WHERE name = 'agent-a100-0'"
    )
    pair.change(delete_nodes, C, [A0], {}, allow_missing=False)
    assert avoided(pair, "a") == set()
