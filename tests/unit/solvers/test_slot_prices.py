"""Prices on slots: large and degenerate rounds, groups of jobs, and the check of every answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.benchmarks.deadlines.large_rounds import draw_deadlines
from tessera.formulation.answer.lookahead_check import find_schedule_violations
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.lookahead import Lookahead, look_ahead, picks_of
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.lookahead import ADMISSION, admit, exact, market
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.lookahead.firstfit import SlotSchedules, fit_in, keep_promised_schedules
from tessera.solvers.lookahead.market import open_market, weight_unit, work_to_train
from tessera.solvers.lookahead.pricefit import fit_at_prices, round_down
from tessera.solvers.lookahead.search import MAX_PAIRS
from tessera.solvers.lookahead.validity import is_valid, require_valid
from tests.support.dated_jobs import a_cluster, a_dated_job

AHEAD = Policy(deadlines="look-ahead")
PLANNED = Policy(deadlines="planned")
ENDLESS = Budget(remaining_s=lambda: math.inf)


def look_ahead_of(snapshot: Snapshot, policy: Policy = AHEAD) -> Lookahead:
    return look_ahead(*drafts_before_deadlines(snapshot, policy))


def weight_of(snapshot: Snapshot, admission: Admission) -> float:
    return float(snapshot.jobs.weight[admission.admitted].sum())


@pytest.mark.full
@pytest.mark.parametrize("policy", [AHEAD, PLANNED])
def test_ten_thousand_deadlines_are_decided_with_a_bound_and_a_valid_schedule(
    policy: Policy,
) -> None:
    snapshot = draw_deadlines(10_000, seed=1)
    admission = admit(snapshot, policy, ENDLESS)
    weight = weight_of(snapshot, admission)
    assert 0.9 * admission.bound < weight <= admission.bound
    assert admission.work == 0.0  # too many pairs for CP-SAT, but no reason to give up the prices
    used = np.zeros(len(snapshot.gpu_types), dtype=np.int64)
    now = admission.schedule_segments.start_s <= snapshot.now_s
    np.add.at(
        used, admission.schedule_segments.gpu_type[now], admission.schedule_segments.gpus[now]
    )
    assert np.all(used <= snapshot.schedulable_gpus())


def test_jobs_that_buy_at_prices_are_more_than_those_of_first_fits() -> None:
    ahead = look_ahead_of(draw_deadlines(2000, seed=3))
    first = SlotSchedules(ahead)
    fit_in(first, np.argsort(ahead.deadline_s, kind="stable"))
    priced = fit_at_prices(ahead, first)
    assert priced.room.weight() > 1.05 * first.weight()
    assert priced.bound >= priced.room.weight()


def test_jobs_without_weight_count_neither_in_the_bound_nor_against_others() -> None:
    jobs = [a_dated_job(f"j{i}", 1200, 600, weight=0.0) for i in range(3)]
    alone = admit(a_cluster(*jobs), AHEAD, ENDLESS)
    assert (alone.bound, alone.proven) == (0.0, True)
    admission = admit(a_cluster(*jobs, a_dated_job("heavy", 2400, 600)), AHEAD, ENDLESS)
    assert admission.admitted.tolist() == [False, False, False, True]
    assert (admission.bound, admission.proven) == (1.0, True)


def test_a_deadline_beyond_the_horizon_is_in_the_bound_without_promises() -> None:
    far_s = 40_000 * 300.0
    jobs = [a_dated_job(f"j{i}", 3.9 * far_s, far_s) for i in range(2)]
    admission = admit(a_cluster(*jobs), PLANNED, ENDLESS)
    assert admission.admitted.sum() == 1
    assert admission.bound >= 1.0


def test_a_job_is_in_the_search_only_if_a_better_answer_may_admit_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[np.ndarray] = []

    def remember(whole: Any, *_: Any) -> exact.AdmissionResult:
        searched.append(np.unique(whole.ahead.owner[whole.allowed.any(axis=1)]))
        return exact.AdmissionResult(picks=None, admitted=None, proven=False, repeatable=True)

    monkeypatch.setattr(exact, "solve_admission", remember)
    # The last job needs the whole cluster up to its deadline, for a hundredth of the weight.
    jobs = [a_dated_job(f"j{i}", 700 + 50 * i, 500 + 60 * i, weight=3.0 + i) for i in range(7)]
    admit(a_cluster(*jobs, a_dated_job("dear", 3000, 800, weight=0.03)), AHEAD, ENDLESS)
    assert len(searched) == 1
    assert 7 not in searched[0]
    assert len(searched[0]) > 1


def test_more_pairs_than_cp_sat_can_take_leave_the_answer_at_prices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> exact.AdmissionResult:
        raise LookupError

    monkeypatch.setattr(exact, "solve_admission", never)
    snapshot = draw_deadlines(1000, seed=4)
    ahead = look_ahead_of(snapshot)
    assert len(ahead.cell) * ahead.slots > MAX_PAIRS
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert not admission.proven
    assert 0.9 * admission.bound < weight_of(snapshot, admission) <= admission.bound


def test_an_answer_of_cp_sat_that_breaks_a_rule_is_dropped_with_its_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lie(whole: Any, _budget: Budget, _limit: float, hint: Any) -> exact.AdmissionResult:
        return exact.AdmissionResult(
            picks=hint[0], admitted=np.ones_like(hint[1]), proven=True, repeatable=True
        )

    monkeypatch.setattr(exact, "solve_admission", lie)
    snapshot = a_cluster(*(a_dated_job(f"j{i}", 700 + 50 * i, 500 + 60 * i) for i in range(7)))
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert not admission.admitted.all()
    assert not admission.proven
    assert find_schedule_violations(snapshot, admission.schedule_segments, admission.admitted) == []


def test_schedules_that_break_a_rule_are_found() -> None:
    ahead = look_ahead_of(a_cluster(a_dated_job("a", 1200, 600), a_dated_job("b", 1200, 600)))
    both, one = np.array([True, True]), np.array([True, False])
    four = {j: next(o for o in ahead.options_of(j) if ahead.rate[o] == 4.0) for j in (0, 1)}
    good = np.full((2, ahead.slots), -1)
    good[0, 0], good[1, 1] = four[0], four[1]
    assert is_valid(ahead, good, both)
    assert not is_valid(ahead, good, one)  # b has a schedule, and was not admitted
    late, full, foreign = good.copy(), good.copy(), good.copy()
    late[1, 1], late[1, 2] = -1, four[1]
    full[1] = [four[1], *[-1] * (ahead.slots - 1)]
    foreign[1, 1] = four[0]
    for wrong in (late, full, foreign):
        assert not is_valid(ahead, wrong, both)
        with pytest.raises(SolverFailed):
            require_valid(ahead, wrong, both)


def test_only_jobs_with_equal_options_form_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [a_dated_job(f"j{i}", 100.0, 900, max_gpus=(i % 2 + 1)) for i in range(6)]
    ahead = look_ahead_of(a_cluster(*jobs))
    nobody = np.zeros(6, dtype=np.bool_)

    def groups() -> list[int]:
        opened = open_market(ahead, ~nobody, nobody, work_to_train(ahead), whole=True)
        return [int(jobs) for jobs in np.diff(opened.slots.job_start)]

    assert groups() == [3, 3]
    # If digests of different options were equal, jobs would be alone, and not in a wrong group.
    monkeypatch.setattr(
        market, "_digests", lambda _text, start, _count: np.zeros(len(start), np.uint64)
    )
    assert groups() == [3, 1, 1, 1]


def test_bounds_are_rounded_down_only_where_weights_have_a_common_unit() -> None:
    assert weight_unit(np.array([1.5, 3.0, 4.5])) == 1.5
    assert weight_unit(np.array([0.1, 0.3])) == 0.0
    assert weight_unit(np.zeros(0)) == 0.0
    assert weight_unit(np.zeros(2)) == 0.0
    assert round_down(7.99, np.array([1.0, 2.0])) == 7.0
    assert round_down(7.99, np.array([1.5, 3.0])) == 7.5
    assert round_down(7.99, np.array([0.1])) == 7.99


NO_SEARCH = Budget(remaining_s=lambda: math.inf, work={ADMISSION: 0.0})


def test_a_round_with_as_many_promises_as_jobs_keeps_all_of_them() -> None:
    snapshot = draw_deadlines(400, seed=6)
    before = admit(snapshot, AHEAD, NO_SEARCH)
    jobs = replace(snapshot.jobs, admitted=np.array(before.admitted))
    again = replace(snapshot, jobs=jobs, schedule_segments=before.schedule_segments)
    ahead = look_ahead_of(again)
    kept = keep_promised_schedules(ahead, picks_of(ahead, again.schedule_segments))
    assert kept.placed.tolist() == ahead.promised.tolist()
    after = admit(again, AHEAD, NO_SEARCH)
    assert after.given_up == frozenset()
    assert np.all(after.admitted[before.admitted])
