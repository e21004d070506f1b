"""Morphling's scheduler (section 5, Algorithm 1), published again as Rubick, on GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.promises.launched import is_launched
from tessera.formulation.tables import Bools, Ints
from tessera.solvers.schedulers.allowance import Allowance
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.curves import SensitivityCurve, curve_of
from tessera.solvers.schedulers.packing import JobOptions, options_of
from tessera.solvers.schedulers.slots import jobs_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Morphling:
    """A scheduler that serves guaranteed jobs first, and the rest by the slope of their curves.

    A guaranteed job gets the least demand that reaches its request's rate. Each job has a resource
    sensitivity curve: its best rate at each GPU count, flat where no execution plan runs
    (``tessera.solvers.schedulers.curves``), in shares of its reference rate. A slope is a change of
    the curve per GPU.

    (1) Waiting guaranteed jobs are privileged while their minima fit their tenant's quota. They
    take idle GPUs, then GPUs of the least sensitive jobs that hold more than their minimum. (2)
    Waiting best-effort jobs and all running jobs follow, steepest first. Each climbs its curve on
    idle GPUs, then on GPUs of jobs with lower slopes. A best-effort job has no minimum, so it may
    be suspended. A job that ends below its minimum does not run.

    The paper leaves some points open. These choices were made:

    * GPUs are the only resource that is traded. CPU cores and host memory (lines 9 and 22) are
      fixed with a Cell, if it states them; nodes (line 7) are left to placement.
    * Morphling knows one GPU type. A job climbs the curve of the type that it runs on, or else of
      the type that it requested. If it takes any type, or has no Cell there, it climbs the curve on
      which its first step is steepest, types with room for it first.
    * One unit of resource is a step to the next count of the curve at which a plan runs. GPUs are
      gathered for a whole step or not at all. If a victim's step frees more, the rest is idle.
    * The submitted plan is not recorded, so the request's rate is that of the best plan there, or
      of the plan that the job runs by. Therefore the minimum differs from the request only if fewer
      GPUs are at least as fast. A guaranteed job with no Cell within its request waits; if it runs
      nevertheless, it keeps its least Cell.
    * A guaranteed job that runs below its minimum (because of another scheduler, or because nodes
      were lost) is raised to it first. The quotas are charged with the minima of all guaranteed
      jobs that run.
    * Slopes are unweighted. The artifact's guard against starvation is not in the paper, and left
      out.

    There are three variants (section 7.3). Without ``plans`` (Morphling-R), a job has only Cells of
    its plan and pipeline degree, at any count. If neither was recorded, it is the best plan at each
    count. Without ``resources`` (Morphling-E), it has only Cells of its count. Without both
    (Morphling-N), Algorithm 1 decides only which jobs run.
    """

    name: str = "morphling"
    resources: bool = True
    plans: bool = True

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        keep = self._reachable(seen.draft)
        options = options_of(replace(seen, draft=seen.draft.only(keep)))
        choice = _Round(seen, options).decide()
        return np.where(choice >= 0, np.flatnonzero(keep)[choice], -1) if keep.any() else choice

    def _reachable(self, draft: Draft) -> Bools:
        """Return the columns that the variant leaves, bool[columns]."""
        jobs, keep = draft.snapshot.jobs, np.ones(len(draft.cell), dtype=np.bool_)
        if not self.resources:
            holds = is_launched(draft.snapshot) & (jobs.current_gpus > 0)
            count = np.where(holds, jobs.current_gpus, jobs.requested_gpus)
            keep &= draft.gpus == count[draft.job]
        if not self.plans:
            key = draft.cells.pipeline_degree[draft.cell] * len(draft.snapshot.plans)
            key = key + draft.cells.plan[draft.cell]
            keep &= key == _own_plan(draft, key)[draft.job]
        return keep


def _own_plan(draft: Draft, key: Ints) -> Ints:
    """Return the ``key`` (int64[columns]) of the plan that each job runs by or was submitted with.

    For a job that does not run, it is that of its fastest Cell at the requested count (and type, if
    it has one there), or of its fastest Cell of all.
    """
    jobs, owner = draft.snapshot.jobs, draft.job
    as_requested = draft.gpus == jobs.requested_gpus[owner]
    on_type = draft.gpu_type == jobs.requested_type[owner]
    order = np.lexsort((draft.rate, as_requested & on_type, as_requested, owner))
    own_key = np.full(len(jobs), -1, dtype=np.int64)
    # The last write for each job stays: the column that sorts highest.
    own_key[owner[order]] = key[order]
    runs = draft.current >= 0
    own_key[runs] = key[draft.current[runs]]
    return own_key


class _Round:
    """Algorithm 1: the position of each job on its curve, and the idle GPUs."""

    def __init__(self, seen: SchedulerView, options: JobOptions) -> None:
        self._seen, self._options = seen, options
        self._free: list[int] = seen.capacity.tolist()
        count = len(options.current)
        self._curves: dict[int, SensitivityCurve] = {
            job: curve
            for job in range(count)
            if (curve := curve_of(seen, options, job, self._free)) is not None
        }
        self._at = [-1] * count  # position on the curve; -1 without GPUs
        self._give_slope = np.full((len(self._free), count), np.inf)  # of a step down, by type
        for job in np.flatnonzero(options.runs).tolist():
            if (
                self._curves[job].gpus[self._curves[job].start]
                <= self._free[self._curves[job].gpu_type]
            ):
                self._move(job, self._curves[job].start)

    def decide(self) -> Ints:
        """Return the column (of the options' draft) of each job, int64[jobs]; -1 if it waits."""
        for job in self._privileged():
            self._schedule(job)
        guaranteed = self._seen.draft.snapshot.jobs.guaranteed
        rest = [
            (-self._slope(job), place, job)
            for place, job in enumerate(jobs_in_order(self._seen).tolist())
            if job in self._curves and (self._at[job] >= 0 or not guaranteed[job])
        ]
        for _, _, job in sorted(rest):
            self._schedule(job)
        choice = np.full(len(self._at), -1, dtype=np.int64)
        for job, curve in self._curves.items():
            if self._at[job] >= 0:
                choice[job] = self._options.column[curve.options[self._at[job]]]
        return choice

    def _privileged(self) -> list[int]:
        """Return the guaranteed jobs to be served first.

        They are running ones below their minimum, and then waiting ones whose minima fit the
        quotas, by arrival.
        """
        jobs, allowance = self._seen.draft.snapshot.jobs, Allowance(self._seen.draft.snapshot)
        waiting = [j for j in jobs_in_order(self._seen).tolist() if self._at[j] < 0]
        raised = []
        for job in np.flatnonzero(jobs.guaranteed & (np.array(self._at) >= 0)).tolist():
            curve = self._curves[job]
            allowance.charge(jobs.tenant[job], curve.gpu_type, curve.held(curve.minimum))
            if self._at[job] < curve.minimum:
                raised.append(job)
        return raised + [
            job
            for job in waiting
            if jobs.guaranteed[job]
            and (known := self._curves.get(job)) is not None
            and known.possible
            and allowance.claim(jobs.tenant[job], known.gpu_type, known.held(known.minimum))
        ]

    def _schedule(self, job: int) -> None:
        """Serve one job (ScheduleJob): climb while GPUs are idle or may be taken."""
        self._seen.check()
        curve = self._curves[job]
        while (to := curve.next(self._at[job])) >= 0 and self._climb(job, to):
            pass
        if self._at[job] < curve.minimum:
            self._move(job, -1)

    def _climb(self, job: int, to: int) -> bool:
        """Take the step to position ``to``, shrinking others for it.

        Return whether it was taken.
        """
        curve, slope = self._curves[job], self._slope(job)
        below = self._at[job] < curve.minimum
        takes = curve.held(to) - curve.held(self._at[job])
        give = self._give_slope[curve.gpu_type]
        own, give[job] = give[job], np.inf
        shrunk: list[tuple[int, int]] = []
        while self._free[curve.gpu_type] < takes:
            victim = int(np.argmin(give))
            if give[victim] == np.inf or not (below or slope > give[victim]):
                for other, before in reversed(shrunk):
                    self._move(other, before)
                give[job] = own
                return False
            shrunk.append((victim, self._at[victim]))
            self._move(victim, self._at[victim] - 1)
        self._move(job, to)
        return True

    def _slope(self, job: int) -> float:
        """Return the gain per GPU of the next step up, or 0 without such a step."""
        curve, at = self._curves[job], self._at[job]
        to = curve.next(at)
        if to < 0:
            return 0.0
        return (curve.worth(to) - curve.worth(at)) / (curve.held(to) - curve.held(at))

    def _move(self, job: int, to: int) -> None:
        curve = self._curves[job]
        self._free[curve.gpu_type] -= curve.held(to) - curve.held(self._at[job])
        self._at[job] = to
        down = np.inf
        if to > curve.minimum:
            down = (curve.worth(to) - curve.worth(to - 1)) / (curve.held(to) - curve.held(to - 1))
        self._give_slope[curve.gpu_type][job] = down
