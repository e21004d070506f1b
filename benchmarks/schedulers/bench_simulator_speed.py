"""A benchmark of the time that a simulated week takes, under the integer program and under FCFS."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import RoundsOption
from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.comparison.workload import ROUND_S, SYNTHETIC, WorkloadSpec, make_scenario
from tessera.simulator.data import data_file
from tessera.simulator.figures import Figure, Report
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import Scenario
from tessera.solvers.rounds.plan import RoundOutcome

POLICY_BY_RUN: Final = {"fcfs": "fcfs", "ilp": "ilp:throughput"}
WARM_UP_ROUNDS: Final = 12
"""Warm-up rounds, after which kernels are loaded and placement has been mended once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """A run and its seconds. ``decide_s`` is spent in rounds, the rest in the world.

    ``worst_gap`` is the largest gap of a solved round to its bound, before placement.
    """

    result: Result
    wall_s: float
    cpu_s: float
    worst_gap: float

    @property
    def decide_s(self) -> float:
        """Return the seconds in which rounds were decided."""
        return sum(row.decide_s for row in self.result.rounds)


@register_case(
    "simulator-speed",
    smoke={"trace": Path(SYNTHETIC), "gpus_share": 0.05, "jobs": 20, "rounds": 40},
    ilp_s=("<=", 60.0),
    fcfs_s=("<=", 5.0),
    worst_gap=("<=", 1e-4),
    refused=("==", 0),
)
def simulator_speed(
    trace: Annotated[
        Path | None, typer.Option(help="CSV of a trace, or `synthetic`. Default: Philly.")
    ] = None,
    gpus_share: Annotated[float, typer.Option(help="Share of the cluster's GPUs to use.")] = 1.0,
    rounds: RoundsOption = 2000,
    jobs: Annotated[int, typer.Option(help="Number of synthetic jobs.")] = 400,
    seed: int = 0,
) -> Report:
    """Simulate a week of Philly on 1,280 GPUs with a round every 300 s, under one policy after the other.

    The jobs are all those that arrive within the rounds, and the rounds end with the horizon.
    ``worst_gap`` is the largest gap of a solved round to its proven bound. ``worst_placed_gap`` is the
    same of what could be placed: gangs that find no room on the nodes wait.
    ``ilp_s`` (throughput, at most 60) and ``fcfs_s`` (at most 5) are wall seconds of whole runs in
    this process, after a dozen rounds of warm-up. ``*_cpu_s`` are processor seconds, which other
    programs on the machine disturb less. ``*_decide_share`` is the share of the wall time that
    rounds took; the world took the rest. ``*_decided`` is the number of rounds that were decided.
    Under first come, first served, the other rounds were known to change nothing, because nothing
    had happened since a round that changed nothing. The limits are for two cores of a server, on
    which Arena's artifact takes 53 s for first come, first served. Without the data sets the jobs
    are synthetic, and the table says so. Times with other options than the defaults have no bounds.
    """
    work = _work(trace, gpus_share, rounds, jobs, seed)
    scenario = make_scenario(work).scenario
    result: dict[str, TimedRun] = {}
    for name, policy in POLICY_BY_RUN.items():
        _timed(scenario, policy, min(rounds, WARM_UP_ROUNDS), seed)
        result[name] = _timed(
            scenario, policy, rounds, seed, track_steps(rounds, f"{name}: rounds")
        )
    rows = result["ilp"].result.rounds
    figures: dict[str, Figure] = {
        "jobs": len(scenario.arrivals),
        "gpus": scenario.gpus,
        "worst_gap": result["ilp"].worst_gap,
        "worst_placed_gap": max((row.gap for row in rows), default=0.0),
        "refused": sum(one.result.refused for one in result.values()),
    }
    for name, one in result.items():
        figures |= {
            f"{name}_s": one.wall_s,
            f"{name}_cpu_s": one.cpu_s,
            f"{name}_rounds": len(one.result.rounds),
            f"{name}_decided": sum(row.decided for row in one.result.rounds),
            f"{name}_decide_share": one.decide_s / one.wall_s,
            f"{name}_rounds_per_s": len(one.result.rounds) / one.wall_s,
        }
    usual = work.trace != SYNTHETIC and trace is None
    exact = usual and gpus_share == 1 and rounds == 2000
    return Report(
        seed=seed,
        figures=figures,
        table=[_row(n, work, one) for n, one in result.items()],
        waived=frozenset() if exact else frozenset({"ilp_s", "fcfs_s"}),
    )


def _work(trace: Path | None, gpus_share: float, rounds: int, jobs: int, seed: int) -> WorkloadSpec:
    """Return the workload.

    Jobs that cannot run as requested stay, because other policies run them elsewhere.
    """
    result = trace or data_file(None, "arena", "trace_philly.csv") or SYNTHETIC
    return WorkloadSpec(
        trace=str(result),
        jobs=jobs,
        gpus_share=gpus_share,
        rounds=rounds,
        on_bad="keep",
        seed=seed,
    )


def _timed(
    scenario: Scenario, policy: str, rounds: int, seed: int, bar: Iterator[int] | None = None
) -> TimedRun:
    """Return a run of ``rounds`` rounds. ``bar`` advances with each."""
    decider, worst_gap = Decider(options_of(policy, seed)), 0.0

    def decide(snapshot: Snapshot) -> RoundOutcome:
        nonlocal worst_gap
        if bar is not None:
            next(bar, None)
        outcome = decider(snapshot)
        worst_gap = max([worst_gap, *(goal.gap for goal in outcome.goals)])
        return outcome

    began_s, cpu_s = time.perf_counter(), time.process_time()
    result = simulate(
        scenario, decide, Conditions(round_s=ROUND_S, horizon_s=rounds * ROUND_S), SystemClock()
    )
    return TimedRun(
        result=result,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - cpu_s,
        worst_gap=worst_gap,
    )


def _row(name: str, work: WorkloadSpec, one: TimedRun) -> dict[str, Figure | str]:
    seconds = np.array([row.decide_s for row in one.result.rounds if row.decided] or [0.0])
    present = [row.running + row.waiting for row in one.result.rounds]
    return {
        "policy": name,
        "workload": Path(work.trace).name,
        "rounds": len(one.result.rounds),
        "seconds": one.wall_s,
        "cpu_s": one.cpu_s,
        "decide_s": one.decide_s,
        "world_s": one.wall_s - one.decide_s,
        "decide_p50_s": float(np.median(seconds)),
        "decide_p99_s": float(np.quantile(seconds, 0.99)),
        "decide_max_s": float(seconds.max()),
        "jobs_mean": float(np.mean(present)) if present else 0.0,
        "jobs_most": max(present, default=0),
        "finished": int(np.isfinite(one.result.end_s).sum()),
        "worst_gap": max((row.gap for row in one.result.rounds), default=0.0),
    }
