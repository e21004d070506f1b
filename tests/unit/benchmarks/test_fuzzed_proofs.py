"""The fuzzer's small families, its judgement of certificates, and its CP-SAT that lies."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tessera.benchmarks.rounds.bench_fuzz import answer_faults
from tessera.benchmarks.rounds.fuzzed_families import SMALL_FAMILIES, draw_small_family
from tessera.benchmarks.rounds.fuzzed_lies import LIES, LyingCpSat, believes_lie
from tessera.benchmarks.rounds.fuzzed_proofs import ProofVerdict, judge_proof
from tessera.benchmarks.rounds.fuzzed_tally import FuzzTally, checkable_share, unchecked_rows
from tessera.formulation.check import find_violations
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.solvers.answers import make_solution, objective_of
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.prices import certificate_of_prices
from tessera.solvers.registry import make_solver
from tests.support.problems import a_problem, brute_force

ALWAYS = Budget(remaining_s=lambda: math.inf, gap=0.0)
OPTIMUM = 9
"""The optimum of ``a_full_cluster``: its first job and its third."""


def a_full_cluster() -> Problem:
    """Return three jobs on six GPUs, of which two fit. At a price of 1, the bound is 9."""
    return a_problem([[(5, {0: 3})], [(3, {0: 3})], [(4, {0: 3})]], [6])


def an_answer(
    problem: Problem, *, bound: float = OPTIMUM, price: float | None = 1.0, proved_by: str = ""
) -> Solution:
    """Return the optimum of ``a_full_cluster``, with a certificate of ``price``."""
    solution = make_solution(problem, np.array([0, -1, 2]), bound=bound, solver="me")
    certificate = None if price is None else certificate_of_prices(problem, np.array([price]))
    return replace(solution, certificate=certificate, proved_by=proved_by)


# small rounds of the named families


@pytest.mark.full
@pytest.mark.parametrize("kind", SMALL_FAMILIES)
def test_an_exact_solver_and_ours_agree_on_small_families(kind: str) -> None:
    for seed in range(3):
        problem = draw_small_family(np.random.default_rng([seed, 2]), kind)
        exact = make_solver("cbc").solve(problem, replace(ALWAYS, gap=0.0))
        if exact.status is SolveStatus.OPTIMAL:
            ours = make_solver().solve(problem, replace(ALWAYS, gap=1e-3))
            assert answer_faults(problem, ours, exact.objective) == []


# what counts as a bound that anyone can check


def test_a_certificate_of_the_claimed_bound_is_checked() -> None:
    problem = a_full_cluster()

    assert judge_proof(problem, an_answer(problem)) is ProofVerdict.CHECKED


def test_a_certificate_of_a_worse_bound_than_the_claimed_one_is_refused() -> None:
    problem = a_full_cluster()
    worse = an_answer(problem, price=0.5)

    assert worse.certificate is not None
    assert worse.certificate.bound > OPTIMUM
    assert judge_proof(problem, worse) is ProofVerdict.REFUSED


def test_a_certificate_that_claims_more_than_it_proves_is_refused() -> None:
    problem = a_full_cluster()
    honest = an_answer(problem, price=0.5)
    assert honest.certificate is not None
    boastful = replace(honest, certificate=replace(honest.certificate, bound=OPTIMUM))

    assert judge_proof(problem, boastful) is ProofVerdict.REFUSED


def test_a_certificate_of_another_problem_is_refused() -> None:
    problem, other = a_full_cluster(), a_problem([[(5, {0: 3})]] * 3, [6])
    foreign = replace(an_answer(problem), certificate=certificate_of_prices(other, np.array([1.0])))

    assert judge_proof(a_problem([[(9, {0: 3})]] * 3, [6]), foreign) is ProofVerdict.REFUSED


def test_a_bound_without_a_certificate_counts_by_what_proved_it() -> None:
    problem, tally = a_full_cluster(), FuzzTally()
    tally.judge_proof(problem, 0, an_answer(problem))
    for proved_by in ("cp-sat", "cp-sat", ""):
        tally.judge_proof(problem, 1, an_answer(problem, price=None, proved_by=proved_by))

    assert checkable_share(tally.count) == {"checkable_share": 0.25}
    assert unchecked_rows(tally.count) == [
        {"what": "bound by cp-sat", "count": 2},
        {"what": "bound by nothing that is named", "count": 1},
    ]
    assert not tally.faulty


def test_a_refused_certificate_is_a_fault() -> None:
    problem, tally = a_full_cluster(), FuzzTally()
    tally.judge_proof(problem, 7, an_answer(problem, price=0.5))

    assert [row["fault"] for row in tally.faulty] == ["refused_certificates"]
    assert checkable_share(tally.count) == {"checkable_share": 0.0}


def test_a_trivial_bound_claims_nothing_unless_it_is_reached() -> None:
    problem = a_full_cluster()
    roomy = a_problem([[(5, {0: 3})], [(3, {0: 3})]], [6])
    everything = make_solution(roomy, np.array([0, 1]), bound=8, solver="me")

    assert judge_proof(problem, an_answer(problem, bound=12, price=None)) is ProofVerdict.NO_CLAIM
    assert judge_proof(roomy, everything) is ProofVerdict.WITHOUT
    assert checkable_share(Counter({ProofVerdict.NO_CLAIM: 3})) == {}


# a CP-SAT that lies


def a_lie(lie: str, problem: Problem, seed: int = 0) -> Solution:
    """Return the result of a CP-SAT that lies, asked with an answer that runs the first job."""
    liar = LyingCpSat(lie, np.random.default_rng(seed))
    hint = make_solution(problem, np.array([0, -1, -1]), bound=13, solver="hint")
    return liar.solve(problem, ALWAYS, hint)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_that_is_passed_on_without_a_label_is_detected(lie: str) -> None:
    detected = 0
    for seed in range(30):
        jobs = [[(5, {0: 4})], [(4, {0: 3})], [(4, {0: 3})]]
        for asked in (a_problem(jobs, [6]), a_problem(jobs, [6], must_run=[0])):
            claimed = replace(a_lie(lie, asked, seed), proved_by="")
            detected += believes_lie(asked, claimed, brute_force(asked))

    assert detected > 0


def test_a_false_bound_may_be_labelled_but_a_wrong_answer_may_not() -> None:
    problem = a_full_cluster()
    low = replace(an_answer(problem, price=None), choice=np.array([0, -1, -1]), objective=5)
    labelled = replace(low, bound=5.0, proved_by="cp-sat")

    assert not believes_lie(problem, labelled, OPTIMUM)
    assert believes_lie(problem, replace(labelled, proved_by="prices"), OPTIMUM)
    weaker = certificate_of_prices(problem, np.array([1.0]))
    assert not believes_lie(problem, replace(labelled, certificate=weaker), OPTIMUM)
    certified = replace(labelled, certificate=replace(weaker, bound=5))
    assert believes_lie(problem, certified, OPTIMUM)
    assert believes_lie(problem, replace(labelled, objective=6), OPTIMUM)
    assert believes_lie(problem, replace(labelled, bound=4.0), OPTIMUM)
    assert believes_lie(problem, replace(labelled, choice=np.array([0, 1, 2])), OPTIMUM)


def test_infeasibility_where_there_is_an_answer_must_be_labelled() -> None:
    problem = a_full_cluster()
    claim = replace(
        an_answer(problem, price=None), status=SolveStatus.INFEASIBLE, choice=np.full(3, -1)
    )

    assert believes_lie(problem, claim, OPTIMUM)
    assert not believes_lie(problem, replace(claim, proved_by="cp-sat"), OPTIMUM)
    assert not believes_lie(problem, claim, None)


def test_an_answer_to_a_problem_without_one_is_a_lie() -> None:
    problem = a_full_cluster()

    assert believes_lie(problem, an_answer(problem), None)
    assert not believes_lie(problem, an_answer(problem), OPTIMUM)
    assert not believes_lie(problem, an_answer(problem), math.nan)


@pytest.mark.parametrize("lie", LIES)
def test_the_portfolio_never_returns_an_answer_of_a_liar_that_breaks_a_rule(lie: str) -> None:
    for seed in range(25):
        problem = draw_small_family(np.random.default_rng([seed, 5]), "small values")
        liar = LyingCpSat(lie, np.random.default_rng(seed))
        result = Portfolio((Greedy(), liar)).solve(problem, ALWAYS)
        if result.has_answer:
            assert result.objective == objective_of(problem, result.choice)
            assert not find_violations(problem, replace(result, bound=math.inf))
