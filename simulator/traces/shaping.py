"""Pure functions from arrivals to arrivals, which adapt a trace to an experiment.

Jobs keep their order and, unless stated otherwise, everything else. They do not wait for jobs that
are left out. The same arguments give the same jobs. Functions that need the durations of jobs
require that every job runs as requested, so that traces must be screened first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.dependencies import drop_absent_dependencies
from tessera.simulator.traces.speeds import Speeds, gpu_seconds
from tessera.simulator.traces.trace import Arrival

GUARANTEED, BEST_EFFORT = "tenant-a", "tenant-b"
"""The tenants with a quota and without one (Morphling, section 7.3, trace MT)."""


def busiest_jobs(arrivals: Sequence[Arrival], hours: float) -> list[Arrival]:
    """Return the jobs of the ``hours`` in which most jobs arrive, with times from their start.

    If several stretches of time are equally busy, the earliest is taken. Morphling, section 7.3,
    takes Philly's busiest 12 hours and does not specify the measure. Here it is the number of jobs,
    because a measure by GPU-hours would follow the single longest job.
    """
    _positive("hours", hours)
    times = np.array([a.arrival_s for a in arrivals])
    if not len(times):
        return []
    order = np.argsort(times, kind="stable")
    ends = np.searchsorted(times[order], times[order] + hours * 3600, side="left")
    first = int(np.argmax(ends - np.arange(len(times))))
    start_s, end_s = times[order[first]], times[order[first]] + hours * 3600
    return drop_absent_dependencies(
        [Arrival(t - start_s, spec) for t, spec in arrivals if start_s <= t < end_s]
    )


def first_hours(arrivals: Sequence[Arrival], hours: float) -> list[Arrival]:
    """Return the jobs that arrive in the first ``hours``.

    Arena's artifact simulates Philly for 2,000 rounds of 300 s: 986 of 1,938 jobs arrive in that
    time.
    """
    _positive("hours", hours)
    return drop_absent_dependencies([a for a in arrivals if a.arrival_s < hours * 3600])


def on_type(arrivals: Sequence[Arrival], gpu_type: str) -> list[Arrival]:
    """Return the jobs with requests for one GPU type (Arena, section 5.7: a trace on H100)."""
    return _each(arrivals, lambda spec: replace(spec, requested_gpu_type=gpu_type))


def sample_jobs(arrivals: Sequence[Arrival], share: float, seed: int) -> list[Arrival]:
    """Return a share of the jobs, drawn uniformly without replacement.

    Morphling, section 7.3, draws a share equal to its cluster's GPUs divided by the traced
    cluster's (``share = gpus / traced_gpus``). Section 7.4 varies the load with it.
    """
    if not 0 < share <= 1:
        raise InvalidInput("share", "must be above 0 and at most 1; a trace cannot be up-sampled")
    drawn = np.random.default_rng(seed).permutation(len(arrivals))
    kept = np.sort(drawn[: round(share * len(arrivals))])
    return drop_absent_dependencies([arrivals[i] for i in kept])


def sampled_to_load(
    arrivals: Sequence[Arrival], speeds: Speeds, gpus: int, load: float, seed: int
) -> list[Arrival]:
    """Return uniformly drawn jobs in the number that brings the load nearest to ``load``.

    Jobs are drawn one by one until the load passes ``load`` for the last time. The load is defined
    in :mod:`tessera.simulator.traces.speeds`.

    Raises:
        InvalidInput: the load of all jobs is less than 0.99 of ``load``.
    """
    _positive("load", load)
    work = gpu_seconds(arrivals, speeds)
    _all_run(arrivals, work)
    drawn = np.random.default_rng(seed).permutation(len(arrivals))
    last_s = np.maximum.accumulate(np.array([arrivals[i].arrival_s for i in drawn]))
    loads = np.cumsum(work[drawn]) / (gpus * np.maximum(last_s, 1e-9))
    if not len(loads) or loads[-1] < 0.99 * load:
        raise InvalidInput(
            "load",
            f"is only {loads[-1] if len(loads) else 0.0:.3g} with all jobs; let jobs arrive faster"
            " or last longer",
        )
    below = np.flatnonzero(loads <= load)
    kept = int(below[-1]) + 1 if len(below) else 1
    if kept < len(loads) and loads[kept] - load < load - loads[kept - 1]:
        kept += 1
    return drop_absent_dependencies([arrivals[i] for i in np.sort(drawn[:kept])])


def faster_arrivals(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the jobs with arrivals ``factor`` times as fast. The load grows by the same factor."""
    _positive("factor", factor)
    return [a._replace(arrival_s=a.arrival_s / factor) for a in arrivals]


def longer_lives(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the jobs with ``factor`` times the iterations (Arena, section 5.7: scaled lifespans).

    Each job keeps at least one iteration. The time to its deadline grows by the same factor, so
    that deadlines stay as tight as they were.
    """
    _positive("factor", factor)
    return _each(
        arrivals,
        lambda spec: replace(
            spec,
            iterations=max(1, round(spec.iterations * factor)),
            deadline_s=spec.deadline_s * factor,
        ),
    )


def without_deadlines(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the jobs without deadlines."""
    return _each(arrivals, lambda spec: replace(spec, deadline_s=math.inf))


def looser_deadlines(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the jobs with ``factor`` times the time to their deadlines, counted from arrival.

    Arena's artifact runs its deadline experiments with 5.
    """
    _positive("factor", factor)
    return _each(arrivals, lambda spec: replace(spec, deadline_s=spec.deadline_s * factor))


def with_deadlines(
    arrivals: Sequence[Arrival], speeds: Speeds, tightness: tuple[float, float], seed: int
) -> list[Arrival]:
    """Return the jobs with deadlines at a tightness times their requested duration.

    Deadlines count from arrival. The tightness of each job is drawn uniformly between the two
    bounds; equal bounds give that tightness. ElasticFlow (ASPLOS 2023, section 6.1) draws from 0.5
    to 1.5. Below 1, only more GPUs than requested can meet the deadline.
    """
    low, high = tightness
    if not 0 < low <= high < math.inf:
        raise InvalidInput(
            "tightness", "must be a number above 0, or two such numbers in ascending order"
        )
    duration_s = speeds.requested_s(arrivals)
    _all_run(arrivals, duration_s)
    drawn = np.random.default_rng(seed).uniform(low, high, len(arrivals))
    deadlines = zip(arrivals, (drawn * duration_s).tolist(), strict=True)
    return [a._replace(spec=replace(a.spec, deadline_s=max(s, 1e-6))) for a, s in deadlines]


def split_tenants(
    arrivals: Sequence[Arrival], guaranteed_jobs: int, quota_gpus: int, seed: int
) -> tuple[list[Arrival], list[TenantSpec]]:
    """Return the jobs divided between two tenants at random, and the tenants.

    ``guaranteed_jobs`` jobs belong to a tenant with a quota of ``quota_gpus`` of any type and are
    guaranteed. The others belong to a tenant without a quota and are best effort. Morphling,
    section 7.3, trace MT, has a quota of 64 GPUs; its artifact draws 194 of 406 jobs.
    """
    if not 0 <= guaranteed_jobs <= len(arrivals):
        raise InvalidInput(
            "guaranteed_jobs", f"must be from 0 to {len(arrivals):,}, the number of jobs"
        )
    if quota_gpus < 1:
        raise InvalidInput("quota_gpus", "must be 1 or more")
    drawn = np.random.default_rng(seed).permutation(len(arrivals))
    chosen = set(drawn[:guaranteed_jobs].tolist())
    split = [
        a._replace(
            spec=replace(
                a.spec, tenant=GUARANTEED if i in chosen else BEST_EFFORT, guaranteed=i in chosen
            )
        )
        for i, a in enumerate(arrivals)
    ]
    return split, [
        TenantSpec(name=GUARANTEED, quotas={"": quota_gpus}),
        TenantSpec(name=BEST_EFFORT),
    ]


def split_quotas(
    arrivals: Sequence[Arrival],
    guaranteed_jobs: int,
    quota_gpus: int,
    tenants: int,
    block_gpus: int,
    seed: int,
) -> tuple[list[Arrival], list[TenantSpec]]:
    """Return the jobs divided among ``tenants`` tenants at random, and the tenants with quotas.

    ``quota_gpus`` is the sum of the quotas, in blocks of ``block_gpus``. Each tenant has one block,
    and each of the others is drawn a tenant. All jobs are drawn a tenant. Then ``guaranteed_jobs``
    jobs, or as many as there are, are drawn to be guaranteed among those whose request is within
    the quota of their tenant. Others are best effort, and may use what no quota needs. All draws are
    uniform.
    """
    blocks = quota_gpus // block_gpus
    if not 1 <= tenants <= blocks:
        raise InvalidInput("tenants", f"must be from 1 to {blocks}, the number of blocks of quotas")
    rng = np.random.default_rng(seed)
    drawn = np.bincount(rng.integers(tenants, size=blocks - tenants), minlength=tenants)
    quota = ((1 + drawn) * block_gpus).tolist()
    owner = rng.integers(tenants, size=len(arrivals)).tolist()
    fitting = [
        i
        for i, (a, k) in enumerate(zip(arrivals, owner, strict=True))
        if a.spec.requested_gpus <= quota[k]
    ]
    chosen = set(rng.permutation(fitting)[:guaranteed_jobs].tolist())
    split = [
        a._replace(spec=replace(a.spec, tenant=f"tenant-{k}", guaranteed=i in chosen))
        for i, (a, k) in enumerate(zip(arrivals, owner, strict=True))
    ]
    return split, [
        TenantSpec(name=f"tenant-{k}", quotas={"": gpus}) for k, gpus in enumerate(quota)
    ]


def _each(arrivals: Sequence[Arrival], change: Callable[[JobSpec], JobSpec]) -> list[Arrival]:
    return [a._replace(spec=change(a.spec)) for a in arrivals]


def _positive(where: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidInput(where, "must be a positive number")


def _all_run(arrivals: Sequence[Arrival], values: Floats) -> None:
    """Raise InvalidInput if a job does not run as it was requested."""
    if missing := [a.spec.name for a, v in zip(arrivals, values, strict=True) if v == math.inf]:
        first = ", ".join(missing[:5])
        raise InvalidInput(
            "arrivals",
            f"have {len(missing):,} jobs that do not run as requested ({first}), so that their"
            " durations are unknown; drop or redraw them",
        )
