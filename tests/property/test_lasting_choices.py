"""Choices that last: rounds that need not be decided, and runs that do not change if these are left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Estimates, Snapshot
from tessera.formulation.tables import Ints
from tessera.simulator.run import Decider, Result
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.base import Scheduler, SchedulerView, make_view
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_names
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.conditions import conditions
from tests.support.driver import FOREVER
from tests.support.laws import examples
from tests.support.snapshots import snapshots
from tests.support.worlds import (
    COSTLY,
    FREE,
    a_random_scenario,
    simulate_scenario,
)

LASTING = [
    name for name in scheduler_names() if Scheduler(published=make_scheduler(name)).lasts(Policy())
]


class PolicyAskedEveryRound:
    """A scheduler that is called in every round."""

    def __init__(self, name: str) -> None:
        self._published = make_scheduler(name)
        self.name = self._published.name

    def choose(self, seen: SchedulerView) -> Ints:
        return self._published.choose(seen)


def advance_time(snapshot: Snapshot, seconds: float, share_left: float) -> Snapshot:
    """Return the snapshot after some time in which nothing else has changed."""
    jobs = snapshot.jobs
    runs = jobs.current_gpus > 0
    left = np.where(runs, jobs.iterations_left * share_left, jobs.iterations_left)
    served = jobs.service_gpu_s + jobs.current_gpus * seconds
    return replace(
        snapshot,
        now_s=snapshot.now_s + seconds,
        epoch=snapshot.epoch + 1,
        round_number=snapshot.round_number + 1,
        jobs=replace(jobs, iterations_left=left, service_gpu_s=served),
    )


@pytest.mark.parametrize("name", LASTING)
@examples(60)
@given(
    snapshot=snapshots(),
    seconds=st.sampled_from([1.0, 300.0, 1e6]),
    share_left=st.sampled_from([0.0, 1e-3, 0.9]),
)
def test_a_lasting_choice_is_the_same_later(
    name: str, snapshot: Snapshot, seconds: float, share_left: float
) -> None:
    policy = make_scheduler(name)
    first = policy.choose(make_view(snapshot, Policy()))
    then = policy.choose(make_view(advance_time(snapshot, seconds, share_left), Policy()))
    np.testing.assert_array_equal(first, then)


def run_scenario(seed: int, options: RoundOptions, *, wakeful: bool, costly: bool) -> Result:
    scenario = a_random_scenario(seed, jobs=12)
    decide = Decider(options, policy=PolicyAskedEveryRound(options.scheduler) if wakeful else None)
    return simulate_scenario(
        scenario,
        decide=decide,
        overheads=COSTLY if costly else FREE,
        **conditions(scenario, seed, 0.1 if seed % 3 else 0.0),
    )


@pytest.mark.parametrize("name", LASTING)
@examples(25)
@given(seed=st.integers(0, 2**16), every=st.sampled_from([0, 1, 3, 12]), costly=st.booleans())
def test_skipped_rounds_would_have_changed_nothing(
    name: str, seed: int, every: int, costly: bool
) -> None:
    options = RoundOptions(
        objective="throughput", scheduler=name, defragment_every_rounds=every
    )  # its values do not depend on the time, unlike those of jct
    skipping = run_scenario(seed, options, wakeful=False, costly=costly)
    whole = run_scenario(seed, options, wakeful=True, costly=costly)
    assert skipping.segments == whole.segments
    assert (skipping.state, skipping.ended_s, skipping.stuck) == (
        whole.state,
        whole.ended_s,
        whole.stuck,
    )
    np.testing.assert_array_equal(skipping.end_s, whole.end_s)
    np.testing.assert_array_equal(skipping.first_start_s, whole.first_start_s)
    for row, other in zip(skipping.rounds, whole.rounds, strict=True):
        assert other.decided
        trivial = other.bound_is_trivial  # an undecided round proves nothing
        expected = replace(other, gap=0.0)
        assert replace(row, decided=True, gap=0.0, bound_is_trivial=trivial) == expected
        assert row.decided or row.gap >= other.gap  # restarts cost more near the end


def test_most_rounds_of_a_quiet_cluster_are_not_decided() -> None:
    result = run_scenario(1, RoundOptions(scheduler="fcfs"), wakeful=False, costly=True)
    decided_rounds = sum(row.decided for row in result.rounds)
    assert 0 < decided_rounds < len(result.rounds)


@pytest.mark.parametrize(
    ("every", "number", "until"), [(12, 5, 12), (12, 11, 12), (12, 12, 24), (1, 5, 6)]
)
def test_a_round_without_changes_is_valid_until_the_next_defragmentation(
    every: int, number: int, until: int
) -> None:
    policy = Policy(defragment_every_rounds=every)
    assert outcome_of_fcfs(a_snapshot_where_all_run(number), policy).stands_until == until


def test_a_round_that_starts_a_job_is_valid_for_no_later_round() -> None:
    waiting = a_snapshot(nodes=NODES, estimates=CELLS, jobs=[a_job("a"), a_job("b")])
    assert outcome_of_fcfs(waiting, Policy()).stands_until == 0


def test_a_round_in_which_a_job_lacks_blocks_is_valid_for_no_later_round() -> None:
    together = an_estimate(gpus=4, nodes=2, iter_time_s=math.inf)
    torn = a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        estimates=[*CELLS, together],
        gangs={0: gang(0, 1), 1: gang(1, 1)},
        jobs=[a_job("a", **RUNS), a_job("b", **RUNS), a_job("c", requested_gpus=4)],
    )
    result = outcome_of_fcfs(torn, Policy())
    assert 2 in result.placed.unplaced
    assert result.stands_until == 0


def test_rounds_without_a_published_scheduler_are_never_reused() -> None:
    one_count = replace(a_snapshot_where_all_run(5), estimates=Estimates.from_rows([an_estimate()]))
    outcome = plan_round(one_count, Policy(), make_solver("greedy"), FOREVER)
    assert outcome.decisions[0].kind is DecisionKind.KEEP
    assert outcome.stands_until == 0


NODES = some_nodes((0, 1, 4))
CELLS = [an_estimate(gpus=n, iter_time_s=1.0 / n) for n in (1, 2, 4)]
RUNS: dict[str, Any] = {"state": JobState.RUNNING, "cell": (0, 1, 1), "movable": False}


def gang(node: int, *gpus: int) -> Gang:
    return Gang(members=((node, gpus),))


def a_snapshot_where_all_run(number: int) -> Snapshot:
    return a_snapshot(
        nodes=NODES,
        estimates=CELLS,
        jobs=[a_job("a", **RUNS)],
        gangs={0: gang(0, 0)},
        round_number=number,
    )


def outcome_of_fcfs(snapshot: Snapshot, policy: Policy) -> RoundOutcome:
    scheduler = Scheduler(published=make_scheduler("fcfs"))
    return plan_round(snapshot, policy, make_solver("greedy"), FOREVER, scheduler=scheduler)
