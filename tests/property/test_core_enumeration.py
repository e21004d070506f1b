"""Enumerated changes of a few choices: the least loss for each usage, and the changes that cause it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.tables import Floats, Ints
from tessera.solvers.pricing import core
from tessera.solvers.pricing.core import MOST_WAYS, _Changes, _ways
from tests.support.laws import examples

FACTOR = np.array([0x1234567, -0x7654321], dtype=np.int64)


def some_changes(jobs: list[int], loss: list[int]) -> _Changes:
    order = np.argsort(jobs, kind="stable")
    return _Changes(
        job=np.array(jobs, dtype=np.int64)[order],
        column=np.arange(len(jobs)),
        loss=np.array(loss, dtype=np.float64),
    )


def least_by_hand(few: _Changes, more: Ints, allowed: float) -> dict[tuple[int, ...], float]:
    """Return the least loss for each usage, by trying all combinations of changes."""
    mine = [[None, *np.flatnonzero(few.job == job).tolist()] for job in np.unique(few.job)]
    found: dict[tuple[int, ...], float] = {}
    for way in itertools.product(*mine):
        picked = [c for c in way if c is not None]
        loss = float(few.loss[picked].sum())
        if loss <= allowed:
            used = tuple(more[picked].sum(axis=0).tolist())
            found[used] = min(found.get(used, np.inf), loss)
    return found


@examples(150)
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 9),
            st.sampled_from([-2, -1, 0, 1, 2]),
            st.sampled_from([-4, 0, 4]),
        ),
        max_size=9,
    ),
    allowed=st.sampled_from([0.0, 5.0, 12.0, 99.0]),
    factor=st.sampled_from([FACTOR, 0 * FACTOR]),
)
def test_each_usage_is_listed_once_at_its_least_loss(
    changes: list[tuple[int, int, int, int]], allowed: float, factor: Ints
) -> None:
    changes = sorted(changes, key=lambda change: change[0])
    few = some_changes([c[0] for c in changes], [c[1] for c in changes])
    more = np.array([c[2:] for c in changes], dtype=np.int64).reshape(-1, 2)
    ways = _ways(few, more, factor, allowed)
    assert ways is not None
    found = {tuple(u): loss for u, loss in zip(ways.used.tolist(), ways.loss, strict=True)}
    assert found == least_by_hand(few, more, allowed)
    assert len(found) == len(ways.loss)
    for way, (used, loss) in enumerate(zip(ways.used, ways.loss, strict=True)):
        picked = ways.picked(way)
        assert len(np.unique(few.job[picked])) == len(picked)
        assert few.loss[picked].sum() == loss
        np.testing.assert_array_equal(more[picked].sum(axis=0), used)


def test_many_changes_with_few_distinct_usages_stay_within_the_limit() -> None:
    jobs = 60  # 2^60 ways, 61 usages
    ways = _ways(
        some_changes(list(range(jobs)), [1] * jobs), np.ones((jobs, 2), np.int64), FACTOR, np.inf
    )
    assert ways is not None
    np.testing.assert_array_equal(np.sort(ways.loss), np.arange(jobs + 1))
    assert jobs * jobs < MOST_WAYS


def test_exceeding_the_limit_on_ways_gives_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    loss: Floats = np.ones(5)
    few = _Changes(job=np.arange(5), column=np.arange(5), loss=loss)
    more = np.stack([2 ** np.arange(5), np.zeros(5, np.int64)], axis=1)
    monkeypatch.setattr(core, "MOST_WAYS", 31)
    assert _ways(few, more, FACTOR, np.inf) is None
    monkeypatch.setattr(core, "MOST_WAYS", 32)
    found = _ways(few, more, FACTOR, np.inf)
    assert found is not None
    assert len(found.loss) == 32
