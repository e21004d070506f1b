"""The store of ``tessera.service.ports`` on PostgreSQL. Each method is one transaction."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

import sqlalchemy as sa

from tessera.db import (
    agents,
    arrays,
    audit_log,
    derived_estimates,
    forecasts,
    health,
    job_rounds,
    migrate,
    network,
    outlook,
    plans,
    policies,
    proofs,
    prune,
    purge,
    reads,
    requests,
    reservations,
    rounds,
    run_times,
    shadows,
    snapshot,
    snapshots,
    tenants,
    usage,
)
from tessera.db.clock_watch import ClockWatch
from tessera.db.engine import Database
from tessera.db.limits import require_few
from tessera.db.observe import record_observation
from tessera.db.writer import DEFAULT_LIMITS, PostgresWriter
from tessera.formulation.arrays import ArrayRecord
from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.lifecycle import JobState
from tessera.formulation.network.outcome import NetworkPlanRecord
from tessera.formulation.proofs import RoundProof
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
from tessera.formulation.records.estimates import EstimateRecord, EstimationInputs, ModelSpec
from tessera.formulation.records.jobs import JobEventRecord, JobRecord
from tessera.formulation.records.policies import PolicyRecord, ShadowRecord, ShadowRound
from tessera.formulation.records.reservations import ReservationRecord
from tessera.formulation.records.rounds import (
    JobRound,
    NetworkCommit,
    RoundCommit,
    RoundRecord,
    RoundSummary,
)
from tessera.formulation.records.store import Request, Retention, StoreLimits
from tessera.formulation.records.usage import ClusterUsage, UsageQuery
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.spreads import ClusterForecast, ForecastHistory
from tessera.formulation.topologies.described import decode_topology
from tessera.formulation.values import Workload

log = logging.getLogger(__name__)

_LEASE = sa.text("""
INSERT INTO leases AS l (cluster_id, holder, expires_at)
SELECT c.id, :holder, clock_timestamp() + make_interval(secs => :ttl_s) FROM clusters c
WHERE c.name = :cluster
ON CONFLICT (cluster_id) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at
    WHERE l.holder = excluded.holder OR l.expires_at < clock_timestamp()
        OR l.expires_at > clock_timestamp() + make_interval(secs => :ttl_s + :margin_s)
""")
"""The statement that takes or renews a lease.

A lease that lasts longer than any valid one was taken before the database's clock was set back.
"""

_LEASE_MARGIN_S = 60.0
"""Seconds by which leases of other releases and settings may last longer than ours."""


PROBATION_S = 600.0
"""Seconds of health after which a node that health drained is undrained, unless a store has another
setting.
"""

_HEALTH_TEXTS = {
    health.HealthEvent.DRAIN: "drained",
    health.HealthEvent.FAULT: "stays drained",
    health.HealthEvent.INTERRUPTION: "stays drained, because its agent does not watch its health",
    health.HealthEvent.PROBATION: "is healthy and on probation",
    health.HealthEvent.RETURN: "returns from probation",
}
"""The events of nodes' health as the log states them."""

_GOOD_NEWS = frozenset({health.HealthEvent.PROBATION, health.HealthEvent.RETURN})


class _DryRun(Exception):
    """An exception that rolls a validating call back and carries its answer out."""

    def __init__(self, response: bytes) -> None:
        self.response = response


class PostgresStore:
    """The store of ``tessera.service.ports.store.Store`` on PostgreSQL.

    An agent is dead when it was silent for ``lease_s`` plus ``margin_s``. In the margin, an agent
    stops its gangs after its lease has run out.
    """

    def __init__(
        self,
        database: Database,
        lease_s: float = 30.0,
        margin_s: float = 15.0,
        limits: StoreLimits = DEFAULT_LIMITS,
        monotonic_s: Callable[[], float] = time.monotonic,
        probation_s: float = PROBATION_S,
    ) -> None:
        self._probation_s = probation_s
        self._database = migrate.MigratedDatabase(database.engine)
        self._silence_s = lease_s + margin_s
        self._limits = limits
        self._clock_watch = ClockWatch(self._silence_s, monotonic_s)

    def _believed_silence_s(self, connection: sa.Connection) -> float:
        """Return the silence after which a node is dead.

        It is infinite just after the clock was set forward.
        """
        return self._silence_limit_s(self._clock_watch.is_trusted(connection))

    def _silence_limit_s(self, is_trusted: bool) -> float:
        return self._silence_s if is_trusted else math.inf

    def write(
        self,
        request: Request | None,
        work: Callable[[PostgresWriter], bytes],
        *,
        validate_only: bool = False,
    ) -> bytes:
        """Run ``work`` in one transaction. With a request id it runs only once."""

        def transaction(connection: sa.Connection) -> bytes:
            if validate_only:
                raise _DryRun(work(PostgresWriter(connection, self._silence_s, self._limits)))
            if (
                request is not None
                and (done := requests.claim_request(connection, request)) is not None
            ):
                return done
            response = work(PostgresWriter(connection, self._silence_s, self._limits))
            audit_log.record_change(connection)
            if request is not None:
                requests.store_answer(connection, request, response)
            return response

        try:
            return self._database.write(transaction)
        except _DryRun as done:
            return done.response

    def rehearse(
        self,
        cluster: str,
        works: Sequence[Callable[[PostgresWriter], bytes]],
        use_half_life_s: float = 0.0,
    ) -> tuple[Snapshot, EstimationInputs]:
        """Return the snapshot, and the inputs of estimates, after changes that are rolled back."""

        def transaction(connection: sa.Connection) -> tuple[Snapshot, EstimationInputs]:
            writer = PostgresWriter(connection, self._silence_s, self._limits)
            for work in works:
                work(writer)
            silence_s = self._believed_silence_s(connection)
            return (
                snapshot.load_snapshot(connection, cluster, silence_s, use_half_life_s),
                derived_estimates.load_estimation(connection, cluster),
            )

        return self._database.rehearse(transaction)

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

    def find_shadow(self, cluster: str) -> ShadowRecord | None:
        """Return the cluster's shadow, or None if it has none."""
        with self._database.read() as connection:
            return shadows.find_shadow(connection, cluster)

    def list_shadow_rounds(self, cluster: str, window_s: float) -> list[ShadowRound]:
        """Return the rounds of the cluster's shadow in the last ``window_s`` seconds."""
        with self._database.read() as connection:
            return shadows.list_shadow_rounds(connection, cluster, window_s)

    def add_shadow_round(self, key: int, decided: ShadowRound) -> None:
        """Store a round of a shadow, unless the shadow is gone."""
        self._database.write(lambda connection: shadows.add_shadow_round(connection, key, decided))

    def sum_usage(self, cluster: str, query: UsageQuery) -> ClusterUsage:
        """Return what the jobs of a cluster have used."""
        with self._database.read() as connection:
            return usage.sum_usage(connection, cluster, query)

    def list_reservations(self, cluster: str) -> list[ReservationRecord]:
        """Return the reservations by start, those that have ended, too."""
        with self._database.read() as connection:
            return reservations.list_reservations(connection, cluster)

    def get_reservation(self, cluster: str, name: str) -> ReservationRecord:
        """Return a reservation."""
        with self._database.read() as connection:
            return reservations.get_reservation(connection, cluster, name)

    def tenants_of_jobs(self, cluster: str, names: Collection[str]) -> dict[str, str]:
        """Return the tenant of each of these jobs that exists."""
        with self._database.read() as connection:
            return tenants.tenants_of_jobs(connection, cluster, names)

    def job_history(self, cluster: str, name: str) -> list[JobEventRecord]:
        """Return the events of a job."""
        with self._database.read() as connection:
            return reads.job_history(connection, cluster, name)

    def rounds_of_job(self, cluster: str, name: str, last: int, most: int) -> list[JobRound]:
        """Return the decisions of rounds on a job, newest first."""
        with self._database.read() as connection:
            return job_rounds.rounds_of_job(connection, cluster, name, last, most)

    def list_estimates(
        self, cluster: str, model: str, params: str, global_batch: int, after: int, limit: int
    ) -> tuple[list[EstimateRecord], int]:
        """Return estimates, and the next cursor."""
        workload = Workload(model=model, params=params, global_batch=global_batch)
        with self._database.read() as connection:
            return reads.list_estimates(connection, cluster, workload, after, limit)

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        """Return the snapshot of a new round; see ``tessera.service.ports.rounds.Rounds``.

        If no node has fallen silent and no job has timed out, this is one transaction that only
        reads, because rounds begin often.
        """
        with self._database.read() as connection:
            if (
                request is not None
                and (done := rounds.find_committed_round(connection, request)) is not None
            ):
                return done
            silence = agents.find_silence(connection, cluster)
            silence_s = self._silence_limit_s(self._clock_watch.sees(silence.clock_s))
            returning = silence.returning_s <= silence_s
            if not silence.is_ahead and silence.longest_s <= silence_s and not returning:
                loaded = snapshot.load_snapshot(connection, cluster, silence_s, use_half_life_s)
                if not run_times.has_overlong_jobs(loaded):
                    return loaded
        if returning:
            self._end_probations(cluster)
        if lost := self.expire(cluster):
            log.warning("nodes fell silent", extra={"action": "expired", "jobs": lost})
        ended = self._database.write(lambda c: run_times.end_overlong_jobs(c, cluster))
        if ended:
            log.info("jobs timed out", extra={"action": "timed out", "jobs": ended})
        return self.snapshot(cluster, use_half_life_s)

    def expire(self, cluster: str) -> list[str]:
        """Free the GPUs of silent nodes; return the names of the jobs that lost some."""
        return self._database.write(
            lambda c: agents.expire_silent_nodes(c, cluster, self._believed_silence_s(c))
        )

    def _end_probations(self, cluster: str) -> None:
        for node in self._database.write(
            lambda c: health.end_probations(c, cluster, self._believed_silence_s(c))
        ):
            _log_health(cluster, node, health.HealthEvent.RETURN)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        """Read everything a round may look at."""
        with self._database.read() as connection:
            silence_s = self._believed_silence_s(connection)
            return snapshot.load_snapshot(connection, cluster, silence_s, use_half_life_s)

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Commit a round."""
        return rounds.commit_round(self._database, commit, in_time)

    def get_round(self, cluster: str, number: int) -> RoundRecord:
        """Return a round with its decisions."""
        with self._database.read() as connection:
            return rounds.get_round(connection, cluster, number)

    def execution_plans(self, cluster: str, digests: Collection[str]) -> dict[str, str]:
        """Return the canonical JSON of execution plans by digest, without those that are not stored."""
        with self._database.read() as connection:
            return plans.read_plans(connection, cluster, digests)

    def list_models(self, cluster: str) -> list[ModelSpec]:
        """Return the users' models, by name."""
        with self._database.read() as connection:
            return derived_estimates.list_models(connection, cluster)

    def estimation(self, cluster: str) -> EstimationInputs:
        """Return everything that the cluster's estimates are computed from."""
        with self._database.read() as connection:
            return derived_estimates.load_estimation(connection, cluster)

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

    def commit_network(self, plan: NetworkCommit) -> NetworkPlanRecord | None:
        """Put a network plan that was made between rounds in force."""

        def put_in_force(connection: sa.Connection) -> NetworkPlanRecord | None:
            record = network.commit_plan(connection, plan)
            if record is not None:
                audit_log.record_change(connection)
            return record

        return self._database.write(put_in_force)

    def network_in_force(self, cluster: str, job: str = "") -> NetworkPlanRecord:
        """Return the network plan in force."""
        with self._database.read() as connection:
            return network.plan_in_force(connection, cluster, job)

    def list_network_plans(self, cluster: str, before: int, limit: int) -> list[NetworkPlanRecord]:
        """Return network plans, newest first."""
        with self._database.read() as connection:
            return network.list_plans(connection, cluster, before, limit)

    def list_rounds(self, cluster: str, before: int, limit: int) -> list[RoundSummary]:
        """Return rounds, newest first."""
        with self._database.read() as connection:
            return rounds.list_rounds(connection, cluster, before, limit)

    def round_snapshot(self, cluster: str, number: int) -> Snapshot:
        """Return the snapshot that a round was decided on."""
        with self._database.read() as connection:
            return snapshots.round_snapshot(connection, cluster, number)

    def round_proof(self, cluster: str, number: int) -> RoundProof:
        """Return what is kept of the proof of a round."""
        with self._database.read() as connection:
            return proofs.round_proof(connection, cluster, number)

    def acquire_lease(self, cluster: str, holder: str, ttl_s: float) -> bool:
        """Take or renew the lease of the periodic rounds."""
        values = {"cluster": cluster, "holder": holder, "ttl_s": ttl_s, "margin_s": _LEASE_MARGIN_S}
        return self._database.write(lambda c: c.execute(_LEASE, values).rowcount > 0)

    def outlooks(self, clusters: Collection[str]) -> dict[str, ClusterOutlook]:
        """Return what time alone will bring to each of these clusters that exists."""
        with self._database.read() as connection:
            silence_s = self._believed_silence_s(connection)
            return outlook.load_outlooks(connection, clusters, silence_s)

    def forecast_history(self, cluster: str) -> ForecastHistory:
        """Return what a forecast learns from."""
        with self._database.read() as connection:
            return forecasts.load_history(connection, cluster)

    def put_forecast(self, cluster: str, forecast: ClusterForecast) -> None:
        """Store the forecasts of live jobs."""
        self._database.write(lambda c: forecasts.put_forecast(c, cluster, forecast))

    def hello(self, cluster: str, agent: str, incarnation: str, nodes: Sequence[NodeSpec]) -> None:
        """Register an agent and its nodes."""

        def register(connection: sa.Connection) -> None:
            silence_s = self._believed_silence_s(connection)
            agents.register_agent(connection, cluster, agent, incarnation, nodes, silence_s)
            for kind in ("nodes", "agents"):
                require_few(connection, cluster, kind, self._limits)
            audit_log.record_change(connection)

        self._database.write(register)

    def heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        """Renew the leases of agents' nodes."""
        return self._database.write(lambda c: agents.record_heartbeats(c, beats))

    def require_agent(self, cluster: str, agent: str, incarnation: str) -> None:
        """Check that the agent is known."""
        with self._database.read() as connection:
            agents.require_agent(connection, cluster, agent, incarnation)

    def observe(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        gangs: Sequence[ObservedGang],
        revision: int,
    ) -> bool:
        """Record what runs on the agent's nodes."""
        return self._database.write(
            lambda c: record_observation(c, cluster, agent, incarnation, gangs, revision)
        )

    def record_health(
        self, cluster: str, agent: str, incarnation: str, reported: Sequence[NodeHealth]
    ) -> float:
        """Record the faults of the agent's nodes."""
        outcome = self._database.write(
            lambda c: health.record_health(
                c, cluster, agent, incarnation, reported, self._probation_s
            )
        )
        for change in outcome.changes:
            _log_health(cluster, change.name, change.event, change.reason or "")
        return outcome.again_in_s

    def desired(self, cluster: str, agent: str) -> DesiredState:
        """Return the gangs that should run on the agent's nodes."""
        with self._database.read() as connection:
            return agents.load_desired_gangs(connection, cluster, agent)

    def ready(self) -> None:
        """Check the connection and the schema."""
        with self._database.read() as connection:  # this checks the schema
            self._clock_watch.is_trusted(connection)

    def purge(self) -> bool:
        """Remove a batch of rows of deleted clusters; return whether there may be more."""
        return self._database.write(purge.purge_batch)

    def prune(
        self, older_than_s: float, keep_rounds: int, audit_s: float = math.inf
    ) -> dict[str, int]:
        """Delete all old rows; return the deleted numbers by kind.

        Entries of the audit log are kept for ``audit_s``.
        """
        retention = _retention(older_than_s, keep_rounds, audit_s)
        return prune.prune_database(self._database, retention)

    def count_old(
        self, older_than_s: float, keep_rounds: int, audit_s: float = math.inf
    ) -> dict[str, int]:
        """Return how many rows of each kind ``prune`` would delete."""
        return prune.count_old(self._database, _retention(older_than_s, keep_rounds, audit_s))

    def prune_batch(self, cluster: str, retention: Retention) -> dict[str, int]:
        """Delete a bounded number of old rows of each kind; return the deleted numbers by kind."""
        return prune.prune_batch(self._database, cluster, retention)


def _retention(older_than_s: float, keep_rounds: int, audit_s: float) -> Retention:
    return Retention(
        requests_s=older_than_s,
        rounds_s=older_than_s,
        jobs_s=older_than_s,
        least_rounds=keep_rounds,
        audit_s=audit_s,
    )


def _log_health(cluster: str, node: str, event: health.HealthEvent, reason: str = "") -> None:
    """Log what the health of a node has led to."""
    if event is health.HealthEvent.NONE:
        return
    level = logging.INFO if event in _GOOD_NEWS else logging.WARNING
    facts = {"action": "node_health", "cluster": cluster, "node": node, "event": event.value}
    ending = f": {reason}" if reason else ""
    log.log(level, "node %s of %s %s%s", node, cluster, _HEALTH_TEXTS[event], ending, extra=facts)
