"""The ILP beside greedy on the same snapshots of a production trace, through the API."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.clusters import arena_table1
from benchmarks.data import data_dir
from benchmarks.drive import (
    CLUSTER,
    add_estimates,
    make_cluster,
    replay,
    schedule,
    settle,
    submit,
)
from benchmarks.fleet import Fleet
from benchmarks.progress import steps
from benchmarks.registry import Report, Skip, case
from benchmarks.stack import running
from service.importing.profiles import read_profiles
from service.importing.trace import Arrival, read_trace

ROUND_S = 300.0


def _found(file: Path | None, name: str) -> Path:
    folder = data_dir()
    chosen = file or (folder / "arena" / name if folder else None)
    if chosen is None or not chosen.is_file():
        raise Skip(f"{chosen or name} is absent: pass it, or set TESSERA_DATA")
    return chosen


def _due(todo: list[Arrival], now_s: float) -> list[Arrival]:
    """Take the arrivals up to ``now_s`` off the front of ``todo``."""
    count = sum(1 for a in todo if a.arrival_s <= now_s)
    due, todo[:] = todo[:count], todo[count:]
    return due


@case(
    "philly-rounds",
    smoke={"jobs": 30, "rounds": 5},
    rounds_below_greedy=("==", 0),
    worst_gap=("<=", 1e-3),
    violations=("==", 0),
)
def philly_rounds(
    trace: Annotated[Path | None, typer.Option(help="Trace CSV.")] = None,
    profiles: Annotated[Path | None, typer.Option(help="Profiles CSV.")] = None,
    jobs: Annotated[int, typer.Option(help="The trace's first jobs.")] = 300,
    rounds: Annotated[int, typer.Option(help="Rounds with an event (an arrival or an end).")] = 100,
    deadline_s: Annotated[float, typer.Option(help="Deadline of each call.")] = 10.0,
    seed: int = 0,
) -> Report:
    """Run the trace's rounds with an event through the API; the ILP's decisions drive.

    Each committed round's snapshot is solved again by greedy. ``rounds_below_greedy`` counts the rounds in
    which the ILP's objective, or what was placed of it, is below greedy's. Agents train 300 s between rounds.
    """
    estimates = read_profiles(_found(profiles, "alpa_optimal.csv"))
    arrivals = [  # the objective knows no deadlines, and the trace's lie on its own clock
        Arrival(a.arrival_s, replace(a.spec, deadline_s=math.inf))
        for a in read_trace(_found(trace, "trace_philly.csv"), limit=jobs)
    ]
    table: list[dict[str, float]] = []
    below, broken = 0, 0
    types, nodes = arena_table1()
    with running() as stack:
        make_cluster(stack, types, nodes)
        add_estimates(stack, estimates)
        with Fleet(stack.addresses[0], CLUSTER, nodes, "fleet") as fleet:
            now_s, todo, done = 0.0, sorted(arrivals, key=lambda a: a.arrival_s), ["first"]
            for _ in steps(rounds, "rounds"):
                arrived = _due(todo, now_s)
                while not arrived and not done and (todo or fleet.busy()):
                    done = fleet.advance(ROUND_S)
                    now_s += ROUND_S
                    arrived = _due(todo, now_s)
                if not arrived and not done:
                    break  # the trace is over
                submit(stack, [a.spec for a in arrived])
                settle(stack, [] if done == ["first"] else done)
                ilp = schedule(stack, deadline_s, seed=seed)
                settle(stack)
                done = []
                greedy = replay(stack, ilp.name, solver="greedy")
                worse = min(
                    ilp.objective - greedy.objective, ilp.placed_score - greedy.placed_score
                )
                below += worse < -1e-9 * max(1.0, greedy.objective)
                broken += len(ilp.violations) + len(greedy.violations) + (not ilp.verified)
                table.append(
                    {"round": int(ilp.name.rpartition("/")[2]), "hours": now_s / 3600,
                     "ilp": ilp.objective, "greedy": greedy.objective, "gap": ilp.gap,
                     "placed": ilp.placed_score, "greedy_placed": greedy.placed_score,
                     "running": ilp.running, "waiting": ilp.waiting, "solve_s": ilp.seconds["solve"]}
                )  # fmt: skip
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
