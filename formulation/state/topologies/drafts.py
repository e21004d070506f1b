"""A topology in the making."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import product
from typing import Final

import numpy as np

from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.topology import NO_HOST, Links, Tier, Topology, Vertices

MAX_LINKS: Final = 4_000_000
"""Largest number of directed links, about that of 100,000 hosts. A larger number is treated as a mistake."""

MAX_NAME: Final = 128
"""Largest number of characters of a host's or switch's name.

Nodes have shorter names, and each part of a host repeats its name.
"""


class TopologyDraft:
    """The vertices and links added until now. They are changed in place, then made into a topology.

    ``cancelled`` is called before each link is added. If it returns true, ``DeadlineTooShort`` is
    raised.
    """

    def __init__(self, cancelled: Callable[[], bool] = never_cancelled) -> None:
        self._cancelled = cancelled
        self._hosts: list[str] = []
        self._names: list[str] = []
        self._tiers: list[int] = []
        self._host: list[int] = []
        self._ends = array("q")  # source and target of each link
        self._costs = array("d")  # bytes per second and delay of each link

    def host(self, name: str) -> int:
        """Add a host and return its number."""
        if len(name) > MAX_NAME:
            raise InvalidInput(
                "hosts", f"the name {name[:20]}... has more than {MAX_NAME} characters"
            )
        self._hosts.append(name)
        return len(self._hosts) - 1

    def vertex(self, name: str, tier: Tier, host: int = NO_HOST) -> int:
        """Add a vertex and return its number."""
        if host == NO_HOST and len(name) > 2 * MAX_NAME + 1:  # a name has at most two parts
            raise InvalidInput(
                "switches", f"the name {name[:20]}... has more than {2 * MAX_NAME + 1} characters"
            )
        self._names.append(name)
        self._tiers.append(tier)
        self._host.append(host)
        return len(self._names) - 1

    @property
    def names(self) -> list[str]:
        """Return the names of vertices, in order."""
        return self._names

    def host_of(self, vertex: int) -> int:
        """Return the number of a vertex's host, or ``NO_HOST`` if it is in no host."""
        return self._host[vertex]

    def switches(self, name: str, count: int, tier: Tier) -> list[int]:
        """Add switches ``name-0`` and so on."""
        return [self.vertex(f"{name}-{i}", tier) for i in range(count)]

    def link(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        """Add a link of one direction. Raises InvalidInput if there are too many."""
        self.expect(1)
        self._ends.extend((source, target))
        self._costs.extend((bytes_per_s, delay_s))

    def cable(
        self, first: int, second: int, bytes_per_s: float, delay_s: float, cables: int = 1
    ) -> None:
        """Add links in both directions, ``cables`` of each."""
        self.expect(2 * cables)
        self._ends.extend((first, second, second, first) * cables)
        self._costs.extend((bytes_per_s, delay_s) * (2 * cables))

    def mesh(
        self, low: list[int], high: list[int], bytes_per_s: float, delay_s: float, cables: int = 1
    ) -> None:
        """Add cables from each of ``low`` to each of ``high``."""
        self.expect(2 * cables * len(low) * len(high))
        for below, above in product(low, high):
            self.cable(below, above, bytes_per_s, delay_s, cables)

    def expect(self, links: int) -> None:
        """Refuse a topology in the making that would have too many links with these.

        Call it with the number of all links before the first part is made. Raises InvalidInput.
        """
        require_caller(self._cancelled)
        if (count := len(self._ends) // 2 + links) > MAX_LINKS:
            raise InvalidInput(
                "topology",
                f"has {count:,} links, and may have {MAX_LINKS:,}; lower the counts",
            )

    def topology(self, *, adaptive: bool = False) -> Topology:
        """Return the drafted topology. Raises InvalidInput if it is not a valid network."""
        ends = np.array(self._ends).reshape(-1, 2)
        costs = np.array(self._costs).reshape(-1, 2)
        return Topology(
            hosts=tuple(self._hosts),
            vertices=Vertices(
                name=tuple(self._names),
                tier=np.array(self._tiers, dtype=np.int64),
                host=np.array(self._host, dtype=np.int64),
            ),
            links=Links(
                source=ends[:, 0],
                target=ends[:, 1],
                bytes_per_s=costs[:, 0],
                delay_s=costs[:, 1],
            ),
            adaptive=adaptive,
        )
