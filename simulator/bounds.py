"""An upper bound on the throughput of any policy on a scenario: a linear program over time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from tessera.formulation.base.errors import TesseraError
from tessera.simulator.metrics import possible_columns
from tessera.simulator.scenario import Scenario

INTERVALS: Final = 10
"""The number of time intervals. More intervals give a tighter bound but take longer: on Arena's
Philly trace, 40 intervals took 20 times as long and gave a bound that was 0.2 % lower."""


class NoBound(TesseraError):
    """An error for a bound whose linear program was not solved."""

    reason = "NO_BOUND"


def throughput_bound(scenario: Scenario, horizon_s: float, intervals: int = INTERVALS) -> float:
    """Return the greatest mean throughput over [0, ``horizon_s``] of any policy, in effective GPUs.

    Let y_jck be the seconds of job j on Cell c in interval k of length d, u_j the rate of one
    effective GPU, W_j the work of job j and G_t the number of GPUs of type t:

        maximise    sum r_c y_jck / (u_j horizon)
        subject to  sum_{j, c on t} n_c y_jck <= G_t d          for each t, k
                    sum_c y_jck <= d, less what lies before its arrival    for each j, k
                    sum_ck r_c y_jck <= W_j                     for each j

    The run of any policy is a feasible y. The program relaxes three things: all arrivals are known
    in advance, nothing is restarted, and any fractions of a job may run on different Cells and GPUs.

    Raises:
        NoBound: HiGHS did not find the optimum.
    """
    draft = possible_columns(scenario)
    snapshot, rate = draft.snapshot, draft.rate
    arrival_s = np.array([one.arrival_s for one in scenario.arrivals])
    step_s = horizon_s / intervals
    parts = [np.flatnonzero(arrival_s[draft.job] < (k + 1) * step_s) for k in range(intervals)]
    column = np.concatenate([np.zeros(0, np.int64), *parts])
    if not len(column):
        return 0.0
    slot = np.repeat(np.arange(intervals), [len(p) for p in parts])
    job, entry = draft.job[column], np.arange(len(column))
    capacity = snapshot.schedulable_gpus()
    pair, of_pair = np.unique(job * intervals + slot, return_inverse=True)
    there_s = np.minimum(step_s, (pair % intervals + 1) * step_s - arrival_s[pair // intervals])
    one, of_job = np.unique(job, return_inverse=True)
    work = snapshot.jobs.iterations_left * snapshot.global_batch
    limits = np.concatenate([np.tile(capacity, intervals) * step_s, there_s, np.ones(len(one))])
    row = np.concatenate(
        [
            slot * len(capacity) + draft.gpu_type[column],
            intervals * len(capacity) + of_pair,
            intervals * len(capacity) + len(pair) + of_job,
        ]
    )
    amount = np.concatenate([draft.gpus[column], np.ones(len(column)), rate[column] / work[job]])
    matrix: Any = coo_matrix((amount, (row, np.tile(entry, 3))), shape=(len(limits), len(column)))
    solution = linprog(
        -rate[column] / draft.unit_rate[job] / horizon_s,
        A_ub=matrix.tocsr(),
        b_ub=limits,
        method="highs-ipm",
    )
    if solution.status != 0 or solution.fun is None:
        raise NoBound(f"HiGHS ended with: {solution.message}; try fewer intervals")
    return -float(solution.fun)
