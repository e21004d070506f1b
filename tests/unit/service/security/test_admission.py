"""Admission of calls: quotas and rates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from google.protobuf.message import Message

from tessera.formulation.base.access import LOCAL, Identity, Role
from tessera.formulation.base.errors import InvalidInput, NotFound, PermissionDenied, TooBusy
from tessera.service.server.security import limits
from tessera.service.server.security.admission import Admission
from tessera.service.server.security.limits import CallRate
from tessera.service.server.security.roles import RULES
from tessera.v1 import jobs_pb2
from tests.support.hand_clock import HandClock

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


async def test_only_well_formed_names_in_a_visible_cluster_are_looked_up() -> None:
    """Otherwise the time of an answer would tell whether a job exists."""
    looks = Looks()
    for job in ("clusters/d/jobs/hidden", "clusters/e/jobs/never"):
        with pytest.raises(NotFound):
            await admit(an_identity(), "Jobs/GetJob", a_get(job), looks=looks)
    for job in ("mine", "clusters/c/jobs/", "jobs/mine", "clusters/c/jobs/mine/x"):
        await admit(an_identity(), "Jobs/GetJob", a_get(job), looks=looks)  # the method refuses it
    every = an_identity(Role.OPERATOR, None)
    await admit(every, "Jobs/GetJob", a_get("clusters/c/jobs/theirs"), looks=looks)
    assert not looks.asked
    await admit(an_identity(), "Jobs/GetJob", a_get("clusters/c/jobs/mine"))
    for name in ("theirs", "none", "\N{SNOWMAN}", "x\0"):
        with pytest.raises(NotFound):
            await admit(an_identity(), "Jobs/GetJob", a_get(f"clusters/c/jobs/{name}"))


def a_get(job: str) -> jobs_pb2.GetJobRequest:
    return jobs_pb2.GetJobRequest(name=job)


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


def taken(rate: CallRate, name: str) -> int:
    """Take until the rate refuses; return how many calls it allowed."""
    for count in range(10_000):
        try:
            rate.take(name)
        except TooBusy:
            return count
    raise AssertionError("there is no limit")


def test_a_sixth_of_the_calls_may_come_at_once_and_the_rest_over_a_minute() -> None:
    clock = HandClock()
    rate = CallRate(600, "calls", clock)
    assert taken(rate, "a") == 100
    clock.now_s += 2.0
    assert taken(rate, "a") == 20
    clock.now_s += 3600.0
    assert taken(rate, "a") == 100


def test_callers_are_counted_apart_and_told_when_to_call_again() -> None:
    rate = CallRate(60, "calls", HandClock())
    assert taken(rate, "a") == 10
    assert taken(rate, "b") == 10
    rate = CallRate(6, "enrolments", HandClock())
    rate.take("10.0.0.1")
    with pytest.raises(
        TooBusy, match=r"enrolments of 10\.0\.0\.1 may not exceed 6 a minute; .* 10\.0 s"
    ):
        rate.take("10.0.0.1")


def test_a_call_that_does_not_count_is_put_back_and_zero_is_no_limit() -> None:
    rate = CallRate(60, "calls", HandClock())
    for _ in range(100):
        rate.take("a")
        rate.put_back("a")
    assert taken(rate, "a") == 10
    rate.put_back("nobody")
    assert taken(rate, "nobody") == 10
    rate = CallRate(0, "calls", HandClock())
    for _ in range(1000):
        rate.take("a")


def test_a_flood_of_names_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMEMBERED", 3)
    rate = CallRate(60, "calls", HandClock())
    for number in range(100):
        rate.take(str(number))
    assert len(rate._left) == 3
    assert taken(rate, "99") == 9
