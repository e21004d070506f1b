"""The input of a simulation: a cluster, the true speeds of models, and the jobs that arrive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.selectors import Selector
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.reservations import NodeSize, ReservationSpec, require_room
from tessera.formulation.state.hierarchy import lines_of_tenants
from tessera.simulator.traces.trace import Arrival

EPOCH_S = 1_500_000_000.0
"""The time at which every world begins, in seconds since 1970: a whole number of rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A world before anything has happened. Times are in seconds since the world began.

    ``profiles`` are the truth: jobs run at these rates, whatever estimates rounds see. A job's
    ``deadline_s`` counts from its arrival, as in traces.
    """

    gpu_types: Sequence[GpuType]
    nodes: Sequence[NodeSpec]
    profiles: Sequence[EstimateRecord]
    arrivals: Sequence[Arrival]
    tenants: Sequence[TenantSpec] = ()
    reservations: Sequence[ReservationSpec] = ()

    def __post_init__(self) -> None:
        """Refuse input that would make a run meaningless."""
        known = {kind.name for kind in self.gpu_types}
        if unknown := sorted({node.gpu_type for node in self.nodes} - known):
            raise InvalidInput(
                "nodes", f"have the GPU types {', '.join(unknown)}, which gpu_types lacks"
            )
        if any(node.gpus < 1 for node in self.nodes):
            raise InvalidInput("nodes", "must have at least one GPU")
        _require_unique("nodes", (node.name for node in self.nodes))
        _require_unique("arrivals", (one.spec.name for one in self.arrivals))
        _require_unique("tenants", (tenant.name for tenant in self.tenants))
        lines_of_tenants({tenant.name: tenant.parent for tenant in self.tenants})  # refuses circles
        _require_unique("reservations", (one.name for one in self.reservations))
        times_s = [one.arrival_s for one in self.arrivals]
        if not all(0 <= at_s < math.inf for at_s in times_s) or times_s != sorted(times_s):
            raise InvalidInput("arrivals", "must be ordered by time, from 0 s on")
        if bad := [one.spec.name for one in self.arrivals if one.spec.iterations < 1]:
            raise InvalidInput("arrivals", f"{', '.join(bad[:5])} have no iterations to train")
        _require_in_cluster(
            "arrivals", "the type", known, (one.spec.requested_gpu_type for one in self.arrivals)
        )
        _require_in_cluster(
            "arrivals",
            "the type",
            known,
            (t for one in self.arrivals for t in one.spec.allowed_gpu_types),
        )
        for one in self.arrivals:
            for text in one.spec.selectors:
                Selector.read(f"arrivals/{one.spec.name}", text)
        nodes = {node.name for node in self.nodes}
        avoided = (name for one in self.arrivals for name in one.spec.avoid_nodes)
        _require_in_cluster("arrivals", "the node", nodes, avoided)
        _require_in_cluster(
            "tenants", "the type", known, (t for one in self.tenants for t in one.quotas)
        )
        sizes = {n.name: NodeSize(gpu_type=n.gpu_type, gpus=n.gpus) for n in self.nodes}
        for index, spec in enumerate(self.reservations):
            require_room(spec, self.reservations[:index], sizes)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the cluster."""
        return sum(node.gpus for node in self.nodes)


def _require_in_cluster(what: str, kind: str, known: Set[str], named: Iterable[str]) -> None:
    if unknown := sorted({name for name in named if name} - known):
        raise InvalidInput(
            what,
            f"name {kind} {', '.join(unknown[:5])}, which the cluster does not have; remove it",
        )


def _require_unique(what: str, names: Iterable[str]) -> None:
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise InvalidInput(what, f"must have unique names; {', '.join(twice[:5])} occur twice")
