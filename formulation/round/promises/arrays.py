"""The limit on the members of an array that run at the same time."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.job.lifecycle import ACTIVE, LEAVING
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft
from tessera.formulation.state.snapshot import Jobs

_OCCUPYING: Final = ACTIVE | LEAVING
"""States in which a member counts against its array's limit: its program may still run."""


def arrays_run_few_members(draft: Draft) -> Draft:
    """Leave columns to no more members of an array than its limit, first to those that have GPUs.

    Members differ only in their index, so it costs little that a round chooses among the first ones
    only. A row would say the same, and would couple jobs that are decided separately now.
    """
    jobs = draft.snapshot.jobs
    if not (jobs.array >= 0).any():
        return draft
    occupies = occupying_members(jobs)
    asks = np.flatnonzero((jobs.array >= 0) & (occupies | draft.has_columns))
    place = _places(jobs.array[asks], occupies[asks])
    excess = asks[(place >= jobs.array_limit[asks]) & ~occupies[asks]]
    limits = jobs.array_limit[excess].tolist()
    return draft.without(
        {job: limit_reason(limit) for job, limit in zip(excess.tolist(), limits, strict=True)}
    )


def occupying_members(jobs: Jobs) -> Bools:
    """Return whether each job is a member of a limited array and counts against it, bool[jobs]."""
    occupies: Bools = (jobs.array >= 0) & jobs.among(_OCCUPYING)
    return occupies


def _places(array: Ints, occupies: Bools) -> Ints:
    """Return the place of each member in its array, from 0: first those with GPUs, int64[members]."""
    order = np.lexsort((~occupies, array))  # stable: the others stay in order of submission
    first = np.searchsorted(array[order], array[order])
    place = np.empty(len(array), dtype=np.int64)
    place[order] = np.arange(len(array)) - first
    return place


def limit_reason(limit: int) -> Reason:
    """Return the reason for a member that waits until fewer members of its array run."""
    return Reason(
        code=ReasonCode.ARRAY_LIMIT,
        message=f"its array runs at most {limit:,} jobs at the same time, and that many come before it",
        next_step="wait until one of them has ended; submit the array with a higher limit for more",
        evidence=(("limit", str(limit)),),
    )
