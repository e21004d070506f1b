"""The independent checker: what a solution and its placement must satisfy, and what they are worth.

Written in plain loops over jobs, without any solver's code and without the arrays' own helpers, so that
it cannot share a mistake with what it checks. It runs on every round, in production too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from formulation.lifecycle import SCHEDULABLE
from formulation.placement import Gang, Placement, current_gangs
from formulation.problem import CHANGES_ROW, Problem
from formulation.snapshot import STATES, Hold, Snapshot
from formulation.solution import Solution
from formulation.tables import Bools, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, named, with the facts."""

    rule: str
    detail: str


def violations(problem: Problem, solution: Solution) -> list[Violation]:
    """Return every rule that ``solution`` breaks: eqs. (2) to (4), its objective and its bound."""
    if len(solution.choice) != len(problem.jobs):
        detail = f"{len(solution.choice)} choices for {len(problem.jobs)} jobs"
        return [Violation(rule="one choice a job", detail=detail)]
    found: list[Violation] = []
    used: Counter[int] = Counter()
    objective = 0
    job_start, value, must_run = _plain(problem.job_start, problem.value, problem.must_run)
    usage_start, usage_row, amount = _plain(problem.usage_start, problem.row, problem.amount)
    idle_start, idle_row, idle = _plain(problem.idle_start, problem.idle_row, problem.idle_amount)
    for job, column in enumerate(solution.choice.tolist()):
        name = problem.jobs[job]
        if column == -1:
            if must_run[job] and solution.has_answer:
                found.append(Violation(rule="must run", detail=f"{name} does not run"))
            for k in range(idle_start[job], idle_start[job + 1]):
                used[idle_row[k]] += idle[k]
            continue
        first, last = job_start[job], job_start[job + 1]
        if not first <= column < last:
            detail = f"{name} runs column {column}, which is not one of {first}..{last - 1}"
            found.append(Violation(rule="own column", detail=detail))
            continue
        objective += value[column]
        for k in range(usage_start[column], usage_start[column + 1]):
            used[usage_row[k]] += amount[k]
    for r, row in enumerate(problem.rows):
        if used[r] > row.capacity:
            detail = f"{row.name}: {used[r]} used of {row.capacity}"
            found.append(Violation(rule="capacity", detail=detail))
    if solution.has_answer and objective != solution.objective:
        detail = f"claims {solution.objective}, is {objective}"
        found.append(Violation(rule="objective", detail=detail))
    if solution.has_answer and objective > solution.bound + 0.5:
        detail = f"objective {objective} exceeds bound {solution.bound}"
        found.append(Violation(rule="bound", detail=detail))
    return found


def _plain(*arrays: Ints | Bools) -> list[memoryview]:
    """Return views whose entries are read as Python's own numbers, four times as fast as NumPy's."""
    return [array.data for array in arrays]


def placement_violations(
    snapshot: Snapshot, problem: Problem, solution: Solution, placement: Placement
) -> list[Violation]:
    """Return every rule that ``placement`` breaks.

    Gang: all GPUs of the chosen Cell or none. One GPU type. Only schedulable nodes, only GPUs that
    exist, none twice. Equal GPUs a node, or whole nodes and one smaller share. No job that may not run.
    A job that keeps its Cell keeps its GPUs unless it is migrated; a pinned one is never migrated. No
    job on a node that it avoids, or given a shape slower than what it was promised. No more running jobs
    changed than the round may change, those that are migrated with those that the solution changes.
    """
    found: list[Violation] = []
    holder: dict[tuple[int, int], str] = {}

    def bad(rule: str, detail: str) -> None:
        found.append(Violation(rule=rule, detail=detail))

    chosen = {j for j, column in enumerate(solution.choice.tolist()) if column >= 0}
    for job in sorted(chosen ^ set(placement.gangs)):
        bad("all or nothing", f"{problem.jobs[job]} is chosen or placed, not both")
    now = current_gangs(snapshot)
    avoided = set(zip(snapshot.avoids.job.tolist(), snapshot.avoids.node.tolist(), strict=True))
    for job, gang in placement.gangs.items():
        name = problem.jobs[job]
        if job not in chosen:
            continue
        if STATES[int(snapshot.jobs.state[job])] not in SCHEDULABLE:
            bad("may run", f"{name} is {STATES[int(snapshot.jobs.state[job])]}")
        cell = int(problem.cell[solution.choice[job]])
        want, gpu_type = int(problem.cells.gpus[cell]), int(problem.cells.gpu_type[cell])
        if gang.gpus != want:
            bad("gang", f"{name} has {gang.gpus} GPUs, its Cell needs {want}")
        shares = []
        for node, indices in gang.members:
            label = snapshot.nodes.name[node]
            shares.append(len(indices))
            if snapshot.nodes.gpu_type[node] != gpu_type:
                bad("one GPU type", f"{name} on {label}")
            if not snapshot.nodes.schedulable[node]:
                bad("schedulable node", f"{name} on {label}")
            if (job, node) in avoided:
                bad("avoided node", f"{name} on {label}")
            for index in indices:
                if not 0 <= index < snapshot.nodes.gpus[node]:
                    bad("GPU exists", f"{label} has no GPU {index}")
                if (node, index) in holder:
                    other = holder[node, index]
                    bad("GPU once", f"GPU {index} of {label}: {other} and {name}")
                holder[node, index] = name
        if len({node for node, _ in gang.members}) != len(gang.members):
            bad("node once", f"{name} lists a node twice")
        whole = sum(len(i) == snapshot.nodes.gpus[n] for n, i in gang.members)
        if len(set(shares)) > 1 and whole < len(shares) - 1:
            bad("equal shares", f"{name} has {shares} GPUs a node")
        rate, least = problem.cells.rate_on(cell, gang.nodes), float(problem.least_rate[job])
        keeps = int(problem.current[job]) == int(solution.choice[job])
        stays = keeps and job not in placement.migrated
        if rate < least * (1 - 1e-9) and not stays:
            bad("promised rate", f"{name} gets {rate:.6g} samples/s of the {least:.6g} promised")
        if keeps and job not in placement.migrated and now.get(job) != gang:
            bad("kept in place", f"{name} keeps its Cell but is given other GPUs")
        if job in placement.migrated:
            owned = now.get(job)
            if not keeps or owned == gang:
                bad("migrated", f"{name} does not keep its Cell, or has not moved")
            elif not problem.movable[job] and owned is not None and owned.gpus == want:
                bad("pinned", f"{name} may not be moved")
    for job in sorted(placement.migrated - set(placement.gangs)):
        bad("migrated", f"{problem.jobs[job]} is migrated but has no GPUs")
    found.extend(_changes_over_cap(problem, solution, placement, now))
    return found


def _changes_over_cap(
    problem: Problem, solution: Solution, placement: Placement, now: dict[int, Gang]
) -> list[Violation]:
    """Return the violation of the cap on changes, if there is one. A move that lost GPUs force is free."""
    caps = [row.capacity for row in problem.rows if row.name == CHANGES_ROW]
    changed = 0
    for job, column in enumerate(solution.choice.tolist()):
        stays = int(problem.current[job])
        if stays >= 0 and column != stays:
            changed += 1
        elif stays >= 0 and job in placement.migrated and job in now:
            changed += now[job].gpus == int(problem.cells.gpus[problem.cell[stays]])
    return [
        Violation(rule="changes", detail=f"{changed} running jobs changed, {cap} allowed")
        for cap in caps
        if changed > cap
    ]


def held_twice(snapshot: Snapshot) -> list[Violation]:
    """Return GPUs of the snapshot with two holders or two successors (a law of the database)."""
    count: Counter[tuple[int, int, bool]] = Counter()
    a = snapshot.allocations
    for node, gpu, hold in zip(a.node.tolist(), a.gpu.tolist(), a.hold.tolist(), strict=True):
        count[node, gpu, hold == Hold.RESERVED] += 1
    return [
        Violation(rule="GPU once", detail=f"GPU {gpu} of {snapshot.nodes.name[node]}: {n} jobs")
        for (node, gpu, _), n in count.items()
        if n > 1
    ]


def score(problem: Problem, solution: Solution, placement: Placement | None = None) -> float:
    """Return what a solution is worth, in units of the objective (not the solver's integers).

    Without a placement each Cell runs at its own shape, and the score is objective / scale. With one, each
    runs at the rate of the shape it was given, and migrated jobs pay their restart price.
    """
    total = 0.0
    for job, column in enumerate(solution.choice.tolist()):
        if column < 0:
            continue
        worth = float(problem.value[column])
        gang = placement.gangs.get(job) if placement else None
        if gang is not None:
            worth = placed_value(problem, column, gang.nodes)
            if placement is not None and job in placement.migrated:
                worth -= migration_price(problem, job, column)
        total += worth
    return total / problem.scale


def placed_value(problem: Problem, column: int, nodes: int) -> float:
    """Return the value of ``column`` run over ``nodes`` nodes, in the problem's units.

    What a column is worth shrinks with its rate; what it costs (a value below 0) does not.
    """
    if problem.value[column] <= 0:
        return float(problem.value[column])
    cell = int(problem.cell[column])
    share = problem.cells.rate_on(cell, nodes) / float(problem.cells.rate[cell])
    return share * float(problem.value[column])


def migration_price(problem: Problem, job: int, column: int) -> float:
    """Return the restart price of moving ``job`` to other GPUs within ``column`` (problem's units)."""
    gross = float(problem.value[column] + problem.restart_price[column])
    return abs(gross) * float(problem.restart_share[job])
