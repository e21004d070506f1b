"""Laws of prices on slots: true bounds, valid schedules, and kept promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.formulation.lookahead import (
    Lookahead,
    find_schedule_violations,
    look_ahead,
    picks_of,
)
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Floats
from tessera.solvers.base import Budget
from tessera.solvers.kernels.slotprices import Segments, price_schedules, select_cheapest
from tessera.solvers.lookahead import ADMISSION, admit
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.lookahead.integers import to_integers
from tessera.solvers.lookahead.market import open_market, work_to_train
from tests.support.dated_jobs import ENDLESS, NOW_S, snapshots, train_until
from tests.support.laws import examples
from tests.support.oracles.lookahead_matrices import most_weight

AHEAD = Policy(deadlines="look-ahead")
PLANNED = Policy(deadlines="planned")
NO_SEARCH = Budget(remaining_s=ENDLESS.remaining_s, work={ADMISSION: 0.0})


def look_ahead_of(snapshot: Snapshot, policy: Policy = AHEAD) -> Lookahead:
    return look_ahead(*drafts_before_deadlines(snapshot, policy))


def best_new_weight(snapshot: Snapshot, ahead: Lookahead) -> float:
    """Return the greatest weight of new jobs that a second solver admits next to all promises.

    Weights of these jobs are whole numbers, so that its integers can be turned back exactly.
    """
    inherited = picks_of(ahead, snapshot.legs)
    whole = to_integers(ahead, inherited, ahead.allowed())
    most = most_weight(whole, ahead.promised)
    assume(most >= 0)
    new = most - int(whole.weight[ahead.promised].sum())
    return float(round(new / 1000 * float(ahead.weight.max())))


@given(snapshots(jobs=6, slots=4))
@examples(40)
def test_no_schedule_admits_more_than_the_bound(snapshot: Snapshot) -> None:
    ahead = look_ahead_of(snapshot)
    assume(len(ahead.job) > 0)
    best = best_new_weight(snapshot, ahead)
    admission = admit(snapshot, AHEAD, NO_SEARCH)
    assert admission.bound >= best
    admitted = float(snapshot.jobs.weight[admission.admitted].sum())
    assert not admission.proven or admitted == best


@given(snapshots(jobs=4, slots=8), snapshots(jobs=4, slots=8), st.floats(0.05, 1.0))
@examples(25)
def test_the_bound_holds_next_to_promises_of_running_jobs(
    first: Snapshot, second: Snapshot, share: float
) -> None:
    before = admit(first, AHEAD, NO_SEARCH)
    assume(before.admitted.any())
    later = train_until(
        first, before.legs, before.admitted, NOW_S + share * (before.until_s - NOW_S)
    )
    more = np.concatenate([before.admitted, np.zeros(len(second.jobs), np.bool_)])
    jobs = replace(
        later.jobs.followed_by(second.jobs),
        name=tuple(f"j{i}" for i in range(len(more))),
        admitted=more,
    )
    snapshot = replace(later, jobs=jobs)
    ahead = look_ahead_of(snapshot)
    admission = admit(snapshot, AHEAD, NO_SEARCH)
    assert admission.given_up == frozenset()
    assert np.all(admission.admitted[more])
    assert find_schedule_violations(snapshot, admission.legs, admission.admitted) == []
    assert admission.bound >= best_new_weight(snapshot, ahead)


@given(snapshots(jobs=6, slots=4), st.integers(0, 2**32 - 1), st.booleans())
@examples(40)
def test_the_dual_value_at_any_prices_is_a_bound(
    snapshot: Snapshot, seed: int, whole: bool
) -> None:
    ahead = look_ahead_of(snapshot)
    assume(len(ahead.job) > 0)
    nobody = np.zeros(len(ahead.job), dtype=np.bool_)
    market = open_market(ahead, ~nobody, nobody, work_to_train(ahead), whole=whole).slots
    rng = np.random.default_rng(seed)
    price = rng.exponential(0.3, market.capacity.shape) * (rng.random(market.capacity.shape) < 0.7)
    cost, usage = np.zeros(len(market.work)), np.zeros(price.shape)
    gain = price_schedules(market, price, cost, usage)
    value = gain + float((price * market.capacity).sum())
    assert value >= best_new_weight(snapshot, ahead) - 1e-6
    # What is bought is paid: weights less what the use costs are what the jobs gain.
    buys = cost < market.weight
    assert gain <= float((market.weight - cost)[buys].sum()) + 1e-6


@given(snapshots(jobs=6, slots=4, guaranteed=False))
@examples(25)
def test_no_plan_without_promises_meets_more_than_its_bound(snapshot: Snapshot) -> None:
    ahead = look_ahead_of(snapshot, PLANNED)
    assume(len(ahead.job) > 0)
    plan = admit(snapshot, PLANNED, ENDLESS)
    assert plan.bound >= float(snapshot.jobs.weight[plan.admitted].sum())
    assert plan.bound >= best_new_weight(snapshot, ahead)  # slots are a special case of times


@given(snapshots(jobs=7, slots=6))
@examples(25)
def test_recorded_work_repeats_an_admission_bit_for_bit(snapshot: Snapshot) -> None:
    first = admit(snapshot, AHEAD, ENDLESS)
    again = admit(snapshot, AHEAD, replace(ENDLESS, work={ADMISSION: first.work}))
    assert first.legs.equals(again.legs)
    assert first.admitted.tolist() == again.admitted.tolist()
    assert (first.bound, first.proven, first.work) == (again.bound, again.proven, again.work)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), min_size=1, max_size=30),
    st.floats(0, 1),
)
@examples(100)
def test_the_selected_segments_are_the_cheapest_that_hold_the_work(
    parts: list[tuple[float, float]], share: float
) -> None:
    each, samples = (np.array(column) for column in zip(*parts, strict=True))
    work, count = share * float(samples.sum()) * (1 - 1e-9), len(parts)
    segments = Segments(each.copy(), samples.copy(), np.arange(count), np.arange(count))
    bought = select_cheapest(segments, count, work)
    assert paid(segments.each[:bought], segments.samples[:bought], work) <= paid(
        each[np.argsort(each)], samples[np.argsort(each)], work
    ) * (1 + 1e-9)
    assert sorted(segments.slot.tolist()) == list(range(count))
    assert np.array_equal(segments.each, each[segments.slot])


def paid(each: Floats, samples: Floats, work: float) -> float:
    """Return the price of ``work`` samples, bought in this order."""
    before = np.cumsum(samples) - samples
    return float((each * np.clip(work - before, 0.0, samples)).sum())
