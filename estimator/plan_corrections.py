"""Estimates of plans, corrected by the model of reconfigurable training that fits measured runs best.

A measured run is a Cell that ran by a known plan. Runs of a model on a GPU type, of any batch, choose
a model (:mod:`tessera.estimator.reconfiguration.judging`). If it is not the cost model of the graph,
it replaces the times of all plans that it covers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.estimator.cell_estimator import MAX_PROVENANCE, Estimator
from tessera.estimator.cells import Setting
from tessera.estimator.measured_cells import measured_cells
from tessera.estimator.plans import shape_on
from tessera.estimator.pricing.price import plan_setting, price_plan
from tessera.estimator.reconfiguration import (
    Configuration,
    MachineRates,
    MeasuredRun,
    ModelChoice,
    PlanModel,
    PricedRun,
    TransformerFacts,
    choose_model,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, Offload, Recomputation, model_name
from tessera.formulation.records.estimates import EstimateRecord, MeasurementRecord

ModelKey = tuple[str, str]
"""A model's name in plans, and a GPU type."""


def configuration_of(setting: Setting, plan: ExecutionPlan, name: str) -> Configuration:
    """Return a plan of a setting as the models of reconfigurable training read it.

    ``name`` is that of the trained model. The forward pass of a sample is that of the setting's
    kernels. If the plan states no CPU cores, each GPU has an equal share of its host's.

    Raises:
        InvalidInput: the models do not cover the plan; names the field.
    """
    stage, *others = plan.stages
    if any(other.parallelism != stage.parallelism for other in others):
        raise InvalidInput("stages", "have different parallelism, which the models do not cover")
    if (stage.ep, stage.cp) != (1, 1):
        raise InvalidInput("stages", "divide experts or sequences, which the models do not cover")
    if plan.offload is Offload.PARAMETERS:
        raise InvalidInput("offload", "of parameters is not covered by the models")
    if plan.recomputation is Recomputation.SELECTIVE:
        raise InvalidInput("recomputation", "of attention alone is not covered by the models")
    hardware, degree = setting.hardware, plan.pipeline_degree
    return Configuration(
        facts=transformer_facts(setting, plan, name),
        rates=MachineRates.of(hardware),
        global_batch=plan.global_batch,
        pp=degree,
        tp=stage.tp,
        dp=stage.dp,
        zero=plan.zero,
        offload=plan.offload is not Offload.NONE,
        checkpointing=plan.recomputation is Recomputation.FULL,
        accumulation=plan.accumulation if degree == 1 else 1,
        micro_batches=plan.accumulation if degree > 1 else 1,
        node_gpus=setting.shape.each_node,
        update_cores=plan.cpus_on(1) or hardware.host_cores / hardware.gpus_per_node,
    )


def transformer_facts(setting: Setting, plan: ExecutionPlan, name: str) -> TransformerFacts:
    """Return the facts of a setting's model, with the forward pass of a sample on one GPU.

    Only the product of hidden size and sequence is known: the activations between two blocks.
    """
    run, graph = plan_setting(setting, plan), setting.graph
    one, alone = np.ones(1), np.ones(1, dtype=np.int64)
    forward, _ = run.compute.layer_s(run.graph, run.training, one, alone)
    return TransformerFacts(
        name=name,
        parameters=graph.parameters,
        hidden=round(float(np.median(graph.boundary[:-1]))),
        sequence=1,
        layers=max(1, len(graph) - 2),
        forward_s_per_sample=float(forward.sum()),
    )


def priced_runs(
    estimator: Estimator, measurements: Iterable[MeasurementRecord]
) -> dict[ModelKey, list[PricedRun]]:
    """Return the measured runs by model and GPU type, the latest last.

    Cells are left out whose model or GPU type is unknown, that ran by no recorded plan, or by one
    that the models do not cover.
    """
    runs: dict[ModelKey, list[PricedRun]] = defaultdict(list)
    for cell in measured_cells(measurements):
        if cell.plan is None or not estimator.knows(cell.workload):
            continue
        priced = _priced(estimator, cell.workload, cell.cell, cell.plan)
        if priced is not None:
            configuration, graph_s = priced
            run = MeasuredRun(configuration=configuration, iter_time_s=cell.iter_time_s)
            key = model_name(cell.workload), cell.cell.gpu_type
            runs[key].append(PricedRun(run=run, graph_s=graph_s))
    return runs


def _priced(
    estimator: Estimator, workload: Workload, cell: Cell, plan: ExecutionPlan
) -> tuple[Configuration, float] | None:
    """Return a plan's configuration and its seconds by the cost model.

    The result is None if one of the models does not cover it.
    """
    if cell.gpu_type not in estimator.hardware:
        return None
    shape = shape_on(cell.gpus, cell.nodes, estimator.hardware[cell.gpu_type].gpus_per_node)
    if shape is None:
        return None
    setting = estimator.setting(workload, cell.gpu_type, shape)
    here = replace(plan, shape=shape.each_node)
    try:
        graph_s = price_plan(setting, here).iter_time_s
        return configuration_of(setting, here, model_name(workload)), graph_s
    except InvalidInput:
        return None


@dataclass(kw_only=True)
class PlanCorrections:
    """The chosen models of a cluster's workloads, by model and GPU type.

    A choice lasts until a run shows that it is wrong. ``problems`` say why nothing was chosen.
    """

    choices: dict[ModelKey, ModelChoice] = field(default_factory=dict)
    problems: dict[ModelKey, str] = field(default_factory=dict)

    def has_choice(self, workload: Workload) -> bool:
        """Return whether a model was chosen for a workload's model on some GPU type."""
        return any(model == model_name(workload) for model, _ in self.choices)

    def learn(self, runs: Mapping[ModelKey, Sequence[PricedRun]]) -> list[ModelKey]:
        """Choose models that are missing or wrong; return where that was necessary."""
        changed: list[ModelKey] = []
        for key, own in runs.items():
            choice = self.choices.get(key)
            if choice is not None and not choice.is_outdated_by(own):
                continue
            others = [
                priced.run
                for other, theirs in runs.items()
                if other[1] == key[1] and other != key
                for priced in theirs
            ]
            try:
                self.choices[key] = choose_model(own, others)
            except InvalidInput as wrong:
                self.problems[key] = str(wrong)
                continue
            self.problems.pop(key, None)
            changed.append(key)
        return changed

    def correct(
        self, estimator: Estimator, record: EstimateRecord, *, explain: bool = False
    ) -> EstimateRecord:
        """Return an estimate with the time of the chosen model, if that covers its plan.

        The cost model of the graph corrects nothing: its estimates are calibrated already. With
        ``explain``, the provenance says why nothing was chosen.
        """
        key = model_name(record.workload), record.cell.gpu_type
        choice = self.choices.get(key)
        if record.plan is None or not math.isfinite(record.iter_time_s):
            return record
        if choice is None:
            problem = self.problems.get(key, "runs: none was measured by a recorded plan yet")
            return _with_note(record, f"no model of runs: {problem}") if explain else record
        if choice.model is PlanModel.GRAPH:
            return _with_note(record, str(choice)) if explain else record
        priced = _priced(estimator, record.workload, record.cell, record.plan)
        if priced is None or not choice.covers(priced[0]):
            return record
        corrected = replace(record, iter_time_s=choice.predict_s(*priced), sd=choice.sd)
        return _with_note(corrected, str(choice))


def _with_note(record: EstimateRecord, note: str) -> EstimateRecord:
    return replace(record, provenance=f"{record.provenance}; {note}"[:MAX_PROVENANCE])
