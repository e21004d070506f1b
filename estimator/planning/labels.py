"""Label-setting search for plans, stage by stage from the front, with bounds and dominance.

A label is the front of a plan, i.e. its first stages. Its criteria are sums and maxima over its
stages. Tables of :mod:`.chain` bound what the rest of the plan adds to each criterion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from tessera.estimator.planning.chain import suffix_tables
from tessera.estimator.planning.options import StageOptions
from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges

_LOOK_BACK = 12
"""Number of preceding labels, in order of the first criterion, with which a label is compared."""
_SPARE = 4
"""Number of labels checked for dominance, as a multiple of those that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Criteria:
    """The criteria of each option: columns to add up, (A, K), and columns to maximise, (M, K)."""

    added: Floats
    worst: Floats

    def only(self, kept: Bools | Ints) -> Criteria:
        """Return the criteria of the chosen options."""
        return Criteria(added=self.added[:, kept], worst=self.worst[:, kept])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestBounds:
    """The least that the rest of a plan adds to each criterion, as tables of :mod:`.chain`."""

    added: Floats  # (A, stages + 1, layers + 1, gpus + 1)
    worst: Floats  # (M, stages + 1, layers + 1, gpus + 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """The n fronts of plans, all with the same number of stages left.

    ``rows`` are the options taken, shape (stages so far, n).
    """

    layer: Ints  # (n,) the next layer
    gpus: Ints  # (n,) left
    added: Floats  # (A, n) so far
    worst: Floats  # (M, n) so far
    rows: Ints

    def __len__(self) -> int:
        return len(self.layer)

    def only(self, kept: Bools | Ints) -> Labels:
        """Return the chosen labels."""
        return Labels(**{f.name: getattr(self, f.name)[..., kept] for f in fields(self)})


Judge = Callable[[Floats, Floats], Floats]
"""A function from the least totals of whole plans, added (A, n) and worst (M, n), to a score (n,).
Lower scores are better. A label with score ``inf`` is discarded."""


def rest_of(
    options: StageOptions,
    criteria: Criteria,
    stages: int,
    gpus: int,
    cancelled: Callable[[], bool] = never_cancelled,
) -> RestBounds:
    """Return the bounds for plans of up to ``stages`` stages on up to ``gpus`` GPUs."""
    return RestBounds(
        added=suffix_tables(options, criteria.added, np.add, stages, gpus, cancelled),
        worst=suffix_tables(options, criteria.worst, np.maximum, stages, gpus, cancelled),
    )


def complete_labels(
    options: StageOptions,
    criteria: Criteria,
    rest: RestBounds,
    stages: int,
    gpus: int,
    judge: Judge,
    most: int,
    cancelled: Callable[[], bool] = never_cancelled,
    *,
    keeps_dominated: bool = False,
) -> tuple[Labels, bool]:
    """Return the whole plans that ``judge`` keeps, and whether these are all of them.

    After each stage, at most ``most`` labels with the least scores are kept. Of two labels at the
    same state, the one that is worse or equal in every criterion is discarded, unless
    ``keeps_dominated``. Then the result has not only a best plan, but many good ones.
    """
    labels, all_kept = _none_yet(criteria, gpus), True
    first = np.searchsorted(options.start, np.arange(options.layers + 2))
    for left in range(stages - 1, -1, -1):
        require_caller(cancelled)
        labels = _extended(labels, options, criteria, rest, first, left + 1)
        added, worst = label_totals(labels, rest, left)
        score = judge(added, worst)
        finite = np.flatnonzero(np.isfinite(score))
        likely = _least(finite, score, _SPARE * most)
        apart = likely if keeps_dominated else likely[_undominated(labels, likely)]
        kept = _least(apart, score, most)
        all_kept &= len(likely) == len(finite) and len(kept) == len(apart)
        labels = labels.only(kept)
    return labels, all_kept


def _least(among: Ints, score: Floats, most: int) -> Ints:
    """Return the ``most`` indices with the least score."""
    if len(among) <= most:
        return among
    return among[np.argpartition(score[among], most)[:most]]


def label_totals(labels: Labels, rest: RestBounds, left: int) -> tuple[Floats, Floats]:
    """Return each label's least totals of a whole plan, added (A, n) and worst (M, n).

    ``left`` is the number of stages that its plan still needs.
    """
    layer, gpus = labels.layer, labels.gpus
    return (
        labels.added + rest.added[:, left, layer, gpus],
        np.maximum(labels.worst, rest.worst[:, left, layer, gpus]),
    )


def _none_yet(criteria: Criteria, gpus: int) -> Labels:
    return Labels(
        layer=np.zeros(1, dtype=np.int64),
        gpus=np.array([gpus], dtype=np.int64),
        added=np.zeros((len(criteria.added), 1)),
        worst=np.zeros((len(criteria.worst), 1)),
        rows=np.zeros((0, 1), dtype=np.int64),
    )


def _extended(
    labels: Labels,
    options: StageOptions,
    criteria: Criteria,
    rest: RestBounds,
    first: Ints,
    stages: int,
) -> Labels:
    """Return the labels with one more stage, in every way that leads to the end.

    ``stages`` is the number of stages left, including this one.
    """
    count = first[labels.layer + 1] - first[labels.layer]
    front = np.repeat(np.arange(len(labels)), count)
    row = concatenate_ranges(first[labels.layer], count)
    gpus = labels.gpus[front] - options.gpus[row]
    leads = (gpus >= 0) & (options.depth[row] >= stages)
    leads &= np.isfinite(rest.added[0, stages - 1, options.end[row], np.maximum(gpus, 0)])
    front, row = front[leads], row[leads]
    return Labels(
        layer=options.end[row],
        gpus=gpus[leads],
        added=labels.added[:, front] + criteria.added[:, row],
        worst=np.maximum(labels.worst[:, front], criteria.worst[:, row]),
        rows=np.concatenate([labels.rows[:, front], row[None]]),
    )


def _undominated(labels: Labels, among: Ints) -> Ints:
    """Return the positions in ``among`` of labels that no near label at their state dominates.

    Some dominated labels may remain, but only dominated labels are discarded. Of equal labels, one
    remains.
    """
    state = labels.layer[among] * (int(labels.gpus.max(initial=0)) + 1) + labels.gpus[among]
    values = np.concatenate([labels.added[:, among], labels.worst[:, among]])
    order = np.lexsort((*values[::-1], state))
    values, state = values[:, order], state[order]
    stays = np.ones(len(order), dtype=np.bool_)
    for shift in range(1, min(_LOOK_BACK, len(order) - 1) + 1):
        beside = state[shift:] == state[:-shift]
        stays[shift:] &= ~(beside & (values[:, :-shift] <= values[:, shift:]).all(axis=0))
    return order[stays]
