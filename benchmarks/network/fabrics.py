"""The two simulated networks of Crux, section 6. It gives switches, no link speeds: those are ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tessera.formulation.topologies.builders import clos, double_sided
from tessera.formulation.topologies.shapes import A100_HOST, GBIT_BYTES
from tessera.formulation.topologies.topology import Topology

HOSTS: Final = 250
"""Of 8 GPUs: 2,000, as many as the trace's cluster has at least."""
TOR_BYTES_PER_S: Final = 100 * GBIT_BYTES
"""Of each cable between a ToR and an aggregation switch: as in Crux's testbed."""
OVERSUBSCRIBED: Final = 2.0
"""Hosts' bandwidth into a ToR of the double-sided network over what it has upwards: as in the testbed."""


def host_names(hosts: int) -> list[str]:
    """Return what so many hosts are called."""
    return [f"host-{i}" for i in range(hosts)]


def two_layer(hosts: int = HOSTS, share: float = 1.0) -> Topology:
    """Return the Clos of 173 ToRs and 16 aggregation switches; with fewer hosts as many a ToR.

    A ToR has one host or two of 800 Gb/s each, and 1.6 Tb/s upwards. ``share`` scales links between switches.
    """
    tors = max(1, round(173 * hosts / HOSTS))
    return clos(
        host_names(hosts),
        A100_HOST,
        tors=tors,
        aggregations=16,
        tor_bytes_per_s=share * TOR_BYTES_PER_S,
    )


def three_layer(hosts: int = HOSTS, share: float = 1.0) -> Topology:
    """Return the double-sided network of 6 ToRs, 12 aggregation switches and 32 cores.

    Six ToRs for 250 hosts are groups of switches, so cables are groups of cables: a ToR has 1 / 2 upwards of
    what its hosts have, to the four aggregation switches of its pod; these have as much up as down.
    """
    ports = A100_HOST.nics * A100_HOST.nic_bytes_per_s / 2 * hosts / 3  # into a ToR of a pair
    up = ports / OVERSUBSCRIBED
    return double_sided(
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
