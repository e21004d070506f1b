"""A plot of the solving time against the number of jobs: ours, stock solvers and peers' methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.curve import CurvePoint, draw_curve
from tessera.benchmarks.rounds.entries import ContestEntry
from tessera.benchmarks.rounds.instances import FAMILIES
from tessera.benchmarks.rounds.rivals import all_rounds, baselines_of, compares_levels, hold_contest
from tessera.formulation.errors import InvalidInput
from tessera.simulator.figures import Figure, Report
from tessera.solvers.registry import DEFAULT


@register_case(
    "solve-curve",
    smoke={"sizes": "16,40", "versus": "highs", "time_limit": 5.0},
    worst_gap=("<=", 1e-4),
    verified=("==", True),
)
def solve_curve(
    sizes: Annotated[
        str, typer.Option(help="Comma-separated numbers of jobs.")
    ] = "64,256,1024,4096,16384",
    gpus_a_job: Annotated[
        float, typer.Option(help="Number of GPUs of the cluster for each job.")
    ] = 1.0,
    types: Annotated[int, typer.Option(help="Number of GPU types.")] = 4,
    family: Annotated[str, typer.Option(help=f"Family of rounds: {', '.join(FAMILIES)}.")] = "real",
    objective: Annotated[str, typer.Option(help="Objective of the policy.")] = "throughput",
    versus: Annotated[
        str, typer.Option(help="Comma-separated baselines.")
    ] = "cp-sat,cbc,highs,pop-8,sia",
    time_limit: Annotated[float, typer.Option(help="Time limit of each solver in seconds.")] = 30.0,
    solver: Annotated[str, typer.Option(help="The solver that counts as ours.")] = DEFAULT,
    running: Annotated[
        float, typer.Option(help="Share of the GPUs that are in use before the round.")
    ] = 0.5,
    plot: Annotated[Path | None, typer.Option(help="PNG file to write.")] = None,
    gap: Annotated[float, typer.Option(help="Gap at which solvers may stop.")] = 1e-4,
    workers: Annotated[int, typer.Option(help="Number of threads of each solver.")] = 2,
    seed: int = 0,
) -> Report:
    """Plot the solving time against the number of jobs, on logarithmic axes, for our solver and baselines.

    There is a row for each size and solver, as in ``time_solvers``. The plot shows ``total_s``, with a
    filled mark if the answer is within the gap of the solver's own bound, and a hollow one
    otherwise. A baseline that was killed is plotted at twice the limit. ``worst_gap`` is ours.
    """
    baselines = baselines_of(versus)
    table: list[dict[str, Figure | str]] = []
    points: list[CurvePoint] = []
    worst, verified, slowest_s = 0.0, True, 0.0
    for jobs in _sizes(sizes):
        entry = ContestEntry(
            solver=solver,
            jobs=jobs,
            gpus=max(types, int(gpus_a_job * jobs)),
            types=types,
            family=family,
            objective=objective,
            time_limit_s=time_limit,
            gap=gap,
            workers=workers,
            seed=seed,
            running=running,
        )
        mine, lines = hold_contest(entry, baselines)
        ours = all_rounds(mine, entry)[0]
        worst, slowest_s = max(worst, ours.gap), max(slowest_s, ours.total_s)
        verified = verified and ours.verified
        for line in lines:
            table.append({"jobs": jobs, **line.shown(ours)})
            result = line.round
            points.append(
                CurvePoint(
                    solver=line.solver,
                    jobs=jobs,
                    seconds=result.total_s if result else 2 * time_limit,
                    met=bool(result and result.gap <= gap),
                )
            )
    if plot is not None:
        draw_curve(plot, points, time_limit)
    waived = (
        {"worst_gap"} if family != "real" or compares_levels(objective) or gap > 1e-4 else set()
    )
    return Report(
        seed=seed,
        waived=frozenset(waived),
        table=table,
        figures={"worst_gap": worst, "verified": verified, "slowest_total_s": slowest_s},
    )


def _sizes(words: str) -> list[int]:
    try:
        result = sorted({int(word) for word in words.split(",")})
    except ValueError:
        result = []
    if not result or result[0] < 1:
        raise InvalidInput("sizes", "must be whole numbers of jobs, e.g. 64,256,1024")
    return result
