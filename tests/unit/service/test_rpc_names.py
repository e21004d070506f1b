"""Resource names: parsed strictly, with errors that show the expected form."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.errors import InvalidInput
from tessera.service.rpc import names
from tessera.service.rpc.convert.clusters import to_gpu_types
from tessera.service.rpc.convert.tenants import to_tenant
from tessera.v1 import agents_pb2, clusters_pb2, jobs_pb2, networks_pb2, tenants_pb2

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", fullmatch=True)


@given(ids, ids, st.integers(0, 10**18 - 1))
def test_a_formatted_name_parses_back(cluster: str, other: str, number: int) -> None:
    assert names.parse_cluster("name", names.cluster_name(cluster)) == cluster
    assert names.parse_node("name", names.node_name(cluster, other)) == (cluster, other)
    assert names.parse_job("name", names.job_name(cluster, other)) == (cluster, other)
    assert names.parse_round("name", names.round_name(cluster, number)) == (cluster, number)


@given(st.text(max_size=60).map("clusters/c/jobs/{}".format) | st.text(max_size=60))
def test_any_text_is_a_valid_name_or_is_refused(text: str) -> None:
    try:
        cluster, job = names.parse_job("job.name", text)
    except InvalidInput:
        return
    assert names.job_name(cluster, job) == text


@pytest.mark.parametrize(
    "name",
    [
        "",
        "c",
        "clusters/",
        "clusters/c/",
        "clusters//jobs/j",
        "clusters/c/jobs/..",
        "clusters/c/jobs/-x",
        "clusters/c/nodes/n",
        "/clusters/c/jobs/j",
        "clusters/c/jobs/j\n",
        "clusters/c/jobs/" + "x" * 101,
    ],
)
def test_a_malformed_job_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        names.parse_job("name", name)


@pytest.mark.parametrize("number", ["01", "-1", "x", "1" * 19])
def test_a_round_is_named_by_a_plain_number(number: str) -> None:
    with pytest.raises(InvalidInput):
        names.parse_round("name", f"clusters/c/rounds/{number}")


HOSTILE = [
    "../x",
    "..",
    ".",
    "a/../b",
    "a\0b",
    "a\nb",
    "x" * 10_000,
    "\u202ea",
    "é",
    " a",
    "deleted/1",
    "%2e%2e",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_resource_name_may_leave_its_collection_or_be_too_long(text: str) -> None:
    """The limits hold for clusters, nodes, tenants, jobs, agents and GPU types; errors stay short."""
    for parse in (
        lambda: names.require_identifier("hello.agent_id", text),
        lambda: names.require_gpu_type("gpu_type", text),
        lambda: names.parse_cluster("name", f"clusters/{text}"),
        lambda: names.parse_node("name", f"clusters/c/nodes/{text}"),
        lambda: names.parse_tenant("name", f"clusters/c/tenants/{text}"),
        lambda: names.parse_job("name", f"clusters/c/jobs/{text}"),
    ):
        with pytest.raises(InvalidInput) as caught:
            parse()
        assert len(str(caught.value)) < 200


def test_no_gpu_type_may_be_named_any_which_quotas_use_for_any_type() -> None:
    kind = clusters_pb2.GpuType(name="any", memory_bytes=1)
    with pytest.raises(InvalidInput, match=r"gpu_types\[0\]\.name: 'any' is reserved"):
        to_gpu_types("gpu_types", [kind])


def test_the_quota_of_any_type_may_be_named_any_but_not_by_both_names() -> None:
    tenant = tenants_pb2.Tenant(name="clusters/c/tenants/t", quotas={"any": 3, "a100": 1})
    assert to_tenant("tenant", "c", tenant).quotas == {"": 3, "a100": 1}
    tenant.quotas[""] = 4
    with pytest.raises(InvalidInput, match="both"):
        to_tenant("tenant", "c", tenant)


@pytest.mark.parametrize(
    ("request_", "cluster"),
    [
        (jobs_pb2.ListJobsRequest(parent="clusters/c"), "c"),
        (jobs_pb2.GetJobRequest(name="clusters/c/jobs/clusters"), "c"),
        (jobs_pb2.UpdateJobRequest(job=jobs_pb2.Job(name="clusters/c/jobs/j")), "c"),
        (clusters_pb2.UpsertClusterRequest(cluster=clusters_pb2.Cluster(name="clusters/c")), "c"),
        (networks_pb2.GetTopologyRequest(name="clusters/c/topology"), "c"),
        (agents_pb2.AgentMessage(hello=agents_pb2.Hello(parent="clusters/c")), "c"),
        (clusters_pb2.ListClustersRequest(), ""),
        (jobs_pb2.GetJobRequest(name="jobs/j"), ""),
        (jobs_pb2.GetJobRequest(name="clusters//jobs/j"), ""),
    ],
)
def test_the_cluster_of_a_request_is_found_in_every_field_that_names_it(
    request_: Message, cluster: str
) -> None:
    assert names.find_cluster(request_) == cluster
