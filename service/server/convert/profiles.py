"""Measured layers from requests, and the state of profiling."""

from __future__ import annotations

from typing import Any, Final, Literal

from tessera.estimator.profiling.records import METHODS
from tessera.estimator.profiling.tasks import ProfilingStatus, TaskState, TaskStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.limits import DTYPES
from tessera.formulation.records.estimates import (
    HostProfile,
    HostRates,
    ProfileGap,
    ProfileRow,
)
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.estimates import to_workload
from tessera.v1 import estimates_pb2 as pb

MAX_RECORDS: Final = 10_000
MAX_VERSIONS: Final = 32
MAX_LAYERS: Final = 10**6
MAX_LAYER_S, MAX_DEVICE_S = 1e4, 1e7
MAX_CORE_RATES, MAX_CORES = 64, 4096
MIN_HOST_RATE, MAX_HOST_RATE = 1e5, 1e14
"""Range of the rates of hosts in bytes per second. A rate outside it is in a wrong unit."""
MIN_LAYER_S: Final = 1e-12
"""Range of the times of one layer in seconds. A time outside it is in a wrong unit."""


_CopyRate = Literal["to_device_bytes_per_s", "to_host_bytes_per_s"]


def to_profiles(message: pb.AddProfilesRequest) -> list[ProfileRow]:
    """Return the measured layers, each kind once at each size, and the same kinds at all sizes.

    The list is empty if all sizes were left out.

    Raises:
        InvalidInput: NaN, an invalid time, or a kind that is missing at a size; names the field.
    """
    m = message
    if m.left_out and not m.layers:
        return []
    fields.require_batch_size("layers", len(m.layers), MAX_RECORDS)
    if m.dtype not in DTYPES:
        raise InvalidInput("dtype", f"must be one of {', '.join(DTYPES)}, not {m.dtype[:20]!r}")
    if len(m.versions) > MAX_VERSIONS:
        raise InvalidInput("versions", f"must have at most {MAX_VERSIONS} entries")
    versions = tuple(
        sorted(
            (fields.require_text("versions", k, 100), fields.require_text("versions", v, 1000))
            for k, v in m.versions.items()
        )
    )
    workload = to_workload("workload", m.workload)
    gpu_type = names.require_gpu_type("gpu_type", m.gpu_type)
    task = names.require_identifier("task", m.task)
    source = fields.require_text("source", m.source, 4000, required=True)
    device = fields.require_text("device", m.device, 200, required=True)
    date = fields.require_text("date", m.date, 40, required=True)
    rows = [
        ProfileRow(
            workload=workload,
            gpu_type=gpu_type,
            task=task,
            source=source,
            dtype=m.dtype,
            device=device,
            versions=versions,
            date=date,
            **_layer(f"layers[{i}]", layer),
        )
        for i, layer in enumerate(m.layers)
    ]
    fields.require_distinct((f"layers[{i}]", (r.kind, r.samples, r.tp)) for i, r in enumerate(rows))
    _require_whole(rows)
    return rows


def to_gap(message: pb.AddProfilesRequest) -> ProfileGap | None:
    """Return the sizes that the task left out, or None if it measured all of them.

    Raises:
        InvalidInput: a size is impossible, given twice or among the layers, or there is no reason.
    """
    m = message
    if not m.left_out:
        if m.skip_reason:
            raise InvalidInput("skip_reason", "needs left_out; name the sizes")
        return None
    fields.require_batch_size("left_out", len(m.left_out), MAX_RECORDS)
    sizes = [
        (
            fields.require_real(f"left_out[{i}].samples", size.samples, 1e-3, 1e9),
            fields.require_whole(f"left_out[{i}].tensor_parallel", size.tensor_parallel, 1, 4096),
        )
        for i, size in enumerate(m.left_out)
    ]
    fields.require_distinct((f"left_out[{i}]", size) for i, size in enumerate(sizes))
    measured = {(layer.samples, layer.tensor_parallel) for layer in m.layers}
    for i, size in enumerate(sizes):
        if size in measured:
            raise InvalidInput(f"left_out[{i}]", "is among the layers; leave it out of one of them")
    return ProfileGap(
        workload=to_workload("workload", m.workload),
        gpu_type=names.require_gpu_type("gpu_type", m.gpu_type),
        task=names.require_identifier("task", m.task),
        source=fields.require_text("source", m.source, 4000, required=True),
        left_out=tuple(sizes),
        reason=fields.require_text("skip_reason", m.skip_reason, 1000, required=True),
    )


def to_host(message: pb.AddProfilesRequest) -> HostProfile | None:
    """Return the rates of the node's host, or None if the task did not measure them.

    Raises:
        InvalidInput: a rate is impossible, or absent without a reason; names the field.
    """
    if not message.HasField("host"):
        return None
    m = message.host
    if len(m.updates) > MAX_CORE_RATES:
        raise InvalidInput("host.updates", f"must have at most {MAX_CORE_RATES} entries")
    updates = tuple(
        (
            fields.require_whole(f"host.updates[{i}].cores", rate.cores, 1, MAX_CORES),
            fields.require_real(
                f"host.updates[{i}].bytes_per_s", rate.bytes_per_s, MIN_HOST_RATE, MAX_HOST_RATE
            ),
        )
        for i, rate in enumerate(m.updates)
    )

    def text(name: str) -> str:
        return fields.require_text(f"host.{name}", getattr(m, name), 1000)

    def rate(name: _CopyRate) -> float | None:
        if not m.HasField(name):
            return None
        return fields.require_real(f"host.{name}", getattr(m, name), MIN_HOST_RATE, MAX_HOST_RATE)

    try:
        rates = HostRates(
            to_device_bytes_per_s=rate("to_device_bytes_per_s"),
            to_host_bytes_per_s=rate("to_host_bytes_per_s"),
            copy_gap=text("copy_gap"),
            updates=updates,
            update_gap=text("update_gap"),
            method=text("method"),
            device=text("device"),
            date=text("date"),
        )
    except InvalidInput as wrong:
        raise InvalidInput(f"host.{wrong.field}", wrong.problem) from wrong
    return HostProfile(
        gpu_type=names.require_gpu_type("gpu_type", message.gpu_type),
        task=names.require_identifier("task", message.task),
        rates=rates,
    )


def of_host(rates: HostRates) -> pb.HostRates:
    """Return the message of a host's rates."""
    return pb.HostRates(
        to_device_bytes_per_s=rates.to_device_bytes_per_s,
        to_host_bytes_per_s=rates.to_host_bytes_per_s,
        copy_gap=rates.copy_gap,
        updates=[pb.CoreRate(cores=c, bytes_per_s=rate) for c, rate in rates.updates],
        update_gap=rates.update_gap,
        method=rates.method,
        device=rates.device,
        date=rates.date,
    )


def _layer(field: str, layer: pb.LayerProfile) -> dict[str, Any]:
    if layer.method not in METHODS:
        raise InvalidInput(f"{field}.method", f"must be one of {', '.join(METHODS)}")
    return {
        "kind": fields.require_text(f"{field}.kind", layer.kind, 1000, required=True),
        "layers": fields.require_whole(f"{field}.layers", layer.layers, 1, MAX_LAYERS),
        "samples": fields.require_real(f"{field}.samples", layer.samples, 1e-3, 1e9),
        "tp": fields.require_whole(f"{field}.tensor_parallel", layer.tensor_parallel, 1, 4096),
        "forward_s": fields.require_real(
            f"{field}.forward_s", layer.forward_s, MIN_LAYER_S, MAX_LAYER_S
        ),
        "backward_s": fields.require_real(
            f"{field}.backward_s", layer.backward_s, 0.0, MAX_LAYER_S
        ),
        "method": layer.method,
        "repeats": fields.require_whole(f"{field}.repeats", layer.repeats, 1, 10**6),
        "device_s": fields.require_real(f"{field}.device_s", layer.device_s, 0.0, MAX_DEVICE_S),
    }


def _require_whole(rows: list[ProfileRow]) -> None:
    """Check that every kind is present at every size: a missing one would seem to take no time."""
    sizes = {(r.samples, r.tp) for r in rows}
    have = {(r.kind, r.samples, r.tp) for r in rows}
    for kind in sorted({r.kind for r in rows}):
        for samples, tp in sorted(sizes):
            if (kind, samples, tp) not in have:
                raise InvalidInput(
                    "layers",
                    f"{kind} was not measured at {samples:g} samples and tensor degree {tp},"
                    " where others were; send sizes that are complete",
                )


_STATE: Final = {state: pb.ProfilingTask.State.Value(state.name) for state in TaskState}


def of_status(found: ProfilingStatus) -> pb.Profiling:
    """Return the message of the state of a workload's profiling."""
    return pb.Profiling(
        requested=found.asked,
        source=found.source,
        problem=found.problem,
        tasks=map(_of_task, found.tasks),
    )


def _of_task(task: TaskStatus) -> pb.ProfilingTask:
    return pb.ProfilingTask(
        gpu_type=task.gpu_type,
        job=task.job,
        state=_STATE[task.state],
        problem=task.problem,
        records=task.records,
        device_seconds=task.device_s,
        service_gpu_seconds=task.service_gpu_s,
        left_out=[pb.ProfileSize(samples=s, tensor_parallel=tp) for s, tp in task.left_out],
        remaining_seconds=task.left_s,
        host=None if task.host is None else of_host(task.host),
    )
