"""The fastest plan of a small model, found by listing all plans, apart from the product's search.

**Listed** are all cuts of the layers. A stage has a power of two of GPUs, or all of them if it is
the only one. It has every data and tensor parallelism in powers of two, with and without sequence
parallelism, and every power of two over which its experts can be divided. Interleaved schedules
have 2 to 4 chunks of equally many blocks, and stages of equal parallelism. Each division is
combined with all numbers of micro-batches of ``accumulations(batch)``, ZeRO 0 to 3 and each
recomputation.

**Outside** are offloaded states, interleaved chunks of different numbers of blocks, stages that
divide sequences (cp), GPipe, and stages of other numbers of GPUs (e.g. two stages of three).

``price_plan`` decides whether a plan fits. It also computes the time of each plan that may be
faster than all before it. The times by which plans are ordered come from the same costs of stages.
They are computed for all divisions at once, so that small cases take less than a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Final

import numpy as np

from tessera.estimator.cells import Setting
from tessera.estimator.planning.uniform import accumulations
from tessera.estimator.plans import COST_COLUMNS, Candidates, StageCosts
from tessera.estimator.pricing.price import PlanPrice, plan_seconds, plan_setting, price_plan
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)

MAX_CHUNKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLists:
    """The divisions of a model among GPUs with one pipeline degree and one number of chunks.

    ``rows`` has the indices of each division's stages, shape (n, stages).
    """

    stages: tuple[PlanStage, ...]
    rows: Ints
    chunks: int = 1

    @property
    def candidates(self) -> Candidates:
        """Return all stages as candidates."""
        columns = [[getattr(s, name) for s in self.stages] for name in ("start", "end", "dp", "tp")]
        start, end, dp, tp = np.array(columns, dtype=np.int64)
        ep = np.array([s.ep for s in self.stages], dtype=np.int64)
        sp = np.array([s.sp for s in self.stages], dtype=np.bool_)
        return Candidates(start=start, end=end, dp=dp, tp=tp, ep=ep, sp=sp)


def list_divisions(setting: Setting, degree: int) -> list[StageLists]:
    """Return all divisions of a pipeline degree, and then those with each number of chunks."""
    layers, gpus = len(setting.graph), setting.shape.gpus
    shares = [(gpus,)] if degree == 1 else list(_shares(gpus, degree))
    plain = [
        stages
        for ends in combinations(range(1, layers), degree - 1)
        for share in shares
        for stages in product(
            *(
                _stages(setting, start, end, stage_gpus)
                for (start, end), stage_gpus in zip(
                    pairwise((0, *ends, layers)), share, strict=True
                )
            )
        )
    ]
    lists = [_lists(plain, 1)]
    for chunks in range(2, MAX_CHUNKS + 1) if degree > 1 and gpus % degree == 0 else ():
        blocks, remaining_blocks = divmod(layers - 2, degree * chunks)
        if not remaining_blocks and blocks:
            inner = [1 + blocks * (i + 1) for i in range(degree * chunks - 1)]
            bounds = list(pairwise((0, *inner, layers)))
            alike = zip(
                *(_stages(setting, *b, gpus // degree, ep=True) for b in bounds), strict=True
            )
            lists.append(_lists(list(alike), chunks))
    return [stages for stages in lists if len(stages.rows)]


def list_switches(setting: Setting) -> Iterator[tuple[int, ZeroStage, Recomputation]]:
    """Yield each number of micro-batches, ZeRO stage and recomputation."""
    yield from product(accumulations(setting.training.global_batch), ZeroStage, Recomputation)


def fastest_listed(
    setting: Setting, degree: int, known_s: float = math.inf, model: str = ""
) -> PlanPrice | None:
    """Return the fastest plan of a degree that fits and takes less than ``known_s``, or None."""
    best: PlanPrice | None = None
    for lists in list_divisions(setting, degree):
        candidates = lists.candidates
        for count, zero, recomputation in list_switches(setting):
            batching = PlanList(setting, lists, candidates, count, zero, recomputation, model)
            price = batching.fastest(known_s)
            if price is not None:
                best, known_s = price, price.iter_time_s
    return best


class PlanList:
    """The plans of all divisions of one kind with the same micro-batches and switches."""

    def __init__(
        self,
        setting: Setting,
        lists: StageLists,
        candidates: Candidates,
        count: int,
        zero: ZeroStage,
        recomputation: Recomputation,
        model: str = "",
    ) -> None:
        """Leave out the divisions whose replicas cannot share a micro-batch."""
        self._setting, self._lists, self._candidates = setting, lists, candidates
        self._count, self._zero, self._recomputation = count, zero, recomputation
        self._model = model
        self._micro_batch = setting.training.global_batch // count
        even = self._micro_batch % candidates.dp == 0
        degree = lists.rows.shape[1] // lists.chunks
        possible = lists.chunks == 1 or count % degree == 0
        self.rows = lists.rows[even[lists.rows].all(axis=1) & possible]

    def plan(self, index: int) -> ExecutionPlan:
        """Return a plan by its place in the list."""
        lists, setting = self._lists, self._setting
        return ExecutionPlan(
            stages=tuple(lists.stages[row] for row in self.rows[index]),
            micro_batch=self._micro_batch,
            accumulation=self._count,
            schedule=Schedule.INTERLEAVED if lists.chunks > 1 else setting.training.schedule,
            chunks=lists.chunks,
            zero=self._zero,
            recomputation=self._recomputation,
            precision=Precision(setting.graph.dtype),
            shape=setting.shape.each_node,
            model=self._model,
        )

    def seconds(self) -> Floats:
        """Return the times of all plans, whether or not they fit."""
        if not len(self.rows):
            return np.zeros(0)
        plan = self.plan(0)
        run = plan_setting(self._setting, plan)
        of_stage = run.costs(self._candidates, plan.recomputation)
        columns = {name: getattr(of_stage, name)[self.rows] for name in COST_COLUMNS}
        costs = StageCosts(candidates=self._candidates, **columns)
        return plan_seconds(self._setting, plan, costs)

    def fastest(self, known_s: float) -> PlanPrice | None:
        """Return the fastest plan that fits and takes less than ``known_s``, or None.

        The memory of a stage depends only on itself and on its place. So once a stage does not fit,
        all plans are left out that have it in the same place.
        """
        seconds = self.seconds()
        while len(seconds):
            index = int(seconds.argmin())
            if not seconds[index] < known_s:
                break
            price = self.price(index)
            if price is not None and price.overflow is None:
                if price.iter_time_s < known_s:
                    return price
            elif price is not None and self._lists.chunks == 1:
                full_stages = np.flatnonzero(np.array(price.memory_bytes) > price.limit_bytes)
                alike = (self.rows[:, full_stages] == self.rows[index, full_stages]).any(axis=1)
                seconds = np.where(alike, np.inf, seconds)
            seconds[index] = np.inf
        return None

    def price(self, index: int) -> PlanPrice | None:
        """Return the price of a plan, or None if the model does not allow its division."""
        try:
            return price_plan(self._setting, self.plan(index))
        except InvalidInput:
            return None


def _lists(divisions: Sequence[tuple[PlanStage, ...]], chunks: int) -> StageLists:
    """Return divisions as rows of their distinct stages."""
    place: dict[PlanStage, int] = {}
    rows = [[place.setdefault(s, len(place)) for s in stages] for stages in divisions]
    return StageLists(stages=tuple(place), rows=np.array(rows, dtype=np.int64), chunks=chunks)


def _shares(gpus: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield each list of powers of two, one for each stage, whose sum is the number of GPUs."""
    if stages == 0:
        if gpus == 0:
            yield ()
        return
    for share in _powers(gpus):
        for further_shares in _shares(gpus - share, stages - 1):
            yield (share, *further_shares)


def _stages(
    setting: Setting, start: int, end: int, gpus: int, *, ep: bool = False
) -> list[PlanStage]:
    """Return the stages of some layers on some GPUs.

    ``ep`` keeps the expert degrees of stages without experts, which then have no effect.
    """
    experts = [int(n) for n in setting.graph.experts[slice(None) if ep else slice(start, end)]]
    expert_counts = [n for n in experts if n > 1]
    return [
        PlanStage(start=start, end=end, dp=gpus // tp, tp=tp, ep=degree, sp=sp)
        for tp in _powers(gpus)
        for degree in _powers(gpus if expert_counts else 1)
        for sp in (False, True)
        if gpus % tp == gpus % degree == 0 and not (sp and tp == 1)
        if not any(n % degree for n in expert_counts)
    ]


def _powers(max_power: int) -> list[int]:
    """Return the powers of two up to ``max_power``."""
    return [2**k for k in range(max_power.bit_length())] if max_power > 0 else []
