"""The interfaces through which the service uses the outside world, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from tessera.formulation.arrays import ArrayRecord
from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.network.outcome import NetworkPlanRecord
from tessera.formulation.proofs import RoundProof
from tessera.formulation.reasons import Reason
from tessera.formulation.records.agents import (
    DesiredState,
    Heartbeat,
    NodeHealth,
    ObservedGang,
)
from tessera.formulation.records.clusters import (
    ClusterOutlook,
    ClusterRecord,
    NodeRecord,
    NodeSpec,
    TenantSpec,
    TopologyRecord,
)
from tessera.formulation.records.estimates import (
    CellFilter,
    CollectiveRecord,
    EstimateRecord,
    EstimationInputs,
    HostProfile,
    ModelSpec,
    ProfileGap,
    ProfileRow,
    TuningRecord,
)
from tessera.formulation.records.jobs import JobEventRecord, JobRecord, JobSpec
from tessera.formulation.records.logs import LogAnswer, LogRead, StartedJob
from tessera.formulation.records.policies import PolicyRecord, ShadowRecord, ShadowRound
from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec
from tessera.formulation.records.rounds import (
    JobRound,
    NetworkCommit,
    RoundCommit,
    RoundRecord,
    RoundSummary,
)
from tessera.formulation.records.store import Request, Retention
from tessera.formulation.records.usage import ClusterUsage, UsageQuery
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.spreads import ClusterForecast, ForecastHistory
from tessera.formulation.topologies.described import DescribedTopology
from tessera.formulation.values import GpuType, Workload
from tessera.formulation.webhooks import ClaimedWebhook, WebhookRecord, WebhookSpec


class Writer(Protocol):
    """A set of changes inside one transaction of ``Store.write``.

    If a version is None, it matches any stored version.
    """

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
        """Delete a cluster. After the commit it cannot be found, and its name is free.

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
            InUse: nodes, users' Cells, quotas or live jobs name one.
            InvalidInput: none would remain.
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

        A reason replaces the reason of a node that is already draining. If ``reason`` is "", the
        old one stays. A node that health had drained stays drained until it is undrained. The
        present faults of a node that is undrained are excused until they are gone.
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
        """Delete nodes, all or none. Nodes in ``versions`` must be at that version.

        An agent that runs on a deleted node is informed. It does not register the node again until
        it is restarted or a user creates the node again. The node is removed from the lists of
        nodes that jobs avoid.

        Raises:
            NotFound: the cluster, or a node unless ``allow_missing``. StaleEtag. InUse: jobs hold
                GPUs there.
        """
        ...

    def submit_jobs(
        self, cluster: str, jobs: Sequence[JobSpec], tenants: Collection[str] | None = None
    ) -> list[JobRecord]:
        """Queue jobs, all or none.

        Jobs of other ``tenants`` that they wait for count as unknown, unless it is None.

        Raises:
            NotFound: the cluster. AlreadyExists: a job.
            InvalidInput: unknown GPU type, node or dependency; jobs that wait for each other; a
                deadline that has passed; a pinned GPU type on which the workload has no Cells
                although it has some on others; or its Cells do not fit the cluster.
            LimitReached: a tenant would have too many live jobs.
        """
        ...

    def update_job(
        self, cluster: str, spec: JobSpec, fields: Sequence[str], version: int | None
    ) -> JobRecord:
        """Change the named fields (of JobSpec) of a job.

        A change that asks for more withdraws a promised deadline.

        Raises:
            NotFound, StaleEtag, NotAllowed (ended), InvalidInput and LimitReached (as
                ``submit_jobs``).
        """
        ...

    def job_event(self, cluster: str, name: str, event: JobEvent, version: int | None) -> JobRecord:
        """Apply a user's event (cancel, hold, release). Raises NotFound, StaleEtag, NotAllowed."""
        ...

    def array_event(self, cluster: str, name: str, event: JobEvent) -> ArrayRecord:
        """Apply a user's event to all jobs of an array to which it may happen. Raises NotFound."""
        ...

    def add_webhook(self, cluster: str, spec: WebhookSpec) -> WebhookRecord:
        """Store a webhook. Raises NotFound (the cluster), AlreadyExists, LimitReached."""
        ...

    def delete_webhook(self, cluster: str, name: str, tenants: Collection[str] | None) -> None:
        """Delete a webhook with its events.

        Callers bound to ``tenants`` see only those of them; None sees all. Raises NotFound.
        """
        ...

    def revive_webhook(self, cluster: str, name: str) -> None:
        """Let a webhook that failed get its events at once, if there is one."""
        ...

    def upsert_tenants(self, cluster: str, tenants: Sequence[TenantSpec]) -> list[TenantSpec]:
        """Create tenants or replace their settings, all or none.

        Raises:
            NotFound: the cluster.
            InvalidInput: unknown GPU type; quotas that together exceed the cluster.
        """
        ...

    def delete_tenants(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete the settings of tenants, but not their jobs.

        Raises:
            NotFound: the cluster, or a tenant unless ``allow_missing``.
        """
        ...

    def set_policy(
        self,
        cluster: str,
        options: Mapping[str, Any] | None,
        *,
        set_by: str,
        message: str,
        version: int | None,
    ) -> PolicyRecord:
        """Add a version of the standing policy with ``options``, and ask for a round.

        If ``options`` is None, it is the policy of the server's settings.

        Raises:
            NotFound: the cluster.
            StaleEtag: ``version`` is given, and the newest version is another one.
        """
        ...

    def set_shadow(
        self, cluster: str, options: Mapping[str, Any], *, set_by: str, message: str
    ) -> ShadowRecord:
        """Set the cluster's shadow in place of an earlier one, whose rounds are deleted.

        Raises:
            NotFound: the cluster.
        """
        ...

    def drop_shadow(self, cluster: str, *, allow_missing: bool = False) -> None:
        """Delete the cluster's shadow with its rounds.

        Raises:
            NotFound: the cluster, or the shadow unless ``allow_missing``.
        """
        ...

    def create_reservation(self, cluster: str, spec: ReservationSpec) -> ReservationRecord:
        """Create a reservation, and request a round.

        Raises:
            NotFound: the cluster.
            AlreadyExists: the name.
            InvalidInput: an unknown node, GPU type or tenant; a window in the past; or more GPUs
                than other reservations leave.
            LimitReached: too many reservations.
        """
        ...

    def update_reservation(
        self,
        cluster: str,
        name: str,
        start_s: float | None,
        end_s: float | None,
        version: int | None,
    ) -> ReservationRecord:
        """Change the times of a reservation. A time that is None stays.

        Raises:
            NotFound: the cluster, or the reservation.
            StaleEtag: another ``version`` is stored.
            InvalidInput: as for ``create_reservation``.
        """
        ...

    def delete_reservations(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete reservations, all or none.

        Raises:
            NotFound: the cluster, or a reservation unless ``allow_missing``.
        """
        ...

    def upsert_estimates(self, cluster: str, estimates: Sequence[EstimateRecord]) -> int:
        """Create or replace estimates; return how many.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def delete_cells(self, cluster: str, cells: CellFilter) -> int:
        """Delete all matching estimates, including those of the service; return how many.

        Measurements stay.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type. InUse: jobs run on one of them.
        """
        ...

    def delete_models(
        self, cluster: str, models: Collection[tuple[str, str]], *, allow_missing: bool
    ) -> None:
        """Delete users' models, by (model, params), and the estimates that were computed from them.

        Raises:
            NotFound: the cluster, or a model unless ``allow_missing``. InUse: live jobs train one
                of them.
        """
        ...

    def upsert_models(self, cluster: str, models: Sequence[ModelSpec]) -> int:
        """Create or replace users' models, all or none; return how many. Raises NotFound."""
        ...

    def derive(
        self,
        cluster: str,
        estimates: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
        tunings: Sequence[TuningRecord] = (),
    ) -> int:
        """Store estimates that the service made; return how many were new or replaced another.

        Estimates of users are not changed, and no computed estimate is added next to one of them. A
        measured estimate of the service is not replaced by a computed one. ``derived_from`` maps
        each workload to the digest of the inputs of its estimates. The reason why such a workload
        has no estimates is deleted. ``tunings`` are plans that programs may try around those of
        the estimates.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def add_profiles(
        self,
        cluster: str,
        rows: Sequence[ProfileRow],
        gap: ProfileGap | None = None,
        host: HostProfile | None = None,
    ) -> int:
        """Store measured layers; return how many were new. Stored ones are never changed.

        ``gap`` has the sizes that the task left out. It replaces an earlier one of the task.
        Complete rows delete it. ``host`` are the rates of the node's host, of which each task has
        the latest.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type.
        """
        ...

    def put_collective_check(self, cluster: str, check: CollectiveRecord) -> None:
        """Store the comparison of a model's collectives with those of XLA. Raises NotFound."""
        ...

    def end_profiling(self, cluster: str, task: str, gap: ProfileGap | None) -> None:
        """Cancel a profiling task at a limit, and store what it left out with the reason.

        Raises:
            NotFound: the cluster, or the task. NotAllowed: it ends already. InvalidInput: unknown
                GPU type.
        """
        ...

    def set_topology(
        self, cluster: str, described: DescribedTopology, version: int | None
    ) -> TopologyRecord:
        """Describe the cluster's network. If ``version`` is 0, there must be none yet.

        Raises:
            NotFound: the cluster. StaleEtag.
        """
        ...

    def drop_topology(
        self, cluster: str, version: int | None = None, *, allow_missing: bool = False
    ) -> None:
        """Delete the network and its plans.

        Raises:
            NotFound: the cluster; or its network, unless ``allow_missing``. StaleEtag.
        """
        ...

    def say_waiting(self, cluster: str, reasons: Mapping[Workload, Reason | None]) -> None:
        """Record why workloads have no estimates. None deletes the reason.

        The reason is shown with the workload's queued jobs.
        """
        ...


class Rounds(Protocol):
    """The part of a store that rounds need. Every method is one transaction."""

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        """Return the snapshot of a new round, after nodes that fell silent have lost their jobs.

        A node is silent if it was not heard from for longer than lease plus margin, by the
        database's clock. Its jobs go through LOST. The GPUs of the dead node need no report; those
        of a gang's members on live nodes do. Nodes whose probation is over are undrained. Jobs that
        have held GPUs for their longest run time go through TIME_OUT. If
        ``request`` committed a round before, nothing happens, and that round is returned.

        The snapshot has the use of tenants that decays by ``use_half_life_s``, unless that is 0.

        Raises:
            NotFound: the cluster. RequestIdReused.
        """
        ...

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        """Read the snapshot of a round in one REPEATABLE READ transaction. Raises NotFound.

        It has the use of tenants that decays by ``use_half_life_s``, unless that is 0.
        """
        ...

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Commit a round, all or nothing. The first statement advances the epoch or gives up.

        Each decision is guarded by the versions of its job and nodes. If they changed during the
        solve, they are left alone and the decision is recorded as not applied. ``in_time`` is
        called last, because a round may wait for its turn.

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

    def round_proof(self, cluster: str, number: int) -> RoundProof:
        """Return what is kept of the proof of a round. Raises NotFound."""
        ...


class EstimationStore(Protocol):
    """The part of a store that automatic estimates need. Every method is one transaction."""

    def write(
        self,
        request: Request | None,
        work: Callable[[Writer], bytes],
        *,
        validate_only: bool = False,
    ) -> bytes:
        """Run ``work`` in one transaction and return the bytes that it returns.

        With a request id those bytes are stored: if the same request is repeated, they are returned
        and ``work`` does not run. With ``validate_only`` everything is checked and rolled back.

        Raises:
            RequestIdReused: the id was used with another method or body.
        """
        ...

    def estimation(self, cluster: str) -> EstimationInputs:
        """Return everything that a cluster's estimates are computed from. Raises NotFound."""
        ...

    def get_job(self, cluster: str, name: str) -> JobRecord:
        """Return a job. Raises NotFound."""
        ...


class Store(Rounds, EstimationStore, Protocol):
    """The place where everything is kept.

    Every method is one transaction, and safe to call from any thread.
    """

    def rehearse(
        self,
        cluster: str,
        works: Sequence[Callable[[Writer], bytes]],
        use_half_life_s: float = 0.0,
    ) -> tuple[Snapshot, EstimationInputs]:
        """Return what a round, and what estimates, would see after ``works``, in that order.

        Everything is checked as in ``write``, and rolled back. ``use_half_life_s`` is as in
        ``snapshot``.

        Raises:
            NotFound: the cluster. What ``works`` raise.
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

    def get_array(self, cluster: str, name: str) -> ArrayRecord:
        """Return an array of jobs, with the numbers of its jobs. Raises NotFound."""
        ...

    def list_jobs(
        self,
        cluster: str,
        states: Sequence[JobState],
        after: int,
        limit: int,
        *,
        tenants: Collection[str] | None = None,
    ) -> tuple[list[JobRecord], int]:
        """Return jobs in order of submission after the cursor ``after``, and the next cursor.

        A cursor of 0 means the start as an argument, and no more jobs as a result. If ``states`` is
        empty, jobs in all states are returned. If ``tenants`` is None, jobs of all tenants are
        returned, and otherwise only those of these tenants. Raises NotFound (the cluster).
        """
        ...

    def list_tenants(self, cluster: str) -> list[TenantSpec]:
        """Return the tenants that have settings, by name. Raises NotFound (the cluster)."""
        ...

    def newest_policy(self, cluster: str) -> PolicyRecord | None:
        """Return the newest version of the standing policy, or None if none was set.

        A missing cluster has none.
        """
        ...

    def get_policy(self, cluster: str, version: int) -> PolicyRecord:
        """Return a version of the standing policy. Raises NotFound (the cluster or the version)."""
        ...

    def list_policies(self, cluster: str, before: int, limit: int) -> list[PolicyRecord]:
        """Return versions below ``before`` (0: all), newest first. Raises NotFound (the cluster)."""
        ...

    def find_shadow(self, cluster: str) -> ShadowRecord | None:
        """Return the cluster's shadow, or None if it has none. A missing cluster has none."""
        ...

    def list_shadow_rounds(self, cluster: str, window_s: float) -> list[ShadowRound]:
        """Return the rounds of the cluster's shadow in the last ``window_s`` s, newest first.

        Raises:
            NotFound: the cluster, or its shadow.
        """
        ...

    def add_shadow_round(self, key: int, decided: ShadowRound) -> None:
        """Store a round of the shadow ``key``, unless the shadow is gone."""
        ...

    def sum_usage(self, cluster: str, query: UsageQuery) -> ClusterUsage:
        """Return what the jobs of a cluster have used, by the query's groups.

        Raises:
            NotFound: the cluster.
            InvalidInput: there are too many groups.
        """
        ...

    def list_reservations(self, cluster: str) -> list[ReservationRecord]:
        """Return the reservations by start, those that have ended, too. Raises NotFound (the cluster)."""
        ...

    def get_reservation(self, cluster: str, name: str) -> ReservationRecord:
        """Return a reservation. Raises NotFound (the cluster, the reservation)."""
        ...

    def execution_plans(self, cluster: str, digests: Collection[str]) -> dict[str, str]:
        """Return the canonical JSON of execution plans by digest, without those that are not stored."""
        ...

    def tenants_of_jobs(self, cluster: str, names: Collection[str]) -> dict[str, str]:
        """Return the tenant of each of these jobs that exists. A missing cluster has no jobs.

        The names may be any texts.
        """
        ...

    def job_history(self, cluster: str, name: str) -> list[JobEventRecord]:
        """Return the events of a job, oldest first. Raises NotFound."""
        ...

    def rounds_of_job(self, cluster: str, name: str, last: int, most: int) -> list[JobRound]:
        """Return the decisions on a job of up to ``most`` rounds that are kept, newest first.

        They are of round ``last`` and the ones before it, or of all rounds if it is 0. Raises
        NotFound.
        """
        ...

    def list_estimates(
        self, cluster: str, model: str, params: str, global_batch: int, after: int, limit: int
    ) -> tuple[list[EstimateRecord], int]:
        """Return estimates from a cursor, and the next cursor.

        They are those of one workload, or of all workloads if ``model`` is "".
        """
        ...

    def list_models(self, cluster: str) -> list[ModelSpec]:
        """Return the users' models, by name. Raises NotFound (the cluster)."""
        ...

    def has_topology(self, cluster: str) -> bool:
        """Return whether the cluster's network is described. Raises NotFound: the cluster."""
        ...

    def get_topology(
        self, cluster: str, cancelled: Callable[[], bool] = never_cancelled
    ) -> TopologyRecord:
        """Return the cluster's network.

        Raises:
            NotFound: the cluster, or its network. DeadlineTooShort: it was cancelled.
        """
        ...

    def commit_network(self, plan: NetworkCommit) -> NetworkPlanRecord | None:
        """Put a network plan that was made between rounds in force.

        Return None if it changes nothing. Decisions for allocations that have gone in the meantime
        are left out.

        Raises:
            RoundSuperseded: a round was committed since; its own plan stays in force.
            StaleEtag: the topology has changed since.
            NotFound: the cluster, or its network.
        """
        ...

    def network_in_force(self, cluster: str, job: str = "") -> NetworkPlanRecord:
        """Return the network plan in force, by rank.

        If ``job`` is given, only its decisions are included.

        Raises:
            NotFound: the cluster, its network, or a plan.
        """
        ...

    def list_network_plans(self, cluster: str, before: int, limit: int) -> list[NetworkPlanRecord]:
        """Return plans with a number below ``before`` (0: all) without decisions, newest first.

        Raises NotFound.
        """
        ...

    def list_rounds(self, cluster: str, before: int, limit: int) -> list[RoundSummary]:
        """Return rounds with a number below ``before`` (0: all), newest first. Raises NotFound."""
        ...

    def acquire_lease(self, cluster: str, holder: str, ttl_s: float) -> bool:
        """Take or renew the lease of the periodic rounds, by the database's clock.

        Return whether ``holder`` has it.
        """
        ...

    def hello(self, cluster: str, agent: str, incarnation: str, nodes: Sequence[NodeSpec]) -> None:
        """Register an agent and its nodes. A newer incarnation takes the nodes over.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type, or other GPUs than stored while
                held.
        """
        ...

    def heartbeats(self, beats: Sequence[Heartbeat]) -> Collection[int]:
        """Renew the leases of agents' nodes; return the positions of those whose agent is known.

        ``require_agent`` raises the reason why another one is not known.
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
        """Record what runs on the agent's nodes; return whether this changed the desired state.

        A releasing GPU is free if its job and generation are absent from ``gangs`` and ``revision``
        is not older than its release. Reports of an older generation change nothing. Progress of a
        job that trains may fall, because it went on from a checkpoint. Raises NotAllowed.
        """
        ...

    def record_health(
        self, cluster: str, agent: str, incarnation: str, reported: Sequence[NodeHealth]
    ) -> float:
        """Record the present faults of the agent's nodes; drain nodes with new faults.

        A node that health has drained and that is healthy now goes on probation, and is undrained
        when that ends. A node that is not listed is not watched. Nodes of other agents are ignored.

        Return the seconds after which the same report should be recorded again, or inf.

        Raises:
            NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
        """
        ...

    def desired(self, cluster: str, agent: str) -> DesiredState:
        """Return the gangs on the agent's nodes that hold all their GPUs, on every node."""
        ...

    def purge(self) -> bool:
        """Remove a batch of rows of deleted clusters; return whether there may be more."""
        ...

    def outlooks(self, clusters: Collection[str]) -> Mapping[str, ClusterOutlook]:
        """Return what time alone will bring to each of these clusters that exists, by name."""
        ...

    def forecast_history(self, cluster: str) -> ForecastHistory:
        """Return what a forecast learns from: submissions of the last days, and past forecasts."""
        ...

    def put_forecast(self, cluster: str, forecast: ClusterForecast) -> None:
        """Store the forecasts of jobs that are still live, in place of older ones."""
        ...

    def prune_batch(self, cluster: str, retention: Retention) -> dict[str, int]:
        """Delete a bounded number of old rows of each kind; return the deleted numbers by kind.

        Nothing is left to delete if all are 0. Raises NotFound.
        """
        ...

    def ready(self) -> None:
        """Check the connection and the schema. Raises Unavailable, NotMigrated."""
        ...


class LogStore(Protocol):
    """The place of requests for the output of jobs until they are answered.

    Every method is one transaction, and safe to call from any thread. Requests expire soon. A
    request notifies the channel ``tessera_logs`` with ``agent_key``, and its answer with
    ``answer_key`` (see ``formulation.records.logs``).
    """

    def find_start(self, cluster: str, job: str, generation: int) -> StartedJob:
        """Return a job and one of its starts.

        If ``generation`` is 0, it is the last one, but one that still waits for GPUs counts only if
        there is no other. Raises NotFound.
        """
        ...

    def ask_agent(self, cluster: str, read: LogRead, client: str) -> None:
        """Store a request for the agent of the node that it names.

        Raises:
            NotFound: the cluster. NodeSilent: the node has no agent, or a silent one.
            TooBusy: the client or the cluster has too many requests that wait.
        """
        ...

    def take_answer(self, read_id: str) -> LogAnswer | None:
        """Return the answer to a request and delete both, or return None if there is no answer."""
        ...

    def withdraw(self, read_id: str) -> None:
        """Delete a request that nobody waits for any more."""
        ...

    def silence_s(self, cluster: str, node: str) -> float | None:
        """Return the seconds since a node was heard, or None if it was never heard."""
        ...

    def find_pending(self, cluster: str, agent: str) -> list[LogRead]:
        """Return the requests that an agent has not answered, a bounded number, oldest first."""
        ...

    def store_answers(self, cluster: str, agent: str, answers: Sequence[LogAnswer]) -> None:
        """Store an agent's answers. Those to requests that it was not asked are ignored."""
        ...


class WebhookStore(Protocol):
    """The store of webhooks, of which any server may claim some to deliver to.

    Callers bound to ``tenants`` see only the webhooks of these; None sees all.
    """

    def get_webhook(
        self, cluster: str, name: str, tenants: Collection[str] | None
    ) -> WebhookRecord:
        """Return a webhook. Raises NotFound."""
        ...

    def list_webhooks(
        self, cluster: str, after: str, limit: int, tenants: Collection[str] | None
    ) -> list[WebhookRecord]:
        """Return up to ``limit`` webhooks after a name, by name."""
        ...

    def claim_webhook(self) -> ClaimedWebhook | None:
        """Return a webhook that has events to deliver now, which no other server has; None if none has."""
        ...

    def note_delivery(self, webhook: ClaimedWebhook, number: int) -> bool:
        """Remove a delivered event; return whether the webhook is still claimed by the caller."""
        ...

    def note_failure(self, webhook: ClaimedWebhook, error: str) -> bool:
        """Note that the oldest event was not delivered; return whether the webhook is dead now."""
        ...

    def release_webhook(self, webhook: ClaimedWebhook) -> None:
        """Leave a claimed webhook to any server."""
        ...
