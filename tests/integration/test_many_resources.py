"""CPU cores and host memory in PostgreSQL: stated, found, given to jobs, and never given twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.decayed_use import CPU_CORES, HOST_MEMORY
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.demand import NOT_STATED
from tessera.formulation.errors import InvalidInput, NotAllowed
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.solvers.base import Budget
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOptions, plan_round
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    do,
    execute,
    job,
    run,
    start,
    submit,
    wait,
)

GIB = 2**30


def state(store: PostgresStore, cpus: int | None, host_bytes: int | None = None) -> None:
    """State the CPU cores and the host memory of a100-0."""
    node = NodeSpec(name="a100-0", gpu_type="a100", gpus=4, cpus=cpus, host_bytes=host_bytes)
    do(store, lambda w: w.upsert_nodes(C, [node]))


def find(store: PostgresStore, cpus: int | None, host_bytes: int | None = None) -> None:
    """Let the agent of a100-0 start again and report what it found."""
    node = NodeSpec(name="a100-0", gpu_type="a100", gpus=4, cpus=cpus, host_bytes=host_bytes)
    store.hello(C, "agent-a100-0", "first", [node])


def estimate(store: PostgresStore, *records: EstimateRecord) -> None:
    do(store, lambda w: w.upsert_estimates(C, records))


def needs(gpus: int, cpus: int, host_bytes: int = 0) -> EstimateRecord:
    return replace(a_record(gpus, gpu_type="a100", nodes=1), cpus=cpus, host_bytes=host_bytes)


def seen(store: PostgresStore) -> tuple[Sequence[int], Sequence[int]]:
    """Return the cores and the host memory of the nodes as a round sees them."""
    nodes = store.snapshot(C).nodes
    return nodes.cpus.tolist(), nodes.host_bytes.tolist()


@pytest.fixture
def cluster(store: PostgresStore) -> PostgresStore:
    """Return a store with nodes a100-0 and a100-1 of 4 GPUs, of which a100-0 has 8 cores."""
    a_cluster(store)
    state(store, 8, 64 * GIB)
    return store


# what is stated and found


def test_what_nodes_state_is_stored_and_seen_by_rounds(cluster: PostgresStore) -> None:
    specs = [node.spec for node in cluster.list_nodes(C, "", 10)]
    assert [(s.cpus, s.host_bytes) for s in specs] == [(8, 64 * GIB), (None, None)]
    assert seen(cluster) == ([8, NOT_STATED], [64 * GIB, NOT_STATED])
    state(cluster, None)
    assert seen(cluster) == ([NOT_STATED, NOT_STATED], [NOT_STATED, NOT_STATED])


def test_a_change_of_cores_alone_makes_a_new_version(cluster: PostgresStore) -> None:
    before = cluster.list_nodes(C, "", 1)[0].version
    state(cluster, 8, 64 * GIB)
    assert cluster.list_nodes(C, "", 1)[0].version == before
    state(cluster, 9, 64 * GIB)
    assert cluster.list_nodes(C, "", 1)[0].version == before + 1


def test_what_an_agent_finds_counts_where_nothing_is_stated(cluster: PostgresStore) -> None:
    find(cluster, 16, 128 * GIB)
    assert seen(cluster)[0][0] == 8
    state(cluster, None, 64 * GIB)  # again, as a file that states no cores does
    assert (seen(cluster)[0][0], seen(cluster)[1][0]) == (16, 64 * GIB)
    record = cluster.list_nodes(C, "", 1)[0]
    assert (record.spec.cpus, record.found_cpus, record.found_host_bytes) == (None, 16, 128 * GIB)


def test_what_is_found_later_is_taken_up_once_no_job_holds_gpus(cluster: PostgresStore) -> None:
    state(cluster, None)
    estimate(cluster, needs(1, 6))
    submit(cluster, a_spec("a"))
    run(cluster, a=[("a100-0", [0])])
    find(cluster, 4)  # fewer than the job needs
    assert seen(cluster)[0][0] == NOT_STATED
    apply_event(cluster, "a", JobEvent.CANCEL)
    agents_report(cluster)
    find(cluster, 4)
    assert seen(cluster)[0][0] == 4


def test_demands_of_estimates_are_stored_and_seen_by_rounds(cluster: PostgresStore) -> None:
    estimate(cluster, needs(2, 6, 3 * GIB))
    stored = cluster.list_estimates(C, "", "", 0, 0, 10)[0]
    (record,) = (e for e in stored if e.cell.gpus == 2)
    assert (record.cpus, record.host_bytes) == (6, 3 * GIB)
    submit(cluster, a_spec("a"))
    e = cluster.snapshot(C).estimates
    rows = [(g, c, h) for g, c, h in zip(e.gpus, e.cpus, e.host_bytes, strict=True) if c or h]
    assert rows == [(2, 6, 3 * GIB)]


# what jobs are given


def test_the_use_of_a_job_has_what_it_was_given_while_it_runs_and_afterwards(
    cluster: PostgresStore,
) -> None:
    estimate(cluster, needs(1, 6, 3 * GIB))
    submit(cluster, a_spec("a", tenant="t"))
    run(cluster, a=[("a100-0", [0])])
    running = cluster.snapshot(C, 3600.0).uses
    apply_event(cluster, "a", JobEvent.CANCEL)
    agents_report(cluster)
    ended = cluster.snapshot(C, 3600.0).uses
    for uses in (running, ended):
        assert uses.resource.tolist() == [HOST_MEMORY, CPU_CORES, 0]
        assert (uses.amount / uses.amount[2]).tolist() == pytest.approx([3 * GIB, 6, 1])


def test_a_job_keeps_what_it_was_given_whatever_estimates_say_later(
    cluster: PostgresStore,
) -> None:
    estimate(cluster, needs(1, 6))
    submit(cluster, a_spec("a", guaranteed=True, max_gpus=1), a_spec("b", max_gpus=1))
    run(cluster, a=[("a100-0", [0])])
    estimate(cluster, needs(1, 20))  # more than the node has
    snapshot = cluster.snapshot(C)
    assert snapshot.jobs.current_cpus.tolist() == [6, NOT_STATED]
    options = RoundOptions(deadlines="ignore")
    outcome = plan_round(snapshot, options, Portfolio(), Budget(remaining_s=lambda: math.inf))
    assert not outcome.violations
    decisions = {snapshot.jobs.name[d.job]: d for d in outcome.decisions}
    assert decisions["a"].gang is not None
    where = [snapshot.nodes.name[n] for n, _ in decisions["a"].gang.members]
    assert (decisions["a"].kind, where) == (DecisionKind.KEEP, ["a100-0"])
    record = commit(cluster, snapshot, *outcome.decisions)
    assert all(d.applied for d in record.decisions)


def test_a_job_that_leaves_gives_everything_back(cluster: PostgresStore) -> None:
    estimate(cluster, needs(1, 8))
    submit(cluster, a_spec("a"), a_spec("b"))
    run(cluster, a=[("a100-0", [0])])
    apply_event(cluster, "a", JobEvent.CANCEL)
    agents_report(cluster)
    run(cluster, b=[("a100-0", [1])])
    assert job(cluster, "b").allocation is not None


def test_a_job_waits_for_cores_until_the_former_job_is_gone(cluster: PostgresStore) -> None:
    estimate(cluster, needs(1, 8))
    submit(cluster, a_spec("a"), a_spec("b"))
    run(cluster, a=[("a100-0", [0])])
    snapshot = cluster.snapshot(C)
    commit(
        cluster,
        snapshot,
        wait(snapshot, "a", DecisionKind.SUSPEND),
        start(snapshot, "b", [("a100-0", [1])]),  # another GPU, but the same cores
    )
    assert not cluster.desired(C, "agent-a100-0").gangs  # a must stop, and b may not start yet
    agent_reports(cluster, "agent-a100-0")
    assert [g.spec.name for g in cluster.desired(C, "agent-a100-0").gangs] == ["b"]


# what the database refuses


GIVE = """
    INSERT INTO allocations (node_id, gpu, job_id, generation, hold)
    SELECT n.id, {gpu}, j.id, j.generation, 'held' FROM nodes n, jobs j
    WHERE n.name = '{node}' AND j.name = '{job}'
"""


@pytest.fixture
def busy(cluster: PostgresStore) -> PostgresStore:
    """Return the cluster where a job needs 6 of the 8 cores and 40 of the 64 GiB of a100-0."""
    estimate(cluster, needs(1, 6, 40 * GIB))
    submit(cluster, a_spec("a"), a_spec("b"))
    run(cluster, a=[("a100-0", [0])])
    run(cluster, b=[("a100-1", [0])])
    return cluster


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (GIVE.format(gpu=1, node="a100-0", job="b"), "has 8 CPU cores, but its jobs need 12"),
        (
            "UPDATE allocations SET node_id = (SELECT id FROM nodes WHERE name = 'a100-0'), gpu = 1"
            " WHERE job_id = (SELECT id FROM jobs WHERE name = 'b')",
            "has 8 CPU cores, but its jobs need 12",
        ),
        ("UPDATE jobs SET cell_cpus = 9 WHERE name = 'a'", "its jobs need 9"),
        (
            "UPDATE jobs SET cell_host_bytes = 65::bigint << 30 WHERE name = 'a'",
            "has 68719476736 bytes of host memory, but its jobs need 69793218560",
        ),
        ("UPDATE nodes SET cpus = 5 WHERE name = 'a100-0'", "has 5 CPU cores, but its jobs need 6"),
        ("UPDATE nodes SET host_bytes = 0 WHERE name = 'a100-0'", "has 0 bytes of host memory"),
    ],
)
def test_rows_that_give_more_than_a_node_has_are_refused(
    busy: PostgresStore, database: Database, statement: str, said: str
) -> None:
    with pytest.raises(
        NotAllowed, match=f"node a100-0 {said}|{said}.*stop or move one of them first"
    ):
        execute(database, statement)
    assert seen(busy)[0][0] == 8


def test_a_transaction_may_take_before_it_gives(busy: PostgresStore, database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text(GIVE.format(gpu=1, node="a100-0", job="b")))
        connection.execute(
            sa.text("DELETE FROM allocations WHERE job_id = (SELECT id FROM jobs WHERE name = 'a')")
        )

    database.write(work)
    assert busy.snapshot(C).allocations.gpu.tolist() == [1, 0]


def test_a_node_cannot_state_less_than_its_jobs_need(busy: PostgresStore) -> None:
    with pytest.raises(NotAllowed, match="node a100-0 has 5 CPU cores, but its jobs need 6"):
        state(busy, 5, 64 * GIB)
    state(busy, 6, 40 * GIB)
    state(busy, None)  # it then limits nothing
    run(busy)


def test_shares_of_a_job_are_rounded_up_on_each_node(
    cluster: PostgresStore, database: Database
) -> None:
    estimate(cluster, needs(8, 20))
    submit(cluster, a_spec("a", requested_gpus=8))
    run(cluster, a=[("a100-0", [0]), ("a100-1", [0, 1, 2, 3])])  # 5 GPUs by a Cell of no demand
    execute(database, "UPDATE jobs SET cell_cpus = 36 WHERE name = 'a'")  # 7.2 cores for each GPU
    with pytest.raises(NotAllowed, match="has 8 CPU cores, but its jobs need 9"):
        execute(database, "UPDATE jobs SET cell_cpus = 41 WHERE name = 'a'")


def test_a_round_gives_no_cores_that_a_job_keeps_because_it_changed(
    busy: PostgresStore,
) -> None:
    submit(busy, a_spec("c"))
    snapshot = busy.snapshot(C)
    apply_event(busy, "a", JobEvent.HOLD)
    apply_event(busy, "a", JobEvent.RELEASE)
    agents_report(busy)
    run(busy, a=[("a100-0", [0])])  # in the meantime, a has begun again
    late = replace(busy.snapshot(C), jobs=snapshot.jobs)
    record = commit(
        busy,
        late,
        wait(late, "a", DecisionKind.SUSPEND),
        start(late, "c", [("a100-0", [1])]),
    )
    assert [d.applied for d in record.decisions] == [False, False]
    assert "would lack CPU cores or host memory" in record.decisions[1].skipped


def test_negative_capacities_are_refused(cluster: PostgresStore, database: Database) -> None:
    assert seen(cluster)
    with pytest.raises(InvalidInput, match="ck_nodes_resources"):
        execute(database, "UPDATE nodes SET cpus = -1")
