"""The standing policy of each cluster's rounds, also compared with what a job asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.db.clusters.policies import newest_policy
from tessera.db.store.store import Store
from tessera.formulation.records.jobs import JobRecord
from tessera.formulation.round.policy import MODES_WITHOUT_PROMISES
from tessera.service.server.convert.policies import read_stored_options
from tessera.solvers.rounds.options import RoundOptions


@dataclass(frozen=True, slots=True)
class StandingPolicy:
    """The standing policy of a cluster's rounds, with its version."""

    version: int  # 0 for the policy of the server's settings
    options: RoundOptions


class StandingPolicies:
    """The standing policies of all clusters.

    A policy in the database goes before the one of the server's settings, which is ``configured``.
    Nothing is remembered, so each replica follows a new version from its next round on. ``usual``
    has the options that a policy of the database does not set.
    """

    def __init__(
        self,
        store: Store,
        configured: RoundOptions | None = None,
        usual: RoundOptions | None = None,
    ) -> None:
        self._store = store
        self.usual = usual or RoundOptions()
        self.configured = configured or self.usual

    def of(self, cluster: str) -> StandingPolicy:
        """Return the policy that is in force. A missing cluster has that of the settings.

        Raises:
            InvalidInput: this release does not accept the stored policy.
        """
        newest = self._store.read(newest_policy, cluster)
        if newest is None:
            return StandingPolicy(0, self.configured)
        return StandingPolicy(newest.version, self.read(newest.version, newest.options))

    def read(self, version: int, options: Mapping[str, Any] | None) -> RoundOptions:
        """Return all options of a stored version (see ``PolicyRecord``).

        Raises:
            InvalidInput: this release does not accept them.
        """
        if options is None:
            return self.configured
        return read_stored_options(f"policies/{version}", options, self.usual)


def unheeded_wishes(job: JobRecord, standing: RoundOptions) -> list[str]:
    """Return one message for each wish of a job that rounds under the ``standing`` policy ignore.

    Each message says what to do.
    """
    if not math.isfinite(job.spec.deadline_s):
        return []
    if standing.scheduler:
        why = f"the scheduler {standing.scheduler!r} decides rounds and promises no deadline"
    elif standing.deadline_mode not in MODES_WITHOUT_PROMISES:
        return []
    elif job.admitted and standing.deadline_mode != "ignore":
        return []  # it was promised before, and the promise is kept
    else:
        why = f"the standing policy (deadlines: {standing.deadline_mode}) promises no new deadline"
    options = "--objective 'deadline then throughput'"
    if standing.scheduler:
        options += " --scheduler ''"
    if standing.deadlines:
        options += " --deadlines auto"
    return [
        f"rounds will ignore this job's deadline: {why}; set the standing policy with"
        f" `tessera policy set {options}`, or decide one round with `tessera round {options}`"
    ]
