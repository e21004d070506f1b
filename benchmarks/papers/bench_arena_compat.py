"""A reproduction of Arena's artifact: its simulator's semantics, and its stored results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.papers.arena.arena import CompatResult, run_artifact
from tessera.benchmarks.papers.arena.oddities import (
    ALL_ODDITIES,
    PRUNED_LAUNCH_COST,
    ROUND_S,
    UNPRUNED_LAUNCH_COST,
    LaunchCost,
    Oddities,
    of_policy,
    switch_off,
)
from tessera.benchmarks.papers.arena.rigid import RigidScheduler
from tessera.formulation.errors import InvalidInput
from tessera.formulation.information import Information, data_parallel, searched_optimum, single_gpu
from tessera.formulation.snapshot import Snapshot
from tessera.simulator.clusters import arena_table1
from tessera.simulator.comparison.information import read_dp_memory
from tessera.simulator.data import require_data_file
from tessera.simulator.figures import Figure, Report
from tessera.simulator.run import Decider
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.profiles import read_profiles
from tessera.simulator.traces.trace import Arrival, read_trace
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.base import PublishedScheduler
from tessera.solvers.schedulers.registry import make_scheduler

MIN_COUNTED_SAMPLES_PER_S: Final = 100.0
"""The samples/s below which a round is left out of the artifact's mean."""
PADDED_JOBS: Final = 828
PADDED_S: Final = 569_700.0
"""The padding of each policy's times in the artifact.

They are padded to the number of jobs that Arena's policy finishes, with the longest time under any.
"""
STORED_ROUNDS: Final = 2000
"""The workload of the stored results: the Philly jobs that arrive within this number of rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """A policy's results on Philly, as stored by the artifact's authors."""

    finished: int
    mean_jct_s: float
    padded_jct_s: float
    mean_throughput: float
    peak_throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPolicy:
    """A policy as run by the artifact. With ``gate``, it sees the optimum behind a memory gate."""

    policy: Callable[[], PublishedScheduler]
    stored: StoredResult
    rigid: RigidScheduler | None = (
        None  # the approximation of the artifact's loop, if it is another policy
    )
    gate: bool = False
    single: bool = False  # whether it sees a single GPU's throughput times the count
    launch: LaunchCost = UNPRUNED_LAUNCH_COST


def _stored(finished: int, jct: float, padded: float, mean: float, peak: float) -> StoredResult:
    return StoredResult(
        finished=finished,
        mean_jct_s=jct,
        padded_jct_s=padded,
        mean_throughput=mean,
        peak_throughput=peak,
    )


ARTIFACT_POLICIES: Final = {
    "fcfs": ArtifactPolicy(
        policy=lambda: make_scheduler("fcfs"), stored=_stored(590, 83_192, 223_034, 4384.8, 6952.5)
    ),
    "gandiva": ArtifactPolicy(
        policy=lambda: make_scheduler("gandiva", "slice_s=inf"),
        rigid=RigidScheduler(name="gandiva-rigid"),
        stored=_stored(608, 78_455, 208_979, 4630.8, 7573.1),
    ),
    "gavel": ArtifactPolicy(
        policy=lambda: make_scheduler("gavel", "raw=true,max_changed=3"),
        gate=True,
        rigid=RigidScheduler(name="gavel-rigid", any_type=True),
        stored=_stored(642, 64_879, 178_280, 5049.4, 8738.3),
    ),
    "elasticflow-ls": ArtifactPolicy(
        policy=lambda: make_scheduler("elasticflow-ls"),
        gate=True,
        stored=_stored(573, 55_515, 213_869, 4629.7, 9588.5),
    ),
    "sia-arena": ArtifactPolicy(
        policy=lambda: make_scheduler("sia-arena"),
        gate=True,
        single=True,
        rigid=RigidScheduler(name="sia-rigid", any_type=True, any_count=True),
        stored=_stored(633, 44_394, 168_107, 5021.9, 9821.2),
    ),
    "arena": ArtifactPolicy(
        policy=lambda: make_scheduler("arena", "performance=samples"),
        launch=PRUNED_LAUNCH_COST,
        stored=_stored(828, 41_648, 41_648, 6770.6, 10_994.3),
    ),
}
"""The policies with stored results, at the settings nearest to those of the artifact."""


@register_case(
    "arena-compat",
    smoke={"rounds": 40, "policies": "fcfs"},
    finished_deviation=("<=", 0.01),
    mean_jct_deviation=("<=", 0.01),
    mean_throughput_deviation=("<=", 0.01),
)
def arena_compat(
    rounds: Annotated[int, typer.Option(help="Number of rounds of 300 s.")] = STORED_ROUNDS,
    policies: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated policies: {', '.join(ARTIFACT_POLICIES)}. Figures are of the first."
        ),
    ] = "fcfs",
    honest: Annotated[
        str, typer.Option(help="Comma-separated oddities of the artifact to switch off, or `all`.")
    ] = "",
    gate: Annotated[
        bool,
        typer.Option(help="Apply the memory gate of data parallelism where the artifact has it."),
    ] = True,
    rigid: Annotated[
        bool, typer.Option(help="Run Gavel, Sia and Gandiva with loops as rigid as the artifact's.")
    ] = False,
    seed: int = 0,
) -> Report:
    """Repeat the runs of Arena's artifact with its own accounting, and compare with its stored results.

    ``finished``, ``mean_jct_s`` (of finished jobs) and ``mean_throughput`` (raw samples/s, over
    rounds above 100) are of the first policy. The bounds limit the distance of first come, first
    served from the artifact's 590, 83,192 s and 4,384.8. They are waived for other policies, fewer
    rounds, or if oddities are switched off. The padded times follow the artifact: unfinished jobs,
    up to the 828 that its own policy finishes, count as the longest time seen under any policy.
    """
    names = [name.strip() for name in policies.split(",")]
    if unknown := [name for name in names if name not in ARTIFACT_POLICIES]:
        raise InvalidInput(
            "policies", f"unknown policy {unknown}; choose from {', '.join(ARTIFACT_POLICIES)}"
        )
    oddities = switch_off(ALL_ODDITIES, filter(None, (name.strip() for name in honest.split(","))))
    scenario = artifact_workload(rounds)
    memory = (
        optimum_behind_gate() if gate and any(ARTIFACT_POLICIES[n].gate for n in names) else None
    )
    result, took_s = {}, {}
    for name in names:
        began_s = time.perf_counter()
        result[name] = run_contestant(name, scenario, oddities, rounds, memory, seed, rigid=rigid)
        took_s[name] = time.perf_counter() - began_s
    same_work = rounds == STORED_ROUNDS
    table = [result_row(n, r, _padding(result, same_work), same_work) for n, r in result.items()]
    for line, name in zip(table, names, strict=True):
        line["seconds"] = took_s[name]
    figures: dict[str, Figure] = {
        k: abs(v) if k.endswith("_deviation") else v
        for k, v in table[0].items()
        if not isinstance(v, str) and k != "seconds"
    }
    figures["jobs"] = len(scenario.arrivals)
    bound = {f"{k}_deviation" for k in ("finished", "mean_jct", "mean_throughput")}
    exact = names[0] == "fcfs" and same_work and oddities == ALL_ODDITIES
    return Report(
        seed=seed, figures=figures, waived=frozenset() if exact else frozenset(bound), table=table
    )


def artifact_workload(rounds: int) -> Scenario:
    """Return the artifact's cluster with the jobs of the first ``rounds`` rounds.

    Raises:
        MissingData: a file is absent.
    """
    types, nodes = arena_table1()
    result = [
        Arrival(
            a.arrival_s, replace(a.spec, deadline_s=math.inf)
        )  # deadlines are on the trace's clock
        for a in read_trace(require_data_file("arena", "trace_philly.csv"), round_s=None)
        if a.arrival_s <= rounds * ROUND_S
    ]
    measured = require_data_file("arena", "alpa_optimal.csv")
    return Scenario(gpu_types=types, nodes=nodes, profiles=read_profiles(measured), arrivals=result)


def optimum_behind_gate() -> Information:
    """Return the optimum behind the artifact's memory gate.

    Raises:
        MissingData: the file is absent.
    """
    return data_parallel(read_dp_memory(require_data_file("arena", "dp_memory.csv")))


def visible_information(contestant: ArtifactPolicy, gate: Information | None) -> Information:
    """Return the information of a policy in the artifact, without a gate if ``gate`` is None."""
    linear = single_gpu()

    def told(snapshot: Snapshot) -> Snapshot:
        seen = linear(snapshot) if contestant.single else searched_optimum(snapshot)
        return gate(seen) if gate is not None and contestant.gate else seen

    return told


def run_contestant(
    name: str,
    scenario: Scenario,
    oddities: Oddities,
    rounds: int,
    gate: Information | None,
    seed: int,
    *,
    rigid: bool = False,
) -> CompatResult:
    """Run one policy as in the artifact, except for the oddities that are switched off."""
    one = ARTIFACT_POLICIES[name]
    policy = one.rigid if rigid and one.rigid is not None else one.policy()
    options = RoundOptions(seed=seed, defragment_every_rounds=0, raw_throughput=True)
    bar = track_steps(rounds, f"{name}: rounds")

    def progress(_round: int) -> None:
        next(bar, None)

    return run_artifact(
        scenario,
        Decider(options, visible_information(one, gate), policy=policy),
        rounds=rounds,
        launch=one.launch,
        oddities=of_policy(policy.name, oddities),
        progress=progress,
    )


def _padding(found: dict[str, CompatResult], same_work: bool) -> tuple[int, float]:
    """Return the number of jobs to which times are padded, and the time used as padding."""
    jobs = max(len(r.jct_s) for r in found.values())
    longest_s = max(float(r.jct_s.max(initial=0.0)) for r in found.values())
    return (PADDED_JOBS, PADDED_S) if same_work else (jobs, longest_s)


def result_row(
    name: str, result: CompatResult, padding: tuple[int, float], same_work: bool
) -> dict[str, Figure | str]:
    """Return a policy's results, with the artifact's stored ones if the work is the same."""
    jct_s, samples_s = result.jct_s, result.samples_s
    busy = samples_s[samples_s > MIN_COUNTED_SAMPLES_PER_S]
    missing = max(0, padding[0] - len(jct_s))
    padded_s = (float(jct_s.sum()) + missing * padding[1]) / max(1, len(jct_s) + missing)
    entered = np.isfinite(result.entered_s)
    line: dict[str, Figure | str] = {
        "policy": name,
        "finished": len(jct_s),
        "mean_jct_s": _mean(jct_s),
        "padded_jct_s": padded_s,
        "mean_throughput": _mean(busy),
        "peak_throughput": float(samples_s.max(initial=0.0)),
        "mean_queue_s": _mean(result.queued_s[entered]),
        "gains_per_job": _mean(result.gains[result.gains > 0].astype(np.float64)),
        "refused_rounds": result.refused,
    }
    if same_work:
        line |= _compare_with_stored(line, ARTIFACT_POLICIES[name].stored)
    return line


def _compare_with_stored(
    line: dict[str, Figure | str], stored: StoredResult
) -> dict[str, Figure | str]:
    result: dict[str, Figure | str] = {}
    for ours, theirs in (
        ("finished", "finished"),
        ("mean_jct", "mean_jct_s"),
        ("padded_jct", "padded_jct_s"),
        ("mean_throughput", "mean_throughput"),
        ("peak_throughput", "peak_throughput"),
    ):
        value = float(getattr(stored, theirs))
        result[f"artifact_{theirs}"] = value
        result[f"{ours}_deviation"] = float(line[theirs]) / value - 1.0
    return result


def _mean(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(values.mean()) if len(values) else math.nan
