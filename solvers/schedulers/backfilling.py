"""Starts of waiting jobs in a profile of free GPUs: shared by EASY and conservative backfilling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.lookahead.reservations import rates_if_kept
from tessera.formulation.round.rates import work_left
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions, OptionPacking, options_of

_TIE_S: Final = 1e-3
"""A job may end this much after the next reservation starts, so that rounding decides nothing."""
_MIN_HOLD_S: Final = 1e-2
"""The shortest time for which a job is taken to hold GPUs, more than ``_TIE_S``.

A running job that should have ended by now ends after this time. Until then, its GPUs are taken.
"""


class AvailabilityProfile:
    """The free GPUs of a type over time, as a step function. Times are seconds from now.

    ``end_s`` (float64[jobs]) are the ends of jobs that run now, inf for one that never ends, and
    ``gpus`` (int64[jobs]) are their GPUs. ``free_gpus`` are free already. There is room for
    ``max_reservations``.
    """

    def __init__(self, free_gpus: int, end_s: Floats, gpus: Ints, max_reservations: int) -> None:
        ends = np.isfinite(end_s)
        moment_s, group = np.unique(end_s[ends], return_inverse=True)
        gpus_back = np.bincount(group, gpus[ends], len(moment_s)).astype(np.int64)
        self._steps = 1 + len(moment_s)
        # Each reservation adds two steps. The step after the last one begins at infinity.
        size = self._steps + 2 * max_reservations + 1
        self._start_s = np.full(size, np.inf)
        self._start_s[0] = 0.0
        self._start_s[1 : self._steps] = moment_s
        self._free = np.full(size, free_gpus, dtype=np.int64)
        self._free[1 : self._steps] += np.cumsum(gpus_back)

    def find_gap(self, gpus: int, run_s: float) -> tuple[float, float]:
        """Return the earliest start at which ``gpus`` GPUs stay free for ``run_s``, and the end.

        The start is inf if there are never that many free GPUs for that long.
        """
        short = (self._free[: self._steps] < gpus).nonzero()[0]
        if not len(short):
            return 0.0, run_s
        # A gap begins now or after a short step, and ends at the next short one, if there is one.
        begin_s, end_s = np.zeros(len(short) + 1), np.full(len(short) + 1, np.inf)
        begin_s[1:] = self._start_s[short + 1]
        end_s[:-1] = self._start_s[short]
        gap = int((begin_s + (run_s - _TIE_S) <= end_s).argmax())
        start_s = float(begin_s[gap])
        return start_s, min(start_s + run_s, float(end_s[gap]))

    def reserve(self, start_s: float, end_s: float, gpus: int) -> None:
        """Take ``gpus`` GPUs from ``start_s`` until ``end_s``, a part of a gap."""
        start_step, end_step = self._begin_step(start_s), self._begin_step(end_s)
        self._free[start_step:end_step] -= gpus

    def _begin_step(self, at_s: float) -> int:
        """Return the step that begins at ``at_s``. If there is no such step, it is added."""
        step = int(self._start_s[: self._steps + 1].searchsorted(at_s))
        if self._start_s[step] != at_s:
            source, target = slice(step, self._steps + 1), slice(step + 1, self._steps + 2)
            self._start_s[target] = self._start_s[source]
            self._free[target] = self._free[source]
            self._start_s[step], self._free[step] = at_s, self._free[step - 1]
            self._steps += 1
        return step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackfillPlan:
    """The columns that jobs run on now, and the planned starts of those that wait.

    ``choice`` is int64[jobs]; -1 means that the job waits. ``start_s`` is float64[jobs], in seconds
    since 1970. It is NaN for a job that runs already, and inf for one without a planned start.
    """

    choice: Ints
    start_s: Floats


def plan_starts(view: SchedulerView, max_reservations: int | None = None) -> BackfillPlan:
    """Plan the earliest start of each waiting job that delays no reservation, in order of arrival.

    A job that can start now does so. The first ``max_reservations`` others have a reservation, by
    default all of them. A reservation is on the type with the earliest start, among equals on the
    fastest. A job that could not start even if all others had ended has none.
    """
    now_s = view.draft.snapshot.now_s
    options = options_of(view, requested_only=True)
    packing = OptionPacking(options, view.capacity)
    packing.keep_running()
    waits = np.array(packing.option, dtype=np.int64) < 0
    profiles = _profiles_of(view, options, packing)
    start_s = np.where(waits, np.inf, np.nan)
    gpu_type, gpus = options.gpu_type.tolist(), options.gpus.tolist()
    run_s = np.maximum(view.draft.end_s[options.column] - now_s, _MIN_HOLD_S).tolist()
    requests = options.grouped(options.as_requested & options.on_type & waits[options.job])
    reservations = 0
    for job in [job for job, own_options in enumerate(requests) if own_options]:
        view.check()
        gaps = [profiles[gpu_type[o]].find_gap(gpus[o], run_s[o]) for o in requests[job]]
        best_gap = min(range(len(gaps)), key=lambda k: gaps[k][0])
        (begin_s, end_s), option = gaps[best_gap], requests[job][best_gap]
        if begin_s == 0.0:
            packing.take(option)
        elif np.isinf(begin_s) or reservations == max_reservations:
            continue
        else:
            reservations += 1
        profiles[gpu_type[option]].reserve(begin_s, end_s, gpus[option])
        start_s[job] = now_s + begin_s
    return BackfillPlan(choice=packing.choice, start_s=start_s)


def _profiles_of(
    view: SchedulerView, options: JobOptions, packing: OptionPacking
) -> list[AvailabilityProfile]:
    """Return the profile of each type, in which only the jobs of ``packing`` hold GPUs."""
    holders = np.array([option for option in packing.option if option >= 0], dtype=np.int64)
    end_s = _ends_of_running(view.draft, options.job[holders], options.column[holders])
    waiting = len(packing.option) - len(holders)
    profiles = []
    for gpu_type, free_gpus in enumerate(packing.free):
        on_type = options.gpu_type[holders] == gpu_type
        gpus = options.gpus[holders[on_type]]
        profiles.append(AvailabilityProfile(free_gpus, end_s[on_type], gpus, waiting))
    return profiles


def _ends_of_running(draft: Draft, job: Ints, column: Ints) -> Floats:
    """Return the expected ends of running jobs, in seconds from now, float64[running jobs].

    ``job`` and ``column`` are int64[running jobs]. A job that stays as it is has what remains of
    its start, then its work at its present rate. If its execution plan is no longer known, it is
    started by another one first.
    """
    now_s = draft.snapshot.now_s
    rate, start_left_s = rates_if_kept(draft, job)
    work = work_left(draft.snapshot)[job]
    train_s = np.divide(work, rate[job], out=np.full(len(job), np.inf), where=rate[job] > 0)
    stays = draft.current[job] == column
    end_s = np.where(stays, start_left_s[job] + train_s, draft.end_s[column] - now_s)
    ends: Floats = np.maximum(end_s, _MIN_HOLD_S)
    return ends
