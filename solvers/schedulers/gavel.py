"""Gavel: the choice of a GPU type for each job, at the count that it requested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.base import SolverFailed
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.ilp import choose_most_valuable
from tessera.solvers.schedulers.packing import JobOptions, OptionPacking, options_of
from tessera.solvers.schedulers.parameters import ParameterRule

STAY_BONUS = 1e-3
"""Additional value, as a share, of a job's present GPU type.

It keeps answers of equal value from moving jobs between types."""

MIN_SERVED_SHARE = 1e-9
"""Share of time that a job counts as served if it never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gavel:
    """Gavel (OSDI'20) with the objective that Arena compares with: the greatest total throughput.

    A job gets its requested count, on whichever type. The objective is to maximize the sum of
    weight x rate / reference rate (Eq. 6c), with one type per job and the GPUs of each type as
    limits. Gavel solves for shares of time and realizes them over rounds. The maximum of a sum is
    reached with (almost) every share 0 or 1, so the round's integer program is solved instead,
    which needs no memory of rounds. Gavel charges no restarts; a job's value is 0.1 % higher on its
    present type, so that equal answers do not move jobs.

    Arena's copy sums samples/s without normalizing them (``raw``) and changes at most 3 running
    jobs per decision (``max_changed=3``).
    """

    name: str = "gavel"
    raw: Annotated[
        bool,
        ParameterRule(
            kind="flag",
            meaning="Whether to sum samples/s, and not each job's rate over its reference rate.",
            source="Arena's copy of Gavel: true",
        ),
    ] = False
    max_changed: Annotated[
        int,
        ParameterRule(
            kind="whole",
            low=-1,
            high=100_000,
            meaning="Largest number of running jobs that a round moves or suspends. -1: any number.",
            source="Arena's copy of Gavel, MAX_MGRT_JOB_NUM: 3",
        ),
    ] = -1

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        value = np.array(options.rate)
        if not self.raw:
            value *= seen.draft.weight[options.job] / seen.draft.requested_rate[options.job]
        value[options.is_current] *= 1 + STAY_BONUS
        value /= max(float(value.max(initial=0.0)), 1e-9)
        allowed = options.as_requested & (value > 0)
        if self.max_changed >= 0:  # jobs that may not change must be able to stay
            allowed |= options.is_current
        return choose_most_valuable(seen, options, value, allowed, max_changes=self.max_changed)


class GavelLas:
    """Gavel (OSDI'20) with its first objective: least attained service, as max-min over jobs.

    Shares of time X[job, type] maximize the least normalized throughput. That is the sum over types
    of X x rate, times the job's GPUs, over weight x (its throughput if all types were shared
    equally). Among those, they maximize the sum. They are realized by priority, X over what the job
    has received (section 5), highest first, while there is room. The snapshot records the time for
    which a job was served but not the type. So the service that it received is one number for each
    job: GPU-seconds over requested GPUs x age. Remaining GPUs go to other jobs in the order of
    arrival.
    """

    name = "gavel-las"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        kept = np.flatnonzero(options.as_requested)
        packing = OptionPacking(options, seen.capacity)
        if not len(kept):
            return packing.choice
        share = _shares(seen, options, kept)
        snapshot = seen.draft.snapshot
        age_s = np.maximum(snapshot.now_s - snapshot.jobs.submit_s, 1.0)
        received = snapshot.jobs.service_gpu_s / (snapshot.jobs.requested_gpus * age_s)
        priority = share / np.maximum(received, MIN_SERVED_SHARE)[options.job[kept]]
        leaves = ~options.is_current[kept]
        order = np.lexsort((-options.rate[kept], options.job[kept], leaves, -priority))
        for option in kept[order].tolist():
            if packing.option[int(options.job[option])] < 0:
                packing.take(option)
        return packing.choice


def _shares(seen: SchedulerView, options: JobOptions, kept: Ints) -> Floats:
    """Return each ``kept`` option's share of time by the max-min linear program, float64[kept]."""
    value = _normalized(seen, options, kept)
    jobs, job = np.unique(options.job[kept], return_inverse=True)
    count, types, column = len(jobs), len(seen.capacity), np.arange(len(kept))
    # The variables are a share for each option, and then the least normalized throughput.
    fair = sparse.coo_array(
        (
            np.append(-value, np.ones(count)),
            (np.append(job, np.arange(count)), np.append(column, np.full(count, len(kept)))),
        ),
        shape=(count, len(kept) + 1),
    )
    time = sparse.coo_array((np.ones(len(kept)), (job, column)), shape=(count, len(kept) + 1))
    room = sparse.coo_array(
        (options.gpus[kept].astype(np.float64), (options.gpu_type[kept], column)),
        shape=(types, len(kept) + 1),
    )
    result = linprog(
        -np.append(value * (1e-3 / count), 1.0),
        A_ub=sparse.vstack([fair, time, room], format="csr"),
        b_ub=np.concatenate([np.zeros(count), np.ones(count), seen.capacity]),
        bounds=[(0.0, None)] * (len(kept) + 1),
        method="highs",
    )
    if result.x is None:
        raise SolverFailed("highs", str(result.message))
    return np.round(np.asarray(result.x, dtype=np.float64)[:-1], 9)


def _normalized(seen: SchedulerView, options: JobOptions, kept: Ints) -> Floats:
    """Return each ``kept`` option's normalized throughput with all the time, float64[kept]."""
    part = seen.capacity / max(1, int(seen.capacity.sum()))
    equal = np.zeros(len(options.current))
    np.add.at(equal, options.job[kept], options.rate[kept] * part[options.gpu_type[kept]])
    job = options.job[kept]
    weight = np.maximum(seen.draft.weight[job], 1e-6)
    return options.rate[kept] * options.gpus[kept] / (equal[job] * weight)
