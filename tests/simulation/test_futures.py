"""Futures of a snapshot, compared with the world that the snapshot is from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import NOT_STATED
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.forecasts import Submission
from tessera.formulation.state.last_round import (
    NO_EXPECTED_RELEASES,
    PlannedNodes,
    PlannedStarts,
    StartPlan,
)
from tessera.formulation.state.snapshot import Jobs, Snapshot
from tessera.simulator.executor import replay_lines
from tessera.simulator.forecasts.draws import Draw, History, draw_facts
from tessera.simulator.forecasts.future import follow_future
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import perturb_estimates
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.laws import examples
from tests.support.snapshots import snapshots
from tests.support.worlds import BERT, StoppedClock, a_profile, a_scenario, an_arrival

ROUND_S = 60.0
RHYTHM = RoundRhythm(spacing_s=ROUND_S, period_s=math.inf, settled=True)
SAME_COSTS = Overheads(save_s=0.0, load_s=30.0, search_s={1: 0.0})
"""Overheads under which every start costs what the snapshot states."""


def some_arrivals(seed: int, count: int = 24) -> list[Arrival]:
    """Return jobs of one to eight GPUs that come more often than two nodes can serve."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(60.0, count))
    return [
        an_arrival(
            f"j{i:02d}",
            float(at_s),
            iterations=int(rng.integers(200, 4000)),
            requested_gpus=int(rng.choice([1, 2, 4, 8])),
            longest_run_s=(math.inf, math.inf, 300.0, 900.0)[i % 4],
            tenant="research" if i % 3 else "product",
        )
        for i, at_s in enumerate(times)
    ]


def watch(
    arrivals: list[Arrival],
    from_s: float,
    early: dict[str, float],
    options: RoundOptions | None = None,
    error: float = 0.0,
) -> tuple[Result, Snapshot]:
    """Return a run, and its snapshot after the first round from ``from_s`` on."""
    seen: list[Snapshot] = []

    def observe(world: World) -> None:
        if world.now_s >= from_s and not seen:
            seen.append(world.snapshot())

    scenario = a_scenario(*arrivals)
    visible = perturb_estimates(scenario.profiles, error, seed=7)
    conditions = Conditions(
        overheads=SAME_COSTS,
        visible=[replace(one, source=EstimateSource.ANALYTIC) for one in visible],
        on_events=True,
        round_s=ROUND_S,
        ended_early=early,
        measures=True,
    )
    result = simulate(
        scenario,
        Decider(options or RoundOptions(solver="greedy")),
        conditions,
        StoppedClock(),
        observe=observe,
    )
    return result, seen[0]


def as_rows(snapshot: Snapshot, arrivals: list[Arrival]) -> Jobs:
    """Return arrivals as jobs of the snapshot, which has one workload."""
    return Jobs.from_rows(
        [
            {
                "name": spec.name,
                "workload": 0,
                "iterations": float(spec.iterations),
                "iterations_left": float(spec.iterations),
                "requested_gpus": spec.requested_gpus,
                "tenant": spec.tenant,
                "submit_s": EPOCH_S + at_s,
                "queued_s": EPOCH_S + at_s,
                "restart_s": float(snapshot.jobs.restart_s[0]),
                "run_left_s": spec.longest_run_s,
            }
            for at_s, spec in arrivals
        ]
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "fair_share", "error"),
    [
        (0, "", 0.0),
        (1, "", 0.0),
        (7, "", 0.3),
        (3, "", 0.3),
        (4, "", 0.3),
        (0, "drf", 0.0),
        (1, "gpus", 0.3),
    ],
)
def test_a_future_that_knows_everything_is_what_the_world_does(
    seed: int, fair_share: str, error: float
) -> None:
    """Estimates are wrong by ``error``, until they are measured on both sides."""
    options = RoundOptions(solver="greedy", fair_share=fair_share, fair_half_life_s=900.0)
    arrivals = some_arrivals(seed)
    names = [one.spec.name for one in arrivals]
    whole = {one.spec.name: one.spec.iterations for one in arrivals}
    early = {names[job]: 0.1 * job for job in (2, 5, 9)}
    early = {name: round(share * whole[name]) / whole[name] for name, share in early.items()}
    result, snapshot = watch(arrivals, 600.0 if error else 900.0, early, options, error)
    true_s = {profile.cell.gpus: profile.iter_time_s for profile in a_scenario().profiles}
    if error:
        assert (snapshot.estimates.source != EstimateSource.MEASURED).any()
    now_s = snapshot.now_s - EPOCH_S
    later = [one for one in arrivals if one.arrival_s > now_s]
    live = snapshot.jobs.name
    share = [early.get(name, 1.0) for name in (*live, *(one.spec.name for one in later))]
    draw = Draw(
        iter_time_s=np.array([true_s[gpus] for gpus in snapshot.estimates.gpus.tolist()]),
        share=np.array(share),
        arrivals=as_rows(snapshot, later),
    )
    future = follow_future(snapshot, draw, Decider(options), RHYTHM)
    own = [names.index(name) for name in live]
    assert future.finish_s - EPOCH_S == pytest.approx(result.end_s[own], abs=0.01)
    starts = [
        min((s.start_s for s in result.segments if s.job == job and s.start_s > now_s), default=0.0)
        for job in own
    ]
    waited = [snapshot.jobs.since_s[job] == 0 for job in range(len(own))]
    assert any(waited)
    first = [start_s for start_s, waits in zip(starts, waited, strict=True) if waits]
    assert future.start_s[waited] - EPOCH_S == pytest.approx(first, abs=0.01)
    soon_s = now_s + ROUND_S
    held = {names[s.job] for s in result.segments if s.start_s <= soon_s + 0.01 < s.end_s}
    over = {names[job] for job in np.flatnonzero(result.end_s <= soon_s).tolist()}
    there = [name not in over for name in live] + [one.arrival_s <= soon_s for one in later]
    everyone = [*live, *(one.spec.name for one in later)]
    waits = [is_there and name not in held for name, is_there in zip(everyone, there, strict=True)]
    assert future.soon_waits.tolist() == waits
    trains = [is_there and name in held for name, is_there in zip(everyone, there, strict=True)]
    assert (future.soon_speed > 0).tolist() == trains


def test_a_future_ends_at_its_horizon_with_what_has_not_happened() -> None:
    _, snapshot = watch(some_arrivals(0), 900.0, {})
    count = len(snapshot.jobs)
    draw = Draw(
        iter_time_s=snapshot.estimates.iter_time_s,
        share=np.ones(count),
        arrivals=Jobs.from_rows([]),
    )
    decide = Decider(RoundOptions(solver="greedy"))
    times = follow_future(snapshot, draw, decide, replace(RHYTHM, horizon_s=120.0))
    assert not (times.finish_s > snapshot.now_s + 120.0 + 1.0)[np.isfinite(times.finish_s)].any()
    assert np.isinf(times.finish_s).any()


def test_a_job_that_starts_again_has_neither_its_former_cell_nor_its_former_training() -> None:
    """``old`` gives way to ``new``, and starts again when that has ended."""
    old: dict[str, Any] = {
        "cell": (0, 1, 1),
        "current_cpus": 8,
        "current_host_bytes": 9,
        "generation": 1,
    }
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=1)],
        estimates=[an_estimate(cpus=4)],
        jobs=[
            a_job("old", state=JobState.RUNNING, unsaved_since_s=1.0, since_s=1.0, **old),
            a_job("new", weight=1e3, iterations=50.0, iterations_left=50.0),
        ],
        gangs={0: Gang(members=((0, (0,)),))},
    )
    draw = Draw(
        iter_time_s=snapshot.estimates.iter_time_s,
        share=np.ones(2),
        arrivals=Jobs.from_rows([]),
    )
    options = RoundOptions(
        solver="greedy", keep_requests=False, promise_starts=False, change_spacing=0.0
    )
    decide, seen = Decider(options), list[Snapshot]()

    def watched(now: Snapshot) -> RoundOutcome:
        seen.append(now)
        return decide(now)

    follow_future(snapshot, draw, watched, replace(RHYTHM, period_s=60.0, horizon_s=1_000.0))
    rows = [one.jobs.row(0) | {"now_s": one.now_s} for one in seen]
    waits = next(row for row in rows if row["current_gpus"] == 0)
    assert (waits["current_cpus"], waits["current_host_bytes"]) == (NOT_STATED, NOT_STATED)
    again = next(row for row in rows if row["generation"] > 1)
    assert again["current_gpus"] == 1
    assert again["current_cpus"] == NOT_STATED  # what the estimates of its Cell state
    assert again["unsaved_since_s"] == again["since_s"] > snapshot.now_s


def test_a_future_carries_planned_and_promised_starts_from_round_to_round() -> None:
    """``first`` runs on the only GPU until it ends. The rounds plan the starts of the other two."""
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=1)],
        estimates=[an_estimate()],
        jobs=[
            a_job("first", iterations=90.0, iterations_left=90.0),
            a_job("second", requested_gpus=1, weight=0.1, iterations=50.0, iterations_left=50.0),
            a_job("third", requested_gpus=1, weight=0.01),
        ],
    )
    draw = Draw(
        iter_time_s=snapshot.estimates.iter_time_s,
        share=np.ones(3),
        arrivals=Jobs.from_rows([]),
    )
    decide, snapshots = Decider(RoundOptions(solver="greedy")), list[Snapshot]()

    def plan_last_job(snapshot_now: Snapshot) -> RoundOutcome:
        """Plan the start of the last job in the first round, and nothing in the others."""
        snapshots.append(snapshot_now)
        last_job = len(snapshot_now.jobs) - 1
        start = {"start_s": snapshot_now.now_s + 1e4, "end_s": snapshot_now.now_s + 2e4}
        cell = {"gpu_type": 0, "gpus": 1, "pipeline_degree": 1, "plan": 0}
        plan = StartPlan(
            starts=PlannedStarts.from_rows([{"job": last_job} | start | cell]),
            nodes=PlannedNodes.from_rows([{"start": 0, "node": 0, "gpus": 1}]),
            start_by_s=np.where(np.arange(last_job + 1) > 0, snapshot_now.now_s + 1e4, np.inf),
            expected_releases=NO_EXPECTED_RELEASES,
        )
        return replace(decide(snapshot_now), plan=plan if len(snapshots) == 1 else None)

    rhythm = replace(RHYTHM, period_s=60.0, horizon_s=1_000.0)
    follow_future(snapshot, draw, plan_last_job, rhythm)
    assert len(snapshots[0].planned_starts) == 0
    rows = [
        dict(zip(view.jobs.name, view.jobs.start_by_s.tolist(), strict=True)) for view in snapshots
    ]
    by_s = snapshots[0].now_s + 1e4
    assert rows[1] == {"first": math.inf, "second": by_s, "third": by_s}
    assert {"second": by_s, "third": by_s} in rows
    assert rows[-1] == {"third": math.inf}
    for view in snapshots[1:]:
        waits = int("third" in view.jobs.name and view.jobs.current_gpus[-1] == 0)
        assert view.planned_starts.job.tolist() == [len(view.jobs) - 1] * waits
        assert view.planned_nodes.start.tolist() == [0] * waits
    assert not waits  # at last, it runs


@given(snapshots(), st.integers(0, 2**16))
@examples(25)
def test_futures_of_any_snapshot_hold_no_gpu_twice_and_end(snapshot: Snapshot, seed: int) -> None:
    """Every round of a future is checked, so one that held a GPU twice would be refused."""
    refused: list[object] = []
    decide = Decider(RoundOptions(solver="greedy"))

    def checked(seen: Snapshot) -> object:
        outcome = decide(seen)
        refused.extend(outcome.violations)
        return outcome

    past = [
        Submission(
            submit_s=snapshot.now_s - 50.0 * back,
            workload=snapshot.workloads[back % len(snapshot.workloads)],
            iterations=40,
            requested_gpus=1,
            trained_share=1.0,
        )
        for back in range(20, 0, -1)
    ]
    draw = draw_facts(snapshot, History.of(past, snapshot), 600.0, np.random.default_rng(seed))
    rhythm = RoundRhythm(spacing_s=30.0, period_s=200.0, horizon_s=1200.0)
    times = follow_future(snapshot, draw, checked, rhythm)  # type: ignore[arg-type]
    assert not refused
    assert not (times.start_s < snapshot.now_s).any()
    assert not (times.finish_s < snapshot.now_s).any()


def test_a_submission_of_an_unknown_workload_counts_for_the_rate_of_arrivals() -> None:
    _, snapshot = watch(some_arrivals(0), 900.0, {})
    other = replace(BERT, model="unheard")
    past = [
        Submission(
            submit_s=snapshot.now_s - 1000.0 + 10.0 * i,
            workload=BERT if i % 2 else other,
            iterations=10,
            requested_gpus=1,
        )
        for i in range(100)
    ]
    history = History.of(past, snapshot)
    assert len(history.jobs) == 50
    arrivals = [
        len(draw_facts(snapshot, history, 5000.0, np.random.default_rng(seed)).arrivals)
        for seed in range(40)
    ]
    assert np.mean(arrivals) == pytest.approx(500, rel=0.1)


def test_jobs_that_end_early_or_time_out_are_cancelled_or_failed_and_their_log_replays() -> None:
    arrivals = [
        an_arrival("a", iterations=1000),
        an_arrival("b", iterations=1000, longest_run_s=500.0),
    ]
    conditions = Conditions(overheads=SAME_COSTS, ended_early={"a": 0.25})
    result = simulate(
        a_scenario(*arrivals, profiles=(a_profile(1, 1.0),)),
        Decider(RoundOptions(solver="greedy")),
        conditions,
        StoppedClock(),
    )
    assert result.state == ("cancelled", "failed")
    assert result.end_s.tolist() == pytest.approx([280.0, 500.0])
    assert replay_lines(lines_of(log_of(result))) == pytest.approx({"a": 280.0, "b": 500.0})


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_job_ends_after_a_share_of_its_iterations(share: float) -> None:
    with pytest.raises(InvalidInput, match="ended_early"):
        Conditions(ended_early={"a": share})
