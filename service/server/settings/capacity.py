"""The work that the server does at the same time: calls, threads, processes and connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tessera.service.server.settings.values import Count, LargeCount, Limit, ThreadCount

HEAVY_THREADS: Final = 2
"""Number of calls about many items or large documents that run at the same time.

Each computes for seconds. One client can hold one of these threads. With more threads, short calls
would not get the interpreter.
"""

LONG_THREADS: Final = 2
"""Number of estimates and tests of webhooks that run at the same time. Most only compute: more do not
help.
"""

LEASE_THREADS: Final = 1
"""Number of calls of the server's own tasks that run at the same time. They renew leases and look
for rounds that are due.
"""

IDENTITY_THREADS: Final = 2
"""Number of threads that look up tokens and certificates, check tokens of an identity provider, and
enrol agents.
"""

LOG_THREADS: Final = 1
"""Number of threads that pass on requests for the output of jobs, and the answers. Each use is
short.
"""

OTHER_THREADS: Final = (
    HEAVY_THREADS + LONG_THREADS + LEASE_THREADS + IDENTITY_THREADS + LOG_THREADS + 6
)
"""Number of threads that no setting controls and that use the database at the same time.

The 6 are one each for health and heartbeats of agents, and four for what runs in the background:
automatic estimates, network plans, deletion, checks of collectives, forecasts and webhooks.
These seldom use the database at the same time. If they do, some wait for a connection.
"""


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    """The limits of calls, the database, and the threads that use it."""

    calls_per_minute: Count = 6_000
    """Largest number of calls of a tenant in a minute, for callers who are viewers or users. 0: any
    number.
    """
    max_job_bytes: Limit = 65_536
    """Largest size of a job's description, encoded as a message."""
    database_url: str = field(default="", repr=False)
    """URL of the database, postgresql://... If it is empty, the embedded database is used."""
    database_directory: str = ""
    """Data directory of the embedded database. If it is empty,
    ``tessera.db.schema.embedded.default_directory`` chooses one.
    """
    store_threads: ThreadCount = 6
    """Number of short calls that use the database at the same time. Agents, leases and heavy calls
    have separate threads.
    """
    agent_threads: ThreadCount = 5
    """Number of calls of agents that use the database at the same time, at least 2.

    At least half of them may write, at most one for each cluster. Heartbeats have a separate
    thread.
    """
    round_threads: ThreadCount = 2
    """Number of rounds that callers commit and that are decided at the same time, at most one for
    each cluster. The same number of periodic rounds runs in threads reserved for them.
    """
    trial_threads: ThreadCount = 3
    """Number of dry runs, replays and previews that are decided at the same time. With three or
    more threads, one client or cluster holds at most all but one.
    """
    round_queue: LargeCount = 64
    """Largest number of calls that wait for one of these threads. One client can have half."""
    solve_process_from_jobs: Count = 0
    """Number of jobs from which a round is decided in a separate process, so that other calls stay
    fast during a long solve. 0 disables this. There are up to ``round_threads`` processes, each
    with its own memory.
    """

    def connections(self) -> int:
        """Return how many database connections are in use at the same time: one for each thread."""
        rounds = 2 * self.round_threads + self.trial_threads
        return self.store_threads + max(2, self.agent_threads) + rounds + OTHER_THREADS
