"""Stored data for estimates: uncertainty, models, derived Cells and measurements."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from tessera.db.base import limits
from tessera.db.estimates.derived_estimates import (
    ESTIMATING_CHANNEL,
    put_derived_estimates,
    record_wait_reasons,
    upsert_models,
)
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster, upsert_nodes
from tessera.db.store.notify import Listener
from tessera.db.store.store import Connection, Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import InvalidInput, LimitReached
from tessera.formulation.base.values import ESTIMATE_SOURCES, EstimateSource, GpuType, Workload
from tessera.formulation.job.execution_plan import ZeroStage
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord, ModelSpec, UnestimatedWorkload
from tests.support.execution_plans import a_plan, with_own_plan
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    BERT,
    C,
    a_cluster,
    a_record,
    a_spec,
    agents_report,
    apply_event,
    cells_of,
    commit,
    execute,
    job,
    run,
    start,
    submit,
    wait,
)
from tests.support.training import TRAINER


def test_uncertainty_is_kept_with_an_estimate(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j"))
    store.change(upsert_estimates, C, [a_record(1, sd=0.25), a_record(2)])
    assert [e.sd for e in cells_of(store, BERT)] == [0.25, None, None, None]
    loaded = store.snapshot(C).estimates.sd
    assert np.array_equal(loaded, [0.25, math.nan, math.nan, math.nan], equal_nan=True)


OTHER = Workload(model="moe", params="1.3B", global_batch=256)


WAITS = Reason(
    code=ReasonCode.NO_ESTIMATE,
    message="the model is unknown",
    next_step="describe it",
    evidence=(("workload", "w"),),
)


def write_derived(store: Store, *records: EstimateRecord, moe: str = "") -> None:
    """Let the service write estimates. With ``moe="x"``, those of OTHER were computed from x."""
    store.change(put_derived_estimates, C, records, {OTHER: moe} if moe else {})


def an_analytic_record(gpus: int, **overrides: Any) -> EstimateRecord:
    fields: dict[str, Any] = {
        "workload": OTHER,
        "nodes": 1,
        "source": EstimateSource.ANALYTIC,
        "sd": 0.4,
        "iter_time_s": 5.0,
    }
    return a_record(gpus, **fields | overrides)


def times_of(store: Store, workload: Workload) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Return (time, source, uncertainty) of estimates by GPUs and pipeline degree."""
    return {
        (e.cell.gpus, e.cell.pipeline_degree): (e.iter_time_s, e.source, e.sd)
        for e in cells_of(store, workload)
    }


def test_workloads_of_live_jobs_need_estimates_or_only_plans_for_those_of_users(
    store: Store,
) -> None:
    a_cluster(store)
    submit(
        store,
        a_spec("known"),
        a_spec("one", workload=OTHER, requested_gpus=4),
        a_spec("two", workload=OTHER, requested_gpus=2),
        a_spec("over", workload=replace(OTHER, params="x")),
    )
    apply_event(store, "over", JobEvent.CANCEL)
    known_workload, wanted = store.estimation(C).wanted
    assert wanted == UnestimatedWorkload(
        workload=OTHER, requests=(2, 4), counts=(), derived_from=""
    )
    # The user's estimates are only to get plans.
    assert known_workload.plans_only
    assert {cell.plan for cell in known_workload.without_plan} == {""}
    write_derived(store, an_analytic_record(8), moe="digest")
    _, wanted = store.estimation(C).wanted
    assert (wanted.counts, wanted.derived_from) == ((8,), "digest")


def test_the_clusters_types_are_loaded_with_their_nodes(store: Store) -> None:
    a_cluster(store, nodes=3, gpus=4, types=("v100", "a100"))
    store.change(upsert_nodes, C, [NodeSpec(name="n", gpu_type="a100", gpus=8)])
    kinds = store.estimation(C).kinds
    assert [(k.gpu_type.name, k.node_gpus, k.gpus) for k in kinds] == [
        ("v100", 4, 12),
        ("a100", 8, 20),
    ]


def test_derived_estimates_replace_derived_ones_of_a_lower_rank_and_none_of_users(
    store: Store,
) -> None:
    a_cluster(store)
    users = an_analytic_record(1, iter_time_s=1.0, sd=None)
    store.change(upsert_estimates, C, [users])
    write_derived(
        store,
        an_analytic_record(1),
        an_analytic_record(1, pipeline_degree=2),
        an_analytic_record(2),
    )
    assert times_of(store, OTHER) == {
        (1, 1): (1.0, EstimateSource.ANALYTIC, None),
        (2, 1): (5.0, EstimateSource.ANALYTIC, 0.4),
    }
    write_derived(store, an_analytic_record(2, iter_time_s=6.0, sd=0.3))
    assert times_of(store, OTHER)[2, 1] == (6.0, EstimateSource.ANALYTIC, 0.3)
    measured = an_analytic_record(2, source=EstimateSource.MEASURED, iter_time_s=7.0, sd=0.06)
    write_derived(store, measured)
    write_derived(store, an_analytic_record(2), an_analytic_record(4, iter_time_s=4.0))
    assert times_of(store, OTHER) == {
        (1, 1): (1.0, EstimateSource.ANALYTIC, None),
        (2, 1): (7.0, EstimateSource.MEASURED, 0.06),
        (4, 1): (4.0, EstimateSource.ANALYTIC, 0.4),
    }


def test_no_measurement_changes_a_user_estimate(store: Store) -> None:
    a_cluster(store)
    for source in ESTIMATE_SOURCES:
        users = an_analytic_record(1, iter_time_s=1.0, source=source)
        store.change(upsert_estimates, C, [users])
        write_derived(store, an_analytic_record(1, source=EstimateSource.MEASURED))
        assert times_of(store, OTHER) == {(1, 1): (1.0, source, 0.4)}


def test_user_estimates_replace_derived_ones_on_the_same_gpus(store: Store) -> None:
    a_cluster(store)
    write_derived(
        store, *(an_analytic_record(n, pipeline_degree=d) for n in (2, 4) for d in (1, 2)), moe="x"
    )
    profiled = with_own_plan(
        an_analytic_record(2, source=EstimateSource.PROFILED, iter_time_s=3.0, sd=None)
    )
    store.change(upsert_estimates, C, [profiled])
    assert times_of(store, OTHER) == {
        (2, 1): (3.0, EstimateSource.PROFILED, None),
        (4, 1): (5.0, EstimateSource.ANALYTIC, 0.4),
        (4, 2): (5.0, EstimateSource.ANALYTIC, 0.4),
    }


def test_a_cell_that_a_job_runs_on_is_kept(store: Store) -> None:
    a_cluster(store)
    write_derived(store, an_analytic_record(1), an_analytic_record(1, pipeline_degree=2), moe="x")
    submit(store, a_spec("j", workload=OTHER))
    run(store, j=[("a100-0", [0])])
    own = with_own_plan(an_analytic_record(1, sd=None))
    store.change(upsert_estimates, C, [own])
    plans = sorted((e.cell.plan, e.cell.pipeline_degree) for e in cells_of(store, OTHER))
    assert plans == [("", 1), (own.cell.plan, 1)]


def test_a_plan_is_stored_once_and_read_as_it_was_written(store: Store, database: Database) -> None:
    a_cluster(store)
    own = [with_own_plan(a_record(4, workload=OTHER, nodes=n)) for n in (1, 2)]
    store.change(upsert_estimates, C, own)
    store.change(upsert_estimates, C, [replace(own[0], plan=None)])  # by its digest alone
    assert [e.plan for e in cells_of(store, OTHER)] == [own[0].plan] * 2
    with database.read() as connection:
        rows = connection.execute(sa.text("SELECT name, document FROM plans")).all()
    plan = own[0].plan
    assert plan is not None
    assert [(r.name, r.document) for r in rows if r.name] == [(plan.digest, plan.to_json())]


def test_plans_under_another_digest_or_known_by_name_alone_are_refused(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    store.change(upsert_estimates, C, [with_own_plan(a_record(4, workload=OTHER))])
    with (
        pytest.raises(sa.exc.IntegrityError, match="ck_plans_digest"),
        database.engine.begin() as c,
    ):
        c.execute(sa.text("UPDATE plans SET document = document || ' ' WHERE name <> ''"))
    named = replace(with_own_plan(a_record(8, workload=OTHER)), plan=None)
    with pytest.raises(InvalidInput, match="nothing could be launched by it"):
        store.change(upsert_estimates, C, [named])
    assert len(times_of(store, OTHER)) == 1


def test_a_newly_derived_plan_replaces_the_one_before_unless_a_job_runs_by_it(
    store: Store,
) -> None:
    a_cluster(store)
    old = [with_own_plan(an_analytic_record(n, nodes=1)) for n in (1, 2)]
    new = [with_own_plan(an_analytic_record(n, nodes=1), zero=ZeroStage.OPTIMIZER) for n in (1, 2)]
    write_derived(store, *old, moe="x")
    submit(store, a_spec("j", workload=OTHER))
    run(store, j=[("a100-0", [0])])
    write_derived(store, *new, moe="y")
    assert {e.plan for e in cells_of(store, OTHER)} == {old[0].plan, new[0].plan, new[1].plan}


def test_a_workload_cannot_have_a_flood_of_plans(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ESTIMATES_PER_WORKLOAD", 5)
    a_cluster(store)
    flood = [with_own_plan(a_record(n, workload=OTHER)) for n in (1, 2, 4, 8, 16)]
    store.change(upsert_estimates, C, flood)
    more = with_own_plan(a_record(32, workload=OTHER))
    with pytest.raises(LimitReached, match="can have at most 5 estimates, and this would make 6"):
        store.change(upsert_estimates, C, [more])
    assert len(times_of(store, OTHER)) == 5


def test_derived_estimates_do_not_prevent_the_removal_of_a_gpu_type(store: Store) -> None:
    store.change(upsert_cluster, C, [GpuType(name=t, memory_bytes=1) for t in "ab"], None)
    write_derived(store, an_analytic_record(1, gpu_type="b"))
    store.change(upsert_cluster, C, [GpuType(name="a", memory_bytes=1)], None)
    assert times_of(store, OTHER) == {}


def test_queued_jobs_show_why_their_workload_has_no_estimates(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j", workload=OTHER), a_spec("known"), a_spec("held", workload=OTHER))
    apply_event(store, "held", JobEvent.HOLD)
    store.change(record_wait_reasons, C, {OTHER: WAITS, BERT: WAITS})
    assert job(store, "j").reason == WAITS
    reason = job(store, "held").reason
    assert reason is not None
    assert reason.code is ReasonCode.HELD  # the reason is its state, not its workload
    write_derived(store, an_analytic_record(1), moe="x")
    assert job(store, "j").reason is None
    store.change(record_wait_reasons, C, {OTHER: WAITS})
    assert job(store, "j").reason == WAITS
    store.change(upsert_estimates, C, [an_analytic_record(1)])
    assert job(store, "j").reason is None


def test_of_a_round_and_an_estimation_pass_the_newer_reason_counts(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j", workload=OTHER), a_spec("other"))
    snapshot = store.snapshot(C)
    none = replace(WAITS, message="there is no estimate")
    commit(store, snapshot, wait(snapshot, "j")._replace(reason=none), wait(snapshot, "other"))
    assert job(store, "j").reason == none
    store.change(record_wait_reasons, C, {OTHER: WAITS, BERT: WAITS})
    assert (job(store, "j").reason, job(store, "j").reason_round) == (WAITS, 1)
    other = job(store, "other").reason
    assert other is not None
    assert other.code is ReasonCode.NO_CAPACITY
    write_derived(store, an_analytic_record(1), moe="x")
    since = job(store, "j").reason
    assert since is not None
    assert "estimated since the last round" in str(since.message)


@pytest.fixture
def running(store: Store, trainer: None) -> Store:
    """Return a store in which the job j runs on one GPU under a runtime that trains."""
    a_cluster(store)
    submit(store, a_spec("j"))
    run(store, j=[("a100-0", [0])])
    return store


def report_progress(
    store: Store, *times_s: float, start: float = 1.0, runtime: str = TRAINER
) -> None:
    for i, iter_time_s in enumerate(times_s):
        agents_report(store, iterations_done=start + i, iter_time_s=iter_time_s, runtime=runtime)


def times_measured(store: Store) -> list[float]:
    return [m.iter_time_s for m in store.estimation(C).measurements]


@pytest.mark.usefixtures("trainer")
def test_a_running_jobs_iteration_time_is_measured_once_it_is_warm(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j", requested_gpus=6))
    run(store, j=[("a100-0", [0, 1, 2]), ("a100-1", [0, 1, 2])])
    report_progress(store, 90.0, 80.0, 2.0, 9.0, 2.2, 2.1)
    assert store.estimation(C).measurements == ()
    shown = job(store, "j").allocation
    assert shown is not None
    assert (shown.iter_time_s, shown.iter_time_source) == (0.0, None)
    report_progress(store, 1.9, start=10.0)
    (measurement,) = store.estimation(C).measurements
    cell = measurement.cell
    assert (cell.gpu_type, cell.gpus, cell.nodes, cell.pipeline_degree) == ("a100", 6, 2, 1)
    assert measurement.iter_time_s == 2.1  # the median of the last five
    shown = job(store, "j").allocation
    assert shown is not None
    assert (shown.iter_time_s, shown.iter_time_source) == (2.1, EstimateSource.MEASURED)
    report_progress(store, 50.0, 50.0, 50.0, start=20.0)
    assert store.estimation(C).measurements == (measurement,)


def test_reports_without_progress_and_meaningless_times_are_no_measurements(
    running: Store,
) -> None:
    for _ in range(20):
        report_progress(running, 2.0, start=5.0)
    for start_, time_s in ((10.0, 0.0), (30.0, 1e-9), (50.0, 1e9)):
        report_progress(running, *[time_s] * 10, start=start_)
    assert times_measured(running) == []


@pytest.mark.parametrize("runtime", ["replay", "of-a-later-release"])
def test_the_time_of_a_runtime_that_is_not_known_to_train_is_replayed_and_not_measured(
    running: Store, runtime: str
) -> None:
    report_progress(running, *[2.0] * 7, runtime=runtime)
    held = job(running, "j").allocation
    assert held is not None
    assert (held.iter_time_s, held.iter_time_source) == (2.0, EstimateSource.REPLAYED)
    # One such report makes the time of the whole run replayed.
    report_progress(running, *[2.0] * 7, start=10.0)
    assert times_measured(running) == []


def test_the_time_from_an_agent_that_names_no_runtime_has_the_source_of_the_jobs_own(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, a_spec("j", command=("train.py",), launch=LaunchSpec(runtime="torchrun")))
    run(store, j=[("a100-0", [0])])
    report_progress(store, *[2.0] * 7, runtime="")
    assert times_measured(store) == [2.0]


def test_each_generation_of_a_job_is_measured_separately(running: Store) -> None:
    report_progress(running, *[2.0] * 7)
    snapshot = running.snapshot(C)
    commit(running, snapshot, start(snapshot, "j", [("a100-1", [0, 1])], DecisionKind.RESIZE))
    agents_report(running)
    report_progress(running, *[1.0] * 7, start=20.0)
    measurements = running.estimation(C).measurements
    assert [(m.cell.gpus, m.iter_time_s) for m in measurements] == [(1, 2.0), (2, 1.0)]


def test_measurements_outlive_their_jobs_and_only_the_latest_are_kept(
    database: Database, running: Store
) -> None:
    report_progress(running, *[2.0] * 7)
    more = """
        INSERT INTO measurements (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, generation,
            iter_time_s, source, changed_at)
        SELECT workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, generation,
            1.0 + g, {source}, {changed_at} FROM measurements, generate_series(1, 250) g"""
    # Replayed times do not displace measurements.
    execute(database, more.format(source=3, changed_at="now() + interval '1 s'"))
    running.prune(-10.0, 1)
    assert times_measured(running) == [2.0]
    agents_report(running, phase="succeeded")
    agents_report(running)
    assert running.prune(-1.0, 1)["jobs"] == 1
    assert times_measured(running) == [2.0]
    execute(database, more.format(source="source", changed_at="changed_at"))
    assert len(running.estimation(C).measurements) == 200
    assert running.prune(-1.0, 1)["measurements"] == 51


def test_a_job_without_an_estimate_of_its_model_plan_or_runtime_wakes_the_estimation(
    database: Database, store: Store
) -> None:
    a_cluster(store)
    clusters: list[str] = []
    woken = threading.Event()

    def notify(cluster: str) -> None:
        if cluster:
            clusters.append(cluster)
            woken.set()

    listener = Listener(database.url)
    listener.subscribe(notify, ESTIMATING_CHANNEL)
    with listener:
        assert listener.listening.wait(PATIENCE_S)
        submit(store, a_spec("known"))
        submit(store, a_spec("unknown", workload=OTHER))
        assert woken.wait(PATIENCE_S)
        woken.clear()
        own_model = ModelSpec(model="mine", params="", architecture="{a: 1}", dtype="f16")
        store.change(upsert_models, C, [own_model])
        assert woken.wait(PATIENCE_S)
        woken.clear()
        submit(store, a_spec("own", plan=a_plan(BERT, 1)))
        assert woken.wait(PATIENCE_S)
        woken.clear()
        restricted = LaunchSpec(runtime="torchrun")
        submit(store, a_spec("torch", command=("train.py",), launch=restricted))
        assert woken.wait(PATIENCE_S)
    assert clusters == [C] * 4


def is_waiting(database: Database) -> bool:
    """Return whether a transaction waits for another."""
    with database.read() as connection:
        return bool(
            connection.execute(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar()
        )


@pytest.mark.parametrize("user_first", [True, False])
def test_concurrent_writes_of_a_user_and_the_service_end_as_if_sequential(
    database: Database, store: Store, user_first: bool
) -> None:
    a_cluster(store)
    write_derived(store, moe="digest")
    derived = an_analytic_record(2, pipeline_degree=2)
    own = with_own_plan(an_analytic_record(2, source=EstimateSource.PROFILED, sd=None))
    writes: list[Callable[[Connection], object]] = [
        lambda w: upsert_estimates(w, C, [own]),
        lambda w: put_derived_estimates(w, C, [derived], {}),
    ]
    first, second = writes if user_first else reversed(writes)
    with ThreadPoolExecutor(1) as pool:
        others: list[Future[object]] = []
        pause = threading.Event()

        def work(connection: Connection) -> None:
            first(connection)
            others.append(pool.submit(store.change, second))
            while not (others[0].done() or is_waiting(database)):
                pause.wait(0.01)

        store.change(work)
        others[0].result(PATIENCE_S)
    stored = {(e.cell.plan, e.cell.pipeline_degree) for e in cells_of(store, OTHER)}
    assert stored == {(own.cell.plan, 1)}
