"""Jobs of a scenario that wait for others, and the arrays that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.dependencies import CONDITIONS, Condition, find_circle
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Dependencies


class WaitingJobs:
    """The dependencies of the jobs of a scenario, which are indices into them.

    ``unmet`` is int64[jobs], the number of each job's dependencies that are not met yet.
    """

    def __init__(self, specs: Sequence[JobSpec]) -> None:
        """Read the dependencies.

        Raises:
            InvalidInput: a job that the scenario lacks, an array, or a circle.
        """
        index = {spec.name: job for job, spec in enumerate(specs)}
        self.unmet = np.zeros(len(specs), dtype=np.int64)
        self._waiting: dict[int, list[tuple[int, Condition]]] = defaultdict(list)
        self._broken: set[int] = set()
        for job, spec in enumerate(specs):
            for dependency in spec.after:
                if dependency.job not in index:
                    raise InvalidInput(
                        f"{spec.name}: after", f"{dependency.job} is not a job of the scenario"
                    )
                self._waiting[index[dependency.job]].append((job, dependency.condition))
                self.unmet[job] += 1
        if circle := find_circle((spec for spec in specs if spec.after), {}):
            raise InvalidInput(f"{circle[0]}: after", f"jobs wait for each other: {circle}")

    def is_broken(self, job: int) -> bool:
        """Return whether the job can never start."""
        return job in self._broken

    def end(self, job: int, *, succeeded: bool) -> tuple[list[int], list[int]]:
        """Note the end of a job; return the jobs that may start now, and those that never can."""
        freed, broken = list[int](), list[int]()
        for waits, condition in self._waiting.pop(job, []):
            if not condition.is_met(succeeded=succeeded):
                broken.append(waits)
                continue
            self.unmet[waits] -= 1
            if not self.unmet[waits]:
                freed.append(waits)
        self._broken.update(broken)
        return freed, broken

    def table(self, local: Ints) -> Dependencies:
        """Return the dependencies of the jobs in a snapshot that are on others in it.

        ``local`` is int64[jobs], the index of each job in the snapshot, or -1.
        """
        rows = sorted(
            (int(local[job]), int(local[on]), CONDITIONS.index(condition))
            for on, waiting in self._waiting.items()
            for job, condition in waiting
            if local[job] >= 0 and local[on] >= 0
        )
        jobs, others, codes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return Dependencies(job=jobs, on=others, condition=codes)


def number_limited_arrays(specs: Sequence[JobSpec]) -> tuple[Ints, Ints]:
    """Return the number of each job's array and its limit, int64[jobs]; -1 and 0 without a limit."""
    numbers: dict[str, int] = {}
    arrays = np.full(len(specs), -1, dtype=np.int64)
    limits = np.zeros(len(specs), dtype=np.int64)
    for job, spec in enumerate(specs):
        if spec.array is not None and spec.array.max_running:
            arrays[job] = numbers.setdefault(spec.array.array, len(numbers))
            limits[job] = spec.array.max_running
    return arrays, limits
