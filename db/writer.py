"""The changes that users request, each inside the transaction that ``write`` opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import sqlalchemy as sa

from tessera.db import (
    agents,
    arrays,
    collective_checks,
    deletion,
    dependencies,
    derived_estimates,
    inventory,
    network,
    pins,
    policies,
    profiling,
    reservations,
    shadows,
    webhooks,
    workloads,
)
from tessera.db import tenants as settings
from tessera.db.documents import dump_json
from tessera.db.job_columns import (
    SUBMITTED_COLUMNS,
    UPDATABLE_COLUMNS,
    launch_values,
    typed_columns,
)
from tessera.db.limits import require_few, require_few_clusters, require_few_open_jobs
from tessera.db.plans import ensure_plans_of_jobs
from tessera.db.rows import CLUSTER, cluster_record, enter_cluster, jobs_named, nodes_named
from tessera.db.turn import JobChange, Turn, request_round
from tessera.formulation.access import IDENTITY
from tessera.formulation.arrays import ArrayRecord
from tessera.formulation.errors import AlreadyExists, InvalidInput, NotAllowed, NotFound, StaleEtag
from tessera.formulation.lifecycle import TERMINAL, JobEvent, JobState, is_allowed
from tessera.formulation.reasons import Reason
from tessera.formulation.records.clusters import (
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
    HostProfile,
    ModelSpec,
    ProfileGap,
    ProfileRow,
    TuningRecord,
)
from tessera.formulation.records.jobs import JobRecord, JobSpec
from tessera.formulation.records.policies import PolicyRecord, ShadowRecord
from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec
from tessera.formulation.records.store import StoreLimits
from tessera.formulation.runtimes import RESTRICTED_RUNTIMES
from tessera.formulation.topologies.described import DescribedTopology
from tessera.formulation.values import GpuType, Workload
from tessera.formulation.webhooks import WebhookRecord, WebhookSpec

DEFAULT_LIMITS = StoreLimits()

MAX_SUBMITTER = 200
"""Characters that are kept of the name of who submits a job."""
_NOT_COLUMNS: Final[dict[str, Any]] = {
    "stated_plan": None,
    "submitted_plan": "",
    "after": (),
    "array": None,
}
"""Fields of a job that are not columns of the same name, with their empty values."""

_SUBMIT = sa.text(f"""
INSERT INTO jobs (cluster_id, submitted_by, {", ".join(SUBMITTED_COLUMNS)})
SELECT :cluster, :submitted_by, r.*
FROM json_to_recordset(CAST(:rows AS json)) AS r({typed_columns(SUBMITTED_COLUMNS)})
ON CONFLICT (cluster_id, name) DO NOTHING
RETURNING name
""")  # noqa: S608 - a constant of this module

_JOB = sa.text("""
SELECT id, version, state FROM jobs WHERE cluster_id = :cluster AND name = :name
""")

_DRAIN = sa.text("""
UPDATE nodes SET draining = true, drain_reason = coalesce(nullif(:reason, ''), drain_reason),
    drained_by = :drained_by, drained_at = now(), version = version + 1,
    health_drain = false, probation_until = NULL
WHERE cluster_id = :cluster AND name = ANY(:names)
    AND (NOT draining OR health_drain OR (:reason <> '' AND drain_reason <> :reason))
""")
"""The drain of an operator. Health does not undrain the node any more if it had drained it."""

_UNDRAIN = sa.text("""
UPDATE nodes SET draining = false, drain_reason = '', drained_by = '', drained_at = NULL,
    version = version + 1, health_drain = false, probation_until = NULL, excused_faults = faults
WHERE cluster_id = :cluster AND name = ANY(:names) AND draining
""")


class PostgresWriter:
    """The changes of ``tessera.service.ports.writer.Writer``, on one connection."""

    def __init__(
        self, connection: sa.Connection, silence_s: float, limits: StoreLimits = DEFAULT_LIMITS
    ) -> None:
        """Remember the connection and the settings.

        An agent that was silent for ``silence_s`` seconds counts as disconnected.
        """
        self._connection, self._silence_s, self._limits = connection, silence_s, limits

    def upsert_cluster(
        self, name: str, gpu_types: Sequence[GpuType], version: int | None
    ) -> ClusterRecord:
        """Create the cluster or replace its GPU types."""
        if inventory.upsert_cluster(self._connection, name, gpu_types, version):
            require_few_clusters(self._connection, self._limits)
        row = self._connection.execute(CLUSTER, {"name": name}).mappings().one()
        return cluster_record(row)

    def delete_cluster(self, name: str, version: int | None, *, force: bool) -> None:
        """Delete the cluster. Its rows are removed in the background."""
        deletion.delete_cluster(self._connection, name, version, self._silence_s, force=force)

    def delete_gpu_types(
        self, cluster: str, names: Sequence[str], version: int | None, *, allow_missing: bool
    ) -> ClusterRecord:
        """Delete GPU types that nothing uses."""
        inventory.delete_types(
            self._connection, cluster, names, version, allow_missing=allow_missing
        )
        row = self._connection.execute(CLUSTER, {"name": cluster}).mappings().one()
        return cluster_record(row)

    def upsert_nodes(self, cluster: str, nodes: Sequence[NodeSpec]) -> list[NodeRecord]:
        """Create or change nodes, all or none.

        Agents that still run on deleted nodes get them back.
        """
        turn = Turn.take(self._connection, cluster)
        names = [node.name for node in nodes]
        turn.needs_round = inventory.upsert_nodes(turn, nodes)
        agents.give_nodes_back(turn, names)
        turn.end()
        require_few(self._connection, cluster, "nodes", self._limits)
        return nodes_named(self._connection, turn.cluster, names)

    def drain_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        *,
        draining: bool,
        reason: str = "",
        drained_by: str = "",
    ) -> list[NodeRecord]:
        """Mark nodes as draining, or not.

        A new reason replaces that of a node that is already draining.
        """
        turn = Turn.take(self._connection, cluster)
        values = {"cluster": turn.cluster, "names": list(names)}
        said = {"reason": reason, "drained_by": drained_by} if draining else {}
        changed = self._connection.execute(_DRAIN if draining else _UNDRAIN, values | said)
        if changed.rowcount:
            request_round(self._connection, turn.cluster)
        records = nodes_named(self._connection, turn.cluster, names)
        if missing := set(names) - {node.spec.name for node in records}:
            raise NotFound(f"clusters/{cluster}/nodes/{min(missing)}")
        return records

    def delete_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        versions: Mapping[str, int],
        *,
        allow_missing: bool,
    ) -> None:
        """Delete nodes that no job uses, all or none."""
        turn = Turn.take(self._connection, cluster)
        deletion.delete_nodes(turn, names, versions, allow_missing=allow_missing)

    def submit_jobs(
        self, cluster: str, jobs: Sequence[JobSpec], tenants: Collection[str] | None = None
    ) -> list[JobRecord]:
        """Queue jobs, all or none."""
        dependent = [job for job in jobs if job.after]
        if dependent:  # no job that they name may end in the meantime
            Turn.take(self._connection, cluster)
        key, names = enter_cluster(self._connection, cluster), [job.name for job in jobs]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise AlreadyExists(f"clusters/{cluster}/jobs/{min(repeated)}")
        workload_ids = workloads.ensure_workloads(
            self._connection, key, {job.workload for job in jobs}
        )
        unestimated = workloads.require_fit(self._connection, key, jobs, workload_ids)
        rows, plan_ids = [], ensure_plans_of_jobs(self._connection, key, jobs)
        restricted = any(job.techniques or job.runtime in RESTRICTED_RUNTIMES for job in jobs)
        tunes = any(job.launch.tuning_space for job in jobs)
        if unestimated or plan_ids or restricted or tunes:
            derived_estimates.notify_estimators(self._connection, cluster)
        pins.require_future(self._connection, jobs)
        array_ids = arrays.add_arrays(self._connection, key, cluster, jobs)
        for job in jobs:
            row = asdict(replace(job, **_NOT_COLUMNS))
            for name in ("workload", "avoid_nodes", *_NOT_COLUMNS):
                del row[name]
            row |= launch_values(job) | {"workload_id": workload_ids[job.workload]}
            if job.array is not None:
                row |= {"array_id": array_ids[job.array.array], "array_index": job.array.index}
            if job.stated_plan is not None:
                row["stated_plan_id"] = plan_ids[job.stated_plan.digest]
            row["submitted_plan_id"] = plan_ids.get(job.submitted_plan_id)
            # JSON cannot represent infinity.
            rows.append({k: str(v) if isinstance(v, float) else v for k, v in row.items()})
        submitter = IDENTITY.get().known_subject(MAX_SUBMITTER)
        values = {"cluster": key, "submitted_by": submitter, "rows": _rows(rows)}
        found = self._connection.execute(_SUBMIT, values).scalars()
        if missing := set(names) - set(found):
            raise AlreadyExists(f"clusters/{cluster}/jobs/{min(missing)}")
        pins.put_avoids(self._connection, key, [job for job in jobs if job.avoid_nodes])
        if dependent:
            dependencies.put_dependencies(self._connection, key, jobs, tenants)
        request_round(self._connection, key)
        require_few_open_jobs(self._connection, cluster, {job.tenant for job in jobs}, self._limits)
        order = {name: i for i, name in enumerate(names)}
        records = jobs_named(self._connection, key, names)
        return sorted(records, key=lambda record: order[record.spec.name])

    def update_job(
        self, cluster: str, spec: JobSpec, fields: Sequence[str], version: int | None
    ) -> JobRecord:
        """Change the named fields of a job."""
        turn = Turn.take(self._connection, cluster)
        job, state = self._job(turn, spec.name, version)
        if state in TERMINAL:
            raise NotAllowed(
                f"job {spec.name} {_state_in_words(state)}; only jobs that have not ended can be changed"
            )
        if unknown := set(fields) - UPDATABLE_COLUMNS:
            allowed = ", ".join(sorted(UPDATABLE_COLUMNS))
            raise InvalidInput("fields", f"{min(unknown)} cannot be changed; these can: {allowed}")
        old = jobs_named(self._connection, turn.cluster, [spec.name])[0].spec
        new = replace(old, **{field: getattr(spec, field) for field in fields})
        pins.require_change(self._connection, turn.cluster, new, fields)
        if fields:
            values = {f: getattr(new, f) for f in fields if f != "avoid_nodes"}
            for document in {"labels", "command", "allowed_types"} & values.keys():
                values[document] = dump_json(values[document])
            if not pins.keeps_promise(old, new):
                values |= {"admitted": False, "certificate": "[]"}
            assignments = "".join(
                f"{field} = :{field}, " for field in values
            )  # names: UPDATABLE_COLUMNS
            update = f"UPDATE jobs SET {assignments}version = version + 1 WHERE id = :job"  # noqa: S608
            self._connection.execute(sa.text(update), values | {"job": job})
        if set(fields) - {"labels"}:
            request_round(self._connection, turn.cluster)
        if new.tenant != old.tenant:
            require_few_open_jobs(self._connection, cluster, [new.tenant], self._limits)
        if "avoid_nodes" in fields:
            pins.put_avoids(self._connection, turn.cluster, [new])
        return jobs_named(self._connection, turn.cluster, [spec.name])[0]

    def job_event(self, cluster: str, name: str, event: JobEvent, version: int | None) -> JobRecord:
        """Apply a user's event."""
        turn = Turn.take(self._connection, cluster)
        job, state = self._job(turn, name, version)
        _require_allowed(name, state, event)
        turn.apply([JobChange(job=job, state=state, event=event)])
        turn.end()
        return jobs_named(self._connection, turn.cluster, [name])[0]

    def array_event(self, cluster: str, name: str, event: JobEvent) -> ArrayRecord:
        """Apply a user's event to all members of an array to which it may happen."""
        turn = Turn.take(self._connection, cluster)
        states = [state for state in JobState if is_allowed(state, event)]
        members = arrays.members_in(self._connection, turn.cluster, name, states)
        turn.apply([JobChange(job=job, state=state, event=event) for job, state in members])
        turn.end()
        return arrays.get_array(self._connection, cluster, name)

    def upsert_tenants(self, cluster: str, tenants: Sequence[TenantSpec]) -> list[TenantSpec]:
        """Create tenants or replace their settings, all or none."""
        turn = Turn.take(self._connection, cluster)
        put = settings.upsert_tenants(turn, tenants)
        request_round(self._connection, turn.cluster)
        require_few(self._connection, cluster, "tenants", self._limits)
        return put

    def delete_tenants(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete the settings of tenants."""
        turn = Turn.take(self._connection, cluster)
        settings.delete_tenants(turn, names, allow_missing=allow_missing)
        request_round(self._connection, turn.cluster)

    def set_policy(
        self,
        cluster: str,
        options: Mapping[str, Any] | None,
        *,
        set_by: str,
        message: str,
        version: int | None,
    ) -> PolicyRecord:
        """Add a version of the standing policy."""
        turn = Turn.take(self._connection, cluster)
        return policies.set_policy(turn, options, set_by=set_by, message=message, version=version)

    def set_shadow(
        self, cluster: str, options: Mapping[str, Any], *, set_by: str, message: str
    ) -> ShadowRecord:
        """Set the cluster's shadow in place of an earlier one."""
        turn = Turn.take(self._connection, cluster)
        return shadows.set_shadow(turn, options, set_by=set_by, message=message)

    def drop_shadow(self, cluster: str, *, allow_missing: bool = False) -> None:
        """Delete the cluster's shadow with its rounds."""
        turn = Turn.take(self._connection, cluster)
        shadows.drop_shadow(turn, allow_missing=allow_missing)

    def add_webhook(self, cluster: str, spec: WebhookSpec) -> WebhookRecord:
        """Store a webhook."""
        return webhooks.add_webhook(self._connection, cluster, spec)

    def delete_webhook(self, cluster: str, name: str, tenants: Collection[str] | None) -> None:
        """Delete a webhook with its events."""
        webhooks.delete_webhook(self._connection, cluster, name, tenants)

    def revive_webhook(self, cluster: str, name: str) -> None:
        """Let a webhook get events again."""
        webhooks.revive_webhook(self._connection, cluster, name)

    def create_reservation(self, cluster: str, spec: ReservationSpec) -> ReservationRecord:
        """Create a reservation."""
        return reservations.create_reservation(Turn.take(self._connection, cluster), spec)

    def update_reservation(
        self,
        cluster: str,
        name: str,
        start_s: float | None,
        end_s: float | None,
        version: int | None,
    ) -> ReservationRecord:
        """Change the times of a reservation. A time that is None stays."""
        turn = Turn.take(self._connection, cluster)
        return reservations.update_reservation(turn, name, start_s, end_s, version)

    def delete_reservations(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete reservations, all or none."""
        turn = Turn.take(self._connection, cluster)
        reservations.delete_reservations(turn, names, allow_missing=allow_missing)

    def upsert_estimates(self, cluster: str, estimates: Sequence[EstimateRecord]) -> int:
        """Create or replace estimates; return how many."""
        key = enter_cluster(self._connection, cluster)
        return workloads.upsert_estimates(self._connection, key, estimates)

    def delete_cells(self, cluster: str, cells: CellFilter) -> int:
        """Delete all matching estimates; return how many."""
        return deletion.delete_cells(self._connection, cluster, cells)

    def delete_models(
        self, cluster: str, models: Collection[tuple[str, str]], *, allow_missing: bool
    ) -> None:
        """Delete users' models that no live job trains."""
        deletion.delete_models(self._connection, cluster, models, allow_missing=allow_missing)

    def upsert_models(self, cluster: str, models: Sequence[ModelSpec]) -> int:
        """Create or replace models; return how many."""
        count = derived_estimates.upsert_models(self._connection, cluster, models)
        require_few(self._connection, cluster, "models", self._limits)
        return count

    def derive(
        self,
        cluster: str,
        estimates: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
        tunings: Sequence[TuningRecord] = (),
    ) -> int:
        """Store estimates that the service made, where users wrote none."""
        return derived_estimates.put_derived_estimates(
            self._connection, cluster, estimates, derived_from, tunings
        )

    def add_profiles(
        self,
        cluster: str,
        rows: Sequence[ProfileRow],
        gap: ProfileGap | None = None,
        host: HostProfile | None = None,
    ) -> int:
        """Store measured layers and hosts, and what a task left out; return how many layers were new."""
        added = profiling.add_profiles(self._connection, cluster, rows)
        if gap is None:
            profiling.drop_gaps(self._connection, cluster, rows)
        else:
            profiling.put_gap(self._connection, cluster, gap)
        if host is not None:
            profiling.put_host(self._connection, cluster, host)
        derived_estimates.notify_estimators(self._connection, cluster)
        return added

    def end_profiling(self, cluster: str, task: str, gap: ProfileGap | None) -> None:
        """Cancel a profiling task at a limit, and store what it left out with the reason."""
        turn = Turn.take(self._connection, cluster)
        job, state = self._job(turn, task, None)
        _require_allowed(task, state, JobEvent.CANCEL)
        reason = "" if gap is None else gap.reason
        turn.apply([JobChange(job=job, state=state, event=JobEvent.CANCEL, detail=reason)])
        turn.end()
        if gap is not None:
            profiling.put_gap(self._connection, cluster, gap)

    def put_collective_check(self, cluster: str, check: CollectiveRecord) -> None:
        """Store the comparison of a model's collectives with those of XLA."""
        collective_checks.put_check(self._connection, cluster, check)
        derived_estimates.notify_estimators(self._connection, cluster)

    def set_topology(
        self, cluster: str, described: DescribedTopology, version: int | None
    ) -> TopologyRecord:
        """Describe the cluster's network."""
        return network.set_topology(self._connection, cluster, described, version)

    def drop_topology(
        self, cluster: str, version: int | None = None, *, allow_missing: bool = False
    ) -> None:
        """Delete the cluster's network and its plans."""
        network.drop_topology(self._connection, cluster, version, allow_missing=allow_missing)

    def say_waiting(self, cluster: str, reasons: Mapping[Workload, Reason | None]) -> None:
        """Record why workloads have no estimates."""
        derived_estimates.record_wait_reasons(self._connection, cluster, reasons)

    def _job(self, turn: Turn, name: str, version: int | None) -> tuple[int, JobState]:
        row = self._connection.execute(_JOB, {"cluster": turn.cluster, "name": name}).one_or_none()
        if row is None:
            raise NotFound(f"clusters/{turn.name}/jobs/{name}")
        if version is not None and version != row.version:
            raise StaleEtag(
                f"job {name} has changed since you read it (etag {version}, now {row.version});"
                " read it again and retry"
            )
        return row.id, JobState(row.state)


_USER_EVENTS = {JobEvent.CANCEL: "cancelled", JobEvent.HOLD: "held", JobEvent.RELEASE: "released"}
"""The participles that error messages use for the events that users may request."""


def _require_allowed(name: str, state: JobState, event: JobEvent) -> None:
    """Raise NotAllowed, with possible alternatives, if ``event`` is not allowed in ``state``."""
    if is_allowed(state, event):
        return
    others = [said for other, said in _USER_EVENTS.items() if is_allowed(state, other)]
    if others:
        instead = f"it can be {' or '.join(others)}"
    elif state in TERMINAL:
        instead = "submit it again under another name"
    else:
        instead = "wait until its GPUs are free"
    raise NotAllowed(
        f"job {name} {_state_in_words(state)}, so it cannot be {_USER_EVENTS[event]}; {instead}"
    )


def _state_in_words(state: JobState) -> str:
    """Return the words for a job's state, with a verb."""
    verbs = dict.fromkeys(TERMINAL, "has") | {JobState.CANCELLED: "was", JobState.REJECTED: "was"}
    return f"{verbs.get(state, 'is')} {state}"


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    return dump_json(list(rows))


Work = Callable[[PostgresWriter], bytes]
