"""The main reason, with evidence and a next step, for every job that does not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from tessera.formulation.answer.decisions import Decision
from tessera.formulation.answer.offers import explain_unchosen
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.tables import Ints
from tessera.formulation.base.texts import Text, fill
from tessera.formulation.job.dependencies import CONDITIONS, DependencyRecord, waiting_reason
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason, ReasonCode, held_reason, leaving_reason
from tessera.formulation.round.fair_share import FairShare, fair_shares
from tessera.formulation.round.node_room import find_lacks_of_room
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.promises.windows import with_window
from tessera.formulation.state.runnable_plans import restriction_in_words, runtime_and_techniques
from tessera.formulation.state.snapshot import STATES, Snapshot

FAIR_SHARE_FACTOR: Final = "fair-share factor"
"""Key of the evidence that states the factor of a job's tenant."""


def explain_waiting_jobs(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    unplaced: dict[int, Text],
    given_up: frozenset[int],
    absent: Mapping[int, Reason] = MappingProxyType({}),
) -> dict[int, Reason]:
    """Return a reason for each job without a column in ``solution``.

    ``unplaced`` is placement's message for each job for whose chosen Cell it found no blocks.
    ``given_up`` are jobs whose promise could not be kept. ``absent`` are the jobs that a rule left
    without a column, each with the reason.
    """
    estimated = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    estimated[snapshot.estimates.workload] = True
    feasible = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    feasible[snapshot.estimates.workload[np.isfinite(snapshot.estimates.iter_time_s)]] = True
    # Jobs whose runtime refuses plans have a workload of their own, equal to that of other jobs.
    restricted = len(snapshot.runtimes) > 0
    known = {snapshot.workloads[w] for w in np.flatnonzero(estimated & restricted).tolist()}
    waits = np.flatnonzero(solution.choice < 0)
    workloads = snapshot.jobs.workload[waits]
    has_columns = problem.job_start[waits + 1] > problem.job_start[waits]
    reasons: dict[int, Reason] = {}
    others: list[int] = []
    lacks_of_room = find_lacks_of_room(snapshot, problem, waits)
    may_run = snapshot.jobs.may_run()[waits]
    unmet = _unmet_dependencies(snapshot)
    for job, may, workload, runs, offered in zip(
        waits.tolist(),
        may_run.tolist(),
        workloads.tolist(),
        feasible[workloads].tolist(),
        has_columns.tolist(),
        strict=True,
    ):
        if not may:
            reasons[job] = _not_schedulable(snapshot, job, unmet.get(job, []))
        elif not runs:
            reasons[job] = _no_cell(
                snapshot,
                job,
                estimated=bool(estimated[workload]),
                refused=bool(snapshot.jobs.runtime[job] >= 0)
                and snapshot.workloads[workload] in known,
            )
        elif job in absent:
            reasons[job] = absent[job]
        elif not offered:
            reasons[job] = _fits_nowhere(snapshot, workload)
        elif job in lacks_of_room:
            reasons[job] = lacks_of_room[job]
        elif job in unplaced:
            reasons[job] = _unplaced(snapshot, job, unplaced[job])
        elif job in given_up:
            reasons[job] = _GIVEN_UP
        else:
            others.append(job)
    unchosen = explain_unchosen(problem, solution, np.array(others, dtype=np.int64))
    return reasons | {job: with_window(snapshot, reason) for job, reason in unchosen.items()}


_GIVEN_UP: Final = Reason(
    code=ReasonCode.PROMISE_GIVEN_UP,
    message="not all promises can be kept any more, and the promise to this job is given up",
    next_step="bring lost nodes back, raise the job's weight, or give it a later deadline",
)


def _unmet_dependencies(snapshot: Snapshot) -> dict[int, list[DependencyRecord]]:
    """Return the dependencies on single jobs that each job still waits for."""
    jobs, table = snapshot.jobs, snapshot.dependencies
    unmet: dict[int, list[DependencyRecord]] = {}
    for job, on, condition in zip(
        table.job.tolist(), table.on.tolist(), table.condition.tolist(), strict=True
    ):
        record = DependencyRecord(
            job=jobs.name[on],
            condition=CONDITIONS[condition],
            tenant=jobs.tenant[on],
            met=False,
            state=STATES[jobs.state[on]],
        )
        unmet.setdefault(job, []).append(record)
    return unmet


def _not_schedulable(snapshot: Snapshot, job: int, unmet: list[DependencyRecord]) -> Reason:
    jobs = snapshot.jobs
    state = STATES[jobs.state[job]]
    if state is JobState.HELD:
        return held_reason(state, jobs.name[job])
    if state is not JobState.QUEUED:
        return leaving_reason(state)
    return waiting_reason(unmet, int(jobs.unmet[job]))


def _unplaced(snapshot: Snapshot, job: int, shortage: Text) -> Reason:
    """Explain a job that was chosen and for which placement found no GPUs."""
    selector = int(snapshot.jobs.required_selector[job])
    if selector < 0:
        return Reason(
            code=ReasonCode.FRAGMENTED,
            message=fill("GPUs are free, but they are fragmented: {shortage}", shortage=shortage),
            next_step="allow running jobs to be moved, or accept a smaller GPU count",
        )
    text = snapshot.selectors.in_words(selector)
    nodes = np.flatnonzero(snapshot.matching_nodes()[selector] & snapshot.nodes.schedulable)
    return Reason(
        code=ReasonCode.NODES_TAKEN,
        message=fill(
            "no nodes with {labels} have GPUs free as the job needs them: {shortage}",
            labels=text,
            shortage=shortage,
        ),
        next_step=f"let the job run on more nodes: `tessera update {snapshot.jobs.name[job]}"
        " --node-selector none`"
        if snapshot.selectors.text[selector]
        else snapshot.selectors.lack_of(selector).next_step,
        evidence=(("node selector", text), ("schedulable nodes that match", str(len(nodes)))),
    )


def _no_cell(snapshot: Snapshot, job: int, *, estimated: bool, refused: bool) -> Reason:
    """Explain a job without a feasible estimate, of which its runtime may have ``refused`` some."""
    key = snapshot.workloads[int(snapshot.jobs.workload[job])].key
    if not estimated and refused:
        return _no_runnable_plan(snapshot, job)
    if not estimated and snapshot.jobs.requested_gpu_type[job] >= 0:
        return Reason(
            code=ReasonCode.ESTIMATING,
            message=f"the Cells of {key} have not been estimated yet",
            next_step="wait until the server has estimated them, or has found that it cannot",
            evidence=(("workload", key),),
        )
    if not estimated:
        return Reason(
            code=ReasonCode.NO_ESTIMATE,
            message=f"there is no estimate of {key} on any GPU type",
            next_step="describe its model, import a profile of this workload, or add Cells; a job that"
            " states a GPU type runs without",
            evidence=(("workload", key),),
        )
    return Reason(
        code=ReasonCode.NO_FEASIBLE_CELL,
        message=f"nothing that is known to run {key}{restriction_in_words(snapshot, job)} fits: on"
        f" {_largest_tried(snapshot, job)}, every plan needs more memory than a GPU has, or has failed",
        next_step=_step_to_a_feasible_cell(snapshot, job),
        evidence=(("workload", key),),
    )


def _step_to_a_feasible_cell(snapshot: Snapshot, job: int) -> str:
    """Return what may help a job whose known Cells all fail."""
    workload = int(snapshot.jobs.workload[job])
    batch = snapshot.workloads[workload].global_batch
    gpus = int(snapshot.jobs.requested_gpus[job])
    if batch % gpus:
        batches = snapshot.workloads[workload].nearest_batches(gpus)
        return (
            f"submit the job with a batch that {gpus} GPUs divide evenly, e.g."
            f" {' or '.join(map(str, batches))}; few plans can divide one of {batch}"
        )
    kinds = len(snapshot.gpu_types)
    whole = np.bincount(snapshot.nodes.gpu_type, weights=snapshot.nodes.gpus, minlength=kinds)
    largest = _largest_counts(snapshot, workload)
    larger_counts = whole[(largest < whole) & (largest > 0)]
    if len(larger_counts):
        name, max_gpus = snapshot.jobs.name[job], int(larger_counts.max())
        return (
            "let the job run on more GPUs, up to all that are there: `tessera update"
            f" {name} --max-gpus {max_gpus}`"
        )
    if np.any(largest < whole):
        return "describe the other GPU types to the estimator, or add Cells on them"
    return "submit the job with a smaller batch, or add GPUs with more memory"


def _largest_counts(snapshot: Snapshot, workload: int) -> Ints:
    """Return the largest number of GPUs of each type with an estimate of a workload, int64[types]."""
    e, largest = snapshot.estimates, np.zeros(len(snapshot.gpu_types), dtype=np.int64)
    own = e.workload == workload
    np.maximum.at(largest, e.gpu_type[own], e.gpus[own])
    return largest


def _largest_tried(snapshot: Snapshot, job: int) -> str:
    """Return the most GPUs of each type for which a job has estimates, e.g. "16 x a100 and 8 x v100"."""
    largest = _largest_counts(snapshot, int(snapshot.jobs.workload[job])).tolist()
    counts = zip(largest, snapshot.gpu_types, strict=True)
    return " and ".join(f"{gpus} x {kind.name}" for gpus, kind in counts if gpus)


def _no_runnable_plan(snapshot: Snapshot, job: int) -> Reason:
    """Explain a job whose workload has estimates, but none of a plan that its runtime can run."""
    name, techniques = runtime_and_techniques(snapshot, int(snapshot.jobs.runtime[job]))
    ability = f"{name} can run" if name else "its techniques allow"
    more = " or more techniques" if techniques else ""
    key = snapshot.workloads[int(snapshot.jobs.workload[job])].key
    return Reason(
        code=ReasonCode.NO_RUNNABLE_PLAN,
        message=f"{key} has estimates, but none{restriction_in_words(snapshot, job)}",
        next_step="wait if the server is still deriving one; or submit the job with a plan that"
        f" {ability}, or with another runtime{more}",
        evidence=(
            ("workload", key),
            *((("runtime", name),) if name else ()),
            *((("techniques", techniques),) if techniques else ()),
        ),
    )


def _fits_nowhere(snapshot: Snapshot, workload: int) -> Reason:
    """Explain a job whose smallest Cells exceed the schedulable nodes, or the whole cluster."""
    e, kinds = snapshot.estimates, len(snapshot.gpu_types)
    own = (e.workload == workload) & np.isfinite(e.iter_time_s)
    least = np.full(kinds, np.iinfo(np.int64).max)
    np.minimum.at(least, e.gpu_type[own], e.gpus[own])
    now = snapshot.schedulable_gpus()
    whole = np.bincount(snapshot.nodes.gpu_type, weights=snapshot.nodes.gpus, minlength=kinds)
    types = sorted(set(e.gpu_type[own].tolist()))
    needs = " or ".join(
        f"{least[t]} x {snapshot.gpu_types[t].name} ({now[t]} of {int(whole[t])} schedulable)"
        for t in types
    )
    if np.any(least <= whole):
        return Reason(
            code=ReasonCode.NODES_AWAY,
            message=f"the nodes that could run the job are draining or silent; it needs {needs}",
            next_step="start the agents of those nodes, or undrain them; `tessera nodes -o wide` says why"
            " they were drained",
            evidence=(("needs", needs),),
        )
    return Reason(
        code=ReasonCode.FITS_NOWHERE,
        message=f"the job's smallest Cells exceed the cluster; it needs {needs}",
        next_step="add nodes, or Cells with fewer GPUs",
        evidence=(("needs", needs),),
    )


def state_fair_shares(
    snapshot: Snapshot, policy: Policy, decisions: Iterable[Decision]
) -> tuple[Decision, ...]:
    """Return the decisions. The reasons of jobs whose weight a fair share has lowered say so."""
    if not policy.fair_share:
        return tuple(decisions)
    shares, tenants = fair_shares(snapshot, policy), snapshot.jobs.tenant
    lowered = {
        name: _fair_share_in_words(share) for name, share in shares.items() if 0 < share.factor < 1
    }
    return tuple(
        d._replace(
            reason=replace(
                d.reason,
                evidence=(*d.reason.evidence, (FAIR_SHARE_FACTOR, lowered[tenants[d.job]])),
            )
        )
        if d.reason is not None and d.gang is None and tenants[d.job] in lowered
        else d
        for d in decisions
    )


def _fair_share_in_words(share: FairShare) -> str:
    return (
        f"{share.factor:.2f}: the tenant used {share.used:.0%} of the cluster, and"
        f" {share.target:.0%} is its share"
    )
