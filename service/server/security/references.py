"""The references of requests: each text field of each request, and what it names.

A field without a line here is refused, and ``tests/unit/service/security/test_references.py`` finds
it before. So a new field of a request cannot name another tenant's resources without a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message


class Kind(Enum):
    """A kind of what a text names, which decides the rule for it."""

    TEXT = auto()
    """Nothing that belongs to one tenant."""
    RESOURCE = auto()
    """A resource of a cluster that all of the cluster's callers may see: the cluster must be seen."""
    JOB = auto()
    """``clusters/{cluster}/jobs/{job}``: the job's tenant must be seen, too."""
    TENANT = auto()
    """``clusters/{cluster}/tenants/{tenant}``: the tenant must be seen."""
    TENANT_ID = auto()
    """The id of a tenant of the request's cluster, which must be seen."""
    AWAITED = auto()
    """A job or an array that a job waits for. The store counts those of other tenants as unknown."""
    OWNED = auto()
    """An array or a webhook. The store counts those of other tenants as missing."""
    GRANTED = auto()
    """A name that only administrators state, who see everything."""
    REPORTED = auto()
    """A name in an agent's report. Its session has proved which nodes and gangs are its own."""
    IGNORED = auto()
    """A field of answers, or one that cannot be changed. Its value in a request is ignored."""


_EVERYWHERE: Final = {
    "parent": Kind.RESOURCE,
    "request_id": Kind.TEXT,
    "etag": Kind.TEXT,
    "page_token": Kind.TEXT,
}
"""The fields that name the same in every message for which ``_NAMES`` does not say otherwise."""

_NAMES: Final[dict[Kind, str]] = {
    Kind.RESOURCE: """
        Cluster.name DeleteClusterRequest.name DeleteNodeRequest.name DeleteNodesRequest.names
        DeleteReservationsRequest.names DeleteTopologyRequest.name
        DrainNodesRequest.names GetClusterRequest.name GetNetworkPlanRequest.name
        GetNodeRequest.name GetReservationRequest.name GetRoundRequest.name
        GetTopologyRequest.name HypotheticalChange.node_lost Job.avoid_nodes Node.name
        ReplayRoundRequest.name Reservation.name Topology.name UndrainNodesRequest.names
        UpdateReservationRequest.name VerifyRoundRequest.name""",
    Kind.JOB: """
        CancelJobRequest.name CellEstimate.job EstimateCellsRequest.job ExplainJobRequest.name
        GetJobCurvesRequest.name GetJobRequest.name GetNetworkPlanRequest.job HoldJobRequest.name
        HypotheticalChange.job_removed JobChange.job ListJobEventsRequest.parent
        ReadLogsRequest.name ReleaseJobRequest.name UpdateJobRequest.job.name
        WatchJobRequest.name""",
    Kind.TENANT: "DeleteTenantsRequest.names Tenant.name TenantChange.tenant",
    Kind.TENANT_ID: """
        GetUsageRequest.tenants Job.tenant Reservation.tenant Tenant.parent Webhook.tenant""",
    Kind.AWAITED: "Dependency.job",
    Kind.OWNED: """
        ChangeArrayRequest.name DeleteWebhookRequest.name GetArrayRequest.name
        TestWebhookRequest.name""",
    Kind.GRANTED: """
        ListAuditEntriesRequest.method ListAuditEntriesRequest.subject
        ListAuditEntriesRequest.target RevokeTokenRequest.name Token.clusters Token.name
        Token.tenants""",
    Kind.REPORTED: """
        AgentNode.node EnrolRequest.agent_id EnrolRequest.nodes Hello.agent_id LogAnswer.read_id
        NodeHealth.node ObservedGang.job ObservedGang.node""",
    Kind.IGNORED: """
        Cluster.last_round Dependency.state Job.allocation Job.array Job.forecast Job.last_error
        Job.name Job.reason Job.training Job.warnings JoinToken.created_by JoinToken.id
        Node.agent_labels Node.drain_reason Node.drained_by Node.faults Node.jobs
        Node.network_remarks Node.tools Token.created_by Token.id Topology.missing_nodes
        Topology.unknown_hosts UpdateJobRequest.job.after UpdateJobRequest.job.tenant
        Webhook.created_by Webhook.last_error
        Webhook.name Webhook.secret""",
}
"""The fields of each kind but texts, as ``Message.field``.

``Message.field.field`` counts only for a field within that field of that message.
"""

_TEXTS: Final = {
    "AddProfilesRequest": "date device dtype gpu_type skip_reason source task",
    "AddedNodes": "gpu_type",
    "AgentNode": "gpu_type rack",
    "Cell": "gpu_type plan",
    "CellEstimate": "execution_plan provenance",
    "CreateWebhookRequest": "webhook_id",
    "DeleteCellsRequest": "gpu_type",
    "DeleteGpuTypesRequest": "gpu_types",
    "DrainNodesRequest": "drained_by reason",
    "EnrolRequest": "join_token signing_request",
    "EnvEntry": "key value",
    "EstimateCellsRequest": "gpu_types",
    "ExtensionRequest": "containing_type",
    "FieldMask": "paths",
    "GetUsageRequest": "group_by",
    "GpuType": "name",
    "HealthCheckRequest": "service",
    "HealthFault": "detail kind",
    "Hello": "incarnation tools version",
    "HostRates": "copy_gap date device method update_gap",
    "Job": "allowed_gpu_types command node_selector plan preferred_labels requested_gpu_type"
    " submitted_plan techniques",
    "JoinToken": "nodes",
    "LabelsEntry": "key value",
    "Launch": "image progress_pattern runtime staging_command tuning_space user workdir",
    "LayerProfile": "kind method",
    "ListAuditEntriesRequest": "outcome",
    "LogAnswer": "data error",
    "Model": "architecture dtype model params step step_arguments",
    "ModelName": "model params",
    "Node": "gpu_type rack",
    "Observed": "network_remarks",
    "ObservedGang": "error executed_plan remark runtime",
    "QuotasEntry": "key",
    "RenewCertificateRequest": "signing_request",
    "Reservation": "gpu_type label_key label_value nodes reason",
    "RevokeAgentRequest": "agent",
    "RevokeJoinTokenRequest": "id",
    "RoundOptions": "cost_of deadlines fair_share objective priority_weights scheduler"
    " scheduler_parameters solver",
    "RuntimeOffer": "problem runtime version",
    "Secret": "name variable",
    "ServerReflectionRequest": "all_extension_numbers_of_type file_by_filename"
    " file_containing_symbol host list_services",
    "SetPolicyRequest": "message",
    "SubmitJobRequest": "job_id",
    "Token": "role",
    "Topology": "document",
    "VersionsEntry": "key value",
    "Webhook": "events url",
    "Workload": "model params",
}
"""The fields of each message that name nothing that belongs to one tenant."""

KINDS: Final[dict[str, Kind]] = {
    field: kind for kind, fields in _NAMES.items() for field in fields.split()
} | {
    f"{message}.{field}": Kind.TEXT
    for message, fields in _TEXTS.items()
    for field in fields.split()
}
"""The kind of each field, by ``Message.field`` or ``Message.field.field``."""

_CHECKED: Final = frozenset(
    {Kind.RESOURCE, Kind.JOB, Kind.TENANT, Kind.TENANT_ID, Kind.AWAITED, Kind.OWNED}
)
"""The kinds whose values are checked before a call."""

Path = tuple[FieldDescriptor, ...]
"""The fields that lead from a request to a text."""


def key_of(path: Path) -> str:
    """Return the line of ``KINDS`` that counts for a text or message. "" without one."""
    own, within = _qualified(path[-1]), []
    if len(path) > 1:
        within = [f"{_qualified(path[-2])}.{path[-1].name}"]
    return next((key for key in (*within, own) if key in KINDS), "")


def _qualified(field: FieldDescriptor) -> str:
    """Return ``Message.field``."""
    return ".".join(field.full_name.rsplit(".", 2)[1:])


def kind_of(path: Path) -> Kind | None:
    """Return what a text names, or None if no line says so. A message has one if it is ignored."""
    return KINDS.get(key_of(path)) or _EVERYWHERE.get(path[-1].name)


def find_texts(descriptor: Descriptor, path: Path = ()) -> Iterator[Path]:
    """Yield the paths to all texts of a message, at any depth, without those that are ignored.

    No request contains itself.
    """
    for field in descriptor.fields:
        here = (*path, field)
        if field.message_type is None:
            if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
                yield here
        elif kind_of(here) is not Kind.IGNORED:
            yield from find_texts(field.message_type, here)


@cache
def _checked_paths(descriptor: Descriptor) -> tuple[tuple[Path, Kind], ...]:
    """Return the paths of a request whose values are checked. Raises KeyError without a kind."""
    found = []
    for path in find_texts(descriptor):
        if (kind := kind_of(path)) is None:
            raise KeyError(f"{path[-1].full_name} has no kind in security/references.py")
        if kind in _CHECKED:
            found.append((path, kind))
    return tuple(found)


def references_of(request: Message) -> Iterator[tuple[Kind, str]]:
    """Yield what a request names and a caller must see, at any depth, without empty texts."""
    for path, kind in _checked_paths(request.DESCRIPTOR):
        for value in _values((request,), path):
            if value:
                yield kind, value


def _values(messages: Iterable[Any], path: Path) -> Iterable[Any]:
    """Return the values at the end of a path in each message. No path leads through a map."""
    for field in path:
        if field.is_repeated:
            messages = [value for message in messages for value in getattr(message, field.name)]
        elif field.message_type is not None:
            messages = [getattr(m, field.name) for m in messages if m.HasField(field.name)]
        else:
            messages = [getattr(message, field.name) for message in messages]
    return messages
