"""Certificates of shadow prices: they prove what they say, whatever the prices are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.certificate_check import check_certificate
from tessera.solvers.prices import certificate_of_prices, price_problem
from tests.support.problems import a_problem
from tests.support.proofs import a_random_problem, best_objective

SEEDS = range(200)


def test_any_prices_prove_a_bound_that_our_checker_accepts() -> None:
    for seed in SEEDS:
        problem = a_random_problem(seed)
        prices = np.random.default_rng([seed, 3]).uniform(-1, 6, len(problem.rows))
        certificate = certificate_of_prices(problem, prices)
        proven = check_certificate(problem, certificate)
        best = best_objective(problem)
        assert best is None or best <= proven <= certificate.bound


def test_the_bound_is_that_of_the_prices_but_for_rounding() -> None:
    for seed in SEEDS:
        problem = a_random_problem(seed, with_idle=False)
        if (np.diff(problem.job_start)[problem.must_run] == 0).any():
            continue  # such a job makes any bound true
        prices = np.random.default_rng([seed, 4]).uniform(0, 6, len(problem.rows))
        certificate = certificate_of_prices(problem, prices)
        assert certificate.bound <= price_problem(problem, prices).total + 1e-3


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf, -math.inf])
def test_a_price_that_is_no_price_counts_as_0(price: float) -> None:
    problem = a_problem([[(4, {0: 4})], [(5, {1: 4})]], [8, 4])
    certificate = certificate_of_prices(problem, np.array([price, 1.0]))
    assert certificate == certificate_of_prices(problem, np.array([0.0, 1.0]))
    assert check_certificate(problem, certificate) == certificate.bound == 4 + 1 + 4


def test_values_and_prices_beyond_64_bits_are_exact() -> None:
    problem = a_problem([[(2**49, {0: 2**40})], [(2**49 - 1, {0: 2**40})]], [2**40])
    certificate = certificate_of_prices(problem, np.array([2.0**30]))
    assert check_certificate(problem, certificate) == certificate.bound == 2**70
    certificate = certificate_of_prices(problem, np.array([1e300]))
    assert check_certificate(problem, certificate) == certificate.bound == 2**93


def test_a_row_that_nothing_uses_costs_nothing_however_high_its_price() -> None:
    problem = a_problem([[(5, {0: 1, 1: 0})], [(3, {0: 1})]], [1, 7, 7])
    certificate = certificate_of_prices(problem, np.array([3.0, 1e300, 1e18]))
    assert certificate.bound == 5
    assert check_certificate(problem, certificate) == 5
