"""Profiling tasks under published schedulers, which do not know jobs of very low value."""

from __future__ import annotations

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.reasons import Reason, ReasonCode

_WAITS = Reason(
    code=ReasonCode.NOT_CHOSEN,
    message="a published scheduler decides this round, and would treat a profiling task like any other job",
    next_step="wait for a round that follows an objective, or profile by hand: `tessera profile`",
)


def profiling_waits(draft: Draft) -> Draft:
    """Drop the columns of profiling tasks. Those that run give their GPU back."""
    tasks = np.flatnonzero(draft.snapshot.profiling() & draft.has_columns)
    return draft.without(dict.fromkeys(tasks.tolist(), _WAITS))
