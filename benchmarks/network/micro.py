"""A comparison of Crux's parts, and of baselines in their place, with the optimum of a small case.

Each part is judged with the other parts at their best (Crux 6). Paths are judged under the best
levels for them. An order is judged on the best paths, under the best levels that do not invert it.
Levels are derived from the best order on the best paths. Shares are relative to the work of the
best paths with the best levels, so they cannot exceed 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tessera.benchmarks.network.optimum import (
    PlanSpace,
    dense_levels,
    space_of,
    weak_orders,
    without_inversion,
    works_of,
)
from tessera.benchmarks.network.small import draw_case, on_clos, on_torus
from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.baselines.levels import alone_then_rest, contended_first, equal_blocks
from tessera.solvers.network.baselines.sincronia import bssi_order
from tessera.solvers.network.baselines.varys import sebf_order
from tessera.solvers.network.compression import compress_levels, sample_orders
from tessera.solvers.network.compression.dag import dag_of
from tessera.solvers.network.factors import correction_factors
from tessera.solvers.network.floor import apply_floor
from tessera.solvers.network.fluid import simulate_fluid
from tessera.solvers.network.mechanisms import baseline_mechanisms, make_mechanism
from tessera.solvers.network.priorities import assign_priorities, order_of
from tessera.solvers.network.replan import PlanningOptions, replan
from tessera.solvers.network.swaps import change_levels, swap_orders

PLAIN_OPTIONS: Final = PlanningOptions(swap_jobs=0, trials=0, margin=0.0)
"""The options for Crux as published."""
OUR_OPTIONS: Final = PlanningOptions()
REFERENCE_JOBS: Final = 3
PLAN_VARIANTS: Final[Mapping[str, PlanningOptions]] = {
    "ours": OUR_OPTIONS,
    "swaps": PlanningOptions(trials=0),
    "plain": PLAIN_OPTIONS,
    "references": replace(PLAIN_OPTIONS, references=REFERENCE_JOBS),
}
"""Ways to plan with Crux. With ``swaps``, orders are tried on the engine and paths are not."""
FAIRNESS_FLOORS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
COMPUTE_NOISE_SD: Final = 0.05
"""The standard deviation of the logarithm of iterations' compute time, for the ``noise`` part."""
TIE_TOLERANCE: Final = 1e-9

Shares = dict[str, dict[str, float]]
"""A mapping: part -> method -> share of the optimum's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseJudgement:
    """The results of a case, in a form that JSON can hold."""

    shares: Shares
    facts: dict[str, float]
    floors: list[
        list[float]
    ]  # floor, share of work lost, lowest share of the rate alone, floor kept


def judge_case(seed: int, number: int, levels: int, *, with_torus: bool) -> CaseJudgement:
    """Return the results of case ``number`` of a seed."""
    case = draw_case(seed, number)
    c = on_clos(case)
    space = space_of(c)
    judge = CaseJudge(space, levels)
    plans = _plans(c, levels, number)
    shares = {
        "paths": judge.paths(plans, number),
        "priorities": judge.priorities(),
        "orders": judge.orders(),
        "compression": judge.compression(),
        "all": judge.whole(plans),
        "crowded": judge.compression_on(0),
        "noise": judge.noisy(plans, number),
    }
    if with_torus:
        shares |= _on_torus(on_torus(case), judge, levels, number)
    return CaseJudgement(
        shares=shares,
        facts=judge.facts()
        | {"violations": sum(len(find_network_violations(c, plan)) for plan in plans.values())},
        floors=judge.floors(plans["ours"]),
    )


def judged_many(seed: int, first: int, count: int, levels: int, torus_every: int) -> dict[str, Any]:
    """Return the results of ``count`` cases from ``first`` on, as a task of a sweep."""
    result = [
        judge_case(seed, number, levels, with_torus=number % torus_every == 0)
        for number in range(first, first + count)
    ]
    return {
        "cases": [
            {"shares": each.shares, "facts": each.facts, "floors": each.floors} for each in result
        ]
    }


class CaseJudge:
    """A judge of decisions about one case, based on the enumeration of all plans."""

    def __init__(self, space: PlanSpace, levels: int) -> None:
        self.space, self.levels = space, levels
        self.few = space.within(levels)
        self.path, self.assignment = space.best(self.few)
        self.most = float(space.work[self.path, self.assignment])
        self.demand = demand_of(space.contention, space.chosen[self.path])

    def paths(self, plans: Mapping[str, NetworkPlan], number: int) -> dict[str, float]:
        """Return the shares of choices of paths, each under the best levels for it."""
        chosen = {name: plans[name].chosen for name in ("ours", "plain", "taccl*")}
        chosen["ecmp"] = hash_bundles(self.space.contention, number)
        rows = {name: self.space.work[self.space.path(at)] for name, at in chosen.items()}
        result = {name: float(row[self.few].max()) / self.most for name, row in rows.items()}
        every = self.space.work[:, self.few].max(axis=1) / self.most
        return result | {"mean of all": float(every.mean())}

    def priorities(self) -> dict[str, float]:
        """Return the shares of orders on the best paths, under the best levels that keep them."""
        work = self.space.work[self.path]
        result = {}
        for name, order in orders_of(self.demand).items():
            allowed = self.few & without_inversion(self.demand, order, self.space.level)
            result[name] = float(work[allowed].max()) / self.most
        return result

    def orders(self) -> dict[str, float]:
        """Return the shares of orders that give each job its own level.

        They are relative to the best such order, on the paths that are best for it.
        """
        strict = self.space.strict()
        path, best = self.space.best(strict)
        most = float(self.space.work[path, best])
        demand = demand_of(self.space.contention, self.space.chosen[path])
        return {
            name: float(self.space.work[path, self.space.assignment(_own_levels(order))]) / most
            for name, order in orders_of(demand).items()
        }

    def compression(self) -> dict[str, float]:
        """Return the shares of levels made from the best order on the best paths."""
        return self.compression_on(self.path)

    def compression_on(self, path: int) -> dict[str, float]:
        """Return the shares of levels made from the best order on given paths.

        They are relative to the best levels on these paths.
        """
        work, order = self.space.work[path], self.best_order(path)
        demand = demand_of(self.space.contention, self.space.chosen[path])
        most = float(work[self.few].max())
        return {
            name: float(work[self.space.assignment(level)]) / most
            for name, level in levels_of(demand, order, self.levels).items()
        }

    def whole(self, plans: Mapping[str, NetworkPlan]) -> dict[str, float]:
        """Return the shares of whole plans.

        Plans that have a level for each job are compared with the best at any number of levels.
        Plans with time shifts are simulated instead of looked up. The enumeration has no time
        shifts, so such a plan could exceed 1.
        """
        result = {}
        for name, plan in plans.items():
            most = self.most if plan.levels <= self.levels else float(self.space.work.max())
            result[name] = self.played(plan) / most
        return result

    def played(self, plan: NetworkPlan, *, noise: float = 0.0, seed: int = 0) -> float:
        """Return the work of a plan in flop per second, looked up if the enumeration has it."""
        if plan.offset_s is None and noise == 0.0:
            return self.space.of(plan)
        demand = demand_of(self.space.contention, plan.chosen)
        run = simulate_fluid(
            demand,
            plan.level,
            horizon_s=self.space.span.horizon_s,
            warm_s=self.space.span.warm_s,
            offset_s=plan.offset_s,
            noise=noise,
            seed=seed,
        )
        return run.work_per_s(demand)

    def noisy(self, plans: Mapping[str, NetworkPlan], seed: int) -> dict[str, float]:
        """Return the work of plans under varying compute, as a share of the optimum's work there.

        The optimum is the one without noise, so a share can exceed 1.
        """
        best = NetworkPlan(
            chosen=self.space.chosen[self.path],
            level=self.space.level[self.assignment],
            priority=np.zeros(self.demand.jobs),
            order=self.best_order(self.path),
            levels=self.levels,
        )
        most = self.played(best, noise=COMPUTE_NOISE_SD, seed=seed)
        return {
            name: self.played(plans[name], noise=COMPUTE_NOISE_SD, seed=seed) / most
            for name in ("ours", "plain")
        }

    def best_order(self, path: int) -> Ints:
        """Return the order from which the best levels on given paths can be derived.

        If there are several such orders, it is the one with the most work without compression.
        """
        demand = demand_of(self.space.contention, self.space.chosen[path])
        work, level, strict = self.space.work[path], self.space.level, self.space.strict()
        best = level[self.few & (work >= work[self.few].max() * (1 - TIE_TOLERANCE))]
        orders = np.argsort(-level[strict], axis=1, kind="stable")
        fits = np.array([bool(without_inversion(demand, order, best).any()) for order in orders])
        result: Ints = orders[int(np.argmax(np.where(fits, work[strict], -np.inf)))]
        return result

    def floors(self, plan: NetworkPlan) -> list[list[float]]:
        """Return the cost and the benefit of each fairness floor, applied to a plan."""
        demand, span = demand_of(self.space.contention, plan.chosen), self.space.span
        without = self.space.of(plan)
        rows = []
        for floor in FAIRNESS_FLOORS:
            result = apply_floor(demand, plan.level, plan.order, self.levels, floor)
            run = simulate_fluid(demand, result.level, horizon_s=span.horizon_s, warm_s=span.warm_s)
            least = float((run.iterations * demand.alone_s).min())
            lost = (
                1
                - float(
                    self.space.work[
                        self.space.path(plan.chosen), self.space.assignment(result.level)
                    ]
                )
                / without
            )
            rows.append([floor, lost, least, float(result.met)])
        return rows

    def facts(self) -> dict[str, float]:
        """Return measures of how much is at stake in the case."""
        space = self.space
        one_switch = demand_of(space.contention, np.zeros_like(space.chosen[0]))
        alone = float((self.demand.work_flop / self.demand.alone_s).sum())
        return {
            "load_one_switch": float(one_switch.offered.max()),
            "load_best_paths": float(self.demand.offered.max()),
            "best_of_alone": self.most / alone,
            "worst_of_best": float(space.work[:, self.few].min()) / self.most,
            "more_levels": float(space.work.max()) / self.most - 1,
            "periods": space.span.horizon_s / float(self.demand.alone_s.max()),
            "drift": space.drift,
        }


def orders_of(demand: LinkDemand) -> dict[str, Ints]:
    """Return the order of each method on given paths, the most urgent job first."""
    plain = order_of(assign_priorities(demand, correction_factors(demand)))
    several = order_of(
        assign_priorities(demand, correction_factors(demand, references=REFERENCE_JOBS))
    )
    return {
        "ours": swap_orders(demand, plain),
        "plain": plain,
        "references": several,
        "intensity": order_of(demand.intensity),
        "sincronia": bssi_order(demand),
        "varys": sebf_order(demand),
    }


def levels_of(demand: LinkDemand, order: Ints, levels: int) -> dict[str, Ints]:
    """Return the levels of each method from one order."""
    priority = np.zeros(demand.jobs)  # unused, since the order is given
    exact = compress_levels(demand, priority, order, levels)
    dag = dag_of(demand, order)
    cut = np.zeros(demand.jobs, np.int64)
    cut[dag.job] = sample_orders(dag, levels, PLAIN_OPTIONS.samples, PLAIN_OPTIONS.seed).level
    first, ranked = contended_first(demand, order)
    tried = change_levels(
        demand, exact, levels, least_jobs=levels + 1, most_jobs=OUR_OPTIONS.swap_jobs
    )
    return {
        "ours": tried,
        "plain": cut,
        "exact": exact,
        "sincronia": alone_then_rest(first, ranked, levels),
        "varys": equal_blocks(first, ranked, levels),
    }


def _plans(c: Contention, levels: int, seed: int) -> dict[str, NetworkPlan]:
    """Return all whole plans of a case by name."""
    result = {
        name: replan(c, levels=levels, options=each).plan for name, each in PLAN_VARIANTS.items()
    }
    for name in (*baseline_mechanisms(), "crux-pa", "crux-ps-pa"):
        result[name] = make_mechanism(name).plan(c, levels=levels, seed=seed)
    return result


def _on_torus(c: Contention, judge: CaseJudge, levels: int, seed: int) -> Shares:
    """Return the shares of whole plans and orders on a torus.

    They are relative to the best plan found, since there are too many paths to try them all.
    """
    plans = _plans(c, levels, seed)
    level = weak_orders(len(c.jobs))
    few: Bools = level.max(axis=1) < levels
    by_paths: dict[bytes, Floats] = {}
    for plan in plans.values():
        if plan.chosen.tobytes() not in by_paths:
            by_paths[plan.chosen.tobytes()] = works_of(demand_of(c, plan.chosen), judge.space.span)
    at = {code.tobytes(): number for number, code in enumerate(level)}
    shares, most = {}, max(float(work[few].max()) for work in by_paths.values())
    for name, plan in plans.items():
        if plan.levels <= levels and plan.offset_s is None:
            row = by_paths[plan.chosen.tobytes()]
            shares[name] = float(row[at[dense_levels(plan.level[None])[0].tobytes()]]) / most
    demand = demand_of(c, plans["ours"].chosen)
    work = by_paths[plans["ours"].chosen.tobytes()]
    orders = {}
    for name, order in orders_of(demand).items():
        allowed = few & without_inversion(demand, order, level)
        orders[name] = float(work[allowed].max()) / float(work[few].max())
    return {"torus: all": shares, "torus: priorities": orders}


def _own_levels(order: Ints) -> Ints:
    level = np.empty(len(order), np.int64)
    level[order] = np.arange(len(order) - 1, -1, -1)
    return level
