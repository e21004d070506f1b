"""The independent checker of a solution and its placement.

It is written without any solver's code and without the helpers of the code that it checks, so that
it cannot share a mistake with them. It runs on every round, in production too, so it compares whole
arrays. Only violations are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tessera.formulation.answer.placement import Gang, Placement, changed_gangs, current_gangs
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.resources import GIVEN_PREFIX, HOST_RESOURCES, amounts_of
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import LEAVING
from tessera.formulation.round.problem import Problem, RowKind, migration_price, placed_value
from tessera.formulation.state.snapshot import STATES, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, by name, with the facts."""

    rule: str
    detail: str


def find_violations(problem: Problem, solution: Solution) -> list[Violation]:
    """Return every rule that ``solution`` breaks: eqs. (2) to (4), its objective and its bound."""
    choice, count = solution.choice, len(problem.jobs)
    if len(choice) != count:
        return [
            Violation(
                rule="one choice for each job", detail=f"{len(choice)} choices for {count} jobs"
            )
        ]
    waits = choice == -1
    own = (problem.job_start[:-1] <= choice) & (choice < problem.job_start[1:])
    broken = [
        _wrong_choice(problem, job, int(choice[job]))
        for job in np.flatnonzero(
            ~(own | waits) | (waits & problem.must_run if solution.has_answer else False)
        ).tolist()
    ]
    used = _used(problem, choice[own], waits)
    for row, amount in zip(problem.rows, used.tolist(), strict=True):
        if amount > row.capacity:
            detail = f"{row.name}: {amount} are used, but the capacity is {row.capacity}"
            broken.append(Violation(rule="capacity", detail=detail))
    objective = int(problem.value[choice[own]].sum())
    if solution.has_answer and objective != solution.objective:
        detail = f"claimed to be {solution.objective}, but is {objective}"
        broken.append(Violation(rule="objective", detail=detail))
    if solution.has_answer and objective > solution.bound + 0.5:
        detail = f"objective {objective} exceeds the bound {solution.bound}"
        broken.append(Violation(rule="bound", detail=detail))
    return broken


def _wrong_choice(problem: Problem, job: int, column: int) -> Violation:
    name = problem.jobs[job]
    if column == -1:
        return Violation(rule="must run", detail=f"{name} does not run")
    first, last = int(problem.job_start[job]), int(problem.job_start[job + 1])
    detail = f"{name} runs column {column}, but its own columns are {first}..{last - 1}"
    return Violation(rule="own column", detail=detail)


def _used(problem: Problem, columns: Ints, waits: Bools) -> Ints:
    """Return the use of each row by ``columns`` and by waiting jobs (bool[jobs]), int64[rows]."""
    used = np.zeros(len(problem.rows), dtype=np.int64)
    for picked, start, row, amount in (
        (columns, problem.usage_start, problem.row, problem.amount),
        (np.flatnonzero(waits), problem.idle_start, problem.idle_row, problem.idle_amount),
    ):
        # Flatten the ranges of entries of all picked columns, without a Python loop.
        count = start[picked + 1] - start[picked]
        before = np.cumsum(count) - count
        entry = np.repeat(start[picked] - before, count) + np.arange(int(count.sum()))
        np.add.at(used, row[entry], amount[entry])
    return used


def find_placement_violations(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    placement: Placement,
    now: Mapping[int, Gang] | None = None,
) -> list[Violation]:
    """Return every rule that ``placement`` breaks.

    ``now`` is ``current_gangs(snapshot)``; if it is None, it is computed here. The rules are:

    * A job gets all GPUs of its chosen Cell or none, and all of one GPU type.
    * Nodes are schedulable, GPUs exist, and no GPU is given twice.
    * Each node gives the same number of GPUs, or whole nodes are given and one smaller share. If
      the count does not divide by the number of nodes, all nodes but one give the same number.
    * No job is placed that may not run, and no more members of an array than its limit.
    * A job that keeps its Cell keeps its GPUs unless it is migrated. Pinned jobs never are.
    * No job is on a node that it avoids or that its selector does not match, or on a GPU type
      that it may not run on. No job is given a shape slower than it was promised.
    * No job is given an execution plan that its runtime cannot run, unless it runs by it already.
    * The jobs on a node need no more CPU cores and host memory than the node states to have.
    * No more running jobs change than the round may change. Those that are migrated count with
      those that the solution changes.
    """
    now = current_gangs(snapshot) if now is None else now
    chosen = np.flatnonzero(solution.choice >= 0).tolist()
    broken = [
        Violation(
            rule="all or nothing", detail=f"{problem.jobs[job]} is chosen or placed, but not both"
        )
        for job in sorted(placement.gangs.keys() ^ chosen)
    ]
    given = _given(problem, solution, placement)
    broken.extend(_wrong_gangs(snapshot, problem, given))
    broken.extend(_arrays_over_limit(snapshot, given))
    broken.extend(_wrong_nodes(snapshot, problem, given))
    broken.extend(_wrong_gpus(snapshot, problem, given))
    broken.extend(_more_than_nodes_have(snapshot, problem, solution, given))
    broken.extend(_plans_that_runtimes_refuse(snapshot, problem, solution))
    broken.extend(_slower_than_promised(problem, solution, placement))
    broken.extend(_not_kept_in_place(problem, solution, placement, now))
    broken.extend(_changes_over_cap(problem, solution, placement, now))
    return broken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Given:
    """The GPUs given to chosen jobs: gangs, their shares (one for each node), and GPUs."""

    job: Ints  # int64[gangs]
    want_gpus: Ints  # int64[gangs], of the chosen Cell
    want_type: Ints  # int64[gangs]
    gang: Ints  # int64[shares], index of the share's gang
    node: Ints  # int64[shares]
    count: Ints  # int64[shares], GPUs of the share
    share: Ints  # int64[GPUs], index of the GPU's share
    gpu: Ints  # int64[GPUs], index on its node


def _given(problem: Problem, solution: Solution, placement: Placement) -> _Given:
    choice = solution.choice.tolist()
    gangs = [(job, gang) for job, gang in placement.gangs.items() if choice[job] >= 0]
    shares = list(chain.from_iterable(gang.members for _, gang in gangs))
    job = np.array([job for job, _ in gangs], dtype=np.int64)
    cell = problem.cell[solution.choice[job]]
    count = np.array([len(gpus) for _, gpus in shares], dtype=np.int64)
    return _Given(
        job=job,
        want_gpus=problem.cells.gpus[cell],
        want_type=problem.cells.gpu_type[cell],
        gang=np.repeat(np.arange(len(gangs)), [len(gang.members) for _, gang in gangs]),
        node=np.array([node for node, _ in shares], dtype=np.int64),
        count=count,
        share=np.repeat(np.arange(len(shares)), count),
        gpu=np.fromiter(chain.from_iterable(gpus for _, gpus in shares), np.int64),
    )


def _wrong_gangs(snapshot: Snapshot, problem: Problem, given: _Given) -> Iterator[Violation]:
    """Yield violations: jobs that may not run, wrong numbers of GPUs, and uneven shapes."""
    gangs = len(given.job)
    code = snapshot.jobs.state[given.job]
    may = snapshot.jobs.may_run()[given.job]
    for job, state in zip(given.job[~may].tolist(), code[~may].tolist(), strict=True):
        unmet = int(snapshot.jobs.unmet[job])
        why = f"waits for {unmet} jobs" if unmet else f"is {STATES[state]}"
        yield Violation(rule="may run", detail=f"{problem.jobs[job]} {why}, so it may not run")
    has = np.zeros(gangs, dtype=np.int64)
    np.add.at(has, given.gang, given.count)
    for k in np.flatnonzero(has != given.want_gpus).tolist():
        detail = f"{problem.jobs[given.job[k]]} has {has[k]} GPUs, but its Cell needs {given.want_gpus[k]}"
        yield Violation(rule="gang", detail=detail)
    least, most = np.full(gangs, np.iinfo(np.int64).max), np.zeros(gangs, dtype=np.int64)
    np.minimum.at(least, given.gang, given.count)
    np.maximum.at(most, given.gang, given.count)
    broken = np.bincount(
        given.gang[given.count != snapshot.nodes.gpus[given.node]], minlength=gangs
    )  # shares that are not a whole node
    for k in np.flatnonzero((least < most) & (broken > 1)).tolist():
        shares = given.count[given.gang == k].tolist()
        if sum(shares) % len(shares) and max(map(shares.count, shares)) == len(shares) - 1:
            continue
        detail = f"{problem.jobs[given.job[k]]} has unequal numbers of GPUs on its nodes: {shares}"
        yield Violation(rule="equal shares", detail=detail)


def _arrays_over_limit(snapshot: Snapshot, given: _Given) -> Iterator[Violation]:
    """Yield violations: arrays of which more members would run than their limit.

    Members that still give their GPUs back count, too.
    """
    jobs = snapshot.jobs
    counts = jobs.among(LEAVING)
    counts[given.job] = True
    arrays, first, members = np.unique(jobs.array[counts], return_index=True, return_counts=True)
    limits = jobs.array_limit[counts][first]
    for k in np.flatnonzero((arrays >= 0) & (members > limits)).tolist():
        name = snapshot.jobs.name[np.flatnonzero(counts)[first[k]]]
        detail = f"{members[k]} jobs of the array of {name} would run, but at most {limits[k]} may"
        yield Violation(rule="array limit", detail=detail)


def _wrong_nodes(snapshot: Snapshot, problem: Problem, given: _Given) -> Iterator[Violation]:
    """Yield violations: nodes that a job may not run on, unschedulable ones, and repeated ones."""
    nodes, avoids, count = snapshot.nodes, snapshot.avoided_nodes, len(snapshot.nodes)
    unmatched, allowed = snapshot.unmatched_nodes, snapshot.allowed_gpu_types
    job, node = given.job[given.gang], given.node
    pair = job * count + node
    _, first = np.unique(pair, return_index=True)
    again = np.ones(len(pair), dtype=np.bool_)
    again[first] = False
    for rule, wrong in (
        ("one GPU type", nodes.gpu_type[node] != given.want_type[given.gang]),
        ("schedulable node", ~nodes.schedulable[node]),
        ("avoided node", np.isin(pair, avoids.job * count + avoids.node)),
        (
            "node selector",
            (snapshot.jobs.required_selector[job] >= 0)
            & np.isin(
                snapshot.jobs.required_selector[job] * count + node,
                unmatched.selector * count + unmatched.node,
            ),
        ),
        (
            "allowed type",
            np.isin(job, allowed.job)
            & ~np.isin(
                job * len(snapshot.gpu_types) + nodes.gpu_type[node],
                allowed.job * len(snapshot.gpu_types) + allowed.gpu_type,
            ),
        ),
        ("node once", again),
    ):
        for k in np.flatnonzero(wrong).tolist():
            yield Violation(rule=rule, detail=f"{problem.jobs[job[k]]} on {nodes.name[node[k]]}")


def _wrong_gpus(snapshot: Snapshot, problem: Problem, given: _Given) -> Iterator[Violation]:
    """Yield violations: GPUs that do not exist, and GPUs that are given twice."""
    nodes, node, gpu = snapshot.nodes, given.node[given.share], given.gpu
    job = given.job[given.gang[given.share]]
    for k in np.flatnonzero((gpu < 0) | (gpu >= nodes.gpus[node])).tolist():
        yield Violation(rule="GPU exists", detail=f"{nodes.name[node[k]]} has no GPU {gpu[k]}")
    key = _named(node, gpu)
    order = np.argsort(key, kind="stable")
    same = key[order[1:]] == key[order[:-1]]
    for first, second in zip(order[:-1][same].tolist(), order[1:][same].tolist(), strict=True):
        names = f"{problem.jobs[job[first]]} and {problem.jobs[job[second]]}"
        detail = f"GPU {gpu[first]} of {nodes.name[node[first]]}: {names}"
        yield Violation(rule="GPU once", detail=detail)


def _named(node: Ints, gpu: Ints) -> Ints:
    """Return a number for each GPU, int64[GPUs].

    It is equal for the same GPU, and rises by node, then GPU.
    """
    low, high = int(gpu.min(initial=0)), int(gpu.max(initial=0))
    return node * (high - low + 1) + (gpu - low)


def _more_than_nodes_have(
    snapshot: Snapshot, problem: Problem, solution: Solution, given: _Given
) -> Iterator[Violation]:
    """Yield violations: nodes whose jobs need more CPU cores or host memory than they state.

    The share that a job needs on a node is that of its Cell's GPUs there, rounded up.
    """
    nodes, cells, jobs = snapshot.nodes, problem.cells, snapshot.jobs
    cell = problem.cell[solution.choice[given.job]]
    # A job that stays on its Cell needs what it was given with it.
    stays = jobs.is_given()[given.job]
    for current, name in zip(jobs.CELL, cells.CELL, strict=True):
        stays &= getattr(jobs, current)[given.job] == getattr(cells, name)[cell]
    for what, needs, current_needs, has in zip(
        HOST_RESOURCES,
        amounts_of(cells),
        amounts_of(jobs, GIVEN_PREFIX),
        amounts_of(nodes),
        strict=True,
    ):
        total = np.where(stays, current_needs[given.job], needs[cell])
        if not (total.any() and (has >= 0).any()):
            continue
        of_gpus = given.want_gpus[given.gang]
        # Divided separately, because the product may overflow.
        whole, part = np.divmod(total[given.gang], of_gpus)
        used = np.zeros(len(nodes), dtype=np.int64)
        np.add.at(used, given.node, whole * given.count + -(-part * given.count // of_gpus))
        for node in np.flatnonzero((has >= 0) & (used > has)).tolist():
            detail = (
                f"{nodes.name[node]} has {has[node]} {what.noun}, but its jobs need {used[node]}"
            )
            yield Violation(rule="node capacity", detail=detail)


def _plans_that_runtimes_refuse(
    snapshot: Snapshot, problem: Problem, solution: Solution
) -> Iterator[Violation]:
    """Yield violations: jobs with a plan that their runtime cannot run, except the present one."""
    jobs, runtimes, refused = snapshot.jobs, snapshot.runtimes, snapshot.refused_plans
    if not (jobs.runtime >= 0).any():
        return
    pairs = set(zip(refused.runtime.tolist(), refused.plan.tolist(), strict=True))
    for job in np.flatnonzero((jobs.runtime >= 0) & (solution.choice >= 0)).tolist():
        runtime, cell = int(jobs.runtime[job]), int(problem.cell[solution.choice[job]])
        key = problem.cells.key_at(cell)
        can_pipeline = runtimes.pipelines[runtime] and problem.plans[key.plan]
        is_pipeline = key.pipeline_degree > 1 and not can_pipeline
        if ((runtime, key.plan) in pairs or is_pipeline) and jobs.key_at(job) != key:
            detail = f"{problem.jobs[job]} gets the plan {problem.plans[key.plan]!r}, which"
            with_what = ", ".join(
                filter(None, (runtimes.name[runtime], runtimes.techniques[runtime]))
            )
            yield Violation(rule="runnable plan", detail=f"{detail} {with_what} cannot run")


def _slower_than_promised(
    problem: Problem, solution: Solution, placement: Placement
) -> Iterator[Violation]:
    """Yield violations: jobs that are newly given a shape slower than they were promised."""
    owed = np.flatnonzero((problem.least_rate > 0) & (solution.choice >= 0))
    for job in owed.tolist():
        gang, column = placement.gangs.get(job), int(solution.choice[job])
        stays = int(problem.current[job]) == column and job not in placement.migrated
        if gang is None or stays:
            continue
        least = float(problem.least_rate[job])
        rate = problem.cells.placed_rate(int(problem.cell[column]), gang.nodes)
        if rate < least * (1 - 1e-9):
            detail = f"{problem.jobs[job]} gets {rate:.6g} samples/s, but was promised {least:.6g}"
            yield Violation(rule="promised rate", detail=detail)


def _not_kept_in_place(
    problem: Problem, solution: Solution, placement: Placement, now: Mapping[int, Gang]
) -> Iterator[Violation]:
    """Yield violations: jobs that keep their Cell but not their GPUs, and wrong migrations.

    A job that keeps its Cell and changes GPUs must be migrated.
    """
    keeps = (solution.choice >= 0) & (problem.current == solution.choice)
    gangs, moved = placement.gangs, changed_gangs(placement.gangs, now)
    for job in sorted(moved - placement.migrated):
        if keeps[job]:
            detail = (
                f"{problem.jobs[job]} keeps its Cell and is not migrated, but is given other GPUs"
            )
            yield Violation(rule="kept in place", detail=detail)
    for job in sorted(placement.migrated):
        name, owned = problem.jobs[job], now.get(job)
        if job not in gangs:
            yield Violation(rule="migrated", detail=f"{name} is marked as migrated but has no GPUs")
        elif solution.choice[job] < 0:
            continue  # already reported: it is placed and not chosen
        elif not keeps[job] or job not in moved:
            detail = f"{name} is marked as migrated, but does not keep its Cell or has not moved"
            yield Violation(rule="migrated", detail=detail)
        elif not problem.movable[job] and owned is not None:
            cell = int(problem.cell[solution.choice[job]])
            if owned.gpus == problem.cells.gpus[cell]:
                yield Violation(rule="pinned", detail=f"{name} may not be moved")


def _changes_over_cap(
    problem: Problem, solution: Solution, placement: Placement, now: Mapping[int, Gang]
) -> Iterator[Violation]:
    """Yield a violation if the cap on changes is exceeded.

    A move that is forced by lost GPUs is not counted.
    """
    caps = [row.capacity for row in problem.rows if row.kind is RowKind.CHANGES]
    if not caps:
        return
    stays = problem.current
    changed = int(np.count_nonzero((stays >= 0) & (solution.choice != stays)))
    for job in placement.migrated & now.keys():
        if stays[job] >= 0 and solution.choice[job] == stays[job]:
            changed += now[job].gpus == int(problem.cells.gpus[problem.cell[stays[job]]])
    for cap in caps:
        if changed > cap:
            detail = f"{changed} running jobs are changed, but only {cap} may be"
            yield Violation(rule="changes", detail=detail)


def find_doubly_held(snapshot: Snapshot) -> list[Violation]:
    """Return a violation for each GPU with two holders or two successors.

    A constraint of the database forbids both.
    """
    a = snapshot.allocations
    reserved = (a.hold == Hold.RESERVED).astype(np.int64)
    key = _named(2 * a.node + reserved, a.gpu)
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    holders = np.diff(first, append=len(key))
    return [
        Violation(
            rule="GPU once",
            detail=f"GPU {a.gpu[k]} of {snapshot.nodes.name[a.node[k]]} is given to {count} jobs",
        )
        for k, count in zip(order[first[holders > 1]], holders[holders > 1], strict=True)
    ]


def score_solution(
    problem: Problem, solution: Solution, placement: Placement | None = None
) -> float:
    """Return the value of a solution in units of the objective, not in the solver's integers.

    Without a placement, each Cell runs at its own shape, and the score is objective / scale. With
    one, each job runs at the rate of the shape it was given, and migrated jobs pay their restart
    cost.
    """
    jobs = np.flatnonzero(solution.choice >= 0)
    columns = solution.choice[jobs]
    values: list[float] = problem.value[columns].astype(np.float64).tolist()
    if placement is not None:
        gangs, migrated = placement.gangs, placement.migrated
        fewest = problem.cells.nodes[problem.cell[columns]].tolist()
        for k, (job, column) in enumerate(zip(jobs.tolist(), columns.tolist(), strict=True)):
            gang = gangs.get(job)
            if gang is not None:
                if len(gang.members) != fewest[k]:
                    values[k] = placed_value(problem, column, gang.nodes)
                if job in migrated:
                    nodes = 0 if len(gang.members) == fewest[k] else gang.nodes
                    values[k] -= migration_price(problem, job, column, nodes)
    return sum(values) / problem.scale
