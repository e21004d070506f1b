"""Resources that jobs keep, and GPUs that certificates leave to spare."""

from __future__ import annotations

import math

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.last_round import Legs
from tessera.formulation.rates import work_left
from tessera.formulation.replans import start_duration_s
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


def reserve_columns(draft: Draft, among: Bools) -> list[tuple[int, float]]:
    """Return the (column, end time) that is kept for each job of ``among`` that must run (Eq. 28).

    It is the job's smallest column on its own type, or else its smallest of all: a round can
    always shrink the job to it. Steady jobs keep it forever. Others, which are in their minimum
    run, keep it until that is over. Jobs without work left are about to end and keep nothing.
    """
    jobs, kept = draft.snapshot.jobs, []
    for job in np.flatnonzero(draft.must_run & among & (work_left(draft.snapshot) > 0)).tolist():
        columns = np.arange(int(draft.job_start[job]), int(draft.job_start[job + 1]))
        own = columns[draft.gpu_type[columns] == jobs.current_type[job]]
        choice = own if len(own) else columns
        smallest = int(choice[np.argmin(draft.gpus[choice])])
        steady = bool(jobs.guaranteed[job]) or draft.policy.run_to_completion
        until_s = math.inf if steady else float(jobs.since_s[job]) + draft.policy.min_run_s
        kept.append((smallest, until_s))
    return kept


def spare_gpus(draft: Draft, legs: Legs) -> Ints:
    """Return the GPUs of each type that no leg and no reservation ever needs, int64[types].

    Jobs that will keep what they are once given may start only on these GPUs. Otherwise later
    rounds would break certificates.
    """
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    steady = jobs.guaranteed | draft.policy.run_to_completion
    planned = np.zeros(len(jobs), dtype=np.bool_)
    planned[legs.job] = True
    # Steady jobs keep at least their smallest column on each type.
    least: dict[tuple[int, int], int] = {}
    for job in np.flatnonzero(planned & steady).tolist():
        for c in range(int(draft.job_start[job]), int(draft.job_start[job + 1])):
            key = job, int(draft.gpu_type[c])
            least[key] = min(least.get(key, 2**62), int(draft.gpus[c]))
    # Use rises only where a leg starts, so these moments suffice.
    moments = np.unique(np.append(legs.start_s, snapshot.now_s))
    used = np.zeros((len(snapshot.gpu_types), len(moments)), dtype=np.int64)
    kept = np.zeros(len(legs), dtype=np.int64)
    held: dict[tuple[int, int], int] = {}
    for leg in np.flatnonzero(steady[legs.job]).tolist():
        job, kind, gpus = int(legs.job[leg]), int(legs.gpu_type[leg]), int(legs.gpus[leg])
        kept[leg] = min(least.get((job, kind), gpus), gpus)
        held[job, kind] = int(kept[leg])
    # Beyond that, a leg uses its GPUs from its start to its end.
    changes = np.zeros((len(snapshot.gpu_types), len(moments) + 1), dtype=np.int64)
    for at_s, sign in ((legs.start_s, 1), (legs.end_s, -1)):
        at = np.searchsorted(moments, at_s)
        np.add.at(changes, (legs.gpu_type, at), sign * (legs.gpus - kept))
    used += np.cumsum(changes, axis=1)[:, :-1]
    # Steady jobs that run also keep GPUs of their present type.
    for job in np.flatnonzero(planned & steady & draft.must_run).tolist():
        kind = int(jobs.current_type[job])
        held.setdefault((job, kind), least.get((job, kind), 0))
    for (_, kind), gpus in held.items():
        used[kind] += gpus
    for column, until_s in reserve_columns(draft, ~planned):
        used[int(draft.gpu_type[column]), moments < until_s] += int(draft.gpus[column])
    spare: Ints = np.maximum(snapshot.schedulable_gpus() - used.max(axis=1), 0)
    return spare
