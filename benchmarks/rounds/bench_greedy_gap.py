"""A comparison of greedy and Arena's search with the optimum, on a production trace."""

from __future__ import annotations

import math
import statistics
from typing import Annotated

import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.philly import drive_rounds, read_philly
from tessera.formulation.check import find_placement_violations, find_violations, score_solution
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.formulation.statement import state_round
from tessera.service.cli.demo.drive import snapshot_of
from tessera.service.cli.demo.stack import run_stack
from tessera.simulator.clusters import arena_table1
from tessera.simulator.figures import Report
from tessera.solvers.answers import make_solution, trivial_bound
from tessera.solvers.base import Budget
from tessera.solvers.goals import solve_goals
from tessera.solvers.placement import place
from tessera.solvers.registry import make_solver
from tessera.solvers.schedulers.base import PublishedScheduler, make_view, translate_choice
from tessera.solvers.schedulers.registry import make_scheduler

BASELINES = ("greedy", "arena")


@register_case(
    "greedy-gap",
    smoke={"jobs": 30, "rounds": 3},
    worst_gap=("<=", 1e-3),
    violations=("==", 0),
)
def greedy_gap(
    jobs: Annotated[int, typer.Option(help="Number of jobs from the start of the trace.")] = 300,
    rounds: Annotated[
        int, typer.Option(help="Number of rounds with an event (an arrival or an end).")
    ] = 100,
    gpus_share: Annotated[
        float, typer.Option(help="Share of the 1,280 GPUs, the same for each type.")
    ] = 0.25,
    objective: Annotated[
        str, typer.Option(help="Objective that rounds pursue and all three are scored by.")
    ] = "throughput",
    seed: int = 0,
) -> Report:
    """Compare greedy and Arena's search with the optimum of each round. The ILP's decisions are committed.

    All three see the same snapshot and objective, which is also that of the rounds. Arena's search
    pursues throughput, so that is the default. A share is a value over the ILP's, as stated and, in
    ``*_placed_*``, as placed on free GPUs. ``contended``
    counts the rounds in which not every job can have its best Cell; ``*_contended_share`` is the
    mean over those. ``load`` is the mean of the requested GPUs over the existing ones. In the first
    100 such rounds, jobs request a fifth of the 1,280 GPUs, which decides little. On a quarter of
    the GPUs (the default), the load is near 1. ``--gpus-share 1`` is the whole cluster. Each round
    starts from the ILP's decisions in the previous one. So a share says what one round of greedy or
    Arena loses, not what a month of them would.
    """
    work = read_philly(jobs)
    arena = make_scheduler("arena")
    table: list[dict[str, float | int | bool | str]] = []
    with run_stack() as stack:
        for record, now_s in drive_rounds(
            stack,
            arena_table1(gpus_share),
            work,
            rounds=rounds,
            objective=objective,
            seed=seed,
        ):
            row = compare_round(snapshot_of(stack, record.name), arena, objective, seed)
            table.append({"round": record.name.rpartition("/")[2], "hours": now_s / 3600, **row})
    return Report(seed=seed, figures=_figures(table), table=table)


def compare_round(
    snapshot: Snapshot, arena: PublishedScheduler, objective: str = "throughput", seed: int = 0
) -> dict[str, float | int | bool | str]:
    """Return the optimum of a round, and the values that greedy and ``arena`` reach."""
    policy, budget = (
        Policy(objective=objective, promise_starts=False),
        Budget(remaining_s=lambda: math.inf, seed=seed),
    )
    statement = state_round(snapshot, policy)
    problem = statement.problem
    greedy = make_solver("greedy").solve(problem, budget)
    ilp = solve_goals(statement, make_solver(), budget, greedy).solution
    # one column for each Cell, including dominated ones, at the same values: Arena may choose any
    every, view = (
        state_round(snapshot, policy, published=True).problem,
        make_view(snapshot, policy, seed),
    )
    choice = translate_choice(view.draft, every, arena.choose(view))
    search = make_solution(every, choice, bound=trivial_bound(every), solver=arena.name, seed=seed)
    best, broken = _measured(snapshot, problem, ilp)
    row: dict[str, float | int | bool | str] = {
        "ilp": best[0],
        "placed": best[1],
        "gap": ilp.gap,
        "solver": ilp.solver,
        "load": float(view.draft.has_columns @ snapshot.jobs.requested_gpus) / view.capacity.sum(),
        "contended": trivial_bound(problem) > ilp.bound + 0.5,
        "waiting": int((ilp.choice < 0).sum()),
    }
    for name, stated, result in (("greedy", problem, greedy), ("arena", every, search)):
        reached, more = _measured(snapshot, stated, result)
        broken += more
        row[name], row[f"{name}_placed"] = reached
        row[f"{name}_waiting"] = int((result.choice < 0).sum())
    return {**row, "violations": broken}


def _measured(
    snapshot: Snapshot, problem: Problem, solution: Solution
) -> tuple[tuple[float, float], int]:
    """Return the values of ``solution`` as stated and as placed, and its number of violations."""
    placed = place(snapshot, problem, solution, deadline_expired=lambda: False)
    broken = len(find_violations(problem, solution)) + len(
        find_placement_violations(snapshot, problem, placed.solution, placed.placement)
    )
    worth = (
        score_solution(problem, solution),
        score_solution(problem, placed.solution, placed.placement),
    )
    return worth, broken


def _figures(table: list[dict[str, float | int | bool | str]]) -> dict[str, float | int | bool]:
    figures: dict[str, float | int | bool] = {
        "rounds": len(table),
        "contended": sum(bool(row["contended"]) for row in table),
        "load": statistics.mean(float(row["load"]) for row in table),
        "worst_gap": max(float(row["gap"]) for row in table),
        "violations": sum(int(row["violations"]) for row in table),
    }
    for name in BASELINES:
        shares = [_share(row, name, "ilp") for row in table]
        placed = [_share(row, f"{name}_placed", "placed") for row in table]
        tight = [_share(row, name, "ilp") for row in table if row["contended"]]
        figures |= {
            f"{name}_mean_share": statistics.mean(shares),
            f"{name}_worst_share": min(shares),
            f"{name}_contended_share": statistics.mean(tight) if tight else math.nan,
            f"{name}_placed_mean_share": statistics.mean(placed),
            f"{name}_placed_worst_share": min(placed),
        }
    return figures


def _share(row: dict[str, float | int | bool | str], name: str, of: str) -> float:
    """Return a value as a share of the optimum. If the optimum is 0, the share is 1."""
    return float(row[name]) / float(row[of]) if row[of] else 1.0
