"""Rounds: the data that is committed, and the records with names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision
from tessera.formulation.answer.network.outcome import NetworkOutcome
from tessera.formulation.answer.proofs import NO_PROOF, RoundProof
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.jobs import AllocationRecord
from tessera.formulation.records.store import Request
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.state.last_round import NO_SEGMENTS, ScheduleSegments, StartPlan
from tessera.formulation.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """The facts of a round without its decisions. Numbers are in units of the objective."""

    cluster: str
    number: int  # 0 for a dry run
    epoch: int
    created_s: float
    options: dict[str, str | float | int | bool]
    status: str
    outcome: str  # committed, dry_run, refused
    objective: float
    bound: float
    gap: float
    placed_score: float
    greedy_objective: float
    verified: bool
    violations: tuple[str, ...]
    snapshot_digest: str
    solver: str
    work: tuple[tuple[str, float], ...]
    goals: tuple[GoalResult, ...]
    prices: dict[str, float]
    used_gpus: dict[str, int]
    seconds: dict[str, float]
    running: int
    waiting: int
    started: int
    suspended: int
    changed: int
    samples_per_s: float
    unit: str
    versions: tuple[str, ...]
    bound_is_trivial: bool = False  # nothing was proven, see GoalResult
    promises_due_s: float = math.inf  # when promised deadline schedules need the next round, or inf
    proved_by: str = ""  # of the last goal's bound, see GoalResult
    has_certificate: bool = False  # of the bound of any goal
    replanned: int = 0  # of the jobs that it changed
    policy_version: int = 0  # of the standing policy; 0 is that of the server's settings
    failures: tuple[str, ...] = ()  # of stages of the solver; the best verified answer stands


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision as stored, by names."""

    job: str
    kind: str
    allocation: AllocationRecord | None
    reason: Reason | None
    restart_price: float
    applied: bool
    skipped: str  # why it was not applied; "" if it was
    admitted: bool = False
    opportunistic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """A round with its decisions."""

    summary: RoundSummary
    decisions: tuple[DecisionRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRound:
    """The decision of one round on a job, as stored."""

    number: int
    created_s: float  # seconds since 1970
    kind: str
    code: str  # of the reason; "" if the job runs
    cell: str  # e.g. "4 x a100"; "" if the job does not run
    reason: Reason | None = None  # why the round decided so; None if the job runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommit:
    """The data of a round that the store commits, all or nothing."""

    snapshot: Snapshot
    encoded: bytes  # the snapshot's canonical JSON, by codec.encode
    decisions: tuple[Decision, ...]  # empty if the round was refused
    summary: RoundSummary
    schedule_segments: ScheduleSegments = NO_SEGMENTS  # the schedules of admitted jobs
    plan: StartPlan | None = None
    """The planned and promised starts of waiting jobs. With None, starts of earlier rounds stay in force."""
    request: Request | None = None
    network: NetworkOutcome | None = None  # None if the network is not described
    proof: RoundProof = NO_PROOF


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCommit:
    """A network plan made between rounds, for the allocations as they were in ``snapshot``."""

    snapshot: Snapshot
    outcome: NetworkOutcome
    cause: str  # start, end, topology, measured
    seconds: float  # duration of planning


def decision_record(snapshot: Snapshot, decision: Decision, skipped: str = "") -> DecisionRecord:
    """Return ``decision`` with names. ``skipped`` says why it was not applied, or is ""."""
    job, jobs = decision.job, snapshot.jobs
    allocation = None
    if decision.gang is not None:
        fresh = decision.kind in CHANGES_GPUS
        allocation = AllocationRecord(
            cell=snapshot.cell(decision.cell),
            rate=decision.rate,
            generation=int(jobs.generation[job]) + (1 if fresh else 0),
            shares=tuple((snapshot.nodes.name[n], gpus) for n, gpus in decision.gang.members),
        )
    return DecisionRecord(
        job=jobs.name[job],
        kind=decision.kind,
        allocation=allocation,
        reason=decision.reason,
        restart_price=decision.restart_price,
        applied=not skipped,
        skipped=skipped,
        admitted=decision.admitted,
        opportunistic=decision.opportunistic,
    )
