"""Morphling's scheduler (section 5, Algorithm 1), published again as Rubick."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.answer.sensitivity import Resource, SensitivityCurve
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.promises.launched import is_launched
from tessera.solvers.schedulers.allowance import Allowance
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.curves import curves_of
from tessera.solvers.schedulers.packing import are_compact, host_capacity, runs_submitted_plan
from tessera.solvers.schedulers.slots import jobs_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Morphling:
    """A scheduler that serves guaranteed jobs first, and the rest by the slope of their curves.

    A guaranteed job gets the least demand with which any execution plan reaches the rate of the
    plan that it was submitted with, on its request. Each job has a resource sensitivity curve: its
    best rate at each number of GPUs and CPU cores, flat where no execution plan runs
    (``tessera.formulation.answer.sensitivity``), in shares of its reference rate. A slope is a change of
    the curve per GPU or per core.

    (1) Waiting guaranteed jobs are privileged while their minima fit their tenant's quota. They
    take idle resources, then those of the least sensitive jobs that hold more than their minimum.
    (2) Waiting best-effort jobs and all running jobs follow, steepest first: by the slope of GPUs,
    then of CPU cores. Each climbs its curve on idle GPUs, then on GPUs of jobs with lower slopes,
    and then in the same way on CPU cores. A best-effort job has no minimum, so it may be suspended.
    A job that ends below its minimum does not run. (3) Host memory is allocated last, in the order
    in which jobs were served. A job whose plan gets too little does not run.

    The paper leaves some points open. These choices were made:

    * Resources are those of a pool. Nodes (line 7) are left to placement. CPU cores and host memory
      limit nothing in a pool with a node that does not state them.
    * Morphling knows one GPU type. A job climbs the curve of the type that it runs on, or else of
      the type that it requested. If it takes any type, or has no Cell there, it climbs the curve on
      which its first step is steepest, types with room for it first.
    * One unit of resource is a step to the next point of the curve at which a plan runs. Resources
      are gathered for a whole step or not at all. If a victim's step frees more, the rest is idle.
      A job holds exactly what the plan of its point needs, so that a step to more GPUs may also
      take idle CPU cores, or free some.
    * The minimum has the fewest GPUs, then the fewest cores, then the least memory. It has at most
      the cores that the job requested, or those that its plan needs there. If it is not recorded
      with which plan a job was submitted, the request's rate is that of the best plan within the
      request. A guaranteed job with no Cell within its request waits; if it runs nevertheless, it
      keeps its least Cell. A guaranteed job may hold other resources than its minimum if a plan
      reaches its rate with them, and they have no fewer GPUs.
    * A guaranteed job that runs below its minimum (because of another scheduler, or because nodes
      were lost) is raised to it first. The quotas are charged with the minima of all guaranteed
      jobs that run.
    * Slopes are unweighted. The artifact's guard against starvation is not in the paper, and left
      out.

    There are three variants (section 7.3). Without ``plans`` (Morphling-R), a job has only Cells of
    the plan that it was submitted with, at any count. A 3D plan keeps its tensor and pipeline
    degrees, and only its data-parallel degree changes, as in the paper. If no plan was recorded, it
    is the plan and pipeline degree that the job runs by, or the best of the request. Without
    ``resources`` (Morphling-E), it has only Cells of its count. Without both (Morphling-N),
    Algorithm 1 decides only which jobs run.
    """

    name: str = "morphling"
    resources: bool = True
    plans: bool = True

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        return _Round(seen, self._reachable(seen.draft)).decide()

    def _reachable(self, draft: Draft) -> Bools:
        """Return the columns that the variant leaves, bool[columns]."""
        jobs = draft.snapshot.jobs
        keep = are_compact(draft) if self.plans else _of_own_plan(draft)
        if not self.resources:
            holds = is_launched(draft.snapshot) & (jobs.current_gpus > 0)
            count = np.where(holds, jobs.current_gpus, jobs.requested_gpus)
            keep = keep & (draft.gpus == count[draft.job])
        return keep


def _of_own_plan(draft: Draft) -> Bools:
    """Return the columns of the plan that jobs were submitted with, or else run by."""
    key = draft.cells.pipeline_degree[draft.cell] * len(draft.snapshot.plans)
    key = key + draft.cells.plan[draft.cell]
    own: Bools = key == _own_plan(draft, key)[draft.job]
    recorded = draft.snapshot.jobs.submitted_plan >= 0
    return np.where(recorded[draft.job], runs_submitted_plan(draft), own & are_compact(draft))


def _own_plan(draft: Draft, key: Ints) -> Ints:
    """Return the ``key`` (int64[columns]) of the plan that each job runs by or was submitted with.

    For a job that does not run, it is that of its fastest Cell at the requested count (and type, if
    it has one there), or of its fastest Cell of all.
    """
    jobs, owner = draft.snapshot.jobs, draft.job
    as_requested = draft.gpus == jobs.requested_gpus[owner]
    on_type = draft.gpu_type == jobs.requested_gpu_type[owner]
    order = np.lexsort((draft.rate, as_requested & on_type, as_requested, owner))
    own_key = np.full(len(jobs), -1, dtype=np.int64)
    # The last write for each job stays: the column that sorts highest.
    own_key[owner[order]] = key[order]
    runs = draft.current >= 0
    own_key[runs] = key[draft.current[runs]]
    return own_key


class _Round:
    """Algorithm 1: the position of each job on its curve, and the idle resources."""

    def __init__(self, seen: SchedulerView, allowed: Bools) -> None:
        self._seen, count = seen, len(seen.draft.current)
        hosts = host_capacity(seen)
        gpus = seen.capacity.tolist()
        self._idle: list[list[float]] = [
            [n, cpus] for n, (cpus, *_) in zip(gpus, hosts, strict=True)
        ]
        # What is left of the other host resources, by type.
        self._other_left = [amounts for _, *amounts in hosts]
        self._curves = curves_of(seen, allowed)
        self._at = [-1] * count  # position on the curve; -1 without GPUs
        # The slope of a step down, by resource and type, float64[jobs]; inf if there is no step.
        self._give_slope = np.full((len(Resource), len(gpus), count), np.inf)
        self._has_cpus = bool(seen.draft.demand.cpus.any())
        for job, curve in self._curves.items():
            if curve.start >= 0 and self._fits(curve, curve.start):
                self._move(job, curve.start)

    def decide(self) -> Ints:
        """Return the column of each job, int64[jobs]; -1 if it waits."""
        privileged = self._privileged()
        for job in privileged:
            self._schedule(job)
        guaranteed = self._seen.draft.snapshot.jobs.guaranteed
        rest = sorted(
            (*(-slope for slope in self._slopes(job)), place, job)
            for place, job in enumerate(jobs_in_order(self._seen).tolist())
            if job in self._curves and (self._at[job] >= 0 or not guaranteed[job])
        )
        for _, _, _, job in rest:
            self._schedule(job)
        return self._allocate_memory([*privileged, *(job for *_, job in rest)])

    def _allocate_memory(self, order: list[int]) -> Ints:
        """Return the column of each job that gets the host memory of its plan (AllocMem)."""
        choice = np.full(len(self._at), -1, dtype=np.int64)
        served = dict.fromkeys(order)
        guaranteed = self._seen.draft.snapshot.jobs.guaranteed
        for job in sorted(served, key=lambda j: not guaranteed[j]):
            if self._at[job] < 0:
                continue
            curve = self._curves[job]
            point = curve.points[self._at[job]]
            free = self._other_left[curve.gpu_type]
            if all(need <= amount for need, amount in zip(point.other_needs, free, strict=True)):
                self._other_left[curve.gpu_type] = [
                    amount - need for need, amount in zip(point.other_needs, free, strict=True)
                ]
                choice[job] = point.column
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
            allowance.charge(jobs.tenant[job], curve.gpu_type, curve.held(curve.minimum)[0])
            if not curve.may_end(self._at[job]):
                raised.append(job)
        return raised + [
            job
            for job in waiting
            if jobs.guaranteed[job]
            and (known := self._curves.get(job)) is not None
            and known.possible
            and allowance.claim(jobs.tenant[job], known.gpu_type, known.held(known.minimum)[0])
        ]

    def _schedule(self, job: int) -> None:
        """Serve one job (ScheduleJob): climb while resources are idle or may be taken."""
        self._seen.check()
        curve = self._curves[job]
        for resource in Resource if self._has_cpus else (Resource.GPUS,):
            while (to := self._step_up(job, resource)) >= 0 and self._climb(job, to):
                pass
        if not curve.may_end(self._at[job]):
            self._move(job, -1)

    def _step_up(self, job: int, resource: Resource) -> int:
        curve = self._curves[job]
        return curve.step_up(self._at[job], resource, self._idle[curve.gpu_type][Resource.CPUS])

    def _climb(self, job: int, to: int) -> bool:
        """Take the step to position ``to``, shrinking others for it.

        Return whether it was taken.
        """
        curve, at = self._curves[job], self._at[job]
        own = self._give_slope[:, curve.gpu_type, job].copy()
        self._give_slope[:, curve.gpu_type, job] = np.inf
        shrunk: list[tuple[int, int]] = []
        for resource in Resource:
            takes = curve.held(to)[resource] - curve.held(at)[resource]
            gain = curve.gain(at, to, resource)
            if not self._reclaim(curve, resource, takes, gain, not curve.may_end(at), shrunk):
                for other, before in reversed(shrunk):
                    self._move(other, before)
                self._give_slope[:, curve.gpu_type, job] = own
                return False
        self._move(job, to)
        return True

    def _reclaim(
        self,
        curve: SensitivityCurve,
        resource: Resource,
        takes: int,
        slope: float,
        below: bool,
        shrunk: list[tuple[int, int]],
    ) -> bool:
        """Shrink the jobs of the lowest slopes until ``takes`` of ``resource`` are idle.

        Return whether that was possible. ``shrunk`` gets each job with its position before. A job
        ``below`` its minimum may take from jobs with any slope, others only from lower ones.
        """
        give = self._give_slope[resource, curve.gpu_type]
        while self._idle[curve.gpu_type][resource] < takes:
            victim = int(np.argmin(give))
            if give[victim] == np.inf or not (below or slope > give[victim]):
                return False
            shrunk.append((victim, self._at[victim]))
            self._move(victim, self._curves[victim].step_down(self._at[victim], resource).to)
        return True

    def _slopes(self, job: int) -> list[float]:
        """Return the gain per GPU and per CPU core of the next step up, or 0 without such a step."""
        curve, at, slopes = self._curves[job], self._at[job], []
        for resource in Resource:
            to = self._step_up(job, resource)
            slopes.append(curve.gain(at, to, resource) if to >= 0 else 0.0)
        return slopes

    def _fits(self, curve: SensitivityCurve, to: int) -> bool:
        idle = self._idle[curve.gpu_type]
        return all(need <= has for need, has in zip(curve.held(to), idle, strict=True))

    def _move(self, job: int, to: int) -> None:
        curve, idle = self._curves[job], self._idle[self._curves[job].gpu_type]
        for resource in Resource:
            idle[resource] += curve.held(self._at[job])[resource] - curve.held(to)[resource]
            self._give_slope[resource, curve.gpu_type, job] = curve.step_down(to, resource).slope
        self._at[job] = to
