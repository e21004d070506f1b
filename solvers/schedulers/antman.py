"""AntMan, with whole GPUs (Xiao et al. 2020; Morphling section 7.3 compares with it)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.solvers.schedulers.allowance import Allowance
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import (
    JobOptions,
    OptionPacking,
    host_capacity,
    options_of,
)
from tessera.solvers.schedulers.slots import jobs_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class AntMan:
    """A scheduler that serves guaranteed jobs immediately, and best-effort jobs with idle GPUs.

    Best-effort jobs give way. AntMan lets an opportunistic job share the GPUs of a guaranteed job
    and scales its share down. Here a GPU has one holder, so the share is a number of whole GPUs. If
    guaranteed jobs need them, the best-effort jobs that started last are shrunk to the largest
    count at which they have a Cell, or suspended. They grow again when GPUs are idle, but never
    beyond their request.

    Guaranteed jobs of a tenant start within its quota, to which their whole request is charged.
    (Morphling charges the least demand that reaches the request's rate.) Jobs stay on the GPU type
    that they run on or requested. A job that takes any type gets the fastest type with room.

    A job always runs by the plan that it was submitted with. If that is not recorded, it is the best
    plan of each count. The CPUs and host memory that its Cell states are booked where nodes state
    theirs.
    """

    name: str = "antman"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        jobs, options = seen.draft.snapshot.jobs, options_of(seen, submitted=True)
        packing = OptionPacking(options, seen.capacity, host_capacity(seen))
        order = jobs_in_order(seen)
        self._guaranteed(seen, options, packing, order)
        effort = ~jobs.guaranteed
        running = np.flatnonzero(effort & options.runs)
        running = running[np.argsort(jobs.since_s[running], kind="stable")]
        has_type, has_gpus = np.full(len(jobs), -1), np.zeros(len(jobs), dtype=np.int64)
        now = options.current[running]
        has_type[running], has_gpus[running] = options.gpu_type[now], options.gpus[now]
        stays = (has_type[options.job] < 0) | (options.gpu_type == has_type[options.job])
        within = stays & (options.gpus <= has_gpus[options.job])
        for job in running.tolist():
            seen.check()
            packing.take_first(_largest(options, within, job))
        within = stays & (options.gpus <= options.requested_gpus[options.job])
        within &= options.on_type | options.runs[options.job]
        for job in order[effort[order]].tolist():
            seen.check()
            if packing.option[job] < 0:
                packing.take_first(_largest(options, within, job))
        for job in running.tolist():
            seen.check()
            if packing.option[job] >= 0:
                held = options.gpus[packing.option[job]]
                packing.take_first(_largest(options, within & (options.gpus > held), job))
        return packing.choice

    def _guaranteed(
        self, seen: SchedulerView, options: JobOptions, packing: OptionPacking, order: Ints
    ) -> None:
        """Place guaranteed jobs as if there were no others; those that run come first."""
        jobs, allowance = seen.draft.snapshot.jobs, Allowance(seen.draft.snapshot)
        for job in np.flatnonzero(jobs.guaranteed & options.runs).tolist():
            option = int(options.current[job])
            if packing.take(option):
                allowance.charge(
                    jobs.tenant[job], int(options.gpu_type[option]), int(options.gpus[option])
                )
        wishes = options.grouped(options.as_requested & options.on_type)
        for job in order[jobs.guaranteed[order]].tolist():
            if packing.option[job] >= 0:
                continue
            for option in wishes[job]:
                gpu_type, gpus = int(options.gpu_type[option]), int(options.gpus[option])
                if packing.fits(option) and allowance.claim(jobs.tenant[job], gpu_type, gpus):
                    packing.take(option)
                    break


def _largest(options: JobOptions, allowed: Bools, job: int) -> list[int]:
    """Return the ``allowed`` options (bool[options]) of ``job``, most GPUs first, then fastest."""
    own = [option for option in options.of(job) if allowed[option]]
    return sorted(own, key=lambda o: (-options.gpus[o], -options.rate[o]))
