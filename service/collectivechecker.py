"""The background check of estimated collectives against those that XLA compiles for the JAX step.

Only published models are checked, whose steps are part of this release. The step of a user's model
is code, which servers never run; ``tessera estimate --check-collectives`` checks it on the user's
machine.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tessera.estimator.compiling.checking import (
    Check,
    FailedCheck,
    check_degrees,
    check_document,
    checks_note,
)
from tessera.estimator.compiling.comparison import StepDegrees, degrees_to_check
from tessera.estimator.compiling.compile import CompileRequest, compile_step
from tessera.estimator.compiling.compiled import CompiledStep, Uncompilable
from tessera.estimator.models import model_of
from tessera.estimator.profiling.tasks import StepTarget, step_of
from tessera.formulation.records.estimates import CollectiveRecord, EstimateRecord, EstimationInputs
from tessera.formulation.release import installed_version
from tessera.formulation.values import Workload
from tessera.service.ports.store import Store
from tessera.service.ports.writer import Writer

log = logging.getLogger(__name__)

MAX_CHECKS_PER_MODEL: Final = 8
"""Largest number of degrees for which a model is compiled. Those that most of its plans have come
first. Each takes some tens of seconds of a core, once for each release."""

MAX_PLANS: Final = 10_000
"""Number of estimates of a workload whose plans are looked at."""

StepCompiler = Callable[[CompileRequest, Callable[[], bool]], CompiledStep]


class CollectiveChecker:
    """A checker of the collectives of the plans that live jobs may run by.

    Its methods block, and only one thread may use it at a time. A compilation is limited to
    ``limit_s`` seconds. A result is stored, also that of a failure, and used until the release of
    Tessera changes.
    """

    def __init__(self, store: Store, limit_s: float, compiler: StepCompiler | None = None) -> None:
        self._store, self._limit_s = store, limit_s
        self._compile = compiler or self._compile_step

    def check(
        self,
        cluster: str,
        cancelled: Callable[[], bool] = lambda: False,
        woken: Callable[[], bool] = lambda: False,
    ) -> int:
        """Compare what was not compared yet, one compilation after another.

        Return the number of comparisons. ``woken`` is not called.

        Raises:
            NotFound: the cluster. Unavailable: JAX is not installed. DeadlineTooShort: it was
                cancelled.
        """
        known, done = self._store.estimation(cluster), 0
        models = dict.fromkeys((w.workload.model, w.workload.params) for w in known.wanted)
        for model in models:
            for workload, degrees in self._missing(cluster, known, model):
                if cancelled():
                    return done
                self._check_degrees(cluster, workload, degrees, cancelled)
                done += 1
        return done

    def _missing(
        self, cluster: str, known: EstimationInputs, model: tuple[str, str]
    ) -> list[tuple[Workload, StepDegrees]]:
        """Return the degrees of a model's plans that were not checked, the most common ones first."""
        workloads = [
            w.workload for w in known.wanted if (w.workload.model, w.workload.params) == model
        ]
        if _step(known, workloads[0]) is None:
            return []
        counts = Counter[StepDegrees]()
        for w in workloads:
            key = (w.model, w.params, w.global_batch)
            records, _ = self._store.list_estimates(cluster, *key, 0, MAX_PLANS)
            for record in records:
                counts.update(plan_degrees(record))
        there = {degrees for degrees, _ in _checks_of(known.checks, model)}
        common = sorted(counts, key=lambda d: (-counts[d], d))[:MAX_CHECKS_PER_MODEL]
        return [(workloads[0], degrees) for degrees in common if degrees not in there]

    def _check_degrees(
        self,
        cluster: str,
        workload: Workload,
        degrees: StepDegrees,
        cancelled: Callable[[], bool],
    ) -> None:
        step, graph = step_of(workload, ()), model_of("model", workload, ()).graph
        if step is None:
            raise AssertionError("only models with a step are missing")
        check = check_degrees(
            graph,
            step.target,
            dict(step.arguments),
            degrees,
            lambda request: self._compile(request, cancelled),
        )
        record = _record(workload, check)
        self._store.write(None, partial(_put, cluster, record))
        facts = {"cluster": cluster, "workload": workload.key, "degrees": degrees}
        if record.problem:
            log.warning(
                "collectives were not compared",
                extra={"event": "collectives_checked", **facts, "error": record.problem},
            )
        else:
            level = logging.WARNING if record.differs else logging.INFO
            log.log(
                level,
                "compared collectives",
                extra={
                    "event": "collectives_checked",
                    **facts,
                    "differs": record.differs,
                    "note": record.note or "no collectives",
                },
            )

    def _compile_step(self, request: CompileRequest, cancelled: Callable[[], bool]) -> CompiledStep:
        return compile_step(request, timeout_s=self._limit_s, cancelled=cancelled)


def plan_degrees(record: EstimateRecord) -> list[StepDegrees]:
    """Return the degrees to compile for the plan of an estimate, if it has one."""
    if record.plan is None:
        return []
    try:
        return degrees_to_check(record.plan.stages, record.plan.zero)
    except Uncompilable:
        return []


def collective_notes(
    checks: Sequence[CollectiveRecord], workload: Workload
) -> dict[StepDegrees, str]:
    """Return what the checks of this release say of a workload's collectives, by degrees."""
    of_model = _checks_of(checks, (workload.model, workload.params))
    return {degrees: check.note for degrees, check in of_model if check.note}


def _checks_of(
    checks: Sequence[CollectiveRecord], model: tuple[str, str]
) -> list[tuple[StepDegrees, CollectiveRecord]]:
    return [
        (StepDegrees(dp=check.dp, tp=check.tp, zero=check.zero), check)
        for check in checks
        if (check.model, check.params) == model and check.release == installed_version()
    ]


def _step(known: EstimationInputs, workload: Workload) -> StepTarget | None:
    """Return the step of a published model. A model that a user described has none here."""
    own = any((m.model, m.params) == (workload.model, workload.params) for m in known.models)
    return None if own else step_of(workload, ())


def _record(workload: Workload, check: Check) -> CollectiveRecord:
    return CollectiveRecord(
        model=workload.model,
        params=workload.params,
        dp=check.degrees.dp,
        tp=check.degrees.tp,
        zero=check.degrees.zero,
        release=installed_version(),
        note=checks_note([check]),
        problem=check.problem if isinstance(check, FailedCheck) else "",
        differs=not isinstance(check, FailedCheck) and bool(check.differing),
        document=json.dumps(check_document(check), sort_keys=True),
    )


def _put(cluster: str, record: CollectiveRecord, writer: Writer) -> bytes:
    writer.put_collective_check(cluster, record)
    return b""
