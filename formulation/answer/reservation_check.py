"""The independent checker of reservations. It uses nothing of the code that keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Final

from tessera.formulation.answer.check import Violation
from tessera.formulation.answer.placement import Placement
from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot

_MOST_TOGETHER: Final = 3
"""The most reservations of which the checker compares each combination."""

Shares = Mapping[int, Mapping[int, int]]
"""Job -> node -> GPUs that the job is given there."""


def find_reservation_violations(
    snapshot: Snapshot, problem: Problem, solution: Solution, placement: Placement
) -> list[Violation]:
    """Return every rule of reservations that ``placement`` breaks.

    * During a window, no job is on its nodes that it does not serve. None is on nodes under
      maintenance.
    * Jobs that reservations of GPUs do not serve leave as many GPUs of the type as these have.
    * No job that may not be moved newly starts on named nodes if it would last into a window there.
    """
    if not len(snapshot.reservations):
        return []
    shares = {
        job: {node: len(gpus) for node, gpus in gang.members}
        for job, gang in placement.gangs.items()
    }
    serves: defaultdict[int, set[int]] = defaultdict(set)
    for r, job in zip(
        snapshot.entitlements.reservation.tolist(), snapshot.entitlements.job.tolist(), strict=True
    ):
        serves[r].add(job)
    named: defaultdict[int, set[int]] = defaultdict(set)
    table, own = snapshot.reservations, snapshot.reserved_nodes
    for r, node in zip(own.reservation.tolist(), own.node.tolist(), strict=True):
        if table.gpu_type[r] < 0:
            named[r].add(node)
    return [
        *_on_others_nodes(snapshot, shares, serves, named),
        *_more_than_left(snapshot, shares, serves),
        *_last_into_windows(snapshot, problem, solution, shares, serves, named),
    ]


def _is_active(snapshot: Snapshot, r: int) -> bool:
    return bool(snapshot.reservations.start_s[r] <= snapshot.now_s < snapshot.reservations.end_s[r])


def _on_others_nodes(
    snapshot: Snapshot,
    shares: Shares,
    serves: Mapping[int, set[int]],
    named: Mapping[int, set[int]],
) -> Iterator[Violation]:
    """Yield violations: jobs on nodes of windows that do not serve them."""
    for r, nodes in named.items():
        if _is_active(snapshot, r):
            for job, gang in shares.items():
                if job not in serves.get(r, ()) and (there := nodes & gang.keys()):
                    where = ", ".join(snapshot.nodes.name[node] for node in sorted(there))
                    name = snapshot.reservations.name[r]
                    detail = f"{snapshot.jobs.name[job]} is on {where}, which {name} has for others"
                    yield Violation(rule="reservation", detail=detail)


def _more_than_left(
    snapshot: Snapshot, shares: Shares, serves: Mapping[int, set[int]]
) -> Iterator[Violation]:
    """Yield violations: GPUs of jobs that active reservations of GPUs do not serve."""
    table, nodes = snapshot.reservations, snapshot.nodes
    for kind, gpu_type in enumerate(snapshot.gpu_types):
        there = [n for n in range(len(nodes)) if nodes.schedulable[n] and nodes.gpu_type[n] == kind]
        schedulable = sum(int(nodes.gpus[n]) for n in there)
        active = [
            r for r in range(len(table)) if table.gpu_type[r] == kind and _is_active(snapshot, r)
        ]
        for size in range(1, min(len(active), _MOST_TOGETHER) + 1):
            for some in combinations(active, size):
                used = sum(
                    gpus
                    for job, gang in shares.items()
                    if not any(job in serves.get(r, ()) for r in some)
                    for node, gpus in gang.items()
                    if nodes.gpu_type[node] == kind
                )
                left = max(0, schedulable - sum(int(table.gpus[r]) for r in some))
                if used > left:
                    names = ", ".join(table.name[r] for r in some)
                    detail = (
                        f"{names}: other jobs have {used} x {gpu_type.name}, but {left} are left"
                    )
                    yield Violation(rule="reservation", detail=detail)


def _last_into_windows(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    shares: Shares,
    serves: Mapping[int, set[int]],
    named: Mapping[int, set[int]],
) -> Iterator[Violation]:
    """Yield violations: starts of jobs that may not be moved, on nodes that a window needs."""
    jobs, a = snapshot.jobs, snapshot.allocations
    owns = set(zip(a.job.tolist(), a.node.tolist(), strict=True))
    for r, nodes in named.items():
        begins_s = float(snapshot.reservations.start_s[r])
        if begins_s <= snapshot.now_s:
            continue
        for job, gang in shares.items():
            there, choice = nodes & gang.keys(), int(solution.choice[job])
            was_there = any((job, node) in owns for node in nodes)
            if (
                not jobs.pinned[job]
                or not there
                or was_there
                or job in serves.get(r, ())
                or choice < 0
            ):
                continue
            batch = snapshot.workloads[int(jobs.workload[job])].global_batch
            rate = float(problem.cells.rate[problem.cell[choice]])
            end_s = snapshot.now_s + float(jobs.iterations_left[job]) * batch / rate
            if end_s > begins_s:
                name = snapshot.reservations.name[r]
                detail = f"{jobs.name[job]} may not be moved, but would last into {name}"
                yield Violation(rule="reservation", detail=detail)
