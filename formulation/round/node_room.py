"""Room on nodes for what Cells need in addition to GPUs: CPU cores and host memory."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.resources import (
    NOT_STATED,
    Demand,
    amounts_in_words,
    amounts_of,
)
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.problem import Problem, reduce_by_job
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.snapshot import Snapshot


def find_lacks_of_room(snapshot: Snapshot, problem: Problem, jobs: Ints) -> dict[int, Reason]:
    """Return a reason for each of ``jobs`` (int64[any]) whose offers all lack room on nodes.

    Even empty nodes then have too few CPU cores or too little host memory for each offer.
    """
    cells, nodes = problem.cells, snapshot.nodes
    if cells.demand.of_gpus_alone:
        return {}
    jobs = jobs[problem.job_start[jobs + 1] > problem.job_start[jobs]]
    lacking = jobs[
        ~_jobs_with_room(problem, _cells_with_room(snapshot, cells, nodes.schedulable))[jobs]
    ]
    if not len(lacking):
        return {}
    everywhere = np.ones(len(nodes), dtype=np.bool_)
    ever = _jobs_with_room(problem, _cells_with_room(snapshot, cells, everywhere))
    workloads = snapshot.jobs.workload[lacking].tolist()
    keys = dict(
        zip(lacking.tolist(), zip(workloads, ever[lacking].tolist(), strict=True), strict=True)
    )
    reasons = {
        key: _explain_lack(snapshot, cells, key[0], is_away=key[1]) for key in set(keys.values())
    }
    return {job: reasons[key] for job, key in keys.items()}


def smallest_demands(cells: Cells, workload: int) -> dict[int, Demand]:
    """Return the demand of a workload's smallest Cell on each GPU type, by index of the type.

    Of Cells with as many GPUs, the one that needs the fewest CPU cores counts, and then the least
    host memory.
    """
    own = np.flatnonzero(cells.workload == workload)
    needs = (amount[own] for amount in reversed(amounts_of(cells)))
    order = np.lexsort((*needs, cells.gpus[own]))
    smallest: dict[int, Demand] = {}
    for row in own[order].tolist():
        smallest.setdefault(int(cells.gpu_type[row]), cells.demand.of(row))
    return dict(sorted(smallest.items()))


def _cells_with_room(snapshot: Snapshot, cells: Cells, kept: Bools) -> Bools:
    """Return whether the ``kept`` nodes, if empty, have room for each Cell, bool[cells].

    They have it if they can have all of its GPUs together. With k of them, a node needs k / ``gpus``
    of the Cell's CPU cores and host memory.
    """
    nodes, hosted = snapshot.nodes, np.zeros(len(cells))
    shapes, counts = np.unique(
        np.stack([nodes.gpu_type, nodes.gpus, *amounts_of(nodes)])[:, kept],
        axis=1,
        return_counts=True,
    )
    for (kind, size, *amounts), count in zip(shapes.T.tolist(), counts.tolist(), strict=True):
        most = np.where(cells.gpu_type == kind, float(size), 0.0)
        for needs, amount in zip(amounts_of(cells), amounts, strict=True):
            if amount != NOT_STATED:
                limit = np.floor(amount * cells.gpus / np.maximum(needs, 1))
                most = np.where(needs > 0, np.minimum(most, limit), most)
        hosted += count * most
    return hosted >= cells.gpus


def _jobs_with_room(problem: Problem, has_room: Bools) -> Bools:
    """Return whether a column of each job is on a Cell that ``has_room``, bool[jobs]."""
    columns = has_room[problem.cell].astype(np.float64)
    return reduce_by_job(np.maximum, columns, problem.job_start) > 0


def _explain_lack(snapshot: Snapshot, cells: Cells, workload: int, *, is_away: bool) -> Reason:
    """Explain a workload whose Cells lack room. ``is_away``: nodes with room are not schedulable."""
    smallest = smallest_demands(cells, workload)
    needs = " or ".join(
        f"{d.gpus} x {snapshot.gpu_types[t].name} with {amounts_in_words(amounts_of(d))}"
        for t, d in smallest.items()
    )
    evidence = (("needs", needs), *(_largest_node(snapshot, t) for t in smallest))
    if is_away:
        return Reason(
            code=ReasonCode.NODES_AWAY,
            message=f"the nodes that could run the job are draining or silent; it needs {needs}",
            next_step="start the agents of those nodes, or undrain them; `tessera nodes -o wide` says why"
            " they were drained",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.FITS_NOWHERE,
        message="nodes have too few CPU cores or too little host memory for the job's Cells; the"
        f" smallest need {needs}",
        next_step="let jobs use more of the nodes (`cpus` and `host_memory` in the cluster file), or add"
        " Cells that need less",
        evidence=evidence,
    )


def _largest_node(snapshot: Snapshot, gpu_type: int) -> tuple[str, str]:
    """Return the most that nodes of a type state, as evidence."""
    nodes = snapshot.nodes
    own = nodes.gpu_type == gpu_type
    sizes = amounts_in_words(int(has[own].max(initial=0)) for has in amounts_of(nodes))
    return f"most on a node of {snapshot.gpu_types[gpu_type].name}", sizes
