"""Random execution plans for property tests, and a plan of equal stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

from hypothesis import strategies as st

from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.records.estimates import EstimateRecord


@st.composite
def execution_plans(draw: st.DrawFn) -> ExecutionPlan:
    """Return plans of up to eight stages, with all switches."""
    degree = draw(st.integers(1, 4))
    schedule = draw(st.sampled_from(Schedule))
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    sizes = draw(st.lists(st.integers(1, 9), min_size=degree * chunks, max_size=degree * chunks))
    degrees = [_degrees(draw) for _ in range(degree)]
    ends = [0, *accumulate(sizes)]
    stages = tuple(
        PlanStage(start=start, end=end, **degrees[i % degree])
        for i, (start, end) in enumerate(pairwise(ends))
    )
    nodes = draw(st.sampled_from([(), (sum(s.gpus for s in stages[:degree]),)]))
    zero = draw(st.sampled_from(ZeroStage))
    offloads = [o for o in Offload if o is not Offload.PARAMETERS or zero is ZeroStage.PARAMETERS]
    return ExecutionPlan(
        stages=stages,
        micro_batch=lcm(*(stage.dp for stage in stages)) * draw(st.integers(1, 3)),
        accumulation=degree * draw(st.integers(1, 4)),
        schedule=schedule,
        chunks=chunks,
        zero=zero,
        offload=draw(st.sampled_from(offloads)),
        recomputation=draw(st.sampled_from(Recomputation)),
        precision=draw(st.sampled_from(Precision)),
        shape=nodes,
        model=draw(st.sampled_from(["", "gpt/1.3B"])),
    )


def _degrees(draw: st.DrawFn) -> dict[str, Any]:
    dp, tp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    ep = draw(st.sampled_from([d for d in (1, 2, 4) if dp * tp * cp % d == 0]))
    return {"dp": dp, "tp": tp, "cp": cp, "ep": ep, "sp": tp > 1 and draw(st.booleans())}


def a_plan(workload: Workload, gpus: int, degree: int = 1, **changes: Any) -> ExecutionPlan:
    """Return a plan of tensor-parallel stages, each of one layer, in one micro-batch."""
    stages = tuple(PlanStage(start=i, end=i + 1, tp=gpus // degree) for i in range(degree))
    plan = ExecutionPlan(stages=stages, micro_batch=workload.global_batch)
    return replace(plan, **changes)


def with_own_plan(estimate: EstimateRecord, **changes: Any) -> EstimateRecord:
    """Return the estimate under a plan of its own."""
    cell = estimate.cell
    return estimate.with_plan(a_plan(estimate.workload, cell.gpus, cell.pipeline_degree, **changes))
