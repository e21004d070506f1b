"""Loading of the compiled loops before the first round, which has a deadline, needs them.

``python -m tessera.solvers.warm`` compiles those that are not compiled yet; `make setup`
runs it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind
from tessera.formulation.state.cells import one_cell
from tessera.solvers.base import Budget
from tessera.solvers.exact.branching import KnapsackFilling
from tessera.solvers.exact.branching.fillings import FillingPool
from tessera.solvers.exact.branching.search import search_core
from tessera.solvers.exact.branching.stated import state_knapsacks
from tessera.solvers.exact.greedy import Greedy, repair_choice
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.exact.prices import price_problem
from tessera.solvers.exact.pricing import Pricing
from tessera.solvers.exact.pricing.solver import insert_by_lead
from tessera.solvers.kernels.completion import fill_hulls, price_jobs
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.kernels.rollout import (
    DRAWS_PER_CHANGE,
    LegLog,
    RolloutProblem,
    follow_jobs,
    improve_list,
)
from tessera.solvers.kernels.slotfit import (
    SlotProblem,
    SlotRoom,
    add_usage,
    arrange_jobs,
    fill_fits,
    give_schedules,
    place_jobs,
)
from tessera.solvers.kernels.slotprices import SlotMarket, price_schedules, trade_by_group
from tessera.solvers.network.compression import compression_of
from tessera.solvers.network.fluid import flop_under_levels, simulate_fluid
from tessera.solvers.network.replan import PlanningOptions, replan

_LOCK = threading.Lock()


def run_every_loop(report: Callable[[str], None] | None = None) -> None:
    """Run every compiled loop once.

    That takes about 0.5 s if the machine code is on disk, and about 40 s of a core if it must be
    compiled. Later calls do nothing, and a call during the first one waits for it. ``report`` is
    called with the name of each step before it runs.
    """
    with _LOCK:
        _run_all(report or _ignore)


def _ignore(_step: str) -> None:
    return None


@cache
def _run_all(report: Callable[[str], None]) -> None:
    report("greedy")
    problem = _make_problem()
    Greedy().solve(problem, Budget(remaining_s=lambda: math.inf))
    repair_choice(problem, np.array([1, 2]), np.ones(1))
    report("prices")
    budget = Budget(remaining_s=lambda: math.inf)
    solution = Pricing().solve(problem, budget)
    Portfolio().solve(problem, budget, replace(solution, prices=np.ones(1)))
    priced = price_problem(problem, np.ones(1))
    insert_by_lead(problem, priced)
    report("branching")
    free = price_problem(problem, np.zeros(1))
    search_core(problem, free, None, budget, gap=0.0, columns=9, nodes=9, bound=1e9)
    known = replace(solution, choice=np.array([0, -1]), objective=1, prices=np.zeros(1))
    KnapsackFilling().solve(problem, replace(budget, gap=0.0), known)
    stated = state_knapsacks(problem, free)
    if stated is not None:
        FillingPool(problem, stated).dive(stated.price, budget, 0)
        stated.bound(stated.price)
    for name, step in (
        ("deadline schedules", _run_rollout),
        ("deadlines in slots", _run_slots),
        ("network", _run_fluid),
        ("network priorities", _run_compression),
        ("network paths", _run_replan),
    ):
        report(name)
        step()


def _make_problem() -> Problem:
    """Return a problem that uses every loop: two running jobs, one of which must run.

    Two GPUs are too few for both.
    """
    return Problem(
        jobs=("must", "may"),
        job_start=np.array([0, 2, 3]),
        cells=one_cell(),
        plans=("",),
        cell=np.zeros(3, np.int64),
        value=np.array([1, 2, 1]),
        restart_price=np.zeros(3, np.int64),
        scale=1.0,
        unit="",
        rows=(CouplingRow(kind=RowKind.GPUS, capacity=2),),
        usage_start=np.arange(4),
        row=np.zeros(3, np.int64),
        amount=np.array([1, 2, 2]),
        idle_start=np.zeros(3, np.int64),
        idle_row=np.zeros(0, np.int64),
        idle_amount=np.zeros(0, np.int64),
        must_run=np.array([True, False]),
        least_rate=np.zeros(2),
        movable=np.ones(2, np.bool_),
        current=np.array([0, 2]),
        restart_share=np.zeros(2),
        weight=np.ones(2),
    )


def _run_rollout() -> None:
    """Follow two jobs with deadlines on one GPU that can serve only one, and change a list, too."""
    zero, many = as_fixed_array(np.zeros(2)), as_fixed_array(np.ones(2))
    world = RolloutProblem(
        option_start=as_fixed_array(np.arange(3)),
        kind=as_fixed_array(np.zeros(2, np.int64)),
        types=1,
        quickest=many,
        smallest=as_fixed_array(np.ones(2, np.int64)),
        lists=as_fixed_array(np.arange(2)[None]),
        use=as_fixed_array(np.ones((2, 1), np.int64)),
        rate=many,
        stays=as_fixed_array(np.zeros(2, np.bool_)),
        now=as_fixed_array(np.ones(2, np.bool_)),
        lag_s=zero,
        work=many,
        deadline_s=many,
        restart_s=zero,
        weight=many,
        step_s=as_fixed_array(np.zeros(1)),
        free=as_fixed_array(np.ones((1, 1), np.int64)),
        round_s=1.0,
        most=2,
        visits=100,
    )
    log = LegLog(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2)))
    order, same = np.arange(2), np.zeros(2, np.int64)
    follow_jobs(world, order, same, np.zeros(2, np.int64), log)
    improve_list(world, order, same, np.zeros((1, 1 + 2 * DRAWS_PER_CHANGE)), log)


def _run_slots() -> None:
    """Fit two jobs with deadlines into two slots of one GPU, and price the slots."""
    one, many = as_fixed_array(np.ones(2)), as_fixed_array(np.arange(3))
    zeros, edges = as_fixed_array(np.zeros(2, np.int64)), as_fixed_array(np.arange(3.0))
    use, capacity = np.ones((2, 1), np.int64), as_fixed_array(np.ones((1, 2), np.int64))
    none = as_fixed_array(np.zeros(2, np.bool_))
    problem = SlotProblem(
        option_start=many,
        kind=zeros,
        use=as_fixed_array(use),
        rate=one,
        cost=as_fixed_array(np.zeros(2)),
        stays=none,
        barred=none,
        lag_s=as_fixed_array(np.zeros(2)),
        floor=zeros,
        target=one,
        deadline_s=one,
        last=as_fixed_array(np.ones(2, np.int64)),
        steady=none,
        held=as_fixed_array(np.full(2, -1)),
        boundary_s=edges,
        capacity=capacity,
        price=as_fixed_array(np.ones((1, 2))),
        types=1,
        binding=True,
        delays=False,
    )
    room = SlotRoom(np.array(capacity), np.full((2, 2), -1), np.zeros(2, np.bool_))
    order, size = as_fixed_array(np.arange(2)), as_fixed_array(np.ones(2))
    place_jobs(problem, room, order)
    give_schedules(problem, room, order, as_fixed_array(room.picks), np.zeros(2, np.bool_))
    arrange_jobs(problem, room, order, size, order, none)
    add_usage(problem, room.free, 0, room.picks[0], 1)
    fill_fits(problem, room.free, 0, np.zeros((1, 2), np.bool_))
    market = SlotMarket(
        option_start=as_fixed_array(np.arange(2)),
        kind=as_fixed_array(np.zeros(1, np.int64)),
        use=as_fixed_array(use[:1]),
        rate=as_fixed_array(np.ones(1)),
        job_start=as_fixed_array(np.array([0, 2])),
        work=one,
        restart_s=as_fixed_array(np.zeros(2)),
        deadline_s=one,
        last=problem.last,
        weight=one,
        must=none,
        boundary_s=edges,
        capacity=capacity,
        types=1,
        whole=True,
    )
    price = np.ones((1, 2))
    price_schedules(market, as_fixed_array(price), np.zeros(2), np.zeros((1, 2)))
    step, total = as_fixed_array(np.ones((1, 2))), np.zeros((1, 2))
    group = as_fixed_array(np.zeros(1, np.int64))
    trade_by_group(market, group, as_fixed_array(np.ones(1)), step, price, total)


def _run_compression() -> None:
    """Compress four jobs on three links to two priority levels."""
    ones = np.ones(4)
    demand = LinkDemand(
        work_flop=ones,
        compute_s=ones,
        start_s=ones,
        delay_s=np.zeros(4),
        link_start=np.array([0, 2, 4, 5, 6]),
        link=np.array([0, 2, 0, 1, 1, 2]),
        busy_s=np.ones(6),
        links=3,
    )
    compression_of(demand, np.arange(4), 2, samples=2)


def _run_replan() -> None:
    """Plan the network for two jobs that share a fixed link and choose between two other links.

    A fairness floor is requested.
    """
    one, two = np.ones(2), np.arange(3)
    contention = Contention(
        jobs=("a", "b"),
        work_flop=one,
        compute_s=one,
        start_s=one,
        gpus=np.ones(2, np.int64),
        fixed_start=two,
        fixed_link=np.zeros(2, np.int64),
        fixed_bytes=2 * one,
        fixed_delay_s=np.zeros(2),
        bundle_start=two,
        bundle_bytes=one,
        bundle_messages=np.ones(2, np.int64),
        candidate_start=2 * two,
        candidate=np.array([0, 1, 0, 1]),
        path_start=two,
        path_link=np.array([1, 2]),
        path_delay_s=np.zeros(2),
        link_bytes_per_s=np.ones(3),
    )
    replan(contention, options=PlanningOptions(references=2, trials=2, floor=0.9))
    replan(contention)


def _run_fluid() -> None:
    """Simulate two jobs on one link."""
    one, level = np.ones(2), np.zeros(2, np.int64)
    demand = LinkDemand(
        work_flop=one,
        compute_s=one,
        start_s=one,
        delay_s=np.zeros(2),
        link_start=np.arange(3),
        link=np.zeros(2, np.int64),
        busy_s=one,
        links=1,
    )
    simulate_fluid(demand, level, horizon_s=9.0)
    flop_under_levels(demand, level[None], horizon_s=9.0)


def _run_completion() -> None:
    """Price one job on one column, in one slot. Simulations need this, but no round does."""
    none, one = as_fixed_array(np.zeros(1, np.int64)), as_fixed_array(np.ones(1, np.int64))
    zero, rate, free = (as_fixed_array(a) for a in (np.zeros(1), np.ones(1), np.zeros((1, 1))))
    hull, column = np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 1), np.int64)
    corners, cheapest = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
    group_start = as_fixed_array(np.arange(2))
    fill_hulls(group_start, none, one, rate, free, hull, column, corners, cheapest)
    usage = np.zeros((1, 1))
    cost_s = np.zeros(1)
    price_jobs(
        none,
        zero,
        zero,
        rate,
        zero,
        hull,
        column,
        corners,
        cheapest,
        none,
        one,
        free,
        cost_s,
        usage,
    )


def _print_step(name: str) -> None:
    sys.stdout.write(f"  compiling: {name}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_every_loop(_print_step)
    _print_step("bounds of simulations")
    _run_completion()
