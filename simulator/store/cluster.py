"""The nodes, tenants and reservations of a scenario as tables of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.resources import HOST_NAMES, NOT_STATED, amounts_of, name_amounts
from tessera.formulation.base.tables import Ints
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.hierarchy import lines_of_tenants
from tessera.formulation.state.reserved import Entitlements, Reservations, ReservedNodes
from tessera.formulation.state.snapshot import Nodes
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.store.names import Names


def nodes_of(scenario: Scenario, names: Names) -> Nodes:
    """Return the nodes, sorted by name. All of them can be used."""
    types, nodes = names.type_indices(), sorted(scenario.nodes, key=lambda n: n.name)
    return Nodes(
        name=tuple(n.name for n in nodes),
        rack=tuple(n.rack for n in nodes),
        gpu_type=np.array([types[n.gpu_type] for n in nodes], dtype=np.int64),
        gpus=np.array([n.gpus for n in nodes], dtype=np.int64),
        schedulable=np.ones(len(nodes), dtype=np.bool_),
        version=np.ones(len(nodes), dtype=np.int64),
        **_host_columns(nodes),
    )


def _host_columns(nodes: Sequence[NodeSpec]) -> dict[str, Ints]:
    """Return what the nodes state of each host resource, by the name of its column."""
    stated = [
        [NOT_STATED if amount is None else amount for amount in amounts_of(node)] for node in nodes
    ]
    return name_amounts(np.array(stated, dtype=np.int64).reshape(-1, len(HOST_NAMES)).T)


def tenants_of(scenario: Scenario) -> Tenants:
    """Return the tenants that have settings, sorted by name."""
    tenants = sorted(scenario.tenants, key=lambda t: t.name)
    index = {"": -1} | {t.name: i for i, t in enumerate(tenants)}
    return Tenants(
        name=tuple(t.name for t in tenants),
        weight=np.array([t.weight for t in tenants], dtype=np.float64),
        borrow_gpus=np.array([t.borrow_gpus for t in tenants], dtype=np.int64),
        keeps_idle_quota=np.array([t.keeps_idle_quota for t in tenants], dtype=np.bool_),
        parent=np.array([index[t.parent] for t in tenants], dtype=np.int64),
    )


def quotas_of(scenario: Scenario, names: Names) -> Quotas:
    """Return the quotas of tenants, in order of both."""
    types, tenants = names.type_indices(), sorted(scenario.tenants, key=lambda t: t.name)
    quotas = sorted(
        (i, types[kind], gpus) for i, t in enumerate(tenants) for kind, gpus in t.quotas.items()
    )
    tenant, gpu_type, gpus = np.array(quotas, dtype=np.int64).reshape(-1, 3).T
    return Quotas(tenant=tenant, gpu_type=gpu_type, gpus=gpus)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReservationTables:
    """The reservations of a scenario. ``entitlements`` has indices into its arrivals."""

    table: Reservations
    nodes: ReservedNodes
    entitlements: Entitlements


def reservations_of(
    scenario: Scenario, names: Names, specs: Sequence[JobSpec], nodes: Nodes
) -> ReservationTables:
    """Return the reservations by start and name, with their nodes and the jobs that they serve."""
    own = sorted(scenario.reservations, key=lambda one: (one.start_s, one.name))
    types = names.type_indices()
    index = {name: i for i, name in enumerate(nodes.name)}
    named = [(r, index[name]) for r, one in enumerate(own) for name in one.nodes]
    lines = lines_of_tenants({t.name: t.parent for t in scenario.tenants})
    served = [
        (r, job)
        for r, one in enumerate(own)
        for job, spec in enumerate(specs)
        if one.serves(lines.get(spec.tenant, (spec.tenant,)), spec.labels)
    ]
    of_nodes, of_jobs = (np.array(rows, dtype=np.int64).reshape(-1, 2) for rows in (named, served))
    return ReservationTables(
        table=Reservations(
            name=tuple(one.name for one in own),
            start_s=np.array([EPOCH_S + one.start_s for one in own], dtype=np.float64),
            end_s=np.array([EPOCH_S + one.end_s for one in own], dtype=np.float64),
            gpu_type=np.array([types[one.gpu_type] for one in own], dtype=np.int64),
            gpus=np.array([one.gpus for one in own], dtype=np.int64),
            maintenance=np.array([one.maintenance for one in own], dtype=np.bool_),
        ),
        nodes=ReservedNodes(reservation=of_nodes[:, 0], node=of_nodes[:, 1]),
        entitlements=Entitlements(reservation=of_jobs[:, 0], job=of_jobs[:, 1]),
    )
