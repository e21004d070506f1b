"""Laws of rollouts, which promise nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.lookahead_check import find_schedule_violations
from tessera.formulation.round.lookahead import look_ahead
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import admit, rollout
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.lookahead.rollout import roll_out
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.laws import examples

NOW_S = 1500.0
PLANNED = Policy(deadlines="planned")
ENDLESS = Budget(remaining_s=lambda: math.inf)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw up to eight jobs on two GPU types, which may not all fit."""
    rate = {
        (t, n): draw(st.sampled_from([1.0, 1.5, 2.5])) * n**0.8 for t in (0, 1) for n in (1, 2, 4)
    }
    rows = []
    for j in range(draw(st.integers(1, 8))):
        due_s = draw(st.floats(100, 6000))
        size = draw(st.floats(0.1, 1.0)) * due_s * rate[0, 2]
        rows.append(
            a_job(
                f"j{j}",
                0,
                iterations=size,
                iterations_left=size,
                deadline_s=NOW_S + due_s,
                restart_s=draw(st.sampled_from([0.0, 40.0])),
                weight=float(draw(st.integers(1, 3))),
                requested_gpus=draw(st.sampled_from([1, 2])),
            )
        )
    estimates = [an_estimate(0, t, n, iter_time_s=1 / r) for (t, n), r in rate.items()]
    nodes = some_nodes((0, 1, draw(st.integers(2, 4))), (1, 1, draw(st.integers(1, 4))))
    snapshot = a_snapshot(nodes=nodes, jobs=rows, estimates=estimates, workloads=1, batch=1)
    return replace(snapshot, now_s=NOW_S)


@given(snapshots())
@examples(60)
def test_a_deadline_schedule_breaks_no_rule(snapshot: Snapshot) -> None:
    plan = admit(snapshot, PLANNED, ENDLESS)
    assert find_schedule_violations(snapshot, plan.schedule_segments, plan.admitted) == []


@given(snapshots())
@examples(40)
def test_a_deadline_schedule_never_meets_fewer_deadlines_than_earliest_deadline_first(
    snapshot: Snapshot,
) -> None:
    ahead = look_ahead(*drafts_before_deadlines(snapshot, PLANNED))
    every = np.ones(len(ahead.job), dtype=np.bool_)
    best = roll_out(ahead, snapshot.jobs, ahead.capacity, every, 300.0)
    world = rollout._rollout_problem(ahead, snapshot.jobs, ahead.capacity, every, 300.0)
    by_deadline = np.argsort(ahead.deadline_s, kind="stable")
    first = rollout._followed(world, by_deadline, np.zeros(len(every), np.int64))
    assert ahead.weight[best.met].sum() >= ahead.weight[first.met].sum() * (1 - 1e-9)
