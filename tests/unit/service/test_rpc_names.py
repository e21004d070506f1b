"""Resource names, page tokens and errors of the API: parsed strictly, and short."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base import errors
from tessera.formulation.base.errors import InvalidInput, RoundSuperseded, TesseraError
from tessera.service.server.convert import names
from tessera.service.server.convert.clusters import to_gpu_types
from tessera.service.server.convert.tenants import to_tenant
from tessera.service.server.rpc.paging import PageRequest, page_of
from tessera.service.server.rpc.serving.errors import CODES, DOMAIN, code_of, status_of
from tessera.solvers.base import SolverFailed
from tessera.v1 import agents_pb2, clusters_pb2, jobs_pb2, networks_pb2, tenants_pb2
from tessera.v1 import jobs_pb2 as pb

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", fullmatch=True)


@given(ids, ids, st.integers(0, 10**18 - 1))
def test_a_formatted_name_parses_back(cluster: str, other: str, number: int) -> None:
    assert names.parse_cluster("name", names.cluster_name(cluster)) == cluster
    assert names.parse_node("name", names.node_name(cluster, other)) == (cluster, other)
    assert names.parse_job("name", names.job_name(cluster, other)) == (cluster, other)
    assert names.parse_round("name", names.round_name(cluster, number)) == (cluster, number)
    for wrong in ("01", "-1", "x", "1" * 19):
        with pytest.raises(InvalidInput):
            names.parse_round("name", f"clusters/c/rounds/{wrong}")


@given(st.text(max_size=60).map("clusters/c/jobs/{}".format) | st.text(max_size=60))
def test_any_text_is_a_valid_name_or_is_refused(text: str) -> None:
    try:
        cluster, job = names.parse_job("job.name", text)
    except InvalidInput:
        return
    assert names.job_name(cluster, job) == text


def test_a_malformed_job_name_is_refused() -> None:
    for name in ("", "c", "clusters/", "clusters/c/", "clusters//jobs/j", "/clusters/c/jobs/j"):
        with pytest.raises(InvalidInput):
            names.parse_job("name", name)
    for end in ("jobs/..", "jobs/-x", "nodes/n", "jobs/j\n", "jobs/" + "x" * 101):
        with pytest.raises(InvalidInput):
            names.parse_job("name", f"clusters/c/{end}")


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
]
HOSTILE += ["%2e%2e"]


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


def test_any_may_be_the_quota_of_any_type_but_not_the_name_of_a_gpu_type() -> None:
    kind = clusters_pb2.GpuType(name="any", memory_bytes=1)
    with pytest.raises(InvalidInput, match=r"gpu_types\[0\]\.name: 'any' is reserved"):
        to_gpu_types("gpu_types", [kind])
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


def page(request: pb.ListJobsRequest, *, counts: bool = False) -> PageRequest:
    return page_of(request, request.page_size, request.page_token, most=1000, counts=counts)


@given(st.text(min_size=1, max_size=100))
def test_a_token_decodes_to_its_cursor(cursor: str) -> None:
    first = page(pb.ListJobsRequest(parent="clusters/c"))
    token = first.token(cursor)
    assert page(pb.ListJobsRequest(parent="clusters/c", page_size=7, page_token=token)).cursor == (
        cursor
    )


def test_a_token_of_another_filter_or_parent_is_refused() -> None:
    token = page(pb.ListJobsRequest(parent="clusters/c")).token("x")
    for other in (
        pb.ListJobsRequest(parent="clusters/d", page_token=token),
        pb.ListJobsRequest(parent="clusters/c", page_token=token, states=[pb.QUEUED]),
    ):
        with pytest.raises(InvalidInput, match="page_token"):
            page(other)


@given(st.text(min_size=1, max_size=50))
def test_any_other_text_is_not_a_token(text: str) -> None:
    with pytest.raises(InvalidInput, match="page_token"):
        page(pb.ListJobsRequest(parent="clusters/c", page_token=text))


def test_a_token_with_a_broken_content_is_refused() -> None:
    binding = page(pb.ListJobsRequest()).binding
    cursors = (json.dumps([cursor, binding]) for cursor in ("x", "-1", "1" * 19, "٣"))
    for content in ("[" * 100_000, "9" * 10_000, '{"a":' * 500, "[1e999, NaN]", *cursors):
        forged = base64.urlsafe_b64encode(content.encode()).decode()
        with pytest.raises(InvalidInput, match="page_token"):
            page(pb.ListJobsRequest(page_token=forged), counts=True)


def test_a_page_size_is_capped_and_the_last_page_has_no_token() -> None:
    for requested, given_size in ((0, 100), (7, 7), (1000, 1000), (5000, 1000)):
        assert page(pb.ListJobsRequest(page_size=requested)).size == given_size
    with pytest.raises(InvalidInput, match="page_size"):
        page(pb.ListJobsRequest(page_size=-1))
    assert page(pb.ListJobsRequest()).token("") == page(pb.ListJobsRequest()).token(0) == ""


def subclasses_of(kind: type[TesseraError]) -> Iterator[type[TesseraError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses_of(child)


def test_every_error_class_is_in_the_table_and_another_has_its_ancestors_code() -> None:
    kinds = {errors.__name__, SolverFailed.__module__}
    assert {k for k in subclasses_of(TesseraError) if k.__module__ in kinds} <= CODES.keys()

    class Special(errors.NotFound):
        """An error that only this test defines."""

    assert code_of(Special("x")) is grpc.StatusCode.NOT_FOUND


def test_a_wrong_field_is_named_in_a_bad_request() -> None:
    status = status_of(InvalidInput("job.weight", "must be positive"))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == (DOMAIN, "INVALID_INPUT")
    assert bad.field_violations[0].field == "job.weight"
    assert bad.field_violations[0].description == "must be positive"


def test_an_overtaken_round_names_the_winning_round() -> None:
    status = status_of(RoundSuperseded("clusters/c/rounds/7"))
    info = error_details_pb2.ErrorInfo()
    assert status.code == grpc.StatusCode.ABORTED.value[0]
    assert status.details[0].Unpack(info)
    assert (info.reason, dict(info.metadata)) == (
        "ROUND_SUPERSEDED",
        {"winner": "clusters/c/rounds/7"},
    )


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_a_long_message_is_cut_to_fit_into_headers(letter: str) -> None:
    status = status_of(InvalidInput(letter * 9000, letter * 9000))
    percent_encoded = 3 * len(status.message.encode())
    base64_encoded = status.ByteSize() * 4 // 3
    assert percent_encoded + base64_encoded < 8192


def test_no_part_of_a_status_shows_a_secret() -> None:
    secret = "tessera_token_0123456789ab_" + "s" * 43
    long_text = "x" * 560 + secret  # the end of the token is cut off
    for error in (
        InvalidInput(secret, f"{secret} is not a token"),
        errors.NotFound(f"tokens/{secret}"),
        errors.Unavailable(f"cannot reach postgresql://ada:ssssss@db: {secret}"),
        errors.NotAllowed(long_text),
    ):
        encoded = status_of(error).SerializeToString()
        assert b"ssss" not in encoded
        assert b"***" in encoded
