"""The guarantee that a job is at least as fast as on its request (Morphling section 5.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.problem import reduce_by_job
from tessera.formulation.round.promises.launched import is_launched
from tessera.formulation.state.cells import Cells, build_cells, find_most_compact

ROUNDING: Final = 1e-9
"""Relative difference up to which rates and times are the same."""


def guaranteed_jobs_are_as_fast_as_requested(draft: Draft) -> Draft:
    """Drop columns and shapes of guaranteed jobs that are slower than the request (Eq. 32).

        x_c = 0  where r_c < F_j,    and no shape of a chosen c slower than F_j

    All columns of a launched job may have become slower, because estimates or nodes have changed.
    Such a job keeps those no slower than its current column. If some column reaches F_j, it must
    take one of these. A launched job that was placed on more nodes may stay there, and is only
    guaranteed that shape's rate. Source: Morphling sections 5.1 and 5.2.
    """
    guaranteed = has_guaranteed_rate(draft)
    if not guaranteed.any():
        return draft
    floor = request_rate(draft)
    enough = draft.rate >= floor[draft.job] * (1 - ROUNDING)  # false where the floor is NaN
    reached = reduce_by_job(np.maximum, enough.astype(np.float64), draft.job_start) > 0
    runs = is_launched(draft.snapshot)
    behind = guaranteed & runs & ~reached
    stays = draft.current >= 0
    present = np.zeros(len(draft.current))
    present[stays] = draft.rate[draft.current[stays]]
    keep = enough | (behind[draft.job] & (draft.rate >= present[draft.job]))
    keep[_on_wide_shapes(draft, guaranteed & runs & stays)] = True
    lost = np.flatnonzero(guaranteed & ~runs & ~reached & draft.has_columns).tolist()
    draft = draft.only(keep, {job: _unmet(draft, floor, job) for job in lost})
    least, nodes = np.where(guaranteed & reached, floor, 0.0), draft.snapshot.nodes_owned()
    for job in np.flatnonzero(guaranteed & reached & runs & (draft.current >= 0)).tolist():
        least[job] = min(least[job], _placed_rate(draft, job, int(nodes[job])))
    return replace(draft, least_rate=np.maximum(draft.least_rate, least))


def _on_wide_shapes(draft: Draft, among: Bools) -> Ints:
    """Return the current columns of jobs ``among`` that are not on their count's fewest nodes."""
    column = draft.current[among]
    return column[~find_most_compact(draft.cells)[draft.cell[column]]]


def has_guaranteed_rate(draft: Draft) -> Bools:
    """Return whether each job is guaranteed and not waived, bool[jobs]."""
    return draft.snapshot.jobs.guaranteed & draft.promisable


def request_rate(draft: Draft) -> Floats:
    """Return F_j, samples/s of the request, float64[jobs] (Eq. 32). It is 0 without a guarantee.

        F_j = max { r_c : n_c = requested GPUs, t_c = requested type, p_c = submitted plan }
            = min over allowed types t of that, where the type is free, because any honors the request

    If it is not recorded with which plan the job was submitted, or if that plan has no Cell at the
    request, F_j is the best plan's. Only Cells on the fewest nodes count, because a request is for
    GPUs and not for a wide shape. Of the submitted plan's Cells, they are those on its fewest nodes.
    Rates are those of the whole cluster, including nodes that are away, because a guarantee does
    not shrink with them. It is NaN if no Cell matches the request.
    """
    rates = np.zeros(len(draft.current))
    cells = _cells_of_all_nodes(draft)
    for request in _requests(draft):
        rates[request.jobs] = _rate_of_request(cells, request)
    return rates


def min_demand(draft: Draft) -> Ints:
    """Return the fewest GPUs of each type that reach the request's rate, int64[jobs, types].

    This is Eq. 33:

        D_jt = min( requested GPUs, min { n_c : t_c = t, r_c >= F_j } )

    It is never above the request in any dimension (Morphling section 5.2), and 0 for jobs without a
    guarantee.
    """
    types = len(draft.snapshot.gpu_types)
    demand = np.zeros((len(draft.current), types), dtype=np.int64)
    cells = _cells_of_all_nodes(draft)
    for request in _requests(draft):
        floor = _rate_of_request(cells, request)
        reach = (cells.workload == request.workload) & (cells.rate >= floor * (1 - ROUNDING))
        least = np.full(types, request.gpus, dtype=np.int64)
        np.minimum.at(least, cells.gpu_type[reach], cells.gpus[reach])
        demand[request.jobs] = least
    return demand


def _cells_of_all_nodes(draft: Draft) -> Cells:
    nodes = draft.snapshot.nodes
    if nodes.schedulable.all() or not has_guaranteed_rate(draft).any():
        return draft.cells
    whole = replace(nodes, schedulable=np.ones(len(nodes), dtype=np.bool_))
    return build_cells(replace(draft.snapshot, nodes=whole))


class _Request(NamedTuple):
    """A distinct request of guaranteed jobs."""

    jobs: Ints
    workload: int
    gpus: int
    gpu_type: int  # -1 for any type
    plan: int  # that the jobs were submitted with; -1 if it is not recorded
    allowed: tuple[bool, ...]  # by type, whether the jobs may run on it


def _requests(draft: Draft) -> Iterator[_Request]:
    """Yield the distinct requests of guaranteed jobs."""
    owed, jobs = np.flatnonzero(has_guaranteed_rate(draft)), draft.snapshot.jobs
    types, sets = draft.snapshot.type_choices()
    columns = (
        jobs.workload,
        jobs.requested_gpus,
        jobs.requested_gpu_type,
        jobs.submitted_plan,
        types,
    )
    keys = np.stack([column[owed] for column in columns])
    unique, which = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    bounds = np.searchsorted(which.ravel()[order], np.arange(unique.shape[1] + 1))
    for k, (work, gpus, kind, plan, choice) in enumerate(unique.T.tolist()):
        members = owed[order[bounds[k] : bounds[k + 1]]]
        yield _Request(members, work, gpus, kind, plan, tuple(sets[choice].tolist()))


def _rate_of_request(cells: Cells, request: _Request) -> float:
    own = (cells.workload == request.workload) & (cells.gpus == request.gpus)
    own &= np.array(request.allowed, dtype=np.bool_)[cells.gpu_type]
    if request.gpu_type >= 0:
        own &= cells.gpu_type == request.gpu_type
    submitted = np.flatnonzero(own & (cells.plan == request.plan))
    own = submitted if len(submitted) else np.flatnonzero(own)
    own = own[find_most_compact(cells, own)]
    types = set(cells.gpu_type[own].tolist())
    return min(
        (float(cells.rate[own[cells.gpu_type[own] == t]].max()) for t in types),
        default=float("nan"),
    )


def _placed_rate(draft: Draft, job: int, nodes: int) -> float:
    """Return samples/s of a launched job's current Cell on the ``nodes`` nodes that it owns."""
    cell = int(draft.cell[draft.current[job]])
    return draft.cells.rate_on(cell, nodes) if nodes else float(draft.cells.rate[cell])


def _unmet(draft: Draft, floor: Floats, job: int) -> Reason:
    """Explain a guaranteed job without a column as fast as its request."""
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    kind, gpus = int(jobs.requested_gpu_type[job]), int(jobs.requested_gpus[job])
    request = f"{gpus} x {snapshot.gpu_types[kind].name if kind >= 0 else 'any type'}"
    plan = int(jobs.submitted_plan[job])
    submitted = f" with its submitted plan {snapshot.plans[plan][:12]}" if plan >= 0 else ""
    key = snapshot.workloads[int(jobs.workload[job])].key
    if np.isnan(floor[job]):
        return Reason(
            code=ReasonCode.GUARANTEE_UNMET,
            message=f"the job is guaranteed the rate of {request}, but {key} has no such Cell",
            next_step=f"add a Cell of {key} for {request}, or request GPUs for which there is a Cell",
            evidence=(("request", request), ("workload", key)),
        )
    own = slice(int(draft.job_start[job]), int(draft.job_start[job + 1]))
    best = float(draft.rate[own].max())
    return Reason(
        code=ReasonCode.GUARANTEE_UNMET,
        message=f"the job is guaranteed the {floor[job]:.6g} samples/s of {request}{submitted}, but the"
        f" fastest Cell that it may have now gives {best:.6g}",
        next_step="bring lost nodes back, add Cells, or request less",
        evidence=(
            ("request", request),
            ("guaranteed samples/s", f"{floor[job]:.6g}"),
            ("best samples/s", f"{best:.6g}"),
        ),
    )
