"""The Cells of the benchmark's model, with the plans of each tuning space."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.types import Link
from tessera.estimator.models import read_model
from tessera.estimator.plans import Shape
from tessera.estimator.tuning_plans import MAX_COUNT, list_tuning_plans
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.formulation.launch import TuningSpace
from tessera.formulation.records.estimates import ModelSpec
from tessera.formulation.runtimes import RUNTIMES
from tessera.formulation.values import Cell, Workload

CORE: Final = Hardware(
    name="core",
    memory_bytes=2**32,
    fp32_flops=1e11,
    fp16_flops=1e11,
    memory_bytes_per_s=1e10,
    gpus_per_node=64,
    link=Link.PCIE,
    link_bytes_per_s=1e10,
    network_bytes_per_s=1e10,
)
"""A processor core as a GPU type, with round numbers as of a data sheet. Nothing here was measured."""

MODEL: Final = "gpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of the GPT: blocks, width, attention heads, tokens of a sample, and vocabulary."""

    blocks: int
    width: int = 128
    heads: int = 4
    sequence: int = 64
    vocabulary: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedCell:
    """A Cell with the plan of its estimate, and the plans of each space."""

    degree: int
    plan: ExecutionPlan
    spaces: dict[TuningSpace, tuple[ExecutionPlan, ...]]


def list_cells(
    size: ModelSize,
    devices: int,
    degrees: Sequence[int],
    batch: int,
    micro_batches: int,
    runtime: str,
) -> list[TunedCell]:
    """Return the Cell of each pipeline degree on one node of ``devices`` devices.

    Raises:
        InvalidInput: a degree has no plan that the runtime can run.
    """
    workload = Workload(model=MODEL, params="", global_batch=batch)
    architecture = {
        "architecture": "transformer",
        "layers": size.blocks,
        "hidden": size.width,
        "heads": size.heads,
        "sequence": size.sequence,
        "vocabulary": size.vocabulary,
        "dtype": "f32",
        "tied": False,
    }
    spec = ModelSpec(
        model=MODEL, params="", architecture=json.dumps(architecture), micro_batches=micro_batches
    )
    estimator = Estimator({CORE.name: CORE}, {workload: read_model("model", spec)})
    shape = Shape(nodes=1, gpus_per_node=devices)
    cells = []
    for estimate in estimator.cells(workload, CORE.name, devices, degrees, nodes=1):
        degree, plan = estimate.record.cell.pipeline_degree, estimate.record.plan
        cell = Cell(gpu_type=CORE.name, gpus=devices, pipeline_degree=degree, nodes=1)
        setting = estimator.setting(workload, cell, shape)
        spaces: dict[TuningSpace, tuple[ExecutionPlan, ...]] = {}
        if plan is not None and not RUNTIMES[runtime].refuse_plan(plan):
            for space in TuningSpace:
                found = list_tuning_plans(setting, plan, runtime, space, most=MAX_COUNT)
                spaces[space] = () if found is None else found.plans
        if plan is None or not all(spaces.get(space) for space in TuningSpace):
            raise InvalidInput(
                "degrees",
                f"{degree} stages of {size.blocks + 2} layers have no plans on {devices} devices; leave"
                " the degree out, or use more blocks",
            )
        cells.append(TunedCell(degree=degree, plan=plan, spaces=spaces))
    return cells
