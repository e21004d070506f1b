"""Laws of looking ahead: the grid, admission, kept promises, and prices on slots."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.benchmarks.deadlines.bench_deadlines import OverloadCase, draw_overload, drive_load
from tessera.formulation.answer.lookahead_check import find_schedule_violations
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.lookahead import Lookahead, look_ahead, picks_of, slot_boundaries
from tessera.formulation.round.policy import DEADLINE_MODES, Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.kernels.slotprices import Segments, price_schedules, select_cheapest
from tessera.solvers.lookahead import ADMISSION, admit, exact
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.lookahead.integers import to_integers
from tessera.solvers.lookahead.market import open_market, work_to_train
from tessera.solvers.rounds.plan import plan_round
from tests.support.dated_jobs import ENDLESS, NOW_S, snapshots, train_until
from tests.support.laws import examples
from tests.support.oracles.lookahead_matrices import most_weight
from tests.support.oracles.lookahead_sums import resource_usage_of, trained_samples

AHEAD = Policy(deadlines="look-ahead")


@given(
    now_s=st.floats(0, 3e9),
    until_s=st.floats(1, 1e7),
    later_s=st.floats(0, 1e6),
    round_s=st.sampled_from([60.0, 300.0, 413.7]),
)
@examples(60)
def test_a_later_grid_keeps_every_boundary_of_an_earlier_grid_that_lies_ahead(
    now_s: float, until_s: float, later_s: float, round_s: float
) -> None:
    before = slot_boundaries(now_s, now_s + until_s, round_s)
    after = slot_boundaries(now_s + later_s, float(before[-1]), round_s)
    beyond = before[1:][before[1:] > now_s + later_s + 2e-3]
    assert set(beyond.tolist()) <= set(after.tolist())


def no_job_runs(ahead: Lookahead) -> Ints:
    return np.full((len(ahead.job), ahead.slots), -1, dtype=np.int64)


@given(snapshots(jobs=5, slots=5))
@examples(25)
def test_two_solvers_agree_on_the_admitted_weight(snapshot: Snapshot) -> None:
    ahead = look_ahead_of(snapshot)
    assume(len(ahead.job) > 0)
    whole = to_integers(ahead, no_job_runs(ahead), ahead.allowed())
    none = np.zeros(len(ahead.job), dtype=np.bool_)
    admission = exact.solve_admission(whole, ENDLESS, 60.0, (no_job_runs(ahead), none))
    assert admission.proven
    assert admission.admitted is not None
    assert exact.weight_of(whole, admission.admitted) == most_weight(whole, none)


@given(snapshots(jobs=3, slots=2, counts=(1, 2)))
@examples(25)
def test_admission_matches_the_best_of_all_enumerated_schedules(snapshot: Snapshot) -> None:
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert admission.proven
    assert float(snapshot.jobs.weight[admission.admitted].sum()) == brute_force(
        look_ahead_of(snapshot)
    )
    assert find_schedule_violations(snapshot, admission.schedule_segments, admission.admitted) == []


def brute_force(ahead: Lookahead) -> float:
    """Return the greatest weight that schedules on the grid can admit, by trying all combinations."""
    ways: list[list[tuple[float, Ints]]] = []
    ok = ahead.allowed()
    for job in range(len(ahead.job)):
        found: dict[bytes, Ints] = {}
        for row in itertools.product([-1, *ahead.options_of(job)], repeat=ahead.slots):
            pick = np.array(row)
            if all(o < 0 or ok[o, k] for k, o in enumerate(row)):
                work = trained_samples(ahead, job, pick)
                if work >= ahead.work[job] * (1 - 1e-7):
                    used = resource_usage_of(ahead, job, pick)
                    found[used.tobytes()] = used
        idle = resource_usage_of(ahead, job, no_job_runs(ahead)[job])
        lean = [
            u
            for u in found.values()
            if not any(np.all(v <= u) and np.any(v < u) for v in found.values())
        ]
        ways.append([(0.0, idle), *((float(ahead.weight[job]), u) for u in lean)])
    best = 0.0
    for way in itertools.product(*ways):
        if np.all(sum(used for _, used in way) <= ahead.capacity):
            best = max(best, sum(weight for weight, _ in way))
    return best


@given(snapshots(jobs=6, slots=6, guaranteed=False, whole_slots=True))
@examples(25)
def test_look_ahead_admits_at_least_the_weight_of_myopic_admission(snapshot: Snapshot) -> None:
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert admission.proven
    ahead_weight = float(snapshot.jobs.weight[admission.admitted].sum())
    assert ahead_weight >= best_at_once(snapshot) - 1e-9
    myopic = plan_round(snapshot, Policy(deadlines="myopic"), Portfolio(), ENDLESS)
    weight = sum(snapshot.jobs.weight[d.job] for d in myopic.decisions if d.admitted)
    assert weight <= best_at_once(snapshot) + 1e-9


def best_at_once(snapshot: Snapshot) -> float:
    """Return the greatest weight of jobs that can all start now on columns that satisfy Eq. 6."""
    jobs, free = snapshot.jobs, snapshot.schedulable_gpus()
    reach: dict[tuple[int, ...], float] = {(0,) * len(free): 0.0}
    e = snapshot.estimates
    for j in range(len(jobs)):
        left_s = jobs.deadline_s[j] - snapshot.now_s - jobs.restart_s[j]
        ways = [
            (int(e.gpu_type[i]), int(e.gpus[i]))
            for i in np.flatnonzero(e.workload == jobs.workload[j]).tolist()
            if jobs.iterations_left[j] * e.iter_time_s[i] <= left_s * (1 + 1e-9)
        ]
        after = dict(reach)
        for used, weight in reach.items():
            for kind, gpus in ways:
                grown = tuple(u + gpus * (t == kind) for t, u in enumerate(used))
                if all(u <= f for u, f in zip(grown, free.tolist(), strict=True)):
                    after[grown] = max(after.get(grown, 0.0), weight + float(jobs.weight[j]))
        reach = after
    return max(reach.values())


@given(snapshots(jobs=5, slots=20), st.floats(0.05, 1.0))
@examples(25)
def test_certificates_stay_valid_as_time_passes(snapshot: Snapshot, share: float) -> None:
    """After training by the certificates for part of the first slot, the rest of them still suffices."""
    admission = admit(snapshot, AHEAD, ENDLESS)
    assume(admission.admitted.any())
    moment_s = NOW_S + share * (admission.until_s - NOW_S)
    later = train_until(snapshot, admission.schedule_segments, admission.admitted, moment_s)
    again = admit(later, AHEAD, Budget(remaining_s=lambda: 0.0))
    assert find_schedule_violations(later, later.schedule_segments, admission.admitted) == []
    assert again.given_up == frozenset()
    assert np.all(again.admitted[admission.admitted])


def with_others(load: OverloadCase, seed: int) -> OverloadCase:
    """Return the load with some jobs guaranteed and some without a deadline."""
    rng = np.random.default_rng(seed)
    return replace(
        load,
        jobs=tuple(
            replace(
                job,
                guaranteed=bool(rng.random() < 0.25),
                deadline_s=math.inf if rng.random() < 0.3 else job.deadline_s,
            )
            for job in load.jobs
        ),
    )


@given(st.integers(0, 10_000), st.sampled_from([300.0, 100.0]))
@examples(4)
def test_no_promised_deadline_is_missed_if_the_estimates_are_right(
    seed: int, every_s: float
) -> None:
    load = draw_overload(seed, 7, 1.5)
    for mode in DEADLINE_MODES[1:]:
        result = drive_load(load, mode, every_s=every_s)
        assert (result.missed, result.violations) == (0, 0)


@given(st.integers(0, 10_000))
@examples(4)
def test_no_promised_deadline_is_missed_next_to_guaranteed_and_best_effort_jobs(seed: int) -> None:
    result = drive_load(with_others(draw_overload(seed, 9, 1.5), seed), "look-ahead")
    assert (result.missed, result.violations) == (0, 0)


PLANNED = Policy(deadlines="planned")

NO_SEARCH = Budget(remaining_s=ENDLESS.remaining_s, work={ADMISSION: 0.0})


def look_ahead_of(snapshot: Snapshot, policy: Policy = AHEAD) -> Lookahead:
    return look_ahead(*drafts_before_deadlines(snapshot, policy))


def best_new_weight(snapshot: Snapshot, ahead: Lookahead) -> float:
    """Return the greatest weight of new jobs that a second solver admits next to all promises.

    Weights of these jobs are whole numbers, so that its integers can be turned back exactly.
    """
    inherited = picks_of(ahead, snapshot.schedule_segments)
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
        first, before.schedule_segments, before.admitted, NOW_S + share * (before.until_s - NOW_S)
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
    assert find_schedule_violations(snapshot, admission.schedule_segments, admission.admitted) == []
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
    assert first.schedule_segments.equals(again.schedule_segments)
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
