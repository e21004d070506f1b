"""The traffic between the GPUs of a plan in one iteration, and the time at which it starts.

The groups and collectives are those whose times :mod:`tessera.estimator.costs` computes. Here they
are bytes. In a ring of n members, an all-reduce of V bytes sends 2 V (n-1) / n bytes from each
member to the next, and a reduce-scatter or an all-gather sends V (n-1) / n. A collective sends one
message for each of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tessera.estimator.cells import Setting
from tessera.estimator.costs import message_counts
from tessera.estimator.graph import Graph
from tessera.estimator.plans import Training
from tessera.estimator.pricing.price import plan_costs, plan_seconds, plan_setting
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage, join_chunks
from tessera.formulation.state.traffic import CellTraffic, StageTraffic

BytesAndMessages = tuple[float, int]


def traffic_of(setting: Setting, plan: ExecutionPlan) -> CellTraffic | None:
    """Return the traffic of one iteration of a plan, or None if it divides sequences.

    Traffic inside such sequences is not modelled. Compute is the plan's pipeline without any
    communication, its chunks joined. Gradients can be sent after the last backward pass has begun,
    and everything else as soon as there are activations. Communication as a whole therefore begins
    at the mean of the two moments, weighted by bytes.

    Raises:
        InvalidInput: the plan cannot run in this setting (it has more replicas than samples, or a
            degree above a limit).
    """
    if any(stage.cp > 1 for stage in plan.stages):
        return None
    whole = join_chunks(plan)
    run = plan_setting(setting, whole)
    stages = tuple(
        stage_traffic(
            run.graph, run.training, whole.zero.value, stage, last=stage is whole.stages[-1]
        )
        for stage in whole.stages
    )
    passes = run.training.forwards + 2  # a backward pass costs two forward ones
    compute_s, last_backward_s = _compute_s(setting, whole)
    if not np.isfinite(compute_s):
        raise InvalidInput("plan", f"cannot run in this setting: {plan}")
    start_s = gradient_share(stages) * (compute_s - last_backward_s)
    return CellTraffic(
        work_flop=float(run.graph.flops.sum()) * passes * run.training.global_batch,
        compute_s=compute_s,
        start_s=start_s,
        stages=stages,
    )


def gradient_share(stages: Sequence[StageTraffic]) -> float:
    """Return the share of gradients in the bytes that all GPUs send.

    If nothing is sent, return 0.
    """
    gradients = sum(s.gpus * (s.data[0] + s.expert_data[0]) for s in stages)
    others = sum(
        s.gpus * (s.tensor[0] + s.expert[0] * (s.ep - 1) + 2 * s.pipeline[0]) for s in stages
    )
    return gradients / (gradients + others) if gradients + others else 0.0


def _compute_s(setting: Setting, plan: ExecutionPlan) -> tuple[float, float]:
    """Return the seconds of a plan's pipeline without communication.

    The second result is the seconds of its longest backward pass and update.
    """
    costs = plan_costs(setting, plan)
    none = np.zeros(len(plan.stages))
    quiet = replace(costs, comm_s=none, send_s=none, receive_s=none, sync_s=none)
    whole_s = float(plan_seconds(setting, plan, quiet)[0])
    return whole_s, float((costs.backward_s + costs.update_s).max())


def stage_traffic(
    graph: Graph, training: Training, zero: int, stage: PlanStage, *, last: bool
) -> StageTraffic:
    """Return the traffic of each GPU of a stage of ``graph`` in one iteration.

    ``zero`` is the stage of ZeRO. ``last`` says that the stage hands nothing on.
    """
    layers = slice(stage.start, stage.end)
    width = graph.element_bytes
    samples = float(np.ceil(training.micro_batch / stage.dp))
    each = training.micro_batches * _passes(training)
    reduced = float(graph.reduced[layers].sum()) * width * samples
    in_turn = int(message_counts(graph)[layers][graph.reduced[layers] > 0].sum())
    exchanged = float(graph.exchanged[layers].sum()) * width * samples / stage.tp
    boundary = float(graph.boundary[stage.end - 1]) * width * samples / stage.tp
    own = width * float(graph.weights[layers].sum() / stage.tp + graph.shared_weights[layers].sum())
    experts = width * float(graph.expert_weights[layers].sum()) / stage.ep
    return StageTraffic(
        dp=stage.dp,
        tp=stage.tp,
        ep=stage.ep,
        tensor=_ring(reduced, stage.tp, 2 * each, in_turn),
        data=_gradients(own, stage.dp, zero, training),
        expert_data=_gradients(experts, stage.gpus // stage.ep, zero, training),
        expert=(each * exchanged / stage.ep, 2 * each if exchanged else 0),
        pipeline=(0.0, 0) if last else (training.micro_batches * boundary, training.micro_batches),
    )


def _passes(training: Training) -> int:
    """Return the passes over a micro-batch: forward, repeated forward and backward."""
    return training.forwards + 1


def _ring(payload_bytes: float, size: int, rounds: int, in_turn: int = 1) -> BytesAndMessages:
    """Return the bytes and messages of a ring of ``size`` GPUs.

    There are ``rounds`` rounds, each with ``in_turn`` messages per step.
    """
    if size < 2 or payload_bytes <= 0:
        return 0.0, 0
    return rounds * payload_bytes * (size - 1) / size, rounds * in_turn * (size - 1)


def _gradients(payload_bytes: float, size: int, zero: int, training: Training) -> BytesAndMessages:
    """Return the traffic of gradients and weights between replicas under ZeRO (its section 7)."""
    match zero:
        case 0 | 1:
            rounds = 2  # all-reduce, or reduce-scatter and all-gather
        case 2:
            rounds = training.micro_batches + 1
        case _:
            rounds = training.micro_batches * (1 + _passes(training))
    return _ring(payload_bytes, size, rounds)
