"""The Cell that a round gives to an added job, compared with the next best one and its price."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tessera.formulation.records.what_if import JobEffect, JobOffer, RoundDifference
from tessera.simulator.what_if.rounds import RATE_TOLERANCE, DecidedRound


def describe_offer(decided: DecidedRound, job: str, difference: RoundDifference) -> JobOffer:
    """Return what ``decided`` gives to ``job``. ``difference`` is that from the round without it."""
    snapshot, outcome = decided.snapshot, decided.outcome
    index = snapshot.jobs.name.index(job)
    decision, unit = outcome.decisions[index], outcome.problem.unit
    if decision.gang is None:
        return JobOffer(job=job, reason=decision.reason, unit=unit)
    stopped, slowed = _losers(job, difference)
    offer = JobOffer(
        job=job,
        cell=snapshot.cell(decision.cell),
        rate=decision.rate,
        unit=unit,
        stopped=stopped,
        slowed=slowed,
    )
    return _with_prices(decided, index, offer)


def _losers(
    job: str, difference: RoundDifference
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the other jobs that stop, and those that run more slowly, each with its tenant."""
    stopped, slowed = [], []
    for one in difference.jobs:
        if one.job == job or one.before is None or one.after is None:
            continue
        if one.effect is JobEffect.STOPS:
            stopped.append((one.job, one.tenant))
        elif one.after.rate < one.before.rate * (1 - RATE_TOLERANCE):
            slowed.append((one.job, one.tenant))
    return tuple(stopped), tuple(slowed)


def _with_prices(decided: DecidedRound, job: int, offer: JobOffer) -> JobOffer:
    """Return the offer with its value, its price and the second-best Cell, if they have a unit."""
    problem, solution = decided.outcome.problem, decided.outcome.solution
    chosen = int(solution.choice[job])
    if decided.options.scheduler or len(decided.outcome.goals) != 1 or chosen < 0:
        return offer
    known = bool(len(solution.prices))
    cost = problem.cost(solution.prices) if known else np.zeros(len(problem.cell))
    worth = (problem.value - cost) / problem.scale
    columns = np.array(problem.columns_of(job))
    cells = problem.cells.keys(problem.cell[columns])
    chosen_cell = decided.outcome.decisions[job].cell
    others = columns[[cell != chosen_cell for cell in cells]]
    offer = replace(
        offer,
        price=float(cost[chosen]) / problem.scale if known else math.nan,
        value=float(problem.value[chosen]) / problem.scale,
    )
    if not len(others):
        return offer
    second = int(others[np.argmax(worth[others])])
    row = int(problem.cell[second])
    return replace(
        offer,
        runner_up=decided.snapshot.cell(problem.cells.key_at(row)),
        runner_up_rate=float(problem.cells.rate[row]) / decided.snapshot.clock_factor,
        worse_by=float(worth[chosen] - worth[second]),
    )
