"""The snapshot of a cluster with jobs that nobody has submitted, as a round would see them.

They are submitted in a transaction that is rolled back. So all checks of a submission hold, and the
snapshot is exactly that of the round after a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from tessera.db.jobs.submission import submit_jobs
from tessera.db.store.store import Connection, Store
from tessera.estimator.hardware import Hardware
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.values import Workload
from tessera.formulation.records.estimates import EstimationInputs
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.estimates.deriver import CellDeriver

P = ParamSpec("P")
T = TypeVar("T")


class JobPreviewer:
    """A maker of snapshots with further jobs.

    If ``derives`` is set, workloads without estimates get those that the server would make for
    them, on the GPU types of ``hardware`` and at the requests times ``multiples``.
    """

    def __init__(
        self,
        store: Store,
        hardware: Mapping[str, Hardware],
        multiples: Sequence[float],
        *,
        derives: bool,
        learns: bool,
    ) -> None:
        self._store, self._hardware, self._multiples = store, hardware, multiples
        self._derives, self._learns = derives, learns

    def snapshot_with(
        self,
        cluster: str,
        jobs: Sequence[JobSpec],
        use_half_life_s: float,
        cancelled: Callable[[], bool],
    ) -> Snapshot:
        """Return the cluster's snapshot with ``jobs`` as its last ones. Blocks.

        It has the use of tenants that decays by ``use_half_life_s``, unless that is 0.

        Raises:
            NotFound: the cluster. AlreadyExists, InvalidInput, LimitReached: a submission of the
                jobs would be refused.
        """
        if not jobs:
            return self._store.snapshot(cluster, use_half_life_s)
        tenants = IDENTITY.get().tenants
        rehearsal = _Rehearsal(
            self._store,
            cluster,
            lambda connection: submit_jobs(connection, cluster, jobs, tenants),
            use_half_life_s,
        )
        if rehearsal.keep_wanted({job.workload for job in jobs}):
            CellDeriver(
                rehearsal,
                self._hardware,
                self._multiples,
                derives=self._derives,
                learns=self._learns,
            ).derive(cluster, cancelled)
        return rehearsal.snapshot


class _Rehearsal:
    """A store of estimates whose changes last only as long as this object.

    Each change repeats those before it in one transaction, which is rolled back. ``snapshot`` is that
    after the last one.
    """

    def __init__(
        self,
        store: Store,
        cluster: str,
        first: Callable[[Connection], object],
        use_half_life_s: float,
    ) -> None:
        self._store, self._cluster = store, cluster
        self._works: list[Callable[[Connection], object]] = [first]
        self._use_half_life_s = use_half_life_s
        self.snapshot, self._known = store.rehearse(cluster, self._works, use_half_life_s)

    def keep_wanted(self, workloads: Collection[Workload]) -> bool:
        """Leave only ``workloads`` to be estimated; return whether any of them has no estimates."""
        wanted = tuple(
            replace(one, profile=False, asking_job="")  # nothing is measured for a question
            for one in self._known.wanted
            if one.workload in workloads and not one.derived_from
        )
        self._known = replace(self._known, wanted=wanted)
        return bool(wanted)

    def estimation(self, _cluster: str) -> EstimationInputs:
        """Return what estimates are computed from, with the workloads that were left."""
        return self._known

    def read(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` on the real store, without the changes."""
        return self._store.read(function, *args, **kwargs)

    def change(
        self,
        function: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function`` after all changes before it, and keep its change."""
        results: list[T] = []

        def work(connection: Connection) -> None:
            results.append(function(connection, *args, **kwargs))

        works = [*self._works, work]
        self.snapshot, _ = self._store.rehearse(self._cluster, works, self._use_half_life_s)
        self._works = works
        return results[-1]
