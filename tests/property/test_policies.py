"""Laws of every scheduler: no broken rule, and no job where it may not run or by a refused plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.information import Information, all_estimates, searched_optimum, single_gpu
from tessera.formulation.lifecycle import SCHEDULABLE
from tessera.formulation.plan_tables import RefusedPlans, Runtimes
from tessera.formulation.policy import Policy
from tessera.formulation.selectors import Requirement, Selector
from tessera.formulation.snapshot import STATES, Estimates, Jobs, Snapshot
from tessera.formulation.tables import Ints
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_names, scheduler_of
from tests.support.builders import a_random_snapshot
from tests.support.driver import (
    decide_round,
    with_allowed_types,
    with_avoided_nodes,
    with_selectors,
)
from tests.support.laws import examples
from tests.support.snapshots import draw_choices, snapshots

LAW = examples(25)

NAMES = pytest.mark.parametrize("name", scheduler_names())

FOREVER = Budget(remaining_s=lambda: math.inf)


@cache
def policy_of(name: str) -> PublishedScheduler:
    return make_scheduler(name)


@cache
def another_cluster() -> Snapshot:
    return a_random_snapshot(5, jobs=6)


def outcome(
    snapshot: Snapshot, name: str, information: Information = all_estimates
) -> RoundOutcome:
    return plan_round(
        snapshot,
        Policy(),
        Greedy(),
        FOREVER,
        scheduler=Scheduler(published=policy_of(name), information=information),
    )


@NAMES
@LAW
@given(snapshot=snapshots())
def test_a_round_of_any_scheduler_breaks_no_rule_and_explains_waiting_jobs(
    name: str, snapshot: Snapshot
) -> None:
    result = outcome(snapshot, name)
    assert result.violations == ()
    assert [d.job for d in result.decisions] == list(range(len(snapshot.jobs)))
    for decision in result.decisions:
        says_why = decision.gang is None or decision.kind is DecisionKind.REPLAN
        assert says_why == (decision.reason is not None)
        if decision.gang is not None:
            assert STATES[int(snapshot.jobs.state[decision.job])] in SCHEDULABLE


@NAMES
@LAW
@given(snapshot=snapshots())
def test_a_scheduler_keeps_no_state_between_rounds(name: str, snapshot: Snapshot) -> None:
    first = outcome(snapshot, name).decisions
    outcome(another_cluster(), name)
    assert first == outcome(snapshot, name).decisions
    other = plan_round(
        snapshot, Policy(), Greedy(), FOREVER, scheduler=Scheduler(published=make_scheduler(name))
    )
    assert first == other.decisions


@NAMES
@pytest.mark.parametrize(
    "information", [searched_optimum, single_gpu(1)], ids=["optimum", "single-gpu"]
)
def test_a_scheduler_with_other_estimates_still_makes_a_round_that_breaks_no_rule(
    name: str, information: Information
) -> None:
    for seed in range(3):
        result = outcome(a_random_snapshot(seed, jobs=12), name, information)
        assert result.violations == ()
        started = [d for d in result.decisions if d.kind is DecisionKind.START]
        assert len(started) > 0


BUDGET = Budget(remaining_s=lambda: math.inf, gap=1e-6, work={"cp-sat": 0.2, "lp": 9.0})


@st.composite
def restricted_snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot in any state, whose jobs state types, selectors, preferences and avoided nodes."""
    snapshot = draw(snapshots())
    jobs, nodes, types = len(snapshot.jobs), len(snapshot.nodes), len(snapshot.gpu_types)
    if not jobs:
        return snapshot
    some_jobs = st.sets(st.integers(0, jobs - 1))
    some_nodes = st.sets(st.integers(0, nodes - 1))
    pairs = {(job, draw(st.integers(0, types - 1))) for job in draw(some_jobs)}
    snapshot = with_allowed_types(snapshot, *sorted(pairs))
    avoided = draw(
        st.sets(st.tuples(st.integers(0, jobs - 1), st.integers(0, nodes - 1)), max_size=2)
    )
    snapshot = with_avoided_nodes(snapshot, *sorted(avoided))
    for column in ("required_selector", "preferred_selector"):
        wanted = {job: draw(some_nodes) for job in sorted(draw(some_jobs))}
        snapshot = with_selectors(snapshot, wanted, column)
    return snapshot


def require_permitted(snapshot: Snapshot, outcome: RoundOutcome) -> None:
    """Require that each gang is on nodes and a type that its job may use, read from the tables alone."""
    allowed = snapshot.allowed_types
    types = {
        job: set(allowed.gpu_type[allowed.job == job].tolist()) for job in allowed.job.tolist()
    }
    u = snapshot.unmatched_nodes
    unmatched = set(zip(u.selector.tolist(), u.node.tolist(), strict=True))
    for d in outcome.decisions:
        if d.gang is None:
            continue
        selector = int(snapshot.jobs.required_selector[d.job])
        for node, _ in d.gang.members:
            assert (selector, node) not in unmatched
            kind = int(snapshot.nodes.gpu_type[node])
            assert kind in types.get(d.job, {kind})


@pytest.mark.parametrize("solver", ["greedy", "cp-sat"])
@examples(60)
@given(restricted_snapshots())
def test_no_solver_places_a_job_where_it_may_not_run(solver: str, snapshot: Snapshot) -> None:
    outcome = plan_round(snapshot, Policy(), make_solver(solver), BUDGET)
    assert outcome.violations == ()
    require_permitted(snapshot, outcome)


@pytest.mark.parametrize("name", scheduler_names())
@examples(6)
@given(restricted_snapshots())
def test_no_published_scheduler_places_a_job_where_it_may_not_run(
    name: str, snapshot: Snapshot
) -> None:
    options = RoundOptions(scheduler=name)
    outcome = plan_round(
        snapshot, options, make_solver("greedy"), BUDGET, scheduler=scheduler_of(name)
    )
    assert outcome.violations == ()
    require_permitted(snapshot, outcome)


@examples(60)
@given(restricted_snapshots())
def test_a_preference_changes_neither_which_jobs_run_nor_their_cells(snapshot: Snapshot) -> None:
    """Only where the whole outcome is placed at its first attempt. Fragmentation may differ."""
    jobs = snapshot.jobs
    free = replace(snapshot, jobs=replace(jobs, preferred_selector=np.full(len(jobs), -1)))
    outcomes = [decide_round(s, Policy()) for s in (snapshot, free)]
    if any(o.placed.unplaced or o.placed.degraded for o in outcomes):
        return
    assert [d.cell for d in outcomes[0].decisions] == [d.cell for d in outcomes[1].decisions]


WORDS = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,8}[A-Za-z0-9])?", fullmatch=True)

REQUIREMENTS = st.builds(
    lambda key, values, negated: Requirement(
        key, tuple(sorted(values)), negated=negated and len(values) == 1
    ),
    WORDS,
    st.sets(WORDS, min_size=1, max_size=4),
    st.booleans(),
)


@examples(200)
@given(st.lists(REQUIREMENTS, max_size=6, unique=True))
def test_every_selector_reads_back_from_its_text(requirements: list[Requirement]) -> None:
    selector = Selector(tuple(requirements))
    assert Selector.read("f", str(selector)) == selector


PLANS = ("", "a", "b")

TORCHRUN, MEGATRON = 0, 1

RUNTIMES = Runtimes(name=("torchrun", "megatron"), pipelines=np.array([False, True]))

PLAN_LAW = examples(100)


def plan_on(gpus: Ints, degree: Ints) -> Ints:
    """Return the plan of each Cell."""
    return (np.asarray(gpus) + np.asarray(degree)) % len(PLANS)


@st.composite
def restricted_rounds(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot in which runtimes refuse some plans, also those that jobs run by."""
    snapshot = draw(snapshots())
    e, jobs = snapshot.estimates, snapshot.jobs
    runtime = draw_choices(draw, *([(-1, TORCHRUN, MEGATRON)] * len(jobs)))
    pairs = [(TORCHRUN, 1), (TORCHRUN, 2), (MEGATRON, 1), (MEGATRON, 2)]
    refused = draw_choices(draw, *([(False, True)] * len(pairs)))
    rows = [
        {"runtime": of, "plan": plan}
        for (of, plan), is_refused in zip(pairs, refused, strict=True)
        if is_refused
    ]
    runs = jobs.current_gpus > 0
    current_plan = np.where(runs, plan_on(jobs.current_gpus, jobs.current_degree), 0)
    return replace(
        snapshot,
        plans=PLANS,
        estimates=replace(e, plan=plan_on(e.gpus, e.pipeline_degree)),
        jobs=replace(jobs, runtime=np.array(runtime, np.int64), current_plan=current_plan),
        runtimes=RUNTIMES,
        refused_plans=RefusedPlans.from_rows(rows),
    )


def is_refused(snapshot: Snapshot, runtime: int, plan: int, degree: int) -> bool:
    pairs = snapshot.refused_plans
    return (runtime, plan) in zip(pairs.runtime.tolist(), pairs.plan.tolist(), strict=True) or (
        runtime == TORCHRUN and degree > 1
    )


def filter_by_hand(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with a workload for each job of a restricted runtime, and no runtimes."""
    rows = [snapshot.estimates.row(i) for i in range(len(snapshot.estimates))]
    jobs = [snapshot.jobs.row(i) for i in range(len(snapshot.jobs))]
    lost, workloads = snapshot.disturbed(), list(snapshot.workloads)
    own: list[dict[str, Any]] = []
    for index, job in enumerate(jobs):
        runtime = job["runtime"]
        job["runtime"] = -1
        if runtime < 0:
            continue
        now = job["current_type"], job["current_gpus"], job["current_degree"], job["current_plan"]
        stays = now[1] > 0 and not lost[index] and is_refused(snapshot, runtime, now[3], now[2])
        for row in rows:
            cell = row["gpu_type"], row["gpus"], row["pipeline_degree"], row["plan"]
            if row["workload"] == job["workload"] and (
                not is_refused(snapshot, runtime, cell[3], cell[2]) or (stays and cell == now)
            ):
                own.append(row | {"workload": len(workloads)})
        workloads.append(workloads[job["workload"]])
        job["workload"] = len(workloads) - 1
        job["movable"] = job["movable"] and not stays
    return replace(
        snapshot,
        workloads=tuple(workloads),
        estimates=Estimates.from_rows(rows + own) if rows else snapshot.estimates,
        jobs=Jobs.from_rows(jobs) if jobs else snapshot.jobs,
        runtimes=Runtimes.from_rows([]),
        refused_plans=RefusedPlans.from_rows([]),
    )


def decide(snapshot: Snapshot, policy: Policy | None = None, scheduler: str = "") -> list[Decision]:
    """Return the decisions without their reasons."""
    budget = Budget(remaining_s=lambda: math.inf, work={"cp-sat": 0.1, "lp": 9.0})
    options = policy or RoundOptions(objective="throughput")
    decided = plan_round(
        snapshot,
        options,
        make_solver("portfolio"),
        budget,
        scheduler=scheduler_of(scheduler) if scheduler else None,
    )
    assert decided.violations == ()
    return [decision._replace(reason=None) for decision in decided.decisions]


@PLAN_LAW
@given(restricted_rounds())
def test_a_round_decides_as_if_its_estimates_had_been_filtered_by_hand(snapshot: Snapshot) -> None:
    assert decide(snapshot) == decide(filter_by_hand(snapshot))


@PLAN_LAW
@given(restricted_rounds(), st.sampled_from(["fcfs", "sia", "gavel", "arena"]))
def test_so_does_every_published_scheduler(snapshot: Snapshot, scheduler: str) -> None:
    by_hand = filter_by_hand(snapshot)
    assert decide(snapshot, scheduler=scheduler) == decide(by_hand, scheduler=scheduler)
