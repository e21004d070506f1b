"""Fabrics that are described by a few numbers.

Every cable is a link in both directions. Names are those that commands show. Crux gives the number
of switches of its simulated networks (section 6), but neither link speeds nor wiring. Each function
states our choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.drafts import TopologyDraft
from tessera.formulation.state.topologies.shapes import A100_HOST, GBIT_BYTES, HostShape
from tessera.formulation.state.topologies.topology import Tier, Topology


def build_clos(
    hosts: Sequence[str],
    shape: HostShape,
    *,
    tors: int,
    aggregations: int,
    tor_bytes_per_s: float,
    tor_delay_s: float = 0.0,
    cables: int = 1,
    adaptive: bool = False,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Topology:
    """Return a two-layer Clos network.

    Hosts are on ToRs in equal blocks, in order. Each ToR is joined to each aggregation switch.

    Args:
        tor_bytes_per_s: the speed of one cable between a ToR and an aggregation switch.
        cables: the number of cables from each ToR to each aggregation switch.
    """
    _at_least_one(tors=tors, aggregations=aggregations, cables=cables)
    draft = TopologyDraft(cancelled)
    draft.expect(len(hosts) * (shape.links + 2 * shape.nics) + 2 * tors * aggregations * cables)
    nics = [shape.build(draft, name) for name in hosts]
    low = draft.switches("tor", tors, Tier.TOR)
    high = draft.switches("agg", aggregations, Tier.AGGREGATION)
    for i, ports in enumerate(nics):
        for nic in ports:
            draft.cable(nic, low[i * tors // len(nics)], shape.nic_bytes_per_s, shape.nic_delay_s)
    draft.mesh(low, high, tor_bytes_per_s, tor_delay_s, cables)
    return draft.topology(adaptive=adaptive)


def build_double_sided(
    hosts: Sequence[str],
    shape: HostShape,
    *,
    tors: int,
    aggregations: int,
    cores: int,
    tor_bytes_per_s: float,
    aggregation_bytes_per_s: float,
    tor_delay_s: float = 0.0,
    aggregation_delay_s: float = 0.0,
    pods: int | None = None,
    adaptive: bool = False,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Topology:
    """Return three layers in which each host is on both ToRs of a pair.

    Each NIC has a port of half its speed on each of them, so four NICs make the paper's eight
    links. The wiring is ours. ``pods`` (by default one for each pair of ToRs) share ToRs and
    aggregation switches equally. Inside a pod, each ToR is joined to each aggregation switch. The
    cores are shared equally among the aggregation switches of a pod (planes), so the i-th of every
    pod is joined to the same cores. Speeds are of one cable.
    """
    _at_least_one(tors=tors, aggregations=aggregations, cores=cores)
    pods = tors // 2 if pods is None else pods
    if tors % 2 or pods < 1 or (tors // 2) % pods:
        raise InvalidInput(
            "tors",
            f"is {tors}; it must be a multiple of 2 x {pods}, so that each pod has pairs of ToRs",
        )
    if aggregations % pods:
        raise InvalidInput(
            "aggregations",
            f"is {aggregations}; it must be a multiple of {pods}, the number of pods",
        )
    planes = aggregations // pods
    if cores % planes:
        raise InvalidInput(
            "cores",
            f"is {cores}; it must be a multiple of {planes}, the number of aggregation switches in a pod",
        )
    draft = TopologyDraft(cancelled)
    draft.expect(len(hosts) * (shape.links + 4 * shape.nics) + 2 * (tors * planes + pods * cores))
    nics = [shape.build(draft, name) for name in hosts]
    low = draft.switches("tor", tors, Tier.TOR)
    middle = draft.switches("agg", aggregations, Tier.AGGREGATION)
    high = draft.switches("core", cores, Tier.CORE)
    for i, ports in enumerate(nics):
        pair = i * (tors // 2) // len(nics)
        draft.mesh(
            ports, low[2 * pair : 2 * pair + 2], shape.nic_bytes_per_s / 2, shape.nic_delay_s
        )
    for pod in range(pods):
        own = middle[pod * planes : (pod + 1) * planes]
        own_tors = low[pod * tors // pods : (pod + 1) * tors // pods]
        draft.mesh(own_tors, own, tor_bytes_per_s, tor_delay_s)
        for plane, agg in enumerate(own):
            own_cores = high[plane * cores // planes : (plane + 1) * cores // planes]
            draft.mesh([agg], own_cores, aggregation_bytes_per_s, aggregation_delay_s)
    return draft.topology(adaptive=adaptive)


def build_torus(
    hosts: Sequence[str],
    shape: HostShape,
    *,
    sizes: Sequence[int],
    link_bytes_per_s: float,
    link_delay_s: float = 0.0,
    adaptive: bool = False,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Topology:
    """Return a torus of 2 or 3 dimensions.

    Each host's NICs are on its own router, and routers are joined to their neighbors. Hosts fill
    the last dimension first. A dimension of 2 has one cable between two routers. A dimension of 1
    has no cable.
    """
    if not 2 <= len(sizes) <= 3 or min(sizes) < 1:
        raise InvalidInput("sizes", "must be 2 or 3 whole numbers of at least 1")
    if math.prod(sizes) != len(hosts):
        raise InvalidInput(
            "sizes",
            f"{' x '.join(map(str, sizes))} is {math.prod(sizes)}, but there are {len(hosts)} hosts",
        )
    draft = TopologyDraft(cancelled)
    rings = sum({1: 0, 2: 1}.get(size, 2) for size in sizes)  # links of a router, to the next ones
    draft.expect(len(hosts) * (shape.links + 2 * shape.nics + rings))
    nics = [shape.build(draft, name) for name in hosts]
    routers = [draft.vertex(f"router-{name}", Tier.TOR) for name in hosts]
    for ports, router in zip(nics, routers, strict=True):
        for nic in ports:
            draft.cable(nic, router, shape.nic_bytes_per_s, shape.nic_delay_s)
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    for at in product(*map(range, sizes)):
        here = sum(a * s for a, s in zip(at, strides, strict=True))
        for place, size, stride in zip(at, sizes, strides, strict=True):
            beyond = here + ((place + 1) % size - place) * stride
            if size > 2 or (size == 2 and place == 0):
                draft.cable(routers[here], routers[beyond], link_bytes_per_s, link_delay_s)
    return draft.topology(adaptive=adaptive)


def build_lingjun(
    rows: Sequence[tuple[str, str, str, str]],
    shape: HostShape,
    *,
    ports_per_nic: int,
    asw_cables: int,
    psw_cables: int,
    asw_bytes_per_s: float,
    psw_bytes_per_s: float,
    asw_delay_s: float = 0.0,
    psw_delay_s: float = 0.0,
    adaptive: bool = False,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Topology:
    """Return the network of hosts in groups of switches (Lingjun 2023), each group as one switch.

    The data set says only which host is in which groups. The caller assumes the number and the
    speed of cables. A label of an asw is unique only within its psw.

    Args:
        rows: (host, dsw, psw, asw).
        ports_per_nic: the cables from a NIC to its asw, which share the NIC's speed.
        asw_cables: the cables between an asw and its psw.
        psw_cables: the cables between a psw and its dsw.
    """
    _at_least_one(ports_per_nic=ports_per_nic, asw_cables=asw_cables, psw_cables=psw_cables)
    above: dict[str, str] = {}
    for host, dsw, psw, _ in rows:
        if above.setdefault(psw, dsw) != dsw:
            raise InvalidInput(
                "rows", f"{host}: psw {psw} is under dsw {dsw} and also under dsw {above[psw]}"
            )
    groups = dict.fromkeys((psw, asw) for _, _, psw, asw in rows)
    draft = TopologyDraft(cancelled)
    draft.expect(
        len(rows) * (shape.links + 2 * shape.nics * ports_per_nic)
        + 2 * (len(groups) * asw_cables + len(above) * psw_cables)
    )
    nics = [shape.build(draft, host) for host, *_ in rows]
    low = {key: draft.vertex("/".join(key), Tier.TOR) for key in groups}
    middle = {psw: draft.vertex(psw, Tier.AGGREGATION) for psw in above}
    high = {dsw: draft.vertex(dsw, Tier.CORE) for dsw in dict.fromkeys(above.values())}
    speed = shape.nic_bytes_per_s / ports_per_nic
    for ports, (_, _, psw, asw) in zip(nics, rows, strict=True):
        for nic in ports:
            draft.cable(nic, low[psw, asw], speed, shape.nic_delay_s, ports_per_nic)
    for (psw, _), switch in low.items():
        draft.cable(switch, middle[psw], asw_bytes_per_s, asw_delay_s, asw_cables)
    for psw, dsw in above.items():
        draft.cable(middle[psw], high[dsw], psw_bytes_per_s, psw_delay_s, psw_cables)
    return draft.topology(adaptive=adaptive)


def build_testbed() -> Topology:
    """Return Crux's testbed: 12 hosts of 8 A100, 6 ToRs and 8 aggregation switches.

    Each ToR has 100 Gb/s to each aggregation switch. Two hosts on each ToR is our reading of 12
    hosts, 6 ToRs and one ToR per host.
    """
    hosts = [f"host-{i}" for i in range(12)]
    return build_clos(hosts, A100_HOST, tors=6, aggregations=8, tor_bytes_per_s=100 * GBIT_BYTES)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidInput(name, f"is {count}; it must be at least 1")
