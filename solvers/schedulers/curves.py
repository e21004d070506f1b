"""Resource sensitivity curves (Morphling section 5.1).

A curve is the rate of a job's best execution plan at each GPU count.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityCurve:
    """The counts of one job on one type at which its rate rises, and the count that it runs on.

    Between these counts the curve is flat: no execution plan runs there, or none is faster.
    ``rate`` is in shares of the job's reference rate. A position is an index of ``gpus``; -1 means
    no GPUs.
    """

    gpu_type: int
    gpus: tuple[int, ...]
    rate: tuple[float, ...]
    options: tuple[int, ...]
    start: int  # the present position; -1 if the job has no GPUs of this type
    minimum: int  # the least position at which it may end; -1 for best-effort jobs
    possible: bool = True  # false if the job is guaranteed, and has no Cell within its request

    def held(self, at: int) -> int:
        """Return the GPUs at position ``at``."""
        return self.gpus[at] if at >= 0 else 0

    def worth(self, at: int) -> float:
        """Return the rate at position ``at``, in shares of the reference rate."""
        return self.rate[at] if at >= 0 else 0.0

    def next(self, at: int) -> int:
        """Return the next higher position that is faster and not below the minimum, or -1."""
        for to in range(max(at + 1, self.minimum), len(self.gpus)):
            if self.rate[to] > self.worth(at) or at < self.minimum:
                return to
        return -1


def curve_of(
    seen: SchedulerView, options: JobOptions, job: int, free: list[int]
) -> SensitivityCurve | None:
    """Return the curve of ``job`` on the type that it shall use, or None if it has no Cell.

    ``Morphling`` describes the choice of the type.
    """
    by_type: dict[int, list[int]] = {}
    for option in options.of(job):
        by_type.setdefault(int(options.gpu_type[option]), []).append(option)
    current, wanted = int(options.current[job]), int(options.requested_type[job])
    if current >= 0:
        gpu_type = int(options.gpu_type[current])
    elif wanted in by_type:
        gpu_type = wanted
    elif by_type:

        def steepness(t: int) -> tuple[bool, float, int]:
            first = by_type[t][0]
            gpus = int(options.gpus[first])
            return gpus <= free[t], float(options.rate[first]) / gpus, -t

        gpu_type = max(by_type, key=steepness)
    else:
        return None
    return _curve(seen, options, job, gpu_type, by_type[gpu_type])


def _curve(
    seen: SchedulerView, options: JobOptions, job: int, gpu_type: int, of_type: list[int]
) -> SensitivityCurve:
    current, best = int(options.current[job]), 0.0
    kept = []
    for option in of_type:  # by rising count
        rate = float(options.rate[option])
        if rate > best or option == current:
            kept.append(option)
        best = max(best, rate)
    reference = float(seen.draft.requested_rate[job])
    gpus = tuple(int(options.gpus[o]) for o in kept)
    rate_of = tuple(float(options.rate[o]) / reference for o in kept)
    start = kept.index(current) if current in kept else -1
    minimum, possible = -1, True
    if seen.draft.snapshot.jobs.guaranteed[job]:
        within = [k for k, n in enumerate(gpus) if n <= options.requested_gpus[job]]
        if within:
            target = max(rate_of[k] for k in within)
            minimum = next(k for k in within if rate_of[k] >= target)
        elif start >= 0:
            minimum = 0
        else:
            possible = False
    return SensitivityCurve(
        gpu_type=gpu_type,
        gpus=gpus,
        rate=rate_of,
        options=tuple(kept),
        start=start,
        minimum=minimum,
        possible=possible,
    )
