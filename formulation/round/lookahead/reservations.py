"""Resources that jobs keep while the deadlines of others are planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.rates import work_left
from tessera.formulation.round.starts.holds import Holds, holds_of, is_protected, settled_s
from tessera.formulation.state.replans import start_duration_s


def rates_if_kept(draft: Draft, among: Ints) -> tuple[Floats, Floats]:
    """Return the rate and the remaining restart time of jobs ``among`` that stay unchanged.

    Both are float64[all jobs], in samples/s and seconds. The rate is that of the job's present
    shape. It is 0 for jobs without a current column.
    """
    snapshot = draft.snapshot
    jobs, nodes = snapshot.jobs, snapshot.nodes_owned()
    rate = np.zeros(len(jobs))
    running = among[draft.current[among] >= 0]
    cell = draft.cell[draft.current[running]]
    spread = np.where(nodes[running] > 0, nodes[running], draft.cells.nodes[cell])
    rate[running] = draft.cells.rate[cell]
    # A job on another shape than its column's has the rate of that shape.
    for i in np.flatnonzero(spread != draft.cells.nodes[cell]).tolist():
        rate[running[i]] = draft.cells.rate_on(int(cell[i]), int(spread[i]))
    takes_s = start_duration_s(snapshot)
    left_s = np.where(jobs.since_s > 0, jobs.since_s + takes_s - snapshot.now_s, 0.0)
    return rate, np.clip(left_s, 0.0, takes_s)


def reserve_columns(draft: Draft, among: Bools) -> tuple[Ints, Holds]:
    """Return the columns that are kept for the jobs of ``among`` that must run, and how long (Eq. 28).

    There is one for each job, int64[any]. It is the job's smallest column on its own type, or else its
    smallest of all: a round can always shrink the job to it. A job keeps it until it has ended there,
    or, if it only has to settle, until it has; then it can be shrunk to its request. Jobs without work
    left are about to end and keep nothing.
    """
    jobs, protected = draft.snapshot.jobs, is_protected(draft)
    must_run = (draft.must_run | protected) & among & (work_left(draft.snapshot) > 0)
    column = np.flatnonzero(must_run[draft.job])
    job = draft.job[column]
    other_type = draft.gpu_type[column] != jobs.current_type[job]
    column = column[np.lexsort((draft.gpus[column], other_type, job))]
    _, first_row = np.unique(draft.job[column], return_index=True)
    column = column[first_row]
    job = draft.job[column]
    stays, settled = (protected | jobs.guaranteed)[job], settled_s(draft)[job]
    holds = holds_of(draft, column)
    return column, replace(
        holds,
        all_until_s=np.where(stays, holds.all_until_s, settled),
        part=np.where(stays, holds.part, 0),
        part_until_s=np.where(stays, holds.part_until_s, settled),
    )
