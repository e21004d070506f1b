"""The store on PostgreSQL: its transactions, and what takes more than one function of ``db``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import sqlalchemy as sa

from tessera.db.access import audit_log
from tessera.db.agents import agents, health
from tessera.db.agents.clock_watch import SilenceLimit
from tessera.db.agents.health import PROBATION_S
from tessera.db.base import requests, runtime_offers
from tessera.db.base.limits import DEFAULT_LIMITS, LIMITS
from tessera.db.clusters import outlook
from tessera.db.estimates import derived_estimates
from tessera.db.rounds.snapshot.load import load_snapshot
from tessera.db.schema.engine import Database
from tessera.db.schema.migrate import MigratedDatabase
from tessera.db.store.round_store import RoundStore
from tessera.db.upkeep import prune
from tessera.formulation.job.runtime_offers import NO_OFFERS, AgentOffers, RuntimeLack
from tessera.formulation.records.agents import NodeHealth
from tessera.formulation.records.clusters import ClusterOutlook, NodeSpec
from tessera.formulation.records.estimates import EstimationInputs
from tessera.formulation.records.store import Request, Retention, StoreLimits
from tessera.formulation.state.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")

Connection: TypeAlias = sa.Connection
"""A transaction of the store, which the functions of ``db`` take first."""

_CHECK_AT_ONCE = sa.text("SET CONSTRAINTS ALL IMMEDIATE")
"""A check now, and not at the commit, which a call that only validates does not reach."""


class _DryRun(Exception):
    """An exception that rolls a validating call back and carries its answer out."""

    def __init__(self, response: bytes) -> None:
        self.response = response


class Store(RoundStore):
    """The place where everything is kept, on PostgreSQL. Any thread may call it.

    Callers choose a function of ``db`` and the kind of its transaction: ``read``, ``write`` for a
    request that may be repeated, ``change`` for what callers change, and ``update`` for what agents
    and the server's own tasks change. For example, ``store.read(get_job, "c", "j")`` returns a job.
    The other methods take more than a function and a transaction, such as the silence of nodes.

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
        """Use a database, whose schema is checked in each transaction.

        A node that health drained is undrained after ``probation_s`` seconds of health.
        """
        engine = database.engine.execution_options(**{LIMITS: limits})
        silence = SilenceLimit(lease_s + margin_s, monotonic_s)
        super().__init__(MigratedDatabase(engine), silence)
        self.lease_s, self.silence_s = lease_s, lease_s + margin_s
        self._probation_s = probation_s

    def read(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` in a transaction that sees one moment, and return its result."""
        with self._database.read() as connection:
            return function(connection, *args, **kwargs)

    def update(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` in a transaction, and return its result."""
        return self._database.write(lambda c: function(c, *args, **kwargs))

    def change(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` in a transaction that also adds the change to the audit log.

        Nothing is added if no call is audited (``formulation.base.access.AUDITED``).
        """

        def transaction(connection: Connection) -> T:
            result = function(connection, *args, **kwargs)
            audit_log.record_change(connection)
            return result

        return self._database.write(transaction)

    def write(
        self,
        request: Request | None,
        work: Callable[[Connection], bytes],
        *,
        validate_only: bool = False,
    ) -> bytes:
        """Do ``work`` like ``change``, and return the bytes that it returns.

        With a request id those bytes are stored: if the same request is repeated, they are returned
        and ``work`` is not done. With ``validate_only`` everything is checked and rolled back.

        Raises:
            RequestIdReused: the id was used with another method or body.
        """

        def transaction(connection: Connection) -> bytes:
            if (
                request is not None
                and (done := requests.claim_request(connection, request)) is not None
            ):
                return done
            response = work(connection)
            audit_log.record_change(connection)
            if request is not None:
                requests.store_answer(connection, request, response)
            if validate_only:
                connection.execute(_CHECK_AT_ONCE)
                raise _DryRun(response)
            return response

        try:
            return self._database.write(transaction)
        except _DryRun as done:
            return done.response

    def rehearse(
        self,
        cluster: str,
        works: Sequence[Callable[[Connection], object]],
        use_half_life_s: float = 0.0,
    ) -> tuple[Snapshot, EstimationInputs]:
        """Return what a round, and what estimates, would see after ``works``, in that order.

        Everything is checked as in ``write``, and rolled back. ``use_half_life_s`` is as in
        ``snapshot``.

        Raises:
            NotFound: the cluster. What ``works`` raise.
        """

        def transaction(connection: Connection) -> tuple[Snapshot, EstimationInputs]:
            for work in works:
                work(connection)
            silence_s = self._silence.read(connection)
            return (
                load_snapshot(connection, cluster, silence_s, use_half_life_s),
                derived_estimates.load_estimation(connection, cluster),
            )

        return self._database.rehearse(transaction)

    def ready(self) -> None:
        """Check the connection and the schema. Raises Unavailable, NotMigrated."""
        with self._database.read() as connection:  # this checks the schema
            self._silence.read(connection)

    def estimation(self, cluster: str) -> EstimationInputs:
        """Return everything that a cluster's estimates are computed from. Raises NotFound."""
        return self.read(derived_estimates.load_estimation, cluster)

    def outlooks(self, clusters: Collection[str]) -> dict[str, ClusterOutlook]:
        """Return what time alone will bring to each of these clusters that exists, by name."""
        with self._database.read() as connection:
            silence_s = self._silence.read(connection)
            return outlook.load_outlooks(connection, clusters, silence_s)

    def find_lacks(self, cluster: str, runtimes: Collection[str]) -> dict[str, RuntimeLack]:
        """Return the ``runtimes`` that no node with an agent offers, by name."""
        with self._database.read() as connection:
            silence_s = self._silence.read(connection)
            return runtime_offers.find_lacks(connection, cluster, runtimes, silence_s)

    def hello(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        nodes: Sequence[NodeSpec],
        offers: AgentOffers = NO_OFFERS,
    ) -> None:
        """Register an agent, its nodes and its runtimes; see ``agents.register_agent``."""

        def register(connection: Connection) -> None:
            silence_s = self._silence.read(connection)
            agents.register_agent(connection, cluster, agent, incarnation, nodes, offers, silence_s)

        self.change(register)

    def record_health(
        self, cluster: str, agent: str, incarnation: str, health_report: Sequence[NodeHealth]
    ) -> float:
        """Record the present faults of the agent's nodes, and log the drains; see ``health``.

        Return the seconds after which the same report should be recorded again, or inf.
        """
        outcome = self.update(
            health.record_health, cluster, agent, incarnation, health_report, self._probation_s
        )
        for change in outcome.changes:
            health.log_health(cluster, change.name, change.event, change.reason or "")
        return outcome.again_in_s

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
        """Delete a bounded number of old rows of each kind; return the deleted numbers by kind.

        Nothing is left to delete if all are 0. Raises NotFound.
        """
        return prune.prune_batch(self._database, cluster, retention)


def _retention(older_than_s: float, keep_rounds: int, audit_s: float) -> Retention:
    return Retention(
        requests_s=older_than_s,
        rounds_s=older_than_s,
        jobs_s=older_than_s,
        least_rounds=keep_rounds,
        audit_s=audit_s,
    )
