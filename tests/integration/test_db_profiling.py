"""Measured layers in the store and over a socket: added once, never changed, used in estimates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.estimator.profiling.tasks import ProfilingOptions, nominal_estimates, step_of, task_of
from tessera.estimator.workloads import catalogue_of
from tessera.formulation.errors import InvalidInput, NotFound
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.estimates import EstimateRecord, ModelSpec, ProfileRow
from tessera.formulation.values import PROFILING, EstimateSource, GpuType, Workload
from tessera.service.cell_deriver import CellDeriver
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc
from tests.support.rpc import error_details, serving
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    apply_event,
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


def add_profiles(store: PostgresStore, *rows: ProfileRow) -> int:
    counts: list[int] = []
    do(store, lambda w: counts.append(w.add_profiles(C, rows)))
    return counts[0]


def a_deriving(store: PostgresStore, **options: Any) -> CellDeriver:
    return CellDeriver(store, catalogue_of(), (1.0,), profiling=ProfilingOptions(**options))


def cells_of(store: PostgresStore, workload: Workload = BERT) -> list[EstimateRecord]:
    key = (workload.model, workload.params, workload.global_batch)
    return store.list_estimates(C, *key, 0, 1000)[0]


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


@pytest.mark.parametrize(
    "change",
    ["forward_s = 'NaN'", "backward_s = -1", "samples = 0", "layers = 0", "device_s = 'NaN'"],
)
def test_the_database_refuses_meaningless_numbers(
    database: Database, store: PostgresStore, change: str
) -> None:
    a_cluster(store)
    add_profiles(store, a_row())
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
        next(c for c in cells_of(store) if c.cell.pipeline_degree == 1),
        source=EstimateSource.MEASURED,
    )
    do(store, lambda w: w.derive(C, [ran], {}))
    add_profiles(store, a_row())
    assert a_deriving(store).derive(C) == 1
    assert ran in cells_of(store)
    others = [c for c in cells_of(store) if c != ran]
    assert {c.source for c in others} == {EstimateSource.PROFILED}
    assert ran.cell not in {c.cell for c in others}
    assert a_deriving(store).derive(C) == 0


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
    assert {c.source for c in cells_of(store)} == {EstimateSource.PROFILED}
    do(store, lambda w: w.upsert_models(C, [replace(own, step_arguments=("layers=3",))]))
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store)} == {EstimateSource.ANALYTIC}


def test_user_estimates_prevent_profiled_ones(store: PostgresStore) -> None:
    a_cluster(store)
    do(store, lambda w: w.upsert_estimates(C, [a_record(2, workload=BERT, nodes=1)]))
    submit(store, ASKS)
    add_profiles(store, a_row())
    a_deriving(store).derive(C)
    assert [c.source for c in cells_of(store)] == [EstimateSource.MEASURED]
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
