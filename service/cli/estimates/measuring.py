"""The parts of the command line that need JAX, which starts slowly. They are imported on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.estimator.collectives import CommRecord
from tessera.estimator.graph import Graph, Untraceable
from tessera.estimator.plans import Primitive, Shape, powers_dividing
from tessera.estimator.profiling.collectives import (
    MeasurementConditions,
    available_shape,
    time_collectives,
)
from tessera.estimator.profiling.records import ProfileRecord, append_records, read_profile_records
from tessera.estimator.profiling.stages import StepMaker, kinds_of, profile_stage
from tessera.estimator.profiling.timing import TimingEffort, device_name, library_versions
from tessera.estimator.tracing.step import Step, load_step
from tessera.estimator.tracing.trace import graph_of_step
from tessera.formulation.base.errors import InvalidInput


def graph_of(target: str, arguments: Mapping[str, Any]) -> Graph:
    """Return the graph of a step. Its layers' kinds are named at one sample, as in profiles.

    Raises:
        Untraceable: says why the step cannot be traced, and what to do.
    """
    return graph_of_step(_at_one_sample(target, arguments))


def _at_one_sample(target: str, arguments: Mapping[str, Any]) -> Step:
    try:
        return StepMaker(target=target, arguments=arguments).step(1)
    except Untraceable:  # the step has its own batch and takes no samples
        return load_step(target, arguments)


def local_device() -> str:
    """Return the kind of this machine's device."""
    return device_name()


def measure_layers(
    source: tuple[str, Mapping[str, Any]],
    sizes: Sequence[tuple[int, int]],
    *,
    to: Path | None,
    date: str,
    warmups: int,
    repeats: int,
) -> Iterator[list[ProfileRecord]]:
    """Yield the new records of each (samples, tp), and append them to the file.

    Records that the file already has are left out.

    Raises:
        InvalidInput: the file is of another device or other versions.
        Untraceable: the step cannot be traced at these sizes.
    """
    step = StepMaker(target=source[0], arguments=source[1])
    exists = to is not None and to.exists()
    known = (
        read_profile_records(to, versions=library_versions(), device=device_name())
        if to and exists
        else []
    )
    names = kinds_of(step)
    for samples, tp in sizes:
        effort = TimingEffort(warmups=warmups, repeats=repeats)
        records = profile_stage(
            step, samples, tp, date=date, known=known, effort=effort, names=names
        )
        if to is not None:
            append_records(records, to)
        known += records
        yield records


def measure_collectives(
    primitives: Sequence[Primitive],
    sizes_bytes: Sequence[int],
    groups: Sequence[Shape],
    *,
    names: tuple[str, str],
    date: str,
    repeats: int,
    report: Callable[[], None],
) -> list[CommRecord]:
    """Return records of the devices in this machine.

    ``names`` are those of the GPU type and the network. ``report`` is called after each primitive.

    Raises:
        InvalidInput: there is only one device, or the devices cannot be divided into the groups.
    """
    devices = available_shape()
    if devices.gpus < 2:
        raise InvalidInput(
            "devices", f"there is only one ({device_name()}), but collectives need two or more"
        )
    bench = MeasurementConditions(
        gpu_type=names[0] or _as_type(device_name()), network=names[1], date=date, repeats=repeats
    )
    records: list[CommRecord] = []
    for primitive in primitives:
        records += time_collectives([primitive], sizes_bytes, groups or _groups(devices), bench)
        report()
    return records


def _groups(devices: Shape) -> list[Shape]:
    """Return all groups of powers of two into which the devices can be divided."""
    shapes = (
        Shape(nodes=n, gpus_per_node=g)
        for n in powers_dividing(devices.nodes)
        for g in powers_dividing(devices.gpus_per_node)
    )
    return [shape for shape in shapes if shape.gpus > 1]


def _as_type(device: str) -> str:
    """Return a device's kind in the notation of GPU types."""
    return "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
