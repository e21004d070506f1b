"""New network plans between rounds.

A new plan is made when a job has started or ended, and when the topology has changed. A plan is
also due when a job's traffic was measured, or when the time for that is over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tessera.db.clusters import network
from tessera.db.store.store import Store
from tessera.formulation.answer.network.outcome import NetworkOutcome, NetworkPlanRecord
from tessera.formulation.answer.network.running import (
    RunningJob,
    TrafficObservations,
    observe_traffic,
    running_now,
)
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import DeadlineTooShort, NotAllowed, RoundSuperseded, StaleEtag
from tessera.formulation.records.rounds import NetworkCommit
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.solvers.base import require_wanted
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions

log = logging.getLogger(__name__)

MEASUREMENT_DELAY_S: Final = 0.1
"""Delay after the end of a measurement, so that it is over by the database's clock, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """The facts that a network plan was made from, apart from the allocations."""

    document: str  # of the topology, whose decoded form is large and must not be kept alive
    measured: frozenset[tuple[str, int, str]]  # (job, generation, node) of each
    unmeasured: frozenset[str]  # jobs that have precedence until they are measured


class NetworkPlanner:
    """A keeper of network plans, which follow each start and end of a job, as in Crux.

    Its methods block. Rounds make network plans for what they start, so after most rounds nothing
    is left to do.
    """

    def __init__(self, store: Store, clock: Clock, policies: StandingPolicies) -> None:
        self._store, self._clock, self._policies = store, clock, policies
        self._planned: dict[str, PlanBasis] = {}  # cluster -> basis of the plan in force
        self._again_s: dict[str, float] = {}  # cluster -> when the time of a measurement is over

    def keep(
        self,
        cluster: str,
        cancelled: Callable[[], bool] = lambda: False,
        _woken: Callable[[], bool] = lambda: False,
    ) -> NetworkPlanRecord | None:
        """Plan the cluster's network again if its plan does not fit what runs now.

        Return None if it does, or if no plan could be put in force.

        Raises:
            NotFound: the cluster.
        """
        if not self._store.read(network.has_topology, cluster):
            self.forget(cluster)
            return None
        snapshot = self._store.snapshot(cluster)
        if snapshot.topology is None:  # it was deleted in the meantime
            self.forget(cluster)
            return None
        running = running_now(snapshot)
        seen = observe_traffic(snapshot, running, self._policy(snapshot))
        left_s = min((left_s for left_s, _ in seen.unmeasured), default=math.inf)
        self._again_s[cluster] = self._clock.monotonic_s() + left_s
        cause = self._cause(snapshot, running, _basis(snapshot, seen))
        if not cause or cancelled():
            return None
        try:
            return self.plan(snapshot, running, cause, cancelled)
        except DeadlineTooShort:
            return None  # this replica is shutting down
        except (RoundSuperseded, StaleEtag) as late:
            log.info(
                "discarded a network plan that was out of date",
                extra={"event": "network_plan_discarded", "cluster": cluster, "error": late},
            )
            return None  # the new round or topology wakes this task again

    def forget(self, cluster: str) -> None:
        """Drop everything that is remembered about the cluster's plan."""
        self._planned.pop(cluster, None)
        self._again_s.pop(cluster, None)

    def again_in_s(self, cluster: str) -> float | None:
        """Return the seconds after which ``keep`` has something to do even if nothing happens.

        This is when the time ends in which a job's traffic should have been measured. The result is
        None if there is no such job.
        """
        again_s = self._again_s.get(cluster, math.inf)
        if math.isinf(again_s):
            return None
        return max(0.0, again_s - self._clock.monotonic_s()) + MEASUREMENT_DELAY_S

    def plan(
        self,
        snapshot: Snapshot,
        running: list[RunningJob],
        cause: str,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> NetworkPlanRecord | None:
        """Make a network plan and put it in force. Return None if it changes nothing.

        Raises:
            RoundSuperseded, StaleEtag: the allocations or the topology have changed since.
            InvalidInput: the options exceed what the network has.
            NotAllowed: the checker refuses the plan; the one in force stays.
            DeadlineTooShort: ``cancelled`` has become true; nothing was put in force.
        """
        began_s = self._clock.monotonic_s()
        outcome = plan_network(snapshot, running, self._policy(snapshot), cancelled)
        require_wanted(cancelled)
        took_s = self._clock.monotonic_s() - began_s
        if outcome.violations:
            broken = "; ".join(f"{v.rule}: {v.detail}" for v in outcome.violations)
            raise NotAllowed(
                f"the checker refused the network plan, because it breaks rules ({broken}); the plan in force"
                " stays: please report this with the output of `tessera network plan --dry-run -o json`"
            )
        record = self._store.update(
            network.commit_plan,
            NetworkCommit(snapshot=snapshot, outcome=outcome, cause=cause, seconds=took_s),
        )
        seen = observe_traffic(snapshot, running, self._policy(snapshot))
        self._planned[snapshot.cluster] = _basis(snapshot, seen)
        if record is not None:
            log.info(
                "made a network plan",
                extra={
                    "event": "network_planned",
                    "cluster": snapshot.cluster,
                    "cause": cause,
                    "plan_s": took_s,
                },
            )
        return record

    def preview(
        self, snapshot: Snapshot, cancelled: Callable[[], bool] = never_cancelled
    ) -> NetworkOutcome:
        """Return the network plan that would be made now; nothing is put in force.

        Raises:
            InvalidInput: the options exceed what the network has.
            DeadlineTooShort: ``cancelled`` has become true.
        """
        return plan_network(snapshot, running_now(snapshot), self._policy(snapshot), cancelled)

    def _policy(self, snapshot: Snapshot) -> RoundOptions:
        return self._policies.of(snapshot.cluster).options

    def _cause(self, snapshot: Snapshot, running: list[RunningJob], basis: PlanBasis) -> str:
        """Return why a new plan is due, or "" if none is."""
        standing = snapshot.network_plan
        planned = set(zip(standing.job.tolist(), standing.generation.tolist(), strict=True))
        now = {(r.job, r.generation) for r in running}
        if now - planned:
            return "start"
        if planned - now:
            return "end"
        before = self._planned.get(snapshot.cluster)
        if before is None or before.document != basis.document:
            return "topology"
        return "" if before == basis else "measured"


def _basis(snapshot: Snapshot, seen: TrafficObservations) -> PlanBasis:
    m, jobs, nodes = snapshot.traffic_measurements, snapshot.jobs.name, snapshot.nodes.name
    rows = zip(m.job.tolist(), m.generation.tolist(), m.node.tolist(), strict=True)
    return PlanBasis(
        document="" if snapshot.topology is None else snapshot.topology.document,
        measured=frozenset((jobs[job], of, nodes[node]) for job, of, node in rows),
        unmeasured=frozenset(jobs[job] for _, job in seen.unmeasured),
    )
