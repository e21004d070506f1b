"""What a scenario's jobs send on a topology, by what they run as and where, and who has no part in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.estimator.hardware import Hardware
from tessera.estimator.workloads import Estimator, catalogue_of, known_models
from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Contention
from tessera.formulation.network.flows import NetworkJob, contention
from tessera.formulation.network.measured import with_times
from tessera.formulation.network.traffic import Traffic, cell_traffic
from tessera.formulation.placement import Gang
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.topologies.routes import Routes
from tessera.formulation.topologies.topology import Topology
from tessera.formulation.values import BEST_FOUND
from tessera.simulator.scenario import Scenario
from tessera.simulator.store import Change, MemoryStore
from tessera.simulator.truth import truth_of
from tessera.solvers.network.paths import least_comm_s

NEAR = 0.01
"""An iteration alone on the network may differ so much from the profile's, as a share of that."""

Cell = tuple[int, int, int, int, str]
"""Workload, GPU type, GPUs, pipeline degree, plan."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What a Cell sends by nodes that it runs on; ``why`` it is not known, else ""."""

    traffic: dict[int, Traffic]
    why: str = ""

    def on(self, nodes: int) -> Traffic:
        """Return that of the shape, else of the first: plans differ little between shapes."""
        return self.traffic.get(nodes, next(iter(self.traffic.values())))


class Sending:
    """Gives each job's part of the network's contention (``slowdowns.Contended``).

    What a Cell sends is its profile's ``traffic``, else derived from its model, where that is a published one
    on a GPU type of the catalogue. Compute is scaled so that an iteration alone lasts as long as the profile
    says, where the traffic leaves room for that. Jobs that meet nobody are kept by reason, all runs together.

    Raises:
        InvalidInput: the traffic of a profile is none, or of another number of GPUs.
    """

    def __init__(self, scenario: Scenario, topology: Topology) -> None:
        store = MemoryStore(scenario, np.zeros(len(scenario.arrivals)))
        self.unknown: dict[str, str] = {}  # job -> why what it sends is not known
        self.outside: dict[str, str] = {}  # job -> why it has no part in the network
        self.misfit: dict[str, str] = {}  # job -> whose iteration is not the profile's
        self._names = [one.spec.name for one in scenario.arrivals]
        self._workload, self._workloads = store.workload, store.workloads
        self._types, self._plans, self._nodes = store.gpu_types, store.plans, store.node_names
        self._truth = truth_of(store.snapshot(0.0))
        self._topology, self._routes = topology, Routes(topology)
        self._gpus_there = {host: len(topology.gpus_of(i)) for i, host in enumerate(topology.hosts)}
        self._hardware = _hardware(scenario)
        self._models = known_models(self._workloads, ())
        self._estimator = Estimator(self._hardware, self._models)
        self._known = _given(scenario.profiles, store)

    def __call__(self, change: Change, gang: Gang) -> Contention | None:
        """Return what the job loads and may choose; None: it meets nobody."""
        name = self._names[change.job]
        cell = (
            int(self._workload[change.job]), change.gpu_type, change.gpus, change.pipeline_degree,
            self._plans[change.plan],
        )  # fmt: skip
        rate = self._truth.iterations_per_s(*cell, gang.nodes)
        members = tuple((self._nodes[node], gpus) for node, gpus in gang.members)
        if rate <= 0 or not self._is_there(name, members):
            return None
        if cell not in self._known:
            self._known[cell] = self._derived(cell)
        known = self._known[cell]
        if known.why:
            self.unknown[name] = known.why
            return None
        return self._part(NetworkJob(name=name, gang=members, traffic=known.on(gang.nodes)), rate)

    def _is_there(self, name: str, members: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
        for host, gpus in members:
            if max(gpus) >= self._gpus_there.get(host, 0):
                self.outside[name] = f"the topology lacks GPUs of {host}"
                return False
        return True

    def _part(self, job: NetworkJob, rate: float) -> Contention | None:
        part, notes = contention(self._topology, [job], routes=self._routes)
        if not len(part.fixed_link) and not len(part.bundle_bytes):
            if any(exchange.sent_bytes for exchange in job.traffic.exchanges):
                self.outside[job.name] = dict(notes)[job.name]
            return None
        comm_s, period_s = least_comm_s(part), 1.0 / rate
        part, _ = with_times(part, comm_s, np.array([period_s]))
        alone_s = max(float(part.compute_s[0]), float(part.start_s[0] + comm_s[0]))
        if abs(alone_s - period_s) > NEAR * period_s:
            self.misfit[job.name] = f"{alone_s:.3g} s an iteration alone, {period_s:.3g} s profiled"
        return part

    def _derived(self, cell: Cell) -> _Known:
        workload, gpu_type = self._workloads[cell[0]], self._types[cell[1]].name
        if workload not in self._models:
            return _Known(
                {}, f"the model {workload.model} {workload.params}".rstrip() + " is unknown"
            )
        if gpu_type not in self._hardware:
            return _Known({}, f"{gpu_type} is not in the hardware catalogue")
        degrees = None if cell[3] == BEST_FOUND else [cell[3]]
        found = [one.record for one in self._estimator.cells(workload, gpu_type, cell[2], degrees)]
        fits = [record for record in found if record.traffic]
        if not fits:
            return _Known({}, f"no plan of {workload.model} {workload.params} is known to fit")
        best = min(fits, key=lambda record: record.iter_time_s)
        return _Known({best.nodes: cell_traffic(best.traffic).traffic()})


def _hardware(scenario: Scenario) -> dict[str, Hardware]:
    """Return what the catalogue knows of the cluster's GPU types, with its own memory and nodes."""
    size: defaultdict[str, int] = defaultdict(int)
    for node in scenario.nodes:
        size[node.gpu_type] = max(size[node.gpu_type], node.gpus)
    catalogue = catalogue_of()
    return {
        kind.name: replace(
            catalogue[kind.name], gpus_per_node=size[kind.name] or catalogue[kind.name].gpus_per_node,
            memory_bytes=kind.memory_bytes or catalogue[kind.name].memory_bytes,
        )
        for kind in scenario.gpu_types if kind.name in catalogue
    }  # fmt: skip


def _given(profiles: Sequence[EstimateRecord], store: MemoryStore) -> dict[Cell, _Known]:
    """Return the traffic that profiles have, by Cell."""
    workloads = {w: i for i, w in enumerate(store.workloads)}
    types = {kind.name: i for i, kind in enumerate(store.gpu_types)}
    found: defaultdict[Cell, dict[int, Traffic]] = defaultdict(dict)
    for e in profiles:
        if not e.traffic or e.workload not in workloads or e.gpu_type not in types:
            continue
        sent, name = cell_traffic(e.traffic), f"traffic of {e.workload.model} {e.workload.params}"
        if sent.gpus != e.gpus:
            raise InvalidInput(name, f"is of {sent.gpus} GPUs, and its profile of {e.gpus}")
        cell = workloads[e.workload], types[e.gpu_type], e.gpus, e.pipeline_degree, e.plan
        found[cell][e.nodes] = sent.traffic()
    return {cell: _Known(traffic) for cell, traffic in found.items()}
