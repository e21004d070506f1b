"""Rounds that the server starts itself follow the standing policy."""

from __future__ import annotations

import asyncio

from tessera.db.store import PostgresStore
from tessera.formulation.clock import SystemClock
from tessera.service.config import Config
from tessera.service.loop import RoundLoop
from tessera.service.periodic import PeriodicRounds
from tessera.service.rpc.calls import Calls
from tessera.service.standing_policy import StandingPolicies
from tests.support.stored_cluster import C, a_cluster, a_spec, submit


async def test_a_periodic_round_follows_the_standing_policy(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("waiting"))  # a cluster without a job has no rounds
    config = Config(policy="{objective: max-min then jct, max_changes: 1}", period_s=60.0)
    clock, calls, round_calls = SystemClock(), Calls(1, "store"), Calls(1, "round")
    periodic = PeriodicRounds(
        store,
        RoundLoop(store, clock),
        clock,
        calls=calls,
        round_calls=round_calls,
        holder="one",
        spacing_s=config.round_spacing_s,
        period_s=config.period_s,
        deadline_s=30.0,
        policies=StandingPolicies(store, config.round_options()),
    )
    await periodic.tick()
    await asyncio.gather(*periodic.begun())
    await periodic.stop()
    await asyncio.gather(calls.close(), round_calls.close())
    (decided,) = store.list_rounds(C, 0, 10)
    assert decided.options["objective"] == "max-min then jct"
    assert (decided.options["max_changes"], decided.options["round_s"]) == (1, 60.0)
