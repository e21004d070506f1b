"""The promises to guaranteed jobs, judged by the log of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from tessera.formulation.round.promises.guarantee import ROUNDING, request_rate
from tessera.formulation.state.cells import find_narrowest
from tessera.simulator.log import Segment
from tessera.simulator.metrics import draft_of
from tessera.simulator.run import Result
from tessera.simulator.scenario import Scenario


def find_broken_guarantees(result: Result) -> list[int]:
    """Return the guaranteed jobs that did not get what they are owed, ascending.

    From its first start, such a job must hold GPUs until it ends. On every Cell and shape, it must
    be as fast as on its request with the plan that it was submitted with (Eq. 32). Slowdowns by
    slow nodes or a shared network break no promise. A failure of a node does.
    """
    owed = [j for j, one in enumerate(result.scenario.arrivals) if one.spec.guaranteed]
    if not owed:
        return []
    of_job: dict[int, list[Segment]] = {}
    for segment in sorted(result.segments, key=lambda s: (s.job, s.start_s)):
        of_job.setdefault(segment.job, []).append(segment)
    suspended = {j for j in owed if _has_pause(of_job.get(j, ()))}
    slow = _find_slow(result.scenario, {j: of_job.get(j, ()) for j in owed})
    return sorted(suspended | slow)


def _has_pause(segments: Sequence[Segment]) -> bool:
    return any(after.start_s > before.end_s for before, after in pairwise(segments))


def _find_slow(scenario: Scenario, of_job: Mapping[int, Sequence[Segment]]) -> set[int]:
    """Return the jobs with a segment on which they are slower than they are owed."""
    draft = draft_of(scenario)
    floor, row_of = request_rate(draft), find_narrowest(draft.cells)
    workload = draft.snapshot.jobs.workload
    slow = set()
    for job, segments in of_job.items():
        for segment in segments:
            row = row_of.get((int(workload[job]), draft.snapshot.key(segment.cell)))
            rate = 0.0 if row is None else draft.cells.rate_on(row, len(segment.members))
            if not np.isnan(floor[job]) and rate < floor[job] * (1 - ROUNDING):
                slow.add(job)
    return slow
