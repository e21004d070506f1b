"""Runtimes that cut a model into stages of equal GPUs, as Alpa's search nearly always does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.estimator.cells import Setting
from tessera.estimator.costs import candidates_of
from tessera.estimator.plans import Candidates, powers_dividing
from tessera.estimator.times import Parts
from tessera.formulation.tables import Floats, Ints

LIKELY = 0.02
"""Plans less likely than this are left out."""
_TIE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages:
    """Takes the pipeline degree that looks fastest to it, more or less.

    To Alpa's search a stage costs its kernels and collectives, and for each micro-batch a part of its
    gradients' exchange; transfers are free (OSDI 2022, section 5.2, and the cost model of its artifact).
    """

    sync_weight: float = 8.0
    """Times that the exchange of gradients counts. By judgement: more than once, as the searches that the
    Arena artifact recorded on nodes of two GPUs prefer pipelines to replicas on several nodes throughout."""
    softness: float = 0.1
    """How much longer, as a log ratio, a plan must look to be 1 / e as likely as the best."""

    def candidates(self, setting: Setting) -> Candidates:
        """Return the stages of each number of GPUs that is the whole over a power of two."""
        gpus = setting.shape.gpus
        sizes = [gpus // stages for stages in powers_dividing(gpus)]
        return candidates_of(
            setting.graph, setting.shape, stage_gpus=sizes, sequence_parallel=False
        )

    def plans(
        self, parts: Parts, factors: Floats, degrees: Sequence[int]
    ) -> list[tuple[float, Ints]]:
        """Return the plan of each likely degree; the shares add up to one."""
        count, gpus = parts.setting.training.micro_batches, parts.setting.shape.gpus
        costs = parts.at(factors)
        slot_s = costs.busy_s + self.sync_weight * costs.sync_s / count
        found = []
        for degree in degrees:
            if gpus % degree == 0:
                rows = _equal_plan(parts, slot_s, degree)
                if len(rows):
                    found.append((slot_s[rows].sum() + (count - 1) * slot_s[rows].max(), rows))
        if not found:
            return []
        looks = np.log([seconds for seconds, _ in found])
        share = np.exp((looks.min() - looks) / self.softness)
        share = np.where(share >= LIKELY * share.sum(), share, 0.0)
        share /= share.sum()
        return [(float(s), rows) for s, (_, rows) in zip(share, found, strict=True) if s > 0]


def _equal_plan(parts: Parts, slot_s: Floats, degree: int) -> Ints:
    """Return the rows of the plan of so many equal stages whose slowest is fastest, then whose sum is least.

    Empty: none fits.
    """
    candidates, layers = parts.candidates, len(parts.setting.graph)
    own = np.flatnonzero(candidates.gpus == parts.setting.shape.gpus // degree)
    own = own[
        np.argsort(-slot_s[own], kind="stable")
    ]  # of equal stretches the fastest is written last
    tables = [
        _table(candidates, slot_s, own[parts.depth[own] >= place], layers)
        for place in range(1, degree + 1)
    ]
    worst = np.full(layers + 1, np.inf)
    worst[layers] = -np.inf
    for seconds, _ in tables:
        worst = _least(np.maximum(seconds, worst))
    limit_s = worst[0] * (1 + _TIE)
    if not np.isfinite(limit_s):
        return np.zeros(0, dtype=np.int64)
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
    """Return seconds and row of each stretch of layers, by its start and end, shape (L, L + 1)."""
    seconds = np.full((layers, layers + 1), np.inf)
    row = np.full((layers, layers + 1), -1, dtype=np.int64)
    at = (candidates.start[rows], candidates.end[rows])
    seconds[at] = slot_s[rows]
    row[at] = rows
    return seconds, row


def _least(total: Floats) -> Floats:
    """Return the least over ends for each start; nothing is left to do after the last layer only once."""
    return np.append(total.min(axis=1), np.inf)
