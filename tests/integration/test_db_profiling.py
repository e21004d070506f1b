"""Measured layers in the store and over a socket: added once, never changed, used in estimates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.estimator.hardware.cluster_types import catalogue_of, hardware_of
from tessera.estimator.profiling.tasks import (
    ProfilingOptions,
    TaskState,
    nominal_estimates,
    profiling_status,
    step_of,
    task_of,
)
from tessera.formulation.errors import InvalidInput, NotFound
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.estimates import (
    HostProfile,
    HostRates,
    ModelSpec,
    ProfileGap,
    ProfileRow,
)
from tessera.formulation.values import PROFILING, EstimateSource, GpuType, Workload
from tessera.service.cells.deriver import CellDeriver
from tessera.service.cli.jobview import profiling_facts
from tessera.service.rpc.convert.profiles import of_host
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc, jobs_pb2
from tests.support.rpc import error_details, serving
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    apply_event,
    cells_of,
    do,
    execute,
    job,
    submit,
)

BERT = Workload(model="bert", params="1.3B", global_batch=256)
STEP = step_of(BERT, ())
assert STEP is not None
ASKS = a_spec("j", workload=BERT, requested_gpus=2, profile=True)


def a_row(**changed: Any) -> ProfileRow:
    assert STEP is not None
    fields: dict[str, Any] = {
        "workload": BERT,
        "gpu_type": "a100",
        "task": "t",
        "source": STEP.source,
        "kind": "dot",
        "layers": 24,
        "samples": 1.0,
        "tp": 1,
        "dtype": "f16",
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "method": "kernels",
        "repeats": 5,
        "device_s": 3.0,
        "device": "NVIDIA A100",
        "versions": (("driver", "12"), ("jax", "0.10.2")),
        "date": "2026-11-21",
    }
    return ProfileRow(**(fields | changed))


def add_profiles(store: PostgresStore, *rows: ProfileRow, gap: ProfileGap | None = None) -> int:
    counts: list[int] = []
    do(store, lambda w: counts.append(w.add_profiles(C, rows, gap)))
    return counts[0]


def a_gap(**changed: Any) -> ProfileGap:
    assert STEP is not None
    fields: dict[str, Any] = {
        "workload": BERT,
        "gpu_type": "a100",
        "task": "t",
        "source": STEP.source,
        "left_out": ((4.0, 1), (8.0, 1)),
        "reason": "a limit",
    }
    return ProfileGap(**(fields | changed))


def a_deriving(store: PostgresStore, **options: Any) -> CellDeriver:
    return CellDeriver(store, catalogue_of(), (1.0,), profiling=ProfilingOptions(**options))


def test_records_read_back_unchanged_and_duplicates_are_stored_once(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, ASKS)
    rows = (a_row(), a_row(kind="norm", backward_s=0.0), a_row(samples=2.5))
    assert add_profiles(store, *rows) == 3
    assert add_profiles(store, *rows) == 0
    assert store.estimation(C).profiles == rows


def test_records_of_a_task_never_change_and_a_new_task_adds_rows(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    add_profiles(store, a_row())
    assert add_profiles(store, a_row(forward_s=9.0)) == 0
    assert add_profiles(store, a_row(task="u", forward_s=9.0)) == 1
    assert [r.forward_s for r in store.estimation(C).profiles] == [1e-3, 9.0]


def test_records_are_read_while_a_job_of_the_model_lives_whatever_its_batch(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    add_profiles(store, a_row())
    assert not store.estimation(C).profiles
    submit(store, replace(ASKS, workload=replace(BERT, global_batch=512)))
    assert len(store.estimation(C).profiles) == 1
    apply_event(store, "j", JobEvent.CANCEL)
    assert not store.estimation(C).profiles


def test_unknown_types_and_clusters_are_refused(store: PostgresStore) -> None:
    a_cluster(store)
    with pytest.raises(InvalidInput, match="gpu_type"):
        add_profiles(store, a_row(gpu_type="abacus"))
    with pytest.raises(NotFound, match="clusters/none"):
        do(store, lambda w: w.add_profiles("none", [a_row()]))


def test_the_database_refuses_meaningless_numbers(database: Database, store: PostgresStore) -> None:
    a_cluster(store)
    add_profiles(store, a_row())
    for change in ("forward_s = 'NaN'", "backward_s = -1", "samples = 0", "layers = 0"):
        with pytest.raises(InvalidInput, match="ck_profiles_"):
            execute(database, f"UPDATE profiles SET {change}")


def test_a_dropped_type_takes_its_records_along(store: PostgresStore) -> None:
    a_cluster(store)
    both = [GpuType(name=t, memory_bytes=2**30) for t in ("a100", "spare")]
    do(store, lambda w: w.upsert_cluster(C, both, None))
    submit(store, ASKS)
    add_profiles(store, a_row(), a_row(gpu_type="spare"))
    do(store, lambda w: w.derive(C, nominal_estimates(["spare"]), {}))
    do(store, lambda w: w.upsert_cluster(C, both[:1], None))
    assert [r.gpu_type for r in store.estimation(C).profiles] == ["a100"]


def test_a_jobs_profiling_request_is_stored_and_shown_with_its_workload(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, ASKS, a_spec("k", workload=replace(BERT, global_batch=64)))
    assert [job(store, name).spec.profile for name in "jk"] == [True, False]
    assert [w.profile for w in store.estimation(C).wanted] == [True, False]


def test_tasks_are_made_once_with_a_cell_of_their_own(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, ASKS)
    for deriving in (a_deriving(store), a_deriving(store)):  # two replicas
        deriving.derive(C)
    jobs, _ = store.list_jobs(C, [], 0, 100)
    (task,) = (j for j in jobs if j.spec.workload.model == PROFILING)
    assert (task.state, task.spec.requested_type, task.spec.runtime) == (
        JobState.QUEUED,
        "a100",
        "profile",
    )
    (entry,) = store.estimation(C).profiling
    assert (entry.name, entry.gpu_type, entry.state) == (task.spec.name, "a100", JobState.QUEUED)
    assert [w.workload for w in store.estimation(C).wanted] == [BERT]
    (cell,) = cells_of(store, task.spec.workload)
    assert (cell.cell.gpu_type, cell.cell.gpus) == ("a100", 1)
    assert {task.spec.name, "j"} == set(store.snapshot(C).jobs.name)
    assert store.snapshot(C).profiling().tolist() == [False, True]


def test_a_task_that_another_replica_made_meanwhile_does_no_harm(
    store: PostgresStore, caplog: pytest.LogCaptureFixture
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    assert STEP is not None
    task = task_of(BERT, STEP, "a100", ProfilingOptions())

    class Late(PostgresStore):
        """A store that reads the state before the other replica's change."""

        def estimation(self, cluster: str) -> Any:
            return replace(super().estimation(cluster), profiling=())

    do(store, lambda w: w.derive(C, nominal_estimates(["a100"]), {}))
    submit(store, task)
    a_deriving(Late(store._database)).derive(C)
    assert [t.name for t in store.estimation(C).profiling] == [task.name]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_records_rederive_the_cells_and_measured_cells_keep_priority(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, ASKS)
    a_deriving(store).derive(C)
    ran = replace(
        next(c for c in cells_of(store, BERT) if c.cell.pipeline_degree == 1),
        source=EstimateSource.MEASURED,
    )
    do(store, lambda w: w.derive(C, [ran], {}))
    add_profiles(store, a_row())
    assert a_deriving(store).derive(C) == 1
    assert ran in cells_of(store, BERT)
    others = [c for c in cells_of(store, BERT) if c != ran]
    assert {c.source for c in others} == {EstimateSource.PROFILED}
    assert ran.cell not in {c.cell for c in others}
    assert a_deriving(store).derive(C) == 0


def test_what_a_task_left_out_is_stored_until_it_has_measured_everything(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    other = a_gap(task="u", reason="another")
    for gap in (a_gap(), other, a_gap(left_out=((8.0, 1),), reason="a later one")):
        add_profiles(store, a_row(), gap=gap)
    assert set(store.estimation(C).gaps) == {
        other,
        a_gap(left_out=((8.0, 1),), reason="a later one"),
    }
    add_profiles(store, a_row(samples=8.0))
    assert store.estimation(C).gaps == (other,)


RATES = HostRates(
    to_device_bytes_per_s=24e9,
    to_host_bytes_per_s=22e9,
    updates=((1, 9e9), (8, 60e9)),
    method="JAX 0.10.2, Adam in NumPy 2.4.6",
    device="NVIDIA A100",
    date="2026-11-21",
)


def put_host(store: PostgresStore, task: str, rates: HostRates, gpu_type: str = "a100") -> None:
    host = HostProfile(gpu_type=gpu_type, task=task, rates=rates)
    do(store, lambda w: w.add_profiles(C, [], None, host))


def test_the_latest_rates_of_a_host_replace_those_of_the_catalogue(store: PostgresStore) -> None:
    a_cluster(store)
    put_host(store, "t", replace(RATES, to_host_bytes_per_s=1e9))
    put_host(store, "u", replace(RATES, to_host_bytes_per_s=2e9))
    put_host(store, "t", RATES)
    known = store.estimation(C)
    assert known.hosts == (HostProfile(gpu_type="a100", task="t", rates=RATES),)
    (kind, *_) = known.kinds
    hardware = hardware_of("t", kind, catalogue_of(), known.hosts)
    assert hardware.copied_bytes_per_s == 22e9
    assert hardware.host_update_bytes_per_s == 60e9
    assert hardware.updated_bytes_per_s([1, 8, 16]).tolist() == [9e9, 60e9, 60e9]


def test_rates_of_hosts_change_the_inputs_of_estimates_of_their_type_only(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, replace(ASKS, profile=False))
    deriver = a_deriving(store)
    assert deriver.derive(C) == 1
    assert deriver.derive(C) == 0
    put_host(store, "t", RATES)
    assert deriver.derive(C) == 1


def test_a_gap_goes_with_its_gpu_type_and_is_never_empty(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    both = [GpuType(name=t, memory_bytes=2**30) for t in ("a100", "spare")]
    do(store, lambda w: w.upsert_cluster(C, both, None))
    submit(store, ASKS)
    for gap in (a_gap(), a_gap(gpu_type="spare")):
        add_profiles(store, gap=gap)
    with pytest.raises(InvalidInput, match="ck_profile_gaps_content"):
        execute(database, "UPDATE profile_gaps SET left_out = '[]'")
    do(store, lambda w: w.upsert_cluster(C, both[:1], None))
    assert store.estimation(C).gaps == (a_gap(),)


def the_task(store: PostgresStore) -> str:
    (task,) = store.estimation(C).profiling
    return task.name


def pass_time(database: Database, task: str, started_ago_s: float | None) -> None:
    """Let the task's submission, and its start if it had one, lie in the past."""
    started = "NULL" if started_ago_s is None else f"now() - interval '{started_ago_s} s'"
    execute(
        database,
        f"UPDATE jobs SET created_at = now() - interval '9999 s', started_at = {started}"
        f" WHERE name = '{task}'",
    )


def test_a_task_that_waits_past_the_limit_is_cancelled_and_its_type_stays_analytic(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    a_deriving(store).derive(C)
    task = the_task(store)
    pass_time(database, task, None)  # it never started, so no time is used
    a_deriving(store).derive(C)
    pass_time(database, task, 1700.0)
    a_deriving(store).derive(C)
    assert job(store, task).state is JobState.QUEUED
    pass_time(database, task, 1801.0)
    a_deriving(store).derive(C)
    assert job(store, task).state is JobState.CANCELLED
    status = profiling_status(store.estimation(C), catalogue_of(), ProfilingOptions(), BERT)
    (shown,) = status.tasks
    assert shown.state is TaskState.LIMITED
    assert "limit of 1,800 s (setting profile_limit_s)" in shown.problem
    assert "waited for a GPU" in shown.problem
    assert [samples for samples, _ in shown.left_out] == [1.0, 2.0, 4.0, 8.0]
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.ANALYTIC}
    events = store.job_history(C, task)
    assert shown.problem in {event.detail for event in events}
    a_deriving(store).derive(C)  # it is not made again, and the reason stays
    assert the_task(store) == task
    assert len(store.estimation(C).gaps) == 1


def test_a_task_that_has_used_its_gpu_seconds_is_cancelled_even_if_its_agent_is_silent(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    a_deriving(store).derive(C)
    task = the_task(store)
    execute(database, f"UPDATE jobs SET service_gpu_s = 961 WHERE name = '{task}'")
    a_deriving(store).derive(C)  # its process still has time to end
    assert job(store, task).state is JobState.QUEUED
    execute(database, f"UPDATE jobs SET service_gpu_s = 1021 WHERE name = '{task}'")
    a_deriving(store).derive(C)
    assert job(store, task).state is JobState.CANCELLED
    (gap,) = store.estimation(C).gaps
    assert (
        gap.reason == "the task reached its limit of 960 GPU-seconds (setting profile_task_gpu_s)"
    )


def test_a_type_that_was_measured_in_part_or_before_stays_measured(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    a_deriving(store).derive(C)
    task = the_task(store)
    rows = [a_row(task=task, samples=s) for s in (1.0, 8.0)]
    do(store, lambda w: w.add_profiles(C, rows, a_gap(task=task, left_out=((4.0, 1),))))
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.PROFILED}
    (shown,) = profiling_status(store.estimation(C), catalogue_of(), ProfilingOptions(), BERT).tasks
    assert (shown.state, shown.left_out, shown.problem) == (
        TaskState.DONE,
        ((4.0, 1),),
        "a limit",
    )
    pass_time(database, task, 9000.0)
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.PROFILED}


def test_a_changed_step_no_longer_uses_old_records(store: PostgresStore) -> None:
    a_cluster(store)
    own = ModelSpec(
        model="bert",
        params="1.3B",
        step="my.steps:bert",
        step_arguments=("layers=2",),
        architecture="{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128,"
        " vocabulary: 1000}",
    )
    do(store, lambda w: w.upsert_models(C, [own]))
    assert store.list_models(C) == [own]
    submit(store, ASKS)
    source = "my.steps:bert(layers=2)"
    add_profiles(store, a_row(source=source, dtype="bf16"), a_row(task="published"))
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.PROFILED}
    do(store, lambda w: w.upsert_models(C, [replace(own, step_arguments=("layers=3",))]))
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.ANALYTIC}


def test_user_estimates_prevent_profiled_ones(store: PostgresStore) -> None:
    a_cluster(store)
    do(store, lambda w: w.upsert_estimates(C, [a_record(2, workload=BERT, nodes=1)]))
    submit(store, ASKS)
    add_profiles(store, a_row())
    a_deriving(store).derive(C)
    assert [c.source for c in cells_of(store, BERT)] == [EstimateSource.MEASURED]
    assert not store.estimation(C).profiling


def a_request(**changed: Any) -> pb.AddProfilesRequest:
    layer: dict[str, Any] = {
        "kind": "dot",
        "layers": 24,
        "samples": 1.0,
        "tensor_parallel": 1,
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "method": "kernels",
        "repeats": 5,
        "device_s": 3.0,
    }
    assert STEP is not None
    return pb.AddProfilesRequest(
        parent=f"clusters/{C}",
        gpu_type="a100",
        task="t",
        source=STEP.source,
        dtype="f16",
        workload=pb.Workload(model="bert", params="1.3B", global_batch=256),
        device="A100",
        versions={"jax": "1"},
        date="2026-11-21",
        request_id="r",
        layers=[pb.LayerProfile(**(layer | changed))],
    )


async def test_records_sent_over_a_socket_are_added_once_and_bad_ones_are_refused(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.AddProfiles(a_request(forward_s=math.nan))
        assert error_details(refused.value)[1] == ["layers[0].forward_s"]
        assert not store.estimation(C).profiles
        answers = [(await stub.AddProfiles(a_request())).added for _ in range(2)]
        with pytest.raises(grpc.aio.AioRpcError, match="used for another request"):
            await stub.AddProfiles(a_request(forward_s=5.0))
        workload = pb.Workload(model="bert", params="1.3B", global_batch=256)
        request = pb.GetProfilingRequest(parent=f"clusters/{C}", workload=workload)
        profiling = await stub.GetProfiling(request)
        estimated = await stub.EstimateCells(
            pb.EstimateCellsRequest(parent=f"clusters/{C}", workload=workload, gpus=[1])
        )
    assert answers == [1, 1]  # the second call gets the first call's answer
    assert len(store.estimation(C).profiles) == 1
    assert profiling.asked
    (task,) = profiling.tasks
    assert (task.state, task.records, task.device_seconds) == (pb.ProfilingTask.DONE, 1, 3.0)
    assert {c.estimate.source for c in estimated.cells} == {pb.PROFILED}


async def test_rates_of_a_host_sent_over_a_socket_are_shown_and_bad_ones_are_refused(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    workload = pb.Workload(model="bert", params="1.3B", global_batch=256)
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        for host, field in (
            (pb.HostRates(copy_gap="no GPU"), "host.update_gap"),
            (pb.HostRates(copy_gap="no GPU", updates=[pb.CoreRate(cores=1)]), "bytes_per_s"),
            (pb.HostRates(to_device_bytes_per_s=math.inf), "host.to_device_bytes_per_s"),
        ):
            request = a_request()
            request.host.CopyFrom(host)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.AddProfiles(request)
            assert error_details(refused.value)[1][0].endswith(field)
        good = a_request()
        good.host.CopyFrom(of_host(RATES))
        await stub.AddProfiles(good)
        asked = pb.GetProfilingRequest(parent=f"clusters/{C}", workload=workload)
        profiling = await stub.GetProfiling(asked)
    (known,) = store.estimation(C).hosts
    assert known == HostProfile(gpu_type="a100", task="t", rates=RATES)
    assert [task.host for task in profiling.tasks] == [good.host]
    text = profiling_facts(jobs_pb2.Job(profile=True), profiling)[1][1]
    assert "host copies 22 GB/s, updates 60 GB/s on 8 CPU cores" in text


def a_gap_request(**changed: Any) -> pb.AddProfilesRequest:
    request = a_request()
    fields: dict[str, Any] = {
        "left_out": [pb.ProfileSize(samples=8, tensor_parallel=1)],
        "left_out_reason": "the task reached its limit",
        "request_id": "",
    }
    for name, value in (fields | changed).items():
        request.ClearField(name)  # type: ignore[arg-type]
        part = pb.AddProfilesRequest(**{name: value})
        request.MergeFrom(part)
    return request


async def test_a_task_that_measured_nothing_usable_says_so_and_its_estimates_stay_analytic(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    workload = pb.Workload(model="bert", params="1.3B", global_batch=256)
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        answer = await stub.AddProfiles(a_gap_request(layers=[], dtype="", device="", date=""))
        request = pb.GetProfilingRequest(parent=f"clusters/{C}", workload=workload)
        (task,) = (await stub.GetProfiling(request)).tasks
    assert answer.added == 0
    assert (task.state, task.problem) == (pb.ProfilingTask.LIMITED, "the task reached its limit")
    assert [(s.samples, s.tensor_parallel) for s in task.left_out] == [(8.0, 1)]
    assert not task.HasField("left_seconds")
    assert {c.source for c in cells_of(store, BERT)} <= {EstimateSource.ANALYTIC}
    (_, text) = profiling_facts(jobs_pb2.Job(profile=True), pb.Profiling(tasks=[task]))[1]
    assert text == (
        "a100: stopped at a limit, so its estimates stay analytic: the task reached its limit"
    )


async def test_what_was_left_out_is_checked(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, ASKS)
    size = pb.ProfileSize(samples=8, tensor_parallel=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"left_out_reason": ""}, "left_out_reason"),
        ({"left_out": []}, "left_out_reason"),
        (
            {"left_out": [pb.ProfileSize(samples=math.nan, tensor_parallel=1)]},
            "left_out[0].samples",
        ),
        ({"left_out": [pb.ProfileSize(samples=8)]}, "left_out[0].tensor_parallel"),
        ({"left_out": [size, size]}, "left_out[1]"),
        ({"left_out": [pb.ProfileSize(samples=1, tensor_parallel=1)]}, "left_out[0]"),
        ({"layers": [], "left_out": [], "left_out_reason": ""}, "layers"),
        ({"layers": [], "task": ""}, "task"),
    ]
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        for changed, field in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.AddProfiles(a_gap_request(**changed))
            assert error_details(refused.value)[1] == [field]
    assert not store.estimation(C).gaps
