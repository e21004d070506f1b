"""A benchmark of what each stage of the portfolio is worth, alone and after the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.contest import churn_and_hint
from tessera.benchmarks.rounds.entries import OWN_OBJECTIVE, ContestEntry, draw_round, state_drawn
from tessera.benchmarks.rounds.families import MAX_CPU_S, NAMED_FAMILIES
from tessera.benchmarks.rounds.instances import FAMILIES
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.clusters import preset_cluster
from tessera.simulator.data import require_data_file
from tessera.simulator.figures import Figure, Report
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.memory import MemoryStore
from tessera.simulator.traces.profiles import read_profiles
from tessera.simulator.traces.trace import Arrival, read_trace
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.branching import Branching, KnapsackFilling
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.exact.portfolio import Portfolio, stages_for
from tessera.solvers.warm import run_every_loop

GAP: Final = 1e-4
LATER: Final = (Branching.name, CpSat.name, KnapsackFilling.name)
"""The stages that are compared. Greedy and shadow prices come before all of them."""
SIZES: Final[Mapping[str, Sequence[int]]] = {
    "real": (64, 300, 1_000, 10_000, 100_000),
    "philly": (300, 1_000),
    "testbed": (244,),
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
TRACES: Final = {
    "philly": ("trace_philly.csv", "arena-1280"),
    "testbed": ("trace_testbed_244.csv", "testbed-b"),
}
"""Published traces in the data folder, and their clusters. All jobs of a round are new."""
LARGE_JOBS: Final = 1_000
"""The number of jobs above which there are ``LARGE_SEEDS`` rounds at most."""
LARGE_SEEDS: Final = 2
CHURN: Final = 0.02
"""The share of jobs that are replaced before a realistic round is solved once more, warm."""
TYPES: Final = 4
LARGE_TYPES: Final = 10
"""The number of GPU types of a realistic round, and of one with 10,000 jobs or more."""


@dataclass(frozen=True, slots=True)
class _Run:
    solution: Solution
    cpu_s: float
    is_valid: bool


@register_case("stages", smoke={"families": "inverse", "seeds": 1}, violations=("==", 0))
def measure_stages(
    families: Annotated[
        str, typer.Option(help="Comma-separated families of rounds. Default: all.")
    ] = ",".join(SIZES),
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help=f"Number of rounds of each size; {LARGE_SEEDS} at most above 1,000 jobs."
        ),
    ] = 5,
    limit_s: Annotated[
        float, typer.Option(help="Processor seconds that each solve may take.")
    ] = MAX_CPU_S,
    seed: int = 0,
) -> Report:
    """Solve rounds by each stage alone, by all stages, and by all but one.

    Greedy and shadow prices come first in every run. The table has a row for each family and size.
    A gap is the largest of the seeds, and processor seconds are their mean. ``only_*`` is a stage
    alone after the prices, and ``no_*`` are all stages but that one. ``none`` are the prices alone,
    and ``all`` is the default portfolio. ``warm`` is the default portfolio on the round after a
    realistic one, with its answer and prices.
    """
    chosen = [name.strip() for name in families.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in SIZES]
    if unknown:
        raise InvalidInput("families", f"must be some of {', '.join(SIZES)}")
    run_every_loop()
    cases = [
        (family, jobs, min(seeds, LARGE_SEEDS) if jobs > LARGE_JOBS else seeds)
        for family in chosen
        for jobs in SIZES[family]
    ]
    rounds = sum(count for _, _, count in cases)
    steps = track_steps(rounds, "rounds")
    table: list[dict[str, Figure | str]] = []
    broken = 0
    for family, jobs, count in cases:
        runs: dict[str, list[_Run]] = {}
        for number in range(seed, seed + count):
            next(steps)
            drawn = _draw(family, jobs, number)
            problem = state_drawn(drawn, OWN_OBJECTIVE).problem
            for name, pick in VARIANTS.items():
                runs.setdefault(name, []).append(_solve(problem, pick, limit_s, number))
            if isinstance(drawn, Snapshot) and family in FAMILIES:
                last = runs[DEFAULT][-1].solution
                later, hint = churn_and_hint(
                    drawn,
                    problem,
                    last,
                    CHURN,
                    number,
                    family,
                    Policy(objective=OWN_OBJECTIVE, promise_starts=False),
                )
                runs.setdefault("warm", []).append(
                    _solve(later, VARIANTS[DEFAULT], limit_s, number, hint)
                )
        row: dict[str, Figure | str] = {"family": family, "jobs": jobs}
        for name, done in runs.items():
            row[f"{name}_gap"] = max(run.solution.gap for run in done)
            row[f"{name}_cpu_s"] = statistics.mean(run.cpu_s for run in done)
            broken += sum(not run.is_valid for run in done)
        table.append(row)
    return Report(seed=seed, figures={"rounds": rounds, "violations": broken}, table=table)


def _pick(names: Sequence[str]) -> Callable[[Problem], tuple[Solver, ...]]:
    """Return the rule that keeps greedy, the prices and the stages ``names`` of a portfolio."""
    return lambda problem: tuple(
        stage for stage in stages_for(problem) if stage.name in names or stage.name not in LATER
    )


DEFAULT: Final = "all"
"""The name of the variant that is the default portfolio."""
VARIANTS: Final[Mapping[str, Callable[[Problem], tuple[Solver, ...]]]] = {
    "none": _pick(()),
    **{f"only_{name}": _pick((name,)) for name in LATER},
    **{f"no_{name}": _pick(tuple(other for other in LATER if other != name)) for name in LATER},
    DEFAULT: _pick(LATER),
}


def _draw(family: str, jobs: int, seed: int) -> Snapshot | Problem:
    if family in TRACES:
        return _draw_from_trace(*TRACES[family], jobs, seed)
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
    return draw_round(entry)


def _draw_from_trace(file: str, cluster: str, jobs: int, seed: int) -> Snapshot:
    """Return a round with ``jobs`` new jobs of a trace, in order from a drawn one."""
    trace = read_trace(require_data_file("arena", file))
    first = int(np.random.default_rng(seed).integers(len(trace) - jobs + 1))
    gpu_types, nodes = preset_cluster(cluster)
    scenario = Scenario(
        gpu_types=gpu_types,
        nodes=nodes,
        profiles=tuple(read_profiles(require_data_file("arena", "alpa_optimal.csv"))),
        arrivals=tuple(Arrival(0.0, a.spec) for a in trace[first : first + jobs]),
    )
    store = MemoryStore(scenario, np.zeros(jobs))
    for job in range(jobs):
        store.arrive(job, 0.0)
    return store.snapshot(0.0)


def _solve(
    problem: Problem,
    pick: Callable[[Problem], tuple[Solver, ...]],
    limit_s: float,
    seed: int,
    hint: Solution | None = None,
) -> _Run:
    began_s = time.process_time()
    budget = Budget(
        remaining_s=lambda: limit_s - (time.process_time() - began_s), seed=seed, gap=GAP
    )
    solution = Portfolio(pick(problem)).solve(problem, budget, hint)
    return _Run(
        solution=solution,
        cpu_s=time.process_time() - began_s,
        is_valid=solution.has_answer and not find_violations(problem, solution),
    )
