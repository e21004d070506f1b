"""GPU types, node labels and run times of stored jobs, from the API to the end of a job."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.errors import InvalidInput
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import CellFilter
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.values import GpuType
from tessera.v1 import clusters_pb2, jobs_pb2
from tests.support import api as calls
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    do,
    execute,
    job,
    run,
    submit,
)

A0 = "a100-0"


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store whose agents do not expire, however slow the machine is."""
    return PostgresStore(database, lease_s=3600.0)


def label_nodes(store: PostgresStore, **labels: dict[str, str]) -> None:
    specs = [
        NodeSpec(name=name.replace("_", "-"), gpu_type="a100", gpus=4, labels=own)
        for name, own in labels.items()
    ]
    do(store, lambda w: w.upsert_nodes(C, specs))


def update(store: PostgresStore, spec: JobSpec, *fields: str) -> None:
    do(store, lambda w: w.update_job(C, spec, fields, None))


def nodes_by_job(snapshot: Snapshot, column: str = "required_selector") -> dict[str, list[str]]:
    """Return the nodes that match the selector of each job that has one."""
    matches = snapshot.matching_nodes()
    return {
        snapshot.jobs.name[job]: [snapshot.nodes.name[n] for n in matches[s].nonzero()[0].tolist()]
        for job, s in enumerate(getattr(snapshot.jobs, column).tolist())
        if s >= 0
    }


# labels


def test_labels_of_nodes_are_stored_and_an_agent_that_returns_keeps_them(
    store: PostgresStore,
) -> None:
    a_cluster(store, nodes=2)
    label_nodes(store, a100_0={"zone": "a", "disk": "ssd"})
    store.hello(C, "agent-a100-0", "second", [NodeSpec(name=A0, gpu_type="a100", gpus=4)])
    page = store.list_nodes(C, "", 10)
    assert [n.spec.labels for n in page] == [{"zone": "a", "disk": "ssd"}, {}]
    before = page[0].version
    label_nodes(store, a100_0={"disk": "ssd", "zone": "a"})
    assert store.list_nodes(C, "", 10)[0].version == before  # nothing has changed


def test_an_agents_labels_count_below_those_that_are_stated(store: PostgresStore) -> None:
    a_cluster(store, nodes=2)
    submit(
        store,
        a_spec("stated", node_selector="zone=a"),
        a_spec("given", node_selector="disk=ssd"),
        a_spec("earlier", node_selector="zone=b"),
    )
    label_nodes(store, a100_0={"zone": "a"})

    def register(**labels: str) -> None:
        node = NodeSpec(name=A0, gpu_type="a100", gpus=4, labels=labels)
        store.hello(C, "agent-a100-0", "second", [node])

    register(zone="b", disk="ssd")
    record = store.get_node(C, A0)
    assert (record.spec.labels, record.agent_labels) == (
        {"zone": "a"},
        {"zone": "b", "disk": "ssd"},
    )
    assert nodes_by_job(store.snapshot(C)) == {"stated": [A0], "given": [A0], "earlier": []}
    register(zone="b", disk="ssd")
    assert store.get_node(C, A0).version == record.version  # nothing has changed
    label_nodes(store, a100_0={})
    assert nodes_by_job(store.snapshot(C)) == {"stated": [], "given": [A0], "earlier": [A0]}
    register()
    assert store.get_node(C, A0).agent_labels == {}
    assert nodes_by_job(store.snapshot(C)) == {"stated": [], "given": [], "earlier": []}


def test_selectors_of_jobs_are_in_the_snapshot_and_follow_labels_and_changes(
    store: PostgresStore,
) -> None:
    a_cluster(store, nodes=3)
    label_nodes(store, a100_0={"zone": "a"}, a100_1={"zone": "b"})
    submit(
        store,
        a_spec("x", node_selector="zone=a", preferred_labels="zone!=b"),
        a_spec("y"),
        a_spec("z", node_selector="zone in (a, b)"),
    )
    assert nodes_by_job(store.snapshot(C)) == {"x": [A0], "z": [A0, "a100-1"]}
    assert nodes_by_job(store.snapshot(C), "preferred_selector") == {"x": [A0, "a100-2"]}
    label_nodes(store, a100_0={}, a100_2={"zone": "a"})
    update(store, a_spec("z", node_selector="zone=b"), "node_selector")
    assert nodes_by_job(store.snapshot(C)) == {"x": ["a100-2"], "z": ["a100-1"]}
    apply_event(store, "x", JobEvent.CANCEL)
    update(store, a_spec("z"), "node_selector")
    assert len(store.snapshot(C).selectors) == 0


# GPU types


def test_allowed_types_are_in_the_snapshot_and_cannot_be_removed(store: PostgresStore) -> None:
    a_cluster(store, nodes=1, types=("a100", "v100"))
    submit(store, a_spec("x", allowed_types=("v100", "a100")), a_spec("y"), a_spec("z"))
    update(store, a_spec("z", allowed_types=("v100",)), "allowed_types")
    allowed = store.snapshot(C).allowed_types
    assert list(zip(allowed.job.tolist(), allowed.gpu_type.tolist(), strict=True)) == [
        *((0, 0), (0, 1)),
        (2, 1),
    ]
    do(store, lambda w: w.delete_cells(C, CellFilter(gpu_type="v100")))
    do(store, lambda w: w.drain_nodes(C, ["v100-0"], draining=True))
    do(store, lambda w: w.delete_nodes(C, ["v100-0"], {}, allow_missing=False))
    kinds = [GpuType(name="a100", memory_bytes=2**35)]
    with pytest.raises(InvalidInput, match=r"2 live jobs that ask for it \(x, z\)"):
        do(store, lambda w: w.upsert_cluster(C, kinds, None))


# run times


def make_older(database: Database, seconds: int) -> None:
    """Make the present allocations of all jobs begin this much earlier."""
    execute(
        database,
        f"UPDATE jobs SET since_at = since_at - interval '{seconds} s' WHERE since_at IS NOT NULL",
    )


def test_a_job_that_has_run_for_its_longest_run_time_is_stopped_and_has_failed(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a", longest_run_s=7200.0), a_spec("b"))
    run(store, a=[(A0, [0])])
    make_older(database, 3600)
    apply_event(store, "a", JobEvent.HOLD)  # the time of its first start counts, too
    agents_report(store)
    apply_event(store, "a", JobEvent.RELEASE)
    assert 3600 <= job(store, "a").run_s < 3700
    run(store, a=[(A0, [0])])
    make_older(database, 3000)
    assert 500 < store.outlooks([C])[C].event_in_s <= 600
    store.begin_round(C, None)
    assert job(store, "a").state is JobState.RUNNING
    make_older(database, 600)
    assert store.outlooks([C])[C].event_in_s == 0
    snapshot = store.begin_round(C, None)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.jobs.name == ("a", "b")
    ended = job(store, "a")
    assert (ended.state, ended.retries) == (JobState.FAILING, 0)
    assert ended.last_error == "ran for its longest run time of 7,200 s"
    agents_report(store)
    assert job(store, "a").state is JobState.FAILED
    assert [e.event for e in store.job_history(C, "a")][-2:] == ["time_out", "gone"]


def test_a_waiting_job_whose_time_is_used_up_fails_without_a_start(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    make_older(database, 3600)
    apply_event(store, "a", JobEvent.HOLD)
    agents_report(store)
    update(store, a_spec("a", longest_run_s=60.0), "longest_run_s")
    store.begin_round(C, None)
    assert job(store, "a").state is JobState.HELD  # until its user releases it
    apply_event(store, "a", JobEvent.RELEASE)
    assert store.outlooks([C])[C].event_in_s == 0
    store.begin_round(C, None)
    assert job(store, "a").state is JobState.FAILED
    assert job(store, "a").ended_s is not None


# the API


async def test_the_api_keeps_and_changes_where_a_job_may_run_and_for_how_long(
    store: PostgresStore,
) -> None:
    async with calls.api(store) as a:
        node = calls.a_node("n1", labels={"zone": "a"})
        listed = await a.clusters.UpsertNodes(
            clusters_pb2.UpsertNodesRequest(parent=calls.C, nodes=[node])
        )
        assert dict(listed.nodes[0].labels) == {"zone": "a"}
        avoided = [f"{calls.C}/nodes/n1"]
        sent = await a.jobs.SubmitJob(
            calls.a_submit(
                allowed_gpu_types=["a100"],
                requested_gpu_type="a100",
                pinned_gpu_type=True,
                avoid_nodes=avoided,
                min_gpus=1,
                max_gpus=5,
                node_selector="zone=a,disk in(ssd,nvme)",
                preferred_labels="rack!=b",
                longest_run=Duration(seconds=3600),
            )
        )
        assert (list(sent.allowed_gpu_types), list(sent.avoid_nodes)) == (["a100"], avoided)
        assert (sent.pinned_gpu_type, sent.min_gpus, sent.max_gpus) == (True, 1, 5)
        assert sent.node_selector == "zone=a, disk in (nvme, ssd)"
        assert (sent.preferred_labels, sent.longest_run.seconds) == ("rack!=b", 3600)
        paths = ["allowed_gpu_types", "node_selector", "preferred_labels", "longest_run"]
        paths += ["pinned_gpu_type", "avoid_nodes", "min_gpus", "max_gpus"]
        request = jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=sent.name, avoid_nodes=[f"{calls.C}/nodes/n9"]),
            update_mask=FieldMask(paths=paths),
        )
        assert (await calls.refusal_of(a.jobs.UpdateJob(request)))[0] is calls.INVALID
        assert await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=sent.name)) == sent
        avoided = [f"{calls.C}/nodes/n2"]
        request.job.avoid_nodes[:] = avoided
        free = await a.jobs.UpdateJob(request)
        assert (list(free.allowed_gpu_types), list(free.avoid_nodes)) == ([], avoided)
        assert (free.pinned_gpu_type, free.min_gpus, free.max_gpus) == (False, 0, 0)
        assert (free.node_selector, free.preferred_labels) == ("", "")
        assert not free.HasField("longest_run")
        assert free.requested_gpu_type == "a100"
        least = jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=sent.name, min_gpus=9), update_mask=FieldMask(paths=["min_gpus"])
        )
        assert (await calls.refusal_of(a.jobs.UpdateJob(least)))[2] == ["job.min_gpus"]


async def test_the_api_refuses_bad_wishes_under_their_fields(store: PostgresStore) -> None:
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"allowed_gpu_types": ["a100", "a100"]}, "job.allowed_gpu_types[1]"),
        ({"allowed_gpu_types": ["a\n"]}, "job.allowed_gpu_types[0]"),
        ({"allowed_gpu_types": ["v100"], "requested_gpu_type": "a100"}, "job.allowed_gpu_types"),
        ({"node_selector": "zone"}, "job.node_selector"),
        ({"preferred_labels": "zone=\x07"}, "job.preferred_labels"),
        ({"longest_run": Duration(seconds=0)}, "job.longest_run"),
        ({"longest_run": Duration(seconds=-5)}, "job.longest_run"),
    ]
    async with calls.api(store) as a:
        for fields, field in wishes:
            refusal = await calls.refusal_of(a.jobs.SubmitJob(calls.a_submit(**fields)))
            assert refusal == (calls.INVALID, "INVALID_INPUT", [field])
