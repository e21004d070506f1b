"""The baselines' ways to map an order to few priority levels.

Levels are given to jobs that share a link. The others (``contended_first`` puts them last) get
level 0, which has no effect. If they were counted, they would use up levels to the baselines'
disadvantage.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Ints


def contended_first(demand: LinkDemand, order: Ints) -> tuple[Ints, int]:
    """Return the order with jobs that share no link at its end, and the number of the others."""
    meets = demand.contended()[order]
    return np.concatenate([order[meets], order[~meets]]), int(meets.sum())


def alone_then_rest(order: Ints, ranked: int, levels: int) -> Ints:
    """Return a separate level for each of the first ``levels`` - 1 jobs and one for the rest, (J,).

    This is Sincronia as read in Crux, figure 13. Only the first ``ranked`` jobs of the order count.
    """
    _possible(levels)
    return _by_job(order, np.maximum(levels - 1 - np.arange(ranked), 0))


def equal_blocks(order: Ints, ranked: int, levels: int, tied: Bools | None = None) -> Ints:
    """Return levels that divide the first ``ranked`` jobs of the order equally, (J,).

    This is Varys as read in Crux, figure 13. If ``tied[i]``, the i-th job of the order is as urgent
    as the one before it, and takes its level.
    """
    _possible(levels)
    place = np.arange(ranked, dtype=np.int64)
    if tied is not None and ranked:
        opens = ~tied[:ranked]
        opens[0] = True
        place = np.maximum.accumulate(np.where(opens, place, 0))
    return _by_job(order, levels - 1 - place * levels // max(ranked, 1))


def _by_job(order: Ints, of_ranked: Ints) -> Ints:
    level = np.zeros(len(order), dtype=np.int64)
    level[order[: len(of_ranked)]] = of_ranked
    return level


def _possible(levels: int) -> None:
    if levels < 1:
        raise InvalidInput("levels", f"is {levels}; it must be at least 1")
