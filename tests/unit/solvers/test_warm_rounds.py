"""Rounds that start with the last round's prices: as good, repeatable, and never trusted unchecked."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.benchmarks.rounds.instances import churn_round, make_instance
from tessera.formulation.cell_cache import cached_cells
from tessera.formulation.cells import build_cells
from tessera.formulation.codec import decode, digest, encode
from tessera.formulation.columns import first_draft
from tessera.formulation.dominance import find_undominated
from tessera.formulation.errors import InvalidInput
from tessera.formulation.last_round import NO_PRICES, Prices
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.formulation.statement import build_problem, state_round
from tessera.solvers.base import Budget
from tessera.solvers.goals import build_surrogate, solve_goals
from tessera.solvers.greedy import Greedy
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.prices import known_prices, price_problem
from tessera.solvers.pricing import Pricing
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_random_problem, a_random_snapshot

FOREVER = Budget(remaining_s=lambda: math.inf)
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


def test_a_snapshot_with_prices_reads_back_and_one_without_gets_none() -> None:
    snapshot = replace(
        a_random_snapshot(1, jobs=3), prices=Prices(name=("gpus/a100",), price=np.array([0.1]))
    )
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.prices.equals(snapshot.prices)
    older = json.loads(encode(snapshot))
    del older["body"]["prices"]
    read = decode(json.dumps(older).encode())
    assert isinstance(read, Snapshot)
    assert read.prices.equals(NO_PRICES)
    assert digest(read) != digest(snapshot)


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


def test_a_warm_round_is_as_good_as_a_cold_one_and_needs_fewer_passes() -> None:
    _, later = two_rounds(600)
    cold = plan_round(replace(later, prices=NO_PRICES), Policy(), make_solver("pricing"), FOREVER)
    warm = plan_round(later, Policy(), make_solver("pricing"), FOREVER)
    assert warm.violations == cold.violations == ()
    assert warm.solution.gap <= max(2 * cold.solution.gap, 1e-3)
    assert warm.solution.bound >= cold.solution.objective
    assert dict(warm.solution.work)["pricing"] < dict(cold.solution.work)["pricing"]


def test_an_unchanged_round_is_decided_by_one_pass() -> None:
    snapshot = make_instance(600, 600, 3, 5)
    cold = plan_round(snapshot, Policy(), make_solver("portfolio"), replace(SHORT, gap=1e-2))
    again = replace(snapshot, prices=prices_of(cold))
    warm = plan_round(again, Policy(), make_solver("portfolio"), replace(SHORT, gap=1e-2))
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


def test_a_portfolio_passes_known_prices_to_its_second_stage() -> None:
    problem = a_random_problem(5, jobs=30)
    prices = Pricing().solve(problem, FOREVER).prices
    hint = replace(Greedy().solve(problem, FOREVER), prices=prices)
    listening = HintRecordingSolver()
    Portfolio([Greedy(), listening]).solve(problem, replace(FOREVER, gap=0.0), hint)
    assert listening.hints[0].prices.tolist() == prices.tolist()
    assert price_problem(problem, prices).bound >= listening.hints[0].objective


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
    assert len(build_problem(gone, Policy()).cell) == len(draft.cell)
