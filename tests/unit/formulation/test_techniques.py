"""The techniques that execution plans use, and the words that name them."""

from __future__ import annotations

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Recomputation,
    ZeroStage,
)
from tessera.formulation.techniques import (
    Technique,
    read_techniques,
    refuse_techniques,
    techniques_of,
)


def test_a_plan_uses_the_techniques_of_its_degrees_and_switches() -> None:
    stages = (PlanStage(start=0, end=2, dp=2, tp=2), PlanStage(start=2, end=4, dp=2, tp=2))
    pipeline = ExecutionPlan(stages=stages, micro_batch=4, accumulation=8)
    assert techniques_of(pipeline) == {"dp", "tp", "pp"}
    alone = ExecutionPlan(
        stages=(PlanStage(start=0, end=4),),
        micro_batch=2,
        accumulation=4,
        zero=ZeroStage.GRADIENTS,
        offload=Offload.OPTIMIZER,
        recomputation=Recomputation.FULL,
    )
    assert techniques_of(alone) == {"zero2", "offload", "checkpointing", "accumulation"}


def test_words_name_techniques_in_one_order() -> None:
    words = ["ZeRO3", " dp", "dp"]
    assert read_techniques("techniques", words) == (Technique.DATA_PARALLELISM, Technique.ZERO_3)


def test_an_unknown_technique_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidInput, match="has 'fsdp', but techniques are dp, tp, pp"):
        read_techniques("techniques", ["fsdp"])


def test_a_plan_is_refused_if_it_uses_a_technique_that_is_not_named() -> None:
    plan = ExecutionPlan(
        stages=(PlanStage(start=0, end=4, dp=2, tp=2),), micro_batch=4, zero=ZeroStage.PARAMETERS
    )
    assert refuse_techniques(plan, ()) == ""
    assert refuse_techniques(plan, read_techniques("t", ["dp", "tp", "zero3", "pp"])) == ""
    problem = refuse_techniques(plan, read_techniques("t", ["dp", "zero1"]))
    assert problem == "uses tp, zero3, and the job's techniques are dp, zero1"
