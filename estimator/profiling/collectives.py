"""Timing of collectives on the available JAX devices, as rows in the format of the tables.

All processes of a ``jax.distributed`` job call :func:`time_collectives` with the same arguments. Each
process is a node.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.estimator.collectives.records import CommRecord
from tessera.estimator.plans import Primitive, Shape
from tessera.formulation.base.errors import InvalidInput

ELEMENT_BYTES: Final = 4  # float32
REPEATS: Final = 5
_AXES: Final = ("node_block", "node", "gpu_block", "gpu")
_GROUP: Final = ("node", "gpu")
_MOST_LOOPS: Final = 50
_LOOPED_BYTES: Final = 2**27
"""Bytes that the repeats of a collective in one timed run move. Small collectives are repeated often,
so that dispatch is a small part of the run. Large ones are repeated only a few times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementConditions:
    """The conditions of a measurement.

    ``network`` and ``gpu_type`` name the tables. ``date`` is provenance.
    """

    gpu_type: str
    network: str
    date: str
    repeats: int = REPEATS
    clock: Callable[[], float] = time.perf_counter


def available_shape() -> Shape:
    """Return the available devices as a shape, with a process as a node."""
    nodes = jax.process_count()
    return Shape(nodes=nodes, gpus_per_node=len(jax.devices()) // nodes)


def time_collectives(
    primitives: Iterable[Primitive],
    sizes_bytes: Sequence[int],
    groups: Iterable[Shape],
    bench: MeasurementConditions,
) -> list[CommRecord]:
    """Return a row for each primitive, group and size.

    Groups of n nodes x g GPUs cover the machine and run at the same time. A size that cannot be
    divided evenly among a group is rounded up, and the row has the size that was sent. ``SEND``
    only runs on groups of two. Other groups are skipped.

    Raises:
        InvalidInput: a group does not divide the machine evenly or has one GPU, or a size or a time
            is not positive.
    """
    there = available_shape()
    shapes = list(groups)
    for group in shapes:
        _check_group(group, there)
    if bad := [size for size in sizes_bytes if size <= 0]:
        raise InvalidInput("sizes_bytes", f"must be positive, not {bad[0]}")
    return [
        _row(primitive, elements, group, there, bench)
        for primitive in primitives
        for group in shapes
        if primitive is not Primitive.SEND or group.gpus == 2
        for elements in sorted({_elements(size, group.gpus) for size in sizes_bytes})
    ]


def group_mesh(group: Shape, there: Shape) -> Mesh:
    """Return the machine divided into groups along the axes node and gpu.

    A group has neighbouring GPUs of a node, on neighbouring nodes.
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.array(devices).reshape(
        there.nodes // group.nodes,
        group.nodes,
        there.gpus_per_node // group.gpus_per_node,
        group.gpus_per_node,
    )
    return Mesh(grid, _AXES)


def collective_program(
    primitive: Primitive, over: Mesh, loops: int
) -> Callable[[jax.Array], jax.Array]:
    """Return a function that runs the collective ``loops`` times on an array across all devices.

    Each run depends on the previous one, so that none is optimized away or overlapped.
    """
    size = over.shape["node"] * over.shape["gpu"]
    body = _body(primitive, size)

    def run(x: jax.Array) -> jax.Array:
        end: jax.Array = lax.fori_loop(0, loops, lambda _, y: body(y), x)
        return end

    spec = PartitionSpec(_AXES)
    cut: Callable[[jax.Array], jax.Array] = jax.shard_map(
        run, mesh=over, in_specs=spec, out_specs=spec, check_vma=False
    )
    return cut


def _body(primitive: Primitive, size: int) -> Callable[[jax.Array], jax.Array]:
    match primitive:
        case Primitive.ALL_REDUCE:
            return lambda x: lax.psum(x, _GROUP)
        case Primitive.REDUCE_SCATTER:
            return lambda x: lax.dynamic_update_slice(
                x, lax.psum_scatter(x, _GROUP, tiled=True), (0,)
            )
        case Primitive.ALL_GATHER:
            return lambda x: lax.optimization_barrier(lax.all_gather(x, _GROUP, tiled=True))[
                : x.shape[0]
            ]
        case Primitive.ALL_TO_ALL:
            return lambda x: lax.all_to_all(x, _GROUP, 0, 0, tiled=True)
        case Primitive.SEND:
            return lambda x: lax.ppermute(x, _GROUP, [(0, 1)])


def _row(
    primitive: Primitive, elements: int, group: Shape, there: Shape, bench: MeasurementConditions
) -> CommRecord:
    times = _times_s(primitive, elements, group_mesh(group, there), bench)
    mean = statistics.fmean(times)
    if not (math.isfinite(mean) and mean > 0):
        raise InvalidInput(
            "clock", f"measured {mean} s for {primitive} of {elements} elements; check the clock"
        )
    return CommRecord(
        primitive=primitive.value,
        gpu_type=bench.gpu_type,
        network=bench.network,
        num_nodes=there.nodes,
        gpus_per_node=there.gpus_per_node,
        group_size=group.gpus,
        group_nodes=group.nodes,
        group_gpus_per_node=group.gpus_per_node,
        num_groups=there.gpus // group.gpus,
        bytes=elements * ELEMENT_BYTES,
        time_s=mean,
        device=f"{there.gpus} x {jax.devices()[0].device_kind}",
        versions=_versions(),
        date=bench.date,
        spread=statistics.pstdev(times) / mean,
    )


def _times_s(
    primitive: Primitive, elements: int, over: Mesh, bench: MeasurementConditions
) -> list[float]:
    """Return the seconds of one collective in each repeat, after a warm-up run."""
    group = over.shape["node"] * over.shape["gpu"]
    own = elements // group if primitive is Primitive.ALL_GATHER else elements
    loops = max(3, min(_MOST_LOOPS, _LOOPED_BYTES // (elements * ELEMENT_BYTES)))
    sharding = NamedSharding(over, PartitionSpec(_AXES))
    make = jax.jit(lambda: jnp.zeros(own * over.size, jnp.float32), out_shardings=sharding)
    x = make()
    run = jax.jit(collective_program(primitive, over, loops))
    jax.block_until_ready(run(x))
    times = []
    for _ in range(bench.repeats):
        start = bench.clock()
        jax.block_until_ready(run(x))
        times.append((bench.clock() - start) / loops)
    return times


def _elements(size_bytes: int, group: int) -> int:
    return max(1, math.ceil(size_bytes / ELEMENT_BYTES / group)) * group


def _versions() -> str:
    client = jax.devices()[0].client
    platform = " ".join(f"{client.platform} {client.platform_version}".split())
    return f"jax {version('jax')}, jaxlib {version('jaxlib')}, {platform}"


def _check_group(group: Shape, there: Shape) -> None:
    if group.gpus < 2:
        raise InvalidInput("groups", "a group of one GPU sends nothing; give two GPUs or more")
    if (
        min(group.nodes, group.gpus_per_node) < 1
        or there.nodes % group.nodes
        or there.gpus_per_node % group.gpus_per_node
    ):
        raise InvalidInput(
            "groups",
            f"groups of {group.nodes} nodes x {group.gpus_per_node} GPUs do not divide the available"
            f" {there.nodes} nodes x {there.gpus_per_node} GPUs evenly",
        )
