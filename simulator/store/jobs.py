"""The jobs of a world: what is stored of each, and how their ends free others or break them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.formulation.base.resources import GIVEN_PREFIX, HOST_NAMES, NOT_STATED, amounts_of
from tessera.formulation.base.tables import Bools, Floats, Ints, array_columns
from tessera.formulation.base.values import CellKey
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.decayed_use import Stint
from tessera.formulation.state.snapshot import STATE_CODE, WITHOUT_CELL, Dependencies, Jobs
from tessera.simulator.scenario import EPOCH_S
from tessera.simulator.store.names import Names
from tessera.simulator.store.waiting import WaitingJobs, number_limited_arrays

_QUEUED, _RUNNING = STATE_CODE[JobState.QUEUED], STATE_CODE[JobState.RUNNING]

_STORED_COLUMNS = (
    "version",
    "state",
    "workload",
    "iterations",
    "requested_gpu_type",
    "deadline_s",
    "admitted",
    "opportunistic",
    "start_by_s",
    "submit_s",
    "queued_s",
    "restart_s",
    "generation",
    *Jobs.CELL,
    *(GIVEN_PREFIX + name for name in HOST_NAMES),
    "unmet",
    "array",
    "array_limit",
)
"""The columns of a snapshot's jobs that are stored exactly as the snapshot shows them."""

_STATED_COLUMNS = {f.name for f in fields(JobSpec)} & array_columns(Jobs).keys() - {
    "workload",
    "plan",
    "submitted_plan",
    *_STORED_COLUMNS,
}
"""The columns that users state. They never change."""


class StoredJobs:
    """The jobs of a world and their columns, each [jobs]. A job is an index into ``specs``.

    Most columns are those of ``Jobs``. ``live`` has the jobs that have arrived and not ended, in
    order. Methods take times in seconds since the world began, as ``began_s`` and ``ended_s`` are.
    """

    def __init__(
        self,
        specs: Sequence[JobSpec],
        names: Names,
        arrival_s: Floats,
        restart_s: Floats,
        selectors: Mapping[str, Ints],
    ) -> None:
        """Set up jobs that have not arrived yet.

        ``arrival_s`` and ``restart_s`` are float64[jobs], the seconds from the beginning to a job's
        arrival, and those that a restart takes. ``selectors`` has the columns of ``Jobs`` on them.
        """
        self.specs = specs
        self.live: list[int] = []
        self._waits = WaitingJobs(specs)
        self.unmet = self._waits.unmet
        self.array, self.array_limit = number_limited_arrays(specs)
        self._stated = {**_stated_columns(specs, names), **selectors}
        self._set_up_fixed(names, arrival_s, restart_s)
        self._set_up_changing()

    def _set_up_fixed(self, names: Names, arrival_s: Floats, restart_s: Floats) -> None:
        """Set up the columns that never change, except for the submission of profiling tasks."""
        specs, types = self.specs, names.type_indices()
        workloads = {w: i for i, w in enumerate(names.workloads)}
        self._names = np.array([s.name for s in specs], dtype=object)
        self._tenants = np.array([s.tenant for s in specs], dtype=object)
        self.workload = np.array([workloads[s.workload] for s in specs], dtype=np.int64)
        self.requested_gpu_type = np.array(
            [types[s.requested_gpu_type] for s in specs], dtype=np.int64
        )
        self.iterations = np.array([float(s.iterations) for s in specs])
        self.deadline_s = EPOCH_S + arrival_s + np.array([s.deadline_s for s in specs])
        self.submit_s = EPOCH_S + arrival_s
        self.restart_s = np.array(restart_s)
        self._longest_run_s = np.array([s.longest_run_s for s in specs], dtype=np.float64)

    def _set_up_changing(self) -> None:
        count = len(self.specs)
        self.state = np.full(count, STATE_CODE[JobState.HELD], dtype=np.int64)  # not yet arrived
        self.queued_s = np.array(self.submit_s)
        self.began_s = np.full(count, np.nan)  # time at which it got its GPUs; NaN: it has none
        self.ended_s = np.full(count, np.inf)
        self.done = np.zeros(count)  # iterations
        self.service_gpu_s = np.zeros(count)  # of the runs that have ended
        self.run_s = np.zeros(count)  # duration of the runs that have ended
        self.admitted = np.zeros(count, dtype=np.bool_)
        self.promised = np.zeros(count, dtype=np.bool_)  # its deadline was admitted at some time
        self.opportunistic = np.zeros(count, dtype=np.bool_)
        self.start_by_s = np.full(count, np.inf)
        self.first_start_by_s = np.full(count, np.inf)  # the first that was promised
        self.version = np.ones(count, dtype=np.int64)
        self.generation = np.zeros(count, dtype=np.int64)
        self.current_type = np.full(count, -1, dtype=np.int64)
        self.current_gpus = np.zeros(count, dtype=np.int64)
        self.current_degree = np.zeros(count, dtype=np.int64)
        self.current_plan = np.zeros(count, dtype=np.int64)
        for name in HOST_NAMES:
            setattr(self, GIVEN_PREFIX + name, np.full(count, NOT_STATED, dtype=np.int64))

    # changes

    def arrive(self, job: int, now_s: float) -> bool:
        """Queue a job that arrives. Return whether it can ever start."""
        self.state[job] = _QUEUED
        self.queued_s[job] = EPOCH_S + now_s
        insort(self.live, job)
        return not self._waits.is_broken(job)

    def queue(self, job: int, now_s: float) -> None:
        """Queue a job that has lost its GPUs."""
        self.state[job] = _QUEUED
        self.queued_s[job] = EPOCH_S + now_s
        self.version[job] += 1

    def start(self, job: int, cell: CellKey, needs: tuple[int, ...], now_s: float) -> None:
        """Let a job run on a Cell, with these amounts of host resources."""
        self.state[job] = _RUNNING
        self.start_by_s[job] = np.inf
        self.began_s[job] = now_s
        self.generation[job] += 1
        self.version[job] += 1
        for column, value in zip(Jobs.CELL, cell, strict=True):
            getattr(self, column)[job] = value
        for column, amount in zip(amounts_of(self, GIVEN_PREFIX), needs, strict=True):
            column[job] = amount

    def stop(self, job: int, now_s: float) -> None:
        """Count the run of a job that has had its GPUs until now. Its state stays."""
        self.service_gpu_s[job] += self.current_gpus[job] * (now_s - self.began_s[job])
        self.run_s[job] += now_s - self.began_s[job]
        self.began_s[job] = np.nan
        for column, value in WITHOUT_CELL.items():
            getattr(self, column)[job] = value

    def end(self, job: int, state: JobState, now_s: float) -> list[int]:
        """End a live job that has no GPUs. Return the jobs that can never start because of that."""
        self.state[job] = STATE_CODE[state]
        self.ended_s[job] = now_s
        self.live.remove(job)
        freed, broken = self._waits.end(job, succeeded=state is JobState.SUCCEEDED)
        self.queued_s[freed] = EPOCH_S + now_s
        return broken

    # facts

    def is_queued(self, job: int) -> bool:
        """Return whether a job waits for GPUs."""
        return bool(self.state[job] == _QUEUED)

    def has_trained(self, job: int) -> bool:
        """Return whether a job has trained all of its iterations."""
        return bool(self.done[job] >= self.iterations[job])

    def live_below(self, job: int) -> int:
        """Return how many live jobs have a smaller index than ``job``."""
        return bisect_left(self.live, job)

    def run_left_s(self, job: int) -> float:
        """Return the seconds for which a job may hold GPUs after the runs that have ended, or inf."""
        return max(0.0, float(self._longest_run_s[job] - self.run_s[job]))

    def cell(self, job: int) -> CellKey:
        """Return the Cell on which a job runs."""
        return CellKey._make(int(getattr(self, column)[job]) for column in Jobs.CELL)

    def host_needs(self, job: int) -> tuple[int, ...]:
        """Return the amounts of host resources that a job was given with its Cell."""
        return tuple(int(amount[job]) for amount in amounts_of(self, GIVEN_PREFIX))

    def stint(self, job: int) -> Stint:
        """Return what a job with GPUs holds."""
        return Stint(
            tenant=self.specs[job].tenant,
            gpu_type=int(self.current_type[job]),
            gpus=int(self.current_gpus[job]),
            needs=tuple(max(0, amount) for amount in self.host_needs(job)),
            began_s=EPOCH_S + float(self.began_s[job]),
        )

    def dependencies(self, local: Ints) -> Dependencies:
        """Return the dependencies of the jobs in a snapshot that are on others in it.

        ``local`` is int64[jobs], the index of each job in the snapshot, or -1.
        """
        return self._waits.table(local)

    def table(self, shown: Ints, are_known: Bools, now_s: float) -> Jobs:
        """Return the jobs ``shown`` as a table of a snapshot.

        ``are_known`` is bool[workloads], whether a workload has estimates.
        """
        began_s = self.began_s[shown]
        holds = np.isfinite(began_s)
        held_s = np.where(holds, now_s - began_s, 0.0)
        return Jobs(
            name=tuple(self._names[shown]),
            tenant=tuple(self._tenants[shown]),
            iterations_left=np.maximum(self.iterations[shown] - self.done[shown], 0.0),
            service_gpu_s=self.service_gpu_s[shown] + self.current_gpus[shown] * held_s,
            since_s=np.where(holds, EPOCH_S + began_s, 0.0),
            run_left_s=np.maximum(self._longest_run_s[shown] - self.run_s[shown] - held_s, 0.0),
            unestimated=~are_known[self.workload[shown]],
            **{name: getattr(self, name)[shown] for name in _STORED_COLUMNS},
            **{name: column[shown] for name, column in self._stated.items()},
        )


def _stated_columns(specs: Sequence[JobSpec], names: Names) -> dict[str, NDArray[Any]]:
    """Return the columns that users state, with plans as indices into those of ``names``."""
    columns: dict[str, NDArray[Any]] = {
        name: np.array([getattr(s, name) for s in specs], dtype=dtype)
        for name, dtype in array_columns(Jobs).items()
        if name in _STATED_COLUMNS
    }
    plans = {digest: i for i, digest in enumerate(names.plans)}
    stated = [plans[s.plan.digest] if s.plan else -1 for s in specs]
    submitted = [plans[s.submitted_plan_id] if s.submitted_plan_id else -1 for s in specs]
    columns["plan"] = np.array(stated, dtype=np.int64)
    columns["submitted_plan"] = np.array(submitted, dtype=np.int64)
    return columns
