"""Crux's microbenchmark: paths, priorities and levels of small cases, compared with the optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.network.micro import FAIRNESS_FLOORS
from tessera.benchmarks.network.optimum import TOLERANCE
from tessera.simulator.figures import Figure, Report
from tessera.simulator.statistics import mean_interval
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.sweeps.tasks import Task

LEVELS: Final = 3
"""Priority levels."""
CASES_PER_TASK: Final = 5
"""The number of cases in a task."""
MIN_CASES_FOR_BOUNDS: Final = 100
"""The number of cases from which shares are compared with their bounds."""
TORUS_CASE_INTERVAL: Final = 4
"""One in this number of cases is also planned on a torus."""
PARTS: Final = ("paths", "priorities", "compression", "all")
SHIFTING_MECHANISMS: Final = ("cassini",)
"""Mechanisms that shift jobs in time, which the enumeration does not cover."""
ENUMERATED_PARTS: Final = (*PARTS, "orders", "crowded")

CaseResults = Sequence[Mapping[str, Any]]
"""A dictionary for each case, as returned by ``micro.judged_many``."""


@register_case(
    "network",
    smoke={"cases": 2, "workers": 0},
    violations=("==", 0),
    above_optimum=("==", 0),
    paths_share=(">=", 0.99),
    priorities_share=(">=", 0.99),
    compression_share=(">=", 0.99),
    all_share=(">=", 0.99),
    plain_paths_share=(">=", 0.9769),
    plain_priorities_share=(">=", 0.9724),
    plain_compression_share=(">=", 0.9712),
)
@with_sweep
def judge_network(
    *,
    cases: Annotated[int, typer.Option(help="Number of cases; Crux has 1,500.", min=1)] = 200,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Compare paths, priorities and compression with the best of all paths and levels (Crux 6).

    A case has 5 jobs on 2, 3, 4 or 6 whole hosts each (8 A100, four NICs of 200 Gb/s), with 20
    hosts at most, spread under 2 to 4 ToRs. One cable of 200, 400 or 800 Gb/s joins each ToR to
    each of 2 aggregation switches. Jobs compute for 0.25 to 2 s an iteration at 60 to 160 Tflop/s a
    GPU, and send for 0.15 to 1.2 times that long over a cable (both log uniform), beginning at 0.3
    to all of compute. Every job crosses ToRs. If all took one switch, the busiest link would be
    offered 1 or more; otherwise the hosts are drawn again. The paper does not describe its cases,
    so its shares and ours are not of the same cases.

    All of a job's traffic takes one aggregation switch, so there are 32 choices of paths. With each
    of them, all ways to order 5 jobs, with ties, are played. This covers the 120 orders and all
    their levels. Windows are doubled until 99 % of the work found changes by 0.2 % at most;
    ``unsettled`` counts the cases in which 1,600 iterations of the slowest job were not enough.

    Each part is judged with the others at their best. ``paths_share``: the best levels on these
    paths. ``priorities_share``: the best levels that do not invert this order, on the best paths.
    ``orders_share`` is harder: a level for each job, on the best paths for that.
    ``compression_share``: these levels of the best order, on the best paths. ``crowded_share`` is
    harder: all jobs on one switch, compared with the best levels there. ``all_share``: whole plans.
    ``*_p5``: the 5th percentile. Ours are the default options, ``plain`` is Crux as in the paper,
    and ``swaps`` tries orders on the engine, but not paths. ``crux-pa`` and ``crux-ps-pa`` have 5
    levels and are compared with the best at any number of levels. The shifts of ``cassini`` are
    made once and never again.

    Bounds: 97.69, 97.24 and 97.12 % are the paper's, for ``plain``; 99 % was set as the aim for
    what is tried on the engine. Shares of fewer than 100 cases are not judged.
    ``above_optimum`` counts shares above 1 of plans that were among those tried; there can be none.
    ``violations`` counts those that the checker of plans finds, including the baselines'.

    The table also has: plans where each iteration's compute varies by 5 % (compared with the best
    plan without variation); k by 3 reference jobs (``references``); on one case of four, the same
    jobs on a torus with the same number of hosts, where flows choose paths one by one and shares
    are of the best found; and the cost of a fairness floor.
    """
    tasks = [
        Task(
            name=f"cases {first} to {min(first + CASES_PER_TASK, cases) - 1}",
            function="tessera.benchmarks.network.micro:judged_many",
            options={
                "seed": seed,
                "first": first,
                "count": min(CASES_PER_TASK, cases - first),
                "levels": LEVELS,
                "torus_every": TORUS_CASE_INTERVAL,
            },
        )
        for first in range(0, cases, CASES_PER_TASK)
    ]
    found = [each for result in sweep.run(tasks).values() for each in result["cases"]]
    bounded = [f"{who}{part}_share" for part in PARTS for who in ("", "plain_")]
    return Report(
        seed=seed,
        figures=_figures(found),
        table=_table(found),
        waived=frozenset(bounded if cases < MIN_CASES_FOR_BOUNDS else ()),
    )


def _figures(found: CaseResults) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for part in ENUMERATED_PARTS:
        for who in found[0]["shares"][part]:
            share, name = _shares(found, part, who), who.replace("*", "").replace(" ", "_")
            before = part if who == "ours" else f"{name.replace('-', '_')}_{part}"
            figures |= {
                f"{before}_share": float(share.mean()),
                f"{before}_p5": float(np.quantile(share, 0.05)),
            }
    above = [
        share > 1 + 1e-9
        for each in found
        for part in ENUMERATED_PARTS
        for who, share in each["shares"][part].items()
        if who not in SHIFTING_MECHANISMS
    ]
    return figures | {
        "references_gain": figures["references_all_share"] - figures["plain_all_share"],
        "above_optimum": sum(above),
        "violations": int(sum(each["facts"]["violations"] for each in found)),
        "unsettled": sum(each["facts"]["drift"] > TOLERANCE for each in found),
        "cases": len(found),
    }


def _table(found: CaseResults) -> list[dict[str, Figure | str]]:
    table: list[dict[str, Figure | str]] = []
    parts = dict.fromkeys(part for each in found for part in each["shares"])
    for part in parts:
        names = next(each["shares"][part] for each in found if part in each["shares"])
        for who in names:
            share = _shares(found, part, who)
            sure = mean_interval(share)
            table.append(_row(part, who, share) | {"low": sure.low, "high": sure.high})
    floors = np.array([each["floors"] for each in found])
    for at, floor in enumerate(FAIRNESS_FLOORS):
        for column, what in enumerate(("lost", "least rate", "kept"), start=1):
            table.append(_row(f"floor {floor:.1f}", what, floors[:, at, column]))
    for fact in found[0]["facts"]:
        table.append(_row("cases", fact, np.array([each["facts"][fact] for each in found])))
    return table


def _shares(found: CaseResults, part: str, who: str) -> np.ndarray:
    return np.array([each["shares"][part][who] for each in found if part in each["shares"]])


def _row(part: str, who: str, values: np.ndarray) -> dict[str, Figure | str]:
    tails = np.quantile(values, [0.05, 0.95])
    return {
        "part": part,
        "who": who,
        "cases": len(values),
        "mean": float(values.mean()),
        "p5": float(tails[0]),
        "p95": float(tails[1]),
        "least": float(values.min()),
        "most": float(values.max()),
    }
