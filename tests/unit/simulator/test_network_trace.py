"""Traces of jobs on a network, and the job simulator with contention on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Contention, demand_of, join_parts
from tessera.formulation.network.plan import NetworkPlan
from tessera.formulation.network.traffic import Traffic
from tessera.formulation.placement import Gang
from tessera.simulator.executor import replay_lines
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.network.rates import GroupRates, RateWindow
from tessera.simulator.network.slowdowns import ContentionSlowdowns
from tessera.simulator.network.trace import Cluster, TraceJob, TraceResult, run_trace
from tessera.simulator.store.gpus import AllocationChange
from tests.support.networks import FluidJob, a_demand
from tests.support.worlds import FCFS, a_scenario, an_arrival, simulate_scenario

LINKS = 3


class GpuBook:
    """An allocator of one host's GPUs, lowest first."""

    def __init__(self, gpus: int) -> None:
        self.free, self.held = set(range(gpus)), dict[str, tuple[int, ...]]()

    def allocate(self, job: str, gpus: int) -> Gang | None:
        if len(self.free) < gpus:
            return None
        self.held[job] = tuple(sorted(self.free)[:gpus])
        self.free -= set(self.held[job])
        return Gang(members=((0, self.held[job]),))

    def release(self, job: str) -> None:
        self.free |= set(self.held.pop(job))


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


def a_job(name: str, at_s: float = 0.0, gpus: int = 1, iterations: float = 100.0) -> TraceJob:
    return TraceJob(
        name=name,
        arrival_s=at_s,
        gpus=gpus,
        iterations=iterations,
        traffic=Traffic(work_flop=10.0, compute_s=1.0, start_s=1.0),
    )


def play_jobs(
    jobs: Sequence[TraceJob],
    link: Mapping[str, int],
    comm_s: float = 1.0,
    gpus: int = 4,
    in_turn: bool = False,
    horizon_s: float = np.inf,
    window: RateWindow | None = None,
    comparisons: Mapping[str, Callable[[Contention], NetworkPlan]] = MappingProxyType({}),
) -> TraceResult:
    ticks = count()
    cluster = Cluster(
        gpus=gpus,
        places=GpuBook(gpus),
        in_turn=in_turn,
        plan=first_paths,
        met=lambda job, gang: a_part(job.name, link[job.name], comm_s, gpus=gang.gpus),
        clock=lambda: float(next(ticks)),
        comparisons=comparisons,
    )
    return run_trace(jobs, cluster, GroupRates(window), horizon_s)


def test_joined_contentions_equal_the_contention_of_all_jobs() -> None:
    whole = join_parts([a_part("a", 0, 1.0), a_part("b", 1, 2.0, gpus=3)])
    assert whole.jobs == ("a", "b")
    assert whole.gpus.tolist() == [1, 3]
    for chosen, links in (([1, 0], [1, 1]), ([0, 1], [0, 2])):
        demand = demand_of(whole, np.array(chosen))
        assert demand.link.tolist() == links
        assert demand.busy_s.tolist() == [1.0, 2.0]
    other = a_part("c", 0, 1.0).with_background(0.5)
    with pytest.raises(InvalidInput, match="the same for all"):
        join_parts([a_part("a", 0, 1.0), other])


def test_jobs_that_share_nothing_end_as_if_alone() -> None:
    result = play_jobs([a_job("a"), a_job("b", at_s=10.0)], {"a": 0, "b": 1})
    assert result.end_s == pytest.approx([200.0, 210.0])
    assert result.jct_s == pytest.approx(result.alone_s)
    assert result.flop == pytest.approx(2000.0)
    assert result.held_gpu_s == pytest.approx(400.0)
    assert result.computing_of_held == pytest.approx(0.5)
    assert result.link_use == pytest.approx([100 / 210, 100 / 210, 0.0])
    assert not result.ever_contended.any()
    assert (result.plans, result.plan_s, result.groups_played) == (3, 3.0, 0)


def test_a_job_is_slowed_by_a_contending_one_until_that_ends() -> None:
    """Both compute 1 s and send 2 s; the second job gets what the first leaves, one second in three."""
    jobs = [a_job("a", iterations=100), a_job("b", iterations=100)]
    result = play_jobs(jobs, {"a": 0, "b": 0}, comm_s=2.0, window=RateWindow(of_few=600))
    assert result.end_s[0] == pytest.approx(300.0)  # the urgent job runs as if alone
    rate = 1 / 6  # 2 s of the link, a third of the time
    assert result.end_s[1] == pytest.approx(300 + (100 - 300 * rate) * 3, rel=0.01)
    assert result.ever_contended.all()
    assert result.contended_gpu_s == pytest.approx(600.0)
    assert result.contended_job_s == pytest.approx(600.0)


def test_alternative_plans_are_judged_at_the_same_times_and_change_nothing() -> None:
    jobs = [a_job("a"), a_job("b")]
    links = {"a": 0, "b": 0}
    window = RateWindow(of_few=600)
    plain = play_jobs(jobs, links, comm_s=2.0, window=window)
    result = play_jobs(
        jobs,
        links,
        comm_s=2.0,
        window=window,
        comparisons={"same": first_paths, "apart": spread_paths},
    )
    assert result.end_s.tolist() == plain.end_s.tolist()
    assert result.flop == pytest.approx(2000.0)
    assert result.comparison_flop["same"] == pytest.approx(result.flop)
    both_s, alone_s = result.end_s[0], result.end_s[1] - result.end_s[0]
    assert result.comparison_flop["apart"] == pytest.approx(2 * 10 * both_s / 3 + 10 * alone_s / 3)


def spread_paths(contention: Contention) -> NetworkPlan:
    """Return a plan with every second job on its other path."""
    plan = first_paths(contention)
    return replace(plan, chosen=np.arange(len(plan.chosen)) % 2)


def test_a_job_that_does_not_fit_is_overtaken_by_smaller_ones_unless_in_turn() -> None:
    jobs = [a_job("a", gpus=3), a_job("big", 1.0, gpus=2), a_job("small", 2.0)]
    links = {"a": 0, "big": 1, "small": 2}
    assert play_jobs(jobs, links).start_s == pytest.approx([0.0, 200.0, 2.0])
    assert play_jobs(jobs, links, in_turn=True).start_s == pytest.approx([0.0, 200.0, 200.0])


def test_a_horizon_and_a_job_that_never_fits_leave_jobs_unfinished() -> None:
    result = play_jobs([a_job("a"), a_job("huge", gpus=9)], {"a": 0, "huge": 1}, horizon_s=50.0)
    assert result.ended_s == 50.0
    assert np.isinf(result.end_s).all()
    assert result.flop == pytest.approx(250.0)
    result = play_jobs([a_job("a"), a_job("huge", gpus=9)], {"a": 0, "huge": 1})
    assert result.jct_s.tolist() == [pytest.approx(200.0), np.inf]


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


def test_meaningless_traces_are_refused() -> None:
    with pytest.raises(InvalidInput, match="a"):
        a_job("a", iterations=0)
    with pytest.raises(InvalidInput, match="unique"):
        play_jobs([a_job("a"), a_job("a")], {"a": 0})
    with pytest.raises(InvalidInput, match="horizon_s"):
        play_jobs([a_job("a")], {"a": 0}, horizon_s=np.nan)
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
