"""A benchmark of what each stage of the portfolio is worth, alone and after the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.entries import OWN_OBJECTIVE, ContestEntry, draw_round, state_drawn
from tessera.benchmarks.rounds.families import MAX_CPU_S, NAMED_FAMILIES
from tessera.benchmarks.rounds.instances import FAMILIES
from tessera.formulation.check import find_violations
from tessera.formulation.errors import InvalidInput
from tessera.formulation.problem import Problem
from tessera.simulator.figures import Figure, Report
from tessera.solvers.base import Budget, Solver
from tessera.solvers.branching import Branching, KnapsackFilling
from tessera.solvers.cpsat import CpSat
from tessera.solvers.kernels.warm import run_every_loop
from tessera.solvers.portfolio import Portfolio, stages_for

GAP: Final = 1e-4
LATER: Final = (Branching.name, CpSat.name, KnapsackFilling.name)
"""The stages that are compared. Greedy and shadow prices come before all of them."""
SIZES: Final[Mapping[str, Sequence[int]]] = {
    "real": (64, 300, 1_000, 10_000),
    "equal-ratios": (300, 1_000),
    "tight": (300, 2_048, 10_000),
    "alike": (1_000,),
    "identical": (300, 4_096),
    "subset-sum": (20,),
    "inverse": (100,),
    "odd-counts": (300, 1_000, 10_000),
    "small-values": (1_000, 10_000),
    "nested-quotas": (300, 1_000, 2_048),
    "three-resources": (64, 300, 1_000, 2_048),
    "forty-types": (300, 2_048),
    "few-large": (64, 300, 1_000),
    "mmkp": (100, 250, 400),
    "arena": (300, 4_096),
}
TYPES: Final = 4
LARGE_TYPES: Final = 10
"""The number of GPU types of a realistic round, and of one with 10,000 jobs or more."""


@dataclass(frozen=True, slots=True)
class _Run:
    gap: float
    cpu_s: float
    is_valid: bool


@register_case("stages", smoke={"families": "inverse", "seeds": 1}, violations=("==", 0))
def measure_stages(
    families: Annotated[
        str, typer.Option(help="Comma-separated families of rounds. Default: all.")
    ] = ",".join(SIZES),
    seeds: Annotated[int, typer.Option(min=1, help="Number of rounds of each size.")] = 2,
    limit_s: Annotated[
        float, typer.Option(help="Processor seconds that each solve may take.")
    ] = MAX_CPU_S,
    seed: int = 0,
) -> Report:
    """Solve rounds by each stage alone, by all stages, and by all but one.

    Greedy and shadow prices come first in every run. The table has a row for each family and size.
    A gap is the largest of the seeds, and processor seconds are their mean. ``only_*`` is a stage
    alone after the prices, and ``no_*`` are all stages but that one. ``none`` are the prices alone,
    and ``all`` is the default portfolio.
    """
    chosen = [name.strip() for name in families.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in SIZES]
    if unknown:
        raise InvalidInput("families", f"must be some of {', '.join(SIZES)}")
    run_every_loop()
    cases = [(family, jobs) for family in chosen for jobs in SIZES[family]]
    steps = track_steps(len(cases) * seeds, "rounds")
    table: list[dict[str, Figure | str]] = []
    broken = 0
    for family, jobs in cases:
        runs: dict[str, list[_Run]] = {}
        for number in range(seed, seed + seeds):
            next(steps)
            problem = _draw(family, jobs, number)
            for name, pick in VARIANTS.items():
                run = _solve(problem, pick, limit_s, number)
                runs.setdefault(name, []).append(run)
                broken += not run.is_valid
        row: dict[str, Figure | str] = {"family": family, "jobs": jobs}
        for name, done in runs.items():
            row[f"{name}_gap"] = max(run.gap for run in done)
            row[f"{name}_cpu_s"] = statistics.mean(run.cpu_s for run in done)
        table.append(row)
    return Report(
        seed=seed, figures={"rounds": len(cases) * seeds, "violations": broken}, table=table
    )


def _pick(names: Sequence[str]) -> Callable[[Problem], tuple[Solver, ...]]:
    """Return the rule that keeps greedy, the prices and the stages ``names`` of a portfolio."""
    return lambda problem: tuple(
        stage for stage in stages_for(problem) if stage.name in names or stage.name not in LATER
    )


VARIANTS: Final[Mapping[str, Callable[[Problem], tuple[Solver, ...]]]] = {
    "none": _pick(()),
    **{f"only_{name}": _pick((name,)) for name in LATER},
    **{f"no_{name}": _pick(tuple(other for other in LATER if other != name)) for name in LATER},
    "all": _pick(LATER),
}


def _draw(family: str, jobs: int, seed: int) -> Problem:
    if family in NAMED_FAMILIES:
        gpus = types = 0
    else:
        gpus, types = jobs, TYPES if jobs < 10_000 else LARGE_TYPES
    entry = ContestEntry(
        solver=Portfolio.name,
        jobs=jobs,
        gpus=gpus,
        types=types,
        family=family,
        seed=seed,
        running=0.5 if family in FAMILIES else 0.0,
    )
    return state_drawn(draw_round(entry), OWN_OBJECTIVE).problem


def _solve(
    problem: Problem,
    pick: Callable[[Problem], tuple[Solver, ...]],
    limit_s: float,
    seed: int,
) -> _Run:
    began_s = time.process_time()
    budget = Budget(
        remaining_s=lambda: limit_s - (time.process_time() - began_s), seed=seed, gap=GAP
    )
    solution = Portfolio(pick(problem)).solve(problem, budget)
    return _Run(
        gap=solution.gap,
        cpu_s=time.process_time() - began_s,
        is_valid=solution.has_answer and not find_violations(problem, solution),
    )
