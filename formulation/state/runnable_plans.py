"""Jobs that cannot run every execution plan: they are offered the Cells that they can run.

Their runtime cannot run every plan, or they name the techniques that their scripts can use. Below,
"runtime" is the runtime of a job with these techniques.

A round gives the jobs of each such runtime and workload a workload of their own, with those of the
workload's estimates whose plan the runtime can run. All rules, objectives and schedulers then hold
for them as for any other job. The snapshot has the refusals as data (``Snapshot.refused_plans``),
so a stored round is decided in the same way by a release whose runtimes can run more or less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.base.tables import Bools, Ints, concatenate_ranges
from tessera.formulation.base.values import NO_CELL
from tessera.formulation.state.snapshot import Estimates, Jobs, Snapshot


def offer_runnable_plans(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with a workload of their own for jobs that cannot run all estimates.

    The Cell that such a job runs on stays one of its Cells although the runtime refuses it, unless
    the job has lost a node. The job is then not moved, because a restart would fail. Jobs whose
    runtime refuses no estimate of their workload keep the workload.
    """
    jobs = snapshot.jobs
    which = np.flatnonzero(jobs.runtime >= 0)
    if not len(which):
        return snapshot
    stays = _runs_refused(snapshot, which)
    keys = [jobs.workload[which], jobs.runtime[which]]
    keys += [
        np.where(stays, getattr(jobs, name)[which], absent)
        for name, absent in zip(Jobs.CELL, NO_CELL, strict=True)
    ]
    groups, of = np.unique(np.stack(keys), axis=1, return_inverse=True)
    group, rows = _estimates_of(snapshot, groups[0])
    keeps = _are_offered(snapshot, groups, group, rows)
    lacks = np.bincount(group[~keeps], minlength=groups.shape[1]) > 0
    workload = np.where(lacks, len(snapshot.workloads) + np.cumsum(lacks) - 1, groups[0])
    offered = keeps & lacks[group]
    own = snapshot.estimates.at(rows[offered])
    own = replace(
        own, workload=workload[group[offered]], complete=_are_complete(snapshot)[rows[offered]]
    )
    of_jobs, pins = np.array(jobs.workload), np.array(jobs.pinned)
    of_jobs[which] = workload[of.ravel()]
    pins[which[stays]] = True
    return replace(
        snapshot,
        workloads=(
            *snapshot.workloads,
            *(snapshot.workloads[w] for w in groups[0][lacks].tolist()),
        ),
        estimates=snapshot.estimates.followed_by(own),  # their workloads come last
        jobs=replace(jobs, workload=of_jobs, pinned=pins),
    )


def are_refused(snapshot: Snapshot, runtime: Ints, plan: Ints, degree: Ints) -> Bools:
    """Return whether each runtime cannot run each plan of a pipeline degree, bool[pairs].

    A ``runtime`` of -1 runs any plan. Others refuse a pipeline whose plan was not recorded, because
    nothing says where its stages begin.
    """
    count, pairs = max(1, len(snapshot.plans)), snapshot.refused_plans
    refused = np.zeros((len(snapshot.runtimes) + 1) * count, dtype=np.bool_)  # the last row: -1
    refused[pairs.runtime * count + pairs.plan] = True
    pipelines = np.append(snapshot.runtimes.pipelines, np.True_)
    known: Bools = refused[(runtime % len(pipelines)) * count + plan]
    has_no_name = np.array([not name for name in snapshot.plans] or [True])
    pipeline_is_refused = ~pipelines[runtime] | ((runtime >= 0) & has_no_name[plan])
    return np.asarray(known | (pipeline_is_refused & (degree > 1)))


def restriction_in_words(snapshot: Snapshot, job: int) -> str:
    """Return the restriction of a job's plans for a message, or "" if its runtime runs any plan."""
    runtime = int(snapshot.jobs.runtime[job])
    if runtime < 0:
        return ""
    name, techniques = runtime_and_techniques(snapshot, runtime)
    of_runtime = f" that the runtime {name} can run" if name else ""
    of_techniques = f" with no technique but {techniques}" if techniques else ""
    return f" by a plan{of_runtime}{of_techniques}"


def runtime_and_techniques(snapshot: Snapshot, runtime: int) -> tuple[str, str]:
    """Return a row of the snapshot's runtimes: the name, and the techniques of its jobs."""
    return snapshot.runtimes.name[runtime], snapshot.runtimes.techniques[runtime]


def ability_in_words(snapshot: Snapshot, runtime: int) -> str:
    """Return what would run a job's plans, as the subject of a sentence, e.g. "its runtime torchrun"."""
    name, techniques = runtime_and_techniques(snapshot, runtime)
    program = f"its runtime {name}" if name else "a program"
    return f"{program} with the techniques {techniques}" if techniques else program


def _runs_refused(snapshot: Snapshot, which: Ints) -> Bools:
    """Return whether each job of ``which`` runs on a Cell that its runtime refuses, bool[which].

    A job that has lost a node does not count. It restarts in any case, and should not by that plan.
    """
    jobs = snapshot.jobs
    refused = are_refused(
        snapshot, jobs.runtime[which], jobs.current_plan[which], jobs.current_degree[which]
    )
    stays: Bools = refused & (jobs.current_gpus[which] > 0) & ~snapshot.disturbed()[which]
    return stays


def _estimates_of(snapshot: Snapshot, workload: Ints) -> tuple[Ints, Ints]:
    """Return (index into ``workload``, estimate of it) for all estimates of each workload."""
    order = np.argsort(snapshot.estimates.workload, kind="stable")
    ordered = snapshot.estimates.workload[order]
    first = np.searchsorted(ordered, workload)
    count = np.searchsorted(ordered, workload, side="right") - first
    group = np.repeat(np.arange(len(workload), dtype=np.int64), count)
    return group, order[concatenate_ranges(first, count)]


def _are_offered(snapshot: Snapshot, groups: Ints, group: Ints, rows: Ints) -> Bools:
    """Return whether the jobs of each group are offered each estimate, bool[rows].

    ``groups`` has the workload, runtime and kept Cell of each group, int64[6, groups].
    """
    e = snapshot.estimates
    offered: Bools = ~are_refused(snapshot, groups[1][group], e.plan[rows], e.pipeline_degree[rows])
    is_kept = np.ones(len(rows), dtype=np.bool_)
    for name, own in zip(Estimates.CELL, groups[2:], strict=True):
        is_kept &= getattr(e, name)[rows] == own[group]
    return offered | is_kept


def _are_complete(snapshot: Snapshot) -> Bools:
    """Return whether some estimate of the same workload and type is complete, bool[estimates].

    A complete profile speaks of all plans, so its mark holds for those that are offered, too.
    """
    e = snapshot.estimates
    if not e.complete.any():
        return e.complete
    pair = e.workload * len(snapshot.gpu_types) + e.gpu_type
    complete: Bools = np.isin(pair, pair[e.complete])
    return complete
