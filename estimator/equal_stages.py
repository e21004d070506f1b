"""Runtimes that cut a model into stages of equal GPUs, as Alpa's search nearly always does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.estimator.cells import Setting
from tessera.estimator.costs import candidates_of
from tessera.estimator.plans import Candidates, powers_dividing
from tessera.estimator.times import TimeParts
from tessera.formulation.base.tables import Floats, Ints

MIN_PLAN_SHARE = 0.02
"""Share below which a plan is considered unlikely and left out."""
_TIE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages:
    """A runtime that tends to choose the pipeline degree that its search considers fastest.

    In Alpa's search, a stage costs its kernels and collectives and, for each micro-batch, a part of
    its gradient exchange. Transfers are free (OSDI 2022, section 5.2, and the cost model of its
    artifact).
    """

    sync_weight: float = 8.0
    """Weight of the gradient exchange in the search, chosen by judgement. It is above 1, because the
    searches that the Arena artifact recorded on nodes of two GPUs always preferred pipelines to
    replicas on several nodes."""
    softness: float = 0.1
    """The log ratio of latencies at which a plan is 1 / e times as likely as the best plan."""

    def candidates(self, setting: Setting) -> Candidates:
        """Return the stages whose number of GPUs is that of the job divided by a power of two."""
        gpus = setting.shape.gpus
        sizes = [gpus // stages for stages in powers_dividing(gpus)]
        return candidates_of(
            setting.graph, setting.shape, stage_gpus=sizes, sequence_parallel=False
        )

    def plans(
        self, parts: TimeParts, factors: Floats, degrees: Sequence[int]
    ) -> list[tuple[float, Ints]]:
        """Return the plan of each likely degree with its share. The shares sum to one."""
        count, gpus = parts.setting.training.micro_batches, parts.setting.shape.gpus
        costs = parts.at(factors)
        slot_s = costs.busy_s + self.sync_weight * costs.sync_s / count
        plans = []
        for degree in degrees:
            if gpus % degree == 0:
                rows = _equal_plan(parts, slot_s, degree)
                if len(rows):
                    plans.append((slot_s[rows].sum() + (count - 1) * slot_s[rows].max(), rows))
        if not plans:
            return []
        log_s = np.log([seconds for seconds, _ in plans])
        share = np.exp((log_s.min() - log_s) / self.softness)
        share = np.where(share >= MIN_PLAN_SHARE * share.sum(), share, 0.0)
        share /= share.sum()
        return [(float(s), rows) for s, (_, rows) in zip(share, plans, strict=True) if s > 0]


def _equal_plan(parts: TimeParts, slot_s: Floats, degree: int) -> Ints:
    """Return the rows of the best plan of ``degree`` equal stages.

    The best plan is the one whose slowest stage is fastest and, among those, the one of the
    smallest sum. If no plan fits, the result is empty.
    """
    candidates, layers = parts.candidates, len(parts.setting.graph)
    own = np.flatnonzero(candidates.gpus == parts.setting.shape.gpus // degree)
    # Among stages of equal layers, the fastest is written last.
    own = own[np.argsort(-slot_s[own], kind="stable")]
    tables = [
        # Tables are ordered from the last stage to the first.
        _table(candidates, slot_s, own[parts.depth[own] >= place], layers)
        for place in range(1, degree + 1)
    ]
    # The first pass finds the slowest stage of the best plan.
    worst = np.full(layers + 1, np.inf)
    worst[layers] = -np.inf
    for seconds, _ in tables:
        worst = _least(np.maximum(seconds, worst))
    limit_s = worst[0] * (1 + _TIE)
    if not np.isfinite(limit_s):
        return np.zeros(0, dtype=np.int64)
    # The second pass minimises the sum without exceeding that time.
    left = np.full(layers + 1, np.inf)
    left[layers] = 0.0
    steps = []
    for seconds, _ in tables:
        total = np.where(seconds <= limit_s, seconds, np.inf) + left
        steps.append(total.argmin(axis=1))
        left = _least(total)
    rows, start = [], 0
    for (_, row), step in zip(reversed(tables), reversed(steps), strict=True):
        end = int(step[start])
        rows.append(int(row[start, end]))
        start = end
    return np.array(rows, dtype=np.int64)


def _table(candidates: Candidates, slot_s: Floats, rows: Ints, layers: int) -> tuple[Floats, Ints]:
    """Return the seconds and the row of each segment by start and end, shape (L, L + 1)."""
    seconds = np.full((layers, layers + 1), np.inf)
    row = np.full((layers, layers + 1), -1, dtype=np.int64)
    at = (candidates.start[rows], candidates.end[rows])
    seconds[at] = slot_s[rows]
    row[at] = rows
    return seconds, row


def _least(total: Floats) -> Floats:
    """Return the minimum over ends for each start, with infinity after the last layer."""
    return np.append(total.min(axis=1), np.inf)
