"""Estimates that a user and the service write at the same time, and those that remain."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.db.writer import PostgresWriter
from tessera.formulation.values import EstimateSource, Workload
from tests.support.execution_plans import with_own_plan
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import C, a_cluster, a_record, do

MOE = Workload(model="moe", params="1.3B", global_batch=256)
DERIVED = a_record(
    2,
    workload=MOE,
    nodes=1,
    pipeline_degree=2,
    source=EstimateSource.ANALYTIC,
    sd=0.4,
    iter_time_s=5.0,
)
MINE = with_own_plan(
    a_record(2, workload=MOE, nodes=1, source=EstimateSource.PROFILED, sd=None, iter_time_s=5.0)
)


def stored_cells(store: PostgresStore) -> set[tuple[str, int]]:
    estimates, _ = store.list_estimates(C, MOE.model, MOE.params, MOE.global_batch, 0, 100)
    return {(e.cell.plan, e.cell.pipeline_degree) for e in estimates}


def write_user_estimates(writer: PostgresWriter) -> object:
    return writer.upsert_estimates(C, [MINE])


def write_derived_estimates(writer: PostgresWriter) -> object:
    return writer.derive(C, [DERIVED], {})


def test_estimates_derived_by_a_call_are_replaced_by_user_estimates(store: PostgresStore) -> None:
    a_cluster(store)
    do(store, write_derived_estimates)
    do(store, write_user_estimates)
    assert stored_cells(store) == {(MINE.cell.plan, 1)}


def is_waiting(database: Database) -> bool:
    """Return whether a transaction waits for another."""
    with database.read() as connection:
        return bool(
            connection.execute(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar()
        )


@pytest.mark.parametrize("user_first", [True, False])
def test_concurrent_writes_of_a_user_and_the_service_end_as_if_sequential(
    database: Database, store: PostgresStore, user_first: bool
) -> None:
    a_cluster(store)
    do(store, lambda w: w.derive(C, [], {MOE: "digest"}))
    first, second = (
        (write_user_estimates, write_derived_estimates)
        if user_first
        else (write_derived_estimates, write_user_estimates)
    )
    with ThreadPoolExecutor(1) as pool:
        others: list[Future[None]] = []
        pause = threading.Event()

        def work(writer: PostgresWriter) -> None:
            first(writer)
            others.append(pool.submit(do, store, second))
            while not (others[0].done() or is_waiting(database)):
                pause.wait(0.01)

        do(store, work)
        others[0].result(PATIENCE_S)
    assert stored_cells(store) == {(MINE.cell.plan, 1)}
