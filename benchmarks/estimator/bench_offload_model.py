"""Predicted iteration times of ZeRO-Offload, compared with our own measurements on one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.benchmarks.estimator.own_runs import RUNS_H200, read_rows
from tessera.benchmarks.harness.registry import register_case
from tessera.estimator.hardware import H200
from tessera.estimator.reconfiguration.appendix import appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import (
    Configuration,
    ConfigurationTable,
    MachineRates,
    TransformerFacts,
)
from tessera.estimator.reconfiguration.fitting import MeasuredRun, fit_appendix
from tessera.estimator.reconfiguration.pooling import choose_runs, fit_pooled
from tessera.formulation.execution_plan import ZeroStage
from tessera.formulation.tables import Floats
from tessera.simulator.figures import Figure, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A measured plan, with the numbers that name it."""

    run: MeasuredRun
    accumulation: int
    checkpointing: bool
    threads: int  # that updated the states on the host; 0 if the GPU updated them

    def __str__(self) -> str:
        """Return the plan in short."""
        words = [f"accumulation {self.accumulation}"]
        words += ["checkpointing"] * self.checkpointing
        words += [f"offload by {self.threads} threads"] * bool(self.threads)
        return ", ".join(words)


@register_case("offload-model", smoke={}, mape=("<=", 0.1), unseen_mape=("<=", 0.4))
def judge_offload_models() -> Report:
    """Predict iterations of GPTs from seven runs of each, and compare them with measured ones.

    **Data.** Iterations of three GPTs in PyTorch on one H200, by accumulation, checkpointing and
    ZeRO-Offload with 1 to 16 threads of the host. The file names its machine and its program. No
    form and no constant of a model was chosen on these data.

    **Runs.** ``choose_runs`` picks seven runs of each model before any time is known, at least three
    with ZeRO-Offload. Only runs that were not picked are scored. ``unseen_*`` are all runs of each
    model, predicted from the picked runs of the other two; the published model cannot do that.

    **Methods.** ``appendix_*`` is the published model (Morphling, appendix A). The others are ours,
    fitted to the runs of all models together. Both know the data sheet's bandwidth to the host, and
    one measured forward pass of each GPT. ``offload_*`` and ``appendix_offload_*`` count the plans
    with ZeRO-Offload alone. ``thread_gain`` is the measured speed of 16 threads over that of one, for
    the largest GPT for which both were measured.
    """
    plans = read_timed_plans(RUNS_H200)
    by_model: dict[str, list[TimedPlan]] = {}
    for plan in plans:
        by_model.setdefault(plan.run.configuration.facts.name, []).append(plan)
    fitted: dict[str, list[MeasuredRun]] = {}
    scored: list[TimedPlan] = []
    for model, own in by_model.items():
        chosen = set(choose_runs([plan.run.configuration for plan in own]))
        fitted[model] = [plan.run for i, plan in enumerate(own) if i in chosen]
        scored += [plan for i, plan in enumerate(own) if i not in chosen]
    ours_errors = _errors(_pooled_s(fitted, scored), scored)
    unseen_errors = np.concatenate(
        [
            _errors(_pooled_s({m: r for m, r in fitted.items() if m != model}, own), own)
            for model, own in by_model.items()
        ]
    )
    appendix_errors = _errors(_appendix_s(fitted, scored), scored)
    offloads = np.array([plan.threads > 0 for plan in scored])
    figures: dict[str, Figure] = {
        **_summary("", ours_errors),
        **_summary("offload_", ours_errors[offloads]),
        **_summary("appendix_", appendix_errors),
        **_summary("appendix_offload_", appendix_errors[offloads]),
        **_summary("unseen_", unseen_errors),
        "points": len(scored),
        "fitted_runs": sum(map(len, fitted.values())),
        "thread_gain": _thread_gain(plans),
    }
    table = _rows(scored, {"ours": ours_errors, "appendix": appendix_errors})
    return Report(seed=0, figures=figures, table=table)


def read_timed_plans(path: Path) -> list[TimedPlan]:
    """Return the measured plans of a file. Those that ran out of memory are left out."""
    rows, rates = read_rows(path), MachineRates.of(H200)
    forward_s = {  # the profiled pass: that of the whole batch, by the GPU's own plan
        row["name"]: row["forward_s"] / row["batch"]
        for row in rows
        if (row["accumulation"], row["checkpointing"], row["threads"]) == (1, False, 0)
    }
    return [_timed_plan(row, rates, forward_s[row["name"]]) for row in rows if "iter_time_s" in row]


def _timed_plan(row: Mapping[str, Any], rates: MachineRates, forward_s: float) -> TimedPlan:
    facts = TransformerFacts(
        name=row["name"],
        parameters=row["parameters"],
        hidden=row["hidden"],
        sequence=row["sequence"],
        layers=row["layers"],
        forward_s_per_sample=forward_s,
    )
    threads = row["threads"]
    configuration = Configuration(
        facts=facts,
        rates=rates,
        global_batch=row["batch"],
        zero=ZeroStage.GRADIENTS if threads else ZeroStage.NONE,
        offload=bool(threads),
        checkpointing=row["checkpointing"],
        accumulation=row["accumulation"],
        node_gpus=(1,),
        cpus_per_gpu=max(1, threads),
    )
    return TimedPlan(
        run=MeasuredRun(configuration=configuration, iter_time_s=row["iter_time_s"]),
        accumulation=row["accumulation"],
        checkpointing=row["checkpointing"],
        threads=threads,
    )


def _pooled_s(fitted: Mapping[str, list[MeasuredRun]], scored: Sequence[TimedPlan]) -> Floats:
    fit = fit_pooled([run for runs in fitted.values() for run in runs])
    return fit.predict_s([plan.run.configuration for plan in scored])


def _appendix_s(fitted: Mapping[str, list[MeasuredRun]], scored: Sequence[TimedPlan]) -> Floats:
    own = {model: fit_appendix(runs).parameters for model, runs in fitted.items()}
    times = [
        appendix_iteration_s(
            ConfigurationTable.of([plan.run.configuration]),
            own[plan.run.configuration.facts.name],
        )
        for plan in scored
    ]
    return np.concatenate(times)


def _errors(predicted_s: Floats, plans: Sequence[TimedPlan]) -> Floats:
    measured_s = np.array([plan.run.iter_time_s for plan in plans])
    return np.asarray(predicted_s / measured_s - 1, dtype=np.float64)


def _summary(prefix: str, errors: Floats) -> dict[str, Figure]:
    """Return the mean and the largest absolute error."""
    return {
        f"{prefix}mape": float(np.abs(errors).mean()),
        f"{prefix}worst": float(np.abs(errors).max()),
    }


def _thread_gain(plans: Sequence[TimedPlan]) -> float:
    seconds = {
        (plan.run.configuration.facts.parameters, plan.threads): plan.run.iter_time_s
        for plan in plans
        if plan.accumulation == 1 and not plan.checkpointing
    }
    most = max(threads for _, threads in seconds)
    largest = max(parameters for parameters, threads in seconds if threads == most)
    return seconds[largest, 1] / seconds[largest, most]


def _rows(
    plans: Sequence[TimedPlan], errors: Mapping[str, Floats]
) -> list[dict[str, Figure | str]]:
    return [
        {
            "model": plan.run.configuration.facts.name,
            "plan": str(plan),
            "seconds": plan.run.iter_time_s,
            **{f"{method}_error": float(own[i]) for method, own in errors.items()},
        }
        for i, plan in enumerate(plans)
    ]
