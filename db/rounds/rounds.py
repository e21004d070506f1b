"""The commit of a round, all or nothing: the epoch, decisions that pass the guards, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tessera.db.access import audit_log
from tessera.db.base import requests
from tessera.db.base.decisions import read_decisions, write_decisions
from tessera.db.base.documents import summary_from, summary_json
from tessera.db.base.rows import cluster_id, json_rows, named_subqueries
from tessera.db.base.turn import JobChange, NewCell, Turn
from tessera.db.base.webhooks import record_lapsed_deadlines
from tessera.db.clusters import network
from tessera.db.rounds.guard import CommitState, CurrentJob, CurrentNode, event_of, find_skipped
from tessera.db.rounds.promises import (
    Promise,
    WaitingJobStart,
    changed_starts,
    record_promises,
    record_starts,
    segments_by_job,
)
from tessera.db.rounds.proofs import pack_proof
from tessera.db.rounds.round_snapshots import (
    StoredSnapshot,
    has_base,
    pack_snapshot,
    pack_whole,
    read_base,
)
from tessera.db.schema.engine import Database
from tessera.db.schema.host import NODE_HOST, list_host
from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.answer.effective import effective_gpus
from tessera.formulation.base.errors import (
    DeadlineTooShort,
    NoLongerKept,
    NotFound,
    RoundSuperseded,
)
from tessera.formulation.base.resources import Demand, amounts_of, name_amounts
from tessera.formulation.base.texts import fill
from tessera.formulation.job.lifecycle import ACTIVE, TERMINAL, WAITING, JobState
from tessera.formulation.records.rounds import (
    DecisionRecord,
    RoundCommit,
    RoundRecord,
    RoundSummary,
    decision_record,
)
from tessera.formulation.records.store import Request
from tessera.formulation.state.given_demand import demand_on, demands_of_cells
from tessera.formulation.state.snapshot import Snapshot

_ADVANCE_EPOCH = sa.text("""
UPDATE clusters SET epoch = epoch + 1, last_round = last_round + 1,
    decided_round = CASE WHEN :decided THEN last_round + 1 ELSE decided_round END
WHERE name = :name AND epoch = :epoch AND NOT EXISTS (
    SELECT FROM request_ids i WHERE i.id = CAST(:request AS text) AND i.response IS NOT NULL
)
RETURNING id, revision, epoch, last_round
""")

_LAST_ROUND = sa.text("SELECT last_round FROM clusters WHERE name = :name")

_WORLD = {
    "jobs": json_rows(
        f"j.name, j.id, j.version, j.state, j.generation, j.cell_gpus, {list_host('j.cell_@')}",
        "jobs j WHERE j.cluster_id = :cluster AND j.name = ANY(:names)",
    ),
    "nodes": json_rows(
        f"n.name, n.id, n.version, {NODE_HOST}",
        "nodes n WHERE n.cluster_id = :cluster",
    ),
    "owners": json_rows(
        "l.node_id, l.gpu, l.job_id",
        "allocations l JOIN nodes n ON n.id = l.node_id"
        " WHERE n.cluster_id = :cluster AND l.hold <> 'releasing'",
    ),
    "types": json_rows("t.name, t.id", "gpu_types t WHERE t.cluster_id = :cluster"),
    "plans": json_rows(  # locked, so that retention does not delete them before they are used
        "p.name, p.id",
        "(SELECT q.name, q.id FROM plans q WHERE q.cluster_id = :cluster AND q.name = ANY(:plans)"
        " FOR KEY SHARE) AS p",
    ),
}

_READ_WORLD = sa.text(f"SELECT {named_subqueries(_WORLD)}")

_INSERT_ROUND = sa.text("""
INSERT INTO rounds (cluster_id, number, epoch, summary, snapshot, base, proof)
VALUES (:cluster, :number, :epoch, CAST(:summary AS jsonb), :snapshot, :base, :proof)
""")

_ROUND = sa.text("""
SELECT r.cluster_id, r.summary FROM rounds r JOIN clusters c ON c.id = r.cluster_id
WHERE c.name = :name AND r.number = :number
""")

_ROUNDS = sa.text("""
SELECT summary FROM rounds WHERE cluster_id = :cluster AND (:before = 0 OR number < :before)
ORDER BY number DESC LIMIT :limit
""")

_STATE = {state.value: state for state in JobState}


def commit_round(
    database: Database, commit: RoundCommit, in_time: Callable[[], bool]
) -> RoundRecord:
    """Commit a round; see ``tessera.service.server.ports.rounds.Rounds.commit``."""

    def work(connection: sa.Connection) -> RoundRecord:
        base = read_base(connection, commit.snapshot.cluster)
        # These take long, so they are done before the turn, when nobody waits for it.
        stored, proof = pack_snapshot(base, commit.encoded), pack_proof(commit.proof)
        worth = effective_gpus(commit.snapshot, commit.decisions)
        turn = _advance(connection, commit)
        if isinstance(turn, RoundRecord):
            return turn
        record = _commit(turn, commit, stored, proof, worth)
        audit_log.record_change(connection)
        if not in_time():
            raise DeadlineTooShort(
                "the deadline ended while the round waited for its turn or was written; nothing was"
                " changed: call again with a longer one"
            )
        return record

    return database.write(work)


class _RoundTurn(Turn):
    """The turn of a round, whose first statement advanced the epoch."""

    def __init__(self, connection: sa.Connection, name: str, row: sa.Row[tuple[int, ...]]) -> None:
        super().__init__(connection, row.id, name, row.revision)
        self.epoch, self.number = int(row.epoch), int(row.last_round)


def _advance(connection: sa.Connection, commit: RoundCommit) -> _RoundTurn | RoundRecord:
    """Take the turn, or return the round that the same request committed in the meantime."""
    name, request = commit.snapshot.cluster, commit.request
    values = {
        "name": name,
        "epoch": commit.snapshot.epoch,
        "decided": commit.summary.outcome != "refused",
        "request": None if request is None else request.id,
    }
    row = connection.execute(_ADVANCE_EPOCH, values).one_or_none()
    if row is None:
        if request is not None and (done := find_committed_round(connection, request)) is not None:
            return done
        number = connection.execute(_LAST_ROUND, {"name": name}).scalar()
        if number is None:
            raise NotFound(f"clusters/{name}")
        raise RoundSuperseded(f"clusters/{name}/rounds/{number}")
    turn = _RoundTurn(connection, name, row)
    if request is not None:
        response = f"clusters/{turn.name}/rounds/{turn.number}".encode()
        if (answer := requests.claim_request(connection, request, response)) is not None:
            raise RoundSuperseded(answer.decode())  # rolls the advanced epoch back
    return turn


def _commit(
    turn: _RoundTurn,
    commit: RoundCommit,
    stored: StoredSnapshot,
    proof: bytes | None,
    worth: Mapping[int, float],
) -> RoundRecord:
    """Write the round. ``worth`` has the effective GPUs of jobs, by their index."""
    snapshot, decisions, connection = commit.snapshot, commit.decisions, turn.connection
    # Skip decisions whose job or nodes changed during the solve.
    world = _world(turn, snapshot, decisions)
    known = demands_of_cells(snapshot.estimates)
    needs = [demand_on(snapshot, known, d.job, d.cell) for d in decisions]
    skips = find_skipped(snapshot, decisions, world, needs)
    changes = [
        change
        for i, decision in enumerate(decisions)
        if i not in skips
        and (change := _change(snapshot, decision, world, needs[i], worth)) is not None
    ]
    promises = _promises(turn, commit, world, skips)
    starts = _starts(commit, world, skips, changes)
    # Lock all rows before the first one is changed, to avoid deadlocks.
    jobs = [row.job for row in promises] + [row.job for row in starts]
    turn.lock(jobs + [change.job for change in changes])
    turn.apply(changes)
    record_promises(connection, promises)
    record_starts(connection, starts)
    record_lapsed_deadlines(connection, [row.job for row in promises if row.lapsed])
    plan = commit.network
    # A network plan is only valid for the topology that it was made for.
    if plan and not plan.violations and network.is_described_by(turn, snapshot.topology):
        network.record_plan(turn, plan, "round", commit.summary.seconds.get("network", 0.0))
    turn.end()
    records = tuple(decision_record(snapshot, d, skips.get(i, "")) for i, d in enumerate(decisions))
    summary = _summary(
        turn, commit.summary, records, _states_after(snapshot, decisions, world, changes)
    )
    # The base was read before the turn, so retention may have deleted it since.
    if not has_base(connection, turn.cluster, stored):
        stored = pack_whole(commit.encoded)
    values = {
        "cluster": turn.cluster,
        "number": turn.number,
        "epoch": turn.epoch,
        "summary": summary_json(summary),
        "snapshot": stored.document,
        "base": stored.base,
        "proof": proof,
    }
    connection.execute(_INSERT_ROUND, values)
    job_ids = {name: job.key for name, job in world.jobs.items()}
    write_decisions(connection, turn.cluster, turn.number, records, job_ids)
    return RoundRecord(summary=summary, decisions=records)


def _world(turn: Turn, snapshot: Snapshot, decisions: Sequence[Decision]) -> CommitState:
    names = [snapshot.jobs.name[d.job] for d in decisions]
    plans = {snapshot.plans[d.cell.plan] for d in decisions if d.kind in CHANGES_GPUS}
    values = {"cluster": turn.cluster, "names": names, "plans": sorted(plans)}
    found = turn.connection.execute(_READ_WORLD, values).one()
    return CommitState(
        jobs={
            name: CurrentJob(
                key=key,
                version=version,
                state=_STATE[state],
                generation=generation,
                needs=Demand(gpus=gpus or 0, **name_amounts(needs)),
            )
            for name, key, version, state, generation, gpus, *needs in found.jobs
        },
        nodes={
            name: CurrentNode(key=key, version=at, **name_amounts(host))
            for name, key, at, *host in found.nodes
        },
        owner={(node, gpu): job for node, gpu, job in found.owners},
        types=dict(found.types),
        plans=dict(found.plans),
    )


def _change(
    snapshot: Snapshot,
    decision: Decision,
    world: CommitState,
    needs: Demand,
    worth: Mapping[int, float],
) -> JobChange | None:
    """Return the change of the job, or None if nothing happens to it.

    ``needs`` is its demand on the decision's Cell, and ``worth`` has the effective GPUs of jobs.
    """
    job = world.jobs[snapshot.jobs.name[decision.job]]
    event = event_of(decision, job.state)
    if event is None:
        return None
    cell, gang = None, decision.gang
    if decision.kind in CHANGES_GPUS:
        if gang is None:
            raise AssertionError(f"{decision.kind} without GPUs")
        keys = [world.nodes[snapshot.nodes.name[n]].key for n, _ in gang.members]
        members = zip(keys, (gpus for _, gpus in gang.members), strict=True)
        named = snapshot.cell(decision.cell)
        cell = NewCell(
            type_id=world.types[named.gpu_type],
            gpus=named.gpus,
            degree=named.pipeline_degree,
            plan_id=world.plans[named.plan],
            rate=decision.rate,
            leader_id=keys[0],
            members=tuple(members),
            **name_amounts(amounts_of(needs)),
            effective_gpus=worth.get(decision.job),
        )
    why = decision.reason.message if decision.reason else ""
    detail = fill("{kind}: {why}", kind=decision.kind, why=why) if why else decision.kind
    return JobChange(
        job=job.key,
        state=job.state,
        event=event,
        detail=detail,
        generation=job.generation + 1,
        cell=cell,
    )


def _promises(
    turn: _RoundTurn, commit: RoundCommit, world: CommitState, skips: Mapping[int, str]
) -> list[Promise]:
    """Return the promises of the round that differ from the stored ones.

    Only decisions that hold have promises: if a user changed a job during the solve, the next round
    decides again. These jobs are as in the snapshot, because only rounds promise, and everything
    that withdraws a promise makes a new version.
    """
    snapshot = commit.snapshot
    before, after = (
        segments_by_job(snapshot, snapshot.schedule_segments),
        segments_by_job(snapshot, commit.schedule_segments),
    )
    promises = []
    for i, d in enumerate(commit.decisions):
        rejected = d.kind is DecisionKind.REJECT
        admitted, passed = d.admitted and not rejected, d.opportunistic and d.gang is not None
        segments = after.get(d.job, []) if admitted else []
        then = bool(snapshot.jobs.admitted[d.job]), bool(snapshot.jobs.opportunistic[d.job])
        same = then == (admitted, passed) and segments == before.get(d.job, [])
        if i in skips or (same and not rejected):
            continue
        promises.append(
            Promise(
                job=world.jobs[snapshot.jobs.name[d.job]].key,
                admitted=admitted,
                opportunistic=passed,
                schedule=segments,
                round=turn.number,
                rejected=d.reason if rejected else None,
                lapsed=then[0] and not admitted and not rejected,
            )
        )
    return promises


def _starts(
    commit: RoundCommit,
    world: CommitState,
    skips: Mapping[int, str],
    changes: Sequence[JobChange],
) -> list[WaitingJobStart]:
    """Return the planned and promised starts of the round that differ from the stored ones, by key.

    As with promises, only decisions that hold have them. A job that does not wait after the round
    has none. A start on a node that was deleted meanwhile is not reserved.
    """
    if commit.plan is None:
        return []
    state_after = {change.job: change.after for change in changes}
    decision_numbers = {d.job: i for i, d in enumerate(commit.decisions)}
    starts = []
    for start in changed_starts(commit.snapshot, commit.plan):
        if decision_numbers.get(start.job) is None or decision_numbers[start.job] in skips:
            continue
        job = world.jobs[commit.snapshot.jobs.name[start.job]]
        if state_after.get(job.key, job.state) not in WAITING:
            continue
        planned_start = start.planned_start
        if planned_start is not None and not all(
            name in world.nodes for name, _ in planned_start.nodes
        ):
            planned_start = None
        starts.append(replace(start, job=job.key, planned_start=planned_start))
    return starts


def _states_after(
    snapshot: Snapshot,
    decisions: Sequence[Decision],
    world: CommitState,
    changes: Sequence[JobChange],
) -> list[JobState]:
    """Return the state of each decision's job after the round, if the job still exists."""
    after = {change.job: change.after for change in changes}
    names = (snapshot.jobs.name[d.job] for d in decisions)
    jobs = (world.jobs[name] for name in names if name in world.jobs)
    return [after.get(job.key, job.state) for job in jobs]


def _summary(
    turn: _RoundTurn,
    planned: RoundSummary,
    records: Sequence[DecisionRecord],
    states: list[JobState],
) -> RoundSummary:
    """Return the summary as committed, with its number, counting only applied decisions."""
    kinds = [DecisionKind(r.kind) for r in records if r.applied]
    return replace(
        planned,
        number=turn.number,
        epoch=turn.epoch,
        outcome=planned.outcome or "committed",
        running=sum(s in ACTIVE for s in states),
        waiting=sum(s not in ACTIVE and s not in TERMINAL for s in states),
        started=kinds.count(DecisionKind.START),
        suspended=kinds.count(DecisionKind.SUSPEND),
        changed=sum(k in CHANGES_GPUS and k is not DecisionKind.START for k in kinds),
        replanned=kinds.count(DecisionKind.REPLAN),
    )


def find_committed_round(connection: sa.Connection, request: Request) -> RoundRecord | None:
    """Return the round that the request committed before, or None. Raises RequestIdReused."""
    answer = requests.find_answer(connection, request)
    if answer is None:
        return None
    _, cluster, _, number = answer.decode().split("/")
    return get_round(connection, cluster, int(number))


def get_round(connection: sa.Connection, cluster: str, number: int) -> RoundRecord:
    """Return a round with its decisions. Raises NotFound, and NoLongerKept if it was deleted."""
    row = connection.execute(_ROUND, {"name": cluster, "number": number}).one_or_none()
    if row is None:
        last = connection.execute(_LAST_ROUND, {"name": cluster}).scalar()
        name = f"clusters/{cluster}/rounds/{number}"
        if last is not None and 0 < number <= last:
            raise NoLongerKept(name, "retain_rounds_days and retain_rounds")
        raise NotFound(name)
    decisions = read_decisions(connection, row.cluster_id, number)
    return RoundRecord(summary=summary_from(row.summary), decisions=decisions)


def list_rounds(
    connection: sa.Connection, cluster: str, before: int, limit: int
) -> list[RoundSummary]:
    """Return the rounds with a number below ``before`` (0: all), newest first. Raises NotFound."""
    values = {"cluster": cluster_id(connection, cluster), "before": before, "limit": limit}
    return [summary_from(row.summary) for row in connection.execute(_ROUNDS, values)]
