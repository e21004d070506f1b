"""Decisions of a round, whoever made them, measured by the objective of any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.check import score_solution
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.placement import Gang, Placement
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.rates import unit_rate
from tessera.formulation.records.rounds import DecisionRecord
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import Statement, state_round
from tessera.formulation.tables import Ints
from tessera.formulation.values import CellKey
from tessera.solvers.answers import make_solution, trivial_bound
from tessera.solvers.base import Budget
from tessera.solvers.goals import solve_goals
from tessera.solvers.rounds.plan import as_solved
from tessera.solvers.schedulers.base import FixedSolver

MEASURED = "measured"
"""The solver that measured decisions name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDecisions:
    """The values of decisions by the goals of an objective, in order. More is better in each."""

    names: tuple[str, ...]  # of the goals, with their units
    values: tuple[float, ...]


def measure_decisions(
    snapshot: Snapshot, policy: Policy, sides: Sequence[Sequence[DecisionRecord]], budget: Budget
) -> list[MeasuredDecisions]:
    """Return what each side's decisions on ``snapshot`` are worth by the objective of ``policy``.

    Only the objective counts, with the price of restarts: promises and limits are not stated, since
    the decisions may be another policy's. The last goal counts Cells on the shapes that they got.

    Raises:
        DeadlineTooShort: the budget was cancelled.
    """
    real = as_solved(snapshot, policy)
    statement = state_round(real, policy, published=True, check=budget.check)
    return [_measure_side(real, statement, decisions, budget) for decisions in sides]


def _measure_side(
    snapshot: Snapshot,
    statement: Statement,
    decisions: Sequence[DecisionRecord],
    budget: Budget,
) -> MeasuredDecisions:
    problem = statement.problem
    choice, placement = _chosen_columns(snapshot, problem, decisions)
    solution = make_solution(
        problem, choice, bound=trivial_bound(problem), solver=MEASURED, seed=budget.seed
    )
    results = solve_goals(statement, FixedSolver(solution), budget, solution).results
    values = [result.objective for result in results]
    values[-1] = score_solution(problem, solution, placement)
    return MeasuredDecisions(
        names=tuple(f"{result.name} ({result.unit})" for result in results), values=tuple(values)
    )


def count_effective_gpus(
    snapshot: Snapshot, sides: Sequence[Sequence[DecisionRecord]]
) -> list[float]:
    """Return the normalised throughput of each side's decisions: the effective GPUs (Eq. 6).

    A job counts as its rate on the shape that it got, by the rate of its best Cell for each GPU.
    """
    policy = Policy(objective="throughput")
    real = as_solved(snapshot, policy)
    problem = state_round(real, policy, published=True).problem
    per_gpu = unit_rate(real, problem.cells)
    totals = []
    for decisions in sides:
        choice, placement = _chosen_columns(real, problem, decisions)
        total = 0.0
        for job in np.flatnonzero(choice >= 0).tolist():
            rate = problem.cells.rate_on(int(problem.cell[choice[job]]), placement.gangs[job].nodes)
            total += rate / float(per_gpu[job])
        totals.append(total)
    return totals


def _chosen_columns(
    snapshot: Snapshot, problem: Problem, decisions: Sequence[DecisionRecord]
) -> tuple[Ints, Placement]:
    """Return the column of each job, int64[jobs], and the GPUs that the jobs get.

    The column is -1 if the job waits, or if no estimate is left of its Cell.
    """
    jobs = {name: index for index, name in enumerate(problem.jobs)}
    nodes = {name: index for index, name in enumerate(snapshot.nodes.name)}
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    gangs: dict[int, Gang] = {}
    migrated = set[int]()
    for decision in decisions:
        job, allocation = jobs.get(decision.job, -1), decision.allocation
        if job < 0 or allocation is None:
            continue
        column = _column_of(problem, job, snapshot.key(allocation.cell))
        if column < 0:
            continue
        choice[job] = column
        gangs[job] = Gang(members=tuple((nodes[name], gpus) for name, gpus in allocation.shares))
        if decision.kind == DecisionKind.MOVE and column == problem.current[job]:
            migrated.add(job)  # other columns have the price of the restart in their value
    return choice, Placement(gangs=gangs, migrated=frozenset(migrated))


def _column_of(problem: Problem, job: int, key: CellKey) -> int:
    """Return the column of a job's Cell, the one that it runs on if there are several, or -1."""
    columns = np.arange(problem.job_start[job], problem.job_start[job + 1])
    cells, cell = problem.cells, problem.cell[columns]
    same = columns[
        (cells.gpu_type[cell] == key.gpu_type)
        & (cells.gpus[cell] == key.gpus)
        & (cells.pipeline_degree[cell] == key.pipeline_degree)
        & (cells.plan[cell] == key.plan)
    ]
    current = int(problem.current[job])
    if current in same:
        return current
    return int(same[0]) if len(same) else -1
