"""A turn at changing a cluster's jobs and allocations, under one lock.

No other module changes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import sqlalchemy as sa

from tessera.db.base import dependencies
from tessera.db.base.documents import dump_json
from tessera.db.base.rows import json_rows
from tessera.db.base.webhooks import RECORD_EVENTS, notify_deliverers
from tessera.db.schema.host import NODE_HOST, list_host
from tessera.db.schema.tables import LEAVES, LIVE
from tessera.formulation.base.errors import NotFound
from tessera.formulation.base.resources import HostNeeds
from tessera.formulation.base.texts import Text, plain_text
from tessera.formulation.job.lifecycle import (
    ACTIVE,
    TERMINAL,
    WAITING,
    JobEvent,
    JobState,
    advance_state,
)
from tessera.formulation.round.promises.backoff import FIRST_S, MAX_S, RAN_WELL_S

STATE_CHANNEL = "tessera"
"""Channel that receives a cluster's name when its desired state has changed."""

ROUNDS_CHANNEL = "tessera_rounds"
"""Channel that receives a cluster's name when it needs a round before its next period."""

NEEDS_ROUND = frozenset(
    {
        JobEvent.CANCEL,
        JobEvent.CRASH,
        JobEvent.FAIL,
        JobEvent.FINISH,
        JobEvent.HOLD,
        JobEvent.LOST,
        JobEvent.RELEASE,
    }
)
"""Events after which a cluster needs a round soon: a job leaves GPUs to others, or needs some.

The others are a round's own decisions and what follows from them. A round may give GPUs away as
soon as their job has to leave, so it need not wait for GONE.
"""

QUIET_EVENTS = frozenset({JobEvent.RAN, JobEvent.GONE})
"""Events that do not change the job's version: a round decided without them is still right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCell(HostNeeds):
    """A Cell to give to a job, by keys, with its needs of hosts."""

    type_id: int
    gpus: int
    degree: int
    plan_id: int
    rate: float
    leader_id: int
    members: tuple[tuple[int, tuple[int, ...]], ...]  # (node's key, GPU indices)
    effective_gpus: float | None = None  # what it is worth (Eq. 6); None counts each GPU as one


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """An event that happens to a job. ``cell`` is the new Cell of START and MOVE."""

    job: int
    state: JobState  # before the event
    event: JobEvent
    detail: Text = ""
    error: str | None = None
    generation: int = 0  # of the new Cell
    is_free: bool = False  # whether a failure uses no retry
    cell: NewCell | None = None

    @property
    def after(self) -> JobState:
        """Return the state that the event leads to. Raises NotAllowed."""
        return advance_state(self.state, self.event)


_LOCK = sa.text("SELECT id, name, revision FROM clusters WHERE name = :name FOR NO KEY UPDATE")

_LOCK_JOBS = sa.text("SELECT id FROM jobs WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE")

# Consecutive failures before the event: 0 if the job has run well.
_FAILURES = f"""CASE WHEN clock.at - j.ran_at >= make_interval(secs => {RAN_WELL_S}) THEN 0
        ELSE j.failures END"""

# What the job has used until now ends with the GPUs that it had: `stints` are never changed later.
_ADVANCE = sa.text(f"""
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS at), ended AS (
    INSERT INTO stints (job_id, gpu_type, gpus, {list_host("@")}, effective_gpus, began_at,
        trained_at, ended_at, ending)
    SELECT j.id, t.name, j.cell_gpus, {list_host("j.cell_@")},
        j.cell_effective_gpus, j.since_at, j.ran_at,
        greatest(clock.at, j.since_at), c.event
    FROM clock, json_to_recordset(CAST(:rows AS json)) AS c(
        id bigint, event text, active boolean, gpus bigint
    ) JOIN jobs j ON j.id = c.id JOIN gpu_types t ON t.id = j.cell_type_id
    WHERE j.since_at IS NOT NULL AND NOT (c.active AND c.gpus IS NULL)
)
UPDATE jobs j SET
    state = c.state,
    version = j.version + CASE WHEN c.quiet THEN 0 ELSE 1 END,
    generation = CASE WHEN c.gpus IS NULL THEN j.generation ELSE c.generation END,
    retries = j.retries + CASE WHEN c.event IN ('crash', 'fail') AND NOT c.free THEN 1 ELSE 0 END,
    last_error = coalesce(c.error, j.last_error),
    started_at = CASE WHEN c.event IN ('ran', 'finish') THEN coalesce(j.started_at, now())
        ELSE j.started_at END,
    ended_at = CASE WHEN c.terminal THEN now() END,
    queued_at = CASE WHEN c.event = 'release' OR NOT (j.since_at IS NULL OR c.active OR c.terminal)
        THEN clock.at ELSE j.queued_at END,
    since_at = CASE WHEN NOT c.active THEN NULL WHEN c.gpus IS NULL THEN j.since_at ELSE clock.at END,
    service_gpu_s = j.service_gpu_s + CASE
        WHEN j.since_at IS NULL OR (c.active AND c.gpus IS NULL) THEN 0
        ELSE j.cell_gpus * greatest(extract(epoch FROM clock.at - j.since_at)::float8, 0) END,
    run_s = j.run_s + CASE
        WHEN j.since_at IS NULL OR (c.active AND c.gpus IS NULL) THEN 0
        ELSE greatest(extract(epoch FROM clock.at - j.since_at)::float8, 0) END,
    failures = CASE WHEN c.event = 'release' THEN 0
        ELSE {_FAILURES} + CASE WHEN c.event IN ('crash', 'fail') THEN 1 ELSE 0 END END,
    retry_at = CASE WHEN c.event = 'crash' THEN clock.at + make_interval(
            secs => least({MAX_S}, {FIRST_S} * 2.0 ^ least({_FAILURES}, 32)))
        WHEN c.event = 'release' OR c.terminal THEN NULL ELSE j.retry_at END,
    ran_at = CASE WHEN NOT c.active OR c.gpus IS NOT NULL THEN NULL WHEN c.event = 'ran' THEN clock.at
        ELSE j.ran_at END,
    opportunistic = j.opportunistic AND c.active,
    start_by_s = CASE WHEN c.waits THEN j.start_by_s END,
    planned_start = CASE WHEN c.waits THEN j.planned_start END,
    cell_type_id = CASE WHEN c.active THEN coalesce(c.type_id, j.cell_type_id) END,
    cell_gpus = CASE WHEN c.active THEN coalesce(c.gpus, j.cell_gpus) END,
    cell_degree = CASE WHEN c.active THEN coalesce(c.degree, j.cell_degree) END,
    cell_plan_id = CASE WHEN c.active THEN coalesce(c.plan_id, j.cell_plan_id) END,
    cell_rate = CASE WHEN c.active THEN coalesce(c.rate, j.cell_rate) END,
    cell_effective_gpus = CASE WHEN NOT c.active THEN NULL WHEN c.gpus IS NULL THEN j.cell_effective_gpus
        ELSE coalesce(c.effective_gpus, c.gpus) END,
    {list_host("cell_@ = CASE WHEN c.active THEN coalesce(c.@, j.cell_@) ELSE 0 END")},
    leader_id = coalesce(c.leader_id, j.leader_id)
FROM clock, json_to_recordset(CAST(:rows AS json)) AS c(
    id bigint, event text, state text, free boolean, quiet boolean, active boolean, waits boolean,
    terminal boolean, error text, generation bigint, type_id bigint, gpus bigint, degree bigint,
    plan_id bigint, rate float8, leader_id bigint, {list_host("@ bigint")}, effective_gpus float8
)
WHERE j.id = c.id
""")  # noqa: S608 - constants of formulation

# A round that was decided without it is not right any more: the version changes.
_CHANGE_PLANS = sa.text("""
UPDATE jobs j SET cell_plan_id = p.id, cell_rate = c.rate, version = j.version + 1
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint, plan text, rate float8)
CROSS JOIN plans p
WHERE j.id = c.id AND j.generation = c.generation AND j.cell_gpus IS NOT NULL
    AND p.cluster_id = j.cluster_id AND p.name = c.plan
""")

# A gang that still waited for one of its GPUs was never started, so its start is forgotten.
_RELEASE = sa.text("""
WITH unreserved AS (
    DELETE FROM allocations WHERE job_id = ANY(:jobs) AND hold = 'reserved'
    RETURNING job_id, generation
), unstarted AS (
    DELETE FROM job_starts s USING (SELECT DISTINCT job_id, generation FROM unreserved) AS u
    WHERE s.job_id = u.job_id AND s.generation = u.generation
)
UPDATE allocations SET hold = 'releasing', release_revision = :revision
WHERE job_id = ANY(:jobs) AND hold = 'held'
""")

# Ranks are in the order of nodes' names, as in an allocation's record (``tessera.db.base.rows``).
_RESERVE = sa.text("""
WITH given AS (
    SELECT * FROM unnest(
        CAST(:nodes AS bigint[]), CAST(:gpus AS bigint[]),
        CAST(:jobs AS bigint[]), CAST(:generations AS bigint[])
    ) AS r(node_id, gpu, job_id, generation)
), started AS (
    INSERT INTO job_starts (job_id, generation, shares)
    SELECT s.job_id, s.generation, jsonb_agg(jsonb_build_array(n.name, s.gpus) ORDER BY n.name)
    FROM (SELECT job_id, generation, node_id, jsonb_agg(gpu ORDER BY gpu) AS gpus
        FROM given GROUP BY job_id, generation, node_id) AS s
    JOIN nodes n ON n.id = s.node_id GROUP BY s.job_id, s.generation
)
INSERT INTO allocations (node_id, gpu, job_id, generation, hold)
SELECT g.*, 'reserved' FROM given g
""")

_GONE = json_rows(
    "j.id, j.state",
    f"jobs j WHERE j.cluster_id = :cluster AND j.{LEAVES}"
    " AND NOT EXISTS (SELECT FROM allocations l WHERE l.job_id = j.id)",
    "j.id",
)

# A job that moves waits until its former gang is gone, which may still write a checkpoint. A job that
# needs cores or host memory of a node that has a limit waits for all that leave the node.
_SETTLE = sa.text(f"""
WITH promoted AS (
    UPDATE allocations r SET hold = 'held'
    FROM nodes n
    WHERE r.hold = 'reserved' AND n.id = r.node_id AND n.cluster_id = :cluster AND NOT EXISTS (
        SELECT FROM allocations h
        WHERE h.node_id = r.node_id AND h.gpu = r.gpu AND h.hold IN ('held', 'releasing')
    ) AND NOT EXISTS (
        SELECT FROM allocations o WHERE o.job_id = r.job_id AND o.hold = 'releasing'
    ) AND NOT (
        coalesce({NODE_HOST}) IS NOT NULL
        AND EXISTS (SELECT FROM jobs j WHERE j.id = r.job_id
            AND ({list_host("j.cell_@ > 0", " OR ")}))
        AND EXISTS (SELECT FROM allocations o
            WHERE o.node_id = r.node_id AND o.hold = 'releasing')
    )
    RETURNING r.gpu
)
SELECT (SELECT count(*) FROM promoted) AS promoted, {_GONE} AS gone
""")  # noqa: S608 - constants of db

_REVISE = sa.text("""
WITH revised AS (UPDATE clusters SET revision = :revision WHERE id = :cluster)
SELECT pg_notify(:channel, :name)
""")

_NOTIFY = sa.text("SELECT pg_notify(:channel, :name)")

_REQUEST_ROUND = sa.text(f"""
SELECT pg_notify('{ROUNDS_CHANNEL}', c.name) FROM clusters c WHERE c.id = :cluster AND EXISTS (
    SELECT FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE}
        AND (CAST(:workloads AS bigint[]) IS NULL OR j.workload_id = ANY(CAST(:workloads AS bigint[]))))
""")  # noqa: S608 - constants of db


class Turn:
    """A lock on the cluster's row until the transaction ends, which makes turns exclusive."""

    def __init__(self, connection: sa.Connection, cluster: int, name: str, revision: int) -> None:
        self.connection, self.cluster, self.name = connection, cluster, name
        self.revision = revision + 1  # of the desired state that this turn makes, if it makes one
        self.changed = self.needs_round = False
        self._locked: set[int] = set()

    @classmethod
    def take(cls, connection: sa.Connection, name: str) -> Self:
        """Wait for the turn. Raises NotFound."""
        row = connection.execute(_LOCK, {"name": name}).one_or_none()
        if row is None:
            raise NotFound(f"clusters/{name}")
        return cls(connection, row.id, row.name, row.revision)

    def apply(self, changes: Sequence[JobChange]) -> None:
        """Apply the events: states, histories, and the GPUs that are given back or reserved.

        Jobs whose new state owns no GPUs, and jobs with a new Cell, give back the GPUs that they
        have.
        """
        if not changes:
            return
        self.lock([change.job for change in changes])
        self.needs_round |= any(change.event in NEEDS_ROUND for change in changes)
        # Release first, because a GPU that one job gives up may be reserved for another.
        losing = [c.job for c in changes if c.cell is not None or c.after not in ACTIVE]
        self._release(losing)
        self.connection.execute(_ADVANCE, {"rows": dump_json([_row(c) for c in changes])})
        history = [
            {"id": c.job, "event": c.event, "state": c.after, "detail": plain_text(c.detail)}
            for c in changes
        ]
        if self.connection.execute(RECORD_EVENTS, {"rows": dump_json(history)}).rowcount:
            notify_deliverers(self.connection)
        self._reserve(changes)
        self._resolve_dependencies([c.job for c in changes if c.after in TERMINAL])

    def _resolve_dependencies(self, ended: Sequence[int]) -> None:
        """Free the jobs that waited for the ``ended`` ones, and reject those that never can start.

        They have no GPUs, so nobody outside a turn changes them, and they are locked late.
        """
        if not ended:
            return
        awaited, frees = dependencies.note_ends(self.connection, ended)
        self.needs_round |= frees
        if not awaited:
            return
        broken = dependencies.find_broken(self.connection, ended)
        self.apply(
            [
                JobChange(
                    job=job.key,
                    state=job.state,
                    event=JobEvent.REJECT,
                    detail=job.reason.message,
                )
                for job in broken
            ]
        )
        if broken:
            dependencies.store_reasons(self.connection, broken)
        self.needs_round |= dependencies.meet_dependencies(self.connection, ended)

    def change_plans(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Note the plans by which running jobs run after a tuning, which are stored plans.

        A row has the job's key and generation, the plan's digest and the samples per second. The
        gangs go on, and so do their generations.
        """
        if rows:
            self.lock([int(str(row["id"])) for row in rows])
            names = ("id", "generation", "plan", "rate")
            plain = [{name: row[name] for name in names} for row in rows]
            self.connection.execute(_CHANGE_PLANS, {"rows": dump_json(plain)})

    def lock(self, jobs: Sequence[int]) -> None:
        """Lock rows of jobs in ascending order of keys, to avoid deadlocks.

        A turn must lock all jobs that it will change before it changes the first one.
        """
        if missing := sorted(set(jobs) - self._locked):
            self.connection.execute(_LOCK_JOBS, {"ids": missing})
            self._locked.update(missing)

    def settle(self) -> None:
        """Give free GPUs to the jobs that wait for them, and finish jobs that have left."""
        settled = self.connection.execute(_SETTLE, {"cluster": self.cluster}).one()
        self.changed |= settled.promoted > 0
        gone = [JobChange(job=j, state=JobState(s), event=JobEvent.GONE) for j, s in settled.gone]
        self.apply(gone)

    def end(self) -> bool:
        """Settle, and notify listeners if the desired state has changed; return whether it has.

        If an event needs a round, it is requested, too.
        """
        self.settle()
        if self.changed:
            values = {
                "revision": self.revision,
                "cluster": self.cluster,
                "channel": STATE_CHANNEL,
                "name": self.name,
            }
            self.connection.execute(_REVISE, values)
        if self.needs_round:
            request_round(self.connection, self.cluster)
        return self.changed

    def _release(self, jobs: Iterable[int]) -> None:
        """Release the GPUs of jobs.

        Reserved GPUs are free immediately, because no agent knows of them. Held GPUs are free once
        the agent reports it.
        """
        values = {"jobs": list(jobs), "revision": self.revision}
        if values["jobs"]:
            self.changed |= self.connection.execute(_RELEASE, values).rowcount > 0

    def _reserve(self, changes: Sequence[JobChange]) -> None:
        rows = [
            (node, gpu, c.job, c.generation)
            for c in changes
            if c.cell is not None
            for node, gpus in c.cell.members
            for gpu in gpus
        ]
        if rows:
            columns = zip(*rows, strict=True)
            names = ("nodes", "gpus", "jobs", "generations")
            values = {name: list(column) for name, column in zip(names, columns, strict=True)}
            self.connection.execute(_RESERVE, values)


def request_round(
    connection: sa.Connection, cluster: int, workloads: Collection[int] | None = None
) -> None:
    """Ask for a round soon, after the commit. ``cluster`` is a key.

    Nobody is asked if the cluster has no live job. If ``workloads`` (keys) are given, one of them
    must have a live job.
    """
    values = {"cluster": cluster, "workloads": None if workloads is None else sorted(workloads)}
    connection.execute(_REQUEST_ROUND, values)


def notify_attention(connection: sa.Connection, cluster: str) -> None:
    """Notify listeners after the commit that a cluster needs attention.

    Its revision does not change.
    """
    connection.execute(_NOTIFY, {"channel": STATE_CHANNEL, "name": cluster})


def _row(change: JobChange) -> dict[str, object]:
    cell: dict[str, object] = {}
    if change.cell is not None:
        cell = asdict(change.cell)
        del cell["members"]
    return {
        "id": change.job,
        "event": change.event,
        "state": change.after,
        "free": change.is_free,
        "quiet": change.event in QUIET_EVENTS,
        "active": change.after in ACTIVE,
        "waits": change.after in WAITING,
        "terminal": change.after in TERMINAL,
        "error": change.error,
        "generation": change.generation,
        **cell,
    }
