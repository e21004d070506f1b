"""Runs of a scenario under named policies, and their replay by the independent executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.tables import Floats
from tessera.service.cli.render import err, print_note
from tessera.service.cli.simulation.network import NetworkOptions, SharedNetwork
from tessera.service.cli.simulation.world import ChosenScenario, window_s
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.comparison.runs import FinishedRun, run_data
from tessera.simulator.executor import ReplayFailed, replay_lines
from tessera.simulator.hazards import Hazards, draw_failures, draw_stragglers
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.network.slowdowns import ContentionRecord
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.truth import perturb_estimates

RELATIVE_TOLERANCE: Final = 1e-6
"""The largest relative difference allowed between two completion times of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The conditions under which policies run, from the command line.

    An inf or a 0 switches a condition off.
    """

    overheads: str
    round_s: float
    on_events: bool
    horizon_s: float
    error: float
    hazards: Hazards | None
    wiring: NetworkOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """The run of a policy, also in the form that benchmarks read.

    ``policy`` is the policy's name. If several network mechanisms run, it includes the name of the
    mechanism, ``network``.
    """

    policy: str
    result: Result
    ran: FinishedRun
    network: str = ""  # "" without a network
    met: ContentionRecord | None = None  # None if jobs share no network


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """The executor's replay of a run's log.

    ``wrong`` is the executor's refusal, or the job whose completion time differs. It is "" if all
    is well.
    """

    jobs: int
    off: float  # the largest relative difference of a completion time
    wrong: str


def conditions_of(chosen: ChosenScenario, settings: SimulationSettings, seed: int) -> Conditions:
    """Return the conditions, the same for all policies. Hazards are drawn until all work is done."""
    until_s = min(settings.horizon_s, chosen.ample_s)
    nodes, hazards = chosen.scenario.nodes, settings.hazards
    profiles = chosen.scenario.profiles
    return Conditions(
        overheads=preset_overheads(settings.overheads),
        round_s=settings.round_s,
        on_events=settings.on_events,
        horizon_s=settings.horizon_s,
        visible=perturb_estimates(profiles, settings.error, seed) if settings.error else None,
        failures=draw_failures(nodes, until_s, seed, hazards) if hazards else (),
        stragglers=draw_stragglers(nodes, until_s, seed, hazards) if hazards else (),
    )


def run_all(
    names: Sequence[str],
    chosen: ChosenScenario,
    conditions: Conditions,
    seed: int,
    network: SharedNetwork | None = None,
) -> list[PolicyRun]:
    """Run every policy on the same scenario and conditions, with progress on standard error.

    With a network, each policy runs under each of the network's mechanisms.
    """
    mechanisms = network.wiring.mechanisms if network else ("",)
    planned = [(name, mechanism) for name in names for mechanism in mechanisms]
    labels = [
        name if len(mechanisms) == 1 else f"{name}, {mechanism}" for name, mechanism in planned
    ]
    clock, results = SystemClock(), list[tuple[Result, ContentionRecord | None]]()
    for done, (label, (name, mechanism)) in enumerate(zip(labels, planned, strict=True), 1):
        decider, under = Decider(options_of(name, seed)), conditions
        met = network.contended(mechanism, seed, clock.monotonic_s) if network else None
        if met is not None:
            under = replace(conditions, slowdowns=met)
        with _progress(label, len(chosen.scenario.arrivals)) as report:
            result = simulate(chosen.scenario, decider, under, clock, report)
        results.append((result, None if met is None else met.seen))
        if not err.is_terminal:
            print_note(f"{done}/{len(planned)} {label}")
    ends_s = [result.ended_s for result, _ in results]
    made = chosen.over(window_s(chosen.last_s, conditions.round_s, ends_s, conditions.horizon_s))
    return [
        PolicyRun(
            policy=label,
            result=result,
            ran=FinishedRun.read(run_data(result, made, mapped=True)),
            network=mechanism,
            met=seen,
        )
        for label, (_, mechanism), (result, seen) in zip(labels, planned, results, strict=True)
    ]


@contextmanager
def _progress(name: str, jobs: int) -> Iterator[Callable[[float, int], None]]:
    """Yield a callback that takes a run's time and its number of finished jobs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(name, total=jobs)
        yield lambda _now_s, over: shown.update(task, completed=over)


def replay_log(run: PolicyRun) -> ReplayOutcome:
    """Replay the run's log with the executor, and compare its times with the simulator's."""
    names = [arrival.spec.name for arrival in run.result.scenario.arrivals]
    try:
        replayed_s = replay_lines(lines_of(log_of(run.result)))
    except ReplayFailed as refused:
        return ReplayOutcome(jobs=len(names), off=math.inf, wrong=str(refused))
    theirs = np.array([replayed_s[name] for name in names])
    off = relative_differences(run.ran.jct_s, theirs)
    worst = int(np.argmax(off))
    wrong = ""
    if off[worst] > RELATIVE_TOLERANCE:
        ours_s, theirs_s = run.ran.jct_s[worst], theirs[worst]
        wrong = f"{names[worst]} takes {theirs_s:.6g} s in the executor, but {ours_s:.6g} s here"
    return ReplayOutcome(jobs=len(names), off=float(off[worst]), wrong=wrong)


def relative_differences(ours_s: Floats, theirs_s: Floats) -> Floats:
    """Return the relative differences, float64[jobs].

    A difference is 0 if neither job ended and inf if only one did.
    """
    both = np.isfinite(ours_s) & np.isfinite(theirs_s)
    off = np.where(np.isfinite(ours_s) == np.isfinite(theirs_s), 0.0, np.inf)
    off[both] = np.abs(ours_s[both] - theirs_s[both]) / np.maximum(np.abs(theirs_s[both]), 1.0)
    return off
