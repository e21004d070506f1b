"""Correction of jobs by measurements of their traffic, within bounds, with notes on each job.

Bytes: the factor of a job is the bytes that its hosts send to others in an iteration, measured over
estimated. It applies to all of the job's exchanges between hosts, because the execution plan
determines the senders and receivers. Traffic within a host stays as estimated.

Times: an iteration without contention lasts max(c, s + t), where c is the compute, s the start of
the communication and t its length. t follows from bytes and links. Both c and s are scaled by one
number, with which the iteration has the measured length. Their overlap therefore stays that of the
execution plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.flows import NetworkJob, Note, sent_by_hosts
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.state.topologies.topology import Topology
from tessera.formulation.state.traffic import Exchange

MAX_CREDIBLE_FACTOR: Final = 4.0
"""Largest credible factor. A factor above it, or below its inverse, is treated as a mistake.

The cause may be another program's traffic, a period that is not the iteration's, or the estimate of
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficMeasurement:
    """The measurements of one job.

    ``sent_bytes`` is by host, for one iteration, and has at least one host. ``period_s`` is the
    length of an iteration that no other job hindered. If it is None, it is not known.
    """

    sent_bytes: Mapping[str, float]
    period_s: float | None = None


def correct_bytes(
    topology: Topology, jobs: Sequence[NetworkJob], seen: Mapping[str, TrafficMeasurement]
) -> tuple[list[NetworkJob], list[Note], set[str]]:
    """Return all jobs with measured bytes, notes, and the names of jobs whose measurement is used.

    The bytes replace those of jobs in ``seen``, and there is a note on each of these. A job whose
    factor is not credible stays unchanged. So does a job for which the estimate has no traffic from
    the measured hosts.

    Raises:
        InvalidInput: an exchange names a rank that its job lacks.
    """
    corrected, notes, used = list(jobs), [], set()
    chosen = [k for k, job in enumerate(jobs) if job.name in seen]
    for k, estimated in zip(
        chosen, sent_by_hosts(topology, [jobs[k] for k in chosen]), strict=True
    ):
        name, measured = jobs[k].name, seen[jobs[k].name].sent_bytes
        ratios = [sent / estimated[host] for host, sent in measured.items() if host in estimated]
        if not ratios:
            notes.append(
                (
                    name,
                    f"{_on(measured)}, where its Cell sends nothing; the measurement is not used",
                )
            )
            continue
        factor = float(median(ratios))
        note = f"{_on(ratios)}: {factor:.3g} times the estimate"
        if not is_credible(factor):
            note += (
                f", which is not credible (more than {MAX_CREDIBLE_FACTOR:g} times the estimate, or less"
                f" than a {MAX_CREDIBLE_FACTOR:g}th of it); the measurement is not used"
            )
        else:
            corrected[k] = _scaled(jobs[k], factor)
            used.add(name)
        notes.append((name, note))
    return corrected, notes, used


def is_credible(factor: float) -> bool:
    """Return whether a measurement may differ from its estimate by this factor."""
    return 1 / MAX_CREDIBLE_FACTOR <= factor <= MAX_CREDIBLE_FACTOR


def correct_times(
    contention: Contention, comm_s: Floats, period_s: Floats
) -> tuple[Contention, list[Note]]:
    """Return jobs with compute and start scaled so that an iteration alone has the measured period.

    Args:
        comm_s: t of each job, (J,).
        period_s: measured, (J,). It is NaN if it is not known. Jobs whose period leaves no time for
            their traffic, or would scale their times beyond a credible factor, stay unchanged.
    """
    c = contention
    known = np.flatnonzero(np.isfinite(period_s))
    compute_s, start_s = c.compute_s.copy(), c.start_s.copy()
    # max(x c, x s + t) = p holds for the smaller of x = p / c and x = (p - t) / s.
    by_start = np.full(len(known), np.inf)
    with np.errstate(over="ignore"):
        by_compute = period_s[known] / compute_s[known]
        np.divide(
            period_s[known] - comm_s[known], start_s[known], out=by_start, where=start_s[known] > 0
        )
    late = period_s[known] < comm_s[known]
    factor = np.where(late, 0.0, np.minimum(by_compute, by_start))
    good = (factor >= 1 / MAX_CREDIBLE_FACTOR) & (factor <= MAX_CREDIBLE_FACTOR)
    at = known[good]
    compute_s[at] *= factor[good]
    start_s[at] *= factor[good]
    notes = [
        (c.jobs[k], f"an iteration takes {period_s[k]:.3g} s" + ("" if ok else _why(c, k, comm_s)))
        for k, ok in zip(known.tolist(), good.tolist(), strict=True)
    ]
    return replace(c, compute_s=compute_s, start_s=np.minimum(start_s, compute_s)), notes


def _why(c: Contention, job: int, comm_s: Floats) -> str:
    alone_s = max(float(c.compute_s[job]), float(c.start_s[job] + comm_s[job]))
    return (
        f", which does not fit the estimate of {alone_s:.3g} s, of which {comm_s[job]:.3g} s are traffic;"
        " the measurement is not used"
    )


def _on(nodes: Sequence[float] | Mapping[str, float]) -> str:
    return f"measured on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"


def _scaled(job: NetworkJob, factor: float) -> NetworkJob:
    """Return the job with ``factor`` times the bytes in exchanges between hosts."""
    host = np.repeat(np.arange(len(job.gang)), [len(gpus) for _, gpus in job.gang])
    exchanges = tuple(
        replace(e, sent_bytes=e.sent_bytes * factor) if _joins_hosts(e, host) else e
        for e in job.traffic.exchanges
    )
    return replace(job, traffic=replace(job.traffic, exchanges=exchanges))


def _joins_hosts(exchange: Exchange, host: Ints) -> bool:
    at = host[exchange.members]
    return bool((at != at[:, :1]).any())
