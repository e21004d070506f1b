"""One suite for two stores: after the same script, rounds see the same in PostgreSQL and a world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.codec import encode
from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.proofs import NO_PROOF
from tessera.formulation.base.errors import (
    DeadlineTooShort,
    NotFound,
    RequestIdReused,
    RoundSuperseded,
)
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.records.store import Request
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.ports.rounds import Rounds
from tessera.service.server.rounds.loop import RoundLoop
from tessera.simulator.hazards import Failure
from tessera.simulator.overheads import Overheads
from tessera.simulator.scenario import Scenario
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions
from tests.support.proofs import a_round_proof
from tests.support.stored_cluster import (
    a_planned_start,
    a_round,
    a_segment,
    a_summary,
    plan_of,
    segments_of,
    wait,
)
from tests.support.stores import (
    PASS_S,
    C,
    InMemory,
    InPostgres,
    decide,
    decision_rows,
    make_both_stores,
    view,
)
from tests.support.worlds import (
    FCFS,
    GREEDY,
    ILP,
    StoppedClock,
    a_profile,
    a_scenario,
    an_arrival,
    run_decision,
    some_specs,
)

OFTEN = Overheads(save_s=0.0, load_s=0.0, search_s={1: 0.0}, checkpoint_every_s=1.0)
"""Checkpoints are taken every second, because agents never report progress that is lost later."""


GIB = 2**30

UNPLANNED_GREEDY = replace(GREEDY, promise_starts=False)
UNPLANNED_ILP = replace(ILP, promise_starts=False)
MYOPIC = replace(UNPLANNED_ILP, deadlines="myopic")
"""Starts that are planned, and looking ahead, would depend on the exact time. The stores do not share it
to the second."""


def a_script(*, many_resources: bool = False) -> tuple[Scenario, list[Failure]]:
    """Return arrivals at every step, on a cluster too small for all of them, and node failures.

    With ``many_resources``, jobs need CPU cores and host memory, of which the nodes of one type have
    too little for some Cells.
    """
    work = 41_300
    profiles = [
        a_profile(n, 1.0 / n**0.8, gpu_type=kind, pipeline_degree=degree)
        for kind in ("a100", "v100")
        for n in (1, 2, 4)
        for degree in (1, 2)[: 1 + (n > 1)]
    ] + [a_profile(4, 0.5, nodes=2), a_profile(2, math.inf, nodes=2, gpu_type="v100")]
    arrivals = [
        an_arrival(
            f"job-{i}",
            PASS_S * (i // 3),
            iterations=int(work * (0.5 + 0.75 * (i % 4))),
            requested_gpus=(4, 1, 2, 4)[i % 4],
            requested_gpu_type=("", "a100", "v100")[i % 3],
            tenant=("research", "product", "guest")[i % 3],
            priority=1 + i % 2,
            weight=1.0 + i % 3,
            guaranteed=i % 5 == 0,
            pinned=i % 4 == 0,
            avoid_nodes=("v100-1", "a100-0") if i == 4 else (),
            allowed_gpu_types=("v100",) if i in (8, 9) else (),
            node_selector="zone in (0, 2)" if i in (6, 13) else "",
            preferred_labels="zone=1" if i % 4 == 0 else "",
            deadline_s=PASS_S * (0.5 + 2 * (i % 3)) if i % 2 else math.inf,
            restart_s=0.0,
        )
        for i in range(15)
    ]
    tenants = [
        TenantSpec(name="research", weight=2.0, quotas={"a100": 4, "": 2}),
        TenantSpec(name="product", borrow_gpus=3, keeps_idle_quota=True, quotas={"v100": 2}),
    ]
    failures = [
        Failure(node="a100-1", down_s=2 * PASS_S, up_s=4 * PASS_S),
        Failure(node="v100-0", down_s=3 * PASS_S, up_s=5 * PASS_S),
    ]
    nodes = [
        replace(node, labels={"zone": node.name[-1]})
        for node in some_specs(("v100", 2, 2), ("a100", 2, 4))
    ]
    if many_resources:
        nodes = [replace(n, cpus=9, host_bytes=7 * GIB) if n.gpus == 4 else n for n in nodes]
        profiles = [
            replace(p, cpus=2 * p.cell.gpus, host_bytes=p.cell.gpus * p.cell.pipeline_degree * GIB)
            for p in profiles
        ]
    scenario = a_scenario(
        *arrivals,
        nodes=nodes,
        profiles=profiles,
        tenants=tenants,
        types=("v100", "a100"),
    )
    return scenario, failures


@pytest.mark.parametrize(
    ("policies", "many_resources"),
    [
        ((UNPLANNED_GREEDY,), False),
        ((replace(UNPLANNED_ILP, deadlines="ignore"), MYOPIC), False),
        ((FCFS, UNPLANNED_ILP, UNPLANNED_GREEDY), False),
        ((UNPLANNED_GREEDY, replace(UNPLANNED_ILP, deadlines="ignore")), True),
    ],
    ids=["greedy", "ilp and deadlines", "by turns", "many resources"],
)
def test_rounds_see_and_decide_the_same_in_both_stores(
    store: Store,
    database: Database,
    policies: tuple[RoundOptions, ...],
    many_resources: bool,
) -> None:
    scenario, failures = a_script(many_resources=many_resources)
    memory, postgres = make_both_stores(store, database, scenario, failures, OFTEN)
    kinds: set[str] = set()
    for step in range(9):
        assert view(postgres.rounds.snapshot(C)) == view(memory.rounds.snapshot(C)), step
        options = policies[step % len(policies)]
        records = [decide(stored, options) for stored in (memory, postgres)]
        assert decision_rows(records[1]) == decision_rows(records[0]), step
        assert records[1].summary.number == records[0].summary.number == step + 1
        assert records[1].summary.running == records[0].summary.running
        kinds |= {d.kind for d in records[0].decisions}
        assert view(postgres.rounds.snapshot(C)) == view(memory.rounds.snapshot(C)), step
        memory.pass_time()
        postgres.pass_time()
    assert kinds >= {DecisionKind(name) for name in ("start", "keep", "wait", "resize", "retype")}
    ends = {s.ended_by for s in memory.world.segments}
    assert ends >= {"finish", "failure"}, ends


def test_tenants_have_used_the_same_in_both_stores(store: Store, database: Database) -> None:
    scenario, failures = a_script(many_resources=True)
    endless = [  # PostgreSQL hears of ends only after each step
        one._replace(spec=replace(one.spec, iterations=10**9)) for one in scenario.arrivals
    ]
    scenario = replace(scenario, arrivals=endless)
    memory, postgres = make_both_stores(store, database, scenario, failures, OFTEN)
    options = replace(
        UNPLANNED_GREEDY,
        fair_share="drf",
        fair_half_life_s=1.5 * PASS_S,
        keep_requests=False,
        change_spacing=0.0,
    )
    memory.world.store.count_use(options.fair_half_life_s)
    suspended = 0
    for step in range(7):
        records = [decide(stored, options) for stored in (memory, postgres)]
        suspended += records[0].summary.suspended
        assert decision_rows(records[1]) == decision_rows(records[0]), step
        memory.pass_time()
        postgres.pass_time()
        ours, theirs = (
            stored.rounds.snapshot(C, options.fair_half_life_s).decayed_use
            for stored in (memory, postgres)
        )
        assert (theirs.tenant, theirs.resource.tolist()) == (ours.tenant, ours.resource.tolist())
        assert theirs.amount.tolist() == pytest.approx(ours.amount.tolist(), rel=0.01, abs=1e-3)
    assert suspended > 0
    assert {-1, 0, 1} <= set(ours.resource.tolist())
    loop = RoundLoop(store, StoppedClock())
    for number in (3, 7):
        stored_round = store.round_snapshot(C, number)
        assert stored_round.use_half_life_s == options.fair_half_life_s
        assert len(stored_round.decayed_use) > 0
        _, same = loop.replay(
            C, number, None, remaining_s=lambda: math.inf, cancelled=lambda: False
        )
        assert same


def test_a_job_that_lost_its_node_waits_like_any_other(store: Store, database: Database) -> None:
    gone = [Failure(node="a100-1", down_s=PASS_S, up_s=2 * PASS_S)]
    both_stores = make_both_stores(
        store, database, a_scenario(an_arrival("a", iterations=50_000, restart_s=0.0)), gone, OFTEN
    )
    for stored in both_stores:
        snapshot = stored.rounds.snapshot(C)
        started = run_decision(snapshot, "a", [("a100-1", [2])])._replace(opportunistic=True)
        stored.rounds.commit(a_round(snapshot, started))
        stored.settle()
        assert stored.rounds.snapshot(C).jobs.opportunistic.tolist() == [True]
    for stored in both_stores:
        stored.pass_time()
    memory, postgres = (stored.rounds.snapshot(C) for stored in both_stores)
    assert view(postgres) == view(memory)
    assert (memory.jobs.opportunistic.tolist(), memory.nodes.schedulable.tolist()) == (
        [False],
        [True, False],
    )


# the contract of both stores with the round loop


@pytest.fixture(params=["memory", "postgres"])
def rounds(request: pytest.FixtureRequest) -> Rounds:
    """Return a store with three waiting jobs."""
    scenario = a_scenario(*(an_arrival(name, deadline_s=1e9) for name in "abc"))
    if request.param == "memory":
        return InMemory(World(scenario, overheads=OFTEN)).rounds
    database: Database = request.getfixturevalue("database")
    world = World(scenario, overheads=OFTEN)
    world.advance(0.0)
    return InPostgres(Store(database), database, world, scenario).rounds


def test_an_overtaken_round_changes_nothing(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    rounds.commit(a_round(snapshot))
    with pytest.raises(RoundSuperseded, match="clusters/simulated/rounds/1"):
        rounds.commit(a_round(snapshot))
    assert rounds.snapshot(C).round_number == 2


def test_a_request_is_committed_once(rounds: Rounds) -> None:
    request = Request(id="r", method="m", digest="d")
    snapshot = rounds.begin_round(C, request)
    assert isinstance(snapshot, Snapshot)
    first = rounds.commit(a_round(snapshot, request=request))
    again = rounds.begin_round(C, request)
    assert isinstance(again, RoundRecord)
    assert again.summary.number == first.summary.number == 1
    assert rounds.commit(a_round(rounds.snapshot(C), request=request)).summary.number == 1
    assert rounds.snapshot(C).round_number == 2
    with pytest.raises(RequestIdReused):
        rounds.begin_round(C, replace(request, digest="other"))


def test_a_late_round_changes_nothing(rounds: Rounds) -> None:
    with pytest.raises(DeadlineTooShort):
        rounds.commit(a_round(rounds.snapshot(C)), lambda: False)
    assert rounds.snapshot(C).round_number == 1


def test_a_refused_round_has_a_number_and_keeps_the_previous_prices(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    rounds.commit(a_round(snapshot, summary=a_summary(snapshot, prices={"gpus/a100": 0.5})))
    snapshot = rounds.snapshot(C)
    wrong = a_summary(snapshot, outcome="refused", prices={"gpus/a100": 9.0})
    record = rounds.commit(a_round(snapshot, summary=wrong))
    assert (record.summary.outcome, record.summary.number) == ("refused", 2)
    after = rounds.snapshot(C)
    assert (after.round_number, after.prices.price.tolist()) == (3, [0.5])


def admit_decisions(
    snapshot: Snapshot, *jobs: str, kind: DecisionKind = DecisionKind.WAIT
) -> list[Decision]:
    """Return waiting decisions for all jobs, with promised deadlines for the named ones."""
    return [
        wait(snapshot, name, kind)._replace(admitted=name in jobs) for name in snapshot.jobs.name
    ]


def test_certificates_belong_to_promised_jobs_and_are_ordered_by_job(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    soon, later = (
        a_segment(start_s=1e9, end_s=2e9),
        a_segment(start_s=3e9, end_s=4e9, gpus=2),
    )
    schedule_segments = segments_of(snapshot, b=[soon, later], a=[later], c=[soon])
    rounds.commit(
        a_round(
            snapshot,
            decisions=tuple(admit_decisions(snapshot, "a", "b")),
            schedule_segments=schedule_segments,
        )
    )
    after = rounds.snapshot(C)
    assert after.jobs.admitted.tolist() == [True, True, False]
    assert after.schedule_segments.job.tolist() == [0, 1, 1]
    assert after.schedule_segments.start_s.tolist() == [3e9, 1e9, 3e9]
    assert after.schedule_segments.gpus.tolist() == [2, 1, 2]
    rounds.commit(
        a_round(
            after,
            decisions=tuple(admit_decisions(after, "a")),
            schedule_segments=after.schedule_segments,
        )
    )
    after = rounds.snapshot(C)
    assert (after.jobs.admitted.tolist(), after.schedule_segments.job.tolist()) == (
        [True, False, False],
        [0],
    )


def test_a_rejected_job_has_ended_and_is_promised_nothing(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    rejected = admit_decisions(snapshot, "a", "b", "c", kind=DecisionKind.REJECT)[0]
    others = admit_decisions(snapshot, "b")[1:]
    schedule_segments = segments_of(snapshot, a=[a_segment()], b=[a_segment()])
    rounds.commit(
        a_round(snapshot, decisions=(rejected, *others), schedule_segments=schedule_segments)
    )
    after = rounds.snapshot(C)
    assert after.jobs.name == ("b", "c")
    assert after.schedule_segments.job.tolist() == [0]


def planned_jobs(snapshot: Snapshot) -> dict[str, list[tuple[str, int]]]:
    """Return the nodes and GPUs of planned starts by the names of their jobs."""
    starts, nodes = snapshot.planned_starts, snapshot.planned_nodes
    return {
        snapshot.jobs.name[job]: [
            (snapshot.nodes.name[node], gpus)
            for start, node, gpus in zip(nodes.start, nodes.node, nodes.gpus, strict=True)
            if start == row
        ]
        for row, job in enumerate(starts.job)
    }


def test_planned_and_promised_starts_survive_rounds_that_plan_nothing(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    near_start = a_planned_start(start_s=3e9 + 1 / 3, end_s=4e9, nodes=(("a100-0", 4),))
    far_start = a_planned_start(start_s=5e9, end_s=math.inf, nodes=(("a100-0", 4), ("a100-1", 4)))
    plan = plan_of(snapshot, {"a": 3.5e9, "c": 5e9 + 1 / 3}, c=far_start, b=near_start)
    decisions = tuple(wait(snapshot, name) for name in "abc")
    rounds.commit(a_round(snapshot, *decisions, plan=plan))
    snapshot_after = rounds.snapshot(C)
    assert planned_jobs(snapshot_after) == {
        "b": [("a100-0", 4)],
        "c": [("a100-0", 4), ("a100-1", 4)],
    }
    assert snapshot_after.planned_starts.start_s.tolist() == [3e9 + 1 / 3, 5e9]
    assert snapshot_after.planned_starts.end_s.tolist() == [4e9, math.inf]
    starts = snapshot_after.planned_starts
    assert [snapshot_after.cell(starts.key_at(row)) for row in (0, 1)] == [
        near_start.cell,
        far_start.cell,
    ]
    assert snapshot_after.jobs.start_by_s.tolist() == [3.5e9, math.inf, 5e9 + 1 / 3]
    rounds.commit(a_round(snapshot_after, *(wait(snapshot_after, name) for name in "abc")))
    snapshot_again = rounds.snapshot(C)
    assert snapshot_again.planned_starts.equals(snapshot_after.planned_starts)
    assert snapshot_again.planned_nodes.equals(snapshot_after.planned_nodes)
    assert snapshot_again.jobs.start_by_s.tolist() == snapshot_after.jobs.start_by_s.tolist()
    empty_plan = plan_of(snapshot_again, {})
    rounds.commit(
        a_round(snapshot_again, *(wait(snapshot_again, name) for name in "abc"), plan=empty_plan)
    )
    final_snapshot = rounds.snapshot(C)
    assert (planned_jobs(final_snapshot), final_snapshot.jobs.start_by_s.tolist()) == (
        {},
        [math.inf] * 3,
    )


def test_a_job_that_starts_or_is_rejected_loses_its_planned_and_promised_start(
    rounds: Rounds,
) -> None:
    snapshot = rounds.snapshot(C)
    starts = {
        name: a_planned_start(start_s=3e9, end_s=4e9, nodes=(("a100-1", 1),)) for name in "abc"
    }
    plan = plan_of(snapshot, dict.fromkeys("abc", 3e9), **starts)
    rounds.commit(a_round(snapshot, *(wait(snapshot, name) for name in "abc"), plan=plan))
    middle = rounds.snapshot(C)
    assert planned_jobs(middle) == {name: [("a100-1", 1)] for name in "abc"}
    rejection = wait(middle, "b", DecisionKind.REJECT)
    start = run_decision(middle, "a", [("a100-0", [0])])
    rounds.commit(a_round(middle, start, rejection, wait(middle, "c")))
    snapshot_after = rounds.snapshot(C)
    assert snapshot_after.jobs.name == ("a", "c")
    assert planned_jobs(snapshot_after) == {"c": [("a100-1", 1)]}
    assert snapshot_after.jobs.start_by_s.tolist() == [math.inf, 3e9]


def test_a_suspended_job_may_be_planned_again_in_the_same_round(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    rounds.commit(a_round(snapshot, run_decision(snapshot, "a", [("a100-0", [0])])))
    snapshot = rounds.snapshot(C)
    suspension = wait(snapshot, "a", DecisionKind.SUSPEND)
    plan = plan_of(snapshot, {"a": 3e9}, a=a_planned_start(start_s=3e9, end_s=4e9))
    rounds.commit(a_round(snapshot, suspension, plan=plan))
    snapshot_after = rounds.snapshot(C)
    assert planned_jobs(snapshot_after) == {"a": [("a100-0", 1)]}
    assert snapshot_after.jobs.start_by_s.tolist() == [3e9, math.inf, math.inf]


def test_rounds_are_stored_with_the_snapshot_they_were_decided_on(rounds: Rounds) -> None:
    snapshot = rounds.snapshot(C)
    record = rounds.commit(a_round(snapshot))
    assert rounds.get_round(C, 1).summary.number == record.summary.number
    assert encode(rounds.round_snapshot(C, 1)) == encode(snapshot)


def test_rounds_keep_their_proof(rounds: Rounds) -> None:
    rounds.commit(a_round(rounds.snapshot(C)))
    assert rounds.round_proof(C, 1) == NO_PROOF
    proof = a_round_proof()
    rounds.commit(a_round(rounds.snapshot(C), proof=proof))
    assert rounds.round_proof(C, 2) == proof


@pytest.mark.parametrize(
    "call",
    [
        lambda r: r.snapshot("nowhere"),
        lambda r: r.begin_round("nowhere", None),
        lambda r: r.get_round(C, 1),
        lambda r: r.round_snapshot(C, 7),
        lambda r: r.round_proof(C, 7),
        lambda r: r.commit(a_round(replace(r.snapshot(C), cluster="nowhere"))),
    ],
)
def test_missing_clusters_and_rounds_are_not_found(
    rounds: Rounds, call: Callable[[Rounds], object]
) -> None:
    with pytest.raises(NotFound):
        call(rounds)
