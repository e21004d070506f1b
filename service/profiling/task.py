"""The process of a profiling task: it measures layers on one GPU and sends the records to a server.

It is run as ``python -m tessera.service.profiling.task``, with a specification as JSON on standard
input. Empty input means that the agent died before it had recorded this process's id. The process
leaves the files that an agent looks for (``tessera.service.agent.runtimes.replay_job``).

Records are written to the job's folder as they are measured, so an interrupted task continues where
it was. At the end all of them are sent to a server together. At a limit, the process stops between
two records, sends what can be used, and reports what it left out. Nothing keeps an older generation from
writing to the folder: a record is true whoever measured it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import Message

from tessera.client import ChannelRefused, ChannelSettings, open_channel
from tessera.estimator.profiling.limits import ProfilingLimits
from tessera.formulation.base.errors import NotAllowed, TesseraError
from tessera.formulation.base.logs import make_handler
from tessera.formulation.base.release import install_hint
from tessera.formulation.records.estimates import HostRates
from tessera.service.agent.files import read_json, write_json
from tessera.service.agent.lease import LeaseWatch
from tessera.service.agent.runtimes.replay_job import STOP_SIGNALS, announce_running, write_outcome
from tessera.service.profiling.clock import CLOCK_FILE, TaskClock
from tessera.service.server.convert.profiles import of_host
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc as rpc

if TYPE_CHECKING:
    from tessera.estimator.profiling.measurements import MeasuredLayers
    from tessera.estimator.profiling.records import ProfileRecord

log = logging.getLogger(__name__)

RECORDS_FILE: Final = "records.jsonl"
HOST_FILE: Final = "host.json"
CALL_S, RETRY_S = 20.0, 2.0
"""Deadline of a call, and pause after a server did not take the records."""

LOOK_S: Final = 1.0
"""Seconds between two looks at the agent's lease."""

ASK_S: Final = 5.0
"""Deadline of a call that asks for the time left. Without an answer, the task goes on."""

MAX_REFUSED: Final = 5
"""Number of failed attempts to read the files for TLS after which a task gives up."""

RETRY_CODES: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Status codes after which another server, or the same one later, may answer otherwise."""

TaskSpec = Mapping[str, Any]


def require_jax(node: str) -> None:
    """Check that JAX can be imported.

    Raises:
        NotAllowed: it cannot; the message says what to install.
    """
    missing = [n for n in ("jax", "equinox") if importlib.util.find_spec(n) is None]
    if missing:
        raise NotAllowed(
            f"profiling needs {' and '.join(missing)}, which node {node} does not have: install them there"
            f" with {install_hint('estimator')}, or go on with analytic estimates"
        )


def start_clock(spec: TaskSpec, begun_s: float) -> TaskClock:
    """Return the clock of a process that began at ``begun_s``, by ``time.monotonic``.

    Raises:
        NotAllowed: its file was written by another program.
        OSError: its file cannot be read.
    """
    limits = ProfilingLimits(**json.loads(spec["task"])["limits"])
    path = os.path.join(spec["checkpoints"], CLOCK_FILE)
    try:
        return TaskClock.resume(path, limits, time.monotonic, begun_s)
    except (ValueError, TypeError) as error:
        raise NotAllowed(f"the time that the task has used cannot be read: {error}") from error


def ask_time_left(spec: TaskSpec) -> float | None:
    """Return the seconds that the workload's profiling has left, or None if no server says so."""
    model, params, batch = json.loads(spec["task"])["workload"]
    request = pb.GetProfilingRequest(
        parent=f"clusters/{spec['cluster']}",
        workload=pb.Workload(model=model, params=params, global_batch=batch),
    )
    settings = channel_settings(spec["channel"])
    for server in spec["servers"]:
        try:
            with open_channel(server, settings) as channel:
                state = rpc.EstimatesStub(channel).GetProfiling(request, timeout=ASK_S)
        except (ChannelRefused, grpc.RpcError) as error:
            log.warning(
                "a server has not answered how much time is left",
                extra={"event": "time_left_unknown", "server": server, "error": error},
            )
            continue
        for task in state.tasks:
            if task.job == spec["job"] and task.HasField("remaining_seconds"):
                return task.remaining_seconds
    return None


def measure_workload(
    spec: TaskSpec, held: threading.Lock, clock: TaskClock
) -> pb.AddProfilesRequest:
    """Measure what is left to measure within the limits, and return all of it as a request.

    Each record is written under ``held``.

    Raises:
        TesseraError: it cannot be measured; says why.
    """
    # These need JAX, which starts slowly and which a node may lack.
    from tessera.estimator.profiling import measurements, records, stages  # noqa: PLC0415

    task = json.loads(spec["task"])
    path = Path(spec["checkpoints"]) / RECORDS_FILE
    known = measurements.load_records(path)
    done = len(known)

    def save_record(record: ProfileRecord, total: int) -> None:
        nonlocal done
        with held:
            records.append_records([record], path)
            clock.save()
        done += 1
        write_progress(spec, len(task["sizes"]) * done / total)

    write_progress(spec, 0.0)
    announce_running()
    if (left_s := ask_time_left(spec)) is not None:
        clock.set_left(left_s)
    os.dup2(2, 1)  # the agent has stopped listening: what a step prints goes to the log
    measured = measurements.measure_layers(
        stages.StepMaker(target=task["step"], arguments=task["arguments"]),
        [tuple(size) for size in task["sizes"]],
        known=known,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        report=save_record,
        stop_reason=clock.stop_reason,
    )
    for samples, tp in measured.too_large:
        log.warning(
            "samples do not fit and are left out",
            extra={"event": "size_too_large", "samples": samples, "tensor_degree": tp},
        )
    if measured.stop_reason:
        log.warning(
            "the measuring was stopped before all sizes were measured",
            extra={
                "event": "sizes_left_out",
                "cause": measured.stop_reason,
                "left_out": measured.left_out,
            },
        )
    rates = measure_host_once(spec, task["host_parameters"], held, clock)
    return request_of(spec, task, measured, rates)


def measure_host_once(
    spec: TaskSpec, parameters: int, held: threading.Lock, clock: TaskClock
) -> HostRates | None:
    """Return the rates of the node's host, measured here or by an earlier process of the task.

    If ``parameters`` is 0, the task does not measure them.
    """
    from tessera.estimator.profiling import host  # noqa: PLC0415 - only tasks that get so far

    if not parameters:
        return None
    path = os.path.join(spec["checkpoints"], HOST_FILE)
    if stored := read_json(path):
        return HostRates(**{**stored, "updates": tuple(map(tuple, stored["updates"]))})
    if reason := clock.stop_reason():
        return host.unmeasured_host(reason)
    rates = host.measure_host("jax", effort=host.HostEffort(parameters=parameters))
    for gap in filter(None, (rates.copy_gap, rates.update_gap)):
        log.warning(
            "a rate of the host was not measured", extra={"event": "host_unmeasured", "cause": gap}
        )
    with held:
        write_json(path, asdict(rates))
    return rates


def request_of(
    spec: TaskSpec, task: TaskSpec, measured: MeasuredLayers, rates: HostRates | None
) -> pb.AddProfilesRequest:
    """Return the records and what was left out as a request that is safe to repeat."""
    model, params, batch = task["workload"]
    records = measured.records
    request = pb.AddProfilesRequest(
        parent=f"clusters/{spec['cluster']}",
        gpu_type=spec["gpu_type"],
        task=spec["job"],
        workload=pb.Workload(model=model, params=params, global_batch=batch),
        source=task["source"],
        dtype=records[0].dtype if records else "",
        device=records[0].device if records else "",
        versions=records[0].versions if records else {},
        date=max((r.date for r in records), default=""),
        layers=[
            pb.LayerProfile(
                kind=r.kind,
                layers=measured.layers[r.kind],
                samples=r.samples,
                tensor_parallel=r.tp,
                forward_s=r.forward_s,
                backward_s=r.backward_s,
                method=r.method,
                repeats=r.repeats,
                device_s=r.device_s,
            )
            for r in records
        ],
        left_out=[pb.ProfileSize(samples=s, tensor_parallel=tp) for s, tp in measured.left_out],
        skip_reason=measured.stop_reason if measured.left_out else "",
        host=None if rates is None else of_host(rates),
    )
    request.request_id = f"profile-{_digest(request)[:32]}"
    return request


def _digest(message: Message) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def send_records(
    request: pb.AddProfilesRequest, servers: Sequence[str], channel_files: Mapping[str, str]
) -> None:
    """Send the records to one server after another until one accepts them, without a time limit.

    ``channel_files`` are the agent's files for TLS, by their names in ``ChannelSettings``. They may
    be replaced at any time.

    Raises:
        NotAllowed: a server refused them, or none can be called; says why.
    """
    turn = refused = 0
    while True:
        address = servers[turn % len(servers)]
        turn += 1
        try:
            with open_channel(address, channel_settings(channel_files)) as channel:
                rpc.EstimatesStub(channel).AddProfiles(request, timeout=CALL_S)
                return
        except ChannelRefused as error:
            refused += 1  # the files may just be replaced
            if refused == MAX_REFUSED:
                raise NotAllowed(f"the records cannot be sent: {error}") from error
        except grpc.RpcError as error:
            if error.code() not in RETRY_CODES:
                raise NotAllowed(f"the server refused the records: {error.details()}") from error
            log.warning(
                "a server has not accepted the records yet",
                extra={"event": "records_not_sent", "server": address, "error": error.details()},
            )
        time.sleep(RETRY_S)


def channel_settings(files: Mapping[str, str]) -> ChannelSettings:
    """Return the settings of a channel with these files, by their names in ``ChannelSettings``."""
    return ChannelSettings(
        authorities=files.get("authorities", ""),
        certificate=Path(files["certificate"]) if "certificate" in files else None,
        key=Path(files["key"]) if "key" in files else None,
    )


def write_progress(spec: TaskSpec, sizes_done: float) -> None:
    """Write the progress. Its iteration time is 0 because a task has no meaningful one.

    All sizes are done once the server has the records, with what was left out.
    """
    path = os.path.join(spec["directory"], "progress.json")
    write_json(path, {"iterations_done": sizes_done, "iter_time_s": 0.0})


def _stop_at_signal(spec: dict[str, Any], held: threading.Lock, clock: TaskClock) -> None:
    """End this process at SIGTERM or with the agent's lease, whatever its main thread is doing.

    It ends between two records.
    """
    lease = LeaseWatch(spec["lease"])
    while signal.sigtimedwait(STOP_SIGNALS, LOOK_S) is None and lease.left_s() > 0:
        pass
    with held:
        try:
            clock.save()
        except OSError as error:
            log.warning(
                "the GPU-seconds of the task are lost",
                extra={"event": "gpu_seconds_lost", "error": error},
            )
        os._exit(write_outcome(spec, "stopped"))


def main() -> int:
    """Read the specification and measure; return the exit status."""
    begun_s = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    logging.basicConfig(level=logging.INFO, handlers=[make_handler()])
    text = sys.stdin.read()
    if not text:
        return 0
    spec, held = json.loads(text), threading.Lock()
    try:
        clock = start_clock(spec, begun_s)
        threading.Thread(target=_stop_at_signal, args=(spec, held, clock), daemon=True).start()
        require_jax(spec["node"])
        request = measure_workload(spec, held, clock)
        send_records(request, spec["servers"], spec["channel"])
        write_progress(spec, len(json.loads(spec["task"])["sizes"]))
        outcome, problem = "succeeded", ""
    except (TesseraError, OSError) as error:
        outcome, problem = "failed", str(error)
    held.acquire()  # never released: from here on no other thread ends this process
    return write_outcome(spec, outcome, problem)


if __name__ == "__main__":
    sys.exit(main())
