"""Resource names on the command line: an id, or a full name as ``-o name`` prints it."""

from __future__ import annotations

from typing import Final

from tessera.formulation.base.errors import InvalidInput

ANY_TYPE: Final = "any"
"""The key in a tenant's quotas that stands for GPUs of any type."""


def cluster_name(cluster: str) -> str:
    """Return ``clusters/{cluster}``. A full name is returned unchanged."""
    return cluster if cluster.startswith("clusters/") else f"clusters/{cluster}"


def full_name(cluster: str, collection: str, name: str) -> str:
    """Return ``clusters/{cluster}/{collection}/{name}``. A full name is returned unchanged."""
    if "/" not in name:
        return f"{cluster_name(cluster)}/{collection}/{name}"
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "clusters" or parts[2] != collection:
        raise InvalidInput(
            name[:200], f"must be an id or a name of the form clusters/CLUSTER/{collection}/ID"
        )
    return name


def short_name(name: str) -> str:
    """Return the last part of a resource name."""
    return name.rpartition("/")[2]
