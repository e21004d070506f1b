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

from tessera.estimator.cells import Setting, coarsen_graph
from tessera.estimator.costs import message_counts
from tessera.estimator.graph import Graph
from tessera.estimator.pipeline import Overlap, Transfers, iteration_s, pipelines_of
from tessera.estimator.plans import Candidates, PricedPlan, StageCosts, Training
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import PlanStage
from tessera.formulation.network.traffic import CellTraffic, StageTraffic

BytesAndMessages = tuple[float, int]


def traffic_of(setting: Setting, plan: PricedPlan) -> CellTraffic:
    """Return the traffic of one iteration of ``plan``.

    ``plan`` is a plan that :mod:`tessera.estimator.cells` returned for this setting. Compute is its
    pipeline without any communication. Gradients can be sent after the last backward pass has
    begun, and everything else as soon as there are activations. Communication as a whole therefore
    begins at the mean of the two moments, weighted by bytes.

    Raises:
        InvalidInput: the plan cannot run in this setting (it has more replicas than samples, or a
            degree above a limit).
    """
    merged = coarsen_graph(setting.graph, plan.merged_layers)
    training = setting.training.within(plan.micro_batches)
    coarse = replace(setting, graph=merged.graph, training=training)
    parts = [merged.coarse_stage(stage) for stage in plan.stages]
    zero = setting.runtime.states.zero
    stages = tuple(
        stage_traffic(coarse.graph, training, zero, part, last=k + 1 == len(parts))
        for k, part in enumerate(parts)
    )
    passes = training.forwards + 2  # a backward pass costs two forward ones
    compute_s, last_backward_s = _compute_s(coarse, parts)
    if not np.isfinite(compute_s):
        raise InvalidInput("plan", f"cannot run in this setting: {plan.stages}")
    start_s = gradient_share(stages) * (compute_s - last_backward_s)
    return CellTraffic(
        work_flop=float(coarse.graph.flops.sum()) * passes * training.global_batch,
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
        s.gpus * (s.tensor[0] + s.expert[0] * (s.ep - 1) + 2 * s.handed[0]) for s in stages
    )
    return gradients / (gradients + others) if gradients + others else 0.0


def _compute_s(setting: Setting, stages: Sequence[PlanStage]) -> tuple[float, float]:
    """Return the seconds of the pipeline without communication.

    The second result is the seconds of its longest backward pass and update.
    """
    costs = setting.costs(_candidates(stages))
    quiet = _without_collectives(costs)
    pipelines = pipelines_of(quiet, np.arange(len(stages), dtype=np.int64)[None])
    free = Overlap(transfers=Transfers.FREE)
    whole_s = float(iteration_s(pipelines, setting.training.micro_batches, free)[0])
    return whole_s, float((costs.backward_s + costs.update_s).max())


def _without_collectives(costs: StageCosts) -> StageCosts:
    none = np.zeros(len(costs.candidates))
    return replace(costs, comm_s=none, send_s=none, receive_s=none, sync_s=none)


def _candidates(stages: Sequence[PlanStage]) -> Candidates:
    def column(name: str) -> list[int]:
        return [getattr(stage, name) for stage in stages]

    return Candidates(
        start=np.array(column("start"), dtype=np.int64),
        end=np.array(column("end"), dtype=np.int64),
        dp=np.array(column("dp"), dtype=np.int64),
        tp=np.array(column("tp"), dtype=np.int64),
        ep=np.array(column("ep"), dtype=np.int64),
        sp=np.array(column("sp"), dtype=np.bool_),
    )


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
        handed=(0.0, 0) if last else (training.micro_batches * boundary, training.micro_batches),
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
