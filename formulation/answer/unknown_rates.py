"""Jobs of unknown rate: nobody knows their model, so they run on exactly the GPUs that they request.

A round gives each of them one Cell, whose rate it assumes to be that of a typical job of its size
(Eqs. 6d and 6e of ``docs/mathematics.md``). All rules and objectives then hold for it as for any
other job. The assumption leaves the round with nothing: decisions state no rate for such a job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from tessera.formulation.answer.decisions import Decision
from tessera.formulation.base.tables import Bools, Floats, Ints, begins_group
from tessera.formulation.base.texts import Text
from tessera.formulation.base.values import BEST_FOUND, EstimateSource
from tessera.formulation.job.reasons import Reason
from tessera.formulation.state.cell_cache import cached_cells
from tessera.formulation.state.snapshot import Estimates, Snapshot

DEFAULT_ITER_TIME_S: Final = 1.0
"""Seconds of training that an iteration is assumed to take if no job of the round has an estimate."""


def has_unknown_rate(snapshot: Snapshot) -> Bools:
    """Return whether each job runs at an unknown rate if it runs, bool[jobs].

    Such a job is ``unestimated``, states a GPU type, and nothing else is known of its workload. An
    admitted job is not among them: its promise rested on estimates, and ends without them.
    """
    jobs = snapshot.jobs
    stated = jobs.unestimated & (jobs.requested_gpu_type >= 0) & ~jobs.admitted
    if not stated.any():
        return stated
    known = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    known[snapshot.estimates.workload] = True
    unknown: Bools = stated & ~known[jobs.workload] & ~snapshot.profiling()
    return unknown


def assume_rates(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with an assumed estimate of the one Cell of each job of unknown rate.

    The Cell is the one that the job runs on, or else the one that it requests, by its stated plan if
    it has one. Jobs with the same workload and Cell get a workload of their own, so that no other
    job sees the Cell and they see no other one. ``jobs.assumed_efficiency`` marks them. They have
    no deadline: nobody can promise one at an unknown rate.
    """
    which = np.flatnonzero(has_unknown_rate(snapshot))
    if not len(which):
        return snapshot
    jobs = snapshot.jobs
    runs = jobs.current_gpus[which] > 0
    asks = {
        "current_type": jobs.requested_gpu_type,
        "current_gpus": jobs.requested_gpus,
        "current_degree": np.full(len(jobs), BEST_FOUND),
        "current_plan": np.where(jobs.plan >= 0, jobs.plan, snapshot.plans.index("")),
    }
    cell = [np.where(runs, getattr(jobs, own)[which], ask[which]) for own, ask in asks.items()]
    unique, of = np.unique(np.stack([jobs.workload[which], *cell]), axis=1, return_inverse=True)
    of = of.ravel()
    old, gpu_type, gpus, degree, plan = unique
    typical = _TypicalJobs.among(snapshot)
    assumed = [typical.of(int(t), int(n)) for t, n in zip(gpu_type, gpus, strict=True)]
    new = len(snapshot.workloads) + np.arange(unique.shape[1], dtype=np.int64)
    rows = Estimates(
        workload=new,
        gpu_type=gpu_type,
        gpus=gpus,
        nodes=_fewest_nodes(snapshot, gpu_type, gpus),
        pipeline_degree=degree,
        plan=plan,
        iter_time_s=np.array([iter_time_s for iter_time_s, _ in assumed]),
        source=np.full(len(new), int(EstimateSource.ASSUMED)),
    )
    workload, deadline_s = np.array(jobs.workload), np.array(jobs.deadline_s)
    efficiency = np.full(len(jobs), np.nan)
    workload[which], deadline_s[which] = new[of], np.inf
    efficiency[which] = np.array([share for _, share in assumed])[of]
    return replace(
        snapshot,
        workloads=(*snapshot.workloads, *(snapshot.workloads[w] for w in old.tolist())),
        estimates=snapshot.estimates.followed_by(rows),  # their workloads come last
        jobs=replace(jobs, workload=workload, deadline_s=deadline_s, assumed_efficiency=efficiency),
    )


def without_assumed_rates(
    snapshot: Snapshot, decisions: Iterable[Decision]
) -> tuple[Decision, ...]:
    """Return the decisions without rates of jobs whose rate is unknown in ``snapshot``.

    A rate of 0 on a Cell means that it is unknown. Reasons of such jobs say so, too.
    """
    unknown = has_unknown_rate(snapshot)
    if not unknown.any():
        return tuple(decisions)
    return tuple(
        _without_rate(snapshot, decision) if unknown[decision.job] else decision
        for decision in decisions
    )


def _without_rate(snapshot: Snapshot, decision: Decision) -> Decision:
    if decision.reason is None:
        return decision._replace(rate=0.0)
    key = snapshot.workloads[int(snapshot.jobs.workload[decision.job])].key
    evidence: list[tuple[Text, Text]] = [("rate", f"unknown, because nothing is known of {key}")]
    if np.isfinite(snapshot.jobs.deadline_s[decision.job]):
        evidence.append(("deadline", "not promised, because the rate is unknown"))
    return decision._replace(reason=_with_evidence(decision.reason, evidence))


def _with_evidence(reason: Reason, evidence: list[tuple[Text, Text]]) -> Reason:
    return replace(reason, evidence=(*reason.evidence, *evidence))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TypicalJobs:
    """The Cells of the jobs in a round whose rates are known, float64[Cells] and int64[Cells].

    There is one for each workload, GPU type and GPU count: the fastest. ``gpu_s`` are the
    GPU-seconds of an iteration. ``efficiency`` is the Cell's rate for each GPU, as a share of the
    highest that its workload has on any Cell. ``jobs`` is the number of jobs.
    """

    gpu_type: Ints
    gpus: Ints
    gpu_s: Floats
    efficiency: Floats
    jobs: Ints

    @classmethod
    def among(cls, snapshot: Snapshot) -> Self:
        """Return the Cells of the snapshot's jobs."""
        cells, _ = cached_cells(snapshot)
        # Cells are sorted, so the first of each workload, type and count is the fastest.
        fastest = np.flatnonzero(begins_group(cells.workload, cells.gpu_type, cells.gpus))
        workload, gpus = cells.workload[fastest], cells.gpus[fastest]
        per_gpu = cells.rate[fastest] / gpus
        best = np.zeros(len(snapshot.workloads))
        np.maximum.at(best, workload, per_gpu)
        batch = np.array([w.global_batch for w in snapshot.workloads], dtype=np.float64)
        counts = snapshot.jobs.may_run() & ~snapshot.profiling()
        jobs = np.bincount(snapshot.jobs.workload[counts], minlength=len(snapshot.workloads))
        return cls(
            gpu_type=cells.gpu_type[fastest],
            gpus=gpus,
            gpu_s=batch[workload] / per_gpu,
            efficiency=per_gpu / best[workload],
            jobs=jobs[workload],
        )

    def of(self, gpu_type: int, gpus: int) -> tuple[float, float]:
        """Return the typical seconds of an iteration and efficiency on a type and count.

        They are medians over the jobs with a Cell of this type and count, or else over all Cells of
        the type, or else over all Cells (Eq. 6d).
        """
        same_type = self.gpu_type == gpu_type
        for among in (same_type & (self.gpus == gpus), same_type, np.ones_like(same_type)):
            jobs = np.where(among, self.jobs, 0)
            if jobs.any():
                gpu_s = float(np.median(np.repeat(self.gpu_s, jobs)))
                return gpu_s / gpus, float(np.median(np.repeat(self.efficiency, jobs)))
        return DEFAULT_ITER_TIME_S, 1.0


def _fewest_nodes(snapshot: Snapshot, gpu_type: Ints, gpus: Ints) -> Ints:
    """Return the fewest nodes that each number of GPUs needs, int64[Cells], by the largest node."""
    size = np.ones(len(snapshot.gpu_types), dtype=np.int64)
    np.maximum.at(size, snapshot.nodes.gpu_type, snapshot.nodes.gpus)
    usable = snapshot.node_size()
    size = np.where(usable > 0, usable, size)[gpu_type]
    fewest: Ints = -(-gpus // size)
    return fewest
