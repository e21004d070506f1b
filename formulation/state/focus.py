"""The part of a snapshot that one job's choices depend on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import numpy as np

from tessera.formulation.base.tables import Bools, Ints, Table
from tessera.formulation.base.values import NO_CELL
from tessera.formulation.job.lifecycle import ACTIVE, JobState
from tessera.formulation.state.snapshot import STATE_CODE, Jobs, Snapshot

T = TypeVar("T", bound=Table)

_KEPT: Final = (
    "name",
    "requested_gpus",
    "requested_gpu_type",
    "pinned_gpu_type",
    "min_gpus",
    "max_gpus",
    "plan_first",
    "requested_cpus",
    "required_selector",
    "current_cpus",
    "current_host_bytes",
    "runtime",
)
"""The columns of a job that are left as they are. The others do not matter, or are renumbered."""


def focus_on(snapshot: Snapshot, job: int) -> Snapshot:
    """Return the snapshot with ``job`` alone, and nothing that does not bear on what it may run on.

    What changes with time alone is left out, too: progress, waiting, back-off. So two results are
    equal if the job's choices are, and a digest names them. A job that does not hold GPUs of its own
    is queued. It may be moved.
    """
    e, refused = snapshot.estimates, snapshot.refused_plans
    workload = int(snapshot.jobs.workload[job])
    row = _job_row(snapshot, job)
    own = _rows_of(e, e.workload == workload)
    of_job = [row[name] for name in ("plan", "submitted_plan", "current_plan")]
    plans = np.union1d(own.plan, [plan for plan in of_job if plan >= 0]).astype(np.int64)
    row["plan"], row["submitted_plan"], row["current_plan"] = (
        -1 if plan < 0 else int(np.searchsorted(plans, plan)) for plan in of_job
    )
    row["current_plan"] = max(0, row["current_plan"])  # it has none without a Cell
    refused = _rows_of(refused, (refused.runtime == row["runtime"]) & np.isin(refused.plan, plans))
    held = _rows_of(snapshot.allocations, snapshot.allocations.job == job)
    avoids = _rows_of(snapshot.avoided_nodes, snapshot.avoided_nodes.job == job)
    allowed = _rows_of(snapshot.allowed_gpu_types, snapshot.allowed_gpu_types.job == job)
    selector, unmatched = row["required_selector"], snapshot.unmatched_nodes
    unmatched = _rows_of(unmatched, unmatched.selector == selector)
    row["required_selector"] = min(selector, 0)
    return Snapshot(
        cluster=snapshot.cluster,
        epoch=0,
        round_number=1,
        now_s=0.0,
        gpu_types=snapshot.gpu_types,
        nodes=replace(snapshot.nodes, version=_zeros(snapshot.nodes)),
        workloads=(snapshot.workloads[workload],),
        plans=tuple(snapshot.plans[plan] for plan in plans.tolist()),
        estimates=replace(own, workload=_zeros(own), plan=np.searchsorted(plans, own.plan)),
        jobs=Jobs.from_rows([row]),
        allocations=replace(held, job=_zeros(held), generation=_zeros(held)),
        avoided_nodes=replace(avoids, job=_zeros(avoids)),
        allowed_gpu_types=replace(allowed, job=_zeros(allowed)),
        selectors=_rows_of(snapshot.selectors, np.arange(len(snapshot.selectors)) == selector),
        unmatched_nodes=replace(unmatched, selector=_zeros(unmatched)),
        runtimes=snapshot.runtimes,
        refused_plans=replace(refused, plan=np.searchsorted(plans, refused.plan)),
    )


def _job_row(snapshot: Snapshot, job: int) -> dict[str, Any]:
    """Return what bears on the choices of ``job``. Its plans are those of the snapshot, -1 for none."""
    row, runs = snapshot.jobs.row(job), bool(snapshot.jobs.among(ACTIVE)[job])
    cell = [row[name] for name in Jobs.CELL] if runs else [*NO_CELL[:-1], -1]
    return {
        **{name: row[name] for name in (*_KEPT, "plan", "submitted_plan")},
        **dict(zip(Jobs.CELL, cell, strict=True)),
        "state": row["state"] if runs else STATE_CODE[JobState.QUEUED],
        "workload": 0,
        "generation": min(1, row["generation"]),  # whether it has started before
        **dict.fromkeys(("iterations", "iterations_left"), 1.0),
        **dict.fromkeys(("submit_s", "queued_s"), 0.0),
    }


def _rows_of(table: T, keep: Bools) -> T:
    """Return the rows of ``table`` for which ``keep`` (bool[rows]) is true."""
    if not len(table):
        return table
    rows = np.flatnonzero(keep).tolist()
    columns = {f.name: getattr(table, f.name) for f in fields(table)}
    return type(table)(
        **{
            name: tuple(c[row] for row in rows) if isinstance(c, tuple) else c[rows]
            for name, c in columns.items()
        }
    )


def _zeros(table: Table) -> Ints:
    return np.zeros(len(table), np.int64)
