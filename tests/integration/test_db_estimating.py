"""What the store keeps for estimating: uncertainty, models, Cells of its own, measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from db.engine import Database
from db.store import PostgresStore
from formulation.errors import InvalidInput
from formulation.snapshot import Source
from tests.support.stored import BERT, C, a_cluster, a_record, a_spec, do, execute, submit


def test_uncertainty_is_kept_with_an_estimate(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("j"))
    do(store, lambda w: w.upsert_estimates(C, [a_record(1, sd=0.25), a_record(2)]))
    found, _ = store.list_estimates(C, BERT.model, BERT.params, BERT.global_batch, 0, 10)
    assert [e.sd for e in found] == [0.25, None, None, None]
    loaded = store.snapshot(C).estimates.sd
    assert np.array_equal(loaded, [0.25, math.nan, math.nan, math.nan], equal_nan=True)


def test_a_round_keeps_the_uncertainty_that_it_saw(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("j"))
    do(store, lambda w: w.upsert_estimates(C, [a_record(1, sd=0.25)]))
    before = store.snapshot(C)
    do(store, lambda w: w.upsert_estimates(C, [a_record(1, iter_time_s=9.0, sd=0.5)]))
    after = store.snapshot(C)
    assert (before.estimates.sd[0], after.estimates.sd[0]) == (0.25, 0.5)


@pytest.mark.parametrize("sd", ["-0.1", "'NaN'", "'Infinity'"])
def test_the_database_refuses_an_uncertainty_without_meaning(
    database: Database, store: PostgresStore, sd: str
) -> None:
    a_cluster(store)
    with pytest.raises(InvalidInput, match="ck_estimates_sd"):
        execute(database, f"UPDATE estimates SET sd = {sd}")
