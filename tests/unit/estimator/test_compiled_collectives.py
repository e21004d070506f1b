"""Estimated collectives next to those that XLA compiled for the same steps, as recorded.

JAX 0.10.2 compiled each step with its optimizer for ``dp * tp`` CPU devices, 2 samples a replica.
The bytes are those that each device sends in a ring. All-reduces whose results are only added up
count once, collectives that the CPU back end widened have 16 bits, and an all-reduce of which each
device keeps a part is a reduce-scatter, as on GPUs. The code that read them is in the history
before "Delete the check of collectives against XLA".
"""

from __future__ import annotations

from typing import Any

import pytest

from tessera.estimator.plans import Training
from tessera.estimator.tracing.models import steps
from tessera.estimator.tracing.trace import graph_of_step
from tessera.estimator.traffic import stage_traffic
from tessera.formulation.job.execution_plan import PlanStage

SAMPLES_PER_REPLICA = 2
TINY: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "vocabulary": 512,
    "sequence": 32,
    "dtype": "f32",
}
NET = {"base": 16, "width": 1, "side": 32, "classes": 16}
PICTURES = {"hidden": 64, "layers": 2, "heads": 4, "side": 64, "patch": 8}


def estimated_bytes(
    function: str, arguments: dict[str, Any], dp: int, tp: int, *, zero: bool
) -> tuple[float, float]:
    """Return the ring bytes of a step in tensor groups and in data groups."""
    graph = graph_of_step(getattr(steps, function)(**arguments))
    stage = PlanStage(start=0, end=len(graph), dp=dp, tp=tp)
    training = Training(global_batch=SAMPLES_PER_REPLICA * dp, micro_batches=1)
    traffic = stage_traffic(graph, training, 2 if zero else 0, stage, last=True)
    return float(traffic.tensor[0]), float(traffic.data[0] + traffic.expert_data[0])


@pytest.mark.parametrize(
    ("function", "arguments", "dp", "tp", "zero", "tensor", "data", "within"),
    [
        ("decoder", TINY, 2, 2, False, 164_608, 272_900, 0.01),
        ("decoder", TINY | {"llama": 1}, 1, 2, False, 164_608, 0, 0.01),
        ("decoder", TINY | {"experts": 4, "expert_group": 64}, 2, 1, False, 0, 929_284, 0.001),
        ("decoder", TINY | {"dtype": "bf16"}, 2, 2, True, 82_816, 140_548, 0.05),
        ("wide_resnet", NET, 2, 1, False, 0, 6_062_916, 0.03),
        ("vision", PICTURES, 1, 2, False, 146_328, 0, 0.05),
        ("encoder_decoder", TINY, 1, 2, False, 402_816, 0, 0.05),
    ],
)
def test_estimated_collectives_are_near_those_that_xla_compiled(
    function: str,
    arguments: dict[str, Any],
    dp: int,
    tp: int,
    zero: bool,
    tensor: float,
    data: float,
    within: float,
) -> None:
    estimated = estimated_bytes(function, arguments, dp, tp, zero=zero)
    assert estimated == pytest.approx((tensor, data), rel=within)


def test_the_flops_of_a_compiled_step_are_three_times_those_of_the_forward_pass() -> None:
    graph = graph_of_step(steps.decoder(**TINY))
    compiled_flops = 29_281_864 * 4  # of 4 devices, with an optimizer of 10 a weight, for 4 samples
    assert 3 * graph.flops.sum() * 4 == pytest.approx(compiled_flops, rel=0.15)


def test_heads_that_do_not_divide_leave_attention_whole_so_no_plan_divides_them() -> None:
    arguments: dict[str, Any] = TINY | {"heads": 5, "hidden": 80}
    assert graph_of_step(steps.decoder(**arguments)).tensor_limit.min() == 1
    tensor, _ = estimated_bytes("decoder", arguments, 1, 2, zero=False)
    assert tensor > 1.6 * 123_648  # what XLA compiled
