"""The exact answer of small rounds over plans and resources, compared with all answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.plan_oracle import best_throughput, draw_plan_round
from tessera.formulation.demand import NOT_STATED
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import build_problem
from tessera.simulator.figures import Report
from tessera.solvers.base import Budget
from tessera.solvers.registry import DEFAULT, make_solver
from tessera.solvers.rounds.plan import plan_round

OBJECTIVE: Final = "throughput"


@register_case("plan-fuzz", smoke={"cases": 40}, wrong=("==", 0), violations=("==", 0))
def fuzz_plans(
    cases: Annotated[int, typer.Option(help="Number of random rounds.")] = 1_000,
    solver: Annotated[str, typer.Option(help="Solver to test.")] = DEFAULT,
    first: Annotated[int, typer.Option(help="Number of the first case, to repeat one.")] = 0,
    seed: int = 0,
) -> Report:
    """Solve random small rounds over plans, GPUs, CPUs and host memory, and try all their answers.

    Each round has one to four jobs with up to six Cells each, whose plans need CPUs and host memory,
    on one or two GPU types of one or two nodes. Some nodes do not state their CPUs or memory. Four in
    ten jobs are guaranteed the speed of a plan on their request. Those that the statement starts for
    their guarantee must run in all answers.

    ``wrong`` counts rounds in which the solver's optimum is not that of all answers. ``violations``
    counts rounds whose placed answer breaks a rule. ``limited`` is the share of the rounds in which
    CPUs or host memory lower the optimum. The table lists each faulty case; ``--first NUMBER --cases
    1`` runs it again.
    """
    faulty: list[dict[str, Any]] = []
    limited = 0
    for k in range(first, first + cases):
        snapshot = draw_plan_round(np.random.default_rng([seed, k]))
        problem = build_problem(snapshot, Policy(objective=OBJECTIVE))
        best = best_throughput(snapshot, problem.must_run)
        limited += best < best_throughput(without_hosts(snapshot), problem.must_run) * (1 - 1e-9)
        if faults := find_faults(snapshot, problem, best, solver):
            faulty.append({"case": k, "faults": ", ".join(faults)})
    return Report(
        seed=seed,
        figures={
            "cases": cases,
            "limited": limited / max(1, cases),
            "wrong": sum("wrong" in row["faults"] for row in faulty),
            "violations": sum("violations" in row["faults"] for row in faulty),
        },
        table=faulty,
    )


def find_faults(snapshot: Snapshot, problem: Problem, best: float, solver: str) -> list[str]:
    """Return the faults of the answer to a round whose optimum is ``best``."""
    policy, budget = Policy(objective=OBJECTIVE), Budget(remaining_s=lambda: math.inf, gap=0.0)
    solution = make_solver(solver).solve(problem, budget)
    # A column's value is rounded to an integer.
    rounding = len(snapshot.jobs) / problem.scale
    faults = []
    if not abs(solution.objective / problem.scale - best) <= rounding + 1e-9 * best:
        faults.append("wrong")
    outcome = plan_round(snapshot, policy, make_solver(solver), budget)
    if outcome.violations:
        faults.append("violations")
    return faults


def without_hosts(snapshot: Snapshot) -> Snapshot:
    """Return the round with nodes that do not state their CPUs and host memory."""
    unstated = np.full(len(snapshot.nodes), NOT_STATED)
    return replace(snapshot, nodes=replace(snapshot.nodes, cpus=unstated, host_bytes=unstated))
