"""A job's purchases at given prices, against linear programs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from tessera.formulation.tables import Floats, Ints
from tessera.solvers.kernels.completion import fill_hulls, price_jobs

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
