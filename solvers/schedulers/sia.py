"""Sia: the type and count of every job by one integer program over normalized goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.problem import reduce_by_job
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.ilp import choose_most_valuable
from tessera.solvers.schedulers.packing import JobOptions, options_of
from tessera.solvers.schedulers.parameters import ParameterRule

LEAST_FACTOR = 0.01
"""The least share of a goodput that a restart leaves (Arena's copy clips there, too)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sia:
    """Sia (SOSP'23, section 3.4).

    Each job gets at most one (type, count). Goodput is the rate, since batch sizes are fixed and so
    statistical efficiency is one. It is normalized by the job's least rate and multiplied by its
    least count. An option that would restart a running job loses value by the factor (age -
    restarts x S) / (age + S), where S is the restart time in seconds. With the fairness power p < 0
    (-0.5 as published), minimize the sum over jobs of goodput^p where one runs and ``incentive``
    (lambda, 1.1) where none does. With p > 0 (+0.5 in Arena's copy), maximize the sum of goodput^p
    + incentive over those that run. A job starts at the least count of a type and at most doubles
    in a round.

    The paper leaves some points open. These choices were made: restarts are allocations beyond the
    first; a suspended job starts at its least count again, since the snapshot does not keep what it
    had; waiting jobs pay no factor. Arena's copy rewards each start by 1000, so that any start
    outweighs all goodput. This is not followed.
    """

    name: str = "sia"
    fairness: Annotated[
        float,
        ParameterRule(
            kind="number",
            low=-2.0,
            high=2.0,
            meaning="Power p of goodput. Below 0, the sum is minimized; from 0 on, it is maximized.",
            source="Sia, section 3.4; Arena's copy: 0.5",
        ),
    ] = -0.5
    incentive: Annotated[
        float,
        ParameterRule(
            kind="number",
            low=0.01,
            high=1000.0,
            meaning="Incentive lambda to run a job at all, in units of goodput^p.",
            source="Sia, section 3.4",
        ),
    ] = 1.1

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        goodput = _goodput(options) * _restart_factor(seen, options)
        if self.fairness < 0:
            value = self.incentive - goodput**self.fairness
        else:
            value = self.incentive + goodput**self.fairness
        return choose_most_valuable(seen, options, value, _reachable(options) & (value > 0))


def _goodput(options: JobOptions) -> Floats:
    """Return each option's normalized goodput, float64[options]: 1 per GPU at the job's least."""
    least_rate = reduce_by_job(np.minimum, options.rate, options.start)[options.job]
    least_gpus = reduce_by_job(np.minimum, options.gpus.astype(np.float64), options.start)[
        options.job
    ]
    return options.rate / least_rate * least_gpus


def _restart_factor(seen: SchedulerView, options: JobOptions) -> Floats:
    """Return the share of each option's goodput that a restart leaves, float64[options]."""
    snapshot = seen.draft.snapshot
    jobs = snapshot.jobs
    age_s = np.maximum(snapshot.now_s - jobs.submit_s, 0.0)
    spent_s = np.maximum(jobs.generation - 1, 0) * jobs.restart_s
    factor = (age_s - spent_s) / np.maximum(age_s + jobs.restart_s, 1e-9)
    restarts = options.runs[options.job] & ~options.is_current
    return np.where(restarts, np.clip(factor, LEAST_FACTOR, 1.0)[options.job], 1.0)


def _reachable(options: JobOptions) -> Bools:
    """Return whether a job may have each option this round: its start, or up to twice its count."""
    if not len(options):
        return np.zeros(0, np.bool_)
    has = options.gpus[options.current][options.job]
    reachable: Bools = np.where(
        options.runs[options.job], options.gpus <= 2 * has, options.smallest
    )
    return reachable
