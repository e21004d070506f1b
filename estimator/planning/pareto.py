"""Arena's planner (section 3.3): the frontier on computation bias and communication load; the proxy plan.

Without running anything, computation and communication have no common unit; so plans are kept that no
other one beats in both. The proxy is the plan of least bias, then of least communication load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.estimator.planning.chain import suffixes, walk
from tessera.estimator.planning.labels import Criteria, Rest, complete, rest_of
from tessera.estimator.planning.options import NoPlan, Options, least_in_each
from tessera.estimator.planning.stages import stage_shares
from tessera.estimator.plans import StageCosts
from tessera.formulation.tables import Bools, Floats, Ints

LIMIT = 32
"""Plans on the frontier that are kept (the Arena artifact's number; the paper says "a threshold")."""
_WEIGHTS = np.array([0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.6, 0.9, 1.0])
"""Of communication beside bias, for plans found first: they bound the rest."""
_WIDTH = 4096
"""Fronts of plans kept after each stage."""
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A plan by the planner's two measures. ``rows``: of the table that the options came from."""

    rows: tuple[int, ...]
    ends: tuple[int, ...]  # the layer after each stage's last
    bias: float
    comm_load_s: float  # of an iteration; in bytes where the costs are bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Undominated plans by ascending bias."""

    plans: tuple[Ranked, ...]
    proxy: Ranked
    found: int  # plans before those beyond the limit went
    exact: bool  # no front of a plan was left out for want of room


def comm_each(costs: StageCosts, micro_batches: int) -> Floats:
    """Return what each candidate's collectives take, a micro-batch, with its part of the gradients',
    (K,)."""
    return costs.comm_s + costs.sync_s / micro_batches


def comm_load(comm: Floats, micro_batches: int) -> Floats:
    """Return the communication load of plans of stages (..., S): one micro-batch passes all stages, the
    others follow at the pace of the slowest (Arena, equation 4). Transfers between stages are left out."""
    load: Floats = comm.sum(axis=-1) + (micro_batches - 1) * comm.max(axis=-1)
    return load


def undominated(bias: Floats, load: Floats) -> Bools:
    """Return which plans no other one equals or beats in both, shape (P,); of equal ones the first
    stays."""
    order = np.lexsort((load, bias))
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], load[order][:-1]]))
    out = np.zeros(len(bias), dtype=np.bool_)
    out[order] = load[order] < lowest
    return out


def proxy_of(bias: Floats, load: Floats) -> int:
    """Return the plan of least bias, then of least communication load (Arena, section 3.3).

    Biases closer than a 1e-9 part are the same: they come from sums in different orders.
    """
    level = np.flatnonzero(bias <= bias.min() * (1 + _TIE) + _TIE)
    return int(level[int(load[level].argmin())])


def thinned(ends: Ints, load: Floats, limit: int, kept: int) -> Ints:
    """Return at most ``limit`` plans, ascending (Arena, section 3.3).

    As long as there are more, of the two plans with the most similar partitions, shape (P, S), the one
    with the higher communication load goes; partitions differ by the layers that lie in another stage.
    Plan ``kept`` never goes: the proxy has the least bias and so the highest load of the frontier, and
    would be an early victim.
    """
    layers = np.arange(int(ends.max()))
    stage = (layers[None, :, None] >= ends[:, None, :]).sum(axis=2)
    apart = (stage[:, None, :] != stage[None, :, :]).sum(axis=2).astype(np.float64)
    np.fill_diagonal(apart, np.inf)
    left = np.arange(len(ends))
    while len(left) > limit:
        a, b = np.unravel_index(int(apart[np.ix_(left, left)].argmin()), (len(left), len(left)))
        pair = sorted(map(int, (a, b)), key=lambda i: (left[i] == kept, -load[left[i]]))
        left = np.delete(left, pair[0])
    return left


def frontier(
    options: Options,
    load: Floats,
    comm: Floats,
    gpus: int,
    stages: int,
    micro_batches: int,
    limit: int = LIMIT,
) -> Frontier:
    """Return the Pareto frontier over partitions, GPUs and shapes of stages.

    ``load`` (L,) is each layer's, ``comm`` (K,) as in :func:`comm_each`, for the rows of the options'
    source. Of the shapes of a stage that fit into memory the one with the least communication is taken.

    Raises:
        NoPlan: no chain of options covers the layers within memory.
    """
    options = options.only(_least_comm(options, comm))
    share = stage_shares(load, gpus, options.start, options.end)
    c = comm[options.source]
    criteria = Criteria(added=np.array([(share - options.gpus) ** 2, c]), worst=c[None])
    rest = rest_of(options, criteria, stages, gpus)
    if not np.isfinite(rest.added[0, stages, 0, gpus]):
        raise NoPlan(
            f"no plan of {stages} stages on {gpus} GPUs: give more layers, counts or memory"
        )
    known = _first_plans(options, criteria, stages, gpus)
    rows, exact = _improved(options, criteria, rest, known, stages, gpus, micro_batches)
    bias, total = _measures(criteria, rows, micro_batches)
    whole = undominated(bias, total)
    rows, bias, total = rows[:, whole], bias[whole], total[whole]
    return _ranked(options, rows, bias, total, limit, exact)


def _improved(
    options: Options,
    criteria: Criteria,
    rest: Rest,
    known: Ints,
    stages: int,
    gpus: int,
    micro_batches: int,
) -> tuple[Ints, bool]:
    """Return plans, as rows (S, P), with the whole frontier among them; and whether that is certain."""
    for _ in range(3):
        bias, total = _measures(criteria, known, micro_batches)
        best = undominated(bias, total)
        order = np.flatnonzero(best)[np.argsort(bias[best])]
        known, bias, total = known[:, order], bias[order], total[order]

        def judge(
            added: Floats, worst: Floats, bias: Floats = bias, total: Floats = total
        ) -> Floats:
            least_bias = np.sqrt(added[0])
            least = added[1] + (micro_batches - 1) * worst[0]
            beside = np.searchsorted(bias, least_bias * (1 + _TIE) + _TIE, side="right") - 1
            beaten = (beside >= 0) & (total[beside] <= least * (1 + _TIE))
            score = least_bias / max(bias[-1], _TIE) + least / max(total[0], _TIE)
            return np.where(beaten, np.inf, score)

        labels, exact = complete(options, criteria, rest, stages, gpus, judge, _WIDTH)
        known = np.concatenate([known, labels.rows], axis=1)
        if exact:
            break
    return known, exact


def _first_plans(options: Options, criteria: Criteria, stages: int, gpus: int) -> Ints:
    """Return plans of least weighted sums of bias and communication, as rows (S, P)."""
    bias, comm = criteria.added
    scale = bias.max() or 1.0, comm.max() or 1.0
    value = (1 - _WEIGHTS)[:, None] * bias / scale[0] + _WEIGHTS[:, None] * comm / scale[1]
    rest = suffixes(options, value, np.add, stages, gpus)
    plans = [walk(options, v, r, stages, gpus) for v, r in zip(value, rest, strict=True)]
    return np.unique(np.array(plans), axis=0).T


def _measures(criteria: Criteria, rows: Ints, micro_batches: int) -> tuple[Floats, Floats]:
    """Return bias and communication load of plans, rows (S, P)."""
    bias: Floats = np.sqrt(criteria.added[0, rows].sum(axis=0))
    return bias, comm_load(criteria.added[1, rows].T, micro_batches)


def _least_comm(options: Options, comm: Floats) -> Ints:
    """Return the option of least communication for each stretch of layers and GPUs, and those that fit
    where it does not."""
    most = int(options.gpus.max(initial=0)) + 1
    group = (options.start * (options.layers + 1) + options.end) * most + options.gpus
    value = comm[options.source]
    left = np.flatnonzero(np.isfinite(value))
    kept, best = [left[:0]], np.zeros(int(group.max(initial=0)) + 1, dtype=np.int64)
    while len(left):
        lead = left[least_in_each(group[left], value[left])]
        kept.append(lead)
        best[group[lead]] = lead
        left = left[options.depth[left] > options.depth[best[group[left]]]]
    return np.sort(np.concatenate(kept))


def _ranked(
    options: Options, rows: Ints, bias: Floats, load: Floats, limit: int, exact: bool
) -> Frontier:
    """Return the frontier of these undominated plans, rows (S, P), cut to the limit."""
    ends = options.end[rows].T
    proxy = proxy_of(bias, load)
    few = thinned(ends, load, limit, proxy) if len(bias) > limit else np.arange(len(bias))
    plans = {
        int(i): Ranked(
            rows=tuple(options.source[rows[:, i]].tolist()),
            ends=tuple(ends[i].tolist()),
            bias=float(bias[i]),
            comm_load_s=float(load[i]),
        )
        for i in few[np.argsort(bias[few])]
    }
    return Frontier(plans=tuple(plans.values()), proxy=plans[proxy], found=len(bias), exact=exact)
