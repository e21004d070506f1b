"""A statement in the making: the columns that jobs may use, and the marks and rows that rules add.

Each rule of a round is a pure function ``Draft -> Draft``, named after the promise or limit that it
states (``tessera.formulation.round.promises``). It drops columns, marks jobs, or adds coupling rows.
``tessera.formulation.round.statement`` runs the rules in order and turns the last draft into arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.reasons import Reason
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import CouplingRow
from tessera.formulation.round.rates import (
    effective_weight,
    expected_rate,
    requested_rate,
    restart_share,
    unit_rate,
    work_left,
)
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.given_demand import demands_of_columns
from tessera.formulation.state.host_tables import Demands
from tessera.formulation.state.last_round import StartPlan
from tessera.formulation.state.replans import start_duration_s
from tessera.formulation.state.snapshot import Snapshot

_NONE = np.zeros(0, np.int64)


def do_not_check() -> None:
    """Do nothing: the answer is still wanted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowUse:
    """A coupling row with its users: columns, and jobs that use it by waiting.

    Neither a column nor a job occurs twice.
    """

    row: CouplingRow
    column: Ints  # int64[entries], index into the draft's columns
    amount: Ints  # int64[entries]
    idle_job: Ints = field(default_factory=lambda: _NONE)  # int64[idle entries]
    idle_amount: Ints = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """The columns of a round, and the facts known of its jobs. Arrays are never written to.

    Columns are grouped by job: those of job j are ``job_start[j] : job_start[j + 1]``.
    """

    snapshot: Snapshot
    policy: Policy
    admission: Admission | None = None  # None if the policy does not look ahead
    cells: Cells
    job_start: Ints  # int64[jobs + 1]
    cell: Ints  # int64[columns], index into cells
    current: Ints  # int64[jobs], the column that runs now and can go on unchanged, or -1
    must_run: Bools  # bool[jobs]
    least_rate: Floats  # float64[jobs], samples/s that placement must reach; 0 if any rate will do
    movable: Bools  # bool[jobs]
    rows: tuple[RowUse, ...] = ()
    absent: Mapping[int, Reason] = field(default_factory=dict)
    """Jobs that a rule has left without any column, each with the reason."""
    waived: frozenset[int] = frozenset()
    """Jobs whose promises cannot be kept in this round. Rules treat them as not promised."""
    rejected: frozenset[int] = frozenset()
    """Jobs of ``absent`` that can never run. They are dropped for good."""
    admits: frozenset[int] = frozenset()
    """Jobs whose deadlines are promised if they run in this round."""
    lapsed: frozenset[int] = frozenset()
    """Jobs whose deadlines were promised and can no longer be met."""
    plan: StartPlan | None = None
    """The planned starts of waiting jobs. It is None until a rule has made or taken it over."""
    witness: Ints | None = None
    """int64[jobs], a column or -1: an answer in which every job marked so far runs.

    It is None if no such answer is known.
    """
    check: Callable[[], None] = do_not_check
    """Raises an error once nobody waits for the statement any more. Long loops call it."""

    @cached_property
    def job(self) -> Ints:
        """Return the job of each column, int64[columns]."""
        return np.repeat(np.arange(len(self.current), dtype=np.int64), np.diff(self.job_start))

    @cached_property
    def starts(self) -> Bools:
        """Return whether each column is a start, move or resize (not current), bool[columns]."""
        out = np.ones(len(self.cell), dtype=np.bool_)
        out[self.current[self.current >= 0]] = False
        return out

    @cached_property
    def rate(self) -> Floats:
        """Return samples/s of each column at its Cell's own shape, float64[columns]."""
        return self.cells.rate[self.cell]

    @cached_property
    def end_s(self) -> Floats:
        """Return the end of each column's job if it runs there, float64[columns].

        Times are in seconds since 1970.
        """
        left_s = work_left(self.snapshot)[self.job] / self.rate
        restart_s = np.where(self.starts, self.snapshot.jobs.restart_s[self.job], 0.0)
        end_s: Floats = self.snapshot.now_s + restart_s + left_s
        return end_s

    @cached_property
    def demand(self) -> Demands:
        """Return the total demand of each column on nodes."""
        return demands_of_columns(self.snapshot.jobs, self.cells, self.job, self.cell)

    @property
    def gpus(self) -> Ints:
        """Return the GPUs of each column, int64[columns]."""
        return self.demand.gpus

    @cached_property
    def gpu_type(self) -> Ints:
        """Return the GPU type of each column, int64[columns]."""
        return self.cells.gpu_type[self.cell]

    @cached_property
    def unit_rate(self) -> Floats:
        """Return the rate u_j of one effective GPU (Eq. 6), float64[jobs].

        It is NaN for a job without Cells.
        """
        return unit_rate(self.snapshot, self.cells)

    @cached_property
    def nodes_owned(self) -> Ints:
        """Return the number of nodes on which each job owns GPUs, int64[jobs]."""
        return self.snapshot.nodes_owned()

    @cached_property
    def start_s(self) -> Floats:
        """Return the seconds that each job's last start takes, float64[jobs]."""
        return start_duration_s(self.snapshot)

    @cached_property
    def rate_as_asked(self) -> Floats:
        """Return samples/s of each job's best column with its request's GPUs, float64[jobs, types].

        It is 0 where there is no such column. Jobs that have more GPUs now may not have one before they
        have settled. Their Cells count.
        """
        jobs, types, cells = self.snapshot.jobs, len(self.snapshot.gpu_types), self.cells
        rates = np.zeros(len(jobs) * types)
        as_asked = np.flatnonzero(self.gpus == jobs.requested_gpus[self.job])
        key = self.job[as_asked] * types + self.gpu_type[as_asked]
        np.maximum.at(rates, key, self.rate[as_asked])
        for job in np.flatnonzero(jobs.current_gpus > jobs.requested_gpus).tolist():
            gpu_type = int(jobs.current_type[job])
            start, stop = np.searchsorted(
                cells.workload, jobs.workload[job] + np.arange(2)
            ).tolist()
            is_request = cells.gpu_type[start:stop] == gpu_type
            is_request &= cells.gpus[start:stop] == jobs.requested_gpus[job]
            best = float(cells.rate[start:stop][is_request].max(initial=0.0))
            rates[job * types + gpu_type] = max(rates[job * types + gpu_type], best)
        return rates.reshape(len(jobs), types)

    @cached_property
    def expected_rate(self) -> Floats:
        """Return the rate g_j of an equal share (Eq. 6b), float64[jobs].

        It is NaN for a job without Cells.
        """
        return expected_rate(self.snapshot, self.cells, self.weight)

    @cached_property
    def requested_rate(self) -> Floats:
        """Return the rate R_j of the request (Eq. 6c), float64[jobs].

        It is NaN for a job without Cells.
        """
        return requested_rate(self.snapshot, self.cells)

    @cached_property
    def restart_share(self) -> Floats:
        """Return the restart share s_j (Eq. 7), float64[jobs]."""
        return restart_share(self.snapshot, self.expected_rate, self.policy)

    @cached_property
    def weight(self) -> Floats:
        """Return the weight of each job with its tenant's and its priority's, float64[jobs]."""
        return effective_weight(self.snapshot, self.policy)

    @cached_property
    def promisable(self) -> Bools:
        """Return whether each job's promises can be kept, bool[jobs].

        Those of waived jobs and of profiling tasks cannot.
        """
        out = ~self.snapshot.profiling()
        out[list(self.waived)] = False
        return out

    @cached_property
    def has_columns(self) -> Bools:
        """Return the jobs that have a column, bool[jobs]."""
        return np.diff(self.job_start) > 0

    def columns_of(self, job: int) -> range:
        """Return the columns of ``job``."""
        return range(int(self.job_start[job]), int(self.job_start[job + 1]))

    def only(self, keep: Bools, why: Mapping[int, Reason] | None = None) -> Draft:
        """Return the draft with only the columns ``keep`` (bool[columns]).

        ``why`` has a reason for each job that thereby loses its last column. Such a job need not
        run any more.
        """
        if keep.all():
            return self
        position = np.cumsum(keep) - 1
        count = np.bincount(self.job[keep], minlength=len(self.current))
        job_start = np.append(0, np.cumsum(count)).astype(np.int64)
        stays = (self.current >= 0) & keep[self.current] if len(keep) else self.current >= 0
        lost = np.flatnonzero(self.has_columns & (count == 0)).tolist()
        reasons = dict(why or {})
        return replace(
            self,
            job_start=job_start,
            cell=self.cell[keep],
            current=np.where(stays, position[self.current], -1) if len(keep) else self.current,
            must_run=self.must_run & (count > 0),
            rows=tuple(_narrowed(row, keep, position, count) for row in self.rows),
            absent={**self.absent, **{job: reasons[job] for job in lost if job in reasons}},
            witness=_kept(self.witness, keep, position),
        )

    def without(self, jobs: Mapping[int, Reason]) -> Draft:
        """Return the draft without columns for ``jobs``, each with its reason."""
        if not jobs:
            return self
        out = np.zeros(len(self.current), dtype=np.bool_)
        out[list(jobs)] = True
        kept = self.only(~out[self.job], jobs)
        return replace(kept, absent={**jobs, **kept.absent})


def _kept(witness: Ints | None, keep: Bools, position: Ints) -> Ints | None:
    if witness is None or not len(keep):
        return witness
    return np.where((witness >= 0) & keep[witness], position[witness], -1)


def _narrowed(row: RowUse, keep: Bools, position: Ints, count: Ints) -> RowUse:
    used, idle = keep[row.column], count[row.idle_job] > 0
    return replace(
        row,
        column=position[row.column[used]],
        amount=row.amount[used],
        idle_job=row.idle_job[idle],
        idle_amount=row.idle_amount[idle],
    )


def find_losers(draft: Draft, keep: Bools) -> list[int]:
    """Return the jobs that have columns but would keep none."""
    kept = np.bincount(draft.job[keep], minlength=len(draft.current))
    losers: list[int] = np.flatnonzero(draft.has_columns & (kept == 0)).tolist()
    return losers
