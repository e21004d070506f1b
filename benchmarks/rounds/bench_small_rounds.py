"""A benchmark of the processor time of ordinary small and mid-size rounds."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.contest import used_cp_sat
from tessera.benchmarks.rounds.instances import make_instance
from tessera.formulation.answer.check import find_violations
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import state_round
from tessera.simulator.figures import Figure, Report
from tessera.solvers.base import Budget
from tessera.solvers.exact.branching import Branching
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.exact.prices import PROVED_BY_PRICES
from tessera.solvers.registry import DEFAULT, make_solver
from tessera.solvers.warm import run_every_loop

LIMIT_S: Final = 60.0
TYPES: Final = 4
RUNNING: Final = 0.5
"""The share of the GPUs that are in use before a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSet:
    """Rounds of one size and objective."""

    jobs: int
    gpus: int
    objective: str


SETS: Final = (
    RoundSet(jobs=64, gpus=64, objective="balanced:0.25"),
    RoundSet(jobs=256, gpus=256, objective="balanced:0.25"),
    RoundSet(jobs=256, gpus=1280, objective="balanced:0.25"),
    RoundSet(jobs=256, gpus=1280, objective="throughput"),
    RoundSet(jobs=300, gpus=300, objective="throughput"),
    RoundSet(jobs=300, gpus=1280, objective="throughput"),
)


@register_case(
    "small-rounds",
    smoke={"seeds": 1},
    cpu_s_total=("<=", 10.0),
    cpu_s_max=("<=", 1.5),
    worst_gap=("<=", 1e-4),
    violations=("==", 0),
)
def solve_small_rounds(
    seeds: Annotated[int, typer.Option(min=1, help="Number of rounds of each size.")] = 12,
    solver: Annotated[str, typer.Option(help="The solver that is timed.")] = DEFAULT,
    gap: Annotated[float, typer.Option(help="Gap at which the solver may stop.")] = 1e-4,
    seed: int = 0,
) -> Report:
    """Solve ordinary rounds of 64 to 300 jobs, one after another in this process, with one worker.

    Half of the GPUs are in use before. ``cpu_s_total`` is the processor time of all solves, and
    ``cpu_s_max`` that of the longest, without stating the rounds. Their limits are for 72 rounds
    (12 seeds). ``cp_sat_share`` is the share of the rounds in which CP-SAT ran. The table has a row
    for each size and objective.
    """
    run_every_loop()
    _solve(SETS[0], seed, solver, gap)  # so that no solve below loads a library
    steps = track_steps(len(SETS) * seeds, "rounds")
    table: list[dict[str, Figure | str]] = []
    every: list[_TimedRound] = []
    for chosen in SETS:
        rounds = []
        for number in range(seeds):
            next(steps)
            rounds.append(_solve(chosen, seed + number, solver, gap))
        every += rounds
        table.append(
            {
                "jobs": chosen.jobs,
                "gpus": chosen.gpus,
                "objective": chosen.objective,
                "cpu_s": sum(row.cpu_s for row in rounds),
                "cpu_s_p50": statistics.median(row.cpu_s for row in rounds),
                "cpu_s_max": max(row.cpu_s for row in rounds),
                "worst_gap": max(row.gap for row in rounds),
                "by_prices": sum(row.proved_by == PROVED_BY_PRICES for row in rounds),
                "by_branching": sum(row.proved_by == Branching.name for row in rounds),
                "by_cp_sat": sum(row.proved_by == CpSat.name for row in rounds),
            }
        )
    return Report(
        seed=seed,
        figures={
            "rounds": len(every),
            "cpu_s_total": sum(row.cpu_s for row in every),
            "cpu_s_max": max(row.cpu_s for row in every),
            "worst_gap": max(row.gap for row in every),
            "cp_sat_share": sum(row.cp_sat for row in every) / len(every),
            "violations": sum(row.violations for row in every),
        },
        table=table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedRound:
    cpu_s: float
    gap: float
    proved_by: str
    cp_sat: bool
    violations: int


def _solve(chosen: RoundSet, seed: int, solver: str, gap: float) -> _TimedRound:
    snapshot = make_instance(chosen.jobs, chosen.gpus, TYPES, seed, running=RUNNING)
    problem = state_round(
        snapshot, Policy(objective=chosen.objective, promise_starts=False)
    ).problem
    end_s = time.monotonic() + LIMIT_S
    budget = Budget(remaining_s=lambda: end_s - time.monotonic(), seed=seed, gap=gap)
    began_s = time.process_time()
    solution = make_solver(solver).solve(problem, budget)
    return _TimedRound(
        cpu_s=time.process_time() - began_s,
        gap=solution.gap,
        proved_by=solution.proved_by,
        cp_sat=used_cp_sat(solution),
        violations=len(find_violations(problem, solution)),
    )
