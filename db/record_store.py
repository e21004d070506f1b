"""PostgreSQL's store of records: clusters, jobs, and all that users state about them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tessera.db import (
    arrays,
    derived_estimates,
    job_rounds,
    network,
    plans,
    policies,
    reads,
    reservations,
    runtime_offers,
    tenants,
    usage,
)
from tessera.db.store_part import StorePart
from tessera.formulation.arrays import ArrayRecord
from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.lifecycle import JobState
from tessera.formulation.records.clusters import (
    ClusterRecord,
    NodeRecord,
    TenantSpec,
    TopologyRecord,
)
from tessera.formulation.records.estimates import EstimateRecord, EstimationInputs, ModelSpec
from tessera.formulation.records.jobs import JobEventRecord, JobRecord
from tessera.formulation.records.policies import PolicyRecord
from tessera.formulation.records.reservations import ReservationRecord
from tessera.formulation.records.rounds import JobRound
from tessera.formulation.records.usage import ClusterUsage, UsageQuery
from tessera.formulation.runtime_offers import RuntimeLack
from tessera.formulation.topologies.described import decode_topology
from tessera.formulation.values import Workload


class RecordStore(StorePart):
    """The records of ``tessera.service.ports``: clusters, jobs, tenants, policies, estimates, networks."""

    def get_cluster(self, cluster: str) -> ClusterRecord:
        """Return a cluster."""
        with self._database.read() as connection:
            return reads.get_cluster(connection, cluster)

    def list_clusters(self, after: str, limit: int) -> list[ClusterRecord]:
        """Return clusters by name."""
        with self._database.read() as connection:
            return reads.list_clusters(connection, after, limit)

    def get_node(self, cluster: str, name: str) -> NodeRecord:
        """Return a node."""
        with self._database.read() as connection:
            return reads.get_node(connection, cluster, name)

    def list_nodes(self, cluster: str, after: str, limit: int) -> list[NodeRecord]:
        """Return nodes by name."""
        with self._database.read() as connection:
            return reads.list_nodes(connection, cluster, after, limit)

    def get_job(self, cluster: str, name: str) -> JobRecord:
        """Return a job."""
        with self._database.read() as connection:
            return reads.get_job(connection, cluster, name)

    def get_array(self, cluster: str, name: str) -> ArrayRecord:
        """Return an array of jobs."""
        with self._database.read() as connection:
            return arrays.get_array(connection, cluster, name)

    def list_jobs(
        self,
        cluster: str,
        states: Sequence[JobState],
        after: int,
        limit: int,
        *,
        tenants: Collection[str] | None = None,
    ) -> tuple[list[JobRecord], int]:
        """Return jobs in order of submission, and the next cursor."""
        with self._database.read() as connection:
            return reads.list_jobs(connection, cluster, states, after, limit, tenants)

    def job_history(self, cluster: str, name: str) -> list[JobEventRecord]:
        """Return the events of a job."""
        with self._database.read() as connection:
            return reads.job_history(connection, cluster, name)

    def tenants_of_jobs(self, cluster: str, names: Collection[str]) -> dict[str, str]:
        """Return the tenant of each of these jobs that exists."""
        with self._database.read() as connection:
            return tenants.tenants_of_jobs(connection, cluster, names)

    def list_tenants(self, cluster: str) -> list[TenantSpec]:
        """Return the tenants that have settings."""
        with self._database.read() as connection:
            return tenants.list_tenants(connection, cluster)

    def newest_policy(self, cluster: str) -> PolicyRecord | None:
        """Return the newest version of the standing policy, or None if none was set."""
        with self._database.read() as connection:
            return policies.newest_policy(connection, cluster)

    def get_policy(self, cluster: str, version: int) -> PolicyRecord:
        """Return a version of the standing policy."""
        with self._database.read() as connection:
            return policies.get_policy(connection, cluster, version)

    def list_policies(self, cluster: str, before: int, limit: int) -> list[PolicyRecord]:
        """Return versions of the standing policy, newest first."""
        with self._database.read() as connection:
            return policies.list_policies(connection, cluster, before, limit)

    def list_reservations(self, cluster: str) -> list[ReservationRecord]:
        """Return the reservations by start, those that have ended, too."""
        with self._database.read() as connection:
            return reservations.list_reservations(connection, cluster)

    def get_reservation(self, cluster: str, name: str) -> ReservationRecord:
        """Return a reservation."""
        with self._database.read() as connection:
            return reservations.get_reservation(connection, cluster, name)

    def list_estimates(
        self, cluster: str, model: str, params: str, global_batch: int, after: int, limit: int
    ) -> tuple[list[EstimateRecord], int]:
        """Return estimates, and the next cursor."""
        workload = Workload(model=model, params=params, global_batch=global_batch)
        with self._database.read() as connection:
            return reads.list_estimates(connection, cluster, workload, after, limit)

    def find_lacks(self, cluster: str, runtimes: Collection[str]) -> dict[str, RuntimeLack]:
        """Return the ``runtimes`` that no node with an agent offers."""
        with self._database.read() as connection:
            silence_s = self._silence.read(connection)
            return runtime_offers.find_lacks(connection, cluster, runtimes, silence_s)

    def list_model_names(self, cluster: str) -> list[tuple[str, str]]:
        """Return the names and sizes of users' models and of those that have estimates."""
        with self._database.read() as connection:
            return reads.list_model_names(connection, cluster)

    def list_models(self, cluster: str) -> list[ModelSpec]:
        """Return the users' models, by name."""
        with self._database.read() as connection:
            return derived_estimates.list_models(connection, cluster)

    def estimation(self, cluster: str) -> EstimationInputs:
        """Return everything that the cluster's estimates are computed from."""
        with self._database.read() as connection:
            return derived_estimates.load_estimation(connection, cluster)

    def execution_plans(self, cluster: str, digests: Collection[str]) -> dict[str, str]:
        """Return the canonical JSON of execution plans by digest, without those that are not stored."""
        with self._database.read() as connection:
            return plans.read_plans(connection, cluster, digests)

    def has_topology(self, cluster: str) -> bool:
        """Return whether the cluster's network is described."""
        with self._database.read() as connection:
            return network.has_topology(connection, cluster)

    def get_topology(
        self, cluster: str, cancelled: Callable[[], bool] = never_cancelled
    ) -> TopologyRecord:
        """Return the cluster's network."""
        with self._database.read() as connection:
            document, version = network.load_topology(connection, cluster)
        return TopologyRecord(described=decode_topology(document, cancelled), version=version)

    def sum_usage(self, cluster: str, query: UsageQuery) -> ClusterUsage:
        """Return what the jobs of a cluster have used."""
        with self._database.read() as connection:
            return usage.sum_usage(connection, cluster, query)

    def rounds_of_job(self, cluster: str, name: str, last: int, most: int) -> list[JobRound]:
        """Return the decisions of rounds on a job, newest first."""
        with self._database.read() as connection:
            return job_rounds.rounds_of_job(connection, cluster, name, last, most)
