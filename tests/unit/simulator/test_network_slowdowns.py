"""Rates of jobs that share links, and the job simulator with contention on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.network.contention import Contention, demand_of, join_parts
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.executor import replay_lines
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.network.rates import GroupRates, RateWindow
from tessera.simulator.network.slowdowns import ContentionSlowdowns
from tessera.simulator.store.gpus import AllocationChange
from tests.support.networks import FluidJob, a_demand
from tests.support.worlds import FCFS, a_scenario, an_arrival, simulate_scenario

LINKS = 3


def a_part(
    name: str, link: int, comm_s: float, compute_s: float = 1.0, gpus: int = 1
) -> Contention:
    """Return one job that sends for ``comm_s`` in one bundle, over the link or the next one."""
    none, starts = np.zeros(0, np.int64), np.array([0, 1])
    return Contention(
        jobs=(name,),
        work_flop=np.array([10.0]),
        compute_s=np.array([compute_s]),
        start_s=np.array([compute_s]),
        gpus=np.array([gpus]),
        fixed_start=np.zeros(2, np.int64),
        fixed_link=none,
        fixed_bytes=np.zeros(0),
        fixed_delay_s=np.zeros(1),
        bundle_start=starts,
        bundle_bytes=np.array([comm_s]),
        bundle_messages=np.array([1]),
        candidate_start=np.array([0, 2]),
        candidate=np.array([1, 0]),
        path_start=np.array([0, 1, 2]),
        path_link=np.array([(link + 1) % LINKS, link]),
        path_delay_s=np.zeros(2),
        link_bytes_per_s=np.ones(LINKS),
    )


def first_paths(contention: Contention) -> NetworkPlan:
    """Return a plan with all jobs on their first paths; the first job is the most urgent."""
    jobs = len(contention.jobs)
    return NetworkPlan(
        chosen=np.zeros(len(contention.bundle_bytes), np.int64),
        priority=np.zeros(jobs),
        order=np.arange(jobs),
        level=jobs - 1 - np.arange(jobs),
        levels=jobs,
    )


def test_joined_contentions_equal_the_contention_of_all_jobs() -> None:
    whole = join_parts([a_part("a", 0, 1.0), a_part("b", 1, 2.0, gpus=3)])
    assert whole.jobs == ("a", "b")
    assert whole.gpus.tolist() == [1, 3]
    for chosen, links in (([1, 0], [1, 1]), ([0, 1], [0, 2])):
        demand = demand_of(whole, np.array(chosen))
        assert demand.link.tolist() == links
        assert demand.busy_s.tolist() == [1.0, 2.0]
    other = replace(a_part("c", 0, 1.0), link_bytes_per_s=np.full(LINKS, 0.5))
    with pytest.raises(InvalidInput, match="the same for all"):
        join_parts([a_part("a", 0, 1.0), other])


def test_unchanged_groups_are_not_simulated_again() -> None:
    demand = a_demand(*(FluidJob(busy_s={link: 1}) for link in (0, 0, 1, 1)), FluidJob(compute_s=2))
    names, rates = list("abcde"), GroupRates()
    level = np.array([3, 2, 1, 0, 0])
    once = rates(names, demand, level)
    assert (rates.played, rates.kept) == (2, 0)
    assert rates(names, demand, level + 4).tolist() == once.tolist()
    assert (rates.played, rates.kept) == (2, 2)
    rates(names, demand, np.array([2, 3, 1, 0, 0]))
    assert (rates.played, rates.kept) == (3, 3)
    assert once[4] == 0.5


def test_a_window_in_which_nothing_would_count_is_refused() -> None:
    with pytest.raises(InvalidInput, match="window"):
        RateWindow(of_few=0)


def _contended(comm_s: float) -> ContentionSlowdowns:
    def met(change: AllocationChange, gang: Gang) -> Contention:
        return a_part(f"{change.job}", 0, comm_s, gpus=gang.gpus)

    return ContentionSlowdowns(met, first_paths, GroupRates(RateWindow(of_few=600)))


def test_the_job_simulator_slows_contending_jobs_and_its_log_replays() -> None:
    """Alone, each job takes 1,000 s. Contended, the second does 1/6 in place of 1/3 iterations/s: half."""
    scenario = a_scenario(an_arrival("a"), an_arrival("b"))
    ends = {}
    for slowdowns in (None, _contended(2.0)):
        result = simulate_scenario(scenario, FCFS, slowdowns=slowdowns)
        ends[slowdowns is not None] = result.end_s
        assert list(replay_lines(lines_of(log_of(result))).values()) == pytest.approx(
            (result.end_s - result.arrival_s).tolist()
        )
    alone, contended = ends[False], ends[True]
    assert contended[0] == pytest.approx(alone[0])
    assert contended[1] == pytest.approx(alone[1] + alone[0] / 2, rel=0.01)


def test_a_starved_job_has_a_finite_slowdown() -> None:
    def met(change: AllocationChange, gang: Gang) -> Contention:
        return a_part(f"{change.job}", 0, 1.0, compute_s=1e-6 if change.job == 0 else 1.0)

    gang = Gang(members=((0, (0,)),))
    runs = {job: AllocationChange(job=job, kind=DecisionKind.START, gang=gang) for job in (0, 1)}
    slowdowns = ContentionSlowdowns(met, first_paths, GroupRates())(runs)
    assert slowdowns[0] == pytest.approx(1.0)
    assert 1000 < slowdowns[1] <= 1e6
