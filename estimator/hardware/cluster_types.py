"""The hardware of a cluster's GPU types, from the catalogue and from measured hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.estimates import ClusterGpuType, HostProfile


def no_known_type(names: Iterable[str], catalogue: Iterable[str]) -> str:
    """Return the message that none of the cluster's GPU types is in the catalogue, with a remedy."""
    if not (there := ", ".join(names)):
        return "the cluster has no nodes yet, so nothing can be estimated; add nodes"
    return (
        f"none of the cluster's GPU types ({there}) is in the hardware catalogue ({', '.join(catalogue)});"
        " use names from the catalogue, describe the types in the server's setting `hardware`, or import"
        " profiles"
    )


def hardware_of(
    field: str,
    kind: ClusterGpuType,
    catalogue: Mapping[str, Hardware],
    hosts: Iterable[HostProfile] = (),
) -> Hardware:
    """Return the hardware of a GPU type, with the memory and node size of the cluster.

    What ``hosts`` measured on its nodes replaces the catalogue's rates of hosts.

    Raises:
        InvalidInput: the type is not in the catalogue.
    """
    known = catalogue.get(kind.gpu_type.name)
    if known is None:
        raise InvalidInput(
            field,
            f"{kind.gpu_type.name} is not in the hardware catalogue, which has {', '.join(catalogue)};"
            " use a name from the catalogue, describe the type in the server's setting `hardware`, or"
            " import profiles",
        )
    for host in hosts:
        if host.gpu_type == kind.gpu_type.name:
            known = known.with_host(host.rates)
    return replace(
        known,
        memory_bytes=kind.gpu_type.memory_bytes,
        gpus_per_node=kind.node_gpus or known.gpus_per_node,
    )


def catalogue_of(hardware: Iterable[Hardware] = CATALOGUE) -> dict[str, Hardware]:
    """Return GPU types by name."""
    return {kind.name: kind for kind in hardware}
