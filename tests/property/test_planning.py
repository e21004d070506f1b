"""Planners, and schedulers that choose plans, against an enumeration of all plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.memory import in_flight, limit_bytes, memory_bytes
from tessera.estimator.pipeline import Overlap, Sync, Transfers, iteration_s
from tessera.estimator.planning import labels, search
from tessera.estimator.planning.assembly import ProfiledStages, assemble_plan
from tessera.estimator.planning.options import NoPlan, options_of, stage_depths
from tessera.estimator.planning.pareto import comm_load, find_frontier, find_undominated_plans
from tessera.estimator.planning.search import best_plan, latency_of
from tessera.estimator.planning.stages import (
    NEAR_POWER_DISTANCE,
    bias_of,
    least_cut,
    stage_shares,
)
from tessera.estimator.planning.tuning import whole_space
from tessera.formulation.base.resources import NOT_STATED
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import Schedule
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.promises.guarantee import request_rate
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import DEFAULT, make_solver
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.packing import host_capacity
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.estimates import pipelines_of
from tests.support.laws import examples
from tests.support.oracles.listed_plans import NODE_GPUS, ListedRound, WaitingJob
from tests.support.oracles.plan_rounds import best_throughput, draw_plan_round
from tests.support.planning import (
    all_stages,
    every_candidate,
    every_plan,
    random_costs,
    random_depth,
)
from tests.support.worlds import a_profile

SEEDS = st.integers(0, 10_000)
SIZES = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 4))
OVERLAPS = st.builds(Overlap, transfers=st.sampled_from(Transfers), sync=st.sampled_from(Sync))


@examples(60)
@given(SEEDS, SIZES, OVERLAPS, st.integers(1, 9))
def test_the_best_plan_is_the_fastest_of_all_plans(
    seed: int, size: tuple[int, int, int], overlap: Overlap, micro_batches: int
) -> None:
    (layers, gpus, stages), rng = size, np.random.default_rng(seed)
    costs = random_costs(every_candidate(min(layers, 4), gpus), rng)
    option = options_of(costs.candidates, random_depth(len(costs.candidates), rng))
    latency = latency_of(costs, micro_batches, overlap)
    plans = np.array(list(every_plan(option, gpus, stages)), dtype=np.int64)
    if not len(plans):
        with pytest.raises(NoPlan):
            best_plan(option, latency, gpus, stages)
        return
    everywhere = iteration_s(pipelines_of(costs, option.source[plans]), micro_batches, overlap)
    plan = best_plan(option, latency, gpus, stages)
    assert plan.latency_s == pytest.approx(everywhere.min(), rel=1e-9)
    assert latency.of(plan.rows) == pytest.approx(plan.latency_s, rel=1e-9)
    assert set(plan.rows) <= set(option.source.tolist())


@pytest.mark.parametrize("seed", range(6))
def test_the_best_plan_is_found_after_a_poor_first_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LIMITS", np.array([3.0]))
    monkeypatch.setattr(search, "_MAX_PARTIAL_PLANS", 2)
    monkeypatch.setattr(labels, "_SPARE", 1)
    costs = random_costs(every_candidate(5, 8), np.random.default_rng(seed))
    option, latency = options_of(costs.candidates), latency_of(costs, 4)
    plans = np.array(list(every_plan(option, 8, 3)), dtype=np.int64)
    everywhere = iteration_s(pipelines_of(costs, plans), 4)
    assert best_plan(option, latency, 8, 3).latency_s == pytest.approx(everywhere.min())


@examples(60)
@given(SEEDS, st.one_of(SIZES, st.just((6, 8, 3))), st.integers(1, 9))
def test_the_frontier_matches_that_of_all_enumerated_plans(
    seed: int, size: tuple[int, int, int], micro_batches: int
) -> None:
    (layers, gpus, stages), rng = size, np.random.default_rng(seed)
    candidates = every_candidate(layers, gpus)
    comm, load = rng.uniform(0, 1, len(candidates)), rng.uniform(0.2, 3, layers)
    option = options_of(candidates, random_depth(len(candidates), rng))
    plans = np.array(list(every_plan(option, gpus, stages)), dtype=np.int64)
    if not len(plans):
        with pytest.raises(NoPlan):
            find_frontier(option, load, comm, gpus, stages, micro_batches)
        return
    share = stage_shares(load, gpus, option.start, option.end)
    bias = bias_of(share[plans], option.gpus[plans])
    total = comm_load(comm[option.source][plans], micro_batches)
    best = find_undominated_plans(bias, total)
    frontier = find_frontier(option, load, comm, gpus, stages, micro_batches, limit=10_000)
    expected = sorted(zip(bias[best], total[best], strict=True))
    assert frontier.exact
    assert frontier.found == len(frontier.plans)
    for plan, (least_bias, least) in zip(frontier.plans, expected, strict=True):
        assert plan.bias == pytest.approx(least_bias, abs=1e-9)
        assert plan.comm_load_s == pytest.approx(least, rel=1e-9)
    assert frontier.proxy.bias == pytest.approx(bias.min(), abs=1e-9)


@examples(40)
@given(SEEDS, SIZES)
def test_stages_are_cut_at_the_least_traffic_among_sums_near_powers_of_two(
    seed: int, size: tuple[int, int, int]
) -> None:
    (layers, gpus, stages), rng = size, np.random.default_rng(seed)
    flops, boundary = rng.uniform(0.2, 3, layers), rng.integers(1, 9, layers).astype(np.float64)
    option = all_stages(layers, gpus)
    plans = np.array(list(every_plan(option, gpus, stages)), dtype=np.int64)
    if not len(plans):
        with pytest.raises(NoPlan):
            least_cut(flops, boundary, gpus, stages)
        return
    share = stage_shares(flops, gpus, option.start, option.end)
    off = np.abs(np.log2(share / option.gpus))[plans].max(axis=1)
    near = plans[off <= max(NEAR_POWER_DISTANCE, off.min() + 1e-9)]
    sent = boundary[option.end - 1][near[:, :-1]].sum(axis=1)
    bias = bias_of(share[near], option.gpus[near])
    cut = least_cut(flops, boundary, gpus, stages)
    assert boundary[np.array(cut.ends[:-1], dtype=np.int64) - 1].sum() == sent.min()
    assert cut.bias == pytest.approx(bias[sent == sent.min()].min(), abs=1e-9)


@examples(60)
@given(SEEDS, st.integers(1, 5), st.integers(2, 3), st.integers(1, 9))
def test_the_assembled_plan_is_the_fastest_mixture(
    seed: int, stages: int, ways: int, micro_batches: int
) -> None:
    rng = np.random.default_rng(seed)
    busy = rng.uniform(1, 3, (stages, ways))
    busy[rng.random(busy.shape) < 0.2] = np.inf
    profiled = ProfiledStages(
        busy_s=busy,
        once_s=rng.uniform(0, 4, busy.shape),
        join_s=rng.uniform(0, 2, (stages - 1, ways, ways)),
    )
    every = np.stack(np.meshgrid(*[range(ways)] * stages), axis=-1).reshape(-1, stages)
    at = np.arange(stages)
    every = every[np.isfinite(busy[at, every]).all(axis=1)]
    joins = profiled.join_s[at[:-1], every[:, :-1], every[:, 1:]].sum(axis=1)
    chosen = busy[at, every]
    latency = chosen.sum(axis=1) + joins + (micro_batches - 1) * chosen.max(axis=1)
    latency += profiled.once_s[at, every].max(axis=1)
    if not len(every):
        with pytest.raises(NoPlan, match="stage"):
            assemble_plan(profiled, micro_batches)
        return
    plan = assemble_plan(profiled, micro_batches)
    assert plan.latency_s == pytest.approx(latency.min())
    assert latency[(every == plan.ways).all(axis=1)] == pytest.approx(latency.min())


@examples(30)
@given(SEEDS, st.integers(1, 4), st.sampled_from([1, 2, 4, 6]), st.integers(1, 3))
def test_a_space_counts_and_contains_exactly_the_plans_it_yields(
    seed: int, layers: int, gpus: int, stages: int
) -> None:
    rng = np.random.default_rng(seed)
    candidates = every_candidate(layers, gpus)
    space = whole_space(candidates, gpus, stages, random_depth(len(candidates), rng))
    listed = [tuple(space.options.source[list(p)]) for p in every_plan(space.options, gpus, stages)]
    assert space.count == len(listed)
    assert sorted(space.rows()) == sorted(listed)
    assert all(space.holds(rows) for rows in listed)
    assert len(list(space.plans())) == space.count


@examples(30)
@given(SEEDS, st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B]), st.integers(1, 6))
def test_a_stage_fits_as_deep_in_the_pipeline_as_its_memory_holds_micro_batches(
    seed: int, schedule: Schedule, micro_batches: int
) -> None:
    costs = random_costs(every_candidate(3, 4), np.random.default_rng(seed))
    memory = 8e9
    depth = stage_depths(costs, memory, micro_batches, schedule)
    for left in range(1, 5):
        flights = int(in_flight(schedule, left, micro_batches)[0])
        fits = memory_bytes(costs, flights) <= limit_bytes(memory)
        assert ((depth >= left) == fits).all()


RAW_POLICY: Final = "ilp:throughput@raw_throughput=true@promise_starts=false@gap=1e-9"
NORMALISED_POLICY: Final = "ilp:throughput@promise_starts=false@gap=1e-9"
POLICIES: Final = (
    "fcfs",
    "gavel",
    "sia",
    "arena",
    RAW_POLICY,
    NORMALISED_POLICY,
    "ilp:jct@gap=1e-9",
)
CLUSTERS: Final = (("a100",), ("a100", "a100"), ("a100", "v100"))
"""The GPU types of the nodes, which have four GPUs each."""
COUNTS: Final = (1, 2, 4, 8)
RATES: Final = st.floats(min_value=1.0, max_value=100.0)
ROUNDING: Final = 1e-6


@st.composite
def listed_rounds(draw: st.DrawFn) -> ListedRound:
    """Draw up to four jobs with any rates, some without some Cells, on one or two nodes."""
    nodes = draw(st.sampled_from(CLUSTERS))
    jobs, records = [], []
    for i in range(draw(st.integers(1, 4))):
        workload = Workload(model=f"m{i}", params="1B", global_batch=64)
        cells = [
            (kind, gpus)
            for kind in dict.fromkeys(nodes)
            for gpus in COUNTS
            if gpus <= NODE_GPUS * nodes.count(kind)
        ]
        requested = draw(st.sampled_from(cells))
        jobs.append(WaitingJob(workload=workload, gpu_type=requested[0], gpus=requested[1]))
        for kind, gpus in cells:
            if (kind, gpus) == requested or draw(st.booleans()):
                seconds = workload.global_batch / draw(RATES)
                records.append(a_profile(gpus, seconds, gpu_type=kind, workload=workload))
    return ListedRound.of(nodes, jobs, records)


@examples(25)
@given(listed_rounds())
def test_tessera_reaches_the_best_total_of_all_plans(listed: ListedRound) -> None:
    plans = list(listed.plans())
    raw, normalised = (listed.decided_by(policy) for policy in (RAW_POLICY, NORMALISED_POLICY))
    assert listed.total(raw) >= max(map(listed.total, plans)) * (1 - ROUNDING)
    assert listed.normalised(normalised) >= max(map(listed.normalised, plans)) * (1 - ROUNDING)


@examples(8)
@given(listed_rounds())
def test_every_policy_starts_one_of_the_listed_plans(listed: ListedRound) -> None:
    plans = set(listed.plans())
    for policy in POLICIES:
        assert listed.decided_by(policy) in plans


POLICY: Final = Policy(objective="throughput", promise_starts=False)
EXACT: Final = Budget(remaining_s=lambda: math.inf, gap=0.0)


def finds_the_optimum(snapshot: Snapshot, problem: Problem, best: float) -> bool:
    """Return whether the default solver's objective is ``best``, but for the rounding of columns."""
    solution = make_solver(DEFAULT).solve(problem, EXACT)
    rounding = len(snapshot.jobs) / problem.scale
    return abs(solution.objective / problem.scale - best) <= rounding + 1e-9 * best


def without_hosts(snapshot: Snapshot) -> Snapshot:
    """Return the round with nodes that do not state their CPUs and host memory."""
    unstated = np.full(len(snapshot.nodes), NOT_STATED)
    return replace(snapshot, nodes=replace(snapshot.nodes, cpus=unstated, host_bytes=unstated))


@examples(200)
@given(seed=st.integers(0, 2**32))
def test_the_ilp_finds_the_best_plans_and_resources_of_small_rounds(seed: int) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    problem = state_round(snapshot, POLICY).problem

    assert finds_the_optimum(snapshot, problem, best_throughput(snapshot, problem.must_run))
    assert not plan_round(snapshot, POLICY, make_solver(DEFAULT), EXACT).violations


def test_an_answer_that_ignores_cpus_and_memory_counts_as_wrong() -> None:
    wrong = 0
    for seed in range(40):
        snapshot = draw_plan_round(np.random.default_rng(seed))
        snapshot = replace(
            snapshot, jobs=replace(snapshot.jobs, guaranteed=np.zeros(len(snapshot.jobs), np.bool_))
        )
        blind = state_round(without_hosts(snapshot), POLICY).problem
        wrong += not finds_the_optimum(snapshot, blind, best_throughput(snapshot, blind.must_run))
    assert wrong >= 5


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(
        ("morphling", "morphling-r", "morphling-e", "morphling-n", "synergy", "antman")
    ),
)
def test_schedulers_that_count_resources_never_give_a_pool_more_than_it_has(
    seed: int, name: str
) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    view = make_view(snapshot, Policy())

    choice = make_scheduler(name).choose(view)

    runs = np.flatnonzero(choice >= 0)
    draft, column = view.draft, choice[runs]
    assert np.array_equal(draft.job[column], runs)
    hosts = host_capacity(view)
    for kind, gpus in enumerate(view.capacity.tolist()):
        used = draft.demand.at(column[draft.gpu_type[column] == kind])
        assert used.gpus.sum() <= gpus
        assert used.cpus.sum() <= hosts[kind][0]
        assert used.host_bytes.sum() <= hosts[kind][1]


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_morphling_gives_guaranteed_jobs_at_least_the_speed_of_their_submitted_plan(
    seed: int,
) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    typed = np.maximum(snapshot.jobs.requested_gpu_type, 0)
    snapshot = replace(snapshot, jobs=replace(snapshot.jobs, requested_gpu_type=typed))
    view = make_view(snapshot, Policy())
    owed = request_rate(view.draft)

    choice = make_scheduler("morphling").choose(view)

    jobs = np.flatnonzero((choice >= 0) & snapshot.jobs.guaranteed & ~np.isnan(owed))
    on_type = view.draft.gpu_type[choice[jobs]] == typed[jobs]
    jobs = jobs[on_type]
    assert (view.draft.rate[choice[jobs]] >= owed[jobs] * (1 - 1e-9)).all()
