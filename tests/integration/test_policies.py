"""Standing policies that are set by call: versions, races of replicas, and rounds that follow them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.errors import InvalidInput
from tessera.service.standing_policy import StandingPolicies
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2
from tests.support.api import (
    INVALID,
    Api,
    C,
    a_cell,
    a_round,
    a_submit,
    api,
    refusal_of,
    some_cells,
)
from tests.support.stored_cluster import execute

SETTINGS = "{objective: makespan, min_run: 60s}"
"""The policy of the servers' settings."""


def a_policy(**options: Any) -> scheduler_pb2.SetPolicyRequest:
    outer = {k: options.pop(k) for k in ("message", "etag", "request_id") if k in options}
    return scheduler_pb2.SetPolicyRequest(
        parent=C, options=scheduler_pb2.RoundOptions(**options), **outer
    )


def a_return(version: int) -> scheduler_pb2.SetPolicyRequest:
    return scheduler_pb2.SetPolicyRequest(parent=C, restore_version=version)


async def policy_in_force(a: Api) -> scheduler_pb2.StandingPolicy:
    return await a.scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest(parent=C))


async def test_the_settings_are_version_0_until_a_policy_is_set(store: PostgresStore) -> None:
    async with api(store, policy=SETTINGS, period_s=100.0) as a:
        found = await policy_in_force(a)
        assert (found.version, found.name, found.from_settings) == (0, f"{C}/policies/0", True)
        assert found.options == scheduler_pb2.RoundOptions(
            objective="makespan", min_run=Duration(seconds=60)
        )
        assert found.effective_options.round.seconds == 100
        put = await a.scheduler.SetPolicy(a_policy(objective="jct", message="shorter waits"))
        assert (put.version, put.message, put.from_settings) == (1, "shorter waits", False)
        assert put.options == scheduler_pb2.RoundOptions(objective="jct")
        # What a policy does not set has its default, whatever the settings say.
        assert put.effective_options.min_run.seconds == 0
        assert put.effective_options.round.seconds == 100
        assert await policy_in_force(a) == put


async def test_a_round_follows_and_records_the_newest_version(store: PostgresStore) -> None:
    async with api(store, policy=SETTINGS) as one, api(store, policy=SETTINGS) as other:
        await one.estimates.UpsertCells(some_cells(a_cell(4)))
        await one.jobs.SubmitJob(a_submit())
        decided = await other.scheduler.Schedule(a_round())
        assert (decided.options.objective, decided.policy_version) == ("makespan", 0)
        await one.scheduler.SetPolicy(a_policy(objective="jct", max_changes=3))
        decided = await other.scheduler.Schedule(a_round(max_changes=2))  # without a restart
        assert (decided.options.objective, decided.options.max_changes) == ("jct", 2)
        request = scheduler_pb2.GetRoundRequest(name=decided.name)
        assert (await one.scheduler.GetRound(request)).policy_version == 1


async def test_of_two_replicas_that_set_a_policy_at_once_one_is_refused(
    store: PostgresStore,
) -> None:
    async with api(store) as one, api(store) as other:
        etag = (await policy_in_force(one)).etag
        outcomes = await asyncio.gather(
            one.scheduler.SetPolicy(a_policy(objective="jct", etag=etag)),
            other.scheduler.SetPolicy(a_policy(objective="makespan", etag=etag)),
            return_exceptions=True,
        )
        (won,) = [found for found in outcomes if isinstance(found, scheduler_pb2.StandingPolicy)]
        assert await policy_in_force(one) == await policy_in_force(other) == won
        late = other.scheduler.SetPolicy(a_policy(objective="throughput", etag=etag))
        assert (await refusal_of(late))[:2] == (StatusCode.ABORTED, "STALE_ETAG")
        # Without an etag, both are stored, one after the other.
        await asyncio.gather(
            *(
                a.scheduler.SetPolicy(a_policy(objective="jct", seed=seed))
                for seed in range(1, 5)
                for a in (one, other)
            )
        )
        versions = await one.scheduler.ListPolicies(scheduler_pb2.ListPoliciesRequest(parent=C))
        assert [p.version for p in versions.policies] == list(range(9, 0, -1))


async def test_an_earlier_version_is_restored_as_a_new_one(store: PostgresStore) -> None:
    async with api(store, policy=SETTINGS) as a:
        await a.scheduler.SetPolicy(a_policy(objective="jct"))
        await a.scheduler.SetPolicy(a_policy(objective="throughput"))
        again = await a.scheduler.SetPolicy(a_return(1))
        assert (again.version, again.options.objective) == (3, "jct")
        settings = await a.scheduler.SetPolicy(a_return(0))
        assert (settings.version, settings.from_settings) == (4, True)
        assert settings.effective_options.objective == "makespan"
        earlier = await a.scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest(parent=C, version=2))
        assert earlier.options.objective == "throughput"
        code, _, _ = await refusal_of(a.scheduler.SetPolicy(a_return(7)))
        assert code is StatusCode.NOT_FOUND
    async with api(store, policy="objective: jct") as changed:  # whatever the settings are by then
        assert (await policy_in_force(changed)).effective_options.objective == "jct"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"objective": "riches"}, "options.objective"),
        ({"solver": "abacus"}, "options.solver"),
        ({"solver": "highs"}, "options.solver"),  # it exists for comparison only
        ({"scheduler": "nobody"}, "options.scheduler"),
        ({"scheduler": "fcfs", "scheduler_parameters": "x=1"}, "options.scheduler_parameters"),
        ({"message": "x" * 501}, "message"),
    ],
)
async def test_a_policy_without_meaning_is_refused(
    store: PostgresStore, options: dict[str, Any], field: str
) -> None:
    async with api(store) as a:
        code, _, wrong = await refusal_of(a.scheduler.SetPolicy(a_policy(**options)))
        assert (code, wrong) == (INVALID, [field])
        assert (await policy_in_force(a)).version == 0


async def test_a_policy_is_validated_without_being_stored(store: PostgresStore) -> None:
    async with api(store) as a:
        request = a_policy(objective="jct")
        request.validate_only = True
        assert (await a.scheduler.SetPolicy(request)).version == 1
        assert (await policy_in_force(a)).version == 0
        both = a_policy(objective="jct")
        both.restore_version = 0
        assert (await refusal_of(a.scheduler.SetPolicy(both)))[2] == ["options"]


async def test_warnings_follow_the_policy_in_force(store: PostgresStore) -> None:
    async with api(store, policy="objective: deadline then jct") as a:
        due = {"seconds": 4 * 10**9}
        assert not (await a.jobs.SubmitJob(a_submit("a", deadline=due))).warnings
        await a.scheduler.SetPolicy(a_policy(objective="jct"))
        assert (await a.jobs.SubmitJob(a_submit("b", deadline=due))).warnings


def test_a_policy_of_another_release_is_an_error_that_says_what_to_do(
    store: PostgresStore, database: Database
) -> None:
    async def put() -> None:
        async with api(store) as a:
            await a.scheduler.SetPolicy(a_policy(objective="jct"))

    asyncio.run(put())
    policies = StandingPolicies(store)
    assert policies.of("c").options == RoundOptions(objective="jct")
    execute(database, "UPDATE policies SET options = '{\"charm\": 3}'")
    with pytest.raises(InvalidInput, match=r"does not know an option .* set the policy again"):
        policies.of("c")
