"""Resource names: ``clusters/{cluster}`` and everything below it, parsed and formatted."""

from __future__ import annotations

import re
from typing import Final

from google.protobuf.message import Message

from tessera.formulation.base.errors import InvalidInput

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_GPU_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")


_IN_CLUSTER: Final = re.compile(r"clusters/([^/]{1,100})")


def find_cluster(request: Message) -> str:
    """Return the cluster that the names in a request refer to, or "" if they name no cluster.

    The names are ``parent`` and ``name``, of the request or of its resource.

    The name is not checked. It only distinguishes requests for one cluster from those for another.
    """
    held = (value for _, value in request.ListFields() if isinstance(value, Message))
    for message in (request, *held):
        for field in ("parent", "name"):
            value = getattr(message, field, "")
            if isinstance(value, str) and (match := _IN_CLUSTER.match(value)):
                return match[1]
    return ""


def require_identifier(field: str, text: str) -> str:
    """Return ``text`` if it is a valid id of a cluster, node, job or agent."""
    if not _ID.fullmatch(text):
        raise InvalidInput(
            field,
            "must be 1 to 100 letters, digits, '-', '_' or '.', the first a letter or digit",
        )
    return text


def require_gpu_type(field: str, text: str) -> str:
    """Return ``text`` if it is a valid name of a GPU type."""
    if not _GPU_TYPE.fullmatch(text):
        raise InvalidInput(
            field,
            "must be 1 to 63 lower-case letters, digits, '-', '_' or '.', the first a letter or digit",
        )
    return text


def cluster_name(cluster: str) -> str:
    """Return ``clusters/{cluster}``."""
    return f"clusters/{cluster}"


def node_name(cluster: str, node: str) -> str:
    """Return ``clusters/{cluster}/nodes/{node}``."""
    return f"clusters/{cluster}/nodes/{node}"


def job_name(cluster: str, job: str) -> str:
    """Return ``clusters/{cluster}/jobs/{job}``."""
    return f"clusters/{cluster}/jobs/{job}"


def array_name(cluster: str, array: str) -> str:
    """Return ``clusters/{cluster}/arrays/{array}``."""
    return f"clusters/{cluster}/arrays/{array}"


def webhook_name(cluster: str, webhook: str) -> str:
    """Return ``clusters/{cluster}/webhooks/{webhook}``."""
    return f"clusters/{cluster}/webhooks/{webhook}"


def tenant_name(cluster: str, tenant: str) -> str:
    """Return ``clusters/{cluster}/tenants/{tenant}``."""
    return f"clusters/{cluster}/tenants/{tenant}"


def reservation_name(cluster: str, reservation: str) -> str:
    """Return ``clusters/{cluster}/reservations/{reservation}``."""
    return f"clusters/{cluster}/reservations/{reservation}"


def round_name(cluster: str, number: int) -> str:
    """Return ``clusters/{cluster}/rounds/{number}``."""
    return f"clusters/{cluster}/rounds/{number}"


def policy_name(cluster: str, version: int) -> str:
    """Return ``clusters/{cluster}/policies/{version}``."""
    return f"clusters/{cluster}/policies/{version}"


def topology_name(cluster: str) -> str:
    """Return ``clusters/{cluster}/topology``."""
    return f"clusters/{cluster}/topology"


def network_plan_name(cluster: str, number: str) -> str:
    """Return ``clusters/{cluster}/networkPlans/{number}``."""
    return f"clusters/{cluster}/networkPlans/{number}"


def parse_topology(field: str, name: str) -> str:
    """Return the cluster's id."""
    if not name.endswith("/topology"):
        raise InvalidInput(field, "must have the form clusters/{cluster}/topology")
    return parse_cluster(field, name.removesuffix("/topology"))


def parse_network_plan(field: str, name: str) -> str:
    """Return the cluster's id. The only valid name is that of the plan in force, ``-``."""
    if not name.endswith("/networkPlans/-"):
        raise InvalidInput(
            field,
            "must have the form clusters/{cluster}/networkPlans/-, which is the plan in force",
        )
    return parse_cluster(field, name.removesuffix("/networkPlans/-"))


def parse_cluster(field: str, name: str) -> str:
    """Return the cluster's id."""
    (cluster,) = _parse(field, name, "clusters")
    return cluster


def parse_node(field: str, name: str) -> tuple[str, str]:
    """Return the ids of the cluster and the node."""
    cluster, node = _parse(field, name, "clusters", "nodes")
    return cluster, node


def parse_job(field: str, name: str) -> tuple[str, str]:
    """Return the ids of the cluster and the job."""
    cluster, job = _parse(field, name, "clusters", "jobs")
    return cluster, job


def parse_array(field: str, name: str) -> tuple[str, str]:
    """Return the ids of the cluster and the array of jobs."""
    cluster, array = _parse(field, name, "clusters", "arrays")
    return cluster, array


def parse_webhook(field: str, name: str) -> tuple[str, str]:
    """Return the ids of the cluster and the webhook."""
    cluster, webhook = _parse(field, name, "clusters", "webhooks")
    return cluster, webhook


def parse_tenant(field: str, name: str) -> tuple[str, str]:
    """Return the ids of the cluster and the tenant."""
    cluster, tenant = _parse(field, name, "clusters", "tenants")
    return cluster, tenant


def parse_reservation(field: str, name: str) -> tuple[str, str]:
    """Return the ids of the cluster and the reservation."""
    cluster, reservation = _parse(field, name, "clusters", "reservations")
    return cluster, reservation


def parse_round(field: str, name: str) -> tuple[str, int]:
    """Return the cluster's id and the round's number."""
    cluster, number = _parse(field, name, "clusters", "rounds")
    if not _NUMBER.fullmatch(number):
        raise InvalidInput(
            field, "must end with the number of a round, e.g. clusters/main/rounds/12"
        )
    return cluster, int(number)


def require_parent(field: str, found: str, cluster: str) -> None:
    """Check that a resource named in a call belongs to the call's parent."""
    if found != cluster:
        raise InvalidInput(field, f"must be in {cluster_name(cluster)}, the parent of this call")


def _parse(field: str, name: str, *collections: str) -> list[str]:
    parts = name.split("/")
    if len(parts) != 2 * len(collections) or tuple(parts[::2]) != collections:
        form = "/".join(f"{c}/{{{c.removesuffix('s')}}}" for c in collections)
        raise InvalidInput(field, f"must have the form {form}")
    return [require_identifier(field, part) for part in parts[1::2]]
