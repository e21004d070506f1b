"""Settings and plans for tests of stated plans: a small decoder on nodes of eight GPUs."""

from __future__ import annotations

from typing import Any

from tessera.estimator.architectures.moe import MixtureOfExperts, mixture_graph
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.memory import States
from tessera.estimator.plans import Training, shape_of
from tessera.estimator.stated.completion import PlanContext
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage

SIZES: dict[str, Any] = {
    "name": "decoder",
    "layers": 16,
    "hidden": 2048,
    "heads": 24,
    "head_dim": 128,
    "sequence": 2048,
    "vocabulary": 50304,
}


def a_decoder(**changes: Any) -> Graph:
    """Return a decoder of 16 blocks, so of 18 layers, with 24 heads."""
    return transformer_graph(Transformer(**(SIZES | changes)))


def a_mixture(**changes: Any) -> Graph:
    """Return the same with 8 experts in each block."""
    return mixture_graph(MixtureOfExperts(**(SIZES | {"experts": 8} | changes)))


def a_setting(
    gpus: int = 16, batch: int = 64, graph: Graph | None = None, gpu: str = "h200"
) -> Setting:
    """Return a decoder on GPUs of a data sheet."""
    hardware = next(kind for kind in CATALOGUE if kind.name == gpu)
    return data_sheet_setting(
        graph or a_decoder(),
        Training(global_batch=batch, micro_batches=8),
        hardware,
        shape_of(gpus, hardware.gpus_per_node),
        States(),
    )


def a_context(gpus: int = 16, batch: int = 64, graph: Graph | None = None) -> PlanContext:
    """Return what a plan is completed with."""
    return PlanContext(
        graph=graph or a_decoder(),
        training=Training(global_batch=batch, micro_batches=8),
        shape=shape_of(gpus, 8),
    )


def a_plan(
    ends: tuple[int, ...] = (9, 18), stage: dict[str, Any] | None = None, **changes: Any
) -> ExecutionPlan:
    """Return a plan of stages with these ends, of 8 GPUs each unless ``stage`` says otherwise."""
    degrees = {"dp": 4, "tp": 2} if stage is None else stage
    starts = (0, *ends[:-1])
    stages = tuple(PlanStage(start=a, end=b, **degrees) for a, b in zip(starts, ends, strict=True))
    given: dict[str, Any] = {"micro_batch": 8, "accumulation": 8}
    return ExecutionPlan(stages=stages, **(given | changes))
