"""Experiments run through a real server on events, compared with the simulator's runs of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.training import Verdicts, run_databases, serve_scenario
from tessera.estimator.samples import sample_profiles
from tessera.formulation.clock import SystemClock
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.clusters import preset_cluster
from tessera.simulator.figures import Figure, Report
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.workloads.philly_like import Habits, philly_like
from tessera.solvers.rounds.options import RoundOptions

RESTART_S: Final = 120.0
"""Seconds of training time that every start and move costs, in both worlds."""

PERIOD_S: Final = 600.0
"""Seconds of training time between periodic rounds, and the length of a slot of deadlines."""

CLUSTER_SHARE: Final = 0.3
"""Share of the nodes of the small preset cluster, so that a few jobs overload it."""

HABITS: Final = Habits(
    mean_gap_s=180.0,
    median_s=1800.0,
    duration_sigma=0.8,
    longest_s=3600.0,
    gpus=(1, 2, 4),
    gpu_shares=(0.4, 0.3, 0.3),
)
"""Jobs that are short enough to finish while somebody waits."""

TIGHTNESS: Final = (0.4, 2.5)
"""The range of deadlines, in multiples of a job's duration on what it requested."""

WORK: Final = 0.1
"""Deterministic seconds that CP-SAT may work on each simulated round."""

DEADLINE: Final = "deadline"
COMPARED: Final = ("fcfs", "jct")
EXPERIMENTS: Final = {
    DEADLINE: RoundOptions(objective="deadline", round_s=PERIOD_S),
    "fcfs": RoundOptions(scheduler="fcfs", round_s=PERIOD_S),
    "jct": RoundOptions(objective="jct", round_s=PERIOD_S),
}


CLOCK_FACTOR: Final = 150.0
"""The greatest factor at which the moment that a server takes is short compared with a job."""

TIMED: Final = frozenset({"deadlines_agree", "jct_error", "order_agrees"})
"""Figures whose bounds hold up to that factor only."""


@register_case(
    "agreement",
    smoke={"jobs": 6, "clock_factor": 500.0},
    deadlines_agree=(">=", 0.85),
    jct_error=("<=", 0.1),
    order_agrees=("==", True),
    all_ended=("==", True),
)
def compare_with_simulator(
    jobs: Annotated[int, typer.Option(min=2, help="Number of jobs of each experiment.")] = 20,
    clock_factor: Annotated[
        float, typer.Option(help="Factor by which training runs faster than in reality.")
    ] = CLOCK_FACTOR,
    spacing_s: Annotated[
        float, typer.Option(help="Least time between two rounds, in seconds of training.")
    ] = 60.0,
    seed: int = 0,
) -> Report:
    """Run a deadline experiment and two policies through a real server and in the simulator.

    The server has PostgreSQL, agents over a socket, and rounds on events with the same spacing
    and period as the simulator's. Training runs CLOCK-FACTOR times as fast as in reality, and all times
    are of training. Nobody calls Schedule.

    ``deadlines_agree`` is the share of jobs that met their deadline in both worlds or in neither,
    under look-ahead. ``jct_error`` is the largest difference of the mean JCT of a policy, relative
    to the simulator's, for FCFS and for the objective ``jct`` on the same jobs without deadlines.
    ``order_agrees`` says whether both worlds prefer the same of the two by mean JCT. ``all_ended``
    says whether every job ended in both worlds.

    A server takes a moment for what the simulator does at once. A fifth of a second for a round,
    messages and writes is 30 s of training by default, a few hundredths of a job's time. The bound
    of a tenth on ``jct_error`` leaves room for a busy machine. A job near its deadline may go either
    way and take another with it, so ``deadlines_agree`` may be as low as 0.85. With a greater
    ``--clock-factor``, these bounds are waived.
    """
    types, nodes = preset_cluster("tiny", CLUSTER_SHARE)
    profiles = sample_profiles()
    plain = Scenario(
        gpu_types=types, nodes=nodes, profiles=profiles, arrivals=_arrivals(jobs, seed, profiles)
    )
    scenarios = dict.fromkeys(COMPARED, plain) | {DEADLINE: _dated(plain, seed)}
    options = {name: replace(one, seed=seed) for name, one in EXPERIMENTS.items()}
    simulated = {name: _simulate(scenarios[name], one, spacing_s) for name, one in options.items()}
    serve = partial(serve_scenario, spacing_s=spacing_s, restart_s=RESTART_S, factor=clock_factor)
    with (
        run_databases(len(options)) as urls,
        ThreadPoolExecutor(len(options)) as servers,  # they are idle most of the time
    ):
        named = zip(options, urls, strict=True)
        running = {n: servers.submit(serve, url, scenarios[n], options[n]) for n, url in named}
        served = {name: run.result() for name, run in running.items()}
    return Report(
        seed=seed,
        figures=_figures(simulated, served),
        table=[
            {
                "experiment": name,
                "jct_s": _mean_jct_s(served[name]),
                "jct_simulated_s": _mean_jct_s(simulated[name]),
                "met": sum(served[name].met),
                "met_simulated": sum(simulated[name].met),
                "rounds": served[name].rounds,
                "rounds_simulated": simulated[name].rounds,
            }
            for name in EXPERIMENTS
        ],
        waived=TIMED if clock_factor > CLOCK_FACTOR else frozenset(),
    )


def _figures(
    simulated: Mapping[str, Verdicts], served: Mapping[str, Verdicts]
) -> dict[str, Figure]:
    """Return how far the two worlds agree."""
    met = np.array([world[DEADLINE].met for world in (served, simulated)])
    errors = [_mean_jct_s(served[n]) / _mean_jct_s(simulated[n]) - 1 for n in COMPARED]
    best = [min(COMPARED, key=lambda n: _mean_jct_s(w[n])) for w in (served, simulated)]
    times = [world[name].jct_s for world in (served, simulated) for name in COMPARED]
    return {
        "deadlines_agree": float((met[0] == met[1]).mean()),
        "deadlines_met": int(met[0].sum()),
        "deadlines_met_simulated": int(met[1].sum()),
        "jct_error": max(abs(error) for error in errors),
        "order_agrees": best[0] == best[1],
        "all_ended": bool(np.isfinite(times).all()),
    }


def _mean_jct_s(verdicts: Verdicts) -> float:
    return float(np.mean(verdicts.jct_s))


def _arrivals(jobs: int, seed: int, profiles: Sequence[EstimateRecord]) -> list[Arrival]:
    """Return jobs of which the first arrives at once. Each states what a start costs."""
    drawn = philly_like(jobs, seed, profiles=profiles, habits=HABITS)
    first_s = drawn[0].arrival_s
    return [
        Arrival(arrival_s - first_s, replace(spec, restart_s=RESTART_S))
        for arrival_s, spec in drawn
    ]


def _dated(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario in which jobs have deadlines."""
    fastest = dict[tuple[object, str, int], float]()
    for e in scenario.profiles:
        key = (e.workload, e.cell.gpu_type, e.cell.gpus)
        fastest[key] = min(e.iter_time_s, fastest.get(key, e.iter_time_s))
    rng, arrivals = np.random.default_rng(seed), list[Arrival]()
    for arrival_s, spec in scenario.arrivals:
        iter_time_s = fastest[spec.workload, spec.requested_type, spec.requested_gpus]
        deadline_s = spec.iterations * iter_time_s * float(rng.uniform(*TIGHTNESS))
        arrivals.append(Arrival(arrival_s, replace(spec, deadline_s=deadline_s)))
    return replace(scenario, arrivals=arrivals)


def _simulate(scenario: Scenario, options: RoundOptions, spacing_s: float) -> Verdicts:
    """Run the scenario in the simulator, with rounds as a server has them."""
    conditions = Conditions(
        overheads=Overheads(save_s=0.0, load_s=RESTART_S, search_s={1: 0.0}),
        round_s=options.round_s,
        on_events=True,
        spacing_s=spacing_s,
    )
    result = simulate(scenario, Decider(options, work=WORK), conditions, SystemClock())
    jct_s = result.end_s - result.arrival_s
    succeeded = np.array([state == "succeeded" for state in result.state])
    due_s = np.array([arrival.spec.deadline_s for arrival in scenario.arrivals])
    return Verdicts(
        jct_s=np.where(succeeded, jct_s, np.inf).tolist(),
        met=(succeeded & (jct_s <= due_s)).tolist(),
        rounds=len(result.rounds),
    )
