"""Connections, invariants, and changes by users: once for each request id, all or nothing."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tessera.db.clusters.drains import drain_nodes
from tessera.db.clusters.reservations import create_reservation
from tessera.db.clusters.tenants import delete_tenants, list_tenants, upsert_tenants
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs import job_changes
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database, connect_database, sqlalchemy_url
from tessera.db.schema.migrate import MigratedDatabase
from tessera.db.schema.revision import head_revision
from tessera.db.schema.tables.triggers import STATED_SCHEMA
from tessera.db.store.cluster_changes import upsert_cluster, upsert_nodes
from tessera.db.store.notify import EVERY_CLUSTER, Listener
from tessera.db.store.reads import (
    EVERY_WORKLOAD,
    get_node,
    list_estimates,
)
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.errors import (
    AlreadyExists,
    InUse,
    InvalidInput,
    NotAllowed,
    NotFound,
    StaleEtag,
    Unavailable,
)
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.reservations import ReservationSpec
from tessera.formulation.records.store import Request
from tests.support.launches import WHOLE_LAUNCH
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    execute,
    job,
    run,
    states,
    submit,
)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@127.0.0.1:1/none",
        "postgresql://user@127.0.0.1:1/none?password=secret",
        "postgresql://user@127.0.0.1:1/none?sslmode=require&sslpassword=secret",
    ],
)
def test_an_unreachable_database_says_what_to_do_and_keeps_the_password(url: str) -> None:
    store = Store(connect_database(url))
    with pytest.raises(Unavailable, match="TESSERA_DATABASE_URL") as error:
        store.ready()
    assert "secret" not in str(error.value)
    assert "127.0.0.1:1" in str(error.value)


@pytest.mark.parametrize("url", ["postgresql://h/d", "postgres://h/d", "postgresql+psycopg://h/d"])
def test_any_postgresql_url_is_read_by_the_installed_driver(url: str) -> None:
    assert sqlalchemy_url(url).render_as_string() == "postgresql+psycopg2://h/d"


@pytest.mark.parametrize("url", ["sqlite://", "nonsense", "mysql://h/d"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="postgresql://"):
        connect_database(url)


def test_what_a_url_states_of_the_connection_is_kept(server_url: str) -> None:
    stated = {"options": "-c search_path=mine -c lock_timeout=7s", "application_name": "ours"}
    url = sqlalchemy_url(server_url).update_query_dict(stated)
    database = connect_database(url.render_as_string(hide_password=False))
    names = ("search_path", "lock_timeout", "application_name", "statement_timeout", STATED_SCHEMA)
    with database.read() as connection:
        show = [connection.execute(sa.text(f"SHOW {name}")).scalar() for name in names]
    database.engine.dispose()
    assert show == ["mine", "7s", "ours", "1min", head_revision()]


def test_slow_statements_locks_and_a_full_pool_are_reported_as_a_busy_database(
    database: Database,
) -> None:
    a_cluster(Store(database))
    slow = connect_database(database.url, statement_timeout_s=0.05)
    with pytest.raises(Unavailable, match="too busy"):
        slow.write(lambda c: c.execute(sa.text("SELECT pg_sleep(10)")))
    hasty = connect_database(database.url, lock_timeout_s=0.05)
    with database.engine.begin() as connection:
        connection.execute(sa.text("SELECT FROM clusters FOR UPDATE"))
        with pytest.raises(Unavailable, match="too busy"):
            Store(hasty).hello(C, "a", "i", [])
    small = connect_database(database.url, pool_size=1, lock_timeout_s=0.05)
    with small.engine.connect(), pytest.raises(Unavailable, match="too busy"):
        small.write(lambda c: None)
    for other in (slow, hasty, small):
        other.engine.dispose()


def read_one(database: Database) -> object:
    with database.read() as connection:
        return connection.execute(sa.text("SELECT 1")).scalar()


def write_one(database: Database) -> object:
    return database.write(lambda c: c.execute(sa.text("SELECT 1")).scalar())


def try_lock(database: Database) -> object:
    with database.held("a name") as free:
        return free


@pytest.mark.parametrize("use", [read_one, write_one, try_lock])
@pytest.mark.parametrize("kind", [Database, MigratedDatabase])
def test_cut_connections_are_replaced(
    database: Database, kind: type[Database], use: Callable[[Database], object]
) -> None:
    tried, admin = kind(database.engine), connect_database(database.url)
    with database.engine.connect() as first, database.engine.connect() as second:
        idle = [c.execute(sa.text("SELECT pg_backend_pid()")).scalar() for c in (first, second)]
    with admin.engine.connect() as connection:
        connection.execute(sa.text("SELECT pg_terminate_backend(p) FROM unnest(:p) p"), {"p": idle})
    admin.engine.dispose()
    for _ in range(3):
        assert use(tried)


def test_a_connection_cut_halfway_is_reported_as_unavailable(database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(Unavailable, match="cannot be reached or has failed"):
        database.write(work)


def test_a_listener_that_lost_its_connection_reconnects(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.db.store.notify.RETRY_S", 0.01)
    a_cluster(store)
    notifications: queue.Queue[str] = queue.Queue()
    listener = Listener(database.url)
    listener.subscribe(notifications.put)
    with listener:
        assert notifications.get(timeout=PATIENCE_S) == EVERY_CLUSTER
        execute(
            database,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'tessera-listen' AND datname = current_database()",
        )
        assert notifications.get(timeout=PATIENCE_S) == EVERY_CLUSTER
        submit(store, a_spec("a"))
        run(store, a=[("a100-0", [0])])
        assert notifications.get(timeout=PATIENCE_S) == C
    assert "tessera-listen" not in {thread.name for thread in threading.enumerate()}


def test_a_database_without_notifications_is_logged_once_and_retried_ever_less_often(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float | None] = []

    class Patient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return False

    def refuse_at_first(dsn: str, **settings: Any) -> object:
        if len(waits) < 8:
            raise psycopg2.OperationalError("no\nroute")
        return really_connect(dsn, **settings)

    really_connect = psycopg2.connect
    monkeypatch.setattr("tessera.db.store.notify.psycopg2.connect", refuse_at_first)
    listener = Listener(database.url)
    monkeypatch.setattr(listener, "_closed", Patient())
    with caplog.at_level("INFO", "tessera.db.store.notify"), listener:
        assert listener.listening.wait(PATIENCE_S)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    lost, begun = logged_lines(caplog)
    assert lost.startswith("WARNING notices_lost ")
    assert lost.endswith(' error="no route"')
    assert begun.startswith("INFO notices_begun ")


@pytest.fixture
def busy(store: Store) -> Store:
    a_cluster(store, types=("a100", "h100"), nodes=1)
    submit(store, a_spec("busy", requested_gpus=2), a_spec("idle"))
    run(store, busy=[("a100-0", (0, 1))])
    return store


def update_job(store: Store, spec: JobSpec, *fields: str) -> None:
    store.change(job_changes.update_job, C, spec, fields, None)


REQUEST = Request(id="r-1", method="SubmitJobs", digest="d")


def submit_work(*names: str) -> Callable[[Connection], bytes]:
    def work(connection: Connection) -> bytes:
        return ",".join(
            j.spec.name for j in submit_jobs(connection, C, [a_spec(name) for name in names])
        ).encode()

    return work


def test_a_failed_request_may_be_repeated_and_concurrent_ones_do_the_work_once(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    with pytest.raises(AlreadyExists):
        store.write(REQUEST, submit_work("a"))
    assert store.write(REQUEST, submit_work("b")) == b"b"
    both_started, answers = threading.Barrier(2, timeout=PATIENCE_S), []

    def call() -> None:
        both_started.wait()
        answers.append(store.write(replace(REQUEST, id="r-2"), submit_work("c")))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"c", b"c"]


def test_a_job_reads_back_as_submitted(store: Store) -> None:
    a_cluster(store)
    spec = a_spec(
        "a",
        iterations=7,
        requested_gpus=3,
        requested_gpu_type="a100",
        tenant="t",
        priority=2,
        weight=0.5,
        guaranteed=True,
        pinned=True,
        deadline_s=2e9,
        restart_s=1.5,
        labels={"k": "ünï"},
        command=("python", "-m", "train"),
        max_retries=0,
        launch=WHOLE_LAUNCH,
        avoid_nodes=("a100-0", "a100-1"),
        min_gpus=2,
        max_gpus=4,
        pinned_gpu_type=True,
    )
    submit(store, spec, a_spec("b"))
    record = job(store, "a")
    assert record.spec == spec
    assert (record.state, record.version, record.generation) == (JobState.QUEUED, 1, 0)
    assert record.allocation is None
    assert job(store, "b").spec.deadline_s == math.inf


def test_jobs_are_submitted_all_or_none(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    for wrong in (a_spec("a"), a_spec("b"), a_spec("c", requested_gpu_type="h100")):
        with pytest.raises((AlreadyExists, InvalidInput)):
            submit(store, a_spec("b"), wrong)
    assert list(states(store)) == ["a"]


GPT = Workload(model="gpt", params="1B", global_batch=8)
LARGE = Workload(model="gpt", params="175B", global_batch=8)
FRESH = Workload(model="new", params="1B", global_batch=8)


@pytest.fixture
def three_types(store: Store) -> Store:
    """Return a store with 8 GPUs of each of three types, and a type without nodes and Cells."""
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100", "k80"))
    types = [GpuType(name=t, memory_bytes=2**35) for t in ("a100", "v100", "k80", "t4")]
    store.change(upsert_cluster, C, types, None)
    store.change(drain_nodes, C, ["a100-0"], draining=True)  # its GPUs count all the same
    records = [
        a_record(1, workload=GPT),
        a_record(9, workload=GPT, gpu_type="v100", nodes=3),
        a_record(1, workload=GPT, gpu_type="k80", iter_time_s=math.inf),
        a_record(16, workload=LARGE, nodes=4),
        a_record(1, workload=LARGE, iter_time_s=math.inf),
        a_record(32, workload=LARGE, gpu_type="v100", nodes=8),
    ]
    store.change(upsert_estimates, C, records)
    return store


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"workload": LARGE}, r"needs 16 x a100 \(there are 8\) or 32 x v100 \(there are 8\)"),
    ({"requested_gpus": 25}, "asks for 25 GPUs, but the whole cluster has 24"),
    ({"avoid_nodes": ("a100-0", "a100-9")}, "x.avoid_nodes: the cluster has no node a100-9"),
    ({"requested_gpus": 2, "min_gpus": 3}, "x.min_gpus: is 3, but the job requests 2 GPUs"),
    ({"requested_gpus": 2, "max_gpus": 1}, "x.max_gpus: is 1, but the job requests 2 GPUs"),
    ({"pinned_gpu_type": True}, "x.pinned_gpu_type: needs a GPU type to pin"),
    (
        {"workload": GPT, "requested_gpu_type": "k80", "pinned_gpu_type": True},
        "gpt has no Cells on it; it has some on a100, v100",
    ),
    (
        {"workload": GPT, "requested_gpu_type": "v100", "pinned_gpu_type": True},
        r"exceed the cluster: it needs 9 x v100 \(there are 8\)",
    ),
    ({"allowed_gpu_types": ("h100",)}, "has no GPU type 'h100'; it has: a100, k80, t4, v100"),
    (
        {"allowed_gpu_types": ("v100",), "requested_gpu_type": "a100"},
        "are v100, but the job requests a100; allow that, too, or request one of these",
    ),
    ({"allowed_gpu_types": ("t4",)}, "are t4, and bert has no Cells on them; it has some on"),
    ({"deadline_s": 1e9}, r"x.deadline: lies .* s in the past"),
]
"""Fields of a job that no cluster, or not this one, can grant, and what the refusal says."""


def test_jobs_that_can_never_run_are_refused_with_the_reason(three_types: Store) -> None:
    for fields, message in IMPOSSIBLE:
        with pytest.raises(InvalidInput, match=message):
            submit(three_types, a_spec("fine"), a_spec("x", **fields))
    assert states(three_types) == {}
    submit(
        three_types,
        a_spec("whole", requested_gpus=24),
        a_spec("unknown", workload=FRESH),
        a_spec("wish", workload=GPT, requested_gpu_type="k80"),
        a_spec("pin", workload=FRESH, requested_gpu_type="k80", pinned_gpu_type=True),
    )


def test_changes_that_make_a_job_impossible_are_refused(
    three_types: Store, database: Database
) -> None:
    submit(three_types, a_spec("a", workload=GPT, requested_gpu_type="k80", requested_gpus=2))
    for fields, message in (
        ({"pinned_gpu_type": True}, "gpt has no Cells on it"),
        ({"min_gpus": 3}, "set it to at most that, or to 0 for no bound"),
        ({"avoid_nodes": ("a100-9",)}, "no node a100-9"),
        ({"deadline_s": 1e9}, "in the past"),
    ):
        with pytest.raises(InvalidInput, match=message):
            update_job(three_types, a_spec("a", **fields), *fields)
    assert job(three_types, "a").version == 1
    execute(database, "UPDATE jobs SET deadline_s = 1")
    update_job(three_types, a_spec("a", weight=2.0), "weight")  # the deadline has passed already
    assert job(three_types, "a").spec.weight == 2.0


def test_estimates_are_replaced_by_shape(store: Store) -> None:
    a_cluster(store, nodes=1, gpus=4)
    other = Workload(model="x", params="", global_batch=1)
    for iter_time_s in (2.0, math.inf):
        replaced = a_record(6, workload=other, iter_time_s=iter_time_s)
        records = [replaced, a_record(1, workload=other)]
        store.change(upsert_estimates, C, records)
    estimates, following = store.read(list_estimates, C, other, 0, 10)
    assert [(e.cell.gpus, e.cell.nodes, e.iter_time_s) for e in estimates] == [
        (1, 1, 1.0),
        (6, 2, math.inf),
    ]
    assert following == 0
    everything, _ = store.read(list_estimates, C, EVERY_WORKLOAD, 0, 100)
    assert len(everything) == 6


def test_a_cluster_without_nodes_accepts_jobs_but_no_estimates_without_node_counts(
    store: Store,
) -> None:
    store.change(upsert_cluster, C, [GpuType(name="a100", memory_bytes=1)], None)
    with pytest.raises(InvalidInput, match="a number of nodes, or add nodes first"):
        store.change(upsert_estimates, C, [a_record(2)])
    submit(store, a_spec("a", requested_gpus=64))
    assert states(store) == {"a": JobState.QUEUED}


def test_nodes_change_unless_they_are_in_use(store: Store) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100"))
    submit(store, a_spec("a"))
    run(store, a=[("a100-0", [0])])

    def put(name: str, **fields: object) -> None:
        spec = NodeSpec(**{"name": name, "gpu_type": "a100", "gpus": 4} | fields)  # type: ignore[arg-type]  # a test's shorthand
        store.change(upsert_nodes, C, [spec])

    with pytest.raises(NotAllowed):
        put("a100-0", gpus=2)
    with pytest.raises(NotAllowed):
        put("a100-0", gpu_type="v100")
    put("a100-0", gpus=8, rack="r1")
    put("a100-1", gpu_type="v100", gpus=2, version=1)
    node = store.read(get_node, C, "a100-0")
    assert (node.spec.gpus, node.version, node.free_gpus, node.jobs) == (8, 2, 7, ("a",))
    for wrong, error in (
        ({"gpus": 65}, InvalidInput),
        ({"gpu_type": "h100"}, InvalidInput),
        ({"version": 1}, StaleEtag),
        ({"name": "new", "version": 1}, NotFound),
    ):
        with pytest.raises(error):
            put(**{"name": "a100-0"} | wrong)


def test_a_deadlocked_transaction_is_retried(store: Store, database: Database) -> None:
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


def put_tenants(store: Store, *tenants: TenantSpec) -> None:
    store.change(upsert_tenants, C, tenants)


def test_jobs_of_a_deleted_tenant_stay(store: Store) -> None:
    a_cluster(store)
    put_tenants(store, TenantSpec(name="a", quotas={"a100": 1}), TenantSpec(name="b"))
    submit(store, a_spec("x", tenant="a"))
    with pytest.raises(NotFound, match=f"clusters/{C}/tenants/z does not exist"):
        store.change(delete_tenants, C, ["a", "z"])
    store.change(delete_tenants, C, ["a"])
    assert [t.name for t in store.read(list_tenants, C)] == ["b"]
    assert job(store, "x").spec.tenant == "a"
    assert len(store.snapshot(C).quotas) == 0


def test_quotas_that_cannot_be_met_together_are_refused(store: Store) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100"))
    store.change(drain_nodes, C, ["a100-0"], draining=True)  # a draining node counts, too
    put_tenants(store, TenantSpec(name="t0", quotas={"v100": 1}))
    refused: list[tuple[tuple[dict[str, int], ...], str]] = [
        (({"a100": 5}, {"a100": 4}), "quotas of a100 sum to 9 GPUs, but the cluster has 8"),
        (({"": 9}, {"": 8}), "quotas sum to 17 GPUs, but the cluster has 16"),
        (({"a100": 8, "v100": 1}, {"": 8}), "quotas sum to 17 GPUs, but the cluster has 16"),
        (({"h100": 1},), "no GPU type 'h100'; it has: a100, v100"),
        (({"a100": -1},), "ck_quotas_gpus"),
    ]
    for quotas, message in refused:
        tenants = [TenantSpec(name=f"t{i}", quotas=q) for i, q in enumerate(quotas)]
        with pytest.raises(InvalidInput, match=message):
            put_tenants(store, *tenants)
        for tenant in tenants[:-1]:  # those before the last are accepted without it
            put_tenants(store, tenant)
        with pytest.raises(InvalidInput, match=message):
            put_tenants(store, tenants[-1])
        put_tenants(store, TenantSpec(name="t0"))


def test_gpu_bounds_of_jobs_are_counts_to_estimate(store: Store) -> None:
    a_cluster(store)
    fresh = Workload(model="new", params="1B", global_batch=8)
    submit(store, a_spec("a", workload=fresh, requested_gpus=4, min_gpus=3, max_gpus=6))
    (wanted,) = store.estimation(C).wanted
    assert (wanted.requests, wanted.counts) == ((4,), (3, 6))


def test_parents_read_back_and_their_quotas_bound_those_of_children(store: Store) -> None:
    a_cluster(store)
    lab = TenantSpec(name="lab", quotas={"a100": 3})
    nlp, chat = TenantSpec(name="nlp", parent="lab"), TenantSpec(name="chat", parent="nlp")
    put_tenants(store, chat, nlp, lab)
    assert store.read(list_tenants, C) == [chat, lab, nlp]
    tenants = store.snapshot(C).tenants
    assert [tenants.name[p] if p >= 0 else "" for p in tenants.parent.tolist()] == [
        "nlp",
        "",
        "lab",
    ]
    with pytest.raises(InvalidInput, match="tenants below lab sum to 4 GPUs"):
        put_tenants(store, TenantSpec(name="chat", parent="nlp", quotas={"a100": 4}))
    with pytest.raises(InvalidInput, match="lab is named twice"):
        put_tenants(store, lab, lab)
    with pytest.raises(InvalidInput, match="circle"):
        put_tenants(store, TenantSpec(name="lab", parent="chat"))
    with pytest.raises(InvalidInput, match="the parent of x, y, has no settings"):
        put_tenants(store, TenantSpec(name="x", parent="y"))
    with pytest.raises(InUse, match=r"tenants/nlp is in use by 1 child \(chat\)"):
        store.change(delete_tenants, C, ["nlp"])
    put_tenants(store, TenantSpec(name="chat"))
    store.change(delete_tenants, C, ["nlp", "lab"])
    assert store.read(list_tenants, C) == [TenantSpec(name="chat")]


def test_a_reservation_of_a_tenant_serves_the_jobs_of_those_below_it(store: Store) -> None:
    a_cluster(store)
    put_tenants(store, TenantSpec(name="lab"), TenantSpec(name="nlp", parent="lab"))
    submit(store, a_spec("below", tenant="nlp"), a_spec("own", tenant="lab"), a_spec("no"))
    now_s = store.snapshot(C).now_s
    spec = ReservationSpec(
        name="r", start_s=now_s, end_s=now_s + 60.0, gpu_type="a100", gpus=1, tenant="lab"
    )
    store.change(create_reservation, C, spec)
    snapshot = store.snapshot(C)
    served = {snapshot.jobs.name[job] for job in snapshot.entitlements.job.tolist()}
    assert served == {"below", "own"}
