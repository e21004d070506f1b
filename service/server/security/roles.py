"""The methods that each role may call: one rule for every method of the API.

A method without a rule cannot be called. ``tests/unit/service/security/test_roles.py`` compares the
rules with the methods of all services.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from tessera.formulation.base.access import Role

VIEWERS: Final = frozenset({Role.VIEWER, Role.USER, Role.OPERATOR, Role.ADMIN})
USERS: Final = VIEWERS - {Role.VIEWER}
OPERATORS: Final = USERS - {Role.USER}
ADMINS: Final = frozenset({Role.ADMIN})
AGENTS: Final = frozenset({Role.AGENT})
EVERYBODY: Final = VIEWERS | AGENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The roles that may call a method. What its requests may name is in ``references``.

    ``has_specs`` says that the request submits jobs, which name their tenants. A method that
    ``changes`` something is recorded in the audit log. If ``is_open``, anyone may call it, without
    any proof of identity.
    """

    roles: frozenset[Role]
    has_specs: bool = False
    changes: bool = False
    is_open: bool = False


def _read(roles: frozenset[Role] = VIEWERS) -> Rule:
    return Rule(roles=roles)


def _change(roles: frozenset[Role] = OPERATORS) -> Rule:
    return Rule(roles=roles, changes=True)


def _submission() -> Rule:
    return Rule(roles=USERS, has_specs=True, changes=True)


_RULES: Final[dict[str, dict[str, Rule]]] = {
    "Access": {
        "GetCaller": _read(EVERYBODY),
        "GetServer": _read(),
        "GetLogin": Rule(roles=EVERYBODY, is_open=True),
        "CreateToken": _change(ADMINS),
        "ListTokens": _read(ADMINS),
        "RevokeToken": _change(ADMINS),
        "CreateJoinToken": _change(),
        "ListJoinTokens": _read(OPERATORS),
        "RevokeJoinToken": _change(),
        "ListCertificates": _read(OPERATORS),
        "RevokeAgent": _change(),
        "ListAuditEntries": _read(ADMINS),
    },
    "Agents": {
        "Sync": _change(AGENTS),
        "Enrol": Rule(roles=EVERYBODY, changes=True, is_open=True),
        "RenewCertificate": _change(AGENTS),
    },
    "Clusters": {
        "UpsertCluster": _change(),
        "GetCluster": _read(),
        "ListClusters": _read(),
        "UpsertNodes": _change(),
        "GetNode": _read(),
        "ListNodes": _read(),
        "DrainNodes": _change(),
        "UndrainNodes": _change(),
        "DeleteCluster": _change(),
        "DeleteGpuTypes": _change(),
        "DeleteNode": _change(),
        "DeleteNodes": _change(),
        "CreateReservation": _change(),
        "GetReservation": _read(),
        "ListReservations": _read(),
        "UpdateReservation": _change(),
        "DeleteReservations": _change(),
    },
    "Estimates": {
        "UpsertCells": _change(),
        "ListCells": _read(),
        "DeleteCells": _change(),
        "EstimateCells": _change(USERS),
        "UpsertModels": _change(),
        "ListModels": _read(),
        "DeleteModels": _change(),
        "AddProfiles": _change(OPERATORS | AGENTS),
        "GetProfiling": _read(EVERYBODY),  # a task asks how much time it has left
    },
    "Jobs": {
        "SubmitJob": _submission(),
        "SubmitJobs": _submission(),
        "GetJob": _read(),
        "ListJobs": _read(),
        "UpdateJob": _change(USERS),
        "ListJobEvents": _read(),
        "CancelJob": _change(USERS),
        "HoldJob": _change(USERS),
        "ReleaseJob": _change(USERS),
        "GetArray": _read(),
        "ChangeArray": _change(USERS),
        "WatchJob": _read(),
        "ReadLogs": _read(),
        "GetJobCurves": _read(),
        "ExplainJob": _read(),
    },
    "Networks": {
        "GetTopology": _read(),
        "UpdateTopology": _change(),
        "DeleteTopology": _change(),
        "GetNetworkPlan": _read(),
        "ListNetworkPlans": _read(),
        "PlanNetwork": _change(),
    },
    "Scheduler": {
        "Schedule": _change(),
        "GetRound": _read(),
        "ListRounds": _read(),
        "ReplayRound": _read(OPERATORS),
        "VerifyRound": _read(OPERATORS),
        "SetPolicy": _change(),
        "GetPolicy": _read(),
        "ListPolicies": _read(),
        "WhatIf": Rule(roles=VIEWERS, has_specs=True),
    },
    "Tenants": {
        "UpsertTenants": _change(),
        "ListTenants": _read(),
        "DeleteTenants": _change(),
        "GetUsage": _read(),
    },
    "Webhooks": {
        "CreateWebhook": _change(USERS),
        "ListWebhooks": _read(USERS),
        "DeleteWebhook": _change(USERS),
        "TestWebhook": _change(USERS),
    },
}

PACKAGE: Final = "tessera.v1"

RULES: Final[dict[str, Rule]] = {
    f"/{PACKAGE}.{service}/{method}": rule
    for service, methods in _RULES.items()
    for method, rule in methods.items()
} | {
    "/grpc.health.v1.Health/Check": Rule(roles=EVERYBODY, is_open=True),
    "/grpc.health.v1.Health/Watch": Rule(roles=EVERYBODY, is_open=True),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _read(EVERYBODY),
}
"""From the full name of a method to its rule."""


def short_method(method: str) -> str:
    """Return the name of a method as in messages and the audit log, e.g. ``Jobs.CancelJob``."""
    service, _, name = method.removeprefix("/").partition("/")
    return f"{service.rpartition('.')[2]}.{name}"


def find_target(request: Message | None) -> str:
    """Return the resource that a request is about, e.g. ``clusters/main/jobs/a``.

    Of several, it is the first with how many more there are. "" if the request names none.
    """
    if request is None:
        return ""
    resources = [value for _, value in request.ListFields() if isinstance(value, Message)]
    for message in (request, *resources):
        names = list(getattr(message, "names", ()))
        if len(names) > 1:
            return f"{names[0]} and {len(names) - 1} more"
        for found in (*names, getattr(message, "name", ""), getattr(message, "parent", "")):
            if isinstance(found, str) and found:
                return found
    return ""
