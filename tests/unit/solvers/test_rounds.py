"""Rounds as a function, rounds that start with the last one's prices, and when rounds are due."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.rounds.instances import churn_round, make_instance
from tessera.formulation.answer.codec import decode, encode
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.cell_cache import cached_cells
from tessera.formulation.state.cells import build_cells
from tessera.formulation.state.dominance import find_undominated
from tessera.formulation.state.last_round import Prices
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.exact.prices import known_prices
from tessera.solvers.goals import build_surrogate, solve_goals
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOptions, RoundOutcome, plan_round
from tessera.solvers.rounds.times import RoundTimes
from tests.support.builders import (
    a_job,
    a_node,
    a_random_problem,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    some_nodes,
    state_freely,
)
from tests.support.driver import reason_of
from tests.support.laws import examples

FOREVER = Budget(remaining_s=lambda: math.inf)


def a_fragmented_cluster() -> Snapshot:
    """Return three launched guaranteed jobs of 4 GPUs on three nodes, one of which was lost."""
    jobs = [
        a_job(name, state=JobState.RUNNING, cell=(0, 4, 1), guaranteed=True, weight=weight)
        for name, weight in (("light", 1.0), ("heavy", 3.0), ("middle", 2.0))
    ]
    nodes = [a_node("n0"), a_node("n1"), a_node("lost", schedulable=False)]
    gangs = {j: Gang(members=((j, (0, 1, 2, 3)),)) for j in range(3)}
    nodes = [n | {"gpus": 4} for n in nodes]
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=[an_estimate(gpus=4)], gangs=gangs)


def test_impossible_promises_are_waived_by_least_weight_with_a_reason() -> None:
    outcome = plan_round(a_fragmented_cluster(), Policy(), Portfolio(), FOREVER)
    assert outcome.violations == ()
    assert outcome.given_up == {0}
    kinds = [d.kind for d in outcome.decisions]
    assert kinds == [DecisionKind.SUSPEND, DecisionKind.KEEP, DecisionKind.MOVE]
    assert reason_of(outcome.decisions[0]).code is ReasonCode.PROMISE_GIVEN_UP


class OverdrawingSolver:
    """A solver whose solutions always exceed the cluster's capacity."""

    name = "wrong"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        choice = problem.job_start[1:] - 1
        objective = int(problem.value[choice].sum())
        return Solution(
            status=SolveStatus.OPTIMAL,
            choice=choice,
            objective=objective,
            bound=objective,
            solver="wrong",
        )


def test_an_invalid_answer_is_replaced_by_greedy() -> None:
    snapshot = a_random_snapshot(1, jobs=30)
    wrong, greedy = (
        plan_round(snapshot, Policy(), s, FOREVER) for s in (OverdrawingSolver(), Greedy())
    )
    assert wrong.violations == ()
    assert np.array_equal(wrong.solution.choice, greedy.solution.choice)
    assert wrong.solution.bound == greedy.solution.bound  # its bound is not used either


def test_phases_are_marked_in_order() -> None:
    seen: list[str] = []
    plan_round(a_random_snapshot(3, jobs=5), Policy(), Greedy(), FOREVER, seen.append)
    assert seen == ["build", "greedy", "solve", "place", "check"]


def test_a_second_round_on_the_outcome_of_the_first_changes_nothing() -> None:
    """Nothing changed, so nothing moves: the restart cost breaks ties."""
    snapshot = a_random_snapshot(4, jobs=25, restart_s=300.0)
    first = plan_round(snapshot, Policy(), Portfolio(), FOREVER)
    jobs = [snapshot.jobs.row(j) for j in range(25)]
    gangs = {}
    for d in first.decisions:
        if d.gang is not None:
            jobs[d.job] |= {
                "state": 3,
                "current_type": d.cell.gpu_type,
                "current_gpus": d.cell.gpus,
                "current_degree": d.cell.pipeline_degree,
            }
            gangs[d.job] = d.gang
    again = a_snapshot(nodes=some_nodes((0, 4, 4), (1, 2, 8)), jobs=jobs, estimates=[], gangs=gangs)
    again = replace(again, estimates=snapshot.estimates, workloads=snapshot.workloads)
    second = plan_round(again, Policy(defragment_every_rounds=1), Portfolio(), FOREVER)
    assert {d.kind for d in second.decisions} == {DecisionKind.KEEP, DecisionKind.WAIT}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("objective", {"objective": "fame"}),
        ("gap", {"gap": 1.0}),
        ("solve_limit", {"solve_limit_s": 0.0}),
    ],
)
def test_meaningless_options_are_refused_by_name(
    field: str, options: dict[str, float | str]
) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}"):
        RoundOptions(**options)  # type: ignore[arg-type]


SHORT = replace(FOREVER, work={"cp-sat": 0.1})


class HintRecordingSolver:
    """A solver that records the hints it receives and returns greedy's solution."""

    name = "listening"

    def __init__(self) -> None:
        self.hints: list[Solution] = []

    def solve(self, problem, budget, hint=None):  # type: ignore[no-untyped-def] # as Solver's
        self.hints.append(hint)
        return replace(Greedy().solve(problem, budget), solver=self.name)


def prices_of(outcome: RoundOutcome) -> Prices:
    rows = tuple(row.name for row in outcome.problem.rows)
    return Prices(name=rows, price=outcome.solution.prices / outcome.problem.scale)


def two_rounds(jobs: int, policy: Policy | None = None) -> tuple[RoundOutcome, Snapshot]:
    """Return a round, and the snapshot of the next one with its prices."""
    first = make_instance(jobs, jobs, 3, 5)
    outcome = plan_round(first, policy or Policy(), make_solver("pricing"), FOREVER)
    later = churn_round(first, outcome.problem, outcome.solution.choice, 0.02)
    return outcome, replace(later, prices=prices_of(outcome))


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan])
def test_invalid_prices_are_refused(wrong: float) -> None:
    with pytest.raises(InvalidInput, match=r"prices\.price"):
        replace(
            a_random_snapshot(1, jobs=1),
            prices=Prices(name=("gpus/a100",), price=np.array([wrong])),
        )


def test_prices_are_matched_by_row_name_and_scaled_to_the_problems_integers() -> None:
    problem = a_random_problem(2, jobs=4)
    known = known_prices(problem, Prices(name=("gone", "gpus/v100"), price=np.array([7.0, 0.5])))
    assert known.tolist() == [0.0, 0.5 * problem.scale]


def test_an_unchanged_round_is_decided_by_one_pass() -> None:
    snapshot = make_instance(600, 600, 3, 5)
    policy = Policy(promise_starts=False)
    cold = plan_round(snapshot, policy, make_solver("portfolio"), replace(SHORT, gap=1e-2))
    again = replace(snapshot, prices=prices_of(cold))
    warm = plan_round(again, policy, make_solver("portfolio"), replace(SHORT, gap=1e-2))
    assert dict(warm.solution.work)["pricing"] == 1
    assert warm.solution.gap <= 1e-2


@pytest.mark.parametrize("name", ["portfolio", "pricing", "greedy"])
def test_a_warm_round_repeats_from_its_snapshot_and_its_work(name: str) -> None:
    _, later = two_rounds(80)
    first = plan_round(later, Policy(), make_solver(name), SHORT)
    stored = decode(encode(later))
    assert isinstance(stored, Snapshot)
    recorded = replace(FOREVER, work=dict(first.solution.work))
    again = plan_round(stored, Policy(), make_solver(name), recorded)
    assert again.decisions == first.decisions
    assert again.solution.prices.tolist() == first.solution.prices.tolist()
    assert again.solution.bound == first.solution.bound


def test_an_earlier_rounds_prices_are_never_reported_as_this_rounds_prices() -> None:
    """Neither greedy nor a portfolio that ran out of time before it computed prices reports them."""
    _, later = two_rounds(40)
    spent = Budget(remaining_s=lambda: 0.0)
    for name in ("greedy", "portfolio", "pricing"):
        outcome = plan_round(later, Policy(), make_solver(name), spent)
        assert not len(outcome.solution.prices)


def recorded_hints(policy: Policy) -> tuple[list[Solution], list[float]]:
    """Return the hints that a solver receives for a statement, and the prices with which it starts."""
    statement = state_round(a_random_snapshot(3, jobs=6), policy)
    listening = HintRecordingSolver()
    greedy = Greedy().solve(build_surrogate(statement), FOREVER)
    known = np.arange(1.0, 1.0 + len(statement.problem.rows))
    solve_goals(statement, listening, FOREVER, greedy, known)
    return listening.hints, known.tolist()


def test_only_the_last_goal_starts_with_prices_and_rows_of_earlier_goals_start_at_zero() -> None:
    (only,), known = recorded_hints(Policy())
    assert only.prices.tolist() == known
    (*early, last), known = recorded_hints(Policy(objective="cost then throughput"))
    assert early
    assert not any(len(hint.prices) for hint in early)
    assert last.prices.tolist() == known + [0.0] * len(early)


def test_cells_are_cached_by_what_they_depend_on() -> None:
    snapshot = a_random_snapshot(6, jobs=4)
    copied = decode(encode(snapshot))
    assert isinstance(copied, Snapshot)
    first, best = cached_cells(snapshot)
    assert cached_cells(copied)[0] is first
    assert np.array_equal(best, find_undominated(build_cells(snapshot)))
    slower = replace(
        snapshot,
        estimates=replace(snapshot.estimates, iter_time_s=snapshot.estimates.iter_time_s * 2),
    )
    away = replace(
        snapshot, nodes=replace(snapshot.nodes, schedulable=snapshot.nodes.gpu_type == 0)
    )
    batch = replace(
        snapshot, workloads=tuple(replace(w, global_batch=1) for w in snapshot.workloads)
    )
    for other in (slower, away, batch):
        found, its_best = cached_cells(other)
        built = build_cells(other)
        assert found is not first
        assert found.equals(built)
        assert np.array_equal(its_best, find_undominated(built))


@pytest.mark.parametrize("seed", range(4))
def test_the_current_column_of_a_job_is_the_cell_it_runs_on(seed: int) -> None:
    snapshot = make_instance(60, 120, 3, seed, running=0.9)
    jobs = snapshot.jobs
    gone = replace(  # some jobs run on what no Cell describes
        snapshot,
        plans=("", "zero"),
        jobs=replace(
            jobs,
            current_plan=np.where(np.arange(60) % 7 == 0, 1, 0),
            current_degree=np.where(np.arange(60) % 5 == 0, 3, jobs.current_degree),
        ),
    )
    draft = first_draft(gone, Policy())
    for j in range(60):
        theirs = [
            k
            for k in range(len(draft.cells))
            if draft.cells.workload[k] == gone.jobs.workload[j]
            and draft.cells.gpu_type[k] == gone.jobs.current_type[j]
            and draft.cells.gpus[k] == gone.jobs.current_gpus[j]
            and draft.cells.pipeline_degree[k] == gone.jobs.current_degree[j]
            and draft.cells.plan[k] == gone.jobs.current_plan[j]
        ]
        now = int(draft.current[j])
        assert [int(draft.cell[now])] == theirs if theirs else now == -1
    assert np.any(draft.current >= 0)
    assert len(state_freely(gone, Policy()).problem.cell) == len(draft.cell)


def begin_due_rounds(times: RoundTimes, events_s: list[float], until_s: float) -> list[float]:
    """Return the times of the rounds until ``until_s``, if each begins when it is due."""
    begun, events, now_s = list[float](), sorted(events_s), 0.0
    while True:
        event_s = events[0] if events else math.inf
        now_s = max(now_s, min(event_s, times.due_s()))
        if now_s > until_s:
            return begun
        while events and events[0] <= now_s:
            times.ask(events.pop(0))
        if times.due_s() <= now_s:
            times.begin(now_s)
            begun.append(now_s)


def test_a_round_for_an_event_restarts_the_period() -> None:
    times = RoundTimes(spacing_s=3.0, period_s=20.0)
    assert begin_due_rounds(times, [15.0], 60.0) == [0.0, 15.0, 35.0, 55.0]


def test_a_round_does_not_answer_an_event_that_is_yet_to_come() -> None:
    times = RoundTimes(spacing_s=3.0)
    times.ask(60.0)
    assert not times.begin(5.0)
    assert times.due_s() == 60.0
    times.ask(6.0)
    assert times.due_s() == 8.0
    assert times.begin(8.0)


def test_a_round_that_promises_need_does_not_wait_for_the_gap() -> None:
    times = RoundTimes(spacing_s=300.0)
    times.begin(0.0)
    times.ask(10.0)
    times.need(20.0)
    assert times.due_s() == 20.0
    assert times.begin(20.0)
    assert times.due_s() == math.inf
    times.need(30.0)
    times.need(math.inf)  # the schedule has changed
    assert times.due_s() == math.inf


def test_a_planned_start_that_moves_again_and_again_has_a_round_in_each_spacing() -> None:
    times, begun_s, now_s = RoundTimes(spacing_s=30.0), list[float](), 0.0
    while now_s < 100.0:
        times.begin(now_s)
        begun_s.append(now_s)
        times.expect(now_s + 0.5)  # the job before it hangs half a second before its end
        now_s = times.due_s()
    assert begun_s == [0.0, 0.5, 30.5, 60.5, 90.5]


def test_an_event_that_is_known_to_come_counts_without_being_asked_for() -> None:
    times = RoundTimes(spacing_s=3.0)
    times.begin(0.0)
    assert (times.due_s(1.0), times.due_s(7.0), times.due_s()) == (3.0, 7.0, math.inf)


def test_somebody_elses_round_restarts_the_period_and_answers_no_event() -> None:
    times = RoundTimes(spacing_s=3.0, period_s=20.0)
    times.begin(0.0)
    times.restart_period(15.0)
    assert times.due_s() == 35.0
    times.ask(16.0)
    times.restart_period(17.0)
    assert times.due_s() == 16.0
    times.drop()
    assert times.due_s() == 37.0


@given(
    st.lists(st.floats(0.0, 200.0), max_size=40),
    st.floats(0.1, 30.0),
    st.just(math.inf) | st.floats(1.0, 60.0),
)
@examples(60)
def test_rounds_are_spaced_and_no_event_waits_longer_than_the_gap(
    events_s: list[float], spacing_s: float, period_s: float
) -> None:
    begun = begin_due_rounds(RoundTimes(spacing_s, period_s), events_s, 300.0)
    for before_s, after_s in pairwise(begun):
        assert after_s - before_s >= min(spacing_s, period_s) - 1e-9
        assert after_s - before_s <= period_s + 1e-9
    for event_s in events_s:
        assert any(event_s <= at_s <= event_s + spacing_s + 1e-9 for at_s in begun)
