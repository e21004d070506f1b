"""The sensitivity curves of jobs, for callers: read, computed and kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from threading import Lock
from typing import Final, Generic, TypeVar

from tessera.db.estimates.derived_estimates import load_estimation
from tessera.db.estimates.plans import read_plans
from tessera.db.store.reads import get_job
from tessera.db.store.store import Store
from tessera.estimator.fingerprints import estimates_fingerprint
from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import hardware_of
from tessera.estimator.models import known_models, unknown_model
from tessera.formulation.answer.codec import digest
from tessera.formulation.answer.job_curves import JobCurves, TypeCurves, curves_of_job
from tessera.formulation.base.cancellation import require_caller
from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.formulation.job.execution_plan import ExecutionPlan, read_execution_plan
from tessera.formulation.records.estimates import EstimationInputs
from tessera.formulation.state.focus import focus_on
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.convert import names
from tessera.service.server.convert.curves import of_curves
from tessera.service.server.estimates.bandwidth import BandwidthCurve, trace_bandwidth
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.v1 import jobs_pb2 as pb

MAX_KEPT: Final = 256
"""Number of results that are kept, of curves and of bandwidths. One takes some kilobytes."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class KeptResults(Generic[K, T]):
    """The results that were last used, at most ``most``. Any thread may use it."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._kept: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K, compute: Callable[[], T]) -> T:
        """Return the result of ``key``, computed if it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        result = compute()
        with self._lock:
            self._kept[key] = result
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return result


class CurveReader:
    """A reader of jobs' curves. Its methods block.

    Results are kept by the content that they depend on, so nobody gets one of older estimates.
    ``hardware`` is the catalogue by name, and ``policies`` those of periodic rounds.
    """

    def __init__(
        self, store: Store, hardware: Mapping[str, Hardware], policies: StandingPolicies
    ) -> None:
        self._store, self._hardware, self._policies = store, hardware, policies
        self._curves = KeptResults[Hashable, JobCurves](MAX_KEPT)
        self._bandwidths = KeptResults[Hashable, BandwidthCurve](MAX_KEPT)

    def read(self, request: pb.GetJobCurvesRequest, cancelled: Callable[[], bool]) -> pb.JobCurves:
        """Return the curves of a job.

        Raises:
            NotFound: the job.
            NotAllowed: it has ended, or no Cell is known that it may run on.
            InvalidInput: it has no Cell on the number of GPUs.
        """
        cluster, job = names.parse_job("name", request.name)
        if request.gpus < 0:
            raise InvalidInput("gpus", "must be at least 0")
        record = self._store.read(get_job, cluster, job)
        snapshot = self._store.snapshot(cluster)
        if job not in snapshot.jobs.name:
            raise NotAllowed("the job has ended, so it has no curves; only live jobs have some")
        require_caller(cancelled)
        focus = focus_on(snapshot, snapshot.jobs.name.index(job))
        key = digest(focus)
        policy = self._policies.of(cluster).options
        found = self._curves.get(
            (key, policy, request.gpus), lambda: curves_of_job(focus, policy, request.gpus)
        )
        require_caller(cancelled)
        plans = self._plans(cluster, focus)
        known = self._store.read(load_estimation, cluster)
        bandwidths = []
        for of_type in found.types:
            require_caller(cancelled)
            bandwidths.append(self._bandwidth(known, focus, key, of_type, plans))
        return of_curves(cluster, record.spec, focus, found, bandwidths, plans)

    def _plans(self, cluster: str, focus: Snapshot) -> dict[int, ExecutionPlan]:
        """Return the recorded execution plans, by their index in ``focus``."""
        texts = self._store.read(read_plans, cluster, [name for name in focus.plans if name])
        return {
            index: read_execution_plan("plan", texts[name])
            for index, name in enumerate(focus.plans)
            if name in texts
        }

    def _bandwidth(
        self,
        known: EstimationInputs,
        focus: Snapshot,
        key: str,
        found: TypeCurves,
        plans: Mapping[int, ExecutionPlan],
    ) -> BandwidthCurve:
        """Return the curve of bandwidth on a GPU type. ``key`` is the digest of ``focus``."""
        workload, gpu_type = focus.workloads[0], focus.gpu_types[found.gpu_type].name
        model = known_models([workload], known.models, known.profiles).get(workload)
        if model is None:
            return BandwidthCurve(unknown_reason="; ".join(unknown_model(workload)))
        kind = next((k for k in known.kinds if k.gpu_type.name == gpu_type), None)
        if kind is None:
            return BandwidthCurve(unknown_reason=f"the GPU type {gpu_type} was deleted")
        try:
            hardware = hardware_of("gpu_type", kind, self._hardware, known.hosts)
        except InvalidInput as wrong:
            return BandwidthCurve(unknown_reason=wrong.problem)
        spec = next(
            (s for s in known.models if (s.model, s.params) == (workload.model, workload.params)),
            None,
        )
        counts = {gpu_type: [found.at_gpus]}
        depends_on = estimates_fingerprint(
            workload, spec, counts, {gpu_type: hardware}, (), model.profiles
        )
        return self._bandwidths.get(
            (key, depends_on),
            lambda: trace_bandwidth(workload, model, hardware, found.cells, plans),
        )
