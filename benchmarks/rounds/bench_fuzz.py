"""A fuzz test of a solver on random problems, lexicographic goals and unusual rounds."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.rounds.families import NAMED_FAMILIES, draw_family
from tessera.benchmarks.rounds.fuzzed_budgets import budget_of, draw_gap, draw_work
from tessera.benchmarks.rounds.fuzzed_goals import (
    draw_statement,
    every_answer,
    goal_faults,
    same_answer,
)
from tessera.benchmarks.rounds.fuzzed_lies import LIES, LyingCpSat, believes_lie
from tessera.benchmarks.rounds.fuzzed_rounds import draw_round
from tessera.benchmarks.rounds.fuzzed_tally import (
    COUNTS,
    FAULTS,
    FuzzTally,
    checkable_share,
    unchecked_rows,
)
from tessera.benchmarks.rounds.fuzzing import TooLarge, draw_prices, draw_problem, dynamic_optimum
from tessera.benchmarks.rounds.instances import FAMILIES, make_instance
from tessera.formulation.check import find_violations
from tessera.formulation.policy import LOOK_AHEAD_MODES, Policy
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.statement import Statement, build_problem, state_round
from tessera.simulator.figures import Report
from tessera.simulator.sweeps.runner import ResultsFolder, Workers, run_tasks
from tessera.simulator.sweeps.tasks import Task
from tessera.solvers.answers import is_answer, objective_of, trivial_bound
from tessera.solvers.base import Budget, Solver
from tessera.solvers.goals import build_surrogate, solve_goals
from tessera.solvers.greedy import Greedy
from tessera.solvers.lookahead import admit
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.pricing import Pricing
from tessera.solvers.registry import DEFAULT
from tessera.solvers.registry import make_solver as make_solver
from tessera.solvers.rounds.passes import PASSES_KEY
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.rounds.promises import keep_promises
from tessera.solvers.rounds.work import RoundWork

logger = logging.getLogger(__name__)

SHORT_S: Final = (0.005, 0.01, 0.02, 0.05)
"""Seconds of the budgets from which there must be an answer, for up to 300 jobs."""
LONG_S: Final = 10.0
"""Seconds of the budget of a problem that is to be solved."""
INTERRUPTED_SHARE: Final = 0.2
"""The share of the problems whose budget ends immediately or within two milliseconds."""
SMALL_ROUND_JOBS: Final = 300
LARGE_SHARE: Final = 0.2
"""The share of the short rounds that have more jobs, and as much time as greedy takes."""
NAMED_SHARE: Final = 0.3
"""The share of the short rounds that are of a named family."""
DATALESS_FAMILIES: Final = tuple(name for name in NAMED_FAMILIES if name != "arena")
"""The named families that need no published data."""
CASES_PER_TASK: Final = 250
"""The number of cases that one process runs before it reports."""
GOALS_SHARE: Final = 0.3
"""The share of the cases that are lexicographic goals on a random problem."""
ROUNDS_SHARE: Final = 0.15
"""The share of the cases that are whole rounds."""
REPEATED_SHARE: Final = 0.25
"""The share of the lexicographic goals that are solved again with the work that was recorded."""

LIES_SHARE: Final = 0.05
"""The share of the cases in which CP-SAT is replaced by one that lies."""
JUDGED_CASES: Final = 1_000
"""The number of cases from which the share of checkable certificates is judged."""
TIMED_COLUMNS: Final = 30
"""The number of columns from which a statement gets a limit of wall seconds."""


@register_case(
    "fuzz",
    smoke={"cases": 200, "short": 6, "workers": 0},
    checkable_share=(">=", 0.93),
    **{name: ("==", 0) for name in FAULTS},
)
def fuzz_solvers(
    cases: Annotated[
        int, typer.Option(help="Number of random problems, goals in order and rounds.")
    ] = 2_000,
    short: Annotated[
        int, typer.Option(help="Number of rounds that are given 5 to 50 ms, or greedy's time.")
    ] = 100,
    solver: Annotated[str, typer.Option(help="Solver to test.")] = DEFAULT,
    first: Annotated[int, typer.Option(help="Number of the first case, to repeat one.")] = 0,
    seed: int = 0,
    workers: Workers = None,
    results: ResultsFolder = None,
) -> Report:
    """Solve random problems, goals in order and rounds, and compare the answers with the optimum.

    The problems include degenerate, empty, infeasible, huge and tiny ones, and small rounds of the
    named families. Their optimum comes from
    a dynamic program over the usage, or from CP-SAT if that would be too large; ``unjudged`` counts
    those that neither solves. Each is solved with a gap of 0 or of 1e-9 to 1e-2. The hint is
    absent, a greedy answer or nonsense, with any prices. Half have some record of work, which names
    solvers with amounts of 0, tiny and large ones; a fifth has next to no time. Three in ten cases
    are up to four goals in order (sums and levels, with and without tolerances), judged by listing
    every answer. A quarter of these is solved again with the recorded work. Three in twenty are
    whole rounds, with objectives of up to three stages, promises and limits. In one case in twenty, a
    portfolio asks a CP-SAT that lies: wrong bounds, answers that break rules, false proofs.

    ``checkable_share`` is the share of the problems' answers, optimal or with a bound below the
    trivial one, whose certificate both the independent script and our checker accept, and which
    proves exactly that bound. The table counts the others by what proved them. Of 20 bounds, one may
    be the word of a solver. ``refused_certificates`` counts certificates that are not accepted.
    ``believed_lies`` counts lies that the portfolio passes on: an answer that breaks a rule or is
    not worth what it claims, or a false bound or proof that is not labelled as CP-SAT's word.

    ``find_violations`` counts those that the checker finds, and answers that take more from a goal than
    its tolerance. ``wrong_bounds`` are bounds below the optimum, or objectives above it.
    ``wrong_proofs`` are answers that are called optimal, or have a gap of 0, but are not optimal,
    and "infeasible" where there is an answer. ``crashes`` counts everything that was raised.
    ``not_repeated`` counts answers that the same record of work does not give again.
    ``below_greedy`` counts answers that are worse than greedy's, including rounds of up to 300 jobs
    that are given 5 to 50 ms, or of up to 3,000 that are given the time of greedy. Three in ten of
    these are of named families.
    ``worst_overrun_s`` is the longest time by which one of these exceeded its limit. The table
    lists each faulty case; ``--first NUMBER --cases 1 --short 0`` runs it again.
    """
    options = {"solver": solver, "seed": seed}
    tasks = [
        Task(
            name=f"{what} {begin} to {end - 1}",
            function=f"tessera.benchmarks.rounds.bench_fuzz:{function}",
            options={**options, "first": begin, "count": end - begin},
        )
        for what, function, count in (
            ("cases", "judge_cases", cases),
            ("short rounds", "hurry_rounds", short),
        )
        for begin, end in _spans(first, first + count)
    ]
    result = list(run_tasks(tasks, folder=results, workers=workers).values())
    tally = sum((Counter(part["tally"]) for part in result), Counter[str]())
    return Report(
        seed=seed,
        figures={
            "cases": cases,
            "short": short,
            **{name: tally[name] for name in (*FAULTS, *COUNTS)},
            **checkable_share(tally),
            "worst_overrun_s": max((part["overrun_s"] for part in result), default=0.0),
        },
        table=[fault for part in result for fault in part["faulty"]] + unchecked_rows(tally),
        waived=frozenset()
        if solver == DEFAULT and cases >= JUDGED_CASES
        else frozenset({"checkable_share"}),
    )


def _spans(begin: int, end: int) -> list[tuple[int, int]]:
    return [(k, min(end, k + CASES_PER_TASK)) for k in range(begin, end, CASES_PER_TASK)]


def judge_cases(*, first: int, count: int, solver: str, seed: int) -> dict[str, Any]:
    """Judge ``count`` cases from ``first`` on: problems, lexicographic goals and rounds."""
    by, tally = make_solver(solver), FuzzTally()
    for k in range(first, first + count):
        rng = np.random.default_rng([seed, k])
        kind = rng.random()
        try:
            if kind < GOALS_SHARE:
                _judge_goals(draw_statement(rng), by, rng, tally, k)
            elif kind < GOALS_SHARE + ROUNDS_SHARE:
                _judge_round(by, rng, tally, k)
            elif kind < GOALS_SHARE + ROUNDS_SHARE + LIES_SHARE:
                _judge_lie(draw_problem(rng), rng, tally, k)
            else:
                _judge(draw_problem(rng), by, rng, tally, k)
        except Exception:
            logger.exception(
                "a case crashed", extra={"event": "case_crashed", "case": k, "solver": by.name}
            )
            tally.report("case", k, ["crashes"])
    return tally.result()


def hurry_rounds(*, first: int, count: int, solver: str, seed: int) -> dict[str, Any]:
    """Judge the short rounds ``first`` to ``first + count - 1``."""
    by, tally, overrun_s = make_solver(solver), FuzzTally(), 0.0
    for k in range(first, first + count):
        rng = np.random.default_rng([seed, k, 1])
        overrun_s = max(overrun_s, _hurry(by, rng, tally, k))
    return tally.result(overrun_s)


def _judge_goals(
    statement: Statement, by: Solver, rng: np.random.Generator, tally: FuzzTally, k: int
) -> None:
    """Solve lexicographic goals, and count the faults of the answer."""
    columns = len(statement.problem.cell)
    ends = columns > TIMED_COLUMNS or rng.random() < INTERRUPTED_SHARE
    limit_s = LONG_S if columns > TIMED_COLUMNS else float(rng.uniform(0, 0.003))
    budget = budget_of(
        limit_s if ends else math.inf, gap=draw_gap(rng), seed=k, work=draw_work(rng, calls=True)
    )
    greedy = make_solver("greedy").solve(build_surrogate(statement), budget)
    solved = solve_goals(statement, by, budget, greedy)
    tally.count[str(solved.solution.status)] += 1
    tally.report("goals", k, goal_faults(statement, solved, greedy, _all(statement, tally)))
    if not ends and rng.random() < REPEATED_SHARE:
        work = dict(solved.solution.work)
        again = budget_of(math.inf, gap=budget.gap, seed=k, work=work)
        if not same_answer(solved, solve_goals(statement, by, again, greedy)):
            tally.report("goals", k, ["not_repeated"])


def _all(statement: Statement, tally: FuzzTally) -> Any:
    """Return every answer of the statement. If there are too many, count that and return None."""
    try:
        return every_answer(statement.problem)
    except TooLarge:
        tally.count["unjudged"] += 1
        return None


def _judge_round(by: Solver, rng: np.random.Generator, tally: FuzzTally, k: int) -> None:
    """Decide a whole round, and judge the answer to its goals before it is placed."""
    snapshot, policy = draw_round(rng)
    ends = rng.random() < INTERRUPTED_SHARE
    work = draw_work(rng, calls=True)

    def budget() -> Budget:
        return budget_of(LONG_S if ends else math.inf, gap=gap, seed=k, work=work)

    gap = draw_gap(rng)
    looks_ahead = policy.deadline_mode in LOOK_AHEAD_MODES
    admission = admit(snapshot, policy, budget()) if looks_ahead else None
    statement = state_round(snapshot, policy, admission)
    kept = keep_promises(RoundWork.begin(snapshot, policy, budget(), statement, admission))
    statement, greedy = kept.statement, kept.greedy
    solved = solve_goals(statement, by, budget(), greedy)
    tally.count[str(solved.solution.status)] += 1
    faults = goal_faults(statement, solved, greedy, _all(statement, tally))
    outcome = plan_round(snapshot, policy, by, budget())
    faults += ["violations"] if outcome.violations else []
    again = any(name == PASSES_KEY for name, _ in outcome.solution.work)  # with packing rows
    if not ends and not again and repr(outcome.goals) != repr(solved.results):
        faults.append("not_repeated")
    tally.report("round", k, faults)


def _judge(
    problem: Problem, by: Solver, rng: np.random.Generator, tally: FuzzTally, k: int
) -> None:
    """Solve one problem, and count the faults of the answer."""
    limit_s = max(0.0, rng.uniform(-0.001, 0.002)) if rng.random() < INTERRUPTED_SHARE else LONG_S
    hint = _hint(problem, rng)
    budget = budget_of(limit_s, gap=draw_gap(rng), seed=k, work=draw_work(rng))
    result = by.solve(problem, budget, hint)
    tally.count[str(result.status)] += 1
    tally.report("problem", k, answer_faults(problem, result, _best(problem, tally)))
    tally.judge_proof(problem, k, result)


def _judge_lie(problem: Problem, rng: np.random.Generator, tally: FuzzTally, k: int) -> None:
    """Solve one problem by a portfolio whose CP-SAT lies, and count what it believes.

    Prices prove most answers before CP-SAT is asked, so half of the portfolios have none.
    """
    lie, priced = str(rng.choice(LIES)), rng.random() < 0.5
    stages = (Greedy(), Pricing()) if priced else (Greedy(),)
    asked = Portfolio((*stages, LyingCpSat(lie, rng)))
    result = asked.solve(problem, budget_of(LONG_S, gap=0.0, seed=k, work={}))
    tally.report(
        f"lie: {lie}",
        k,
        ["believed_lies"] * believes_lie(problem, result, _best(problem, tally)),
    )


def answer_faults(problem: Problem, found: Solution, best: int | float | None) -> list[str]:
    """Return the faults of an answer, given the optimum.

    If ``best`` is None, the problem has no answer. If it is NaN, the optimum is not known.
    """
    wrong = []
    if (found.has_answer and find_violations(problem, found)) or len(found.choice) != len(
        problem.jobs
    ):
        wrong.append("violations")
    if best is None:
        if found.has_answer:
            wrong.append("wrong_proofs")
        return wrong
    if math.isnan(best):
        return wrong
    if not found.bound >= best or (found.has_answer and found.objective > best):
        wrong.append("wrong_bounds")
    untrue = found.status is SolveStatus.OPTIMAL and found.objective != best
    if untrue or found.status is SolveStatus.INFEASIBLE:
        wrong.append("wrong_proofs")
    return wrong


def _hint(problem: Problem, rng: np.random.Generator) -> Solution | None:
    """Draw no hint, or one with any shadow prices and greedy's answer or nonsense."""
    if rng.random() < 0.5:
        return None
    prices = draw_prices(rng, problem) if rng.random() < 0.7 else np.zeros(0)
    choice = rng.integers(-1, max(1, len(problem.cell)), len(problem.jobs))
    if rng.random() < 0.7:
        choice = make_solver("greedy").solve(problem, Budget(remaining_s=lambda: math.inf)).choice
    fits = is_answer(problem, choice)
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=choice,
        solver="hint",
        prices=prices,
        objective=objective_of(problem, choice) if fits else 0,
        bound=trivial_bound(problem),
    )


def _best(problem: Problem, tally: FuzzTally) -> int | float | None:
    """Return the optimum.

    If there is no answer, return None. If it is not known, count that and return NaN.
    """
    try:
        return dynamic_optimum(problem)
    except TooLarge:
        end_s = time.perf_counter() + LONG_S
        budget = Budget(remaining_s=lambda: end_s - time.perf_counter(), gap=0.0)
        exact = make_solver("stock-cp-sat").solve(problem, budget)
        if exact.status is SolveStatus.INFEASIBLE:
            return None
        if exact.status is not SolveStatus.OPTIMAL:
            tally.count["unjudged"] += 1
            return math.nan
        return exact.objective


def _hurry(by: Solver, rng: np.random.Generator, tally: FuzzTally, k: int) -> float:
    """Solve a round within milliseconds; count a missing or broken answer, or one below greedy's.

    Returns the seconds by which it was late.
    """
    large = rng.random() < LARGE_SHARE
    problem = _short_round(rng, k, large=large)
    began_s = time.perf_counter()
    greedy = make_solver("greedy").solve(problem, Budget(remaining_s=lambda: math.inf))
    now_s = time.perf_counter()
    end_s = now_s + (now_s - began_s if large else float(rng.choice(SHORT_S)))
    budget = Budget(remaining_s=lambda: end_s - time.perf_counter())
    try:
        result = by.solve(problem, budget)
    except Exception:
        logger.exception(
            "a short round crashed",
            extra={"event": "case_crashed", "case": k, "solver": by.name},
        )
        tally.report("short round", k, ["crashes"])
        return 0.0
    late_s = max(0.0, time.perf_counter() - end_s)
    wrong = ["violations"] if find_violations(problem, result) else []
    if greedy.has_answer and result.bound < greedy.objective:
        wrong.append("wrong_bounds")
    if greedy.has_answer and not (result.has_answer and result.objective >= greedy.objective):
        wrong.append("below_greedy")
    tally.report("short round", k, wrong)
    return late_s


def _short_round(rng: np.random.Generator, k: int, *, large: bool) -> Problem:
    """Draw a round of up to 300 jobs, or of up to 3,000 if it is ``large``, by the number ``k``."""
    most = 3_000 if large else SMALL_ROUND_JOBS + 1
    jobs = int(rng.integers(SMALL_ROUND_JOBS + 1 if large else 1, most))
    if rng.random() < NAMED_SHARE:
        drawn = draw_family(str(rng.choice(DATALESS_FAMILIES)), jobs=jobs, seed=k)
        return drawn if isinstance(drawn, Problem) else build_problem(drawn, Policy())
    types = int(rng.integers(1, 11))
    snapshot = make_instance(
        jobs,
        max(types, int(jobs * rng.uniform(0.2, 3.0))),
        types,
        k,
        family=str(rng.choice(FAMILIES)),
        running=float(rng.choice([0.0, 0.5, 1.0])),
    )
    return build_problem(snapshot, Policy())
