"""Queue schedulers consider only requested counts, and their rounds are placed as they chose."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.placement.free import FreeGpus
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.base import Scheduler, SchedulerView, make_view
from tessera.solvers.schedulers.packing import options_of
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.laws import examples
from tests.support.snapshots import snapshots

FOREVER = Budget(remaining_s=lambda: math.inf)


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


def a_fragmented_cluster(round_number: int) -> Snapshot:
    """Return two four-GPU nodes, half of each free, and a job that needs four GPUs of one node."""
    runs: dict[str, Any] = {"state": JobState.RUNNING, "cell": (0, 2, 1), "movable": False}
    cells = [an_estimate(gpus=n, iter_time_s=1.0 / n) for n in (1, 2, 4)]
    return a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        round_number=round_number,
        estimates=[*cells, an_estimate(gpus=4, nodes=2, iter_time_s=math.inf)],
        jobs=[a_job("a", **runs), a_job("b", **runs), a_job("whole", requested_gpus=4)],
        gangs={node: Gang(members=((node, (0, 1)),)) for node in (0, 1)},
    )


@pytest.mark.parametrize("round_number", [1, 12])
def test_a_job_that_finds_no_blocks_waits_and_is_given_no_other_count(round_number: int) -> None:
    snapshot, policy = a_fragmented_cluster(round_number), Policy(defragment_every_rounds=12)
    scheduler = Scheduler(published=make_scheduler("fcfs"))
    outcome = plan_round(snapshot, policy, Greedy(), FOREVER, scheduler=scheduler)
    assert outcome.violations == ()
    assert [d.kind for d in outcome.decisions] == [
        DecisionKind.KEEP,
        DecisionKind.KEEP,
        DecisionKind.WAIT,
    ]
    reason = outcome.decisions[2].reason
    assert reason is not None
    assert reason.code is ReasonCode.FRAGMENTED


@pytest.mark.parametrize("searched_before", [False, True])
def test_gpus_are_taken_completely_or_not_at_all(searched_before: bool) -> None:
    nodes = [*some_nodes((0, 2, 4)), *some_nodes((1, 1, 4))]
    free = FreeGpus(a_snapshot(nodes=nodes, jobs=[], estimates=[]))
    if searched_before:  # so that taking GPUs must update the buckets of nodes
        assert free.find(0, free.layouts(0, 4)[0], {}) == ((0, 0b1111),)
    assert free.take_if_free(((0, 0b0011), (1, 0b0001)), 0, 3)
    before = list(free.mask), list(free.total)
    assert before == ([0b1100, 0b1110, 0b1111], [5, 4])
    for spots, kind, gpus in (
        (((0, 0b0100), (1, 0b0001)), 0, 2),  # one of them is taken
        (((0, 0b1100),), 1, 2),  # of another type
        (((0, 0b1100),), 0, 3),  # too few
    ):
        assert not free.take_if_free(spots, kind, gpus)
        assert (free.mask, free.total) == before
    assert free.find(0, free.layouts(0, 4)[0], {}) is None
    free.take(((0, 0b1100),))
    assert free.find(0, free.layouts(0, 2)[0], {}) == ((1, 0b1100),)
