"""Replans over many rounds: estimates that flicker cause few, and those that are made pay off."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.round.policy import MAX_SPACING
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.metrics import reference_of, run_figures
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import Scenario
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.laws import scaled
from tests.support.worlds import StoppedClock, a_profile, a_scenario, an_arrival, some_specs

RESTART_S = 60.0
ROUND_S = 60.0
OVERHEADS = Overheads(save_s=20.0, load_s=40.0, search_s={1: 0.0})
PLANS = ("dp", "tp", "zero")
NO_REPLANS = RoundOptions(solver="greedy", replan_spacing=MAX_SPACING)
LIMITED = RoundOptions(solver="greedy")
UNLIMITED = RoundOptions(solver="greedy", replan_spacing=0.0)


def a_busy_day(seed: int, speed_of: Callable[[str], float], nodes: int = 2) -> Scenario:
    """Return six jobs of some hours on nodes of four GPUs, which each of them needs.

    By each plan, the GPUs are as fast as ``speed_of`` says.
    """
    rng = np.random.default_rng(seed)
    arrivals = [
        an_arrival(
            f"job-{k}",
            float(at_s),
            iterations=int(rng.integers(4_000, 12_000)),
            requested_gpus=4,
            restart_s=RESTART_S,
        )
        for k, at_s in enumerate(np.sort(rng.uniform(0, 2 * 3600, 6)))
    ]
    profiles = [a_profile(4, 1.0 / speed_of(plan), plan=plan, nodes=1) for plan in PLANS]
    return a_scenario(*arrivals, nodes=some_specs(("a100", nodes, 4)), profiles=profiles)


class Flickering:
    """A decision maker whose estimates change by up to ``noise`` in each round.

    If ``is_stated``, they state that uncertainty.
    """

    def __init__(
        self, options: RoundOptions, noise: float, seed: int = 0, *, is_stated: bool = True
    ) -> None:
        self._decider, self._noise = Decider(options, work=0.01), noise
        self._sd = noise / math.sqrt(3) if is_stated else math.nan  # of a uniform distribution
        self._rng = np.random.default_rng(seed)

    def sees(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot as the rounds see it."""
        e = snapshot.estimates
        errors = np.exp(self._rng.uniform(-self._noise, self._noise, len(e)))
        sd = np.full(len(e), self._sd)
        return replace(snapshot, estimates=replace(e, iter_time_s=e.iter_time_s * errors, sd=sd))

    def __call__(self, snapshot: Snapshot) -> RoundOutcome:
        return self._decider(self.sees(snapshot))


class Learning(Flickering):
    """One that takes a plan to be half as fast as it is, until the first hour is over."""

    def sees(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot as the rounds see it."""
        e = snapshot.estimates
        slow = (e.plan == snapshot.plans.index("zero")) & (snapshot.round_number <= 3600 / ROUND_S)
        wrong = replace(e, iter_time_s=np.where(slow, 2.0, 1.0) * e.iter_time_s)
        return super().sees(replace(snapshot, estimates=wrong))


def run(scenario: Scenario, decide: Callable[[Snapshot], RoundOutcome]) -> Result:
    conditions = Conditions(overheads=OVERHEADS, round_s=ROUND_S)
    return simulate(scenario, decide, conditions, StoppedClock())


def count_replans(result: Result) -> int:
    return Counter(s.ended_by for s in result.segments)[DecisionKind.REPLAN]


def mean_jct_s(result: Result) -> float:
    assert set(result.state) == {"succeeded"}
    return float((result.end_s - result.arrival_s).mean())


def equal(plan: str) -> float:
    assert plan in PLANS
    return 1.0


def test_noise_of_some_percent_in_each_minute_causes_no_replan() -> None:
    scenario, noise = a_busy_day(1, equal), 0.04
    calm = run(scenario, Flickering(LIMITED, noise))
    assert count_replans(calm) == 0
    assert mean_jct_s(calm) == mean_jct_s(run(scenario, Flickering(NO_REPLANS, noise)))
    restless = run(scenario, Flickering(UNLIMITED, noise))
    assert count_replans(restless) > 50
    assert mean_jct_s(restless) > mean_jct_s(calm)


@pytest.mark.parametrize("seed", range(scaled(2)))
def test_replans_stay_within_their_limit_under_any_noise(seed: int) -> None:
    """A job restarts for a replan at most once in 20 restart times, so for 5 % of its time.

    The estimates state no uncertainty, and each job has GPUs of its own.
    """
    scenario = a_busy_day(seed, equal, nodes=6)
    noisy = run(scenario, Flickering(LIMITED, 0.2, seed, is_stated=False))
    assert count_replans(noisy) > 20
    starts_s, paid_s = defaultdict[int, list[float]](list), Counter[int]()
    for segment in sorted(noisy.segments, key=lambda s: (s.job, s.start_s)):
        starts_s[segment.job].append(segment.start_s)
        if segment.ended_by == DecisionKind.REPLAN:
            assert segment.end_s - segment.start_s >= 20 * RESTART_S
            paid_s[segment.job] += 1
    for job, replans in paid_s.items():
        held_s = noisy.end_s[job] - min(starts_s[job])
        assert replans * RESTART_S <= 0.05 * held_s
    still = run(scenario, Flickering(NO_REPLANS, 0.2, seed))
    assert count_replans(still) == 0
    assert mean_jct_s(noisy) <= mean_jct_s(still) / 0.95


@pytest.mark.parametrize("seed", range(scaled(2)))
def test_jobs_end_sooner_with_replans_once_estimates_are_corrected(seed: int) -> None:
    scenario = a_busy_day(seed, {"dp": 1.0, "tp": 1.02, "zero": 1.4}.__getitem__)
    replanned, still = (
        run(scenario, Learning(options, 0.02, seed)) for options in (LIMITED, NO_REPLANS)
    )
    assert 0 < count_replans(replanned) <= len(scenario.arrivals)
    assert mean_jct_s(replanned) < mean_jct_s(still)
    figures = run_figures(replanned, reference_of(scenario), replanned.ended_s)
    assert figures["replans"] == count_replans(replanned) / len(scenario.arrivals)
    held_gpu_s = sum(s.held_gpu_s for s in replanned.segments)
    paid_gpu_s = 4 * RESTART_S * count_replans(replanned)
    assert figures["replan_share"] == pytest.approx(paid_gpu_s / held_gpu_s)
    assert figures["replan_share"] < figures["restart_share"]
