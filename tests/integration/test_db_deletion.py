"""Deletion of clusters, nodes, GPU types, Cells and models: refused while in use, complete afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.base.webhooks import add_webhook
from tessera.db.clusters import deletion, network
from tessera.db.clusters.deletion import delete_cells, delete_models
from tessera.db.clusters.drains import drain_nodes
from tessera.db.clusters.policies import set_policy
from tessera.db.clusters.tenants import delete_tenants, upsert_tenants
from tessera.db.estimates.derived_estimates import list_models, put_derived_estimates, upsert_models
from tessera.db.jobs.submission import submit_jobs
from tessera.db.rounds.leases import acquire_lease
from tessera.db.schema import tables
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import delete_gpu_types, upsert_cluster, upsert_nodes
from tessera.db.store.reads import (
    EVERY_WORKLOAD,
    get_cluster,
    get_node,
    job_history,
    list_clusters,
    list_estimates,
    list_jobs,
    list_nodes,
)
from tessera.db.store.store import Connection, Store
from tessera.db.upkeep import purge
from tessera.db.upkeep.purge import purge_batch
from tessera.formulation.base.errors import (
    InUse,
    InvalidInput,
    NotFound,
    RoundSuperseded,
    StaleEtag,
)
from tessera.formulation.base.values import EstimateSource, GpuType
from tessera.formulation.job.arrays import ArrayRange
from tessera.formulation.job.dependencies import Dependency
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import CellFilter, ModelSpec
from tessera.formulation.records.webhooks import WebhookSpec
from tessera.formulation.state.topologies.described import decode_topology
from tests.support.patience import PATIENCE_S
from tests.support.rows import rows_left
from tests.support.stored_cluster import (
    BERT,
    C,
    a_cluster,
    a_record,
    a_round,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    record_heartbeat,
    run,
    start,
    submit,
)

NETWORK = decode_topology(
    '{"kind":"clos","hosts":2,"host":"a100","tors":1,"aggregations":1,"tor_bytes_per_s":25e9}'
)

# Rows of the tables that nothing in a_rich_cluster writes otherwise.
FILL = (
    "INSERT INTO profiles (workload_id, gpu_type_id, task, source, kind, layers, samples, tp, dtype,"
    " forward_s, backward_s, method, repeats, device_s, device, versions, date)"
    " SELECT w.id, t.id, 'task', 'step', 'layer', 1, 1, 1, 'f32', 1, 1, 'kernels', 1, 1, 'gpu', '{}', ''"
    " FROM workloads w, gpu_types t",
    "INSERT INTO profile_gaps (workload_id, gpu_type_id, task, source, left_out, reason)"
    " SELECT w.id, t.id, 'task', 'step', '[[1, 1]]', 'a limit' FROM workloads w, gpu_types t",
    "INSERT INTO host_profiles (gpu_type_id, task, rates) SELECT id, 'task', '{}' FROM gpu_types",
    """INSERT INTO forecasts (job_id, created_at, document) SELECT id, now(), '{"coverage": 0.8,
    "position": 0, "start": null, "finish": null, "why_not": "no estimates"}' FROM jobs""",
    "INSERT INTO forecast_spreads (job_id, event, created_at, times_s)"
    " SELECT id, 'start', now(), '{60}' FROM jobs",
    "INSERT INTO webhook_events (webhook_id, event, document) SELECT id, 'started', '{}' FROM webhooks",
    "INSERT INTO stints (job_id, gpu_type, gpus, cpus, effective_gpus, began_at, ended_at, ending)"
    " SELECT id, 'a100', 1, 0, 1, now(), now(), 'suspend' FROM jobs",
    "INSERT INTO usage_days (cluster_id, day, tenant, gpu_type, submitted_by, labels, gpu_us,"
    " effective_gpu_s, cpu_us, lost_gpu_us, preemptions, jobs_ended, jobs_finished, waited_us)"
    " SELECT id, now(), '', 'a100', '', '{}', 1, 1, 0, 0, 0, 1, 0, 0 FROM clusters",
    "INSERT INTO trainings (job_id) SELECT id FROM jobs WHERE name = 'runs'",
    "INSERT INTO tunings (workload_id, gpu_type_id, plan_id, runtime, space, plans, space_plans,"
    " whole_plans) SELECT w.id, t.id, p.id, 'jax', 'full', '{}', 1, 1"
    " FROM workloads w, gpu_types t, plans p LIMIT 1",
    "INSERT INTO network_plans (cluster_id, number, cause, round, levels, changed, seconds)"
    " SELECT id, 1, 'call', 1, 1, 0, 0 FROM clusters",
    "INSERT INTO standings (job_id, generation, rank, level, document)"
    " SELECT id, 1, 0, 0, '{}' FROM jobs WHERE name = 'runs'",
    "INSERT INTO measured_traffic (job_id, node_id, generation, period_s, sent_bytes)"
    " SELECT j.id, n.id, 1, 1, 1 FROM jobs j, nodes n WHERE j.name = 'runs' AND n.name = 'a100-1'",
    "INSERT INTO failed_starts (job_id, node_id, gpus)"
    " SELECT j.id, n.id, 1 FROM jobs j, nodes n WHERE j.name = 'runs' AND n.name = 'a100-1'",
    "INSERT INTO log_reads (id, cluster_id, agent_id, client, job, job_number, generation, rank,"
    " node, first_byte, max_bytes) SELECT 'r', id, 1, '', 'runs', 1, 1, 0, 'a100-0', 0, 1 FROM clusters",
    "INSERT INTO reservations (cluster_id, name, end_at, maintenance)"
    " SELECT id, 'm', now() + interval '1 h', true FROM clusters",
    "INSERT INTO reservation_nodes (reservation_id, node_id)"
    " SELECT r.id, n.id FROM reservations r, nodes n WHERE n.name = 'a100-1'",
    "INSERT INTO join_tokens (id, secret_hash, cluster_id, nodes, uses, created_by, expires_at)"
    " SELECT 'j', sha256(''), id, '{*}', 1, 'ops', now() + interval '1 h' FROM clusters",
    "INSERT INTO agent_certificates"
    " (serial, cluster_id, cluster, agent, nodes, issued_at, expires_at, join_token)"
    " SELECT 'a1', id, name, 'agent', '{n}', now(), now() + interval '1 h', 'j' FROM clusters",
)


def delete_cluster(store: Store, name: str = C, **options: Any) -> None:
    values: dict[str, Any] = {"version": None, "force": True} | options
    store.change(deletion.delete_cluster, name, silence_s=store.silence_s, **values)


def delete_nodes(store: Store, *names: str, **options: Any) -> None:
    values: dict[str, Any] = {"versions": {}, "allow_missing": False} | options
    store.change(deletion.delete_nodes, C, names, **values)


def a_rich_cluster(store: Store, database: Database) -> None:
    """Create a cluster that has rows in every table, and end its jobs."""
    a_cluster(store)
    store.change(upsert_tenants, C, [TenantSpec(name="nlp", quotas={"a100": 2, "": 3})])
    store.change(set_policy, C, {}, set_by="", message="", version=None)
    store.change(upsert_models, C, [ModelSpec(model="m", params="1B", architecture="{}")])
    store.change(network.set_topology, C, NETWORK, None)
    store.update(acquire_lease, C, "me", 60.0)
    store.change(add_webhook, C, WebhookSpec(name="h", url="https://example.com/", salt="s"))
    (member,) = ArrayRange(first=0, last=0).members("swarm")
    submit(
        store,
        a_spec("runs", avoid_nodes=("a100-1",)),
        a_spec("waits", after=(Dependency(job="swarm"),)),
        a_spec(member.name, array=member),
    )
    run(store, runs=[("a100-0", [0])])
    for done in range(8):
        agents_report(store)
        desired = store.read(load_desired_gangs, C, "agent-a100-0")
        (gang,) = desired.gangs
        observed = ObservedGang(
            job="runs",
            generation=gang.generation,
            node="a100-0",
            phase="running",
            iterations_done=done + 1.0,
            iter_time_s=1.0,
        )
        store.update(record_observation, C, "agent-a100-0", "first", [observed], desired.revision)
    for statement in FILL:
        execute(database, statement)
    apply_event(store, "runs", JobEvent.CANCEL)
    apply_event(store, "waits", JobEvent.CANCEL)
    apply_event(store, "swarm.0", JobEvent.CANCEL)
    agents_report(store)


def test_a_deleted_cluster_leaves_only_its_revoked_certificates(
    store: Store, database: Database
) -> None:
    a_rich_cluster(store, database)
    before = rows_left(database)
    assert set(before) == {t.name for t in tables.metadata.sorted_tables} - {
        "request_ids",
        "high_water",
        "allocations",
        "tokens",  # of users, who may see several clusters
        "audit_log",
    }
    delete_cluster(store)
    assert store.read(list_clusters, "", 10) == []
    while store.update(purge_batch):
        pass
    assert rows_left(database) == {"agent_certificates": 1}
    execute(database, "UPDATE agent_certificates SET expires_at = now() - interval '2 days'")
    assert store.prune(0.0, 0)["agent_certificates"] == 1


def test_purging_removes_a_bounded_number_of_rows_at_a_time_and_leaves_other_clusters(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store, name="other")
    other_rows = rows_left(database)
    a_cluster(store)
    submit(store, *(a_spec(f"j{i}") for i in range(25)))
    for i in range(25):
        apply_event(store, f"j{i}", JobEvent.CANCEL)
    small = tuple(
        (sa.text(str(text).replace(f"LIMIT {limit}", "LIMIT 10")), 10)
        for text, limit in purge._STATEMENTS
    )
    monkeypatch.setattr(purge, "_STATEMENTS", small)
    delete_cluster(store)
    jobs = [25]
    while store.update(purge_batch):
        jobs.append(rows_left(database).get("jobs", 0))
    assert jobs == [25, 15, 5, 0]
    assert rows_left(database) == other_rows
    assert [c.name for c in store.read(list_clusters, "", 10)] == ["other"]


def test_a_cluster_with_live_jobs_is_refused_even_with_force_and_the_error_names_them(
    store: Store,
) -> None:
    a_cluster(store)
    with pytest.raises(StaleEtag, match="read it again"):
        delete_cluster(store, version=77)
    with pytest.raises(NotFound):
        delete_cluster(store, "nowhere")
    submit(store, *(a_spec(f"j{i}") for i in range(5)))
    with pytest.raises(
        InUse, match=r"in use by 5 live jobs \(j0, j1, j2, \.\.\.\); cancel"
    ) as error:
        delete_cluster(store)
    assert error.value.metadata() == {"resource": f"clusters/{C}", "jobs": "5"}
    assert len(store.read(list_jobs, C, [], 0, 10)[0]) == 5
    for i in range(5):
        apply_event(store, f"j{i}", JobEvent.CANCEL)
    submit(store, a_spec("big", requested_gpus=8))
    run(store, big=[("a100-0", [0, 1, 2, 3]), ("a100-1", [0, 1, 2, 3])])
    desired = store.read(load_desired_gangs, C, "agent-a100-0")
    observed = ObservedGang(
        job="big", generation=1, node="a100-0", phase="succeeded", iterations_done=1e12
    )
    store.update(record_observation, C, "agent-a100-0", "first", [observed], desired.revision)
    assert job(store, "big").state is JobState.SUCCEEDED
    with pytest.raises(InUse, match=r"1 ended job \(big\).*wait until all GPUs are free"):
        delete_cluster(store)
    agents_report(store)
    delete_cluster(store, version=store.read(get_cluster, C).version)


def test_agents_and_rounds_of_a_deleted_cluster_get_not_found(store: Store) -> None:
    a_cluster(store)
    solved = a_round(store.snapshot(C))
    delete_cluster(store)
    calls: list[Callable[[], object]] = [
        lambda: store.commit(solved),
        lambda: record_heartbeat(store, "agent-a100-0", "first"),
        lambda: store.read(load_desired_gangs, C, "agent-a100-0"),
        lambda: store.update(record_observation, C, "agent-a100-0", "first", [], 0),
        lambda: store.hello(C, "a", "first", [NodeSpec(name="n", gpu_type="a100", gpus=1)]),
        lambda: store.snapshot(C),
    ]
    for call in calls:
        with pytest.raises(NotFound, match=f"clusters/{C} does not exist"):
            call()
    assert not store.update(acquire_lease, C, "me", 60.0)


def test_a_cluster_with_a_deleted_name_continues_the_counters_of_the_deleted_one(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("j"))
    run(store, j=[("a100-0", [0])])
    (first,) = store.read(load_desired_gangs, C, "agent-a100-0").gangs
    apply_event(store, "j", JobEvent.CANCEL)
    agents_report(store)
    old, revision = store.snapshot(C), store.read(load_desired_gangs, C, "agent-a100-0").revision
    etag = store.read(get_cluster, C).version
    delete_cluster(store)
    a_cluster(store)
    new = store.snapshot(C)
    assert new.epoch > old.epoch
    assert store.read(load_desired_gangs, C, "agent-a100-0").revision > revision
    assert store.read(get_cluster, C).version > etag
    submit(store, a_spec("j"))
    late = a_round(old)
    with pytest.raises(RoundSuperseded):
        store.commit(late)
    while store.update(purge_batch):
        pass
    run(store, j=[("a100-0", [0])])
    assert job(store, "j").state is JobState.RUNNING
    (second,) = store.read(load_desired_gangs, C, "agent-a100-0").gangs
    assert (first.spec.name, first.generation) == (second.spec.name, second.generation)
    assert second.job_number > first.job_number  # so the first job's checkpoint is not resumed


def test_a_concurrent_submission_is_not_lost_in_a_deletion(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    entered, outcome = threading.Event(), []

    def delete() -> None:
        entered.wait(PATIENCE_S)
        try:
            delete_cluster(store)
        except InUse as error:
            outcome.append(error)

    thread = threading.Thread(target=delete)
    thread.start()

    def submit_slowly(connection: Connection) -> None:
        submit_jobs(connection, C, [a_spec("j")])
        entered.set()
        blocked = sa.text("""
SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
""")
        for _ in range(2000):
            with database.read() as connection:
                if connection.execute(blocked).scalar():
                    return
            thread.join(0.01)

    store.change(submit_slowly)
    thread.join(PATIENCE_S)
    assert len(outcome) == 1
    assert job(store, "j").state is JobState.QUEUED


def test_a_node_in_use_missing_or_changed_is_refused_and_no_node_is_deleted(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, *(a_spec(f"j{i}") for i in range(4)))
    run(store, **{f"j{i}": [("a100-0", [i])] for i in range(4)})
    text = r"nodes/a100-0 is in use by 4 jobs \(j0, j1, j2, \.\.\.\); drain it first .*drain NODE --wait"
    with pytest.raises(InUse, match=text):
        delete_nodes(store, "a100-0", "a100-1")
    with pytest.raises(NotFound, match="nodes/x does not exist"):
        delete_nodes(store, "a100-1", "x")
    with pytest.raises(StaleEtag, match="node a100-1 has changed"):
        delete_nodes(store, "a100-1", versions={"a100-1": 9})
    assert len(store.read(list_nodes, C, "", 10)) == 2
    delete_nodes(store, "a100-1", "x", allow_missing=True)
    assert [n.spec.name for n in store.read(list_nodes, C, "", 10)] == ["a100-0"]


def test_a_deleted_node_is_gone_and_past_rounds_stay_readable(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j", avoid_nodes=("a100-1",)))
    number = run(store, j=[("a100-0", [0])]).summary.number
    apply_event(store, "j", JobEvent.HOLD)
    agents_report(store)
    delete_nodes(store, "a100-0", "a100-1")
    assert store.read(list_nodes, C, "", 10) == []
    (decision,) = store.get_round(C, number).decisions
    assert decision.allocation is not None
    assert decision.allocation.shares == (("a100-0", (0,)),)
    assert store.round_snapshot(C, number).nodes.name == ("a100-0", "a100-1")
    assert job(store, "j").spec.avoid_nodes == ()
    assert [event.event for event in store.read(job_history, C, "j")][-1] == "gone"


def test_a_round_solved_before_a_node_was_recreated_does_not_use_it(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j"))
    old = store.snapshot(C)
    delete_nodes(store, "a100-0")
    store.change(upsert_nodes, C, [NodeSpec(name="a100-0", gpu_type="a100", gpus=2)])
    (decision,) = commit(store, old, start(old, "j", [("a100-0", [3])])).decisions
    assert decision.skipped == "node a100-0 changed during the solve"


def test_an_agent_gets_a_deleted_node_back_when_it_restarts_or_a_user_creates_it(
    store: Store,
) -> None:
    specs = [NodeSpec(name=n, gpu_type="a100", gpus=4) for n in ("n1", "n2")]
    a_cluster(store, nodes=0)
    store.hello(C, "both", "first", specs)
    before = store.read(load_desired_gangs, C, "both").revision
    delete_nodes(store, "n1")
    desired = store.read(load_desired_gangs, C, "both")
    assert desired.deleted_nodes == ("n1",)
    assert desired.revision > before  # its stream is woken
    store.hello(C, "both", "first", specs)  # the connection was lost
    assert [n.spec.name for n in store.read(list_nodes, C, "", 10)] == ["n2"]
    assert store.read(load_desired_gangs, C, "both").deleted_nodes == ("n1",)
    store.hello(C, "both", "second", specs)
    assert [n.spec.name for n in store.read(list_nodes, C, "", 10)] == ["n1", "n2"]
    assert store.read(load_desired_gangs, C, "both").deleted_nodes == ()
    # A node that a user creates again goes back to its agent.
    delete_nodes(store, "n1", "n2")
    store.change(upsert_nodes, C, [NodeSpec(name="n1", gpu_type="a100", gpus=4)])
    assert store.read(load_desired_gangs, C, "both").deleted_nodes == ("n2",)
    (node,) = store.read(list_nodes, C, "", 10)
    assert node.silent_s < 60


def test_a_gpu_type_in_use_is_refused_with_its_users_and_what_to_do(
    store: Store, database: Database
) -> None:
    a_cluster(store, types=("a100", "v100"))
    store.change(upsert_tenants, C, [TenantSpec(name="nlp", quotas={"v100": 2})])
    submit(store, a_spec("j", requested_gpu_type="v100"))

    def delete(*names: str, allow_missing: bool = False) -> None:
        store.change(delete_gpu_types, C, names, None, allow_missing=allow_missing)

    with pytest.raises(InUse) as error:
        delete("v100")
    assert str(error.value) == (
        "clusters/lab/gpuTypes/v100 is in use by 2 nodes (v100-0, v100-1), 1 workload with Cells on it"
        " (bert/1B at batch 256), 1 tenant with a quota of it (nlp) and 1 live job that asks for it (j);"
        " remove what uses it first: `tessera nodes delete`, `tessera cells delete --gpu-type v100`,"
        " `tessera tenants apply` without the quota, `tessera cancel`"
    )
    with pytest.raises(InvalidInput, match=r"gpu_types: .*cells delete --gpu-type v100.*or keep"):
        store.change(upsert_cluster, C, [GpuType(name="a100", memory_bytes=1)], None)
    apply_event(store, "j", JobEvent.CANCEL)
    store.change(delete_tenants, C, ["nlp"])
    store.change(delete_cells, C, CellFilter(gpu_type="v100"))
    delete_nodes(store, "v100-0", "v100-1")
    delete("v100")
    assert [t.name for t in store.read(get_cluster, C).gpu_types] == ["a100"]
    with pytest.raises(NotFound):
        delete("v100")
    delete("v100", allow_missing=True)
    with pytest.raises(InvalidInput, match="at least one GPU type; delete the cluster instead"):
        delete("a100")


def test_cells_in_use_by_jobs_are_refused_and_others_are_deleted(store: Store) -> None:
    a_cluster(store, types=("a100", "v100"))
    submit(store, a_spec("j"))
    run(store, j=[("a100-0", [0])])

    def delete(**cells: Any) -> int:
        counts: list[int] = []
        counts.append(store.change(delete_cells, C, CellFilter(**cells)))
        return counts[0]

    with pytest.raises(InUse, match=r"a Cell of clusters/lab is in use by 1 job \(j\)"):
        delete(gpu_type="a100")
    assert delete(workload=BERT, gpu_type="v100") == 4
    assert delete(gpus=8) == 1
    assert delete(workload=a_spec("x").workload, gpus=64) == 0
    with pytest.raises(InvalidInput, match="no GPU type 'h100'"):
        delete(gpu_type="h100")
    assert len(store.read(list_estimates, C, EVERY_WORKLOAD, 0, 100)[0]) == 3
    apply_event(store, "j", JobEvent.CANCEL)
    agents_report(store)
    assert delete() == 3


def test_deleted_cells_that_the_service_derived_are_estimated_again(store: Store) -> None:
    a_cluster(store, nodes=1)
    store.change(delete_cells, C, CellFilter())
    submit(store, a_spec("j"))
    own = a_record(2, nodes=1)
    store.change(put_derived_estimates, C, [own], {BERT: "digest"})
    assert [w.derived_from for w in store.estimation(C).wanted] == ["digest"]
    store.change(delete_cells, C, CellFilter())
    assert [w.derived_from for w in store.estimation(C).wanted] != ["digest"]


def test_a_model_of_live_jobs_is_refused_and_is_deleted_with_its_derived_cells(
    store: Store,
) -> None:
    a_cluster(store, nodes=1)
    store.change(delete_cells, C, CellFilter())
    spec = ModelSpec(model="bert", params="1B", architecture="{}")
    store.change(upsert_models, C, [spec])
    computed = a_record(2, nodes=1, source=EstimateSource.ANALYTIC)
    measured = a_record(4, nodes=1, source=EstimateSource.MEASURED)
    store.change(put_derived_estimates, C, [computed, measured], {BERT: "digest"})
    submit(store, a_spec("j"))

    def delete(model: tuple[str, str], allow_missing: bool = False) -> None:
        store.change(delete_models, C, [model], allow_missing=allow_missing)

    with pytest.raises(InUse, match=r"1 live job \(j\)"):
        delete(("bert", "1B"))
    apply_event(store, "j", JobEvent.CANCEL)
    delete(("bert", "1B"))
    assert store.read(list_models, C) == []
    assert [e.cell.gpus for e in store.read(list_estimates, C, EVERY_WORKLOAD, 0, 100)[0]] == [4]
    with pytest.raises(NotFound, match="models/bert/1B does not exist"):
        delete(("bert", "1B"))
    delete(("bert", "1B"), allow_missing=True)


def test_a_topology_is_deleted_at_its_version_only(store: Store) -> None:
    a_cluster(store)
    store.change(network.set_topology, C, NETWORK, None)
    with pytest.raises(StaleEtag):
        store.change(network.drop_topology, C, 7)
    store.change(network.drop_topology, C, 1)
    store.change(network.drop_topology, C, allow_missing=True)


def test_a_drained_node_says_why_by_which_user_and_since_when(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("j"))
    run(store, j=[("a100-0", [0])])

    def drain(draining: bool = True, **details: str) -> tuple[object, ...]:
        store.change(drain_nodes, C, ["a100-0"], draining=draining, **details)
        node = store.read(get_node, C, "a100-0")
        assert (node.drained_s is not None) is node.draining
        return node.draining, node.drained, node.drain_reason, node.drained_by

    assert drain(reason="bad fan", drained_by="ann") == (True, False, "bad fan", "ann")
    # The node drains already, and no new reason is given.
    assert drain(drained_by="bob") == (True, False, "bad fan", "ann")
    assert drain(reason="bad disk", drained_by="bob") == (True, False, "bad disk", "bob")
    apply_event(store, "j", JobEvent.HOLD)
    # The agent has not yet reported that the job is gone.
    assert not store.read(get_node, C, "a100-0").drained
    agents_report(store)
    assert store.read(get_node, C, "a100-0").drained
    assert drain(draining=False) == (False, False, "", "")
