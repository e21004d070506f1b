"""Guaranteed jobs start within their quota, in order of submission."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.promises.guarantee import has_guaranteed_rate
from tessera.formulation.round.promises.launched import is_launched
from tessera.formulation.round.promises.packing import Packing


def guaranteed_jobs_within_quota_start(draft: Draft) -> Draft:
    """Mark the waiting guaranteed jobs that fit into the remaining quota, in order of submission.

    A packing at minimum demand seats them next to all jobs that must already run, so a launched
    promise is never broken for them. Best-effort jobs give way. Source: Morphling section 5.2,
    Algorithm 1, lines 2 and 3.
    """
    starts = np.flatnonzero(_startable(draft) & has_guaranteed_rate(draft))
    if not len(starts):
        return draft
    packing = Packing(draft, _everyone_yields_to(draft, starts.tolist()))
    order = starts[np.argsort(draft.snapshot.jobs.submit_s[starts], kind="stable")].tolist()
    return _marked(draft, packing, [job for job in order if packing.sound and packing.take(job)])


def _startable(draft: Draft) -> Bools:
    """Return whether each waiting job may be marked, bool[jobs].

    It needs a positive weight, a column, and a promise that was not waived.
    """
    waits = ~is_launched(draft.snapshot) & draft.has_columns & ~draft.must_run
    return waits & (draft.weight > 0) & draft.promisable


def _everyone_yields_to(draft: Draft, jobs: list[int]) -> Floats:
    queue = np.ones(len(draft.current))
    queue[jobs] = 0.0
    return queue


def _marked(draft: Draft, packing: Packing, taken: list[int]) -> Draft:
    """Return the draft in which the jobs ``taken`` must run, with the packing as its witness."""
    if not packing.sound:
        return draft
    must_run = np.array(draft.must_run)
    must_run[taken] = True
    return replace(draft, must_run=must_run, witness=np.array(packing.column))
