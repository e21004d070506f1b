"""Muri (SIGCOMM'22): jobs whose stages use different resources share GPUs, interleaved.

It is applied to whole GPUs. The members of a group hold the same GPUs and run their iterations in
step, and each stage of a job runs at the same time as other stages of the others. Only jobs with
the same GPU count are grouped.
"""

from __future__ import annotations

from itertools import permutations
from typing import Final

import numpy as np

from tessera.formulation.tables import Floats

EFFICIENCY_THRESHOLD: Final = 0.5
"""Share of a perfect interleaving (efficiency p / R) that a group must exceed."""


def interleaved_s(stage_s: Floats) -> Floats:
    """Return the iteration time of each group, seconds, (N,).

    ``stage_s`` (N, R, R) has, for each group, the stages of R jobs on R resources; absent jobs are
    rows of zeros. In slot i the job at position p runs stage (i - p) mod R, and the slot lasts as
    long as the longest of these stages. The best order of positions counts.
    """
    size = stage_s.shape[-1]
    best = np.full(len(stage_s), np.inf)
    slot = np.arange(size)
    for rest in permutations(range(1, size)):
        position = np.array([0, *rest])
        at = (slot[None, :] - position[:, None]) % size
        lasts = np.take_along_axis(stage_s, np.broadcast_to(at, stage_s.shape), axis=2).max(axis=1)
        best = np.minimum(best, lasts.sum(axis=1))
    return best


def group_efficiency(stage_s: Floats) -> Floats:
    """Return the mean share of time in which a group's resources are used, (N,).

    ``stage_s`` is as in ``interleaved_s``.
    """
    share: Floats = stage_s.sum(axis=(1, 2)) / (stage_s.shape[-1] * interleaved_s(stage_s))
    return share
