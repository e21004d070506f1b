"""The execution plans that the runtimes of a cluster's jobs cannot run, for its snapshot."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from tessera.db.cells import stored_plan
from tessera.formulation.runtimes import RESTRICTED_RUNTIMES, RUNTIMES
from tessera.formulation.snapshot import (
    NO_REFUSED_PLANS,
    NO_RUNTIMES,
    Estimates,
    Jobs,
    RefusedPlans,
    Runtimes,
)
from tessera.formulation.tables import Ints

_PLANS = sa.text("""
SELECT p.name, p.document FROM plans p
WHERE p.cluster_id = :cluster AND p.name = ANY(:names) AND p.document <> ''
""")

MAX_CACHED_PLANS: Final = 100_000
"""Number of plans of which the process remembers which runtimes refuse them."""

_REFUSING: Final[dict[str, tuple[int, ...]]] = {}
"""Indices into ``RESTRICTED_RUNTIMES`` of those that refuse a plan, by the plan's digest."""
_LOCK: Final = threading.Lock()


def load_refused_plans(
    connection: sa.Connection,
    cluster: int,
    jobs: Jobs,
    estimates: Estimates,
    plans: Collection[str],
) -> tuple[Jobs, Runtimes, RefusedPlans]:
    """Return the jobs, their runtimes that cannot run every plan, and the plans these refuse.

    ``jobs.runtime`` must be an index into ``RESTRICTED_RUNTIMES``, and is one into the runtimes in
    the result. Only the plans of jobs with such runtimes are looked at: those of the estimates of
    their workloads, those that they run by, and those that their users state.
    """
    of = np.flatnonzero(jobs.runtime >= 0)
    if not len(of):
        return jobs, NO_RUNTIMES, NO_REFUSED_PLANS
    codes, runtime = np.unique(jobs.runtime[of], return_inverse=True)
    whole = np.full(len(jobs), -1, dtype=np.int64)
    whole[of] = runtime
    names = [RESTRICTED_RUNTIMES[code] for code in codes.tolist()]
    digests = tuple(plans)
    at = _plans_of(jobs, estimates, of)
    refusing = _refusing(connection, cluster, [digests[plan] for plan in at.tolist()])
    pairs = [
        {"runtime": index, "plan": plan}
        for index, code in enumerate(codes.tolist())
        for plan in at.tolist()
        if code in refusing.get(digests[plan], ())
    ]
    pipelines = np.array([RUNTIMES[name].pipelines for name in names], dtype=np.bool_)
    runtimes = Runtimes(name=tuple(names), pipelines=pipelines)
    return replace(jobs, runtime=whole), runtimes, RefusedPlans.from_rows(pairs)


def _plans_of(jobs: Jobs, estimates: Estimates, of: Ints) -> Ints:
    """Return the plans by which the jobs ``of`` may run, rising indices into the snapshot's."""
    mine = np.isin(estimates.workload, np.unique(jobs.workload[of]))
    stated = jobs.stated_plan[of]
    runs = jobs.current_plan[of][jobs.current_gpus[of] > 0]
    return np.unique(np.concatenate([estimates.plan[mine], stated[stated >= 0], runs]))


def _refusing(
    connection: sa.Connection, cluster: int, digests: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the runtimes that refuse each plan, by digest. Plans that are only names are absent."""
    with _LOCK:
        known = {name: _REFUSING[name] for name in digests if name in _REFUSING}
    names = sorted(set(digests) - known.keys() - {""})
    if not names:
        return known
    rows = connection.execute(_PLANS, {"cluster": cluster, "names": names})
    news = {row.name: _judge(row) for row in rows}
    with _LOCK:
        if len(_REFUSING) + len(news) > MAX_CACHED_PLANS:
            _REFUSING.clear()
        _REFUSING.update(news)
    return known | news


def _judge(row: sa.Row[Any]) -> tuple[int, ...]:
    """Return the runtimes that refuse the plan of a row."""
    plan = stored_plan(row.document)
    if plan is None:
        return ()
    return tuple(
        code for code, name in enumerate(RESTRICTED_RUNTIMES) if RUNTIMES[name].refuse_plan(plan)
    )
