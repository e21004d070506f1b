"""Published schedulers by name and in rounds, their options, and their integer programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.base import Scheduler, SchedulerView, make_view
from tessera.solvers.schedulers.fcfs import Fcfs
from tessera.solvers.schedulers.gavel import Gavel
from tessera.solvers.schedulers.packing import options_of
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_of
from tessera.solvers.schedulers.sia import Sia
from tests.support.builders import (
    a_node,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
)
from tests.support.driver import reason_of
from tests.support.laws import examples
from tests.support.scheduling import (
    A100,
    FOREVER,
    LINEAR,
    a_running_job,
    a_waiting_job,
    cluster,
    decide_round,
    rates,
)
from tests.support.snapshots import snapshots


class FixedScheduler:
    """A scheduler that chooses the given options, whether or not they fit."""

    name = "fixed"

    def __init__(self, *cells: tuple[int, int] | None) -> None:
        self._cells = cells

    def choose(self, seen: SchedulerView) -> Ints:
        options = options_of(seen)
        found = np.full(len(options.current), -1)
        for job, cell in enumerate(self._cells):
            for option in options.of(job):
                if (int(options.gpu_type[option]), int(options.gpus[option])) == cell:
                    found[job] = options.column[option]
        return found


# the registry


def test_an_unknown_scheduler_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        InvalidInput, match=r"unknown 'lottery'; choose one of fcfs, easy, conservative, srt"
    ):
        make_scheduler("lottery")
    assert scheduler_of("") is None


# rounds


def test_a_round_says_that_the_scheduler_did_not_choose_a_job() -> None:
    jobs = [
        a_running_job("r", on=(A100, 4)),
        a_waiting_job("big", gpus=8),
        a_waiting_job("small", gpus=4),
    ]
    outcome = decide_round(Fcfs(), cluster(jobs, {A100: LINEAR}))
    assert [d.kind for d in outcome.decisions] == [
        DecisionKind.KEEP,
        DecisionKind.WAIT,
        DecisionKind.WAIT,
    ]
    reason = reason_of(outcome.decisions[2])
    assert reason.code is ReasonCode.NOT_CHOSEN
    assert "fcfs" in str(reason.message)


def test_a_round_measures_the_choice_by_its_objective_and_claims_no_unproven_gap() -> None:
    jobs = [a_running_job("r", on=(A100, 4)), a_waiting_job("big", gpus=8)]
    snapshot = cluster(jobs, {A100: LINEAR})
    outcome = decide_round(Fcfs(), snapshot)
    best = plan_round(snapshot, Policy(objective="throughput"), Greedy(), FOREVER)
    assert outcome.solution.objective == pytest.approx(4.0 * outcome.problem.scale)
    assert outcome.goals[0].objective == pytest.approx(4.0)
    assert outcome.solution.bound >= best.solution.objective
    assert outcome.solution.solver == "fcfs"


def test_a_choice_beyond_capacity_is_refused() -> None:
    outcome = decide_round(
        FixedScheduler((A100, 8), (A100, 4)),
        cluster([a_waiting_job("a"), a_waiting_job("b")], {A100: LINEAR}),
    )
    assert [v.rule for v in outcome.violations] == ["capacity"]
    assert outcome.decisions == ()


def test_an_infeasible_choice_is_dropped_and_reported() -> None:
    fails = an_estimate(0, A100, 4, iter_time_s=math.inf)
    snapshot = a_snapshot(
        nodes=[a_node("n0")],
        jobs=[a_waiting_job("w", gpus=4)],
        estimates=[*rates(0, {A100: {1: 1.0}}), fails],
    )

    def rosy(true: Snapshot) -> Snapshot:
        e = true.estimates
        return replace(true, estimates=replace(e, iter_time_s=np.full(len(e), 1.0)))

    outcome = plan_round(
        snapshot,
        Policy(),
        Greedy(),
        FOREVER,
        scheduler=Scheduler(published=Fcfs(), information=rosy),
    )
    reason = reason_of(outcome.decisions[0])
    assert "does not run" in str(reason.message)


# exactness


def best_by_trying_all(snapshot: Snapshot, worth: Mapping[tuple[int, int], float]) -> float:
    """Return the greatest total worth (by job and option) of all choices that fit."""
    view = make_view(snapshot, Policy())
    options = options_of(view)
    ways = [
        [None, *(o for o in options.of(j) if (j, o) in worth)] for j in range(len(snapshot.jobs))
    ]
    best = 0.0
    for picked in itertools.product(*ways):
        used = np.zeros(len(view.capacity), dtype=np.int64)
        total = 0.0
        for job, option in enumerate(picked):
            if option is not None:
                used[options.gpu_type[option]] += options.gpus[option]
                total += worth[job, option]
        if (used <= view.capacity).all():
            best = max(best, total)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_integer_programs_are_solved_to_their_optimum(seed: int) -> None:
    snapshot = a_random_snapshot(seed, jobs=5, groups=((0, 2, 4), (1, 1, 4)), max_gpus=8)
    view = make_view(snapshot, Policy())
    options = options_of(view)
    reference = view.draft.requested_rate
    requested = snapshot.jobs.requested_gpus
    gavel, sia = {}, {}
    for job in range(5):
        mine = list(options.of(job))
        least_rate = min(float(options.rate[o]) for o in mine)
        least_gpus = min(int(options.gpus[o]) for o in mine)
        for o in mine:
            if options.gpus[o] == requested[job]:
                gavel[job, o] = float(options.rate[o] / reference[job])
            if options.gpus[o] == 1:  # a waiting job starts with its least count
                goodput = float(options.rate[o]) / least_rate * least_gpus
                sia[job, o] = 1.1 - goodput**-0.5
    for policy, worth in ((Gavel(), gavel), (Sia(), sia)):
        option = {int(c): o for o, c in enumerate(options.column.tolist())}
        choice = policy.choose(view).tolist()
        found = sum(worth[job, option[c]] for job, c in enumerate(choice) if c >= 0)
        assert found == pytest.approx(best_by_trying_all(snapshot, worth), rel=2e-4)


def columns_of(view: SchedulerView, *, requested_only: bool) -> tuple[list[int], list[int]]:
    """Return the columns of options with a requested or current count, and the current ones."""
    options = options_of(view, requested_only=requested_only)
    jobs = view.draft.snapshot.jobs
    of_job = jobs.requested_gpus[options.job], jobs.current_gpus[options.job]
    kept = (options.gpus == of_job[0]) | (options.gpus == of_job[1])
    held = options.column[options.current[options.runs]]
    return options.column[kept].tolist(), held.tolist()


@examples(40)
@given(snapshots())
def test_options_of_requested_counts_match_the_filtered_list_of_all_options(
    snapshot: Snapshot,
) -> None:
    looked_at = make_view(snapshot, Policy())
    some = columns_of(looked_at, requested_only=True)
    assert some == columns_of(looked_at, requested_only=False)
    assert len(some[0]) == len(options_of(looked_at, requested_only=True))
