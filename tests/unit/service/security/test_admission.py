"""Admission: what a caller may name in a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from google.protobuf.message import Message

from tessera.formulation.access import LOCAL, PEOPLE, Identity, Role
from tessera.formulation.errors import InvalidInput, NotFound, PermissionDenied, TooBusy
from tessera.service.security.admission import Admission
from tessera.service.security.roles import RULES
from tessera.v1 import (
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    networks_pb2,
    scheduler_pb2,
    what_if_pb2,
)

TENANTS = {
    ("c", "mine"): "blue",
    ("c", "theirs"): "red",
    ("d", "hidden"): "blue",
    ("c", "none"): "",
}
"""From clusters and jobs to tenants."""


class Looks:
    """A store of the tenants of jobs, which counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, cluster: str, names: Collection[str]) -> dict[str, str]:
        self.asked += 1
        return {name: TENANTS[cluster, name] for name in names if (cluster, name) in TENANTS}


def an_identity(role: Role = Role.USER, tenants: Collection[str] | None = ("blue",)) -> Identity:
    return Identity(
        subject="ana",
        role=role,
        key="token/a",
        clusters=frozenset({"c"}),
        tenants=None if tenants is None else frozenset(tenants),
    )


def an_admission(looks: Looks | None = None, **changes: Any) -> Admission:
    limits: dict[str, Any] = {"calls_per_minute": 0, "job_bytes": 200}
    return Admission(looks or Looks(), **limits | changes)


async def admit(identity: Identity, method: str, request: Message | None, **changes: Any) -> None:
    path = f"/tessera.v1.{method}"
    await an_admission(**changes).admit(identity, path, RULES[path], request)


def naming(job: str) -> dict[str, Message]:
    """Return a request of each method that names one job, by method."""
    j = jobs_pb2
    return {
        "Jobs/GetJob": j.GetJobRequest(name=job),
        "Jobs/WatchJob": j.WatchJobRequest(name=job),
        "Jobs/ReadLogs": j.ReadLogsRequest(name=job, follow=True),
        "Jobs/GetJobCurves": j.GetJobCurvesRequest(name=job),
        "Jobs/ExplainJob": j.ExplainJobRequest(name=job),
        "Jobs/ListJobEvents": j.ListJobEventsRequest(parent=job),
        "Jobs/UpdateJob": j.UpdateJobRequest(job=j.Job(name=job, etag='"999"')),
        "Jobs/CancelJob": j.CancelJobRequest(name=job, etag='"999"', validate_only=True),
        "Jobs/HoldJob": j.HoldJobRequest(name=job, request_id="r"),
        "Jobs/ReleaseJob": j.ReleaseJobRequest(name=job),
        "Estimates/EstimateCells": estimates_pb2.EstimateCellsRequest(
            parent="clusters/c", job=job, validate_only=True
        ),
        "Networks/GetNetworkPlan": networks_pb2.GetNetworkPlanRequest(
            name="clusters/c/networkPlans/-", job=job
        ),
        "Scheduler/WhatIf": scheduler_pb2.WhatIfRequest(
            parent="clusters/c", needed_weight=what_if_pb2.NeededWeightQuestion(job=job)
        ),
    }


NAMING = tuple(naming(""))


@pytest.mark.parametrize("method", NAMING)
async def test_a_job_of_another_tenant_is_as_missing_as_one_that_never_was(method: str) -> None:
    await admit(an_identity(), method, naming("clusters/c/jobs/mine")[method])
    for job in ("theirs", "none", "never", "\N{SNOWMAN}", "x\0"):
        name = f"clusters/c/jobs/{job}"
        with pytest.raises(NotFound) as refused:
            await admit(an_identity(), method, naming(name)[method])
        assert str(refused.value) == str(NotFound(name))


@pytest.mark.parametrize("method", NAMING)
async def test_a_job_of_a_cluster_out_of_sight_is_as_missing_as_the_cluster(method: str) -> None:
    looks = Looks()
    for cluster, job in (("d", "hidden"), ("d", "never"), ("e", "never")):
        with pytest.raises(NotFound):
            await admit(
                an_identity(), method, naming(f"clusters/{cluster}/jobs/{job}")[method], looks=looks
            )
    assert not looks.asked  # so that the time tells nothing


@pytest.mark.parametrize("method", NAMING)
@pytest.mark.parametrize(
    "job",
    ["mine", "clusters/c/jobs/", "jobs/mine", "clusters/c/jobs/mine/x", "clusters//jobs/mine"],
)
async def test_malformed_names_are_left_to_the_method(method: str, job: str) -> None:
    await admit(an_identity(), method, naming(job)[method])


async def test_callers_that_see_all_tenants_cause_no_lookup() -> None:
    looks = Looks()
    for method, request in naming("clusters/c/jobs/theirs").items():
        await admit(an_identity(Role.OPERATOR, None), method, request, looks=looks)
    assert not looks.asked


def submitted(tenant: str, **rest: Any) -> jobs_pb2.SubmitJobRequest:
    return jobs_pb2.SubmitJobRequest(parent="clusters/c", job=jobs_pb2.Job(tenant=tenant, **rest))


async def test_a_submission_goes_to_the_callers_only_tenant() -> None:
    request = submitted("")
    await admit(an_identity(), "Jobs/SubmitJob", request)
    assert request.job.tenant == "blue"
    batch = jobs_pb2.SubmitJobsRequest(
        parent="clusters/c", requests=[submitted(""), submitted("blue")]
    )
    await admit(an_identity(), "Jobs/SubmitJobs", batch)
    assert [inner.job.tenant for inner in batch.requests] == ["blue", "blue"]


async def test_a_caller_of_several_tenants_names_one_of_them() -> None:
    both = an_identity(tenants=("blue", "green"))
    await admit(both, "Jobs/SubmitJob", submitted("green"))
    with pytest.raises(InvalidInput, match=r"job\.tenant.*one of your tenants: blue, green"):
        await admit(both, "Jobs/SubmitJob", submitted(""))
    with pytest.raises(InvalidInput, match="none; ask an administrator"):
        await admit(an_identity(tenants=()), "Jobs/SubmitJob", submitted(""))


@pytest.mark.parametrize("tenant", ["red", "never", "Blue", "blue ", " ", "*", "blue\0"])
async def test_a_submission_to_another_tenant_is_refused_whether_or_not_it_exists(
    tenant: str,
) -> None:
    batch = jobs_pb2.SubmitJobsRequest(
        parent="clusters/c", requests=[submitted("blue"), submitted(tenant)]
    )
    for method, request in (("SubmitJob", submitted(tenant)), ("SubmitJobs", batch)):
        with pytest.raises(NotFound) as refused:
            await admit(an_identity(), f"Jobs/{method}", request)
        assert str(refused.value) == str(NotFound(f"clusters/c/tenants/{tenant}"))


async def test_a_job_whose_description_is_too_large_is_refused_whoever_submits_it() -> None:
    large = submitted("blue", command=["x" * 300])
    batch = jobs_pb2.SubmitJobsRequest(parent="clusters/c", requests=[submitted("blue"), large])
    for identity in (LOCAL, an_identity(), an_identity(Role.ADMIN, None)):
        with pytest.raises(InvalidInput, match=r"job: has 3\d\d bytes, and a job may have 200"):
            await admit(identity, "Jobs/SubmitJob", large)
        with pytest.raises(InvalidInput, match=r"requests\[1\]\.job: has 3\d\d bytes"):
            await admit(identity, "Jobs/SubmitJobs", batch)


@pytest.mark.parametrize("role", [*PEOPLE, Role.AGENT])
async def test_each_role_may_call_its_methods_and_no_others(role: Role) -> None:
    identity = an_identity(role, None)
    for path, rule in RULES.items():
        if rule.is_open or role in rule.roles:
            await an_admission().admit(identity, path, rule, None)
            continue
        with pytest.raises(PermissionDenied) as refused:
            await an_admission().admit(identity, path, rule, None)
        assert f"and ana has the role {role}" in str(refused.value)


async def test_a_cluster_out_of_sight_does_not_exist() -> None:
    operator = an_identity(Role.OPERATOR, None)
    for request in (
        clusters_pb2.DeleteNodesRequest(parent="clusters/d", names=["clusters/c/nodes/n"]),
        clusters_pb2.DeleteNodesRequest(parent="clusters/never"),
    ):
        with pytest.raises(NotFound, match=request.parent):
            await admit(operator, "Clusters/DeleteNodes", request)
    await admit(
        operator, "Clusters/DeleteNodes", clusters_pb2.DeleteNodesRequest(parent="clusters/c")
    )


async def test_a_tenants_calls_are_limited_together_and_operators_are_not() -> None:
    path = "/tessera.v1.Jobs/ListJobs"
    admission = an_admission(calls_per_minute=60, monotonic_s=lambda: 0.0)
    request = jobs_pb2.ListJobsRequest(parent="clusters/c")

    async def call(subject: str, role: Role, *tenants: str) -> None:
        identity = Identity(
            subject=subject,
            role=role,
            key=f"token/{subject}",
            tenants=frozenset(tenants) if tenants else None,
        )
        await admission.admit(identity, path, RULES[path], request)

    for k in range(10):
        await call(f"user-{k}", Role.USER, "blue")
    with pytest.raises(TooBusy, match="calls of tenant blue may not exceed 60 a minute"):
        await call("another", Role.VIEWER, "blue")
    await call("user-0", Role.USER, "red")
    for _ in range(100):
        await call("op", Role.OPERATOR)
    for _ in range(10):
        await call("of-two", Role.USER, "blue", "red")
    with pytest.raises(TooBusy, match="calls of of-two"):
        await call("of-two", Role.USER, "blue", "red")


async def test_a_refused_role_does_not_count_as_a_call() -> None:
    admission = an_admission(calls_per_minute=6, monotonic_s=lambda: 0.0)
    path = "/tessera.v1.Clusters/DeleteNodes"
    for _ in range(20):
        with pytest.raises(PermissionDenied):
            await admission.admit(an_identity(), path, RULES[path], None)
