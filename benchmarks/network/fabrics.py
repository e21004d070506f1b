"""The speeds of cables and names of hosts that the networks of the benchmarks share."""

from __future__ import annotations

from typing import Final

from tessera.formulation.state.topologies.shapes import GBIT_BYTES

TOR_BYTES_PER_S: Final = 100 * GBIT_BYTES
"""The speed of each cable between a ToR and an aggregation switch, as in Crux's testbed."""


def host_names(hosts: int) -> list[str]:
    """Return the names of this number of hosts."""
    return [f"host-{i}" for i in range(hosts)]
