"""The reasons why workloads have no estimates, which their queued jobs show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import no_known_type
from tessera.estimator.models import unknown_model
from tessera.formulation.base.values import Workload
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.records.estimates import EstimationInputs

_RUNS_WITHOUT: Final = "a job that states a GPU type runs without"


def _reason(
    workload: Workload, message: str, next_step: str, code: ReasonCode = ReasonCode.NO_ESTIMATE
) -> Reason:
    return Reason(
        code=code,
        message=f"{workload.key} has no estimates: {message}",
        next_step=next_step,
        evidence=(("workload", workload.key),),
    )


def explain_unknown_model(workload: Workload) -> Reason:
    """Return the reason of a workload whose model nobody has described."""
    problem, next_step = unknown_model(workload)
    return _reason(workload, problem, f"{next_step}; {_RUNS_WITHOUT}")


def explain_underived(workload: Workload) -> Reason:
    """Return the reason of a workload on a server that makes no estimates."""
    return _reason(
        workload,
        "the server derives none, because its setting estimate_cells is off",
        f"import a profile of it, or add Cells; {_RUNS_WITHOUT}",
    )


def explain_unfit(
    workload: Workload,
    known: EstimationInputs,
    hardware: Mapping[str, Hardware],
    counts: Iterable[int],
) -> Reason:
    """Return the reason of a workload of which no GPU type of the cluster has one of ``counts``."""
    there = {k.gpu_type.name: k.gpus for k in known.kinds if k.gpus}
    fits = {name: gpus for name, gpus in there.items() if name in hardware}
    if not fits:
        return _reason(workload, no_known_type(there, hardware), "")
    wanted = ", ".join(map(str, counts)) or "none"
    have = ", ".join(f"{gpus} x {name}" for name, gpus in fits.items())
    return _reason(
        workload,
        f"the numbers of GPUs to estimate are {wanted}, but the cluster has only {have}",
        "request fewer GPUs, add nodes, or add smaller multiples to the server's setting estimate_counts",
    )


def explain_pending(workload: Workload, counts: Mapping[str, Sequence[int]]) -> Reason:
    """Return the reason of a workload that is being estimated on the GPU types of ``counts``."""
    return _reason(
        workload,
        f"they are being computed for {', '.join(counts)}",
        "wait until they are ready",
        ReasonCode.ESTIMATING,
    )


def explain_failure(workload: Workload, problem: str) -> Reason:
    """Return the reason of a workload whose estimates could not be computed."""
    return _reason(
        workload, f"they could not be computed: {problem}", "import a profile of it, or add Cells"
    )
