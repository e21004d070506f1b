"""One round with many deadlines, decided with promises and without: its CPU time and its gap."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.instances import make_instance
from tessera.formulation.base.tables import Floats
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.policy import DeadlineMode, Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.figures import Figure
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import admit
from tessera.solvers.lookahead.admission import drafts_before_deadlines

GPUS_PER_JOB: Final = 0.8
GPU_TYPES: Final = 10
NOW_S: Final = 300_000.0
MEDIAN_S: Final = 4 * 3600.0
"""Median duration of a job on what it requested; the logarithm is normal with a deviation of 1."""
SHORTEST_S, LONGEST_S = 600.0, 7 * 86_400.0
TIGHTNESS: Final = (0.6, 5.0)
"""Range of the time to a deadline, as a multiple of the duration."""
REPEATS: Final = 3
"""Number of runs, of which the least CPU time counts: other load on the machine only adds to it."""
WARM_UP_JOBS: Final = 100
MODES: Final[tuple[tuple[str, DeadlineMode], ...]] = (
    ("lookahead", "look-ahead"),
    ("planned", "planned"),
)


def measure_large_round(jobs: int, seed: int) -> dict[str, Figure]:
    """Return figures of a round of ``jobs`` new jobs, all with deadlines, in both modes.

    ``cpu_s`` are the CPU seconds of all of ``admit``: columns, slots, prices, schedules, checks.
    ``gap`` is (bound - admitted weight) / bound.
    """
    figures: dict[str, Figure] = {}
    for name, mode in MODES:
        policy = Policy(deadlines=mode)
        _admit(draw_deadlines(min(jobs, WARM_UP_JOBS), seed), policy)
        snapshot = draw_deadlines(jobs, seed)
        least_s = math.inf
        for _ in range(REPEATS):
            start_s = time.process_time()
            admission = _admit(snapshot, policy)
            least_s = min(least_s, time.process_time() - start_s)
        weight = float(snapshot.jobs.weight[admission.admitted].sum())
        share = weight / float(snapshot.jobs.weight.sum())
        figures |= {
            f"{name}_cpu_s": least_s,
            f"{name}_gap": max(0.0, 1 - weight / admission.bound) if admission.bound else 0.0,
            f"{name}_weight_share": share,
        }
    return figures


def _admit(snapshot: Snapshot, policy: Policy) -> Admission:
    return admit(snapshot, policy, Budget(remaining_s=lambda: math.inf))


def draw_deadlines(jobs: int, seed: int) -> Snapshot:
    """Return a round of ``real`` jobs, of which more have deadlines than can meet them."""
    gpus = max(GPU_TYPES, int(GPUS_PER_JOB * jobs))
    snapshot = replace(make_instance(jobs, gpus, GPU_TYPES, seed), now_s=NOW_S)
    rng, each = np.random.default_rng(seed), snapshot.jobs
    duration_s = np.clip(rng.lognormal(math.log(MEDIAN_S), 1.0, jobs), SHORTEST_S, LONGEST_S)
    length = duration_s * _requested_rate(snapshot) / snapshot.global_batch
    due_s = NOW_S + each.restart_s + duration_s * rng.uniform(*TIGHTNESS, jobs)
    return replace(
        snapshot, jobs=replace(each, iterations=length, iterations_left=length, deadline_s=due_s)
    )


def _requested_rate(snapshot: Snapshot) -> Floats:
    """Return samples/s of each job on its fastest column of the requested count, float64[jobs]."""
    _, draft = drafts_before_deadlines(snapshot, Policy())
    rate = np.zeros(len(snapshot.jobs))
    as_requested = draft.gpus == snapshot.jobs.requested_gpus[draft.job]
    np.maximum.at(rate, draft.job[as_requested], draft.rate[as_requested])
    return rate
