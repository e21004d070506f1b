"""The records of what a hypothetical change would do, now and over the next hours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.values import Cell
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.forecasts import Band


class JobEffect(StrEnum):
    """The difference that a change makes to a job in the next round, the gravest first."""

    ADDED = "added"  # the job is only there with the change
    REMOVED = "removed"  # the job is only there without the change
    STOPS = "stops"  # it runs only without the change
    STARTS = "starts"  # it runs only with the change
    RETYPES = "retypes"  # it runs on another GPU type
    RESIZES = "resizes"  # it runs on another number of GPUs
    REPLANS = "replans"  # it runs by another plan on as many GPUs of its type
    MOVES = "moves"  # it moves to other GPUs, or no longer does
    RATE = "rate"  # it runs on its Cell at another rate, since its nodes differ
    REASON = "reason"  # it waits in both, but for another reason
    NONE = ""  # nothing that its user would notice


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutlook:
    """The decision of a round on a job. ``cell`` is None, and ``rate`` 0, if the job does not run.

    ``rate`` is in samples/s. ``reason`` says why it waits.
    """

    kind: DecisionKind
    cell: Cell | None = None
    rate: float = 0.0
    reason: Reason | None = None

    @property
    def code(self) -> str:
        """Return the code of the reason why the job waits, or ""."""
        return "" if self.reason is None else self.reason.code


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDifference:
    """The difference that the change makes to a job now. A side is None if the job is not there."""

    job: str
    tenant: str
    effect: JobEffect
    before: JobOutlook | None
    after: JobOutlook | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOutlook:
    """The state of a cluster after a round.

    ``effective_gpus`` is the normalised throughput: the sum of the rates of all jobs, each over that
    of one GPU at the workload's most efficient Cell (Eq. 6). ``gpus`` and ``used_gpus`` are by GPU
    type. ``objective`` is in ``unit``.
    """

    running: int
    waiting: int
    gpus: Mapping[str, int]
    used_gpus: Mapping[str, int]
    effective_gpus: float
    samples_per_s: float
    objective: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDifference:
    """The difference between the next rounds without and with a change.

    ``jobs`` has those that differ, the gravest effects first; ``unchanged`` counts the others. The
    objectives can be compared only if both rounds have the same one, and the same weights.
    """

    before: ClusterOutlook
    after: ClusterOutlook
    jobs: tuple[JobDifference, ...]
    unchanged: int
    same_objective: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedFigure:
    """A figure of sampled futures without and with a change, each pair with the same chance.

    ``before`` and ``after`` are means, and ``change`` is the mean of the differences of the pairs.
    One more pair has its difference between ``low`` and ``high`` with probability ``COVERAGE``.
    """

    before: float
    after: float
    change: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHours:
    """The forecast start and finish of a job, without and with the change.

    A band is None if the job does not wait, is not there, or has no forecast.
    """

    job: str
    start_before: Band | None = None
    start_after: Band | None = None
    finish_before: Band | None = None
    finish_after: Band | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoursDifference:
    """The difference that a change makes over the next ``horizon_s`` seconds, in paired futures.

    ``soon_throughput`` is in effective GPUs, and ``soon_waiting`` counts jobs that wait: both once the
    round after the change is carried out. ``mean_wait_s`` is the mean time for which jobs wait. For
    waiting, the jobs count that are there in both, and arrivals. ``work`` is in effective GPU-hours,
    and ``finished`` counts jobs.
    """

    horizon_s: float
    futures: int
    soon_throughput: PairedFigure
    soon_waiting: PairedFigure
    mean_wait_s: PairedFigure
    work: PairedFigure
    finished: PairedFigure
    jobs: tuple[JobHours, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOffer:
    """The Cell that an added job gets in the next round, compared with the second-best one.

    ``cell`` is None if the job waits, with ``reason``. ``runner_up`` is None without another Cell,
    or if the objective has no common unit. ``worse_by``, ``price`` and ``value`` are in ``unit``;
    they are NaN if they are not known. ``stopped`` and ``slowed`` are (job, tenant) of those that
    lose by it.
    """

    job: str
    cell: Cell | None = None
    rate: float = 0.0
    runner_up: Cell | None = None
    runner_up_rate: float = 0.0
    worse_by: float = math.nan
    price: float = math.nan
    value: float = math.nan
    unit: str = ""
    stopped: tuple[tuple[str, str], ...] = ()
    slowed: tuple[tuple[str, str], ...] = ()
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswer:
    """The answer to a question, on the state at ``created_s`` (since 1970).

    ``hours`` is None if no futures were followed. ``notes`` say what the answer leaves out.
    """

    created_s: float
    now: RoundDifference
    hours: HoursDifference | None = None
    offers: tuple[JobOffer, ...] = ()
    notes: tuple[str, ...] = ()
