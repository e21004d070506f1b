"""The changes of profiles that profiling tasks request."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tessera.db.estimates import profiling
from tessera.db.estimates.derived_estimates import notify_estimators
from tessera.db.jobs.job_changes import apply_event
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.estimates import HostProfile, ProfileGap, ProfileRow


def add_profiles(
    connection: sa.Connection,
    cluster: str,
    rows: Sequence[ProfileRow],
    gap: ProfileGap | None = None,
    host: HostProfile | None = None,
) -> int:
    """Store measured layers; return how many were new. Stored ones are never changed.

    ``gap`` has the sizes that the task left out. It replaces an earlier one of the task. Complete
    rows delete it. ``host`` are the rates of the node's host, of which each task has the latest.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type.
    """
    new_layers = profiling.put_layers(connection, cluster, rows)
    if gap is None:
        profiling.drop_gaps(connection, cluster, rows)
    else:
        profiling.put_gap(connection, cluster, gap)
    if host is not None:
        profiling.put_host(connection, cluster, host)
    notify_estimators(connection, cluster)
    return new_layers


def end_profiling(
    connection: sa.Connection, cluster: str, task: str, gap: ProfileGap | None
) -> None:
    """Cancel a profiling task at a limit, and store ``gap`` with the reason.

    Raises:
        NotFound: the cluster, or the task. NotAllowed: it ends already.
        InvalidInput: unknown GPU type.
    """
    reason = "" if gap is None else gap.reason
    apply_event(connection, cluster, task, JobEvent.CANCEL, detail=reason)
    if gap is not None:
        profiling.put_gap(connection, cluster, gap)
