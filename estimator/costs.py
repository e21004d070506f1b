"""Costs of candidate stages as arrays: kernels, collectives, gradients, updates, transfers, memory.

A candidate is a contiguous segment of layers on ``dp * tp`` GPUs. Everything that depends on a
layer and a setting (dp, tp, ep, sp) is computed once for each of the D distinct settings. Running
sums over the layers then give each segment's cost as the difference of two values.
``docs/estimator/iteration-time.md`` describes the groups and the collectives that run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.hardware import Hardware
from tessera.estimator.layouts import ParallelSettings, settings_of
from tessera.estimator.memory import MemoryCopies, States, parameter_bytes, state_bytes
from tessera.estimator.plans import (
    Candidates,
    Compute,
    Groups,
    Network,
    Primitive,
    Shape,
    StageCosts,
    Training,
    powers_dividing,
    powers_of_two,
)
from tessera.formulation.tables import Bools, Floats, Ints

UPDATE_UTILISATION = 0.8
"""Share of the memory bandwidth that the optimizer's kernels reach. They only stream."""


def candidates_of(
    graph: Graph,
    shape: Shape,
    *,
    stage_gpus: Sequence[int] | None = None,
    expert_parallel: bool = True,
    sequence_parallel: bool = True,
) -> Candidates:
    """Return every segment of layers on every number of GPUs under every allowed setting.

    The number of GPUs of a stage is a power of two. A single stage (a job without a pipeline) may
    also have all GPUs. Tensor and expert degrees are powers of two that divide the GPUs. They are
    within the limits of the segment's layers, and each GPU has the same number of experts. Settings
    that change nothing are left out: expert degrees without experts, and sequence parallelism
    without a tensor group.
    """
    total = shape.gpus
    counts = sorted({*powers_of_two(total), total}) if stage_gpus is None else sorted(stage_gpus)
    settings = np.array(
        [
            (gpus // tp, tp, ep, sp)
            for gpus in counts
            for tp in powers_dividing(gpus)
            for ep in (powers_dividing(gpus) if expert_parallel else [1])
            for sp in ((0, 1) if sequence_parallel and tp > 1 else (0,))
        ],
        dtype=np.int64,
    ).reshape(-1, 4)
    start, end = np.triu_indices(len(graph))
    end = end + 1
    tensor_limit = _over_segments(graph.tensor_limit, np.minimum)[start, end]
    experts = _over_segments(graph.experts, np.maximum)[start, end]
    fits = (settings[None, :, 1] <= tensor_limit[:, None]) & (
        np.maximum(experts, 1)[:, None] % settings[None, :, 2] == 0
    )
    segment, setting = np.nonzero(fits)
    dp, tp, ep, sp = settings[setting].T
    return Candidates(
        start=start[segment].astype(np.int64),
        end=end[segment].astype(np.int64),
        dp=dp,
        tp=tp,
        ep=ep,
        sp=sp.astype(bool),
    )


def _over_segments(column: Floats, by: np.ufunc) -> Floats:
    """Return the minimum or maximum over layers ``a`` to ``b`` (exclusive), shape (L, L + 1).

    Entries with b <= a are 0.
    """
    count = len(column)
    table = np.zeros((count, count + 1))
    for a in range(count):
        table[a, a + 1 :] = by.accumulate(column[a:])
    return table


def stage_costs(
    graph: Graph,
    training: Training,
    hardware: Hardware,
    shape: Shape,
    candidates: Candidates,
    compute: Compute,
    network: Network,
    *,
    states: States | None = None,
    copies: MemoryCopies | None = None,
) -> StageCosts:
    """Return the costs of candidate stages.

    ``states`` describes ZeRO and offload. If it is None, neither is used.
    """
    kept = states or States()
    settings, which = settings_of(candidates, training, shape)
    ends = (which, candidates.start, candidates.end)
    forward_s, backward_s = _kernels_s(graph, training, compute, settings)
    comm_s = _collectives_s(graph, training, network, settings, kept)
    handed_s = _handed_s(graph, network, settings)
    rows = _Rows(graph, candidates, settings, which)
    running_s = _summed(forward_s, ends)
    return StageCosts(
        candidates=candidates,
        forward_s=np.where(_can_run(graph, training, candidates), running_s, np.inf),
        backward_s=_summed(backward_s, ends) + (training.forwards - 1) * running_s,
        comm_s=_summed(comm_s, ends),
        send_s=handed_s[which, candidates.end],
        receive_s=handed_s[which, candidates.start],
        sync_s=_syncs_s(graph, network, settings, rows, kept),
        update_s=_updates_s(graph, training, hardware, rows, kept),
        state_bytes=rows.states(graph, training, kept),
        flight_bytes=_flight_bytes(graph, training, rows),
        working_bytes=_working_bytes(graph, training, rows, kept, copies or MemoryCopies()),
    )


def _summed(layers: Floats, ends: tuple[Ints, Ints, Ints]) -> Floats:
    """Return the sums over segments, shape (K,), of the layer costs of settings, shape (D, L)."""
    which, start, end = ends
    total = np.zeros((layers.shape[0], layers.shape[1] + 1))
    np.cumsum(layers, axis=1, out=total[:, 1:])
    return np.asarray(total[which, end] - total[which, start], dtype=np.float64)


def _can_run(graph: Graph, training: Training, candidates: Candidates) -> Bools:
    """Return which candidates can run.

    Their degrees must be within the limits of the layers, and replicas need equal numbers of samples.
    """
    start, end = candidates.start, candidates.end
    tensor_limit = _over_segments(graph.tensor_limit, np.minimum)[start, end]
    experts = _over_segments(graph.experts, np.maximum)[start, end]
    runs = (candidates.tp <= tensor_limit) & (training.micro_batch % candidates.dp == 0)
    runs &= np.maximum(experts, 1) % candidates.ep == 0
    runs &= candidates.gpus % candidates.ep == 0
    return np.asarray(runs & (candidates.start < candidates.end), dtype=np.bool_)


def _kernels_s(
    graph: Graph, training: Training, compute: Compute, settings: ParallelSettings
) -> tuple[Floats, Floats]:
    """Return forward and backward seconds, shape (D, L).

    They are computed once for each distinct (samples, tp).
    """
    pairs = np.stack([settings.samples, settings.tp], axis=1)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    forward, backward = compute.layer_s(
        graph, training, distinct[:, 0], distinct[:, 1].astype(np.int64)
    )
    return forward[which], backward[which]


def _collectives_s(
    graph: Graph, training: Training, network: Network, settings: ParallelSettings, states: States
) -> Floats:
    """Return the seconds of a micro-batch's collectives in each layer, both passes, shape (D, L).

    Each backward pass mirrors its forward pass (Megatron-LM, figure 4). A repeated forward pass
    repeats the collectives as well.
    """
    passes = training.forwards + 1
    width = graph.element_bytes
    spread = _Spread(network, len(graph))
    count = message_counts(graph)
    reduced = width * settings.samples[:, None] * graph.reduced / count
    tensor = settings.tensor
    whole = spread.seconds(Primitive.ALL_REDUCE, reduced, tensor)
    if settings.sp.any():
        halves = spread.seconds(Primitive.REDUCE_SCATTER, reduced, tensor)
        halves += spread.seconds(Primitive.ALL_GATHER, reduced, tensor)
        whole = np.where(settings.sp[:, None], halves, whole)
    per_pass_s = count * whole
    if (settings.ep > 1).any():
        share = (settings.samples / settings.tp)[:, None]
        half = width * share * graph.exchanged / 2  # to the experts, and the same amount back
        per_pass_s += 2 * spread.seconds(Primitive.ALL_TO_ALL, half, settings.expert)
    return passes * per_pass_s + _divided_s(graph, training, spread, settings, states)


def _divided_s(
    graph: Graph, training: Training, spread: _Spread, settings: ParallelSettings, states: States
) -> Floats:
    """Return the seconds that ZeRO adds to a micro-batch in each layer, shape (D, L).

    Divided gradients (stages 2 and 3) are reduced after each backward pass. Divided weights (stage
    3) are gathered before each pass (ZeRO, section 7).
    """
    width, taken_s = graph.element_bytes, np.zeros((len(settings.dp), len(graph)))
    if states.zero < 2:
        return taken_s
    own = width * (graph.weights / settings.tp[:, None] + graph.shared_weights)
    experts = width * graph.expert_weights / settings.ep[:, None]
    for payload, groups in ((own, settings.data), (experts, settings.expert_data)):
        taken_s += spread.seconds(Primitive.REDUCE_SCATTER, payload, groups)
        if states.zero == 3:
            gathers = training.forwards + 1
            taken_s += gathers * spread.seconds(Primitive.ALL_GATHER, payload, groups)
    return taken_s


def message_counts(graph: Graph) -> Floats:
    """Return the number of all-reduces that carry a layer's ``reduced``, shape (L,).

    Each of them is as large as the layer's boundary. The last layer hands nothing on, so the
    boundary before it is used.
    """
    before = np.concatenate([graph.boundary[:1], graph.boundary[:-1]])
    message = np.where(graph.boundary > 0, graph.boundary, before)
    count = np.ones(len(graph))
    np.divide(graph.reduced, message, out=count, where=message > 0)
    return np.maximum(np.round(count), 1.0)


@dataclass(frozen=True, slots=True)
class _Spread:
    """A network that takes payloads of shape (D, L) for D groups."""

    network: Network
    layers: int

    def seconds(self, primitive: Primitive, payload: Floats, groups: Groups) -> Floats:
        shape = payload.shape
        rows = Groups(
            size=np.repeat(groups.size, self.layers),
            nodes=np.repeat(groups.nodes, self.layers),
            node_groups=np.repeat(groups.node_groups, self.layers),
        )
        return _positive_s(self.network, primitive, payload.ravel(), rows).reshape(shape)


def _positive_s(network: Network, primitive: Primitive, payload: Floats, groups: Groups) -> Floats:
    """Return the seconds of collectives. Where nothing is sent they are 0, without latency."""
    sent = np.flatnonzero((payload > 0) & (groups.size > 1)).astype(np.int64)
    taken = np.zeros(len(payload))
    if len(sent):
        taken[sent] = network.seconds(primitive, payload[sent], _select_groups(groups, sent))
    return taken


def _select_groups(groups: Groups, which: Ints) -> Groups:
    return Groups(
        size=groups.size[which], nodes=groups.nodes[which], node_groups=groups.node_groups[which]
    )


class _Rows:
    """Sums of graph columns over the candidates' segments, with their settings, of shape (K,)."""

    def __init__(
        self, graph: Graph, candidates: Candidates, settings: ParallelSettings, which: Ints
    ) -> None:
        self.start, self.end, self.which = candidates.start, candidates.end, which
        self.layers = len(graph)
        self.dp, self.tp, self.ep = candidates.dp, candidates.tp, candidates.ep
        self.sp = candidates.sp
        self.samples = settings.samples[which]
        self.own = self.total(graph.weights) / self.tp
        self.shared = self.total(graph.shared_weights)
        self.experts = self.total(graph.expert_weights) / self.ep
        self.expert_replicas = np.maximum(self.dp * self.tp // self.ep, 1)

    def total(self, column: Floats) -> Floats:
        """Return the sum over each segment."""
        running = np.concatenate([[0.0], np.cumsum(column)])
        return np.asarray(running[self.end] - running[self.start], dtype=np.float64)

    def most(self, column: Floats) -> Floats:
        """Return the maximum of each segment."""
        return np.asarray(
            _over_segments(column, np.maximum)[self.start, self.end], dtype=np.float64
        )

    def divided(self, parts: Floats, whole: Floats, by: Callable[[Floats], Floats]) -> Floats:
        """Return ``by`` of ``parts`` and ``whole`` as each GPU of a tensor group holds them.

        A tensor group always divides ``parts``, but ``whole`` only with sequence parallelism.
        """
        return by(parts) / self.tp + by(whole) / np.where(self.sp, self.tp, 1)

    def states(self, graph: Graph, training: Training, states: States) -> Floats:
        """Return the bytes of states on a GPU."""
        dense = state_bytes(graph, training, states, self.own + self.shared, self.dp)
        return dense + state_bytes(graph, training, states, self.experts, self.expert_replicas)


def _handed_s(graph: Graph, network: Network, settings: ParallelSettings) -> Floats:
    """Return the seconds to send a micro-batch's activations across a cut, and gradients back.

    The shape is (D, L + 1), for the cut before each layer. Nothing is sent before the first layer
    or after the last.

    Each GPU sends its part of the tensor group's activations to a partner in the next stage
    (Narayanan et al., SC 2021, section 4.1), where they are gathered. The next stage is assumed to
    be like this one. A job on several nodes has a pair of stages on different nodes, and its slower
    path counts for all.
    """
    taken_s = np.zeros((len(settings.dp), len(graph) + 1))
    inner = graph.boundary[:-1]
    if settings.shape.gpus < 2 or not len(inner):
        return taken_s
    pairs = Groups(
        size=np.full_like(settings.gpus, 2),
        nodes=np.full_like(settings.gpus, min(settings.shape.nodes, 2)),
        node_groups=np.minimum(settings.gpus, settings.shape.gpus_per_node),
    )
    spread = _Spread(network, len(inner))
    payload = graph.element_bytes * settings.samples[:, None] * inner
    whole = np.where(settings.sp[:, None], 0.0, payload)
    sent_s = spread.seconds(Primitive.SEND, payload / settings.tp[:, None], pairs)
    gathered_s = spread.seconds(Primitive.ALL_GATHER, whole, settings.tensor)
    taken_s[:, 1:-1] = 2 * (sent_s + gathered_s)
    return taken_s


def _syncs_s(
    graph: Graph, network: Network, settings: ParallelSettings, rows: _Rows, states: States
) -> Floats:
    """Return the seconds of the gradient exchange between replicas, once per iteration.

    Weights are exchanged over the data-parallel group, and an expert's weights over the GPUs that
    also hold it. Weights that tensor parts share have equal gradients on each part, unless the
    parts hold different positions of a sequence. Under ZeRO, the updated parts are gathered. ZeRO 2
    and 3 have already reduced the gradients.
    """
    width = graph.element_bytes

    def exchanged_s(parameters: Floats, groups: Groups) -> Floats:
        payload, group = width * parameters, _select_groups(groups, rows.which)
        match states.zero:
            case 0:
                return _positive_s(network, Primitive.ALL_REDUCE, payload, group)
            case 3:
                return np.zeros(len(payload))
        gathered_s = _positive_s(network, Primitive.ALL_GATHER, payload, group)
        if states.zero == 2:
            return gathered_s
        return gathered_s + _positive_s(network, Primitive.REDUCE_SCATTER, payload, group)

    split = np.where(rows.sp, rows.shared, 0.0)
    taken_s = exchanged_s(rows.own + rows.shared - split, settings.data)
    if split.any():
        taken_s = taken_s + exchanged_s(split, settings.everyone)
    if graph.expert_weights.any():
        taken_s = taken_s + exchanged_s(rows.experts, settings.expert_data)
    return taken_s


def _updates_s(
    graph: Graph, training: Training, hardware: Hardware, rows: _Rows, states: States
) -> Floats:
    """Return the seconds of the optimizer, which reads and writes all states once.

    Under ZeRO, each replica updates its part of the states.
    """
    shared_out = states.zero >= 1
    updated = (rows.own + rows.shared) / (rows.dp if shared_out else 1)
    updated = updated + rows.experts / (rows.expert_replicas if shared_out else 1)
    if not states.offload:
        rate = hardware.memory_bytes_per_s * UPDATE_UTILISATION
        return np.asarray(2 * training.state_bytes * updated / rate, dtype=np.float64)
    weight, gradient, _ = parameter_bytes(graph, training)
    moved_s = (weight + gradient) * updated / states.moved_bytes_per_s(hardware)
    # One host updates the states of all GPUs of the stage on its node.
    host_gpus = np.minimum(rows.dp * rows.tp, hardware.gpus_per_node)
    host_rate = states.updated_bytes_per_s(hardware, host_gpus)
    host_s = 2 * training.state_bytes * updated * host_gpus / host_rate
    return np.asarray(moved_s + host_s, dtype=np.float64)


def _flight_bytes(graph: Graph, training: Training, rows: _Rows) -> Floats:
    """Return the bytes of a micro-batch that a GPU keeps between the two passes.

    They are the inputs of layers and whatever else a backward pass needs. Inputs are whole on each
    tensor part unless the sequence is divided. The rest is not kept if the forward pass is
    repeated.
    """
    inputs = _inputs(graph)
    divided = np.zeros(len(graph)) if training.checkpointing else graph.kept - graph.unsplit
    whole = inputs if training.checkpointing else inputs + graph.unsplit
    return graph.element_bytes * rows.samples * rows.divided(divided, whole, rows.total)


def _inputs(graph: Graph) -> Floats:
    """Return the activations handed to each layer, shape (L,). The first layer receives none."""
    return np.concatenate([[0.0], graph.boundary[:-1]])


def _working_bytes(
    graph: Graph, training: Training, rows: _Rows, states: States, copies: MemoryCopies
) -> Floats:
    """Return the bytes in use while a micro-batch is computed, but not between its passes.

    They are the largest layer's activations with their gradients, the input and output of a stage,
    and the buffers of collectives. If the forward pass is repeated, what the layer keeps is added.
    """
    repeated = 1.0 if training.checkpointing else 0.0
    divided, whole = repeated * (graph.kept - graph.unsplit), repeated * graph.unsplit
    alive = graph.working + copies.unfused * graph.unfused
    layer = copies.layer * rows.divided(2 * alive + divided, whole, rows.most)
    stage = copies.stage * rows.divided(divided, whole, rows.total) if copies.stage else 0.0
    edges = _inputs(graph)[rows.start] + graph.boundary[rows.end - 1]
    total = rows.samples * (layer + stage + edges) + _buffers(graph, rows, states, copies)
    return np.asarray(graph.element_bytes * total, dtype=np.float64)


def _buffers(graph: Graph, rows: _Rows, states: States, copies: MemoryCopies) -> Floats:
    """Return the scalars that collectives hold in addition to their operands.

    They are the largest all-reduce or all-to-all of a micro-batch or, under ZeRO 3, the largest
    layer of gathered weights. Gradients on their way between replicas are added, except under ZeRO
    2 and 3, which reduce them layer by layer.
    """
    reduced = rows.most(graph.reduced / message_counts(graph)) * (rows.tp > 1)
    exchanged = rows.most(graph.exchanged) / 2 / rows.tp * (rows.ep > 1)
    largest = rows.samples * np.maximum(reduced, exchanged)
    if states.zero < 2:
        exchanged = np.where(rows.dp > 1, rows.own + rows.shared, 0.0)
        exchanged += np.where(rows.expert_replicas > 1, rows.experts, 0.0)
        return np.asarray(largest + copies.gradients * exchanged, dtype=np.float64)
    if states.zero == 2:
        return largest
    dense = rows.most(graph.weights) / rows.tp + rows.most(graph.shared_weights)
    experts = rows.most(graph.expert_weights) / rows.ep
    gathered = dense * (rows.dp > 1) + experts * (rows.expert_replicas > 1)
    return np.asarray(np.maximum(largest, gathered), dtype=np.float64)
