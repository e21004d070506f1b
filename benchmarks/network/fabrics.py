"""The two simulated networks of Crux, section 6. The paper gives switches; link speeds are ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tessera.formulation.topologies.builders import build_clos, build_double_sided
from tessera.formulation.topologies.shapes import A100_HOST, GBIT_BYTES
from tessera.formulation.topologies.topology import Topology

HOST_COUNT: Final = 250
"""Hosts of 8 GPUs: 2,000 GPUs, the least that the trace's cluster has."""
TOR_BYTES_PER_S: Final = 100 * GBIT_BYTES
"""The speed of each cable between a ToR and an aggregation switch, as in Crux's testbed."""
OVERSUBSCRIPTION: Final = 2.0
"""The downward over the upward bandwidth of the double-sided network's ToRs, as in the testbed."""


def host_names(hosts: int) -> list[str]:
    """Return the names of this number of hosts."""
    return [f"host-{i}" for i in range(hosts)]


def two_layer(hosts: int = HOST_COUNT, share: float = 1.0) -> Topology:
    """Return the Clos of 173 ToRs and 16 aggregation switches.

    With fewer hosts there are fewer ToRs, with the same number of hosts per ToR. A ToR has one or
    two hosts of 800 Gb/s each, and 1.6 Tb/s upwards. ``share`` scales links between switches.
    """
    tors = max(1, round(173 * hosts / HOST_COUNT))
    return build_clos(
        host_names(hosts),
        A100_HOST,
        tors=tors,
        aggregations=16,
        tor_bytes_per_s=share * TOR_BYTES_PER_S,
    )


def three_layer(hosts: int = HOST_COUNT, share: float = 1.0) -> Topology:
    """Return the double-sided network of 6 ToRs, 12 aggregation switches and 32 cores.

    Six ToRs for 250 hosts stand for groups of switches, so cables stand for groups of cables. A
    ToR has half of its hosts' bandwidth upwards, to the four aggregation switches of its pod.
    These have the same bandwidth upwards and downwards.
    """
    ports = A100_HOST.nics * A100_HOST.nic_bytes_per_s / 2 * hosts / 3  # into one ToR of a pair
    up = ports / OVERSUBSCRIPTION
    return build_double_sided(
        host_names(hosts),
        A100_HOST,
        tors=6,
        aggregations=12,
        cores=32,
        tor_bytes_per_s=share * up / 4,
        aggregation_bytes_per_s=share * 2 * up / 4 / 8,
    )


FABRICS: Final[Mapping[str, Callable[[int, float], Topology]]] = MappingProxyType(
    {"clos": two_layer, "double-sided": three_layer}
)
