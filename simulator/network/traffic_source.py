"""The traffic that a scenario's jobs send on a topology, given their Cells and GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.models import known_models
from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.flows import NetworkJob, build_contention
from tessera.formulation.answer.network.measured import correct_times
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import BEST_FOUND, Cell, Workload
from tessera.formulation.state.topologies.routes import Routes
from tessera.formulation.state.topologies.topology import Topology
from tessera.formulation.state.traffic import Traffic
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.gpus import AllocationChange
from tessera.simulator.store.memory import MemoryStore
from tessera.simulator.truth import truth_of
from tessera.solvers.network.paths import least_comm_s

PERIOD_TOLERANCE = 0.01
"""Tolerance of the time of an iteration alone, as a share of the profile's time."""


@dataclass(frozen=True, slots=True)
class _CellTraffic:
    """The traffic of a Cell by number of nodes.

    ``why`` says why the traffic is unknown, or is "".
    """

    traffic: dict[int, Traffic]
    why: str = ""

    def on(self, nodes: int) -> Traffic:
        """Return the traffic of the shape, or else that of the first shape, which differs little."""
        return self.traffic.get(nodes, next(iter(self.traffic.values())))


class TrafficSource:
    """A source of each job's part of the network's contention (``slowdowns.ContentionSlowdowns``).

    A Cell sends the ``traffic`` of its profile. If the profile has none, the traffic is derived
    from the model, if it is a published model on a GPU type of the catalogue. Compute is scaled so
    that an iteration alone takes as long as in the profile, if the traffic leaves time for that.
    Jobs that take no part in the contention are recorded with the reason, over all runs.

    Raises:
        InvalidInput: the traffic of a profile is not valid, or is for another number of GPUs.
    """

    def __init__(self, scenario: Scenario, topology: Topology) -> None:
        store = MemoryStore(scenario, np.zeros(len(scenario.arrivals)))
        self.unknown: dict[str, str] = {}  # job -> why its traffic is not known
        self.outside: dict[str, str] = {}  # job -> why it has no part in the network
        self.misfit: dict[str, str] = {}  # job -> how its iteration differs from the profile's
        self._names = [arrival.spec.name for arrival in scenario.arrivals]
        self._workload, self._workloads = store.jobs.workload, store.names.workloads
        self._cell, self._nodes = store.names.cell, store.node_names
        self._truth = truth_of(store.snapshot(0.0))
        self._topology, self._routes = topology, Routes(topology)
        self._gpus_there = {host: len(topology.gpus_of(i)) for i, host in enumerate(topology.hosts)}
        self._hardware = _hardware(scenario)
        self._models = known_models(self._workloads, ())
        self._estimator = Estimator(self._hardware, self._models)
        self._known = _profiled_traffic(scenario)

    def __call__(self, change: AllocationChange, gang: Gang) -> Contention | None:
        """Return the job's loads and choices of paths, or None if it takes no part in contention."""
        name = self._names[change.job]
        workload, cell = int(self._workload[change.job]), self._cell(change.cell)
        rate = self._truth.iterations_per_s(workload, cell.on(gang.nodes))
        members = tuple((self._nodes[node], gpus) for node, gpus in gang.members)
        if rate <= 0 or not self._is_there(name, members):
            return None
        of = self._workloads[workload], cell
        if of not in self._known:
            self._known[of] = self._derived(*of)
        known = self._known[of]
        if known.why:
            self.unknown[name] = known.why
            return None
        return self._part(NetworkJob(name=name, gang=members, traffic=known.on(gang.nodes)), rate)

    def _is_there(self, name: str, members: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
        for host, gpus in members:
            if max(gpus) >= self._gpus_there.get(host, 0):
                self.outside[name] = f"the topology does not have all GPUs of {host}"
                return False
        return True

    def _part(self, job: NetworkJob, rate: float) -> Contention | None:
        part, notes = build_contention(self._topology, [job], routes=self._routes)
        if not len(part.fixed_link) and not len(part.bundle_bytes):
            if any(exchange.sent_bytes for exchange in job.traffic.exchanges):
                self.outside[job.name] = dict(notes)[job.name]
            return None
        comm_s, period_s = least_comm_s(part), 1.0 / rate
        part, _ = correct_times(part, comm_s, np.array([period_s]))
        alone_s = max(float(part.compute_s[0]), float(part.start_s[0] + comm_s[0]))
        if abs(alone_s - period_s) > PERIOD_TOLERANCE * period_s:
            self.misfit[job.name] = (
                f"an iteration takes {alone_s:.3g} s alone, but {period_s:.3g} s in the profile"
            )
        return part

    def _derived(self, workload: Workload, cell: Cell) -> _CellTraffic:
        if workload not in self._models:
            return _CellTraffic(
                {}, f"the model {workload.model} {workload.params}".rstrip() + " is unknown"
            )
        if cell.gpu_type not in self._hardware:
            return _CellTraffic({}, f"{cell.gpu_type} is not in the hardware catalogue")
        degrees = None if cell.pipeline_degree == BEST_FOUND else [cell.pipeline_degree]
        estimates = self._estimator.cells(workload, cell.gpu_type, cell.gpus, degrees)
        records = [estimate.record for estimate in estimates]
        fits = [(r.iter_time_s, r.cell.nodes, r.traffic) for r in records if r.traffic is not None]
        if not fits:
            return _CellTraffic({}, f"no plan of {workload.model} {workload.params} fits")
        _, nodes, sent = min(fits, key=lambda fit: fit[0])
        return _CellTraffic({nodes: sent.traffic()})


def _hardware(scenario: Scenario) -> dict[str, Hardware]:
    """Return the catalogue's hardware by GPU type, with the cluster's memory and node sizes."""
    size: defaultdict[str, int] = defaultdict(int)
    for node in scenario.nodes:
        size[node.gpu_type] = max(size[node.gpu_type], node.gpus)
    catalogue = catalogue_of()
    return {
        kind.name: replace(
            catalogue[kind.name],
            gpus_per_node=size[kind.name] or catalogue[kind.name].gpus_per_node,
            memory_bytes=kind.memory_bytes or catalogue[kind.name].memory_bytes,
        )
        for kind in scenario.gpu_types
        if kind.name in catalogue
    }


def _profiled_traffic(scenario: Scenario) -> dict[tuple[Workload, Cell], _CellTraffic]:
    """Return the traffic that profiles have, by workload and Cell on any nodes."""
    by_cell: defaultdict[tuple[Workload, Cell], dict[int, Traffic]] = defaultdict(dict)
    types = {kind.name for kind in scenario.gpu_types}
    for e in scenario.profiles:
        sent, name = e.traffic, f"traffic of {e.workload.model} {e.workload.params}"
        if sent is None or e.cell.gpu_type not in types:
            continue
        if sent.gpus != e.cell.gpus:
            raise InvalidInput(
                name, f"is for {sent.gpus} GPUs, but its profile is for {e.cell.gpus}"
            )
        by_cell[e.workload, e.cell.on(0)][e.cell.nodes] = sent.traffic()
    return {of: _CellTraffic(traffic) for of, traffic in by_cell.items()}
