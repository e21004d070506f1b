"""Network plans in messages to agents and users, and how long the messages may be."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.formulation.network.descriptions import MAX_MET_JOBS, find_met_jobs
from tessera.formulation.network.outcome import NetworkDecision, Route
from tessera.formulation.network.plan import NetworkPlan
from tessera.formulation.network.tags import MAX_NAMED_JOBS, FabricCapabilities, assign_tags
from tessera.formulation.records.agents import DesiredGang, DesiredState
from tessera.service.rpc.convert import agents
from tests.support.job_records import a_desired_gang
from tests.support.networks import FluidJob, a_demand


def _gang_with_routes(*sources: str) -> DesiredGang:
    part = NetworkDecision(
        job="j",
        generation=3,
        rank=0,
        level=2,
        tag=9,
        priority=1.0,
        intensity=1.0,
        routes=tuple(
            Route(source=s, target="n1/gpu-0", via=("t",), sent_bytes=1.0) for s in sources
        ),
    )
    return a_desired_gang(network=part)


@pytest.mark.parametrize(
    ("nodes", "expected"), [({"n2"}, ["n2/gpu-2", "rank 7"]), ({"n1", "n2"}, None)]
)
def test_an_agent_receives_only_the_routes_of_its_own_nodes(
    nodes: set[str], expected: list[str] | None
) -> None:
    sources = ["n1/gpu-0", "n2/gpu-2", "rank 7"]
    desired = DesiredState(revision=5, gangs=(_gang_with_routes(*sources),), network_levels=8)
    (gang,) = agents.of_desired(desired, nodes).gangs
    assert [route.source for route in gang.network.routes] == (expected or sources)
    assert (gang.network.level, gang.network.dscp) == (2, 9)


def test_a_remark_on_thousands_of_jobs_with_one_tag_names_a_few_of_them() -> None:
    assignment = assign_tags({f"j{n:04d}": n % 8 for n in range(3000)}, 8)
    assert set(assignment.tags.values()) <= set(FabricCapabilities().free_tags)
    assert assignment.remarks
    for remark in assignment.remarks:
        assert remark.count("j0") + remark.count("j1") + remark.count("j2") <= 2 * MAX_NAMED_JOBS
        assert " more" in remark


def test_each_job_is_served_at_its_own_level_or_above_if_tags_are_short() -> None:
    levels = np.random.default_rng(0).integers(0, 8, 400).tolist()
    jobs = {f"j{n}": level for n, level in enumerate(levels)}
    assignment = assign_tags(jobs, 8)
    again = assign_tags({**jobs, "new": 3}, 8, assignment.tags)
    for settings in (assignment, again):
        assert all(settings.priorities[settings.tags[job]] >= level for job, level in jobs.items())
    assert all(again.tags[job] == tag for job, tag in assignment.tags.items())


def test_jobs_served_before_a_job_are_named_however_many_come_after_it() -> None:
    """One job on link 0 is far more urgent; many less urgent ones on link 1 are nearer in rank."""
    far = [FluidJob(busy_s={2: 1.0})] * 30
    job = FluidJob(busy_s={0: 1.0, 1: 1.0})
    demand = a_demand(FluidJob(busy_s={0: 1.0}), *far, job, *[FluidJob(busy_s={1: 1.0})] * 20)
    count = demand.jobs
    level = np.where(np.arange(count) == 0, 7, np.where(np.arange(count) <= 31, 3, 0))
    plan = NetworkPlan(
        chosen=np.zeros(0, np.int64),
        priority=np.ones(count),
        order=np.arange(count),
        level=level,
        levels=8,
    )
    met_jobs = find_met_jobs(demand, plan)
    assert met_jobs[31] == [0, *range(32, 32 + MAX_MET_JOBS - 1)]
    assert met_jobs[0] == [31]
