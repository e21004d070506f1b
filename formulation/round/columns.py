"""The columns that jobs may use before any rule applies.

These are the undominated Cells of each job, and the Cell that it runs on.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools, Ints, begins_group, concatenate_ranges
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.packing.wide import add_wide_shapes
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.cell_cache import cached_cells
from tessera.formulation.state.cells import Cells, build_cells, find_most_compact
from tessera.formulation.state.dominance import find_undominated_from
from tessera.formulation.state.information import apply_caution
from tessera.formulation.state.snapshot import Snapshot


def first_draft(
    snapshot: Snapshot,
    policy: Policy,
    admission: Admission | None = None,
    *,
    every_cell: bool = False,
    waived: frozenset[int] = frozenset(),
    widened: frozenset[int] = frozenset(),
) -> Draft:
    """Return one column for each undominated Cell of each job that may run. No rule applies yet.

    A column is a Cell on a shape. The Cell that a job runs on stays a column, on its present shape,
    even where another dominates it, because keeping it costs no restart. ``every_cell`` keeps
    dominated Cells too, but only on the fewest nodes, because published schedulers choose by other
    rules and by GPU counts alone; a job's present column is then its Cell on the fewest nodes. With
    ``policy.caution``, uncertain estimates count as slower, here and in everything that uses the
    draft. On the types ``widened``, wider
    shapes are columns, too. Columns larger than the cluster are absent (see
    ``tessera.formulation.answer.explain``).
    """
    snapshot = apply_caution(snapshot, policy.caution)
    cells, best = cached_cells(snapshot)
    if widened:
        cells, best = add_wide_shapes(snapshot, cells, best, widened)
    if every_cell:
        kept = _with_stated(snapshot, cells, find_most_compact(cells))
        kept = _with_submitted(snapshot, cells, kept)
        spread = np.zeros(len(snapshot.jobs), dtype=np.int64)
    else:
        kept, spread = _with_bounded(snapshot, cells, best), snapshot.nodes_owned()
    return _draft_of(snapshot, policy, cells, kept, spread, admission, waived)


def draft_of_shapes(snapshot: Snapshot, policy: Policy) -> Draft:
    """Return one column for each Cell of each job on each shape that is known. No rule applies yet.

    The Cells are built for the call. Those of a question about one job would displace the Cells of
    rounds from ``cell_cache``.
    """
    snapshot = apply_caution(snapshot, policy.caution)
    cells = build_cells(snapshot)
    every = np.ones(len(cells), dtype=np.bool_)
    return _draft_of(snapshot, policy, cells, every, snapshot.nodes_owned())


def _draft_of(
    snapshot: Snapshot,
    policy: Policy,
    cells: Cells,
    kept: Bools,
    spread: Ints,
    admission: Admission | None = None,
    waived: frozenset[int] = frozenset(),
) -> Draft:
    """Return a draft of the ``cells`` that are ``kept`` (bool[cells]), with jobs' present columns.

    ``spread`` is as for ``_current_cell``.
    """
    job_start, cell, current = _columns(
        snapshot, cells, kept, _current_cell(snapshot, cells, spread)
    )
    count = len(snapshot.jobs)
    return Draft(
        snapshot=snapshot,
        policy=policy,
        admission=admission,
        cells=cells,
        job_start=job_start,
        cell=cell,
        current=current,
        must_run=np.zeros(count, np.bool_),
        least_rate=np.zeros(count),
        waived=waived,
        movable=~snapshot.jobs.pinned,
    )


def _with_bounded(snapshot: Snapshot, cells: Cells, best: Bools) -> Bools:
    """Return ``best`` with the Cells that are best for jobs whose choice is restricted, bool[cells].

    A Cell that a smaller one dominates may be the best choice of a job that may not run on the
    smaller one, that must run by a stated plan, or that has more GPUs than it asked for, and is shrunk.
    """
    jobs, selection = snapshot.jobs, _with_stated(snapshot, cells, best)
    has_surplus = jobs.current_gpus > jobs.requested_gpus
    min_gpus = np.maximum(jobs.min_gpus, np.where(has_surplus, jobs.requested_gpus, 0))
    is_bounded = min_gpus > 1
    if not is_bounded.any():
        return selection
    selection = selection.copy()
    pairs = np.unique(np.stack([jobs.workload[is_bounded], min_gpus[is_bounded]]), axis=1)
    for workload, least in pairs.T.tolist():
        selection[find_undominated_from(cells, workload, least)] = True
    return selection


def _with_stated(snapshot: Snapshot, cells: Cells, kept: Bools) -> Bools:
    """Return ``kept`` with the Cells of the plans that users state for their jobs, bool[cells]."""
    stated = np.unique(snapshot.jobs.plan[snapshot.jobs.plan >= 0])
    return kept | np.isin(cells.plan, stated) if len(stated) else kept


def _with_submitted(snapshot: Snapshot, cells: Cells, kept: Bools) -> Bools:
    """Return ``kept`` with the Cells of the plans that jobs were submitted with, bool[cells].

    Each is on the fewest nodes that are known of it. They may be more than those of other plans.
    """
    submitted = np.unique(snapshot.jobs.submitted_plan[snapshot.jobs.submitted_plan >= 0])
    if not len(submitted):
        return kept
    kinds = snapshot.kinds_of_plans()
    own = np.flatnonzero(np.isin(kinds[cells.plan], kinds[submitted]))
    order = own[
        np.lexsort([getattr(cells, n)[own] for n in ("nodes", *reversed(cells.CELL), "workload")])
    ]
    keys = [getattr(cells, name)[order] for name in ("workload", *cells.CELL)]
    widened = kept.copy()
    widened[order[begins_group(*keys)]] = True
    return widened


def _columns(
    snapshot: Snapshot, cells: Cells, kept_cells: Bools, running: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return (job_start, cell of each column, current column of each job).

    ``running`` is the result of ``_current_cell``.
    """
    jobs = snapshot.jobs
    keep = np.flatnonzero(kept_cells)
    # The kept Cells of a workload are adjacent, so a job's columns are one range of them.
    first = np.searchsorted(cells.workload[keep], jobs.workload)
    count = np.searchsorted(cells.workload[keep], jobs.workload, side="right") - first
    count = np.where(snapshot.jobs.may_run(), count, 0)
    kept = keep[concatenate_ranges(first, count)] if len(keep) else np.zeros(0, np.int64)
    owner = np.repeat(np.arange(len(jobs), dtype=np.int64), count)
    is_current = np.flatnonzero(kept == running[owner])
    # Add the Cell that a job runs on where it is not among the job's columns.
    absent = running >= 0
    absent[owner[is_current]] = False
    extra = np.flatnonzero(absent)
    if len(extra):
        key = owner * len(cells) + kept  # rises
        place = np.searchsorted(key, extra * len(cells) + running[extra])
        owner, kept = np.insert(owner, place, extra), np.insert(kept, place, running[extra])
        is_current = np.flatnonzero(kept == running[owner])
    job_start = np.append(0, np.cumsum(count + absent))
    current = np.full(len(jobs), -1, dtype=np.int64)
    current[owner[is_current]] = is_current
    return job_start.astype(np.int64), kept, current


def _current_cell(snapshot: Snapshot, cells: Cells, spread: Ints) -> Ints:
    """Return the row that each job can stay on unchanged, int64[jobs]. It is -1 if it has none.

    Of the rows of its Cell, it is the one on ``spread`` nodes (int64[jobs]). If there is no such
    row, it is the widest narrower one, from which that shape is inferred, or else the narrowest.
    A job with a GPU on an unschedulable node cannot stay: wherever it goes, it restarts.
    """
    jobs = snapshot.jobs
    current = np.full(len(jobs), -1, dtype=np.int64)
    stays = (jobs.current_gpus > 0) & ~snapshot.disturbed() & snapshot.jobs.may_run()
    if not len(cells):
        return current
    most, types = int(cells.gpus.max()), len(snapshot.gpu_types)
    stays &= (jobs.current_gpus <= most) & (jobs.current_type >= 0)
    staying = np.flatnonzero(stays)
    # Find all Cells of the same workload, type and count by one sorted key.
    key = (cells.workload * types + cells.gpu_type) * (most + 1) + cells.gpus  # rises
    wanted = (jobs.workload[staying] * types + jobs.current_type[staying]) * (most + 1)
    wanted += jobs.current_gpus[staying]
    first = np.searchsorted(key, wanted)
    count = np.searchsorted(key, wanted, side="right") - first
    # A job may have several such rows, which differ in degree, execution plan and shape.
    cell, job = concatenate_ranges(first, count), np.repeat(staying, count)
    # Of these, take the one with the same degree and execution plan.
    same = np.flatnonzero(
        (cells.pipeline_degree[cell] == jobs.current_degree[job])
        & (cells.plan[cell] == jobs.current_plan[job])
    )
    cell, job = cell[same], job[same]
    beyond = cells.nodes[cell] - spread[job]  # nodes in excess of those that the job is on
    order = np.lexsort((np.abs(beyond), beyond > 0, job))[::-1]
    current[job[order]] = cell[order]  # the best row of each job is written last
    return current
