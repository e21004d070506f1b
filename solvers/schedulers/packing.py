"""Shared parts of published schedulers: options (job, GPU type, count), and packing job by job."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.formulation.base.resources import NO_NEEDS, NOT_STATED, amounts_of
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.promises.launched import is_launched
from tessera.formulation.state.cells import most_compact_by_job
from tessera.formulation.state.host_tables import Demands
from tessera.solvers.schedulers.base import SchedulerView

Gain = Callable[[int, int], float]
"""A function that returns the gain from one option to another of the same job."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobOptions:
    """The options of jobs: one for each (job, GPU type, count), with the best execution plan there.

    If a job runs on that type and count already, the option is the Cell that it runs on. Options
    are grouped by job: those of job j are ``start[j] : start[j + 1]``, by type, then by rising
    count.
    """

    start: Ints  # int64[jobs + 1]
    column: Ints  # int64[options], column of the draft
    job: Ints  # int64[options]
    gpu_type: Ints  # int64[options]
    gpus: Ints  # int64[options]
    rate: Floats  # float64[options], samples/s
    current: Ints  # int64[jobs], the option that it holds now; -1 if none that is known to run
    requested_gpus: Ints  # int64[jobs]
    requested_gpu_type: Ints  # int64[jobs]; -1 for any
    demand: Demands  # of each option

    def __len__(self) -> int:
        """Return the number of options."""
        return len(self.column)

    @cached_property
    def runs(self) -> Bools:
        """Return whether each job runs on an option now, bool[jobs]."""
        runs: Bools = self.current >= 0
        return runs

    @cached_property
    def is_current(self) -> Bools:
        """Return whether each option is the one that its job runs on now, bool[options]."""
        is_current = np.zeros(len(self), dtype=np.bool_)
        is_current[self.current[self.runs]] = True
        return is_current

    @cached_property
    def as_requested(self) -> Bools:
        """Return whether each option has the count that its job requested, bool[options]."""
        as_requested: Bools = self.gpus == self.requested_gpus[self.job]
        return as_requested

    @cached_property
    def on_type(self) -> Bools:
        """Return whether each option is on a type that its job accepts, bool[options].

        That is the type that it requested, or any type if it requested none.
        """
        wanted = self.requested_gpu_type[self.job]
        on_type: Bools = (wanted < 0) | (self.gpu_type == wanted)
        return on_type

    @cached_property
    def next_larger(self) -> Ints:
        """Return each option's next larger count, int64[options]; -1 if it has none.

        It is an option of the same job and type.
        """
        larger = np.full(len(self), -1, dtype=np.int64)
        same = (self.job[1:] == self.job[:-1]) & (self.gpu_type[1:] == self.gpu_type[:-1])
        larger[:-1][same] = np.flatnonzero(same) + 1
        return larger

    @cached_property
    def smallest(self) -> Bools:
        """Return whether each option has the least count of its job on its type, bool[options]."""
        smallest = np.ones(len(self), dtype=np.bool_)
        smallest[self.next_larger[self.next_larger >= 0]] = False
        return smallest

    def of(self, job: int) -> range:
        """Return the options of ``job``."""
        return range(int(self.start[job]), int(self.start[job + 1]))

    def grouped(self, keep: Bools) -> list[list[int]]:
        """Return each job's options for which ``keep`` (bool[options]) is true, fastest first."""
        groups: list[list[int]] = [[] for _ in range(len(self.start) - 1)]
        picked = np.flatnonzero(keep)
        order = picked[np.lexsort((picked, -self.rate[picked], self.job[picked]))]
        for job, option in zip(self.job[order].tolist(), order.tolist(), strict=True):
            groups[job].append(option)
        return groups


def options_of(
    seen: SchedulerView, *, requested_only: bool = False, submitted: bool = False
) -> JobOptions:
    """Return the options of the jobs that may run.

    With ``requested_only``, only options with the count that their job requested or holds are
    included. With ``submitted``, a job has only the plan that it was submitted with, if that is
    recorded. Otherwise its plans are those on the fewest nodes of each count.
    """
    draft, jobs = seen.draft, seen.draft.snapshot.jobs
    count = len(jobs)
    allowed = runs_submitted_plan(draft) if submitted else are_compact(draft)
    if requested_only:
        of_job = jobs.requested_gpus[draft.job], jobs.current_gpus[draft.job]
        allowed = allowed & ((draft.gpus == of_job[0]) | (draft.gpus == of_job[1]))
    columns = np.flatnonzero(allowed)
    job, gpu_type, gpus = draft.job[columns], draft.gpu_type[columns], draft.gpus[columns]
    # Columns are sorted by job, then as Cells are, fastest first.
    first = np.ones(len(job), dtype=np.bool_)
    first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in (job, gpu_type, gpus)])
    best, group = np.flatnonzero(first), np.cumsum(first) - 1
    is_current = np.flatnonzero(columns == draft.current[job])
    best[group[is_current]] = is_current
    job, gpu_type, gpus, columns = job[best], gpu_type[best], gpus[best], columns[best]
    runs = is_launched(draft.snapshot) & (jobs.current_gpus > 0)
    holds = runs[job] & (gpu_type == jobs.current_type[job]) & (gpus == jobs.current_gpus[job])
    held = np.flatnonzero(holds)
    current = np.full(count, -1, dtype=np.int64)
    current[job[held]] = held
    return JobOptions(
        start=np.searchsorted(job, np.arange(count + 1)).astype(np.int64),
        column=columns,
        job=job,
        gpu_type=gpu_type,
        gpus=gpus,
        rate=draft.cells.rate[draft.cell[columns]],
        current=current,
        requested_gpus=jobs.requested_gpus,
        requested_gpu_type=jobs.requested_gpu_type,
        demand=draft.demand.at(columns),
    )


def runs_submitted_plan(draft: Draft) -> Bools:
    """Return the columns of the plan that their job was submitted with, bool[columns].

    A plan of the same kind, with another data-parallel degree, counts as the same. A job keeps all
    columns on the fewest nodes if its plan is not recorded, or has no column at its request. The
    column that a job runs on always counts.
    """
    jobs = draft.snapshot.jobs
    compact, plan = are_compact(draft), jobs.submitted_plan
    if (plan < 0).all():
        return compact
    kinds, owner = draft.snapshot.kinds_of_plans(), draft.job
    same = (plan[owner] >= 0) & (kinds[draft.cells.plan[draft.cell]] == kinds[plan][owner])
    wanted = jobs.requested_gpu_type[owner]
    asked = same & (draft.gpus == jobs.requested_gpus[owner])
    asked &= (wanted < 0) | (draft.gpu_type == wanted)
    has = np.bincount(owner[asked], minlength=len(plan)) > 0
    runs: Bools = np.where(has[owner], same, compact)
    runs[draft.current[draft.current >= 0]] = True
    return runs


def are_compact(draft: Draft) -> Bools:
    """Return the columns on the fewest nodes of their count, and those that run now."""
    if (draft.snapshot.jobs.submitted_plan < 0).all():  # there are no others
        return np.ones(len(draft.cell), dtype=np.bool_)
    compact = most_compact_by_job(draft.cells, draft.cell, draft.job)
    compact[draft.current[draft.current >= 0]] = True
    return compact


def host_capacity(seen: SchedulerView) -> list[list[float]]:
    """Return the amount of each host resource of each pool, [types][host resources].

    They are inf for a pool with a node that does not state them, which limits nothing.
    """
    nodes, capacity = seen.draft.snapshot.nodes, []
    for kind in range(len(seen.capacity)):
        pool = nodes.schedulable & (nodes.gpu_type == kind)
        of_pool = (column[pool] for column in amounts_of(nodes))
        capacity.append(
            [math.inf if (has == NOT_STATED).any() else float(has.sum()) for has in of_pool]
        )
    return capacity


class OptionPacking:
    """The GPUs given out so far: at most one option per job, and no more GPUs than exist.

    If ``hosts`` (``host_capacity``) is given, CPU cores and host memory are given out, too. They are
    counted by pool, so that placement may still find no nodes for what fits here.
    """

    def __init__(
        self, options: JobOptions, capacity: Ints, hosts: list[list[float]] | None = None
    ) -> None:
        self._options = options
        self._hosts = None
        if hosts is not None and not options.demand.of_gpus_alone:
            self._hosts = [list(pool) for pool in hosts]
            self._needs = np.stack(amounts_of(options.demand), 1).tolist()
        self._gpu_type, self._gpus = options.gpu_type.tolist(), options.gpus.tolist()
        self.free: list[int] = capacity.tolist()  # GPUs by type
        self.option: list[int] = [-1] * (len(options.start) - 1)  # by job; -1 if it has none
        self._job: list[int] = options.job.tolist()

    def fits(self, option: int) -> bool:
        """Return whether there is room for ``option`` once its job has returned its GPUs."""
        has, gpu_type = self.option[self._job[option]], self._gpu_type[option]
        returns = has >= 0 and self._gpu_type[has] == gpu_type
        returned = self._gpus[has] if returns else 0
        if self._gpus[option] > self.free[gpu_type] + returned:
            return False
        if self._hosts is None:
            return True
        back = self._needs[has] if returns else NO_NEEDS
        left, needs = self._hosts[gpu_type], self._needs[option]
        return all(need <= rest + own for need, rest, own in zip(needs, left, back, strict=True))

    def take(self, option: int) -> bool:
        """Give the job of ``option`` that option in place of its present one, if there is room.

        Return whether there was.
        """
        if not self.fits(option):
            return False
        self.give_back(self._job[option])
        self.free[self._gpu_type[option]] -= self._gpus[option]
        self._move_hosts(option, -1)
        self.option[self._job[option]] = option
        return True

    def take_first(self, options: Iterable[int]) -> bool:
        """Take the first of ``options`` for which there is room; return whether there was one."""
        return any(self.take(option) for option in options)

    def give_back(self, job: int) -> None:
        """Take its GPUs from ``job``."""
        has = self.option[job]
        if has >= 0:
            self.free[self._gpu_type[has]] += self._gpus[has]
            self._move_hosts(has, 1)
            self.option[job] = -1

    def _move_hosts(self, option: int, sign: int) -> None:
        """Give back (1) or take (-1) the CPU cores and the host memory of an option."""
        if self._hosts is not None:
            left = self._hosts[self._gpu_type[option]]
            for resource, need in enumerate(self._needs[option]):
                left[resource] += sign * need

    def keep_running(self) -> None:
        """Let jobs keep their options, in their order if lost nodes leave too little room."""
        options = self._options
        now = options.current[options.runs]
        held = np.bincount(options.gpu_type[now], options.gpus[now], len(self.free)).astype(
            np.int64
        )
        idle = max(self.option, default=-1) < 0 and self._hosts is None
        if idle and (held <= self.free).all():  # all together
            self.free = (np.array(self.free) - held).tolist()
            self.option = options.current.tolist()
            return
        for option in now.tolist():
            self.take(option)

    def grow(self, gain: Gain) -> None:
        """Spend free GPUs on the next larger counts of jobs that have GPUs, greatest gain first.

        A step is taken if it fits and its gain is positive; of equal gains, the earlier job's is
        first.
        """
        larger = self._options.next_larger.tolist()
        queue: list[tuple[float, int, int]] = []

        def offer(option: int) -> None:
            step = larger[option]
            if step >= 0 and (value := gain(option, step)) > 0:
                heapq.heappush(queue, (-value, self._job[step], step))

        for option in self.option:
            if option >= 0:
                offer(option)
        while queue:
            _, _, step = heapq.heappop(queue)
            if self.take(step):
                offer(step)

    @property
    def choice(self) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        option = np.array(self.option, dtype=np.int64)
        if not len(self._options):
            return option
        return np.where(option >= 0, self._options.column[option], -1)
