"""The changes that users request, each inside the transaction that ``write`` opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tessera.db import (
    agents,
    deletion,
    derived_estimates,
    drains,
    inventory,
    job_changes,
    network,
    policies,
    profiling,
    reads,
    reservations,
    submission,
    webhooks,
    workloads,
)
from tessera.db import tenants as settings
from tessera.db.limits import require_few, require_few_clusters
from tessera.db.rows import enter_cluster, nodes_named
from tessera.db.turn import Turn, request_round
from tessera.formulation.arrays import ArrayRecord
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.reasons import Reason
from tessera.formulation.records.clusters import (
    ClusterRecord,
    NodeRecord,
    NodeSpec,
    TenantSpec,
    TopologyRecord,
)
from tessera.formulation.records.estimates import (
    CellFilter,
    EstimateRecord,
    HostProfile,
    ModelSpec,
    ProfileGap,
    ProfileRow,
    TuningRecord,
)
from tessera.formulation.records.jobs import JobRecord, JobSpec
from tessera.formulation.records.policies import PolicyRecord
from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec
from tessera.formulation.records.store import StoreLimits
from tessera.formulation.topologies.described import DescribedTopology
from tessera.formulation.values import Cell, GpuType, Workload
from tessera.formulation.webhooks import WebhookRecord, WebhookSpec


class PostgresWriter:
    """The changes of ``tessera.service.ports.writer.Writer``, on one connection."""

    def __init__(self, connection: sa.Connection, silence_s: float, limits: StoreLimits) -> None:
        """Remember the connection and the settings.

        An agent that was silent for ``silence_s`` seconds counts as disconnected.
        """
        self._connection, self._silence_s, self._limits = connection, silence_s, limits

    def upsert_cluster(
        self,
        name: str,
        gpu_types: Sequence[GpuType],
        version: int | None,
        nodes: Sequence[NodeSpec] = (),
        tenants: Sequence[TenantSpec] = (),
    ) -> ClusterRecord:
        """Create the cluster or replace its GPU types, then create or change nodes and tenants."""
        if inventory.upsert_cluster(self._connection, name, gpu_types, version):
            require_few_clusters(self._connection, self._limits)
        if nodes:
            self.upsert_nodes(name, nodes)
        if tenants:
            self.upsert_tenants(name, tenants)
        return reads.get_cluster(self._connection, name)

    def delete_cluster(self, name: str, version: int | None, *, force: bool) -> None:
        """Delete the cluster. Its rows are removed in the background."""
        deletion.delete_cluster(self._connection, name, version, self._silence_s, force=force)

    def delete_gpu_types(
        self, cluster: str, names: Sequence[str], version: int | None, *, allow_missing: bool
    ) -> ClusterRecord:
        """Delete GPU types that nothing uses."""
        inventory.delete_types(
            self._connection, cluster, names, version, allow_missing=allow_missing
        )
        return reads.get_cluster(self._connection, cluster)

    def upsert_nodes(self, cluster: str, nodes: Sequence[NodeSpec]) -> list[NodeRecord]:
        """Create or change nodes, all or none.

        Agents that still run on deleted nodes get them back.
        """
        turn = Turn.take(self._connection, cluster)
        names = [node.name for node in nodes]
        turn.needs_round = inventory.upsert_nodes(turn, nodes)
        agents.give_nodes_back(turn, names)
        turn.end()
        require_few(self._connection, cluster, "nodes", self._limits)
        return nodes_named(self._connection, turn.cluster, names)

    def drain_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        *,
        draining: bool,
        reason: str = "",
        drained_by: str = "",
    ) -> list[NodeRecord]:
        """Mark nodes as draining, or not.

        A new reason replaces that of a node that is already draining.
        """
        turn = Turn.take(self._connection, cluster)
        return drains.drain_nodes(
            turn, names, draining=draining, reason=reason, drained_by=drained_by
        )

    def delete_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        versions: Mapping[str, int],
        *,
        allow_missing: bool,
    ) -> None:
        """Delete nodes that no job uses, all or none."""
        turn = Turn.take(self._connection, cluster)
        deletion.delete_nodes(turn, names, versions, allow_missing=allow_missing)

    def submit_jobs(
        self, cluster: str, jobs: Sequence[JobSpec], tenants: Collection[str] | None = None
    ) -> list[JobRecord]:
        """Queue jobs, all or none."""
        return submission.submit_jobs(self._connection, cluster, jobs, tenants, self._limits)

    def update_job(
        self, cluster: str, spec: JobSpec, fields: Sequence[str], version: int | None
    ) -> JobRecord:
        """Change the named fields of a job."""
        turn = Turn.take(self._connection, cluster)
        return job_changes.update_job(turn, spec, fields, version, self._limits)

    def job_event(self, cluster: str, name: str, event: JobEvent, version: int | None) -> JobRecord:
        """Apply a user's event."""
        turn = Turn.take(self._connection, cluster)
        return job_changes.apply_event(turn, name, event, version)

    def array_event(self, cluster: str, name: str, event: JobEvent) -> ArrayRecord:
        """Apply a user's event to all members of an array to which it may happen."""
        turn = Turn.take(self._connection, cluster)
        return job_changes.apply_event_to_array(turn, name, event)

    def upsert_tenants(self, cluster: str, tenants: Sequence[TenantSpec]) -> list[TenantSpec]:
        """Create tenants or replace their settings, all or none."""
        turn = Turn.take(self._connection, cluster)
        put = settings.upsert_tenants(turn, tenants)
        request_round(self._connection, turn.cluster)
        require_few(self._connection, cluster, "tenants", self._limits)
        return put

    def delete_tenants(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete the settings of tenants."""
        turn = Turn.take(self._connection, cluster)
        settings.delete_tenants(turn, names, allow_missing=allow_missing)
        request_round(self._connection, turn.cluster)

    def set_policy(
        self,
        cluster: str,
        options: Mapping[str, Any] | None,
        *,
        set_by: str,
        message: str,
        version: int | None,
    ) -> PolicyRecord:
        """Add a version of the standing policy."""
        turn = Turn.take(self._connection, cluster)
        return policies.set_policy(turn, options, set_by=set_by, message=message, version=version)

    def add_webhook(self, cluster: str, spec: WebhookSpec) -> WebhookRecord:
        """Store a webhook."""
        return webhooks.add_webhook(self._connection, cluster, spec)

    def delete_webhook(self, cluster: str, name: str, tenants: Collection[str] | None) -> None:
        """Delete a webhook with its events."""
        webhooks.delete_webhook(self._connection, cluster, name, tenants)

    def revive_webhook(self, cluster: str, name: str) -> None:
        """Let a webhook get events again."""
        webhooks.revive_webhook(self._connection, cluster, name)

    def create_reservation(self, cluster: str, spec: ReservationSpec) -> ReservationRecord:
        """Create a reservation."""
        return reservations.create_reservation(Turn.take(self._connection, cluster), spec)

    def update_reservation(
        self,
        cluster: str,
        name: str,
        start_s: float | None,
        end_s: float | None,
        version: int | None,
    ) -> ReservationRecord:
        """Change the times of a reservation. A time that is None stays."""
        turn = Turn.take(self._connection, cluster)
        return reservations.update_reservation(turn, name, start_s, end_s, version)

    def delete_reservations(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete reservations, all or none."""
        turn = Turn.take(self._connection, cluster)
        reservations.delete_reservations(turn, names, allow_missing=allow_missing)

    def upsert_estimates(self, cluster: str, estimates: Sequence[EstimateRecord]) -> int:
        """Create or replace estimates; return how many."""
        key = enter_cluster(self._connection, cluster)
        return workloads.upsert_estimates(self._connection, key, estimates)

    def delete_cells(self, cluster: str, cells: CellFilter) -> int:
        """Delete all matching estimates; return how many."""
        return deletion.delete_cells(self._connection, cluster, cells)

    def delete_models(
        self, cluster: str, models: Collection[tuple[str, str]], *, allow_missing: bool
    ) -> None:
        """Delete users' models that no live job trains."""
        deletion.delete_models(self._connection, cluster, models, allow_missing=allow_missing)

    def upsert_models(self, cluster: str, models: Sequence[ModelSpec]) -> int:
        """Create or replace models; return how many."""
        count = derived_estimates.upsert_models(self._connection, cluster, models)
        require_few(self._connection, cluster, "models", self._limits)
        return count

    def derive(
        self,
        cluster: str,
        estimates: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
        tunings: Sequence[TuningRecord] = (),
    ) -> int:
        """Store estimates that the service made, where users wrote none."""
        return derived_estimates.put_derived_estimates(
            self._connection, cluster, estimates, derived_from, tunings
        )

    def add_plans(self, cluster: str, planned_cells: Sequence[tuple[Cell, EstimateRecord]]) -> int:
        """Give users' estimates that have none an execution plan."""
        return derived_estimates.add_plans(self._connection, cluster, planned_cells)

    def add_profiles(
        self,
        cluster: str,
        rows: Sequence[ProfileRow],
        gap: ProfileGap | None = None,
        host: HostProfile | None = None,
    ) -> int:
        """Store measured layers and hosts, and what a task left out; return how many layers were new."""
        added = profiling.add_profiles(self._connection, cluster, rows)
        if gap is None:
            profiling.drop_gaps(self._connection, cluster, rows)
        else:
            profiling.put_gap(self._connection, cluster, gap)
        if host is not None:
            profiling.put_host(self._connection, cluster, host)
        derived_estimates.notify_estimators(self._connection, cluster)
        return added

    def end_profiling(self, cluster: str, task: str, gap: ProfileGap | None) -> None:
        """Cancel a profiling task at a limit, and store what it left out with the reason."""
        turn = Turn.take(self._connection, cluster)
        reason = "" if gap is None else gap.reason
        job_changes.apply_event(turn, task, JobEvent.CANCEL, detail=reason)
        if gap is not None:
            profiling.put_gap(self._connection, cluster, gap)

    def set_topology(
        self, cluster: str, described: DescribedTopology, version: int | None
    ) -> TopologyRecord:
        """Describe the cluster's network."""
        return network.set_topology(self._connection, cluster, described, version)

    def drop_topology(
        self, cluster: str, version: int | None = None, *, allow_missing: bool = False
    ) -> None:
        """Delete the cluster's network and its plans."""
        network.drop_topology(self._connection, cluster, version, allow_missing=allow_missing)

    def say_waiting(self, cluster: str, reasons: Mapping[Workload, Reason | None]) -> None:
        """Record why workloads have no estimates."""
        derived_estimates.record_wait_reasons(self._connection, cluster, reasons)


Work = Callable[[PostgresWriter], bytes]
