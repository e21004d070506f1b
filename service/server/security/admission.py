"""Admission: what must hold before a call of a known caller begins, all in one place.

The caller's role includes the method. The caller sees all clusters, jobs and tenants that the
request names, at any depth; those that it does not see do not exist for it. The caller's tenant does not call
too often, and no job's description is too large.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final

from google.protobuf.message import Message

from tessera.formulation.base.access import TENANT_ROLES, Identity
from tessera.formulation.base.errors import InvalidInput, NotFound, PermissionDenied
from tessera.service.server.convert.names import find_cluster, job_name
from tessera.service.server.security.limits import CallRate
from tessera.service.server.security.references import Kind, references_of
from tessera.service.server.security.roles import Rule, short_method

TenantsOfJobs = Callable[[str, Collection[str]], Awaitable[dict[str, str]]]
"""A function that returns the tenant of each of some jobs of a cluster that exist."""

_NAME: Final = re.compile(
    r"clusters/(?P<cluster>[^/]+)(?:/(?P<collection>jobs|tenants)/(?P<id>[^/]+)\Z)?"
)
"""The start of a resource's name, or the whole name of a job or a tenant."""


class Admission:
    """The rules that a call must meet. ``calls_per_minute`` and ``job_bytes`` are for each tenant."""

    def __init__(
        self,
        tenants_of_jobs: TenantsOfJobs,
        *,
        calls_per_minute: int,
        job_bytes: int,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants_of_jobs, self._job_bytes = tenants_of_jobs, job_bytes
        self._rate = CallRate(calls_per_minute, "calls", monotonic_s)

    async def admit(
        self, identity: Identity, method: str, rule: Rule, request: Message | None
    ) -> None:
        """Check a call before it begins.

        A job without a tenant gets the tenant of a caller that has exactly one.

        Raises:
            PermissionDenied: the caller's role does not include the method.
            NotFound: the request names what the caller does not see.
            TooBusy: the caller's tenant calls too often.
            InvalidInput: a job's description is too large.
        """
        require_role(identity, method, rule)
        if identity.is_verified and identity.role in TENANT_ROLES and not rule.is_open:
            self._rate.take(_payer(identity))
        if request is None:
            return
        cluster = find_cluster(request)
        if cluster and not rule.is_open:
            identity.require_cluster(cluster)
        if rule.has_specs:
            self._check_specs(identity, cluster, request)
        if not rule.is_open:
            await self._check_references(identity, cluster, request)

    def _check_specs(self, identity: Identity, cluster: str, request: Any) -> None:
        for place, spec in submitted_jobs(request):
            if (size := spec.ByteSize()) > self._job_bytes:
                raise InvalidInput(
                    place,
                    f"has {size:,} bytes, and a job may have {self._job_bytes:,} (the server's setting"
                    " max_job_bytes); shorten its command and labels",
                )
            if identity.tenants is not None:
                spec.tenant = spec.tenant or _only_tenant(identity, f"{place}.tenant")
                identity.require_tenants(cluster, (spec.tenant,))

    async def _check_references(self, identity: Identity, cluster: str, request: Message) -> None:
        """Check that the caller sees all that the request names.

        Malformed names are left to the servicer. Nothing is looked up before all else is seen.
        """
        if identity.clusters is None and identity.tenants is None:
            return
        jobs: dict[str, dict[str, None]] = {}  # in order, so that the first one missing is named
        for kind, text in references_of(request):
            if kind is Kind.TENANT_ID:
                identity.require_tenants(cluster, (text,))
            elif match := _NAME.match(text):
                identity.require_cluster(match["cluster"])
                if kind is Kind.TENANT and match["collection"] == "tenants":
                    identity.require_tenants(match["cluster"], (match["id"],))
                elif kind is Kind.JOB and match["collection"] == "jobs":
                    jobs.setdefault(match["cluster"], {})[match["id"]] = None
        if identity.tenants is None:
            return
        for place, names in jobs.items():
            tenants = await self._tenants_of_jobs(place, list(names))
            for job in names:
                if job not in tenants or not identity.sees_tenant(tenants[job]):
                    raise NotFound(job_name(place, job))


def require_role(identity: Identity, method: str, rule: Rule) -> None:
    """Check that the caller's role includes the method. Raises PermissionDenied."""
    if rule.is_open or not identity.is_verified or identity.role in rule.roles:
        return
    able = ", ".join(role for role in type(identity.role) if role in rule.roles)
    raise PermissionDenied(
        f"{short_method(method)} needs one of the roles {able}, and {identity.subject} has the role"
        f" {identity.role}"
    )


def submitted_jobs(request: Any) -> Iterable[tuple[str, Any]]:
    """Yield the place and the description of each job that a request submits."""
    if hasattr(request, "hypothesis"):
        for k, change in enumerate(request.hypothesis.changes):
            if change.HasField("job_added"):
                yield f"hypothesis.changes[{k}].job_added.job", change.job_added.job
    elif hasattr(request, "requests"):
        for k, inner in enumerate(request.requests):
            yield f"requests[{k}].job", inner.job
    else:
        yield "job", request.job


def _payer(identity: Identity) -> str:
    """Return whose limit a call counts against: the caller's tenant, if it has exactly one."""
    if identity.tenants is not None and len(identity.tenants) == 1:
        (tenant,) = identity.tenants
        return f"tenant {tenant}"
    return identity.subject


def _only_tenant(identity: Identity, place: str) -> str:
    tenants = sorted(identity.tenants or ())
    if len(tenants) != 1:
        known = ", ".join(tenants) or "none; ask an administrator for one"
        raise InvalidInput(place, f"must name one of your tenants: {known}")
    return tenants[0]
