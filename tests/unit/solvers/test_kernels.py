"""Compiled loops: the steps of greedy, the repair of choices, and purchases at given prices."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer, objective_of
from tessera.solvers.exact.greedy import Greedy, improve_choice, pack_must_run, repair_choice
from tessera.solvers.kernels import greedy as loops
from tessera.solvers.kernels.completion import fill_hulls, price_jobs
from tessera.solvers.kernels.jit import as_fixed_array, compile_lazily
from tessera.solvers.warm import run_every_loop
from tests.support.builders import a_random_problem
from tests.support.laws import examples
from tests.support.problems import a_problem, brute_force, problems

FOREVER = Budget(remaining_s=lambda: math.inf)

SOME = examples(150)

ROOT = Path(__file__).resolve().parents[3]


def greedy_choice(problem: Problem) -> list[int]:
    solution: list[int] = Greedy().solve(problem, FOREVER).choice.tolist()
    return solution


def as_list(choice: Ints | None) -> list[int] | None:
    return None if choice is None else choice.tolist()


# steps


def test_among_equal_steps_the_lower_job_and_then_its_lower_column_is_taken() -> None:
    same = [(6, {0: 4}), (6, {0: 4})]
    assert greedy_choice(a_problem([same, same, same], [8])) == [0, 2, -1]


def test_numbers_up_to_the_largest_are_exact() -> None:
    large = 2**52 - 1
    problem = a_problem([[(large - 1, {0: large - 1}), (large, {0: large})]], [large])
    assert greedy_choice(problem) == [1]


def test_must_run_jobs_are_packed_by_balance_if_the_smallest_columns_do_not_fit() -> None:
    jobs = [[(1, {0: 4}), (1, {1: 5})], [(1, {0: 4})]]
    problem = a_problem(jobs, [4, 6], must_run=[0, 1])
    assert as_list(pack_must_run(problem, np.array([0.1, 1.0]))) == [1, 2]
    assert as_list(repair_choice(problem, np.array([0, 2]), np.zeros(2))) == [1, 2]


@SOME
@given(problems(), st.integers(0, 2**32 - 1))
def test_improvement_loses_nothing_and_leaves_no_gainful_step(problem: Problem, seed: int) -> None:
    weight = np.random.default_rng(seed).random(len(problem.rows))
    start = pack_must_run(problem, weight)
    if start is None:
        return
    choice = improve_choice(problem, start, weight)
    assert is_answer(problem, choice)
    assert objective_of(problem, choice) >= objective_of(problem, start)
    now = np.where(choice >= 0, problem.value[choice], 0) if len(problem.cell) else choice
    for column, job in enumerate(problem.column_job.tolist()):
        changed = choice.copy()
        changed[job] = column
        assert problem.value[column] <= now[job] or not is_answer(problem, changed)


# repairing


TWO_PLACES = [(9, {0: 4}), (8, {1: 4})]


@pytest.mark.parametrize(
    ("jobs", "capacity", "choice", "repaired"),
    [
        # the job that loses least per unit gives way
        ([[(9, {0: 4})], [(5, {0: 4})], [(8, {0: 4})]], [8], [0, 1, 2], [0, -1, 2]),
        # a job moves if that loses less than another's waiting, and only where there is room
        ([TWO_PLACES, [(5, {0: 4})]], [4, 4], [0, 2], [1, 2]),
        ([TWO_PLACES, [(5, {0: 4})]], [4, 3], [0, 2], [0, -1]),
        # of two movable jobs, the one that loses less moves
        ([[(9, {0: 4}), (2, {1: 4})], TWO_PLACES], [4, 4], [0, 2], [0, 3]),
        # no more is given up than the excess of a row
        ([[(80, {0: 8})], [(11, {0: 1})]], [8], [0, 1], [0, -1]),
    ],
)
def test_a_choice_is_repaired_at_the_least_loss(
    jobs: list[list[tuple[int, dict[int, int]]]],
    capacity: list[int],
    choice: list[int],
    repaired: list[int],
) -> None:
    problem = a_problem(jobs, capacity)
    assert as_list(repair_choice(problem, np.array(choice), np.zeros(len(capacity)))) == repaired


def test_a_must_run_job_moves_but_never_stops() -> None:
    jobs = [[(9, {0: 4}), (1, {1: 4})], [(50, {0: 4})], [(50, {1: 4})]]
    problem = a_problem(jobs, [4, 4], must_run=[0])
    choice = repair_choice(problem, np.array([0, 2, 3]), np.zeros(2))
    assert choice is not None
    assert is_answer(problem, choice)
    assert objective_of(problem, choice) == 59  # job 0 stays and job 1 makes room


@SOME
@given(problems(), st.integers(0, 2**32 - 1))
def test_any_choice_at_any_prices_is_repaired_to_a_solution(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prices = rng.random(len(problem.rows)) * rng.choice(
        [0, 1, 100, -1, math.inf, math.nan, 1e300], len(problem.rows)
    )
    drawn = rng.integers(problem.job_start[:-1] - 1, problem.job_start[1:])
    choice = np.where(drawn < problem.job_start[:-1], -1, drawn)
    found = repair_choice(problem, choice, prices)
    best = brute_force(problem)
    if found is not None:
        assert is_answer(problem, found)
        assert best is not None
        assert objective_of(problem, found) <= best
    else:
        assert not Greedy().solve(problem, FOREVER).has_answer
    if is_answer(problem, choice):
        assert found is not None
        assert objective_of(problem, found) >= objective_of(problem, choice)


@pytest.mark.parametrize("choice", [[0], [0, 0], [1, 1], [-2, 1], [0, 7]])
def test_a_choice_of_another_problem_is_refused(choice: list[int]) -> None:
    problem = a_problem([[(1, {0: 1})], [(1, {0: 1})]], [4])
    for call in (improve_choice, repair_choice):
        with pytest.raises(InvalidInput, match="choice"):
            call(problem, np.array(choice), np.ones(1))


def test_prices_of_another_number_of_rows_are_refused() -> None:
    problem = a_problem([[(1, {0: 1})]], [4])
    for call in (improve_choice, repair_choice):
        with pytest.raises(InvalidInput, match="weight"):
            call(problem, np.array([-1]), np.ones(2))


# compiling


CALLED = (
    "column_sizes",
    "smallest_sizes",
    "occupy_rows",
    "take_gaining_steps",
    "pack_jobs",
    "keep_columns",
    "relieve_rows",
    "start_missing",
)


def compiled_signatures() -> dict[str, int]:
    """Return for how many combinations of types each public loop was compiled."""
    return {name: len(cast(SimpleNamespace, getattr(loops, name)).signatures) for name in CALLED}


def test_after_warm_up_no_round_compiles_anything() -> None:
    run_every_loop()
    assert compiled_signatures() == dict.fromkeys(CALLED, 1)
    for problem in (
        a_problem([], [1]),
        a_problem([[], [(1, {})]], [0]),
        a_problem([[(5, {0: 4})], [(5, {0: 4})]], [4], must_run=[1], current={0: 0}),
        a_random_problem(1, jobs=30),
    ):
        solution = Greedy().solve(problem, FOREVER)
        Greedy().solve(problem, FOREVER, solution)
        improve_choice(problem, solution.choice, np.ones(len(problem.rows), dtype=np.float32))
        repair_choice(problem, np.repeat(solution.choice, 2)[::2], np.ones(len(problem.rows)))
    assert compiled_signatures() == dict.fromkeys(CALLED, 1)


def test_threads_may_warm_up_and_solve_concurrently() -> None:
    problem = a_random_problem(2, jobs=200)

    def work(_: int) -> list[int]:
        run_every_loop()
        return greedy_choice(problem)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(8)))
    assert all(one == answers[0] for one in answers)


def test_a_function_that_cannot_be_cached_on_disk_is_still_compiled() -> None:
    scope: dict[str, Callable[[int], int]] = {}
    # a function without a file has no folder for a cache next to it
    exec("def twice(n):\n    return 2 * n", scope)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(scope["twice"])
    assert compile_lazily(scope["twice"])(21) == 42


@pytest.mark.full
@pytest.mark.parametrize("place", ["/proc/nowhere", os.devnull, ""])
def test_an_unwritable_cache_directory_does_no_harm(place: str) -> None:
    code = (
        "import numpy as np; from tessera.solvers.kernels.greedy import is_short;"
        "print(is_short(np.array([0, -1])))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_CACHE_DIR": place, "PYTHONPATH": str(ROOT)},
    )
    assert run.stdout.strip() == "True"


PROBE = """
from tessera.solvers.kernels.jit import compile_lazily

@compile_lazily
def twice(n):
    return 2 * n
"""
"""A module with one loop."""


def cache_hits(checkout: Path, source: str, user_cache: Path) -> int:
    """Run a module of ``checkout``; return how many compiled functions it loaded from disk."""
    (checkout / "tessera").mkdir(parents=True, exist_ok=True)
    (checkout / "tessera" / "probe.py").write_text(source)
    code = (
        "from tessera.probe import twice; assert twice(21) == 42;"
        "print(sum(twice.stats.cache_hits.values()))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment |= {
        "XDG_CACHE_HOME": str(user_cache),
        "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)]),
    }
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return int(run.stdout)


@pytest.mark.full
def test_a_second_checkout_reuses_what_the_first_has_compiled(tmp_path: Path) -> None:
    assert cache_hits(tmp_path / "first", PROBE, tmp_path / "cache") == 0
    assert cache_hits(tmp_path / "second", PROBE, tmp_path / "cache") == 1
    changed = PROBE.replace("2 * n", "n + n")
    assert cache_hits(tmp_path / "second", changed, tmp_path / "cache") == 0
    assert cache_hits(tmp_path / "first", PROBE, tmp_path / "cache") == 1
    assert not list(tmp_path.glob("*/tessera/__pycache__/*.nb?"))


@pytest.mark.full
def test_compiled_code_that_another_user_could_have_written_is_not_executed(
    tmp_path: Path,
) -> None:
    assert cache_hits(tmp_path / "first", PROBE, tmp_path / "cache") == 0
    (folder,) = (tmp_path / "cache" / "tessera-scheduler").glob("loops-numba-*/probe-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert cache_hits(tmp_path / "second", PROBE, tmp_path / "cache") == 0


def test_arguments_become_read_only_and_contiguous_without_needless_copies() -> None:
    array = np.arange(10)
    view = as_fixed_array(array)
    assert np.shares_memory(view, array)
    assert not view.flags.writeable
    assert array.flags.writeable
    assert as_fixed_array(array[::2]).flags.c_contiguous


TYPES = 3


class Offer:
    """Columns of one group with rising rates, and prices of their types in slots."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        columns, slots = int(rng.integers(1, 8)), int(rng.integers(1, 7))
        self.rate = np.sort(rng.choice([0.5, 1.0, 1.5, 2.0, 3.0, 5.0], columns))
        self.kind = rng.integers(0, TYPES, columns)
        self.gpus = rng.integers(1, 9, columns)
        self.edge_s = np.append(0.0, np.cumsum(rng.uniform(5, 60, slots - 1)))
        self.price = rng.choice([0.0, 0.1, 0.5, 2.0], (TYPES, slots)) * rng.random((TYPES, slots))
        self.price[:, -1] = 0.0
        self.arrival_s, self.start_s = float(rng.uniform(0, 100)), float(rng.choice([0.0, 7.0]))
        self.work = float(rng.uniform(5, 300))

    @property
    def hulls(self) -> tuple[Floats, Ints, Ints, Ints]:
        slots, columns = len(self.edge_s), len(self.rate)
        hull, column = np.zeros((1, slots, columns, 2)), np.zeros((1, slots, columns), np.int64)
        corners, cheapest = np.zeros((1, slots), np.int64), np.zeros((1, slots), np.int64)
        start = np.array([0, columns])
        fill_hulls(
            start, self.kind, self.gpus, self.rate, self.price, hull, column, corners, cheapest
        )
        return hull, column, corners, cheapest

    def buy(self) -> tuple[float, Floats]:
        """Return the least cost by the kernel, and the GPU-seconds of each type and slot."""
        hull, column, corners, cheapest = self.hulls
        cost_s, usage = np.zeros(1), np.zeros(self.price.shape)
        price_jobs(
            np.zeros(1, np.int64),
            np.array([self.arrival_s]),
            np.array([self.start_s]),
            np.array([self.work]),
            self.edge_s,
            hull,
            column,
            corners,
            cheapest,
            self.kind,
            self.gpus,
            self.price,
            cost_s,
            usage,
        )
        return float(cost_s[0]), usage

    def least_cost_s(self) -> float:
        """Return the least of the linear programs (Eq. 46 and 47), one for each slot of the end."""
        slots, ready_s = len(self.edge_s), self.arrival_s + self.start_s
        until_s = np.append(self.edge_s[1:], np.inf)
        cost = self.gpus[:, None] * self.price[self.kind]
        best, cheap = np.inf, np.inf
        for k in range(slots):
            if until_s[k] > self.arrival_s:
                cheap = min(cheap, float(cost[:, k].min()))
            if until_s[k] <= ready_s:
                continue
            from_s = np.maximum(self.edge_s[: k + 1], ready_s)
            length_s = np.minimum(np.maximum(until_s[: k + 1] - from_s, 0.0), 1e6)
            price = cost[:, : k + 1].copy()
            price[:, k] += 1.0
            columns, ends = price.shape
            solution = linprog(
                price.ravel(),
                A_eq=np.repeat(self.rate, ends)[None],
                b_eq=[self.work],
                A_ub=np.tile(np.eye(ends), columns),
                b_ub=length_s,
            )
            if solution.status == 0 and solution.fun is not None:
                last_s = max(float(self.edge_s[k]), ready_s)
                whole = last_s - self.arrival_s + self.start_s * cheap + float(solution.fun)
                best = min(best, whole)
        return best


@pytest.mark.parametrize("seed", range(60))
def test_a_job_pays_what_the_linear_programs_say(seed: int) -> None:
    offer = Offer(seed)
    assert offer.buy()[0] == pytest.approx(offer.least_cost_s(), rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_what_a_job_uses_at_its_prices_is_a_subgradient_of_its_cost(seed: int) -> None:
    offer = Offer(seed)
    cost_s, usage = offer.buy()
    rng = np.random.default_rng(seed)
    assert (usage >= -1e-9).all()
    for _ in range(5):  # the cost is concave in the prices
        before = offer.price.copy()
        offer.price[:, :-1] = np.maximum(before + rng.normal(0, 0.1, before.shape), 0.0)[:, :-1]
        bound = cost_s + float((usage * (offer.price - before)).sum())
        assert offer.buy()[0] <= bound + 1e-6 * max(1.0, abs(bound))
        offer.price = before
