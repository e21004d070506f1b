"""The mapping of Cells to rows, columns and documents. No other module does this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, read_execution_plan
from tessera.formulation.records.estimates import EstimateRecord


def cell_on(row: sa.Row[Any]) -> Cell:
    """Return the Cell of a row of ``estimates`` or ``measurements`` with names of type and plan."""
    return Cell(
        gpu_type=row.gpu_type,
        gpus=row.gpus,
        pipeline_degree=row.pipeline_degree,
        plan=row.plan,
        nodes=row.nodes,
    )


def cell_of_job(row: sa.RowMapping) -> Cell | None:
    """Return the Cell of a row of ``jobs`` with the names of its type and plan.

    The result is None if the job has no Cell.
    """
    if row["cell_gpus"] is None:
        return None
    return Cell(
        gpu_type=row["cell_type"],
        gpus=row["cell_gpus"],
        pipeline_degree=row["cell_degree"],
        plan=row["cell_plan"],
    )


@lru_cache(maxsize=4096)
def stored_plan(document: str | None) -> ExecutionPlan | None:
    """Return the execution plan of a stored document, or None where it has no plan."""
    return read_execution_plan("plan", document) if document else None


def estimate_rows(
    estimates: Iterable[EstimateRecord],
    workloads: Mapping[Workload, int],
    types: Mapping[str, int],
    plans: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return rows of ``estimates`` as JSON values for the statements that write them.

    They are ordered by the keys of workloads, types and plans, the same everywhere. Of two
    estimates of one Cell and shape, the later one is kept.
    """
    rows: dict[tuple[int, ...], EstimateRecord] = {}
    for e in estimates:
        c = e.cell
        key = workloads[e.workload], types[c.gpu_type], c.gpus, c.nodes, c.pipeline_degree
        rows[*key, plans[c.plan]] = e
    return [
        dict(zip("wtgndp", key, strict=True))
        | {
            "s": str(e.iter_time_s),
            "k": int(e.source),
            "v": e.provenance,
            "u": e.sd,
            "c": e.complete,
            **name_amounts(amounts_of(e)),
            "x": "" if e.traffic is None else e.traffic.to_json(),
        }
        for key, e in sorted(rows.items(), key=lambda row: row[0])
    ]
