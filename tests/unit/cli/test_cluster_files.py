"""Clusters and tenants in YAML files: their meaning, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.clusters import clusterfile
from tessera.service.cli.clusters.clusterfile import read_cluster
from tessera.service.cli.clusters.tenantfile import read_tenants
from tessera.service.cli.jobs.jobfile import read_jobs
from tessera.v1.tenants_pb2 import Tenant

PAGE = Path(__file__).parents[3] / "docs" / "command-line.md"
NODE = "name: n, gpu_type: a, gpus: 1"


def test_the_documented_files_are_valid() -> None:
    examples = [part.partition("```")[0] for part in PAGE.read_text().split("```yaml\n")[1:]]
    now = Timestamp(seconds=1_800_000_000)
    assert sum(len(read_jobs(text, PAGE.name, now)) for text in examples[:2]) == 4
    cluster = read_cluster(examples[2], PAGE.name)
    assert cluster.nodes
    assert [tenant.name for tenant in cluster.tenants] == ["nlp"]
    research, nlp, vision = read_tenants(examples[-1], PAGE.name)
    assert (nlp.borrow_gpus, dict(vision.quotas)) == (16, {"": 24})
    assert (nlp.parent, research.parent) == (research.name, "")
    example = read_cluster(clusterfile.EXAMPLE_CLUSTER, "default")
    assert sum(node.gpus for node in example.nodes) == 32


def test_a_cluster_file_expands_counts_and_racks_and_labels_nodes() -> None:
    cluster = read_cluster(
        "name: c\ngpu_types:\n  a100: {memory: 40GiB, dollars_per_hour: 2.5, watts: 400}\n"
        "  v100: 32GiB\ntenants: {nlp: {quotas: {a100: 8}}}\nnodes:\n"
        "- {name: 'n{}', count: 5, gpu_type: a100, gpus: 4, rack: 'r{}', nodes_per_rack: 2,"
        " labels: {zone: a}}\n"
        "- {name: big, gpu_type: v100, gpus: 8}\n",
        "c.yaml",
    )
    assert cluster.name == "c"
    assert [(t.name, t.memory_bytes, t.dollars_per_hour, t.watts) for t in cluster.gpu_types] == [
        ("a100", 40 * 2**30, 2.5, 400.0),
        ("v100", 32 * 2**30, 0.0, 0.0),
    ]
    assert cluster.tenants == (Tenant(name="nlp", quotas={"a100": 8}),)
    assert [n.name for n in cluster.nodes] == ["n0", "n1", "n2", "n3", "n4", "big"]
    assert [n.rack for n in cluster.nodes] == ["r0", "r0", "r1", "r1", "r2", ""]
    assert [n.gpus for n in cluster.nodes] == [4] * 5 + [8]
    assert [dict(n.labels) for n in cluster.nodes[4:]] == [{"zone": "a"}, {}]


def test_a_cluster_file_states_cores_and_host_memory_in_units() -> None:
    text = (
        "gpu_types: {a100: 40GiB}\nnodes:\n"
        "- {name: 'n{}', count: 2, gpu_type: a100, gpus: 4, cpus: 96, host_memory: 1.5 TiB}\n"
        "- {name: printed, gpu_type: a100, gpus: 4, cpus: 0, host_bytes: '1024'}\n"
        "- {name: silent, gpu_type: a100, gpus: 4, reported_cpus: 8, reported_host_bytes: '1'}\n"
    )
    nodes = read_cluster(text, "c.yaml").nodes
    stated = [(n.cpus, n.host_bytes) for n in nodes[:3]]
    assert stated == [(96, 3 * 2**39), (96, 3 * 2**39), (0, 1024)]
    assert nodes[2].HasField("cpus")
    assert not nodes[3].HasField("cpus")
    assert not nodes[3].HasField("host_bytes")


def test_every_key_of_a_tenant_reaches_the_request() -> None:
    text = (
        "tenants:\n  nlp: {weight: 0, quotas: {a100: 8, any: 16}, borrow_gpus: 0,"
        " keeps_idle_quota: true}\n  vision:\n"
    )
    nlp, vision = read_tenants(text, "t.yaml")
    assert nlp == Tenant(
        name="nlp", weight=0.0, borrow_gpus=0, keeps_idle_quota=True, quotas={"a100": 8, "": 16}
    )
    assert vision == Tenant(name="vision")
    assert not vision.HasField("weight")
    assert not vision.HasField("borrow_gpus")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_types: {}", "gpu_types: must name at least one type"),
        ("gpu_types: [a100]", "gpu_types: must map GPU types to their memory"),
        ("gpu_types: {a100: big}", "gpu_types: a100: 'big' is not a size"),
        ("gpu_types: {a: 99999999 TB}", "a: must be at most 1,024 TiB"),
        ("gpu_types: {a: {watts: 1}}", "gpu_types: a: needs 'memory'"),
        ("gpu_types: {a: {memory: 1GiB, watts: -1}}", "a: watts: must be a number from 0"),
        ("gpu_types: {a: {memory: 1GiB, price: 1}}", "a: unknown key 'price' (allowed: memory, "),
        ("a: 1\n---\nb: 1", "must contain one cluster, not 2"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_reported_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_cluster(text, "c.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (f"nodes: [{{{NODE}, host_memory: 512}}]", "nodes[0]: host_memory: '512' has no unit"),
        (
            f"nodes: [{{{NODE}, host_memory: 1GiB, host_bytes: '1'}}]",
            "nodes[0]: host_memory: is the same as 'host_bytes'",
        ),
        ("nodes: [{name: n, gpu_type: b, gpus: 1}]", "unknown GPU type 'b'; must be one of a"),
        ("nodes: [{name: n, gpu_type: a}]", "nodes[0]: needs 'gpus'"),
        ("nodes: [{name: n, gpu_type: a, gpus: 65}]", "gpus: must be a whole"),
        (f"nodes: [{{{NODE}, count: 2}}]", "must contain {}"),
        (f"nodes: [{{{NODE}, count: 100001}}]", "count: must be a whole number from 1 to 100,000"),
        (f"nodes: [{{{NODE}, labels: [zone]}}]", "labels"),
        (f"nodes: [{{{NODE}}}, {{{NODE}}}]", "the node n occurs twice"),
        ("tenants: {nlp: {quotas: {b: 1}}}", "nlp: quotas: unknown GPU type 'b'; must be one of a"),
    ],
)
def test_a_mistake_in_the_nodes_and_tenants_of_a_cluster_is_reported(
    rest: str, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_cluster(f"gpu_types: {{a: 1GiB}}\n{rest}\n", "c.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants: [nlp]", "t.yaml: tenants: must map tenants to their settings"),
        ("tenants: {}", "t.yaml: contains no tenants"),
        ("", "t.yaml: must contain one document with tenants, not 0"),
        ("tenants: {nlp: {wieght: 2}}", "nlp: unknown key 'wieght'; did you mean 'weight'"),
        ("tenants: {nlp: {weight: -1}}", "nlp: weight: must be a number from 0 to"),
        ("tenants: {nlp: {borrow_gpus: -1}}", "nlp: borrow_gpus: must be a whole number from 0"),
        ("tenants: {nlp: {quotas: 8}}", "nlp: quotas: must map GPU types to GPUs"),
        ("tenants: {nlp: {quotas: {a100: some}}}", "quotas: a100: must be a whole number"),
        ("tenants: {nlp: {}, nlp: {}}", "the key 'nlp' occurs twice"),
    ],
)
def test_a_mistake_in_a_tenants_file_is_reported_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_tenants(f"{text}\n", "t.yaml")
    assert message in str(caught.value)


def test_the_nodes_of_a_cluster_file_are_counted_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(*_: object) -> None:
        raise AssertionError("a node was made")

    entries = "".join(
        f"  - {{name: 'n{i}-{{}}', count: 100000, gpu_type: a100, gpus: 4}}\n" for i in range(100)
    )
    monkeypatch.setattr(clusterfile, "Node", make)
    with pytest.raises(InvalidInput, match=r"nodes: has 10,000,000 nodes, and may have 100,000"):
        read_cluster(f"gpu_types: {{a100: 40GiB}}\nnodes:\n{entries}", "c.yaml")
