"""Partition of a model into stages with GPUs, before any plan has a cost.

In Crius, section 4.2, layers get GPUs by their FLOPs, and the model is cut where communication is
least. In Arena, section 3.3, layers get GPUs by their roofline load, and stages get the powers of
two that are nearest to the sums in L2. That distance is the computation bias. Both papers enumerate
the partitions. Here, dynamic programming solves both problems exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.estimator.planning.chain import suffix_tables, walk_plan
from tessera.estimator.planning.options import NoPlan, StageOptions, every_stage, make_options
from tessera.estimator.plans import powers_of_two
from tessera.formulation.tables import Floats, Ints, concatenate_ranges

NEAR_POWER_DISTANCE = 0.5
"""Largest distance in log2 at which a sum of GPUs is near a power of two. That power of two is then
the nearest by ratio."""
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A model cut into stages.

    ``bias`` is the L2 distance of GPUs from each stage's share of them.
    """

    ends: tuple[int, ...]  # the layer after each stage's last
    gpus: tuple[int, ...]
    bias: float

    @property
    def starts(self) -> tuple[int, ...]:
        """Return each stage's first layer."""
        return (0, *self.ends[:-1])


def layer_shares(load: Floats, gpus: int) -> Floats:
    """Return the GPUs for each layer in proportion to its load, shape (L,)."""
    total = load.sum()
    if not total > 0 or not np.isfinite(total):
        raise NoPlan("GPUs cannot be shared by the loads of layers; give positive, finite loads")
    share: Floats = load / total * gpus
    return share


def stage_shares(load: Floats, gpus: int, start: Ints, end: Ints) -> Floats:
    """Return the GPUs for stages in proportion to their load, shape (K,)."""
    before = np.concatenate([[0.0], np.cumsum(layer_shares(load, gpus))])
    share: Floats = before[end] - before[start]
    return share


def bias_of(share: Floats, gpus: Ints) -> Floats:
    """Return the computation bias of plans: the L2 norm over the last axis (Arena, equation 3)."""
    bias: Floats = np.sqrt(((share - gpus) ** 2).sum(axis=-1))
    return bias


def nearest_powers(share: Floats, gpus: int) -> Ints:
    """Return powers of two, shape (S,), that sum to ``gpus`` and are nearest to the shares in L2.

    Raises:
        NoPlan: ``gpus`` is not a sum of that many powers of two.
    """
    count = len(share)
    sizes = np.array(powers_of_two(gpus), dtype=np.int64)
    at = np.arange(count, dtype=np.int64)
    one = make_options(
        np.repeat(at, len(sizes)), np.repeat(at + 1, len(sizes)), np.tile(sizes, count)
    )
    value = (share[one.start] - one.gpus) ** 2
    rest = suffix_tables(one, value[None], np.add, count, gpus)[0]
    return one.gpus[walk_plan(one, value, rest, count, gpus)]


def balance_stages(load: Floats, gpus: int, stages: int) -> Stages:
    """Return the partition and GPUs of least computation bias (Arena, section 3.3).

    Raises:
        NoPlan: there are fewer layers than stages, or ``gpus`` is not a sum of that many powers of
            two.
    """
    return balanced_each(load, gpus, [stages])[0]


def balanced_each(load: Floats, gpus: int, degrees: list[int]) -> list[Stages]:
    """Return the result of :func:`balance_stages` for each pipeline degree, from one table.

    Raises:
        NoPlan: there are fewer layers than stages, or ``gpus`` is not a sum of that many powers of
            two.
    """
    every, share = _all_stages(load, gpus)
    value = (share - every.gpus) ** 2
    rest = suffix_tables(every, value[None], np.add, max(degrees), gpus)[0]
    return [_made(every, share, walk_plan(every, value, rest, s, gpus)) for s in degrees]


def k_balanced(load: Floats, gpus: int, stages: int, k: int) -> list[Stages]:
    """Return the ``k`` partitions with GPUs of least computation bias, best first.

    The result is shorter if there are fewer partitions.

    Raises:
        NoPlan: there are fewer layers than stages, or ``gpus`` is not a sum of that many powers of
            two.
    """
    every, share = _all_stages(load, gpus)
    value = (share - every.gpus) ** 2
    front = _Fronts.none_yet(gpus)
    for left in range(stages, 0, -1):
        front = front.extended(every, value, left, k)
    done = (front.layer == every.layers) & (front.gpus == 0)
    if not done.any():
        raise NoPlan(f"no plan has {stages} stages on {gpus} GPUs; use another number of stages")
    best = np.flatnonzero(done)[np.argsort(front.total[done], kind="stable")]
    return [_made(every, share, front.rows[:, i]) for i in best]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fronts:
    """The first stages of n plans: next layer, GPUs left and sum, shape (n,), and options, shape
    (stages, n)."""

    layer: Ints
    gpus: Ints
    total: Floats
    rows: Ints

    @staticmethod
    def none_yet(gpus: int) -> _Fronts:
        zero = np.zeros(1, dtype=np.int64)
        return _Fronts(
            layer=zero, gpus=zero + gpus, total=np.zeros(1), rows=np.zeros((0, 1), dtype=np.int64)
        )

    def extended(self, every: StageOptions, value: Floats, left: int, k: int) -> _Fronts:
        """Return the k best fronts at each state after one more stage, the first of ``left``."""
        first = np.searchsorted(every.start, np.arange(every.layers + 2))
        count = first[self.layer + 1] - first[self.layer]
        front, row = (
            np.repeat(np.arange(len(count)), count),
            concatenate_ranges(first[self.layer], count),
        )
        fits = every.gpus[row] <= self.gpus[front] - (left - 1)
        fits &= every.end[row] <= every.layers - (left - 1)
        front, row = front[fits], row[fits]
        total = self.total[front] + value[row]
        layer, gpus = every.end[row], self.gpus[front] - every.gpus[row]
        state = layer * (int(self.gpus.max(initial=0)) + 1) + gpus
        order = np.lexsort((total, state))
        leads = np.flatnonzero(np.r_[True, np.diff(state[order]) != 0])
        rank = np.arange(len(order)) - np.repeat(leads, np.diff(np.r_[leads, len(order)]))
        kept = order[rank < k]
        rows = np.concatenate([self.rows[:, front[kept]], row[None, kept]])
        return _Fronts(layer=layer[kept], gpus=gpus[kept], total=total[kept], rows=rows)


def least_cut(flops: Floats, boundary: Floats, gpus: int, stages: int) -> Stages:
    """Return Crius' stages (section 4.2): cut for least communication, GPU sums near powers of two.

    ``flops`` and ``boundary`` have shape (L,). The boundary is the amount that a layer hands to the
    next. That of the last layer is not used. A stage may have ``p`` GPUs if the sum of its layers'
    GPUs is within ``NEAR_POWER_DISTANCE`` of p in log2. If no partition consists of such stages, the
    least distance that a partition reaches in all stages is allowed. Ties are broken by the least
    computation bias, then by the earliest cut. The paper does not specify this.

    Raises:
        NoPlan: there are fewer layers than stages, or ``gpus`` is not a sum of that many powers of
            two.
    """
    every, share = _all_stages(flops, gpus)
    off = np.abs(np.log2(np.maximum(share, 1e-300) / every.gpus))
    reach = suffix_tables(every, off[None], np.maximum, stages, gpus)[0, stages, 0, gpus]
    near = every.only(off <= max(NEAR_POWER_DISTANCE, float(reach) * (1 + _TIE)))
    cut = np.where(near.end < near.layers, boundary[near.end - 1], 0.0)
    bias = (stage_shares(flops, gpus, near.start, near.end) - near.gpus) ** 2
    rest = suffix_tables(near, cut[None], np.add, stages, gpus)[0]
    if not np.isfinite(rest[stages, 0, gpus]):
        raise NoPlan(f"no plan has {stages} stages on {gpus} GPUs; use another number of stages")
    return _least_bias_of_cheapest(near, cut, bias, rest, stages, gpus)


def _least_bias_of_cheapest(
    near: StageOptions, cut: Floats, bias: Floats, rest: Floats, stages: int, gpus: int
) -> Stages:
    """Return the plan of least bias among those of least communication.

    It minimises a sum of both in which the weight of the bias is too small to outweigh
    communication. Cuts count as equal unless they differ by more than 1e-6 of the total.
    """
    total = float(rest[stages, 0, gpus]) or float(cut.max(initial=0.0)) or 1.0
    most_bias = float(bias.max(initial=0.0)) * stages or 1.0
    value = cut / total + 1e-6 * bias / most_bias
    table = suffix_tables(near, value[None], np.add, stages, gpus)[0]
    rows = walk_plan(near, value, table, stages, gpus)
    return Stages(
        ends=tuple(near.end[rows].tolist()),
        gpus=tuple(near.gpus[rows].tolist()),
        bias=float(np.sqrt(bias[rows].sum())),
    )


def _all_stages(load: Floats, gpus: int) -> tuple[StageOptions, Floats]:
    """Return every stage on every power of two, with its proportional share of GPUs, shape (K,)."""
    every = make_options(*every_stage(len(load), gpus))
    return every, stage_shares(load, gpus, every.start, every.end)


def _made(every: StageOptions, share: Floats, rows: Ints) -> Stages:
    return Stages(
        ends=tuple(every.end[rows].tolist()),
        gpus=tuple(every.gpus[rows].tolist()),
        bias=float(bias_of(share[rows], every.gpus[rows])),
    )
