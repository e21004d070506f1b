"""The process of a profiling task: killed halfway and restarted, refused, or stopped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tessera.estimator.profiling.tasks import ProfilingOptions, StepTarget, task_of
from tessera.formulation.errors import InvalidInput, NotAllowed
from tessera.formulation.runtimes import REPLAY
from tessera.formulation.values import Cell, Workload
from tessera.service.agent.gangs import Gang
from tessera.service.agent.isolation import visible_devices
from tessera.service.agent.runtimes.profiler import ProfilerRuntime
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    MemberExit,
    MemberHandle,
    RuntimeChooser,
)
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.service.profileclock import CLOCK_FILE
from tessera.service.profiletask import HOST_FILE, RECORDS_FILE, require_jax
from tessera.v1 import estimates_pb2
from tests.support.agents import launch_leader, until

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
        return estimates_pb2.AddProfilesResponse(added=len(request.layers))

    def GetProfiling(self, request: Any, context: Any) -> estimates_pb2.Profiling:
        self.questions.append(request)
        if self.left_s is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such cluster")
        job = a_task().job
        task = estimates_pb2.ProfilingTask(job=job, left_seconds=self.left_s)
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
) -> Gang:
    spec = task_of(
        Workload(model="tiny", params="1K", global_batch=64),
        StepTarget(target=f"tests.support.tiny_step:{step}", arguments=tuple(arguments.items())),
        "my-cpu",
        ProfilingOptions(samples=samples, host_parameters=2**12),
    )
    return Gang(
        job=spec.name,
        generation=generation,
        shares=(("n", (0,)),),
        leader="n",
        members=("n",),
        cell=Cell(gpu_type="my-cpu", gpus=1, pipeline_degree=1),
        iter_time_s=60.0,
        iterations_total=spec.iterations,
        command=spec.command,
        runtime=spec.runtime,
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
    assert (progress.iterations, progress.iter_time_s) == (len(sizes), 0.0)


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
    assert "960 GPU-seconds (setting profile_task_gpu_s)" in second.left_out_reason
    assert not sizes_of(first)
    assert not first.left_out_reason


async def test_a_task_whose_workload_has_no_time_left_measures_nothing_and_reports_it(
    node: Node, collector: Collector
) -> None:
    collector.left_s = 0.0
    assert (await end_of(node.start(samples=(1, 2)))).outcome is ExitOutcome.SUCCEEDED
    (request,) = collector.found
    assert not request.layers
    assert sizes_of(request) == [(1.0, 1), (2.0, 1)]
    assert "1,800 s (setting profile_limit_s)" in request.left_out_reason
    (question,) = collector.questions
    assert question.workload.model == "tiny"
    assert not node.lines()
    assert not request.host.updates
    assert request.host.update_gap == request.host.copy_gap == request.left_out_reason


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


async def test_a_missing_step_fails_and_the_error_says_what_to_do(node: Node) -> None:
    end = await end_of(node.start(samples=(1,), step="absent"))
    assert end.outcome is ExitOutcome.FAILED
    assert "has no function absent" in end.error


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
