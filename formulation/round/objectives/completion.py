"""Objectives for finishing early: mean completion time as a sum, and makespan as levels.

Both use the time to finish.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.goals import Levels
from tessera.formulation.round.grammar import EVEN_SHARE
from tessera.formulation.round.objectives.values import ColumnValues, make_levels
from tessera.formulation.round.problem import VALUE_SCALE
from tessera.formulation.round.rates import work_left

JCT_SCALE: Final = 100.0 * VALUE_SCALE
"""Solver integers in one unit.

In a horizon, a job with months to go does only a thousandth. That value must keep four digits, too.
"""


def completion_values(draft: Draft) -> ColumnValues:
    """Return the share of each job's weight that a column finishes in a restart horizon (Eq. 10).

    Taking the greatest weight over remaining time first is Smith's rule for the weighted mean
    completion time. A job with less than a round to go has the value of one with a round to go.
    """
    return _valued(draft, 1.0, "jobs finished in a horizon", JCT_SCALE)


def balance_throughput_and_completion(draft: Draft, share: float) -> ColumnValues:
    """Return the geometric mean of throughput and completion time on each column (Eq. 10a).

    ``share`` is the power of completion time, between 0 and 1, and throughput has the rest.

    If jobs with speed-up n^p share GPUs, the mean completion time is least with weights near
    rank^p, where the longest job has rank 1 (heSRPT: Berg, Vesilo, Harchol-Balter, Performance
    Evaluation 2020). For heavy-tailed lengths, this weight falls more slowly than Smith's 1 / T,
    about as its root.
    """
    unit = (
        "sqrt(throughput x jobs finished in a horizon)"
        if share == EVEN_SHARE
        else f"throughput^{1 - share:g} x (jobs finished in a horizon)^{share:g}"
    )
    return _valued(draft, share, unit, 10 * VALUE_SCALE)


def _valued(draft: Draft, exponent: float, unit: str, scale: float) -> ColumnValues:
    policy = draft.policy
    with np.errstate(invalid="ignore"):
        remaining_s = work_left(draft.snapshot) / draft.unit_rate
        value = draft.weight / draft.unit_rate
        value *= (policy.restart_horizon_s / np.maximum(remaining_s, policy.round_s)) ** exponent
    gross = value[draft.job] * draft.rate
    return ColumnValues(
        gross=gross,
        price=np.where(draft.starts, gross * draft.restart_share[draft.job], 0.0),
        unit=unit,
        scale=scale,
    )


def restart_loss_s(draft: Draft) -> Floats:
    """Return the seconds that each column loses to a restart, float64[columns].

    It is 0 for a column that runs already.
    """
    return np.where(draft.starts, draft.snapshot.jobs.restart_s[draft.job], 0.0)


def time_to_finish_s(draft: Draft, later: Floats) -> tuple[Floats, Floats]:
    """Return the seconds until each job ends, by column and for waiting jobs (Eq. 15).

    ``later`` is float64[jobs]: the assumed rate of a job after this round in samples/s, at the
    price of a restart. A column is kept to the end if that is sooner. No column is worse than
    waiting.
    """
    jobs, job, round_s = draft.snapshot.jobs, draft.job, draft.policy.round_s
    work, paid = work_left(draft.snapshot), restart_loss_s(draft)
    left = np.maximum(0.0, work[job] - draft.rate * np.maximum(0.0, round_s - paid))
    with np.errstate(invalid="ignore"):
        stays = paid + work[job] / draft.rate
        changes = round_s + jobs.restart_s[job] + left / later[job]
        waits = round_s + jobs.restart_s + work / later
    return np.minimum(stays, changes), waits


def makespan_levels(draft: Draft) -> Levels:
    """Return the seconds until each job ends, at its expected rate after this round (Eq. 18)."""
    level, waiting = time_to_finish_s(draft, draft.expected_rate)
    return make_levels(draft, name="makespan", unit="s", level=level, waiting=waiting)
