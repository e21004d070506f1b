"""The admission problem in integers: the same numbers for CP-SAT and for the second solver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.lookahead import WORK_UNITS, Lookahead, Picks

_LEAST_SHARE = 1e-4
"""Least work of a job, as a share of its restart cost, so that integers stay small."""
_WEIGHTS = 1000
_GPU_TIME = 10**6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntegerAdmission:
    """Eqs. (24) to (29) in integers. ``WORK_UNITS`` stands for a job's remaining work."""

    ahead: Lookahead
    allowed: Bools  # bool[options, slots]
    gain: Ints  # int64[options, slots]
    cost: Ints  # int64[options], of starting the option
    need: Ints  # int64[jobs]
    weight: Ints  # int64[jobs], 0 to 1000; a promise weighs more than all new jobs together
    gpu_time: Ints  # int64[options, slots]; all GPUs over all slots add up to a million


def to_integers(ahead: Lookahead, inherited: Picks, allowed: Bools) -> IntegerAdmission:
    """Return the problem in integers; a schedule that a promise already has stays good enough."""
    owner = ahead.owner
    start_cost = ahead.cost
    dearest = np.zeros(len(ahead.job))
    np.maximum.at(dearest, owner, start_cost)
    unit = np.maximum(ahead.work, _LEAST_SHARE * dearest)[owner] / WORK_UNITS
    cost = np.rint(start_cost / unit).astype(np.int64)
    raw = np.rint(ahead.gain / unit[:, None])
    enough = WORK_UNITS + cost + np.maximum(0, -raw[:, 0])
    gain = np.minimum(raw, enough[:, None]).astype(np.int64)
    need = np.full(len(ahead.job), WORK_UNITS - ahead.slots - 2, dtype=np.int64)
    for job in np.flatnonzero(ahead.promised).tolist():
        if (inherited[job] >= 0).any():
            need[job] = max(1, min(need[job], _trained(gain, cost, inherited[job])))
    heaviest = max(float(ahead.weight.max(initial=0.0)), 1e-12)
    weight = np.rint(ahead.weight / heaviest * _WEIGHTS).astype(np.int64)
    weight[(ahead.weight > 0) & (weight == 0)] = 1
    new = int(weight[~ahead.promised].sum())
    weight = np.where(ahead.promised, (weight + 1) * (new + 1), weight)
    length = np.diff(ahead.boundary_s)
    gpus = ahead.cells.gpus[ahead.cell]
    types = len(np.unique(ahead.cells.gpu_type)) and int(ahead.cells.gpu_type.max()) + 1
    whole = max(1.0, float((ahead.capacity[:types] * length).sum()))
    gpu_time = np.rint(gpus[:, None] * length * (_GPU_TIME / whole)).astype(np.int64)
    return IntegerAdmission(
        ahead=ahead,
        allowed=allowed,
        gain=gain,
        cost=cost,
        need=need,
        weight=weight,
        gpu_time=gpu_time,
    )


def _trained(gain: Ints, cost: Ints, pick: Ints) -> int:
    total, before = 0, -1
    for slot, option in enumerate(pick.tolist()):
        if option >= 0:
            total += int(gain[option, slot]) - (int(cost[option]) if option != before else 0)
        before = option
    return total
