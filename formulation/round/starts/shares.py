"""The GPUs that running jobs hold on nodes, and the time for which they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Floats, Ints, Table
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.starts.holds import Holds, holds_of
from tessera.formulation.state.last_round import ExpectedReleases, ScheduleSegments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningShares(Table):
    """The shares of running jobs: all of one is held until one time, and a part until another."""

    job: Ints
    node: Ints
    gpus: Ints
    all_until_s: Floats  # seconds since 1970
    part: Ints
    part_until_s: Floats

    @property
    def expected_releases(self) -> ExpectedReleases:
        """Return the GPUs that jobs leave before they end."""
        gives = self.part < self.gpus
        return ExpectedReleases(
            job=self.job[gives],
            node=self.node[gives],
            from_s=self.all_until_s[gives],
            kept=self.part[gives],
        )


def running_shares(draft: Draft) -> RunningShares:
    """Return the shares of the jobs that can go on unchanged."""
    snapshot, a = draft.snapshot, draft.snapshot.allocations
    count = max(1, len(snapshot.nodes))
    rows = np.flatnonzero((a.hold != Hold.RELEASING) & (a.job >= 0))
    rows = rows[((draft.current >= 0) & snapshot.jobs.among(ACTIVE))[a.job[rows]]]
    pair, gpus = np.unique(a.job[rows] * count + a.node[rows], return_counts=True)
    job, node = pair // count, pair % count
    holds = _holds_by_schedule(draft, job, holds_of(draft, draft.current[job]))
    part = np.where(holds.part > 0, gpus, 0)
    shrinks = (holds.part > 0) & (holds.part < holds.gpus)
    for shrinking_job in np.unique(job[shrinks]).tolist():
        rows = np.flatnonzero(job == shrinking_job)
        size = int(snapshot.nodes.gpus[node[rows]].max())
        part[rows] = _shrink_shares(gpus[rows], int(holds.part[rows[0]]), size)
    return RunningShares(
        job=job,
        node=node,
        gpus=gpus.astype(np.int64),
        all_until_s=holds.all_until_s,
        part=part,
        part_until_s=holds.part_until_s,
    )


def segments_of_round(draft: Draft) -> ScheduleSegments:
    """Return the schedules of jobs with promised deadlines, as this round has them."""
    return (
        draft.snapshot.schedule_segments
        if draft.admission is None
        else draft.admission.schedule_segments
    )


def _shrink_shares(shares: Ints, gpus: int, size: int) -> Ints:
    """Return the GPUs on each node of a job that is shrunk to ``gpus`` GPUs, int64[nodes].

    It goes to the fewest nodes of ``size`` GPUs if it has enough on them, or else keeps equal shares, if
    these are blocks. Where neither is possible, it cannot be counted on to leave any.
    """
    min_nodes, nodes = -(-gpus // size), len(shares)
    share = -(-gpus // min_nodes)
    large = np.argsort(-shares, kind="stable")[:min_nodes]
    if (shares[large] >= share).all():
        part = np.zeros(nodes, dtype=np.int64)
        part[large] = share
        return part
    share = gpus // nodes
    if gpus % nodes == 0 and share & (share - 1) == 0 and (shares >= share).all():
        return np.full(nodes, share, dtype=np.int64)
    return shares


def _holds_by_schedule(draft: Draft, job: Ints, holds: Holds) -> Holds:
    """Return the holds of running jobs (int64[entries]), in which those with schedules go by these.

    Such a job keeps as many GPUs as its schedule has now until that changes, and may leave the others
    at once.
    """
    segments, now_s = segments_of_round(draft), draft.snapshot.now_s
    if not len(segments):
        return holds
    has_segments = np.zeros(len(draft.current), dtype=np.bool_)
    has_segments[segments.job] = True
    segment_gpus, ends_s = (
        np.zeros(len(has_segments), dtype=np.int64),
        np.full(len(has_segments), now_s),
    )
    goes_on = (draft.current >= 0)[segments.job] & (
        segments.gpu_type == draft.gpu_type[draft.current[segments.job]]
    )
    present = np.flatnonzero((segments.start_s <= now_s + SAME_S) & goes_on)
    segment_gpus[segments.job[present]] = segments.gpus[present]
    np.maximum.at(ends_s, segments.job[present], segments.end_s[present])
    goes_by, part, end_s = has_segments[job], np.minimum(segment_gpus[job], holds.gpus), ends_s[job]
    return replace(
        holds,
        all_until_s=np.where(goes_by, np.where(part < holds.gpus, now_s, end_s), holds.all_until_s),
        part=np.where(goes_by, part, holds.part),
        part_until_s=np.where(goes_by, end_s, holds.part_until_s),
    )
