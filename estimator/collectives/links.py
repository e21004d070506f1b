"""Times of collectives from link latency and bandwidth, by the fastest of the usual algorithms.

The time of an algorithm is linear in five rates (the alpha-beta model; Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, sections 3 and 4):

    launch + steps inside the node * step + steps across nodes * hop
    + bytes over a GPU's link / link rate + bytes over a node's port / port rate

Bytes inside and across nodes do not overlap. Groups on the same nodes share the port of a node, but
not the links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from tessera.estimator.hardware import Hardware, Link
from tessera.estimator.plans import Groups, Primitive, Shape
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats

LAUNCH_S: Final = 8.4e-6
STEP_S: Final = {Link.NVLINK: 3.4e-6, Link.XGMI: 3.4e-6, Link.PCIE: 5.7e-6}
HOP_S: Final = 9.6e-6
"""Latencies of a ring with the Simple protocol (base, NVLink, PCI, NET) in NCCL 2.12,
src/graph/tuning.cc. RCCL also uses the NVLink value for xGMI."""


PRACTICAL_FACTORS: Final = (6.0, 2.5, 6.0, 1.5, 4.0)
"""The five costs in practice, as multiples of those in data sheets. They are rounded medians of the
rates fitted to the Arena artifact's tables (a100, v100, a40, a10 under XLA; without its Ethernet).
They are above 1 because collectives are started one by one, and because several GPUs share ports
without direct access."""
OWN_PORT_FACTOR: Final = 1.25
"""The last of these factors for nodes with a port for each GPU. By judgement, the port reaches four
fifths of its rate."""
_OWN_PORT_BYTES_PER_S: Final = 12.5e9
"""Bandwidth of a node's ports per GPU from which each GPU is assumed to have a port of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """The five rates of the model, with bandwidths in one direction."""

    launch_s: float
    step_s: float
    hop_s: float
    link_bytes_per_s: float  # of one GPU
    network_bytes_per_s: float  # of one node

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Return the rates of data sheets: peak bandwidths and the latencies of the library."""
        return cls(
            launch_s=LAUNCH_S,
            step_s=STEP_S[hardware.link],
            hop_s=HOP_S,
            link_bytes_per_s=hardware.link_bytes_per_s,
            network_bytes_per_s=hardware.network_bytes_per_s,
        )

    @classmethod
    def usual(cls, hardware: Hardware) -> Self:
        """Return the practical rates of a GPU type: its data sheet times the practical factors."""
        factors = np.array(PRACTICAL_FACTORS)
        if hardware.network_bytes_per_s / hardware.gpus_per_node >= _OWN_PORT_BYTES_PER_S:
            factors[-1] = OWN_PORT_FACTOR
        return cls.from_seconds(cls.of(hardware).costs * factors)

    @classmethod
    def from_seconds(cls, costs: Floats) -> Self:
        """Return the rates with the given :attr:`costs`."""
        launch, step, hop, link, port = (float(c) for c in costs)
        return cls(
            launch_s=launch,
            step_s=step,
            hop_s=hop,
            link_bytes_per_s=1 / link,
            network_bytes_per_s=1 / port,
        )

    @property
    def costs(self) -> Floats:
        """Return seconds per launch, step, hop, byte on a link and byte at a port, shape (5,)."""
        return np.array(
            [
                self.launch_s,
                self.step_s,
                self.hop_s,
                1 / self.link_bytes_per_s,
                1 / self.network_bytes_per_s,
            ]
        )


def algorithm_work(
    primitive: Primitive, payload_bytes: Floats, groups: Groups
) -> NDArray[np.float64]:
    """Return each algorithm's work, shape (algorithms, 5, K), ordered as :attr:`LinkRates.costs`.

    The algorithms are a ring, a hierarchy (first inside nodes, then across, with shards sharing the
    port) and, for all-reduce, a double binary tree across nodes. All-to-all and send have one
    algorithm. Inside a node, all algorithms are rings.
    """
    match primitive:
        case Primitive.SEND:
            return _send(payload_bytes, groups)[None]
        case Primitive.ALL_TO_ALL:
            return _all_to_all(payload_bytes, groups)[None]
        case Primitive.ALL_REDUCE:
            passes = 2.0
            return np.stack(
                [
                    _ring(payload_bytes, groups, passes),
                    _hierarchical(payload_bytes, groups, passes),
                    _tree(payload_bytes, groups),
                ]
            )
        case Primitive.REDUCE_SCATTER | Primitive.ALL_GATHER:
            return np.stack(
                [_ring(payload_bytes, groups, 1.0), _hierarchical(payload_bytes, groups, 1.0)]
            )


def _ring(payload: Floats, groups: Groups, passes: float) -> Floats:
    """Return the work of all GPUs in one ring.

    Each pass has size - 1 steps. It moves (size - 1) / size of the payload over every link and,
    once, over every port.
    """
    crosses = groups.nodes > 1
    steps = passes * (groups.size - 1)
    moved = steps / groups.size * payload
    alone = groups.size == groups.nodes
    return np.stack(
        [
            np.ones(len(payload)),
            np.where(crosses, 0.0, steps),
            np.where(crosses, steps, 0.0),
            np.where(alone, 0.0, moved),
            np.where(crosses, moved * groups.node_groups, 0.0),
        ]
    )


def _hierarchical(payload: Floats, groups: Groups, passes: float) -> Floats:
    """Return the work of a ring in each node, and of one across nodes for each GPU of a node.

    The ring of a GPU across nodes has its shard of the payload.
    """
    inside = groups.size / groups.nodes
    across = groups.nodes.astype(np.float64)
    return np.stack(
        [
            np.ones(len(payload)),
            passes * (inside - 1),
            passes * (across - 1),
            passes * (inside - 1) / inside * payload,
            passes * (across - 1) / across * payload * groups.node_groups,
        ]
    )


def _tree(payload: Floats, groups: Groups) -> Floats:
    """Return the work of a reduction and broadcast along two complementary binary trees of nodes.

    Inside nodes there are chains (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", 2009).
    """
    inside = groups.size / groups.nodes
    crosses = groups.nodes > 1
    return np.stack(
        [
            np.ones(len(payload)),
            2 * (inside - 1),
            2 * np.ceil(np.log2(groups.nodes)),
            np.where(inside > 1, 2 * payload, 0.0),
            np.where(crosses, 2 * payload * groups.node_groups, 0.0),
        ]
    )


def _all_to_all(payload: Floats, groups: Groups) -> Floats:
    """Return the work if each GPU sends 1 / size of its payload directly to each of the others."""
    inside = groups.size / groups.nodes
    return np.stack(
        [
            np.ones(len(payload)),
            inside - 1,
            (groups.size - inside).astype(np.float64),
            (inside - 1) / groups.size * payload,
            inside * (groups.size - inside) / groups.size * payload * groups.node_groups,
        ]
    )


def _send(payload: Floats, groups: Groups) -> Floats:
    crosses = groups.nodes > 1
    return np.stack(
        [
            np.ones(len(payload)),
            np.where(crosses, 0.0, 1.0),
            np.where(crosses, 1.0, 0.0),
            np.where(crosses, 0.0, payload),
            np.where(crosses, payload * groups.node_groups, 0.0),
        ]
    )


def link_seconds(
    rates: LinkRates, primitive: Primitive, payload_bytes: Floats, groups: Groups
) -> Floats:
    """Return the seconds of the fastest algorithm, shape (K,). Groups have at least two GPUs."""
    work = algorithm_work(primitive, payload_bytes, groups)
    return np.asarray((rates.costs @ work).min(axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNetwork:
    """A :class:`estimator.plans.Network` of links, by default at :meth:`LinkRates.usual`."""

    hardware: Hardware
    shape: Shape
    rates: LinkRates | None = None

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        """Return the seconds of each collective, shape (K,).

        They are 0 for groups of one GPU and for empty payloads.
        """
        check_collectives(payload_bytes, groups, self.shape)
        rates = self.rates or LinkRates.usual(self.hardware)
        sends = (groups.size > 1) & (payload_bytes > 0)
        return np.where(sends, link_seconds(rates, primitive, payload_bytes, groups), 0.0)


def check_collectives(payload_bytes: Floats, groups: Groups, shape: Shape) -> None:
    """Check that payloads are amounts and that groups fit on the shape.

    Raises:
        InvalidInput: a payload or a group is wrong; the message names the first one.
    """
    if not (np.isfinite(payload_bytes).all() and (payload_bytes >= 0).all()):
        raise InvalidInput("payload_bytes", "must be finite and not negative")
    wrong = (groups.node_groups < 1) | (groups.nodes < 1) | (groups.size < groups.nodes)
    wrong |= (groups.nodes > shape.nodes) | (groups.size > shape.gpus_per_node * groups.nodes)
    if wrong.any():
        k = int(wrong.argmax())
        raise InvalidInput(
            "groups",
            f"{int(groups.node_groups[k])} groups of {int(groups.size[k])} GPUs on {int(groups.nodes[k])}"
            f" nodes do not fit on {shape.nodes} nodes of {shape.gpus_per_node} GPUs",
        )
