"""Changes by users: once for each request id, all or nothing, and refused with a helpful message."""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.db.writer import PostgresWriter, Work
from tessera.formulation.errors import (
    AlreadyExists,
    InvalidInput,
    NotAllowed,
    NotFound,
    StaleEtag,
)
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.store import Request
from tessera.formulation.values import GpuType, Workload
from tests.support.launches import WHOLE_LAUNCH
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    apply_event,
    do,
    job,
    run,
    states,
    submit,
)

REQUEST = Request(id="r-1", method="SubmitJobs", digest="d")


def submit_work(*names: str) -> Work:
    def work(writer: PostgresWriter) -> bytes:
        return ",".join(
            j.spec.name for j in writer.submit_jobs(C, [a_spec(name) for name in names])
        ).encode()

    return work


def test_a_failed_request_may_be_repeated(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    with pytest.raises(AlreadyExists):
        store.write(REQUEST, submit_work("a"))
    assert store.write(REQUEST, submit_work("b")) == b"b"


def test_concurrent_duplicates_do_the_work_once(store: PostgresStore) -> None:
    a_cluster(store)
    both_started, answers = threading.Barrier(2, timeout=PATIENCE_S), []

    def call() -> None:
        both_started.wait()
        answers.append(store.write(REQUEST, submit_work("a")))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"a", b"a"]


def test_a_job_reads_back_as_submitted(store: PostgresStore) -> None:
    a_cluster(store)
    spec = a_spec(
        "a",
        iterations=7,
        requested_gpus=3,
        requested_type="a100",
        tenant="t",
        queue=2,
        weight=0.5,
        guaranteed=True,
        movable=False,
        deadline_s=2e9,
        restart_s=1.5,
        labels={"k": "ünï"},
        command=("python", "-m", "train"),
        max_retries=0,
        launch=WHOLE_LAUNCH,
    )
    submit(store, spec, a_spec("b"))
    record = job(store, "a")
    assert record.spec == spec
    assert (record.state, record.version, record.generation) == (JobState.QUEUED, 1, 0)
    assert record.allocation is None
    assert job(store, "b").spec.deadline_s == math.inf


def test_jobs_are_submitted_all_or_none(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    for wrong in (a_spec("a"), a_spec("b"), a_spec("c", requested_type="h100")):
        with pytest.raises((AlreadyExists, InvalidInput)):
            submit(store, a_spec("b"), wrong)
    assert list(states(store)) == ["a"]


def test_a_job_that_can_never_fit_is_refused_with_the_reason(store: PostgresStore) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100"))
    large = Workload(model="gpt", params="175B", global_batch=8)
    do(
        store,
        lambda w: w.upsert_estimates(
            C,
            [
                a_record(16, workload=large, nodes=4),
                a_record(1, workload=large, iter_time_s=math.inf),
                a_record(32, workload=large, gpu_type="v100", nodes=8),
            ],
        ),
    )
    with pytest.raises(
        InvalidInput, match=r"needs 16 x a100 \(there are 8\) or 32 x v100 \(there are 8\)"
    ):
        submit(store, a_spec("a", workload=large))
    with pytest.raises(InvalidInput, match="asks for 17 GPUs, but the whole cluster has 16"):
        submit(store, a_spec("a", requested_gpus=17))
    submit(store, a_spec("b", workload=Workload(model="new", params="1B", global_batch=1)))


def test_a_cluster_without_nodes_accepts_jobs(store: PostgresStore) -> None:
    do(store, lambda w: w.upsert_cluster(C, [GpuType(name="a100", memory_bytes=1)], None))
    submit(store, a_spec("a", requested_gpus=64))
    assert states(store) == {"a": JobState.QUEUED}


def test_a_drained_node_still_counts_for_what_fits(store: PostgresStore) -> None:
    a_cluster(store, nodes=1, gpus=8)
    do(store, lambda w: w.drain_nodes(C, ["a100-0"], draining=True))
    submit(store, a_spec("a", requested_gpus=8))


def test_updates_change_only_the_named_fields(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a", weight=1.0, tenant="t"))
    change = a_spec("a", weight=4.0, tenant="other", labels={"k": "v"}, command=("x",))
    do(store, lambda w: w.update_job(C, change, ["weight", "labels", "command"], 1))
    record = job(store, "a")
    assert (record.spec.weight, record.spec.tenant, record.version) == (4.0, "t", 2)
    assert (record.spec.labels, record.spec.command) == ({"k": "v"}, ("x",))
    with pytest.raises(StaleEtag):
        do(store, lambda w: w.update_job(C, change, ["weight"], 1))
    with pytest.raises(InvalidInput, match="cannot be changed"):
        do(store, lambda w: w.update_job(C, change, ["workload"], None))
    with pytest.raises(InvalidInput, match="launch cannot be changed"):
        do(store, lambda w: w.update_job(C, change, ["launch"], None))
    with pytest.raises(NotFound):
        do(store, lambda w: w.update_job(C, a_spec("z"), ["weight"], None))
    apply_event(store, "a", JobEvent.CANCEL)
    with pytest.raises(NotAllowed):
        do(store, lambda w: w.update_job(C, change, ["weight"], None))


def test_estimates_are_replaced_by_shape(store: PostgresStore) -> None:
    a_cluster(store, nodes=1, gpus=4)
    other = Workload(model="x", params="", global_batch=1)
    for iter_time_s in (2.0, math.inf):
        replaced = a_record(6, workload=other, iter_time_s=iter_time_s)
        records = [replaced, a_record(1, workload=other)]
        do(store, partial(PostgresWriter.upsert_estimates, cluster=C, estimates=records))
    estimates, following = store.list_estimates(C, "x", "", 1, 0, 10)
    assert [(e.cell.gpus, e.cell.nodes, e.iter_time_s) for e in estimates] == [
        (1, 1, 1.0),
        (6, 2, math.inf),
    ]
    assert following == 0
    everything, _ = store.list_estimates(C, "", "", 0, 0, 100)
    assert len(everything) == 6


def test_an_estimate_without_node_counts_needs_a_node_in_the_cluster(store: PostgresStore) -> None:
    do(store, lambda w: w.upsert_cluster(C, [GpuType(name="a100", memory_bytes=1)], None))
    with pytest.raises(InvalidInput, match="a number of nodes, or add nodes first"):
        do(store, lambda w: w.upsert_estimates(C, [a_record(2)]))


def test_nodes_change_unless_they_are_in_use(store: PostgresStore) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100"))
    submit(store, a_spec("a"))
    run(store, a=[("a100-0", [0])])

    def put(name: str, **fields: object) -> None:
        spec = NodeSpec(**{"name": name, "gpu_type": "a100", "gpus": 4} | fields)  # type: ignore[arg-type]  # a test's shorthand
        do(store, lambda w: w.upsert_nodes(C, [spec]))

    with pytest.raises(NotAllowed):
        put("a100-0", gpus=2)
    with pytest.raises(NotAllowed):
        put("a100-0", gpu_type="v100")
    put("a100-0", gpus=8, rack="r1")
    put("a100-1", gpu_type="v100", gpus=2, version=1)
    node = store.get_node(C, "a100-0")
    assert (node.spec.gpus, node.version, node.free_gpus, node.jobs) == (8, 2, 7, ("a",))
    for wrong, error in (
        ({"gpus": 65}, InvalidInput),
        ({"gpu_type": "h100"}, InvalidInput),
        ({"version": 1}, StaleEtag),
        ({"name": "new", "version": 1}, NotFound),
    ):
        with pytest.raises(error):
            put(**{"name": "a100-0"} | wrong)


def test_pages_of_the_jobs_of_some_tenants_cover_each_of_them_once(store: PostgresStore) -> None:
    a_cluster(store)
    tenants = ("nlp", "vision", "", "nlp", "speech", "vision", "nlp")
    submit(store, *(a_spec(f"j{i}", tenant=tenant) for i, tenant in enumerate(tenants)))
    names, after = [], 0
    while True:
        page, after = store.list_jobs(C, [], after, 2, tenants={"nlp", "speech"})
        names += [j.spec.name for j in page]
        if not after:
            break
    assert names == ["j0", "j3", "j4", "j6"]
    apply_event(store, "j3", JobEvent.HOLD)
    for chosen, expected in (
        ({""}, ["j2"]),
        (set(), []),
        ({"nobody"}, []),
        (None, [f"j{i}" for i in range(7)]),
    ):
        page, after = store.list_jobs(C, [], 0, 10, tenants=chosen)
        assert ([j.spec.name for j in page], after) == (expected, 0)
    page, _ = store.list_jobs(C, [JobState.HELD], 0, 10, tenants=["nlp", "vision"])
    assert [j.spec.name for j in page] == ["j3"]


def test_a_missing_resource_is_named(store: PostgresStore) -> None:
    a_cluster(store)
    for call, resource in (
        (lambda: store.get_cluster("x"), "clusters/x"),
        (lambda: store.list_jobs("x", [], 0, 1), "clusters/x"),
        (lambda: store.list_tenants("x"), "clusters/x"),
        (lambda: store.list_models("x"), "clusters/x"),
        (lambda: store.estimation("x"), "clusters/x"),
        (lambda: do(store, lambda w: w.upsert_tenants("x", [])), "clusters/x"),
        (lambda: do(store, lambda w: w.delete_tenants("x", [])), "clusters/x"),
        (lambda: do(store, lambda w: w.upsert_models("x", [])), "clusters/x"),
        (lambda: store.get_job(C, "x"), f"clusters/{C}/jobs/x"),
        (lambda: store.job_history(C, "x"), f"clusters/{C}/jobs/x"),
        (lambda: store.get_node(C, "x"), f"clusters/{C}/nodes/x"),
        (lambda: store.get_round(C, 1), f"clusters/{C}/rounds/1"),
        (lambda: store.round_snapshot(C, 1), f"clusters/{C}/rounds/1"),
        (lambda: store.snapshot("x"), "clusters/x"),
        (lambda: store.desired(C, "x"), f"clusters/{C}/agents/x"),
        (lambda: do(store, lambda w: w.drain_nodes(C, ["x"], draining=True)), f"{C}/nodes/x"),
    ):
        with pytest.raises(NotFound, match=f"{resource} does not exist"):
            call()


def test_a_deadlocked_transaction_is_retried(store: PostgresStore, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    both_hold_one, attempts = threading.Barrier(2, timeout=PATIENCE_S), []

    def touch(first: str, second: str) -> None:
        def work(connection: sa.Connection) -> None:
            attempts.append(first)
            update = sa.text("UPDATE jobs SET tenant = tenant WHERE name = :name")
            connection.execute(update, {"name": first})
            if len(attempts) <= 2:
                both_hold_one.wait()
            connection.execute(update, {"name": second})

        database.write(work)

    threads = [threading.Thread(target=touch, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts) > 2  # on a busy machine the second attempt may collide, too
