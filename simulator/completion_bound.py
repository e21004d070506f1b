"""A lower bound on the mean completion time of any schedule of a scenario, from prices of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.simulator.metrics import least_start_s, possible_columns
from tessera.simulator.overheads import Overheads
from tessera.simulator.scenario import Scenario
from tessera.solvers.kernels.completion import fill_hulls, price_jobs
from tessera.solvers.kernels.jit import as_fixed_array

ARRIVAL_SLOTS: Final = (16, 32, 64, 128)
"""The number of slots between time 0 and the last arrival, one refinement after another."""
TAIL_SHARE: Final = 0.5
"""The number of slots after the last arrival, as a share of those before. They grow with time."""
PRECISION: Final = 1e-4
"""The relative gain below which a refinement ends. On Arena's Philly trace, ten times as many steps
raise the bound by 0.01 %, and twice as many slots by 0.03 %."""
MAX_STEPS: Final = 500
"""The largest number of steps of one refinement."""
MAX_WORK: Final = 2e8
"""The largest sum over steps of jobs times slots. Arena's Philly trace, with 950 jobs, needs about
9e7, which takes 10 s. A trace of 100,000 jobs gets as many steps as this allows."""
FIRST_GAIN, NEXT_GAIN = 0.03, 0.004
"""The gain that the first step hopes for, as a share of the bound at no prices: at the first
refinement, and at the others."""
PATIENCE: Final = 12
"""The number of steps without a gain after which a smaller gain is hoped for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionBound:
    """A proven lower bound on the sum of completion times, for any set of jobs (Eq. 49).

    Arrays are float64[jobs], in order of arrival. They are inf for a job that can never run.
    """

    cost_s: Floats  # each job's least completion time plus what it pays, at the best prices
    capacity_s: float  # what all GPUs are worth at those prices
    alone_s: Floats  # each job's least cost if GPUs are free

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Return the bound from its JSON form."""
        return cls(
            cost_s=np.array(data["cost_s"], float),
            capacity_s=float(data["capacity_s"]),
            alone_s=np.array(data["alone_s"], float),
        )

    def as_data(self) -> dict[str, Any]:
        """Return the bound in a form that JSON can hold."""
        return {
            "cost_s": self.cost_s.tolist(),
            "capacity_s": self.capacity_s,
            "alone_s": self.alone_s.tolist(),
        }

    def total_s(self, jobs: Bools) -> float:
        """Return a lower bound on the sum of the completion times of ``jobs``, bool[jobs].

        The other jobs may use GPUs, or end never. Both is left out of the bound.
        """
        priced_s = float(self.cost_s[jobs].sum()) - self.capacity_s
        return max(priced_s, float(self.alone_s[jobs].sum()))

    @property
    def mean_s(self) -> float:
        """Return a lower bound on the mean completion time of the jobs that can run, or NaN."""
        runs = np.isfinite(self.alone_s)
        return self.total_s(runs) / int(runs.sum()) if runs.any() else float("nan")


def completion_bound(scenario: Scenario, overheads: Overheads) -> CompletionBound:
    """Return a lower bound on the completion times of any schedule (Eq. 45 to 49).

    Suppose that each GPU of type t costs lambda_tk a second in slot k, and that each job minimises
    its completion time plus what it pays. A schedule gives no job less than this least cost. All
    jobs of a schedule together pay at most what all GPUs are worth. The sum of the least costs,
    less that worth, is therefore a lower bound on the sum of the completion times. This argument
    needs nothing of the prices but that they are not negative. So any prices give a valid bound, and
    how they were found does not matter. Prices of 0 give each job alone on its fastest Cell.

    A job may divide its time among Cells, pause at no cost, and use any shape. It pays for its
    first start alone, at the lowest cost of any Cell. GPUs are free after the last slot. Rounds,
    nodes, failures, deadlines and profiling are left out. All of this can only lower the bound.

    Prices are improved by subgradients (Polyak's step, towards a gain that is reduced when it is
    not reached), on slots that are halved three times. Nothing is random and no clock is read.
    """
    market = _Market.of(scenario, overheads)
    nothing = np.zeros((len(market.gpus), 1))
    alone_s = market.answer(np.zeros(1), nothing).cost_s
    runs = np.isfinite(alone_s)
    least_s, left = float(alone_s[runs].sum()), MAX_WORK
    best = last = _BestPrices(edge_s=np.zeros(1), price=nothing, value_s=least_s)
    for k, slots in enumerate(ARRIVAL_SLOTS if least_s > 0 else ()):
        edge_s = market.edges_s(alone_s, slots)
        step_work = int(runs.sum()) * len(edge_s)
        steps = min(MAX_STEPS, int(left / step_work))
        if not steps:
            break
        gain_s = least_s * (NEXT_GAIN if k else FIRST_GAIN)
        last, taken = _improve(market, last.on(edge_s), gain_s, steps)
        left -= taken * step_work
        best = max(best, last, key=lambda prices: prices.value_s)
    answer = market.answer(best.edge_s, best.price)
    return CompletionBound(
        cost_s=answer.cost_s,
        capacity_s=market.worth_s(best.edge_s, best.price),
        alone_s=alone_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """The answer of all jobs to prices."""

    cost_s: Floats  # float64[jobs]
    usage: Floats  # GPU-seconds, float64[types, slots]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BestPrices:
    """The best prices so far, float64[types, slots], with the bound on the sum that they give.

    Slot k begins at ``edge_s[k]``. The last has no end, and prices of 0.
    """

    edge_s: Floats
    price: Floats
    value_s: float

    def on(self, edge_s: Floats) -> _BestPrices:
        """Return the prices on other slots: those at the middle of each. Their value is not known."""
        middle_s = (edge_s[:-1] + edge_s[1:]) / 2
        slot = np.searchsorted(self.edge_s, middle_s, side="right") - 1
        price = np.zeros((len(self.price), len(edge_s)))
        price[:, :-1] = self.price[:, slot]
        return _BestPrices(edge_s=edge_s, price=price, value_s=-np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Market:
    """The jobs and the Cells that they may buy. Columns are grouped: jobs of a group may use the same ones.

    Within a group, columns have rising rates. A job without columns has the group -1.
    """

    gpus: Ints  # of the cluster, int64[types]
    arrival_s: Floats
    start_s: Floats  # the lowest cost of a first start
    work: Floats  # samples
    group: Ints  # int64[jobs]
    group_start: Ints  # int64[groups + 1]
    column_type: Ints
    column_gpus: Ints
    column_rate: Floats  # samples/s on the column's shape

    @classmethod
    def of(cls, scenario: Scenario, overheads: Overheads) -> Self:
        """Return the scenario's jobs with all Cells that they may run on."""
        draft = possible_columns(scenario)
        rate = draft.rate
        jobs = len(draft.snapshot.jobs)
        group, columns = np.full(jobs, -1, dtype=np.int64), list[Ints]()
        seen = dict[bytes, int]()
        for job in range(jobs):
            own = np.arange(draft.job_start[job], draft.job_start[job + 1])
            own = own[rate[own] > 0]
            if not len(own):
                continue
            own = own[np.lexsort((draft.gpus[own], rate[own]))]
            key = draft.cell[own].tobytes()
            if key not in seen:
                seen[key] = len(columns)
                columns.append(own)
            group[job] = seen[key]
        every = np.concatenate([np.zeros(0, np.int64), *columns])
        snapshot = draft.snapshot
        return cls(
            gpus=snapshot.schedulable_gpus(),
            arrival_s=np.array([one.arrival_s for one in scenario.arrivals]),
            start_s=np.full(jobs, least_start_s(draft, overheads)),
            work=(snapshot.jobs.iterations * snapshot.global_batch).astype(np.float64),
            group=group,
            group_start=np.cumsum([0, *map(len, columns)], dtype=np.int64),
            column_type=draft.gpu_type[every],
            column_gpus=draft.gpus[every],
            column_rate=rate[every],
        )

    def edges_s(self, alone_s: Floats, slots: int) -> Floats:
        """Return where slots begin: ``slots`` equal ones until the last arrival, and a tail.

        The tail ends when the last job could end alone, or when all GPUs together could have done
        all work at its most efficient, whichever is later.
        """
        last_s, runs = float(self.arrival_s[-1]), np.isfinite(alone_s)
        each = np.minimum.reduceat(self.column_gpus / self.column_rate, self.group_start[:-1])
        gpu_s = float((self.work[runs] * each[self.group[runs]]).sum())
        end_s = max(
            float((self.arrival_s + alone_s)[runs].max()), last_s + gpu_s / int(self.gpus.sum())
        )
        scale_s = max(last_s, end_s / 20)
        grown = np.linspace(0, np.log1p((end_s - last_s) / scale_s), int(slots * TAIL_SHARE) + 1)
        tail_s = last_s + scale_s * np.expm1(grown)
        return np.concatenate([np.linspace(0, last_s, slots + 1)[:-1] if last_s else [], tail_s])

    def worth_s(self, edge_s: Floats, price: Floats) -> float:
        """Return what all GPUs are worth."""
        return float((self.supply_gpu_s(edge_s) * price[:, :-1]).sum())

    def supply_gpu_s(self, edge_s: Floats) -> Floats:
        """Return the GPU-seconds of each type and slot, without the last."""
        return np.asarray(self.gpus[:, None] * np.diff(edge_s)[None, :], dtype=np.float64)

    def answer(self, edge_s: Floats, price: Floats) -> _Answer:
        """Return each job's least cost, and the GPU-seconds that all jobs then use."""
        groups, slots = len(self.group_start) - 1, len(edge_s)
        most = int(np.diff(self.group_start).max(initial=1))
        hull = np.zeros((groups, slots, most, 2))
        column = np.zeros((groups, slots, most), dtype=np.int64)
        corners, cheapest = (np.zeros((groups, slots), dtype=np.int64) for _ in range(2))
        kind, gpus = as_fixed_array(self.column_type), as_fixed_array(self.column_gpus)
        fill_hulls(
            as_fixed_array(self.group_start),
            kind,
            gpus,
            as_fixed_array(self.column_rate),
            as_fixed_array(price),
            hull,
            column,
            corners,
            cheapest,
        )
        cost_s, usage = np.zeros(len(self.group)), np.zeros(price.shape)
        price_jobs(
            as_fixed_array(self.group),
            as_fixed_array(self.arrival_s),
            as_fixed_array(self.start_s),
            as_fixed_array(self.work),
            as_fixed_array(edge_s),
            hull,
            column,
            corners,
            cheapest,
            kind,
            gpus,
            as_fixed_array(price),
            cost_s,
            usage,
        )
        return _Answer(cost_s=cost_s, usage=usage)


def _improve(
    market: _Market, start: _BestPrices, gain_s: float, steps: int
) -> tuple[_BestPrices, int]:
    """Return prices that are at least as good, after at most ``steps`` steps, and their number.

    The subgradient is what jobs use less what there is. Each step is as long as it would have to
    be to gain ``gain_s`` on the best value, if the bound were linear (Polyak 1969). Steps are
    measured in GPU-seconds that there are, because slots differ in length.
    """
    edge_s, supply = start.edge_s, market.supply_gpu_s(start.edge_s)
    size = np.maximum(supply, 1e-9)  # a type without GPUs is not used either

    def measure(price: Floats) -> tuple[float, Floats]:
        answer = market.answer(edge_s, price)
        total_s = float(answer.cost_s[np.isfinite(answer.cost_s)].sum())
        return total_s - market.worth_s(edge_s, price), answer.usage[:, :-1] - supply

    price = best_price = start.price
    value_s, slope = measure(price)
    best_s, best_slope, idle, taken = value_s, slope, 0, 0
    while taken < steps and gain_s > PRECISION * best_s:
        taken += 1
        slope = np.where((price[:, :-1] <= 0) & (slope < 0), 0.0, slope)
        square = float((slope * slope / size).sum())
        if not square:
            break  # supply meets demand: these prices are the best
        price = price.copy()
        price[:, :-1] += (best_s + gain_s - value_s) / square * slope / size
        np.maximum(price, 0.0, out=price)
        value_s, slope = measure(price)
        if value_s > best_s:
            idle = 0 if value_s > best_s + 0.01 * gain_s else idle
            gain_s *= 1.25 if value_s > best_s + 0.25 * gain_s else 1.0
            best_s, best_price, best_slope = value_s, price, slope
            continue
        idle += 1
        if idle >= PATIENCE:
            idle, gain_s = 0, 0.6 * gain_s
            price, value_s, slope = best_price, best_s, best_slope
    return _BestPrices(edge_s=edge_s, price=best_price, value_s=best_s), taken
