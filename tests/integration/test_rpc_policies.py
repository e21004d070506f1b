"""Policies: the standing one, and plug-ins that the operator allows."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2
from tests.support.api import (
    INVALID,
    Api,
    C,
    a_batch,
    a_cell,
    a_round,
    a_submit,
    api,
    api_with_agent,
    connect_agent,
    refusal_of,
    some_cells,
)
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import execute

SETTINGS = "{objective: makespan, network_measure: 60s}"


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


async def test_the_settings_are_version_0_until_a_policy_is_set(store: Store) -> None:
    async with api(store, policy=SETTINGS, period_s=100.0) as a:
        found = await policy_in_force(a)
        assert (found.version, found.name, found.from_settings) == (0, f"{C}/policies/0", True)
        assert found.options == scheduler_pb2.RoundOptions(
            objective="makespan", network_measure=Duration(seconds=60)
        )
        assert found.effective_options.round.seconds == 100
        put = await a.scheduler.SetPolicy(a_policy(objective="jct", message="shorter waits"))
        assert (put.version, put.message, put.from_settings) == (1, "shorter waits", False)
        assert put.options == scheduler_pb2.RoundOptions(objective="jct")
        # What a policy does not set has its default, whatever the settings say.
        assert put.effective_options.network_measure.seconds == 0
        assert put.effective_options.round.seconds == 100
        assert await policy_in_force(a) == put


async def test_a_round_follows_and_records_the_newest_version(store: Store) -> None:
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
    store: Store,
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


async def test_an_earlier_version_is_restored_as_a_new_one(store: Store) -> None:
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


async def test_a_policy_without_meaning_is_refused(store: Store) -> None:
    refused: dict[str, dict[str, Any]] = {
        "options.objective": {"objective": "riches"},
        "options.solver": {"solver": "highs"},  # it exists for comparison only
        "options.scheduler_parameters": {"scheduler": "fcfs", "scheduler_parameters": "x=1"},
        "message": {"message": "x" * 501},
    }
    async with api(store) as a:
        for field, options in refused.items():
            code, _, wrong = await refusal_of(a.scheduler.SetPolicy(a_policy(**options)))
            assert (code, wrong) == (INVALID, [field])
        both = a_policy(objective="jct")
        both.restore_version = 0
        assert (await refusal_of(a.scheduler.SetPolicy(both)))[2] == ["options"]
        assert (await policy_in_force(a)).version == 0


def test_a_policy_of_another_release_is_an_error_that_says_what_to_do(
    store: Store, database: Database
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


async def test_a_round_keeps_and_replays_the_parameters_of_its_scheduler(
    store: Store,
) -> None:
    def gpus(done: scheduler_pb2.Round) -> list[int]:
        return [decision.allocation.cell.gpus for decision in done.decisions]

    fixed = {"scheduler": "arena", "scheduler_parameters": "max_upgrades=0,depth=5"}
    async with api(store, policy=str(fixed)) as a:
        await a.estimates.UpsertCells(some_cells(a_cell(2), a_cell(4)))
        connect_agent(store)
        await a.jobs.SubmitJob(a_submit(requested_gpus=1, iterations=10**6))
        done = await a.scheduler.Schedule(a_round(), timeout=PATIENCE_S)
        assert (done.outcome, gpus(done)) == ("committed", [1])
        stored = await a.scheduler.GetRound(scheduler_pb2.GetRoundRequest(name=done.name))
        assert stored.options == done.options
        assert stored.options.scheduler_parameters == "max_upgrades=0,depth=5"
        request = scheduler_pb2.ReplayRoundRequest(name=done.name)
        assert (await a.scheduler.ReplayRound(request)).same_decisions
        request.options.scheduler = "arena"
        default = await a.scheduler.ReplayRound(request)
        assert (default.round.options.scheduler_parameters, gpus(default.round)) == ("", [8])
        other = await a.scheduler.Schedule(a_round(scheduler="fcfs"), timeout=PATIENCE_S)
        assert other.options.scheduler_parameters == ""


@pytest.mark.parametrize(
    ("mode", "clock_factor", "promised"),
    [
        ("look-ahead", 1.0, {"short"}),
        ("look-ahead", 60.0, {"short", "hours"}),
        ("myopic", 60.0, {"short", "hours"}),
    ],
)
async def test_deadlines_are_in_real_time_even_if_training_is_replayed_faster(
    store: Store, mode: str, clock_factor: float, promised: set[str]
) -> None:
    """By the estimates, training takes 100 s, 2 hours and 40 hours. Each deadline is in 20 minutes."""
    due = Timestamp()
    due.GetCurrentTime()
    due.seconds += 1200
    async with api(store, clock_factor=clock_factor, real_time=True) as a:
        connect_agent(store)
        jobs = {"short": 800, "hours": 57_600, "days": 1_152_000}
        await a.jobs.SubmitJobs(
            a_batch(*[a_submit(k, iterations=n, deadline=due) for k, n in jobs.items()])
        )
        request = a_round(objective="deadline then throughput", deadlines=mode)
        done = await a.scheduler.Schedule(request, timeout=PATIENCE_S)
        decisions = {d.job.rpartition("/")[2]: d for d in done.decisions}
        assert {name for name, d in decisions.items() if d.admitted} == promised
        earliest = Timestamp()
        earliest.FromJsonString(decisions["days"].reason.evidence["earliest_deadline"])
        real_s = earliest.seconds - due.seconds + 1200
        assert 36_000 < real_s * clock_factor < 360_000
        rates = {d.allocation.rate for d in decisions.values() if d.admitted}
        assert rates <= {256.0, 2048.0}  # the rates of the estimates
        again = await a.scheduler.ReplayRound(scheduler_pb2.ReplayRoundRequest(name=done.name))
        assert again.same_decisions


MODULE = "allowed_lab"
TEXT = """
import numpy as np
from tessera.formulation.round.objectives.values import ColumnValues

class LastFirst:
    name = "last-first"
    def choose(self, seen):
        choice = np.full(len(seen.draft.current), -1)
        choice[-1] = seen.draft.job_start[-2]
        return choice

def running(draft):
    gross = draft.weight[draft.job]
    return ColumnValues(gross=gross, price=np.zeros(len(gross)), unit="jobs")
"""


@pytest.fixture
def plugin_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MODULE, "other_lab"):
        (tmp_path / f"{name}.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)


async def test_a_client_chooses_among_the_plugins_that_the_operator_allows(
    store: Store, plugin_modules: None
) -> None:
    allowed = f"{MODULE}:LastFirst,{MODULE}:running"
    async with api_with_agent(store, plugins=allowed) as a:
        await a.jobs.SubmitJobs(a_batch(*[a_submit(name, requested_gpus=8) for name in "abc"]))
        done = await a.scheduler.Schedule(
            a_round(scheduler=f"{MODULE}:LastFirst"), timeout=PATIENCE_S
        )
        assert (done.outcome, done.running, done.waiting) == ("committed", 1, 2)
        replayed = await a.scheduler.ReplayRound(scheduler_pb2.ReplayRoundRequest(name=done.name))
        assert replayed.same_decisions
        done = await a.scheduler.Schedule(
            a_round(objective=f"{MODULE}:running"), timeout=PATIENCE_S
        )
        assert done.goals[-1].unit == "jobs"
        for field, name in (("scheduler", "LastFirst"), ("objective", "running")):
            call = a.scheduler.Schedule(a_round(**{field: f"other_lab:{name}"}))
            assert await refusal_of(call) == (INVALID, "INVALID_INPUT", [f"options.{field}"])
        assert "other_lab" not in sys.modules


async def test_a_server_without_plugins_imports_nothing_that_a_client_names(
    store: Store,
) -> None:
    async with api(store) as a:
        for field in ("scheduler", "objective"):
            call = a.scheduler.Schedule(a_round(**{field: "this:zen"}))
            assert await refusal_of(call) == (INVALID, "INVALID_INPUT", [f"options.{field}"])
        assert "this" not in sys.modules
