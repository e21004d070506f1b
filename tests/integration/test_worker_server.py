"""A server whose rounds are decided in a separate process."""

from __future__ import annotations

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.patience import PATIENCE_S
from tests.support.running_server import a_cluster, channel_to, settings


@pytest.mark.parametrize(("from_jobs", "elsewhere"), [(1, True), (2, False)])
async def test_a_round_with_enough_jobs_is_decided_in_a_worker_and_committed_by_the_server(
    store: PostgresStore, database: Database, from_jobs: int, elsewhere: bool
) -> None:
    a_cluster(store)
    async with channel_to(settings(database, solve_process_from_jobs=from_jobs)) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        decided = await stub.Schedule(
            scheduler_pb2.ScheduleRequest(parent="clusters/c"),
            timeout=PATIENCE_S,
            wait_for_ready=True,
        )
        again = await stub.ReplayRound(
            scheduler_pb2.ReplayRoundRequest(name=decided.name), timeout=PATIENCE_S
        )
    assert (decided.outcome, decided.waiting) == ("committed", 1)
    assert ("transfer" in decided.seconds) is elsewhere
    assert again.same_decisions
    assert store.get_round("c", 1).summary.verified
