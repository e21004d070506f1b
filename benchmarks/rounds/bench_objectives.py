"""A test of all objectives: against an oracle on small rounds, with two solvers on large ones."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.oracle import Choice, Oracle, OracleGoal, OracleOption
from tessera.benchmarks.rounds.small_rounds import draw_snapshot
from tessera.formulation.check import find_violations
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.formulation.statement import Statement, state_round
from tessera.simulator.figures import Report
from tessera.solvers.base import Budget
from tessera.solvers.goals import SolvedGoals, build_surrogate, solve_goals
from tessera.solvers.greedy import Greedy
from tessera.solvers.registry import DEFAULT, make_solver

THROUGHPUT: Final = OracleGoal(terms=(("throughput", 1.0),))
OBJECTIVES: Final[dict[str, tuple[OracleGoal, ...]]] = {
    "throughput": (THROUGHPUT,),
    "deadline": (THROUGHPUT,),
    "jct": (OracleGoal(terms=(("jct", 1.0),)),),
    "balanced": (OracleGoal(terms=(("balanced", 1.0),)),),
    "balanced:0.25": (OracleGoal(terms=(("balanced:0.25", 1.0),)),),
    "cost": (OracleGoal(terms=(("running", 1.0),)), OracleGoal(terms=(("cost", 1.0),))),
    "finish-time-fairness": (OracleGoal(levels="finish-time-fairness"), THROUGHPUT),
    "max-min": (OracleGoal(levels="max-min"), THROUGHPUT),
    "makespan": (OracleGoal(levels="makespan"), THROUGHPUT),
    "0.7*throughput + 0.3*jct": (OracleGoal(terms=(("throughput", 0.7), ("jct", 0.3))),),
    "throughput within 5% then jct": (
        OracleGoal(terms=(("throughput", 1.0),), tolerance=0.05),
        OracleGoal(terms=(("jct", 1.0),)),
    ),
}
"""The objectives as written, and the goals that the oracle derives from them."""

ROUNDING_TOLERANCE: Final = 1e-4
"""The tolerance for sums of a dozen values, which solvers see in millionths, and for what such a
difference may decide."""
AGREEMENT_TOLERANCE: Final = 1e-4


@dataclass(slots=True)
class _ObjectiveTally:
    """The results of the solvers for one objective."""

    mismatches: int = 0
    disagreements: int = 0
    violations: int = 0
    solve_s: list[float] = field(default_factory=list)


@register_case(
    "objectives",
    smoke={"snapshots": 10, "large": 1, "large_jobs": 60},
    brute_force_mismatches=("==", 0),
    solver_disagreements=("==", 0),
    violations=("==", 0),
)
def check_objectives(
    snapshots: Annotated[
        int,
        typer.Option(
            help="Number of small snapshots for each objective: half with 6 jobs, half with 12."
        ),
    ] = 1000,
    large: Annotated[int, typer.Option(help="Number of larger snapshots for each objective.")] = 20,
    large_jobs: Annotated[int, typer.Option(help="Number of jobs in a larger snapshot.")] = 300,
    first: Annotated[
        str, typer.Option(help="Solver for everything except half of the small snapshots.")
    ] = "cp-sat",
    second: Annotated[str, typer.Option(help="Solver for a second opinion.")] = "cvxpy",
    seed: int = 0,
) -> Report:
    """Check each objective's solution on random snapshots by enumeration, dynamic program and solvers.

    Half of the small snapshots have 6 jobs of 5 Cells, and every assignment is tried. The other
    half have 12 jobs and are judged by a dynamic program over GPUs in use. The answer of the
    default solver, or of the first solver on half of each, is measured by the oracle's own
    equations. ``brute_force_mismatches`` counts answers that do not fit, or whose goal is off by
    more than the rounding of values to millionths explains. On larger snapshots, the goals of two
    solvers may differ by a relative 1e-4 (``solver_disagreements``). ``find_violations`` counts those
    that the checker finds.
    """
    tallies = {name: _ObjectiveTally() for name in OBJECTIVES}
    for k in track_steps(snapshots, "small snapshots"):
        jobs = 6 if k % 2 == 0 else 12
        snapshot = draw_snapshot(np.random.default_rng([seed, k]), jobs)
        for name, tally in tallies.items():
            _judge(snapshot, name, tally, DEFAULT if k % 4 < 2 else first, enumerate_all=jobs == 6)
    for k in track_steps(large, "larger snapshots"):
        snapshot = draw_snapshot(np.random.default_rng([seed, k, 1]), large_jobs, gpus=large_jobs)
        for name, tally in tallies.items():
            _compare(snapshot, name, tally, (first, second))
    return Report(
        seed=seed,
        figures={
            "brute_force_mismatches": sum(t.mismatches for t in tallies.values()),
            "solver_disagreements": sum(t.disagreements for t in tallies.values()),
            "violations": sum(t.violations for t in tallies.values()),
            "objectives": len(tallies),
            "snapshots": snapshots,
            "larger_snapshots": large,
        },
        table=[
            {
                "objective": name,
                "mismatches": t.mismatches,
                "disagreements": t.disagreements,
                "violations": t.violations,
                "large_solve_p50_s": float(np.median(t.solve_s)) if t.solve_s else math.nan,
            }
            for name, t in tallies.items()
        ],
    )


def policy_of(name: str, jobs: int) -> Policy:
    """Return the policy of an objective. The levels of small rounds are settled to the last job."""
    depth = jobs if jobs <= 12 else Policy().fairness_levels
    return Policy(
        objective=name, fairness_levels=depth, deadlines="myopic" if name == "deadline" else ""
    )


def _solved(statement: Statement, name: str, gap: float) -> SolvedGoals:
    budget = Budget(remaining_s=lambda: math.inf, gap=gap)
    greedy = Greedy().solve(build_surrogate(statement), budget)
    return solve_goals(statement, make_solver(name), budget, greedy)


def _judge(
    snapshot: Snapshot, name: str, tally: _ObjectiveTally, which: str, *, enumerate_all: bool
) -> None:
    policy = policy_of(name, len(snapshot.jobs))
    statement = state_round(snapshot, policy)
    solution = _solved(statement, which, gap=0.0).solution
    tally.violations += len(find_violations(statement.problem, solution))
    oracle = Oracle(snapshot, policy, OBJECTIVES[name])
    best = oracle.best_by_enumeration if enumerate_all else oracle.best_by_dynamic_program
    lenient = strict = best(-ROUNDING_TOLERANCE)
    if any(goal.tolerance for goal in oracle.goals):
        strict = best(ROUNDING_TOLERANCE)
    chosen = [_option(statement, oracle, j, c) for j, c in enumerate(solution.choice.tolist())]
    tally.mismatches += not (
        solution.has_answer and oracle.fits(chosen) and _reached(oracle, chosen, strict, lenient)
    )


def _option(statement: Statement, oracle: Oracle, job: int, column: int) -> OracleOption | None:
    """Return the oracle's option for a column of the problem."""
    if column < 0:
        return None
    cells, cell = statement.problem.cells, int(statement.problem.cell[column])
    key = cells.key_at(cell)[:3]
    result = [o for o in oracle.options[job] if o and (o.gpu_type, o.gpus, o.degree) == key]
    # not one of the job's options: it does not fit
    return result[0] if result else OracleOption(*key, 0.0, False)


def _reached(
    oracle: Oracle,
    choice: Choice,
    strict: list[tuple[float, ...]],
    lenient: list[tuple[float, ...]],
) -> bool:
    """Return whether every goal reaches its optimum, within ``ROUNDING_TOLERANCE``."""
    mine = oracle.worth(choice)
    for goal, got, low, high in zip(oracle.goals, mine, strict, lenient, strict=True):
        if goal.levels:
            if not np.allclose(got, high, rtol=1e-9, atol=0):
                return False
        elif goal.tolerance:
            if got[0] < high[0] * (1 - goal.tolerance) - ROUNDING_TOLERANCE:
                return False
        elif not low[0] - ROUNDING_TOLERANCE <= got[0] <= high[0] + ROUNDING_TOLERANCE:
            return False
    return True


def _compare(snapshot: Snapshot, name: str, tally: _ObjectiveTally, names: tuple[str, str]) -> None:
    policy = policy_of(name, len(snapshot.jobs))
    statement = state_round(snapshot, policy)
    result = []
    for which in names:
        started_s = time.perf_counter()
        with _standard_output_is_error():
            solved = _solved(statement, which, gap=AGREEMENT_TOLERANCE / 10)
        if which == names[0]:
            tally.solve_s.append(time.perf_counter() - started_s)
        tally.violations += len(find_violations(statement.problem, solved.solution))
        result.append(solved)
    tally.disagreements += not _agree(statement, *(s.solution for s in result))


@contextmanager
def _standard_output_is_error() -> Iterator[None]:
    """Redirect the output of solver libraries (such as HiGHS) to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _agree(statement: Statement, one: Solution, other: Solution) -> bool:
    """Return whether two answers agree in every entry of every goal, within a relative 1e-4.

    Later goals may take from a goal up to its tolerance, so that it may differ by that.
    """
    if not (one.has_answer and other.has_answer):
        return False
    for goal in statement.goals:
        a, b = (_measured(statement, goal, s) for s in (one, other))
        near = AGREEMENT_TOLERANCE + goal.tolerance
        if not np.allclose(a, b, rtol=near, atol=near * 1e-6):
            return False
    return True


def _measured(statement: Statement, goal: Any, solution: Solution) -> np.ndarray:
    choice, start = solution.choice, statement.problem.job_start
    runs = choice >= 0
    if hasattr(goal, "level"):
        level = np.where(runs, goal.level[choice], goal.waiting)[np.diff(start) > 0]
        return np.asarray(np.sort(level)[::-1][: goal.depth])
    return np.array([goal.value[choice[runs]].sum() / goal.scale])
