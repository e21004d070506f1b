"""Builders of small clusters: pods of racks of hosts of PCIe switches of GPUs."""

from __future__ import annotations

import numpy as np

from tessera.formulation.state.topologies.topology import NO_HOST, Links, Tier, Topology, Vertices


def a_machine(
    *, pods: int, racks: int, hosts: int, switches: int, gpus: int, tors: int = 1, empty: int = -1
) -> Topology:
    """Return a cluster with ``racks`` racks per pod, ``hosts`` hosts per rack, and so on.

    Each rack has ``tors`` ToRs, and all of its hosts link to all of them. If ``switches`` is 0, a
    host's ``gpus`` GPUs are attached to its NIC. The ``empty``-th host has no GPUs.
    """
    names: list[str] = []
    rows: list[tuple[Tier, int]] = []
    cables: list[tuple[int, int]] = []

    def vertex(tier: Tier, host: int = NO_HOST) -> int:
        names.append(f"{tier.name}-{len(names)}")
        rows.append((tier, host))
        return len(rows) - 1

    host = 0
    core = vertex(Tier.CORE)
    for _ in range(pods):
        aggregation = vertex(Tier.AGGREGATION)
        cables.append((aggregation, core))
        for _ in range(racks):
            rack = [vertex(Tier.TOR) for _ in range(tors)]
            cables += [(tor, aggregation) for tor in rack]
            for _ in range(hosts):
                nic = vertex(Tier.NIC, host)
                cables += [(nic, tor) for tor in rack]
                for above in [vertex(Tier.PCIE, host) for _ in range(switches)] or [nic]:
                    cables += [(above, nic)] if above != nic else []
                    own = 0 if host == empty else gpus
                    cables += [(vertex(Tier.GPU, host), above) for _ in range(own)]
                host += 1
    both = [*cables, *((b, a) for a, b in cables)]
    return Topology(
        hosts=tuple(f"host-{h}" for h in range(host)),
        vertices=Vertices(
            name=tuple(names),
            tier=np.array([t for t, _ in rows]),
            host=np.array([h for _, h in rows]),
        ),
        links=Links(
            source=np.array([a for a, _ in both]),
            target=np.array([b for _, b in both]),
            bytes_per_s=np.ones(len(both)),
            delay_s=np.zeros(len(both)),
        ),
    )
