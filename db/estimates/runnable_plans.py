"""The execution plans that a cluster's jobs cannot run, by runtime and techniques, for its snapshot."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import sqlalchemy as sa

from tessera.db.base.cells import stored_plan
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.runtimes import RESTRICTED_RUNTIMES, RUNTIMES
from tessera.formulation.job.techniques import Technique, techniques_of
from tessera.formulation.state.plan_tables import (
    NO_REFUSED_PLANS,
    NO_RUNTIMES,
    RefusedPlans,
    Runtimes,
)
from tessera.formulation.state.snapshot import Estimates, Jobs

_PLANS = sa.text("""
SELECT p.name, p.document FROM plans p
WHERE p.cluster_id = :cluster AND p.name = ANY(:names) AND p.document <> ''
""")

MAX_CACHED_PLANS: Final = 100_000
"""Number of plans of which the process remembers what they need."""

_TECHNIQUES: Final = tuple(Technique)
_EVERY: Final = (1 << len(_TECHNIQUES)) - 1

TECHNIQUES_MASK: Final = (
    "CASE WHEN j.techniques = '[]' THEN 0 ELSE "
    + " + ".join(
        f"CASE WHEN j.techniques ? '{technique}' THEN {1 << bit} ELSE 0 END"
        for bit, technique in enumerate(_TECHNIQUES)
    )
    + " END::int8"
)
"""An expression for the techniques of a job (j): a bit for each, or 0 if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanNeeds:
    """The needs of a plan: not one of the ``refusing`` runtimes, and all of its techniques.

    ``refusing`` are indices into ``RESTRICTED_RUNTIMES``, and ``techniques`` has a bit for each.
    """

    refusing: tuple[int, ...]
    techniques: int

    def are_missing(self, runtime: int, techniques: int) -> bool:
        """Return whether a runtime (-1: one that runs any plan) or some techniques (0: all) do not do."""
        return runtime in self.refusing or bool(self.techniques & ~(techniques or _EVERY))


_NEEDS: Final[dict[str, _PlanNeeds]] = {}
"""The needs of plans, by digest."""
_LOCK: Final = threading.Lock()


def load_refused_plans(
    connection: sa.Connection,
    cluster: int,
    jobs: Jobs,
    techniques: Ints,
    estimates: Estimates,
    plans: Collection[str],
) -> tuple[Jobs, Runtimes, RefusedPlans]:
    """Return the jobs, their runtimes that cannot run every plan, and the plans these refuse.

    ``jobs.runtime`` must be an index into ``RESTRICTED_RUNTIMES``, and is one into the runtimes in
    the result. ``techniques`` are those of each job as ``TECHNIQUES_MASK`` gives them, int64[jobs].
    Only the plans of jobs that cannot run every plan are looked at: those of the estimates of their
    workloads, those that they run by, and those that their users state.
    """
    of = np.flatnonzero((jobs.runtime >= 0) | (techniques > 0))
    if not len(of):
        return jobs, NO_RUNTIMES, NO_REFUSED_PLANS
    limits, runtime = np.unique(
        np.stack([jobs.runtime[of], techniques[of]]), axis=1, return_inverse=True
    )
    whole = np.full(len(jobs), -1, dtype=np.int64)
    whole[of] = runtime.ravel()
    digests = tuple(plans)
    at = _plans_of(jobs, estimates, of)
    needs = _needs_of(connection, cluster, [digests[plan] for plan in at.tolist()])
    rows = limits.T.tolist()
    pairs = [
        {"runtime": index, "plan": plan}
        for index, (code, mask) in enumerate(rows)
        for plan in at.tolist()
        if digests[plan] in needs and needs[digests[plan]].are_missing(code, mask)
    ]
    runtimes = Runtimes.from_rows([_runtime_row(code, mask) for code, mask in rows])
    return replace(jobs, runtime=whole), runtimes, RefusedPlans.from_rows(pairs)


def _runtime_row(code: int, mask: int) -> dict[str, object]:
    """Return the row of a runtime (an index, or -1) with techniques (bits, or 0 for all)."""
    named = [technique for bit, technique in enumerate(_TECHNIQUES) if mask >> bit & 1]
    can_pipeline = not named or Technique.PIPELINE_PARALLELISM in named
    return {
        "name": RESTRICTED_RUNTIMES[code] if code >= 0 else "",
        "pipelines": can_pipeline and (code < 0 or RUNTIMES[RESTRICTED_RUNTIMES[code]].pipelines),
        "techniques": ", ".join(named),
    }


def _plans_of(jobs: Jobs, estimates: Estimates, of: Ints) -> Ints:
    """Return the plans by which the jobs ``of`` may run, rising indices into the snapshot's."""
    mine = np.isin(estimates.workload, np.unique(jobs.workload[of]))
    stated = jobs.plan[of]
    runs = jobs.current_plan[of][jobs.current_gpus[of] > 0]
    return np.unique(np.concatenate([estimates.plan[mine], stated[stated >= 0], runs]))


def _needs_of(
    connection: sa.Connection, cluster: int, digests: Collection[str]
) -> dict[str, _PlanNeeds]:
    """Return the needs of plans, by digest. Plans that are only names are absent."""
    with _LOCK:
        known = {name: _NEEDS[name] for name in digests if name in _NEEDS}
    names = sorted(set(digests) - known.keys() - {""})
    if not names:
        return known
    rows = connection.execute(_PLANS, {"cluster": cluster, "names": names})
    documents = ((row.name, stored_plan(row.document)) for row in rows)
    news = {name: _judge(plan) for name, plan in documents if plan is not None}
    with _LOCK:
        if len(_NEEDS) + len(news) > MAX_CACHED_PLANS:
            _NEEDS.clear()
        _NEEDS.update(news)
    return known | news


def _judge(plan: ExecutionPlan) -> _PlanNeeds:
    used = techniques_of(plan)
    return _PlanNeeds(
        refusing=tuple(
            code
            for code, name in enumerate(RESTRICTED_RUNTIMES)
            if RUNTIMES[name].refuse_plan(plan)
        ),
        techniques=sum(1 << bit for bit, technique in enumerate(_TECHNIQUES) if technique in used),
    )
