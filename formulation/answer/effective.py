"""The effective GPUs that decisions give to jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision
from tessera.formulation.round.rates import unit_rate
from tessera.formulation.state.cell_cache import cached_cells
from tessera.formulation.state.snapshot import Snapshot


def effective_gpus(snapshot: Snapshot, decisions: Sequence[Decision]) -> dict[int, float]:
    """Return the effective GPUs (Eq. 6) of the jobs whose GPUs change, by job.

    They are the rate that the job gets, by the rate of its best Cell for each GPU. Jobs whose rate
    nobody knows, and profiling tasks, are absent.
    """
    changed = [d for d in decisions if d.kind in CHANGES_GPUS and d.rate > 0]
    if not changed:
        return {}
    cells, _ = cached_cells(snapshot)
    per_gpu = unit_rate(snapshot, cells)
    worth = {d.job: d.rate / float(per_gpu[d.job]) for d in changed}
    return {job: gpus for job, gpus in worth.items() if math.isfinite(gpus)}
