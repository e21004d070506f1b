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
from tessera.formulation.base.tables import Floats, Ints

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
