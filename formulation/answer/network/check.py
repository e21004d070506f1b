"""The independent checker of network plans."""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.check import Violation
from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.plan import NetworkPlan


def find_network_violations(contention: Contention, plan: NetworkPlan) -> list[Violation]:
    """Return every rule that the network plan breaks.

    Paths must be candidates, and levels must exist. No link may serve the less urgent of two jobs
    first.
    """
    count = len(contention.jobs)
    if not (len(plan.priority) == len(plan.level) == count) or sorted(plan.order.tolist()) != list(
        range(count)
    ):
        return [
            Violation(
                rule="one level for each job",
                detail=f"there is not exactly one priority and one level for each of {count} jobs",
            )
        ]
    violations = []
    most = np.diff(contention.candidate_start)
    if len(plan.chosen) != len(most):
        return [
            Violation(
                rule="one path for each bundle",
                detail=f"{len(plan.chosen)} paths are chosen for {len(most)} bundles",
            )
        ]
    for bundle in np.flatnonzero((plan.chosen < 0) | (plan.chosen >= most)).tolist():
        detail = f"bundle {bundle} takes path {plan.chosen[bundle]}, but has {most[bundle]} paths"
        violations.append(Violation(rule="own path", detail=detail))
    for job in np.flatnonzero((plan.level < 0) | (plan.level >= plan.levels)).tolist():
        detail = f"{contention.jobs[job]} has level {plan.level[job]}, but there are {plan.levels}"
        violations.append(Violation(rule="level exists", detail=detail))
    return violations or _inversions(contention, plan)


def _inversions(contention: Contention, plan: NetworkPlan) -> list[Violation]:
    """Return a violation for each pair of jobs where a link serves the less urgent one first."""
    users: dict[int, set[int]] = {}
    for job in range(len(contention.jobs)):
        for link in _links_of(contention, plan, job):
            users.setdefault(link, set()).add(job)
    rank = plan.rank
    inversions: dict[tuple[int, int], Violation] = {}
    for link, jobs in users.items():
        on_link = np.array(sorted(jobs, key=lambda j: int(rank[j])), dtype=np.int64)
        # From the most to the least urgent job on a link, levels must not rise.
        least = np.minimum.accumulate(plan.level[on_link])
        for at in np.flatnonzero(plan.level[on_link][1:] > least[:-1]).tolist():
            low = int(on_link[: at + 1][np.argmin(plan.level[on_link[: at + 1]])])
            pair = low, int(on_link[at + 1])
            names = [contention.jobs[j] for j in pair]
            inversions.setdefault(
                pair,
                Violation(
                    rule="no inversion",
                    detail=f"on link {link}, {names[1]} is served before {names[0]}, which is more urgent",
                ),
            )
    return list(inversions.values())


def _links_of(contention: Contention, plan: NetworkPlan, job: int) -> set[int]:
    c = contention
    fixed = slice(*c.fixed_start[job : job + 2])
    links = set(c.fixed_link[fixed][c.fixed_bytes[fixed] > 0].tolist())
    for bundle in range(*c.bundle_start[job : job + 2]):
        if c.bundle_bytes[bundle] > 0:
            path = c.candidate[c.candidate_start[bundle] + plan.chosen[bundle]]
            links.update(c.path_link[slice(*c.path_start[path : path + 2])].tolist())
    return links
