"""The worlds of supposed changes: one past, several realisations, and times that are measured."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.benchmarks.schedulers.supposed_worlds import (
    Chance,
    Supposed,
    SupposedWorlds,
    draw_chance,
    draw_ends,
)
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, make_scenario
from tessera.simulator.measured_times import MEASURED_ITERATIONS
from tessera.simulator.run import Result
from tessera.simulator.scenario import EPOCH_S
from tessera.solvers.rounds.options import RoundOptions

STANDING = RoundOptions(solver="pricing")


def begun() -> tuple[SupposedWorlds, Chance, Result, Snapshot]:
    work = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=16, load=2.5, rounds=10**6, seed=3)
    scenario = make_scenario(work).scenario
    names = [one.spec.name for one in scenario.arrivals]
    own = Chance(arrivals=scenario.arrivals, early=draw_ends(names, 0.25, np.random.default_rng(1)))
    worlds = SupposedWorlds(
        scenario=scenario,
        standing=STANDING,
        error=0.1,
        at_s=0.5 * scenario.arrivals[-1].arrival_s,
        horizon_s=600.0,
    )
    return worlds, own, *worlds.begin(own)


def test_realisations_share_the_past_and_a_change_of_nothing_changes_nothing() -> None:
    worlds, own, before, snapshot = begun()
    now_s = snapshot.now_s - EPOCH_S
    same = worlds.follow(own, Supposed(options=STANDING))
    assert same.segments == before.segments
    other = draw_chance(own, snapshot, 0.25, np.random.default_rng(5))
    assert sorted(one.spec.name for one in other.arrivals) == sorted(
        one.spec.name for one in own.arrivals
    )
    assert [one.arrival_s for one in other.arrivals] == sorted(
        one.arrival_s for one in other.arrivals
    )
    assert other.arrivals != own.arrivals
    told = worlds.follow(other)
    past = [
        [(s.job, s.start_s, s.cell) for s in result.segments if s.start_s <= now_s]
        for result in (before, told)
    ]
    assert sorted(past[0]) == sorted(past[1])
    jobs = snapshot.jobs
    for name, left, total in zip(jobs.name, jobs.iterations_left, jobs.iterations, strict=True):
        assert other.early.get(name, 1.0) > 1.0 - left / total


def test_a_time_is_true_once_a_job_has_trained_on_its_cell() -> None:
    worlds, _, _, snapshot = begun()
    estimates, jobs = snapshot.estimates, snapshot.jobs
    measured = estimates.source == int(EstimateSource.MEASURED)
    assert measured.any()
    assert not measured.all()
    true_s = worlds.true_times_s(snapshot)
    assert estimates.iter_time_s[measured] == pytest.approx(true_s[measured])
    runs = np.isfinite(true_s) & ~measured
    assert (true_s[runs] != estimates.iter_time_s[runs]).any()
    began_s = jobs.since_s + jobs.restart_s
    trains = np.flatnonzero((jobs.since_s > 0) & (began_s < snapshot.now_s)).tolist()
    assert trains
    for job in trains:
        cell = [getattr(jobs, name)[job] for name in jobs.CELL]
        own = estimates.workload == jobs.workload[job]
        for name, value in zip(estimates.CELL, cell, strict=True):
            own &= getattr(estimates, name) == value
        known_s = began_s[job] + (MEASURED_ITERATIONS + 1) * true_s[own & np.isfinite(true_s)].max()
        assert measured[own].all() or known_s > snapshot.now_s
