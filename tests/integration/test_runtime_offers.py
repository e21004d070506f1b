"""Runtimes that agents offer: rounds place jobs only there, and jobs that no node can start say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_nodes
from tessera.db.store.store import Store
from tessera.formulation.answer.explanations.applying import apply_changes
from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.job.runtime_offers import AgentOffers, RuntimeOffer
from tessera.formulation.job.runtimes import COMMAND, JAX, REPLAY
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import clusters_pb2, jobs_pb2, launch_pb2
from tests.support import api as calls
from tests.support.api import a_submit
from tests.support.decided_rounds import schedule
from tests.support.stored_cluster import C, a_cluster, a_spec, agents_report, job, run, submit

A0, A1 = "a100-0", "a100-1"
NO_JAX = "no module jax in /usr/bin/python3"


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store of two nodes, whose agents say nothing of runtimes and do not expire."""
    store = Store(database, lease_s=3600.0)
    a_cluster(store)
    return store


def offer(store: Store, node: str, versions: Mapping[str, str], problem: str = NO_JAX) -> None:
    """Let the agent of a node register with these runtimes, and say why JAX is missing."""
    runtimes = [RuntimeOffer(runtime=r, version=v) for r, v in versions.items()]
    if JAX not in versions:
        runtimes.append(RuntimeOffer(runtime=JAX, problem=problem))
    offers = AgentOffers(runtimes=tuple(runtimes), tools=("Python 3.11.7",))
    store.hello(C, f"agent-{node}", "first", [NodeSpec(name=node, gpu_type="a100", gpus=4)], offers)


WITH_JAX = {COMMAND: "", REPLAY: "", JAX: "jax 0.10.2"}
WITHOUT_JAX = {COMMAND: "", REPLAY: ""}


def a_jax_job(name: str, **changes: object) -> JobSpec:
    spec = a_spec(name, command=("train.py",), launch=LaunchSpec(runtime=JAX), max_gpus=1)
    return replace(spec, **changes)  # type: ignore[arg-type]


def permitted_nodes(snapshot: Snapshot, name: str) -> list[str]:
    selector = int(snapshot.jobs.required_selector[snapshot.jobs.name.index(name)])
    if selector < 0:
        return list(snapshot.nodes.name)
    matching = snapshot.matching_nodes()[selector].nonzero()[0]
    return [snapshot.nodes.name[n] for n in matching.tolist()]


def test_a_job_runs_only_on_nodes_that_offer_its_runtime(store: Store) -> None:
    submit(store, *(a_jax_job(f"j{k}") for k in range(5)), a_spec("plain", max_gpus=1))
    offer(store, A0, WITHOUT_JAX)
    assert permitted_nodes(store.snapshot(C), "j0") == [A1]  # whose agent says nothing
    offer(store, A1, WITH_JAX)
    snapshot = store.snapshot(C)
    assert permitted_nodes(snapshot, "j0") == [A1]
    assert permitted_nodes(snapshot, "plain") == [A0, A1]
    assert snapshot.selectors.in_words(0) == "the runtime jax"
    schedule(store)
    records = [job(store, f"j{k}") for k in range(5)]
    nodes = [n for record in records if record.allocation for n, _ in record.allocation.shares]
    assert nodes == [A1] * 4
    (waiting,) = (record for record in records if record.allocation is None)
    assert waiting.reason is not None
    assert waiting.reason.code is not ReasonCode.RUNTIME_MISSING
    allocation = job(store, "plain").allocation
    assert allocation is not None
    assert allocation.shares[0][0] == A0


def test_a_selector_and_a_runtime_count_together_and_labels_may_be_dropped(
    store: Store,
) -> None:
    zones = [
        NodeSpec(name=n, gpu_type="a100", gpus=4, labels={"zone": z})
        for n, z in ((A0, "a"), (A1, "b"))
    ]
    store.change(upsert_nodes, C, zones)
    submit(store, a_jax_job("both", node_selector="zone=a"), a_jax_job("free"))
    offer(store, A0, WITHOUT_JAX)
    offer(store, A1, WITH_JAX)
    snapshot = store.snapshot(C)
    assert permitted_nodes(snapshot, "both") == []
    index = snapshot.jobs.name.index("both")
    selector = int(snapshot.jobs.required_selector[index])
    assert snapshot.selectors.in_words(selector) == "zone=a and the runtime jax"
    schedule(store)
    reason = job(store, "both").reason
    assert reason is not None
    assert reason.code is ReasonCode.PINS_CONTRADICT
    assert "runs only on nodes with zone=a and the runtime jax" in str(reason.message)
    changes = [Change(kind=ChangeKind.ANY_LABELS)]
    freed_snapshot, _ = apply_changes(snapshot, RoundOptions(), index, changes)
    assert permitted_nodes(freed_snapshot, "both") == [A1]


def test_too_few_gpus_with_the_runtime_are_named(store: Store) -> None:
    submit(store, a_jax_job("wide", requested_gpus=8, min_gpus=8, max_gpus=8))
    offer(store, A0, WITHOUT_JAX)
    offer(store, A1, WITH_JAX)
    schedule(store)
    reason = job(store, "wide").reason
    assert reason is not None
    assert (reason.code, reason.message) == (
        ReasonCode.RUNTIME_MISSING,
        "the job needs at least 8 GPUs, and nodes offer its runtime jax on 4; others do not:"
        f" {NO_JAX} (a100-0)",
    )


def test_a_job_that_brings_its_own_packages_needs_an_agent_that_runs_programs(
    store: Store,
) -> None:
    launch = LaunchSpec(runtime=JAX, env={"PYTHONPATH": "/opt/jax"})
    submit(store, a_jax_job("own", launch=launch))
    offer(store, A0, WITHOUT_JAX)
    offer(store, A1, {REPLAY: ""}, "runs no programs")
    assert permitted_nodes(store.snapshot(C), "own") == [A0]


def test_a_job_that_runs_stays_when_its_runtime_is_removed(store: Store) -> None:
    for node in (A0, A1):
        offer(store, node, WITH_JAX)
    submit(store, a_jax_job("j"), a_jax_job("next"))
    run(store, j=[(A0, [0])])
    offer(store, A0, WITHOUT_JAX)
    snapshot = store.snapshot(C)
    assert permitted_nodes(snapshot, "j") == [A0, A1]
    assert permitted_nodes(snapshot, "next") == [A1]
    schedule(store)
    agents_report(store)
    record = job(store, "j")
    assert (record.state, record.generation) == (JobState.RUNNING, 1)


async def test_submissions_warn_and_nodes_show_what_they_offer(database: Database) -> None:
    store = Store(database, lease_s=3600.0)
    jax = {"launch": launch_pb2.Launch(runtime=JAX), "command": ["train.py"]}
    async with calls.api(store) as a:
        assert not (await a.jobs.SubmitJob(a_submit("early", **jax))).warnings
        for node in ("n1", "n2"):
            spec = NodeSpec(name=node, gpu_type="a100", gpus=8)
            runtimes = (
                RuntimeOffer(runtime=JAX, problem=NO_JAX),
                RuntimeOffer(runtime=COMMAND),
            )
            store.hello("c", node, "first", [spec], AgentOffers(runtimes=runtimes))
        (warning,) = (await a.jobs.SubmitJob(a_submit("j", **jax))).warnings
        assert warning == (
            f"no node offers the runtime jax: {NO_JAX} (n1, n2); the job waits until one does:"
            " install on these nodes the framework of jax, or submit the job with a runtime that nodes"
            " offer: command"
        )
        command = {"launch": launch_pb2.Launch(runtime=COMMAND), "command": ["train.py"]}
        assert not (await a.jobs.SubmitJob(a_submit("k", **command))).warnings
        request = clusters_pb2.GetNodeRequest(name="clusters/c/nodes/n1")
        offers = (await a.clusters.GetNode(request)).runtimes
        assert [(o.runtime, o.version, o.problem) for o in offers] == [
            (COMMAND, "", ""),
            (JAX, "", NO_JAX),
        ]


async def test_an_explanation_says_why_the_nodes_of_a_job_are_drained(database: Database) -> None:
    store = Store(database, lease_s=3600.0)
    async with calls.api_with_agent(store) as a:
        nodes = ["clusters/c/nodes/n1", "clusters/c/nodes/n2"]
        request = clusters_pb2.DrainNodesRequest(
            parent="clusters/c", names=nodes, reason="new disks", drained_by="ana"
        )
        await a.clusters.DrainNodes(request)
        await a.jobs.SubmitJob(a_submit("j"))
        answer = await a.jobs.ExplainJob(jobs_pb2.ExplainJobRequest(name="clusters/c/jobs/j"))
        reason = answer.reason
        assert reason.code == ReasonCode.NODES_AWAY
        assert reason.evidence["drains"] == "n1 by ana: new disks; n2 by ana: new disks"
