"""A comparison of the ILP with greedy on snapshots of a production trace, through the API."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.philly import drive_rounds, read_philly
from tessera.formulation.policy import DEFAULT_OBJECTIVE
from tessera.service.cli.demo.drive import replay_round
from tessera.service.cli.demo.stack import run_stack
from tessera.simulator.clusters import arena_table1
from tessera.simulator.figures import Report


@register_case(
    "philly-rounds",
    smoke={"jobs": 30, "rounds": 3},
    rounds_below_greedy=("==", 0),
    worst_gap=("<=", 1e-3),
    violations=("==", 0),
)
def philly_rounds(
    trace: Annotated[Path | None, typer.Option(help="CSV of a trace. Default: Philly.")] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="CSV of profiles. Default: Arena's.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of jobs from the start of the trace.")] = 300,
    rounds: Annotated[
        int, typer.Option(help="Number of rounds with an event (an arrival or an end).")
    ] = 100,
    objective: Annotated[str, typer.Option(help="Objective of the rounds.")] = DEFAULT_OBJECTIVE,
    deadline_s: Annotated[float, typer.Option(help="Deadline of each call in seconds.")] = 10.0,
    seed: int = 0,
) -> Report:
    """Run the trace's rounds in which something happens through the API. The ILP's decisions are committed.

    Greedy solves each committed round's snapshot again. ``rounds_below_greedy`` counts the rounds
    in which the ILP's objective, or what was placed of it, is below greedy's. Agents train for 300
    s between rounds. ``worst_gap`` is the largest gap of the ILP to its proven bound.
    ``violations`` counts those that the checker finds.
    """
    work = read_philly(trace, profiles, jobs)
    table: list[dict[str, float]] = []
    below, broken = 0, 0
    with run_stack() as stack:
        for ilp, now_s in drive_rounds(
            stack,
            arena_table1(),
            work,
            rounds=rounds,
            objective=objective,
            deadline_s=deadline_s,
            seed=seed,
        ):
            greedy = replay_round(stack, ilp.name, solver="greedy")
            worse = min(ilp.objective - greedy.objective, ilp.placed_score - greedy.placed_score)
            below += worse < -1e-9 * max(1.0, greedy.objective)
            broken += len(ilp.violations) + len(greedy.violations) + (not ilp.verified)
            table.append(
                {
                    "round": int(ilp.name.rpartition("/")[2]),
                    "hours": now_s / 3600,
                    "ilp": ilp.objective,
                    "greedy": greedy.objective,
                    "gap": ilp.gap,
                    "placed": ilp.placed_score,
                    "greedy_placed": greedy.placed_score,
                    "running": ilp.running,
                    "waiting": ilp.waiting,
                    "solve_s": ilp.seconds["solve"],
                }
            )
    shares = [row["greedy"] / row["ilp"] for row in table if row["ilp"]]
    return Report(
        seed=seed,
        figures={
            "rounds": len(table),
            "rounds_below_greedy": below,
            "worst_gap": max(row["gap"] for row in table),
            "violations": broken,
            "greedy_mean_share": statistics.mean(shares),
            "greedy_worst_share": min(shares),
            "solve_p50_s": statistics.median(row["solve_s"] for row in table),
        },
        table=[dict(row) for row in table],
    )
