"""Laws of every scheduler: no broken rule, no job where it may not run, and choices that last."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.selectors import Requirement, Selector
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.lifecycle import SCHEDULABLE, JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.information import (
    Information,
    all_estimates,
    searched_optimum,
    single_gpu,
)
from tessera.formulation.state.plan_tables import RefusedPlans, Runtimes
from tessera.formulation.state.snapshot import STATES, Estimates, Jobs, Snapshot
from tessera.simulator.run import Decider, Result
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler, SchedulerView, make_view
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_names, scheduler_of
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes
from tests.support.conditions import conditions
from tests.support.driver import (
    FOREVER,
    decide_round,
    with_allowed_types,
    with_avoided_nodes,
    with_selectors,
)
from tests.support.laws import examples
from tests.support.snapshots import draw_choices, snapshots
from tests.support.worlds import (
    COSTLY,
    FREE,
    a_random_scenario,
    simulate_scenario,
)

LAW = examples(25)


NAMES = pytest.mark.parametrize("name", scheduler_names())


UNLIMITED = Budget(remaining_s=lambda: math.inf)


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
        UNLIMITED,
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
        snapshot, Policy(), Greedy(), UNLIMITED, scheduler=Scheduler(published=make_scheduler(name))
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
    allowed = snapshot.allowed_gpu_types
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
    """Return whether a runtime cannot run a plan. No one knows the stages of one without a name."""
    pairs = snapshot.refused_plans
    return (runtime, plan) in zip(pairs.runtime.tolist(), pairs.plan.tolist(), strict=True) or (
        degree > 1 and (runtime == TORCHRUN or not snapshot.plans[plan])
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
        job["pinned"] = job["pinned"] or stays
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


LASTING = [
    name for name in scheduler_names() if Scheduler(published=make_scheduler(name)).lasts(Policy())
]


class PolicyAskedEveryRound:
    """A scheduler that is called in every round."""

    def __init__(self, name: str) -> None:
        self._published = make_scheduler(name)
        self.name = self._published.name

    def choose(self, seen: SchedulerView) -> Ints:
        return self._published.choose(seen)


def advance_time(snapshot: Snapshot, seconds: float, share_left: float) -> Snapshot:
    """Return the snapshot after some time in which nothing else has changed."""
    jobs = snapshot.jobs
    runs = jobs.current_gpus > 0
    left = np.where(runs, jobs.iterations_left * share_left, jobs.iterations_left)
    served = jobs.service_gpu_s + jobs.current_gpus * seconds
    return replace(
        snapshot,
        now_s=snapshot.now_s + seconds,
        epoch=snapshot.epoch + 1,
        round_number=snapshot.round_number + 1,
        jobs=replace(jobs, iterations_left=left, service_gpu_s=served),
    )


@pytest.mark.parametrize("name", LASTING)
@examples(60)
@given(
    snapshot=snapshots(),
    seconds=st.sampled_from([1.0, 300.0, 1e6]),
    share_left=st.sampled_from([0.0, 1e-3, 0.9]),
)
def test_a_lasting_choice_is_the_same_later(
    name: str, snapshot: Snapshot, seconds: float, share_left: float
) -> None:
    policy = make_scheduler(name)
    first = policy.choose(make_view(snapshot, Policy()))
    then = policy.choose(make_view(advance_time(snapshot, seconds, share_left), Policy()))
    np.testing.assert_array_equal(first, then)


def run_scenario(seed: int, options: RoundOptions, *, wakeful: bool, costly: bool) -> Result:
    scenario = a_random_scenario(seed, jobs=12)
    decide = Decider(options, policy=PolicyAskedEveryRound(options.scheduler) if wakeful else None)
    return simulate_scenario(
        scenario,
        decide=decide,
        overheads=COSTLY if costly else FREE,
        **conditions(scenario, seed, 0.1 if seed % 3 else 0.0),
    )


@pytest.mark.parametrize("name", LASTING)
@examples(25)
@given(seed=st.integers(0, 2**16), every=st.sampled_from([0, 1, 3, 12]), costly=st.booleans())
def test_skipped_rounds_would_have_changed_nothing(
    name: str, seed: int, every: int, costly: bool
) -> None:
    options = RoundOptions(
        objective="throughput", scheduler=name, defragment_every_rounds=every
    )  # its values do not depend on the time, unlike those of jct
    skipping = run_scenario(seed, options, wakeful=False, costly=costly)
    whole = run_scenario(seed, options, wakeful=True, costly=costly)
    assert skipping.segments == whole.segments
    assert (skipping.state, skipping.ended_s, skipping.stuck) == (
        whole.state,
        whole.ended_s,
        whole.stuck,
    )
    np.testing.assert_array_equal(skipping.end_s, whole.end_s)
    np.testing.assert_array_equal(skipping.first_start_s, whole.first_start_s)
    for row, other in zip(skipping.rounds, whole.rounds, strict=True):
        assert other.decided
        trivial = other.bound_is_trivial  # an undecided round proves nothing
        expected = replace(other, gap=0.0)
        assert replace(row, decided=True, gap=0.0, bound_is_trivial=trivial) == expected
        assert row.decided or row.gap >= other.gap  # restarts cost more near the end


def test_most_rounds_of_a_quiet_cluster_are_not_decided() -> None:
    result = run_scenario(1, RoundOptions(scheduler="fcfs"), wakeful=False, costly=True)
    decided_rounds = sum(row.decided for row in result.rounds)
    assert 0 < decided_rounds < len(result.rounds)


@pytest.mark.parametrize(
    ("every", "number", "until"), [(12, 5, 12), (12, 11, 12), (12, 12, 24), (1, 5, 6)]
)
def test_a_round_without_changes_is_valid_until_the_next_defragmentation(
    every: int, number: int, until: int
) -> None:
    policy = Policy(defragment_every_rounds=every)
    assert outcome_of_fcfs(a_snapshot_where_all_run(number), policy).stands_until == until


def test_rounds_without_a_published_scheduler_are_never_reused() -> None:
    one_count = replace(a_snapshot_where_all_run(5), estimates=Estimates.from_rows([an_estimate()]))
    outcome = plan_round(one_count, Policy(), make_solver("greedy"), FOREVER)
    assert outcome.decisions[0].kind is DecisionKind.KEEP
    assert outcome.stands_until == 0


NODES = some_nodes((0, 1, 4))

CELLS = [an_estimate(gpus=n, iter_time_s=1.0 / n) for n in (1, 2, 4)]

RUNS: dict[str, Any] = {"state": JobState.RUNNING, "cell": (0, 1, 1), "pinned": True}


def gang(node: int, *gpus: int) -> Gang:
    return Gang(members=((node, gpus),))


def a_snapshot_where_all_run(number: int) -> Snapshot:
    return a_snapshot(
        nodes=NODES,
        estimates=CELLS,
        jobs=[a_job("a", **RUNS)],
        gangs={0: gang(0, 0)},
        round_number=number,
    )


def outcome_of_fcfs(snapshot: Snapshot, policy: Policy) -> RoundOutcome:
    scheduler = Scheduler(published=make_scheduler("fcfs"))
    return plan_round(snapshot, policy, make_solver("greedy"), FOREVER, scheduler=scheduler)
