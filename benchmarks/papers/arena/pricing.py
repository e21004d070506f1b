"""Arena's pricing rules 1 and 3, which give iteration times to Cells that were not measured.

Rule 2 (0.9 for each halving of GPUs per node) is in ``tessera.formulation.cells.LOCALITY_FACTOR``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tessera.formulation.errors import InvalidInput
from tessera.formulation.information import MEASURED_GPU_COUNTS
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import BEST_FOUND, Cell, EstimateSource, Workload

SIZE_FACTOR: Final = 1.8
"""The throughput factor of a step down in model size (the artifact's PARAM_NUM_SCALE_FACTOR)."""
SLOWEST_S: Final = 300.0
"""The seconds above which an iteration is infeasible in the artifact."""
_UNITS: Final = {"M": 1e6, "B": 1e9}

_Shape = tuple[Workload, str, int, int]  # workload, type, GPUs, nodes


def parameter_count(params: str) -> float:
    """Return the number of parameters of a size, for example ``1.3B``.

    Raises:
        InvalidInput: the size is not a number with M or B.
    """
    try:
        return float(params[:-1]) * _UNITS[params[-1:]]
    except (KeyError, ValueError):
        raise InvalidInput("params", f"{params!r} is not a number with M or B, e.g. 1.3B") from None


def slow_left_out(profiles: Sequence[EstimateRecord]) -> list[EstimateRecord]:
    """Return the profiles, where a Cell of more than 300 s per iteration does not run."""
    return [replace(e, iter_time_s=math.inf) if e.iter_time_s > SLOWEST_S else e for e in profiles]


def sizes_inferred(
    profiles: Sequence[EstimateRecord], nodes: Sequence[NodeSpec], workloads: Sequence[Workload]
) -> list[EstimateRecord]:
    """Return the profiles with a row for every (workload, type, count) at its shape with fewest nodes.

    A combination that was not measured gets the iteration time of the next larger size of the same
    model and batch with a row at that shape (rule 3). If that row failed, the new one fails too. If
    there is no such size, it does not run, even if it runs in worse shapes. Counts are the five
    that Arena measures. ``workloads`` are those of jobs, which may have no row.
    """
    node = _node_sizes(nodes)
    at: dict[_Shape, float] = {}
    for e in profiles:
        spread = e.cell.nodes or math.ceil(e.cell.gpus / node.get(e.cell.gpu_type, 1))
        key = (e.workload, e.cell.gpu_type, e.cell.gpus, spread)
        at[key] = min(e.iter_time_s, at.get(key, math.inf))  # the best over plans
    sizes = _sizes([*(e.workload for e in profiles), *workloads])
    result = list(profiles)
    for workload in sorted(
        {w for mine in sizes.values() for w in mine},
        key=lambda w: (w.model, w.params, w.global_batch),
    ):
        larger = sizes[workload.model, workload.global_batch]
        larger = larger[larger.index(workload) + 1 :]
        for gpu_type, size in sorted(node.items()):
            for gpus in MEASURED_GPU_COUNTS:
                shape = (gpu_type, gpus, math.ceil(gpus / size))
                if (workload, *shape) not in at:
                    result.append(_inferred(workload, shape, larger, at))
    return result


def _inferred(
    workload: Workload,
    shape: tuple[str, int, int],
    larger: Sequence[Workload],
    at: Mapping[_Shape, float],
) -> EstimateRecord:
    time_s = math.inf
    for steps, other in enumerate(larger, start=1):
        if (other, *shape) in at:
            time_s = at[(other, *shape)] / SIZE_FACTOR**steps
            break
    gpu_type, gpus, nodes = shape
    return EstimateRecord(
        workload=workload,
        cell=Cell(gpu_type=gpu_type, gpus=gpus, pipeline_degree=BEST_FOUND, nodes=nodes),
        iter_time_s=time_s,
        source=EstimateSource.MEASURED,
        provenance="inferred from a larger size",
    )


def _sizes(workloads: Sequence[Workload]) -> dict[tuple[str, int], list[Workload]]:
    """Return the ascending sizes of each (model, batch): all that the model has at any batch."""
    batches: dict[str, set[int]] = {}
    params: dict[str, set[str]] = {}
    for w in workloads:
        batches.setdefault(w.model, set()).add(w.global_batch)
        params.setdefault(w.model, set()).add(w.params)
    return {
        (model, batch): [
            Workload(model=model, params=p, global_batch=batch)
            for p in sorted(params[model], key=parameter_count)
        ]
        for model, mine in batches.items()
        for batch in mine
    }


def _node_sizes(nodes: Sequence[NodeSpec]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes[node.gpu_type] = max(node.gpus, sizes.get(node.gpu_type, 0))
    return sizes
