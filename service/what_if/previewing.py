"""The snapshot of a cluster with jobs that nobody has submitted, as a round would see them.

They are submitted in a transaction that is rolled back. So all checks of a submission hold, and the
snapshot is exactly that of the round after a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tessera.estimator.hardware import Hardware
from tessera.formulation.records.estimates import EstimationInputs
from tessera.formulation.records.jobs import JobRecord, JobSpec
from tessera.formulation.records.store import Request
from tessera.formulation.snapshot import Snapshot
from tessera.service.cell_deriver import CellDeriver
from tessera.service.ports import Store, Writer


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
        self, cluster: str, jobs: Sequence[JobSpec], cancelled: Callable[[], bool]
    ) -> Snapshot:
        """Return the cluster's snapshot with ``jobs`` as its last ones. Blocks.

        Raises:
            NotFound: the cluster. AlreadyExists, InvalidInput, LimitReached: a submission of the
                jobs would be refused.
        """
        if not jobs:
            return self._store.snapshot(cluster)

        def submit(writer: Writer) -> bytes:
            writer.submit_jobs(cluster, jobs)
            return b""

        snapshot, known = self._store.rehearse(cluster, [submit])
        new = {job.workload for job in jobs}
        wanted = tuple(
            replace(one, profile=False, asking_job="")  # nothing is measured for a question
            for one in known.wanted
            if one.workload in new and not one.derived_from
        )
        if not wanted:
            return snapshot
        rehearsal = _Rehearsal(self._store, replace(known, wanted=wanted))
        CellDeriver(
            rehearsal,
            self._hardware,
            self._multiples,
            derives=self._derives,
            learns=self._learns,
        ).derive(cluster, cancelled)
        return self._store.rehearse(cluster, [submit, *rehearsal.works])[0]


class _Rehearsal:
    """A store of estimates that shows what is known, and keeps changes for a rehearsal."""

    def __init__(self, store: Store, known: EstimationInputs) -> None:
        self._store, self._known = store, known
        self.works: list[Callable[[Writer], bytes]] = []

    def estimation(self, _cluster: str) -> EstimationInputs:
        return self._known

    def get_job(self, cluster: str, name: str) -> JobRecord:
        return self._store.get_job(cluster, name)

    def write(
        self,
        _request: Request | None,
        work: Callable[[Writer], bytes],
        *,
        validate_only: bool = False,
    ) -> bytes:
        if not validate_only:
            self.works.append(work)
        return b""
