"""Measured layers: added once, never changed, used in estimates, and measured by tasks."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tessera.db.estimates.derived_estimates import list_models, put_derived_estimates, upsert_models
from tessera.db.schema.engine import Database
from tessera.db.store import profile_changes
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.store import Store
from tessera.estimator.hardware.cluster_types import catalogue_of, hardware_of
from tessera.estimator.profiling.tasks import (
    ProfilingOptions,
    StepTarget,
    TaskState,
    nominal_estimates,
    profiling_status,
    step_of,
    task_of,
)
from tessera.formulation.base.errors import InvalidInput, NotAllowed, NotFound
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.job.runtimes import REPLAY
from tessera.formulation.records.estimates import (
    HostProfile,
    HostRates,
    ModelSpec,
    ProfileGap,
    ProfileRow,
)
from tessera.service.agent.isolation import visible_devices
from tessera.service.agent.runtimes.profiler import ProfilerRuntime
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    MemberExit,
    MemberHandle,
    RuntimeChooser,
)
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.service.cli.jobs.jobview import profiling_facts
from tessera.service.profiling.clock import CLOCK_FILE
from tessera.service.profiling.task import HOST_FILE, RECORDS_FILE, require_jax
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.v1 import agents_pb2, estimates_pb2, estimates_pb2_grpc, jobs_pb2, launch_pb2
from tessera.v1 import estimates_pb2 as pb
from tests.support.agents import launch_leader, until
from tests.support.rpc import error_details, serving
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    apply_event,
    cells_of,
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


def add_profiles(store: Store, *rows: ProfileRow, gap: ProfileGap | None = None) -> int:
    counts: list[int] = []
    counts.append(store.change(profile_changes.add_profiles, C, rows, gap))
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


def a_deriving(store: Store, **options: Any) -> CellDeriver:
    return CellDeriver(store, catalogue_of(), (1.0,), profiling=ProfilingOptions(**options))


def test_records_are_stored_once_and_never_change_and_a_new_task_adds_rows(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    rows = (a_row(), a_row(kind="norm", backward_s=0.0), a_row(samples=2.5))
    assert add_profiles(store, *rows) == 3
    assert add_profiles(store, *rows) == 0
    assert store.estimation(C).profiles == rows
    assert add_profiles(store, a_row(forward_s=9.0)) == 0
    assert add_profiles(store, a_row(task="u", forward_s=9.0)) == 1
    assert store.estimation(C).profiles == (*rows, a_row(task="u", forward_s=9.0))
    with pytest.raises(InvalidInput, match="gpu_type"):
        add_profiles(store, a_row(gpu_type="abacus"))
    with pytest.raises(NotFound, match="clusters/none"):
        store.change(profile_changes.add_profiles, "none", [a_row()])


def test_records_are_read_while_a_job_of_the_model_lives_whatever_its_batch(
    store: Store,
) -> None:
    a_cluster(store)
    add_profiles(store, a_row())
    assert not store.estimation(C).profiles
    submit(store, replace(ASKS, workload=replace(BERT, global_batch=512)))
    assert len(store.estimation(C).profiles) == 1
    apply_event(store, "j", JobEvent.CANCEL)
    assert not store.estimation(C).profiles


def test_meaningless_numbers_are_refused_and_a_dropped_type_takes_its_records_along(
    database: Database, store: Store
) -> None:
    a_cluster(store)
    both = [GpuType(name=t, memory_bytes=2**30) for t in ("a100", "spare")]
    store.change(upsert_cluster, C, both, None)
    submit(store, ASKS)
    add_profiles(store, a_row(), a_row(gpu_type="spare"))
    store.change(put_derived_estimates, C, nominal_estimates(["spare"]), {})
    for gap in (a_gap(), a_gap(gpu_type="spare")):
        add_profiles(store, gap=gap)
    with pytest.raises(InvalidInput, match="ck_profile_gaps_content"):
        execute(database, "UPDATE profile_gaps SET left_out = '[]'")
    for change in ("forward_s = 'NaN'", "backward_s = -1", "samples = 0", "layers = 0"):
        with pytest.raises(InvalidInput, match="ck_profiles_"):
            execute(database, f"UPDATE profiles SET {change}")
    store.change(upsert_cluster, C, both[:1], None)
    assert [r.gpu_type for r in store.estimation(C).profiles] == ["a100"]
    assert store.estimation(C).gaps == (a_gap(),)


def test_a_task_that_another_replica_made_meanwhile_does_no_harm(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    assert STEP is not None
    task = task_of(BERT, STEP, "a100", ProfilingOptions())

    class Late(Store):
        """A store that reads the state before the other replica's change."""

        def estimation(self, cluster: str) -> Any:
            return replace(super().estimation(cluster), profiling=())

    store.change(put_derived_estimates, C, nominal_estimates(["a100"]), {})
    submit(store, task)
    a_deriving(Late(store._database)).derive(C)
    assert [t.name for t in store.estimation(C).profiling] == [task.name]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_records_rederive_the_cells_and_measured_cells_keep_priority(store: Store) -> None:
    a_cluster(store)
    submit(store, ASKS)
    a_deriving(store).derive(C)
    ran = replace(
        next(c for c in cells_of(store, BERT) if c.cell.pipeline_degree == 1),
        source=EstimateSource.MEASURED,
    )
    store.change(put_derived_estimates, C, [ran], {})
    add_profiles(store, a_row())
    assert a_deriving(store).derive(C) == 1
    assert ran in cells_of(store, BERT)
    others = [c for c in cells_of(store, BERT) if c != ran]
    assert {c.source for c in others} == {EstimateSource.PROFILED}
    assert ran.cell not in {c.cell for c in others}
    assert a_deriving(store).derive(C) == 0


def test_what_a_task_left_out_is_stored_until_it_has_measured_everything(
    store: Store,
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


def put_host(store: Store, task: str, rates: HostRates, gpu_type: str = "a100") -> None:
    host = HostProfile(gpu_type=gpu_type, task=task, rates=rates)
    store.change(profile_changes.add_profiles, C, [], None, host)


def test_the_latest_rates_of_a_host_replace_those_of_the_catalogue_and_estimates_by_them(
    store: Store,
) -> None:
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
    submit(store, replace(ASKS, profile=False))
    deriver = a_deriving(store)
    assert [deriver.derive(C), deriver.derive(C)] == [1, 0]
    put_host(store, "t", replace(RATES, to_host_bytes_per_s=1e9))
    assert deriver.derive(C) == 1


def the_task(store: Store) -> str:
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


def test_a_task_that_has_used_its_gpu_seconds_is_cancelled_even_if_its_agent_is_silent(
    store: Store, database: Database
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
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    a_deriving(store).derive(C)
    task = the_task(store)
    rows = [a_row(task=task, samples=s) for s in (1.0, 8.0)]
    store.change(profile_changes.add_profiles, C, rows, a_gap(task=task, left_out=((4.0, 1),)))
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.PROFILED}
    (shown,) = profiling_status(store.estimation(C), catalogue_of(), ProfilingOptions(), BERT).tasks
    assert (shown.state, shown.left_out, shown.problem) == (TaskState.DONE, ((4.0, 1),), "a limit")
    pass_time(database, task, 9000.0)
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.PROFILED}


def test_a_changed_step_no_longer_uses_old_records(store: Store) -> None:
    a_cluster(store)
    own = ModelSpec(
        model="bert",
        params="1.3B",
        step="my.steps:bert",
        step_arguments=("layers=2",),
        architecture="{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128,"
        " vocabulary: 1000}",
    )
    store.change(upsert_models, C, [own])
    assert store.read(list_models, C) == [own]
    submit(store, ASKS)
    source = "my.steps:bert(layers=2)"
    add_profiles(store, a_row(source=source, dtype="bf16"), a_row(task="published"))
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.PROFILED}
    store.change(upsert_models, C, [replace(own, step_arguments=("layers=3",))])
    a_deriving(store).derive(C)
    assert {c.source for c in cells_of(store, BERT)} == {EstimateSource.ANALYTIC}


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


GAP: dict[str, Any] = {
    "left_out": [pb.ProfileSize(samples=8, tensor_parallel=1)],
    "skip_reason": "the task reached its limit",
    "request_id": "",
}


def changed_request(**fields: Any) -> pb.AddProfilesRequest:
    """Return a valid request of which ``fields`` have other values."""
    request = a_request()
    for name, value in fields.items():
        request.ClearField(name)  # type: ignore[arg-type]
        request.MergeFrom(pb.AddProfilesRequest(**{name: value}))
    return request


async def test_bad_records_rates_and_gaps_are_refused_over_a_socket(store: Store) -> None:
    a_cluster(store)
    submit(store, ASKS)
    (size,) = GAP["left_out"]
    no_number = pb.ProfileSize(samples=math.nan, tensor_parallel=1)
    cores = pb.HostRates(copy_gap="no GPU", updates=[pb.CoreRate(cores=1)])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"host": pb.HostRates(copy_gap="no GPU")}, "host.update_gap"),
        ({"host": cores}, "host.updates[0].bytes_per_s"),
        ({"host": pb.HostRates(to_device_bytes_per_s=math.inf)}, "host.to_device_bytes_per_s"),
        (GAP | {"skip_reason": ""}, "skip_reason"),
        (GAP | {"left_out": []}, "skip_reason"),
        (GAP | {"left_out": [no_number]}, "left_out[0].samples"),
        (GAP | {"left_out": [pb.ProfileSize(samples=8)]}, "left_out[0].tensor_parallel"),
        (GAP | {"left_out": [size, size]}, "left_out[1]"),
        (GAP | {"left_out": [pb.ProfileSize(samples=1, tensor_parallel=1)]}, "left_out[0]"),
        ({"layers": []}, "layers"),
        (GAP | {"layers": [], "task": ""}, "task"),
    ]
    requests = [(changed_request(**changed), field) for changed, field in wrong]
    requests.append((a_request(forward_s=math.nan), "layers[0].forward_s"))
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        for request, field in requests:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.AddProfiles(request)
            (named,) = error_details(refused.value)[1]
            assert named.endswith(field)
    known = store.estimation(C)
    assert (known.profiles, known.gaps, known.hosts) == ((), (), ())


async def test_a_task_that_measured_nothing_usable_says_so_and_its_estimates_stay_analytic(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, ASKS)
    workload = pb.Workload(model="bert", params="1.3B", global_batch=256)
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        answer = await stub.AddProfiles(
            changed_request(**GAP, layers=[], dtype="", device="", date="")
        )
        request = pb.GetProfilingRequest(parent=f"clusters/{C}", workload=workload)
        (task,) = (await stub.GetProfiling(request)).tasks
    assert answer.new_records == 0
    assert (task.state, task.problem) == (pb.ProfilingTask.LIMITED, "the task reached its limit")
    assert [(s.samples, s.tensor_parallel) for s in task.left_out] == [(8.0, 1)]
    assert not task.HasField("remaining_seconds")
    assert {c.source for c in cells_of(store, BERT)} <= {EstimateSource.ANALYTIC}
    (_, text) = profiling_facts(jobs_pb2.Job(profile=True), pb.Profiling(tasks=[task]))[1]
    assert text == (
        "a100: stopped at a limit, so its estimates stay analytic: the task reached its limit"
    )


Refusals = list[tuple[grpc.StatusCode, str]]


class Collector:
    """A service that accepts records after it has refused as often as a test requests."""

    def __init__(self) -> None:
        self.found: list[estimates_pb2.AddProfilesRequest] = []
        self.refusals: Refusals = []
        self.left_s: float | None = None  # None: it does not know the task
        self.questions: list[estimates_pb2.GetProfilingRequest] = []

    def AddProfiles(self, request: Any, context: Any) -> estimates_pb2.AddProfilesResponse:
        self.found.append(request)
        if self.refusals:
            context.abort(*self.refusals.pop(0))
        return estimates_pb2.AddProfilesResponse(new_records=len(request.layers))

    def GetProfiling(self, request: Any, context: Any) -> estimates_pb2.Profiling:
        self.questions.append(request)
        if self.left_s is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such cluster")
        job = a_task().job
        task = estimates_pb2.ProfilingTask(job=job, remaining_seconds=self.left_s)
        return estimates_pb2.Profiling(tasks=[estimates_pb2.ProfilingTask(job="other"), task])


class Node:
    """A node on which tasks are started as by an agent."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.records = folder, folder / "checkpoints" / RECORDS_FILE
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.runtime = ProfilerRuntime(
            servers=(f"127.0.0.1:{port}",),
            cluster="c",
            environment={**os.environ, "PYTHONPATH": path},
        )
        self._handles: list[MemberHandle] = []

    def start(
        self, generation: int = 1, samples: tuple[int, ...] = (1, 2), **rest: Any
    ) -> MemberHandle:
        directory = self.folder / f"generation-{generation}"
        directory.mkdir()
        gang = a_task(generation, samples=samples, **rest)
        handle = launch_leader(self.runtime, gang, directory, self.folder / "checkpoints")
        self._handles.append(handle)
        return handle

    def lines(self) -> list[str]:
        return self.records.read_text().splitlines() if self.records.exists() else []

    def clean(self) -> None:
        for handle in self._handles:
            handle.kill()


def a_task(
    generation: int = 1, *, samples: tuple[int, ...] = (1, 2), step: str = "step", **arguments: int
) -> agents_pb2.DesiredGang:
    spec = task_of(
        Workload(model="tiny", params="1K", global_batch=64),
        StepTarget(target=f"tests.support.tiny_step:{step}", arguments=tuple(arguments.items())),
        "my-cpu",
        ProfilingOptions(samples=samples, host_parameters=2**12),
    )
    return agents_pb2.DesiredGang(
        job=spec.name,
        generation=generation,
        shares=[agents_pb2.AgentShare(node="n", gpu_indices=[0])],
        leader="n",
        members=("n",),
        gpu_type="my-cpu",
        iter_time_s=60.0,
        iterations_total=spec.iterations,
        command=spec.command,
        launch=launch_pb2.Launch(runtime=spec.runtime),
    )


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def node(tmp_path: Path, collector: Collector) -> Iterator[Node]:
    server = grpc.server(ThreadPoolExecutor(2))
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "AddProfiles": grpc.unary_unary_rpc_method_handler(
            collector.AddProfiles,
            request_deserializer=estimates_pb2.AddProfilesRequest.FromString,
            response_serializer=estimates_pb2.AddProfilesResponse.SerializeToString,
        ),
        "GetProfiling": grpc.unary_unary_rpc_method_handler(
            collector.GetProfiling,
            request_deserializer=estimates_pb2.GetProfilingRequest.FromString,
            response_serializer=estimates_pb2.Profiling.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tessera.v1.Estimates", handlers),)
    )
    started = Node(tmp_path, server.add_insecure_port("127.0.0.1:0"))
    server.start()
    yield started
    started.clean()
    server.stop(None).wait()


async def end_of(handle: MemberHandle) -> MemberExit:
    await handle.begun()
    return await handle.ended()


def record_keys(request: estimates_pb2.AddProfilesRequest) -> list[tuple[str, float, int]]:
    return [(r.kind, r.samples, r.tensor_parallel) for r in request.layers]


async def test_a_killed_task_continues_where_it_was(node: Node, collector: Collector) -> None:
    sizes = (1, 2, 4, 8, 16)
    first = node.start(1, sizes)
    await until(lambda: len(node.lines()) >= 2)
    first.kill()
    assert (await end_of(first)).outcome is ExitOutcome.FAILED
    lines = node.lines()
    assert not collector.found
    with node.records.open("a") as file:
        file.write(lines[0] + "\n")  # as if by an older process that lived on
        file.write('{"kind": "cut off')
    second = node.start(2, sizes)
    assert await end_of(second) == MemberExit(outcome=ExitOutcome.SUCCEEDED)
    assert node.lines()[: len(lines)] == lines
    (request,) = collector.found
    assert len(set(record_keys(request))) == len(record_keys(request)) == len(node.lines()) - 1
    assert {r.samples for r in request.layers} == set(sizes)
    progress = second.observe()
    assert progress is not None
    assert (progress.report.iterations_done, progress.report.iter_time_s) == (len(sizes), 0.0)


async def test_a_stopped_task_ends_between_two_records(node: Node, collector: Collector) -> None:
    handle = node.start(1, (1, 2, 4, 8, 16, 32))
    await until(lambda: len(node.lines()) >= 1)
    handle.stop()
    assert await end_of(handle) == MemberExit(outcome=ExitOutcome.STOPPED)
    assert all(json.loads(line) for line in node.lines())
    assert not collector.found


async def test_records_are_sent_again_as_the_same_request_until_a_server_has_them(
    node: Node, collector: Collector
) -> None:
    collector.refusals = [(grpc.StatusCode.UNAVAILABLE, "the database is away")]
    assert (await end_of(node.start(samples=(1,)))).outcome is ExitOutcome.SUCCEEDED
    first, second = collector.found
    assert first == second
    assert len(collector.questions) == 1  # the server knows no limit, so nothing is left out
    assert not first.left_out
    assert first.request_id.startswith("profile-")
    layers = {r.kind: r.layers for r in first.layers}
    assert sum(layers.values()) >= 2


def sizes_of(request: estimates_pb2.AddProfilesRequest) -> list[tuple[float, int]]:
    return [(size.samples, size.tensor_parallel) for size in request.left_out]


async def test_a_task_at_its_gpu_seconds_sends_what_is_whole_and_says_what_it_left_out(
    node: Node, collector: Collector
) -> None:
    assert (await end_of(node.start(1, (1, 4)))).outcome is ExitOutcome.SUCCEEDED
    clock = node.records.with_name(CLOCK_FILE)
    held_s = json.loads(clock.read_text())["held_s"]
    assert held_s > sum(json.loads(line)["device_s"] for line in node.lines())
    clock.write_text(json.dumps({"held_s": 960.0}))
    end = await end_of(node.start(2, (1, 2, 4, 8)))
    assert end == MemberExit(outcome=ExitOutcome.SUCCEEDED)
    first, second = collector.found
    assert {r.samples for r in second.layers} == {1, 4}
    assert record_keys(second) == record_keys(first)
    assert sizes_of(second) == [(2.0, 1), (8.0, 1)]
    assert "960 GPU-seconds (setting profile_task_gpu_s)" in second.skip_reason
    assert not sizes_of(first)
    assert not first.skip_reason


async def test_a_task_whose_workload_has_no_time_left_measures_nothing_and_reports_it(
    node: Node, collector: Collector
) -> None:
    collector.left_s = 0.0
    assert (await end_of(node.start(samples=(1, 2)))).outcome is ExitOutcome.SUCCEEDED
    (request,) = collector.found
    assert not request.layers
    assert sizes_of(request) == [(1.0, 1), (2.0, 1)]
    assert "1,800 s (setting profile_limit_s)" in request.skip_reason
    (question,) = collector.questions
    assert question.workload.model == "tiny"
    assert not node.lines()
    assert not request.host.updates
    assert request.host.update_gap == request.host.copy_gap == request.skip_reason


async def test_a_task_measures_its_host_once_and_a_device_again_if_it_was_another(
    node: Node, collector: Collector
) -> None:
    assert (await end_of(node.start(1, (1,)))).outcome is ExitOutcome.SUCCEEDED
    assert (await end_of(node.start(2, (1, 2)))).outcome is ExitOutcome.SUCCEEDED
    first, second = collector.found
    cores = [rate.cores for rate in first.host.updates]
    assert cores[0] == 1
    assert cores[-1] == len(os.sched_getaffinity(0))
    assert all(rate.bytes_per_s > 0 for rate in first.host.updates)
    assert not first.host.HasField("to_device_bytes_per_s")
    assert "no GPU is visible to jax" in first.host.copy_gap
    assert not first.host.update_gap
    assert second.host == first.host
    assert node.records.with_name(HOST_FILE).exists()
    # Records of another device are set aside, and measured again.
    lines = node.lines()
    node.records.write_text("".join(f"{line}\n" for line in lines).replace('"cpu"', '"NVIDIA A40"'))
    assert (await end_of(node.start(3, (1, 2)))).outcome is ExitOutcome.SUCCEEDED
    assert len(node.lines()) == len(lines)
    assert {json.loads(line)["device"] for line in node.lines()} == {"cpu"}
    assert node.records.with_suffix(".elsewhere").exists()


async def test_a_clock_that_another_program_wrote_fails_the_task(node: Node) -> None:
    clock = node.records.with_name(CLOCK_FILE)
    clock.parent.mkdir(parents=True)
    clock.write_text('{"held_s": []}')
    end = await end_of(node.start(samples=(1,)))
    assert end.outcome is ExitOutcome.FAILED
    assert "the time that the task has used cannot be read" in end.error


async def test_refused_records_fail_the_task_with_the_servers_message(
    node: Node, collector: Collector
) -> None:
    collector.refusals = [(grpc.StatusCode.INVALID_ARGUMENT, "layers[0].forward_s: it is nan")]
    end = await end_of(node.start(samples=(1,)))
    assert end.outcome is ExitOutcome.FAILED
    assert end.error == "the server refused the records: layers[0].forward_s: it is nan"


def test_a_node_without_jax_gets_installation_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        NotAllowed,
        match=r"jax and equinox, which node n7 does not have: .*tessera-scheduler\[estimator\]",
    ):
        require_jax("n7")


def test_a_runtime_that_the_agent_lacks_is_refused(tmp_path: Path) -> None:
    runtimes = RuntimeChooser({REPLAY: ReplayRuntime()}, REPLAY)
    with pytest.raises(InvalidInput, match="no runtime 'profile'; upgrade"):
        runtimes.choose(a_task())


def test_a_program_sees_only_its_own_gpus_among_those_of_the_agent() -> None:
    own = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert visible_devices(own, [0, 2])["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert visible_devices(own, [3])["HIP_VISIBLE_DEVICES"] == "3"
