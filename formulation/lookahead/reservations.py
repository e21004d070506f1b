"""Resources that jobs keep while the deadlines of others are planned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.rates import work_left
from tessera.formulation.replans import start_duration_s
from tessera.formulation.starts.holds import holds_of, is_protected, settled_s
from tessera.formulation.tables import Bools, Floats, Ints


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


class KeptColumn(NamedTuple):
    """A column that a job keeps: with all GPUs until one time, and with ``part`` of them until another.

    Times are in seconds since 1970.
    """

    column: int
    all_until_s: float
    part: int
    part_until_s: float


def reserve_columns(draft: Draft, among: Bools) -> list[KeptColumn]:
    """Return the column that is kept for each job of ``among`` that must run (Eq. 28).

    It is the job's smallest column on its own type, or else its smallest of all: a round can
    always shrink the job to it. A job keeps it until it has ended there, or, if it only has to settle,
    until it has; then it can be shrunk to its request. Jobs without work left are about to end and keep
    nothing.
    """
    jobs, kept = draft.snapshot.jobs, []
    stays = is_protected(draft) | jobs.guaranteed
    must_run = (draft.must_run | is_protected(draft)) & among & (work_left(draft.snapshot) > 0)
    settled = settled_s(draft)
    for job in np.flatnonzero(must_run & draft.has_columns).tolist():
        columns = np.arange(int(draft.job_start[job]), int(draft.job_start[job + 1]))
        same_type = columns[draft.gpu_type[columns] == jobs.current_type[job]]
        choice = same_type if len(same_type) else columns
        smallest = int(choice[np.argmin(draft.gpus[choice])])
        if stays[job]:
            holds = holds_of(draft, np.array([smallest], dtype=np.int64))
            all_until_s, part_until_s = float(holds.all_until_s[0]), float(holds.part_until_s[0])
            kept.append(KeptColumn(smallest, all_until_s, int(holds.part[0]), part_until_s))
        else:
            kept.append(KeptColumn(smallest, float(settled[job]), 0, float(settled[job])))
    return kept
