"""The rows that a problem adds to a snapshot, and the snapshot with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tessera.formulation.base.tables import CellTable
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.snapshot import (
    STATE_CODE,
    WITHOUT_CELL,
    Allocations,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)
from tessera.formulation.state.tenants import Quotas, Tenants

Speeds = tuple[tuple[Cell, float], ...]
"""The samples/s of a workload on each Cell. Cells with 0 nodes have the fewest."""

_WAITING: Final = {
    **WITHOUT_CELL,
    "state": STATE_CODE[JobState.QUEUED],
    "since_s": 0.0,
    "generation": 0,
}
"""The columns of a job that holds no GPUs."""


@dataclass(slots=True)
class Additions:
    """The added rows of each table. Indices count from the first row of the snapshot.

    ``workloads`` maps speeds to the name of the first job that has them. Rows of jobs have
    ``speeds`` in place of a workload, and ``current`` in place of the columns of their Cell.
    """

    nodes: list[dict[str, Any]] = field(default_factory=list)
    workloads: dict[Speeds, str] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    allocations: list[dict[str, Any]] = field(default_factory=list)
    tenants: list[dict[str, Any]] = field(default_factory=list)
    quotas: list[dict[str, Any]] = field(default_factory=list)

    def add_to(self, base: Snapshot, gpu_types: Iterable[GpuType]) -> Snapshot:
        """Return ``base`` with the rows, and with ``gpu_types`` in place of its own."""
        cells = [cell for speeds in self.workloads for cell, _ in speeds]
        grown = replace(
            base,
            gpu_types=tuple(gpu_types),
            nodes=base.nodes.followed_by(Nodes.from_rows(self.nodes)),
            plans=tuple(dict.fromkeys((*base.plans, *(cell.plan for cell in cells)))),
            workloads=(
                *base.workloads,
                *(
                    Workload(model=name, params="any", global_batch=1)
                    for name in self.workloads.values()
                ),
            ),
        )
        first = len(base.workloads)
        number = {speeds: first + k for k, speeds in enumerate(self.workloads)}
        rows = sorted(self._estimates(grown, number), key=_estimate_order)
        jobs = [_job_row(grown, row, number) for row in self.jobs]
        return replace(
            grown,
            estimates=base.estimates.followed_by(Estimates.from_rows(rows)),
            jobs=base.jobs.followed_by(Jobs.from_rows(jobs)),
            allocations=base.allocations.followed_by(Allocations.from_rows(self.allocations)),
            tenants=base.tenants.followed_by(Tenants.from_rows(self.tenants)),
            quotas=base.quotas.followed_by(Quotas.from_rows(self.quotas)),
        )

    def _estimates(
        self, snapshot: Snapshot, number: Mapping[Speeds, int]
    ) -> Iterator[dict[str, Any]]:
        largest = snapshot.node_size().tolist()
        for speeds, workload in number.items():
            for cell, samples_per_s in speeds:
                key = snapshot.key(cell)
                yield {
                    "workload": workload,
                    **key._asdict(),
                    "nodes": cell.nodes or math.ceil(cell.gpus / max(1, largest[key.gpu_type])),
                    "iter_time_s": 1.0 / samples_per_s,
                    "source": int(EstimateSource.MEASURED),
                }


def _estimate_order(row: Mapping[str, Any]) -> list[int]:
    return [row[name] for name in ("workload", *CellTable.CELL, "nodes")]


def _job_row(
    snapshot: Snapshot, row: Mapping[str, Any], number: Mapping[Speeds, int]
) -> dict[str, Any]:
    """Return the columns of a job."""
    rest = {name: value for name, value in row.items() if name not in ("speeds", "current")}
    columns = _WAITING | {"workload": number[row["speeds"]]} | rest
    if row["current"] is not None:
        key = snapshot.key(row["current"])
        columns |= dict(zip(Jobs.CELL, key, strict=True)) | {
            "state": STATE_CODE[JobState.RUNNING],
            "since_s": snapshot.now_s,
            "generation": 1,
        }
    return columns
