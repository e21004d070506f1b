"""Laws of a whole round: any snapshot, however torn, gives decisions that pass the checker."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.check import score
from tessera.formulation.codec import decode, encode
from tessera.formulation.decisions import CHANGES_GPUS, DecisionKind
from tessera.formulation.lifecycle import ACTIVE, JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.rates import expected_rate, unit_rate
from tessera.formulation.snapshot import STATES, Allocations, Snapshot
from tessera.formulation.values import Hold
from tessera.solvers.base import Budget
from tessera.solvers.registry import solver
from tessera.solvers.rounds.plan import Outcome, plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.laws import examples


def budget(seed: int = 0, **work: float) -> Budget:
    return Budget(remaining_s=lambda: math.inf, seed=seed, work={"cp-sat": 0.1, "lp": 9.0, **work})


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a small cluster in any condition: running, guaranteed, pinned jobs; draining nodes; holes."""
    nodes = some_nodes((0, draw(st.integers(1, 4)), 4), (1, draw(st.integers(0, 2)), 8))
    speed = st.sampled_from([0.5, 1.0, 1.3, 2.0, math.inf])
    estimates = []
    for w, (t, size), gpus, degree in itertools.product(
        range(2), ((0, 4), (1, 8)), (1, 2, 3, 4, 8, 16), (1, 2)
    ):
        if draw(st.booleans()):
            seconds = draw(speed) / gpus
            estimates.append(
                an_estimate(w, t, gpus, -(-gpus // size), degree=degree, iter_time_s=seconds)
            )
    free = {n: list(range(node["gpus"])) for n, node in enumerate(nodes)}
    jobs: list[dict[str, Any]] = []
    gangs: dict[int, Gang] = {}
    for j in range(draw(st.integers(0, 7))):
        job = a_job(
            f"j{j}", draw(st.integers(0, 1)), requested_gpus=draw(st.sampled_from([1, 2, 4, 8])),
            restart_s=draw(st.sampled_from([0.0, 60.0, 600.0])),
            weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
            guaranteed=draw(st.booleans()), movable=draw(st.booleans()),
            iterations_left=draw(st.sampled_from([10.0, 1e5])),
            state=draw(st.sampled_from([JobState.QUEUED, JobState.QUEUED, JobState.HELD, JobState.STOPPING])),
        )  # fmt: skip
        runs_on = [e for e in estimates if e["workload"] == job["workload"]]
        if len(runs_on) > 0 and draw(st.booleans()):
            cell = draw(st.sampled_from(runs_on))
            share = cell["gpus"] // cell["nodes"]
            place = [
                n for n, node in enumerate(nodes)
                if node["gpu_type"] == cell["gpu_type"] and len(free[n]) >= share
            ][: cell["nodes"]]  # fmt: skip
            if len(place) == cell["nodes"] and share * cell["nodes"] == cell["gpus"]:
                taken = {n: tuple(sorted(free[n].pop(0) for _ in range(share))) for n in place}
                gangs[j] = Gang(members=tuple(taken.items()))
                job |= a_job(
                    f"j{j}", state=draw(st.sampled_from([JobState.RUNNING, JobState.STARTING])),
                    cell=(cell["gpu_type"], cell["gpus"], cell["pipeline_degree"]),
                ) | {k: job[k] for k in ("workload", "guaranteed", "movable", "restart_s", "weight",
                                         "iterations_left", "requested_gpus")}  # fmt: skip
        jobs.append(job)
    for node in nodes:
        node["schedulable"] = draw(st.integers(0, 4)) > 0
    snapshot = a_snapshot(
        nodes=nodes, jobs=jobs, estimates=estimates, gangs=gangs, workloads=2,
        hold=draw(st.sampled_from([Hold.HELD, Hold.RESERVED])),
        round_number=draw(st.sampled_from([1, 12])),
    )  # fmt: skip
    leaving = [  # GPUs that jobs which have ended are still giving back
        {"job": -1, "node": n, "gpu": gpus[0], "hold": int(Hold.RELEASING), "generation": 1}
        for n, gpus in free.items()
        if len(gpus) > 0 and draw(st.booleans())
    ]
    rows = [snapshot.allocations.row(i) for i in range(len(snapshot.allocations))]
    return replace(snapshot, allocations=Allocations.from_rows(rows + leaving))


def outcome(snapshot: Snapshot, name: str = "portfolio", **options: float) -> Outcome:
    return plan_round(snapshot, Policy(), solver(name), budget(**options))  # type: ignore[arg-type]


LAW = examples(120)


@LAW
@given(snapshots())
def test_any_snapshot_gives_decisions_that_break_no_rule(snapshot: Snapshot) -> None:
    found = outcome(snapshot)
    assert found.violations == ()
    assert [d.job for d in found.decisions] == list(range(len(snapshot.jobs)))
    assert all((d.gang is None) == (d.reason is not None) for d in found.decisions)


@LAW
@given(snapshots())
def test_the_objective_and_the_placed_score_are_never_below_greedys(snapshot: Snapshot) -> None:
    best, greedy = outcome(snapshot), outcome(snapshot, "greedy")
    assert best.solution.bound >= best.solution.objective
    assert best.placed_score >= greedy.placed_score - 1e-9


@LAW
@given(snapshots())
def test_the_same_snapshot_gives_the_same_decisions_also_after_a_trip_through_json(
    snapshot: Snapshot,
) -> None:
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert outcome(snapshot).decisions == outcome(again).decisions


@LAW
@given(snapshots())
def test_a_launched_guaranteed_job_runs_on_unless_its_promise_is_given_up(
    snapshot: Snapshot,
) -> None:
    found = outcome(snapshot)
    for decision in found.decisions:
        promised = snapshot.jobs.guaranteed[decision.job] and (
            STATES[int(snapshot.jobs.state[decision.job])] in ACTIVE
        )
        if promised and decision.kind is DecisionKind.SUSPEND:
            assert decision.job in found.given_up or not found.problem.columns_of(decision.job)


@LAW
@given(snapshots())
def test_what_changes_pays_its_restart_and_what_stays_pays_nothing(snapshot: Snapshot) -> None:
    found = outcome(snapshot)
    problem, choice = found.problem, found.solution.choice
    for decision in found.decisions:
        expected = 0.0
        if decision.kind in CHANGES_GPUS:
            unit = unit_rate(snapshot, problem.cells)[decision.job]
            likely_rate = expected_rate(snapshot, problem.cells, snapshot.jobs.weight)[decision.job]
            rate = problem.cells.rate[problem.cell[choice[decision.job]]]
            left_s = snapshot.jobs.iterations_left[decision.job] * 256 / likely_rate
            share = min(0.9, snapshot.jobs.restart_s[decision.job] / min(3600.0, left_s))
            expected = snapshot.jobs.weight[decision.job] * rate / unit * share
        assert decision.restart_price == pytest.approx(expected, abs=2e-6)


@LAW
@given(snapshots(), st.floats(1.0, 8.0))
def test_weights_scale_the_objective_and_nothing_else(snapshot: Snapshot, factor: float) -> None:
    power = 2.0 ** round(math.log2(factor))  # exact in floating point
    heavier = replace(snapshot, jobs=replace(snapshot.jobs, weight=snapshot.jobs.weight * power))
    one, other = outcome(snapshot), outcome(heavier)
    assert np.isclose(
        other.solution.objective, one.solution.objective * power, rtol=1e-3, atol=10 * power
    )
    assert score(other.problem, other.solution) >= score(one.problem, one.solution) - 1e-9
