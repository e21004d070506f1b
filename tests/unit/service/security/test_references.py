"""References of requests: every text has a kind, and what others own is as if it never was."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tessera.formulation.base.access import Identity, Role
from tessera.formulation.base.errors import NotFound
from tessera.service.server.security.admission import Admission
from tessera.service.server.security.references import (
    KINDS,
    Kind,
    Path,
    find_texts,
    key_of,
    kind_of,
    references_of,
)
from tessera.service.server.security.roles import RULES
from tessera.v1 import (
    jobs_pb2,
    scheduler_pb2,
    tenants_pb2,
    webhooks_pb2,
    what_if_pb2,
)
from tests.support.messages import set_text
from tests.support.methods import all_methods

C = "clusters/c"
CHECKED_BY_THE_GATE = {
    Kind.RESOURCE: "clusters/hidden/nodes/{id}",
    Kind.JOB: f"{C}/jobs/{{id}}",
    Kind.TENANT: f"{C}/tenants/{{id}}",
    Kind.TENANT_ID: "{id}",
    Kind.AWAITED: "clusters/hidden/jobs/{id}",
    Kind.OWNED: "clusters/hidden/arrays/{id}",
}
"""What a caller that is bound to a tenant and a cluster does not see, by kind."""


async def find_tenants(cluster: str, names: Collection[str]) -> dict[str, str]:
    return {name: "red" for name in names if name == "theirs"}


BOUND = Identity(
    subject="ana",
    role=Role.USER,
    key="token/a",
    clusters=frozenset({"c"}),
    tenants=frozenset({"blue"}),
)


def texts_of(method: str) -> Iterator[Path]:
    yield from find_texts(all_methods()[method].input_type)


def test_every_text_of_every_request_has_a_kind_and_no_line_is_left_over() -> None:
    used = set[str]()
    for method in all_methods():
        for path in texts_of(method):
            assert kind_of(path) is not None, f"{method}: give {path[-1].full_name} a kind"
            used.add(key_of(path))
        used |= set(map(key_of, fields_of(all_methods()[method].input_type)))
    assert set(KINDS) - used == set()


def fields_of(descriptor: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths to all fields of a message, at any depth."""
    for field in descriptor.fields:
        yield (*path, field)
        if field.message_type is not None:
            yield from fields_of(field.message_type, (*path, field))


def test_job_and_tenant_fields_are_no_mere_texts_and_no_reference_is_within_a_map() -> None:
    for method in all_methods():
        for path in texts_of(method):
            if path[-1].name.startswith(("job_", "job", "tenant")) and path[-1].name != "job_id":
                assert kind_of(path) is not Kind.TEXT, path[-1].full_name
            # The walk through a request does not look into maps.
            if any(f.message_type and f.message_type.GetOptions().map_entry for f in path):
                assert kind_of(path) is Kind.TEXT


def hidden_requests() -> Iterator[tuple[str, Path, Kind]]:
    """Yield each method with a path to what its caller may not see."""
    for method, rule in RULES.items():
        if Role.USER not in rule.roles or rule.is_open or method.startswith("/grpc"):
            continue
        for path in texts_of(method):
            kind = kind_of(path)
            assert kind is not None
            if kind in CHECKED_BY_THE_GATE:
                yield method, path, kind


HIDDEN = {
    f"{method.rpartition('.')[2]}:{'.'.join(field.name for field in path)}": (method, path, kind)
    for method, path, kind in hidden_requests()
}


assert {
    "Scheduler/WhatIf:hypothesis.changes.tenant_changed.tenant",
    "Scheduler/WhatIf:hypothesis.changes.job_added.job.after.job",
    "Webhooks/CreateWebhook:webhook.tenant",
    "Jobs/SubmitJobs:requests.job.tenant",
} <= set(HIDDEN), "the derivation misses paths"


@pytest.mark.parametrize("where", HIDDEN)
async def test_what_belongs_to_others_is_as_missing_as_what_never_was(where: str) -> None:
    method, path, kind = HIDDEN[where]
    outcomes = []
    for name in ("theirs", "never"):
        request = GetMessageClass(all_methods()[method].input_type)()
        if "parent" in request.DESCRIPTOR.fields_by_name:
            request.parent = C  # type: ignore[attr-defined]
        set_text(request, path, CHECKED_BY_THE_GATE[kind].format(id=name))
        admission = Admission(find_tenants, calls_per_minute=0, job_bytes=10_000)
        with pytest.raises(NotFound) as refused:
            await admission.admit(BOUND, method, RULES[method], request)
        outcomes.append(str(refused.value).replace(name, "NAME"))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (
            scheduler_pb2.WhatIfRequest(
                parent=C,
                hypothesis=scheduler_pb2.Hypothesis(
                    changes=[
                        what_if_pb2.HypotheticalChange(
                            tenant_changed=what_if_pb2.TenantChange(tenant=f"{C}/tenants/t")
                        ),
                        what_if_pb2.HypotheticalChange(job_removed=f"{C}/jobs/j"),
                    ]
                ),
            ),
            [(Kind.RESOURCE, C), (Kind.JOB, f"{C}/jobs/j"), (Kind.TENANT, f"{C}/tenants/t")],
        ),
        (
            jobs_pb2.UpdateJobRequest(job=jobs_pb2.Job(name=f"{C}/jobs/j", tenant="ignored")),
            [(Kind.JOB, f"{C}/jobs/j")],
        ),
        (
            jobs_pb2.SubmitJobRequest(job=jobs_pb2.Job(name="ignored", tenant="t")),
            [(Kind.TENANT_ID, "t")],
        ),
        (
            tenants_pb2.GetUsageRequest(tenants=["a", "", "b"]),
            [(Kind.TENANT_ID, "a"), (Kind.TENANT_ID, "b")],
        ),
        (webhooks_pb2.ListWebhooksRequest(), []),
    ],
)
def test_the_references_of_a_request_are_what_it_names(
    request_: Message, found: list[tuple[Kind, str]]
) -> None:
    assert sorted(references_of(request_), key=str) == sorted(found, key=str)


async def test_the_jobs_of_a_request_are_looked_up_together() -> None:
    asked = []

    async def find(cluster: str, names: Collection[str]) -> dict[str, str]:
        asked.append((cluster, list(names)))
        return dict.fromkeys(names, "blue")

    removed = [what_if_pb2.HypotheticalChange(job_removed=f"{C}/jobs/j{k}") for k in range(1000)]
    request = scheduler_pb2.WhatIfRequest(
        parent=C, hypothesis=scheduler_pb2.Hypothesis(changes=removed)
    )
    method = "/tessera.v1.Scheduler/WhatIf"
    admission = Admission(find, calls_per_minute=0, job_bytes=1)
    await admission.admit(BOUND, method, RULES[method], request)
    assert asked == [("c", [f"j{k}" for k in range(1000)])]
