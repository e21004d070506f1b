"""The independent checker of the laws over time. It uses nothing of the code that keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from tessera.formulation.answer.check import Violation
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.base.values import PROFILING
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.policy import MODES_WITHOUT_PROMISES, Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import STATE_CODE, Snapshot

_RUNS = frozenset(STATE_CODE[state] for state in ACTIVE)
_ROUNDING_S = 0.01


def find_law_violations(
    snapshot: Snapshot,
    policy: Policy,
    problem: Problem,
    placement: Placement,
    gangs: Mapping[int, Gang],
    given_up: frozenset[int],
) -> list[Violation]:
    """Return every law over time that the placement of a round breaks.

    * A job that can stay, and has not settled, keeps its GPUs.
    * A job that can stay is not suspended, and not shrunk below its GPUs or its request, whichever is less.
    * A start that was promised for now takes place.

    Other promises may make exceptions: deadlines, guarantees, quotas and windows. Rounds with any of
    these are not checked here, and neither are jobs whose promise is ``given_up``.
    """
    if _has_other_promises(snapshot, policy):
        return []
    violations: list[Violation] = []
    models = [workload.model for workload in snapshot.workloads]
    tasks = {job for job in gangs if models[int(snapshot.jobs.workload[job])] == PROFILING}
    for job in sorted(gangs.keys() - given_up - tasks):
        if problem.current[job] >= 0 and int(snapshot.jobs.state[job]) in _RUNS:
            violations += _changed_too_soon(snapshot, policy, placement, gangs, job)
            violations += _lost_what_it_asked_for(snapshot, policy, placement, gangs, job)
    return [*violations, *_late_starts(snapshot, policy, problem, placement, given_up)]


def _has_other_promises(snapshot: Snapshot, policy: Policy) -> bool:
    """Return whether something may take GPUs from jobs that the laws protect."""
    jobs = snapshot.jobs
    plans = policy.deadline_mode not in MODES_WITHOUT_PROMISES and (jobs.deadline_s < inf).any()
    return bool(
        plans
        or jobs.admitted.any()
        or jobs.guaranteed.any()
        or len(snapshot.quotas)
        or len(snapshot.reservations)
        or not snapshot.nodes.schedulable.all()
    )


def _changed_too_soon(
    snapshot: Snapshot, policy: Policy, placement: Placement, gangs: Mapping[int, Gang], job: int
) -> Iterator[Violation]:
    jobs, spacing = snapshot.jobs, policy.change_spacing
    settles_s = float(jobs.since_s[job]) + (spacing + 1) * float(jobs.restart_s[job])
    is_young = spacing > 0 and jobs.since_s[job] > 0 and snapshot.now_s < settles_s - _ROUNDING_S
    if is_young and placement.gangs.get(job) != gangs[job]:
        name, remaining_s = jobs.name[job], settles_s - snapshot.now_s
        yield Violation(rule="settling", detail=f"{name} changes {remaining_s:.6g} s too soon")


def _lost_what_it_asked_for(
    snapshot: Snapshot, policy: Policy, placement: Placement, gangs: Mapping[int, Gang], job: int
) -> Iterator[Violation]:
    jobs = snapshot.jobs
    unknown = jobs.assumed_efficiency[job] == jobs.assumed_efficiency[job]  # not NaN
    if (
        not policy.keep_requests
        or jobs.preemptible[job]
        or jobs.opportunistic[job]
        or jobs.weight[job] == 0
        or unknown
    ):
        return
    gang = placement.gangs.get(job)
    has, gets = gangs[job].gpus, 0 if gang is None else gang.gpus
    min_gpus = min(has, int(jobs.requested_gpus[job]))
    if gets < min_gpus:
        detail = f"{jobs.name[job]} gets {gets} of the {min_gpus} GPUs that it may keep"
        yield Violation(rule="kept request", detail=detail)


def _late_starts(
    snapshot: Snapshot,
    policy: Policy,
    problem: Problem,
    placement: Placement,
    given_up: frozenset[int],
) -> Iterator[Violation]:
    if not policy.promise_starts:
        return
    starts = snapshot.planned_starts
    for job, start_s in zip(starts.job.tolist(), starts.start_s.tolist(), strict=True):
        is_due = start_s <= snapshot.now_s and problem.must_run[job]
        if is_due and job not in placement.gangs and job not in given_up:
            detail = f"{snapshot.jobs.name[job]} was to start now, and does not"
            yield Violation(rule="planned start", detail=detail)
