"""Admission: what must hold before a call of a known caller begins, all in one place.

The caller's role includes the method. The caller sees the cluster, the jobs and the tenants that
the request names; those that it does not see do not exist for it. The caller's tenant does not call
too often, and no job's description is too large.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final

from google.protobuf.message import Message

from tessera.formulation.access import TENANT_ROLES, Identity
from tessera.formulation.errors import InvalidInput, NotFound, PermissionDenied
from tessera.service.rpc.names import find_cluster
from tessera.service.security.limits import CallRate
from tessera.service.security.roles import Rule, short_method

TenantsOfJobs = Callable[[str, Collection[str]], Awaitable[dict[str, str]]]
"""A function that returns the tenant of each of some jobs of a cluster that exist."""

_JOB: Final = re.compile(r"clusters/([^/]+)/jobs/([^/]+)")


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
        if (cluster := find_cluster(request)) and not rule.is_open:
            identity.require_cluster(cluster)
        if rule.has_specs:
            self._check_specs(identity, cluster, request)
        if identity.tenants is not None:
            await self._check_jobs(identity, [name for name in rule.jobs(request) if name])

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

    async def _check_jobs(self, identity: Identity, names: Collection[str]) -> None:
        """Check that the caller sees each job. Malformed names are left to the servicer."""
        for name in names:
            if match := _JOB.fullmatch(name):
                seen = identity.sees_cluster(match[1])
                tenants = await self._tenants_of_jobs(match[1], [match[2]]) if seen else {}
                if match[2] not in tenants or not identity.sees_tenant(tenants[match[2]]):
                    raise NotFound(name)


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
