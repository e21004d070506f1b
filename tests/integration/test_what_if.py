"""WhatIf over a socket: answers on stored clusters, of which nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from google.protobuf.duration_pb2 import Duration

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.records.clusters import NodeSpec
from tessera.v1 import scheduler_pb2, what_if_pb2
from tests.support.api import Api, C, a_round, a_submit, api

WEAK = f"{C}/jobs/weak"
Change = what_if_pb2.HypotheticalChange


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store whose agents do not expire, however slow the machine is."""
    return PostgresStore(database, lease_s=3600.0)


@asynccontextmanager
async def two_nodes(store: PostgresStore) -> AsyncIterator[Api]:
    """Yield the stubs of a server whose two nodes of 8 GPUs have been heard."""
    async with api(store, policy="{objective: throughput}") as a:
        nodes = [NodeSpec(name=name, gpu_type="a100", gpus=8) for name in ("n1", "n2")]
        store.hello("c", "agent", "first", nodes)
        yield a


@asynccontextmanager
async def busy(store: PostgresStore) -> AsyncIterator[Api]:
    """Yield the stubs of a server on whose two nodes two jobs run, while a third waits."""
    async with two_nodes(store) as a:
        for name, weight in (("one", 5.0), ("two", 5.0), ("weak", 1.0)):
            await a.jobs.SubmitJob(a_submit(name, weight=weight, requested_gpus=8, min_gpus=8))
        await a.scheduler.Schedule(a_round())
        yield a


def a_question(
    *changes: Change, hours: float = 0.0, **options: object
) -> scheduler_pb2.WhatIfRequest:
    return scheduler_pb2.WhatIfRequest(
        parent=C,
        hypothesis=scheduler_pb2.Hypothesis(
            changes=changes,
            options=scheduler_pb2.RoundOptions(**options),  # type: ignore[arg-type]
        ),
        horizon=Duration(seconds=int(3600 * hours)),
        futures=4,
    )


async def test_a_node_starts_the_waiting_job_now_and_saves_waiting_over_the_next_hours(
    store: PostgresStore,
) -> None:
    added = what_if_pb2.AddedNodes(gpu_type="a100", count=1)
    async with busy(store) as a:
        answer = await a.scheduler.WhatIf(a_question(Change(nodes_added=added), hours=1))
    (job,) = answer.now.jobs
    assert (job.job, job.effect) == (WEAK, "starts")
    assert (job.before.kind, job.after.kind, job.after.cell.gpus) == ("wait", "start", 8)
    assert (answer.now.before.gpus["a100"], answer.now.after.gpus["a100"]) == (16, 24)
    assert answer.now.after.effective_gpus > answer.now.before.effective_gpus
    assert answer.now.unchanged_jobs == 2
    assert answer.hours.futures == 4
    assert answer.hours.mean_wait_seconds.high < 0
    (hours,) = answer.hours.jobs
    assert hours.start_after.earliest.seconds < hours.start_before.earliest.seconds
