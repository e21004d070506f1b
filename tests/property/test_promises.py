"""Laws of promises, limits and reservations, on single rounds and over many rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.records.reservations import ReservationSpec
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.snapshot import STATES, Nodes, Snapshot
from tessera.simulator.run import Decider, Result
from tessera.simulator.scenario import Scenario
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import (
    a_job,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    some_nodes,
    state_freely,
)
from tests.support.driver import (
    decide_round,
    decision_kinds,
    the_next_round,
    with_avoided_nodes,
    with_quotas,
)
from tests.support.laws import examples, scaled
from tests.support.snapshots import snapshots
from tests.support.worlds import COSTLY, a_scenario, an_arrival, simulate_scenario, some_specs

LAW = examples(60)
FEW = examples(25)

POLICIES = st.builds(
    Policy,
    keep_requests=st.booleans(),
    promise_starts=st.booleans(),
    change_spacing=st.sampled_from([0.0, 4.0]),
    default_run_s=st.sampled_from([200.0, 86_400.0]),
    max_changes=st.sampled_from([-1, 0, 1, 3]),
    defragment_every_rounds=st.sampled_from([0, 1]),
)


@st.composite
def crowded_snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot in any state, with tenants, quotas, queues, avoided nodes and ages."""
    snapshot = draw(snapshots())
    count = len(snapshot.jobs)

    def many(*values: Any) -> Any:
        return np.array(draw(st.lists(st.sampled_from(values), min_size=count, max_size=count)))

    jobs = replace(
        snapshot.jobs,
        tenant=tuple(many("t", "u", "v").tolist()),
        priority=many(1, 2, 3),
        queued_s=many(0.0, 500.0, 900.0),
        since_s=many(600.0, 900.0),
        opportunistic=many(False, True),
        preemptible=many(False, True).astype(np.bool_) & ~snapshot.jobs.guaranteed,
        requested_gpu_type=many(-1, 0),
        pinned_gpu_type=many(False, False, True),
    )
    pairs = draw(
        st.sets(
            st.tuples(st.integers(0, max(0, count - 1)), st.integers(0, len(snapshot.nodes) - 1)),
            max_size=3,
        )
    )
    snapshot = with_avoided_nodes(replace(snapshot, jobs=jobs), *(sorted(pairs) if count else ()))
    if not draw(st.booleans()):
        return snapshot
    types = len(snapshot.gpu_types)
    quotas = {
        name: draw(st.dictionaries(st.integers(-1, types - 1), st.integers(0, 9), max_size=2))
        for name in ("t", "u")
    }
    borrow = {"t": draw(st.integers(-1, 4))}
    return with_quotas(snapshot, quotas, borrow=borrow, keeps=draw(st.sampled_from([[], ["u"]])))


@examples(150)
@given(crowded_snapshots(), POLICIES)
def test_no_snapshot_and_policy_lead_to_decisions_that_break_a_rule(
    snapshot: Snapshot, policy: Policy
) -> None:
    outcome = decide_round(snapshot, policy)
    explained = {d.job for d in outcome.decisions if d.reason is not None}
    changed = (d for d in outcome.decisions if d.gang is None or d.kind is DecisionKind.REPLAN)
    assert explained == {d.job for d in changed}


@examples(150)
@given(crowded_snapshots(), POLICIES)
def test_waiting_jobs_are_marked_must_run_only_with_a_witness_in_which_all_of_them_run(
    snapshot: Snapshot, policy: Policy
) -> None:
    stated = state_round(snapshot, policy)
    active = np.array([STATES[s] in ACTIVE for s in snapshot.jobs.state.tolist()], dtype=np.bool_)
    if np.any(stated.problem.must_run & ~active):
        assert stated.witness is not None
        assert is_answer(stated.problem, stated.witness)


@LAW
@given(crowded_snapshots(), POLICIES)
def test_no_job_is_placed_on_an_avoided_node_nor_a_pinned_one_on_another_type(
    snapshot: Snapshot, policy: Policy
) -> None:
    avoided = set(
        zip(snapshot.avoided_nodes.job.tolist(), snapshot.avoided_nodes.node.tolist(), strict=True)
    )
    for d in decide_round(snapshot, policy).decisions:
        if d.gang is not None:
            assert not avoided & {(d.job, node) for node, _ in d.gang.members}
            wanted = int(snapshot.jobs.requested_gpu_type[d.job])
            assert (
                not (snapshot.jobs.pinned_gpu_type[d.job] and wanted >= 0)
                or d.cell.gpu_type == wanted
            )


# the objective


def optimum(snapshot: Snapshot, policy: Policy) -> int:
    budget = Budget(remaining_s=lambda: math.inf, gap=1e-9)
    solution = make_solver("cp-sat").solve(state_freely(snapshot, policy).problem, budget)
    assert solution.status is SolveStatus.OPTIMAL
    return solution.objective


@FEW
@given(st.integers(0, 2**32), st.sampled_from([0, 1]))
def test_one_node_more_never_lowers_the_optimum(seed: int, kind: int) -> None:
    """The new node has the size of existing ones, so that Cells and rates do not change."""
    snapshot = a_random_snapshot(seed, jobs=5, groups=((0, 2, 4), (1, 1, 8)), max_gpus=8)
    more = some_nodes((0, 2, 4), (1, 1, 8), (kind, 1, (4, 8)[kind]))
    larger = replace(snapshot, nodes=Nodes.from_rows(more))
    assert optimum(larger, Policy()) >= optimum(snapshot, Policy())


@FEW
@given(
    st.integers(0, 2**32),
    st.sampled_from(
        [{}, {"keep_requests": False}, {"promise_starts": False}, {"change_spacing": 0.0}]
    ),
    st.booleans(),
)
def test_a_job_of_weight_zero_displaces_no_other(
    seed: int, options: dict[str, Any], guaranteed: bool
) -> None:
    snapshot = a_random_snapshot(seed, jobs=6, groups=((0, 1, 4), (1, 1, 4)), max_gpus=4)
    light = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    jobs = replace(
        snapshot.jobs, queued_s=light, weight=light, guaranteed=(light == 0) & guaranteed
    )
    rows = [jobs.row(j) for j in range(4)]
    alone = replace(snapshot, jobs=type(jobs).from_rows(rows))
    policy = Policy(**options)
    assert optimum(replace(snapshot, jobs=jobs), policy) == optimum(alone, policy)


# many rounds


def a_run(
    seed: int,
    policy: Policy,
    *,
    rounds: int = 8,
    quotas: dict[str, dict[int, int]] | None = None,
    nodes_fail: bool = False,
    guarantees: bool = True,
    round_s: float = 100.0,
) -> Iterator[tuple[Snapshot, RoundOutcome]]:
    """Yield each round of a random history; no job is launched before the first round."""
    rng = np.random.default_rng(seed)
    snapshot = a_random_snapshot(
        seed, jobs=6, groups=((0, 2, 4), (1, 1, 8)), max_gpus=8, workloads=4
    )

    def arrivals(first: int, count: int) -> list[dict[str, Any]]:
        return [
            a_job(
                f"job-{k}",
                int(rng.integers(4)),
                requested_gpus=int(rng.choice([1, 2, 4])),
                guaranteed=bool(rng.random() < 0.5) and guarantees,
                tenant=str(rng.choice(["t", "u"])),
                iterations_left=float(rng.integers(10, 2000)),
                restart_s=float(rng.choice([0.0, 30.0])),
                weight=float(rng.choice([0.2, 1.0, 5.0])),
                priority=int(rng.integers(1, 4)),
                pinned=bool(rng.random() >= 0.8),
                queued_s=1000.0,
                submit_s=float(k),
            )
            for k in range(first, first + count)
        ]

    snapshot = replace(snapshot, jobs=type(snapshot.jobs).from_rows(arrivals(0, 6)))
    if quotas:
        snapshot = with_quotas(snapshot, quotas)
    for k in range(rounds):
        outcome = decide_round(snapshot, policy)
        yield snapshot, outcome
        snapshot = the_next_round(
            snapshot, outcome, round_s, arrivals(100 * (k + 1), int(rng.integers(0, 4)))
        )
        if nodes_fail:
            up = rng.random(len(snapshot.nodes)) < 0.8
            snapshot = replace(snapshot, nodes=replace(snapshot.nodes, schedulable=up))


def requested_rate(snapshot: Snapshot, job: int) -> float:
    """Return samples/s of the request on the slowest type with an estimate; nodes of a type are alike."""
    e, jobs, size = snapshot.estimates, snapshot.jobs, {0: 4, 1: 8}
    best: dict[int, float] = {}
    for i in range(len(e)):
        kind, gpus = int(e.gpu_type[i]), int(e.gpus[i])
        shape = int(e.nodes[i]) == -(-gpus // size[kind])
        if e.workload[i] == jobs.workload[job] and gpus == jobs.requested_gpus[job] and shape:
            best[kind] = max(best.get(kind, 0.0), 256 / float(e.iter_time_s[i]))
    return min(best.values())


@FEW
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_no_guarantee_is_ever_broken(seed: int, nodes_fail: bool, capped: bool) -> None:
    policy = Policy(max_changes=2 if capped else -1, defragment_every_rounds=2)
    for snapshot, found in a_run(seed, policy, nodes_fail=nodes_fail):
        for d in found.decisions:
            if snapshot.jobs.guaranteed[d.job] and d.job not in found.given_up:
                assert d.kind is not DecisionKind.SUSPEND or nodes_fail
                if d.gang is not None and (not nodes_fail or d.kind is DecisionKind.START):
                    assert d.rate >= requested_rate(snapshot, d.job) * (1 - 1e-9)


QUOTAS = {"t": {-1: 5, 0: 3}, "u": {-1: 4}}


@FEW
@given(st.integers(0, 2**32), st.booleans())
def test_no_quota_is_ever_exceeded(seed: int, keeps: bool) -> None:
    for snapshot, found in a_run(seed, Policy(keep_requests=keeps), quotas=QUOTAS):
        for tenant, limits in QUOTAS.items():
            for kind, quota in limits.items():
                assert charged_gpus(snapshot, found, tenant, kind) <= quota


def charged_gpus(snapshot: Snapshot, found: RoundOutcome, tenant: str, kind: int) -> int:
    """Return the GPUs that a tenant's running guaranteed jobs count against its quota."""
    cells, total = found.problem.cells, 0
    for d in found.decisions:
        mine = snapshot.jobs.guaranteed[d.job] and snapshot.jobs.tenant[d.job] == tenant
        if d.gang is None or not mine or kind not in (-1, d.cell.gpu_type):
            continue
        floor = requested_rate(snapshot, d.job) * (1 - 1e-9)
        least = [
            int(cells.gpus[c])
            for c in range(len(cells))
            if cells.workload[c] == snapshot.jobs.workload[d.job]
            and cells.gpu_type[c] == d.cell.gpu_type
            and cells.rate[c] >= floor
        ]
        total += min([int(snapshot.jobs.requested_gpus[d.job]), *least])
    return total


@FEW
@given(st.integers(0, 2**32), st.integers(0, 3), st.booleans())
def test_never_more_running_jobs_change_than_the_limit(seed: int, cap: int, keeps: bool) -> None:
    policy = Policy(max_changes=cap, keep_requests=keeps, defragment_every_rounds=1)
    for snapshot, found in a_run(seed, policy):
        changed = [
            d
            for d in found.decisions
            if snapshot.jobs.current_gpus[d.job] > 0 and d.kind is not DecisionKind.KEEP
        ]
        assert len(changed) <= cap


@FEW
@given(st.integers(0, 2**32), st.sampled_from([2.0, 9.0]), st.booleans())
def test_no_job_is_touched_before_it_has_settled(seed: int, spacing: float, keeps: bool) -> None:
    policy = Policy(change_spacing=spacing, keep_requests=keeps, defragment_every_rounds=1)
    for snapshot, found in a_run(seed, policy):
        for d in found.decisions:
            since_s = float(snapshot.jobs.since_s[d.job])
            settles_s = since_s + (spacing + 1) * float(snapshot.jobs.restart_s[d.job])
            if snapshot.jobs.current_gpus[d.job] > 0 and snapshot.now_s < settles_s - 1e-3:
                assert d.kind is DecisionKind.KEEP


@FEW
@given(st.integers(0, 2**32), st.booleans())
def test_no_job_loses_what_it_asked_for(seed: int, is_limited: bool) -> None:
    policy = Policy(max_changes=2 if is_limited else -1, defragment_every_rounds=2)
    for snapshot, outcome in a_run(seed, policy, guarantees=False):
        jobs = snapshot.jobs
        for d in outcome.decisions:
            least = min(int(jobs.current_gpus[d.job]), int(jobs.requested_gpus[d.job]))
            assert d.cell.gpus >= least


@FEW
@given(st.integers(0, 2**32), st.booleans())
def test_no_job_starves_behind_a_stream_of_jobs_of_higher_value(seed: int, keeps: bool) -> None:
    """Two short jobs arrive in each round, and at most one can run at a time."""
    rng = np.random.default_rng(seed)

    def some(round_number: int) -> list[dict[str, Any]]:
        return [
            a_job(
                f"short-{round_number}-{k}",
                iterations_left=float(rng.integers(50, 250)),
                requested_gpus=4,
                queued_s=999.0 + 100.0 * round_number,
            )
            for k in range(2)
        ]

    long = a_job("long", iterations_left=2000.0, requested_gpus=4, queued_s=1000.0)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)),
        estimates=[an_estimate(gpus=4, iter_time_s=1.0)],
        jobs=[*some(0), long],
    )
    for round_number in range(1, 12):
        outcome = decide_round(snapshot, Policy(keep_requests=keeps))
        if decision_kinds(snapshot, outcome)["long"] is DecisionKind.START:
            return
        snapshot = the_next_round(snapshot, outcome, 100.0, some(round_number))
    raise AssertionError("the job still waits after eleven rounds")


GPUS = 24
RESERVATIONS = (
    ReservationSpec(name="r", start_s=4000, end_s=8000, gpu_type="a100", gpus=10, tenant="a"),
    ReservationSpec(name="m", start_s=6000.0, end_s=7000.0, nodes=("a100-1",), maintenance=True),
    ReservationSpec(
        name="n", start_s=5050.0, end_s=6550.0, nodes=("a100-0",), label_key="k", label_value="v"
    ),
)


def a_random_scenario(seed: int) -> Scenario:
    """Return jobs of two tenants on six nodes, under more load than these can bear."""
    rng = np.random.default_rng(seed)
    arrivals = [
        an_arrival(
            f"j{i}",
            float(at_s),
            iterations=int(rng.integers(2_000, 20_000)),
            requested_gpus=int(rng.choice([1, 2, 4])),
            tenant=str(rng.choice(["a", "b"])),
            pinned=bool(rng.random() >= 0.8),
            guaranteed=bool(rng.random() < 0.2),
            labels={"k": "v"} if rng.random() < 0.3 else {},
        )
        for i, at_s in enumerate(np.sort(rng.uniform(0, 9_000, 40)))
    ]
    scenario = a_scenario(*arrivals, nodes=some_specs(("a100", 6, 4)))
    return replace(scenario, reservations=RESERVATIONS)


def find_trespasses(scenario: Scenario, result: Result) -> list[str]:
    """Return the times at which jobs had GPUs that a window had for others."""
    found = []
    serves = [
        {
            j
            for j, one in enumerate(scenario.arrivals)
            if r.serves((one.spec.tenant,), one.spec.labels)
        }
        for r in RESERVATIONS
    ]
    moments = sorted({t for s in result.segments for t in (s.start_s, s.end_s)})
    for at_s in moments:
        now = [s for s in result.segments if s.start_s <= at_s < s.end_s]
        away = sum(4 for r in RESERVATIONS if r.maintenance and r.start_s <= at_s < r.end_s)
        for r, own in zip(RESERVATIONS, serves, strict=True):
            if not r.start_s <= at_s < r.end_s:
                continue
            others = [s for s in now if s.job not in own]
            used = sum(len(gpus) for s in others for _, gpus in s.members)
            on = {result.nodes[node] for s in others for node, _ in s.members} & set(r.nodes)
            if on or (r.gpus and used > GPUS - away - r.gpus):
                found.append(f"{r.name} at {at_s}: {used} GPUs, {on}")
    return found


@pytest.mark.parametrize(
    "options",
    [
        RoundOptions(solver="greedy"),
        RoundOptions(solver="cp-sat"),
        RoundOptions(solver="pricing"),
        RoundOptions(solver="greedy", keep_requests=False),
        *(RoundOptions(scheduler=name) for name in ("fcfs", "gavel", "sia", "arena")),
    ],
    ids=lambda options: options.scheduler or f"{options.solver}{options.keep_requests}",
)
@pytest.mark.parametrize("seed", range(scaled(2)))
def test_no_job_uses_gpus_during_a_window_that_does_not_serve_it(
    seed: int, options: RoundOptions
) -> None:
    scenario = a_random_scenario(seed)
    result = simulate_scenario(
        scenario,
        decide=Decider(options, work=0.02),
        overheads=COSTLY,
        on_events=True,
        spacing_s=None if options.scheduler else 60.0,
    )
    assert result.refused == 0
    assert find_trespasses(scenario, result) == []
    assert np.isfinite(result.end_s).all()


def test_rounds_without_the_reservations_would_use_the_gpus() -> None:
    scenario = a_random_scenario(0)
    result = simulate_scenario(replace(scenario, reservations=()), overheads=COSTLY)
    assert find_trespasses(scenario, result)
