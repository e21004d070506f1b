"""What is simulated: a cluster, what the models truly need, and the jobs that arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from formulation.errors import InvalidInput
from formulation.resources import EstimateRecord, NodeSpec, TenantSpec
from formulation.snapshot import GpuType
from service.importing.trace import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A world before anything has happened. Times are in seconds since it began.

    ``profiles`` are true: jobs run at these rates, whatever a round is told. A job's ``deadline_s``
    counts from its arrival, as in traces.
    """

    gpu_types: Sequence[GpuType]
    nodes: Sequence[NodeSpec]
    profiles: Sequence[EstimateRecord]
    arrivals: Sequence[Arrival]
    tenants: Sequence[TenantSpec] = ()

    def __post_init__(self) -> None:
        """Refuse what would make a run meaningless, and say what is wrong."""
        known = {kind.name for kind in self.gpu_types}
        if unknown := sorted({node.gpu_type for node in self.nodes} - known):
            raise InvalidInput("nodes", f"have GPU types {unknown} that gpu_types lacks")
        _once("nodes", (node.name for node in self.nodes))
        _once("arrivals", (one.spec.name for one in self.arrivals))
        if any(not one.arrival_s >= 0 for one in self.arrivals):
            raise InvalidInput("arrivals", "must not lie before 0")

    @property
    def gpus(self) -> int:
        """Return the GPUs of the cluster."""
        return sum(node.gpus for node in self.nodes)


def _once(what: str, names: Iterable[str]) -> None:
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise InvalidInput(what, f"must have unique names; {', '.join(twice[:5])} repeat")
