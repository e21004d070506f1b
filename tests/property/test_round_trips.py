"""Round trips of the command line: it reads the YAML that it prints, and applying that changes nothing."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import ClusterRecord, NodeRecord, NodeSpec, TenantSpec
from tessera.service.cli.clusters import tenants as tenants_cli
from tessera.service.cli.clusters.clusterfile import read_cluster
from tessera.service.cli.clusters.tenantfile import read_tenants
from tessera.service.cli.clusters.topology import read_document
from tessera.service.cli.options import Output
from tessera.service.cli.render import show_message
from tessera.service.server.convert.clusters import of_cluster, of_node, to_gpu_types, to_node_spec
from tessera.service.server.convert.tenants import of_tenant, to_tenant
from tessera.v1 import clusters_pb2, networks_pb2

IDS = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
TYPES = IDS.filter(lambda name: name != "any")
COSTS = st.floats(0.0, 1e6, allow_nan=False)
RACKS = st.text(st.characters(max_codepoint=0x2FF).filter(str.isprintable), max_size=20)
QUOTAS = st.dictionaries(TYPES | st.just(""), st.integers(0, 10**6), max_size=3)

GPU_TYPES = st.lists(
    st.builds(
        GpuType, name=TYPES, memory_bytes=st.integers(1, 2**50), dollars_per_hour=COSTS, watts=COSTS
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda kind: kind.name,
)


def print_message(message: Message, output: Output = Output.YAML) -> str:
    """Return the command line's output for ``message``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert show_message(message, output)
    return out.getvalue()


@given(
    IDS,
    GPU_TYPES,
    st.integers(0, 10**6),
    st.integers(0, 99),
    st.sampled_from([Output.YAML, Output.JSON]),
)
def test_a_printed_cluster_reads_back(
    name: str, kinds: list[GpuType], nodes: int, last_round: int, output: Output
) -> None:
    record = ClusterRecord(
        name=name,
        gpu_types=tuple(kinds),
        version=7,
        created_s=1e9,
        nodes=nodes,
        gpus=8 * nodes,
        last_round=last_round,
        epoch=3,
    )
    message = of_cluster(record)
    cluster = read_cluster(print_message(message, output), "c.yaml")
    assert (cluster.name, cluster.etag, cluster.nodes) == (message.name, message.etag, ())
    assert to_gpu_types("x", cluster.gpu_types) == record.gpu_types


@given(
    st.lists(
        st.tuples(IDS, st.integers(1, 64), RACKS), min_size=1, max_size=5, unique_by=lambda n: n[0]
    ),
    st.booleans(),
    st.floats(0, 1e6) | st.just(float("inf")),
)
def test_printed_nodes_read_back(
    rows: list[tuple[str, int, str]], draining: bool, silent_s: float
) -> None:
    kind = GpuType(name="a100", memory_bytes=2**35)
    cluster = ClusterRecord(
        name="c",
        gpu_types=(kind,),
        version=1,
        created_s=0.0,
        nodes=0,
        gpus=0,
        last_round=0,
        epoch=0,
    )
    records = [
        NodeRecord(
            spec=NodeSpec(name=name, gpu_type="a100", gpus=gpus, rack=rack, version=2),
            draining=draining,
            version=2,
            free_gpus=0,
            jobs=("j",),
            silent_s=silent_s,
            network_remarks=("slow",),
            drain_reason="fan" if draining else "",
            drained_by="ann" if draining else "",
            drained_s=1e9 if draining else None,
        )
        for name, gpus, rack in rows
    ]
    shown = clusters_pb2.ListNodesResponse(nodes=[of_node("c", r, 30.0) for r in records])
    text = json.loads(print_message(of_cluster(cluster), Output.JSON)) | {
        "nodes": json.loads(print_message(shown, Output.JSON))["nodes"]
    }
    found = read_cluster(json.dumps(text), "c.yaml")
    assert [to_node_spec("x", "c", node) for node in found.nodes] == [r.spec for r in records]


@given(
    st.lists(
        st.builds(
            TenantSpec,
            name=IDS,
            weight=st.floats(0, 1e6),
            borrow_gpus=st.integers(-1, 10**6),
            keeps_idle_quota=st.booleans(),
            quotas=QUOTAS,
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda spec: spec.name,
    )
)
def test_printed_tenants_read_back_and_name_the_quota_of_any_type_any(
    specs: list[TenantSpec],
) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        tenants_cli._show([of_tenant("c", spec) for spec in specs], Output.YAML)
    text = out.getvalue()
    assert "'': " not in text
    assert ("any: " in text) == any("" in spec.quotas for spec in specs)
    assert [to_tenant("x", "c", t) for t in read_tenants(text, "t.yaml")] == specs


@pytest.mark.parametrize("output", [Output.YAML, Output.JSON])
def test_a_printed_topology_reads_back_with_its_etag(tmp_path: Path, output: Output) -> None:
    document: dict[str, Any] = {
        "hosts": ["a", "b"],
        "host": {"like": "pcie"},
        "switches": [],
        "links": [],
    }
    message = networks_pb2.Topology(
        name="clusters/c/topology",
        document=json.dumps(document),
        etag='"4"',
        hosts=2,
        missing_nodes=["n"],
    )
    file = tmp_path / "topology.yaml"
    file.write_text(print_message(message, output))
    assert read_document(str(file)) == (document, '"4"')
    file.write_text(json.dumps(document))
    assert read_document(str(file)) == (document, "")
