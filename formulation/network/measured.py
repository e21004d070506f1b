"""Jobs corrected by what agents measured of their traffic, within bounds, and what is said of each.

Bytes: those that a job's hosts send to others in an iteration, measured over estimated, are one factor on
all of its exchanges between hosts: who sends to whom is the plan's. What stays on a host is as estimated.

Times: an iteration that nobody hindered lasts max(c, s + t) with c the compute, s the start of the
communication and t its length. t follows from bytes and links, so both c and s are scaled by one number, at
which the iteration has the measured length: how far they overlap is the plan's, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from tessera.formulation.network.contention import Contention
from tessera.formulation.network.flows import NetworkJob, Note, sent_by_hosts
from tessera.formulation.network.traffic import Exchange
from tessera.formulation.tables import Floats, Ints
from tessera.formulation.topologies.topology import Topology

BELIEVED: Final = 4.0
"""A factor above this, or below its inverse, is taken for a mistake: another program's traffic, a period that
is not the iteration's, or the estimate of another Cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was measured of one job. ``sent_bytes`` in an iteration, by host; at least one.

    ``period_s``: of an iteration that no other job hindered; None: not known.
    """

    sent_bytes: Mapping[str, float]
    period_s: float | None = None


def with_bytes(
    topology: Topology, jobs: Sequence[NetworkJob], seen: Mapping[str, Seen]
) -> tuple[list[NetworkJob], list[Note], set[str]]:
    """Return all jobs, those in ``seen`` with the bytes that were measured, a note on each of these, and the
    names of those whose measurement is used.

    A job whose factor is not believed stays as it is. So does one of which nothing was estimated to be sent
    from the hosts that were measured.

    Raises:
        InvalidInput: an exchange names a rank that its job lacks.
    """
    found, notes, used = list(jobs), [], set()
    chosen = [k for k, job in enumerate(jobs) if job.name in seen]
    for k, estimated in zip(
        chosen, sent_by_hosts(topology, [jobs[k] for k in chosen]), strict=True
    ):
        name, measured = jobs[k].name, seen[jobs[k].name].sent_bytes
        ratios = [sent / estimated[host] for host, sent in measured.items() if host in estimated]
        if not ratios:
            notes.append((name, f"{_on(measured)}, where its Cell sends nothing: not used"))
            continue
        factor = float(median(ratios))
        note = f"{_on(ratios)}: {factor:.3g} of the estimate"
        if not believed(factor):
            note += (
                f", which is not believed (beyond {BELIEVED:g} times or a {BELIEVED:g}th): not used"
            )
        else:
            found[k] = _scaled(jobs[k], factor)
            used.add(name)
        notes.append((name, note))
    return found, notes, used


def believed(factor: float) -> bool:
    """Return whether a measurement may differ from its estimate by so much."""
    return 1 / BELIEVED <= factor <= BELIEVED


def with_times(
    contention: Contention, comm_s: Floats, period_s: Floats
) -> tuple[Contention, list[Note]]:
    """Return jobs with compute and start scaled so that an iteration alone has the measured period.

    Args:
        comm_s: t of each job, (J,).
        period_s: measured, (J,); NaN: not known. Jobs whose period leaves no time for their traffic, or would
            scale their times beyond belief, stay as they are.
    """
    c = contention
    known = np.flatnonzero(np.isfinite(period_s))
    compute_s, start_s = c.compute_s.copy(), c.start_s.copy()
    by_start = np.full(len(known), np.inf)
    with np.errstate(over="ignore"):
        by_compute = period_s[known] / compute_s[known]
        np.divide(
            period_s[known] - comm_s[known], start_s[known], out=by_start, where=start_s[known] > 0
        )
    late = period_s[known] < comm_s[known]
    factor = np.where(late, 0.0, np.minimum(by_compute, by_start))
    good = (factor >= 1 / BELIEVED) & (factor <= BELIEVED)
    at = known[good]
    compute_s[at] *= factor[good]
    start_s[at] *= factor[good]
    notes = [
        (c.jobs[k], f"{period_s[k]:.3g} s an iteration" + ("" if ok else _why(c, k, comm_s)))
        for k, ok in zip(known.tolist(), good.tolist(), strict=True)
    ]
    return replace(c, compute_s=compute_s, start_s=np.minimum(start_s, compute_s)), notes


def _why(c: Contention, job: int, comm_s: Floats) -> str:
    alone_s = max(float(c.compute_s[job]), float(c.start_s[job] + comm_s[job]))
    return (
        f" does not fit the estimated {alone_s:.3g} s, {comm_s[job]:.3g} s of it traffic: not used"
    )


def _on(nodes: Sequence[float] | Mapping[str, float]) -> str:
    return f"measured on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"


def _scaled(job: NetworkJob, factor: float) -> NetworkJob:
    """Return the job with ``factor`` times the bytes in exchanges that join hosts."""
    host = np.repeat(np.arange(len(job.gang)), [len(gpus) for _, gpus in job.gang])
    exchanges = tuple(
        replace(e, sent_bytes=e.sent_bytes * factor) if _joins_hosts(e, host) else e
        for e in job.traffic.exchanges
    )
    return replace(job, traffic=replace(job.traffic, exchanges=exchanges))


def _joins_hosts(exchange: Exchange, host: Ints) -> bool:
    at = host[exchange.members]
    return bool((at != at[:, :1]).any())
