"""What the service needs of the world, as protocols: a store and a clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from tessera.formulation.cancelling import never
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.network.outcome import NetworkPlanRecord
from tessera.formulation.reasons import Reason
from tessera.formulation.records.agents import Desired, Heartbeat, ObservedGang
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
    Estimation,
    ModelSpec,
    ProfileRow,
)
from tessera.formulation.records.jobs import JobEventRecord, JobRecord, JobSpec
from tessera.formulation.records.rounds import NetworkCommit, RoundCommit, RoundRecord, RoundSummary
from tessera.formulation.records.store import Request, Retention
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.topologies.described import DescribedTopology
from tessera.formulation.values import GpuType, Workload


class Writer(Protocol):
    """Changes inside one transaction of ``Store.write``. A version of None matches any."""

    def upsert_cluster(
        self, name: str, gpu_types: Sequence[GpuType], version: int | None
    ) -> ClusterRecord:
        """Create the cluster or replace its GPU types.

        Raises:
            InvalidInput: a type that nodes, Cells, jobs or quotas still use is missing.
            StaleEtag: ``version`` is not the stored one.
        """
        ...

    def delete_cluster(self, name: str, version: int | None, *, force: bool) -> None:
        """Delete a cluster: from the commit on nobody finds it, and its name is free.

        Raises:
            NotFound, StaleEtag.
            InUse: a job is live or still holds GPUs; or an agent is connected, unless ``force``.
        """
        ...

    def delete_gpu_types(
        self, cluster: str, names: Sequence[str], version: int | None, *, allow_missing: bool
    ) -> ClusterRecord:
        """Delete GPU types of a cluster, all or none.

        Raises:
            NotFound: the cluster, or a type unless ``allow_missing``. StaleEtag.
            InUse: nodes, users' Cells, quotas or live jobs name one. InvalidInput: none would remain.
        """
        ...

    def upsert_nodes(self, cluster: str, nodes: Sequence[NodeSpec]) -> list[NodeRecord]:
        """Create or change nodes, all or none.

        Raises:
            NotFound, StaleEtag.
            InvalidInput: unknown GPU type, or a count outside 1..64.
            NotAllowed: a node whose GPUs are held would change type or lose GPUs.
        """
        ...

    def drain_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        *,
        draining: bool,
        reason: str = "",
        drained_by: str = "",
    ) -> list[NodeRecord]:
        """Mark nodes as draining, or not. Raises NotFound.

        A reason replaces that of a node that drains already; without one it stays.
        """
        ...

    def delete_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        versions: Mapping[str, int],
        *,
        allow_missing: bool,
    ) -> None:
        """Delete nodes, all or none; those in ``versions`` must be at that version.

        An agent that runs on one of them is told, and does not register it again until it is restarted or a
        user creates the node again. Jobs that avoid a node avoid it no longer.

        Raises:
            NotFound: the cluster, or a node unless ``allow_missing``. StaleEtag. InUse: jobs hold GPUs there.
        """
        ...

    def submit_jobs(self, cluster: str, jobs: Sequence[JobSpec]) -> list[JobRecord]:
        """Queue jobs, all or none.

        Raises:
            NotFound: the cluster. AlreadyExists: a job.
            InvalidInput: unknown GPU type or node; a deadline that has passed; a type pinned on which the
                workload has no Cells, but has some elsewhere; or it has Cells and none fits the cluster.
        """
        ...

    def update_job(
        self, cluster: str, spec: JobSpec, fields: Sequence[str], version: int | None
    ) -> JobRecord:
        """Change named fields (of JobSpec) of a job; what asks for more withdraws a promised deadline.

        Raises:
            NotFound, StaleEtag, NotAllowed (ended), InvalidInput (as ``submit_jobs``).
        """
        ...

    def job_event(self, cluster: str, name: str, event: JobEvent, version: int | None) -> JobRecord:
        """Apply a user's event (cancel, hold, release). Raises NotFound, StaleEtag, NotAllowed."""
        ...

    def upsert_tenants(self, cluster: str, tenants: Sequence[TenantSpec]) -> list[TenantSpec]:
        """Create tenants or replace their settings, all or none.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type; quotas that together exceed the cluster.
        """
        ...

    def delete_tenants(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Forget the settings of tenants; their jobs stay. Raises NotFound, unless ``allow_missing``."""
        ...

    def upsert_estimates(self, cluster: str, estimates: Sequence[EstimateRecord]) -> int:
        """Create or replace estimates; return how many. Raises NotFound, InvalidInput (unknown GPU type)."""
        ...

    def delete_cells(self, cluster: str, cells: CellFilter) -> int:
        """Delete all estimates that match, the service's own too; return how many. Measurements stay.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type. InUse: jobs run on one of them.
        """
        ...

    def delete_models(
        self, cluster: str, models: Collection[tuple[str, str]], *, allow_missing: bool
    ) -> None:
        """Delete users' models, by (model, params), with the estimates that were computed from them.

        Raises:
            NotFound: the cluster, or a model unless ``allow_missing``. InUse: live jobs train one of them.
        """
        ...

    def upsert_models(self, cluster: str, models: Sequence[ModelSpec]) -> int:
        """Create or replace models of users, all or none; return how many. Raises NotFound."""
        ...

    def derive(
        self,
        cluster: str,
        estimates: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
    ) -> int:
        """Keep estimates that the service made; return how many were new or took another's place.

        No estimate of a user is changed, nothing computed is added beside one, and no measured one of the
        service's own gives way to a computed one. ``derived_from`` has the digest of what a workload's
        estimates were computed from; nothing is said of why it has none any more.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def add_profiles(self, cluster: str, rows: Sequence[ProfileRow]) -> int:
        """Keep measured layers; return how many were not there before. They are never changed.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def set_topology(
        self, cluster: str, described: DescribedTopology, version: int | None
    ) -> TopologyRecord:
        """Describe the cluster's network; a version of 0 means that there is none yet.

        Raises:
            NotFound: the cluster. StaleEtag.
        """
        ...

    def drop_topology(
        self, cluster: str, version: int | None = None, *, allow_missing: bool = False
    ) -> None:
        """Forget the network and its plans.

        Raises:
            NotFound: the cluster; or its network, unless ``allow_missing``. StaleEtag.
        """
        ...

    def say_waiting(self, cluster: str, reasons: Mapping[Workload, Reason | None]) -> None:
        """Say why workloads have no estimates; None: nothing. It shows with their queued jobs."""
        ...


class Rounds(Protocol):
    """What deciding a cluster's rounds needs of a store; every method is one transaction."""

    def begin_round(self, cluster: str, request: Request | None) -> Snapshot | RoundRecord:
        """Return what a round may look at, once nodes that fell silent have lost what they held.

        Silent is who was not heard for longer than lease plus margin, by the database's clock. Jobs go
        through LOST; the dead node's GPUs need no report, those of the gang's members on live nodes do.
        Where ``request`` committed a round before, nothing happens, and that round is returned.

        Raises:
            NotFound: the cluster. RequestIdReused.
        """
        ...

    def snapshot(self, cluster: str) -> Snapshot:
        """Read everything a round may look at in one REPEATABLE READ transaction. Raises NotFound."""
        ...

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Commit a round, all or nothing; the first statement advances the epoch or gives up.

        Each decision is guarded by its job's and nodes' versions: what changed during the solve is left
        alone and recorded as not applied. ``in_time`` is asked last: a round may wait for its turn.

        Raises:
            RoundSuperseded: the epoch moved on; nothing was written.
            DeadlineTooShort: not ``in_time``; nothing was written.
        """
        ...

    def get_round(self, cluster: str, number: int) -> RoundRecord:
        """Return a round with its decisions. Raises NotFound."""
        ...

    def round_snapshot(self, cluster: str, number: int) -> Snapshot:
        """Return the snapshot that a round was decided on. Raises NotFound."""
        ...


class Store(Rounds, Protocol):
    """Where everything is kept. Every method is one transaction, and safe to call from any thread."""

    def write(
        self,
        request: Request | None,
        work: Callable[[Writer], bytes],
        *,
        validate_only: bool = False,
    ) -> bytes:
        """Run ``work`` in one transaction and return the bytes it returns.

        With a request id those bytes are kept: the same request again returns them without running
        ``work``. With ``validate_only`` everything is checked and rolled back.

        Raises:
            RequestIdReused: the id was used with another method or body.
        """
        ...

    def get_cluster(self, cluster: str) -> ClusterRecord:
        """Return a cluster. Raises NotFound."""
        ...

    def list_clusters(self, after: str, limit: int) -> list[ClusterRecord]:
        """Return clusters whose name sorts after ``after``, by name."""
        ...

    def get_node(self, cluster: str, name: str) -> NodeRecord:
        """Return a node. Raises NotFound."""
        ...

    def list_nodes(self, cluster: str, after: str, limit: int) -> list[NodeRecord]:
        """Return nodes whose name sorts after ``after``, by name. Raises NotFound (the cluster)."""
        ...

    def get_job(self, cluster: str, name: str) -> JobRecord:
        """Return a job. Raises NotFound."""
        ...

    def list_jobs(
        self, cluster: str, states: Sequence[JobState], after: int, limit: int
    ) -> tuple[list[JobRecord], int]:
        """Return jobs in order of submission from the cursor ``after`` (0: the start), and the next
        cursor (0: no more). Empty ``states``: all. Raises NotFound (the cluster)."""
        ...

    def list_tenants(self, cluster: str) -> list[TenantSpec]:
        """Return the tenants that have settings, by name. Raises NotFound (the cluster)."""
        ...

    def job_history(self, cluster: str, name: str) -> list[JobEventRecord]:
        """Return what happened to a job, oldest first. Raises NotFound."""
        ...

    def list_estimates(
        self, cluster: str, model: str, params: str, global_batch: int, after: int, limit: int
    ) -> tuple[list[EstimateRecord], int]:
        """Return estimates (of one workload; empty model: of all) from a cursor, and the next cursor."""
        ...

    def list_models(self, cluster: str) -> list[ModelSpec]:
        """Return the models of users, by name. Raises NotFound (the cluster)."""
        ...

    def estimation(self, cluster: str) -> Estimation:
        """Return all that the cluster's estimates are computed from. Raises NotFound."""
        ...

    def has_topology(self, cluster: str) -> bool:
        """Return whether the cluster's network is described. Raises NotFound: the cluster."""
        ...

    def get_topology(self, cluster: str, cancelled: Callable[[], bool] = never) -> TopologyRecord:
        """Return the cluster's network.

        Raises:
            NotFound: the cluster, or its network. DeadlineTooShort: it was cancelled.
        """
        ...

    def commit_network(self, plan: NetworkCommit) -> NetworkPlanRecord | None:
        """Put a plan made between rounds in force; None: it changes nothing.

        Decisions for allocations that have gone meanwhile are left out.

        Raises:
            RoundSuperseded: a round was committed since; its own plan stands.
            StaleEtag: the topology is another one since.
            NotFound: the cluster, or its network.
        """
        ...

    def network_in_force(self, cluster: str, job: str = "") -> NetworkPlanRecord:
        """Return the network plan in force, by rank; ``job``: of its decisions only that job's.

        Raises:
            NotFound: the cluster, its network, or a plan.
        """
        ...

    def list_network_plans(self, cluster: str, before: int, limit: int) -> list[NetworkPlanRecord]:
        """Return plans before ``before`` (0: all) without decisions, newest first. Raises NotFound."""
        ...

    def list_rounds(self, cluster: str, before: int, limit: int) -> list[RoundSummary]:
        """Return rounds with a number below ``before`` (0: all), newest first. Raises NotFound."""
        ...

    def acquire_lease(self, cluster: str, holder: str, ttl_s: float) -> bool:
        """Take or renew the lease of the periodic round loop, by the database's clock."""
        ...

    def hello(self, cluster: str, agent: str, incarnation: str, nodes: Sequence[NodeSpec]) -> None:
        """Register an agent and its nodes; a newer incarnation takes the nodes over.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type, or other GPUs than stored while held.
        """
        ...

    def heartbeats(self, beats: Sequence[Heartbeat]) -> Collection[int]:
        """Renew the leases of agents' nodes; return the places of those whose agent is known.

        ``require_agent`` tells why another one is not.
        """
        ...

    def require_agent(self, cluster: str, agent: str, incarnation: str) -> None:
        """Check that the agent is known.

        Raises:
            NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
        """
        ...

    def observe(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        gangs: Sequence[ObservedGang],
        revision: int,
    ) -> bool:
        """Take in what runs on the agent's nodes; return whether the desired state changed by it.

        A releasing GPU whose job and generation is absent from ``gangs`` is free, if ``revision`` is not
        older than its release. Reports of an older generation change nothing. Raises NotAllowed.
        """
        ...

    def desired(self, cluster: str, agent: str) -> Desired:
        """Return the gangs of the agent's nodes whose every GPU, on every node, is held."""
        ...

    def purge(self) -> bool:
        """Remove a batch of rows of deleted clusters; return whether there may be more."""
        ...

    def retry_in_s(self, cluster: str) -> float:
        """Return the seconds until the next back-off of a job ends; inf: no job waits after a failure."""
        ...

    def prune_batch(self, cluster: str, retention: Retention) -> dict[str, int]:
        """Delete a bounded number of old rows of each kind; return how many went, by kind.

        Nothing is left to delete once all are 0. Raises NotFound.
        """
        ...

    def ready(self) -> None:
        """Check connection and schema. Raises Unavailable, NotMigrated."""
        ...
