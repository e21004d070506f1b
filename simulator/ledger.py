"""The books of a world: sums that its store, its runs and its log must agree on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.simulator.progress import Progress
from tessera.simulator.store.gpus import InvariantBroken
from tessera.simulator.store.memory import MemoryStore

TOLERANCE: Final = 1e-6
"""The relative tolerance for sums of work and of GPU-seconds that are added up in two orders."""


class _WaitingJobs(NamedTuple):
    """The live jobs that hold no GPUs, with the iterations that they have trained."""

    job: Ints
    done: Floats
    generation: Ints


class Ledger:
    """The GPU-seconds that were held and the iterations that were logged, apart from the store."""

    def __init__(self, store: MemoryStore) -> None:
        """Begin with a store of which no job holds GPUs."""
        self._store = store
        self._held_gpu_s = 0.0
        self._logged = np.zeros(len(store.specs))  # iterations by segments, less those lost
        self._seen_waiting = self._waiting(np.zeros(0, dtype=np.int64))

    def pass_time(self, seconds: float) -> None:
        """Count what is held now for the next ``seconds``."""
        self._held_gpu_s += int((self._store.gpus.owner >= 0).sum()) * seconds

    def log(self, job: int, iterations: float) -> None:
        """Count the iterations that a segment of a job adds, or takes back if they are below 0."""
        self._logged[job] += iterations

    def check(self, running: Collection[int], progress: Progress, now_s: float) -> None:
        """Raise InvariantBroken unless GPUs, GPU-seconds and work add up."""
        store, jobs = self._store, np.array(list(running), dtype=np.int64)
        if set(store.gpus.gangs) != set(running):
            raise InvariantBroken("a job holds GPUs but does not run, or runs without GPUs")
        owner = store.gpus.owner
        held = np.bincount(owner[owner >= 0], minlength=len(store.specs))
        if not np.array_equal(held, store.jobs.current_gpus):
            raise InvariantBroken(
                "a job counts a GPU that it does not hold, or holds one uncounted"
            )
        self._check_service(jobs, progress, now_s)
        self._check_work(jobs, progress, now_s)
        self._check_waiting(jobs)

    def _check_service(self, running: Ints, progress: Progress, now_s: float) -> None:
        held_s = now_s - self._store.jobs.began_s[running]
        lasting = float((progress.gpus[running] * held_s).sum())
        served = float(self._store.jobs.service_gpu_s.sum()) + lasting
        if abs(served - self._held_gpu_s) > TOLERANCE * (1.0 + self._held_gpu_s):
            raise InvariantBroken(
                f"jobs were served {served} GPU-seconds, but {self._held_gpu_s} were held"
            )

    def _check_work(self, running: Ints, progress: Progress, now_s: float) -> None:
        jobs, logged = self._store.jobs, np.array(self._logged)
        logged[running] += progress.done_at(running, now_s) - progress.began[running]
        wrong = np.abs(logged - jobs.done) > TOLERANCE * (1.0 + jobs.iterations)
        if wrong.any():
            name = self._store.specs[int(np.flatnonzero(wrong)[0])].name
            raise InvariantBroken(f"the progress of {name} differs from the sum of its log")

    def _check_waiting(self, running: Ints) -> None:
        """Check that no job made progress while it held no GPUs."""
        jobs, then = self._store.jobs, self._seen_waiting
        still = self._wait(running)[then.job] & (jobs.generation[then.job] == then.generation)
        if (jobs.done[then.job] != then.done)[still].any():
            raise InvariantBroken("a job made progress while it held no GPUs")
        self._seen_waiting = self._waiting(running)

    def _waiting(self, running: Ints) -> _WaitingJobs:
        jobs, live = self._store.jobs, np.array(self._store.jobs.live, dtype=np.int64)
        waiting = live[self._wait(running)[live]]
        return _WaitingJobs(waiting, jobs.done[waiting], jobs.generation[waiting])

    def _wait(self, running: Ints) -> Bools:
        """Return which jobs hold no GPUs, bool[jobs]."""
        wait = np.ones(len(self._store.specs), dtype=np.bool_)
        wait[running] = False
        return wait
